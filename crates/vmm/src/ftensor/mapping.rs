//! Backing pages and giving them back, by one process alone.

use super::backing::Page;
use super::error::{UnmapFailure, VmmError};
use super::table::{Slot, Table, Taken};
use super::{FTensor, Unbacked};
use crate::driver::DriverError;

impl FTensor {
    /// Backs these pages, all or none; returns those that were not mapped before, in the order given. Three driver calls for
    /// each run of a page, two where memory was kept. A page that is mapped already, or is named twice, costs nothing.
    ///
    /// Fails with `PageOutOfRange`, `InQuarantine`, `InTransaction` or `InTransition` before anything is done; with
    /// `OutOfMemory` or `Driver` after what was done is undone; with `Quarantined` where that failed too.
    pub fn map(&self, pages: &[u32]) -> Result<Vec<u32>, VmmError> {
        self.check_owner("map")?;
        let new = self.table().claim_unbacked(pages)?;
        if let Err(error) = self.still(!new.is_empty()) {
            let mut table = self.table();
            new.iter().for_each(|page| drop(table.set(*page, Slot::Unbacked)));
            return Err(VmmError::from_driver(None, error));
        }
        let mut done = Vec::with_capacity(new.len());
        for &number in &new {
            let mut page = self.backing.unbacked(number);
            let backed = self.backing.back(&mut page);
            done.push(page);
            if let Err(cause) = backed {
                return Err(self.undo_map(&new, done, cause));
            }
        }
        let mut table = self.table();
        for page in done {
            table.set(page.number, Slot::Mapped(page.handles()));
        }
        Ok(new)
    }

    /// Gives these pages back: first all are unmapped, then their memory is released, or cleared before and kept. Two driver
    /// calls for each run of a page. A page named twice counts once. Synchronise first where the device may still use them.
    ///
    /// Fails with `PageOutOfRange`, `NotMapped`, `InQuarantine`, `InTransaction` or `InTransition` before anything is done, and
    /// with `Driver` where the device could not be waited for; with `Unmap` after: no further page is unmapped then, and the
    /// report says where each stands.
    pub fn unmap(&self, pages: &[u32]) -> Result<(), VmmError> {
        self.check_owner("unmap")?;
        let taken = self.table().claim_mapped(pages)?;
        if let Err(error) = self.still(!taken.is_empty()) {
            self.put_back(taken);
            return Err(VmmError::from_driver(None, error));
        }
        let mut waiting: Vec<_> =
            taken.iter().map(|(page, handles)| self.backing.backed(*page, handles)).collect();
        let kept = self.clear_for_cache(&waiting);
        let (mut gone, mut failure, mut lost) = (vec![], None, None);
        let mut untried = waiting.drain(..);
        for mut page in untried.by_ref() {
            match self.backing.strip(&mut page) {
                Ok(()) => gone.push(page),
                Err(error) => {
                    failure = Some(error);
                    lost = Some(page);
                    break;
                }
            }
        }
        let still_mapped: Vec<_> = untried.collect();
        self.settle_unmap(gone, kept, lost, still_mapped, failure)
    }

    // ---------------------------------------------------------------- inside

    /// Waits for the device where a page that is about to change reads as zeros until then.
    pub(super) fn still(&self, changes: bool) -> Result<(), DriverError> {
        match changes && self.unbacked == Unbacked::Zero {
            true => self.driver().synchronise(),
            false => Ok(()),
        }
    }

    /// Leaves pages that were claimed as they were.
    pub(super) fn put_back(&self, taken: Taken) {
        let mut table = self.table();
        for (page, handles) in taken {
            table.set(page, Slot::Mapped(handles));
        }
    }

    /// Undoes a map that failed, newest first, and returns the error of the whole call.
    fn undo_map(&self, new: &[u32], done: Vec<Page>, cause: DriverError) -> VmmError {
        let (mut lost, mut first) = (vec![], None);
        let failed = done.last().map(|page| page.number);
        for mut page in done.into_iter().rev() {
            if let Err(error) = self.backing.undo(&mut page) {
                first.get_or_insert(error);
                lost.push(page);
            }
        }
        let mut table = self.table();
        for &page in new {
            table.set(page, Slot::Unbacked);
        }
        let pages = quarantine(&mut table, lost);
        drop(table);
        match first {
            None => VmmError::from_driver(failed, cause),
            Some(source) => VmmError::Quarantined { pages, cause: Box::new(cause), source: Box::new(source) },
        }
    }

    /// How many of the first of these pages have been cleared, whose memory the cache will keep.
    fn clear_for_cache(&self, pages: &[Page]) -> usize {
        let fit = (self.backing.cache.room() / self.backing.runs()).min(pages.len());
        if fit == 0 {
            return 0;
        }
        match self.backing.clear(&pages[..fit]) {
            Ok(()) => fit,
            Err(error) => {
                tracing::warn!(%error, "memory is released rather than kept: it could not be cleared");
                0
            }
        }
    }

    /// Keeps or releases the memory of pages that were unmapped, and records where every page of the call stands.
    fn settle_unmap(
        &self,
        mut gone: Vec<Page>,
        kept: usize,
        mut lost: Option<Page>,
        still_mapped: Vec<Page>,
        mut failure: Option<DriverError>,
    ) -> Result<(), VmmError> {
        // What a page lost on the way still has, and what earlier calls could not release.
        let mut earlier = std::mem::take(&mut self.table().leaked);
        if let Some(page) = &mut lost {
            if let Err(error) = self.backing.rest_all(page) {
                tracing::warn!(%error, page = page.number, "a page is lost with memory under it");
            }
            earlier.append(&mut page.take_loose());
        }
        let (mut leaked, mut unreleased) = (vec![], vec![]);
        for (place, page) in gone.iter_mut().enumerate() {
            let mut handles = page.take_loose();
            if place < kept {
                handles.retain(|handle| !self.backing.cache.put(*handle));
            }
            if let Err(error) = self.backing.release(&mut handles) {
                failure.get_or_insert(error);
                leaked.push(page.number);
            }
            unreleased.append(&mut handles);
        }
        if let Err(error) = self.backing.release(&mut earlier) {
            tracing::warn!(%error, "memory could not be released yet");
        }
        unreleased.append(&mut earlier);
        let mut table = self.table();
        table.leaked.append(&mut unreleased);
        let unmapped: Vec<u32> = gone.iter().map(|page| page.number).collect();
        unmapped.iter().for_each(|page| drop(table.set(*page, Slot::Unbacked)));
        for page in &still_mapped {
            table.set(page.number, Slot::Mapped(page.handles()));
        }
        let still_mapped = still_mapped.iter().map(|page| page.number).collect();
        let quarantined = quarantine(&mut table, lost.into_iter().collect());
        match failure {
            None => Ok(()),
            Some(source) => Err(VmmError::Unmap(Box::new(UnmapFailure {
                unmapped,
                quarantined,
                still_mapped,
                leaked,
                source,
            }))),
        }
    }
}

/// Records pages as lost; returns them, ascending.
pub(super) fn quarantine(table: &mut Table, pages: Vec<Page>) -> Vec<u32> {
    let mut numbers: Vec<u32> = pages.iter().map(|page| page.number).collect();
    for page in pages {
        table.set(page.number, Slot::Quarantined(Box::new(page)));
    }
    numbers.sort_unstable();
    numbers
}
