//! The page that the solver chooses, against a search that tries every page and every stride there is.

use std::time::{Duration, Instant};

use kvcached_vmm::{Geometry, GeometryError, Layout, Shape, Target};
use proptest::prelude::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A page that could be chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    page: u64,
    stride: u64,
    /// Blocks of each buffer.
    blocks: u64,
    ids: u64,
    waste: u64,
}

/// Every page of up to 1 GiB, by the words of the contract: neither ladder nor lcm.
fn candidates(shape: &Shape, target: &Target) -> Vec<Candidate> {
    let (n, content, g) = (u64::from(shape.num_buffers), shape.block_bytes, target.granularity);
    let mut found = vec![];
    for stride in strides(shape) {
        let handles = if target.layout == Layout::Chunked { 1 } else { n };
        for page in (1..=1024 * MIB / (g * handles)).map(|k| k * g * handles) {
            let handle = page / handles;
            if handle % stride != 0 {
                continue;
            }
            let blocks = if target.layout == Layout::Chunked { page / (n * stride) } else { handle / stride };
            let waste = page - n * blocks * content;
            if blocks > 0 {
                found.push(Candidate { page, stride, blocks, ids: handle / stride, waste });
            }
        }
    }
    found
}

fn strides(shape: &Shape) -> Vec<u64> {
    let Some(align) = shape.cell_align else { return vec![shape.block_bytes] };
    let content = shape.block_bytes;
    let roundings = (0..40).map(|k| align << k);
    let mut strides: Vec<u64> = roundings.map(|to| content.div_ceil(to) * to).collect();
    let least = strides[0];
    strides.retain(|stride| *stride == least || *stride <= 2 * content);
    strides
}

/// The contract of `Geometry::solve`; what is kept are the candidates whose ids fit.
fn reference(shape: &Shape, target: &Target) -> Option<Candidate> {
    let fits = |c: &Candidate| {
        let slots = |blocks: u64| {
            u128::from(blocks.div_ceil(c.blocks)) * u128::from(c.ids) * u128::from(shape.tokens_per_block)
        };
        target.num_blocks.is_none_or(|blocks| slots(blocks) < 1 << 31)
    };
    let mut all: Vec<_> = candidates(shape, target).into_iter().filter(fits).collect();
    // Sorting is stable and the searches below return the first of equals.
    all.sort_by_key(|c| (c.page, c.stride));
    if let Some(asked) = target.page_bytes {
        return all.into_iter().find(|c| c.page >= asked);
    }
    let near: Vec<_> = all.iter().copied().filter(|c| c.page <= 128 * MIB).collect();
    let lean = near.iter().filter(|c| c.waste * 1000 <= c.page * u64::from(target.waste_permille));
    let nearest = lean.min_by_key(|c| c.page.abs_diff(16 * MIB));
    let least = near.iter().min_by(|a, b| (a.waste * b.page).cmp(&(b.waste * a.page)));
    nearest.or(least).or(all.first()).copied()
}

fn block() -> impl Strategy<Value = u64> {
    // Sizes of real models, powers of two and odd ones.
    prop_oneof![
        Just(73_728),
        Just(18_432),
        (0u32..22).prop_map(|n| 1 << n),
        (1u64..64).prop_map(|n| n * 96 * KIB),
        (1u64..40).prop_map(|n| n * MIB)
    ]
}

fn shapes() -> impl Strategy<Value = Shape> {
    let rows = (1u32..200, block(), 1u32..5000)
        .prop_map(|(n, block_bytes, tokens)| Shape::new(n, block_bytes, tokens));
    // Cells whose size is no multiple of the alignment too: whoever packs one himself may forget it.
    let content = prop_oneof![
        1u64..3000,
        1u64..4 * MIB,
        (1u64..9000).prop_map(|n| n * 256),
        // Of these several strides fill the same page.
        (1u64..8, 0u32..20).prop_map(|(n, k)| n << k)
    ];
    let cells = (1u32..80, content, 0u32..16, 1u32..100).prop_map(|(n, content, align, tokens)| Shape {
        cell_align: Some(1 << align),
        ..Shape::new(n, content, tokens)
    });
    prop_oneof![rows, cells]
}

fn targets() -> impl Strategy<Value = Target> {
    let granularity = prop_oneof![Just(64 * KIB), Just(2 * MIB), Just(32 * MIB), Just(3 * MIB)];
    let layout = prop_oneof![Just(Layout::Chunked), Just(Layout::PerLayer)];
    let page = prop_oneof![
        2 => Just(None),
        1 => (1u64..200).prop_map(|mib| Some(mib * MIB)),
        1 => (1u64..1100 * MIB).prop_map(Some)
    ];
    let permille = prop_oneof![2 => Just(20), 1 => 0u32..200, 1 => Just(1000)];
    // Around the border for the shapes above, where pages with little padding fit and others do not.
    let blocks = prop_oneof![
        Just(None),
        (1u64..1 << 31).prop_map(Some),
        (8u32..31, 1u64..1000).prop_map(|(k, n)| Some((1 << k) / n))
    ];
    (granularity, layout, page, permille, blocks).prop_map(|(g, layout, page_bytes, permille, num_blocks)| {
        Target { page_bytes, layout, waste_permille: permille, num_blocks, ..Target::new(g) }
    })
}

fn chosen(geometry: &Geometry) -> (u64, u64) {
    (geometry.page_bytes(), geometry.block_bytes())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn the_page_is_the_one_that_the_reference_finds(shape in shapes(), target in targets()) {
        let expected = reference(&shape, &target);
        match Geometry::solve(shape, target) {
            Ok(geometry) => {
                let expected = expected.unwrap();
                prop_assert_eq!(chosen(&geometry), (expected.page, expected.stride));
                prop_assert_eq!(geometry.waste_bytes(), expected.waste);
                prop_assert_eq!(u64::from(geometry.blocks_per_page()), expected.blocks);
                prop_assert_eq!(u64::from(geometry.ids_per_page()), expected.ids);
                prop_assert!(target.num_blocks.is_none_or(|blocks| geometry.id_space(blocks).is_ok()));
            }
            Err(GeometryError::PageTooLarge { page_bytes, .. }) => {
                prop_assert!(page_bytes.is_none_or(|page| page > 1024 * MIB));
                prop_assert_eq!(reference(&shape, &Target { num_blocks: None, ..target }), None);
            }
            Err(GeometryError::TooManyIds { max_blocks, .. }) => {
                prop_assert_eq!(expected, None);
                // The advice works: that many blocks have a page.
                let fewer = Target { num_blocks: Some(max_blocks), ..target };
                prop_assert!(max_blocks < target.num_blocks.unwrap() && Geometry::solve(shape, fewer).is_ok());
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn sizes_agree_with_each_other(shape in shapes(), target in targets()) {
        let Ok(geometry) = Geometry::solve(shape, target) else { return Ok(()) };
        let (n, g) = (u64::from(shape.num_buffers), target.granularity);
        let (page, m, stride) = (geometry.page_bytes(), u64::from(geometry.blocks_per_page()), geometry.block_bytes());
        prop_assert_eq!((geometry.layout(), geometry.num_buffers()), (target.layout, shape.num_buffers));
        prop_assert_eq!(geometry.tokens_per_block(), shape.tokens_per_block);
        prop_assert_eq!(geometry.content_bytes(), shape.block_bytes);
        prop_assert!(stride >= shape.block_bytes && stride.is_multiple_of(shape.cell_align.unwrap_or(1)));
        prop_assert!(shape.cell_align.is_some() || stride == shape.block_bytes);
        prop_assert!(m >= 1 && page >= target.page_bytes.unwrap_or(0));
        prop_assert_eq!(geometry.chunk_bytes(), m * stride);
        prop_assert_eq!(page, u64::from(geometry.runs_per_page()) * geometry.run_bytes());
        prop_assert!(geometry.run_bytes() % g == 0 && geometry.run_bytes() % stride == 0);
        prop_assert_eq!(u64::from(geometry.ids_per_page()) * stride, geometry.run_bytes());
        prop_assert_eq!(page, n * m * shape.block_bytes + geometry.waste_bytes());
        match target.layout {
            Layout::Chunked => {
                prop_assert_eq!(geometry.runs_per_page(), 1);
                prop_assert!(page - n * geometry.chunk_bytes() < n * stride);
            }
            Layout::PerLayer => {
                prop_assert_eq!(geometry.runs_per_page(), shape.num_buffers);
                prop_assert_eq!(geometry.ids_per_page(), geometry.blocks_per_page());
                prop_assert_eq!(geometry.chunk_bytes(), geometry.run_bytes());
            }
        }
    }
}

/// Where a page would have 2^30 smaller neighbours, only those around 16 MiB are looked at.
#[test]
fn tiny_blocks_have_their_page_at_once() {
    let started = Instant::now();
    for layout in [Layout::Chunked, Layout::PerLayer] {
        let target = Target { layout, ..Target::new(1) };
        let byte = Geometry::solve(Shape::new(1, 1, 1), target).unwrap();
        assert_eq!((byte.page_bytes(), byte.waste_bytes()), (16 * MIB, 0));
        // 16 MiB is one more than a multiple of 21.
        let odd = Geometry::solve(Shape::new(3, 7, 1), target).unwrap();
        assert_eq!((odd.page_bytes(), odd.waste_bytes()), (16 * MIB - 1, 0));
        let cell = Shape { cell_align: Some(1), ..Shape::new(2, 3000, 1) };
        for page_bytes in [None, Some(1)] {
            let none_fits = Target { page_bytes, num_blocks: Some(1 << 40), ..target };
            let refused = Geometry::solve(cell, none_fits).unwrap_err();
            assert!(matches!(refused, GeometryError::TooManyIds { .. }), "{refused}");
        }
    }
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}
