//! The directory of sockets: the user's own, and open to nobody else.
//!
//! A socket appears under its name only when it listens already, so that whoever finds a name that refuses connections knows that
//! its process has died, and may remove it.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::IpcError;

/// `sockaddr_un` has 108 bytes, the last of which ends the path.
const MAX_PATH_BYTES: usize = 107;
/// More than any name of ours has.
const MAX_NAME_BYTES: usize = 40;
/// Somebody's sweep may take a name between binding and listening.
const BIND_ATTEMPTS: u32 = 8;
/// A name that is not in place yet belongs to somebody who dies, or puts it there within microseconds.
const STALE_TEMPORARY: Duration = Duration::from_secs(60);

const SUFFIX: &str = ".sock";

/// Sockets of this process so far.
static SOCKETS: AtomicU32 = AtomicU32::new(0);

/// An open directory that is ours and nobody else's.
#[derive(Debug, Clone)]
pub struct Directory {
    fd: Arc<OwnedFd>,
    path: PathBuf,
}

/// A socket that listens, under its name.
#[derive(Debug)]
pub(crate) struct Bound {
    pub listener: UnixListener,
    pub path: PathBuf,
    directory: Directory,
    name: String,
}

/// What an attempt to connect says of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Dead,
    Gone,
    /// Or nobody knows.
    Living,
}

impl Directory {
    /// `$XDG_RUNTIME_DIR/kvcached` where that variable names a directory of this user's that is short enough for sockets, else
    /// `/tmp/kvcached-<uid>`. Made (mode 0700) where it is missing.
    pub fn of_user() -> Result<Self, IpcError> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        if let Some(runtime) = runtime.filter(|path| is_usable(path)) {
            return Self::create(&runtime.join("kvcached"));
        }
        let uid = rustix::process::geteuid().as_raw();
        Self::create(Path::new(&format!("/tmp/kvcached-{uid}")))
    }

    /// Opens `path`, which is made (mode 0700) where it is missing. Refuses what is no directory, is a link, belongs to somebody
    /// else or is open to others: checked on what was opened, so that it cannot be exchanged afterwards.
    pub fn create(path: &Path) -> Result<Self, IpcError> {
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(IpcError::io("create directory", path, errno)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOTDIR | Errno::LOOP) => {
                return Err(IpcError::NotADirectory { path: path.to_path_buf() });
            }
            // Opening somebody else's 0700 directory fails before its owner can be looked at: say whose it is.
            Err(errno) => {
                if let Ok(stat) = rustix::fs::lstat(path) {
                    check_private(path, stat.st_uid, stat.st_mode)?;
                }
                return Err(IpcError::io("open directory", path, errno));
            }
        };
        let stat = rustix::fs::fstat(&fd).map_err(|errno| IpcError::io("look at", path, errno))?;
        check_private(path, stat.st_uid, stat.st_mode)?;
        Ok(Self { fd: Arc::new(fd), path: path.to_path_buf() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the sockets of processes that have died; returns how many.
    pub fn sweep(&self) -> usize {
        let Ok(entries) = rustix::fs::Dir::read_from(&*self.fd) else { return 0 };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().to_str().ok().map(str::to_owned));
        let removed = names.filter(|name| self.is_stale(name) && self.unlink(name)).count();
        if removed > 0 {
            tracing::info!(removed, directory = %self.path.display(), "removed sockets of processes that have died");
        }
        removed
    }

    /// A socket under a name of its own that listens and does not block.
    pub(crate) fn listen(&self) -> Result<Bound, IpcError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let name = unused_name();
            let path = self.path.join(&name);
            let temporary = format!(".{name}");
            let temporary_path = self.path.join(&temporary);
            if temporary_path.as_os_str().len() > MAX_PATH_BYTES {
                return Err(IpcError::PathTooLong { path: temporary_path, limit: MAX_PATH_BYTES });
            }
            let refused = |errno| IpcError::io("create socket", &path, errno);
            let listener = UnixListener::bind(&temporary_path).map_err(|e| IpcError::io("create socket", &path, e))?;
            listener.set_nonblocking(true).map_err(|e| IpcError::io("create socket", &path, e))?;
            match rustix::fs::renameat_with(&*self.fd, &*temporary, &*self.fd, &*name, RenameFlags::NOREPLACE) {
                Ok(()) => return Ok(Bound { listener, path, directory: self.clone(), name }),
                Err(Errno::NOENT) if attempts < BIND_ATTEMPTS => {}
                Err(errno) => {
                    self.unlink(&temporary);
                    return Err(refused(errno));
                }
            }
        }
    }

    /// Whether this is a socket of ours whose process has died.
    fn is_stale(&self, name: &str) -> bool {
        let is_temporary = name.starts_with('.');
        if !is_ours(name.trim_start_matches('.')) {
            return false;
        }
        let Ok(stat) = rustix::fs::statat(&*self.fd, name, AtFlags::SYMLINK_NOFOLLOW) else { return false };
        if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
            return false;
        }
        let made = UNIX_EPOCH + Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or(0));
        if is_temporary && SystemTime::now().duration_since(made).is_ok_and(|age| age < STALE_TEMPORARY) {
            return false;
        }
        life(&self.path.join(name)) == Life::Dead
    }

    fn unlink(&self, name: &str) -> bool {
        rustix::fs::unlinkat(&*self.fd, name, AtFlags::empty()).is_ok()
    }
}

impl Bound {
    /// Takes the name away. Names are never used twice, so that it is nobody else's.
    pub fn unlink(&self) {
        self.directory.unlink(&self.name);
    }
}

/// Removes the socket `path` of a rank that has died. False where it may be asked again in a moment: a process that ends closes
/// its connections and its listener one after the other.
pub(crate) fn remove_dead(path: &Path) -> bool {
    let is_socket =
        |stat: rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
    let named = path.file_name().and_then(|name| name.to_str()).is_some_and(is_ours);
    if !named || !rustix::fs::lstat(path).is_ok_and(is_socket) {
        return true;
    }
    match life(path) {
        Life::Living => false,
        Life::Gone => true,
        Life::Dead => {
            let removed = rustix::fs::unlink(path).is_ok();
            tracing::info!(socket = %path.display(), removed, "removed the socket of a rank that has died");
            true
        }
    }
}

/// Process id, a number within the process, and the time, since containers may share the directory and not the process ids.
fn unused_name() -> String {
    let number = SOCKETS.fetch_add(1, Ordering::Relaxed);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("r{}-{number}-{:x}{SUFFIX}", std::process::id(), now.as_nanos() as u64 & 0xffff_ffff_ffff)
}

fn is_ours(name: &str) -> bool {
    name.starts_with('r') && name.ends_with(SUFFIX) && name.len() <= MAX_NAME_BYTES
}

fn life(path: &Path) -> Life {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else {
        return Life::Living;
    };
    let Ok(address) = SocketAddrUnix::new(path) else { return Life::Living };
    match rustix::net::connect(&socket, &address) {
        Err(Errno::CONNREFUSED) => Life::Dead,
        Err(Errno::NOENT) => Life::Gone,
        _ => Life::Living,
    }
}

/// Whether this is a directory of our own that leaves room for the names of sockets.
fn is_usable(runtime: &Path) -> bool {
    let room = MAX_PATH_BYTES - MAX_NAME_BYTES - "/kvcached/.".len();
    if !runtime.is_absolute() || runtime.as_os_str().len() > room {
        return false;
    }
    rustix::fs::stat(runtime).is_ok_and(|stat| {
        FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            && stat.st_uid == rustix::process::geteuid().as_raw()
            && stat.st_mode & 0o300 == 0o300
    })
}

fn check_private(path: &Path, owner: u32, mode: u32) -> Result<(), IpcError> {
    let uid = rustix::process::geteuid().as_raw();
    if FileType::from_raw_mode(mode) != FileType::Directory {
        return Err(IpcError::NotADirectory { path: path.to_path_buf() });
    }
    if owner != uid {
        return Err(IpcError::DirectoryNotOurs { path: path.to_path_buf(), owner, uid });
    }
    if mode & 0o077 != 0 {
        return Err(IpcError::DirectoryNotPrivate { path: path.to_path_buf(), mode: mode & 0o7777 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn names(directory: &Directory) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn what_somebody_else_prepared_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("kvcached");
        Directory::create(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o700);
        Directory::create(&path).unwrap();
        for mode in [0o701, 0o710, 0o777, 0o1777] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let said = Directory::create(&path).unwrap_err().to_string();
            assert!(said.contains(&format!("has mode {mode:04o}")) && said.contains("chmod 700"), "{said}");
        }
        let link = base.path().join("link");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(Directory::create(&link), Err(IpcError::NotADirectory { .. })));
        let file = base.path().join("file");
        std::fs::write(&file, b"").unwrap();
        assert!(matches!(Directory::create(&file), Err(IpcError::NotADirectory { .. })));
        let uid = rustix::process::geteuid().as_raw();
        let foreign = check_private(Path::new("/x"), uid + 1, 0o040700).unwrap_err();
        assert!(foreign.to_string().starts_with(&format!("/x belongs to user {}", uid + 1)));
    }

    #[test]
    fn a_sweep_takes_the_dead_and_leaves_the_living() {
        let base = tempfile::tempdir().unwrap();
        let directory = Directory::create(&base.path().join("d")).unwrap();
        let living = directory.listen().unwrap();
        let dead = directory.listen().unwrap().name; // its listener is closed: the name stays
        std::fs::write(directory.path().join("r1-1-1.sock"), b"no socket").unwrap();
        let binding = directory.path().join(".r2-2-2.sock");
        drop(UnixListener::bind(&binding).unwrap());
        assert_eq!(names(&directory).len(), 4);
        assert_eq!(directory.sweep(), 1, "one that is just being made is left alone");
        assert!(!names(&directory).contains(&dead));
        assert!(names(&directory).contains(&living.name));
        let old = SystemTime::now() - STALE_TEMPORARY - Duration::from_secs(2);
        let times = rustix::fs::Timestamps {
            last_access: rustix::fs::Timespec { tv_sec: 0, tv_nsec: 0 },
            last_modification: rustix::fs::Timespec {
                tv_sec: old.duration_since(UNIX_EPOCH).unwrap().as_secs() as i64,
                tv_nsec: 0,
            },
        };
        rustix::fs::utimensat(rustix::fs::CWD, &binding, &times, AtFlags::empty()).unwrap();
        assert_eq!(directory.sweep(), 1);
        living.unlink();
        assert_eq!(names(&directory), ["r1-1-1.sock"]);
    }

    #[test]
    fn the_socket_of_a_dead_rank_is_removed_and_nothing_else() {
        let base = tempfile::tempdir().unwrap();
        let directory = Directory::create(&base.path().join("d")).unwrap();
        let living = directory.listen().unwrap();
        assert!(!remove_dead(&living.path));
        let path = living.path.clone();
        drop(living);
        assert!(remove_dead(&path) && !path.exists());
        assert!(remove_dead(&path), "already gone");
        let foreign = base.path().join("other");
        drop(UnixListener::bind(&foreign).unwrap());
        assert!(remove_dead(&foreign) && foreign.exists(), "not a name of ours");
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_refused_by_name() {
        let base = tempfile::tempdir().unwrap();
        let directory = Directory::create(&base.path().join("d".repeat(90))).unwrap();
        let said = directory.listen().unwrap_err().to_string();
        assert!(said.contains("may have 107") && said.contains("XDG_RUNTIME_DIR"), "{said}");
        assert_eq!(names(&directory), [""; 0]);
        assert!(!is_usable(&base.path().join("d".repeat(90))));
        assert!(is_usable(base.path()) && !is_usable(Path::new("/")) || rustix::process::geteuid().is_root());
    }
}
