//! Random histories of a pool against a set of ids and a budget of pages.
#![allow(clippy::unwrap_used)]

mod fake;

use std::collections::BTreeSet;
use std::sync::Arc;

use fake::{Fake, Fault, PAGE_BYTES, check, config, pool_over};
use kvcached_pool::{Layout, LimitState, PageOrder, PoolConfig, PoolError};
use proptest::prelude::*;
use proptest::sample::Index;

#[derive(Debug, Clone)]
enum Op {
    Alloc(u32),
    Free(Vec<Index>),
    FreeRaw(Vec<u32>),
    Claim(Vec<u32>),
    Demand(u32),
    DemandUnder(u32, u64),
    GiveBack(u64),
    Promise(u64),
    SetAside(u32),
    FreeReserved,
    Begin,
    End,
    Limit(u64),
    Trim,
    Clear,
    Budget(usize),
    Fault(usize, bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0u32..16).prop_map(Op::Alloc),
        8 => prop::collection::vec(any::<Index>(), 0..12).prop_map(Op::Free),
        1 => prop::collection::vec(0u32..60, 1..4).prop_map(Op::FreeRaw),
        2 => prop::collection::vec(0u32..60, 1..4).prop_map(Op::Claim),
        3 => (0u32..30).prop_map(Op::Demand),
        2 => (0u32..30, 0u64..14).prop_map(|(n, limit)| Op::DemandUnder(n, limit)),
        1 => (0u64..4).prop_map(Op::GiveBack),
        2 => (0u64..4).prop_map(Op::Promise),
        1 => (0u32..6).prop_map(Op::SetAside),
        1 => Just(Op::FreeReserved),
        3 => Just(Op::Begin),
        3 => Just(Op::End),
        2 => (0u64..14).prop_map(Op::Limit),
        1 => Just(Op::Trim),
        1 => Just(Op::Clear),
        1 => (0usize..14).prop_map(Op::Budget),
        1 => (0usize..3, any::<bool>()).prop_map(|(k, lost)| Op::Fault(k, lost)),
    ]
}

fn run(config: PoolConfig, ops: Vec<Op>) -> Result<(), TestCaseError> {
    let fake = Arc::new(Fake::default());
    let pool = pool_over(&fake, config).unwrap();
    let keep = config.max_reserved_bytes.max(config.min_reserved_bytes) / PAGE_BYTES;
    let mut held: BTreeSet<u32> = pool.null_block().into_iter().collect();
    let mut open = Vec::new();
    let num_pages = u64::from(config.layout.num_pages());
    let mut limit = num_pages;
    for op in ops {
        let before = pool.stats().unwrap();
        let (shortages, faults) = fake.counts();
        match op {
            Op::Alloc(n) => match pool.alloc(n) {
                Ok(Some(ids)) => {
                    prop_assert_eq!(ids.len(), n as usize);
                    for id in ids {
                        prop_assert!(held.insert(id), "{} is held twice", id);
                    }
                }
                Ok(None) => {
                    let short = fake.counts().0 > shortages;
                    prop_assert!(short || n > before.available_blocks);
                    prop_assert_eq!(pool.stats().unwrap(), before);
                }
                Err(error) => prop_assert!(matches!(error, PoolError::Quarantined { .. }), "{}", error),
            },
            Op::Free(picks) => {
                let may: Vec<u32> =
                    held.iter().copied().filter(|id| pool.null_block() != Some(*id)).collect();
                if may.is_empty() {
                    continue;
                }
                let ids: BTreeSet<u32> = picks.iter().map(|pick| *pick.get(&may)).collect();
                ids.iter().for_each(|id| assert!(held.remove(id)));
                let ids: Vec<u32> = ids.into_iter().collect();
                pool.free(&ids).unwrap();
            }
            Op::FreeRaw(ids) => {
                let unique: BTreeSet<u32> = ids.iter().copied().collect();
                let may = unique.len() == ids.len()
                    && unique.is_subset(&held)
                    && !ids.iter().any(|&id| pool.null_block() == Some(id));
                prop_assert_eq!(pool.free(&ids).is_ok(), may);
                if may {
                    held.retain(|id| !unique.contains(id));
                } else {
                    prop_assert_eq!(pool.stats().unwrap(), before);
                }
            }
            Op::Claim(ids) => match pool.claim(&ids) {
                Ok(()) => {
                    for id in ids {
                        prop_assert!(held.insert(id), "{} is held twice", id);
                    }
                }
                Err(PoolError::Quarantined { .. }) => {}
                Err(PoolError::Exhausted { .. }) => {
                    prop_assert!(fake.counts().0 > shortages);
                    prop_assert_eq!(pool.stats().unwrap(), before);
                }
                Err(PoolError::Block(_)) => prop_assert_eq!(pool.stats().unwrap(), before),
                Err(error) => prop_assert!(false, "{}", error),
            },
            Op::Demand(n) => match pool.reserve_demand(n) {
                Ok(got) => {
                    let stats = pool.stats().unwrap();
                    prop_assert_eq!(got, n.min(stats.backed_blocks));
                    let short = fake.counts().0 > shortages;
                    prop_assert!(short || got == n.min(stats.available_blocks));
                    // It stays on hand, whatever the pager thinks of so many idle pages.
                    let ids = pool.alloc_on_hand(got).unwrap();
                    prop_assert!(ids.is_some(), "{} blocks were on hand", got);
                    pool.wait();
                    for id in ids.unwrap() {
                        prop_assert!(held.insert(id), "{} is held twice", id);
                    }
                }
                Err(error) => prop_assert!(matches!(error, PoolError::Quarantined { .. }), "{}", error),
            },
            Op::DemandUnder(n, pages) => {
                fake.heal();
                let told = pool.keep_on_hand(n).unwrap();
                let answer = pool.set_limit(pages * PAGE_BYTES, None).unwrap();
                if answer.state != LimitState::Rejected {
                    limit = pages;
                }
                let _ = pool.give_back_idle(pages * PAGE_BYTES).unwrap();
                let ids = pool.alloc_on_hand(told).unwrap();
                prop_assert!(ids.is_some(), "{} blocks were on hand", told);
                pool.wait();
                for id in ids.unwrap() {
                    prop_assert!(held.insert(id), "{} is held twice", id);
                }
            }
            Op::GiveBack(pages) => {
                let idle = pool.idle_bytes();
                let given = pool.give_back_idle(pages * PAGE_BYTES).unwrap();
                pool.wait();
                let faulted = fake.counts().1 > faults;
                prop_assert!(faulted || given >= (pages * PAGE_BYTES).min(idle));
                prop_assert!(faulted || given <= pages * PAGE_BYTES);
                let gone = before.mapped_bytes - pool.stats().unwrap().mapped_bytes;
                prop_assert!(faulted || gone == given, "{} gone, {} given", gone, given);
            }
            Op::Promise(leave) => {
                if let Ok(promised) = pool.refresh_credit(leave * PAGE_BYTES) {
                    fake.heal();
                    // More, where a page was backed ahead that might have been the short one; less, where that one was lost.
                    let faulted = fake.counts().1 > faults;
                    prop_assert!(faulted || pool.promised().unwrap() >= promised);
                    prop_assert!(promised >= before.backed_blocks && promised <= before.available_blocks);
                    let ids = pool.alloc(promised).unwrap();
                    prop_assert!(faulted || ids.is_some(), "{} blocks were promised", promised);
                    for id in ids.unwrap_or_default() {
                        prop_assert!(held.insert(id), "{} is held twice", id);
                    }
                }
            }
            Op::SetAside(n) => match pool.try_to_reserve(n) {
                Ok(true) => {
                    let after = pool.stats().unwrap();
                    prop_assert_eq!(after.set_aside_blocks, before.set_aside_blocks + n);
                    let faulted = fake.counts().1 > faults; // the pager may have lost a page meanwhile
                    prop_assert!(faulted || after.available_blocks == before.available_blocks);
                }
                Ok(false) => prop_assert_eq!(pool.stats().unwrap(), before),
                Err(error) => prop_assert!(matches!(error, PoolError::Quarantined { .. }), "{}", error),
            },
            Op::FreeReserved => {
                pool.free_reserved().unwrap();
                prop_assert_eq!(pool.stats().unwrap().set_aside_blocks, 0);
            }
            Op::Begin => open.push(pool.begin_epoch().unwrap()),
            Op::End => {
                if !open.is_empty() {
                    pool.release_through(open.remove(0)).unwrap();
                    let pages = pool.stats().unwrap().pages;
                    let faulted = fake.counts().1 > faults;
                    prop_assert!(faulted || u64::from(pages.reserved) <= keep, "{:?}", pages);
                }
            }
            Op::Limit(pages) => {
                let answer = pool.set_limit(pages * PAGE_BYTES, None).unwrap();
                if answer.state == LimitState::Rejected {
                    prop_assert!(u64::from(before.pages.quarantined) > pages);
                } else {
                    limit = pages;
                }
                let standing = pool.limit().unwrap();
                prop_assert_eq!(standing.limit_bytes, limit.min(num_pages) * PAGE_BYTES);
                prop_assert_eq!(standing.revision, answer.revision);
            }
            Op::Trim => {
                let bytes = pool.trim();
                let after = pool.stats().unwrap();
                let lost = after.usage.quarantined_bytes - before.usage.quarantined_bytes;
                if let Ok(bytes) = bytes {
                    let gone = before.mapped_bytes - after.mapped_bytes;
                    let faulted = fake.counts().1 > faults; // then the pager may have given back what it could not
                    prop_assert!(gone == bytes + lost || faulted && gone > bytes + lost);
                }
            }
            Op::Clear => {
                if pool.clear().is_ok() {
                    held.retain(|&id| pool.null_block() == Some(id));
                }
            }
            Op::Budget(pages) => fake.set_budget(pages),
            Op::Fault(k, lost) => fake.fail_at(k, if lost { Fault::Lost } else { Fault::Refused }),
        }
        check(&fake, &pool);
        // Beyond the limit there is nothing but what is held, may still be read, or could not be given back.
        let pages = pool.stats().unwrap().pages;
        let must_stay = u64::from(pages.in_use + pages.retired + pages.quarantined);
        let faulted = fake.counts().1 > 0;
        prop_assert!(faulted || u64::from(pages.reserved) + must_stay <= limit.max(must_stay), "{:?}", pages);
        prop_assert_eq!(pages.total() as u64, num_pages);
        prop_assert_eq!(pool.stats().unwrap().held_blocks as usize, held.len());
        let lost = pool.stats().unwrap().usage.quarantined_bytes;
        let free: BTreeSet<u32> = pool.free_ids().unwrap().into_iter().collect();
        prop_assert!(free.is_disjoint(&held));
        if lost == 0 {
            prop_assert_eq!(free.len() + held.len(), config.layout.num_blocks as usize);
        }
        let ids: Vec<u32> = held.iter().copied().collect();
        let mapped = fake.mapped();
        prop_assert!(pool.pages_of(&ids).unwrap().iter().all(|page| mapped.contains(page)));
    }
    fake.heal();
    pool.shutdown().unwrap();
    check(&fake, &pool);
    prop_assert_eq!(fake.mapped(), Vec::<u32>::new());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_reference(
        highest in any::<bool>(),
        null_block in any::<bool>(),
        async_sched in any::<bool>(),
        (min, max) in (0u64..3, 0u64..4),
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let order = if highest { PageOrder::HighestFirst } else { PageOrder::LowestFirst };
        let base = config(43);
        let config = PoolConfig {
            layout: Layout { order, ..base.layout },
            null_block,
            async_sched,
            min_reserved_bytes: min * PAGE_BYTES,
            max_reserved_bytes: max * PAGE_BYTES,
            patience: PoolConfig::PATIENCE,
        };
        run(config, ops)?;
    }
}
