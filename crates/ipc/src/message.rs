//! What coordinator and ranks say to each other. Pure data; `wire` has its bytes.

use std::fmt;

use crate::runs::Runs;

/// Names one exchange of a coordinator, and what is remembered of it. Grows within an epoch, across all groups' pools of one
/// coordinator or not: a rank keeps them by group.
pub type TransactionId = u64;

/// A coordinator's term of office over a group. A later coordinator has a greater one.
pub type Epoch = u64;

/// Which worker this is: the pipeline stage, and the rank within the stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Member {
    /// Pipeline stage, from 0.
    pub stage: u16,
    /// Rank within the stage, from 0.
    pub rank: u16,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of stage {}", self.rank, self.stage)
    }
}

/// A message and what it is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The coordinator's term.
    pub epoch: Epoch,
    /// Which exchange it belongs to.
    pub transaction: TransactionId,
    /// The KV cache group.
    pub group: u32,
    /// The worker asked, or answering.
    pub member: Member,
    /// What is said.
    pub message: Message,
}

/// What is said.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Message {
    /// By the coordinator.
    Request(Request),
    /// By the rank.
    Answer(Answer),
}

/// What a coordinator asks of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Request {
    /// A term begins: what is the group made of, and which of its pages are mapped? Answered by `Created`.
    Hello,
    /// Back these pages. Answered by `Mapped`, `Failed` or `Refused`.
    Map(Runs),
    /// Unmap these pages at once: for a group that is one rank. Answered by `Unmapped`, `Failed` or `Refused`.
    Unmap(Runs),
    /// Unmap these pages and keep their memory. Answered by `Prepared`, `Failed` or `Refused`.
    Prepare(Runs),
    /// Release what the transaction keeps. Answered by `Committed` or `Refused`.
    Commit,
    /// Undo the transaction: map back what it keeps, or unmap what it mapped anew. Answered by `Aborted` or `Refused`.
    Abort,
    /// How does the transaction stand? Answered at once, also while driver work is under way, by what was answered last, or by
    /// `Running` or `Unknown`.
    Query,
    /// Wait for all work on the device. Answered by `Passed` or `Failed`.
    Barrier,
    /// Give back the memory kept for later pages. Answered by `Trimmed` or `Failed`.
    Trim,
    /// How much memory could the device give now? Answered by `Room` or `Failed`.
    Room,
    /// The term ends in order. Answered by `Bye`.
    Bye,
}

/// What a rank answers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Answer {
    /// Bytes that the rank's group holds beside its pages at this moment: memory kept for later pages or not given back yet.
    pub beside_bytes: u64,
    /// The answer.
    pub body: Body,
}

/// The answer itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Body {
    /// To `Hello`.
    Created(Created),
    /// The pages are backed; these were not before.
    Mapped {
        /// Backed by this transaction.
        new: Runs,
    },
    /// The pages are unmapped and their memory is given back.
    Unmapped,
    /// The pages are unmapped and their memory is kept.
    Prepared,
    /// The kept memory is released.
    Committed,
    /// The pages are as they were before the transaction, but for these, which are lost.
    Aborted {
        /// In an unknown state.
        lost: Runs,
    },
    /// The driver refused; what was begun has been undone but for what is said here.
    Failed(Failure),
    /// To `Query`, and to a request that is repeated: it is being worked on, or waits for what is.
    Running,
    /// To `Query`: never heard of it.
    Unknown,
    /// To `Barrier`.
    Passed,
    /// To `Trim`.
    Trimmed {
        /// Given back.
        bytes: u64,
    },
    /// To `Room`.
    Room {
        /// Bytes that the device could give.
        free_bytes: u64,
    },
    /// To `Bye`.
    Bye,
    /// The request breaks the protocol: nothing was done.
    Refused(Refusal),
}

/// A rank's group as it stands when a term begins.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Created {
    /// Physical bytes of one page on this rank.
    pub page_bytes: u64,
    /// Bytes of addresses on this rank.
    pub virtual_bytes: u64,
    /// Pages that can be backed.
    pub num_pages: u32,
    /// Blocks in a page, and from the first id of a page to that of the next.
    pub blocks_per_page: u32,
    /// See `blocks_per_page`.
    pub ids_per_page: u32,
    /// Backed pages.
    pub mapped: Runs,
    /// Pages in an unknown state.
    pub lost: Runs,
}

/// Why driver work failed, and what that left.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Failure {
    /// Whether memory is short, which is load and no fault.
    pub out_of_memory: bool,
    /// Pages of the request that are in an unknown state now.
    pub lost: Runs,
    /// Of an `Unmap` or `Prepare`: pages of the request that are mapped as before.
    pub still_mapped: Runs,
    /// In the driver's words.
    pub detail: String,
}

/// How a request breaks the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// Of a term that is over.
    StaleEpoch,
    /// The transaction was decided the other way, or what it mapped has since been unmapped by another.
    Decided,
    /// The transaction was begun with other pages or as another request.
    Different,
    /// The transaction is older than everything that is remembered.
    Forgotten,
    /// Another unmapping is not decided.
    Pending,
    /// There is nothing of that name to commit.
    Unprepared,
    /// The rank has no such group.
    NoSuchGroup,
    /// The rank is another stage or rank than the frame says.
    NotMe,
    /// A page outside the group, or no page at all.
    OutOfRange,
    /// Too much is waiting already.
    Overloaded,
    /// The request is of a kind that this rank does not know.
    UnknownKind,
}

impl Refusal {
    /// All of them, in the order of their numbers on the wire: new ones go to the end.
    pub const ALL: [Self; 11] = [
        Self::StaleEpoch,
        Self::Decided,
        Self::Different,
        Self::Forgotten,
        Self::Pending,
        Self::Unprepared,
        Self::NoSuchGroup,
        Self::NotMe,
        Self::OutOfRange,
        Self::Overloaded,
        Self::UnknownKind,
    ];
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refusal::StaleEpoch => {
                "another coordinator has taken the group over, or this one's term has ended"
            }
            Refusal::Decided => "the transaction was decided the other way",
            Refusal::Different => "the transaction was begun as something else",
            Refusal::Forgotten => "the transaction is older than everything that is remembered",
            Refusal::Pending => "another unmapping is not decided",
            Refusal::Unprepared => "the transaction was not prepared",
            Refusal::NoSuchGroup => "there is no such group",
            Refusal::NotMe => "this is another rank",
            Refusal::OutOfRange => "a page is outside the group",
            Refusal::Overloaded => "too much is waiting already",
            Refusal::UnknownKind => "the request is of a kind that is not known",
        })
    }
}
