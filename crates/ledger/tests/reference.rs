//! Random histories against a reference that scans everything and remembers what it issued in a set.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeSet, HashSet};

use kvcached_ledger::{ClaimPlan, Layout, Ledger, PageOrder, PageState, RetirePolicy};
use proptest::prelude::*;
use proptest::sample::Index;

/// The slow way: every question is answered by a scan over all pages or all blocks.
struct Reference {
    layout: Layout,
    policy: RetirePolicy,
    states: Vec<PageState>,
    held: HashSet<u32>,
    aside: BTreeSet<u32>,
    begun: u64,
    ended: u64,
}

impl Reference {
    fn new(layout: Layout, policy: RetirePolicy) -> Self {
        let states = vec![PageState::Free; layout.num_blocks.div_ceil(layout.blocks_per_page) as usize];
        Reference { layout, policy, states, held: HashSet::new(), aside: BTreeSet::new(), begun: 0, ended: 0 }
    }

    fn ids(&self) -> impl Iterator<Item = u32> + use<> {
        let Layout { num_blocks, blocks_per_page: m, ids_per_page, .. } = self.layout;
        (0..num_blocks).map(move |block| block / m * ids_per_page + block % m)
    }

    fn page(&self, id: u32) -> usize {
        (id / self.layout.ids_per_page) as usize
    }

    fn is_free(&self, id: u32) -> bool {
        !self.held.contains(&id) && !self.aside.contains(&id)
    }

    fn free_in(&self, page: usize) -> Vec<u32> {
        self.ids().filter(|&id| self.page(id) == page && self.is_free(id)).collect()
    }

    fn capacity(&self, page: usize) -> usize {
        self.ids().filter(|&id| self.page(id) == page).count()
    }

    /// Pages from the most to the least preferred.
    fn ordered(&self) -> Vec<usize> {
        let mut pages: Vec<_> = (0..self.states.len()).collect();
        if self.layout.order == PageOrder::HighestFirst {
            pages.reverse();
        }
        pages
    }

    fn free_where(&self, wanted: impl Fn(PageState) -> bool) -> usize {
        (0..self.states.len()).filter(|&p| wanted(self.states[p])).map(|p| self.free_in(p).len()).sum()
    }

    fn on_hand(&self) -> usize {
        self.free_where(PageState::is_backed) + self.aside.len()
    }

    fn pick(&self, wanted: usize) -> usize {
        // min_by_key takes the first of equals: the most preferred page.
        let class = |page: usize| match self.states[page] {
            PageState::InUse => 0,
            PageState::Reserved => 1,
            _ => 2,
        };
        let candidates: Vec<(usize, usize)> = self
            .ordered()
            .into_iter()
            .filter(|&page| self.states[page].is_backed())
            .map(|page| (page, self.free_in(page).len()))
            .filter(|(_, free)| *free > 0)
            .collect();
        let fits = candidates.iter().filter(|(_, free)| *free >= wanted);
        if let Some((page, _)) = fits.min_by_key(|(page, free)| (class(*page) > 0, *free, class(*page))) {
            return *page;
        }
        candidates.iter().min_by_key(|(page, free)| (usize::MAX - free, class(*page))).unwrap().0
    }

    fn take(&mut self, n: usize) -> Vec<u32> {
        let mut ids = Vec::new();
        while ids.len() < n {
            let left = n - ids.len();
            let page = self.pick(left);
            let taken: Vec<_> = self.free_in(page).into_iter().take(left).collect();
            self.held.extend(&taken);
            self.states[page] = PageState::InUse;
            ids.extend(taken);
        }
        ids
    }

    fn alloc(&mut self, n: usize) -> Option<Vec<u32>> {
        if n > self.on_hand() {
            return None;
        }
        let mut ids: Vec<_> = self.aside.iter().copied().take(n).collect();
        ids.iter().for_each(|id| assert!(self.aside.remove(id)));
        self.held.extend(&ids);
        let sorted = !ids.is_empty();
        ids.extend(self.take(n - ids.len()));
        if sorted {
            ids.sort_unstable();
        }
        Some(ids)
    }

    fn emptied(&mut self, page: usize) {
        let outstanding = self.policy == RetirePolicy::Asynchronous && self.begun > self.ended;
        if self.free_in(page).len() == self.capacity(page) {
            self.states[page] =
                if outstanding { PageState::Retired(self.begun) } else { PageState::Reserved };
        }
    }

    fn free(&mut self, ids: &[u32]) -> bool {
        let unique: HashSet<_> = ids.iter().copied().collect();
        if unique.len() != ids.len() || !unique.is_subset(&self.held) {
            return false;
        }
        for id in ids {
            self.held.remove(id);
        }
        ids.iter().for_each(|&id| self.emptied(self.page(id)));
        true
    }
}

#[derive(Debug, Clone)]
enum Op {
    Alloc(u32),
    FreeSome(Vec<Index>),
    FreeRaw(Vec<u32>),
    Claim(Vec<u32>),
    SetAside(u32),
    ReleaseSetAside,
    Back { n: u32, at_most: u32, fail: bool, quarantine: bool },
    Unback { keep: u32, fail: bool },
    Begin,
    End(u64),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0u32..20).prop_map(Op::Alloc),
        6 => prop::collection::vec(any::<Index>(), 0..12).prop_map(Op::FreeSome),
        2 => prop::collection::vec(0u32..90, 0..4).prop_map(Op::FreeRaw),
        2 => prop::collection::vec(0u32..90, 0..4).prop_map(Op::Claim),
        1 => (0u32..8).prop_map(Op::SetAside),
        1 => Just(Op::ReleaseSetAside),
        5 => (0u32..30, 0u32..6, prop::bool::weighted(0.2), prop::bool::weighted(0.1))
            .prop_map(|(n, at_most, fail, quarantine)| Op::Back { n, at_most, fail, quarantine }),
        3 => (0u32..4, prop::bool::weighted(0.1)).prop_map(|(keep, fail)| Op::Unback { keep, fail }),
        2 => Just(Op::Begin),
        2 => (0u64..4).prop_map(Op::End),
        1 => Just(Op::Clear),
    ]
}

fn run(layout: Layout, policy: RetirePolicy, ops: Vec<Op>) -> Result<(), TestCaseError> {
    let mut ledger = Ledger::new(layout, policy).unwrap();
    let mut reference = Reference::new(layout, policy);
    for op in ops {
        let before = ledger.clone();
        match op {
            Op::Alloc(n) => {
                let ids = ledger.alloc(n);
                prop_assert_eq!(&ids, &reference.alloc(n as usize));
                if ids.is_none() {
                    prop_assert_eq!(&ledger, &before);
                }
            }
            Op::FreeSome(picks) => {
                let held: Vec<u32> =
                    reference.held.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
                if held.is_empty() {
                    continue;
                }
                let ids: BTreeSet<u32> = picks.iter().map(|pick| *pick.get(&held)).collect();
                let ids: Vec<_> = ids.into_iter().rev().collect();
                prop_assert!(reference.free(&ids));
                let outcome = ledger.free(&ids).unwrap();
                for page in outcome.retired {
                    prop_assert!(matches!(reference.states[page as usize], PageState::Retired(_)));
                }
                for page in outcome.reserved {
                    prop_assert_eq!(reference.states[page as usize], PageState::Reserved);
                }
            }
            Op::FreeRaw(ids) => {
                let freed = ledger.free(&ids);
                prop_assert_eq!(freed.is_ok(), reference.free(&ids));
                if freed.is_err() {
                    prop_assert_eq!(&ledger, &before);
                }
            }
            Op::Claim(ids) => {
                let valid: HashSet<u32> = reference.ids().collect();
                let unique: HashSet<u32> = ids.iter().copied().collect();
                let may = unique.len() == ids.len()
                    && ids.iter().all(|&id| valid.contains(&id) && reference.is_free(id))
                    && ids.iter().all(|&id| reference.states[reference.page(id)] != PageState::Quarantined);
                let plan = ledger.plan_claim(&ids);
                prop_assert_eq!(plan.is_ok(), may);
                match plan {
                    Ok(plan) => {
                        if let ClaimPlan::Map(pages) = plan {
                            for &page in &pages {
                                prop_assert_eq!(reference.states[page as usize], PageState::Free);
                            }
                            ledger.backed(&pages).unwrap();
                        }
                        ledger.claim(&ids).unwrap();
                        for &id in &ids {
                            let page = reference.page(id);
                            reference.states[page] = PageState::InUse;
                            reference.held.insert(id);
                        }
                    }
                    Err(error) => {
                        prop_assert_eq!(&ledger, &before);
                        prop_assert!(ledger.claim(&ids).is_err(), "{} for a plan, not for a claim", error);
                        prop_assert_eq!(&ledger, &before);
                    }
                }
            }
            Op::SetAside(n) => {
                let may = n as usize <= reference.on_hand() - reference.aside.len();
                prop_assert_eq!(ledger.set_aside(n), may);
                if may {
                    let ids = reference.take(n as usize);
                    ids.iter().for_each(|id| assert!(reference.held.remove(id)));
                    reference.aside.extend(ids);
                }
            }
            Op::ReleaseSetAside => {
                ledger.release_set_aside();
                for id in std::mem::take(&mut reference.aside) {
                    reference.emptied(reference.page(id));
                }
            }
            Op::Back { n, at_most, fail, quarantine } => {
                let pages = ledger.plan_backing(n, at_most);
                let mut short = (n as usize).saturating_sub(reference.on_hand());
                let mut expected = Vec::new();
                for page in reference.ordered() {
                    if short > 0
                        && expected.len() < at_most as usize
                        && reference.states[page] == PageState::Free
                    {
                        short = short.saturating_sub(reference.capacity(page));
                        expected.push(page as u32);
                    }
                }
                prop_assert_eq!(&pages, &expected);
                if !fail {
                    ledger.backed(&pages).unwrap();
                    pages.iter().for_each(|&p| reference.states[p as usize] = PageState::Reserved);
                } else if quarantine && !pages.is_empty() {
                    ledger.backing_failed(&pages, &pages[..1]).unwrap();
                    reference.states[pages[0] as usize] = PageState::Quarantined;
                } else {
                    ledger.backing_failed(&pages, &[]).unwrap();
                    prop_assert_eq!(&ledger, &before);
                }
            }
            Op::Unback { keep, fail } => {
                let pages = ledger.plan_unbacking(keep, 0, u32::MAX);
                let mut expected: Vec<u32> = reference
                    .ordered()
                    .into_iter()
                    .filter(|&page| reference.states[page] == PageState::Reserved)
                    .skip(keep as usize)
                    .map(|page| page as u32)
                    .collect();
                expected.reverse();
                prop_assert_eq!(&pages, &expected);
                pages.iter().for_each(|&p| reference.states[p as usize] = PageState::Free);
                match (fail, pages.as_slice()) {
                    (true, [lost, kept, ..]) => {
                        ledger.unbacking_failed(&pages, &[*lost], &[*kept]).unwrap();
                        reference.states[*lost as usize] = PageState::Quarantined;
                        reference.states[*kept as usize] = PageState::Reserved;
                    }
                    _ => ledger.unbacked(&pages).unwrap(),
                }
            }
            Op::Begin => {
                reference.begun += 1;
                prop_assert_eq!(ledger.begin_epoch(), reference.begun);
            }
            Op::End(behind) => {
                let epoch = (reference.begun + 1).saturating_sub(behind);
                if epoch > reference.begun {
                    prop_assert!(ledger.release_through(epoch).is_err());
                    prop_assert_eq!(&ledger, &before);
                    continue;
                }
                reference.ended = reference.ended.max(epoch);
                let ended = reference.ended;
                let settled: HashSet<u32> = ledger.release_through(epoch).unwrap().into_iter().collect();
                for (page, state) in (0..).zip(&mut reference.states) {
                    let settles = matches!(*state, PageState::Retired(at) if at <= ended);
                    prop_assert_eq!(settles, settled.contains(&page));
                    if settles {
                        *state = PageState::Reserved;
                    }
                }
            }
            Op::Clear => {
                ledger.clear();
                reference.held.clear();
                reference.aside.clear();
                for state in &mut reference.states {
                    if state.is_backed() {
                        *state = PageState::Reserved;
                    }
                }
            }
        }
        ledger.check().map_err(|error| TestCaseError::fail(error.to_string()))?;
        for (page, &state) in reference.states.iter().enumerate() {
            prop_assert_eq!(ledger.state(page as u32), Some(state));
            let usable = reference.capacity(page);
            let occupied = usable - reference.free_in(page).len();
            prop_assert_eq!(ledger.occupancy(page as u32), Some((occupied as u32, usable as u32)));
        }
        prop_assert_eq!(ledger.held_blocks() as usize, reference.held.len());
        prop_assert_eq!(ledger.backed_free_blocks() as usize, reference.on_hand());
        let free = reference.free_where(|state| state == PageState::Free);
        prop_assert_eq!(ledger.available_blocks() as usize, reference.on_hand() + free);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_reference(
        num_blocks in 1u32..40,
        blocks_per_page in 1u32..7,
        padding in 0u32..3,
        highest in any::<bool>(),
        asynchronous in any::<bool>(),
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let order = if highest { PageOrder::HighestFirst } else { PageOrder::LowestFirst };
        let layout = Layout { num_blocks, blocks_per_page, ids_per_page: blocks_per_page + padding, order };
        let policy = if asynchronous { RetirePolicy::Asynchronous } else { RetirePolicy::Synchronous };
        run(layout, policy, ops)?;
    }
}
