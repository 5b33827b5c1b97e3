//! A real GPU: `cargo test -p kvcached-vmm --test cuda -- --ignored --test-threads 1` on a machine that has one.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kvcached_vmm::{Device, FTensor, Geometry, Options, Shape, Target, VmmError, available, open};

fn geometry(granularity: u64) -> Geometry {
    let shape = Shape::new(64, 32 << 10, 16);
    Geometry::solve(shape, Target::new(granularity)).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn memory_is_taken_and_given_back() {
    available(Device::Cuda(0)).unwrap();
    let driver = open(Device::Cuda(0)).unwrap();
    assert!(Arc::ptr_eq(&driver, &open(Device::Cuda(0)).unwrap()));
    assert_eq!(driver.device(), Device::Cuda(0));
    let geometry = geometry(driver.granularity());
    let page = geometry.page_bytes();
    let tensor = FTensor::reserve(driver.clone(), geometry, 262_143 * 8, Options::default()).unwrap();

    let free = driver.mem_info().unwrap().free;
    let pages: Vec<u32> = (0..32).map(|p| p * 8191).collect();
    assert_eq!(tensor.map(&pages), Ok(pages.clone()));
    assert_eq!(tensor.map(&pages), Ok(vec![]));
    let taken = free - driver.mem_info().unwrap().free;
    assert!(taken >= 32 * page, "{taken}");
    // A thread that never had a context.
    std::thread::scope(|s| s.spawn(|| tensor.unmap(&pages[..16]).unwrap()).join().unwrap());
    tensor.synchronise().unwrap();
    assert_eq!(tensor.mapped_bytes(), 16 * page);
    assert!(driver.mem_info().unwrap().free >= free - 16 * page - (64 << 20));
    drop(tensor);
    assert!(driver.mem_info().unwrap().free >= free - (64 << 20));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_full_device_is_pressure_and_leaves_nothing() {
    let driver = open(Device::Cuda(0)).unwrap();
    let shape = Shape::new(1, 1 << 30, 16);
    let geometry = Geometry::solve(shape, Target::new(driver.granularity())).unwrap();
    let tensor = FTensor::reserve(driver.clone(), geometry, 4096, Options::default()).unwrap();
    let free = driver.mem_info().unwrap().free;
    let all: Vec<u32> = (0..4096).collect();
    let error = tensor.map(&all).unwrap_err();
    assert!(matches!(&error, VmmError::OutOfMemory { page: Some(_), .. }), "{error}");
    assert!(error.to_string().contains("cuMemCreate"), "{error}");
    assert_eq!((tensor.mapped_bytes(), tensor.quarantined_pages()), (0, vec![]));
    assert!(driver.mem_info().unwrap().free >= free - (64 << 20));
    tensor.map(&[1]).unwrap();
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_device_that_is_not_there_is_named() {
    let said = open(Device::Cuda(4000)).unwrap_err().to_string();
    assert_eq!(said, "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE (code 101)");
}
