//! Memory that a mapper holds beside the pages, and how much of it could be given back. Pure.

/// Bytes beside the pages. A mapper tells only all of them: zeros and memory that could not be released stay whatever is asked,
/// memory kept for later pages goes with a trim. What a trim left is taken for the former.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Beside {
    bytes: u64,
    stays: u64,
}

impl Beside {
    /// Of a mapper none of whose pages has been backed: nothing can be kept of them.
    pub fn at_start(bytes: u64) -> Self {
        Beside { bytes, stays: bytes }
    }

    /// So much is held now.
    pub fn note(&mut self, bytes: u64) {
        *self = Beside { bytes, stays: self.stays.min(bytes) };
    }

    /// So much is left after a trim.
    pub fn trimmed(&mut self, bytes: u64) {
        *self = Beside::at_start(bytes);
    }

    /// All that is held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What a trim may give back.
    pub fn kept(&self) -> u64 {
        self.bytes - self.stays
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_trim_leaves_is_not_counted_as_kept() {
        let mut beside = Beside::at_start(2);
        assert_eq!((beside.bytes(), beside.kept()), (2, 0), "zeros");
        beside.note(9);
        assert_eq!((beside.bytes(), beside.kept()), (9, 7));
        beside.trimmed(3);
        assert_eq!((beside.bytes(), beside.kept()), (3, 0), "one could not be released");
        beside.note(2); // now it was
        beside.note(5);
        assert_eq!((beside.bytes(), beside.kept()), (5, 3));
    }
}
