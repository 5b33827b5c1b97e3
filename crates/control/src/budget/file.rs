//! The file of a budget: how it appears, how it goes, and the gate.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::layout::{BUDGET_BYTES, BudgetRecord, check, encode};
use crate::directory::{Directory, has_owner, read_copy, temporary_name};
use crate::error::{ControlError, RecordError};
use crate::layout::{RECORD_BYTES, check_header};
use crate::mapping::Mapped;
use crate::text::instance_of;

const SUFFIX: &str = ".kvb";
/// Whoever has the gate needs it for microseconds; one that was stopped meanwhile is waited for so long.
const GATE_PATIENCE: Duration = Duration::from_secs(1);
const GATE_PAUSE: Duration = Duration::from_micros(50);
const GATE_SPINS: u32 = 20;
/// Between opening the file and having its gate it may have gone, with the last instance.
const OPEN_ATTEMPTS: u32 = 100;

pub(super) fn file_name(device: &str) -> String {
    format!("{device}{SUFFIX}")
}

pub(super) fn device_of(file_name: &str) -> Option<&str> {
    file_name.strip_suffix(SUFFIX)
}

/// The record of a device, mapped, with the gate closed behind us: made, where there is none, with this budget. One that cannot be read
/// makes way if nobody lives by it.
///
/// `own_name`: of the instance that asks.
pub(super) fn open(
    directory: &Directory,
    device: &str,
    budget_bytes: u64,
    own_name: &str,
) -> Result<(File, Mapped<BudgetRecord>), ControlError> {
    let name = file_name(device);
    let path = directory.join(&name);
    for _ in 0..OPEN_ATTEMPTS {
        let unreadable = |why| ControlError::Unreadable { path: path.clone(), why };
        let Some(file) = directory.open_file_to_write(&name).map_err(unreadable)? else {
            create(directory, device, budget_bytes)?;
            continue;
        };
        if !close_gate(&file).map_err(|error| ControlError::io("lock", &path, error))? {
            return Err(ControlError::Busy { path });
        }
        if !is_named(directory, &file, &name).map_err(|error| ControlError::io("look at", &path, error))? {
            continue; // its last instance went meanwhile
        }
        let bytes = read_copy(&file, BUDGET_BYTES).map_err(|error| ControlError::io("read", &path, error))?;
        if let Err(why) = check(&bytes, device) {
            if may_be_lived_by(directory, own_name, &why).map_err(unreadable)? {
                open_gate(&file);
                return Err(unreadable(why));
            }
            directory
                .remove_locked(&file, &name)
                .map_err(|error| ControlError::io("remove", &path, error))?;
            open_gate(&file);
            continue;
        }
        let record = Mapped::new(&file).map_err(|error| ControlError::io("map", &path, error))?;
        return Ok((file, record));
    }
    Err(ControlError::Busy { path })
}

/// Whether somebody may live by a budget that we cannot read: an instance of another version, and where the budget is none of another
/// version, which ours do not live by, any instance.
fn may_be_lived_by(directory: &Directory, own_name: &str, why: &RecordError) -> Result<bool, RecordError> {
    for file_name in directory.file_names()? {
        if instance_of(&file_name).is_none_or(|name| name == own_name) {
            continue;
        }
        let Some(file) = directory.open_file(&file_name)? else { continue };
        let ours = || Ok::<_, RecordError>(check_header(&read_copy(&file, RECORD_BYTES)?).is_ok());
        if has_owner(&file)? && !(matches!(why, RecordError::Version { .. }) && ours()?) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes the file, complete before it has its name; one that somebody else has made meanwhile is as good.
fn create(directory: &Directory, device: &str, budget_bytes: u64) -> Result<(), ControlError> {
    let temporary = temporary_name();
    let path = directory.join(&temporary);
    let mut file =
        directory.create_locked(&temporary).map_err(|error| ControlError::io("create", &path, error))?;
    let written = file.write_all(&encode(device, budget_bytes));
    let named = written.and_then(|()| directory.name_if_free(&temporary, &file_name(device)));
    let failed = |error| ControlError::io("create", &directory.join(&file_name(device)), error);
    if !named.map_err(failed)? {
        let removed = directory.remove_locked(&file, &temporary);
        removed.map_err(|error| ControlError::io("remove", &path, error))?;
    }
    Ok(())
}

/// The gate. False: somebody holds it and does not let go.
pub(super) fn close_gate(file: &File) -> std::io::Result<bool> {
    let deadline = Instant::now() + GATE_PATIENCE;
    let mut attempts = 0;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if attempts < GATE_SPINS => std::thread::yield_now(),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(GATE_PAUSE),
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        }
        attempts += 1;
    }
}

pub(super) fn open_gate(file: &File) {
    // It fails for a closed descriptor alone.
    let _ = rustix::fs::flock(file, FlockOperation::Unlock);
}

/// Whether the name still leads to this file.
fn is_named(directory: &Directory, file: &File, name: &str) -> std::io::Result<bool> {
    match directory.open_file(name) {
        Ok(Some(found)) => Ok(found.metadata()?.ino() == file.metadata()?.ino()),
        Ok(None) => Ok(false),
        Err(RecordError::Io(error)) => Err(error),
        Err(_) => Ok(false),
    }
}
