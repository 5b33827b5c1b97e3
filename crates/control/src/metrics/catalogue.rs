//! What an instance counts and times: the names that people see. Pure.

/// What is counted, from the start of an instance. The order is that of the words in a sidecar: a change of it is another
/// [`super::layout::METRICS_VERSION`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Counter {
    /// Pages that were given memory.
    PagesMapped,
    /// Pages whose memory was taken.
    PagesUnmapped,
    /// Calls to map that failed, other than for want of memory.
    MapFailures,
    /// Calls to unmap that failed.
    UnmapFailures,
    /// Pages whose mapping is not known any longer.
    PagesQuarantined,
    /// Allocations and reservations that were not served in full.
    AllocationMisses,
    /// Memory that somebody waited for and that the budget did not have.
    RefusedByBudget,
    /// The same, by what is guaranteed to others or given back for them.
    RefusedByGuarantees,
    /// The same, by the instance's own limit.
    RefusedByLimit,
    /// The same, by the device, of which programs that share no budget may have some.
    RefusedByDevice,
    /// Bytes of idle pages and kept memory that went to others, to a limit or to the device's free memory.
    IdleBytesReclaimed,
    /// Bytes of pages that were emptied for the same reasons by evicting cached prefixes.
    CachedBytesReclaimed,
    /// Times that an engine was asked to evict cached prefixes, and some went.
    Evictions,
    /// Changes of mappings that all ranks of an engine made.
    TransactionsDone,
    /// Changes that some rank refused, and that were undone on all of them.
    TransactionsUndone,
    /// Changes of which it is not known what became of them.
    TransactionsLost,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Timer {
    /// A call that gave pages memory, whether it succeeded or not.
    Map,
    /// A call that took the memory of pages.
    Unmap,
    /// From the first refusal until what was wanted was had.
    Shortage,
    /// What it took to give memory back to others, to a limit or to the device's free memory.
    Reclaim,
    /// A change of mappings on all ranks of an engine.
    Transaction,
}

/// How a figure is called in an exposition: its name there, what it means, and the label that tells it from others of that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// Without `kvcached_`.
    pub name: &'static str,
    /// One sentence.
    pub help: &'static str,
    /// Name and value.
    pub label: Option<(&'static str, &'static str)>,
}

const fn plain(name: &'static str, help: &'static str) -> Named {
    Named { name, help, label: None }
}

const fn labelled(name: &'static str, help: &'static str, label: &'static str, value: &'static str) -> Named {
    Named { name, help, label: Some((label, value)) }
}

const REFUSALS: (&str, &str) =
    ("refusals_total", "Times that memory which somebody waited for was refused, and by what.");
const RECLAIMED: (&str, &str) = (
    "reclaimed_bytes_total",
    "Bytes that were given back to other instances, to a limit, or to the device's free memory.",
);
const TRANSACTIONS: (&str, &str) =
    ("transactions_total", "Changes of mappings that several ranks made together, by what became of them.");

impl Counter {
    /// All of them, in their order.
    pub const ALL: [Counter; 16] = [
        Counter::PagesMapped,
        Counter::PagesUnmapped,
        Counter::MapFailures,
        Counter::UnmapFailures,
        Counter::PagesQuarantined,
        Counter::AllocationMisses,
        Counter::RefusedByBudget,
        Counter::RefusedByGuarantees,
        Counter::RefusedByLimit,
        Counter::RefusedByDevice,
        Counter::IdleBytesReclaimed,
        Counter::CachedBytesReclaimed,
        Counter::Evictions,
        Counter::TransactionsDone,
        Counter::TransactionsUndone,
        Counter::TransactionsLost,
    ];

    /// How it is called.
    pub const fn named(self) -> Named {
        match self {
            Counter::PagesMapped => plain("mapped_pages_total", "Pages that were given memory."),
            Counter::PagesUnmapped => plain("unmapped_pages_total", "Pages whose memory was taken."),
            Counter::MapFailures => {
                plain("map_failures_total", "Calls to map pages that failed, other than for want of memory.")
            }
            Counter::UnmapFailures => plain("unmap_failures_total", "Calls to unmap pages that failed."),
            Counter::PagesQuarantined => {
                plain("quarantined_pages_total", "Pages lost because their mapping is not known any longer.")
            }
            Counter::AllocationMisses => plain(
                "allocation_misses_total",
                "Allocations and reservations of blocks that were not served in full.",
            ),
            Counter::RefusedByBudget => labelled(REFUSALS.0, REFUSALS.1, "by", "budget"),
            Counter::RefusedByGuarantees => labelled(REFUSALS.0, REFUSALS.1, "by", "guarantees"),
            Counter::RefusedByLimit => labelled(REFUSALS.0, REFUSALS.1, "by", "limit"),
            Counter::RefusedByDevice => labelled(REFUSALS.0, REFUSALS.1, "by", "device"),
            Counter::IdleBytesReclaimed => labelled(RECLAIMED.0, RECLAIMED.1, "from", "idle"),
            Counter::CachedBytesReclaimed => labelled(RECLAIMED.0, RECLAIMED.1, "from", "cached"),
            Counter::Evictions => {
                plain("evictions_total", "Times that cached prefixes were evicted so that memory could go.")
            }
            Counter::TransactionsDone => labelled(TRANSACTIONS.0, TRANSACTIONS.1, "outcome", "done"),
            Counter::TransactionsUndone => labelled(TRANSACTIONS.0, TRANSACTIONS.1, "outcome", "undone"),
            Counter::TransactionsLost => labelled(TRANSACTIONS.0, TRANSACTIONS.1, "outcome", "lost"),
        }
    }
}

impl Timer {
    /// All of them, in their order.
    pub const ALL: [Timer; 5] =
        [Timer::Map, Timer::Unmap, Timer::Shortage, Timer::Reclaim, Timer::Transaction];

    /// How it is called.
    pub const fn named(self) -> Named {
        match self {
            Timer::Map => plain("map_seconds", "Time of a call that gave pages memory."),
            Timer::Unmap => plain("unmap_seconds", "Time of a call that took the memory of pages."),
            Timer::Shortage => {
                plain("shortage_seconds", "Time from the first refusal until what was wanted was had.")
            }
            Timer::Reclaim => plain("reclaim_seconds", "Time that it took to give memory back."),
            Timer::Transaction => {
                plain("transaction_seconds", "Time of a change of mappings that several ranks made together.")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_figure_has_its_place_and_its_own_name() {
        let places = Counter::ALL.iter().map(|counter| *counter as usize);
        assert!(places.eq(0..Counter::ALL.len()));
        assert!(Timer::ALL.iter().map(|timer| *timer as usize).eq(0..Timer::ALL.len()));
        let named: Vec<Named> = Counter::ALL.iter().map(|counter| counter.named()).collect();
        let names: BTreeSet<_> = named.iter().map(|named| (named.name, named.label)).collect();
        assert_eq!(names.len(), named.len());
        for Named { name, help, label } in named {
            assert!(name.ends_with("_total") && help.ends_with('.'), "{name}");
            let family: BTreeSet<_> =
                Counter::ALL.iter().map(|c| c.named()).filter(|n| n.name == name).map(|n| n.help).collect();
            assert_eq!(family.len(), 1, "{name} {label:?}: one meaning a name");
        }
        let timers: BTreeSet<_> = Timer::ALL.iter().map(|timer| timer.named().name).collect();
        assert!(timers.len() == Timer::ALL.len() && timers.iter().all(|name| name.ends_with("_seconds")));
    }
}
