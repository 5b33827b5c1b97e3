//! Each core alone, against a peer that says what it likes: arbitrary frames, ends of connections, deadlines. What is wrong is refused,
//! and what must hold does so whatever comes.
#![no_main]

mod frames;

use std::collections::{BTreeMap, BTreeSet};

use kvcached_ipc::coordinator::{self, Coordinator, MAX_QUEUED, MAX_UNDER_WAY, Op, Outcome};
use kvcached_ipc::message::{
    Answer, Body, Created, Epoch, Failure, Frame, Member, Message, Request, TransactionId,
};
use kvcached_ipc::rank::{self, ConnectionId, Rank, Work, WorkResult};
use kvcached_ipc::runs::Runs;
use kvcached_ipc::sim::{Fault, Store};
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;

const GROUP: u32 = 3;
const NUM_PAGES: u32 = 8;
/// Of the coordinator; a rank sees smaller and greater ones.
const EPOCH: Epoch = 2;
const MAX_EVENTS: usize = 400;

#[derive(Debug)]
enum Input {
    Rank(Vec<ToRank>),
    Coordinator { members: u16, keep: Vec<u32>, events: Vec<coordinator::Event> },
}

#[derive(Debug)]
enum ToRank {
    Event(rank::Event),
    /// The work that runs is done, by the laws of memory.
    Work(Fault),
    /// Or is said to be, by a store that is out of its mind.
    Lie(Body),
}

impl<'a> Arbitrary<'a> for Input {
    fn arbitrary(input: &mut Unstructured<'a>) -> Result<Self> {
        if bool::arbitrary(input)? {
            return Ok(Input::Rank(events(input, to_rank)?));
        }
        let members = input.int_in_range(1..=3)?;
        let keep = (0..input.int_in_range(0u8..=3)?).map(|_| page(input)).collect::<Result<_>>()?;
        Ok(Input::Coordinator { members, keep, events: events(input, to_coordinator)? })
    }
}

fn events<'a, T>(
    input: &mut Unstructured<'a>,
    event: fn(&mut Unstructured<'a>) -> Result<T>,
) -> Result<Vec<T>> {
    let mut events = Vec::new();
    while !input.is_empty() && events.len() < MAX_EVENTS {
        events.push(event(input)?);
    }
    Ok(events)
}

fn to_rank(input: &mut Unstructured) -> Result<ToRank> {
    let connection = input.int_in_range(0..=2)?;
    Ok(match input.int_in_range(0u8..=31)? {
        0..=19 => ToRank::Event(rank::Event::Received { connection, frame: asking(input)? }),
        20..=27 => ToRank::Work(*input.choose(&[Fault::None, Fault::None, Fault::Clean, Fault::Lose])?),
        28 => ToRank::Lie(frames::body(input, few_pages)?),
        29 => ToRank::Event(rank::Event::Closed { connection }),
        30 => ToRank::Event(rank::Event::Received { connection, frame: answering(input)? }),
        _ if input.ratio(1, 8)? => ToRank::Event(rank::Event::Stop),
        _ => ToRank::Work(Fault::None),
    })
}

fn to_coordinator(input: &mut Unstructured) -> Result<coordinator::Event> {
    use coordinator::Event;
    Ok(match input.int_in_range(0u8..=31)? {
        0..=7 => Event::Start { op: op(input)? },
        8..=25 => Event::Received { member: member(input)?, frame: answering(input)? },
        26 => Event::Received { member: member(input)?, frame: asking(input)? },
        27..=29 => Event::Deadline { transaction: transaction(input)? },
        30 => Event::Lost { member: member(input)?, why: "its end".to_owned() },
        _ => Event::Begin,
    })
}

fn op(input: &mut Unstructured) -> Result<Op> {
    Ok(match input.int_in_range(0u8..=10)? {
        0..=2 => Op::Map(few_pages(input)?.to_vec()),
        3..=5 => Op::Unmap(few_pages(input)?.to_vec()),
        6 => Op::Map(Vec::arbitrary(input)?),
        7 => Op::Barrier,
        8 => Op::Trim,
        9 => Op::Room,
        _ => Op::Bye,
    })
}

fn asking(input: &mut Unstructured) -> Result<Frame> {
    let message = Message::Request(frames::request(input, few_pages)?);
    frame(input, message)
}

/// Mostly what somebody could be waiting for.
fn answering(input: &mut Unstructured) -> Result<Frame> {
    let body = match input.int_in_range(0u8..=15)? {
        0..=2 => Body::Created(Created {
            page_bytes: 1,
            virtual_bytes: 1,
            num_pages: NUM_PAGES,
            blocks_per_page: 1,
            ids_per_page: 1,
            mapped: few_pages(input)?,
            lost: Runs::none(),
        }),
        3..=5 => Body::Mapped { new: few_pages(input)? },
        6..=7 => Body::Prepared,
        8..=9 => Body::Committed,
        _ => frames::body(input, few_pages)?,
    };
    let beside_bytes = u8::arbitrary(input)?.into();
    frame(input, Message::Answer(Answer { beside_bytes, body }))
}

/// Mostly to and from the right ones.
fn frame(input: &mut Unstructured, message: Message) -> Result<Frame> {
    let odd = |input: &mut Unstructured| input.ratio(1u8, 32);
    Ok(Frame {
        epoch: if odd(input)? { Epoch::arbitrary(input)? } else { input.int_in_range(1..=EPOCH + 1)? },
        transaction: transaction(input)?,
        group: if odd(input)? { u32::arbitrary(input)? } else { GROUP },
        member: if odd(input)? { Member { stage: 9, rank: 9 } } else { named(member(input)?) },
        message,
    })
}

fn transaction(input: &mut Unstructured) -> Result<TransactionId> {
    if input.ratio(1u8, 32)? { u64::arbitrary(input) } else { input.int_in_range(1..=90) }
}

fn member(input: &mut Unstructured) -> Result<usize> {
    input.int_in_range(0..=3)
}

/// A rank is the first.
fn named(member: usize) -> Member {
    Member { stage: member as u16 / 2, rank: member as u16 % 2 }
}

fn page(input: &mut Unstructured) -> Result<u32> {
    if input.ratio(1u8, 32)? { u32::arbitrary(input) } else { input.int_in_range(0..=NUM_PAGES - 1) }
}

fn few_pages(input: &mut Unstructured) -> Result<Runs> {
    let (first, len) = (page(input)?, input.int_in_range(0..=3)?);
    Ok(Runs::from_runs(vec![(first, len)]).unwrap_or_default())
}

// ---------------------------------------------------------------- a rank

struct RankAlone {
    rank: Rank,
    store: Store,
    running: Option<Work>,
    /// Some work has been answered by what it cannot give.
    lied: bool,
    stopped: bool,
    /// What work was done, by the transaction's name: answers tell nothing else.
    done: BTreeSet<(TransactionId, &'static str)>,
}

impl RankAlone {
    fn new() -> Self {
        RankAlone {
            rank: Rank::new(named(0), GROUP, NUM_PAGES),
            store: Store::new(NUM_PAGES),
            running: None,
            lied: false,
            stopped: false,
            done: BTreeSet::new(),
        }
    }

    fn take(&mut self, event: ToRank) {
        match event {
            ToRank::Event(rank::Event::Received { connection, frame }) => {
                let asked = frame.clone();
                self.step(rank::Event::Received { connection, frame }, Some((connection, asked)));
            }
            ToRank::Event(event) => {
                self.stopped |= event == rank::Event::Stop;
                self.step(event, None);
            }
            ToRank::Work(fault) => self.work(fault),
            ToRank::Lie(body) => {
                let ran = self.running.take();
                self.lied |= ran.is_some();
                self.step(rank::Event::Worked { result: WorkResult { beside_bytes: 1, body } }, None);
            }
        }
    }

    fn work(&mut self, fault: Fault) {
        let Some(work) = self.running.take() else { return };
        let mut tried = self.store.clone();
        let result = match tried.work(&work, fault) {
            Ok(result) => {
                self.store = tried;
                result
            }
            // As the real one: what a page's state does not allow is refused. What is kept is the rank's to get right.
            Err(violation) => {
                let decides = matches!(work, Work::Commit { .. } | Work::Abort { .. });
                let leaks = matches!(work, Work::Prepare { .. }) && self.store.prepared.is_some();
                assert!(self.lied || !(decides || leaks), "{violation}");
                WorkResult { beside_bytes: 0, body: Body::Failed(failure()) }
            }
        };
        match (&work, &result.body) {
            (Work::Prepare { transaction, .. }, Body::Prepared) => {
                self.done.insert((*transaction, "prepared"));
            }
            (Work::Commit { transaction }, Body::Committed) => {
                self.done.insert((*transaction, "committed"));
            }
            _ => {}
        }
        self.step(rank::Event::Worked { result }, None);
    }

    fn step(&mut self, event: rank::Event, asked: Option<(ConnectionId, Frame)>) {
        for effect in self.rank.step(event) {
            match effect {
                rank::Effect::Run(work) => self.runs(work),
                rank::Effect::Close { .. } => {}
                rank::Effect::Send { connection, frame } => self.says(connection, frame, asked.as_ref()),
            }
        }
        assert_eq!(self.rank.is_busy(), self.running.is_some(), "work waits and none runs");
    }

    fn runs(&mut self, work: Work) {
        if let Work::Map { pages }
        | Work::Unmap { pages }
        | Work::Undo { pages }
        | Work::Prepare { pages, .. } = &work
        {
            assert!(pages.is_sorted_by(|page, next| page < next), "{pages:?}");
            let within = pages.last().is_some_and(|page| *page < NUM_PAGES);
            assert!(within || self.lied, "{pages:?} are not in the group");
        }
        assert_eq!(self.running.replace(work), None, "two at a time");
    }

    fn says(&self, connection: ConnectionId, frame: Frame, asked: Option<&(ConnectionId, Frame)>) {
        assert!(!self.stopped, "a rank that has stopped says {frame:?}");
        let Message::Answer(answer) = &frame.message else { panic!("a rank asks {frame:?}") };
        if let Some((over, asked)) = asked {
            let name = |frame: &Frame| (frame.epoch, frame.transaction, frame.group, frame.member);
            assert_eq!(
                (connection, name(&frame)),
                (*over, name(asked)),
                "another is answered than has asked"
            );
        }
        let needed = match answer.body {
            Body::Prepared => "prepared",
            Body::Committed => "committed",
            _ => return,
        };
        assert!(self.lied || self.done.contains(&(frame.transaction, needed)), "{frame:?} is not so");
    }

    /// Whatever came: the end leaves nothing half done.
    fn end(mut self) {
        self.take(ToRank::Event(rank::Event::Stop));
        for _ in 0..2 * MAX_EVENTS {
            self.work(Fault::None);
        }
        assert!(!self.rank.is_busy(), "no end");
        assert!(self.lied || self.store.prepared.is_none(), "{:?} leaks", self.store);
    }
}

fn failure() -> Failure {
    let detail = "the page is not in that state".to_owned();
    Failure { out_of_memory: false, lost: Runs::none(), still_mapped: Runs::none(), detail }
}

// ---------------------------------------------------------------- a coordinator

struct CoordinatorAlone {
    coordinator: Coordinator,
    members: usize,
    started: TransactionId,
    open: BTreeMap<TransactionId, Option<Op>>,
    /// Members that answered so, by transaction.
    prepared: BTreeSet<(TransactionId, usize)>,
    committed: BTreeSet<(TransactionId, usize)>,
    /// Transactions whose COMMIT or ABORT was sent.
    decided: BTreeMap<TransactionId, Request>,
    /// Members that were given up.
    closed: BTreeSet<usize>,
    broken: bool,
}

impl CoordinatorAlone {
    fn new(members: u16, keep: Vec<u32>) -> Self {
        let names = (0..usize::from(members)).map(named).collect();
        CoordinatorAlone {
            coordinator: Coordinator::new(GROUP, EPOCH, names, keep),
            members: usize::from(members),
            started: 0,
            open: BTreeMap::new(),
            prepared: BTreeSet::new(),
            committed: BTreeSet::new(),
            decided: BTreeMap::new(),
            closed: BTreeSet::new(),
            broken: false,
        }
    }

    fn take(&mut self, event: coordinator::Event) {
        use coordinator::{Effect, Event};
        let asked = match &event {
            Event::Begin => Some(None),
            Event::Start { op } => Some(Some(op.clone())),
            Event::Received { member, frame } => {
                self.note(*member, frame);
                None
            }
            _ => None,
        };
        let mut effects = self.coordinator.step(event).into_iter().peekable();
        if let Some(op) = asked {
            let Some(Effect::Started { transaction }) = effects.next() else { panic!("it has no name") };
            assert!(transaction > self.started, "a name twice");
            self.started = transaction;
            self.open.insert(transaction, op);
        }
        for effect in effects {
            match effect {
                Effect::Started { transaction } => panic!("{transaction} started by nobody"),
                Effect::Send { member, frame } => self.says(member, frame),
                Effect::Arm { transaction } => assert!(self.open.contains_key(&transaction)),
                Effect::Finish { transaction, outcome } => self.finish(transaction, &outcome),
                Effect::Close { member } => {
                    assert!(self.closed.insert(member), "{member} is given up twice");
                }
                Effect::Broken { member, .. } => {
                    assert!(member < self.members);
                    assert!(!std::mem::replace(&mut self.broken, true), "broken twice");
                }
            }
        }
        assert_eq!(self.coordinator.num_open(), self.open.len());
        assert!(self.open.len() <= MAX_UNDER_WAY + MAX_QUEUED + 1, "no limit");
        assert_eq!(self.coordinator.is_broken().is_some(), self.broken);
    }

    fn note(&mut self, member: usize, frame: &Frame) {
        let Message::Answer(answer) = &frame.message else { return };
        if (frame.epoch, frame.group, frame.member) != (EPOCH, GROUP, named(member)) {
            return;
        }
        match answer.body {
            Body::Prepared => self.prepared.insert((frame.transaction, member)),
            Body::Committed => self.committed.insert((frame.transaction, member)),
            _ => false,
        };
    }

    fn says(&mut self, member: usize, frame: Frame) {
        assert!(member < self.members && frame.member == named(member), "{frame:?} for {member}");
        assert!(!self.closed.contains(&member), "{frame:?} for {member}, which was given up");
        assert_eq!((frame.epoch, frame.group), (EPOCH, GROUP));
        let Message::Request(request) = frame.message else { panic!("a coordinator answers") };
        if !matches!(request, Request::Commit | Request::Abort) {
            return;
        }
        if request == Request::Commit {
            let all = (0..self.members).all(|member| self.prepared.contains(&(frame.transaction, member)));
            assert!(all, "{} is committed and not prepared everywhere", frame.transaction);
        }
        let decision = self.decided.entry(frame.transaction).or_insert(request.clone());
        assert_eq!(*decision, request, "{} is decided both ways", frame.transaction);
    }

    fn finish(&mut self, transaction: TransactionId, outcome: &Outcome) {
        let Some(op) = self.open.remove(&transaction) else { panic!("{transaction} is not open") };
        let decision = self.decided.get(&transaction);
        match (op, outcome) {
            (None, Outcome::Begun { created }) => assert_eq!(created.len(), self.members),
            (Some(Op::Map(pages)), Outcome::Mapped { .. }) => {
                assert!(decision.is_none() && !pages.is_empty());
            }
            (Some(Op::Map(_)), Outcome::MapFailed { .. }) => assert_ne!(decision, Some(&Request::Commit)),
            (Some(Op::Unmap(_)), Outcome::Unmapped) if self.members > 1 => {
                let all = (0..self.members).all(|member| self.committed.contains(&(transaction, member)));
                assert!(all, "{transaction} is not committed everywhere");
            }
            (Some(Op::Unmap(_)), Outcome::UnmapFailed { .. }) => {
                assert_ne!(decision, Some(&Request::Commit));
            }
            (Some(Op::Unmap(_)), Outcome::Unmapped)
            | (Some(Op::Barrier), Outcome::Passed)
            | (Some(Op::Trim), Outcome::Trimmed { .. })
            | (Some(Op::Room), Outcome::Room { .. })
            | (Some(Op::Bye), Outcome::Gone)
            | (_, Outcome::Failed { .. }) => {}
            (_, Outcome::Broken { .. }) => assert!(self.broken),
            (op, outcome) => panic!("{op:?} ends as {outcome:?}"),
        }
    }

    /// Whatever came: nothing is left open when nobody is there any more.
    fn end(mut self) {
        for member in 0..self.members {
            self.take(coordinator::Event::Lost { member, why: "the end".to_owned() });
        }
        assert_eq!(self.open, BTreeMap::new());
    }
}

fuzz_target!(|input: Input| {
    match input {
        Input::Rank(events) => {
            let mut alone = RankAlone::new();
            events.into_iter().for_each(|event| alone.take(event));
            alone.end();
        }
        Input::Coordinator { members, keep, events } => {
            let mut alone = CoordinatorAlone::new(members, keep);
            alone.take(coordinator::Event::Begin);
            events.into_iter().for_each(|event| alone.take(event));
            alone.end();
        }
    }
});
