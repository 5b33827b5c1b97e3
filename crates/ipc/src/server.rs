//! The rank's side: a socket that listens, whoever has connected, and the groups that they ask.
//!
//! One thread reads; each group has one that works. So a question is answered while a large map is under way, and a group's work
//! sends its answer itself. Nothing here waits for a peer.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::answer::Desk;
use crate::directory::{Bound, Directory};
use crate::error::IpcError;
use crate::fork::Owner;
use crate::group::{Group, Post};
use crate::message::{Answer, Body, Frame, Member, Message, Refusal};
use crate::rank::{ConnectionId, Event};
use crate::socket::{Assembler, Connection, Sent, Wake, poll, readable};
use crate::store::Store;
use crate::wire::{self, Decoded};

/// Coordinators that may be connected at once: one a group, and others that look.
const MAX_CONNECTIONS: usize = 64;
/// A frame that has begun is whole after this time, and the first one after a connection is made.
const FRAME_PATIENCE: Duration = Duration::from_secs(5);
/// A peer that takes nothing for so long is cut off.
const WRITE_PATIENCE: Duration = Duration::from_secs(5);
/// How long a stop waits for work that is under way.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// Serves the groups of one rank to coordinators: over a Unix socket, and to an engine's own RPC by [`RankServer::answer`].
///
/// Stopped when dropped. In a fork of the process it does nothing, and its calls fail.
pub struct RankServer {
    shared: Arc<Shared>,
    bound: Bound,
    threads: Mutex<Threads>,
    owner: Owner,
}

#[derive(Default)]
struct Threads {
    reader: Option<JoinHandle<()>>,
    workers: Vec<(Arc<Group>, JoinHandle<()>)>,
}

pub(crate) struct Shared {
    member: Member,
    groups: RwLock<BTreeMap<u32, Arc<Group>>>,
    peers: Mutex<HashMap<ConnectionId, Arc<Peer>>>,
    /// Frames of an engine's RPC that wait for their answers.
    desk: Desk,
    wake: Wake,
    stopping: AtomicBool,
    /// Connections so far.
    connections: AtomicU64,
}

/// Who has connected.
struct Peer {
    connection: Connection,
    /// It coordinates, or did: it was told what a group is made of.
    has_session: AtomicBool,
}

/// A peer, as the reading thread sees it.
struct Reading {
    id: ConnectionId,
    peer: Arc<Peer>,
    assembler: Assembler,
    since: Instant,
    /// It has sent a whole frame.
    introduced: bool,
}

impl RankServer {
    /// Listens in `directory`, from which the sockets of dead processes are removed first. Serves no group yet.
    pub fn bind(member: Member, directory: &Directory) -> Result<Self, IpcError> {
        directory.sweep();
        let bound = directory.listen()?;
        let failed = |doing| move |source| IpcError::io(doing, Path::new("a rank's server"), source);
        let shared = Arc::new(Shared {
            member,
            groups: RwLock::default(),
            peers: Mutex::default(),
            desk: Desk::default(),
            wake: Wake::new().map_err(failed("create"))?,
            stopping: AtomicBool::new(false),
            connections: AtomicU64::new(0),
        });
        let listener = bound.listener.try_clone().map_err(|e| IpcError::io("serve", &bound.path, e))?;
        let (reader, path) = (Arc::clone(&shared), bound.path.clone());
        let thread = std::thread::Builder::new()
            .name("kvcached-rank".to_owned())
            .spawn(move || {
                if let Err(error) = reader.read(&listener, &path) {
                    tracing::error!(%error, "a rank's server has stopped: its coordinators are cut off");
                }
                reader.hang_up();
            });
        let reader = match thread {
            Ok(reader) => Some(reader),
            Err(error) => {
                bound.unlink();
                return Err(failed("start")(error));
            }
        };
        tracing::debug!(socket = %bound.path.display(), ?member, "a rank serves");
        let threads = Mutex::new(Threads { reader, workers: vec![] });
        Ok(Self { shared, bound, threads, owner: Owner::this_process() })
    }

    /// Serves this group from now on.
    pub fn add_group(&self, group: u32, store: Arc<dyn Store>) -> Result<(), IpcError> {
        self.owner.check()?;
        let mut threads = self.threads();
        if self.shared.stopping.load(Ordering::Acquire) {
            return Err(IpcError::Stopped);
        }
        let mut groups = self.shared.groups.write().unwrap_or_else(PoisonError::into_inner);
        if groups.contains_key(&group) {
            return Err(IpcError::GroupTaken { group });
        }
        let post = Arc::clone(&self.shared) as Arc<dyn Post>;
        let started = Group::start(self.shared.member, group, store, post);
        let (made, thread) = started.map_err(|e| IpcError::io("start a thread for", &self.bound.path, e))?;
        groups.insert(group, Arc::clone(&made));
        threads.workers.push((made, thread));
        Ok(())
    }

    /// Where it listens.
    pub fn address(&self) -> &Path {
        &self.bound.path
    }

    /// Which worker this is.
    pub fn member(&self) -> Member {
        self.shared.member
    }

    /// The answer to a frame that came another way than through the socket: an engine's own RPC. Waits for the work that the
    /// frame asks for.
    ///
    /// Fails where the frame is none, or where another coordinator has taken over meanwhile.
    pub fn answer(&self, frame: &[u8]) -> Result<Vec<u8>, IpcError> {
        self.owner.check()?;
        if self.shared.stopping.load(Ordering::Acquire) {
            return Err(IpcError::Stopped);
        }
        let refused = |why: String| IpcError::Failed { detail: format!("not a frame that can be answered: {why}") };
        let decoded = wire::decode(frame).map_err(|error| refused(error.to_string()))?;
        let ticket = self.shared.desk.expect(&decoded);
        self.shared.received(ticket.connection(), decoded);
        ticket.wait()
    }

    /// What a group's memory was asked for of late, and how long each took: at most some thousands, oldest first, told once.
    pub fn take_times(&self, group: u32) -> Vec<(&'static str, Duration)> {
        self.shared.group(group).map_or_else(Vec::new, |group| group.take_times())
    }

    /// Ends in order: no name, no thread and no undecided transaction are left. Idempotent. Work that does not end in ten seconds
    /// is left to its thread; false then.
    pub fn stop(&self) -> bool {
        if self.owner.check().is_err() {
            return false;
        }
        let mut threads = self.threads();
        self.shared.stopping.store(true, Ordering::Release);
        self.bound.unlink();
        self.shared.wake.wake();
        if let Some(reader) = threads.reader.take() {
            let _ = reader.join();
        }
        let deadline = Instant::now() + STOP_PATIENCE;
        let mut all = true;
        for (group, thread) in threads.workers.drain(..) {
            if group.stop(deadline) {
                let _ = thread.join();
            } else {
                tracing::error!("work on a rank's memory did not end in time: it is left to its thread");
                all = false;
            }
        }
        self.shared.groups.write().unwrap_or_else(PoisonError::into_inner).clear();
        self.shared.desk.close();
        all
    }

    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RankServer {
    fn drop(&mut self) {
        if self.owner.check().is_err() {
            // The threads that these name are not of this process, nor is the socket's name.
            std::mem::forget(std::mem::take(self.threads.get_mut().unwrap_or_else(PoisonError::into_inner)));
            return;
        }
        self.stop();
    }
}

impl Shared {
    // ---------------------------------------------------------------- the reading thread

    fn read(&self, listener: &std::os::unix::net::UnixListener, path: &Path) -> io::Result<()> {
        let mut readings: Vec<Reading> = vec![];
        while !self.stopping.load(Ordering::Acquire) {
            let mut fds = vec![self.wake.poll_fd(), readable(listener.as_fd())];
            fds.extend(readings.iter().map(|reading| reading.peer.connection.poll_fd()));
            let ready = poll(fds, readings.iter().filter_map(Reading::deadline).min())?;
            self.wake.clear();
            let now = Instant::now();
            let mut place = 2;
            readings.retain_mut(|reading| {
                let is_ready = ready[place];
                place += 1;
                let kept = self.serve(reading, is_ready, now);
                if !kept {
                    self.forget(reading.id);
                }
                kept
            });
            if ready[1] {
                self.accept(listener, path, &mut readings)?;
            }
        }
        Ok(())
    }

    /// Reads from and writes to one peer. False: it is cut off.
    fn serve(&self, reading: &mut Reading, is_ready: bool, now: Instant) -> bool {
        if let Err(why) = self.exchange(reading, is_ready, now) {
            match why.kind() {
                io::ErrorKind::UnexpectedEof => tracing::debug!(connection = reading.id, "a coordinator has left"),
                _ => tracing::warn!(connection = reading.id, error = %why, "a coordinator is cut off"),
            }
            return false;
        }
        true
    }

    fn exchange(&self, reading: &mut Reading, is_ready: bool, now: Instant) -> io::Result<()> {
        if is_ready {
            if reading.peer.connection.stuck_since().is_some() {
                reading.peer.connection.flush()?;
            }
            reading.peer.connection.receive(&mut reading.assembler)?;
            while let Some(decoded) = reading.assembler.next().map_err(invalid)? {
                reading.introduced = true;
                self.received(reading.id, decoded);
            }
        }
        match reading.deadline() {
            Some(deadline) if deadline <= now => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }

    fn accept(
        &self,
        listener: &std::os::unix::net::UnixListener,
        path: &Path,
        readings: &mut Vec<Reading>,
    ) -> io::Result<()> {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, say: those that are connected are served all the same.
                if error.kind() != io::ErrorKind::WouldBlock {
                    tracing::warn!(%error, "a connection could not be taken");
                    std::thread::sleep(Duration::from_millis(10));
                }
                return Ok(());
            }
        };
        let connection = match Connection::new(stream, path) {
            Ok(connection) => connection,
            Err(error) => {
                tracing::warn!(%error, "a connection is refused");
                return Ok(());
            }
        };
        if readings.len() >= MAX_CONNECTIONS {
            let idle = readings.iter().position(|reading| !reading.peer.has_session.load(Ordering::Relaxed));
            tracing::warn!(limit = MAX_CONNECTIONS, "too many connections: the oldest that coordinates nothing goes");
            let Some(idle) = idle else { return Ok(()) };
            self.forget(readings.remove(idle).id);
        }
        let id = self.connections.fetch_add(1, Ordering::Relaxed);
        let peer = Arc::new(Peer { connection, has_session: AtomicBool::new(false) });
        self.peers().insert(id, Arc::clone(&peer));
        let since = Instant::now();
        readings.push(Reading { id, peer, assembler: Assembler::default(), since, introduced: false });
        Ok(())
    }

    /// The connection is gone: its groups have to know.
    fn forget(&self, connection: ConnectionId) {
        if let Some(peer) = self.peers().remove(&connection) {
            peer.connection.close();
        }
        let groups: Vec<_> = self.groups.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        for group in groups {
            group.step(Event::Closed { connection });
        }
    }

    fn hang_up(&self) {
        let ids: Vec<ConnectionId> = self.peers().keys().copied().collect();
        ids.into_iter().for_each(|id| self.forget(id));
    }

    // ---------------------------------------------------------------- frames

    fn received(&self, connection: ConnectionId, decoded: Decoded) {
        match decoded {
            Decoded::Frame(frame) => match self.group(frame.group) {
                Some(group) => group.step(Event::Received { connection, frame }),
                None => {
                    let body = Body::Refused(Refusal::NoSuchGroup);
                    let message = Message::Answer(Answer { beside_bytes: 0, body });
                    self.send(connection, &Frame { message, ..frame });
                }
            },
            Decoded::Unknown(header) if header.is_answer() => {}
            Decoded::Unknown(header) => self.send(connection, &header.refusal(0)),
        }
    }

    fn group(&self, group: u32) -> Option<Arc<Group>> {
        self.groups.read().unwrap_or_else(PoisonError::into_inner).get(&group).cloned()
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<ConnectionId, Arc<Peer>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Post for Shared {
    fn send(&self, connection: ConnectionId, frame: &Frame) {
        if Desk::is_its(connection) {
            return self.desk.deliver(connection, frame);
        }
        let Some(peer) = self.peers().get(&connection).cloned() else { return };
        if let Message::Answer(Answer { body: Body::Created(_), .. }) = &frame.message {
            peer.has_session.store(true, Ordering::Relaxed);
        }
        match peer.connection.send(&wire::encode(frame)) {
            Ok(Sent::Whole) => {}
            Ok(Sent::Kept) => self.wake.wake(),
            Err(error) => {
                tracing::debug!(connection, %error, "an answer could not be sent");
                peer.connection.close(); // the reading thread sees its end
            }
        }
    }

    fn close(&self, connection: ConnectionId) {
        if Desk::is_its(connection) {
            return self.desk.cut(connection);
        }
        if let Some(peer) = self.peers().get(&connection) {
            peer.connection.close();
        }
    }
}

pub(crate) fn invalid(error: wire::WireError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Reading {
    /// When it is cut off, if nothing happens until then.
    fn deadline(&self) -> Option<Instant> {
        let silent = (!self.introduced).then_some(self.since);
        let frame = self.assembler.since().or(silent).map(|since| since + FRAME_PATIENCE);
        let stuck = self.peer.connection.stuck_since().map(|since| since + WRITE_PATIENCE);
        frame.into_iter().chain(stuck).min()
    }
}
