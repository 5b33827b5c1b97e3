//! A pool: a group's ledger over the memory that backs it.
//!
//! [`Pool`] plans under its lock, calls the [`Mapper`] without it, and commits what came of it under the
//! lock again, so that a driver call never keeps another thread from allocating blocks that are on hand. A thread of the pool's
//! own, the pager, backs pages ahead of allocations and gives memory back behind whoever freed it.
#![forbid(unsafe_code)]

mod beside;
mod budgeted;
mod calls;
mod config;
mod counting;
mod counts;
mod error;
mod fork;
mod ftensor;
mod limit;
mod mapper;
mod memory;
mod meter;
mod pager;
mod pool;
mod ranks;
mod reserve;
mod shares;
mod shortage;
mod state;
mod stats;
mod steward;
mod sync;

pub use budgeted::{Budgeted, Share, Waiter};
pub use config::PoolConfig;
pub use error::PoolError;
pub use fork::forked;
pub use limit::{LimitState, MemoryLimit};
pub use mapper::{Cause, MapFailure, Mapper, UnmapFailure, Watcher};
pub use meter::{Meter, NoMeter, Usage};
pub use pool::Pool;
pub use shares::Shares;
pub use shortage::Lack;
pub use state::Tally;
pub use stats::PoolStats;
pub use steward::{CachePolicy, Cached, Steward};

pub use kvcached_ledger::{BlockError, EpochError, Layout, LayoutError, PageCounts, PageOrder};
