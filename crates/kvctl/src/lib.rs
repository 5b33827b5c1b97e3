//! `kvctl`: what a person asks about the instances on this machine, and asks of them.
//!
//! A library, so that the binary and the wheel's console script are the same program. Results go to `out`, everything else to `err`.
#![forbid(unsafe_code)]

mod args;
mod change;
mod delete;
mod doctor;
mod interrupts;
mod list;
mod metrics;
mod size;
mod table;
mod top;
mod view;
mod watch;
mod wish;

use std::ffi::OsString;
use std::io::{self, Write};
use std::iter::once;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Parser;
use kvcached_control::ControlError;

use crate::args::{Args, Command};

/// Exit code: done, also where there was something to warn about.
pub const EXIT_OK: i32 = 0;
/// Exit code: something failed; `err` says what.
pub const EXIT_FAILED: i32 = 1;
/// Exit code: the command line makes no sense; `err` says why.
pub const EXIT_USAGE: i32 = 2;

/// Exit code: an instance was asked for a change that is not in force yet, or has not answered; `out` says which.
pub const EXIT_UNSETTLED: i32 = 3;

/// The words for [`run`] of a program whose name is the first of `args`: `kvtop` is `kvctl top`.
pub fn words(args: impl IntoIterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut args = args.into_iter();
    let is_kvtop =
        args.next().is_some_and(|program| Path::new(&program).file_name() == Some("kvtop".as_ref()));
    is_kvtop.then(|| "top".into()).into_iter().chain(args)
}

/// Runs `kvctl` with `args`, the program's own name left out; returns its exit code.
pub fn run(args: impl IntoIterator<Item = OsString>, out: &mut dyn Write, err: &mut dyn Write) -> i32 {
    let code = match Args::try_parse_from(once(OsString::from("kvctl")).chain(args)) {
        Ok(args) => match execute(args, out, err) {
            Ok(code) => code,
            // Whoever read our output has seen enough: no failure of ours.
            Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => EXIT_OK,
            Err(failure) => {
                let _ = writeln!(err, "error: {failure}"); // nobody is left to tell
                EXIT_FAILED
            }
        },
        Err(usage) => explain(&usage, out, err),
    };
    let _ = err.flush();
    code
}

/// Why a command could not do what it is for. The message says what to do.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("cannot write the result: {0}")]
    Output(#[from] io::Error),
    #[error("there is no live instance {0:?}; kvctl list shows those that there are")]
    NoInstance(String),
    #[error("there is no record of an instance {0:?}")]
    NoRecord(String),
    #[error("instance {0:?} lives by no memory budget, of which a limit could be a part; use kvctl limit")]
    NoBudget(String),
    #[error("cannot wait for a signal: {0}")]
    Signals(#[source] io::Error),
    #[error(
        "cannot run {}: {source}; give the Python that runs the engines: kvctl doctor --python PATH, or KVCACHED_PYTHON",
        python.display()
    )]
    Python { python: PathBuf, source: io::Error },
    #[error(
        "{} has no kvcached with a doctor; install the wheel there, or give the Python that runs the engines: \
         kvctl doctor --python PATH, or KVCACHED_PYTHON", python.display()
    )]
    NotInPython { python: PathBuf },
    #[error("{} was killed", python.display())]
    PythonKilled { python: PathBuf },
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("standard {0} is no terminal; use kvctl list or kvctl watch")]
    NoTerminal(&'static str),
    #[error("cannot use the terminal: {0}")]
    Terminal(#[source] io::Error),
}

fn execute(args: Args, out: &mut dyn Write, err: &mut dyn Write) -> Result<i32, Failure> {
    let dir = args.dir.unwrap_or_else(kvcached_control::default_dir);
    let mut code = EXIT_OK;
    match args.command {
        Command::List { json } => list::run(&dir, json, out, err)?,
        Command::Limit { name, limit, answer } => {
            code = change::run(&dir, &name, limit, &answer, out, err)?;
        }
        Command::LimitPercent { name, percentage, answer } => {
            let limit = change::limit_of_budget(&dir, &name, percentage)?;
            code = change::run(&dir, &name, limit, &answer, out, err)?;
        }
        Command::Min { name, min, answer } => {
            code = change::run(&dir, &name, min, &answer, out, err)?;
        }
        Command::Delete { name, json } => delete::run(&dir, &name, json, out)?,
        Command::Doctor { python, arguments } => code = doctor::run(python, &arguments, out)?,
        Command::Metrics(metrics) => metrics::run(&dir, &metrics, out, err)?,
        Command::Watch(watch) => watch::run(&dir, &watch, out, err)?,
        // It has written what it could: that its terminal has gone is no failure.
        Command::Top { interval } => return top::run(&dir, interval, out).map(|()| EXIT_OK),
    }
    out.flush()?;
    Ok(code)
}

/// `--help` and `--version` are results, anything else clap has to say is about wrong usage.
fn explain(usage: &clap::Error, out: &mut dyn Write, err: &mut dyn Write) -> i32 {
    let text = usage.render();
    if usage.use_stderr() {
        let _ = write!(err, "{text}");
        return EXIT_USAGE;
    }
    let _ = write!(out, "{text}").and_then(|()| out.flush());
    EXIT_OK
}
