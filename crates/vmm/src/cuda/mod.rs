//! NVIDIA GPUs: the CUDA driver's virtual memory management, over cust's raw bindings.
//!
//! cust appears in this module only. The library is bound at run time (`lazy`): without it every call fails with
//! [`DriverError::NoDriver`]. Each call runs with the device's primary context current, the one that the CUDA runtime and
//! so PyTorch uses, and leaves the thread with the context that it had.

#![allow(unsafe_code)]

mod lazy;

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use cust::sys;

use crate::book::{Book, check_size};
use crate::driver::{Access, Device, Driver, DriverError, Handle, MemInfo};

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
pub fn missing_symbols() -> Result<Vec<&'static str>> {
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

/// Puts a thread's context back.
struct Back(sys::CUcontext);

impl Drop for Back {
    fn drop(&mut self) {
        // SAFETY: the context was current on this thread a moment ago.
        if let Err(error) = unsafe { cu!(cuCtxSetCurrent(self.0)) } {
            // The call's own result stands: losing it would lose what it created.
            tracing::error!(%error, "this thread's CUDA context could not be put back");
        }
    }
}

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
        let mut was = std::ptr::null_mut();
        // SAFETY: `was` is valid for a write.
        unsafe { cu!(cuCtxGetCurrent(&mut was))? };
        if was == self.context {
            return f();
        }
        let _back = Back(was);
        // SAFETY: `retain` keeps the context alive.
        unsafe { cu!(cuCtxSetCurrent(self.context))? };
        f()
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

/// One GPU. Open it with [`open`](crate::open), which keeps it.
#[derive(Debug)]
pub struct Cuda {
    ordinal: u32,
    primary: Primary,
    granularity: u64,
    /// Process that opened it. CUDA does not survive a fork, and the book's lock may not either.
    owner: u32,
    book: Mutex<Book>,
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
        Ok(Cuda {
            ordinal,
            primary,
            granularity: granularity as u64,
            owner: std::process::id(),
            book: Mutex::default(),
            stream: OnceLock::new(),
        })
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses in a fork of the process that opened the device. Asked where a caller may begin, not in every call: whoever has
    /// a range asks before (it costs a system call), and CUDA itself refuses all of them in a fork.
    fn enter(&self, call: &'static str) -> Result<()> {
        match self.owner == std::process::id() {
            true => Ok(()),
            false => Err(DriverError::Forked { call, owner: self.owner }),
        }
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

// The book is asked before each call, and no lock is held across it: freeing a range takes 80 ms on an H200, during which
// another group may map. What a call ends is out of the book while the call lasts and back in it if the call fails.
impl Driver for Cuda {
    fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn reserve(&self, bytes: u64) -> Result<usize> {
        const CALL: &str = "cuMemAddressReserve";
        self.enter(CALL)?;
        check_size(CALL, bytes, self.granularity)?;
        let mut address = 0;
        self.primary.with(|| {
            // SAFETY: `address` is valid for a write; no address is asked for.
            unsafe { cu!(cuMemAddressReserve(&mut address, bytes as usize, 0, 0, 0); bytes) }
        })?;
        let address = address as usize;
        self.book().put_range(address, bytes);
        Ok(address)
    }

    fn free(&self, address: usize, bytes: u64) -> Result<()> {
        self.book().take_range("cuMemAddressFree", address, bytes)?;
        // SAFETY: this is one whole reservation of ours with nothing mapped in it.
        let freed = self.primary.with(|| unsafe { cu!(cuMemAddressFree(address as u64, bytes as usize)) });
        if freed.is_err() {
            self.book().put_range(address, bytes);
        }
        freed
    }

    fn create(&self, bytes: u64) -> Result<Handle> {
        check_size("cuMemCreate", bytes, self.granularity)?;
        let mut raw = 0;
        let wanted = prop(self.primary.device);
        // SAFETY: both pointers are valid for the call.
        self.primary.with(|| unsafe { cu!(cuMemCreate(&mut raw, bytes as usize, &wanted, 0); bytes) })?;
        let handle = Handle::from_raw(raw);
        self.book().add_handle(handle, bytes);
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<()> {
        let held = self.book().take_handle("cuMemRelease", handle)?;
        // SAFETY: the handle is ours, and nobody else can release it now.
        let released = self.primary.with(|| unsafe { cu!(cuMemRelease(handle.raw())) });
        if released.is_err() {
            self.book().put_handle(handle, held);
        }
        released
    }

    fn share(&self, handle: Handle) -> Result<()> {
        self.book().share("share", handle)
    }

    fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<()> {
        self.book().add_mapping("cuMemMap", address, bytes, handle)?;
        let mapped = self.primary.with(|| {
            // SAFETY: a hole in a reservation of ours, and a handle of ours that has this size.
            unsafe { cu!(cuMemMap(address as u64, bytes as usize, 0, handle.raw(), 0); bytes) }
        });
        if mapped.is_err() {
            self.book().take_mapping("cuMemMap", address, bytes)?;
        }
        mapped
    }

    fn set_access(&self, address: usize, bytes: u64, access: Access) -> Result<()> {
        self.book().check_access("cuMemSetAccess", address, bytes, access)?;
        let flags = match access {
            Access::ReadWrite => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            Access::Read => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
        };
        let wanted = sys::CUmemAccessDesc { location: location(self.primary.device), flags };
        self.primary.with(|| {
            // SAFETY: exactly one mapping of ours; one descriptor is passed.
            unsafe { cu!(cuMemSetAccess(address as u64, bytes as usize, &wanted, 1); bytes) }
        })?;
        self.book().opened(address, access);
        Ok(())
    }

    fn clear(&self, mappings: &[(usize, u64)]) -> Result<()> {
        self.book().check_writable("cuMemsetD8Async", mappings)?;
        self.primary.with(|| {
            let stream = self.stream()?;
            let mut queued = Ok(());
            for &(address, bytes) in mappings {
                // SAFETY: exactly one mapping of ours, open for writing, which its owner keeps until this returns.
                queued = unsafe { cu!(cuMemsetD8Async(address as u64, 0, bytes as usize, stream)) };
                if queued.is_err() {
                    break;
                }
            }
            // SAFETY: the stream is ours. What was queued is waited for in any case: it writes to the mappings.
            let waited = unsafe { cu!(cuStreamSynchronize(stream)) };
            queued.and(waited)
        })
    }

    fn unmap(&self, address: usize, bytes: u64) -> Result<()> {
        let mapping = self.book().take_mapping("cuMemUnmap", address, bytes)?;
        // SAFETY: exactly one mapping of ours, which nobody else can unmap now.
        let unmapped = self.primary.with(|| unsafe { cu!(cuMemUnmap(address as u64, bytes as usize)) });
        if unmapped.is_err() {
            self.book().put_mapping(address, mapping);
        }
        unmapped
    }

    fn mem_info(&self) -> Result<MemInfo> {
        self.enter("cuMemGetInfo")?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid for writes.
        self.primary.with(|| unsafe { cu!(cuMemGetInfo_v2(&mut free, &mut total)) })?;
        Ok(MemInfo { free: free as u64, total: total as u64 })
    }

    fn synchronise(&self) -> Result<()> {
        self.enter("cuCtxSynchronize")?;
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
            // Where there is a driver, tests/cuda.rs is the test.
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
