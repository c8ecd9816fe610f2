//! Bounds of the audit trail's events that a client causes at will: refusals by limits, programs
//! and leases that begin and end.
//!
//! A client's loop could otherwise push the lines of others out of the trail.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use crate::clock::Moment;
use crate::signer::tokens::place;

/// Events of one kind that a client may cause at once, and in each hour.
pub(super) const EVENTS: f64 = 600.0;
/// As [`EVENTS`], of peers without a certificate in one network: a tenth of what all of them have.
const EVENTS_OF_NETWORK: f64 = EVENTS / 10.0;
/// Most networks of such peers that have a count of their own.
const MAX_NETWORKS: usize = 1024;
const REFILL_INTERVAL: Duration = Duration::from_secs(3600);

/// Events that each client may still cause.
#[derive(Debug, Default)]
pub struct Allowance {
    /// Rest by client and kind of event, so that many programs leave out no lease.
    left: HashMap<(String, String), Left>,
    /// Of peers without a certificate: rest by network and kind of event.
    of_networks: HashMap<(String, String), Left>,
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

impl Left {
    fn full(now: Moment, most: f64) -> Self {
        Self { at: now, events: most, left_out: 0 }
    }

    fn refill(&mut self, now: Moment, most: f64) {
        let since = now.saturating_sub(self.at).as_secs_f64() / REFILL_INTERVAL.as_secs_f64();
        self.events = (self.events + since * most).min(most);
        self.at = now;
    }

    fn take(&mut self, now: Moment, most: f64) -> Option<u64> {
        self.refill(now, most);
        if self.events < 1.0 {
            self.left_out += 1;
            return None;
        }
        self.events -= 1.0;
        Some(std::mem::take(&mut self.left_out))
    }
}

impl Allowance {
    /// Returns how many such events of the client were left out since its last one; `None`: this
    /// one is left out, too.
    ///
    /// `stranger` is the address of a peer without a certificate. All of them count as one client,
    /// and a network of theirs leaves room for the others.
    pub(super) fn take(
        &mut self,
        client: &str,
        stranger: Option<IpAddr>,
        event: &str,
        now: Moment,
    ) -> Option<u64> {
        let beyond = stranger.is_some_and(|from| !self.network_may(from, event, now));
        let full = || Left::full(now, EVENTS);
        let left = self.left.entry((client.into(), event.into())).or_insert_with(full);
        if beyond {
            left.left_out += 1;
            return None;
        }
        left.take(now, EVENTS)
    }

    fn network_may(&mut self, from: IpAddr, event: &str, now: Moment) -> bool {
        if self.of_networks.len() >= MAX_NETWORKS {
            self.of_networks.retain(|_, left| {
                left.refill(now, EVENTS_OF_NETWORK);
                left.events < EVENTS_OF_NETWORK
            });
        }
        if self.of_networks.len() >= MAX_NETWORKS {
            return true;
        }
        let full = || Left::full(now, EVENTS_OF_NETWORK);
        let left = self.of_networks.entry((place(from.to_canonical()), event.into())).or_insert_with(full);
        left.take(now, EVENTS_OF_NETWORK).is_some()
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
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_clients_loop_fills_no_trail() {
        let mut allowance = Allowance::default();
        let start = Duration::from_secs(1000);
        let mut take = |client, event, now| allowance.take(client, None, event, now);
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
    fn a_stranger_leaves_room_for_other_networks() {
        let mut allowance = Allowance::default();
        let start = Duration::from_secs(1000);
        let stranger = |from: &str| Some(from.parse().unwrap());
        let mut noted = |from| {
            let mut take = |from| allowance.take("unknown", stranger(from), "refused", start);
            (0..1000).filter(|_| take(from).is_some()).count()
        };
        let most = EVENTS_OF_NETWORK as usize;
        assert_eq!((noted("192.0.2.1"), noted("192.0.2.2"), noted("2001:db8::1")), (most, most, most));
        assert_eq!(noted("2001:db8::ffff:1"), 0, "the same network");
        let hour = start + REFILL_INTERVAL;
        // Of the last network; the second's and the third's first events named those before.
        let left_out = (1000 - most as u64) + 1000;
        assert_eq!(allowance.take("unknown", stranger("192.0.2.3"), "refused", hour), Some(left_out));
        // Many networks take no memory, and those that were silent go first.
        for n in 0..5000_u32 {
            allowance.network_may(Ipv4Addr::from_bits(n).into(), "refused", hour);
        }
        assert_eq!(allowance.of_networks.len(), MAX_NETWORKS);
        assert!(allowance.network_may([198, 51, 100, 1].into(), "refused", hour));
        allowance.network_may([198, 51, 100, 1].into(), "refused", hour + REFILL_INTERVAL);
        assert_eq!(allowance.of_networks.len(), 1);
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
