//! A reserved range of addresses with memory under some of its pages.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{Access, Device, Driver, DriverError, Handle};
use crate::error::{UnmapFailure, VmmError};
use crate::geometry::{Geometry, GeometryError};

static LIVE_RANGES: AtomicUsize = AtomicUsize::new(0);

/// Ranges of addresses that this process has reserved and not freed. Also those that cannot be freed any more because a
/// page of theirs may still be mapped.
pub fn live_ranges() -> usize {
    LIVE_RANGES.load(Ordering::SeqCst)
}

#[derive(Debug, Clone, Copy)]
enum Slot {
    Hole,
    /// A call is mapping or unmapping it.
    InTransition,
    Mapped(Handle),
    /// Lost. `unreleased`: it is a hole whose memory could not be released; None: it may still be mapped.
    Quarantined {
        unreleased: Option<Handle>,
    },
}

#[derive(Debug)]
struct Table {
    slots: Vec<Slot>,
    num_mapped: u32,
    /// Memory of pages that were unmapped but whose release failed.
    leaked: Vec<Handle>,
}

/// What a map call has done for one page.
struct Backing {
    page: u32,
    handle: Handle,
    mapped: bool,
}

/// A reserved range of addresses with memory under some of its pages: the buffers of one group.
///
/// The range and every buffer's address stay the same for the value's whole life. Thread-safe: no lock is held across a
/// driver call; a page that another thread is mapping or unmapping is [`VmmError::InTransition`]. Dropping it waits for the
/// device, then gives memory and addresses back.
#[derive(Debug)]
pub struct FTensor {
    driver: Arc<dyn Driver>,
    geometry: Geometry,
    num_blocks: u64,
    id_space: u32,
    num_pages: u32,
    base: usize,
    range_bytes: u64,
    owner: u32,
    table: Mutex<Table>,
}

impl FTensor {
    /// Reserves addresses for `num_blocks` blocks in every buffer of `geometry`; backs none of them.
    ///
    /// Fails with `Geometry` where the ids do not fit or the page does not suit the device, with `Driver` or
    /// `OutOfMemory` where the addresses cannot be had.
    pub fn reserve(driver: Arc<dyn Driver>, geometry: Geometry, num_blocks: u64) -> Result<Self, VmmError> {
        if num_blocks == 0 {
            return Err(GeometryError::Zero { what: "num_blocks" }.into());
        }
        let (page_bytes, granularity) = (geometry.page_bytes(), driver.granularity());
        if granularity == 0 || !page_bytes.is_multiple_of(granularity) {
            return Err(GeometryError::Granularity { page_bytes, granularity }.into());
        }
        let id_space = geometry.id_space(num_blocks)?;
        let num_pages = geometry.num_pages(num_blocks)?;
        let range_bytes = geometry.range_bytes(num_blocks)?;
        let base = driver.reserve(range_bytes).map_err(|e| VmmError::from_driver(None, e))?;
        LIVE_RANGES.fetch_add(1, Ordering::SeqCst);
        let table = Table { slots: vec![Slot::Hole; num_pages as usize], num_mapped: 0, leaked: vec![] };
        Ok(FTensor {
            driver,
            geometry,
            num_blocks,
            id_space,
            num_pages,
            base,
            range_bytes,
            owner: std::process::id(),
            table: Mutex::new(table),
        })
    }

    /// The device that the memory comes from.
    pub fn device(&self) -> Device {
        self.driver.device()
    }

    /// The driver that the memory comes from.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Where the blocks lie.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Blocks that the range was reserved for.
    pub fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// Pages that can be backed.
    pub fn num_pages(&self) -> u32 {
        self.num_pages
    }

    /// Rows of every buffer.
    pub fn id_space(&self) -> u32 {
        self.id_space
    }

    /// The first address of the range.
    pub fn base(&self) -> usize {
        self.base
    }

    /// Buffer `i`: its first address, and its bytes (`id_space * block_bytes`), of which only those in mapped pages may be
    /// touched. None where there is no such buffer.
    pub fn buffer(&self, i: u32) -> Option<(usize, u64)> {
        let offset = usize::try_from(self.geometry.buffer_offset(i, self.num_pages)?).ok()?;
        Some((self.base + offset, u64::from(self.id_space) * self.geometry.block_bytes()))
    }

    /// Bytes of addresses reserved, the spare page included.
    pub fn virtual_bytes(&self) -> u64 {
        self.range_bytes
    }

    /// Bytes of memory under the mapped pages.
    pub fn mapped_bytes(&self) -> u64 {
        u64::from(self.table().num_mapped) * self.geometry.page_bytes()
    }

    /// Bytes of memory that no page uses and whose release failed; tried again on drop.
    pub fn leaked_bytes(&self) -> u64 {
        self.table().leaked.len() as u64 * self.geometry.page_bytes()
    }

    /// The mapped pages, ascending.
    pub fn mapped_pages(&self) -> Vec<u32> {
        self.pages_where(|slot| matches!(slot, Slot::Mapped(_)))
    }

    /// The pages lost to failed calls, ascending. They are never used again.
    pub fn quarantined_pages(&self) -> Vec<u32> {
        self.pages_where(|slot| matches!(slot, Slot::Quarantined { .. }))
    }

    /// Waits for all work on the device. Fails with `Driver`.
    pub fn synchronise(&self) -> Result<(), VmmError> {
        self.driver.synchronise().map_err(|e| VmmError::from_driver(None, e))
    }

    /// Backs these pages, all or none; returns those that were not mapped before, in the order given. Three driver calls a
    /// page. A page that is mapped already, or is named twice, costs nothing.
    ///
    /// Fails with `PageOutOfRange`, `InQuarantine` or `InTransition` before anything is done; with `OutOfMemory` or
    /// `Driver` after what was done is undone; with `Quarantined` where that failed too.
    pub fn map(&self, pages: &[u32]) -> Result<Vec<u32>, VmmError> {
        let new = self.begin_map(pages)?;
        let mut done = Vec::with_capacity(new.len());
        for &page in &new {
            if let Err(cause) = self.back(page, &mut done) {
                return Err(self.undo(&new, done, page, cause));
            }
        }
        let mut table = self.table();
        for Backing { page, handle, .. } in done {
            table.set(page, Slot::Mapped(handle));
        }
        Ok(new)
    }

    /// Gives these pages back: first all are unmapped, then their memory is released. Two driver calls a page. A page named
    /// twice counts once. Synchronise first where the device may still use them.
    ///
    /// Fails with `PageOutOfRange`, `NotMapped`, `InQuarantine` or `InTransition` before anything is done, with `Unmap`
    /// after: no further page is unmapped then, and the report says where each stands.
    pub fn unmap(&self, pages: &[u32]) -> Result<(), VmmError> {
        let taken = self.begin_unmap(pages)?;
        let mut failure: Option<DriverError> = None;
        let mut unmapped = Vec::with_capacity(taken.len());
        let mut untried = taken.into_iter();
        let mut quarantined = None;
        for (page, handle) in untried.by_ref() {
            if let Err(error) = self.driver.unmap(self.address(page), self.geometry.page_bytes()) {
                failure = Some(error);
                quarantined = Some(page);
                break;
            }
            unmapped.push((page, handle));
        }
        let mut leaked = vec![];
        for &(page, handle) in &unmapped {
            if let Err(error) = self.driver.release(handle) {
                failure.get_or_insert(error);
                leaked.push((page, handle));
            }
        }
        let still_mapped: Vec<_> = untried.collect();
        let mut table = self.table();
        for &(page, _) in &unmapped {
            table.set(page, Slot::Hole);
        }
        for &(page, handle) in &still_mapped {
            table.set(page, Slot::Mapped(handle));
        }
        if let Some(page) = quarantined {
            table.set(page, Slot::Quarantined { unreleased: None });
        }
        table.leaked.extend(leaked.iter().map(|(_, handle)| *handle));
        let Some(source) = failure else { return Ok(()) };
        Err(VmmError::Unmap(Box::new(UnmapFailure {
            unmapped: pages_of(&unmapped),
            quarantined: quarantined.into_iter().collect(),
            still_mapped: pages_of(&still_mapped),
            leaked: pages_of(&leaked),
            source,
        })))
    }

    /// Claims the holes among `pages` for the caller.
    fn begin_map(&self, pages: &[u32]) -> Result<Vec<u32>, VmmError> {
        let mut table = self.table();
        for &page in pages {
            self.stable(&table, page)?;
        }
        let mut new = vec![];
        for &page in pages {
            if let Slot::Hole = table.slots[page as usize] {
                table.set(page, Slot::InTransition);
                new.push(page);
            }
        }
        Ok(new)
    }

    /// Claims `pages`, all of them mapped, for the caller.
    fn begin_unmap(&self, pages: &[u32]) -> Result<Vec<(u32, Handle)>, VmmError> {
        let mut table = self.table();
        for &page in pages {
            if let Slot::Hole = self.stable(&table, page)? {
                return Err(VmmError::NotMapped { page });
            }
        }
        let mut taken = Vec::with_capacity(pages.len());
        for &page in pages {
            if let Slot::Mapped(handle) = table.slots[page as usize] {
                table.set(page, Slot::InTransition);
                taken.push((page, handle));
            }
        }
        Ok(taken)
    }

    /// The state of a page that may be worked on.
    fn stable(&self, table: &Table, page: u32) -> Result<Slot, VmmError> {
        match table.slots.get(page as usize) {
            None => Err(VmmError::PageOutOfRange { page, num_pages: self.num_pages }),
            Some(Slot::InTransition) => Err(VmmError::InTransition { page }),
            Some(Slot::Quarantined { .. }) => Err(VmmError::InQuarantine { page }),
            Some(slot) => Ok(*slot),
        }
    }

    /// Puts memory under a page; `done` has what was achieved, also when it fails.
    fn back(&self, page: u32, done: &mut Vec<Backing>) -> Result<(), DriverError> {
        let (address, bytes) = (self.address(page), self.geometry.page_bytes());
        let handle = self.driver.create(bytes)?;
        let mapped = self.driver.map(address, bytes, handle);
        done.push(Backing { page, handle, mapped: mapped.is_ok() });
        mapped?;
        self.driver.set_access(address, bytes, Access::ReadWrite)
    }

    /// Undoes `done`, newest first, and returns the error of the whole call.
    fn undo(&self, new: &[u32], done: Vec<Backing>, page: u32, cause: DriverError) -> VmmError {
        let mut lost: Vec<(u32, Option<Handle>)> = vec![];
        let mut first = None;
        for Backing { page, handle, mapped } in done.into_iter().rev() {
            let unmapped = match mapped {
                true => self.driver.unmap(self.address(page), self.geometry.page_bytes()),
                false => Ok(()),
            };
            let unreleased = unmapped.is_ok().then_some(handle);
            if let Err(error) = unmapped.and_then(|()| self.driver.release(handle)) {
                first.get_or_insert(error);
                lost.push((page, unreleased));
            }
        }
        let mut table = self.table();
        for &page in new {
            table.set(page, Slot::Hole);
        }
        for &(page, unreleased) in &lost {
            table.set(page, Slot::Quarantined { unreleased });
        }
        drop(table);
        let Some(source) = first else { return VmmError::from_driver(Some(page), cause) };
        let mut pages: Vec<u32> = lost.into_iter().map(|(page, _)| page).collect();
        pages.sort_unstable();
        VmmError::Quarantined { pages, cause: Box::new(cause), source: Box::new(source) }
    }

    fn address(&self, page: u32) -> usize {
        // Fits: the page lies in a reservation that the driver has made.
        self.base + page as usize * self.geometry.page_bytes() as usize
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pages_where(&self, keep: impl Fn(&Slot) -> bool) -> Vec<u32> {
        (0..).zip(&self.table().slots).filter(|(_, slot)| keep(slot)).map(|(page, _)| page).collect()
    }
}

fn pages_of(pages: &[(u32, Handle)]) -> Vec<u32> {
    pages.iter().map(|(page, _)| *page).collect()
}

impl Table {
    fn set(&mut self, page: u32, slot: Slot) {
        let was = std::mem::replace(&mut self.slots[page as usize], slot);
        self.num_mapped -= u32::from(matches!(was, Slot::Mapped(_)));
        self.num_mapped += u32::from(matches!(slot, Slot::Mapped(_)));
    }
}

impl Drop for FTensor {
    fn drop(&mut self) {
        if std::process::id() != self.owner {
            return; // a fork inherits the value but not the memory
        }
        if let Err(error) = self.driver.synchronise() {
            // Work that may still run reads these pages; a fault there would end the whole process's context.
            tracing::error!(%error, base = self.base, "a range was left as it is: the device could not be waited for");
            return;
        }
        let page_bytes = self.geometry.page_bytes();
        let mut handles = std::mem::take(&mut self.table().leaked);
        let slots = std::mem::take(&mut self.table().slots);
        let mut in_doubt = false;
        for (page, slot) in (0..).zip(slots) {
            match slot {
                Slot::Hole => {}
                Slot::Mapped(handle) => match self.driver.unmap(self.address(page), page_bytes) {
                    Ok(()) => handles.push(handle),
                    Err(error) => {
                        in_doubt = true;
                        tracing::error!(%error, page, "a page could not be unmapped");
                    }
                },
                Slot::Quarantined { unreleased: Some(handle) } => handles.push(handle),
                Slot::Quarantined { unreleased: None } | Slot::InTransition => in_doubt = true,
            }
        }
        for handle in handles {
            if let Err(error) = self.driver.release(handle) {
                tracing::error!(%error, bytes = page_bytes, "memory could not be released");
            }
        }
        if in_doubt {
            tracing::error!(base = self.base, "a range was not freed: pages of it may still be mapped");
            return;
        }
        match self.driver.free(self.base, self.range_bytes) {
            Ok(()) => {
                LIVE_RANGES.fetch_sub(1, Ordering::SeqCst);
            }
            Err(error) => tracing::error!(%error, base = self.base, "a range could not be freed"),
        }
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
        let shape = Shape::new(1, 2 << 20, 1);
        let geometry = Geometry::solve(shape, Target::new(2 << 20)).unwrap();
        let mut tensor = FTensor::reserve(sim.clone(), geometry, 1).unwrap();
        tensor.map(&[0]).unwrap();
        sim.heal();
        tensor.owner = u32::MAX;
        drop(tensor);
        assert_eq!((sim.calls().total(), sim.counts()), (0, (1, 1, 1)));
    }
}
