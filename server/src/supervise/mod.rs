//! Worker processes: started warm for each lease, assigned to one client process each, killed in
//! time.
//!
//! A worker is presumed controlled by its client. Its messages give it no rights. The supervisor
//! kills the whole process group of a worker, and the kernel then frees its device memory. With a
//! descriptor store ([`keep`]), workers outlive the server.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::readings::uuid_bytes;
use gpusession_proto::supervise::{
    ClientProcess, DeviceLimit, FromWorker, Isolation, MPS_VARIABLES, Start, ToWorker, Usage,
};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, broadcast, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tracing::{debug, info, warn};

use self::channel::Channel;
use self::keep::{Kept, LeftWorker, Store};
use self::process::{Process, end_group};
use self::quota::{Ledger, Say};
use self::spawn::Spawner;
use self::stock::Stock;
pub use self::stock::WorkerId;
use self::trial::Trial;
use self::unadmitted::Unadmitted;
use crate::accounting::{Accounting, Kind, Record};
use crate::cache::Cache;
use crate::clock::{self, Clock, Moment, Random};
use crate::lease::Lease;
use crate::limits::{Effective, Exceeded, Limits};
use crate::mps::{Mps, Seat};
use crate::quiet::Quiet;

mod admission;
pub mod channel;
mod host_memory;
pub mod keep;
mod mps;
pub mod park;
pub mod process;
pub mod quota;
pub mod spawn;
pub mod stock;
mod trial;
mod unadmitted;

/// Time that a worker may take to exit after a stop request. The supervisor then kills it, so that
/// its resources are free again soon.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// As [`STOP_GRACE`], for a worker under MPS; MPS gets the rest of the time (`mps::END_TIMEOUT`).
const MPS_STOP_GRACE: Duration = Duration::from_millis(750);
/// Time until a started worker must be ready. Drivers of many GPUs without persistence take tens of
/// seconds.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Time that a call waits for a ready worker.
const TAKE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time that a waiting program gives other programs of its lease to make room.
const ROOM_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which a worker that does not read its channel counts as stuck.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// Time that a server that is forced to quit waits for the workers that it killed.
const KILL_TIMEOUT: Duration = Duration::from_millis(500);
/// Time after which a killed process that still exists counts as stuck in the driver.
const REAP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time to read a worker's final messages after it exits.
///
/// Bounded, since another process of its group may keep sending.
const FINAL_MESSAGES_GRACE: Duration = Duration::from_millis(100);
/// Interval of a worker's usage reports while its client has GPU work.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which accounting notes the running programs, in seconds.
const NOTED_EVERY: u64 = 60;
/// Most workers of one lease.
const MAX_PER_LEASE: usize = 64;
/// Packets that a worker may send in a second; the supervisor kills one that sends more. Packets
/// about memory count separately: after `MAX_MEMORY_PACKETS` the supervisor reads the channel again
/// in the next second.
const MAX_PACKETS: u32 = 1000;
const MAX_MEMORY_PACKETS: u32 = 20_000;
/// Missing isolation measures that a worker may report, and the bytes of each.
const MAX_LACKING: usize = 8;
const MAX_LACKING_BYTES: usize = 512;
/// Isolation of a worker that has not reported it yet.
const LATER: &str = "later";
/// Time that queued messages may take to reach their workers before this server leaves them.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Handed-over sockets that wait for one worker, at most.
const MAX_QUEUED: usize = 64;

/// Variables of the CUDA driver that a client process may set for its worker.
///
/// Other variables of a program act on the client's side of the connection.
pub const DRIVER_ENVIRONMENT: &[&str] = &[
    "CUDA_AUTO_BOOST",
    "CUDA_CACHE_DISABLE",
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

/// Options with which this server starts workers.
#[derive(Debug, Clone)]
pub struct Options {
    /// Path of the worker's program.
    pub program: PathBuf,
    /// Path of the driver library that workers load.
    pub driver: PathBuf,
    /// Cache on disk; `None`: workers keep nothing there.
    pub cache: Option<Cache>,
    /// Ready workers per lease.
    pub warm_workers: u32,
    /// Time without use after which a lease keeps only one ready worker.
    pub idle_exit: Duration,
    /// Time that a worker waits for a lost client.
    pub resume_grace: Duration,
    /// Isolation of workers: off, tried or required.
    pub isolation: Isolation,
    /// Settings of MPS; `None`: this server does not use MPS.
    pub mps: Option<crate::mps::Settings>,
}

/// Phase in the life of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Loads the driver.
    Starting,
    /// Ready and in stock.
    Warm,
    /// Assigned to the client; no process admitted yet.
    Taken,
    /// Serves a process.
    Active,
    /// Serves a process whose device memory is parked in host memory.
    Parked,
    /// Was sent a stop request, or exits by itself.
    Ending,
}

impl Phase {
    /// Returns the name of the phase in listings.
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
    /// Client process that the worker serves, once admitted.
    pub process: Option<ClientProcess>,
    /// Source address of the last data connection.
    pub peer: Option<SocketAddr>,
    /// UUIDs of the lease's GPUs.
    pub gpus: Vec<String>,
    /// Last usage report of the worker.
    pub usage: Usage,
    /// `full`, `off`, `later` (not reported yet), or the measures that this host does not allow.
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

/// A worker that a client may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// Random id; the preface of a data connection names it.
    pub id: WorkerId,
    /// SHA-256 of its certificate.
    pub fingerprint: [u8; 32],
}

/// Reason why a client gets no worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// The lease ended, or never existed.
    #[error("no such lease")]
    NoLease,
    /// The lease is parked or lent, so it has no GPUs.
    #[error("the lease's GPUs were given to others while it was idle")]
    Away,
    /// The lease has its maximum of workers.
    #[error("the lease has {0} workers, the most it may have; end a program that uses the GPU")]
    TooMany(usize),
    /// A limit of the client or the user is reached.
    #[error("{0}")]
    Limit(Exceeded),
    /// The request sets a variable that is not one of the driver's.
    #[error("{0:?} is not a variable of the CUDA driver that a worker can be started with")]
    Environment(String),
    /// The lease's workers fail to start.
    #[error("no worker starts on this server: {0}")]
    NotStarting(String),
    /// The lease's memory has no room for another context; contexts count as memory of the lease.
    #[error(
        "the lease's GPU memory has no room for the context of another program; end one that uses the GPU, or ask for a larger \
         lease"
    )]
    Memory,
    /// The lease's MPS server serves its maximum of contexts.
    #[error("{0}")]
    Mps(String),
    /// No worker became ready in time.
    #[error("no worker got ready within {} s; see the server's journal", TAKE_TIMEOUT.as_secs())]
    TooSlow,
}

/// Event that the supervisor sends to its subscribers.
#[derive(Debug, Clone)]
pub enum Event {
    /// The stock or the workers of a lease changed.
    Workers {
        /// Client that holds the lease.
        client: String,
        /// Id of the lease.
        lease: String,
        /// Number of ready workers.
        stock: u32,
        /// Worker that a client had taken and that has exited.
        ended: Option<WorkerId>,
    },
    /// A killed worker does not exit, or the memory of an exited one is still in use.
    Stuck {
        /// UUIDs of the worker's GPUs.
        gpus: Vec<String>,
        /// Description for administrators.
        why: String,
    },
}

/// Reason why a worker cannot take over a connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// No worker with this id serves a client.
    #[error("no such worker: it ended, or its server was restarted")]
    Unknown,
    /// The worker's queue of connections is full.
    #[error("the worker has too many connections waiting")]
    Busy,
    /// The lease requires encryption, and the connection has none.
    #[error("this server wants the connection encrypted")]
    Clear,
    /// A limit of the client or the user is reached.
    #[error("{0}")]
    Limit(Exceeded),
}

enum Command {
    Adopt {
        number: u64,
        socket: std::net::TcpStream,
        preface: Vec<u8>,
        peer: SocketAddr,
    },
    Tell(ToWorker),
    /// Send the queued messages, then leave the worker to the next server.
    Leave,
}

/// State of a worker; the store keeps it for the next server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Book {
    id: WorkerId,
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
    /// Lanes that it has admitted, a bit each; they close with the worker.
    lanes: u64,
    fingerprint: Option<[u8; 32]>,
    usage: Usage,
    /// Time of the last usage report, and the GPU time up to it.
    used_at: Moment,
    busy: Duration,
    admitted_unix: u64,
    user: String,
    /// When GPU work of the client was last seen.
    active: Moment,
    /// Its client has sent it something while it is paused.
    wanted: bool,
    /// Its device memory is being parked or unparked.
    moving: bool,
    isolation: String,
    since: Moment,
    ended_because: Option<String>,
    /// As [`Ledger::held`] returns it.
    held: Vec<([u8; 16], u64, u64)>,
}

struct Worker {
    book: Book,
    /// Place in the store. `None`: the worker exits with this server.
    kept: Option<Kept>,
    /// Seat in an MPS domain.
    seat: Option<Arc<Seat>>,
    pausing: Option<oneshot::Sender<bool>>,
    /// Connections that the worker has not decided on.
    unadmitted: Unadmitted,
    /// Whether the worker is isolated; `Some` only if its start shows whether isolation works on
    /// this host.
    ///
    /// A start with a client's own variables may fail because of them. Under MPS a worker loads its
    /// driver later.
    trial: Option<bool>,
    /// A process has shown it a ticket, so that it may have contexts on its GPUs.
    presented: bool,
    orders: Orders,
}

/// Gives access to the worker's book.
impl Deref for Worker {
    type Target = Book;

    fn deref(&self) -> &Book {
        &self.book
    }
}

impl DerefMut for Worker {
    fn deref_mut(&mut self) -> &mut Book {
        &mut self.book
    }
}

/// Logs that a worker's program exceeds a limit. `more` tells how many such lines were left out.
fn exceeds(id: &WorkerId, worker: &Worker, exceeded: &Exceeded, more: impl fmt::Display) {
    warn!(
        gpusession_worker = hex(id),
        gpusession_lease = worker.lease,
        gpusession_client = worker.client,
        "worker {}: {exceeded}{more}",
        hex(id)
    );
}

impl Book {
    /// Returns the user whose program it serves; empty while unknown.
    ///
    /// A lease of a whole machine belongs to no user, so that its user is known from the first
    /// process on.
    fn user(&self) -> &str {
        if self.user.is_empty() { self.process.as_ref().map_or("", |p| &p.user) } else { &self.user }
    }

    /// Returns `true` if the worker may report its isolation now.
    ///
    /// It may do so once, before it serves a program that could forge the report.
    fn may_be_contained(&self, lacking: &[String]) -> bool {
        self.isolation == LATER
            && self.process.is_none()
            && lacking.len() <= MAX_LACKING
            && lacking.iter().all(|l| l.len() <= MAX_LACKING_BYTES)
    }

    /// Returns `true` if the worker starts for its lease's stock.
    fn starts(&self) -> bool {
        self.phase == Phase::Starting && self.stocked
    }

    /// Returns `true` if the worker serves a program or is about to.
    fn serves(&self) -> bool {
        matches!(self.phase, Phase::Taken | Phase::Active | Phase::Parked)
    }

    /// Returns `true` if the worker starts for one program, which waits for it.
    fn is_for_one(&self) -> bool {
        matches!(self.phase, Phase::Starting | Phase::Warm) && !self.stocked
    }
}

impl Worker {
    /// Writes the book into the store, for the next server.
    fn remember(&mut self, ledger: Option<&Ledger>) {
        if let Some(ledger) = ledger {
            self.book.held = ledger.held(&self.book.id);
        }
        if let Some(kept) = &self.kept {
            kept.write(&self.book);
        }
    }
}

/// Senders of messages to a worker's task.
struct Orders {
    /// Connections: bounded, since a client may open too many.
    commands: mpsc::Sender<Command>,
    tells: mpsc::UnboundedSender<Command>,
    /// Reason for the worker to stop. A channel of its own lets it overtake queued messages.
    end: watch::Sender<Option<String>>,
}

/// Receivers of a worker's task.
struct Queues {
    commands: mpsc::Receiver<Command>,
    tells: mpsc::UnboundedReceiver<Command>,
    ends: watch::Receiver<Option<String>>,
}

fn orders() -> (Orders, Queues) {
    let (commands, command_queue) = mpsc::channel(MAX_QUEUED);
    let (tells, tell_queue) = mpsc::unbounded_channel();
    let (end, ends) = watch::channel(None);
    (Orders { commands, tells, end }, Queues { commands: command_queue, tells: tell_queue, ends })
}

/// Waits until the worker is to stop; returns the reason.
async fn told_to_end(ends: &mut watch::Receiver<Option<String>>) -> String {
    let reason = ends.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
    match reason {
        Some(reason) => reason,
        None => std::future::pending().await,
    }
}

/// Progress of a worker's end. Neither the worker's messages nor a full channel prolong it.
#[derive(Default)]
struct Ending {
    gone_by: Option<Instant>,
    /// MPS has been asked to end the worker's GPU work.
    work_ended: bool,
}

impl Ending {
    fn begins(&mut self, takes: Duration) -> Instant {
        *self.gone_by.get_or_insert_with(|| Instant::now() + takes)
    }
}

/// Source of a worker's process.
enum Origin {
    /// To be started with these variables in addition to the server's own.
    New(Box<Start>, Vec<(String, String)>),
    /// Left by an earlier server.
    Left { pid: u32, pidfd: OwnedFd, channel: OwnedFd },
}

/// Outcome of attending to a worker.
enum End {
    /// The worker exited; the status is known for a child only.
    Ended(Option<ExitStatus>),
    /// The next server attends to it.
    Left,
}

struct LeaseState {
    lease: Lease,
    limits: Effective,
    ledger: Ledger,
    stock: Stock,
    /// Lent or parked: no worker may start.
    away: bool,
    /// When its last process exited or, before the first one, the lease began.
    unused: Moment,
    changed: Arc<Notify>,
    /// When its programs were last asked to return unused memory.
    recalled: Option<Moment>,
}

#[derive(Default)]
struct State {
    workers: HashMap<WorkerId, Worker>,
    limits: Limits,
    leases: HashMap<String, LeaseState>,
    /// Workers of an earlier server whose leases are not added yet.
    left: Vec<LeftWorker>,
    /// Recently exited workers: process id, GPUs, time of the exit.
    ended: Vec<(u32, Vec<String>, Moment)>,
    closing: bool,
    isolation_told: bool,
    trial: Trial,
    /// When running programs were last noted for accounting, in minutes.
    noted: u64,
}

impl State {
    fn remember(&mut self, id: &WorkerId) {
        if let Some(worker) = self.workers.get_mut(id) {
            let ledger = self.leases.get(&worker.book.lease).map(|l| &l.ledger);
            worker.remember(ledger);
        }
    }

    /// Checks that a client's and a user's limits leave room for `more`.
    ///
    /// The error holds the refusal, and the room that is left.
    fn within(
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

struct Inner {
    options: Options,
    spawner: Spawner,
    store: Store,
    mps: Option<Mps>,
    accounting: Accounting,
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
    /// Ready workers per lease, and the time without use after which one is enough.
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
        let mps = options.mps.clone().map(|settings| Mps::new(settings, spawner.clone(), clock.clone()));
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
            refusals: Quiet::default(),
        }));
        if let Some(happened) = happened {
            tokio::spawn(this.clone().serve_mps(happened));
        }
        Ok(this)
    }

    /// Returns the MPS domains, if this server uses MPS.
    pub fn mps(&self) -> Option<&Mps> {
        self.0.mps.as_ref()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stock(&self) -> (u32, Duration) {
        *self.0.stock.lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut worker = Worker {
            book,
            kept: Some(kept),
            seat: None,
            pausing: None,
            unadmitted: Unadmitted::default(),
            trial: None,
            presented: false,
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

    /// Takes up to `count` ready workers out of the stock, or waits for one if it is empty.
    ///
    /// A request with variables of its own gets a cold worker, started for this call.
    pub async fn take(
        &self,
        client: &str,
        lease: &str,
        count: usize,
        environment: Vec<(String, String)>,
    ) -> Result<Vec<Taken>, TakeError> {
        let mut environment = environment;
        if !self.state().leases.get(lease).is_some_and(|l| l.lease.mps) {
            // Without MPS these variables have no effect, as on a local card.
            environment.retain(|(name, _)| !MPS_VARIABLES.contains(&name.as_str()));
        }
        if let Some((bad, _)) = environment.iter().find(|(name, value)| {
            !DRIVER_ENVIRONMENT.iter().chain(MPS_VARIABLES).any(|n| n == name)
                || value.contains('\0')
                || value.len() > 256
        }) {
            return Err(TakeError::Environment(bad.clone()));
        }
        let deadline = Instant::now() + TAKE_TIMEOUT;
        if !environment.is_empty() {
            return self.take_cold(client, lease, environment, deadline).await;
        }
        let mut waiting = Waiting { supervisor: self, lease, counted: false };
        loop {
            let changed = {
                let mut state = self.state();
                // In each round, since other programs of the client or user may have taken workers
                // meanwhile.
                let count = self.room(&state, client, lease, count.max(1), None)?;
                let State { workers, leases, .. } = &mut *state;
                let entry = leases.get_mut(lease).ok_or(TakeError::NoLease)?;
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
                    let taken = ids.iter().filter_map(|id| take_one(workers.get_mut(id)?)).collect();
                    drop(state);
                    self.refill(lease);
                    return Ok(taken);
                }
                if entry.stock.paused(self.0.clock.now()) {
                    let reason = entry.stock.failing().unwrap_or("it exited at once").to_string();
                    return Err(TakeError::NotStarting(reason));
                }
                if !waiting.counted {
                    entry.stock.wait();
                    waiting.counted = true;
                }
                // Registered before the lock is released, so that no change is missed.
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

    /// As [`Supervisor::take`], for programs that wait.
    ///
    /// If they have no room, the lease's other programs are first asked to return unused memory,
    /// and exiting programs get a moment.
    pub async fn take_for_waiting(
        &self,
        client: &str,
        lease: &str,
        count: usize,
        environment: Vec<(String, String)>,
    ) -> Result<Vec<Taken>, TakeError> {
        let deadline = Instant::now() + ROOM_TIMEOUT;
        loop {
            // Registered before the state is checked, so that no change is missed.
            let changed =
                self.state().leases.get(lease).map(|l| Box::pin(l.changed.clone().notified_owned()));
            let mut changed = changed.ok_or(TakeError::NoLease)?;
            changed.as_mut().enable();
            let over = Instant::now() >= deadline;
            match self.take(client, lease, count, environment.clone()).await {
                Err(TakeError::Memory) if !over => self.recall(lease),
                Err(TakeError::Mps(_)) if !over => {}
                answer => return answer,
            }
            let _ = tokio::time::timeout_at(deadline, changed).await;
        }
    }

    /// Asks a lease's programs to return unused memory, at most once per `ROOM_TIMEOUT`.
    fn recall(&self, lease: &str) {
        let now = self.0.clock.now();
        let mut state = self.state();
        let State { workers, leases, .. } = &mut *state;
        if let Some(lease) = leases.get_mut(lease)
            && lease.recalled.is_none_or(|at| now >= at + ROOM_TIMEOUT)
        {
            lease.recalled = Some(now);
            say(workers, Some(&lease.ledger), lease.ledger.recall());
        }
    }

    /// Returns how many of `count` workers the lease's client and user may take now.
    ///
    /// Workers that start for other programs count; `own` is the one started for this call.
    fn room(
        &self,
        state: &State,
        client: &str,
        lease: &str,
        count: usize,
        own: Option<&WorkerId>,
    ) -> Result<usize, TakeError> {
        if state.leases.get(lease).is_none_or(|l| l.lease.client != client) {
            return Err(TakeError::NoLease);
        }
        let soon = |w: &Worker| w.is_for_one() && own != Some(&w.id);
        let count = self.room_under_mps(state, lease, count, soon)?;
        let count = Self::room_in_memory(state, lease, count, soon)?;
        Self::room_in_limits(state, lease, count, soon)
    }

    /// Bounds `count` by the room for contexts in the lease's memory.
    ///
    /// Workers that were given and serve no process yet count, too.
    fn room_in_memory(
        state: &State,
        lease: &str,
        count: usize,
        soon: impl Fn(&Worker) -> bool,
    ) -> Result<usize, TakeError> {
        let Some(entry) = state.leases.get(lease) else { return Ok(count) };
        let given = |w: &Worker| w.given && w.process.is_none() && w.phase != Phase::Ending;
        let coming = |w: &&Worker| w.lease == lease && (given(w) || soon(w));
        match entry.ledger.contexts_left().saturating_sub(state.workers.values().filter(coming).count()) {
            0 => Err(TakeError::Memory),
            left => Ok(count.min(left)),
        }
    }

    fn room_in_limits(
        state: &State,
        lease: &str,
        count: usize,
        soon: impl Fn(&Worker) -> bool,
    ) -> Result<usize, TakeError> {
        let Some(Lease { client, user, .. }) = state.leases.get(lease).map(|l| &l.lease) else {
            return Ok(count);
        };
        let serves = |w: &Worker| u64::from(w.serves() || soon(w));
        match state.within((client, user), "workers", count as u64, "programs", serves) {
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
        let id = {
            let mut state = self.state();
            self.room(&state, client, lease, 1, None)?;
            if state.leases.get(lease).is_some_and(|l| l.away) {
                return Err(TakeError::Away);
            }
            let mine =
                state.workers.values().filter(|w| w.lease == lease && w.phase != Phase::Ending).count();
            if mine >= MAX_PER_LEASE {
                return Err(TakeError::TooMany(mine));
            }
            // It counts from here on, before any other request is checked.
            self.launch(&mut state, lease, environment, false).ok_or(TakeError::NoLease)?
        };
        let mut abandoned = Abandoned { supervisor: self, id, kept: false };
        loop {
            let changed = {
                let mut state = self.state();
                // Other programs may have taken the last place while it started.
                self.room(&state, client, lease, 1, Some(&id))?;
                let entry = state.leases.get(lease).ok_or(TakeError::NoLease)?;
                let mut changed = Box::pin(entry.changed.clone().notified_owned());
                changed.as_mut().enable();
                match state.workers.get_mut(&id) {
                    None => return Err(TakeError::NotStarting("it exited before it was ready".into())),
                    Some(w) if w.phase == Phase::Ending => {
                        let reason = w.ended_because.clone().unwrap_or_default();
                        return Err(TakeError::NotStarting(reason));
                    }
                    Some(w) if w.phase == Phase::Warm => {
                        abandoned.kept = true;
                        return take_one(w).map(|t| vec![t]).ok_or(TakeError::NoLease);
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
        // The user of a machine's lease is known after the first connection.
        let of = (worker.client.clone(), worker.user().to_owned());
        let open = |w: &Worker| if w.phase == Phase::Ending { 0 } else { u64::from(w.lanes.count_ones()) };
        let within = state.within((&of.0, &of.1), "connections", 1, "data connections", open);
        if let Err((exceeded, _)) = within {
            return Err((AdoptError::Limit(exceeded), socket));
        }
        let Some(worker) = state.workers.get_mut(id) else { return Err((AdoptError::Unknown, socket)) };
        let number = u64::from_le_bytes(clock::bytes(self.0.random.as_ref()));
        if !worker.unadmitted.enter(number, peer.ip(), self.0.clock.now()) {
            return Err((AdoptError::Busy, socket));
        }
        match worker.orders.commands.try_send(Command::Adopt { socket, number, preface, peer }) {
            Ok(()) => {
                if worker.lanes == 0 {
                    worker.peer = Some(peer);
                    state.remember(id);
                }
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

    /// Does the work that is due by time alone.
    ///
    /// It bounds host memory, retries failed starts, shrinks the stocks of idle leases, answers
    /// overdue memory requests, and notes running programs.
    pub fn tick(&self) {
        self.bound_host_memory();
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
                say(workers, Some(&lease.ledger), says);
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
    /// answer.
    pub fn may_be_worker(&self, pid: u32) -> bool {
        use std::os::unix::fs::MetadataExt;
        let file = |path: &Path| std::fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
        let runs = file(Path::new(&format!("/proc/{pid}/exe")));
        let program = || file(&self.0.options.program);
        // Checked last: an exiting worker is removed from the books only after its process is gone.
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
            process: w.process.clone(),
            peer: w.peer,
            gpus: w.gpus.clone(),
            usage: w.usage,
            isolation: w.isolation.clone(),
            memory_bytes: counted(&w.lease, &|ledger, device| ledger.of(id, device)),
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
            |id| (0..entry.ledger.devices().len()).map(|device| entry.ledger.of(id, device)).collect();
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

    /// Applies readings of the driver: process id, GPU and bytes of each process of this host.
    ///
    /// Stops workers that use a GPU outside their lease, or too much memory that was never granted.
    pub fn reconcile(&self, readings: &[(u32, [u8; 16], u64)]) {
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
            let left = passed >= REAP_TIMEOUT && listed && !workers.values().any(|w| w.pid == Some(*pid));
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
                stop(id, worker, "its process uses a GPU that its lease does not have");
            }
        }
        for lease in leases.values_mut() {
            let before = lease.ledger.contexts_left();
            let says = lease.ledger.all_read(now);
            say(workers, Some(&lease.ledger), says);
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
                stop(
                    &id,
                    worker,
                    "its lease is over its memory limit, and its process holds the most memory that was never granted",
                );
            }
        }
    }

    /// Starts no more workers, and applies `what` to the state until the last worker has exited.
    async fn until_none(&self, mut what: impl FnMut(&mut State)) {
        loop {
            let mut empty = Box::pin(self.0.empty.notified());
            empty.as_mut().enable();
            {
                let mut state = self.state();
                state.closing = true;
                what(&mut state);
                if state.workers.is_empty() {
                    return;
                }
            }
            empty.await;
        }
    }

    /// Stops every worker and starts no more; returns when the last one has exited.
    pub async fn close(&self, reason: &str) {
        let end = |state: &mut State| {
            for (id, lease) in state.leases.drain() {
                lease.changed.notify_waiters();
                if let Some(mps) = self.mps() {
                    mps.leave(&id);
                }
            }
            for (id, worker) in &mut state.workers {
                stop(id, worker, reason);
            }
        };
        self.until_none(end).await;
        if let Some(mps) = self.mps() {
            mps.close().await;
        }
    }

    /// Kills every worker, including those that could outlive this server.
    ///
    /// Waits a moment for their ends, so that accounting records them.
    pub async fn kill_all(&self) {
        let kill = |state: &mut State| {
            for worker in state.workers.values_mut() {
                worker.phase = Phase::Ending;
                worker.ended_because.get_or_insert_with(|| "the server was forced to quit".into());
                worker.pid.into_iter().for_each(end_group);
            }
        };
        let _ = timeout(KILL_TIMEOUT, self.until_none(kill)).await;
    }

    /// Leaves every worker to the next server and starts no more.
    ///
    /// Queued messages are sent first. Workers outside the store are stopped.
    pub async fn hand_over(&self) {
        let mut told = false;
        let left = self.until_none(|state| {
            if std::mem::replace(&mut told, true) {
                return;
            }
            for (id, worker) in &mut state.workers {
                match worker.kept {
                    Some(_) => drop(worker.orders.tells.send(Command::Leave)),
                    None => stop(id, worker, "the server is restarting"),
                }
            }
        });
        if timeout(LEAVE_TIMEOUT, left).await.is_err() {
            debug!("handover: some workers did not read their queued messages in time; leaving them");
        }
        if let Some(mps) = self.mps() {
            mps.close().await;
        }
        self.0.accounting.flush();
        self.0.store.settle();
    }

    fn refill(&self, lease: &str) {
        let mut state = self.state();
        let mine = state.workers.values().filter(|w| w.lease == lease && w.phase != Phase::Ending).count();
        let n = match state.leases.get_mut(lease) {
            Some(entry) if mine < MAX_PER_LEASE && !entry.away => entry.stock.start(self.0.clock.now()),
            _ => 0,
        };
        for _ in 0..n {
            self.launch(&mut state, lease, Vec::new(), true);
        }
    }

    /// Starts a worker's task; `None` if the lease is gone or the server is closing.
    fn launch(
        &self,
        state: &mut State,
        lease: &str,
        environment: Vec<(String, String)>,
        stocked: bool,
    ) -> Option<WorkerId> {
        let id: WorkerId = clock::bytes(self.0.random.as_ref());
        if state.closing {
            return None;
        }
        let entry = state.leases.get(lease)?;
        let options = &self.0.options;
        let cache = options.cache.as_ref().and_then(|cache| cache.images(&entry.lease.client));
        let start = Start {
            worker: id,
            lease: lease.into(),
            ticket_key: entry.lease.ticket_key,
            driver: options.driver.display().to_string(),
            devices: entry.ledger.devices().to_vec(),
            require_tls: entry.lease.encrypted,
            module_cache: cache.as_ref().map(|(folder, _)| folder.display().to_string()),
            module_cache_bytes: cache.map_or(0, |(_, bytes)| bytes),
            // Under MPS a context takes one of the server's places.
            warm: !entry.lease.mps,
            mps: entry.lease.mps,
            resume_grace_s: options.resume_grace.as_secs() as u32,
            staging_bytes: staging(&entry.limits),
            isolation: state.trial.next(options.isolation),
        };
        let (orders, queues) = orders();
        let book = Book {
            id,
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
            lanes: 0,
            fingerprint: None,
            usage: Usage::default(),
            used_at: self.0.clock.now(),
            busy: Duration::ZERO,
            admitted_unix: 0,
            user: entry.lease.user.clone(),
            active: self.0.clock.now(),
            wanted: false,
            moving: false,
            isolation: if start.isolation == Isolation::Off { "off" } else { LATER }.into(),
            since: self.0.clock.now(),
            ended_because: None,
            held: Vec::new(),
        };
        let trial = (options.isolation == Isolation::Try && start.warm && environment.is_empty())
            .then_some(start.isolation != Isolation::Off);
        state.workers.insert(
            id,
            Worker {
                book,
                kept: None,
                seat: None,
                pausing: None,
                unadmitted: Unadmitted::default(),
                trial,
                presented: false,
                orders,
            },
        );
        self.attend_to(id, Origin::New(Box::new(start), environment), queues);
        Some(id)
    }

    fn attend_to(&self, id: WorkerId, origin: Origin, queues: Queues) {
        let this = self.clone();
        tokio::spawn(async move {
            let attending = {
                let this = this.clone();
                async move { this.run(&id, origin, queues).await }
            };
            // A task of its own, so that the worker leaves the books even if the task panics.
            match tokio::spawn(attending).await {
                Ok(Some(end)) => this.gone(&id, end),
                Ok(None) => this.leave(&id),
                Err(e) => {
                    let pid = this.state().workers.get(&id).and_then(|w| w.pid);
                    end_group(pid.unwrap_or_default());
                    this.suspect(&id);
                    this.gone(&id, format!("internal error: {e}"));
                }
            }
        });
    }

    /// Runs a worker from its start to its end. Returns how it ended; `None`: the next server
    /// attends to it.
    async fn run(&self, id: &WorkerId, origin: Origin, mut queues: Queues) -> Option<String> {
        let begun = match origin {
            Origin::New(start, environment) => {
                let begun = self.begin(id, &start, environment).await;
                begun.map(|(process, fd)| (process, fd, Some(*start)))
            }
            Origin::Left { pid, pidfd, channel } => Process::left(pid, pidfd)
                .map(|process| (process, channel, None))
                .map_err(|e| format!("its process cannot be watched: {e}")),
        };
        let (mut process, fd, start) = match begun {
            Ok(begun) => begun,
            Err(reason) => return Some(reason),
        };
        let mut ending = Ending::default();
        let end = match Channel::new(fd) {
            Ok(channel) => self.attend(id, start, &mut process, &channel, &mut queues, &mut ending).await,
            Err(e) => Err(format!("its channel cannot be used: {e}")),
        };
        let end = match end {
            Ok(End::Left) => return None,
            Ok(End::Ended(status)) => describe(status),
            Err(reason) => {
                let by = ending.begins(mps::END_TIMEOUT);
                if !ending.work_ended {
                    self.end_gpu_work(id, false, by).await;
                }
                process.kill();
                self.reaped(id, &mut process).await;
                reason
            }
        };
        // Kills other processes that are left in its group.
        process.kill();
        Some(end)
    }

    /// Starts the process of a worker.
    async fn begin(
        &self,
        id: &WorkerId,
        start: &Start,
        environment: Vec<(String, String)>,
    ) -> Result<(Process, OwnedFd), String> {
        let program = &self.0.options.program;
        let mut variables = spawn::clean_environment(&self.0.options.driver);
        // The driver shows the worker its lease's GPUs only, in the lease's order.
        let (gpus, client) = {
            let state = self.state();
            let worker = state.workers.get(id).ok_or("it was stopped before it started")?;
            (worker.gpus.join(","), worker.client.clone())
        };
        variables.push(("CUDA_VISIBLE_DEVICES".into(), gpus.into()));
        match self.0.options.cache.as_ref().and_then(|cache| cache.compiled(&client)) {
            Some(folder) => variables.push(("CUDA_CACHE_PATH".into(), folder.into())),
            None => variables.push(("CUDA_CACHE_DISABLE".into(), "1".into())),
        }
        let (own, environment): (Vec<_>, Vec<_>) =
            environment.into_iter().partition(|(name, _)| MPS_VARIABLES.contains(&name.as_str()));
        if start.mps {
            variables.extend(self.sit_down(id, start, &own).await?);
        }
        variables.extend(environment.into_iter().map(|(k, v)| (k.into(), v.into())));
        let failed = |e: io::Error| format!("{} cannot be started: {e}", program.display());
        // The MPS daemon exits with this server, and so do the workers that it serves.
        let outlives = self.0.store.exists() && !start.mps;
        let (child, fd) = self.0.spawner.start(program, variables, outlives).await.map_err(failed)?;
        let pid = child.id().unwrap_or_default();
        let process = Process::started(child).inspect_err(|_| end_group(pid)).map_err(failed)?;
        let mut state = self.state();
        let closing = state.closing;
        if let Some(worker) = state.workers.get_mut(id) {
            worker.pid = Some(pid);
            if outlives && !closing {
                worker.kept = self.0.store.keep(fd.as_fd(), process.pidfd());
            }
            worker.remember(None);
        }
        Ok((process, fd))
    }

    /// Waits for a killed process to exit. If it does not, the driver holds it: its GPUs are stuck.
    async fn reaped(&self, id: &WorkerId, process: &mut Process) {
        if timeout(REAP_TIMEOUT, process.wait()).await.is_ok() {
            return;
        }
        self.stuck(id);
        let _ = process.wait().await;
    }

    /// Reports the GPUs of a killed worker that does not exit.
    fn stuck(&self, id: &WorkerId) {
        let (gpus, pid) = match self.state().workers.get(id) {
            Some(worker) => (worker.gpus.clone(), worker.pid.unwrap_or(0)),
            None => return,
        };
        let why = format!("process {pid} of a worker was killed and does not exit: it waits for the driver");
        let _ = self.0.events.send(Event::Stuck { gpus, why });
    }

    /// Attends to a worker until it exits or this server leaves it. `start` is `None` for a worker
    /// of an earlier server.
    async fn attend(
        &self,
        id: &WorkerId,
        start: Option<Start>,
        process: &mut Process,
        channel: &Channel,
        queues: &mut Queues,
        ending: &mut Ending,
    ) -> Result<End, String> {
        let Queues { commands, tells, ends } = queues;
        // Does not wait for a stopping worker to read its channel.
        async fn send(
            channel: &Channel,
            message: &ToWorker,
            beside: Option<BorrowedFd<'_>>,
            ends: &mut watch::Receiver<Option<String>>,
            told: bool,
            deadline: Instant,
        ) -> Result<(), String> {
            tokio::select! {
                biased;
                sent = timeout(SEND_TIMEOUT, channel.send(message, beside)) => match sent {
                    // It exited; its final messages or its exit status tell more.
                    Ok(Err(e)) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
                    Ok(sent) => sent.map_err(|e| format!("its channel failed: {e}")),
                    Err(_) => Err("it does not read its channel".into()),
                },
                _ = told_to_end(ends), if !told => Ok(()),
                () = sleep_until(deadline) => Ok(()),
            }
        }
        // If the worker has exited already, its exit status is reported, not its closed channel.
        let mut limit = None;
        // A worker under MPS does not outlive its server, so an earlier server left none.
        let mps = start.as_ref().is_some_and(|start| start.mps);
        if let Some(start) = start {
            let by = Instant::now() + START_TIMEOUT;
            let _ = send(channel, &ToWorker::Start(start), None, ends, false, by).await;
            limit = Some((by, "it was not ready in time"));
        }
        let (mut channel_open, mut killed, mut told, mut said_end) = (true, false, false, false);
        // Time that it has to exit by itself.
        let (grace, in_all) = if mps { (MPS_STOP_GRACE, mps::END_TIMEOUT) } else { (STOP_GRACE, STOP_GRACE) };
        let sooner =
            |limit: Option<(Instant, &str)>, at| Some((limit.map_or(at, |(before, _)| before.min(at)), ""));
        let (mut second, mut packets, mut memory_packets) = (Instant::now(), 0, 0);
        // Set if it asked for memory too often: its messages wait for the next second.
        let mut patience = false;
        loop {
            let deadline = limit.map_or_else(|| Instant::now() + Duration::from_secs(86400), |(at, _)| at);
            tokio::select! {
                biased;
                status = process.wait() => {
                    // A final message tells more than the exit status.
                    let by = Instant::now() + FINAL_MESSAGES_GRACE;
                    while channel_open
                        && Instant::now() < by
                        && let Ok(Ok(Some(message))) = timeout(Duration::from_millis(10), channel.recv()).await
                    {
                        said_end |= matches!(message, FromWorker::Ended { .. });
                        self.heard(id, message);
                    }
                    if !killed && !said_end {
                        self.suspect(id);
                    }
                    return status.map(End::Ended).map_err(|e| e.to_string());
                }
                () = sleep_until(deadline), if limit.is_some() => {
                    let (_, why) = limit.take().unwrap_or((deadline, ""));
                    if !why.is_empty() {
                        return Err(why.into());
                    }
                    if std::mem::replace(&mut killed, true) {
                        self.stuck(id);
                    } else {
                        debug!(pid = process.pid(), "worker {}: did not exit in time; killed", hex(id));
                        let by = ending.begins(in_all);
                        if !std::mem::replace(&mut ending.work_ended, true) {
                            self.end_gpu_work(id, false, by).await;
                        }
                        process.kill();
                        limit = Some((Instant::now() + REAP_TIMEOUT, ""));
                    }
                }
                reason = told_to_end(ends), if !told => {
                    told = true;
                    ending.begins(in_all);
                    let at = Instant::now() + grace;
                    if !killed {
                        limit = sooner(limit, at);
                    }
                    let _ = timeout_at(at, channel.send(&ToWorker::Stop { reason }, None)).await;
                }
                Some(command) = tells.recv() => match command {
                    Command::Tell(message) => send(channel, &message, None, ends, told, deadline).await?,
                    Command::Leave => {
                        while let Ok(Command::Adopt { socket, number, preface, peer }) = commands.try_recv() {
                            let message = adopt(number, preface, peer);
                            send(channel, &message, Some(socket.as_fd()), ends, told, deadline).await?;
                        }
                        return Ok(End::Left);
                    }
                    Command::Adopt { .. } => {}
                },
                () = sleep_until(second + Duration::from_secs(1)), if patience => patience = false,
                Some(command) = commands.recv() => {
                    if let Command::Adopt { socket, number, preface, peer } = command {
                        let message = adopt(number, preface, peer);
                        send(channel, &message, Some(socket.as_fd()), ends, told, deadline).await?;
                    }
                }
                // Last, so that a worker that sends much delays nothing above.
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
                        if let FromWorker::Contained { lacking } = &message
                            && !self.state().workers.get(id).is_none_or(|w| w.may_be_contained(lacking))
                        {
                            return Err("it reported its isolation out of turn".into());
                        }
                        if matches!(message, FromWorker::Ready { .. })
                            && limit.is_some_and(|(_, why)| !why.is_empty()) {
                            limit = None;
                        }
                        let ended = match message {
                            FromWorker::Ended { quiet, .. } if mps && !std::mem::replace(&mut said_end, true) => Some(quiet),
                            _ => None,
                        };
                        self.heard(id, message);
                        if let Some(quiet) = ended
                            && !std::mem::replace(&mut ending.work_ended, true)
                        {
                            let by = ending.begins(in_all);
                            self.end_gpu_work(id, quiet, by).await;
                            let _ = timeout_at(by, channel.send(&ToWorker::Exit, None)).await;
                            if !killed {
                                limit = Some((by, ""));
                            }
                        }
                    }
                    // It is about to exit, or it closed its channel to evade a stop request.
                    Ok(None) => {
                        channel_open = false;
                        ending.begins(in_all);
                        if !killed {
                            limit = sooner(limit, Instant::now() + grace);
                        }
                    }
                    Err(e) if e.raw_os_error().is_some() => {
                        channel_open = false;
                        ending.begins(in_all);
                        if !killed {
                            limit = sooner(limit, Instant::now() + grace);
                        }
                    }
                    Err(e) => return Err(e.to_string()),
                },
            }
        }
    }

    fn heard(&self, id: &WorkerId, message: FromWorker) {
        let mut state = self.state();
        self.hear(&mut state, id, message);
        state.remember(id);
    }

    fn hear(&self, state: &mut State, id: &WorkerId, message: FromWorker) {
        let State { workers, leases, trial, .. } = state;
        let Some(worker) = workers.get_mut(id) else { return };
        let mut lease = leases.get_mut(&worker.lease);
        let now = self.0.clock.now();
        match message {
            FromWorker::MemoryWanted { device, serial, bytes } => {
                let says = match lease {
                    Some(ref mut lease) => lease.ledger.ask(*id, device, serial, bytes, now),
                    None => vec![Say::Granted { worker: *id, device, serial, bytes: 0, left: 0 }],
                };
                say(workers, lease.map(|l| &l.ledger), says);
            }
            FromWorker::StagingFull { bytes } => {
                let limit = lease.as_ref().and_then(|l| l.limits.smallest("staging"));
                if let Some((limit, _)) = limit
                    && let Some(more) = self.0.refusals.may()
                {
                    let why =
                        format!("a program asked for {} MiB of mapped host memory", bytes.div_ceil(1 << 20));
                    let exceeded = limit.exceeded(why, "the program got an out-of-memory error");
                    exceeds(id, worker, &exceeded, more);
                }
            }
            FromWorker::MemoryReturned { device, bytes } => {
                if let Some(lease) = lease {
                    let before = lease.ledger.contexts_left();
                    let says = lease.ledger.returned(id, device, bytes);
                    say(workers, Some(&lease.ledger), says);
                    if lease.ledger.contexts_left() > before {
                        lease.changed.notify_waiters();
                    }
                }
            }
            FromWorker::Ready { fingerprint, cuda_version } => {
                if worker.phase != Phase::Starting {
                    return;
                }
                worker.phase = Phase::Warm;
                worker.fingerprint = Some(fingerprint);
                if let Some(isolated) = worker.trial
                    && let Some(reason) = trial.ready(isolated)
                {
                    warn!(
                        "isolation: workers cannot start isolated on this host: {reason}; continuing without, because isolation = \"try\""
                    );
                }
                debug!(
                    gpusession_worker = hex(id),
                    gpusession_lease = worker.lease,
                    cuda_version,
                    "worker {}: ready",
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
            FromWorker::Ended { reason, .. } if worker.seat.is_some() && worker.presented => {
                // It waits until MPS has ended its GPU work.
                worker.phase = Phase::Ending;
                worker.ended_because.get_or_insert(printable(&reason));
            }
            FromWorker::Failed { reason } | FromWorker::Ended { reason, .. } => {
                worker.ended_because.get_or_insert(printable(&reason));
            }
            FromWorker::Presented(process) => self.presented(state, *id, process),
            FromWorker::Admitted { number, lane } => {
                worker.unadmitted.admitted(number);
                worker.lanes |= 1u64.checked_shl(lane.into()).unwrap_or(0);
            }
            FromWorker::Refused { number, reason } => {
                worker.unadmitted.refused(number);
                if let Some(more) = self.0.refusals.may() {
                    warn!(
                        gpusession_worker = hex(id),
                        gpusession_lease = worker.lease,
                        gpusession_client = worker.client,
                        "worker {}: refused a connection: {}{more}",
                        hex(id),
                        printable(&reason)
                    );
                }
            }
            FromWorker::Usage(usage) => {
                let passed = now.saturating_sub(worker.used_at);
                worker.busy += worked(passed, Duration::from_micros(usage.idle_usec));
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
            FromWorker::Contained { lacking } if worker.may_be_contained(&lacking) => {
                let lacking: Vec<_> = lacking.iter().map(|l| printable(l)).collect();
                if !lacking.is_empty() && !state.isolation_told {
                    state.isolation_told = true;
                    warn!(
                        "isolation: incomplete on this host: {}; workers run without these measures",
                        lacking.join("; ")
                    );
                }
                if let Some(worker) = state.workers.get_mut(id) {
                    worker.isolation = if lacking.is_empty() { "full".into() } else { lacking.join("; ") };
                }
            }
            // A late report, sent while the worker exits.
            FromWorker::Contained { .. } => {}
            FromWorker::Wanted => {
                worker.wanted = true;
                self.0.wants.notify_one();
            }
        }
    }

    /// Removes a worker to which the next server attends.
    fn leave(&self, id: &WorkerId) {
        let mut state = self.state();
        state.workers.remove(id);
        if state.workers.is_empty() {
            self.0.empty.notify_waiters();
        }
    }

    /// Returns the accounting record of a worker's program up to now.
    fn record(&self, worker: &Book, peak_memory_bytes: u64) -> Option<Record> {
        let process = worker.process.as_ref()?;
        Some(Record {
            kind: Kind::Process,
            lease: worker.lease.clone(),
            worker: hex(&worker.id),
            client: worker.client.clone(),
            user: worker.user().into(),
            uid: process.uid,
            pid: process.pid,
            program: process.program.clone(),
            executable: process.executable.clone(),
            gpus: worker.gpus.clone(),
            start_unix: worker.admitted_unix,
            end_unix: self.0.clock.unix(),
            gpu_busy_usec: u64::try_from(worker.busy.as_micros()).unwrap_or(u64::MAX),
            peak_memory_bytes,
            bytes_to_device: worker.usage.bytes_to_device,
            bytes_from_device: worker.usage.bytes_from_device,
            calls: worker.usage.calls,
            reason: String::new(),
            uids: Vec::new(),
            users: Vec::new(),
        })
    }

    /// Notes a running program for accounting, in case this server does not see its end.
    fn note(&self, worker: &Book, lease: Option<&LeaseState>) {
        let peak = lease.map_or(worker.usage.memory_bytes, |lease| lease.ledger.peak(&worker.id));
        if let Some(record) = self.record(worker, peak) {
            self.0.accounting.note(record);
        }
    }

    fn gone(&self, id: &WorkerId, end: String) {
        let mut state = self.state();
        let Some(Worker { book: worker, kept, trial, .. }) = state.workers.remove(id) else { return };
        if let Some(kept) = kept {
            self.0.store.forget(kept);
        }
        let peak_memory_bytes = {
            let State { workers, leases, .. } = &mut *state;
            leases.get_mut(&worker.lease).map_or(worker.usage.memory_bytes, |lease| {
                let peak = lease.ledger.peak(id);
                let says = lease.ledger.gone(id);
                say(workers, Some(&lease.ledger), says);
                peak
            })
        };
        let told = worker.phase == Phase::Ending;
        let early = matches!(worker.phase, Phase::Starting | Phase::Warm);
        let reason = match worker.ended_because.clone() {
            Some(reason) if told => reason,
            Some(reason) => format!("{reason} ({end})"),
            None => end,
        };
        if let Some(isolated) =
            trial.filter(|_| worker.phase == Phase::Starting && !told && worker.pid.is_some())
        {
            state.trial.failed(isolated, &reason);
        }
        let (worker_id, lease_id) = (hex(id), worker.lease.clone());
        if let Some(pid) = worker.pid {
            let ended = (pid, worker.gpus.clone(), self.0.clock.now());
            state.ended.push(ended);
        }
        if let Some(record) = self.record(&worker, peak_memory_bytes) {
            self.0.accounting.add(Record { reason: reason.clone(), ..record });
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
                "worker {worker_id} of lease {lease_id}: exited before use: {reason}; starting the next one in {} ms",
                pause.as_millis()
            ),
            None => info!(
                gpusession_worker = worker_id,
                gpusession_lease = lease_id,
                "worker {worker_id} of lease {lease_id}: ended: {reason}"
            ),
        }
        self.refill(&lease_id);
    }
}

/// Takes a caller out of the count of waiting callers, however its wait ends.
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

/// Stops a cold worker when its caller no longer waits.
struct Abandoned<'a> {
    supervisor: &'a Supervisor,
    id: WorkerId,
    kept: bool,
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.supervisor.end_worker(&self.id, None, "no program waits for it any longer");
        }
    }
}

fn adopt(number: u64, preface: Vec<u8>, peer: SocketAddr) -> ToWorker {
    ToWorker::Adopt { number, preface, peer: peer.to_string() }
}

/// Creates a lease's ledger. Shares supply the memory of whole cards, for which workers have no
/// limit.
fn ledger(lease: &Lease, devices: Vec<DeviceLimit>) -> Ledger {
    let share = |uuid: &[u8; 16]| lease.shares.iter().find(|s| uuid_bytes(&s.gpu).as_ref() == Some(uuid));
    Ledger::new(devices).of_cards(|uuid| share(uuid).map(|s| s.limit_bytes))
}

/// Sends a ledger's messages to workers. A grant is written to the store before it is sent.
fn say(workers: &mut HashMap<WorkerId, Worker>, ledger: Option<&Ledger>, says: Vec<Say>) {
    for say in says {
        let (worker, message) = match say {
            Say::Granted { worker, device, serial, bytes, left } => {
                (worker, ToWorker::MemoryGranted { device, serial, bytes, left })
            }
            Say::Recall { worker } => (worker, ToWorker::MemoryRecall),
        };
        if let Some(worker) = workers.get_mut(&worker) {
            worker.remember(ledger);
            let _ = worker.orders.tells.send(Command::Tell(message));
        }
    }
}

/// Returns the most mapped host memory of which a worker may keep copies, in bytes.
fn staging(limits: &Effective) -> u64 {
    limits.smallest("staging").map_or(u64::MAX, |(_, bytes)| bytes)
}

fn take_one(worker: &mut Worker) -> Option<Taken> {
    if worker.phase != Phase::Warm {
        return None;
    }
    worker.phase = Phase::Taken;
    worker.given = true;
    worker.remember(None);
    worker.fingerprint.map(|fingerprint| Taken { id: worker.id, fingerprint })
}

fn stop(id: &WorkerId, worker: &mut Worker, reason: &str) {
    if worker.phase == Phase::Ending {
        return;
    }
    debug!(gpusession_worker = hex(id), "worker {}: stopping: {reason}", hex(id));
    worker.phase = Phase::Ending;
    worker.ended_because = Some(reason.into());
    worker.remember(None);
    worker.orders.end.send_replace(Some(reason.into()));
}

fn describe(status: Option<ExitStatus>) -> String {
    use std::os::unix::process::ExitStatusExt;
    let Some(status) = status else { return "it exited".into() };
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(signal) => format!("killed by {}", signal.as_str()),
            Err(_) => format!("killed by signal {signal}"),
        },
        (None, None) => status.to_string(),
    }
}

/// Returns the GPU time of a report. It came `passed` after the previous one, and work ended `idle`
/// ago.
fn worked(passed: Duration, idle: Duration) -> Duration {
    // An idle worker sends no reports, so that only the end of a longer interval was work. A slow
    // host may delay reports by some seconds.
    let seen = if passed < REPORT_INTERVAL * 5 { passed } else { REPORT_INTERVAL };
    seen.saturating_sub(idle)
}

/// Cuts and cleans text of a worker for a log or a terminal.
fn printable(text: &str) -> String {
    text.chars().take(200).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Formats a worker's id for people.
pub fn hex(id: &WorkerId) -> String {
    data_encoding::HEXLOWER.encode(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_between_reports_are_not_gpu_work() {
        let ms = Duration::from_millis;
        assert_eq!(worked(ms(1010), ms(10)), ms(1000), "it goes on");
        assert_eq!(worked(ms(1010), ms(700)), ms(310), "it has ended");
        assert_eq!(worked(ms(2100), ms(100)), ms(2000), "two reports came together");
        assert_eq!(worked(ms(3_600_000), ms(400)), ms(600), "one second of an hour");
        assert_eq!(worked(ms(1010), ms(5000)), ms(0), "the rest goes on");
    }
}
