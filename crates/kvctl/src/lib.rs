//! `kvctl`: what a person asks about the instances on this machine.
//!
//! A library, so that the binary and the wheel's console script are the same program. Results go to `out`, everything else to `err`.

mod args;
mod list;
mod size;

use std::ffi::OsString;
use std::io::{self, Write};
use std::iter::once;

use clap::Parser;
use kvcached_control::ControlError;

use crate::args::{Args, Command};

/// Exit code: done, also where there was something to warn about.
pub const EXIT_OK: i32 = 0;
/// Exit code: something failed; `err` says what.
pub const EXIT_FAILED: i32 = 1;
/// Exit code: the command line makes no sense; `err` says why.
pub const EXIT_USAGE: i32 = 2;

/// Runs `kvctl` with `args`, the program's own name left out; returns its exit code.
pub fn run(args: impl IntoIterator<Item = OsString>, out: &mut dyn Write, err: &mut dyn Write) -> i32 {
    let code = match Args::try_parse_from(once(OsString::from("kvctl")).chain(args)) {
        Ok(args) => match execute(&args, out, err) {
            Ok(()) => EXIT_OK,
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

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("cannot write the result: {0}")]
    Output(#[from] io::Error),
}

fn execute(args: &Args, out: &mut dyn Write, err: &mut dyn Write) -> Result<(), Failure> {
    let dir = args.dir.clone().unwrap_or_else(kvcached_control::default_dir);
    match args.command {
        Command::List { json } => list::run(&dir, json, out, err)?,
    }
    Ok(out.flush()?)
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
