//! What is charged to a share is what is held, whatever the driver does; and nothing is backed that the share does not allow.
#![allow(clippy::unwrap_used, clippy::panic)]

mod fake;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};

use fake::gate::Gate;
use fake::share::{Part, budget};
use fake::{Call, Fake, Fault, PAGE_BYTES, Steady, check, config};
use kvcached_pool::{
    Budgeted, Cause, MapFailure, Mapper, NoMeter, Pool, PoolConfig, PoolError, UnmapFailure, Watcher,
};
use kvcached_vmm::sim::Sim;
use kvcached_vmm::{Driver, FTensor, Geometry, Options, Shape, Target, Unbacked};
use proptest::prelude::*;

const PAGES: u32 = 6;
const RANGE_PAGE: u64 = 2 << 20;

fn ftensor(sim: &Arc<Sim>, options: Options) -> Arc<FTensor> {
    let shape = Shape::new(4, 64 << 10, 16);
    let target = Target { page_bytes: Some(RANGE_PAGE), ..Target::new(RANGE_PAGE) };
    let geometry = Geometry::solve(shape, target).unwrap();
    assert_eq!(geometry.page_bytes(), RANGE_PAGE);
    let num_blocks = u64::from(PAGES * geometry.blocks_per_page());
    let driver: Arc<dyn Driver> = sim.clone();
    Arc::new(FTensor::reserve(driver, geometry, num_blocks, options).unwrap())
}

fn held(range: &FTensor) -> u64 {
    let pages = range.mapped_pages().len() + range.quarantined_pages().len();
    pages as u64 * RANGE_PAGE + range.held_beside()
}

fn options(zero: bool, kept_pages: u64) -> Options {
    let unbacked = if zero { Unbacked::Zero } else { Unbacked::Hole };
    Options { unbacked, cache_bytes: kept_pages * RANGE_PAGE }
}

#[derive(Debug, Clone)]
enum Op {
    Map(Vec<u32>),
    Ahead(Vec<u32>),
    Unmap(Vec<u32>),
    Trim,
    Budget(u64),
    Device(u64),
    Fail(u32),
}

fn op() -> impl Strategy<Value = Op> {
    let pages = || prop::collection::vec(0..PAGES, 1..4);
    prop_oneof![
        6 => pages().prop_map(Op::Map),
        2 => pages().prop_map(Op::Ahead),
        6 => pages().prop_map(Op::Unmap),
        1 => Just(Op::Trim),
        2 => (0u64..9).prop_map(Op::Budget),
        1 => (0u64..9).prop_map(Op::Device),
        3 => (1u32..9).prop_map(Op::Fail),
    ]
}

/// Does one thing, and says whether memory was refused.
fn step(mapper: &Budgeted, sim: &Sim, share: &Part, op: &Op) -> bool {
    let refused = |outcome| matches!(outcome, Err(MapFailure::OutOfMemory { .. }));
    match op {
        Op::Map(pages) => return refused(mapper.map(pages)),
        Op::Ahead(pages) => return refused(mapper.map_ahead(pages)),
        Op::Unmap(pages) => drop(mapper.unmap(pages)),
        Op::Trim => drop(mapper.trim()),
        Op::Budget(pages) => share.set_budget(pages * RANGE_PAGE),
        Op::Device(pages) => sim.set_budget(pages * RANGE_PAGE),
        Op::Fail(k) => sim.fail_at(*k),
    }
    false
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn what_is_charged_is_what_is_held(
        zero in any::<bool>(),
        kept in 0u64..3,
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let (sim, share) = (Sim::new(), Part::alone(100 * RANGE_PAGE));
        let range = ftensor(&sim, options(zero, kept));
        let mapper = Budgeted::new(range.clone(), share.clone());
        prop_assert_eq!(share.granted(), range.held_beside());
        for op in &ops {
            let (granted, room) = (share.granted(), mapper.room());
            let refused = step(&mapper, &sim, &share, op);
            prop_assert_eq!(share.granted(), held(&range), "after {:?}", op);
            prop_assert_eq!(mapper.charged(), held(&range));
            let grew = share.granted() > granted;
            prop_assert!(!(grew && refused));
            if let Op::Map(pages) = op && refused {
                prop_assert!(share.lacking() >= RANGE_PAGE && share.lacking() <= 3 * RANGE_PAGE);
                prop_assert!(room.is_err() || room.unwrap() < pages.len() as u64 * RANGE_PAGE || kept > 0);
            }
        }
        sim.heal();
        sim.set_budget(1 << 40);
        let _ = mapper.unmap(&range.mapped_pages());
        mapper.trim().unwrap();
        prop_assert_eq!(share.granted(), held(&range));
        drop(range);
        drop(mapper);
        prop_assert_eq!((share.granted(), share.lacking()), (0, 0), "all is gone with the range");
        sim.assert_clean();
    }
}

#[test]
fn a_failure_at_every_driver_call() {
    for (zero, kept) in [(false, 0), (false, 2), (true, 0), (true, 2)] {
        for k in 1.. {
            let (sim, share) = (Sim::new(), Part::alone(5 * RANGE_PAGE));
            let range = ftensor(&sim, options(zero, kept));
            let mapper = Budgeted::new(range.clone(), share.clone());
            sim.fail_at(k);
            let steps = [
                Op::Map(vec![0, 1]),
                Op::Map(vec![1, 2, 2]),
                Op::Unmap(vec![0, 2]),
                Op::Ahead(vec![3]),
                Op::Map(vec![3, 4, 5]),
                Op::Map(vec![0]),
                Op::Trim,
                Op::Unmap(vec![1]),
                Op::Map(vec![5]),
            ];
            for op in &steps {
                step(&mapper, &sim, &share, op);
                assert_eq!(share.granted(), held(&range), "{op:?}, failing at {k}");
                assert!(share.granted() <= 5 * RANGE_PAGE, "{op:?}, failing at {k}");
            }
            let calls = sim.calls().total();
            sim.heal();
            drop((range, mapper));
            assert_eq!(share.granted(), 0);
            sim.assert_clean();
            if calls < k {
                assert!(k > 20, "only {k} calls");
                break;
            }
        }
    }
}

fn budgeted_pool(fake: &Arc<Fake>, share: &Arc<Part>, config: PoolConfig) -> Steady {
    let mapper = Arc::new(Budgeted::new(fake.clone(), share.clone()));
    Steady::over(Pool::new(config, mapper, fake.clone()).unwrap())
}

#[test]
fn a_refusal_is_load_and_says_by_whom() {
    let (fake, share) = (Arc::new(Fake::default()), Part::alone(2 * PAGE_BYTES));
    let pool = budgeted_pool(&fake, &share, config(40));
    assert_eq!(pool.alloc(12).unwrap(), None);
    assert_eq!(fake.calls(), [], "the driver is not asked");
    match pool.claim(&[0, 5, 10]) {
        Err(PoolError::Exhausted { source, .. }) => {
            assert_eq!(source.to_string(), format!("the budget of alone refuses {} bytes", 3 * PAGE_BYTES));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(share.lacking(), 3 * PAGE_BYTES);
    assert_eq!(pool.refresh_credit(0).unwrap(), 8, "room is the lesser of the two");
    assert_eq!(pool.device_room().unwrap() / PAGE_BYTES, 1 << 20);
    assert_eq!(pool.alloc(8).unwrap().unwrap().len(), 8);
    assert_eq!((share.granted(), share.lacking()), (2 * PAGE_BYTES, PAGE_BYTES));
    check(&fake, &pool);
    pool.shutdown().unwrap();
    assert_eq!(share.granted(), 0);
    drop(pool);
    assert_eq!(share.lacking(), 0, "nobody is left to wait");
}

#[test]
fn a_device_without_memory_is_a_shortage_too_and_a_reserve_is_none() {
    let (fake, share) = (Arc::new(Fake::default()), Part::alone(100 * PAGE_BYTES));
    let pool = budgeted_pool(&fake, &share, PoolConfig { max_reserved_bytes: 6 * PAGE_BYTES, ..config(80) });
    fake.set_budget(2);
    let ids = pool.alloc(8).unwrap().unwrap();
    assert_eq!(fake.counts().0, 1, "there was none to map ahead");
    assert_eq!((share.granted(), share.lacking()), (2 * PAGE_BYTES, 0), "nobody waits for it");
    assert_eq!(pool.reserve_demand(8).unwrap(), 0);
    assert_eq!((share.granted(), share.lacking()), (2 * PAGE_BYTES, 2 * PAGE_BYTES));
    fake.set_budget(3);
    assert_eq!(pool.reserve_demand(8).unwrap(), 4);
    assert_eq!(share.lacking(), PAGE_BYTES, "half of it was had");
    fake.set_budget(20);
    assert_eq!(pool.reserve_demand(8).unwrap(), 8);
    assert_eq!(share.lacking(), 0);
    pool.free(&ids).unwrap();
    pool.shutdown().unwrap();
    assert_eq!(share.granted(), 0);
}

#[test]
fn who_waits_for_his_own_memory_asks_nobody_for_theirs() {
    let (gate, entered) = Gate::new();
    let share = Part::alone(2 * PAGE_BYTES);
    let mapper = Arc::new(Budgeted::new(gate.clone(), share.clone()));
    let pool = Pool::new(config(40), mapper, Arc::new(NoMeter)).unwrap();
    gate.open();
    let ids = pool.alloc(8).unwrap().unwrap();
    entered.recv().unwrap();
    pool.free(&ids).unwrap();
    entered.recv().unwrap(); // the pager, which gives them back
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.alloc(8).unwrap());
        while share.inner().refusals == 0 {
            std::thread::yield_now();
        }
        assert_eq!(share.lacking(), 0);
        gate.open();
        gate.open();
        assert_eq!(waiting.join().unwrap().unwrap().len(), 8);
        entered.recv().unwrap();
        assert_eq!(share.lacking(), 0);
    });
    assert_eq!(pool.alloc(4).unwrap(), None);
    assert_eq!(share.lacking(), PAGE_BYTES, "nothing is on its way");
    gate.open(); // for the shutdown
}

#[test]
fn memory_kept_for_later_pages_stands_in_nobodys_way() {
    let (fake, share) = (Arc::new(Fake::default()), Part::alone(3 * PAGE_BYTES));
    fake.keep_beside(PAGE_BYTES); // zeros, say
    let pool = budgeted_pool(&fake, &share, config(40));
    let ids = pool.alloc(8).unwrap().unwrap();
    fake.keep_of_unmapped(1);
    pool.free(&ids).unwrap();
    assert_eq!(share.granted(), 2 * PAGE_BYTES, "one page's memory was kept");
    fake.calls();
    assert_eq!(pool.alloc(8).unwrap().unwrap().len(), 8);
    // Refused, trimmed (the fake gives its zeros too), mapped.
    assert_eq!(fake.calls(), [Call::Trim, Call::Map(vec![0, 1])]);
    assert_eq!(share.granted(), 2 * PAGE_BYTES);
    assert_eq!(pool.alloc(8).unwrap(), None);
    assert_eq!(fake.calls(), [], "nothing is kept, and nobody is asked for it");
}

#[test]
fn lost_pages_stay_charged_until_the_memory_is_gone() {
    let (fake, share) = (Arc::new(Fake::default()), Part::alone(100 * PAGE_BYTES));
    let pool = budgeted_pool(&fake, &share, config(40));
    fake.fail_at(0, Fault::Lost);
    assert!(matches!(pool.alloc(8), Err(PoolError::Quarantined { .. })));
    assert_eq!(share.granted(), PAGE_BYTES);
    fake.heal();
    let ids = pool.alloc(8).unwrap().unwrap();
    fake.fail_at(0, Fault::Lost);
    pool.free(&ids).unwrap();
    assert_eq!((share.granted(), fake.mapped().len()), (3 * PAGE_BYTES, 1), "one more is lost, one stays");
    pool.shutdown().unwrap();
    drop(pool);
    assert_eq!(share.granted(), 2 * PAGE_BYTES, "the mapper lives, and with it what is lost");
}

/// Breaks down when it is told to.
#[derive(Default)]
struct Breaks {
    broken: AtomicBool,
    watcher: std::sync::Mutex<Vec<Watcher>>,
}

impl Mapper for Breaks {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        match self.broken.load(Ordering::SeqCst) {
            true => Err(MapFailure::Broken { source: "broken".into() }),
            false => Ok(pages.to_vec()),
        }
    }
    fn unmap(&self, pages: &[u32]) -> Result<(), UnmapFailure> {
        let source: Cause = "broken".into();
        match self.broken.load(Ordering::SeqCst) {
            true => {
                Err(UnmapFailure { quarantined: pages.to_vec(), still_mapped: vec![], broken: true, source })
            }
            false => Ok(()),
        }
    }
    fn watch(&self, watcher: Watcher) {
        self.watcher.lock().unwrap().push(watcher);
    }
    without_memory!();
}

#[test]
fn a_broken_mapper_keeps_its_charge() {
    type Break = fn(&Breaks, &Budgeted);
    let breaks: [Break; 3] = [
        |breaks, _| breaks.watcher.lock().unwrap().iter().for_each(|tell| tell("a rank died")),
        |_, mapper| assert!(mapper.map(&[4]).is_err()),
        |_, mapper| assert!(mapper.unmap(&[0, 1]).is_err()),
    ];
    for (place, how) in breaks.iter().enumerate() {
        let (share, mapper) = (Part::alone(100 * PAGE_BYTES), Arc::new(Breaks::default()));
        let budgeted = Budgeted::new(mapper.clone(), share.clone());
        budgeted.map(&[0, 1, 2]).unwrap();
        budgeted.unmap(&[2]).unwrap();
        mapper.broken.store(true, Ordering::SeqCst);
        how(&mapper, &budgeted);
        let expected = if place == 1 { 3 } else { 2 };
        assert_eq!(share.granted(), expected * PAGE_BYTES);
        drop((mapper, budgeted));
        assert_eq!(share.granted(), expected * PAGE_BYTES, "nobody knows what is held");
    }
}

#[test]
fn a_page_that_was_backed_before_is_charged_once_it_is_mapped_here() {
    let (sim, share) = (Sim::new(), Part::alone(100 * RANGE_PAGE));
    let range = ftensor(&sim, Options::default());
    let mapper = Budgeted::new(range.clone(), share.clone());
    range.map(&[1]).unwrap();
    assert_eq!(share.granted(), 0, "it is somebody else's");
    assert_eq!(mapper.map(&[0, 1, 0]).unwrap(), [0]);
    assert_eq!(share.granted(), 2 * RANGE_PAGE, "and this one's to unmap");
    assert_eq!(mapper.map(&[0]).unwrap(), [0u32; 0], "again");
    assert_eq!(share.granted(), 2 * RANGE_PAGE);
    mapper.unmap(&[0, 1]).unwrap();
    assert_eq!(share.granted(), 0);
}

#[test]
fn two_engines_never_have_more_than_the_budget() {
    let budget = budget(5 * PAGE_BYTES);
    let shares = ["a", "b"].map(|name| Part::of(&budget, name));
    std::thread::scope(|scope| {
        for share in &shares {
            scope.spawn(move || {
                let fake = Arc::new(Fake::default());
                let mapper = Arc::new(Budgeted::new(fake.clone(), share.clone()));
                let config = PoolConfig { max_reserved_bytes: PAGE_BYTES, ..config(80) };
                let pool = Pool::new(config, mapper, fake.clone()).unwrap();
                let mut held = vec![];
                for round in 0..300 {
                    held.extend(pool.alloc(1 + round % 7).unwrap().unwrap_or_default());
                    if round % 3 == 0 {
                        let ids = held.split_off(held.len() / 2);
                        pool.free(&ids).unwrap();
                    }
                }
                pool.free(&held).unwrap();
                pool.shutdown().unwrap();
                assert_eq!(fake.inner().violations, [""; 0]);
            });
        }
    });
    assert!(shares.iter().any(|share| share.inner().refusals > 0), "the budget was never short");
    let budget = budget.lock().unwrap();
    assert!(budget.most_bytes <= 5 * PAGE_BYTES);
    assert_eq!(budget.granted_bytes, 0, "a shutdown leaves nothing charged");
}

#[test]
fn exactly_one_gets_the_last_page() {
    for _ in 0..50 {
        let budget = budget(PAGE_BYTES);
        let won = AtomicU32::new(0);
        let start = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mapper = Budgeted::new(Arc::new(Fake::default()), Part::of(&budget, "one of four"));
                    let pool = Pool::new(config(8), Arc::new(mapper), Arc::new(NoMeter)).unwrap();
                    start.wait();
                    won.fetch_add(u32::from(pool.alloc(1).unwrap().is_some()), Ordering::SeqCst);
                    start.wait();
                });
            }
        });
        assert_eq!(won.load(Ordering::SeqCst), 1);
        assert_eq!(budget.lock().unwrap().granted_bytes, 0);
    }
}

#[test]
fn a_pool_that_cannot_be_made_leaves_nothing_charged() {
    let (fake, share) = (Arc::new(Fake::default()), Part::alone(2 * PAGE_BYTES));
    let config = PoolConfig { null_block: true, min_reserved_bytes: 2 * PAGE_BYTES, ..config(40) };
    let make = || Pool::new(config, Arc::new(Budgeted::new(fake.clone(), share.clone())), fake.clone());
    assert!(matches!(make(), Err(PoolError::Exhausted { .. })));
    assert_eq!((share.granted(), fake.mapped()), (0, vec![]));
    share.set_budget(3 * PAGE_BYTES);
    let pool = make().unwrap();
    assert_eq!(share.granted(), 3 * PAGE_BYTES);
    drop(pool);
    assert_eq!(share.granted(), 0);
}
