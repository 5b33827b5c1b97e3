//! Every order of events, within bounds: the production cores of a coordinator and three ranks in two stages, with frames that
//! arrive in any order, twice or never, deadlines, failing drivers, and deaths. Each scenario is explored to its end and prints
//! how many states it has; what must hold in every one is checked by `kvcached_ipc::sim`.
//!
//! Bounds are spent by the adversary, so that every path ends: in a state where nothing can happen any more everything has
//! finished and nothing is left (`World` checks that too). A scenario names what it has to have met on its way.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

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
    /// Whether deaths may come before the first operation.
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

    /// Explores every state, prints how many there are, and fails with the path to a violation.
    fn check(self, name: &str, expected: &[Facts]) -> usize {
        let (begin, seen) = (Instant::now(), self.seen.clone());
        let checker = self.checker().threads(2).spawn_bfs().join();
        let states = checker.unique_state_count();
        println!("{name}: {states} states in {:.1} s", begin.elapsed().as_secs_f64());
        if let Some(path) = checker.discovery("nothing that must not be") {
            let violation = path.last_state().violation.clone().unwrap();
            panic!("{name}: {violation}\n{:#?}", path.into_actions());
        }
        let seen = Facts::from_bits(seen.load(Ordering::Relaxed));
        for fact in expected {
            let fact_name = Facts::ALL.iter().find(|(each, _)| each == fact).map(|(_, name)| name);
            assert!(seen.has(*fact), "{name} never met: {fact_name:?}");
        }
        states
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

const NONE: Bounds = Bounds {
    duplicates: 0,
    losses: 0,
    deadlines: 0,
    failures: 0,
    lost_pages: 0,
    coordinators: 0,
    terms: 0,
    ranks: 0,
    cuts: 0,
};

#[test]
fn probe() {
    let ops = || vec![map(&[1]), unmap(&[1])];
    let b = |f: fn(&mut Bounds)| {
        let mut b = NONE;
        f(&mut b);
        b
    };
    Scenario::new(3, ops(), NONE).check("plain", &[]);
    Scenario::new(3, ops(), b(|b| b.failures = 1)).check("failure", &[]);
    Scenario::new(3, ops(), b(|b| b.losses = 1)).check("loss", &[]);
    Scenario::new(3, ops(), b(|b| b.duplicates = 1)).check("dup", &[]);
    Scenario::new(3, ops(), b(|b| b.deadlines = 1)).check("deadline", &[]);
    Scenario::new(
        3,
        ops(),
        b(|b| {
            b.coordinators = 1;
            b.terms = 1
        }),
    )
    .check("crash", &[]);
    Scenario::new(3, ops(), b(|b| b.ranks = 1)).check("rank", &[]);
    Scenario::new(3, ops(), b(|b| b.cuts = 1)).check("cut", &[]);
}
