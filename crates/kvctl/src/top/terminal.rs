//! The terminal, taken and given back.

use std::io::{self, Write, stdout};
use std::mem::ManuallyDrop;
use std::panic::{self, PanicHookInfo};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::layout::Size;
use ratatui::{Frame, Terminal};

type Hook = dyn Fn(&PanicHookInfo<'_>) + Send + Sync;

/// A screen of our own. The terminal is as it was once this is dropped.
pub(crate) struct Session<'a> {
    /// Never dropped: that would show the cursor again, and panic where the terminal has gone and standard error with it.
    terminal: ManuallyDrop<Terminal<CrosstermBackend<&'a mut dyn Write>>>,
    drawn: Size,
    is_taken: Arc<AtomicBool>,
    /// What a panic did before.
    hook: Arc<Hook>,
}

impl<'a> Session<'a> {
    pub(crate) fn open(out: &'a mut dyn Write) -> io::Result<Self> {
        let terminal = ManuallyDrop::new(Terminal::new(CrosstermBackend::new(out))?);
        let is_taken = Arc::new(AtomicBool::new(true));
        let hook: Arc<Hook> = panic::take_hook().into();
        panic::set_hook(restoring_hook(&is_taken, &hook));
        let mut session = Self { terminal, drawn: Size::ZERO, is_taken, hook };
        enable_raw_mode()?;
        // Not `Terminal::clear`: it waits for the terminal to say where its cursor is.
        execute!(session.terminal.backend_mut(), EnterAlternateScreen, Clear(ClearType::All))?;
        Ok(session)
    }

    /// Whether the terminal has another size than when it was drawn on.
    pub(crate) fn is_resized(&mut self) -> io::Result<bool> {
        Ok(self.terminal.size()? != self.drawn)
    }

    pub(crate) fn draw(&mut self, screen: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.drawn = self.terminal.size()?;
        self.terminal.draw(screen).map(|_| ())
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        restore(&self.is_taken, self.terminal.backend_mut());
        // While a panic unwinds, hooks can neither be taken nor set.
        if !thread::panicking() {
            let hook = Arc::clone(&self.hook);
            panic::set_hook(Box::new(move |info| hook(info)));
        }
    }
}

/// A panic is told before anything is dropped: it would be told to the screen that goes away. Of other threads the screen survives.
fn restoring_hook(is_taken: &Arc<AtomicBool>, hook: &Arc<Hook>) -> Box<Hook> {
    let (is_taken, hook) = (Arc::clone(is_taken), Arc::clone(hook));
    let drawing = thread::current().id();
    Box::new(move |info| {
        if thread::current().id() == drawing {
            restore(&is_taken, &mut stdout());
        }
        hook(info);
    })
}

/// Once: to leave a screen twice would put the cursor on what was written since. Each step whether the one before it worked or not.
fn restore(is_taken: &AtomicBool, out: &mut impl Write) {
    if is_taken.swap(false, Ordering::Relaxed) {
        let _ = execute!(out, LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
}
