//! Where a pool stands.

use kvcached_ledger::PageCounts;

use crate::error::PoolError;
use crate::meter::Usage;
use crate::pool::Pool;
use crate::state::Tally;

/// Where a pool stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStats {
    /// Pages by state.
    pub pages: PageCounts,
    /// Bytes of one page.
    pub page_bytes: u64,
    /// Usable blocks of the pool, lost ones among them.
    pub num_blocks: u32,
    /// Blocks that somebody holds, the null block among them.
    pub held_blocks: u32,
    /// Free blocks in backed pages, those set aside among them.
    pub backed_blocks: u32,
    /// Blocks that may still be allocated.
    pub available_blocks: u32,
    /// Blocks kept for the next allocation.
    pub set_aside_blocks: u32,
    /// Free blocks of backed pages that are not handed out, for their pages are to go: the limit was lowered.
    pub draining_blocks: u32,
    /// Pages that are to be mapped ahead of the next allocations.
    pub ahead_pages: u32,
    /// Bytes, as the meter sees them.
    pub usage: Usage,
    /// Bytes mapped and known: used and reserved.
    pub mapped_bytes: u64,
    /// Pages by who backed or gave them back.
    pub tally: Tally,
}

impl Pool {
    /// Where the pool stands, also after its shutdown.
    pub fn stats(&self) -> Result<PoolStats, PoolError> {
        let state = self.shared.lock()?;
        let ledger = &state.ledger;
        let usage = self.shared.usage(ledger.page_counts(), self.shared.mapper.held_beside());
        Ok(PoolStats {
            pages: ledger.page_counts(),
            page_bytes: self.shared.page_bytes,
            num_blocks: ledger.layout().num_blocks,
            held_blocks: ledger.held_blocks(),
            backed_blocks: ledger.backed_free_blocks(),
            available_blocks: ledger.available_blocks(),
            set_aside_blocks: ledger.set_aside_blocks(),
            draining_blocks: ledger.block_counts().draining,
            ahead_pages: state.demand.ahead(),
            usage,
            mapped_bytes: usage.used_bytes + usage.reserved_bytes,
            tally: state.tally,
        })
    }

    /// (blocks held or set aside, usable blocks) of each page.
    pub fn occupancy(&self, pages: &[u32]) -> Result<Vec<(u32, u32)>, PoolError> {
        let state = self.shared.enter()?;
        let num_pages = state.ledger.layout().num_pages();
        pages
            .iter()
            .map(|&page| state.ledger.occupancy(page).ok_or(PoolError::NoSuchPage { page, num_pages }))
            .collect()
    }

    /// Pages that would hold nothing, were exactly these held blocks freed: what evicting them gives back.
    pub fn emptied_by(&self, ids: &[u32]) -> Result<u32, PoolError> {
        Ok(self.shared.enter()?.ledger.emptied_by(ids)?)
    }

    /// Page of each id.
    pub fn pages_of(&self, ids: &[u32]) -> Result<Vec<u32>, PoolError> {
        let state = self.shared.enter()?;
        let page = |&id| state.ledger.page_of(id).ok_or(kvcached_ledger::BlockError::Unknown { id });
        Ok(ids.iter().map(page).collect::<Result<_, _>>()?)
    }

    /// Every free block, by id: on hand or not, set aside or not. Walks all pages: for checks.
    pub fn free_ids(&self) -> Result<Vec<u32>, PoolError> {
        Ok(self.shared.enter()?.ledger.free_ids())
    }
}
