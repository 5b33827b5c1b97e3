//! Eight threads over one pool on real memory of which there is too little, for as long as STRESS_S says (seconds, default 2).
//!
//! Each thread signs every block that it holds, in every buffer, and finds its signature when it gives the block back: no block
//! is held twice, none without memory. What it gives back it goes on reading until its epoch has ended, as queued GPU work does:
//! a retired page that lost its memory too early is a segmentation fault.
#![allow(clippy::unwrap_used, clippy::print_stdout, unsafe_code)]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvcached_pool::{Layout, NoMeter, PageOrder, Pool, PoolConfig};
use kvcached_vmm::host::Host;
use kvcached_vmm::{FTensor, Geometry, Options, Shape, Target};

const THREADS: u64 = 8;
const PAGES: u64 = 40;
const BUDGET_PAGES: u64 = 24;
const PAGE_BYTES: u64 = 64 << 10;
const BLOCK_BYTES: u64 = 4096;
const BUFFERS: u32 = 2;

struct Stage {
    range: Arc<FTensor>,
    pool: Pool,
    /// Epochs that have begun and not ended, and the latest that has begun.
    open: Mutex<(BTreeSet<u64>, u64)>,
    allocated: AtomicU64,
    refused: AtomicU64,
}

impl Stage {
    fn set(async_sched: bool) -> Arc<Self> {
        let host = Arc::new(Host::with_total(BUDGET_PAGES * PAGE_BYTES).unwrap());
        let target = Target { page_bytes: Some(PAGE_BYTES), ..Target::new(4096) };
        let geometry = Geometry::solve(Shape::new(BUFFERS, BLOCK_BYTES, 16), target).unwrap();
        let num_blocks = PAGES * u64::from(geometry.blocks_per_page());
        let range = FTensor::reserve(host, geometry, num_blocks, Options::default()).unwrap();
        let range = Arc::new(range);
        let layout = Layout {
            num_blocks: num_blocks as u32,
            blocks_per_page: geometry.blocks_per_page(),
            ids_per_page: geometry.ids_per_page(),
            order: PageOrder::LowestFirst,
        };
        let config = PoolConfig {
            layout,
            null_block: true,
            async_sched,
            min_reserved_bytes: PAGE_BYTES,
            max_reserved_bytes: 3 * PAGE_BYTES,
            patience: PoolConfig::PATIENCE,
        };
        let pool = Pool::new(config, range.clone(), Arc::new(NoMeter)).unwrap();
        let (open, zero) = (Mutex::default(), AtomicU64::new(0));
        Arc::new(Stage { range, pool, open, allocated: zero, refused: AtomicU64::new(0) })
    }

    /// The first word of a block in each buffer.
    fn words(&self, id: u32) -> impl Iterator<Item = *mut u64> + '_ {
        (0..BUFFERS).map(move |buffer| {
            let (start, _) = self.range.buffer(buffer).unwrap();
            (start + id as usize * BLOCK_BYTES as usize) as *mut u64
        })
    }

    fn sign(&self, id: u32, name: u64) {
        // SAFETY: the block is held by this thread alone, and the pool says that held blocks have memory.
        self.words(id).for_each(|word| unsafe { word.write_volatile(name ^ u64::from(id)) });
    }

    fn signed(&self, id: u32, name: u64) -> bool {
        // SAFETY: as above.
        self.words(id).all(|word| unsafe { word.read_volatile() } == name ^ u64::from(id))
    }

    fn still_mapped(&self, ids: &[u32]) {
        for word in ids.iter().flat_map(|id| self.words(*id)) {
            // SAFETY: the page is retired at the earliest and its epoch has not ended: mapped, whatever it holds by now.
            let _ = unsafe { word.read_volatile() };
        }
    }

    fn begin(&self) -> u64 {
        let mut open = self.open.lock().unwrap();
        let epoch = self.pool.begin_epoch().unwrap();
        open.0.insert(epoch);
        open.1 = epoch;
        epoch
    }

    /// Ends it, and with it all before the first that has not ended.
    fn end(&self, epoch: u64) {
        let mut open = self.open.lock().unwrap();
        let (open, latest) = &mut *open;
        open.remove(&epoch);
        let through = open.first().map_or(*latest, |first| first - 1);
        self.pool.release_through(through).unwrap();
    }

    fn give(&self, ids: &[u32], name: u64, async_sched: bool) {
        for &id in ids {
            assert!(self.signed(id, name), "block {id} was written by somebody else");
        }
        if !async_sched {
            return self.pool.free(ids).unwrap();
        }
        let epoch = self.begin();
        self.pool.free(ids).unwrap();
        self.still_mapped(ids);
        std::thread::yield_now();
        self.still_mapped(ids);
        self.end(epoch);
    }
}

fn act(stage: &Stage, name: u64, async_sched: bool, until: Instant) {
    let mut random = name * 0x9e37_79b9 + 1;
    let mut below = |n: u32| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((random >> 33) % u64::from(n)) as u32
    };
    let mut held: Vec<u32> = vec![];
    while Instant::now() < until {
        match below(16) {
            0..6 => {
                let n = [1, 1, 2, 7, 16, 30][below(6) as usize];
                let Some(ids) = stage.pool.alloc(n).unwrap() else {
                    stage.refused.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                assert_eq!(ids.len(), n as usize);
                ids.iter().for_each(|&id| stage.sign(id, name));
                stage.allocated.fetch_add(1, Ordering::Relaxed);
                held.extend(ids);
            }
            6..12 => {
                let ids = held.split_off(held.len() - below(held.len() as u32 + 1) as usize);
                stage.give(&ids, name, async_sched);
            }
            12 => assert!(stage.pool.reserve_demand(below(40)).unwrap() <= 40),
            13 => drop(stage.pool.trim().unwrap()),
            14 => {
                let pages = u64::from(below(PAGES as u32 + 8));
                stage.pool.set_limit(pages * PAGE_BYTES, None).unwrap();
            }
            _ => {
                let id = below(stage.range.id_space());
                if stage.pool.claim(&[id]).is_ok() {
                    stage.sign(id, name);
                    held.push(id);
                }
            }
        }
    }
    stage.give(&held, name, async_sched);
}

fn stress(async_sched: bool) {
    let seconds = std::env::var("STRESS_S").map_or(2.0, |text| text.parse().unwrap());
    let stage = Stage::set(async_sched);
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let threads: Vec<_> = (0..THREADS)
        .map(|name| {
            let stage = stage.clone();
            std::thread::spawn(move || act(&stage, name, async_sched, until))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());

    let (allocated, refused) =
        (stage.allocated.load(Ordering::Relaxed), stage.refused.load(Ordering::Relaxed));
    let stats = stage.pool.stats().unwrap();
    println!("{allocated} allocations, {refused} refused; {:?}", stats.tally);
    assert!(allocated > 100 && refused > 10, "the threads met shortage");
    assert_eq!((stats.held_blocks, stats.tally.failures, stats.pages.quarantined), (1, 0, 0));
    stage.pool.set_limit(u64::MAX, None).unwrap();
    stage.pool.begin_epoch().unwrap(); // the last demand may have been followed by no free that emptied a page: it is kept no longer
    assert!(stage.pool.quiesce(Duration::from_secs(60)).unwrap());
    let pages = stage.pool.stats().unwrap().pages;
    assert!(pages.reserved <= 3 && pages.retired == 0, "{pages:?}");
    assert_eq!(stage.range.mapped_pages().len() as u32, pages.reserved + pages.in_use);
    let ids = stage.pool.alloc(BUDGET_PAGES as u32 * 7).unwrap().unwrap();
    stage.pool.free(&ids).unwrap();
    assert_eq!(stage.pool.shutdown().unwrap(), 0);
    assert_eq!(stage.range.mapped_bytes(), 0);
}

#[test]
fn eight_threads_without_queued_work() {
    stress(false);
}

#[test]
fn eight_threads_with_queued_work() {
    stress(true);
}
