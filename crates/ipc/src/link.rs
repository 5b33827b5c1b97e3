//! The coordinator's way to one rank: something that sends frames without waiting, and an inbox for what comes back.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::message::{Frame, Member};
use crate::socket::{Connection, Sent, Wake};
use crate::wire::{self, Decoded};

/// Frames that may wait for one rank's call to return.
const MAX_QUEUE: usize = 256;
/// How long the end of a link waits for a call that is under way.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);
const CLOSE_PAUSE: Duration = Duration::from_millis(1);

/// The way to one rank. What comes back goes into the [`Inbox`] that the link was made with.
pub trait Link: Send + Sync {
    /// Sends a frame, or sees to it that it is sent, in the order of these calls. Never waits: it is called under a lock. Fails where
    /// the rank cannot be reached.
    fn send(&self, frame: &[u8]) -> io::Result<()>;

    /// Sends and delivers nothing from now on. Never waits.
    fn close(&self);
}

/// Whom inboxes deliver to.
pub(crate) trait Recipient: Send + Sync {
    /// A member said this.
    fn receive(&self, member: usize, frame: Frame);

    /// A member is gone, or cannot be asked any more.
    fn lose(&self, member: usize, why: String);
}

/// Where a link puts what comes from its rank. It keeps nobody alive: after the end of the ranks it is a void.
#[derive(Clone)]
pub struct Inbox {
    recipient: Weak<dyn Recipient>,
    member: usize,
}

impl Inbox {
    pub(crate) fn new(recipient: Weak<dyn Recipient>, member: usize) -> Self {
        Inbox { recipient, member }
    }

    /// A frame came from the rank. One that is none of ours is its loss.
    pub fn received(&self, frame: &[u8]) {
        match wire::decode(frame) {
            Ok(decoded) => self.decoded(decoded),
            Err(error) => self.lost(format!("it sent what is no frame: {error}")),
        }
    }

    pub(crate) fn decoded(&self, decoded: Decoded) {
        match decoded {
            Decoded::Frame(frame) => {
                if let Some(recipient) = self.recipient.upgrade() {
                    recipient.receive(self.member, frame);
                }
            }
            // An answer that only a later version knows, to a question that this one cannot have asked.
            Decoded::Unknown(header) => tracing::warn!(?header, "an answer of an unknown kind is ignored"),
        }
    }

    /// The rank is gone, or cannot be asked any more.
    pub fn lost(&self, why: String) {
        if let Some(recipient) = self.recipient.upgrade() {
            recipient.lose(self.member, why);
        }
    }
}

/// Sends a frame to a member and waits for what it answers, in bytes: an engine's own RPC. An error says why there is no answer, which
/// counts as the loss of that rank.
pub type Call = dyn Fn(Member, &[u8]) -> Result<Vec<u8>, String> + Send + Sync;

/// A link through a socket. The thread that polls reads from it.
pub(crate) struct SocketLink {
    pub connection: Connection,
    pub address: PathBuf,
    wake: Arc<Wake>,
}

impl SocketLink {
    pub fn new(connection: Connection, address: &Path, wake: Arc<Wake>) -> Self {
        SocketLink { connection, address: address.to_path_buf(), wake }
    }
}

impl Link for SocketLink {
    fn send(&self, frame: &[u8]) -> io::Result<()> {
        if self.connection.send(frame)? == Sent::Kept {
            self.wake.wake();
        }
        Ok(())
    }

    fn close(&self) {
        self.connection.close();
    }
}

/// A link through a callable, with a thread of its own that waits for the answers: so all ranks are asked at the same time.
pub(crate) struct CallLink {
    frames: Mutex<Option<SyncSender<Vec<u8>>>>,
    closed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl CallLink {
    pub fn start(member: Member, call: Arc<Call>, inbox: Inbox) -> io::Result<Self> {
        let (sender, receiver) = mpsc::sync_channel(MAX_QUEUE);
        let closed = Arc::new(AtomicBool::new(false));
        let is_closed = Arc::clone(&closed);
        let thread = std::thread::Builder::new()
            .name(format!("kvcached-to-{}.{}", member.stage, member.rank))
            .spawn(move || carry(member, &receiver, &*call, &inbox, &is_closed))?;
        Ok(CallLink { frames: Mutex::new(Some(sender)), closed, thread: Some(thread) })
    }
}

fn carry(member: Member, frames: &Receiver<Vec<u8>>, call: &Call, inbox: &Inbox, closed: &AtomicBool) {
    while let Ok(frame) = frames.recv() {
        if closed.load(Ordering::Acquire) {
            return;
        }
        let answer = call(member, &frame);
        if closed.load(Ordering::Acquire) {
            return;
        }
        match answer {
            Ok(bytes) => inbox.received(&bytes),
            Err(why) => return inbox.lost(why),
        }
    }
}

impl Link for CallLink {
    fn send(&self, frame: &[u8]) -> io::Result<()> {
        let frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = frames.as_ref().map(|frames| frames.try_send(frame.to_vec()));
        match sent {
            Some(Ok(())) => Ok(()),
            Some(Err(TrySendError::Full(_))) => {
                Err(io::Error::new(io::ErrorKind::WouldBlock, "too many frames wait for its answer"))
            }
            Some(Err(TrySendError::Disconnected(_))) | None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        *self.frames.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Drop for CallLink {
    fn drop(&mut self) {
        self.close();
        let Some(thread) = self.thread.take() else { return };
        // The last holder may be the thread itself.
        if thread.thread().id() == std::thread::current().id() {
            return;
        }
        let deadline = Instant::now() + CLOSE_PATIENCE;
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(CLOSE_PAUSE);
        }
        match thread.is_finished() {
            true => drop(thread.join()),
            false => tracing::warn!("a call to a rank does not return: its thread is left to it"),
        }
    }
}
