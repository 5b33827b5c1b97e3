//! How a range is set up, and the guard of what the process has one of.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvcached_vmm::{Driver, FTensor, Geometry, Layout, Options, Shape, Target, Unbacked, VmmError};

/// Three buffers: a page that is laid out per layer has a first, a middle and a last run.
pub const BUFFERS: u32 = 3;
pub const PAGES: u32 = 5;

/// What a range may keep of the memory that it gives back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    Nothing,
    OnePage,
    Everything,
}

#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub layout: Layout,
    pub unbacked: Unbacked,
    pub cache: Cache,
}

impl Setup {
    /// What a range is by default.
    pub const PLAIN: Setup =
        Setup { layout: Layout::Chunked, unbacked: Unbacked::Hole, cache: Cache::Nothing };

    /// Every combination.
    pub fn all() -> Vec<Setup> {
        let mut all = vec![];
        for layout in [Layout::Chunked, Layout::PerLayer] {
            for unbacked in [Unbacked::Hole, Unbacked::Zero] {
                for cache in [Cache::Nothing, Cache::OnePage, Cache::Everything] {
                    all.push(Setup { layout, unbacked, cache });
                }
            }
        }
        all
    }

    /// Runs of two granules. Chunked: two blocks of every buffer and padding. Per layer: eight blocks.
    pub fn geometry(self, granularity: u64) -> Geometry {
        let runs = if self.layout == Layout::PerLayer { u64::from(BUFFERS) } else { 1 };
        let shape = Shape::new(BUFFERS, granularity / 4, 16);
        let page_bytes = Some(2 * granularity * runs);
        let geometry =
            Geometry::solve(shape, Target { page_bytes, layout: self.layout, ..Target::new(granularity) });
        let geometry = geometry.unwrap();
        assert_eq!((geometry.run_bytes(), u64::from(geometry.runs_per_page())), (2 * granularity, runs));
        assert!(geometry.blocks_per_page() > 1);
        geometry
    }

    pub fn cache_bytes(self, granularity: u64) -> u64 {
        match self.cache {
            Cache::Nothing => 0,
            Cache::OnePage => self.geometry(granularity).page_bytes(),
            Cache::Everything => u64::MAX,
        }
    }

    /// A range of [`PAGES`] pages.
    pub fn reserve(self, driver: Arc<dyn Driver>) -> Result<FTensor, VmmError> {
        let granularity = driver.granularity();
        let geometry = self.geometry(granularity);
        let num_blocks = u64::from(PAGES) * u64::from(geometry.blocks_per_page());
        let options = Options { unbacked: self.unbacked, cache_bytes: self.cache_bytes(granularity) };
        FTensor::reserve(driver, geometry, num_blocks, options)
    }
}

/// Whoever holds it is the only test that has ranges: how many there are is counted for the whole process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
