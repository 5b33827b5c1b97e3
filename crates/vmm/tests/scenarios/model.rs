//! The contract of a range in terms of pages and bytes: what a call must answer, and the state that its answer stands for.
//!
//! Without a failing driver call the answer is foretold. With one, the model takes the answer at its word, if the contract
//! allows it after so many failures, and says what must then be true of every page and every byte.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use kvcached_vmm::sim::FAULT_CODE;
use kvcached_vmm::{
    DriverError, FTensor, Outcome, TransactionError, TransactionId, Unbacked, UnmapFailure, VmmError,
};

use super::scenario::{Answer, Op};
use super::setup::{PAGES, Setup};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Unbacked,
    Mapped,
    Prepared,
    Quarantined,
}

#[derive(Debug, Clone)]
enum Pending {
    Prepared(BTreeSet<u32>),
    /// Committed, with so many handles left to release.
    Half(u64),
}

#[derive(Debug, Clone)]
enum End {
    Committed,
    Aborted,
    /// Aborted, and this is what an abort answers from then on.
    Lost(VmmError),
}

/// What a call does where no driver call fails.
enum Foretold {
    /// It fails, and nothing is done.
    Refused(VmmError),
    /// It answers, and there is nothing to do.
    Idle(Answer),
    Works,
}
use Foretold::{Idle, Refused, Works};

/// Counts are of handles where nothing else is said.
#[derive(Debug, Clone)]
pub struct Model {
    run_bytes: u64,
    runs: u64,
    zero: bool,
    cache_limit: u64,
    pub pages: Vec<State>,
    cached: u64,
    leaked: u64,
    pending: Option<(TransactionId, Pending)>,
    ended: BTreeMap<TransactionId, End>,
    /// Driver calls that have failed so far.
    hits: u32,
}

/// What the driver did during a call.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Driver calls that it made.
    pub calls: u32,
    /// Those that failed.
    pub hits: u32,
}

impl Model {
    pub fn new(setup: Setup, range: &FTensor) -> Self {
        let run_bytes = range.geometry().run_bytes();
        Model {
            run_bytes,
            runs: u64::from(range.geometry().runs_per_page()),
            zero: setup.unbacked == Unbacked::Zero,
            cache_limit: setup.cache_bytes(range.driver().granularity()) / run_bytes,
            pages: vec![State::Unbacked; PAGES as usize],
            cached: 0,
            leaked: 0,
            pending: None,
            ended: BTreeMap::new(),
            hits: 0,
        }
    }

    pub fn count(&self, state: State) -> usize {
        self.pages.iter().filter(|s| **s == state).count()
    }

    pub fn pages_in(&self, state: State) -> Vec<u32> {
        (0..).zip(&self.pages).filter(|(_, s)| **s == state).map(|(page, _)| page).collect()
    }

    pub fn has_leaked(&self) -> bool {
        self.leaked > 0
    }

    pub fn is_half_committed(&self) -> bool {
        matches!(self.pending, Some((_, Pending::Half(_))))
    }

    /// Whether quarantined pages are as unbacked ones: a call that failed once does not fail when it is tried again for them.
    pub fn is_lost_at_rest(&self) -> bool {
        self.hits <= 1
    }

    /// Takes a call's answer, asserts that it is allowed, and that the range is as it says.
    pub fn step(&mut self, op: &Op, got: &Result<Answer, VmmError>, effort: Effort, range: &FTensor) {
        let none = Effort { calls: 0, hits: 0 };
        self.hits += effort.hits;
        let before = (self.cached, self.leaked);
        // How many handles may be kept for later, and how many be leaked, after the call.
        let (mut cached, mut leaked) = (before.0..=before.0, before.1..=before.1);
        match self.foretell(op) {
            Refused(error) => {
                assert_eq!(got, &Err(error));
                assert_eq!(
                    (effort.calls, effort.hits),
                    (none.calls, none.hits),
                    "a refused call does nothing"
                );
            }
            Idle(answer) => {
                assert_eq!(got, &Ok(answer));
                assert_eq!((effort.calls, effort.hits), (none.calls, none.hits), "there is nothing to do");
                if let Op::Abort(id) = op {
                    self.ended.entry(*id).or_insert(End::Aborted);
                }
            }
            Works => match op {
                Op::Map(pages) => cached = self.map(pages, got, effort.hits),
                Op::Unmap(pages) => (cached, leaked) = self.unmap(pages, got, effort.hits),
                Op::Prepare(id, pages) => self.prepare(*id, pages, got, effort.hits),
                Op::Commit(id) => self.commit(*id, got, effort.hits),
                Op::Abort(id) => self.abort(*id, got, effort.hits),
                Op::Trim => cached = self.trim(got, effort.hits),
            },
        }
        self.check(range, cached, leaked);
    }

    /// Asserts that memory which the device holds is all accounted for.
    pub fn check_held(&self, range: &FTensor, held_bytes: u64) {
        let known = range.mapped_bytes()
            + range.cached_bytes()
            + range.leaked_bytes()
            + range.retained_bytes()
            + range.zero_bytes();
        let lost = if self.is_lost_at_rest() { 0 } else { self.count(State::Quarantined) as u64 };
        let may_be_lost = lost * self.runs * self.run_bytes;
        assert!((known..=known + may_be_lost).contains(&held_bytes), "{held_bytes} held, {known} known");
    }

    // ---------------------------------------------------------------- without failures

    fn foretell(&self, op: &Op) -> Foretold {
        match op {
            Op::Map(pages) => match self.unusable(pages) {
                Some(error) => Refused(error),
                None if self.distinct(pages, State::Unbacked).is_empty() => Idle(Answer::New(vec![])),
                None => Works,
            },
            Op::Unmap(pages) => match self.unusable(pages).or_else(|| self.missing(pages)) {
                Some(error) => Refused(error),
                None if pages.is_empty() && self.leaked == 0 => Idle(Answer::Done),
                None => Works,
            },
            Op::Prepare(id, pages) => self.foretell_prepare(*id, pages),
            Op::Commit(id) => match (&self.pending, self.ended.get(id)) {
                (Some((pending, _)), _) if pending == id => Works,
                (_, Some(End::Committed)) => Idle(Answer::Done),
                (_, Some(_)) => Refused(decided(*id, Outcome::Aborted)),
                (_, None) => Refused(TransactionError::Unknown { id: *id }.into()),
            },
            Op::Abort(id) => match (&self.pending, self.ended.get(id)) {
                (Some((pending, Pending::Prepared(_))), _) if pending == id => Works,
                (Some((pending, _)), _) if pending == id => Refused(decided(*id, Outcome::Committed)),
                (_, Some(End::Committed)) => Refused(decided(*id, Outcome::Committed)),
                (_, Some(End::Lost(error))) => Refused(error.clone()),
                (_, Some(End::Aborted) | None) => Idle(Answer::Done),
            },
            Op::Trim if self.cached == 0 => Idle(Answer::Released(0)),
            Op::Trim => Works,
        }
    }

    fn foretell_prepare(&self, id: TransactionId, pages: &[u32]) -> Foretold {
        match (&self.pending, self.ended.get(&id)) {
            (Some((pending, Pending::Prepared(kept))), _) if *pending == id => {
                match *kept == BTreeSet::from_iter(pages.iter().copied()) {
                    true => Idle(Answer::Done),
                    false => Refused(TransactionError::OtherPages { id }.into()),
                }
            }
            (Some((pending, Pending::Half(_))), _) if *pending == id => {
                Refused(decided(id, Outcome::Committed))
            }
            (_, Some(End::Committed)) => Refused(decided(id, Outcome::Committed)),
            (_, Some(_)) => Refused(decided(id, Outcome::Aborted)),
            (Some((pending, _)), None) => Refused(TransactionError::Pending { id, pending: *pending }.into()),
            (None, None) => match self.unusable(pages).or_else(|| self.missing(pages)) {
                Some(error) => Refused(error),
                None => Works,
            },
        }
    }

    /// Why pages can be neither mapped nor unmapped.
    fn unusable(&self, pages: &[u32]) -> Option<VmmError> {
        pages.iter().find_map(|&page| match self.pages.get(page as usize) {
            None => Some(VmmError::PageOutOfRange { page, num_pages: PAGES }),
            Some(State::Prepared) => Some(VmmError::InTransaction { page }),
            Some(State::Quarantined) => Some(VmmError::InQuarantine { page }),
            Some(State::Unbacked | State::Mapped) => None,
        })
    }

    fn missing(&self, pages: &[u32]) -> Option<VmmError> {
        let missing: Vec<u32> =
            pages.iter().copied().filter(|p| self.pages[*p as usize] == State::Unbacked).collect();
        (!missing.is_empty()).then_some(VmmError::NotMapped { pages: missing })
    }

    /// Those of `pages` in this state, each once, in the order given.
    fn distinct(&self, pages: &[u32], state: State) -> Vec<u32> {
        let mut distinct = vec![];
        for &page in pages {
            if self.pages[page as usize] == state && !distinct.contains(&page) {
                distinct.push(page);
            }
        }
        distinct
    }

    // ---------------------------------------------------------------- with failures

    fn map(&mut self, pages: &[u32], got: &Result<Answer, VmmError>, hits: u32) -> RangeInclusive<u64> {
        let new = self.distinct(pages, State::Unbacked);
        let taken = self.cached.min(new.len() as u64 * self.runs);
        // A page that is undone releases memory which it took from the cache.
        let rest = self.cached - taken..=self.cached;
        match got {
            Ok(answer) => {
                assert_eq!((answer, hits), (&Answer::New(new.clone()), 0));
                self.set(&new, State::Mapped);
                self.cached - taken..=self.cached - taken
            }
            Err(VmmError::Driver { page, source }) => {
                assert_eq!(hits, 1, "a failure of the undo is not told");
                is_fault(source);
                assert!(page.map_or(self.zero, |page| new.contains(&page)), "{page:?}");
                rest
            }
            Err(VmmError::Quarantined { pages: lost, cause, source }) => {
                is_fault(cause);
                is_fault(source);
                self.lose(lost, &new, hits - 1);
                rest
            }
            other => panic!("a map answers {other:?}"),
        }
    }

    fn unmap(
        &mut self,
        pages: &[u32],
        got: &Result<Answer, VmmError>,
        hits: u32,
    ) -> (RangeInclusive<u64>, RangeInclusive<u64>) {
        let all = self.distinct(pages, State::Mapped);
        let room = (self.cache_limit - self.cached) / self.runs;
        let kept = self.cached + room.min(all.len() as u64) * self.runs;
        // Whatever is leaked then was tried by this call: a failure each.
        let most = u64::from(hits);
        match got {
            Ok(answer) => {
                assert_eq!(answer, &Answer::Done);
                self.set(&all, State::Unbacked);
                match hits {
                    0 => (kept..=kept, 0..=0),
                    // Clearing failed, or what an earlier call leaked could not be released yet.
                    _ => {
                        assert!(room > 0 || self.leaked > 0, "a failure is not told");
                        (self.cached..=kept, 0..=most)
                    }
                }
            }
            Err(VmmError::Driver { page: None, source }) if self.zero => {
                is_fault(source);
                assert_eq!(hits, 1);
                (self.cached..=self.cached, self.leaked..=self.leaked)
            }
            Err(VmmError::Unmap(failure)) => {
                let UnmapFailure { unmapped, quarantined, still_mapped, leaked, source } = &**failure;
                is_fault(source);
                assert_eq!([&unmapped[..], quarantined, still_mapped].concat(), all);
                assert!(leaked.iter().all(|page| unmapped.contains(page)));
                assert!(quarantined.len() <= 1, "it goes on after a failed unmap");
                assert!(!quarantined.is_empty() || still_mapped.is_empty(), "it stops without a reason");
                let told = (quarantined.len() + leaked.len()) as u64;
                assert!((1..=most).contains(&told), "{told} failures are told of {most}");
                self.set(unmapped, State::Unbacked);
                self.set(quarantined, State::Quarantined);
                (self.cached..=kept, leaked.len() as u64..=most - quarantined.len() as u64)
            }
            other => panic!("an unmap answers {other:?}"),
        }
    }

    fn prepare(&mut self, id: TransactionId, pages: &[u32], got: &Result<Answer, VmmError>, hits: u32) {
        let all = self.distinct(pages, State::Mapped);
        match got {
            Ok(answer) => {
                assert_eq!((answer, hits), (&Answer::Done, 0));
                self.set(&all, State::Prepared);
                self.pending = Some((id, Pending::Prepared(all.into_iter().collect())));
            }
            Err(VmmError::Driver { page: None, source }) if self.zero => {
                is_fault(source);
                assert_eq!(hits, 1);
            }
            Err(VmmError::Unmap(failure)) => {
                let UnmapFailure { unmapped, quarantined, still_mapped, leaked, source } = &**failure;
                is_fault(source);
                assert_eq!((unmapped, leaked), (&vec![], &vec![]), "it is all or nothing");
                let mapped: Vec<u32> = all.iter().copied().filter(|p| !quarantined.contains(p)).collect();
                assert_eq!(still_mapped, &mapped);
                // Zeros that could not be laid again are taken away, and the memory put back.
                if !(quarantined.is_empty() && self.zero && hits > 0) {
                    self.lose(quarantined, &all, hits);
                }
            }
            other => panic!("a prepare answers {other:?}"),
        }
    }

    fn commit(&mut self, id: TransactionId, got: &Result<Answer, VmmError>, hits: u32) {
        let prepared = self.pages_in(State::Prepared);
        let handles = match &self.pending {
            Some((_, Pending::Prepared(pages))) => pages.len() as u64 * self.runs,
            Some((_, Pending::Half(left))) => *left,
            None => unreachable!(),
        };
        self.set(&prepared, State::Unbacked);
        match got {
            Ok(answer) => {
                assert_eq!((answer, hits), (&Answer::Done, 0));
                self.pending = None;
                self.ended.insert(id, End::Committed);
            }
            Err(VmmError::CommitUnfinished { id: named, bytes, source }) => {
                is_fault(source);
                let left = u64::from(hits);
                assert_eq!((*named, *bytes), (id, left * self.run_bytes), "each failure leaves one handle");
                assert!((1..=handles).contains(&left));
                self.pending = Some((id, Pending::Half(left)));
            }
            other => panic!("a commit answers {other:?}"),
        }
    }

    fn abort(&mut self, id: TransactionId, got: &Result<Answer, VmmError>, hits: u32) {
        let prepared = self.pages_in(State::Prepared);
        let end = match got {
            Ok(answer) => {
                assert_eq!((answer, hits), (&Answer::Done, 0));
                self.set(&prepared, State::Mapped);
                End::Aborted
            }
            Err(VmmError::Driver { page: None, source }) if self.zero => {
                is_fault(source);
                assert_eq!(hits, 1);
                return;
            }
            Err(error @ VmmError::AbortLost { id: named, pages, source }) => {
                is_fault(source);
                assert_eq!(*named, id);
                self.set(&prepared, State::Mapped);
                self.lose(pages, &prepared, hits);
                End::Lost(error.clone())
            }
            other => panic!("an abort answers {other:?}"),
        };
        self.pending = None;
        self.ended.insert(id, end);
    }

    fn trim(&mut self, got: &Result<Answer, VmmError>, hits: u32) -> RangeInclusive<u64> {
        match got {
            Ok(answer) => {
                assert_eq!((answer, hits), (&Answer::Released(self.cached * self.run_bytes), 0));
                0..=0
            }
            Err(VmmError::Driver { page: None, source }) => {
                is_fault(source);
                let left = u64::from(hits);
                assert!((1..=self.cached).contains(&left));
                left..=left
            }
            other => panic!("a trim answers {other:?}"),
        }
    }

    // ---------------------------------------------------------------- inside

    /// Asserts that the range says of itself what the model knows, and learns the rest.
    fn check(&mut self, range: &FTensor, cached: RangeInclusive<u64>, leaked: RangeInclusive<u64>) {
        let handles = |bytes: u64| {
            assert!(bytes.is_multiple_of(self.run_bytes), "{bytes}");
            bytes / self.run_bytes
        };
        assert_eq!(range.mapped_pages(), self.pages_in(State::Mapped));
        assert_eq!(range.quarantined_pages(), self.pages_in(State::Quarantined));
        assert_eq!(handles(range.mapped_bytes()), self.count(State::Mapped) as u64 * self.runs);
        let (retained, releasing) = match &self.pending {
            Some((_, Pending::Prepared(pages))) => (pages.len() as u64 * self.runs, 0),
            Some((_, Pending::Half(left))) => (0, *left),
            None => (0, 0),
        };
        assert_eq!(handles(range.retained_bytes()), retained);
        assert_eq!(handles(range.zero_bytes()), u64::from(self.zero));
        assert_eq!(range.pending_transaction(), self.pending.as_ref().map(|(id, _)| *id));
        (self.cached, self.leaked) =
            (handles(range.cached_bytes()), handles(range.leaked_bytes()) - releasing);
        assert!(cached.contains(&self.cached), "{} are kept, not {cached:?}", self.cached);
        assert!(leaked.contains(&self.leaked), "{} are leaked, not {leaked:?}", self.leaked);
        assert!(self.cached <= self.cache_limit);
    }

    fn set(&mut self, pages: &[u32], state: State) {
        pages.iter().for_each(|page| self.pages[*page as usize] = state);
    }

    /// Records as lost what a call over `all` pages says that it lost by at most so many failures.
    fn lose(&mut self, lost: &[u32], all: &[u32], failures: u32) {
        assert!((1..=failures as usize).contains(&lost.len()), "{lost:?} lost by {failures} failures");
        assert!(lost.is_sorted_by(|a, b| a < b) && lost.iter().all(|page| all.contains(page)), "{lost:?}");
        self.set(lost, State::Quarantined);
    }
}

fn decided(id: TransactionId, outcome: Outcome) -> VmmError {
    TransactionError::Decided { id, outcome }.into()
}

pub fn is_fault(error: &DriverError) {
    assert!(matches!(error, DriverError::Call { code: FAULT_CODE, .. }), "{error}");
}
