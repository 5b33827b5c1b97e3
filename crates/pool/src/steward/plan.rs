//! What a steward decides. Pure: it is told what there is to see, and says what to do and when to look again.

use std::time::Duration;

/// How often to look while something may change of which nobody tells.
pub(super) const WATCH: Duration = Duration::from_secs(1);
/// How often to look while memory is on its way back: for others who wait, or for a limit that is not met.
pub(super) const PRESSED: Duration = Duration::from_millis(100);
/// An engine that hands out no block for that long is at rest: what it could give changes no more.
pub(super) const AT_REST: Duration = Duration::from_secs(10);

/// When cached prefixes are to go though no other instance waits for their memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CachePolicy {
    /// Free memory of the device below which they go, bytes: somebody who shares no budget wants it. 0: never.
    pub free_watermark_bytes: u64,
    /// They go after so long without an allocation. None: never.
    pub idle: Option<Duration>,
}

/// What there is to see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct View {
    /// Terms were answered with "deferred", and are not met by so many bytes.
    pub deferred: Option<u64>,
    /// Another instance waits for memory.
    pub others_short: bool,
    /// What this instance is to give back to the others.
    pub part_bytes: u64,
    /// What this instance waits for itself.
    pub short_bytes: u64,
    /// What it could take now, and what it could when it last looked.
    pub room_bytes: u64,
    pub room_before_bytes: u64,
    /// Mapped and without a block, or kept for later pages.
    pub idle_bytes: u64,
    /// Without a block, but not to be given before work that reads it or a driver call has ended.
    pub leaving_bytes: u64,
    /// Held by cached prefixes alone.
    pub cached_bytes: u64,
    /// The engine could not give what it was asked for, and is not asked for so long.
    pub cache_rests: Option<Duration>,
    /// Free memory of the device, where it matters and is known.
    pub device_room_bytes: Option<u64>,
    /// Since a block was last handed out.
    pub idle_for: Duration,
    /// All cached prefixes were told to go since then.
    pub cache_was_given: bool,
}

/// What to do, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// The terms that were deferred are met: say so.
    Confirm,
    /// Have pools give back so many idle bytes.
    GiveIdle(u64),
    /// Have so many bytes of cached prefixes given back.
    GiveCached(u64),
    /// Have all cached prefixes given back.
    GiveCache,
    /// Have the pools look again: there is more room than there was.
    Look,
}

impl View {
    /// What could be given back.
    pub fn givable_bytes(&self) -> u64 {
        self.idle_bytes.saturating_add(self.givable_cached_bytes())
    }

    fn givable_cached_bytes(&self) -> u64 {
        if self.cache_rests.is_some() { 0 } else { self.cached_bytes }
    }

    /// What the device lacks for the watermark.
    fn below_watermark_bytes(&self, policy: &CachePolicy) -> u64 {
        self.device_room_bytes.map_or(0, |room| policy.free_watermark_bytes.saturating_sub(room))
    }

    /// How long until the cache is to go, if it is.
    fn cache_goes_in(&self, policy: &CachePolicy) -> Option<Duration> {
        let idle = policy.idle.filter(|_| self.cached_bytes > 0 && !self.cache_was_given)?;
        Some(idle.saturating_sub(self.idle_for))
    }
}

/// What to do.
pub(super) fn plan(view: &View, policy: &CachePolicy) -> Vec<Action> {
    let mut actions = vec![];
    if view.deferred == Some(0) {
        actions.push(Action::Confirm);
    }
    // The same bytes serve all who want some.
    let wanted = view.part_bytes.max(view.below_watermark_bytes(policy)).max(view.deferred.unwrap_or(0));
    let idle = wanted.min(view.idle_bytes);
    // What is on its way is not evicted once more.
    let cached = (wanted - idle).saturating_sub(view.leaving_bytes).min(view.givable_cached_bytes());
    actions.extend((idle > 0).then_some(Action::GiveIdle(idle)));
    actions.extend((cached > 0).then_some(Action::GiveCached(cached)));
    if view.cache_goes_in(policy) == Some(Duration::ZERO) {
        actions.push(Action::GiveCache);
    }
    if view.short_bytes > 0 && view.room_bytes > view.room_before_bytes {
        actions.push(Action::Look);
    }
    actions
}

/// When to look again though nobody rings. None: there is nothing to watch.
pub(super) fn look_again(view: &View, policy: &CachePolicy) -> Option<Duration> {
    let givable = view.givable_bytes() > 0;
    let others = view.others_short && (givable || view.leaving_bytes > 0);
    let pressed = view.deferred.is_some() || others;
    let wanted = view.others_short || view.deferred.is_some() || policy.free_watermark_bytes > 0;
    let watching =
        view.idle_for < AT_REST || view.short_bytes > 0 || (policy.free_watermark_bytes > 0 && givable);
    let rests = view.cache_rests.filter(|_| wanted && view.cached_bytes > 0);
    let reasons = [pressed.then_some(PRESSED), watching.then_some(WATCH), view.cache_goes_in(policy), rests];
    reasons.into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: CachePolicy =
        CachePolicy { free_watermark_bytes: 100, idle: Some(Duration::from_secs(60)) };
    const NEVER: CachePolicy = CachePolicy { free_watermark_bytes: 0, idle: None };

    /// An engine at rest.
    fn rest() -> View {
        View { idle_for: AT_REST, ..View::default() }
    }

    #[test]
    fn nothing_to_do_and_nothing_to_watch() {
        for policy in [POLICY, NEVER] {
            assert_eq!(plan(&rest(), &policy), []);
            assert_eq!(look_again(&rest(), &policy), None, "sleeps until it is rung");
        }
    }

    #[test]
    fn a_cache_that_rests_is_not_asked_and_not_offered() {
        let rests = Some(Duration::from_secs(3));
        let view = View { others_short: true, part_bytes: 6, cached_bytes: 9, cache_rests: rests, ..rest() };
        assert_eq!((plan(&view, &NEVER), view.givable_bytes()), (vec![], 0));
        assert_eq!(look_again(&view, &NEVER), rests, "and is, once it has");
        let view = View { idle_bytes: 2, ..view };
        assert_eq!((plan(&view, &NEVER), view.givable_bytes()), (vec![Action::GiveIdle(2)], 2));
        let quiet = View { others_short: false, part_bytes: 0, idle_bytes: 0, ..view };
        assert_eq!(look_again(&quiet, &NEVER), None, "nobody wants it");
        let empty = View { cached_bytes: 0, ..view };
        assert_eq!(look_again(&View { idle_bytes: 0, ..empty }, &NEVER), None);
        let idle = View { idle_for: Duration::from_secs(60), ..quiet };
        assert_eq!(plan(&idle, &POLICY), [Action::GiveCache], "what nobody uses goes all the same");
    }

    #[test]
    fn a_deferred_limit_is_pursued_and_confirmed() {
        let view = View { deferred: Some(7), idle_bytes: 2, cached_bytes: 30, ..rest() };
        assert_eq!(plan(&view, &NEVER), [Action::GiveIdle(2), Action::GiveCached(5)]);
        assert_eq!(look_again(&view, &NEVER), Some(PRESSED));
        let drains = View { deferred: Some(7), ..rest() };
        assert_eq!(plan(&drains, &NEVER), [], "as blocks are freed");
        assert_eq!(look_again(&drains, &NEVER), Some(PRESSED));
        let met = View { deferred: Some(0), ..rest() };
        assert_eq!(plan(&met, &NEVER), [Action::Confirm]);
    }

    #[test]
    fn others_get_their_part() {
        let view = View { others_short: true, part_bytes: 6, idle_bytes: 4, cached_bytes: 9, ..rest() };
        assert_eq!(plan(&view, &NEVER), [Action::GiveIdle(4), Action::GiveCached(2)]);
        assert_eq!(look_again(&view, &NEVER), Some(PRESSED));
        let much = View { part_bytes: 60, ..view };
        assert_eq!(plan(&much, &NEVER), [Action::GiveIdle(4), Action::GiveCached(9)]);
        let little = View { part_bytes: 3, ..view };
        assert_eq!(plan(&little, &NEVER), [Action::GiveIdle(3)]);
        let nothing = View { others_short: true, part_bytes: 6, ..rest() };
        assert_eq!((plan(&nothing, &NEVER), look_again(&nothing, &NEVER)), (vec![], None));
        let enough_is_free = View { others_short: true, idle_bytes: 4, ..rest() };
        assert_eq!(plan(&enough_is_free, &NEVER), []);
        assert_eq!(look_again(&enough_is_free, &NEVER), Some(PRESSED));
    }

    #[test]
    fn what_is_on_its_way_is_waited_for() {
        let view = View { others_short: true, part_bytes: 6, leaving_bytes: 5, ..rest() };
        assert_eq!((plan(&view, &NEVER), look_again(&view, &NEVER)), (vec![], Some(PRESSED)));
        let more = View { idle_bytes: 4, cached_bytes: 9, ..view };
        assert_eq!(plan(&more, &NEVER), [Action::GiveIdle(4)]);
        let more = View { part_bytes: 12, ..more };
        assert_eq!(plan(&more, &NEVER), [Action::GiveIdle(4), Action::GiveCached(3)]);
    }

    #[test]
    fn the_watermark() {
        for (room, given) in
            [(None, None), (Some(100), None), (Some(500), None), (Some(99), Some(1)), (Some(0), Some(100))]
        {
            let view = View { device_room_bytes: room, cached_bytes: 300, cache_was_given: true, ..rest() };
            assert_eq!(plan(&view, &POLICY), Vec::from_iter(given.map(Action::GiveCached)), "{room:?}");
            assert_eq!(plan(&view, &NEVER), []);
            assert_eq!(look_again(&view, &POLICY), Some(WATCH));
            assert_eq!(look_again(&view, &NEVER), None);
        }
        let view = View { device_room_bytes: Some(0), ..rest() };
        assert_eq!((plan(&view, &POLICY), look_again(&view, &POLICY)), (vec![], None), "nothing to give");
    }

    #[test]
    fn the_same_bytes_serve_all_who_want_some() {
        let base = View { idle_bytes: 500, ..rest() };
        for (part, room, beyond, given) in [(5, 93, 6, 7), (8, 93, 6, 8), (5, 93, 9, 9)] {
            let view =
                View { part_bytes: part, device_room_bytes: Some(room), deferred: Some(beyond), ..base };
            assert_eq!(plan(&view, &POLICY), [Action::GiveIdle(given)]);
        }
    }

    #[test]
    fn a_cache_that_nobody_uses_goes_once() {
        let idle = |seconds| View { cached_bytes: 3, idle_for: Duration::from_secs(seconds), ..rest() };
        let policy = CachePolicy { free_watermark_bytes: 0, ..POLICY };
        assert_eq!(plan(&idle(59), &policy), []);
        assert_eq!(look_again(&idle(59), &policy), Some(Duration::from_secs(1)));
        assert_eq!(look_again(&idle(20), &policy), Some(Duration::from_secs(40)));
        assert_eq!(plan(&idle(60), &policy), [Action::GiveCache]);
        assert_eq!(plan(&idle(6000), &policy), [Action::GiveCache]);
        let given = View { cache_was_given: true, ..idle(61) };
        assert_eq!((plan(&given, &policy), look_again(&given, &policy)), (vec![], None));
        let empty = View { cached_bytes: 0, idle_bytes: 9, ..idle(61) };
        assert_eq!(
            (plan(&empty, &policy), look_again(&empty, &policy)),
            (vec![], None),
            "of the reserve the pager takes care"
        );
        assert_eq!(plan(&idle(6000), &NEVER), []);
    }

    #[test]
    fn who_waits_looks_again_when_there_is_more_room() {
        for (short, before, room, looks) in
            [(5, 0, 1, true), (5, 1, 1, false), (5, 2, 1, false), (0, 0, 9, false)]
        {
            let view = View { short_bytes: short, room_before_bytes: before, room_bytes: room, ..rest() };
            assert_eq!(plan(&view, &NEVER), Vec::from_iter(looks.then_some(Action::Look)));
            assert_eq!(look_again(&view, &NEVER), (short > 0).then_some(WATCH));
        }
    }

    #[test]
    fn an_engine_at_work_is_watched() {
        let view = View { idle_for: AT_REST - Duration::from_millis(1), ..View::default() };
        assert_eq!(look_again(&view, &NEVER), Some(WATCH), "what it could give changes");
    }
}
