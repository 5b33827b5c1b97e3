//! Histories of calls on a ledger, compared with the reference of its own tests after every call.
#![no_main]

#[path = "../../crates/ledger/tests/model/mod.rs"]
mod model;

use kvcached_ledger::{Layout, PageOrder, RetirePolicy};
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;

use model::{Op, Run};

/// Calls of one history. What is left of the input then is ignored.
const MAX_OPS: usize = 64;

#[derive(Debug)]
struct History {
    layout: Layout,
    policy: RetirePolicy,
    ops: Vec<Op>,
}

impl<'a> Arbitrary<'a> for History {
    fn arbitrary(input: &mut Unstructured<'a>) -> Result<Self> {
        // Most pools are small, where every case is near; a few have pages of more than one word of bits.
        let large = input.int_in_range(0u8..=15)? == 15;
        let (blocks, per_page, scale) = if large { (100..=300, 30..=140, 8) } else { (1..=40, 1..=7, 1) };
        let blocks_per_page = input.int_in_range(per_page)?;
        let layout = Layout {
            num_blocks: input.int_in_range(blocks)?,
            blocks_per_page,
            ids_per_page: blocks_per_page + input.int_in_range(0..=2)?,
            order: *input.choose(&[PageOrder::LowestFirst, PageOrder::HighestFirst])?,
        };
        let policy = *input.choose(&[RetirePolicy::Synchronous, RetirePolicy::Asynchronous])?;
        let mut ops = Vec::new();
        while !input.is_empty() && ops.len() < MAX_OPS {
            ops.push(op(input, scale)?);
        }
        Ok(History { layout, policy, ops })
    }
}

/// `scale` blocks where a small pool has one. What is likely here is what makes histories go on.
fn op(input: &mut Unstructured, scale: u32) -> Result<Op> {
    Ok(match input.int_in_range(0u8..=31)? {
        0..=5 => Op::Alloc(input.int_in_range(0..=20 * scale)?),
        6..=9 => Op::FreeSome(some(input, |input| Ok(usize::from(u8::arbitrary(input)?)))?),
        10 => Op::FreeRaw(some(input, |input| input.int_in_range(0..=60 * scale))?),
        11 => Op::Claim(some(input, |input| input.int_in_range(0..=60 * scale))?),
        12 => Op::Pin(usize::from(u8::arbitrary(input)?)),
        13 => Op::SetAside(input.int_in_range(0..=8 * scale)?),
        14 => Op::ReleaseSetAside,
        15..=16 => Op::SetTarget(input.int_in_range(0..=14)?),
        17 => Op::SetTarget(u32::MAX),
        18..=20 => Op::Back { n: input.int_in_range(0..=30 * scale)?, at_most: input.int_in_range(0..=5)? },
        21 => Op::BackPages(input.int_in_range(0..=5)?),
        22..=23 => Op::Unback {
            keep: input.int_in_range(0..=3)?,
            on_hand: input.int_in_range(0..=12 * scale)?,
            at_most: input.int_in_range(0..=7)?,
        },
        24..=26 => Op::Land { flight: usize::from(u8::arbitrary(input)?), lost: 0, undone: 0 },
        27 => Op::Land {
            flight: usize::from(u8::arbitrary(input)?),
            lost: input.int_in_range(0..=2)?,
            undone: input.int_in_range(0..=2)?,
        },
        28 => Op::Misreport(some(input, |input| input.int_in_range(0..=14))?),
        29 => Op::Begin,
        30 => Op::End(input.int_in_range(0..=3)?),
        _ if bool::arbitrary(input)? => Op::Clear,
        _ => Op::ClearAll,
    })
}

fn some<'a, T>(
    input: &mut Unstructured<'a>,
    each: impl Fn(&mut Unstructured<'a>) -> Result<T>,
) -> Result<Vec<T>> {
    (0..input.int_in_range(0u8..=12)?).map(|_| each(input)).collect()
}

fuzz_target!(|history: History| {
    let mut run = Run::new(history.layout, history.policy);
    for op in history.ops {
        run.step(op);
    }
});
