//! What it costs to be charged and to be counted, in release mode on a quiet machine:
//! `cargo test -p kvcached-control --release --test speed -- --ignored --nocapture`.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::path::Path;
use std::time::{Duration, Instant};

use kvcached_control::{BudgetShare, Counter, InstanceRecord, Terms, Timer};

const ROUNDS: usize = 20_000;
const PAGE: u64 = 16 << 20;
const BUDGET: u64 = 140 << 30;

fn member(dir: &Path, number: usize) -> (InstanceRecord, BudgetShare) {
    let terms = Terms { limit_bytes: None, min_bytes: PAGE };
    let record = InstanceRecord::create(dir, &format!("m{number}"), "speed", "cuda:0", terms).unwrap();
    let share = BudgetShare::join(dir, &record, "GPU-0", BUDGET, None).unwrap();
    (record, share)
}

/// Median and 99th percentile of the rounds, ns a call.
fn spread(calls: u32, mut round: impl FnMut()) -> (u128, u128) {
    let mut times: Vec<Duration> = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let began = Instant::now();
        round();
        times.push(began.elapsed() / calls);
    }
    times.sort_unstable();
    (times[ROUNDS / 2].as_nanos(), times[ROUNDS * 99 / 100].as_nanos())
}

#[test]
#[ignore = "measures"]
fn a_page_is_charged_and_given_back() {
    for neighbours in [0, 1, 3, 15, 63] {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("records");
        let others: Vec<_> = (1..=neighbours).map(|number| member(&dir, number)).collect();
        let (_record, share) = member(&dir, 0);
        others.iter().for_each(|(_, other)| other.take(PAGE).unwrap());
        let (median, late) = spread(2, || {
            share.take(PAGE).unwrap();
            share.give(PAGE);
        });
        let (room, _) = spread(1, || {
            std::hint::black_box(share.room());
        });
        println!(
            "{neighbours:2} neighbours: take or give {median} ns (99 of 100: {late} ns); room {room} ns"
        );
    }
}

#[test]
#[ignore = "measures"]
fn a_page_is_charged_while_others_are() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    for busy in [1, 3] {
        let ending = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for number in 1..=busy {
                let (dir, ending) = (&dir, &ending);
                scope.spawn(move || {
                    let (_record, share) = member(dir, number);
                    while !ending.load(std::sync::atomic::Ordering::Relaxed) {
                        share.take(PAGE).unwrap();
                        share.give(PAGE);
                        // As often as one that backs a page each time: 33 us of driver calls.
                        std::thread::sleep(Duration::from_micros(33));
                    }
                });
            }
            let (_record, share) = member(&dir, 0);
            let (median, late) = spread(2, || {
                share.take(PAGE).unwrap();
                share.give(PAGE);
            });
            ending.store(true, std::sync::atomic::Ordering::Relaxed);
            println!("{busy} that back pages all the time: take or give {median} ns (99 of 100: {late} ns)");
        });
    }
}

#[test]
#[ignore = "measures"]
fn figures_are_shown_and_counted() {
    let home = tempfile::tempdir().unwrap();
    let (record, _share) = member(&home.path().join("records"), 0);
    let row = record.pool_row("kv").unwrap();
    let (shown, _) = spread(100, || (0..100).for_each(|n| row.set(n, n, n, n)));
    let (counted, _) = spread(100, || (0..100).for_each(|n| record.metrics().add(Counter::PagesMapped, n)));
    let time = Duration::from_micros(30);
    let (timed, _) = spread(100, || (0..100).for_each(|_| record.metrics().time(Timer::Map, time)));
    println!("figures of a pool {shown} ns, a counter {counted} ns, a time {timed} ns");
}
