//! The invariant: everything that is kept incrementally, recomputed from the free blocks and the page states.

use crate::index::{Index, Page};
use crate::ledger::Ledger;
use crate::state::PageState;

/// The ledger contradicts itself: a bug in here, never load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("ledger is inconsistent: {0}")]
pub struct Inconsistency(pub String);

fn fail<T>(text: String) -> Result<T, Inconsistency> {
    Err(Inconsistency(text))
}

impl Ledger {
    /// Recomputes counts, sets and sums in O(blocks). Runs after every change in debug builds.
    pub fn check(&self) -> Result<(), Inconsistency> {
        let mut index = Index::new(self.grid);
        for (number, page) in (0..).zip(&self.pages) {
            self.check_page(number, *page)?;
            index.insert(number, *page);
        }
        if index != self.index {
            return fail(format!("index is {:?}, should be {index:?}", self.index));
        }
        if self.page_counts().total() != self.layout.num_pages() {
            return fail(format!("{:?} are not {} pages", self.page_counts(), self.layout.num_pages()));
        }
        self.check_blocks()?;
        self.check_limit()
    }

    fn check_page(&self, number: u32, page: Page) -> Result<(), Inconsistency> {
        let capacity = self.layout.capacity(number);
        let first = self.grid.block(number, 0);
        let free = self.free_blocks.count(first..first + capacity as usize);
        if free != page.free {
            return fail(format!("page {number}: {free} bits free, counted {}", page.free));
        }
        let held = capacity - free;
        if (page.state == PageState::InUse) != (held > 0) {
            return fail(format!("page {number} is {:?} and holds {held} blocks", page.state));
        }
        if page.draining && page.state != PageState::InUse {
            return fail(format!("page {number} drains and is {:?}", page.state));
        }
        match page.state {
            PageState::Retired(epoch) if epoch <= self.ended || epoch > self.begun => {
                fail(format!("page {number} waits for epoch {epoch}, {}..{}", self.ended, self.begun))
            }
            _ => Ok(()),
        }
    }

    fn check_blocks(&self) -> Result<(), Inconsistency> {
        if !self.free_blocks.is_sound() || !self.set_aside.is_sound() {
            return fail("a set of blocks contradicts itself".to_owned());
        }
        let mut at = 0;
        while let Some(block) = self.set_aside.next_from(at) {
            if self.free_blocks.contains(block) {
                return fail(format!("block number {block} is set aside, yet free"));
            }
            at = block + 1;
        }
        let counts = self.block_counts();
        let free = counts.backed + counts.draining + counts.unbacked;
        let kept = counts.in_motion + counts.withdrawn + counts.quarantined;
        if free + kept + self.set_aside_blocks() + self.held_blocks() != self.layout.num_blocks {
            return fail(format!("{counts:?} do not add up to {} blocks", self.layout.num_blocks));
        }
        if self.free_blocks.len() != free + kept {
            return fail(format!("{counts:?} are not {} free blocks", self.free_blocks.len()));
        }
        Ok(())
    }

    fn check_limit(&self) -> Result<(), Inconsistency> {
        let pages = self.page_counts();
        let target = self.target.max(u32::from(self.pinned.is_some()));
        if pages.free + pages.occupied() > target.max(pages.occupied())
            || (pages.withdrawn > 0 && pages.free + pages.occupied() < target)
        {
            return fail(format!("{pages:?} with a target of {target}"));
        }
        let draining = self.pages.iter().filter(|page| page.draining).count();
        if draining != self.draining_wanted() as usize {
            return fail(format!("{draining} pages drain, not {}", self.draining_wanted()));
        }
        match self.pinned.map(|id| (id, self.layout.locate(id))) {
            None => Ok(()),
            Some((_, Some((page, slot))))
                if !self.free_blocks.contains(self.grid.block(page, slot))
                    && !self.set_aside.contains(self.grid.block(page, slot))
                    && (self.target == 0 || !self.is_draining(page)) =>
            {
                Ok(())
            }
            Some((id, _)) => fail(format!("block {id} is pinned, yet free or in a page that drains")),
        }
    }
}
