//! How pages get and lose memory: a `plan_*` call marks them as in motion, a report says what came of it.

use std::collections::BTreeSet;

use crate::ledger::Ledger;
use crate::state::{Transition, TransitionError};

impl Ledger {
    /// Marks `Free` pages as `Mapping` until, once they are backed, `n` blocks are on hand, and names
    /// them. Fewer where there are no more of them or `at_most` is reached.
    pub fn plan_backing(&mut self, n: u32, at_most: u32) -> Vec<u32> {
        let mut short = n.saturating_sub(self.backed_free_blocks());
        let mut pages = Vec::new();
        while short > 0
            && (pages.len() as u32) < at_most
            && let Some(page) = self.begin_next()
        {
            short = short.saturating_sub(self.grid.capacity(page));
            pages.push(page);
        }
        self.finish();
        pages
    }

    /// Marks up to `count` `Free` pages as `Mapping`, whatever is on hand, and names them.
    pub fn plan_pages(&mut self, count: u32) -> Vec<u32> {
        let pages = (0..count).map_while(|_| self.begin_next()).collect();
        self.finish();
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

    /// Marks reserved pages as `Unmapping` and names them, the least preferred first (the highest under
    /// [`PageOrder::LowestFirst`](crate::PageOrder::LowestFirst)), at most `at_most`. Pages go that are reserved
    /// beyond `keep`, as long as `on_hand` blocks stay on hand without them, and whatever the two say as
    /// many as there are in [excess](Ledger::excess), less those that are `Unmapping` already.
    pub fn plan_unbacking(&mut self, keep: u32, on_hand: u32, at_most: u32) -> Vec<u32> {
        let mut pages = Vec::new();
        while (pages.len() as u32) < at_most
            && let Some(page) = self.surplus(keep, on_hand)
        {
            self.must(page, Transition::BeginUnmapping);
            pages.push(page);
        }
        self.finish();
        pages
    }

    /// Whether [`Ledger::plan_unbacking`] with the same arguments would name a page.
    pub fn has_surplus(&self, keep: u32, on_hand: u32) -> bool {
        self.surplus(keep, on_hand).is_some()
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

    /// The next page in the order of preference, now `Mapping`.
    fn begin_next(&mut self) -> Option<u32> {
        let page = self.index.first_unbacked()?;
        self.must(page, Transition::BeginMapping);
        Some(page)
    }

    /// The reserved page that may or must lose its memory next.
    fn surplus(&self, keep: u32, on_hand: u32) -> Option<u32> {
        let page = self.index.last_reserved()?;
        let (counts, excess) = (self.page_counts(), self.excess());
        let issuable = if excess == 0 { self.grid.capacity(page) } else { 0 };
        let must = excess > counts.unmapping;
        let may = counts.reserved > keep && self.backed_free_blocks() - issuable >= on_hand;
        (must || may).then_some(page)
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
        self.finish();
        Ok(())
    }
}

/// `pages` but for those in any of the other lists.
fn without(pages: &[u32], others: &[&[u32]]) -> Vec<u32> {
    pages.iter().copied().filter(|page| !others.iter().any(|other| other.contains(page))).collect()
}
