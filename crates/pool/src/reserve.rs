//! How much idle memory to keep mapped. Pure: the time is told.

use std::time::{Duration, Instant};

/// After that long half of what was taken counts no more.
const HALF_LIFE: Duration = Duration::from_millis(250);
/// After that long without a page taken or emptied the reserve goes back, but for the minimum.
pub(crate) const QUIET: Duration = Duration::from_secs(1);

/// The bounds of the reserve, pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Mapped ahead at all times.
    pub min: u32,
    /// What is idle beyond it goes back at once.
    pub max: u32,
}

/// How many pages to have mapped ahead: as many as were taken of late, from the minimum to half the maximum.
///
/// Pages between that number and the maximum are neither mapped nor given back, so that pages that come and go cost no driver
/// calls; until nothing has come or gone for [`QUIET`].
#[derive(Debug, Clone)]
pub(crate) struct Demand {
    bounds: Bounds,
    /// Pages taken, each halved every [`HALF_LIFE`] since.
    recent: f64,
    noted: Instant,
    /// A page was last taken or emptied.
    touched: Instant,
    /// Nothing has happened for so long that the minimum is enough.
    resting: bool,
    ahead: u32,
}

impl Demand {
    /// Nothing ahead yet.
    pub fn new(bounds: Bounds, now: Instant) -> Self {
        Demand { bounds, recent: 0.0, noted: now, touched: now, resting: true, ahead: 0 }
    }

    /// Blocks were taken of that many pages that held none.
    pub fn note(&mut self, pages: u32, now: Instant) {
        let half_lives = now.saturating_duration_since(self.noted).as_secs_f64() / HALF_LIFE.as_secs_f64();
        self.recent = self.recent * 0.5f64.powf(half_lives) + f64::from(pages);
        self.noted = now;
        self.touch(now);
        let Bounds { min, max } = self.bounds;
        self.ahead = (self.recent.ceil() as u32).clamp(min, min.max(max / 2));
    }

    /// Pages were emptied, which somebody may soon want again.
    pub fn touch(&mut self, now: Instant) {
        (self.touched, self.resting) = (now, false);
    }

    /// When the reserve goes back if nothing happens until then. `None`: it has gone.
    pub fn rests_at(&self) -> Option<Instant> {
        (!self.resting).then(|| self.touched + QUIET)
    }

    /// That time has come.
    pub fn rest(&mut self) {
        self.resting = true;
        self.start();
    }

    /// Nothing is mapped ahead before pages are taken again: somebody has asked for the memory.
    pub fn forget(&mut self) {
        (self.recent, self.ahead) = (0.0, 0);
    }

    /// What was taken until now tells nothing of what will be: the minimum is mapped ahead.
    pub fn start(&mut self) {
        (self.recent, self.ahead) = (0.0, self.bounds.min);
    }

    /// Pages to have mapped ahead. Changes only with the calls above.
    pub fn ahead(&self) -> u32 {
        self.ahead
    }

    /// Idle pages that stay mapped.
    pub fn keep(&self) -> u32 {
        if self.resting { self.bounds.min } else { self.bounds.max }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(min: u32, max: u32) -> (Demand, Instant) {
        let now = Instant::now();
        (Demand::new(Bounds { min, max }, now), now)
    }

    #[test]
    fn the_minimum_is_there_from_the_start_and_half_the_maximum_is_never_passed() {
        let (mut demand, now) = demand(2, 7);
        assert_eq!(demand.ahead(), 0);
        demand.start();
        assert_eq!(demand.ahead(), 2);
        demand.note(1, now);
        assert_eq!(demand.ahead(), 2);
        demand.note(100, now);
        assert_eq!((demand.ahead(), demand.keep()), (3, 7));
        for (min, max, ahead) in [(0, 0, 0), (0, 1, 0), (0, 2, 1), (3, 3, 3), (3, 4, 3)] {
            let mut demand = Demand::new(Bounds { min, max }, now);
            demand.note(9, now);
            assert_eq!(demand.ahead(), ahead);
        }
    }

    #[test]
    fn what_was_taken_long_ago_counts_less() {
        let (mut demand, now) = demand(0, 200);
        demand.note(64, now);
        assert_eq!(demand.ahead(), 64);
        demand.note(0, now + HALF_LIFE);
        assert_eq!(demand.ahead(), 32);
        demand.note(8, now + HALF_LIFE * 3);
        assert_eq!(demand.ahead(), 16);
        demand.note(1, now + HALF_LIFE * 1000);
        assert_eq!(demand.ahead(), 1);
    }

    #[test]
    fn a_quiet_pool_keeps_the_minimum() {
        let (mut demand, now) = demand(1, 8);
        demand.note(6, now);
        assert_eq!(demand.rests_at(), Some(now + QUIET));
        demand.touch(now + QUIET / 2);
        assert_eq!((demand.rests_at(), demand.keep(), demand.ahead()), (Some(now + QUIET * 3 / 2), 8, 4));
        demand.rest();
        assert_eq!((demand.rests_at(), demand.keep(), demand.ahead()), (None, 1, 1));
        demand.touch(now + QUIET * 2);
        assert_eq!((demand.keep(), demand.ahead()), (8, 1), "emptied pages may be wanted again");
    }

    #[test]
    fn a_steady_rate_settles() {
        let (mut demand, now) = demand(0, 1000);
        for step in 0..1000 {
            demand.note(1, now + HALF_LIFE * step / 10);
        }
        assert_eq!(demand.ahead(), 15, "ten a half-life, the older ones counting less");
    }

    #[test]
    fn forgotten_until_pages_are_taken_again() {
        let (mut demand, now) = demand(2, 8);
        demand.note(4, now);
        demand.forget();
        assert_eq!(demand.ahead(), 0);
        demand.note(1, now);
        assert_eq!(demand.ahead(), 2);
    }

    #[test]
    fn a_clock_that_stands_still_or_goes_back_does_no_harm() {
        let (mut demand, now) = demand(0, 100);
        demand.note(4, now + HALF_LIFE);
        demand.note(4, now);
        assert_eq!(demand.ahead(), 8);
    }
}
