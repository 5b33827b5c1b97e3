//! Each scenario with its k-th driver call failing, for every k: nothing is lost, later work succeeds.
#![allow(clippy::unwrap_used)]

mod fake;

use std::collections::HashSet;
use std::sync::Arc;

use fake::{Fake, Fault, PAGE_BYTES, Steady, check, config, pool_over};
use kvcached_pool::PoolConfig;

type Scenario = fn(&Steady, &mut Vec<u32>);

fn allocate(pool: &Steady, held: &mut Vec<u32>, n: u32) {
    if let Ok(Some(ids)) = pool.alloc(n) {
        assert_eq!(ids.len(), n as usize);
        held.extend(ids);
    }
}

fn free_some(pool: &Steady, held: &mut Vec<u32>, n: usize) {
    let ids = held.split_off(held.len().saturating_sub(n));
    pool.free(&ids).unwrap();
}

const SCENARIOS: [(&str, Scenario); 7] = [
    ("grow and shrink", |pool, held| {
        for n in [3, 9, 1, 14] {
            allocate(pool, held, n);
        }
        free_some(pool, held, 12);
        allocate(pool, held, 5);
        free_some(pool, held, usize::MAX);
    }),
    ("steps", |pool, held| {
        allocate(pool, held, 17);
        let first = pool.begin_epoch().unwrap();
        free_some(pool, held, 9);
        let second = pool.begin_epoch().unwrap();
        free_some(pool, held, 4);
        pool.release_through(first).unwrap();
        allocate(pool, held, 3);
        pool.release_through(second).unwrap();
    }),
    ("demand", |pool, held| {
        let _ = pool.reserve_demand(20);
        allocate(pool, held, 18);
        let _ = pool.reserve_demand(13);
        free_some(pool, held, 8);
    }),
    ("claims", |pool, held| {
        for ids in [vec![0, 12, 26], vec![13], vec![1, 30]] {
            if pool.claim(&ids).is_ok() {
                held.extend(ids);
            }
        }
        free_some(pool, held, 3);
    }),
    ("set aside", |pool, held| {
        let _ = pool.try_to_reserve(6);
        allocate(pool, held, 4);
        let _ = pool.try_to_reserve(10);
        pool.free_reserved().unwrap();
    }),
    ("limits", |pool, held| {
        allocate(pool, held, 17);
        for pages in [3, 9, 0] {
            pool.set_limit(pages * PAGE_BYTES, None).unwrap();
            free_some(pool, held, 5);
            allocate(pool, held, 3);
        }
        pool.set_limit(u64::MAX, None).unwrap();
        allocate(pool, held, 2);
    }),
    ("clear and trim", |pool, held| {
        allocate(pool, held, 15);
        free_some(pool, held, 6);
        let _ = pool.trim();
        if pool.clear().is_ok() {
            held.clear();
        }
        allocate(pool, held, 6);
    }),
];

#[test]
fn every_scenario_with_a_failure_at_every_call() {
    for async_sched in [false, true] {
        for fault in [Fault::Refused, Fault::Driver, Fault::Lost] {
            for (name, scenario) in SCENARIOS {
                let mut k = 0;
                while run(name, scenario, async_sched, fault, k) {
                    k += 1;
                }
                assert!(k > 1, "{name} makes driver calls");
            }
        }
    }
}

/// True as long as the scenario makes that many calls.
fn run(name: &str, scenario: Scenario, async_sched: bool, fault: Fault, k: usize) -> bool {
    let fake = Arc::new(Fake::default());
    let config = PoolConfig { async_sched, null_block: false, max_reserved_bytes: PAGE_BYTES, ..config(40) };
    let pool = pool_over(&fake, config).unwrap();
    fake.fail_at(k, fault);
    let mut held = Vec::new();
    scenario(&pool, &mut held);
    let reached = fake.calls().len() > k;
    fake.heal();
    let context = format!("{name}, {fault:?} at {k}");

    check(&fake, &pool);
    let distinct: HashSet<u32> = held.iter().copied().collect();
    assert_eq!(distinct.len(), held.len(), "{context}: an id is held twice");
    let mapped: HashSet<u32> = fake.mapped().into_iter().collect();
    for page in pool.pages_of(&held).unwrap() {
        assert!(mapped.contains(&page), "{context}: a held block has no memory");
    }
    let stats = pool.stats().unwrap();
    assert_eq!(stats.held_blocks as usize, held.len(), "{context}: blocks are lost");
    assert_eq!(stats.num_blocks - 4 * stats.pages.quarantined, stats.available_blocks + stats.held_blocks);

    // Later work: all that is left can be had, and everything can be given back.
    let rest = pool.alloc(stats.available_blocks).unwrap().unwrap();
    assert!(rest.iter().all(|id| !distinct.contains(id)), "{context}: an id is held twice");
    pool.free(&rest).unwrap();
    pool.free(&held).unwrap();
    let epoch = pool.begin_epoch().unwrap();
    pool.release_through(epoch).unwrap();
    assert!(pool.stats().unwrap().pages.reserved <= 1, "{context}: the reserve is too large");
    check(&fake, &pool);
    pool.shutdown().unwrap();
    check(&fake, &pool);
    reached
}

#[test]
fn construction_with_a_failure_at_every_call() {
    for fault in [Fault::Refused, Fault::Driver, Fault::Lost] {
        for k in 0..2 {
            let fake = Arc::new(Fake::default());
            fake.fail_at(k, fault);
            let config = PoolConfig { null_block: true, min_reserved_bytes: 3 * PAGE_BYTES, ..config(40) };
            assert!(pool_over(&fake, config).is_err());
            assert_eq!(fake.mapped(), [0u32; 0], "{fault:?} at {k}");
            assert_eq!(fake.inner().violations, [""; 0]);
        }
    }
}
