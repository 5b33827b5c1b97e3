//! What the background thread does, and what nobody waits for.
#![allow(clippy::unwrap_used, clippy::panic)]

mod fake;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use fake::gate::Gate;
use fake::{Call, Fake, Fault, PAGE_BYTES, check, config, pool};
use kvcached_pool::{Cause, MapFailure, Mapper, NoMeter, Pool, PoolConfig, PoolError, UnmapFailure};

fn with_reserve(min: u64, max: u64) -> PoolConfig {
    PoolConfig { min_reserved_bytes: min * PAGE_BYTES, max_reserved_bytes: max * PAGE_BYTES, ..config(80) }
}

#[test]
fn the_reserve_is_mapped_ahead_of_those_who_take_pages() {
    let (fake, pool) = pool(with_reserve(0, 6));
    assert_eq!(fake.mapped(), [0u32; 0], "an idle pool takes nothing");
    let first = pool.alloc(4).unwrap().unwrap();
    assert_eq!(fake.mapped(), [0, 1]);
    pool.alloc(4).unwrap().unwrap();
    pool.alloc(4).unwrap().unwrap();
    assert!(fake.mapped().len() > 3 && fake.mapped().len() <= 6, "{:?}", fake.mapped());
    let tally = pool.stats().unwrap().tally;
    assert_eq!(tally.on_demand, 1, "only the first had to wait for the driver");
    assert_eq!((tally.on_demand + tally.ahead) as usize, fake.mapped().len());
    pool.alloc(40).unwrap().unwrap();
    assert_eq!(pool.stats().unwrap().pages.reserved, 3, "never more than half the maximum");
    // Between that and the maximum a page comes and goes without a driver call.
    fake.calls();
    pool.free(&first).unwrap();
    check(&fake, &pool);
    assert_eq!(fake.calls(), []);
}

#[test]
fn the_minimum_comes_back_when_it_is_taken_and_after_a_trim_with_the_next_demand() {
    let (fake, pool) = pool(with_reserve(2, 2));
    assert_eq!(fake.mapped(), [0, 1]);
    pool.set_limit(0, None).unwrap();
    assert_eq!(fake.mapped(), [0u32; 0]);
    pool.set_limit(u64::MAX, None).unwrap();
    assert_eq!(fake.mapped(), [0, 1], "before anything is taken, too");
    pool.alloc(1).unwrap().unwrap();
    assert_eq!(pool.stats().unwrap().pages.reserved, 2);
    assert_eq!(pool.trim().unwrap(), 2 * PAGE_BYTES);
    pool.alloc(1).unwrap().unwrap();
    assert_eq!(fake.mapped(), [0], "nobody took a page");
    pool.alloc(4).unwrap().unwrap();
    assert_eq!(pool.stats().unwrap().pages.reserved, 2);
    check(&fake, &pool);
}

#[test]
fn a_pool_that_nobody_uses_keeps_the_minimum() {
    for min in [0, 1] {
        let (fake, pool) = pool(with_reserve(min, 6));
        let ids = pool.alloc(20).unwrap().unwrap();
        pool.free(&ids).unwrap();
        assert_eq!(pool.stats().unwrap().pages.reserved, 6, "at first they may be wanted again");
        let began = Instant::now();
        while fake.mapped().len() as u64 > min && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(5));
        }
        pool.wait();
        assert_eq!(pool.stats().unwrap().pages.reserved as u64, min);
        check(&fake, &pool);
        fake.calls();
        let ids = pool.alloc(1).unwrap().unwrap();
        pool.free(&ids).unwrap();
        assert_eq!(pool.stats().unwrap().pages.reserved, 1 + 1, "and it begins anew");
    }
}

#[test]
fn a_refused_reserve_is_not_asked_for_again_and_again() {
    let (fake, pool) = pool(with_reserve(0, 6));
    fake.set_budget(1);
    pool.alloc(1).unwrap().unwrap();
    let refused = fake.counts().0;
    assert_eq!(refused, 1);
    for _ in 0..3 {
        pool.alloc(1).unwrap().unwrap();
    }
    assert_eq!(fake.counts().0, refused, "the same page: nothing new");
    assert_eq!(pool.stats().unwrap().tally.failures, 0, "no fault, but load");
    fake.set_budget(9);
    pool.refresh_credit(0).unwrap();
    assert!(pool.stats().unwrap().pages.reserved > 0, "room was seen");
}

#[test]
fn a_refused_reserve_is_asked_for_with_the_next_page_that_is_taken() {
    let (fake, pool) = pool(with_reserve(0, 6));
    fake.set_budget(1);
    pool.alloc(4).unwrap().unwrap();
    assert_eq!((fake.counts().0, fake.mapped()), (1, vec![0]));
    fake.set_budget(9);
    pool.alloc(4).unwrap().unwrap();
    assert!(pool.stats().unwrap().pages.reserved > 0);
    check(&fake, &pool);
}

#[test]
fn a_page_that_could_not_leave_is_tried_again_with_the_next_that_may() {
    for fault in [Fault::Refused, Fault::Driver] {
        let (fake, pool) = pool(PoolConfig { async_sched: true, ..config(80) });
        let ids = pool.alloc(12).unwrap().unwrap();
        fake.fail_at(0, fault);
        pool.free(&ids[..4]).unwrap();
        assert_eq!((fake.mapped(), pool.stats().unwrap().tally.failures), (vec![0, 1, 2], 1));
        assert_eq!(pool.stats().unwrap().tally.behind, 0, "none was given back");
        assert_eq!(fake.calls().len(), 2, "once");
        let epoch = pool.begin_epoch().unwrap();
        assert_eq!(fake.calls(), []);
        // Nothing was retired meanwhile: the failure kept everything as it was, for this.
        pool.release_through(epoch).unwrap();
        assert_eq!(fake.mapped(), [1, 2]);
        check(&fake, &pool);
    }
}

#[test]
fn a_page_that_could_not_leave_is_tried_again_when_somebody_asks() {
    type Ask = fn(&fake::Steady);
    let asks: [Ask; 4] = [
        |pool| pool.clear().unwrap(),
        |pool| {
            pool.trim().unwrap();
        },
        |pool| drop(pool.set_limit(19 * PAGE_BYTES, None).unwrap()),
        |pool| pool.release_through(0).unwrap(),
    ];
    for ask in asks {
        let (fake, pool) = pool(config(80));
        let ids = pool.alloc(4).unwrap().unwrap();
        fake.fail_at(0, Fault::Refused);
        pool.free(&ids).unwrap();
        assert_eq!(fake.mapped(), [0]);
        fake.heal();
        ask(&pool);
        assert_eq!(fake.mapped(), [0u32; 0]);
        check(&fake, &pool);
    }
}

#[test]
fn a_refused_reserve_is_asked_for_again_when_memory_went_back() {
    let (fake, pool) = pool(with_reserve(2, 2));
    fake.set_budget(3);
    pool.alloc(4).unwrap().unwrap();
    pool.alloc(4).unwrap().unwrap();
    assert_eq!((fake.counts().0, fake.mapped().len()), (1, 3));
    pool.set_limit(2 * PAGE_BYTES, None).unwrap();
    assert_eq!(fake.mapped().len(), 2);
    fake.set_budget(20);
    pool.set_limit(u64::MAX, None).unwrap();
    assert_eq!(pool.stats().unwrap().pages.reserved, 2);
}

#[test]
fn freeing_does_not_wait_for_the_driver() {
    let (gate, entered) = Gate::new();
    let pool = Arc::new(Pool::new(config(8), gate.clone(), Arc::new(NoMeter)).unwrap());
    let allocating = std::thread::spawn({
        let pool = pool.clone();
        move || pool.alloc(8).unwrap().unwrap()
    });
    entered.recv().unwrap();
    gate.open();
    let ids = allocating.join().unwrap();
    pool.free(&ids[..4]).unwrap();
    entered.recv().unwrap(); // the pager is in the driver, and stays there
    assert!(!pool.quiesce(Duration::from_millis(20)).unwrap());
    pool.free(&ids[4..6]).unwrap();
    assert_eq!(pool.alloc_on_hand(2).unwrap().unwrap(), [5, 6]);
    assert_eq!(pool.alloc_on_hand(1).unwrap(), None);
    assert_eq!((pool.available().unwrap(), pool.backed().unwrap(), pool.held().unwrap()), (4, 0, 4));
    // Who needs that page waits for it; who finds another block meanwhile is not kept.
    let waiting = std::thread::spawn({
        let pool = pool.clone();
        move || pool.alloc(1).unwrap().unwrap()
    });
    std::thread::sleep(Duration::from_millis(20));
    assert!(!waiting.is_finished());
    pool.free(&ids[6..7]).unwrap();
    assert_eq!(waiting.join().unwrap(), [7], "woken by a free, not by the driver");
    gate.open();
    assert!(pool.quiesce(Duration::from_secs(10)).unwrap());
    let closing = std::thread::spawn(move || pool.shutdown().unwrap());
    entered.recv().unwrap();
    gate.open();
    assert_eq!(closing.join().unwrap(), 0);
}

#[test]
fn waiters_are_woken_by_a_limit_that_grows() {
    let (gate, entered) = Gate::new();
    let pool = Arc::new(Pool::new(config(8), gate.clone(), Arc::new(NoMeter)).unwrap());
    pool.set_limit(PAGE_BYTES, None).unwrap();
    let [slow, waiting] = [0, 1].map(|_| {
        let pool = pool.clone();
        std::thread::spawn(move || pool.alloc(4).unwrap())
    });
    entered.recv().unwrap(); // one of them maps the only page, the other waits for it
    std::thread::sleep(Duration::from_millis(20));
    pool.set_limit(2 * PAGE_BYTES, None).unwrap();
    entered.recv_timeout(Duration::from_secs(5)).unwrap(); // and now maps another
    gate.open();
    gate.open();
    let ids = [slow, waiting].map(|thread| thread.join().unwrap().unwrap());
    assert_ne!(ids[0], ids[1]);
    let closing = std::thread::spawn(move || pool.shutdown().unwrap());
    entered.recv().unwrap();
    gate.open();
    closing.join().unwrap();
}

#[test]
fn what_somebody_was_told_is_on_hand_does_not_leave() {
    let (fake, pool) = pool(PoolConfig { async_sched: true, ..config(80) });
    assert_eq!(pool.reserve_demand(10).unwrap(), 10);
    assert_eq!((pool.keep_on_hand(4).unwrap(), pool.keep_on_hand(99).unwrap()), (4, 12));
    fake.set_budget(3);
    assert_eq!(pool.alloc_on_hand(12).unwrap().unwrap().len(), 12);
    pool.clear().unwrap();
    assert_eq!(fake.mapped(), [0u32; 0], "allocated, and kept no longer");
    type Ends = fn(&fake::Steady);
    let ends: [Ends; 4] = [
        |pool| pool.release_through(0).unwrap(),
        |pool| {
            pool.trim().unwrap();
        },
        |pool| {
            pool.begin_epoch().unwrap();
        },
        |pool| pool.clear().unwrap(),
    ];
    for end in ends {
        assert_eq!(pool.reserve_demand(8).unwrap(), 8);
        assert_eq!(fake.mapped(), [0, 1]);
        end(&pool);
        assert_eq!(fake.mapped(), [0u32; 0], "until an epoch begins or ends, or all is forgotten");
    }
    check(&fake, &pool);
}

#[test]
fn a_shutdown_ends_though_the_driver_does_not() {
    let (gate, entered) = Gate::new();
    let config = PoolConfig { patience: Duration::from_millis(50), ..config(8) };
    let pool = Arc::new(Pool::new(config, gate.clone(), Arc::new(NoMeter)).unwrap());
    let stuck = std::thread::spawn({
        let pool = pool.clone();
        move || pool.alloc(1)
    });
    entered.recv().unwrap();
    let began = Instant::now();
    let error = pool.shutdown().unwrap_err();
    assert!(error.to_string().contains("did not end in time"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(matches!(pool.alloc(1), Err(PoolError::Shutdown)));
    gate.open();
    assert!(matches!(stuck.join().unwrap(), Err(PoolError::Shutdown)));
    // Another call finds what was left.
    let closing = std::thread::spawn({
        let pool = pool.clone();
        move || pool.shutdown()
    });
    entered.recv().unwrap();
    gate.open();
    assert_eq!(closing.join().unwrap().unwrap(), 0);
    assert_eq!(pool.stats().unwrap().pages.free, 2);
}

#[test]
fn a_shutdown_that_failed_is_tried_again() {
    let (fake, pool) = pool(config(40));
    pool.alloc(9).unwrap().unwrap();
    for k in 0..2 {
        fake.fail_at(k, Fault::Refused); // the synchronise, then the unmap
        assert!(matches!(pool.shutdown(), Err(PoolError::Driver { .. })));
        assert_eq!(fake.mapped(), [0, 1, 2]);
    }
    assert_eq!(pool.shutdown().unwrap(), 0);
    assert_eq!(fake.mapped(), [0u32; 0]);
    fake.calls();
    assert_eq!(pool.shutdown().unwrap(), 0);
    assert_eq!(fake.calls(), [], "nothing left to do");
    check(&fake, &pool);
}

#[test]
fn a_pool_that_is_dropped_before_its_driver_answers_does_not_hang() {
    let (gate, entered) = Gate::new();
    let config = PoolConfig { patience: Duration::from_millis(50), ..config(8) };
    let pool = Pool::new(config, gate.clone(), Arc::new(NoMeter)).unwrap();
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| pool.alloc(8).unwrap().unwrap());
        entered.recv().unwrap();
        gate.open();
        let ids = slow.join().unwrap();
        pool.free(&ids).unwrap();
    });
    entered.recv().unwrap(); // the pager, in the driver
    let began = Instant::now();
    drop(pool);
    assert!(began.elapsed() < Duration::from_secs(5));
    gate.open();
    // Nobody waits for it any longer; it ends by itself.
    while Arc::strong_count(&gate) > 1 {
        std::thread::yield_now();
    }
}

/// Panics where it is told to.
struct Faithless {
    in_trim: bool,
}

impl Mapper for Faithless {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        Ok(pages.to_vec())
    }
    fn unmap(&self, _pages: &[u32]) -> Result<(), UnmapFailure> {
        Ok(())
    }
    fn synchronise(&self) -> Result<(), Cause> {
        assert!(self.in_trim, "on purpose");
        Ok(())
    }
    fn room(&self) -> Result<u64, Cause> {
        Ok(0)
    }
    fn held_beside(&self) -> u64 {
        1
    }
    fn trim(&self) -> Result<u64, Cause> {
        panic!("on purpose")
    }
    fn page_bytes(&self) -> u64 {
        PAGE_BYTES
    }
    fn virtual_bytes(&self) -> u64 {
        0
    }
}

#[test]
fn a_pool_whose_pager_is_gone_is_broken() {
    for in_trim in [true, false] {
        let pool = Pool::new(config(12), Arc::new(Faithless { in_trim }), Arc::new(NoMeter)).unwrap();
        pool.alloc(4).unwrap().unwrap();
        if in_trim {
            pool.set_limit(2 * PAGE_BYTES, None).unwrap();
            let began = Instant::now();
            while pool.available().is_ok() && began.elapsed() < Duration::from_secs(5) {
                std::thread::yield_now();
            }
            assert!(matches!(pool.alloc(1), Err(PoolError::StateConsistency { .. })));
        }
        // Nobody is left who could give the page back: not a success.
        assert!(matches!(pool.shutdown(), Err(PoolError::StateConsistency { .. })));
    }
}

#[test]
fn counts_are_read_while_somebody_holds_the_lock() {
    /// Holds up whoever publishes figures, under the lock.
    struct Slow(std::sync::Mutex<()>);
    impl kvcached_pool::Meter for Slow {
        fn publish(&self, _usage: &kvcached_pool::Usage) {
            drop(self.0.lock().unwrap());
        }
    }
    let slow = Arc::new(Slow(std::sync::Mutex::default()));
    let fake = Arc::new(Fake::default());
    let pool = Arc::new(Pool::new(config(40), fake, slow.clone()).unwrap());
    let held = slow.0.lock().unwrap();
    let allocating = std::thread::spawn({
        let pool = pool.clone();
        move || pool.alloc(5)
    });
    std::thread::sleep(Duration::from_millis(20));
    let reading = std::thread::spawn({
        let pool = pool.clone();
        move || {
            let counts = [pool.available(), pool.backed(), pool.promised(), pool.held()];
            counts.map(Result::unwrap)
        }
    });
    let began = Instant::now();
    while !reading.is_finished() && began.elapsed() < Duration::from_secs(5) {
        std::thread::yield_now();
    }
    assert!(reading.is_finished(), "a count waits for the lock");
    drop(held);
    reading.join().unwrap();
    allocating.join().unwrap().unwrap();
    assert_eq!((pool.available().unwrap(), pool.held().unwrap()), (35, 5));
}

#[test]
fn a_steady_load_makes_no_driver_calls() {
    let (fake, pool) = pool(with_reserve(0, 2));
    for _ in 0..50 {
        let ids = pool.alloc(4).unwrap().unwrap();
        pool.free(&ids).unwrap();
    }
    let calls = fake.calls();
    assert!(calls.iter().all(|call| matches!(call, Call::Map(_))) && calls.len() <= 3, "{calls:?}");
}

/// Has room for so many pages; whoever asks for it is told what it was before others went on.
struct Roomy {
    pages: u64,
    mapped: AtomicU64,
    asked: Barrier,
}

impl Mapper for Roomy {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        self.mapped.fetch_add(pages.len() as u64, Ordering::SeqCst);
        Ok(pages.to_vec())
    }
    fn unmap(&self, _pages: &[u32]) -> Result<(), UnmapFailure> {
        Ok(())
    }
    fn synchronise(&self) -> Result<(), Cause> {
        Ok(())
    }
    fn room(&self) -> Result<u64, Cause> {
        let room = (self.pages - self.mapped.load(Ordering::SeqCst)) * PAGE_BYTES;
        self.asked.wait();
        self.asked.wait();
        Ok(room)
    }
    fn page_bytes(&self) -> u64 {
        PAGE_BYTES
    }
    fn virtual_bytes(&self) -> u64 {
        0
    }
}

#[test]
fn what_is_backed_while_the_device_is_asked_is_not_promised_twice() {
    let roomy = Arc::new(Roomy { pages: 5, mapped: AtomicU64::new(0), asked: Barrier::new(2) });
    // The pager backs a page ahead for each that is taken, as it does while a scheduler begins a pass.
    let pool = Arc::new(Pool::new(with_reserve(0, 2), roomy.clone(), Arc::new(NoMeter)).unwrap());
    let asking = std::thread::spawn({
        let pool = pool.clone();
        move || pool.refresh_credit(0).unwrap()
    });
    roomy.asked.wait();
    pool.alloc(4).unwrap().unwrap();
    assert!(pool.quiesce(Duration::from_secs(10)).unwrap());
    assert_eq!(roomy.mapped.load(Ordering::SeqCst), 2);
    roomy.asked.wait();
    assert_eq!(asking.join().unwrap(), 16, "one page on hand and three of the room");
    assert_eq!(pool.promised().unwrap(), 16);
}

/// Takes its time to unmap.
struct Slow {
    unmap: Duration,
}

impl Mapper for Slow {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        Ok(pages.to_vec())
    }
    fn unmap(&self, _pages: &[u32]) -> Result<(), UnmapFailure> {
        std::thread::sleep(self.unmap);
        Ok(())
    }
    without_memory!();
}

#[test]
fn a_trim_leaves_a_scheduler_at_work_what_it_was_told() {
    let (fake, pool) = pool(PoolConfig { async_sched: true, ..config(80) });
    let epoch = pool.begin_epoch().unwrap();
    assert_eq!(pool.reserve_demand(8).unwrap(), 8);
    assert_eq!(pool.trim().unwrap(), 0);
    let ids = pool.alloc_on_hand(6).unwrap().unwrap();
    pool.release_through(epoch).unwrap();
    assert_eq!(pool.reserve_demand(9).unwrap(), 9);
    assert_eq!(pool.trim().unwrap(), 2 * PAGE_BYTES, "no batch is out: nobody is about to allocate");
    pool.free(&ids).unwrap();
    check(&fake, &pool);
}

#[test]
fn a_trim_does_not_take_a_busy_pager_for_one_that_is_stuck() {
    let config = PoolConfig { patience: Duration::from_millis(100), ..config(400) };
    let slow = Arc::new(Slow { unmap: Duration::from_millis(10) });
    let pool = Pool::new(config, slow, Arc::new(NoMeter)).unwrap();
    let ids = pool.alloc(400).unwrap().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for page in ids.chunks(4) {
                pool.free(page).unwrap(); // faster than pages leave
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        pool.trim().unwrap();
    });
}

#[test]
fn what_was_asked_for_beyond_memory_keeps_nothing_for_good() {
    let (fake, pool) = pool(config(80));
    fake.set_budget(2);
    assert_eq!(pool.reserve_demand(40).unwrap(), 8);
    let ids = pool.alloc(6).unwrap().unwrap();
    fake.set_budget(10);
    assert!(pool.try_to_reserve(12).unwrap());
    assert_eq!(fake.mapped().len(), 5);
    pool.free_reserved().unwrap();
    assert_eq!(fake.mapped(), [0, 1], "pages were emptied, and there are no epochs");
    pool.free(&ids).unwrap();
    check(&fake, &pool);
}

#[test]
fn pages_leave_behind_one_whose_memory_could_not_be_released() {
    /// Unmaps, and cannot release, as a range does whose driver fails then.
    struct Leaky;
    impl Mapper for Leaky {
        fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
            Ok(pages.to_vec())
        }
        fn unmap(&self, _pages: &[u32]) -> Result<(), UnmapFailure> {
            let (quarantined, still_mapped) = (vec![], vec![]);
            Err(UnmapFailure { quarantined, still_mapped, broken: false, source: "not released".into() })
        }
        without_memory!();
    }
    let pool = Pool::new(config(80), Arc::new(Leaky), Arc::new(NoMeter)).unwrap();
    let ids = pool.alloc(80).unwrap().unwrap();
    pool.free(&ids).unwrap();
    assert!(pool.quiesce(Duration::from_secs(10)).unwrap());
    let stats = pool.stats().unwrap();
    assert_eq!((stats.pages.free, stats.tally.failures), (20, 5), "the others stay mapped");
}

#[test]
fn patience_without_end_is_a_long_time() {
    let (_fake, pool) = pool(PoolConfig { patience: Duration::MAX, ..config(8) });
    let ids = pool.alloc(8).unwrap().unwrap();
    pool.free(&ids).unwrap();
    assert!(pool.quiesce(Duration::MAX).unwrap());
    pool.shutdown().unwrap();
}

#[test]
fn what_was_allocated_is_kept_no_longer_and_what_was_not_stays() {
    type Take = fn(&fake::Steady) -> Option<Vec<u32>>;
    let takes: [Take; 2] = [|pool| pool.alloc(8).unwrap(), |pool| pool.alloc_on_hand(8).unwrap()];
    for take in takes {
        let (fake, pool) = pool(config(80));
        assert_eq!(pool.reserve_demand(16).unwrap(), 16);
        assert_eq!((pool.keep_on_hand(4).unwrap(), pool.reserve_demand(4).unwrap()), (4, 4));
        assert_eq!(fake.mapped().len(), 4, "a smaller wish takes nothing from a larger one");
        let ids = take(&pool).unwrap();
        // Four blocks more on hand than the eight that are kept: a page may leave, though none was emptied.
        pool.free(&[ids[0], ids[1], ids[4], ids[5]]).unwrap();
        assert_eq!(fake.mapped(), [0, 1, 2]);
        // No epoch says when they are not wanted any longer: a page that is emptied does.
        pool.free(&[ids[2], ids[3]]).unwrap();
        assert_eq!(fake.mapped(), [1]);
        check(&fake, &pool);
    }
}

#[test]
fn a_trim_says_so_where_the_driver_does_not_answer() {
    let (gate, entered) = Gate::new();
    let config = PoolConfig { patience: Duration::from_millis(50), ..config(8) };
    let pool = Pool::new(config, gate.clone(), Arc::new(NoMeter)).unwrap();
    gate.open();
    let ids = pool.alloc(8).unwrap().unwrap();
    pool.free(&ids).unwrap();
    entered.recv().unwrap();
    entered.recv().unwrap(); // the pager is in the driver
    assert!(matches!(pool.trim(), Err(PoolError::StateConsistency { .. })));
    gate.open();
    assert!(pool.quiesce(Duration::from_secs(10)).unwrap());
    assert_eq!(pool.trim().unwrap(), 0);
}

#[test]
fn a_pool_that_is_dropped_though_it_cannot_end_leaves_no_thread() {
    for _ in 0..50 {
        let (fake, pool) = pool(config(8));
        pool.alloc(4).unwrap().unwrap();
        fake.fail_at(0, Fault::Refused); // the synchronise
        drop(pool);
        assert_eq!((fake.mapped(), Arc::strong_count(&fake)), (vec![0], 1));
    }
}

#[test]
fn a_retired_page_is_as_good_as_one_in_reserve() {
    let (fake, pool) = pool(PoolConfig { async_sched: true, ..with_reserve(1, 1) });
    let ids = pool.alloc(4).unwrap().unwrap();
    assert_eq!(fake.mapped(), [0, 1]);
    pool.begin_epoch().unwrap();
    pool.free(&ids).unwrap();
    assert_eq!((pool.leaving_bytes(), pool.idle_bytes()), (PAGE_BYTES, PAGE_BYTES));
    pool.alloc(4).unwrap().unwrap();
    assert_eq!(fake.mapped(), [0, 1], "the next allocation can have it");
    check(&fake, &pool);

    // Taken again it is no sign that more memory will be wanted.
    let (fake, pool) = self::pool(PoolConfig { async_sched: true, ..with_reserve(0, 6) });
    let ids = pool.alloc(4).unwrap().unwrap();
    assert_eq!((fake.mapped(), pool.stats().unwrap().ahead_pages), (vec![0, 1], 1));
    pool.begin_epoch().unwrap();
    pool.free(&ids).unwrap();
    pool.alloc(8).unwrap().unwrap();
    assert_eq!(pool.stats().unwrap().ahead_pages, 2, "for one page in reserve");
}

#[test]
fn a_pool_that_is_broken_pages_no_more() {
    /// Unmaps once it may, and panics rather than map a second time.
    #[derive(Default)]
    struct Breaks {
        maps: AtomicU32,
        unmaps: AtomicU32,
        may_unmap: AtomicBool,
    }
    impl Mapper for Breaks {
        fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
            assert_eq!(self.maps.fetch_add(1, Ordering::SeqCst), 0, "on purpose");
            Ok(pages.to_vec())
        }
        fn unmap(&self, _pages: &[u32]) -> Result<(), UnmapFailure> {
            self.unmaps.fetch_add(1, Ordering::SeqCst);
            while !self.may_unmap.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            Ok(())
        }
        without_memory!();
    }
    let breaks = Arc::new(Breaks::default());
    let pool = Pool::new(config(160), breaks.clone(), Arc::new(NoMeter)).unwrap();
    let ids = pool.alloc(80).unwrap().unwrap();
    pool.free(&ids).unwrap();
    while breaks.unmaps.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now(); // until the pager is in the driver
    }
    let claim = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pool.claim(&[150])));
    assert!(claim.is_err() && matches!(pool.alloc(1), Err(PoolError::StateConsistency { .. })));
    breaks.may_unmap.store(true, Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(breaks.unmaps.load(Ordering::SeqCst), 1, "nobody knows what is mapped");
}

#[test]
fn idle_memory_is_given_back_on_request_and_no_more_than_was_asked_for() {
    let (fake, pool) = pool(with_reserve(2, 8));
    let ids = pool.alloc(32).unwrap().unwrap();
    pool.free(&ids[4..]).unwrap(); // eight pages, but for the first
    fake.keep_beside(PAGE_BYTES);
    let epoch = pool.begin_epoch().unwrap();
    pool.release_through(epoch).unwrap();
    let idle = pool.stats().unwrap().pages.reserved;
    assert!(idle >= 7 && pool.idle_bytes() == u64::from(idle) * PAGE_BYTES, "{idle}");
    fake.calls();
    assert_eq!(pool.give_back_idle(0).unwrap(), 0);
    assert_eq!(fake.calls(), []);
    assert_eq!(pool.give_back_idle(PAGE_BYTES + 1).unwrap(), 2 * PAGE_BYTES, "whole pages");
    pool.wait();
    assert_eq!(pool.idle_bytes(), u64::from(idle - 2 + 1) * PAGE_BYTES, "and what the mapper keeps");
    assert_eq!(fake.calls().len(), 1, "nothing is mapped ahead in its place");
    assert_eq!(pool.leaving_bytes(), 0);
    // The minimum too, and what the mapper keeps only where pages are not enough.
    let given = pool.give_back_idle(u64::from(idle - 2) * PAGE_BYTES + 1).unwrap();
    pool.wait();
    assert_eq!((given, pool.idle_bytes()), (u64::from(idle - 2) * PAGE_BYTES + PAGE_BYTES, 0));
    assert!(matches!(fake.calls()[..], [Call::Unmap(_), Call::Trim]));
    assert_eq!(fake.mapped(), [0]);
    pool.alloc(4).unwrap().unwrap();
    assert_eq!(pool.stats().unwrap().pages.reserved, 2, "until pages are taken again");
    check(&fake, &pool);
    pool.shutdown().unwrap();
    assert_eq!(pool.idle_bytes(), 0);
    assert!(matches!(pool.give_back_idle(1), Err(PoolError::Shutdown)));
}

#[test]
fn what_the_mapper_keeps_of_given_pages_is_not_counted_as_given() {
    let (fake, pool) = pool(with_reserve(0, 8));
    let ids = pool.alloc(16).unwrap().unwrap();
    pool.free(&ids).unwrap();
    let idle = pool.idle_bytes();
    fake.keep_of_unmapped(2);
    fake.calls();
    assert_eq!(pool.give_back_idle(3 * PAGE_BYTES).unwrap(), 3 * PAGE_BYTES);
    assert!(matches!(&fake.calls()[..], [Call::Unmap(pages), Call::Trim] if pages.len() == 3));
    assert_eq!(pool.idle_bytes(), idle - 3 * PAGE_BYTES);
    check(&fake, &pool);
}

#[test]
fn zeros_are_not_idle() {
    let fake = Arc::new(Fake::default());
    fake.keep_beside(PAGE_BYTES);
    let pool = Pool::new(with_reserve(0, 0), fake.clone(), fake.clone()).unwrap();
    assert_eq!(pool.idle_bytes(), 0);
    fake.keep_of_unmapped(1);
    let ids = pool.alloc(8).unwrap().unwrap();
    pool.free(&ids).unwrap();
    assert!(pool.quiesce(Duration::from_secs(10)).unwrap());
    assert_eq!(pool.idle_bytes(), PAGE_BYTES, "what was kept of two pages");
}

#[test]
fn nothing_is_given_of_what_a_scheduler_was_told_is_on_hand() {
    let (fake, pool) = pool(with_reserve(0, 8));
    let ids = pool.alloc(24).unwrap().unwrap();
    pool.free(&ids).unwrap();
    assert_eq!(pool.keep_on_hand(10).unwrap(), 10);
    let reserved = pool.stats().unwrap().pages.reserved;
    assert_eq!(pool.idle_bytes(), u64::from(reserved - 3) * PAGE_BYTES);
    assert_eq!(pool.give_back_idle(u64::MAX).unwrap(), u64::from(reserved - 3) * PAGE_BYTES);
    assert_eq!(pool.give_back_idle(PAGE_BYTES).unwrap(), 0, "nor later");
    assert_eq!(pool.idle_bytes(), 0);
    fake.set_budget(3);
    assert_eq!(pool.alloc_on_hand(10).unwrap().unwrap().len(), 10);
    assert_eq!(pool.idle_bytes(), 0);

    // Nor of what it backed itself, part of which was had before the memory ended.
    let (fake, pool) = self::pool(config(80));
    fake.set_budget(3);
    assert_eq!(pool.reserve_demand(40).unwrap(), 12);
    assert_eq!((pool.give_back_idle(u64::MAX).unwrap(), fake.mapped().len()), (0, 3));
    pool.begin_epoch().unwrap();
    assert_eq!(pool.idle_bytes(), 0, "and then it leaves by itself");
    check(&fake, &pool);
}

#[test]
fn giving_idle_memory_back_says_so_where_the_driver_does_not_answer() {
    let (gate, entered) = Gate::new();
    let config = PoolConfig { patience: Duration::from_millis(50), ..config(8) };
    let pool = Pool::new(config, gate.clone(), Arc::new(NoMeter)).unwrap();
    gate.open();
    let ids = pool.alloc(8).unwrap().unwrap();
    pool.free(&ids).unwrap();
    entered.recv().unwrap();
    entered.recv().unwrap(); // the pager is in the driver
    let began = Instant::now();
    assert!(matches!(pool.give_back_idle(1), Err(PoolError::StateConsistency { .. })));
    assert!(began.elapsed() < Duration::from_secs(5));
    gate.open();
    assert!(pool.quiesce(Duration::from_secs(10)).unwrap());
}

#[test]
fn a_refused_reserve_is_asked_for_again_when_others_gave_memory_back() {
    let (fake, pool) = pool(with_reserve(0, 6));
    fake.set_budget(1);
    pool.alloc(1).unwrap().unwrap();
    fake.set_budget(9);
    pool.wait();
    assert_eq!(fake.mapped().len(), 1);
    pool.memory_freed();
    pool.wait();
    assert!(fake.mapped().len() > 1);
    check(&fake, &pool);
    pool.shutdown().unwrap();
    pool.memory_freed();
}

#[test]
fn who_was_refused_while_memory_is_on_its_way_looks_again_when_others_gave_some() {
    let (gate, entered) = Gate::new();
    let pool = Arc::new(Pool::new(config(16), gate.clone(), Arc::new(NoMeter)).unwrap());
    gate.open();
    let ids = pool.alloc(8).unwrap().unwrap();
    entered.recv().unwrap();
    pool.free(&ids).unwrap();
    entered.recv().unwrap(); // the pager gives them back, and takes its time
    gate.refuse(1);
    let waiting = std::thread::spawn({
        let pool = pool.clone();
        move || pool.alloc(8).unwrap()
    });
    while gate.refuse(0) > 0 {
        gate.refuse(1);
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(!waiting.is_finished());
    pool.memory_freed();
    entered.recv_timeout(Duration::from_secs(5)).unwrap(); // asked again
    gate.open();
    gate.open();
    assert_eq!(waiting.join().unwrap().unwrap().len(), 8);
    let closing = std::thread::spawn(move || pool.shutdown().unwrap());
    entered.recv().unwrap();
    gate.open();
    closing.join().unwrap();
}

#[test]
fn a_pool_is_idle_since_blocks_were_last_handed_out() {
    let (_fake, pool) = pool(with_reserve(0, 4));
    let asleep = Duration::from_millis(30);
    let ids = pool.alloc(4).unwrap().unwrap();
    assert!(pool.idle_for() < asleep);
    std::thread::sleep(asleep);
    assert!(pool.idle_for() >= asleep);
    pool.free(&ids).unwrap();
    assert!(pool.idle_for() >= asleep, "what comes back was not wanted");
    pool.try_to_reserve(2).unwrap();
    pool.alloc(1).unwrap().unwrap();
    assert!(pool.idle_for() < asleep);
    std::thread::sleep(asleep);
    pool.claim(&[30]).unwrap();
    assert!(pool.idle_for() < asleep);
    pool.shutdown().unwrap();
    assert_eq!(pool.idle_for(), Duration::MAX);
}
