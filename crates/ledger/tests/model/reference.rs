//! The ledger's answers the slow way.

use std::collections::{BTreeSet, HashSet};

use kvcached_ledger::{Layout, PageOrder, PageState, RetirePolicy};

/// The slow way: every question is answered by a scan over all pages or all blocks.
pub struct Reference {
    pub layout: Layout,
    pub policy: RetirePolicy,
    pub states: Vec<PageState>,
    pub held: HashSet<u32>,
    pub aside: BTreeSet<u32>,
    pub pinned: Option<u32>,
    pub target: usize,
    pub draining: BTreeSet<usize>,
    pub begun: u64,
    pub ended: u64,
}

impl Reference {
    pub fn new(layout: Layout, policy: RetirePolicy) -> Self {
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

    pub fn ids(&self) -> impl Iterator<Item = u32> + use<> {
        let Layout { num_blocks, blocks_per_page: m, ids_per_page, .. } = self.layout;
        (0..num_blocks).map(move |block| block / m * ids_per_page + block % m)
    }

    pub fn page(&self, id: u32) -> usize {
        (id / self.layout.ids_per_page) as usize
    }

    pub fn is_free(&self, id: u32) -> bool {
        !self.held.contains(&id) && !self.aside.contains(&id)
    }

    pub fn free_in(&self, page: usize) -> Vec<u32> {
        let first = page as u32 * self.layout.ids_per_page;
        (first..).take(self.capacity(page)).filter(|&id| self.is_free(id)).collect()
    }

    pub fn capacity(&self, page: usize) -> usize {
        let before = page as u32 * self.layout.blocks_per_page;
        self.layout.blocks_per_page.min(self.layout.num_blocks - before) as usize
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

    pub fn free_where(&self, wanted: impl Fn(PageState) -> bool) -> usize {
        self.pages_where(wanted).into_iter().map(|page| self.free_in(page).len()).sum()
    }

    pub fn occupied(&self) -> usize {
        self.pages_where(|state| !matches!(state, PageState::Free | PageState::Withdrawn)).len()
    }

    pub fn effective_target(&self) -> usize {
        if self.pinned.is_some() { self.target.max(1) } else { self.target }
    }

    pub fn excess(&self) -> usize {
        self.occupied().saturating_sub(self.effective_target())
    }

    pub fn may_issue(&self, page: usize) -> bool {
        match self.states[page] {
            PageState::InUse => !self.draining.contains(&page),
            PageState::Reserved | PageState::Retired(_) => self.excess() == 0,
            _ => false,
        }
    }

    pub fn issuable(&self) -> usize {
        let pages = self.ordered().into_iter().filter(|&page| self.may_issue(page));
        pages.map(|page| self.free_in(page).len()).sum()
    }

    pub fn on_hand(&self) -> usize {
        self.issuable() + self.aside.len()
    }

    /// What every call ends with: free, withdrawn and draining pages follow the target, one page at a time.
    pub fn follow_target(&mut self) {
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
    pub fn emptied_by(&self, ids: &[u32]) -> usize {
        let rest = |page: usize| {
            let free = self.free_in(page).len();
            self.capacity(page) - free - ids.iter().filter(|&&id| self.page(id) == page).count()
        };
        let touched: BTreeSet<usize> = ids.iter().map(|&id| self.page(id)).collect();
        touched.into_iter().filter(|&page| rest(page) == 0).count()
    }

    pub fn emptied_by_if_held(&self, ids: &[u32]) -> Option<usize> {
        let unique: HashSet<_> = ids.iter().copied().collect();
        let free = |id: &u32| self.held.contains(id) && self.pinned != Some(*id);
        (unique.len() == ids.len() && ids.iter().all(free)).then(|| self.emptied_by(ids))
    }

    /// Marks the preferred free pages as mapping until `short` blocks are covered.
    pub fn plan(&mut self, mut short: usize, at_most: usize) -> Vec<u32> {
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

    pub fn clear(&mut self) {
        self.held.retain(|id| self.pinned == Some(*id));
        self.aside.clear();
        let pinned = self.pinned.map(|id| self.page(id));
        for page in self.pages_where(PageState::is_backed) {
            if pinned != Some(page) {
                self.states[page] = PageState::Reserved;
            }
        }
    }

    pub fn plan_unbacking(&mut self, keep: u32, on_hand: u32, at_most: u32) -> Vec<u32> {
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

    pub fn take(&mut self, n: usize) -> Vec<u32> {
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

    pub fn alloc(&mut self, n: usize) -> Option<Vec<u32>> {
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

    pub fn emptied(&mut self, page: usize) {
        let outstanding = self.policy == RetirePolicy::Asynchronous && self.begun > self.ended;
        if self.free_in(page).len() == self.capacity(page) {
            self.states[page] =
                if outstanding { PageState::Retired(self.begun) } else { PageState::Reserved };
        }
    }

    pub fn free(&mut self, ids: &[u32]) -> bool {
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
