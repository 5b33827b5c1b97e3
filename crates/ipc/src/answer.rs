//! Frames that come through an engine's own RPC, which waits for their answers: no connection carries these, so each coordinator's
//! term is taken for one.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::IpcError;
use crate::message::{Answer, Body, Frame, Message, TransactionId};
use crate::rank::ConnectionId;
use crate::wire::{self, Decoded};

/// Set in the ids of these connections.
const DESK: ConnectionId = 1 << 63;
/// Longer than any work takes that ends at all.
const PATIENCE: Duration = Duration::from_secs(60);

/// Who waits for an answer.
#[derive(Default)]
pub(crate) struct Desk {
    waiting: Arc<Waiting>,
}

#[derive(Default)]
struct Waiting {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    tickets: BTreeMap<u64, Slot>,
}

struct Slot {
    /// The connection, the group and the transaction.
    about: (ConnectionId, u32, TransactionId),
    answer: Option<Result<Vec<u8>, IpcError>>,
}

/// One frame that waits for its answer.
pub(crate) struct Ticket {
    waiting: Arc<Waiting>,
    number: u64,
    connection: ConnectionId,
}

impl Desk {
    /// Whether a connection is one of these.
    pub fn is_its(connection: ConnectionId) -> bool {
        connection & DESK != 0
    }

    /// To be called before the frame is acted on, whose answer may come at once.
    pub fn expect(&self, decoded: &Decoded) -> Ticket {
        let (epoch, group, transaction) = match decoded {
            Decoded::Frame(frame) => (frame.epoch, frame.group, frame.transaction),
            Decoded::Unknown(header) => (header.epoch, header.group, header.transaction),
        };
        let connection = epoch | DESK;
        let mut state = self.waiting.lock();
        let number = state.next;
        state.next += 1;
        state.tickets.insert(number, Slot { about: (connection, group, transaction), answer: None });
        Ticket { waiting: Arc::clone(&self.waiting), number, connection }
    }

    /// Hands an answer to whoever waits for it. That something is still being worked on is said at once, to the latest who asked;
    /// how it went is what all want to know.
    pub fn deliver(&self, connection: ConnectionId, frame: &Frame) {
        let at_once =
            matches!(&frame.message, Message::Answer(Answer { body: Body::Running | Body::Unknown, .. }));
        let mut state = self.waiting.lock();
        let about = (connection, frame.group, frame.transaction);
        let waiting = state.tickets.values_mut().rev().filter(|slot| slot.about == about && slot.answer.is_none());
        for slot in waiting.take(if at_once { 1 } else { usize::MAX }) {
            slot.answer = Some(Ok(wire::encode(frame)));
        }
        self.waiting.changed.notify_all();
    }

    /// Another coordinator has taken over: nobody answers the former one's frames any more.
    pub fn cut(&self, connection: ConnectionId) {
        let why = "another coordinator has taken over";
        self.end(|slot| slot.about.0 == connection, || IpcError::Broken { why: why.to_owned() });
    }

    /// The server has stopped.
    pub fn close(&self) {
        self.end(|_| true, || IpcError::Stopped);
    }

    fn end(&self, which: impl Fn(&Slot) -> bool, error: impl Fn() -> IpcError) {
        for slot in self.waiting.lock().tickets.values_mut().filter(|slot| which(slot)) {
            slot.answer.get_or_insert_with(|| Err(error()));
        }
        self.waiting.changed.notify_all();
    }
}

impl Ticket {
    /// The connection that its frame came through, as it were.
    pub fn connection(&self) -> ConnectionId {
        self.connection
    }

    /// The answer, as a frame's bytes.
    pub fn wait(self) -> Result<Vec<u8>, IpcError> {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.waiting.lock();
        loop {
            if let Some(answer) = state.tickets.get_mut(&self.number).and_then(|slot| slot.answer.take()) {
                return answer;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(IpcError::Failed { detail: format!("no answer to the frame within {PATIENCE:?}") });
            }
            state = self.waiting.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.waiting.lock().tickets.remove(&self.number);
    }
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
