//! Run-time binding of the HIP runtime, `libamdhip64`: what we use of it, declared after its public header.
//!
//! Source: `projects/hip/include/hip/hip_runtime_api.h` of ROCm/rocm-systems at 003a5d106dc3 (HIP 7), against the headers of HIP
//! 5.2.3 and the reference pages of HIP 5.3.2, 5.4.4 and 6.4.2. Signatures and values are the same in all of them, and so are the
//! structs since 5.3: `hipMemAllocationProp` of 5.2 has its fields in another order (see [`OLDEST`]).
//!
//! An enum is a C `int` here, which any value may be, and a pointer that is never followed here is a `usize`.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use libloading::Library;
use libloading::os::unix;

use crate::driver::DriverError;

/// The oldest runtime with these structs, as `hipRuntimeGetVersion` tells it: major x 10,000,000 + minor x 100,000 + patch.
pub(super) const OLDEST: c_int = 50_300_000;

/// `hipErrorOutOfMemory`.
pub(super) const OUT_OF_MEMORY: c_int = 2;

/// `hipMemAllocationTypePinned`.
pub(super) const PINNED: c_int = 1;
/// `hipMemHandleTypeNone`.
pub(super) const NOT_SHARED: c_int = 0;
/// `hipMemLocationTypeDevice`.
pub(super) const ON_DEVICE: c_int = 1;
/// `hipMemAllocationGranularityRecommended`.
pub(super) const RECOMMENDED: c_int = 1;
/// `hipMemAccessFlagsProtRead`.
pub(super) const READ: c_int = 1;
/// `hipMemAccessFlagsProtReadWrite`.
pub(super) const READ_WRITE: c_int = 3;
/// `hipStreamNonBlocking`.
pub(super) const NON_BLOCKING: c_uint = 1;

/// `hipMemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Location {
    pub kind: c_int,
    pub id: c_int,
}

/// `hipMemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AccessDesc {
    pub location: Location,
    pub flags: c_int,
}

/// `hipMemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AllocationProp {
    pub kind: c_int,
    pub requested_handle: c_int,
    pub location: Location,
    pub win32_metadata: *const c_void,
    pub compression: c_uchar,
    pub gpu_direct_rdma: c_uchar,
    pub usage: u16,
}

/// `hipMemGenericAllocationHandle_t`: points at what only the runtime knows.
pub(super) type AllocationHandle = usize;
/// `hipStream_t`, likewise.
pub(super) type Stream = usize;

/// `hipUUID`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Uuid {
    pub bytes: [c_char; 16],
}

macro_rules! functions {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $out:ty;)*) => {
        /// The functions of the runtime that this crate needs, under their own names.
        #[allow(non_snake_case)]
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub $name: unsafe extern "C" fn($($ty),*) -> $out,)*
            /// They are valid as long as it is loaded.
            _library: Library,
        }

        impl Functions {
            #[allow(non_snake_case)]
            fn of(library: Library) -> Result<Self, DriverError> {
                $(
                    let $name = {
                        type Function = unsafe extern "C" fn($($ty),*) -> $out;
                        // SAFETY: this is the function's signature, save that an enum is read as an int.
                        let found = unsafe { library.get::<Function>(concat!(stringify!($name), "\0")) };
                        *found.map_err(|_| DriverError::NoSymbol { call: stringify!($name) })?
                    };
                )*
                Ok(Functions { $($name,)* _library: library })
            }
        }
    };
}

functions! {
    fn hipRuntimeGetVersion(version: *mut c_int) -> c_int;
    fn hipGetErrorName(code: c_int) -> *const c_char;
    fn hipInit(flags: c_uint) -> c_int;
    fn hipGetDevice(device: *mut c_int) -> c_int;
    fn hipSetDevice(device: c_int) -> c_int;
    fn hipDeviceGetUuid(uuid: *mut Uuid, device: c_int) -> c_int;
    fn hipDeviceSynchronize() -> c_int;
    fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> c_int;
    fn hipMemGetAllocationGranularity(granularity: *mut usize, prop: *const AllocationProp, option: c_int) -> c_int;
    fn hipMemAddressReserve(address: *mut usize, bytes: usize, alignment: usize, wanted: usize, flags: c_ulonglong) -> c_int;
    fn hipMemAddressFree(address: usize, bytes: usize) -> c_int;
    fn hipMemCreate(handle: *mut AllocationHandle, bytes: usize, prop: *const AllocationProp, flags: c_ulonglong) -> c_int;
    fn hipMemRelease(handle: AllocationHandle) -> c_int;
    fn hipMemMap(address: usize, bytes: usize, offset: usize, handle: AllocationHandle, flags: c_ulonglong) -> c_int;
    fn hipMemUnmap(address: usize, bytes: usize) -> c_int;
    fn hipMemSetAccess(address: usize, bytes: usize, desc: *const AccessDesc, count: usize) -> c_int;
    fn hipStreamCreateWithFlags(stream: *mut Stream, flags: c_uint) -> c_int;
    fn hipStreamSynchronize(stream: Stream) -> c_int;
    fn hipMemsetD8Async(address: usize, value: c_uchar, bytes: usize, stream: Stream) -> c_int;
}

impl Functions {
    /// The runtime's name for a code.
    pub fn name_of(&self, code: c_int) -> String {
        // SAFETY: takes any code; returns null or a static string that ends in NUL.
        let name = unsafe { (self.hipGetErrorName)(code) };
        if name.is_null() {
            return "a code that the runtime cannot name".to_owned();
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

/// The runtime's functions, bound on first use. Starts nothing. Fails with `NoDriver` or `NoSymbol`.
pub(super) fn functions() -> Result<&'static Functions, DriverError> {
    static FUNCTIONS: OnceLock<Result<Functions, DriverError>> = OnceLock::new();
    FUNCTIONS.get_or_init(|| Functions::of(library()?)).as_ref().map_err(Clone::clone)
}

/// The first runtime of these that this process has loaded already, else the first that loads. PyTorch brings a copy of its
/// own, and knows nothing of memory that another copy has mapped.
fn library() -> Result<Library, DriverError> {
    const NAMES: [&str; 4] = ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"];
    const RTLD_NOLOAD: c_int = 4; // Linux's dlfcn.h
    // SAFETY: loads nothing.
    let loaded = |name| unsafe { unix::Library::open(Some(name), unix::RTLD_LAZY | RTLD_NOLOAD) }.ok();
    if let Some(library) = NAMES.into_iter().find_map(loaded) {
        return Ok(library.into());
    }
    let mut why = Vec::new();
    for name in NAMES {
        // SAFETY: loading runs the runtime's initialisers, which every HIP program runs.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            // The loader's own words, which begin with the name.
            Err(e) => why.push(e.source().map_or_else(|| e.to_string(), ToString::to_string)),
        }
    }
    Err(DriverError::NoDriver { why: why.join("; ") })
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::process::Command;

    use super::*;

    /// Size and offsets of each struct, and the values, as a C compiler has them from the same declarations as the fake runtime.
    const PROGRAM: &str = r#"
#include <stdio.h>
#include "hip.h"
#define OF(t, f) offsetof(t, f)
int main(void) {
  printf("%zu %zu %zu\n", sizeof(hipMemLocation), OF(hipMemLocation, type), OF(hipMemLocation, id));
  printf("%zu %zu %zu\n", sizeof(hipMemAccessDesc), OF(hipMemAccessDesc, location), OF(hipMemAccessDesc, flags));
  printf("%zu %zu %zu %zu %zu %zu %zu %zu\n", sizeof(hipMemAllocationProp), OF(hipMemAllocationProp, type),
         OF(hipMemAllocationProp, requestedHandleType), OF(hipMemAllocationProp, location),
         OF(hipMemAllocationProp, win32HandleMetaData), OF(hipMemAllocationProp, allocFlags.compressionType),
         OF(hipMemAllocationProp, allocFlags.gpuDirectRDMACapable), OF(hipMemAllocationProp, allocFlags.usage));
  printf("%zu %zu %zu %zu\n", sizeof(hipError_t), sizeof(hipDeviceptr_t), sizeof(hipMemGenericAllocationHandle_t), sizeof(hipStream_t));
  printf("%d %d %d %d %d %d %d %d\n", hipErrorOutOfMemory, hipMemAllocationTypePinned, hipMemHandleTypeNone, hipMemLocationTypeDevice,
         hipMemAllocationGranularityRecommended, hipMemAccessFlagsProtRead, hipMemAccessFlagsProtReadWrite, hipStreamNonBlocking);
}
"#;

    fn of_c() -> String {
        let directory = std::env::temp_dir().join(format!("kvcached-hip-layout-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let (source, program) = (directory.join("layout.c"), directory.join("layout"));
        std::fs::write(&source, PROGRAM).unwrap();
        let mut cc = Command::new("cc");
        cc.arg("-I").arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_hip"));
        assert!(cc.arg("-o").arg(&program).arg(&source).status().unwrap().success());
        let output = Command::new(&program).output().unwrap().stdout;
        std::fs::remove_dir_all(&directory).unwrap();
        String::from_utf8(output).unwrap()
    }

    #[test]
    fn structs_and_values_are_those_of_c() {
        let ours: [&[usize]; 5] = [
            &[size_of::<Location>(), offset_of!(Location, kind), offset_of!(Location, id)],
            &[size_of::<AccessDesc>(), offset_of!(AccessDesc, location), offset_of!(AccessDesc, flags)],
            &[
                size_of::<AllocationProp>(),
                offset_of!(AllocationProp, kind),
                offset_of!(AllocationProp, requested_handle),
                offset_of!(AllocationProp, location),
                offset_of!(AllocationProp, win32_metadata),
                offset_of!(AllocationProp, compression),
                offset_of!(AllocationProp, gpu_direct_rdma),
                offset_of!(AllocationProp, usage),
            ],
            &[size_of::<c_int>(), size_of::<usize>(), size_of::<AllocationHandle>(), size_of::<Stream>()],
            &[
                OUT_OF_MEMORY,
                PINNED,
                NOT_SHARED,
                ON_DEVICE,
                RECOMMENDED,
                READ,
                READ_WRITE,
                NON_BLOCKING as c_int,
            ]
            .map(|value| value as usize),
        ];
        let ours = ours.map(|row| row.iter().map(usize::to_string).collect::<Vec<_>>().join(" "));
        assert_eq!(ours.join("\n"), of_c().trim_end());
        // The header's own, so that hip.h is not believed either: HIP 7's on x86-64 Linux.
        assert_eq!(ours[..3], ["8 0 4", "12 0 8", "32 0 4 8 16 24 25 26"]);
    }
}
