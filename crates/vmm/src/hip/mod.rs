//! AMD GPUs: the HIP runtime's virtual memory management.
//!
//! **Nothing here was run on an AMD GPU.** tests/hip.rs runs it against a library of our own that follows the header and AMD's
//! source (`clr/hipamd/src/hip_vm.cpp`); Debian's libamdhip64 5.2.3 loads, has every function, and is refused as too old.
//!
//! The library is bound at run time (`api`): without it every call fails with [`DriverError::NoDriver`]. Each call runs with
//! the device selected, since `hipMemCreate` takes memory from the thread's device whatever the properties say, and leaves the
//! thread with the device that it had.
//!
//! What is known of the runtime, from its source and its issues (of ROCm/rocm-systems, unless another is named):
//!
//! * It may hand out memory that another process left its bytes in (vllm-project/vllm#44972): memory is cleared as it is
//!   opened for the first time.
//! * `hipMemMap` takes no offset and maps a handle whole. Before #6982 (June 2026, ROCm 7.14) it succeeds whatever happens, and
//!   it is `hipMemSetAccess` that fails, with `hipErrorInvalidValue`: what was for want of memory then looks like a defect.
//! * `hipMemSetAccess` and `hipMemUnmap` take whole mappings only, as the book does. In ROCm 7.0 to 7.2 the former also refuses
//!   a mapping that is not as long as the first one of its reservation (#2451). All of a range's are equally long.
//! * ROCm 7.2 keeps released memory until its *addresses* are freed (#4363), and 6.4.0 keeps it for ever (ROCm/hip#3781):
//!   there a cache grows and does not shrink.
//! * ROCm 7.14 spends a file descriptor on each handle (#10604), and says out of memory when none is left: few large handles,
//!   and `ulimit -n` raised.
//! * `hipMemUnmap` waits for all work on the device, and before #6982 it and `hipMemMap` for that of blocking streams, so that
//!   giving pages back takes as long as what is queued.
//! * Mappings for reading only are in its source (`hipMemAccessFlagsProtRead` goes down to the kernel driver). RDNA GPUs may not
//!   see through one address what was written through another to the same memory (ROCm/hip#3728): ours is shared for reading only.
//! * The least granularity is 4 KiB. Ours is the recommended one, 2 MiB since ROCm 7.14 and 4 KiB too before: large page table
//!   entries, and fewer handles.

#![allow(unsafe_code)]

mod api;

use std::ffi::c_int;
use std::sync::OnceLock;

use crate::driver::{Access, Device, DriverError, Handle, MemInfo};
use crate::gpu::{Api, selecting};
use api::{AccessDesc, AllocationProp, Functions, Location, Stream, Uuid};

type Result<T> = std::result::Result<T, DriverError>;

/// Turns the code that `call`, over `bytes`, returned into ours.
fn check(functions: &Functions, call: &'static str, bytes: u64, code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        api::OUT_OF_MEMORY => Err(DriverError::OutOfMemory { call, bytes, code }),
        code => Err(DriverError::Call { call, code, name: functions.name_of(code) }),
    }
}

/// Calls the runtime's function of this name and checks it; a size after `;` goes into the error.
macro_rules! hip {
    ($functions:expr, $f:ident($($a:expr),* $(,)?)) => {
        hip!($functions, $f($($a),*); 0)
    };
    ($functions:expr, $f:ident($($a:expr),* $(,)?); $bytes:expr) => {{
        let code = ($functions.$f)($($a),*);
        check($functions, stringify!($f), $bytes, code)
    }};
}

/// Whether the library loads and has every function. Starts nothing. Fails with `NoDriver` or `NoSymbol`.
pub(crate) fn available() -> Result<()> {
    api::functions().map(|_| ())
}

/// The calls of one GPU.
#[derive(Debug)]
pub(crate) struct Hip {
    functions: &'static Functions,
    ordinal: u32,
    /// The same, as the runtime takes it.
    device: c_int,
    granularity: u64,
    /// For `clear`; made by the first. It lives as long as the process.
    stream: OnceLock<Stream>,
}

impl Hip {
    /// Starts the runtime.
    ///
    /// Fails with `NoDriver` or `NoSymbol` where the machine has none that can be used, with `Call` where the runtime refuses.
    pub fn open(ordinal: u32) -> Result<Self> {
        let functions = api::functions()?;
        let Ok(device) = c_int::try_from(ordinal) else {
            let why = format!("no such device: hip:{ordinal}");
            return Err(DriverError::Misuse { call: "hipSetDevice", why });
        };
        check_version(functions)?;
        // SAFETY: takes no pointer.
        unsafe { hip!(functions, hipInit(0))? };
        let mut granularity = 0;
        let wanted = prop(device);
        with(functions, device, || {
            // SAFETY: both pointers are valid for the call.
            unsafe {
                hip!(functions, hipMemGetAllocationGranularity(&mut granularity, &wanted, api::RECOMMENDED))
            }
        })?;
        Ok(Hip { functions, ordinal, device, granularity: granularity as u64, stream: OnceLock::new() })
    }

    fn with<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        with(self.functions, self.device, f)
    }

    /// The stream of `clear`. It waits for no other and no other waits for it.
    fn stream(&self) -> Result<Stream> {
        if let Some(stream) = self.stream.get() {
            return Ok(*stream);
        }
        let mut stream = 0;
        // SAFETY: `stream` is valid for a write; the device is selected.
        unsafe { hip!(self.functions, hipStreamCreateWithFlags(&mut stream, api::NON_BLOCKING))? };
        // Two threads may both have made one: the second is used by nobody, and costs nothing.
        Ok(*self.stream.get_or_init(|| stream))
    }
}

/// Refuses a runtime whose structs are not ours.
fn check_version(functions: &Functions) -> Result<()> {
    let mut version = 0;
    // SAFETY: `version` is valid for a write.
    unsafe { hip!(functions, hipRuntimeGetVersion(&mut version))? };
    if version >= api::OLDEST {
        return Ok(());
    }
    let [has, needs] = [version, api::OLDEST].map(|v| format!("{}.{}", v / 10_000_000, v / 100_000 % 100));
    Err(DriverError::NoDriver { why: format!("libamdhip64 is of HIP {has}, and {needs} or later is needed") })
}

/// Runs `f` with this device selected, then puts back the thread's own.
fn with<T>(functions: &Functions, device: c_int, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let current = || {
        let mut was = 0;
        // SAFETY: `was` is valid for a write.
        unsafe { hip!(functions, hipGetDevice(&mut was))? };
        Ok(was)
    };
    // SAFETY: takes no pointer.
    selecting(device, current, |device| unsafe { hip!(functions, hipSetDevice(device)) }, f)
}

/// Pinned memory of `device` that stays in this process.
fn prop(device: c_int) -> AllocationProp {
    AllocationProp {
        kind: api::PINNED,
        requested_handle: api::NOT_SHARED,
        location: location(device),
        win32_metadata: std::ptr::null(),
        compression: 0,
        gpu_direct_rdma: 0,
        usage: 0,
    }
}

fn location(device: c_int) -> Location {
    Location { kind: api::ON_DEVICE, id: device }
}

impl Api for Hip {
    const FRESH_IS_ZERO: bool = false;

    fn device(&self) -> Device {
        Device::Hip(self.ordinal)
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn reserve(&self, bytes: u64) -> Result<usize> {
        let mut address = 0;
        self.with(|| {
            // SAFETY: `address` is valid for a write; no address is asked for.
            unsafe {
                hip!(self.functions, hipMemAddressReserve(&mut address, bytes as usize, 0, 0, 0); bytes)
            }
        })?;
        Ok(address)
    }

    unsafe fn free(&self, address: usize, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this method's contract.
        self.with(|| unsafe { hip!(self.functions, hipMemAddressFree(address, bytes as usize)) })
    }

    fn create(&self, bytes: u64) -> Result<Handle> {
        let mut raw = 0;
        let wanted = prop(self.device);
        self.with(|| {
            // SAFETY: both pointers are valid for the call.
            unsafe { hip!(self.functions, hipMemCreate(&mut raw, bytes as usize, &wanted, 0); bytes) }
        })?;
        Ok(Handle::from_raw(raw as u64))
    }

    unsafe fn release(&self, handle: Handle) -> Result<()> {
        // SAFETY: the caller keeps this method's contract.
        self.with(|| unsafe { hip!(self.functions, hipMemRelease(handle.raw() as usize)) })
    }

    unsafe fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<()> {
        let raw = handle.raw() as usize;
        // SAFETY: the caller keeps this method's contract.
        self.with(|| unsafe { hip!(self.functions, hipMemMap(address, bytes as usize, 0, raw, 0); bytes) })
    }

    unsafe fn set_access(&self, address: usize, bytes: u64, access: Access) -> Result<()> {
        let flags = match access {
            Access::ReadWrite => api::READ_WRITE,
            Access::Read => api::READ,
        };
        let wanted = AccessDesc { location: location(self.device), flags };
        self.with(|| {
            // SAFETY: the caller keeps this method's contract; one descriptor is passed.
            unsafe { hip!(self.functions, hipMemSetAccess(address, bytes as usize, &wanted, 1); bytes) }
        })
    }

    unsafe fn clear(&self, mappings: &[(usize, u64)]) -> Result<()> {
        self.with(|| {
            let stream = self.stream()?;
            let queued = mappings.iter().try_for_each(|&(address, bytes)| {
                // SAFETY: the caller keeps this method's contract.
                unsafe { hip!(self.functions, hipMemsetD8Async(address, 0, bytes as usize, stream)) }
            });
            // SAFETY: the stream is ours. What was queued is waited for in any case: it writes to the mappings.
            let waited = unsafe { hip!(self.functions, hipStreamSynchronize(stream)) };
            queued.and(waited)
        })
    }

    unsafe fn unmap(&self, address: usize, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this method's contract.
        self.with(|| unsafe { hip!(self.functions, hipMemUnmap(address, bytes as usize)) })
    }

    fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = Uuid { bytes: [0; 16] };
        // SAFETY: `uuid` is valid for a write.
        unsafe { hip!(self.functions, hipDeviceGetUuid(&mut uuid, self.device)) }?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    fn mem_info(&self) -> Result<MemInfo> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid for writes.
        self.with(|| unsafe { hip!(self.functions, hipMemGetInfo(&mut free, &mut total)) })?;
        Ok(MemInfo { free: free as u64, total: total as u64 })
    }

    fn synchronise(&self) -> Result<()> {
        // SAFETY: takes nothing.
        self.with(|| unsafe { hip!(self.functions, hipDeviceSynchronize()) })
    }
}
