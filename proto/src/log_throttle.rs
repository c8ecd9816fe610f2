//! Log lines that a hostile peer cannot multiply.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Shortest time between two lines of a kind.
const QUIET_WINDOW: Duration = Duration::from_secs(5);

/// Limiter for one kind of line.
#[derive(Debug, Default)]
pub struct LogThrottle(Mutex<(Option<Instant>, u64)>);

/// Number of lines left out before this one; the caller writes it at the line's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeftOut(u64);

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            n => write!(f, " ({n} similar lines left out)"),
        }
    }
}

impl LogThrottle {
    /// Returns `Some` if a line may be written now; otherwise counts it as left out.
    pub fn may(&self) -> Option<LeftOut> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0.is_some_and(|at| at.elapsed() < QUIET_WINDOW) {
            state.1 += 1;
            return None;
        }
        state.0 = Some(Instant::now());
        Some(LeftOut(std::mem::take(&mut state.1)))
    }
}
