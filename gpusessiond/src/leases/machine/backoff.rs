//! Pauses between tries.

use std::time::Duration;

/// Pause after the first failure.
pub(super) const BACKOFF_MIN: Duration = Duration::from_secs(1);
/// Longest pause between tries.
pub(super) const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// Returns a pause that doubles with each failed try; its upper half is random.
pub(super) fn backoff(rng: &mut fastrand::Rng, attempt: u32) -> Duration {
    let full = BACKOFF_MIN.saturating_mul(1 << attempt.saturating_sub(1).min(8)).min(BACKOFF_MAX);
    full.mul_f64(0.5 + rng.f64() / 2.0)
}
