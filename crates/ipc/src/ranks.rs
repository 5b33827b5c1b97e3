//! The coordinator's side: the ranks of one group, as one.
//!
//! Whoever asks sends the frames itself and waits; one thread reads what all ranks answer. The core decides under a lock that is
//! held for no longer than it takes to hand frames to the kernel.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::coordinator::{Coordinator, Effect, Event, Op, Outcome};
use crate::error::IpcError;
use crate::fork::Owner;
use crate::link::{Call, CallLink, Inbox, Link, Recipient, SocketLink};
use crate::message::{Created, Epoch, Frame, Member, TransactionId};
use crate::reader::Reader;
use crate::socket::{Connection, Wake};
use crate::wire;

/// How long the end of a term waits for the ranks to hear of it.
const BYE_PATIENCE: Duration = Duration::from_secs(1);

/// How the ranks of a group are asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RanksConfig {
    /// The KV cache group.
    pub group: u32,
    /// The coordinator's term: greater than that of any coordinator before it.
    pub epoch: Epoch,
    /// Pages that stay mapped where all ranks have them; all others are unmapped when the term begins.
    pub keep: Vec<u32>,
    /// A rank that is silent for so long is lost. After half of it, it is asked again.
    pub timeout: Duration,
}

impl RanksConfig {
    /// A term that begins now, as the clock has it.
    pub fn epoch_now() -> Epoch {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        // Below the bit that tells an RPC's connections.
        u64::try_from(now.as_nanos()).unwrap_or(u64::MAX) & (u64::MAX >> 1)
    }
}

/// Told once that the group is broken, and why. By any thread, with no lock of this crate held.
pub type Watcher = Box<dyn Fn(&str) + Send + Sync>;

/// The ranks of one group. Thread-safe. Says goodbye when dropped.
///
/// In a fork of the process its calls fail, and dropping it does nothing.
pub struct Ranks {
    shared: Arc<Shared>,
    created: Vec<Created>,
    reader: Mutex<Option<Reader>>,
    owner: Owner,
}

/// What the threads share.
pub(crate) struct Shared {
    members: Vec<Member>,
    timeout: Duration,
    links: OnceLock<Vec<Arc<dyn Link>>>,
    state: Mutex<State>,
    beside_bytes: AtomicU64,
    broken: OnceLock<String>,
    closed: AtomicBool,
    watchers: Mutex<Vec<Watcher>>,
}

struct State {
    core: Coordinator,
    calls: HashMap<TransactionId, Waiting>,
}

/// A call that waits for its outcome.
struct Waiting {
    deadline: Option<Instant>,
    outcome: Option<Outcome>,
    ready: Arc<Condvar>,
}

impl Ranks {
    /// Connects to ranks that serve sockets and begins a term over them.
    ///
    /// Fails where a rank cannot be reached, refuses, or is made of something else than the others.
    pub fn connect(addresses: &[(Member, PathBuf)], config: RanksConfig) -> Result<Self, IpcError> {
        let members: Vec<Member> = addresses.iter().map(|(member, _)| *member).collect();
        let deadline = Instant::now() + config.timeout;
        let nowhere = |source| IpcError::io("poll", std::path::Path::new("the ranks"), source);
        let wake = Arc::new(Wake::new().map_err(nowhere)?);
        let mut links = vec![];
        for (_, address) in addresses {
            let connection = Connection::to(address, deadline)?;
            links.push(Arc::new(SocketLink::new(connection, address, Arc::clone(&wake))));
        }
        let shared = Shared::new(members, &config)?;
        let sockets = links.iter().cloned().zip(inboxes(&shared)).collect();
        let links = links.into_iter().map(|link| link as Arc<dyn Link>).collect();
        let reader = Reader::start(sockets, wake).map_err(nowhere)?;
        Self::begin(shared, links, Some(reader))
    }

    /// Asks the ranks through links that `make` makes, one a member, and begins a term over them.
    pub fn over_links(
        members: Vec<Member>,
        config: RanksConfig,
        mut make: impl FnMut(Member, Inbox) -> std::io::Result<Arc<dyn Link>>,
    ) -> Result<Self, IpcError> {
        let shared = Shared::new(members, &config)?;
        let made = shared.members.iter().zip(inboxes(&shared)).map(|(member, inbox)| make(*member, inbox));
        let links = made.collect::<std::io::Result<Vec<_>>>();
        let links = links.map_err(|e| IpcError::io("make a link to", std::path::Path::new("a rank"), e))?;
        Self::begin(shared, links, None)
    }

    /// Asks the ranks through a callable, from a thread for each of them, and begins a term over them. A call that fails is the loss
    /// of its rank. A question about work that is under way waits for it there, so that half of `timeout` must be longer than any
    /// map takes.
    pub fn over_callable(
        members: Vec<Member>,
        config: RanksConfig,
        call: Arc<Call>,
    ) -> Result<Self, IpcError> {
        Self::over_links(members, config, |member, inbox| {
            Ok(Arc::new(CallLink::start(member, Arc::clone(&call), inbox)?))
        })
    }

    fn begin(
        shared: Arc<Shared>,
        links: Vec<Arc<dyn Link>>,
        reader: Option<Reader>,
    ) -> Result<Self, IpcError> {
        let _ = shared.links.set(links);
        let reader = Mutex::new(reader);
        let mut ranks = Ranks { shared, created: vec![], reader, owner: Owner::this_process() };
        // Where it fails `ranks` is dropped, and with it the connections.
        match ranks.shared.call(Event::Begin, None)? {
            Outcome::Begun { created } => ranks.created = created,
            outcome => return Err(unexpected(outcome)),
        }
        tracing::debug!(members = ?ranks.shared.members, "a term over ranks has begun");
        Ok(ranks)
    }

    // ---------------------------------------------------------------- pages

    /// Backs these pages on all ranks, or on none; returns those that were not backed before, ascending.
    ///
    /// Fails with `OutOfMemory` or `MapFailed` after it was undone on all ranks, with `Broken` where that is not known.
    pub fn map(&self, pages: &[u32]) -> Result<Vec<u32>, IpcError> {
        let Some(pages) = self.pages(pages)? else { return Ok(vec![]) };
        match self.ask(Op::Map(pages))? {
            Outcome::Mapped { new } => Ok(new),
            Outcome::MapFailed { out_of_memory: true, lost, detail } if lost.is_empty() => {
                Err(IpcError::OutOfMemory { detail })
            }
            Outcome::MapFailed { lost, detail, .. } => Err(IpcError::MapFailed { lost, detail }),
            outcome => Err(unexpected(outcome)),
        }
    }

    /// Takes the memory of these pages, which must be mapped, on all ranks or on none. Each rank waits for its device first.
    ///
    /// Fails with `UnmapFailed`, which says where each page stands, or with `Broken`.
    pub fn unmap(&self, pages: &[u32]) -> Result<(), IpcError> {
        let Some(pages) = self.pages(pages)? else { return Ok(()) };
        match self.ask(Op::Unmap(pages))? {
            Outcome::Unmapped => Ok(()),
            Outcome::UnmapFailed { lost, still_mapped, detail } => {
                Err(IpcError::UnmapFailed { lost, still_mapped, detail })
            }
            outcome => Err(unexpected(outcome)),
        }
    }

    /// Waits for all work on every rank's device.
    pub fn synchronise(&self) -> Result<(), IpcError> {
        match self.ask(Op::Barrier)? {
            Outcome::Passed => Ok(()),
            outcome => Err(unexpected(outcome)),
        }
    }

    /// Bytes that every rank's device could give now.
    pub fn room(&self) -> Result<u64, IpcError> {
        match self.ask(Op::Room)? {
            Outcome::Room { free_bytes } => Ok(free_bytes),
            outcome => Err(unexpected(outcome)),
        }
    }

    /// Has every rank give back what it keeps for later pages; returns the bytes.
    pub fn trim(&self) -> Result<u64, IpcError> {
        match self.ask(Op::Trim)? {
            Outcome::Trimmed { bytes } => Ok(bytes),
            outcome => Err(unexpected(outcome)),
        }
    }

    // ---------------------------------------------------------------- what is known

    /// The workers, in the order in which they were given.
    pub fn members(&self) -> &[Member] {
        &self.shared.members
    }

    /// What each member's group is made of, as it was when the term began.
    pub fn created(&self) -> &[Created] {
        &self.created
    }

    /// Pages that can be backed.
    pub fn num_pages(&self) -> u32 {
        self.created.first().map_or(0, |created| created.num_pages)
    }

    /// Blocks in a page.
    pub fn blocks_per_page(&self) -> u32 {
        self.created.first().map_or(0, |created| created.blocks_per_page)
    }

    /// From the first id of a page to that of the next.
    pub fn ids_per_page(&self) -> u32 {
        self.created.first().map_or(0, |created| created.ids_per_page)
    }

    /// Physical bytes of one page on the rank that has the largest.
    pub fn page_bytes(&self) -> u64 {
        self.created.iter().map(|created| created.page_bytes).max().unwrap_or(0)
    }

    /// Bytes of addresses on the rank that has the most.
    pub fn virtual_bytes(&self) -> u64 {
        self.created.iter().map(|created| created.virtual_bytes).max().unwrap_or(0)
    }

    /// Bytes that the rank with the most of them held beside its pages when it last answered. Takes no lock.
    pub fn held_beside(&self) -> u64 {
        self.shared.beside_bytes.load(Ordering::Relaxed)
    }

    /// Why the group is broken, if it is. Takes no lock.
    pub fn broken(&self) -> Option<&str> {
        self.shared.broken.get().map(String::as_str)
    }

    /// Has `watcher` told when the group breaks; at once where it has.
    pub fn watch(&self, watcher: Watcher) {
        let mut watchers = self.shared.watchers();
        match self.shared.broken.get() {
            None => watchers.push(watcher),
            Some(why) => {
                drop(watchers);
                watcher(why);
            }
        }
    }

    /// Ends the term in order: the ranks keep what is mapped for the next. Idempotent; calls fail with `Closed` afterwards.
    pub fn close(&self) {
        if self.owner.check().is_err() || self.shared.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.shared.broken.get().is_none() && !self.created.is_empty() {
            let _ =
                self.shared.call(Event::Start { op: Op::Bye }, Some(BYE_PATIENCE.min(self.shared.timeout)));
        }
        for (member, link) in self.shared.links().iter().enumerate() {
            link.close();
            // Whoever still waits for an answer is told now; after an orderly end nobody does.
            self.shared.step(Event::Lost { member, why: "the coordinator closed the connection".to_owned() });
        }
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(reader) = reader {
            reader.stop();
        }
    }

    // ---------------------------------------------------------------- inside

    /// Ascending, each once. None where there are none.
    fn pages(&self, pages: &[u32]) -> Result<Option<Vec<u32>>, IpcError> {
        let num_pages = self.num_pages();
        if let Some(&page) = pages.iter().find(|page| **page >= num_pages) {
            return Err(IpcError::NoSuchPage { page, num_pages });
        }
        let mut pages = pages.to_vec();
        pages.sort_unstable();
        pages.dedup();
        Ok((!pages.is_empty()).then_some(pages))
    }

    fn ask(&self, op: Op) -> Result<Outcome, IpcError> {
        self.owner.check()?;
        if self.shared.closed.load(Ordering::Acquire) {
            return Err(IpcError::Closed);
        }
        self.shared.call(Event::Start { op }, None)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if self.owner.check().is_err() {
            // The threads that these name are not of this process, and a lock may be held for good.
            let reader = self.reader.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            std::mem::forget(reader);
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        self.close();
    }
}

/// One for each member.
fn inboxes(shared: &Arc<Shared>) -> impl Iterator<Item = Inbox> {
    let recipient = Arc::downgrade(shared);
    (0..shared.members.len()).map(move |member| Inbox::new(recipient.clone(), member))
}

fn unexpected(outcome: Outcome) -> IpcError {
    match outcome {
        Outcome::Broken { why } => IpcError::Broken { why },
        Outcome::Failed { detail } => IpcError::Failed { detail },
        outcome => IpcError::Failed { detail: format!("an outcome of another request: {outcome:?}") },
    }
}

impl Shared {
    fn new(members: Vec<Member>, config: &RanksConfig) -> Result<Arc<Self>, IpcError> {
        let refused = |why| Err(IpcError::Members { members: members.clone(), why });
        let mut sorted = members.clone();
        sorted.sort_unstable();
        if sorted.is_empty() {
            return refused("there are none");
        }
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return refused("one is named twice");
        }
        let core = Coordinator::new(config.group, config.epoch, members.clone(), config.keep.clone());
        Ok(Arc::new(Shared {
            members,
            timeout: config.timeout,
            links: OnceLock::new(),
            state: Mutex::new(State { core, calls: HashMap::new() }),
            beside_bytes: AtomicU64::new(0),
            broken: OnceLock::new(),
            closed: AtomicBool::new(false),
            watchers: Mutex::default(),
        }))
    }

    /// Begins what `event` starts and waits for its outcome, no longer than `patience`: what has none by then is left alone.
    fn call(&self, event: Event, patience: Option<Duration>) -> Result<Outcome, IpcError> {
        let gives_up = patience.map(|patience| Instant::now() + patience);
        let nothing = || IpcError::Failed { detail: "the request was not begun".to_owned() };
        let transaction = self.step(event).ok_or_else(nothing)?;
        let mut state = self.lock();
        loop {
            let Some(waiting) = state.calls.get_mut(&transaction) else { return Err(nothing()) };
            if let Some(outcome) = waiting.outcome.take() {
                state.calls.remove(&transaction);
                return Ok(outcome);
            }
            let now = Instant::now();
            if gives_up.is_some_and(|at| at <= now) {
                state.calls.remove(&transaction);
                return Err(IpcError::Failed { detail: "the ranks did not answer in time".to_owned() });
            }
            if waiting.deadline.take_if(|at| *at <= now).is_some() {
                drop(state);
                self.step(Event::Deadline { transaction });
                state = self.lock();
                continue;
            }
            let until = waiting.deadline.into_iter().chain(gives_up).min();
            let ready = Arc::clone(&waiting.ready);
            state = match until {
                None => ready.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    let left = at.saturating_duration_since(now);
                    ready.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Tells the core what happened and does what follows. Returns the transaction that was started by it.
    pub(crate) fn step(&self, event: Event) -> Option<TransactionId> {
        let mut state = self.lock();
        let mut events = VecDeque::from([event]);
        let mut started = None;
        while let Some(event) = events.pop_front() {
            for effect in state.core.step(event) {
                if let Effect::Started { transaction } = effect {
                    started = Some(transaction);
                }
                self.carry_out(&mut state, effect, &mut events);
            }
        }
        self.beside_bytes.store(state.core.beside_bytes(), Ordering::Relaxed);
        let why = state.core.is_broken().map(str::to_owned).filter(|_| self.broken.get().is_none());
        drop(state);
        if let Some(why) = why {
            self.break_down(why);
        }
        started
    }

    fn carry_out(&self, state: &mut State, effect: Effect, events: &mut VecDeque<Event>) {
        match effect {
            Effect::Started { transaction } => {
                let waiting = Waiting { deadline: None, outcome: None, ready: Arc::default() };
                state.calls.insert(transaction, waiting);
            }
            Effect::Send { member, frame } => {
                let Some(link) = self.links().get(member) else { return };
                if let Err(error) = link.send(&wire::encode(&frame)) {
                    let why = format!("a frame could not be sent: {error}");
                    events.push_back(Event::Lost { member, why });
                }
            }
            Effect::Arm { transaction } => {
                if let Some(waiting) = state.calls.get_mut(&transaction) {
                    waiting.deadline = Some(Instant::now() + self.timeout / 2);
                    // It may wait for something later.
                    waiting.ready.notify_all();
                }
            }
            Effect::Finish { transaction, outcome } => {
                if let Some(waiting) = state.calls.get_mut(&transaction) {
                    waiting.outcome = Some(outcome);
                    waiting.ready.notify_all();
                }
            }
            Effect::Close { member } => {
                if let Some(link) = self.links().get(member) {
                    link.close();
                }
            }
            Effect::Broken { member, why } => {
                tracing::error!(member = ?self.members.get(member), why, "a group of ranks is broken");
            }
        }
    }

    fn break_down(&self, why: String) {
        if self.broken.set(why).is_err() {
            return;
        }
        let watchers = std::mem::take(&mut *self.watchers());
        if let Some(why) = self.broken.get() {
            watchers.iter().for_each(|watcher| watcher(why));
        }
    }

    fn links(&self) -> &[Arc<dyn Link>] {
        self.links.get().map_or(&[], Vec::as_slice)
    }

    fn watchers(&self) -> MutexGuard<'_, Vec<Watcher>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recipient for Shared {
    fn receive(&self, member: usize, frame: Frame) {
        self.step(Event::Received { member, frame });
    }

    fn lose(&self, member: usize, why: String) {
        // After the end every connection is lost, and nobody minds.
        if !self.closed.load(Ordering::Acquire) {
            self.step(Event::Lost { member, why });
        }
    }
}
