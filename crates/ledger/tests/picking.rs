//! Examples that a person can check by hand: which blocks are picked, what refuses and changes nothing.
#![allow(clippy::unwrap_used)]

use kvcached_ledger::{
    BlockError, ClaimPlan, EpochError, FreeOutcome, Layout, LayoutError, Ledger, PageOrder, PageState,
    RetirePolicy, Transition, TransitionError,
};

/// 4 blocks a page, ids 10 apart.
fn layout(num_blocks: u32) -> Layout {
    Layout { num_blocks, blocks_per_page: 4, ids_per_page: 10, order: PageOrder::LowestFirst }
}

fn ledger(num_blocks: u32, policy: RetirePolicy) -> Ledger {
    Ledger::new(layout(num_blocks), policy).unwrap()
}

fn back_all(ledger: &mut Ledger) {
    let pages = ledger.plan_pages(u32::MAX);
    ledger.backed(&pages).unwrap();
}

/// A ledger of backed pages with these numbers of blocks held in each.
fn holding(held: &[u32], policy: RetirePolicy) -> Ledger {
    let mut ledger = ledger(4 * held.len() as u32, policy);
    back_all(&mut ledger);
    for (page, &count) in (0..).zip(held) {
        ledger.claim(&(0..count).map(|slot| page * 10 + slot).collect::<Vec<_>>()).unwrap();
    }
    ledger
}

#[test]
fn nothing_is_issued_from_pages_without_memory() {
    let mut ledger = ledger(8, RetirePolicy::Synchronous);
    assert_eq!((ledger.backed_free_blocks(), ledger.available_blocks()), (0, 8));
    assert_eq!(ledger.alloc(1), None);
    assert_eq!(ledger.alloc(0), Some(vec![]));
    assert_eq!(ledger.plan_backing(1, u32::MAX), [0]);
    assert_eq!(ledger.alloc(1), None, "still mapping");
    assert_eq!(ledger.available_blocks(), 8, "a page in motion is not lost");
    ledger.backed(&[0]).unwrap();
    assert_eq!(ledger.alloc(5), None);
    assert_eq!(ledger.alloc(4), Some(vec![0, 1, 2, 3]));
}

#[test]
fn the_smallest_page_that_holds_the_remainder() {
    let mut ledger = holding(&[1, 2, 3, 0], RetirePolicy::Synchronous);
    assert_eq!(ledger.alloc(2), Some(vec![12, 13]), "page 1 fits exactly");
    assert_eq!(ledger.alloc(1), Some(vec![23]), "page 2 fits exactly");
    assert_eq!(ledger.alloc(1), Some(vec![1]), "in use before idle");
    assert_eq!(ledger.alloc(3), Some(vec![30, 31, 32]), "only the idle page holds three");
}

#[test]
fn else_the_page_with_the_most_free_blocks() {
    let mut ledger = holding(&[3, 1, 2], RetirePolicy::Synchronous);
    // 3 from page 1, then the two of page 2 hold the rest exactly.
    assert_eq!(ledger.alloc(5), Some(vec![11, 12, 13, 22, 23]));
}

#[test]
fn pages_with_as_many_free_blocks_go_in_order() {
    let mut ledger = holding(&[3, 2, 3, 2, 2, 4, 3, 2], RetirePolicy::Synchronous);
    // Two of each page with two, then ones: the last of them holds the rest exactly.
    assert_eq!(ledger.alloc(10), Some(vec![12, 13, 32, 33, 42, 43, 72, 73, 3, 23]));
    assert_eq!(ledger.alloc(2), None);
    let mut ledger = holding(&[2, 2, 2, 3], RetirePolicy::Synchronous);
    assert_eq!(ledger.alloc(5), Some(vec![2, 3, 12, 13, 33]), "page 3 holds the last one exactly");
}

#[test]
fn idle_pages_wait_for_what_pages_in_use_cannot_hold() {
    let mut ledger = holding(&[2, 0, 0], RetirePolicy::Synchronous);
    assert_eq!(ledger.alloc(6), Some(vec![10, 11, 12, 13, 2, 3]));
    assert_eq!(ledger.state(2), Some(PageState::Reserved));
}

#[test]
fn the_last_page_may_be_short() {
    let mut ledger = ledger(6, RetirePolicy::Synchronous);
    back_all(&mut ledger);
    assert_eq!(ledger.occupancy(1), Some((0, 2)));
    assert_eq!(ledger.occupancy(2), None);
    assert_eq!(ledger.alloc(2), Some(vec![10, 11]), "smallest fit");
    assert_eq!(ledger.free(&[12]), Err(BlockError::Unknown { id: 12 }));
    assert_eq!(ledger.free(&[4]), Err(BlockError::Unknown { id: 4 }), "padding of page 0");
    assert_eq!(ledger.page_of(11), Some(1));
    assert_eq!(ledger.page_of(u32::MAX), None);
}

#[test]
fn highest_pages_first() {
    let highest = Layout { order: PageOrder::HighestFirst, ..layout(12) };
    let mut ledger = Ledger::new(highest, RetirePolicy::Synchronous).unwrap();
    assert_eq!(ledger.plan_backing(5, u32::MAX), [2, 1]);
    ledger.backed(&[2, 1]).unwrap();
    assert_eq!(ledger.alloc(5), Some(vec![20, 21, 22, 23, 10]));
    ledger.free(&[20, 21, 22, 23, 10]).unwrap();
    assert_eq!(ledger.plan_unbacking(1, 0, u32::MAX), [1], "the lowest goes first");
}

#[test]
fn a_refused_free_changes_nothing() {
    let mut ledger = holding(&[3, 4], RetirePolicy::Asynchronous);
    ledger.claim(&[3]).unwrap();
    ledger.pin(0).unwrap();
    ledger.free(&[2]).unwrap();
    assert!(ledger.set_aside(1));
    let before = ledger.clone();
    for (ids, error) in [
        (vec![1, 1], BlockError::Duplicate { id: 1 }),
        (vec![10, 11, 10], BlockError::Duplicate { id: 10 }),
        (vec![1, 7], BlockError::Unknown { id: 7 }),
        (vec![1, 20], BlockError::Unknown { id: 20 }),
        (vec![10, 0], BlockError::Pinned { id: 0 }),
        (vec![10, 2], BlockError::NotHeld { id: 2 }), // set aside, never issued
    ] {
        assert_eq!(ledger.free(&ids), Err(error));
        assert_eq!(ledger, before);
    }
    ledger.free(&[10, 11]).unwrap();
    let before = ledger.clone();
    assert_eq!(ledger.free(&[12, 11]), Err(BlockError::NotHeld { id: 11 }));
    assert_eq!(ledger, before);
}

#[test]
fn claims_take_these_very_blocks_or_nothing() {
    let mut ledger = ledger(12, RetirePolicy::Synchronous);
    assert_eq!(ledger.plan_claim(&[21, 2, 20]), Ok(ClaimPlan::Map(vec![0, 2])));
    assert_eq!(ledger.plan_claim(&[21]), Ok(ClaimPlan::InMotion));
    assert_eq!(ledger.claim(&[21]), Err(BlockError::Unbacked { id: 21, page: 2 }));
    ledger.backed(&[0, 2]).unwrap();
    assert_eq!(ledger.plan_claim(&[21, 2, 20]), Ok(ClaimPlan::Ready));
    ledger.claim(&[21, 2, 20]).unwrap();
    let before = ledger.clone();
    assert_eq!(ledger.claim(&[22, 2]), Err(BlockError::Held { id: 2 }));
    assert_eq!(ledger.plan_claim(&[22, 22]), Err(BlockError::Duplicate { id: 22 }));
    assert_eq!(ledger.plan_claim(&[14]), Err(BlockError::Unknown { id: 14 }));
    assert_eq!(ledger.claim(&[22, 10]), Err(BlockError::Unbacked { id: 10, page: 1 }));
    assert_eq!(ledger, before);
    assert_eq!(ledger.plan_claim(&[10]), Ok(ClaimPlan::Map(vec![1])));
    ledger.backing_failed(&[1], &[1]).unwrap();
    assert_eq!(ledger.plan_claim(&[3, 10]), Err(BlockError::Quarantined { id: 10, page: 1 }));
}

#[test]
fn a_retired_page_waits_for_its_epoch() {
    let mut ledger = holding(&[1, 1], RetirePolicy::Asynchronous);
    assert_eq!(ledger.begin_epoch(), 1);
    assert_eq!(ledger.free(&[0]).unwrap(), FreeOutcome { retired: vec![0], reserved: vec![] });
    assert_eq!(ledger.begin_epoch(), 2);
    assert_eq!(ledger.free(&[10]).unwrap(), FreeOutcome { retired: vec![1], reserved: vec![] });
    assert_eq!(ledger.plan_unbacking(0, 0, u32::MAX), [0u32; 0]);
    assert_eq!(ledger.release_through(1), Ok(vec![0]));
    assert_eq!(ledger.release_through(1), Ok(vec![]), "again: nothing");
    assert_eq!(ledger.state(1), Some(PageState::Retired(2)));
    assert_eq!(ledger.release_through(3), Err(EpochError { epoch: 3, latest: 2 }));
    assert_eq!(ledger.plan_unbacking(0, 0, u32::MAX), [0]);
    assert_eq!(ledger.release_through(2), Ok(vec![1]));
}

#[test]
fn reuse_cancels_a_retirement() {
    let mut ledger = holding(&[1], RetirePolicy::Asynchronous);
    let first = ledger.begin_epoch();
    ledger.free(&[0]).unwrap();
    assert_eq!(ledger.alloc(1), Some(vec![0]));
    assert_eq!(ledger.state(0), Some(PageState::InUse));
    let second = ledger.begin_epoch();
    ledger.free(&[0]).unwrap();
    assert_eq!(ledger.release_through(first), Ok(vec![]), "retired again, by the later epoch");
    assert_eq!(ledger.release_through(second), Ok(vec![0]));
}

#[test]
fn with_no_step_outstanding_nothing_retires() {
    for policy in [RetirePolicy::Synchronous, RetirePolicy::Asynchronous] {
        let mut ledger = holding(&[1], policy);
        let epoch = ledger.begin_epoch();
        ledger.release_through(epoch).unwrap();
        assert_eq!(ledger.free(&[0]).unwrap(), FreeOutcome { retired: vec![], reserved: vec![0] });
    }
    let mut ledger = holding(&[1], RetirePolicy::Synchronous);
    ledger.begin_epoch();
    assert_eq!(ledger.free(&[0]).unwrap().reserved, [0], "synchronous pools never retire");
}

#[test]
fn blocks_set_aside_go_first() {
    let mut ledger = holding(&[2, 0], RetirePolicy::Synchronous);
    assert!(ledger.set_aside(3));
    assert!(ledger.set_aside(1));
    assert!(!ledger.set_aside(3), "two are left");
    assert_eq!((ledger.set_aside_blocks(), ledger.backed_free_blocks()), (4, 6));
    assert_eq!(ledger.held_blocks(), 2);
    assert_eq!(ledger.alloc(3), Some(vec![10, 11, 12]));
    assert_eq!(ledger.release_set_aside(), FreeOutcome::default(), "block 13 leaves page 1 in use");
    assert_eq!(ledger.held_blocks(), 5);
    ledger.free(&[10, 11, 12]).unwrap();
    assert!(ledger.set_aside(4));
    assert_eq!(ledger.release_set_aside().reserved, [1]);
}

#[test]
fn quarantined_blocks_are_not_available() {
    let mut ledger = ledger(12, RetirePolicy::Synchronous);
    let pages = ledger.plan_backing(12, u32::MAX);
    ledger.backing_failed(&pages, &[1]).unwrap();
    assert_eq!((ledger.available_blocks(), ledger.held_blocks()), (8, 0));
    let pages = ledger.plan_backing(12, u32::MAX);
    assert_eq!(pages, [0, 2]);
    ledger.backed(&pages).unwrap();
    assert_eq!(ledger.plan_unbacking(0, 0, u32::MAX), [2, 0]);
    ledger.unbacking_failed(&[2, 0], &[2], &[0]).unwrap();
    assert_eq!((ledger.state(0), ledger.state(2)), (Some(PageState::Reserved), Some(PageState::Quarantined)));
    assert_eq!(ledger.available_blocks(), 4);
}

#[test]
fn reports_about_pages_that_are_not_in_motion_change_nothing() {
    let mut ledger = ledger(12, RetirePolicy::Synchronous);
    let pages = ledger.plan_backing(8, u32::MAX);
    let before = ledger.clone();
    let refused = |page, from, transition| Err(TransitionError { page, from, transition });
    let (free, mapping) = (Some(PageState::Free), Some(PageState::Mapping));
    assert_eq!(ledger.backed(&[0, 2]), refused(2, free, Transition::FinishMapping));
    assert_eq!(ledger.backed(&[0, 0]), refused(0, mapping, Transition::FinishMapping));
    assert_eq!(ledger.backed(&[9]), refused(9, None, Transition::FinishMapping));
    assert_eq!(ledger.unbacked(&[0]), refused(0, mapping, Transition::FinishUnmapping));
    assert_eq!(ledger.backing_failed(&pages, &[2]), refused(2, free, Transition::Quarantine));
    assert_eq!(ledger.unbacking_failed(&pages, &[], &[0]), refused(1, mapping, Transition::FinishUnmapping));
    assert_eq!(ledger, before);
}

#[test]
fn clear_spares_the_pinned_block() {
    let mut ledger = holding(&[2, 1, 0], RetirePolicy::Asynchronous);
    ledger.pin(0).unwrap();
    ledger.begin_epoch();
    ledger.free(&[10]).unwrap();
    assert!(ledger.set_aside(1));
    ledger.clear();
    assert_eq!((ledger.held_blocks(), ledger.set_aside_blocks()), (1, 0));
    assert_eq!(ledger.page_counts().reserved, 2);
    assert_eq!(ledger.occupancy(0), Some((1, 4)));
    ledger.clear_all();
    assert_eq!((ledger.held_blocks(), ledger.page_counts().reserved), (0, 3));
}

#[test]
fn layouts_that_cannot_be() {
    let refuse = |layout: Layout| Ledger::new(layout, RetirePolicy::Synchronous).unwrap_err();
    assert!(matches!(refuse(layout(0)), LayoutError::Empty { .. }));
    assert!(matches!(refuse(Layout { blocks_per_page: 0, ..layout(1) }), LayoutError::Empty { .. }));
    assert!(matches!(refuse(Layout { ids_per_page: 3, ..layout(1) }), LayoutError::Overlap { .. }));
    let wide = Layout { ids_per_page: i32::MAX as u32, ..layout(8) };
    assert!(Ledger::new(wide, RetirePolicy::Synchronous).is_err());
    assert!(Ledger::new(Layout { num_blocks: 5, ..wide }, RetirePolicy::Synchronous).is_ok());
    assert_eq!(
        refuse(wide).to_string(),
        "the highest block id 2147483650 does not fit int32; hint: fewer blocks or larger pages"
    );
}
