//! The mapper of production: a reserved range of addresses.

use kvcached_vmm::FTensor;

use crate::mapper::{Cause, MapFailure, Mapper, UnmapFailure};

impl Mapper for FTensor {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        FTensor::map(self, pages).map_err(|error| match error.lost_by_map() {
            pages if !pages.is_empty() => MapFailure::Quarantined { pages, source: error.into() },
            _ if error.is_out_of_memory() => MapFailure::OutOfMemory { source: error.into() },
            _ => MapFailure::Driver { source: error.into() },
        })
    }

    fn unmap(&self, pages: &[u32]) -> Result<(), UnmapFailure> {
        FTensor::unmap(self, pages).map_err(|error| {
            let (quarantined, still_mapped) = error.after_unmap(pages);
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
