//! `limit`, `limit-percent`, `min` and `delete`: what a person sees, and what the real program returns.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod engine;

use std::path::{Path, PathBuf};
use std::process::Command;

use kvcached_control::{BudgetShare, InstanceRecord, Outcome, Terms};

use crate::engine::Engine;

const GIB: u64 = 1 << 30;

struct Home {
    _home: tempfile::TempDir,
    dir: PathBuf,
}

fn home() -> Home {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    Home { _home: home, dir }
}

/// Exit code, standard output, standard error of the real program.
fn kvctl(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let ended = Command::new(env!("CARGO_BIN_EXE_kvctl")).args(args).arg("--dir").arg(dir).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code().unwrap(), text(ended.stdout), text(ended.stderr))
}

fn done(text: &str) -> (i32, String, String) {
    (0, format!("{text}\n"), String::new())
}

fn failed(text: &str) -> (i32, String, String) {
    (1, String::new(), format!("error: {text}\n"))
}

fn unsettled(text: &str) -> (i32, String, String) {
    (3, format!("{text}\n"), String::new())
}

#[test]
fn a_change_that_is_applied() {
    let Home { dir, .. } = &home();
    let engine = Engine::start(dir, "llama", Outcome::Applied);
    let applied = "applied: llama has limit 1.50 GiB, minimum 0 B";
    assert_eq!(kvctl(dir, &["limit", "llama", "1.5GiB"]), done(applied));
    assert_eq!(engine.record.terms().limit_bytes, Some(3 << 29));
    let applied = "applied: llama has limit 1.50 GiB, minimum 512.00 MiB";
    assert_eq!(kvctl(dir, &["min", "llama", "512M"]), done(applied));
    let applied = "applied: llama has limit none, minimum 512.00 MiB";
    assert_eq!(kvctl(dir, &["limit", "llama", "none"]), done(applied));
    assert_eq!(engine.record.terms(), Terms { limit_bytes: None, min_bytes: 512 << 20 });
}

#[test]
fn a_change_in_json() {
    let Home { dir, .. } = &home();
    let _engine = Engine::start(dir, "llama", Outcome::Applied);
    assert_eq!(
        kvctl(dir, &["limit", "llama", "1G", "--json"]),
        done(
            r#"{
  "name": "llama",
  "asked": {
    "limit_bytes": 1073741824
  },
  "outcome": "applied",
  "revision": 1,
  "limit_bytes": 1073741824,
  "min_bytes": 0,
  "over_bytes": 0,
  "why": null
}"#
        )
    );
}

#[test]
fn a_drain_that_waits_for_requests() {
    let Home { dir, .. } = &home();
    let engine = Engine::start(dir, "llama", Outcome::Deferred);
    let row = engine.record.pool_row("kv").unwrap();
    row.set(3 * GIB, GIB / 2, 8 * GIB, 0);
    let deferred = "deferred: llama has limit 0 B, minimum 0 B; it still holds 3.50 GiB more, which goes as requests end";
    assert_eq!(kvctl(dir, &["limit", "llama", "0"]), unsettled(deferred));
}

#[test]
fn a_refusal() {
    let Home { dir, .. } = &home();
    let _engine = Engine::start(dir, "llama", Outcome::Rejected);
    let rejected = "rejected: llama keeps limit none, minimum 0 B: its engine cannot";
    assert_eq!(kvctl(dir, &["min", "llama", "1G"]), failed(rejected));
    let (code, out, err) = kvctl(dir, &["min", "llama", "1G", "--json"]);
    let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, parsed["outcome"].as_str(), err.as_str()), (1, Some("rejected"), ""));
}

#[test]
fn an_engine_that_does_not_answer() {
    let Home { dir, .. } = &home();
    let record = InstanceRecord::create(dir, "busy", "e", "cpu", Terms::default()).unwrap();
    let unanswered =
        "unanswered: busy has limit none, minimum 0 B; what was asked comes into force when it answers";
    assert_eq!(kvctl(dir, &["limit", "busy", "1G", "--wait", "0.1"]), unsettled(unanswered));
    assert_eq!(record.asked().unwrap().terms.limit_bytes, Some(GIB), "it stays asked");
    assert_eq!(kvctl(dir, &["min", "busy", "1G", "--wait", "0"]), unsettled(unanswered));
    let both = Terms { limit_bytes: Some(GIB), min_bytes: GIB };
    assert_eq!(record.asked().unwrap().terms, both, "together with what was asked before");
}

#[test]
fn a_part_of_the_budget() {
    let Home { dir, .. } = &home();
    let engine = Engine::start(dir, "llama", Outcome::Applied);
    let without =
        "instance \"llama\" lives by no memory budget, of which a limit could be a part; use kvctl limit";
    assert_eq!(kvctl(dir, &["limit-percent", "llama", "25"]), failed(without));
    let nobody = "there is no live instance \"nobody\"; kvctl list shows those that there are";
    assert_eq!(kvctl(dir, &["limit-percent", "nobody", "25"]), failed(nobody));
    let _share = BudgetShare::join(dir, &engine.record, "host", 16 * GIB, None).unwrap();
    let _smaller = BudgetShare::join(dir, &engine.record, "GPU-1", 8 * GIB, None).unwrap();
    let applied = "applied: llama has limit 1.00 GiB, minimum 0 B";
    assert_eq!(kvctl(dir, &["limit-percent", "llama", "12.5"]), done(applied));
}

#[test]
fn budgets_are_listed() {
    let Home { dir, .. } = &home();
    let engine = Engine::start(dir, "llama", Outcome::Applied);
    let share = BudgetShare::join(dir, &engine.record, "host", 16 * GIB, None).unwrap();
    share.take(3 * GIB).unwrap();
    engine.record.publish_needs(GIB, 5);
    kvctl(dir, &["limit", "llama", "8G"]);
    share.wait_for(GIB, 0); // counts for a second
    let pid = std::process::id();
    let width = pid.to_string().len().max(3);
    assert_eq!(
        kvctl(dir, &["list"]),
        (
            0,
            format!(
                "\
NAME   ENGINE       {:>width$}  DEVICE  USED  RESERVED  VIRTUAL     LIMIT  MIN
llama  vllm 0.29.0  {pid:>width$}  cpu      0 B       0 B      0 B  8.00 GiB  0 B

DEVICE     BUDGET   GRANTED       FREE     SHORT
host    16.00 GiB  3.00 GiB  13.00 GiB  1.00 GiB
",
                "PID"
            ),
            String::new()
        )
    );
    share.wait_for(GIB, 0);
    let (_, out, _) = kvctl(dir, &["list", "--json"]);
    let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
    let instance = &parsed["instances"][0];
    assert_eq!((&instance["shortage_bytes"], &instance["cached_bytes"]), (&GIB.into(), &5.into()));
    assert_eq!(
        parsed["budgets"],
        serde_json::json!([{
            "device": "host",
            "budget_bytes": 16 * GIB,
            "granted_bytes": 3 * GIB,
            "free_bytes": 13 * GIB,
            "shortage_bytes": GIB,
            "members": [{
                "name": "llama",
                "min_bytes": 0,
                "granted_bytes": 3 * GIB,
                "shortage_bytes": GIB,
                "givable_bytes": 0,
            }],
        }])
    );
}

#[test]
fn nobody_can_be_asked() {
    let Home { dir, .. } = &home();
    for args in [["limit", "nobody", "1G"], ["min", "nobody", "1G"]] {
        let (code, out, err) = kvctl(dir, &args);
        assert_eq!((code, out.as_str()), (1, ""));
        assert_eq!(
            err,
            "error: there is no live instance \"nobody\"; kvctl list shows those that there are\n"
        );
    }
}

#[test]
fn only_what_is_dead_is_deleted() {
    let Home { dir, .. } = &home();
    let record = InstanceRecord::create(dir, "llama", "e", "cpu", Terms::default()).unwrap();
    let path = record.path().to_path_buf();
    let (code, out, err) = kvctl(dir, &["delete", "llama"]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert_eq!(
        err,
        format!("error: instance \"llama\" is alive (pid {}); end it instead\n", std::process::id())
    );
    assert!(path.exists());
    let bytes = std::fs::read(&path).unwrap();
    drop(record);
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(kvctl(dir, &["delete", "llama"]), done("removed the record of llama"));
    assert!(!path.exists());
    assert_eq!(kvctl(dir, &["delete", "llama"]), failed("there is no record of an instance \"llama\""));
    std::fs::write(&path, &bytes).unwrap();
    let json = "{\n  \"name\": \"llama\",\n  \"removed\": true\n}";
    assert_eq!(kvctl(dir, &["delete", "llama", "--json"]), done(json));
}
