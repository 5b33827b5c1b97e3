//! What the outcomes of a term promise, held against what ranks have.

use std::collections::{BTreeMap, BTreeSet};

use super::Violation;
use super::store::{Pages, Store, bits, runs};
use crate::coordinator::{Op, Outcome};
use crate::message::{Request, TransactionId};

/// What has happened at least once: proof that interesting states are reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Facts(u32);

impl Facts {
    /// A COMMIT was sent.
    pub const COMMITTED: Facts = Facts(1);
    /// An ABORT was sent.
    pub const ABORTED: Facts = Facts(1 << 1);
    /// A rank aborted a PREPARE that nobody had decided.
    pub const PRESUMED_ABORT: Facts = Facts(1 << 2);
    /// A QUERY was answered by an outcome.
    pub const ANSWER_HEALED: Facts = Facts(1 << 3);
    /// A request was sent again since it had not arrived.
    pub const REQUEST_HEALED: Facts = Facts(1 << 4);
    /// A group broke.
    pub const BROKEN: Facts = Facts(1 << 5);
    /// A term began after another.
    pub const TAKEN_OVER: Facts = Facts(1 << 6);
    /// The beginning of a term unmapped what ranks did not have in common.
    pub const RECONCILED: Facts = Facts(1 << 7);
    /// An ABORT came before its MAP or PREPARE.
    pub const OVERTAKEN: Facts = Facts(1 << 8);
    /// An ABORT came while its MAP or PREPARE was being worked on.
    pub const ABORTED_AT_WORK: Facts = Facts(1 << 9);
    /// A COMMIT was sent again.
    pub const COMMIT_REPEATED: Facts = Facts(1 << 10);
    /// A term's decision was carried out by some ranks and by others not, when it ended.
    pub const HALF_COMMITTED: Facts = Facts(1 << 11);
    /// A frame of a term that was over arrived.
    pub const STALE: Facts = Facts(1 << 12);
    /// An operation was done on every rank.
    pub const DONE: Facts = Facts(1 << 13);
    /// A page was lost.
    pub const LOST_PAGE: Facts = Facts(1 << 14);

    /// Each, with its name.
    pub const ALL: [(Facts, &'static str); 15] = [
        (Facts::COMMITTED, "commit decided"),
        (Facts::ABORTED, "abort decided"),
        (Facts::PRESUMED_ABORT, "presumed abort"),
        (Facts::ANSWER_HEALED, "lost answer healed"),
        (Facts::REQUEST_HEALED, "lost request healed"),
        (Facts::BROKEN, "group broken"),
        (Facts::TAKEN_OVER, "term taken over"),
        (Facts::RECONCILED, "ranks reconciled"),
        (Facts::OVERTAKEN, "abort before its request"),
        (Facts::ABORTED_AT_WORK, "abort during the work"),
        (Facts::COMMIT_REPEATED, "commit repeated"),
        (Facts::HALF_COMMITTED, "coordinator dead between two commits"),
        (Facts::STALE, "frame of an ended term"),
        (Facts::DONE, "operation done"),
        (Facts::LOST_PAGE, "page lost"),
    ];

    /// As a number, and back: for counters that threads share.
    pub fn to_bits(self) -> u32 {
        self.0
    }

    /// See `to_bits`.
    pub fn from_bits(bits: u32) -> Self {
        Facts(bits)
    }

    /// Adds what happened.
    pub fn add(&mut self, fact: Facts) {
        self.0 |= fact.0;
    }

    /// Whether all of these have happened.
    pub fn has(self, facts: Facts) -> bool {
        self.0 & facts.0 == facts.0
    }
}

/// One term, as its outcomes tell it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Book {
    /// Started and not finished; `None` is the beginning of the term.
    pub open: BTreeMap<TransactionId, Option<Op>>,
    pub begun: bool,
    pub broken: bool,
    /// Pages that every rank has mapped.
    pub agreed: Pages,
    /// Pages that some rank has lost.
    pub lost: Pages,
    committed: BTreeSet<TransactionId>,
    aborted: BTreeSet<TransactionId>,
}

type Checked = Result<(), Violation>;

impl Book {
    /// Pages that open operations are about.
    pub fn busy(&self) -> Pages {
        self.open.values().flatten().fold(0, |busy, op| busy | pages(op))
    }

    /// A decision is sent. Whether it is sent again.
    pub fn sent(&mut self, transaction: TransactionId, request: &Request) -> Result<bool, Violation> {
        let (mine, other) = match request {
            Request::Commit => (&mut self.committed, &self.aborted),
            Request::Abort => (&mut self.aborted, &self.committed),
            _ => return Ok(false),
        };
        if other.contains(&transaction) {
            return Err(Violation(format!("{request:?} of {transaction} after the contrary was sent")));
        }
        Ok(!mine.insert(transaction))
    }

    pub fn is_committed(&self, transaction: TransactionId) -> bool {
        self.committed.contains(&transaction)
    }

    pub fn is_aborted(&self, transaction: TransactionId) -> bool {
        self.aborted.contains(&transaction)
    }

    /// Every transaction whose COMMIT was sent.
    pub fn committed(&self) -> impl Iterator<Item = TransactionId> + '_ {
        self.committed.iter().copied()
    }

    pub fn breaks(&mut self) -> Checked {
        if std::mem::replace(&mut self.broken, true) {
            return Err(Violation("a group breaks twice".to_owned()));
        }
        Ok(())
    }

    /// An operation has finished. `stores`: of the ranks that count.
    pub fn finish(&mut self, transaction: TransactionId, outcome: &Outcome, stores: &[&Store]) -> Checked {
        let Some(op) = self.open.remove(&transaction) else {
            return Err(Violation(format!("{transaction} finishes, which is not open: {outcome:?}")));
        };
        // What takes no part in the protocol may be said of a broken group.
        if self.broken != matches!(outcome, Outcome::Broken { .. })
            && !matches!(outcome, Outcome::Failed { .. })
        {
            return Err(Violation(format!("broken: {}, but {transaction} is {outcome:?}", self.broken)));
        }
        match (op, outcome) {
            (None, Outcome::Begun { created }) => {
                self.begun = true;
                self.agreed = created.first().map_or(0, |created| bits(&created.mapped.to_vec()));
                self.lost = created.iter().fold(0, |lost, created| lost | bits(&created.lost.to_vec()));
                self.compare(stores)
            }
            (Some(op @ Op::Map(_)), Outcome::Mapped { new }) => {
                let new = bits(new);
                if new & !pages(&op) != 0 || new & self.agreed != 0 {
                    return Err(Violation(format!("{op:?} mapped {:?} anew", runs(new))));
                }
                self.agreed |= pages(&op);
                self.compare(stores)
            }
            (Some(Op::Map(_)), Outcome::MapFailed { lost, .. }) => {
                self.lost |= bits(lost);
                self.compare(stores)
            }
            (Some(op @ Op::Unmap(_)), Outcome::Unmapped) => {
                self.agreed &= !pages(&op);
                self.compare(stores)
            }
            (Some(op @ Op::Unmap(_)), Outcome::UnmapFailed { lost, still_mapped, .. }) => {
                self.lost |= bits(lost);
                self.agreed &= !(pages(&op) & !bits(still_mapped));
                self.compare(stores)
            }
            (Some(Op::Barrier), Outcome::Passed)
            | (Some(Op::Trim), Outcome::Trimmed { .. })
            | (Some(Op::Room), Outcome::Room { .. })
            | (Some(Op::Bye), Outcome::Gone)
            | (Some(Op::Barrier | Op::Trim | Op::Room), Outcome::Failed { .. })
            | (_, Outcome::Broken { .. }) => Ok(()),
            (op, outcome) => Err(Violation(format!("{op:?} finishes as {outcome:?}"))),
        }
    }

    /// Whether every rank has exactly what was agreed, where no operation is under way.
    pub fn compare(&self, stores: &[&Store]) -> Checked {
        let settled = !(self.busy() | self.lost);
        for (index, store) in stores.iter().enumerate() {
            let differs = (store.mapped ^ self.agreed) & settled;
            if differs != 0 {
                let (mapped, agreed) = (runs(store.mapped), runs(self.agreed));
                return Err(Violation(format!("the {index}th rank has {mapped:?}, agreed is {agreed:?}")));
            }
        }
        Ok(())
    }
}

/// Pages that the operation is about.
pub(super) fn pages(op: &Op) -> Pages {
    match op {
        Op::Map(pages) | Op::Unmap(pages) => bits(pages),
        Op::Barrier | Op::Trim | Op::Room | Op::Bye => 0,
    }
}
