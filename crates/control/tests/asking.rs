//! Changes that are asked of a running instance.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvcached_control::{
    Asked, Change, ControlError, InstanceRecord, Listed, Outcome, RecordError, Terms, ask, list, remove,
};

const SOON: Duration = Duration::from_secs(10);
const NOW: Duration = Duration::ZERO;

struct Home {
    _home: tempfile::TempDir,
    dir: PathBuf,
}

fn home() -> Home {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    Home { _home: home, dir }
}

fn instance(dir: &Path, terms: Terms) -> InstanceRecord {
    InstanceRecord::create(dir, "one", "vllm 0.29.0", "cuda:0", terms).unwrap()
}

fn limit(bytes: u64) -> Change {
    Change { limit_bytes: Some(Some(bytes)), ..Change::default() }
}

fn min(bytes: u64) -> Change {
    Change { min_bytes: Some(bytes), ..Change::default() }
}

fn at(change: Change, revision: u64) -> Change {
    Change { revision: Some(revision), ..change }
}

/// Answers everything that is asked, until a limit of 0 is.
fn answer_all(record: &InstanceRecord, with: Outcome) -> Vec<Asked> {
    let mut seen = vec![];
    let mut heard = record.heard();
    loop {
        if let Some(asked) = record.asked() {
            record.answer(&asked, with);
            seen.push(asked);
            if asked.terms.limit_bytes == Some(0) {
                return seen;
            }
        }
        heard = record.wait(heard, None); // a lost ring hangs here
    }
}

#[test]
fn a_change_is_heard_answered_and_in_force() {
    let home = home();
    let record = instance(&home.dir, Terms { limit_bytes: None, min_bytes: 3 });
    std::thread::scope(|scope| {
        let owner = scope.spawn(|| answer_all(&record, Outcome::Applied));
        let answered = ask(&home.dir, "one", limit(100), SOON).unwrap();
        let terms = Terms { limit_bytes: Some(100), min_bytes: 3 };
        assert_eq!((answered.outcome, answered.revision, answered.terms), (Outcome::Applied, 1, terms));
        let answered = ask(&home.dir, "one", min(0), SOON).unwrap();
        assert_eq!(
            (answered.revision, answered.terms.min_bytes, answered.terms.limit_bytes),
            (2, 0, Some(100))
        );
        assert_eq!(record.terms(), answered.terms);
        let none = Change { limit_bytes: Some(None), ..Change::default() };
        assert_eq!(ask(&home.dir, "one", none, SOON).unwrap().terms, Terms::default());
        ask(&home.dir, "one", limit(0), SOON).unwrap();
        assert_eq!(owner.join().unwrap().len(), 4);
    });
    let Listed::Instance(view) = &list(&home.dir).unwrap()[0] else { panic!("an instance") };
    assert_eq!((view.terms.limit_bytes, view.revision, view.outcome), (Some(0), 4, Outcome::Applied));
}

#[test]
fn what_is_deferred_is_in_force_and_what_is_rejected_is_not() {
    let home = home();
    let record = instance(&home.dir, Terms::default());
    let answer = |outcome| {
        let asked = record.asked().unwrap();
        record.answer(&asked, outcome);
        asked
    };
    let unanswered = ask(&home.dir, "one", limit(7), NOW).unwrap();
    assert_eq!((unanswered.outcome, unanswered.terms), (Outcome::Unanswered, Terms::default()));
    let asked = answer(Outcome::Deferred);
    assert_eq!((asked.revision, record.terms().limit_bytes, record.asked()), (1, Some(7), None));
    let again = ask(&home.dir, "one", at(limit(7), 1), NOW).unwrap();
    assert_eq!(again.outcome, Outcome::Deferred);
    record.answer(&asked, Outcome::Applied);
    assert_eq!(ask(&home.dir, "one", at(limit(7), 1), NOW).unwrap().outcome, Outcome::Applied);
    ask(&home.dir, "one", min(5), NOW).unwrap();
    answer(Outcome::Rejected);
    assert_eq!(record.terms(), Terms { limit_bytes: Some(7), min_bytes: 0 });
    let Listed::Instance(view) = &list(&home.dir).unwrap()[0] else { panic!("an instance") };
    assert_eq!((view.revision, view.outcome), (1, Outcome::Rejected));
    ask(&home.dir, "one", limit(9), NOW).unwrap();
    assert_eq!(
        answer(Outcome::Applied).terms,
        Terms { limit_bytes: Some(9), min_bytes: 0 },
        "the rejected one is not built upon"
    );
}

#[test]
fn every_relation_of_a_revision_to_those_before() {
    let home = home();
    let record = instance(&home.dir, Terms::default());
    let outcome = |change| ask(&home.dir, "one", change, NOW).unwrap().outcome;
    assert_eq!(outcome(at(limit(5), 10)), Outcome::Unanswered);
    // Pending.
    assert_eq!(outcome(at(limit(5), 10)), Outcome::Unanswered, "the same again");
    assert_eq!(outcome(at(limit(6), 10)), Outcome::Conflict);
    assert_eq!(outcome(at(limit(5), 9)), Outcome::Stale);
    assert_eq!(outcome(at(limit(6), 11)), Outcome::Unanswered, "a later one replaces it");
    assert_eq!(record.asked().unwrap().terms.limit_bytes, Some(6));
    record.answer(&record.asked().unwrap(), Outcome::Applied);
    // Answered.
    assert_eq!(outcome(at(limit(6), 11)), Outcome::Applied);
    assert_eq!(outcome(at(limit(5), 11)), Outcome::Conflict);
    assert_eq!(outcome(at(limit(5), 10)), Outcome::Stale);
    assert_eq!(outcome(at(limit(5), 0)), Outcome::Stale);
    assert_eq!(record.asked(), None);
    assert_eq!(record.terms().limit_bytes, Some(6));
    let next = ask(&home.dir, "one", min(1), NOW).unwrap();
    assert_eq!(next.revision, 12);
}

#[test]
fn changes_that_many_ask_for_at_once_are_all_made() {
    let home = home();
    let record = instance(&home.dir, Terms::default());
    std::thread::scope(|scope| {
        let owner = scope.spawn(|| answer_all(&record, Outcome::Applied));
        let askers: Vec<_> = (1..=4)
            .map(|asker| {
                let dir = &home.dir;
                scope.spawn(move || {
                    for round in 0..50 {
                        // Half of them the minimum, half the limit: neither undoes the other.
                        let bytes = 1000 + asker * 100 + round;
                        let change = if asker % 2 == 0 { limit(bytes + 1000) } else { min(bytes) };
                        let answered = ask(dir, "one", change, SOON).unwrap();
                        assert!(
                            matches!(answered.outcome, Outcome::Applied | Outcome::Stale),
                            "{answered:?}"
                        );
                    }
                })
            })
            .collect();
        askers.into_iter().for_each(|asker| asker.join().unwrap());
        ask(
            &home.dir,
            "one",
            Change { limit_bytes: Some(Some(0)), min_bytes: Some(0), revision: None },
            SOON,
        )
        .unwrap();
        let seen = owner.join().unwrap();
        assert!(seen.windows(2).all(|pair| pair[0].revision < pair[1].revision));
        assert_eq!(seen.last().unwrap().revision, 201, "none was lost");
    });
}

#[test]
fn an_asker_that_died_while_it_wrote_is_in_nobodys_way() {
    let home = home();
    let record = instance(&home.dir, Terms::default());
    ask(&home.dir, "one", limit(5), NOW).unwrap();
    let (sequence, limit_word) = (1280 + 24, 1280 + 32);
    let mut bytes = std::fs::read(record.path()).unwrap();
    bytes[sequence] = 3; // odd
    bytes[limit_word] = 99;
    std::fs::write(record.path(), &bytes).unwrap();
    assert_eq!(record.asked(), None, "half of it is nothing");
    let answered = ask(&home.dir, "one", min(0), NOW).unwrap();
    assert_eq!(answered.revision, 1);
    assert_eq!(record.asked().unwrap().terms, Terms::default());
}

#[test]
fn terms_that_cannot_hold_and_instances_that_are_not_there_are_refused() {
    let home = home();
    let contradicting = Terms { limit_bytes: Some(1), min_bytes: 2 };
    let refused = InstanceRecord::create(&home.dir, "one", "e", "cpu", contradicting).unwrap_err();
    assert!(matches!(refused, ControlError::LimitBelowMin { limit_bytes: 1, min_bytes: 2 }));
    assert!(matches!(ask(&home.dir, "one", limit(1), NOW), Err(ControlError::NoSuchInstance { .. })));
    let record = instance(&home.dir, Terms { limit_bytes: None, min_bytes: 5 });
    assert!(matches!(ask(&home.dir, "one", limit(4), NOW), Err(ControlError::LimitBelowMin { .. })));
    assert_eq!(record.asked(), None);
    assert!(matches!(ask(&home.dir, "two", limit(4), NOW), Err(ControlError::NoSuchInstance { .. })));
    assert!(matches!(ask(&home.dir, "../one", limit(4), NOW), Err(ControlError::InvalidName { .. })));
    let path = record.path().to_path_buf();
    let bytes = std::fs::read(&path).unwrap();
    drop(record);
    std::fs::write(&path, bytes).unwrap();
    assert!(
        matches!(ask(&home.dir, "one", limit(9), NOW), Err(ControlError::NoSuchInstance { .. })),
        "it is dead"
    );
}

#[test]
fn a_record_of_another_version_is_not_written_and_can_be_removed_once_its_owner_is_gone() {
    let home = home();
    let record = instance(&home.dir, Terms::default());
    let refused = remove(&home.dir, "one").unwrap_err();
    let ControlError::Alive { pid, .. } = refused else { panic!("{refused}") };
    assert_eq!(pid, Some(std::process::id()));
    let mut bytes = std::fs::read(record.path()).unwrap();
    bytes[8] = 77;
    std::fs::write(record.path(), &bytes).unwrap();
    let refused = ask(&home.dir, "one", limit(1), NOW).unwrap_err();
    assert!(matches!(refused, ControlError::Unreadable { why: RecordError::Version { found: 77, .. }, .. }));
    assert_eq!(std::fs::read(record.path()).unwrap(), bytes);
    let path = record.path().to_path_buf();
    drop(record);
    std::fs::write(&path, &bytes).unwrap();
    assert!(matches!(&list(&home.dir).unwrap()[..], [Listed::Unreadable { .. }]), "left alone by list");
    assert!(remove(&home.dir, "one").unwrap());
    assert!(!remove(&home.dir, "one").unwrap());
    assert!(!path.exists());
}

#[test]
fn the_lock_of_those_who_ask_is_ours_alone_and_is_waited_for_in_vain_only_so_long() {
    let home = home();
    let _record = instance(&home.dir, Terms::default());
    ask(&home.dir, "one", limit(1), NOW).unwrap();
    let path = home.dir.join(".asking");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    let held = std::fs::File::open(&path).unwrap();
    held.lock().unwrap();
    let begin = Instant::now();
    assert!(matches!(ask(&home.dir, "one", limit(1), NOW), Err(ControlError::Busy { .. })));
    assert!(begin.elapsed() < SOON);
    drop(held);
    ask(&home.dir, "one", limit(2), NOW).unwrap();
}
