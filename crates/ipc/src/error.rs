//! Why ranks could not be asked, and why they refused.

use std::io;
use std::path::{Path, PathBuf};

use crate::message::Member;

/// Why something of this crate failed. The message says what to do where somebody can do something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IpcError {
    /// Something else has the directory's name.
    #[error("{} is not a directory; remove it, kvcached makes a directory for its sockets there", path.display())]
    NotADirectory {
        /// What was found.
        path: PathBuf,
    },
    /// Another user owns the directory.
    #[error(
        "{} belongs to user {owner}, not to user {uid}; have its owner or root remove it, or set XDG_RUNTIME_DIR to a directory \
         of your own", path.display()
    )]
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
    /// A socket's path is longer than the system takes.
    #[error(
        "{} is {} bytes long, and a socket's path may have {limit}; set XDG_RUNTIME_DIR to a shorter path",
        path.display(), path.as_os_str().len()
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// What the system takes.
        limit: usize,
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
    /// The other end of a connection is another user's process.
    #[error("{} is served by user {peer}, not by user {uid}", path.display())]
    PeerNotOurs {
        /// The socket.
        path: PathBuf,
        /// Whose process it is.
        peer: u32,
        /// Who we are.
        uid: u32,
    },
    /// A group was added twice.
    #[error("this rank serves group {group} already")]
    GroupTaken {
        /// The group.
        group: u32,
    },
    /// The server was stopped.
    #[error("the rank's server was stopped")]
    Stopped,
    /// The ranks were let go.
    #[error("the ranks were closed")]
    Closed,
    /// The members make no group.
    #[error("the members of a group cannot be {members:?}: {why}")]
    Members {
        /// As given.
        members: Vec<Member>,
        /// What is wrong with them.
        why: &'static str,
    },
    /// There is no such page. Nothing was changed.
    #[error("page {page} is outside a group of {num_pages} pages")]
    NoSuchPage {
        /// The page.
        page: u32,
        /// Pages of the group.
        num_pages: u32,
    },
    /// A rank has no memory for the pages. Everything was undone on all of them: asking again later is right.
    #[error("{detail}")]
    OutOfMemory {
        /// Which rank, in the driver's words.
        detail: String,
    },
    /// A rank could not back the pages. Everything was undone on all of them, but for lost pages.
    #[error("{detail}")]
    MapFailed {
        /// Pages in an unknown state on some rank.
        lost: Vec<u32>,
        /// Which rank, in the driver's words.
        detail: String,
    },
    /// A rank could not take the memory of the pages. Pages in neither list lost it everywhere.
    #[error("{detail}")]
    UnmapFailed {
        /// Pages in an unknown state on some rank.
        lost: Vec<u32>,
        /// Mapped as before on all ranks.
        still_mapped: Vec<u32>,
        /// Which rank, in the driver's words.
        detail: String,
    },
    /// A rank could not do something that changes no page.
    #[error("{detail}")]
    Failed {
        /// Which rank, in the driver's words.
        detail: String,
    },
    /// The ranks no longer agree for certain, or one is gone: stop using the group.
    #[error("{why}")]
    Broken {
        /// Which rank, and what became of it.
        why: String,
    },
    /// This process is a fork of the one that made it.
    #[error("the connection to the ranks is that of process {owner}, and a fork cannot use it")]
    Forked {
        /// Process id of who made it.
        owner: u32,
    },
}

impl IpcError {
    pub(crate) fn io(doing: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self::Io { doing, path: path.to_path_buf(), source: source.into() }
    }
}
