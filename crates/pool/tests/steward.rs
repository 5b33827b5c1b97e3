//! Stewards of several instances over real shares of one budget, in one process: who waits gets what others can do without, and
//! terms that are asked for hold.
#![allow(clippy::unwrap_used, clippy::panic)]

mod fake;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use fake::{Fake, Fault, PAGE_BYTES, config};
use kvcached_control::{Answered, BudgetShare, Change, InstanceRecord, Outcome, Terms, ask};
use kvcached_pool::{
    Budgeted, CachePolicy, Cached, LimitState, MapFailure, Mapper, Pool, PoolConfig, Share, Shares, Steward,
    UnmapFailure,
};

const BUDGET: u64 = 10 * PAGE_BYTES;
const NEVER: CachePolicy = CachePolicy { free_watermark_bytes: 0, idle: None };
const SOON: Duration = Duration::from_secs(20);

/// One engine, with one pool of 20 pages.
struct Engine {
    steward: Steward,
    pool: Arc<Pool>,
    fake: Arc<Fake>,
    shares: Arc<Shares>,
    record: Arc<InstanceRecord>,
}

impl Engine {
    fn begin(dir: &Path, name: &str, terms: Terms, policy: CachePolicy, reserve_pages: u64) -> Self {
        Engine::over(dir, name, terms, policy, reserve_pages, |fake| fake)
    }

    fn over(
        dir: &Path,
        name: &str,
        terms: Terms,
        policy: CachePolicy,
        reserve_pages: u64,
        mapper: impl FnOnce(Arc<Fake>) -> Arc<dyn Mapper>,
    ) -> Self {
        let record = Arc::new(InstanceRecord::create(dir, name, "test", "cpu", terms).unwrap());
        let device = BudgetShare::join(dir, &record, "host", BUDGET, Some(BUDGET)).unwrap();
        let shares = Arc::new(Shares::new(record.clone(), vec![device]));
        let fake = Arc::new(Fake::default());
        let mapper = Arc::new(Budgeted::new(mapper(fake.clone()), shares.clone()));
        let config = PoolConfig { max_reserved_bytes: reserve_pages * PAGE_BYTES, ..config(80) };
        let pool = Arc::new(Pool::new(config, mapper, fake.clone()).unwrap());
        let steward = Steward::new(record.clone(), shares.clone(), policy).unwrap();
        steward.watch(&pool).unwrap();
        Engine { steward, pool, fake, shares, record }
    }

    fn plain(dir: &Path, name: &str) -> Self {
        Engine::begin(dir, name, Terms::default(), NEVER, 0)
    }

    /// Holds so many pages as prefixes that nobody uses.
    fn cache(&self, pages: u32) -> Arc<Prefixes> {
        let ids = self.pool.alloc(4 * pages).unwrap().unwrap();
        let pages = ids.chunks(4).map(<[u32]>::to_vec).collect();
        let cache = Arc::new(Prefixes {
            pool: Arc::downgrade(&self.pool),
            pages: Mutex::new(pages),
            idle_when_asked: AtomicU64::new(0),
            asked: AtomicU32::new(0),
            looked: AtomicU32::new(0),
        });
        self.steward.set_cached(Some(cache.clone()));
        cache
    }

    fn mapped_pages(&self) -> u64 {
        self.fake.mapped().len() as u64
    }
}

/// Pages of blocks that may be freed at any time.
struct Prefixes {
    pool: Weak<Pool>,
    pages: Mutex<Vec<Vec<u32>>>,
    idle_when_asked: AtomicU64,
    asked: AtomicU32,
    looked: AtomicU32,
}

impl Prefixes {
    fn len(&self) -> usize {
        self.pages.lock().unwrap().len()
    }
}

impl Cached for Prefixes {
    fn give(&self, bytes: u64) -> u64 {
        let pool = self.pool.upgrade().unwrap();
        self.idle_when_asked.fetch_max(pool.idle_bytes(), Ordering::SeqCst);
        self.asked.fetch_add(1, Ordering::SeqCst);
        let mut pages = self.pages.lock().unwrap();
        let given = pages.len().min(bytes.div_ceil(PAGE_BYTES) as usize);
        pages.drain(..given).for_each(|ids| pool.free(&ids).unwrap());
        given as u64 * PAGE_BYTES
    }

    fn bytes(&self) -> u64 {
        self.looked.fetch_add(1, Ordering::SeqCst);
        self.len() as u64 * PAGE_BYTES
    }
}

fn soon(what: &str, is_so: impl FnMut() -> bool) {
    within(SOON, what, is_so);
}

fn within(time: Duration, what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < time, "{what}: not so after {time:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn limit(pages: u64) -> Change {
    Change { limit_bytes: Some(Some(pages * PAGE_BYTES)), ..Change::default() }
}

fn answer(dir: &Path, name: &str, change: Change) -> Answered {
    ask(dir, name, change, SOON).unwrap()
}

#[test]
fn who_waits_gets_the_reserve_of_others_and_then_their_cached_prefixes() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let a = Engine::begin(&dir, "a", Terms::default(), NEVER, 4);
    let b = Engine::plain(&dir, "b");
    let held = a.pool.alloc(8).unwrap().unwrap();
    let cache = a.cache(6);
    assert!(a.pool.quiesce(SOON).unwrap());
    assert!(a.pool.idle_bytes() > 0 && a.mapped_pages() == 10, "the reserve has the rest");
    let mut got = None;
    soon("b is served", || {
        got = b.pool.alloc(4 * 4).unwrap();
        got.is_some()
    });
    assert_eq!((a.mapped_pages(), b.mapped_pages()), (6, 4));
    assert_eq!(cache.idle_when_asked.load(Ordering::SeqCst), 0, "the reserve goes first");
    assert_eq!(cache.len(), 4, "no more is evicted than others want");
    assert!(a.pool.pages_of(&held).unwrap().iter().all(|page| a.fake.mapped().contains(page)));
    // Nobody waits any longer, and nothing more is given.
    soon("nobody is short", || b.shares.short_bytes() == 0);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((cache.len(), a.mapped_pages()), (4, 6));
    assert_eq!(a.shares.granted() + b.shares.granted(), BUDGET);
}

#[test]
fn who_says_what_it_lacks_in_all_is_given_it_at_once() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let refusals = |says: bool| {
        let a = Engine::plain(&dir, "a");
        let b = Engine::plain(&dir, "b");
        let cache = a.cache(10);
        let (mut count, mut pages) = (0, 0);
        soon("b has five pages, a page a step", || {
            if b.pool.alloc(4).unwrap().is_some() {
                pages += 1;
            } else {
                count += 1;
                if says {
                    b.pool.lacks(4 * (5 - pages)).unwrap();
                }
                let began = Instant::now();
                while b.shares.granted() + a.shares.granted() == BUDGET && began.elapsed() < SOON {
                    std::thread::sleep(Duration::from_millis(1));
                }
                std::thread::sleep(Duration::from_millis(30)); // a step, and all that is given meanwhile
            }
            pages == 5
        });
        assert_eq!(cache.len(), 5, "no more than that is evicted: {says} {count}");
        count
    };
    assert_eq!(refusals(true), 1);
    assert!(refusals(false) >= 4, "which is what it is for");
}

#[test]
fn nobody_lacks_more_than_its_pool_and_its_limit_can_hold() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let terms = Terms { limit_bytes: Some(4 * PAGE_BYTES), min_bytes: 0 };
    let [a, b] = [Engine::plain(&dir, "a"), Engine::begin(&dir, "b", terms, NEVER, 0)];
    let _cache = a.cache(10);
    b.pool.lacks(4 * 3).unwrap();
    assert_eq!(b.shares.short_bytes(), 3 * PAGE_BYTES);
    b.pool.lacks(u32::MAX).unwrap();
    assert_eq!(b.shares.short_bytes(), 4 * PAGE_BYTES, "by the limit");
    soon("it has them", || b.pool.alloc(4 * 4).unwrap().is_some());
    b.pool.lacks(0).unwrap();
    assert_eq!(b.shares.short_bytes(), 0);
    b.pool.shutdown().unwrap();
    assert!(b.pool.lacks(1).is_err());
}

/// A cache whose pages all hold something that is in use, of an engine that may not answer.
#[derive(Default)]
struct Stuck {
    bytes: u64,
    asked: AtomicU32,
    silent: AtomicBool,
}

impl Cached for Stuck {
    fn give(&self, _: u64) -> u64 {
        self.asked.fetch_add(1, Ordering::SeqCst);
        0
    }
    fn bytes(&self) -> u64 {
        while self.silent.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.bytes
    }
}

#[test]
fn who_cannot_give_what_it_has_cached_is_asked_rarely_and_others_give_all() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let [a, b, c] = ["a", "b", "c"].map(|name| Engine::plain(&dir, name));
    let held = a.pool.alloc(4 * 6).unwrap().unwrap();
    let stuck = Arc::new(Stuck { bytes: 6 * PAGE_BYTES, ..Stuck::default() });
    a.steward.set_cached(Some(stuck.clone()));
    let cache = b.cache(4);
    let began = Instant::now();
    let mut got = None;
    soon("all of it comes from who can give", || {
        got = got.take().or_else(|| c.pool.alloc(4 * 4).unwrap());
        got.is_some()
    });
    assert_eq!((a.mapped_pages(), cache.len(), c.mapped_pages()), (6, 0, 4));
    while began.elapsed() < Duration::from_secs(2) {
        assert_eq!(c.pool.alloc(4).unwrap(), None);
        std::thread::sleep(Duration::from_millis(5));
    }
    let asked = stuck.asked.load(Ordering::SeqCst);
    assert!((1..=6).contains(&asked), "asked {asked} times in two seconds");
    a.pool.free(&held).unwrap();
}

#[test]
fn who_asks_for_other_terms_does_not_wait_for_the_engine() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let a = Engine::plain(&dir, "a");
    let stuck = Arc::new(Stuck::default());
    a.steward.set_cached(Some(stuck.clone()));
    a.pool.alloc(4).unwrap().unwrap();
    std::thread::sleep(Duration::from_millis(50)); // it has looked and sleeps
    stuck.silent.store(true, Ordering::SeqCst);
    let answered = ask(&dir, "a", limit(3), Duration::from_secs(5)).unwrap();
    stuck.silent.store(false, Ordering::SeqCst);
    assert_eq!(answered.outcome, Outcome::Applied);
}

/// A page of zeros lies beside the pages.
struct WithZeros(Arc<Fake>);

impl Mapper for WithZeros {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        self.0.map(pages)
    }
    fn unmap(&self, pages: &[u32]) -> Result<(), UnmapFailure> {
        self.0.unmap(pages)
    }
    fn held_beside(&self) -> u64 {
        PAGE_BYTES
    }
    without_memory!();
}

#[test]
fn a_limit_is_met_when_what_lies_beside_the_pages_fits_too() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let a = Engine::over(&dir, "a", Terms::default(), NEVER, 0, |fake| Arc::new(WithZeros(fake)));
    let ids = a.pool.alloc(4 * 3).unwrap().unwrap();
    let deferred = answer(&dir, "a", limit(3));
    assert_eq!(deferred.outcome, Outcome::Deferred, "three pages, and one beside them");
    a.pool.free(&ids[..4]).unwrap();
    let again = Change { revision: Some(deferred.revision), ..limit(3) };
    soon("two pages and one beside them", || answer(&dir, "a", again).outcome == Outcome::Applied);
}

/// Counts the pages of all engines.
struct Counted {
    inner: Arc<Fake>,
    pages: Arc<AtomicU64>,
    most: Arc<AtomicU64>,
}

impl Mapper for Counted {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        let new = self.inner.map(pages)?;
        let count = new.len() as u64;
        self.most.fetch_max(self.pages.fetch_add(count, Ordering::SeqCst) + count, Ordering::SeqCst);
        Ok(new)
    }
    fn unmap(&self, pages: &[u32]) -> Result<(), UnmapFailure> {
        self.pages.fetch_sub(pages.len() as u64, Ordering::SeqCst);
        self.inner.unmap(pages)
    }
    without_memory!();
}

#[test]
fn engines_at_work_never_have_more_than_the_budget_and_leave_nothing() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let [pages, most] = [0, 0].map(|zero| Arc::new(AtomicU64::new(zero)));
    let engines = ["a", "b", "c"].map(|name| {
        Engine::over(&dir, name, Terms::default(), NEVER, 2, |inner| {
            Arc::new(Counted { inner, pages: pages.clone(), most: most.clone() })
        })
    });
    std::thread::scope(|scope| {
        for engine in &engines {
            scope.spawn(|| {
                let mut held: Vec<u32> = vec![];
                for round in 0..200 {
                    held.extend(engine.pool.alloc(1 + round % 11).unwrap().unwrap_or_default());
                    if round % 4 == 0 {
                        let ids = held.split_off(held.len() / 3);
                        engine.pool.free(&ids).unwrap();
                    }
                }
                engine.pool.free(&held).unwrap();
            });
        }
    });
    assert!((5..=BUDGET / PAGE_BYTES).contains(&most.load(Ordering::SeqCst)), "{most:?} pages");
    for engine in &engines {
        engine.pool.shutdown().unwrap();
        assert_eq!(engine.shares.granted(), 0);
        assert_eq!(engine.fake.inner().violations, [""; 0]);
    }
    drop(engines);
    assert_eq!(std::fs::read_dir(&dir).unwrap().flatten().filter(|file| is_budget(&file.path())).count(), 0);
}

fn is_budget(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "kvb")
}

#[test]
fn an_instance_keeps_its_minimum() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let terms = Terms { limit_bytes: None, min_bytes: 7 * PAGE_BYTES };
    let a = Engine::begin(&dir, "a", terms, NEVER, 0);
    let b = Engine::plain(&dir, "b");
    let cache = a.cache(9);
    soon("b has what is beyond it", || b.pool.reserve_demand(4 * 5).unwrap() == 4 * 3);
    for _ in 0..100 {
        assert!(b.pool.reserve_demand(4 * 5).unwrap() <= 4 * 3);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!((cache.len(), a.mapped_pages()), (7, 7));
}

#[test]
fn who_was_refused_is_woken_when_others_gave() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let a = Engine::plain(&dir, "a");
    let b = Engine::begin(&dir, "b", Terms::default(), NEVER, 4);
    let cache = a.cache(10);
    soon("a gives a page", || b.pool.alloc(4).unwrap().is_some());
    assert!(b.pool.quiesce(SOON).unwrap());
    soon("a page is backed ahead", || {
        assert_eq!(b.pool.alloc(4 * 15).unwrap(), None, "more than all that there is");
        b.mapped_pages() > 1
    });
    assert!(cache.len() < 10);
}

#[test]
fn a_limit_is_applied_at_once_where_it_is_met() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let a = Engine::plain(&dir, "a");
    let answer = answer(&dir, "a", limit(3));
    assert_eq!((answer.outcome, answer.terms.limit_bytes), (Outcome::Applied, Some(3 * PAGE_BYTES)));
    let standing = a.pool.limit().unwrap();
    assert_eq!((standing.limit_bytes, standing.revision), (3 * PAGE_BYTES, answer.revision));
    assert_eq!((a.pool.alloc(13).unwrap(), a.record.terms().limit_bytes), (None, Some(3 * PAGE_BYTES)));
    assert_eq!(a.pool.alloc(12).unwrap().unwrap().len(), 12);
    let change = Change { limit_bytes: Some(None), ..Change::default() };
    assert_eq!(self::answer(&dir, "a", change).outcome, Outcome::Applied);
    assert_eq!(a.pool.limit().unwrap().limit_bytes, 20 * PAGE_BYTES, "all that it reserved");
}

#[test]
fn a_limit_is_deferred_until_it_has_drained_and_cached_prefixes_make_way() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let a = Engine::plain(&dir, "a");
    let held = a.pool.alloc(4 * 4).unwrap().unwrap();
    let cache = a.cache(3);
    let deferred = answer(&dir, "a", limit(2));
    assert_eq!((deferred.outcome, deferred.terms.limit_bytes), (Outcome::Deferred, Some(2 * PAGE_BYTES)));
    soon("cached prefixes go", || cache.len() == 0);
    assert_eq!(a.pool.limit().unwrap().state, LimitState::Deferred);
    let again = Change { revision: Some(deferred.revision), ..limit(2) };
    assert_eq!(answer(&dir, "a", again).outcome, Outcome::Deferred);
    a.pool.free(&held[8..]).unwrap();
    soon("it has drained", || answer(&dir, "a", again).outcome == Outcome::Applied);
    assert_eq!(a.mapped_pages(), 2);
}

#[test]
fn terms_that_cannot_be_met_are_rejected_and_change_nothing() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let a = Engine::plain(&dir, "a");
    answer(&dir, "a", limit(9));
    let impossible = Change { min_bytes: Some(BUDGET + 1), limit_bytes: Some(None), ..Change::default() };
    assert_eq!(answer(&dir, "a", impossible).outcome, Outcome::Rejected);
    a.fake.fail_at(0, Fault::Lost);
    assert!(a.pool.alloc(4).is_err());
    a.fake.heal();
    let too_little = Change { limit_bytes: Some(Some(PAGE_BYTES / 2)), ..Change::default() };
    assert_eq!(answer(&dir, "a", too_little).outcome, Outcome::Rejected, "more is lost");
    let terms = a.record.terms();
    assert_eq!((terms.limit_bytes, terms.min_bytes), (Some(9 * PAGE_BYTES), 0));
    assert_eq!(a.pool.limit().unwrap().limit_bytes, 9 * PAGE_BYTES);
}

#[test]
fn all_pools_of_an_instance_are_limited_or_none() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let a = Engine::plain(&dir, "a");
    let fake = Arc::new(Fake::default());
    let mapper = Arc::new(Budgeted::new(fake.clone(), a.shares.clone()));
    let second = Arc::new(Pool::new(config(80), mapper, fake.clone()).unwrap());
    a.steward.watch(&second).unwrap();
    let ids = [a.pool.alloc(4 * 3).unwrap().unwrap(), second.alloc(4 * 3).unwrap().unwrap()];
    // Neither has more than that by itself.
    assert_eq!(answer(&dir, "a", limit(4)).outcome, Outcome::Deferred);
    second.free(&ids[1][4..]).unwrap();
    let revision = second.limit().unwrap().revision;
    let again = Change { revision: Some(revision), ..limit(4) };
    soon("together they have", || answer(&dir, "a", again).outcome == Outcome::Applied);
    assert_eq!((a.pool.alloc(4).unwrap(), second.alloc(4).unwrap()), (None, None), "one limit for both");
    fake.fail_at(0, Fault::Lost);
    second.free(&ids[1][..4]).unwrap();
    assert!(second.quiesce(SOON).unwrap());
    assert_eq!(answer(&dir, "a", limit(0)).outcome, Outcome::Rejected);
    assert_eq!(a.pool.limit().unwrap().limit_bytes, 4 * PAGE_BYTES, "the first one too");
    drop(second);
    assert_eq!(answer(&dir, "a", limit(2)).outcome, Outcome::Deferred, "who is gone is in nobody's way");
}

#[test]
fn a_pool_that_comes_later_is_limited_too() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let terms = Terms { limit_bytes: Some(2 * PAGE_BYTES), min_bytes: 0 };
    let a = Engine::begin(&dir, "a", terms, NEVER, 0);
    assert_eq!(a.pool.limit().unwrap().limit_bytes, 2 * PAGE_BYTES);
    assert_eq!(a.pool.alloc(9).unwrap(), None);
}

#[test]
fn nobody_is_asked_for_what_the_limit_refuses() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let terms = Terms { limit_bytes: Some(3 * PAGE_BYTES), min_bytes: 0 };
    let record = Arc::new(InstanceRecord::create(&dir, "a", "test", "cpu", terms).unwrap());
    let device = BudgetShare::join(&dir, &record, "host", 4 * PAGE_BYTES, None).unwrap();
    let beside = InstanceRecord::create(&dir, "b", "test", "cpu", Terms::default()).unwrap();
    let other = BudgetShare::join(&dir, &beside, "host", 4 * PAGE_BYTES, None).unwrap();
    let shares = Arc::new(Shares::new(record, vec![device]));
    let mapper = Budgeted::new(Arc::new(Fake::default()), shares.clone());
    other.take(2 * PAGE_BYTES).unwrap();
    assert!(mapper.map(&[0, 1, 2, 3]).is_err());
    assert_eq!(shares.short_bytes(), 3 * PAGE_BYTES, "the fourth is beyond the limit");
    other.give(PAGE_BYTES);
    mapper.map(&[0, 1, 2]).unwrap();
    let refusal = mapper.map(&[3]).unwrap_err();
    let MapFailure::OutOfMemory { source } = refusal else { panic!("{refusal:?}") };
    assert!(source.to_string().contains("limit of this instance"), "{source}");
    assert_eq!(shares.short_bytes(), 0);
    mapper.unmap(&[0, 1, 2]).unwrap();
    assert_eq!(shares.granted(), 0);
}

#[test]
fn cached_prefixes_go_when_the_device_is_short_of_memory() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let policy = CachePolicy { free_watermark_bytes: 3 * PAGE_BYTES, idle: None };
    let a = Engine::begin(&dir, "a", Terms::default(), policy, 0);
    let cache = a.cache(6);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(cache.len(), 6);
    a.fake.set_budget(7); // a stranger: one page and a half are free
    soon("they go", || cache.len() < 6);
    soon("the watermark is reached", || a.pool.device_room().unwrap() >= policy.free_watermark_bytes);
    assert_eq!(cache.len(), 4, "and not all of them");
}

#[test]
fn cached_prefixes_go_when_nobody_has_allocated_for_long() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let idle = Duration::from_millis(200);
    let policy = CachePolicy { free_watermark_bytes: 0, idle: Some(idle) };
    let a = Engine::begin(&dir, "a", Terms::default(), policy, 0);
    let began = Instant::now();
    let cache = a.cache(6);
    soon("they go", || cache.len() == 0);
    assert!(began.elapsed() >= idle);
    assert_eq!(cache.asked.load(Ordering::SeqCst), 1);
    soon("their memory goes", || a.mapped_pages() == 0);
    let cache = a.cache(2);
    soon("and again", || cache.len() == 0);
}

#[test]
fn an_engine_that_has_nothing_sleeps_until_it_is_rung_or_has_something() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let record = Arc::new(InstanceRecord::create(&dir, "a", "test", "cpu", Terms::default()).unwrap());
    let device = BudgetShare::join(&dir, &record, "host", BUDGET, Some(BUDGET)).unwrap();
    let shares = Arc::new(Shares::new(record.clone(), vec![device]));
    let steward = Steward::new(record.clone(), shares.clone(), NEVER).unwrap();
    let cache = Arc::new(Prefixes {
        pool: Weak::new(),
        pages: Mutex::default(),
        idle_when_asked: AtomicU64::new(0),
        asked: AtomicU32::new(0),
        looked: AtomicU32::new(0),
    });
    steward.set_cached(Some(cache.clone()));
    let looked = || cache.looked.load(Ordering::SeqCst);
    soon("it looks", || looked() > 0);
    std::thread::sleep(Duration::from_millis(100));
    let before = looked();
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(looked(), before, "it sleeps");
    shares.take(PAGE_BYTES).unwrap();
    within(Duration::from_secs(5), "memory wakes it", || looked() > before);
    shares.give(PAGE_BYTES);
    std::thread::sleep(Duration::from_millis(100));
    let before = looked();
    record.ring();
    within(Duration::from_secs(5), "so does the bell", || looked() > before);
    let began = Instant::now();
    drop(steward);
    assert!(began.elapsed() < Duration::from_secs(2), "its end is not waited for in vain");
    drop(shares);
    assert_eq!((Arc::strong_count(&cache), Arc::strong_count(&record)), (1, 1), "and leaves nothing");
}

#[test]
fn a_cache_that_panics_is_not_asked_again() {
    struct Panics(AtomicBool);
    impl Cached for Panics {
        fn give(&self, _bytes: u64) -> u64 {
            self.0.store(true, Ordering::SeqCst);
            panic!("on purpose")
        }
        fn bytes(&self) -> u64 {
            5 * PAGE_BYTES
        }
    }
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let a = Engine::begin(&dir, "a", Terms::default(), NEVER, 3);
    let b = Engine::plain(&dir, "b");
    let ids = a.pool.alloc(4 * 8).unwrap().unwrap();
    let panics = Arc::new(Panics(AtomicBool::new(false)));
    a.steward.set_cached(Some(panics.clone()));
    soon("it is asked", || {
        let _ = b.pool.alloc(4 * 5).unwrap();
        panics.0.load(Ordering::SeqCst)
    });
    soon("and let go", || Arc::strong_count(&panics) == 1);
    a.pool.free(&ids[8..]).unwrap();
    soon("what is idle is still given", || b.pool.alloc(4 * 5).unwrap().is_some());
}

#[test]
fn a_steward_may_be_dropped_by_what_it_calls() {
    struct Drops(Mutex<Option<Steward>>);
    impl Cached for Drops {
        fn give(&self, _bytes: u64) -> u64 {
            0
        }
        fn bytes(&self) -> u64 {
            drop(self.0.lock().unwrap().take());
            0
        }
    }
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let record = Arc::new(InstanceRecord::create(&dir, "a", "test", "cpu", Terms::default()).unwrap());
    let shares = Arc::new(Shares::new(record.clone(), vec![]));
    let steward = Steward::new(record.clone(), shares, NEVER).unwrap();
    let drops = Arc::new(Drops(Mutex::default()));
    let mut place = drops.0.lock().unwrap();
    steward.set_cached(Some(drops.clone()));
    *place = Some(steward);
    drop(place);
    soon("the thread has ended", || {
        record.ring();
        Arc::strong_count(&record) == 1
    });
}

#[test]
fn memory_is_taken_on_all_devices_or_on_none() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let record = Arc::new(InstanceRecord::create(&dir, "a", "test", "cpu", Terms::default()).unwrap());
    let budgets = [4 * PAGE_BYTES, 2 * PAGE_BYTES];
    let devices = ["GPU-0", "GPU-1"].into_iter().zip(budgets);
    let join = |(device, bytes)| BudgetShare::join(&dir, &record, device, bytes, Some(bytes)).unwrap();
    let shares = Shares::new(record.clone(), devices.map(join).collect());
    assert_eq!(shares.room(), 2 * PAGE_BYTES);
    shares.take(PAGE_BYTES).unwrap();
    let refusal = shares.take(2 * PAGE_BYTES).unwrap_err();
    assert!(!refusal.to_string().is_empty());
    assert_eq!((shares.granted(), shares.room()), (PAGE_BYTES, PAGE_BYTES), "nothing is left of it");
    shares.charge(PAGE_BYTES);
    assert_eq!((shares.granted(), shares.room()), (2 * PAGE_BYTES, 0));
    shares.give(2 * PAGE_BYTES);
    assert_eq!(shares.granted(), 0);
}
