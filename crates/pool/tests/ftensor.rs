//! The pool over a real range of addresses on the simulated driver, each driver call failing in turn; and its figures in a record.
#![allow(clippy::unwrap_used)]

mod fake;

use std::sync::Arc;

use fake::Steady;
use kvcached_control::{InstanceRecord, Listed, Terms, list};
use kvcached_pool::{Layout, NoMeter, PageOrder, Pool, PoolConfig, PoolError};
use kvcached_vmm::sim::Sim;
use kvcached_vmm::{Driver, FTensor, Geometry, Options, Shape, Target, Unbacked};

const PAGES: u64 = 6;

fn ftensor(sim: &Arc<Sim>) -> Arc<FTensor> {
    ftensor_with(sim, Options::default())
}

fn ftensor_with(sim: &Arc<Sim>, options: Options) -> Arc<FTensor> {
    let shape = Shape::new(4, 64 << 10, 16);
    let target = Target { page_bytes: Some(2 << 20), ..Target::new(2 << 20) };
    let geometry = Geometry::solve(shape, target).unwrap();
    let num_blocks = PAGES * u64::from(geometry.blocks_per_page());
    let driver: Arc<dyn Driver> = sim.clone();
    Arc::new(FTensor::reserve(driver, geometry, num_blocks, options).unwrap())
}

fn config(ftensor: &FTensor) -> PoolConfig {
    let geometry = ftensor.geometry();
    let layout = Layout {
        num_blocks: ftensor.num_blocks() as u32,
        blocks_per_page: geometry.blocks_per_page(),
        ids_per_page: geometry.ids_per_page(),
        order: PageOrder::LowestFirst,
    };
    PoolConfig {
        layout,
        null_block: false,
        async_sched: false,
        min_reserved_bytes: 0,
        max_reserved_bytes: 1 << 20,
        patience: PoolConfig::PATIENCE,
    }
}

#[test]
fn a_failure_at_every_driver_call() {
    for k in 1.. {
        let sim = Sim::new();
        let range = ftensor(&sim);
        let config = config(&range);
        let m = config.layout.blocks_per_page;
        let pool = Steady::over(Pool::new(config, range.clone(), Arc::new(NoMeter)).unwrap());
        sim.fail_at(k);
        let mut held = Vec::new();
        for n in [m + 1, 2 * m, m] {
            match pool.alloc(n) {
                Ok(Some(ids)) => held.extend(ids),
                Ok(None) | Err(PoolError::Driver { .. } | PoolError::Quarantined { .. }) => {}
                Err(error) => unreachable!("{error}"),
            }
        }
        pool.free(&held).unwrap();
        let calls = sim.calls().total();
        sim.heal();
        let stats = pool.stats().unwrap();
        assert_eq!(stats.held_blocks, 0);
        assert_eq!(stats.mapped_bytes, range.mapped_bytes());
        assert_eq!(stats.pages.quarantined as usize, range.quarantined_pages().len());
        let ids = pool.alloc(stats.available_blocks).unwrap().unwrap();
        pool.free(&ids).unwrap();
        pool.shutdown().unwrap();
        assert_eq!(range.mapped_pages(), [0u32; 0]);
        assert!(sim.refused().is_empty(), "{:?}", sim.refused());
        if calls < k {
            assert!(k > 20, "the failure came before {k} calls");
            drop((pool, range));
            sim.assert_clean();
            break;
        }
    }
}

#[test]
fn memory_is_shared_with_others() {
    let sim = Sim::new();
    let range = ftensor(&sim);
    let pool = Steady::over(Pool::new(config(&range), range.clone(), Arc::new(NoMeter)).unwrap());
    let m = range.geometry().blocks_per_page();
    sim.set_budget(2 * range.geometry().page_bytes());
    assert_eq!(pool.alloc(3 * m).unwrap(), None);
    assert_eq!(range.mapped_bytes(), 0);
    assert_eq!(pool.reserve_demand(3 * m).unwrap(), 2 * m);
    assert_eq!(pool.alloc(2 * m).unwrap().unwrap().len(), 2 * m as usize);
    pool.shutdown().unwrap();
    drop((pool, range));
    sim.assert_clean();
}

#[test]
fn pages_that_others_unmapped_are_not_trusted_again() {
    let sim = Sim::new();
    let range = ftensor(&sim);
    let pool = Steady::over(Pool::new(config(&range), range.clone(), Arc::new(NoMeter)).unwrap());
    let m = range.geometry().blocks_per_page();
    let ids = pool.alloc(3 * m).unwrap().unwrap();
    range.unmap(&[1]).unwrap();
    pool.free(&ids).unwrap();
    assert_eq!(pool.stats().unwrap().pages.quarantined, 1);
    pool.shutdown().unwrap();
    assert_eq!(range.mapped_pages(), [0u32; 0]);
}

#[test]
fn figures_reach_the_record() {
    let directory = tempfile::tempdir().unwrap();
    let records = directory.path().join("kvcached");
    let record = InstanceRecord::create(&records, "one", "test", "cpu", Terms::default()).unwrap();
    let sim = Sim::new();
    let range = ftensor(&sim);
    let page_bytes = range.geometry().page_bytes();
    let row = record.pool_row("kv").unwrap();
    let pool = Pool::new(
        PoolConfig { null_block: true, min_reserved_bytes: page_bytes, ..config(&range) },
        range.clone(),
        Arc::new(row),
    )
    .unwrap();
    let seen = |records| match list(records).unwrap().as_slice() {
        [Listed::Instance(view)] => view.pools[0].clone(),
        other => unreachable!("{other:?}"),
    };
    let figures = seen(&records);
    assert_eq!((figures.used_bytes, figures.reserved_bytes), (page_bytes, page_bytes));
    assert_eq!((figures.virtual_bytes, figures.quarantined_bytes), (range.virtual_bytes(), 0));
    pool.shutdown().unwrap();
    match list(&records).unwrap().as_slice() {
        [Listed::Instance(view)] => assert!(view.pools.is_empty(), "{:?}", view.pools),
        other => unreachable!("{other:?}"),
    }
}

#[test]
fn what_is_kept_beside_the_pages_counts_as_used_and_is_trimmed() {
    let directory = tempfile::tempdir().unwrap();
    let records = directory.path().join("kvcached");
    let record = InstanceRecord::create(&records, "one", "test", "cpu", Terms::default()).unwrap();
    let sim = Sim::new();
    let page_bytes = 2 << 20;
    let range = ftensor_with(&sim, Options { unbacked: Unbacked::Zero, cache_bytes: 2 * page_bytes });
    let config = PoolConfig { max_reserved_bytes: page_bytes, ..config(&range) };
    let pool = Pool::new(config, range.clone(), Arc::new(record.pool_row("kv").unwrap())).unwrap();
    let pool = Steady::over(pool);
    let ids = pool.alloc(5 * range.geometry().blocks_per_page()).unwrap().unwrap();
    pool.free(&ids).unwrap();
    // One page in reserve, two kept, two released; and the zeros.
    let usage = pool.stats().unwrap().usage;
    assert_eq!((usage.reserved_bytes, usage.beside_bytes), (page_bytes, 3 * page_bytes));
    assert_eq!(sim.held_bytes(), 4 * page_bytes);
    let reserved = || match list(&records).unwrap().as_slice() {
        [Listed::Instance(view)] => view.pools[0].reserved_bytes,
        other => unreachable!("{other:?}"),
    };
    assert_eq!(reserved(), 4 * page_bytes);
    // The reserve's page has no room among those kept.
    assert_eq!(pool.trim().unwrap(), 3 * page_bytes);
    assert_eq!((reserved(), sim.held_bytes()), (page_bytes, page_bytes));
    assert_eq!(pool.trim().unwrap(), 0);
    // Whom the device refuses memory gets what another range keeps.
    let ids = pool.alloc(2 * range.geometry().blocks_per_page()).unwrap().unwrap();
    pool.free(&ids).unwrap();
    assert_eq!(range.cached_bytes(), page_bytes);
    let other = ftensor(&sim);
    sim.set_budget(sim.held_bytes());
    assert_eq!(other.map(&[0]), Ok(vec![0]));
    assert_eq!(range.cached_bytes(), 0);
    sim.heal();
    drop((pool, range, other));
    sim.assert_clean();
}

#[test]
fn a_pool_that_is_shut_down_leaves_its_row_to_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let record =
        InstanceRecord::create(&folder.path().join("records"), "two", "test", "cpu", Terms::default())
            .unwrap();
    let sim = Sim::new();
    let range = ftensor(&sim);
    let make = || {
        let row = Arc::new(record.pool_row("KV cache")?);
        Ok::<_, kvcached_control::ControlError>(Pool::new(config(&range), range.clone(), row).unwrap())
    };
    let first = make().unwrap();
    assert!(make().is_err(), "a living pool keeps its row");
    first.shutdown().unwrap();
    make().unwrap();
    drop(first);
}
