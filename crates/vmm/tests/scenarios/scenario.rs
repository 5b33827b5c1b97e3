//! What is done to a range, and which driver calls fail meanwhile.

use std::ops::RangeInclusive;

use kvcached_vmm::sim::Faulty;
use kvcached_vmm::{FTensor, TransactionId, VmmError};

use Op::{Abort, Commit, Map, Prepare, Trim, Unmap};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    Map(Vec<u32>),
    Unmap(Vec<u32>),
    Prepare(TransactionId, Vec<u32>),
    Commit(TransactionId),
    Abort(TransactionId),
    Trim,
}

/// What a call answers where it does not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    New(Vec<u32>),
    Done,
    Released(u64),
}

impl Op {
    pub fn run(&self, range: &FTensor) -> Result<Answer, VmmError> {
        match self {
            Map(pages) => range.map(pages).map(Answer::New),
            Unmap(pages) => range.unmap(pages).map(|()| Answer::Done),
            Prepare(id, pages) => range.prepare_unmap(*id, pages).map(|()| Answer::Done),
            Commit(id) => range.commit_unmap(*id).map(|()| Answer::Done),
            Abort(id) => range.abort_unmap(*id).map(|()| Answer::Done),
            Trim => range.trim().map(Answer::Released),
        }
    }
}

/// Which driver calls fail, by number from 1, the first of them the reservation of the range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    Healthy,
    Single(u32),
    Pair(u32, u32),
    From(u32),
}

impl Plan {
    pub fn begin(self, driver: &Faulty) {
        match self {
            Plan::Healthy => driver.heal(),
            Plan::Single(k) => driver.fail_each(&[k]),
            Plan::Pair(k, l) => driver.fail_each(&[k, l]),
            Plan::From(k) => driver.fail_from(k),
        }
    }

    pub fn fails(self, call: u32) -> bool {
        match self {
            Plan::Healthy => false,
            Plan::Single(k) => call == k,
            Plan::Pair(k, l) => call == k || call == l,
            Plan::From(k) => call >= k,
        }
    }

    /// How many of these calls fail.
    pub fn hits(self, calls: RangeInclusive<u32>) -> u32 {
        calls.filter(|call| self.fails(*call)).count() as u32
    }

    /// Whether so few fail that the end of a range, which tries three times, leaves nothing.
    pub fn passes(self) -> bool {
        !matches!(self, Plan::From(_))
    }
}

pub struct Scenario {
    pub name: &'static str,
    pub ops: Vec<Op>,
}

/// Every way that calls may follow each other, on five pages. Where a call fails, those after it still run, on what it left.
pub fn scenarios() -> Vec<Scenario> {
    let map = |pages: &[u32]| Map(pages.to_vec());
    let unmap = |pages: &[u32]| Unmap(pages.to_vec());
    let prepare = |id: TransactionId, pages: &[u32]| Prepare(id, pages.to_vec());
    let table = [
        ("nothing", vec![]),
        ("a page", vec![map(&[0])]),
        ("pages, in any order", vec![map(&[2, 0, 4])]),
        ("pages that are mapped or named twice", vec![map(&[0, 2]), map(&[1, 2, 3, 3, 0])]),
        ("some go", vec![map(&[0, 1, 2, 3]), unmap(&[3, 1, 3])]),
        ("some go and come back", vec![map(&[0, 1, 2]), unmap(&[2, 1]), map(&[1, 4, 2])]),
        ("all go, twice", vec![map(&[4, 3]), unmap(&[4, 3]), map(&[3]), unmap(&[3])]),
        (
            "what was not released is tried again",
            vec![map(&[0, 1, 2]), unmap(&[0, 1]), unmap(&[]), unmap(&[2])],
        ),
        (
            "what is kept is trimmed",
            vec![map(&[0, 1, 2]), unmap(&[0, 2]), Trim, unmap(&[1]), Trim, Trim, map(&[4])],
        ),
        (
            "calls that are refused",
            vec![map(&[1]), map(&[0, 5]), unmap(&[1, 0, 2, 0]), prepare(1, &[1, 9]), Commit(3)],
        ),
        ("undecided", vec![map(&[0, 1, 2]), prepare(1, &[1, 0])]),
        ("committed", vec![map(&[0, 1, 2]), prepare(1, &[2, 0]), Commit(1), map(&[0])]),
        ("commits repeated", vec![map(&[0, 1]), prepare(1, &[0, 1]), Commit(1), Commit(1), Commit(1)]),
        (
            "work beside half a commit",
            vec![
                map(&[0, 1, 2]),
                prepare(1, &[0, 1]),
                Commit(1),
                prepare(2, &[2]),
                map(&[0]),
                Abort(1),
                Commit(1),
                prepare(2, &[2]),
            ],
        ),
        ("contrary to a commit", vec![map(&[0, 1]), prepare(1, &[0]), Commit(1), Abort(1), prepare(1, &[1])]),
        ("aborted", vec![map(&[0, 1, 2]), prepare(1, &[2, 0]), Abort(1), unmap(&[0])]),
        (
            "aborts repeated",
            vec![map(&[0, 1]), prepare(1, &[0, 1]), Abort(1), Abort(1), Abort(1), unmap(&[1])],
        ),
        ("contrary to an abort", vec![map(&[0, 1]), prepare(1, &[0]), Abort(1), Commit(1), prepare(1, &[1])]),
        (
            "prepares repeated",
            vec![
                map(&[0, 1]),
                prepare(1, &[0, 1]),
                prepare(1, &[1, 0, 1]),
                prepare(1, &[0]),
                prepare(1, &[1, 2]),
                Abort(1),
            ],
        ),
        (
            "prepared again after it failed",
            vec![map(&[0, 1, 2]), prepare(1, &[0, 2]), prepare(1, &[2, 0]), Commit(1)],
        ),
        ("an abort that overtakes", vec![map(&[0]), Abort(1), prepare(1, &[0]), prepare(2, &[0]), Commit(2)]),
        ("some are not mapped", vec![map(&[0]), prepare(1, &[2, 0, 1, 2]), prepare(1, &[0]), Abort(1)]),
        (
            "one waits for the other",
            vec![map(&[0, 1]), prepare(1, &[0]), prepare(2, &[1]), Commit(1), prepare(2, &[1]), Abort(2)],
        ),
        (
            "pages of a transaction are left alone",
            vec![map(&[0, 1]), prepare(1, &[1]), map(&[2, 1]), unmap(&[1]), map(&[2]), unmap(&[0]), Abort(1)],
        ),
        (
            "one step and two steps",
            vec![
                map(&[0, 1, 2, 3]),
                unmap(&[0]),
                prepare(1, &[1]),
                map(&[0]),
                Commit(1),
                map(&[1]),
                unmap(&[2, 1]),
            ],
        ),
        ("a transaction of nothing", vec![map(&[0]), prepare(1, &[]), Commit(1), prepare(2, &[]), Abort(2)]),
    ];
    table.into_iter().map(|(name, ops)| Scenario { name, ops }).collect()
}
