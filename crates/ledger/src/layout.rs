//! How block ids lie in pages.

use crate::error::LayoutError;

/// Which unbacked page is backed next, and with it which ids are handed out first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PageOrder {
    /// Low pages first, so that an idle pool shrinks towards the start of its range.
    #[default]
    LowestFirst,
    /// High pages first: the switch by which kernels are proven with ids at the top of the id space.
    HighestFirst,
}

/// Blocks, pages and ids of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Usable blocks in all.
    pub num_blocks: u32,
    /// Usable blocks of one page (m). The last page may hold fewer.
    pub blocks_per_page: u32,
    /// Ids from one page to the next, at least `blocks_per_page`.
    pub ids_per_page: u32,
    /// Which page is backed next.
    pub order: PageOrder,
}

/// What becomes of a page whose last block was freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetirePolicy {
    /// Whoever frees a block knows that no queued work reads it: the page is reserved at once.
    Synchronous,
    /// Batches run behind the scheduler: the page is retired until [`Ledger::release_through`](crate::Ledger::release_through) confirms the
    /// latest epoch begun. With none outstanding it is reserved at once.
    Asynchronous,
}

impl Layout {
    /// Fails where no block, overlapping ids or an id beyond int32 would result.
    pub fn validate(&self) -> Result<(), LayoutError> {
        let Layout { num_blocks, blocks_per_page, ids_per_page, .. } = *self;
        if num_blocks == 0 || blocks_per_page == 0 {
            return Err(LayoutError::Empty { num_blocks, blocks_per_page });
        }
        if ids_per_page < blocks_per_page {
            return Err(LayoutError::Overlap { blocks_per_page, ids_per_page });
        }
        let last = num_blocks - 1;
        let highest =
            u64::from(last / blocks_per_page) * u64::from(ids_per_page) + u64::from(last % blocks_per_page);
        if highest > i32::MAX as u64 {
            return Err(LayoutError::IdSpace { highest });
        }
        Ok(())
    }

    /// Pages that hold `num_blocks` blocks.
    pub fn num_pages(&self) -> u32 {
        self.num_blocks.div_ceil(self.blocks_per_page)
    }

    /// Usable blocks of this page, which must exist.
    pub fn capacity(&self, page: u32) -> u32 {
        self.blocks_per_page.min(self.num_blocks - page * self.blocks_per_page)
    }

    /// Sparse id of block `slot` of `page`.
    pub fn block_id(&self, page: u32, slot: u32) -> u32 {
        page * self.ids_per_page + slot
    }

    /// Page and slot of an id, `None` where no block has it.
    pub fn locate(&self, id: u32) -> Option<(u32, u32)> {
        Grid::new(*self).locate(id)
    }
}

/// A valid [`Layout`] with what every allocation asks of it worked out once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) num_pages: u32,
    /// Never more than there are blocks.
    pub(crate) blocks_per_page: u32,
    ids_per_page: u32,
    last_capacity: u32,
    order: PageOrder,
}

impl Grid {
    pub(crate) fn new(layout: Layout) -> Self {
        let num_pages = layout.num_pages();
        Grid {
            num_pages,
            blocks_per_page: layout.blocks_per_page.min(layout.num_blocks),
            ids_per_page: layout.ids_per_page,
            last_capacity: layout.capacity(num_pages - 1),
            order: layout.order,
        }
    }

    /// Usable blocks of a page.
    pub(crate) fn capacity(&self, page: u32) -> u32 {
        if page + 1 == self.num_pages { self.last_capacity } else { self.blocks_per_page }
    }

    /// The last page, where it holds fewer blocks than the others.
    pub(crate) fn short_page(&self) -> Option<u32> {
        (self.last_capacity < self.blocks_per_page).then_some(self.num_pages - 1)
    }

    /// Slot of an id in the page that its number points to, `None` where no block has it.
    pub(crate) fn slot(&self, page: u32, id: u32) -> Option<u32> {
        let slot = id - page * self.ids_per_page;
        (page < self.num_pages && slot < self.capacity(page)).then_some(slot)
    }

    pub(crate) fn locate(&self, id: u32) -> Option<(u32, u32)> {
        let page = id / self.ids_per_page;
        self.slot(page, id).map(|slot| (page, slot))
    }

    /// Number of a block among all blocks, without the gaps that ids have.
    pub(crate) fn block(&self, page: u32, slot: u32) -> usize {
        page as usize * self.blocks_per_page as usize + slot as usize
    }

    /// Page and slot of a block number.
    pub(crate) fn place(&self, block: usize) -> (u32, u32) {
        let m = self.blocks_per_page as usize;
        ((block / m) as u32, (block % m) as u32)
    }

    pub(crate) fn block_id(&self, page: u32, slot: u32) -> u32 {
        page * self.ids_per_page + slot
    }

    /// Neighbouring ids of one page together, each run with its page, which need not exist. One division
    /// a run: engines free what they hold in runs.
    pub(crate) fn runs(self, mut ids: &[u32]) -> impl Iterator<Item = (u32, &[u32])> {
        std::iter::from_fn(move || {
            let page = ids.first()? / self.ids_per_page;
            let start = page * self.ids_per_page;
            let beyond = ids.iter().position(|id| id.wrapping_sub(start) >= self.ids_per_page);
            let (run, rest) = ids.split_at(beyond.unwrap_or(ids.len()));
            ids = rest;
            Some((page, run))
        })
    }

    /// Place of a page in the order of preference, and its own inverse: the lowest rank is backed first.
    pub(crate) fn rank(&self, page: u32) -> u32 {
        match self.order {
            PageOrder::LowestFirst => page,
            PageOrder::HighestFirst => self.num_pages - 1 - page,
        }
    }
}
