//! Values of properties, computed from a snapshot.

use std::collections::BTreeMap;
use std::time::Duration;

use gpusession_bus::{device_path, lease_path};
use zbus::OwnedObjectPath;

use super::shared::Shared;
use crate::leases::{DeviceView, LeaseFacts, LeaseState, LeaseView, ServerFacts, Snapshot};

/// Returns the shortest of the servers' times that are not 0; 0 if all are.
pub(super) fn shortest(snapshot: &Snapshot, time: impl Fn(&ServerFacts) -> u64) -> u64 {
    snapshot.server_facts().map(time).filter(|usec| *usec > 0).min().unwrap_or(0)
}

/// Returns the object paths of a lease's GPUs.
pub(super) fn device_paths(view: &LeaseFacts) -> Vec<OwnedObjectPath> {
    view.reported.devices.iter().map(|d| device_path(&d.uuid)).collect()
}

/// Returns the bytes of each GPU's memory that a lease may use; 0 if unknown.
pub(super) fn memory_limit(view: &LeaseFacts) -> u64 {
    view.reported.devices.iter().map(|d| d.limit_bytes).min().unwrap_or(0)
}

/// Returns the share of each GPU's multiprocessors: as granted, before the grant as requested.
pub(super) fn sm_percent(view: &LeaseFacts) -> u32 {
    // Servers that predate shares send 0.
    let granted = view.reported.devices.iter().map(|d| d.sm_percent).filter(|percent| *percent != 0);
    granted.min().unwrap_or(view.spec.sm_percent)
}

/// Returns place and length of a server's queue; zeros without a queue.
pub(super) fn waits_at(view: &LeaseFacts) -> (u32, u32) {
    view.waits().and_then(|t| t.place).unwrap_or_default()
}

/// Returns why a pending lease is not held, or a parked one does not come back.
pub(super) fn waits_for(view: &LeaseFacts) -> &str {
    view.waits().map_or("", |t| &t.message)
}

pub(super) fn state_of(view: &DeviceView) -> &str {
    if view.state.is_empty() { "leased" } else { &view.state }
}

pub(super) fn health_of(view: &DeviceView) -> &'static str {
    if state_of(view) == "broken" { "broken" } else { "ok" }
}

pub(super) fn cuda_version(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Returns when a lease ends unless it is renewed, in wall-clock microseconds; 0 while pending.
///
/// Asks the lease manager: no signal announces a renewal, so a view that was shown is out of date.
pub(super) fn expires_usec(shared: &Shared, view: &LeaseView) -> u64 {
    let leases = shared.leases.snapshot();
    let snapshot = leases.borrow();
    let expires = snapshot.lease(&view.facts.id).unwrap_or(view).gauges.expires;
    expires.map_or(0, |at| snapshot.clock.wall_usec(at))
}

pub(super) fn usec(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

/// A GPU and the leases that it belongs to.
#[derive(Clone, PartialEq)]
pub struct DeviceEntry {
    pub view: DeviceView,
    pub leases: Vec<OwnedObjectPath>,
}

/// Returns `true` if a lease has an object: a one-time request has none before its grant.
pub fn shown(lease: &LeaseFacts) -> bool {
    !(lease.spec.once && lease.state == LeaseState::Pending)
}

/// Collects the GPUs of this client's leases by UUID.
pub fn devices(snapshot: &Snapshot) -> BTreeMap<String, DeviceEntry> {
    let mut devices: BTreeMap<String, DeviceEntry> = BTreeMap::new();
    for lease in snapshot.lease_facts().filter(|l| shown(l)) {
        for view in &lease.reported.devices {
            devices
                .entry(view.uuid.clone())
                .or_insert_with(|| DeviceEntry { view: view.clone(), leases: Vec::new() })
                .leases
                .push(lease_path(&lease.id));
        }
    }
    devices
}
