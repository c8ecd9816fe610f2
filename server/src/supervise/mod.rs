//! Worker processes: started warm for each lease, handed to one client process each, ended in time.
//!
//! A worker is presumed controlled by its client. Nothing that it says gives it rights; it is ended by its process
//! group, and the kernel takes its device memory back with it.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::supervise::{DeviceLimit, FromWorker, Isolation, Start, ToWorker, Usage};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::Child;
use tokio::sync::{Notify, broadcast, mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use self::quota::{Ledger, Say};
pub use self::stock::WorkerId;
use self::{channel::Channel, spawn::Spawner, stock::Stock};
use crate::accounting::{Accounting, Kind, Record};
use crate::clock::{self, Clock, Moment, Random};
use crate::lease::Lease;
use crate::limits::{Effective, Exceeded};
use crate::mps::{Mps, Seat};
use crate::quiet::Quiet;

pub mod channel;
mod mps;
pub mod park;
pub mod quota;
pub mod spawn;
pub mod stock;

/// A worker that does not end within this after it was told to is killed.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// A worker that is not ready by then has failed. Drivers of many GPUs without persistence take tens of seconds.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How long a call waits for a worker to get ready.
const TAKE_LIMIT: Duration = Duration::from_secs(60);
/// A worker that does not read its channel for so long is stuck.
const SEND_LIMIT: Duration = Duration::from_secs(2);
/// A process that was killed and is still there after this sits in the driver.
const REAP_LIMIT: Duration = Duration::from_secs(10);
/// Workers of one lease.
const MAX_PER_LEASE: usize = 64;
/// Packets that a worker may send in a second. Those that ask for memory are not answered faster.
const MAX_PACKETS: u32 = 1000;
const MAX_MEMORY_PACKETS: u32 = 20_000;
/// Handed-over sockets that wait for one worker.
const MAX_QUEUED: usize = 64;

/// Variables of the CUDA driver that a client process may set for its worker. What else a program sets acts on its own
/// side of the wire.
pub const DRIVER_ENVIRONMENT: &[&str] = &[
    "CUDA_AUTO_BOOST",
    "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DISABLE_JIT",
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_FORCE_JIT",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_DATA_LOADING",
    "CUDA_MODULE_LOADING",
    "CUDA_SCALE_LAUNCH_QUEUES",
];

/// How workers of this server are started.
#[derive(Debug, Clone)]
pub struct Options {
    /// The worker's program.
    pub program: PathBuf,
    /// The driver library that it loads.
    pub driver: PathBuf,
    /// Folder of the module cache.
    pub module_cache: Option<PathBuf>,
    /// Ready workers per lease.
    pub warm_workers: u32,
    /// After so long without use a lease keeps one.
    pub idle_exit: Duration,
    /// How long a worker waits for a lost client.
    pub resume_grace: Duration,
    /// Whether workers give up what they do not need.
    pub isolation: Isolation,
    /// How MPS is used, if it is.
    pub mps: Option<crate::mps::Settings>,
}

/// What a worker is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Loading the driver.
    Starting,
    /// Ready; nobody has it yet.
    Warm,
    /// Given to the client; no process was admitted yet.
    Taken,
    /// Serves a process.
    Active,
    /// Serves a process whose device memory is in the host's.
    Parked,
    /// Told to end.
    Ending,
}

impl Phase {
    /// As listings show it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Warm => "warm",
            Self::Taken => "taken",
            Self::Active => "active",
            Self::Parked => "parked",
            Self::Ending => "ending",
        }
    }
}

/// The process on the client that a worker serves.
#[derive(Debug, Clone)]
pub struct ClientProcess {
    /// User id there.
    pub uid: u32,
    /// Process id there.
    pub pid: u32,
    /// The program's name.
    pub program: String,
    /// Whether its connection is encrypted.
    pub encrypted: bool,
}

/// A worker as listings show it.
#[derive(Debug, Clone)]
pub struct WorkerView {
    /// Its id.
    pub id: WorkerId,
    /// Its process, once there is one.
    pub pid: Option<u32>,
    /// The lease it belongs to.
    pub lease: String,
    /// The client that holds the lease.
    pub client: String,
    /// What it is doing.
    pub phase: Phase,
    /// The process it serves.
    pub process: Option<ClientProcess>,
    /// Where its last connection came from.
    pub peer: Option<SocketAddr>,
    /// GPUs it sees.
    pub gpus: Vec<String>,
    /// What it said about its work.
    pub usage: Usage,
    /// `full`, `off`, or what of it this host does not allow.
    pub isolation: String,
    /// Device memory that its process has of the lease's, its context included.
    pub memory_bytes: u64,
    /// Since when it exists.
    pub age: Duration,
}

/// A worker that a client may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// Its id.
    pub id: WorkerId,
    /// SHA-256 of its certificate.
    pub fingerprint: [u8; 32],
}

/// Why there is no worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// The lease ended, or never was.
    #[error("no such lease")]
    NoLease,
    /// Its GPUs were parked or lent.
    #[error("the lease's GPUs were given to others while it was idle")]
    Away,
    /// The lease has as many workers as it may.
    #[error("the lease has {0} workers, the most it may have; end a program that uses the GPU")]
    TooMany(usize),
    /// The client or user has as many as it may.
    #[error("{0}")]
    Limit(Exceeded),
    /// A variable that is not one of the driver's.
    #[error("{0:?} is not a variable of the CUDA driver that a worker can be started with")]
    Environment(String),
    /// Workers do not start.
    #[error("no worker starts on this server: {0}")]
    NotStarting(String),
    /// Its MPS server serves as many as it can.
    #[error("{0}")]
    Mps(String),
    /// The stock did not fill in time.
    #[error("no worker got ready within {} s; see the server's journal", TAKE_LIMIT.as_secs())]
    TooSlow,
}

/// What the supervisor tells whoever listens.
#[derive(Debug, Clone)]
pub enum Event {
    /// A lease's workers changed.
    Workers {
        /// Holder of the lease.
        client: String,
        /// The lease.
        lease: String,
        /// Ready workers.
        stock: u32,
        /// A worker that a client had taken and that has ended since.
        ended: Option<WorkerId>,
    },
    /// A worker was killed and does not end, or has ended and its memory is still in use.
    Stuck {
        /// Its GPUs.
        gpus: Vec<String>,
        /// What is wrong.
        why: String,
    },
}

/// Why a connection cannot be handed over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// Nobody has that id now.
    #[error("no such worker: it ended, or its server was restarted")]
    Unknown,
    /// It does not take more now.
    #[error("the worker has too many connections waiting")]
    Busy,
    /// The lease's data has to be encrypted.
    #[error("this server wants the connection encrypted")]
    Clear,
    /// The client or user has as many as it may.
    #[error("{0}")]
    Limit(Exceeded),
}

enum Command {
    Adopt { socket: std::net::TcpStream, preface: Vec<u8>, peer: SocketAddr },
    Stop { reason: String },
    Tell(ToWorker),
}

struct Worker {
    lease: String,
    client: String,
    gpus: Vec<String>,
    phase: Phase,
    pid: Option<u32>,
    stocked: bool,
    given: bool,
    encrypted: bool,
    process: Option<ClientProcess>,
    peer: Option<SocketAddr>,
    /// Handed over so far; they end with the worker.
    connections: u64,
    fingerprint: Option<[u8; 32]>,
    usage: Usage,
    /// When it said so last, and the time in which its GPUs were at work.
    used_at: Moment,
    busy: Duration,
    admitted_unix: u64,
    user: String,
    /// When its client's GPU work was last seen.
    active: Moment,
    pausing: Option<oneshot::Sender<bool>>,
    /// Its client wants something of it though it is paused.
    wanted: bool,
    isolation: String,
    /// Its place in an MPS domain.
    seat: Option<Arc<Seat>>,
    since: Moment,
    ended_because: Option<String>,
    commands: mpsc::Sender<Command>,
    stop: mpsc::UnboundedSender<Command>,
}

struct LeaseState {
    lease: Lease,
    limits: Effective,
    ledger: Ledger,
    stock: Stock,
    /// Its GPUs are others': no worker is started.
    away: bool,
    /// When its last process ended, or it began.
    unused: Moment,
    changed: Arc<Notify>,
}

#[derive(Default)]
struct State {
    workers: HashMap<WorkerId, Worker>,
    leases: HashMap<String, LeaseState>,
    /// Processes of workers that have ended a moment ago, their GPUs, and when.
    ended: Vec<(u32, Vec<String>, Moment)>,
    closing: bool,
    isolation_told: bool,
}

impl State {
    /// Whether a limit of a lease's client and user leaves room for `more`; what room there is beside the refusal.
    fn within(
        &self,
        lease: &str,
        name: &'static str,
        more: u64,
        what: &str,
        count: impl Fn(&Worker) -> u64,
    ) -> Result<(), (Exceeded, u64)> {
        let Some(entry) = self.leases.get(lease) else { return Ok(()) };
        for limit in entry.limits.entries(name) {
            let crate::limits::Bound::Number(most) = limit.bound else { continue };
            let site = entry.limits.scope == crate::limits::Scope::Site;
            let counts = |other: &Lease| match limit.of_user() {
                false => other.client == entry.lease.client,
                true => other.user == entry.lease.user && (site || other.client == entry.lease.client),
            };
            let have: u64 = self
                .workers
                .values()
                .filter(|w| self.leases.get(&w.lease).is_some_and(|l| counts(&l.lease)))
                .map(&count)
                .sum();
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

struct Inner {
    options: Options,
    spawner: Spawner,
    mps: Option<Mps>,
    accounting: Accounting,
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
    /// Ready workers per lease, and after how long without use one is enough.
    stock: Mutex<(u32, Duration)>,
    state: Mutex<State>,
    empty: Notify,
    wants: Notify,
    events: broadcast::Sender<Event>,
    refusals: Quiet,
}

/// All workers of this server. Cheap to clone.
#[derive(Clone)]
pub struct Supervisor(Arc<Inner>);

impl Supervisor {
    /// A supervisor without workers; needs a runtime.
    pub fn new(
        options: Options,
        accounting: Accounting,
        clock: Arc<dyn Clock>,
        random: Arc<dyn Random>,
    ) -> io::Result<Self> {
        let stock = Mutex::new((options.warm_workers, options.idle_exit));
        let spawner = Spawner::new()?;
        let mps = options.mps.clone().map(|settings| Mps::new(settings, spawner.clone(), clock.clone()));
        let (mps, happened) = mps.unzip();
        let this = Self(Arc::new(Inner {
            options,
            stock,
            spawner,
            mps,
            accounting,
            clock,
            random,
            state: Mutex::default(),
            empty: Notify::new(),
            wants: Notify::new(),
            events: broadcast::channel(1024).0,
            refusals: Quiet::default(),
        }));
        if let Some(happened) = happened {
            tokio::spawn(this.clone().serve_mps(happened));
        }
        Ok(this)
    }

    /// MPS, where it is used.
    pub fn mps(&self) -> Option<&Mps> {
        self.0.mps.as_ref()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stock(&self) -> (u32, Duration) {
        *self.0.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps so many ready workers per lease from now on, one after so long without use.
    pub fn set_stock(&self, warm_workers: u32, idle_exit: Duration) {
        *self.0.stock.lock().unwrap_or_else(PoisonError::into_inner) = (warm_workers, idle_exit);
    }

    /// Who used what.
    pub fn accounting(&self) -> &Accounting {
        &self.0.accounting
    }

    /// What happens from now on.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.0.events.subscribe()
    }

    /// Begins to keep a stock for a lease.
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
            let (ledger, unused) = (Ledger::new(devices), self.0.clock.now());
            let entry = LeaseState {
                lease: lease.clone(),
                limits,
                ledger,
                stock,
                away: false,
                unused,
                changed: Arc::default(),
            };
            state.leases.insert(lease.id.clone(), entry);
        }
        self.refill(&lease.id);
    }

    /// Other limits hold for a lease's new work from now on.
    pub fn set_limits(&self, lease: &str, limits: Effective) {
        if let Some(entry) = self.state().leases.get_mut(lease) {
            entry.limits = limits;
        }
    }

    /// Ends all workers of a lease and keeps no stock for it any longer.
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

    /// Ends one worker, with a lease only if it belongs to it. Says whether there was one.
    pub fn end_worker(&self, id: &WorkerId, lease: Option<&str>, reason: &str) -> bool {
        let mut state = self.state();
        let Some(worker) = state.workers.get_mut(id).filter(|w| lease.is_none_or(|l| l == w.lease)) else {
            return false;
        };
        stop(id, worker, reason);
        let lease = worker.lease.clone();
        if let Some(lease) = state.leases.get_mut(&lease) {
            lease.stock.forget(id);
        }
        drop(state);
        self.refill(&lease);
        true
    }

    /// Takes ready workers out of the stock: as many as there are, `count` at most; where there are none, waits for one. A
    /// worker with an environment of its own is started for this call.
    pub async fn take(
        &self,
        client: &str,
        lease: &str,
        count: usize,
        environment: Vec<(String, String)>,
    ) -> Result<Vec<Taken>, TakeError> {
        if let Some((bad, _)) = environment.iter().find(|(name, value)| {
            !DRIVER_ENVIRONMENT.contains(&name.as_str()) || value.contains('\0') || value.len() > 256
        }) {
            return Err(TakeError::Environment(bad.clone()));
        }
        let deadline = Instant::now() + TAKE_LIMIT;
        if !environment.is_empty() {
            return self.take_cold(client, lease, environment, deadline).await;
        }
        let count = self.room(lease, count.max(1))?;
        let mut waiting = Waiting { supervisor: self, lease, counted: false };
        loop {
            let changed = {
                let mut state = self.state();
                let State { workers, leases, .. } = &mut *state;
                let entry =
                    leases.get_mut(lease).filter(|l| l.lease.client == client).ok_or(TakeError::NoLease)?;
                if entry.away {
                    return Err(TakeError::Away);
                }
                let mine = workers.values().filter(|w| w.lease == lease && w.phase != Phase::Ending).count();
                if mine >= MAX_PER_LEASE && entry.stock.ready() == 0 {
                    return Err(TakeError::TooMany(mine));
                }
                let ids = entry.stock.take(count, self.0.clock.now());
                if !ids.is_empty() {
                    if std::mem::take(&mut waiting.counted) {
                        entry.stock.unwait();
                    }
                    let taken = ids.iter().filter_map(|id| take_one(*id, workers.get_mut(id)?)).collect();
                    drop(state);
                    self.refill(lease);
                    return Ok(taken);
                }
                if entry.stock.paused(self.0.clock.now()) {
                    let reason = entry.stock.failing().unwrap_or("it ended at once").to_string();
                    return Err(TakeError::NotStarting(reason));
                }
                if !waiting.counted {
                    entry.stock.wait();
                    waiting.counted = true;
                }
                // Registered before the lock is given up, so that no change is missed.
                let mut changed = Box::pin(entry.changed.clone().notified_owned());
                changed.as_mut().enable();
                changed
            };
            self.refill(lease);
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Err(TakeError::TooSlow);
            }
        }
    }

    /// How many of `count` workers the lease's client and user may take now.
    fn room(&self, lease: &str, count: usize) -> Result<usize, TakeError> {
        let state = self.state();
        self.room_under_mps(&state, lease)?;
        let serves = |w: &Worker| u64::from(matches!(w.phase, Phase::Taken | Phase::Active));
        match state.within(lease, "workers", count as u64, "programs", serves) {
            Ok(()) => Ok(count),
            Err((_, left @ 1..)) => Ok(left as usize),
            Err((exceeded, _)) => Err(TakeError::Limit(exceeded)),
        }
    }

    async fn take_cold(
        &self,
        client: &str,
        lease: &str,
        environment: Vec<(String, String)>,
        deadline: Instant,
    ) -> Result<Vec<Taken>, TakeError> {
        self.room(lease, 1)?;
        let id = {
            let state = self.state();
            let entry = state.leases.get(lease).filter(|l| l.lease.client == client);
            if entry.ok_or(TakeError::NoLease)?.away {
                return Err(TakeError::Away);
            }
            let mine =
                state.workers.values().filter(|w| w.lease == lease && w.phase != Phase::Ending).count();
            if mine >= MAX_PER_LEASE {
                return Err(TakeError::TooMany(mine));
            }
            drop(state);
            self.launch(lease, environment, false).ok_or(TakeError::NoLease)?
        };
        let mut abandoned = Abandoned { supervisor: self, id, kept: false };
        loop {
            let changed = {
                let mut state = self.state();
                let entry = state.leases.get(lease).ok_or(TakeError::NoLease)?;
                let mut changed = Box::pin(entry.changed.clone().notified_owned());
                changed.as_mut().enable();
                match state.workers.get_mut(&id) {
                    None => return Err(TakeError::NotStarting("see the server's journal".into())),
                    Some(w) if w.phase == Phase::Ending => {
                        let reason = w.ended_because.clone().unwrap_or_default();
                        return Err(TakeError::NotStarting(reason));
                    }
                    Some(w) if w.phase == Phase::Warm => {
                        abandoned.kept = true;
                        return take_one(id, w).map(|t| vec![t]).ok_or(TakeError::NoLease);
                    }
                    Some(_) => changed,
                }
            };
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Err(TakeError::TooSlow);
            }
        }
    }

    /// Hands a data connection to a worker.
    pub fn adopt(
        &self,
        id: &WorkerId,
        socket: std::net::TcpStream,
        preface: Vec<u8>,
        peer: SocketAddr,
        tls: bool,
    ) -> Result<(), (AdoptError, std::net::TcpStream)> {
        let mut state = self.state();
        let usable = |w: &&mut Worker| matches!(w.phase, Phase::Taken | Phase::Active | Phase::Parked);
        let Some(worker) = state.workers.get_mut(id).filter(usable) else {
            return Err((AdoptError::Unknown, socket));
        };
        if worker.encrypted && !tls {
            return Err((AdoptError::Clear, socket));
        }
        let lease = worker.lease.clone();
        if let Err((exceeded, _)) =
            state.within(&lease, "connections", 1, "data connections", |w| w.connections)
        {
            return Err((AdoptError::Limit(exceeded), socket));
        }
        let Some(worker) = state.workers.get_mut(id) else { return Err((AdoptError::Unknown, socket)) };
        match worker.commands.try_send(Command::Adopt { socket, preface, peer }) {
            Ok(()) => {
                worker.peer = Some(peer);
                worker.connections += 1;
                Ok(())
            }
            Err(mpsc::error::TrySendError::Full(Command::Adopt { socket, .. })) => {
                Err((AdoptError::Busy, socket))
            }
            Err(mpsc::error::TrySendError::Closed(Command::Adopt { socket, .. })) => {
                Err((AdoptError::Unknown, socket))
            }
            Err(_) => unreachable!("an Adopt was sent, an Adopt comes back"),
        }
    }

    /// What is due by time alone: pauses after failures that are over, stocks of idle leases.
    pub fn tick(&self) {
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
                say(workers, lease.ledger.tick(now));
            }
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

    /// All workers.
    pub fn workers(&self) -> Vec<WorkerView> {
        let now = self.0.clock.now();
        let state = self.state();
        let State { workers, leases, .. } = &*state;
        let view = |(id, w): (&WorkerId, &Worker)| WorkerView {
            id: *id,
            pid: w.pid,
            lease: w.lease.clone(),
            client: w.client.clone(),
            phase: w.phase,
            process: w.process.clone(),
            peer: w.peer,
            gpus: w.gpus.clone(),
            usage: w.usage,
            isolation: w.isolation.clone(),
            memory_bytes: leases
                .get(&w.lease)
                .map_or(0, |l| (0..l.ledger.devices().len()).map(|device| l.ledger.of(id, device)).sum()),
            age: now.saturating_sub(w.since),
        };
        let mut out: Vec<_> = workers.iter().map(view).collect();
        drop(state);
        out.sort_by(|a, b| (&a.lease, b.age, a.id).cmp(&(&b.lease, a.age, b.id)));
        out
    }

    /// The processes that a lease's workers serve, and the device memory that each has of the lease's, by device in the lease's
    /// order, contexts included.
    pub fn processes(&self, lease: &str) -> Vec<(ClientProcess, Vec<u64>)> {
        let state = self.state();
        let Some(entry) = state.leases.get(lease) else { return Vec::new() };
        let memory =
            |id| (0..entry.ledger.devices().len()).map(|device| entry.ledger.of(id, device)).collect();
        let mine = state.workers.iter().filter(|(_, w)| w.lease == lease);
        let mut out: Vec<_> = mine.filter_map(|(id, w)| Some((w.process.clone()?, memory(id)))).collect();
        out.sort_by_key(|(process, _)| process.pid);
        out
    }

    /// Programs that run, for people.
    pub fn programs(&self) -> Vec<String> {
        let mut out: Vec<String> = self
            .state()
            .workers
            .values()
            .filter_map(|w| {
                let p = w.process.as_ref()?;
                Some(format!("{} (pid {} of {})", p.program, p.pid, w.client))
            })
            .collect();
        out.sort();
        out
    }

    /// The leases that a stock is kept for.
    pub fn leases(&self) -> Vec<String> {
        self.state().leases.keys().cloned().collect()
    }

    /// Ready workers of a lease.
    pub fn ready(&self, lease: &str) -> u32 {
        self.state().leases.get(lease).map_or(0, |l| l.stock.ready() as u32)
    }

    /// What the driver says processes of this host have: process, GPU, bytes. Those that have what they were never granted
    /// are ended.
    pub fn reconcile(&self, readings: &[(u32, [u8; 16], u64)]) {
        let mut state = self.state();
        let State { workers, leases, .. } = &mut *state;
        for (id, worker) in workers.iter() {
            let Some(lease) = leases.get_mut(&worker.lease) else { continue };
            for device in 0..lease.ledger.devices().len() {
                let uuid = lease.ledger.devices()[device].uuid;
                let read = readings.iter().filter(|(pid, gpu, _)| Some(*pid) == worker.pid && *gpu == uuid);
                let bytes = read.map(|(.., bytes)| bytes).sum();
                lease.ledger.reading(id, device, bytes);
            }
        }
        // After each program its GPUs are looked at: what a process has must go with it.
        let now = self.0.clock.now();
        let State { workers, ended, .. } = &mut *state;
        ended.retain(|(pid, gpus, at)| {
            let passed = now.saturating_sub(*at);
            let listed = readings.iter().any(|(p, _, bytes)| p == pid && *bytes > 0);
            // The number may be another worker's by now.
            let left = passed >= REAP_LIMIT && listed && !workers.values().any(|w| w.pid == Some(*pid));
            if left {
                let why = format!("memory of process {pid}, which has ended, is still in use");
                let _ = self.0.events.send(Event::Stuck { gpus: gpus.clone(), why });
            }
            !left && passed < REAP_LIMIT * 3
        });
        let State { workers, leases, .. } = &mut *state;
        let offenders: Vec<_> = leases
            .values()
            .flat_map(|l| l.ledger.offenders())
            .map(|(id, _, unasked)| (id, unasked))
            .collect();
        for (id, unasked) in offenders {
            if let Some(worker) = workers.get_mut(&id) {
                warn!(
                    gpusession_worker = hex(&id),
                    gpusession_lease = worker.lease,
                    "worker {} has {} MiB of device memory that it was never granted: ended",
                    hex(&id),
                    unasked >> 20
                );
                stop(&id, worker, "its process has more device memory than its lease");
            }
        }
    }

    /// Ends every worker and starts none any more; returns when the last one is gone.
    pub async fn close(&self, reason: &str) {
        loop {
            let mut empty = Box::pin(self.0.empty.notified());
            empty.as_mut().enable();
            {
                let mut state = self.state();
                state.closing = true;
                for (id, lease) in state.leases.drain() {
                    lease.changed.notify_waiters();
                    if let Some(mps) = self.mps() {
                        mps.leave(&id);
                    }
                }
                if state.workers.is_empty() {
                    break;
                }
                for (id, worker) in &mut state.workers {
                    stop(id, worker, reason);
                }
            }
            empty.await;
        }
        if let Some(mps) = self.mps() {
            mps.close().await;
        }
    }

    fn refill(&self, lease: &str) {
        let n = {
            let mut state = self.state();
            let mine =
                state.workers.values().filter(|w| w.lease == lease && w.phase != Phase::Ending).count();
            match state.leases.get_mut(lease) {
                Some(entry) if mine < MAX_PER_LEASE && !entry.away => entry.stock.start(self.0.clock.now()),
                _ => 0,
            }
        };
        for _ in 0..n {
            self.launch(lease, Vec::new(), true);
        }
    }

    /// Starts a worker's task; `None` where the lease is gone.
    fn launch(&self, lease: &str, environment: Vec<(String, String)>, stocked: bool) -> Option<WorkerId> {
        let id: WorkerId = clock::bytes(self.0.random.as_ref());
        let mut state = self.state();
        if state.closing {
            return None;
        }
        let entry = state.leases.get(lease)?;
        let options = &self.0.options;
        let start = Start {
            worker: id,
            lease: lease.into(),
            ticket_key: entry.lease.ticket_key,
            driver: options.driver.display().to_string(),
            devices: entry.ledger.devices().to_vec(),
            require_tls: entry.lease.encrypted,
            module_cache: options.module_cache.as_ref().map(|p| p.display().to_string()),
            // Under MPS a context takes one of the server's places.
            warm: !entry.lease.mps,
            mps: entry.lease.mps,
            resume_grace_s: options.resume_grace.as_secs() as u32,
            staging_bytes: entry.limits.smallest("staging").map_or(u64::MAX, |(_, bytes)| bytes),
            isolation: options.isolation,
        };
        let (commands, command_queue) = mpsc::channel(MAX_QUEUED);
        let (stop, stops) = mpsc::unbounded_channel();
        let worker = Worker {
            lease: lease.into(),
            client: entry.lease.client.clone(),
            gpus: entry.lease.shares.iter().map(|s| s.gpu.clone()).collect(),
            phase: Phase::Starting,
            pid: None,
            stocked,
            given: false,
            encrypted: entry.lease.encrypted,
            process: None,
            peer: None,
            connections: 0,
            fingerprint: None,
            usage: Usage::default(),
            used_at: self.0.clock.now(),
            busy: Duration::ZERO,
            admitted_unix: 0,
            user: entry.lease.user.clone(),
            active: self.0.clock.now(),
            pausing: None,
            wanted: false,
            isolation: "off".into(),
            seat: None,
            since: self.0.clock.now(),
            ended_because: None,
            commands,
            stop,
        };
        state.workers.insert(id, worker);
        drop(state);
        let this = self.clone();
        tokio::spawn(async move {
            let attending = {
                let this = this.clone();
                async move { this.run(&id, start, environment, command_queue, stops).await }
            };
            // A task of its own: whatever happens in it, the worker is taken off the books.
            let end = tokio::spawn(attending).await.unwrap_or_else(|e| format!("internal error: {e}"));
            this.gone(&id, end);
        });
        Some(id)
    }

    /// A worker from its start to its end. Returns how it ended, where it was not told to.
    async fn run(
        &self,
        id: &WorkerId,
        start: Start,
        environment: Vec<(String, String)>,
        mut commands: mpsc::Receiver<Command>,
        mut stops: mpsc::UnboundedReceiver<Command>,
    ) -> String {
        let program = &self.0.options.program;
        let mut variables = spawn::clean_environment(&self.0.options.driver);
        // The driver shows the worker its lease's GPUs only, in the lease's order.
        let gpus = self.state().workers.get(id).map(|w| w.gpus.join(",")).unwrap_or_default();
        variables.push(("CUDA_VISIBLE_DEVICES".into(), gpus.into()));
        if start.mps {
            match self.sit_down(id, &start).await {
                Ok(more) => variables.extend(more),
                Err(e) => return e,
            }
        }
        variables.extend(environment.into_iter().map(|(k, v)| (k.into(), v.into())));
        let (mut child, fd) = match self.0.spawner.start(program, variables).await {
            Ok(started) => started,
            Err(e) => return format!("{} cannot be started: {e}", program.display()),
        };
        let pid = child.id();
        if let Some(worker) = self.state().workers.get_mut(id) {
            worker.pid = pid;
        }
        let group = Pid::from_raw(pid.and_then(|p| i32::try_from(p).ok()).unwrap_or(0));
        let end = match Channel::new(fd) {
            Ok(channel) => {
                self.attend(id, start, &mut child, &channel, group, &mut commands, &mut stops).await
            }
            Err(e) => Err(format!("its channel: {e}")),
        };
        let end = match end {
            Ok(status) => describe(status),
            Err(reason) => {
                self.end_gpu_work(id).await;
                kill(group);
                self.reaped(id, &mut child).await;
                reason
            }
        };
        // Whatever it left behind in its group.
        kill(group);
        end
    }

    /// Waits for the end of a process that was killed. One that does not end sits in the driver: its GPUs are not well.
    async fn reaped(&self, id: &WorkerId, child: &mut Child) {
        if timeout(REAP_LIMIT, child.wait()).await.is_ok() {
            return;
        }
        let (gpus, pid) = match self.state().workers.get(id) {
            Some(worker) => (worker.gpus.clone(), worker.pid.unwrap_or(0)),
            None => return,
        };
        let why = format!("process {pid} of a worker was killed and does not end: it waits for the driver");
        let _ = self.0.events.send(Event::Stuck { gpus, why });
        let _ = child.wait().await;
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one worker's life, used here only")]
    async fn attend(
        &self,
        id: &WorkerId,
        start: Start,
        child: &mut Child,
        channel: &Channel,
        group: Pid,
        commands: &mut mpsc::Receiver<Command>,
        stops: &mut mpsc::UnboundedReceiver<Command>,
    ) -> Result<ExitStatus, String> {
        let stuck = |e: Option<io::Error>| match e {
            Some(e) => format!("its channel: {e}"),
            None => "it does not read its channel".to_string(),
        };
        let send = async |message: &ToWorker, beside: Option<std::os::fd::BorrowedFd<'_>>| match timeout(
            SEND_LIMIT,
            channel.send(message, beside),
        )
        .await
        {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(stuck(Some(e))),
            Err(_) => Err(stuck(None)),
        };
        // A worker that ended already is told by its exit status, not by its closed channel.
        let _ = send(&ToWorker::Start(start), None).await;
        let mut limit = Some((Instant::now() + START_LIMIT, "it was not ready in time"));
        let mut channel_open = true;
        let (mut second, mut packets, mut memory_packets) = (Instant::now(), 0, 0);
        // It asked for memory so often that it has to wait for the next second.
        let mut patience = false;
        loop {
            let deadline = limit.map_or_else(|| Instant::now() + Duration::from_secs(86400), |(at, _)| at);
            tokio::select! {
                biased;
                status = child.wait() => {
                    // What it said last says more than its exit status.
                    while channel_open
                        && let Ok(Ok(Some(message))) = timeout(Duration::from_millis(10), channel.recv()).await
                    {
                        self.heard(id, message);
                    }
                    return status.map_err(|e| e.to_string());
                }
                Some(command) = stops.recv() => match command {
                    Command::Stop { reason } => {
                        self.end_gpu_work(id).await;
                        let _ = send(&ToWorker::Stop { reason }, None).await;
                        limit = Some((Instant::now() + STOP_GRACE, ""));
                    }
                    Command::Tell(message) => send(&message, None).await?,
                    Command::Adopt { .. } => {}
                },
                () = sleep_until(second + Duration::from_secs(1)), if patience => patience = false,
                () = sleep_until(deadline), if limit.is_some() => {
                    let (_, why) = limit.take().unwrap_or((deadline, ""));
                    if !why.is_empty() {
                        return Err(why.into());
                    }
                    debug!(pid = group.as_raw(), "worker {} did not end in time: killed", hex(id));
                    kill(group);
                }
                Some(command) = commands.recv() => {
                    if let Command::Adopt { socket, preface, peer } = command {
                        let message = ToWorker::Adopt { preface, peer: peer.to_string() };
                        send(&message, Some(socket.as_fd())).await?;
                    }
                }
                // Last: a worker that says much delays nothing of the above.
                message = channel.recv(), if channel_open && !patience => match message {
                    Ok(Some(message)) => {
                        if second.elapsed() >= Duration::from_secs(1) {
                            (second, packets, memory_packets) = (Instant::now(), 0, 0);
                        }
                        match message {
                            FromWorker::MemoryWanted { .. } | FromWorker::MemoryReturned { .. } => {
                                memory_packets += 1;
                                patience = memory_packets > MAX_MEMORY_PACKETS;
                            }
                            _ => packets += 1,
                        }
                        if packets > MAX_PACKETS {
                            return Err("it floods its supervisor with messages".into());
                        }
                        if matches!(message, FromWorker::Ready { .. })
                            && limit.is_some_and(|(_, why)| !why.is_empty()) {
                            limit = None;
                        }
                        self.heard(id, message);
                    }
                    // It is about to exit, or closed its channel in order not to be stopped by it.
                    Ok(None) => {
                        channel_open = false;
                        limit = Some((Instant::now() + STOP_GRACE, ""));
                    }
                    Err(e) if e.raw_os_error().is_some() => {
                        channel_open = false;
                        limit = Some((Instant::now() + STOP_GRACE, ""));
                    }
                    Err(e) => return Err(e.to_string()),
                },
            }
        }
    }

    fn heard(&self, id: &WorkerId, message: FromWorker) {
        let mut state = self.state();
        let State { workers, leases, .. } = &mut *state;
        let Some(worker) = workers.get_mut(id) else { return };
        let lease = leases.get_mut(&worker.lease);
        let now = self.0.clock.now();
        match message {
            FromWorker::MemoryWanted { device, serial, bytes } => {
                let says = match lease {
                    Some(lease) => lease.ledger.ask(*id, device, serial, bytes, now),
                    None => vec![Say::Granted { worker: *id, device, serial, bytes: 0, left: 0 }],
                };
                say(workers, says);
            }
            FromWorker::StagingFull { bytes } => {
                let limit = lease.as_ref().and_then(|l| l.limits.smallest("staging"));
                if let Some((limit, _)) = limit
                    && let Some(more) = self.0.refusals.may()
                {
                    let why = format!("{} MiB of mapped host memory asked for", bytes.div_ceil(1 << 20));
                    let exceeded = limit.exceeded(why, "the program was told that there is no memory");
                    warn!(
                        gpusession_worker = hex(id),
                        gpusession_lease = worker.lease,
                        gpusession_client = worker.client,
                        "worker {}: {exceeded}{more}",
                        hex(id)
                    );
                }
            }
            FromWorker::MemoryReturned { device, bytes } => {
                if let Some(lease) = lease {
                    let says = lease.ledger.returned(id, device, bytes);
                    say(workers, says);
                }
            }
            FromWorker::Ready { fingerprint, cuda_version } => {
                if worker.phase != Phase::Starting {
                    return;
                }
                worker.phase = Phase::Warm;
                worker.fingerprint = Some(fingerprint);
                debug!(
                    gpusession_worker = hex(id),
                    gpusession_lease = worker.lease,
                    cuda_version,
                    "worker {} is ready",
                    hex(id)
                );
                if let Some(lease) = lease {
                    if worker.stocked {
                        lease.stock.started(*id);
                    }
                    lease.changed.notify_waiters();
                    let event = Event::Workers {
                        client: worker.client.clone(),
                        lease: worker.lease.clone(),
                        stock: lease.stock.ready() as u32,
                        ended: None,
                    };
                    let _ = self.0.events.send(event);
                }
            }
            FromWorker::Ended { reason } if worker.seat.is_some() && worker.process.is_some() => {
                // It waits for the end of its GPU work.
                stop(id, worker, &printable(&reason));
            }
            FromWorker::Failed { reason } | FromWorker::Ended { reason } => {
                worker.ended_because.get_or_insert(printable(&reason));
            }
            FromWorker::Admitted { uid, pid, program, encrypted } => {
                // A worker serves one process.
                if worker.process.is_some() || worker.phase != Phase::Taken {
                    return;
                }
                let program = printable(&program);
                info!(
                    gpusession_worker = hex(id),
                    gpusession_lease = worker.lease,
                    gpusession_client = worker.client,
                    "worker {} serves {program} (pid {pid}, uid {uid}) of {}",
                    hex(id),
                    worker.client
                );
                worker.active = self.0.clock.now();
                worker.process = Some(ClientProcess { uid, pid, program, encrypted });
                worker.phase = Phase::Active;
                (worker.used_at, worker.admitted_unix) = (now, self.0.clock.unix());
                if let Some(lease) = lease {
                    lease.ledger.admit(*id);
                }
            }
            FromWorker::Refused { reason } => {
                if let Some(more) = self.0.refusals.may() {
                    warn!(
                        gpusession_worker = hex(id),
                        gpusession_lease = worker.lease,
                        gpusession_client = worker.client,
                        "worker {} refused a connection: {}{more}",
                        hex(id),
                        printable(&reason)
                    );
                }
            }
            FromWorker::Usage(usage) => {
                let passed = now.saturating_sub(worker.used_at);
                worker.busy += passed.saturating_sub(Duration::from_micros(usage.idle_usec));
                worker.used_at = now;
                worker.usage = usage;
                let active = self.0.clock.now().saturating_sub(Duration::from_micros(usage.idle_usec));
                worker.active = worker.active.max(active);
            }
            FromWorker::Paused { quiet } => {
                if let Some(asked) = worker.pausing.take() {
                    let _ = asked.send(quiet);
                }
            }
            FromWorker::Contained { lacking } => {
                let lacking: Vec<_> = lacking.iter().map(|l| printable(l)).collect();
                if !lacking.is_empty() && !state.isolation_told {
                    state.isolation_told = true;
                    warn!("workers are not isolated as far as they could be: {}", lacking.join("; "));
                }
                if let Some(worker) = state.workers.get_mut(id) {
                    worker.isolation = if lacking.is_empty() { "full".into() } else { lacking.join("; ") };
                }
            }
            FromWorker::Wanted => {
                worker.wanted = true;
                self.0.wants.notify_one();
            }
        }
    }

    fn gone(&self, id: &WorkerId, end: String) {
        let mut state = self.state();
        let Some(worker) = state.workers.remove(id) else { return };
        let peak_memory_bytes = {
            let State { workers, leases, .. } = &mut *state;
            leases.get_mut(&worker.lease).map_or(worker.usage.memory_bytes, |lease| {
                let peak = lease.ledger.peak(id);
                say(workers, lease.ledger.gone(id));
                peak
            })
        };
        let told = worker.phase == Phase::Ending;
        let early = matches!(worker.phase, Phase::Starting | Phase::Warm);
        if let Some(seat) = worker.seat.as_ref().filter(|_| !told && worker.process.is_some()) {
            seat.suspect();
        }
        let reason = match worker.ended_because {
            Some(reason) if told => reason,
            Some(reason) => format!("{reason} ({end})"),
            None => end,
        };
        let (worker_id, lease_id) = (hex(id), worker.lease.clone());
        if let Some(pid) = worker.pid {
            let ended = (pid, worker.gpus.clone(), self.0.clock.now());
            state.ended.push(ended);
        }
        if let Some(process) = &worker.process {
            self.0.accounting.add(Record {
                kind: Kind::Process,
                lease: lease_id.clone(),
                worker: worker_id.clone(),
                client: worker.client.clone(),
                user: worker.user.clone(),
                uid: process.uid,
                pid: process.pid,
                program: process.program.clone(),
                gpus: worker.gpus.clone(),
                start_unix: worker.admitted_unix,
                end_unix: self.0.clock.unix(),
                gpu_busy_usec: u64::try_from(worker.busy.as_micros()).unwrap_or(u64::MAX),
                peak_memory_bytes,
                bytes_to_device: worker.usage.bytes_to_device,
                bytes_from_device: worker.usage.bytes_from_device,
                calls: worker.usage.calls,
                reason: reason.clone(),
            });
        }
        let mut pause = None;
        if let Some(lease) = state.leases.get_mut(&worker.lease) {
            if early && worker.stocked {
                pause = Some(lease.stock.failed(id, self.0.clock.now(), reason.clone()));
            }
            if worker.process.is_some() {
                lease.unused = self.0.clock.now();
            }
            lease.changed.notify_waiters();
            if worker.given {
                let _ = self.0.events.send(Event::Workers {
                    client: worker.client.clone(),
                    lease: worker.lease.clone(),
                    stock: lease.stock.ready() as u32,
                    ended: Some(*id),
                });
            }
        }
        if state.workers.is_empty() {
            self.0.empty.notify_waiters();
        }
        drop(state);
        match pause {
            Some(pause) => warn!(
                gpusession_worker = worker_id,
                gpusession_lease = lease_id,
                "worker {worker_id} of lease {lease_id} did not stay: {reason}; next try in {} ms",
                pause.as_millis()
            ),
            None => info!(
                gpusession_worker = worker_id,
                gpusession_lease = lease_id,
                "worker {worker_id} of lease {lease_id} ended: {reason}"
            ),
        }
        self.refill(&lease_id);
    }
}

/// Takes a caller out of the count of those who wait, however its wait ends.
struct Waiting<'a> {
    supervisor: &'a Supervisor,
    lease: &'a str,
    counted: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.counted
            && let Some(lease) = self.supervisor.state().leases.get_mut(self.lease)
        {
            lease.stock.unwait();
        }
    }
}

/// Ends a cold worker that its caller does not wait for any longer.
struct Abandoned<'a> {
    supervisor: &'a Supervisor,
    id: WorkerId,
    kept: bool,
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.supervisor.end_worker(&self.id, None, "nobody waits for it any longer");
        }
    }
}

/// Passes on what a ledger says.
fn say(workers: &HashMap<WorkerId, Worker>, says: Vec<Say>) {
    for say in says {
        let (worker, message) = match say {
            Say::Granted { worker, device, serial, bytes, left } => {
                (worker, ToWorker::MemoryGranted { device, serial, bytes, left })
            }
            Say::Recall { worker } => (worker, ToWorker::MemoryRecall),
        };
        if let Some(worker) = workers.get(&worker) {
            let _ = worker.stop.send(Command::Tell(message));
        }
    }
}

fn take_one(id: WorkerId, worker: &mut Worker) -> Option<Taken> {
    worker.phase = Phase::Taken;
    worker.given = true;
    worker.fingerprint.map(|fingerprint| Taken { id, fingerprint })
}

fn stop(id: &WorkerId, worker: &mut Worker, reason: &str) {
    if worker.phase == Phase::Ending {
        return;
    }
    debug!(gpusession_worker = hex(id), "worker {} is told to end: {reason}", hex(id));
    worker.phase = Phase::Ending;
    worker.ended_because = Some(reason.into());
    let _ = worker.stop.send(Command::Stop { reason: reason.into() });
}

fn kill(group: Pid) {
    // Group 0 would be our own.
    if group.as_raw() > 1 {
        let _ = killpg(group, Signal::SIGKILL);
    }
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(signal) => format!("killed by {}", signal.as_str()),
            Err(_) => format!("killed by signal {signal}"),
        },
        (None, None) => status.to_string(),
    }
}

/// Text of a worker, fit for a log and a terminal.
fn printable(text: &str) -> String {
    text.chars().take(200).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A worker's id as people see it.
pub fn hex(id: &WorkerId) -> String {
    data_encoding::HEXLOWER.encode(id)
}
