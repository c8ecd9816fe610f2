//! Worker processes: started warm for each lease, assigned to one client process each, killed in
//! time.
//!
//! A worker is presumed controlled by its client. Its messages give it no rights. The supervisor
//! kills the whole process group of a worker, and the kernel then frees its device memory. With a
//! descriptor store ([`handover`]), workers outlive the server.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gpusession_proto::supervise::{ClientProcess, DeviceLimit, ToWorker, Usage};
use tokio::sync::{Notify, broadcast};
use tracing::info;

pub use self::errors::{AdoptError, TakeError};
pub use self::event::Event;
use self::exit::stop;
pub use self::groups::WorkerGroups;
use self::handover::{LeftWorker, Store};
use self::messages::say;
use self::quota::Ledger;
use self::request_rate::RequestRate;
use self::run::Origin;
use self::stock::Stock;
pub use self::stock::WorkerId;
use self::supervisor::{Inner, LeaseState, State, ledger, staging};
pub use self::supervisor::{Options, Sampled, Supervisor};
pub use self::take::{AssignedWorker, DRIVER_ENVIRONMENT};
use self::unadmitted::Unadmitted;
use self::worker::{Changes, Command, Worker, orders};
pub use self::worker::{Phase, WorkerRecord, hex};
use crate::accounting::Accounting;
use crate::clock::{Clock, Random};
use crate::lease::Lease;
use crate::limits::{Effective, Limits};
use crate::log_throttle::LogThrottle;
use crate::mps::Mps;
use crate::spawn::Spawner;

mod admission;
mod adopt;
mod attend;
pub mod channel;
mod compiled;
mod errors;
mod event;
mod exit;
mod farewells;
mod groups;
pub mod handover;
mod host_bounds;
mod images;
mod messages;
mod mps;
pub mod park;
pub mod process;
pub mod quota;
mod reconcile;
mod record;
mod records;
mod request_rate;
mod run;
mod shares;
mod sharing;
mod shutdown;
pub mod stock;
mod supervisor;
mod take;
mod unadmitted;
mod worker;

/// Interval at which accounting notes the running programs, in seconds.
const NOTED_EVERY: u64 = 60;

/// One worker in a listing.
#[derive(Debug, Clone)]
pub struct WorkerView {
    /// Random id; [`hex`] formats it.
    pub id: WorkerId,
    /// Process id; `None` before the process starts.
    pub pid: Option<u32>,
    /// Id of the worker's lease.
    pub lease: String,
    /// Client that holds the lease.
    pub client: String,
    /// User of the lease or of the served process; empty: unknown.
    pub user: String,
    /// Phase at the time of the listing.
    pub phase: Phase,
    /// Whether its process shares device memory with other processes.
    pub shares: bool,
    /// Client process that the worker serves, once admitted.
    pub process: Option<ClientProcess>,
    /// Source address of the last data connection.
    pub peer: Option<SocketAddr>,
    /// Time that its program has been without a connection, and may still come back.
    pub interrupted: Option<Duration>,
    /// Interruptions after which its program has come back.
    pub interruptions: u32,
    /// UUIDs of the lease's GPUs.
    pub gpus: Vec<String>,
    /// Last usage report of the worker.
    pub usage: Usage,
    /// Level, `later` (not reported yet), or the measures that this host does not allow.
    pub isolation: String,
    /// Device memory that counts for its process, in bytes, contexts included.
    pub memory_bytes: u64,
    /// Part of `memory_bytes` that was never granted: code, stacks, the driver's own memory.
    pub unasked_bytes: u64,
    /// Time with GPU work or copies, to the second.
    pub busy: Duration,
    /// Time since the worker was started, by this server or an earlier one.
    pub age: Duration,
}

impl Supervisor {
    /// Creates a supervisor that keeps its workers in `store`; needs a runtime.
    ///
    /// It takes over the workers of `left`, from an earlier server, when their leases are added.
    pub fn new(
        options: Options,
        store: Store,
        left: Vec<LeftWorker>,
        accounting: Accounting,
        clock: Arc<dyn Clock>,
        random: Arc<dyn Random>,
    ) -> io::Result<Self> {
        let stock = Mutex::new((options.warm_workers, options.idle_exit));
        let spawner = Spawner::new()?;
        let (starter, isolation) = (options.starter.clone(), options.isolation.workers);
        let mps =
            options.mps.clone().map(|s| Mps::new(s, starter, isolation, spawner.clone(), clock.clone()));
        let (mps, happened) = mps.unzip();
        let this = Self(Arc::new(Inner {
            options,
            stock,
            spawner,
            store,
            mps,
            accounting,
            clock,
            random,
            state: Mutex::new(State { left, ..State::default() }),
            empty: Notify::new(),
            wants: Notify::new(),
            events: broadcast::channel(1024).0,
            requests: RequestRate::default(),
            refusals: LogThrottle::default(),
            resumes: AtomicU64::new(0),
            resume_log: LogThrottle::default(),
        }));
        if let Some(happened) = happened {
            tokio::spawn(this.clone().serve_mps(happened));
        }
        Ok(this)
    }

    /// Starts a stock for a lease, and takes over its workers that an earlier server left.
    pub fn add_lease(&self, lease: &Lease, devices: Vec<DeviceLimit>, limits: Effective) {
        {
            let mut state = self.state();
            if state.closing || state.leases.contains_key(&lease.id) {
                return;
            }
            if let Some(mps) = self.mps().filter(|_| lease.mps) {
                mps.join(lease, &devices);
            }
            let stock = Stock::new(self.stock().0, self.0.clock.now());
            let (ledger, unused) = (ledger(lease, devices), self.0.clock.now());
            let entry = LeaseState {
                lease: lease.clone(),
                limits,
                ledger,
                stock,
                away: false,
                unused,
                changed: Arc::default(),
                recalled: None,
            };
            state.leases.insert(lease.id.clone(), entry);
            let of_it = state.left.extract_if(.., |l| l.book.lease == lease.id).collect::<Vec<_>>();
            for left in of_it {
                self.take_up(&mut state, left);
            }
        }
        self.refill(&lease.id);
    }

    /// Stops the workers that an earlier server left and whose leases no longer exist.
    pub fn end_left(&self) {
        let mut state = self.state();
        for left in std::mem::take(&mut state.left) {
            self.take_up(&mut state, left);
        }
        self.0.accounting.keep_running(state.workers.keys().map(hex).collect());
    }

    fn take_up(&self, state: &mut State, left: LeftWorker) {
        let LeftWorker { book, channel, pidfd, kept } = left;
        let (id, pid) = (book.id, book.pid.unwrap_or_default());
        info!(
            gpusession_worker = hex(&id),
            gpusession_lease = book.lease,
            gpusession_client = book.client,
            "worker {}: taken over from an earlier server: process {pid}, {}, lease {}",
            hex(&id),
            book.phase.as_str(),
            book.lease
        );
        let (orders, queues) = orders();
        // Without its lease the worker is stopped below, and no connection may reach it.
        let lease_key = state.leases.get(&book.lease).map_or([0; 32], |l| l.lease.ticket_key);
        let mut worker = Worker {
            book,
            lease_key,
            kept: Some(kept),
            changes: Changes::default(),
            keepable: None,
            seat: None,
            pausing: None,
            relocating: None,
            parked_at: Some(self.0.clock.now()),
            unadmitted: Unadmitted::default(),
            presented: false,
            offends: false,
            ticket: None,
            orders,
        };
        worker.stocked = false;
        let _ = worker.orders.tells.send(Command::Tell(ToWorker::TakenOver));
        let lease = state.leases.get_mut(&worker.lease);
        match worker.phase {
            Phase::Ending => {
                let reason = worker.ended_because.clone().unwrap_or_default();
                worker.orders.end.send_replace(Some(reason));
            }
            _ if lease.is_none() => stop(&id, &mut worker, "its lease has ended"),
            // Workers without a process give way to workers of this server's version and
            // configuration.
            Phase::Starting | Phase::Warm => stop(&id, &mut worker, "the server was restarted"),
            _ if worker.moving => {
                stop(&id, &mut worker, "the server exited while device memory was being parked or unparked");
            }
            // It may have been paused in order to be parked.
            Phase::Active => drop(worker.orders.tells.send(Command::Tell(ToWorker::Resume))),
            Phase::Taken | Phase::Parked => {}
        }
        if let Some(lease) = lease
            && worker.process.is_some()
        {
            lease.ledger.restore(id, &worker.book.held);
        }
        state.workers.insert(id, worker);
        let own = state.workers.get(&id).is_some_and(|worker| !worker.of_starter);
        if let Some((client, bounds)) = state.bounds(&id).filter(|_| own) {
            self.groups().own().take_over(client, &hex(&id), pid, bounds);
        }
        self.attend_to(id, Origin::Left { pid, pidfd, channel }, queues);
    }

    /// Replaces the limits of all clients and users, which bound programs and connections.
    pub fn set_all_limits(&self, limits: Limits) {
        self.state().limits = limits;
    }

    /// Replaces a lease's limits for new work.
    ///
    /// A ready worker that was started with another staging limit is replaced.
    pub fn set_limits(&self, lease: &str, limits: Effective) {
        let mut state = self.state();
        let State { workers, leases, .. } = &mut *state;
        let Some(entry) = leases.get_mut(lease) else { return };
        let before = staging(&std::mem::replace(&mut entry.limits, limits));
        if before == staging(&entry.limits) {
            return;
        }
        let waits_for_a_program = |w: &Worker| {
            w.lease == lease && w.stocked && w.lanes == 0 && w.process.is_none() && w.phase != Phase::Ending
        };
        for (id, worker) in workers.iter_mut().filter(|(_, w)| waits_for_a_program(w)) {
            entry.stock.leave(id, worker.starts());
            stop(id, worker, "the limit staging changed; a new worker takes its place");
        }
        drop(state);
        self.refill(lease);
    }

    /// Stops all workers of a lease and ends its stock.
    pub fn end_lease(&self, lease: &str, reason: &str) {
        let mut state = self.state();
        if let Some(gone) = state.leases.remove(lease) {
            gone.changed.notify_waiters();
        }
        if let Some(mps) = self.mps() {
            mps.leave(lease);
        }
        for (id, worker) in state.workers.iter_mut().filter(|(_, w)| w.lease == lease) {
            stop(id, worker, reason);
        }
    }

    /// Stops one worker, with `lease` only if it belongs to that lease. Returns `true` if it
    /// exists.
    pub fn end_worker(&self, id: &WorkerId, lease: Option<&str>, reason: &str) -> bool {
        let mut state = self.state();
        let Some(worker) = state.workers.get_mut(id).filter(|w| lease.is_none_or(|l| l == w.lease)) else {
            return false;
        };
        let (lease, starts, ends) = (worker.lease.clone(), worker.starts(), worker.phase == Phase::Ending);
        stop(id, worker, reason);
        if let Some(entry) = state.leases.get_mut(&lease).filter(|_| !ends) {
            entry.stock.leave(id, starts);
        }
        drop(state);
        self.refill(&lease);
        true
    }

    /// Stops a lease's workers that are taken and serve no process yet, except `wanted` ones.
    pub fn end_unclaimed(&self, lease: &str, wanted: &[Vec<u8>]) {
        let unclaimed: Vec<WorkerId> = {
            let state = self.state();
            let taken = state.workers.iter().filter(|(_, w)| w.lease == lease && w.phase == Phase::Taken);
            taken.map(|(id, _)| *id).filter(|id| !wanted.iter().any(|w| w == id)).collect()
        };
        for id in unclaimed {
            self.end_worker(&id, Some(lease), "its client's daemon restarted and does not know it");
        }
    }

    /// Does the work that is due by time alone.
    ///
    /// It bounds memory and threads, retries failed starts, shrinks the stocks of idle leases,
    /// answers overdue memory requests, and notes running programs.
    pub fn tick(&self) {
        self.bound_workers();
        self.shares_overdue(&mut self.state());
        let now = self.0.clock.now();
        let (warm_workers, idle_exit) = self.stock();
        let mut surplus = Vec::new();
        let leases: Vec<String> = {
            let mut state = self.state();
            let State { workers, leases, .. } = &mut *state;
            for (id, lease) in leases.iter_mut() {
                let used = workers.values().any(|w| w.lease == *id && w.process.is_some());
                let idle = if used { Duration::ZERO } else { idle_exit };
                surplus.extend(lease.stock.shrink(now, idle, warm_workers));
                let says = lease.ledger.tick(now);
                say(workers, says);
            }
            let minute = now.as_secs() / NOTED_EVERY;
            if std::mem::replace(&mut state.noted, minute) != minute {
                for worker in state.workers.values() {
                    self.note(worker, state.leases.get(&worker.lease));
                }
            }
            let State { workers, leases, .. } = &mut *state;
            for id in &surplus {
                if let Some(worker) = workers.get_mut(id) {
                    stop(id, worker, "the lease is idle: one ready worker is enough");
                }
            }
            leases.keys().cloned().collect()
        };
        for lease in leases {
            self.refill(&lease);
        }
    }

    /// Returns `true` if `pid` may be a worker. An exited process counts as one, so it gets no
    /// answer; so does each process of the starter's user.
    pub fn may_be_worker(&self, pid: u32, uid: u32) -> bool {
        use std::os::unix::fs::MetadataExt;
        if self.0.options.starter.desk().is_some() && uid == self.0.options.uid {
            return true;
        }
        let file = |path: &Path| std::fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
        let runs = file(Path::new(&format!("/proc/{pid}/exe")));
        let program = || file(&self.0.options.program);
        // Checked last: an exiting worker is removed from the table only after its process is gone.
        runs.is_some_and(|runs| program() == Some(runs))
            || self.state().workers.values().any(|w| w.pid == Some(pid))
            || process::is_gone(pid)
    }

    /// Lists all workers by lease, the oldest of each lease first.
    pub fn workers(&self) -> Vec<WorkerView> {
        let now = self.0.clock.now();
        let state = self.state();
        let State { workers, leases, .. } = &*state;
        let counted = |lease: &str, of: &dyn Fn(&Ledger, usize) -> u64| {
            leases.get(lease).map_or(0, |l| {
                (0..l.ledger.devices().len()).map(|d| of(&l.ledger, d)).fold(0, u64::saturating_add)
            })
        };
        let view = |(id, w): (&WorkerId, &Worker)| WorkerView {
            id: *id,
            pid: w.pid,
            lease: w.lease.clone(),
            client: w.client.clone(),
            user: w.user().into(),
            phase: w.phase,
            shares: state.shares.involve(id),
            process: w.process.clone(),
            peer: w.peer,
            interrupted: w.interrupted.map(|since| now.saturating_sub(since)),
            interruptions: w.interruptions,
            gpus: w.gpus.clone(),
            usage: w.usage,
            isolation: w.isolation.clone(),
            memory_bytes: counted(&w.lease, &|ledger, device| ledger.used_by(id, device)),
            busy: w.busy,
            unasked_bytes: counted(&w.lease, &|ledger, device| ledger.unasked(id, device)),
            age: now.saturating_sub(w.since),
        };
        let mut out: Vec<_> = workers.iter().map(view).collect();
        drop(state);
        out.sort_by(|a, b| (&a.lease, b.age, a.id).cmp(&(&b.lease, a.age, b.id)));
        out
    }

    /// Lists the processes that a lease's workers serve, with the device memory that counts for
    /// each.
    ///
    /// The memory is by device in the lease's order, contexts included.
    pub fn processes(&self, lease: &str) -> Vec<(ClientProcess, Vec<u64>)> {
        let state = self.state();
        let Some(entry) = state.leases.get(lease) else { return Vec::new() };
        let memory =
            |id| (0..entry.ledger.devices().len()).map(|device| entry.ledger.used_by(id, device)).collect();
        let mine = state.workers.iter().filter(|(_, w)| w.lease == lease);
        let mut out: Vec<_> = mine.filter_map(|(id, w)| Some((w.process.clone()?, memory(id)))).collect();
        out.sort_by_key(|(process, _)| process.pid);
        out
    }

    /// Describes running programs: all, or only those whose workers cannot outlive this server.
    pub fn programs(&self, all: bool) -> Vec<String> {
        let mut out: Vec<String> = self
            .state()
            .workers
            .values()
            .filter(|w| all || w.kept.is_none())
            .filter_map(|w| {
                let p = w.process.as_ref()?;
                Some(format!("{} (pid {} of {})", p.program, p.pid, w.client))
            })
            .collect();
        out.sort();
        out
    }

    /// Lists the leases that have a stock.
    pub fn leases(&self) -> Vec<String> {
        self.state().leases.keys().cloned().collect()
    }

    /// Returns the most device memory that a lease's programs held at one time, in bytes.
    pub fn peak(&self, lease: &str) -> u64 {
        self.state().leases.get(lease).map_or(0, |l| l.ledger.peak_of_all())
    }

    /// Returns the number of ready workers of a lease.
    pub fn ready(&self, lease: &str) -> u32 {
        self.state().leases.get(lease).map_or(0, |l| l.stock.ready() as u32)
    }
}
