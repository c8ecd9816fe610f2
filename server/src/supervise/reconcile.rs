//! The driver's readings against the ledgers: memory that counts, memory that an exited worker
//! leaves in use, and workers that use too much.

use std::time::Duration;

use tracing::warn;

use super::attend::REAP_TIMEOUT;
use super::event::Event;
use super::exit::stop_offender;
use super::messages::say;
use super::park::{GONE_TIMEOUT, LEFT_BYTES};
use super::stock::WorkerId;
use super::supervisor::{State, Supervisor};
use super::worker::{Phase, hex};

impl Supervisor {
    /// Applies readings of the driver: process id, GPU and bytes of each process of this host.
    ///
    /// The driver was asked for them `age` ago; on a busy host it takes seconds.
    ///
    /// Stops workers that use a GPU outside their lease, or too much memory that was never granted.
    pub fn reconcile(&self, readings: &[(u32, [u8; 16], u64)], age: Duration) {
        let mut state = self.state();
        let State { workers, leases, .. } = &mut *state;
        for (id, worker) in workers.iter() {
            let Some(lease) = leases.get_mut(&worker.lease) else { continue };
            for device in 0..lease.ledger.devices().len() {
                let uuid = lease.ledger.devices()[device].uuid;
                let read = readings.iter().filter(|(pid, gpu, _)| Some(*pid) == worker.pid && *gpu == uuid);
                let bytes = read.map(|(.., bytes)| *bytes).fold(0, u64::saturating_add);
                lease.ledger.reading(id, device, bytes);
            }
        }
        // After a worker has exited, its memory must be free. If not, its GPUs are reported as
        // stuck.
        let now = self.0.clock.now();
        let State { workers, ended, .. } = &mut *state;
        ended.retain(|(pid, gpus, at)| {
            let passed = now.saturating_sub(*at);
            let listed = readings.iter().any(|(p, _, bytes)| p == pid && *bytes > 0);
            // Another worker may have the process id by now.
            let left = passed.saturating_sub(age) >= REAP_TIMEOUT
                && listed
                && !workers.values().any(|w| w.pid == Some(*pid));
            if left {
                let why = format!("memory of process {pid}, which has exited, is still in use");
                let _ = self.0.events.send(Event::Stuck { gpus: gpus.clone(), why });
            }
            !left && passed < REAP_TIMEOUT * 3
        });
        let State { workers, leases, .. } = &mut *state;
        // The driver lets a compromised worker use any GPU of the host.
        for (id, worker) in workers.iter_mut().filter(|(_, w)| w.phase != Phase::Ending) {
            let Some(lease) = leases.get_mut(&worker.lease) else { continue };
            let stranger = |gpu: &[u8; 16]| lease.ledger.devices().iter().all(|d| d.uuid != *gpu);
            let found = readings
                .iter()
                .find(|(pid, gpu, bytes)| Some(*pid) == worker.pid && *bytes > 0 && stranger(gpu));
            if let Some((_, gpu, _)) = found {
                let gpu = gpusession_proto::readings::uuid_text(gpu);
                warn!(
                    gpusession_worker = hex(id),
                    gpusession_lease = worker.lease,
                    "worker {}: holds memory on {gpu}, which is not in its lease; killed",
                    hex(id)
                );
                lease.stock.leave(id, worker.starts());
                stop_offender(id, worker, "its process uses a GPU that its lease does not have");
            }
            // It could also restore its own memory, which others' leases may have by now.
            let asked = now.saturating_sub(age);
            let parked = worker.phase == Phase::Parked && !worker.moving;
            // Before that, the one who parked it looks.
            let settled = worker.parked_at.is_none_or(|at| asked.saturating_sub(at) >= GONE_TIMEOUT * 2);
            let of_worker = readings.iter().filter(|(pid, ..)| Some(*pid) == worker.pid);
            let left = of_worker.map(|(.., bytes)| *bytes).max().unwrap_or(0);
            if parked && settled && left > LEFT_BYTES {
                warn!(
                    gpusession_worker = hex(id),
                    gpusession_lease = worker.lease,
                    "worker {}: its program is parked, but its process holds {} MiB of device memory; killed",
                    hex(id),
                    left >> 20
                );
                stop_offender(id, worker, "its program is parked, but its process holds device memory");
            }
        }
        for lease in leases.values_mut() {
            let before = lease.ledger.contexts_left();
            let says = lease.ledger.all_read(now);
            say(workers, says);
            if lease.ledger.contexts_left() > before {
                lease.changed.notify_waiters();
            }
        }
        let stays = |id: &WorkerId| workers.get(id).is_some_and(|w| w.phase != Phase::Ending);
        let offenders: Vec<_> = leases.values().flat_map(|l| l.ledger.offenders(stays)).collect();
        for (id, unasked) in offenders {
            if let Some(worker) = workers.get_mut(&id) {
                warn!(
                    gpusession_worker = hex(&id),
                    gpusession_lease = worker.lease,
                    "worker {}: holds {} MiB of device memory that it was never granted, and its lease is over its limit; killed",
                    hex(&id),
                    unasked >> 20
                );
                if let Some(lease) = leases.get_mut(&worker.lease) {
                    lease.stock.leave(&id, worker.starts());
                }
                stop_offender(
                    &id,
                    worker,
                    "its lease is over its memory limit, and its process holds the most memory that was never granted",
                );
            }
        }
    }
}
