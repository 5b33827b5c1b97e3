//! `kvctl metrics --listen`.

use std::io::{ErrorKind, Read as _, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};

use super::answer::{Asked, Read, answer, read};
use super::exposition;
use crate::Failure;
use crate::interrupts::{Interrupts, Woken};

/// Whoever has not asked, or not read the answer, by then is left.
const PATIENCE: Duration = Duration::from_secs(5);
/// Who asks while that many are being answered is left at once.
const AT_ONCE: usize = 16;
const MAX_HEAD_BYTES: usize = 16 << 10;
const LONG: Duration = Duration::from_secs(3600);

/// Answers until a signal comes.
pub(super) fn run(
    dir: &Path,
    address: SocketAddr,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<(), Failure> {
    let listen = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    let (listener, bound) = listen().map_err(|source| Failure::Listen { address, source })?;
    let interrupts = Interrupts::listen(&[SIGINT, SIGTERM]).map_err(Failure::Signals)?;
    writeln!(out, "metrics at http://{bound}/metrics")?;
    out.flush()?;
    let being_answered = Arc::new(AtomicUsize::new(0));
    let (failed, failures) = std::sync::mpsc::channel::<String>();
    let mut last_failure = String::new();
    loop {
        match interrupts.wait(LONG, Some(&listener)).map_err(Failure::Signals)? {
            Woken::End => return Ok(()), // whoever is being answered is left
            Woken::Time => continue,
            Woken::Input => {}
        }
        for failure in failures.try_iter() {
            if failure != last_failure {
                let _ = writeln!(err, "warning: {failure}"); // nobody is left to tell
                last_failure = failure;
            }
        }
        let Ok((client, _)) = listener.accept() else {
            // It has left already, or there are no descriptors left for it: others may have more luck.
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let place = Place(Arc::clone(&being_answered));
        if being_answered.fetch_add(1, Ordering::SeqCst) >= AT_ONCE {
            continue;
        }
        let (dir, failed) = (dir.to_path_buf(), failed.clone());
        let metrics = move || {
            exposition(&dir).map_err(|error| {
                let _ = failed.send(error.to_string()); // at the end nobody listens
                error.to_string()
            })
        };
        let attend = move || {
            let _ = attend(client, metrics); // whoever leaves before it has its answer wants none
            drop(place);
        };
        // Where there is no thread to be had the client is left, and its place with it.
        let _ = std::thread::Builder::new().name("kvctl-client".to_owned()).spawn(attend);
    }
}

/// Of one client among those that are being answered.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// One request, one answer.
fn attend(mut client: TcpStream, metrics: impl FnOnce() -> Result<String, String>) -> std::io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    client.set_nonblocking(false)?;
    client.set_write_timeout(Some(PATIENCE))?;
    let asked = hear(&mut client, deadline)?;
    let text = answer(asked, metrics);
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        if Instant::now() >= deadline {
            return Err(ErrorKind::TimedOut.into());
        }
        match client.write(rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    client.shutdown(std::net::Shutdown::Write)
}

fn hear(client: &mut TcpStream, deadline: Instant) -> std::io::Result<Asked> {
    let (mut bytes, mut buffer) = (vec![], [0; 4096]);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        client.set_read_timeout(Some(left))?;
        match client.read(&mut buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        match read(&bytes) {
            Read::Asked(asked) => return Ok(asked),
            Read::More if bytes.len() > MAX_HEAD_BYTES => return Ok(Asked::Nonsense),
            Read::More => {}
        }
    }
}
