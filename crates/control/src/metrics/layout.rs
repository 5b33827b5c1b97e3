//! The bytes of a sidecar, as those of a record (`crate::layout`): fixed offsets, one version, whole 64-bit words.

use std::mem::offset_of;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::{Counter, MetricsView, Timer, TimerView};
use crate::error::RecordError;
use crate::words::{Header, WORD, get_word, put_word};

/// Version of the layout that this crate writes and reads.
pub(crate) const METRICS_VERSION: u64 = 1;
/// Size of a sidecar, bytes.
pub(crate) const METRICS_BYTES: usize = size_of::<Sidecar>();
/// Buckets of a timer: times of at most 16 us, 32 us, ... 8.4 s, and longer ones.
pub(super) const BUCKETS: usize = 21;

const HEADER: Header = Header {
    what: "sidecar",
    magic: *b"kvmetric",
    version: METRICS_VERSION,
    bytes: METRICS_BYTES,
    advice: "use the kvctl of that installation",
};
const MAX_COUNTERS: usize = 32;
const MAX_TIMERS: usize = 8;
/// The bound of the first bucket.
const LEAST: Duration = Duration::from_micros(16);

#[repr(C)]
pub(crate) struct Sidecar {
    magic: AtomicU64,
    version: AtomicU64,
    total_bytes: AtomicU64,
    /// Of the record that it belongs to.
    inode: AtomicU64,
    spare: [AtomicU64; 4],
    pub(super) counters: [AtomicU64; MAX_COUNTERS],
    pub(super) timers: [Histogram; MAX_TIMERS],
}

#[repr(C)]
pub(super) struct Histogram {
    pub buckets: [AtomicU64; BUCKETS],
    pub sum_ns: AtomicU64,
    spare: [AtomicU64; 2],
}

// A contract between processes: a field that moves needs a new version, and this says so at build time.
const _: () = assert!(
    METRICS_BYTES == 1856
        && offset_of!(Sidecar, counters) == 64
        && offset_of!(Sidecar, timers) == 320
        && size_of::<Histogram>() == 192
        && Counter::ALL.len() <= MAX_COUNTERS
        && Timer::ALL.len() <= MAX_TIMERS
);

/// The bucket that counts a time.
pub(super) fn bucket_of(time: Duration) -> usize {
    let units = time.as_nanos().div_ceil(LEAST.as_nanos()).max(1);
    (u128::BITS - (units - 1).leading_zeros()).min(BUCKETS as u32 - 1) as usize
}

/// The longest time that a bucket counts; `None` of the last one, which counts all longer ones.
pub(super) fn bound_of(bucket: usize) -> Option<Duration> {
    (bucket + 1 < BUCKETS).then(|| LEAST * (1 << bucket))
}

/// The bytes of a sidecar in which nothing has been counted.
pub(super) fn encode(inode: u64) -> Vec<u8> {
    let mut bytes = HEADER.file();
    put_word(&mut bytes, offset_of!(Sidecar, inode), inode);
    bytes
}

/// The figures of a copy; `None` where it belongs to another record than the one with this inode.
pub fn decode(bytes: &[u8], inode: u64) -> Result<Option<MetricsView>, RecordError> {
    HEADER.check(bytes)?;
    if get_word(bytes, offset_of!(Sidecar, inode)) != inode {
        return Ok(None);
    }
    let counter = |counter: Counter| get_word(bytes, offset_of!(Sidecar, counters) + counter as usize * WORD);
    let timer = |timer: Timer| {
        let at = offset_of!(Sidecar, timers) + timer as usize * size_of::<Histogram>();
        let bucket = |bucket: usize| get_word(bytes, at + offset_of!(Histogram, buckets) + bucket * WORD);
        TimerView {
            buckets: (0..BUCKETS).map(|index| (bound_of(index), bucket(index))).collect(),
            sum: Duration::from_nanos(get_word(bytes, at + offset_of!(Histogram, sum_ns))),
        }
    };
    Ok(Some(MetricsView {
        counters: Counter::ALL.map(|each| (each, counter(each))).into(),
        timers: Timer::ALL.map(|each| (each, timer(each))).into(),
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_time_is_in_the_bucket_whose_bounds_hold_it() {
        let at = |ns| bucket_of(Duration::from_nanos(ns));
        assert_eq!((at(0), at(1), at(16_000), at(16_001), at(32_000), at(32_001)), (0, 0, 0, 1, 1, 2));
        assert_eq!(bound_of(0), Some(LEAST));
        assert_eq!(bound_of(BUCKETS - 2), Some(Duration::from_micros(8_388_608)));
        assert_eq!(bound_of(BUCKETS - 1), None);
        assert_eq!(bucket_of(Duration::MAX), BUCKETS - 1);
    }

    #[test]
    fn every_lie_has_its_error() {
        let with = |offset: usize, value: u64| {
            let mut bytes = encode(9);
            put_word(&mut bytes, offset, value);
            decode(&bytes, 9)
        };
        assert!(decode(&encode(9), 9).unwrap().is_some());
        assert!(decode(&encode(9), 8).unwrap().is_none(), "an earlier instance's");
        assert!(matches!(decode(&[], 9), Err(RecordError::Truncated { bytes: 0 })));
        assert!(matches!(decode(&encode(9)[..40], 9), Err(RecordError::Size { found: 40, .. })));
        assert!(matches!(with(0, 1), Err(RecordError::Magic)));
        assert!(matches!(with(8, 2), Err(RecordError::Version { found: 2, .. })));
        assert!(matches!(with(16, 0), Err(RecordError::Size { found: 0, .. })));
    }

    proptest! {
        #[test]
        fn bounds_hold(ns in any::<u64>()) {
            let time = Duration::from_nanos(ns);
            let bucket = bucket_of(time);
            prop_assert!(bound_of(bucket).is_none_or(|bound| time <= bound));
            prop_assert!(bucket == 0 || bound_of(bucket - 1).is_some_and(|bound| time > bound));
        }

        #[test]
        fn no_bytes_make_a_reader_panic(
            flips in prop::collection::vec((0..METRICS_BYTES, any::<u8>()), 0..40),
            length in 0..METRICS_BYTES * 2,
            whole in any::<bool>(),
        ) {
            let mut bytes = encode(9);
            for (offset, value) in flips {
                bytes[offset] = value;
            }
            if !whole {
                bytes.resize(length, 0xff);
            }
            if let Ok(Some(view)) = decode(&bytes, 9) {
                prop_assert_eq!(view.counters.len(), Counter::ALL.len());
            }
        }
    }
}
