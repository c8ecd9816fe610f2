//! Values of properties, computed from a snapshot.

use std::time::Duration;

use zbus::OwnedObjectPath;

use super::device_path;
use crate::leases::{DeviceView, LeaseView, ServerView, Snapshot};

/// Returns the shortest of the servers' times that are not 0; 0 if all are.
pub(super) fn shortest(snapshot: &Snapshot, time: impl Fn(&ServerView) -> u64) -> u64 {
    snapshot.servers.iter().map(time).filter(|usec| *usec > 0).min().unwrap_or(0)
}

/// Returns the object paths of a lease's GPUs.
pub(super) fn device_paths(view: &LeaseView) -> Vec<OwnedObjectPath> {
    view.devices.iter().map(|d| device_path(&d.device.uuid)).collect()
}

/// Returns the bytes of each GPU's memory that a lease may use; 0 if unknown.
pub(super) fn memory_limit(view: &LeaseView) -> u64 {
    view.devices.iter().map(|d| d.device.limit_bytes).min().unwrap_or(0)
}

/// Returns the share of each GPU's multiprocessors: as granted, before the grant as requested.
pub(super) fn sm_percent(view: &LeaseView) -> u32 {
    // Servers that predate shares send 0.
    let granted = view.devices.iter().map(|d| d.device.sm_percent).filter(|percent| *percent != 0);
    granted.min().unwrap_or(view.spec.sm_percent)
}

/// Returns place and length of a server's queue; zeros without a queue.
pub(super) fn waits_at(view: &LeaseView) -> (u32, u32) {
    view.waits().and_then(|t| t.place).unwrap_or_default()
}

/// Returns why a pending lease is not held, or a parked one does not come back.
pub(super) fn waits_for(view: &LeaseView) -> &str {
    view.waits().map_or("", |t| &t.message)
}

pub(super) fn state_of(view: &DeviceView) -> &str {
    if view.device.state.is_empty() { "leased" } else { &view.device.state }
}

pub(super) fn health_of(view: &DeviceView) -> &'static str {
    if state_of(view) == "broken" { "broken" } else { "ok" }
}

pub(super) fn cuda_version(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

pub(super) fn usec(duration: Duration) -> u64 {
    duration.as_micros() as u64
}
