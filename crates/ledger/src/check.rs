//! The invariant: everything that is kept incrementally, recomputed from the bitmaps.

use crate::ledger::{Index, Ledger};
use crate::state::PageState;

/// The ledger contradicts itself: a bug in here, never load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("ledger is inconsistent: {0}")]
pub struct Inconsistency(pub String);

impl Ledger {
    /// Recomputes counts, sets and sums in O(blocks). Runs after every change in debug builds.
    pub fn check(&self) -> Result<(), Inconsistency> {
        let fail = |text: String| Err(Inconsistency(text));
        let mut index = Index::default();
        for (number, page) in (0..).zip(&self.pages) {
            let (free, capacity) = (self.bitmap.count(number), self.layout.capacity(number));
            if free != page.free {
                return fail(format!("page {number}: {free} bits free, counted {}", page.free));
            }
            let held = capacity - free;
            if (page.state == PageState::InUse) != (held > 0) {
                return fail(format!("page {number} is {:?} and holds {held} blocks", page.state));
            }
            if let PageState::Retired(epoch) = page.state
                && (epoch <= self.ended || epoch > self.begun)
            {
                return fail(format!(
                    "page {number} waits for epoch {epoch}, {}..{}",
                    self.ended, self.begun
                ));
            }
            index.insert(self.layout.rank(number), *page);
        }
        if index != self.index {
            return fail(format!("index is {:?}, should be {index:?}", self.index));
        }
        if self.index.pages.total() != self.layout.num_pages() {
            return fail(format!("{:?} are not {} pages", self.index.pages, self.layout.num_pages()));
        }
        for &id in self.set_aside.iter().chain(&self.pinned) {
            match self.layout.locate(id) {
                Some((page, slot)) if !self.bitmap.is_free(page, slot) => {}
                _ => return fail(format!("block {id} is set aside or pinned, yet free")),
            }
        }
        Ok(())
    }
}
