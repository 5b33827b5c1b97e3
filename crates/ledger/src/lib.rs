//! Who holds what: the states of a group's pages, the blocks that are held in them, and when a page
//! that nobody holds any longer may lose its memory.
//!
//! Pure bookkeeping: no I/O, no clock, no threads. Whoever owns a [`Ledger`] does the effects. A page
//! changes hands in two steps: a `plan_*` call marks pages as in motion and names them, the owner
//! calls the driver, and `backed`, `unbacked` or one of the `*_failed` calls records what came of it.
//!
//! Block ids are *sparse*: block j of page p has id `p * ids_per_page + j`, j below `blocks_per_page`.
#![forbid(unsafe_code)]

mod blocks;
mod check;
mod epochs;
mod error;
mod index;
mod layout;
mod ledger;
mod limit;
mod ordered;
mod pages;
mod state;

pub use blocks::{ClaimPlan, FreeOutcome};
pub use check::Inconsistency;
pub use error::{BlockError, EpochError, LayoutError};
pub use layout::{Layout, PageOrder, RetirePolicy};
pub use ledger::{BlockCounts, Ledger};
pub use state::{PageCounts, PageState, Transition, TransitionError};
