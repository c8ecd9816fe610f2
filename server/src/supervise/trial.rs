//! Whether `isolation = "try"` works with this host's driver: the first workers show it, before there is a client. A driver may need what
//! nobody knows of; with "try" its programs run nevertheless.

use gpusession_proto::supervise::Isolation;

/// What is known so far.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Trial {
    /// No worker has got ready yet.
    #[default]
    Unknown,
    /// A worker with isolation did not get ready, for this reason: the next one is started without.
    Failed(String),
    /// One with isolation got ready: what fails later has other reasons.
    Works,
    /// One without it did where one with it did not.
    Without,
}

impl Trial {
    /// How the next worker is started.
    pub fn next(&self, wanted: Isolation) -> Isolation {
        match (wanted, self) {
            (Isolation::Try, Self::Failed(_) | Self::Without) => Isolation::Off,
            _ => wanted,
        }
    }

    /// A worker got ready, with its driver loaded. Returns why workers go on without isolation, when that is decided.
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

    /// A worker ended before it got ready.
    pub fn failed(&mut self, isolated: bool, reason: &str) {
        match (&self, isolated) {
            (Self::Unknown, true) => *self = Self::Failed(reason.into()),
            // It is not the isolation.
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
    fn what_worked_once_is_kept() {
        let mut trial = Trial::default();
        assert_eq!(trial.ready(true), None);
        trial.failed(true, "killed by SIGKILL");
        assert_eq!((trial.next(Isolation::Try), &trial), (Isolation::Try, &Trial::Works));
        // Workers that were started without, before: nothing is known.
        let mut trial = Trial::default();
        assert_eq!(trial.ready(false), None);
        assert_eq!(trial, Trial::Unknown);
    }
}
