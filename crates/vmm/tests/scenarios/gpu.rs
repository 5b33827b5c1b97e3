//! A real GPU: ignored tests, to be run by hand on a machine that has one.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use kvcached_vmm::{
    Device, Driver, FTensor, Geometry, Options, Shape, Target, Unbacked, VmmError, available, open,
};
use libloading::Library;

use super::faults::{Extent, sweep};
use super::ground::Ground;
use super::setup::{Cache, Setup, alone};
use super::threads::share;

/// What a driver may keep for itself, bytes.
const SLACK: u64 = 64 << 20;
const GIB: u64 = 1 << 30;

/// A GPU, and its bytes through the driver's copies.
#[derive(Debug)]
pub struct Gpu {
    pub driver: Arc<dyn Driver>,
    library: Library,
    context: usize,
}

impl Gpu {
    /// Fails where there is none of this ordinal.
    fn open(ordinal: u32) -> Result<Arc<Self>, kvcached_vmm::DriverError> {
        let driver = open(Device::Cuda(ordinal))?;
        // SAFETY: the driver library, which is loaded already.
        let library = unsafe { Library::new("libcuda.so.1") }.unwrap();
        let (mut device, mut context): (c_int, *mut c_void) = (0, std::ptr::null_mut());
        // SAFETY: the signatures are the driver's; both pointers are valid for a write.
        unsafe {
            type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
            type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
            let get = library.get::<Get>("cuDeviceGet\0").unwrap();
            assert_eq!(get(&mut device, ordinal as c_int), 0);
            let retain = library.get::<Retain>("cuDevicePrimaryCtxRetain\0").unwrap();
            assert_eq!(retain(&mut context, device), 0);
        }
        Ok(Arc::new(Gpu { driver, library, context: context as usize }))
    }

    fn first() -> Arc<Self> {
        Gpu::open(0).unwrap()
    }

    fn free_bytes(&self) -> u64 {
        self.driver.mem_info().unwrap().free
    }

    pub fn word(&self, address: usize) -> u64 {
        let mut word = 0u64;
        // SAFETY: the signature is the driver's; the word has eight bytes.
        let code = unsafe {
            type Copy = unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int;
            self.enter();
            let copy = self.library.get::<Copy>("cuMemcpyDtoH_v2\0").unwrap();
            copy((&raw mut word).cast(), address as u64, size_of_val(&word))
        };
        assert_eq!(code, 0, "reading {address:#x}");
        word
    }

    pub fn set_word(&self, address: usize, word: u64) {
        // SAFETY: the signature is the driver's; the word has eight bytes.
        let code = unsafe {
            type Copy = unsafe extern "C" fn(u64, *const c_void, usize) -> c_int;
            self.enter();
            let copy = self.library.get::<Copy>("cuMemcpyHtoD_v2\0").unwrap();
            copy(address as u64, (&raw const word).cast(), size_of_val(&word))
        };
        assert_eq!(code, 0, "writing {address:#x}");
        // The copy may end after the call; nothing else waits for it.
        self.driver.synchronise().unwrap();
    }

    fn enter(&self) {
        type Set = unsafe extern "C" fn(*mut c_void) -> c_int;
        // SAFETY: the signature is the driver's; `open` keeps the context alive.
        let code =
            unsafe { self.library.get::<Set>("cuCtxSetCurrent\0").unwrap()(self.context as *mut c_void) };
        assert_eq!(code, 0);
    }
}

/// A range of pages of 1 GiB, larger than any device.
fn huge(driver: &Arc<dyn Driver>, cache_bytes: u64) -> FTensor {
    let geometry = Geometry::solve(Shape::new(1, GIB, 16), Target::new(driver.granularity())).unwrap();
    let options = Options { unbacked: Unbacked::Hole, cache_bytes };
    FTensor::reserve(driver.clone(), geometry, 4096, options).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_scenario_and_some_under_every_failing_call_on_a_gpu() {
    let _alone = alone();
    let gpu = Gpu::first();
    let free = gpu.free_bytes();
    // A range of addresses takes long to be given back: every failing call of every scenario would take an hour.
    let telling = ["nothing", "some go and come back", "what is kept is trimmed", "committed", "aborted"];
    sweep(
        1,
        || Ground::Gpu(gpu.clone()),
        |setup, scenario| match setup.cache != Cache::OnePage && telling.contains(&scenario.name) {
            true => Extent::Singles,
            false => Extent::Healthy,
        },
    );
    let free_now = gpu.free_bytes();
    assert!(free_now >= free - SLACK, "{free_now} of {free} bytes are free after all runs");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn threads_share_a_range_on_a_gpu() {
    let _alone = alone();
    let gpu = Gpu::first();
    let free = gpu.free_bytes();
    Setup::all().into_iter().for_each(|setup| share(&Ground::Gpu(gpu.clone()), setup, 10));
    assert!(gpu.free_bytes() >= free - SLACK);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn memory_of_a_gpu_is_taken_and_given_back() {
    let _alone = alone();
    available(Device::Cuda(0)).unwrap();
    let driver = open(Device::Cuda(0)).unwrap();
    assert!(Arc::ptr_eq(&driver, &open(Device::Cuda(0)).unwrap()));
    assert_eq!(driver.device(), Device::Cuda(0));
    let geometry = Geometry::solve(Shape::new(64, 32 << 10, 16), Target::new(driver.granularity())).unwrap();
    let page = geometry.page_bytes();
    let range = FTensor::reserve(driver.clone(), geometry, 262_143 * 8, Options::default()).unwrap();

    let free = driver.mem_info().unwrap().free;
    let pages: Vec<u32> = (0..32).map(|p| p * 8191).collect();
    assert_eq!(range.map(&pages), Ok(pages.clone()));
    assert_eq!(range.map(&pages), Ok(vec![]));
    let taken = free - driver.mem_info().unwrap().free;
    assert!(taken >= 32 * page, "{taken}");
    // A thread that never had a context.
    std::thread::scope(|s| s.spawn(|| range.unmap(&pages[..16]).unwrap()).join().unwrap());
    range.synchronise().unwrap();
    assert_eq!(range.mapped_bytes(), 16 * page);
    assert!(driver.mem_info().unwrap().free >= free - 16 * page - SLACK);
    drop(range);
    assert!(driver.mem_info().unwrap().free >= free - SLACK);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_full_gpu_is_pressure_and_leaves_nothing() {
    let _alone = alone();
    let driver = open(Device::Cuda(0)).unwrap();
    let range = huge(&driver, 0);
    let free = driver.mem_info().unwrap().free;
    let all: Vec<u32> = (0..4096).collect();
    let error = range.map(&all).unwrap_err();
    assert!(matches!(&error, VmmError::OutOfMemory { page: Some(_), .. }), "{error}");
    assert!(error.to_string().contains("cuMemCreate"), "{error}");
    assert_eq!((range.mapped_bytes(), range.quarantined_pages()), (0, vec![]));
    assert!(driver.mem_info().unwrap().free >= free - SLACK);
    range.map(&[1]).unwrap();
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_full_gpu_takes_what_another_range_keeps() {
    let _alone = alone();
    let driver = open(Device::Cuda(0)).unwrap();
    let free = driver.mem_info().unwrap().free;
    let (keeps, wants) = (huge(&driver, u64::MAX), huge(&driver, 0));
    let eight: Vec<u32> = (0..8).collect();
    keeps.map(&eight).unwrap();
    keeps.unmap(&eight).unwrap();
    assert_eq!(keeps.cached_bytes(), 8 * GIB);
    // Four more than are free beside what is kept.
    let pages: Vec<u32> = (0..(free / GIB - 4) as u32).collect();
    assert_eq!(wants.map(&pages), Ok(pages));
    assert_eq!(keeps.cached_bytes(), 0);
    drop((keeps, wants));
    assert!(driver.mem_info().unwrap().free >= free - SLACK);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_gpu_that_is_not_there_is_named() {
    let said = open(Device::Cuda(4000)).unwrap_err().to_string();
    assert_eq!(said, "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE (code 101)");
}

#[test]
#[ignore = "needs two NVIDIA GPUs"]
fn threads_use_a_second_gpu() {
    let _alone = alone();
    let first = Gpu::first();
    let Ok(second) = Gpu::open(1) else {
        println!("not run: there is no second GPU");
        return;
    };
    assert_eq!(second.driver.device(), Device::Cuda(1));
    let (free, free_of_first) = (second.free_bytes(), first.free_bytes());
    let range = huge(&second.driver, 0);
    // Threads whose context is none, the first GPU's and the second's.
    std::thread::scope(|scope| {
        for (thread, current) in (0..).zip([None, Some(&first), Some(&second)]) {
            let (range, second) = (&range, &second);
            scope.spawn(move || {
                current.into_iter().for_each(|gpu| gpu.enter());
                assert_eq!(range.map(&[thread]), Ok(vec![thread]));
                let (start, _) = range.buffer(0).unwrap();
                let at = start + thread as usize * GIB as usize;
                assert_eq!(second.word(at), 0);
                second.set_word(at, u64::from(thread) + 1);
                assert_eq!(second.word(at), u64::from(thread) + 1);
            });
        }
    });
    assert!(second.free_bytes() <= free - 3 * GIB);
    assert!(first.free_bytes() >= free_of_first - SLACK);
    drop(range);
    assert!(second.free_bytes() >= free - SLACK);
    Setup::all().into_iter().for_each(|setup| share(&Ground::Gpu(second.clone()), setup, 3));
    assert!(second.free_bytes() >= free - SLACK);
}
