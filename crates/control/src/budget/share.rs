//! One instance's part of a device's budget.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::admission::{Member, part, room};
use super::file::{close_gate, file_name, open, open_gate};
use super::layout::{BudgetRecord, Slot};
use crate::bell;
use crate::directory::{Directory, has_owner, read_copy};
use crate::error::ControlError;
use crate::layout::{RECORD_BYTES, check_header};
use crate::mapping::Mapped;
use crate::record::{InstanceRecord, Shared};
use crate::text::{check_name, file_name as record_name};

/// Who waits and asks many times a second does not ring as often.
const RING_PAUSE: Duration = Duration::from_millis(20);

/// What an instance has of one device. Thread-safe; given back when dropped, and with it the budget's file where it was the last.
///
/// In a fork of the process it refuses, and dropping it does nothing.
pub struct BudgetShare {
    device: String,
    directory: Directory,
    instance: Arc<Shared>,
    record: Mapped<BudgetRecord>,
    slot: usize,
    /// Of a descriptor of our own: the gate is the file's lock.
    gate: Mutex<File>,
    rang_ns: AtomicU64,
}

/// Memory that is not to be had now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted_bytes} bytes more are refused by {by}: {room_bytes} can be had")]
pub struct Refused {
    /// What was asked for.
    pub wanted_bytes: u64,
    /// What could be had.
    pub room_bytes: u64,
    /// What is in the way.
    pub by: RefusedBy,
}

/// What is in the way of more memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusedBy {
    /// The instance's own limit.
    #[error("the limit of this instance")]
    Limit,
    /// What others hold.
    #[error("the device's budget, which others hold")]
    Budget,
    /// What is guaranteed to others, or given back for them.
    #[error("what is guaranteed to other instances or given back for them")]
    Guarantees,
    /// The gate did not open in a second.
    #[error("a process that was stopped while it held the budget's lock")]
    Busy,
    /// This is a fork of the instance's process.
    #[error("being a fork of the process that has the memory")]
    Forked,
}

impl BudgetShare {
    /// Takes part in the budget of `device`, which has `total_bytes`.
    ///
    /// `device`: the same for all who share it, by its hardware ("GPU-<uuid>", "host"). `budget_bytes`: what all may have together;
    /// `None`: what stands, or all that the device has.
    ///
    /// # Errors
    ///
    /// [`ControlError`]: a name that cannot be a file's, another budget by which others live, a minimum that does not fit beside theirs,
    /// no slot left, a record that cannot be read.
    pub fn join(
        dir: &Path,
        record: &InstanceRecord,
        device: &str,
        total_bytes: u64,
        budget_bytes: Option<u64>,
    ) -> Result<Self, ControlError> {
        check_name(device)?;
        let instance = Arc::clone(record.shared());
        if instance.is_foreign() {
            return Err(ControlError::Forked {
                path: record.path().to_path_buf(),
                owner: instance.owner_pid(),
            });
        }
        let directory = Directory::create(dir)?;
        let (file, mapped) = open(&directory, device, budget_bytes.unwrap_or(total_bytes), instance.name())?;
        let budget = mapped.record();
        let slots = &budget.slots;
        let gate = Gate { file: &file };
        for slot in slots.iter().filter(|slot| slot.is_taken()) {
            if !lives(&directory, slot) {
                slot.free();
            }
        }
        let stands = budget.budget_bytes.load(Ordering::Relaxed);
        let alone = !slots.iter().any(Slot::is_taken);
        match budget_bytes {
            Some(asked_bytes) if alone => budget.budget_bytes.store(asked_bytes, Ordering::Relaxed),
            None if alone => budget.budget_bytes.store(total_bytes, Ordering::Relaxed),
            Some(asked_bytes) if asked_bytes != stands => {
                let device = device.to_owned();
                return Err(ControlError::BudgetDisagrees { device, stands_bytes: stands, asked_bytes });
            }
            _ => {}
        }
        let min_bytes = instance.terms().min_bytes;
        check_min(budget, None, min_bytes, device)?;
        let Some(slot) = slots.iter().position(|slot| !slot.is_taken()) else {
            return Err(ControlError::BudgetFull { device: device.to_owned() });
        };
        slots[slot].take(instance.name(), instance.inode(), min_bytes);
        drop(gate);
        Ok(Self {
            device: device.to_owned(),
            directory,
            instance,
            record: mapped,
            slot,
            gate: Mutex::new(file),
            rang_ns: AtomicU64::new(0),
        })
    }

    /// The device that is shared.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// What all instances may have of it together, bytes.
    pub fn budget_bytes(&self) -> u64 {
        self.record.record().budget_bytes.load(Ordering::Relaxed)
    }

    /// Charges bytes that are about to be taken from the device: all or none, against every other process.
    ///
    /// # Errors
    ///
    /// [`Refused`]: the instance's limit, what others hold, what is guaranteed to them.
    pub fn take(&self, bytes: u64) -> Result<(), Refused> {
        let refused = |by, room_bytes| Refused { wanted_bytes: bytes, room_bytes, by };
        if self.instance.is_foreign() {
            return Err(refused(RefusedBy::Forked, 0));
        }
        let file = self.lock();
        if !close_gate(&file).unwrap_or(false) {
            return Err(refused(RefusedBy::Busy, 0));
        }
        let _gate = Gate { file: &file };
        let mut verdict = self.verdict(bytes);
        if verdict.is_err() && self.sweep() {
            verdict = self.verdict(bytes);
        }
        verdict.map_err(|(by, room_bytes)| refused(by, room_bytes))?;
        self.own().granted_bytes.fetch_add(bytes, Ordering::AcqRel);
        Ok(())
    }

    /// Charges bytes without asking: they are held already.
    pub fn charge(&self, bytes: u64) {
        if !self.instance.is_foreign() {
            self.own().granted_bytes.fetch_add(bytes, Ordering::AcqRel);
        }
    }

    /// Gives charged bytes back, and rings for those that wait for memory.
    pub fn give(&self, bytes: u64) {
        if self.instance.is_foreign() || bytes == 0 {
            return;
        }
        let less = |granted: u64| Some(granted.saturating_sub(bytes));
        let _ = self.own().granted_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        let now = now_ns();
        self.ring_where(|slot| slot.shortage(now).0 > 0);
    }

    /// What [`BudgetShare::take`] would admit now, bytes, if all others live. No lock, no system call.
    pub fn room(&self) -> u64 {
        let (own, others) = self.members(now_ns());
        let limit = self.instance.terms().limit_bytes.unwrap_or(u64::MAX);
        room(&own, &others, self.budget_bytes()).bytes.min(limit.saturating_sub(own.granted))
    }

    /// Charged to this instance now, bytes.
    pub fn granted(&self) -> u64 {
        self.own().granted_bytes.load(Ordering::Acquire)
    }

    /// Guarantees so many bytes to this instance.
    ///
    /// # Errors
    ///
    /// [`ControlError::MinimumsDoNotFit`] beside those of the others; [`ControlError::Busy`].
    pub fn set_min(&self, min_bytes: u64) -> Result<(), ControlError> {
        let path = || self.path();
        let file = self.lock();
        if !close_gate(&file).map_err(|error| ControlError::io("lock", &path(), error))? {
            return Err(ControlError::Busy { path: path() });
        }
        let _gate = Gate { file: &file };
        let check = || check_min(self.record.record(), Some(self.slot), min_bytes, &self.device);
        if check().is_err() {
            self.sweep();
        }
        check()?;
        self.own().min_bytes.store(min_bytes, Ordering::Release);
        Ok(())
    }

    /// This instance waits for so many bytes, which it was refused; 0: no longer. To be said again within a second. Rings for those
    /// that have something to give back.
    ///
    /// `by_device_bytes`: of these, what the device itself refused: what is free in the budget does not help.
    pub fn wait_for(&self, shortage_bytes: u64, by_device_bytes: u64) {
        if self.instance.is_foreign() {
            return;
        }
        let now = now_ns();
        let before = self.own().shortage(now).0;
        if shortage_bytes == 0 {
            if before > 0 {
                self.own().set_shortage(0, 0, now);
                // What was kept for this instance may be others' now.
                self.ring_where(|slot| slot.shortage(now).0 > 0);
            }
            return;
        }
        if by_device_bytes > 0 {
            self.sweep_gated(); // what the dead could give back would be asked of nobody
        }
        self.own().set_shortage(shortage_bytes, by_device_bytes, now);
        let pause = u64::try_from(RING_PAUSE.as_nanos()).unwrap_or(u64::MAX);
        let rang = self.rang_ns.load(Ordering::Relaxed);
        if shortage_bytes > before || now.saturating_sub(rang) >= pause {
            self.rang_ns.store(now, Ordering::Relaxed);
            self.ring_where(|slot| {
                let member = slot.member(now);
                member.givable > 0 && member.granted > member.min
            });
        }
    }

    /// What this instance could give back if others were short, bytes.
    pub fn offer(&self, givable_bytes: u64) {
        if !self.instance.is_foreign() {
            self.own().givable_bytes.store(givable_bytes, Ordering::Relaxed);
        }
    }

    /// What this instance is to give back now, bytes: its part, by what each could spare, of what others are short of and the budget
    /// does not have.
    pub fn part(&self) -> u64 {
        let now = now_ns();
        let (own, others) = self.members(now);
        if others.iter().all(|other| other.shortage == 0) {
            return 0;
        }
        part(&own, &others, self.budget_bytes(), self.refused_by_device(now))
    }

    /// Whether others wait for memory of this device.
    pub fn others_short(&self) -> bool {
        let now = now_ns();
        self.strangers().any(|slot| slot.shortage(now).0 > 0)
    }

    // ---------------------------------------------------------------- inside

    fn own(&self) -> &Slot {
        &self.record.record().slots[self.slot]
    }

    fn others(&self) -> impl Iterator<Item = &Slot> {
        let slots = self.record.record().slots.iter().enumerate();
        slots.filter(|(index, slot)| *index != self.slot && slot.is_taken()).map(|(_, slot)| slot)
    }

    /// Those of other instances. Several ranks on one device have a slot each: what they hold counts like anybody's, but an instance does
    /// not wait for itself.
    fn strangers(&self) -> impl Iterator<Item = &Slot> {
        self.others().filter(|slot| !slot.is_of(self.instance.inode()))
    }

    fn members(&self, now: u64) -> (Member, Vec<Member>) {
        let member = |slot: &Slot| match slot.is_of(self.instance.inode()) {
            true => Member { shortage: 0, ..slot.member(now) },
            false => slot.member(now),
        };
        (self.own().member(now), self.others().map(member).collect())
    }

    fn refused_by_device(&self, now: u64) -> u64 {
        self.strangers().fold(0, |sum, slot| sum.saturating_add(slot.shortage(now).1))
    }

    /// What is in the way of so many bytes, and what could be had. Under the gate.
    fn verdict(&self, bytes: u64) -> Result<(), (RefusedBy, u64)> {
        let (own, others) = self.members(now_ns());
        let limit = self.instance.terms().limit_bytes.unwrap_or(u64::MAX);
        let (by_limit, found) = (limit.saturating_sub(own.granted), room(&own, &others, self.budget_bytes()));
        let room_bytes = by_limit.min(found.bytes);
        match () {
            () if bytes <= room_bytes => Ok(()),
            () if bytes > by_limit => Err((RefusedBy::Limit, room_bytes)),
            () if bytes > found.without_claims => Err((RefusedBy::Budget, room_bytes)),
            () => Err((RefusedBy::Guarantees, room_bytes)),
        }
    }

    /// Frees the slots of those that are dead; whether there were any. Under the gate.
    fn sweep(&self) -> bool {
        let dead: Vec<&Slot> = self.others().filter(|slot| !lives(&self.directory, slot)).collect();
        dead.iter().for_each(|slot| slot.free());
        !dead.is_empty()
    }

    /// [`BudgetShare::sweep`], where the gate opens.
    fn sweep_gated(&self) {
        let file = self.lock();
        if close_gate(&file).unwrap_or(false) {
            let _gate = Gate { file: &file };
            self.sweep();
        }
    }

    fn ring_where(&self, wanted: impl Fn(&Slot) -> bool) {
        for slot in self.strangers().filter(|slot| wanted(slot)) {
            ring(&self.directory, slot);
        }
    }

    fn path(&self) -> PathBuf {
        self.directory.join(&file_name(&self.device))
    }

    /// Nothing under it can be left half done.
    fn lock(&self) -> MutexGuard<'_, File> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        if self.instance.is_foreign() {
            return;
        }
        let now = now_ns();
        let file = self.lock();
        // Where the gate stays closed the slot is free all the same: its owner's end frees it, and this store is one word.
        let closed = close_gate(&file).unwrap_or(false);
        self.own().free();
        if !closed {
            return;
        }
        let gate = Gate { file: &file };
        if self.record.record().slots.iter().any(Slot::is_taken) {
            drop(gate);
            self.ring_where(|slot| slot.shortage(now).0 > 0);
        } else {
            // A failure leaves a file of no instance, which the next one takes over.
            let _ = self.directory.remove_locked(&file, &file_name(&self.device));
        }
    }
}

impl std::fmt::Debug for BudgetShare {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("BudgetShare").field("device", &self.device).field("slot", &self.slot).finish()
    }
}

/// Opened when dropped.
struct Gate<'a> {
    file: &'a File,
}

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        open_gate(self.file);
    }
}

/// Whether all minimums fit the budget if `except` had this one.
fn check_min(
    budget: &BudgetRecord,
    except: Option<usize>,
    min_bytes: u64,
    device: &str,
) -> Result<(), ControlError> {
    let others =
        budget.slots.iter().enumerate().filter(|(index, slot)| Some(*index) != except && slot.is_taken());
    let others_bytes =
        others.fold(0u64, |sum, (_, slot)| sum.saturating_add(slot.min_bytes.load(Ordering::Acquire)));
    let budget_bytes = budget.budget_bytes.load(Ordering::Relaxed);
    if min_bytes == 0 || others_bytes.saturating_add(min_bytes) <= budget_bytes {
        return Ok(());
    }
    Err(ControlError::MinimumsDoNotFit { device: device.to_owned(), min_bytes, others_bytes, budget_bytes })
}

/// Whether the instance of a slot has an owner. One that cannot be looked at counts as alive: its memory may be held.
pub(super) fn lives(directory: &Directory, slot: &Slot) -> bool {
    let (name, inode) = slot.owner();
    match directory.open_file(&record_name(&name)) {
        Ok(None) => false,
        Ok(Some(file)) => match file.metadata() {
            Ok(found) if std::os::unix::fs::MetadataExt::ino(&found) != inode => false,
            Ok(_) => has_owner(&file).unwrap_or(true),
            Err(_) => true,
        },
        Err(_) => true,
    }
}

/// Rings the bell of a slot's instance. One that is gone hears nothing.
fn ring(directory: &Directory, slot: &Slot) {
    let (name, inode) = slot.owner();
    let Ok(Some(file)) = directory.open_file_to_write(&record_name(&name)) else { return };
    let same = file.metadata().is_ok_and(|found| std::os::unix::fs::MetadataExt::ino(&found) == inode);
    let whole = read_copy(&file, RECORD_BYTES).is_ok_and(|bytes| check_header(&bytes).is_ok());
    if same
        && whole
        && let Ok(record) = Mapped::<crate::layout::Record>::new(&file)
    {
        bell::ring(&record.record().control.bell);
    }
}

pub(super) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}
