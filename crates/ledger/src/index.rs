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

/// What a page is, with `InUse` told apart by whether it drains: the set that it lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Free,
    Mapping,
    InUse,
    Draining,
    Reserved,
    Retired,
    Unmapping,
    Withdrawn,
    Quarantined,
}

const KINDS: usize = Kind::Quarantined as usize + 1;

impl Page {
    fn kind(self) -> Kind {
        match self.state {
            PageState::Free => Kind::Free,
            PageState::Mapping => Kind::Mapping,
            PageState::InUse if self.draining => Kind::Draining,
            PageState::InUse => Kind::InUse,
            PageState::Reserved => Kind::Reserved,
            PageState::Retired(_) => Kind::Retired,
            PageState::Unmapping => Kind::Unmapping,
            PageState::Withdrawn => Kind::Withdrawn,
            PageState::Quarantined => Kind::Quarantined,
        }
    }
}

/// A set for each kind of page and how many free blocks lie in them. Every page is in exactly one. The sets hold
/// ranks (see [`Grid::rank`]), so that the first is the preferred page; those of pages in use hold free blocks
/// and rank, see [`Index::key`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Index {
    grid: Grid,
    rank_bits: u32,
    sets: [OrderedBits; KINDS],
    free_blocks: [u32; KINDS],
    /// (epoch, rank). A tree, as epochs have no bound; touched only when a page empties.
    retired_at: BTreeSet<(u64, u32)>,
}

impl Index {
    /// Of no page at all.
    pub(crate) fn new(grid: Grid) -> Self {
        let ranks = grid.num_pages as usize;
        let rank_bits = ranks.next_power_of_two().trailing_zeros();
        // A page in use holds a block, so that fewer than all are free.
        let keys = (grid.blocks_per_page as usize) << rank_bits;
        let universe =
            |kind| if kind == Kind::InUse as usize || kind == Kind::Draining as usize { keys } else { ranks };
        Index {
            grid,
            rank_bits,
            sets: std::array::from_fn(|kind| OrderedBits::new(universe(kind))),
            free_blocks: [0; KINDS],
            retired_at: BTreeSet::new(),
        }
    }

    pub(crate) fn insert(&mut self, number: u32, page: Page) {
        let (kind, rank) = (page.kind(), self.grid.rank(number));
        let key = self.key_in(kind, page.free, rank);
        self.sets[kind as usize].insert(key);
        self.free_blocks[kind as usize] += page.free;
        if let PageState::Retired(epoch) = page.state {
            self.retired_at.insert((epoch, rank));
        }
    }

    /// Page `number` was one thing and is another.
    pub(crate) fn replace(&mut self, number: u32, before: Page, after: Page) {
        let (kind, rank) = (before.kind(), self.grid.rank(number));
        let key = self.key_in(kind, before.free, rank);
        self.sets[kind as usize].remove(key);
        self.free_blocks[kind as usize] -= before.free;
        if let PageState::Retired(epoch) = before.state {
            self.retired_at.remove(&(epoch, rank));
        }
        self.insert(number, after);
    }

    fn set(&self, kind: Kind) -> &OrderedBits {
        &self.sets[kind as usize]
    }

    /// Pages of a kind.
    pub(crate) fn pages(&self, kind: Kind) -> u32 {
        self.set(kind).len()
    }

    /// Free blocks in pages of a kind.
    pub(crate) fn free_blocks(&self, kind: Kind) -> u32 {
        self.free_blocks[kind as usize]
    }

    /// Free blocks in all pages.
    pub(crate) fn all_free_blocks(&self) -> u32 {
        self.free_blocks.iter().sum()
    }

    pub(crate) fn page_counts(&self) -> PageCounts {
        PageCounts {
            free: self.pages(Kind::Free),
            mapping: self.pages(Kind::Mapping),
            in_use: self.pages(Kind::InUse) + self.pages(Kind::Draining),
            reserved: self.pages(Kind::Reserved),
            retired: self.pages(Kind::Retired),
            unmapping: self.pages(Kind::Unmapping),
            withdrawn: self.pages(Kind::Withdrawn),
            quarantined: self.pages(Kind::Quarantined),
        }
    }

    /// Pages that hold memory, or may.
    pub(crate) fn occupied(&self) -> u32 {
        self.grid.num_pages - self.pages(Kind::Free) - self.pages(Kind::Withdrawn)
    }

    fn key_in(&self, kind: Kind, free: u32, rank: u32) -> usize {
        match kind {
            Kind::InUse | Kind::Draining => self.key(free, rank),
            _ => rank as usize,
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
        self.set(Kind::Free).first().map(|rank| self.ranked(rank))
    }

    /// The `Free` page to do without first.
    pub(crate) fn last_unbacked(&self) -> Option<u32> {
        self.set(Kind::Free).last().map(|rank| self.ranked(rank))
    }

    /// The withdrawn page to have back first.
    pub(crate) fn first_withdrawn(&self) -> Option<u32> {
        self.set(Kind::Withdrawn).first().map(|rank| self.ranked(rank))
    }

    /// The reserved page to give back first.
    pub(crate) fn last_reserved(&self) -> Option<u32> {
        self.set(Kind::Reserved).last().map(|rank| self.ranked(rank))
    }

    /// The page that was retired first, with its epoch.
    pub(crate) fn first_retired(&self) -> Option<(u64, u32)> {
        self.retired_at.first().map(|&(epoch, rank)| (epoch, self.grid.rank(rank)))
    }

    /// The draining page with the fewest free blocks, the most preferred of equals: it has the longest way to go.
    pub(crate) fn fullest_draining(&self) -> Option<u32> {
        self.set(Kind::Draining).first().map(|key| self.keyed(key))
    }

    /// The page in use with the most free blocks, the least preferred of equals, that does not drain and
    /// is not `spared`.
    pub(crate) fn emptiest_in_use(&self, spared: Option<u32>) -> Option<u32> {
        let last = self.set(Kind::InUse).last()?;
        let page = self.keyed(last);
        if spared != Some(page) {
            return Some(page);
        }
        self.set(Kind::InUse).last_before(last).map(|key| self.keyed(key))
    }

    /// The backed page to take up to `wanted` blocks from, at least one: the page in use with the fewest free
    /// blocks that holds them all, else such an idle page, else the page with the most. Idle pages only
    /// where `idle` says so.
    pub(crate) fn pick(&self, wanted: u32, idle: bool) -> Option<u32> {
        let in_use = self.set(Kind::InUse);
        // No page in use has all its blocks free.
        if wanted < self.grid.blocks_per_page
            && let Some(key) = in_use.next_from(self.key(wanted, 0))
        {
            return Some(self.keyed(key));
        }
        let short = self.idle_short().filter(|_| idle);
        if let Some((page, capacity)) = short
            && capacity >= wanted
        {
            return Some(page);
        }
        // The best idle page for what one page can hold, and the one with the most blocks for more.
        if idle && let Some(page) = self.idle_whole() {
            return Some(page);
        }
        let most = in_use.last().map_or(0, |key| (key >> self.rank_bits) as u32);
        match short {
            Some((page, capacity)) if capacity > most => Some(page),
            _ => in_use.next_from(self.key(most.max(1), 0)).map(|key| self.keyed(key)),
        }
    }

    /// After the page in use that had the most free blocks, so many, the next one with as many.
    pub(crate) fn next_alike(&self, page: u32, free: u32) -> Option<u32> {
        let key = self.key(free, self.grid.rank(page));
        self.set(Kind::InUse).next_from(key + 1).map(|key| self.keyed(key))
    }

    /// The short page and its blocks, where it is idle. An idle page is wholly free, so that all others are alike.
    fn idle_short(&self) -> Option<(u32, u32)> {
        let page = self.grid.short_page()?;
        let rank = self.grid.rank(page) as usize;
        let idle = self.set(Kind::Reserved).contains(rank) || self.set(Kind::Retired).contains(rank);
        idle.then(|| (page, self.grid.capacity(page)))
    }

    /// The first idle page but the short one. Reserved ones come first: they need no ordering behind queued work.
    fn idle_whole(&self) -> Option<u32> {
        let short = self.grid.short_page().map(|page| self.grid.rank(page) as usize);
        let whole = |set: &OrderedBits| {
            let first = set.first()?;
            if Some(first) == short { set.next_from(first + 1) } else { Some(first) }
        };
        let rank = whole(self.set(Kind::Reserved)).or_else(|| whole(self.set(Kind::Retired)))?;
        Some(self.ranked(rank))
    }
}
