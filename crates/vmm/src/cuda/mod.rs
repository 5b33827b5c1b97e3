//! NVIDIA GPUs: the CUDA driver's virtual memory management, over cust's raw bindings.
//!
//! cust appears in this module only. The library is bound at run time (`lazy`): without it every call fails with
//! [`DriverError::NoDriver`]. Each call runs with the device's primary context current, the one that the CUDA runtime and
//! so PyTorch uses, and leaves the thread with the context that it had.

#![allow(unsafe_code)]

mod lazy;

use std::sync::OnceLock;

use cust::sys;

use crate::driver::{Access, Device, DriverError, Handle, MemInfo};
use crate::gpu::{Api, selecting};

type Result<T> = std::result::Result<T, DriverError>;

/// Turns the result of this thread's latest driver call, which was `call` over `bytes`, into ours.
fn check(call: &'static str, bytes: u64) -> Result<()> {
    const OUT_OF_MEMORY: i32 = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as i32;
    match lazy::last_code() {
        0 => Ok(()),
        lazy::NO_LIBRARY => Err(no_driver()),
        lazy::NO_SYMBOL => Err(DriverError::NoSymbol { call }),
        OUT_OF_MEMORY => Err(DriverError::OutOfMemory { call, bytes, code: OUT_OF_MEMORY }),
        code => Err(DriverError::Call { call, code, name: lazy::name_of(code) }),
    }
}

fn no_driver() -> DriverError {
    DriverError::NoDriver { why: lazy::library().err().unwrap_or("libcuda.so.1 cannot be used").to_owned() }
}

/// Calls the driver function of this name and checks it; a size after `;` goes into the error.
macro_rules! cu {
    ($f:ident($($a:expr),* $(,)?)) => {
        cu!($f($($a),*); 0)
    };
    ($f:ident($($a:expr),* $(,)?); $bytes:expr) => {{
        let _ = sys::$f($($a),*); // `check` reads the code, which this enum may not list
        check(stringify!($f), $bytes)
    }};
}

/// The driver functions needed here that the library lacks. Starts nothing. Fails with `NoDriver` without a library.
pub(crate) fn missing_symbols() -> Result<Vec<&'static str>> {
    let lib = lazy::library().map_err(|_| no_driver())?;
    // SAFETY: the addresses are looked up, never called.
    Ok(lazy::SYMBOLS.iter().copied().filter(|s| unsafe { lib.get::<*const ()>(*s) }.is_err()).collect())
}

/// A hold on a device's primary context.
#[derive(Debug)]
struct Primary {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: a context handle names a driver object that any thread may make current; the driver locks it.
unsafe impl Send for Primary {}
// SAFETY: as above; nothing here changes after `retain`.
unsafe impl Sync for Primary {}

impl Primary {
    fn retain(ordinal: u32) -> Result<Self> {
        let Ok(ordinal) = i32::try_from(ordinal) else {
            let why = format!("no such device: cuda:{ordinal}");
            return Err(DriverError::Misuse { call: "cuDeviceGet", why });
        };
        let mut device = 0;
        let mut context = std::ptr::null_mut();
        // SAFETY: both pointers are valid for a write, and the driver is started before it is used.
        unsafe {
            cu!(cuInit(0))?;
            cu!(cuDeviceGet(&mut device, ordinal))?;
            cu!(cuDevicePrimaryCtxRetain(&mut context, device))?;
        }
        Ok(Primary { device, context })
    }

    /// Runs `f` with this context current, then puts back the thread's own.
    fn with<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let current = || {
            let mut was = std::ptr::null_mut();
            // SAFETY: `was` is valid for a write.
            unsafe { cu!(cuCtxGetCurrent(&mut was))? };
            Ok(was)
        };
        // SAFETY: `retain` keeps our context alive; the other one was current on this thread a moment ago.
        selecting(self.context, current, |context| unsafe { cu!(cuCtxSetCurrent(context)) }, f)
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: `retain` took one hold on this device's context, which ends here.
        if let Err(error) = unsafe { cu!(cuDevicePrimaryCtxRelease_v2(self.device)) } {
            tracing::warn!(%error, "the primary CUDA context was not released");
        }
    }
}

/// The calls of one GPU.
#[derive(Debug)]
pub(crate) struct Cuda {
    ordinal: u32,
    primary: Primary,
    granularity: u64,
    /// For `clear`; made by the first.
    stream: OnceLock<Stream>,
}

/// A stream of ours on a device's primary context. It lives as long as the process.
#[derive(Debug)]
struct Stream(sys::CUstream);

// SAFETY: a stream handle names a driver object that any thread may use; the driver locks it.
unsafe impl Send for Stream {}
// SAFETY: as above; nothing here changes.
unsafe impl Sync for Stream {}

impl Cuda {
    /// Starts the driver and takes a hold on the device's primary context.
    ///
    /// Fails with `NoDriver` or `NoSymbol` where the machine has none, with `Call` where the driver refuses.
    pub fn open(ordinal: u32) -> Result<Self> {
        if let Some(call) = missing_symbols()?.first() {
            return Err(DriverError::NoSymbol { call });
        }
        let primary = Primary::retain(ordinal)?;
        let mut granularity = 0;
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let wanted = prop(primary.device);
        // SAFETY: both pointers are valid for the call.
        primary.with(|| unsafe { cu!(cuMemGetAllocationGranularity(&mut granularity, &wanted, least)) })?;
        Ok(Cuda { ordinal, primary, granularity: granularity as u64, stream: OnceLock::new() })
    }

    /// The stream of `clear`. It waits for no other and no other waits for it.
    fn stream(&self) -> Result<sys::CUstream> {
        if let Some(stream) = self.stream.get() {
            return Ok(stream.0);
        }
        let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is valid for a write; the context is current.
        unsafe { cu!(cuStreamCreate(&mut stream, non_blocking))? };
        // Two threads may both have made one: the second is used by nobody, and costs nothing.
        Ok(self.stream.get_or_init(|| Stream(stream)).0)
    }
}

/// Pinned memory of `device` that stays in this process.
fn prop(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: Default::default(),
    }
}

fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

impl Api for Cuda {
    /// In every trial on an H200, whichever process had the memory before.
    const FRESH_IS_ZERO: bool = true;

    fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn reserve(&self, bytes: u64) -> Result<usize> {
        let mut address = 0;
        self.primary.with(|| {
            // SAFETY: `address` is valid for a write; no address is asked for.
            unsafe { cu!(cuMemAddressReserve(&mut address, bytes as usize, 0, 0, 0); bytes) }
        })?;
        Ok(address as usize)
    }

    unsafe fn free(&self, address: usize, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this method's contract.
        self.primary.with(|| unsafe { cu!(cuMemAddressFree(address as u64, bytes as usize)) })
    }

    fn create(&self, bytes: u64) -> Result<Handle> {
        let mut raw = 0;
        let wanted = prop(self.primary.device);
        // SAFETY: both pointers are valid for the call.
        self.primary.with(|| unsafe { cu!(cuMemCreate(&mut raw, bytes as usize, &wanted, 0); bytes) })?;
        Ok(Handle::from_raw(raw))
    }

    unsafe fn release(&self, handle: Handle) -> Result<()> {
        // SAFETY: the caller keeps this method's contract.
        self.primary.with(|| unsafe { cu!(cuMemRelease(handle.raw())) })
    }

    unsafe fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<()> {
        self.primary.with(|| {
            // SAFETY: the caller keeps this method's contract.
            unsafe { cu!(cuMemMap(address as u64, bytes as usize, 0, handle.raw(), 0); bytes) }
        })
    }

    unsafe fn set_access(&self, address: usize, bytes: u64, access: Access) -> Result<()> {
        let flags = match access {
            Access::ReadWrite => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            Access::Read => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
        };
        let wanted = sys::CUmemAccessDesc { location: location(self.primary.device), flags };
        self.primary.with(|| {
            // SAFETY: the caller keeps this method's contract; one descriptor is passed.
            unsafe { cu!(cuMemSetAccess(address as u64, bytes as usize, &wanted, 1); bytes) }
        })
    }

    unsafe fn clear(&self, mappings: &[(usize, u64)]) -> Result<()> {
        self.primary.with(|| {
            let stream = self.stream()?;
            let queued = mappings.iter().try_for_each(|&(address, bytes)| {
                // SAFETY: the caller keeps this method's contract.
                unsafe { cu!(cuMemsetD8Async(address as u64, 0, bytes as usize, stream)) }
            });
            // SAFETY: the stream is ours. What was queued is waited for in any case: it writes to the mappings.
            let waited = unsafe { cu!(cuStreamSynchronize(stream)) };
            queued.and(waited)
        })
    }

    unsafe fn unmap(&self, address: usize, bytes: u64) -> Result<()> {
        // SAFETY: the caller keeps this method's contract.
        self.primary.with(|| unsafe { cu!(cuMemUnmap(address as u64, bytes as usize)) })
    }

    fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: `uuid` is valid for a write, and `retain` found the device.
        unsafe { cu!(cuDeviceGetUuid_v2(&mut uuid, self.primary.device)) }?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    fn mem_info(&self) -> Result<MemInfo> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid for writes.
        self.primary.with(|| unsafe { cu!(cuMemGetInfo_v2(&mut free, &mut total)) })?;
        Ok(MemInfo { free: free as u64, total: total as u64 })
    }

    fn synchronise(&self) -> Result<()> {
        // SAFETY: takes nothing.
        self.primary.with(|| unsafe { cu!(cuCtxSynchronize()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_library_every_way_in_says_so() {
        if lazy::library().is_ok() {
            // Where there is a driver, tests/scenarios/gpu.rs is the test.
            assert_eq!(missing_symbols(), Ok(vec![]));
            return;
        }
        let is_no_driver = |e: DriverError| {
            assert!(matches!(&e, DriverError::NoDriver { why } if why.contains("libcuda.so.1")), "{e:?}");
        };
        is_no_driver(crate::open(Device::Cuda(0)).unwrap_err());
        is_no_driver(crate::available(Device::Cuda(0)).unwrap_err());
        is_no_driver(missing_symbols().unwrap_err());
        is_no_driver(Primary::retain(0).unwrap_err());
        let mut free = 0;
        // SAFETY: both pointers are valid for writes; without a library nothing is called.
        is_no_driver(unsafe { cu!(cuMemGetInfo_v2(&mut free, &mut 0)) }.unwrap_err());
    }

    #[test]
    fn a_code_that_nobody_knows_has_a_name() {
        assert!(!lazy::name_of(123_456).is_empty());
    }

    #[test]
    fn names_are_bound_once() {
        let mut names = lazy::SYMBOLS.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), lazy::SYMBOLS.len());
        assert!(names.contains(&"cuMemSetAccess"));
    }
}
