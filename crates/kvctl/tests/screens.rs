//! What a person sees, to the letter.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kvcached_control::{InstanceRecord, Terms};
use kvcached_kvctl::run;

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
    assert_eq!(kvctl(dir, &["list", "--json"]), screen("{\n  \"instances\": [],\n  \"unreadable\": []\n}\n"));
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
NAME      ENGINE       {:>width$}  DEVICE      USED   RESERVED    VIRTUAL
llama-8b  vllm 0.29.0  {pid:>width$}  cuda:0  2.00 GiB  64.00 MiB  81.00 GiB
tiny      vllm 0.9.2   {pid:>width$}  cpu          0 B        0 B        0 B
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
  "unreadable": []
}}
"#,
            std::process::id()
        )
    );
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
fn help_states_the_exit_codes() {
    let Home { dir, .. } = &home();
    assert_eq!(
        kvctl(dir, &["--help"]),
        screen(
            "\
Shows the engines of this user whose KV cache is elastic

Usage: kvctl <COMMAND>

Commands:
  list  Show all running instances
  help  Print this message or the help of the given subcommand(s)

Options:
  -h, --help     Print help
  -V, --version  Print version

Exit codes: 0 done, 1 something failed, 2 bad usage. Warnings go to standard error.
"
        )
    );
    assert_eq!(
        kvctl(dir, &["list", "--help"]),
        screen(
            "\
Show all running instances

Usage: kvctl list [OPTIONS]

Options:
      --json  Print JSON; sizes in bytes
  -h, --help  Print help

Exit codes: 0 done, 1 something failed, 2 bad usage. Warnings go to standard error.
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
