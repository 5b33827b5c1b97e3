//! The owner's side of a record.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::FlockOperation;

use crate::directory::{Directory, read_copy, temporary_name};
use crate::error::ControlError;
use crate::layout::{Control, RECORD_BYTES, Record, decode, encode};
use crate::mapping::Mapped;
use crate::metrics::{Beside, Metrics};
use crate::sizes::MAX_POOL_ROWS;
use crate::terms::{Asked, Outcome, Terms};
use crate::text::{check_name, check_text, file_name};
use crate::{ask, bell};

/// This process as others see it. Thread-safe; closed when dropped.
pub struct InstanceRecord {
    path: PathBuf,
    name: String,
    shared: Arc<Shared>,
    /// None once closed.
    open: Mutex<Option<Open>>,
}

/// Both files hold a lock.
struct Open {
    directory: Directory,
    file: File,
    sidecar: Beside,
}

/// What rows need after the record was closed.
pub(crate) struct Shared {
    mapped: Mapped<Record>,
    metrics: Metrics,
    name: String,
    inode: u64,
    owner_pid: u32,
    rows: Mutex<[Option<String>; MAX_POOL_ROWS]>,
}

/// One pool's figures in the record. Clones write the same row; it is given back when the last of them goes.
#[derive(Clone)]
pub struct PoolRow {
    row: Arc<OwnedRow>,
}

struct OwnedRow {
    shared: Arc<Shared>,
    index: usize,
}

impl InstanceRecord {
    /// Publishes this process as instance `name` in `dir`, which is created if missing. A record whose owner has died makes way.
    ///
    /// `engine` is its name and version (`vllm 0.29.0`), `device` where its KV cache lies (`cuda:0`).
    ///
    /// # Errors
    ///
    /// [`ControlError`]: a bad name or text, a name that a live instance holds, a directory that is not ours alone, a refusal of the system.
    pub fn create(
        dir: &Path,
        name: &str,
        engine: &str,
        device: &str,
        terms: Terms,
    ) -> Result<Self, ControlError> {
        check_name(name)?;
        terms.check()?;
        check_text("engine", engine)?;
        check_text("device", device)?;
        let directory = Directory::create(dir)?;
        let temporary = temporary_name();
        let path = directory.join(&file_name(name));
        let file = directory
            .create_locked(&temporary)
            .map_err(|error| ControlError::io("create", &directory.join(&temporary), error))?;
        let bytes = encode(name, engine, device, std::process::id(), now_unix_ns(), terms);
        let mapped = match fill_and_publish(&directory, &file, &temporary, &bytes, name) {
            Ok(mapped) => mapped,
            Err(error) => {
                // The first error is the one to tell; `list` removes what may be left.
                let _ = directory.remove_locked(&file, &temporary);
                return Err(error);
            }
        };
        // From here on the name is ours, and what fails leaves a file without an owner.
        let inode = file.metadata().map_err(|error| ControlError::io("look at", &path, error))?.ino();
        let (sidecar, metrics) = Beside::create(&directory, name, inode)?;
        let shared = Shared {
            mapped,
            metrics,
            name: name.to_owned(),
            inode,
            owner_pid: std::process::id(),
            rows: Mutex::default(),
        };
        Ok(Self {
            path,
            name: name.to_owned(),
            shared: Arc::new(shared),
            open: Mutex::new(Some(Open { directory, file, sidecar })),
        })
    }

    /// A row for a pool of this name, all figures zero.
    ///
    /// # Errors
    ///
    /// [`ControlError`]: a bad name, one that a living [`PoolRow`] has, no row left, the record is closed, or this is a forked child.
    pub fn pool_row(&self, name: &str) -> Result<PoolRow, ControlError> {
        check_text("pool name", name)?;
        if self.shared.is_foreign() {
            // Neither may it write what others read of its parent, nor wait for a lock that may be held for good.
            return Err(ControlError::Forked { path: self.path.clone(), owner: self.shared.owner_pid });
        }
        let open = lock(&self.open);
        if open.is_none() {
            return Err(ControlError::Closed { path: self.path.clone() });
        }
        let mut rows = lock(&self.shared.rows);
        if rows.iter().flatten().any(|taken| taken == name) {
            return Err(ControlError::PoolNameTaken { name: name.to_owned() });
        }
        let Some(index) = rows.iter().position(Option::is_none) else {
            return Err(ControlError::PoolRowsFull { name: name.to_owned() });
        };
        rows[index] = Some(name.to_owned());
        self.shared.mapped.record().rename_row(index, name);
        Ok(PoolRow { row: Arc::new(OwnedRow { shared: Arc::clone(&self.shared), index }) })
    }

    // ---------------------------------------------------------------- terms

    /// How much memory this instance may have. No lock, no system call.
    pub fn terms(&self) -> Terms {
        self.shared.terms()
    }

    /// A change that was asked of this instance and not answered.
    pub fn asked(&self) -> Option<Asked> {
        ask::asked(self.shared.control())
    }

    /// Answers a change: [`Outcome::Applied`], [`Outcome::Deferred`] (and again, once that has changed) or [`Outcome::Rejected`].
    /// All but the last put it in force.
    pub fn answer(&self, asked: &Asked, outcome: Outcome) {
        ask::answer(self.shared.control(), asked, outcome);
    }

    /// Shows others what this instance lacks, and how much of what it uses holds nothing but cached prefixes, bytes.
    pub fn publish_needs(&self, shortage_bytes: u64, cached_bytes: u64) {
        let control = self.shared.control();
        control.shortage_bytes.store(shortage_bytes, Ordering::Relaxed);
        control.cached_bytes.store(cached_bytes, Ordering::Relaxed);
    }

    // ---------------------------------------------------------------- the bell

    /// How often the bell of this instance was rung: for [`InstanceRecord::wait`].
    pub fn heard(&self) -> u32 {
        bell::heard(&self.shared.control().bell)
    }

    /// Waits until the bell was rung since `heard`, or for `timeout`; returns what [`InstanceRecord::heard`] does. May return for no
    /// reason.
    pub fn wait(&self, heard: u32, timeout: Option<Duration>) -> u32 {
        bell::wait(&self.shared.control().bell, heard, timeout)
    }

    /// Rings the own bell.
    pub fn ring(&self) {
        bell::ring(&self.shared.control().bell);
    }

    /// What this instance counts.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Name of the instance.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The record's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file; living [`PoolRow`]s stay usable and reach nobody. Idempotent. In a forked child nothing is removed.
    pub fn close(&self) {
        // In a child the lock may have been copied while another thread of the parent held it: never wait for it there.
        if self.shared.is_foreign() {
            if let Ok(mut open) = self.open.try_lock() {
                *open = None;
            }
            return;
        }
        let Some(Open { directory, file, sidecar }) = lock(&self.open).take() else { return };
        sidecar.remove(&directory); // first: afterwards the name may be another's
        // A failure leaves a file without an owner, which the next `list` or `create` removes.
        let _ = directory.remove_locked(&file, &file_name(&self.name));
        // Not left to the end of `file`: the mapping, and forked children, share the lock.
        let _ = rustix::fs::flock(&file, FlockOperation::Unlock);
    }
}

impl Drop for InstanceRecord {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    pub(crate) fn control(&self) -> &Control {
        &self.mapped.record().control
    }

    pub(crate) fn terms(&self) -> Terms {
        ask::in_force(self.control())
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn owner_pid(&self) -> u32 {
        self.owner_pid
    }

    /// Of its file: a later instance of this name has another.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// Whether this is a forked child of the owner.
    pub(crate) fn is_foreign(&self) -> bool {
        self.owner_pid != std::process::id()
    }
}

impl PoolRow {
    /// What the pool's instance counts.
    pub fn metrics(&self) -> &Metrics {
        &self.row.shared.metrics
    }

    /// Publishes the pool's figures, bytes. Atomic stores only: no system call, no lock.
    pub fn set(&self, used_bytes: u64, reserved_bytes: u64, virtual_bytes: u64, quarantined_bytes: u64) {
        let record = self.row.shared.mapped.record();
        let row = &record.pools[self.row.index];
        row.used_bytes.store(used_bytes, Ordering::Relaxed);
        row.reserved_bytes.store(reserved_bytes, Ordering::Relaxed);
        row.virtual_bytes.store(virtual_bytes, Ordering::Relaxed);
        row.quarantined_bytes.store(quarantined_bytes, Ordering::Relaxed);
        record.heartbeat.fetch_add(1, Ordering::Release);
    }
}

impl Drop for OwnedRow {
    fn drop(&mut self) {
        if self.shared.is_foreign() {
            return;
        }
        let mut rows = lock(&self.shared.rows);
        self.shared.mapped.record().rename_row(self.index, "");
        rows[self.index] = None;
    }
}

impl std::fmt::Debug for InstanceRecord {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("InstanceRecord").field("path", &self.path).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for PoolRow {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("PoolRow").field("index", &self.row.index).finish_non_exhaustive()
    }
}

/// The file is complete and locked before it has its name: a reader sees a whole record of a live owner, or none.
fn fill_and_publish(
    directory: &Directory,
    mut file: &File,
    temporary: &str,
    bytes: &[u8],
    name: &str,
) -> Result<Mapped<Record>, ControlError> {
    let failed = |doing| {
        let path = directory.join(temporary);
        move |error| ControlError::io(doing, &path, error)
    };
    file.write_all(bytes).map_err(failed("write"))?;
    let mapped = Mapped::new(file).map_err(failed("map"))?;
    let file_name = file_name(name);
    if directory.publish(temporary, &file_name)? {
        return Ok(mapped);
    }
    let path = directory.join(&file_name);
    let holder =
        directory.open_file(&file_name).ok().flatten().and_then(|file| read_copy(&file, RECORD_BYTES).ok());
    let pid = holder.and_then(|bytes| decode(&bytes, &path, 0).ok()).map(|view| view.pid);
    Err(ControlError::NameTaken { name: name.to_owned(), pid, path })
}

/// Before 1970 or after 2554 the time is wrong, not the record.
fn now_unix_ns() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX)
}

/// What these locks guard is whole after every statement, so that a panic elsewhere is no reason to stop.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Listed, list};

    #[test]
    fn a_forked_child_removes_nothing() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("records");
        let mut record = InstanceRecord::create(&dir, "parent", "e", "cpu", Terms::default()).unwrap();
        let row = record.pool_row("kv").unwrap();
        row.set(1, 2, 3, 4);
        let path = record.path().to_path_buf();
        drop(row);
        let child_sees = Shared {
            mapped: Mapped::new(&std::fs::File::options().read(true).write(true).open(&path).unwrap())
                .unwrap(),
            metrics: Metrics::default(),
            name: "parent".to_owned(),
            inode: 0,
            owner_pid: std::process::id() + 1,
            rows: Mutex::default(),
        };
        child_sees.mapped.record().rename_row(0, "kv");
        record.shared = Arc::new(child_sees);
        let held = lock(&record.open);
        let refused = record.pool_row("mine").err().unwrap();
        drop(held);
        assert!(matches!(refused, ControlError::Forked { owner, .. } if owner == std::process::id() + 1));
        drop(PoolRow { row: Arc::new(OwnedRow { shared: Arc::clone(&record.shared), index: 0 }) });
        // A real child shares the open file, and with it the lock.
        let shared_lock = lock(&record.open).as_ref().unwrap().file.try_clone().unwrap();
        record.close();
        record.close();
        drop(record);
        assert!(path.exists());
        assert!(matches!(&list(&dir).unwrap()[..], [Listed::Instance(view)] if view.pools.len() == 1));
        drop(shared_lock);
        assert!(list(&dir).unwrap().is_empty(), "the mapping of another opening of the file holds no lock");
    }
}
