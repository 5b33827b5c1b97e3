//! A seeded simulator: the production cores under a virtual clock, with random operations, delays, failures, deaths, frames that
//! arrive late, twice or never, and the checks of `kvcached_ipc::sim`. A schedule ends when nothing can happen any more;
//! that it ends within bounds, with every operation finished, is what liveness means here.
//!
//! `SCHEDULES=1000000 cargo test --release -p kvcached-ipc --test simulator` runs so many (10,000 where it is not set).
//! `SEED=n` runs only schedule n, and tells each step.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use kvcached_ipc::coordinator::Op;
use kvcached_ipc::message::Member;
use kvcached_ipc::sim::{Action, Facts, Fault, Mutant, Violation, World};

/// No schedule is longer: deadlines, terms and operations are bounded.
const MAX_STEPS: u64 = 5_000;
const TIMEOUT: u64 = 1_000;

/// SplitMix64: small, seeded, the same everywhere.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// So often in a thousand.
    fn per_mille(&mut self, often: u64) -> bool {
        self.below(1000) < often
    }
}

/// How rough this schedule is, per mille of the moments at which each can happen.
struct Weather {
    losses: u64,
    duplicates: u64,
    failures: u64,
    deaths: u64,
    /// The longest way of a frame, and the longest work.
    delay: u64,
    work: u64,
}

impl Weather {
    fn any(chance: &mut Chance) -> Self {
        let mut one_of = |choices: &[u64]| choices[chance.below(choices.len() as u64) as usize];
        Weather {
            losses: one_of(&[0, 0, 10, 50]),
            duplicates: one_of(&[0, 0, 20, 100]),
            failures: one_of(&[0, 0, 50, 200]),
            deaths: one_of(&[0, 0, 5, 20]),
            delay: one_of(&[10, 200, 900]),
            work: one_of(&[5, 100, 3_000]),
        }
    }
}

struct Schedule {
    chance: Chance,
    weather: Weather,
    world: World,
    now: u64,
    /// When each rank's work is done; 0 while none was chosen.
    done: Vec<u64>,
    ops: u64,
    terms: u64,
    next_op: u64,
    next_term: u64,
    steps: u64,
    tell: bool,
}

impl Schedule {
    fn new(seed: u64, mutant: Mutant, tell: bool) -> Self {
        let mut chance = Chance(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ seed);
        let weather = Weather::any(&mut chance);
        let ranks = [1, 2, 3, 3, 4][chance.below(5) as usize];
        let members = (0..ranks).map(|rank| Member { stage: rank / 2, rank: rank % 2 }).collect();
        let world = World::new(members, 8, vec![0, 1], mutant).unwrap();
        let (ops, terms) = (1 + chance.below(12), chance.below(3));
        let done = vec![0; ranks as usize];
        Schedule {
            chance,
            weather,
            world,
            now: 0,
            done,
            ops,
            terms,
            next_op: 1,
            next_term: 0,
            steps: 0,
            tell,
        }
    }

    /// Until nothing can happen any more.
    fn run(&mut self) -> Result<(), Violation> {
        loop {
            self.plan();
            let Some((at, action)) = self.soonest() else { return Ok(()) };
            self.now = self.now.max(at);
            if self.tell {
                println!("{:6} {action:?}", self.now);
            }
            self.happen(action)?;
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return Err(Violation(format!("no rest after {MAX_STEPS} steps")));
            }
        }
    }

    /// Gives a time to all that is new.
    fn plan(&mut self) {
        let (now, chance, weather) = (self.now, &mut self.chance, &self.weather);
        for flight in self.world.flights_mut().iter_mut().filter(|flight| flight.due == 0) {
            flight.due = now + 1 + chance.below(weather.delay);
        }
        for due in self.world.notices_mut().values_mut().filter(|due| **due == 0) {
            *due = now + 1 + chance.below(weather.delay);
        }
        for due in self.world.armed_mut().values_mut().filter(|due| **due == 0) {
            *due = now + TIMEOUT;
        }
        for (done, seat) in self.done.iter_mut().zip(self.world.seats()) {
            match (&seat.running, *done) {
                (None, _) => *done = 0,
                (Some(_), 0) => *done = now + 1 + chance.below(weather.work),
                (Some(_), _) => {}
            }
        }
        if self.next_term == 0 && !self.world.is_coordinated() && self.terms > 0 {
            self.next_term = now + 1 + chance.below(TIMEOUT);
        }
    }

    /// What happens next, and when.
    fn soonest(&mut self) -> Option<(u64, Action)> {
        let mut best: Option<(u64, Action)> = None;
        let mut offer = |at: u64, action: Action| {
            if best.as_ref().is_none_or(|(soonest, _)| at < *soonest) {
                best = Some((at, action));
            }
        };
        for (index, flight) in self.world.flights().iter().enumerate() {
            offer(flight.due, Action::Deliver(index));
        }
        for (member, done) in self.done.iter().enumerate().filter(|(_, done)| **done > 0) {
            offer(*done, Action::Work { member, fault: Fault::None });
        }
        for (notice, due) in self.world.notices_mut() {
            offer(*due, Action::Notice(*notice));
        }
        for (transaction, due) in self.world.armed_mut() {
            offer(*due, Action::Deadline(*transaction));
        }
        if self.next_term > 0 {
            offer(self.next_term, Action::BeginTerm);
        }
        if self.ops > 0 && self.world.is_coordinated() {
            offer(self.next_op.max(self.now), Action::Start(Op::Room));
        }
        best
    }

    fn happen(&mut self, action: Action) -> Result<(), Violation> {
        if self.weather.deaths > 0 && self.chance.per_mille(self.weather.deaths) {
            let member = self.chance.below(self.done.len() as u64) as usize;
            let death = match self.chance.below(4) {
                0 => Action::CrashRank(member),
                1 => Action::Cut(member),
                _ => Action::CrashCoordinator,
            };
            if self.tell {
                println!("{:6} {death:?}", self.now);
            }
            // What was next may be gone with whoever died: it is chosen anew.
            return self.world.apply(death);
        }
        let action = match action {
            Action::Deliver(index) if self.chance.per_mille(self.weather.losses) => Action::Drop(index),
            Action::Deliver(index) if self.chance.per_mille(self.weather.duplicates) => {
                self.world.flights_mut()[index].due = self.now + 1 + self.chance.below(4 * TIMEOUT);
                Action::Duplicate(index)
            }
            Action::Work { member, .. } => {
                self.done[member] = 0;
                Action::Work { member, fault: self.fault() }
            }
            Action::BeginTerm => {
                (self.next_term, self.terms) = (0, self.terms - 1);
                Action::BeginTerm
            }
            Action::Start(_) => {
                self.ops -= 1;
                self.next_op = self.now + 1 + self.chance.below(2 * self.weather.delay + self.weather.work);
                let Some(op) = self.op() else { return Ok(()) };
                Action::Start(op)
            }
            action => action,
        };
        self.world.apply(action)
    }

    fn fault(&mut self) -> Fault {
        match self.chance.per_mille(self.weather.failures) {
            false => Fault::None,
            true if self.chance.per_mille(250) => Fault::Lose,
            true => Fault::Clean,
        }
    }

    /// Something that makes sense now.
    fn op(&mut self) -> Option<Op> {
        for _ in 0..4 {
            let first = self.chance.below(8) as u32;
            let pages: Vec<u32> = (first..8.min(first + 1 + self.chance.below(3) as u32)).collect();
            let op = match self.chance.below(16) {
                0 => Op::Barrier,
                1 => Op::Trim,
                2 => Op::Room,
                3 if self.ops == 0 => Op::Bye,
                even if even % 2 == 0 => Op::Map(pages),
                _ => Op::Unmap(pages),
            };
            if self.world.may_start(&op) {
                return Some(op);
            }
        }
        None
    }
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// Runs these seeds on all cores. The first violation's seed, and what was met.
fn run_all(seeds: std::ops::Range<u64>, mutant: Mutant) -> (Option<(u64, Violation)>, Facts, u64) {
    let (next, end) = (AtomicU64::new(seeds.start), seeds.end);
    let found = Mutex::new((None, Facts::default(), 0));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                let (mut met, mut steps) = (Facts::default(), 0);
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        break;
                    }
                    let mut schedule = Schedule::new(seed, mutant, false);
                    let ran = schedule.run();
                    met.add(schedule.world.facts());
                    steps += schedule.steps;
                    if let Err(violation) = ran {
                        found.lock().unwrap().0.get_or_insert((seed, violation));
                        next.store(end, Ordering::Relaxed);
                    }
                }
                let mut found = found.lock().unwrap();
                found.1.add(met);
                found.2 += steps;
            });
        }
    });
    found.into_inner().unwrap()
}

#[test]
fn no_schedule_breaks_the_protocol() {
    if let Some(seed) = setting("SEED") {
        if let Err(violation) = Schedule::new(seed, Mutant::None, true).run() {
            panic!("{violation}");
        }
        return;
    }
    let (begin, schedules) = (Instant::now(), setting("SCHEDULES").unwrap_or(10_000));
    let (violation, met, steps) = run_all(0..schedules, Mutant::None);
    if let Some((seed, violation)) = violation {
        panic!(
            "{violation}\nrun it again: SEED={seed} cargo test -p kvcached-ipc --test simulator -- --nocapture"
        );
    }
    let seconds = begin.elapsed().as_secs_f64();
    let each = steps as f64 / schedules as f64;
    println!(
        "{schedules} schedules of {each:.0} steps in {seconds:.1} s: {:.0}/s",
        schedules as f64 / seconds
    );
    if schedules >= 10_000 {
        for (fact, words) in Facts::ALL {
            assert!(met.has(fact), "no schedule met: {words}");
        }
    }
}

#[test]
fn wrong_protocols_are_found() {
    for mutant in [
        Mutant::ForgetsEarlyAborts,
        Mutant::CommitBecomesAbort,
        Mutant::NoPresumedAbort,
        Mutant::OneForAll,
        Mutant::DoesItTwice,
    ] {
        let (violation, ..) = run_all(0..20_000, mutant);
        let (seed, violation) = violation.unwrap_or_else(|| panic!("nobody noticed {mutant:?}"));
        println!("{mutant:?}: schedule {seed}: {violation}");
    }
}

/// The same seed is the same schedule.
#[test]
fn a_seed_can_be_run_again() {
    for seed in 0..50 {
        let mut twice = [0, 1].map(|_| Schedule::new(seed, Mutant::None, false));
        for schedule in &mut twice {
            schedule.run().unwrap();
        }
        let [first, second] = twice;
        assert_eq!((first.steps, first.now, &first.world), (second.steps, second.now, &second.world));
    }
}
