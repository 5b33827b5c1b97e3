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
        let (page, slot) = (id / self.ids_per_page, id % self.ids_per_page);
        (page < self.num_pages() && slot < self.capacity(page)).then_some((page, slot))
    }

    /// Place of a page in the order of preference, and its own inverse: the lowest rank is backed first.
    pub(crate) fn rank(&self, page: u32) -> u32 {
        match self.order {
            PageOrder::LowestFirst => page,
            PageOrder::HighestFirst => self.num_pages() - 1 - page,
        }
    }
}
