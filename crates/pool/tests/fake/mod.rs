//! A mapper without memory: records calls, checks the laws, fails where it is told to.
#![allow(dead_code)] // each test binary uses its part

/// The rest of a mapper that has no memory anywhere: for those that differ in what they map.
#[macro_export]
macro_rules! without_memory {
    () => {
        fn synchronise(&self) -> Result<(), kvcached_pool::Cause> {
            Ok(())
        }
        without_memory!(waits);
    };
    (waits) => {
        fn room(&self) -> Result<u64, kvcached_pool::Cause> {
            Ok(0)
        }
        fn page_bytes(&self) -> u64 {
            $crate::fake::PAGE_BYTES
        }
        fn virtual_bytes(&self) -> u64 {
            0
        }
    };
}

pub mod gate;
pub mod ranks;
pub mod share;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kvcached_pool::{
    Cause, Layout, MapFailure, Mapper, MemoryLimit, Meter, PageOrder, Pool, PoolConfig, PoolError,
    UnmapFailure, Usage,
};

pub const PAGE_BYTES: u64 = 1 << 20;

/// How a call goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Map: out of memory. Unmap and synchronise: refused, nothing changed.
    Refused,
    /// Map: refused for another reason than memory.
    Driver,
    /// The first page of the call is lost.
    Lost,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    Map(Vec<u32>),
    Unmap(Vec<u32>),
    Synchronise,
    Room,
    Trim,
}

#[derive(Default)]
pub struct Inner {
    pub mapped: BTreeSet<u32>,
    pub lost: BTreeSet<u32>,
    pub calls: Vec<Call>,
    pub violations: Vec<String>,
    pub out_of_memory: u32,
    pub faults: u32,
    beside_bytes: u64,
    /// Pages whose memory is kept beside when they are unmapped.
    keeps: usize,
    budget_pages: Option<usize>,
    fault: Option<(usize, Fault)>,
    seen: usize,
}

#[derive(Default)]
pub struct Fake {
    inner: Mutex<Inner>,
    figures: Mutex<Vec<Usage>>,
}

impl Fake {
    pub fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    /// Fails the k-th call from now, from 0.
    pub fn fail_at(&self, k: usize, fault: Fault) {
        let mut inner = self.inner();
        inner.seen = 0;
        inner.fault = Some((k, fault));
    }

    pub fn heal(&self) {
        self.inner().fault = None;
    }

    pub fn set_budget(&self, pages: usize) {
        self.inner().budget_pages = Some(pages);
    }

    /// What is held beside the pages from now on.
    pub fn keep_beside(&self, bytes: u64) {
        self.inner().beside_bytes = bytes;
    }

    /// Keeps the memory of so many pages beside them when they are unmapped.
    pub fn keep_of_unmapped(&self, pages: usize) {
        self.inner().keeps = pages;
    }

    pub fn mapped(&self) -> Vec<u32> {
        self.inner().mapped.iter().copied().collect()
    }

    pub fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.inner().calls)
    }

    /// Shortages reported and faults done so far.
    pub fn counts(&self) -> (u32, u32) {
        let inner = self.inner();
        (inner.out_of_memory, inner.faults)
    }

    pub fn last_figures(&self) -> Usage {
        *self.figures.lock().unwrap().last().unwrap()
    }

    pub fn num_figures(&self) -> usize {
        self.figures.lock().unwrap().len()
    }

    fn begin(&self, call: Call) -> (MutexGuard<'_, Inner>, Option<Fault>) {
        let mut inner = self.inner();
        inner.calls.push(call);
        let seen = inner.seen;
        inner.seen += 1;
        let fault = inner.fault.filter(|(k, _)| *k == seen).map(|(_, fault)| fault);
        inner.faults += u32::from(fault.is_some());
        (inner, fault)
    }
}

impl Mapper for Fake {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        let (mut inner, fault) = self.begin(Call::Map(pages.to_vec()));
        if pages.is_empty() {
            inner.violations.push("map of nothing".to_owned());
        }
        for page in pages {
            if inner.mapped.contains(page) || inner.lost.contains(page) {
                inner.violations.push(format!("map of page {page}, which is mapped or lost"));
            }
        }
        let over = inner
            .budget_pages
            .is_some_and(|budget| inner.mapped.len() + inner.lost.len() + pages.len() > budget);
        match fault {
            Some(Fault::Driver) => return Err(MapFailure::Driver { source: "refused".into() }),
            Some(Fault::Lost) => {
                inner.lost.insert(pages[0]);
                return Err(MapFailure::Quarantined { pages: vec![pages[0]], source: "lost".into() });
            }
            Some(Fault::Refused) => {}
            None if over => {}
            None => {
                inner.mapped.extend(pages);
                return Ok(pages.to_vec());
            }
        }
        inner.out_of_memory += 1;
        Err(MapFailure::OutOfMemory { source: "full".into() })
    }

    fn unmap(&self, pages: &[u32]) -> Result<(), UnmapFailure> {
        let (mut inner, fault) = self.begin(Call::Unmap(pages.to_vec()));
        for page in pages {
            if !inner.mapped.contains(page) {
                inner.violations.push(format!("unmap of page {page}, which is not mapped"));
            }
        }
        match fault {
            None => {
                pages.iter().for_each(|page| assert!(inner.mapped.remove(page)));
                let kept = pages.len().min(inner.keeps);
                inner.keeps -= kept;
                inner.beside_bytes += kept as u64 * PAGE_BYTES;
                Ok(())
            }
            Some(Fault::Lost) => {
                // Stops at the first page, as the real one does.
                inner.mapped.remove(&pages[0]);
                inner.lost.insert(pages[0]);
                let (quarantined, still_mapped) = (vec![pages[0]], pages[1..].to_vec());
                Err(UnmapFailure { quarantined, still_mapped, broken: false, source: "lost".into() })
            }
            Some(_) => {
                let still_mapped = pages.to_vec();
                Err(UnmapFailure {
                    quarantined: vec![],
                    still_mapped,
                    broken: false,
                    source: "refused".into(),
                })
            }
        }
    }

    fn synchronise(&self) -> Result<(), Cause> {
        let (_inner, fault) = self.begin(Call::Synchronise);
        fault.map_or(Ok(()), |_| Err("device is gone".into()))
    }

    fn room(&self) -> Result<u64, Cause> {
        let (inner, fault) = self.begin(Call::Room);
        let taken = inner.mapped.len() + inner.lost.len();
        let pages = inner.budget_pages.map_or(1 << 20, |budget| budget.saturating_sub(taken));
        // Half a page more: nobody can be given that.
        fault.map_or(Ok(pages as u64 * PAGE_BYTES + PAGE_BYTES / 2), |_| Err("device is gone".into()))
    }

    fn held_beside(&self) -> u64 {
        self.inner().beside_bytes
    }

    fn trim(&self) -> Result<u64, Cause> {
        let (mut inner, fault) = self.begin(Call::Trim);
        fault.map_or(Ok(std::mem::take(&mut inner.beside_bytes)), |_| Err("device is gone".into()))
    }

    fn page_bytes(&self) -> u64 {
        PAGE_BYTES
    }

    fn virtual_bytes(&self) -> u64 {
        100 * PAGE_BYTES
    }
}

impl Meter for Fake {
    fn publish(&self, usage: &Usage) {
        self.figures.lock().unwrap().push(*usage);
    }
}

/// Pages of 4 blocks, ids 5 apart, nothing kept in reserve.
pub fn config(num_blocks: u32) -> PoolConfig {
    let order = PageOrder::LowestFirst;
    PoolConfig {
        layout: Layout { num_blocks, blocks_per_page: 4, ids_per_page: 5, order },
        null_block: false,
        async_sched: false,
        min_reserved_bytes: 0,
        max_reserved_bytes: 0,
        patience: PoolConfig::PATIENCE,
    }
}

/// A pool whose calls return only when the pager has nothing left to do, so that a history has one outcome.
pub struct Steady(Pool);

impl std::ops::Deref for Steady {
    type Target = Pool;

    fn deref(&self) -> &Pool {
        &self.0
    }
}

macro_rules! steady {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty;)*) => {
        impl Steady {
            $(pub fn $name(&self, $($arg: $kind),*) -> Result<$result, PoolError> {
                let result = self.0.$name($($arg),*);
                self.wait();
                result
            })*
        }
    };
}

steady! {
    alloc(n: u32) -> Option<Vec<u32>>;
    claim(ids: &[u32]) -> ();
    free(ids: &[u32]) -> ();
    try_to_reserve(n: u32) -> bool;
    free_reserved() -> ();
    reserve_demand(n: u32) -> u32;
    refresh_credit(leave_bytes: u64) -> u32;
    begin_epoch() -> u64;
    release_through(marker: u64) -> ();
    clear() -> ();
    trim() -> u64;
    set_limit(limit_bytes: u64, revision: Option<u64>) -> MemoryLimit;
}

impl Steady {
    pub fn over(pool: Pool) -> Self {
        let pool = Steady(pool);
        pool.wait();
        pool
    }

    pub fn wait(&self) {
        if let Ok(quiet) = self.0.quiesce(Duration::from_secs(60)) {
            assert!(quiet, "the pager finds no end");
        }
    }
}

pub fn pool_over(fake: &Arc<Fake>, config: PoolConfig) -> Result<Steady, PoolError> {
    Ok(Steady::over(Pool::new(config, fake.clone(), fake.clone())?))
}

pub fn pool(config: PoolConfig) -> (Arc<Fake>, Steady) {
    let fake = Arc::new(Fake::default());
    let pool = pool_over(&fake, config).unwrap();
    (fake, pool)
}

/// Pool, mapper and meter agree, and no law was broken. Only while no other thread is at work.
pub fn check(fake: &Fake, pool: &Pool) {
    let stats = pool.stats().unwrap();
    let inner = fake.inner();
    assert_eq!(inner.violations, [""; 0]);
    let pages = stats.pages;
    assert_eq!(pages.in_motion(), 0, "a page hangs between states");
    assert_eq!((pages.in_use + pages.reserved + pages.retired) as usize, inner.mapped.len());
    assert_eq!(pages.quarantined as usize, inner.lost.len());
    assert_eq!(stats.mapped_bytes, inner.mapped.len() as u64 * PAGE_BYTES);
    assert_eq!(stats.usage.quarantined_bytes, inner.lost.len() as u64 * PAGE_BYTES);
    drop(inner);
    assert_eq!(fake.last_figures(), stats.usage);
}
