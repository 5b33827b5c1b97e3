//! Arbitrary bytes as an instance record: left behind by nobody, owned by a live process, or written under its owner's feet. They are
//! read exactly if they are a record, by a decoder of this file's own; no file but that record changes.
#![no_main]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use kvcached_control::{
    InstanceRecord, InstanceView, Listed, MAX_POOL_ROWS, Outcome, RECORD_BYTES, RecordError, Terms, list,
};
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use rustix::fs::{FlockOperation, flock};

const NAME: &str = "fuzzed";
/// Where limits and needs begin, after the rows of pools.
const CONTROL: usize = 1280;
const NEIGHBOUR: &str = "neighbour";

#[derive(Debug)]
struct Input {
    how: How,
    bytes: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum How {
    /// The file is nobody's.
    Stale,
    /// Somebody holds the file.
    Held,
    /// The owner's own record is overwritten.
    Overwritten,
}

impl<'a> Arbitrary<'a> for Input {
    fn arbitrary(input: &mut Unstructured<'a>) -> Result<Self> {
        let how = *input.choose(&[How::Stale, How::Held, How::Overwritten])?;
        if input.ratio(1, 8)? {
            return Ok(Input { how, bytes: input.bytes(input.len())?.to_vec() });
        }
        // A good record with some lies.
        let mut bytes = world().good.clone();
        while !input.is_empty() {
            let at = if input.ratio(1, 2)? {
                8 * input.int_in_range(0..=RECORD_BYTES / 8)?
            } else {
                input.int_in_range(0..=RECORD_BYTES)?
            };
            match input.int_in_range(0u8..=15)? {
                0 => bytes.truncate(at),
                1 => bytes.resize(at.max(bytes.len()), 0xff),
                2 => put(&mut bytes, at, &u64::arbitrary(input)?.to_ne_bytes()),
                3..=5 => put(&mut bytes, at, &u64::from(u8::arbitrary(input)?).to_ne_bytes()),
                6..=8 => put(&mut bytes, at, char::arbitrary(input)?.encode_utf8(&mut [0; 4]).as_bytes()),
                9 => put(&mut bytes, at, &[b'n'; 64]),
                _ => put(&mut bytes, at, &[u8::arbitrary(input)?]),
            }
        }
        Ok(Input { how, bytes })
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    let room = bytes.len().saturating_sub(at).min(value.len());
    if let Some(to) = bytes.get_mut(at..at + room) {
        to.copy_from_slice(&value[..room]);
    }
}

/// A directory with a live instance that has nothing to do with what happens beside it.
struct World {
    dir: PathBuf,
    path: PathBuf,
    _neighbour: InstanceRecord,
    neighbours_file: File,
    neighbours_bytes: Vec<u8>,
    neighbours_view: InstanceView,
    /// A record with all its rows.
    good: Vec<u8>,
}

fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("kvcached-fuzz-record-{}", std::process::id()));
        let neighbour =
            InstanceRecord::create(&dir, NEIGHBOUR, "vllm 0.29.0", "cuda:0", Terms::default()).unwrap();
        neighbour.pool_row("kv").unwrap().set(1, 2, 3, 4);
        let example = InstanceRecord::create(&dir, NAME, "vllm 0.29.0", "cuda:0", Terms::default()).unwrap();
        let rows: Vec<_> =
            (0..MAX_POOL_ROWS).map(|row| example.pool_row(&format!("group {row}")).unwrap()).collect();
        rows.iter().zip(1..).for_each(|(row, bytes)| row.set(bytes, bytes << 8, bytes << 16, bytes << 24));
        let (good, path) = (std::fs::read(example.path()).unwrap(), example.path().to_path_buf());
        drop((rows, example));
        let listed = list(&dir).unwrap();
        let [Listed::Instance(view)] = &listed[..] else { panic!("one instance") };
        World {
            neighbours_bytes: std::fs::read(neighbour.path()).unwrap(),
            neighbours_file: File::open(neighbour.path()).unwrap(),
            neighbours_view: view.clone(),
            _neighbour: neighbour,
            dir,
            path,
            good,
        }
    })
}

impl World {
    /// What `list` shows of the file under test; the rest is as ever. `owned`: an instance has it, and its sidecar.
    fn look(&self, remains: bool, owned: bool) -> Option<Listed> {
        let mut listed = list(&self.dir).unwrap();
        let neighbour = listed.pop();
        assert!(matches!(neighbour, Some(Listed::Instance(view)) if view == self.neighbours_view));
        let mut bytes = vec![0; RECORD_BYTES + 1];
        let count = self.neighbours_file.read_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes[..count], self.neighbours_bytes);
        let names = std::fs::read_dir(&self.dir).unwrap().map(|entry| entry.unwrap().file_name());
        let ours = remains.then_some(format!("{NAME}.kvc"));
        let ours = ours.into_iter().chain(owned.then_some(format!("{NAME}.kvm")));
        let others = ["kvc", "kvm"].map(|end| format!("{NEIGHBOUR}.{end}"));
        let expected = ours.chain(others).map(OsString::from);
        assert_eq!(names.collect::<BTreeSet<_>>(), expected.collect());
        assert!(listed.len() <= 1);
        listed.pop()
    }

    fn write(&self, bytes: &[u8]) -> File {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&self.path).unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    fn assert_unchanged(&self, bytes: &[u8]) {
        assert_eq!(std::fs::read(&self.path).unwrap(), bytes);
    }

    fn stale(&self, bytes: &[u8]) {
        drop(self.write(bytes));
        let left = !is_header(bytes);
        let shown = self.look(left, false);
        assert_eq!(matches!(shown, Some(Listed::Unreadable { .. })), left, "{shown:?}");
        if left {
            self.assert_unchanged(bytes);
        }
        let record = InstanceRecord::create(&self.dir, NAME, "sglang", "cpu", Terms::default()).unwrap();
        assert!(matches!(self.look(true, true), Some(Listed::Instance(view)) if view.engine == "sglang"));
        drop(record);
        assert!(self.look(false, false).is_none());
    }

    fn held(&self, bytes: &[u8]) {
        let file = self.write(bytes);
        flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        self.assert_read_as(bytes, false);
        self.assert_unchanged(bytes);
        std::fs::remove_file(&self.path).unwrap();
    }

    fn overwritten(&self, bytes: &[u8]) {
        let record = InstanceRecord::create(&self.dir, NAME, "sglang", "cpu", Terms::default()).unwrap();
        let row = record.pool_row("first").unwrap();
        let file = OpenOptions::new().write(true).open(&self.path).unwrap();
        file.write_all_at(bytes, 0).unwrap();
        self.assert_read_as(&std::fs::read(&self.path).unwrap(), true);
        // The owner goes on: its stores land in the record and nowhere else.
        row.set(1, 2, 3, 4);
        drop(row);
        record.pool_row("second").unwrap().set(5, 6, 7, 8);
        let after = std::fs::read(&self.path).unwrap();
        assert_eq!(after.len(), RECORD_BYTES.max(bytes.len()));
        assert_eq!(after.get(RECORD_BYTES..), bytes.get(RECORD_BYTES..).or(Some(&[])));
        self.assert_read_as(&after, true);
        drop(record);
        assert!(self.look(false, false).is_none());
    }

    fn assert_read_as(&self, bytes: &[u8], owned: bool) {
        match (self.look(true, owned), expected(bytes)) {
            (Some(Listed::Instance(view)), Some(expected)) => {
                let shown = (
                    view.name.as_str(),
                    view.engine,
                    view.device,
                    view.pid,
                    view.start_unix_ns,
                    view.heartbeat,
                );
                assert_eq!(
                    shown,
                    (
                        NAME,
                        expected.engine,
                        expected.device,
                        expected.pid,
                        expected.start,
                        expected.heartbeat
                    )
                );
                assert_eq!(
                    (view.terms, view.revision, view.outcome, (view.shortage_bytes, view.cached_bytes)),
                    (expected.terms, expected.revision, expected.outcome, expected.needs)
                );
                let figures = |pool: kvcached_control::PoolView| {
                    (
                        pool.name,
                        [pool.used_bytes, pool.reserved_bytes, pool.virtual_bytes, pool.quarantined_bytes],
                    )
                };
                assert_eq!(view.pools.into_iter().map(figures).collect::<Vec<_>>(), expected.pools);
                assert_eq!(view.path, self.path);
            }
            (Some(Listed::Unreadable { path, why }), None) => {
                assert_eq!(path, self.path);
                assert!(!matches!(why, RecordError::Io(_) | RecordError::NotAFile), "{why}");
                assert!(!why.to_string().contains(char::is_control), "{why:?} reaches a terminal");
            }
            (shown, expected) => panic!("{shown:?} where {:?} was written", expected.is_some()),
        }
    }
}

/// What a reader is to see.
struct Expected {
    engine: String,
    device: String,
    pid: u32,
    start: u64,
    heartbeat: u64,
    pools: Vec<(String, [u64; 4])>,
    terms: Terms,
    revision: u64,
    outcome: Outcome,
    needs: (u64, u64),
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn text(bytes: &[u8], at: usize) -> Option<String> {
    let field = &bytes[at..at + 64];
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(64);
    let text = String::from_utf8(field[..end].to_vec()).ok()?;
    (end > 0 && !text.contains(char::is_control)).then_some(text)
}

fn is_header(bytes: &[u8]) -> bool {
    bytes.len() == RECORD_BYTES
        && bytes.starts_with(b"kvcached")
        && (word(bytes, 8), word(bytes, 16)) == (2, RECORD_BYTES as u64)
}

/// `None`: no record, or one that its owner never finishes changing.
fn expected(bytes: &[u8]) -> Option<Expected> {
    let settled = is_header(bytes) && word(bytes, 48).is_multiple_of(2);
    if !settled || text(bytes, 64)? != NAME {
        return None;
    }
    let mut pools = Vec::new();
    for row in (256..CONTROL).step_by(128).filter(|&row| bytes[row] != 0) {
        pools.push((text(bytes, row)?, [64, 72, 80, 88].map(|figure| word(bytes, row + figure))));
    }
    Some(Expected {
        engine: text(bytes, 128)?,
        device: text(bytes, 192)?,
        pid: u32::try_from(word(bytes, 24)).ok()?,
        start: word(bytes, 32),
        heartbeat: word(bytes, 40),
        pools,
        terms: Terms {
            limit_bytes: Some(word(bytes, CONTROL)).filter(|limit| *limit != u64::MAX),
            min_bytes: word(bytes, CONTROL + 8),
        },
        revision: word(bytes, CONTROL + 16),
        outcome: match word(bytes, CONTROL + 64) {
            0 => Outcome::Applied,
            1 => Outcome::Deferred,
            2 => Outcome::Rejected,
            _ => return None,
        },
        needs: (word(bytes, CONTROL + 72), word(bytes, CONTROL + 80)),
    })
}

fuzz_target!(|input: Input| {
    match input.how {
        How::Stale => world().stale(&input.bytes),
        How::Held => world().held(&input.bytes),
        How::Overwritten => world().overwritten(&input.bytes),
    }
});
