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
    by_device: bool,
    refused: Option<Instant>,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lack {
    /// How much; 0: nothing.
    pub bytes: u64,
    /// The device itself refused it when it was last asked, and not the share: what is free in the budget does not help.
    pub by_device: bool,
}

impl Shortage {
    /// So many bytes were refused.
    pub fn refused(&mut self, bytes: u64, by_device: bool, now: Instant) {
        *self = Shortage { bytes: self.lack(now).bytes.max(bytes), by_device, refused: Some(now) };
    }

    /// So many are wanted in all by whoever was refused, whatever that was; 0: none after all.
    pub fn wants(&mut self, bytes: u64, now: Instant) {
        *self = match bytes {
            0 => Shortage::default(),
            _ => Shortage { bytes, by_device: self.by_device, refused: Some(now) },
        };
    }

    /// So many bytes were had. Whether that changed anything.
    pub fn got(&mut self, bytes: u64) -> bool {
        let before = *self;
        self.bytes -= bytes.min(before.bytes);
        self.by_device &= bytes == 0;
        *self != before
    }

    /// What is waited for.
    pub fn lack(&self, now: Instant) -> Lack {
        match self.refused {
            Some(refused) if now.saturating_duration_since(refused) < FORGOTTEN => {
                Lack { bytes: self.bytes, by_device: self.by_device && self.bytes > 0 }
            }
            _ => Lack::default(),
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
        assert_eq!(shortage.lack(now).bytes, 0);
        // Eight are wanted, seven can be had: 8 no, 4 yes, 4 no, 2 yes, 2 no, 1 yes, 1 no.
        for (refused, got) in [(8, 4), (4, 2), (2, 1)] {
            shortage.refused(refused, false, now);
            assert!(shortage.got(got));
        }
        shortage.refused(1, false, now);
        assert_eq!(shortage.lack(now).bytes, 1);
        assert!(shortage.got(5) && !shortage.got(5));
        assert_eq!(shortage.lack(now).bytes, 0);
    }

    #[test]
    fn who_does_not_ask_again_waits_no_more() {
        let now = Instant::now();
        let mut shortage = Shortage::default();
        shortage.refused(8, false, now);
        shortage.refused(2, false, now + FORGOTTEN / 2);
        assert_eq!(shortage.lack(now + FORGOTTEN).bytes, 8, "renewed by the second");
        assert_eq!(shortage.lack(now + FORGOTTEN * 3 / 2).bytes, 0);
        shortage.refused(2, false, now + FORGOTTEN * 2);
        assert_eq!(shortage.lack(now + FORGOTTEN * 2).bytes, 2, "begun anew");
    }

    #[test]
    fn who_refused_it_is_who_refused_it_last() {
        let now = Instant::now();
        let mut shortage = Shortage::default();
        shortage.refused(8, true, now);
        shortage.wants(2, now);
        assert_eq!(shortage.lack(now), Lack { bytes: 2, by_device: true }, "it has found another way");
        shortage.wants(20, now);
        assert_eq!(shortage.lack(now), Lack { bytes: 20, by_device: true });
        assert!(!shortage.got(0) && shortage.got(4));
        assert_eq!(shortage.lack(now), Lack { bytes: 16, by_device: false }, "the device gave some");
        shortage.refused(8, true, now);
        shortage.refused(8, false, now);
        assert_eq!(shortage.lack(now), Lack { bytes: 16, by_device: false });
        shortage.wants(0, now);
        assert_eq!(shortage.lack(now), Lack::default());
        shortage.refused(16, true, now);
        assert!(shortage.got(16));
        assert_eq!(shortage.lack(now), Lack::default());
    }
}
