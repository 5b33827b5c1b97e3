//! Frames over Unix stream sockets. Each says its own length in its header.
//!
//! Sockets never block: what the kernel does not take is kept, up to a bound, and sent by the thread that polls. So sending is
//! quick under any lock, and one peer that does not read holds up nobody else.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::IpcError;
use crate::wire::{self, Decoded, HEADER_BYTES, MAX_FRAME_BYTES, WireError};

/// Bytes taken from a socket at a time, before others have their turn.
const READ_BYTES: usize = 64 << 10;
/// What may wait to be sent to one peer.
const MAX_OUTBOX_BYTES: usize = 2 * MAX_FRAME_BYTES;
/// Between attempts to connect to a socket whose queue is full.
const CONNECT_PAUSE: Duration = Duration::from_millis(2);

/// One end of a connection to a process of the same user.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: UnixStream,
    outbox: Mutex<Outbox>,
}

#[derive(Debug, Default)]
struct Outbox {
    bytes: Vec<u8>,
    /// Of them, already sent.
    sent: usize,
    /// When the peer last took something, or the first of these came.
    since: Option<Instant>,
}

/// What became of a frame that was to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    Whole,
    /// The rest goes when the peer reads: the polling thread has to know.
    Kept,
}

/// Puts frames together from the bytes of a connection.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    bytes: Vec<u8>,
    /// When the frame at the front began.
    since: Option<Instant>,
}

impl Connection {
    /// Refuses a peer that is another user's process.
    pub fn new(stream: UnixStream, path: &Path) -> Result<Self, IpcError> {
        let failed = |source| IpcError::io("connect", path, source);
        stream.set_nonblocking(true).map_err(failed)?;
        let peer = rustix::net::sockopt::socket_peercred(&stream)
            .map_err(|errno| IpcError::io("look at the peer of", path, errno))?;
        let uid = rustix::process::geteuid();
        if peer.uid != uid {
            let (peer, uid) = (peer.uid.as_raw(), uid.as_raw());
            return Err(IpcError::PeerNotOurs { path: path.to_path_buf(), peer, uid });
        }
        Ok(Self { stream, outbox: Mutex::default() })
    }

    /// Connects to a listening socket. Ends by `deadline` whatever the other side does.
    pub fn to(path: &Path, deadline: Instant) -> Result<Self, IpcError> {
        let failed = |errno| IpcError::io("connect to", path, errno);
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                .map_err(failed)?;
            match rustix::net::connect(&socket, &address) {
                Ok(()) => return Self::new(UnixStream::from(socket), path),
                // Its queue is full: a server that lives takes somebody from it soon.
                Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => {
                    std::thread::sleep(CONNECT_PAUSE);
                }
                Err(errno) => return Err(failed(errno)),
            }
        }
    }

    /// Sends a frame, or keeps what does not go out at once. Frames arrive in the order of these calls. Fails where the peer is
    /// gone, or more is kept for it than it may be.
    pub fn send(&self, frame: &[u8]) -> io::Result<Sent> {
        let mut outbox = self.outbox();
        let sent = match outbox.bytes.is_empty() {
            true => self.write(frame)?,
            false => 0,
        };
        if sent == frame.len() {
            return Ok(Sent::Whole);
        }
        if outbox.bytes.len() + frame.len() - sent > MAX_OUTBOX_BYTES {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "the peer does not read"));
        }
        outbox.bytes.extend_from_slice(&frame[sent..]);
        outbox.since.get_or_insert_with(Instant::now);
        Ok(Sent::Kept)
    }

    /// Sends of what is kept as much as the peer takes.
    pub fn flush(&self) -> io::Result<()> {
        let mut outbox = self.outbox();
        let sent = self.write(&outbox.bytes[outbox.sent..])?;
        outbox.sent += sent;
        if outbox.sent == outbox.bytes.len() {
            *outbox = Outbox::default();
        } else if sent > 0 {
            outbox.since = Some(Instant::now());
        }
        Ok(())
    }

    /// Since when the peer has taken nothing of what is kept for it.
    pub fn stuck_since(&self) -> Option<Instant> {
        self.outbox().since
    }

    /// Ends the connection: both sides read its end.
    pub fn close(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// What the polling thread is to wait for.
    pub fn poll_fd(&self) -> PollFd<'_> {
        let writing = if self.stuck_since().is_some() { PollFlags::OUT } else { PollFlags::empty() };
        PollFd::from_borrowed_fd(self.stream.as_fd(), PollFlags::IN | writing)
    }

    /// Takes what has come, one portion, into `assembler`. Fails with `UnexpectedEof` where the peer has ended the connection.
    pub fn receive(&self, assembler: &mut Assembler) -> io::Result<()> {
        assembler.bytes.reserve(READ_BYTES);
        match rustix::io::read(&self.stream, spare_capacity(&mut assembler.bytes)) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {
                assembler.since.get_or_insert_with(Instant::now);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Bytes that the kernel took.
    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut sent = 0;
        while sent < bytes.len() {
            match rustix::net::send(&self.stream, &bytes[sent..], SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(sent)
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Assembler {
    /// The next whole frame. Fails, as soon as that shows, where these bytes are none of ours.
    pub fn next(&mut self) -> Result<Option<Decoded>, WireError> {
        let Some(header) = wire::header(&self.bytes)? else { return Ok(None) };
        let length = HEADER_BYTES + header.payload_bytes;
        if self.bytes.len() < length {
            return Ok(None);
        }
        let decoded = wire::decode(&self.bytes[..length])?;
        self.bytes.drain(..length);
        self.since = (!self.bytes.is_empty()).then(Instant::now);
        Ok(Some(decoded))
    }

    /// Since when a frame has been coming that is not whole.
    pub fn since(&self) -> Option<Instant> {
        self.since
    }
}

/// Wakes a thread that polls.
#[derive(Debug)]
pub(crate) struct Wake {
    fd: OwnedFd,
}

impl Wake {
    pub fn new() -> io::Result<Self> {
        Ok(Self { fd: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    pub fn wake(&self) {
        // Fails where it has been woken 2^64 - 2 times and not looked: it wakes.
        let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
    }

    pub fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(&self.fd, PollFlags::IN)
    }

    pub fn clear(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
    }
}

/// Waits until one of these is ready, or until `deadline`. Says which are.
pub(crate) fn poll(mut fds: Vec<PollFd<'_>>, deadline: Option<Instant>) -> io::Result<Vec<bool>> {
    let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
    let timeout = left.map(|left| Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    match rustix::event::poll(&mut fds, timeout.as_ref()) {
        Ok(_) => Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect()),
        Err(Errno::INTR) => Ok(vec![false; fds.len()]),
        Err(errno) => Err(errno.into()),
    }
}

/// A listening socket to be polled.
pub(crate) fn readable(fd: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::from_borrowed_fd(fd, PollFlags::IN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Answer, Body, Failure, Frame, Member, Message, Request};
    use crate::runs::{MAX_PAGES, Runs};

    fn pair() -> (Connection, Connection) {
        let (a, b) = UnixStream::pair().unwrap();
        (Connection::new(a, Path::new("/a")).unwrap(), Connection::new(b, Path::new("/b")).unwrap())
    }

    fn frame(transaction: u64, message: Message) -> Frame {
        Frame { epoch: 1, transaction, group: 0, member: Member { stage: 0, rank: 0 }, message }
    }

    fn query(transaction: u64) -> Frame {
        frame(transaction, Message::Request(Request::Query))
    }

    /// As long as frames can be.
    fn longest(transaction: u64) -> Frame {
        let every_second: Vec<u32> = (0..MAX_PAGES).step_by(2).collect();
        let pages = Runs::from_pages(&every_second).unwrap();
        let body = Body::Failed(Failure {
            out_of_memory: false,
            lost: pages.clone(),
            still_mapped: pages,
            detail: "d".repeat(1024),
        });
        frame(transaction, Message::Answer(Answer { beside_bytes: 0, body }))
    }

    fn frames(connection: &Connection, assembler: &mut Assembler) -> Vec<Decoded> {
        connection.receive(assembler).unwrap();
        std::iter::from_fn(|| assembler.next().unwrap()).collect()
    }

    fn raw(connection: &Connection, bytes: &[u8]) {
        assert_eq!(rustix::net::send(&connection.stream, bytes, SendFlags::NOSIGNAL), Ok(bytes.len()));
    }

    #[test]
    fn frames_arrive_whole_and_in_order_however_they_are_cut() {
        let (a, b) = pair();
        let mut assembler = Assembler::default();
        assert_eq!(a.send(&wire::encode(&query(1))).unwrap(), Sent::Whole);
        assert_eq!(a.send(&wire::encode(&query(2))).unwrap(), Sent::Whole);
        let third = wire::encode(&query(3));
        raw(&a, &third[..2]);
        assert_eq!(frames(&b, &mut assembler), [1, 2].map(|n| Decoded::Frame(query(n))));
        assert!(assembler.since().is_some(), "half a frame has come");
        raw(&a, &third[2..35]);
        assert_eq!(frames(&b, &mut assembler), []);
        raw(&a, &third[35..]);
        assert_eq!(frames(&b, &mut assembler), [Decoded::Frame(query(3))]);
        assert!(assembler.since().is_none());
        drop(a);
        assert_eq!(b.receive(&mut assembler).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_no_frame_is_refused_before_more_of_it_is_kept() {
        let (a, b) = pair();
        let mut assembler = Assembler::default();
        raw(&a, b"GET / HTTP/1.1");
        b.receive(&mut assembler).unwrap();
        assert!(matches!(assembler.next(), Err(WireError::Magic(_))));
        let mut endless = wire::encode(&query(1));
        endless[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        let mut assembler = Assembler::default();
        raw(&a, &endless);
        b.receive(&mut assembler).unwrap();
        assert!(matches!(assembler.next(), Err(WireError::TooLong { .. })));
    }

    #[test]
    fn what_a_peer_does_not_read_is_kept_up_to_a_bound_and_arrives_later() {
        let (a, b) = pair();
        let long = wire::encode(&longest(1));
        assert_eq!(long.len() + 24 + 18, MAX_FRAME_BYTES, "but for the numbers of other kinds");
        let mut kept = 0;
        let refused = loop {
            match a.send(&long) {
                Ok(_) => kept += 1,
                Err(error) => break error,
            }
            assert!(kept < 100, "there is no bound");
        };
        assert!(kept > 0);
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        assert!(a.stuck_since().is_some());
        let (mut assembler, mut arrived) = (Assembler::default(), 0);
        while arrived < kept {
            a.flush().unwrap();
            arrived += frames(&b, &mut assembler).iter().filter(|got| **got == Decoded::Frame(longest(1))).count();
        }
        assert!(a.stuck_since().is_none());
        assert_eq!(a.send(&wire::encode(&query(2))).unwrap(), Sent::Whole);
        assert_eq!(frames(&b, &mut assembler), [Decoded::Frame(query(2))]);
    }
}
