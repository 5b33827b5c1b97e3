//! Coordinators and ranks of production, in one process: over sockets and through a callable.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod memory;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use kvcached_ipc::message::{Answer, Body, Frame, Member, Message, Refusal, Request};
use kvcached_ipc::rank::{Work, WorkResult};
use kvcached_ipc::wire::{self, Decoded};
use kvcached_ipc::{Call, Directory, FTensorStore, IpcError, RankServer, Ranks, RanksConfig, Store};
use memory::{PAGES, member, tensor};

const TIMEOUT: Duration = Duration::from_secs(5);
const NO_PAGES: [u32; 0] = [];

/// Some ranks, each with a group of its own memory.
struct World {
    base: tempfile::TempDir,
    servers: Vec<RankServer>,
    tensors: Vec<Arc<kvcached_vmm::FTensor>>,
}

impl World {
    fn new(ranks: u16) -> Self {
        Self::with(ranks, |_, store| store)
    }

    fn with(ranks: u16, wrap: impl Fn(u16, Arc<dyn Store>) -> Arc<dyn Store>) -> Self {
        let base = tempfile::tempdir().unwrap();
        let directory = Directory::create(&base.path().join("d")).unwrap();
        let (mut servers, mut tensors) = (vec![], vec![]);
        for rank in 0..ranks {
            let server = RankServer::bind(member(rank), &directory).unwrap();
            let tensor = tensor();
            let store = wrap(rank, Arc::new(FTensorStore::new(Arc::clone(&tensor))));
            server.add_group(0, store).unwrap();
            servers.push(server);
            tensors.push(tensor);
        }
        World { base, servers, tensors }
    }

    fn addresses(&self) -> Vec<(Member, PathBuf)> {
        self.servers.iter().map(|server| (server.member(), server.address().to_path_buf())).collect()
    }

    fn ranks(&self) -> Ranks {
        Ranks::connect(&self.addresses(), config(1)).unwrap()
    }

    fn ranks_again(&self) -> Ranks {
        Ranks::connect(&self.addresses(), config(2)).unwrap()
    }

    #[track_caller]
    fn assert_mapped(&self, pages: &[u32]) {
        for (rank, tensor) in self.tensors.iter().enumerate() {
            assert_eq!(tensor.mapped_pages(), pages, "rank {rank}");
            assert_eq!(tensor.pending_transaction(), None, "rank {rank}");
        }
    }

    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.base.path().join("d")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

fn config(epoch: u64) -> RanksConfig {
    RanksConfig { group: 0, epoch, keep: vec![0], timeout: TIMEOUT }
}

#[track_caller]
fn soon(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while !is_so() {
        assert!(Instant::now() < deadline, "not within 5 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn ranks_map_and_unmap_as_one() {
    for count in [1, 2, 4] {
        let world = World::new(count);
        let ranks = world.ranks();
        assert_eq!((ranks.num_pages(), ranks.members().len()), (PAGES, count.into()));
        assert_eq!(ranks.page_bytes(), world.tensors[0].geometry().page_bytes());
        assert_eq!(ranks.virtual_bytes(), world.tensors[0].virtual_bytes());
        assert_eq!(ranks.blocks_per_page(), world.tensors[0].geometry().blocks_per_page());
        assert_eq!(ranks.map(&[3, 1, 1]).unwrap(), [1, 3]);
        assert_eq!(ranks.map(&[3, 4]).unwrap(), [4]);
        world.assert_mapped(&[1, 3, 4]);
        ranks.unmap(&[4, 1]).unwrap();
        world.assert_mapped(&[3]);
        ranks.synchronise().unwrap();
        assert!(ranks.room().unwrap() > 0);
        assert_eq!((ranks.trim().unwrap(), ranks.held_beside()), (0, 0));
        assert_eq!((ranks.map(&[]).unwrap(), ranks.unmap(&[]).unwrap()), (vec![], ()));
        assert!(matches!(ranks.map(&[PAGES]), Err(IpcError::NoSuchPage { page: PAGES, .. })));
        let Err(IpcError::UnmapFailed { lost, still_mapped, .. }) = ranks.unmap(&[3, 5]) else {
            panic!("page 5 is not mapped")
        };
        assert_eq!((lost, still_mapped), (vec![5], vec![3]), "nobody knows what page 5 is");
        world.assert_mapped(&[3]);
        assert_eq!(ranks.broken(), None);
    }
}

#[test]
fn a_later_term_finds_what_it_keeps_and_the_ranks_equal() {
    let world = World::new(3);
    let first = world.ranks();
    first.map(&[0, 1, 2]).unwrap();
    drop(first);
    world.assert_mapped(&[0, 1, 2]);
    world.tensors[1].map(&[5]).unwrap();
    world.tensors[2].unmap(&[1]).unwrap();
    let second = Ranks::connect(&world.addresses(), RanksConfig { keep: vec![0, 1], ..config(2) }).unwrap();
    world.assert_mapped(&[0]);
    second.unmap(&[0]).unwrap();
    world.assert_mapped(&NO_PAGES);
    let stale = Ranks::connect(&world.addresses(), config(2)).map(drop).unwrap_err();
    assert!(matches!(stale, IpcError::Broken { .. }), "{stale}");
    assert_eq!(second.map(&[7]).unwrap(), [7], "the one that stands is not disturbed");
}

#[test]
fn a_coordinator_that_takes_over_breaks_the_one_before() {
    let world = World::new(2);
    let first = world.ranks();
    first.map(&[4]).unwrap();
    let second = Ranks::connect(&world.addresses(), config(2)).unwrap();
    soon("the first hears of it", || first.broken().is_some());
    assert!(matches!(first.map(&[1]), Err(IpcError::Broken { .. })));
    assert_eq!(second.map(&[2]).unwrap(), [2]);
    world.assert_mapped(&[2]);
}

#[test]
fn threads_ask_at_the_same_time() {
    let world = World::new(4);
    let ranks = world.ranks();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let ranks = &ranks;
            scope.spawn(move || {
                for _ in 0..50 {
                    let pages = [2 * thread, 2 * thread + 1];
                    assert_eq!(ranks.map(&pages).unwrap(), pages);
                    ranks.unmap(&pages).unwrap();
                }
            });
        }
    });
    world.assert_mapped(&NO_PAGES);
}

#[test]
fn a_rank_that_goes_is_noticed_while_nothing_is_asked() {
    let world = World::new(3);
    let ranks = world.ranks();
    ranks.map(&[1]).unwrap();
    let (told, hears) = mpsc::channel();
    ranks.watch(Box::new(move |why| told.send(why.to_owned()).unwrap()));
    let began = Instant::now();
    assert!(world.servers[1].stop());
    let why = hears.recv_timeout(TIMEOUT).unwrap();
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert!(why.contains("rank 1") && why.contains("closed the connection"), "{why}");
    assert_eq!(ranks.broken(), Some(&*why));
    let Err(IpcError::Broken { why: again }) = ranks.map(&[2]) else { panic!("it is broken") };
    assert_eq!(again, why);
    let late = Arc::new(Mutex::new(String::new()));
    let hears = Arc::clone(&late);
    ranks.watch(Box::new(move |why| why.clone_into(&mut hears.lock().unwrap())));
    assert_eq!(*late.lock().unwrap(), why, "who asks late is told at once");
    assert_eq!(world.files().len(), 2, "the socket of the one that stopped is gone");
}

/// Does what it is told to do slowly.
struct Slow {
    store: Arc<dyn Store>,
    pause: Duration,
}

impl Store for Slow {
    fn work(&self, work: &Work) -> WorkResult {
        if matches!(work, Work::Map { .. }) {
            std::thread::sleep(self.pause);
        }
        self.store.work(work)
    }

    fn num_pages(&self) -> u32 {
        self.store.num_pages()
    }
}

fn slow(pause: Duration) -> impl Fn(u16, Arc<dyn Store>) -> Arc<dyn Store> {
    move |rank, store| if rank == 1 { Arc::new(Slow { store, pause }) } else { store }
}

#[test]
fn a_map_may_take_longer_than_the_deadline_of_an_exchange() {
    let world = World::with(2, slow(Duration::from_millis(500)));
    let timeout = Duration::from_millis(100);
    let ranks = Ranks::connect(&world.addresses(), RanksConfig { timeout, ..config(1) }).unwrap();
    assert_eq!(ranks.map(&[1, 2]).unwrap(), [1, 2]);
    world.assert_mapped(&[1, 2]);
}

#[test]
fn ends_say_nothing_to_a_rank_that_is_busy_for_longer_than_they_wait() {
    let world = World::with(2, slow(Duration::from_millis(300)));
    let ranks = Arc::new(world.ranks());
    let asks = Arc::clone(&ranks);
    let asking = std::thread::spawn(move || asks.map(&[1]));
    soon("the fast rank has it", || world.tensors[0].mapped_pages() == [1]);
    drop(world.servers);
    assert!(matches!(asking.join().unwrap(), Err(IpcError::Broken { .. })));
}

#[test]
fn who_waits_for_ranks_that_are_closed_is_told() {
    let world = World::with(2, slow(Duration::from_secs(3)));
    let ranks = Arc::new(world.ranks());
    let asks = Arc::clone(&ranks);
    let asking = std::thread::spawn(move || asks.map(&[1]));
    soon("the fast rank has it", || world.tensors[0].mapped_pages() == [1]);
    let began = Instant::now();
    ranks.close();
    assert!(matches!(asking.join().unwrap(), Err(IpcError::Broken { .. })));
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert!(matches!(ranks.map(&[1]), Err(IpcError::Closed)));
    assert_eq!(world.ranks_again().map(&[2]).unwrap(), [2]);
    world.assert_mapped(&[2]);
}

#[test]
fn ranks_that_are_closed_in_order_are_not_broken() {
    let world = World::new(2);
    let ranks = world.ranks();
    ranks.map(&[1]).unwrap();
    ranks.close();
    assert_eq!(ranks.broken(), None);
}

// ------------------------------------------------------------------ peers that do not behave

/// Speaks to a rank by hand.
struct Client(UnixStream);

impl Client {
    fn new(world: &World) -> Self {
        let stream = UnixStream::connect(world.servers[0].address()).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Client(stream)
    }

    fn ask(&mut self, frame: &Frame) -> Body {
        self.0.write_all(&wire::encode(frame)).unwrap();
        self.answer()
    }

    fn answer(&mut self) -> Body {
        let mut bytes = vec![0; wire::HEADER_BYTES];
        self.0.read_exact(&mut bytes).unwrap();
        let header = wire::header(&bytes).unwrap().unwrap();
        bytes.resize(wire::HEADER_BYTES + header.payload_bytes, 0);
        self.0.read_exact(&mut bytes[wire::HEADER_BYTES..]).unwrap();
        let Decoded::Frame(Frame { message: Message::Answer(Answer { body, .. }), .. }) =
            wire::decode(&bytes).unwrap()
        else {
            panic!("no answer")
        };
        body
    }

    /// Whether the rank cuts the connection.
    fn is_cut(&mut self, within: Duration) -> bool {
        self.0.set_read_timeout(Some(within)).unwrap();
        matches!(self.0.read(&mut [0]), Ok(0))
    }
}

fn request(epoch: u64, transaction: u64, request: Request) -> Frame {
    Frame { epoch, transaction, group: 0, member: member(0), message: Message::Request(request) }
}

#[test]
fn slow_and_hostile_clients_hold_up_nobody() {
    let world = World::new(2);
    let ranks = world.ranks();
    let mut half = Client::new(&world);
    half.0.write_all(&wire::encode(&request(9, 1, Request::Hello))[..20]).unwrap();
    let mut silent = Client::new(&world);
    let mut stranger = Client::new(&world);
    stranger.0.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert!(stranger.is_cut(TIMEOUT));
    let mut deaf = Client::new(&world);
    deaf.0.set_nonblocking(true).unwrap();
    let unknown = wire::encode(&request(9, 1, Request::Query));
    while deaf.0.write(&unknown.repeat(100)).is_ok() {}
    let began = Instant::now();
    for page in 0..PAGES {
        ranks.map(&[page]).unwrap();
    }
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert!(half.is_cut(Duration::from_secs(7)), "half a frame and no more");
    assert!(silent.is_cut(Duration::from_secs(7)), "not a word");
    ranks.unmap(&[0]).unwrap();
    assert_eq!(ranks.broken(), None);
}

#[test]
fn more_clients_than_are_served_do_not_push_out_a_coordinator() {
    let world = World::new(1);
    let ranks = world.ranks();
    let clients: Vec<Client> = (0..80).map(|_| Client::new(&world)).collect();
    let mut last = Client::new(&world);
    assert_eq!(last.ask(&request(0, 1, Request::Query)), Body::Refused(Refusal::StaleEpoch));
    ranks.map(&[1]).unwrap();
    drop(clients);
    ranks.map(&[2]).unwrap();
}

#[test]
fn who_has_no_term_is_refused_and_what_is_no_group_too() {
    let world = World::new(1);
    let mut client = Client::new(&world);
    assert_eq!(client.ask(&request(3, 1, Request::Barrier)), Body::Refused(Refusal::StaleEpoch));
    assert!(matches!(client.ask(&request(3, 1, Request::Hello)), Body::Created(_)));
    assert_eq!(client.ask(&request(3, 2, Request::Barrier)), Body::Passed);
    let foreign = Frame { group: 7, ..request(3, 3, Request::Hello) };
    assert_eq!(client.ask(&foreign), Body::Refused(Refusal::NoSuchGroup));
    let mistaken = Frame { member: member(5), ..request(3, 3, Request::Barrier) };
    assert_eq!(client.ask(&mistaken), Body::Refused(Refusal::NotMe));
    let mut newer = wire::encode(&request(3, 4, Request::Barrier));
    (newer[5], newer[6]) = (9, 77);
    client.0.write_all(&newer).unwrap();
    assert_eq!(client.answer(), Body::Refused(Refusal::UnknownKind));
    assert_eq!(client.ask(&request(3, 5, Request::Bye)), Body::Bye);
}

#[test]
fn a_prepare_is_undone_when_its_coordinator_goes() {
    let world = World::new(1);
    let pages = kvcached_ipc::runs::Runs::from_pages(&[1, 2]).unwrap();
    let mut client = Client::new(&world);
    client.ask(&request(3, 1, Request::Hello));
    client.ask(&request(3, 2, Request::Map(pages.clone())));
    assert_eq!(client.ask(&request(3, 3, Request::Prepare(pages))), Body::Prepared);
    assert_eq!(world.tensors[0].mapped_pages(), NO_PAGES);
    drop(client);
    soon("it is mapped back", || world.tensors[0].mapped_pages() == [1, 2]);
    world.assert_mapped(&[1, 2]);
}

// ------------------------------------------------------------------ the end

#[test]
fn a_server_ends_in_order_and_leaves_nothing() {
    let world = World::new(2);
    let ranks = world.ranks();
    ranks.map(&[1]).unwrap();
    assert_eq!(world.files().len(), 2);
    drop(ranks);
    for server in &world.servers {
        assert!(server.stop());
        assert!(server.stop(), "once more");
        let refused = server.add_group(1, Arc::new(FTensorStore::new(tensor()))).unwrap_err();
        assert!(matches!(refused, IpcError::Stopped));
    }
    assert_eq!(world.files(), [""; 0]);
    let gone = Ranks::connect(&world.addresses(), config(2)).map(drop).unwrap_err();
    assert!(gone.to_string().starts_with("cannot connect to "), "{gone}");
}

#[test]
fn a_group_is_added_once_and_members_are_named_once() {
    let world = World::new(1);
    let store = || Arc::new(FTensorStore::new(tensor()));
    assert!(matches!(world.servers[0].add_group(0, store()), Err(IpcError::GroupTaken { group: 0 })));
    world.servers[0].add_group(1, store()).unwrap();
    let [address] = world.addresses().try_into().unwrap();
    let twice = Ranks::connect(&[address.clone(), address.clone()], config(1)).map(drop).unwrap_err();
    assert!(matches!(twice, IpcError::Members { .. }), "{twice}");
    assert!(matches!(Ranks::connect(&[], config(1)), Err(IpcError::Members { .. })));
    let other = Ranks::connect(&[address], RanksConfig { group: 1, ..config(1) }).unwrap();
    other.map(&[3]).unwrap();
    world.assert_mapped(&NO_PAGES);
}

// ------------------------------------------------------------------ an engine's own RPC

#[test]
fn the_same_frames_go_through_a_callable() {
    let world = Arc::new(World::new(3));
    let calls = Arc::new(AtomicU32::new(0));
    let (carries, counts) = (Arc::clone(&world), Arc::clone(&calls));
    let call: Arc<Call> = Arc::new(move |member: Member, frame: &[u8]| {
        counts.fetch_add(1, Ordering::Relaxed);
        carries.servers[usize::from(member.rank)].answer(frame).map_err(|error| error.to_string())
    });
    let members: Vec<Member> = (0..3).map(member).collect();
    let ranks = Ranks::over_callable(members.clone(), config(1), Arc::clone(&call)).unwrap();
    assert_eq!(ranks.map(&[1, 2]).unwrap(), [1, 2]);
    world.assert_mapped(&[1, 2]);
    let before = calls.load(Ordering::Relaxed);
    ranks.unmap(&[1]).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed) - before, 6, "prepare and commit");
    world.assert_mapped(&[2]);
    let second = Ranks::over_callable(members, config(2), call).unwrap();
    assert!(matches!(ranks.map(&[3]), Err(IpcError::Broken { .. })), "another has taken over");
    second.map(&[4]).unwrap();
    world.assert_mapped(&[4]);
    drop((ranks, second));
    world.servers.iter().for_each(|server| assert!(server.stop()));
    assert!(matches!(world.servers[0].answer(&[]), Err(IpcError::Stopped)));
}

#[test]
fn a_callable_that_fails_or_lies_is_the_loss_of_its_rank() {
    for lie in [Err("the actor died".to_owned()), Ok(b"no frame".to_vec())] {
        let world = Arc::new(World::new(2));
        let (carries, lies) = (Arc::clone(&world), Arc::new(AtomicU32::new(0)));
        let lying = Arc::clone(&lies);
        let call: Arc<Call> = Arc::new(move |member: Member, frame: &[u8]| match member.rank {
            1 if lying.load(Ordering::Relaxed) > 0 => lie.clone(),
            rank => carries.servers[usize::from(rank)].answer(frame).map_err(|error| error.to_string()),
        });
        let ranks = Ranks::over_callable(vec![member(0), member(1)], config(1), call).unwrap();
        ranks.map(&[1]).unwrap();
        lies.store(1, Ordering::Relaxed);
        let Err(IpcError::Broken { why }) = ranks.map(&[2]) else { panic!("a rank is lost") };
        assert!(why.contains("rank 1"), "{why}");
        assert_eq!(world.tensors[0].mapped_pages(), [1], "the survivor has undone it");
        assert_eq!(world.tensors[1].mapped_pages(), [1]);
    }
}

#[test]
fn answers_go_to_whoever_asked() {
    let world = Arc::new(World::with(2, slow(Duration::from_millis(300))));
    let ask = |request: Request, transaction| {
        let frame = Frame { member: member(1), ..self::request(1, transaction, request) };
        let world = Arc::clone(&world);
        std::thread::spawn(move || {
            let bytes = world.servers[1].answer(&wire::encode(&frame)).unwrap();
            match wire::decode(&bytes).unwrap() {
                Decoded::Frame(Frame { message: Message::Answer(answer), .. }) => answer.body,
                other => panic!("{other:?}"),
            }
        })
    };
    assert!(matches!(ask(Request::Hello, 1).join().unwrap(), Body::Created(_)));
    let pages = kvcached_ipc::runs::Runs::from_pages(&[1]).unwrap();
    let map = ask(Request::Map(pages.clone()), 2);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(ask(Request::Query, 2).join().unwrap(), Body::Running, "while it is mapped");
    assert_eq!(ask(Request::Map(pages.clone()), 2).join().unwrap(), Body::Running, "not done twice");
    assert_eq!(map.join().unwrap(), Body::Mapped { new: pages.clone() });
    assert_eq!(ask(Request::Query, 2).join().unwrap(), Body::Mapped { new: pages });
    assert!(matches!(world.servers[1].answer(b"no frame"), Err(IpcError::Failed { .. })));
}
