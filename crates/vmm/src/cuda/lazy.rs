//! Run-time binding of the CUDA driver.
//!
//! `cust_raw` declares the driver API as ordinary extern functions. This module *defines* those we use, and each definition
//! forwards to the function of that name in `libcuda.so.1`, found with dlopen on first use. So the extension has no
//! undefined `cu*` symbol and no DT_NEEDED on libcuda, and loads on a machine that has no NVIDIA driver.
//!
//! It also closes a soundness hole: `CUresult` is a Rust enum generated from the CUDA 11.4 header, and a newer driver
//! returns codes that it does not list. So a definition answers success or `CUDA_ERROR_UNKNOWN` only, and `last_code`
//! keeps the number.

use std::cell::Cell;
use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong};
use std::sync::OnceLock;

use cust::sys::*;
use libloading::Library;

/// `last_code` where there is no library. The driver's own codes are not negative.
pub(super) const NO_LIBRARY: c_int = -1;
/// `last_code` where the library has no such function.
pub(super) const NO_SYMBOL: c_int = -2;

thread_local!(static LAST_CODE: Cell<c_int> = const { Cell::new(0) });

/// The raw code that this thread's latest driver call returned.
pub(super) fn last_code() -> c_int {
    LAST_CODE.get()
}

/// The driver library, or why it cannot be had.
pub(super) fn library() -> Result<&'static Library, &'static str> {
    static LIB: OnceLock<Result<Library, String>> = OnceLock::new();
    LIB.get_or_init(|| {
        // SAFETY: loading runs the driver's initialisers, which every CUDA program runs.
        unsafe { Library::new("libcuda.so.1") }.map_err(|e| match e.source() {
            Some(why) => why.to_string(), // the loader's own words
            None => e.to_string(),
        })
    })
    .as_ref()
    .map_err(String::as_str)
}

/// The driver's name for a code, whether or not `CUresult` lists it.
pub(super) fn name_of(code: c_int) -> String {
    type Fn = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
    let unnamed = || "a code that the driver cannot name".to_owned();
    let Ok(lib) = library() else { return unnamed() };
    let mut name = std::ptr::null();
    // SAFETY: the symbol has this signature, save that the enum is read as an int, which any code may be; `name` is valid
    // for a write; what the driver writes is null or a static string that ends in NUL.
    unsafe {
        match lib.get::<Fn>("cuGetErrorName\0") {
            Ok(get) if get(code, &mut name) == 0 && !name.is_null() => {
                CStr::from_ptr(name).to_string_lossy().into_owned()
            }
            _ => unnamed(),
        }
    }
}

fn answer(code: c_int) -> CUresult {
    LAST_CODE.set(code);
    if code == 0 { CUresult::CUDA_SUCCESS } else { CUresult::CUDA_ERROR_UNKNOWN }
}

/// Gives a symbol hidden visibility: `no_mangle` alone would export it from the extension, where it could stand in for the
/// real driver's.
macro_rules! hide {
    ($name:ident) => {
        #[cfg(target_os = "linux")]
        std::arch::global_asm!(concat!(".globl ", stringify!($name), "\n.hidden ", stringify!($name)));
    };
}

macro_rules! forward {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?);)*) => {
        $(
            hide!($name);
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> CUresult {
                // The signature is the one that cust_raw declares, or this does not compile.
                const _: unsafe extern "C" fn($($ty),*) -> CUresult = cust::sys::$name;
                type Fn = unsafe extern "C" fn($($ty),*) -> c_int;
                static ADDRESS: OnceLock<Option<Fn>> = OnceLock::new();
                let Ok(lib) = library() else {
                    return answer(NO_LIBRARY);
                };
                // SAFETY: the symbol has this signature, save that the enum is read as an int.
                let address = ADDRESS.get_or_init(|| unsafe {
                    lib.get::<Fn>(concat!(stringify!($name), "\0")).ok().map(|s| *s)
                });
                match address {
                    // SAFETY: the caller keeps this function's contract.
                    Some(f) => answer(unsafe { f($($arg),*) }),
                    None => answer(NO_SYMBOL),
                }
            }
        )*

        /// Every driver symbol that this crate needs.
        pub(super) const SYMBOLS: &[&str] = &[$(stringify!($name)),*];
    };
}

forward! {
    fn cuInit(flags: c_uint);
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, dev: CUdevice);
    fn cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice);
    fn cuCtxGetCurrent(pctx: *mut CUcontext);
    fn cuCtxSetCurrent(ctx: CUcontext);
    fn cuCtxSynchronize();
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAddressReserve(ptr: *mut CUdeviceptr, size: usize, align: usize, addr: CUdeviceptr, flags: c_ulonglong);
    fn cuMemAddressFree(ptr: CUdeviceptr, size: usize);
    fn cuMemCreate(handle: *mut CUmemGenericAllocationHandle, size: usize, prop: *const CUmemAllocationProp, flags: c_ulonglong);
    fn cuMemRelease(handle: CUmemGenericAllocationHandle);
    fn cuMemMap(ptr: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong);
    fn cuMemUnmap(ptr: CUdeviceptr, size: usize);
    fn cuMemSetAccess(ptr: CUdeviceptr, size: usize, desc: *const CUmemAccessDesc, count: usize);
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuMemsetD8Async(ptr: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream);
    fn cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const CUmemAllocationProp, option: CUmemAllocationGranularity_flags);
}
