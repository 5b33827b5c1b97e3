//! Memory of ranks.
#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its part

use std::sync::Arc;

use kvcached_ipc::message::Member;
use kvcached_vmm::{Device, Driver, FTensor, Geometry, Options, Shape, Target};

pub const PAGES: u32 = 8;

pub fn member(rank: u16) -> Member {
    Member { stage: 0, rank }
}

/// Of ordinary memory.
pub fn tensor() -> Arc<FTensor> {
    tensor_of(kvcached_vmm::open(Device::Host).unwrap())
}

pub fn tensor_of(driver: Arc<dyn Driver>) -> Arc<FTensor> {
    let granularity = driver.granularity();
    let target = Target { page_bytes: Some(granularity), ..Target::new(granularity) };
    let geometry = Geometry::solve(Shape::new(1, granularity / 4, 1), target).unwrap();
    let num_blocks = u64::from(PAGES * geometry.blocks_per_page());
    Arc::new(FTensor::reserve(driver, geometry, num_blocks, Options::default()).unwrap())
}
