//! How much memory a pool may have, and what it can do without.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::PoolError;
use crate::limit::{LimitState, MemoryLimit, Request, Standing};
use crate::pool::Pool;
use crate::state::{Guard, State};

impl Pool {
    /// Sets how much memory the pool may have, bytes; at most all that it reserved. Growth is immediate. A shrinking pool gives
    /// back its reserve, issues no block beyond the limit, and lets pages go as they empty; no live block is revoked. Blocks that a
    /// scheduler was told are on hand stay so until they are allocated or that ends (see [`Pool::keep_on_hand`]), and nothing is
    /// backed meanwhile. The page of the null block stays.
    ///
    /// `revision`: greater than that of the limit that stands, so that a late request cannot undo a newer one; `None`: the next.
    pub fn set_limit(&self, limit_bytes: u64, revision: Option<u64>) -> Result<MemoryLimit, PoolError> {
        drop(self.shared.enter()?);
        let beside = self.shared.mapper.held_beside();
        let mut state = self.shared.enter()?;
        let num_pages = state.ledger.layout().num_pages();
        let request = Standing {
            revision: revision.unwrap_or(state.limit.revision.saturating_add(1)),
            bytes: limit_bytes.min(u64::from(num_pages) * self.shared.page_bytes),
        };
        match state.limit.compare(request) {
            Request::Newer => {}
            Request::Same => return Ok(self.standing(&state)),
            Request::Stale => return Ok(MemoryLimit { state: LimitState::Stale, ..self.standing(&state) }),
            Request::Conflict => {
                return Ok(MemoryLimit { state: LimitState::Conflict, ..self.standing(&state) });
            }
        }
        let pages = u32::try_from(request.bytes / self.shared.page_bytes).unwrap_or(u32::MAX);
        let lost = state.ledger.page_counts().quarantined;
        if lost > pages {
            let reason = Some(self.lost_beyond(lost, request.bytes));
            return Ok(MemoryLimit { state: LimitState::Rejected, reason, ..self.standing(&state) });
        }
        state.beside.note(beside);
        state.pager.trim_mapper |= pages < state.limit_pages;
        state.pager.unmapping_refused = false;
        (state.limit, state.limit_pages) = (request, pages);
        state.follow_limit();
        Ok(self.standing(&state))
    }

    /// The limit that stands, and how far it is met.
    pub fn limit(&self) -> Result<MemoryLimit, PoolError> {
        let state = self.shared.enter()?;
        Ok(self.standing(&state))
    }

    fn standing(&self, state: &State) -> MemoryLimit {
        let pages = state.ledger.page_counts();
        let occupied = pages.total() - pages.free - pages.withdrawn;
        let mut limit = MemoryLimit {
            state: LimitState::Applied,
            revision: state.limit.revision,
            limit_bytes: state.limit.bytes,
            target_pages: state.limit_pages,
            occupied_bytes: u64::from(occupied) * self.shared.page_bytes,
            reason: None,
        };
        if state.is_beyond_limit() {
            limit.state = LimitState::Deferred;
        }
        if pages.quarantined > limit.target_pages {
            limit.state = LimitState::Rejected;
            limit.reason = Some(self.lost_beyond(pages.quarantined, state.limit.bytes));
        }
        limit
    }

    fn lost_beyond(&self, lost: u32, limit_bytes: u64) -> String {
        let lost = u64::from(lost) * self.shared.page_bytes;
        format!(
            "{lost} bytes are lost to pages in an unknown state and may still be held: more than {limit_bytes}"
        )
    }

    /// Unmaps the reserve, the minimum too, and gives back what the mapper keeps; returns the bytes given back. The reserve
    /// comes back when pages are next taken. What a scheduler at work was told is on hand stays there.
    pub fn trim(&self) -> Result<u64, PoolError> {
        let beside = self.held_beside()?;
        let mut state = self.shared.enter()?;
        if !state.ledger.has_outstanding_epoch() {
            state.kept_on_hand = 0;
        }
        self.give_back(state, beside, u64::MAX)
    }

    /// [`Pool::trim`] of at least so many bytes, where there are so many, and of pages before what the mapper keeps. Everything that
    /// a scheduler was told is on hand stays there.
    pub fn give_back_idle(&self, bytes: u64) -> Result<u64, PoolError> {
        if bytes == 0 {
            return Ok(0);
        }
        let beside = self.held_beside()?;
        self.give_back(self.shared.enter()?, beside, bytes)
    }

    /// Where memory was refused there may be some now, for others gave theirs back: who waits, and the pager, look again.
    pub fn memory_freed(&self) {
        if let Ok(mut state) = self.shared.enter() {
            state.freed += 1;
            state.pager.mapping_refused = false;
        }
    }

    /// Bytes that [`Pool::give_back_idle`] could give. No lock; 0 of a pool that serves no more.
    pub fn idle_bytes(&self) -> u64 {
        self.shared.count(|counts| counts.idle.load(Ordering::Acquire)).unwrap_or(0)
    }

    /// Bytes of pages without blocks that are not idle yet: queued work may still read them, or the pager is giving them back. No lock.
    pub fn leaving_bytes(&self) -> u64 {
        self.shared.count(|counts| counts.leaving.load(Ordering::Acquire)).unwrap_or(0)
    }

    /// How long no block has been handed out, as far as those who ask can tell: an allocation counts from the first question after
    /// it, so that it need not look at the clock. Of a pool that serves no more: for ever.
    pub fn idle_for(&self) -> Duration {
        self.shared.enter().map_or(Duration::MAX, |mut state| state.idle_for(Instant::now()))
    }

    /// Bytes that the device could give at this moment, whatever part of it this process may have.
    pub fn device_room(&self) -> Result<u64, PoolError> {
        drop(self.shared.enter()?);
        self.shared.mapper.device_room().map_err(|source| PoolError::Driver { source })
    }

    // ---------------------------------------------------------------- inside

    fn held_beside(&self) -> Result<u64, PoolError> {
        drop(self.shared.enter()?);
        Ok(self.shared.mapper.held_beside())
    }

    /// Unmaps idle pages, and has the mapper give back what it keeps where they are fewer than `bytes`; returns the bytes given.
    /// `beside`: what the mapper held before.
    fn give_back<'a>(&'a self, mut state: Guard<'a>, beside: u64, bytes: u64) -> Result<u64, PoolError> {
        let shared = &self.shared;
        state.demand.forget();
        let (on_hand, at_most) = (state.on_hand_wanted(), bytes.div_ceil(shared.page_bytes));
        let at_most = u32::try_from(at_most).unwrap_or(u32::MAX);
        let pages = state.ledger.plan_unbacking(0, on_hand, at_most);
        let mut gone = 0;
        if !pages.is_empty() {
            let (next, released) = shared.give_back(state, &pages)?;
            (state, gone) = (next, u64::from(released.pages) * shared.page_bytes);
        }
        self.await_pager(state)?;
        let given = |beside_now: u64| (gone + beside).saturating_sub(beside_now);
        let mut left = shared.mapper.held_beside();
        if given(left) < bytes && left > 0 {
            shared.mapper.trim().map_err(|source| PoolError::Driver { source })?;
            left = shared.mapper.held_beside();
            shared.enter()?.beside.trimmed(left);
        }
        Ok(given(left))
    }

    /// What the pager is giving back is gone too when this returns, unless it has ever more to give.
    fn await_pager<'a>(&'a self, mut state: Guard<'a>) -> Result<(), PoolError> {
        let (deadline, settled) = (self.shared.deadline(), state.settlements);
        while state.ledger.page_counts().unmapping > 0 {
            match self.wait(state, deadline)? {
                Some(next) => state = next,
                None if self.shared.enter()?.settlements == settled => return Err(PoolError::overdue()),
                None => break,
            }
        }
        Ok(())
    }
}
