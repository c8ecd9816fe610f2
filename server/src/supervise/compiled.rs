//! Compiled code, which workers write: each gets its user's, and what is new stays for later ones.
//!
//! The supervisor deletes a folder that has too much, and ends its workers if their drivers would
//! not have written that.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::timeout;
use tracing::{info, warn};

use super::exit::stop_offender;
use super::stock::WorkerId;
use super::supervisor::{State, Supervisor};
use super::worker::{Phase, Worker, WorkerRecord, hex};
use crate::cache::Cache;
use crate::lease::Lease;

/// Time that a program waits for the code that its user's earlier programs compiled.
const LEND_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns the user whose lease it is, who shares compiled code with no other.
pub(super) fn owner(lease: &Lease) -> Option<u32> {
    (!lease.user.is_empty()).then_some(lease.uid)
}

/// A folder of compiled code that live workers write.
#[derive(Default)]
struct Written {
    client: String,
    ids: Vec<WorkerId>,
    pids: Vec<u32>,
}

impl WorkerRecord {
    /// Returns the folder of its own where its driver keeps compiled code.
    fn own_folder(&self, cache: &Cache) -> PathBuf {
        self.placed(cache, cache.of_worker(&self.client, &hex(&self.id)))
    }

    /// Returns a folder where this worker may write it.
    fn placed(&self, cache: &Cache, folder: PathBuf) -> PathBuf {
        if self.of_starter { folder } else { cache.before_a_starter(&folder) }
    }
}

impl State {
    /// Returns the folder where a worker's driver keeps compiled code; `None`: its lease is gone.
    ///
    /// Workers of an earlier release wrote into a store.
    pub(super) fn code_folder(&self, cache: &Cache, worker: &Worker) -> Option<PathBuf> {
        match worker.own_code {
            true => Some(worker.own_folder(cache)),
            false => {
                let known = self.leases.get(&worker.lease)?;
                Some(worker.placed(cache, cache.store(&worker.client, owner(&known.lease))))
            }
        }
    }

    /// Returns the folders of compiled code that live workers write.
    fn written(&self, cache: &Cache) -> HashMap<PathBuf, Written> {
        let mut folders: HashMap<_, Written> = HashMap::new();
        for (id, worker) in &self.workers {
            let (Some(pid), Some(folder)) = (worker.pid, self.code_folder(cache, worker)) else { continue };
            let written = folders.entry(folder).or_default();
            written.client.clone_from(&worker.client);
            written.ids.push(*id);
            written.pids.push(pid);
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
                "worker {}: its client's programs have {excess}; killed",
                hex(id)
            );
            if let Some(lease) = leases.get_mut(&worker.lease) {
                lease.stock.leave(id, worker.starts());
            }
            let reason =
                format!("its client's programs wrote {excess}: the server keeps less; start it again");
            stop_offender(id, worker, &reason);
        }
    }
}

impl Supervisor {
    /// Returns the bytes of compiled code that a worker's driver may keep.
    pub(super) fn code_max(&self, worker: &WorkerRecord) -> Option<u64> {
        let cache = self.0.options.cache.as_ref()?;
        Some(if worker.own_code { cache.added_max() } else { cache.compiled_max() })
    }

    /// Gives a worker what its user's earlier programs compiled, before its program reaches it.
    pub(super) async fn lend_code(&self, id: &WorkerId) {
        let Some(cache) = self.0.options.cache.clone() else { return };
        let (user, client, folder) = match self.state().workers.get(id) {
            Some(Worker { book: book @ WorkerRecord { code_of: Some(user), client, .. }, .. }) => {
                (*user, client.clone(), book.own_folder(&cache))
            }
            _ => return,
        };
        let shown = folder.display().to_string();
        // The program waits no longer for a slow disk, and linking stops at the same time.
        let lending = tokio::task::spawn_blocking(move || cache.lend(&client, user, &folder, LEND_TIMEOUT));
        let lent = timeout(LEND_TIMEOUT, lending).await;
        if let Ok(Ok(Err(e))) = lent {
            warn!("cache {shown}: compiled code cannot be linked: {e}; its program may compile again");
        }
    }

    /// Keeps what an exited worker's driver compiled, for the next programs of its user.
    pub(super) fn take_code_back(&self, worker: &WorkerRecord) {
        let Some(cache) = self.0.options.cache.clone().filter(|_| worker.own_code) else { return };
        let (client, user) = (worker.client.clone(), worker.code_of);
        let folder = worker.own_folder(&cache);
        tokio::task::spawn_blocking(move || match user {
            Some(user) => cache.take_back(&client, user, &folder),
            None => cache.delete(&folder),
        });
    }

    /// Deletes compiled code that no worker may use any longer.
    ///
    /// `first`: also that of workers that an earlier server left and that have exited since.
    pub fn drop_unused_code(&self, first: bool) {
        let Some(cache) = &self.0.options.cache else { return };
        // Before the workers, since a new one is in the table before its folder exists.
        let doubtful = cache.doubtful(first);
        let used = {
            let state = self.state();
            let mut used: HashSet<_> =
                state.workers.values().filter_map(|worker| state.code_folder(cache, worker)).collect();
            for left in &state.left {
                used.insert(left.book.own_folder(cache));
                used.insert(left.book.placed(cache, cache.store(&left.book.client, None)));
            }
            used
        };
        cache.drop_unused(doubtful, &used);
    }

    /// Deletes folders with too much compiled code, and ends the workers that exceeded their bound.
    ///
    /// The folders of a client's workers have the bound of one together, too. Many honest drivers
    /// may exceed that, so this ends only workers that keep deleted files open.
    /// It waits for the disk. Returns `true` if the others have too much together.
    pub fn bound_compiled(&self) -> bool {
        let Some(cache) = &self.0.options.cache else { return false };
        let written = self.state().written(cache);
        let mut clients: HashMap<_, Vec<_>> = HashMap::new();
        let stop = |folder: &Path, ids: &[WorkerId], excess: &str| {
            self.state().stop_writers(folder, ids, excess, cache.compiled_max());
            cache.delete(folder);
        };
        // The lock is free while the folders are measured.
        for (folder, Written { client, ids, pids }) in written {
            let Some(size) = cache.compiled_bytes(&folder, &pids) else { continue };
            match cache.excess(size.bytes) {
                Some(excess) => stop(&folder, &ids, &excess),
                None => clients.entry(client).or_default().push((size.part, size.kept, folder, ids)),
            }
        }
        let mut total: u64 = 0;
        for mut folders in clients.into_values() {
            folders.sort();
            let mut sum: u64 = folders.iter().map(|(bytes, ..)| bytes).sum();
            // The largest first: a client's other programs may have written little.
            while let Some(excess) = cache.excess(sum)
                && let Some((bytes, kept, folder, ids)) = folders.pop()
            {
                if kept > 0 {
                    stop(&folder, &ids, &excess);
                } else {
                    info!("cache {}: its client's programs have {excess}; deleted", folder.display());
                    cache.delete(&folder);
                }
                sum -= bytes;
            }
            total = total.saturating_add(sum);
        }
        total > cache.max()
    }
}
