//! The geometry solver: examples worked by hand, and a reference that tries everything.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;

use kvcached_vmm::{Geometry, GeometryError, Shape, Target};
use proptest::prelude::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn solve(
    num_buffers: u32,
    block_bytes: u64,
    g: u64,
    page_bytes: Option<u64>,
) -> Result<Geometry, GeometryError> {
    let shape = Shape::new(num_buffers, block_bytes, 16);
    Geometry::solve(shape, Target { page_bytes, ..Target::new(g) })
}

#[test]
fn worked_examples() {
    let cases = [
        // 32 layers of K and V.
        (
            64,
            32 * KIB,
            2 * MIB,
            None,
            "page 16 MiB (nearest 16 MiB with at most 2 % padding): 64 buffers x 256 KiB chunk of 8 blocks (128 tokens), padding 0.0 %, 512 ids a page, chunked: 1 handle a page",
        ),
        // 61 layers of MLA: 4.7 % at 18 MiB, and 126 MiB is farther from 16 than 108.
        (
            61,
            73_728,
            2 * MIB,
            None,
            "page 108 MiB (nearest 16 MiB with at most 2 % padding): 61 buffers x 1800 KiB chunk of 25 blocks (400 tokens), padding 0.7 %, 1536 ids a page, chunked: 1 handle a page",
        ),
        (
            61,
            73_728,
            2 * MIB,
            Some(16 * MIB),
            "page 18 MiB (smallest of at least 16 MiB): 61 buffers x 288 KiB chunk of 4 blocks (64 tokens), padding 4.7 %, 256 ids a page, chunked: 1 handle a page",
        ),
        // The lcm alone is beyond 128 MiB.
        (
            3,
            14 * MIB,
            32 * MIB,
            None,
            "page 224 MiB (smallest that holds a block of every buffer): 3 buffers x 70 MiB chunk of 5 blocks (80 tokens), padding 6.3 %, 16 ids a page, chunked: 1 handle a page",
        ),
        (
            3,
            16 * MIB,
            32 * MIB,
            None,
            "page 96 MiB (nearest 16 MiB with at most 2 % padding): 3 buffers x 32 MiB chunk of 2 blocks (32 tokens), padding 0.0 %, 6 ids a page, chunked: 1 handle a page",
        ),
        // 64, 96 and 128 MiB all waste more than 2 %.
        (
            5,
            8 * MIB,
            32 * MIB,
            None,
            "page 128 MiB (least padding up to 128 MiB): 5 buffers x 24 MiB chunk of 3 blocks (48 tokens), padding 6.3 %, 16 ids a page, chunked: 1 handle a page",
        ),
        // 12 and 20 MiB are equally near, and 16 wastes 3.3 %.
        (
            180,
            4 * KIB,
            4 * MIB,
            None,
            "page 12 MiB (nearest 16 MiB with at most 2 % padding): 180 buffers x 68 KiB chunk of 17 blocks (272 tokens), padding 0.4 %, 3072 ids a page, chunked: 1 handle a page",
        ),
        // Exactly 2 % is little enough.
        (
            49,
            32 * KIB,
            1600 * KIB,
            None,
            "page 16000 KiB (nearest 16 MiB with at most 2 % padding): 49 buffers x 320 KiB chunk of 10 blocks (160 tokens), padding 2.0 %, 500 ids a page, chunked: 1 handle a page",
        ),
        // A machine's own pages: 16 MiB itself fits.
        (
            4,
            4096,
            4096,
            None,
            "page 16 MiB (nearest 16 MiB with at most 2 % padding): 4 buffers x 4 MiB chunk of 1024 blocks (16384 tokens), padding 0.0 %, 4096 ids a page, chunked: 1 handle a page",
        ),
        // Asked for less than one block of every buffer.
        (
            64,
            MIB,
            2 * MIB,
            Some(2 * MIB),
            "page 64 MiB (smallest of at least 2 MiB): 64 buffers x 1 MiB chunk of 1 blocks (16 tokens), padding 0.0 %, 64 ids a page, chunked: 1 handle a page",
        ),
    ];
    for (n, block, g, page, line) in cases {
        assert_eq!(solve(n, block, g, page).unwrap().explain(), line);
    }
}

#[test]
fn the_first_example_in_numbers() {
    let geometry = solve(64, 32 * KIB, 2 * MIB, None).unwrap();
    assert_eq!(geometry.page_bytes(), 16 * MIB);
    assert_eq!(geometry.chunk_bytes(), 256 * KIB);
    assert_eq!((geometry.blocks_per_page(), geometry.ids_per_page(), geometry.waste_bytes()), (8, 512, 0));
    assert_eq!((geometry.num_pages(0), geometry.num_pages(8), geometry.num_pages(9)), (Ok(0), Ok(1), Ok(2)));
    assert_eq!((geometry.id_space(9), geometry.range_bytes(9)), (Ok(1024), Ok(48 * MIB)));
    assert_eq!((geometry.block_id(0), geometry.block_id(7), geometry.block_id(8)), (Ok(0), Ok(7), Ok(512)));
    assert_eq!((geometry.index(7), geometry.index(8), geometry.index(512)), (Some(7), None, Some(8)));
    assert_eq!((geometry.buffer_offset(63, 2), geometry.buffer_offset(64, 2)), (Some(63 * 256 * KIB), None));
    assert_eq!(
        (geometry.pages_of_row(7), geometry.pages_of_row(8), geometry.pages_of_row(1023)),
        (0..1, 0..2, 1..3)
    );
}

#[test]
fn what_cannot_be_laid_out_is_said() {
    let said = |r: Result<Geometry, GeometryError>| r.unwrap_err().to_string();
    assert_eq!(said(solve(0, 1, 1, None)), "num_buffers must be at least 1");
    assert_eq!(said(solve(1, 0, 1, None)), "block_bytes must be at least 1");
    assert_eq!(said(solve(1, 1, 0, None)), "granularity must be at least 1");
    assert_eq!(said(solve(1, 1, 1, Some(0))), "page_bytes must be at least 1");
    let shape = Shape::new(1, 1, 0);
    let zero = Geometry::solve(shape, Target::new(1));
    assert_eq!(said(zero), "tokens_per_block must be at least 1");
    assert_eq!(
        said(solve(3, 512 * MIB, 2 * MIB, None)),
        "3 buffers with blocks of 512 MiB need a page of 1536 MiB, more than 1 GiB: use fewer tokens a block, or buffers whose block size divides the granularity"
    );
    assert_eq!(
        said(solve(1, MIB, 2 * MIB, Some(1025 * MIB))),
        "1 buffers with blocks of 1 MiB need a page of 1026 MiB, more than 1 GiB: ask for a smaller page"
    );
    solve(1, MIB, 2 * MIB, Some(1024 * MIB)).unwrap();
    // Coprime sizes, whose lcm is beyond 64 bits, and a product beyond them.
    assert!(said(solve(1, (1 << 40) + 1, 1 << 40, None)).contains("more than 16 EiB"));
    assert!(said(solve(u32::MAX, u64::MAX, 1, None)).contains("more than 16 EiB"));
    assert!(said(solve(1, 1, 1, Some(u64::MAX))).contains("ask for a smaller page"));
}

#[test]
fn ids_end_where_int32_ends() {
    // 512 ids a page of 16 tokens: 8192 slots, so 262143 pages of 8 blocks.
    let geometry = solve(64, 32 * KIB, 2 * MIB, None).unwrap();
    let most = 262_143 * 8;
    assert_eq!(geometry.id_space(most), Ok(262_143 * 512));
    assert_eq!(
        geometry.id_space(most + 1).unwrap_err().to_string(),
        "2097145 blocks need 134217728 ids of 16 tokens, which do not fit int32: reserve at most 2097144 blocks, or choose a page with less padding (now 0.0 %); hint: Layout::PerLayer has dense ids"
    );
    assert!(matches!(geometry.num_pages(u64::MAX), Err(GeometryError::TooManyIds { .. })));
    assert!(matches!(geometry.range_bytes(u64::MAX), Err(GeometryError::TooManyIds { .. })));
    assert_eq!(geometry.block_id(u64::MAX), Err(GeometryError::NoSuchBlock { index: u64::MAX }));
}

/// The solver's contract, by trying every candidate.
fn reference(n: u64, block: u64, g: u64, target: Option<u64>) -> Option<u64> {
    let unit = (1..).map(|k| k * g).find(|u| u % block == 0).unwrap();
    let holds = |page: &u64| *page >= n * block;
    let all = |limit: u64| (1..=limit / unit).map(|k| k * unit).filter(holds);
    if let Some(target) = target {
        return all(1024 * MIB).find(|page| *page >= target);
    }
    let waste = |page: u64| page - page / (n * block) * n * block;
    let lean = all(128 * MIB).filter(|p| waste(*p) * 100 <= 2 * p);
    // `min_by_key` and `min_by` return the first of equals: the smaller page.
    let nearest = lean.min_by_key(|p| p.abs_diff(16 * MIB));
    let least = || all(128 * MIB).min_by(|a, b| (waste(*a) * b).cmp(&(waste(*b) * a)));
    nearest.or_else(least).or_else(|| all(1024 * MIB).next())
}

fn shapes() -> impl Strategy<Value = (u32, u64, u64)> {
    let granularity = prop_oneof![Just(64 * KIB), Just(2 * MIB), Just(32 * MIB), Just(3 * MIB)];
    // Sizes of real models, powers of two and odd ones.
    let block = prop_oneof![
        Just(73_728),
        Just(18_432),
        (0u32..22).prop_map(|n| 1 << n),
        (1u64..64).prop_map(|n| n * 96 * KIB),
        (1u64..40).prop_map(|n| n * MIB)
    ];
    (1u32..200, block, granularity)
}

/// A geometry small enough to look at every byte.
fn tiny() -> impl Strategy<Value = Geometry> {
    (1u32..6, 1u64..5, 1u64..9, 1u64..40)
        .prop_map(|(n, block, g, page)| solve(n, block, g, Some(page)).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_page_is_the_one_that_the_reference_finds(
        (n, block, g) in shapes(),
        target in prop_oneof![Just(None), (1u64..200).prop_map(|mib| Some(mib * MIB)), (1u64..MIB).prop_map(Some)],
    ) {
        let expected = reference(n.into(), block, g, target);
        match solve(n, block, g, target) {
            Ok(geometry) => prop_assert_eq!(Some(geometry.page_bytes()), expected),
            Err(GeometryError::PageTooLarge { .. }) => prop_assert_eq!(None, expected),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn sizes_agree_with_each_other((n, block, g) in shapes(), target in proptest::option::of(1u64..64 * MIB)) {
        let Ok(geometry) = solve(n, block, g, target) else { return Ok(()) };
        let (page, m) = (geometry.page_bytes(), u64::from(geometry.blocks_per_page()));
        prop_assert!(page % g == 0 && page % block == 0 && page >= target.unwrap_or(0));
        prop_assert_eq!(geometry.chunk_bytes(), m * block);
        prop_assert_eq!(page, u64::from(n) * m * block + geometry.waste_bytes());
        prop_assert!(m >= 1 && geometry.waste_bytes() < u64::from(n) * block);
        prop_assert_eq!(u64::from(geometry.ids_per_page()) * block, page);
    }

    /// Every byte of every block has one owner, in the page that the id says.
    #[test]
    fn blocks_share_no_byte_and_straddle_no_page(geometry in tiny(), blocks in 1u64..30) {
        let (page, block) = (geometry.page_bytes(), geometry.block_bytes());
        let mut owned = BTreeSet::new();
        for index in 0..blocks {
            let id = geometry.block_id(index).unwrap();
            prop_assert!(id < geometry.id_space(blocks).unwrap());
            prop_assert_eq!(geometry.index(id), Some(index));
            for i in 0..geometry.num_buffers() {
                let at = geometry.buffer_offset(i, 1).unwrap() + u64::from(id) * block;
                for byte in at..at + block {
                    prop_assert!(owned.insert(byte));
                    prop_assert_eq!(byte / page, index / u64::from(geometry.blocks_per_page()));
                }
            }
        }
        let pages = u64::from(geometry.num_pages(blocks).unwrap());
        prop_assert!(owned.iter().all(|byte| *byte < pages * page));
        // Whole buffers, one after the other, end within the range.
        let last = geometry.buffer_offset(geometry.num_buffers() - 1, 1).unwrap();
        let buffer_bytes = u64::from(geometry.id_space(blocks).unwrap()) * block;
        prop_assert!(last + buffer_bytes <= geometry.range_bytes(blocks).unwrap());
    }

    #[test]
    fn the_pages_of_a_row_are_those_of_its_bytes(geometry in tiny(), id in 0u32..100) {
        let mut touched = BTreeSet::new();
        for i in 0..geometry.num_buffers() {
            let at = geometry.buffer_offset(i, 1).unwrap() + u64::from(id) * geometry.block_bytes();
            touched.extend((at..at + geometry.block_bytes()).map(|byte| (byte / geometry.page_bytes()) as u32));
        }
        prop_assert_eq!(geometry.pages_of_row(id).collect::<BTreeSet<_>>(), touched);
        prop_assert_eq!(geometry.index(id).is_some(), (0..400).any(|b| geometry.block_id(b) == Ok(id)));
    }

    /// `id_space` refuses exactly what does not fit, and `max_blocks` is the border.
    #[test]
    fn int32_is_the_border((n, block, g) in shapes(), tokens in 1u32..5000, blocks in 1u64..1 << 33) {
        let shape = Shape::new(n, block, tokens);
        let Ok(geometry) = Geometry::solve(shape, Target::new(g)) else { return Ok(()) };
        let pages = u128::from(blocks.div_ceil(geometry.blocks_per_page().into()));
        let ids = pages * u128::from(geometry.ids_per_page());
        match geometry.id_space(blocks) {
            Ok(space) => {
                prop_assert_eq!(u128::from(space), ids);
                prop_assert!(ids * u128::from(tokens) <= i32::MAX as u128);
            }
            Err(GeometryError::TooManyIds { ids: said, max_blocks, .. }) => {
                prop_assert_eq!(said, ids);
                prop_assert!(ids * u128::from(tokens) > i32::MAX as u128);
                prop_assert!(max_blocks < blocks);
                prop_assert!(geometry.id_space(max_blocks).is_ok() && geometry.id_space(max_blocks + 1).is_err());
            }
            Err(other) => panic!("{other}"),
        }
    }

    /// Nothing overflows, whatever is asked.
    #[test]
    fn any_numbers_have_an_answer(
        (n, block, tokens) in (any::<u32>(), any::<u64>(), any::<u32>()),
        g in prop_oneof![Just(2 * MIB), any::<u64>().prop_map(|g| g | 1 << 20)],
        small in 0u32..64,
        page in proptest::option::of(any::<u64>()),
        (blocks, id) in (any::<u64>(), any::<u32>()),
    ) {
        let shape = Shape::new(n, block >> small, tokens);
        for page_bytes in [page, page.map(|p| p >> 34), None] {
            let Ok(geometry) = Geometry::solve(shape, Target { page_bytes, ..Target::new(g) }) else { continue };
            let _ = (geometry.id_space(blocks), geometry.range_bytes(blocks), geometry.block_id(blocks));
            let _ = (geometry.index(id), geometry.buffer_offset(id, id), geometry.explain());
            prop_assert!(!geometry.pages_of_row(id).is_empty());
        }
    }
}

#[test]
fn other_blocks_fill_the_same_chunks_or_are_refused() {
    let laid_out = solve(64, 256 * KIB, 2 * MIB, None).unwrap();
    let seen = laid_out.with_block(32 * KIB, 16).unwrap();
    assert_eq!(seen.page_bytes(), laid_out.page_bytes());
    assert_eq!(seen.chunk_bytes(), laid_out.chunk_bytes());
    assert_eq!(seen.blocks_per_page(), 8 * laid_out.blocks_per_page());
    assert_eq!(seen.ids_per_page(), 8 * laid_out.ids_per_page());
    assert_eq!(seen.tokens_per_block(), 16);
    // Every block keeps its bytes: the offset of block k is that of its eighth of the wider block.
    for index in 0..64 {
        let wide = u64::from(laid_out.block_id(index / 8).unwrap()) * laid_out.block_bytes();
        let narrow = u64::from(seen.block_id(index).unwrap()) * seen.block_bytes();
        assert_eq!(narrow, wide + index % 8 * seen.block_bytes());
    }
    assert_eq!(laid_out.with_block(laid_out.block_bytes(), 16), Ok(laid_out));
    let said = laid_out.with_block(3000, 1).unwrap_err().to_string();
    assert!(said.contains("block_bytes=3000"), "{said}");
    assert!(laid_out.with_block(512 * KIB, 1).is_err());
    assert!(laid_out.with_block(0, 1).is_err());
    assert!(laid_out.with_block(4096, 0).is_err());
}
