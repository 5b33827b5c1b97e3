//! A reserved range of addresses with memory under some of its pages.

mod backing;
pub(crate) mod cache;
mod end;
mod error;
mod mapping;
mod table;
mod transaction;
mod two_phase;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use backing::Backing;
use cache::HandleCache;
use table::{Slot, Table};

use crate::driver::{Device, Driver, DriverError};
use crate::geometry::{Geometry, GeometryError};

pub use error::{UnmapFailure, VmmError};
pub use transaction::{Outcome, TransactionError, TransactionId};

static LIVE_RANGES: AtomicUsize = AtomicUsize::new(0);

/// Ranges of addresses that this process has reserved and not freed. Also those that cannot be freed any more because a
/// page of theirs may still be mapped.
pub fn live_ranges() -> usize {
    LIVE_RANGES.load(Ordering::SeqCst)
}

/// What lies under a page that has no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Unbacked {
    /// Nothing: touching it is an error of the device. For kernels that never read what they were not given.
    #[default]
    Hole,
    /// Zeros, for reading: one handle of a page's size under all of them. Writing them is an error of the device.
    Zero,
}

/// How a range is to behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// What lies under a page that has no memory.
    pub unbacked: Unbacked,
    /// Memory of pages that were given back, bytes, to keep for the next page.
    pub cache_bytes: u64,
}

/// A reserved range of addresses with memory under some of its pages: the buffers of one group.
///
/// The range and every buffer's address stay the same for the value's whole life. Thread-safe: no lock is held across a
/// driver call; a page that another thread is mapping or unmapping is [`VmmError::InTransition`]. Dropping it waits for the
/// device, then gives memory and addresses back.
///
/// Under [`Unbacked::Zero`] a page has nothing under it for the moment in which it changes. Calls that change pages wait for
/// the device first; the caller submits nothing until they return.
///
/// A fork of the process has none of the memory: calls there fail, readings are of an empty range, and dropping does nothing.
#[derive(Debug)]
pub struct FTensor {
    backing: Backing,
    num_blocks: u64,
    id_space: u32,
    range_bytes: u64,
    unbacked: Unbacked,
    /// Pages that zeros were laid under at the start, counted from 0, the spare one at the end among them.
    laid: u32,
    owner: u32,
    table: Mutex<Table>,
}

impl FTensor {
    /// Reserves addresses for `num_blocks` blocks in every buffer of `geometry`; backs none of them.
    ///
    /// Fails with `Geometry` where the ids do not fit or the page does not suit the device, with `Driver` or
    /// `OutOfMemory` where the addresses, or the memory of [`Unbacked::Zero`], cannot be had.
    pub fn reserve(
        driver: Arc<dyn Driver>,
        geometry: Geometry,
        num_blocks: u64,
        options: Options,
    ) -> Result<Self, VmmError> {
        if num_blocks == 0 {
            return Err(GeometryError::Zero { what: "num_blocks" }.into());
        }
        let (run_bytes, granularity) = (geometry.run_bytes(), driver.granularity());
        if granularity == 0 || !run_bytes.is_multiple_of(granularity) {
            return Err(GeometryError::Granularity { page_bytes: run_bytes, granularity }.into());
        }
        let id_space = geometry.id_space(num_blocks)?;
        let num_pages = geometry.num_pages(num_blocks)?;
        let range_bytes = geometry.range_bytes(num_blocks)?;
        let base = driver.reserve(range_bytes).map_err(|e| VmmError::from_driver(None, e))?;
        LIVE_RANGES.fetch_add(1, Ordering::SeqCst);
        let cache = HandleCache::new(Arc::clone(&driver), run_bytes, options.cache_bytes);
        let mut tensor = FTensor {
            backing: Backing { driver, geometry, base, num_pages, zeros: None, cache },
            num_blocks,
            id_space,
            range_bytes,
            unbacked: options.unbacked,
            laid: 0,
            owner: std::process::id(),
            table: Mutex::new(Table::new(num_pages)),
        };
        if options.unbacked == Unbacked::Zero {
            // On failure `tensor` is dropped, and with it what was laid.
            tensor.lay_zeros().map_err(|e| VmmError::from_driver(None, e))?;
        }
        Ok(tensor)
    }

    /// The device that the memory comes from.
    pub fn device(&self) -> Device {
        self.driver().device()
    }

    /// The driver that the memory comes from.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.backing.driver
    }

    /// Where the blocks lie.
    pub fn geometry(&self) -> &Geometry {
        &self.backing.geometry
    }

    /// What lies under a page that has no memory.
    pub fn unbacked(&self) -> Unbacked {
        self.unbacked
    }

    /// Blocks that the range was reserved for.
    pub fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// Pages that can be backed.
    pub fn num_pages(&self) -> u32 {
        self.backing.num_pages
    }

    /// Rows of every buffer.
    pub fn id_space(&self) -> u32 {
        self.id_space
    }

    /// The first address of the range.
    pub fn base(&self) -> usize {
        self.backing.base
    }

    /// Buffer `i`: its first address, and its bytes (`id_space * block_bytes`), of which only those in mapped pages may be
    /// touched. None where there is no such buffer.
    pub fn buffer(&self, i: u32) -> Option<(usize, u64)> {
        let offset = usize::try_from(self.geometry().buffer_offset(i, self.num_pages())?).ok()?;
        Some((self.base() + offset, u64::from(self.id_space) * self.geometry().block_bytes()))
    }

    /// Bytes from one buffer to the next: of two that an engine sees as the halves of one tensor, K and V, the stride.
    pub fn buffer_stride(&self) -> u64 {
        self.geometry().buffer_stride(self.num_pages())
    }

    /// Bytes of addresses reserved, a spare page included where there is one.
    pub fn virtual_bytes(&self) -> u64 {
        self.range_bytes
    }

    /// Bytes of memory under the mapped pages.
    pub fn mapped_bytes(&self) -> u64 {
        self.read(|table| u64::from(table.num_mapped())) * self.geometry().page_bytes()
    }

    /// Bytes of memory kept for later pages.
    pub fn cached_bytes(&self) -> u64 {
        if self.is_fork() { 0 } else { self.backing.cache.bytes() }
    }

    /// Bytes of memory that no page uses and whose release failed. It is tried again by the next [`unmap`](FTensor::unmap), by
    /// the commit that it belongs to, and on drop.
    pub fn leaked_bytes(&self) -> u64 {
        self.read(|table| (table.leaked.len() + table.releasing.len()) as u64) * self.geometry().run_bytes()
    }

    /// Bytes of memory that the pending transaction keeps.
    pub fn retained_bytes(&self) -> u64 {
        self.read(|table| table.retained.iter().map(|(_, handles)| handles.len() as u64).sum::<u64>())
            * self.geometry().run_bytes()
    }

    /// Bytes of the zeros under unbacked pages.
    pub fn zero_bytes(&self) -> u64 {
        self.backing.zeros.map_or(0, |_| self.geometry().run_bytes())
    }

    /// The mapped pages, ascending.
    pub fn mapped_pages(&self) -> Vec<u32> {
        self.read(|table| table.pages_where(|slot| matches!(slot, Slot::Mapped(_))))
    }

    /// The pages lost to failed calls, ascending. They are never used again.
    pub fn quarantined_pages(&self) -> Vec<u32> {
        self.read(|table| table.pages_where(|slot| matches!(slot, Slot::Quarantined(_))))
    }

    /// The transaction that is prepared and not decided, or that a commit could not finish.
    pub fn pending_transaction(&self) -> Option<TransactionId> {
        self.read(|table| table.transactions.pending())
    }

    /// Waits for all work on the device. Fails with `Driver`.
    pub fn synchronise(&self) -> Result<(), VmmError> {
        self.check_owner("synchronise")?;
        self.driver().synchronise().map_err(|e| VmmError::from_driver(None, e))
    }

    /// Releases the memory kept for later pages; returns the bytes. Fails with `Driver`; what could not be released is kept.
    pub fn trim(&self) -> Result<u64, VmmError> {
        self.check_owner("trim")?;
        self.backing.cache.trim().map_err(|e| VmmError::from_driver(None, e))
    }

    // ---------------------------------------------------------------- inside

    /// Lays the shared zeros under every page, and under the spare one, into which the last rows of buffers reach.
    fn lay_zeros(&mut self) -> Result<(), DriverError> {
        let zeros = self.backing.obtain()?;
        self.backing.zeros = Some(zeros);
        self.driver().share(zeros)?;
        let pages = self.range_bytes / self.geometry().page_bytes();
        for number in 0..u32::try_from(pages).unwrap_or(u32::MAX) {
            let mut page = self.backing.bare(number);
            let laid = self.backing.strip(&mut page);
            if laid.is_err() && self.backing.bare_all(&mut page).is_ok() {
                return laid;
            }
            self.laid = number + 1;
            if laid.is_err() && number < self.num_pages() {
                self.table().set(number, Slot::Quarantined(Box::new(page)));
            }
            laid?;
        }
        Ok(())
    }

    /// Refuses in a fork, whose copy of the lock may be held by a thread that it does not have: `Driver`, naming `call` and the
    /// owner.
    pub fn check_owner(&self, call: &'static str) -> Result<(), VmmError> {
        match self.is_fork() {
            false => Ok(()),
            true => {
                Err(VmmError::Driver { page: None, source: DriverError::Forked { call, owner: self.owner } })
            }
        }
    }

    fn is_fork(&self) -> bool {
        std::process::id() != self.owner
    }

    fn read<T: Default>(&self, read: impl FnOnce(&Table) -> T) -> T {
        match self.is_fork() {
            true => T::default(),
            false => read(&self.table()),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{Shape, Target};
    use crate::sim::Sim;

    #[test]
    fn a_fork_leaves_everything_to_its_parent() {
        let sim = Sim::new();
        let geometry = Geometry::solve(Shape::new(1, 2 << 20, 1), Target::new(2 << 20)).unwrap();
        let mut tensor = FTensor::reserve(sim.clone(), geometry, 8, Options::default()).unwrap();
        tensor.map(&[0]).unwrap();
        tensor.prepare_unmap(1, &[0]).unwrap();
        sim.heal();
        tensor.owner = u32::MAX;
        // Not even the lock is taken: a thread that the fork does not have may hold it.
        let _held = tensor.table.lock().unwrap();
        let forked = |r: Result<(), VmmError>| {
            let said = r.unwrap_err().to_string();
            assert!(said.contains("a fork cannot use it"), "{said}");
        };
        forked(tensor.map(&[0]).map(drop));
        forked(tensor.unmap(&[0]));
        forked(tensor.prepare_unmap(2, &[0]));
        forked(tensor.commit_unmap(1));
        forked(tensor.abort_unmap(1));
        forked(tensor.trim().map(drop));
        forked(tensor.synchronise());
        assert_eq!((tensor.mapped_pages(), tensor.mapped_bytes(), tensor.retained_bytes()), (vec![], 0, 0));
        assert_eq!((tensor.quarantined_pages(), tensor.pending_transaction()), (vec![], None));
        drop(_held);
        drop(tensor);
        assert_eq!((sim.calls().total(), sim.counts()), (0, (1, 1, 0)));
    }
}
