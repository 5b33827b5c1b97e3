//! When an engine is asked again to evict cached prefixes, after it could not. Pure: the time is told.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(5);

/// An engine whose pages all hold something that is in use has nothing to give, however much it has cached; to look for it takes the
/// engine's own time. It is asked again later, and ever later, until it gives what it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Rest {
    length: Duration,
    until: Option<Instant>,
}

impl Rest {
    /// It was asked for so much and gave so much.
    pub fn asked(&mut self, wanted: u64, given: u64, now: Instant) {
        *self = match given < wanted {
            true => {
                let length = (self.length * 2).clamp(FIRST, LONGEST);
                Rest { length, until: now.checked_add(length) }
            }
            false => Rest::default(),
        };
    }

    /// How long it is not asked; `None`: it may be.
    pub fn left(&self, now: Instant) -> Option<Duration> {
        let left = self.until?.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_cannot_give_is_asked_ever_later_until_it_gives() {
        let mut now = Instant::now();
        let mut rest = Rest::default();
        assert_eq!(rest.left(now), None);
        for (given, length) in [(0, 200), (3, 400), (0, 800), (9, 1600), (0, 3200), (0, 5000), (0, 5000)] {
            let length = Duration::from_millis(length);
            rest.asked(10, given, now);
            assert_eq!(rest.left(now), Some(length));
            assert_eq!(rest.left(now + length / 2), Some(length / 2));
            now += length;
            assert_eq!(rest.left(now), None);
        }
        rest.asked(10, 12, now);
        assert_eq!(rest.left(now), None, "it gave");
        rest.asked(10, 9, now);
        assert_eq!(rest.left(now), Some(FIRST), "and is at the beginning again");
    }
}
