//! Log lines about leases and servers.

use gpusession_proto::journal::Event;
use tracing::{debug, info, warn};

use super::actor::Actor;
use crate::leases::machine::Phase;
use crate::leases::{Change, LeaseState, Snapshot};
use crate::pool::Trouble;

impl Actor {
    /// Logs servers that fall silent or return, and leases that are parked.
    pub(super) fn log_servers(&mut self, snapshot: &Snapshot) {
        self.lost.retain(|index| !snapshot.servers[*index].facts.gone);
        for (index, server) in snapshot.known_servers().map(|(index, server)| (index, &server.facts)) {
            let lost = matches!(server.state.as_str(), "suspect" | "offline" | "stopped" | "unauthorized");
            if lost && self.lost.insert(index) {
                let refused = server.state == "unauthorized";
                warn!(
                    message_id = if refused { Event::IdentityRefused } else { Event::ServerLost }.id(),
                    gpusession_server = server.name,
                    gpusession_reason = server.trouble,
                    "server {}: {}: {}",
                    server.name,
                    server.state,
                    server.trouble
                );
            } else if server.state == "online" && self.lost.remove(&index) {
                info!(
                    message_id = Event::ServerBack.id(),
                    gpusession_server = server.name,
                    "server {}: answers again",
                    server.name
                );
            }
        }
        for lease in snapshot.lease_facts() {
            if lease.state != LeaseState::Parked {
                self.parked.remove(&lease.slot);
            } else if self.parked.insert(lease.slot) {
                info!(
                    message_id = Event::LeaseParked.id(),
                    gpusession_lease = lease.id,
                    "lease {}: parked",
                    lease.id
                );
            }
        }
        self.parked.retain(|slot| snapshot.lease_facts().any(|l| l.slot == *slot));
    }

    /// Logs a change; that a lease waits is logged once for each reason, not at every try.
    pub(super) fn log(&mut self, change: &Change) {
        match change {
            Change::Granted { slot } => {
                self.said.remove(slot);
            }
            Change::Changed { slot } => {
                let Some(wanted) = self.machine.slot(*slot) else { return };
                let (Phase::Waiting { .. }, Some(error)) = (&wanted.phase, &wanted.trouble) else { return };
                let known = self.said.get(slot).is_some_and(|said| *said == error.message);
                if !known && !self.servers.is_empty() {
                    let waiting = error.waiting();
                    let event = match error.trouble {
                        Trouble::Protocol => Event::ProtocolMismatch,
                        Trouble::LimitExceeded => Event::LimitRefuses,
                        _ => Event::LeaseWaits,
                    };
                    let lease = wanted.shown_id(*slot);
                    info!(
                        message_id = event.id(),
                        gpusession_lease = lease,
                        gpusession_reason = waiting,
                        "lease {lease}: waits: {waiting}"
                    );
                    self.said.insert(*slot, error.message.clone());
                }
            }
            Change::PrepareForLoss { slot, left, reason, idle } => {
                let held = self.machine.slot(*slot).and_then(|w| w.held());
                let id = held.map(|h| h.id.as_str()).unwrap_or_default();
                warn!(
                    message_id = if *idle { Event::LeaseIdle } else { Event::LeaseEnds }.id(),
                    gpusession_lease = id,
                    gpusession_reason = reason,
                    "lease {id}: {}",
                    crate::leases::warning(*left, reason)
                );
            }
            Change::Lost { id, reason, .. } => {
                warn!(
                    message_id = Event::LeaseLost.id(),
                    gpusession_lease = id,
                    gpusession_reason = reason,
                    "lease {id}: lost: {reason}"
                );
            }
            Change::Removed { slot, reason, .. } => {
                self.said.remove(slot);
                debug!(gpusession_reason = reason, "lease slot {slot}: removed: {reason}");
            }
            _ => {}
        }
    }
}
