//! The pages of real models on a device of 2 MiB granularity, as docs/GEOMETRY.md shows them.

#![allow(clippy::unwrap_used)]

use std::fs;

use kvcached_vmm::{Cell, Component, Geometry, Layout, Shape, Target};

const MIB: u64 = 1 << 20;
/// Bytes of a value in bf16.
const BF16: u64 = 2;
/// Where components of a cell begin: what CUDA gives a tensor of its own.
const ALIGN: u64 = 256;

/// One group of a model, and what is expected of it in each layout.
struct Group {
    name: &'static str,
    shape: Shape,
    chunked: Expected,
    per_layer: Expected,
}

/// Bytes of a page, blocks of each buffer in it, ids, bytes without content, and the line that says so; or the error.
type Expected = Result<(u64, u32, u32, u64, &'static str), &'static str>;

/// K and V apart, or together in one buffer, of layers that keep `heads` heads of `width` values for every token.
fn attention(layers: u32, apart: bool, heads: u64, width: u64, tokens: u32) -> Shape {
    let half = u64::from(tokens) * heads * width * BF16;
    match apart {
        true => Shape::new(2 * layers, half, tokens),
        false => Shape::new(layers, 2 * half, tokens),
    }
}

/// A super-cell of two components.
fn cell(layers: u32, tokens: u32, first: u64, second: u64) -> Shape {
    let components = [first, second].map(|bytes| Component { bytes, align: ALIGN });
    Cell::pack(&components).unwrap().shape(layers, tokens)
}

fn groups() -> Vec<Group> {
    vec![
        Group {
            name: "Llama-3 8B, K and V apart",
            shape: attention(32, true, 8, 128, 16),
            chunked: Ok((
                16 * MIB,
                8,
                512,
                0,
                "page 16 MiB (nearest 16 MiB with at most 2 % padding): 64 buffers x 256 KiB chunk of 8 blocks (128 tokens), padding 0.0 %, 512 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                128 * MIB,
                64,
                64,
                0,
                "page 128 MiB (nearest 16 MiB with at most 2 % padding): 64 buffers x 2 MiB chunk of 64 blocks (1024 tokens), padding 0.0 %, 64 ids a page, per-layer: 64 handles of 2 MiB a page",
            )),
        },
        Group {
            name: "Llama-3 8B, K and V together",
            shape: attention(32, false, 8, 128, 16),
            chunked: Ok((
                16 * MIB,
                8,
                256,
                0,
                "page 16 MiB (nearest 16 MiB with at most 2 % padding): 32 buffers x 512 KiB chunk of 8 blocks (128 tokens), padding 0.0 %, 256 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                64 * MIB,
                32,
                32,
                0,
                "page 64 MiB (nearest 16 MiB with at most 2 % padding): 32 buffers x 2 MiB chunk of 32 blocks (512 tokens), padding 0.0 %, 32 ids a page, per-layer: 32 handles of 2 MiB a page",
            )),
        },
        Group {
            name: "Llama-3 70B",
            shape: attention(80, true, 8, 128, 16),
            chunked: Ok((
                20 * MIB,
                4,
                640,
                0,
                "page 20 MiB (nearest 16 MiB with at most 2 % padding): 160 buffers x 128 KiB chunk of 4 blocks (64 tokens), padding 0.0 %, 640 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                320 * MIB,
                64,
                64,
                0,
                "page 320 MiB (smallest that backs every buffer): 160 buffers x 2 MiB chunk of 64 blocks (1024 tokens), padding 0.0 %, 64 ids a page, per-layer: 160 handles of 2 MiB a page",
            )),
        },
        Group {
            name: "Llama-3 70B, one rank of 8",
            shape: attention(80, true, 1, 128, 16),
            chunked: Ok((
                14 * MIB,
                22,
                3584,
                262_144,
                "page 14 MiB (nearest 16 MiB with at most 2 % padding): 160 buffers x 88 KiB chunk of 22 blocks (352 tokens), padding 1.8 %, 3584 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                320 * MIB,
                512,
                512,
                0,
                "page 320 MiB (smallest that backs every buffer): 160 buffers x 2 MiB chunk of 512 blocks (8192 tokens), padding 0.0 %, 512 ids a page, per-layer: 160 handles of 2 MiB a page",
            )),
        },
        Group {
            name: "Qwen3 0.6B",
            shape: attention(28, true, 8, 128, 16),
            chunked: Ok((
                16 * MIB,
                9,
                512,
                262_144,
                "page 16 MiB (nearest 16 MiB with at most 2 % padding): 56 buffers x 288 KiB chunk of 9 blocks (144 tokens), padding 1.6 %, 512 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                112 * MIB,
                64,
                64,
                0,
                "page 112 MiB (nearest 16 MiB with at most 2 % padding): 56 buffers x 2 MiB chunk of 64 blocks (1024 tokens), padding 0.0 %, 64 ids a page, per-layer: 56 handles of 2 MiB a page",
            )),
        },
        Group {
            name: "Qwen3 32B",
            shape: attention(64, true, 8, 128, 16),
            chunked: Ok((
                16 * MIB,
                4,
                512,
                0,
                "page 16 MiB (nearest 16 MiB with at most 2 % padding): 128 buffers x 128 KiB chunk of 4 blocks (64 tokens), padding 0.0 %, 512 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                256 * MIB,
                64,
                64,
                0,
                "page 256 MiB (smallest that backs every buffer): 128 buffers x 2 MiB chunk of 64 blocks (1024 tokens), padding 0.0 %, 64 ids a page, per-layer: 128 handles of 2 MiB a page",
            )),
        },
        // A latent of 512 values and 64 of position.
        Group {
            name: "DeepSeek-V3, MLA",
            shape: Shape::new(61, 64 * 576 * BF16, 64),
            chunked: Ok((
                108 * MIB,
                25,
                1536,
                811_008,
                "page 108 MiB (nearest 16 MiB with at most 2 % padding): 61 buffers x 1800 KiB chunk of 25 blocks (1600 tokens), padding 0.7 %, 1536 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Err(
                "61 buffers with blocks of 72 KiB need a page of 1098 MiB, more than 1 GiB: use the chunked layout, whose pages are one handle for all buffers",
            ),
        },
        // The indexer's key of 128 bytes (fp8) and its scale (float32).
        Group {
            name: "DeepSeek-V3.2, latent and indexer",
            shape: cell(61, 64, 64 * 576 * BF16, 64 * 132),
            chunked: Ok((
                126 * MIB,
                25,
                1536,
                6_802_176,
                "page 126 MiB (least padding up to 128 MiB): 61 buffers x 2100 KiB chunk of 25 blocks (1600 tokens), padding 5.1 % (page 0.7 %, cell 4.4 %: 82176 bytes every 86016), 1536 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                122 * MIB,
                16,
                16,
                47_722_496,
                "page 122 MiB (least padding up to 128 MiB): 61 buffers x 2 MiB chunk of 16 blocks (1024 tokens), padding 37.3 % (page 0.0 %, cell 37.3 %: 82176 bytes every 131072), 16 ids a page, per-layer: 61 handles of 2 MiB a page",
            )),
        },
        Group {
            name: "Gemma-3 27B, full attention",
            shape: attention(10, true, 16, 128, 16),
            chunked: Ok((
                14 * MIB,
                11,
                224,
                262_144,
                "page 14 MiB (nearest 16 MiB with at most 2 % padding): 20 buffers x 704 KiB chunk of 11 blocks (176 tokens), padding 1.8 %, 224 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                40 * MIB,
                32,
                32,
                0,
                "page 40 MiB (nearest 16 MiB with at most 2 % padding): 20 buffers x 2 MiB chunk of 32 blocks (512 tokens), padding 0.0 %, 32 ids a page, per-layer: 20 handles of 2 MiB a page",
            )),
        },
        Group {
            name: "Gemma-3 27B, sliding window",
            shape: attention(52, true, 16, 128, 16),
            chunked: Ok((
                26 * MIB,
                4,
                416,
                0,
                "page 26 MiB (nearest 16 MiB with at most 2 % padding): 104 buffers x 256 KiB chunk of 4 blocks (64 tokens), padding 0.0 %, 416 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                208 * MIB,
                32,
                32,
                0,
                "page 208 MiB (smallest that backs every buffer): 104 buffers x 2 MiB chunk of 32 blocks (512 tokens), padding 0.0 %, 32 ids a page, per-layer: 104 handles of 2 MiB a page",
            )),
        },
        // vLLM widens attention's blocks until they hold a state of the other layers.
        Group {
            name: "Qwen3-Next 80B, attention",
            shape: attention(12, false, 2, 256, 544),
            chunked: Ok((
                102 * MIB,
                8,
                96,
                0,
                "page 102 MiB (nearest 16 MiB with at most 2 % padding): 12 buffers x 8704 KiB chunk of 8 blocks (4352 tokens), padding 0.0 %, 96 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                408 * MIB,
                32,
                32,
                0,
                "page 408 MiB (smallest that backs every buffer): 12 buffers x 34 MiB chunk of 32 blocks (17408 tokens), padding 0.0 %, 32 ids a page, per-layer: 12 handles of 34 MiB a page",
            )),
        },
        Group {
            name: "Qwen3-Next 80B, linear attention",
            shape: cell(36, 1, 8192 * 3 * BF16, 32 * 128 * 128 * BF16),
            chunked: Ok((
                126 * MIB,
                3,
                112,
                13_565_952,
                "page 126 MiB (least padding up to 128 MiB): 36 buffers x 3456 KiB chunk of 3 blocks (3 tokens), padding 10.3 % (page 3.6 %, cell 6.7 %: 1097728 bytes every 1179648), 112 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                72 * MIB,
                1,
                1,
                35_979_264,
                "page 72 MiB (least padding up to 128 MiB): 36 buffers x 2 MiB chunk of 1 blocks (1 tokens), padding 47.7 % (page 0.0 %, cell 47.7 %: 1097728 bytes every 2097152), 1 ids a page, per-layer: 36 handles of 2 MiB a page",
            )),
        },
        Group {
            name: "Qwen3.5 27B, attention",
            shape: attention(16, false, 4, 256, 784),
            chunked: Ok((
                98 * MIB,
                2,
                32,
                0,
                "page 98 MiB (nearest 16 MiB with at most 2 % padding): 16 buffers x 6272 KiB chunk of 2 blocks (1568 tokens), padding 0.0 %, 32 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Err(
                "16 buffers with blocks of 3136 KiB need a page of 1568 MiB, more than 1 GiB: use the chunked layout, whose pages are one handle for all buffers",
            ),
        },
        Group {
            name: "Mamba-2 2.7B",
            shape: cell(64, 1, 5376 * 3 * BF16, 80 * 64 * 128 * BF16),
            chunked: Ok((
                82 * MIB,
                1,
                64,
                32_768,
                "page 82 MiB (nearest 16 MiB with at most 2 % padding): 64 buffers x 1312 KiB chunk of 1 blocks (1 tokens), padding 0.0 % (page 0.0 %, cell 0.0 %: 1342976 bytes every 1343488), 64 ids a page, chunked: 1 handle a page",
            )),
            per_layer: Ok((
                128 * MIB,
                1,
                1,
                48_267_264,
                "page 128 MiB (least padding up to 128 MiB): 64 buffers x 2 MiB chunk of 1 blocks (1 tokens), padding 36.0 % (page 0.0 %, cell 36.0 %: 1342976 bytes every 2097152), 1 ids a page, per-layer: 64 handles of 2 MiB a page",
            )),
        },
    ]
}

fn solve(group: &Group, layout: Layout) -> Result<Geometry, String> {
    let target = Target { layout, ..Target::new(2 * MIB) };
    Geometry::solve(group.shape, target).map_err(|error| error.to_string())
}

#[test]
fn real_models_have_these_pages() {
    for group in groups() {
        for (layout, expected) in [(Layout::Chunked, group.chunked), (Layout::PerLayer, group.per_layer)] {
            let found = solve(&group, layout).map(|g| {
                (g.page_bytes(), g.blocks_per_page(), g.ids_per_page(), g.waste_bytes(), g.explain())
            });
            let expected = expected
                .map(|(page, blocks, ids, waste, line)| (page, blocks, ids, waste, line.to_owned()))
                .map_err(str::to_owned);
            assert_eq!(found, expected, "{}, {layout}", group.name);
        }
    }
}

/// The table of docs/GEOMETRY.md.
fn table() -> String {
    let mut table = String::from(
        "| group | buffers | bytes of a block | layout | page | blocks (tokens) a page | ids a page | padding | handles a page |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for group in groups() {
        for layout in [Layout::Chunked, Layout::PerLayer] {
            let Shape { num_buffers, block_bytes, .. } = group.shape;
            let row = match solve(&group, layout) {
                Ok(geometry) => row(&geometry),
                Err(error) => format!("{block_bytes} | {layout} | none | {error} | - | - | -"),
            };
            table += &format!("| {} | {num_buffers} | {row} |\n", group.name);
        }
    }
    table
}

fn row(geometry: &Geometry) -> String {
    let (content, stride) = (geometry.content_bytes(), geometry.block_bytes());
    let block = if content == stride { content.to_string() } else { format!("{content} every {stride}") };
    let blocks = geometry.blocks_per_page();
    format!(
        "{block} | {} | {} MiB | {blocks} ({}) | {} | {:.1} % | {} x {} MiB",
        geometry.layout(),
        geometry.page_bytes() >> 20,
        blocks * geometry.tokens_per_block(),
        geometry.ids_per_page(),
        geometry.waste_bytes() as f64 * 100.0 / geometry.page_bytes() as f64,
        geometry.runs_per_page(),
        geometry.run_bytes() >> 20,
    )
}

#[test]
fn the_document_shows_these_pages() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/GEOMETRY.md");
    let document = fs::read_to_string(path).unwrap();
    assert!(document.contains(&table()), "{path} should hold this table:\n\n{}", table());
}
