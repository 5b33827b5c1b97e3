//! An ordered set of small integers.
//!
//! A tree over a fixed universe would do, but its nodes cost an allocation now and then and a cache miss
//! each. Bits cost neither: one a key, over them one for each word that is not zero, and so on up to a
//! single word. Every operation touches one word a level, four levels for 16 million keys.

use std::ops::Range;

const BITS: usize = u64::BITS as usize;

/// Levels of 64^6 keys.
const MAX_HEIGHT: usize = 6;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OrderedBits {
    /// The levels, from one bit a key up to a single word. Bit i of a level is set where word i of the level
    /// below is not zero, so that equal sets compare equal.
    words: Vec<u64>,
    /// Where each level starts, and behind the last where it ends.
    starts: [usize; MAX_HEIGHT + 1],
    height: usize,
    len: u32,
}

impl OrderedBits {
    /// An empty set of keys below `universe`.
    pub(crate) fn new(universe: usize) -> Self {
        let mut words = universe.div_ceil(BITS).max(1);
        let mut starts = [0; MAX_HEIGHT + 1];
        starts[1] = words;
        let mut height = 1;
        while words > 1 {
            words = words.div_ceil(BITS);
            starts[height + 1] = starts[height] + words;
            height += 1;
        }
        OrderedBits { words: vec![0; starts[height]], starts, height, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    pub(crate) fn contains(&self, key: usize) -> bool {
        self.words[key / BITS] & bit(key) != 0
    }

    /// False where it was in already.
    #[inline]
    pub(crate) fn insert(&mut self, key: usize) -> bool {
        let word = &mut self.words[key / BITS];
        let before = *word;
        *word |= bit(key);
        if before & bit(key) != 0 {
            return false;
        }
        self.len += 1;
        if before == 0 {
            self.mark(key / BITS);
        }
        true
    }

    /// False where it was not in.
    #[inline]
    pub(crate) fn remove(&mut self, key: usize) -> bool {
        let word = &mut self.words[key / BITS];
        if *word & bit(key) == 0 {
            return false;
        }
        *word &= !bit(key);
        self.len -= 1;
        if *word == 0 {
            self.unmark(key / BITS);
        }
        true
    }

    pub(crate) fn insert_range(&mut self, range: Range<usize>) {
        for (at, mask) in masks(range) {
            let word = &mut self.words[at];
            let before = *word;
            *word |= mask;
            self.len += (mask & !before).count_ones();
            if before == 0 {
                self.mark(at);
            }
        }
    }

    /// Removes the lowest `count` keys from `from` up, or as many as there are, and tells each run of
    /// neighbours: its first key and how many.
    #[inline]
    pub(crate) fn take_from(&mut self, mut from: usize, count: u32, mut taken: impl FnMut(usize, u32)) {
        let mut left = count;
        while left > 0
            && let Some(first) = self.next_from(from)
        {
            let word = &mut self.words[first / BITS];
            let run = (!(*word >> (first % BITS))).trailing_zeros().min(left);
            *word &= !(ones(run) << (first % BITS));
            self.len -= run;
            if *word == 0 {
                self.unmark(first / BITS);
            }
            taken(first, run);
            left -= run;
            from = first + run as usize;
        }
    }

    pub(crate) fn clear(&mut self) {
        if !self.is_empty() {
            self.words.fill(0);
            self.len = 0;
        }
    }

    #[inline]
    pub(crate) fn first(&self) -> Option<usize> {
        let word = self.top();
        (word != 0).then(|| self.lowest_under(self.height - 1, lowest(word)))
    }

    #[inline]
    pub(crate) fn last(&self) -> Option<usize> {
        let word = self.top();
        (word != 0).then(|| self.highest_under(self.height - 1, highest(word)))
    }

    /// The lowest key that is not below `key`, which may lie beyond the universe.
    #[inline]
    pub(crate) fn next_from(&self, key: usize) -> Option<usize> {
        let mut at = key;
        for height in 0..self.height {
            let index = self.starts[height] + at / BITS;
            if index >= self.starts[height + 1] {
                return None;
            }
            let word = self.words[index] & (u64::MAX << (at % BITS));
            if word != 0 {
                return Some(self.lowest_under(height, at / BITS * BITS + lowest(word)));
            }
            at = at / BITS + 1;
        }
        None
    }

    /// The highest key below `key`, which may lie beyond the universe.
    pub(crate) fn last_before(&self, key: usize) -> Option<usize> {
        if key / BITS >= self.starts[1] {
            return self.last();
        }
        let mut at = key;
        for height in 0..self.height {
            let word = self.words[self.starts[height] + at / BITS] & (bit(at) - 1);
            if word != 0 {
                return Some(self.highest_under(height, at / BITS * BITS + highest(word)));
            }
            at /= BITS;
        }
        None
    }

    /// How many keys of the range are in. Walks it: for checks.
    pub(crate) fn count(&self, range: Range<usize>) -> u32 {
        masks(range).map(|(at, mask)| (self.words[at] & mask).count_ones()).sum()
    }

    /// The upper levels and the length say what the keys say. Walks all: for checks.
    pub(crate) fn is_sound(&self) -> bool {
        let level = |height: usize| &self.words[self.starts[height]..self.starts[height + 1]];
        let summed = (1..self.height).all(|height| {
            let told = |at: usize| level(height)[at / BITS] & bit(at) != 0;
            level(height - 1).iter().enumerate().all(|(at, word)| (*word != 0) == told(at))
        });
        summed && self.len == level(0).iter().map(|word| word.count_ones()).sum::<u32>()
    }

    fn top(&self) -> u64 {
        self.words[self.starts[self.height] - 1]
    }

    /// Word `at` of the keys is not zero any longer.
    fn mark(&mut self, mut at: usize) {
        for start in &self.starts[1..self.height] {
            let word = &mut self.words[start + at / BITS];
            let before = *word;
            *word |= bit(at);
            if before != 0 {
                return;
            }
            at /= BITS;
        }
    }

    /// Word `at` of the keys has become zero.
    fn unmark(&mut self, mut at: usize) {
        for start in &self.starts[1..self.height] {
            let word = &mut self.words[start + at / BITS];
            *word &= !bit(at);
            if *word != 0 {
                return;
            }
            at /= BITS;
        }
    }

    /// The lowest key under bit `at` of a level.
    fn lowest_under(&self, height: usize, at: usize) -> usize {
        let below = self.starts[..height].iter().rev();
        below.fold(at, |at, start| at * BITS + lowest(self.words[start + at]))
    }

    fn highest_under(&self, height: usize, at: usize) -> usize {
        let below = self.starts[..height].iter().rev();
        below.fold(at, |at, start| at * BITS + highest(self.words[start + at]))
    }
}

fn bit(key: usize) -> u64 {
    1 << (key % BITS)
}

fn lowest(word: u64) -> usize {
    word.trailing_zeros() as usize
}

/// Of a word that is not zero.
fn highest(word: u64) -> usize {
    BITS - 1 - word.leading_zeros() as usize
}

/// The lowest `count` bits, at least one.
fn ones(count: u32) -> u64 {
    u64::MAX >> (u64::BITS - count)
}

/// The words that a range of keys touches, each with its bits of the range.
fn masks(range: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let Range { mut start, end } = range;
    std::iter::from_fn(move || {
        let run = (end.saturating_sub(start)).min(BITS - start % BITS);
        let word = (run > 0).then(|| (start / BITS, ones(run as u32) << (start % BITS)));
        start += run;
        word
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Insert(usize),
        Remove(usize),
        InsertRange(usize, usize),
        Take(usize, u32),
        Clear,
    }

    fn op(universe: usize) -> impl Strategy<Value = Op> {
        prop_oneof![
            8 => (0..universe).prop_map(Op::Insert),
            8 => (0..universe).prop_map(Op::Remove),
            2 => (0..universe, 0usize..200).prop_map(|(start, len)| Op::InsertRange(start, len)),
            4 => (0..universe, 0u32..150).prop_map(|(from, count)| Op::Take(from, count)),
            1 => Just(Op::Clear),
        ]
    }

    /// Around every border of a level, so that each level is climbed and descended.
    fn histories() -> impl Strategy<Value = (usize, Vec<Op>)> {
        prop_oneof![1usize..130, 4000usize..4200, 262_100usize..262_200]
            .prop_flat_map(|universe| (Just(universe), prop::collection::vec(op(universe), 1..60)))
    }

    fn compare(set: &OrderedBits, reference: &BTreeSet<usize>, universe: usize, at: usize) {
        assert!(set.is_sound());
        assert_eq!(set.len() as usize, reference.len());
        assert_eq!((set.first(), set.last()), (reference.first().copied(), reference.last().copied()));
        for key in [0, at.saturating_sub(1), at, at + 1, at + 64, universe, universe + 4096] {
            assert_eq!(set.next_from(key), reference.range(key..).next().copied());
            assert_eq!(set.last_before(key), reference.range(..key).next_back().copied());
        }
        assert_eq!(set.contains(at), reference.contains(&at));
        assert_eq!(set.count(at..universe) as usize, reference.range(at..).count());
        assert_eq!(set.count(0..at) as usize, reference.range(..at).count());
    }

    proptest! {
        #[test]
        fn agrees_with_a_tree((universe, ops) in histories()) {
            let mut set = OrderedBits::new(universe);
            let mut reference = BTreeSet::new();
            for op in ops {
                let at = match op {
                    Op::Insert(key) => {
                        prop_assert_eq!(set.insert(key), reference.insert(key));
                        key
                    }
                    Op::Remove(key) => {
                        prop_assert_eq!(set.remove(key), reference.remove(&key));
                        key
                    }
                    Op::InsertRange(start, len) => {
                        let end = universe.min(start + len);
                        set.insert_range(start..end);
                        reference.extend(start..end);
                        start
                    }
                    Op::Take(from, count) => {
                        let expected: Vec<_> =
                            reference.range(from..).copied().take(count as usize).collect();
                        expected.iter().for_each(|key| assert!(reference.remove(key)));
                        let mut taken = Vec::new();
                        set.take_from(from, count, |key, run| taken.extend(key..key + run as usize));
                        prop_assert_eq!(taken, expected);
                        from
                    }
                    Op::Clear => {
                        set.clear();
                        reference.clear();
                        0
                    }
                };
                compare(&set, &reference, universe, at);
            }
            let mut again = OrderedBits::new(universe);
            reference.iter().for_each(|&key| assert!(again.insert(key)));
            prop_assert_eq!(again, set, "equal sets compare equal");
        }
    }

    #[test]
    fn what_is_not_sound_shows() {
        let mut set = OrderedBits::new(5000);
        assert!(set.insert(4999));
        assert!(set.is_sound());
        let level = set.starts[1];
        set.words[level + 1] = 0;
        assert!(!set.is_sound(), "a bit too few in level 1");
        set.mark(4999 / BITS);
        assert!(set.is_sound());
        set.words[level] = 2;
        assert!(!set.is_sound(), "a bit too many");
        let mut set = OrderedBits::new(5000);
        set.len = 1;
        assert!(!set.is_sound());
    }
}
