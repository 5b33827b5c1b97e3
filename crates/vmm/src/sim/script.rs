//! What a driver for tests keeps of its calls: how many, which fail, and what they would have cost.

use std::time::Duration;

use crate::driver::DriverError;

/// The code of a failure that was asked for.
pub const FAULT_CODE: i32 = 999;

/// The call of the [`Driver`](crate::Driver) that was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    Reserve,
    Free,
    Create,
    Release,
    Map,
    SetAccess,
    Clear,
    Unmap,
    MemInfo,
    Synchronise,
}

/// Calls by kind. Also those that failed or were refused. `share` asks nothing of a device and is not counted.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // each is the number of calls of the `Driver` method of its name
pub struct Calls {
    pub reserve: u32,
    pub free: u32,
    pub create: u32,
    pub release: u32,
    pub map: u32,
    pub set_access: u32,
    pub clear: u32,
    pub unmap: u32,
    pub mem_info: u32,
    pub synchronise: u32,
}

impl Calls {
    /// All of them.
    pub fn total(&self) -> u32 {
        let Calls { reserve, free, create, release, map, set_access, clear, unmap, mem_info, synchronise } =
            *self;
        reserve + free + create + release + map + set_access + clear + unmap + mem_info + synchronise
    }

    fn count(&mut self, call: Call) {
        let counter = match call {
            Call::Reserve => &mut self.reserve,
            Call::Free => &mut self.free,
            Call::Create => &mut self.create,
            Call::Release => &mut self.release,
            Call::Map => &mut self.map,
            Call::SetAccess => &mut self.set_access,
            Call::Clear => &mut self.clear,
            Call::Unmap => &mut self.unmap,
            Call::MemInfo => &mut self.mem_info,
            Call::Synchronise => &mut self.synchronise,
        };
        *counter += 1;
    }
}

/// What one call costs: so much, and so much more for each MiB that it is about. Nanoseconds.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // each is the cost of the `Driver` method of its name
pub struct Cost {
    pub call_ns: u64,
    pub mib_ns: u64,
}

/// A device's latencies, as a straight line each over the bytes of the call.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // each is the cost of the `Driver` method of its name
pub struct Latency {
    pub reserve: Cost,
    pub free: Cost,
    pub create: Cost,
    pub release: Cost,
    pub map: Cost,
    pub set_access: Cost,
    pub clear: Cost,
    pub unmap: Cost,
}

impl Latency {
    /// An H200 under driver 580, fitted to handles of 2 to 128 MiB (docs/FIGURES.md): create 7.9 to 13.7 us, map 0.6, set
    /// access 22, unmap 15.4, release 9.4 to 45.8, clear 10.4 to 40.5; freeing a range 75 ms.
    pub const H200: Latency = {
        const fn cost(call_ns: u64, mib_ns: u64) -> Cost {
            Cost { call_ns, mib_ns }
        }
        Latency {
            reserve: cost(11_000, 0),
            free: cost(75_000_000, 0),
            create: cost(7_800, 46),
            release: cost(9_000, 287),
            map: cost(600, 1),
            set_access: cost(22_000, 1),
            clear: cost(10_000, 240),
            unmap: cost(15_400, 0),
        }
    };

    fn of(&self, call: Call, bytes: u64) -> Duration {
        let cost = match call {
            Call::Reserve => self.reserve,
            Call::Free => self.free,
            Call::Create => self.create,
            Call::Release => self.release,
            Call::Map => self.map,
            Call::SetAccess => self.set_access,
            Call::Clear => self.clear,
            Call::Unmap => self.unmap,
            Call::MemInfo | Call::Synchronise => Cost::default(),
        };
        Duration::from_nanos(cost.call_ns + cost.mib_ns * bytes.div_ceil(1 << 20))
    }
}

#[derive(Debug)]
pub(super) enum Faults {
    /// The calls of these numbers, from 1.
    At(Vec<u32>),
    /// That call and all later ones.
    From(u32),
}

/// The calls of one driver.
#[derive(Debug)]
pub(super) struct Script {
    calls: Calls,
    faults: Faults,
    latency: Latency,
    elapsed: Duration,
}

impl Script {
    pub fn new() -> Self {
        Script {
            calls: Calls::default(),
            faults: Faults::At(vec![]),
            latency: Latency::default(),
            elapsed: Duration::ZERO,
        }
    }

    /// Starts the counts and the clock anew.
    pub fn plan(&mut self, faults: Faults) {
        self.calls = Calls::default();
        self.elapsed = Duration::ZERO;
        self.faults = faults;
    }

    pub fn set_latency(&mut self, latency: Latency) {
        self.latency = latency;
    }

    pub fn calls(&self) -> Calls {
        self.calls
    }

    pub fn elapsed(&self) -> Duration {
        self.elapsed
    }

    /// Counts a call and says whether it may be made.
    pub fn admit(&mut self, name: &'static str, call: Call, bytes: u64) -> Result<(), DriverError> {
        self.calls.count(call);
        self.elapsed += self.latency.of(call, bytes);
        let k = self.calls.total();
        let fails = match &self.faults {
            Faults::At(calls) => calls.contains(&k),
            Faults::From(from) => k >= *from,
        };
        match fails {
            true => {
                Err(DriverError::Call { call: name, code: FAULT_CODE, name: format!("fault in call {k}") })
            }
            false => Ok(()),
        }
    }
}
