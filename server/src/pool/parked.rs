//! The leases that are parked or lent, and the idle clocks of all.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::clock::Moment;
use crate::idle::Clock;
use crate::lease::Place;
use crate::supervise::WorkerId;
use crate::supervise::park::Parked;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// With `wanted`, a program or the owner wants it back already.
    Parking {
        wanted: bool,
    },
    Away,
    /// The place is all 0 until it is known.
    Waiting {
        since: Moment,
        place: Place,
    },
    Returning,
}

pub(super) struct Away {
    pub(super) stage: Stage,
    pub(super) parked: Vec<(WorkerId, Parked)>,
    /// Host memory that the lease takes, in bytes.
    pub(super) bytes: u64,
}

impl Stage {
    /// Returns the stage of a lease that is wanted back.
    pub(super) fn wanted(self, now: Moment) -> Self {
        match self {
            Self::Parking { .. } => Self::Parking { wanted: true },
            Self::Away => Self::Waiting { since: now, place: Place::default() },
            coming => coming,
        }
    }

    /// Returns the stage of a lease whose device memory is in host memory now.
    pub(super) fn parked(self, now: Moment) -> Self {
        match self {
            Self::Parking { wanted: true } => Self::Away.wanted(now),
            _ => Self::Away,
        }
    }
}

/// State of all leases without their GPUs, and the idle clocks; see the module.
#[derive(Default)]
pub struct Parking {
    pub(super) away: Mutex<HashMap<String, Away>>,
    /// Notified when work of `Pool::serve_parking` may be due.
    pub(super) due: Notify,
    /// Notified when a lease came back, or gave up its return.
    pub(super) changed: Notify,
    /// Leases with programs that the driver cannot park, and the driver's reason.
    pub(super) never: Mutex<HashMap<String, String>>,
    pub(super) clocks: Mutex<HashMap<String, Clock>>,
}

impl Parking {
    pub(super) fn away(&self) -> MutexGuard<'_, HashMap<String, Away>> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn nevers(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.never.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the state and place of a lease without its GPUs; `None`: it has them.
    pub fn state(&self, lease: &str) -> Option<(&'static str, Place)> {
        let away = self.away();
        let entry = away.get(lease)?;
        Some(match (entry.stage, entry.parked.is_empty()) {
            (Stage::Parking { .. }, _) => ("parking", Place::default()),
            (Stage::Away, true) => ("lent", Place::default()),
            (Stage::Away, false) => ("parked", Place::default()),
            (Stage::Waiting { place, .. }, _) => ("returning", place),
            (Stage::Returning, _) => ("returning", Place::default()),
        })
    }

    /// Returns `true` if a lent lease may get other GPUs: parked memory is bound to its GPU.
    pub fn may_move(&self, lease: &str) -> bool {
        self.away().get(lease).is_some_and(|a| a.parked.is_empty())
    }

    /// Applies `what` to the idle clock of a lease.
    pub fn clock<T>(&self, lease: &str, what: impl FnOnce(&mut Clock) -> T) -> T {
        let mut clocks = self.clocks.lock().unwrap_or_else(PoisonError::into_inner);
        match clocks.get_mut(lease) {
            Some(clock) => what(clock),
            None => what(clocks.entry(lease.into()).or_default()),
        }
    }

    /// Removes the clocks of leases that have ended.
    pub fn keep_clocks(&self, there: impl Fn(&String) -> bool) {
        self.clocks.lock().unwrap_or_else(PoisonError::into_inner).retain(|lease, _| there(lease));
        self.nevers().retain(|lease, _| there(lease));
    }

    /// Returns the bytes of device memory that are in host memory now.
    pub fn parked_bytes(&self) -> u64 {
        self.away().values().map(|a| a.bytes).fold(0, u64::saturating_add)
    }

    /// Returns the driver's reason why a lease's present programs cannot be parked, once known.
    pub fn never(&self, lease: &str) -> Option<String> {
        self.nevers().get(lease).cloned()
    }

    /// Allows parking again: the lease has no programs, or other ones.
    pub fn may_again(&self, lease: &str) {
        self.nevers().remove(lease);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_that_is_wanted_while_it_is_parked_comes_back_at_once() {
        let now = Moment::from_secs(7);
        let waits = Stage::Waiting { since: now, place: Place::default() };
        let parking = Stage::Parking { wanted: false };
        assert_eq!(parking.parked(now), Stage::Away);
        assert_eq!(parking.wanted(now).parked(now), waits);
        assert_eq!(Stage::Away.wanted(now), waits);
        let later = Moment::from_secs(9);
        assert_eq!((waits.wanted(later), Stage::Returning.wanted(later)), (waits, Stage::Returning));
    }
}
