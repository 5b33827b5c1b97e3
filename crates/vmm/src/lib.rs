//! Addresses and mappings: where the blocks of a KV cache group lie, and the memory under them.
//!
//! [`Geometry`] is pure arithmetic: it chooses the page of a group and translates between block ids, pages and bytes.
//! [`FTensor`] is one reserved range of addresses whose pages are backed and given back one by one while the range stays
//! where it is. It speaks to physical memory through [`Driver`], which has a backend for NVIDIA GPUs (`cuda`), one for AMD
//! GPUs (`hip`), one for ordinary memory ([`host`]) and one that checks its caller (`sim`, a feature for tests).
//!
//! `unsafe` stays within the real backends and the frame of those for GPUs (`gpu`). They keep a book of what is theirs, so
//! that no argument of a [`Driver`] method can reach memory of somebody else: the trait is safe to call.

#![deny(unsafe_code)]

/// Addresses are `usize` and sizes `u64` throughout.
const _: () = assert!(usize::BITS == 64);

mod backends;
mod book;
mod cuda;
pub mod driver;
mod fork;
mod ftensor;
pub mod geometry;
mod gpu;
mod hip;
pub mod host;
#[cfg(any(test, feature = "sim"))]
pub mod sim;

pub use backends::{available, open};
pub use driver::{Access, Device, DeviceNameError, Driver, DriverError, Handle, MemInfo};
pub use fork::{Forking, forking};
pub use ftensor::{
    FTensor, Options, Outcome, TransactionError, TransactionId, Unbacked, UnmapFailure, VmmError, live_ranges,
};
pub use geometry::{Cell, Component, Geometry, GeometryError, Layout, Shape, Target};
