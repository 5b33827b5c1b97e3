//! `kvctl metrics`: the text to the letter, and the server over real sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcached_control::{BudgetShare, Counter, InstanceRecord, Terms, Timer};
use kvctl::run;
use rustix::process::{Pid, Signal, kill_process};

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

fn llama(dir: &Path) -> Arc<InstanceRecord> {
    let terms = Terms { limit_bytes: Some(4096), min_bytes: 0 };
    let record = InstanceRecord::create(dir, "llama", "vllm 0.29.0", "cuda:0", terms).unwrap();
    record.metrics().add(Counter::RefusedByBudget, 3);
    record.metrics().time(Timer::Map, Duration::from_micros(30));
    Arc::new(record)
}

#[test]
fn nobody_is_there() {
    let Home { dir, .. } = &home();
    assert_eq!(kvctl(dir, &["metrics"]), (0, String::new(), String::new()));
    assert_eq!(
        kvctl(dir, &["metrics", "--json"]),
        (0, "{\n  \"families\": [],\n  \"unreadable\": []\n}\n".to_owned(), String::new())
    );
}

#[test]
fn the_text_to_the_letter() {
    let Home { dir, .. } = &home();
    let record = llama(dir);
    let share = BudgetShare::join(dir, &record, "GPU-1", 1000, None).unwrap();
    share.take(600).unwrap();
    let row = record.pool_row("kv \"0\"").unwrap();
    row.set(500, 100, 8000, 0);
    let (code, text, err) = kvctl(dir, &["metrics"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let of = r#"instance="llama",engine="vllm 0.29.0",device="cuda:0""#;
    let starts = format!(
        "\
# HELP kvcached_used_bytes Memory under pages that hold blocks.
# TYPE kvcached_used_bytes gauge
kvcached_used_bytes{{{of},pool=\"kv \\\"0\\\"\"}} 500
# HELP kvcached_reserved_bytes Memory under pages that hold none, and kept beside them.
# TYPE kvcached_reserved_bytes gauge
kvcached_reserved_bytes{{{of},pool=\"kv \\\"0\\\"\"}} 100
"
    );
    assert!(text.starts_with(&starts), "{text}");
    let refusals = format!(
        "\
# HELP kvcached_refusals_total Times that memory which somebody waited for was refused, and by what.
# TYPE kvcached_refusals_total counter
kvcached_refusals_total{{{of},by=\"budget\"}} 3
kvcached_refusals_total{{{of},by=\"guarantees\"}} 0
kvcached_refusals_total{{{of},by=\"limit\"}} 0
kvcached_refusals_total{{{of},by=\"device\"}} 0
"
    );
    assert!(text.contains(&refusals), "{text}");
    let maps = format!(
        "\
# HELP kvcached_map_seconds Time of a call that gave pages memory.
# TYPE kvcached_map_seconds histogram
kvcached_map_seconds_bucket{{{of},le=\"0.000016\"}} 0
kvcached_map_seconds_bucket{{{of},le=\"0.000032\"}} 1
kvcached_map_seconds_bucket{{{of},le=\"0.000064\"}} 1
"
    );
    assert!(text.contains(&maps), "{text}");
    let ends = format!(
        "\
kvcached_map_seconds_bucket{{{of},le=\"+Inf\"}} 1
kvcached_map_seconds_sum{{{of}}} 0.00003
kvcached_map_seconds_count{{{of}}} 1
"
    );
    assert!(text.contains(&ends), "{text}");
    assert!(text.contains("\nkvcached_budget_free_bytes{device=\"GPU-1\"} 400\n"));
}

/// (name, type, labels beside the usual ones) of each row of the table in docs/KVCTL.md.
fn documented() -> BTreeSet<(String, String, Vec<String>)> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/KVCTL.md")).unwrap();
    let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let rows = text.lines().filter(|line| line.starts_with("| `kvcached_"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').collect();
        (quoted(cells[1])[0].clone(), cells[2].trim().to_owned(), quoted(cells[3]))
    })
    .collect()
}

#[test]
fn every_metric_is_documented_and_nothing_else_is() {
    let Home { dir, .. } = &home();
    let record = llama(dir);
    let _share = BudgetShare::join(dir, &record, "GPU-1", 1000, None).unwrap();
    let _row = record.pool_row("kv").unwrap();
    let usual = ["instance", "engine", "device"];
    let shown: BTreeSet<(String, String, Vec<String>)> = kvcached_control::families(dir, |_| true)
        .unwrap()
        .into_iter()
        .map(|family| {
            let mut more = vec![];
            for (name, value) in family.samples.iter().flat_map(|sample| &sample.labels) {
                let words = if *name == "pool" { vec![*name] } else { vec![*name, value.as_str()] };
                if !usual.contains(name) {
                    more.extend(words.into_iter().map(str::to_owned));
                }
            }
            let mut known = BTreeSet::new();
            more.retain(|word| known.insert(word.clone()));
            (family.name, family.kind.as_str().to_owned(), more)
        })
        .collect();
    assert_eq!(shown, documented());
}

#[test]
fn the_same_as_json() {
    let Home { dir, .. } = &home();
    let _record = llama(dir);
    let (code, out, err) = kvctl(dir, &["metrics", "--json"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
    let families = parsed["families"].as_array().unwrap();
    let family = |name: &str| families.iter().find(|family| family["name"] == name).unwrap();
    let refusals = family("kvcached_refusals_total");
    assert_eq!((refusals["kind"].as_str(), &refusals["samples"][0]["value"]), (Some("counter"), &3.into()));
    assert_eq!(refusals["samples"][0]["labels"]["by"], "budget");
    let maps = &family("kvcached_map_seconds")["samples"][0];
    assert_eq!((&maps["count"], &maps["sum"]), (&1.into(), &0.00003.into()));
    let buckets = maps["buckets"].as_array().unwrap();
    assert_eq!((&buckets[1]["le"], &buckets[1]["count"]), (&0.000032.into(), &1.into()));
    assert_eq!(buckets.last().unwrap()["le"], serde_json::Value::Null);
    assert_eq!(family("kvcached_limit_bytes")["samples"][0]["value"], 4096);
}

#[test]
fn where_it_cannot_listen_it_says_so() {
    let Home { dir, .. } = &home();
    for bad in ["", "65536", "localhost:9577", "1.2.3.4", "::1:x"] {
        let (code, out, err) = kvctl(dir, &["metrics", "--listen", bad]);
        assert_eq!((code, out.as_str()), (2, ""), "{bad}");
        assert!(err.contains("as 9577, or a numeric address and a port"), "{err}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (code, out, err) = kvctl(dir, &["metrics", "--listen", &port]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.starts_with(&format!("error: cannot listen on 127.0.0.1:{port}: ")), "{err}");
    assert_eq!(kvctl(dir, &["metrics", "--listen", "0", "--json"]).0, 2);
}

/// `kvctl metrics --listen 0` in a process of its own.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(dir: &Path) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_kvctl"))
            .args(["metrics", "--listen", "0", "--dir"])
            .arg(dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(process.stdout.take().unwrap());
        said.read_line(&mut line).unwrap();
        process.stdout = Some(said.into_inner());
        let address =
            line.strip_prefix("metrics at http://").unwrap().strip_suffix("/metrics\n").unwrap().to_owned();
        assert!(address.starts_with("127.0.0.1:"));
        Server { process, address }
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).unwrap()
    }

    fn ask(&self, request: &str) -> String {
        let mut client = self.connect();
        client.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    }

    fn get(&self, path: &str) -> String {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.address))
    }

    /// Exit code and standard error after a signal.
    fn end(mut self, signal: Signal) -> (Option<i32>, String) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
        let mut err = String::new();
        self.process.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        (self.process.wait().unwrap().code(), err)
    }
}

#[test]
fn it_answers_over_http_until_a_signal_comes() {
    for signal in [Signal::INT, Signal::TERM] {
        let Home { dir, .. } = &home();
        let record = llama(dir);
        let server = Server::start(dir);
        let answer = server.get("/metrics");
        assert!(
            answer
                .starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n")
        );
        assert!(answer.contains("by=\"budget\"} 3\n"), "{answer}");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())));
        record.metrics().add(Counter::RefusedByBudget, 1);
        assert!(server.get("/metrics").contains("by=\"budget\"} 4\n"), "as it is now");
        assert!(server.get("/other").starts_with("HTTP/1.1 404 "));
        assert!(server.ask("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(server.ask("nonsense\r\n\r\n").starts_with("HTTP/1.1 400 "));
        assert_eq!(server.end(signal), (Some(0), String::new()));
    }
}

#[test]
fn clients_that_hang_make_nobody_wait() {
    let Home { dir, .. } = &home();
    let _record = llama(dir);
    let server = Server::start(dir);
    let silent: Vec<TcpStream> = (0..100).map(|_| server.connect()).collect();
    let mut slow = server.connect();
    slow.write_all(b"GET /metrics HTTP/1.1\r\nHost:").unwrap();
    let mut deaf = server.connect();
    deaf.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let began = Instant::now();
    for _ in 0..3 {
        assert!(server.get("/metrics").starts_with("HTTP/1.1 200 OK"));
    }
    assert!(began.elapsed() < Duration::from_secs(5), "less than a client has");
    slow.write_all(b" localhost\r\n\r\n").unwrap();
    for mut client in [slow, deaf] {
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "whoever is slow has a while");
    }
    let ends = |mut client: &TcpStream| match client.read(&mut [0]) {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    };
    assert!(silent.iter().all(ends), "nobody may stay");
    let hanging = server.connect();
    let began = Instant::now();
    assert_eq!(server.end(Signal::TERM), (Some(0), String::new()));
    assert!(began.elapsed() < Duration::from_secs(3), "nor the end");
    drop(hanging);
}

#[test]
fn a_body_that_nobody_wanted_costs_nobody_the_answer() {
    let Home { dir, .. } = &home();
    let server = Server::start(dir);
    let body = "x".repeat(4 << 20);
    let post = format!("POST /metrics HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    assert!(server.ask(&post).starts_with("HTTP/1.1 405 "));
}

#[test]
fn it_serves_on_when_nobody_reads_what_it_says() {
    let Home { dir, .. } = &home();
    let mut server = Server::start(dir);
    drop(server.process.stdout.take());
    std::thread::sleep(Duration::from_millis(100));
    assert!(server.get("/metrics").starts_with("HTTP/1.1 200 OK"));
    assert_eq!(server.end(Signal::TERM), (Some(0), String::new()));
}

#[test]
fn a_bad_record_is_a_warning_and_hides_nobody() {
    let Home { dir, .. } = &home();
    let _record = llama(dir);
    std::fs::write(dir.join("bad.kvc"), "nonsense").unwrap();
    let warning = format!("warning: {}/bad.kvc is not shown: truncated: 8 bytes\n", dir.display());
    let (code, out, err) = kvctl(dir, &["metrics", "--json"]);
    assert_eq!((code, &err), (0, &warning));
    let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(parsed["unreadable"][0]["why"], "truncated: 8 bytes");
    let server = Server::start(dir);
    for _ in 0..2 {
        assert!(server.get("/metrics").contains("llama"));
    }
    assert_eq!(server.end(Signal::TERM), (Some(0), warning));
}

#[test]
fn what_cannot_be_read_is_an_answer_too() {
    let Home { dir, .. } = &home();
    std::fs::write(dir, "no directory").unwrap();
    let mut server = Server::start(dir);
    let answer = server.get("/metrics");
    assert!(
        answer.starts_with("HTTP/1.1 500 ") && answer.contains("is not a directory; remove it"),
        "{answer}"
    );
    // At once, and not when somebody asks again.
    let (_, why) = answer.split_once("\r\n\r\n").unwrap();
    let mut warned = vec![0; "warning: ".len() + why.len()];
    server.process.stderr.as_mut().unwrap().read_exact(&mut warned).unwrap();
    assert_eq!(String::from_utf8(warned).unwrap(), format!("warning: {why}"));
    assert!(server.get("/").starts_with("HTTP/1.1 200 "));
    std::fs::remove_file(dir).unwrap();
    assert!(server.get("/metrics").starts_with("HTTP/1.1 200 "), "as soon as it can be");
    assert_eq!(server.end(Signal::TERM), (Some(0), String::new()));
}
