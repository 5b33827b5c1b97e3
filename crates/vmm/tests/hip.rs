//! The HIP backend against a runtime of our own (fake_hip/): no AMD GPU is needed, and none was ever there.
//!
//! A process binds one runtime for good, so each test runs in a process of its own that finds the fake one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use kvcached_vmm::{
    Access, Device, Driver, DriverError, FTensor, Geometry, Layout, MemInfo, Options, Shape, Target,
    Unbacked, VmmError, available, open,
};
use libloading::Library;

const MIB: u64 = 1 << 20;
/// The fake runtime's recommended granularity.
const PAGE: u64 = 2 * MIB;
const TOTAL: [u64; 2] = [64 * MIB, 128 * MIB];

/// Builds a runtime without `hipMemUnmap`: it is there under another name.
const LACKING: &str = "-DhipMemUnmap=renamed";

/// Compiles the fake runtime to `directory/name`.
fn compile(directory: &Path, name: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_hip/runtime.c");
    let library = directory.join(name);
    std::fs::create_dir_all(directory).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]).args(flags);
    assert!(cc.arg("-o").arg(&library).arg(source).status().unwrap().success());
    library
}

fn directory(test: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_hip").join(test)
}

/// Runs this very test again, in a process that finds libraries in `directory` first.
fn in_child(test: &str, directory: &Path, variables: &[(&str, &str)]) {
    let mut path = directory.as_os_str().to_owned();
    if let Some(before) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(before);
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture"]).env("LD_LIBRARY_PATH", path).env("FAKE_HIP", directory);
    let output = child.envs(variables.iter().copied()).output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success() && said[0].contains("1 passed"), "{}{}", said[0], said[1]);
}

/// The directory that the child's parent made for it; none in a parent.
fn given() -> Option<PathBuf> {
    std::env::var_os("FAKE_HIP").map(PathBuf::from)
}

/// The fake runtime as it is in this child; none in a parent, whose child is then done.
fn fake(test: &str) -> Option<Fake> {
    if given().is_none() {
        let directory = directory(test);
        compile(&directory, "libamdhip64.so.7", &["-Wl,-soname,libamdhip64.so.7"]);
        in_child(test, &directory, &[]);
        return None;
    }
    // SAFETY: the fake runtime has no initialisers.
    Some(Fake(unsafe { Library::new("libamdhip64.so.7") }.unwrap()))
}

/// What can be asked and ordered of the fake runtime.
struct Fake(Library);

/// Things that the fake runtime has given out.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    ranges: c_int,
    handles: c_int,
    mappings: c_int,
}

impl Fake {
    /// The call of this name fails with `code`, once, after `more` that do not.
    fn fail(&self, call: &str, more: c_int, code: c_int) {
        let call = CString::new(call).unwrap();
        // SAFETY: runtime.c has this signature; the name lives through the call.
        unsafe {
            let f = self.0.get::<unsafe extern "C" fn(*const c_char, c_int, c_int)>("fake_fail").unwrap();
            f(call.as_ptr(), more, code);
        }
    }

    fn calls(&self, call: &str) -> c_int {
        let call = CString::new(call).unwrap();
        // SAFETY: as above.
        unsafe {
            self.0.get::<unsafe extern "C" fn(*const c_char) -> c_int>("fake_calls").unwrap()(call.as_ptr())
        }
    }

    /// What is out. No demand of the runtime was broken, and nothing is queued.
    fn counts(&self) -> Counts {
        let mut out = [0; 5];
        // SAFETY: as above; it writes five numbers.
        unsafe {
            self.0.get::<unsafe extern "C" fn(*mut c_int)>("fake_counts").unwrap()(out.as_mut_ptr());
        }
        let [ranges, handles, mappings, queued, complaints] = out;
        assert_eq!((queued, complaints), (0, 0), "queued memsets, complaints");
        Counts { ranges, handles, mappings }
    }

    /// What the device may do with the mapping at `address`: 1 reads, 3 reads and writes.
    fn access(&self, address: usize) -> c_int {
        // SAFETY: as above; the address is a key only.
        unsafe { self.0.get::<unsafe extern "C" fn(usize) -> c_int>("fake_access").unwrap()(address) }
    }

    fn select(&self, device: c_int) {
        // SAFETY: as above.
        let code =
            unsafe { self.0.get::<unsafe extern "C" fn(c_int) -> c_int>("hipSetDevice").unwrap()(device) };
        assert_eq!(code, 0);
    }

    fn selected(&self) -> c_int {
        let mut device = -1;
        // SAFETY: as above; `device` is valid for a write.
        let code = unsafe {
            self.0.get::<unsafe extern "C" fn(*mut c_int) -> c_int>("hipGetDevice").unwrap()(&mut device)
        };
        assert_eq!(code, 0);
        device
    }
}

/// Whether all of a mapping reads as `byte`.
fn reads(address: usize, bytes: u64, byte: u8) -> bool {
    // SAFETY: the fake runtime's memory is ordinary memory, mapped here and open.
    (0..bytes as usize).all(|i| unsafe { (address as *const u8).add(i).read_volatile() } == byte)
}

fn fill(address: usize, bytes: u64, byte: u8) {
    // SAFETY: as above, open for writing.
    unsafe { (address as *mut u8).write_bytes(byte, bytes as usize) };
}

/// A tensor of two buffers and pages of 4 MiB: one handle, or one a buffer.
fn tensor(driver: Arc<dyn Driver>, pages: u64, layout: Layout, unbacked: Unbacked) -> FTensor {
    let target = Target { page_bytes: Some(2 * PAGE), layout, ..Target::new(driver.granularity()) };
    let geometry = Geometry::solve(Shape::new(2, MIB, 16), target).unwrap();
    let options = Options { unbacked, ..Options::default() };
    FTensor::reserve(driver, geometry, pages * u64::from(geometry.blocks_per_page()), options).unwrap()
}

#[test]
fn without_a_library_every_way_in_says_so() {
    if available(Device::Hip(0)).is_ok() {
        return; // a machine that has one
    }
    let says_so = |error: DriverError| {
        let DriverError::NoDriver { why } = &error else { panic!("{error:?}") };
        for name in ["libamdhip64.so:", "libamdhip64.so.7:", "libamdhip64.so.6:", "libamdhip64.so.5:"] {
            assert!(why.contains(name), "{why}");
        }
    };
    says_so(available(Device::Hip(0)).unwrap_err());
    says_so(open(Device::Hip(0)).unwrap_err());
    says_so(open(Device::Hip(u32::MAX)).unwrap_err());
}

#[test]
fn a_library_that_lacks_a_function_is_named() {
    const TEST: &str = "a_library_that_lacks_a_function_is_named";
    if given().is_none() {
        compile(&directory(TEST), "libamdhip64.so", &[LACKING]);
        return in_child(TEST, &directory(TEST), &[]);
    }
    let lacks = DriverError::NoSymbol { call: "hipMemUnmap" };
    assert_eq!(available(Device::Hip(0)), Err(lacks.clone()));
    assert_eq!(open(Device::Hip(0)).unwrap_err(), lacks);
}

/// The structs of HIP 5.2 are others: it may not even be started.
#[test]
fn a_runtime_that_is_too_old_is_refused() {
    const TEST: &str = "a_runtime_that_is_too_old_is_refused";
    if given().is_none() {
        compile(&directory(TEST), "libamdhip64.so.5", &[]);
        return in_child(TEST, &directory(TEST), &[("FAKE_HIP_VERSION", "50221153")]);
    }
    // SAFETY: the fake runtime has no initialisers.
    let fake = Fake(unsafe { Library::new("libamdhip64.so.5") }.unwrap());
    available(Device::Hip(0)).unwrap();
    let said = open(Device::Hip(0)).unwrap_err().to_string();
    assert_eq!(said, "no driver: libamdhip64 is of HIP 5.2, and 5.3 or later is needed");
    assert_eq!(fake.calls("hipInit"), 0);
}

/// PyTorch for ROCm brings its own runtime, under any name and place.
#[test]
fn the_runtime_that_a_process_has_is_the_one_that_is_used() {
    const TEST: &str = "the_runtime_that_a_process_has_is_the_one_that_is_used";
    let torch = directory(TEST).join("torch");
    if given().is_none() {
        compile(&torch, "theirs.so", &["-Wl,-soname,libamdhip64.so.6"]);
        compile(&directory(TEST), "libamdhip64.so", &[LACKING]);
        return in_child(TEST, &directory(TEST), &[]);
    }
    // SAFETY: the fake runtime has no initialisers.
    let theirs = Fake(unsafe { Library::new(torch.join("theirs.so")) }.unwrap());
    available(Device::Hip(0)).unwrap(); // the other one lacks a function
    open(Device::Hip(0)).unwrap();
    assert_eq!(theirs.calls("hipInit"), 1);
}

#[test]
fn pages_come_clean_and_go_back_whole() {
    let Some(fake) = fake("pages_come_clean_and_go_back_whole") else { return };
    let driver = open(Device::Hip(0)).unwrap();
    assert!(Arc::ptr_eq(&driver, &open(Device::Hip(0)).unwrap()));
    assert_eq!((driver.device(), driver.granularity()), (Device::Hip(0), PAGE));
    for (layout, handles) in [(Layout::Chunked, 1), (Layout::PerLayer, 2)] {
        let tensor = tensor(driver.clone(), 8, layout, Unbacked::Hole);
        let (buffer, _) = tensor.buffer(1).unwrap();
        for _ in 0..2 {
            assert_eq!(tensor.map(&[0, 5]), Ok(vec![0, 5]));
            assert_eq!(tensor.map(&[5]), Ok(vec![]));
            assert_eq!(driver.mem_info(), Ok(MemInfo { free: TOTAL[0] - 4 * PAGE, total: TOTAL[0] }));
            assert_eq!(fake.counts(), Counts { ranges: 1, handles: 2 * handles, mappings: 2 * handles });
            assert!(reads(buffer, MIB, 0), "the fake's fresh memory is all ones");
            fill(buffer, MIB, 7);
            tensor.unmap(&[0, 5]).unwrap();
            assert_eq!(driver.mem_info().unwrap().free, TOTAL[0]);
        }
        tensor.map(&[1]).unwrap();
        drop(tensor);
        assert_eq!(fake.counts(), Counts::default());
        assert_eq!(driver.mem_info().unwrap().free, TOTAL[0]);
    }
    assert_eq!(fake.calls("hipStreamCreateWithFlags"), 1);
    assert_eq!(fake.calls("hipDeviceSynchronize"), 2, "a range waits for the device when it ends");
}

#[test]
fn pages_without_memory_read_as_zeros() {
    let Some(fake) = fake("pages_without_memory_read_as_zeros") else { return };
    let driver = open(Device::Hip(1)).unwrap();
    for layout in [Layout::Chunked, Layout::PerLayer] {
        let tensor = tensor(driver.clone(), 4, layout, Unbacked::Zero);
        let (buffer, _) = tensor.buffer(1).unwrap();
        assert!(reads(buffer, MIB, 0) && fake.access(buffer) == 1);
        tensor.map(&[0]).unwrap();
        assert!(reads(buffer, MIB, 0) && fake.access(buffer) == 3);
        fill(buffer, MIB, 7);
        tensor.unmap(&[0]).unwrap();
        assert!(reads(buffer, MIB, 0) && fake.access(buffer) == 1);
        drop(tensor);
        assert_eq!(fake.counts(), Counts::default());
    }
}

#[test]
fn a_full_gpu_is_pressure_and_leaves_nothing() {
    let Some(fake) = fake("a_full_gpu_is_pressure_and_leaves_nothing") else { return };
    let driver = open(Device::Hip(0)).unwrap();
    let tensor = tensor(driver.clone(), 32, Layout::Chunked, Unbacked::Hole);
    let all: Vec<u32> = (0..32).collect();
    let error = tensor.map(&all).unwrap_err();
    assert!(matches!(error, VmmError::OutOfMemory { page: Some(16), .. }), "{error:?}");
    assert_eq!(error.to_string(), "page 16: out of memory: hipMemCreate of 4194304 bytes (code 2)");
    assert_eq!((tensor.mapped_bytes(), tensor.quarantined_pages()), (0, vec![]));
    assert_eq!(fake.counts(), Counts { ranges: 1, ..Counts::default() });
    tensor.map(&all[..16]).unwrap();
    assert_eq!(driver.mem_info().unwrap().free, 0);
}

#[test]
fn calls_select_their_device_and_put_back_the_threads_own() {
    let Some(fake) = fake("calls_select_their_device_and_put_back_the_threads_own") else { return };
    // The fake demands the right device of every call that depends on it.
    let driver = open(Device::Hip(1)).unwrap();
    assert_eq!((driver.device(), fake.selected()), (Device::Hip(1), 0));
    let every_call = || {
        let (address, handle) = (driver.reserve(PAGE).unwrap(), driver.create(PAGE).unwrap());
        driver.map(address, PAGE, handle).unwrap();
        driver.set_access(address, PAGE, Access::ReadWrite).unwrap();
        driver.clear(&[(address, PAGE)]).unwrap();
        assert_eq!(driver.mem_info(), Ok(MemInfo { free: TOTAL[1] - PAGE, total: TOTAL[1] }));
        driver.synchronise().unwrap();
        driver.unmap(address, PAGE).unwrap();
        driver.release(handle).unwrap();
        driver.free(address, PAGE).unwrap();
    };
    every_call();
    assert_eq!(fake.selected(), 0);
    std::thread::scope(|s| s.spawn(every_call).join().unwrap()); // a thread that never chose one
    fake.select(1);
    let before = fake.calls("hipSetDevice");
    every_call();
    assert_eq!((fake.selected(), fake.calls("hipSetDevice")), (1, before), "nothing to select");
    assert_eq!(fake.counts(), Counts::default());

    // What cannot be put back is not the call's failure: what it created would be lost.
    fake.select(0);
    fake.fail("hipSetDevice", 1, 401);
    let handle = driver.create(PAGE).unwrap();
    assert_eq!(fake.selected(), 1);
    driver.release(handle).unwrap();
    // A device that cannot be selected is.
    fake.select(0);
    fake.fail("hipSetDevice", 0, 401);
    assert!(driver.create(PAGE).unwrap_err().to_string().starts_with("hipSetDevice failed"));
    assert_eq!((fake.selected(), fake.counts()), (0, Counts::default()));
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let Some(fake) = fake("a_device_that_is_not_there_is_named") else { return };
    let said = open(Device::Hip(2)).unwrap_err().to_string();
    assert_eq!(said, "hipSetDevice failed: hipErrorInvalidDevice (code 101)");
    let said = open(Device::Hip(u32::MAX)).unwrap_err().to_string();
    assert_eq!(said, "hipSetDevice refused: no such device: hip:4294967295");
    fake.fail("hipInit", 0, 100);
    let said = open(Device::Hip(0)).unwrap_err().to_string();
    assert_eq!(said, "hipInit failed: hipErrorUnknown (code 100)");
    open(Device::Hip(0)).unwrap();
    assert_eq!(fake.selected(), 0);
}

/// Every call fails once, typed, and then does what it did not: what it was to end is still there.
#[test]
fn a_failed_call_is_named_and_has_changed_nothing() {
    let Some(fake) = fake("a_failed_call_is_named_and_has_changed_nothing") else { return };
    let driver = open(Device::Hip(0)).unwrap();
    let failing = |call: &'static str, f: &dyn Fn() -> Result<(), DriverError>| {
        fake.fail(call, 0, 401);
        let name = "hipErrorIllegalState".to_owned();
        assert_eq!(f(), Err(DriverError::Call { call, code: 401, name }));
    };
    let oom = |call: &'static str, f: &dyn Fn() -> Result<(), DriverError>| {
        fake.fail(call, 0, 2);
        assert_eq!(f(), Err(DriverError::OutOfMemory { call, bytes: PAGE, code: 2 }));
    };
    failing("hipGetDevice", &|| driver.reserve(PAGE).map(drop));
    failing("hipMemAddressReserve", &|| driver.reserve(PAGE).map(drop));
    oom("hipMemAddressReserve", &|| driver.reserve(PAGE).map(drop));
    failing("hipMemCreate", &|| driver.create(PAGE).map(drop));
    oom("hipMemCreate", &|| driver.create(PAGE).map(drop));
    assert_eq!(fake.counts(), Counts::default());
    let (address, handle) = (driver.reserve(PAGE).unwrap(), driver.create(PAGE).unwrap());
    failing("hipMemMap", &|| driver.map(address, PAGE, handle));
    oom("hipMemMap", &|| driver.map(address, PAGE, handle));
    driver.map(address, PAGE, handle).unwrap();
    let open_it = || driver.set_access(address, PAGE, Access::ReadWrite);
    for call in ["hipMemSetAccess", "hipStreamCreateWithFlags", "hipMemsetD8Async", "hipStreamSynchronize"] {
        failing(call, &open_it);
    }
    oom("hipMemSetAccess", &open_it);
    open_it().unwrap();
    assert!(reads(address, PAGE, 0), "it is cleared although clearing it had failed");
    failing("hipMemUnmap", &|| driver.unmap(address, PAGE));
    driver.unmap(address, PAGE).unwrap();
    failing("hipMemRelease", &|| driver.release(handle));
    driver.release(handle).unwrap();
    failing("hipMemAddressFree", &|| driver.free(address, PAGE));
    driver.free(address, PAGE).unwrap();
    failing("hipDeviceGetUuid", &|| driver.identity().map(drop));
    assert_eq!(driver.identity().unwrap(), "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0");
    failing("hipMemGetInfo", &|| driver.mem_info().map(drop));
    failing("hipDeviceSynchronize", &|| driver.synchronise());
    // A code that the runtime has no name for.
    fake.fail("hipMemGetInfo", 0, 4242);
    let said = driver.mem_info().unwrap_err().to_string();
    assert_eq!(said, "hipMemGetInfo failed: a code that the runtime cannot name (code 4242)");
    assert_eq!(fake.counts(), Counts::default());
}

#[test]
fn one_page_of_zeros_is_read_in_many_places_and_cleared_once() {
    let Some(fake) = fake("one_page_of_zeros_is_read_in_many_places_and_cleared_once") else { return };
    let driver = open(Device::Hip(0)).unwrap();
    let (base, zeros) = (driver.reserve(3 * PAGE).unwrap(), driver.create(PAGE).unwrap());
    driver.share(zeros).unwrap();
    let places = [0, 1, 2].map(|i| base + i * PAGE as usize);
    for place in places {
        driver.map(place, PAGE, zeros).unwrap();
        assert_eq!(fake.access(place), 0);
        driver.set_access(place, PAGE, Access::Read).unwrap();
        assert_eq!(fake.access(place), 1);
    }
    assert!(places.into_iter().all(|place| reads(place, PAGE, 0)));
    assert_eq!((fake.calls("hipMemsetD8Async"), fake.calls("hipMemSetAccess")), (1, 4));
    assert!(matches!(driver.set_access(base, PAGE, Access::ReadWrite), Err(DriverError::Misuse { .. })));
    for place in places {
        driver.unmap(place, PAGE).unwrap();
    }
    driver.release(zeros).unwrap();
    driver.free(base, 3 * PAGE).unwrap();
    assert_eq!(fake.counts(), Counts::default());
}

#[test]
fn memory_that_was_open_keeps_its_bytes_until_it_is_cleared() {
    let Some(fake) = fake("memory_that_was_open_keeps_its_bytes_until_it_is_cleared") else { return };
    let driver = open(Device::Hip(0)).unwrap();
    let base = driver.reserve(2 * PAGE).unwrap();
    let handles = [driver.create(PAGE).unwrap(), driver.create(PAGE).unwrap()];
    let mappings = [(base, PAGE), (base + PAGE as usize, PAGE)];
    let map_all = || {
        for ((address, bytes), handle) in mappings.into_iter().zip(handles) {
            driver.map(address, bytes, handle).unwrap();
            driver.set_access(address, bytes, Access::ReadWrite).unwrap();
        }
    };
    map_all();
    assert_eq!(mappings.map(|(address, _)| fake.access(address)), [3, 3]);
    fill(base, 2 * PAGE, 7);
    mappings.iter().for_each(|&(address, bytes)| driver.unmap(address, bytes).unwrap());
    map_all();
    assert!(reads(base, 2 * PAGE, 7));
    // What was queued before the failure is waited for (`counts` would tell).
    fake.fail("hipMemsetD8Async", 1, 1);
    assert!(driver.clear(&mappings).is_err());
    assert!(reads(base, PAGE, 0) && reads(base + PAGE as usize, PAGE, 7));
    fake.counts();
    driver.clear(&mappings).unwrap();
    assert!(reads(base, 2 * PAGE, 0));
}

#[test]
fn what_breaks_a_law_does_not_reach_the_runtime() {
    let Some(fake) = fake("what_breaks_a_law_does_not_reach_the_runtime") else { return };
    let driver = open(Device::Hip(0)).unwrap();
    let (address, handle) = (driver.reserve(2 * PAGE).unwrap(), driver.create(PAGE).unwrap());
    let misuse = |r: Result<(), DriverError>| assert!(matches!(r, Err(DriverError::Misuse { .. })), "{r:?}");
    let before = fake.calls("hipGetDevice"); // each call begins so
    misuse(driver.reserve(PAGE + 4096).map(drop));
    misuse(driver.create(0).map(drop));
    misuse(driver.map(0x1000, PAGE, handle));
    misuse(driver.map(address, 2 * PAGE, handle));
    misuse(driver.set_access(address, PAGE, Access::Read));
    misuse(driver.clear(&[(address, PAGE)]));
    misuse(driver.unmap(address, PAGE));
    misuse(driver.free(address, PAGE));
    assert_eq!(fake.calls("hipGetDevice"), before);
    driver.map(address, PAGE, handle).unwrap();
    misuse(driver.release(handle));
    misuse(driver.free(address, 2 * PAGE));
    driver.unmap(address, PAGE).unwrap();
    driver.release(handle).unwrap();
    misuse(driver.release(handle));
    driver.free(address, 2 * PAGE).unwrap();
    assert_eq!(fake.counts(), Counts::default());
}

#[test]
fn threads_keep_out_of_each_other() {
    let Some(fake) = fake("threads_keep_out_of_each_other") else { return };
    let driver = open(Device::Hip(1)).unwrap();
    std::thread::scope(|s| {
        for thread in 1..=8_u8 {
            let (fake, driver) = (&fake, driver.clone());
            s.spawn(move || {
                fake.select(c_int::from(thread % 2));
                let address = driver.reserve(PAGE).unwrap();
                for _ in 0..8 {
                    let handle = driver.create(PAGE).unwrap();
                    driver.map(address, PAGE, handle).unwrap();
                    driver.set_access(address, PAGE, Access::ReadWrite).unwrap();
                    assert!(reads(address, 4096, 0));
                    fill(address, PAGE, thread);
                    assert!(reads(address, 4096, thread));
                    driver.unmap(address, PAGE).unwrap();
                    driver.release(handle).unwrap();
                }
                driver.free(address, PAGE).unwrap();
                assert_eq!(fake.selected(), c_int::from(thread % 2));
            });
        }
    });
    assert_eq!(fake.counts(), Counts::default());
}
