//! A pool: a group's ledger over the memory that backs it.
//!
//! [`Pool`] plans under its lock, calls the [`Mapper`] without it, and commits what came of it under the
//! lock again, so that a driver call never keeps another thread from allocating blocks that are on hand.
#![forbid(unsafe_code)]

mod config;
mod error;
mod fork;
mod ftensor;
mod mapper;
mod meter;
mod pool;

pub use config::PoolConfig;
pub use error::PoolError;
pub use fork::forked;
pub use mapper::{Cause, MapFailure, Mapper, UnmapFailure};
pub use meter::{Meter, NoMeter, Usage};
pub use pool::{Pool, PoolStats};

pub use kvcached_ledger::{BlockError, EpochError, Layout, LayoutError, PageCounts, PageOrder};
