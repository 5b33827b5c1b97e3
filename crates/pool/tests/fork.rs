//! In a fork of the process that made it a pool refuses. A test binary of its own: what is said here holds for all of it.
#![allow(clippy::unwrap_used)]

mod fake;

use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Duration;

use fake::share::Part;
use fake::{Fake, PAGE_BYTES, config};
use kvcached_control::{InstanceRecord, Terms};
use kvcached_pool::{Budgeted, CachePolicy, Mapper, Meter, NoMeter, Pool, PoolError, Shares, Steward, Usage};

/// Holds up whoever tells it that memory is used while `gate` is locked: under the pool's lock.
struct Slow {
    gate: Mutex<()>,
    told: Barrier,
}

impl Meter for Slow {
    fn publish(&self, usage: &Usage) {
        if usage.used_bytes > 0 {
            self.told.wait();
            drop(self.gate.lock().unwrap());
        }
    }
}

#[test]
fn a_fork_is_refused_before_the_lock() {
    let slow = Arc::new(Slow { gate: Mutex::default(), told: Barrier::new(2) });
    let fake = Arc::new(Fake::default());
    let pool = Arc::new(Pool::new(config(12), fake.clone(), slow.clone()).unwrap());
    let share = Part::alone(9 * PAGE_BYTES);
    let charged = Budgeted::new(Arc::new(Fake::default()), share.clone());
    charged.map(&[0]).unwrap();
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let record = Arc::new(InstanceRecord::create(&dir, "a", "test", "cpu", Terms::default()).unwrap());
    let shares = Arc::new(Shares::new(record.clone(), vec![]));
    let steward = Steward::new(record.clone(), shares, CachePolicy::default()).unwrap();
    let held = slow.gate.lock().unwrap();
    let allocating = std::thread::spawn({
        let pool = Arc::clone(&pool);
        move || pool.alloc(1)
    });
    slow.told.wait();

    // The pool's lock and the mapper's are held, as by threads that a fork does not have.
    let busy = fake.inner();
    kvcached_pool::forked();
    let (done, all_done) = mpsc::channel();
    let inherited = Arc::clone(&pool);
    std::thread::spawn(move || {
        let pool = inherited;
        pool.memory_freed();
        assert_eq!((pool.idle_bytes(), pool.idle_for()), (0, Duration::MAX));
        done.send(vec![
            pool.alloc(1).map(drop),
            pool.free(&[0]),
            pool.claim(&[0]),
            pool.available().map(drop),
            pool.backed().map(drop),
            pool.promised().map(drop),
            pool.held().map(drop),
            pool.free_ids().map(drop),
            pool.refresh_credit(0).map(drop),
            pool.reserve_demand(1).map(drop),
            pool.alloc_on_hand(1).map(drop),
            pool.keep_on_hand(1).map(drop),
            pool.set_limit(0, None).map(drop),
            pool.limit().map(drop),
            pool.quiesce(Duration::ZERO).map(drop),
            pool.try_to_reserve(1).map(drop),
            pool.free_reserved(),
            pool.begin_epoch().map(drop),
            pool.release_through(0),
            pool.trim().map(drop),
            pool.give_back_idle(1).map(drop),
            pool.device_room().map(drop),
            pool.clear(),
            pool.shutdown().map(drop),
            pool.occupancy(&[0]).map(drop),
            pool.pages_of(&[0]).map(drop),
            pool.emptied_by(&[0]).map(drop),
            pool.stats().map(drop),
        ])
    });
    // Runs out where a call waits for the lock.
    let answers = all_done.recv_timeout(Duration::from_secs(20)).unwrap();
    for (number, answer) in answers.into_iter().enumerate() {
        let owner = std::process::id();
        assert!(
            matches!(answer, Err(PoolError::Forked { owner: named }) if named == owner),
            "call {number}: {answer:?}"
        );
    }
    drop((held, busy));
    allocating.join().unwrap().unwrap();
    fake.calls();
    drop(pool); // not shut down: the memory is another process's
    assert_eq!((fake.mapped(), fake.calls()), (vec![0], vec![]));

    drop(charged);
    assert_eq!(share.granted(), PAGE_BYTES, "what is charged is its parent's");

    assert!(matches!(steward.watch(&pool_of_fork()), Err(PoolError::Forked { .. })));
    drop(steward);
    assert_eq!(Arc::strong_count(&record), 3, "nor is its parent's steward ended: it is not there");

    // What a fork makes itself is its own.
    assert_eq!(pool_of_fork().alloc(2).unwrap(), Some(vec![0, 1]));
}

fn pool_of_fork() -> Arc<Pool> {
    Arc::new(Pool::new(config(12), Arc::new(Fake::default()), Arc::new(NoMeter)).unwrap())
}
