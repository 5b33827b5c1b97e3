//! One exchange of a coordinator with its members: who has answered what, and what an answer means now.

use crate::message::{Body, Failure, Member, Refusal, Request, TransactionId};
use crate::runs::Runs;

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Hello,
    /// Each member unmaps its own pages, at the beginning of a term.
    Reconcile(Vec<Runs>),
    Map(Runs),
    /// Of a group that is one member.
    Unmap(Runs),
    /// Unmap, in two phases.
    Prepare(Runs),
    Barrier,
    Trim,
    Room,
    Bye,
}

impl Kind {
    /// The pages that nobody else may change meanwhile.
    pub fn pages(&self) -> Option<&Runs> {
        match self {
            Kind::Map(pages) | Kind::Unmap(pages) | Kind::Prepare(pages) => Some(pages),
            Kind::Hello | Kind::Reconcile(_) | Kind::Barrier | Kind::Trim | Kind::Room | Kind::Bye => None,
        }
    }

    pub fn is_unmap(&self) -> bool {
        matches!(self, Kind::Unmap(_) | Kind::Prepare(_))
    }

    /// Whether a failure of one member is undone on all.
    pub fn is_undone_together(&self) -> bool {
        matches!(self, Kind::Map(_) | Kind::Prepare(_))
    }

    pub fn request(&self, member: usize) -> Request {
        match self {
            Kind::Hello => Request::Hello,
            Kind::Reconcile(pages) => Request::Unmap(pages.get(member).cloned().unwrap_or_default()),
            Kind::Map(pages) => Request::Map(pages.clone()),
            Kind::Unmap(pages) => Request::Unmap(pages.clone()),
            Kind::Prepare(pages) => Request::Prepare(pages.clone()),
            Kind::Barrier => Request::Barrier,
            Kind::Trim => Request::Trim,
            Kind::Room => Request::Room,
            Kind::Bye => Request::Bye,
        }
    }

    fn is_answered_by(&self, body: &Body) -> bool {
        match (self, body) {
            (Kind::Hello, Body::Created(_))
            | (Kind::Map(_), Body::Mapped { .. })
            | (Kind::Unmap(_) | Kind::Reconcile(_), Body::Unmapped)
            | (Kind::Prepare(_), Body::Prepared)
            | (Kind::Barrier, Body::Passed)
            | (Kind::Trim, Body::Trimmed { .. })
            | (Kind::Room, Body::Room { .. })
            | (Kind::Bye, Body::Bye | Body::Refused(_)) => true,
            (Kind::Hello | Kind::Bye, _) => false,
            (_, Body::Failed(_)) => true,
            (_, Body::Refused(refusal)) => is_a_no(*refusal),
            _ => false,
        }
    }
}

/// The member will not or cannot, and goes on; any other refusal means that the two do not understand each other.
fn is_a_no(refusal: Refusal) -> bool {
    matches!(refusal, Refusal::Pending | Refusal::Overloaded | Refusal::UnknownKind | Refusal::OutOfRange)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    /// Nothing is decided.
    Asked,
    /// Every member is told to commit.
    Commit,
    /// Every member is told to abort.
    Abort,
}

/// Where one member stands.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Party {
    /// Asked, not answered. `silent`: a deadline has passed and nothing was heard since. `deadlines`: how many have passed.
    Waits {
        silent: bool,
        deadlines: u8,
    },
    Answered(Body),
    /// Nothing is to be had from it: it is lost, or was not asked.
    Out,
}

impl Party {
    pub const ASKED: Party = Party::Waits { silent: false, deadlines: 0 };
}

/// What an answer means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// It is what was waited for.
    Answer,
    /// The member is at work.
    Alive,
    /// The member has not heard the request.
    Again,
    /// It answers something that is past.
    Late,
    /// It can be no answer to anything that was asked.
    Wrong(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Exchange {
    /// The operation that it is part of, by the name that `Started` gave it.
    pub operation: TransactionId,
    pub kind: Kind,
    pub phase: Phase,
    pub parties: Vec<Party>,
    /// The first that failed, and what it said.
    pub failure: Option<(Member, Failure)>,
    /// Pages lost on any member.
    pub lost: Runs,
}

impl Exchange {
    pub fn is_waiting(&self, member: usize) -> bool {
        matches!(self.parties.get(member), Some(Party::Waits { .. }))
    }

    pub fn is_answered(&self) -> bool {
        !self.parties.iter().any(|party| matches!(party, Party::Waits { .. }))
    }

    pub fn has_failure(&self) -> bool {
        let failed = |party: &Party| matches!(party, Party::Answered(Body::Failed(_) | Body::Refused(_)));
        self.parties.iter().any(failed)
    }

    /// What the member is told in this phase.
    pub fn request(&self, member: usize) -> Request {
        match self.phase {
            Phase::Asked => self.kind.request(member),
            Phase::Commit => Request::Commit,
            Phase::Abort => Request::Abort,
        }
    }

    /// What a silent member is asked. A decision is simply repeated.
    pub fn reminder(&self) -> Request {
        match (self.phase, &self.kind) {
            (Phase::Asked, Kind::Bye) => Request::Bye,
            (Phase::Asked, _) => Request::Query,
            (Phase::Commit, _) => Request::Commit,
            (Phase::Abort, _) => Request::Abort,
        }
    }

    pub fn read(&self, body: &Body) -> Reading {
        let late = match (self.phase, body) {
            (_, Body::Running) => return Reading::Alive,
            (Phase::Asked, Body::Unknown) => return Reading::Again,
            (Phase::Asked, body) if self.kind.is_answered_by(body) => return Reading::Answer,
            (Phase::Asked, _) => false,
            (Phase::Commit, Body::Committed) | (Phase::Abort, Body::Aborted { .. }) => {
                return Reading::Answer;
            }
            (Phase::Commit, Body::Failed(_)) => false,
            (_, Body::Unknown) => true,
            (_, body) => self.kind.is_answered_by(body),
        };
        if late { Reading::Late } else { Reading::Wrong(complaint(&self.request(0), body)) }
    }

    /// Takes in what members say of pages that are lost, and the first failure.
    pub fn note(&mut self, member: Member, body: &Body) {
        if self.kind == Kind::Bye {
            return; // refused, its term is over as well
        }
        let (failure, lost) = match (body, self.kind.pages()) {
            (Body::Aborted { lost }, _) => (None, lost.clone()),
            // All or none: what is not mapped as before is in no state that the group knows.
            (Body::Failed(failure), Some(pages)) if matches!(self.kind, Kind::Prepare(_)) => {
                (Some(failure.clone()), failure.lost.or(&pages.minus(&failure.still_mapped)))
            }
            (Body::Failed(failure), _) => (Some(failure.clone()), failure.lost.clone()),
            (Body::Refused(refusal), pages) => (Some(refused(*refusal, pages)), Runs::none()),
            _ => return,
        };
        self.lost = self.lost.or(&lost);
        if let Some(failure) = failure {
            self.failure.get_or_insert((member, failure));
        }
    }

    /// Why it failed.
    pub fn detail(&self) -> String {
        match &self.failure {
            Some((member, failure)) => format!("{member}: {}", failure.detail),
            None => String::new(),
        }
    }
}

fn refused(refusal: Refusal, pages: Option<&Runs>) -> Failure {
    Failure {
        out_of_memory: false,
        lost: Runs::none(),
        still_mapped: pages.cloned().unwrap_or_default(),
        detail: format!("refused: {refusal}"),
    }
}

fn complaint(request: &Request, body: &Body) -> String {
    let asked = match request {
        Request::Hello => "HELLO",
        Request::Map(_) => "MAP",
        Request::Unmap(_) => "UNMAP",
        Request::Prepare(_) => "PREPARE",
        Request::Commit => "COMMIT",
        Request::Abort => "ABORT",
        Request::Query => "QUERY",
        Request::Barrier => "BARRIER",
        Request::Trim => "TRIM",
        Request::Room => "ROOM",
        Request::Bye => "BYE",
    };
    match body {
        Body::Refused(refusal) => format!("it refuses {asked}: {refusal}"),
        Body::Failed(failure) => format!("it cannot {asked}: {}", failure.detail),
        _ => format!("it answers {body:?} to {asked}"),
    }
}
