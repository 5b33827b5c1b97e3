//! Waiting that a signal, or a reader who leaves, ends.

use std::io::{self, Stdin};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::SigId;
use signal_hook::low_level::{pipe, unregister};

/// Why a wait is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    Time,
    Input,
    /// A signal came, or the terminal or the reader of standard output has gone.
    End,
}

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

    /// Waits for `time`, for something to read from `input`, or for the end.
    pub(crate) fn wait(&self, time: Duration, input: Option<&Stdin>) -> io::Result<Woken> {
        let timeout = Timespec::try_from(time).map_err(io::Error::other)?;
        let stdout = io::stdout();
        // No events of standard output are asked for: that its reader has gone is always told.
        let mut watched =
            vec![PollFd::new(&self.arrived, PollFlags::IN), PollFd::new(&stdout, PollFlags::empty())];
        watched.extend(input.map(|input| PollFd::new(input, PollFlags::IN)));
        match poll(&mut watched, Some(&timeout)) {
            Ok(_) => {}
            // Some other signal: one round is shorter. One of ours shows in the next.
            Err(Errno::INTR) => return Ok(Woken::Time),
            Err(errno) => return Err(errno.into()),
        }
        let [signal, rest @ ..] = &watched[..] else { return Ok(Woken::Time) };
        let is_gone = |fd: &PollFd<'_>| !fd.revents().difference(PollFlags::IN).is_empty();
        if !signal.revents().is_empty() || rest.iter().any(is_gone) {
            return Ok(Woken::End);
        }
        let is_readable = rest.iter().any(|fd| fd.revents().contains(PollFlags::IN));
        Ok(if is_readable { Woken::Input } else { Woken::Time })
    }
}

/// For a wait of another kind: readable once a signal came.
impl AsFd for Interrupts {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arrived.as_fd()
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        for &id in &self.registered {
            unregister(id);
        }
    }
}
