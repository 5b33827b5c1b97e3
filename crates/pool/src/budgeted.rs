//! A mapper whose memory is charged to a share of the device: nothing is backed that the share does not allow.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use crate::beside::Beside;
use crate::fork::Owner;
use crate::mapper::{Cause, MapFailure, Mapper, UnmapFailure, Watcher};
use crate::shortage::{Lack, Shortage};

/// This process's part of the devices that its memory lies on. Bytes are those of one device.
pub trait Share: Send + Sync {
    /// Charges bytes that are about to be backed: all or none. The error says by whom it is refused.
    fn take(&self, bytes: u64) -> Result<(), Cause>;

    /// Charges bytes without asking: they are held already.
    fn charge(&self, bytes: u64);

    /// Gives back bytes that were charged.
    fn give(&self, bytes: u64);

    /// What [`Share::take`] would allow now.
    fn room(&self) -> u64;

    /// This is lacking to `waiter` since it was last refused; 0 bytes: it got what it wanted.
    fn short(&self, waiter: Waiter, lack: Lack);
}

/// Tells those apart that wait for memory of one [`Share`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Waiter(u64);

impl Waiter {
    /// One that no other is.
    pub(crate) fn next() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        Waiter(COUNT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A [`Mapper`] that charges a [`Share`] for what another one holds.
///
/// Charged are pages with memory, lost pages, which may have some, and what is held beside the pages. A page is charged before the
/// driver is called, and given back once it has lost its memory. What is still charged goes when the inner mapper does, unless that
/// has broken down: then nobody knows what is held.
pub struct Budgeted {
    // Dropped before `charge`, which sees by that whether its memory is gone.
    inner: Arc<dyn Mapper>,
    charge: Arc<Charge>,
}

/// What is charged for one mapper.
struct Charge {
    share: Arc<dyn Share>,
    waiter: Waiter,
    owner: Owner,
    page_bytes: u64,
    inner: Weak<dyn Mapper>,
    /// Calls under way that give memory back.
    unmapping: AtomicU32,
    account: Mutex<Account>,
}

struct Account {
    /// With memory, lost, or about to be backed.
    pages: BTreeSet<u32>,
    beside: Beside,
    shortage: Shortage,
    broken: bool,
}

impl Budgeted {
    /// Charges what `inner`, none of whose pages may be backed yet, holds already, and from now on what it gets.
    pub fn new(inner: Arc<dyn Mapper>, share: Arc<dyn Share>) -> Self {
        let beside = inner.held_beside();
        if beside > 0 {
            share.charge(beside);
        }
        let account = Account {
            pages: BTreeSet::new(),
            beside: Beside::at_start(beside),
            shortage: Shortage::default(),
            broken: false,
        };
        let charge = Arc::new(Charge {
            share,
            waiter: Waiter::next(),
            owner: Owner::this_process(),
            page_bytes: inner.page_bytes(),
            inner: Arc::downgrade(&inner),
            unmapping: AtomicU32::new(0),
            account: Mutex::new(account),
        });
        let watched = Arc::downgrade(&charge);
        inner.watch(Box::new(move |_| {
            if let Some(charge) = watched.upgrade() {
                charge.account().broken = true;
            }
        }));
        Budgeted { inner, charge }
    }

    /// Bytes charged now.
    pub fn charged(&self) -> u64 {
        self.charge.account().bytes(self.charge.page_bytes)
    }

    /// Backs pages; a refusal is a shortage where somebody `waits` for them.
    fn back(&self, pages: &[u32], waits: bool) -> Result<Vec<u32>, MapFailure> {
        let charge = &self.charge;
        let taken = charge.untaken(pages);
        let bytes = taken.len() as u64 * charge.page_bytes;
        if let Err(source) = self.take(bytes, waits) {
            charge.refused(bytes, waits, false);
            return Err(MapFailure::OutOfMemory { source });
        }
        charge.account().pages.extend(&taken);
        let outcome = if waits { self.inner.map(pages) } else { self.inner.map_ahead(pages) };
        match &outcome {
            Ok(_) => {
                charge.settle(&[]); // also pages that somebody else had backed before: this pool unmaps them
                charge.got(bytes);
            }
            Err(MapFailure::Quarantined { pages: lost, .. }) => charge.settle(&without(taken, &[lost])),
            Err(MapFailure::Broken { .. }) => charge.account().broken = true,
            Err(MapFailure::OutOfMemory { .. }) => {
                charge.settle(&taken);
                charge.refused(bytes, waits, true);
            }
            Err(MapFailure::Driver { .. }) => charge.settle(&taken),
        }
        outcome
    }

    /// Takes from the share. Memory kept for later pages is charged as well, and stands in nobody's way who waits.
    fn take(&self, bytes: u64, waits: bool) -> Result<(), Cause> {
        if bytes == 0 {
            return Ok(());
        }
        let share = &self.charge.share;
        match share.take(bytes) {
            Err(refusal) if waits && self.charge.account().beside.kept() > 0 => match self.trim() {
                Ok(_) => share.take(bytes),
                Err(_) => Err(refusal),
            },
            outcome => outcome,
        }
    }
}

impl Mapper for Budgeted {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        self.back(pages, true)
    }

    fn map_ahead(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        self.back(pages, false)
    }

    fn unmap(&self, pages: &[u32]) -> Result<(), UnmapFailure> {
        self.charge.unmapping.fetch_add(1, Ordering::SeqCst);
        let outcome = self.inner.unmap(pages);
        match &outcome {
            Ok(()) => self.charge.settle(pages),
            Err(UnmapFailure { broken: true, .. }) => self.charge.account().broken = true,
            Err(UnmapFailure { quarantined, still_mapped, .. }) => {
                let pages = pages.iter().copied().collect();
                self.charge.settle(&without(pages, &[quarantined, still_mapped]));
            }
        }
        self.charge.unmapping.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    fn synchronise(&self) -> Result<(), Cause> {
        self.inner.synchronise()
    }

    fn room(&self) -> Result<u64, Cause> {
        Ok(self.inner.room()?.min(self.charge.share.room()))
    }

    fn device_room(&self) -> Result<u64, Cause> {
        self.inner.device_room()
    }

    fn held_beside(&self) -> u64 {
        self.inner.held_beside()
    }

    fn trim(&self) -> Result<u64, Cause> {
        let trimmed = self.inner.trim();
        self.charge.record(&[], Beside::trimmed);
        trimmed
    }

    fn page_bytes(&self) -> u64 {
        self.charge.page_bytes
    }

    fn virtual_bytes(&self) -> u64 {
        self.inner.virtual_bytes()
    }

    fn lacks(&self, bytes: u64) {
        let (now, mut account) = (Instant::now(), self.charge.account());
        account.shortage.wants(bytes, now);
        self.charge.share.short(self.charge.waiter, account.shortage.lack(now));
    }

    fn is_over_ranks(&self) -> bool {
        self.inner.is_over_ranks()
    }

    fn watch(&self, watcher: Watcher) {
        self.inner.watch(watcher);
    }
}

impl Charge {
    /// Of these pages, each once, those that are not charged.
    fn untaken(&self, pages: &[u32]) -> BTreeSet<u32> {
        let account = self.account();
        pages.iter().copied().filter(|page| !account.pages.contains(page)).collect()
    }

    /// A driver call has ended, and these pages have no memory.
    fn settle<'a>(&self, gone: impl IntoIterator<Item = &'a u32>) {
        self.record(gone, Beside::note);
    }

    /// [`Charge::settle`], with what the inner mapper holds told by `beside`. One step, so that memory which goes from a page to
    /// those kept is nobody else's in between. The lock is held while the share is told: it is told in order.
    fn record<'a>(&self, gone: impl IntoIterator<Item = &'a u32>, beside: fn(&mut Beside, u64)) {
        let Some(inner) = self.inner.upgrade() else { return };
        let mut account = self.account();
        let before = account.bytes(self.page_bytes);
        for page in gone {
            account.pages.remove(page);
        }
        beside(&mut account.beside, inner.held_beside());
        let after = account.bytes(self.page_bytes);
        if after > before {
            self.share.charge(after - before);
        } else if after < before {
            self.share.give(before - after);
        }
    }

    /// Who waits is told to lack memory; not while some is on its way back, after which it is asked for again.
    fn refused(&self, bytes: u64, waits: bool, by_device: bool) {
        if waits && self.unmapping.load(Ordering::SeqCst) == 0 {
            let now = Instant::now();
            let mut account = self.account();
            account.shortage.refused(bytes, by_device, now);
            self.share.short(self.waiter, account.shortage.lack(now));
        }
    }

    fn got(&self, bytes: u64) {
        let mut account = self.account();
        if account.shortage.got(bytes) {
            self.share.short(self.waiter, account.shortage.lack(Instant::now()));
        }
    }

    /// Whole after every statement that changes it, so that a panic elsewhere is no reason to stop.
    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Account {
    fn bytes(&self, page_bytes: u64) -> u64 {
        self.pages.len() as u64 * page_bytes + self.beside.bytes()
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.owner.is_other() {
            return; // a fork has none of the memory, and what is charged is its parent's
        }
        self.share.short(self.waiter, Lack::default());
        let (gone, account) = (self.inner.strong_count() == 0, self.account());
        let left = account.bytes(self.page_bytes);
        if gone && !account.broken && left > 0 {
            self.share.give(left);
        }
    }
}

/// `pages` but for those in any of the lists.
fn without(mut pages: BTreeSet<u32>, lists: &[&[u32]]) -> BTreeSet<u32> {
    lists.iter().copied().flatten().for_each(|page| {
        pages.remove(page);
    });
    pages
}
