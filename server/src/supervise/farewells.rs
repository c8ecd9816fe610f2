//! Reasons of ended workers, for programs that come back to them.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use gpusession_proto::preface::Preface;

use super::errors::AdoptError;
use super::stock::WorkerId;
use crate::clock::Moment;

/// Number of remembered workers.
const MAX_REMEMBERED: usize = 1024;
/// Longer than a program tries to come back.
const FAREWELL_TTL: Duration = Duration::from_secs(120);

/// Reasons why workers ended, for connections that come later.
#[derive(Debug, Default)]
pub struct Farewells {
    reasons: HashMap<WorkerId, Farewell>,
    /// Ids in the order of their ends.
    order: VecDeque<WorkerId>,
}

#[derive(Debug)]
struct Farewell {
    at: Moment,
    lease_key: [u8; 32],
    reason: String,
}

impl Farewells {
    /// Remembers why a worker has ended.
    pub fn add(&mut self, id: WorkerId, lease_key: [u8; 32], reason: String, now: Moment) {
        if self.order.len() == MAX_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.reasons.remove(&oldest);
        }
        self.order.push_back(id);
        self.reasons.insert(id, Farewell { at: now, lease_key, reason });
    }

    /// Returns the refusal of a connection to a worker that no longer exists.
    ///
    /// Only a grant for the worker learns the reason.
    pub fn refusal(&self, preface: &Preface, now: Moment) -> AdoptError {
        let known =
            self.reasons.get(&preface.worker).filter(|known| now.saturating_sub(known.at) < FAREWELL_TTL);
        match known {
            Some(known) if preface.is_genuine(&known.lease_key) => AdoptError::Ended(known.reason.clone()),
            _ => AdoptError::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use gpusession_proto::preface::Key;

    use super::*;

    const T: Moment = Duration::from_secs(1000);

    fn preface(worker: u8, lease_key: u8) -> Preface {
        let id = [worker; 16];
        Preface::new(id, &Key::new(&[lease_key; 32], &id, 1000), 0, 2, 0)
    }

    #[test]
    fn a_returning_program_learns_why_its_worker_ended() {
        let mut farewells = Farewells::default();
        farewells.add([1; 16], [7; 32], "its lease ended".into(), T);
        let ended = AdoptError::Ended("its lease ended".into());
        assert_eq!(farewells.refusal(&preface(1, 7), T + FAREWELL_TTL - Duration::from_secs(1)), ended);
        assert_eq!(farewells.refusal(&preface(1, 7), T + FAREWELL_TTL), AdoptError::Unknown);
        assert_eq!(farewells.refusal(&preface(1, 8), T), AdoptError::Unknown, "a stranger learns nothing");
        assert_eq!(farewells.refusal(&preface(2, 7), T), AdoptError::Unknown);
    }

    #[test]
    fn the_oldest_worker_is_forgotten_first() {
        let mut farewells = Farewells::default();
        farewells.add([1; 16], [7; 32], "first".into(), T);
        for n in 0..MAX_REMEMBERED as u128 - 1 {
            farewells.add((n + 1000).to_le_bytes(), [7; 32], String::new(), T);
        }
        assert_eq!(farewells.refusal(&preface(1, 7), T), AdoptError::Ended("first".into()));
        farewells.add([2; 16], [7; 32], "last".into(), T);
        assert_eq!(farewells.refusal(&preface(1, 7), T), AdoptError::Unknown);
        assert_eq!(farewells.refusal(&preface(2, 7), T), AdoptError::Ended("last".into()));
    }
}
