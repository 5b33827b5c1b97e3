//! A rank's memory without memory: which pages are mapped, and every law of it.

use super::Violation;
use crate::message::{Body, Created, Failure, TransactionId};
use crate::rank::{Work, WorkResult};
use crate::runs::Runs;

/// A set of pages below 64, one bit each.
pub type Pages = u64;

/// The bits of these pages.
pub fn bits(pages: &[u32]) -> Pages {
    pages.iter().fold(0, |bits, page| bits | 1u64.checked_shl(*page).unwrap_or(0))
}

/// The pages of these bits.
pub fn runs(bits: Pages) -> Runs {
    let pages: Vec<u32> = (0..64).filter(|page| bits >> page & 1 == 1).collect();
    Runs::from_pages(&pages).unwrap_or_default()
}

/// How driver work goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fault {
    /// As it should.
    None,
    /// It fails and leaves everything as it was.
    Clean,
    /// It fails, and the first page is in an unknown state.
    Lose,
}

/// Which pages of a rank have memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Store {
    num_pages: u32,
    /// Mapped.
    pub mapped: Pages,
    /// Unmapped, with their memory kept.
    pub prepared: Option<(TransactionId, Pages)>,
    /// In an unknown state.
    pub lost: Pages,
    /// Mapped although a map of theirs was undone, since the driver refused to unmap them.
    pub stuck: Pages,
}

impl Store {
    /// Nothing is mapped. At most 64 pages.
    pub fn new(num_pages: u32) -> Self {
        Store { num_pages, mapped: 0, prepared: None, lost: 0, stuck: 0 }
    }

    /// Carries work out. Fails where the work breaks a law, whatever the fault.
    pub fn work(&mut self, work: &Work, fault: Fault) -> Result<WorkResult, Violation> {
        let body = match work {
            Work::Describe => Body::Created(self.created()),
            Work::Map { pages } => self.map(bits(pages), fault)?,
            Work::Unmap { pages } | Work::Undo { pages } => {
                let body = self.unmap(bits(pages), fault)?;
                if matches!(work, Work::Undo { .. }) {
                    self.stuck |= bits(pages) & self.mapped;
                }
                body
            }
            Work::Prepare { transaction, pages } => self.prepare(*transaction, bits(pages), fault)?,
            Work::Commit { transaction } => {
                self.take(*transaction)?;
                Body::Committed
            }
            Work::Abort { transaction } => {
                let pages = self.take(*transaction)?;
                let lost = if fault == Fault::Lose { first(pages) } else { 0 };
                self.mapped |= pages & !lost;
                self.lost |= lost;
                Body::Aborted { lost: runs(lost) }
            }
            Work::Synchronise | Work::Trim | Work::Room if fault != Fault::None => failure(false, 0, 0),
            Work::Synchronise => Body::Passed,
            Work::Trim => Body::Trimmed { bytes: 0 },
            Work::Room => Body::Room { free_bytes: 1 },
        };
        Ok(WorkResult { beside_bytes: 0, body })
    }

    fn created(&self) -> Created {
        Created {
            page_bytes: 1,
            virtual_bytes: u64::from(self.num_pages),
            num_pages: self.num_pages,
            blocks_per_page: 1,
            ids_per_page: 1,
            mapped: runs(self.mapped),
            lost: runs(self.lost),
        }
    }

    fn map(&mut self, pages: Pages, fault: Fault) -> Result<Body, Violation> {
        let kept = self.prepared.map_or(0, |(_, kept)| kept);
        if pages & (kept | self.lost) != 0 {
            return Err(Violation(format!("pages {:?} are mapped while kept or lost", runs(pages))));
        }
        let new = pages & !self.mapped;
        match fault {
            Fault::None => {
                self.mapped |= new;
                Ok(Body::Mapped { new: runs(new) })
            }
            Fault::Clean => Ok(failure(true, 0, 0)),
            Fault::Lose => {
                self.lost |= first(new);
                Ok(failure(false, first(new), 0))
            }
        }
    }

    fn check_mapped(&self, pages: Pages) -> Result<(), Violation> {
        match pages & !self.mapped {
            0 => Ok(()),
            holes => Err(Violation(format!("pages {:?} are unmapped and have no memory", runs(holes)))),
        }
    }

    fn unmap(&mut self, pages: Pages, fault: Fault) -> Result<Body, Violation> {
        self.check_mapped(pages)?;
        let gone = match fault {
            Fault::None => pages,
            Fault::Clean => 0,
            Fault::Lose => first(pages),
        };
        self.mapped &= !gone;
        self.stuck &= !gone;
        if fault == Fault::None {
            return Ok(Body::Unmapped);
        }
        self.lost |= gone;
        Ok(failure(false, gone, pages & !gone))
    }

    fn prepare(&mut self, transaction: TransactionId, pages: Pages, fault: Fault) -> Result<Body, Violation> {
        if let Some((other, _)) = self.prepared {
            return Err(Violation(format!("{transaction} is prepared while {other} is: its memory leaks")));
        }
        if fault != Fault::None {
            return self.unmap(pages, fault);
        }
        self.check_mapped(pages)?;
        self.mapped &= !pages;
        self.stuck &= !pages;
        self.prepared = Some((transaction, pages));
        Ok(Body::Prepared)
    }

    /// What the transaction keeps, once.
    fn take(&mut self, transaction: TransactionId) -> Result<Pages, Violation> {
        match self.prepared.take() {
            Some((prepared, pages)) if prepared == transaction => Ok(pages),
            other => Err(Violation(format!("{transaction} is decided while {other:?} is prepared"))),
        }
    }
}

fn first(pages: Pages) -> Pages {
    pages & pages.wrapping_neg()
}

fn failure(out_of_memory: bool, lost: Pages, still_mapped: Pages) -> Body {
    Body::Failed(Failure {
        out_of_memory,
        lost: runs(lost),
        still_mapped: runs(still_mapped),
        detail: "by chance".to_owned(),
    })
}
