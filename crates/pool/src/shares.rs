//! What this process may have of the devices that its memory lies on, as every instance of this user counts it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvcached_control::{BudgetShare, ControlError, InstanceRecord, Timer};

use crate::budgeted::{Share, Waiter};
use crate::mapper::Cause;
use crate::shortage::{FORGOTTEN, Lack};

/// A shortage that has not changed is told again after that long, well before the others forget it.
const RENEWED: Duration = Duration::from_millis(200);

/// The shares of one engine, one for each device that has a rank of it. What one rank holds is charged on every device: on all of
/// them or on none.
pub struct Shares {
    record: Arc<InstanceRecord>,
    devices: Vec<BudgetShare>,
    shortages: Mutex<Shortages>,
    /// The steward sleeps until it is rung: it does not look by itself.
    asleep: AtomicBool,
    /// The least room that there was when somebody was refused, since the steward last looked.
    room_before: AtomicU64,
}

/// What could be taken, then and now.
pub(crate) struct Room {
    pub before: u64,
    pub now: u64,
}

#[derive(Default)]
struct Shortages {
    of: BTreeMap<Waiter, Waiting>,
    /// Bytes, and how many of them the device refused.
    told: Option<((u64, u64), Instant)>,
}

/// One that waits.
struct Waiting {
    lack: Lack,
    since: Instant,
    renewed: Instant,
}

impl Shares {
    /// Of the instance whose record this is.
    pub fn new(record: Arc<InstanceRecord>, devices: Vec<BudgetShare>) -> Self {
        Shares {
            record,
            devices,
            shortages: Mutex::default(),
            asleep: AtomicBool::new(false),
            room_before: AtomicU64::new(0),
        }
    }

    /// Bytes charged now, of the device that has most of them.
    pub fn granted(&self) -> u64 {
        self.devices.iter().map(BudgetShare::granted).max().unwrap_or(0)
    }

    /// Bytes that this process waits for. Forgets who waits no more, and tells the others.
    pub fn short_bytes(&self) -> u64 {
        self.tell(&mut self.shortages())
    }

    /// Whether another instance waits for memory of one of the devices.
    pub(crate) fn others_short(&self) -> bool {
        self.devices.iter().any(BudgetShare::others_short)
    }

    /// What is to be given back to the others: it goes on all devices at once.
    pub(crate) fn part(&self) -> u64 {
        self.devices.iter().map(BudgetShare::part).max().unwrap_or(0)
    }

    /// Tells the others what could be given back.
    pub(crate) fn offer(&self, bytes: u64) {
        self.devices.iter().for_each(|device| device.offer(bytes));
    }

    /// Has this much guaranteed on every device, or on none of them anything else than before.
    pub(crate) fn set_min(&self, bytes: u64) -> Result<(), ControlError> {
        let before = self.record.terms().min_bytes;
        for (place, device) in self.devices.iter().enumerate() {
            if let Err(error) = device.set_min(bytes) {
                // What was guaranteed a moment ago mostly is to be had again; else it is less, and the record says so.
                let undone = self.devices[..place].iter().try_for_each(|device| device.set_min(before));
                if let Err(error) = undone {
                    tracing::warn!(%error, "a guaranteed minimum could not be put back");
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// The room there is, and the one that there was.
    pub(crate) fn look_at_room(&self) -> Room {
        let now = self.room();
        Room { before: self.room_before.swap(now, Ordering::SeqCst), now }
    }

    /// From now on the bell is rung when there is something to watch.
    pub(crate) fn fall_asleep(&self) {
        self.asleep.store(true, Ordering::SeqCst);
    }

    /// From now on it need not be.
    pub(crate) fn stay_awake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// There is something to watch: wakes the steward, unless it looks by itself.
    fn rouse(&self) {
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            self.record.ring();
        }
    }

    /// Tells what is lacking now, where that is news or would be forgotten, and returns it.
    fn tell(&self, shortages: &mut Shortages) -> u64 {
        let now = Instant::now();
        let live = |at: Instant| now.saturating_duration_since(at) < FORGOTTEN;
        shortages.of.retain(|_, waiting| live(waiting.renewed));
        let sum = |of: &dyn Fn(&Lack) -> bool| -> u64 {
            shortages.of.values().map(|waiting| waiting.lack).filter(of).map(|lack| lack.bytes).sum()
        };
        // Nobody can help with what the limit refuses.
        let limit = self.record.terms().limit_bytes.unwrap_or(u64::MAX);
        let bytes = sum(&|_| true).min(limit.saturating_sub(self.granted()));
        let by_device = sum(&|lack| lack.by_device).min(bytes);
        let (told, at) = shortages.told.unzip();
        let due = bytes > 0 && at.is_none_or(|at| now.saturating_duration_since(at) >= RENEWED);
        if told.unwrap_or_default() != (bytes, by_device) || due {
            shortages.told = Some(((bytes, by_device), now));
            self.devices.iter().for_each(|device| device.wait_for(bytes, by_device));
        }
        bytes
    }

    fn shortages(&self) -> MutexGuard<'_, Shortages> {
        self.shortages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Share for Shares {
    fn take(&self, bytes: u64) -> Result<(), Cause> {
        for (place, device) in self.devices.iter().enumerate() {
            if let Err(refused) = device.take(bytes) {
                self.devices[..place].iter().for_each(|device| device.give(bytes));
                return Err(refused.into());
            }
        }
        self.rouse();
        Ok(())
    }

    fn charge(&self, bytes: u64) {
        self.devices.iter().for_each(|device| device.charge(bytes));
        self.rouse();
    }

    fn give(&self, bytes: u64) {
        self.devices.iter().for_each(|device| device.give(bytes));
    }

    fn room(&self) -> u64 {
        self.devices.iter().map(BudgetShare::room).min().unwrap_or(u64::MAX)
    }

    fn short(&self, waiter: Waiter, lack: Lack) {
        let (now, mut shortages) = (Instant::now(), self.shortages());
        let since = shortages.of.get(&waiter).map(|waiting| waiting.since);
        if lack.bytes > 0 {
            let since = since.unwrap_or(now);
            shortages.of.insert(waiter, Waiting { lack, since, renewed: now });
        } else if let Some(since) = since {
            shortages.of.remove(&waiter);
            self.record.metrics().time(Timer::Shortage, now.saturating_duration_since(since));
        }
        self.tell(&mut shortages);
        drop(shortages);
        if lack.bytes > 0 {
            self.room_before.fetch_min(self.room(), Ordering::SeqCst);
            self.rouse();
        }
    }
}

impl std::fmt::Debug for Shares {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Shares").field("devices", &self.devices.len()).finish_non_exhaustive()
    }
}
