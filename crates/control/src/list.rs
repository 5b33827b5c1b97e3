//! All instances of a directory, as others see them.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::directory::{Directory, Removal, has_owner, is_temporary, read_copy};
use crate::error::{ControlError, RecordError};
use crate::layout::{RECORD_BYTES, check_header, decode, settled_revision};
use crate::metrics;
use crate::text::instance_of;
use crate::view::InstanceView;

const READ_ATTEMPTS: u32 = 16;
/// A record lies under its temporary name for microseconds.
const TEMPORARY_AGE: Duration = Duration::from_secs(60);

/// One entry of [`list`].
#[derive(Debug)]
pub enum Listed {
    /// A live instance.
    Instance(InstanceView),
    /// A file that has the name of a record and is none that can be read. It is left where it is.
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: RecordError,
    },
}

/// All instances whose records lie in `dir`, by name; none where there is no such directory. Removes records whose owner has died.
///
/// # Errors
///
/// [`ControlError`] when the directory is not ours alone or cannot be read. A single bad file is [`Listed::Unreadable`].
pub fn list(dir: &Path) -> Result<Vec<Listed>, ControlError> {
    let Some(directory) = Directory::open(dir)? else { return Ok(Vec::new()) };
    let file_names =
        directory.file_names().map_err(|error| ControlError::io("read directory", dir, error))?;
    let mut listed = Vec::new();
    for file_name in file_names {
        if is_temporary(&file_name) {
            remove_abandoned(&directory, &file_name);
        } else if metrics::is_sidecar(&file_name) {
            metrics::remove_unowned(&directory, &file_name);
        } else if let Some(name) = instance_of(&file_name) {
            match look_at(&directory, &file_name, name) {
                Ok(None) => {}
                Ok(Some(view)) => listed.push(Listed::Instance(view)),
                Err(why) => listed.push(Listed::Unreadable { path: directory.join(&file_name), why }),
            }
        }
    }
    Ok(listed)
}

/// None for a stale record, which is removed, and for one that went while we looked.
fn look_at(directory: &Directory, file_name: &str, name: &str) -> Result<Option<InstanceView>, RecordError> {
    let Some(file) = directory.open_file(file_name)? else { return Ok(None) };
    if !has_owner(&file)? {
        // What is no record of ours is not ours to remove.
        check_header(&read_copy(&file, RECORD_BYTES)?)?;
        directory.remove_unowned(&file, file_name)?;
        return Ok(None);
    }
    let view = decode(&read_settled(&file)?, &directory.join(file_name), file.metadata()?.ino())?;
    if view.name != name {
        return Err(RecordError::NameMismatch { found: view.name });
    }
    Ok(Some(view))
}

/// A copy during which no row changed its name.
fn read_settled(file: &File) -> Result<Vec<u8>, RecordError> {
    let mut bytes = read_copy(file, RECORD_BYTES)?;
    for _ in 0..READ_ATTEMPTS {
        check_header(&bytes)?;
        let again = read_copy(file, RECORD_BYTES)?;
        check_header(&again)?;
        if settled_revision(&bytes).is_some() && settled_revision(&bytes) == settled_revision(&again) {
            return Ok(bytes);
        }
        bytes = again;
        std::thread::yield_now();
    }
    Err(RecordError::Changing)
}

/// Removes what a process left that died while it made its record. Best effort: it is in nobody's way.
fn remove_abandoned(directory: &Directory, file_name: &str) -> Option<Removal> {
    let file = directory.open_file(file_name).ok()??;
    let age = SystemTime::now().duration_since(file.metadata().ok()?.modified().ok()?).ok()?;
    if age < TEMPORARY_AGE {
        return None; // its owner may not have locked it yet
    }
    directory.remove_unowned(&file, file_name).ok()
}
