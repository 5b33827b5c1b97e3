//! What instances show each other: one record a process, a small file in shared memory.
//!
//! An instance creates its record with [`InstanceRecord::create`] and publishes figures through [`PoolRow::set`], which costs
//! a few atomic stores. Anybody of the same user reads all records with [`list`].
//!
//! * **Where.** `<dir>/<name>.kvc`, mode 0600, in a directory of the user's own of mode 0700 ([`default_dir`]).
//! * **Liveness.** The owner holds an exclusive `flock` on its file, which the kernel drops when the owner dies, however it dies.
//!   A record whose lock is free is stale for good; [`list`] and [`InstanceRecord::create`] remove it. Only who holds the lock
//!   of a file may remove its name, and a name is only ever taken while it is free, so that no two processes can undo each other.
//! * **Fork.** A child that forks without exec shares the owner's lock: the record counts as alive until the child has ended too.
//!   A child never removes its parent's record.
//! * **Sidecar.** What an instance counts and times lies beside its record ([`Metrics`]), with a version of its own.
//! * **Trust.** Readers copy the file and check every field; they never map it. A mangled file is a [`RecordError`], never a signal.
#![deny(unsafe_code)]

mod ask;
mod bell;
mod budget;
mod directory;
mod error;
mod families;
mod layout;
mod list;
#[allow(unsafe_code)] // the one place: views a mapped file as atomics
mod mapping;
mod metrics;
mod record;
mod sizes;
mod terms;
mod text;
mod view;
mod words;

pub use ask::{ask, remove};
pub use budget::{BudgetListed, BudgetShare, BudgetView, MemberView, Refused, RefusedBy, budgets};
pub use directory::default_dir;
pub use error::{ControlError, RecordError};
pub use families::{Family, Kind, Sample, Value, families};
pub use layout::{RECORD_BYTES, RECORD_VERSION};
pub use list::{Listed, list};
pub use metrics::{Counter, Metrics, MetricsView, Named, Timer, TimerView, metrics};
pub use record::{InstanceRecord, PoolRow};
pub use sizes::{MAX_POOL_ROWS, MAX_TEXT_BYTES};
pub use terms::{Answered, Asked, Change, Outcome, Terms};
pub use view::{InstanceView, PoolView};
