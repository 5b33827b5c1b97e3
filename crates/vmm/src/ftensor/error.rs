//! Why a range could not do what was asked, and what that leaves behind.

use thiserror::Error;

use super::transaction::{TransactionError, TransactionId};
use crate::driver::DriverError;
use crate::geometry::GeometryError;

/// Why an [`FTensor`](crate::FTensor) call failed. Each variant says what the call left behind.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum VmmError {
    /// The driver failed. Everything that the call had done is undone.
    #[error("{}{source}", at(*page))]
    Driver {
        /// The page that it was about, if one.
        page: Option<u32>,
        /// What failed.
        source: DriverError,
    },
    /// The memory cannot be had now. Everything that the call had done is undone: asking again later is right.
    #[error("{}{source}", at(*page))]
    OutOfMemory {
        /// The page that it was about, if one.
        page: Option<u32>,
        /// What failed.
        source: DriverError,
    },
    /// A map failed, and so did undoing it: the pages listed are lost. All others of the call are unmapped again.
    #[error("pages {pages:?} are quarantined: {cause}; undoing that: {source}")]
    Quarantined {
        /// The pages lost by this call, ascending.
        pages: Vec<u32>,
        /// What made the call fail.
        cause: Box<DriverError>,
        /// The first failure while undoing it.
        source: Box<DriverError>,
    },
    /// An unmap failed part of the way; the report says where each page of the call stands.
    #[error("{0}")]
    Unmap(#[source] Box<UnmapFailure>),
    /// The page was lost by an earlier call. Nothing was changed.
    #[error("page {page} is quarantined")]
    InQuarantine {
        /// The page.
        page: u32,
    },
    /// Pages to unmap are not mapped. Nothing was changed.
    #[error("pages {pages:?} are not mapped")]
    NotMapped {
        /// All of them, in the order given.
        pages: Vec<u32>,
    },
    /// The range has no such page. Nothing was changed.
    #[error("page {page} is outside the range of {num_pages} pages")]
    PageOutOfRange {
        /// The page.
        page: u32,
        /// Pages of the range.
        num_pages: u32,
    },
    /// Another thread is mapping or unmapping the page at this moment. Nothing was changed.
    #[error("page {page} is being mapped or unmapped by another thread")]
    InTransition {
        /// The page.
        page: u32,
    },
    /// The page is unmapped by a transaction that is not decided. Nothing was changed.
    #[error("page {page} belongs to a transaction that is not decided")]
    InTransaction {
        /// The page.
        page: u32,
    },
    /// A step of a transaction may not follow what came before. Nothing was changed.
    #[error(transparent)]
    Transaction(#[from] TransactionError),
    /// The transaction is committed and its pages are unbacked, but memory of theirs could not be released. Ask for the
    /// commit again.
    #[error(
        "transaction {id} is committed, but {bytes} bytes could not be released: {source}; commit it again"
    )]
    CommitUnfinished {
        /// The transaction.
        id: TransactionId,
        /// What is left to release.
        bytes: u64,
        /// The first failure.
        source: DriverError,
    },
    /// The transaction is aborted, but these pages could not be mapped back: their content is gone, and they are quarantined.
    #[error("transaction {id} is aborted, but pages {pages:?} are quarantined: {source}")]
    AbortLost {
        /// The transaction.
        id: TransactionId,
        /// The pages lost, ascending.
        pages: Vec<u32>,
        /// The first failure.
        source: DriverError,
    },
    /// The geometry does not fit.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
}

/// Where every page of a failed [`unmap`](crate::FTensor::unmap) or [`prepare_unmap`](crate::FTensor::prepare_unmap) stands.
/// The first three lists make up the call's pages.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "unmapped {unmapped:?}, quarantined {quarantined:?}, still mapped {still_mapped:?}, memory not given back of {leaked:?}: {source}"
)]
pub struct UnmapFailure {
    /// Holes again.
    pub unmapped: Vec<u32>,
    /// Their unmap failed, or what lies under unbacked pages could not be laid under them: never used again.
    pub quarantined: Vec<u32>,
    /// Mapped still. After a failed `unmap` their content may be gone.
    pub still_mapped: Vec<u32>,
    /// Those of `unmapped` whose memory could not be released; that is tried again when the range is dropped.
    pub leaked: Vec<u32>,
    /// The first failure.
    pub source: DriverError,
}

impl VmmError {
    /// A driver's failure over `page`, out of memory told from the rest.
    pub(crate) fn from_driver(page: Option<u32>, source: DriverError) -> Self {
        if source.is_out_of_memory() {
            VmmError::OutOfMemory { page, source }
        } else {
            VmmError::Driver { page, source }
        }
    }

    /// Whether this is pressure: nothing changed, and asking again later may succeed.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, VmmError::OutOfMemory { .. })
    }

    /// Of a failed [`map`](crate::FTensor::map): its pages that are in an unknown state, also those that an earlier call has lost.
    pub fn lost_by_map(&self) -> Vec<u32> {
        match self {
            VmmError::Quarantined { pages, .. } => pages.clone(),
            VmmError::InQuarantine { page } => vec![*page],
            _ => vec![],
        }
    }

    /// Of a failed [`unmap`](crate::FTensor::unmap) or [`prepare_unmap`](crate::FTensor::prepare_unmap) of `pages`: those that are
    /// not to be trusted again, and those that are mapped as before. The rest has no memory any more.
    pub fn after_unmap(&self, pages: &[u32]) -> (Vec<u32>, Vec<u32>) {
        let without = |lost: &[u32]| pages.iter().copied().filter(|page| !lost.contains(page)).collect();
        match self {
            VmmError::Unmap(report) => (report.quarantined.clone(), report.still_mapped.clone()),
            // Somebody else unmapped or lost it; this call has changed nothing.
            VmmError::NotMapped { pages: absent } => (absent.clone(), without(absent)),
            VmmError::InQuarantine { page } | VmmError::PageOutOfRange { page, .. } => {
                (vec![*page], without(&[*page]))
            }
            _ => (vec![], pages.to_vec()),
        }
    }
}

fn at(page: Option<u32>) -> String {
    page.map_or_else(String::new, |page| format!("page {page}: "))
}
