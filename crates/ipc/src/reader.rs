//! The thread that reads what the ranks of one group answer.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::directory::remove_dead;
use crate::link::{Inbox, SocketLink};
use crate::socket::{Assembler, Ready, Wake, poll};

/// A frame that has begun is whole after this time.
const FRAME_PATIENCE: Duration = Duration::from_secs(5);
/// How often, and how far apart, the socket of a rank that is gone is looked at: the rank may be about to end, or may live and only
/// have cut the connection.
const REMOVE_ATTEMPTS: u32 = 50;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// The thread, and the way to end it.
pub(crate) struct Reader {
    stopping: Arc<AtomicBool>,
    wake: Arc<Wake>,
    thread: JoinHandle<()>,
}

struct Reading {
    link: Arc<SocketLink>,
    inbox: Inbox,
    assembler: Assembler,
}

/// The socket of a rank that is gone.
struct Remains {
    socket: PathBuf,
    attempts: u32,
    next: Instant,
}

impl Reader {
    pub fn start(links: Vec<(Arc<SocketLink>, Inbox)>, wake: Arc<Wake>) -> io::Result<Self> {
        let stopping = Arc::new(AtomicBool::new(false));
        let readings = links
            .into_iter()
            .map(|(link, inbox)| Reading { link, inbox, assembler: Assembler::default() })
            .collect();
        let (is_stopping, woken) = (Arc::clone(&stopping), Arc::clone(&wake));
        let thread = std::thread::Builder::new()
            .name("kvcached-ranks".to_owned())
            .spawn(move || read(readings, &is_stopping, &woken))?;
        Ok(Reader { stopping, wake, thread })
    }

    /// Ends the thread, and waits for that unless it is the one that asks.
    pub fn stop(self) {
        self.stopping.store(true, Ordering::Release);
        self.wake.wake();
        if self.thread.thread().id() != std::thread::current().id() {
            let _ = self.thread.join();
        }
    }
}

fn read(mut readings: Vec<Reading>, stopping: &AtomicBool, wake: &Wake) {
    let mut remains: Vec<Remains> = vec![];
    while !stopping.load(Ordering::Acquire) {
        let mut fds = vec![wake.poll_fd()];
        fds.extend(readings.iter().flat_map(|reading| reading.link.connection.poll_fds()));
        let frames = readings.iter().filter_map(Reading::deadline);
        let deadline = frames.chain(remains.iter().map(|remains| remains.next)).min();
        let ready = match poll(fds, deadline) {
            Ok(ready) => ready,
            Err(error) => {
                let why = format!("its connection cannot be polled: {error}");
                return readings.iter().for_each(|reading| reading.inbox.lost(why.clone()));
            }
        };
        wake.clear();
        let now = Instant::now();
        let (mut lost, mut found) = (vec![], ready.into_iter().skip(1));
        for (place, reading) in readings.iter_mut().enumerate() {
            let ready = Ready::take(&reading.link.connection, &mut found);
            if let Err(error) = reading.take(ready, now) {
                lost.push((place, error));
            }
        }
        for (place, error) in lost.into_iter().rev() {
            let Reading { link, inbox, .. } = readings.remove(place);
            inbox.lost(what_became(&error));
            remains.push(Remains { socket: link.address.clone(), attempts: 0, next: now });
        }
        remains.retain_mut(|remains| !remains.settle(Instant::now()));
    }
    // The last to look: one that dies later is found by the next server that starts.
    for remains in &remains {
        remove_dead(&remains.socket);
    }
}

fn what_became(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            "it closed the connection: its process has ended".to_owned()
        }
        io::ErrorKind::TimedOut => "it sent half a frame and no more".to_owned(),
        _ => format!("its connection failed: {error}"),
    }
}

impl Reading {
    fn deadline(&self) -> Option<Instant> {
        self.assembler.since().map(|since| since + FRAME_PATIENCE)
    }

    fn take(&mut self, ready: Ready, now: Instant) -> io::Result<()> {
        self.link.connection.exchange(ready, &mut self.assembler)?;
        while let Some(decoded) = self.assembler.next()? {
            self.inbox.decoded(decoded);
        }
        match self.deadline() {
            Some(deadline) if deadline <= now => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }
}

impl Remains {
    /// True: nothing is left to do.
    fn settle(&mut self, now: Instant) -> bool {
        if self.next > now {
            return false;
        }
        self.attempts += 1;
        self.next = now + REMOVE_PAUSE;
        remove_dead(&self.socket) || self.attempts == REMOVE_ATTEMPTS
    }
}
