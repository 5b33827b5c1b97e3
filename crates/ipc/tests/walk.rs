//! A first walk through the protocol: two ranks, nothing fails.
#![allow(clippy::unwrap_used, clippy::panic)]

use kvcached_ipc::coordinator::{Coordinator, Effect, Event, Op, Outcome};
use kvcached_ipc::message::{Body, Created, Member};
use kvcached_ipc::rank::{self, Rank, Work, WorkResult};
use kvcached_ipc::runs::Runs;
use kvcached_ipc::wire::{Decoded, decode, encode};

const MEMBERS: [Member; 2] = [Member { stage: 0, rank: 0 }, Member { stage: 1, rank: 0 }];

fn work(work: &Work) -> Body {
    match work {
        Work::Describe => Body::Created(Created {
            page_bytes: 2 << 20,
            virtual_bytes: 8 << 20,
            num_pages: 8,
            blocks_per_page: 4,
            ids_per_page: 4,
            mapped: Runs::none(),
            lost: Runs::none(),
        }),
        Work::Map { pages } => Body::Mapped { new: Runs::from_pages(pages).unwrap() },
        Work::Prepare { .. } => Body::Prepared,
        Work::Commit { .. } => Body::Committed,
        Work::Synchronise => Body::Passed,
        other => panic!("{other:?}"),
    }
}

/// Carries effects until nothing moves; every frame goes through its bytes.
fn carry(coordinator: &mut Coordinator, ranks: &mut [Rank], event: Event) -> Vec<Outcome> {
    let (mut outcomes, mut effects) = (vec![], coordinator.step(event));
    while !effects.is_empty() {
        let effect = effects.remove(0);
        let (member, frame) = match effect {
            Effect::Send { member, frame } => (member, frame),
            Effect::Finish { outcome, .. } => {
                outcomes.push(outcome);
                continue;
            }
            Effect::Started { .. } | Effect::Arm { .. } => continue,
            Effect::Broken { why, .. } => panic!("{why}"),
        };
        let Decoded::Frame(frame) = decode(&encode(&frame)).unwrap() else { panic!("unknown kind") };
        let mut theirs = ranks[member].step(rank::Event::Received { connection: 7, frame });
        while !theirs.is_empty() {
            match theirs.remove(0) {
                rank::Effect::Send { frame, .. } => {
                    effects.extend(coordinator.step(Event::Received { member, frame }))
                }
                rank::Effect::Run(todo) => {
                    let result = WorkResult { beside_bytes: 0, body: work(&todo) };
                    theirs.extend(ranks[member].step(rank::Event::Worked { result }));
                }
                rank::Effect::Close { .. } => {}
            }
        }
    }
    outcomes
}

#[test]
fn a_term_from_hello_to_bye() {
    let mut coordinator = Coordinator::new(0, 1, MEMBERS.to_vec(), vec![]);
    let mut ranks = MEMBERS.map(|member| Rank::new(member, 0, 8));
    let begun = carry(&mut coordinator, &mut ranks, Event::Begin);
    assert!(matches!(&begun[..], [Outcome::Begun { created }] if created.len() == 2));
    let mut done = |op| carry(&mut coordinator, &mut ranks, Event::Start { op });
    assert_eq!(done(Op::Map(vec![1, 2])), [Outcome::Mapped { new: vec![1, 2] }]);
    assert_eq!(done(Op::Unmap(vec![1])), [Outcome::Unmapped]);
    assert_eq!(done(Op::Barrier), [Outcome::Passed]);
    assert_eq!(done(Op::Bye), [Outcome::Gone]);
    assert_eq!(done(Op::Barrier), [Outcome::Failed { detail: "the term has ended".to_owned() }]);
}
