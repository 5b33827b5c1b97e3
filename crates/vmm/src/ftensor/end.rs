//! The end of a range: everything goes back, and a driver call that fails is tried again.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::backing::Page;
use super::table::Slot;
use super::{FTensor, LIVE_RANGES};
use crate::driver::{DriverError, Handle};

/// Times that a driver call which fails is tried.
const ATTEMPTS: u32 = 3;

/// What is left to do at the end of a range.
struct Remains {
    synchronised: bool,
    pages: Vec<Page>,
    loose: Vec<Handle>,
    zeros: Option<Handle>,
}

impl FTensor {
    fn remains(&mut self) -> Remains {
        let spare = (self.num_pages()..self.laid).map(|page| self.backing.unbacked(page));
        let mut pages: Vec<Page> = spare.collect();
        let laid = self.laid;
        let table = self.table.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut loose = std::mem::take(&mut table.leaked);
        loose.append(&mut table.releasing);
        for (_, handles) in std::mem::take(&mut table.retained) {
            loose.extend(handles);
        }
        for (number, slot) in (0..).zip(table.take_slots()) {
            match slot {
                Slot::Unbacked | Slot::Prepared if number < laid => pages.push(self.backing.unbacked(number)),
                Slot::Unbacked | Slot::Prepared => {}
                Slot::Mapped(handles) => pages.push(self.backing.backed(number, &handles)),
                Slot::Quarantined(page) => pages.push(*page),
                // Left by a panic within a driver call. Its range is not freed, since the book knows of the mapping.
                Slot::InTransition => tracing::error!(page = number, "a page was left in transition"),
            }
        }
        Remains { synchronised: false, pages, loose, zeros: self.backing.zeros }
    }

    /// Goes on with what is left to do. Fails with the first failure; `left` is then what is left.
    fn end(&self, left: &mut Remains) -> Result<(), DriverError> {
        if !left.synchronised {
            // Work that may still run reads these pages; a fault there would end the whole process's context.
            self.driver().synchronise()?;
            left.synchronised = true;
        }
        let mut first = Ok(());
        for page in &mut left.pages {
            first = first.and(self.backing.bare_all(page));
            left.loose.append(&mut page.take_loose());
        }
        left.pages.retain(Page::covers);
        first = first.and(self.backing.release(&mut left.loose));
        first = first.and(self.backing.cache.trim().map(drop));
        if let Some(zeros) = left.zeros
            && left.pages.is_empty()
        {
            let released = self.driver().release(zeros);
            left.zeros = left.zeros.filter(|_| released.is_err());
            first = first.and(released);
        }
        first?;
        self.driver().free(self.base(), self.range_bytes)
    }
}

impl Drop for FTensor {
    fn drop(&mut self) {
        if self.is_fork() {
            return; // the memory is its parent's
        }
        let mut left = self.remains();
        for _ in 0..ATTEMPTS {
            match self.end(&mut left) {
                Ok(()) => {
                    LIVE_RANGES.fetch_sub(1, Ordering::SeqCst);
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, base = self.base(), "a range could not be given back yet")
                }
            }
        }
        tracing::error!(
            base = self.base(),
            pages = left.pages.len(),
            handles = left.loose.len(),
            "a range stays reserved: pages of it may still be mapped"
        );
    }
}
