//! Where blocks lie: examples worked by hand, and every byte of small ranges.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};

use kvcached_vmm::{Cell, Component, Geometry, GeometryError, Layout, Shape, Target};
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
        // 3,395 of the machine's pages, 700 fewer than 16 MiB: all of those between are looked at.
        (
            3328,
            4096,
            4096,
            None,
            "page 13580 KiB (nearest 16 MiB with at most 2 % padding): 3328 buffers x 4 KiB chunk of 1 blocks (16 tokens), padding 2.0 %, 3395 ids a page, chunked: 1 handle a page",
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
fn the_first_example_per_layer() {
    let target = Target { layout: Layout::PerLayer, ..Target::new(2 * MIB) };
    let geometry = Geometry::solve(Shape::new(64, 32 * KIB, 16), target).unwrap();
    assert_eq!(
        geometry.explain(),
        "page 128 MiB (nearest 16 MiB with at most 2 % padding): 64 buffers x 2 MiB chunk of 64 blocks (1024 tokens), padding 0.0 %, 64 ids a page, per-layer: 64 handles of 2 MiB a page"
    );
    assert_eq!((geometry.runs_per_page(), geometry.run_bytes()), (64, 2 * MIB));
    assert_eq!((geometry.id_space(65), geometry.range_bytes(65)), (Ok(128), Ok(256 * MIB)));
    assert_eq!(
        (geometry.block_id(65), geometry.index(65), geometry.pages_of_row(65)),
        (Ok(65), Some(65), 1..2)
    );
    // Three pages: every buffer is 6 MiB, and page 2 of buffer 63 is the end of the range.
    assert_eq!((geometry.buffer_stride(3), geometry.buffer_offset(63, 3)), (6 * MIB, Some(63 * 6 * MIB)));
    assert_eq!(
        (geometry.run_offset(2, 0, 3), geometry.run_offset(2, 63, 3)),
        (4 * MIB, 3 * 128 * MIB - 2 * MIB)
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
    let per_layer = |n, block, page_bytes| {
        let target = Target { page_bytes, layout: Layout::PerLayer, ..Target::new(2 * MIB) };
        said(Geometry::solve(Shape::new(n, block, 64), target))
    };
    assert_eq!(
        per_layer(61, 73_728, None),
        "61 buffers with blocks of 72 KiB need a page of 1098 MiB, more than 1 GiB: use the chunked layout, whose pages are one handle for all buffers"
    );
    // Chunked would not do either.
    assert_eq!(
        per_layer(3, 512 * MIB, None),
        "3 buffers with blocks of 512 MiB need a page of 1536 MiB, more than 1 GiB: use fewer tokens a block, or buffers whose block size divides the granularity"
    );
    assert_eq!(
        per_layer(61, 64 * KIB, Some(1000 * MIB)),
        "61 buffers with blocks of 64 KiB need a page of 1098 MiB, more than 1 GiB: ask for a smaller page"
    );
    let cell = Shape { cell_align: Some(0), ..Shape::new(1, 1, 1) };
    assert_eq!(said(Geometry::solve(cell, Target::new(1))), "cell_align must be at least 1");
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
    // int32's last number is a slot too.
    let target = Target { page_bytes: Some(1), ..Target::new(2 * MIB) };
    let single = Geometry::solve(Shape::new(1, 2 * MIB, 1), target).unwrap();
    assert_eq!(single.id_space(i32::MAX as u64), Ok(i32::MAX as u32));
    assert!(single.id_space(1 << 31).is_err());
    // Padding in cells costs memory, not ids.
    let cell = Shape { cell_align: Some(512), ..Shape::new(2, 1000, 16) };
    let padded = Geometry::solve(cell, Target::new(2 * MIB)).unwrap();
    let many = padded.id_space(100 << 20).unwrap_err().to_string();
    assert!(many.ends_with("less padding (now 0.0 %); hint: Layout::PerLayer has dense ids"), "{many}");
    // Whose tokens alone are too many is not helped by dense ids.
    let many = geometry.id_space(1 << 27).unwrap_err().to_string();
    assert!(many.ends_with("choose a page with less padding (now 0.0 %)"), "{many}");
    let target = Target { layout: Layout::PerLayer, ..Target::new(2 * MIB) };
    let dense = Geometry::solve(Shape::new(64, 32 * KIB, 16), target).unwrap();
    assert_eq!(dense.id_space((1 << 27) - 64), Ok((1 << 27) - 64));
    assert_eq!(
        dense.id_space((1 << 27) - 63).unwrap_err().to_string(),
        "134217665 blocks need 134217728 ids of 16 tokens, which do not fit int32: reserve at most 134217664 blocks"
    );
    assert!(matches!(geometry.num_pages(u64::MAX), Err(GeometryError::TooManyIds { .. })));
    assert!(matches!(geometry.range_bytes(u64::MAX), Err(GeometryError::TooManyIds { .. })));
    assert_eq!(geometry.block_id(u64::MAX), Err(GeometryError::NoSuchBlock { index: u64::MAX }));
}

/// 160 buffers have 3584 ids for 22 blocks in 14 MiB, 3072 for 19 in 12, 5120 for 32 in 20: fewer and fewer a block.
#[test]
fn pages_whose_ids_would_not_fit_are_no_candidates() {
    let chosen = |num_blocks| {
        let target = Target { num_blocks: Some(num_blocks), ..Target::new(2 * MIB) };
        Geometry::solve(Shape::new(160, 4 * KIB, 16), target)
    };
    let few = chosen(823_878).unwrap();
    assert!(few.explain().starts_with("page 14 MiB (nearest 16 MiB with at most 2 % padding): "), "{few}");
    assert_eq!(chosen(823_879).unwrap().page_bytes(), 12 * MIB);
    let more = chosen(830_111).unwrap();
    assert_eq!(
        more.explain(),
        "page 20 MiB (nearest 16 MiB with at most 2 % padding, of those whose ids fit int32): 160 buffers x 128 KiB chunk of 32 blocks (512 tokens), padding 0.0 %, 5120 ids a page, chunked: 1 handle a page"
    );
    // Not said where the same page is chosen as without blocks.
    assert_eq!(few, Geometry::solve(Shape::new(160, 4 * KIB, 16), Target::new(2 * MIB)).unwrap());
    let most = 26_214 * 32;
    assert!(chosen(most).is_ok());
    assert_eq!(
        chosen(most + 1).unwrap_err().to_string(),
        "838849 blocks need 136657920 ids of 16 tokens, which do not fit int32: reserve at most 823878 blocks, or choose a page with less padding (now 1.8 %); hint: Layout::PerLayer has dense ids"
    );
}

/// Any layout, blocks and cells.
fn geometries() -> impl Strategy<Value = Geometry> {
    let block =
        prop_oneof![Just(73_728), (0u32..22).prop_map(|n| 1 << n), (1u64..64).prop_map(|n| n * 96 * KIB)];
    let granularity = prop_oneof![Just(64 * KIB), Just(2 * MIB), Just(3 * MIB)];
    let align = proptest::option::of((0u32..12).prop_map(|n| 1 << n));
    (1u32..200, block, 1u32..5000, granularity, layouts(), align).prop_filter_map(
        "no page is so large",
        |(n, block, tokens, g, layout, cell_align)| {
            let shape = Shape { cell_align, ..Shape::new(n, block, tokens) };
            Geometry::solve(shape, Target { layout, ..Target::new(g) }).ok()
        },
    )
}

/// A geometry small enough to look at every byte, and the blocks in its range.
fn tiny() -> impl Strategy<Value = (Geometry, u64)> {
    let align = prop_oneof![Just(None), (0u32..4).prop_map(|n| Some(1 << n))];
    let shape = (1u32..6, 1u64..5, align)
        .prop_map(|(n, block, cell_align)| Shape { cell_align, ..Shape::new(n, block, 16) });
    (shape, 1u64..9, 1u64..40, layouts(), 1u64..30).prop_map(|(shape, g, page, layout, blocks)| {
        let target = Target { page_bytes: Some(page), layout, ..Target::new(g) };
        (Geometry::solve(shape, target).unwrap(), blocks)
    })
}

fn layouts() -> impl Strategy<Value = Layout> {
    prop_oneof![Just(Layout::Chunked), Just(Layout::PerLayer)]
}

/// The page and run under every byte of a range, the chunked layout's spare page included.
fn owners(geometry: &Geometry, num_pages: u32) -> BTreeMap<u64, (u32, u32)> {
    let mut owners = BTreeMap::new();
    let spare = u32::from(geometry.layout() == Layout::Chunked);
    for page in 0..num_pages + spare {
        for run in 0..geometry.runs_per_page() {
            let start = geometry.run_offset(page, run, num_pages);
            for byte in start..start + geometry.run_bytes() {
                assert_eq!(owners.insert(byte, (page, run)), None, "byte {byte} is in two runs");
            }
        }
    }
    owners
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Runs lie side by side, and fill the range.
    #[test]
    fn every_byte_of_the_range_is_in_one_run((geometry, blocks) in tiny()) {
        let owners = owners(&geometry, geometry.num_pages(blocks).unwrap());
        let range = geometry.range_bytes(blocks).unwrap();
        prop_assert!(owners.keys().copied().eq(0..range), "{range} bytes, {owners:?}");
    }

    /// Every byte of every block has one owner, in a run of the page that the id says.
    #[test]
    fn blocks_share_no_byte_and_straddle_no_run((geometry, blocks) in tiny()) {
        let num_pages = geometry.num_pages(blocks).unwrap();
        let under = owners(&geometry, num_pages);
        let stride = geometry.block_bytes();
        let mut owned = BTreeSet::new();
        for index in 0..blocks {
            let id = geometry.block_id(index).unwrap();
            prop_assert!(id < geometry.id_space(blocks).unwrap());
            prop_assert_eq!(geometry.index(id), Some(index));
            let page = u32::try_from(index / u64::from(geometry.blocks_per_page())).unwrap();
            prop_assert!(geometry.pages_of_row(id).contains(&page));
            for i in 0..geometry.num_buffers() {
                let at = geometry.buffer_offset(i, num_pages).unwrap() + u64::from(id) * stride;
                let run = if geometry.layout() == Layout::Chunked { 0 } else { i };
                for byte in at..at + stride {
                    prop_assert!(owned.insert(byte));
                    prop_assert_eq!(under.get(&byte), Some(&(page, run)));
                }
            }
        }
        let held = u64::from(num_pages) * u64::from(geometry.blocks_per_page()) * u64::from(geometry.num_buffers());
        let backed = u64::from(num_pages) * geometry.page_bytes();
        prop_assert_eq!(backed - held * geometry.content_bytes(), u64::from(num_pages) * geometry.waste_bytes());
    }

    /// Whole buffers, of which each begins where its neighbour's page or the neighbour itself ends.
    #[test]
    fn buffers_are_equally_far_apart_and_end_within_the_range((geometry, blocks) in tiny()) {
        let num_pages = geometry.num_pages(blocks).unwrap();
        let (stride, rows) = (geometry.buffer_stride(num_pages), u64::from(geometry.id_space(blocks).unwrap()));
        let offset = |i| geometry.buffer_offset(i, num_pages);
        for i in 0..geometry.num_buffers() {
            prop_assert_eq!(offset(i), Some(u64::from(i) * stride));
        }
        prop_assert_eq!(offset(geometry.num_buffers()), None);
        let (buffer, range) = (rows * geometry.block_bytes(), geometry.range_bytes(blocks).unwrap());
        let end = offset(geometry.num_buffers() - 1).unwrap() + buffer;
        match geometry.layout() {
            Layout::Chunked => {
                prop_assert_eq!(stride, geometry.chunk_bytes());
                prop_assert!(end <= range);
            }
            // K and V halves: one tensor of two buffers, and nothing between or behind them.
            Layout::PerLayer => prop_assert_eq!((stride, end), (buffer, range)),
        }
    }

    #[test]
    fn the_pages_of_a_row_are_those_of_its_bytes((geometry, blocks) in tiny(), at in 0u32..100) {
        let num_pages = geometry.num_pages(blocks).unwrap();
        let id = at % geometry.id_space(blocks).unwrap();
        let under = owners(&geometry, num_pages);
        let mut touched = BTreeSet::new();
        for i in 0..geometry.num_buffers() {
            let row = geometry.buffer_offset(i, num_pages).unwrap() + u64::from(id) * geometry.block_bytes();
            touched.extend((row..row + geometry.block_bytes()).map(|byte| under[&byte].0));
        }
        prop_assert_eq!(geometry.pages_of_row(id).collect::<BTreeSet<_>>(), touched);
        prop_assert_eq!(geometry.index(id).is_some(), (0..400).any(|b| geometry.block_id(b) == Ok(id)));
        prop_assert!(geometry.layout() == Layout::Chunked || geometry.index(id) == Some(id.into()));
    }

    /// `id_space` refuses exactly what does not fit, and `max_blocks` is the border.
    #[test]
    fn int32_is_the_border(geometry in geometries(), blocks in 1u64..1 << 33) {
        let pages = u128::from(blocks.div_ceil(geometry.blocks_per_page().into()));
        let ids = pages * u128::from(geometry.ids_per_page());
        let slots = ids * u128::from(geometry.tokens_per_block());
        match geometry.id_space(blocks) {
            Ok(space) => {
                prop_assert_eq!(u128::from(space), ids);
                prop_assert!(slots <= i32::MAX as u128);
            }
            Err(GeometryError::TooManyIds { ids: said, max_blocks, .. }) => {
                prop_assert_eq!(said, ids);
                prop_assert!(slots > i32::MAX as u128);
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
        (small, few) in (0u32..64, 0u32..32),
        (page, cell_align) in (proptest::option::of(any::<u64>()), proptest::option::of(any::<u64>())),
        (layout, waste_permille) in (layouts(), any::<u32>()),
        (blocks, id) in (any::<u64>(), any::<u32>()),
    ) {
        let cell_align = cell_align.map(|align| align >> small);
        let shape = Shape { cell_align, ..Shape::new(n >> few, block >> small, tokens) };
        for page_bytes in [page, page.map(|p| p >> 34), None] {
            for num_blocks in [None, Some(blocks >> small), Some(blocks)] {
                let target = Target { page_bytes, layout, waste_permille, num_blocks, ..Target::new(g) };
                let geometry = match Geometry::solve(shape, target) {
                    Ok(geometry) => geometry,
                    Err(error) => {
                        prop_assert!(!error.to_string().is_empty());
                        continue;
                    }
                };
                let _ = (geometry.id_space(blocks), geometry.range_bytes(blocks), geometry.block_id(blocks));
                let _ = (geometry.index(id), geometry.buffer_offset(id, u32::MAX), geometry.explain());
                let _ = (geometry.run_offset(u32::MAX, u32::MAX, u32::MAX), geometry.buffer_stride(u32::MAX));
                let _ = (geometry.with_block(block, tokens), geometry.waste_bytes());
                prop_assert!(!geometry.pages_of_row(id).is_empty());
            }
        }
    }

    /// Components follow each other without overlap, and every one of every block of every buffer is aligned.
    #[test]
    fn components_lie_at_their_alignment(
        parts in proptest::collection::vec((1u64..5000, 0u32..9), 1..6),
        (n, layout) in (1u32..5, layouts()),
    ) {
        let parts: Vec<_> = parts.into_iter().map(|(bytes, k)| Component { bytes, align: 1 << k }).collect();
        let cell = Cell::pack(&parts).unwrap();
        let mut end = 0;
        for (i, part) in parts.iter().enumerate() {
            let (offset, bytes) = cell.component(i).unwrap();
            prop_assert_eq!((cell.offsets()[i], bytes), (offset, part.bytes));
            prop_assert!(offset >= end && offset - end < part.align && offset % part.align == 0);
            end = offset + bytes;
        }
        prop_assert_eq!((cell.offsets().len(), cell.component(parts.len())), (parts.len(), None));
        let widest = parts.iter().map(|part| part.align).max().unwrap();
        prop_assert_eq!(cell.align(), widest);
        prop_assert!(cell.bytes() >= end && cell.bytes() - end < widest && cell.bytes().is_multiple_of(widest));

        let target = Target { page_bytes: Some(1), layout, ..Target::new(512) };
        let geometry = Geometry::solve(cell.shape(n, 1), target).unwrap();
        let num_pages = geometry.num_pages(20).unwrap();
        for (buffer, index) in (0..n).flat_map(|buffer| (0..20).map(move |index| (buffer, index))) {
            let id = u64::from(geometry.block_id(index).unwrap());
            let block = geometry.buffer_offset(buffer, num_pages).unwrap() + id * geometry.block_bytes();
            for (i, part) in parts.iter().enumerate() {
                prop_assert_eq!((block + cell.offsets()[i]) % part.align, 0);
            }
        }
    }
}

#[test]
fn cells_in_numbers() {
    let part = |bytes, align| Component { bytes, align };
    let cell = Cell::pack(&[part(5, 1), part(6, 4), part(1, 2)]).unwrap();
    assert_eq!((cell.offsets(), cell.bytes(), cell.align()), (&[0, 8, 14][..], 16, 4));
    assert_eq!((cell.component(1), cell.component(3)), (Some((8, 6)), None));
    assert_eq!(cell.shape(3, 7), Shape { cell_align: Some(4), ..Shape::new(3, 16, 7) });
    let said = |parts: &[Component]| Cell::pack(parts).unwrap_err().to_string();
    assert_eq!(said(&[]), "components must be at least 1");
    assert_eq!(said(&[part(0, 1)]), "bytes of a component must be at least 1");
    assert_eq!(said(&[part(1, 0)]), "an alignment of 0 bytes is not a power of two");
    assert_eq!(said(&[part(1, 1), part(1, 12)]), "an alignment of 12 bytes is not a power of two");
    for parts in [
        [part(u64::MAX, 1), part(1, 1)],
        [part(u64::MAX, 1), part(1, 2)],
        [part(1, 1 << 63), part(1 << 63, 1)],
    ] {
        assert_eq!(Cell::pack(&parts), Err(GeometryError::CellTooLarge));
    }
}

/// 1000 bytes do not divide 2 MiB: padded to 1008 they need 126 MiB, and to 1024 they fill any page.
#[test]
fn a_cell_is_padded_as_far_as_its_waste_allows() {
    let cell = Shape { cell_align: Some(8), ..Shape::new(3, 1000, 1) };
    let solve = |target| Geometry::solve(cell, target).unwrap();
    let narrow = solve(Target::new(2 * MIB));
    assert_eq!(
        narrow.explain(),
        "page 126 MiB (nearest 16 MiB with at most 2 % padding): 3 buffers x 44039520 bytes chunk of 43690 blocks (43690 tokens), padding 0.8 % (page 0.0 %, cell 0.8 %: 1000 bytes every 1008), 131072 ids a page, chunked: 1 handle a page"
    );
    assert_eq!((narrow.block_bytes(), narrow.content_bytes()), (1008, 1000));
    assert_eq!(narrow.waste_bytes(), 126 * MIB - 3 * 43_690 * 1000);
    let wide = solve(Target { waste_permille: 24, ..Target::new(2 * MIB) });
    assert_eq!(
        wide.explain(),
        "page 16 MiB (nearest 16 MiB with at most 2.4 % padding): 3 buffers x 5461 KiB chunk of 5461 blocks (5461 tokens), padding 2.3 % (page 0.0 %, cell 2.3 %: 1000 bytes every 1024), 16384 ids a page, chunked: 1 handle a page"
    );
    let per_layer = solve(Target { layout: Layout::PerLayer, ..Target::new(2 * MIB) });
    assert_eq!(
        per_layer.explain(),
        "page 6 MiB (least padding up to 128 MiB): 3 buffers x 2 MiB chunk of 2048 blocks (2048 tokens), padding 2.3 % (page 0.0 %, cell 2.3 %: 1000 bytes every 1024), 2048 ids a page, per-layer: 3 handles of 2 MiB a page"
    );
    // Blocks as they are have a page of 250 MiB, and no choice.
    let exact = Geometry::solve(Shape::new(3, 1000, 1), Target::new(2 * MIB)).unwrap();
    assert_eq!((exact.page_bytes(), exact.waste_bytes()), (250 * MIB, 1000));
}

#[test]
fn the_bound_on_waste_is_the_callers() {
    let chosen = |waste_permille| {
        let target = Target { waste_permille, ..Target::new(2 * MIB) };
        Geometry::solve(Shape::new(61, 73_728, 64), target).unwrap().explain()
    };
    assert!(
        chosen(47).starts_with("page 18 MiB (nearest 16 MiB with at most 4.7 % padding): "),
        "{}",
        chosen(47)
    );
    assert!(
        chosen(50).starts_with("page 18 MiB (nearest 16 MiB with at most 5 % padding): "),
        "{}",
        chosen(50)
    );
    assert!(chosen(6).starts_with("page 108 MiB (least padding up to 128 MiB): "), "{}", chosen(6));
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
    // Per layer only the run has to be filled, and ids stay dense.
    let target = Target { layout: Layout::PerLayer, ..Target::new(2 * MIB) };
    let per_layer = Geometry::solve(Shape::new(3, 2 * MIB, 16), target).unwrap();
    let halved = per_layer.with_block(MIB, 8).unwrap();
    assert_eq!((halved.run_bytes(), halved.page_bytes()), (per_layer.run_bytes(), per_layer.page_bytes()));
    let doubled = 2 * per_layer.blocks_per_page();
    assert_eq!((halved.blocks_per_page(), halved.ids_per_page()), (doubled, doubled));
    assert!(per_layer.with_block(4 * MIB, 8).is_err());
    // A cell's padding is forgotten: who sees other blocks fills it.
    let cell = Shape { cell_align: Some(8), ..Shape::new(1, 1000, 1) };
    let padded = Geometry::solve(cell, Target { page_bytes: Some(2 * MIB), ..Target::new(2 * MIB) }).unwrap();
    assert_eq!((padded.block_bytes(), padded.waste_bytes()), (1024, 2048 * 24));
    assert_eq!(padded.with_block(512, 1).unwrap().waste_bytes(), 0);
    let said = laid_out.with_block(3000, 1).unwrap_err().to_string();
    assert!(said.contains("block_bytes=3000"), "{said}");
    assert!(laid_out.with_block(512 * KIB, 1).is_err());
    assert!(laid_out.with_block(0, 1).is_err());
    assert!(laid_out.with_block(4096, 0).is_err());
}
