//! One group of a rank: the protocol's core, and the thread that does its work to memory.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::message::{Body, Failure, Frame, Member};
use crate::rank::{ConnectionId, Effect, Event, Rank, Work, WorkResult};
use crate::runs::Runs;
use crate::store::Store;

/// Durations of work that are kept.
const MAX_TIMES: usize = 4096;

/// Where a group's frames go.
pub(crate) trait Post: Send + Sync {
    /// Sends without waiting. Whoever is gone gets nothing.
    fn send(&self, connection: ConnectionId, frame: &Frame);

    /// Ends a connection without waiting.
    fn close(&self, connection: ConnectionId);
}

/// One group of a rank.
pub(crate) struct Group {
    store: Arc<dyn Store>,
    post: Arc<dyn Post>,
    state: Mutex<State>,
    changed: Condvar,
    times: Mutex<VecDeque<(&'static str, Duration)>>,
}

struct State {
    rank: Rank,
    /// To be done next.
    work: Option<Work>,
    /// Work is done or to be done.
    busy: bool,
    stopping: bool,
    ended: bool,
}

impl Group {
    /// A group and its thread, which ends after [`Group::stop`].
    pub fn start(
        member: Member,
        number: u32,
        store: Arc<dyn Store>,
        post: Arc<dyn Post>,
    ) -> io::Result<(Arc<Self>, JoinHandle<()>)> {
        let rank = Rank::new(member, number, store.num_pages());
        let state = State { rank, work: None, busy: false, stopping: false, ended: false };
        let group = Arc::new(Group {
            store,
            post,
            state: Mutex::new(state),
            changed: Condvar::new(),
            times: Mutex::default(),
        });
        let worker = Arc::clone(&group);
        let thread = std::thread::Builder::new()
            .name(format!("kvcached-rank-{number}"))
            .spawn(move || worker.run())?;
        Ok((group, thread))
    }

    /// Something happened. What follows is sent before anybody else's event is seen, so that answers leave in order.
    pub fn step(&self, event: Event) {
        let mut state = self.lock();
        self.advance(&mut state, event);
    }

    /// Ends in order. Returns whether the work that was under way has ended by `deadline`, and with it the thread.
    pub fn stop(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        if !state.stopping {
            state.stopping = true;
            self.advance(&mut state, Event::Stop);
            self.changed.notify_all();
        }
        while !state.ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// What was done of late and how long each took, oldest first; forgets them.
    pub fn take_times(&self) -> Vec<(&'static str, Duration)> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }

    fn advance(&self, state: &mut State, event: Event) {
        for effect in state.rank.step(event) {
            match effect {
                Effect::Send { connection, frame } => self.post.send(connection, &frame),
                Effect::Close { connection } => self.post.close(connection),
                Effect::Run(work) => {
                    debug_assert!(state.work.is_none(), "never a second before the first has ended");
                    state.work = Some(work);
                    if !state.busy {
                        state.busy = true;
                        self.changed.notify_all();
                    }
                }
            }
        }
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            let Some(work) = state.work.take() else {
                state.busy = false;
                if state.stopping {
                    state.ended = true;
                    self.changed.notify_all();
                    return;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let began = Instant::now();
            let result = self.work(&work);
            self.note(kind(&work), began.elapsed());
            state = self.lock();
            self.advance(&mut state, Event::Worked { result });
        }
    }

    /// A panic of the store must not leave the other ranks waiting: its pages are lost.
    fn work(&self, work: &Work) -> WorkResult {
        catch_unwind(AssertUnwindSafe(|| self.store.work(work))).unwrap_or_else(|_| {
            tracing::error!(work = kind(work), "a rank's memory panicked");
            let lost = match work {
                Work::Map { pages } | Work::Unmap { pages } | Work::Undo { pages } | Work::Prepare { pages, .. } => {
                    Runs::from_pages(pages).unwrap_or_else(|_| Runs::none())
                }
                _ => Runs::none(),
            };
            let body = match work {
                Work::Abort { .. } => Body::Aborted { lost },
                _ => Body::Failed(Failure {
                    out_of_memory: false,
                    lost,
                    still_mapped: Runs::none(),
                    detail: "the rank panicked at it".to_owned(),
                }),
            };
            WorkResult { beside_bytes: 0, body }
        })
    }

    fn note(&self, kind: &'static str, took: Duration) {
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        if times.len() == MAX_TIMES {
            times.pop_front();
        }
        times.push_back((kind, took));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn kind(work: &Work) -> &'static str {
    match work {
        Work::Describe => "describe",
        Work::Map { .. } => "map",
        Work::Unmap { .. } => "unmap",
        Work::Undo { .. } => "undo",
        Work::Prepare { .. } => "prepare",
        Work::Commit { .. } => "commit",
        Work::Abort { .. } => "abort",
        Work::Synchronise => "synchronise",
        Work::Trim => "trim",
        Work::Room => "room",
    }
}
