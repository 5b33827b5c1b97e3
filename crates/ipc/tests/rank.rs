//! The rank's core: every request in every state.
#![allow(clippy::unwrap_used, clippy::panic)]

use kvcached_ipc::message::{
    Answer, Body, Created, Failure, Frame, Member, Message, Refusal, Request, TransactionId,
};
use kvcached_ipc::rank::{Effect, Event, HISTORY, MAX_WAITING, Rank, Work, WorkResult};
use kvcached_ipc::runs::Runs;

const ME: Member = Member { stage: 1, rank: 2 };
const GROUP: u32 = 3;
const LINK: u64 = 10;

fn runs(pages: &[u32]) -> Runs {
    Runs::from_pages(pages).unwrap()
}

fn map(pages: &[u32]) -> Request {
    Request::Map(runs(pages))
}

fn prepare(pages: &[u32]) -> Request {
    Request::Prepare(runs(pages))
}

fn mapped(pages: &[u32]) -> Body {
    Body::Mapped { new: runs(pages) }
}

fn aborted(lost: &[u32]) -> Body {
    Body::Aborted { lost: runs(lost) }
}

fn refused(refusal: Refusal) -> Vec<Act> {
    vec![Act::Says(Body::Refused(refusal))]
}

fn failed(lost: &[u32], still_mapped: &[u32]) -> Body {
    Body::Failed(Failure {
        out_of_memory: true,
        lost: runs(lost),
        still_mapped: runs(still_mapped),
        detail: "no".to_owned(),
    })
}

fn created() -> Body {
    Body::Created(Created {
        page_bytes: 1,
        virtual_bytes: 1,
        num_pages: 8,
        blocks_per_page: 1,
        ids_per_page: 1,
        mapped: Runs::none(),
        lost: Runs::none(),
    })
}

/// Effects without what is the same in all of them.
#[derive(Debug, PartialEq)]
enum Act {
    Says(Body),
    SaysTo(u64, Body),
    Close(u64),
    Run(Work),
}
use Act::{Close, Run, Says, SaysTo};

struct Desk {
    rank: Rank,
}

impl Desk {
    /// A rank before its first term.
    fn fresh() -> Self {
        Desk { rank: Rank::new(ME, GROUP, 8) }
    }

    /// A rank in term 1.
    fn new() -> Self {
        let mut desk = Desk::fresh();
        assert_eq!(desk.ask(1, Request::Hello), [Run(Work::Describe)]);
        assert_eq!(desk.worked(created()), [Says(created())]);
        desk
    }

    fn step(&mut self, event: Event) -> Vec<Act> {
        let short = |effect| match effect {
            Effect::Run(work) => Run(work),
            Effect::Close { connection } => Close(connection),
            Effect::Send { connection, frame } => {
                assert_eq!((frame.group, frame.member), (GROUP, ME));
                let Message::Answer(answer) = frame.message else { panic!("a rank asks nothing") };
                if connection == LINK { Says(answer.body) } else { SaysTo(connection, answer.body) }
            }
        };
        self.rank.step(event).into_iter().map(short).collect()
    }

    fn ask(&mut self, transaction: TransactionId, request: Request) -> Vec<Act> {
        self.ask_over(LINK, 1, transaction, request)
    }

    fn ask_over(&mut self, connection: u64, epoch: u64, transaction: u64, request: Request) -> Vec<Act> {
        let message = Message::Request(request);
        let frame = Frame { epoch, transaction, group: GROUP, member: ME, message };
        self.step(Event::Received { connection, frame })
    }

    fn worked(&mut self, body: Body) -> Vec<Act> {
        self.step(Event::Worked { result: WorkResult { beside_bytes: 0, body } })
    }

    fn closed(&mut self) -> Vec<Act> {
        self.step(Event::Closed { connection: LINK })
    }

    /// Transaction 2 has been asked for and carried out so.
    fn did(request: Request, body: Body) -> Self {
        let mut desk = Desk::new();
        assert!(matches!(desk.ask(2, request)[..], [Run(_)]));
        assert_eq!(desk.worked(body.clone()), [Says(body)]);
        desk
    }
}

// ---------------------------------------------------------------- each state

/// A PREPARE of page 1 (transaction 2) in every state that it can be in.
fn prepare_states() -> Vec<(&'static str, Desk)> {
    let running = || {
        let mut desk = Desk::new();
        let work = Work::Prepare { transaction: 2, pages: vec![1] };
        assert_eq!(desk.ask(2, prepare(&[1])), [Run(work)]);
        desk
    };
    let prepared = || Desk::did(prepare(&[1]), Body::Prepared);
    let mut waiting = Desk::new();
    assert_eq!(waiting.ask(9, Request::Barrier), [Run(Work::Synchronise)]);
    assert_eq!(waiting.ask(2, prepare(&[1])), []);
    let mut doomed = running();
    assert_eq!(doomed.ask(2, Request::Abort), []);
    let mut committing = prepared();
    assert_eq!(committing.ask(2, Request::Commit), [Run(Work::Commit { transaction: 2 })]);
    let mut aborting = prepared();
    assert_eq!(aborting.ask(2, Request::Abort), [Run(Work::Abort { transaction: 2 })]);
    let mut committed = prepared();
    committed.ask(2, Request::Commit);
    assert_eq!(committed.worked(Body::Committed), [Says(Body::Committed)]);
    let mut undone = prepared();
    undone.ask(2, Request::Abort);
    assert_eq!(undone.worked(aborted(&[1])), [Says(aborted(&[1]))]);
    let mut overtaken = Desk::new();
    assert_eq!(overtaken.ask(2, Request::Abort), [Says(aborted(&[]))]);
    vec![
        ("unknown", Desk::new()),
        ("waiting", waiting),
        ("running", running()),
        ("running, to be aborted", doomed),
        ("prepared", prepared()),
        ("failed", Desk::did(prepare(&[1]), failed(&[1], &[]))),
        ("committing", committing),
        ("committed", committed),
        ("aborting", aborting),
        ("aborted", undone),
        ("aborted before", overtaken),
    ]
}

/// What each of these states says to `request` for transaction 2.
fn table(request: Request, expected: Vec<Vec<Act>>) {
    let states = prepare_states();
    assert_eq!(states.len(), expected.len());
    for ((state, mut desk), expected) in states.into_iter().zip(expected) {
        assert_eq!(desk.ask(2, request.clone()), expected, "{request:?} when {state}");
    }
}

#[test]
fn a_repeated_prepare_is_answered_by_how_it_stands() {
    let running = || vec![Says(Body::Running)];
    table(
        prepare(&[1]),
        vec![
            vec![Run(Work::Prepare { transaction: 2, pages: vec![1] })],
            running(),
            running(),
            running(),
            vec![Says(Body::Prepared)],
            vec![Says(failed(&[1], &[]))],
            running(),
            vec![Says(Body::Committed)],
            running(),
            vec![Says(aborted(&[1]))],
            vec![Says(aborted(&[]))],
        ],
    );
}

#[test]
fn a_query_is_answered_at_once_and_changes_nothing() {
    let running = || vec![Says(Body::Running)];
    table(
        Request::Query,
        vec![
            vec![Says(Body::Unknown)],
            running(),
            running(),
            running(),
            vec![Says(Body::Prepared)],
            vec![Says(failed(&[1], &[]))],
            running(),
            vec![Says(Body::Committed)],
            running(),
            vec![Says(aborted(&[1]))],
            vec![Says(aborted(&[]))],
        ],
    );
    for (state, mut desk) in prepare_states() {
        let before = desk.rank.clone();
        desk.ask(2, Request::Query);
        desk.ask(77, Request::Query);
        assert_eq!(desk.rank, before, "{state}");
    }
}

#[test]
fn a_commit_commits_what_is_prepared_and_nothing_else() {
    table(
        Request::Commit,
        vec![
            refused(Refusal::Unprepared),
            refused(Refusal::Unprepared),
            refused(Refusal::Unprepared),
            refused(Refusal::Unprepared),
            vec![Run(Work::Commit { transaction: 2 })],
            refused(Refusal::Unprepared),
            vec![Says(Body::Running)],
            vec![Says(Body::Committed)],
            refused(Refusal::Decided),
            refused(Refusal::Decided),
            refused(Refusal::Decided),
        ],
    );
}

#[test]
fn an_abort_undoes_what_is_not_committed() {
    table(
        Request::Abort,
        vec![
            vec![Says(aborted(&[]))],
            vec![Says(aborted(&[]))],
            vec![],
            vec![Says(Body::Running)],
            vec![Run(Work::Abort { transaction: 2 })],
            vec![Says(aborted(&[1]))],
            refused(Refusal::Decided),
            refused(Refusal::Decided),
            vec![Says(Body::Running)],
            vec![Says(aborted(&[1]))],
            vec![Says(aborted(&[]))],
        ],
    );
}

#[test]
fn another_beginning_under_the_same_name_is_refused() {
    for request in [prepare(&[2]), map(&[1]), Request::Barrier] {
        for (state, mut desk) in prepare_states() {
            let says = desk.ask(2, request.clone());
            match state {
                "unknown" => assert!(matches!(says[..], [Run(_)])),
                // What it would have been was never heard: it is aborted, whatever it was.
                "aborted before" => assert_eq!(says, [Says(aborted(&[]))]),
                _ => assert_eq!(says, refused(Refusal::Different), "{request:?} when {state}"),
            }
        }
    }
}

/// As long as an unmapping is not decided no other begins.
#[test]
fn a_second_unmapping_is_refused_until_the_first_is_decided() {
    for request in [prepare(&[5]), Request::Unmap(runs(&[5]))] {
        for (state, mut desk) in prepare_states() {
            let says = desk.ask(3, request.clone());
            match state {
                "unknown" | "failed" | "committed" | "aborted" | "aborted before" => {
                    assert!(matches!(says[..], [Run(_)]), "{state}: {says:?}")
                }
                _ => assert_eq!(says, refused(Refusal::Pending), "{request:?} when {state}"),
            }
            // A map may go on at any time.
            assert!(matches!(desk.ask(4, map(&[6]))[..], [] | [Run(_)]), "{state}");
        }
    }
}

// ---------------------------------------------------------------- maps

#[test]
fn an_abort_unmaps_exactly_what_a_map_mapped() {
    // It mapped one of two.
    let mut desk = Desk::did(map(&[1, 2]), mapped(&[2]));
    assert_eq!(desk.ask(2, Request::Abort), [Run(Work::Undo { pages: vec![2] })]);
    assert_eq!(desk.ask(2, map(&[1, 2])), [Says(Body::Running)]);
    assert_eq!(desk.worked(Body::Unmapped), [Says(aborted(&[]))]);
    assert_eq!(desk.ask(2, map(&[1, 2])), [Says(aborted(&[]))]);
    // It mapped none: nothing is touched.
    let mut desk = Desk::did(map(&[1, 2]), mapped(&[]));
    assert_eq!(desk.ask(2, Request::Abort), [Says(aborted(&[]))]);
    // It failed and lost one.
    let mut desk = Desk::did(map(&[1, 2]), failed(&[2], &[]));
    assert_eq!(desk.ask(2, Request::Abort), [Says(aborted(&[2]))]);
    assert_eq!(desk.ask(2, map(&[1, 2])), [Says(aborted(&[2]))]);
    // Undoing failed: what stays mapped here alone is lost to the group.
    let mut desk = Desk::did(map(&[1, 2]), mapped(&[1, 2]));
    desk.ask(2, Request::Abort);
    assert_eq!(desk.worked(failed(&[1], &[2])), [Says(aborted(&[1, 2]))]);
    assert_eq!(desk.ask(2, Request::Abort), [Says(aborted(&[1, 2]))]);
}

#[test]
fn an_abort_overtakes_the_work_of_its_map() {
    for (body, next) in [
        (mapped(&[1]), Run(Work::Undo { pages: vec![1] })),
        (mapped(&[]), Says(aborted(&[]))),
        (failed(&[1], &[]), Says(aborted(&[1]))),
    ] {
        let mut desk = Desk::new();
        desk.ask(2, map(&[1]));
        assert_eq!(desk.ask(3, Request::Room), []);
        assert_eq!(desk.ask(2, Request::Abort), []);
        // Before the next work: what is undone is not waited for longer than need be.
        assert_eq!(desk.worked(body).remove(0), next);
    }
    let mut desk = Desk::new();
    desk.ask(2, prepare(&[1]));
    desk.ask(2, Request::Abort);
    assert_eq!(desk.worked(Body::Prepared), [Run(Work::Abort { transaction: 2 })]);
    assert_eq!(desk.worked(aborted(&[])), [Says(aborted(&[]))]);
}

#[test]
fn an_abort_that_comes_first_is_remembered() {
    for request in [map(&[1]), prepare(&[1]), Request::Unmap(runs(&[1])), Request::Barrier] {
        let mut desk = Desk::new();
        assert_eq!(desk.ask(2, Request::Abort), [Says(aborted(&[]))]);
        assert_eq!(desk.ask(2, request), [Says(aborted(&[]))]);
    }
}

#[test]
fn a_map_whose_pages_were_unmapped_since_is_not_undone() {
    for request in [prepare(&[2]), Request::Unmap(runs(&[2]))] {
        let mut desk = Desk::did(map(&[1, 2]), mapped(&[1, 2]));
        assert!(matches!(desk.ask(3, request)[..], [Run(_)]));
        assert_eq!(desk.ask(2, Request::Abort), refused(Refusal::Decided));
    }
    let mut desk = Desk::did(map(&[1, 2]), mapped(&[1, 2]));
    desk.ask(3, prepare(&[3]));
    assert_eq!(desk.ask(2, Request::Abort), []);
}

#[test]
fn what_changes_nothing_for_long_cannot_be_aborted() {
    for request in [Request::Barrier, Request::Trim, Request::Room, Request::Unmap(runs(&[1]))] {
        let mut desk = Desk::new();
        assert!(matches!(desk.ask(2, request)[..], [Run(_)]));
        assert_eq!(desk.ask(2, Request::Abort), refused(Refusal::Different));
        assert_eq!(desk.ask(2, Request::Commit), refused(Refusal::Unprepared));
    }
}

/// A lost answer costs nothing twice.
#[test]
fn every_outcome_is_answered_again_and_done_once() {
    for (request, body) in [
        (map(&[1]), mapped(&[1])),
        (map(&[1]), failed(&[], &[])),
        (Request::Unmap(runs(&[1])), Body::Unmapped),
        (Request::Unmap(runs(&[1])), failed(&[], &[1])),
        (prepare(&[1]), Body::Prepared),
        (Request::Barrier, Body::Passed),
        (Request::Trim, Body::Trimmed { bytes: 5 }),
        (Request::Room, Body::Room { free_bytes: 5 }),
        (Request::Room, failed(&[], &[])),
    ] {
        let mut desk = Desk::did(request.clone(), body.clone());
        assert_eq!(desk.ask(2, request), [Says(body.clone())]);
        assert_eq!(desk.ask(2, Request::Query), [Says(body)]);
    }
}

/// A store that gives what the work cannot give is not believed.
#[test]
fn a_store_that_breaks_its_word_has_failed() {
    let mut desk = Desk::new();
    desk.ask(2, map(&[1, 2]));
    let [Says(Body::Failed(failure))] = &desk.worked(Body::Committed)[..] else { panic!() };
    assert_eq!((failure.lost.clone(), failure.out_of_memory), (runs(&[1, 2]), false));
    // Of an abort: nobody knows about the pages.
    let mut desk = Desk::did(prepare(&[1, 2]), Body::Prepared);
    desk.ask(2, Request::Abort);
    assert_eq!(desk.worked(failed(&[], &[])), [Says(aborted(&[1, 2]))]);
    assert_eq!(desk.ask(2, Request::Abort), [Says(aborted(&[1, 2]))]);
    // Nothing was running.
    assert_eq!(Desk::new().worked(Body::Passed), []);
}

#[test]
fn one_work_at_a_time_in_the_order_of_asking() {
    let mut desk = Desk::new();
    assert_eq!(desk.ask(2, map(&[1])), [Run(Work::Map { pages: vec![1] })]);
    assert_eq!(desk.ask(3, Request::Trim), []);
    assert_eq!(desk.ask(4, Request::Barrier), []);
    assert_eq!(desk.worked(mapped(&[1])), [Says(mapped(&[1])), Run(Work::Trim)]);
    let trimmed = Body::Trimmed { bytes: 1 };
    assert_eq!(desk.worked(trimmed.clone()), [Says(trimmed), Run(Work::Synchronise)]);
    assert_eq!(desk.worked(Body::Passed), [Says(Body::Passed)]);
}

#[test]
fn what_the_group_holds_beside_its_pages_is_in_every_answer() {
    let mut rank = Rank::new(ME, GROUP, 8);
    let hello = Frame {
        epoch: 1,
        transaction: 1,
        group: GROUP,
        member: ME,
        message: Message::Request(Request::Hello),
    };
    rank.step(Event::Received { connection: LINK, frame: hello.clone() });
    rank.step(Event::Worked { result: WorkResult { beside_bytes: 77, body: created() } });
    let query = Frame { message: Message::Request(Request::Query), transaction: 5, ..hello };
    let effects = rank.step(Event::Received { connection: LINK, frame: query });
    let [Effect::Send { frame, .. }] = &effects[..] else { panic!() };
    assert_eq!(frame.message, Message::Answer(Answer { beside_bytes: 77, body: Body::Unknown }));
}

// ---------------------------------------------------------------- bounds

#[test]
fn pages_outside_the_group_and_no_pages_are_refused() {
    for pages in [&[7, 8][..], &[800], &[]] {
        for request in [map(pages), prepare(pages), Request::Unmap(runs(pages))] {
            assert_eq!(Desk::new().ask(2, request), refused(Refusal::OutOfRange));
        }
    }
    assert!(matches!(Desk::new().ask(2, map(&[7]))[..], [Run(_)]));
}

#[test]
fn so_much_may_wait_and_no_more() {
    let mut desk = Desk::new();
    desk.ask(2, Request::Barrier);
    for waiting in 0..MAX_WAITING as u64 {
        assert_eq!(desk.ask(3 + waiting, Request::Barrier), []);
    }
    let next = 3 + MAX_WAITING as u64;
    assert_eq!(desk.ask(next, Request::Barrier), refused(Refusal::Overloaded));
    // It was not taken: asked for again later it is new.
    assert_eq!(desk.ask(next, Request::Query), [Says(Body::Unknown)]);
    desk.worked(Body::Passed);
    assert_eq!(desk.ask(next, Request::Barrier), []);
}

#[test]
fn the_latest_outcomes_are_remembered_and_older_ones_known_to_be_forgotten() {
    let mut desk = Desk::new();
    let last = 1 + HISTORY as u64;
    for transaction in 2..=last {
        desk.ask(transaction, Request::Barrier);
        desk.worked(Body::Passed);
    }
    assert_eq!(desk.ask(2, Request::Barrier), [Says(Body::Passed)]);
    desk.ask(last + 1, Request::Barrier);
    desk.worked(Body::Passed);
    for request in [Request::Barrier, Request::Query, Request::Commit, Request::Abort, map(&[1])] {
        assert_eq!(desk.ask(2, request.clone()), refused(Refusal::Forgotten), "{request:?}");
        assert_eq!(desk.ask(0, request), refused(Refusal::Forgotten));
    }
    assert_eq!(desk.ask(3, Request::Barrier), [Says(Body::Passed)]);
}

#[test]
fn what_is_open_is_never_forgotten() {
    let mut desk = Desk::did(prepare(&[1]), Body::Prepared);
    for transaction in 3..2 + HISTORY as u64 {
        desk.ask(transaction, Request::Barrier);
        desk.worked(Body::Passed);
    }
    assert_eq!(desk.ask(500, Request::Barrier), refused(Refusal::Overloaded));
    assert_eq!(desk.ask(501, Request::Abort), refused(Refusal::Overloaded));
    assert_eq!(desk.ask(2, Request::Query), [Says(Body::Prepared)]);
    desk.ask(2, Request::Commit);
    desk.worked(Body::Committed);
    assert_eq!(desk.ask(500, Request::Barrier), [Run(Work::Synchronise)]);
    // What is older than all that are remembered is not taken for new.
    assert_eq!(desk.ask(1, Request::Barrier), refused(Refusal::Forgotten));
}

// ---------------------------------------------------------------- who may ask

#[test]
fn strangers_are_refused() {
    let mut desk = Desk::new();
    let hello = |group, member| Event::Received {
        connection: LINK,
        frame: Frame { epoch: 9, transaction: 1, group, member, message: Message::Request(Request::Hello) },
    };
    for (group, member, refusal) in
        [(GROUP + 1, ME, Refusal::NoSuchGroup), (GROUP, Member { stage: 2, rank: 1 }, Refusal::NotMe)]
    {
        let effects = desk.rank.step(hello(group, member));
        let [Effect::Send { connection: LINK, frame }] = &effects[..] else { panic!() };
        assert_eq!((frame.group, frame.member), (group, member));
        assert_eq!(frame.message, Message::Answer(Answer { beside_bytes: 0, body: Body::Refused(refusal) }));
    }
    // Other connections and other terms.
    for request in [map(&[1]), Request::Commit, Request::Abort, Request::Query, Request::Bye] {
        let stale = Body::Refused(Refusal::StaleEpoch);
        assert_eq!(desk.ask_over(11, 1, 2, request.clone()), [SaysTo(11, stale)], "{request:?}");
        assert_eq!(desk.ask_over(LINK, 0, 2, request.clone()), refused(Refusal::StaleEpoch));
    }
    // A request of a later term whose HELLO has not come.
    assert_eq!(desk.ask_over(11, 2, 1, Request::Query), [SaysTo(11, Body::Unknown)]);
    assert_eq!(desk.ask_over(11, 2, 1, map(&[1])), [SaysTo(11, Body::Refused(Refusal::StaleEpoch))]);
    assert_eq!(desk.ask(2, map(&[1])), [Run(Work::Map { pages: vec![1] })]);
}

#[test]
fn whoever_answers_a_rank_is_cut_off() {
    let mut desk = Desk::did(prepare(&[1]), Body::Prepared);
    let answer = |connection| {
        let message = Message::Answer(Answer { beside_bytes: 0, body: Body::Bye });
        Event::Received {
            connection,
            frame: Frame { epoch: 1, transaction: 2, group: GROUP, member: ME, message },
        }
    };
    assert_eq!(desk.step(answer(99)), [Close(99)]);
    assert_eq!(desk.ask(2, Request::Query), [Says(Body::Prepared)]);
    assert_eq!(desk.step(answer(LINK)), [Close(LINK), Run(Work::Abort { transaction: 2 })]);
    assert_eq!(desk.ask(2, Request::Query), refused(Refusal::StaleEpoch));
}

#[test]
fn hello_is_answered_again_by_how_things_are_then() {
    let mut desk = Desk::fresh();
    assert_eq!(desk.ask(1, Request::Query), [Says(Body::Unknown)]);
    assert_eq!(desk.ask(1, Request::Hello), [Run(Work::Describe)]);
    assert_eq!(desk.ask(1, Request::Hello), [Says(Body::Running)]);
    assert_eq!(desk.ask(1, Request::Query), [Says(Body::Running)]);
    assert_eq!(desk.ask(2, Request::Hello), refused(Refusal::Different));
    assert_eq!(desk.worked(created()), [Says(created())]);
    assert_eq!(desk.ask(1, Request::Hello), [Run(Work::Describe)]);
    desk.worked(created());
    // Neither the same epoch over another connection, nor a smaller one, nor none.
    assert_eq!(desk.ask_over(11, 1, 1, Request::Hello), [SaysTo(11, Body::Refused(Refusal::StaleEpoch))]);
    assert_eq!(desk.ask_over(LINK, 0, 1, Request::Hello), refused(Refusal::StaleEpoch));
    assert_eq!(Desk::fresh().ask_over(LINK, 0, 1, Request::Hello), refused(Refusal::StaleEpoch));
}

#[test]
fn a_later_term_takes_over_and_aborts_what_is_not_decided() {
    let mut desk = Desk::did(prepare(&[1]), Body::Prepared);
    let abort = Work::Abort { transaction: 2 };
    assert_eq!(desk.ask_over(11, 5, 1, Request::Hello), [Close(LINK), Run(abort)]);
    assert_eq!(desk.ask_over(11, 5, 1, Request::Query), [SaysTo(11, Body::Running)]);
    // The old term is not heard any more, not even with its decision.
    assert_eq!(desk.ask(2, Request::Commit), refused(Refusal::StaleEpoch));
    assert_eq!(desk.worked(aborted(&[])), [Run(Work::Describe)]);
    assert_eq!(desk.worked(created()), [SaysTo(11, created())]);
    // Names begin again.
    assert_eq!(desk.ask_over(11, 5, 2, map(&[3])), [Run(Work::Map { pages: vec![3] })]);
    // The old connection's end is nobody's business.
    assert_eq!(desk.closed(), []);
    assert_eq!(desk.worked(mapped(&[3])), [SaysTo(11, mapped(&[3]))]);
}

#[test]
fn a_later_term_over_the_same_connection_keeps_it() {
    let mut desk = Desk::new();
    assert_eq!(desk.ask_over(LINK, 2, 1, Request::Hello), [Run(Work::Describe)]);
}

/// However far the old term's unmapping was.
#[test]
fn the_end_of_a_term_leaves_nothing_prepared() {
    for (state, desk) in prepare_states() {
        for take_over in [false, true] {
            let mut desk = Desk { rank: desk.rank.clone() };
            let mut effects = if take_over { desk.ask_over(11, 2, 1, Request::Hello) } else { desk.closed() };
            let mut held = matches!(state, "prepared" | "committing" | "aborting");
            let mut running: Option<Work> = match state {
                "waiting" => Some(Work::Synchronise),
                "running" | "running, to be aborted" => {
                    Some(Work::Prepare { transaction: 2, pages: vec![1] })
                }
                "committing" => Some(Work::Commit { transaction: 2 }),
                "aborting" => Some(Work::Abort { transaction: 2 }),
                _ => None,
            };
            loop {
                for effect in effects {
                    match effect {
                        Run(work) => {
                            assert_eq!(running, None, "{state}");
                            running = Some(work);
                        }
                        Close(LINK) => assert!(take_over),
                        SaysTo(11, Body::Created(_)) => {
                            assert!(!held, "{state}: told while something is prepared")
                        }
                        effect => panic!("{state}: {effect:?}"),
                    }
                }
                let body = match running.take() {
                    None => break,
                    Some(Work::Prepare { .. }) => {
                        held = true;
                        Body::Prepared
                    }
                    Some(Work::Commit { .. }) => {
                        assert!(state == "committing" && held);
                        held = false;
                        Body::Committed
                    }
                    Some(Work::Abort { .. }) => {
                        assert!(state != "committing" && held);
                        held = false;
                        aborted(&[])
                    }
                    Some(Work::Synchronise) => Body::Passed,
                    Some(Work::Describe) => created(),
                    Some(work) => panic!("{state}: {work:?}"),
                };
                effects = desk.worked(body);
            }
            assert!(!held, "{state}: something stays prepared");
            assert!(!desk.rank.is_busy());
        }
    }
}

#[test]
fn what_waits_is_dropped_with_its_term_and_decisions_are_not() {
    let mut desk = Desk::did(prepare(&[1]), Body::Prepared);
    assert_eq!(desk.ask(3, map(&[3])), [Run(Work::Map { pages: vec![3] })]);
    desk.ask(4, map(&[4]));
    desk.ask(2, Request::Commit);
    desk.ask(5, Request::Barrier);
    assert_eq!(desk.closed(), []);
    assert_eq!(desk.worked(mapped(&[3])), [Run(Work::Commit { transaction: 2 })]);
    assert_eq!(desk.worked(Body::Committed), []);
    assert!(!desk.rank.is_busy());
}

#[test]
fn bye_ends_the_term() {
    let mut desk = Desk::did(prepare(&[1]), Body::Prepared);
    assert_eq!(desk.ask(3, Request::Bye), [Says(Body::Bye), Run(Work::Abort { transaction: 2 })]);
    assert_eq!(desk.ask(3, Request::Bye), [Says(Body::Bye)]);
    assert_eq!(desk.ask(4, map(&[1])), refused(Refusal::StaleEpoch));
    // It cannot be had back.
    assert_eq!(desk.ask(1, Request::Hello), refused(Refusal::StaleEpoch));
    desk.worked(aborted(&[]));
    assert_eq!(desk.ask_over(11, 2, 1, Request::Hello), [Run(Work::Describe)]);
    assert_eq!(desk.ask(3, Request::Bye), refused(Refusal::StaleEpoch));
}

#[test]
fn an_orderly_stop_is_the_end_of_everything() {
    let mut desk = Desk::did(prepare(&[1]), Body::Prepared);
    assert_eq!(desk.step(Event::Stop), [Close(LINK), Run(Work::Abort { transaction: 2 })]);
    assert_eq!(desk.step(Event::Stop), []);
    assert_eq!(desk.worked(aborted(&[])), []);
    assert_eq!(desk.ask_over(11, 9, 1, Request::Hello), [Close(11)]);
    assert_eq!(desk.ask(3, map(&[1])), [Close(LINK)]);
    assert!(!desk.rank.is_busy());
    assert_eq!(Desk::fresh().step(Event::Stop), []);
}
