//! Bounds of the audit trail's events that a client causes at will: refusals by limits, programs
//! and leases that begin and end.
//!
//! A client's loop could otherwise push the lines of others out of the trail.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::clock::Moment;

/// Events of one kind that a client may cause at once, and in each hour.
pub(super) const EVENTS: f64 = 600.0;
const REFILL_INTERVAL: Duration = Duration::from_secs(3600);

/// Events that each client may still cause.
#[derive(Debug, Default)]
pub struct Allowance {
    /// Rest by client and kind of event, so that many programs leave out no lease.
    left: HashMap<(String, String), Left>,
    /// Leases whose beginning was left out, so that their end is, too.
    unseen: HashSet<String>,
}

#[derive(Debug)]
struct Left {
    at: Moment,
    events: f64,
    /// Events left out since the last one.
    left_out: u64,
}

impl Allowance {
    /// Returns how many such events of the client were left out since its last one; `None`: this
    /// one is left out, too.
    pub(super) fn take(&mut self, client: &str, event: &str, now: Moment) -> Option<u64> {
        let full = || Left { at: now, events: EVENTS, left_out: 0 };
        let left = self.left.entry((client.into(), event.into())).or_insert_with(full);
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

    /// Notes that the beginning of a lease was left out.
    pub(super) fn leave_out(&mut self, lease: &str) {
        self.unseen.insert(lease.into());
    }

    /// Forgets left out leases that `holds` no longer has: an end may come before its beginning.
    pub(super) fn forget_unseen(&mut self, holds: impl Fn(&str) -> bool) {
        self.unseen.retain(|lease| holds(lease));
    }

    /// Returns whether the end of a lease belongs into the trail: whether its beginning is there.
    pub(super) fn ends(&mut self, lease: &str) -> bool {
        !self.unseen.remove(lease)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clients_loop_fills_no_trail() {
        let mut allowance = Allowance::default();
        let start = Duration::from_secs(1000);
        let mut take = |client, event, now| allowance.take(client, event, now);
        let noted = (0..10_000).filter(|_| take("vm-1", "lease-granted", start).is_some()).count();
        assert_eq!(noted, EVENTS as usize);
        assert_eq!(take("vm-2", "lease-granted", start), Some(0), "each client has its own");
        assert_eq!(take("vm-1", "program-started", start), Some(0), "each kind has its own");
        let later = start + REFILL_INTERVAL / 600 + Duration::from_millis(1);
        let left_out = 10_000 - EVENTS as u64;
        assert_eq!(take("vm-1", "lease-granted", later), Some(left_out), "their number is kept");
        assert_eq!(take("vm-1", "lease-granted", later), None);
    }

    #[test]
    fn a_lease_whose_end_came_first_is_forgotten() {
        let mut allowance = Allowance::default();
        allowance.leave_out("ended");
        allowance.leave_out("held");
        allowance.forget_unseen(|lease| lease == "held");
        assert!(allowance.unseen.len() == 1 && !allowance.ends("held"));
        assert!(allowance.unseen.is_empty());
    }
}
