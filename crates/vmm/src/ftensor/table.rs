//! Which page of a range is in which state.

use super::backing::Page;
use super::error::VmmError;
use super::transaction::Transactions;
use crate::driver::Handle;

/// A page without its memory, and that memory: a handle for each of its runs.
pub(super) type Retained = (u32, Box<[Handle]>);

/// Pages that a call has claimed.
pub(super) type Taken = Vec<Retained>;

/// State of one page.
#[derive(Debug)]
pub(super) enum Slot {
    /// No memory of its own: a hole, or the shared zeros.
    Unbacked,
    /// A call is mapping or unmapping it.
    InTransition,
    /// The handles under its runs.
    Mapped(Box<[Handle]>),
    /// Unmapped by a transaction that is not decided.
    Prepared,
    /// Lost: what was last known of it.
    Quarantined(Box<Page>),
}

/// The pages of a range.
#[derive(Debug)]
pub(super) struct Table {
    slots: Vec<Slot>,
    num_mapped: u32,
    /// Memory of pages that were unmapped but whose release failed.
    pub leaked: Vec<Handle>,
    pub transactions: Transactions,
    /// Pages of the pending transaction and their memory; without memory once it has begun to commit.
    pub retained: Taken,
    /// Memory that a commit has not released yet.
    pub releasing: Vec<Handle>,
}

impl Table {
    pub fn new(num_pages: u32) -> Self {
        Table {
            slots: std::iter::repeat_with(|| Slot::Unbacked).take(num_pages as usize).collect(),
            num_mapped: 0,
            leaked: vec![],
            transactions: Transactions::default(),
            retained: vec![],
            releasing: vec![],
        }
    }

    pub fn num_mapped(&self) -> u32 {
        self.num_mapped
    }

    pub fn set(&mut self, page: u32, slot: Slot) -> Slot {
        let mapped = u32::from(matches!(slot, Slot::Mapped(_)));
        let was = std::mem::replace(&mut self.slots[page as usize], slot);
        self.num_mapped = self.num_mapped + mapped - u32::from(matches!(was, Slot::Mapped(_)));
        was
    }

    /// Claims for the caller those of `pages` that have no memory, in the order given, each once. Fails where one cannot be
    /// worked on; nothing is claimed then.
    pub fn claim_unbacked(&mut self, pages: &[u32]) -> Result<Vec<u32>, VmmError> {
        pages.iter().try_for_each(|page| self.check_stable(*page))?;
        let mut new = vec![];
        for &page in pages {
            if let Slot::Unbacked = self.slots[page as usize] {
                self.set(page, Slot::InTransition);
                new.push(page);
            }
        }
        Ok(new)
    }

    /// Claims `pages`, all of them mapped, with their memory, each once. Fails where one cannot be worked on or has no memory;
    /// nothing is claimed then.
    pub fn claim_mapped(&mut self, pages: &[u32]) -> Result<Taken, VmmError> {
        pages.iter().try_for_each(|page| self.check_stable(*page))?;
        let is_unbacked = |page: &&u32| matches!(self.slots[**page as usize], Slot::Unbacked);
        let missing: Vec<u32> = pages.iter().filter(is_unbacked).copied().collect();
        if !missing.is_empty() {
            return Err(VmmError::NotMapped { pages: missing });
        }
        let mut taken = Vec::with_capacity(pages.len());
        for &page in pages {
            if let Slot::Mapped(_) = self.slots[page as usize]
                && let Slot::Mapped(handles) = self.set(page, Slot::InTransition)
            {
                taken.push((page, handles));
            }
        }
        Ok(taken)
    }

    pub fn pages_where(&self, keep: impl Fn(&Slot) -> bool) -> Vec<u32> {
        (0..).zip(&self.slots).filter(|(_, slot)| keep(slot)).map(|(page, _)| page).collect()
    }

    /// Leaves nothing in the table.
    pub fn take_slots(&mut self) -> Vec<Slot> {
        self.num_mapped = 0;
        std::mem::take(&mut self.slots)
    }

    fn check_stable(&self, page: u32) -> Result<(), VmmError> {
        match self.slots.get(page as usize) {
            None => Err(VmmError::PageOutOfRange { page, num_pages: self.slots.len() as u32 }),
            Some(Slot::InTransition) => Err(VmmError::InTransition { page }),
            Some(Slot::Prepared) => Err(VmmError::InTransaction { page }),
            Some(Slot::Quarantined(_)) => Err(VmmError::InQuarantine { page }),
            Some(Slot::Unbacked | Slot::Mapped(_)) => Ok(()),
        }
    }
}
