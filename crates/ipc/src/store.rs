//! What a rank does to memory, and the one that production does it to: a reserved range of addresses.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use kvcached_vmm::{FTensor, VmmError};

use crate::message::{Body, Created, Failure, TransactionId};
use crate::rank::{Work, WorkResult};
use crate::runs::Runs;

/// Undoing is tried so often: what cannot be undone costs pages.
const UNDO_ATTEMPTS: u32 = 3;

/// The memory of one group on one rank.
pub trait Store: Send + Sync {
    /// Does it, however long that takes. Called by one thread, one work after the other.
    fn work(&self, work: &Work) -> WorkResult;

    /// Pages that can be backed.
    fn num_pages(&self) -> u32;
}

/// A range of addresses as a rank's memory.
///
/// Transactions of the protocol begin anew with every coordinator, those of a range grow for ever: each prepare gets a number of
/// its own here.
#[derive(Debug)]
pub struct FTensorStore {
    tensor: Arc<FTensor>,
    steps: Mutex<Steps>,
}

#[derive(Debug)]
struct Steps {
    /// The number of the next transaction of the range.
    next: kvcached_vmm::TransactionId,
    prepared: Option<Prepared>,
    /// What was decided and could not be carried out to its end: asked for again before the next prepare.
    unfinished: Option<Unfinished>,
}

/// What is prepared and not decided.
#[derive(Debug)]
struct Prepared {
    transaction: TransactionId,
    /// The range's number of it.
    id: kvcached_vmm::TransactionId,
    pages: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
enum Unfinished {
    Commit(kvcached_vmm::TransactionId),
    Abort(kvcached_vmm::TransactionId),
}

impl FTensorStore {
    /// `tensor`, whose pages nobody else maps or unmaps from now on.
    pub fn new(tensor: Arc<FTensor>) -> Self {
        // Greater than that of any store that was there before, and than what people count to.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let next = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX / 2);
        Self { tensor, steps: Mutex::new(Steps { next, prepared: None, unfinished: None }) }
    }

    fn steps(&self) -> MutexGuard<'_, Steps> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn describe(&self) -> Body {
        let geometry = self.tensor.geometry();
        Body::Created(Created {
            page_bytes: geometry.page_bytes(),
            virtual_bytes: self.tensor.virtual_bytes(),
            num_pages: self.tensor.num_pages(),
            blocks_per_page: geometry.blocks_per_page(),
            ids_per_page: geometry.ids_per_page(),
            mapped: runs(&self.tensor.mapped_pages()),
            lost: runs(&self.tensor.quarantined_pages()),
        })
    }

    fn map(&self, pages: &[u32]) -> Body {
        match self.tensor.map(pages) {
            Ok(new) => Body::Mapped { new: runs(&new) },
            Err(error) => {
                let out_of_memory = error.is_out_of_memory();
                let lost = runs(&error.lost_by_map());
                Body::Failed(Failure { out_of_memory, lost, ..failure(&error) })
            }
        }
    }

    fn unmap(&self, pages: &[u32]) -> Body {
        let unmapped = self.tensor.synchronise().and_then(|()| self.tensor.unmap(pages));
        match unmapped {
            Ok(()) => Body::Unmapped,
            Err(error) => Body::Failed(unmap_failure(pages, &error)),
        }
    }

    /// Unmaps what a map mapped anew, which nothing has used: without waiting for the device.
    fn undo(&self, pages: &[u32]) -> Body {
        let (mut left, mut lost) = (pages.to_vec(), Runs::none());
        let mut attempts = 0;
        loop {
            attempts += 1;
            let failure = match self.tensor.unmap(&left) {
                Ok(()) if lost.is_empty() => return Body::Unmapped,
                Ok(()) => unmap_failure(&[], &VmmError::NotMapped { pages: vec![] }),
                Err(error) => {
                    tracing::warn!(%error, "a map could not be undone at once");
                    unmap_failure(&left, &error)
                }
            };
            lost = lost.or(&failure.lost);
            left = failure.still_mapped.to_vec();
            if left.is_empty() && lost.is_empty() {
                return Body::Unmapped; // only memory could not be released yet, which is tried again
            }
            if left.is_empty() || attempts == UNDO_ATTEMPTS {
                return Body::Failed(Failure { lost, ..failure });
            }
        }
    }

    fn prepare(&self, transaction: TransactionId, pages: &[u32]) -> Body {
        if let Err(error) = self.finish().and_then(|()| self.tensor.synchronise()) {
            return Body::Failed(Failure { still_mapped: runs(pages), ..failure(&error) });
        }
        let mut steps = self.steps();
        let id = steps.next;
        steps.next += 1;
        drop(steps);
        match self.tensor.prepare_unmap(id, pages) {
            Ok(()) => {
                self.steps().prepared = Some(Prepared { transaction, id, pages: pages.to_vec() });
                Body::Prepared
            }
            Err(error) => Body::Failed(unmap_failure(pages, &error)),
        }
    }

    /// A commit whose memory could not be released is committed all the same: the rest is tried again later, and counts as held
    /// beside the pages until then.
    fn commit(&self, transaction: TransactionId) -> Body {
        let Some(Prepared { id, .. }) = self.take_prepared(transaction) else {
            return Body::Failed(Failure {
                out_of_memory: false,
                lost: Runs::none(),
                still_mapped: Runs::none(),
                detail: format!("transaction {transaction} is not prepared"),
            });
        };
        match self.tensor.commit_unmap(id) {
            Ok(()) => Body::Committed,
            Err(error @ VmmError::CommitUnfinished { .. }) => {
                tracing::warn!(%error, "memory could not be released yet");
                self.steps().unfinished = Some(Unfinished::Commit(id));
                Body::Committed
            }
            Err(error) => Body::Failed(failure(&error)),
        }
    }

    fn abort(&self, transaction: TransactionId) -> Body {
        let Some(Prepared { id, pages, .. }) = self.take_prepared(transaction) else {
            return Body::Aborted { lost: Runs::none() };
        };
        let mut attempts = 1;
        loop {
            match self.tensor.abort_unmap(id) {
                Ok(()) => return Body::Aborted { lost: Runs::none() },
                Err(VmmError::AbortLost { pages, source, .. }) => {
                    tracing::warn!(?pages, error = %source, "pages are lost: an abort could not map them back");
                    return Body::Aborted { lost: runs(&pages) };
                }
                Err(error) if attempts < UNDO_ATTEMPTS => {
                    attempts += 1;
                    tracing::warn!(%error, "an abort is tried again");
                }
                Err(error) => {
                    tracing::error!(%error, "an abort could not be carried out: its pages count as lost");
                    self.steps().unfinished = Some(Unfinished::Abort(id));
                    return Body::Aborted { lost: runs(&pages) };
                }
            }
        }
    }

    /// Carries out what was decided and is not done.
    fn finish(&self) -> Result<(), VmmError> {
        let Some(unfinished) = self.steps().unfinished else { return Ok(()) };
        match unfinished {
            Unfinished::Commit(id) => self.tensor.commit_unmap(id)?,
            Unfinished::Abort(id) => match self.tensor.abort_unmap(id) {
                Ok(()) | Err(VmmError::AbortLost { .. }) => {}
                Err(error) => return Err(error),
            },
        }
        self.steps().unfinished = None;
        Ok(())
    }

    fn take_prepared(&self, transaction: TransactionId) -> Option<Prepared> {
        self.steps().prepared.take_if(|prepared| prepared.transaction == transaction)
    }

    fn room(&self) -> Body {
        match self.tensor.driver().mem_info() {
            Ok(info) => Body::Room { free_bytes: info.free },
            Err(source) => Body::Failed(failure(&VmmError::Driver { page: None, source })),
        }
    }

    fn trim(&self) -> Body {
        // Memory of a commit comes first: it is nobody's.
        match self.finish().and_then(|()| self.tensor.trim()) {
            Ok(bytes) => Body::Trimmed { bytes },
            Err(error) => Body::Failed(failure(&error)),
        }
    }
}

impl Store for FTensorStore {
    fn work(&self, work: &Work) -> WorkResult {
        let body = match work {
            Work::Describe => self.describe(),
            Work::Map { pages } => self.map(pages),
            Work::Unmap { pages } => self.unmap(pages),
            Work::Undo { pages } => self.undo(pages),
            Work::Prepare { transaction, pages } => self.prepare(*transaction, pages),
            Work::Commit { transaction } => self.commit(*transaction),
            Work::Abort { transaction } => self.abort(*transaction),
            Work::Synchronise => match self.tensor.synchronise() {
                Ok(()) => Body::Passed,
                Err(error) => Body::Failed(failure(&error)),
            },
            Work::Trim => self.trim(),
            Work::Room => self.room(),
        };
        let tensor = &self.tensor;
        let beside_bytes = tensor.cached_bytes() + tensor.leaked_bytes() + tensor.zero_bytes();
        WorkResult { beside_bytes, body }
    }

    fn num_pages(&self) -> u32 {
        self.tensor.num_pages()
    }
}

fn failure(error: &VmmError) -> Failure {
    Failure {
        out_of_memory: false,
        lost: Runs::none(),
        still_mapped: Runs::none(),
        detail: error.to_string(),
    }
}

/// Where pages stand whose unmapping, or preparing, failed.
fn unmap_failure(pages: &[u32], error: &VmmError) -> Failure {
    let (lost, still_mapped) = error.after_unmap(pages);
    Failure { lost: runs(&lost), still_mapped: runs(&still_mapped), ..failure(error) }
}

/// Pages of this range, in any order.
fn runs(pages: &[u32]) -> Runs {
    let mut pages = pages.to_vec();
    pages.sort_unstable();
    pages.dedup();
    Runs::from_pages(&pages).unwrap_or_else(|_| Runs::none())
}
