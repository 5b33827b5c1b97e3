//! Who may have how much more, and who gives back how much. Pure.

/// One instance in a budget, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Member {
    pub granted: u64,
    pub min: u64,
    /// Refused and still waited for.
    pub shortage: u64,
    /// When it began to wait, or last got something while it did.
    pub since: u64,
    /// What it could give back.
    pub givable: u64,
}

impl Member {
    /// What it has, or may have whenever it wants.
    fn secured(&self) -> u64 {
        self.granted.max(self.min)
    }

    /// What `taker` must leave to it: what is secured, and what it waits for up to a fair share, so that memory which is given back for
    /// it is not taken by somebody else. Of two who wait the one that has waited longer without getting anything goes first: were each to
    /// leave the other its share, two that want more than that would wait for ever.
    fn claim(&self, fair: u64, taker: &Member) -> u64 {
        let goes_first = taker.shortage == 0 || self.since < taker.since;
        let awaited = self.granted.saturating_add(self.shortage).min(fair.max(self.min));
        if goes_first { self.secured().max(awaited) } else { self.secured() }
    }

    /// What others may ask of it. Who waits has nothing to spare.
    fn excess(&self) -> u64 {
        if self.shortage > 0 { 0 } else { self.granted.saturating_sub(self.min).min(self.givable) }
    }
}

fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

/// What `own` may have beyond what it has, beside `others`, and whether it would be more without what is guaranteed to them and
/// awaited by them.
pub(super) fn room(own: &Member, others: &[Member], budget: u64) -> Room {
    let fair = budget / (others.len() as u64 + 1);
    let left = |claims: u64| budget.saturating_sub(claims).saturating_sub(own.granted);
    // What is guaranteed to `own` is good against what others wait for.
    let guaranteed = own.min.saturating_sub(own.granted);
    let beside_secured = left(sum(others.iter().map(Member::secured)));
    Room {
        bytes: left(sum(others.iter().map(|other| other.claim(fair, own))))
            .max(beside_secured.min(guaranteed)),
        without_claims: left(sum(others.iter().map(|other| other.granted))),
    }
}

/// See [`room`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub bytes: u64,
    pub without_claims: u64,
}

/// What `own` is to give back of what `others` wait for and the budget does not have: in proportion to what each could spare, rounded up.
///
/// `refused_by_device`: of what the others wait for, what the device itself refused, which nothing free in the budget helps against.
pub(super) fn part(own: &Member, others: &[Member], budget: u64, refused_by_device: u64) -> u64 {
    let all = || others.iter().chain([own]);
    let awaited = sum(others.iter().map(|other| other.shortage));
    // Their own guarantees are no obstacle to those who wait.
    let taken = sum(all().map(|member| if member.shortage > 0 { member.granted } else { member.secured() }));
    let lack = awaited.saturating_sub(refused_by_device).saturating_sub(budget.saturating_sub(taken));
    let lack = lack.saturating_add(refused_by_device.min(awaited));
    let (own, total) = (own.excess(), sum(all().map(Member::excess)));
    if own == 0 {
        return 0;
    }
    let part = (u128::from(lack) * u128::from(own)).div_ceil(u128::from(total));
    u64::try_from(part).unwrap_or(u64::MAX).min(own)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn member(granted: u64, min: u64, shortage: u64, givable: u64) -> Member {
        Member { granted, min, shortage, givable, ..Member::default() }
    }

    #[test]
    fn what_others_hold_and_what_is_guaranteed_to_them_is_not_to_be_had() {
        let own = member(10, 0, 0, 0);
        let bytes = |others: &[Member]| room(&own, others, 100).bytes;
        assert_eq!(bytes(&[]), 90);
        assert_eq!(bytes(&[member(30, 0, 0, 0)]), 60);
        assert_eq!(bytes(&[member(0, 40, 0, 0), member(50, 20, 0, 0)]), 0);
        assert_eq!(bytes(&[member(0, 40, 0, 0)]), 50);
        assert_eq!(bytes(&[member(95, 0, 0, 0)]), 0, "more was charged than there is");
        let kept = room(&own, &[member(0, 40, 0, 0)], 100);
        assert_eq!(kept.without_claims, 90);
    }

    #[test]
    fn what_somebody_waits_for_is_kept_for_him_up_to_a_fair_share() {
        let own = member(10, 0, 0, 0);
        let bytes = |waiter: Member| room(&own, &[waiter], 100).bytes;
        assert_eq!(bytes(member(20, 0, 10, 0)), 60);
        assert_eq!(bytes(member(20, 0, 1000, 0)), 40, "fair is half");
        assert_eq!(bytes(member(70, 0, 1000, 0)), 20, "who has more than that waits his turn");
        assert_eq!(bytes(member(20, 60, 1000, 0)), 30, "but has what is guaranteed to him");
    }

    #[test]
    fn who_has_waited_longest_goes_first() {
        let waits = |since| Member { shortage: 60, since, ..member(0, 0, 60, 0) };
        let bytes = |own: Member, others: [Member; 2]| room(&own, &others, 90).bytes;
        assert_eq!(bytes(waits(1), [waits(2), waits(3)]), 90, "it may have all");
        assert_eq!(bytes(waits(2), [waits(1), waits(3)]), 60, "and leaves the first its share of 30");
        assert_eq!(bytes(waits(3), [waits(1), waits(2)]), 30);
        assert_eq!(
            bytes(member(0, 0, 0, 0), [waits(1), waits(2)]),
            30,
            "who has not been refused comes last"
        );
        let guaranteed = Member { min: 20, ..waits(9) };
        assert_eq!(bytes(waits(1), [guaranteed, member(0, 0, 0, 0)]), 70, "guarantees hold");
    }

    #[test]
    fn what_is_guaranteed_is_good_against_what_others_wait_for() {
        let waiter = member(30, 0, 1000, 0);
        assert_eq!(room(&member(10, 70, 0, 0), &[waiter], 100).bytes, 60);
        assert_eq!(room(&member(10, 0, 0, 0), &[waiter], 100).bytes, 40);
        assert_eq!(
            room(&member(10, 70, 0, 0), &[member(60, 0, 1000, 0)], 100).bytes,
            30,
            "others hold the rest"
        );
        assert_eq!(room(&member(10, 70, 0, 0), &[member(0, 30, 1000, 0)], 100).bytes, 60);
    }

    #[test]
    fn each_gives_by_what_it_can_spare() {
        let waiter = member(10, 0, 30, 0);
        let (large, small) = (member(60, 0, 0, 60), member(30, 10, 0, 30));
        assert_eq!(part(&large, &[waiter, small], 100, 0), 23); // 30 x 60 / 80
        assert_eq!(part(&small, &[waiter, large], 100, 0), 8); // 30 x 20 / 80
        assert_eq!(part(&small, &[waiter, large], 125, 0), 2, "25 of the 30 are free");
        assert_eq!(part(&small, &[waiter, large], 130, 0), 0);
        assert_eq!(
            part(&small, &[waiter, large], 200, 30),
            8,
            "a budget that is free is no memory of the device"
        );
        assert_eq!(part(&member(60, 0, 5, 60), &[waiter], 70, 0), 0, "who waits gives nothing");
        assert_eq!(part(&member(60, 0, 0, 0), &[waiter], 70, 0), 0, "who holds requests alone gives nothing");
    }

    #[test]
    fn a_waiters_own_guarantee_is_room_for_him() {
        let (waiter, other) = (member(10, 50, 40, 0), member(40, 0, 0, 40));
        assert_eq!(part(&other, &[waiter], 100, 0), 0);
        assert_eq!(part(&other, &[waiter], 80, 0), 10);
    }

    /// Whether `own` may have so many bytes more: the rule the long way round, in numbers that cannot overflow.
    fn admits(own: &Member, others: &[Member], budget: u64, bytes: u128) -> bool {
        let [fair, budget] = [budget / (others.len() as u64 + 1), budget].map(u128::from);
        let after = u128::from(own.granted) + bytes;
        let secured = |other: &Member| u128::from(other.granted.max(other.min));
        let claim = |other: &Member| {
            let [granted, min, shortage] = [other.granted, other.min, other.shortage].map(u128::from);
            let cap = if fair < min { min } else { fair };
            let awaited = if granted + shortage < cap { granted + shortage } else { cap };
            let later = own.shortage > 0 && other.since >= own.since;
            if later { secured(other) } else { secured(other).max(awaited) }
        };
        let is_guaranteed = after <= u128::from(own.min);
        let left_to_others: u128 =
            if is_guaranteed { others.iter().map(secured).sum() } else { others.iter().map(claim).sum() };
        after + left_to_others <= budget
    }

    fn any_bytes() -> impl Strategy<Value = u64> {
        prop_oneof![6 => 0..200_u64, 2 => any::<u64>(), 1 => Just(u64::MAX), 3 => Just(0)]
    }

    prop_compose! {
        /// Whose numbers may be lies.
        fn liar()(granted in any_bytes(), min in any_bytes(), shortage in any_bytes(), since in 0..4_u64) -> Member {
            Member { since, ..member(granted, min, shortage, 0) }
        }
    }

    prop_compose! {
        fn any_member()(granted in 0u64..200, min in 0u64..100, shortage in prop_oneof![Just(0), 0u64..200], givable in 0u64..200)
            -> Member { member(granted, min, shortage, givable) }
    }

    proptest! {
        #[test]
        fn whoever_takes_what_he_may_leaves_the_budget_and_the_guarantees_whole(
            members in prop::collection::vec(any_member(), 1..6), budget in 0u64..2000, takers in prop::collection::vec(0usize..6, 0..12),
        ) {
            let mut members = members;
            let fits = |members: &[Member]| members.iter().map(Member::secured).sum::<u64>() <= budget;
            prop_assume!(fits(&members));
            for taker in takers {
                let taker = taker % members.len();
                let others: Vec<Member> =
                    members.iter().enumerate().filter(|(i, _)| *i != taker).map(|(_, m)| *m).collect();
                let found = room(&members[taker], &others, budget);
                prop_assert!(found.bytes <= found.without_claims);
                members[taker].granted += found.bytes;
                prop_assert!(fits(&members), "{members:?}");
            }
        }

        #[test]
        fn room_is_the_most_that_is_admitted_whatever_the_numbers(
            own in liar(), others in prop::collection::vec(liar(), 0..64), budget in prop_oneof![any_bytes(), 0..20_000_u64],
        ) {
            let bytes = room(&own, &others, budget).bytes;
            prop_assert!(bytes == 0 || admits(&own, &others, budget, bytes.into()));
            prop_assert!(!admits(&own, &others, budget, u128::from(bytes) + 1));
        }

        #[test]
        fn of_those_who_wait_somebody_may_have_all_that_nobody_has_or_is_guaranteed(
            waiters in prop::collection::vec((1..3000_u64, 0..3_u64), 1..6), budget in 0..2000_u64,
        ) {
            let waiters: Vec<Member> =
                waiters.iter().map(|(short, since)| Member { since: *since, ..member(0, 0, *short, 0) }).collect();
            let most = (0..waiters.len()).map(|own| {
                let mut others = waiters.clone();
                let own = others.remove(own);
                room(&own, &others, budget).bytes
            });
            prop_assert_eq!(most.max(), Some(budget));
        }

        #[test]
        fn parts_are_in_proportion_to_what_can_be_spared(
            granted in prop::collection::vec(1..1000_u64, 1..10), short in 1..3000_u64, free in 0..500_u64,
        ) {
            let givers: Vec<Member> = granted.iter().map(|bytes| member(*bytes, 0, 0, *bytes)).collect();
            let held: u64 = granted.iter().sum();
            let lack = short.saturating_sub(free);
            for (own, giver) in givers.iter().enumerate() {
                let mut others = givers.clone();
                others.remove(own);
                others.push(member(0, 0, short, 0));
                let expected = (lack * giver.granted).div_ceil(held).min(giver.granted);
                prop_assert_eq!(part(giver, &others, held + free, 0), expected);
            }
        }

        #[test]
        fn parts_cover_what_is_lacking_and_take_no_more_than_can_be_spared(
            members in prop::collection::vec(any_member(), 1..6), budget in 0u64..2000, by_device in 0u64..100,
        ) {
            let mut given = 0;
            let mut spare = 0;
            for (i, own) in members.iter().enumerate() {
                let others: Vec<Member> =
                    members.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, m)| *m).collect();
                let awaited: u64 = others.iter().map(|m| m.shortage).sum();
                let part = part(own, &others, budget, by_device.min(awaited));
                prop_assert!(part <= own.excess());
                given += part;
                spare += own.excess();
            }
            let awaited: u64 = members.iter().map(|m| m.shortage).sum();
            let taken: u64 = members.iter().map(|m| if m.shortage > 0 { m.granted } else { m.secured() }).sum();
            let by_device = by_device.min(awaited);
            let lack = (awaited - by_device).saturating_sub(budget.saturating_sub(taken)) + by_device;
            // Who waits himself does not count his own shortage, and gives nothing.
            prop_assert!(given >= lack.min(spare), "{given} of {lack}, {spare} to spare");
            prop_assert!(given <= lack + members.len() as u64);
        }
    }
}
