//! Driver calls: planned under the lock, made without it, recorded under it again.

use std::time::Instant;

use kvcached_ledger::{Ledger, TransitionError};

use crate::counting::{MapCall, unmap_call};
use crate::error::PoolError;
use crate::mapper::{MapFailure, UnmapFailure};
use crate::state::{Guard, Phase, Shared};

impl Shared {
    /// Backs pages that were planned. A failure is part of the result; everything but lost pages was undone.
    pub fn back<'a>(
        &'a self,
        state: Guard<'a>,
        pages: &[u32],
    ) -> Result<(Guard<'a>, Result<(), MapFailure>), PoolError> {
        let ahead = state.is_of_pager();
        drop(state);
        let flight = Flight { shared: self };
        let began = Instant::now();
        let mapped = if ahead { self.mapper.map_ahead(pages) } else { self.mapper.map(pages) };
        flight.landed();
        let call = MapCall { ahead, over_ranks: self.mapper.is_over_ranks(), time: began.elapsed() };
        call.count(&self.metrics, mapped.as_ref().map(Vec::len));
        let outcome = mapped.map(drop);
        if let Err(MapFailure::Quarantined { pages, source }) = &outcome {
            tracing::warn!(?pages, error = %source, "pages are lost: backing failed and could not be undone");
        }
        let mut state = self.settle(|ledger| match &outcome {
            Ok(()) => ledger.backed(pages),
            Err(failure) => ledger.backing_failed(pages, failure.lost_of(pages)),
        })?;
        if let Err(MapFailure::Broken { source }) = &outcome {
            state.broken.get_or_insert_with(|| source.to_string());
        }
        state.credit = match outcome {
            Ok(()) => state.credit.saturating_sub(pages.len() as u32),
            // There is not room for that many, but perhaps for fewer.
            Err(MapFailure::OutOfMemory { .. }) => state.credit.min(pages.len() as u32 - 1),
            Err(_) => 0,
        };
        Ok((state, outcome))
    }

    /// Takes the memory of pages that were planned. A failure costs pages and is part of the result.
    pub fn give_back<'a>(
        &'a self,
        state: Guard<'a>,
        pages: &[u32],
    ) -> Result<(Guard<'a>, Released), PoolError> {
        drop(state);
        let flight = Flight { shared: self };
        let began = Instant::now();
        let failure = self.mapper.unmap(pages).err();
        flight.landed();
        let over_ranks = self.mapper.is_over_ranks();
        unmap_call(&self.metrics, pages.len(), failure.as_ref(), over_ranks, began.elapsed());
        let mut gone = pages.len();
        if let Some(UnmapFailure { quarantined, still_mapped, source, .. }) = &failure {
            gone = gone.saturating_sub(quarantined.len() + still_mapped.len());
            tracing::warn!(?quarantined, ?still_mapped, error = %source, "pages could not be unmapped");
        }
        let mut state = self.settle(|ledger| match &failure {
            None => ledger.unbacked(pages),
            Some(failure) => ledger.unbacking_failed(pages, &failure.quarantined, &failure.still_mapped),
        })?;
        if let Some(UnmapFailure { broken: true, source, .. }) = &failure {
            state.broken.get_or_insert_with(|| source.to_string());
        }
        if gone > 0 {
            state.pager.mapping_refused = false;
        }
        Ok((state, Released { pages: gone as u32, failure }))
    }

    /// Records what came of a driver call. A report that does not fit the plan leaves the pool in an unknown state.
    fn settle(
        &self,
        commit: impl FnOnce(&mut Ledger) -> Result<(), TransitionError>,
    ) -> Result<Guard<'_>, PoolError> {
        let mut state = self.lock()?;
        let committed = commit(&mut state.ledger);
        state.settlements += 1;
        state.beside.note(self.mapper.held_beside());
        if let Err(error) = committed {
            let detail = format!("the mapper reported pages that it was not asked about: {error}");
            state.broken = Some(detail.clone());
            return Err(PoolError::StateConsistency { detail });
        }
        state.follow_limit(); // before somebody, under this lock, backs pages anew
        Ok(state)
    }
}

/// What giving pages back came to.
pub(crate) struct Released {
    /// Pages that lost their memory.
    pub pages: u32,
    pub failure: Option<UnmapFailure>,
}

/// A driver call under way. Dropped by a panic of the mapper it marks the pool as broken, so that nobody
/// waits for pages whose state will never be reported.
struct Flight<'a> {
    shared: &'a Shared,
}

impl Flight<'_> {
    fn landed(self) {
        std::mem::forget(self);
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        if let Ok(mut state) = self.shared.lock() {
            state.broken = Some("the mapper panicked".to_owned());
        }
    }
}

impl Guard<'_> {
    /// A pool that was shut down meanwhile takes no more: the pager unmaps what was backed.
    pub fn still_open(&self) -> Result<(), PoolError> {
        match self.phase {
            Phase::Open => Ok(()),
            Phase::Ending | Phase::Ended => Err(PoolError::Shutdown),
        }
    }
}
