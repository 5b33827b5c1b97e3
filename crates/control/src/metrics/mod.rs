//! What an instance counts and times, in a file beside its record: `<name>.kvm`.
//!
//! Writing costs an atomic addition or two: no lock, no system call. The file is its owner's as the record is: locked while that lives,
//! removed with it, and by whoever finds it later.

mod catalogue;
pub(crate) mod layout;

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::fs::FlockOperation;

use crate::directory::{Directory, read_copy, temporary_name};
use crate::error::{ControlError, RecordError};
use crate::mapping::Mapped;
use crate::view::InstanceView;
use layout::{METRICS_BYTES, Sidecar};

pub use catalogue::{Counter, Named, Timer};

const SUFFIX: &str = ".kvm";

/// Counts and times for one instance, or for nobody. Clones write to the same figures. In a fork it goes on writing its parent's.
#[derive(Clone, Default)]
pub struct Metrics {
    sidecar: Option<Arc<Mapped<Sidecar>>>,
}

/// The figures of an instance at the moment of reading, one by one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MetricsView {
    /// Each [`Counter`] once.
    pub counters: Vec<(Counter, u64)>,
    /// Each [`Timer`] once.
    pub timers: Vec<(Timer, TimerView)>,
}

/// A histogram of times.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimerView {
    /// How many took as long as this and longer than the bound before; `None`: longer than all bounds.
    pub buckets: Vec<(Option<Duration>, u64)>,
    /// Of all times.
    pub sum: Duration,
}

impl Metrics {
    /// Adds `n` to a counter.
    pub fn add(&self, counter: Counter, n: u64) {
        if let Some(sidecar) = &self.sidecar {
            sidecar.record().counters[counter as usize].fetch_add(n, Ordering::Relaxed);
        }
    }

    /// Adds a time.
    pub fn time(&self, timer: Timer, time: Duration) {
        if let Some(sidecar) = &self.sidecar {
            let histogram = &sidecar.record().timers[timer as usize];
            let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            histogram.buckets[layout::bucket_of(time)].fetch_add(1, Ordering::Relaxed);
            histogram.sum_ns.fetch_add(ns, Ordering::Relaxed);
        }
    }
}

impl MetricsView {
    /// Of one counter.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.counters[counter as usize].1
    }

    /// Of one timer.
    pub fn timer(&self, timer: Timer) -> &TimerView {
        &self.timers[timer as usize].1
    }
}

impl TimerView {
    /// How many took no longer than each bound; the last: all of them.
    pub fn cumulative(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        self.buckets.iter().scan(0u64, |sum, (bound, count)| {
            *sum = sum.saturating_add(*count);
            Some((*bound, *sum))
        })
    }

    /// How many times there are.
    pub fn count(&self) -> u64 {
        self.cumulative().last().map_or(0, |(_, count)| count)
    }
}

/// What the instance has counted; `None` where it has just gone, or another of its name has come.
///
/// # Errors
///
/// [`RecordError`] where the file is no sidecar of this version.
pub fn metrics(instance: &InstanceView) -> Result<Option<MetricsView>, RecordError> {
    let dir = instance.path.parent().unwrap_or(Path::new("."));
    let Ok(Some(directory)) = Directory::open(dir) else { return Ok(None) };
    let Some(file) = directory.open_file(&file_name(&instance.name))? else { return Ok(None) };
    layout::decode(&read_copy(&file, METRICS_BYTES)?, instance.inode)
}

/// The name of an instance's sidecar.
pub(crate) fn file_name(name: &str) -> String {
    format!("{name}{SUFFIX}")
}

/// Removes a sidecar whose owner has died. Best effort: it is in nobody's way.
pub(crate) fn remove_unowned(directory: &Directory, file_name: &str) {
    if let Ok(Some(file)) = directory.open_file(file_name) {
        let _ = directory.remove_unowned(&file, file_name);
    }
}

/// Whether a file of this name is a sidecar.
pub(crate) fn is_sidecar(file_name: &str) -> bool {
    file_name.strip_suffix(SUFFIX).is_some_and(|name| !name.is_empty())
}

/// The sidecar's file while its owner lives; dropped, it goes.
pub(crate) struct Beside {
    name: String,
    file: File,
}

impl Beside {
    /// Makes the sidecar of the instance that has `name`, whose record has this inode. One that is stale makes way.
    pub fn create(directory: &Directory, name: &str, inode: u64) -> Result<(Self, Metrics), ControlError> {
        let (temporary, name) = (temporary_name(), file_name(name));
        let path = directory.join(&name);
        let failed = |doing| {
            let path = path.clone();
            move |error: std::io::Error| ControlError::io(doing, &path, error)
        };
        let mut file = directory.create_locked(&temporary).map_err(failed("create"))?;
        let fill = |file: &mut File| -> Result<Mapped<Sidecar>, ControlError> {
            file.write_all(&layout::encode(inode)).map_err(failed("write"))?;
            let mapped = Mapped::new(file).map_err(failed("map"))?;
            if !directory.publish(&temporary, &name)? {
                // Of an instance whose record somebody has removed. The name is ours now: it goes on counting unseen.
                directory.replace(&temporary, &name).map_err(failed("create"))?;
            }
            Ok(mapped)
        };
        match fill(&mut file) {
            Ok(mapped) => Ok((Beside { name, file }, Metrics { sidecar: Some(Arc::new(mapped)) })),
            Err(error) => {
                let _ = directory.remove_locked(&file, &temporary); // the first error is the one to tell
                Err(error)
            }
        }
    }

    /// Removes the file.
    pub fn remove(self, directory: &Directory) {
        // A failure leaves a file without an owner, which the next `list` removes.
        let _ = directory.remove_locked(&self.file, &self.name);
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Metrics").field("counts", &self.sidecar.is_some()).finish()
    }
}
