//! Facts of a lease as its server reports them: by the grant, by renewals and by events.

use gpusession_proto::control;

/// Facts of a held lease that its server reports; the default while the lease is pending.
///
/// Snapshots copy them as a whole, so a new one needs a field here and no other place.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reported {
    /// Name of the server.
    pub server: String,
    /// Its GPUs.
    pub devices: Vec<DeviceView>,
    /// Grows with each grant on other GPUs.
    pub fencing_token: u64,
    /// Whether data connections are encrypted.
    pub encrypted: bool,
    /// NVIDIA driver version of the server.
    pub driver_version: String,
    /// 1000 * major + 10 * minor.
    pub cuda_version: u32,
    /// Rest after which the server parks or releases it, in microseconds; 0 for never or unknown.
    pub idle_timeout_usec: u64,
}

/// A GPU of a lease, as its server describes it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DeviceView {
    /// UUID, as `GPU-` and hexadecimal digits.
    pub uuid: String,
    /// Model, such as `NVIDIA H100`.
    pub name: String,
    /// State at the server; empty from servers that predate it.
    pub state: String,
    /// Memory of the card.
    pub memory_bytes: u64,
    /// Memory that the lease may use.
    pub limit_bytes: u64,
    /// Share of the multiprocessors; 0 from servers that predate shares.
    pub sm_percent: u32,
    /// Compute capability: major, minor.
    pub compute: (u32, u32),
    /// PCI address on the server's host.
    pub pci_address: String,
    /// Name of its server.
    pub server: String,
    /// Number within the lease, from 0.
    pub ordinal: u32,
    /// NVIDIA driver version of the server.
    pub driver_version: String,
    /// 1000 * major + 10 * minor.
    pub cuda_version: u32,
}

impl Reported {
    /// Takes the facts of a lease that its server has granted.
    pub fn granted(lease: &control::Lease) -> Self {
        // Every field by name: a new one does not compile until it is used here.
        let control::Lease {
            id: _,
            ticket_key: _,
            fencing_token,
            devices,
            ttl_usec: _,
            server,
            data_addresses: _,
            encrypted,
            workers: _,
            driver_version,
            cuda_version,
            idle_timeout_usec,
        } = lease;
        let mut reported = Self {
            server: server.clone(),
            devices: Vec::new(),
            fencing_token: *fencing_token,
            encrypted: *encrypted,
            driver_version: driver_version.clone(),
            cuda_version: *cuda_version,
            idle_timeout_usec: *idle_timeout_usec,
        };
        reported.devices = reported.views(devices);
        reported
    }

    /// Takes the facts of a renewed lease; returns `true` if observers learn a change.
    pub fn renew(&mut self, renewed: &control::RenewedLease) -> bool {
        // Every field by name: a new one does not compile until it is used here.
        let control::RenewedLease {
            id: _,
            lost: _,
            reason: _,
            ttl_usec: _,
            state: _,
            devices,
            fencing_token,
            idle_timeout_usec,
            position: _,
            waiting: _,
        } = renewed;
        let moved = self.set_devices(devices, *fencing_token);
        let before = std::mem::replace(&mut self.idle_timeout_usec, *idle_timeout_usec);
        moved || before != *idle_timeout_usec
    }

    /// Updates the GPUs; returns `true` if observers learn a change.
    ///
    /// A lease that was lent may return on other GPUs of the same model, with a newer fencing
    /// token.
    pub fn set_devices(&mut self, devices: &[control::Device], fencing_token: u64) -> bool {
        if devices.len() != self.devices.len() {
            return false;
        }
        let devices = self.views(devices);
        let announced = |d: &DeviceView| (d.uuid.clone(), d.state.clone());
        let mut news = !devices.iter().map(announced).eq(self.devices.iter().map(announced));
        self.devices = devices;
        // 0 comes from servers that predate this field.
        if fencing_token != 0 && fencing_token != self.fencing_token {
            self.fencing_token = fencing_token;
            news = true;
        }
        news
    }

    fn views(&self, devices: &[control::Device]) -> Vec<DeviceView> {
        (0..)
            .zip(devices)
            .map(|(ordinal, device)| DeviceView {
                uuid: device.uuid.clone(),
                name: device.name.clone(),
                state: device.state.clone(),
                memory_bytes: device.memory_bytes,
                limit_bytes: device.limit_bytes,
                sm_percent: device.sm_percent,
                compute: (device.compute_major, device.compute_minor),
                pci_address: device.pci_address.clone(),
                server: self.server.clone(),
                ordinal,
                driver_version: self.driver_version.clone(),
                cuda_version: self.cuda_version,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(uuid: &str) -> control::Device {
        control::Device { uuid: uuid.into(), state: "leased".into(), ..Default::default() }
    }

    fn reported() -> Reported {
        Reported::granted(&control::Lease {
            server: "gpu-a".into(),
            devices: vec![device("GPU-1")],
            fencing_token: 7,
            encrypted: true,
            driver_version: "580.1".into(),
            cuda_version: 13000,
            idle_timeout_usec: 60,
            ..Default::default()
        })
    }

    fn renewal(
        devices: Vec<control::Device>,
        fencing_token: u64,
        idle_timeout_usec: u64,
    ) -> control::RenewedLease {
        control::RenewedLease { devices, fencing_token, idle_timeout_usec, ..Default::default() }
    }

    #[test]
    fn a_renewal_with_the_same_facts_is_no_change() {
        let mut known = reported();
        assert!(!known.renew(&renewal(vec![device("GPU-1")], 7, 60)));
        let freer = control::Device { memory_free_bytes: 1, ..device("GPU-1") };
        assert!(!known.renew(&renewal(vec![freer], 0, 60)), "a gauge, and a server without tokens");
        assert!(!known.renew(&renewal(vec![], 8, 60)), "not as many GPUs as it has");
        assert_eq!(known, reported());
    }

    #[test]
    fn each_change_of_a_renewal_is_learned_once() {
        let mut known = reported();
        let broken = control::Device { state: "broken".into(), ..device("GPU-1") };
        for changed in [
            renewal(vec![broken], 7, 60),
            renewal(vec![device("GPU-2")], 7, 60),
            renewal(vec![device("GPU-2")], 8, 60),
            renewal(vec![device("GPU-2")], 8, 30),
            renewal(vec![], 0, 0),
        ] {
            assert!(known.renew(&changed), "{changed:?}");
            assert!(!known.renew(&changed), "{changed:?}");
        }
        assert_eq!((known.fencing_token, known.idle_timeout_usec), (8, 0));
        let gpu = &known.devices[0];
        assert_eq!((gpu.uuid.as_str(), gpu.server.as_str(), gpu.cuda_version), ("GPU-2", "gpu-a", 13000));
    }

    #[test]
    fn a_limit_moves_without_an_announcement() {
        let mut known = reported();
        let limited = control::Device { limit_bytes: 5, ..device("GPU-1") };
        assert!(!known.renew(&renewal(vec![limited], 7, 60)));
        assert_eq!(known.devices[0].limit_bytes, 5);
    }
}
