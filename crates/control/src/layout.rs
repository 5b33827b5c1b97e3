//! The bytes of a record: fixed offsets, one version number, every field a whole number of 64-bit words.
//!
//! Writers see a [`Record`] over mapped memory; readers decode a copy of the bytes. Byte order is the machine's: a record never leaves it.
//! A change of meaning or size is a new [`RECORD_VERSION`]; `spare` words are zero until one gives them a meaning.

use std::mem::offset_of;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::error::RecordError;
use crate::sizes::{MAX_POOL_ROWS, MAX_TEXT_BYTES};
use crate::terms::{Outcome, Terms};
use crate::view::{InstanceView, PoolView};
use crate::words::{Header, TEXT_WORDS, WORD, get_text, get_word, put_text, put_word};

/// Version of the layout that this crate writes and reads.
pub const RECORD_VERSION: u64 = 2;
/// Size of a record, bytes.
pub const RECORD_BYTES: usize = size_of::<Record>();

const HEADER: Header = Header {
    what: "record",
    magic: *b"kvcached",
    version: RECORD_VERSION,
    bytes: RECORD_BYTES,
    advice: "use the kvctl of that installation",
};

type Text = [AtomicU64; TEXT_WORDS];

#[repr(C)]
pub(crate) struct Record {
    magic: AtomicU64,
    version: AtomicU64,
    total_bytes: AtomicU64,
    pid: AtomicU64,
    start_unix_ns: AtomicU64,
    /// Counts publications, so that a watcher sees whether the figures move. Liveness is the file's lock, not this.
    pub(crate) heartbeat: AtomicU64,
    /// Odd while a row's name is being changed, so that a reader of several words can tell.
    names_revision: AtomicU64,
    spare: AtomicU64,
    name: Text,
    engine: Text,
    device: Text,
    pub(crate) pools: [Row; MAX_POOL_ROWS],
    pub(crate) control: Control,
}

/// How much memory the instance may have, what is asked of it, and what it is short of.
#[repr(C)]
pub(crate) struct Control {
    /// In force; all bits set without one.
    pub(crate) limit_bytes: AtomicU64,
    pub(crate) min_bytes: AtomicU64,
    /// Of the change that put these in force.
    pub(crate) revision: AtomicU64,
    /// Odd while somebody writes the three words that follow, who holds the directory's lock for asking.
    pub(crate) asked_sequence: AtomicU64,
    pub(crate) asked_limit_bytes: AtomicU64,
    pub(crate) asked_min_bytes: AtomicU64,
    pub(crate) asked_revision: AtomicU64,
    /// The change that was answered last, and how: see [`Outcome`].
    pub(crate) answered_revision: AtomicU64,
    pub(crate) answered: AtomicU64,
    /// Refused, and still waited for.
    pub(crate) shortage_bytes: AtomicU64,
    /// Of the used ones, those that hold nothing but cached prefixes.
    pub(crate) cached_bytes: AtomicU64,
    /// A futex that counts rings.
    pub(crate) bell: AtomicU32,
    bell_spare: AtomicU32,
    spare: [AtomicU64; 4],
}

/// A row whose name is empty is free.
#[repr(C)]
pub(crate) struct Row {
    name: Text,
    pub(crate) used_bytes: AtomicU64,
    pub(crate) reserved_bytes: AtomicU64,
    pub(crate) virtual_bytes: AtomicU64,
    pub(crate) quarantined_bytes: AtomicU64,
    spare: [AtomicU64; 4],
}

// The layout is a contract between processes: a field that moves needs a new version, and this says so at build time.
const _: () = assert!(
    RECORD_BYTES == 1408
        && size_of::<Control>() == 128
        && align_of::<Record>() == WORD
        && size_of::<Row>() == 128
);
const _: () = assert!(
    offset_of!(Record, spare) == 56
        && offset_of!(Record, name) == 64
        && offset_of!(Record, pools) == 256
        && offset_of!(Record, control) == 1280
);
const _: () = assert!(offset_of!(Row, used_bytes) == 64 && offset_of!(Row, spare) == 96);
const _: () = assert!(offset_of!(Control, bell) == 88 && offset_of!(Control, spare) == 96);

impl Record {
    /// Names row `index`, or frees it with an empty name. One caller at a time; its figures become zero.
    pub(crate) fn rename_row(&self, index: usize, name: &str) {
        let revision = self.names_revision.load(Ordering::Relaxed);
        self.names_revision.store(revision.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        let row = &self.pools[index];
        for figure in [&row.used_bytes, &row.reserved_bytes, &row.virtual_bytes, &row.quarantined_bytes] {
            figure.store(0, Ordering::Relaxed);
        }
        let mut padded = [0; MAX_TEXT_BYTES];
        put_text(&mut padded, 0, name);
        for (word, offset) in row.name.iter().zip((0..).step_by(WORD)) {
            word.store(get_word(&padded, offset), Ordering::Relaxed);
        }
        self.names_revision.store(revision.wrapping_add(2), Ordering::Release);
        self.heartbeat.fetch_add(1, Ordering::Relaxed);
    }
}

/// The bytes of a new record without pools. The texts were checked.
pub(crate) fn encode(
    name: &str,
    engine: &str,
    device: &str,
    pid: u32,
    start_unix_ns: u64,
    terms: Terms,
) -> Vec<u8> {
    let mut bytes = HEADER.file();
    put_word(&mut bytes, offset_of!(Record, pid), u64::from(pid));
    put_word(&mut bytes, offset_of!(Record, start_unix_ns), start_unix_ns);
    put_text(&mut bytes, offset_of!(Record, name), name);
    put_text(&mut bytes, offset_of!(Record, engine), engine);
    put_text(&mut bytes, offset_of!(Record, device), device);
    let control = offset_of!(Record, control);
    put_word(&mut bytes, control + offset_of!(Control, limit_bytes), terms.limit_word());
    put_word(&mut bytes, control + offset_of!(Control, min_bytes), terms.min_bytes);
    bytes
}

/// Whether these are the first bytes of a record of this version, whatever its other fields hold.
pub(crate) fn check_header(bytes: &[u8]) -> Result<(), RecordError> {
    HEADER.check(bytes)
}

/// Checks every field of a copy of the record at `path`, whose file has this inode.
pub(crate) fn decode(bytes: &[u8], path: &Path, inode: u64) -> Result<InstanceView, RecordError> {
    check_header(bytes)?;
    let pid = u32::try_from(get_word(bytes, offset_of!(Record, pid)));
    let mut pools = Vec::new();
    for index in 0..MAX_POOL_ROWS {
        let row = offset_of!(Record, pools) + index * size_of::<Row>();
        let name = row + offset_of!(Row, name);
        if bytes[name] == 0 {
            continue;
        }
        pools.push(PoolView {
            name: get_text(bytes, name, "pool name")?,
            used_bytes: get_word(bytes, row + offset_of!(Row, used_bytes)),
            reserved_bytes: get_word(bytes, row + offset_of!(Row, reserved_bytes)),
            virtual_bytes: get_word(bytes, row + offset_of!(Row, virtual_bytes)),
            quarantined_bytes: get_word(bytes, row + offset_of!(Row, quarantined_bytes)),
        });
    }
    let control = |field: usize| get_word(bytes, offset_of!(Record, control) + field);
    let outcome = Outcome::from_word(control(offset_of!(Control, answered)));
    Ok(InstanceView {
        terms: Terms::of_words(
            control(offset_of!(Control, limit_bytes)),
            control(offset_of!(Control, min_bytes)),
        ),
        revision: control(offset_of!(Control, revision)),
        outcome: outcome.ok_or(RecordError::Number { field: "outcome" })?,
        shortage_bytes: control(offset_of!(Control, shortage_bytes)),
        cached_bytes: control(offset_of!(Control, cached_bytes)),
        path: path.to_path_buf(),
        name: get_text(bytes, offset_of!(Record, name), "instance name")?,
        engine: get_text(bytes, offset_of!(Record, engine), "engine")?,
        device: get_text(bytes, offset_of!(Record, device), "device")?,
        pid: pid.map_err(|_| RecordError::Number { field: "pid" })?,
        start_unix_ns: get_word(bytes, offset_of!(Record, start_unix_ns)),
        heartbeat: get_word(bytes, offset_of!(Record, heartbeat)),
        pools,
        inode,
    })
}

/// None while the owner is changing a name; else a number that differs after every change. `bytes` passed [`check_header`].
pub(crate) fn settled_revision(bytes: &[u8]) -> Option<u64> {
    let revision = get_word(bytes, offset_of!(Record, names_revision));
    revision.is_multiple_of(2).then_some(revision)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::is_valid_text;

    const TERMS: Terms = Terms { limit_bytes: Some(1 << 30), min_bytes: 1 << 20 };

    fn sample() -> Vec<u8> {
        encode("llama", "vllm 0.29.0", "cuda:0", 42, 7, TERMS)
    }

    fn read(bytes: &[u8]) -> Result<InstanceView, RecordError> {
        decode(bytes, Path::new("/x/llama.kvc"), 5)
    }

    #[test]
    fn what_is_written_is_read() {
        let view = read(&sample()).unwrap();
        assert_eq!(
            (view.name.as_str(), view.engine.as_str(), view.device.as_str()),
            ("llama", "vllm 0.29.0", "cuda:0")
        );
        assert_eq!((view.pid, view.start_unix_ns, view.heartbeat), (42, 7, 0));
        assert!(view.pools.is_empty());
        assert_eq!((view.terms, view.revision, view.outcome), (TERMS, 0, Outcome::Applied));
    }

    #[test]
    fn a_text_may_fill_its_field() {
        let full = "n".repeat(MAX_TEXT_BYTES);
        let view = read(&encode(&full, &full, &full, 1, 1, Terms::default())).unwrap();
        assert_eq!((view.name, view.engine, view.device), (full.clone(), full.clone(), full));
    }

    #[test]
    fn every_lie_has_its_error() {
        let with = |offset: usize, value: u64| {
            let mut bytes = sample();
            put_word(&mut bytes, offset, value);
            read(&bytes)
        };
        let mut long = sample();
        long.push(0);
        assert!(matches!(read(&[]), Err(RecordError::Truncated { bytes: 0 })));
        assert!(matches!(read(&sample()[..23]), Err(RecordError::Truncated { bytes: 23 })));
        assert!(matches!(read(&sample()[..1407]), Err(RecordError::Size { found: 1407, .. })));
        assert!(matches!(read(&long), Err(RecordError::Size { found: 1409, .. })));
        assert!(matches!(with(0, 1), Err(RecordError::Magic)));
        assert!(matches!(with(8, 3), Err(RecordError::Version { found: 3, .. })));
        assert!(matches!(with(16, u64::MAX), Err(RecordError::Size { found: u64::MAX, .. })));
        assert!(matches!(with(24, 1 << 32), Err(RecordError::Number { field: "pid" })));
        assert!(matches!(with(64, 0), Err(RecordError::Text { field: "instance name" })));
        assert!(matches!(with(128, u64::MAX), Err(RecordError::Text { field: "engine" })));
        assert!(matches!(with(192, 0x1b), Err(RecordError::Text { field: "device" })));
        assert!(matches!(with(1280 + 64, 99), Err(RecordError::Number { field: "outcome" })));
        assert!(matches!(with(256, 0x1b), Err(RecordError::Text { field: "pool name" })));
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_reader_panic(
            flips in prop::collection::vec((0..RECORD_BYTES, any::<u8>()), 0..40),
            length in 0..RECORD_BYTES * 2,
            whole in any::<bool>(),
        ) {
            let mut bytes = sample();
            for (offset, value) in flips {
                bytes[offset] = value;
            }
            if !whole {
                bytes.resize(length, 0xff);
            }
            if let Ok(view) = read(&bytes) {
                prop_assert!(is_valid_text(&view.name) && view.pools.len() <= MAX_POOL_ROWS);
            }
        }
    }
}
