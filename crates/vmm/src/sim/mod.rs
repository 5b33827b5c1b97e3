//! A driver for tests: addresses without memory, every law checked, any call made to fail.

mod faulty;
mod script;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::book::{Book, check_size};
use crate::driver::{Access, Device, Driver, DriverError, Handle, MemInfo};
use script::{Call, Faults, Script};

pub use faulty::Faulty;
pub use script::{Calls, Cost, FAULT_CODE, Latency};

type Result<T> = std::result::Result<T, DriverError>;

/// A simulated device. Shared with the code under test as `Arc<dyn Driver>`.
pub struct Sim {
    granularity: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    book: Book,
    budget_bytes: u64,
    next_address: usize,
    next_handle: u64,
    script: Script,
    refused: Vec<String>,
}

impl Sim {
    /// A device of 2 MiB granularity and 1 TiB, on which nothing fails.
    pub fn new() -> Arc<Self> {
        Self::with(2 << 20, 1 << 40)
    }

    /// A device of this granularity and this much memory, bytes.
    pub fn with(granularity: u64, budget_bytes: u64) -> Arc<Self> {
        Arc::new(Sim {
            granularity,
            state: Mutex::new(State {
                book: Book::default(),
                budget_bytes,
                next_address: 1 << 40,
                next_handle: 1,
                script: Script::new(),
                refused: vec![],
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails the `k`-th call from now, from 1, without any effect. Starts the counts anew.
    pub fn fail_at(&self, k: u32) {
        self.fail_each(&[k]);
    }

    /// Fails each of these calls, numbered from 1 from now, without any effect. Starts the counts anew.
    pub fn fail_each(&self, calls: &[u32]) {
        self.state().script.plan(Faults::At(calls.to_vec()));
    }

    /// Fails the `k`-th call from now, from 1, and every one after it. Starts the counts anew.
    pub fn fail_from(&self, k: u32) {
        self.state().script.plan(Faults::From(k));
    }

    /// Nothing fails any more. Starts the counts anew.
    pub fn heal(&self) {
        self.fail_each(&[]);
    }

    /// What calls cost from now on; nothing at first.
    pub fn set_latency(&self, latency: Latency) {
        self.state().script.set_latency(latency);
    }

    /// What the calls since the start, or since the latest `fail_*` or `heal`, would have taken, one after the other.
    pub fn elapsed(&self) -> Duration {
        self.state().script.elapsed()
    }

    /// How much memory the device has from now on, bytes. What is held stays held.
    pub fn set_budget(&self, budget_bytes: u64) {
        self.state().budget_bytes = budget_bytes;
    }

    /// Calls since the start, or since the latest `fail_*` or `heal`.
    pub fn calls(&self) -> Calls {
        self.state().script.calls()
    }

    /// Physical memory held, bytes.
    pub fn held_bytes(&self) -> u64 {
        self.state().book.held_bytes()
    }

    /// Every mapping: address, and what the device may do there; None before it was said.
    pub fn accesses(&self) -> Vec<(usize, Option<Access>)> {
        self.state().book.accesses().collect()
    }

    /// Every mapping: address and bytes, by address.
    pub fn mappings(&self) -> Vec<(usize, u64)> {
        self.state().book.mappings().collect()
    }

    /// Reservations, handles and mappings that exist.
    pub fn counts(&self) -> (usize, usize, usize) {
        self.state().book.counts()
    }

    /// Calls that broke a law, in words.
    pub fn refused(&self) -> Vec<String> {
        self.state().refused.clone()
    }

    /// Asserts that nothing is left and that no law was ever broken.
    ///
    /// # Panics
    /// Where that is not so.
    pub fn assert_clean(&self) {
        let refused = self.refused();
        assert!(refused.is_empty(), "laws broken: {refused:#?}");
        let (ranges, handles, mappings) = self.counts();
        assert!(
            (ranges, handles, mappings) == (0, 0, 0),
            "left behind: {ranges} ranges, {handles} handles, {mappings} mappings"
        );
    }

    /// Counts a call about `bytes` and does it unless it is to fail.
    fn call<T>(
        &self,
        name: &'static str,
        call: Call,
        bytes: u64,
        act: impl FnOnce(&mut State) -> Result<T>,
    ) -> Result<T> {
        let mut state = self.state();
        state.script.admit(name, call, bytes)?;
        self.lawful(&mut state, act)
    }

    /// Does it, and remembers a law that it breaks.
    fn lawful<T>(&self, state: &mut State, act: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        let result = act(state);
        if let Err(error @ DriverError::Misuse { .. }) = &result {
            state.refused.push(error.to_string());
        }
        result
    }
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranges, handles, mappings) = self.counts();
        write!(f, "Sim({ranges} ranges, {handles} handles, {mappings} mappings)")
    }
}

impl Driver for Sim {
    fn device(&self) -> Device {
        Device::Host
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn reserve(&self, bytes: u64) -> Result<usize> {
        self.call("reserve", Call::Reserve, bytes, |s| {
            check_size("reserve", bytes, self.granularity)?;
            let address = s.next_address;
            // A gap, so that an overrun is no other range's page.
            let next = usize::try_from(bytes + self.granularity).ok().and_then(|b| address.checked_add(b));
            s.next_address =
                next.ok_or(DriverError::OutOfMemory { call: "reserve", bytes, code: FAULT_CODE })?;
            s.book.put_range(address, bytes);
            Ok(address)
        })
    }

    fn free(&self, address: usize, bytes: u64) -> Result<()> {
        self.call("free", Call::Free, bytes, |s| s.book.take_range("free", address, bytes))
    }

    fn create(&self, bytes: u64) -> Result<Handle> {
        self.call("create", Call::Create, bytes, |s| {
            check_size("create", bytes, self.granularity)?;
            if bytes > s.budget_bytes.saturating_sub(s.book.held_bytes()) {
                return Err(DriverError::OutOfMemory { call: "create", bytes, code: FAULT_CODE });
            }
            let handle = Handle::from_raw(s.next_handle);
            s.next_handle += 1;
            s.book.add_handle(handle, bytes);
            Ok(handle)
        })
    }

    fn release(&self, handle: Handle) -> Result<()> {
        let bytes = self.state().book.bytes_of(handle);
        self.call("release", Call::Release, bytes, |s| s.book.take_handle("release", handle).map(|_| ()))
    }

    fn share(&self, handle: Handle) -> Result<()> {
        self.lawful(&mut self.state(), |s| s.book.share("share", handle))
    }

    fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<()> {
        self.call("map", Call::Map, bytes, |s| s.book.add_mapping("map", address, bytes, handle))
    }

    fn set_access(&self, address: usize, bytes: u64, access: Access) -> Result<()> {
        self.call("set_access", Call::SetAccess, bytes, |s| {
            s.book.check_access("set_access", address, bytes, access)?;
            s.book.opened(address, access);
            Ok(())
        })
    }

    fn clear(&self, mappings: &[(usize, u64)]) -> Result<()> {
        let bytes = mappings.iter().map(|(_, bytes)| bytes).sum();
        self.call("clear", Call::Clear, bytes, |s| s.book.check_writable("clear", mappings))
    }

    fn unmap(&self, address: usize, bytes: u64) -> Result<()> {
        self.call("unmap", Call::Unmap, bytes, |s| s.book.take_mapping("unmap", address, bytes).map(|_| ()))
    }

    fn identity(&self) -> Result<String> {
        Ok("sim".to_owned())
    }

    fn mem_info(&self) -> Result<MemInfo> {
        self.call("mem_info", Call::MemInfo, 0, |s| {
            let free = s.budget_bytes.saturating_sub(s.book.held_bytes());
            Ok(MemInfo { free, total: s.budget_bytes })
        })
    }

    fn synchronise(&self) -> Result<()> {
        self.call("synchronise", Call::Synchronise, 0, |_| Ok(()))
    }
}
