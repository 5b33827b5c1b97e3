//! The coordinator's core: what is asked of whom, and how it ends, whatever is answered or is not.
#![allow(clippy::unwrap_used, clippy::panic)]

use kvcached_ipc::coordinator::{
    Coordinator, Effect, Event, MAX_QUEUED, MAX_UNDER_WAY, Op, Outcome, PATIENCE, WINDOW,
};
use kvcached_ipc::message::{
    Answer, Body, Created, Failure, Frame, Member, Message, Refusal, Request, TransactionId,
};
use kvcached_ipc::runs::Runs;

const GROUP: u32 = 3;
const EPOCH: u64 = 7;

fn runs(pages: &[u32]) -> Runs {
    Runs::from_pages(pages).unwrap()
}

fn map(pages: &[u32]) -> Request {
    Request::Map(runs(pages))
}

fn prepare(pages: &[u32]) -> Request {
    Request::Prepare(runs(pages))
}

fn unmap(pages: &[u32]) -> Request {
    Request::Unmap(runs(pages))
}

fn mapped(pages: &[u32]) -> Body {
    Body::Mapped { new: runs(pages) }
}

fn aborted(lost: &[u32]) -> Body {
    Body::Aborted { lost: runs(lost) }
}

fn failed(lost: &[u32], still_mapped: &[u32]) -> Body {
    let (lost, still_mapped) = (runs(lost), runs(still_mapped));
    Body::Failed(Failure { out_of_memory: true, lost, still_mapped, detail: "no".to_owned() })
}

fn having(mapped: &[u32], lost: &[u32]) -> Created {
    Created {
        page_bytes: 1,
        virtual_bytes: 1,
        num_pages: 8,
        blocks_per_page: 4,
        ids_per_page: 4,
        mapped: runs(mapped),
        lost: runs(lost),
    }
}

#[derive(Debug, PartialEq)]
enum Act {
    Started(TransactionId),
    Asks(usize, TransactionId, Request),
    Arm(TransactionId),
    Ends(TransactionId, Outcome),
    Breaks(usize),
}
use Act::{Arm, Asks, Breaks, Ends, Started};

fn broken() -> Outcome {
    Outcome::Broken { why: String::new() }
}

struct Desk {
    coordinator: Coordinator,
}

impl Desk {
    fn fresh(members: u16) -> Self {
        Desk::keeping(members, vec![])
    }

    fn keeping(members: u16, keep: Vec<u32>) -> Self {
        let members = (0..members).map(|rank| Member { stage: rank / 2, rank: rank % 2 }).collect();
        Desk { coordinator: Coordinator::new(GROUP, EPOCH, members, keep) }
    }

    /// A term that has begun; the next transaction is 2.
    fn new(members: u16) -> Self {
        let mut desk = Desk::fresh(members);
        desk.step(Event::Begin);
        for member in 0..members as usize {
            desk.says(member, 1, Body::Created(having(&[], &[])));
        }
        assert_eq!(desk.coordinator.num_open(), 0);
        desk
    }

    fn step(&mut self, event: Event) -> Vec<Act> {
        let short = |effect| match effect {
            Effect::Started { transaction } => Started(transaction),
            Effect::Arm { transaction } => Arm(transaction),
            Effect::Finish { transaction, outcome: Outcome::Broken { why } } => {
                assert!(why.contains("is lost"), "{why}");
                Ends(transaction, broken())
            }
            Effect::Finish { transaction, outcome } => Ends(transaction, outcome),
            Effect::Broken { member, why } => {
                assert!(why.contains("rank") && why.contains("stage"), "{why}");
                Breaks(member)
            }
            Effect::Send { member, frame } => {
                assert_eq!((frame.group, frame.epoch), (GROUP, EPOCH));
                assert_eq!(frame.member, Member { stage: member as u16 / 2, rank: member as u16 % 2 });
                let Message::Request(request) = frame.message else {
                    panic!("a coordinator answers nothing")
                };
                Asks(member, frame.transaction, request)
            }
        };
        self.coordinator.step(event).into_iter().map(short).collect()
    }

    fn start(&mut self, op: Op) -> Vec<Act> {
        self.step(Event::Start { op })
    }

    fn says(&mut self, member: usize, transaction: TransactionId, body: Body) -> Vec<Act> {
        let frame = answer(member, transaction, body);
        self.step(Event::Received { member, frame })
    }

    fn deadline(&mut self, transaction: TransactionId) -> Vec<Act> {
        self.step(Event::Deadline { transaction })
    }

    fn lost(&mut self, member: usize) -> Vec<Act> {
        self.step(Event::Lost { member, why: "closed".to_owned() })
    }

    /// Two members, transaction 2 unmaps page 1 and is decided: COMMIT has been sent.
    fn committing() -> Self {
        let mut desk = Desk::new(2);
        desk.start(Op::Unmap(vec![1]));
        desk.says(0, 2, Body::Prepared);
        let commit = |member| Asks(member, 2, Request::Commit);
        assert_eq!(desk.says(1, 2, Body::Prepared), [commit(0), commit(1), Arm(2)]);
        desk
    }

    /// Two members, transaction 2 maps page 1, member 1 failed.
    fn aborting() -> Self {
        let mut desk = Desk::new(2);
        desk.start(Op::Map(vec![1]));
        assert_eq!(desk.says(1, 2, failed(&[], &[])), [Asks(0, 2, Request::Abort), Arm(2)]);
        desk
    }
}

fn answer(member: usize, transaction: TransactionId, body: Body) -> Frame {
    Frame {
        epoch: EPOCH,
        transaction,
        group: GROUP,
        member: Member { stage: member as u16 / 2, rank: member as u16 % 2 },
        message: Message::Answer(Answer { beside_bytes: 0, body }),
    }
}

// ---------------------------------------------------------------- the beginning

#[test]
fn a_term_begins_when_all_have_answered() {
    let mut desk = Desk::fresh(3);
    let hello = |member| Asks(member, 1, Request::Hello);
    assert_eq!(desk.step(Event::Begin), [Started(1), hello(0), hello(1), hello(2), Arm(1)]);
    // What comes meanwhile waits.
    assert_eq!(desk.start(Op::Room), [Started(2)]);
    for member in [2, 0] {
        assert_eq!(desk.says(member, 1, Body::Created(having(&[], &[]))), []);
    }
    let acts = desk.says(1, 1, Body::Created(having(&[], &[5])));
    let created = vec![having(&[], &[]), having(&[], &[5]), having(&[], &[])];
    assert_eq!(acts[0], Ends(1, Outcome::Begun { created }));
    assert_eq!(acts[1], Asks(0, 2, Request::Room));
}

#[test]
fn what_is_not_kept_or_not_mapped_everywhere_is_unmapped_first() {
    let mut desk = Desk::keeping(3, vec![4, 0, 4, u32::MAX]);
    desk.step(Event::Begin);
    desk.says(0, 1, Body::Created(having(&[0, 1, 4], &[])));
    desk.says(1, 1, Body::Created(having(&[0], &[])));
    let acts = desk.says(2, 1, Body::Created(having(&[0, 4], &[])));
    // Page 0 stays. Member 1 has nothing to do, and is not asked.
    assert_eq!(acts, [Asks(0, 2, unmap(&[1, 4])), Asks(2, 2, unmap(&[4])), Arm(1)]);
    // Its deadlines are those of the beginning.
    assert_eq!(desk.deadline(1), [Asks(0, 2, Request::Query), Asks(2, 2, Request::Query), Arm(1)]);
    assert_eq!(desk.says(0, 2, Body::Unmapped), []);
    // A member that cannot has lost it.
    let acts = desk.says(2, 2, failed(&[], &[4]));
    let created = vec![having(&[0], &[]), having(&[0], &[]), having(&[0], &[4])];
    assert_eq!(acts, [Ends(1, Outcome::Begun { created })]);
    assert_eq!(desk.start(Op::Trim)[0], Started(3));
}

#[test]
fn members_that_differ_in_shape_make_no_group() {
    for differing in [
        Created { num_pages: 9, ..having(&[], &[]) },
        Created { blocks_per_page: 9, ..having(&[], &[]) },
        Created { ids_per_page: 9, ..having(&[], &[]) },
    ] {
        let mut desk = Desk::fresh(2);
        desk.step(Event::Begin);
        desk.start(Op::Room);
        desk.says(0, 1, Body::Created(having(&[], &[])));
        let acts = desk.says(1, 1, Body::Created(differing));
        assert_eq!(acts, [Breaks(1), Ends(2, broken()), Ends(1, broken())]);
        let why = desk.coordinator.is_broken().unwrap();
        assert!(why.contains('9') && why.contains("rank 1 of stage 0") && why.contains("rank 0"), "{why}");
    }
    // Bytes may differ: stages have other layers.
    let mut desk = Desk::fresh(2);
    desk.step(Event::Begin);
    desk.says(0, 1, Body::Created(having(&[], &[])));
    let other = Created { page_bytes: 9, virtual_bytes: 9, ..having(&[], &[]) };
    assert!(matches!(desk.says(1, 1, Body::Created(other))[..], [Ends(1, Outcome::Begun { .. })]));
}

#[test]
fn a_lost_hello_is_said_again() {
    let mut desk = Desk::fresh(2);
    desk.step(Event::Begin);
    desk.says(0, 1, Body::Created(having(&[], &[])));
    assert_eq!(desk.deadline(1), [Asks(1, 1, Request::Query), Arm(1)]);
    assert_eq!(desk.says(1, 1, Body::Unknown), [Asks(1, 1, Request::Hello)]);
    assert_eq!(desk.deadline(1), [Asks(1, 1, Request::Query), Arm(1)]);
    assert!(matches!(desk.says(1, 1, Body::Created(having(&[], &[])))[..], [Ends(1, Outcome::Begun { .. })]));
}

#[test]
fn a_member_that_refuses_hello_breaks_the_group() {
    for body in [Body::Refused(Refusal::StaleEpoch), Body::Refused(Refusal::Overloaded), failed(&[], &[])] {
        let mut desk = Desk::fresh(2);
        desk.step(Event::Begin);
        assert_eq!(desk.says(0, 1, body), [Breaks(0), Ends(1, broken())]);
    }
}

#[test]
fn a_term_begins_once_and_nothing_starts_before_or_after() {
    let mut desk = Desk::fresh(1);
    assert!(matches!(desk.start(Op::Room)[..], [Started(1), Ends(1, Outcome::Failed { .. })]));
    assert!(matches!(desk.step(Event::Begin)[..], [Started(2), Asks(..), Arm(2)]));
    assert!(matches!(desk.step(Event::Begin)[..], [Started(3), Ends(3, Outcome::Failed { .. })]));
    let mut desk = Desk::fresh(0);
    assert!(matches!(desk.step(Event::Begin)[..], [Started(1), Ends(1, Outcome::Failed { .. })]));
    let mut desk = Desk::fresh(1);
    assert_eq!(desk.lost(0), [Breaks(0)]);
    assert_eq!(desk.step(Event::Begin), [Started(1), Ends(1, broken())]);
    assert_eq!(desk.start(Op::Bye), [Started(2), Ends(2, broken())]);
}

// ---------------------------------------------------------------- maps

#[test]
fn a_map_goes_to_all_at_once() {
    let mut desk = Desk::new(3);
    let ask = |member| Asks(member, 2, map(&[1, 2]));
    assert_eq!(desk.start(Op::Map(vec![1, 2])), [Started(2), ask(0), ask(1), ask(2), Arm(2)]);
    assert_eq!(desk.says(1, 2, mapped(&[1, 2])), []);
    assert_eq!(desk.says(0, 2, mapped(&[1, 2])), []);
    assert_eq!(desk.says(2, 2, mapped(&[2])), [Ends(2, Outcome::Mapped { new: vec![1, 2] })]);
    // Said again it changes nothing.
    assert_eq!(desk.says(2, 2, failed(&[], &[])), []);
    assert_eq!(desk.deadline(2), []);
}

#[test]
fn one_that_fails_has_all_others_undo_it_at_once() {
    let mut desk = Desk::new(3);
    desk.start(Op::Map(vec![1, 2]));
    desk.says(0, 2, mapped(&[1, 2]));
    let abort = |member| Asks(member, 2, Request::Abort);
    assert_eq!(desk.says(1, 2, failed(&[2], &[])), [abort(0), abort(2), Arm(2)]);
    // Answers to the MAP cross the ABORT.
    assert_eq!(desk.says(2, 2, mapped(&[1, 2])), []);
    assert_eq!(desk.says(2, 2, aborted(&[1])), []);
    let outcome = |out_of_memory, detail: &str| Outcome::MapFailed {
        out_of_memory,
        lost: vec![1, 2],
        detail: detail.to_owned(),
    };
    assert_eq!(desk.says(0, 2, aborted(&[])), [Ends(2, outcome(true, "rank 1 of stage 0: no"))]);
    // One that will not is told as well: its refusal is not remembered, and a late copy of the MAP must do nothing.
    let mut desk = Desk::new(2);
    desk.start(Op::Map(vec![1, 2]));
    let acts = desk.says(1, 2, Body::Refused(Refusal::Overloaded));
    assert_eq!(acts, [abort(0), abort(1), Arm(2)]);
    desk.says(1, 2, aborted(&[1]));
    let acts = desk.says(0, 2, aborted(&[2]));
    assert_eq!(acts, [Ends(2, outcome(false, "rank 1 of stage 0: refused: too much is waiting already"))]);
}

#[test]
fn a_single_member_that_fails_has_undone_itself() {
    let mut desk = Desk::new(1);
    desk.start(Op::Map(vec![1, 2]));
    let acts = desk.says(0, 2, failed(&[2], &[]));
    assert!(
        matches!(&acts[..], [Ends(2, Outcome::MapFailed { out_of_memory: true, lost, .. })] if *lost == [2])
    );
}

// ---------------------------------------------------------------- unmaps

#[test]
fn one_member_unmaps_in_one_exchange() {
    let mut desk = Desk::new(1);
    assert_eq!(desk.start(Op::Unmap(vec![1, 2])), [Started(2), Asks(0, 2, unmap(&[1, 2])), Arm(2)]);
    assert_eq!(desk.says(0, 2, Body::Unmapped), [Ends(2, Outcome::Unmapped)]);
    desk.start(Op::Unmap(vec![3, 4, 5]));
    let acts = desk.says(0, 3, failed(&[3], &[4]));
    let Ends(3, Outcome::UnmapFailed { lost, still_mapped, .. }) = &acts[0] else { panic!("{acts:?}") };
    assert_eq!((&lost[..], &still_mapped[..]), (&[3][..], &[4][..]));
    desk.start(Op::Unmap(vec![4]));
    let acts = desk.says(0, 4, Body::Refused(Refusal::Pending));
    let Ends(4, Outcome::UnmapFailed { lost, still_mapped, .. }) = &acts[0] else { panic!("{acts:?}") };
    assert_eq!((&lost[..], &still_mapped[..]), (&[][..], &[4][..]));
}

#[test]
fn several_members_unmap_in_two_phases() {
    let mut desk = Desk::new(2);
    let ask = |member| Asks(member, 2, prepare(&[1]));
    assert_eq!(desk.start(Op::Unmap(vec![1])), [Started(2), ask(0), ask(1), Arm(2)]);
    let mut desk = Desk::committing();
    assert_eq!(desk.says(0, 2, Body::Committed), []);
    assert_eq!(desk.says(1, 2, Body::Committed), [Ends(2, Outcome::Unmapped)]);
}

#[test]
fn one_that_cannot_prepare_has_the_others_map_back() {
    let mut desk = Desk::new(3);
    desk.start(Op::Unmap(vec![1, 2, 3, 4]));
    desk.says(0, 2, Body::Prepared);
    // It lost 2, and says nothing of 4: nobody knows how that is.
    let abort = |member| Asks(member, 2, Request::Abort);
    assert_eq!(desk.says(1, 2, failed(&[2], &[1, 3])), [abort(0), abort(2), Arm(2)]);
    assert_eq!(desk.says(2, 2, Body::Prepared), []);
    desk.says(2, 2, aborted(&[]));
    let acts = desk.says(0, 2, aborted(&[3]));
    let detail = "rank 1 of stage 0: no".to_owned();
    assert_eq!(acts, [Ends(2, Outcome::UnmapFailed { lost: vec![2, 3, 4], still_mapped: vec![1], detail })]);
}

/// Every answer that there is, in the phase of COMMIT: none leads to an ABORT.
#[test]
fn nothing_aborts_after_the_first_commit() {
    let bodies = [
        Body::Created(having(&[], &[])),
        mapped(&[1]),
        Body::Unmapped,
        Body::Prepared,
        aborted(&[]),
        failed(&[1], &[]),
        Body::Running,
        Body::Unknown,
        Body::Passed,
        Body::Trimmed { bytes: 1 },
        Body::Room { free_bytes: 1 },
        Body::Bye,
        Body::Refused(Refusal::StaleEpoch),
        Body::Refused(Refusal::Decided),
        Body::Refused(Refusal::Different),
        Body::Refused(Refusal::Forgotten),
        Body::Refused(Refusal::Pending),
        Body::Refused(Refusal::Unprepared),
        Body::Refused(Refusal::NoSuchGroup),
        Body::Refused(Refusal::NotMe),
        Body::Refused(Refusal::OutOfRange),
        Body::Refused(Refusal::Overloaded),
        Body::Refused(Refusal::UnknownKind),
    ];
    let is_abort = |act: &Act| matches!(act, Asks(_, _, Request::Abort));
    for body in bodies {
        let mut desk = Desk::committing();
        let mut acts = desk.says(0, 2, body.clone());
        let breaks = acts.contains(&Breaks(0));
        acts.extend(desk.deadline(2));
        acts.extend(desk.says(0, 2, body.clone()));
        acts.extend(desk.deadline(2));
        acts.extend(desk.deadline(2));
        assert!(!acts.iter().any(is_abort), "{body:?}: {acts:?}");
        // However it goes, it ends.
        assert_eq!(acts.iter().filter(|act| matches!(act, Ends(2, _))).count(), 1, "{body:?}: {acts:?}");
        // What was perhaps said before the decision breaks nothing.
        let late = matches!(
            body,
            Body::Prepared
                | Body::Running
                | Body::Unknown
                | Body::Refused(
                    Refusal::Pending | Refusal::Overloaded | Refusal::UnknownKind | Refusal::OutOfRange
                )
        );
        assert_eq!(breaks, !late, "{body:?}");
    }
}

#[test]
fn a_commit_is_repeated_until_it_is_answered() {
    let mut desk = Desk::committing();
    desk.says(0, 2, Body::Committed);
    for _ in 0..PATIENCE {
        assert_eq!(desk.deadline(2), [Asks(1, 2, Request::Commit), Arm(2)]);
        assert_eq!(desk.says(1, 2, Body::Running), []);
    }
    assert_eq!(desk.says(1, 2, Body::Committed), [Ends(2, Outcome::Unmapped)]);
}

#[test]
fn an_abort_is_repeated_until_it_is_answered() {
    let mut desk = Desk::aborting();
    // A late answer to the MAP is no sign that the ABORT was heard.
    assert_eq!(desk.deadline(2), [Asks(0, 2, Request::Abort), Arm(2)]);
    assert_eq!(desk.says(0, 2, Body::Running), []);
    assert_eq!(desk.deadline(2), [Asks(0, 2, Request::Abort), Arm(2)]);
    assert_eq!(desk.says(0, 2, mapped(&[1])), []);
    assert_eq!(desk.deadline(2), [Breaks(0), Ends(2, broken())]);
}

// ---------------------------------------------------------------- silence

#[test]
fn a_lost_request_is_sent_again_and_a_lost_answer_asked_for() {
    let mut desk = Desk::new(2);
    desk.start(Op::Map(vec![1]));
    desk.says(0, 2, mapped(&[1]));
    assert_eq!(desk.deadline(2), [Asks(1, 2, Request::Query), Arm(2)]);
    // The request was lost.
    assert_eq!(desk.says(1, 2, Body::Unknown), [Asks(1, 2, map(&[1]))]);
    assert_eq!(desk.deadline(2), [Asks(1, 2, Request::Query), Arm(2)]);
    // The answer was lost: asked how it went, it says how.
    assert_eq!(desk.says(1, 2, mapped(&[1])), [Ends(2, Outcome::Mapped { new: vec![1] })]);
}

#[test]
fn long_work_is_waited_for_but_not_forever() {
    let mut desk = Desk::new(2);
    desk.start(Op::Map(vec![1]));
    desk.says(0, 2, mapped(&[1]));
    for _ in 0..PATIENCE {
        assert_eq!(desk.deadline(2), [Asks(1, 2, Request::Query), Arm(2)]);
        assert_eq!(desk.says(1, 2, Body::Running), []);
    }
    assert_eq!(desk.deadline(2), [Breaks(1), Asks(0, 2, Request::Abort), Arm(2)]);
    assert_eq!(desk.says(0, 2, aborted(&[])), [Ends(2, broken())]);
}

#[test]
fn silence_over_two_deadlines_is_a_loss() {
    let mut desk = Desk::new(3);
    desk.start(Op::Barrier);
    desk.says(1, 2, Body::Passed);
    desk.says(2, 2, Body::Passed);
    assert_eq!(desk.deadline(2), [Asks(0, 2, Request::Query), Arm(2)]);
    assert_eq!(desk.deadline(2), [Breaks(0), Ends(2, broken())]);
    let why = desk.coordinator.is_broken().unwrap();
    assert_eq!(why, "rank 0 of stage 0 is lost: it does not answer in time");
    // Survivors too are given two deadlines to clean up in, no more.
    let mut desk = Desk::new(3);
    desk.start(Op::Map(vec![1]));
    desk.lost(0);
    assert_eq!(desk.deadline(2), [Asks(1, 2, Request::Abort), Asks(2, 2, Request::Abort), Arm(2)]);
    desk.says(1, 2, aborted(&[]));
    assert_eq!(desk.deadline(2), [Ends(2, broken())]);
}

// ---------------------------------------------------------------- loss

#[test]
fn a_member_lost_before_a_decision_has_the_others_undo_it() {
    for (op, body) in [(Op::Map(vec![1]), mapped(&[1])), (Op::Unmap(vec![1]), Body::Prepared)] {
        let mut desk = Desk::new(3);
        desk.start(op);
        desk.start(Op::Unmap(vec![1, 2]));
        desk.says(0, 2, body);
        let abort = |member| Asks(member, 2, Request::Abort);
        // What waits ends at once, what is under way when the others are clean.
        assert_eq!(desk.lost(1), [Breaks(1), Ends(3, broken()), abort(0), abort(2), Arm(2)]);
        assert_eq!(desk.lost(1), []);
        desk.says(0, 2, aborted(&[]));
        assert_eq!(desk.says(1, 2, aborted(&[])), []);
        assert_eq!(desk.says(2, 2, aborted(&[])), [Ends(2, broken())]);
        assert_eq!(desk.start(Op::Map(vec![5])), [Started(4), Ends(4, broken())]);
    }
}

#[test]
fn a_member_lost_after_the_decision_has_the_others_complete_it() {
    let mut desk = Desk::committing();
    assert_eq!(desk.lost(1), [Breaks(1)]);
    assert_eq!(desk.deadline(2), [Asks(0, 2, Request::Commit), Arm(2)]);
    assert_eq!(desk.says(0, 2, Body::Committed), [Ends(2, broken())]);
    // The last that was waited for.
    let mut desk = Desk::committing();
    desk.says(0, 2, Body::Committed);
    assert_eq!(desk.lost(1), [Breaks(1), Ends(2, broken())]);
    let mut desk = Desk::aborting();
    assert_eq!(desk.lost(0), [Breaks(0), Ends(2, broken())]);
}

#[test]
fn a_member_lost_in_what_changes_no_pages_ends_it_at_once() {
    for op in [Op::Barrier, Op::Trim, Op::Room] {
        let mut desk = Desk::new(2);
        desk.start(op);
        assert_eq!(desk.lost(1), [Breaks(1), Ends(2, broken())]);
    }
    let mut desk = Desk::new(1);
    desk.start(Op::Unmap(vec![1]));
    assert_eq!(desk.lost(0), [Breaks(0), Ends(2, broken())]);
    let mut desk = Desk::new(1);
    desk.start(Op::Map(vec![1]));
    assert_eq!(desk.lost(0), [Breaks(0), Ends(2, broken())]);
    // In both phases of a beginning.
    let mut desk = Desk::fresh(2);
    desk.step(Event::Begin);
    assert_eq!(desk.lost(1), [Breaks(1), Ends(1, broken())]);
    let mut desk = Desk::fresh(2);
    desk.step(Event::Begin);
    desk.says(0, 1, Body::Created(having(&[1], &[])));
    desk.says(1, 1, Body::Created(having(&[1], &[])));
    assert_eq!(desk.lost(1), [Breaks(1), Ends(1, broken())]);
    // When nothing is asked.
    assert_eq!(Desk::new(2).lost(1), [Breaks(1)]);
    assert_eq!(Desk::new(2).lost(9), []);
}

#[test]
fn a_second_loss_while_cleaning_up_ends_it_too() {
    let mut desk = Desk::new(3);
    desk.start(Op::Map(vec![1]));
    desk.start(Op::Map(vec![2]));
    desk.lost(0);
    assert_eq!(desk.says(1, 2, aborted(&[])), []);
    assert_eq!(desk.says(1, 3, aborted(&[])), []);
    assert_eq!(desk.lost(2), [Ends(2, broken()), Ends(3, broken())]);
}

#[test]
fn whoever_answers_for_another_or_asks_is_no_member() {
    let good = answer(0, 2, mapped(&[1]));
    for frame in [
        Frame { group: GROUP + 1, ..good.clone() },
        Frame { member: Member { stage: 5, rank: 0 }, ..good.clone() },
        Frame { message: Message::Request(Request::Hello), ..good.clone() },
    ] {
        let mut desk = Desk::new(2);
        desk.start(Op::Map(vec![1]));
        assert_eq!(desk.step(Event::Received { member: 0, frame })[0], Breaks(0));
    }
    // Of another term, of a member that is none, of a transaction that is none: no answers of ours.
    let mut desk = Desk::new(2);
    desk.start(Op::Map(vec![1]));
    assert_eq!(desk.step(Event::Received { member: 0, frame: Frame { epoch: 6, ..good.clone() } }), []);
    assert_eq!(desk.step(Event::Received { member: 9, frame: good.clone() }), []);
    assert_eq!(desk.step(Event::Received { member: 0, frame: Frame { transaction: 99, ..good } }), []);
}

#[test]
fn an_answer_to_nothing_that_was_asked_is_a_loss() {
    for body in [Body::Unmapped, Body::Prepared, aborted(&[]), Body::Committed, Body::Bye, Body::Passed] {
        let mut desk = Desk::new(2);
        desk.start(Op::Map(vec![1]));
        assert_eq!(desk.says(0, 2, body)[0], Breaks(0));
    }
    for body in [Body::Committed, Body::Prepared, Body::Refused(Refusal::Decided)] {
        assert_eq!(Desk::aborting().says(0, 2, body)[0], Breaks(0));
    }
    for body in [mapped(&[]), failed(&[], &[]), Body::Running, Body::Unknown] {
        assert_eq!(Desk::aborting().says(0, 2, body), []);
    }
}

// ---------------------------------------------------------------- side by side

#[test]
fn maps_run_side_by_side_and_unmaps_one_by_one() {
    let mut desk = Desk::new(2);
    assert_eq!(desk.start(Op::Map(vec![1])).len(), 4);
    assert_eq!(desk.start(Op::Map(vec![2])).len(), 4);
    assert_eq!(desk.start(Op::Unmap(vec![3])).len(), 4);
    assert_eq!(desk.start(Op::Unmap(vec![4])), [Started(5)]);
    assert_eq!(desk.start(Op::Map(vec![5])).len(), 4);
    for member in [0, 1] {
        desk.says(member, 4, Body::Prepared);
    }
    desk.says(0, 4, Body::Committed);
    let acts = desk.says(1, 4, Body::Committed);
    let ask = |member| Asks(member, 5, prepare(&[4]));
    assert_eq!(acts, [Ends(4, Outcome::Unmapped), ask(0), ask(1), Arm(5)]);
}

#[test]
fn whoever_wants_the_same_pages_waits_in_order() {
    let mut desk = Desk::new(1);
    desk.start(Op::Map(vec![1, 2]));
    assert_eq!(desk.start(Op::Unmap(vec![2, 3])), [Started(3)]);
    assert_eq!(desk.start(Op::Map(vec![3])), [Started(4)]);
    assert_eq!(desk.start(Op::Map(vec![4])).len(), 3);
    assert_eq!(desk.start(Op::Room).len(), 3);
    let acts = desk.says(0, 2, mapped(&[1, 2]));
    assert_eq!(acts[1..], [Asks(0, 3, unmap(&[2, 3])), Arm(3)]);
    let acts = desk.says(0, 3, Body::Unmapped);
    assert_eq!(acts[1..], [Asks(0, 4, map(&[3])), Arm(4)]);
}

#[test]
fn so_many_at_a_time_and_so_many_wait() {
    let mut desk = Desk::new(1);
    for _ in 0..MAX_UNDER_WAY {
        assert_eq!(desk.start(Op::Room).len(), 3);
    }
    for _ in 0..MAX_QUEUED {
        assert_eq!(desk.start(Op::Room).len(), 1);
    }
    let acts = desk.start(Op::Room);
    assert!(matches!(&acts[..], [Started(_), Ends(_, Outcome::Failed { detail })] if detail.contains("256")));
    let first_queued = 2 + MAX_UNDER_WAY as u64;
    let acts = desk.says(0, 5, Body::Room { free_bytes: 1 });
    assert_eq!(acts[1..], [Asks(0, first_queued, Request::Room), Arm(first_queued)]);
}

/// A rank remembers so many outcomes: none that is open may fall out of its memory.
#[test]
fn nothing_runs_further_ahead_of_what_is_open_than_ranks_remember() {
    let mut desk = Desk::new(1);
    desk.start(Op::Map(vec![1]));
    for transaction in 3..2 + WINDOW {
        assert_eq!(desk.start(Op::Room).len(), 3);
        desk.says(0, transaction, Body::Room { free_bytes: 1 });
    }
    let ahead = 2 + WINDOW;
    assert_eq!(desk.start(Op::Room), [Started(ahead)]);
    let acts = desk.says(0, 2, mapped(&[1]));
    assert_eq!(acts[1..], [Asks(0, ahead, Request::Room), Arm(ahead)]);
}

#[test]
fn pages_that_are_none_are_refused_and_hold_nobody_up() {
    let mut desk = Desk::new(2);
    for pages in [vec![], vec![2, 1], vec![1, 1], vec![8], vec![1, 800], vec![u32::MAX]] {
        for op in [Op::Map(pages.clone()), Op::Unmap(pages.clone())] {
            let acts = desk.start(op);
            assert!(matches!(acts[..], [Started(_), Ends(_, Outcome::Failed { .. })]), "{acts:?}");
        }
    }
    // Also where the number of pages was not known yet.
    let mut desk = Desk::fresh(1);
    desk.step(Event::Begin);
    desk.start(Op::Map(vec![7, 8]));
    desk.start(Op::Map(vec![7]));
    let acts = desk.says(0, 1, Body::Created(having(&[], &[])));
    assert!(matches!(acts[1], Ends(2, Outcome::Failed { .. })));
    assert_eq!(acts[2..], [Asks(0, 3, map(&[7])), Arm(3)]);
}

// ---------------------------------------------------------------- the rest

#[test]
fn answers_of_several_members_become_one() {
    let mut desk = Desk::new(3);
    desk.start(Op::Room);
    for (member, free_bytes) in [(0, 9), (1, 5)] {
        assert_eq!(desk.says(member, 2, Body::Room { free_bytes }), []);
    }
    let acts = desk.says(2, 2, Body::Room { free_bytes: 7 });
    assert_eq!(acts, [Ends(2, Outcome::Room { free_bytes: 5 })]);
    desk.start(Op::Trim);
    desk.says(0, 3, Body::Trimmed { bytes: 3 });
    desk.says(1, 3, Body::Trimmed { bytes: 4 });
    assert_eq!(desk.says(2, 3, Body::Trimmed { bytes: 0 }), [Ends(3, Outcome::Trimmed { bytes: 4 })]);
    // One that fails fails them all, when all have answered.
    desk.start(Op::Barrier);
    assert_eq!(desk.says(1, 4, failed(&[], &[])), []);
    desk.says(0, 4, Body::Passed);
    let detail = "rank 1 of stage 0: no".to_owned();
    assert_eq!(desk.says(2, 4, Body::Passed), [Ends(4, Outcome::Failed { detail })]);
}

#[test]
fn what_is_held_beside_pages_is_that_of_the_greatest() {
    let mut desk = Desk::new(2);
    let mut tell = |member, beside_bytes| {
        let message = Message::Answer(Answer { beside_bytes, body: Body::Running });
        let frame = Frame { message, ..answer(member, 99, Body::Running) };
        desk.step(Event::Received { member, frame });
        desk.coordinator.beside_bytes()
    };
    assert_eq!([tell(0, 5), tell(1, 3), tell(0, 1)], [5, 5, 3]);
}

#[test]
fn bye_comes_last_and_is_not_missed() {
    let mut desk = Desk::new(2);
    desk.start(Op::Map(vec![1]));
    assert_eq!(desk.start(Op::Bye), [Started(3)]);
    assert!(matches!(desk.start(Op::Room)[..], [Started(4), Ends(4, Outcome::Failed { .. })]));
    desk.says(0, 2, mapped(&[1]));
    let acts = desk.says(1, 2, mapped(&[1]));
    assert_eq!(acts[1..], [Asks(0, 3, Request::Bye), Asks(1, 3, Request::Bye), Arm(3)]);
    // A connection that closes now has said it too; so has a rank that knows no such term.
    assert_eq!(desk.lost(0), []);
    let acts = desk.says(1, 3, Body::Refused(Refusal::StaleEpoch));
    assert_eq!(acts, [Ends(3, Outcome::Gone)]);
    assert_eq!(desk.lost(1), []);
    assert_eq!(desk.coordinator.is_broken(), None);
    // Silence is an answer as well.
    let mut desk = Desk::new(2);
    desk.start(Op::Bye);
    desk.says(0, 2, Body::Bye);
    assert_eq!(desk.deadline(2), [Asks(1, 2, Request::Bye), Arm(2)]);
    assert_eq!(desk.deadline(2), [Ends(2, Outcome::Gone)]);
    // A member lost before BYE was said breaks the group all the same.
    let mut desk = Desk::new(2);
    desk.start(Op::Map(vec![1]));
    desk.start(Op::Bye);
    assert_eq!(desk.lost(0), [Breaks(0), Ends(3, broken()), Asks(1, 2, Request::Abort), Arm(2)]);
}
