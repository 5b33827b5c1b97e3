//! Counts that anybody may read at any time: no lock, no system call.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Blocks, and bytes, as they were when the ledger was last let go. Each is right by itself; two of them may be of different moments.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub available: AtomicU32,
    pub promised: AtomicU32,
    pub backed: AtomicU32,
    pub held: AtomicU32,
    /// Bytes that could be given back.
    pub idle: AtomicU64,
    /// Bytes of pages without blocks that queued work or a driver call keeps.
    pub leaving: AtomicU64,
    /// The pool is shut down or broken: the counts mean nothing.
    closed: AtomicBool,
}

impl Counts {
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

/// Reads a count of [`Counts`].
pub(crate) fn read(count: &AtomicU32) -> u32 {
    count.load(Ordering::Acquire)
}

/// Tells a count of [`Counts`]. Only under the lock.
pub(crate) fn tell(count: &AtomicU32, value: u32) {
    if count.load(Ordering::Relaxed) != value {
        count.store(value, Ordering::Release);
    }
}

/// [`tell`], of bytes.
pub(crate) fn tell_bytes(count: &AtomicU64, value: u64) {
    if count.load(Ordering::Relaxed) != value {
        count.store(value, Ordering::Release);
    }
}
