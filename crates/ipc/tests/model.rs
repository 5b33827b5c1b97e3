//! Every order of events, within bounds: the production cores of a coordinator and three ranks in two stages, with frames that
//! arrive in any order, twice or never, deadlines, failing drivers, and deaths. Each scenario is explored to its end and prints
//! how many states it has; what must hold in every one is checked by `kvcached_ipc::sim`.
//!
//! Bounds are spent by the adversary, so that every path ends: in a state where nothing can happen any more everything has
//! finished and nothing is left (`World` checks that too). A scenario names what it has to have met on its way.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use kvcached_ipc::coordinator::Op;
use kvcached_ipc::message::Member;
use kvcached_ipc::sim::{Action, Facts, Fault, Mutant, Violation, World};
use stateright::{Checker, Model, Property};

const MEMBERS: [Member; 3] =
    [Member { stage: 0, rank: 0 }, Member { stage: 0, rank: 1 }, Member { stage: 1, rank: 0 }];

/// How often the adversary may do what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Bounds {
    /// A frame arrives twice.
    duplicates: u8,
    /// A frame never arrives.
    losses: u8,
    /// A deadline passes although something is still under way. When nothing is, it passes for nothing.
    deadlines: u8,
    /// A driver fails and leaves everything as it was.
    failures: u8,
    /// A driver fails and a page is lost.
    lost_pages: u8,
    /// The coordinator dies.
    coordinators: u8,
    /// A new term begins.
    terms: u8,
    /// A rank dies.
    ranks: u8,
    /// A connection breaks.
    cuts: u8,
}

#[derive(Debug, Clone)]
struct Scenario {
    ranks: usize,
    /// Started in this order, as soon as each makes sense, or later.
    ops: Vec<Op>,
    bounds: Bounds,
    mutant: Mutant,
    seen: Arc<AtomicU32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    world: World,
    left: Bounds,
    started: usize,
    violation: Option<Violation>,
}

fn spend(left: &mut u8) {
    *left -= 1;
}

impl Scenario {
    fn new(ranks: usize, ops: Vec<Op>, bounds: Bounds) -> Self {
        Scenario { ranks, ops, bounds, mutant: Mutant::None, seen: Arc::default() }
    }

    /// What may happen to the frames under way.
    fn frames(state: &State, actions: &mut Vec<Action>) {
        let flights = state.world.flights();
        for index in 0..flights.len() {
            if index > 0 && flights[index - 1] == flights[index] {
                continue;
            }
            actions.push(Action::Deliver(index));
            if state.left.duplicates > 0 {
                actions.push(Action::Duplicate(index));
            }
            if state.left.losses > 0 {
                actions.push(Action::Drop(index));
            }
        }
    }

    /// What may happen at the ranks.
    fn drivers(state: &State, actions: &mut Vec<Action>) {
        for (member, seat) in state.world.seats().iter().enumerate() {
            if seat.running.is_some() {
                actions.push(Action::Work { member, fault: Fault::None });
                if state.left.failures > 0 {
                    actions.push(Action::Work { member, fault: Fault::Clean });
                }
                if state.left.lost_pages > 0 {
                    actions.push(Action::Work { member, fault: Fault::Lose });
                }
            }
            if seat.counts && state.left.ranks > 0 {
                actions.push(Action::CrashRank(member));
            }
            if seat.counts && state.left.cuts > 0 && state.world.is_coordinated() {
                actions.push(Action::Cut(member));
            }
        }
    }

    /// Explores every state and prints how many there are. Fails with the way to a violation.
    fn explore(self, name: &str) -> Result<Facts, String> {
        let (begin, seen) = (Instant::now(), self.seen.clone());
        let checker = self.checker().spawn_bfs().join();
        let states = checker.unique_state_count();
        println!(
            "{name}: {states} states, depth {}, {:.1} s",
            checker.max_depth(),
            begin.elapsed().as_secs_f64()
        );
        if let Some(path) = checker.discovery("nothing that must not be") {
            let violation = path.last_state().violation.clone().unwrap();
            return Err(format!("{name}: {violation}\n{:#?}", path.into_actions()));
        }
        Ok(Facts::from_bits(seen.load(Ordering::Relaxed)))
    }

    /// Explores every state. All of `expected` must have happened in some of them: a check of states that are never reached
    /// shows nothing.
    fn check(self, name: &str, expected: &[Facts]) {
        let met = self.explore(name).unwrap_or_else(|violation| panic!("{violation}"));
        for fact in expected {
            let words = Facts::ALL.iter().find(|(each, _)| each == fact).map(|(_, words)| words);
            assert!(met.has(*fact), "{name} never met: {words:?}");
        }
    }
}

impl Model for Scenario {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let world = World::new(MEMBERS[..self.ranks].to_vec(), 4, vec![0], self.mutant).unwrap();
        vec![State { world, left: self.bounds, started: 0, violation: None }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.violation.is_some() {
            return;
        }
        let world = &state.world;
        if let Some(op) = self.ops.get(state.started)
            && world.may_start(op)
        {
            actions.push(Action::Start(op.clone()));
        }
        Self::frames(state, actions);
        Self::drivers(state, actions);
        actions.extend(world.notices().map(Action::Notice));
        if state.left.deadlines > 0 || world.is_idle() {
            actions.extend(world.armed().map(Action::Deadline));
        }
        if state.left.coordinators > 0 && world.is_coordinated() {
            actions.push(Action::CrashCoordinator);
        }
        if state.left.terms > 0 && !world.is_coordinated() {
            actions.push(Action::BeginTerm);
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match &action {
            Action::Start(_) => next.started += 1,
            Action::Duplicate(_) => spend(&mut next.left.duplicates),
            Action::Drop(_) => spend(&mut next.left.losses),
            Action::Work { fault: Fault::Clean, .. } => spend(&mut next.left.failures),
            Action::Work { fault: Fault::Lose, .. } => spend(&mut next.left.lost_pages),
            Action::Deadline(_) if !state.world.is_idle() => spend(&mut next.left.deadlines),
            Action::CrashCoordinator => spend(&mut next.left.coordinators),
            Action::BeginTerm => spend(&mut next.left.terms),
            Action::CrashRank(_) => spend(&mut next.left.ranks),
            Action::Cut(_) => spend(&mut next.left.cuts),
            Action::Deadline(_) | Action::Deliver(_) | Action::Work { .. } | Action::Notice(_) => {}
        }
        next.violation = next.world.apply(action).err();
        self.seen.fetch_or(next.world.facts().to_bits(), Ordering::Relaxed);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("nothing that must not be", |_, state: &State| state.violation.is_none())]
    }
}

fn map(pages: &[u32]) -> Op {
    Op::Map(pages.to_vec())
}

fn unmap(pages: &[u32]) -> Op {
    Op::Unmap(pages.to_vec())
}

fn once() -> Vec<Op> {
    vec![map(&[1])]
}

fn there_and_back() -> Vec<Op> {
    vec![map(&[1]), unmap(&[1])]
}

// ---------------------------------------------------------------- three ranks in two stages

#[test]
fn a_map_that_fails_on_some_rank() {
    let bounds = Bounds { failures: 1, lost_pages: 1, duplicates: 1, ..Bounds::default() };
    Scenario::new(3, once(), bounds).check(
        "map, two failures, a frame twice",
        &[Facts::ABORTED, Facts::OVERTAKEN, Facts::ABORTED_AT_WORK, Facts::LOST_PAGE, Facts::DONE],
    );
}

#[test]
fn a_map_whose_frames_are_lost() {
    let bounds = Bounds { failures: 1, losses: 2, ..Bounds::default() };
    Scenario::new(3, once(), bounds).check(
        "map, a failure, two frames lost",
        &[Facts::ANSWER_HEALED, Facts::REQUEST_HEALED, Facts::BROKEN, Facts::DONE],
    );
}

#[test]
fn a_map_that_outlasts_deadlines() {
    let bounds = Bounds { deadlines: 1, ..Bounds::default() };
    Scenario::new(3, once(), bounds).check("map, an early deadline", &[Facts::REQUEST_HEALED, Facts::DONE]);
}

#[test]
fn an_unmap_that_fails_on_some_rank() {
    let bounds = Bounds { failures: 1, duplicates: 1, ..Bounds::default() };
    Scenario::new(3, there_and_back(), bounds).check(
        "map and unmap, a failure, a frame twice",
        &[Facts::COMMITTED, Facts::ABORTED, Facts::OVERTAKEN, Facts::ABORTED_AT_WORK, Facts::DONE],
    );
}

#[test]
fn an_unmap_whose_frames_are_lost() {
    let bounds = Bounds { failures: 1, losses: 2, ..Bounds::default() };
    Scenario::new(3, there_and_back(), bounds).check(
        "map and unmap, a failure, two frames lost",
        &[
            Facts::COMMITTED,
            Facts::COMMIT_REPEATED,
            Facts::ABORTED,
            Facts::ANSWER_HEALED,
            Facts::PRESUMED_ABORT,
            Facts::BROKEN,
        ],
    );
}

#[test]
fn a_rank_that_dies() {
    let bounds = Bounds { ranks: 1, duplicates: 1, ..Bounds::default() };
    Scenario::new(3, there_and_back(), bounds).check(
        "map and unmap, a rank dies, a frame twice",
        &[Facts::BROKEN, Facts::COMMITTED, Facts::ABORTED],
    );
}

#[test]
fn a_connection_that_breaks() {
    let bounds = Bounds { cuts: 1, failures: 1, ..Bounds::default() };
    Scenario::new(3, there_and_back(), bounds).check(
        "map and unmap, a connection breaks, a failure",
        &[Facts::BROKEN, Facts::COMMITTED, Facts::ABORTED, Facts::PRESUMED_ABORT],
    );
}

#[test]
fn a_coordinator_that_dies_and_its_successor() {
    let bounds = Bounds { coordinators: 1, terms: 1, losses: 1, failures: 1, ..Bounds::default() };
    Scenario::new(3, there_and_back(), bounds).check(
        "map and unmap, a new coordinator, a failure, a frame lost",
        &[
            Facts::TAKEN_OVER,
            Facts::PRESUMED_ABORT,
            Facts::HALF_COMMITTED,
            Facts::RECONCILED,
            Facts::STALE,
            Facts::COMMIT_REPEATED,
        ],
    );
}

#[test]
fn a_coordinator_that_dies_and_whose_frames_come_twice() {
    let bounds = Bounds { coordinators: 1, terms: 1, duplicates: 1, ..Bounds::default() };
    Scenario::new(3, there_and_back(), bounds).check(
        "map and unmap, a new coordinator, a frame twice",
        &[Facts::TAKEN_OVER, Facts::PRESUMED_ABORT, Facts::HALF_COMMITTED, Facts::RECONCILED, Facts::STALE],
    );
}

#[test]
fn a_rank_that_dies_and_then_the_coordinator() {
    let bounds = Bounds { coordinators: 1, terms: 1, ranks: 1, ..Bounds::default() };
    Scenario::new(3, there_and_back(), bounds).check(
        "map and unmap, a rank dies, a new coordinator",
        &[Facts::TAKEN_OVER, Facts::BROKEN, Facts::PRESUMED_ABORT, Facts::RECONCILED, Facts::HALF_COMMITTED],
    );
}

#[test]
fn operations_side_by_side() {
    let ops = vec![map(&[1]), map(&[2]), unmap(&[1])];
    let bounds = Bounds { failures: 1, ..Bounds::default() };
    let expected = [Facts::DONE, Facts::ABORTED, Facts::COMMITTED];
    Scenario::new(3, ops, bounds).check("two maps and an unmap side by side, a failure", &expected);
}

// ---------------------------------------------------------------- fewer ranks, more adversity

#[test]
fn two_ranks_with_everything_lost_and_late() {
    let bounds =
        Bounds { losses: 1, duplicates: 1, failures: 1, coordinators: 1, terms: 1, ..Bounds::default() };
    Scenario::new(2, there_and_back(), bounds).check(
        "2 ranks: map and unmap, a new coordinator, a failure, a frame lost, a frame twice",
        &[Facts::TAKEN_OVER, Facts::RECONCILED, Facts::STALE, Facts::HALF_COMMITTED, Facts::ANSWER_HEALED],
    );
}

#[test]
fn two_ranks_with_early_deadlines() {
    let bounds = Bounds { deadlines: 1, failures: 1, losses: 1, ..Bounds::default() };
    Scenario::new(2, there_and_back(), bounds).check(
        "2 ranks: map and unmap, an early deadline, a failure, a frame lost",
        &[Facts::COMMIT_REPEATED, Facts::ANSWER_HEALED, Facts::ABORTED, Facts::BROKEN],
    );
}

#[test]
fn one_rank_in_one_exchange() {
    let bounds = Bounds {
        losses: 1,
        duplicates: 1,
        deadlines: 1,
        failures: 1,
        coordinators: 1,
        terms: 1,
        ranks: 1,
        ..Bounds::default()
    };
    let scenario = Scenario::new(1, there_and_back(), bounds);
    let met = scenario.explore("1 rank: map and unmap, everything goes wrong once").unwrap();
    assert!(met.has(Facts::TAKEN_OVER) && met.has(Facts::RECONCILED) && met.has(Facts::BROKEN));
    // One rank needs no second phase.
    assert!(!met.has(Facts::COMMITTED) && met.has(Facts::DONE));
}

// ---------------------------------------------------------------- the checks can fail

#[test]
fn wrong_protocols_are_found() {
    let bounds = Bounds { failures: 1, losses: 1, ..Bounds::default() };
    let dying = Bounds { coordinators: 1, ..Bounds::default() };
    let twice = Bounds { duplicates: 1, ..Bounds::default() };
    for (mutant, bounds, words) in [
        (Mutant::ForgetsEarlyAborts, bounds, "agreed is"),
        (Mutant::CommitBecomesAbort, bounds, "after the contrary was sent"),
        (Mutant::NoPresumedAbort, dying, "is left with"),
        (Mutant::OneForAll, Bounds::default(), "still keeps the memory"),
        (Mutant::DoesItTwice, twice, "is prepared while"),
    ] {
        let mut scenario = Scenario::new(2, there_and_back(), bounds);
        scenario.mutant = mutant;
        let found = scenario.explore(&format!("{mutant:?}")).map(drop);
        let violation = found.expect_err("nothing was found");
        assert!(violation.contains(words), "{violation}");
    }
}
