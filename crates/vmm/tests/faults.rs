//! Every scenario under every failing driver call, over the simulated driver.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::time::Duration;

use kvcached_vmm::sim::Sim;
use kvcached_vmm::{
    Access, Device, Driver, DriverError, FTensor, Geometry, Handle, MemInfo, Options, Shape, Target,
    UnmapFailure, VmmError,
};
use proptest::prelude::*;

const PAGE: u64 = 2 << 20;
const PAGES: u32 = 6;

fn geometry() -> Geometry {
    let shape = Shape::new(4, 64 << 10, 16);
    let geometry = Geometry::solve(shape, Target { page_bytes: Some(PAGE), ..Target::new(PAGE) }).unwrap();
    assert_eq!((geometry.page_bytes(), geometry.blocks_per_page()), (PAGE, 8));
    geometry
}

fn tensor(driver: &Arc<Sim>) -> Result<FTensor, VmmError> {
    let driver: Arc<dyn Driver> = driver.clone();
    FTensor::reserve(driver, geometry(), 8 * u64::from(PAGES), Options::default())
}

#[derive(Debug, Clone)]
enum Op {
    Map(Vec<u32>),
    Unmap(Vec<u32>),
}
use Op::{Map, Unmap};

fn scenarios() -> Vec<Vec<Op>> {
    vec![
        vec![],
        vec![Map(vec![0])],
        vec![Map(vec![2, 0, 5])],
        vec![Map(vec![0, 2]), Map(vec![1, 2, 3, 3, 0])],
        vec![Map(vec![0, 1, 2, 3]), Unmap(vec![3, 1])],
        vec![Map(vec![0, 1, 2]), Unmap(vec![2, 1]), Map(vec![1, 4, 2])],
        vec![Map(vec![4, 3]), Unmap(vec![4, 3]), Map(vec![3]), Unmap(vec![3])],
    ]
}

/// What ought to be. `in_doubt`: quarantined pages that the simulated device still maps, since a failed call does nothing.
#[derive(Debug, Default, Clone, PartialEq)]
struct Model {
    mapped: BTreeSet<u32>,
    quarantined: BTreeSet<u32>,
    in_doubt: BTreeSet<u32>,
    leaked: usize,
}

/// Which driver calls fail, by number from 1.
#[derive(Debug, Clone, Copy)]
enum Plan {
    At(u32, u32),
    From(u32),
}

impl Plan {
    fn fails(&self, call: u32) -> bool {
        match *self {
            Plan::At(first, second) => call == first || call == second,
            Plan::From(first) => call >= first,
        }
    }
}

impl Model {
    /// The contract of `map`, told call by call. Returns the pages expected new, or those lost.
    fn map(&mut self, pages: &[u32], plan: Plan, call: &mut u32) -> Result<Vec<u32>, Option<Vec<u32>>> {
        let mut next = || {
            *call += 1;
            !plan.fails(*call)
        };
        let mut new: Vec<u32> = vec![];
        for page in pages {
            if !self.mapped.contains(page) && !new.contains(page) {
                new.push(*page);
            }
        }
        let mut done = vec![];
        let mut failed = false;
        for page in &new {
            if !next() {
                failed = true;
                break;
            }
            let mapped = next();
            done.push((*page, mapped));
            if !mapped || !next() {
                failed = true;
                break;
            }
        }
        if !failed {
            self.mapped.extend(&new);
            return Ok(new);
        }
        let mut lost = BTreeSet::new();
        for (page, mapped) in done.into_iter().rev() {
            if mapped && !next() {
                lost.insert(page);
                self.in_doubt.insert(page);
            } else if !next() {
                lost.insert(page);
            }
        }
        self.quarantined.extend(&lost);
        Err((!lost.is_empty()).then(|| lost.into_iter().collect()))
    }

    /// The contract of `unmap`.
    fn unmap(&mut self, pages: &[u32], plan: Plan, call: &mut u32) -> Result<(), Box<UnmapFailure>> {
        let mut next = || {
            *call += 1;
            !plan.fails(*call)
        };
        let (mut unmapped, mut quarantined, mut leaked) = (vec![], vec![], vec![]);
        for page in pages {
            if !next() {
                quarantined.push(*page);
                break;
            }
            unmapped.push(*page);
        }
        for page in &unmapped {
            if !next() {
                leaked.push(*page);
            }
        }
        // What earlier calls could not release is tried again.
        self.leaked = (0..self.leaked).filter(|_| !next()).count();
        self.mapped.retain(|p| !unmapped.contains(p) && !quarantined.contains(p));
        self.quarantined.extend(&quarantined);
        self.in_doubt.extend(&quarantined);
        self.leaked += leaked.len();
        if quarantined.is_empty() && leaked.is_empty() {
            return Ok(());
        }
        let still_mapped = pages[unmapped.len() + quarantined.len()..].to_vec();
        let source = DriverError::NoSymbol { call: "" }; // not compared
        Err(Box::new(UnmapFailure { unmapped, quarantined, still_mapped, leaked, source }))
    }

    fn check(&self, tensor: &FTensor, sim: &Sim) {
        assert_eq!(tensor.mapped_pages(), Vec::from_iter(self.mapped.clone()));
        assert_eq!(tensor.quarantined_pages(), Vec::from_iter(self.quarantined.clone()));
        assert_eq!(tensor.mapped_bytes(), self.mapped.len() as u64 * PAGE);
        assert_eq!(tensor.leaked_bytes(), self.leaked as u64 * PAGE);
        let on_device: Vec<_> = sim.mappings();
        let expected: Vec<_> = self.on_device().iter().map(|p| (at(tensor.base(), *p), PAGE)).collect();
        assert_eq!(on_device, expected);
        let held = self.mapped.len() + self.quarantined.len() + self.leaked;
        assert_eq!(sim.held_bytes(), held as u64 * PAGE);
        assert_eq!(sim.refused(), Vec::<String>::new());
    }

    fn on_device(&self) -> BTreeSet<u32> {
        &self.mapped | &self.in_doubt
    }
}

fn at(base: usize, page: u32) -> usize {
    base + page as usize * PAGE as usize
}

fn is_fault(error: &DriverError) -> bool {
    matches!(error, DriverError::Call { code: kvcached_vmm::sim::FAULT_CODE, .. })
}

/// Runs a scenario with its faults, comparing with the model after every step; returns the number of driver calls and
/// the model as it was before the drop.
fn run(ops: &[Op], plan: Plan) -> (u32, Model) {
    let sim = Sim::new();
    match plan {
        Plan::At(first, second) => sim.fail_each(&[first, second]),
        Plan::From(first) => sim.fail_from(first),
    }
    let tensor = match tensor(&sim) {
        Ok(tensor) => tensor,
        Err(VmmError::Driver { page: None, source }) if plan.fails(1) && is_fault(&source) => {
            sim.assert_clean();
            return (sim.calls().total(), Model::default());
        }
        Err(other) => panic!("{other}"),
    };
    let mut model = Model::default();
    let mut call = 1;
    for op in ops {
        step(op, &tensor, &mut model, plan, &mut call);
        assert_eq!(sim.calls().total(), call, "calls of {op:?} under {plan:?}");
        model.check(&tensor, &sim);
    }
    let base = tensor.base();
    drop(tensor);
    check_dropped(&sim, base, &model, plan, call);
    (sim.calls().total(), model)
}

fn step(op: &Op, tensor: &FTensor, model: &mut Model, plan: Plan, call: &mut u32) {
    let (Map(pages) | Unmap(pages)) = op;
    // An earlier failure may have left the scenario's later steps without their ground: those must be refused, untouched.
    if let Some(page) = pages.iter().copied().find(|p| model.quarantined.contains(p)) {
        let expected = Err(VmmError::InQuarantine { page });
        match op {
            Map(_) => assert_eq!(tensor.map(pages).map(|_| ()), expected),
            Unmap(_) => assert!(matches!(
                tensor.unmap(pages),
                Err(VmmError::InQuarantine { .. } | VmmError::NotMapped { .. })
            )),
        }
        return;
    }
    match op {
        Map(_) => match (tensor.map(pages), model.map(pages, plan, call)) {
            (Ok(new), Ok(expected)) => assert_eq!(new, expected),
            (Err(VmmError::Driver { page: Some(page), source }), Err(None)) => {
                assert!(is_fault(&source) && pages.contains(&page));
            }
            (Err(VmmError::Quarantined { pages, cause, source }), Err(Some(lost))) => {
                assert_eq!(pages, lost);
                assert!(is_fault(&cause) && is_fault(&source));
            }
            (got, expected) => panic!("{op:?} under {plan:?}: {got:?}, not {expected:?}"),
        },
        Unmap(_) => {
            let absent: Vec<u32> = pages.iter().copied().filter(|p| !model.mapped.contains(p)).collect();
            if !absent.is_empty() {
                assert_eq!(tensor.unmap(pages), Err(VmmError::NotMapped { pages: absent }));
                return;
            }
            match (tensor.unmap(pages), model.unmap(pages, plan, call)) {
                (Ok(()), Ok(())) => {}
                (Err(VmmError::Unmap(got)), Err(expected)) => {
                    assert!(is_fault(&got.source));
                    assert_eq!(*got, UnmapFailure { source: got.source.clone(), ..*expected });
                }
                (got, expected) => panic!("{op:?} under {plan:?}: {got:?}, not {expected:?}"),
            }
        }
    }
}

/// The contract of drop: synchronise, unmap, release, free; what fails is tried again, twice.
fn check_dropped(sim: &Sim, base: usize, model: &Model, plan: Plan, mut call: u32) {
    let mut next = || {
        call += 1;
        !plan.fails(call)
    };
    let mut on_device = model.on_device();
    // Memory of what is a hole for certain: also what failed to be released before.
    let mut loose = model.mapped.len() + model.quarantined.len() + model.leaked - on_device.len();
    let (mut ranges, mut synchronised) = (1, false);
    for _ in 0..3 {
        synchronised = synchronised || next();
        if !synchronised {
            continue;
        }
        let before = on_device.len();
        on_device.retain(|_| !next());
        loose += before - on_device.len();
        loose = (0..loose).filter(|_| !next()).count();
        if on_device.is_empty() && loose == 0 && next() {
            ranges = 0;
            break;
        }
    }
    let handles = on_device.len() + loose;
    let single = matches!(plan, Plan::At(k, l) if k == l || k == 0);
    assert!(!single || (ranges, handles) == (0, 0), "one failure leaves something behind: {plan:?}");
    assert_eq!(sim.calls().total(), call, "calls of drop under {plan:?}");
    let expected: Vec<_> = on_device.iter().map(|p| (at(base, *p), PAGE)).collect();
    assert_eq!(sim.mappings(), expected);
    assert_eq!(sim.counts(), (ranges, handles, on_device.len()));
    assert_eq!(sim.refused(), Vec::<String>::new());
}

#[test]
fn every_scenario_under_every_failing_call() {
    // Two failures tell the order of an undo: the second one falls on exactly one page.
    let (mut quarantined, mut leaked) = (0, 0);
    for ops in scenarios() {
        let (calls, whole) = run(&ops, Plan::At(0, 0));
        assert!(whole.quarantined.is_empty() && whole.leaked == 0);
        let pairs = (1..=calls).flat_map(|k| (k..=calls + 1).map(move |l| Plan::At(k, l)));
        for plan in pairs.chain((1..=calls).map(Plan::From)) {
            let (_, model) = run(&ops, plan);
            quarantined += usize::from(!model.quarantined.is_empty());
            leaked += usize::from(model.leaked > 0);
        }
    }
    assert!(quarantined > 100 && leaked > 50, "the faults reach too little: {quarantined}, {leaked}");
}

#[test]
fn without_faults_nothing_is_left() {
    for ops in scenarios() {
        let sim = Sim::new();
        let tensor = tensor(&sim).unwrap();
        for op in &ops {
            match op {
                Map(pages) => drop(tensor.map(pages).unwrap()),
                Unmap(pages) => tensor.unmap(pages).unwrap(),
            }
        }
        drop(tensor);
        sim.assert_clean();
    }
}

#[test]
fn three_calls_to_back_a_page_and_two_to_give_it_back() {
    let sim = Sim::new();
    let tensor = tensor(&sim).unwrap();
    sim.heal();
    tensor.map(&[1, 4, 2]).unwrap();
    let calls = sim.calls();
    assert_eq!((calls.create, calls.map, calls.set_access, calls.total()), (3, 3, 3, 9));
    sim.heal();
    assert_eq!(tensor.map(&[2, 1, 1]).unwrap(), vec![]);
    assert_eq!(sim.calls().total(), 0);
    tensor.unmap(&[4, 1, 4]).unwrap();
    let calls = sim.calls();
    assert_eq!((calls.unmap, calls.release, calls.total()), (2, 2, 4));
    assert_eq!(tensor.mapped_pages(), [2]);
    assert_eq!((tensor.map(&[]), tensor.unmap(&[])), (Ok(vec![]), Ok(())));
}

#[test]
fn a_refused_call_changes_nothing() {
    let sim = Sim::new();
    let tensor = tensor(&sim).unwrap();
    tensor.map(&[0, 1]).unwrap();
    sim.heal();
    let outside = VmmError::PageOutOfRange { page: PAGES, num_pages: PAGES };
    assert_eq!(tensor.map(&[2, PAGES]), Err(outside.clone()));
    assert_eq!(tensor.unmap(&[0, PAGES]), Err(outside));
    assert_eq!(tensor.unmap(&[0, 2]), Err(VmmError::NotMapped { pages: vec![2] }));
    assert_eq!(sim.calls().total(), 0);
    assert_eq!(tensor.mapped_pages(), [0, 1]);
    // Nothing stayed claimed.
    tensor.unmap(&[0]).unwrap();
    assert_eq!(tensor.map(&[2]), Ok(vec![2]));
}

#[test]
fn out_of_memory_is_told_apart_and_undone() {
    let sim = Sim::with(PAGE, 2 * PAGE + 1);
    let tensor = tensor(&sim).unwrap();
    tensor.map(&[5]).unwrap();
    let error = tensor.map(&[0, 1, 2]).unwrap_err();
    assert!(error.is_out_of_memory());
    let said = error.to_string();
    assert_eq!(said, "page 1: out of memory: create of 2097152 bytes (code 999)");
    assert_eq!((tensor.mapped_pages(), sim.held_bytes()), (vec![5], PAGE));
    sim.set_budget(4 * PAGE);
    assert_eq!(tensor.map(&[0, 1, 2]), Ok(vec![0, 1, 2]));
    drop(tensor);
    sim.assert_clean();
}

#[test]
fn a_range_that_does_not_suit_is_refused() {
    let sim: Arc<dyn Driver> = Sim::with(3 << 20, 1 << 40);
    let said = |r: Result<FTensor, VmmError>| r.unwrap_err().to_string();
    assert_eq!(
        said(FTensor::reserve(sim, geometry(), 8, Options::default())),
        "a page of 2 MiB is not a multiple of the device's granularity of 3 MiB: solve for this device"
    );
    let sim = Sim::new();
    assert_eq!(
        said(FTensor::reserve(sim.clone(), geometry(), 0, Options::default())),
        "num_blocks must be at least 1"
    );
    assert!(
        said(FTensor::reserve(sim.clone(), geometry(), 1 << 40, Options::default()))
            .contains("reserve at most")
    );
    assert_eq!(sim.calls().total(), 0);
}

#[test]
fn addresses_are_those_of_the_geometry() {
    let sim = Sim::new();
    let tensor = tensor(&sim).unwrap();
    assert_eq!(tensor.virtual_bytes(), u64::from(PAGES + 1) * PAGE);
    assert_eq!((tensor.num_pages(), tensor.id_space(), tensor.num_blocks()), (PAGES, PAGES * 32, 48));
    let bytes = u64::from(PAGES) * PAGE;
    assert_eq!(tensor.buffer(0), Some((tensor.base(), bytes)));
    assert_eq!(tensor.buffer(3), Some((tensor.base() + 3 * 8 * (64 << 10), bytes)));
    assert_eq!(tensor.buffer(4), None);
    // The spare page is no page.
    assert!(tensor.map(&[PAGES]).is_err());
}

/// Passes everything on, and lets a test look in before each create and unmap.
struct Peek {
    sim: Arc<Sim>,
    look: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

impl Peek {
    fn look(&self) {
        let look = self.look.lock().unwrap().take();
        if let Some(mut look) = look {
            look();
        }
    }
}

impl std::fmt::Debug for Peek {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Peek")
    }
}

impl Driver for Peek {
    fn device(&self) -> Device {
        self.sim.device()
    }
    fn granularity(&self) -> u64 {
        self.sim.granularity()
    }
    fn reserve(&self, bytes: u64) -> Result<usize, DriverError> {
        self.sim.reserve(bytes)
    }
    fn free(&self, address: usize, bytes: u64) -> Result<(), DriverError> {
        self.sim.free(address, bytes)
    }
    fn create(&self, bytes: u64) -> Result<Handle, DriverError> {
        self.look();
        self.sim.create(bytes)
    }
    fn release(&self, handle: Handle) -> Result<(), DriverError> {
        self.sim.release(handle)
    }
    fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<(), DriverError> {
        self.sim.map(address, bytes, handle)
    }
    fn share(&self, handle: Handle) -> Result<(), DriverError> {
        self.sim.share(handle)
    }
    fn set_access(&self, address: usize, bytes: u64, access: Access) -> Result<(), DriverError> {
        self.sim.set_access(address, bytes, access)
    }
    fn clear(&self, mappings: &[(usize, u64)]) -> Result<(), DriverError> {
        self.sim.clear(mappings)
    }
    fn unmap(&self, address: usize, bytes: u64) -> Result<(), DriverError> {
        self.look();
        self.sim.unmap(address, bytes)
    }
    fn mem_info(&self) -> Result<MemInfo, DriverError> {
        self.sim.mem_info()
    }
    fn synchronise(&self) -> Result<(), DriverError> {
        self.sim.synchronise()
    }
}

type Seen = (Result<Vec<u32>, VmmError>, Result<(), VmmError>, Result<Vec<u32>, VmmError>, Vec<u32>);

/// Another thread's view in the middle of a driver call; None if it had to wait.
fn meanwhile(tensor: &Weak<FTensor>, claimed: u32, other: u32) -> Option<Seen> {
    let (send, receive) = mpsc::channel();
    let tensor = tensor.clone();
    std::thread::spawn(move || {
        let tensor = tensor.upgrade().unwrap();
        let seen = (
            tensor.map(&[other, claimed]),
            tensor.unmap(&[claimed]),
            tensor.map(&[other]),
            tensor.mapped_pages(),
        );
        drop(tensor);
        send.send(seen).unwrap();
    });
    receive.recv_timeout(Duration::from_secs(10)).ok()
}

#[test]
fn no_lock_is_held_across_a_driver_call_and_a_page_in_transition_is_refused() {
    let sim = Sim::new();
    let peek = Arc::new(Peek { sim: sim.clone(), look: Mutex::new(None) });
    let tensor = Arc::new(FTensor::reserve(peek.clone(), geometry(), 48, Options::default()).unwrap());
    let (send, receive) = mpsc::channel();
    let look_in = |other| {
        let (weak, send) = (Arc::downgrade(&tensor), send.clone());
        *peek.look.lock().unwrap() = Some(Box::new(move || send.send(meanwhile(&weak, 3, other)).unwrap()));
    };
    let in_transition = VmmError::InTransition { page: 3 };

    look_in(0);
    assert_eq!(tensor.map(&[3]), Ok(vec![3]));
    let seen = receive.recv().unwrap().expect("the other thread waits for a lock");
    assert_eq!(seen, (Err(in_transition.clone()), Err(in_transition.clone()), Ok(vec![0]), vec![0]));
    assert_eq!(tensor.mapped_pages(), [0, 3]);

    look_in(1);
    tensor.unmap(&[3]).unwrap();
    let seen = receive.recv().unwrap().expect("the other thread waits for a lock");
    assert_eq!(seen, (Err(in_transition.clone()), Err(in_transition), Ok(vec![1]), vec![0, 1]));
    assert_eq!(tensor.mapped_pages(), [0, 1]);
    drop(tensor);
    sim.assert_clean();
}

#[test]
fn threads_share_a_range() {
    let sim = Sim::new();
    let tensor = tensor(&sim).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let tensor = &tensor;
            scope.spawn(move || {
                let own = [thread, thread + 3];
                for _ in 0..200 {
                    assert_eq!(tensor.map(&own), Ok(own.to_vec()));
                    tensor.unmap(&own).unwrap();
                }
                tensor.map(&own[..1]).unwrap();
            });
        }
    });
    assert_eq!((tensor.mapped_pages(), tensor.mapped_bytes()), (vec![0, 1, 2], 3 * PAGE));
    drop(tensor);
    sim.assert_clean();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// The scenarios above, made up by chance.
    #[test]
    fn any_scenario_under_any_fault(
        ops in proptest::collection::vec(
            (any::<bool>(), proptest::collection::vec(0..PAGES, 0..6)).prop_map(|(map, mut pages)| {
                if map {
                    return Map(pages);
                }
                let mut seen = BTreeSet::new();
                pages.retain(|p| seen.insert(*p));
                Unmap(pages)
            }),
            0..12,
        ),
        plan in prop_oneof![
            (1u32..60, 1u32..20).prop_map(|(k, more)| Plan::At(k, k + more)),
            (1u32..60).prop_map(Plan::From),
        ],
    ) {
        run(&ops, plan);
    }
}
