//! The mapper of production: a reserved range of addresses.

use kvcached_vmm::{FTensor, VmmError};

use crate::mapper::{Cause, MapFailure, Mapper, UnmapFailure};

impl Mapper for FTensor {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        FTensor::map(self, pages).map_err(|error| match error {
            VmmError::OutOfMemory { .. } => MapFailure::OutOfMemory { source: error.into() },
            VmmError::Quarantined { ref pages, .. } => {
                MapFailure::Quarantined { pages: pages.clone(), source: error.into() }
            }
            // Lost by a call that bypassed the pool, which learns of it now.
            VmmError::InQuarantine { page } => {
                MapFailure::Quarantined { pages: vec![page], source: error.into() }
            }
            _ => MapFailure::Driver { source: error.into() },
        })
    }

    fn unmap(&self, pages: &[u32]) -> Result<(), UnmapFailure> {
        FTensor::unmap(self, pages).map_err(|error| {
            let (quarantined, still_mapped) = match &error {
                VmmError::Unmap(report) => (report.quarantined.clone(), report.still_mapped.clone()),
                // Somebody else unmapped or lost it. Nothing was changed, and that page is not trusted again.
                VmmError::NotMapped { pages: absent } => (absent.clone(), without(pages, absent)),
                VmmError::InQuarantine { page } | VmmError::PageOutOfRange { page, .. } => {
                    (vec![*page], without(pages, &[*page]))
                }
                _ => (vec![], pages.to_vec()),
            };
            UnmapFailure { quarantined, still_mapped, broken: false, source: error.into() }
        })
    }

    fn synchronise(&self) -> Result<(), Cause> {
        Ok(FTensor::synchronise(self)?)
    }

    fn room(&self) -> Result<u64, Cause> {
        Ok(self.driver().mem_info()?.free)
    }

    fn held_beside(&self) -> u64 {
        self.cached_bytes() + self.leaked_bytes() + self.zero_bytes()
    }

    fn trim(&self) -> Result<u64, Cause> {
        Ok(FTensor::trim(self)?)
    }

    fn page_bytes(&self) -> u64 {
        self.geometry().page_bytes()
    }

    fn virtual_bytes(&self) -> u64 {
        FTensor::virtual_bytes(self)
    }
}

fn without(pages: &[u32], lost: &[u32]) -> Vec<u32> {
    pages.iter().copied().filter(|page| !lost.contains(page)).collect()
}
