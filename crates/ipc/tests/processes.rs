//! Real processes, killed (SIGKILL) at named points: nobody hangs, survivors agree and say so in time, and no socket, page or handle
//! is left where it should not be.
//!
//! Ranks and coordinators are this test binary, started again to run one of the two tests that are ignored otherwise. They take
//! their orders from standard input, and the points at which they die are in their store and their links: none is in the library.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod memory;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvcached_ipc::message::{Member, Message, Request};
use kvcached_ipc::rank::{Work, WorkResult};
use kvcached_ipc::wire::{self, Decoded};
use kvcached_ipc::{Directory, FTensorStore, Inbox, IpcError, Link, RankServer, Ranks, RanksConfig, Store};
use kvcached_vmm::Driver;
use kvcached_vmm::host::Host;
use memory::{member, tensor_of};
use rustix::process::{Signal, getpid, kill_process};

const TIMEOUT: Duration = Duration::from_secs(2);
const HEARD: Duration = Duration::from_secs(1);
/// What a line of a child's protocol begins with: the test harness writes to the same pipe.
const SAYS: &str = "says ";

// ------------------------------------------------------------------ the processes

/// Dies here, as the kernel kills.
fn die() -> ! {
    kill_process(getpid(), Signal::KILL).unwrap();
    unreachable!("SIGKILL cannot be waited for")
}

/// A store that dies before or after it does the first work of a kind.
struct Mortal {
    store: FTensorStore,
    point: String,
}

impl Mortal {
    fn at(&self, when: &str, work: &Work) {
        let kind = match work {
            Work::Map { .. } => "map",
            Work::Unmap { .. } => "unmap",
            Work::Prepare { .. } => "prepare",
            Work::Commit { .. } => "commit",
            Work::Abort { .. } => "abort",
            Work::Undo { .. } => "undo",
            _ => return,
        };
        if self.point == format!("{when}-{kind}") {
            die();
        }
    }
}

impl Store for Mortal {
    fn work(&self, work: &Work) -> WorkResult {
        self.at("before", work);
        let result = self.store.work(work);
        self.at("after", work);
        result
    }

    fn num_pages(&self) -> u32 {
        self.store.num_pages()
    }
}

fn orders() -> Vec<String> {
    let mut line = String::new();
    io::stdin().read_line(&mut line).unwrap();
    line.split_whitespace().map(str::to_owned).collect()
}

fn say(what: impl std::fmt::Display) {
    println!("{SAYS}{what}");
}

/// Orders: the directory, the rank, where to die. Then `look` as often as wanted, until standard input ends.
#[test]
#[ignore = "a process of the other tests"]
fn rank_process() {
    let [directory, rank, point] = orders().try_into().unwrap();
    let driver = Arc::new(Host::with_total(256 << 20).unwrap());
    let tensor = tensor_of(driver.clone());
    let server =
        RankServer::bind(member(rank.parse().unwrap()), &Directory::create(Path::new(&directory)).unwrap())
            .unwrap();
    let store = FTensorStore::new(Arc::clone(&tensor));
    server.add_group(0, Arc::new(Mortal { store, point })).unwrap();
    say(server.address().display());
    for line in io::stdin().lock().lines() {
        assert_eq!(line.unwrap(), "look");
        let memory = driver.mem_info().unwrap();
        let pages = (memory.total - memory.free) / tensor.geometry().page_bytes();
        say(format!("{:?} {:?} {pages}", tensor.mapped_pages(), tensor.pending_transaction()));
    }
    let last =
        Ranks::connect(&[(server.member(), server.address().to_path_buf())], config(u64::MAX >> 1)).unwrap();
    drop(last);
    assert!(server.stop());
    say(format!("ended, {} threads left", threads()));
}

/// Threads of ours in this process.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("kvcached")).count()
}

/// A link by hand, which dies before or after it has sent the n-th request of a kind of all links.
struct MortalLink {
    stream: Mutex<UnixStream>,
    point: Arc<(String, u32)>,
    seen: Arc<AtomicU32>,
}

impl MortalLink {
    fn start(
        address: &Path,
        inbox: Inbox,
        point: Arc<(String, u32)>,
        seen: Arc<AtomicU32>,
    ) -> io::Result<Self> {
        let stream = UnixStream::connect(address)?;
        let mut reads = stream.try_clone()?;
        std::thread::spawn(move || {
            loop {
                let mut frame = vec![0; wire::HEADER_BYTES];
                if reads.read_exact(&mut frame).is_err() {
                    return inbox.lost("it is gone".to_owned());
                }
                let header = wire::header(&frame).unwrap().unwrap();
                frame.resize(wire::HEADER_BYTES + header.payload_bytes, 0);
                reads.read_exact(&mut frame[wire::HEADER_BYTES..]).unwrap();
                inbox.received(&frame);
            }
        });
        Ok(MortalLink { stream: Mutex::new(stream), point, seen })
    }
}

impl Link for MortalLink {
    fn send(&self, frame: &[u8]) -> io::Result<()> {
        let Decoded::Frame(said) = wire::decode(frame).unwrap() else { unreachable!() };
        let kind = match said.message {
            Message::Request(Request::Map(_)) => "map",
            Message::Request(Request::Prepare(_)) => "prepare",
            Message::Request(Request::Commit) => "commit",
            _ => "other",
        };
        let (when, at) = self.point.0.split_once('-').unwrap();
        let is_it = kind == at && self.seen.fetch_add(1, Ordering::SeqCst) + 1 == self.point.1;
        if is_it && when == "before" {
            die();
        }
        self.stream.lock().unwrap().write_all(frame)?;
        if is_it {
            die();
        }
        Ok(())
    }

    fn close(&self) {
        let _ = self.stream.lock().unwrap().shutdown(std::net::Shutdown::Both);
    }
}

/// Orders: where to die and at which request of that kind, then the addresses.
#[test]
#[ignore = "a process of the other tests"]
fn coordinator_process() {
    let orders = orders();
    let point = Arc::new((orders[0].clone(), orders[1].parse().unwrap()));
    let seen = Arc::new(AtomicU32::new(0));
    let mut addresses = orders[2..].iter();
    let members = (0..orders.len() as u16 - 2).map(member).collect();
    let ranks = Ranks::over_links(members, config(1), |_, inbox| {
        let address = Path::new(addresses.next().unwrap());
        Ok(Arc::new(MortalLink::start(address, inbox, Arc::clone(&point), Arc::clone(&seen))?))
    })
    .unwrap();
    say("begun");
    if point.0.ends_with("map") {
        ranks.map(&[1, 2]).unwrap();
    } else {
        ranks.map(&[1, 2]).unwrap();
        ranks.unmap(&[1]).unwrap();
    }
    say("survived");
}

// ------------------------------------------------------------------ their tester

fn config(epoch: u64) -> RanksConfig {
    RanksConfig { group: 0, epoch, keep: (0..memory::PAGES).collect(), timeout: TIMEOUT }
}

/// One of the processes; killed where a test ends early.
struct Process {
    child: Child,
    orders: Option<ChildStdin>,
    says: Receiver<String>,
}

impl Process {
    fn start(which: &str, orders: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", which, "--ignored", "--nocapture", "--test-threads=1"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (tell, says) = mpsc::channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The harness writes the test's name before the first.
                if let Some((_, said)) = line.split_once(SAYS) {
                    let _ = tell.send(said.to_owned());
                }
            }
        });
        let stdin = child.stdin.take();
        let mut process = Process { child, orders: stdin, says };
        process.order(orders);
        process
    }

    fn order(&mut self, line: &str) {
        writeln!(self.orders.as_mut().unwrap(), "{line}").unwrap();
    }

    fn hear(&self) -> String {
        self.says.recv_timeout(Duration::from_secs(20)).expect("a process says nothing")
    }

    /// Waits until it has died of what kills here.
    fn has_died(&mut self) {
        use std::os::unix::process::ExitStatusExt;
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => return assert_eq!(status.signal(), Some(9), "{status}"),
                None => assert!(Instant::now() < deadline, "it did not die"),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ranks that run.
struct Ranked {
    base: tempfile::TempDir,
    processes: Vec<Process>,
    addresses: Vec<(Member, PathBuf)>,
}

impl Ranked {
    /// Rank 1 dies at `point`.
    fn new(count: u16, point: &str) -> Self {
        let base = tempfile::tempdir().unwrap();
        let mut ranked = Ranked { base, processes: vec![], addresses: vec![] };
        for rank in 0..count {
            ranked.add(rank, if rank == 1 { point } else { "never" });
        }
        for rank in 0..usize::from(count) {
            ranked.addresses.push((member(rank as u16), ranked.processes[rank].hear().into()));
        }
        ranked
    }

    fn add(&mut self, rank: u16, point: &str) {
        let orders = format!("{} {rank} {point}", self.base.path().join("d").display());
        self.processes.push(Process::start("rank_process", &orders));
    }

    /// The pages that a rank has mapped, after what it does about a loss; nothing is prepared, and there is memory for those alone.
    fn settled(&mut self, rank: usize, within: Duration) -> Vec<u32> {
        let deadline = Instant::now() + within;
        let process = &mut self.processes[rank];
        loop {
            process.order("look");
            let said = process.hear();
            let (mapped, rest) = said.split_once(']').unwrap();
            let pages: Vec<u32> = mapped[1..].split(", ").filter_map(|page| page.parse().ok()).collect();
            if rest == format!(" None {}", pages.len()) {
                return pages;
            }
            assert!(Instant::now() < deadline, "rank {rank} stays so: {said}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn sockets(&self) -> usize {
        std::fs::read_dir(self.base.path().join("d")).unwrap().count()
    }

    fn end(&mut self) {
        for process in &mut self.processes {
            process.orders = None;
        }
        for process in &mut self.processes {
            if process.child.try_wait().unwrap().is_none() {
                assert_eq!(process.hear(), "ended, 0 threads left");
            }
        }
        assert_eq!(self.sockets(), 0, "a socket is left");
    }
}

fn no_more_than(limit: Duration, began: Instant, what: &str) {
    assert!(began.elapsed() < limit, "{what}: {:?}", began.elapsed());
}

#[test]
fn a_rank_that_is_killed_anywhere_is_named_and_the_others_agree() {
    // Where it dies, and what the others have afterwards, of pages 1 and 2 of which 1 is unmapped.
    let points: [(&str, &[u32]); 6] = [
        ("before-map", &[]),
        ("after-map", &[]),
        ("before-prepare", &[1, 2]),
        ("after-prepare", &[1, 2]),
        ("before-commit", &[2]),
        ("after-commit", &[2]),
    ];
    for (point, expected) in points {
        let mut ranked = Ranked::new(3, point);
        let ranks = Ranks::connect(&ranked.addresses, config(1)).unwrap();
        let (told, hears) = mpsc::channel();
        ranks.watch(Box::new(move |why| told.send(why.to_owned()).unwrap()));
        let began = Instant::now();
        let outcome = ranks.map(&[1, 2]).and_then(|_| ranks.unmap(&[1]));
        no_more_than(HEARD, began, point);
        let Err(IpcError::Broken { why }) = outcome else { panic!("{point}: {outcome:?}") };
        assert!(why.contains("rank 1") && why.contains("its process has ended"), "{point}: {why}");
        assert_eq!(hears.recv_timeout(HEARD).unwrap(), why);
        ranked.processes[1].has_died();
        for survivor in [0, 2] {
            assert_eq!(ranked.settled(survivor, HEARD), expected, "{point}: rank {survivor}");
        }
        while ranked.sockets() > 2 {
            no_more_than(HEARD, began, "the socket of the dead");
        }
        drop(ranks);
        // A worker is started in its place, and a term begins over all.
        ranked.add(1, "never");
        let newcomer = ranked.processes.pop().unwrap();
        ranked.addresses[1].1 = newcomer.hear().into();
        ranked.processes[1] = newcomer;
        let ranks = Ranks::connect(&ranked.addresses, config(2)).unwrap();
        assert_eq!(ranks.map(&[2, 3]).unwrap(), [2, 3], "{point}: nothing was mapped everywhere");
        for rank in 0..3 {
            assert_eq!(ranked.settled(rank, HEARD), [2, 3], "{point}: rank {rank}");
        }
        drop(ranks);
        ranked.end();
    }
}

#[test]
fn a_rank_alone_that_is_killed_is_noticed() {
    for point in ["before-map", "after-map", "before-unmap", "after-unmap"] {
        let base = tempfile::tempdir().unwrap();
        let mut process =
            Process::start("rank_process", &format!("{} 0 {point}", base.path().join("d").display()));
        let address = PathBuf::from(process.hear());
        let ranks = Ranks::connect(&[(member(0), address.clone())], config(1)).unwrap();
        let began = Instant::now();
        let outcome = ranks.map(&[1, 2]).and_then(|_| ranks.unmap(&[1]));
        no_more_than(HEARD, began, point);
        assert!(matches!(outcome, Err(IpcError::Broken { .. })), "{point}: {outcome:?}");
        process.has_died();
        while address.exists() {
            no_more_than(HEARD, began, "the socket of the dead");
        }
    }
}

#[test]
fn a_coordinator_that_is_killed_anywhere_leaves_ranks_that_the_next_finds_equal() {
    // Where it dies, and what each rank has then, of pages 1 and 2 of which 1 is unmapped; `None`: as the race goes.
    type Then = [Option<&'static [u32]>; 3];
    let none: Option<&[u32]> = Some(&[]);
    let both: Option<&[u32]> = Some(&[1, 2]);
    let one: Option<&[u32]> = Some(&[2]);
    let points: [(&str, u32, Then); 9] = [
        ("before-map", 1, [none, none, none]),
        ("after-map", 1, [None, none, none]),
        ("after-map", 3, [None, None, None]),
        ("after-prepare", 1, [both, both, both]),
        ("after-prepare", 3, [both, both, both]),
        ("before-commit", 1, [both, both, both]),
        ("after-commit", 1, [None, both, both]),
        ("after-commit", 2, [None, None, both]),
        ("after-commit", 3, [None, None, None]),
    ];
    for (point, nth, then) in points {
        let mut ranked = Ranked::new(3, "never");
        let mut orders = format!("{point} {nth}");
        for (_, address) in &ranked.addresses {
            orders = format!("{orders} {}", address.display());
        }
        let mut coordinator = Process::start("coordinator_process", &orders);
        assert_eq!(coordinator.hear(), "begun");
        coordinator.has_died();
        let found: Vec<Vec<u32>> = (0..3).map(|rank| ranked.settled(rank, HEARD)).collect();
        for (rank, expected) in then.iter().enumerate() {
            match expected {
                Some(expected) => assert_eq!(found[rank], *expected, "{point} {nth}: rank {rank}"),
                None => {
                    assert!([&[][..], &[1, 2], &[2]].contains(&&*found[rank]), "{point} {nth}: rank {rank}")
                }
            }
        }
        if point.ends_with("commit") {
            assert!(found.iter().all(|pages| pages.contains(&2)), "{point} {nth}: {found:?}");
        }
        assert_eq!(ranked.sockets(), 3, "{point} {nth}: a coordinator has no socket");
        // The next term keeps what all have, and takes the rest. Where a rank was still at work meanwhile, it is the rank that tells.
        let ranks = Ranks::connect(&ranked.addresses, config(2)).unwrap();
        let common = ranks.created()[0].mapped.to_vec();
        for (rank, expected) in then.iter().enumerate() {
            assert_eq!(ranked.settled(rank, HEARD), common, "{point} {nth}: rank {rank}");
            let had = |page| expected.is_none_or(|pages| pages.contains(page));
            assert!(common.iter().all(had), "{point} {nth}: {common:?}");
        }
        if let [Some(all), Some(_), Some(_)] = then {
            assert_eq!(common, all, "{point} {nth}");
        }
        ranks.map(&[1, 2]).unwrap();
        ranks.unmap(&[1, 2]).unwrap();
        for rank in 0..3 {
            assert_eq!(ranked.settled(rank, HEARD), [0; 0], "{point} {nth}: rank {rank}");
        }
        drop((ranks, one));
        ranked.end();
    }
}

#[test]
fn a_server_removes_what_dead_processes_left() {
    let base = tempfile::tempdir().unwrap();
    let directory = base.path().join("d");
    let mut process = Process::start("rank_process", &format!("{} 0 never", directory.display()));
    let address = PathBuf::from(process.hear());
    process.child.kill().unwrap();
    process.has_died();
    assert!(address.exists(), "nobody was there to see it die");
    let server = RankServer::bind(member(0), &Directory::create(&directory).unwrap()).unwrap();
    assert!(!address.exists() && server.address().exists());
}
