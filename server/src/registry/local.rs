//! The registry of a server that alone decides about its GPUs: the lease table in memory, a copy of it in a file.

use std::collections::HashMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};
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
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
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
        Ok(Self { table: Mutex::new(table), gpus: Mutex::default(), file, clock, random })
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

    /// Stores an end, or that a lease was set aside or came back. It is true already: should the file keep a lease that ended,
    /// it ends after the next start for want of renewals.
    fn store_change(&self, table: &Table) {
        if let Err(e) = store::write(&self.file, &table.save()) {
            error!("a change of the leases was not stored: {e}");
        }
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
        let mut table = self.change();
        let (lease, fresh) =
            table.allocate(request, self.clock.now(), self.clock.unix(), self.random.as_ref())?;
        if fresh && let Err(e) = store::write(&self.file, &table.save()) {
            table.undo_allocate(&lease.id);
            error!("a lease was not stored: {e}");
            return Err(AllocateError::Storage(e.to_string()));
        }
        Ok((lease, fresh))
    }

    async fn renew(&self, client: &str, id: &str) -> Option<Duration> {
        self.locked().renew(client, id, self.clock.now())
    }

    async fn release(&self, client: Option<&str>, id: &str) -> Option<Lease> {
        let mut table = self.change();
        let lease = table.remove(client, id)?;
        self.store_change(&table);
        Some(lease)
    }

    async fn lenders(&self, request: &Request, candidates: &[String]) -> Vec<String> {
        self.table().lenders(request, candidates)
    }

    async fn set_aside(&self, id: &str) -> bool {
        let mut table = self.change();
        let there = table.set_aside(id);
        if there {
            self.store_change(&table);
        }
        there
    }

    async fn lenders_back(&self, id: &str, may_move: bool, candidates: &[String]) -> Vec<String> {
        self.table().lenders_back(id, may_move, candidates)
    }

    async fn take_back(&self, id: &str, may_move: bool) -> Result<bool, usize> {
        let mut table = self.change();
        let was = table.is_aside(id);
        let taken = table.take_back(id, may_move);
        if was && taken.is_ok() {
            self.store_change(&table);
        }
        taken
    }

    async fn stay_aside(&self, id: &str) {
        self.change().stay_aside(id);
    }

    async fn is_aside(&self, id: &str) -> bool {
        self.table().is_aside(id)
    }

    async fn release_client(&self, client: &str, keep_boot: Option<&str>) -> Vec<Lease> {
        let mut table = self.change();
        let ended = table.remove_where(|l| l.client == client && keep_boot != Some(l.boot_id.as_str()));
        if !ended.is_empty() {
            self.store_change(&table);
        }
        ended
    }

    async fn expire(&self) -> Vec<Lease> {
        let mut table = self.change();
        let ended = table.expire(self.clock.now(), self.clock.unix());
        if !ended.is_empty() {
            self.store_change(&table);
        }
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
        let mut table = self.change();
        let there = table.withdraw(uuid, why);
        if there {
            self.store_change(&table);
        }
        there
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
