//! What a pool is made from.

use std::time::Duration;

use kvcached_ledger::{Layout, RetirePolicy};

/// Shape and policy of one pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// Blocks, pages and ids of the group.
    pub layout: Layout,
    /// Block 0 is taken and its page backed for good.
    pub null_block: bool,
    /// Batches run behind the scheduler: emptied pages stay mapped until the step that may read them has ended.
    pub async_sched: bool,
    /// Idle memory to keep, backed when the pool is made. Rounded up to pages.
    pub min_reserved_bytes: u64,
    /// Idle memory to keep at most. Rounded down to pages; the minimum wins.
    pub max_reserved_bytes: u64,
    /// How long a call waits at most for driver calls of other threads; a shutdown for the device besides.
    pub patience: Duration,
}

impl PoolConfig {
    /// More than any driver call takes that ends at all.
    pub const PATIENCE: Duration = Duration::from_secs(10);

    pub(crate) fn retire_policy(&self) -> RetirePolicy {
        if self.async_sched { RetirePolicy::Asynchronous } else { RetirePolicy::Synchronous }
    }

    /// Idle pages to back at the start.
    pub(crate) fn min_reserved_pages(&self, page_bytes: u64) -> u32 {
        saturated(self.min_reserved_bytes.div_ceil(page_bytes.max(1)))
    }

    /// Idle pages that stay mapped.
    pub(crate) fn max_reserved_pages(&self, page_bytes: u64) -> u32 {
        saturated(self.max_reserved_bytes / page_bytes.max(1)).max(self.min_reserved_pages(page_bytes))
    }
}

fn saturated(pages: u64) -> u32 {
    u32::try_from(pages).unwrap_or(u32::MAX)
}
