//! What instances see of each other, through the public API and real processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use kvcached_control::{
    ControlError, InstanceRecord, InstanceView, Listed, MAX_POOL_ROWS, RECORD_BYTES, RecordError, Terms, list,
};

const OWNER_DIR: &str = "TEST_OWNER_DIR";

struct Home {
    _home: tempfile::TempDir,
    dir: PathBuf,
}

fn home() -> Home {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    Home { _home: home, dir }
}

fn create(dir: &Path, name: &str) -> InstanceRecord {
    InstanceRecord::create(dir, name, "vllm 0.29.0", "cuda:0", Terms::default()).unwrap()
}

fn instances(dir: &Path) -> Vec<InstanceView> {
    let only_instances = |listed| match listed {
        Listed::Instance(view) => view,
        Listed::Unreadable { path, why } => panic!("{}: {why}", path.display()),
    };
    list(dir).unwrap().into_iter().map(only_instances).collect()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// A process that owns record "owner" until it is killed.
struct Owner(Child);

impl Owner {
    fn start(dir: &Path) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "owner_process", "--ignored"])
            .env(OWNER_DIR, dir)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let owner = Self(child);
        let deadline = Instant::now() + Duration::from_secs(30);
        while !dir.join("owner.kvc").exists() {
            assert!(Instant::now() < deadline, "the owner made no record");
            std::thread::sleep(Duration::from_millis(5));
        }
        owner
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "the owner of other tests, started by them"]
fn owner_process() {
    let Some(dir) = std::env::var_os(OWNER_DIR) else { return };
    let record = create(Path::new(&dir), "owner");
    record.pool_row("kv").unwrap().set(1, 2, 3, 4);
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn an_instance_is_seen_while_it_lives() {
    let Home { dir, .. } = &home();
    assert!(instances(dir).is_empty());
    assert!(!dir.exists(), "looking makes no directory");
    let record = create(dir, "llama");
    let row = record.pool_row("group 0").unwrap();
    let other = record.pool_row("group 1").unwrap();
    row.set(100, 20, 1000, 3);
    other.clone().set(u64::MAX, 1, 1, 0);

    let seen = &instances(dir)[0];
    assert_eq!(
        (seen.name.as_str(), seen.engine.as_str(), seen.device.as_str()),
        ("llama", "vllm 0.29.0", "cuda:0")
    );
    assert_eq!((seen.pid, seen.path.as_path()), (std::process::id(), record.path()));
    assert_eq!(record.name(), "llama");
    let pool = &seen.pools[0];
    assert_eq!(pool.name, "group 0");
    assert_eq!(
        (pool.used_bytes, pool.reserved_bytes, pool.virtual_bytes, pool.quarantined_bytes),
        (100, 20, 1000, 3)
    );
    let total = seen.total();
    assert_eq!(
        (total.used_bytes, total.reserved_bytes, total.virtual_bytes),
        (u64::MAX, 21, 1001),
        "sums saturate"
    );

    row.set(101, 20, 1000, 3);
    assert!(instances(dir)[0].heartbeat > seen.heartbeat);
    assert_eq!((mode(dir), mode(record.path())), (0o700, 0o600));
    record.close();
    record.close();
    row.set(1, 1, 1, 1);
    assert!(instances(dir).is_empty());
    assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
    assert!(matches!(record.pool_row("late"), Err(ControlError::Closed { .. })));
}

#[test]
fn instances_are_listed_by_name_and_dropping_removes_them() {
    let Home { dir, .. } = &home();
    let records = ["b.kvc", "c", "a"].map(|name| create(dir, name));
    let names: Vec<_> = instances(dir).into_iter().map(|view| view.name).collect();
    assert_eq!(names, ["a", "b.kvc", "c"]);
    assert_eq!(records[0].name(), "b.kvc");
    drop(records);
    assert!(instances(dir).is_empty());
}

#[test]
fn rows_are_few_have_one_owner_and_are_given_back() {
    let Home { dir, .. } = &home();
    let record = create(dir, "rows");
    let mut rows: Vec<_> = (0..MAX_POOL_ROWS).map(|i| record.pool_row(&format!("p{i}")).unwrap()).collect();
    assert!(matches!(record.pool_row("p0"), Err(ControlError::PoolNameTaken { name }) if name == "p0"));
    assert!(matches!(record.pool_row("more"), Err(ControlError::PoolRowsFull { name }) if name == "more"));
    assert!(matches!(record.pool_row(""), Err(ControlError::InvalidText { field: "pool name", .. })));
    rows[3].set(7, 7, 7, 7);
    let clone = rows[3].clone();
    rows.remove(3);
    assert_eq!(instances(dir)[0].pools.len(), MAX_POOL_ROWS, "a clone keeps its row");
    drop(clone);
    assert_eq!(instances(dir)[0].pools.len(), MAX_POOL_ROWS - 1);
    let again = record.pool_row("a new one").unwrap();
    let seen = &instances(dir)[0].pools[3];
    assert_eq!((seen.name.as_str(), seen.used_bytes), ("a new one", 0));
    drop(record);
    again.set(1, 2, 3, 4); // its memory outlives the record
}

#[test]
fn a_reader_never_sees_half_a_name() {
    let Home { dir, .. } = &home();
    let record = create(dir, "busy");
    let (long_a, long_b) = ("a".repeat(64), "b".repeat(64));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for _ in 0..2000 {
                record.pool_row(&long_a).unwrap().set(1, 1, 1, 1);
                record.pool_row(&long_b).unwrap().set(2, 2, 2, 2);
            }
        });
        while !writer.is_finished() {
            for listed in list(dir).unwrap() {
                match listed {
                    Listed::Instance(view) => {
                        assert!(
                            view.pools.iter().all(|pool| pool.name == long_a || pool.name == long_b),
                            "{view:?}"
                        );
                    }
                    Listed::Unreadable { why: RecordError::Changing, .. } => {}
                    Listed::Unreadable { why, .. } => panic!("{why}"),
                }
            }
        }
    });
}

#[test]
fn a_live_name_is_taken() {
    let Home { dir, .. } = &home();
    let owner = Owner::start(dir);
    let Err(error) = InstanceRecord::create(dir, "owner", "e", "cpu", Terms::default()) else {
        panic!("two owners")
    };
    assert!(matches!(&error, ControlError::NameTaken { pid: Some(pid), .. } if *pid == owner.0.id()));
    assert_eq!(
        error.to_string(),
        format!(
            "instance name \"owner\" is taken by a live process (pid {}); choose another name or end that instance ({}/owner.kvc)",
            owner.0.id(),
            dir.display()
        )
    );
    assert_eq!(instances(dir)[0].pid, owner.0.id());
    assert_eq!(fs::read_dir(dir).unwrap().count(), 2, "record and sidecar: the refused one leaves nothing");
}

#[test]
fn a_killed_owner_is_noticed_and_its_record_removed() {
    let Home { dir, .. } = &home();
    let owner = Owner::start(dir);
    assert_eq!(instances(dir).len(), 1);
    owner.kill();
    assert!(dir.join("owner.kvc").exists());
    assert!(instances(dir).is_empty());
    assert!(!dir.join("owner.kvc").exists());
}

#[test]
fn a_killed_owners_name_is_taken_over() {
    let Home { dir, .. } = &home();
    Owner::start(dir).kill();
    let record = create(dir, "owner");
    let seen = &instances(dir)[0];
    assert_eq!((seen.pid, seen.pools.len()), (std::process::id(), 0));
    drop(record);
    assert!(instances(dir).is_empty());
}

#[test]
fn of_many_that_want_a_stale_name_one_gets_it() {
    let Home { dir, .. } = &home();
    drop(create(dir, "makes-the-directory"));
    for _ in 0..20 {
        fs::write(dir.join("wanted.kvc"), b"left by somebody").unwrap();
        let start = Barrier::new(6);
        let contend = || {
            start.wait();
            let _ = list(dir);
            let got = InstanceRecord::create(dir, "wanted", "e", "cpu", Terms::default());
            start.wait();
            match got {
                Ok(record) => {
                    assert_eq!(instances(dir).len(), 1);
                    start.wait();
                    drop(record);
                    1
                }
                Err(ControlError::NameTaken { .. }) => {
                    start.wait();
                    0
                }
                Err(error) => panic!("{error}"),
            }
        };
        let winners: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..6).map(|_| scope.spawn(contend)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(winners, 1);
        assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
    }
}

#[test]
fn what_replaced_a_record_is_not_removed_with_it() {
    let Home { dir, .. } = &home();
    let record = create(dir, "mine");
    fs::remove_file(record.path()).unwrap();
    let path = record.path().to_path_buf();
    let other = create(dir, "mine");
    drop(record);
    assert!(path.exists());
    assert_eq!(instances(dir).len(), 1);
    drop(other);
    assert!(!path.exists());
}

#[test]
fn mangled_files_are_named_and_hide_nobody() {
    let Home { dir, .. } = &home();
    let good = create(dir, "good");
    let bytes = fs::read(good.path()).unwrap();
    assert_eq!(bytes.len(), RECORD_BYTES);
    fs::write(dir.join("empty.kvc"), []).unwrap();
    fs::write(dir.join("short.kvc"), &bytes[..500]).unwrap();
    fs::write(dir.join("zeros.kvc"), vec![0; RECORD_BYTES]).unwrap();
    let mut newer = bytes.clone();
    newer[8] = 3;
    fs::write(dir.join("newer.kvc"), newer).unwrap();
    let huge = fs::File::create(dir.join("huge.kvc")).unwrap();
    huge.set_len(1 << 40).unwrap();
    fs::create_dir(dir.join("dir.kvc")).unwrap();
    symlink(good.path(), dir.join("link.kvc")).unwrap();
    assert!(Command::new("mkfifo").arg(dir.join("pipe.kvc")).status().unwrap().success());
    fs::write(dir.join("notes.txt"), "not of ours").unwrap();

    let mut shown = Vec::new();
    for listed in list(dir).unwrap() {
        shown.push(match listed {
            Listed::Instance(view) => format!("{} lives", view.name),
            Listed::Unreadable { path, why } => {
                format!("{}: {why}", path.file_name().unwrap().to_string_lossy())
            }
        });
    }
    assert_eq!(
        shown,
        [
            "dir.kvc: not a regular file",
            "empty.kvc: truncated: 0 bytes",
            "good lives",
            "huge.kvc: not a kvcached record",
            "link.kvc: not a regular file",
            "newer.kvc: record version 3, this kvcached reads version 2; use the kvctl of that installation",
            "pipe.kvc: not a regular file",
            "short.kvc: 500 bytes where a record has 1408",
            "zeros.kvc: not a kvcached record",
        ]
    );
    assert_eq!(list(dir).unwrap().len(), 9, "they stay");
    assert!(matches!(
        InstanceRecord::create(dir, "dir", "e", "cpu", Terms::default()),
        Err(ControlError::InTheWay { .. })
    ));
    assert!(
        InstanceRecord::create(dir, "short", "e", "cpu", Terms::default()).is_ok(),
        "a file that nobody holds makes way"
    );
}

#[test]
fn a_live_record_that_is_cut_or_renamed_is_an_error_not_a_signal() {
    let Home { dir, .. } = &home();
    let record = create(dir, "cut");
    fs::rename(record.path(), dir.join("alias.kvc")).unwrap();
    let alias = list(dir).unwrap();
    assert!(
        matches!(&alias[..], [Listed::Unreadable { why: RecordError::NameMismatch { found }, .. }] if found == "cut")
    );
    fs::File::options().write(true).open(dir.join("alias.kvc")).unwrap().set_len(100).unwrap();
    let cut = list(dir).unwrap();
    assert!(matches!(&cut[..], [Listed::Unreadable { why: RecordError::Size { found: 100, .. }, .. }]));
}

#[test]
fn an_unfinished_record_goes_when_it_is_old() {
    let Home { dir, .. } = &home();
    drop(create(dir, "makes-the-directory"));
    let [young, old] = ["young", "old"].map(|name| dir.join(format!(".new-{name}")));
    fs::write(&young, []).unwrap();
    let file = fs::File::create(&old).unwrap();
    file.set_modified(std::time::SystemTime::now() - Duration::from_secs(3600)).unwrap();
    assert!(list(dir).unwrap().is_empty());
    assert_eq!((young.exists(), old.exists()), (true, false));
}

#[test]
fn a_directory_that_others_can_enter_is_refused() {
    let Home { dir, .. } = &home();
    fs::DirBuilder::new().mode(0o700).create(dir).unwrap();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o750)).unwrap();
    let refused = list(dir).unwrap_err();
    assert!(matches!(refused, ControlError::DirectoryNotPrivate { mode: 0o750, .. }));
    assert_eq!(
        refused.to_string(),
        format!("{0} has mode 0750 and is open to other users; run: chmod 700 {0}", dir.display())
    );
    assert!(matches!(
        InstanceRecord::create(dir, "a", "e", "cpu", Terms::default()),
        Err(ControlError::DirectoryNotPrivate { .. })
    ));
}

#[test]
fn what_is_no_directory_is_refused() {
    let Home { dir, .. } = &home();
    fs::write(dir, []).unwrap();
    assert!(matches!(list(dir), Err(ControlError::NotADirectory { .. })));
    fs::remove_file(dir).unwrap();
    symlink("/tmp", dir).unwrap();
    assert!(matches!(
        InstanceRecord::create(dir, "a", "e", "cpu", Terms::default()),
        Err(ControlError::NotADirectory { .. })
    ));
    let missing = dir.with_file_name("missing").join("records");
    assert!(matches!(
        InstanceRecord::create(&missing, "a", "e", "cpu", Terms::default()),
        Err(ControlError::Io { .. })
    ));
}

#[test]
fn bad_names_and_texts_touch_no_file() {
    let Home { dir, .. } = &home();
    let refused = |name, engine, device| {
        InstanceRecord::create(dir, name, engine, device, Terms::default()).unwrap_err()
    };
    assert!(matches!(refused("../up", "e", "cpu"), ControlError::InvalidName { .. }));
    assert!(matches!(refused("a", "", "cpu"), ControlError::InvalidText { field: "engine", .. }));
    assert!(matches!(refused("a", "e", "\x1b[2J"), ControlError::InvalidText { field: "device", .. }));
    assert!(!dir.exists());
    assert_eq!(
        refused(".hidden", "e", "cpu").to_string(),
        "instance name \".hidden\" is not valid: use 1 to 64 characters of A-Z a-z 0-9 . _ - and do not start with a dot"
    );
}
