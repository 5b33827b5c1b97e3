//! What a plain range does, told call by call: the order of an undo, and the attempts of the end, which answers do not tell.

use std::collections::BTreeSet;

use kvcached_vmm::sim::Sim;
use kvcached_vmm::{FTensor, UnmapFailure, VmmError};

use super::scenario::{Answer, Op, Plan, scenarios};
use super::setup::{Setup, alone};

#[derive(Debug, Default)]
struct Told {
    calls: u32,
    mapped: BTreeSet<u32>,
    quarantined: BTreeSet<u32>,
    /// Quarantined pages that the simulated device still maps, since a failed call does nothing.
    in_doubt: BTreeSet<u32>,
    /// Quarantined pages whose memory is mapped nowhere.
    loose: usize,
    leaked: usize,
}

/// The pages that a call says of: new or lost; unmapped, lost, still mapped, leaked.
type Says = Result<Vec<u32>, [Vec<u32>; 4]>;

impl Told {
    /// Whether the next driver call succeeds.
    fn next(&mut self, plan: Plan) -> bool {
        self.calls += 1;
        !plan.fails(self.calls)
    }

    fn map(&mut self, pages: &[u32], plan: Plan) -> Says {
        let mut new: Vec<u32> = vec![];
        for page in pages {
            if !self.mapped.contains(page) && !new.contains(page) {
                new.push(*page);
            }
        }
        let (mut done, mut failed) = (vec![], false);
        for page in &new {
            failed = !self.next(plan); // create
            if failed {
                break;
            }
            let mapped = self.next(plan);
            done.push((*page, mapped));
            failed = !mapped || !self.next(plan); // set access
            if failed {
                break;
            }
        }
        if !failed {
            self.mapped.extend(&new);
            return Ok(new);
        }
        let mut lost = BTreeSet::new();
        for (page, mapped) in done.into_iter().rev() {
            if mapped && !self.next(plan) {
                lost.insert(page);
                self.in_doubt.insert(page);
            } else if !self.next(plan) {
                lost.insert(page); // release
                self.loose += 1;
            }
        }
        self.quarantined.extend(&lost);
        Err([vec![], lost.into_iter().collect(), vec![], vec![]])
    }

    fn unmap(&mut self, pages: &[u32], plan: Plan) -> Says {
        let mut all: Vec<u32> = vec![];
        for page in pages {
            if !all.contains(page) {
                all.push(*page);
            }
        }
        let (mut unmapped, mut lost, mut leaked) = (vec![], vec![], vec![]);
        for page in &all {
            if !self.next(plan) {
                lost.push(*page);
                break;
            }
            unmapped.push(*page);
        }
        // A lost page is tried once more, for its memory.
        if !lost.is_empty() && self.next(plan) {
            self.leaked += 1;
        } else {
            self.in_doubt.extend(&lost);
        }
        for page in &unmapped {
            if !self.next(plan) {
                leaked.push(*page);
            }
        }
        // What earlier calls could not release is tried again, and what that left.
        self.leaked = (0..self.leaked).filter(|_| !self.next(plan)).count() + leaked.len();
        self.mapped.retain(|page| !unmapped.contains(page) && !lost.contains(page));
        self.quarantined.extend(&lost);
        if lost.is_empty() && leaked.is_empty() {
            return Ok(vec![]);
        }
        let still_mapped = all[unmapped.len() + lost.len()..].to_vec();
        Err([unmapped, lost, still_mapped, leaked])
    }

    /// Synchronise, unmap, release, free; all that fails is tried again, twice. Returns the ranges and handles left.
    fn end(&mut self, plan: Plan) -> (usize, usize) {
        let mut on_device: Vec<u32> = (&self.mapped | &self.in_doubt).into_iter().collect();
        let mut loose = self.loose + self.leaked;
        let mut synchronised = false;
        for _ in 0..3 {
            synchronised = synchronised || self.next(plan);
            if !synchronised {
                continue;
            }
            let before = on_device.len();
            on_device.retain(|_| !self.next(plan));
            loose += before - on_device.len();
            loose = (0..loose).filter(|_| !self.next(plan)).count();
            if on_device.is_empty() && loose == 0 && self.next(plan) {
                return (0, 0);
            }
        }
        (1, on_device.len() + loose)
    }
}

fn says(answer: Result<Answer, VmmError>) -> Says {
    match answer {
        Ok(Answer::New(pages)) => Ok(pages),
        Ok(_) => Ok(vec![]),
        Err(VmmError::Driver { .. }) => Err(Default::default()),
        Err(VmmError::Quarantined { pages, .. }) => Err([vec![], pages, vec![], vec![]]),
        Err(VmmError::Unmap(failure)) => {
            let UnmapFailure { unmapped, quarantined, still_mapped, leaked, .. } = *failure;
            Err([unmapped, quarantined, still_mapped, leaked])
        }
        Err(other) => panic!("{other}"),
    }
}

/// Whether a call is refused before anything is done, which `model` foretells.
fn is_refused(told: &Told, range: &FTensor, op: &Op) -> bool {
    let (Op::Map(pages) | Op::Unmap(pages)) = op else { unreachable!() };
    let is_unusable = |page: &u32| told.quarantined.contains(page) || *page >= range.num_pages();
    let is_missing = |page: &u32| matches!(op, Op::Unmap(_)) && !told.mapped.contains(page);
    pages.iter().any(|page| is_unusable(page) || is_missing(page))
}

fn run(ops: &[Op], plan: Plan) -> u32 {
    let sim = Sim::new();
    match plan {
        Plan::Healthy => sim.heal(),
        Plan::Single(k) => sim.fail_at(k),
        Plan::Pair(k, l) => sim.fail_each(&[k, l]),
        Plan::From(k) => sim.fail_from(k),
    }
    let mut told = Told { calls: 1, ..Told::default() };
    let Ok(range) = Setup::PLAIN.reserve(sim.clone()) else { return 1 };
    for op in ops {
        if is_refused(&told, &range, op) {
            op.run(&range).unwrap_err();
            continue;
        }
        let expected = match op {
            Op::Map(pages) => told.map(pages, plan),
            Op::Unmap(pages) => told.unmap(pages, plan),
            _ => unreachable!(),
        };
        assert_eq!(says(op.run(&range)), expected, "{op:?} under {plan:?}");
        assert_eq!(sim.calls().total(), told.calls, "calls of {op:?} under {plan:?}");
        assert_eq!(sim.counts().2, told.mapped.len() + told.in_doubt.len());
    }
    drop(range);
    let (ranges, handles) = told.end(plan);
    assert_eq!(sim.calls().total(), told.calls, "calls of the end under {plan:?}");
    assert_eq!((sim.counts().0, sim.counts().1), (ranges, handles));
    told.calls
}

#[test]
fn every_call_of_a_plain_range_under_pairs_of_failures() {
    let _alone = alone();
    let is_plain = |op: &Op| matches!(op, Op::Map(_) | Op::Unmap(_));
    for scenario in scenarios().iter().filter(|s| s.ops.iter().all(is_plain)) {
        let calls = run(&scenario.ops, Plan::Healthy);
        for k in 2..=calls {
            run(&scenario.ops, Plan::From(k));
            for l in k..=calls + 1 {
                run(&scenario.ops, Plan::Pair(k, l));
            }
        }
    }
}
