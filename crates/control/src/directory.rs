//! The directory of records, and the only ways a record's name appears and goes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::{ControlError, RecordError};

/// Others hold a stale file's lock for microseconds while they look at it; the owner holds it for its whole life.
const LOCK_ATTEMPTS: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(5);
const TEMPORARY_PREFIX: &str = ".new-";

/// `/dev/shm/kvcached-<uid>` of the effective user.
pub fn default_dir() -> PathBuf {
    PathBuf::from(format!("/dev/shm/kvcached-{}", rustix::process::geteuid().as_raw()))
}

/// An open directory that is ours and nobody else's. All work goes through its descriptor, so that it cannot be swapped under us.
pub(crate) struct Directory {
    fd: File,
    path: PathBuf,
}

/// What became of a name that might be stale.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    Removed,
    /// Somebody else removed or replaced it meanwhile.
    Gone,
    /// Its lock is held.
    Held,
}

impl Directory {
    /// Opens `path`, which is made (mode 0700) if it is missing.
    pub(crate) fn create(path: &Path) -> Result<Self, ControlError> {
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(ControlError::io("create directory", path, errno)),
        }
        Self::open(path)?.ok_or_else(|| ControlError::io("open directory", path, Errno::NOENT))
    }

    /// None where there is no such directory.
    pub(crate) fn open(path: &Path) -> Result<Option<Self>, ControlError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::NOTDIR | Errno::LOOP) => {
                return Err(ControlError::NotADirectory { path: path.to_path_buf() });
            }
            // Opening somebody else's 0700 directory fails before its owner can be looked at: say whose it is.
            Err(errno) => {
                if let Ok(stat) = rustix::fs::lstat(path) {
                    check_private(path, stat.st_uid, stat.st_mode)?;
                }
                return Err(ControlError::io("open directory", path, errno));
            }
        };
        let stat = rustix::fs::fstat(&fd).map_err(|errno| ControlError::io("look at", path, errno))?;
        check_private(path, stat.st_uid, stat.st_mode)?;
        Ok(Some(Self { fd: fd.into(), path: path.to_path_buf() }))
    }

    pub(crate) fn join(&self, file_name: &str) -> PathBuf {
        self.path.join(file_name)
    }

    /// Names of all entries that are UTF-8, in order.
    pub(crate) fn file_names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd)? {
            if let Ok(name) = entry?.file_name().to_str() {
                names.push(name.to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// A new file of mode 0600 whose lock is ours.
    pub(crate) fn create_locked(&self, file_name: &str) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&self.fd, file_name, flags, Mode::RUSR | Mode::WUSR)?);
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(file)
    }

    /// Opens a regular file to read; None where there is none of this name. Neither waits (pipes) nor follows links.
    pub(crate) fn open_file(&self, file_name: &str) -> Result<Option<File>, RecordError> {
        self.open_regular(file_name, OFlags::RDONLY)
    }

    /// [`Directory::open_file`], to be mapped and written.
    pub(crate) fn open_file_to_write(&self, file_name: &str) -> Result<Option<File>, RecordError> {
        self.open_regular(file_name, OFlags::RDWR)
    }

    /// A file that stays, made if missing.
    pub(crate) fn open_or_create(&self, file_name: &str) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::openat(&self.fd, file_name, flags, Mode::RUSR | Mode::WUSR)?))
    }

    fn open_regular(&self, file_name: &str, access: OFlags) -> Result<Option<File>, RecordError> {
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.fd, file_name, flags, Mode::empty()) {
            Ok(fd) => File::from(fd),
            Err(Errno::NOENT) => return Ok(None),
            // a link, or a socket
            Err(Errno::LOOP | Errno::NXIO) => return Err(RecordError::NotAFile),
            Err(errno) => return Err(errno.into()),
        };
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(RecordError::NotAFile);
        }
        Ok(Some(file))
    }

    /// Gives a file its name, unless that is taken: false then.
    pub(crate) fn name_if_free(&self, from: &str, to: &str) -> io::Result<bool> {
        match rustix::fs::renameat_with(&self.fd, from, &self.fd, to, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Gives a file its name, which whoever has it loses.
    pub(crate) fn replace(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.fd, from, &self.fd, to)?)
    }

    /// Gives the locked file `from` the name `to`. A stale record of that name makes way; false where a live one has it.
    pub(crate) fn publish(&self, from: &str, to: &str) -> Result<bool, ControlError> {
        for _ in 0..LOCK_ATTEMPTS {
            if self
                .name_if_free(from, to)
                .map_err(|error| ControlError::io("create", &self.join(to), error))?
            {
                return Ok(true);
            }
            let in_the_way = |why| ControlError::InTheWay { path: self.join(to), why };
            if let Some(file) = self.open_file(to).map_err(in_the_way)?
                && self.remove_unowned(&file, to).map_err(in_the_way)? == Removal::Held
            {
                std::thread::sleep(LOCK_PAUSE);
            }
        }
        Ok(false)
    }

    /// Removes the name of `file` if no process owns it. Nobody but the holder of a file's lock removes its name, so that the check
    /// of the inode cannot be overtaken.
    pub(crate) fn remove_unowned(&self, file: &File, file_name: &str) -> Result<Removal, RecordError> {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(Removal::Held),
            Err(errno) => return Err(errno.into()),
        }
        let removed = self.remove_locked(file, file_name);
        // Not left to the end of `file`: a process forked meanwhile would share the lock and keep it.
        rustix::fs::flock(file, FlockOperation::Unlock)?;
        Ok(if removed? { Removal::Removed } else { Removal::Gone })
    }

    /// Removes the name of `file`, whose lock is ours, if it still is the name of that file.
    pub(crate) fn remove_locked(&self, file: &File, file_name: &str) -> io::Result<bool> {
        let ours = rustix::fs::fstat(file)?;
        let named = match rustix::fs::statat(&self.fd, file_name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        };
        if (ours.st_dev, ours.st_ino) != (named.st_dev, named.st_ino) {
            return Ok(false);
        }
        rustix::fs::unlinkat(&self.fd, file_name, AtFlags::empty())?;
        Ok(true)
    }
}

/// Whether some process owns this record. One whose lock was free once is stale for good: owners lock before they publish.
pub(crate) fn has_owner(file: &File) -> io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {
            rustix::fs::flock(file, FlockOperation::Unlock)?;
            Ok(false)
        }
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

/// A copy of the file's first bytes: one more than what it should have, so that a longer file shows.
pub(crate) fn read_copy(file: &File, expected_bytes: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; expected_bytes + 1];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// Differs from every other of this process; of a process with the same pid in another namespace by the time.
pub(crate) fn temporary_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("{TEMPORARY_PREFIX}{}-{nanos}-{count}", std::process::id())
}

pub(crate) fn is_temporary(file_name: &str) -> bool {
    file_name.starts_with(TEMPORARY_PREFIX)
}

fn check_private(path: &Path, owner: u32, mode: u32) -> Result<(), ControlError> {
    let uid = rustix::process::geteuid().as_raw();
    if FileType::from_raw_mode(mode) != FileType::Directory {
        return Err(ControlError::NotADirectory { path: path.to_path_buf() });
    }
    if owner != uid {
        return Err(ControlError::DirectoryNotOurs { path: path.to_path_buf(), owner, uid });
    }
    if mode & 0o077 != 0 {
        return Err(ControlError::DirectoryNotPrivate { path: path.to_path_buf(), mode: mode & 0o7777 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_another_user_is_refused() {
        let uid = rustix::process::geteuid().as_raw();
        let refused = check_private(Path::new("/x"), uid + 1, 0o040700).unwrap_err();
        assert!(matches!(refused, ControlError::DirectoryNotOurs { owner, .. } if owner == uid + 1));
        assert_eq!(
            refused.to_string(),
            format!("/x belongs to user {}, not to user {uid}; have its owner or root remove it", uid + 1)
        );
    }
}
