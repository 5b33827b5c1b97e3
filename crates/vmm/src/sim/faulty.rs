//! Any driver, with its calls counted and made to fail.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::script::{Call, Calls, Faults, Script};
use crate::driver::{Access, Device, Driver, DriverError, Handle, MemInfo};

type Result<T> = std::result::Result<T, DriverError>;

/// Passes calls on to a driver, counts them, and fails those that were asked to fail without making them: so that what runs
/// over [`Sim`](super::Sim) runs over real memory too.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Driver>,
    script: Mutex<Script>,
}

impl Faulty {
    /// `inner`, on which nothing fails yet.
    pub fn new(inner: Arc<dyn Driver>) -> Arc<Self> {
        Arc::new(Faulty { inner, script: Mutex::new(Script::new()) })
    }

    /// Fails each of these calls, numbered from 1 from now. Starts the counts anew.
    pub fn fail_each(&self, calls: &[u32]) {
        self.script().plan(Faults::At(calls.to_vec()));
    }

    /// Fails the `k`-th call from now, from 1, and every one after it. Starts the counts anew.
    pub fn fail_from(&self, k: u32) {
        self.script().plan(Faults::From(k));
    }

    /// Nothing fails any more. Starts the counts anew.
    pub fn heal(&self) {
        self.fail_each(&[]);
    }

    /// Calls since the start, or since the latest `fail_*` or `heal`.
    pub fn calls(&self) -> Calls {
        self.script().calls()
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admit(&self, name: &'static str, call: Call) -> Result<()> {
        self.script().admit(name, call, 0)
    }
}

impl Driver for Faulty {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn granularity(&self) -> u64 {
        self.inner.granularity()
    }

    fn reserve(&self, bytes: u64) -> Result<usize> {
        self.admit("reserve", Call::Reserve)?;
        self.inner.reserve(bytes)
    }

    fn free(&self, address: usize, bytes: u64) -> Result<()> {
        self.admit("free", Call::Free)?;
        self.inner.free(address, bytes)
    }

    fn create(&self, bytes: u64) -> Result<Handle> {
        self.admit("create", Call::Create)?;
        self.inner.create(bytes)
    }

    fn release(&self, handle: Handle) -> Result<()> {
        self.admit("release", Call::Release)?;
        self.inner.release(handle)
    }

    fn share(&self, handle: Handle) -> Result<()> {
        self.inner.share(handle)
    }

    fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<()> {
        self.admit("map", Call::Map)?;
        self.inner.map(address, bytes, handle)
    }

    fn set_access(&self, address: usize, bytes: u64, access: Access) -> Result<()> {
        self.admit("set_access", Call::SetAccess)?;
        self.inner.set_access(address, bytes, access)
    }

    fn clear(&self, mappings: &[(usize, u64)]) -> Result<()> {
        self.admit("clear", Call::Clear)?;
        self.inner.clear(mappings)
    }

    fn unmap(&self, address: usize, bytes: u64) -> Result<()> {
        self.admit("unmap", Call::Unmap)?;
        self.inner.unmap(address, bytes)
    }

    fn identity(&self) -> Result<String> {
        self.inner.identity()
    }

    fn mem_info(&self) -> Result<MemInfo> {
        self.admit("mem_info", Call::MemInfo)?;
        self.inner.mem_info()
    }

    fn synchronise(&self) -> Result<()> {
        self.admit("synchronise", Call::Synchronise)?;
        self.inner.synchronise()
    }
}
