//! State of the supervisor, and access to it.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::readings::uuid_bytes;
use gpusession_proto::supervise::DeviceLimit;
use tokio::sync::{Notify, broadcast};

use super::event::Event;
use super::farewells::Farewells;
use super::groups::WorkerGroups;
use super::handover::{LeftWorker, Store};
use super::quota::Ledger;
use super::request_rate::RequestRate;
use super::shares::Shares;
use super::stock::{Stock, WorkerId};
use super::worker::Worker;
use crate::accounting::Accounting;
use crate::cache::Cache;
use crate::clock::{Clock, Moment, Random};
use crate::isolation::Decision;
use crate::lease::Lease;
use crate::limits::{Effective, Exceeded, Limits};
use crate::log_throttle::LogThrottle;
use crate::mps::Mps;
use crate::spawn::Spawner;
use crate::starter::link::Starter;

/// Options with which this server starts workers.
#[derive(Debug, Clone)]
pub struct Options {
    /// Path of the worker's program.
    pub program: PathBuf,
    /// The way in which it is started.
    pub starter: Starter,
    /// User of the workers.
    pub uid: u32,
    /// Path of the driver library that workers load.
    pub driver: PathBuf,
    /// Cache on disk; `None`: workers keep nothing there.
    pub cache: Option<Cache>,
    /// Ready workers per lease.
    pub warm_workers: u32,
    /// Whether workers look if the driver cleared the memory that it gives.
    pub verify_memory: bool,
    /// Time without use after which a lease keeps only one ready worker.
    pub idle_exit: Duration,
    /// Isolation of workers, which never changes while the server runs.
    pub isolation: Decision,
    /// Settings of MPS; `None`: this server does not use MPS.
    pub mps: Option<crate::mps::Settings>,
    /// Control groups of workers.
    pub groups: WorkerGroups,
}

/// Device memory that workers have looked at before programs got it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sampled {
    /// Bytes that they read.
    pub bytes: u64,
    /// Bytes of these that the driver had not cleared.
    pub left: u64,
}

pub(super) struct LeaseState {
    pub(super) lease: Lease,
    pub(super) limits: Effective,
    pub(super) ledger: Ledger,
    pub(super) stock: Stock,
    /// Lent or parked: no worker may start.
    pub(super) away: bool,
    /// When its last process exited or, before the first one, the lease began.
    pub(super) unused: Moment,
    pub(super) changed: Arc<Notify>,
    /// When its programs were last asked to return unused memory.
    pub(super) recalled: Option<Moment>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) workers: HashMap<WorkerId, Worker>,
    pub(super) limits: Limits,
    pub(super) leases: HashMap<String, LeaseState>,
    /// Workers of an earlier server whose leases are not added yet.
    pub(super) left: Vec<LeftWorker>,
    /// Objects that workers share.
    pub(super) shares: Shares,
    /// Recently exited workers: process id, GPUs, time of the exit.
    pub(super) ended: Vec<(u32, Vec<String>, Moment)>,
    pub(super) farewells: Farewells,
    /// Memory that workers have looked at, by GPU.
    pub(super) sampled: BTreeMap<String, Sampled>,
    pub(super) closing: bool,
    /// When running programs were last noted for accounting, in minutes.
    pub(super) noted: u64,
}

impl State {
    /// Checks that a client's and a user's limits leave room for `more`.
    ///
    /// The error holds the refusal, and the room that is left.
    pub(super) fn within(
        &self,
        (client, user): (&str, &str),
        name: &'static str,
        more: u64,
        what: &str,
        count: impl Fn(&Worker) -> u64,
    ) -> Result<(), (Exceeded, u64)> {
        let limits = self.limits.of(client, user);
        let site = limits.scope == crate::limits::Scope::Site;
        for limit in limits.entries(name) {
            let crate::limits::Bound::Number(most) = limit.bound else { continue };
            let counts = |worker: &&Worker| match limit.of_user {
                false => worker.client == client,
                true => worker.user() == user && (site || worker.client == client),
            };
            let have: u64 = self.workers.values().filter(counts).map(&count).sum();
            if have + more > most {
                let why = format!("there are {have} {what}");
                return Err((
                    limit.exceeded(why, "end a program that uses the GPU"),
                    most.saturating_sub(have),
                ));
            }
        }
        Ok(())
    }
}

pub(super) struct Inner {
    pub(super) options: Options,
    pub(super) spawner: Spawner,
    pub(super) store: Store,
    pub(super) mps: Option<Mps>,
    pub(super) accounting: Accounting,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) random: Arc<dyn Random>,
    /// Ready workers per lease, and the time without use after which one is enough.
    pub(super) stock: Mutex<(u32, Duration)>,
    pub(super) state: Mutex<State>,
    pub(super) empty: Notify,
    pub(super) wants: Notify,
    pub(super) events: broadcast::Sender<Event>,
    pub(super) requests: RequestRate,
    pub(super) refusals: LogThrottle,
    /// Programs that came back after a broken connection.
    pub(super) resumes: AtomicU64,
    pub(super) resume_log: LogThrottle,
}

/// All workers of this server. Cheap to clone.
#[derive(Clone)]
pub struct Supervisor(pub(super) Arc<Inner>);

impl Supervisor {
    /// Returns how often programs came back after a broken connection.
    pub fn resumes(&self) -> u64 {
        self.0.resumes.load(Ordering::Relaxed)
    }

    /// Returns what workers found in memory of GPUs that the driver gave them.
    pub fn sampled(&self) -> BTreeMap<String, Sampled> {
        self.state().sampled.clone()
    }

    /// Returns how isolated this server's workers are.
    pub fn isolation(&self) -> &Decision {
        &self.0.options.isolation
    }

    /// Returns the control groups of workers.
    pub fn groups(&self) -> &WorkerGroups {
        &self.0.options.groups
    }

    /// Returns the path of the workers' program.
    pub fn program(&self) -> &Path {
        &self.0.options.program
    }

    /// Returns the time that workers of a client wait for a program whose connection broke.
    pub fn resume_grace(&self, client: &str) -> Duration {
        self.state().limits.of(client, "").resume_grace()
    }

    /// Returns the thread that starts processes.
    pub fn spawner(&self) -> &Spawner {
        &self.0.spawner
    }

    /// Returns the MPS domains, if this server uses MPS.
    pub fn mps(&self) -> Option<&Mps> {
        self.0.mps.as_ref()
    }

    /// Sets the number of ready workers per lease, and the time without use after which one is
    /// enough.
    pub fn set_stock(&self, warm_workers: u32, idle_exit: Duration) {
        *self.0.stock.lock().unwrap_or_else(PoisonError::into_inner) = (warm_workers, idle_exit);
    }

    /// Returns the account of GPU use by programs and leases.
    pub fn accounting(&self) -> &Accounting {
        &self.0.accounting
    }

    /// Subscribes to events from now on.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.0.events.subscribe()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stock(&self) -> (u32, Duration) {
        *self.0.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates a lease's ledger. Shares supply the memory of whole cards, for which workers have no
/// limit.
pub(super) fn ledger(lease: &Lease, devices: Vec<DeviceLimit>) -> Ledger {
    let share = |uuid: &[u8; 16]| lease.shares.iter().find(|s| uuid_bytes(&s.gpu).as_ref() == Some(uuid));
    Ledger::new(devices).of_cards(|uuid| share(uuid).map(|s| s.limit_bytes))
}

/// Returns the most mapped host memory of which a worker may keep copies, in bytes.
pub(super) fn staging(limits: &Effective) -> u64 {
    limits.smallest("staging").map_or(u64::MAX, |(_, bytes)| bytes)
}
