//! How much memory a pool may have: one target, with a revision, so that whoever sets it late or twice is found out. Pure.

/// What came of a request, or how the standing limit stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LimitState {
    /// No more memory is held than the limit allows.
    Applied,
    /// It holds for what is allocated from now on; what is held beyond it goes as blocks are freed.
    Deferred,
    /// It can never be met: the pool goes on under the limit before it.
    Rejected,
    /// A later revision stands.
    Stale,
    /// This very revision stands, with another limit.
    Conflict,
}

impl LimitState {
    /// The name, in lower case.
    pub fn as_str(self) -> &'static str {
        match self {
            LimitState::Applied => "applied",
            LimitState::Deferred => "deferred",
            LimitState::Rejected => "rejected",
            LimitState::Stale => "stale",
            LimitState::Conflict => "conflict",
        }
    }
}

/// The answer to a request for a limit or to a question for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimit {
    /// What came of the request, or how the limit stands.
    pub state: LimitState,
    /// Of the limit that stands; 0 for the one that a pool begins with, which is all that it reserved.
    pub revision: u64,
    /// The limit that stands, at most what is reserved.
    pub limit_bytes: u64,
    /// Whole pages within it.
    pub target_pages: u32,
    /// Memory held now: mapped pages and lost ones.
    pub occupied_bytes: u64,
    /// Why it was rejected, or why it can no longer be met.
    pub reason: Option<String>,
}

/// The limit that stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Standing {
    pub revision: u64,
    pub bytes: u64,
}

/// What a request is against the limit that stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// A later one: to be put in force.
    Newer,
    /// The one that stands, again.
    Same,
    Stale,
    Conflict,
}

impl Standing {
    pub fn compare(&self, request: Standing) -> Request {
        match request.revision.cmp(&self.revision) {
            std::cmp::Ordering::Greater => Request::Newer,
            std::cmp::Ordering::Less => Request::Stale,
            std::cmp::Ordering::Equal if request.bytes == self.bytes => Request::Same,
            std::cmp::Ordering::Equal => Request::Conflict,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_relation_of_revision_and_bytes() {
        let standing = Standing { revision: 5, bytes: 100 };
        for (revision, bytes, expected) in [
            (4, 100, Request::Stale),
            (4, 7, Request::Stale),
            (0, 100, Request::Stale),
            (5, 100, Request::Same),
            (5, 99, Request::Conflict),
            (6, 100, Request::Newer),
            (6, 0, Request::Newer),
            (u64::MAX, 1, Request::Newer),
        ] {
            assert_eq!(standing.compare(Standing { revision, bytes }), expected, "{revision} {bytes}");
        }
    }
}
