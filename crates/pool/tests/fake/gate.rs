//! A mapper that waits for the test, in the middle of each call.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};

use kvcached_pool::{Cause, MapFailure, Mapper, UnmapFailure};

/// Maps and unmaps only when told to.
pub struct Gate {
    entered: Mutex<mpsc::Sender<()>>,
    /// Calls that may leave.
    permits: Mutex<u32>,
    permitted: Condvar,
    /// Maps that are still to be refused, at once.
    refusals: AtomicU32,
    /// How often it was waited for the device.
    pub synchronised: AtomicU32,
}

impl Gate {
    pub fn new() -> (Arc<Self>, mpsc::Receiver<()>) {
        let (sender, receiver) = mpsc::channel();
        (
            Arc::new(Gate {
                entered: sender.into(),
                permits: Mutex::default(),
                permitted: Condvar::new(),
                refusals: AtomicU32::new(0),
                synchronised: AtomicU32::new(0),
            }),
            receiver,
        )
    }

    fn pass(&self) {
        self.entered.lock().unwrap().send(()).unwrap();
        let permits = self.permits.lock().unwrap();
        *self.permitted.wait_while(permits, |permits| *permits == 0).unwrap() -= 1;
    }

    /// The device has no memory for so many maps to come; returns for how many it still has none.
    pub fn refuse(&self, maps: u32) -> u32 {
        self.refusals.swap(maps, Ordering::SeqCst)
    }

    /// Lets one call leave.
    pub fn open(&self) {
        *self.permits.lock().unwrap() += 1;
        self.permitted.notify_one();
    }
}

impl Mapper for Gate {
    fn map(&self, pages: &[u32]) -> Result<Vec<u32>, MapFailure> {
        let less = |left: u32| left.checked_sub(1);
        if self.refusals.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
            return Err(MapFailure::OutOfMemory { source: "full".into() });
        }
        self.pass();
        Ok(pages.to_vec())
    }
    fn unmap(&self, _pages: &[u32]) -> Result<(), UnmapFailure> {
        self.pass();
        Ok(())
    }
    fn synchronise(&self) -> Result<(), Cause> {
        self.synchronised.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    without_memory!(waits);
}
