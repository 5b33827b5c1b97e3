//! Where the blocks of a group lie (docs/ARCHITECTURE.md, Addresses): pure arithmetic, no memory.
//!
//! A page holds m blocks of every buffer, buffer after buffer, then padding:
//!
//! ```text
//! [buffer 0: m blocks | buffer 1: m blocks | ... | buffer N-1: m blocks | pad]
//! ```
//!
//! `page_bytes` is a multiple of lcm(granularity, `block_bytes`), so that a row `id` lies at the plain stride
//! `id * block_bytes` in every buffer and no block straddles a page.

use std::fmt;
use std::ops::Range;

use thiserror::Error;

/// Where the search for a page starts: large enough that driver calls are few, small enough to give back soon.
const PREFERRED_PAGE_BYTES: u64 = 16 << 20;
/// The search ends here.
const SEARCH_PAGE_BYTES: u64 = 128 << 20;
/// No page is larger, whatever is asked for.
const MAX_PAGE_BYTES: u64 = 1 << 30;
/// Padding of at most one part in this many is as good as none: 2 %.
const PADDING_PARTS: u128 = 50;
/// Engines keep ids and slots in int32.
const MAX_ID: u64 = i32::MAX as u64;

/// What is to be laid out: the buffers of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Buffers of the group, N.
    pub num_buffers: u32,
    /// Bytes of one block in one buffer.
    pub block_bytes: u64,
    /// Tokens of one block: what an id is multiplied with to become a slot.
    pub tokens_per_block: u32,
}

/// What the page has to suit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The driver's smallest allocation, bytes.
    pub granularity: u64,
    /// The page's least size, bytes; None: as [`Geometry::solve`] sees fit.
    pub page_bytes: Option<u64>,
}

/// Why no geometry can be had, or why one cannot hold so much.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// Tensors laid out for other blocks cannot hold these whole.
    #[error(
        "blocks of {block_bytes} bytes do not fill chunks of {chunk_bytes} bytes in pages of {page_bytes}; \
         create the tensors with block_bytes={block_bytes}"
    )]
    NotWhole {
        /// Bytes of one block in one buffer.
        block_bytes: u64,
        /// Bytes of a page's run in one buffer.
        chunk_bytes: u64,
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// A size or a count is zero.
    #[error("{what} must be at least 1")]
    Zero {
        /// Which.
        what: &'static str,
    },
    /// One block of every buffer, or the page asked for, needs a page beyond the limit.
    #[error(
        "{num_buffers} buffers with blocks of {} need a page of {}, more than {}: {}",
        Bytes(*block_bytes), page_bytes.map_or("more than 16 EiB".to_owned(), |b| Bytes(b).to_string()), Bytes(MAX_PAGE_BYTES),
        if *asked { "ask for a smaller page" } else { "use fewer tokens a block, or buffers whose block size divides the granularity" },
    )]
    PageTooLarge {
        /// Buffers of the group.
        num_buffers: u32,
        /// Bytes of one block in one buffer.
        block_bytes: u64,
        /// The smallest page that would do, bytes; None: beyond 64 bits.
        page_bytes: Option<u64>,
        /// Whether a page of this size was asked for rather than needed.
        asked: bool,
    },
    /// Ids or slots would not fit the int32 in which engines keep them.
    #[error(
        "{num_blocks} blocks need {ids} ids of {tokens_per_block} tokens, which do not fit int32: \
         reserve at most {max_blocks} blocks, or choose a page with less padding (now {:.1} %)",
        f64::from(*padding_permille) / 10.0
    )]
    TooManyIds {
        /// What was to be held.
        num_blocks: u64,
        /// The ids that takes.
        ids: u128,
        /// Tokens of one block.
        tokens_per_block: u32,
        /// The most blocks that fit.
        max_blocks: u64,
        /// Padding of a page, in thousandths.
        padding_permille: u32,
    },
    /// The page is not made of the driver's smallest allocations.
    #[error("a page of {} is not a multiple of the device's granularity of {}: solve for this device", Bytes(*page_bytes), Bytes(*granularity))]
    Granularity {
        /// Bytes of the page.
        page_bytes: u64,
        /// The device's smallest allocation, bytes.
        granularity: u64,
    },
    /// No id belongs to that block: ids are 32 bits wide.
    #[error("block {index} has no 32-bit id")]
    NoSuchBlock {
        /// The block.
        index: u64,
    },
    /// The addresses are beyond 64 bits.
    #[error("{num_blocks} blocks need more than 16 EiB of addresses: reserve fewer")]
    RangeTooLarge {
        /// What was to be held.
        num_blocks: u64,
    },
}

/// Why a page has the size it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Choice {
    Nearest,
    LeastPadding,
    OneBlock,
    Asked(u64),
}

/// The layout of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    num_buffers: u32,
    block_bytes: u64,
    tokens_per_block: u32,
    page_bytes: u64,
    blocks_per_page: u32,
    ids_per_page: u32,
    choice: Choice,
}

impl Geometry {
    /// Chooses a page for `shape`. Candidates are the multiples of lcm(granularity, `block_bytes`) that hold at least one
    /// block of every buffer.
    ///
    /// Without a target: the candidate nearest 16 MiB whose padding is at most 2 %, else the one with the least share of
    /// padding up to 128 MiB (of equals the smaller); if none is so small, the smallest of all. With one: the smallest
    /// candidate that is at least the target. No page is larger than 1 GiB.
    ///
    /// Fails with `Zero` or `PageTooLarge`.
    pub fn solve(shape: Shape, target: Target) -> Result<Geometry, GeometryError> {
        let Shape { num_buffers, block_bytes, tokens_per_block } = shape;
        let given = [
            ("num_buffers", u64::from(num_buffers)),
            ("block_bytes", block_bytes),
            ("tokens_per_block", tokens_per_block.into()),
            ("granularity", target.granularity),
            ("page_bytes", target.page_bytes.unwrap_or(1)),
        ];
        if let Some((what, _)) = given.into_iter().find(|(_, value)| *value == 0) {
            return Err(GeometryError::Zero { what });
        }
        // Without a page asked for, the least page says what is needed.
        let too_large = |page_bytes: Option<u64>, asked| GeometryError::PageTooLarge {
            num_buffers,
            block_bytes,
            page_bytes,
            asked,
        };
        let row_bytes = block_bytes.checked_mul(num_buffers.into()).ok_or(too_large(None, false))?;
        let unit = lcm(target.granularity, block_bytes).ok_or(too_large(None, false))?;
        let least = row_bytes.checked_next_multiple_of(unit);
        let least = least.filter(|l| *l <= MAX_PAGE_BYTES).ok_or(too_large(least, false))?;
        let (page_bytes, choice) = match target.page_bytes {
            Some(asked) => {
                let page = asked.max(least).checked_next_multiple_of(unit);
                (page.filter(|p| *p <= MAX_PAGE_BYTES).ok_or(too_large(page, true))?, Choice::Asked(asked))
            }
            None => choose(row_bytes, unit, least),
        };
        let count = |n: u64| u32::try_from(n).map_err(|_| too_large(Some(page_bytes), false));
        Ok(Geometry {
            num_buffers,
            block_bytes,
            tokens_per_block,
            page_bytes,
            blocks_per_page: count(page_bytes / row_bytes)?,
            ids_per_page: count(page_bytes / block_bytes)?,
            choice,
        })
    }

    /// Buffers of the group, N.
    pub fn num_buffers(&self) -> u32 {
        self.num_buffers
    }

    /// Bytes of one block in one buffer; the stride of ids.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Tokens of one block.
    pub fn tokens_per_block(&self) -> u32 {
        self.tokens_per_block
    }

    /// Bytes of one page.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Blocks of each buffer in a page, m.
    pub fn blocks_per_page(&self) -> u32 {
        self.blocks_per_page
    }

    /// Ids from one page to the next. Of these only the first m have a block.
    pub fn ids_per_page(&self) -> u32 {
        self.ids_per_page
    }

    /// Bytes of a page's run in one buffer.
    pub fn chunk_bytes(&self) -> u64 {
        u64::from(self.blocks_per_page) * self.block_bytes
    }

    /// Bytes of a page that hold no block.
    pub fn waste_bytes(&self) -> u64 {
        self.page_bytes - u64::from(self.num_buffers) * self.chunk_bytes()
    }

    /// Pages that hold `num_blocks` blocks. Fails with `TooManyIds` where that count is beyond 32 bits.
    pub fn num_pages(&self, num_blocks: u64) -> Result<u32, GeometryError> {
        let pages = num_blocks.div_ceil(self.blocks_per_page.into());
        u32::try_from(pages).map_err(|_| self.too_many_ids(num_blocks))
    }

    /// Ids, and so rows of every buffer, that `num_blocks` blocks take. Fails with `TooManyIds` where that number, or
    /// that many blocks' tokens, would not fit int32.
    pub fn id_space(&self, num_blocks: u64) -> Result<u32, GeometryError> {
        let ids = u64::from(self.num_pages(num_blocks)?) * u64::from(self.ids_per_page);
        let slots = ids.checked_mul(self.tokens_per_block.into());
        match u32::try_from(ids) {
            Ok(ids) if slots.is_some_and(|s| s <= MAX_ID) => Ok(ids),
            _ => Err(self.too_many_ids(num_blocks)),
        }
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

    /// The pages that row `id` of any buffer touches, for every id: also one that has no block. At most two.
    ///
    /// For the last ids of a range this may name the page after the last, which is never backed.
    pub fn pages_of_row(&self, id: u32) -> Range<u32> {
        // Buffer 0's row comes first and buffer N-1's ends last; both are less than a page apart, so nothing lies between.
        let start = u128::from(id) * u128::from(self.block_bytes);
        let last = start
            + u128::from(self.page_bytes - self.waste_bytes() - self.chunk_bytes() + self.block_bytes - 1);
        let page = |byte: u128| u32::try_from(byte / u128::from(self.page_bytes)).unwrap_or(u32::MAX);
        page(start)..page(last).saturating_add(1)
    }

    /// Bytes from the base to buffer `i`; None where there is no such buffer.
    pub fn buffer_offset(&self, i: u32) -> Option<u64> {
        (i < self.num_buffers).then(|| u64::from(i) * self.chunk_bytes())
    }

    /// Bytes of addresses to reserve: the pages and one more, which lets every buffer be equally long. Fails with
    /// `TooManyIds` or `RangeTooLarge`.
    pub fn range_bytes(&self, num_blocks: u64) -> Result<u64, GeometryError> {
        let pages = u64::from(self.num_pages(num_blocks)?) + 1;
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
        let chunk_bytes = self.chunk_bytes();
        let whole = chunk_bytes.is_multiple_of(block_bytes) && self.page_bytes.is_multiple_of(block_bytes);
        let count = |bytes: u64| u32::try_from(bytes / block_bytes).ok();
        match (whole, count(chunk_bytes), count(self.page_bytes)) {
            (true, Some(blocks_per_page), Some(ids_per_page)) => {
                Ok(Geometry { block_bytes, tokens_per_block, blocks_per_page, ids_per_page, ..*self })
            }
            _ => Err(GeometryError::NotWhole { block_bytes, chunk_bytes, page_bytes: self.page_bytes }),
        }
    }

    /// One line that says what was chosen and why.
    pub fn explain(&self) -> String {
        let why = match self.choice {
            Choice::Nearest => "nearest 16 MiB with at most 2 % padding".to_owned(),
            Choice::LeastPadding => "least padding up to 128 MiB".to_owned(),
            Choice::OneBlock => "smallest that holds a block of every buffer".to_owned(),
            Choice::Asked(least) => format!("smallest of at least {}", Bytes(least)),
        };
        let m = u64::from(self.blocks_per_page);
        format!(
            "page {} ({why}): {} buffers x {} chunk of {m} blocks ({} tokens), padding {:.1} %, {} ids a page",
            Bytes(self.page_bytes),
            self.num_buffers,
            Bytes(self.chunk_bytes()),
            m * u64::from(self.tokens_per_block),
            f64::from(self.padding_permille()) / 10.0,
            self.ids_per_page,
        )
    }

    fn padding_permille(&self) -> u32 {
        let rounded = (self.waste_bytes() * 1000 + self.page_bytes / 2) / self.page_bytes;
        u32::try_from(rounded).unwrap_or(1000)
    }

    fn too_many_ids(&self, num_blocks: u64) -> GeometryError {
        let m = u64::from(self.blocks_per_page);
        let page_slots = u64::from(self.ids_per_page) * u64::from(self.tokens_per_block);
        GeometryError::TooManyIds {
            num_blocks,
            ids: u128::from(num_blocks.div_ceil(m)) * u128::from(self.ids_per_page),
            tokens_per_block: self.tokens_per_block,
            max_blocks: MAX_ID / page_slots * m,
            padding_permille: self.padding_permille(),
        }
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.explain())
    }
}

/// The page for whom no size was asked; `least` is the smallest candidate. At most 128 MiB / `unit` steps.
fn choose(row_bytes: u64, unit: u64, least: u64) -> (u64, Choice) {
    if least > SEARCH_PAGE_BYTES {
        return (least, Choice::OneBlock);
    }
    let little_padding = |page: u64| u128::from(page % row_bytes) * PADDING_PARTS <= u128::from(page);
    // Outward from 16 MiB, the smaller of two equally near first.
    let mut down = Some(PREFERRED_PAGE_BYTES / unit * unit).filter(|d| *d >= least);
    let mut up = down.map_or(least, |d| d + unit);
    loop {
        let up_left = (up <= SEARCH_PAGE_BYTES).then_some(up);
        let near = match (down, up_left) {
            (None, None) => break,
            (Some(d), Some(u)) if PREFERRED_PAGE_BYTES.abs_diff(u) < PREFERRED_PAGE_BYTES.abs_diff(d) => u,
            (Some(d), _) => d,
            (None, Some(u)) => u,
        };
        if little_padding(near) {
            return (near, Choice::Nearest);
        }
        if Some(near) == down {
            down = near.checked_sub(unit).filter(|d| *d >= least);
        } else {
            up += unit;
        }
    }
    // Shares compare as cross products: no rounding.
    let mut best = least;
    let mut page = least;
    while page <= SEARCH_PAGE_BYTES {
        if u128::from(page % row_bytes) * u128::from(best) < u128::from(best % row_bytes) * u128::from(page) {
            best = page;
        }
        page += unit;
    }
    (best, Choice::LeastPadding)
}

fn lcm(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}

/// A size as people read it: whole binary units where it is whole.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.into_iter().find(|(size, _)| self.0 >= *size && self.0.is_multiple_of(*size)) {
            Some((size, unit)) => write!(f, "{} {unit}", self.0 / size),
            None => write!(f, "{} bytes", self.0),
        }
    }
}
