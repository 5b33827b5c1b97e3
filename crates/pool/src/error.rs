//! Why a pool refused, by what the caller can do about it.

use kvcached_ledger::{BlockError, EpochError, LayoutError};

use crate::mapper::{Cause, MapFailure};

/// A pool's refusal. Only [`PoolError::StateConsistency`] ends its usefulness.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The layout cannot be: the user must act.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The caller broke the contract about blocks; nothing changed.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The caller broke the contract about steps; nothing changed.
    #[error(transparent)]
    Epoch(#[from] EpochError),
    /// There is no such page; nothing changed.
    #[error("page {page} is outside a pool of {num_pages} pages")]
    NoSuchPage {
        /// The page asked about.
        page: u32,
        /// Pages of the pool.
        num_pages: u32,
    },
    /// Memory is short: ask again later. Nothing changed.
    #[error("{pages} more pages cannot be backed now: {source}")]
    Exhausted {
        /// Pages that the call needed.
        pages: u32,
        /// What stood in the way.
        source: Cause,
    },
    /// These pages are lost; the pool goes on without them. Nothing else changed.
    #[error("pages {pages:?} are in an unknown state and are never used again: {source}")]
    Quarantined {
        /// The lost pages.
        pages: Vec<u32>,
        /// What the driver said.
        source: Cause,
    },
    /// The driver refused for another reason than memory. Nothing changed.
    #[error("driver call failed: {source}")]
    Driver {
        /// What the driver said.
        source: Cause,
    },
    /// The pool no longer knows what is mapped: stop using it.
    #[error("pool state is unknown: {detail}")]
    StateConsistency {
        /// What happened.
        detail: String,
    },
    /// The pool has been shut down.
    #[error("the pool has been shut down")]
    Shutdown,
    /// This process is a fork of the one that made the pool.
    #[error("the pool was made by process {owner}, and a fork cannot use it")]
    Forked {
        /// Process id of who made it.
        owner: u32,
    },
}

impl PoolError {
    /// The driver or the device keeps a call, and with it memory, beyond any patience.
    pub(crate) fn overdue() -> Self {
        PoolError::StateConsistency { detail: "the device or a driver call did not end in time".to_owned() }
    }

    /// What a failed map of `pages` pages means to whoever needed them.
    pub(crate) fn from_map(failure: MapFailure, pages: u32) -> Self {
        match failure {
            MapFailure::OutOfMemory { source } => PoolError::Exhausted { pages, source },
            MapFailure::Quarantined { pages, source } => PoolError::Quarantined { pages, source },
            MapFailure::Broken { source } => PoolError::StateConsistency { detail: source.to_string() },
            MapFailure::Driver { source } => PoolError::Driver { source },
        }
    }
}
