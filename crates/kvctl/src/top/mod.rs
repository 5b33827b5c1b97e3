//! `kvctl top`: what keys do and what is drawn are pure ([`state`], [`draw`]); here are the clock, the keys and the asking.

mod bar;
mod draw;
mod state;
mod terminal;

use std::io::{self, IsTerminal, Write, stdin, stdout};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, KeyEvent, KeyEventKind};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::Failure;
use crate::change::ask;
use crate::interrupts::{Interrupts, Woken};
use crate::top::state::{Action, State};
use crate::top::terminal::Session;
use crate::view::look;
use crate::wish::Wish;

/// Longest time in which an answer or a new size of the terminal goes unnoticed.
const LONGEST_WAIT: Duration = Duration::from_millis(100);
/// How long an instance may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

pub(crate) fn run(dir: &Path, interval: Duration, out: &mut dyn Write) -> Result<(), Failure> {
    let stdin = stdin();
    for (stream, is_terminal) in [("output", stdout().is_terminal()), ("input", stdin.is_terminal())] {
        if !is_terminal {
            return Err(Failure::NoTerminal(stream));
        }
    }
    // A directory that cannot be used is told before the screen is taken.
    let state = State::new(look(dir)?, colours_wanted());
    let interrupts = Interrupts::listen(&[SIGINT, SIGTERM, SIGHUP]).map_err(Failure::Signals)?;
    let mut session = Session::open(out).map_err(Failure::Terminal)?;
    let done = show(dir, interval, state, &mut session, &|wait| interrupts.wait(wait, Some(&stdin)));
    drop(session);
    let is_over = || interrupts.wait(Duration::ZERO, Some(&stdin)).is_ok_and(|woken| woken == Woken::End);
    match done {
        // The terminal went while it was drawn on: the same end, seen earlier.
        Err(Failure::Terminal(_)) if is_over() => Ok(()),
        done => done,
    }
}

/// Until a key or `wait` ends it.
fn show(
    dir: &Path,
    interval: Duration,
    mut state: State,
    session: &mut Session<'_>,
    wait: &dyn Fn(Duration) -> io::Result<Woken>,
) -> Result<(), Failure> {
    let (tell, answers) = channel();
    let mut next_look = Instant::now() + interval;
    let mut is_stale = true;
    loop {
        if is_stale || session.is_resized().map_err(Failure::Terminal)? {
            session.draw(|frame| draw::screen(frame, &state)).map_err(Failure::Terminal)?;
            is_stale = false;
        }
        let left = next_look.saturating_duration_since(Instant::now());
        // Not left to `event::poll`, which for a terminal that has gone reads for ever.
        let keys = match wait(left.min(LONGEST_WAIT)).map_err(Failure::Signals)? {
            Woken::End => return Ok(()),
            Woken::Input => keys_typed().map_err(Failure::Terminal)?,
            Woken::Time => Vec::new(),
        };
        for key in keys {
            is_stale = true;
            match state.key(key) {
                Action::Nothing => {}
                Action::Quit => return Ok(()),
                Action::Ask(name, wish) => ask_aside(dir.to_path_buf(), name, wish, tell.clone()),
            }
        }
        let answer = answers.try_recv();
        if answer.is_ok() || Instant::now() >= next_look {
            state.message = answer.unwrap_or(state.message);
            state.update(look(dir)?);
            next_look = Instant::now() + interval;
            is_stale = true;
        }
    }
}

/// What there is to read, without waiting.
fn keys_typed() -> io::Result<Vec<KeyEvent>> {
    let mut keys = Vec::new();
    while event::poll(Duration::ZERO)? {
        keys.extend(event::read()?.as_key_event().filter(|key| key.kind != KeyEventKind::Release));
    }
    Ok(keys)
}

/// Asks without holding up the screen. Nobody waits for the thread: it owns what it needs, and ends with the process.
fn ask_aside(dir: PathBuf, name: String, wish: Wish, tell: Sender<String>) {
    thread::spawn(move || {
        let answer = match ask(&dir, &name, wish, PATIENCE) {
            Ok(report) => report.sentence(),
            Err(error) => error.to_string(),
        };
        let _ = tell.send(answer); // the screen may have gone
    });
}

/// See <https://no-color.org>.
fn colours_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
