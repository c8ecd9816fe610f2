//! `Describe`: everything as JSON, for `gpusession status` and bug reports.

use std::time::Duration;

use gpusession_common::words::Class;
use serde_json::{Value, json};

use super::Shared;
use super::project::{cuda_version, state_of, usec};
use crate::leases::{Clock, DeviceView, Failure, LeaseView, ServerView, Time};

/// Time that a lease's failed program is shown, unless the lease serves another one first.
const FAILURE_TTL: Duration = Duration::from_secs(600);

/// Describes the daemon's state as this user may see it; within one schema it only gains keys.
pub(super) fn describe(shared: &Shared, uid: u32) -> Value {
    let snapshot = shared.leases.snapshot().borrow().clone();
    let (target, ready) = snapshot.pool();
    let config = shared.settings.get();
    json!({
        "schema": 1,
        "version": env!("CARGO_PKG_VERSION"),
        "state": shared.state(&snapshot),
        "leases_on_demand": config.leases.iter().any(|l| matches!(l.class, Class::Session | Class::User)),
        "gpus_wanted": target,
        "gpus_leased": ready,
        "boot_allocation_complete": shared.boot_complete(),
        "configuration": config.files,
        "environment": config.environment,
        "leases": snapshot
            .leases
            .iter()
            .filter(|l| super::publisher::shown(&l.facts))
            .map(|l| lease(l, &snapshot.clock, uid))
            .collect::<Vec<_>>(),
        "servers": snapshot.servers.iter().map(|s| server(s, &snapshot.clock)).collect::<Vec<_>>(),
        "sessions": snapshot.sessions.iter().map(|s| json!({
            "id": s.id,
            "uid": s.uid,
            "user": s.user,
            "service": s.service,
            "leader": s.leader,
            "logind": s.logind,
        })).collect::<Vec<_>>(),
    })
}

fn lease(view: &LeaseView, clock: &Clock, uid: u32) -> Value {
    let LeaseView { facts: l, gauges } = view;
    let trouble = l.trouble.as_ref();
    // Programs write the reasons themselves: other users' text is not shown, except to root.
    let readable = |(failure, at): &&(Failure, Time)| {
        (uid == 0 || uid == failure.uid) && clock.now.saturating_sub(*at) < FAILURE_TTL
    };
    let place = l.waits().and_then(|t| t.place);
    json!({
        "id": l.id,
        "name": l.spec.name,
        "state": l.state.as_str(),
        "class": l.spec.class.as_str(),
        "session": l.spec.session,
        "uid": (l.uid != u32::MAX).then_some(l.uid),
        "user": l.spec.user,
        "requested": l.spec.once,
        "gpus": l.spec.gpus,
        "server": l.server,
        "memory_limit_bytes": l.devices.iter().map(|d| d.limit_bytes).min(),
        "sm_percent": super::project::sm_percent(l),
        "created_usec": clock.wall_usec(l.created),
        "expires_usec": gauges.expires.map_or(0, |at| clock.wall_usec(at)),
        "idle_since_usec": gauges.idle_since.map_or(0, |at| clock.wall_usec(at)),
        "idle_timeout_usec": l.idle_timeout_usec,
        "processes": l.processes,
        "encrypted": l.encrypted,
        "transport": l.transport().0,
        "transport_reason": l.transport().1,
        "trouble": trouble.map(|t| &t.message),
        "trouble_kind": trouble.map(|t| t.trouble.as_str()),
        "failures": l.failures.iter().filter(|f| readable(f)).map(|f| failure(f, clock)).collect::<Vec<_>>(),
        "position": place.map(|p| p.0),
        "waiting": place.map(|p| p.1),
        "retry_in_usec": gauges.retry.map(|at| usec(at.saturating_sub(clock.now))),
        "who": l.spec.who,
        "why": l.spec.why,
        "devices": l.devices.iter().map(device).collect::<Vec<_>>(),
    })
}

fn failure((failure, at): &(Failure, Time), clock: &Clock) -> Value {
    json!({
        "usec": clock.wall_usec(*at),
        "uid": failure.uid,
        "user": failure.user,
        "pid": failure.pid,
        "program": failure.program,
        "running": failure.running,
        "reason": failure.reason,
    })
}

fn device(d: &DeviceView) -> Value {
    json!({
        "ordinal": d.ordinal,
        "uuid": d.uuid,
        "name": d.name,
        "state": state_of(d),
        "memory_bytes": d.memory_bytes,
        "limit_bytes": d.limit_bytes,
        "compute_capability": format!("{}.{}", d.compute.0, d.compute.1),
        "pci_address": d.pci_address,
        "driver_version": d.driver_version,
        "cuda_version": cuda_version(d.cuda_version),
    })
}

fn server(view: &ServerView, clock: &Clock) -> Value {
    let ServerView { facts: s, gauges } = view;
    json!({
        "name": s.name,
        "address": s.address,
        "state": s.state,
        "trouble": (!s.trouble.is_empty()).then_some(&s.trouble),
        "last_seen_usec": gauges.last_seen.map_or(0, |at| clock.wall_usec(at)),
        "rtt_usec": usec(gauges.rtt),
        "software": s.software,
        "protocol": s.protocol,
        "gpus": s.devices,
        "gpus_free": gauges.free,
    })
}
