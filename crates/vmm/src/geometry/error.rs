//! What a geometry cannot do.

use thiserror::Error;

use super::explain::{Bytes, percent};
use super::solve::MAX_PAGE_BYTES;
use super::{Layout, MAX_ID};

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
    /// One block of every buffer, one handle of every buffer, or the page asked for needs a page beyond the limit.
    #[error(
        "{num_buffers} buffers with blocks of {} need a page of {}, more than {}: {advice}",
        Bytes(*block_bytes), page_bytes.map_or("more than 16 EiB".to_owned(), |b| Bytes(b).to_string()), Bytes(MAX_PAGE_BYTES),
    )]
    PageTooLarge {
        /// Buffers of the group.
        num_buffers: u32,
        /// Bytes of one block in one buffer.
        block_bytes: u64,
        /// The smallest page that would do, bytes; None: beyond 64 bits.
        page_bytes: Option<u64>,
        /// What would help.
        advice: &'static str,
    },
    /// Ids or slots would not fit the int32 in which engines keep them.
    #[error(
        "{num_blocks} blocks need {ids} ids of {tokens_per_block} tokens, which do not fit int32: \
         reserve at most {max_blocks} blocks{}",
        fewer_ids(*layout, *num_blocks, *tokens_per_block, *padding_permille)
    )]
    TooManyIds {
        /// What was to be held.
        num_blocks: u64,
        /// The ids that takes.
        ids: u128,
        /// Tokens of one block.
        tokens_per_block: u32,
        /// The most blocks that fit in pages of this size.
        max_blocks: u64,
        /// Padding at the end of a page, in thousandths.
        padding_permille: u32,
        /// How the ids are given out.
        layout: Layout,
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
    /// An alignment that no address arithmetic of an engine can use.
    #[error("an alignment of {align} bytes is not a power of two")]
    Alignment {
        /// The alignment, bytes.
        align: u64,
    },
    /// The components of a cell are beyond 64 bits.
    #[error("the components of a cell need more than 16 EiB: a block is smaller")]
    CellTooLarge,
}

/// What else would make ids fit. Dense ids would not where the blocks' own tokens are too many.
fn fewer_ids(layout: Layout, num_blocks: u64, tokens_per_block: u32, padding_permille: u32) -> String {
    match layout {
        Layout::PerLayer => String::new(),
        Layout::Chunked => {
            let padding = percent(padding_permille);
            let dense_fit =
                num_blocks.checked_mul(tokens_per_block.into()).is_some_and(|slots| slots <= MAX_ID);
            let hint = if dense_fit { "; hint: Layout::PerLayer has dense ids" } else { "" };
            format!(", or choose a page with less padding (now {padding} %){hint}")
        }
    }
}
