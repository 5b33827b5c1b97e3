//! The pool of one group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcached_control::Counter;
use kvcached_ledger::{ClaimPlan, Ledger};

use crate::beside::Beside;
use crate::config::PoolConfig;
use crate::counts::{Counts, read};
use crate::error::PoolError;
use crate::fork::Owner;
use crate::limit::Standing;
use crate::mapper::{Cause, MapFailure, Mapper};
use crate::meter::Meter;
use crate::pager;
use crate::reserve::{Bounds, Demand};
use crate::state::{Guard, Phase, Shared, State, Tally, after};
use crate::sync::{Condvar, Mutex, thread};

/// Driver calls that one call makes at most, where other threads take what it backed. Waits are bounded by its patience alone: what
/// others do may wake it any number of times.
const MAX_ROUNDS: u32 = 64;

/// Hands out block ids of backed pages. Thread-safe; shut down when dropped. Every call fails with `Forked` in a fork of the
/// process that made it (see [`forked`](crate::forked)), and dropping it there does nothing.
///
/// A thread of its own, the pager, backs pages ahead of allocations and gives them back behind whoever freed them.
pub struct Pool {
    pub(crate) shared: Arc<Shared>,
    null_block: Option<u32>,
    pager: Option<thread::JoinHandle<()>>,
}

/// What backing pages on demand came to.
enum Backing {
    Done,
    /// Not backed, but worth another look.
    Again,
    /// The device has no memory for them.
    Short(Cause),
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
        let limit = Standing { revision: 0, bytes: u64::from(config.layout.num_pages()) * page_bytes };
        let bounds =
            Bounds { min: config.min_reserved_pages(page_bytes), max: config.max_reserved_pages(page_bytes) };
        let beside = Beside::at_start(mapper.held_beside());
        let demand = Demand::new(bounds, Instant::now());
        let mut state = State::new(ledger, limit, demand, beside, Arc::clone(&meter));
        state.pager.held_back = true;
        let shared = Arc::new(Shared {
            page_bytes,
            virtual_bytes: mapper.virtual_bytes(),
            patience: config.patience,
            owner: Owner::this_process(),
            counts: Counts::default(),
            state: Mutex::new(state),
            work: Condvar::new(),
            changed: Condvar::new(),
            metrics: meter.metrics(),
            mapper,
        });
        let watched = Arc::downgrade(&shared);
        shared.mapper.watch(Box::new(move |why| {
            if let Some(shared) = watched.upgrade() {
                shared.break_down(why);
            }
        }));
        let work = {
            let shared = Arc::clone(&shared);
            move || pager::run(&shared)
        };
        let pager = thread::Builder::new().name("kvcached-pager".to_owned()).spawn(work);
        let pager = Some(pager.map_err(|error| PoolError::Driver { source: error.into() })?);
        let pool = Pool { shared, null_block: config.null_block.then_some(0), pager };
        // On failure `pool` is dropped, and with that shut down.
        pool.establish(bounds.min)?;
        Ok(pool)
    }

    fn establish(&self, min_reserved_pages: u32) -> Result<(), PoolError> {
        if let Some(id) = self.null_block {
            self.claim(&[id])?;
            self.shared.enter()?.ledger.pin(id)?;
        }
        let mut state = self.shared.enter()?;
        let pages = state.ledger.plan_pages(min_reserved_pages);
        if !pages.is_empty() {
            let (next, outcome) = self.shared.back(state, &pages)?;
            state = next;
            outcome.map_err(|failure| PoolError::from_map(failure, pages.len() as u32))?;
        }
        state.demand.start();
        state.tally = Tally::default();
        state.pager.held_back = false;
        Ok(())
    }

    /// Physical bytes of one page.
    pub fn page_bytes(&self) -> u64 {
        self.shared.page_bytes
    }

    // ---------------------------------------------------------------- blocks

    /// The block that is held for good.
    pub fn null_block(&self) -> Option<u32> {
        self.null_block
    }

    /// Exactly `n` ids, ascending within a page, or `None` (and nothing changed) where memory or ids are short. Waits for the
    /// driver where they are not on hand.
    pub fn alloc(&self, n: u32) -> Result<Option<Vec<u32>>, PoolError> {
        self.obtain(
            |_| n,
            |state| {
                let ids = state.ledger.alloc(n)?;
                state.kept_on_hand = state.kept_on_hand.saturating_sub(n);
                Some(ids)
            },
        )
    }

    /// [`Pool::alloc`] of blocks that are on hand; `None`, at once, where they are not.
    pub fn alloc_on_hand(&self, n: u32) -> Result<Option<Vec<u32>>, PoolError> {
        let mut state = self.shared.enter()?;
        let ids = state.ledger.alloc(n);
        if ids.is_some() {
            state.kept_on_hand = state.kept_on_hand.saturating_sub(n);
        }
        Ok(ids)
    }

    /// Gives blocks back; nothing changes unless all of them may be. Never waits for the driver: pages that were emptied lose
    /// their memory in the background.
    pub fn free(&self, ids: &[u32]) -> Result<(), PoolError> {
        let mut state = self.shared.enter()?;
        let outcome = state.ledger.free(ids)?;
        if !outcome.reserved.is_empty() {
            // No epoch will begin or end that would say so.
            state.kept_on_hand = 0;
        }
        Ok(())
    }

    /// Takes these very blocks, backing their pages. Nothing changes unless all of them are free.
    pub fn claim(&self, ids: &[u32]) -> Result<(), PoolError> {
        let deadline = self.shared.deadline();
        let mut state = self.shared.enter()?;
        let mut rounds = 0;
        while rounds < MAX_ROUNDS {
            match state.ledger.plan_claim(ids)? {
                ClaimPlan::Ready => return Ok(state.ledger.claim(ids)?),
                ClaimPlan::InMotion => {
                    let Some(next) = self.wait(state, deadline)? else { break };
                    state = next;
                }
                ClaimPlan::Map(pages) => {
                    rounds += 1;
                    let (next, backing) = self.back(state, &pages, deadline, |_| false)?;
                    state = next;
                    if let Backing::Short(source) = backing {
                        self.missed();
                        return Err(PoolError::Exhausted { pages: pages.len() as u32, source });
                    }
                }
            }
        }
        self.missed();
        let source = Cause::from("other threads keep the pages busy");
        Err(PoolError::Exhausted { pages: 1, source })
    }

    /// Sets `n` more blocks aside for the next `alloc` calls; false and none where that many cannot be had.
    pub fn try_to_reserve(&self, n: u32) -> Result<bool, PoolError> {
        let need = |ledger: &Ledger| ledger.set_aside_blocks().saturating_add(n);
        Ok(self.obtain(need, |state| state.ledger.set_aside(n).then_some(()))?.is_some())
    }

    /// Gives back what `try_to_reserve` set aside and was not used.
    pub fn free_reserved(&self) -> Result<(), PoolError> {
        let mut state = self.shared.enter()?;
        let outcome = state.ledger.release_set_aside();
        if !outcome.reserved.is_empty() {
            state.kept_on_hand = 0; // as in `free`
        }
        Ok(())
    }

    // ---------------------------------------------------------------- what can be had

    /// Blocks that may still be allocated under the limit: free ones of backed, of unbacked and of moving pages. No lock.
    pub fn available(&self) -> Result<u32, PoolError> {
        self.shared.count(|counts| read(&counts.available))
    }

    /// Free blocks on hand: an `alloc` of that many makes no driver call. No lock.
    pub fn backed(&self) -> Result<u32, PoolError> {
        self.shared.count(|counts| read(&counts.backed))
    }

    /// Blocks that an `alloc` can have as far as memory is known: free ones on hand, and those of pages that are
    /// covered by credit. No lock.
    pub fn promised(&self) -> Result<u32, PoolError> {
        self.shared.count(|counts| read(&counts.promised))
    }

    /// Blocks that somebody holds, the null block among them. No lock.
    pub fn held(&self) -> Result<u32, PoolError> {
        self.shared.count(|counts| read(&counts.held))
    }

    /// Asks the device for its room and takes it, less `leave_bytes`, as credit, until pages are backed from it, the
    /// device refuses one, or the next call. Nobody keeps others from taking that memory meanwhile. Returns
    /// [`Pool::promised`].
    pub fn refresh_credit(&self, leave_bytes: u64) -> Result<u32, PoolError> {
        let backed = self.shared.enter()?.tally.backed();
        let room = self.shared.mapper.room().map_err(|source| PoolError::Driver { source })?;
        let pages = room.saturating_sub(leave_bytes) / self.shared.page_bytes;
        let mut state = self.shared.enter()?;
        // What others, such as the pager, have backed since may be of that room.
        let pages = pages.saturating_sub(state.tally.backed() - backed);
        state.credit = u32::try_from(pages).unwrap_or(u32::MAX);
        if state.credit > 0 {
            state.pager.mapping_refused = false;
        }
        Ok(state.promised())
    }

    /// How many of `n` blocks are on hand. They stay there until they are allocated, the next epoch begins or ends, or, where
    /// there are no epochs, a page is emptied. Makes no driver call.
    pub fn keep_on_hand(&self, n: u32) -> Result<u32, PoolError> {
        Ok(self.shared.enter()?.keep_on_hand(n))
    }

    /// Backs pages until `n` free blocks are on hand, or as many as memory and pages allow. Returns how many
    /// are, at most `n`; they stay on hand as those of [`Pool::keep_on_hand`] do. Where memory is short it asks for half as many
    /// pages, and half again.
    pub fn reserve_demand(&self, n: u32) -> Result<u32, PoolError> {
        let mut state = self.shared.enter()?;
        if state.ledger.backed_free_blocks() >= n {
            return Ok(state.keep_on_hand(n));
        }
        state.wanted += u64::from(n); // while the driver is called, what is on hand must not leave
        match self.back_demand(state, n) {
            Ok(mut state) => {
                state.wanted -= u64::from(n);
                let kept = state.keep_on_hand(n);
                if kept < n {
                    self.missed();
                }
                Ok(kept)
            }
            Err(error) => {
                self.shared.lock()?.wanted -= u64::from(n);
                Err(error)
            }
        }
    }

    /// Who was refused memory would take so many free blocks in all, if it had them: others who share the device are asked for
    /// that much, up to what this pool could hold, in place of what was refused. To be said again within a second. 0: it has found
    /// another way.
    pub fn lacks(&self, blocks: u32) -> Result<(), PoolError> {
        let state = self.shared.enter()?;
        let more = u64::from(blocks.saturating_sub(state.ledger.backed_free_blocks()));
        let pages = more.div_ceil(u64::from(state.ledger.layout().blocks_per_page));
        let pages = pages.min(u64::from(state.ledger.page_counts().free));
        drop(state);
        self.shared.mapper.lacks(pages * self.shared.page_bytes);
        Ok(())
    }

    /// Returns with the lock held, so that nobody takes what it has counted.
    fn back_demand<'a>(&'a self, mut state: Guard<'a>, n: u32) -> Result<Guard<'a>, PoolError> {
        let deadline = self.shared.deadline();
        let mut at_most = u32::MAX;
        let mut rounds = 0;
        while rounds < MAX_ROUNDS && state.ledger.backed_free_blocks() < n {
            let pages = state.ledger.plan_backing(n, at_most);
            if pages.is_empty() && state.ledger.block_counts().in_motion > 0 {
                let Some(next) = self.wait(state, deadline)? else { return self.shared.enter() };
                state = next;
                continue;
            }
            if pages.is_empty() {
                return Ok(state);
            }
            rounds += 1;
            let enough = |ledger: &Ledger| ledger.backed_free_blocks() >= n;
            let (next, backing) = self.back(state, &pages, deadline, enough)?;
            state = next;
            match backing {
                Backing::Done | Backing::Again => {}
                Backing::Short(_) if pages.len() > 1 => at_most = pages.len() as u32 / 2,
                Backing::Short(_) => return Ok(state),
            }
        }
        Ok(state)
    }

    // ---------------------------------------------------------------- queued work

    /// A batch is about to be submitted. Returns its epoch, the marker of [`Pool::release_through`]: pages emptied from now on
    /// wait for it.
    pub fn begin_epoch(&self) -> Result<u64, PoolError> {
        let mut state = self.shared.enter()?;
        state.kept_on_hand = 0;
        Ok(state.ledger.begin_epoch())
    }

    /// All device work up to this marker has ended: pages retired by then may leave, and do in the background, but for the
    /// reserve. Pages that were allocated from meanwhile stay.
    pub fn release_through(&self, marker: u64) -> Result<(), PoolError> {
        let mut state = self.shared.enter()?;
        state.ledger.release_through(marker)?;
        state.kept_on_hand = 0;
        state.pager.unmapping_refused = false; // what could not leave the last time tries again
        Ok(())
    }

    /// Forgets every holder but the null block's, and what was set aside. Waits for the device first;
    /// keeps the reserve. The caller sees to it that nothing is submitted meanwhile.
    pub fn clear(&self) -> Result<(), PoolError> {
        drop(self.shared.enter()?);
        self.shared.mapper.synchronise().map_err(|source| PoolError::Driver { source })?;
        let mut state = self.shared.enter()?;
        state.ledger.clear();
        state.kept_on_hand = 0;
        state.pager.unmapping_refused = false;
        Ok(())
    }

    // ---------------------------------------------------------------- the pager, and the end

    /// Waits until the pager has nothing to do: what was freed has been given back, and the reserve is filled. False where that
    /// is not so after `timeout`.
    pub fn quiesce(&self, timeout: Duration) -> Result<bool, PoolError> {
        let deadline = after(timeout);
        let mut state = self.shared.enter()?;
        while !state.is_quiet() {
            match self.wait(state, deadline)? {
                Some(next) => state = next,
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Unmaps everything, after waiting for the device and for other threads' driver calls, and has the mapper keep nothing.
    /// Afterwards all but `stats` and `shutdown` refuse. Fails where something stays mapped, and says why; another call tries again what is left. Ends in time
    /// whatever the device does. Returns the bytes of pages in an unknown state, which go with the addresses.
    pub fn shutdown(&self) -> Result<u64, PoolError> {
        let shared = &self.shared;
        let deadline = after(shared.patience.saturating_mul(2));
        let mut state = shared.lock()?;
        if state.phase == Phase::Open {
            state.phase = Phase::Ending;
        }
        loop {
            let attempts = state.pager.end_attempts;
            state.pager.end_asked = state.phase == Phase::Ending;
            while state.phase == Phase::Ending && state.pager.end_attempts == attempts && !state.pager.gone {
                match state.wait(deadline)? {
                    Some(next) => state = next,
                    None => return Err(PoolError::overdue()),
                }
            }
            if let Some(failure) = state.pager.end_failure.take() {
                state.intact()?;
                return Err(match failure.quarantined.is_empty() {
                    true => PoolError::Driver { source: failure.source },
                    false => PoolError::Quarantined { pages: failure.quarantined, source: failure.source },
                });
            }
            if state.phase == Phase::Ended {
                break;
            }
            // Else the attempt failed, and another caller was told why.
            state.intact()?;
        }
        Ok(u64::from(state.ledger.page_counts().quarantined) * shared.page_bytes)
    }

    // ---------------------------------------------------------------- inside

    /// Takes with `take`, which needs `need` blocks on hand, and backs pages until it can. Commit and take
    /// happen under one lock; another thread can only get ahead while this one waits.
    fn obtain<T>(
        &self,
        need: impl Fn(&Ledger) -> u32,
        mut take: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<Option<T>, PoolError> {
        let mut state = self.shared.enter()?;
        if let Some(taken) = take(&mut state) {
            return Ok(Some(taken)); // mostly so, and then without a look at the clock
        }
        let wanted = need(&state.ledger);
        if state.ledger.available_blocks() < wanted {
            self.missed();
            return Ok(None);
        }
        state.wanted += u64::from(wanted);
        let obtained = self.obtain_backing(state, need, take);
        if let Ok(mut state) = self.shared.lock() {
            state.wanted -= u64::from(wanted);
        }
        if let Ok(None) = obtained {
            self.missed();
        }
        obtained
    }

    fn obtain_backing<'a, T>(
        &'a self,
        mut state: Guard<'a>,
        need: impl Fn(&Ledger) -> u32,
        mut take: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<Option<T>, PoolError> {
        let deadline = self.shared.deadline();
        let mut rounds = 0;
        while rounds < MAX_ROUNDS {
            let need = need(&state.ledger);
            if state.ledger.available_blocks() < need {
                return Ok(None);
            }
            if state.ledger.backed_free_blocks() + state.ledger.block_counts().unbacked < need {
                let Some(next) = self.wait(state, deadline)? else { return Ok(None) };
                state = next;
            } else {
                rounds += 1;
                let pages = state.ledger.plan_backing(need, u32::MAX);
                let enough = |ledger: &Ledger| ledger.backed_free_blocks() >= need;
                let (next, backing) = self.back(state, &pages, deadline, enough)?;
                state = next;
                if let Backing::Short(_) = backing {
                    return Ok(None);
                }
            }
            if let Some(taken) = take(&mut state) {
                return Ok(Some(taken));
            }
        }
        Ok(None)
    }

    /// Somebody did not get in full what it asked for.
    fn missed(&self) {
        self.shared.metrics.add(Counter::AllocationMisses, 1);
    }

    /// [`Shared::back`], on demand of a caller. Where the device refuses while memory of this pool is on its way back, or came
    /// back meanwhile, nothing is known yet: it is asked again when a driver call has ended or other pools gave memory back, not whenever
    /// others do something, unless there is `enough` by then.
    fn back<'a>(
        &'a self,
        state: Guard<'a>,
        pages: &[u32],
        deadline: Instant,
        enough: impl Fn(&Ledger) -> bool,
    ) -> Result<(Guard<'a>, Backing), PoolError> {
        let (settled, freed) = (state.settlements + 1, state.freed); // with this call
        let (mut state, outcome) = self.shared.back(state, pages)?;
        state.still_open()?;
        let source = match outcome {
            Ok(()) => {
                state.tally.on_demand += pages.len() as u64;
                return Ok((state, Backing::Done));
            }
            Err(MapFailure::OutOfMemory { source }) => source,
            Err(failure) => return Err(PoolError::from_map(failure, pages.len() as u32)),
        };
        while (state.settlements, state.freed) == (settled, freed) && !enough(&state.ledger) {
            if state.ledger.page_counts().in_motion() == 0 {
                return Ok((state, Backing::Short(source)));
            }
            match self.wait(state, deadline)? {
                Some(next) => state = next,
                None => return Ok((self.shared.enter()?, Backing::Short(source))),
            }
        }
        Ok((state, Backing::Again))
    }

    /// Waits for a change. `None`: there was none before `deadline`.
    pub(crate) fn wait<'a>(
        &'a self,
        state: Guard<'a>,
        deadline: Instant,
    ) -> Result<Option<Guard<'a>>, PoolError> {
        let state = state.wait(deadline)?;
        if let Some(state) = &state {
            state.usable()?;
        }
        Ok(state)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let pager = self.pager.take();
        if self.shared.owner.is_other() {
            std::mem::forget(pager); // the thread that it names is not of this process
            return;
        }
        if let Err(error) = self.shutdown() {
            tracing::warn!(%error, "a pool could not be shut down when it was dropped");
        }
        let mut ended = false;
        if let Ok(mut state) = self.shared.lock() {
            state.pager.abandoned = true;
            ended = state.phase == Phase::Ended || state.pager.idle;
        }
        // Where the driver does not answer, the thread is left to it.
        if ended && let Some(pager) = pager {
            let _ = pager.join();
        }
    }
}
