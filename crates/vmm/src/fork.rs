//! What a fork of the process would inherit locked.

use std::sync::{MutexGuard, Weak};

use crate::backends::{self, Opened};
use crate::ftensor::cache::{self, HandleCache};

/// The locks that all ranges of this process share. Ranges themselves refuse in a fork before they lock.
#[must_use = "what is dropped before the fork protects nothing"]
pub struct Forking {
    _drivers: MutexGuard<'static, Option<Opened>>,
    _caches: MutexGuard<'static, Vec<Weak<HandleCache>>>,
}

/// To be called right before a fork, by the thread that forks, and dropped right after it in both processes: a fork has one
/// thread, so that what another holds at that moment would stay locked there for good.
pub fn forking() -> Forking {
    Forking { _drivers: backends::lock(), _caches: cache::all() }
}
