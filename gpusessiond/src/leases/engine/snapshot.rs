//! Snapshots of all leases, servers and sessions, for the other parts of the daemon.

use std::time::{SystemTime, UNIX_EPOCH};

use super::actor::Actor;
use gpusession_common::words::Class;

use crate::leases::machine::{Held, OFFLINE_TIMEOUT, Phase, SUSPECT_TIMEOUT};
use crate::leases::{DeviceView, LeaseState, LeaseView, Owner, ServerView, Snapshot, Time};
use crate::pool::Trouble;

/// Uid shown for an owner whom the user database does not know; differs from "everyone".
const UNKNOWN_USER: u32 = u32::MAX - 1;

impl Actor {
    pub(super) fn snapshot(&self) -> Snapshot {
        let now = self.now();
        let wall = wall_usec();
        let at_wall = |time: Time| {
            if time >= now {
                wall + (time - now).as_micros() as u64
            } else {
                wall - (now - time).as_micros() as u64
            }
        };
        let leases = self
            .machine
            .slots()
            .map(|(slot, wanted)| {
                let held = wanted.held();
                let spec = wanted.spec.clone();
                let pending_name = match spec.class {
                    _ if spec.name.is_empty() => format!("request{slot}"),
                    Class::Boot | Class::Background => spec.name.clone(),
                    // Several sessions or users may each have a lease of this name.
                    Class::Session | Class::User => format!("{}-{slot}", spec.name),
                };
                LeaseView {
                    slot,
                    id: held.map_or(pending_name, |h| h.lease.id.clone()),
                    uid: match spec.owner {
                        Owner::Uid(uid) => uid,
                        Owner::User(_) => spec.uid.unwrap_or(UNKNOWN_USER),
                        Owner::Everyone => u32::MAX,
                    },
                    state: held.map_or(LeaseState::Pending, |h| h.state),
                    devices: held.map(devices).unwrap_or_default(),
                    server: held.map(|h| h.lease.server.clone()).unwrap_or_default(),
                    created_usec: at_wall(held.map_or(wanted.since, |h| h.since)),
                    expires_usec: held.map_or(0, |h| at_wall(h.expires)),
                    fencing_token: held.map_or(0, |h| h.lease.fencing_token),
                    encrypted: held.is_some_and(|h| h.lease.encrypted),
                    trouble: held.and_then(Held::waits).or_else(|| wanted.trouble.clone()),
                    retry_in: match wanted.phase {
                        Phase::Waiting { retry } => Some(retry.saturating_sub(now)),
                        _ => None,
                    },
                    stock: held.map_or(0, |h| h.stock.len()),
                    processes: wanted.processes,
                    failures: self
                        .failures
                        .get(&slot)
                        .into_iter()
                        .flatten()
                        .map(|(failure, at)| (failure.clone(), at_wall(*at)))
                        .collect(),
                    idle_timeout_usec: held.map_or(0, |h| h.lease.idle_timeout_usec),
                    idle_since_usec: held
                        .and_then(|h| h.idle_since)
                        .map_or((0, 0), |at| (at_wall(at), at.as_micros() as u64)),
                    leader: spec
                        .session
                        .as_ref()
                        .and_then(|id| self.machine.sessions().get(id))
                        .map_or(0, |s| s.leader),
                    spec,
                }
            })
            .collect();
        let servers = self
            .about
            .iter()
            .enumerate()
            .map(|(i, about)| {
                let health = self.machine.health(i);
                let silent = self.machine.silent_for(now, i);
                let draining = about.state == "draining" || self.machine.drained(i);
                let state = match (&health.trouble, health.answered, silent) {
                    (Some(e), ..) if e.trouble == Trouble::Refused => "unauthorized",
                    (None, Some(_), _) if draining => "draining",
                    (None, Some(_), _) => "online",
                    (_, _, Some(silent)) if silent >= OFFLINE_TIMEOUT => "offline",
                    (Some(_), Some(_), Some(silent)) if silent >= SUSPECT_TIMEOUT => "suspect",
                    (Some(_), Some(_), _) => "online",
                    (Some(_), None, _) => "offline",
                    (None, None, _) => "connecting",
                };
                ServerView {
                    state: state.into(),
                    trouble: health.trouble.as_ref().map(|e| e.message.clone()).unwrap_or_default(),
                    ..about.clone()
                }
            })
            .collect();
        let sessions = self.machine.sessions().values().cloned().collect();
        Snapshot { leases, servers, sessions }
    }
}

/// Returns `true` if no observer needs to know of `b` after `a`: clocks move in every snapshot.
pub(super) fn same(a: &Snapshot, b: &Snapshot) -> bool {
    let shown = |d: &DeviceView| (d.device.uuid.clone(), d.device.state.clone());
    a.leases.len() == b.leases.len()
        && a.leases.iter().zip(&b.leases).all(|(a, b)| {
            a.slot == b.slot
                && a.id == b.id
                && a.uid == b.uid
                && a.state == b.state
                && a.trouble == b.trouble
                && a.fencing_token == b.fencing_token
                && a.idle_timeout_usec == b.idle_timeout_usec
                && a.devices.iter().map(shown).eq(b.devices.iter().map(shown))
                && a.processes == b.processes
                && a.failures.iter().map(|f| &f.0).eq(b.failures.iter().map(|f| &f.0))
        })
        && a.sessions == b.sessions
        && a.servers.len() == b.servers.len()
        && a.servers.iter().zip(&b.servers).all(|(a, b)| a.state == b.state && a.name == b.name)
}

pub(super) fn devices(held: &Held) -> Vec<DeviceView> {
    let lease = &held.lease;
    (0..)
        .zip(&lease.devices)
        .map(|(ordinal, device)| DeviceView {
            device: device.clone(),
            server: lease.server.clone(),
            ordinal,
            driver_version: lease.driver_version.clone(),
            cuda_version: lease.cuda_version,
        })
        .collect()
}

pub(super) fn wall_usec() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}
