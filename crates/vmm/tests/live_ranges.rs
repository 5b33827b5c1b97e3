//! The count of live ranges is the process's, so this test has a process of its own.

#![allow(clippy::unwrap_used)]

use kvcached_vmm::sim::Sim;
use kvcached_vmm::{FTensor, Geometry, Options, Shape, Target, live_ranges};

#[test]
fn ranges_are_counted_until_they_are_freed() {
    let shape = Shape::new(2, 1 << 20, 16);
    let geometry = Geometry::solve(shape, Target { page_bytes: Some(1), ..Target::new(2 << 20) }).unwrap();
    let sim = Sim::new();
    let reserve = || FTensor::reserve(sim.clone(), geometry, 8, Options::default());
    assert_eq!(live_ranges(), 0);
    let (a, b) = (reserve().unwrap(), reserve().unwrap());
    assert_eq!(live_ranges(), 2);
    drop(a);
    assert_eq!(live_ranges(), 1);
    sim.fail_at(1);
    assert!(reserve().is_err());
    assert_eq!(live_ranges(), 1);
    // A page whose unmap failed is tried again at the end.
    b.map(&[0, 1]).unwrap();
    sim.fail_at(1);
    assert!(b.unmap(&[1]).is_err());
    drop(b);
    assert_eq!(live_ranges(), 0);
    sim.assert_clean();
    // Where the driver has failed for good its range stays: nobody may get those addresses.
    let c = reserve().unwrap();
    c.map(&[0]).unwrap();
    sim.fail_from(1);
    drop(c);
    assert_eq!((live_ranges(), sim.counts()), (1, (1, 1, 1)));
}
