//! The ledger of one group: what it keeps, what can be read from it, and how one page changes.
//!
//! Nothing ever walks all pages but [`Ledger::clear`], [`Ledger::free_ids`] and [`Ledger::check`]. What
//! callers do lies in `blocks`, `pages`, `epochs` and `limit`.

use crate::error::LayoutError;
use crate::index::{Index, Kind, Page};
use crate::layout::{Grid, Layout, RetirePolicy};
use crate::ordered::OrderedBits;
use crate::state::{PageCounts, PageState, Transition};

/// Blocks by what may be done with them. Together with those held and those set aside they are all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// Free blocks of backed pages that can be issued now, without those set aside.
    pub backed: u32,
    /// Free blocks of backed pages that the limit keeps from being issued.
    pub draining: u32,
    /// Blocks of pages in state `Free`.
    pub unbacked: u32,
    /// Blocks of pages with a driver call under way. They hold none.
    pub in_motion: u32,
    /// Blocks of pages that the limit has taken out.
    pub withdrawn: u32,
    /// Blocks of quarantined pages: lost.
    pub quarantined: u32,
}

/// Page states, free blocks and epochs of one group. Compares equal only to a ledger in the very same state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ledger {
    pub(crate) layout: Layout,
    pub(crate) grid: Grid,
    pub(crate) policy: RetirePolicy,
    pub(crate) pages: Vec<Page>,
    /// Free blocks, by block number (see [`Grid::block`]), whatever the state of their page.
    pub(crate) free_blocks: OrderedBits,
    pub(crate) index: Index,
    /// Block numbers held for whoever allocates next, not yet issued to anybody.
    pub(crate) set_aside: OrderedBits,
    /// An id.
    pub(crate) pinned: Option<u32>,
    /// Pages that may hold memory, before the pinned block is considered.
    pub(crate) target: u32,
    pub(crate) begun: u64,
    pub(crate) ended: u64,
}

impl Ledger {
    /// A ledger whose pages are all `Free`.
    pub fn new(layout: Layout, policy: RetirePolicy) -> Result<Self, LayoutError> {
        layout.validate()?;
        let grid = Grid::new(layout);
        let num_blocks = layout.num_blocks as usize;
        let mut ledger = Ledger {
            layout,
            grid,
            policy,
            pages: Vec::with_capacity(grid.num_pages as usize),
            free_blocks: OrderedBits::new(num_blocks),
            index: Index::new(grid),
            set_aside: OrderedBits::new(num_blocks),
            pinned: None,
            target: grid.num_pages,
            begun: 0,
            ended: 0,
        };
        ledger.free_blocks.insert_range(0..num_blocks);
        for number in 0..grid.num_pages {
            let page = Page { state: PageState::Free, free: grid.capacity(number), draining: false };
            ledger.index.insert(number, page);
            ledger.pages.push(page);
        }
        ledger.debug_check();
        Ok(ledger)
    }

    // ---------------------------------------------------------------- reading

    /// Blocks, pages and ids.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Pages by state.
    pub fn page_counts(&self) -> PageCounts {
        self.index.page_counts()
    }

    /// Free blocks by what may be done with them.
    pub fn block_counts(&self) -> BlockCounts {
        let free = |kind| self.index.free_blocks(kind);
        let backed = self.issuable_blocks();
        let of_backed_pages =
            free(Kind::InUse) + free(Kind::Draining) + free(Kind::Reserved) + free(Kind::Retired);
        BlockCounts {
            backed,
            draining: of_backed_pages - backed,
            unbacked: free(Kind::Free),
            in_motion: free(Kind::Mapping) + free(Kind::Unmapping),
            withdrawn: free(Kind::Withdrawn),
            quarantined: free(Kind::Quarantined),
        }
    }

    /// Blocks on hand: an [`Ledger::alloc`] of that many succeeds. Counts those set aside.
    pub fn backed_free_blocks(&self) -> u32 {
        self.issuable_blocks() + self.set_aside_blocks()
    }

    /// Blocks that may still be allocated: on hand, of pages without memory, and of pages in motion, which
    /// hold none and are about to be one or the other. The latter do not count while there is an
    /// [excess](Ledger::excess): they are on their way out. Never those of withdrawn and quarantined pages.
    pub fn available_blocks(&self) -> u32 {
        let blocks = self.block_counts();
        let in_motion = if self.excess() == 0 { blocks.in_motion } else { 0 };
        blocks.backed + self.set_aside_blocks() + blocks.unbacked + in_motion
    }

    /// Blocks that [`Ledger::set_aside`] keeps for the next [`Ledger::alloc`].
    pub fn set_aside_blocks(&self) -> u32 {
        self.set_aside.len()
    }

    /// Blocks that somebody holds, the null block among them, those set aside not.
    pub fn held_blocks(&self) -> u32 {
        self.layout.num_blocks - self.index.all_free_blocks() - self.set_aside_blocks()
    }

    /// State of a page, `None` where there is none of that number.
    pub fn state(&self, page: u32) -> Option<PageState> {
        self.pages.get(page as usize).map(|page| page.state)
    }

    /// (blocks held or set aside, usable blocks) of a page, `None` where there is none of that number.
    pub fn occupancy(&self, page: u32) -> Option<(u32, u32)> {
        let free = self.pages.get(page as usize)?.free;
        let usable = self.grid.capacity(page);
        Some((usable - free, usable))
    }

    /// Page of a block, `None` for an id that no block has.
    pub fn page_of(&self, id: u32) -> Option<u32> {
        self.grid.locate(id).map(|(page, _)| page)
    }

    /// The block that [`Ledger::pin`] made permanent.
    pub fn pinned(&self) -> Option<u32> {
        self.pinned
    }

    /// Every block that nobody holds, by id; those set aside and those of withdrawn pages too, those of
    /// quarantined pages not. Walks all pages.
    pub fn free_ids(&self) -> Vec<u32> {
        let mut ids = Vec::new();
        for (page, entry) in (0..).zip(&self.pages) {
            if entry.state != PageState::Quarantined {
                let is_free = |slot: &u32| {
                    let block = self.grid.block(page, *slot);
                    self.free_blocks.contains(block) || self.set_aside.contains(block)
                };
                let slots = (0..self.grid.capacity(page)).filter(is_free);
                ids.extend(slots.map(|slot| self.grid.block_id(page, slot)));
            }
        }
        ids
    }

    // ---------------------------------------------------------------- inside

    /// Free blocks that [`Ledger::alloc`] may take, those set aside apart.
    pub(crate) fn issuable_blocks(&self) -> u32 {
        let idle = || self.index.free_blocks(Kind::Reserved) + self.index.free_blocks(Kind::Retired);
        self.index.free_blocks(Kind::InUse) + if self.excess() == 0 { idle() } else { 0 }
    }

    /// A transition that the ledger itself has made sure is legal.
    pub(crate) fn must(&mut self, page: u32, transition: Transition) {
        let entry = self.pages[page as usize];
        self.set(page, moved(entry, page, transition));
    }

    /// `count` blocks of a backed page were taken.
    pub(crate) fn lost(&mut self, page: u32, count: u32) {
        let mut entry = self.pages[page as usize];
        if entry.state != PageState::InUse {
            entry = moved(entry, page, Transition::Occupy);
        }
        self.set(page, Page { free: entry.free - count, ..entry });
    }

    /// `count` blocks of a page in use came back. Names what became of a page that is empty now.
    pub(crate) fn gained(&mut self, page: u32, count: u32) -> Option<PageState> {
        let mut entry = self.pages[page as usize];
        entry.free += count;
        let emptied = entry.free == self.grid.capacity(page);
        if emptied {
            entry = moved(entry, page, self.parting());
        }
        self.set(page, entry);
        emptied.then_some(entry.state)
    }

    /// All change of a page goes through here, so that the index follows.
    pub(crate) fn set(&mut self, page: u32, entry: Page) {
        let before = std::mem::replace(&mut self.pages[page as usize], entry);
        self.index.replace(page, before, entry);
    }

    /// Ends every call that changed something.
    pub(crate) fn finish(&mut self) {
        self.rebalance();
        self.debug_check();
    }

    pub(crate) fn debug_check(&self) {
        debug_assert_eq!(self.check(), Ok(()));
    }
}

/// A page after a transition that the ledger itself has made sure is legal. Anything else is a bug in here,
/// and going on would hand out a page twice.
pub(crate) fn moved(entry: Page, page: u32, transition: Transition) -> Page {
    let state = entry.state.apply(page, transition);
    assert!(state.is_ok(), "the ledger broke its own table: {state:?}");
    let state = state.unwrap_or(entry.state);
    Page { state, draining: entry.draining && state == PageState::InUse, ..entry }
}
