//! What a process does for the others and for whoever controls it: one thread, which looks after all of its pools.
//!
//! It sleeps on the bell of the instance's record and is rung when terms were asked for, when another instance waits for memory and
//! when one has given some back. `plan.rs` decides; here is what it sees and does. It calls pools, the driver through them, and the
//! engine's cache without holding any lock.

mod plan;
mod rest;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvcached_control::{Asked, Counter, InstanceRecord, Outcome, Terms, Timer};

use crate::error::PoolError;
use crate::fork::Owner;
use crate::limit::{LimitState, MemoryLimit};
use crate::mapper::Cause;
use crate::pool::Pool;
use crate::shares::Shares;

pub use plan::CachePolicy;
use plan::{Action, View};
use rest::Rest;

/// How long the end of a [`Steward`] waits for what it is just doing.
const PATIENCE: Duration = Duration::from_secs(5);

/// Prefixes that an engine keeps cached, whose blocks no request holds. Called from the steward's thread, without any lock.
pub trait Cached: Send + Sync {
    /// Has prefixes evicted until that many bytes of whole pages are empty, or on their way to be; returns how many are. May return
    /// before the engine has done it. Asked again meanwhile the latest number counts, not the sum.
    fn give(&self, bytes: u64) -> u64;

    /// Bytes of all that is cached: [`Cached::give`] gives no more than that, and less where pages also hold what is in use.
    fn bytes(&self) -> u64;
}

/// Looks after the pools of one process: puts terms in force that were asked for, gives memory back to other instances that wait for
/// it, and has the pools look again when there is more for themselves.
///
/// Dropping it ends its thread. In a fork it does nothing.
pub struct Steward {
    house: Arc<House>,
    thread: Option<JoinHandle<()>>,
    owner: Owner,
}

/// What the steward and its owner share.
struct House {
    record: Arc<InstanceRecord>,
    shares: Arc<Shares>,
    policy: CachePolicy,
    pools: Mutex<Vec<Weak<Pool>>>,
    cached: Mutex<Option<Arc<dyn Cached>>>,
    ending: AtomicBool,
    ended: Mutex<bool>,
    end: Condvar,
}

impl Steward {
    /// Begins to look after an instance without pools. One for each record: nobody else may wait for its bell or answer what is
    /// asked of it.
    pub fn new(
        record: Arc<InstanceRecord>,
        shares: Arc<Shares>,
        policy: CachePolicy,
    ) -> Result<Self, PoolError> {
        let house = Arc::new(House {
            record,
            shares,
            policy,
            pools: Mutex::default(),
            cached: Mutex::default(),
            ending: AtomicBool::new(false),
            ended: Mutex::default(),
            end: Condvar::new(),
        });
        let rounds = Rounds {
            house: house.clone(),
            deferred: None,
            cache_was_given: false,
            cache_rest: Rest::default(),
        };
        let thread = std::thread::Builder::new().name("kvcached-steward".to_owned()).spawn(|| rounds.walk());
        let thread = Some(thread.map_err(|error| PoolError::Driver { source: error.into() })?);
        Ok(Steward { house, thread, owner: Owner::this_process() })
    }

    /// Looks after this pool too, as long as it lives, beginning with the limit that is in force.
    pub fn watch(&self, pool: &Arc<Pool>) -> Result<(), PoolError> {
        self.owner.check()?;
        lock(&self.house.pools).push(Arc::downgrade(pool));
        // Terms that come into force meanwhile are put to this pool by the thread, or found here.
        let mut limited = None;
        while limited != self.house.record.terms().limit_bytes {
            limited = self.house.record.terms().limit_bytes;
            pool.set_limit(limited.unwrap_or(u64::MAX), None)?;
        }
        self.house.record.ring();
        Ok(())
    }

    /// From now on this is what evicts cached prefixes; None: nothing does.
    pub fn set_cached(&self, cached: Option<Arc<dyn Cached>>) {
        if self.owner.check().is_ok() {
            let before = std::mem::replace(&mut *lock(&self.house.cached), cached);
            drop(before);
            self.house.record.ring();
        }
    }
}

impl Drop for Steward {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // A thread of another process cannot be waited for, nor can itself, dropped by what it calls.
        if self.owner.is_other() {
            return std::mem::forget(thread);
        }
        self.house.ending.store(true, Ordering::SeqCst);
        if thread.thread().id() == std::thread::current().id() {
            return;
        }
        self.house.record.ring();
        let ended = lock(&self.house.ended);
        let waited = self.house.end.wait_timeout_while(ended, PATIENCE, |ended| !*ended);
        // Where the driver or the engine does not answer, the thread is left to them.
        if waited.is_ok_and(|(ended, _)| *ended) {
            let _ = thread.join();
        } else {
            tracing::warn!("the steward of an instance did not end in time");
        }
    }
}

/// The thread, and what it remembers from one look to the next.
struct Rounds {
    house: Arc<House>,
    /// Terms that were answered with "deferred".
    deferred: Option<Asked>,
    cache_was_given: bool,
    cache_rest: Rest,
}

impl Rounds {
    fn walk(mut self) {
        let _last = Last(self.house.clone());
        while !self.house.ending.load(Ordering::SeqCst) {
            let heard = self.house.record.heard();
            self.house.shares.fall_asleep(); // before it looks: whatever comes later rings
            self.apply(); // whoever asks need not wait for the engine, whom a look asks what it has cached
            let cached_bytes = self.house.cached_bytes();
            let pools = self.house.pools(); // afterwards: the pool of whatever caches is among them
            let view = self.look(&pools, cached_bytes);
            for action in plan::plan(&view, &self.house.policy) {
                self.carry_out(action, &pools);
            }
            let view = View {
                cache_was_given: self.cache_was_given,
                cache_rests: self.cache_rest.left(Instant::now()),
                deferred: self.deferred.as_ref().map(|asked| self.unmet_bytes(&pools, &asked.terms)),
                idle_bytes: idle_bytes(&pools),
                cached_bytes: self.house.cached_bytes(),
                ..view
            };
            self.house.shares.offer(view.givable_bytes());
            self.house.record.publish_needs(self.house.shares.short_bytes(), view.cached_bytes);
            drop(pools); // the last holder of a pool ends it
            let again = plan::look_again(&view, &self.house.policy);
            if again.is_some() {
                self.house.shares.stay_awake();
            }
            self.house.record.wait(heard, again);
        }
    }

    fn look(&mut self, pools: &[Arc<Pool>], cached_bytes: u64) -> View {
        let House { shares, policy, .. } = &*self.house;
        let idle_for = pools.iter().map(|pool| pool.idle_for()).min().unwrap_or(Duration::MAX);
        self.cache_was_given &= policy.idle.is_some_and(|idle| idle_for >= idle);
        let (short_bytes, room) = (shares.short_bytes(), shares.look_at_room());
        let mut view = View {
            deferred: self.deferred.as_ref().map(|asked| self.unmet_bytes(pools, &asked.terms)),
            others_short: shares.others_short(),
            part_bytes: shares.part(),
            short_bytes,
            room_bytes: room.now,
            room_before_bytes: room.before,
            idle_bytes: idle_bytes(pools),
            leaving_bytes: pools.iter().map(|pool| pool.leaving_bytes()).sum(),
            cached_bytes,
            cache_rests: self.cache_rest.left(Instant::now()),
            device_room_bytes: None,
            idle_for,
            cache_was_given: self.cache_was_given,
        };
        if policy.free_watermark_bytes > 0 && view.givable_bytes() > 0 {
            view.device_room_bytes = pools.iter().find_map(|pool| pool.device_room().ok());
        }
        view
    }

    fn carry_out(&mut self, action: Action, pools: &[Arc<Pool>]) {
        match action {
            Action::Confirm => {
                if let Some(asked) = self.deferred.take() {
                    self.house.record.answer(&asked, Outcome::Applied);
                }
            }
            Action::GiveIdle(bytes) => {
                self.reclaim(Counter::IdleBytesReclaimed, || give_idle(pools, bytes));
            }
            Action::GiveCached(bytes) => {
                let given = self.reclaim(Counter::CachedBytesReclaimed, || {
                    let emptied = self.house.with_cached(|cached| cached.give(bytes));
                    // That may have become idle, or be on its way: gone when this returns, if it can be.
                    if emptied > 0 {
                        give_idle(pools, bytes);
                    }
                    emptied
                });
                self.cache_rest.asked(bytes, given, Instant::now());
            }
            Action::GiveCache => {
                self.cache_was_given = true;
                let give = || self.house.with_cached(|cached| cached.give(u64::MAX));
                self.reclaim(Counter::CachedBytesReclaimed, give);
            }
            Action::Look => pools.iter().for_each(|pool| pool.memory_freed()),
        }
    }

    /// Has `give` give memory back; counts the bytes that it says it gave, and returns them.
    fn reclaim(&self, from: Counter, give: impl FnOnce() -> u64) -> u64 {
        let (began, metrics) = (Instant::now(), self.house.record.metrics());
        let given = give();
        if given == 0 {
            return 0;
        }
        metrics.add(from, given);
        metrics.time(Timer::Reclaim, began.elapsed());
        if from == Counter::CachedBytesReclaimed {
            metrics.add(Counter::Evictions, 1);
        }
        given
    }

    /// Puts terms in force that were asked for, all of them or none, and answers.
    fn apply(&mut self) {
        let House { record, shares, .. } = &*self.house;
        let Some(asked) = record.asked() else { return };
        let pools = self.house.pools();
        if let Err(reason) = enforce(shares, &pools, &asked, &record.terms()) {
            tracing::warn!(reason, terms = ?asked.terms, "terms that were asked for are rejected");
            return record.answer(&asked, Outcome::Rejected);
        }
        let met = self.unmet_bytes(&pools, &asked.terms) == 0;
        record.answer(&asked, if met { Outcome::Applied } else { Outcome::Deferred });
        self.deferred = (!met).then_some(asked);
        let is_new = |pool: &&Arc<Pool>| !pools.iter().any(|known| Arc::ptr_eq(known, pool));
        for pool in self.house.pools().iter().filter(is_new) {
            if let Err(reason) = limit_pool(pool, asked.terms.limit_bytes, asked.revision) {
                tracing::warn!(reason, "a pool that came just now is not limited");
            }
        }
    }
}

impl Rounds {
    /// Bytes that are held, and charged, beyond the limit of these terms. The page of a null block stays under any, and so does what lies
    /// beside the pages and cannot go.
    fn unmet_bytes(&self, pools: &[Arc<Pool>], terms: &Terms) -> u64 {
        let Some(limit) = terms.limit_bytes else { return 0 };
        let (mut occupied, mut stays, mut deferred) = (0, 0, false);
        for pool in pools {
            if let (Ok(standing), Ok(stats)) = (pool.limit(), pool.stats()) {
                occupied += standing.occupied_bytes + stats.usage.beside_bytes;
                stays += pool.null_block().map_or(0, |_| pool.page_bytes()) + stats.usage.beside_bytes;
                deferred |= standing.state == LimitState::Deferred;
            }
        }
        occupied.saturating_sub(limit.max(stays)).max(u64::from(deferred))
    }
}

impl House {
    fn pools(&self) -> Vec<Arc<Pool>> {
        let mut pools = lock(&self.pools);
        pools.retain(|pool| pool.strong_count() > 0);
        pools.iter().filter_map(Weak::upgrade).collect()
    }

    fn cached_bytes(&self) -> u64 {
        self.with_cached(|cached| cached.bytes())
    }

    /// Asks the engine's cache. One that panics is not asked again: an engine does without, the other instances do not.
    fn with_cached(&self, ask: impl Fn(&dyn Cached) -> u64) -> u64 {
        let Some(cached) = lock(&self.cached).clone() else { return 0 };
        match catch_unwind(AssertUnwindSafe(|| ask(&*cached))) {
            Ok(bytes) => bytes,
            Err(_) => {
                tracing::error!("the cache of an engine panicked: it is not asked for memory any longer");
                *lock(&self.cached) = None;
                0
            }
        }
    }
}

fn idle_bytes(pools: &[Arc<Pool>]) -> u64 {
    pools.iter().map(|pool| pool.idle_bytes()).sum()
}

/// Has the pools give back so many idle bytes, where they have that many; returns what went.
fn give_idle(pools: &[Arc<Pool>], bytes: u64) -> u64 {
    let mut given = 0;
    // One that is leaving is waited for; one that serves no more has neither.
    for pool in pools.iter().filter(|pool| pool.idle_bytes() + pool.leaving_bytes() > 0) {
        match pool.give_back_idle(bytes.saturating_sub(given)) {
            Ok(more) => given += more,
            Err(PoolError::Shutdown) => {}
            Err(error) => tracing::warn!(%error, "a pool did not give idle memory back"),
        }
    }
    given
}

/// Has these terms hold in the shares and all pools, or in none.
fn enforce(shares: &Shares, pools: &[Arc<Pool>], asked: &Asked, standing: &Terms) -> Result<(), Cause> {
    let Asked { revision, terms } = asked;
    terms.check()?;
    shares.set_min(terms.min_bytes)?;
    for (place, pool) in pools.iter().enumerate() {
        if let Err(reason) = limit_pool(pool, terms.limit_bytes, *revision) {
            let limits = pools[..place].iter().map(|pool| limit_pool(pool, standing.limit_bytes, *revision));
            let minimum = std::iter::once_with(|| Ok(shares.set_min(standing.min_bytes)?));
            for error in limits.chain(minimum).filter_map(Result::err) {
                tracing::warn!(error, "terms that were rejected could not be undone in full");
            }
            return Err(reason);
        }
    }
    Ok(())
}

/// Limits a pool under this revision, or the next one where its engine has limited it under a later one.
fn limit_pool(pool: &Pool, bytes: Option<u64>, revision: u64) -> Result<(), Cause> {
    let bytes = bytes.unwrap_or(u64::MAX);
    let answer = match pool.set_limit(bytes, Some(revision)) {
        Ok(MemoryLimit { state: LimitState::Stale | LimitState::Conflict, .. }) => {
            pool.set_limit(bytes, None)
        }
        answer => answer,
    };
    match answer {
        Ok(limit) if limit.state == LimitState::Rejected => {
            Err(limit.reason.unwrap_or_else(|| "a pool cannot meet the limit".to_owned()).into())
        }
        Ok(_) | Err(PoolError::Shutdown) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// However the thread ends, nobody waits for it any longer.
struct Last(Arc<House>);

impl Drop for Last {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(
                "the steward of an instance has stopped: nobody gives memory to others any longer"
            );
        }
        *lock(&self.0.ended) = true;
        self.0.end.notify_all();
    }
}

/// What these locks guard is whole after every statement, so that a panic elsewhere is no reason to stop.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
