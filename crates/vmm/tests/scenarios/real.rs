//! Real memory, to the byte and as the kernel counts it.

#![allow(unsafe_code)]

use std::sync::Arc;

use kvcached_vmm::host::Host;
use kvcached_vmm::{Driver, FTensor, Geometry, MemInfo, Options, Shape, Target};

use super::setup::alone;

const BUFFERS: u32 = 3;
const BLOCK: u64 = 4096;
const PAGE: u64 = 64 << 10;
const M: u64 = 5; // blocks of every buffer in a page; one block of padding

fn host(pages: u64) -> Arc<Host> {
    let host = Arc::new(Host::with_total(pages * PAGE).unwrap());
    assert!(PAGE.is_multiple_of(host.granularity()));
    host
}

fn range(driver: Arc<dyn Driver>, pages: u64) -> FTensor {
    let shape = Shape::new(BUFFERS, BLOCK, 16);
    let geometry = Geometry::solve(shape, Target { page_bytes: Some(PAGE), ..Target::new(4096) }).unwrap();
    assert_eq!((geometry.page_bytes(), u64::from(geometry.blocks_per_page())), (PAGE, M));
    FTensor::reserve(driver, geometry, pages * M, Options::default()).unwrap()
}

/// Every word that belongs to a block of `page`, with what no other word of the range holds.
fn words(range: &FTensor, page: u32, salt: u64) -> Vec<(*mut u64, u64)> {
    let mut words = vec![];
    for i in 0..BUFFERS {
        let (start, bytes) = range.buffer(i).unwrap();
        for index in (0..M).map(|j| u64::from(page) * M + j) {
            let offset = u64::from(range.geometry().block_id(index).unwrap()) * BLOCK;
            assert!(offset + BLOCK <= bytes);
            for at in (offset..offset + BLOCK).step_by(8) {
                let name = u64::from(i) << 32 | (index * BLOCK + at % BLOCK);
                words.push(((start + at as usize) as *mut u64, name ^ salt << 48));
            }
        }
    }
    words
}

/// Fills every block of a mapped page.
fn write(range: &FTensor, page: u32, salt: u64) {
    // SAFETY: the page is mapped, and this thread alone uses it.
    words(range, page, salt).into_iter().for_each(|(at, word)| unsafe { at.write_volatile(word) });
}

fn holds(range: &FTensor, page: u32, salt: u64) -> bool {
    // SAFETY: the page is mapped, and this thread alone uses it.
    words(range, page, salt).into_iter().all(|(at, word)| unsafe { at.read_volatile() } == word)
}

/// Whether the whole page reads as zeros, padding included.
fn is_zero(range: &FTensor, page: u32) -> bool {
    let at = (range.base() + page as usize * PAGE as usize) as *const u64;
    // SAFETY: the page is mapped, and this thread alone uses it.
    (0..PAGE as usize / 8).all(|word| unsafe { at.add(word).read_volatile() } == 0)
}

#[test]
fn blocks_hold_what_was_written_and_pages_keep_out_of_each_other() {
    let _alone = alone();
    let host = host(8);
    let (a, b) = (range(host.clone(), 4), range(host.clone(), 4));
    a.map(&[0, 3]).unwrap();
    b.map(&[3, 1]).unwrap();
    let all = [(&a, 0, 1), (&a, 3, 2), (&b, 3, 3), (&b, 1, 4)];
    for (range, page, salt) in all {
        assert!(is_zero(range, page));
        write(range, page, salt);
    }
    for (range, page, salt) in all {
        assert!(holds(range, page, salt), "page {page}, salt {salt}");
        assert!(!holds(range, page, 9));
    }
    // Unmapping one leaves the others' content, also mapping what is mapped.
    a.unmap(&[0]).unwrap();
    assert_eq!(a.map(&[3, 0]), Ok(vec![0]));
    assert!(is_zero(&a, 0));
    assert!(holds(&a, 3, 2) && holds(&b, 3, 3) && holds(&b, 1, 4));
    // An abort restores every byte.
    b.prepare_unmap(1, &[1, 3]).unwrap();
    a.map(&[1]).unwrap();
    write(&a, 1, 5);
    b.abort_unmap(1).unwrap();
    assert!(holds(&b, 3, 3) && holds(&b, 1, 4));
}

#[test]
fn memory_goes_back_to_the_kernel_and_comes_back_as_zeros() {
    let _alone = alone();
    let host = host(16);
    let range = range(host.clone(), 16);
    let all: Vec<u32> = (0..16).collect();
    assert_eq!(host.resident_bytes(), Ok(0));
    range.map(&all).unwrap();
    assert_eq!(host.resident_bytes(), Ok(0), "taken before it is touched");
    all.iter().for_each(|page| write(&range, *page, 7));
    let per_page = host.resident_bytes().unwrap() / 16;
    assert!((PAGE - BLOCK..=PAGE).contains(&per_page), "{per_page}");
    assert_eq!(host.mem_info(), Ok(MemInfo { free: 0, total: 16 * PAGE }));

    range.unmap(&all[4..]).unwrap();
    assert_eq!(host.resident_bytes(), Ok(4 * per_page));
    assert_eq!(host.mem_info().unwrap().free, 12 * PAGE);
    range.map(&all[4..]).unwrap();
    assert!(all[4..].iter().all(|page| is_zero(&range, *page)));
    assert!(all[..4].iter().all(|page| holds(&range, *page, 7)));

    drop(range);
    assert_eq!(host.resident_bytes(), Ok(0));
    assert_eq!(host.mem_info().unwrap().free, 16 * PAGE);
}

#[test]
fn a_fork_gets_no_copy_of_a_mapped_page() {
    let _alone = alone();
    let range = range(host(4), 4);
    range.map(&[1]).unwrap();
    // It would write into this process's cache.
    let address = format!("{:x}-", range.base() + PAGE as usize);
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&address));
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
}
