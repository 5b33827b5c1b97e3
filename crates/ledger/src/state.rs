//! The states of a page and every way from one to another.

use std::fmt;

/// What a page is right now. Only `Reserved`, `InUse` and `Retired` pages are backed for certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PageState {
    /// No memory, no block held.
    Free,
    /// A driver call that backs it is under way.
    Mapping,
    /// Backed, at least one block held.
    InUse,
    /// Backed, no block held, no queued work reads it.
    Reserved,
    /// Backed, no block held, but work submitted up to this epoch may still read it.
    Retired(u64),
    /// A driver call that takes its memory is under way.
    Unmapping,
    /// No memory, no block held, and taken out by the limit.
    Withdrawn,
    /// Nobody knows whether it is mapped: never used again.
    Quarantined,
}

/// Every named way from one state to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transition {
    /// A driver call to back it begins.
    BeginMapping,
    /// It is backed.
    FinishMapping,
    /// Backing failed and was undone.
    UndoMapping,
    /// Its first block is taken. Cancels a retirement.
    Occupy,
    /// Its last block is back and nothing queued can read it.
    Vacate,
    /// Its last block is back, but work up to this epoch may read it.
    Retire(u64),
    /// The work that might have read it has ended.
    Settle,
    /// A driver call to take its memory begins.
    BeginUnmapping,
    /// Its memory is gone.
    FinishUnmapping,
    /// It kept its memory after all.
    UndoUnmapping,
    /// The limit takes it out.
    Withdraw,
    /// The limit lets it back in.
    Restore,
    /// Its mapping is unknown.
    Quarantine,
}

/// A page was asked to do what its state does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("page {page} {}: cannot {transition}", describe(*.from))]
pub struct TransitionError {
    /// The page, also where no such page exists (then `from` is `None`).
    pub page: u32,
    /// Its state, `None` for a page outside the ledger.
    pub from: Option<PageState>,
    /// What was asked of it.
    pub transition: Transition,
}

fn describe(from: Option<PageState>) -> String {
    from.map_or_else(|| "does not exist".to_owned(), |state| format!("is {state:?}"))
}

impl PageState {
    /// The whole table. Whatever it does not list is illegal.
    pub fn apply(self, page: u32, transition: Transition) -> Result<PageState, TransitionError> {
        use PageState::{Free, InUse, Mapping, Quarantined, Reserved, Retired, Unmapping, Withdrawn};
        Ok(match (self, transition) {
            (Free, Transition::BeginMapping) => Mapping,
            (Mapping, Transition::FinishMapping) => Reserved,
            (Mapping, Transition::UndoMapping) => Free,
            (Reserved | Retired(_), Transition::Occupy) => InUse,
            (InUse, Transition::Vacate) => Reserved,
            (InUse, Transition::Retire(epoch)) => Retired(epoch),
            (Retired(_), Transition::Settle) => Reserved,
            (Reserved, Transition::BeginUnmapping) => Unmapping,
            (Unmapping, Transition::FinishUnmapping) => Free,
            (Unmapping, Transition::UndoUnmapping) => Reserved,
            (Free, Transition::Withdraw) => Withdrawn,
            (Withdrawn, Transition::Restore) => Free,
            (Mapping | Unmapping, Transition::Quarantine) => Quarantined,
            _ => return Err(TransitionError { page, from: Some(self), transition }),
        })
    }

    /// Blocks may be taken from it without a driver call.
    pub fn is_backed(self) -> bool {
        matches!(self, PageState::InUse | PageState::Reserved | PageState::Retired(_))
    }

    /// A driver call about it is under way.
    pub fn is_in_motion(self) -> bool {
        matches!(self, PageState::Mapping | PageState::Unmapping)
    }
}

impl fmt::Display for Transition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match self {
            Transition::BeginMapping => "begin mapping",
            Transition::FinishMapping => "finish mapping",
            Transition::UndoMapping => "undo mapping",
            Transition::Occupy => "occupy",
            Transition::Vacate => "vacate",
            Transition::Retire(epoch) => return write!(f, "retire at epoch {epoch}"),
            Transition::Settle => "settle",
            Transition::BeginUnmapping => "begin unmapping",
            Transition::FinishUnmapping => "finish unmapping",
            Transition::UndoUnmapping => "undo unmapping",
            Transition::Withdraw => "withdraw",
            Transition::Restore => "restore",
            Transition::Quarantine => "quarantine",
        };
        f.write_str(words)
    }
}

/// Pages by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageCounts {
    /// In state `Free`.
    pub free: u32,
    /// In state `Mapping`.
    pub mapping: u32,
    /// In state `InUse`.
    pub in_use: u32,
    /// In state `Reserved`.
    pub reserved: u32,
    /// In state `Retired`.
    pub retired: u32,
    /// In state `Unmapping`.
    pub unmapping: u32,
    /// In state `Withdrawn`.
    pub withdrawn: u32,
    /// In state `Quarantined`.
    pub quarantined: u32,
}

impl PageCounts {
    /// All pages: the sum never changes.
    pub fn total(&self) -> u32 {
        self.free + self.withdrawn + self.occupied()
    }

    /// Pages that hold memory, or may: what a limit limits.
    pub fn occupied(&self) -> u32 {
        self.mapping + self.in_use + self.reserved + self.retired + self.unmapping + self.quarantined
    }

    /// Pages with a driver call under way.
    pub fn in_motion(&self) -> u32 {
        self.mapping + self.unmapping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [PageState; 8] = [
        PageState::Free,
        PageState::Mapping,
        PageState::InUse,
        PageState::Reserved,
        PageState::Retired(3),
        PageState::Unmapping,
        PageState::Withdrawn,
        PageState::Quarantined,
    ];
    const TRANSITIONS: [Transition; 13] = [
        Transition::BeginMapping,
        Transition::FinishMapping,
        Transition::UndoMapping,
        Transition::Occupy,
        Transition::Vacate,
        Transition::Retire(9),
        Transition::Settle,
        Transition::BeginUnmapping,
        Transition::FinishUnmapping,
        Transition::UndoUnmapping,
        Transition::Withdraw,
        Transition::Restore,
        Transition::Quarantine,
    ];
    /// Written out a second time, so that a slip in the table shows.
    const LEGAL: [(PageState, Transition, PageState); 15] = [
        (PageState::Free, Transition::BeginMapping, PageState::Mapping),
        (PageState::Free, Transition::Withdraw, PageState::Withdrawn),
        (PageState::Withdrawn, Transition::Restore, PageState::Free),
        (PageState::Mapping, Transition::FinishMapping, PageState::Reserved),
        (PageState::Mapping, Transition::UndoMapping, PageState::Free),
        (PageState::Mapping, Transition::Quarantine, PageState::Quarantined),
        (PageState::Reserved, Transition::Occupy, PageState::InUse),
        (PageState::Retired(3), Transition::Occupy, PageState::InUse),
        (PageState::InUse, Transition::Vacate, PageState::Reserved),
        (PageState::InUse, Transition::Retire(9), PageState::Retired(9)),
        (PageState::Retired(3), Transition::Settle, PageState::Reserved),
        (PageState::Reserved, Transition::BeginUnmapping, PageState::Unmapping),
        (PageState::Unmapping, Transition::FinishUnmapping, PageState::Free),
        (PageState::Unmapping, Transition::UndoUnmapping, PageState::Reserved),
        (PageState::Unmapping, Transition::Quarantine, PageState::Quarantined),
    ];

    #[test]
    fn every_pair_of_state_and_transition() {
        let mut illegal = 0;
        for from in STATES {
            for transition in TRANSITIONS {
                let listed = LEGAL.iter().find(|(f, t, _)| (*f, *t) == (from, transition));
                let got = from.apply(5, transition);
                match listed {
                    Some((_, _, to)) => assert_eq!(got, Ok(*to)),
                    None => {
                        illegal += 1;
                        assert_eq!(got, Err(TransitionError { page: 5, from: Some(from), transition }));
                    }
                }
            }
        }
        assert_eq!(illegal, STATES.len() * TRANSITIONS.len() - LEGAL.len());
    }

    #[test]
    fn an_error_names_page_state_and_transition() {
        let error = PageState::Retired(3).apply(7, Transition::BeginUnmapping).unwrap_err();
        assert_eq!(error.to_string(), "page 7 is Retired(3): cannot begin unmapping");
    }
}
