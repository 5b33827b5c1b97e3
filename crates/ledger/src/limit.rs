//! How many pages may hold memory.
//!
//! A target below what is occupied revokes nothing. It takes out the pages without memory, stops the issue of
//! blocks that would keep pages occupied, and completes as pages empty and are unmapped.

use crate::index::{Kind, Page};
use crate::ledger::Ledger;
use crate::state::{PageState, Transition};

impl Ledger {
    /// At most this many pages may hold memory from now on, and never more than there are. Growth and shrinking
    /// alike take effect at once, but for pages that are occupied: see [`Ledger::excess`].
    pub fn set_target(&mut self, pages: u32) {
        self.target = pages.min(self.grid.num_pages);
        self.finish();
    }

    /// Pages that may hold memory, as [`Ledger::set_target`] was told.
    pub fn target(&self) -> u32 {
        self.target
    }

    /// Occupied pages beyond the target, where a pinned block has one page for granted. While there are any no
    /// block of an idle page is issued, and of no page that drains. Under a target of 0 no block at all is.
    pub fn excess(&self) -> u32 {
        self.index.occupied().saturating_sub(self.effective_target())
    }

    /// The page is in use and none of its free blocks is issued, so that it empties.
    pub fn is_draining(&self, page: u32) -> bool {
        self.pages.get(page as usize).is_some_and(|page| page.draining)
    }

    fn effective_target(&self) -> u32 {
        self.target.max(u32::from(self.pinned.is_some()))
    }

    /// Pages without memory that may get some.
    pub(crate) fn free_wanted(&self) -> u32 {
        self.effective_target().saturating_sub(self.index.occupied())
    }

    /// Pages in use that have to empty, as idle pages and those about to be unmapped do not make up for the excess.
    pub(crate) fn draining_wanted(&self) -> u32 {
        let (excess, pages) = (self.excess(), self.page_counts());
        if self.target == 0 {
            return pages.in_use; // that of a pinned block too: it stays, and no other block of it is issued
        }
        if excess == 0 {
            return 0;
        }
        let leaving = pages.reserved + pages.retired + pages.unmapping;
        let may_drain = pages.in_use - u32::from(self.pinned.is_some());
        excess.saturating_sub(leaving).min(may_drain)
    }

    /// Makes free, withdrawn and draining pages follow the target and what is occupied.
    pub(crate) fn rebalance(&mut self) {
        let free = self.free_wanted();
        while self.index.pages(Kind::Free) > free
            && let Some(page) = self.index.last_unbacked()
        {
            self.must(page, Transition::Withdraw);
        }
        while self.index.pages(Kind::Free) < free
            && let Some(page) = self.index.first_withdrawn()
        {
            self.must(page, Transition::Restore);
        }
        let draining = self.draining_wanted();
        let pinned = self.pinned.filter(|_| self.target > 0).and_then(|id| self.page_of(id));
        if let Some(page) = pinned {
            self.set_draining(page, false);
        }
        while self.index.pages(Kind::Draining) > draining
            && let Some(page) = self.index.fullest_draining()
        {
            self.set_draining(page, false);
        }
        while self.index.pages(Kind::Draining) < draining
            && let Some(page) = self.index.emptiest_in_use(pinned)
        {
            self.set_draining(page, true);
        }
    }

    /// Of a page in use.
    pub(crate) fn set_draining(&mut self, page: u32, draining: bool) {
        let entry = self.pages[page as usize];
        if entry.draining == draining {
            return;
        }
        self.set(page, Page { draining: draining && entry.state == PageState::InUse, ..entry });
    }
}
