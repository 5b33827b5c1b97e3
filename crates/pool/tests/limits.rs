//! How much memory a pool may have: revisions, what is clamped and rejected, and how a shrinking pool drains.
#![allow(clippy::unwrap_used, clippy::panic)]

mod fake;

use fake::{Call, Fault, PAGE_BYTES, check, config, pool};
use kvcached_pool::{BlockError, LimitState, MemoryLimit, PoolConfig, PoolError};

const STATES: [(LimitState, &str); 5] = [
    (LimitState::Applied, "applied"),
    (LimitState::Deferred, "deferred"),
    (LimitState::Rejected, "rejected"),
    (LimitState::Stale, "stale"),
    (LimitState::Conflict, "conflict"),
];

fn summary(limit: &MemoryLimit) -> (LimitState, u64, u64) {
    (limit.state, limit.revision, limit.limit_bytes / PAGE_BYTES)
}

#[test]
fn states_have_names() {
    for (state, name) in STATES {
        assert_eq!(state.as_str(), name);
    }
}

#[test]
fn a_pool_begins_with_all_that_it_reserved() {
    let (_fake, pool) = pool(config(40));
    let limit = pool.limit().unwrap();
    assert_eq!(summary(&limit), (LimitState::Applied, 0, 10));
    assert_eq!((limit.target_pages, limit.occupied_bytes, limit.reason), (10, 0, None));
}

#[test]
fn each_revision_is_decided_once() {
    let (_fake, pool) = pool(config(40));
    let mut steps = vec![];
    for (pages, revision) in [
        (4, Some(5)),  // newer
        (4, Some(5)),  // the same again
        (3, Some(5)),  // the same revision with another limit
        (9, Some(4)),  // late
        (4, Some(4)),  // late, though it agrees
        (7, None),     // the next
        (5, Some(90)), // revisions may leap
        (u64::MAX / PAGE_BYTES, Some(91)),
    ] {
        steps.push(summary(&pool.set_limit(pages * PAGE_BYTES, revision).unwrap()));
    }
    use LimitState::{Applied, Conflict, Stale};
    assert_eq!(
        steps,
        [
            (Applied, 5, 4),
            (Applied, 5, 4),
            (Conflict, 5, 4),
            (Stale, 5, 4),
            (Stale, 5, 4),
            (Applied, 6, 7),
            (Applied, 90, 5),
            (Applied, 91, 10), // never more than is reserved
        ]
    );
    assert_eq!(summary(&pool.limit().unwrap()), (Applied, 91, 10));
    assert_eq!(pool.available().unwrap(), 40);
}

#[test]
fn the_last_revision_there_is() {
    let (_fake, pool) = pool(config(40));
    let limit = pool.set_limit(PAGE_BYTES, Some(u64::MAX)).unwrap();
    assert_eq!(summary(&limit), (LimitState::Applied, u64::MAX, 1));
    // No revision comes after it: another limit is a conflict, not a surprise.
    assert_eq!(pool.set_limit(2 * PAGE_BYTES, None).unwrap().state, LimitState::Conflict);
    assert_eq!(pool.available().unwrap(), 4);
}

#[test]
fn a_limit_holds_from_the_first_page() {
    let (fake, pool) = pool(config(40));
    pool.set_limit(2 * PAGE_BYTES + PAGE_BYTES / 2, None).unwrap();
    assert_eq!((pool.available().unwrap(), pool.stats().unwrap().pages.withdrawn), (8, 8));
    assert_eq!(pool.alloc(9).unwrap(), None);
    assert_eq!(fake.calls(), [], "the driver is not asked");
    assert_eq!(pool.alloc(8).unwrap().unwrap().len(), 8);
    assert!(matches!(pool.claim(&[45]), Err(PoolError::Block(BlockError::Withdrawn { id: 45, page: 9 }))));
    assert_eq!(pool.reserve_demand(1).unwrap(), 0);
    check(&fake, &pool);
    pool.set_limit(3 * PAGE_BYTES, None).unwrap();
    assert_eq!(pool.alloc(4).unwrap().unwrap().len(), 4, "growth is immediate");
}

#[test]
fn a_shrinking_pool_drains_and_revokes_nothing() {
    let (fake, pool) = pool(PoolConfig { max_reserved_bytes: 2 * PAGE_BYTES, ..config(40) });
    let ids = pool.alloc(20).unwrap().unwrap(); // five pages
    pool.free(&ids[1..4]).unwrap(); // page 0 holds one
    pool.free(&ids[18..]).unwrap(); // page 4 holds two
    let limit = pool.set_limit(3 * PAGE_BYTES, None).unwrap();
    assert_eq!(limit.state, LimitState::Deferred);
    assert_eq!(pool.limit().unwrap().occupied_bytes, 5 * PAGE_BYTES, "the reserve is gone, the rest is held");
    // The emptiest pages are to go: nothing is handed out of them.
    assert_eq!((pool.available().unwrap(), pool.stats().unwrap().draining_blocks), (0, 5));
    assert_eq!(pool.alloc(1).unwrap(), None);
    pool.free(&ids[..1]).unwrap();
    assert_eq!(pool.limit().unwrap().state, LimitState::Deferred);
    assert_eq!(fake.mapped(), [1, 2, 3, 4]);
    pool.free(&ids[4..5]).unwrap(); // of a page that may stay
    assert_eq!(pool.alloc(1).unwrap().unwrap(), [5]);
    pool.free(&ids[16..18]).unwrap();
    let limit = pool.limit().unwrap();
    assert_eq!((limit.state, limit.occupied_bytes), (LimitState::Applied, 3 * PAGE_BYTES));
    assert_eq!((pool.available().unwrap(), fake.mapped()), (0, vec![1, 2, 3]));
    check(&fake, &pool);
}

#[test]
fn a_limit_of_nothing_drains_to_the_null_block() {
    for null_block in [false, true] {
        let reserve = 2 * PAGE_BYTES;
        let base = PoolConfig { null_block, async_sched: true, min_reserved_bytes: reserve, ..config(40) };
        let (fake, pool) = pool(PoolConfig { max_reserved_bytes: reserve, ..base });
        let ids = pool.alloc(10).unwrap().unwrap();
        let epoch = pool.begin_epoch().unwrap();
        pool.set_limit(0, None).unwrap();
        assert_eq!((pool.alloc(1).unwrap(), pool.limit().unwrap().state), (None, LimitState::Deferred));
        pool.free(&ids).unwrap();
        assert_eq!(pool.alloc(1).unwrap(), None, "not from a page that queued work reads");
        assert!(!fake.mapped().is_empty());
        pool.release_through(epoch).unwrap();
        let left: &[u32] = if null_block { &[0] } else { &[] };
        assert_eq!((fake.mapped().as_slice(), pool.limit().unwrap().state), (left, LimitState::Applied));
        check(&fake, &pool);
        pool.set_limit(u64::MAX, None).unwrap();
        assert_eq!(pool.alloc(30).unwrap().unwrap().len(), 30);
    }
}

#[test]
fn lost_pages_stand_in_the_way_of_a_limit() {
    let (fake, pool) = pool(config(40));
    fake.fail_at(0, Fault::Lost);
    assert!(pool.alloc(8).is_err());
    let before = pool.stats().unwrap();
    let answer = pool.set_limit(0, Some(7)).unwrap();
    assert_eq!(summary(&answer), (LimitState::Rejected, 0, 10), "the limit before it stands");
    assert!(answer.reason.unwrap().contains("1048576 bytes are lost"));
    assert_eq!(pool.stats().unwrap(), before);
    // What cannot be had under one revision can be asked for less.
    assert_eq!(pool.set_limit(PAGE_BYTES, Some(7)).unwrap().state, LimitState::Applied);
    assert_eq!(pool.alloc(1).unwrap(), None, "the lost page counts");
    pool.set_limit(2 * PAGE_BYTES, Some(8)).unwrap();
    let ids = pool.alloc(4).unwrap().unwrap();
    // One more is lost while the pool shrinks: the limit can no longer be met, and says so.
    pool.set_limit(PAGE_BYTES, Some(9)).unwrap();
    fake.fail_at(0, Fault::Lost);
    pool.free(&ids).unwrap();
    let standing = pool.limit().unwrap();
    assert_eq!(summary(&standing), (LimitState::Rejected, 9, 1));
    assert!(standing.reason.is_some());
    check(&fake, &pool);
}

#[test]
fn a_shrinking_pool_gives_back_what_is_kept_beside_its_pages() {
    let (fake, pool) = pool(config(40));
    fake.keep_beside(3 * PAGE_BYTES);
    pool.set_limit(9 * PAGE_BYTES, None).unwrap();
    assert_eq!(fake.calls(), [Call::Trim]);
    assert_eq!(pool.stats().unwrap().usage.beside_bytes, 0);
    fake.keep_beside(PAGE_BYTES);
    pool.set_limit(10 * PAGE_BYTES, None).unwrap();
    assert_eq!(fake.calls(), [], "not one that grows");
}

#[test]
fn what_a_shrinking_pool_gives_back_is_not_kept_beside_its_pages() {
    let (fake, pool) = pool(PoolConfig { max_reserved_bytes: 2 * PAGE_BYTES, ..config(40) });
    let ids = pool.alloc(12).unwrap().unwrap();
    pool.free(&ids[8..]).unwrap();
    fake.keep_of_unmapped(5);
    fake.calls();
    pool.set_limit(PAGE_BYTES, None).unwrap(); // the reserve goes at once
    assert_eq!((fake.mapped(), fake.calls().pop()), (vec![0, 1], Some(Call::Trim)));
    assert_eq!(fake.last_figures().beside_bytes, 0);
    pool.free(&ids[4..8]).unwrap(); // and what drains when it is empty
    assert_eq!((fake.mapped(), fake.calls()), (vec![0], vec![Call::Unmap(vec![1]), Call::Trim]));
    assert_eq!(fake.last_figures().beside_bytes, 0);
    pool.free(&ids[..4]).unwrap();
    pool.alloc(4).unwrap().unwrap();
    assert_eq!(fake.calls(), [], "within the limit memory may be kept");
    check(&fake, &pool);
}

#[test]
fn every_order_of_shrinking_and_growing_hands_out_each_page_once() {
    for sizes in [[0, 10], [3, 7], [7, 3], [10, 1], [1, 2]] {
        let (fake, pool) = pool(config(40));
        let mut held: Vec<u32> = vec![];
        for pages in [sizes[0], 10, sizes[1], 5, sizes[0], 10] {
            pool.set_limit(pages * PAGE_BYTES, None).unwrap();
            while let Some(ids) = pool.alloc(3).unwrap() {
                assert!(ids.iter().all(|id| !held.contains(id)), "handed out twice");
                held.extend(ids);
            }
            held.reverse();
            let back = held.split_off(held.len() / 2);
            pool.free(&back).unwrap();
            check(&fake, &pool);
        }
        pool.free(&held).unwrap();
        assert_eq!((pool.available().unwrap(), fake.mapped()), (40, vec![]));
    }
}

#[test]
fn a_limit_that_falls_takes_nothing_that_a_scheduler_was_told_is_on_hand() {
    for async_sched in [false, true] {
        let (fake, pool) = pool(PoolConfig { async_sched, max_reserved_bytes: 8 * PAGE_BYTES, ..config(80) });
        let ids = pool.alloc(4).unwrap().unwrap();
        let rest = pool.alloc(16).unwrap().unwrap();
        pool.free(&rest).unwrap();
        assert_eq!(pool.reserve_demand(8).unwrap(), 8);
        let limit = pool.set_limit(PAGE_BYTES, None).unwrap();
        assert_eq!((limit.state, limit.target_pages), (LimitState::Deferred, 1));
        assert_eq!(fake.mapped().len(), 3, "what is idle beyond the promise goes at once");
        assert_eq!((pool.backed().unwrap(), pool.available().unwrap()), (8, 8), "and nothing else is issued");
        assert_eq!(pool.reserve_demand(9).unwrap(), 8, "nothing is backed beyond the limit");
        let told = pool.alloc_on_hand(8).unwrap().unwrap();
        assert_eq!((pool.alloc(1).unwrap(), pool.limit().unwrap().state), (None, LimitState::Deferred));
        pool.free(&told).unwrap();
        let limit = pool.limit().unwrap();
        assert_eq!((limit.state, limit.occupied_bytes), (LimitState::Applied, PAGE_BYTES));
        pool.free(&ids).unwrap();
        check(&fake, &pool);
    }
}

#[test]
fn a_promise_that_nobody_keeps_up_ends_and_the_limit_is_met() {
    type Ends = fn(&fake::Steady);
    let ends: [Ends; 4] = [
        |pool| {
            pool.begin_epoch().unwrap();
        },
        |pool| pool.release_through(0).unwrap(),
        |pool| pool.clear().unwrap(),
        |pool| {
            pool.trim().unwrap();
        },
    ];
    for end in ends {
        let (fake, pool) = pool(PoolConfig { async_sched: true, ..config(80) });
        assert_eq!(pool.reserve_demand(12).unwrap(), 12);
        assert_eq!(pool.set_limit(PAGE_BYTES, None).unwrap().state, LimitState::Deferred);
        assert_eq!(fake.mapped().len(), 3);
        end(&pool);
        assert_eq!((pool.limit().unwrap().state, fake.mapped().len()), (LimitState::Applied, 0));
        assert_eq!(pool.alloc(5).unwrap(), None);
        assert_eq!(pool.alloc(4).unwrap().unwrap().len(), 4);
        check(&fake, &pool);
    }
}

#[test]
fn a_limit_that_rises_again_finds_the_promise_kept() {
    let (fake, pool) = pool(config(80));
    assert_eq!(pool.reserve_demand(8).unwrap(), 8);
    pool.set_limit(0, None).unwrap();
    pool.set_limit(PAGE_BYTES, None).unwrap();
    assert_eq!((pool.backed().unwrap(), fake.mapped().len()), (8, 2));
    assert_eq!(pool.set_limit(5 * PAGE_BYTES, None).unwrap().state, LimitState::Applied);
    assert_eq!(pool.alloc(20).unwrap().unwrap().len(), 20);
    check(&fake, &pool);
}
