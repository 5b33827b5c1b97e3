//! The bytes of a budget record, as those of an instance record (`crate::layout`): fixed offsets, one version, whole 64-bit words.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::RecordError;
use crate::sizes::MAX_TEXT_BYTES;
use crate::text::check_name;
use crate::words::{Header, TEXT_WORDS, WORD, get_text, get_word, put_text, put_word};

use super::admission::Member;

/// Version of the layout that this crate writes and reads.
pub(crate) const BUDGET_VERSION: u64 = 2;
/// Instances that may share a device.
pub(crate) const SLOTS: usize = 64;
/// Size of a budget record, bytes.
pub(crate) const BUDGET_BYTES: usize = size_of::<BudgetRecord>();
/// A shortage counts for so long after it was last renewed, nanoseconds.
pub(super) const SHORTAGE_NS: u64 = 1_000_000_000;

const HEADER: Header = Header {
    what: "budget",
    magic: *b"kvbudget",
    version: BUDGET_VERSION,
    bytes: BUDGET_BYTES,
    advice: "engines that share a device use one version of kvcached: end the others",
};

#[repr(C)]
pub(crate) struct BudgetRecord {
    magic: AtomicU64,
    version: AtomicU64,
    total_bytes: AtomicU64,
    /// What all instances may have together.
    pub(super) budget_bytes: AtomicU64,
    device: [AtomicU64; TEXT_WORDS],
    spare: [AtomicU64; 4],
    pub(super) slots: [Slot; SLOTS],
}

/// One instance. Free where `taken` is 0, which is written last when it is taken and first when it is freed.
#[repr(C)]
pub(super) struct Slot {
    pub taken: AtomicU64,
    /// Of the instance's record.
    inode: AtomicU64,
    name: [AtomicU64; TEXT_WORDS],
    pub min_bytes: AtomicU64,
    pub granted_bytes: AtomicU64,
    shortage_bytes: AtomicU64,
    /// When that was last renewed, CLOCK_MONOTONIC.
    shortage_ns: AtomicU64,
    /// Of the shortage, what the device itself refused.
    by_device_bytes: AtomicU64,
    pub givable_bytes: AtomicU64,
    /// Since when it has waited without getting anything.
    waits_since_ns: AtomicU64,
    spare: [AtomicU64; 7],
}

const _: () = assert!(BUDGET_BYTES == 128 + SLOTS * 192 && size_of::<Slot>() == 192);
const _: () = assert!(offset_of!(BudgetRecord, device) == 32 && offset_of!(BudgetRecord, slots) == 128);
const _: () = assert!(offset_of!(Slot, name) == 16 && offset_of!(Slot, waits_since_ns) == 128);

impl Slot {
    pub fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Acquire) != 0
    }

    /// Under the gate.
    pub fn take(&self, name: &str, inode: u64, min_bytes: u64) {
        for word in [
            &self.granted_bytes,
            &self.shortage_bytes,
            &self.shortage_ns,
            &self.by_device_bytes,
            &self.givable_bytes,
            &self.waits_since_ns,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        self.min_bytes.store(min_bytes, Ordering::Relaxed);
        self.inode.store(inode, Ordering::Relaxed);
        let mut padded = [0; MAX_TEXT_BYTES];
        put_text(&mut padded, 0, name);
        for (word, offset) in self.name.iter().zip((0..).step_by(WORD)) {
            word.store(get_word(&padded, offset), Ordering::Relaxed);
        }
        self.taken.store(1, Ordering::Release);
    }

    /// Under the gate.
    pub fn free(&self) {
        self.taken.store(0, Ordering::Release);
        self.granted_bytes.store(0, Ordering::Relaxed);
    }

    /// Name of the instance and the inode of its record.
    pub fn owner(&self) -> (String, u64) {
        let mut padded = [0; MAX_TEXT_BYTES];
        for (word, offset) in self.name.iter().zip((0..).step_by(WORD)) {
            put_word(&mut padded, offset, word.load(Ordering::Relaxed));
        }
        // A name that is none of ours would lead to a file elsewhere.
        let name = get_text(&padded, 0, "instance name").ok().filter(|name| check_name(name).is_ok());
        let name = name.unwrap_or_default();
        (name, self.inode.load(Ordering::Relaxed))
    }

    /// Whether it is another one of the instance whose record has this inode: of a rank on the same device.
    pub fn is_of(&self, inode: u64) -> bool {
        self.inode.load(Ordering::Relaxed) == inode
    }

    pub fn set_shortage(&self, bytes: u64, by_device_bytes: u64, now_ns: u64) {
        let before = self.shortage(now_ns).0;
        if before == 0 || bytes < before {
            self.waits_since_ns.store(now_ns, Ordering::Relaxed);
        }
        self.shortage_bytes.store(bytes, Ordering::Relaxed);
        self.by_device_bytes.store(by_device_bytes, Ordering::Relaxed);
        self.shortage_ns.store(now_ns, Ordering::Release);
    }

    /// What is waited for at this time, and how much of it the device itself refused.
    pub fn shortage(&self, now_ns: u64) -> (u64, u64) {
        let renewed = self.shortage_ns.load(Ordering::Acquire);
        if now_ns.saturating_sub(renewed) >= SHORTAGE_NS {
            return (0, 0);
        }
        let bytes = self.shortage_bytes.load(Ordering::Relaxed);
        (bytes, self.by_device_bytes.load(Ordering::Relaxed).min(bytes))
    }

    pub fn member(&self, now_ns: u64) -> Member {
        Member {
            granted: self.granted_bytes.load(Ordering::Acquire),
            min: self.min_bytes.load(Ordering::Acquire),
            shortage: self.shortage(now_ns).0,
            since: self.waits_since_ns.load(Ordering::Relaxed),
            givable: self.givable_bytes.load(Ordering::Relaxed),
        }
    }
}

/// The bytes of a new record without instances.
pub(super) fn encode(device: &str, budget_bytes: u64) -> Vec<u8> {
    let mut bytes = HEADER.file();
    put_word(&mut bytes, offset_of!(BudgetRecord, budget_bytes), budget_bytes);
    put_text(&mut bytes, offset_of!(BudgetRecord, device), device);
    bytes
}

/// Whether these are a budget record of this version, whatever its numbers are.
pub(super) fn check(bytes: &[u8], device: &str) -> Result<(), RecordError> {
    HEADER.check(bytes)?;
    match get_text(bytes, offset_of!(BudgetRecord, device), "device")? {
        found if found == device => Ok(()),
        found => Err(RecordError::NameMismatch { found }),
    }
}
