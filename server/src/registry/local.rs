//! The registry of a server that alone decides about its GPUs: the lease table in memory, a copy of it in a file.

use std::collections::HashMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tracing::{error, warn};

use super::{GpuUse, Registry, Standing};
use crate::clock::{Clock, Random};
use crate::lease::{AllocateError, Gpu, Lease, Request, Rules, Table, WaitingView, Withdrawn};
use crate::store::{self, StoreError};

/// See the module.
pub struct LocalRegistry {
    table: Mutex<Table>,
    /// [`Registry::gpus`] until the table changes: asked for with every heartbeat of every client.
    gpus: Mutex<Option<Arc<[GpuUse]>>>,
    file: PathBuf,
    /// Number of the latest change of the table that has to be stored.
    changes: AtomicU64,
    stored: Arc<tokio::sync::Mutex<Stored>>,
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
}

/// What the file has.
#[derive(Default)]
struct Stored {
    /// The latest change that is in it.
    change: u64,
    #[cfg(test)]
    writes: u32,
}

impl LocalRegistry {
    /// Opens `leases.json` in the state directory.
    pub fn open(
        state_dir: &Path,
        gpus: Vec<Gpu>,
        rules: Rules,
        clock: Arc<dyn Clock>,
        random: Arc<dyn Random>,
    ) -> Result<Self, StoreError> {
        let file = state_dir.join("leases.json");
        let (table, lost) = Table::new(gpus, rules, store::read(&file)?, clock.now());
        for lease in lost {
            warn!(
                gpusession_lease = lease.id,
                gpusession_client = lease.client,
                "lease {} ended: a GPU of it is no longer served",
                lease.id
            );
        }
        Ok(Self {
            table: Mutex::new(table),
            gpus: Mutex::default(),
            file,
            changes: AtomicU64::new(0),
            stored: Arc::default(),
            clock,
            random,
        })
    }

    // The table is consistent between any two of its methods, also after a panic elsewhere.
    fn locked(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To read.
    fn table(&self) -> impl Deref<Target = Table> {
        Reading(self.locked())
    }

    /// To change what [`Registry::gpus`] says.
    fn change(&self) -> MutexGuard<'_, Table> {
        let table = self.locked();
        *self.gpus.lock().unwrap_or_else(PoisonError::into_inner) = None;
        table
    }

    /// Numbers a change that was made under this lock.
    fn number(&self, _changed: &MutexGuard<'_, Table>) -> u64 {
        self.changes.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns once a change is in the file. All those that come while the file is being written are written together.
    async fn store(&self, change: u64) -> Result<(), StoreError> {
        let mut stored = self.stored.clone().lock_owned().await;
        if stored.change >= change {
            return Ok(());
        }
        let (saved, latest) = {
            let table = self.locked();
            (table.save(), self.changes.load(Ordering::Relaxed))
        };
        let file = self.file.clone();
        // With the lock: whoever waits here may be gone before it is written.
        let writing = tokio::task::spawn_blocking(move || {
            #[cfg(test)]
            (stored.writes += 1);
            store::write(&file, &saved)?;
            stored.change = latest;
            Ok(())
        });
        writing.await.unwrap_or_else(|e| Err(StoreError::Io { path: self.file.clone(), error: e.into() }))
    }

    /// Stores an end, or that a lease was set aside or came back. It is true already: should the file keep a lease that ended,
    /// it ends after the next start for want of renewals.
    async fn store_change(&self, change: u64) {
        if let Err(e) = self.store(change).await {
            error!("a change of the leases was not stored: {e}");
        }
    }

    /// The same where there was a change; whether there was.
    async fn store_if(&self, change: Option<u64>) -> bool {
        if let Some(change) = change {
            self.store_change(change).await;
        }
        change.is_some()
    }

    /// Takes leases out.
    async fn end(&self, end: impl FnOnce(&mut Table) -> Vec<Lease>) -> Vec<Lease> {
        let (ended, change) = {
            let mut table = self.change();
            let ended = end(&mut table);
            let change = (!ended.is_empty()).then(|| self.number(&table));
            (ended, change)
        };
        self.store_if(change).await;
        ended
    }
}

/// Cannot be changed through.
struct Reading<'a>(MutexGuard<'a, Table>);

impl Deref for Reading<'_> {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.0
    }
}

#[async_trait]
impl Registry for LocalRegistry {
    async fn allocate(&self, request: &Request) -> Result<(Lease, bool), AllocateError> {
        let (lease, fresh, change) = {
            let mut table = self.change();
            let (lease, fresh) =
                table.allocate(request, self.clock.now(), self.clock.unix(), self.random.as_ref())?;
            // What an earlier request made may still be on its way to the file.
            let change = if fresh { self.number(&table) } else { self.changes.load(Ordering::Relaxed) };
            (lease, fresh, change)
        };
        if let Err(e) = self.store(change).await {
            if fresh {
                self.change().undo_allocate(&lease.id);
            }
            error!("a lease was not stored: {e}");
            return Err(AllocateError::Storage(e.to_string()));
        }
        Ok((lease, fresh))
    }

    async fn renew(&self, client: &str, id: &str) -> Option<Duration> {
        self.locked().renew(client, id, self.clock.now())
    }

    async fn release(&self, client: Option<&str>, id: &str) -> Option<Lease> {
        let (lease, change) = {
            let mut table = self.change();
            (table.remove(client, id)?, self.number(&table))
        };
        self.store_change(change).await;
        Some(lease)
    }

    async fn lenders(&self, request: &Request, candidates: &[String]) -> Vec<String> {
        self.table().lenders(request, candidates)
    }

    async fn set_aside(&self, id: &str) -> bool {
        let change = {
            let mut table = self.change();
            table.set_aside(id).then(|| self.number(&table))
        };
        self.store_if(change).await
    }

    async fn lenders_back(&self, id: &str, may_move: bool, candidates: &[String]) -> Vec<String> {
        self.table().lenders_back(id, may_move, candidates)
    }

    async fn take_back(&self, id: &str, may_move: bool) -> Result<bool, usize> {
        let (taken, change) = {
            let mut table = self.change();
            let was = table.is_aside(id);
            let taken = table.take_back(id, may_move);
            let change = (was && taken.is_ok()).then(|| self.number(&table));
            (taken, change)
        };
        self.store_if(change).await;
        taken
    }

    async fn stay_aside(&self, id: &str) {
        self.change().stay_aside(id);
    }

    async fn is_aside(&self, id: &str) -> bool {
        self.table().is_aside(id)
    }

    async fn release_client(&self, client: &str, keep_boot: Option<&str>) -> Vec<Lease> {
        self.end(|table| table.remove_where(|l| l.client == client && keep_boot != Some(l.boot_id.as_str())))
            .await
    }

    async fn expire(&self) -> Vec<Lease> {
        self.end(|table| table.expire(self.clock.now(), self.clock.unix())).await
    }

    async fn next_expiry(&self) -> Option<Duration> {
        self.table().next_deadline().map(|d| d.saturating_sub(self.clock.now()))
    }

    async fn get(&self, id: &str) -> Option<Standing> {
        let table = self.table();
        table.get(id, self.clock.now()).map(|(lease, left)| Standing { lease: lease.clone(), left })
    }

    async fn leases(&self) -> Vec<Standing> {
        let table = self.table();
        table.leases(self.clock.now()).map(|(lease, left)| Standing { lease: lease.clone(), left }).collect()
    }

    async fn holds(&self, id: &str) -> bool {
        self.table().get(id, self.clock.now()).is_some()
    }

    async fn count(&self) -> usize {
        self.table().leases(self.clock.now()).count()
    }

    async fn gpus(&self) -> Arc<[GpuUse]> {
        let table = self.table();
        let mut known = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*known {
            return known.clone();
        }
        let mut holders: HashMap<&str, Vec<String>> = HashMap::new();
        for (lease, _) in table.leases(self.clock.now()) {
            for share in &lease.shares {
                holders.entry(&share.gpu).or_default().push(lease.id.clone());
            }
        }
        let used = table.used();
        let facts = |g: &Gpu| GpuUse {
            gpu: g.clone(),
            used_bytes: used.get(g.uuid.as_str()).copied().unwrap_or(0),
            leases: holders.remove(g.uuid.as_str()).unwrap_or_default(),
            withdrawn: table.withdrawn(&g.uuid).cloned(),
        };
        let gpus: Arc<[GpuUse]> = table.gpus().iter().map(facts).collect();
        *known = Some(gpus.clone());
        gpus
    }

    async fn waiting(&self) -> Vec<WaitingView> {
        self.table().waiting(self.clock.now())
    }

    async fn withdraw(&self, uuid: &str, why: Option<Withdrawn>) -> bool {
        let change = {
            let mut table = self.change();
            table.withdraw(uuid, why).then(|| self.number(&table))
        };
        self.store_if(change).await
    }

    async fn drain(&self, why: Option<String>) {
        self.change().drain(why);
    }

    async fn draining(&self) -> Option<String> {
        self.table().draining().map(String::from)
    }

    async fn set_rules(&self, rules: Rules) {
        self.change().set_rules(rules);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use crate::clock::testing::Counting;
    use crate::lease::tests::{gpu, request};

    fn open(folder: &Path) -> Arc<LocalRegistry> {
        let gpus = (0..20).map(|i| gpu(i, 16 << 30)).collect();
        let (clock, random) = (Arc::new(SystemClock), Arc::new(Counting::default()));
        Arc::new(LocalRegistry::open(folder, gpus, Rules::default(), clock, random).unwrap())
    }

    #[tokio::test]
    async fn changes_that_come_together_are_stored_together() {
        let folder = tempfile::tempdir().unwrap();
        let registry = open(folder.path());
        // As if the file were being written.
        let writing = registry.stored.clone().lock_owned().await;
        let mut asked = tokio::task::JoinSet::new();
        for i in 0..20 {
            let registry = registry.clone();
            asked.spawn(async move { registry.allocate(&request(&format!("vm-{i}"), 1, 100.0)).await });
        }
        while registry.count().await < 20 {
            tokio::task::yield_now().await;
        }
        assert!(asked.try_join_next().is_none(), "answered before it is stored");
        drop(writing);
        while let Some(made) = asked.join_next().await {
            made.unwrap().unwrap();
        }
        assert_eq!(registry.stored.lock().await.writes, 1);
        assert_eq!(open(folder.path()).count().await, 20, "all of them are in the file");
    }

    #[tokio::test]
    async fn who_asks_again_waits_for_the_file_too_and_a_lease_that_is_not_stored_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let registry = open(folder.path());
        let same = crate::lease::Request { request_id: "same".into(), ..request("vm", 1, 100.0) };
        let writing = registry.stored.clone().lock_owned().await;
        let ask = || {
            let (registry, same) = (registry.clone(), same.clone());
            tokio::spawn(async move { registry.allocate(&same).await })
        };
        let (first, again) = (ask(), ask());
        while registry.count().await < 1 {
            tokio::task::yield_now().await;
        }
        drop(folder);
        assert!(!first.is_finished() && !again.is_finished());
        drop(writing);
        for asked in [first, again] {
            assert!(matches!(asked.await.unwrap(), Err(AllocateError::Storage(_))));
        }
        assert_eq!(registry.count().await, 0);
    }
}
