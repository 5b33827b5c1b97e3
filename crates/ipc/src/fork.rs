//! Whose connections and threads these are. A fork of the process inherits the values and none of the threads.

use crate::error::IpcError;

/// The process that made something.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owner {
    pid: u32,
}

impl Owner {
    pub fn this_process() -> Self {
        Owner { pid: std::process::id() }
    }

    /// Fails in a fork, where a lock may be held for good: to be asked before any is taken.
    pub fn check(self) -> Result<(), IpcError> {
        match std::process::id() == self.pid {
            true => Ok(()),
            false => Err(IpcError::Forked { owner: self.pid }),
        }
    }
}
