//! Scenarios and failures made up by chance.

use kvcached_vmm::live_ranges;
use proptest::prelude::*;

use super::ground::Ground;
use super::runner::run;
use super::scenario::{Op, Plan};
use super::setup::{PAGES, Setup, alone};

fn op() -> impl Strategy<Value = Op> {
    // One page in many is none of the range.
    let page = prop_oneof![40 => 0..PAGES, 1 => Just(PAGES)];
    let pages = proptest::collection::vec(page, 0..5);
    let id = 1u64..5;
    prop_oneof![
        6 => pages.clone().prop_map(Op::Map),
        4 => pages.clone().prop_map(Op::Unmap),
        3 => (id.clone(), pages).prop_map(|(id, pages)| Op::Prepare(id, pages)),
        2 => id.clone().prop_map(Op::Commit),
        2 => id.prop_map(Op::Abort),
        1 => Just(Op::Trim),
    ]
}

/// Unmaps only what is mapped, if nothing fails, and decides what is pending: chance alone would seldom do either.
fn sensible(ops: Vec<Op>) -> Vec<Op> {
    let (mut mapped, mut kept, mut pending) = (vec![], vec![], None);
    let narrow = |pages: Vec<u32>, mapped: &[u32]| -> Vec<u32> {
        pages.into_iter().filter(|page| mapped.contains(page)).collect()
    };
    let mut sensible = vec![];
    for (next, op) in (1..).zip(ops) {
        sensible.push(match (op, pending) {
            (Op::Map(pages), _) => {
                let pages: Vec<u32> = pages.into_iter().filter(|p| *p < PAGES && !kept.contains(p)).collect();
                mapped.extend(pages.iter().copied());
                Op::Map(pages)
            }
            (Op::Unmap(pages), _) => {
                let pages = narrow(pages, &mapped);
                mapped.retain(|page| !pages.contains(page));
                Op::Unmap(pages)
            }
            (Op::Prepare(_, pages), None) => {
                let pages = narrow(pages, &mapped);
                mapped.retain(|page| !pages.contains(page));
                (kept, pending) = (pages.clone(), Some(next));
                Op::Prepare(next, pages)
            }
            (Op::Commit(_), Some(id)) => {
                (kept, pending) = (vec![], None);
                Op::Commit(id)
            }
            (Op::Abort(_), Some(id)) => {
                mapped.append(&mut kept);
                pending = None;
                Op::Abort(id)
            }
            (op, _) => op,
        });
    }
    sensible
}

fn scenario() -> impl Strategy<Value = Vec<Op>> {
    let ops = || proptest::collection::vec(op(), 0..14);
    prop_oneof![1 => ops(), 3 => ops().prop_map(sensible)]
}

/// Of the calls after the range was reserved: the part of the way at which the first fails, and how far the next is from it.
fn failures() -> impl Strategy<Value = (f64, u32)> {
    (0.0..1.0, prop_oneof![Just(0), 1u32..6, 6u32..60])
}

/// Runs a scenario without failures, then with one or two, or with nothing but failures from some call on.
fn check(ground: impl Fn() -> Ground, setup: usize, ops: &[Op], (first, more): (f64, u32), for_good: bool) {
    let _alone = alone();
    let setup = Setup::all()[setup];
    let healthy = run(&ground(), setup, ops, Plan::Healthy);
    let k = healthy.built + 1 + (first * f64::from(healthy.calls - healthy.built)) as u32;
    let plan = match more {
        _ if for_good => Plan::From(k),
        0 => Plan::Single(k),
        more => Plan::Pair(k, k + more),
    };
    let before = live_ranges();
    let ran = run(&ground(), setup, ops, plan);
    assert_eq!(live_ranges(), before + usize::from(ran.stuck));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2500, ..ProptestConfig::default() })]

    #[test]
    fn any_scenario_under_any_failure_of_a_simulated_device(
        setup in 0..Setup::all().len(),
        ops in scenario(),
        failures in failures(),
        for_good in proptest::bool::weighted(0.2),
    ) {
        check(Ground::sim, setup, &ops, failures, for_good);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 500, ..ProptestConfig::default() })]

    // Not for good: real addresses that stay reserved make every later look at the kernel's list of them longer.
    #[test]
    fn any_scenario_under_any_failure_over_real_memory(
        setup in 0..Setup::all().len(), ops in scenario(), failures in failures(),
    ) {
        check(Ground::host, setup, &ops, failures, false);
    }
}
