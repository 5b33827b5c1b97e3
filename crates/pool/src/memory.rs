//! How much memory a pool may have, and what it can do without.

use crate::error::PoolError;
use crate::limit::{LimitState, MemoryLimit, Request, Standing};
use crate::pool::Pool;
use crate::state::State;

impl Pool {
    /// Sets how much memory the pool may have, bytes; at most all that it reserved. Growth is immediate. A shrinking pool gives
    /// back its reserve, issues no block beyond the limit, and lets pages go as they empty; no live block is revoked. The page of
    /// the null block stays.
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
        state.beside_bytes = beside;
        state.pager.trim_mapper |= pages < state.ledger.target();
        state.pager.unmapping_refused = false;
        state.ledger.set_target(pages);
        state.limit = request;
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
            target_pages: state.ledger.target(),
            occupied_bytes: u64::from(occupied) * self.shared.page_bytes,
            reason: None,
        };
        if state.ledger.excess() > 0 {
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
        let shared = &self.shared;
        drop(shared.enter()?);
        let beside = shared.mapper.held_beside();
        let mut state = shared.enter()?;
        state.demand.forget();
        if !state.ledger.has_outstanding_epoch() {
            state.kept_on_hand = 0;
        }
        let on_hand = state.on_hand_wanted();
        let pages = state.ledger.plan_unbacking(0, on_hand, u32::MAX);
        let mut gone = 0;
        if !pages.is_empty() {
            let (next, released) = shared.give_back(state, &pages)?;
            (state, gone) = (next, released.pages);
        }
        // What the pager is giving back is gone too when this returns, unless it has ever more to give.
        let (deadline, settled) = (shared.deadline(), state.settlements);
        while state.ledger.page_counts().unmapping > 0 {
            match self.wait(state, deadline)? {
                Some(next) => state = next,
                None => {
                    state = shared.enter()?;
                    if state.settlements == settled {
                        return Err(PoolError::overdue());
                    }
                    break;
                }
            }
        }
        drop(state);
        shared.mapper.trim().map_err(|source| PoolError::Driver { source })?;
        let mut state = shared.enter()?;
        state.beside_bytes = shared.mapper.held_beside();
        let given = u64::from(gone) * shared.page_bytes + beside;
        Ok(given.saturating_sub(state.beside_bytes))
    }
}
