//! Finds out whether `isolation = "try"` works with this host's driver.
//!
//! The first workers show it, before any client uses one. A driver may need an unforeseen
//! privilege; with "try" its programs run nevertheless.

use gpusession_proto::supervise::Isolation;

/// Result so far.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Trial {
    /// No worker has become ready yet.
    #[default]
    Unknown,
    /// An isolated worker failed to become ready, for this reason: the next one starts without
    /// isolation.
    Failed(String),
    /// An isolated worker became ready: later failures have other causes.
    Works,
    /// A worker without isolation became ready after an isolated one had failed.
    Without,
}

impl Trial {
    /// Returns the isolation of the next worker.
    pub fn next(&self, wanted: Isolation) -> Isolation {
        match (wanted, self) {
            (Isolation::Try, Self::Failed(_) | Self::Without) => Isolation::Off,
            _ => wanted,
        }
    }

    /// Records that a worker is ready, with its driver loaded.
    ///
    /// Returns the reason why workers continue without isolation, when this decides it.
    pub fn ready(&mut self, isolated: bool) -> Option<String> {
        match (std::mem::take(self), isolated) {
            (Self::Failed(reason), false) => {
                *self = Self::Without;
                return Some(reason);
            }
            (Self::Unknown | Self::Failed(_), true) => *self = Self::Works,
            (other, _) => *self = other,
        }
        None
    }

    /// Records that a worker exited before it was ready.
    pub fn failed(&mut self, isolated: bool, reason: &str) {
        match (&self, isolated) {
            (Self::Unknown, true) => *self = Self::Failed(reason.into()),
            // Isolation is not the cause.
            (Self::Failed(_), false) => *self = Self::Unknown,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_driver_that_works_without_goes_without() {
        let mut trial = Trial::default();
        assert_eq!(trial.next(Isolation::Try), Isolation::Try);
        trial.failed(true, "cuInit: CUDA error 304");
        assert_eq!(trial.next(Isolation::Try), Isolation::Off);
        assert_eq!(trial.next(Isolation::Require), Isolation::Require);
        // The driver does not work at all.
        trial.failed(false, "cuInit: CUDA error 802");
        assert_eq!(trial.next(Isolation::Try), Isolation::Try);
        trial.failed(true, "cuInit: CUDA error 304");
        assert_eq!(trial.ready(false).as_deref(), Some("cuInit: CUDA error 304"));
        assert_eq!(trial.next(Isolation::Try), Isolation::Off);
        assert_eq!(trial.ready(false), None);
        trial.failed(false, "killed");
        assert_eq!(trial.next(Isolation::Try), Isolation::Off);
    }

    #[test]
    fn isolation_that_worked_once_stays_on() {
        let mut trial = Trial::default();
        assert_eq!(trial.ready(true), None);
        trial.failed(true, "killed by SIGKILL");
        assert_eq!((trial.next(Isolation::Try), &trial), (Isolation::Try, &Trial::Works));
        // Workers without isolation only, so the result is unknown.
        let mut trial = Trial::default();
        assert_eq!(trial.ready(false), None);
        assert_eq!(trial, Trial::Unknown);
    }
}
