//! A bell that one process rings and another hears: a futex in memory that both map.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;
use rustix::time::Timespec;

/// Rings it. Whoever waits wakes; whoever begins to wait with an older count does not sleep.
pub(crate) fn ring(bell: &AtomicU32) {
    bell.fetch_add(1, Ordering::Release);
    // Fails for no reason that ringing again would help against.
    let _ = futex::wake(bell, futex::Flags::empty(), i32::MAX.cast_unsigned());
}

/// The count of rings.
pub(crate) fn heard(bell: &AtomicU32) -> u32 {
    bell.load(Ordering::Acquire)
}

/// Waits until it was rung since `heard`, or for `timeout`; returns the count of rings. May wake for no reason.
pub(crate) fn wait(bell: &AtomicU32, heard: u32, timeout: Option<Duration>) -> u32 {
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    // Another value than `heard`, a signal, the time: in each case the caller looks again.
    let _ = futex::wait(bell, futex::Flags::empty(), heard, timeout.as_ref());
    self::heard(bell)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_ring_before_the_wait_is_not_lost() {
        let bell = AtomicU32::new(7);
        let before = heard(&bell);
        ring(&bell);
        assert_eq!(wait(&bell, before, None), 8);
    }

    #[test]
    fn who_waits_is_woken_and_who_is_not_rung_for_wakes_in_time() {
        let bell = AtomicU32::new(u32::MAX);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| wait(&bell, u32::MAX, Some(Duration::from_secs(60))));
            while !waiting.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
                ring(&bell);
            }
            assert_ne!(waiting.join().unwrap(), u32::MAX);
        });
        let now = heard(&bell);
        let begin = Instant::now();
        assert_eq!(wait(&bell, now, Some(Duration::from_millis(20))), now);
        assert!(begin.elapsed() >= Duration::from_millis(15));
    }
}
