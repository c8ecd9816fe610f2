//! `Describe`: everything as JSON, for `gpusession status` and bug reports.

use std::time::Duration;

use gpusession_bus::describe::{
    Described, Device, Failure, Identity, Interruption, Lease, SCHEMA, Server, Session,
};
use gpusession_common::words::Class;

use super::project::{cuda_version, shown, sm_percent, state_of, usec};
use super::shared::Shared;
use crate::leases::{self, Clock, DeviceView, LeaseView, ServerView, Time};

/// Time that a lease's failed program is shown, unless the lease serves another one first.
const FAILURE_TTL: Duration = Duration::from_secs(600);

/// Describes the daemon's state as this user may see it.
pub(super) fn describe(shared: &Shared, uid: u32) -> Described {
    let snapshot = shared.leases.snapshot().borrow().clone();
    let (target, ready) = snapshot.pool();
    let config = shared.settings.get();
    let clock = &snapshot.clock;
    Described {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").into(),
        state: shared.state(&snapshot).into(),
        leases_on_demand: config.leases.iter().any(|l| matches!(l.class, Class::Session | Class::User)),
        gpus_wanted: target,
        gpus_leased: ready,
        boot_allocation_complete: shared.boot_complete(),
        configuration: config.files.clone(),
        environment: config.environment.clone(),
        identity: shared.identity.borrow().as_ref().map(|standing| Identity {
            name: standing.facts.name.clone(),
            expires_usec: standing.facts.expires_unix.saturating_mul(1_000_000),
            trouble: (!standing.trouble.is_empty()).then(|| standing.trouble.clone()),
        }),
        leases: snapshot.leases.iter().filter(|l| shown(&l.facts)).map(|l| lease(l, clock, uid)).collect(),
        servers: snapshot.known_servers().map(|(_, s)| server(s, clock)).collect(),
        sessions: snapshot.sessions.iter().map(|s| session(s)).collect(),
    }
}

fn lease(view: &LeaseView, clock: &Clock, uid: u32) -> Lease {
    let LeaseView { facts, gauges } = view;
    let trouble = facts.trouble.as_ref();
    // Programs write the reasons themselves: other users' text is not shown, except to root.
    let readable = |(failure, at): &&(leases::Failure, Time)| {
        (uid == 0 || uid == failure.uid) && clock.now.saturating_sub(*at) < FAILURE_TTL
    };
    let place = facts.waits().and_then(|t| t.place);
    let (transport, transport_reason) = facts.transport();
    Lease {
        id: facts.id.clone(),
        name: facts.spec.name.clone(),
        state: facts.state.as_str().into(),
        class: facts.spec.class.as_str().into(),
        session: facts.spec.session.clone(),
        control_group: facts.spec.control_group.clone(),
        uid: (facts.uid != u32::MAX).then_some(facts.uid),
        user: facts.spec.user.clone(),
        requested: facts.spec.once,
        gpus: facts.spec.gpus,
        server: facts.reported.server.clone(),
        memory_limit_bytes: facts.reported.devices.iter().map(|d| d.limit_bytes).min(),
        sm_percent: sm_percent(facts),
        created_usec: clock.wall_usec(facts.created),
        expires_usec: gauges.expires.map_or(0, |at| clock.wall_usec(at)),
        idle_since_usec: gauges.idle_since.map_or(0, |at| clock.wall_usec(at)),
        idle_timeout_usec: facts.reported.idle_timeout_usec,
        processes: facts.processes,
        encrypted: facts.reported.encrypted,
        transport: transport.into(),
        transport_reason: transport_reason.into(),
        trouble: trouble.map(|t| t.message.clone()),
        trouble_kind: trouble.map(|t| t.trouble.as_str().into()),
        failures: facts.failures.iter().filter(readable).map(|f| failure(f, clock)).collect(),
        interruptions: gauges
            .interruptions
            .iter()
            .filter(|i| uid == 0 || uid == i.uid)
            .map(|i| interruption(i, clock))
            .collect(),
        position: place.map(|p| p.0),
        waiting: place.map(|p| p.1),
        retry_in_usec: gauges.retry.map(|at| usec(at.saturating_sub(clock.now))),
        who: facts.spec.who.clone(),
        why: facts.spec.why.clone(),
        devices: facts.reported.devices.iter().map(device).collect(),
    }
}

fn failure((failure, at): &(leases::Failure, Time), clock: &Clock) -> Failure {
    Failure {
        usec: clock.wall_usec(*at),
        uid: failure.uid,
        user: failure.user.clone(),
        pid: failure.pid,
        program: failure.program.clone(),
        running: failure.running,
        reason: failure.reason.clone(),
    }
}

fn interruption(interruption: &leases::Interruption, clock: &Clock) -> Interruption {
    Interruption {
        uid: interruption.uid,
        pid: interruption.pid,
        program: interruption.program.clone(),
        since_usec: interruption.since.map(|since| clock.wall_usec(since)),
        number: interruption.number,
    }
}

fn device(view: &DeviceView) -> Device {
    Device {
        ordinal: view.ordinal,
        uuid: view.uuid.clone(),
        name: view.name.clone(),
        state: state_of(view).into(),
        memory_bytes: view.memory_bytes,
        limit_bytes: view.limit_bytes,
        compute_capability: format!("{}.{}", view.compute.0, view.compute.1),
        pci_address: view.pci_address.clone(),
        driver_version: view.driver_version.clone(),
        cuda_version: cuda_version(view.cuda_version),
    }
}

fn server(view: &ServerView, clock: &Clock) -> Server {
    let ServerView { facts, gauges } = view;
    Server {
        name: facts.name.clone(),
        address: facts.address.clone(),
        state: facts.state.clone(),
        trouble: (!facts.trouble.is_empty()).then(|| facts.trouble.clone()),
        last_seen_usec: gauges.last_seen.map_or(0, |at| clock.wall_usec(at)),
        rtt_usec: usec(gauges.rtt),
        software: facts.software.clone(),
        protocol: facts.protocol,
        gpus: facts.devices,
        gpus_free: gauges.free,
    }
}

fn session(session: &leases::Session) -> Session {
    Session {
        id: session.id.clone(),
        uid: session.uid,
        user: session.user.clone(),
        service: session.service.clone(),
        leader: session.leader,
        logind: session.logind.clone(),
    }
}
