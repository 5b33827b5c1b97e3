//! What others see of an instance.

use std::path::PathBuf;

use crate::terms::{Outcome, Terms};

/// A live instance at the moment of reading. Figures are read one by one: those of a busy pool may be of different moments.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InstanceView {
    /// Its record.
    pub path: PathBuf,
    /// Name of the instance.
    pub name: String,
    /// Engine and version, as `vllm 0.29.0`.
    pub engine: String,
    /// Device of its KV cache, as `cuda:0`.
    pub device: String,
    /// Process id, in the owner's own namespace.
    pub pid: u32,
    /// When the record was created, nanoseconds since the Unix epoch.
    pub start_unix_ns: u64,
    /// Counts publications.
    pub heartbeat: u64,
    /// How much memory it may have.
    pub terms: Terms,
    /// Of the change that put these in force; 0: those that it began with.
    pub revision: u64,
    /// What came of the latest change that was asked of it and answered.
    pub outcome: Outcome,
    /// Refused, and still waited for, bytes.
    pub shortage_bytes: u64,
    /// Of the used ones, bytes that hold nothing but cached prefixes.
    pub cached_bytes: u64,
    /// Its pools, at most [`crate::MAX_POOL_ROWS`].
    pub pools: Vec<PoolView>,
    /// Of its record.
    pub(crate) inode: u64,
}

/// Figures of one pool, bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolView {
    /// Name of the pool.
    pub name: String,
    /// Memory under pages that hold blocks.
    pub used_bytes: u64,
    /// Memory under pages that hold none.
    pub reserved_bytes: u64,
    /// Addresses.
    pub virtual_bytes: u64,
    /// Memory lost to pages whose mapping is unknown.
    pub quarantined_bytes: u64,
}

impl InstanceView {
    /// Sums over all pools, under no name.
    pub fn total(&self) -> PoolView {
        // Saturating: the figures are another process's word.
        self.pools.iter().fold(PoolView::default(), |sum, pool| PoolView {
            name: sum.name,
            used_bytes: sum.used_bytes.saturating_add(pool.used_bytes),
            reserved_bytes: sum.reserved_bytes.saturating_add(pool.reserved_bytes),
            virtual_bytes: sum.virtual_bytes.saturating_add(pool.virtual_bytes),
            quarantined_bytes: sum.quarantined_bytes.saturating_add(pool.quarantined_bytes),
        })
    }
}
