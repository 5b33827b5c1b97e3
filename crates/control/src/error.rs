use std::io;
use std::path::{Path, PathBuf};

use crate::sizes::{MAX_POOL_ROWS, MAX_TEXT_BYTES};

/// Why a record could not be created, or a directory of records not be used. The message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The name cannot be the name of a file of ours.
    #[error(
        "instance name {name:?} is not valid: use 1 to {MAX_TEXT_BYTES} characters of A-Z a-z 0-9 . _ - and do not start with a dot"
    )]
    InvalidName {
        /// As given.
        name: String,
    },
    /// A live instance holds this name.
    #[error("instance name {name:?} is taken by a live process{}; choose another name or end that instance ({})",
        pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default(), path.display())]
    NameTaken {
        /// As given.
        name: String,
        /// Who holds it, where its record says so.
        pid: Option<u32>,
        /// Its record.
        path: PathBuf,
    },
    /// A text does not fit its field.
    #[error("{field} {text:?} is not valid: use 1 to {MAX_TEXT_BYTES} bytes without control characters")]
    InvalidText {
        /// Which field.
        field: &'static str,
        /// As given.
        text: String,
    },
    /// All rows are in use.
    #[error(
        "an instance shows at most {MAX_POOL_ROWS} pools, and pool {name:?} would be one more; shut another pool down first"
    )]
    PoolRowsFull {
        /// The pool without a row.
        name: String,
    },
    /// Another pool of this instance has this name.
    #[error("pool {name:?} already has a row in this instance; give each pool a name of its own")]
    PoolNameTaken {
        /// As given.
        name: String,
    },
    /// The record was closed.
    #[error("instance record {} is closed", path.display())]
    Closed {
        /// Where it was.
        path: PathBuf,
    },
    /// This process is a fork of the one whose record it is.
    #[error("instance record {} is that of process {owner}; a fork makes a record of its own", path.display())]
    Forked {
        /// Where it is.
        path: PathBuf,
        /// Process id of its owner.
        owner: u32,
    },
    /// Something else has the directory's name.
    #[error("{} is not a directory; remove it, kvcached makes a directory there", path.display())]
    NotADirectory {
        /// What was found.
        path: PathBuf,
    },
    /// Another user owns the directory.
    #[error("{} belongs to user {owner}, not to user {uid}; have its owner or root remove it", path.display())]
    DirectoryNotOurs {
        /// The directory.
        path: PathBuf,
        /// Who owns it.
        owner: u32,
        /// Who we are.
        uid: u32,
    },
    /// Others may look into the directory.
    #[error("{} has mode {mode:04o} and is open to other users; run: chmod 700 {}", path.display(), path.display())]
    DirectoryNotPrivate {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Something that is no file lies where the record should be.
    #[error("{} is in the way: {why}; remove it", path.display())]
    InTheWay {
        /// What was found.
        path: PathBuf,
        /// Why it cannot be replaced.
        why: RecordError,
    },
    /// There is no live instance of this name.
    #[error("there is no live instance {name:?}; kvctl list shows those that there are")]
    NoSuchInstance {
        /// As given.
        name: String,
    },
    /// A process owns the record.
    #[error("instance {name:?} is alive{}; end it instead", pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default())]
    Alive {
        /// As given.
        name: String,
        /// Who owns it, where its record says so.
        pid: Option<u32>,
    },
    /// A file that should be a record of ours is none that this version can read.
    #[error("{} cannot be used: {why}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: RecordError,
    },
    /// Somebody holds a lock that is held for microseconds.
    #[error("{} is locked and stays so; a process that holds it was stopped: continue or end it", path.display())]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// A limit and a minimum that contradict.
    #[error(
        "a limit of {limit_bytes} bytes is below the minimum of {min_bytes}: raise the one or lower the other"
    )]
    LimitBelowMin {
        /// The most that the instance may have, bytes.
        limit_bytes: u64,
        /// What is guaranteed to it, bytes.
        min_bytes: u64,
    },
    /// The minimums of all instances of a device would pass its budget.
    #[error(
        "a minimum of {min_bytes} bytes does not fit {device}: {others_bytes} of its budget of {budget_bytes} are guaranteed to other instances; lower one of them"
    )]
    MinimumsDoNotFit {
        /// The device.
        device: String,
        /// What was asked for, bytes.
        min_bytes: u64,
        /// What the others have, bytes.
        others_bytes: u64,
        /// What all may have, bytes.
        budget_bytes: u64,
    },
    /// Instances live by another budget.
    #[error(
        "the budget of {device} is {stands_bytes} bytes, by which other instances live, and not {asked_bytes}: give all of them the same KVCACHED_DEVICE_BUDGET, or end them first"
    )]
    BudgetDisagrees {
        /// The device.
        device: String,
        /// In force, bytes.
        stands_bytes: u64,
        /// Asked for, bytes.
        asked_bytes: u64,
    },
    /// No instance more can share the device.
    #[error("{device} is shared by as many instances as can be; end one of them")]
    BudgetFull {
        /// The device.
        device: String,
    },
    /// The operating system refused.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl ControlError {
    pub(crate) fn io(doing: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self::Io { doing, path: path.to_path_buf(), source: source.into() }
    }
}

/// Why a file is not a record that this version can read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// A directory, a link, a pipe.
    #[error("not a regular file")]
    NotAFile,
    /// Too short to say what it is.
    #[error("truncated: {bytes} bytes")]
    Truncated {
        /// Bytes found.
        bytes: usize,
    },
    /// Not written by kvcached.
    #[error("not a kvcached record")]
    Magic,
    /// Written by another version of kvcached.
    #[error("{what} version {found}, this kvcached reads version {reads}; {advice}")]
    Version {
        /// Of which kind of file.
        what: &'static str,
        /// Version found.
        found: u64,
        /// Version that is read.
        reads: u64,
        /// What to do.
        advice: &'static str,
    },
    /// The file or its header states another size.
    #[error("{found} bytes where a {what} has {expected}")]
    Size {
        /// Of which kind of file.
        what: &'static str,
        /// Bytes found or stated.
        found: u64,
        /// Bytes that there should be.
        expected: u64,
    },
    /// A number that cannot be.
    #[error("impossible {field}")]
    Number {
        /// Which field.
        field: &'static str,
    },
    /// Not printable UTF-8 text.
    #[error("unreadable {field}")]
    Text {
        /// Which field.
        field: &'static str,
    },
    /// The record of another instance under this file's name.
    #[error("it is the record of instance {found:?}")]
    NameMismatch {
        /// Name inside.
        found: String,
    },
    /// Its owner kept changing the names of its pools.
    #[error("its owner was changing it, try again")]
    Changing,
    /// The operating system refused.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<rustix::io::Errno> for RecordError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}
