//! What instances may have of one device together, through the public API and real processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvcached_control::{
    BudgetListed, BudgetShare, BudgetView, ControlError, InstanceRecord, RecordError, RefusedBy, Terms,
    budgets,
};

const DEVICE: &str = "GPU-0";
const MIB: u64 = 1 << 20;
const MEMBER_DIR: &str = "TEST_MEMBER_DIR";
const MEMBER_NAME: &str = "TEST_MEMBER_NAME";

struct Home {
    _home: tempfile::TempDir,
    dir: PathBuf,
}

fn home() -> Home {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    Home { _home: home, dir }
}

fn instance(dir: &Path, name: &str, terms: Terms) -> InstanceRecord {
    InstanceRecord::create(dir, name, "vllm 0.29.0", "cuda:0", terms).unwrap()
}

fn terms(limit_bytes: Option<u64>, min_bytes: u64) -> Terms {
    Terms { limit_bytes, min_bytes }
}

/// A share of a budget of 100 bytes.
fn join(dir: &Path, record: &InstanceRecord) -> BudgetShare {
    BudgetShare::join(dir, record, DEVICE, 100, None).unwrap()
}

fn the_budget(dir: &Path) -> Option<BudgetView> {
    let mut listed = budgets(dir).unwrap();
    assert!(listed.len() <= 1);
    listed.pop().map(|listed| match listed {
        BudgetListed::Budget(view) => view,
        BudgetListed::Unreadable { path, why } => panic!("{}: {why}", path.display()),
    })
}

/// An instance in a process of its own, which does as it is told.
struct Member {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Member {
    fn start(dir: &Path, name: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "member_process", "--ignored", "--nocapture"])
            .env(MEMBER_DIR, dir)
            .env(MEMBER_NAME, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut member = Self { child, to, from };
        assert_eq!(member.hear(), "ready");
        member
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// Lines of the test harness are left out.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.from.read_line(&mut line).unwrap(), 0, "the process ended");
            if let Some((_, said)) = line.trim().split_once("SAID ") {
                return said.to_owned();
            }
        }
    }

    fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.hear()
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "an instance of other tests, started by them"]
fn member_process() {
    let Some(dir) = std::env::var_os(MEMBER_DIR) else { return };
    let (dir, name) = (PathBuf::from(dir), std::env::var(MEMBER_NAME).unwrap());
    let record = instance(&dir, &name, Terms::default());
    let share = join(&dir, &record);
    let mut heard = record.heard();
    println!("SAID ready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let mut words = line.split(' ');
        let (word, bytes) = (words.next().unwrap(), words.next().map_or(0, |bytes| bytes.parse().unwrap()));
        match word {
            "take" => println!("SAID {}", share.take(bytes).is_ok()),
            "give" => {
                share.give(bytes);
                println!("SAID given");
            }
            "offer" => {
                share.offer(bytes);
                println!("SAID offered");
            }
            "part" => println!("SAID {}", share.part()),
            "hear" => {
                let now = record.wait(heard, Some(Duration::from_secs(10)));
                println!("SAID {}", now != heard);
                heard = now;
            }
            // Whoever is stopped here has the gate.
            "hold" => {
                let file = std::fs::File::open(dir.join(format!("{DEVICE}.kvb"))).unwrap();
                file.lock().unwrap();
                println!("SAID held");
                std::thread::sleep(Duration::from_secs(60));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn two_processes_never_both_take_the_last_page() {
    let home = home();
    let (mut one, mut two) = (Member::start(&home.dir, "one"), Member::start(&home.dir, "two"));
    let mut wins = [0, 0];
    for _ in 0..200 {
        one.tell("take 60");
        two.tell("take 60");
        let won = [one.hear() == "true", two.hear() == "true"];
        assert!(won[0] != won[1], "{won:?}");
        let winner = if won[0] { &mut one } else { &mut two };
        wins[usize::from(won[1])] += 1;
        assert_eq!(the_budget(&home.dir).unwrap().granted_bytes(), 60);
        winner.ask("give 60");
    }
    assert_eq!(the_budget(&home.dir).unwrap().granted_bytes(), 0);
    println!("{wins:?}");
}

#[test]
fn what_a_killed_process_had_is_there_for_others_within_a_second() {
    let home = home();
    let mut holder = Member::start(&home.dir, "holder");
    let record = instance(&home.dir, "other", Terms::default());
    let share = join(&home.dir, &record);
    assert_eq!(holder.ask("take 80"), "true");
    assert_eq!(share.take(40).unwrap_err().by, RefusedBy::Budget);
    holder.kill();
    let killed = Instant::now();
    share.take(100).unwrap();
    assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
    let view = the_budget(&home.dir).unwrap();
    assert_eq!(view.members.iter().map(|member| member.name.as_str()).collect::<Vec<_>>(), ["other"]);
}

#[test]
fn a_process_that_dies_with_the_gate_opens_it() {
    let home = home();
    let mut holder = Member::start(&home.dir, "holder");
    let record = instance(&home.dir, "other", Terms::default());
    let share = join(&home.dir, &record);
    assert_eq!(holder.ask("hold"), "held");
    let begin = Instant::now();
    assert_eq!(share.take(1).unwrap_err().by, RefusedBy::Busy);
    assert!(begin.elapsed() < Duration::from_secs(5));
    holder.kill();
    share.take(1).unwrap();
}

#[test]
fn what_is_guaranteed_to_others_is_not_to_be_had() {
    let home = home();
    let (one, two) =
        (instance(&home.dir, "one", terms(None, 30)), instance(&home.dir, "two", terms(Some(90), 0)));
    let (first, second) = (join(&home.dir, &one), join(&home.dir, &two));
    assert_eq!((first.room(), second.room()), (100, 70));
    let refused = second.take(71).unwrap_err();
    assert_eq!((refused.by, refused.room_bytes), (RefusedBy::Guarantees, 70));
    second.take(70).unwrap();
    first.take(30).unwrap();
    assert_eq!(first.take(1).unwrap_err().by, RefusedBy::Budget);
    drop(second);
    first.take(70).unwrap();
}

#[test]
fn a_limit_holds_from_the_first_byte_and_refuses_in_its_own_name() {
    let home = home();
    let record = instance(&home.dir, "one", terms(Some(40), 0));
    let share = join(&home.dir, &record);
    assert_eq!(share.room(), 40);
    assert_eq!(share.take(41).unwrap_err().by, RefusedBy::Limit);
    share.take(40).unwrap();
    share.charge(10);
    assert_eq!((share.room(), share.granted()), (0, 50), "what is there already is not refused");
    share.give(50);
    share.give(50);
    assert_eq!(share.granted(), 0);
}

#[test]
fn minimums_that_do_not_fit_are_refused_where_they_are_asked_for() {
    let home = home();
    let one = instance(&home.dir, "one", terms(None, 60));
    let first = join(&home.dir, &one);
    let two = instance(&home.dir, "two", terms(None, 50));
    let refused = BudgetShare::join(&home.dir, &two, DEVICE, 100, None).unwrap_err();
    let ControlError::MinimumsDoNotFit { min_bytes: 50, others_bytes: 60, budget_bytes: 100, .. } = refused
    else {
        panic!("{refused}")
    };
    drop(two);
    let two = instance(&home.dir, "two", terms(None, 40));
    let second = join(&home.dir, &two);
    assert!(matches!(second.set_min(41), Err(ControlError::MinimumsDoNotFit { others_bytes: 60, .. })));
    first.set_min(59).unwrap();
    second.set_min(41).unwrap();
}

#[test]
fn a_minimum_that_is_raised_over_what_others_hold_keeps_them_from_more() {
    let home = home();
    let (one, two) =
        (instance(&home.dir, "one", Terms::default()), instance(&home.dir, "two", Terms::default()));
    let (first, second) = (join(&home.dir, &one), join(&home.dir, &two));
    second.take(80).unwrap();
    first.set_min(50).unwrap();
    assert_eq!(second.room(), 0);
    first.take(20).unwrap();
    assert_eq!(first.take(1).unwrap_err().by, RefusedBy::Budget);
    second.give(40);
    assert_eq!(second.take(11).unwrap_err().by, RefusedBy::Guarantees);
    first.take(30).unwrap();
    second.take(10).unwrap();
}

#[test]
fn who_lives_by_a_budget_is_not_given_another() {
    let home = home();
    let one = instance(&home.dir, "one", Terms::default());
    let two = instance(&home.dir, "two", Terms::default());
    let first = BudgetShare::join(&home.dir, &one, DEVICE, 100, Some(70)).unwrap();
    assert_eq!((first.budget_bytes(), first.room()), (70, 70));
    let refused = BudgetShare::join(&home.dir, &two, DEVICE, 100, Some(80)).unwrap_err();
    assert!(
        matches!(refused, ControlError::BudgetDisagrees { stands_bytes: 70, asked_bytes: 80, .. }),
        "{refused}"
    );
    assert!(refused.to_string().contains("KVCACHED_DEVICE_BUDGET"));
    let second = BudgetShare::join(&home.dir, &two, DEVICE, 100, None).unwrap();
    assert_eq!(second.budget_bytes(), 70);
    drop((first, second));
    let second = BudgetShare::join(&home.dir, &two, DEVICE, 100, None).unwrap();
    assert_eq!(second.budget_bytes(), 100, "nobody lives by the old one");
}

#[test]
fn devices_are_apart_and_one_instance_may_have_two_shares_of_one() {
    let home = home();
    let record = instance(&home.dir, "one", terms(Some(60), 0));
    let on = |device| BudgetShare::join(&home.dir, &record, device, 100, None).unwrap();
    let (here, there, again) = (on("GPU-0"), on("GPU-1"), on("GPU-0"));
    here.take(60).unwrap();
    there.take(60).unwrap();
    assert_eq!(again.take(60).unwrap_err().by, RefusedBy::Budget);
    again.take(40).unwrap();
    assert_eq!(budgets(&home.dir).unwrap().len(), 2);
}

#[test]
fn the_last_one_takes_the_file_with_it_whoever_comes_meanwhile() {
    let home = home();
    let file = home.dir.join(format!("{DEVICE}.kvb"));
    let names = ["a", "b", "c", "d"];
    std::thread::scope(|scope| {
        for name in names {
            let dir = &home.dir;
            scope.spawn(move || {
                let record = instance(dir, name, Terms::default());
                for _ in 0..200 {
                    let share = join(dir, &record);
                    share.take(25).unwrap();
                    assert!(share.granted() == 25 && dir.join(format!("{DEVICE}.kvb")).exists());
                }
            });
        }
    });
    assert!(!file.exists());
    assert!(std::fs::read_dir(&home.dir).unwrap().next().is_none(), "nothing is left");
}

#[test]
fn who_waits_rings_those_who_can_give_and_hears_of_what_is_given() {
    let home = home();
    let mut giver = Member::start(&home.dir, "giver");
    let record = instance(&home.dir, "waiter", Terms::default());
    let share = join(&home.dir, &record);
    assert_eq!(giver.ask("take 90"), "true");
    giver.ask("offer 70");
    share.take(30).unwrap_err();
    let heard = record.heard();
    share.wait_for(30, 0);
    assert_eq!(giver.ask("hear"), "true");
    assert_eq!(giver.ask("part"), "20", "ten are free");
    giver.ask("give 20");
    assert_ne!(record.wait(heard, Some(Duration::from_secs(10))), heard);
    assert_eq!(giver.ask("take 10"), "false", "what was given back is the waiter's");
    share.take(30).unwrap();
    share.wait_for(0, 0);
    assert_eq!(giver.ask("part"), "0");
}

#[test]
fn what_the_device_itself_refused_is_asked_for_though_the_budget_has_room() {
    let home = home();
    let (one, two) =
        (instance(&home.dir, "one", Terms::default()), instance(&home.dir, "two", Terms::default()));
    let (giver, waiter) = (join(&home.dir, &one), join(&home.dir, &two));
    giver.take(50).unwrap();
    giver.offer(50);
    waiter.wait_for(20, 20);
    assert_eq!(giver.part(), 20);
    assert!(giver.others_short() && !waiter.others_short());
}

#[test]
fn a_shortage_that_is_not_renewed_is_forgotten() {
    let home = home();
    let (one, two) =
        (instance(&home.dir, "one", Terms::default()), instance(&home.dir, "two", Terms::default()));
    let (giver, waiter) = (join(&home.dir, &one), join(&home.dir, &two));
    giver.take(90).unwrap();
    giver.offer(90);
    waiter.wait_for(30, 0);
    assert_eq!(giver.part(), 20);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!((giver.part(), giver.others_short()), (0, false));
    giver.take(10).unwrap();
}

#[test]
fn four_instances_that_want_everything_each_have_a_fair_share() {
    let home = home();
    let names = ["a", "b", "c", "d"];
    let records: Vec<_> = names.iter().map(|name| instance(&home.dir, name, terms(None, 10))).collect();
    let shares: Vec<_> = records.iter().map(|record| join(&home.dir, record)).collect();
    shares[0].take(70).unwrap();
    let mut had = [70, 0, 0, 0];
    for round in 0..400 {
        for (share, had) in shares.iter().zip(&mut had) {
            share.offer(*had); // all of it could go
            let part = share.part();
            share.give(part);
            *had -= part;
            match share.take(5) {
                Ok(()) => {
                    *had += 5;
                    share.wait_for(0, 0);
                }
                Err(_) => share.wait_for(5, 0),
            }
        }
        assert!(had.iter().sum::<u64>() <= 100);
        if round > 50 {
            assert!(had.iter().all(|had| *had >= 10), "{round}: {had:?}");
        }
    }
}

/// A live instance whose record another version of kvcached wrote.
fn of_another_version(dir: &Path) -> std::fs::File {
    let path = dir.join("newer.kvc");
    let newer = instance(dir, "other", Terms::default());
    let mut bytes = std::fs::read(newer.path()).unwrap();
    bytes[8] = 99;
    std::fs::write(&path, bytes).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    file.lock().unwrap();
    file
}

#[test]
fn a_budget_of_another_version_stays_while_somebody_may_live_by_it() {
    let home = home();
    let record = instance(&home.dir, "one", Terms::default());
    let path = home.dir.join(format!("{DEVICE}.kvb"));
    let share = join(&home.dir, &record);
    let mut bytes = std::fs::read(&path).unwrap();
    drop(share);
    bytes[8] = 99;
    std::fs::write(&path, &bytes).unwrap();
    let newer = of_another_version(&home.dir);
    let refused = BudgetShare::join(&home.dir, &record, DEVICE, 100, None).unwrap_err();
    assert!(
        matches!(refused, ControlError::Unreadable { why: RecordError::Version { found: 99, .. }, .. }),
        "{refused}"
    );
    assert!(refused.to_string().contains("end the others"));
    assert!(matches!(
        &budgets(&home.dir).unwrap()[..],
        [BudgetListed::Unreadable { why: RecordError::Version { found: 99, .. }, .. }]
    ));
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    let begin = Instant::now();
    BudgetShare::join(&home.dir, &record, DEVICE, 100, None).unwrap_err();
    assert!(begin.elapsed() < Duration::from_millis(500), "the gate was left open");
    drop(newer);
    let _neighbour = instance(&home.dir, "two", Terms::default());
    join(&home.dir, &record).take(100).unwrap();
}

#[test]
fn a_mangled_budget_makes_way_when_nobody_else_lives() {
    let home = home();
    let record = instance(&home.dir, "one", Terms::default());
    let path = home.dir.join(format!("{DEVICE}.kvb"));
    let share = join(&home.dir, &record);
    let bytes = std::fs::read(&path).unwrap();
    drop(share);
    for mangled in [vec![], vec![0; bytes.len()], bytes[..bytes.len() - 1].to_vec(), vec![b'x'; 20_000]] {
        let neighbour = instance(&home.dir, "two", Terms::default());
        std::fs::write(&path, &mangled).unwrap();
        assert!(matches!(&budgets(&home.dir).unwrap()[..], [BudgetListed::Unreadable { .. }]));
        BudgetShare::join(&home.dir, &record, DEVICE, 100, None).unwrap_err();
        assert_eq!(std::fs::read(&path).unwrap(), mangled);
        drop(neighbour);
        join(&home.dir, &record).take(100).unwrap();
    }
}

#[test]
fn two_that_want_more_than_their_share_do_not_wait_for_each_other() {
    let home = home();
    let (one, two) =
        (instance(&home.dir, "one", Terms::default()), instance(&home.dir, "two", Terms::default()));
    let (first, second) = (join(&home.dir, &one), join(&home.dir, &two));
    let holder = instance(&home.dir, "three", Terms::default());
    let third = join(&home.dir, &holder);
    third.take(90).unwrap();
    for share in [&first, &second] {
        share.take(70).unwrap_err();
        share.wait_for(70, 0);
        std::thread::sleep(Duration::from_millis(2));
    }
    third.give(90);
    assert_eq!(second.take(70).unwrap_err().room_bytes, 100 - 33, "the first has waited longer");
    first.take(70).unwrap();
    first.wait_for(0, 0);
    assert_eq!(third.take(10).unwrap_err().by, RefusedBy::Guarantees, "now it is the second's turn");
    first.give(70);
    second.take(70).unwrap();
}

#[test]
fn a_slot_whose_name_leads_elsewhere_is_nobodys() {
    let home = home();
    let record = instance(&home.dir, "one", Terms::default());
    let share = join(&home.dir, &record);
    let outside = home.dir.parent().unwrap().join("outside.kvc");
    std::fs::copy(record.path(), &outside).unwrap();
    let held = std::fs::File::open(&outside).unwrap();
    held.lock().unwrap();
    let before = std::fs::read(&outside).unwrap();
    let path = home.dir.join(format!("{DEVICE}.kvb"));
    let mut bytes = std::fs::read(&path).unwrap();
    let inode = std::os::unix::fs::MetadataExt::ino(&held.metadata().unwrap());
    let second = 128 + 192;
    bytes[second] = 1;
    bytes[second + 8..second + 16].copy_from_slice(&inode.to_ne_bytes());
    bytes[second + 16..second + 26].copy_from_slice(b"../outside");
    bytes[second + 88] = 50; // granted, and all of it givable
    bytes[second + 120] = 50;
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
    let members: Vec<String> = the_budget(&home.dir).unwrap().members.into_iter().map(|m| m.name).collect();
    assert_eq!(members, ["one"]);
    share.wait_for(10, 0); // rings whoever can give
    assert_eq!(std::fs::read(&outside).unwrap(), before);
    share.take(100).unwrap();
}

#[test]
fn an_instance_does_not_wait_for_itself() {
    let home = home();
    let (one, two) =
        (instance(&home.dir, "one", Terms::default()), instance(&home.dir, "two", Terms::default()));
    let (first, second) = (join(&home.dir, &one), join(&home.dir, &one));
    let other = join(&home.dir, &two);
    first.take(40).unwrap();
    first.offer(40);
    second.take(20).unwrap();
    other.take(30).unwrap();
    second.wait_for(30, 0);
    assert!(!first.others_short() && other.others_short());
    assert_eq!(first.part(), 0, "of its own shortage");
    assert_eq!(first.room(), 10, "nor is anything kept from it for itself");
    other.offer(30);
    assert_eq!(other.part(), 9, "20 are lacking, of which each could spare by 40 to 30");
}

#[test]
fn the_dead_are_asked_for_nothing() {
    let home = home();
    let mut dead = Member::start(&home.dir, "dead");
    assert_eq!(dead.ask("take 40"), "true");
    dead.ask("offer 40");
    let (one, two) =
        (instance(&home.dir, "one", Terms::default()), instance(&home.dir, "two", Terms::default()));
    let (giver, waiter) = (join(&home.dir, &one), join(&home.dir, &two));
    giver.take(40).unwrap();
    giver.offer(40);
    dead.kill();
    waiter.wait_for(20, 20); // refused by the device: the budget has them
    assert_eq!(giver.part(), 20);
}

#[test]
fn devices_have_names_that_files_can_have() {
    let home = home();
    let record = instance(&home.dir, "one", Terms::default());
    for bad in ["", "../x", "a/b", ".hidden", "a b"] {
        let refused = BudgetShare::join(&home.dir, &record, bad, 1, None).unwrap_err();
        assert!(matches!(refused, ControlError::InvalidName { .. }), "{bad}");
    }
    let big = BudgetShare::join(&home.dir, &record, "GPU-0", 64 * MIB, None).unwrap();
    assert_eq!((big.device(), big.budget_bytes()), ("GPU-0", 64 * MIB));
}
