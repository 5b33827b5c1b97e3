//! For tests: a whole group without processes, sockets, memory or time. Coordinator and ranks are the production cores; what
//! lies between them (frames under way, connections, driver work, deadlines, deaths) is data, and whoever drives the
//! [`World`] chooses what happens next. After every [`Action`] the world checks what must hold:
//!
//! * no rank's memory is mapped, unmapped, kept or released against its laws ([`Store`]);
//! * of one transaction no ABORT follows a COMMIT, and no COMMIT an ABORT;
//! * what an operation's outcome says is so on every rank, and pages that no operation is about never differ between ranks;
//! * every operation finishes once, a group breaks once, and one that is broken does nothing more;
//! * at rest nothing is open, nothing is prepared, nobody works.
//!
//! A rank that is dead, or whose connection is cut, counts no more until the next term.

mod book;
mod replay;
mod store;
mod world;

use std::fmt;

pub use book::Facts;
pub use replay::replay;
pub use store::{Fault, Pages, Store, bits, runs};
pub use world::{Action, Flight, Mutant, Notice, Seat, To, World};

/// What must not be, in words.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Violation(pub String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}
