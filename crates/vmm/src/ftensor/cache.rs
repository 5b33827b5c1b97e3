//! Memory of pages that were given back, kept for the next page: it saves creating and releasing a handle.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::driver::{Driver, DriverError, Handle};

/// All caches of this process, so that memory that one keeps is there for another range of the device.
static CACHES: Mutex<Vec<Weak<HandleCache>>> = Mutex::new(vec![]);

/// Every cache of this process.
pub(crate) fn all() -> MutexGuard<'static, Vec<Weak<HandleCache>>> {
    CACHES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Handles of one size that are mapped nowhere and hold zeros. They count as used.
#[derive(Debug)]
pub(crate) struct HandleCache {
    driver: Arc<dyn Driver>,
    handle_bytes: u64,
    limit: usize,
    handles: Mutex<Vec<Handle>>,
}

impl HandleCache {
    /// An empty cache for handles of `handle_bytes`, as many as fit `limit_bytes`.
    pub fn new(driver: Arc<dyn Driver>, handle_bytes: u64, limit_bytes: u64) -> Arc<Self> {
        let limit = usize::try_from(limit_bytes / handle_bytes).unwrap_or(usize::MAX);
        let cache = Arc::new(HandleCache { driver, handle_bytes, limit, handles: Mutex::default() });
        if limit > 0 {
            let mut caches = all();
            caches.retain(|cache| cache.strong_count() > 0);
            caches.push(Arc::downgrade(&cache));
        }
        cache
    }

    /// Bytes kept.
    pub fn bytes(&self) -> u64 {
        self.handles().len() as u64 * self.handle_bytes
    }

    /// Handles that may still be put in.
    pub fn room(&self) -> usize {
        self.limit.saturating_sub(self.handles().len())
    }

    pub fn take(&self) -> Option<Handle> {
        self.handles().pop()
    }

    /// Keeps a handle whose memory was cleared; false where it is full.
    pub fn put(&self, handle: Handle) -> bool {
        let mut handles = self.handles();
        let fits = handles.len() < self.limit;
        if fits {
            handles.push(handle);
        }
        fits
    }

    /// Releases everything; returns how many bytes. Fails with the first failure; what could not be released stays.
    pub fn trim(&self) -> Result<u64, DriverError> {
        let (released, result) = self.release_all();
        result.map(|()| released)
    }

    /// The bytes that were released, and the first failure. What could not be released stays.
    fn release_all(&self) -> (u64, Result<(), DriverError>) {
        let all = std::mem::take(&mut *self.handles());
        let (mut left, mut first) = (vec![], Ok(()));
        let count = all.len();
        for handle in all {
            if let Err(error) = self.driver.release(handle) {
                left.push(handle);
                first = first.and(Err(error));
            }
        }
        let released = (count - left.len()) as u64 * self.handle_bytes;
        self.handles().append(&mut left);
        (released, first)
    }

    fn handles(&self) -> MutexGuard<'_, Vec<Handle>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes from every cache of this process over `driver`; returns the bytes that were released. For a range that the device
/// has refused memory.
pub(super) fn relieve(driver: &Arc<dyn Driver>) -> u64 {
    let caches: Vec<_> = {
        let caches = all();
        caches.iter().filter_map(Weak::upgrade).collect()
    };
    let ours = caches.iter().filter(|cache| Arc::ptr_eq(&cache.driver, driver));
    let release = |cache: &Arc<HandleCache>| {
        let (released, result) = cache.release_all();
        if let Err(error) = result {
            tracing::warn!(%error, "memory kept for later pages could not be released");
        }
        released
    };
    ours.map(release).sum()
}
