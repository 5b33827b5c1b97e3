//! A share of a device of so many bytes, which other shares may have parts of.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use kvcached_pool::{Cause, Lack, Share, Waiter};

/// Bytes of a device that all shares have together.
#[derive(Default)]
pub struct Budget {
    pub budget_bytes: u64,
    pub granted_bytes: u64,
    /// The most that was granted by `take`, ever.
    pub most_bytes: u64,
}

/// One engine's share.
pub struct Part {
    budget: Arc<Mutex<Budget>>,
    name: &'static str,
    inner: Mutex<Inner>,
}

#[derive(Default)]
pub struct Inner {
    pub granted_bytes: u64,
    pub refusals: u32,
    pub short: BTreeMap<Waiter, u64>,
}

impl Part {
    pub fn of(budget: &Arc<Mutex<Budget>>, name: &'static str) -> Arc<Self> {
        Arc::new(Part { budget: budget.clone(), name, inner: Mutex::default() })
    }

    pub fn alone(budget_bytes: u64) -> Arc<Self> {
        Part::of(&budget(budget_bytes), "alone")
    }

    pub fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    pub fn granted(&self) -> u64 {
        self.inner().granted_bytes
    }

    pub fn set_budget(&self, bytes: u64) {
        self.budget.lock().unwrap().budget_bytes = bytes;
    }

    /// What is lacking to all who wait.
    pub fn lacking(&self) -> u64 {
        self.inner().short.values().sum()
    }
}

pub fn budget(budget_bytes: u64) -> Arc<Mutex<Budget>> {
    Arc::new(Mutex::new(Budget { budget_bytes, ..Budget::default() }))
}

impl Share for Part {
    fn take(&self, bytes: u64) -> Result<(), Cause> {
        let mut budget = self.budget.lock().unwrap();
        if budget.granted_bytes + bytes > budget.budget_bytes {
            self.inner().refusals += 1;
            return Err(format!("the budget of {} refuses {bytes} bytes", self.name).into());
        }
        budget.granted_bytes += bytes;
        budget.most_bytes = budget.most_bytes.max(budget.granted_bytes);
        self.inner().granted_bytes += bytes;
        Ok(())
    }

    fn charge(&self, bytes: u64) {
        self.budget.lock().unwrap().granted_bytes += bytes;
        self.inner().granted_bytes += bytes;
    }

    fn give(&self, bytes: u64) {
        let mut budget = self.budget.lock().unwrap();
        let mut inner = self.inner();
        assert!(bytes <= inner.granted_bytes, "gives {bytes} of {}", inner.granted_bytes);
        budget.granted_bytes -= bytes;
        inner.granted_bytes -= bytes;
    }

    fn room(&self) -> u64 {
        let budget = self.budget.lock().unwrap();
        budget.budget_bytes.saturating_sub(budget.granted_bytes)
    }

    fn short(&self, waiter: Waiter, lack: Lack) {
        let mut inner = self.inner();
        inner.short.insert(waiter, lack.bytes);
        inner.short.retain(|_, bytes| *bytes > 0);
    }
}
