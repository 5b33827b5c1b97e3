//! How much memory somebody was refused and still waits for. Pure: the time is told.

use std::time::{Duration, Instant};

/// Who is refused asks again, many times a second. Who has not for that long waits no more.
pub(crate) const FORGOTTEN: Duration = Duration::from_secs(1);

/// What one waiter lacks.
///
/// Who is refused may ask for half as much, and half again: what it gets on the way is less to wait for, and a smaller wish that is
/// refused as well takes nothing from the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Shortage {
    bytes: u64,
    refused: Option<Instant>,
}

impl Shortage {
    /// So many bytes were refused.
    pub fn refused(&mut self, bytes: u64, now: Instant) {
        *self = Shortage { bytes: self.bytes(now).max(bytes), refused: Some(now) };
    }

    /// So many bytes were had. Whether that changed anything.
    pub fn got(&mut self, bytes: u64) -> bool {
        let before = self.bytes;
        self.bytes -= bytes.min(before);
        self.bytes != before
    }

    /// What is waited for.
    pub fn bytes(&self, now: Instant) -> u64 {
        match self.refused {
            Some(refused) if now.saturating_duration_since(refused) < FORGOTTEN => self.bytes,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_for_half_and_half_again_lacks_the_rest() {
        let now = Instant::now();
        let mut shortage = Shortage::default();
        assert_eq!(shortage.bytes(now), 0);
        // Eight are wanted, seven can be had: 8 no, 4 yes, 4 no, 2 yes, 2 no, 1 yes, 1 no.
        for (refused, got) in [(8, 4), (4, 2), (2, 1)] {
            shortage.refused(refused, now);
            assert!(shortage.got(got));
        }
        shortage.refused(1, now);
        assert_eq!(shortage.bytes(now), 1);
        assert!(shortage.got(5) && !shortage.got(5));
        assert_eq!(shortage.bytes(now), 0);
    }

    #[test]
    fn who_does_not_ask_again_waits_no_more() {
        let now = Instant::now();
        let mut shortage = Shortage::default();
        shortage.refused(8, now);
        shortage.refused(2, now + FORGOTTEN / 2);
        assert_eq!(shortage.bytes(now + FORGOTTEN), 8, "renewed by the second");
        assert_eq!(shortage.bytes(now + FORGOTTEN * 3 / 2), 0);
        shortage.refused(2, now + FORGOTTEN * 2);
        assert_eq!(shortage.bytes(now + FORGOTTEN * 2), 2, "begun anew");
    }
}
