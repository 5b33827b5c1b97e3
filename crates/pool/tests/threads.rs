//! Several threads over one pool: no id is ever held twice, none without memory.
#![allow(clippy::unwrap_used)]

mod fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fake::gate::Gate;
use fake::{Fake, PAGE_BYTES, check, config, pool_over};
use kvcached_pool::{Cause, MapFailure, Mapper, NoMeter, Pool, PoolConfig, PoolError, UnmapFailure};

const THREADS: u64 = 4;
const ROUNDS: u32 = 3000;

fn hammer(async_sched: bool, budget_pages: Option<usize>) {
    let fake = Arc::new(Fake::default());
    let config = PoolConfig { async_sched, max_reserved_bytes: 2 * PAGE_BYTES, ..config(64) };
    let pool = Arc::new(pool_over(&fake, config).unwrap());
    if let Some(pages) = budget_pages {
        fake.set_budget(pages);
    }
    let owned: Arc<Vec<AtomicBool>> = Arc::new((0..80).map(|_| AtomicBool::new(false)).collect());
    let work = |seed: u64| {
        let (pool, fake, owned) = (pool.clone(), fake.clone(), owned.clone());
        move || {
            let mut random = seed * 0x9e37_79b9 + 1;
            let mut next = |below: u64| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 33) % below
            };
            let mut held: Vec<u32> = Vec::new();
            for _ in 0..ROUNDS {
                match next(10) {
                    0..4 => {
                        if let Some(ids) = pool.alloc(next(9) as u32).unwrap() {
                            for &id in &ids {
                                assert!(!owned[id as usize].swap(true, Ordering::SeqCst), "{id} twice");
                            }
                            let pages = pool.pages_of(&ids).unwrap();
                            let inner = fake.inner();
                            assert!(pages.iter().all(|page| inner.mapped.contains(page)));
                            drop(inner);
                            held.extend(ids);
                        }
                    }
                    4..8 => {
                        let ids = held.split_off(held.len() - next(held.len() as u64 + 1) as usize);
                        ids.iter().for_each(|&id| owned[id as usize].store(false, Ordering::SeqCst));
                        pool.free(&ids).unwrap();
                    }
                    8 => {
                        let epoch = pool.begin_epoch().unwrap();
                        pool.release_through(epoch).unwrap();
                    }
                    _ => {
                        pool.reserve_demand(next(20) as u32).unwrap();
                        pool.trim().unwrap();
                    }
                }
            }
            held.iter().for_each(|&id| owned[id as usize].store(false, Ordering::SeqCst));
            pool.free(&held).unwrap();
        }
    };
    let threads: Vec<_> = (0..THREADS).map(|seed| std::thread::spawn(work(seed))).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let epoch = pool.begin_epoch().unwrap();
    pool.release_through(epoch).unwrap();
    check(&fake, &pool);
    assert_eq!(pool.stats().unwrap().held_blocks, 0);
    assert!(pool.stats().unwrap().pages.reserved <= 2);
}

#[test]
fn four_threads_synchronous() {
    hammer(false, None);
}

#[test]
fn four_threads_asynchronous_short_of_memory() {
    hammer(true, Some(7));
}

#[test]
fn nobody_waits_for_a_driver_call_that_it_does_not_need() {
    let (gate, entered) = Gate::new();
    let pool = Arc::new(Pool::new(config(8), gate.clone(), Arc::new(NoMeter)).unwrap());
    let slow = std::thread::spawn({
        let pool = pool.clone();
        move || pool.alloc(5).unwrap()
    });
    entered.recv().unwrap();
    // The mapper is busy, the pool is not.
    assert_eq!((pool.available().unwrap(), pool.backed().unwrap()), (8, 0));
    assert_eq!(pool.alloc(9).unwrap(), None);
    // What is wanted is in motion: waits for it instead of reporting a shortage that is none.
    let waiting = std::thread::spawn({
        let pool = pool.clone();
        move || pool.alloc(3).unwrap()
    });
    std::thread::sleep(Duration::from_millis(20));
    assert!(!waiting.is_finished());
    gate.open();
    let (first, second) = (slow.join().unwrap().unwrap(), waiting.join().unwrap().unwrap());
    assert_eq!((first.len(), second.len()), (5, 3));
    assert!(first.iter().all(|id| !second.contains(id)));
    // Leaving: both pages at once.
    let closing = std::thread::spawn(move || pool.shutdown());
    entered.recv().unwrap();
    gate.open();
    closing.join().unwrap().unwrap();
}

#[test]
fn shutdown_waits_for_the_driver_call_of_another_thread() {
    let (gate, entered) = Gate::new();
    let pool = Arc::new(Pool::new(config(8), gate.clone(), Arc::new(NoMeter)).unwrap());
    let slow = std::thread::spawn({
        let pool = pool.clone();
        move || pool.alloc(1)
    });
    entered.recv().unwrap();
    let closing = std::thread::spawn({
        let pool = pool.clone();
        move || pool.shutdown()
    });
    while !matches!(pool.available(), Err(PoolError::Shutdown)) {
        std::thread::yield_now();
    }
    assert!(!closing.is_finished());
    gate.open(); // the map ends: its page is backed, its caller is too late
    assert!(matches!(slow.join().unwrap(), Err(PoolError::Shutdown)));
    entered.recv().unwrap(); // and shutdown unmaps it
    gate.open();
    closing.join().unwrap().unwrap();
    assert_eq!(pool.stats().unwrap().pages.free, 2);
    assert_eq!(gate.synchronised.load(Ordering::SeqCst), 1, "it waits, and does not ask again and again");
}

/// Takes and gives a block that is on hand, so often that whoever waits is woken more often than it may ask the driver.
fn bustle(pool: &Pool) {
    for _ in 0..300 {
        let ids = pool.alloc_on_hand(1).unwrap().unwrap();
        pool.free(&ids).unwrap();
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn what_others_do_with_blocks_on_hand_ends_no_wait() {
    type Call = fn(&Pool) -> u32;
    let calls: [Call; 3] = [
        |pool| pool.alloc(4).unwrap().map_or(0, |ids| ids.len() as u32),
        |pool| pool.claim(&[5, 6, 7, 8]).map_or(0, |()| 4),
        |pool| pool.reserve_demand(4).unwrap(),
    ];
    for call in calls {
        let (gate, entered) = Gate::new();
        let pool = Arc::new(Pool::new(config(8), gate.clone(), Arc::new(NoMeter)).unwrap());
        gate.open();
        let ids = pool.alloc(8).unwrap().unwrap();
        entered.recv().unwrap();
        pool.free(&ids[2..]).unwrap(); // page 1 leaves, two blocks of page 0 are on hand
        entered.recv().unwrap();
        let waiting = std::thread::spawn({
            let pool = pool.clone();
            move || call(&pool)
        });
        bustle(&pool);
        assert!(!waiting.is_finished(), "page 1 is about to be free");
        gate.open(); // it has left
        entered.recv().unwrap(); // and comes again
        gate.open();
        assert_eq!(waiting.join().unwrap(), 4);
        gate.open();
        gate.open();
        pool.shutdown().unwrap();
    }
}

#[test]
fn a_device_that_refused_is_asked_again_when_memory_came_back() {
    type Call = fn(&Pool) -> u32;
    let calls: [Call; 3] = [
        |pool| pool.alloc(4).unwrap().map_or(0, |ids| ids.len() as u32),
        |pool| pool.claim(&[10, 11, 12, 13]).map_or(0, |()| 4),
        |pool| pool.reserve_demand(4).unwrap(),
    ];
    for call in calls {
        let (gate, entered) = Gate::new();
        let pool = Arc::new(Pool::new(config(12), gate.clone(), Arc::new(NoMeter)).unwrap());
        gate.open();
        let ids = pool.alloc(8).unwrap().unwrap();
        entered.recv().unwrap();
        pool.free(&ids[2..]).unwrap();
        entered.recv().unwrap(); // page 1 leaves, and until then there is room for none
        gate.refuse(1000);
        let waiting = std::thread::spawn({
            let pool = pool.clone();
            move || call(&pool)
        });
        bustle(&pool);
        assert!(!waiting.is_finished(), "memory is on its way back");
        assert_eq!(gate.refuse(0), 999, "the driver was asked once");
        gate.open();
        entered.recv().unwrap();
        gate.open();
        assert_eq!(waiting.join().unwrap(), 4);
        gate.open();
        gate.open();
        pool.shutdown().unwrap();
    }
}

#[test]
fn blocks_that_come_while_a_refused_device_is_waited_for_are_taken() {
    let (gate, entered) = Gate::new();
    let pool = Arc::new(Pool::new(config(12), gate.clone(), Arc::new(NoMeter)).unwrap());
    gate.open();
    let ids = pool.alloc(8).unwrap().unwrap();
    entered.recv().unwrap();
    pool.free(&ids[4..]).unwrap();
    entered.recv().unwrap(); // page 1 leaves, and does not come to an end
    gate.refuse(1000);
    let waiting = std::thread::spawn({
        let pool = pool.clone();
        move || pool.alloc(2).unwrap().unwrap()
    });
    std::thread::sleep(Duration::from_millis(20));
    pool.free(&ids[..1]).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(!waiting.is_finished());
    pool.free(&ids[1..2]).unwrap();
    assert_eq!(waiting.join().unwrap(), [0, 1]);
    gate.open();
    gate.open();
    pool.shutdown().unwrap();
}

/// Panics under the pool's lock, where it is asked what it holds beside the pages, once it is told to.
struct Explosive {
    gate: Arc<Gate>,
    armed: AtomicBool,
}

impl Mapper for Explosive {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        self.gate.map(pages)
    }
    fn unmap(&self, pages: &[u32]) -> Result<(), UnmapFailure> {
        self.gate.unmap(pages)
    }
    fn synchronise(&self) -> Result<(), Cause> {
        Ok(())
    }
    fn room(&self) -> Result<u64, Cause> {
        Ok(0)
    }
    fn held_beside(&self) -> u64 {
        assert!(!self.armed.load(Ordering::SeqCst), "on purpose");
        0
    }
    fn page_bytes(&self) -> u64 {
        PAGE_BYTES
    }
    fn virtual_bytes(&self) -> u64 {
        0
    }
}

#[test]
fn a_panic_under_the_lock_is_told_to_all() {
    let (gate, entered) = Gate::new();
    let mapper = Arc::new(Explosive { gate: gate.clone(), armed: AtomicBool::new(false) });
    let pool = Arc::new(Pool::new(config(4), mapper.clone(), Arc::new(NoMeter)).unwrap());
    let [first, second] = [0, 1].map(|_| {
        let pool = pool.clone();
        std::thread::spawn(move || pool.alloc(2))
    });
    entered.recv().unwrap(); // one of them maps the only page, the other waits for it
    std::thread::sleep(Duration::from_millis(20));
    mapper.armed.store(true, Ordering::SeqCst);
    let began = Instant::now();
    gate.open();
    let ends = [first.join(), second.join()];
    assert_eq!(ends.iter().filter(|end| end.is_err()).count(), 1, "the panic is that of its own thread");
    let told = |end: &Result<(), PoolError>| matches!(end, Err(PoolError::StateConsistency { .. }));
    assert!(ends.into_iter().flatten().all(|end| told(&end.map(drop))));
    assert!(told(&pool.available().map(drop)) && told(&pool.held().map(drop)));
    assert!(pool.shutdown().is_err());
    drop(pool);
    // The pager was woken, and has ended.
    while Arc::strong_count(&mapper) > 1 && began.elapsed() < Duration::from_secs(5) {
        std::thread::yield_now();
    }
    assert_eq!(Arc::strong_count(&mapper), 1);
    assert!(began.elapsed() < Duration::from_secs(5), "somebody waited until its patience was at an end");
}
