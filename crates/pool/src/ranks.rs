//! The mapper of an engine of several ranks: their mappings, changed as one.

use kvcached_ipc::{IpcError, Ranks};

use crate::mapper::{Cause, MapFailure, Mapper, UnmapFailure, Watcher};

impl Mapper for Ranks {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        Ranks::map(self, pages).map_err(|error| match error {
            IpcError::OutOfMemory { .. } => MapFailure::OutOfMemory { source: error.into() },
            IpcError::MapFailed { ref lost, .. } if !lost.is_empty() => {
                MapFailure::Quarantined { pages: lost.clone(), source: error.into() }
            }
            IpcError::Broken { .. } => MapFailure::Broken { source: error.into() },
            _ => MapFailure::Driver { source: error.into() },
        })
    }

    fn unmap(&self, pages: &[u32]) -> Result<(), UnmapFailure> {
        Ranks::unmap(self, pages).map_err(|error| {
            let broken = matches!(error, IpcError::Broken { .. });
            let (quarantined, still_mapped) = match &error {
                IpcError::UnmapFailed { lost, still_mapped, .. } => (lost.clone(), still_mapped.clone()),
                IpcError::Broken { .. } => (pages.to_vec(), vec![]),
                _ => (vec![], pages.to_vec()),
            };
            UnmapFailure { quarantined, still_mapped, broken, source: error.into() }
        })
    }

    fn synchronise(&self) -> Result<(), Cause> {
        Ok(Ranks::synchronise(self)?)
    }

    fn room(&self) -> Result<u64, Cause> {
        Ok(Ranks::room(self)?)
    }

    fn held_beside(&self) -> u64 {
        Ranks::held_beside(self)
    }

    fn trim(&self) -> Result<u64, Cause> {
        Ok(Ranks::trim(self)?)
    }

    fn page_bytes(&self) -> u64 {
        Ranks::page_bytes(self)
    }

    fn virtual_bytes(&self) -> u64 {
        Ranks::virtual_bytes(self)
    }

    fn is_over_ranks(&self) -> bool {
        true
    }

    fn watch(&self, watcher: Watcher) {
        Ranks::watch(self, watcher);
    }
}
