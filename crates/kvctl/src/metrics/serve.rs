//! `kvctl metrics --listen`. One thread for all: nobody is waited for, so nobody makes others wait.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::Figures;
use super::answer::{Asked, Read as Heard, answer, read};
use crate::Failure;
use crate::interrupts::Interrupts;

/// Those who came first make way for more.
const MAX_CLIENTS: usize = 64;
/// From the connection to the last byte of the answer: Prometheus waits no longer either.
const PATIENCE: Duration = Duration::from_secs(10);
const MAX_HEAD_BYTES: usize = 16 << 10;
/// Where no connection can be had, as there are no more files.
const RESPITE: Duration = Duration::from_millis(100);

struct Client {
    stream: TcpStream,
    until: Instant,
    state: State,
}

enum State {
    /// Has sent this.
    Asks(Vec<u8>),
    /// Has so many bytes of its answer.
    Hears(Vec<u8>, usize),
    /// Closes its end. If we closed ours before that, what it still sends would cost it the answer.
    Leaves,
}

/// Answers until a signal comes.
pub(super) fn run(
    dir: &Path,
    address: SocketAddr,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<(), Failure> {
    let interrupts = Interrupts::listen(&[SIGINT, SIGTERM]).map_err(Failure::Signals)?;
    let listen = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    let (listener, bound) = listen().map_err(|source| Failure::Listen { address, source })?;
    writeln!(out, "metrics at http://{bound}/metrics")?;
    out.flush()?;
    serve(&listener, &interrupts, &mut Figures::new(dir, err))
}

fn serve(listener: &TcpListener, interrupts: &Interrupts, figures: &mut Figures<'_>) -> Result<(), Failure> {
    let mut clients: Vec<Client> = Vec::new();
    loop {
        let now = Instant::now();
        clients.retain(|client| client.until > now);
        let time = clients.iter().map(|client| client.until - now).min();
        let ready = match wait(interrupts, listener, &clients, time) {
            // A signal of ours shows in the next round.
            Err(Errno::INTR) => continue,
            ready => ready.map_err(|errno| Failure::Signals(errno.into()))?,
        };
        let [has_signal, has_newcomer, ready @ ..] = &ready[..] else { continue };
        if *has_signal {
            return Ok(());
        }
        let mut ready = ready.iter();
        clients.retain_mut(|client| ready.next() == Some(&false) || client.stays(figures));
        if *has_newcomer {
            match listener.accept().and_then(|(stream, _)| Client::new(stream)) {
                Ok(client) => {
                    if clients.len() == MAX_CLIENTS {
                        clients.remove(0);
                    }
                    clients.push(client);
                }
                // It has gone again.
                Err(error) if is_for_now(&error) || error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    figures.warn(&format_args!("a connection is not served: {error}"));
                    sleep(RESPITE);
                }
            }
        }
    }
}

/// Whether there is a signal, a newcomer, and something to do for each client; after `time` there may be nothing.
fn wait(
    interrupts: &Interrupts,
    listener: &TcpListener,
    clients: &[Client],
    time: Option<Duration>,
) -> Result<Vec<bool>, Errno> {
    let mut watched = vec![PollFd::new(interrupts, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
    watched.extend(clients.iter().map(|client| PollFd::new(&client.stream, client.waits_for())));
    let timeout = time.map(Timespec::try_from).transpose().map_err(|_| Errno::INVAL)?;
    poll(&mut watched, timeout.as_ref())?;
    Ok(watched.iter().map(|fd| !fd.revents().is_empty()).collect())
}

impl Client {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, until: Instant::now() + PATIENCE, state: State::Asks(Vec::new()) })
    }

    fn waits_for(&self) -> PollFlags {
        match self.state {
            State::Hears(..) => PollFlags::OUT,
            State::Asks(_) | State::Leaves => PollFlags::IN,
        }
    }

    /// Does what can be done now; whether more is to come.
    fn stays(&mut self, figures: &mut Figures<'_>) -> bool {
        self.go_on(figures).unwrap_or_else(|error| is_for_now(&error))
    }

    fn go_on(&mut self, figures: &mut Figures<'_>) -> io::Result<bool> {
        let mut buffer = [0; 4096];
        match &mut self.state {
            State::Asks(received) => {
                let bytes = self.stream.read(&mut buffer)?;
                received.extend(&buffer[..bytes]);
                let asked = match read(received) {
                    Heard::Asked(asked) => asked,
                    Heard::More if received.len() > MAX_HEAD_BYTES => Asked::Nonsense,
                    Heard::More => return Ok(bytes > 0),
                };
                self.state = State::Hears(answer(asked, || figures.text()).into_bytes(), 0);
                Ok(true)
            }
            State::Hears(answer, sent) => {
                *sent += self.stream.write(&answer[*sent..])?;
                if *sent == answer.len() {
                    self.stream.shutdown(Shutdown::Write)?;
                    self.state = State::Leaves;
                }
                Ok(true)
            }
            State::Leaves => Ok(self.stream.read(&mut buffer)? > 0),
        }
    }
}

fn is_for_now(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
