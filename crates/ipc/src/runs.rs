//! Sets of pages as they travel: runs of neighbouring pages, ascending and apart.

use std::fmt;

use thiserror::Error;

/// Pages are numbered below this, so that a set has at most as many: 2 TiB of the smallest pages that a GPU maps.
pub const MAX_PAGES: u32 = 1 << 20;

/// A set of that many pages has at most this many runs: every second page.
pub const MAX_RUNS: usize = MAX_PAGES as usize / 2;

/// A set of pages: `(first page, number of pages)`, ascending, none empty, none touching the next.
///
/// One set has one form, so that equal sets are equal values.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Runs(Vec<(u32, u32)>);

/// Why something is no set of pages.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RunsError {
    /// Pages are ascending and named once.
    #[error("page {page} comes after page {before}")]
    Order {
        /// The page before.
        before: u32,
        /// The page that is not greater.
        page: u32,
    },
    /// A run holds at least one page.
    #[error("the run at page {first} is empty")]
    Empty {
        /// Where it would begin.
        first: u32,
    },
    /// A run begins beyond the end of the one before: what touches is one run.
    #[error("the run at page {first} touches or overlaps the one before, which ends at {end}")]
    Touching {
        /// One beyond the last page of the run before.
        end: u64,
        /// Where the next begins.
        first: u32,
    },
    /// Pages are below [`MAX_PAGES`].
    #[error("a page below {end} is beyond the {MAX_PAGES} that a group may have")]
    Beyond {
        /// One beyond the last page of the run.
        end: u64,
    },
}

impl Runs {
    /// No pages.
    pub const fn none() -> Self {
        Runs(Vec::new())
    }

    /// These pages, which are ascending, each named once.
    pub fn from_pages(pages: &[u32]) -> Result<Self, RunsError> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for &page in pages {
            match runs.last_mut() {
                Some((first, len)) if page == *first + *len => *len += 1,
                Some((first, len)) if page < *first + *len => {
                    return Err(RunsError::Order { before: *first + *len - 1, page });
                }
                _ => runs.push((page, 1)),
            }
            if page >= MAX_PAGES {
                return Err(RunsError::Beyond { end: u64::from(page) + 1 });
            }
        }
        Ok(Runs(runs))
    }

    /// These runs, as a peer sent them.
    pub fn from_runs(runs: Vec<(u32, u32)>) -> Result<Self, RunsError> {
        let mut before: Option<u64> = None;
        for &(first, len) in &runs {
            if len == 0 {
                return Err(RunsError::Empty { first });
            }
            if let Some(end) = before
                && u64::from(first) <= end
            {
                return Err(RunsError::Touching { end, first });
            }
            let end = u64::from(first) + u64::from(len);
            if end > u64::from(MAX_PAGES) {
                return Err(RunsError::Beyond { end });
            }
            before = Some(end);
        }
        Ok(Runs(runs))
    }

    /// The runs, as `(first page, number of pages)`.
    pub fn runs(&self) -> &[(u32, u32)] {
        &self.0
    }

    /// The pages, ascending.
    pub fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().flat_map(|&(first, len)| first..first + len)
    }

    /// The pages, ascending.
    pub fn to_vec(&self) -> Vec<u32> {
        self.pages().collect()
    }

    /// How many pages.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|&(_, len)| len).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One beyond the greatest page; 0 where there is none.
    pub fn end(&self) -> u32 {
        self.0.last().map_or(0, |&(first, len)| first + len)
    }

    /// Whether some page is in both.
    pub fn overlaps(&self, other: &Runs) -> bool {
        !self.and(other).is_empty()
    }

    /// The pages of either.
    pub fn or(&self, other: &Runs) -> Runs {
        let mut all: Vec<(u32, u32)> = self.0.iter().chain(&other.0).copied().collect();
        all.sort_unstable();
        let mut runs: Vec<(u32, u32)> = Vec::with_capacity(all.len());
        for (first, len) in all {
            match runs.last_mut() {
                Some(last) if first <= last.0 + last.1 => last.1 = last.1.max(first + len - last.0),
                _ => runs.push((first, len)),
            }
        }
        Runs(runs)
    }

    /// The pages of both.
    pub fn and(&self, other: &Runs) -> Runs {
        let (mut runs, mut mine, mut others) =
            (Vec::new(), self.0.iter().peekable(), other.0.iter().peekable());
        while let (Some(&&(first, len)), Some(&&(other_first, other_len))) = (mine.peek(), others.peek()) {
            let (end, other_end) = (first + len, other_first + other_len);
            let from = first.max(other_first);
            let until = end.min(other_end);
            if from < until {
                runs.push((from, until - from));
            }
            if end <= other_end {
                mine.next();
            } else {
                others.next();
            }
        }
        Runs(runs)
    }

    /// The pages that the other has not.
    pub fn minus(&self, other: &Runs) -> Runs {
        let mut runs = Vec::new();
        let mut others = other.0.iter().peekable();
        for &(first, len) in &self.0 {
            let (mut from, end) = (first, first + len);
            while let Some(&&(other_first, other_len)) = others.peek() {
                if other_first >= end {
                    break;
                }
                if from < other_first {
                    runs.push((from, other_first - from));
                }
                from = from.max(other_first + other_len);
                if from > end {
                    break; // it reaches into the next run of mine
                }
                others.next();
            }
            if from < end {
                runs.push((from, end - from));
            }
        }
        Runs(runs)
    }
}

impl fmt::Debug for Runs {
    /// As `{3, 5..8}`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (index, &(first, len)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            match len {
                1 => write!(f, "{comma}{first}")?,
                _ => write!(f, "{comma}{first}..{}", first + len)?,
            }
        }
        f.write_str("}")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn set(pages: &BTreeSet<u32>) -> Runs {
        Runs::from_pages(&pages.iter().copied().collect::<Vec<_>>()).unwrap()
    }

    proptest! {
        #[test]
        fn sets_behave_as_sets(
            mine in prop::collection::btree_set(0u32..40, 0..30),
            other in prop::collection::btree_set(0u32..40, 0..30),
        ) {
            let (a, b) = (set(&mine), set(&other));
            prop_assert_eq!(a.to_vec(), mine.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(a.count() as usize, mine.len());
            prop_assert_eq!(a.end(), mine.last().map_or(0, |page| page + 1));
            prop_assert_eq!(a.or(&b), set(&mine.union(&other).copied().collect()));
            prop_assert_eq!(a.and(&b), set(&mine.intersection(&other).copied().collect()));
            prop_assert_eq!(a.minus(&b), set(&mine.difference(&other).copied().collect()));
            prop_assert_eq!(a.overlaps(&b), !mine.is_disjoint(&other));
            prop_assert_eq!(Runs::from_runs(a.runs().to_vec()), Ok(a));
        }
    }

    #[test]
    fn what_is_no_set_is_refused() {
        use RunsError::*;
        assert_eq!(Runs::from_pages(&[3, 3]), Err(Order { before: 3, page: 3 }));
        assert_eq!(Runs::from_pages(&[3, 4, 2]), Err(Order { before: 4, page: 2 }));
        assert_eq!(Runs::from_pages(&[u32::MAX]), Err(Beyond { end: 1 << 32 }));
        assert_eq!(Runs::from_pages(&[MAX_PAGES]), Err(Beyond { end: u64::from(MAX_PAGES) + 1 }));
        assert_eq!(Runs::from_runs(vec![(3, 0)]), Err(Empty { first: 3 }));
        assert_eq!(Runs::from_runs(vec![(3, 2), (5, 1)]), Err(Touching { end: 5, first: 5 }));
        assert_eq!(Runs::from_runs(vec![(3, 2), (4, 9)]), Err(Touching { end: 5, first: 4 }));
        assert_eq!(Runs::from_runs(vec![(3, 2), (0, 1)]), Err(Touching { end: 5, first: 0 }));
        assert_eq!(Runs::from_runs(vec![(u32::MAX, u32::MAX)]), Err(Beyond { end: (1 << 33) - 2 }));
        assert_eq!(Runs::from_runs(vec![(0, MAX_PAGES + 1)]), Err(Beyond { end: u64::from(MAX_PAGES) + 1 }));
        assert!(Runs::from_runs(vec![(0, MAX_PAGES)]).is_ok());
    }
}
