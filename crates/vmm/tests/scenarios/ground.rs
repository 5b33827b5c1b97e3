//! The device under a range, seen past the range: what it holds, what it has mapped where, and the bytes there.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use kvcached_vmm::host::Host;
use kvcached_vmm::sim::Sim;
use kvcached_vmm::{Access, Driver, FTensor, Layout, Unbacked};

use super::gpu::Gpu;
use super::model::{Model, State};
use super::setup::{BUFFERS, PAGES};

#[derive(Debug, Clone)]
pub enum Ground {
    Sim(Arc<Sim>),
    Host(Arc<Host>),
    Gpu(Arc<Gpu>),
}

/// What may be done at an address; None: nothing is mapped there.
type Seen = Option<Access>;

impl Ground {
    pub fn sim() -> Self {
        Ground::Sim(Sim::new())
    }

    pub fn host() -> Self {
        Ground::Host(Arc::new(Host::with_total(64 << 20).unwrap()))
    }

    pub fn driver(&self) -> Arc<dyn Driver> {
        match self {
            Ground::Sim(sim) => sim.clone(),
            Ground::Host(host) => host.clone(),
            Ground::Gpu(gpu) => gpu.driver.clone(),
        }
    }

    /// Memory that the device holds for its ranges. None where others use the device too.
    pub fn held_bytes(&self) -> Option<u64> {
        match self {
            Ground::Sim(sim) => Some(sim.held_bytes()),
            Ground::Host(host) => host.mem_info().ok().map(|info| info.total - info.free),
            Ground::Gpu(_) => None,
        }
    }

    /// Asserts that no law was broken and, where `whole`, that nothing of any range is left. Returns whether something is.
    pub fn check_end(&self, whole: bool) -> bool {
        match self {
            Ground::Sim(sim) if whole => sim.assert_clean(),
            Ground::Sim(sim) => assert_eq!(sim.refused(), Vec::<String>::new()),
            Ground::Host(host) if whole => {
                assert_eq!((self.held_bytes(), host.resident_bytes()), (Some(0), Ok(0)));
            }
            Ground::Host(_) | Ground::Gpu(_) => {}
        }
        matches!(self, Ground::Sim(sim) if sim.counts().0 > 0)
    }

    /// Asserts that the device maps what the model says, and nothing else.
    pub fn check_mappings(&self, range: &FTensor, model: &Model) {
        let geometry = range.geometry();
        let at = |page, run| range.base() + geometry.run_offset(page, run, PAGES) as usize;
        let under_unbacked = (range.unbacked() == Unbacked::Zero).then_some(Access::Read);
        let mut expected = vec![];
        for (page, state) in (0..).zip(&model.pages) {
            let access = match state {
                State::Unbacked | State::Prepared => under_unbacked,
                State::Mapped => Some(Access::ReadWrite),
                State::Quarantined if model.is_lost_at_rest() => under_unbacked,
                State::Quarantined => continue,
            };
            expected.extend((0..geometry.runs_per_page()).map(|run| (page, at(page, run), access)));
        }
        if geometry.layout() == Layout::Chunked {
            expected.push((PAGES, at(PAGES, 0), under_unbacked)); // the spare page
        }
        let seen: Box<dyn Fn(usize) -> Seen> = match self {
            Ground::Sim(sim) => {
                let lost = match model.is_lost_at_rest() {
                    true => 0,
                    false => model.count(State::Quarantined) * geometry.runs_per_page() as usize,
                };
                let mapped = expected.iter().filter(|(.., access)| access.is_some()).count();
                let accesses = sim.accesses();
                assert!((mapped..=mapped + lost).contains(&accesses.len()), "{accesses:x?}");
                Box::new(move |address| {
                    let place = accesses.binary_search_by_key(&address, |(at, _)| *at).ok()?;
                    Some(accesses[place].1.expect("mapped and not opened"))
                })
            }
            Ground::Host(_) => {
                let areas = areas_of(range);
                Box::new(move |address| permissions_at(&areas, address))
            }
            Ground::Gpu(_) => return,
        };
        for (page, address, access) in expected {
            assert_eq!(seen(address), access, "page {page} at {address:#x}");
        }
    }

    /// Whether bytes at an address can be read and written by `word` and `set_word`.
    pub fn has_bytes(&self) -> bool {
        !matches!(self, Ground::Sim(_))
    }

    /// The word at an address that may be read.
    pub fn word(&self, address: usize) -> u64 {
        match self {
            Ground::Sim(_) => panic!("simulated memory has no bytes"),
            // SAFETY: the caller names an address of a mapping that is open for reading, which `check_mappings` saw.
            Ground::Host(_) => unsafe { (address as *const u64).read_volatile() },
            Ground::Gpu(gpu) => gpu.word(address),
        }
    }

    /// Writes to an address that may be written.
    pub fn set_word(&self, address: usize, word: u64) {
        match self {
            Ground::Sim(_) => panic!("simulated memory has no bytes"),
            // SAFETY: the caller names an address of a mapped page, which it alone uses.
            Ground::Host(_) => unsafe { (address as *mut u64).write_volatile(word) },
            Ground::Gpu(gpu) => gpu.set_word(address, word),
        }
    }
}

/// The first and the last word of the first and the last block of a page in every buffer.
pub fn words_of(range: &FTensor, page: u32) -> Vec<usize> {
    let geometry = range.geometry();
    let m = u64::from(geometry.blocks_per_page());
    let mut words = vec![];
    for buffer in 0..BUFFERS {
        let (start, bytes) = range.buffer(buffer).unwrap();
        for index in [u64::from(page) * m, (u64::from(page) + 1) * m - 1] {
            let offset = u64::from(geometry.block_id(index).unwrap()) * geometry.block_bytes();
            assert!(offset + geometry.block_bytes() <= bytes);
            words.extend([offset, offset + geometry.block_bytes() - 8].map(|at| start + at as usize));
        }
    }
    words
}

/// The last word of every buffer. Chunked, all but the first buffer's lie in the spare page.
pub fn last_words(range: &FTensor) -> Vec<usize> {
    (0..BUFFERS).filter_map(|i| range.buffer(i)).map(|(start, bytes)| start + bytes as usize - 8).collect()
}

/// The kernel's areas of addresses that a range has part in, with their permissions.
fn areas_of(range: &FTensor) -> Vec<(Range<usize>, String)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = range.base()..range.base() + range.virtual_bytes() as usize;
    let address = |hex| usize::from_str_radix(hex, 16).unwrap();
    let mut areas = vec![];
    for line in maps.lines() {
        let (start, rest) = line.split_once('-').unwrap();
        let (end, rest) = rest.split_once(' ').unwrap();
        let area = address(start)..address(end);
        if area.start < ours.end && area.end > ours.start {
            areas.push((area, rest[..4].to_owned()));
        }
    }
    areas
}

fn permissions_at(areas: &[(Range<usize>, String)], address: usize) -> Seen {
    let area = areas.iter().find(|(area, _)| area.contains(&address));
    let (_, permissions) = area.unwrap_or_else(|| panic!("{address:#x} is not reserved"));
    match permissions.as_str() {
        "rw-s" => Some(Access::ReadWrite),
        "r--p" => Some(Access::Read),
        "---p" => None,
        other => panic!("{other} at {address:#x}"),
    }
}
