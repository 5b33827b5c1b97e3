//! Memory under the runs of a page: the driver calls that put it there and take it away, and how far they came.

use std::sync::Arc;

use super::cache::{self, HandleCache};
use crate::driver::{Access, Driver, DriverError, Handle};
use crate::geometry::Geometry;

type Result<T> = std::result::Result<T, DriverError>;

/// What lies under a run, as far as the driver's answers tell.
#[derive(Debug, Clone, Copy)]
enum Under {
    Nothing,
    /// The zeros that all unbacked runs share.
    Zeros,
    Memory(Handle),
    /// An unmap failed: this memory, or the shared zeros, may still be there. Or zeros that nobody may read yet.
    Doubt(Option<Handle>),
}

/// One page and what lies under its runs.
#[derive(Debug, Clone)]
pub(super) struct Page {
    pub number: u32,
    under: Vec<Under>,
    /// Memory of this page that is mapped nowhere.
    loose: Vec<Handle>,
}

impl Page {
    /// The handles under a page that is backed throughout.
    pub fn handles(&self) -> Box<[Handle]> {
        let handle = |under: &Under| match under {
            Under::Memory(handle) => Some(*handle),
            _ => None,
        };
        self.under.iter().filter_map(handle).collect()
    }

    /// Takes the memory that is mapped nowhere.
    pub fn take_loose(&mut self) -> Vec<Handle> {
        std::mem::take(&mut self.loose)
    }

    /// Adds memory that is mapped nowhere.
    pub fn add_loose(&mut self, handles: Vec<Handle>) {
        self.loose.extend(handles);
    }

    /// Whether something lies, or may lie, under some run.
    pub fn covers(&self) -> bool {
        self.under.iter().any(|under| !matches!(under, Under::Nothing))
    }

    /// Whether nobody knows what lies under some run.
    pub fn in_doubt(&self) -> bool {
        self.under.iter().any(|under| matches!(under, Under::Doubt(_)))
    }
}

/// The driver's side of a range. Knows the addresses, not the state, of its pages.
#[derive(Debug)]
pub(super) struct Backing {
    pub driver: Arc<dyn Driver>,
    pub geometry: Geometry,
    pub base: usize,
    pub num_pages: u32,
    /// Memory that lies under every unbacked run; None: nothing does.
    pub zeros: Option<Handle>,
    pub cache: Arc<HandleCache>,
}

impl Backing {
    /// A page without memory of its own.
    pub fn unbacked(&self, number: u32) -> Page {
        let rest = if self.zeros.is_some() { Under::Zeros } else { Under::Nothing };
        Page { number, under: vec![rest; self.runs()], loose: vec![] }
    }

    /// A page under which nothing lies, not even zeros.
    pub fn bare(&self, number: u32) -> Page {
        Page { number, under: vec![Under::Nothing; self.runs()], loose: vec![] }
    }

    /// A page under which these handles lie, in the order of its runs.
    pub fn backed(&self, number: u32, handles: &[Handle]) -> Page {
        Page { number, under: handles.iter().copied().map(Under::Memory).collect(), loose: vec![] }
    }

    /// Puts new memory under every run of a page that has none. Where it fails the page tells how far it came.
    pub fn back(&self, page: &mut Page) -> Result<()> {
        for run in 0..page.under.len() {
            page.loose.push(self.obtain()?);
            self.put(page, run)?;
        }
        Ok(())
    }

    /// Leaves every run of a page as an unbacked one is. Memory that lay under it is loose afterwards, in the order of the runs.
    pub fn strip(&self, page: &mut Page) -> Result<()> {
        (0..page.under.len()).try_for_each(|run| self.rest(page, run))
    }

    /// Puts what `strip` took back where it was, latest first. Stops at the first failure: the loose memory of lower runs is
    /// not the one that `put` would find.
    pub fn restore(&self, page: &mut Page) -> Result<()> {
        (0..page.loose.len()).rev().try_for_each(|run| self.put(page, run))
    }

    /// Undoes a `back` that failed: no memory under any run and none loose. Fails with the first failure, having tried
    /// everything; the page is lost then.
    pub fn undo(&self, page: &mut Page) -> Result<()> {
        let rested = self.rest_all(page);
        rested.and(self.release(&mut page.loose))
    }

    /// Leaves every run as an unbacked one is, latest first; memory is loose afterwards. Fails with the first failure, having
    /// tried everything. For a page that is lost too: its memory is of use elsewhere, and where unbacked pages read as
    /// zeros so should it.
    pub fn rest_all(&self, page: &mut Page) -> Result<()> {
        let mut first = Ok(());
        for run in (0..page.under.len()).rev() {
            if !self.is_at_rest(page.under[run]) {
                first = first.and(self.rest(page, run));
            }
        }
        first
    }

    /// Takes everything from under a page, zeros too, trying all runs; memory is loose afterwards.
    pub fn bare_all(&self, page: &mut Page) -> Result<()> {
        let mut first = Ok(());
        for run in 0..page.under.len() {
            if !matches!(page.under[run], Under::Nothing) {
                first = first.and(self.unmap(page, run));
            }
        }
        first
    }

    /// Fills memory under these pages with zeros.
    pub fn clear(&self, pages: &[Page]) -> Result<()> {
        let run_bytes = self.geometry.run_bytes();
        let runs = pages.iter().flat_map(|page| (0..page.under.len()).map(|run| (page.number, run)));
        let mappings: Vec<_> = runs.map(|(page, run)| (self.address(page, run), run_bytes)).collect();
        self.driver.clear(&mappings)
    }

    /// Releases memory that is mapped nowhere, trying all of it. What could not be released stays in `handles`; fails with
    /// the first failure.
    pub fn release(&self, handles: &mut Vec<Handle>) -> Result<()> {
        let mut first = Ok(());
        handles.retain(|handle| {
            let released = self.driver.release(*handle);
            let failed = released.is_err();
            if first.is_ok() {
                first = released;
            }
            failed
        });
        first
    }

    /// Pieces of memory under a page.
    pub fn runs(&self) -> usize {
        self.geometry.runs_per_page() as usize
    }

    /// Memory that reads as zeros. Where the device has none left, what other ranges keep for later goes first.
    pub fn obtain(&self) -> Result<Handle> {
        if let Some(handle) = self.cache.take() {
            return Ok(handle);
        }
        let run_bytes = self.geometry.run_bytes();
        match self.driver.create(run_bytes) {
            Err(error) if error.is_out_of_memory() && cache::relieve(&self.driver) > 0 => {
                self.driver.create(run_bytes)
            }
            other => other,
        }
    }

    /// Puts the latest loose memory under a run that has none.
    fn put(&self, page: &mut Page, run: usize) -> Result<()> {
        if !matches!(page.under[run], Under::Nothing) {
            self.unmap(page, run)?;
        }
        let (address, bytes) = (self.address(page.number, run), self.geometry.run_bytes());
        let Some(&handle) = page.loose.last() else { return Ok(()) };
        self.driver.map(address, bytes, handle)?;
        page.loose.pop();
        page.under[run] = Under::Memory(handle);
        self.driver.set_access(address, bytes, Access::ReadWrite)
    }

    /// Leaves a run as an unbacked one is; its memory is loose afterwards.
    fn rest(&self, page: &mut Page, run: usize) -> Result<()> {
        if !matches!(page.under[run], Under::Nothing) {
            self.unmap(page, run)?;
        }
        let Some(zeros) = self.zeros else { return Ok(()) };
        let (address, bytes) = (self.address(page.number, run), self.geometry.run_bytes());
        self.driver.map(address, bytes, zeros)?;
        page.under[run] = Under::Doubt(None);
        self.driver.set_access(address, bytes, Access::Read)?;
        page.under[run] = Under::Zeros;
        Ok(())
    }

    fn unmap(&self, page: &mut Page, run: usize) -> Result<()> {
        let handle = match page.under[run] {
            Under::Memory(handle) | Under::Doubt(Some(handle)) => Some(handle),
            Under::Nothing | Under::Zeros | Under::Doubt(None) => None,
        };
        let unmapped = self.driver.unmap(self.address(page.number, run), self.geometry.run_bytes());
        if let Err(error) = unmapped {
            page.under[run] = Under::Doubt(handle);
            return Err(error);
        }
        page.under[run] = Under::Nothing;
        page.loose.extend(handle);
        Ok(())
    }

    fn is_at_rest(&self, under: Under) -> bool {
        match under {
            Under::Nothing => self.zeros.is_none(),
            Under::Zeros => self.zeros.is_some(),
            Under::Memory(_) | Under::Doubt(_) => false,
        }
    }

    fn address(&self, page: u32, run: usize) -> usize {
        // Both fit: the run lies in a reservation that the driver has made.
        self.base + self.geometry.run_offset(page, run as u32, self.num_pages) as usize
    }
}
