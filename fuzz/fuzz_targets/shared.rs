//! Arbitrary bytes as what instances share beside their records: a device's budget, and an instance's sidecar. They are read exactly if they
//! are one, by a decoder of this file's own; whoever takes part in a mangled budget computes with whatever it says and harms no other file.
#![no_main]

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use kvcached_control::{
    BudgetListed, BudgetShare, Counter, InstanceRecord, Listed, RecordError, Terms, Timer, budgets, families,
    list, metrics,
};
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;

const DEVICE: &str = "GPU-0";
const BUDGET_BYTES: usize = 128 + 64 * 192;
const SIDECAR_BYTES: usize = 1856;

#[derive(Debug)]
enum Input {
    /// And what an instance does that takes part.
    Budget(Vec<u8>, Vec<Act>),
    Sidecar(Vec<u8>),
}

#[derive(Debug)]
enum Act {
    Take(u64),
    Charge(u32),
    Give(u64),
    Offer(u64),
    WaitFor(u64, u64),
    Minimum(u64),
}

impl<'a> Arbitrary<'a> for Act {
    fn arbitrary(input: &mut Unstructured<'a>) -> Result<Self> {
        let bytes = if input.ratio(1, 8)? { u64::arbitrary(input)? } else { input.int_in_range(0..=1200)? };
        Ok(match input.int_in_range(0u8..=5)? {
            0 => Act::Take(bytes),
            1 => Act::Charge(bytes as u32),
            2 => Act::Give(bytes),
            3 => Act::Offer(bytes),
            4 => Act::WaitFor(bytes, input.int_in_range(0..=1200)?),
            _ => Act::Minimum(bytes),
        })
    }
}

impl<'a> Arbitrary<'a> for Input {
    fn arbitrary(input: &mut Unstructured<'a>) -> Result<Self> {
        if input.ratio(1, 3)? {
            return Ok(Input::Sidecar(lies(input, world().sidecar.clone())?));
        }
        let acts = (0..input.int_in_range(0..=6)?).map(|_| Act::arbitrary(input)).collect::<Result<_>>()?;
        Ok(Input::Budget(lies(input, world().budget.clone())?, acts))
    }
}

/// Bytes that are good but for some lies, or just bytes.
fn lies(input: &mut Unstructured, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
    if input.ratio(1, 8)? {
        return Ok(input.bytes(input.len())?.to_vec());
    }
    while !input.is_empty() {
        // Mostly in the header and the slots that are taken.
        let most = if input.ratio(7, 8)? { 128 + 3 * 192 } else { bytes.len() };
        let at = 8 * (input.int_in_range(0..=most.min(bytes.len()) / 8)?);
        match input.int_in_range(0u8..=15)? {
            0 => bytes.truncate(at),
            1 => bytes.resize(at.max(bytes.len()), 0xff),
            2..=4 => put(&mut bytes, at, &u64::arbitrary(input)?.to_ne_bytes()),
            5..=9 => put(&mut bytes, at, &u64::from(u8::arbitrary(input)?).to_ne_bytes()),
            10 => put(&mut bytes, at, b"../victim\0"),
            11 => put(&mut bytes, at, b"other\0\0\0"),
            12 => put(&mut bytes, at, &world().inode.to_ne_bytes()),
            _ => put(&mut bytes, at, &[u8::arbitrary(input)?]),
        }
    }
    Ok(bytes)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    let room = bytes.len().saturating_sub(at).min(value.len());
    if let Some(to) = bytes.get_mut(at..at + room) {
        to.copy_from_slice(&value[..room]);
    }
}

struct World {
    dir: PathBuf,
    /// Who takes part in whatever is found.
    own: InstanceRecord,
    /// A live one that good budgets name.
    other: InstanceRecord,
    /// A record beside the directory, which no name may lead to, and its inode.
    victim: PathBuf,
    inode: u64,
    victims_bytes: Vec<u8>,
    budget: Vec<u8>,
    sidecar: Vec<u8>,
}

fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let home = std::env::temp_dir().join(format!("kvcached-fuzz-shared-{}", std::process::id()));
        let dir = home.join("records");
        std::fs::create_dir_all(&home).unwrap();
        let make =
            |name| InstanceRecord::create(&dir, name, "vllm 0.29.0", "cuda:0", Terms::default()).unwrap();
        let (own, other) = (make("own"), make("other"));
        let victim = home.join("victim.kvc");
        std::fs::copy(other.path(), &victim).unwrap();
        let share = BudgetShare::join(&dir, &other, DEVICE, 1000, None).unwrap();
        let beside = BudgetShare::join(&dir, &own, DEVICE, 1000, None).unwrap();
        share.take(300).unwrap();
        share.offer(200);
        beside.take(100).unwrap();
        beside.wait_for(50, 20);
        let budget = std::fs::read(dir.join(format!("{DEVICE}.kvb"))).unwrap();
        drop((share, beside));
        own.metrics().add(Counter::PagesMapped, 7);
        assert_eq!(budget.len(), BUDGET_BYTES);
        World {
            sidecar: std::fs::read(dir.join("own.kvm")).unwrap(),
            inode: std::fs::metadata(&victim).unwrap().ino(),
            victims_bytes: std::fs::read(&victim).unwrap(),
            dir,
            own,
            other,
            victim,
            budget,
        }
    })
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn text(bytes: &[u8], at: usize) -> Option<String> {
    let field = &bytes[at..at + 64];
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(64);
    let text = String::from_utf8(field[..end].to_vec()).ok()?;
    (end > 0 && !text.contains(char::is_control)).then_some(text)
}

fn is_budget(bytes: &[u8]) -> bool {
    bytes.len() == BUDGET_BYTES
        && bytes.starts_with(b"kvbudget")
        && (word(bytes, 8), word(bytes, 16)) == (2, BUDGET_BYTES as u64)
        && text(bytes, 32).as_deref() == Some(DEVICE)
}

fn is_sidecar(bytes: &[u8]) -> bool {
    bytes.len() == SIDECAR_BYTES
        && bytes.starts_with(b"kvmetric")
        && (word(bytes, 8), word(bytes, 16)) == (1, SIDECAR_BYTES as u64)
}

fn fits_a_terminal(why: &RecordError) {
    assert!(!why.to_string().contains(char::is_control), "{why:?} reaches a terminal");
}

fn budget(bytes: &[u8], acts: Vec<Act>) {
    let world = world();
    let path = world.dir.join(format!("{DEVICE}.kvb"));
    std::fs::write(&path, bytes).unwrap();
    let live = [world.own.name(), world.other.name()];
    match budgets(&world.dir).unwrap().pop() {
        Some(BudgetListed::Budget(view)) => {
            assert!(is_budget(bytes) && view.device == DEVICE && view.budget_bytes == word(bytes, 24));
            assert!(view.members.iter().all(|member| live.contains(&member.name.as_str())), "{view:?}");
            let _ = (view.granted_bytes(), view.free_bytes(), view.shortage_bytes());
        }
        Some(BudgetListed::Unreadable { why, .. }) => {
            assert!(!is_budget(bytes));
            fits_a_terminal(&why);
        }
        None => assert!(is_budget(bytes), "nobody lives by it"),
    }
    families(&world.dir, |_| true).unwrap();
    let joined = BudgetShare::join(&world.dir, &world.own, DEVICE, 1000, None);
    match joined {
        Ok(share) => {
            for act in acts {
                match act {
                    Act::Take(bytes) => {
                        let (room, before) = (share.room(), share.granted());
                        let taken = share.take(bytes).is_ok();
                        assert_eq!(share.granted(), if taken { before.wrapping_add(bytes) } else { before });
                        assert!(!taken || bytes <= room || room == 0, "{bytes} of {room}");
                    }
                    Act::Charge(bytes) => share.charge(bytes.into()),
                    Act::Give(bytes) => share.give(bytes),
                    Act::Offer(bytes) => share.offer(bytes),
                    Act::WaitFor(bytes, by_device) => share.wait_for(bytes, by_device.min(bytes)),
                    Act::Minimum(bytes) => drop(share.set_min(bytes)),
                }
                let _ = (share.room(), share.part(), share.others_short());
            }
        }
        Err(error) => assert!(!error.to_string().contains(char::is_control), "{error:?} reaches a terminal"),
    }
    let _ = std::fs::remove_file(&path);
    assert_eq!(std::fs::read(&world.victim).unwrap(), world.victims_bytes, "a name led out of the directory");
}

fn sidecar(bytes: &[u8]) {
    let world = world();
    let path = world.dir.join("own.kvm");
    std::fs::write(&path, bytes).unwrap();
    let listed = list(&world.dir).unwrap();
    let own = listed.iter().find_map(|listed| match listed {
        Listed::Instance(view) if view.name == "own" => Some(view),
        _ => None,
    });
    let inode = std::fs::metadata(world.own.path()).unwrap().ino();
    match metrics(own.unwrap()) {
        Ok(Some(view)) => {
            assert!(is_sidecar(bytes) && word(bytes, 24) == inode);
            for counter in Counter::ALL {
                assert_eq!(view.counter(counter), word(bytes, 64 + 8 * counter as usize));
            }
            for timer in Timer::ALL {
                let at = 320 + 192 * timer as usize;
                let times = view.timer(timer);
                assert!(
                    times.buckets.iter().enumerate().all(|(n, bucket)| bucket.1 == word(bytes, at + 8 * n))
                );
                assert_eq!(times.sum.as_nanos(), word(bytes, at + 168).into());
                let _ = (times.count(), times.cumulative().count());
            }
        }
        Ok(None) => assert!(is_sidecar(bytes) && word(bytes, 24) != inode),
        Err(why) => {
            assert!(!is_sidecar(bytes));
            fits_a_terminal(&why);
        }
    }
    families(&world.dir, |_| true).unwrap();
}

fuzz_target!(|input: Input| {
    match input {
        Input::Budget(bytes, acts) => budget(&bytes, acts),
        Input::Sidecar(bytes) => sidecar(&bytes),
    }
});
