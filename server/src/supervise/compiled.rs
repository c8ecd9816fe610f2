//! Disk space of compiled code, which workers write: the supervisor deletes a folder that has too
//! much, and ends its workers if their drivers would not have written that.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tracing::{info, warn};

use super::exit::stop;
use super::stock::WorkerId;
use super::supervisor::{State, Supervisor};
use super::worker::{Phase, Worker, hex};
use crate::cache::Cache;
use crate::lease::Lease;

/// Returns the user whose compiled code is apart from that of the client's other users.
pub(super) fn owner(lease: &Lease) -> Option<u32> {
    (!lease.user.is_empty()).then_some(lease.uid)
}

impl State {
    /// Returns the folders of compiled code that live workers write, each with these workers and
    /// their processes.
    fn writers(&self, cache: &Cache) -> HashMap<PathBuf, (Vec<WorkerId>, Vec<u32>)> {
        let mut folders: HashMap<_, (Vec<_>, Vec<_>)> = HashMap::new();
        for (id, worker) in &self.workers {
            let (Some(pid), Some(known)) = (worker.pid, self.leases.get(&worker.lease)) else { continue };
            let folder = cache.compiled_place(&worker.client, owner(&known.lease));
            let (ids, pids) = folders.entry(folder).or_default();
            ids.push(*id);
            pids.push(pid);
        }
        folders
    }

    /// Stops workers that filled a folder with `excess`.
    ///
    /// None, if a driver among them may keep more than `most`: an earlier server of another
    /// configuration or release started it.
    fn stop_writers(&mut self, folder: &Path, ids: &[WorkerId], excess: &str, most: u64) {
        let Self { workers, leases, .. } = self;
        let honest = |worker: &Worker| worker.compiled_max == 0 || worker.compiled_max > most;
        if ids.iter().filter_map(|id| workers.get(id)).any(honest) {
            info!("cache {}: {excess}, which an earlier server allowed; deleted", folder.display());
            return;
        }
        for id in ids {
            let Some(worker) = workers.get_mut(id).filter(|w| w.phase != Phase::Ending) else { continue };
            warn!(
                gpusession_worker = hex(id),
                gpusession_lease = worker.lease,
                gpusession_client = worker.client,
                "worker {}: its client's folder has {excess}; killed",
                hex(id)
            );
            if let Some(lease) = leases.get_mut(&worker.lease) {
                lease.stock.leave(id, worker.starts());
            }
            let reason =
                format!("its client's programs wrote {excess}: the server keeps less; start it again");
            stop(id, worker, &reason);
        }
    }
}

impl Supervisor {
    /// Deletes folders with too much compiled code, and ends the workers that exceeded their bound.
    ///
    /// It waits for the disk. Returns `true` if the others have too much together.
    pub fn bound_compiled(&self) -> bool {
        let Some(cache) = &self.0.options.cache else { return false };
        let writers = self.state().writers(cache);
        let mut total: u64 = 0;
        // The lock is free while the folders are measured.
        for (folder, (ids, pids)) in writers {
            let Some(bytes) = cache.compiled_bytes(&folder, &pids) else { continue };
            match cache.excess(bytes) {
                Some(excess) => {
                    self.state().stop_writers(&folder, &ids, &excess, cache.compiled_max());
                    cache.delete(&folder);
                }
                None => total = total.saturating_add(bytes),
            }
        }
        total > cache.max()
    }
}
