//! A driver for tests: addresses without memory, every law checked, any call made to fail.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::book::{Book, check_size};
use crate::driver::{Device, Driver, DriverError, Handle, MemInfo};

type Result<T> = std::result::Result<T, DriverError>;

/// The code of a failure that was asked for.
pub const FAULT_CODE: i32 = 999;

/// Calls by kind. Also those that failed or were refused.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // each is the number of calls of the `Driver` method of its name
pub struct Calls {
    pub reserve: u32,
    pub free: u32,
    pub create: u32,
    pub release: u32,
    pub map: u32,
    pub set_access: u32,
    pub unmap: u32,
    pub mem_info: u32,
    pub synchronise: u32,
}

impl Calls {
    /// All of them.
    pub fn total(&self) -> u32 {
        let Calls { reserve, free, create, release, map, set_access, unmap, mem_info, synchronise } = *self;
        reserve + free + create + release + map + set_access + unmap + mem_info + synchronise
    }
}

#[derive(Debug)]
enum Faults {
    /// The calls of these numbers, from 1.
    At(Vec<u32>),
    /// That call and all later ones.
    From(u32),
}

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
    calls: Calls,
    faults: Faults,
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
                calls: Calls::default(),
                faults: Faults::At(vec![]),
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
        self.plan(Faults::At(calls.to_vec()));
    }

    /// Fails the `k`-th call from now, from 1, and every one after it. Starts the counts anew.
    pub fn fail_from(&self, k: u32) {
        self.plan(Faults::From(k));
    }

    /// Nothing fails any more. Starts the counts anew.
    pub fn heal(&self) {
        self.fail_each(&[]);
    }

    fn plan(&self, faults: Faults) {
        let mut state = self.state();
        state.calls = Calls::default();
        state.faults = faults;
    }

    /// How much memory the device has from now on, bytes. What is held stays held.
    pub fn set_budget(&self, budget_bytes: u64) {
        self.state().budget_bytes = budget_bytes;
    }

    /// Calls since the start, or since the latest `fail_*` or `heal`.
    pub fn calls(&self) -> Calls {
        self.state().calls
    }

    /// Physical memory held, bytes.
    pub fn held_bytes(&self) -> u64 {
        self.state().book.held_bytes()
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

    /// Counts the call and does it unless it is to fail.
    fn call<T>(
        &self,
        call: &'static str,
        count: fn(&mut Calls) -> &mut u32,
        act: impl FnOnce(&mut State) -> Result<T>,
    ) -> Result<T> {
        let mut state = self.state();
        *count(&mut state.calls) += 1;
        let k = state.calls.total();
        let fails = match &state.faults {
            Faults::At(calls) => calls.contains(&k),
            Faults::From(from) => k >= *from,
        };
        if fails {
            return Err(DriverError::Call { call, code: FAULT_CODE, name: format!("fault in call {k}") });
        }
        let result = act(&mut state);
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
        self.call(
            "reserve",
            |c| &mut c.reserve,
            |s| {
                check_size("reserve", bytes, self.granularity)?;
                let address = s.next_address;
                // A gap, so that an overrun is no other range's page.
                let next =
                    usize::try_from(bytes + self.granularity).ok().and_then(|b| address.checked_add(b));
                s.next_address =
                    next.ok_or(DriverError::OutOfMemory { call: "reserve", bytes, code: FAULT_CODE })?;
                s.book.put_range(address, bytes);
                Ok(address)
            },
        )
    }

    fn free(&self, address: usize, bytes: u64) -> Result<()> {
        self.call("free", |c| &mut c.free, |s| s.book.take_range("free", address, bytes))
    }

    fn create(&self, bytes: u64) -> Result<Handle> {
        self.call(
            "create",
            |c| &mut c.create,
            |s| {
                check_size("create", bytes, self.granularity)?;
                if bytes > s.budget_bytes.saturating_sub(s.book.held_bytes()) {
                    return Err(DriverError::OutOfMemory { call: "create", bytes, code: FAULT_CODE });
                }
                let handle = Handle::from_raw(s.next_handle);
                s.next_handle += 1;
                s.book.put_handle(handle, bytes);
                Ok(handle)
            },
        )
    }

    fn release(&self, handle: Handle) -> Result<()> {
        self.call("release", |c| &mut c.release, |s| s.book.take_handle("release", handle).map(|_| ()))
    }

    fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<()> {
        self.call("map", |c| &mut c.map, |s| s.book.add_mapping("map", address, bytes, handle))
    }

    fn set_access(&self, address: usize, bytes: u64) -> Result<()> {
        self.call(
            "set_access",
            |c| &mut c.set_access,
            |s| s.book.check_mapping("set_access", address, bytes).map(|_| ()),
        )
    }

    fn unmap(&self, address: usize, bytes: u64) -> Result<()> {
        self.call("unmap", |c| &mut c.unmap, |s| s.book.take_mapping("unmap", address, bytes).map(|_| ()))
    }

    fn mem_info(&self) -> Result<MemInfo> {
        self.call(
            "mem_info",
            |c| &mut c.mem_info,
            |s| {
                let free = s.budget_bytes.saturating_sub(s.book.held_bytes());
                Ok(MemInfo { free, total: s.budget_bytes })
            },
        )
    }

    fn synchronise(&self) -> Result<()> {
        self.call("synchronise", |c| &mut c.synchronise, |_| Ok(()))
    }
}
