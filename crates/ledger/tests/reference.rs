//! Random histories against a reference that scans everything and remembers what it issued in a set.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use kvcached_ledger::{BlockCounts, ClaimPlan, Layout, Ledger, PageOrder, PageState, RetirePolicy};
use proptest::prelude::*;
use proptest::sample::Index;

/// The slow way: every question is answered by a scan over all pages or all blocks.
struct Reference {
    layout: Layout,
    policy: RetirePolicy,
    states: Vec<PageState>,
    held: HashSet<u32>,
    aside: BTreeSet<u32>,
    pinned: Option<u32>,
    target: usize,
    draining: BTreeSet<usize>,
    begun: u64,
    ended: u64,
}

impl Reference {
    fn new(layout: Layout, policy: RetirePolicy) -> Self {
        let states = vec![PageState::Free; layout.num_blocks.div_ceil(layout.blocks_per_page) as usize];
        Reference {
            layout,
            policy,
            target: states.len(),
            states,
            held: HashSet::new(),
            aside: BTreeSet::new(),
            pinned: None,
            draining: BTreeSet::new(),
            begun: 0,
            ended: 0,
        }
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

    fn pages_where(&self, wanted: impl Fn(PageState) -> bool) -> Vec<usize> {
        self.ordered().into_iter().filter(|&page| wanted(self.states[page])).collect()
    }

    fn free_where(&self, wanted: impl Fn(PageState) -> bool) -> usize {
        self.pages_where(wanted).into_iter().map(|page| self.free_in(page).len()).sum()
    }

    fn occupied(&self) -> usize {
        self.pages_where(|state| !matches!(state, PageState::Free | PageState::Withdrawn)).len()
    }

    fn effective_target(&self) -> usize {
        if self.pinned.is_some() { self.target.max(1) } else { self.target }
    }

    fn excess(&self) -> usize {
        self.occupied().saturating_sub(self.effective_target())
    }

    fn may_issue(&self, page: usize) -> bool {
        match self.states[page] {
            PageState::InUse => !self.draining.contains(&page),
            PageState::Reserved | PageState::Retired(_) => self.excess() == 0,
            _ => false,
        }
    }

    fn issuable(&self) -> usize {
        let pages = self.ordered().into_iter().filter(|&page| self.may_issue(page));
        pages.map(|page| self.free_in(page).len()).sum()
    }

    fn on_hand(&self) -> usize {
        self.issuable() + self.aside.len()
    }

    /// What every call ends with: free, withdrawn and draining pages follow the target, one page at a time.
    fn follow_target(&mut self) {
        let (target, occupied) = (self.effective_target(), self.occupied());
        loop {
            let free = self.pages_where(|state| state == PageState::Free);
            let withdrawn = self.pages_where(|state| state == PageState::Withdrawn);
            if free.len() + occupied > target && !free.is_empty() {
                self.states[free[free.len() - 1]] = PageState::Withdrawn;
            } else if free.len() + occupied < target && !withdrawn.is_empty() {
                self.states[withdrawn[0]] = PageState::Free;
            } else {
                break;
            }
        }
        let leaving = self.pages_where(|state| {
            matches!(state, PageState::Reserved | PageState::Retired(_) | PageState::Unmapping)
        });
        let pinned = self.pinned.map(|id| self.page(id));
        let mut in_use = self.pages_where(|state| state == PageState::InUse);
        if self.target == 0 {
            self.draining = in_use.into_iter().collect(); // that of the pinned block too
            return;
        }
        in_use.retain(|page| pinned != Some(*page));
        self.draining.retain(|page| in_use.contains(page));
        let wanted = self.excess().saturating_sub(leaving.len()).min(in_use.len());
        let place = |page: usize| self.ordered().iter().position(|&other| other == page);
        in_use.sort_by_key(|&page| (self.free_in(page).len(), place(page)));
        while self.draining.len() > wanted {
            let fullest = *in_use.iter().find(|page| self.draining.contains(page)).unwrap();
            self.draining.remove(&fullest);
        }
        while self.draining.len() < wanted {
            let emptiest = *in_use.iter().rfind(|page| !self.draining.contains(page)).unwrap();
            self.draining.insert(emptiest);
        }
    }

    /// How many pages hold nothing but these blocks.
    fn emptied_by(&self, ids: &[u32]) -> usize {
        let rest = |page: usize| {
            let free = self.free_in(page).len();
            self.capacity(page) - free - ids.iter().filter(|&&id| self.page(id) == page).count()
        };
        let touched: BTreeSet<usize> = ids.iter().map(|&id| self.page(id)).collect();
        touched.into_iter().filter(|&page| rest(page) == 0).count()
    }

    fn emptied_by_if_held(&self, ids: &[u32]) -> Option<usize> {
        let unique: HashSet<_> = ids.iter().copied().collect();
        let free = |id: &u32| self.held.contains(id) && self.pinned != Some(*id);
        (unique.len() == ids.len() && ids.iter().all(free)).then(|| self.emptied_by(ids))
    }

    /// Marks the preferred free pages as mapping until `short` blocks are covered.
    fn plan(&mut self, mut short: usize, at_most: usize) -> Vec<u32> {
        let mut pages = Vec::new();
        for page in self.pages_where(|state| state == PageState::Free) {
            if short > 0 && pages.len() < at_most {
                short = short.saturating_sub(self.capacity(page));
                self.states[page] = PageState::Mapping;
                pages.push(page as u32);
            }
        }
        pages
    }

    fn clear(&mut self) {
        self.held.retain(|id| self.pinned == Some(*id));
        self.aside.clear();
        let pinned = self.pinned.map(|id| self.page(id));
        for page in self.pages_where(PageState::is_backed) {
            if pinned != Some(page) {
                self.states[page] = PageState::Reserved;
            }
        }
    }

    fn plan_unbacking(&mut self, keep: u32, on_hand: u32, at_most: u32) -> Vec<u32> {
        let mut pages = Vec::new();
        while pages.len() < at_most as usize {
            let reserved = self.pages_where(|state| state == PageState::Reserved);
            let Some(&last) = reserved.last() else { break };
            let without =
                if self.excess() == 0 { self.on_hand() - self.capacity(last) } else { self.on_hand() };
            let must = self.excess() > self.pages_where(|state| state == PageState::Unmapping).len();
            if !must && (reserved.len() <= keep as usize || without < on_hand as usize) {
                break;
            }
            self.states[last] = PageState::Unmapping;
            pages.push(last as u32);
        }
        pages
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
            .filter(|&page| self.may_issue(page))
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
        let pinned = self.pinned.is_some_and(|id| ids.contains(&id));
        if pinned || unique.len() != ids.len() || !unique.is_subset(&self.held) {
            return false;
        }
        for id in ids {
            self.held.remove(id);
        }
        ids.iter().for_each(|&id| self.emptied(self.page(id)));
        true
    }
}

/// The driver's side: what it mapped, from what the ledger told it to do.
#[derive(Default)]
struct Device {
    mapped: HashSet<u32>,
    lost: HashSet<u32>,
    /// Calls under way: whether they map, and the pages.
    flights: Vec<(bool, Vec<u32>)>,
}

impl Device {
    /// The law that all of this is for: no page is backed twice, and none that is lost.
    fn begin_mapping(&mut self, pages: &[u32]) -> Result<(), TestCaseError> {
        for page in pages {
            prop_assert!(!self.mapped.contains(page), "page {page} is mapped already");
            prop_assert!(!self.lost.contains(page), "page {page} is lost");
            prop_assert!(self.flights.iter().all(|(_, pages)| !pages.contains(page)), "page {page} twice");
        }
        Ok(())
    }

    fn begin_unmapping(&mut self, pages: &[u32]) -> Result<(), TestCaseError> {
        for page in pages {
            prop_assert!(self.mapped.contains(page), "page {page} is not mapped");
            prop_assert!(self.flights.iter().all(|(_, pages)| !pages.contains(page)), "page {page} twice");
        }
        Ok(())
    }
}

#[derive(Debug, Clone)]
enum Op {
    Alloc(u32),
    FreeSome(Vec<Index>),
    FreeRaw(Vec<u32>),
    Claim(Vec<u32>),
    Pin(Index),
    SetAside(u32),
    ReleaseSetAside,
    SetTarget(u32),
    Back {
        n: u32,
        at_most: u32,
    },
    BackPages(u32),
    Unback {
        keep: u32,
        on_hand: u32,
        at_most: u32,
    },
    /// A driver call ends: so many of its pages are lost, so many stay as they were, the rest is done.
    Land {
        flight: Index,
        lost: usize,
        undone: usize,
    },
    Begin,
    End(u64),
    Clear,
    ClearAll,
}

/// `scale` blocks where a small pool has one.
fn op(scale: u32) -> impl Strategy<Value = Op> {
    // Lost pages stay lost: more of them would leave histories with nothing to do.
    let seldom = |weight| prop_oneof![weight => Just(0usize), 1 => 1usize..3];
    prop_oneof![
        12 => (0u32..20 * scale).prop_map(Op::Alloc),
        8 => prop::collection::vec(any::<Index>(), 0..12 * scale as usize).prop_map(Op::FreeSome),
        2 => prop::collection::vec(0u32..60 * scale, 0..4).prop_map(Op::FreeRaw),
        2 => prop::collection::vec(0u32..60 * scale, 0..4).prop_map(Op::Claim),
        1 => any::<Index>().prop_map(Op::Pin),
        2 => (0u32..8 * scale).prop_map(Op::SetAside),
        2 => Just(Op::ReleaseSetAside),
        5 => prop_oneof![0u32..6, 0u32..14, Just(u32::MAX)].prop_map(Op::SetTarget),
        8 => (0u32..30 * scale, 0u32..6).prop_map(|(n, at_most)| Op::Back { n, at_most }),
        2 => (0u32..6).prop_map(Op::BackPages),
        4 => (0u32..4, 0u32..12 * scale, 0u32..8)
            .prop_map(|(keep, on_hand, at_most)| Op::Unback { keep, on_hand, at_most }),
        14 => (any::<Index>(), seldom(20), seldom(5))
            .prop_map(|(flight, lost, undone)| Op::Land { flight, lost, undone }),
        2 => Just(Op::Begin),
        2 => (0u64..4).prop_map(Op::End),
        1 => Just(Op::Clear),
        1 => Just(Op::ClearAll),
    ]
}

/// The ledger under test, the reference and the device, taken through the same history.
struct Run {
    ledger: Ledger,
    reference: Reference,
    device: Device,
}

impl Run {
    fn new(layout: Layout, policy: RetirePolicy) -> Self {
        Run {
            ledger: Ledger::new(layout, policy).unwrap(),
            reference: Reference::new(layout, policy),
            device: Device::default(),
        }
    }

    fn step(&mut self, op: Op) -> Result<(), TestCaseError> {
        let Run { ledger, reference, .. } = self;
        let before = ledger.clone();
        match op {
            Op::Alloc(n) => {
                let mut ids = vec![77];
                let expected = reference.alloc(n as usize);
                prop_assert_eq!(ledger.alloc_into(n, &mut ids), expected.is_some());
                prop_assert_eq!(before.clone().alloc(n), expected.clone());
                prop_assert_eq!(ids, [vec![77], expected.clone().unwrap_or_default()].concat());
                if expected.is_none() {
                    prop_assert_eq!(&*ledger, &before);
                }
            }
            Op::FreeSome(picks) => self.free_some(&picks)?,
            Op::FreeRaw(ids) => {
                let foreseen = ledger.emptied_by(&ids).map(|pages| pages as usize);
                let expected = reference.emptied_by_if_held(&ids);
                prop_assert_eq!(foreseen.ok(), expected);
                let freed = ledger.free(&ids);
                prop_assert_eq!(freed.is_ok(), reference.free(&ids));
                if freed.is_err() {
                    prop_assert_eq!(&*ledger, &before);
                }
            }
            Op::Claim(ids) => self.claim(&ids)?,
            Op::Pin(pick) => {
                let held: BTreeSet<u32> = reference.held.iter().copied().collect();
                if !held.is_empty() {
                    let id = *pick.get(&held.into_iter().collect::<Vec<_>>());
                    ledger.pin(id).unwrap();
                    reference.pinned = Some(id);
                }
            }
            Op::SetAside(n) => {
                let may = n as usize <= reference.issuable();
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
            Op::SetTarget(pages) => {
                ledger.set_target(pages);
                reference.target = reference.states.len().min(pages as usize);
                prop_assert_eq!(ledger.target() as usize, reference.target);
            }
            Op::Back { .. } | Op::BackPages(_) | Op::Unback { .. } => self.plan(op)?,
            Op::Land { flight, lost, undone } => {
                if !self.device.flights.is_empty() {
                    let at = flight.index(self.device.flights.len());
                    self.land(at, lost, undone)?;
                }
            }
            Op::Begin => {
                reference.begun += 1;
                prop_assert_eq!(ledger.begin_epoch(), reference.begun);
            }
            Op::End(behind) => self.end(behind)?,
            Op::Clear | Op::ClearAll => {
                if matches!(op, Op::ClearAll) {
                    ledger.clear_all();
                    reference.pinned = None;
                } else {
                    ledger.clear();
                }
                reference.clear();
            }
        }
        Ok(())
    }

    fn free_some(&mut self, picks: &[Index]) -> Result<(), TestCaseError> {
        let Run { ledger, reference, .. } = self;
        let held: BTreeSet<u32> =
            reference.held.iter().copied().filter(|id| reference.pinned != Some(*id)).collect();
        let held: Vec<u32> = held.into_iter().collect();
        if held.is_empty() {
            return Ok(());
        }
        // In the order of the picks, so that ids of a page need not be neighbours.
        let mut seen = HashSet::new();
        let mut ids: Vec<u32> = picks.iter().map(|pick| *pick.get(&held)).collect();
        ids.retain(|id| seen.insert(*id));
        prop_assert_eq!(ledger.emptied_by(&ids).unwrap() as usize, reference.emptied_by(&ids));
        prop_assert!(reference.free(&ids));
        let outcome = ledger.free(&ids).unwrap();
        for page in outcome.retired {
            prop_assert!(matches!(reference.states[page as usize], PageState::Retired(_)));
        }
        for page in outcome.reserved {
            prop_assert_eq!(reference.states[page as usize], PageState::Reserved);
        }
        Ok(())
    }

    fn claim(&mut self, ids: &[u32]) -> Result<(), TestCaseError> {
        let Run { ledger, reference, device } = self;
        let before = ledger.clone();
        let valid: HashSet<u32> = reference.ids().collect();
        let unique: HashSet<u32> = ids.iter().copied().collect();
        let states: Vec<PageState> = ids
            .iter()
            .filter(|id| valid.contains(id))
            .map(|&id| reference.states[reference.page(id)])
            .collect();
        let may = unique.len() == ids.len()
            && ids.iter().all(|&id| valid.contains(&id) && reference.is_free(id))
            && states.iter().all(|state| !matches!(state, PageState::Quarantined | PageState::Withdrawn));
        let plan = ledger.plan_claim(ids);
        prop_assert_eq!(plan.is_ok(), may);
        match plan {
            Ok(ClaimPlan::InMotion) => {
                prop_assert!(states.iter().any(|state| state.is_in_motion()));
                prop_assert_eq!(&*ledger, &before);
                prop_assert!(ledger.claim(ids).is_err());
                prop_assert_eq!(&*ledger, &before);
            }
            Ok(plan) => {
                if let ClaimPlan::Map(pages) = plan {
                    device.begin_mapping(&pages)?;
                    for &page in &pages {
                        prop_assert_eq!(reference.states[page as usize], PageState::Free);
                        reference.states[page as usize] = PageState::Reserved;
                        device.mapped.insert(page);
                    }
                    ledger.backed(&pages).unwrap();
                    reference.follow_target();
                }
                ledger.claim(ids).unwrap();
                for &id in ids {
                    let page = reference.page(id);
                    reference.states[page] = PageState::InUse;
                    reference.held.insert(id);
                }
            }
            Err(error) => {
                prop_assert_eq!(&*ledger, &before);
                prop_assert!(ledger.claim(ids).is_err(), "{} for a plan, not for a claim", error);
                prop_assert_eq!(&*ledger, &before);
            }
        }
        Ok(())
    }

    fn plan(&mut self, op: Op) -> Result<(), TestCaseError> {
        let Run { ledger, reference, device } = self;
        let (maps, pages, expected) = match op {
            Op::Back { n, at_most } => {
                let short = (n as usize).saturating_sub(reference.on_hand());
                let expected = reference.plan(short, at_most as usize);
                (true, ledger.plan_backing(n, at_most), expected)
            }
            Op::BackPages(count) => {
                (true, ledger.plan_pages(count), reference.plan(usize::MAX, count as usize))
            }
            Op::Unback { keep, on_hand, at_most } => {
                let surplus = ledger.has_surplus(keep, on_hand);
                let first = ledger.clone().plan_unbacking(keep, on_hand, 1);
                prop_assert_eq!(surplus, !first.is_empty());
                let expected = reference.plan_unbacking(keep, on_hand, at_most);
                (false, ledger.plan_unbacking(keep, on_hand, at_most), expected)
            }
            _ => return Ok(()),
        };
        prop_assert_eq!(&pages, &expected);
        if maps {
            device.begin_mapping(&pages)?;
        } else {
            device.begin_unmapping(&pages)?;
        }
        if !pages.is_empty() {
            device.flights.push((maps, pages));
        }
        Ok(())
    }

    fn land(&mut self, at: usize, lost: usize, undone: usize) -> Result<(), TestCaseError> {
        let Run { ledger, reference, device } = self;
        let (maps, pages) = device.flights.swap_remove(at);
        let (lost, rest) = pages.split_at(lost.min(pages.len()));
        device.lost.extend(lost);
        lost.iter().for_each(|&page| reference.states[page as usize] = PageState::Quarantined);
        if maps && (undone > 0 || !lost.is_empty()) {
            ledger.backing_failed(&pages, lost).unwrap();
            rest.iter().for_each(|&page| reference.states[page as usize] = PageState::Free);
        } else if maps {
            ledger.backed(&pages).unwrap();
            rest.iter().for_each(|&page| reference.states[page as usize] = PageState::Reserved);
            device.mapped.extend(rest);
        } else {
            let (kept, gone) = rest.split_at(undone.min(rest.len()));
            if lost.is_empty() && kept.is_empty() {
                ledger.unbacked(&pages).unwrap();
            } else {
                ledger.unbacking_failed(&pages, lost, kept).unwrap();
            }
            kept.iter().for_each(|&page| reference.states[page as usize] = PageState::Reserved);
            gone.iter().for_each(|&page| reference.states[page as usize] = PageState::Free);
            device.mapped.retain(|page| !gone.contains(page) && !lost.contains(page));
        }
        Ok(())
    }

    fn end(&mut self, behind: u64) -> Result<(), TestCaseError> {
        let Run { ledger, reference, .. } = self;
        let before = ledger.clone();
        let epoch = (reference.begun + 1).saturating_sub(behind);
        if epoch > reference.begun {
            prop_assert!(ledger.release_through(epoch).is_err());
            prop_assert_eq!(&*ledger, &before);
            return Ok(());
        }
        reference.ended = reference.ended.max(epoch);
        let ended = reference.ended;
        let released: HashSet<u32> = ledger.release_through(epoch).unwrap().into_iter().collect();
        for (page, state) in (0..).zip(&mut reference.states) {
            let settles = matches!(*state, PageState::Retired(at) if at <= ended);
            prop_assert_eq!(settles, released.contains(&page));
            if settles {
                *state = PageState::Reserved;
            }
        }
        Ok(())
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        let Run { ledger, reference, device } = self;
        ledger.check().map_err(|error| TestCaseError::fail(error.to_string()))?;
        for (page, &state) in reference.states.iter().enumerate() {
            prop_assert_eq!(ledger.state(page as u32), Some(state));
            prop_assert_eq!(ledger.is_draining(page as u32), reference.draining.contains(&page));
            let usable = reference.capacity(page);
            let occupied = usable - reference.free_in(page).len();
            prop_assert_eq!(ledger.occupancy(page as u32), Some((occupied as u32, usable as u32)));
            let mapped = state.is_backed() || state == PageState::Unmapping;
            prop_assert_eq!(device.mapped.contains(&(page as u32)), mapped);
        }
        prop_assert_eq!(ledger.excess() as usize, reference.excess());
        let occupied = ledger.page_counts().occupied() as usize;
        prop_assert_eq!(occupied, reference.occupied());
        let bound = reference.effective_target().max(occupied);
        prop_assert!(ledger.page_counts().free as usize + occupied <= bound);
        prop_assert_eq!(ledger.page_counts().total() as usize, reference.states.len());
        prop_assert_eq!(ledger.held_blocks() as usize, reference.held.len());
        prop_assert_eq!(ledger.backed_free_blocks() as usize, reference.on_hand());
        self.compare_blocks()?;
        let mut free: Vec<u32> = reference.ids().filter(|id| !reference.held.contains(id)).collect();
        free.retain(|&id| reference.states[reference.page(id)] != PageState::Quarantined);
        prop_assert_eq!(ledger.free_ids(), free);
        Ok(())
    }

    fn compare_blocks(&self) -> Result<(), TestCaseError> {
        let Run { ledger, reference, .. } = self;
        let is = |wanted: PageState| reference.free_where(|state| state == wanted) as u32;
        let in_motion = is(PageState::Mapping) + is(PageState::Unmapping);
        let issuable = reference.issuable() as u32;
        let counts = BlockCounts {
            backed: issuable,
            draining: reference.free_where(PageState::is_backed) as u32 - issuable,
            unbacked: is(PageState::Free),
            in_motion,
            withdrawn: is(PageState::Withdrawn),
            quarantined: is(PageState::Quarantined),
        };
        prop_assert_eq!(ledger.block_counts(), counts);
        let coming = if reference.excess() == 0 { in_motion } else { 0 };
        let available = reference.on_hand() as u32 + counts.unbacked + coming;
        prop_assert_eq!(ledger.available_blocks(), available);
        Ok(())
    }
}

fn run(layout: Layout, policy: RetirePolicy, ops: Vec<Op>) -> Result<(), TestCaseError> {
    let mut run = Run::new(layout, policy);
    for op in ops {
        run.step(op)?;
        run.reference.follow_target();
        run.compare()?;
    }
    Ok(())
}

fn layouts(num_blocks: Range<u32>, blocks_per_page: Range<u32>) -> impl Strategy<Value = Layout> {
    (num_blocks, blocks_per_page, 0u32..3, any::<bool>()).prop_map(
        |(num_blocks, blocks_per_page, padding, highest)| {
            let order = if highest { PageOrder::HighestFirst } else { PageOrder::LowestFirst };
            Layout { num_blocks, blocks_per_page, ids_per_page: blocks_per_page + padding, order }
        },
    )
}

fn policies() -> impl Strategy<Value = RetirePolicy> {
    prop_oneof![Just(RetirePolicy::Synchronous), Just(RetirePolicy::Asynchronous)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_reference(
        layout in layouts(1..40, 1..7),
        policy in policies(),
        ops in prop::collection::vec(op(1), 1..80),
    ) {
        run(layout, policy, ops)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Pages of more than one word of bits, and pools of more than one level.
    #[test]
    fn agrees_over_many_blocks(
        layout in layouts(100..500, 30..140),
        policy in policies(),
        ops in prop::collection::vec(op(8), 1..60),
    ) {
        run(layout, policy, ops)?;
    }
}
