//! Which blocks of each page are free: one bit a block, whole words a page.

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bitmap {
    words: Vec<u64>,
    words_per_page: usize,
}

impl Bitmap {
    /// `bits` blocks a page, none free.
    pub(crate) fn new(pages: u32, bits: u32) -> Self {
        let words_per_page = bits.div_ceil(u64::BITS) as usize;
        Bitmap { words: vec![0; words_per_page * pages as usize], words_per_page }
    }

    fn word(&mut self, page: u32, slot: u32) -> (&mut u64, u64) {
        let at = page as usize * self.words_per_page + (slot / u64::BITS) as usize;
        (&mut self.words[at], 1 << (slot % u64::BITS))
    }

    fn page(&self, page: u32) -> std::ops::Range<usize> {
        let start = page as usize * self.words_per_page;
        start..start + self.words_per_page
    }

    /// Marks as free; false where it was free already.
    pub(crate) fn give(&mut self, page: u32, slot: u32) -> bool {
        let (word, bit) = self.word(page, slot);
        let was_held = *word & bit == 0;
        *word |= bit;
        was_held
    }

    /// Marks as held; false where it was held already.
    pub(crate) fn take(&mut self, page: u32, slot: u32) -> bool {
        let (word, bit) = self.word(page, slot);
        let was_free = *word & bit != 0;
        *word &= !bit;
        was_free
    }

    pub(crate) fn give_all(&mut self, places: &[(u32, u32)]) {
        for &(page, slot) in places {
            self.give(page, slot);
        }
    }

    pub(crate) fn take_all(&mut self, places: &[(u32, u32)]) {
        for &(page, slot) in places {
            self.take(page, slot);
        }
    }

    pub(crate) fn is_free(&self, page: u32, slot: u32) -> bool {
        let at = page as usize * self.words_per_page + (slot / u64::BITS) as usize;
        self.words[at] & (1 << (slot % u64::BITS)) != 0
    }

    /// Takes up to `count` free blocks of a page, lowest first.
    pub(crate) fn take_lowest(&mut self, page: u32, count: u32, mut taken: impl FnMut(u32)) {
        let mut left = count;
        let range = self.page(page);
        for (index, word) in self.words[range].iter_mut().enumerate() {
            while left > 0 && *word != 0 {
                let bit = word.trailing_zeros();
                *word &= *word - 1;
                left -= 1;
                taken(index as u32 * u64::BITS + bit);
            }
        }
    }

    /// Marks the first `bits` blocks of a page as free.
    pub(crate) fn fill(&mut self, page: u32, bits: u32) {
        let range = self.page(page);
        for (index, word) in self.words[range].iter_mut().enumerate() {
            let left = bits.saturating_sub(index as u32 * u64::BITS).min(u64::BITS);
            *word = if left == u64::BITS { u64::MAX } else { (1 << left) - 1 };
        }
    }

    pub(crate) fn count(&self, page: u32) -> u32 {
        self.words[self.page(page)].iter().map(|word| word.count_ones()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_more_than_one_word() {
        let mut map = Bitmap::new(2, 130);
        map.fill(1, 129);
        assert_eq!((map.count(0), map.count(1)), (0, 129));
        assert!(map.is_free(1, 128) && !map.is_free(1, 129));
        assert!(map.take(1, 64) && !map.take(1, 64));
        let mut slots = Vec::new();
        map.take_lowest(1, 66, |slot| slots.push(slot));
        assert_eq!(slots, (0..64).chain(65..67).collect::<Vec<_>>());
        assert!(map.give(1, 0) && !map.give(1, 0));
        assert_eq!(map.count(1), 129 - 66);
    }
}
