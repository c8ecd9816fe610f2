//! Answers of the servers: to the machine, to the log, and to what is known about the servers.

use std::time::Duration;

use gpusession_common::units::human_duration;
use gpusession_proto::control;
use gpusession_proto::journal::Event;
use tracing::{info, warn};

use super::actor::Actor;
use super::grants::data_addresses_are_valid;
use crate::leases::{ServerGauges, Slot, Time};
use crate::pool::PoolError;

/// Time in which a server that was stopped still answers.
const STOPPING_WINDOW: Duration = Duration::from_secs(10);

impl Actor {
    /// Takes the answer to a request for a lease.
    pub(super) fn allocated(&mut self, slot: Slot, result: Result<(usize, control::Lease), PoolError>) {
        let now = self.now();
        if let Ok((server, lease)) = &result {
            self.machine.name_server(now, *server, &lease.server);
            if !lease.server.is_empty() {
                self.about[*server].facts.name.clone_from(&lease.server);
            }
            info!(
                message_id = Event::LeaseGranted.id(),
                gpusession_lease = lease.id,
                gpusession_server = lease.server,
                "lease {}: granted by server {}: {} GPU(s)",
                lease.id,
                lease.server,
                lease.devices.len()
            );
            let asked = self.machine.slot(slot).and_then(|wanted| wanted.spec.ttl);
            let granted = Duration::from_micros(lease.ttl_usec);
            if let Some(asked) = asked.filter(|asked| granted < *asked) {
                warn!(
                    gpusession_lease = lease.id,
                    gpusession_server = lease.server,
                    "lease {}: ends after {}, not after {} as requested: lease_ttl of server {} is smaller",
                    lease.id,
                    human_duration(granted),
                    human_duration(asked),
                    lease.server
                );
            }
        }
        if let Ok((server, _)) = &result {
            self.describe(*server);
        }
        self.machine.allocated(now, slot, result);
    }

    /// Takes the answer to a heartbeat, or to a renewal that a user asked for.
    pub(super) fn renewed(
        &mut self,
        server: usize,
        asked: &[String],
        rtt: Duration,
        result: Result<control::RenewReply, PoolError>,
    ) {
        let now = self.now();
        if let Ok(reply) = &result {
            let about = &mut self.about[server];
            (about.gauges.last_seen, about.gauges.rtt) = (Some(now), rtt);
            if !reply.state.is_empty() {
                about.facts.state.clone_from(&reply.state);
            }
        }
        self.machine.renewed(now, server, asked, result.map(|reply| reply.leases));
    }

    /// Takes the answer to a release; the machine repeats one that failed.
    pub(super) fn released(&mut self, server: usize, lease: &str, result: Result<(), PoolError>) {
        let now = self.now();
        if let Err(error) = &result {
            warn!(
                gpusession_lease = lease,
                "lease {lease}: not released yet: {error}; it expires at its server at the latest"
            );
        }
        self.machine.released(now, server, lease, result);
        self.describe(server);
    }

    /// Takes the workers for a lease's stock; logs each reason for a refusal once.
    pub(super) fn workers(
        &mut self,
        slot: Slot,
        lease: &str,
        result: Result<Vec<control::Worker>, PoolError>,
    ) {
        let now = self.now();
        let refused = result.as_ref().err().map(|error| error.message.clone());
        if self.refused.get(&slot) != refused.as_ref() {
            if let Some(reason) = &refused {
                warn!(gpusession_lease = lease, "lease {lease}: its server gives no worker: {reason}");
            }
            match refused {
                Some(reason) => drop(self.refused.insert(slot, reason)),
                None => drop(self.refused.remove(&slot)),
            }
        }
        self.machine.workers(now, slot, lease, result);
    }

    /// Takes a server's description of itself.
    pub(super) fn described(
        &mut self,
        server: usize,
        rtt: Duration,
        description: control::ServerDescription,
    ) {
        let now = self.now();
        self.machine.name_server(now, server, &description.name);
        let free = description.devices.iter().filter(|d| d.state == "free").count() as u32;
        let about = &mut self.about[server];
        let stopped = about.gauges.stopped;
        about.gauges = ServerGauges { last_seen: Some(now), rtt, free, stopped };
        if !description.name.is_empty() {
            about.facts.name = description.name;
        }
        about.facts.protocol = description.protocol;
        about.facts.oldest_protocol = description.oldest_protocol;
        about.facts.software = description.software;
        about.facts.devices = description.devices.len() as u32;
        if !stopped.is_some_and(|at| still_stops(at, now.saturating_sub(rtt), &description.state)) {
            about.facts.state = description.state;
        }
        about.facts.idle_timeout_usec = description.idle_timeout_usec;
        about.facts.lease_ttl_usec = description.lease_ttl_usec;
        if data_addresses_are_valid(&description.data_addresses) {
            self.machine.moved(server, &description.data_addresses);
        }
        self.machine.described(now, server, free);
    }
}

/// Returns `true` if an answer is of a server that stops, and not of one that runs again.
///
/// The server said at `stopped` that it stops. The question left at `asked`: before that, or while
/// the server still ended its programs.
fn still_stops(stopped: Time, asked: Time, state: &str) -> bool {
    asked < stopped || (state == "draining" && asked < stopped + STOPPING_WINDOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_on_the_way_does_not_hide_a_stop() {
        let at = |seconds| Time::from_secs(seconds);
        for (asked, state, expected) in [
            (99, "online", true),
            (99, "draining", true),
            (100, "draining", true),
            (101, "online", false),
            (111, "draining", false),
        ] {
            assert_eq!(still_stops(at(100), at(asked), state), expected, "{asked} {state}");
        }
    }
}
