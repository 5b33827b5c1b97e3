//! One scenario, over one device, under one plan of failures: every answer, every page and every byte is checked.

use std::collections::BTreeMap;

use kvcached_vmm::sim::Faulty;
use kvcached_vmm::{FTensor, Unbacked, VmmError};

use super::ground::{Ground, last_words, words_of};
use super::model::{Effort, Model, State, is_fault};
use super::scenario::{Answer, Op, Plan};
use super::setup::Setup;

/// What a run came to.
#[derive(Debug, Clone, Copy, Default)]
pub struct Ran {
    /// Driver calls until there was a range.
    pub built: u32,
    /// All driver calls.
    pub calls: u32,
    pub lost_pages: bool,
    pub leaked: bool,
    pub half_committed: bool,
    pub abort_lost: bool,
    /// The range could not be given back.
    pub stuck: bool,
}

/// Runs a scenario whose range, and whose device, are its own.
pub fn run(ground: &Ground, setup: Setup, ops: &[Op], plan: Plan) -> Ran {
    let driver = Faulty::new(ground.driver());
    plan.begin(&driver);
    let calls = || driver.calls().total();
    let mut ran = Ran::default();
    match setup.reserve(driver.clone()) {
        Ok(range) => {
            ran.built = calls();
            assert_eq!(plan.hits(1..=ran.built), 0);
            work(ground, setup, ops, plan, &driver, &range, &mut ran);
            drop(range);
        }
        Err(VmmError::Driver { page: None, source }) => {
            is_fault(&source);
            assert!(plan.hits(1..=calls()) > 0);
            ran.built = calls();
        }
        Err(other) => panic!("{other}"),
    }
    ran.calls = calls();
    ran.stuck = ground.check_end(plan.passes());
    ran
}

fn work(
    ground: &Ground,
    setup: Setup,
    ops: &[Op],
    plan: Plan,
    driver: &Faulty,
    range: &FTensor,
    ran: &mut Ran,
) {
    let mut model = Model::new(setup, range);
    let mut content = Content::default();
    if plan == Plan::Healthy {
        ground.check_mappings(range, &model);
    }
    for op in ops {
        let before = driver.calls().total();
        let got = op.run(range);
        let after = driver.calls().total();
        let effort = Effort { calls: after - before, hits: plan.hits(before + 1..=after) };
        model.step(op, &got, effort, range);
        // Until a call fails all is as in the run without failures.
        if plan == Plan::Healthy || plan.hits(1..=after) > 0 {
            if let Some(held) = ground.held_bytes() {
                model.check_held(range, held);
            }
            ground.check_mappings(range, &model);
        }
        if ground.has_bytes() {
            content.check(ground, range, &model, op, &got);
        }
        ran.lost_pages |= model.count(State::Quarantined) > 0;
        ran.leaked |= model.has_leaked();
        ran.half_committed |= model.is_half_committed();
        ran.abort_lost |= matches!(got, Err(VmmError::AbortLost { .. }));
    }
}

/// What was written to every page that has memory, and when.
#[derive(Debug, Default)]
struct Content {
    salts: BTreeMap<u32, u64>,
    latest: u64,
}

impl Content {
    /// Asserts that mapped pages hold what was written, new pages zeros, and what has no memory zeros too where it may be
    /// read; then writes to the new pages.
    fn check(
        &mut self,
        ground: &Ground,
        range: &FTensor,
        model: &Model,
        op: &Op,
        got: &Result<Answer, VmmError>,
    ) {
        self.salts.retain(|page, _| matches!(model.pages[*page as usize], State::Mapped | State::Prepared));
        // An unmap that failed may have cleared pages that are mapped still.
        let doubtful = match (op, got) {
            (Op::Unmap(_), Err(VmmError::Unmap(failure))) => &failure.still_mapped[..],
            _ => &[],
        };
        for (page, state) in (0..).zip(&model.pages) {
            match (state, self.salts.get(&page)) {
                (State::Mapped, Some(salt)) => {
                    let held = |at: &usize| ground.word(*at) == *salt ^ *at as u64;
                    let words = words_of(range, page);
                    let cleared = doubtful.contains(&page) && words.iter().all(|at| ground.word(*at) == 0);
                    assert!(cleared || words.iter().all(held), "page {page} has lost its content");
                    if cleared {
                        self.write(ground, range, page);
                    }
                }
                (State::Mapped, None) => {
                    let zero = words_of(range, page).iter().all(|at| ground.word(*at) == 0);
                    assert!(zero, "new page {page} is not clean");
                    self.write(ground, range, page);
                }
                (State::Quarantined, _) if !model.is_lost_at_rest() => {}
                (State::Unbacked | State::Prepared | State::Quarantined, _)
                    if range.unbacked() == Unbacked::Zero =>
                {
                    let zero = words_of(range, page).iter().all(|at| ground.word(*at) == 0);
                    assert!(zero, "unbacked page {page} does not read as zeros");
                }
                _ => {}
            }
        }
        if range.unbacked() == Unbacked::Zero {
            self.check_last_rows(ground, range, model);
        }
    }

    /// The last rows belong to no block; they may be read all the same.
    fn check_last_rows(&self, ground: &Ground, range: &FTensor, model: &Model) {
        let all_known = model.is_lost_at_rest() || model.count(State::Quarantined) == 0;
        let blocks: Vec<usize> =
            (0..).zip(&model.pages).flat_map(|(page, _)| words_of(range, page)).collect();
        for at in last_words(range).into_iter().filter(|at| all_known && !blocks.contains(at)) {
            assert_eq!(ground.word(at), 0, "a row at the end, at {at:#x}");
        }
    }

    fn write(&mut self, ground: &Ground, range: &FTensor, page: u32) {
        self.latest += 1;
        let salt = self.latest << 48;
        self.salts.insert(page, salt);
        words_of(range, page).into_iter().for_each(|at| ground.set_word(at, salt ^ at as u64));
    }
}
