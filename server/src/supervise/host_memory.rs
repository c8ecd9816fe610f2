//! Bounds the host memory of workers.
//!
//! No resource limit of the kernel counts the right thing: drivers reserve more addresses than any
//! machine has memory. The supervisor therefore reads the memory of each worker about once a
//! second.

use super::exit::stop;
use super::worker::{Phase, Worker, exceeds};
use super::{State, Supervisor};

/// Returns the anonymous and shared memory of a process in bytes, swapped out or not.
///
/// Memory that is mapped nowhere counts for no process, such as a memory file that was only
/// written. The service's `MemoryMax` bounds that.
fn taken(pid: u32) -> Option<u64> {
    counted(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

fn counted(status: &str) -> Option<u64> {
    let kib = |key: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Some((kib("RssAnon:")? + kib("RssShmem:")? + kib("VmSwap:").unwrap_or(0)) << 10)
}

impl Supervisor {
    /// Stops workers that use more host memory than their client's and user's limits allow.
    pub(super) fn bound_host_memory(&self) {
        let serve = |w: &Worker| matches!(w.phase, Phase::Active | Phase::Parked).then_some(w.pid).flatten();
        let asked: Vec<_> =
            self.state().workers.iter().filter_map(|(id, worker)| Some((*id, serve(worker)?))).collect();
        // The lock is free while `/proc` is read.
        let found: Vec<_> = asked.into_iter().filter_map(|(id, pid)| Some((id, taken(pid)?))).collect();
        let mut state = self.state();
        let State { workers, leases, limits, .. } = &mut *state;
        for (id, has) in found {
            let Some(worker) = workers.get_mut(&id) else { continue };
            let Some(lease) = leases.get(&worker.lease) else { continue };
            // Includes the limits of the program's user.
            let allowed = limits.of(&worker.client, worker.user());
            let Some((limit, bytes)) = allowed.smallest("host_memory") else { continue };
            let staging = lease.limits.smallest("staging").map_or(0, |(_, bytes)| bytes);
            // Device memory that is parked here, or on its way.
            let parked = match worker.moving || worker.phase == Phase::Parked {
                true => {
                    let held = lease.ledger.held(&id);
                    held.iter().map(|(_, granted, _)| *granted).fold(0, u64::saturating_add)
                }
                false => 0,
            };
            if has <= bytes.saturating_add(staging).saturating_add(parked) {
                continue;
            }
            let why = format!("its worker has {} MiB of the server's memory", has >> 20);
            let exceeded = limit.exceeded(why, "an administrator can raise it");
            exceeds(&id, worker, &exceeded, "");
            stop(&id, worker, &exceeded.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn memory_of_this_process() {
        let before = super::taken(std::process::id()).unwrap();
        let filled = std::hint::black_box(vec![1u8; 64 << 20]);
        let after = super::taken(std::process::id()).unwrap();
        assert!(after >= before + (60 << 20), "{before} {after}");
        drop(filled);
        assert_eq!(super::taken(u32::MAX), None);
    }

    #[test]
    fn swapped_memory_counts() {
        let status =
            "RssAnon:\t     100 kB\nRssFile:\t    5000 kB\nRssShmem:\t      20 kB\nVmSwap:\t       3 kB\n";
        assert_eq!(super::counted(status), Some(123 << 10));
        assert_eq!(super::counted(status.split("VmSwap").next().unwrap()), Some(120 << 10));
    }
}
