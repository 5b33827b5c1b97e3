//! Which page next: the pages of a group by state and by how many of their blocks are free.

use std::collections::BTreeSet;

use crate::layout::Grid;
use crate::ordered::OrderedBits;
use crate::state::{PageCounts, PageState};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) state: PageState,
    /// Blocks that nobody holds. All of them in every state but `InUse`.
    pub(crate) free: u32,
    /// In use, but none of its free blocks is issued: the limit waits for it to empty.
    pub(crate) draining: bool,
}

/// Free blocks by the state of their page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct FreeBlocks {
    /// Of pages in use that do not drain.
    pub(crate) in_use: u32,
    pub(crate) draining: u32,
    /// Of `Reserved` and `Retired` pages.
    pub(crate) idle: u32,
    pub(crate) unbacked: u32,
    pub(crate) in_motion: u32,
    pub(crate) withdrawn: u32,
    pub(crate) quarantined: u32,
}

impl FreeBlocks {
    pub(crate) fn total(&self) -> u32 {
        self.in_use
            + self.draining
            + self.idle
            + self.unbacked
            + self.in_motion
            + self.withdrawn
            + self.quarantined
    }

    fn of(&mut self, page: Page) -> &mut u32 {
        match page.state {
            PageState::InUse if page.draining => &mut self.draining,
            PageState::InUse => &mut self.in_use,
            PageState::Reserved | PageState::Retired(_) => &mut self.idle,
            PageState::Free => &mut self.unbacked,
            PageState::Mapping | PageState::Unmapping => &mut self.in_motion,
            PageState::Withdrawn => &mut self.withdrawn,
            PageState::Quarantined => &mut self.quarantined,
        }
    }
}

/// Sets that answer "which page next". They hold ranks (see [`Grid::rank`]) of pages in one state, so that
/// the first is the preferred page; those of pages in use hold (free blocks, rank), see [`Index::key`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Index {
    grid: Grid,
    rank_bits: u32,
    unbacked: OrderedBits,
    withdrawn: OrderedBits,
    reserved: OrderedBits,
    retired: OrderedBits,
    /// (epoch, rank). A tree, as epochs have no bound; touched only when a page empties.
    retired_at: BTreeSet<(u64, u32)>,
    /// Pages in use that do not drain, full ones too.
    in_use: OrderedBits,
    draining: OrderedBits,
    pub(crate) pages: PageCounts,
    pub(crate) blocks: FreeBlocks,
}

impl Index {
    /// Of no page at all.
    pub(crate) fn new(grid: Grid) -> Self {
        let ranks = grid.num_pages as usize;
        let rank_bits = ranks.next_power_of_two().trailing_zeros();
        // A page in use holds a block, so that fewer than all are free.
        let keys = (grid.blocks_per_page as usize) << rank_bits;
        Index {
            grid,
            rank_bits,
            unbacked: OrderedBits::new(ranks),
            withdrawn: OrderedBits::new(ranks),
            reserved: OrderedBits::new(ranks),
            retired: OrderedBits::new(ranks),
            retired_at: BTreeSet::new(),
            in_use: OrderedBits::new(keys),
            draining: OrderedBits::new(keys),
            pages: PageCounts::default(),
            blocks: FreeBlocks::default(),
        }
    }

    pub(crate) fn insert(&mut self, number: u32, page: Page) {
        *self.pages.of(page.state) += 1;
        *self.blocks.of(page) += page.free;
        let rank = self.grid.rank(number);
        if let Some((set, key)) = self.place(rank, page) {
            set.insert(key);
        }
        if let PageState::Retired(epoch) = page.state {
            self.retired_at.insert((epoch, rank));
        }
    }

    pub(crate) fn remove(&mut self, number: u32, page: Page) {
        *self.pages.of(page.state) -= 1;
        *self.blocks.of(page) -= page.free;
        let rank = self.grid.rank(number);
        if let Some((set, key)) = self.place(rank, page) {
            set.remove(key);
        }
        if let PageState::Retired(epoch) = page.state {
            self.retired_at.remove(&(epoch, rank));
        }
    }

    /// The set that a page belongs in, and its key there.
    fn place(&mut self, rank: u32, page: Page) -> Option<(&mut OrderedBits, usize)> {
        let ranked = rank as usize;
        match page.state {
            PageState::InUse => {
                let key = self.key(page.free, rank);
                Some((if page.draining { &mut self.draining } else { &mut self.in_use }, key))
            }
            PageState::Free => Some((&mut self.unbacked, ranked)),
            PageState::Withdrawn => Some((&mut self.withdrawn, ranked)),
            PageState::Reserved => Some((&mut self.reserved, ranked)),
            PageState::Retired(_) => Some((&mut self.retired, ranked)),
            PageState::Mapping | PageState::Unmapping | PageState::Quarantined => None,
        }
    }

    /// Orders pages in use by their free blocks, then by rank.
    fn key(&self, free: u32, rank: u32) -> usize {
        (free as usize) << self.rank_bits | rank as usize
    }

    fn ranked(&self, rank: usize) -> u32 {
        self.grid.rank(rank as u32)
    }

    /// Page of a key.
    fn keyed(&self, key: usize) -> u32 {
        self.ranked(key & ((1 << self.rank_bits) - 1))
    }

    /// The `Free` page to back next.
    pub(crate) fn first_unbacked(&self) -> Option<u32> {
        self.unbacked.first().map(|rank| self.ranked(rank))
    }

    /// The `Free` page to do without first.
    pub(crate) fn last_unbacked(&self) -> Option<u32> {
        self.unbacked.last().map(|rank| self.ranked(rank))
    }

    /// The withdrawn page to have back first.
    pub(crate) fn first_withdrawn(&self) -> Option<u32> {
        self.withdrawn.first().map(|rank| self.ranked(rank))
    }

    /// The reserved page to give back first.
    pub(crate) fn last_reserved(&self) -> Option<u32> {
        self.reserved.last().map(|rank| self.ranked(rank))
    }

    /// The page that was retired first, with its epoch.
    pub(crate) fn first_retired(&self) -> Option<(u64, u32)> {
        self.retired_at.first().map(|&(epoch, rank)| (epoch, self.grid.rank(rank)))
    }

    pub(crate) fn draining_pages(&self) -> u32 {
        self.draining.len()
    }

    /// The draining page with the fewest free blocks, the most preferred of equals: it has the longest way to go.
    pub(crate) fn fullest_draining(&self) -> Option<u32> {
        self.draining.first().map(|key| self.keyed(key))
    }

    /// The page in use with the most free blocks, the least preferred of equals, that does not drain and
    /// is not `spared`.
    pub(crate) fn emptiest_in_use(&self, spared: Option<u32>) -> Option<u32> {
        let last = self.in_use.last()?;
        let page = self.keyed(last);
        if spared != Some(page) {
            return Some(page);
        }
        self.in_use.last_before(last).map(|key| self.keyed(key))
    }

    /// The backed page to take up to `wanted` blocks from, at least one: the page in use with the fewest free
    /// blocks that holds them all, else such an idle page, else the page with the most. Idle pages only
    /// where `idle` says so.
    pub(crate) fn pick(&self, wanted: u32, idle: bool) -> Option<u32> {
        if let Some(page) = self.in_use_from(wanted) {
            return Some(page);
        }
        if idle && let Some(page) = self.idle_from(wanted) {
            return Some(page);
        }
        let most_in_use = self.in_use.last().map_or(0, |key| (key >> self.rank_bits) as u32);
        let most_idle = if idle { self.most_idle() } else { 0 };
        if most_in_use >= most_idle.max(1) {
            self.in_use_from(most_in_use)
        } else {
            self.idle_from(most_idle.max(1)).filter(|_| idle)
        }
    }

    /// The page in use with the fewest free blocks, but no fewer than these.
    fn in_use_from(&self, free: u32) -> Option<u32> {
        self.in_use.next_from(self.key(free, 0)).map(|key| self.keyed(key))
    }

    /// The idle page with the fewest blocks, but no fewer than these. A page that holds no block is wholly
    /// free, so that only the short page differs. Reserved ones come first: they need no ordering behind
    /// queued work.
    fn idle_from(&self, free: u32) -> Option<u32> {
        if let Some(short) = self.idle_short()
            && self.grid.capacity(short) >= free
        {
            return Some(short);
        }
        (self.grid.blocks_per_page >= free).then(|| self.idle_whole()).flatten()
    }

    fn most_idle(&self) -> u32 {
        if self.idle_whole().is_some() {
            self.grid.blocks_per_page
        } else {
            self.idle_short().map_or(0, |page| self.grid.capacity(page))
        }
    }

    /// The short page, where it is idle.
    fn idle_short(&self) -> Option<u32> {
        let page = self.grid.short_page()?;
        let rank = self.grid.rank(page) as usize;
        (self.reserved.contains(rank) || self.retired.contains(rank)).then_some(page)
    }

    fn idle_whole(&self) -> Option<u32> {
        let short = self.grid.short_page().map(|page| self.grid.rank(page) as usize);
        let whole = |set: &OrderedBits| {
            let first = set.first()?;
            if Some(first) == short { set.next_from(first + 1) } else { Some(first) }
        };
        whole(&self.reserved).or_else(|| whole(&self.retired)).map(|rank| self.ranked(rank))
    }
}
