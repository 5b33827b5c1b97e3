//! One core against a peer that says anything: what holds must hold however wrong the other side is.

use std::collections::BTreeSet;

use super::Violation;
use super::store::{Fault, Store, bits, runs};
use crate::coordinator::{self, Coordinator, Op};
use crate::message::{
    Answer, Body, Created, Failure, Frame, Member, Message, Refusal, Request, TransactionId,
};
use crate::rank::{self, Rank, Work, WorkResult};
use crate::runs::Runs;

const NUM_PAGES: u32 = 8;

type Checked = Result<(), Violation>;

/// A rank is told these bytes, three a step, by up to three coordinators. It must never work on two things at once, keep two
/// prepared sets, or decide one twice; and when everybody is gone it must keep nothing.
pub fn assail_rank(story: &[u8]) -> Checked {
    let member = Member { stage: 0, rank: 0 };
    let mut seat =
        Assailed { rank: Rank::new(member, 0, NUM_PAGES), store: Store::new(NUM_PAGES), running: None };
    for step in story.chunks_exact(3) {
        let connection = u64::from(step[0] % 3);
        let event = match step[0] / 3 % 8 {
            0 if step[1] < 32 => rank::Event::Closed { connection },
            0..=1 => {
                seat.work(if step[1] < 64 { Fault::Lose } else { Fault::None })?;
                continue;
            }
            _ => {
                let (transaction, epoch) = (u64::from(step[1] % 8), 1 + u64::from(step[1] / 8 % 3));
                let message = Message::Request(request(step[2]));
                rank::Event::Received {
                    connection,
                    frame: Frame { epoch, transaction, group: 0, member, message },
                }
            }
        };
        seat.step(event)?;
    }
    for connection in 0..3 {
        seat.step(rank::Event::Closed { connection })?;
    }
    while seat.running.is_some() {
        seat.work(Fault::None)?;
    }
    match (seat.store.prepared, seat.rank.is_busy()) {
        (None, false) => Ok(()),
        left => Err(Violation(format!("the rank is left with {left:?}"))),
    }
}

struct Assailed {
    rank: Rank,
    store: Store,
    running: Option<Work>,
}

impl Assailed {
    fn step(&mut self, event: rank::Event) -> Checked {
        for effect in self.rank.step(event) {
            if let rank::Effect::Run(work) = effect
                && let Some(running) = self.running.replace(work)
            {
                return Err(Violation(format!("a second work while {running:?} runs")));
            }
        }
        Ok(())
    }

    fn work(&mut self, fault: Fault) -> Checked {
        let Some(work) = self.running.take() else { return Ok(()) };
        let result = match self.refusal(&work) {
            Some(body) => WorkResult { beside_bytes: 0, body },
            None => self.store.work(&work, fault)?,
        };
        self.step(rank::Event::Worked { result })
    }

    /// A real store refuses pages that are not as the request takes them to be.
    fn refusal(&self, work: &Work) -> Option<Body> {
        let kept = self.store.prepared.map_or(0, |(_, kept)| kept);
        let (pages, bad) = match work {
            Work::Map { pages } => (bits(pages), bits(pages) & (kept | self.store.lost)),
            Work::Unmap { pages } | Work::Undo { pages } | Work::Prepare { pages, .. } => {
                (bits(pages), bits(pages) & !self.store.mapped)
            }
            _ => return None,
        };
        (bad != 0).then(|| failed(runs(pages & self.store.mapped)))
    }
}

/// A coordinator hears these bytes, three a step, from three members. It must never say COMMIT and ABORT of one transaction,
/// finish anything twice or break twice; and when all members are gone everything must have finished.
pub fn assail_coordinator(story: &[u8]) -> Checked {
    let members: Vec<Member> = (0..3).map(|rank| Member { stage: rank / 2, rank: rank % 2 }).collect();
    let mut desk = Desk {
        coordinator: Coordinator::new(0, 1, members.clone(), vec![0]),
        open: BTreeSet::new(),
        committed: BTreeSet::new(),
        aborted: BTreeSet::new(),
        broken: false,
    };
    desk.step(coordinator::Event::Begin)?;
    for step in story.chunks_exact(3) {
        let member = usize::from(step[0] % 3);
        let transaction = u64::from(step[1] % 16);
        let event = match step[0] / 3 % 8 {
            0 if step[1] < 8 => coordinator::Event::Lost { member, why: "by chance".to_owned() },
            0 => coordinator::Event::Deadline { transaction },
            1 => coordinator::Event::Start { op: op(step[2]) },
            _ => {
                let message = Message::Answer(Answer { beside_bytes: 0, body: body(step[2]) });
                let frame = Frame { epoch: 1, transaction, group: 0, member: members[member], message };
                coordinator::Event::Received { member, frame }
            }
        };
        desk.step(event)?;
    }
    for member in 0..members.len() {
        desk.step(coordinator::Event::Lost { member, why: "the end".to_owned() })?;
    }
    if desk.open.is_empty() { Ok(()) } else { Err(Violation(format!("{:?} never finish", desk.open))) }
}

struct Desk {
    coordinator: Coordinator,
    open: BTreeSet<TransactionId>,
    committed: BTreeSet<TransactionId>,
    aborted: BTreeSet<TransactionId>,
    broken: bool,
}

impl Desk {
    fn step(&mut self, event: coordinator::Event) -> Checked {
        for effect in self.coordinator.step(event) {
            match effect {
                coordinator::Effect::Started { transaction } => {
                    self.open.insert(transaction);
                }
                coordinator::Effect::Send { member, frame } => self.send(member, frame)?,
                coordinator::Effect::Finish { transaction, .. } if !self.open.remove(&transaction) => {
                    return Err(Violation(format!("{transaction} finishes, which is not open")));
                }
                coordinator::Effect::Broken { .. } if std::mem::replace(&mut self.broken, true) => {
                    return Err(Violation("a group breaks twice".to_owned()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn send(&mut self, member: usize, frame: Frame) -> Checked {
        if self.coordinator.is_lost(member) && self.broken {
            return Err(Violation(format!("{member} is lost and told something")));
        }
        let (mine, other) = match frame.message {
            Message::Request(Request::Commit) => (&mut self.committed, &self.aborted),
            Message::Request(Request::Abort) => (&mut self.aborted, &self.committed),
            _ => return Ok(()),
        };
        mine.insert(frame.transaction);
        if other.contains(&frame.transaction) {
            return Err(Violation(format!("COMMIT and ABORT of {}", frame.transaction)));
        }
        Ok(())
    }
}

fn pages(byte: u8) -> Runs {
    runs(u64::from(byte) & 0b1111)
}

fn request(byte: u8) -> Request {
    let pages = pages(byte >> 4);
    match byte % 16 {
        0 => Request::Hello,
        1..=3 => Request::Map(pages),
        4 => Request::Unmap(pages),
        5..=7 => Request::Prepare(pages),
        8 | 9 => Request::Commit,
        10 | 11 => Request::Abort,
        12 => Request::Query,
        13 => Request::Barrier,
        14 => Request::Room,
        _ => Request::Bye,
    }
}

fn op(byte: u8) -> Op {
    let pages = pages(byte >> 4).to_vec();
    match byte % 8 {
        0..=2 => Op::Map(pages),
        3..=5 => Op::Unmap(pages),
        6 => Op::Room,
        _ if byte > 250 => Op::Bye,
        _ => Op::Barrier,
    }
}

fn failed(still_mapped: Runs) -> Body {
    Body::Failed(Failure { out_of_memory: false, lost: Runs::none(), still_mapped, detail: "no".to_owned() })
}

fn body(byte: u8) -> Body {
    let pages = pages(byte >> 4);
    match byte % 16 {
        0 | 1 => Body::Created(Created {
            page_bytes: 1,
            virtual_bytes: 1,
            num_pages: NUM_PAGES,
            blocks_per_page: 1,
            ids_per_page: 1,
            mapped: pages,
            lost: Runs::none(),
        }),
        2 | 3 => Body::Mapped { new: pages },
        4 => Body::Unmapped,
        5 | 6 => Body::Prepared,
        7 => Body::Committed,
        8 | 9 => Body::Aborted { lost: pages },
        10 => failed(pages),
        11 => Body::Running,
        12 => Body::Unknown,
        13 => Body::Passed,
        14 => Body::Room { free_bytes: 1 },
        _ if byte > 200 => Body::Refused(Refusal::Decided),
        _ => Body::Refused(Refusal::Overloaded),
    }
}
