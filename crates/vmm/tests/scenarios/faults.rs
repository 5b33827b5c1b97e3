//! Every scenario, in every setup, under every failing driver call.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use kvcached_vmm::live_ranges;

use super::ground::Ground;
use super::runner::{Ran, run};
use super::scenario::{Plan, Scenario, scenarios};
use super::setup::{Cache, Setup, alone};

/// Which failures a sweep tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extent {
    /// None.
    Healthy,
    /// Each call alone.
    Singles,
    /// Also pairs, all of them in short scenarios and neighbours in long ones, and all calls from one on.
    Pairs,
}

/// Calls of a scenario that is short.
const SHORT: u32 = 20;

/// How many runs came to what.
#[derive(Debug, Default, Clone, Copy)]
pub struct Tally {
    runs: usize,
    lost_pages: usize,
    leaked: usize,
    half_committed: usize,
    abort_lost: usize,
    stuck: usize,
}

impl From<Ran> for Tally {
    fn from(ran: Ran) -> Self {
        Tally {
            runs: 1,
            lost_pages: ran.lost_pages.into(),
            leaked: ran.leaked.into(),
            half_committed: ran.half_committed.into(),
            abort_lost: ran.abort_lost.into(),
            stuck: ran.stuck.into(),
        }
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.runs += other.runs;
        self.lost_pages += other.lost_pages;
        self.leaked += other.leaked;
        self.half_committed += other.half_committed;
        self.abort_lost += other.abort_lost;
        self.stuck += other.stuck;
    }
}

/// Says what was running, should it panic.
struct Context(Setup, &'static str, Plan);

impl Drop for Context {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("in {:?} of {:?} under {:?}", self.1, self.0, self.2);
        }
    }
}

/// Runs a scenario over devices of its own without failures, then under each failure of the extent.
fn sweep_one(ground: &impl Fn() -> Ground, setup: Setup, scenario: &Scenario, extent: Extent) -> Tally {
    let mut tally = Tally::default();
    let mut try_plan = |plan| {
        let _context = Context(setup, scenario.name, plan);
        let ran = run(&ground(), setup, &scenario.ops, plan);
        tally += Tally::from(ran);
        ran
    };
    let healthy = try_plan(Plan::Healthy);
    // A range that could not be had is the same for all scenarios.
    let first = if scenario.ops.is_empty() { 1 } else { healthy.built + 1 };
    let short = healthy.calls - first < SHORT;
    for k in first..=healthy.calls {
        if extent >= Extent::Singles {
            try_plan(Plan::Single(k));
        }
        if extent >= Extent::Pairs {
            try_plan(Plan::From(k));
            // A failure makes further calls.
            for l in k + 1..=if short { healthy.calls + 4 } else { k + 1 } {
                try_plan(Plan::Pair(k, l));
            }
        }
    }
    tally
}

/// Sweeps every scenario in every setup, to the extent that is wanted of it, in so many threads.
pub fn sweep(
    threads: usize,
    ground: impl Fn() -> Ground + Sync,
    extent: impl Fn(Setup, &Scenario) -> Extent + Sync,
) -> Tally {
    let before = live_ranges();
    let setups = Setup::all();
    let scenarios = scenarios();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut tally = Tally::default();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let (setup, scenario) = (number / scenarios.len(), number % scenarios.len());
            let Some(setup) = setups.get(setup) else { return tally };
            let scenario = &scenarios[scenario];
            tally += sweep_one(&ground, *setup, scenario, extent(*setup, scenario));
        }
    };
    let mut tally = Tally::default();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().for_each(|worker| tally += worker.join().unwrap());
    });
    println!("{tally:?}");
    assert_eq!(live_ranges(), before + tally.stuck);
    tally
}

/// Asserts that failures have reached every kind of damage.
fn check_reach(tally: Tally) {
    let least = [tally.lost_pages, tally.leaked, tally.half_committed, tally.abort_lost].into_iter().min();
    assert!(least > Some(100), "the failures reach too little: {tally:?}");
}

#[test]
fn every_scenario_under_every_failing_call_of_a_simulated_device() {
    let _alone = alone();
    check_reach(sweep(2, Ground::sim, |_, _| Extent::Pairs));
}

#[test]
fn every_scenario_under_every_failing_call_over_real_memory() {
    let _alone = alone();
    // How much is kept is a matter of counting, and told above.
    let extent = |setup: Setup, _: &Scenario| match setup.cache {
        Cache::OnePage => Extent::Healthy,
        Cache::Nothing | Cache::Everything => Extent::Singles,
    };
    check_reach(sweep(2, Ground::host, extent));
}
