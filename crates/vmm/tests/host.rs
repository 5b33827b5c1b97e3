//! Real memory: what is written is read back, what is given back is gone, under failures too.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use kvcached_vmm::host::Host;
use kvcached_vmm::sim::Faulty;
use kvcached_vmm::{Driver, DriverError, FTensor, Geometry, MemInfo, Options, Shape, Target, VmmError};

const BUFFERS: u32 = 3;
const BLOCK: u64 = 4096;
const PAGE: u64 = 64 << 10;
const M: u64 = 5; // blocks of every buffer in a page; one block of padding

fn geometry() -> Geometry {
    let shape = Shape::new(BUFFERS, BLOCK, 16);
    let geometry = Geometry::solve(shape, Target { page_bytes: Some(PAGE), ..Target::new(4096) }).unwrap();
    assert_eq!((geometry.page_bytes(), u64::from(geometry.blocks_per_page())), (PAGE, M));
    geometry
}

fn host(pages: u64) -> Arc<Host> {
    let host = Arc::new(Host::with_total(pages * PAGE).unwrap());
    assert!(PAGE.is_multiple_of(host.granularity()));
    host
}

fn tensor(driver: Arc<dyn Driver>, pages: u64) -> FTensor {
    FTensor::reserve(driver, geometry(), pages * M, Options::default()).unwrap()
}

/// Every byte range that belongs to a block of `page`: buffer, block index, address.
fn blocks(tensor: &FTensor, page: u32) -> Vec<(u64, *mut u8)> {
    let mut out = vec![];
    for i in 0..BUFFERS {
        let (start, bytes) = tensor.buffer(i).unwrap();
        for index in (0..M).map(|j| u64::from(page) * M + j) {
            let offset = u64::from(tensor.geometry().block_id(index).unwrap()) * BLOCK;
            assert!(offset + BLOCK <= bytes);
            out.push((u64::from(i) << 32 | index, (start + offset as usize) as *mut u8));
        }
    }
    out
}

/// Fills every block of a mapped page with what no other block has.
fn write(tensor: &FTensor, page: u32, salt: u64) {
    for (name, at) in blocks(tensor, page) {
        for word in 0..BLOCK as usize / 8 {
            // SAFETY: the page is mapped, and this thread alone uses it.
            unsafe { at.cast::<u64>().add(word).write_volatile(name ^ salt ^ (word as u64) << 48) };
        }
    }
}

fn holds(tensor: &FTensor, page: u32, salt: u64) -> bool {
    blocks(tensor, page).into_iter().all(|(name, at)| {
        (0..BLOCK as usize / 8).all(|word| {
            // SAFETY: the page is mapped, and this thread alone uses it.
            let value = unsafe { at.cast::<u64>().add(word).read_volatile() };
            value == name ^ salt ^ (word as u64) << 48
        })
    })
}

/// Whether the whole page reads as zeros, padding included.
fn is_zero(tensor: &FTensor, page: u32) -> bool {
    let at = (tensor.base() + page as usize * PAGE as usize) as *const u64;
    // SAFETY: the page is mapped, and this thread alone uses it.
    (0..PAGE as usize / 8).all(|word| unsafe { at.add(word).read_volatile() } == 0)
}

/// The kernel's permissions of a page, and whether a fork gets a copy.
fn kernel_view(tensor: &FTensor, page: u32) -> (String, bool) {
    let address = tensor.base() + page as usize * PAGE as usize;
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut found = None;
    for line in smaps.lines() {
        let range = line.split_whitespace().next().and_then(|r| r.split_once('-'));
        let range = range
            .and_then(|(a, b)| Some(usize::from_str_radix(a, 16).ok()?..usize::from_str_radix(b, 16).ok()?));
        if let Some(range) = range {
            found = range.contains(&address).then(|| line.split_whitespace().nth(1).unwrap().to_owned());
        }
        if let (Some(permissions), Some(flags)) = (&found, line.strip_prefix("VmFlags:")) {
            return (permissions.clone(), !flags.split_whitespace().any(|f| f == "dc"));
        }
    }
    panic!("nothing at {address:#x}");
}

#[test]
fn blocks_hold_what_was_written_and_pages_keep_out_of_each_other() {
    let host = host(8);
    let (a, b) = (tensor(host.clone(), 4), tensor(host.clone(), 4));
    a.map(&[0, 3]).unwrap();
    b.map(&[3, 1]).unwrap();
    for (tensor, page, salt) in [(&a, 0, 1), (&a, 3, 2), (&b, 3, 3), (&b, 1, 4)] {
        assert!(is_zero(tensor, page));
        write(tensor, page, salt << 40);
    }
    for (tensor, page, salt) in [(&a, 0, 1), (&a, 3, 2), (&b, 3, 3), (&b, 1, 4)] {
        assert!(holds(tensor, page, salt << 40), "page {page}, salt {salt}");
        assert!(!holds(tensor, page, 9 << 40));
    }
    // Unmapping one leaves the others' content, also mapping what is mapped.
    a.unmap(&[0]).unwrap();
    assert_eq!(a.map(&[3, 0]), Ok(vec![0]));
    assert!(is_zero(&a, 0));
    assert!(holds(&a, 3, 2 << 40) && holds(&b, 3, 3 << 40) && holds(&b, 1, 4 << 40));
}

#[test]
fn memory_goes_back_to_the_kernel_and_comes_back_as_zeros() {
    let host = host(16);
    let tensor = tensor(host.clone(), 16);
    let all: Vec<u32> = (0..16).collect();
    assert_eq!(host.resident_bytes(), Ok(0));
    tensor.map(&all).unwrap();
    assert_eq!(host.resident_bytes(), Ok(0), "taken before it is touched");
    all.iter().for_each(|p| write(&tensor, *p, 7));
    let per_page = host.resident_bytes().unwrap() / 16;
    assert!((PAGE - BLOCK..=PAGE).contains(&per_page), "{per_page}");
    assert_eq!(host.mem_info(), Ok(MemInfo { free: 0, total: 16 * PAGE }));

    tensor.unmap(&all[4..]).unwrap();
    assert_eq!(host.resident_bytes(), Ok(4 * per_page));
    assert_eq!(host.mem_info().unwrap().free, 12 * PAGE);
    tensor.map(&all[4..]).unwrap();
    assert!(all[4..].iter().all(|p| is_zero(&tensor, *p)));
    assert!(all[..4].iter().all(|p| holds(&tensor, *p, 7)));

    drop(tensor);
    assert_eq!(host.resident_bytes(), Ok(0));
    assert_eq!(host.mem_info().unwrap().free, 16 * PAGE);
}

#[test]
fn only_mapped_pages_may_be_touched() {
    let tensor = tensor(host(4), 4);
    let hole = "---p".to_owned();
    assert_eq!(kernel_view(&tensor, 1).0, hole);
    tensor.map(&[1]).unwrap();
    // No copy for a fork: it would write into this process's cache.
    assert_eq!(kernel_view(&tensor, 1), ("rw-s".to_owned(), false));
    assert_eq!((kernel_view(&tensor, 0).0, kernel_view(&tensor, 2).0), (hole.clone(), hole.clone()));
    tensor.unmap(&[1]).unwrap();
    assert_eq!(kernel_view(&tensor, 1).0, hole);
    // The spare page.
    assert_eq!(kernel_view(&tensor, 4).0, hole);
}

#[test]
fn a_budget_that_ends_within_a_call_undoes_it() {
    let host = host(3);
    let tensor = tensor(host.clone(), 8);
    tensor.map(&[7]).unwrap();
    write(&tensor, 7, 5);
    let error = tensor.map(&[0, 1, 2]).unwrap_err();
    let expected = DriverError::OutOfMemory { call: "ftruncate (create)", bytes: PAGE, code: 12 };
    assert_eq!(error, VmmError::OutOfMemory { page: Some(2), source: expected });
    assert_eq!((tensor.mapped_pages(), host.mem_info().unwrap().free), (vec![7], 2 * PAGE));
    assert_eq!(kernel_view(&tensor, 0).0, "---p");
    assert!(holds(&tensor, 7, 5));
    assert_eq!(tensor.map(&[0, 1]), Ok(vec![0, 1]));
    write(&tensor, 0, 6);
    assert!(holds(&tensor, 7, 5));
}

#[test]
fn a_machine_size_range_costs_no_memory() {
    let host = host(1);
    let shape = Shape::new(64, 32 << 10, 16);
    let geometry = Geometry::solve(shape, Target::new(host.granularity())).unwrap();
    let tensor = FTensor::reserve(host.clone(), geometry, 262_143 * 8, Options::default()).unwrap();
    assert_eq!(tensor.virtual_bytes(), 262_144 * (16 << 20)); // 4 TiB
    assert_eq!((tensor.mapped_bytes(), host.resident_bytes()), (0, Ok(0)));
}

/// Maps, maps what overlaps, unmaps, maps again. Returns how many driver calls it took, the drop included.
fn scenario(fail_at: u32) -> u32 {
    let host = host(8);
    let driver = Faulty::new(host.clone());
    driver.fail_each(&[fail_at]);
    let Ok(tensor) = FTensor::reserve(driver.clone(), geometry(), 8 * M, Options::default()) else {
        assert_eq!((fail_at, host.mem_info().unwrap().free), (1, 8 * PAGE));
        return 1;
    };
    // What was written and not given back is there, whatever fails.
    let mut content: Vec<(u32, u64)> = vec![];
    let steps: [(bool, &[u32]); 4] =
        [(true, &[0, 2]), (true, &[1, 2, 3]), (false, &[0, 3]), (true, &[3, 4, 0])];
    for (step, (map, pages)) in steps.into_iter().enumerate() {
        let salt = (step as u64 + 1) << 40;
        let before = tensor.mapped_pages();
        if map {
            if let Ok(new) = tensor.map(pages) {
                for page in new {
                    assert!(is_zero(&tensor, page));
                    write(&tensor, page, salt);
                    content.push((page, salt));
                }
            } else {
                assert_eq!(tensor.mapped_pages(), before);
            }
        } else {
            let _ = tensor.unmap(pages);
        }
        let mapped = tensor.mapped_pages();
        content.retain(|(page, _)| mapped.contains(page));
        assert_eq!(content.len(), mapped.len());
        assert!(content.iter().all(|(page, salt)| holds(&tensor, *page, *salt)));
        let lost = tensor.quarantined_pages().len() as u64 * PAGE + tensor.leaked_bytes();
        assert_eq!(host.mem_info().unwrap().free, 8 * PAGE - tensor.mapped_bytes() - lost);
        for page in (0..5).filter(|p| !mapped.contains(p) && !tensor.quarantined_pages().contains(p)) {
            assert_eq!(kernel_view(&tensor, page).0, "---p", "page {page}");
        }
    }
    drop(tensor);
    // One failure, wherever it was, has left nothing behind.
    assert_eq!((host.mem_info().unwrap().free, host.resident_bytes().unwrap()), (8 * PAGE, 0));
    driver.calls().total()
}

#[test]
fn every_failing_call_over_real_memory() {
    let calls = scenario(0);
    // reserve; 3 x (2 + 2 + 3) to back; 2 x 2 to give back; synchronise; 2 x 5; free
    assert_eq!(calls, 1 + 21 + 4 + 1 + 10 + 1);
    for k in 1..=calls {
        scenario(k);
    }
}
