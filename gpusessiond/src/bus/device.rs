//! The object of a GPU.

use std::sync::Arc;

use gpusession_bus::server_path;
use zbus::{OwnedObjectPath, interface};

use super::announce::announce;
use super::project::{DeviceEntry, cuda_version, health_of, state_of};
use super::shared::Shared;
use super::shown::Shown;

/// Object with the interface `org.gpusession1.Device`.
pub struct Device {
    pub(super) shared: Arc<Shared>,
    pub(super) shown: Shown<DeviceEntry>,
}

#[interface(name = "org.gpusession1.Device", introspection_docs = false)]
impl Device {
    #[zbus(property(emits_changed_signal = "const"), name = "UUID")]
    fn uuid(&self) -> String {
        self.shown.get().view.uuid.clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn name(&self) -> String {
        self.shown.get().view.name.clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn server(&self) -> OwnedObjectPath {
        server_path(&self.shown.get().view.server)
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn ordinal(&self) -> u32 {
        self.shown.get().view.ordinal
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn memory_total_bytes(&self) -> u64 {
        self.shown.get().view.memory_bytes
    }

    // Every heartbeat may change it, so it has no change signal.
    #[zbus(property(emits_changed_signal = "false"))]
    fn memory_free_bytes(&self) -> u64 {
        let shown = self.shown.get();
        let leases = self.shared.leases.snapshot();
        let snapshot = leases.borrow();
        let mut devices = snapshot
            .leases
            .iter()
            .flat_map(|l| l.facts.reported.devices.iter().zip(&l.gauges.memory_free_bytes));
        devices.find(|(d, _)| d.uuid == shown.view.uuid).map_or(0, |(_, free)| *free)
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn compute_capability(&self) -> (u32, u32) {
        self.shown.get().view.compute
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn driver_version(&self) -> String {
        self.shown.get().view.driver_version.clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn cuda_version(&self) -> String {
        cuda_version(self.shown.get().view.cuda_version)
    }

    #[zbus(property)]
    fn health(&self) -> &str {
        health_of(&self.shown.get().view)
    }

    #[zbus(property)]
    fn state(&self) -> String {
        state_of(&self.shown.get().view).to_owned()
    }

    #[zbus(property)]
    fn leases(&self) -> Vec<OwnedObjectPath> {
        self.shown.get().leases.clone()
    }

    #[zbus(property(emits_changed_signal = "const"), name = "PCIAddress")]
    fn pci_address(&self) -> String {
        self.shown.get().view.pci_address.clone()
    }
}

announce! { Device, DeviceEntry;
    leases_changed: |d: &DeviceEntry| d.leases.clone(),
    state_changed: |d: &DeviceEntry| state_of(&d.view).to_owned(),
    health_changed: |d: &DeviceEntry| health_of(&d.view),
}
