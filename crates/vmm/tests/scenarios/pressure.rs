//! Memory that ends: within a call, and while another range keeps some.

use std::sync::Arc;

use kvcached_vmm::host::Host;
use kvcached_vmm::sim::Sim;
use kvcached_vmm::{Layout, Unbacked, VmmError};

use super::ground::{Ground, words_of};
use super::model::{Effort, Model};
use super::scenario::Op;
use super::setup::{Cache, Setup, alone};

/// A device of each kind that has so much memory, told in runs and a half.
fn grounds(runs: u64) -> [Ground; 2] {
    let bytes = |granularity: u64| runs * 2 * granularity + granularity;
    let host = Host::with_total(bytes(Ground::host().driver().granularity())).unwrap();
    [Ground::Sim(Sim::with(4096, bytes(4096))), Ground::Host(Arc::new(host))]
}

#[test]
fn memory_that_ends_within_a_call_is_pressure_and_the_call_is_undone() {
    let _alone = alone();
    for setup in Setup::all() {
        let runs = setup.geometry(4096).runs_per_page();
        for short in 0..3 * runs {
            for ground in grounds(u64::from(setup.unbacked == Unbacked::Zero) + u64::from(runs + short)) {
                let range = setup.reserve(ground.driver()).unwrap();
                let mut model = Model::new(setup, &range);
                let op = Op::Map(vec![4]);
                model.step(&op, &op.run(&range), Effort { calls: 1, hits: 0 }, &range);
                let words = if ground.has_bytes() { words_of(&range, 4) } else { vec![] };
                words.iter().for_each(|at| ground.set_word(*at, 7));
                let held = ground.held_bytes().unwrap();

                let error = range.map(&[2, 4, 0, 1]).unwrap_err();
                let page = [2, 0, 1][(short / runs) as usize];
                assert!(
                    matches!(&error, VmmError::OutOfMemory { page: Some(p), .. } if *p == page),
                    "{error}"
                );
                assert!(error.is_out_of_memory());
                assert_eq!(ground.held_bytes(), Some(held));
                assert_eq!((range.mapped_pages(), range.leaked_bytes()), (vec![4], 0));
                ground.check_mappings(&range, &model);
                assert!(words.iter().all(|at| ground.word(*at) == 7));

                // What there is still serves.
                let fit = &[2, 0, 1][..(short / runs) as usize];
                assert_eq!(range.map(fit), Ok(fit.to_vec()));
                range.unmap(&[4]).unwrap();
                range.trim().unwrap();
                assert_eq!(range.map(&[3]), Ok(vec![3]));
                drop(range);
                ground.check_end(true);
            }
        }
    }
}

#[test]
fn an_error_says_what_was_short() {
    let _alone = alone();
    let said = |ground: &Ground| {
        let range = Setup::PLAIN.reserve(ground.driver()).unwrap();
        range.map(&[1, 0]).unwrap_err().to_string()
    };
    let [sim, host] = grounds(1);
    assert_eq!(said(&sim), "page 0: out of memory: create of 8192 bytes (code 999)");
    assert_eq!(said(&host), "page 0: out of memory: ftruncate (create) of 8192 bytes (code 12)");
}

#[test]
fn what_one_range_keeps_is_there_for_another() {
    let _alone = alone();
    for layout_of_keeper in [Setup::PLAIN.layout, Layout::PerLayer] {
        let keeper = Setup { layout: layout_of_keeper, cache: Cache::Everything, ..Setup::PLAIN };
        for setup in Setup::all() {
            let runs = |setup: Setup| u64::from(setup.geometry(4096).runs_per_page());
            // Enough for the pages of one of the two, and for the zeros.
            let zeros = u64::from(setup.unbacked == Unbacked::Zero);
            let all = [0, 1, 2];
            for ground in grounds(3 * runs(keeper).max(runs(setup)) + zeros) {
                let keeps = keeper.reserve(ground.driver()).unwrap();
                keeps.map(&all).unwrap();
                keeps.unmap(&all).unwrap();
                let kept = keeps.cached_bytes();
                assert_eq!((kept, ground.held_bytes()), (3 * keeps.geometry().page_bytes(), Some(kept)));
                let wants = setup.reserve(ground.driver()).unwrap();
                assert_eq!(wants.map(&all), Ok(all.to_vec()));
                let mapped = wants.mapped_bytes() + wants.zero_bytes();
                assert_eq!(ground.held_bytes(), Some(mapped + keeps.cached_bytes()));
                // Now nobody keeps any.
                let error = keeps.map(&[0, 1, 2, 3]).unwrap_err();
                assert!(error.is_out_of_memory(), "{error}");
                assert_eq!((keeps.mapped_bytes(), wants.mapped_pages()), (0, all.to_vec()));
                drop((wants, keeps));
                ground.check_end(true);
            }
        }
    }
}

#[test]
fn the_zeros_of_a_range_have_what_another_keeps() {
    let _alone = alone();
    let keeper = Setup { cache: Cache::Everything, ..Setup::PLAIN };
    for ground in grounds(1) {
        let keeps = keeper.reserve(ground.driver()).unwrap();
        keeps.map(&[0]).unwrap();
        keeps.unmap(&[0]).unwrap();
        let zeros = Setup { unbacked: Unbacked::Zero, ..Setup::PLAIN };
        let range = zeros.reserve(ground.driver()).unwrap();
        assert_eq!((range.zero_bytes(), keeps.cached_bytes()), (8192, 0));
        drop((range, keeps));
        ground.check_end(true);
    }
}

#[test]
fn what_could_not_be_released_for_another_is_kept() {
    let _alone = alone();
    let sim = Sim::with(4096, 2 * 8192);
    let keeper = Setup { cache: Cache::Everything, ..Setup::PLAIN };
    let (keeps, wants) = (keeper.reserve(sim.clone()).unwrap(), Setup::PLAIN.reserve(sim.clone()).unwrap());
    keeps.map(&[0, 1]).unwrap();
    keeps.unmap(&[0, 1]).unwrap();
    // create, release and release
    sim.fail_each(&[2]);
    assert_eq!(wants.map(&[0]), Ok(vec![0]));
    assert_eq!((keeps.cached_bytes(), sim.held_bytes()), (8192, 2 * 8192));
    sim.fail_each(&[2]);
    assert!(wants.map(&[1]).unwrap_err().is_out_of_memory());
    assert_eq!((keeps.cached_bytes(), sim.held_bytes()), (8192, 2 * 8192));
    sim.heal();
    assert_eq!(wants.map(&[1]), Ok(vec![1]));
    drop((keeps, wants));
    sim.assert_clean();
}

#[test]
fn what_cannot_be_cleared_is_released() {
    let _alone = alone();
    let sim = Sim::with(4096, 1 << 30);
    let setup = Setup { cache: Cache::Everything, ..Setup::PLAIN };
    let range = setup.reserve(sim.clone()).unwrap();
    range.map(&[0, 1]).unwrap();
    sim.fail_at(1);
    range.unmap(&[0, 1]).unwrap();
    let calls = sim.calls();
    assert_eq!((calls.clear, calls.unmap, calls.release, calls.total()), (1, 2, 2, 5));
    assert_eq!((range.cached_bytes(), range.leaked_bytes(), sim.held_bytes()), (0, 0, 0));
    // A device that can be cleared again serves the next page from what it keeps.
    sim.heal();
    range.map(&[0, 1]).unwrap();
    range.unmap(&[0]).unwrap();
    assert_eq!(range.cached_bytes(), range.geometry().page_bytes());
}
