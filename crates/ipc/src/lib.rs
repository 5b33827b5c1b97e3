//! Ranks that agree: how a coordinator process maps and unmaps pages on the worker ranks that own
//! the GPU mappings (tensor and pipeline parallel engines).
//!
//! The protocol is two pure cores, [`coordinator`] and [`rank`]: events in, effects out, no clock and no I/O. [`Ranks`] carries out
//! the effects of the one, [`RankServer`] those of the other, over Unix sockets or an engine's own RPC, with the bytes of [`wire`].

pub mod coordinator;
pub mod message;
pub mod rank;
pub mod runs;
pub mod wire;

mod answer;
mod directory;
mod error;
mod fork;
mod group;
mod link;
mod ranks;
mod reader;
mod server;
mod socket;
mod store;

pub use directory::Directory;
pub use error::IpcError;
pub use link::{Call, Link};
pub use ranks::{Inbox, Ranks, RanksConfig, Watcher};
pub use server::RankServer;
pub use store::{FTensorStore, Store};
