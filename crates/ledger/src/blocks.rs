//! Who holds which block.

use crate::error::BlockError;
use crate::index::Page;
use crate::ledger::{Ledger, moved};
use crate::state::{PageState, Transition};

/// Pages that lost their last block, by where they went.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FreeOutcome {
    /// Mapped until the current epoch has ended.
    pub retired: Vec<u32>,
    /// May lose their memory at once.
    pub reserved: Vec<u32>,
}

impl FreeOutcome {
    fn note(&mut self, page: u32, emptied: Option<PageState>) {
        match emptied {
            None => {}
            Some(PageState::Retired(_)) => self.retired.push(page),
            Some(_) => self.reserved.push(page),
        }
    }
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

impl Ledger {
    /// Exactly `n` ids of backed pages, or `None` and nothing changed. Those set aside go first, then as
    /// few pages as possible: the page with the fewest free blocks that holds the whole remainder, else
    /// the one with the most, again. Pages in use come before idle ones. Ids ascend within a page.
    pub fn alloc(&mut self, n: u32) -> Option<Vec<u32>> {
        if n > self.backed_free_blocks() {
            return None;
        }
        let mut ids = Vec::with_capacity(n as usize);
        self.alloc_into(n, &mut ids).then_some(ids)
    }

    /// [`Ledger::alloc`] that appends to `ids`; false and nothing changed where fewer than `n` are on hand.
    #[must_use]
    pub fn alloc_into(&mut self, n: u32, ids: &mut Vec<u32>) -> bool {
        if n > self.backed_free_blocks() {
            return false;
        }
        let start = ids.len();
        let aside = n.min(self.set_aside_blocks());
        let grid = self.grid;
        self.set_aside.take_from(0, aside, |first, run| {
            ids.extend((first..first + run as usize).map(|block| {
                let (page, slot) = grid.place(block);
                grid.block_id(page, slot)
            }));
        });
        self.take_best(n - aside, ids);
        if aside > 0 {
            ids[start..].sort_unstable(); // a page may have given to both parts
        }
        self.debug_check(); // nothing to rebalance: no idle page was taken while any has to go
        true
    }

    /// Gives blocks back. Nothing changes unless every id is held, named once and not pinned; the error is
    /// that of the first id that is not.
    pub fn free(&mut self, ids: &[u32]) -> Result<FreeOutcome, BlockError> {
        self.give_bits(ids)?;
        let mut outcome = FreeOutcome::default();
        for (page, run) in self.grid.runs(ids) {
            let emptied = self.gained(page, run.len() as u32);
            outcome.note(page, emptied);
        }
        self.finish();
        Ok(outcome)
    }

    /// Pages that would hold nothing, were exactly these blocks freed. Fails where [`Ledger::free`] would.
    pub fn emptied_by(&self, ids: &[u32]) -> Result<u32, BlockError> {
        let mut sorted = ids.to_vec();
        sorted.sort_unstable();
        let mut emptied = 0;
        for (page, run) in self.grid.runs(&sorted) {
            for (at, &id) in run.iter().enumerate() {
                self.freeable(page, id)?;
                if at > 0 && run[at - 1] == id {
                    return Err(BlockError::Duplicate { id });
                }
            }
            let (held, _) = self.occupancy(page).ok_or(BlockError::Unknown { id: run[0] })?;
            emptied += u32::from(held == run.len() as u32);
        }
        Ok(emptied)
    }

    /// Names the pages that have to be backed before [`Ledger::claim`] can take these ids, and marks
    /// them as `Mapping`. Nothing changes unless every id is free and named once.
    pub fn plan_claim(&mut self, ids: &[u32]) -> Result<ClaimPlan, BlockError> {
        self.take_bits(ids)?;
        self.restore_bits(ids, true);
        let mut to_map = Vec::new();
        let mut in_motion = false;
        for (page, run) in self.grid.runs(ids) {
            match self.pages[page as usize].state {
                PageState::Free => to_map.push(page),
                PageState::Withdrawn | PageState::Quarantined => {
                    return Err(self.unbacked_error(page, run[0]));
                }
                state => in_motion |= state.is_in_motion(),
            }
        }
        if in_motion {
            return Ok(ClaimPlan::InMotion);
        }
        to_map.sort_unstable();
        to_map.dedup();
        to_map.iter().for_each(|&page| self.must(page, Transition::BeginMapping));
        self.finish();
        Ok(if to_map.is_empty() { ClaimPlan::Ready } else { ClaimPlan::Map(to_map) })
    }

    /// Takes these very blocks, also where the limit keeps them from being issued: whoever asks wants their
    /// content. Nothing changes unless every id is free, named once and in a backed page.
    pub fn claim(&mut self, ids: &[u32]) -> Result<(), BlockError> {
        self.take_bits(ids)?;
        let unbacked = self.grid.runs(ids).find(|&(page, _)| !self.pages[page as usize].state.is_backed());
        if let Some((page, run)) = unbacked {
            self.restore_bits(ids, true);
            return Err(self.unbacked_error(page, run[0]));
        }
        for (page, run) in self.grid.runs(ids) {
            self.lost(page, run.len() as u32);
        }
        self.finish();
        Ok(())
    }

    /// Makes a held block permanent: it can no longer be freed, so its page stays in use.
    pub fn pin(&mut self, id: u32) -> Result<(), BlockError> {
        let (page, slot) = self.grid.locate(id).ok_or(BlockError::Unknown { id })?;
        let block = self.grid.block(page, slot);
        if self.free_blocks.contains(block) || self.set_aside.contains(block) {
            return Err(BlockError::NotHeld { id });
        }
        self.pinned = Some(id);
        self.set_draining(page, false); // it would never empty
        self.finish();
        Ok(())
    }

    /// Keeps `n` more blocks of backed pages for the next [`Ledger::alloc`] calls; false and nothing
    /// changed where fewer are on hand.
    #[must_use]
    pub fn set_aside(&mut self, n: u32) -> bool {
        if n > self.issuable_blocks() {
            return false;
        }
        let mut ids = Vec::with_capacity(n as usize);
        self.take_best(n, &mut ids);
        for (page, slot) in ids.iter().filter_map(|&id| self.grid.locate(id)) {
            self.set_aside.insert(self.grid.block(page, slot));
        }
        self.finish();
        true
    }

    /// Gives back what was set aside and not used.
    pub fn release_set_aside(&mut self) -> FreeOutcome {
        let mut outcome = FreeOutcome::default();
        while let Some(block) = self.set_aside.first() {
            self.set_aside.remove(block);
            self.free_blocks.insert(block);
            let (page, _) = self.grid.place(block);
            let emptied = self.gained(page, 1);
            outcome.note(page, emptied);
        }
        self.finish();
        outcome
    }

    /// Forgets every holder but the pinned block, and everything set aside. Emptied and retired pages are
    /// reserved at once: the caller knows that no queued work is left.
    pub fn clear(&mut self) {
        self.set_aside.clear();
        for page in 0..self.grid.num_pages {
            match self.pages[page as usize].state {
                PageState::Retired(_) => self.must(page, Transition::Settle),
                PageState::InUse => self.clear_page(page),
                _ => {}
            }
        }
        self.finish();
    }

    /// [`Ledger::clear`] that spares nothing: the end of the pool.
    pub fn clear_all(&mut self) {
        self.pinned = None;
        self.clear();
    }

    fn clear_page(&mut self, page: u32) {
        let capacity = self.grid.capacity(page);
        let first = self.grid.block(page, 0);
        self.free_blocks.insert_range(first..first + capacity as usize);
        let pinned = self.pinned.and_then(|id| self.grid.locate(id)).filter(|place| place.0 == page);
        let spared = u32::from(pinned.is_some());
        if let Some((_, slot)) = pinned {
            self.free_blocks.remove(self.grid.block(page, slot));
        }
        let entry = Page { free: capacity - spared, ..self.pages[page as usize] };
        self.set(page, if spared == 0 { moved(entry, page, Transition::Vacate) } else { entry });
    }

    /// Takes `n` blocks, which must be on hand.
    fn take_best(&mut self, n: u32, ids: &mut Vec<u32>) {
        let idle = self.excess() == 0;
        let mut left = n;
        let mut alike = None;
        while left > 0
            && let Some(page) = alike.take().or_else(|| self.index.pick(left, idle))
        {
            let entry = self.pages[page as usize];
            let count = left.min(entry.free);
            self.take_lowest(page, count, ids);
            left -= count;
            // Where no page holds the remainder, the next one with as many free blocks is again one with the most.
            if entry.state == PageState::InUse && left > entry.free {
                alike = self.index.next_alike(page, entry.free);
            }
        }
        assert_eq!(left, 0, "the ledger counted blocks that no page has");
    }

    fn take_lowest(&mut self, page: u32, count: u32, ids: &mut Vec<u32>) {
        let first = self.grid.block(page, 0);
        let first_id = self.grid.block_id(page, 0);
        self.free_blocks.take_from(first, count, |block, run| {
            let id = first_id + (block - first) as u32;
            ids.extend(id..id + run);
        });
        self.lost(page, count);
    }

    /// Number of a block that its holder may give back, as far as its id says.
    fn freeable(&self, page: u32, id: u32) -> Result<usize, BlockError> {
        let slot = self.grid.slot(page, id).ok_or(BlockError::Unknown { id })?;
        let block = self.grid.block(page, slot);
        if self.pinned == Some(id) {
            return Err(BlockError::Pinned { id });
        }
        let aside = !self.set_aside.is_empty() && self.set_aside.contains(block);
        if aside || self.free_blocks.contains(block) {
            return Err(BlockError::NotHeld { id });
        }
        Ok(block)
    }

    /// Marks held blocks as free, all or none.
    fn give_bits(&mut self, ids: &[u32]) -> Result<(), BlockError> {
        let (grid, pinned) = (self.grid, self.pinned);
        let any_aside = !self.set_aside.is_empty();
        let mut done = 0;
        for (page, run) in grid.runs(ids) {
            for &id in run {
                let given = grid.slot(page, id).is_some_and(|slot| {
                    let block = grid.block(page, slot);
                    let issued = pinned != Some(id) && !(any_aside && self.set_aside.contains(block));
                    issued && self.free_blocks.insert(block)
                });
                if !given {
                    self.restore_bits(&ids[..done], false);
                    // What could be freed by itself was named before.
                    return Err(self.freeable(page, id).err().unwrap_or(BlockError::Duplicate { id }));
                }
                done += 1;
            }
        }
        Ok(())
    }

    /// Marks free blocks as held, all or none.
    fn take_bits(&mut self, ids: &[u32]) -> Result<(), BlockError> {
        let grid = self.grid;
        let mut done = 0;
        for (page, run) in grid.runs(ids) {
            for &id in run {
                let block = grid.slot(page, id).map(|slot| grid.block(page, slot));
                if !block.is_some_and(|block| self.free_blocks.remove(block)) {
                    self.restore_bits(&ids[..done], true);
                    return Err(match block {
                        None => BlockError::Unknown { id },
                        Some(block) if self.free_blocks.contains(block) => BlockError::Duplicate { id },
                        Some(_) => BlockError::Held { id },
                    });
                }
                done += 1;
            }
        }
        Ok(())
    }

    /// Undoes [`Ledger::give_bits`] or [`Ledger::take_bits`] for ids that they marked.
    fn restore_bits(&mut self, ids: &[u32], free: bool) {
        for (page, slot) in ids.iter().filter_map(|&id| self.grid.locate(id)) {
            let block = self.grid.block(page, slot);
            if free {
                self.free_blocks.insert(block)
            } else {
                self.free_blocks.remove(block)
            };
        }
    }

    /// Why a block of this page cannot be claimed.
    fn unbacked_error(&self, page: u32, id: u32) -> BlockError {
        match self.pages[page as usize].state {
            PageState::Withdrawn => BlockError::Withdrawn { id, page },
            PageState::Quarantined => BlockError::Quarantined { id, page },
            _ => BlockError::Unbacked { id, page },
        }
    }
}
