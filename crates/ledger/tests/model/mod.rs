//! What the ledger is compared with, call by call: by random histories (`reference.rs`) and by the fuzzer (`fuzz/`, which
//! includes this folder). A difference is a panic.
#![allow(clippy::unwrap_used)]

mod reference;

use std::collections::{BTreeSet, HashSet};

use kvcached_ledger::{BlockCounts, ClaimPlan, Layout, Ledger, PageState, RetirePolicy};

use reference::Reference;

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
    fn begin_mapping(&mut self, pages: &[u32]) {
        for page in pages {
            assert!(!self.mapped.contains(page), "page {page} is mapped already");
            assert!(!self.lost.contains(page), "page {page} is lost");
            assert!(self.flights.iter().all(|(_, pages)| !pages.contains(page)), "page {page} twice");
        }
    }

    fn begin_unmapping(&mut self, pages: &[u32]) {
        for page in pages {
            assert!(self.mapped.contains(page), "page {page} is not mapped");
            assert!(self.flights.iter().all(|(_, pages)| !pages.contains(page)), "page {page} twice");
        }
    }
}

/// One call of a history. A pick is taken modulo the number of what there is to pick from.
#[derive(Debug, Clone)]
pub enum Op {
    Alloc(u32),
    /// Held blocks, by picks.
    FreeSome(Vec<usize>),
    FreeRaw(Vec<u32>),
    Claim(Vec<u32>),
    Pin(usize),
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
        flight: usize,
        lost: usize,
        undone: usize,
    },
    /// A report of driver work on pages of which one at least is not under way: refused.
    Misreport(Vec<u32>),
    Begin,
    /// So many epochs before the next one.
    End(u64),
    Clear,
    ClearAll,
}

/// The ledger under test, the reference and the device, taken through the same history.
pub struct Run {
    ledger: Ledger,
    reference: Reference,
    device: Device,
}

impl Run {
    pub fn new(layout: Layout, policy: RetirePolicy) -> Self {
        Run {
            ledger: Ledger::new(layout, policy).unwrap(),
            reference: Reference::new(layout, policy),
            device: Device::default(),
        }
    }

    /// One call on both, and what they say then.
    pub fn step(&mut self, op: Op) {
        self.call(op);
        self.reference.follow_target();
        self.compare();
    }

    fn call(&mut self, op: Op) {
        let Run { ledger, reference, .. } = self;
        let before = ledger.clone();
        match op {
            Op::Alloc(n) => {
                let mut ids = vec![77];
                let expected = reference.alloc(n as usize);
                assert_eq!(ledger.alloc_into(n, &mut ids), expected.is_some());
                assert_eq!(before.clone().alloc(n), expected.clone());
                assert_eq!(ids, [vec![77], expected.clone().unwrap_or_default()].concat());
                if expected.is_none() {
                    assert_eq!(&*ledger, &before);
                }
            }
            Op::FreeSome(picks) => self.free_some(&picks),
            Op::FreeRaw(ids) => {
                let foreseen = ledger.emptied_by(&ids).map(|pages| pages as usize);
                let expected = reference.emptied_by_if_held(&ids);
                assert_eq!(foreseen.ok(), expected);
                let freed = ledger.free(&ids);
                assert_eq!(freed.is_ok(), reference.free(&ids));
                if freed.is_err() {
                    assert_eq!(&*ledger, &before);
                }
            }
            Op::Claim(ids) => self.claim(&ids),
            Op::Pin(pick) => {
                let held: BTreeSet<u32> = reference.held.iter().copied().collect();
                if !held.is_empty() {
                    let id = of(&held.into_iter().collect::<Vec<_>>(), pick);
                    ledger.pin(id).unwrap();
                    reference.pinned = Some(id);
                }
            }
            Op::SetAside(n) => {
                let may = n as usize <= reference.issuable();
                assert_eq!(ledger.set_aside(n), may);
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
                assert_eq!(ledger.target() as usize, reference.target);
            }
            Op::Back { .. } | Op::BackPages(_) | Op::Unback { .. } => self.plan(op),
            Op::Land { flight, lost, undone } => {
                if !self.device.flights.is_empty() {
                    let at = flight % self.device.flights.len();
                    self.land(at, lost, undone);
                }
            }
            Op::Misreport(pages) => self.misreport(&pages),
            Op::Begin => {
                reference.begun += 1;
                assert_eq!(ledger.begin_epoch(), reference.begun);
            }
            Op::End(behind) => self.end(behind),
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
    }

    fn free_some(&mut self, picks: &[usize]) {
        let Run { ledger, reference, .. } = self;
        let held: BTreeSet<u32> =
            reference.held.iter().copied().filter(|id| reference.pinned != Some(*id)).collect();
        let held: Vec<u32> = held.into_iter().collect();
        if held.is_empty() {
            return;
        }
        // In the order of the picks, so that ids of a page need not be neighbours.
        let mut seen = HashSet::new();
        let mut ids: Vec<u32> = picks.iter().map(|&pick| of(&held, pick)).collect();
        ids.retain(|id| seen.insert(*id));
        assert_eq!(ledger.emptied_by(&ids).unwrap() as usize, reference.emptied_by(&ids));
        assert!(reference.free(&ids));
        let outcome = ledger.free(&ids).unwrap();
        for page in outcome.retired {
            assert!(matches!(reference.states[page as usize], PageState::Retired(_)));
        }
        for page in outcome.reserved {
            assert_eq!(reference.states[page as usize], PageState::Reserved);
        }
    }

    fn claim(&mut self, ids: &[u32]) {
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
        assert_eq!(plan.is_ok(), may);
        match plan {
            Ok(ClaimPlan::InMotion) => {
                assert!(states.iter().any(|state| state.is_in_motion()));
                assert_eq!(&*ledger, &before);
                assert!(ledger.claim(ids).is_err());
                assert_eq!(&*ledger, &before);
            }
            Ok(plan) => {
                if let ClaimPlan::Map(pages) = plan {
                    device.begin_mapping(&pages);
                    for &page in &pages {
                        assert_eq!(reference.states[page as usize], PageState::Free);
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
                assert_eq!(&*ledger, &before);
                assert!(ledger.claim(ids).is_err(), "{} for a plan, not for a claim", error);
                assert_eq!(&*ledger, &before);
            }
        }
    }

    fn plan(&mut self, op: Op) {
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
                assert_eq!(surplus, !first.is_empty());
                let expected = reference.plan_unbacking(keep, on_hand, at_most);
                (false, ledger.plan_unbacking(keep, on_hand, at_most), expected)
            }
            _ => return,
        };
        assert_eq!(&pages, &expected);
        if maps {
            device.begin_mapping(&pages);
        } else {
            device.begin_unmapping(&pages);
        }
        if !pages.is_empty() {
            device.flights.push((maps, pages));
        }
    }

    fn land(&mut self, at: usize, lost: usize, undone: usize) {
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
    }

    fn misreport(&mut self, pages: &[u32]) {
        let Run { ledger, reference, .. } = self;
        let before = ledger.clone();
        let unique: HashSet<u32> = pages.iter().copied().collect();
        let all_are = |state| pages.iter().all(|&page| reference.states.get(page as usize) == Some(&state));
        if unique.len() < pages.len() || !all_are(PageState::Mapping) {
            assert!(ledger.backed(pages).is_err());
            assert!(ledger.backing_failed(pages, &[]).is_err());
        }
        if unique.len() < pages.len() || !all_are(PageState::Unmapping) {
            assert!(ledger.unbacked(pages).is_err());
            assert!(ledger.unbacking_failed(pages, &[], pages).is_err());
        }
        assert_eq!(ledger, &before);
    }

    fn end(&mut self, behind: u64) {
        let Run { ledger, reference, .. } = self;
        let before = ledger.clone();
        let epoch = (reference.begun + 1).saturating_sub(behind);
        if epoch > reference.begun {
            assert!(ledger.release_through(epoch).is_err());
            assert_eq!(&*ledger, &before);
            return;
        }
        reference.ended = reference.ended.max(epoch);
        let ended = reference.ended;
        let released: HashSet<u32> = ledger.release_through(epoch).unwrap().into_iter().collect();
        for (page, state) in (0..).zip(&mut reference.states) {
            let settles = matches!(*state, PageState::Retired(at) if at <= ended);
            assert_eq!(settles, released.contains(&page));
            if settles {
                *state = PageState::Reserved;
            }
        }
    }

    fn compare(&self) {
        let Run { ledger, reference, device } = self;
        assert_eq!(ledger.check(), Ok(()));
        for (page, &state) in reference.states.iter().enumerate() {
            assert_eq!(ledger.state(page as u32), Some(state));
            assert_eq!(ledger.is_draining(page as u32), reference.draining.contains(&page));
            let usable = reference.capacity(page);
            let occupied = usable - reference.free_in(page).len();
            assert_eq!(ledger.occupancy(page as u32), Some((occupied as u32, usable as u32)));
            let mapped = state.is_backed() || state == PageState::Unmapping;
            assert_eq!(device.mapped.contains(&(page as u32)), mapped);
        }
        assert_eq!(ledger.excess() as usize, reference.excess());
        let occupied = ledger.page_counts().occupied() as usize;
        assert_eq!(occupied, reference.occupied());
        let bound = reference.effective_target().max(occupied);
        assert!(ledger.page_counts().free as usize + occupied <= bound);
        assert_eq!(ledger.page_counts().total() as usize, reference.states.len());
        assert_eq!(ledger.held_blocks() as usize, reference.held.len());
        assert_eq!(ledger.backed_free_blocks() as usize, reference.on_hand());
        self.compare_blocks();
        let mut free: Vec<u32> = reference.ids().filter(|id| !reference.held.contains(id)).collect();
        free.retain(|&id| reference.states[reference.page(id)] != PageState::Quarantined);
        assert_eq!(ledger.free_ids(), free);
    }

    fn compare_blocks(&self) {
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
        assert_eq!(ledger.block_counts(), counts);
        let coming = if reference.excess() == 0 { in_motion } else { 0 };
        let available = reference.on_hand() as u32 + counts.unbacked + coming;
        assert_eq!(ledger.available_blocks(), available);
    }
}

fn of<T: Copy>(all: &[T], pick: usize) -> T {
    all[pick % all.len()]
}
