//! The world: one coordinator at a time, its ranks, and what is between them.

use std::hash::{DefaultHasher, Hash, Hasher};

use std::collections::BTreeMap;

use super::Violation;
use super::book::{Book, Facts, pages};
use super::store::{Fault, Pages, Store};
use crate::coordinator::{self, Coordinator, Op, Outcome};
use crate::message::{Answer, Body, Epoch, Frame, Member, Message, Request, TransactionId};
use crate::rank::{self, ConnectionId, Rank, Work};
use crate::runs::Runs;

type Checked = Result<(), Violation>;

/// Whom a frame reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum To {
    /// A rank, over a connection of its own.
    Rank {
        /// Index into the members.
        member: usize,
        /// Named as the epoch of the term that made it.
        connection: ConnectionId,
    },
    /// The coordinator of this term.
    Coordinator {
        /// From this member.
        member: usize,
    },
}

/// A frame under way. Any may arrive next.
#[derive(Debug, Clone)]
pub struct Flight {
    /// Whom it reaches.
    pub to: To,
    /// What is said.
    pub frame: Frame,
    /// When, for whoever keeps a clock; 0 is not decided yet. No part of the world's state.
    pub due: u64,
    key: u64,
}

impl Flight {
    fn new(to: To, frame: Frame) -> Self {
        let mut hasher = DefaultHasher::new();
        (to, &frame).hash(&mut hasher);
        Flight { to, frame, due: 0, key: hasher.finish() }
    }
}

impl PartialEq for Flight {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Flight {}

impl Hash for Flight {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key.hash(state);
    }
}

/// No part of the world's state: two worlds are the same however they came about.
#[derive(Debug, Clone)]
struct Seen(Facts);

impl PartialEq for Seen {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Seen {}

impl Hash for Seen {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// News of an end, under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Notice {
    /// To a rank: the connection is gone.
    Closed {
        /// Index into the members.
        member: usize,
        /// Which.
        connection: ConnectionId,
    },
    /// To the coordinator: the member is gone.
    Lost {
        /// Index into the members.
        member: usize,
    },
}

/// What happens next.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Somebody asks the coordinator for something.
    Start(Op),
    /// The flight of this index arrives.
    Deliver(usize),
    /// It arrives, and will arrive again.
    Duplicate(usize),
    /// It never arrives.
    Drop(usize),
    /// The rank's driver has done what it was at.
    Work {
        /// Index into the members.
        member: usize,
        /// How.
        fault: Fault,
    },
    /// An armed deadline passes.
    Deadline(TransactionId),
    /// News arrives.
    Notice(Notice),
    /// The coordinator dies.
    CrashCoordinator,
    /// A new coordinator begins, and ranks that are dead begin anew.
    BeginTerm,
    /// A rank dies, and its memory with it.
    CrashRank(usize),
    /// A connection breaks, which both ends learn.
    Cut(usize),
}

/// A protocol that is wrong on purpose: the checks are to find it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mutant {
    /// None.
    None,
    /// A rank that does not remember an ABORT of what it never heard of.
    ForgetsEarlyAborts,
    /// A coordinator whose repeated COMMIT is an ABORT.
    CommitBecomesAbort,
    /// A rank that does not notice that its coordinator is gone, and is not taken over.
    NoPresumedAbort,
    /// A coordinator to which one member's COMMITTED is everybody's.
    OneForAll,
    /// A rank that carries a repeated request out again.
    DoesItTwice,
}

/// A place for a rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Seat {
    /// The rank; none while it is dead.
    pub rank: Option<Rank>,
    /// Its memory.
    pub store: Store,
    /// What its driver is at.
    pub running: Option<Work>,
    /// Whether the term counts on it: alive, and its connection whole.
    pub counts: bool,
}

/// A group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    members: Vec<Member>,
    num_pages: u32,
    keep: Vec<u32>,
    epoch: Epoch,
    coordinator: Option<Coordinator>,
    seats: Vec<Seat>,
    flights: Vec<Flight>,
    /// Each with when it arrives, for whoever keeps a clock; 0 is not decided.
    notices: BTreeMap<Notice, u64>,
    /// As `notices`.
    armed: BTreeMap<TransactionId, u64>,
    book: Book,
    facts: Seen,
    mutant: Mutant,
}

impl World {
    /// A group of ranks of which nothing is mapped, and a term that begins. At most 64 pages.
    pub fn new(
        members: Vec<Member>,
        num_pages: u32,
        keep: Vec<u32>,
        mutant: Mutant,
    ) -> Result<Self, Violation> {
        let seat = |member: &Member| Seat {
            rank: Some(Rank::new(*member, 0, num_pages)),
            store: Store::new(num_pages),
            running: None,
            counts: true,
        };
        let mut world = World {
            seats: members.iter().map(seat).collect(),
            members,
            num_pages,
            keep,
            epoch: 0,
            coordinator: None,
            flights: Vec::new(),
            notices: BTreeMap::new(),
            armed: BTreeMap::new(),
            book: Book::default(),
            facts: Seen(Facts::default()),
            mutant,
        };
        world.apply(Action::BeginTerm)?;
        Ok(world)
    }

    // ---------------------------------------------------------------- what can be seen

    /// Frames under way.
    pub fn flights(&self) -> &[Flight] {
        &self.flights
    }

    /// Frames under way, to be given their times.
    pub fn flights_mut(&mut self) -> &mut [Flight] {
        &mut self.flights
    }

    /// News under way, with their times.
    pub fn notices_mut(&mut self) -> &mut BTreeMap<Notice, u64> {
        &mut self.notices
    }

    /// Armed deadlines, with their times.
    pub fn armed_mut(&mut self) -> &mut BTreeMap<TransactionId, u64> {
        &mut self.armed
    }

    /// News under way.
    pub fn notices(&self) -> impl Iterator<Item = Notice> + '_ {
        self.notices.keys().copied()
    }

    /// Armed deadlines.
    pub fn armed(&self) -> impl Iterator<Item = TransactionId> + '_ {
        self.armed.keys().copied()
    }

    /// The ranks.
    pub fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// Whether there is a coordinator.
    pub fn is_coordinated(&self) -> bool {
        self.coordinator.is_some()
    }

    /// What has happened so far.
    pub fn facts(&self) -> Facts {
        self.facts.0
    }

    /// Whether only a deadline, or nothing, can happen by itself.
    pub fn is_idle(&self) -> bool {
        self.flights.is_empty()
            && self.notices.is_empty()
            && self.seats.iter().all(|seat| seat.running.is_none())
    }

    /// Whether the operation makes sense now: its pages are in no other's hands, unmapped pages are mapped, none is lost.
    pub fn may_start(&self, op: &Op) -> bool {
        let held = self.book.busy() | self.book.lost;
        let free = pages(op) & held == 0;
        let served = self.coordinator.is_some() && self.book.begun && !self.book.broken;
        served && free && !matches!(op, Op::Unmap(_) if pages(op) & !self.book.agreed != 0)
    }

    /// Pages that every rank has mapped, as far as outcomes tell.
    pub fn agreed(&self) -> Pages {
        self.book.agreed
    }

    /// Operations that have not finished.
    pub fn num_open(&self) -> usize {
        self.book.open.len()
    }

    // ---------------------------------------------------------------- what happens

    /// Something happens. What cannot happen now does not.
    pub fn apply(&mut self, action: Action) -> Checked {
        match action {
            Action::Start(op) => self.coordinate(coordinator::Event::Start { op: op.clone() }, Some(op))?,
            Action::Deliver(index) if index < self.flights.len() => {
                let flight = self.flights.remove(index);
                self.arrive(flight)?;
            }
            Action::Duplicate(index) if index < self.flights.len() => {
                let mut flight = self.flights[index].clone();
                flight.due = 0;
                self.arrive(flight)?;
            }
            Action::Drop(index) if index < self.flights.len() => {
                self.flights.remove(index);
            }
            Action::Deliver(_) | Action::Duplicate(_) | Action::Drop(_) => {}
            Action::Work { member, fault } => self.work(member, fault)?,
            Action::Deadline(transaction) => {
                if self.armed.remove(&transaction).is_some() {
                    self.coordinate(coordinator::Event::Deadline { transaction }, None)?;
                }
            }
            Action::Notice(notice) => {
                if self.notices.remove(&notice).is_some() {
                    self.hear(notice)?;
                }
            }
            Action::CrashCoordinator => self.crash_coordinator(),
            Action::BeginTerm => self.begin_term()?,
            Action::CrashRank(member) => self.crash_rank(member),
            Action::Cut(member) => self.cut(member),
        }
        self.check()
    }

    fn begin_term(&mut self) -> Checked {
        if self.coordinator.is_some() {
            return Ok(());
        }
        if self.epoch > 0 {
            self.facts.0.add(Facts::TAKEN_OVER);
        }
        self.epoch += 1;
        for (seat, member) in self.seats.iter_mut().zip(&self.members) {
            if seat.rank.is_none() {
                seat.rank = Some(Rank::new(*member, 0, self.num_pages));
                seat.store = Store::new(self.num_pages);
            }
            seat.counts = true;
        }
        self.book = Book::default();
        let (members, keep) = (self.members.clone(), self.keep.clone());
        self.coordinator = Some(Coordinator::new(0, self.epoch, members, keep));
        self.coordinate(coordinator::Event::Begin, None)
    }

    fn crash_coordinator(&mut self) {
        if self.coordinator.take().is_none() {
            return;
        }
        let half = self.book.committed().any(|transaction| {
            let kept = |seat: &Seat| seat.store.prepared.is_some_and(|(prepared, _)| prepared == transaction);
            self.seats.iter().any(kept) && !self.seats.iter().all(kept)
        });
        if half {
            self.facts.0.add(Facts::HALF_COMMITTED);
        }
        self.flights.retain(|flight| matches!(flight.to, To::Rank { .. }));
        self.notices.retain(|notice, _| matches!(notice, Notice::Closed { .. }));
        self.armed.clear();
        for member in 0..self.seats.len() {
            if self.seats[member].counts {
                self.notices.insert(Notice::Closed { member, connection: self.epoch }, 0);
            }
        }
        self.book = Book::default();
    }

    fn crash_rank(&mut self, member: usize) {
        let Some(seat) = self.seats.get_mut(member) else { return };
        if seat.rank.take().is_none() {
            return;
        }
        (seat.running, seat.counts) = (None, false);
        // What it said is under way, what was said to it is gone.
        self.flights.retain(|flight| !matches!(flight.to, To::Rank { member: dead, .. } if dead == member));
        self.notices
            .retain(|notice, _| !matches!(notice, Notice::Closed { member: dead, .. } if *dead == member));
        if self.coordinator.is_some() {
            self.notices.insert(Notice::Lost { member }, 0);
        }
    }

    fn cut(&mut self, member: usize) {
        let epoch = self.epoch;
        let Some(seat) = self.seats.get_mut(member) else { return };
        if !seat.counts || self.coordinator.is_none() {
            return;
        }
        seat.counts = false;
        self.flights.retain(|flight| match flight.to {
            To::Rank { member: other, connection } => other != member || connection != epoch,
            To::Coordinator { member: other } => other != member,
        });
        self.notices.insert(Notice::Closed { member, connection: epoch }, 0);
        self.notices.insert(Notice::Lost { member }, 0);
    }

    fn hear(&mut self, notice: Notice) -> Checked {
        match notice {
            Notice::Lost { member } => {
                let why = "its connection closed".to_owned();
                self.coordinate(coordinator::Event::Lost { member, why }, None)
            }
            Notice::Closed { member, connection } => {
                self.flights.retain(|flight| flight.to != To::Rank { member, connection });
                if self.mutant == Mutant::NoPresumedAbort {
                    return Ok(());
                }
                self.rank(member, rank::Event::Closed { connection })
            }
        }
    }

    fn arrive(&mut self, flight: Flight) -> Checked {
        match flight.to {
            To::Coordinator { member } => {
                if let (Mutant::OneForAll, Message::Answer(Answer { body: Body::Committed, .. })) =
                    (self.mutant, &flight.frame.message)
                {
                    for (member, name) in self.members.clone().into_iter().enumerate() {
                        let frame = Frame { member: name, ..flight.frame.clone() };
                        self.coordinate(coordinator::Event::Received { member, frame }, None)?;
                    }
                }
                self.coordinate(coordinator::Event::Received { member, frame: flight.frame }, None)
            }
            To::Rank { member, connection } => {
                if connection < self.epoch {
                    self.facts.0.add(Facts::STALE);
                }
                self.arrive_at_rank(member, connection, flight.frame)
            }
        }
    }

    fn arrive_at_rank(&mut self, member: usize, connection: ConnectionId, frame: Frame) -> Checked {
        let standing = self.standing(member, connection, &frame);
        if let Message::Request(request) = &frame.message {
            match (request, &standing) {
                (Request::Abort, Some(Body::Unknown)) => self.facts.0.add(Facts::OVERTAKEN),
                (Request::Abort, Some(Body::Running)) => self.facts.0.add(Facts::ABORTED_AT_WORK),
                (Request::Query, Some(Body::Unknown)) => self.facts.0.add(Facts::REQUEST_HEALED),
                (Request::Query, Some(body)) if *body != Body::Running => {
                    self.facts.0.add(Facts::ANSWER_HEALED)
                }
                _ => {}
            }
        }
        match (self.mutant, &frame.message, standing) {
            (Mutant::ForgetsEarlyAborts, Message::Request(Request::Abort), Some(Body::Unknown)) => {
                let body = Body::Aborted { lost: Runs::none() };
                let message = Message::Answer(Answer { beside_bytes: 0, body });
                self.fly(To::Coordinator { member }, Frame { message, ..frame });
                Ok(())
            }
            (
                Mutant::DoesItTwice,
                Message::Request(Request::Prepare(pages)),
                Some(Body::Prepared | Body::Committed),
            ) => {
                let work = Work::Prepare { transaction: frame.transaction, pages: pages.to_vec() };
                self.seats[member].store.work(&work, Fault::None).map(drop)
            }
            _ => self.rank(member, rank::Event::Received { connection, frame }),
        }
    }

    /// How the frame's transaction stands at the rank, asked without asking.
    fn standing(&self, member: usize, connection: ConnectionId, frame: &Frame) -> Option<Body> {
        let interesting =
            matches!(frame.message, Message::Request(Request::Abort | Request::Query | Request::Prepare(_)));
        if !interesting {
            return None;
        }
        let mut rank = self.seats.get(member)?.rank.clone()?;
        let frame = Frame { message: Message::Request(Request::Query), ..frame.clone() };
        let effects = rank.step(rank::Event::Received { connection, frame });
        effects.into_iter().find_map(|effect| match effect {
            rank::Effect::Send { frame: Frame { message: Message::Answer(answer), .. }, .. } => {
                Some(answer.body)
            }
            _ => None,
        })
    }

    fn work(&mut self, member: usize, fault: Fault) -> Checked {
        let Some(seat) = self.seats.get_mut(member) else { return Ok(()) };
        let Some(work) = seat.running.take() else { return Ok(()) };
        let lost = seat.store.lost;
        let result = seat.store.work(&work, fault)?;
        if seat.store.lost != lost {
            self.facts.0.add(Facts::LOST_PAGE);
        }
        self.rank(member, rank::Event::Worked { result })
    }

    // ---------------------------------------------------------------- effects

    fn fly(&mut self, to: To, frame: Frame) {
        let flight = Flight::new(to, frame);
        let at = self.flights.partition_point(|other| other.key <= flight.key);
        self.flights.insert(at, flight);
    }

    fn rank(&mut self, member: usize, event: rank::Event) -> Checked {
        let Some(seat) = self.seats.get_mut(member) else { return Ok(()) };
        let Some(rank) = &mut seat.rank else { return Ok(()) };
        for effect in rank.step(event) {
            match effect {
                rank::Effect::Run(work) => {
                    let seat = &mut self.seats[member];
                    if matches!(work, Work::Abort { transaction } if !self.book.is_aborted(transaction)) {
                        self.facts.0.add(Facts::PRESUMED_ABORT);
                    }
                    if let Some(running) = seat.running.replace(work) {
                        return Err(Violation(format!("a second work while {running:?} runs")));
                    }
                }
                rank::Effect::Send { connection, frame } => {
                    let heard = self.coordinator.is_some() && self.seats[member].counts;
                    if heard && connection == self.epoch {
                        self.fly(To::Coordinator { member }, frame);
                    }
                }
                rank::Effect::Close { connection } => {
                    if connection == self.epoch && self.coordinator.is_some() {
                        return Err(Violation(format!(
                            "{} closes the term's connection",
                            self.members[member]
                        )));
                    }
                }
            }
        }
        Ok(())
    }

    fn coordinate(&mut self, event: coordinator::Event, mut op: Option<Op>) -> Checked {
        let Some(coordinator) = &mut self.coordinator else { return Ok(()) };
        for effect in coordinator.step(event) {
            match effect {
                coordinator::Effect::Started { transaction } => {
                    self.book.open.insert(transaction, op.take());
                }
                coordinator::Effect::Send { member, frame } => self.send(member, frame)?,
                coordinator::Effect::Arm { transaction } => {
                    if !self.book.open.contains_key(&transaction) {
                        return Err(Violation(format!("{transaction} is armed and not open")));
                    }
                    self.armed.insert(transaction, 0);
                }
                coordinator::Effect::Finish { transaction, outcome } => {
                    self.armed.remove(&transaction);
                    self.finish(transaction, &outcome)?;
                }
                coordinator::Effect::Broken { .. } => {
                    self.facts.0.add(Facts::BROKEN);
                    self.book.breaks()?;
                }
            }
        }
        Ok(())
    }

    fn send(&mut self, member: usize, mut frame: Frame) -> Checked {
        if let Message::Request(request) = &mut frame.message {
            let again = *request == Request::Commit && self.book.is_committed(frame.transaction);
            // Its deadline has passed: it is not armed at this moment.
            let repeated = again && !self.armed.contains_key(&frame.transaction);
            if repeated && self.mutant == Mutant::CommitBecomesAbort {
                *request = Request::Abort;
            }
            self.book.sent(frame.transaction, request)?;
            match request {
                Request::Commit => self.facts.0.add(Facts::COMMITTED),
                Request::Abort => self.facts.0.add(Facts::ABORTED),
                Request::Unmap(_) if !self.book.begun => self.facts.0.add(Facts::RECONCILED),
                _ => {}
            }
            if repeated {
                self.facts.0.add(Facts::COMMIT_REPEATED);
            }
        }
        if self.seats[member].counts {
            self.fly(To::Rank { member, connection: self.epoch }, frame);
        }
        Ok(())
    }

    fn finish(&mut self, transaction: TransactionId, outcome: &Outcome) -> Checked {
        if matches!(outcome, Outcome::Mapped { .. } | Outcome::Unmapped) {
            self.facts.0.add(Facts::DONE);
        }
        let stores: Vec<&Store> =
            self.seats.iter().filter(|seat| seat.counts).map(|seat| &seat.store).collect();
        self.book.finish(transaction, outcome, &stores)
    }

    // ---------------------------------------------------------------- what must hold

    fn check(&self) -> Checked {
        if let Some(coordinator) = &self.coordinator {
            if coordinator.num_open() != self.book.open.len() {
                return Err(Violation(format!(
                    "open are {:?}, it says {}",
                    self.book.open,
                    coordinator.num_open()
                )));
            }
            if self.book.begun && !self.book.broken {
                let counting = self.seats.iter().filter(|seat| seat.counts);
                self.book.compare(&counting.map(|seat| &seat.store).collect::<Vec<_>>())?;
            }
            if self.book.begun && self.book.broken && self.book.open.is_empty() {
                self.check_survivors(coordinator)?;
            }
        }
        if self.is_idle() && self.armed.is_empty() { self.check_rest() } else { Ok(()) }
    }

    /// A group that is broken and cleaned up: those who are left do not differ.
    fn check_survivors(&self, coordinator: &Coordinator) -> Checked {
        let left = |(member, seat): &(usize, &Seat)| seat.counts && !coordinator.is_lost(*member);
        let left: Vec<&Store> =
            self.seats.iter().enumerate().filter(left).map(|(_, seat)| &seat.store).collect();
        let unknown = left.iter().fold(self.book.lost, |unknown, store| unknown | store.lost | store.stuck);
        let differs = |pair: &[&Store]| (pair[0].mapped ^ pair[1].mapped) & !unknown != 0;
        if left.windows(2).any(differs) || left.iter().any(|store| store.prepared.is_some()) {
            return Err(Violation(format!("survivors differ: {left:?}")));
        }
        Ok(())
    }

    /// Nothing can happen by itself any more.
    fn check_rest(&self) -> Checked {
        if !self.book.open.is_empty() {
            return Err(Violation(format!("{:?} never finish", self.book.open)));
        }
        for (seat, member) in self.seats.iter().zip(&self.members) {
            let Some(rank) = &seat.rank else { continue };
            if rank.is_busy() || seat.store.prepared.is_some() {
                return Err(Violation(format!("{member} is left with {:?}", seat.store)));
            }
        }
        Ok(())
    }
}
