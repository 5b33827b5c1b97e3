//! What all instances of this user may have of one device together: one record a device, a slot in it for each instance.
//!
//! * **Admission** is decided under the *gate*, an exclusive `flock` on the record's file, which the kernel drops with whoever holds it. It
//!   is held for a look at the slots and one store. Everything else reads atomics.
//! * **A slot** is its instance's alone to write. It names the instance's record and that file's inode: whoever is refused looks
//!   whether the owners of the others still live, and frees the slots of those that do not.
//! * **The file** goes with the last instance. Who opens it looks, once it has the gate, whether the name still leads to it.

mod admission;
mod file;
pub(crate) mod layout;
mod list;
mod share;

pub use list::{BudgetListed, BudgetView, MemberView, budgets};
pub use share::{BudgetShare, Refused, RefusedBy};
