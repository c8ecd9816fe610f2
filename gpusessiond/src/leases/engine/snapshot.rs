//! Takes snapshots of all leases, servers and sessions.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::actor::Actor;

use crate::leases::machine::{Held, OFFLINE_TIMEOUT, Phase, SUSPECT_TIMEOUT};
use crate::leases::{
    Clock, Interruption, LeaseFacts, LeaseGauges, LeaseState, LeaseView, Owner, STOPPED, ServerFacts,
    ServerView, Slot, Snapshot, Time,
};
use crate::pool::Trouble;

/// Uid shown for an owner whom the user database does not know; differs from "everyone".
const UNKNOWN_USER: u32 = u32::MAX - 1;

/// Time for which a program's report of an interruption counts; it reports each second.
const REPORT_TTL: Duration = Duration::from_secs(10);

impl Actor {
    /// Returns a lease's programs whose connection broke, by process id.
    fn interruptions_of(&self, slot: Slot, now: Time) -> Vec<Interruption> {
        let of_slot = self.interruptions.values().filter(|(of, ..)| *of == slot);
        let mut found: Vec<_> = of_slot
            .map(|(_, interruption, at)| Interruption {
                since: interruption.since.filter(|_| now.saturating_sub(*at) < REPORT_TTL),
                ..interruption.clone()
            })
            .collect();
        found.sort_by_key(|interruption| interruption.pid);
        found
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let clock = Clock { now: self.now(), wall_usec: wall_usec() };
        let leases = self
            .machine
            .slots()
            .map(|(slot, wanted)| {
                let held = wanted.held();
                let spec = wanted.spec.clone();
                let facts = LeaseFacts {
                    slot,
                    id: wanted.shown_id(slot),
                    uid: match spec.owner {
                        Owner::Uid(uid) => uid,
                        Owner::User(_) => spec.uid.unwrap_or(UNKNOWN_USER),
                        Owner::Everyone => u32::MAX,
                    },
                    state: held.map_or(LeaseState::Pending, |h| h.state),
                    created: held.map_or(wanted.since, |h| h.since),
                    trouble: held.and_then(Held::waits).or_else(|| wanted.trouble.clone()),
                    processes: wanted.processes,
                    failures: self.failures.get(&slot).cloned().unwrap_or_default(),
                    reported: held.map(|h| h.reported.clone()).unwrap_or_default(),
                    leader: spec
                        .session
                        .as_ref()
                        .and_then(|id| self.machine.sessions().get(id))
                        .map_or(0, |s| s.leader),
                    spec,
                };
                let gauges = LeaseGauges {
                    expires: held.map(|h| h.expires),
                    retry: match wanted.phase {
                        Phase::Waiting { retry } => Some(retry),
                        _ => None,
                    },
                    stock: held.map_or(0, |h| h.stock.len()),
                    idle_since: held.and_then(|h| h.idle_since),
                    memory_free_bytes: held.map(|h| h.memory_free_bytes.clone()).unwrap_or_default(),
                    interruptions: self.interruptions_of(slot, clock.now),
                };
                LeaseView { facts, gauges }
            })
            .collect();
        let servers = self
            .about
            .iter()
            .enumerate()
            .map(|(i, about)| {
                let health = self.machine.health(i);
                let silent = self.machine.silent_for(clock.now, i);
                let draining = about.facts.state == "draining" || self.machine.drained(i);
                // The server's latest word, which its next answer replaces.
                let stopped = about.facts.state == STOPPED;
                let state = match (&health.trouble, health.answered, silent) {
                    _ if stopped => STOPPED,
                    (Some(e), ..) if e.trouble == Trouble::Refused => "unauthorized",
                    (None, Some(_), _) if draining => "draining",
                    (None, Some(_), _) => "online",
                    (_, _, Some(silent)) if silent >= OFFLINE_TIMEOUT => "offline",
                    (Some(_), Some(_), Some(silent)) if silent >= SUSPECT_TIMEOUT => "suspect",
                    (Some(_), Some(_), _) => "online",
                    (Some(_), None, _) => "offline",
                    (None, None, _) => "connecting",
                };
                let facts = ServerFacts {
                    state: state.into(),
                    trouble: match &health.trouble {
                        _ if stopped => "its administrator stopped it".into(),
                        trouble => trouble.as_ref().map(|e| e.message.clone()).unwrap_or_default(),
                    },
                    ..about.facts.clone()
                };
                ServerView { facts, gauges: about.gauges.clone() }
            })
            .collect();
        let sessions = self.machine.sessions().values().cloned().collect();
        Snapshot { leases, servers, sessions, clock }
    }
}

#[expect(clippy::disallowed_methods, reason = "the place where the daemon reads the wall clock")]
fn wall_usec() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}
