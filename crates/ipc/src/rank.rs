//! What a rank does about one group: carries out what the coordinator of the latest term asks, one piece of driver work at a
//! time, and answers. Pure: no clock, no thread, no memory.
//!
//! ```text
//!                    MAP, PREPARE ...            worked
//!     (unknown) ---------------------> waiting -> running -> answered
//!         |                               |          |       |      |
//!         | ABORT that overtook           | ABORT    | ABORT | ABORT| COMMIT (of a PREPARE)
//!         v                               v          v       v      v
//!      aborted <----------------------------------- ending        ending -> committed
//! ```
//!
//! Every request may be lost, repeated and late. What was done is remembered for the latest [`HISTORY`] transactions of the
//! term, and never done twice: a repeated request is answered by how its transaction stands now (`Running` while it is being
//! worked on). So a PREPARE that comes again after the decision is answered `Committed` or `Aborted`.
//!
//! A term ends with its connection, with BYE, or with the HELLO of a greater epoch. Then what waits is dropped, a PREPARE that
//! nobody decided is aborted (presumed abort), and a decision that was received is still carried out. Pages stay mapped.

use std::collections::{BTreeMap, VecDeque};

use crate::message::{Answer, Body, Epoch, Failure, Frame, Member, Message, Refusal, Request, TransactionId};
use crate::runs::Runs;

/// Transactions of a term whose outcome is remembered. A coordinator has none open that is older than the latest
/// [`WINDOW`](crate::coordinator::WINDOW), which is less.
pub const HISTORY: usize = 64;

/// Requests that may wait for the driver. A coordinator has fewer under way.
pub const MAX_WAITING: usize = 32;

/// Names a connection. Whoever accepts connections never gives a number twice.
pub type ConnectionId = u64;

/// What happens to a rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A frame came.
    Received {
        /// Over this connection.
        connection: ConnectionId,
        /// What was said.
        frame: Frame,
    },
    /// A connection is gone, or nobody listens at its other end.
    Closed {
        /// Which.
        connection: ConnectionId,
    },
    /// The work that was running is done.
    Worked {
        /// How it went.
        result: WorkResult,
    },
    /// The process ends in order: as if the term's connection closed, and nothing is taken any more.
    Stop,
}

/// What a rank wants done.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Send this; if the connection is gone, drop it.
    Send {
        /// Over this connection.
        connection: ConnectionId,
        /// What is said.
        frame: Frame,
    },
    /// Close a connection. No `Closed` need follow.
    Close {
        /// Which.
        connection: ConnectionId,
    },
    /// Do this, then say `Worked`. Never a second before that.
    Run(Work),
}

/// What is done to memory. May take long.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Work {
    /// What is the group made of? Gives `Created`.
    Describe,
    /// Back these pages, all or none. Gives `Mapped` or `Failed`.
    Map {
        /// Ascending.
        pages: Vec<u32>,
    },
    /// Wait for the device, then unmap these pages. Gives `Unmapped` or `Failed`.
    Unmap {
        /// Ascending.
        pages: Vec<u32>,
    },
    /// Unmap what a map has just mapped: nothing has used it. Gives `Unmapped` or `Failed`.
    Undo {
        /// Ascending.
        pages: Vec<u32>,
    },
    /// Wait for the device, then unmap these pages and keep their memory, all or none. Gives `Prepared` or `Failed`.
    Prepare {
        /// Of the coordinator's term: another term may use the same number again.
        transaction: TransactionId,
        /// Ascending.
        pages: Vec<u32>,
    },
    /// Release what the transaction keeps. Gives `Committed`: a release that the driver refuses is the store's to repeat.
    Commit {
        /// The same as was prepared last.
        transaction: TransactionId,
    },
    /// Map back what the transaction keeps. Gives `Aborted`.
    Abort {
        /// The same as was prepared last.
        transaction: TransactionId,
    },
    /// Wait for all work on the device. Gives `Passed` or `Failed`.
    Synchronise,
    /// Give back the memory kept for later pages. Gives `Trimmed` or `Failed`.
    Trim,
    /// How much memory could the device give now? Gives `Room` or `Failed`.
    Room,
}

/// How work went.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WorkResult {
    /// See [`Answer::beside_bytes`].
    pub beside_bytes: u64,
    /// What each kind of [`Work`] gives.
    pub body: Body,
}

/// Who may ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Session {
    connection: ConnectionId,
    epoch: Epoch,
}

/// Work and whom it is for; nobody once the term that asked has ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Job {
    transaction: Option<TransactionId>,
    work: Work,
}

/// What is known of a transaction.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Record {
    /// What it was begun as; none where its ABORT came first.
    request: Option<Request>,
    standing: Standing,
    /// Of a map: another transaction has unmapped some of it since, so that there is nothing left to undo.
    settled: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Standing {
    Waiting,
    /// `abort`: is to be undone as soon as it is done.
    Running {
        abort: bool,
    },
    /// A decision waits for the driver, or is being carried out.
    Ending {
        commit: bool,
    },
    Answered(Body),
}

/// One rank's part in one group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rank {
    member: Member,
    group: u32,
    num_pages: u32,
    /// The greatest that was ever taken.
    epoch: Epoch,
    session: Option<Session>,
    /// The HELLO whose answer waits for the driver.
    hello: Option<TransactionId>,
    running: Option<Job>,
    waiting: VecDeque<Job>,
    history: BTreeMap<TransactionId, Record>,
    /// The greatest transaction of the term that was dropped from the history; 0 is none's name.
    forgotten: TransactionId,
    beside_bytes: u64,
    stopped: bool,
}

impl Rank {
    /// A rank that nobody coordinates yet. Pages are below `num_pages`.
    pub fn new(member: Member, group: u32, num_pages: u32) -> Self {
        Rank {
            member,
            group,
            num_pages,
            epoch: 0,
            session: None,
            hello: None,
            running: None,
            waiting: VecDeque::new(),
            history: BTreeMap::new(),
            forgotten: 0,
            beside_bytes: 0,
            stopped: false,
        }
    }

    /// What is to be done about an event.
    pub fn step(&mut self, event: Event) -> Vec<Effect> {
        let mut effects = Vec::new();
        match event {
            Event::Received { connection, .. } if self.stopped => effects.push(Effect::Close { connection }),
            Event::Received { connection, frame } => self.received(connection, frame, &mut effects),
            Event::Closed { connection } => {
                if self.session.is_some_and(|session| session.connection == connection) {
                    self.end_term();
                }
            }
            Event::Worked { result } => self.worked(result, &mut effects),
            Event::Stop => {
                self.stopped = true;
                if let Some(session) = self.session {
                    effects.push(Effect::Close { connection: session.connection });
                }
                self.end_term();
            }
        }
        self.run_next(&mut effects);
        effects
    }

    /// Whether driver work is running or waits.
    pub fn is_busy(&self) -> bool {
        self.running.is_some() || !self.waiting.is_empty()
    }

    // ---------------------------------------------------------------- what comes

    fn received(&mut self, connection: ConnectionId, frame: Frame, effects: &mut Vec<Effect>) {
        let Frame { epoch, transaction, group, member, message } = frame;
        let request = match message {
            Message::Request(request) => request,
            Message::Answer(_) => return self.offended(connection, effects),
        };
        let body = if group != self.group {
            Some(Body::Refused(Refusal::NoSuchGroup))
        } else if member != self.member {
            Some(Body::Refused(Refusal::NotMe))
        } else {
            match request {
                Request::Hello => self.hello(connection, epoch, transaction, effects),
                Request::Bye => self.bye(connection, epoch),
                request if self.session == Some(Session { connection, epoch }) => {
                    self.asked(transaction, request)
                }
                // Its HELLO was lost or comes later.
                Request::Query if epoch > self.epoch => Some(Body::Unknown),
                _ => Some(Body::Refused(Refusal::StaleEpoch)),
            }
        };
        if let Some(body) = body {
            let message = Message::Answer(Answer { beside_bytes: self.beside_bytes, body });
            let frame = Frame { epoch, transaction, group, member, message };
            effects.push(Effect::Send { connection, frame });
        }
    }

    /// Only coordinators speak to ranks: whoever sends an answer there is none.
    fn offended(&mut self, connection: ConnectionId, effects: &mut Vec<Effect>) {
        effects.push(Effect::Close { connection });
        if self.session.is_some_and(|session| session.connection == connection) {
            self.end_term();
        }
    }

    fn hello(
        &mut self,
        connection: ConnectionId,
        epoch: Epoch,
        transaction: TransactionId,
        effects: &mut Vec<Effect>,
    ) -> Option<Body> {
        let session = Session { connection, epoch };
        if epoch > self.epoch {
            if let Some(old) = self.session
                && old.connection != connection
            {
                effects.push(Effect::Close { connection: old.connection });
            }
            self.end_term();
            self.epoch = epoch;
            self.session = Some(session);
        } else if self.session != Some(session) {
            return Some(Body::Refused(Refusal::StaleEpoch));
        }
        match self.hello {
            Some(pending) if pending == transaction => Some(Body::Running),
            Some(_) => Some(Body::Refused(Refusal::Different)),
            None => {
                self.hello = Some(transaction);
                self.waiting.push_back(Job { transaction: Some(transaction), work: Work::Describe });
                None
            }
        }
    }

    fn bye(&mut self, connection: ConnectionId, epoch: Epoch) -> Option<Body> {
        if self.session == Some(Session { connection, epoch }) {
            self.end_term();
            return Some(Body::Bye);
        }
        // Said again, as far as anybody can tell.
        let again = self.session.is_none() && epoch == self.epoch;
        Some(if again { Body::Bye } else { Body::Refused(Refusal::StaleEpoch) })
    }

    /// A request of the term. `None`: the answer comes when it is done.
    fn asked(&mut self, transaction: TransactionId, request: Request) -> Option<Body> {
        if request == Request::Query && self.hello == Some(transaction) {
            return Some(Body::Running);
        }
        let known = self.history.contains_key(&transaction);
        if !known && transaction <= self.forgotten {
            return Some(Body::Refused(Refusal::Forgotten));
        }
        match request {
            Request::Query => Some(self.standing(transaction)),
            Request::Commit => self.commit(transaction),
            Request::Abort => self.abort(transaction),
            request if known => Some(self.again(transaction, &request)),
            request => self.begin(transaction, request).err().map(Body::Refused),
        }
    }

    // ---------------------------------------------------------------- requests of a term

    /// How the transaction stands, in words of an answer.
    fn standing(&self, transaction: TransactionId) -> Body {
        match self.history.get(&transaction).map(|record| &record.standing) {
            None => Body::Unknown,
            Some(Standing::Waiting | Standing::Running { .. } | Standing::Ending { .. }) => Body::Running,
            Some(Standing::Answered(body)) => body.clone(),
        }
    }

    /// A request that begins a transaction which is known.
    fn again(&self, transaction: TransactionId, request: &Request) -> Body {
        let begun = self.history.get(&transaction).and_then(|record| record.request.as_ref());
        match begun {
            Some(begun) if begun != request => Body::Refused(Refusal::Different),
            _ => self.standing(transaction),
        }
    }

    fn begin(&mut self, transaction: TransactionId, request: Request) -> Result<(), Refusal> {
        if let Request::Map(pages) | Request::Unmap(pages) | Request::Prepare(pages) = &request
            && (pages.is_empty() || pages.end() > self.num_pages)
        {
            return Err(Refusal::OutOfRange);
        }
        if matches!(request, Request::Unmap(_) | Request::Prepare(_)) && self.is_unmapping_undecided() {
            return Err(Refusal::Pending);
        }
        let work = match &request {
            Request::Map(pages) => Work::Map { pages: pages.to_vec() },
            Request::Unmap(pages) => Work::Unmap { pages: pages.to_vec() },
            Request::Prepare(pages) => Work::Prepare { transaction, pages: pages.to_vec() },
            Request::Barrier => Work::Synchronise,
            Request::Trim => Work::Trim,
            Request::Room => Work::Room,
            // Handled before; nothing of theirs begins a transaction.
            Request::Hello | Request::Commit | Request::Abort | Request::Query | Request::Bye => {
                return Ok(());
            }
        };
        if self.waiting.len() >= MAX_WAITING {
            return Err(Refusal::Overloaded);
        }
        self.remember(transaction, Some(request), Standing::Waiting)?;
        self.waiting.push_back(Job { transaction: Some(transaction), work });
        Ok(())
    }

    fn is_unmapping_undecided(&self) -> bool {
        self.history
            .values()
            .any(|record| matches!(record.request, Some(Request::Prepare(_))) && is_open(&record.standing))
    }

    fn commit(&mut self, transaction: TransactionId) -> Option<Body> {
        let Some(record) = self.history.get_mut(&transaction) else {
            return Some(Body::Refused(Refusal::Unprepared));
        };
        match &record.standing {
            Standing::Answered(Body::Prepared) => {
                record.standing = Standing::Ending { commit: true };
                let work = Work::Commit { transaction };
                self.waiting.push_back(Job { transaction: Some(transaction), work });
                None
            }
            Standing::Ending { commit: true } => Some(Body::Running),
            Standing::Answered(Body::Committed) => Some(Body::Committed),
            Standing::Ending { commit: false } | Standing::Answered(Body::Aborted { .. }) => {
                Some(Body::Refused(Refusal::Decided))
            }
            Standing::Waiting | Standing::Running { .. } | Standing::Answered(_) => {
                Some(Body::Refused(Refusal::Unprepared))
            }
        }
    }

    fn abort(&mut self, transaction: TransactionId) -> Option<Body> {
        let Some(record) = self.history.get_mut(&transaction) else {
            let aborted = Body::Aborted { lost: Runs::none() };
            let remembered = self.remember(transaction, None, Standing::Answered(aborted.clone()));
            return Some(remembered.err().map_or(aborted, Body::Refused));
        };
        if !matches!(record.request, None | Some(Request::Map(_) | Request::Prepare(_))) {
            return Some(Body::Refused(Refusal::Different));
        }
        let undo = match &mut record.standing {
            Standing::Waiting => {
                self.waiting.retain(|job| job.transaction != Some(transaction));
                None
            }
            Standing::Running { abort } => {
                let again = std::mem::replace(abort, true);
                return again.then_some(Body::Running);
            }
            Standing::Ending { commit: false } => return Some(Body::Running),
            Standing::Answered(body @ Body::Aborted { .. }) => return Some(body.clone()),
            Standing::Answered(Body::Failed(failure)) => {
                let lost = failure.lost.clone();
                return Some(self.answered(transaction, Body::Aborted { lost }));
            }
            Standing::Answered(Body::Mapped { .. }) if record.settled => {
                return Some(Body::Refused(Refusal::Decided));
            }
            Standing::Answered(Body::Mapped { new }) if new.is_empty() => None,
            Standing::Answered(Body::Mapped { new }) => Some(Work::Undo { pages: new.to_vec() }),
            Standing::Answered(Body::Prepared) => Some(Work::Abort { transaction }),
            Standing::Ending { commit: true } | Standing::Answered(_) => {
                return Some(Body::Refused(Refusal::Decided));
            }
        };
        let Some(work) = undo else {
            return Some(self.answered(transaction, Body::Aborted { lost: Runs::none() }));
        };
        record.standing = Standing::Ending { commit: false };
        self.waiting.push_back(Job { transaction: Some(transaction), work });
        None
    }

    // ---------------------------------------------------------------- work

    fn run_next(&mut self, effects: &mut Vec<Effect>) {
        if self.running.is_some() {
            return;
        }
        let Some(job) = self.waiting.pop_front() else { return };
        if let Work::Unmap { pages } | Work::Prepare { pages, .. } = &job.work {
            self.settle_maps(pages);
        }
        if let Some(record) = job.transaction.and_then(|id| self.history.get_mut(&id))
            && record.standing == Standing::Waiting
        {
            record.standing = Standing::Running { abort: false };
        }
        effects.push(Effect::Run(job.work.clone()));
        self.running = Some(job);
    }

    /// An unmapping of these pages begins: a map that gave some of them can no longer be undone as a whole.
    fn settle_maps(&mut self, pages: &[u32]) {
        for record in self.history.values_mut() {
            if let Standing::Answered(Body::Mapped { new }) = &record.standing
                && !record.settled
            {
                record.settled = new.pages().any(|page| pages.binary_search(&page).is_ok());
            }
        }
    }

    fn worked(&mut self, result: WorkResult, effects: &mut Vec<Effect>) {
        let Some(Job { transaction, work }) = self.running.take() else { return };
        self.beside_bytes = result.beside_bytes;
        let body = outcome(&work, result.body);
        let body = match (&work, body) {
            // Nobody knows whether the pages are mapped.
            (Work::Abort { transaction }, Body::Failed(_)) => {
                Body::Aborted { lost: self.prepared_pages(*transaction) }
            }
            (_, body) => body,
        };
        let Some(transaction) = transaction else {
            // The term that asked is over, and with it nobody is left to decide.
            if let (Work::Prepare { transaction, .. }, Body::Prepared) = (work, body) {
                self.waiting.push_front(Job { transaction: None, work: Work::Abort { transaction } });
            }
            return;
        };
        let body = if work == Work::Describe {
            self.hello = None;
            body
        } else {
            let to_abort = self.history.get(&transaction).map(|record| &record.standing)
                == Some(&Standing::Running { abort: true });
            let body = if to_abort { self.undo(transaction, body) } else { Some(body) };
            match body {
                Some(body) => self.answered(transaction, body),
                None => return,
            }
        };
        let Some(Session { connection, epoch }) = self.session else { return };
        let message = Message::Answer(Answer { beside_bytes: self.beside_bytes, body });
        let frame = Frame { epoch, transaction, group: self.group, member: self.member, message };
        effects.push(Effect::Send { connection, frame });
    }

    /// An ABORT came while the work ran. `None`: there is something to undo first.
    fn undo(&mut self, transaction: TransactionId, body: Body) -> Option<Body> {
        let work = match body {
            Body::Mapped { new } if !new.is_empty() => Work::Undo { pages: new.to_vec() },
            Body::Prepared => Work::Abort { transaction },
            Body::Failed(failure) => return Some(Body::Aborted { lost: failure.lost }),
            _ => return Some(Body::Aborted { lost: Runs::none() }),
        };
        if let Some(record) = self.history.get_mut(&transaction) {
            record.standing = Standing::Ending { commit: false };
        }
        self.waiting.push_front(Job { transaction: Some(transaction), work });
        None
    }

    // ---------------------------------------------------------------- what is remembered

    fn prepared_pages(&self, transaction: TransactionId) -> Runs {
        match self.history.get(&transaction).map(|record| &record.request) {
            Some(Some(Request::Prepare(pages))) => pages.clone(),
            _ => Runs::none(),
        }
    }

    fn answered(&mut self, transaction: TransactionId, body: Body) -> Body {
        if let Some(record) = self.history.get_mut(&transaction) {
            record.standing = Standing::Answered(body.clone());
        }
        body
    }

    /// Takes a transaction into the history, out of which the oldest goes.
    fn remember(
        &mut self,
        transaction: TransactionId,
        request: Option<Request>,
        standing: Standing,
    ) -> Result<(), Refusal> {
        if self.history.len() >= HISTORY
            && let Some(oldest) = self.history.first_entry()
        {
            if transaction < *oldest.key() {
                return Err(Refusal::Forgotten);
            }
            if is_open(&oldest.get().standing) {
                return Err(Refusal::Overloaded);
            }
            self.forgotten = oldest.remove_entry().0;
        }
        self.history.insert(transaction, Record { request, standing, settled: false });
        Ok(())
    }

    /// Nobody may ask any more, and nobody is answered. Decisions that came are carried out, a PREPARE without one is aborted.
    fn end_term(&mut self) {
        self.session = None;
        self.hello = None;
        self.waiting
            .retain(|job| matches!(job.work, Work::Commit { .. } | Work::Abort { .. } | Work::Undo { .. }));
        for job in self.waiting.iter_mut().chain(&mut self.running) {
            job.transaction = None;
        }
        for (transaction, record) in std::mem::take(&mut self.history) {
            if record.standing == Standing::Answered(Body::Prepared) {
                self.waiting.push_back(Job { transaction: None, work: Work::Abort { transaction } });
            }
        }
        self.forgotten = 0;
    }
}

/// Whether the transaction holds something that is not decided, or not carried out.
fn is_open(standing: &Standing) -> bool {
    match standing {
        Standing::Waiting | Standing::Running { .. } | Standing::Ending { .. } => true,
        Standing::Answered(body) => *body == Body::Prepared,
    }
}

/// What the work gave, in words of an answer. A store that gives what the work cannot give has failed.
fn outcome(work: &Work, body: Body) -> Body {
    match (work, body) {
        (Work::Describe, body @ (Body::Created(_) | Body::Failed(_)))
        | (Work::Map { .. }, body @ (Body::Mapped { .. } | Body::Failed(_)))
        | (Work::Unmap { .. }, body @ (Body::Unmapped | Body::Failed(_)))
        | (Work::Prepare { .. }, body @ (Body::Prepared | Body::Failed(_)))
        | (Work::Commit { .. }, body @ Body::Committed)
        | (Work::Abort { .. }, body @ Body::Aborted { .. })
        | (Work::Synchronise, body @ (Body::Passed | Body::Failed(_)))
        | (Work::Trim, body @ (Body::Trimmed { .. } | Body::Failed(_)))
        | (Work::Room, body @ (Body::Room { .. } | Body::Failed(_))) => body,
        (Work::Undo { .. }, Body::Unmapped) => Body::Aborted { lost: Runs::none() },
        // Pages that stay mapped on this rank alone are of no use to the group.
        (Work::Undo { .. }, Body::Failed(failure)) => {
            Body::Aborted { lost: failure.lost.or(&failure.still_mapped) }
        }
        (work, body) => Body::Failed(Failure {
            out_of_memory: false,
            lost: pages_of(work),
            still_mapped: Runs::none(),
            detail: format!("the rank's memory answered {body:?} to {work:?}"),
        }),
    }
}

fn pages_of(work: &Work) -> Runs {
    match work {
        Work::Map { pages } | Work::Unmap { pages } | Work::Undo { pages } | Work::Prepare { pages, .. } => {
            Runs::from_pages(pages).unwrap_or_default()
        }
        _ => Runs::none(),
    }
}
