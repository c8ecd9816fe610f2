//! Texts about leases that several parts of the daemon show.

use std::time::Duration;

use gpusession_common::units::human_duration;

/// Formats a warning with the time left; omits a time below one second.
pub fn warning(left: Duration, reason: &str) -> String {
    if left < Duration::from_secs(1) {
        return reason.to_owned();
    }
    format!("{reason} (in {})", human_duration(left))
}
