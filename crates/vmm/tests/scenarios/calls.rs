//! What each step costs in driver calls, and what they would take on a GPU.

use std::sync::Arc;
use std::time::Duration;

use kvcached_vmm::sim::{Calls, Latency, Sim};
use kvcached_vmm::{FTensor, Geometry, Layout, Options, Shape, Target, Unbacked};

use super::scenario::Op;
use super::setup::alone;

const G: u64 = 2 << 20;

fn reserve(sim: &Arc<Sim>, layout: Layout, num_buffers: u32, options: Options) -> FTensor {
    let shape = Shape::new(num_buffers, 32 << 10, 16);
    let geometry =
        Geometry::solve(shape, Target { layout, page_bytes: Some(16 << 20), ..Target::new(G) }).unwrap();
    FTensor::reserve(sim.clone(), geometry, 4 * u64::from(geometry.blocks_per_page()), options).unwrap()
}

/// The driver calls of each step: of each page, in each of its runs, that many, beside those of the call as a whole.
#[derive(Debug, Clone, Copy)]
struct Price {
    map: Calls,
    map_kept: Calls,
    unmap: Calls,
    unmap_kept: Calls,
    prepare: Calls,
    commit: Calls,
    abort: Calls,
    /// Of a call, whatever it is about: a wait for the device.
    whole: Calls,
}

const NONE: Calls = Calls {
    reserve: 0,
    free: 0,
    create: 0,
    release: 0,
    map: 0,
    set_access: 0,
    clear: 0,
    unmap: 0,
    mem_info: 0,
    synchronise: 0,
};

/// Three calls to back a page, two to give it back, none more for its buffers.
const HOLE: Price = Price {
    map: Calls { create: 1, map: 1, set_access: 1, ..NONE },
    map_kept: Calls { map: 1, set_access: 1, ..NONE },
    unmap: Calls { unmap: 1, release: 1, ..NONE },
    unmap_kept: Calls { unmap: 1, ..NONE },
    prepare: Calls { unmap: 1, ..NONE },
    commit: Calls { release: 1, ..NONE },
    abort: Calls { map: 1, set_access: 1, ..NONE },
    whole: NONE,
};

/// The same, with the zeros taken away before and laid after.
const ZERO: Price = Price {
    map: Calls { unmap: 1, create: 1, map: 1, set_access: 1, ..NONE },
    map_kept: Calls { unmap: 1, map: 1, set_access: 1, ..NONE },
    unmap: Calls { unmap: 1, map: 1, set_access: 1, release: 1, ..NONE },
    unmap_kept: Calls { unmap: 1, map: 1, set_access: 1, ..NONE },
    prepare: Calls { unmap: 1, map: 1, set_access: 1, ..NONE },
    commit: Calls { release: 1, ..NONE },
    abort: Calls { unmap: 1, map: 1, set_access: 1, ..NONE },
    whole: Calls { synchronise: 1, ..NONE },
};

/// `n` times one, and the other.
fn sum(n: u32, each: Calls, whole: Calls) -> Calls {
    Calls {
        reserve: n * each.reserve + whole.reserve,
        free: n * each.free + whole.free,
        create: n * each.create + whole.create,
        release: n * each.release + whole.release,
        map: n * each.map + whole.map,
        set_access: n * each.set_access + whole.set_access,
        clear: n * each.clear + whole.clear,
        unmap: n * each.unmap + whole.unmap,
        mem_info: n * each.mem_info + whole.mem_info,
        synchronise: n * each.synchronise + whole.synchronise,
    }
}

fn cost(sim: &Sim, range: &FTensor, op: Op) -> Calls {
    sim.heal();
    op.run(range).unwrap();
    sim.calls()
}

#[test]
fn three_calls_back_a_page_and_two_give_it_back_whatever_its_buffers_but_a_run_each_per_layer() {
    let _alone = alone();
    for (unbacked, price) in [(Unbacked::Hole, HOLE), (Unbacked::Zero, ZERO)] {
        for layout in [Layout::Chunked, Layout::PerLayer] {
            for buffers in [1, 2, 64] {
                let sim = Sim::new();
                let range = reserve(&sim, layout, buffers, Options { unbacked, ..Options::default() });
                let runs = if layout == Layout::PerLayer { buffers } else { 1 };
                let expect = |op: Op, pages: u32, each: Calls, whole: Calls| {
                    assert_eq!(
                        cost(&sim, &range, op.clone()),
                        sum(pages * runs, each, whole),
                        "{op:?} of {range:?}"
                    );
                };
                expect(Op::Map(vec![1, 3, 2]), 3, price.map, price.whole);
                expect(Op::Map(vec![2, 1, 1]), 0, NONE, NONE);
                expect(Op::Unmap(vec![2, 1, 2]), 2, price.unmap, price.whole);
                expect(Op::Map(vec![0, 1]), 2, price.map, price.whole);
                expect(Op::Prepare(1, vec![0, 3]), 2, price.prepare, price.whole);
                expect(Op::Prepare(1, vec![3, 0]), 0, NONE, NONE);
                expect(Op::Abort(1), 2, price.abort, price.whole);
                expect(Op::Abort(1), 0, NONE, NONE);
                expect(Op::Prepare(2, vec![1, 3]), 2, price.prepare, price.whole);
                expect(Op::Commit(2), 2, price.commit, NONE);
                expect(Op::Commit(2), 0, NONE, NONE);
                expect(Op::Trim, 0, NONE, NONE);
                expect(Op::Map(vec![]), 0, NONE, NONE);
                expect(Op::Unmap(vec![]), 0, NONE, NONE);
            }
        }
    }
}

#[test]
fn a_handle_that_was_kept_saves_its_creation_and_its_release_for_one_call_that_clears() {
    let _alone = alone();
    for (unbacked, price) in [(Unbacked::Hole, HOLE), (Unbacked::Zero, ZERO)] {
        for layout in [Layout::Chunked, Layout::PerLayer] {
            let sim = Sim::new();
            let geometry = *reserve(&sim, layout, 2, Options::default()).geometry();
            let runs = geometry.runs_per_page();
            let options = Options { unbacked, cache_bytes: 2 * geometry.page_bytes() };
            let range = reserve(&sim, layout, 2, options);
            range.map(&[0, 1, 2]).unwrap();
            // Two pages fit, the third is released.
            let clear = Calls { clear: 1, ..price.whole };
            let third = sum(runs, price.unmap, clear);
            assert_eq!(cost(&sim, &range, Op::Unmap(vec![0, 1, 2])), sum(2 * runs, price.unmap_kept, third));
            let third = sum(runs, price.map, price.whole);
            assert_eq!(cost(&sim, &range, Op::Map(vec![3, 1, 0])), sum(2 * runs, price.map_kept, third));
            range.unmap(&[3]).unwrap();
            let release = Calls { release: runs, ..NONE };
            assert_eq!(cost(&sim, &range, Op::Trim), release);
        }
    }
}

#[test]
fn a_range_with_holes_is_one_call_and_one_with_zeros_two_more_a_run() {
    let _alone = alone();
    for layout in [Layout::Chunked, Layout::PerLayer] {
        let sim = Sim::new();
        let holes = reserve(&sim, layout, 4, Options::default());
        assert_eq!(sim.calls(), Calls { reserve: 1, ..NONE });
        let runs = holes.geometry().runs_per_page();
        holes.map(&[1]).unwrap();
        sim.heal();
        drop(holes);
        assert_eq!(sim.calls(), Calls { synchronise: 1, unmap: runs, release: runs, free: 1, ..NONE });

        sim.heal();
        let zeros = reserve(&sim, layout, 4, Options { unbacked: Unbacked::Zero, ..Options::default() });
        // Four pages, and the spare one.
        let laid = if layout == Layout::Chunked { 5 } else { 4 * runs };
        assert_eq!(sim.calls(), Calls { reserve: 1, create: 1, map: laid, set_access: laid, ..NONE });
        zeros.map(&[1]).unwrap();
        sim.heal();
        drop(zeros);
        let end = Calls { synchronise: 1, unmap: laid, release: runs + 1, free: 1, ..NONE };
        assert_eq!(sim.calls(), end);
        sim.assert_clean();
    }
}

#[test]
fn on_a_gpu_large_chunked_pages_cost_an_eighth_of_a_handle_a_buffer() {
    let _alone = alone();
    let backing = |layout: Layout, page_bytes: u64, run_bytes: u64| {
        let sim = Sim::new();
        let target = Target { layout, page_bytes: Some(page_bytes), ..Target::new(G) };
        let geometry = Geometry::solve(Shape::new(64, 32 << 10, 16), target).unwrap();
        assert_eq!((geometry.page_bytes(), geometry.run_bytes()), (page_bytes, run_bytes));
        let pages = (32 << 30) / page_bytes;
        let num_blocks = pages * u64::from(geometry.blocks_per_page());
        let range = FTensor::reserve(sim.clone(), geometry, num_blocks, Options::default()).unwrap();
        let all: Vec<u32> = (0..pages as u32).collect();
        sim.set_latency(Latency::H200);
        sim.heal();
        range.map(&all).unwrap();
        sim.elapsed()
    };
    let chunked = backing(Layout::Chunked, 16 << 20, 16 << 20);
    let per_layer = backing(Layout::PerLayer, 128 << 20, 2 << 20);
    // Measured, whole: 80 ms and 730 ms.
    assert!((60..90).contains(&chunked.as_millis()), "{chunked:?}");
    assert!((450..750).contains(&per_layer.as_millis()), "{per_layer:?}");
    let ratio = per_layer.as_secs_f64() / chunked.as_secs_f64();
    assert!((7.0..9.0).contains(&ratio), "{ratio}");
    assert!(chunked > Duration::ZERO);
}
