//! What callers can do wrong, as types. Each leaves the ledger as it was.

/// A layout that no ledger can keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// No block or no room for one in a page.
    #[error("a pool needs at least one block and one block a page, got {num_blocks} and {blocks_per_page}")]
    Empty {
        /// Usable blocks.
        num_blocks: u32,
        /// Usable blocks of one page.
        blocks_per_page: u32,
    },
    /// Ids of neighbouring pages would overlap.
    #[error("{blocks_per_page} blocks a page do not fit {ids_per_page} ids a page")]
    Overlap {
        /// Usable blocks of one page.
        blocks_per_page: u32,
        /// Ids from one page to the next.
        ids_per_page: u32,
    },
    /// Engines keep block ids in 32 signed bits.
    #[error("the highest block id {highest} does not fit int32; hint: fewer blocks or larger pages")]
    IdSpace {
        /// The id that does not fit.
        highest: u64,
    },
}

/// A caller's list of blocks that breaks the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// No block has this id: outside the id space, or the padding of a page.
    #[error("no block has id {id}")]
    Unknown {
        /// The id.
        id: u32,
    },
    /// Freed twice, or never issued.
    #[error("block {id} is not held: freed twice or never issued")]
    NotHeld {
        /// The id.
        id: u32,
    },
    /// The same id twice in one call.
    #[error("block {id} is named twice in one call")]
    Duplicate {
        /// The id.
        id: u32,
    },
    /// The null block stays for good.
    #[error("block {id} is the null block and cannot be given back")]
    Pinned {
        /// The id.
        id: u32,
    },
    /// Asked for by id, but somebody holds it.
    #[error("block {id} is held already")]
    Held {
        /// The id.
        id: u32,
    },
    /// Its page has no memory.
    #[error("block {id} lies in page {page}, which is not backed")]
    Unbacked {
        /// The id.
        id: u32,
        /// Its page.
        page: u32,
    },
    /// The memory limit leaves its page no memory.
    #[error("block {id} lies in page {page}, which the memory limit has taken out")]
    Withdrawn {
        /// The id.
        id: u32,
        /// Its page.
        page: u32,
    },
    /// Its page is lost.
    #[error("block {id} lies in page {page}, which is quarantined")]
    Quarantined {
        /// The id.
        id: u32,
        /// Its page.
        page: u32,
    },
}

/// Work was said to have ended that was never begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("epoch {epoch} was never begun; the latest is {latest}")]
pub struct EpochError {
    /// The epoch that was to end.
    pub epoch: u64,
    /// The latest one begun, 0 before the first.
    pub latest: u64,
}
