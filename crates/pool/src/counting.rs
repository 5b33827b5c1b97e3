//! What comes of the calls to a mapper, counted for whoever watches the instance.

use std::time::Duration;

use kvcached_control::{Counter, Metrics, RefusedBy, Timer};

use crate::mapper::{Cause, MapFailure, UnmapFailure};

/// A call that backs pages.
pub(crate) struct MapCall {
    /// Nobody waits for them.
    pub ahead: bool,
    /// Ranks do it together.
    pub over_ranks: bool,
    pub time: Duration,
}

impl MapCall {
    /// Counts what came of it: how many pages are backed that were not.
    pub fn count(&self, metrics: &Metrics, outcome: Result<usize, &MapFailure>) {
        let refusal = match outcome {
            Err(MapFailure::OutOfMemory { source }) => Some(refused_by(source)),
            _ => None,
        };
        if let Some(by) = refusal {
            if !self.ahead {
                metrics.add(by, 1);
            }
            if by != Counter::RefusedByDevice {
                return; // nobody was called
            }
        }
        metrics.time(Timer::Map, self.time);
        match outcome {
            Ok(pages) => metrics.add(Counter::PagesMapped, pages as u64),
            Err(MapFailure::OutOfMemory { .. }) => {}
            Err(MapFailure::Quarantined { pages, .. }) => {
                metrics.add(Counter::MapFailures, 1);
                metrics.add(Counter::PagesQuarantined, pages.len() as u64);
            }
            Err(_) => metrics.add(Counter::MapFailures, 1),
        }
        if self.over_ranks {
            let lost = matches!(outcome, Err(MapFailure::Quarantined { .. } | MapFailure::Broken { .. }));
            transaction(metrics, outcome.is_ok(), lost, self.time);
        }
    }
}

/// Counts what came of a call that took the memory of `pages` pages.
pub(crate) fn unmap_call(
    metrics: &Metrics,
    pages: usize,
    failure: Option<&UnmapFailure>,
    over_ranks: bool,
    time: Duration,
) {
    metrics.time(Timer::Unmap, time);
    let mut gone = pages;
    if let Some(UnmapFailure { quarantined, still_mapped, .. }) = failure {
        metrics.add(Counter::UnmapFailures, 1);
        metrics.add(Counter::PagesQuarantined, quarantined.len() as u64);
        gone = gone.saturating_sub(quarantined.len() + still_mapped.len());
    }
    metrics.add(Counter::PagesUnmapped, gone as u64);
    if over_ranks {
        let lost = failure.is_some_and(|failure| failure.broken || !failure.quarantined.is_empty());
        transaction(metrics, failure.is_none(), lost, time);
    }
}

fn transaction(metrics: &Metrics, done: bool, lost: bool, time: Duration) {
    metrics.time(Timer::Transaction, time);
    let outcome = match (done, lost) {
        (true, _) => Counter::TransactionsDone,
        (false, false) => Counter::TransactionsUndone,
        (false, true) => Counter::TransactionsLost,
    };
    metrics.add(outcome, 1);
}

/// Whatever is no refusal of a share is one of the device.
fn refused_by(cause: &Cause) -> Counter {
    match cause.downcast_ref::<kvcached_control::Refused>().map(|refused| refused.by) {
        None => Counter::RefusedByDevice,
        Some(RefusedBy::Limit) => Counter::RefusedByLimit,
        Some(RefusedBy::Guarantees) => Counter::RefusedByGuarantees,
        Some(_) => Counter::RefusedByBudget,
    }
}
