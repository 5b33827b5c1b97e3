//! The background thread of a pool: backs pages ahead of allocations, gives them back behind whoever freed them, follows the
//! limit, and ends the pool.
//!
//! It sleeps until a change of the state gives it work (see [`Guard`]), decides under the lock, calls the driver without it.

use std::sync::Arc;

use crate::error::PoolError;
use crate::mapper::{Cause, MapFailure};
use crate::state::{EndFailure, Guard, Phase, Shared};

/// Pages of one driver call. What is not planned yet can still be allocated from, so few; more would gain nothing, for the
/// driver takes its time for each.
const AT_ONCE: u32 = 4;

/// What to do next.
enum Job {
    /// Give back these, which are planned.
    Unmap(Vec<u32>),
    /// Back these, which are planned.
    Map(Vec<u32>),
    /// Have the mapper give back what it keeps.
    TrimMapper,
    End,
    Wait,
    Leave,
}

/// Works until the pool has ended, or nobody is left who could end it.
pub(crate) fn run(shared: &Arc<Shared>) {
    let _last = Last { shared };
    if let Err(error) = work(shared) {
        tracing::error!(%error, "the pager of a pool has stopped");
    }
}

fn work(shared: &Shared) -> Result<(), PoolError> {
    let mut state = shared.lock()?.of_pager();
    loop {
        state = match next(&mut state) {
            Job::Unmap(pages) => unmap(shared, state, &pages)?,
            Job::Map(pages) => map(shared, state, &pages)?,
            Job::TrimMapper => trim_mapper(shared, state)?,
            Job::End => end(shared, state)?,
            Job::Wait => state.wait_for_work()?,
            Job::Leave => return Ok(()),
        };
    }
}

/// Memory first goes back, then comes: where both are due somebody else may be waiting for it.
fn next(state: &mut Guard<'_>) -> Job {
    match state.phase {
        Phase::Ended => return Job::Leave,
        Phase::Ending if state.pager.end_asked => return Job::End,
        Phase::Ending if state.pager.abandoned => return Job::Leave,
        Phase::Ending => return Job::Wait,
        Phase::Open if !state.may_page() => return Job::Wait,
        Phase::Open => {}
    }
    if state.has_surplus() {
        state.pager.trim_mapper |= state.is_beyond_limit(); // not to be kept beside the pages instead
        let (keep, on_hand) = (state.keep(), state.on_hand_wanted());
        return Job::Unmap(state.ledger.plan_unbacking(keep, on_hand, AT_ONCE));
    }
    if std::mem::take(&mut state.pager.trim_mapper) && state.beside.bytes() > 0 {
        return Job::TrimMapper;
    }
    match state.pages_ahead() {
        0 => Job::Wait,
        pages => Job::Map(state.ledger.plan_pages(pages.min(AT_ONCE))),
    }
}

fn unmap<'a>(shared: &'a Shared, state: Guard<'a>, pages: &[u32]) -> Result<Guard<'a>, PoolError> {
    let (state, released) = shared.give_back(state, pages)?;
    let mut state = state.of_pager();
    state.tally.behind += u64::from(released.pages);
    if released.failure.is_some() {
        state.tally.failures += 1;
        // Not where all pages left and only their memory could not be released: the mapper tries that again.
        state.pager.unmapping_refused |= (released.pages as usize) < pages.len();
    }
    Ok(state)
}

fn map<'a>(shared: &'a Shared, state: Guard<'a>, pages: &[u32]) -> Result<Guard<'a>, PoolError> {
    let (state, outcome) = shared.back(state, pages)?;
    let mut state = state.of_pager();
    match outcome {
        Ok(()) => state.tally.ahead += pages.len() as u64,
        Err(failure) => {
            state.pager.mapping_refused = true;
            // Without memory there is no reserve: load, and nothing to tell.
            if !matches!(failure, MapFailure::OutOfMemory { .. }) {
                state.tally.failures += 1;
                tracing::warn!(error = %failure, "pages could not be backed ahead");
            }
        }
    }
    Ok(state)
}

fn trim_mapper<'a>(shared: &'a Shared, state: Guard<'a>) -> Result<Guard<'a>, PoolError> {
    drop(state);
    let trimmed = shared.mapper.trim();
    let mut state = shared.lock()?.of_pager();
    state.beside.trimmed(shared.mapper.held_beside());
    if let Err(error) = trimmed {
        state.tally.failures += 1;
        tracing::warn!(%error, "memory kept for later pages could not be given back");
    }
    Ok(state)
}

/// One attempt to give everything back.
fn end<'a>(shared: &'a Shared, state: Guard<'a>) -> Result<Guard<'a>, PoolError> {
    let (mut state, failure) = give_all_back(shared, state)?;
    if state.beside.bytes() > 0 {
        state = trim_mapper(shared, state)?;
    }
    state.pager.end_asked = false;
    state.pager.end_attempts += 1;
    state.pager.end_failure = failure;
    let pages = state.ledger.page_counts();
    if pages.in_use + pages.reserved + pages.retired + pages.in_motion() == 0 {
        state.phase = Phase::Ended;
    }
    Ok(state)
}

fn give_all_back<'a>(
    shared: &'a Shared,
    mut state: Guard<'a>,
) -> Result<(Guard<'a>, Option<EndFailure>), PoolError> {
    let deadline = shared.deadline();
    while state.ledger.page_counts().in_motion() > 0 && state.broken.is_none() {
        match state.wait(deadline)? {
            Some(next) => state = next,
            None => {
                let source = Cause::from("a driver call of another thread did not end in time");
                return Ok((shared.lock()?.of_pager(), Some(EndFailure { quarantined: vec![], source })));
            }
        }
    }
    drop(state);
    // Work that may still run reads these pages: where it cannot be waited for they stay mapped.
    let waited = shared.mapper.synchronise();
    let mut state = shared.lock()?.of_pager();
    if let Err(source) = waited {
        return Ok((state, Some(EndFailure { quarantined: vec![], source })));
    }
    state.ledger.clear_all();
    let mut failure: Option<EndFailure> = None;
    // A mapper may stop at the first page that fails: goes on as long as each round settles some.
    loop {
        let pages = state.ledger.plan_unbacking(0, 0, u32::MAX);
        if pages.is_empty() {
            return Ok((state, failure));
        }
        let (next, released) = shared.give_back(state, &pages)?;
        state = next.of_pager();
        if let Some(new) = released.failure {
            match &mut failure {
                Some(first) => first.quarantined.extend(new.quarantined),
                None => failure = Some(EndFailure { quarantined: new.quarantined, source: new.source }),
            }
        }
        if state.ledger.page_counts().reserved as usize >= pages.len() {
            return Ok((state, failure));
        }
    }
}

/// However the thread ends, nobody waits for it any longer.
struct Last<'a> {
    shared: &'a Shared,
}

impl Drop for Last<'_> {
    fn drop(&mut self) {
        match self.shared.lock() {
            Ok(mut state) => {
                state.pager.gone = true;
                let needed = state.phase != Phase::Ended && !state.pager.abandoned;
                if needed && state.broken.is_none() {
                    // A panic of the mapper: what it was called for is not known to have been done.
                    state.broken =
                        Some("the pager has stopped: nobody gives memory back any longer".to_owned());
                }
            }
            Err(_) => self.shared.changed.notify_all(), // a poisoned state: every waiter finds out
        }
    }
}
