//! What a call costs, in release mode on a quiet machine:
//! `cargo test -p kvcached-ledger --release --test speed -- --ignored --nocapture`.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::time::{Duration, Instant};

use kvcached_ledger::{Layout, Ledger, PageOrder, RetirePolicy};

const ROUNDS: u32 = 5_000;

fn ledger(pages: u32, m: u32) -> Ledger {
    let layout = Layout {
        num_blocks: pages * m,
        blocks_per_page: m,
        ids_per_page: (m * 4).min(i32::MAX as u32 / pages),
        order: PageOrder::LowestFirst,
    };
    let mut ledger = Ledger::new(layout, RetirePolicy::Asynchronous).unwrap();
    let planned = ledger.plan_pages(pages);
    ledger.backed(&planned).unwrap();
    ledger
}

/// Full but for one block in each of `holes` pages.
fn holed(pages: u32, m: u32, holes: u32) -> Ledger {
    let mut ledger = ledger(pages, m);
    let ids = ledger.alloc(pages * m).unwrap();
    let freed: Vec<u32> = (0..holes).map(|page| ids[(page * m) as usize]).collect();
    ledger.free(&freed).unwrap();
    ledger
}

/// The median round of each, in ns: what else runs on the machine only adds.
fn median(mut round: impl FnMut() -> (Duration, Duration)) -> (f64, f64) {
    let (mut first, mut second): (Vec<_>, Vec<_>) = (0..ROUNDS).map(|_| round()).unzip();
    let middle = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_nanos() as f64
    };
    (middle(&mut first), middle(&mut second))
}

/// `batch` calls of `n` blocks each and their frees, in ns a call.
fn cost(ledger: &mut Ledger, n: u32, batch: u32) -> (f64, f64) {
    let mut ids: Vec<Vec<u32>> = vec![Vec::with_capacity(n as usize); batch as usize];
    let (alloc, free) = median(|| {
        let start = Instant::now();
        for ids in &mut ids {
            ids.clear();
            assert!(ledger.alloc_into(n, ids));
        }
        let allocated = Instant::now();
        for ids in &ids {
            ledger.free(ids).unwrap();
        }
        (allocated - start, allocated.elapsed())
    });
    (alloc / f64::from(batch), free / f64::from(batch))
}

fn report(what: &str, (alloc, free): (f64, f64)) {
    println!("{what:60} alloc {alloc:8.1} ns   free {free:8.1} ns");
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    for (pages, m) in [(64, 8), (4096, 8), (65_536, 8), (65_536, 128), (80, 100_000), (65_536, 1)] {
        let mut ledger = ledger(pages, m);
        report(&format!("1 block of fresh pages, {pages} pages of {m}"), cost(&mut ledger, 1, 32));
    }
    for holes in [10, 1000, 60_000] {
        let mut ledger = holed(65_536, 16, holes);
        report(&format!("1 block over {holes} one-block holes, 65536 pages of 16"), cost(&mut ledger, 1, 8));
    }
    for (pages, m) in [(4096, 8), (4096, 16), (65_536, 128), (80, 100_000), (65_536, 1)] {
        let mut ledger = ledger(pages, m);
        report(&format!("256 blocks of fresh pages, {pages} pages of {m}"), cost(&mut ledger, 256, 1));
    }
    for (pages, m) in [(1000, 16), (65_536, 16), (65_536, 128)] {
        let mut ledger = holed(pages, m, 1000);
        report(&format!("256 blocks over 1000 holes, {pages} pages of {m}"), cost(&mut ledger, 256, 1));
    }
    let mut ledger = holed(65_536, 16, 60_000);
    assert!(ledger.set_aside(10_000));
    report("256 blocks with 10000 set aside, 65536 pages of 16", {
        let held: Vec<u32> = (0..256).map(|page| page * 64 + 5).collect();
        let (free, claim) = median(|| {
            let start = Instant::now();
            ledger.free(&held).unwrap();
            let freed = Instant::now();
            ledger.claim(&held).unwrap();
            (freed - start, freed.elapsed())
        });
        (claim, free)
    });
}
