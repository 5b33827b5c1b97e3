//! The pager, its waiters and whoever ends it, in every order that a scheduler can think of: nobody waits for good, no page is lost
//! or mapped twice. Under shuttle a wait never runs out, so that a wake-up that is missing is a deadlock, and found.
//!
//!     cargo test -p kvcached-pool --features shuttle --test handoffs
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvcached_pool::{
    Cause, Layout, LimitState, MapFailure, Mapper, NoMeter, PageOrder, Pool, PoolConfig, PoolError,
    UnmapFailure,
};
use shuttle::rand::Rng;
use shuttle::thread;

const PAGE_BYTES: u64 = 1 << 20;
const BLOCKS: u32 = 4;
const TIMEOUT: Duration = Duration::from_secs(3600);

/// Lets others go first before and after each call, and checks that pages are mapped and unmapped in turn.
struct Turns {
    mapped: Mutex<BTreeSet<u32>>,
    maps: AtomicU32,
    budget_pages: usize,
    fails: bool,
}

impl Turns {
    fn new(budget_pages: usize) -> Arc<Self> {
        Arc::new(Turns { mapped: Mutex::default(), maps: AtomicU32::new(0), budget_pages, fails: false })
    }

    fn failing() -> Arc<Self> {
        Arc::new(Turns { mapped: Mutex::default(), maps: AtomicU32::new(0), budget_pages: 4, fails: true })
    }

    fn mapped(&self) -> usize {
        self.mapped.lock().unwrap().len()
    }

    fn refuses(&self) -> bool {
        thread::yield_now();
        self.fails && shuttle::rand::thread_rng().gen_bool(0.3)
    }
}

impl Mapper for Turns {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        self.maps.fetch_add(1, Ordering::Relaxed);
        let refused = self.refuses();
        let mut mapped = self.mapped.lock().unwrap();
        if refused || mapped.len() + pages.len() > self.budget_pages {
            return Err(MapFailure::OutOfMemory { source: "full".into() });
        }
        assert!(pages.iter().all(|page| mapped.insert(*page)), "{pages:?} are mapped twice");
        drop(mapped);
        thread::yield_now();
        Ok(pages.to_vec())
    }

    fn unmap(&self, pages: &[u32]) -> Result<(), UnmapFailure> {
        if self.refuses() {
            let still_mapped = pages.to_vec();
            return Err(UnmapFailure {
                quarantined: vec![],
                still_mapped,
                broken: false,
                source: "refused".into(),
            });
        }
        let mut mapped = self.mapped.lock().unwrap();
        assert!(pages.iter().all(|page| mapped.remove(page)), "{pages:?} are not mapped");
        drop(mapped);
        thread::yield_now();
        Ok(())
    }

    fn synchronise(&self) -> Result<(), Cause> {
        thread::yield_now();
        Ok(())
    }

    fn room(&self) -> Result<u64, Cause> {
        Ok(0)
    }

    fn page_bytes(&self) -> u64 {
        PAGE_BYTES
    }

    fn virtual_bytes(&self) -> u64 {
        0
    }
}

/// Pages of four blocks.
fn config(pages: u32, reserve_pages: u64) -> PoolConfig {
    let order = PageOrder::LowestFirst;
    PoolConfig {
        layout: Layout { num_blocks: pages * BLOCKS, blocks_per_page: BLOCKS, ids_per_page: BLOCKS, order },
        null_block: false,
        async_sched: false,
        min_reserved_bytes: 0,
        max_reserved_bytes: reserve_pages * PAGE_BYTES,
        patience: PoolConfig::PATIENCE,
    }
}

fn pool(mapper: &Arc<Turns>, pages: u32, reserve_pages: u64) -> Arc<Pool> {
    Arc::new(Pool::new(config(pages, reserve_pages), mapper.clone(), Arc::new(NoMeter)).unwrap())
}

fn try_orders(scenario: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(scenario.clone(), 2000);
    shuttle::check_pct(scenario, 1000, 3);
}

fn spawn<T: Send + 'static>(
    pool: &Arc<Pool>,
    work: impl FnOnce(&Pool) -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    let pool = Arc::clone(pool);
    thread::spawn(move || work(&pool))
}

fn take_and_give(pool: &Pool, blocks: u32, times: u32) {
    for _ in 0..times {
        let ids =
            pool.alloc(blocks).unwrap().unwrap_or_else(|| panic!("there is memory for {blocks} blocks"));
        assert_eq!(ids.len(), blocks as usize);
        pool.free(&ids).unwrap();
    }
}

#[test]
fn memory_on_its_way_back_is_waited_for() {
    try_orders(|| {
        // Room for one page: what was freed is in reserve, on its way out, or gone, and always to be had.
        let turns = Turns::new(1);
        let pool = pool(&turns, 3, 0);
        take_and_give(&pool, BLOCKS, 3);
        take_and_give(&pool, 1, 2);
    });
}

#[test]
fn two_threads_and_the_pager_share_room_for_two_pages() {
    for reserve_pages in [0, 1] {
        try_orders(move || {
            let turns = Turns::new(2);
            let pool = pool(&turns, 4, reserve_pages);
            let other = spawn(&pool, |pool| take_and_give(pool, BLOCKS, 2));
            take_and_give(&pool, BLOCKS, 2);
            other.join().unwrap();
            assert!(pool.quiesce(TIMEOUT).unwrap());
            assert!(turns.mapped() as u64 <= reserve_pages);
            assert_eq!(pool.held().unwrap(), 0);
        });
    }
}

#[test]
fn the_pager_takes_no_memory_before_the_pool_is_made() {
    try_orders(|| {
        // Room for the null block's page and the minimum, once.
        let turns = Turns::new(3);
        let config = PoolConfig { null_block: true, min_reserved_bytes: 2 * PAGE_BYTES, ..config(8, 6) };
        let pool = Pool::new(config, turns.clone(), Arc::new(NoMeter)).unwrap();
        assert_eq!(turns.mapped(), 3);
        drop(pool);
        assert_eq!(turns.mapped(), 0);
    });
}

#[test]
fn what_is_on_hand_stays_there() {
    try_orders(|| {
        let turns = Turns::new(4);
        let pool = pool(&turns, 4, 0);
        let other = spawn(&pool, |pool| {
            let ids = pool.alloc(2).unwrap().unwrap();
            thread::yield_now();
            ids
        });
        assert_eq!(pool.reserve_demand(2 * BLOCKS).unwrap(), 2 * BLOCKS);
        let taken = other.join().unwrap().len() as u32; // perhaps of those
        let ids = pool.alloc_on_hand(2 * BLOCKS - taken).unwrap().unwrap();
        pool.free(&ids).unwrap();
    });
}

#[test]
fn the_pager_does_not_take_what_an_allocation_has_on_hand() {
    try_orders(|| {
        let turns = Turns::new(12);
        let pool = pool(&turns, 12, 0);
        for _ in 0..3 {
            let before = turns.maps.load(Ordering::Relaxed);
            take_and_give(&pool, 6 * BLOCKS, 1);
            assert!(turns.maps.load(Ordering::Relaxed) <= before + 1, "backed, taken away, backed again");
        }
        let ids: Vec<u32> = (0..6).map(|page| page * BLOCKS).collect();
        for _ in 0..2 {
            pool.claim(&ids).unwrap();
            pool.free(&ids).unwrap();
        }
    });
}

#[test]
fn trim_and_a_thread_that_allocates() {
    try_orders(|| {
        let turns = Turns::new(2);
        let pool = pool(&turns, 2, 2);
        let other = spawn(&pool, |pool| take_and_give(pool, 2 * BLOCKS, 2));
        pool.trim().unwrap();
        other.join().unwrap();
        assert!(pool.quiesce(TIMEOUT).unwrap());
        pool.trim().unwrap();
        assert_eq!(turns.mapped(), 0);
    });
}

#[test]
fn a_limit_that_falls_and_rises_under_load() {
    try_orders(|| {
        let turns = Turns::new(4);
        let pool = pool(&turns, 4, 1);
        let other = spawn(&pool, |pool| {
            let mut got = 0;
            for _ in 0..3 {
                if let Some(ids) = pool.alloc(BLOCKS + 1).unwrap() {
                    got += 1;
                    pool.free(&ids).unwrap();
                }
            }
            got
        });
        let fallen = pool.set_limit(0, Some(1)).unwrap();
        assert!(matches!(fallen.state, LimitState::Applied | LimitState::Deferred));
        assert_eq!(pool.set_limit(9 * PAGE_BYTES, Some(1)).unwrap().state, LimitState::Conflict);
        assert_eq!(pool.set_limit(0, Some(0)).unwrap().state, LimitState::Stale);
        let late = spawn(&pool, |pool| pool.set_limit(3 * PAGE_BYTES, Some(2)).unwrap().revision);
        other.join().unwrap();
        assert_eq!(late.join().unwrap(), 2);
        assert!(pool.quiesce(TIMEOUT).unwrap());
        assert_eq!(pool.limit().unwrap().state, LimitState::Applied);
        assert_eq!(pool.alloc(3 * BLOCKS).unwrap().unwrap().len() as u32, 3 * BLOCKS);
        assert_eq!(pool.alloc(1).unwrap(), None, "a page beyond the limit");
        let drained = pool.set_limit(0, None).unwrap();
        assert_eq!((drained.state, drained.revision), (LimitState::Deferred, 3));
    });
}

#[test]
fn a_drained_pool_holds_nothing() {
    try_orders(|| {
        let turns = Turns::new(4);
        let pool = pool(&turns, 4, 2);
        let ids = pool.alloc(2 * BLOCKS).unwrap().unwrap();
        let other = spawn(&pool, move |pool| pool.free(&ids).unwrap());
        pool.set_limit(0, None).unwrap();
        other.join().unwrap();
        assert!(pool.quiesce(TIMEOUT).unwrap());
        assert_eq!((pool.limit().unwrap().state, turns.mapped()), (LimitState::Applied, 0));
        pool.set_limit(u64::MAX, None).unwrap();
        take_and_give(&pool, 4 * BLOCKS, 1);
    });
}

#[test]
fn shutdown_while_others_work_and_wait() {
    for pages in [1, 4] {
        try_orders(move || {
            let turns = Turns::new(4);
            let pool = pool(&turns, pages, u64::from(pages) / 4);
            let others: Vec<_> = (0..2)
                .map(|_| {
                    spawn(&pool, |pool| match pool.alloc(BLOCKS) {
                        Err(PoolError::Shutdown) | Ok(None) => {}
                        Ok(Some(ids)) => match pool.free(&ids) {
                            Ok(()) | Err(PoolError::Shutdown) => {}
                            Err(error) => panic!("{error}"),
                        },
                        Err(error) => panic!("{error}"),
                    })
                })
                .collect();
            let again = spawn(&pool, |pool| pool.shutdown().unwrap());
            assert_eq!(pool.shutdown().unwrap(), 0);
            assert_eq!(turns.mapped(), 0, "a shutdown that returns has given everything back");
            again.join().unwrap();
            others.into_iter().for_each(|other| other.join().unwrap());
            assert_eq!((pool.shutdown().unwrap(), turns.mapped()), (0, 0));
        });
    }
}

#[test]
fn a_shutdown_that_says_so_has_given_everything_back() {
    try_orders(|| {
        let turns = Turns::failing();
        let pool = pool(&turns, 4, 1);
        while pool.alloc(2 * BLOCKS).unwrap().is_none() {} // until the driver gives them
        let [first, second] = [0, 1].map(|_| {
            let turns = turns.clone();
            spawn(&pool, move |pool| {
                if pool.shutdown().is_ok() {
                    assert_eq!(turns.mapped(), 0, "another caller was told why not");
                }
            })
        });
        first.join().unwrap();
        second.join().unwrap();
        while pool.shutdown().is_err() {}
        assert_eq!(turns.mapped(), 0);
    });
}

#[test]
fn a_driver_that_refuses_at_times() {
    try_orders(|| {
        let turns = Turns::failing();
        let pool = pool(&turns, 4, 1);
        let other = spawn(&pool, |pool| {
            for _ in 0..2 {
                if let Some(ids) = pool.alloc(BLOCKS).unwrap() {
                    pool.free(&ids).unwrap();
                }
            }
        });
        let _ = pool.reserve_demand(2 * BLOCKS).unwrap();
        let _ = pool.trim().unwrap();
        other.join().unwrap();
        assert!(pool.quiesce(TIMEOUT).unwrap(), "what fails is not tried for ever");
        assert_eq!(pool.stats().unwrap().pages.in_motion(), 0);
        while pool.shutdown().is_err() {} // until the driver takes everything back
        assert_eq!(turns.mapped(), 0);
    });
}

#[test]
fn a_pool_that_is_dropped_leaves_no_thread_and_no_memory() {
    try_orders(|| {
        let turns = Turns::new(4);
        let pool = pool(&turns, 4, 2);
        let other = spawn(&pool, |pool| take_and_give(pool, BLOCKS, 1));
        other.join().unwrap();
        drop(pool);
        assert_eq!((turns.mapped(), Arc::strong_count(&turns)), (0, 1));
    });
}

#[test]
fn idle_memory_is_given_back_while_others_take_it() {
    try_orders(|| {
        let turns = Turns::new(3);
        let pool = pool(&turns, 3, 3);
        let other = spawn(&pool, |pool| {
            take_and_give(pool, 2 * BLOCKS, 1);
            let told = pool.reserve_demand(BLOCKS).unwrap();
            thread::yield_now();
            let ids = pool.alloc_on_hand(told).unwrap().unwrap_or_else(|| panic!("{told} were on hand"));
            pool.free(&ids).unwrap();
        });
        let lowering = spawn(&pool, |pool| {
            pool.set_limit(2 * PAGE_BYTES, None).unwrap();
            pool.memory_freed();
        });
        pool.give_back_idle(2 * PAGE_BYTES).unwrap();
        other.join().unwrap();
        lowering.join().unwrap();
        assert!(pool.quiesce(TIMEOUT).unwrap());
        assert_eq!(pool.limit().unwrap().state, LimitState::Applied);
        pool.give_back_idle(u64::MAX).unwrap();
        assert_eq!((turns.mapped(), pool.idle_bytes()), (0, 0));
    });
}

#[test]
fn what_is_on_hand_stays_there_when_the_limit_falls() {
    try_orders(|| {
        let turns = Turns::new(4);
        let pool = pool(&turns, 4, 2);
        let lowering = spawn(&pool, |pool| pool.set_limit(0, None).unwrap());
        let told = pool.reserve_demand(2 * BLOCKS).unwrap();
        thread::yield_now();
        let ids = pool.alloc_on_hand(told).unwrap().unwrap_or_else(|| panic!("{told} were on hand"));
        pool.free(&ids).unwrap();
        lowering.join().unwrap();
        assert!(pool.quiesce(TIMEOUT).unwrap());
        assert_eq!((pool.limit().unwrap().state, turns.mapped()), (LimitState::Applied, 0));
    });
}
