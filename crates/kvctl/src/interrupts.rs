//! Waiting that a signal, or a reader who leaves, ends.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::SigId;
use signal_hook::low_level::{pipe, unregister};

/// While it lives, these signals end no process: they end [`Interrupts::wait`].
pub(crate) struct Interrupts {
    /// Readable once a signal came. A pipe and no flag: a signal between a look at a flag and the wait would be lost.
    arrived: UnixStream,
    registered: Vec<SigId>,
}

impl Interrupts {
    pub(crate) fn listen(signals: &[i32]) -> io::Result<Self> {
        let (arrived, write) = UnixStream::pair()?;
        let mut interrupts = Self { arrived, registered: Vec::new() };
        for &signal in signals {
            interrupts.registered.push(pipe::register(signal, write.try_clone()?)?);
        }
        Ok(interrupts)
    }

    /// False after `time`; true, at once, where a signal came or nobody reads standard output any more.
    pub(crate) fn wait(&self, time: Duration) -> io::Result<bool> {
        let timeout = Timespec::try_from(time).map_err(io::Error::other)?;
        let stdout = io::stdout();
        // No events of standard output are asked for: that its reader has gone is always told.
        let mut watched =
            [PollFd::new(&self.arrived, PollFlags::IN), PollFd::new(&stdout, PollFlags::empty())];
        match poll(&mut watched, Some(&timeout)) {
            Ok(0) => Ok(false),
            Ok(_) => Ok(true),
            // Some other signal: one round is shorter. One of ours shows in the next.
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        for &id in &self.registered {
            unregister(id);
        }
    }
}
