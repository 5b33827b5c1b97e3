//! `kvctl top` on a terminal of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod engine;

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvcached_control::{InstanceRecord, Outcome, Terms};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize};

use crate::engine::Engine;

const ROWS: u16 = 10;
const COLUMNS: u16 = 90;
const DEADLINE: Duration = Duration::from_secs(20);

/// Ended with the test, whatever became of it.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Program {
    fn ended(&mut self) -> Option<ExitStatus> {
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            if let Some(status) = self.0.try_wait().unwrap() {
                return Some(status);
            }
            thread::sleep(Duration::from_millis(10));
        }
        None
    }
}

/// A program on a pseudo terminal, and what a person would see there.
struct Session {
    program: Program,
    keys: File,
    /// The program's side, kept open: what it does to the terminal can be looked at when it has ended.
    terminal: File,
    before: Termios,
    screen: Arc<Mutex<vt100::Parser>>,
    reader: JoinHandle<()>,
    /// Has the reader end.
    closes: Arc<AtomicBool>,
}

impl Session {
    fn start(program: &Path, args: &[&str], dir: &Path) -> Self {
        let keys =
            File::from(openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap());
        grantpt(&keys).unwrap();
        unlockpt(&keys).unwrap();
        let path = ptsname(&keys, Vec::new()).unwrap();
        let terminal = File::options().read(true).write(true).open(path.to_str().unwrap()).unwrap();
        tcsetwinsize(&terminal, Winsize { ws_row: ROWS, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 })
            .unwrap();
        let before = tcgetattr(&terminal).unwrap();
        let side = || Stdio::from(terminal.try_clone().unwrap());
        // A session of its own, so that the pseudo terminal, and not the one of who runs this test, is its /dev/tty.
        let child = Command::new("setsid")
            .arg("--ctty")
            .arg(program)
            .args(args)
            .arg("--dir")
            .arg(dir)
            .env("NO_COLOR", "1")
            .stdin(side())
            .stdout(side())
            .stderr(side())
            .spawn();
        let program = Program(child.unwrap());
        let screen = Arc::new(Mutex::new(vt100::Parser::new(ROWS, COLUMNS, 0)));
        let closes = Arc::new(AtomicBool::new(false));
        let reader = thread::spawn({
            let (keys, screen, closes) =
                (keys.try_clone().unwrap(), Arc::clone(&screen), Arc::clone(&closes));
            move || show(keys, &screen, &closes)
        });
        Self { program, keys, terminal, before, screen, reader, closes }
    }

    fn resize(&self, rows: u16, columns: u16) {
        self.screen.lock().unwrap().screen_mut().set_size(rows, columns);
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.terminal, size).unwrap();
    }

    /// Closes all that there is of the terminal on our side.
    fn hang_up(self) -> Program {
        self.closes.store(true, Ordering::SeqCst);
        self.reader.join().unwrap();
        self.program
    }

    fn type_keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    fn shown(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    fn lines(&self) -> Vec<String> {
        self.shown().lines().map(|line| line.trim_end().to_owned()).collect()
    }

    /// Waits for a screen that holds all of `texts`.
    fn see(&self, texts: &[&str]) {
        let start = Instant::now();
        while !texts.iter().all(|text| self.shown().contains(text)) {
            assert!(start.elapsed() < DEADLINE, "{texts:?} are not all on this screen:\n{}", self.shown());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for the program's end; the terminal is as it was.
    fn end(mut self) -> (ExitStatus, String) {
        let Some(status) = self.program.ended() else { panic!("it does not end:\n{}", self.shown()) };
        let after = tcgetattr(&self.terminal).unwrap();
        assert!(after.local_modes.contains(LocalModes::ICANON | LocalModes::ECHO));
        assert_eq!(after.local_modes, self.before.local_modes);
        assert_eq!(after.input_modes, self.before.input_modes);
        assert_eq!(after.output_modes, self.before.output_modes);
        // The reader ends with the last holder of the program's side.
        drop(self.terminal);
        self.reader.join().unwrap();
        let parser = self.screen.lock().unwrap();
        assert!(!parser.screen().alternate_screen() && !parser.screen().hide_cursor());
        (status, parser.screen().contents())
    }
}

/// Until the program and we have closed its side, or `closes` is set.
fn show(mut keys: File, screen: &Mutex<vt100::Parser>, closes: &AtomicBool) {
    let mut bytes = [0; 4096];
    let soon = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    while !closes.load(Ordering::SeqCst) {
        if poll(&mut [PollFd::new(&keys, PollFlags::IN)], Some(&soon)) == Ok(0) {
            continue;
        }
        let Ok(count @ 1..) = keys.read(&mut bytes) else { return };
        screen.lock().unwrap().process(&bytes[..count]);
    }
}

fn kvctl() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_kvctl"))
}

#[test]
fn the_first_screen_and_its_end() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let record = InstanceRecord::create(&dir, "llama", "vllm 0.29.0", "cuda:0", Terms::default()).unwrap();
    let row = record.pool_row("group 0").unwrap();
    row.set(3 << 29, 1 << 29, 2 << 30, 0);
    let mut session = Session::start(&kvctl(), &["top"], &dir);
    session.see(&["llama", "1.50G", "q quit"]);
    assert_eq!(
        session.lines(),
        [
            "kvcached   █ used   ▓ cached   ▒ reserved   ░ free",
            "NAME                                     USED   CACHED RESERVED    LIMIT      MIN    SHORT",
            "llama ███████████████████████▒▒▒▒▒▒▒    1.50G        0  512.00M     none        0        0",
            "",
            "",
            "",
            "",
            &format!("llama: vllm 0.29.0, pid {}, cuda:0, 2.00G of addresses", std::process::id()),
            "",
            "↑↓ select   l limit   m minimum   q quit",
        ]
    );
    session.type_keys("q");
    let (status, left) = session.end();
    assert_eq!((status.code(), left.as_str()), (Some(0), ""));
}

#[test]
fn ctrl_c_and_signals_end_it_too() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let mut session = Session::start(&kvctl(), &["top"], &dir);
    session.see(&["no instances"]);
    session.type_keys("\x03");
    assert_eq!(session.end().0.code(), Some(0));
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT, rustix::process::Signal::HUP]
    {
        let session = Session::start(&kvctl(), &["top"], &dir);
        session.see(&["no instances"]);
        let pid = rustix::process::Pid::from_child(&session.program.0);
        rustix::process::kill_process(pid, signal).unwrap();
        assert_eq!(session.end().0.code(), Some(0));
    }
}

#[test]
fn it_ends_with_its_terminal() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let mut session = Session::start(&kvctl(), &["top"], &dir);
    session.type_keys("l"); // something was read before
    session.see(&["no instances"]);
    let status = session.hang_up().ended().expect("it lives without a terminal");
    assert_eq!(status.code(), Some(0));
}

#[test]
fn another_size_is_another_screen() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let mut session = Session::start(&kvctl(), &["top", "--interval", "600"], &dir);
    session.see(&["no instances"]);
    session.resize(5, 30);
    let narrow = ["kvcached   █ used   ▓ cached", "no instances", "", "", "↑↓ select   l limit   m minimu"];
    let start = Instant::now();
    while session.lines() != narrow {
        assert!(start.elapsed() < DEADLINE, "{:?}", session.lines());
        thread::sleep(Duration::from_millis(10));
    }
    session.type_keys("q");
    assert_eq!(session.end().0.code(), Some(0));
}

#[test]
fn a_failure_is_told_on_the_screen_that_stays() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    std::fs::create_dir(&dir).unwrap();
    std::fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let session = Session::start(&kvctl(), &["top", "--interval", "0.1"], &dir);
    session.see(&["no instances"]);
    std::fs::remove_dir(&dir).unwrap();
    std::fs::write(&dir, "").unwrap();
    let (status, left) = session.end();
    assert_eq!(status.code(), Some(1));
    assert!(left.replace('\n', "").contains("is not a directory"), "{left}");
}

#[test]
fn kvtop_is_its_other_name() {
    let home = tempfile::tempdir().unwrap();
    let link = home.path().join("kvtop");
    std::os::unix::fs::symlink(kvctl(), &link).unwrap();
    let dir = home.path().join("records");
    for (program, args) in [(link, &[][..]), (kvctl(), &["kvtop"][..])] {
        let mut session = Session::start(&program, args, &dir);
        session.see(&["no instances"]);
        session.type_keys("q");
        assert_eq!(session.end().0.code(), Some(0));
    }
}

#[test]
fn limits_are_changed_by_key() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    let _first = Engine::start(&dir, "first", Outcome::Rejected);
    let engine = Engine::start(&dir, "llama", Outcome::Applied);
    let mut session = Session::start(&kvctl(), &["top"], &dir);
    session.see(&["first", "llama", "q quit"]);
    session.type_keys("\x1b[B");
    session.see(&["llama: vllm"]);
    session.type_keys("l12GB\r");
    session.see(&["limit of llama", "12GB", "write G or GiB"]);
    session.type_keys("\x7f\r");
    session.see(&["applied: llama has limit 12.00 GiB, minimum 0 B", "12.00G"]);
    assert_eq!(engine.record.terms().limit_bytes, Some(12 << 30));
    session.type_keys("m1.5G\r");
    session.see(&["applied: llama has limit 12.00 GiB, minimum 1.50 GiB", "1.50G"]);
    assert_eq!(engine.record.terms().min_bytes, 3 << 29);
    session.type_keys("\x1b[Am1G\r");
    session.see(&["rejected: first keeps limit none, minimum 0 B"]);
    session.type_keys("q");
    assert_eq!(session.end().0.code(), Some(0));
}
