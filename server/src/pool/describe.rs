//! Descriptions of this server, its leases and its GPUs, for clients and workers.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use gpusession_proto::control as wire;
use gpusession_proto::supervise::DeviceLimit;

use super::state::Pool;
use crate::lease::{Gpu, Lease, Place, Share};
use crate::net::host_port;
use crate::registry::GpuUse;

impl Pool {
    /// Returns `draining` while the server refuses new leases, else `online`.
    pub(super) async fn state(&self) -> String {
        if self.registry.draining().await.is_some() { "draining" } else { "online" }.into()
    }

    /// Returns the driver's version such as 580.159.04; empty if unknown.
    ///
    /// It comes from NVML or, failing that, from the driver at the start.
    pub fn driver_version(&self) -> String {
        let nvml =
            self.monitor.versions().map(|versions| versions.driver).filter(|driver| !driver.is_empty());
        nvml.unwrap_or_else(|| self.facts.driver_version.clone())
    }

    /// Returns the state of a lease, and its place if it waits for its GPUs.
    pub fn lease_state(&self, lease: &str) -> (&'static str, Place) {
        let idle = || self.parking.clock(lease, |clock| clock.hint().is_some());
        let serves = || if self.supervisor.activity(lease).0 > 0 && !idle() { "active" } else { "idle" };
        self.parking.state(lease).unwrap_or_else(|| (serves(), Place::default()))
    }

    /// Returns HOST:PORT of this server's control service, as configured or as the client reached
    /// it.
    pub(super) fn control_addresses(&self, reached: Option<SocketAddr>) -> Vec<String> {
        self.addresses(reached, self.facts.control.port(), true)
    }

    pub(super) fn data_addresses(&self, reached: Option<SocketAddr>) -> Vec<String> {
        self.addresses(reached, self.facts.data.port(), false)
    }

    /// Returns `true` if an administrator has named this server's addresses.
    pub(super) fn advertises(&self) -> bool {
        !self.facts.config.advertise.is_empty()
    }

    fn addresses(&self, reached: Option<SocketAddr>, port: u16, control: bool) -> Vec<String> {
        let advertised = &self.facts.config.advertise;
        if !advertised.is_empty() {
            return advertised
                .iter()
                .map(|a| host_port(&a.host, a.port.filter(|_| control).unwrap_or(port)))
                .collect();
        }
        let ip = reached.map(|a| a.ip().to_canonical()).unwrap_or(IpAddr::from([127, 0, 0, 1]));
        vec![host_port(&ip.to_string(), port)]
    }

    /// Describes a lease's GPUs for its client.
    pub(super) async fn devices_of(&self, lease: &Lease) -> Vec<wire::Device> {
        devices(lease, &self.registry.gpus().await)
    }

    pub(super) fn describe_lease(
        &self,
        lease: &Lease,
        gpus: &[GpuUse],
        reached: Option<SocketAddr>,
    ) -> wire::Lease {
        wire::Lease {
            id: lease.id.clone(),
            ticket_key: lease.ticket_key.to_vec(),
            fencing_token: lease.fencing_token,
            devices: devices(lease, gpus),
            ttl_usec: micros(lease.ttl),
            server: self.facts.config.name.clone(),
            data_addresses: self.data_addresses(reached),
            encrypted: lease.encrypted,
            // Empty: workers are taken by a call of their own, so that a repeated request cannot
            // take one twice.
            workers: Vec::new(),
            driver_version: self.driver_version(),
            cuda_version: self.facts.cuda_version,
            idle_timeout_usec: micros(self.timeouts(lease).first()),
        }
    }

    /// Describes a renewed lease; `lease` is `None` if it has ended since.
    ///
    /// Every field by name: a new one does not compile until it has a value.
    pub(super) fn describe_renewed(
        &self,
        id: String,
        lease: Option<&Lease>,
        gpus: &[GpuUse],
        ttl: Duration,
    ) -> wire::RenewedLease {
        let (state, place) = self.lease_state(&id);
        wire::RenewedLease {
            id,
            lost: false,
            reason: String::new(),
            ttl_usec: micros(ttl),
            state: state.into(),
            devices: lease.map(|l| devices(l, gpus)).unwrap_or_default(),
            fencing_token: lease.map_or(0, |l| l.fencing_token),
            idle_timeout_usec: lease.map_or(0, |l| micros(self.timeouts(l).first())),
            position: place.position,
            waiting: place.waiting,
        }
    }
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

pub(super) fn devices(lease: &Lease, gpus: &[GpuUse]) -> Vec<wire::Device> {
    lease
        .shares
        .iter()
        .filter_map(|s| Some((s, gpus.iter().find(|g| g.gpu.uuid == s.gpu)?)))
        .map(|(share, gpu)| device(&gpu.gpu, Some(share), gpu.state(), gpu))
        .collect()
}

pub(super) fn device(gpu: &Gpu, share: Option<&Share>, state: &str, used: &GpuUse) -> wire::Device {
    wire::Device {
        uuid: gpu.uuid.clone(),
        name: gpu.name.clone(),
        memory_bytes: gpu.memory_bytes,
        limit_bytes: share.map_or(gpu.offered_bytes(), |s| s.limit_bytes),
        sm_percent: share.map_or(100, |s| s.sm_percent),
        compute_major: gpu.compute_major,
        compute_minor: gpu.compute_minor,
        pci_address: gpu.pci_address.clone(),
        state: state.into(),
        memory_free_bytes: used.free_bytes(),
        sharing: gpu.sharing.as_str().into(),
    }
}

/// Returns the limits of a lease's workers on each GPU.
pub(super) fn limits(lease: &Lease, gpus: &[GpuUse]) -> Vec<DeviceLimit> {
    lease
        .shares
        .iter()
        .filter_map(|share| {
            let gpu = &gpus.iter().find(|g| g.gpu.uuid == share.gpu)?.gpu;
            let whole = share.limit_bytes >= gpu.memory_bytes;
            Some(DeviceLimit {
                uuid: gpu.uuid_bytes()?,
                memory_bytes: if whole { u64::MAX } else { share.limit_bytes },
                sm_percent: share.sm_percent,
                context_bytes: gpu.context_bytes,
            })
        })
        .collect()
}
