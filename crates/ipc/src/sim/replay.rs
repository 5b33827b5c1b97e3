//! Arbitrary bytes as a story: what the fuzzer tells.

use super::Violation;
use super::store::Fault;
use super::world::{Action, Mutant, World};
use crate::coordinator::Op;
use crate::message::Member;

/// After the story everything that can happen does, in so many steps at most.
const REST_STEPS: usize = 20_000;

/// Plays the bytes as what happens to a group of one to four ranks, two bytes a step, then lets everything come to rest. Fails
/// where something happens that must not, or where it does not come to rest.
pub fn replay(story: &[u8]) -> Result<World, Violation> {
    let (ranks, story) = story.split_first().unwrap_or((&2, &[]));
    let members = (0..1 + u16::from(ranks % 4)).map(|rank| Member { stage: rank / 2, rank: rank % 2 });
    let mut world = World::new(members.collect(), 8, vec![0], Mutant::None)?;
    for step in story.chunks_exact(2) {
        if let Some(action) = action(&world, step[0], usize::from(step[1])) {
            world.apply(action)?;
        }
    }
    rest(world)
}

/// What two bytes mean in this world.
fn action(world: &World, what: u8, which: usize) -> Option<Action> {
    let flights = world.flights().len();
    let flight = (flights > 0).then(|| which % flights);
    let member = which % world.seats().len();
    Some(match what % 32 {
        0..=11 => Action::Deliver(flight?),
        12..=13 => Action::Duplicate(flight?),
        14 => Action::Drop(flight?),
        15..=19 => Action::Work { member, fault: Fault::None },
        20 => Action::Work { member, fault: Fault::Clean },
        21 => Action::Work { member, fault: Fault::Lose },
        22..=23 => Action::Deadline(pick(world.armed(), which)?),
        24 => Action::Notice(pick(world.notices(), which)?),
        25 if which < 64 => Action::CrashCoordinator,
        25 => Action::BeginTerm,
        26 if which < 32 => Action::CrashRank(member),
        26 if which < 64 => Action::Cut(member),
        _ => {
            let op = operation(which);
            return world.may_start(&op).then_some(Action::Start(op));
        }
    })
}

fn pick<T>(from: impl Iterator<Item = T>, which: usize) -> Option<T> {
    let mut all: Vec<T> = from.collect();
    (!all.is_empty()).then(|| all.swap_remove(which % all.len()))
}

/// One page or two neighbours, mapped or unmapped, or something that changes none.
fn operation(which: usize) -> Op {
    let first = (which / 4 % 8) as u32;
    let pages = if which & 32 == 0 || first == 7 { vec![first] } else { vec![first, first + 1] };
    match which % 4 {
        0 | 1 => Op::Map(pages),
        2 => Op::Unmap(pages),
        _ => [Op::Barrier, Op::Trim, Op::Room][which / 4 % 3].clone(),
    }
}

/// Lets everything that is under way happen, and deadlines pass when there is nothing else.
fn rest(mut world: World) -> Result<World, Violation> {
    for _ in 0..REST_STEPS {
        let notice = world.notices().next();
        let working = world.seats().iter().position(|seat| seat.running.is_some());
        let armed = world.armed().next();
        let action = if !world.flights().is_empty() {
            Action::Deliver(0)
        } else if let Some(member) = working {
            Action::Work { member, fault: Fault::None }
        } else if let Some(notice) = notice {
            Action::Notice(notice)
        } else if let Some(transaction) = armed {
            Action::Deadline(transaction)
        } else {
            return Ok(world);
        };
        world.apply(action)?;
    }
    Err(Violation(format!("no rest after {REST_STEPS} steps")))
}
