//! Examples of the memory limit that a person can check by hand.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use kvcached_ledger::{
    BlockCounts, BlockError, ClaimPlan, Layout, Ledger, PageOrder, PageState, RetirePolicy, Transition,
    TransitionError,
};

const ALL: u32 = u32::MAX;

/// 4 blocks a page, ids 10 apart.
fn ledger(pages: u32, order: PageOrder) -> Ledger {
    let layout = Layout { num_blocks: 4 * pages, blocks_per_page: 4, ids_per_page: 10, order };
    Ledger::new(layout, RetirePolicy::Asynchronous).unwrap()
}

fn ids(page: u32, count: u32) -> Vec<u32> {
    (0..count).map(|slot| page * 10 + slot).collect()
}

/// Backed pages with these numbers of blocks held in each.
fn holding(held: &[u32]) -> Ledger {
    let mut ledger = ledger(held.len() as u32, PageOrder::LowestFirst);
    let pages = ledger.plan_pages(ALL);
    ledger.backed(&pages).unwrap();
    for (page, &count) in (0..).zip(held) {
        ledger.claim(&ids(page, count)).unwrap();
    }
    ledger
}

fn states(ledger: &Ledger) -> Vec<PageState> {
    (0..ledger.layout().num_pages()).map_while(|page| ledger.state(page)).collect()
}

fn pages_in(ledger: &Ledger, wanted: PageState) -> Vec<u32> {
    (0..).zip(states(ledger)).filter(|(_, state)| *state == wanted).map(|(page, _)| page).collect()
}

fn draining(ledger: &Ledger) -> Vec<u32> {
    (0..ledger.layout().num_pages()).filter(|&page| ledger.is_draining(page)).collect()
}

#[test]
fn pages_without_memory_go_at_once_and_come_back_at_once() {
    for (order, left, first) in [(PageOrder::LowestFirst, [0, 1], 0), (PageOrder::HighestFirst, [3, 4], 4)] {
        let mut ledger = ledger(5, order);
        ledger.set_target(2);
        assert_eq!(pages_in(&ledger, PageState::Free), left);
        assert_eq!((ledger.available_blocks(), ledger.block_counts().withdrawn), (8, 12));
        assert_eq!((ledger.held_blocks(), ledger.excess()), (0, 0));
        assert_eq!(ledger.plan_pages(ALL).len(), 2);
        assert_eq!(ledger.plan_backing(ALL, ALL), [0u32; 0]);
        ledger.set_target(3);
        assert_eq!(pages_in(&ledger, PageState::Free), [2], "the most preferred of those taken out");
        ledger.set_target(1);
        ledger.backing_failed(&left, &[]).unwrap();
        assert_eq!(pages_in(&ledger, PageState::Free), [first]);
    }
}

#[test]
fn a_target_above_the_number_of_pages_is_that_number() {
    let mut ledger = ledger(3, PageOrder::LowestFirst);
    assert_eq!(ledger.target(), 3);
    ledger.set_target(1);
    ledger.set_target(ALL);
    assert_eq!((ledger.target(), ledger.page_counts().free), (3, 3));
}

#[test]
fn shrinking_below_use_drains_and_completes() {
    let mut ledger = holding(&[3, 1, 2, 2, 0]);
    ledger.set_target(2);
    assert_eq!(ledger.excess(), 3);
    assert_eq!(draining(&ledger), [1, 3], "the idle page makes up for one; of 2 and 3 the less preferred");
    assert_eq!(
        ledger.block_counts(),
        BlockCounts { backed: 3, draining: 3 + 2 + 4, ..BlockCounts::default() }
    );
    assert_eq!((ledger.available_blocks(), ledger.held_blocks()), (3, 8));
    assert_eq!(ledger.alloc(4), None);
    assert!(!ledger.set_aside(4));
    assert_eq!(ledger.alloc(3), Some(vec![22, 23, 3]), "none of a page that drains, none of the idle one");

    assert_eq!(ledger.plan_unbacking(ALL, ALL, ALL), [4], "whatever is to be kept");
    assert_eq!((ledger.available_blocks(), ledger.excess()), (0, 3), "what is in motion goes out");
    ledger.unbacked(&[4]).unwrap();
    assert_eq!((ledger.state(4), ledger.excess()), (Some(PageState::Withdrawn), 2));

    let epoch = ledger.begin_epoch();
    assert_eq!(ledger.free(&[10]).unwrap().retired, [1]);
    assert_eq!(draining(&ledger), [3]);
    assert_eq!(ledger.alloc(1), None, "a retired page is idle too");
    assert!(!ledger.has_surplus(0, 0));
    assert_eq!(ledger.release_through(epoch), Ok(vec![1]));
    assert!(ledger.has_surplus(ALL, ALL));
    assert_eq!(ledger.plan_unbacking(ALL, ALL, ALL), [1]);
    ledger.unbacked(&[1]).unwrap();
    assert_eq!(ledger.free(&[30, 31]).unwrap().reserved, [3]);
    assert_eq!(ledger.plan_unbacking(ALL, ALL, ALL), [3]);
    assert_eq!(draining(&ledger), [0u32; 0]);
    ledger.unbacked(&[3]).unwrap();
    assert_eq!((ledger.excess(), ledger.page_counts().withdrawn), (0, 3));
    assert_eq!(ledger.held_blocks(), 8, "no live block was revoked");
}

#[test]
fn what_leaves_already_is_not_made_to_leave_twice() {
    let mut ledger = holding(&[4, 0, 0, 0]);
    ledger.set_target(3);
    assert_eq!(ledger.plan_unbacking(ALL, 0, ALL), [3]);
    assert_eq!(ledger.excess(), 1, "until its memory is gone");
    assert!(!ledger.has_surplus(ALL, 0));
    assert_eq!(ledger.plan_unbacking(ALL, 0, ALL), [0u32; 0]);
    ledger.unbacking_failed(&[3], &[], &[3]).unwrap();
    assert_eq!(ledger.plan_unbacking(ALL, 0, ALL), [3], "once more, as it stayed");
    ledger.unbacking_failed(&[3], &[3], &[]).unwrap();
    assert_eq!(ledger.excess(), 1, "a lost page may still hold memory");
    assert_eq!(ledger.plan_unbacking(ALL, 0, ALL), [2]);
    ledger.unbacked(&[2]).unwrap();
    assert_eq!((ledger.excess(), ledger.alloc(5)), (0, None));
    assert_eq!(ledger.alloc(4), Some(ids(1, 4)));
}

#[test]
fn growth_lets_the_fullest_go_first() {
    let mut ledger = holding(&[3, 1, 2, 4]);
    ledger.set_target(0);
    assert_eq!(draining(&ledger), [0, 1, 2, 3]);
    ledger.set_target(1);
    assert_eq!(draining(&ledger), [0, 1, 2]);
    ledger.set_target(2);
    assert_eq!(draining(&ledger), [1, 2]);
    assert_eq!(ledger.alloc(1), Some(vec![3]));
    ledger.free(&[0, 1, 2]).unwrap();
    assert_eq!(draining(&ledger), [1, 2], "those that drain go on, though page 0 is as empty now");
    ledger.set_target(3);
    assert_eq!(draining(&ledger), [1]);
    ledger.set_target(4);
    assert_eq!((draining(&ledger), ledger.excess()), (vec![], 0));
    assert_eq!(ledger.backed_free_blocks(), 3 + 3 + 2);
}

#[test]
fn a_target_of_nothing_spares_the_pinned_block() {
    let mut ledger = holding(&[1, 1, 0]);
    ledger.pin(0).unwrap();
    ledger.set_target(0);
    assert_eq!((ledger.target(), ledger.excess()), (0, 2));
    assert_eq!(draining(&ledger), [0, 1]);
    assert_eq!(ledger.alloc(1), None, "the pinned page stays, but no other block of it is issued");
    ledger.set_target(1);
    assert_eq!(draining(&ledger), [1]);
    assert_eq!(ledger.alloc(3), Some(vec![1, 2, 3]));
    ledger.pin(10).unwrap();
    assert_eq!(draining(&ledger), [0], "a page that drains is let go when it is pinned");
    ledger.free(&ids(0, 4)).unwrap();
    let pages = ledger.plan_unbacking(ALL, ALL, ALL);
    assert_eq!(pages, [2, 0]);
    ledger.unbacked(&pages).unwrap();
    assert_eq!((ledger.excess(), ledger.available_blocks()), (0, 3));
    ledger.set_target(0);
    ledger.clear_all();
    assert_eq!(ledger.excess(), 1, "nothing is pinned any longer");
    assert_eq!(ledger.plan_unbacking(ALL, ALL, ALL), [1]);
    ledger.unbacked(&[1]).unwrap();
    assert_eq!(states(&ledger), [PageState::Withdrawn; 3]);
    assert_eq!((ledger.available_blocks(), ledger.block_counts().withdrawn), (0, 12));
}

#[test]
fn a_pin_gives_the_page_that_a_target_of_nothing_denies() {
    let mut ledger = holding(&[1]);
    ledger.set_target(0);
    assert_eq!((ledger.excess(), ledger.alloc(1)), (1, None));
    ledger.pin(0).unwrap();
    assert_eq!((ledger.excess(), ledger.alloc(1)), (0, None), "the page, and no other block of it");
    ledger.clear();
    assert_eq!((ledger.excess(), ledger.held_blocks(), ledger.alloc(1)), (0, 1, None));
    ledger.set_target(1);
    assert_eq!(ledger.alloc(1), Some(vec![1]));
}

#[test]
fn claims_reach_what_the_limit_keeps_but_not_what_it_took_out() {
    let mut ledger = holding(&[1, 4, 0]);
    ledger.set_target(1);
    assert_eq!(draining(&ledger), [0]);
    ledger.claim(&[1]).unwrap();
    assert_eq!(ledger.plan_claim(&[20]), Ok(ClaimPlan::Ready));
    ledger.claim(&[20]).unwrap();
    assert_eq!(draining(&ledger), [0, 2], "the idle page made up for one");
    ledger.free(&[20]).unwrap();
    let pages = ledger.plan_unbacking(0, 0, ALL);
    ledger.unbacked(&pages).unwrap();
    let before = ledger.clone();
    let error = BlockError::Withdrawn { id: 21, page: 2 };
    assert_eq!(ledger.plan_claim(&[2, 21]), Err(error));
    assert_eq!(ledger.claim(&[2, 21]), Err(error));
    assert_eq!(ledger, before);
    assert_eq!(error.to_string(), "block 21 lies in page 2, which the memory limit has taken out");
}

#[test]
fn reports_about_withdrawn_pages_change_nothing() {
    let mut ledger = ledger(2, PageOrder::LowestFirst);
    ledger.set_target(1);
    let before = ledger.clone();
    let refused = |transition| Err(TransitionError { page: 1, from: Some(PageState::Withdrawn), transition });
    assert_eq!(ledger.backed(&[1]), refused(Transition::FinishMapping));
    assert_eq!(ledger.backing_failed(&[1], &[]), refused(Transition::UndoMapping));
    assert_eq!(ledger.unbacked(&[1]), refused(Transition::FinishUnmapping));
    assert_eq!(ledger.unbacking_failed(&[1], &[1], &[]), refused(Transition::Quarantine));
    assert_eq!(ledger, before);
}

#[test]
fn blocks_set_aside_in_a_page_that_drains_are_issued_still() {
    let mut ledger = holding(&[1, 3]);
    assert!(ledger.set_aside(2));
    assert_eq!(ledger.occupancy(0), Some((3, 4)));
    ledger.set_target(0);
    assert_eq!((ledger.backed_free_blocks(), ledger.block_counts().draining), (2, 2));
    assert_eq!(ledger.alloc(3), None);
    assert_eq!(ledger.alloc(2), Some(vec![1, 2]));
}

#[test]
fn a_page_that_empties_saves_another_from_draining() {
    let mut ledger = holding(&[2, 1]);
    ledger.set_target(1);
    assert_eq!(draining(&ledger), [1]);
    assert_eq!(ledger.free(&[1, 0]).unwrap().reserved, [0]);
    assert_eq!((draining(&ledger), ledger.alloc(2)), (vec![], Some(vec![11, 12])));
}

#[test]
fn giving_back_what_was_set_aside_may_save_another_page_from_draining() {
    let mut ledger = holding(&[1, 0]);
    assert!(ledger.set_aside(3));
    ledger.free(&[0]).unwrap();
    ledger.claim(&[10]).unwrap();
    ledger.set_target(1);
    assert_eq!(draining(&ledger), [1], "of one held block, not of three set aside");
    assert_eq!(ledger.release_set_aside().reserved, [0]);
    assert_eq!(draining(&ledger), [0u32; 0]);
}

#[test]
fn what_is_on_hand_keeps_reserved_pages() {
    let mut ledger = holding(&[2, 0, 0, 0]);
    assert!(!ledger.has_surplus(3, 0), "all are to be kept");
    assert!(!ledger.has_surplus(0, 11), "ten would be left");
    assert!(ledger.has_surplus(0, 10));
    assert_eq!(ledger.clone().plan_unbacking(0, 10, ALL), [3]);
    assert_eq!(ledger.clone().plan_unbacking(1, 0, ALL), [3, 2]);
    assert_eq!(ledger.clone().plan_unbacking(0, 3, ALL), [3, 2]);
    assert_eq!(ledger.plan_unbacking(0, 0, 1), [3]);
    assert!(ledger.set_aside(2));
    assert_eq!(ledger.plan_unbacking(0, 6, ALL), [2], "what is set aside is on hand");
}

#[test]
fn a_page_emptied_over_the_target_is_withdrawn_in_the_same_call() {
    let mut ledger = holding(&[1, 0, 0]);
    let pages = ledger.plan_unbacking(0, 0, ALL);
    assert_eq!(pages, [2, 1]);
    ledger.set_target(2);
    assert_eq!(ledger.excess(), 1);
    ledger.unbacked(&[2]).unwrap();
    ledger.unbacked(&[1]).unwrap();
    assert_eq!(states(&ledger), [PageState::InUse, PageState::Free, PageState::Withdrawn]);
    assert_eq!(ledger.plan_pages(ALL), [1]);
    ledger.set_target(1);
    ledger.backing_failed(&[1], &[]).unwrap();
    assert_eq!(ledger.state(1), Some(PageState::Withdrawn));
}

#[test]
fn a_lost_page_uses_up_the_target() {
    let mut ledger = ledger(3, PageOrder::LowestFirst);
    let pages = ledger.plan_pages(1);
    ledger.backing_failed(&pages, &pages).unwrap();
    ledger.set_target(1);
    assert_eq!((ledger.excess(), ledger.available_blocks()), (0, 0));
    ledger.set_target(2);
    assert_eq!(pages_in(&ledger, PageState::Free), [1]);
    ledger.set_target(0);
    assert_eq!(ledger.excess(), 1, "for good");
    assert!(!ledger.has_surplus(0, 0));
}

/// Every order of three shrinkings and growings, before and between driver calls.
#[test]
fn each_page_is_given_out_once_in_every_order_of_limits() {
    let targets = [0u32, 1, 3, 4];
    for order in [PageOrder::LowestFirst, PageOrder::HighestFirst] {
        for code in 0..targets.len().pow(4) {
            let step = |at: u32| targets[code / targets.len().pow(at) % targets.len()];
            let mut ledger = ledger(4, order);
            let mut mapped = BTreeSet::new();
            for at in 0..4 {
                ledger.set_target(step(at));
                let pages = ledger.plan_pages(2);
                assert!(pages.iter().all(|&page| mapped.insert(page)), "{pages:?} of {code}");
                ledger.set_target(step((at + 1) % 4));
                ledger.backed(&pages).unwrap();
                assert!(mapped.len() as u32 <= 4);
                for page in ledger.plan_unbacking(ALL, 0, ALL) {
                    assert!(mapped.remove(&page));
                    ledger.unbacked(&[page]).unwrap();
                }
                assert_eq!(ledger.excess(), 0);
                assert_eq!(mapped.len() as u32, ledger.page_counts().occupied());
            }
            ledger.set_target(4);
            let rest = ledger.plan_pages(ALL);
            ledger.backed(&rest).unwrap();
            assert!(rest.into_iter().all(|page| mapped.insert(page)));
            let issued: BTreeSet<u32> = ledger.alloc(16).unwrap().into_iter().collect();
            assert_eq!((mapped.len(), issued.len()), (4, 16));
        }
    }
}

#[test]
fn pages_that_freeing_would_empty() {
    let mut ledger = holding(&[2, 4, 1]);
    ledger.pin(20).unwrap();
    assert_eq!(ledger.emptied_by(&[]), Ok(0));
    assert_eq!(ledger.emptied_by(&[13, 1, 10, 0, 12]), Ok(1));
    assert_eq!(ledger.emptied_by(&[13, 1, 10, 0, 12, 11]), Ok(2));
    assert_eq!(ledger.emptied_by(&[13, 20]), Err(BlockError::Pinned { id: 20 }));
    assert_eq!(ledger.emptied_by(&[13, 2]), Err(BlockError::NotHeld { id: 2 }));
    assert_eq!(ledger.emptied_by(&[13, 0, 13]), Err(BlockError::Duplicate { id: 13 }));
    assert_eq!(ledger.emptied_by(&[9]), Err(BlockError::Unknown { id: 9 }));
    assert_eq!(ledger.emptied_by(&[90]), Err(BlockError::Unknown { id: 90 }));
    assert!(ledger.set_aside(1));
    assert_eq!(ledger.emptied_by(&[0, 1]), Ok(0), "a block of page 0 is set aside");
}
