//! What anybody of the user asks of a running instance, and the end of a record that nobody owns.
//!
//! Whoever asks holds the lock of one file of the directory while it writes into the instance's record, so that there is one at a time
//! and one that dies is in nobody's way; the instance reads without a lock, by the sequence.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::directory::{Directory, Removal, has_owner, read_copy};
use crate::error::ControlError;
use crate::layout::{Control, RECORD_BYTES, Record, check_header, decode};
use crate::mapping::Mapped;
use crate::terms::{Answered, Asked, Change, Outcome, Terms};
use crate::text::{check_name, file_name};
use crate::{bell, metrics};

const LOCK_FILE: &str = ".asking";
const PAUSE: Duration = Duration::from_millis(2);
/// Whoever holds the lock writes a few words.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// Asks instance `name` for a change, and waits for its answer as long as `patience`.
///
/// # Errors
///
/// [`ControlError`]: no such instance, terms that cannot hold, a record of another version, a refusal of the system.
pub fn ask(dir: &Path, name: &str, change: Change, patience: Duration) -> Result<Answered, ControlError> {
    check_name(name)?;
    let (directory, record) = open_live(dir, name)?;
    let control = &record.record().control;
    let asked = {
        let _one_at_a_time = lock(&directory)?;
        match enter(control, &change)? {
            Entered::Asked(asked) => asked,
            Entered::Answered(answered) => return Ok(answered),
        }
    };
    bell::ring(&control.bell);
    let deadline = Instant::now() + patience;
    loop {
        let answered = control.answered_revision.load(Ordering::Acquire);
        if answered >= asked.revision {
            return Ok(standing(control, asked.revision));
        }
        if Instant::now() >= deadline {
            let outcome = Outcome::Unanswered;
            return Ok(Answered { revision: asked.revision, outcome, terms: in_force(control) });
        }
        std::thread::sleep(PAUSE);
    }
}

/// Removes the record of instance `name`, which nobody owns any more. True: there was one.
///
/// # Errors
///
/// [`ControlError::Alive`] where a process owns it.
pub fn remove(dir: &Path, name: &str) -> Result<bool, ControlError> {
    check_name(name)?;
    let Some(directory) = Directory::open(dir)? else { return Ok(false) };
    let file_name = file_name(name);
    let path = directory.join(&file_name);
    let unreadable = |why| ControlError::InTheWay { path: path.clone(), why };
    let Some(file) = directory.open_file(&file_name).map_err(unreadable)? else { return Ok(false) };
    match directory.remove_unowned(&file, &file_name).map_err(unreadable)? {
        Removal::Removed => {
            metrics::remove_unowned(&directory, &metrics::file_name(name)); // else the next `list` does
            Ok(true)
        }
        Removal::Gone => Ok(false),
        Removal::Held => {
            let view = read_copy(&file, RECORD_BYTES).ok().and_then(|bytes| decode(&bytes, &path, 0).ok());
            Err(ControlError::Alive { name: name.to_owned(), pid: view.map(|view| view.pid) })
        }
    }
}

// ---------------------------------------------------------------- the record's owner

/// The terms in force.
pub(crate) fn in_force(control: &Control) -> Terms {
    let limit = control.limit_bytes.load(Ordering::Acquire);
    Terms::of_words(limit, control.min_bytes.load(Ordering::Acquire))
}

/// What is asked for and was not answered; `None` also while it is being written, after which the bell rings.
pub(crate) fn asked(control: &Control) -> Option<Asked> {
    let sequence = control.asked_sequence.load(Ordering::Acquire);
    let limit = control.asked_limit_bytes.load(Ordering::Acquire);
    let min_bytes = control.asked_min_bytes.load(Ordering::Acquire);
    let revision = control.asked_revision.load(Ordering::Acquire);
    let whole = sequence.is_multiple_of(2) && sequence == control.asked_sequence.load(Ordering::Acquire);
    let newer = revision > control.answered_revision.load(Ordering::Acquire);
    (whole && newer).then(|| Asked { revision, terms: Terms::of_words(limit, min_bytes) })
}

/// Answers a change, and puts it in force unless it is rejected.
pub(crate) fn answer(control: &Control, asked: &Asked, outcome: Outcome) {
    let Some(word) = outcome.word() else { return };
    if outcome != Outcome::Rejected {
        control.limit_bytes.store(asked.terms.limit_word(), Ordering::Release);
        control.min_bytes.store(asked.terms.min_bytes, Ordering::Release);
        control.revision.store(asked.revision, Ordering::Release);
    }
    control.answered.store(word, Ordering::Release);
    control.answered_revision.store(asked.revision, Ordering::Release);
}

// ---------------------------------------------------------------- whoever asks

enum Entered {
    Asked(Asked),
    /// There is nothing to wait for.
    Answered(Answered),
}

/// Writes a change into the record, or finds that another stands in its way.
fn enter(control: &Control, change: &Change) -> Result<Entered, ControlError> {
    let answered = control.answered_revision.load(Ordering::Acquire);
    // Under the lock nobody else writes; one who died while it wrote left an odd sequence and words that count for nothing.
    let sequence = control.asked_sequence.load(Ordering::Acquire);
    let (latest, base) = match asked(control) {
        Some(pending) => (pending.revision, pending.terms),
        None => (answered, in_force(control)),
    };
    let terms = base.with(change);
    let revision = match change.revision {
        None => latest.saturating_add(1),
        Some(revision) if revision > latest => revision,
        Some(revision) => {
            let same = revision == latest && terms == base;
            return Ok(match (same, latest > answered) {
                (true, true) => Entered::Asked(Asked { revision, terms }),
                (true, false) => Entered::Answered(standing(control, revision)),
                (false, _) => {
                    let outcome = if revision == latest { Outcome::Conflict } else { Outcome::Stale };
                    Entered::Answered(Answered { revision: latest, outcome, terms: in_force(control) })
                }
            });
        }
    };
    terms.check()?;
    let writing = sequence | 1;
    control.asked_sequence.store(writing, Ordering::Release);
    control.asked_limit_bytes.store(terms.limit_word(), Ordering::Release);
    control.asked_min_bytes.store(terms.min_bytes, Ordering::Release);
    control.asked_revision.store(revision, Ordering::Release);
    control.asked_sequence.store(writing.wrapping_add(1), Ordering::Release);
    Ok(Entered::Asked(Asked { revision, terms }))
}

/// What came of a change that was answered; one that a later one has replaced counts as that.
fn standing(control: &Control, revision: u64) -> Answered {
    let outcome = Outcome::from_word(control.answered.load(Ordering::Acquire));
    let answered = control.answered_revision.load(Ordering::Acquire);
    let outcome = if answered > revision { Some(Outcome::Stale) } else { outcome };
    Answered { revision: answered, outcome: outcome.unwrap_or(Outcome::Unanswered), terms: in_force(control) }
}

/// The record of a live instance, to be written.
fn open_live(dir: &Path, name: &str) -> Result<(Directory, Mapped<Record>), ControlError> {
    let missing = || ControlError::NoSuchInstance { name: name.to_owned() };
    let directory = Directory::open(dir)?.ok_or_else(missing)?;
    let file_name = file_name(name);
    let path = directory.join(&file_name);
    let unreadable = |why| ControlError::Unreadable { path: path.clone(), why };
    let file = directory.open_file_to_write(&file_name).map_err(unreadable)?.ok_or_else(missing)?;
    if !has_owner(&file).map_err(|error| ControlError::io("look at", &path, error))? {
        return Err(missing());
    }
    let bytes = read_copy(&file, RECORD_BYTES).map_err(|error| ControlError::io("read", &path, error))?;
    check_header(&bytes).map_err(unreadable)?;
    let record = Mapped::new(&file).map_err(|error| ControlError::io("map", &path, error))?;
    Ok((directory, record))
}

/// The lock of all who ask. The file stays.
fn lock(directory: &Directory) -> Result<File, ControlError> {
    let path = directory.join(LOCK_FILE);
    let failed = |error: std::io::Error| ControlError::io("lock", &path, error);
    let file = directory.open_or_create(LOCK_FILE).map_err(failed)?;
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Err(Errno::WOULDBLOCK | Errno::INTR) => return Err(ControlError::Busy { path: path.clone() }),
            Err(errno) => return Err(failed(errno.into())),
        }
    }
}
