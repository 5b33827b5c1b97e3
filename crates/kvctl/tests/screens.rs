//! What a person sees, to the letter.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kvcached_control::{InstanceRecord, Terms};
use kvctl::run;

struct Home {
    _home: tempfile::TempDir,
    dir: PathBuf,
}

fn home() -> Home {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    Home { _home: home, dir }
}

/// Exit code, standard output, standard error.
fn kvctl(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let args = args.iter().map(OsString::from).chain(["--dir".into(), dir.into()]);
    let code = run(args, &mut out, &mut err);
    (code, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}

fn screen(text: &str) -> (i32, String, String) {
    (0, text.to_owned(), String::new())
}

#[test]
fn nobody_is_there() {
    let Home { dir, .. } = &home();
    assert_eq!(kvctl(dir, &["list"]), screen("no instances\n"));
    assert_eq!(
        kvctl(dir, &["list", "--json"]),
        screen("{\n  \"instances\": [],\n  \"budgets\": [],\n  \"unreadable\": []\n}\n")
    );
}

#[test]
fn two_instances_in_a_table() {
    let Home { dir, .. } = &home();
    let llama = InstanceRecord::create(dir, "llama-8b", "vllm 0.29.0", "cuda:0", Terms::default()).unwrap();
    let _tiny = InstanceRecord::create(dir, "tiny", "vllm 0.9.2", "cpu", Terms::default()).unwrap();
    let first = llama.pool_row("group 0").unwrap();
    first.set(3 << 29, 64 << 20, 80 << 30, 0);
    let second = llama.pool_row("group 1").unwrap();
    second.set(1 << 29, 0, 1 << 30, 0);
    let pid = std::process::id();
    let width = pid.to_string().len().max(3);
    assert_eq!(
        kvctl(dir, &["list"]),
        screen(&format!(
            "\
NAME      ENGINE       {:>width$}  DEVICE      USED   RESERVED    VIRTUAL  LIMIT  MIN
llama-8b  vllm 0.29.0  {pid:>width$}  cuda:0  2.00 GiB  64.00 MiB  81.00 GiB   none  0 B
tiny      vllm 0.9.2   {pid:>width$}  cpu          0 B        0 B        0 B   none  0 B
",
            "PID"
        ))
    );
}

#[test]
fn an_instance_as_json() {
    let Home { dir, .. } = &home();
    let record = InstanceRecord::create(dir, "llama", "vllm 0.29.0", "cuda:0", Terms::default()).unwrap();
    let row = record.pool_row("group 0").unwrap();
    row.set(100, 20, 1000, 3);
    let (code, out, err) = kvctl(dir, &["list", "--json"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
    let start = parsed["instances"][0]["start_unix_ns"].as_u64().unwrap();
    assert_eq!(
        out,
        format!(
            r#"{{
  "instances": [
    {{
      "name": "llama",
      "engine": "vllm 0.29.0",
      "pid": {},
      "device": "cuda:0",
      "start_unix_ns": {start},
      "heartbeat": 2,
      "used_bytes": 100,
      "reserved_bytes": 20,
      "virtual_bytes": 1000,
      "quarantined_bytes": 3,
      "limit_bytes": null,
      "min_bytes": 0,
      "terms_revision": 0,
      "outcome": "applied",
      "cached_bytes": 0,
      "shortage_bytes": 0,
      "pools": [
        {{
          "name": "group 0",
          "used_bytes": 100,
          "reserved_bytes": 20,
          "virtual_bytes": 1000,
          "quarantined_bytes": 3
        }}
      ]
    }}
  ],
  "budgets": [],
  "unreadable": []
}}
"#,
            std::process::id()
        )
    );
}

/// Reads what is watched; after each look the figures change, and after the last it leaves.
struct Audience<'a> {
    seen: Vec<u8>,
    change: Box<dyn Fn(u64) + 'a>,
    figures: std::iter::Copied<std::slice::Iter<'a, u64>>,
}

impl Write for Audience<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.seen.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        let used = self.figures.next().ok_or(io::ErrorKind::BrokenPipe)?;
        (self.change)(used);
        Ok(())
    }
}

/// Exit code, standard output, standard error of a watch whose figures change after each look.
fn watched(dir: &Path, args: &[&str], figures: &[u64], change: impl Fn(u64)) -> (i32, String, String) {
    let mut audience =
        Audience { seen: Vec::new(), change: Box::new(change), figures: figures.iter().copied() };
    let mut err = Vec::new();
    let words = ["watch", "--interval", "0.1"].iter().chain(args).map(OsString::from);
    let code = run(words.chain(["--dir".into(), dir.into()]), &mut audience, &mut err);
    (code, String::from_utf8(audience.seen).unwrap(), String::from_utf8(err).unwrap())
}

#[test]
fn a_watch_prints_what_has_changed() {
    let Home { dir, .. } = &home();
    assert_eq!(kvctl(dir, &["watch", "--count", "3", "--interval", "0.1"]), screen("no instances\n"));
    let record = InstanceRecord::create(dir, "llama", "e", "cpu", Terms::default()).unwrap();
    let _other = InstanceRecord::create(dir, "other", "e", "cpu", Terms::default()).unwrap();
    let row = record.pool_row("kv").unwrap();
    // A byte more is the same table.
    let figures = [2 << 30, (2 << 30) + 1, (2 << 30) + 2];
    let (code, out, err) = watched(dir, &["llama"], &figures, |used| row.set(used, 0, 4 << 30, 0));
    let pid = std::process::id();
    let width = pid.to_string().len().max(3);
    assert_eq!(
        (code, out, err),
        screen(&format!(
            "\
NAME   ENGINE  {:>width$}  DEVICE  USED  RESERVED  VIRTUAL  LIMIT  MIN
llama  e       {pid:>width$}  cpu      0 B       0 B      0 B   none  0 B

NAME   ENGINE  {:>width$}  DEVICE      USED  RESERVED   VIRTUAL  LIMIT  MIN
llama  e       {pid:>width$}  cpu     2.00 GiB       0 B  4.00 GiB   none  0 B
",
            "PID", "PID"
        ))
    );
}

#[test]
fn a_watch_in_json_prints_an_object_a_line() {
    let Home { dir, .. } = &home();
    let record = InstanceRecord::create(dir, "llama", "e", "cpu", Terms::default()).unwrap();
    let row = record.pool_row("kv").unwrap();
    let (code, out, err) = watched(dir, &["--json"], &[512], |used| row.set(used, 0, 1024, 0));
    assert_eq!((code, err.as_str()), (0, ""));
    let looks: Vec<serde_json::Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let used: Vec<_> =
        looks.iter().map(|look| look["instances"][0]["used_bytes"].as_u64().unwrap()).collect();
    assert_eq!(used, [0, 512]);
    assert!(looks[0]["at_unix_ns"].as_u64() < looks[1]["at_unix_ns"].as_u64());
    assert!(looks[0]["budgets"].as_array().unwrap().is_empty());
}

#[test]
fn a_watch_ends_when_it_is_interrupted_and_when_nobody_reads_it() {
    let Home { dir, .. } = &home();
    let watch = || {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvctl"))
            .args(["watch", "--interval", "600", "--dir"])
            .arg(dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first = [0; 13];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
        assert_eq!(&first, b"no instances\n");
        child
    };
    let child = watch();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!((ended.status.code(), ended.stdout.len(), ended.stderr.len()), (Some(0), 0, 0));
    let mut child = watch();
    drop(child.stdout.take());
    let ended = child.wait_with_output().unwrap();
    assert_eq!((ended.status.code(), ended.stderr.len()), (Some(0), 0));
}

#[test]
fn what_cannot_be_read_is_refused_before_anything_is_done() {
    let Home { dir, .. } = &home();
    let cases: [(&[&str], &str); 8] = [
        (
            &["limit", "a", "12GB"],
            "invalid value '12GB' for '<SIZE|none>': units are binary here: write G or GiB",
        ),
        (
            &["limit", "a", "much"],
            "invalid value 'much' for '<SIZE|none>': a size is a number of bytes or one with K, M, G or T, in binary units: 512M, 1.5GiB",
        ),
        (
            &["min", "a", "none"],
            "invalid value 'none' for '<SIZE>': a size is a number of bytes or one with K, M, G or T, in binary units: 512M, 1.5GiB",
        ),
        (
            &["limit-percent", "a", "101"],
            "invalid value '101' for '<PCT>': a percentage is a number from 0 to 100: 25, 12.5",
        ),
        (
            &["limit", "a", "0", "--wait", "soon"],
            "invalid value 'soon' for '--wait <SECONDS>': seconds are a number from 0 to 86400: 5, 0.5",
        ),
        (
            &["watch", "--interval", "0"],
            "invalid value '0' for '--interval <SECONDS>': seconds are a number from 0.1 to 86400: 5, 0.5",
        ),
        (
            &["watch", "--count", "0"],
            "invalid value '0' for '--count <N>': 0 is not in 1..18446744073709551615",
        ),
        (&["limit", "a", "-1"], "unexpected argument '-1' found"),
    ];
    for (args, message) in cases {
        let (code, out, err) = kvctl(dir, args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}");
        assert_eq!(err.lines().next().unwrap(), format!("error: {message}"), "{args:?}");
    }
    assert!(!dir.exists());
}

#[test]
fn a_bad_record_is_a_warning_and_hides_nobody() {
    let Home { dir, .. } = &home();
    let _good = InstanceRecord::create(dir, "good", "e", "cpu", Terms::default()).unwrap();
    std::fs::write(dir.join("bad.kvc"), "nonsense").unwrap();
    let (code, out, err) = kvctl(dir, &["list"]);
    assert_eq!(code, 0);
    assert!(out.contains("\ngood  e "), "{out}");
    assert_eq!(err, format!("warning: {}/bad.kvc is not shown: truncated: 8 bytes\n", dir.display()));
    let (_, out, _) = kvctl(dir, &["list", "--json"]);
    let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(parsed["unreadable"][0]["why"], "truncated: 8 bytes");
}

#[test]
fn a_directory_that_cannot_be_used_is_a_failure() {
    let Home { dir, .. } = &home();
    std::fs::write(dir, "").unwrap();
    let message =
        format!("error: {} is not a directory; remove it, kvcached makes a directory there\n", dir.display());
    assert_eq!(kvctl(dir, &["list"]), (1, String::new(), message));
}

#[test]
fn wrong_usage_is_explained() {
    let Home { dir, .. } = &home();
    let (code, out, err) = kvctl(dir, &["lst"]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert_eq!(
        err,
        "\
error: unrecognized subcommand 'lst'

  tip: a similar subcommand exists: 'list'

Usage: kvctl <COMMAND>

For more information, try '--help'.
"
    );
    let (mut out, mut err) = (Vec::new(), Vec::new());
    assert_eq!(run([], &mut out, &mut err), 2);
    assert!(out.is_empty() && String::from_utf8(err).unwrap().contains("Usage: kvctl <COMMAND>"));
}

#[test]
fn the_doctor_is_the_pythons_and_its_exit_code_too() {
    let Home { dir, .. } = &home();
    let home = dir.parent().unwrap();
    let python = |name: &str, program: &str| {
        let path = home.join(name);
        // Not written by this process: a child that another test starts meanwhile would have it open, and nobody could run it.
        let write = Command::new("sh")
            .args(["-c", "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod 700 \"$0\""])
            .args([path.to_str().unwrap(), program])
            .status();
        assert!(write.unwrap().success());
        path.to_str().unwrap().to_owned()
    };
    let asked = home.join("asked");
    let good = python("good", &format!("shift 2; echo \"$@\" > {}; exit 1", asked.display()));
    assert_eq!(kvctl(dir, &["doctor", "--python", &good, "vllm", "--json", "--help"]).0, 1);
    assert_eq!(std::fs::read_to_string(asked).unwrap().split(" --dir").next(), Some("vllm --json --help"));
    let without = python("without", "exit 77");
    let (code, out, err) = kvctl(dir, &["doctor", "--python", &without]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert_eq!(
        err,
        format!(
            "error: {without} has no kvcached with a doctor; install the wheel there, or give the Python that runs the engines: \
             kvctl doctor --python PATH, or KVCACHED_PYTHON\n"
        )
    );
    let (code, _, err) = kvctl(dir, &["doctor", "--python", "/nowhere/python"]);
    assert!(code == 1 && err.starts_with("error: cannot run /nowhere/python: "), "{err}");
    let killed = python("killed", "kill -9 $$");
    assert_eq!(kvctl(dir, &["doctor", "--python", &killed]).2, format!("error: {killed} was killed\n"));
    // The one of this machine, whether it has kvcached or not.
    let (code, _, err) = kvctl(dir, &["doctor", "--unheard-of"]);
    assert!(code == 2 || code == 1 && err.contains(" has no kvcached with a doctor"), "{code} {err}");
}

#[test]
fn help_states_the_exit_codes() {
    let Home { dir, .. } = &home();
    assert_eq!(
        kvctl(dir, &["--help"]),
        screen(
            "\
Shows and steers the engines of this user whose KV cache is elastic

Usage: kvctl <COMMAND>

Commands:
  list           Show all running instances, and the memory budget that they share
  limit          Set the most memory that an instance may have
  limit-percent  Set the limit of an instance in percent of the memory budget of its device
  min            Set the memory that an instance is guaranteed, whether it uses it or not
  delete         Remove the record of an instance that has died, or one of another version of kvcached
  watch          Print what `list` shows whenever it has changed, until interrupted
  metrics        Print what all instances hold, count and time, as Prometheus takes it
  doctor         Say whether engines' KV caches are elastic here, and if not why and what to do; needs the Python that runs the engines
  top            Show instances and budgets live, and change limits by key [alias: kvtop]
  help           Print this message or the help of the given subcommand(s)

Options:
  -h, --help     Print help
  -V, --version  Print version

Exit codes: 0 done, 1 something failed, 2 bad usage, 3 asked but not (yet) in force.
Warnings go to standard error.
"
        )
    );
    assert_eq!(
        kvctl(dir, &["limit", "--help"]),
        screen(
            "\
Set the most memory that an instance may have

Usage: kvctl limit [OPTIONS] <NAME> <SIZE|none>

Arguments:
  <NAME>       Name of the instance
  <SIZE|none>  Binary units: 512M, 1.5GiB; 0 drains the instance, none takes the limit away

Options:
      --wait <SECONDS>  How long to wait for the instance's answer [default: 5]
      --json            Print JSON; sizes in bytes
  -h, --help            Print help

Exit codes: 0 done, 1 something failed, 2 bad usage, 3 asked but not (yet) in force.
Warnings go to standard error.
"
        )
    );
    assert_eq!(
        kvctl(dir, &["watch", "--help"]),
        screen(
            "\
Print what `list` shows whenever it has changed, until interrupted

Usage: kvctl watch [OPTIONS] [NAME]...

Arguments:
  [NAME]...  Only these instances, and the budgets that they live by; default all

Options:
      --interval <SECONDS>  Seconds between two looks [default: 1]
      --count <N>           End after this many looks, whether they showed anything new or not
      --json                Print JSON, one object a line; sizes in bytes
  -h, --help                Print help

Exit codes: 0 done, 1 something failed, 2 bad usage, 3 asked but not (yet) in force.
Warnings go to standard error.
"
        )
    );
    assert_eq!(kvctl(dir, &["--version"]), screen(concat!("kvctl ", env!("CARGO_PKG_VERSION"), "\n")));
}

struct Refusing(io::ErrorKind);

impl Write for Refusing {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Err(self.0.into())
    }
}

#[test]
fn a_reader_that_has_left_is_no_failure_and_a_full_disk_is_one() {
    let Home { dir, .. } = &home();
    for extra in [None, Some("--json")] {
        let args =
            || ["list".into(), "--dir".into(), dir.into()].into_iter().chain(extra.map(OsString::from));
        let mut err = Vec::new();
        assert_eq!(run(args(), &mut Refusing(io::ErrorKind::BrokenPipe), &mut err), 0);
        assert!(err.is_empty());
        assert_eq!(run(args(), &mut Refusing(io::ErrorKind::StorageFull), &mut err), 1);
        assert_eq!(String::from_utf8(err).unwrap(), "error: cannot write the result: no storage space\n");
    }
    assert_eq!(run(["--help".into()], &mut Refusing(io::ErrorKind::BrokenPipe), &mut Vec::new()), 0);
}

#[test]
fn the_binary_does_not_mind_a_closed_pipe() {
    let Home { dir, .. } = &home();
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvctl"))
        .args(["list", "--dir"])
        .arg(dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let ended = child.wait_with_output().unwrap();
    assert_eq!((ended.status.code(), ended.stderr.len()), (Some(0), 0));
}

#[test]
fn the_binary_speaks_for_the_library() {
    let Home { dir, .. } = &home();
    let ended = Command::new(env!("CARGO_BIN_EXE_kvctl")).args(["list", "--dir"]).arg(dir).output().unwrap();
    assert_eq!((ended.status.code(), ended.stdout.as_slice()), (Some(0), b"no instances\n".as_slice()));
    let ended = Command::new(env!("CARGO_BIN_EXE_kvctl")).arg("--nonsense").output().unwrap();
    assert_eq!(ended.status.code(), Some(2));
}
