//! What the threads of a pool share, and the one way to it.
//!
//! Whoever changes the state holds a [`Guard`]. Letting it go publishes the counts and figures, wakes the pager where there is work
//! for it and every caller that waits for blocks where there are more of them: no path can forget to.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcached_control::Metrics;
use kvcached_ledger::{Ledger, PageCounts};

use crate::beside::Beside;
use crate::counts::{Counts, tell, tell_bytes};
use crate::error::PoolError;
use crate::fork::Owner;
use crate::limit::Standing;
use crate::mapper::{Cause, Mapper};
use crate::meter::{Meter, Usage};
use crate::reserve::Demand;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// A pool, as its callers and its pager see it.
pub(crate) struct Shared {
    pub mapper: Arc<dyn Mapper>,
    pub page_bytes: u64,
    pub virtual_bytes: u64,
    /// How long a call waits for driver calls of other threads, all in all.
    pub patience: Duration,
    pub owner: Owner,
    pub counts: Counts,
    pub metrics: Metrics,
    /// Never locked across a call of `mapper`.
    pub state: Mutex<State>,
    /// The pager waits here.
    pub work: Condvar,
    /// Callers wait here.
    pub changed: Condvar,
}

pub(crate) struct State {
    pub ledger: Ledger,
    /// Pages that the device was seen to have room for and that are not backed yet.
    pub credit: u32,
    /// Free blocks that somebody was told are on hand: their pages stay mapped.
    pub kept_on_hand: u32,
    /// Blocks that allocations under way need: what is on hand of them must not leave while the rest is backed.
    pub wanted: u64,
    pub limit: Standing,
    /// Whole pages within the limit.
    pub limit_pages: u32,
    pub demand: Demand,
    pub pager: PagerState,
    pub tally: Tally,
    pub phase: Phase,
    /// Why nobody knows any longer what is mapped.
    pub broken: Option<String>,
    /// Who is told how much is mapped; None once the pool is shut down and has nothing left to tell, so that the row
    /// it had is free for another pool.
    pub meter: Option<Arc<dyn Meter>>,
    /// Driver calls that have ended.
    pub settlements: u64,
    /// Times that others were said to have given memory back.
    pub freed: u64,
    /// What the mapper held beside the pages when a driver call last ended.
    pub beside: Beside,
    /// Times that blocks were handed out.
    allocations: u64,
    /// How many of them somebody has seen, and when it was first seen that there were no more.
    seen: (u64, Instant),
    /// What was last told to the meter.
    published: Option<Usage>,
    /// Callers that wait on `changed`.
    waiting: u32,
    /// Grows with every change that somebody may wait for, so that a waiter can tell one from a false alarm.
    changes: u64,
}

/// The life of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Open,
    /// Shut down for its callers. The pager gives everything back, as often as it is asked to.
    Ending,
    /// All that could be given back is.
    Ended,
}

/// What the pager is at.
#[derive(Debug, Default)]
pub(crate) struct PagerState {
    /// The pool is still being made.
    pub held_back: bool,
    /// It waits to be woken.
    pub idle: bool,
    /// It will wake by itself when the pool has been quiet.
    pub timed: bool,
    /// Its thread has ended.
    pub gone: bool,
    /// Backing ahead was refused: not tried again before pages are taken or given back.
    pub mapping_refused: bool,
    /// Giving back failed: not tried again before there is more to give back, or somebody asks.
    pub unmapping_refused: bool,
    /// The mapper is to give back what it keeps beside the pages, if anything: the limit was lowered.
    pub trim_mapper: bool,
    /// Somebody waits for everything to be given back.
    pub end_asked: bool,
    /// Attempts at that which have come to an end, and why the last one failed.
    pub end_attempts: u64,
    pub end_failure: Option<EndFailure>,
    /// Nobody will ask again.
    pub abandoned: bool,
}

/// Why memory was left when a pool ended.
#[derive(Debug)]
pub(crate) struct EndFailure {
    pub quarantined: Vec<u32>,
    pub source: Cause,
}

/// Pages since the pool was made, by who backed or gave them back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Backed while an allocation waited for them.
    pub on_demand: u64,
    /// Backed by the pager, ahead of allocations.
    pub ahead: u64,
    /// Given back by the pager, behind whoever freed them.
    pub behind: u64,
    /// Driver calls of the pager that failed.
    pub failures: u64,
}

impl Tally {
    /// Pages that were backed, by whomever.
    pub(crate) fn backed(&self) -> u64 {
        self.on_demand + self.ahead
    }
}

impl State {
    pub fn new(
        ledger: Ledger,
        limit: Standing,
        demand: Demand,
        beside: Beside,
        meter: Arc<dyn Meter>,
    ) -> Self {
        State {
            limit_pages: ledger.target(),
            ledger,
            credit: 0,
            kept_on_hand: 0,
            wanted: 0,
            limit,
            demand,
            pager: PagerState::default(),
            tally: Tally::default(),
            phase: Phase::Open,
            broken: None,
            meter: Some(meter),
            settlements: 0,
            freed: 0,
            beside,
            allocations: 0,
            seen: (0, Instant::now()),
            published: None,
            waiting: 0,
            changes: 0,
        }
    }

    /// Blocks that an allocation can have as far as memory is known. The last page may hold fewer blocks than the others, and
    /// may be among the next to be backed.
    pub fn promised(&self) -> u32 {
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

    /// Pages to be mapped ahead now.
    pub fn pages_ahead(&self) -> u32 {
        let pages = self.ledger.page_counts();
        if self.pager.mapping_refused {
            return 0;
        }
        self.demand.ahead().saturating_sub(pages.reserved + pages.retired).min(pages.free)
    }

    /// How many of `n` blocks are on hand; they stay there.
    pub fn keep_on_hand(&mut self, n: u32) -> u32 {
        let on_hand = n.min(self.ledger.backed_free_blocks());
        self.kept_on_hand = self.kept_on_hand.max(on_hand);
        on_hand
    }

    /// Blocks that must not leave.
    pub fn on_hand_wanted(&self) -> u32 {
        u32::try_from(self.wanted).unwrap_or(u32::MAX).saturating_add(self.kept_on_hand)
    }

    /// When idle memory beyond the minimum is to be given back, if nothing happens until then.
    pub fn rests_at(&self) -> Option<Instant> {
        let there_is_some =
            self.phase == Phase::Open && self.may_page() && self.ledger.page_counts().reserved > 0;
        self.demand.rests_at().filter(|_| there_is_some)
    }

    /// Whether idle memory is to be given back now.
    pub fn has_surplus(&self) -> bool {
        !self.pager.unmapping_refused && self.ledger.has_surplus(self.keep(), self.on_hand_wanted())
    }

    /// Idle pages that stay mapped.
    pub fn keep(&self) -> u32 {
        if self.is_beyond_limit() { 0 } else { self.demand.keep() }
    }

    /// Has the ledger follow the limit, as far as blocks that somebody was told are on hand allow: beyond its target it would not
    /// issue them. While they are not allocated nothing is backed, and what is idle besides goes.
    pub fn follow_limit(&mut self) {
        let (limit, target) = (self.limit_pages, self.ledger.target());
        if limit == target {
            return;
        }
        let pages = self.ledger.page_counts();
        let occupied = pages.total() - pages.free - pages.withdrawn;
        let told = self.kept_on_hand.min(self.ledger.backed_free_blocks()) > 0;
        let least = if told { occupied.min(target) } else { 0 };
        if limit.max(least) != target {
            self.ledger.set_target(limit.max(least));
        }
    }

    /// More memory is held than the limit allows.
    pub fn is_beyond_limit(&self) -> bool {
        self.ledger.excess() > 0 || self.ledger.target() > self.limit_pages
    }

    /// Idle pages without which all blocks stay on hand that must. The last page may hold fewer blocks than the others.
    fn idle_pages(&self) -> u32 {
        let spare = self.ledger.backed_free_blocks().saturating_sub(self.on_hand_wanted());
        self.ledger.page_counts().reserved.min(spare / self.ledger.layout().blocks_per_page)
    }

    /// How long no block has been handed out, as far as those who ask can tell.
    pub fn idle_for(&mut self, now: Instant) -> Duration {
        if self.seen.0 != self.allocations {
            self.seen = (self.allocations, now);
        }
        now.saturating_duration_since(self.seen.1)
    }

    fn pager_has_work(&self) -> bool {
        match self.phase {
            Phase::Open => {
                self.may_page() && (self.has_surplus() || self.pages_ahead() > 0 || self.pager.trim_mapper)
            }
            Phase::Ending => self.pager.end_asked || self.pager.abandoned,
            Phase::Ended => true,
        }
    }

    /// The pager may do as the reserve and the limit ask.
    pub fn may_page(&self) -> bool {
        self.broken.is_none() && !self.pager.held_back
    }

    /// The pager waits, and nothing is there for it to do.
    pub fn is_quiet(&self) -> bool {
        self.pager.gone || (self.pager.idle && !self.pager_has_work())
    }

    pub fn usable(&self) -> Result<(), PoolError> {
        if self.phase != Phase::Open {
            return Err(PoolError::Shutdown);
        }
        self.intact()
    }

    pub fn intact(&self) -> Result<(), PoolError> {
        match &self.broken {
            Some(detail) => Err(PoolError::StateConsistency { detail: detail.clone() }),
            None => Ok(()),
        }
    }

    fn outlook(&self) -> Outlook {
        Outlook {
            freed: self.freed,
            pages: self.ledger.page_counts(),
            held: self.ledger.held_blocks(),
            backed: self.ledger.backed_free_blocks(),
            available: self.ledger.available_blocks(),
            quiet: self.pager.idle || self.pager.gone,
            open: self.phase == Phase::Open && self.broken.is_none(),
        }
    }
}

/// What somebody may wait for.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Outlook {
    freed: u64,
    pages: PageCounts,
    held: u32,
    backed: u32,
    available: u32,
    quiet: bool,
    open: bool,
}

impl Shared {
    /// The owner comes before the lock, which in a fork may be held for good.
    pub fn lock(&self) -> Result<Guard<'_>, PoolError> {
        self.owner.check()?;
        Ok(Guard::over(self, self.state.lock().map_err(|_| poisoned())?))
    }

    /// The mapper does not know any longer what is mapped: all calls fail from now on, and nobody waits.
    pub fn break_down(&self, why: &str) {
        if let Ok(mut state) = self.lock() {
            state.broken.get_or_insert_with(|| why.to_owned());
        }
    }

    /// When a call that begins now has waited long enough.
    pub fn deadline(&self) -> Instant {
        after(self.patience)
    }

    /// [`Shared::lock`], of a pool that serves.
    pub fn enter(&self) -> Result<Guard<'_>, PoolError> {
        let state = self.lock()?;
        state.usable()?;
        Ok(state)
    }

    /// One of the counts, without a lock.
    pub fn count<T>(&self, count: impl Fn(&Counts) -> T) -> Result<T, PoolError> {
        self.owner.check()?;
        let value = count(&self.counts);
        if self.counts.is_closed() {
            drop(self.enter()?); // says why
        }
        Ok(value)
    }

    pub fn usage(&self, pages: PageCounts, beside_bytes: u64) -> Usage {
        let bytes = |pages: u32| u64::from(pages) * self.page_bytes;
        Usage {
            used_bytes: bytes(pages.in_use),
            reserved_bytes: bytes(pages.reserved + pages.retired + pages.unmapping),
            beside_bytes,
            virtual_bytes: self.virtual_bytes,
            quarantined_bytes: bytes(pages.quarantined),
        }
    }

    /// Tells everybody what they may want to know.
    fn publish(&self, state: &mut State, before: &Outlook, by_pager: bool) {
        state.follow_limit();
        let after = state.outlook();
        state.allocations += u64::from(after.held > before.held);
        if !by_pager {
            // Of the pages that now hold blocks those that were retired needed no memory.
            let reused = before.pages.retired.saturating_sub(after.pages.retired);
            let taken = after.pages.in_use.saturating_sub(before.pages.in_use + reused);
            if taken > 0 {
                state.demand.note(taken, Instant::now());
                state.pager.mapping_refused = false;
            }
            if after.pages.reserved > before.pages.reserved {
                state.pager.unmapping_refused = false;
                state.demand.touch(Instant::now());
            }
        }
        tell(&self.counts.available, after.available);
        tell(&self.counts.backed, after.backed);
        tell(&self.counts.promised, state.promised());
        tell(&self.counts.held, after.held);
        tell_bytes(&self.counts.idle, u64::from(state.idle_pages()) * self.page_bytes + state.beside.kept());
        let leaving = u64::from(after.pages.retired + after.pages.unmapping);
        tell_bytes(&self.counts.leaving, leaving * self.page_bytes);
        if !after.open {
            self.counts.close();
        }
        self.tell_meter(state, after.pages);
        // It also has to learn that there is something to give back in a while.
        let untimed = !state.pager.timed && state.rests_at().is_some();
        if state.pager.idle && (untimed || state.pager_has_work()) {
            state.pager.idle = false;
            self.work.notify_one();
        }
        if state.waiting > 0 && after != *before {
            state.changes += 1;
            self.changed.notify_all();
        }
    }

    fn tell_meter(&self, state: &mut State, pages: PageCounts) {
        let usage = self.usage(pages, state.beside.bytes());
        if state.published != Some(usage) {
            state.published = Some(usage);
            if let Some(meter) = &state.meter {
                meter.publish(&usage);
            }
        }
        if state.phase == Phase::Ended {
            state.meter = None;
        }
    }
}

/// The state, locked. What changed is told when it is let go.
pub(crate) struct Guard<'a> {
    shared: &'a Shared,
    /// None only while it is handed on.
    state: Option<MutexGuard<'a, State>>,
    before: Outlook,
    by_pager: bool,
    unwinding: bool,
}

impl<'a> Guard<'a> {
    fn over(shared: &'a Shared, state: MutexGuard<'a, State>) -> Self {
        let before = state.outlook();
        let unwinding = std::thread::panicking();
        Guard { shared, state: Some(state), before, by_pager: false, unwinding }
    }

    /// The same, held by the pager, whose own doings are no demand.
    pub fn of_pager(mut self) -> Self {
        self.by_pager = true;
        self
    }

    /// Whether the pager holds it.
    pub fn is_of_pager(&self) -> bool {
        self.by_pager
    }

    /// Waits until something has changed. `None`: nothing did before `deadline`.
    pub fn wait(self, deadline: Instant) -> Result<Option<Self>, PoolError> {
        let shared = self.shared;
        let mut state = self.hand_on();
        let seen = state.changes;
        state.waiting += 1;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if state.changes != seen || left.is_zero() {
                break;
            }
            state = shared.changed.wait_timeout(state, left).map_err(|_| poisoned())?.0;
        }
        state.waiting -= 1;
        let changed = state.changes != seen;
        let guard = Guard::over(shared, state);
        Ok(changed.then_some(guard))
    }

    /// Waits until there is work for the pager, or the pool has been quiet for so long that it rests.
    pub fn wait_for_work(mut self) -> Result<Self, PoolError> {
        self.pager.idle = true;
        self.pager.timed = self.rests_at().is_some();
        let shared = self.shared;
        let mut state = self.hand_on(); // wakes it again, were there any
        while state.pager.idle {
            let rests_at = state.rests_at();
            state.pager.timed = rests_at.is_some();
            let left = rests_at.map(|at| at.saturating_duration_since(Instant::now()));
            state = match left {
                None => shared.work.wait(state).map_err(|_| poisoned())?,
                Some(Duration::ZERO) => {
                    state.demand.rest();
                    state.pager.idle = false;
                    state
                }
                Some(left) => shared.work.wait_timeout(state, left).map_err(|_| poisoned())?.0,
            };
        }
        Ok(Guard::over(shared, state).of_pager())
    }

    /// Tells what changed, and keeps the lock.
    fn hand_on(mut self) -> MutexGuard<'a, State> {
        self.tell();
        match self.state.take() {
            Some(state) => state,
            None => unreachable!("a guard is handed on once"),
        }
    }

    fn tell(&mut self) {
        if let Some(state) = &mut self.state {
            self.shared.publish(state, &self.before, self.by_pager);
        }
    }
}

impl Deref for Guard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        match &self.state {
            Some(state) => state,
            None => unreachable!("a guard that was handed on is gone"),
        }
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        match &mut self.state {
            Some(state) => state,
            None => unreachable!("a guard that was handed on is gone"),
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if self.unwinding == std::thread::panicking() {
            self.tell();
            return;
        }
        // A panic under the lock: the state is poisoned, and whoever reads or waits finds out.
        self.shared.counts.close();
        self.shared.changed.notify_all();
        self.shared.work.notify_all();
    }
}

/// The moment at which such a wait runs out. One that no clock can tell is as good as none.
pub(crate) fn after(wait: Duration) -> Instant {
    const LONG: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    Instant::now() + wait.min(LONG)
}

pub(crate) fn poisoned() -> PoolError {
    PoolError::StateConsistency { detail: "a thread panicked while it changed the ledger".to_owned() }
}
