//! Where the blocks of a group lie (docs/GEOMETRY.md): pure arithmetic, no memory.
//!
//! Chunked, one range, page after page. A page holds m blocks of every buffer, buffer after buffer, then padding:
//!
//! ```text
//! [buffer 0: m blocks | buffer 1: m blocks | ... | buffer N-1: m blocks | pad]
//! ```
//!
//! `page_bytes` is a multiple of lcm(granularity, `block_bytes`), so that a row `id` lies at the plain stride
//! `id * block_bytes` in every buffer and no block straddles a page.
//!
//! Per layer, one range, buffer after buffer. A page is m blocks in each, and needs no padding:
//!
//! ```text
//! [buffer 0: page 0 | page 1 | ...][buffer 1: page 0 | page 1 | ...]...
//! ```

mod cell;
mod error;
mod explain;
mod solve;

use std::ops::Range;

pub use cell::{Cell, Component};
pub use error::GeometryError;

/// Engines keep ids and slots in int32.
const MAX_ID: u64 = i32::MAX as u64;

/// How the pages of a group lie in its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Page after page, each one handle that holds a chunk of every buffer. Ids are sparse.
    Chunked,
    /// Buffer after buffer; a page is one handle in each. Ids are dense, and a page costs the driver N times as much.
    PerLayer,
}

/// What is to be laid out: the buffers of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Buffers of the group, N.
    pub num_buffers: u32,
    /// Bytes of one block in one buffer.
    pub block_bytes: u64,
    /// Tokens of one block: what an id is multiplied with to become a slot.
    pub tokens_per_block: u32,
    /// Some: the block is a super-cell ([`Cell`]), which may be padded up to a multiple of this many bytes. None: blocks
    /// follow each other without a gap.
    pub cell_align: Option<u64>,
}

impl Shape {
    /// Blocks without a gap between them.
    pub fn new(num_buffers: u32, block_bytes: u64, tokens_per_block: u32) -> Self {
        Shape { num_buffers, block_bytes, tokens_per_block, cell_align: None }
    }
}

/// What the page has to suit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The driver's smallest allocation, bytes.
    pub granularity: u64,
    /// The page's least size over all its handles, bytes; None: as [`Geometry::solve`] sees fit.
    pub page_bytes: Option<u64>,
    /// How pages lie in the range.
    pub layout: Layout,
    /// The share of a page, in thousandths, that may hold no content and still count as none.
    pub waste_permille: u32,
    /// The blocks that will be reserved, whose ids and slots have to fit int32; None: any number.
    pub num_blocks: Option<u64>,
}

impl Target {
    /// The chunked layout, any page, waste of up to 2 %, any number of blocks.
    pub fn new(granularity: u64) -> Self {
        Target {
            granularity,
            page_bytes: None,
            layout: Layout::Chunked,
            waste_permille: 20,
            num_blocks: None,
        }
    }
}

/// Why a page has the size it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Choice {
    Nearest { permille: u32 },
    LeastPadding,
    Smallest,
    Asked(u64),
}

/// The layout of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    layout: Layout,
    num_buffers: u32,
    block_bytes: u64,
    content_bytes: u64,
    tokens_per_block: u32,
    page_bytes: u64,
    blocks_per_page: u32,
    ids_per_page: u32,
    choice: Choice,
    /// Whether a better page was passed over because its ids would not fit.
    ids_decided: bool,
}

impl Geometry {
    /// Chooses a page for `shape`. Candidates hold at least one block of every buffer: chunked, the multiples of
    /// lcm(granularity, stride); per layer, N times them. The stride is `block_bytes`, except for a super-cell: it has
    /// the candidates of every stride that is `block_bytes` rounded up to its alignment times a power of two, up to
    /// twice `block_bytes`. Where `num_blocks` is given, pages whose ids would not fit are no candidates.
    ///
    /// Without a page asked for: the candidate nearest 16 MiB of which at most `waste_permille` holds no content, else
    /// the one with the least share of waste up to 128 MiB; if none is so small, the smallest of all. With one: the
    /// smallest candidate that is at least as large. Of equals the smaller page, then the smaller stride. No page is
    /// larger than 1 GiB.
    ///
    /// At most 32,768 candidates of a stride are looked at: where the granularity is less than 4 KiB those around
    /// 16 MiB, and where a page is asked for, or none is so small, those from there up.
    ///
    /// Fails with `Zero`, `PageTooLarge` or `TooManyIds`.
    pub fn solve(shape: Shape, target: Target) -> Result<Geometry, GeometryError> {
        solve::solve(shape, target)
    }

    /// How the pages lie in the range.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Buffers of the group, N.
    pub fn num_buffers(&self) -> u32 {
        self.num_buffers
    }

    /// Bytes from one block to the next in one buffer; the stride of ids. A super-cell's padding is included.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Bytes of one block in one buffer as they were asked for, without a super-cell's padding.
    pub fn content_bytes(&self) -> u64 {
        self.content_bytes
    }

    /// Tokens of one block.
    pub fn tokens_per_block(&self) -> u32 {
        self.tokens_per_block
    }

    /// Bytes of one page, over all its handles.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Runs of a page: each is contiguous and one handle. One if chunked, one a buffer if per layer.
    pub fn runs_per_page(&self) -> u32 {
        match self.layout {
            Layout::Chunked => 1,
            Layout::PerLayer => self.num_buffers,
        }
    }

    /// Bytes of each run of a page.
    pub fn run_bytes(&self) -> u64 {
        self.page_bytes / u64::from(self.runs_per_page())
    }

    /// Bytes from the base to a run of a page, in a range of `num_pages` pages. `page` is less than `num_pages`, and `run`
    /// less than [`Geometry::runs_per_page`].
    pub fn run_offset(&self, page: u32, run: u32, num_pages: u32) -> u64 {
        // Neither sum nor product is beyond 64 bits: (2^32 - 1)^2 + 2^32 - 1 is less.
        let runs_before = u64::from(run) * u64::from(num_pages) + u64::from(page);
        runs_before.saturating_mul(self.run_bytes())
    }

    /// Blocks of each buffer in a page, m.
    pub fn blocks_per_page(&self) -> u32 {
        self.blocks_per_page
    }

    /// Ids from one page to the next. Of these only the first m have a block: all of them if per layer.
    pub fn ids_per_page(&self) -> u32 {
        self.ids_per_page
    }

    /// Bytes of a page's run in one buffer.
    pub fn chunk_bytes(&self) -> u64 {
        u64::from(self.blocks_per_page) * self.block_bytes
    }

    /// Bytes of a page that hold no content: padding at its end, and in super-cells.
    pub fn waste_bytes(&self) -> u64 {
        let blocks = u64::from(self.num_buffers) * u64::from(self.blocks_per_page);
        self.page_bytes - blocks * self.content_bytes
    }

    /// Pages that hold `num_blocks` blocks. Fails with `TooManyIds` where that count is beyond 32 bits.
    pub fn num_pages(&self, num_blocks: u64) -> Result<u32, GeometryError> {
        let pages = num_blocks.div_ceil(self.blocks_per_page.into());
        u32::try_from(pages).map_err(|_| self.too_many_ids(num_blocks))
    }

    /// Ids, and so rows of every buffer, that `num_blocks` blocks take. Fails with `TooManyIds` where that number, or
    /// that many blocks' tokens, would not fit int32.
    pub fn id_space(&self, num_blocks: u64) -> Result<u32, GeometryError> {
        self.ids(num_blocks).ok_or_else(|| self.too_many_ids(num_blocks))
    }

    /// The id of the `index`-th block. Fails with `NoSuchBlock` beyond 32 bits.
    pub fn block_id(&self, index: u64) -> Result<u32, GeometryError> {
        let m = u64::from(self.blocks_per_page);
        let id = (index / m).checked_mul(self.ids_per_page.into()).and_then(|id| id.checked_add(index % m));
        id.and_then(|id| u32::try_from(id).ok()).ok_or(GeometryError::NoSuchBlock { index })
    }

    /// The block that has this id; None for the ids between one page's blocks and the next's.
    pub fn index(&self, id: u32) -> Option<u64> {
        let (page, row) = (id / self.ids_per_page, id % self.ids_per_page);
        (row < self.blocks_per_page)
            .then(|| u64::from(page) * u64::from(self.blocks_per_page) + u64::from(row))
    }

    /// The pages that row `id` of any buffer touches, for every id: also one that has no block. At most two, and one if
    /// per layer.
    ///
    /// For the last ids of a range this may name the page after the last, which is never backed.
    pub fn pages_of_row(&self, id: u32) -> Range<u32> {
        if self.layout == Layout::PerLayer {
            let page = id / self.ids_per_page;
            return page..page.saturating_add(1);
        }
        // Buffer 0's row comes first and buffer N-1's ends last; both are less than a page apart, so nothing lies between.
        let start = u128::from(id) * u128::from(self.block_bytes);
        let between = u64::from(self.num_buffers - 1) * self.chunk_bytes();
        let last = start + u128::from(between + self.block_bytes - 1);
        let page = |byte: u128| u32::try_from(byte / u128::from(self.page_bytes)).unwrap_or(u32::MAX);
        page(start)..page(last).saturating_add(1)
    }

    /// Bytes from the base to buffer `i`, in a range of `num_pages` pages; None where there is no such buffer.
    pub fn buffer_offset(&self, i: u32, num_pages: u32) -> Option<u64> {
        // Fits where the range does.
        (i < self.num_buffers).then(|| u64::from(i).saturating_mul(self.buffer_stride(num_pages)))
    }

    /// Bytes from one buffer to the next, in a range of `num_pages` pages: from K to V, where these are neighbours.
    pub fn buffer_stride(&self, num_pages: u32) -> u64 {
        match self.layout {
            Layout::Chunked => self.chunk_bytes(),
            Layout::PerLayer => u64::from(num_pages) * self.run_bytes(),
        }
    }

    /// Bytes of addresses to reserve: the pages, and if chunked one more, which lets every buffer be equally long. Fails
    /// with `TooManyIds` or `RangeTooLarge`.
    pub fn range_bytes(&self, num_blocks: u64) -> Result<u64, GeometryError> {
        let spare = u64::from(self.layout == Layout::Chunked);
        let pages = u64::from(self.num_pages(num_blocks)?) + spare;
        pages.checked_mul(self.page_bytes).ok_or(GeometryError::RangeTooLarge { num_blocks })
    }

    /// The same pages and chunks seen in blocks of `block_bytes`: for a group whose tensors were laid out before its block
    /// size was known. Fails with `Zero`, or with `NotWhole` where the blocks would not fill chunk and page.
    pub fn with_block(&self, block_bytes: u64, tokens_per_block: u32) -> Result<Geometry, GeometryError> {
        for (what, value) in [("block_bytes", block_bytes), ("tokens_per_block", tokens_per_block.into())] {
            if value == 0 {
                return Err(GeometryError::Zero { what });
            }
        }
        let (chunk_bytes, page_bytes) = (self.chunk_bytes(), self.page_bytes);
        let ids_bytes = self.block_bytes * u64::from(self.ids_per_page);
        let whole = chunk_bytes.is_multiple_of(block_bytes) && ids_bytes.is_multiple_of(block_bytes);
        let count = |bytes: u64| u32::try_from(bytes / block_bytes).ok();
        match (whole, count(chunk_bytes), count(ids_bytes)) {
            (true, Some(blocks_per_page), Some(ids_per_page)) => Ok(Geometry {
                block_bytes,
                content_bytes: block_bytes,
                tokens_per_block,
                blocks_per_page,
                ids_per_page,
                ..*self
            }),
            _ => Err(GeometryError::NotWhole { block_bytes, chunk_bytes, page_bytes }),
        }
    }

    /// Bytes at the end of a page that belong to no block.
    fn page_padding(&self) -> u64 {
        self.page_bytes - u64::from(self.num_buffers) * self.chunk_bytes()
    }

    fn permille(&self, bytes: u64) -> u32 {
        let rounded = (bytes * 1000 + self.page_bytes / 2) / self.page_bytes;
        u32::try_from(rounded).unwrap_or(1000)
    }

    /// None where ids or slots do not fit int32.
    fn ids(&self, num_blocks: u64) -> Option<u32> {
        let pages = u32::try_from(num_blocks.div_ceil(self.blocks_per_page.into())).ok()?;
        let ids = u64::from(pages) * u64::from(self.ids_per_page);
        let slots = ids.checked_mul(self.tokens_per_block.into())?;
        u32::try_from(ids).ok().filter(|_| slots <= MAX_ID)
    }

    fn too_many_ids(&self, num_blocks: u64) -> GeometryError {
        let m = u64::from(self.blocks_per_page);
        let page_slots = u64::from(self.ids_per_page) * u64::from(self.tokens_per_block);
        GeometryError::TooManyIds {
            num_blocks,
            ids: u128::from(num_blocks.div_ceil(m)) * u128::from(self.ids_per_page),
            tokens_per_block: self.tokens_per_block,
            max_blocks: MAX_ID / page_slots * m,
            padding_permille: self.permille(self.page_padding()),
            layout: self.layout,
        }
    }
}
