//! The ledger of one group.
//!
//! Picking is O(ids + pages touched), with a logarithm of the number of pages for each page touched:
//! backed pages with free blocks lie in ordered sets by their number of free blocks, and unbacked
//! ones in the order in which they are to be backed. Nothing ever walks all pages but [`Ledger::clear`]
//! and [`Ledger::check`].

use std::collections::BTreeSet;

use crate::bitmap::Bitmap;
use crate::error::{BlockError, EpochError, LayoutError, TransitionError};
use crate::layout::Layout;
use crate::state::{PageCounts, PageState, Transition};

/// What becomes of a page whose last block was freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetirePolicy {
    /// Whoever frees a block knows that no queued work reads it: the page is reserved at once.
    Synchronous,
    /// Batches run behind the scheduler: the page is retired until [`Ledger::end_step`] confirms the
    /// latest batch begun. With no step outstanding it is reserved at once.
    Asynchronous,
}

/// Pages that lost their last block, by where they went.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FreeOutcome {
    /// Mapped until the current epoch has ended.
    pub retired: Vec<u32>,
    /// May lose their memory at once.
    pub reserved: Vec<u32>,
}

/// What stands between a caller and the blocks that it wants by id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimPlan {
    /// Nothing: [`Ledger::claim`] will succeed.
    Ready,
    /// These pages, now in state `Mapping`, have to be backed.
    Map(Vec<u32>),
    /// A driver call about one of their pages is under way; nothing was marked, ask again after it.
    InMotion,
}

/// Blocks by what may be done with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// Free blocks of backed pages, without those set aside.
    pub backed: u32,
    /// Blocks of pages in state `Free`.
    pub unbacked: u32,
    /// Blocks of pages with a driver call under way. They hold none.
    pub in_motion: u32,
    /// Blocks of quarantined pages: lost.
    pub quarantined: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) state: PageState,
    pub(crate) free: u32,
}

/// Sets that answer "which page next". All but `partial` and `idle` hold ranks (see [`Layout::rank`])
/// of pages in one state, so that the first element is the preferred page.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Index {
    /// `Free` pages.
    pub(crate) unbacked: BTreeSet<u32>,
    /// `InUse` pages with free blocks: (free blocks, rank).
    pub(crate) partial: BTreeSet<(u32, u32)>,
    /// `Reserved` and `Retired` pages: (free blocks, retired, rank). Reserved ones come first: they need no
    /// ordering behind queued work.
    pub(crate) idle: BTreeSet<(u32, bool, u32)>,
    /// `Reserved` pages.
    pub(crate) reserved: BTreeSet<u32>,
    /// `Retired` pages: (epoch, rank).
    pub(crate) retired: BTreeSet<(u64, u32)>,
    pub(crate) pages: PageCounts,
    pub(crate) blocks: BlockCounts,
}

impl Index {
    pub(crate) fn insert(&mut self, rank: u32, page: Page) {
        *self.pages.of(page.state) += 1;
        *self.blocks_of(page.state) += page.free;
        match page.state {
            PageState::Free => {
                self.unbacked.insert(rank);
            }
            PageState::InUse if page.free > 0 => {
                self.partial.insert((page.free, rank));
            }
            PageState::Reserved => {
                self.reserved.insert(rank);
                self.idle.insert((page.free, false, rank));
            }
            PageState::Retired(epoch) => {
                self.retired.insert((epoch, rank));
                self.idle.insert((page.free, true, rank));
            }
            PageState::InUse | PageState::Mapping | PageState::Unmapping | PageState::Quarantined => {}
        }
    }

    fn remove(&mut self, rank: u32, page: Page) {
        *self.pages.of(page.state) -= 1;
        *self.blocks_of(page.state) -= page.free;
        match page.state {
            PageState::Free => {
                self.unbacked.remove(&rank);
            }
            PageState::InUse => {
                self.partial.remove(&(page.free, rank));
            }
            PageState::Reserved => {
                self.reserved.remove(&rank);
                self.idle.remove(&(page.free, false, rank));
            }
            PageState::Retired(epoch) => {
                self.retired.remove(&(epoch, rank));
                self.idle.remove(&(page.free, true, rank));
            }
            PageState::Mapping | PageState::Unmapping | PageState::Quarantined => {}
        }
    }

    fn blocks_of(&mut self, state: PageState) -> &mut u32 {
        match state {
            PageState::Free => &mut self.blocks.unbacked,
            PageState::Mapping | PageState::Unmapping => &mut self.blocks.in_motion,
            PageState::Quarantined => &mut self.blocks.quarantined,
            PageState::InUse | PageState::Reserved | PageState::Retired(_) => &mut self.blocks.backed,
        }
    }

    /// Rank of the backed page to take up to `wanted` blocks from: the page in use with the fewest free
    /// blocks that holds them all, else such an idle page, else the page with the most.
    fn pick(&self, wanted: u32) -> Option<u32> {
        if let Some((_, rank)) = self.partial.range((wanted, 0)..).next() {
            return Some(*rank);
        }
        if let Some((_, _, rank)) = self.idle.range((wanted, false, 0)..).next() {
            return Some(*rank);
        }
        let most_partial = self.partial.last().map_or(0, |(free, _)| *free);
        let most_idle = self.idle.last().map_or(0, |(free, _, _)| *free);
        if most_partial >= most_idle {
            self.partial.range((most_partial, 0)..).next().map(|(_, rank)| *rank)
        } else {
            self.idle.range((most_idle, false, 0)..).next().map(|(_, _, rank)| *rank)
        }
    }
}

/// Page states, free blocks and epochs of one group. Compares equal only to a ledger in the very same state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ledger {
    pub(crate) layout: Layout,
    policy: RetirePolicy,
    pub(crate) pages: Vec<Page>,
    pub(crate) bitmap: Bitmap,
    pub(crate) index: Index,
    /// Held for whoever allocates next, not yet issued to anybody.
    pub(crate) set_aside: BTreeSet<u32>,
    pub(crate) pinned: Option<u32>,
    pub(crate) begun: u64,
    pub(crate) ended: u64,
}

impl Ledger {
    /// A ledger whose pages are all `Free`.
    pub fn new(layout: Layout, policy: RetirePolicy) -> Result<Self, LayoutError> {
        layout.validate()?;
        let num_pages = layout.num_pages();
        let mut ledger = Ledger {
            layout,
            policy,
            pages: Vec::with_capacity(num_pages as usize),
            bitmap: Bitmap::new(num_pages, layout.blocks_per_page),
            index: Index::default(),
            set_aside: BTreeSet::new(),
            pinned: None,
            begun: 0,
            ended: 0,
        };
        for number in 0..num_pages {
            let page = Page { state: PageState::Free, free: layout.capacity(number) };
            ledger.bitmap.fill(number, page.free);
            ledger.index.insert(layout.rank(number), page);
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
        self.index.pages
    }

    /// Free blocks by what may be done with them.
    pub fn block_counts(&self) -> BlockCounts {
        self.index.blocks
    }

    /// Blocks on hand: an [`Ledger::alloc`] of that many succeeds. Counts those set aside.
    pub fn backed_free_blocks(&self) -> u32 {
        self.index.blocks.backed + self.set_aside_blocks()
    }

    /// Blocks that may still be allocated: on hand, of pages without memory, and of pages in motion, which
    /// hold none and are about to be one or the other. Never those of quarantined pages.
    pub fn available_blocks(&self) -> u32 {
        self.backed_free_blocks() + self.index.blocks.unbacked + self.index.blocks.in_motion
    }

    /// Blocks that [`Ledger::set_aside`] keeps for the next [`Ledger::alloc`].
    pub fn set_aside_blocks(&self) -> u32 {
        self.set_aside.len() as u32
    }

    /// Blocks that somebody holds, the null block among them, those set aside not.
    pub fn held_blocks(&self) -> u32 {
        self.layout.num_blocks - self.available_blocks() - self.index.blocks.quarantined
    }

    /// State of a page, `None` where there is none of that number.
    pub fn state(&self, page: u32) -> Option<PageState> {
        self.pages.get(page as usize).map(|page| page.state)
    }

    /// (blocks held or set aside, usable blocks) of a page, `None` where there is none of that number.
    pub fn occupancy(&self, page: u32) -> Option<(u32, u32)> {
        let free = self.pages.get(page as usize)?.free;
        let usable = self.layout.capacity(page);
        Some((usable - free, usable))
    }

    /// Page of a block, `None` for an id that no block has.
    pub fn page_of(&self, id: u32) -> Option<u32> {
        self.layout.locate(id).map(|(page, _)| page)
    }

    /// The block that [`Ledger::pin`] made permanent.
    pub fn pinned(&self) -> Option<u32> {
        self.pinned
    }

    /// Every block that nobody holds, by id; those set aside too, those of quarantined pages not. Walks all pages.
    pub fn free_ids(&self) -> Vec<u32> {
        let mut ids = Vec::new();
        for (page, entry) in (0..).zip(&self.pages) {
            if entry.state != PageState::Quarantined {
                let slots = (0..self.layout.capacity(page)).filter(|slot| self.bitmap.is_free(page, *slot));
                ids.extend(slots.map(|slot| self.layout.block_id(page, slot)));
            }
        }
        ids.extend(&self.set_aside);
        ids
    }

    /// A begun step has not ended: queued work may still read pages.
    pub fn has_outstanding_step(&self) -> bool {
        self.begun > self.ended
    }

    // ---------------------------------------------------------------- blocks

    /// Exactly `n` ids of backed pages, or `None` and nothing changed. Those set aside go first, then as
    /// few pages as possible: the page with the fewest free blocks that holds the whole remainder, else
    /// the one with the most, again. Pages in use come before idle ones. Ids ascend within a page.
    pub fn alloc(&mut self, n: u32) -> Option<Vec<u32>> {
        if n > self.backed_free_blocks() {
            return None;
        }
        let mut ids = Vec::with_capacity(n as usize);
        while ids.len() < n as usize
            && let Some(id) = self.set_aside.pop_first()
        {
            ids.push(id);
        }
        let mixed = !ids.is_empty();
        self.take_best(n - ids.len() as u32, &mut ids);
        if mixed {
            ids.sort_unstable(); // a page may have given to both parts
        }
        self.debug_check();
        Some(ids)
    }

    /// Gives blocks back. Nothing changes unless every id is held, named once and not pinned.
    pub fn free(&mut self, ids: &[u32]) -> Result<FreeOutcome, BlockError> {
        let places = self.locate_all(ids)?;
        let unfreeable = ids.iter().find(|id| self.pinned == Some(**id) || self.set_aside.contains(id));
        if let Some(&id) = unfreeable {
            let pinned = self.pinned == Some(id);
            return Err(if pinned { BlockError::Pinned { id } } else { BlockError::NotHeld { id } });
        }
        for (done, &(page, slot)) in places.iter().enumerate() {
            if !self.bitmap.give(page, slot) {
                self.bitmap.take_all(&places[..done]);
                return Err(Self::repeated(ids, done, |id| BlockError::NotHeld { id }));
            }
        }
        let mut outcome = FreeOutcome::default();
        for run in places.chunk_by(|a, b| a.0 == b.0) {
            self.gained(run[0].0, run.len() as u32, &mut outcome);
        }
        self.debug_check();
        Ok(outcome)
    }

    /// Names the pages that have to be backed before [`Ledger::claim`] can take these ids, and marks
    /// them as `Mapping`. Nothing changes unless every id is free and named once.
    pub fn plan_claim(&mut self, ids: &[u32]) -> Result<ClaimPlan, BlockError> {
        let places = self.take_bits(ids)?;
        self.bitmap.give_all(&places);
        let mut to_map = Vec::new();
        let mut in_motion = false;
        for (&(page, _), &id) in places.iter().zip(ids) {
            match self.pages[page as usize].state {
                PageState::Quarantined => return Err(BlockError::Quarantined { id, page }),
                PageState::Free => to_map.push(page),
                state => in_motion |= state.is_in_motion(),
            }
        }
        if in_motion {
            return Ok(ClaimPlan::InMotion);
        }
        to_map.sort_unstable();
        to_map.dedup();
        to_map.iter().for_each(|&page| self.must(page, Transition::BeginMapping));
        self.debug_check();
        Ok(if to_map.is_empty() { ClaimPlan::Ready } else { ClaimPlan::Map(to_map) })
    }

    /// Takes these very blocks. Nothing changes unless every id is free, named once and in a backed page.
    pub fn claim(&mut self, ids: &[u32]) -> Result<(), BlockError> {
        let places = self.take_bits(ids)?;
        let unbacked = places.iter().zip(ids).find(|((page, _), _)| !self.is_backed(*page));
        if let Some((&(page, _), &id)) = unbacked {
            self.bitmap.give_all(&places);
            return Err(BlockError::Unbacked { id, page });
        }
        for run in places.chunk_by(|a, b| a.0 == b.0) {
            self.lost(run[0].0, run.len() as u32);
        }
        self.debug_check();
        Ok(())
    }

    /// Makes a held block permanent: it can no longer be freed, so its page stays in use.
    pub fn pin(&mut self, id: u32) -> Result<(), BlockError> {
        let (page, slot) = self.layout.locate(id).ok_or(BlockError::Unknown { id })?;
        if self.bitmap.is_free(page, slot) || self.set_aside.contains(&id) {
            return Err(BlockError::NotHeld { id });
        }
        self.pinned = Some(id);
        Ok(())
    }

    /// Keeps `n` more blocks of backed pages for the next [`Ledger::alloc`] calls; false and nothing
    /// changed where fewer are on hand.
    #[must_use]
    pub fn set_aside(&mut self, n: u32) -> bool {
        if n > self.index.blocks.backed {
            return false;
        }
        let mut ids = Vec::with_capacity(n as usize);
        self.take_best(n, &mut ids);
        self.set_aside.extend(ids);
        self.debug_check();
        true
    }

    /// Gives back what was set aside and not used.
    pub fn release_set_aside(&mut self) -> FreeOutcome {
        let mut outcome = FreeOutcome::default();
        for id in std::mem::take(&mut self.set_aside) {
            if let Some((page, slot)) = self.layout.locate(id)
                && self.bitmap.give(page, slot)
            {
                self.gained(page, 1, &mut outcome);
            }
        }
        self.debug_check();
        outcome
    }

    /// Forgets every holder but the pinned block, and everything set aside. Emptied and retired pages are
    /// reserved at once: the caller knows that no queued work is left.
    pub fn clear(&mut self) {
        self.set_aside.clear();
        let pinned = self.pinned.and_then(|id| self.layout.locate(id));
        for page in 0..self.layout.num_pages() {
            match self.pages[page as usize].state {
                PageState::Retired(_) => self.must(page, Transition::Settle),
                PageState::InUse => {
                    let capacity = self.layout.capacity(page);
                    self.bitmap.fill(page, capacity);
                    match pinned {
                        Some((pinned_page, slot)) if pinned_page == page => {
                            self.bitmap.take(page, slot);
                            self.set_free(page, capacity - 1);
                        }
                        _ => {
                            self.set_free(page, capacity);
                            self.must(page, Transition::Vacate);
                        }
                    }
                }
                _ => {}
            }
        }
        self.debug_check();
    }

    /// [`Ledger::clear`] that spares nothing: the end of the pool.
    pub fn clear_all(&mut self) {
        self.pinned = None;
        self.clear();
    }

    // ---------------------------------------------------------------- pages

    /// Marks `Free` pages as `Mapping` until, once they are backed, `n` blocks are on hand, and names
    /// them. Fewer where there are no more of them or `at_most` is reached.
    pub fn plan_backing(&mut self, n: u32, at_most: u32) -> Vec<u32> {
        let mut short = n.saturating_sub(self.backed_free_blocks());
        let mut pages = Vec::new();
        while short > 0
            && (pages.len() as u32) < at_most
            && let Some(page) = self.begin_next()
        {
            short = short.saturating_sub(self.layout.capacity(page));
            pages.push(page);
        }
        self.debug_check();
        pages
    }

    /// Marks up to `count` `Free` pages as `Mapping`, whatever is on hand, and names them.
    pub fn plan_pages(&mut self, count: u32) -> Vec<u32> {
        let pages = (0..count).map_while(|_| self.begin_next()).collect();
        self.debug_check();
        pages
    }

    /// These pages, all `Mapping`, are backed.
    pub fn backed(&mut self, pages: &[u32]) -> Result<(), TransitionError> {
        self.move_all(&[(pages, Transition::FinishMapping)])
    }

    /// Backing these pages failed and was undone, but for the `quarantined` ones among them.
    pub fn backing_failed(&mut self, pages: &[u32], quarantined: &[u32]) -> Result<(), TransitionError> {
        let undone = without(pages, &[quarantined]);
        self.move_all(&[(&undone, Transition::UndoMapping), (quarantined, Transition::Quarantine)])
    }

    /// Marks reserved pages beyond `keep` as `Unmapping` and names them, the least preferred first: the
    /// highest under [`PageOrder::LowestFirst`](crate::PageOrder::LowestFirst).
    pub fn plan_unbacking(&mut self, keep: u32) -> Vec<u32> {
        let mut pages = Vec::new();
        while self.index.pages.reserved > keep
            && let Some(&rank) = self.index.reserved.last()
        {
            let page = self.layout.rank(rank);
            self.must(page, Transition::BeginUnmapping);
            pages.push(page);
        }
        self.debug_check();
        pages
    }

    /// The memory of these pages, all `Unmapping`, is gone.
    pub fn unbacked(&mut self, pages: &[u32]) -> Result<(), TransitionError> {
        self.move_all(&[(pages, Transition::FinishUnmapping)])
    }

    /// Taking the memory of these pages failed for the `quarantined` ones and those `still_mapped`; the others lost it.
    pub fn unbacking_failed(
        &mut self,
        pages: &[u32],
        quarantined: &[u32],
        still_mapped: &[u32],
    ) -> Result<(), TransitionError> {
        let gone = without(pages, &[quarantined, still_mapped]);
        self.move_all(&[
            (&gone, Transition::FinishUnmapping),
            (quarantined, Transition::Quarantine),
            (still_mapped, Transition::UndoUnmapping),
        ])
    }

    // ---------------------------------------------------------------- epochs

    /// A batch is about to be submitted: pages emptied from now on wait for it. Returns its epoch.
    pub fn begin_step(&mut self) -> u64 {
        self.begun += 1;
        self.begun
    }

    /// All work up to `epoch` has ended. Pages retired by then are reserved, and named. An epoch that
    /// ended before changes nothing.
    pub fn end_step(&mut self, epoch: u64) -> Result<Vec<u32>, EpochError> {
        if epoch > self.begun {
            return Err(EpochError { epoch, latest: self.begun });
        }
        self.ended = self.ended.max(epoch);
        let mut settled = Vec::new();
        while let Some(&(retired_at, rank)) = self.index.retired.first()
            && retired_at <= self.ended
        {
            let page = self.layout.rank(rank);
            self.must(page, Transition::Settle);
            settled.push(page);
        }
        self.debug_check();
        Ok(settled)
    }

    // ---------------------------------------------------------------- inside

    /// The next page in the order of preference, now `Mapping`.
    fn begin_next(&mut self) -> Option<u32> {
        let page = self.layout.rank(*self.index.unbacked.first()?);
        self.must(page, Transition::BeginMapping);
        Some(page)
    }

    /// Takes `n` blocks, which must be on hand.
    fn take_best(&mut self, n: u32, ids: &mut Vec<u32>) {
        let mut left = n;
        while left > 0
            && let Some(rank) = self.index.pick(left)
        {
            let page = self.layout.rank(rank);
            let count = left.min(self.pages[page as usize].free);
            let layout = self.layout;
            self.bitmap.take_lowest(page, count, |slot| ids.push(layout.block_id(page, slot)));
            self.lost(page, count);
            left -= count;
        }
        assert_eq!(left, 0, "the ledger counted blocks that no page has");
    }

    /// `count` blocks of a backed page were taken.
    fn lost(&mut self, page: u32, count: u32) {
        if self.pages[page as usize].state != PageState::InUse {
            self.must(page, Transition::Occupy);
        }
        self.set_free(page, self.pages[page as usize].free - count);
    }

    /// `count` blocks of a page in use came back.
    fn gained(&mut self, page: u32, count: u32, outcome: &mut FreeOutcome) {
        self.set_free(page, self.pages[page as usize].free + count);
        if self.pages[page as usize].free < self.layout.capacity(page) {
            return;
        }
        if self.policy == RetirePolicy::Asynchronous && self.has_outstanding_step() {
            self.must(page, Transition::Retire(self.begun));
            outcome.retired.push(page);
        } else {
            self.must(page, Transition::Vacate);
            outcome.reserved.push(page);
        }
    }

    fn is_backed(&self, page: u32) -> bool {
        self.pages[page as usize].state.is_backed()
    }

    fn locate_all(&self, ids: &[u32]) -> Result<Vec<(u32, u32)>, BlockError> {
        ids.iter().map(|&id| self.layout.locate(id).ok_or(BlockError::Unknown { id })).collect()
    }

    /// Marks the bits of free blocks as taken, all or none.
    fn take_bits(&mut self, ids: &[u32]) -> Result<Vec<(u32, u32)>, BlockError> {
        let places = self.locate_all(ids)?;
        for (done, &(page, slot)) in places.iter().enumerate() {
            if !self.bitmap.take(page, slot) {
                self.bitmap.give_all(&places[..done]);
                return Err(Self::repeated(ids, done, |id| BlockError::Held { id }));
            }
        }
        Ok(places)
    }

    /// The error of `ids[at]`, which `otherwise` names unless the list itself named it before.
    fn repeated(ids: &[u32], at: usize, otherwise: impl Fn(u32) -> BlockError) -> BlockError {
        let id = ids[at];
        if ids[..at].contains(&id) { BlockError::Duplicate { id } } else { otherwise(id) }
    }

    /// One list after another, all or none.
    fn move_all(&mut self, moves: &[(&[u32], Transition)]) -> Result<(), TransitionError> {
        let mut seen = BTreeSet::new();
        for &(pages, transition) in moves {
            for &page in pages {
                let from = self.state(page);
                let error = TransitionError { page, from, transition };
                from.ok_or(error)?.apply(page, transition)?;
                if !seen.insert(page) {
                    return Err(error);
                }
            }
        }
        for &(pages, transition) in moves {
            pages.iter().for_each(|&page| self.must(page, transition));
        }
        self.debug_check();
        Ok(())
    }

    /// A transition that the ledger itself has made sure is legal. Anything else is a bug in here, and
    /// going on would hand out a page twice.
    fn must(&mut self, page: u32, transition: Transition) {
        let from = self.pages[page as usize].state;
        match from.apply(page, transition) {
            Ok(state) => self.update(page, |page| page.state = state),
            Err(error) => assert_eq!(Err(error), Ok(()), "the ledger broke its own table"),
        }
    }

    fn set_free(&mut self, page: u32, free: u32) {
        self.update(page, |page| page.free = free);
    }

    fn update(&mut self, page: u32, change: impl FnOnce(&mut Page)) {
        let rank = self.layout.rank(page);
        let entry = &mut self.pages[page as usize];
        self.index.remove(rank, *entry);
        change(entry);
        self.index.insert(rank, *entry);
    }

    fn debug_check(&self) {
        debug_assert_eq!(self.check(), Ok(()));
    }
}

/// `pages` but for those in any of the other lists.
fn without(pages: &[u32], others: &[&[u32]]) -> Vec<u32> {
    pages.iter().copied().filter(|page| !others.iter().any(|other| other.contains(page))).collect()
}
