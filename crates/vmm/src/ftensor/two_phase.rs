//! Unmapping in two steps, so that several ranks do it together or not at all. What may follow what is decided in
//! `transaction`; here are the pages and the driver.

use super::FTensor;
use super::backing::Page;
use super::error::{UnmapFailure, VmmError};
use super::mapping::quarantine;
use super::table::{Retained, Slot, Taken};
use super::transaction::{Loss, Step, TransactionId};
use crate::driver::DriverError;

impl FTensor {
    /// Unmaps these pages for a transaction and keeps their memory, all or none. Asked for again, also after the decision was
    /// lost on its way, it does nothing more.
    ///
    /// Fails with `Transaction` where that may not follow what came before, and as [`unmap`](FTensor::unmap) does. Where a
    /// driver call fails everything is mapped back, and `Unmap` says which pages were lost by that; the transaction then
    /// counts as never prepared.
    pub fn prepare_unmap(&self, id: TransactionId, pages: &[u32]) -> Result<(), VmmError> {
        self.check_owner("prepare_unmap")?;
        let taken = {
            let mut table = self.table();
            let same_pages = is_same_set(pages, &table.retained);
            if table.transactions.prepare(id, same_pages)? != Step::Go {
                return Ok(());
            }
            let claimed = table.claim_mapped(pages);
            claimed.inspect_err(|_| table.transactions.not_prepared())?
        };
        if let Err(error) = self.still(!taken.is_empty()) {
            self.put_back(taken);
            self.table().transactions.not_prepared();
            return Err(VmmError::from_driver(None, error));
        }
        let mut done = Vec::with_capacity(taken.len());
        for (number, handles) in &taken {
            let mut page = self.backing.backed(*number, handles);
            let stripped = self.backing.strip(&mut page);
            done.push(page);
            if let Err(cause) = stripped {
                return Err(self.undo_prepare(done, taken, cause));
            }
        }
        let mut table = self.table();
        for page in &done {
            table.set(page.number, Slot::Prepared);
        }
        table.retained = taken;
        table.transactions.prepared();
        Ok(())
    }

    /// Releases the memory of a prepared transaction. Its pages are unbacked from then on, also where releasing fails: then
    /// the commit is to be asked for again, which goes on with the rest.
    ///
    /// Fails with `Transaction` where that may not follow what came before, with `CommitUnfinished` where memory is left.
    pub fn commit_unmap(&self, id: TransactionId) -> Result<(), VmmError> {
        self.check_owner("commit_unmap")?;
        let mut handles = {
            let mut table = self.table();
            if table.transactions.commit(id)? != Step::Go {
                return Ok(());
            }
            let mut handles = std::mem::take(&mut table.releasing);
            for (page, memory) in std::mem::take(&mut table.retained) {
                table.set(page, Slot::Unbacked);
                handles.extend(memory);
            }
            handles
        };
        let released = self.backing.release(&mut handles);
        let mut table = self.table();
        match released {
            Ok(()) => {
                table.transactions.committed();
                Ok(())
            }
            Err(source) => {
                let bytes = handles.len() as u64 * self.geometry().run_bytes();
                table.releasing = handles;
                table.transactions.half_committed();
                Err(VmmError::CommitUnfinished { id, bytes, source })
            }
        }
    }

    /// Maps the memory of a prepared transaction back: its pages hold what they held. An abort that comes before its prepare
    /// is remembered, and the prepare refused.
    ///
    /// Fails with `Transaction` where that may not follow what came before; with `AbortLost`, each time that it is asked for,
    /// where pages could not be mapped back. With `Driver` it has done nothing, and is to be asked for again.
    pub fn abort_unmap(&self, id: TransactionId) -> Result<(), VmmError> {
        self.check_owner("abort_unmap")?;
        let retained = {
            let mut table = self.table();
            match table.transactions.abort(id)? {
                Step::Done => return Ok(()),
                Step::Lost(Loss { pages, source }) => return Err(VmmError::AbortLost { id, pages, source }),
                Step::Go => std::mem::take(&mut table.retained),
            }
        };
        if let Err(error) = self.still(!retained.is_empty()) {
            let mut table = self.table();
            table.retained = retained;
            table.transactions.not_aborted();
            return Err(VmmError::from_driver(None, error));
        }
        let stripped = retained.iter().rev().map(|(number, handles)| {
            let mut page = self.backing.unbacked(*number);
            page.add_loose(handles.to_vec());
            page
        });
        let (lost, source) = self.map_back(stripped.collect());
        let loss = source.map(|source| Loss { pages: lost, source });
        self.table().transactions.aborted(loss.clone());
        match loss {
            None => Ok(()),
            Some(Loss { pages, source }) => Err(VmmError::AbortLost { id, pages, source }),
        }
    }

    // ---------------------------------------------------------------- inside

    /// Undoes a prepare that failed, newest first, and returns the error of the whole call.
    fn undo_prepare(&self, done: Vec<Page>, taken: Taken, cause: DriverError) -> VmmError {
        let untouched: Vec<_> = taken.into_iter().skip(done.len()).collect();
        let mut pages: Vec<u32> = done.iter().map(|page| page.number).collect();
        pages.extend(untouched.iter().map(|(page, _)| *page));
        self.put_back(untouched);
        let (quarantined, _) = self.map_back(done.into_iter().rev().collect());
        self.table().transactions.not_prepared();
        pages.retain(|page| !quarantined.contains(page));
        VmmError::Unmap(Box::new(UnmapFailure {
            unmapped: vec![],
            quarantined,
            still_mapped: pages,
            leaked: vec![],
            source: cause,
        }))
    }

    /// Maps the loose memory of these pages back, in this order. Returns the pages that are lost, ascending, and the first
    /// failure.
    fn map_back(&self, stripped: Vec<Page>) -> (Vec<u32>, Option<DriverError>) {
        let (mut lost, mut first) = (vec![], None);
        for mut page in stripped {
            let mut restored = self.backing.restore(&mut page);
            if restored.is_ok() && !page.in_doubt() {
                self.table().set(page.number, Slot::Mapped(page.handles()));
                continue;
            }
            // Its content is gone: so may be its memory.
            restored = restored.and(self.backing.undo(&mut page));
            first = first.or(restored.err());
            lost.push(page);
        }
        (quarantine(&mut self.table(), lost), first)
    }
}

fn is_same_set(pages: &[u32], retained: &[Retained]) -> bool {
    let mut asked = pages.to_vec();
    asked.sort_unstable();
    asked.dedup();
    let mut kept: Vec<u32> = retained.iter().map(|(page, _)| *page).collect();
    kept.sort_unstable();
    asked == kept
}
