//! What threads share: of the standard library or, under the feature `shuttle`, of a scheduler that tries the orders in which
//! events can come (tests/handoffs.rs).

#[cfg(feature = "shuttle")]
pub(crate) use shuttle::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};
#[cfg(not(feature = "shuttle"))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};
