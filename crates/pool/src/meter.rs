//! What a pool tells the outside about its memory.

use kvcached_control::{Metrics, PoolRow};

/// Bytes of one pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Mapped, with at least one block held in the page.
    pub used_bytes: u64,
    /// Mapped, no block held: the reserve, retired pages, and pages on their way out.
    pub reserved_bytes: u64,
    /// Held beside the pages: zeros, memory kept for later pages, memory that could not be given back yet.
    pub beside_bytes: u64,
    /// Addresses.
    pub virtual_bytes: u64,
    /// Of pages in an unknown state: perhaps mapped, never used again.
    pub quarantined_bytes: u64,
}

/// Takes the figures of a pool whenever they change. Called under the pool's lock, so that figures arrive
/// in order: it must not block and must not call the pool.
pub trait Meter: Send + Sync {
    /// These figures hold from now on.
    fn publish(&self, usage: &Usage);

    /// Where the pool counts what it does.
    fn metrics(&self) -> Metrics {
        Metrics::default()
    }
}

/// A pool that nobody watches.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoMeter;

impl Meter for NoMeter {
    fn publish(&self, _usage: &Usage) {}
}

/// A pool that other processes see in its instance's record.
impl Meter for PoolRow {
    fn publish(&self, usage: &Usage) {
        let Usage { used_bytes, reserved_bytes, beside_bytes, virtual_bytes, quarantined_bytes } = *usage;
        self.set(used_bytes, reserved_bytes + beside_bytes, virtual_bytes, quarantined_bytes);
    }

    fn metrics(&self) -> Metrics {
        PoolRow::metrics(self).clone()
    }
}
