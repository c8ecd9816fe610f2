//! Bounds of the audit trail's events that a client causes at will: refusals by limits, and
//! programs that begin and end.
//!
//! A client's loop could otherwise push the lines of others out of the trail.

use std::collections::HashMap;
use std::time::Duration;

use crate::clock::Moment;

/// Events that a client may cause at once, and in each hour.
pub(super) const EVENTS: f64 = 600.0;
const REFILL_INTERVAL: Duration = Duration::from_secs(3600);

/// Events that each client may still cause.
#[derive(Debug, Default)]
pub struct Allowance(HashMap<String, Left>);

#[derive(Debug)]
struct Left {
    at: Moment,
    events: f64,
    /// Events left out since the last one.
    left_out: u64,
}

impl Allowance {
    /// Returns how many of the client's events were left out since its last one; `None`: this one
    /// is left out, too.
    pub(super) fn take(&mut self, client: &str, now: Moment) -> Option<u64> {
        let full = || Left { at: now, events: EVENTS, left_out: 0 };
        let left = self.0.entry(client.into()).or_insert_with(full);
        let since = now.saturating_sub(left.at).as_secs_f64() / REFILL_INTERVAL.as_secs_f64();
        left.events = (left.events + since * EVENTS).min(EVENTS);
        left.at = now;
        if left.events < 1.0 {
            left.left_out += 1;
            return None;
        }
        left.events -= 1.0;
        Some(std::mem::take(&mut left.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clients_loop_fills_no_trail() {
        let mut allowance = Allowance::default();
        let start = Duration::from_secs(1000);
        let noted = (0..10_000).filter(|_| allowance.take("vm-1", start).is_some()).count();
        assert_eq!(noted, EVENTS as usize);
        assert_eq!(allowance.take("vm-2", start), Some(0), "each client has its own");
        let later = start + REFILL_INTERVAL / 600 + Duration::from_millis(1);
        assert_eq!(allowance.take("vm-1", later), Some(10_000 - EVENTS as u64), "their number is kept");
        assert_eq!(allowance.take("vm-1", later), None);
    }
}
