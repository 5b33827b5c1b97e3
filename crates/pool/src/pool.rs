//! The pool of one group.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kvcached_ledger::{ClaimPlan, Ledger, PageCounts, TransitionError};

use crate::config::PoolConfig;
use crate::error::PoolError;
use crate::fork::Owner;
use crate::mapper::{Cause, MapFailure, Mapper, UnmapFailure};
use crate::meter::{Meter, Usage};

/// Driver calls and waits that one call makes at most, where other threads take what it backed.
const MAX_ROUNDS: u32 = 64;
/// How long a call waits for another thread's driver call that holds the pages it needs.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Hands out block ids of backed pages. Thread-safe; shut down when dropped. Every call fails with `Forked` in a fork of the
/// process that made it (see [`forked`](crate::forked)), and dropping it there does nothing.
pub struct Pool {
    mapper: Arc<dyn Mapper>,
    page_bytes: u64,
    virtual_bytes: u64,
    /// Idle pages that stay mapped.
    keep: u32,
    null_block: Option<u32>,
    owner: Owner,
    /// Never locked across a call of `mapper`.
    state: Mutex<State>,
    /// Some driver call has ended, or there is no point in waiting for one.
    settled: Condvar,
}

struct State {
    ledger: Ledger,
    /// Pages that the device was seen to have room for and that are not backed yet.
    credit: u32,
    /// Driver calls that have ended, so that a waiter can tell a change from a false alarm.
    settlements: u64,
    /// Who is told how much is mapped; None once the pool is shut down and has nothing left to tell, so that the row
    /// it had is free for another pool.
    meter: Option<Arc<dyn Meter>>,
    /// What the mapper held beside the pages when a driver call last ended.
    beside_bytes: u64,
    /// What was last told to the meter.
    published: Option<Usage>,
    /// Why nobody knows any longer what is mapped.
    broken: Option<String>,
    shut_down: bool,
}

type Guard<'a> = MutexGuard<'a, State>;

impl State {
    /// The last page may hold fewer blocks than the others, and may be among the next to be backed.
    fn promised(&self) -> u32 {
        let unbacked = self.ledger.block_counts().unbacked;
        let growth = if self.credit >= self.ledger.page_counts().free {
            unbacked
        } else {
            let layout = self.ledger.layout();
            let missing = layout.num_pages() * layout.blocks_per_page - layout.num_blocks;
            unbacked.min((self.credit * layout.blocks_per_page).saturating_sub(missing))
        };
        self.ledger.backed_free_blocks() + growth
    }
}

/// Where a pool stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStats {
    /// Pages by state.
    pub pages: PageCounts,
    /// Bytes of one page.
    pub page_bytes: u64,
    /// Usable blocks of the pool, lost ones among them.
    pub num_blocks: u32,
    /// Blocks that somebody holds, the null block among them.
    pub held_blocks: u32,
    /// Free blocks in backed pages, those set aside among them.
    pub backed_blocks: u32,
    /// Blocks that may still be allocated.
    pub available_blocks: u32,
    /// Blocks kept for the next allocation.
    pub set_aside_blocks: u32,
    /// Bytes, as the meter sees them.
    pub usage: Usage,
    /// Bytes mapped and known: used and reserved.
    pub mapped_bytes: u64,
}

impl Pool {
    /// A pool over `mapper`, none of whose pages may be backed yet. Backs the minimum reserve and the null
    /// block's page; where that fails everything is undone.
    pub fn new(
        config: PoolConfig,
        mapper: Arc<dyn Mapper>,
        meter: Arc<dyn Meter>,
    ) -> Result<Self, PoolError> {
        let ledger = Ledger::new(config.layout, config.retire_policy())?;
        let page_bytes = mapper.page_bytes();
        let pool = Pool {
            page_bytes,
            virtual_bytes: mapper.virtual_bytes(),
            keep: config.max_reserved_pages(page_bytes),
            null_block: config.null_block.then_some(0),
            owner: Owner::this_process(),
            state: Mutex::new(State {
                ledger,
                credit: 0,
                settlements: 0,
                meter: Some(meter),
                beside_bytes: mapper.held_beside(),
                published: None,
                broken: None,
                shut_down: false,
            }),
            settled: Condvar::new(),
            mapper,
        };
        // On failure `pool` is dropped, and with that shut down.
        pool.establish(config.min_reserved_pages(page_bytes))?;
        Ok(pool)
    }

    fn establish(&self, min_reserved_pages: u32) -> Result<(), PoolError> {
        if let Some(id) = self.null_block {
            self.claim(&[id])?;
            self.enter()?.ledger.pin(id)?;
        }
        let mut state = self.enter()?;
        let pages = state.ledger.plan_pages(min_reserved_pages);
        if !pages.is_empty() {
            let (state, outcome) = self.back(state, &pages)?;
            drop(state);
            return outcome.map_err(|failure| PoolError::from_map(failure, pages.len() as u32));
        }
        self.publish(&mut state);
        Ok(())
    }

    // ---------------------------------------------------------------- blocks

    /// The block that is held for good.
    pub fn null_block(&self) -> Option<u32> {
        self.null_block
    }

    /// Exactly `n` ids, ascending within a page, or `None` (and nothing changed) where memory or ids are short.
    pub fn alloc(&self, n: u32) -> Result<Option<Vec<u32>>, PoolError> {
        self.obtain(|_| n, |ledger| ledger.alloc(n))
    }

    /// Gives blocks back; nothing changes unless all of them may be. A driver call that fails afterwards
    /// costs pages, which `stats` shows, never the call: the blocks are free.
    pub fn free(&self, ids: &[u32]) -> Result<(), PoolError> {
        let mut state = self.enter()?;
        let outcome = state.ledger.free(ids)?;
        self.publish(&mut state);
        // Retired pages leave with `end_step`. Reserved ones would wait for a step that may never come.
        if !outcome.reserved.is_empty() {
            self.shrink(state);
        }
        Ok(())
    }

    /// Takes these very blocks, backing their pages. Nothing changes unless all of them are free.
    pub fn claim(&self, ids: &[u32]) -> Result<(), PoolError> {
        let mut state = self.enter()?;
        let mut pages = Vec::new();
        for _ in 0..MAX_ROUNDS {
            match state.ledger.plan_claim(ids)? {
                ClaimPlan::Ready => {
                    state.ledger.claim(ids)?;
                    self.publish(&mut state);
                    return Ok(());
                }
                ClaimPlan::InMotion => {
                    let Some(next) = self.wait(state)? else { break };
                    state = next;
                }
                ClaimPlan::Map(plan) => {
                    pages = plan;
                    let (next, outcome) = self.back(state, &pages)?;
                    outcome.map_err(|failure| PoolError::from_map(failure, pages.len() as u32))?;
                    state = next;
                }
            }
        }
        let source = Cause::from("other threads keep the pages busy");
        Err(PoolError::Exhausted { pages: pages.len() as u32, source })
    }

    /// Blocks that may still be allocated: free ones of backed, of unbacked and of moving pages.
    pub fn available(&self) -> Result<u32, PoolError> {
        Ok(self.enter()?.ledger.available_blocks())
    }

    /// Free blocks on hand: an `alloc` of that many makes no driver call.
    pub fn backed(&self) -> Result<u32, PoolError> {
        Ok(self.enter()?.ledger.backed_free_blocks())
    }

    /// Asks the device for its room and takes it, less `leave_bytes`, as credit, until pages are backed from it, the
    /// device refuses one, or the next call. Nobody keeps others from taking that memory meanwhile. Returns
    /// [`Pool::promised`].
    pub fn refresh_credit(&self, leave_bytes: u64) -> Result<u32, PoolError> {
        drop(self.enter()?);
        let room = self.mapper.room().map_err(|source| PoolError::Driver { source })?;
        let pages = room.saturating_sub(leave_bytes) / self.page_bytes;
        let mut state = self.enter()?;
        state.credit = u32::try_from(pages).unwrap_or(u32::MAX);
        Ok(state.promised())
    }

    /// Blocks that an `alloc` can have as far as memory is known: free ones on hand, and those of pages that are
    /// covered by credit. Makes no system call.
    pub fn promised(&self) -> Result<u32, PoolError> {
        Ok(self.enter()?.promised())
    }

    /// Blocks that somebody holds, the null block among them.
    pub fn held(&self) -> Result<u32, PoolError> {
        Ok(self.enter()?.ledger.held_blocks())
    }

    /// Every free block, by id: on hand or not, set aside or not. Walks all pages: for checks.
    pub fn free_ids(&self) -> Result<Vec<u32>, PoolError> {
        Ok(self.enter()?.ledger.free_ids())
    }

    /// Backs pages until `n` free blocks are on hand, or as many as memory and pages allow. Returns how many
    /// are, at most `n`. Where memory is short it asks for half as many pages, and half again.
    pub fn reserve_demand(&self, n: u32) -> Result<u32, PoolError> {
        let mut state = self.enter()?;
        let mut at_most = u32::MAX;
        for _ in 0..MAX_ROUNDS {
            if state.ledger.backed_free_blocks() >= n {
                break;
            }
            let pages = state.ledger.plan_backing(n, at_most);
            if pages.is_empty() && state.ledger.block_counts().in_motion > 0 {
                match self.wait(state)? {
                    Some(next) => state = next,
                    None => return Ok(n.min(self.backed()?)),
                }
                continue;
            }
            if pages.is_empty() {
                break;
            }
            let (next, outcome) = self.back(state, &pages)?;
            state = next;
            match outcome {
                Ok(()) => {}
                Err(MapFailure::OutOfMemory { .. }) if pages.len() > 1 => at_most = pages.len() as u32 / 2,
                Err(MapFailure::OutOfMemory { .. }) => break,
                Err(failure) => return Err(PoolError::from_map(failure, pages.len() as u32)),
            }
        }
        Ok(n.min(state.ledger.backed_free_blocks()))
    }

    /// Sets `n` more blocks aside for the next `alloc` calls; false and none where that many cannot be had.
    pub fn try_to_reserve(&self, n: u32) -> Result<bool, PoolError> {
        let need = |ledger: &Ledger| ledger.set_aside_blocks().saturating_add(n);
        Ok(self.obtain(need, |ledger| ledger.set_aside(n).then_some(()))?.is_some())
    }

    /// Gives back what `try_to_reserve` set aside and was not used.
    pub fn free_reserved(&self) -> Result<(), PoolError> {
        let mut state = self.enter()?;
        let outcome = state.ledger.release_set_aside();
        self.publish(&mut state);
        if !outcome.reserved.is_empty() {
            self.shrink(state);
        }
        Ok(())
    }

    // ---------------------------------------------------------------- pages

    /// A batch is about to be submitted; returns its epoch.
    pub fn begin_step(&self) -> Result<u64, PoolError> {
        Ok(self.enter()?.ledger.begin_step())
    }

    /// All device work up to `epoch` has ended: pages retired by then leave, but for the reserve.
    pub fn end_step(&self, epoch: u64) -> Result<(), PoolError> {
        let mut state = self.enter()?;
        state.ledger.end_step(epoch)?;
        self.shrink(state);
        Ok(())
    }

    /// Unmaps the reserve, the minimum too, and gives back what the mapper keeps; returns the bytes given back.
    pub fn trim(&self) -> Result<u64, PoolError> {
        let before = self.mapper.held_beside();
        let (state, released) = self.release(self.enter()?, 0)?;
        drop(state);
        self.mapper.trim().map_err(|source| PoolError::Driver { source })?;
        let mut state = self.enter()?;
        state.beside_bytes = self.mapper.held_beside();
        self.publish(&mut state);
        let given = u64::from(released.pages) * self.page_bytes + before;
        Ok(given.saturating_sub(state.beside_bytes))
    }

    /// Forgets every holder but the null block's, and what was set aside. Waits for the device first;
    /// keeps the reserve. The caller sees to it that nothing is submitted meanwhile.
    pub fn clear(&self) -> Result<(), PoolError> {
        drop(self.enter()?);
        self.mapper.synchronise().map_err(|source| PoolError::Driver { source })?;
        let mut state = self.enter()?;
        state.ledger.clear();
        self.publish(&mut state);
        self.shrink(state);
        Ok(())
    }

    /// Unmaps everything, after waiting for the device and for other threads' driver calls. Afterwards all
    /// but `stats` and `shutdown` refuse. Reports what stayed mapped; a second call does nothing.
    pub fn shutdown(&self) -> Result<(), PoolError> {
        let mut state = self.lock()?;
        if std::mem::replace(&mut state.shut_down, true) {
            return Ok(());
        }
        self.settled.notify_all(); // whoever waits for pages need not any longer
        let deadline = Instant::now() + MAX_WAIT;
        while state.ledger.page_counts().in_motion() > 0 && state.broken.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break; // their pages stay with them and show in the result
            }
            state = self.settled.wait_timeout(state, left).map_err(|_| poisoned())?.0;
        }
        drop(state);
        // Work that may still run reads these pages: where it cannot be waited for they stay mapped.
        self.mapper.synchronise().map_err(|source| PoolError::Driver { source })?;
        let mut state = self.lock()?;
        state.ledger.clear_all();
        let (mut state, failure) = self.release_all(state)?;
        if let Some(UnmapFailure { quarantined, source, .. }) = failure {
            return Err(if quarantined.is_empty() {
                PoolError::Driver { source }
            } else {
                PoolError::Quarantined { pages: quarantined, source }
            });
        }
        if let Some(detail) = &state.broken {
            return Err(PoolError::StateConsistency { detail: detail.clone() });
        }
        if state.ledger.page_counts().in_motion() > 0 {
            let detail = "a driver call did not end in time".to_owned();
            return Err(PoolError::StateConsistency { detail });
        }
        state.meter = None;
        Ok(())
    }

    // ---------------------------------------------------------------- reading

    /// (blocks held or set aside, usable blocks) of each page.
    pub fn occupancy(&self, pages: &[u32]) -> Result<Vec<(u32, u32)>, PoolError> {
        let state = self.enter()?;
        let num_pages = state.ledger.layout().num_pages();
        pages
            .iter()
            .map(|&page| state.ledger.occupancy(page).ok_or(PoolError::NoSuchPage { page, num_pages }))
            .collect()
    }

    /// Page of each id.
    pub fn pages_of(&self, ids: &[u32]) -> Result<Vec<u32>, PoolError> {
        let state = self.enter()?;
        let page = |&id| state.ledger.page_of(id).ok_or(kvcached_ledger::BlockError::Unknown { id });
        Ok(ids.iter().map(page).collect::<Result<_, _>>()?)
    }

    /// Where the pool stands, also after its shutdown.
    pub fn stats(&self) -> Result<PoolStats, PoolError> {
        let state = self.lock()?;
        let usage = self.usage(&state.ledger, self.mapper.held_beside());
        Ok(PoolStats {
            pages: state.ledger.page_counts(),
            page_bytes: self.page_bytes,
            num_blocks: state.ledger.layout().num_blocks,
            held_blocks: state.ledger.held_blocks(),
            backed_blocks: state.ledger.backed_free_blocks(),
            available_blocks: state.ledger.available_blocks(),
            set_aside_blocks: state.ledger.set_aside_blocks(),
            usage,
            mapped_bytes: usage.used_bytes + usage.reserved_bytes,
        })
    }

    // ---------------------------------------------------------------- inside

    /// Takes with `take`, which needs `need` blocks on hand, and backs pages until it can. Commit and take
    /// happen under one lock; another thread can only get ahead while this one waits.
    fn obtain<T>(
        &self,
        need: impl Fn(&Ledger) -> u32,
        mut take: impl FnMut(&mut Ledger) -> Option<T>,
    ) -> Result<Option<T>, PoolError> {
        let mut state = self.enter()?;
        for _ in 0..MAX_ROUNDS {
            if let Some(taken) = take(&mut state.ledger) {
                self.publish(&mut state);
                return Ok(Some(taken));
            }
            let need = need(&state.ledger);
            if state.ledger.available_blocks() < need {
                return Ok(None);
            }
            if state.ledger.available_blocks() - state.ledger.block_counts().in_motion < need {
                match self.wait(state)? {
                    Some(next) => state = next,
                    None => return Ok(None),
                }
                continue;
            }
            let pages = state.ledger.plan_backing(need, u32::MAX);
            let (next, outcome) = self.back(state, &pages)?;
            state = next;
            match outcome {
                Ok(()) => {}
                Err(MapFailure::OutOfMemory { .. }) => {
                    let taken = take(&mut state.ledger); // somebody may have freed meanwhile
                    self.publish(&mut state);
                    return Ok(taken);
                }
                Err(failure) => return Err(PoolError::from_map(failure, pages.len() as u32)),
            }
        }
        Ok(None)
    }

    /// Backs planned pages: the lock is dropped, taken again and the outcome committed.
    fn back<'a>(
        &'a self,
        state: Guard<'a>,
        pages: &[u32],
    ) -> Result<(Guard<'a>, Result<(), MapFailure>), PoolError> {
        drop(state);
        let flight = Flight { pool: self };
        let outcome = self.mapper.map(pages).map(drop);
        flight.landed();
        if let Err(MapFailure::Quarantined { pages, source }) = &outcome {
            tracing::warn!(?pages, error = %source, "pages are lost: backing failed and could not be undone");
        }
        let mut state = self.settle(|ledger| match &outcome {
            Ok(()) => ledger.backed(pages),
            Err(failure) => ledger.backing_failed(pages, failure.quarantined()),
        })?;
        state.credit = match outcome {
            Ok(()) => state.credit.saturating_sub(pages.len() as u32),
            Err(_) => 0,
        };
        if state.shut_down {
            return Err(PoolError::Shutdown); // `shutdown` waits for this and unmaps the pages
        }
        Ok((state, outcome))
    }

    /// Unmaps the reserve beyond `keep`. A failure costs pages and is part of the result.
    fn release<'a>(&'a self, mut state: Guard<'a>, keep: u32) -> Result<(Guard<'a>, Released), PoolError> {
        let pages = state.ledger.plan_unbacking(keep);
        self.publish(&mut state);
        if pages.is_empty() {
            return Ok((state, Released { pages: 0, failure: None }));
        }
        drop(state);
        let flight = Flight { pool: self };
        let failure = self.mapper.unmap(&pages).err();
        flight.landed();
        let mut gone = pages.len();
        if let Some(UnmapFailure { quarantined, still_mapped, source }) = &failure {
            gone = gone.saturating_sub(quarantined.len() + still_mapped.len());
            tracing::warn!(?quarantined, ?still_mapped, error = %source, "pages could not be unmapped");
        }
        let state = self.settle(|ledger| match &failure {
            None => ledger.unbacked(&pages),
            Some(failure) => ledger.unbacking_failed(&pages, &failure.quarantined, &failure.still_mapped),
        })?;
        Ok((state, Released { pages: gone as u32, failure }))
    }

    /// Unmaps all reserved pages. A mapper may stop at the first page that fails: goes on as long as each round
    /// settles some. Returns the first failure, with every page that was lost.
    fn release_all<'a>(
        &'a self,
        mut state: Guard<'a>,
    ) -> Result<(Guard<'a>, Option<UnmapFailure>), PoolError> {
        let mut first: Option<UnmapFailure> = None;
        loop {
            let before = state.ledger.page_counts().reserved;
            let (next, released) = self.release(state, 0)?;
            state = next;
            if let Some(failure) = released.failure {
                match &mut first {
                    Some(first) => first.quarantined.extend(failure.quarantined),
                    None => first = Some(failure),
                }
            }
            let left = state.ledger.page_counts().reserved;
            if left == 0 || left >= before {
                return Ok((state, first));
            }
        }
    }

    /// [`Pool::release`] down to the reserve, for calls that have done their work already.
    fn shrink(&self, state: Guard<'_>) {
        if let Err(error) = self.release(state, self.keep) {
            tracing::error!(%error, "the reserve could not be given back");
        }
    }

    /// Records what came of a driver call and wakes whoever waits for its pages. A report that does not fit
    /// the plan leaves the pool in an unknown state.
    fn settle(
        &self,
        commit: impl FnOnce(&mut Ledger) -> Result<(), TransitionError>,
    ) -> Result<Guard<'_>, PoolError> {
        let mut state = self.lock()?;
        let committed = commit(&mut state.ledger);
        state.settlements += 1;
        state.beside_bytes = self.mapper.held_beside();
        self.settled.notify_all();
        if let Err(error) = committed {
            let detail = format!("the mapper reported pages that it was not asked about: {error}");
            state.broken = Some(detail.clone());
            return Err(PoolError::StateConsistency { detail });
        }
        self.publish(&mut state);
        Ok(state)
    }

    /// Waits for some driver call to end. `None`: none did in time.
    fn wait<'a>(&'a self, state: Guard<'a>) -> Result<Option<Guard<'a>>, PoolError> {
        let seen = state.settlements;
        let unchanged =
            |state: &mut State| state.settlements == seen && state.broken.is_none() && !state.shut_down;
        let waited = self.settled.wait_timeout_while(state, MAX_WAIT, unchanged);
        let (state, timeout) = waited.map_err(|_| poisoned())?;
        usable(&state)?;
        Ok((!timeout.timed_out()).then_some(state))
    }

    /// The owner comes before the lock, which in a fork may be held for good.
    fn lock(&self) -> Result<Guard<'_>, PoolError> {
        self.owner.check()?;
        self.state.lock().map_err(|_| poisoned())
    }

    fn enter(&self) -> Result<Guard<'_>, PoolError> {
        let state = self.lock()?;
        usable(&state)?;
        Ok(state)
    }

    fn usage(&self, ledger: &Ledger, beside_bytes: u64) -> Usage {
        let pages = ledger.page_counts();
        let bytes = |pages: u32| u64::from(pages) * self.page_bytes;
        Usage {
            used_bytes: bytes(pages.in_use),
            reserved_bytes: bytes(pages.reserved + pages.retired + pages.unmapping),
            beside_bytes,
            virtual_bytes: self.virtual_bytes,
            quarantined_bytes: bytes(pages.quarantined),
        }
    }

    fn publish(&self, state: &mut State) {
        let usage = self.usage(&state.ledger, state.beside_bytes);
        if state.published != Some(usage) {
            state.published = Some(usage);
            if let Some(meter) = &state.meter {
                meter.publish(&usage);
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.owner.is_other() {
            return;
        }
        if let Err(error) = self.shutdown() {
            tracing::warn!(%error, "a pool could not be shut down when it was dropped");
        }
    }
}

struct Released {
    pages: u32,
    failure: Option<UnmapFailure>,
}

/// A driver call under way. Dropped by a panic of the mapper it marks the pool as broken, so that nobody
/// waits for pages whose state will never be reported.
struct Flight<'a> {
    pool: &'a Pool,
}

impl Flight<'_> {
    fn landed(self) {
        std::mem::forget(self);
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        if let Ok(mut state) = self.pool.state.lock() {
            state.broken = Some("the mapper panicked".to_owned());
        }
        self.pool.settled.notify_all();
    }
}

fn usable(state: &State) -> Result<(), PoolError> {
    if state.shut_down {
        return Err(PoolError::Shutdown);
    }
    match &state.broken {
        Some(detail) => Err(PoolError::StateConsistency { detail: detail.clone() }),
        None => Ok(()),
    }
}

fn poisoned() -> PoolError {
    PoolError::StateConsistency { detail: "a thread panicked while it changed the ledger".to_owned() }
}
