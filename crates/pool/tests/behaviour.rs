//! What each method promises, one example each.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fake;

use std::sync::Arc;

use fake::{Call, Fake, Fault, PAGE_BYTES, check, config, pool, pool_over};
use kvcached_pool::{
    BlockError, Layout, MapFailure, Mapper, NoMeter, PageOrder, Pool, PoolConfig, PoolError, Tally,
    UnmapFailure,
};

#[test]
fn memory_comes_with_the_first_block_and_leaves_with_the_last() {
    let (fake, pool) = pool(config(12));
    assert_eq!((pool.available().unwrap(), pool.backed().unwrap()), (12, 0));
    let ids = pool.alloc(6).unwrap().unwrap();
    assert_eq!(ids, [0, 1, 2, 3, 5, 6]);
    assert_eq!(fake.calls(), [Call::Map(vec![0, 1])]);
    assert_eq!((pool.available().unwrap(), pool.backed().unwrap()), (6, 2));
    assert_eq!(pool.occupancy(&[0, 1, 2]).unwrap(), [(4, 4), (2, 4), (0, 4)]);
    assert_eq!(pool.pages_of(&[0, 6, 13]).unwrap(), [0, 1, 2]);
    assert_eq!([&[6, 5][..], &[5], &[0, 1, 2, 3, 6]].map(|ids| pool.emptied_by(ids).unwrap()), [1, 0, 1]);
    assert_eq!(pool.alloc(2).unwrap().unwrap(), [7, 8]);
    assert_eq!(fake.calls(), [], "on hand");
    pool.free(&[5, 6, 7, 8]).unwrap();
    assert_eq!(fake.calls(), [Call::Unmap(vec![1])]);
    check(&fake, &pool);
    pool.free(&[0, 1, 2, 3]).unwrap();
    assert_eq!(fake.mapped(), [0u32; 0]);
    check(&fake, &pool);
}

#[test]
fn shortage_of_ids_asks_the_driver_nothing() {
    let (fake, pool) = pool(config(8));
    assert_eq!(pool.alloc(9).unwrap(), None);
    assert_eq!(pool.alloc(0).unwrap(), Some(vec![]));
    assert_eq!(fake.calls(), []);
}

#[test]
fn shortage_of_memory_changes_nothing() {
    let (fake, pool) = pool(config(40));
    let ids = pool.alloc(5).unwrap().unwrap();
    fake.set_budget(3);
    let before = pool.stats().unwrap();
    assert_eq!(pool.alloc(20).unwrap(), None);
    assert_eq!(pool.stats().unwrap(), before);
    assert_eq!(pool.alloc(7).unwrap().unwrap().len(), 7, "what fits still comes");
    pool.free(&ids).unwrap();
    check(&fake, &pool);
}

#[test]
fn what_is_promised_can_be_had() {
    let (fake, pool) = pool(config(42)); // ten pages of four, and one of two
    assert_eq!(pool.promised().unwrap(), 0, "nobody has asked the device yet");
    fake.set_budget(3);
    assert_eq!(pool.refresh_credit(0).unwrap(), 10, "three pages, one of which may be the short one");
    assert_eq!(pool.refresh_credit(PAGE_BYTES).unwrap(), 6);
    assert_eq!(pool.refresh_credit(9 * PAGE_BYTES).unwrap(), 0);
    pool.refresh_credit(0).unwrap();
    let ids = pool.alloc(5).unwrap().unwrap();
    assert_eq!(pool.promised().unwrap(), 5, "three on hand, one page of credit left, less two");
    assert_eq!(pool.alloc(8).unwrap(), None);
    assert_eq!(pool.promised().unwrap(), 5, "two pages were refused: one may still be had");
    fake.set_budget(2);
    assert_eq!(pool.alloc(4).unwrap(), None);
    assert_eq!(pool.promised().unwrap(), 3, "not even one: what is on hand");
    assert_eq!(fake.calls().iter().filter(|call| **call == Call::Room).count(), 4);
    fake.set_budget(100);
    assert_eq!(pool.refresh_credit(0).unwrap(), 37, "all there is");
    pool.free(&ids).unwrap();
    fake.fail_at(0, Fault::Refused);
    assert!(matches!(pool.refresh_credit(0), Err(PoolError::Driver { .. })));
    fake.heal();
    assert_eq!(pool.refresh_credit(0).unwrap(), 42);
    fake.fail_at(0, Fault::Driver);
    assert!(pool.alloc(4).is_err());
    assert_eq!(pool.promised().unwrap(), 0, "nothing is known of a device that fails");
    check(&fake, &pool);
}

#[test]
fn free_ids_are_those_that_nobody_holds() {
    let (_fake, pool) = pool(config(6));
    assert_eq!(pool.free_ids().unwrap(), [0, 1, 2, 3, 5, 6]);
    pool.alloc(5).unwrap().unwrap();
    assert!(pool.try_to_reserve(1).unwrap());
    assert_eq!(pool.free_ids().unwrap().len(), 1, "set aside is not held");
    pool.free(&[2, 5]).unwrap();
    let mut ids = pool.free_ids().unwrap();
    ids.sort_unstable();
    assert_eq!(ids, [2, 5, 6]);
}

#[test]
fn refusals_are_typed_and_change_nothing() {
    let (fake, pool) = pool(config(12));
    pool.alloc(6).unwrap().unwrap();
    let before = pool.stats().unwrap();
    let block = |result: Result<(), PoolError>| match result.unwrap_err() {
        PoolError::Block(error) => error,
        other => panic!("{other}"),
    };
    assert_eq!(block(pool.free(&[0, 7])), BlockError::NotHeld { id: 7 });
    assert_eq!(block(pool.free(&[0, 0])), BlockError::Duplicate { id: 0 });
    assert_eq!(block(pool.free(&[4])), BlockError::Unknown { id: 4 });
    assert_eq!(block(pool.claim(&[10, 0])), BlockError::Held { id: 0 });
    assert!(matches!(pool.pages_of(&[4]), Err(PoolError::Block(BlockError::Unknown { id: 4 }))));
    assert!(matches!(pool.emptied_by(&[0, 7]), Err(PoolError::Block(BlockError::NotHeld { id: 7 }))));
    assert!(matches!(pool.occupancy(&[3]), Err(PoolError::NoSuchPage { page: 3, num_pages: 3 })));
    assert!(matches!(pool.release_through(1), Err(PoolError::Epoch(_))));
    assert_eq!(pool.stats().unwrap(), before);
    check(&fake, &pool);
}

#[test]
fn claims_back_what_they_take() {
    let (fake, pool) = pool(config(12));
    pool.claim(&[11, 2, 10]).unwrap();
    assert_eq!(fake.mapped(), [0, 2]);
    fake.set_budget(2);
    assert!(matches!(pool.claim(&[5]), Err(PoolError::Exhausted { pages: 1, .. })));
    check(&fake, &pool);
    assert_eq!(pool.alloc(5).unwrap().unwrap(), [0, 1, 3, 12, 13]);
    pool.free(&[10, 11, 12, 13]).unwrap();
    assert_eq!(fake.mapped(), [0]);
}

#[test]
fn the_null_block_is_block_0_in_either_order() {
    for order in [PageOrder::LowestFirst, PageOrder::HighestFirst] {
        let layout = Layout { order, ..config(12).layout };
        let config = PoolConfig { layout, null_block: true, ..config(12) };
        let (fake, pool) = pool(config);
        assert_eq!(pool.null_block(), Some(0));
        assert_eq!(fake.mapped(), [0]);
        assert_eq!((pool.available().unwrap(), pool.backed().unwrap()), (11, 3));
        let ids = pool.alloc(11).unwrap().unwrap();
        assert!(!ids.contains(&0));
        assert!(matches!(pool.free(&[0]), Err(PoolError::Block(BlockError::Pinned { id: 0 }))));
        pool.free(&ids).unwrap();
        pool.clear().unwrap();
        assert_eq!(pool.trim().unwrap(), 0);
        assert_eq!(fake.mapped(), [0]);
        check(&fake, &pool);
        pool.shutdown().unwrap();
        assert_eq!(fake.mapped(), [0u32; 0]);
    }
}

#[test]
fn construction_fails_whole() {
    let full = PoolConfig { null_block: true, min_reserved_bytes: 2 * PAGE_BYTES, ..config(20) };
    for budget in 0..3 {
        let fake = Arc::new(Fake::default());
        fake.set_budget(budget);
        assert!(matches!(pool_over(&fake, full), Err(PoolError::Exhausted { .. })));
        assert_eq!(fake.mapped(), [0u32; 0]);
        assert_eq!(fake.inner().violations, [""; 0]);
    }
    let fake = Arc::new(Fake::default());
    fake.set_budget(3);
    let pool = pool_over(&fake, full).unwrap();
    assert_eq!(fake.mapped(), [0, 1, 2]);
    assert_eq!(pool.stats().unwrap().tally, Tally::default(), "pages count from here");
    check(&fake, &pool);
    assert!(matches!(pool_over(&Arc::new(Fake::default()), config(0)), Err(PoolError::Layout(_))));
}

#[test]
fn the_reserve_stays_within_its_bounds() {
    let bounds = |min_pages_x2: u64, max_pages_x2: u64| PoolConfig {
        min_reserved_bytes: min_pages_x2 * PAGE_BYTES / 2,
        max_reserved_bytes: max_pages_x2 * PAGE_BYTES / 2,
        ..config(40)
    };
    // Half pages: the minimum is rounded up, the maximum down, and the minimum wins.
    for (min, max, at_start, kept) in [(0, 0, 0, 0), (0, 5, 0, 2), (1, 5, 1, 2), (5, 2, 3, 3), (3, 4, 2, 2)] {
        let (fake, pool) = pool(bounds(min, max));
        assert_eq!(fake.mapped().len(), at_start);
        let ids = pool.alloc(40).unwrap().unwrap();
        pool.free(&ids).unwrap();
        assert_eq!(fake.mapped(), (0..kept).collect::<Vec<_>>(), "the low pages stay");
        assert_eq!(fake.last_figures().reserved_bytes, u64::from(kept) * PAGE_BYTES);
        assert_eq!(pool.trim().unwrap(), u64::from(kept) * PAGE_BYTES);
        assert_eq!(fake.mapped(), [0u32; 0]);
        check(&fake, &pool);
    }
}

#[test]
fn a_retired_page_is_not_unmapped_before_its_step_ends() {
    let (fake, pool) = pool(PoolConfig { async_sched: true, ..config(40) });
    let ids = pool.alloc(8).unwrap().unwrap();
    let first = pool.begin_epoch().unwrap();
    pool.free(&ids[..4]).unwrap();
    let second = pool.begin_epoch().unwrap();
    pool.free(&ids[4..]).unwrap();
    assert_eq!(fake.last_figures().reserved_bytes, 2 * PAGE_BYTES);
    assert_eq!(pool.trim().unwrap(), 0, "not even then");
    pool.release_through(first).unwrap();
    assert_eq!(fake.mapped(), [1]);
    pool.release_through(second).unwrap();
    assert_eq!(fake.mapped(), [0u32; 0]);
    check(&fake, &pool);
}

#[test]
fn reuse_keeps_a_retired_page() {
    let (fake, pool) = pool(PoolConfig { async_sched: true, ..config(40) });
    let ids = pool.alloc(4).unwrap().unwrap();
    let epoch = pool.begin_epoch().unwrap();
    pool.free(&ids).unwrap();
    fake.calls();
    assert_eq!(pool.alloc(1).unwrap().unwrap(), [0]);
    pool.release_through(epoch).unwrap();
    assert_eq!(fake.calls(), []);
    // No step is outstanding now: nothing to wait for, and perhaps no later step that would end.
    pool.free(&[0]).unwrap();
    assert_eq!(fake.calls(), [Call::Unmap(vec![0])]);
}

#[test]
fn demand_is_backed_ahead() {
    let (fake, pool) = pool(config(40));
    assert_eq!(pool.reserve_demand(9).unwrap(), 9);
    assert_eq!(pool.backed().unwrap(), 12);
    assert_eq!(pool.reserve_demand(12).unwrap(), 12);
    assert_eq!(fake.calls(), [Call::Map(vec![0, 1, 2])]);
    fake.set_budget(3);
    assert_eq!(pool.alloc(12).unwrap().unwrap().len(), 12, "cannot fail");
    assert_eq!(pool.reserve_demand(0).unwrap(), 0);
    assert_eq!(pool.reserve_demand(1).unwrap(), 0);
    check(&fake, &pool);
}

#[test]
fn demand_beyond_memory_gets_what_there_is() {
    for budget in 0..10 {
        let (fake, pool) = pool(config(40));
        fake.set_budget(budget);
        let on_hand = pool.reserve_demand(100).unwrap();
        assert_eq!(on_hand, 4 * budget as u32);
        assert!(fake.calls().len() < 8, "halves, not one by one");
        check(&fake, &pool);
    }
}

#[test]
fn blocks_set_aside_are_for_the_next_allocation() {
    let (fake, pool) = pool(config(12));
    assert!(pool.try_to_reserve(3).unwrap());
    assert!(pool.try_to_reserve(2).unwrap());
    assert!(!pool.try_to_reserve(8).unwrap());
    assert_eq!((pool.available().unwrap(), pool.stats().unwrap().set_aside_blocks), (12, 5));
    assert!(matches!(pool.free(&[0]), Err(PoolError::Block(BlockError::NotHeld { id: 0 }))));
    fake.set_budget(2);
    assert_eq!(pool.trim().unwrap(), 0);
    assert_eq!(pool.alloc(4).unwrap().unwrap(), [0, 1, 2, 5]);
    assert!(!pool.try_to_reserve(5).unwrap(), "memory is short");
    pool.free_reserved().unwrap();
    assert_eq!(pool.stats().unwrap().set_aside_blocks, 0);
    pool.free(&[0, 1, 2, 5]).unwrap();
    assert!(pool.try_to_reserve(1).unwrap());
    pool.free_reserved().unwrap();
    assert_eq!(fake.mapped(), [0u32; 0]);
    check(&fake, &pool);
}

#[test]
fn clear_waits_for_the_device_and_keeps_the_reserve() {
    let (fake, pool) = pool(PoolConfig { max_reserved_bytes: PAGE_BYTES, async_sched: true, ..config(40) });
    let ids = pool.alloc(9).unwrap().unwrap();
    pool.begin_epoch().unwrap();
    pool.free(&ids[..4]).unwrap();
    fake.calls();
    pool.clear().unwrap();
    assert_eq!(fake.calls(), [Call::Synchronise, Call::Unmap(vec![2, 1])]);
    assert_eq!((pool.available().unwrap(), pool.backed().unwrap()), (40, 4));
    let ids = pool.alloc(4).unwrap().unwrap();
    fake.fail_at(0, Fault::Refused);
    assert!(matches!(pool.clear(), Err(PoolError::Driver { .. })));
    fake.heal();
    pool.free(&ids).unwrap();
    check(&fake, &pool);
}

#[test]
fn shutdown_unmaps_everything_once() {
    let (fake, pool) = pool(PoolConfig { null_block: true, async_sched: true, ..config(40) });
    pool.alloc(9).unwrap().unwrap();
    pool.begin_epoch().unwrap();
    assert!(pool.try_to_reserve(2).unwrap());
    fake.calls();
    pool.shutdown().unwrap();
    assert_eq!(fake.calls()[0], Call::Synchronise);
    assert_eq!(fake.mapped(), [0u32; 0]);
    assert_eq!((fake.last_figures().used_bytes, fake.last_figures().reserved_bytes), (0, 0));
    pool.shutdown().unwrap();
    check(&fake, &pool);
    assert!(matches!(pool.alloc(1), Err(PoolError::Shutdown)));
    assert!(matches!(pool.free(&[1]), Err(PoolError::Shutdown)));
    assert!(matches!(pool.claim(&[1]), Err(PoolError::Shutdown)));
    assert!(matches!(pool.available(), Err(PoolError::Shutdown)));
    assert!(matches!(pool.backed(), Err(PoolError::Shutdown)));
    assert!(matches!(pool.reserve_demand(1), Err(PoolError::Shutdown)));
    assert!(matches!(pool.try_to_reserve(1), Err(PoolError::Shutdown)));
    assert!(matches!(pool.free_reserved(), Err(PoolError::Shutdown)));
    assert!(matches!(pool.begin_epoch(), Err(PoolError::Shutdown)));
    assert!(matches!(pool.release_through(1), Err(PoolError::Shutdown)));
    assert!(matches!(pool.trim(), Err(PoolError::Shutdown)));
    assert!(matches!(pool.clear(), Err(PoolError::Shutdown)));
    assert!(matches!(pool.occupancy(&[0]), Err(PoolError::Shutdown)));
    assert!(matches!(pool.pages_of(&[0]), Err(PoolError::Shutdown)));
    assert!(matches!(pool.emptied_by(&[0]), Err(PoolError::Shutdown)));
    drop(pool);
    assert_eq!(fake.calls(), [], "nothing left to do");
}

#[test]
fn shutdown_keeps_nothing_beside_the_pages() {
    let (fake, pool) = pool(config(40));
    pool.alloc(9).unwrap().unwrap();
    fake.keep_of_unmapped(2);
    pool.shutdown().unwrap();
    // Tensors may keep the addresses, and so the mapper, for long.
    assert_eq!(fake.calls().pop(), Some(Call::Trim));
    assert_eq!(fake.last_figures().beside_bytes, 0);
    check(&fake, &pool);
}

#[test]
fn shutdown_goes_on_behind_a_page_that_fails() {
    let (fake, pool) = pool(config(40));
    pool.alloc(16).unwrap().unwrap();
    fake.fail_at(1, Fault::Lost); // 0 is the synchronise
    assert!(matches!(pool.shutdown(), Err(PoolError::Quarantined { pages, .. }) if pages == [3]));
    assert_eq!(fake.mapped(), [0u32; 0]);
    check(&fake, &pool);
}

#[test]
fn shutdown_leaves_mapped_what_running_work_may_read() {
    let (fake, pool) = pool(config(40));
    pool.alloc(4).unwrap().unwrap();
    fake.fail_at(0, Fault::Refused);
    assert!(matches!(pool.shutdown(), Err(PoolError::Driver { .. })));
    assert_eq!(fake.mapped(), [0]);
}

#[test]
fn a_dropped_pool_gives_its_memory_back() {
    let (fake, pool) = pool(config(40));
    pool.alloc(9).unwrap().unwrap();
    drop(pool);
    assert_eq!(fake.mapped(), [0u32; 0]);
}

#[test]
fn quarantine_while_backing_is_told_once_and_the_pool_goes_on() {
    let (fake, pool) = pool(config(12));
    fake.fail_at(0, Fault::Lost);
    assert!(matches!(pool.alloc(8), Err(PoolError::Quarantined { pages, .. }) if pages == [0]));
    assert_eq!(pool.available().unwrap(), 8);
    assert_eq!(fake.last_figures().quarantined_bytes, PAGE_BYTES);
    assert_eq!(pool.alloc(9).unwrap(), None);
    assert_eq!(pool.alloc(8).unwrap().unwrap().len(), 8);
    assert!(matches!(pool.claim(&[0]), Err(PoolError::Block(BlockError::Quarantined { id: 0, page: 0 }))));
    check(&fake, &pool);
}

#[test]
fn a_free_succeeds_though_its_unmap_fails() {
    for (fault, available, mapped) in [(Fault::Lost, 4, vec![0]), (Fault::Refused, 8, vec![0, 1])] {
        let (fake, pool) = pool(config(8));
        let ids = pool.alloc(8).unwrap().unwrap();
        fake.fail_at(0, fault);
        pool.free(&ids).unwrap();
        assert_eq!((pool.available().unwrap(), fake.mapped()), (available, mapped));
        check(&fake, &pool);
        // What stayed mapped leaves with the next chance.
        let ids = pool.alloc(1).unwrap().unwrap();
        pool.free(&ids).unwrap();
        assert_eq!(fake.mapped(), [0u32; 0]);
        check(&fake, &pool);
    }
}

#[test]
fn the_meter_hears_of_changes_only() {
    let (fake, pool) = pool(config(8));
    pool.alloc(1).unwrap().unwrap();
    let heard = fake.num_figures();
    let ids = pool.alloc(2).unwrap().unwrap();
    pool.free(&ids).unwrap();
    assert_eq!(fake.num_figures(), heard, "the same page stays in use");
    assert_eq!((fake.last_figures().used_bytes, fake.last_figures().virtual_bytes), (1 << 20, 100 << 20));
}

/// Reports pages that nobody asked about, or panics.
struct Liar {
    panics: bool,
}

impl Mapper for Liar {
    fn map(&self, _pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        assert!(!self.panics, "on purpose");
        Err(MapFailure::Quarantined { pages: vec![77], source: "a lie".into() })
    }
    fn unmap(&self, _pages: &[u32]) -> Result<(), UnmapFailure> {
        Ok(())
    }
    without_memory!();
}

#[test]
fn a_mapper_that_cannot_be_trusted_ends_the_pool() {
    for panics in [false, true] {
        let pool = Pool::new(config(8), Arc::new(Liar { panics }), Arc::new(NoMeter)).unwrap();
        let first = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pool.alloc(1)));
        match first {
            Ok(result) => assert!(matches!(result, Err(PoolError::StateConsistency { .. }))),
            Err(_) => assert!(panics),
        }
        assert!(matches!(pool.alloc(1), Err(PoolError::StateConsistency { .. })));
        assert!(matches!(pool.available(), Err(PoolError::StateConsistency { .. })));
        assert!(matches!(pool.shutdown(), Err(PoolError::StateConsistency { .. })));
    }
}
