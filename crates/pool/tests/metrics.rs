//! What an instance counts: every figure, by what it says it counts. A figure that nothing counts fails the last test.
#![allow(clippy::unwrap_used, clippy::panic)]

mod fake;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use fake::ranks::{self, Engine};
use fake::{Fake, Fault, PAGE_BYTES, config};
use kvcached_control::{
    BudgetShare, Change, Counter, InstanceRecord, Listed, MetricsView, Terms, Timer, ask, list, metrics,
};
use kvcached_pool::{Budgeted, CachePolicy, Cached, Mapper, Pool, PoolConfig, Shares, Steward};
use kvcached_vmm::sim::Sim;

const SOON: Duration = Duration::from_secs(20);

struct Home {
    dir: PathBuf,
    _home: tempfile::TempDir,
}

fn home() -> Home {
    let home = tempfile::tempdir().unwrap();
    Home { dir: home.path().join("records"), _home: home }
}

fn record(dir: &Path, name: &str, terms: Terms) -> Arc<InstanceRecord> {
    Arc::new(InstanceRecord::create(dir, name, "test", "cpu", terms).unwrap())
}

fn counted(dir: &Path, name: &str) -> MetricsView {
    let found = list(dir).unwrap().into_iter().find_map(|listed| match listed {
        Listed::Instance(view) if view.name == name => Some(view),
        _ => None,
    });
    metrics(&found.unwrap()).unwrap().unwrap()
}

fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < SOON, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Of one pool of 20 pages that has the whole device.
fn alone(record: &InstanceRecord) -> (Arc<Fake>, Pool) {
    let fake = Arc::new(Fake::default());
    let pool = Pool::new(config(80), fake.clone(), Arc::new(record.pool_row("kv").unwrap())).unwrap();
    (fake, pool)
}

fn settle(pool: &Pool) {
    assert!(pool.quiesce(SOON).unwrap());
}

fn what_the_driver_does(dir: &Path, record: &InstanceRecord) {
    let before = counted(dir, record.name());
    let more = |counter| counted(dir, record.name()).counter(counter) - before.counter(counter);
    let calls = |timer| counted(dir, record.name()).timer(timer).count() - before.timer(timer).count();
    let (fake, pool) = alone(record);
    let ids = pool.alloc(9).unwrap().unwrap();
    assert_eq!((more(Counter::PagesMapped), calls(Timer::Map)), (3, 1));
    pool.free(&ids).unwrap();
    settle(&pool);
    assert_eq!(more(Counter::PagesUnmapped), 3);
    assert!((1..=3).contains(&calls(Timer::Unmap)));
    assert_eq!(more(Counter::AllocationMisses), 0);

    fake.set_budget(1);
    assert_eq!(pool.alloc(9).unwrap(), None);
    assert_eq!((more(Counter::RefusedByDevice), more(Counter::AllocationMisses)), (1, 1));
    assert_eq!(pool.alloc(81).unwrap(), None, "more than there are");
    assert_eq!((more(Counter::RefusedByDevice), more(Counter::AllocationMisses)), (1, 2));
    assert_eq!(pool.reserve_demand(9).unwrap(), 4);
    assert_eq!((more(Counter::PagesMapped), more(Counter::AllocationMisses)), (4, 3));
    assert_eq!(more(Counter::MapFailures), 0, "want of memory is none");
    pool.trim().unwrap();
    fake.set_budget(20);

    for (fault, failures, lost) in [(Fault::Driver, 1, 0), (Fault::Lost, 2, 1)] {
        fake.fail_at(0, fault);
        pool.alloc(5).unwrap_err();
        assert_eq!((more(Counter::MapFailures), more(Counter::PagesQuarantined)), (failures, lost));
    }
    fake.heal();
    let ids = pool.alloc(8).unwrap().unwrap();
    let unmapped = more(Counter::PagesUnmapped);
    fake.fail_at(0, Fault::Lost);
    pool.free(&ids).unwrap();
    soon("a page that cannot be unmapped is lost", || more(Counter::PagesQuarantined) == 2);
    assert_eq!(more(Counter::UnmapFailures), 1);
    fake.heal();
    pool.trim().unwrap();
    assert_eq!(more(Counter::PagesUnmapped) - unmapped, 1, "the other one of two");
    assert_eq!(more(Counter::TransactionsDone), 0);
}

fn what_ranks_agree_on(dir: &Path, record: &InstanceRecord) {
    let outcomes = [Counter::TransactionsDone, Counter::TransactionsUndone, Counter::TransactionsLost];
    let count = || outcomes.map(|outcome| counted(dir, record.name()).counter(outcome));
    let before = count();
    let more = || {
        let mut now = count();
        now.iter_mut().zip(before).for_each(|(now, before)| *now -= before);
        now
    };
    let sims: Vec<Arc<Sim>> = (0..2).map(|_| Sim::new()).collect();
    let engine = Engine::new(sims.iter().map(|sim| ranks::tensor(sim.clone())).collect());
    let pool = engine.pool(ranks::config(), Arc::new(record.pool_row("ranks").unwrap())).unwrap();
    let ids = pool.alloc(1).unwrap().unwrap();
    pool.free(&ids).unwrap();
    settle(&pool);
    assert_eq!(more(), [2, 0, 0]);
    sims[1].set_budget(0);
    assert_eq!(pool.alloc(1).unwrap(), None);
    assert_eq!(more(), [2, 1, 0], "one rank has no memory");
    drop((pool, engine));
    // Somewhere on the way undoing fails as well.
    let lost_at = (1..40).find(|&k| {
        let sims: Vec<Arc<Sim>> = (0..2).map(|_| Sim::new()).collect();
        let engine = Engine::new(sims.iter().map(|sim| ranks::tensor(sim.clone())).collect());
        let pool = engine.pool(ranks::config(), Arc::new(record.pool_row("ranks").unwrap())).unwrap();
        sims[1].fail_from(k);
        let outcome = pool.alloc(1).map(drop);
        sims[1].heal();
        outcome.is_err() && more()[2] > 0
    });
    assert!(lost_at.is_some());
    let times = counted(dir, record.name());
    let transactions: u64 = outcomes.iter().map(|outcome| times.counter(*outcome)).sum();
    assert_eq!(times.timer(Timer::Transaction).count(), transactions);
}

/// An engine that shares a budget of 10 pages.
struct Sharing {
    steward: Steward,
    shares: Arc<Shares>,
    pool: Arc<Pool>,
}

impl Sharing {
    fn begin(dir: &Path, record: &Arc<InstanceRecord>, reserve_pages: u64) -> Self {
        let budget = 10 * PAGE_BYTES;
        let device = BudgetShare::join(dir, record, "host", budget, Some(budget)).unwrap();
        let shares = Arc::new(Shares::new(record.clone(), vec![device]));
        let policy = CachePolicy { free_watermark_bytes: 0, idle: None };
        let steward = Steward::new(record.clone(), shares.clone(), policy).unwrap();
        let pool = pool(record, &shares, &steward, "shared", reserve_pages);
        Sharing { steward, shares, pool }
    }
}

fn pool(
    record: &InstanceRecord,
    shares: &Arc<Shares>,
    steward: &Steward,
    name: &str,
    reserve_pages: u64,
) -> Arc<Pool> {
    let mapper: Arc<dyn Mapper> = Arc::new(Budgeted::new(Arc::new(Fake::default()), shares.clone()));
    let reserve = reserve_pages * PAGE_BYTES;
    let config = PoolConfig { min_reserved_bytes: reserve, max_reserved_bytes: reserve, ..config(80) };
    let pool = Arc::new(Pool::new(config, mapper, Arc::new(record.pool_row(name).unwrap())).unwrap());
    steward.watch(&pool).unwrap();
    pool
}

/// Pages of blocks that may be freed at any time.
struct Prefixes {
    pool: Weak<Pool>,
    pages: Mutex<Vec<Vec<u32>>>,
}

impl Cached for Prefixes {
    fn give(&self, bytes: u64) -> u64 {
        let (pool, mut pages) = (self.pool.upgrade().unwrap(), self.pages.lock().unwrap());
        let given = pages.len().min(bytes.div_ceil(PAGE_BYTES) as usize);
        pages.drain(..given).for_each(|ids| pool.free(&ids).unwrap());
        given as u64 * PAGE_BYTES
    }

    fn bytes(&self) -> u64 {
        self.pages.lock().unwrap().len() as u64 * PAGE_BYTES
    }
}

fn what_instances_ask_of_each_other(dir: &Path, own: &Arc<InstanceRecord>) {
    let other = record(dir, "other", Terms::default());
    let before = counted(dir, own.name());
    let more = |counter| counted(dir, own.name()).counter(counter) - before.counter(counter);
    let of_other = |counter| counted(dir, "other").counter(counter);
    let (engine, neighbour) = (Sharing::begin(dir, own, 3), Sharing::begin(dir, &other, 0));
    // The neighbour is given the reserve, then pages of cached prefixes.
    let held = engine.pool.alloc(12).unwrap().unwrap();
    let cached = engine.pool.alloc(16).unwrap().unwrap();
    let pages = cached.chunks(4).map(<[u32]>::to_vec).collect();
    let prefixes = Arc::new(Prefixes { pool: Arc::downgrade(&engine.pool), pages: Mutex::new(pages) });
    engine.steward.set_cached(Some(prefixes.clone()));
    settle(&engine.pool);
    let reserve = engine.pool.idle_bytes();
    assert_eq!(reserve, 3 * PAGE_BYTES, "three of ten pages");
    let mut had = None;
    soon("the neighbour gets what it waits for", || {
        had = had.take().or_else(|| neighbour.pool.alloc(20).unwrap());
        had.is_some()
    });
    assert_eq!(more(Counter::IdleBytesReclaimed), reserve);
    assert!(more(Counter::CachedBytesReclaimed) >= 2 * PAGE_BYTES && more(Counter::Evictions) >= 1);
    assert_eq!(prefixes.bytes(), 4 * PAGE_BYTES - more(Counter::CachedBytesReclaimed));
    assert!(counted(dir, own.name()).timer(Timer::Reclaim).count() >= 2);
    assert!(of_other(Counter::RefusedByBudget) >= 1);
    assert_eq!(counted(dir, "other").timer(Timer::Shortage).count(), 1, "one wait, whatever it took");
    assert!(counted(dir, "other").timer(Timer::Shortage).sum > Duration::ZERO);
    // What the instance itself is refused, by whom.
    assert_eq!(engine.pool.alloc(40).unwrap(), None);
    assert!(more(Counter::RefusedByBudget) >= 1);
    neighbour.pool.free(&had.unwrap()).unwrap();
    settle(&neighbour.pool);
    ask(dir, "other", Change { min_bytes: Some(5 * PAGE_BYTES), ..Change::default() }, SOON).unwrap();
    let mut more_held = vec![];
    soon("the rest is the neighbour's", || match engine.pool.alloc(4).unwrap() {
        Some(ids) => {
            more_held.push(ids);
            false
        }
        None => true,
    });
    assert!(more(Counter::RefusedByGuarantees) >= 1);
    more_held.iter().for_each(|ids| engine.pool.free(ids).unwrap());
    settle(&engine.pool);
    // Each of its pools keeps the limit, and both together have to.
    let change = Change { limit_bytes: Some(Some(4 * PAGE_BYTES)), ..Change::default() };
    ask(dir, own.name(), change, SOON).unwrap();
    let second = pool(own, &engine.shares, &engine.steward, "second", 0);
    assert_eq!(second.alloc(16).unwrap(), None);
    assert!(more(Counter::RefusedByLimit) >= 1);
    engine.pool.free(&held).unwrap();
}

#[test]
fn every_figure_counts_what_it_says_and_none_counts_nothing() {
    let Home { dir, .. } = &home();
    let own = record(dir, "own", Terms::default());
    what_the_driver_does(dir, &own);
    what_ranks_agree_on(dir, &own);
    what_instances_ask_of_each_other(dir, &own);
    let view = counted(dir, "own");
    for counter in Counter::ALL {
        assert!(view.counter(counter) > 0, "nothing counts {counter:?}");
    }
    for timer in Timer::ALL {
        assert!(view.timer(timer).count() > 0, "nothing times {timer:?}");
    }
}
