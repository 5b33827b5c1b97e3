//! Where a range lies, and which ranges there cannot be.

use std::sync::Arc;

use kvcached_vmm::host::Host;
use kvcached_vmm::sim::Sim;
use kvcached_vmm::{Driver, FTensor, Geometry, Layout, Options, Shape, Target, TransactionError, VmmError};

use super::setup::{BUFFERS, Cache, PAGES, Setup, alone};

const G: u64 = 2 << 20;

#[test]
fn addresses_are_those_of_the_geometry() {
    let _alone = alone();
    let sim = Sim::new();
    let chunked = Setup::PLAIN.reserve(sim.clone()).unwrap();
    let page = 2 * G;
    let bytes = u64::from(PAGES) * page;
    // Blocks of G / 4: a page has two of each buffer and ids for eight. One more page, for the last rows.
    assert_eq!((chunked.num_pages(), chunked.id_space(), chunked.num_blocks()), (PAGES, 8 * PAGES, 10));
    assert_eq!(chunked.virtual_bytes(), bytes + page);
    for i in 0..BUFFERS {
        assert_eq!(chunked.buffer(i), Some((chunked.base() + i as usize * (G / 2) as usize, bytes)));
    }
    assert_eq!((chunked.buffer(BUFFERS), chunked.buffer_stride()), (None, G / 2));
    // Six blocks in every run, and no spare page.
    let per_layer = Setup { layout: Layout::PerLayer, ..Setup::PLAIN }.reserve(sim.clone()).unwrap();
    assert_eq!((per_layer.num_pages(), per_layer.id_space(), per_layer.num_blocks()), (PAGES, 40, 40));
    assert_eq!(per_layer.virtual_bytes(), u64::from(BUFFERS) * bytes);
    for i in 0..BUFFERS {
        assert_eq!(per_layer.buffer(i), Some((per_layer.base() + i as usize * bytes as usize, bytes)));
    }
    assert_eq!((per_layer.buffer(BUFFERS), per_layer.buffer_stride()), (None, bytes));
    // The memory of a page lies under its blocks.
    per_layer.map(&[1]).unwrap();
    let runs: Vec<_> = (0..BUFFERS)
        .map(|i| (per_layer.buffer(i).unwrap().0 + per_layer.geometry().block_bytes() as usize * 8, 2 * G))
        .collect();
    assert_eq!(sim.mappings(), runs);
}

#[test]
fn a_range_that_does_not_suit_is_refused() {
    let geometry = Setup::PLAIN.geometry(G);
    let reserve = |driver: &Arc<Sim>, num_blocks| {
        FTensor::reserve(driver.clone(), geometry, num_blocks, Options::default()).unwrap_err().to_string()
    };
    let (coarse, sim) = (Sim::with(3 << 20, 1 << 40), Sim::new());
    assert_eq!(
        reserve(&coarse, 8),
        "a page of 4 MiB is not a multiple of the device's granularity of 3 MiB: solve for this device"
    );
    assert_eq!(reserve(&sim, 0), "num_blocks must be at least 1");
    assert!(reserve(&sim, 1 << 40).contains("reserve at most"));
    assert_eq!((coarse.calls().total(), sim.calls().total()), (0, 0));
}

#[test]
fn a_machine_size_range_costs_no_memory() {
    let _alone = alone();
    let host = Arc::new(Host::with_total(16 << 20).unwrap());
    let geometry = Geometry::solve(Shape::new(64, 32 << 10, 16), Target::new(host.granularity())).unwrap();
    let range = FTensor::reserve(host.clone(), geometry, 262_143 * 8, Options::default()).unwrap();
    assert_eq!(range.virtual_bytes(), 262_144 * (16 << 20)); // 4 TiB
    assert_eq!((range.mapped_bytes(), host.resident_bytes()), (0, Ok(0)));
}

#[test]
fn an_outcome_is_forgotten_some_day_and_its_id_refused() {
    let _alone = alone();
    let sim = Sim::new();
    let range = Setup { cache: Cache::Everything, ..Setup::PLAIN }.reserve(sim.clone()).unwrap();
    for id in 1..=65 {
        range.map(&[0]).unwrap();
        range.prepare_unmap(id, &[0]).unwrap();
        range.commit_unmap(id).unwrap();
    }
    assert_eq!((range.commit_unmap(65), range.commit_unmap(2)), (Ok(()), Ok(())));
    let forgotten = Err(VmmError::Transaction(TransactionError::Forgotten { id: 1 }));
    assert_eq!((range.commit_unmap(1), range.abort_unmap(1), range.prepare_unmap(1, &[])), {
        (forgotten.clone(), forgotten.clone(), forgotten)
    });
}
