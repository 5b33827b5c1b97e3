//! A pool over the ranks of an engine: what the pool promises holds with the memory of all of them, whatever their drivers refuse.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fake;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fake::ranks::{Engine, M, PAGES, config, tensor};
use kvcached_pool::{LimitState, NoMeter, Pool, PoolConfig, PoolError};
use kvcached_vmm::sim::Sim;

const NO_PAGES: [u32; 0] = [];

fn settle(pool: &Pool) {
    assert!(pool.quiesce(Duration::from_secs(10)).unwrap());
}

#[test]
fn memory_comes_and_goes_on_all_ranks() {
    let engine = Engine::on_host(4);
    let pool = engine.pool(config(), Arc::new(NoMeter)).unwrap();
    assert_eq!(engine.mapped(), NO_PAGES);
    let ids = pool.alloc(2 * M + 1).unwrap().unwrap();
    assert_eq!(engine.mapped(), [0, 1, 2]);
    assert_eq!(pool.stats().unwrap().mapped_bytes, engine.tensors[0].mapped_bytes());
    pool.free(&ids[..4]).unwrap();
    settle(&pool);
    assert_eq!(engine.mapped(), [1, 2]);
    let limit = pool.set_limit(engine.ranks.page_bytes(), None).unwrap();
    assert_eq!(limit.state, LimitState::Deferred);
    pool.free(&ids[4..]).unwrap();
    settle(&pool);
    assert_eq!((engine.mapped(), pool.limit().unwrap().state), (vec![], LimitState::Applied));
    assert_eq!(pool.alloc(M + 1).unwrap(), None);
    pool.set_limit(u64::MAX, None).unwrap();
    assert!(pool.refresh_credit(0).unwrap() > 0, "there is room");
    pool.alloc(PAGES * M).unwrap().unwrap();
    assert_eq!(engine.mapped().len(), PAGES as usize);
    pool.clear().unwrap();
    settle(&pool);
    assert_eq!(pool.shutdown().unwrap(), 0);
    assert_eq!(engine.mapped(), NO_PAGES);
}

#[test]
fn the_null_block_and_the_reserve_are_backed_on_all_ranks() {
    let engine = Engine::on_host(2);
    let reserve = 2 * engine.ranks.page_bytes();
    let config =
        PoolConfig { null_block: true, min_reserved_bytes: reserve, max_reserved_bytes: reserve, ..config() };
    let pool = engine.pool(config, Arc::new(NoMeter)).unwrap();
    assert_eq!(engine.mapped(), [0, 1, 2]);
    assert_eq!(pool.trim().unwrap(), reserve);
    assert_eq!(engine.mapped(), [0]);
    drop(pool);
    assert_eq!(engine.mapped(), NO_PAGES);
}

#[test]
fn epochs_hold_memory_on_all_ranks() {
    let engine = Engine::on_host(2);
    let pool = engine.pool(PoolConfig { async_sched: true, ..config() }, Arc::new(NoMeter)).unwrap();
    let ids = pool.alloc(M).unwrap().unwrap();
    let epoch = pool.begin_epoch().unwrap();
    pool.free(&ids).unwrap();
    settle(&pool);
    assert_eq!(engine.mapped(), [0], "queued work may read it");
    pool.release_through(epoch).unwrap();
    settle(&pool);
    assert_eq!(engine.mapped(), NO_PAGES);
}

#[test]
fn threads_allocate_and_free_over_ranks() {
    let engine = Engine::on_host(3);
    let pool = engine.pool(config(), Arc::new(NoMeter)).unwrap();
    std::thread::scope(|scope| {
        for n in 1..=3 {
            let pool = &pool;
            scope.spawn(move || {
                for _ in 0..40 {
                    if let Some(ids) = pool.alloc(n * 2).unwrap() {
                        pool.free(&ids).unwrap();
                    }
                }
            });
        }
    });
    settle(&pool);
    assert_eq!(engine.mapped(), NO_PAGES);
    pool.shutdown().unwrap();
}

/// What a scheduler does, whatever fails.
fn work(pool: &Pool) {
    let mut held = vec![];
    for n in [M + 1, 2 * M, M] {
        match pool.alloc(n) {
            Ok(Some(ids)) => held.extend(ids),
            Ok(None) | Err(PoolError::Driver { .. } | PoolError::Quarantined { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        settle(pool);
    }
    pool.free(&held).unwrap();
    settle(pool);
}

#[test]
fn a_rank_whose_driver_fails_any_call_stays_equal_to_the_others() {
    let mut lost_pages = 0;
    for k in 1.. {
        let sims: Vec<Arc<Sim>> = (0..3).map(|_| Sim::new()).collect();
        let engine = Engine::new(sims.iter().map(|sim| tensor(sim.clone())).collect());
        let pool = engine.pool(config(), Arc::new(NoMeter)).unwrap();
        sims[1].heal();
        sims[1].fail_at(k);
        work(&pool);
        let calls = sims[1].calls().total();
        sims[1].heal();
        // Pages that one rank lost are lost for all: the others may have them mapped or not.
        let lost: Vec<u32> = engine.tensors[1].quarantined_pages();
        let quarantined = pool.stats().unwrap().pages.quarantined;
        assert!(quarantined as usize >= lost.len(), "call {k}");
        lost_pages += quarantined;
        let known: Vec<Vec<u32>> = engine
            .tensors
            .iter()
            .map(|tensor| tensor.mapped_pages().into_iter().filter(|page| !lost.contains(page)).collect())
            .collect();
        if quarantined == 0 {
            assert_eq!(known[0], known[1], "call {k}");
            assert_eq!(known[0], known[2], "call {k}");
        }
        assert_eq!(engine.ranks.broken(), None, "call {k}");
        work(&pool);
        for tensor in &engine.tensors {
            assert_eq!(
                tensor.pending_transaction(),
                None,
                "call {k}: what a commit left is finished by the next"
            );
            assert_eq!(tensor.leaked_bytes(), 0, "call {k}");
        }
        let available = pool.available().unwrap();
        let ids = pool.alloc(available).unwrap().expect("a healed driver gives all that is not lost");
        assert_eq!(ids.len() as u32, (PAGES - quarantined) * M, "call {k}");
        pool.free(&ids).unwrap();
        pool.shutdown().unwrap();
        for sim in &sims {
            assert!(sim.refused().is_empty(), "call {k}: {:?}", sim.refused());
        }
        drop(pool);
        let Engine { servers, ranks, tensors, .. } = engine;
        drop((ranks, servers, tensors));
        sims.iter().for_each(|sim| sim.assert_clean());
        if calls < k {
            assert!(k > 20, "the failure came before {k} calls");
            break;
        }
    }
    assert!(lost_pages > 0, "an unmap that fails costs its page");
}

#[test]
fn a_rank_that_is_short_of_memory_is_load() {
    let sims: Vec<Arc<Sim>> = (0..2).map(|_| Sim::new()).collect();
    let engine = Engine::new(sims.iter().map(|sim| tensor(sim.clone())).collect());
    let pool = engine.pool(config(), Arc::new(NoMeter)).unwrap();
    sims[1].set_budget(2 * engine.ranks.page_bytes());
    assert_eq!(pool.alloc(3 * M).unwrap(), None);
    assert_eq!(engine.mapped(), NO_PAGES, "nothing stays on the rank that had it");
    let ids = pool.alloc(2 * M).unwrap().unwrap();
    assert_eq!(engine.mapped(), [0, 1]);
    assert_eq!(pool.refresh_credit(0).unwrap(), 0, "the least of all ranks");
    pool.free(&ids).unwrap();
    settle(&pool);
    assert_eq!(engine.mapped(), NO_PAGES);
}

#[test]
fn a_rank_that_dies_breaks_the_pool_at_once_and_by_name() {
    let engine = Engine::on_host(3);
    let pool = engine.pool(config(), Arc::new(NoMeter)).unwrap();
    let ids = pool.alloc(M).unwrap().unwrap();
    engine.servers[2].stop(); // the first of the second stage
    let deadline = Instant::now() + Duration::from_secs(1);
    let said = loop {
        match pool.available() {
            Ok(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            Ok(_) => panic!("not noticed while nothing is asked"),
            Err(error) => break error,
        }
    };
    assert!(matches!(said, PoolError::StateConsistency { .. }), "{said}");
    assert!(said.to_string().contains("stage 1") && said.to_string().contains("rank 0"), "{said}");
    for refused in [pool.alloc(1).map(drop), pool.free(&ids), pool.clear(), pool.shutdown().map(drop)] {
        assert_eq!(refused.unwrap_err().to_string(), said.to_string());
    }
    let began = Instant::now();
    drop(pool);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

#[test]
fn a_pool_that_is_made_over_broken_ranks_is_refused() {
    let engine = Engine::on_host(2);
    engine.servers[0].stop();
    let deadline = Instant::now() + Duration::from_secs(5);
    while engine.ranks.broken().is_none() {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
    let refused =
        engine.pool(PoolConfig { null_block: true, ..config() }, Arc::new(NoMeter)).map(drop).unwrap_err();
    assert!(matches!(refused, PoolError::StateConsistency { .. }), "{refused}");
}
