//! Unmapping in two steps, so that several ranks do it together or not at all: what may follow what. Pure: no driver, no pages.
//!
//! ```text
//! unknown -> preparing -> prepared -> committing -> committed
//!    |           |            \-> aborting -> aborted
//!    |           \-> unknown (it failed and was undone)
//!    \-> aborted (an abort that overtook its prepare)
//! ```
//!
//! Messages may be lost, repeated and late, so that every step may be asked for again: what was decided stays decided. The
//! outcomes of the latest transactions are remembered; ids grow, so that an id older than all of those is told from a new one.

use std::collections::VecDeque;

use thiserror::Error;

use crate::driver::DriverError;

/// Outcomes that are remembered. A coordinator repeats itself for seconds, in which a group unmaps far fewer times.
pub(super) const HISTORY: usize = 64;

/// Names a transaction. Whoever unmaps gives each a greater number than the one before.
pub type TransactionId = u64;

/// How a transaction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The pages are unmapped for good.
    Committed,
    /// The pages are as they were before, but for those that an abort could not map back.
    Aborted,
}

/// Why a step of a transaction may not be taken. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransactionError {
    /// Nobody has prepared it.
    #[error("transaction {id} was never prepared")]
    Unknown {
        /// The transaction.
        id: TransactionId,
    },
    /// The group has another one that is not decided.
    #[error("transaction {id} must wait: {pending} is pending")]
    Pending {
        /// The transaction.
        id: TransactionId,
        /// The one that is not decided.
        pending: TransactionId,
    },
    /// It was prepared for other pages.
    #[error("transaction {id} was prepared for other pages")]
    OtherPages {
        /// The transaction.
        id: TransactionId,
    },
    /// The contrary was decided, or the decision cannot be prepared anew.
    #[error("transaction {id} is {}", match outcome { Outcome::Committed => "committed", Outcome::Aborted => "aborted" })]
    Decided {
        /// The transaction.
        id: TransactionId,
        /// How it ended, or is about to end.
        outcome: Outcome,
    },
    /// It is older than every outcome that is remembered.
    #[error("transaction {id} is too old: its outcome is forgotten")]
    Forgotten {
        /// The transaction.
        id: TransactionId,
    },
    /// Another thread is taking a step of it at this moment.
    #[error("transaction {id} is being worked on by another thread")]
    Busy {
        /// The transaction.
        id: TransactionId,
    },
}

/// Pages that an abort could not map back, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Loss {
    pub pages: Vec<u32>,
    pub source: DriverError,
}

/// What a step asks of whoever takes it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Do it, then say how it went.
    Go,
    /// It was done before.
    Done,
    /// It was done before, and these pages were lost by it.
    Lost(Loss),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Preparing,
    Prepared,
    /// `running`: some thread releases its memory; else that failed part of the way, and goes on with the next commit.
    Committing {
        running: bool,
    },
    Aborting,
}

/// The transactions of one group.
#[derive(Debug, Default)]
pub(super) struct Transactions {
    pending: Option<(TransactionId, Phase)>,
    history: VecDeque<(TransactionId, Outcome, Option<Loss>)>,
    /// The greatest id whose outcome was dropped from the history.
    forgotten: Option<TransactionId>,
}

type Result<T> = std::result::Result<T, TransactionError>;

impl Transactions {
    /// The one that is not decided.
    pub fn pending(&self) -> Option<TransactionId> {
        self.pending.map(|(id, _)| id)
    }

    /// A prepare. `same_pages`: whether the pending one, if it is this one, has the same pages.
    pub fn prepare(&mut self, id: TransactionId, same_pages: bool) -> Result<Step> {
        match self.pending {
            Some((pending, phase)) if pending == id => match phase {
                Phase::Preparing | Phase::Aborting => Err(TransactionError::Busy { id }),
                Phase::Prepared if same_pages => Ok(Step::Done),
                Phase::Prepared => Err(TransactionError::OtherPages { id }),
                Phase::Committing { .. } => {
                    Err(TransactionError::Decided { id, outcome: Outcome::Committed })
                }
            },
            pending => {
                if let Some((outcome, _)) = self.known(id)? {
                    return Err(TransactionError::Decided { id, outcome });
                }
                if let Some((pending, _)) = pending {
                    return Err(TransactionError::Pending { id, pending });
                }
                self.pending = Some((id, Phase::Preparing));
                Ok(Step::Go)
            }
        }
    }

    /// The pages of a prepare that may `Go` are unmapped.
    pub fn prepared(&mut self) {
        self.advance(Phase::Preparing, Phase::Prepared);
    }

    /// A prepare that may `Go` failed and was undone: as if it had never been asked for.
    pub fn not_prepared(&mut self) {
        self.pending = None;
    }

    /// A commit.
    pub fn commit(&mut self, id: TransactionId) -> Result<Step> {
        if let Some((pending, phase)) = self.pending
            && pending == id
        {
            return match phase {
                Phase::Prepared | Phase::Committing { running: false } => {
                    self.pending = Some((id, Phase::Committing { running: true }));
                    Ok(Step::Go)
                }
                Phase::Preparing | Phase::Aborting | Phase::Committing { running: true } => {
                    Err(TransactionError::Busy { id })
                }
            };
        }
        match self.known(id)? {
            Some((Outcome::Committed, _)) => Ok(Step::Done),
            Some((outcome, _)) => Err(TransactionError::Decided { id, outcome }),
            None => Err(TransactionError::Unknown { id }),
        }
    }

    /// A commit that may `Go` has released everything.
    pub fn committed(&mut self) {
        self.decide(Outcome::Committed, None);
    }

    /// A commit that may `Go` could not release everything. It stays committed: the next commit goes on.
    pub fn half_committed(&mut self) {
        self.advance(Phase::Committing { running: true }, Phase::Committing { running: false });
    }

    /// An abort. One that overtakes its prepare is remembered, so that the prepare is refused.
    pub fn abort(&mut self, id: TransactionId) -> Result<Step> {
        if let Some((pending, phase)) = self.pending
            && pending == id
        {
            return match phase {
                Phase::Prepared => {
                    self.pending = Some((id, Phase::Aborting));
                    Ok(Step::Go)
                }
                Phase::Committing { .. } => {
                    Err(TransactionError::Decided { id, outcome: Outcome::Committed })
                }
                Phase::Preparing | Phase::Aborting => Err(TransactionError::Busy { id }),
            };
        }
        match self.known(id)? {
            Some((Outcome::Aborted, Some(loss))) => Ok(Step::Lost(loss)),
            Some((Outcome::Aborted, None)) => Ok(Step::Done),
            Some((outcome, _)) => Err(TransactionError::Decided { id, outcome }),
            None => {
                self.remember(id, Outcome::Aborted, None);
                Ok(Step::Done)
            }
        }
    }

    /// An abort that may `Go` has mapped everything back, but for what is lost.
    pub fn aborted(&mut self, loss: Option<Loss>) {
        self.decide(Outcome::Aborted, loss);
    }

    /// An abort that may `Go` has done nothing.
    pub fn not_aborted(&mut self) {
        self.advance(Phase::Aborting, Phase::Prepared);
    }

    /// The outcome of a transaction that is not pending; None: it was never heard of.
    fn known(&self, id: TransactionId) -> Result<Option<(Outcome, Option<Loss>)>> {
        if let Some((_, outcome, loss)) = self.history.iter().find(|(known, ..)| *known == id) {
            return Ok(Some((*outcome, loss.clone())));
        }
        match self.forgotten {
            Some(forgotten) if id <= forgotten => Err(TransactionError::Forgotten { id }),
            _ => Ok(None),
        }
    }

    fn advance(&mut self, from: Phase, to: Phase) {
        if let Some((_, phase)) = &mut self.pending
            && *phase == from
        {
            *phase = to;
        }
    }

    fn decide(&mut self, outcome: Outcome, loss: Option<Loss>) {
        if let Some((id, _)) = self.pending.take() {
            self.remember(id, outcome, loss);
        }
    }

    fn remember(&mut self, id: TransactionId, outcome: Outcome, loss: Option<Loss>) {
        self.history.push_back((id, outcome, loss));
        if self.history.len() > HISTORY
            && let Some((old, ..)) = self.history.pop_front()
        {
            self.forgotten = self.forgotten.max(Some(old));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Event {
        Prepare(TransactionId, bool),
        PrepareDone(bool),
        Commit(TransactionId),
        CommitDone(bool),
        Abort(TransactionId),
        AbortDone(bool),
        AbortFailed,
    }
    use Event::*;

    /// The contract, told as what is known of every id, without a bound on the history.
    #[derive(Debug, Default, Clone)]
    struct Reference {
        decided: BTreeMap<TransactionId, (Outcome, bool)>,
        pending: Option<(TransactionId, &'static str)>,
        order: Vec<TransactionId>,
    }

    fn loss() -> Loss {
        Loss { pages: vec![7], source: DriverError::NoSymbol { call: "c" } }
    }

    impl Reference {
        fn forgotten(&self, id: TransactionId) -> bool {
            let old = self.order.len().saturating_sub(HISTORY);
            let dropped = &self.order[..old];
            dropped.iter().max().is_some_and(|m| id <= *m) && !self.order[old..].contains(&id)
        }

        fn decide(&mut self, id: TransactionId, outcome: Outcome, lost: bool) {
            self.decided.insert(id, (outcome, lost));
            self.order.push(id);
        }

        /// What the step answers, in a word.
        fn ask(&mut self, event: Event) -> &'static str {
            let (Prepare(id, _) | Commit(id) | Abort(id)) = event else { return "" };
            let phase = self.pending.filter(|(pending, _)| *pending == id).map(|(_, phase)| phase);
            if phase.is_none() && self.forgotten(id) {
                return "forgotten";
            }
            let decided = self.decided.get(&id).copied();
            let (answer, next) = match (event, phase, decided) {
                (Prepare(_, true), Some("prepared"), _) => ("done", None),
                (Prepare(_, false), Some("prepared"), _) => ("other pages", None),
                (Prepare(..) | Abort(_), Some("half" | "committing"), _) => ("committed", None),
                (Commit(_), Some("prepared" | "half"), _) => ("go", Some("committing")),
                (Abort(_), Some("prepared"), _) => ("go", Some("aborting")),
                (_, Some(_), _) => ("busy", None),
                (Commit(_), None, Some((Outcome::Committed, _))) => ("done", None),
                (Abort(_), None, Some((Outcome::Aborted, false))) => ("done", None),
                (Abort(_), None, Some((Outcome::Aborted, true))) => ("lost", None),
                (_, None, Some((Outcome::Committed, _))) => ("committed", None),
                (_, None, Some((Outcome::Aborted, _))) => ("aborted", None),
                (Prepare(..), None, None) if self.pending.is_some() => ("pending", None),
                (Prepare(..), None, None) => ("go", Some("preparing")),
                (Commit(_), None, None) => ("unknown", None),
                (Abort(_), None, None) => {
                    self.decide(id, Outcome::Aborted, false);
                    ("done", None)
                }
                _ => unreachable!(),
            };
            if let Some(next) = next {
                self.pending = Some((id, next));
            }
            answer
        }

        /// Whether this end fits the phase, and if so what it leads to.
        fn end(&mut self, event: Event) -> bool {
            let Some((id, phase)) = self.pending else { return false };
            match (event, phase) {
                (PrepareDone(true), "preparing") => self.pending = Some((id, "prepared")),
                (PrepareDone(false), "preparing") => self.pending = None,
                (CommitDone(false), "committing") => self.pending = Some((id, "half")),
                (CommitDone(true), "committing") => {
                    self.pending = None;
                    self.decide(id, Outcome::Committed, false);
                }
                (AbortFailed, "aborting") => self.pending = Some((id, "prepared")),
                (AbortDone(lost), "aborting") => {
                    self.pending = None;
                    self.decide(id, Outcome::Aborted, lost);
                }
                _ => return false,
            }
            true
        }
    }

    fn word(answer: Result<Step>) -> &'static str {
        match answer {
            Ok(Step::Go) => "go",
            Ok(Step::Done) => "done",
            Ok(Step::Lost(lost)) => {
                assert_eq!(lost, loss());
                "lost"
            }
            Err(TransactionError::Unknown { .. }) => "unknown",
            Err(TransactionError::Pending { .. }) => "pending",
            Err(TransactionError::OtherPages { .. }) => "other pages",
            Err(TransactionError::Decided { outcome: Outcome::Committed, .. }) => "committed",
            Err(TransactionError::Decided { outcome: Outcome::Aborted, .. }) => "aborted",
            Err(TransactionError::Forgotten { .. }) => "forgotten",
            Err(TransactionError::Busy { .. }) => "busy",
        }
    }

    fn apply(real: &mut Transactions, reference: &mut Reference, event: Event) {
        let answer = match event {
            Prepare(id, same) => word(real.prepare(id, same)),
            Commit(id) => word(real.commit(id)),
            Abort(id) => word(real.abort(id)),
            end => {
                if reference.end(end) {
                    match end {
                        PrepareDone(true) => real.prepared(),
                        PrepareDone(false) => real.not_prepared(),
                        CommitDone(true) => real.committed(),
                        CommitDone(false) => real.half_committed(),
                        AbortDone(lost) => real.aborted(lost.then(loss)),
                        AbortFailed => real.not_aborted(),
                        _ => {}
                    }
                }
                return;
            }
        };
        assert_eq!(answer, reference.ask(event), "{event:?} in {reference:?}");
        assert_eq!(real.pending(), reference.pending.map(|(id, _)| id));
    }

    #[test]
    fn every_step_after_every_history_of_five() {
        // Two ids, each event: all sequences. Every illegal step is among them.
        let mut events = vec![PrepareDone(true), PrepareDone(false), CommitDone(true), CommitDone(false)];
        events.extend([AbortDone(true), AbortDone(false), AbortFailed]);
        for id in 1..=2 {
            events.extend([Prepare(id, true), Prepare(id, false), Commit(id), Abort(id)]);
        }
        let mut answers = std::collections::BTreeSet::new();
        for number in 0..events.len().pow(4) {
            let (mut real, mut reference) = (Transactions::default(), Reference::default());
            apply(&mut real, &mut reference, Prepare(1, true));
            for place in 0..4 {
                apply(&mut real, &mut reference, events[number / events.len().pow(place) % events.len()]);
            }
            for &event in &events {
                answers.insert(reference.clone().ask(event));
            }
        }
        for answer in
            ["go", "done", "lost", "unknown", "pending", "other pages", "committed", "aborted", "busy"]
        {
            assert!(answers.contains(answer), "{answer} was never the answer");
        }
    }

    #[test]
    fn an_outcome_is_remembered_for_as_long_as_was_said() {
        let mut real = Transactions::default();
        for id in 1..=HISTORY as u64 + 2 {
            assert_eq!(real.abort(id), Ok(Step::Done));
        }
        assert_eq!(real.abort(2), Err(TransactionError::Forgotten { id: 2 }));
        assert_eq!(real.prepare(2, false), Err(TransactionError::Forgotten { id: 2 }));
        assert_eq!(real.abort(3), Ok(Step::Done));
        assert_eq!(word(real.prepare(3, false)), "aborted");
        assert_eq!(real.history.len(), HISTORY);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_answers_as_the_reference_does(
            events in proptest::collection::vec(
                prop_oneof![
                    (1u64..200, any::<bool>()).prop_map(|(id, same)| Prepare(id, same)),
                    (1u64..200).prop_map(Commit),
                    (1u64..200).prop_map(Abort),
                    any::<bool>().prop_map(PrepareDone),
                    any::<bool>().prop_map(CommitDone),
                    any::<bool>().prop_map(AbortDone),
                    Just(AbortFailed),
                ],
                0..400,
            ),
            near in any::<bool>(),
        ) {
            let (mut real, mut reference) = (Transactions::default(), Reference::default());
            for event in events {
                // Steps of the pending transaction, which chance alone would seldom name.
                let named = reference.pending.map(|(id, _)| id).filter(|_| near);
                let event = match (event, named) {
                    (Commit(_), Some(id)) => Commit(id),
                    (Abort(old), Some(id)) if old % 2 == 0 => Abort(id),
                    (other, _) => other,
                };
                apply(&mut real, &mut reference, event);
            }
        }
    }
}
