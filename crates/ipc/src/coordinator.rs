//! What a coordinator does about one group: carries operations to all its members and ends each the same way on all. Pure: no
//! clock, no thread, no socket.
//!
//! * A *map* goes to all members at once. If one fails, all are told to ABORT; what was mapped anew is unmapped.
//! * An *unmap* goes in two phases: PREPARE, and when every member is prepared COMMIT, else ABORT. After the first COMMIT there
//!   is no ABORT: COMMITs are repeated until they are answered or the member is lost. A group of one member takes one exchange.
//! * Operations whose pages are apart run side by side, as many as [`MAX_UNDER_WAY`]; one unmap at a time. Others wait in order.
//! * A member that lets a deadline pass is asked how it stands (a decision is repeated); one that stays silent until the next
//!   is lost. One that says that it works is given [`PATIENCE`] deadlines for one phase.
//! * A lost member breaks the group for good: what is undecided is undone on the others, what is decided completed, then the
//!   operations finish as [`Outcome::Broken`]. What ranks then hold is for a later term to reconcile.
//!
//! A term begins with HELLO, which tells what each member has mapped, and unmaps what is not to be kept or not mapped
//! everywhere, so that all members are equal before [`Outcome::Begun`].

mod exchange;

use std::collections::{BTreeMap, VecDeque};

use crate::message::{Answer, Body, Created, Epoch, Frame, Member, Message, Request, TransactionId};
use crate::runs::Runs;
use exchange::{Exchange, Kind, Party, Phase, Reading};

/// Exchanges at one time.
pub const MAX_UNDER_WAY: usize = 16;
/// Operations that may wait for others.
pub const MAX_QUEUED: usize = 256;
/// A transaction is not sent before the one this much older has finished: ranks remember only so many.
pub const WINDOW: u64 = crate::rank::HISTORY as u64 / 2;
/// Deadlines that may pass while a member says that it is at work.
pub const PATIENCE: u8 = 30;

/// An operation on the group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Op {
    /// Back these pages on every member, all or none. Ascending, each once, at least one.
    Map(Vec<u32>),
    /// Take the memory of these pages on every member. Ascending, each once, at least one.
    Unmap(Vec<u32>),
    /// Wait for all work on every member's device.
    Barrier,
    /// Give back the memory kept for later pages.
    Trim,
    /// How much memory could the devices give?
    Room,
    /// End the term in order, after everything that was started before.
    Bye,
}

/// What happens to a coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// The connections are there: begin the term. Once, before anything else.
    Begin,
    /// Do this. `Started` names it.
    Start {
        /// What.
        op: Op,
    },
    /// A member said something.
    Received {
        /// Index into the list of members.
        member: usize,
        /// What was said.
        frame: Frame,
    },
    /// The time that the last `Arm` of this operation gave has passed.
    Deadline {
        /// By the name that `Started` gave.
        transaction: TransactionId,
    },
    /// The connection to a member is gone.
    Lost {
        /// Index into the list of members.
        member: usize,
        /// In words for a person.
        why: String,
    },
}

/// What a coordinator wants done.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Effect {
    /// The first effect of every `Begin` and `Start`.
    Started {
        /// The operation's name from now on.
        transaction: TransactionId,
    },
    /// Send this.
    Send {
        /// Index into the list of members.
        member: usize,
        /// What is said.
        frame: Frame,
    },
    /// Say `Deadline` when the time of an exchange has passed from now, unless it finishes or is armed again before.
    Arm {
        /// The operation.
        transaction: TransactionId,
    },
    /// The operation is over. Once for each.
    Finish {
        /// The operation.
        transaction: TransactionId,
        /// How it went.
        outcome: Outcome,
    },
    /// The group is broken, for good. Once. Operations under way finish when the other members are clean, later ones at once.
    Broken {
        /// Whose fault it is.
        member: usize,
        /// In words for a person, with the member's name.
        why: String,
    },
}

/// How an operation went.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The term has begun.
    Begun {
        /// Of each member, as it stands now: `mapped` is the same for all, and part of what was to be kept.
        created: Vec<Created>,
    },
    /// The pages are backed on every member.
    Mapped {
        /// Those that were not before (on some member).
        new: Vec<u32>,
    },
    /// No page was backed: what some members had mapped is undone.
    MapFailed {
        /// Whether the member that failed first is short of memory.
        out_of_memory: bool,
        /// Pages in an unknown state on some member.
        lost: Vec<u32>,
        /// In words for a person.
        detail: String,
    },
    /// The pages have no memory on any member.
    Unmapped,
    /// Pages in neither list have no memory on any member; there are such only in a group of one.
    UnmapFailed {
        /// Pages in an unknown state on some member.
        lost: Vec<u32>,
        /// Pages that are mapped on every member, as before.
        still_mapped: Vec<u32>,
        /// In words for a person.
        detail: String,
    },
    /// Of `Barrier`.
    Passed,
    /// Of `Trim`.
    Trimmed {
        /// Of the member that gave back most, as pages count.
        bytes: u64,
    },
    /// Of `Room`.
    Room {
        /// Of the member that has least.
        free_bytes: u64,
    },
    /// Of `Bye`: the term has ended.
    Gone,
    /// Nothing was done, or a member failed in what changes no pages.
    Failed {
        /// In words for a person.
        detail: String,
    },
    /// The group is broken. Members may differ in these pages.
    Broken {
        /// In words for a person, with the member's name.
        why: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Term {
    Fresh,
    Beginning,
    Serving,
    /// BYE waits or was said: nothing starts any more.
    Leaving,
}

/// One term of one group's coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Coordinator {
    group: u32,
    epoch: Epoch,
    members: Vec<Member>,
    keep: Runs,
    term: Term,
    next: TransactionId,
    num_pages: u32,
    /// What HELLO found; until the term has begun.
    created: Vec<Created>,
    beside_bytes: Vec<u64>,
    lost: Vec<bool>,
    under_way: BTreeMap<TransactionId, Exchange>,
    queue: VecDeque<(TransactionId, Kind)>,
    broken: Option<String>,
}

impl Coordinator {
    /// A term that has not begun. `epoch` is greater than that of any earlier coordinator of this group. Of the pages in `keep`
    /// those stay mapped that are mapped on every member; they come in any order.
    pub fn new(group: u32, epoch: Epoch, members: Vec<Member>, mut keep: Vec<u32>) -> Self {
        keep.sort_unstable();
        keep.dedup();
        keep.retain(|page| *page < crate::runs::MAX_PAGES);
        Coordinator {
            group,
            epoch,
            keep: Runs::from_pages(&keep).unwrap_or_default(),
            term: Term::Fresh,
            next: 1,
            num_pages: 0,
            created: Vec::new(),
            beside_bytes: vec![0; members.len()],
            lost: vec![false; members.len()],
            under_way: BTreeMap::new(),
            queue: VecDeque::new(),
            broken: None,
            members,
        }
    }

    /// What is to be done about an event.
    pub fn step(&mut self, event: Event) -> Vec<Effect> {
        let mut effects = Vec::new();
        match event {
            Event::Begin => self.begin(&mut effects),
            Event::Start { op } => self.start(op, &mut effects),
            Event::Received { member, frame } => self.received(member, frame, &mut effects),
            Event::Deadline { transaction } => self.deadline(transaction, &mut effects),
            Event::Lost { member, why } => self.lose(member, why, &mut effects),
        }
        self.launch(&mut effects);
        effects
    }

    /// What the member that holds most beside its pages holds, as far as answers told.
    pub fn beside_bytes(&self) -> u64 {
        self.beside_bytes.iter().copied().max().unwrap_or(0)
    }

    /// Why the group is broken, if it is.
    pub fn is_broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }

    /// Whether the member (an index into the list of members) is lost.
    pub fn is_lost(&self, member: usize) -> bool {
        self.lost.get(member) == Some(&true)
    }

    /// Operations that have started and not finished.
    pub fn num_open(&self) -> usize {
        self.under_way.len() + self.queue.len()
    }

    // ---------------------------------------------------------------- what is asked

    fn begin(&mut self, effects: &mut Vec<Effect>) {
        let transaction = self.name(effects);
        if let Some(why) = self.broken.clone() {
            return finish(transaction, Outcome::Broken { why }, effects);
        }
        if self.term != Term::Fresh || self.members.is_empty() {
            let detail = "a term begins once, with at least one member".to_owned();
            return finish(transaction, Outcome::Failed { detail }, effects);
        }
        self.term = Term::Beginning;
        self.ask(transaction, transaction, Kind::Hello, effects);
    }

    fn start(&mut self, op: Op, effects: &mut Vec<Effect>) {
        let transaction = self.name(effects);
        if let Some(why) = self.broken.clone() {
            return finish(transaction, Outcome::Broken { why }, effects);
        }
        let accepted = match self.term {
            Term::Fresh => Err("the term has not begun".to_owned()),
            Term::Leaving => Err("the term has ended".to_owned()),
            _ if self.queue.len() >= MAX_QUEUED => Err(format!("{MAX_QUEUED} operations wait already")),
            _ => self.kind(op),
        };
        match accepted {
            Ok(kind) => {
                if kind == Kind::Bye {
                    self.term = Term::Leaving;
                }
                self.queue.push_back((transaction, kind));
            }
            Err(detail) => finish(transaction, Outcome::Failed { detail }, effects),
        }
    }

    fn name(&mut self, effects: &mut Vec<Effect>) -> TransactionId {
        let transaction = self.next;
        self.next += 1;
        effects.push(Effect::Started { transaction });
        transaction
    }

    fn kind(&self, op: Op) -> Result<Kind, String> {
        let runs = |pages: &[u32]| match Runs::from_pages(pages) {
            Ok(runs) if runs.is_empty() => Err("no pages".to_owned()),
            Ok(runs) => Ok(runs),
            Err(error) => Err(error.to_string()),
        };
        Ok(match op {
            Op::Map(pages) => Kind::Map(runs(&pages)?),
            Op::Unmap(pages) if self.members.len() == 1 => Kind::Unmap(runs(&pages)?),
            Op::Unmap(pages) => Kind::Prepare(runs(&pages)?),
            Op::Barrier => Kind::Barrier,
            Op::Trim => Kind::Trim,
            Op::Room => Kind::Room,
            Op::Bye => Kind::Bye,
        })
    }

    /// Sends what may be sent now, in the order in which it was started.
    fn launch(&mut self, effects: &mut Vec<Effect>) {
        if !matches!(self.term, Term::Serving | Term::Leaving) || self.broken.is_some() {
            return;
        }
        let mut at = 0;
        let mut blocked = Blocked::of(self.under_way.values().map(|exchange| &exchange.kind));
        while let Some((transaction, kind)) = self.queue.get(at) {
            let transaction = *transaction;
            let oldest = self.oldest().unwrap_or(transaction);
            if self.under_way.len() >= MAX_UNDER_WAY || transaction >= oldest + WINDOW {
                break;
            }
            if kind.pages().is_some_and(|pages| pages.end() > self.num_pages) {
                let detail = format!("the group has {} pages, from 0", self.num_pages);
                self.queue.remove(at);
                finish(transaction, Outcome::Failed { detail }, effects);
                continue;
            }
            let free = match kind {
                Kind::Bye => at == 0 && self.under_way.is_empty(),
                kind => !blocked.blocks(kind),
            };
            blocked.add(kind);
            if !free {
                at += 1;
            } else if let Some((_, kind)) = self.queue.remove(at) {
                self.ask(transaction, transaction, kind, effects);
            }
        }
    }

    fn oldest(&self) -> Option<TransactionId> {
        let under_way = self.under_way.values().map(|exchange| exchange.operation).min();
        let queued = self.queue.front().map(|(transaction, _)| *transaction);
        under_way.into_iter().chain(queued).min()
    }

    /// Begins an exchange with every member.
    fn ask(&mut self, name: TransactionId, operation: TransactionId, kind: Kind, effects: &mut Vec<Effect>) {
        let party = |member: usize| match &kind {
            Kind::Reconcile(pages) if pages[member].is_empty() => Party::Out,
            _ => Party::ASKED,
        };
        let parties = (0..self.members.len()).map(party).collect();
        let exchange =
            Exchange { operation, kind, phase: Phase::Asked, parties, failure: None, lost: Runs::none() };
        self.under_way.insert(name, exchange);
        self.tell(name, effects);
    }

    /// Tells all who have not answered what the phase has to say.
    fn tell(&self, name: TransactionId, effects: &mut Vec<Effect>) {
        let Some(exchange) = self.under_way.get(&name) else { return };
        for member in (0..self.members.len()).filter(|member| exchange.is_waiting(*member)) {
            effects.push(self.send(member, name, exchange.request(member)));
        }
        effects.push(Effect::Arm { transaction: exchange.operation });
    }

    fn send(&self, member: usize, transaction: TransactionId, request: Request) -> Effect {
        let frame = Frame {
            epoch: self.epoch,
            transaction,
            group: self.group,
            member: self.members[member],
            message: Message::Request(request),
        };
        Effect::Send { member, frame }
    }

    // ---------------------------------------------------------------- what comes

    fn received(&mut self, member: usize, frame: Frame, effects: &mut Vec<Effect>) {
        let Some(name) = self.members.get(member).copied() else { return };
        if self.lost[member] || frame.epoch != self.epoch {
            return;
        }
        let answer = match frame.message {
            Message::Answer(answer) if frame.group == self.group && frame.member == name => answer,
            Message::Answer(_) => {
                let why = format!("it answers for {} in group {}", frame.member, frame.group);
                return self.lose(member, why, effects);
            }
            Message::Request(_) => {
                return self.lose(member, "it asks instead of answering".to_owned(), effects);
            }
        };
        self.beside_bytes[member] = answer.beside_bytes;
        self.answered(member, frame.transaction, answer, effects);
    }

    fn answered(&mut self, member: usize, name: TransactionId, answer: Answer, effects: &mut Vec<Effect>) {
        let Some(exchange) = self.under_way.get_mut(&name) else { return };
        let Party::Waits { silent, .. } = &mut exchange.parties[member] else { return };
        let heard = std::mem::replace(silent, false);
        match exchange.read(&answer.body) {
            Reading::Answer => {
                exchange.note(self.members[member], &answer.body);
                exchange.parties[member] = Party::Answered(answer.body);
                self.advance(name, effects);
            }
            Reading::Alive => {}
            Reading::Again => {
                let again = exchange.request(member);
                effects.push(self.send(member, name, again));
            }
            Reading::Late => {
                // Says nothing of whether the member hears what is asked now.
                if let Party::Waits { silent, .. } = &mut exchange.parties[member] {
                    *silent = heard;
                }
            }
            Reading::Wrong(why) => self.lose(member, why, effects),
        }
    }

    fn deadline(&mut self, operation: TransactionId, effects: &mut Vec<Effect>) {
        let found = self.under_way.iter_mut().find(|(_, exchange)| exchange.operation == operation);
        let Some((name, exchange)) = found else { return };
        let (name, reminder) = (*name, exchange.reminder());
        let (mut remind, mut gone) = (Vec::new(), Vec::new());
        for (member, party) in exchange.parties.iter_mut().enumerate() {
            match party {
                Party::Waits { silent, deadlines } if *silent || *deadlines >= PATIENCE => gone.push(member),
                Party::Waits { silent, deadlines } => {
                    *silent = true;
                    *deadlines += 1;
                    remind.push(member);
                }
                Party::Answered(_) | Party::Out => {}
            }
        }
        for member in remind {
            effects.push(self.send(member, name, reminder.clone()));
        }
        if gone.is_empty() {
            return effects.push(Effect::Arm { transaction: operation });
        }
        for member in gone {
            self.lose(member, "it does not answer in time".to_owned(), effects);
        }
        if self.under_way.contains_key(&name) && !effects.contains(&Effect::Arm { transaction: operation }) {
            effects.push(Effect::Arm { transaction: operation });
        }
    }

    fn lose(&mut self, member: usize, why: String, effects: &mut Vec<Effect>) {
        if self.lost.get(member) != Some(&false) {
            return;
        }
        self.lost[member] = true;
        let leaving = self.under_way.values().any(|exchange| exchange.kind == Kind::Bye);
        let gone = self.term == Term::Leaving && self.num_open() == 0;
        if !leaving && !gone {
            self.break_off(member, why, effects);
        }
        let names: Vec<TransactionId> = self.under_way.keys().copied().collect();
        for name in names {
            let Some(exchange) = self.under_way.get_mut(&name) else { continue };
            exchange.parties[member] = Party::Out;
            match exchange.phase {
                Phase::Asked if exchange.kind.is_undone_together() => self.abort(name, effects),
                Phase::Asked if exchange.kind != Kind::Bye => self.end(name, Outcome::Gone, effects),
                Phase::Asked | Phase::Commit | Phase::Abort => self.advance(name, effects),
            }
        }
    }

    /// The group is broken: nothing new begins.
    fn break_off(&mut self, member: usize, why: String, effects: &mut Vec<Effect>) {
        if self.broken.is_some() {
            return;
        }
        let why = format!("{} is lost: {why}", self.members[member]);
        effects.push(Effect::Broken { member, why: why.clone() });
        self.broken = Some(why.clone());
        for (transaction, _) in std::mem::take(&mut self.queue) {
            finish(transaction, Outcome::Broken { why: why.clone() }, effects);
        }
    }

    // ---------------------------------------------------------------- how exchanges go on

    /// Somebody has answered.
    fn advance(&mut self, name: TransactionId, effects: &mut Vec<Effect>) {
        let Some(exchange) = self.under_way.get_mut(&name) else { return };
        if exchange.phase == Phase::Asked && exchange.kind.is_undone_together() && exchange.has_failure() {
            return self.abort(name, effects);
        }
        if !exchange.is_answered() {
            return;
        }
        match exchange.phase {
            Phase::Asked => self.all_answered(name, effects),
            Phase::Commit => self.end(name, Outcome::Unmapped, effects),
            Phase::Abort => {
                let outcome = undone(exchange);
                self.end(name, outcome, effects);
            }
        }
    }

    /// Nothing was decided and something failed: everybody is told to undo it, but for those that failed, which have.
    fn abort(&mut self, name: TransactionId, effects: &mut Vec<Effect>) {
        let Some(exchange) = self.under_way.get_mut(&name) else { return };
        exchange.phase = Phase::Abort;
        for party in &mut exchange.parties {
            if !matches!(party, Party::Answered(Body::Failed(_)) | Party::Out) {
                *party = Party::ASKED;
            }
        }
        if exchange.is_answered() {
            return self.advance(name, effects);
        }
        self.tell(name, effects);
    }

    fn all_answered(&mut self, name: TransactionId, effects: &mut Vec<Effect>) {
        let Some(exchange) = self.under_way.get_mut(&name) else { return };
        let outcome = match &exchange.kind {
            Kind::Hello => return self.met(name, effects),
            Kind::Prepare(_) => {
                exchange.phase = Phase::Commit;
                exchange.parties.fill(Party::ASKED);
                return self.tell(name, effects);
            }
            Kind::Reconcile(_) => self.reconciled(name),
            _ => answered(exchange),
        };
        self.end(name, outcome, effects);
    }

    /// The exchange is over. In a broken group whatever came of it is unknown to some member.
    fn end(&mut self, name: TransactionId, outcome: Outcome, effects: &mut Vec<Effect>) {
        let Some(exchange) = self.under_way.remove(&name) else { return };
        let outcome = match self.broken.clone() {
            Some(why) => Outcome::Broken { why },
            None => outcome,
        };
        if matches!(outcome, Outcome::Begun { .. }) && self.term == Term::Beginning {
            self.term = Term::Serving;
        }
        finish(exchange.operation, outcome, effects);
    }

    // ---------------------------------------------------------------- the beginning of a term

    /// Every member has told what it has.
    fn met(&mut self, name: TransactionId, effects: &mut Vec<Effect>) {
        let Some(exchange) = self.under_way.get(&name) else { return };
        let operation = exchange.operation;
        let created = exchange.parties.iter().filter_map(|party| match party {
            Party::Answered(Body::Created(created)) => Some(created.clone()),
            _ => None,
        });
        self.created = created.collect();
        if let Some((member, why)) = self.disagreement() {
            return self.lose(member, why, effects);
        }
        self.num_pages = self.created.first().map_or(0, |created| created.num_pages);
        let kept = self.created.iter().fold(self.keep.clone(), |kept, created| kept.and(&created.mapped));
        let surplus: Vec<Runs> = self.created.iter().map(|created| created.mapped.minus(&kept)).collect();
        for created in &mut self.created {
            created.mapped = kept.clone();
        }
        if surplus.iter().all(Runs::is_empty) {
            let outcome = Outcome::Begun { created: self.created.clone() };
            return self.end(name, outcome, effects);
        }
        self.under_way.remove(&name);
        let name = self.next;
        self.next += 1;
        self.ask(name, operation, Kind::Reconcile(surplus), effects);
    }

    fn disagreement(&self) -> Option<(usize, String)> {
        let shape = |created: &Created| (created.num_pages, created.blocks_per_page, created.ids_per_page);
        let first = shape(self.created.first()?);
        let member = self.created.iter().position(|created| shape(created) != first)?;
        let (num_pages, blocks_per_page, ids_per_page) = shape(&self.created[member]);
        let why = format!(
            "its group has {num_pages} pages of {blocks_per_page} blocks and {ids_per_page} ids, \
             that of {} has {} of {} and {}",
            self.members[0], first.0, first.1, first.2
        );
        Some((member, why))
    }

    /// What was not to be kept is unmapped; pages that would not go are lost to the group.
    fn reconciled(&mut self, name: TransactionId) -> Outcome {
        if let Some(exchange) = self.under_way.get(&name) {
            for (created, party) in self.created.iter_mut().zip(&exchange.parties) {
                if let Party::Answered(Body::Failed(failure)) = party {
                    created.lost = created.lost.or(&failure.lost).or(&failure.still_mapped);
                }
            }
        }
        Outcome::Begun { created: std::mem::take(&mut self.created) }
    }
}

/// What those that wait or run keep others from.
struct Blocked {
    pages: Runs,
    unmap: bool,
}

impl Blocked {
    fn of<'a>(kinds: impl Iterator<Item = &'a Kind>) -> Self {
        let mut blocked = Blocked { pages: Runs::none(), unmap: false };
        kinds.for_each(|kind| blocked.add(kind));
        blocked
    }

    fn add(&mut self, kind: &Kind) {
        if let Some(pages) = kind.pages() {
            self.pages = self.pages.or(pages);
        }
        self.unmap |= kind.is_unmap();
    }

    fn blocks(&self, kind: &Kind) -> bool {
        (self.unmap && kind.is_unmap()) || kind.pages().is_some_and(|pages| pages.overlaps(&self.pages))
    }
}

fn finish(transaction: TransactionId, outcome: Outcome, effects: &mut Vec<Effect>) {
    effects.push(Effect::Finish { transaction, outcome });
}

/// Of an exchange that was aborted everywhere.
fn undone(exchange: &Exchange) -> Outcome {
    let (lost, detail) = (exchange.lost.to_vec(), exchange.detail());
    match &exchange.kind {
        Kind::Prepare(pages) => {
            let still_mapped = pages.minus(&exchange.lost).to_vec();
            Outcome::UnmapFailed { lost, still_mapped, detail }
        }
        _ => {
            let out_of_memory = exchange.failure.as_ref().is_some_and(|(_, failure)| failure.out_of_memory);
            Outcome::MapFailed { out_of_memory, lost, detail }
        }
    }
}

/// Of an exchange in one phase that every member has answered.
fn answered(exchange: &Exchange) -> Outcome {
    if let Some((_, failure)) = &exchange.failure {
        let detail = exchange.detail();
        return match &exchange.kind {
            Kind::Unmap(_) => Outcome::UnmapFailed {
                lost: failure.lost.to_vec(),
                still_mapped: failure.still_mapped.to_vec(),
                detail,
            },
            _ => Outcome::Failed { detail },
        };
    }
    let bodies = || {
        exchange.parties.iter().filter_map(|party| match party {
            Party::Answered(body) => Some(body),
            _ => None,
        })
    };
    match &exchange.kind {
        Kind::Map(_) => {
            let new = bodies().fold(Runs::none(), |all, body| match body {
                Body::Mapped { new } => all.or(new),
                _ => all,
            });
            Outcome::Mapped { new: new.to_vec() }
        }
        Kind::Unmap(_) => Outcome::Unmapped,
        Kind::Barrier => Outcome::Passed,
        Kind::Trim => {
            let bytes = bodies().map(|body| if let Body::Trimmed { bytes } = body { *bytes } else { 0 });
            Outcome::Trimmed { bytes: bytes.max().unwrap_or(0) }
        }
        Kind::Room => {
            let free =
                bodies().map(|body| if let Body::Room { free_bytes } = body { *free_bytes } else { 0 });
            Outcome::Room { free_bytes: free.min().unwrap_or(0) }
        }
        Kind::Bye => Outcome::Gone,
        // These go on in a phase of their own.
        Kind::Hello | Kind::Reconcile(_) | Kind::Prepare(_) => {
            Outcome::Failed { detail: "not an end".to_owned() }
        }
    }
}
