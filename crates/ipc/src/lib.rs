//! Ranks that agree: how a coordinator process maps and unmaps pages on the worker ranks that own the GPU mappings (tensor
//! and pipeline parallel engines).
//!
//! The protocol is two cores without a clock, a thread or a socket: [`coordinator::Coordinator`] and [`rank::Rank`] take an
//! event and return effects. Production, the model checker, the simulator and the fuzzer run these same functions. [`message`]
//! is what the two say to each other, [`wire`] its bytes, [`runs`] how sets of pages travel.
//!
//! [`Ranks`] carries out the effects of the one core, [`RankServer`] those of the other, over Unix sockets or an engine's own
//! RPC. What a rank does to memory it does to a [`Store`].

#![forbid(unsafe_code)]

pub mod coordinator;
pub mod message;
pub mod rank;
pub mod runs;
#[cfg(feature = "sim")]
pub mod sim;
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
pub use link::{Call, Inbox, Link};
pub use ranks::{Ranks, RanksConfig, Watcher};
pub use server::RankServer;
pub use store::{FTensorStore, Store};
