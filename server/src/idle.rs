//! Decides on measures against idle leases. A state machine: callers supply the time and the
//! observations.

use std::time::Duration;

use gpusession_common::words::OnIdle;

use crate::clock::Moment;

/// First pause before a failed measure is repeated; it doubles up to [`BACKOFF_MAX`].
const BACKOFF_MIN: Duration = Duration::from_secs(30);
const BACKOFF_MAX: Duration = Duration::from_secs(600);

/// Idle times after which measures apply, counted from the last GPU work of any process; zero:
/// never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timeouts {
    /// Warns the lease's users.
    pub warn: Duration,
    /// Parks the lease's programs.
    pub park: Duration,
    /// Releases the lease.
    pub release: Duration,
    /// Lends the GPUs of a lease without processes to waiting requests.
    pub lend: Duration,
}

impl Timeouts {
    /// Returns the idle time before parking or releasing, whichever comes first; zero: never.
    pub fn first(self) -> Duration {
        [self.park, self.release].into_iter().filter(|d| !d.is_zero()).min().unwrap_or_default()
    }

    /// Returns the times of a lease that wants a measure after `rest` at the latest; zero: no wish.
    ///
    /// The measure is parking, which keeps programs alive, or releasing if only that is configured.
    /// No time becomes longer.
    pub fn within(self, rest: Duration) -> Self {
        if rest.is_zero() {
            return self;
        }
        let sooner = |after: Duration| if after.is_zero() { rest } else { after.min(rest) };
        let of = match (self.park.is_zero(), self.release.is_zero()) {
            (true, false) => Self { release: sooner(self.release), ..self },
            _ => Self { park: sooner(self.park), ..self },
        };
        // The warning keeps the proportion of the defaults: 25 of 30 minutes.
        Self { warn: self.warn.min(of.first() * 5 / 6), ..of }
    }

    /// Moves a warning that would come too late ahead of the measure, in the defaults' proportion.
    ///
    /// A warning that is switched off stays off.
    pub fn warned_in_time(self) -> Self {
        let first = self.first();
        if first.is_zero() || self.warn < first { self } else { Self { warn: first * 5 / 6, ..self } }
    }

    /// Returns the times of a lease with a request of its own, which the limit `on_idle` has
    /// allowed.
    pub fn asked(self, on_idle: Option<OnIdle>, hold: bool) -> Self {
        let off = Duration::ZERO;
        let of = match on_idle {
            None | Some(OnIdle::Park) => self,
            Some(OnIdle::Release) => Self { park: off, release: self.first(), ..self },
            Some(OnIdle::Keep) => Self { warn: off, park: off, release: off, ..self },
        };
        if hold { Self { lend: off, ..of } } else { of }
    }
}

/// State of a lease at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// Number of processes that its workers serve.
    pub processes: usize,
    /// Time of the last GPU work or copy.
    ///
    /// Without processes: the end of the last one or the start of the lease.
    pub active: Moment,
    /// Its GPUs are lent or parked, or on their way.
    pub away: bool,
    /// Time since when its owner reports it idle.
    pub hint: Option<Moment>,
}

impl Seen {
    /// Returns the idle time, by the owner's report or the programs' activity.
    ///
    /// Only parking and lending use it, since they end no program.
    pub fn rest(&self, now: Moment) -> Duration {
        now.saturating_sub(self.hint.map_or(self.active, |hint| hint.min(self.active)))
    }
}

/// Measure that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Warns its users that `next` follows after `left`; `None`: no measure follows.
    Warn {
        /// Measure that follows.
        next: Option<Next>,
        /// Time until that measure.
        left: Duration,
    },
    /// Moves the device memory of its programs to host memory.
    Park,
    /// Ends the lease.
    Release,
}

/// Measure of which users are warned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Programs continue as soon as they use the GPU.
    Park,
    /// Programs fail.
    Release,
}

/// Idle clock of one lease.
#[derive(Debug, Default)]
pub struct Clock {
    /// Last activity before the warning.
    warned: Option<Moment>,
    failures: u32,
    not_before: Moment,
    hint: Option<Moment>,
}

fn due(after: Duration, idle: Duration) -> bool {
    !after.is_zero() && idle >= after
}

impl Clock {
    /// Returns the measure that is due now.
    ///
    /// A warning comes first, and once per idle time.
    pub fn tick(&mut self, seen: Seen, limits: &Timeouts, now: Moment) -> Option<Act> {
        if seen.processes == 0 {
            self.restart();
            return None;
        }
        if self.warned.is_some_and(|at| at != seen.active) {
            self.restart();
        }
        let idle = now.saturating_sub(seen.active);
        let parks = (!seen.away && !limits.park.is_zero()).then_some((limits.park, Next::Park));
        let releases = (!limits.release.is_zero()).then_some((limits.release, Next::Release));
        let next = parks.into_iter().chain(releases).min_by_key(|(after, _)| *after);
        if due(limits.warn, idle) && self.warned.is_none() {
            self.warned = Some(seen.active);
            let left = next.map_or(Duration::ZERO, |(after, _)| after.saturating_sub(idle));
            return Some(Act::Warn { next: next.map(|(_, what)| what), left });
        }
        if due(limits.release, idle) {
            return Some(Act::Release);
        }
        (!seen.away && due(limits.park, seen.rest(now)) && now >= self.not_before).then_some(Act::Park)
    }

    fn restart(&mut self) {
        *self = Self { hint: self.hint, ..Self::default() };
    }

    /// Returns the time since when the owner reports the lease idle.
    pub fn hint(&self) -> Option<Moment> {
        self.hint
    }

    /// Records the owner's report: idle since `since`, unless reported before, or with `None` not
    /// idle.
    pub fn set_hint(&mut self, since: Option<Moment>) {
        self.hint = since.map(|now| self.hint.unwrap_or(now));
    }

    /// Records that parking failed for now.
    pub fn failed(&mut self, now: Moment) {
        let pause = BACKOFF_MIN.saturating_mul(1 << self.failures.min(8)).min(BACKOFF_MAX);
        self.failures += 1;
        self.not_before = now + pause;
    }
}

/// Returns `true` if a lease without processes may lend its GPUs to a waiting request.
pub fn may_be_lent(seen: Seen, limits: &Timeouts, now: Moment) -> bool {
    seen.processes == 0 && !seen.away && due(limits.lend, seen.rest(now))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIN: Duration = Duration::from_secs(60);
    const LIMITS: Timeouts = Timeouts {
        warn: Duration::from_secs(1500),
        park: Duration::from_secs(1800),
        release: Duration::ZERO,
        lend: Duration::from_secs(600),
    };

    fn seen(processes: usize, active: Moment) -> Seen {
        Seen { processes, active, away: false, hint: None }
    }

    #[test]
    fn warns_then_parks_and_starts_over_after_work() {
        let mut clock = Clock::default();
        assert_eq!(clock.tick(seen(1, MIN), &LIMITS, 25 * MIN), None);
        let warning = Act::Warn { next: Some(Next::Park), left: 5 * MIN };
        assert_eq!(clock.tick(seen(1, MIN), &LIMITS, 26 * MIN), Some(warning));
        assert_eq!(clock.tick(seen(1, MIN), &LIMITS, 27 * MIN), None, "once");
        assert_eq!(clock.tick(seen(1, MIN), &LIMITS, 31 * MIN), Some(Act::Park));
        clock.failed(31 * MIN);
        assert_eq!(clock.tick(seen(1, MIN), &LIMITS, 31 * MIN + BACKOFF_MIN / 2), None);
        assert_eq!(clock.tick(seen(1, MIN), &LIMITS, 31 * MIN + BACKOFF_MIN), Some(Act::Park));
        // Work starts again.
        assert_eq!(clock.tick(seen(1, 32 * MIN), &LIMITS, 33 * MIN), None);
        assert!(matches!(clock.tick(seen(1, 32 * MIN), &LIMITS, 57 * MIN), Some(Act::Warn { .. })));
    }

    #[test]
    fn idle_leases_are_released_only_if_configured() {
        let mut clock = Clock::default();
        let away = Seen { away: true, ..seen(2, Duration::ZERO) };
        assert!(matches!(clock.tick(away, &LIMITS, 100 * MIN), Some(Act::Warn { next: None, .. })));
        assert_eq!(clock.tick(away, &LIMITS, 10_000 * MIN), None);
        let strict = Timeouts { release: 120 * MIN, ..LIMITS };
        assert_eq!(clock.tick(away, &strict, 119 * MIN), None);
        assert_eq!(clock.tick(away, &strict, 120 * MIN), Some(Act::Release), "parked programs, too");
    }

    #[test]
    fn idle_timeouts_follow_the_policy_of_the_request() {
        let release = LIMITS.asked(Some(OnIdle::Release), false);
        assert_eq!(
            (release.park, release.release),
            (Duration::ZERO, 30 * MIN),
            "it ends when it would be parked"
        );
        let sooner = Timeouts { release: 5 * MIN, ..LIMITS };
        assert_eq!(sooner.asked(Some(OnIdle::Release), false).release, 5 * MIN);
        assert_eq!(
            sooner.asked(Some(OnIdle::Park), false),
            sooner,
            "no lease lives longer than the server says"
        );
        let keep = sooner.asked(Some(OnIdle::Keep), true);
        assert_eq!(keep, Timeouts::default());
        assert_eq!(Clock::default().tick(seen(1, MIN), &keep, 10_000 * MIN), None);
        assert!(!may_be_lent(seen(0, MIN), &keep, 1000 * MIN));
        assert_eq!(LIMITS.asked(None, true).park, LIMITS.park);
    }

    #[test]
    fn a_time_of_its_own_is_only_ever_sooner() {
        let times = |t: Timeouts| (t.warn, t.park, t.release);
        let none = Duration::ZERO;
        assert_eq!(times(LIMITS.within(none)), times(LIMITS));
        assert_eq!(times(LIMITS.within(12 * MIN)), (10 * MIN, 12 * MIN, none));
        assert_eq!(times(LIMITS.within(100 * MIN)), times(LIMITS), "never later");
        let ends = Timeouts { park: none, release: 120 * MIN, ..LIMITS };
        assert_eq!(times(ends.within(12 * MIN)), (10 * MIN, none, 12 * MIN), "there is no other measure");
        let both = Timeouts { release: 120 * MIN, ..LIMITS };
        assert_eq!(times(both.within(12 * MIN)), (10 * MIN, 12 * MIN, 120 * MIN), "parked sooner, not ended");
        let never = Timeouts { park: none, ..LIMITS };
        assert_eq!(times(never.within(12 * MIN)), (10 * MIN, 12 * MIN, none));
        assert_eq!((never.first(), both.first(), ends.first()), (none, 30 * MIN, 120 * MIN));
    }

    #[test]
    fn a_hint_parks_programs_at_work_and_never_ends_them() {
        let limits = Timeouts { release: 40 * MIN, ..LIMITS };
        let mut clock = Clock::default();
        clock.set_hint(Some(10 * MIN));
        clock.set_hint(Some(20 * MIN));
        assert_eq!(clock.hint(), Some(10 * MIN), "said twice");
        // Its programs work all the time.
        let at = |clock: &Clock, now: Moment| Seen { hint: clock.hint(), ..seen(1, now) };
        let (now, then) = (39 * MIN, 40 * MIN);
        assert_eq!(clock.tick(at(&clock, now), &limits, now), None);
        assert_eq!(clock.tick(at(&clock, then), &limits, then), Some(Act::Park));
        clock.failed(then);
        assert_eq!(
            clock.tick(at(&clock, 100 * MIN), &Timeouts { park: Duration::ZERO, ..limits }, 100 * MIN),
            None
        );
        clock.set_hint(None);
        assert_eq!(clock.tick(at(&clock, 101 * MIN), &limits, 101 * MIN), None);
        // A report is no work: an idle time that began earlier continues.
        let unused = Seen { hint: Some(9 * MIN), ..seen(0, MIN) };
        assert!(may_be_lent(unused, &LIMITS, 11 * MIN));
        assert!(may_be_lent(Seen { hint: Some(MIN), ..seen(0, 9 * MIN) }, &LIMITS, 11 * MIN));
    }

    #[test]
    fn leases_without_processes_are_lent_only() {
        let mut clock = Clock::default();
        assert_eq!(clock.tick(seen(0, MIN), &LIMITS, 1000 * MIN), None);
        assert!(!may_be_lent(seen(0, MIN), &LIMITS, 10 * MIN));
        assert!(may_be_lent(seen(0, MIN), &LIMITS, 11 * MIN));
        assert!(!may_be_lent(seen(1, MIN), &LIMITS, 11 * MIN));
        assert!(!may_be_lent(seen(0, MIN), &Timeouts { lend: Duration::ZERO, ..LIMITS }, 1000 * MIN));
    }

    proptest! {
        /// Invariants for any sequence of events: no measure comes before its time. No measure that
        /// takes something away comes without a warning in the same idle time, if warnings come
        /// first.
        #[test]
        fn measures_keep_their_times(
            (warn, park, release) in (0u64..100, 0u64..100, 0u64..100),
            steps in prop::collection::vec((1u64..40, 0usize..3, any::<bool>(), any::<bool>()), 1..60),
        ) {
            let s = Duration::from_secs;
            let limits = Timeouts { warn: s(warn), park: s(park), release: s(release), lend: s(0) };
            let (mut clock, mut now, mut active) = (Clock::default(), s(1), s(1));
            let mut warned = None;
            for (pass, processes, works, away) in steps {
                now += s(pass);
                if works {
                    active = now;
                }
                let seen = Seen { processes, active, away, hint: None };
                let idle = now - active;
                if processes == 0 {
                    warned = None;
                }
                match clock.tick(seen, &limits, now) {
                    Some(Act::Warn { left, .. }) => {
                        prop_assert!(warn > 0 && idle >= limits.warn && warned != Some(active));
                        prop_assert!(left <= limits.park.max(limits.release));
                        warned = Some(active);
                    }
                    Some(Act::Park) => {
                        prop_assert!(park > 0 && idle >= limits.park && !away && processes > 0);
                        prop_assert!(warn == 0 || idle < limits.warn || warned == Some(active));
                        clock.failed(now);
                    }
                    Some(Act::Release) => {
                        prop_assert!(release > 0 && idle >= limits.release && processes > 0);
                        prop_assert!(warn == 0 || idle < limits.warn || warned == Some(active));
                    }
                    None => {}
                }
            }
        }
    }
}
