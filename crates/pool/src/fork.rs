//! Whose a pool is. A fork of the process inherits the value, and its lock perhaps held by a thread that the fork does not
//! have, but none of the memory.
//!
//! Asking the system for the process id would cost several times what a reading of the pool does, so whoever forks says so.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::PoolError;

/// Forks that lie between the first process and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Says that this process is a fork: every pool that it has inherited refuses from now on. To be called there before
/// anything else of this crate.
pub fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The process that made something.
#[derive(Debug)]
pub(crate) struct Owner {
    pid: u32,
    forks: u32,
}

impl Owner {
    pub fn this_process() -> Self {
        Owner { pid: std::process::id(), forks: FORKS.load(Ordering::Relaxed) }
    }

    /// Fails with `Forked` in a fork that has said so. Makes no system call.
    pub fn check(&self) -> Result<(), PoolError> {
        match FORKS.load(Ordering::Relaxed) == self.forks {
            true => Ok(()),
            false => Err(PoolError::Forked { owner: self.pid }),
        }
    }

    /// Whether this is another process, also where nobody said so.
    pub fn is_other(&self) -> bool {
        self.check().is_err() || std::process::id() != self.pid
    }
}
