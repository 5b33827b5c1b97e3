//! When a page that nobody holds any longer may lose its memory.
//!
//! With asynchronous scheduling a block is freed while work that was submitted before may still read it. Each
//! submission has a marker, its epoch; a page that empties waits for the latest one begun.

use crate::error::EpochError;
use crate::layout::RetirePolicy;
use crate::ledger::Ledger;
use crate::state::Transition;

impl Ledger {
    /// Work is about to be submitted: pages emptied from now on wait for it. Returns its marker.
    pub fn begin_epoch(&mut self) -> u64 {
        self.begun += 1;
        self.begun
    }

    /// All work up to `marker` has ended. Pages retired by then are reserved, and named. A marker that
    /// was confirmed before changes nothing.
    pub fn release_through(&mut self, marker: u64) -> Result<Vec<u32>, EpochError> {
        if marker > self.begun {
            return Err(EpochError { epoch: marker, latest: self.begun });
        }
        self.ended = self.ended.max(marker);
        let mut released = Vec::new();
        while let Some((epoch, page)) = self.index.first_retired()
            && epoch <= self.ended
        {
            self.must(page, Transition::Settle);
            released.push(page);
        }
        self.finish();
        Ok(released)
    }

    /// Work was begun and has not ended: it may still read pages.
    pub fn has_outstanding_epoch(&self) -> bool {
        self.begun > self.ended
    }

    /// What happens to a page that loses its last block now.
    pub(crate) fn parting(&self) -> Transition {
        if self.policy == RetirePolicy::Asynchronous && self.has_outstanding_epoch() {
            Transition::Retire(self.begun)
        } else {
            Transition::Vacate
        }
    }
}
