//! What a pool needs of whoever maps memory.

use std::error::Error;

/// The driver's own error, for whoever has to act on it.
pub type Cause = Box<dyn Error + Send + Sync + 'static>;

/// Backs pages of one group and takes their memory again. Called without any lock of the pool, from any
/// thread, and never for the same page from two threads at once.
pub trait Mapper: Send + Sync {
    /// Backs these pages, all or none, with memory that reads as zeros or old content of this group, never
    /// another tenant's. Returns those that were not backed before.
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure>;

    /// [`Mapper::map`] of pages that nobody waits for.
    fn map_ahead(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        self.map(pages)
    }

    /// Takes the memory of these pages. No queued work reads them: the pool has waited for that.
    fn unmap(&self, pages: &[u32]) -> Result<(), UnmapFailure>;

    /// Waits for all work on the device.
    fn synchronise(&self) -> Result<(), Cause>;

    /// Bytes that the device could give at this moment. Others may take them the next.
    fn room(&self) -> Result<u64, Cause>;

    /// [`Mapper::room`] of the device, whatever part of it this process may have.
    fn device_room(&self) -> Result<u64, Cause> {
        self.room()
    }

    /// Bytes that are held beside the pages: memory kept for later pages, and memory that could not be given back yet.
    fn held_beside(&self) -> u64 {
        0
    }

    /// Gives back what is kept for later pages; returns the bytes.
    fn trim(&self) -> Result<u64, Cause> {
        Ok(0)
    }

    /// Physical bytes of one page, never 0.
    fn page_bytes(&self) -> u64;

    /// Reserved addresses, bytes.
    fn virtual_bytes(&self) -> u64;

    /// Somebody who was refused pages would take so many bytes in all, if it had them; 0: it needs none any more.
    fn lacks(&self, bytes: u64) {
        let _ = bytes;
    }

    /// Whether several ranks do together what is asked: as one, or not at all.
    fn is_over_ranks(&self) -> bool {
        false
    }

    /// Has `watcher` told, once and at once, when nobody knows any longer what is mapped: also while nothing is asked. By any
    /// thread. A mapper that has no such moment never tells.
    fn watch(&self, watcher: Watcher) {
        let _ = watcher;
    }
}

/// Told why a mapper has broken down.
pub type Watcher = Box<dyn Fn(&str) + Send + Sync>;

/// Why pages were not backed. Everything was undone, but for pages named as quarantined.
#[derive(Debug, thiserror::Error)]
pub enum MapFailure {
    /// The device has no memory left: load, not a fault.
    #[error("out of device memory")]
    OutOfMemory {
        /// What the driver said.
        source: Cause,
    },
    /// Undoing failed as well: nobody knows whether these pages are mapped.
    #[error("backing failed and could not be undone for pages {pages:?}")]
    Quarantined {
        /// Some of the pages of the call.
        pages: Vec<u32>,
        /// What the driver said.
        source: Cause,
    },
    /// Nobody knows any longer what is mapped, of any page: the mapper has broken down for good.
    #[error("it is not known any longer what is mapped")]
    Broken {
        /// What happened.
        source: Cause,
    },
    /// Anything else.
    #[error("the driver refused to back pages")]
    Driver {
        /// What the driver said.
        source: Cause,
    },
}

impl MapFailure {
    /// Of the pages of the call, those that are lost.
    pub(crate) fn lost_of<'a>(&'a self, called: &'a [u32]) -> &'a [u32] {
        match self {
            MapFailure::Quarantined { pages, .. } => pages,
            MapFailure::Broken { .. } => called,
            MapFailure::OutOfMemory { .. } | MapFailure::Driver { .. } => &[],
        }
    }
}

/// Why pages kept their memory. Pages of the call in neither list lost it.
#[derive(Debug, thiserror::Error)]
#[error(
    "could not take the memory of pages: {still_mapped:?} keep it, {quarantined:?} are in an unknown state"
)]
pub struct UnmapFailure {
    /// Nobody knows whether these are mapped.
    pub quarantined: Vec<u32>,
    /// These are mapped as before.
    pub still_mapped: Vec<u32>,
    /// Nobody knows any longer what is mapped, of any page: the mapper has broken down for good.
    pub broken: bool,
    /// What the driver said.
    pub source: Cause,
}
