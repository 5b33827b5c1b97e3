//! `kvctl watch`.

use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use signal_hook::consts::SIGINT;

use crate::Failure;
use crate::args::Watch;
use crate::interrupts::{Interrupts, Woken};
use crate::table::tables;
use crate::view::{Snapshot, look};

/// One line of `--json`.
#[derive(Serialize)]
struct Line<'a> {
    at_unix_ns: u64,
    #[serde(flatten)]
    snapshot: &'a Snapshot,
}

pub(crate) fn run(dir: &Path, args: &Watch, out: &mut dyn Write, err: &mut dyn Write) -> Result<(), Failure> {
    let interrupts = Interrupts::listen(&[SIGINT]).map_err(Failure::Signals)?;
    let mut last: Option<Snapshot> = None;
    let mut looks = 0_u64;
    loop {
        let snapshot = look(dir)?.only(&args.names);
        if last.as_ref().is_none_or(|last| last.unreadable != snapshot.unreadable) {
            snapshot.warn(err);
        }
        if args.json {
            if last.as_ref() != Some(&snapshot) {
                write_line(&snapshot, out)?;
            }
        } else {
            write_changed(last.as_ref(), &snapshot, out)?;
        }
        out.flush()?;
        last = Some(snapshot);
        looks += 1;
        let is_last = args.count == Some(looks);
        if is_last || interrupts.wait(args.interval, None).map_err(Failure::Signals)? == Woken::End {
            return Ok(());
        }
    }
}

fn write_line(snapshot: &Snapshot, out: &mut dyn Write) -> Result<(), Failure> {
    // Before 1970 or after 2554 the time is wrong, not the figures.
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at_unix_ns = u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX);
    serde_json::to_writer(&mut *out, &Line { at_unix_ns, snapshot }).map_err(std::io::Error::from)?;
    Ok(writeln!(out)?)
}

/// Figures may change that a table rounds away: then there is nothing new to read.
fn write_changed(last: Option<&Snapshot>, snapshot: &Snapshot, out: &mut dyn Write) -> Result<(), Failure> {
    let text = tables(snapshot);
    match last.map(tables) {
        Some(last) if last == text => Ok(()),
        Some(_) => Ok(write!(out, "\n{text}")?),
        None => Ok(out.write_all(text.as_bytes())?),
    }
}
