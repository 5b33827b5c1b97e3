//! Random histories against a reference that scans everything and remembers what it issued in a set.
#![allow(clippy::unwrap_used)]

mod model;

use std::ops::Range;

use kvcached_ledger::{Layout, PageOrder, RetirePolicy};
use proptest::prelude::*;

use model::{Op, Run};

/// `scale` blocks where a small pool has one.
fn op(scale: u32) -> impl Strategy<Value = Op> {
    // Lost pages stay lost: more of them would leave histories with nothing to do.
    let seldom = |weight| prop_oneof![weight => Just(0usize), 1 => 1usize..3];
    prop_oneof![
        12 => (0u32..20 * scale).prop_map(Op::Alloc),
        8 => prop::collection::vec(any::<usize>(), 0..12 * scale as usize).prop_map(Op::FreeSome),
        2 => prop::collection::vec(0u32..60 * scale, 0..4).prop_map(Op::FreeRaw),
        2 => prop::collection::vec(0u32..60 * scale, 0..4).prop_map(Op::Claim),
        1 => any::<usize>().prop_map(Op::Pin),
        2 => (0u32..8 * scale).prop_map(Op::SetAside),
        2 => Just(Op::ReleaseSetAside),
        5 => prop_oneof![0u32..6, 0u32..14, Just(u32::MAX)].prop_map(Op::SetTarget),
        8 => (0u32..30 * scale, 0u32..6).prop_map(|(n, at_most)| Op::Back { n, at_most }),
        2 => (0u32..6).prop_map(Op::BackPages),
        4 => (0u32..4, 0u32..12 * scale, 0u32..8)
            .prop_map(|(keep, on_hand, at_most)| Op::Unback { keep, on_hand, at_most }),
        14 => (any::<usize>(), seldom(20), seldom(5))
            .prop_map(|(flight, lost, undone)| Op::Land { flight, lost, undone }),
        1 => prop::collection::vec(0u32..14, 0..4).prop_map(Op::Misreport),
        2 => Just(Op::Begin),
        2 => (0u64..4).prop_map(Op::End),
        1 => Just(Op::Clear),
        1 => Just(Op::ClearAll),
    ]
}

fn run(layout: Layout, policy: RetirePolicy, ops: Vec<Op>) {
    let mut run = Run::new(layout, policy);
    for op in ops {
        run.step(op);
    }
}

fn layouts(num_blocks: Range<u32>, blocks_per_page: Range<u32>) -> impl Strategy<Value = Layout> {
    (num_blocks, blocks_per_page, 0u32..3, any::<bool>()).prop_map(
        |(num_blocks, blocks_per_page, padding, highest)| {
            let order = if highest { PageOrder::HighestFirst } else { PageOrder::LowestFirst };
            Layout { num_blocks, blocks_per_page, ids_per_page: blocks_per_page + padding, order }
        },
    )
}

fn policies() -> impl Strategy<Value = RetirePolicy> {
    prop_oneof![Just(RetirePolicy::Synchronous), Just(RetirePolicy::Asynchronous)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_reference(
        layout in layouts(1..40, 1..7),
        policy in policies(),
        ops in prop::collection::vec(op(1), 1..80),
    ) {
        run(layout, policy, ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Pages of more than one word of bits, and pools of more than one level.
    #[test]
    fn agrees_over_many_blocks(
        layout in layouts(100..500, 30..140),
        policy in policies(),
        ops in prop::collection::vec(op(8), 1..60),
    ) {
        run(layout, policy, ops);
    }
}
