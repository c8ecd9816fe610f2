//! The registry of a server that alone decides about its GPUs.
//!
//! The lease table is in memory, and a copy of it in a file.

use std::collections::HashMap;
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tracing::error;

use super::{GpuUse, Registry, Standing};
use crate::clock::{Clock, Random};
use crate::lease::{
    AllocateError, DEFAULT_TTL, Gpu, Lease, Passing, Place, Request, Rules, Table, WaitingView, Withdrawn,
};
use crate::store::{self, Shared, StoreError};

/// The lease table with its file and its sources of time and randomness.
pub struct LocalRegistry {
    table: Mutex<Table>,
    /// Result of [`Registry::gpus`] until the table changes, since each heartbeat reads it.
    gpus: Mutex<Option<Arc<[GpuUse]>>>,
    file: Shared,
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
}

impl LocalRegistry {
    /// Opens `leases.json` in the state directory.
    ///
    /// Also returns the leases whose GPUs are gone; [`LocalRegistry::store_now`] stores that.
    pub fn open(
        state_dir: &Path,
        gpus: Vec<Gpu>,
        rules: Rules,
        clock: Arc<dyn Clock>,
        random: Arc<dyn Random>,
    ) -> Result<(Self, Vec<Lease>), StoreError> {
        let file = state_dir.join("leases.json");
        let (table, lost) = Table::new(gpus, rules, store::read(&file)?, clock.now());
        let this =
            Self { table: Mutex::new(table), gpus: Mutex::default(), file: Shared::new(file), clock, random };
        Ok((this, lost))
    }

    /// Stores the table as it is: without the leases that are lost, since their GPUs may come back
    /// without them, and with the time that each lease has left.
    pub async fn store_now(&self) {
        self.file.changed();
        self.store_change().await;
    }

    // A poisoned lock is used: the table is consistent between any two of its methods.
    fn locked(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the table for reading.
    fn table(&self) -> impl Deref<Target = Table> {
        Reading(self.locked())
    }

    /// Changes the table, and drops the cached [`Registry::gpus`].
    ///
    /// `stored` decides from the outcome whether the file has to change, too.
    fn change<T>(&self, what: impl FnOnce(&mut Table) -> T, stored: impl FnOnce(&T) -> bool) -> T {
        let mut table = self.locked();
        let outcome = what(&mut table);
        *self.gpus.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if stored(&outcome) {
            self.file.changed();
        }
        outcome
    }

    async fn store(&self) -> Result<(), StoreError> {
        self.file.store(|| store::text(&self.table().save(self.clock.now()))).await
    }

    /// Stores the end of a lease, its lending or its return; an error is only logged.
    ///
    /// The change has happened already. A lease that ended and stays in the file expires after the
    /// next start, since no client renews it.
    async fn store_change(&self) {
        if let Err(e) = self.store().await {
            error!("leases: a change was not stored: {e}; a restart would undo it");
        }
    }
}

/// The locked table without `DerefMut`.
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
        let (now, unix) = (self.clock.now(), self.clock.unix());
        let (lease, fresh) = self.change(
            |table| table.allocate(request, now, unix, self.random.as_ref()),
            |made| matches!(made, Ok((_, true))),
        )?;
        // A lease of an earlier call is stored as well: that call may not have stored it yet.
        if let Err(e) = self.store().await {
            if fresh {
                self.change(|table| table.undo_allocate(&lease.id), |()| true);
            }
            error!("lease {}: not stored: {e}; the request is refused", lease.id);
            return Err(AllocateError::Storage(e.to_string()));
        }
        Ok((lease, fresh))
    }

    async fn renew(&self, client: &str, id: &str) -> Option<Duration> {
        let ttl = self.locked().renew(client, id, self.clock.now())?;
        // Clients renew shorter leases every 2 s. Only its owner renews a longer one, so the file
        // must have the new time.
        if ttl > DEFAULT_TTL {
            self.store_now().await;
        }
        Some(ttl)
    }

    async fn cancel(&self, client: &str, request_id: &str) -> Option<Lease> {
        let lease = self.change(|table| table.cancel(client, request_id), Option::is_some)?;
        self.store_change().await;
        Some(lease)
    }

    async fn release(&self, client: Option<&str>, id: &str) -> Option<Lease> {
        let lease = self.change(|table| table.remove(client, id), Option::is_some)?;
        self.store_change().await;
        Some(lease)
    }

    async fn lenders(&self, request: &Request, candidates: &[String]) -> Vec<String> {
        self.table().lenders(request, candidates)
    }

    async fn lend(&self, id: &str) -> bool {
        let there = self.change(|table| table.lend(id), |there| *there);
        if there {
            self.store_change().await;
        }
        there
    }

    async fn lenders_back(&self, id: &str, may_move: bool, candidates: &[String]) -> Vec<String> {
        self.table().lenders_back(id, may_move, candidates)
    }

    async fn reacquire(&self, id: &str, may_move: bool) -> Result<bool, Place> {
        let (was, taken) = self.change(
            |table| (table.is_lent(id), table.reacquire(id, may_move)),
            |(was, taken)| *was && taken.is_ok(),
        );
        if was && taken.is_ok() {
            self.store_change().await;
        }
        taken
    }

    async fn cancel_reacquire(&self, id: &str) {
        self.change(|table| table.cancel_reacquire(id), |()| false);
    }

    async fn is_lent(&self, id: &str) -> bool {
        self.table().is_lent(id)
    }

    async fn release_client(&self, client: &str, keep_boot: Option<&str>) -> Vec<Lease> {
        let others = |l: &Lease| l.client == client && keep_boot != Some(l.boot_id.as_str());
        let ended = self.change(|table| table.remove_where(others), |ended| !ended.is_empty());
        if !ended.is_empty() {
            self.store_change().await;
        }
        ended
    }

    async fn expire(&self) -> Vec<Lease> {
        let (now, unix) = (self.clock.now(), self.clock.unix());
        if !self.table().expires(now, unix) {
            return Vec::new();
        }
        let ended = self.change(|table| table.expire(now, unix), |ended| !ended.is_empty());
        self.store_change().await;
        ended
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

    async fn ending(&self, unix: u64) -> Vec<Lease> {
        let table = self.table();
        let leases = table.leases(self.clock.now()).map(|(lease, _)| lease);
        leases.filter(|lease| lease.until_unix != 0 && lease.until_unix <= unix).cloned().collect()
    }

    async fn of_client(&self, client: &str) -> Vec<Standing> {
        let table = self.table();
        let mine = table.leases(self.clock.now()).filter(|(lease, _)| lease.client == client);
        mine.map(|(lease, left)| Standing { lease: lease.clone(), left }).collect()
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
        let there = self.change(|table| table.withdraw(uuid, why), |there| *there);
        if there {
            self.store_change().await;
        }
        there
    }

    async fn withdraw_until_passed(&self, uuid: &str, fault: Passing, why: Option<String>) -> bool {
        // Each reading asks, and hardly any changes the table.
        if self.table().passing(uuid) != Some(fault) && why.is_none() {
            return false;
        }
        let change = |table: &mut Table| match why {
            Some(why) => table.withdraw_until_passed(uuid, fault, why),
            None => table.passed(uuid, fault),
        };
        let changed = self.change(change, |changed| *changed);
        if changed {
            self.store_change().await;
        }
        changed
    }

    async fn set_compute_mode(&self, uuid: &str, mode: u32) {
        self.change(|table| table.set_compute_mode(uuid, mode), |changed| *changed);
    }

    async fn drain(&self, why: Option<String>) -> Result<(), String> {
        self.change(|table| table.drain(why), |()| true);
        self.store().await.map_err(|e| e.to_string())
    }

    async fn stop(&self) {
        self.change(Table::stop, |()| false);
    }

    async fn draining(&self) -> Option<String> {
        self.table().draining().map(String::from)
    }

    async fn set_rules(&self, rules: Rules) {
        self.change(|table| table.set_rules(rules), |()| false);
    }
}
