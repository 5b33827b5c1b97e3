//! Several threads over one range, over two, and one that looks in while another is in the middle of a driver call.

use std::fmt;
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::time::Duration;

use kvcached_vmm::sim::Sim;
use kvcached_vmm::{
    Access, Device, Driver, DriverError, FTensor, Handle, Layout, MemInfo, TransactionError, Unbacked,
    VmmError,
};

use super::ground::{Ground, words_of};
use super::scenario::Op;
use super::setup::{Cache, PAGES, Setup, alone};

type Look = Box<dyn FnOnce() + Send>;

/// Passes everything on, and lets a test look in before one call.
struct Peek {
    inner: Arc<dyn Driver>,
    /// At the how many-th call from now to look in, from 1.
    look: Mutex<Option<(u32, Look)>>,
}

impl Peek {
    fn look(&self) {
        let mut waiting = self.look.lock().unwrap();
        let due = match &mut *waiting {
            Some((1, _)) => waiting.take(),
            Some((calls, _)) => {
                *calls -= 1;
                None
            }
            None => None,
        };
        drop(waiting);
        if let Some((_, look)) = due {
            look();
        }
    }
}

impl fmt::Debug for Peek {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Peek")
    }
}

impl Driver for Peek {
    fn device(&self) -> Device {
        self.inner.device()
    }
    fn granularity(&self) -> u64 {
        self.inner.granularity()
    }
    fn reserve(&self, bytes: u64) -> Result<usize, DriverError> {
        self.look();
        self.inner.reserve(bytes)
    }
    fn free(&self, address: usize, bytes: u64) -> Result<(), DriverError> {
        self.look();
        self.inner.free(address, bytes)
    }
    fn create(&self, bytes: u64) -> Result<Handle, DriverError> {
        self.look();
        self.inner.create(bytes)
    }
    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        self.look();
        self.inner.release(handle)
    }
    fn share(&self, handle: Handle) -> Result<(), DriverError> {
        self.look();
        self.inner.share(handle)
    }
    fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<(), DriverError> {
        self.look();
        self.inner.map(address, bytes, handle)
    }
    fn set_access(&self, address: usize, bytes: u64, access: Access) -> Result<(), DriverError> {
        self.look();
        self.inner.set_access(address, bytes, access)
    }
    fn clear(&self, mappings: &[(usize, u64)]) -> Result<(), DriverError> {
        self.look();
        self.inner.clear(mappings)
    }
    fn unmap(&self, address: usize, bytes: u64) -> Result<(), DriverError> {
        self.look();
        self.inner.unmap(address, bytes)
    }
    fn identity(&self) -> Result<String, DriverError> {
        self.look();
        self.inner.identity()
    }
    fn mem_info(&self) -> Result<MemInfo, DriverError> {
        self.look();
        self.inner.mem_info()
    }
    fn synchronise(&self) -> Result<(), DriverError> {
        self.look();
        self.inner.synchronise()
    }
}

/// What another thread finds of page 3, and of transaction 1, in the middle of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    InTransition,
    InTransaction,
    Free,
}

/// What leads to a call, the call, and what is found meanwhile.
fn steps() -> Vec<(Vec<Op>, Op, Found)> {
    let map = || Op::Map(vec![3]);
    let unmap = || Op::Unmap(vec![3]);
    let prepare = || Op::Prepare(1, vec![3]);
    vec![
        (vec![], map(), Found::InTransition),
        (vec![map(), unmap()], map(), Found::InTransition),
        (vec![map()], unmap(), Found::InTransition),
        (vec![map(), unmap()], Op::Trim, Found::Free),
        (vec![map()], prepare(), Found::InTransition),
        (vec![map(), prepare()], Op::Commit(1), Found::Free),
        (vec![map(), prepare()], Op::Abort(1), Found::InTransaction),
    ]
}

/// Another thread's view in the middle of a call: what it did not find as it ought to be, in words; None if it had to wait.
fn meanwhile(range: &Weak<FTensor>, found: Found, transaction: bool) -> Option<Vec<String>> {
    let (send, receive) = mpsc::channel();
    let range = range.clone();
    std::thread::spawn(move || {
        let range = range.upgrade().unwrap();
        let mut wrong = vec![];
        let mut expect = |what: &str, holds: bool| {
            if !holds {
                wrong.push(what.to_owned());
            }
        };
        let bytes =
            [range.mapped_bytes(), range.cached_bytes(), range.leaked_bytes(), range.retained_bytes()];
        let largest = u64::from(PAGES) * range.geometry().page_bytes();
        expect("bytes", bytes.into_iter().all(|bytes| bytes <= largest));
        expect("quarantine", range.quarantined_pages().is_empty());
        let refusal = match found {
            Found::InTransition => Some(VmmError::InTransition { page: 3 }),
            Found::InTransaction => Some(VmmError::InTransaction { page: 3 }),
            Found::Free => None,
        };
        if let Some(refusal) = refusal {
            expect("map of it", range.map(&[0, 3]) == Err(refusal.clone()));
            expect("unmap of it", range.unmap(&[3]) == Err(refusal));
        }
        expect("map of another", range.map(&[0, 1]) == Ok(vec![0, 1]));
        expect("unmap of another", range.unmap(&[1]) == Ok(()));
        expect("mapped pages", range.mapped_pages() == [0]);
        expect("pending", range.pending_transaction() == transaction.then_some(1));
        if transaction {
            let busy = VmmError::from(TransactionError::Busy { id: 1 });
            expect("commit", range.commit_unmap(1) == Err(busy));
            let waits = VmmError::from(TransactionError::Pending { id: 2, pending: 1 });
            expect("prepare", range.prepare_unmap(2, &[0]) == Err(waits));
        }
        drop(range);
        send.send(wrong).unwrap();
    });
    receive.recv_timeout(Duration::from_secs(10)).ok()
}

#[test]
fn no_lock_is_held_across_any_driver_call() {
    let _alone = alone();
    let mut looks = 0;
    for setup in Setup::all() {
        for (before, op, found) in steps() {
            for k in 1.. {
                let sim = Sim::new();
                let peek = Arc::new(Peek { inner: sim.clone(), look: Mutex::new(None) });
                let range = Arc::new(setup.reserve(peek.clone()).unwrap());
                before.iter().for_each(|op| drop(op.run(&range).unwrap()));
                let (send, receive) = mpsc::channel();
                let weak = Arc::downgrade(&range);
                let transaction = matches!(op, Op::Prepare(..) | Op::Commit(_) | Op::Abort(_));
                let look = move || send.send(meanwhile(&weak, found, transaction)).unwrap();
                *peek.look.lock().unwrap() = Some((k, Box::new(look)));
                op.run(&range).unwrap();
                let unused = peek.look.lock().unwrap().take();
                if unused.is_some() {
                    assert!(k > 1 || op == Op::Trim, "{op:?} makes no driver call");
                    break;
                }
                let wrong = receive.recv().unwrap();
                assert_eq!(
                    wrong,
                    Some(vec![]),
                    "in call {k} of {op:?}, {setup:?}: None is a lock that is held"
                );
                looks += 1;
                let backed = matches!(op, Op::Map(_) | Op::Abort(_));
                assert_eq!(range.mapped_pages(), if backed { vec![0, 3] } else { vec![0] });
                // Both threads may have found room in the cache.
                assert!(range.cached_bytes() <= setup.cache_bytes(sim.granularity()));
                drop(range);
                sim.assert_clean();
            }
        }
    }
    assert!(looks > 250, "{looks}");
}

#[test]
fn memory_that_is_released_for_a_range_serves_it_though_its_keeper_keeps_more_meanwhile() {
    let _alone = alone();
    let sim = Sim::new();
    let peek = Arc::new(Peek { inner: sim.clone(), look: Mutex::new(None) });
    let keeper = Setup { cache: Cache::Everything, ..Setup::PLAIN };
    let keeps = Arc::new(keeper.reserve(peek.clone()).unwrap());
    let wants = Setup::PLAIN.reserve(peek.clone()).unwrap();
    keeps.map(&[0, 1]).unwrap();
    keeps.unmap(&[0]).unwrap();
    sim.set_budget(sim.held_bytes());
    let other = keeps.clone();
    // The first call finds no memory, the second releases what is kept.
    *peek.look.lock().unwrap() = Some((2, Box::new(move || other.unmap(&[1]).unwrap())));
    assert_eq!(wants.map(&[0]), Ok(vec![0]));
    assert_eq!((keeps.cached_bytes(), keeps.mapped_bytes()), (sim.held_bytes() / 2, 0));
    drop((keeps, wants));
    sim.assert_clean();
}

/// Two threads map, prepare, decide and unmap two pages each, one transaction at a time; a third has a page of its own, and
/// trims. What each writes, where there are bytes, it finds again.
pub fn share(ground: &Ground, setup: Setup, rounds: u64) {
    let range = setup.reserve(ground.driver()).unwrap();
    let id = Mutex::new(0);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (range, id) = (&range, &id);
            scope.spawn(move || {
                let own = [thread, thread + 3];
                for round in 1..=rounds {
                    assert_eq!(range.map(&own), Ok(own.to_vec()));
                    let words = own.map(|page| words_of(range, page)).concat();
                    let expect = |word: &dyn Fn(usize) -> u64| {
                        if ground.has_bytes() {
                            words.iter().for_each(|at| assert_eq!(ground.word(*at), word(*at)));
                        }
                    };
                    let salt = |at| round << 48 ^ at as u64;
                    expect(&|_| 0);
                    if ground.has_bytes() {
                        words.iter().for_each(|at| ground.set_word(*at, salt(*at)));
                    }
                    let mut next = id.lock().unwrap();
                    *next += 1;
                    range.prepare_unmap(*next, &own).unwrap();
                    if round % 2 == 0 {
                        range.commit_unmap(*next).unwrap();
                        continue;
                    }
                    range.abort_unmap(*next).unwrap();
                    drop(next);
                    expect(&salt);
                    range.unmap(&own).unwrap();
                }
                range.map(&own[..1]).unwrap();
            });
        }
        scope.spawn(|| {
            for _ in 0..rounds {
                assert_eq!(range.map(&[2]), Ok(vec![2]));
                range.unmap(&[2]).unwrap();
                range.trim().unwrap();
                assert!(range.mapped_bytes() <= u64::from(PAGES) * range.geometry().page_bytes());
            }
        });
    });
    assert_eq!((range.mapped_pages(), range.pending_transaction()), (vec![0, 1], None));
    assert_eq!(range.mapped_bytes(), 2 * range.geometry().page_bytes());
    drop(range);
    ground.check_end(true);
}

#[test]
fn threads_share_a_range() {
    let _alone = alone();
    for setup in Setup::all() {
        share(&Ground::sim(), setup, 60);
        share(&Ground::host(), setup, 20);
    }
}

#[test]
fn threads_have_a_device_each() {
    let _alone = alone();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let setup =
                    Setup { layout: Layout::PerLayer, unbacked: Unbacked::Hole, cache: Cache::Everything };
                let sim = Sim::new();
                let (keeps, wants) =
                    (setup.reserve(sim.clone()).unwrap(), setup.reserve(sim.clone()).unwrap());
                let page = keeps.geometry().page_bytes();
                sim.set_budget(3 * page);
                for _ in 0..100 {
                    keeps.map(&[0, 1]).unwrap();
                    keeps.unmap(&[0, 1]).unwrap();
                    // The other thread is short of memory all the time, but of another device's.
                    assert_eq!(keeps.cached_bytes(), 2 * page);
                    assert_eq!(wants.map(&[0, 1]), Ok(vec![0, 1]));
                    assert_eq!(keeps.cached_bytes(), 0);
                    wants.unmap(&[0, 1]).unwrap();
                    wants.trim().unwrap();
                }
                drop((keeps, wants));
                sim.assert_clean();
            });
        }
    });
}
