//! An engine as far as `kvctl` sees one: a record, and a thread that answers who asks.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use kvcached_control::{InstanceRecord, Outcome, Terms};

pub struct Engine {
    pub record: Arc<InstanceRecord>,
    ends: Arc<AtomicBool>,
    answering: Option<JoinHandle<()>>,
}

impl Engine {
    /// Answers every change with `outcome`.
    pub fn start(dir: &Path, name: &str, outcome: Outcome) -> Self {
        let record =
            Arc::new(InstanceRecord::create(dir, name, "vllm 0.29.0", "cpu", Terms::default()).unwrap());
        let ends = Arc::new(AtomicBool::new(false));
        let answering = thread::spawn({
            let (record, ends) = (Arc::clone(&record), Arc::clone(&ends));
            move || {
                let mut heard = record.heard();
                while !ends.load(Ordering::SeqCst) {
                    if let Some(asked) = record.asked() {
                        record.answer(&asked, outcome);
                    }
                    heard = record.wait(heard, None);
                }
            }
        });
        Self { record, ends, answering: Some(answering) }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        self.record.ring();
        self.answering.take().unwrap().join().unwrap();
    }
}
