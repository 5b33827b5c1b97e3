//! How much memory an instance may have, and what comes of changing that. Pure.

use crate::error::ControlError;

/// A limit that is none, as a word.
const NO_LIMIT: u64 = u64::MAX;

/// How much of each of its devices an instance may have, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// The most; `None`: no limit but the budget.
    pub limit_bytes: Option<u64>,
    /// Guaranteed, whether used or not.
    pub min_bytes: u64,
}

/// A change of [`Terms`] that is asked of an instance. What is `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// `Some(None)`: no limit any more.
    pub limit_bytes: Option<Option<u64>>,
    /// Bytes.
    pub min_bytes: Option<u64>,
    /// Greater than that of the latest change, so that one that comes late undoes nothing; `None`: the next.
    pub revision: Option<u64>,
}

/// What an instance is asked for and has not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Of the change.
    pub revision: u64,
    /// With the change in force.
    pub terms: Terms,
}

/// What came of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Of the change that was answered, or that stands in the way.
    pub revision: u64,
    /// What came of it.
    pub outcome: Outcome,
    /// In force now.
    pub terms: Terms,
}

/// What came of a change, or how the terms stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// In force, and no more memory is held than that allows.
    Applied,
    /// In force; what is held beyond the limit goes as requests end.
    Deferred,
    /// The minimums of a device's instances would pass its budget, or lost memory passes the limit. Those before it stand.
    Rejected,
    /// A later change stands.
    Stale,
    /// Another change of this very revision stands.
    Conflict,
    /// The instance has not answered in the time that was given it; it will.
    Unanswered,
}

impl Terms {
    /// Whether they can hold together.
    pub fn check(&self) -> Result<(), ControlError> {
        match self.limit_bytes {
            Some(limit_bytes) if limit_bytes < self.min_bytes => {
                Err(ControlError::LimitBelowMin { limit_bytes, min_bytes: self.min_bytes })
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn limit_word(&self) -> u64 {
        self.limit_bytes.unwrap_or(NO_LIMIT)
    }

    pub(crate) fn of_words(limit: u64, min_bytes: u64) -> Self {
        Terms { limit_bytes: (limit != NO_LIMIT).then_some(limit), min_bytes }
    }

    /// These terms with a change made.
    pub(crate) fn with(&self, change: &Change) -> Self {
        Terms {
            limit_bytes: change.limit_bytes.unwrap_or(self.limit_bytes),
            min_bytes: change.min_bytes.unwrap_or(self.min_bytes),
        }
    }
}

impl Outcome {
    /// The name, in lower case.
    pub fn as_str(self) -> &'static str {
        match self {
            Outcome::Applied => "applied",
            Outcome::Deferred => "deferred",
            Outcome::Rejected => "rejected",
            Outcome::Stale => "stale",
            Outcome::Conflict => "conflict",
            Outcome::Unanswered => "unanswered",
        }
    }

    /// As an instance writes it, who knows three of them.
    pub(crate) fn word(self) -> Option<u64> {
        match self {
            Outcome::Applied => Some(0),
            Outcome::Deferred => Some(1),
            Outcome::Rejected => Some(2),
            Outcome::Stale | Outcome::Conflict | Outcome::Unanswered => None,
        }
    }

    pub(crate) fn from_word(word: u64) -> Option<Self> {
        [Outcome::Applied, Outcome::Deferred, Outcome::Rejected]
            .into_iter()
            .find(|outcome| outcome.word() == Some(word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_leaves_what_it_does_not_name() {
        let terms = Terms { limit_bytes: Some(9), min_bytes: 3 };
        assert_eq!(terms.with(&Change::default()), terms);
        let changed = terms.with(&Change { limit_bytes: Some(None), ..Change::default() });
        assert_eq!(changed, Terms { limit_bytes: None, min_bytes: 3 });
        let changed = terms.with(&Change { min_bytes: Some(0), ..Change::default() });
        assert_eq!(changed, Terms { limit_bytes: Some(9), min_bytes: 0 });
    }

    #[test]
    fn a_limit_is_not_below_the_minimum() {
        for (limit_bytes, min_bytes, good) in
            [(None, u64::MAX, true), (Some(3), 3, true), (Some(2), 3, false), (Some(0), 0, true)]
        {
            let checked = Terms { limit_bytes, min_bytes }.check();
            assert_eq!(checked.is_ok(), good, "{limit_bytes:?} {min_bytes}");
        }
    }
}
