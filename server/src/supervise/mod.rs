//! Worker processes: started warm for each lease, handed to one client process each, ended in time.
//!
//! A worker is presumed controlled by its client. Nothing that it says gives it rights; it is ended by its process
//! group, and the kernel takes its device memory back with it. Where there is a descriptor store ([`keep`]), it outlives the server.

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

/// A worker that does not end within this after it was told to is killed. What it had is free again soon enough after that.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// The same of a worker under MPS. MPS has the rest of its time, see `mps::END_LIMIT`.
const STOP_GRACE_MPS: Duration = Duration::from_millis(750);
/// A worker that is not ready by then has failed. Drivers of many GPUs without persistence take tens of seconds.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How long a call waits for a worker to get ready.
const TAKE_LIMIT: Duration = Duration::from_secs(60);
/// How long a program waits for room that others of its lease make.
const ROOM_LIMIT: Duration = Duration::from_secs(1);
/// A worker that does not read its channel for so long is stuck.
const SEND_LIMIT: Duration = Duration::from_secs(2);
/// How long a server that is forced to quit waits for those that it has killed.
const KILL_LIMIT: Duration = Duration::from_millis(500);
/// A process that was killed and is still there after this sits in the driver.
const REAP_LIMIT: Duration = Duration::from_secs(10);
/// How long the last words of a worker are listened to: whatever it left behind in its group may go on speaking.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// How often a worker reports while its client's GPU work goes on.
const REPORT: Duration = Duration::from_secs(1);
/// How often accounting notes the programs that run, in seconds.
const NOTED_EVERY: u64 = 60;
/// Workers of one lease.
const MAX_PER_LEASE: usize = 64;
/// Packets that a worker may send in a second. Those that ask for memory are not answered faster.
const MAX_PACKETS: u32 = 1000;
const MAX_MEMORY_PACKETS: u32 = 20_000;
/// What a worker says of its isolation: so many parts are lacking, each told in so many bytes.
const MAX_LACKING: usize = 8;
const MAX_LACKING_BYTES: usize = 512;
/// Before a worker has said so.
const LATER: &str = "later";
/// How long workers may take to get what was meant for them before this server leaves them.
const LEAVE_LIMIT: Duration = Duration::from_secs(5);
/// Handed-over sockets that wait for one worker.
const MAX_QUEUED: usize = 64;

/// Variables of the CUDA driver that a client process may set for its worker. What else a program sets acts on its own
/// side of the wire.
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

/// How workers of this server are started.
#[derive(Debug, Clone)]
pub struct Options {
    /// The worker's program.
    pub program: PathBuf,
    /// The driver library that it loads.
    pub driver: PathBuf,
    /// What workers keep on disk, if they do.
    pub cache: Option<Cache>,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
    /// On whose behalf; empty: the client's own.
    pub user: String,
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
    /// How much of it the worker was never granted: code, stacks, the driver's own.
    pub unasked_bytes: u64,
    /// Time in which its GPU work or copies went on, to the second.
    pub busy: Duration,
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
    /// Contexts are memory of the lease.
    #[error(
        "the lease's GPU memory has no room for the context of another program; end one that uses the GPU, or ask for a larger \
         lease"
    )]
    Memory,
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
    Adopt {
        number: u64,
        socket: std::net::TcpStream,
        preface: Vec<u8>,
        peer: SocketAddr,
    },
    Tell(ToWorker),
    /// Send what waits to be sent; the next server goes on.
    Leave,
}

/// What is known of a worker, and what the next server has to know.
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
    /// When it said so last, and the time in which its GPUs were at work.
    used_at: Moment,
    busy: Duration,
    admitted_unix: u64,
    user: String,
    /// When its client's GPU work was last seen.
    active: Moment,
    /// Its client wants something of it though it is paused.
    wanted: bool,
    /// Its device memory is on its way.
    moving: bool,
    isolation: String,
    since: Moment,
    ended_because: Option<String>,
    /// As [`Ledger::held`] says it.
    held: Vec<([u8; 16], u64, u64)>,
}

struct Worker {
    book: Book,
    /// `None`: it ends with this server.
    kept: Option<Kept>,
    /// Its place in an MPS domain.
    seat: Option<Arc<Seat>>,
    pausing: Option<oneshot::Sender<bool>>,
    /// Connections that it has not decided on.
    unadmitted: Unadmitted,
    /// Whether it is isolated, if its start shows whether isolation works here: not where a client's own variables may be what fails,
    /// nor under MPS, where it loads its driver later.
    trial: Option<bool>,
    /// A process has shown it a ticket: it has contexts on its GPUs.
    presented: bool,
    orders: Orders,
}

/// A worker is what is known of it, with the means to reach it.
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

/// Tells the journal that a worker's program is beyond a limit; `more`: how often that was not told.
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
    /// Whose program it serves, as far as that is known: a lease of a whole machine is nobody's own.
    fn user(&self) -> &str {
        if self.user.is_empty() { self.process.as_ref().map_or("", |p| &p.user) } else { &self.user }
    }

    /// Whether it may say how isolated it is: once, before it serves a program that could make it say so.
    fn may_be_contained(&self, lacking: &[String]) -> bool {
        self.isolation == LATER
            && self.process.is_none()
            && lacking.len() <= MAX_LACKING
            && lacking.iter().all(|l| l.len() <= MAX_LACKING_BYTES)
    }

    /// Whether it starts for its lease's stock.
    fn starts(&self) -> bool {
        self.phase == Phase::Starting && self.stocked
    }

    /// Whether it serves a program, or is about to.
    fn serves(&self) -> bool {
        matches!(self.phase, Phase::Taken | Phase::Active | Phase::Parked)
    }

    /// Whether it is started for one program, which waits for it.
    fn is_for_one(&self) -> bool {
        matches!(self.phase, Phase::Starting | Phase::Warm) && !self.stocked
    }
}

impl Worker {
    /// Lets the next server know.
    fn remember(&mut self, ledger: Option<&Ledger>) {
        if let Some(ledger) = ledger {
            self.book.held = ledger.held(&self.book.id);
        }
        if let Some(kept) = &self.kept {
            kept.write(&self.book);
        }
    }
}

/// What reaches the task of a worker.
struct Orders {
    /// Connections, of which there may be too many.
    commands: mpsc::Sender<Command>,
    tells: mpsc::UnboundedSender<Command>,
    /// Why the worker is to end, which waits behind nothing else.
    end: watch::Sender<Option<String>>,
}

/// What the task of a worker listens to.
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

/// Waits until a worker is told to end; why.
async fn told_to_end(ends: &mut watch::Receiver<Option<String>>) -> String {
    let reason = ends.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
    match reason {
        Some(reason) => reason,
        None => std::future::pending().await,
    }
}

/// The end of a worker has begun: nothing that it says, or does not read, makes that longer.
#[derive(Default)]
struct Ending {
    gone_by: Option<Instant>,
    /// Under MPS, that of its GPU work.
    work_ended: bool,
}

impl Ending {
    fn begins(&mut self, takes: Duration) -> Instant {
        *self.gone_by.get_or_insert_with(|| Instant::now() + takes)
    }
}

/// Where a worker comes from.
enum Origin {
    /// It is to be started with these variables beside the server's own.
    New(Box<Start>, Vec<(String, String)>),
    /// An earlier server left it.
    Left { pid: u32, pidfd: OwnedFd, channel: OwnedFd },
}

/// How the attention to a worker ended.
enum End {
    /// It has ended; how is known of children only.
    Ended(Option<ExitStatus>),
    /// The next server attends to it.
    Left,
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
    /// When its programs were last asked for memory that they do not use.
    recalled: Option<Moment>,
}

#[derive(Default)]
struct State {
    workers: HashMap<WorkerId, Worker>,
    limits: Limits,
    leases: HashMap<String, LeaseState>,
    /// Workers of an earlier server whose leases are not there yet.
    left: Vec<LeftWorker>,
    /// Processes of workers that have ended a moment ago, their GPUs, and when.
    ended: Vec<(u32, Vec<String>, Moment)>,
    closing: bool,
    isolation_told: bool,
    trial: Trial,
    /// When programs that run were noted for accounting, in minutes.
    noted: u64,
}

impl State {
    fn remember(&mut self, id: &WorkerId) {
        if let Some(worker) = self.workers.get_mut(id) {
            let ledger = self.leases.get(&worker.book.lease).map(|l| &l.ledger);
            worker.remember(ledger);
        }
    }

    /// Whether a limit of a client and a user leaves room for `more`; what room there is beside the refusal.
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
    /// A supervisor of workers that are kept in a store; needs a runtime. Those that an earlier server left there are taken up
    /// with their leases.
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

    /// Begins to keep a stock for a lease, and takes up workers that an earlier server left of it.
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

    /// Ends what an earlier server left of leases that are no more.
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
            "worker {} (process {pid}, {}) of lease {} is taken up",
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
            _ if lease.is_none() => stop(&id, &mut worker, "its lease is over"),
            // Those that serve nobody are replaced by ones of this server's version and configuration.
            Phase::Starting | Phase::Warm => stop(&id, &mut worker, "the server was restarted"),
            _ if worker.moving => {
                stop(&id, &mut worker, "the server ended while the device memory was on its way");
            }
            // It may have been paused, in order to be parked.
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

    /// The limits of all clients and users, by which programs and connections are counted.
    pub fn set_all_limits(&self, limits: Limits) {
        self.state().limits = limits;
    }

    /// Other limits hold for a lease's new work from now on. Those that a ready worker was started with are not its own: another one
    /// takes its place.
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
            stop(id, worker, "the limit staging has changed");
        }
        drop(state);
        self.refill(lease);
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
        let (lease, starts, ends) = (worker.lease.clone(), worker.starts(), worker.phase == Phase::Ending);
        stop(id, worker, reason);
        if let Some(entry) = state.leases.get_mut(&lease).filter(|_| !ends) {
            entry.stock.leave(id, starts);
        }
        drop(state);
        self.refill(&lease);
        true
    }

    /// Ends the workers of a lease that were taken and serve nobody yet, but for those that are still wanted.
    pub fn end_unclaimed(&self, lease: &str, wanted: &[Vec<u8>]) {
        let unclaimed: Vec<WorkerId> = {
            let state = self.state();
            let taken = state.workers.iter().filter(|(_, w)| w.lease == lease && w.phase == Phase::Taken);
            taken.map(|(id, _)| *id).filter(|id| !wanted.iter().any(|w| w == id)).collect()
        };
        for id in unclaimed {
            self.end_worker(&id, Some(lease), "its client's daemon started anew and does not know it");
        }
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
        let mut environment = environment;
        if !self.state().leases.get(lease).is_some_and(|l| l.lease.mps) {
            // Without MPS they mean nothing, as on a local card.
            environment.retain(|(name, _)| !MPS_VARIABLES.contains(&name.as_str()));
        }
        if let Some((bad, _)) = environment.iter().find(|(name, value)| {
            !DRIVER_ENVIRONMENT.iter().chain(MPS_VARIABLES).any(|n| n == name)
                || value.contains('\0')
                || value.len() > 256
        }) {
            return Err(TakeError::Environment(bad.clone()));
        }
        let deadline = Instant::now() + TAKE_LIMIT;
        if !environment.is_empty() {
            return self.take_cold(client, lease, environment, deadline).await;
        }
        let mut waiting = Waiting { supervisor: self, lease, counted: false };
        loop {
            let changed = {
                let mut state = self.state();
                // Again each time: others of the client or user may have taken some meanwhile.
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

    /// As [`Supervisor::take`], for programs that wait: where there is no room for them, the lease's other programs are first
    /// asked for memory that they do not use, and those that are ending have a moment.
    pub async fn take_for_waiting(
        &self,
        client: &str,
        lease: &str,
        count: usize,
        environment: Vec<(String, String)>,
    ) -> Result<Vec<Taken>, TakeError> {
        let deadline = Instant::now() + ROOM_LIMIT;
        loop {
            // Registered before the look at what there is, so that no change is missed.
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

    /// Asks a lease's programs for memory that they do not use: once in a while, however many wait for it.
    fn recall(&self, lease: &str) {
        let now = self.0.clock.now();
        let mut state = self.state();
        let State { workers, leases, .. } = &mut *state;
        if let Some(lease) = leases.get_mut(lease)
            && lease.recalled.is_none_or(|at| now >= at + ROOM_LIMIT)
        {
            lease.recalled = Some(now);
            say(workers, Some(&lease.ledger), lease.ledger.recall());
        }
    }

    /// How many of `count` workers the lease's client and user may take now.
    /// Others' that start for one program count; `own`: the one that was started for this call.
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

    /// Those that were given out and serve nobody yet count, too.
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
            // It counts from here on, before anybody else asks.
            self.launch(&mut state, lease, environment, false).ok_or(TakeError::NoLease)?
        };
        let mut abandoned = Abandoned { supervisor: self, id, kept: false };
        loop {
            let changed = {
                let mut state = self.state();
                // Others may have taken the last place while it started.
                self.room(&state, client, lease, 1, Some(&id))?;
                let entry = state.leases.get(lease).ok_or(TakeError::NoLease)?;
                let mut changed = Box::pin(entry.changed.clone().notified_owned());
                changed.as_mut().enable();
                match state.workers.get_mut(&id) {
                    None => return Err(TakeError::NotStarting("it ended before it was ready".into())),
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
        // Whose program it is is known after the first one.
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

    /// What is due by time alone: pauses after failures that are over, stocks of idle leases.
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

    /// Whether this process may be one of the workers, or was one: who has ended is nobody that asks.
    pub fn may_be_worker(&self, pid: u32) -> bool {
        use std::os::unix::fs::MetadataExt;
        let file = |path: &Path| std::fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
        let runs = file(Path::new(&format!("/proc/{pid}/exe")));
        let program = || file(&self.0.options.program);
        // Last: one that ends leaves the books when it is no process any more.
        runs.is_some_and(|runs| program() == Some(runs))
            || self.state().workers.values().any(|w| w.pid == Some(pid))
            || process::is_gone(pid)
    }

    /// All workers.
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

    /// Programs that run, for people: all of them, or those that end with this server whatever follows.
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

    /// The leases that a stock is kept for.
    pub fn leases(&self) -> Vec<String> {
        self.state().leases.keys().cloned().collect()
    }

    /// The most device memory that a lease's programs had at a time.
    pub fn peak(&self, lease: &str) -> u64 {
        self.state().leases.get(lease).map_or(0, |l| l.ledger.peak_of_all())
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
                let bytes = read.map(|(.., bytes)| *bytes).fold(0, u64::saturating_add);
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
        // The driver lets a worker that has been taken over use any GPU of the host.
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
                    "worker {} has memory of {gpu}, which its lease does not have: ended",
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
                    "worker {} has {} MiB of device memory that it was never granted: ended",
                    hex(&id),
                    unasked >> 20
                );
                if let Some(lease) = leases.get_mut(&worker.lease) {
                    lease.stock.leave(&id, worker.starts());
                }
                stop(
                    &id,
                    worker,
                    "its lease is over its memory limit, and its process has the most that was never granted",
                );
            }
        }
    }

    /// Starts no worker any more, and does something to those that there are until the last one is gone.
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

    /// Ends every worker and starts none any more; returns when the last one is gone.
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

    /// Kills every worker, those too that would outlive this server. Waits a moment for their ends, which are accounted.
    pub async fn kill_all(&self) {
        let kill = |state: &mut State| {
            for worker in state.workers.values_mut() {
                worker.phase = Phase::Ending;
                worker.ended_because.get_or_insert_with(|| "the server was forced to quit".into());
                worker.pid.into_iter().for_each(end_group);
            }
        };
        let _ = timeout(KILL_LIMIT, self.until_none(kill)).await;
    }

    /// Leaves every worker to the next server and starts none any more. What was meant for them is sent; those that are not in
    /// the store end.
    pub async fn hand_over(&self) {
        let mut told = false;
        let left = self.until_none(|state| {
            if std::mem::replace(&mut told, true) {
                return;
            }
            for (id, worker) in &mut state.workers {
                match worker.kept {
                    Some(_) => drop(worker.orders.tells.send(Command::Leave)),
                    None => stop(id, worker, "the server is restarted"),
                }
            }
        });
        if timeout(LEAVE_LIMIT, left).await.is_err() {
            debug!("some workers did not take in time what was meant for them");
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

    /// Starts a worker's task; `None` where the lease is gone.
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
            // A task of its own: whatever happens in it, the worker is taken off the books.
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

    /// A worker from its start to its end. Returns how it ended, where it was not told to; `None`: it goes on without this server.
    async fn run(&self, id: &WorkerId, origin: Origin, mut queues: Queues) -> Option<String> {
        let begun = match origin {
            Origin::New(start, environment) => {
                let begun = self.begin(id, &start, environment).await;
                begun.map(|(process, fd)| (process, fd, Some(*start)))
            }
            Origin::Left { pid, pidfd, channel } => Process::left(pid, pidfd)
                .map(|process| (process, channel, None))
                .map_err(|e| format!("its process: {e}")),
        };
        let (mut process, fd, start) = match begun {
            Ok(begun) => begun,
            Err(reason) => return Some(reason),
        };
        let mut ending = Ending::default();
        let end = match Channel::new(fd) {
            Ok(channel) => self.attend(id, start, &mut process, &channel, &mut queues, &mut ending).await,
            Err(e) => Err(format!("its channel: {e}")),
        };
        let end = match end {
            Ok(End::Left) => return None,
            Ok(End::Ended(status)) => describe(status),
            Err(reason) => {
                let by = ending.begins(mps::END_LIMIT);
                if !ending.work_ended {
                    self.end_gpu_work(id, false, by).await;
                }
                process.kill();
                self.reaped(id, &mut process).await;
                reason
            }
        };
        // Whatever it left behind in its group.
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
            let worker = state.workers.get(id).ok_or("it was told to end")?;
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
        // The MPS daemon ends with this server, and with it what it serves.
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

    /// Waits for the end of a process that was killed. One that does not end sits in the driver: its GPUs are not well.
    async fn reaped(&self, id: &WorkerId, process: &mut Process) {
        if timeout(REAP_LIMIT, process.wait()).await.is_ok() {
            return;
        }
        self.stuck(id);
        let _ = process.wait().await;
    }

    /// A worker was killed and does not end.
    fn stuck(&self, id: &WorkerId) {
        let (gpus, pid) = match self.state().workers.get(id) {
            Some(worker) => (worker.gpus.clone(), worker.pid.unwrap_or(0)),
            None => return,
        };
        let why = format!("process {pid} of a worker was killed and does not end: it waits for the driver");
        let _ = self.0.events.send(Event::Stuck { gpus, why });
    }

    /// `start` is for a worker of this server.
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
        // What one that ends does not read is not waited for.
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
                sent = timeout(SEND_LIMIT, channel.send(message, beside)) => match sent {
                    // It has ended, which its last words or its exit status say better.
                    Ok(Err(e)) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
                    Ok(sent) => sent.map_err(|e| format!("its channel: {e}")),
                    Err(_) => Err("it does not read its channel".into()),
                },
                _ = told_to_end(ends), if !told => Ok(()),
                () = sleep_until(deadline) => Ok(()),
            }
        }
        // A worker that ended already is told by its exit status, not by its closed channel.
        let mut limit = None;
        // Such a worker does not outlive its server, so that it is one of this server.
        let mps = start.as_ref().is_some_and(|start| start.mps);
        if let Some(start) = start {
            let by = Instant::now() + START_LIMIT;
            let _ = send(channel, &ToWorker::Start(start), None, ends, false, by).await;
            limit = Some((by, "it was not ready in time"));
        }
        let (mut channel_open, mut killed, mut told, mut said_end) = (true, false, false, false);
        // It has a moment to end by itself.
        let (grace, in_all) = if mps { (STOP_GRACE_MPS, mps::END_LIMIT) } else { (STOP_GRACE, STOP_GRACE) };
        let sooner =
            |limit: Option<(Instant, &str)>, at| Some((limit.map_or(at, |(before, _)| before.min(at)), ""));
        let (mut second, mut packets, mut memory_packets) = (Instant::now(), 0, 0);
        // It asked for memory so often that it has to wait for the next second.
        let mut patience = false;
        loop {
            let deadline = limit.map_or_else(|| Instant::now() + Duration::from_secs(86400), |(at, _)| at);
            tokio::select! {
                biased;
                status = process.wait() => {
                    // What it said last says more than its exit status.
                    let by = Instant::now() + LAST_WORDS;
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
                        debug!(pid = process.pid(), "worker {} did not end in time: killed", hex(id));
                        let by = ending.begins(in_all);
                        if !std::mem::replace(&mut ending.work_ended, true) {
                            self.end_gpu_work(id, false, by).await;
                        }
                        process.kill();
                        limit = Some((Instant::now() + REAP_LIMIT, ""));
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
                        if let FromWorker::Contained { lacking } = &message
                            && !self.state().workers.get(id).is_none_or(|w| w.may_be_contained(lacking))
                        {
                            return Err("it speaks of its isolation when it has no reason to".into());
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
                    // It is about to exit, or closed its channel in order not to be stopped by it.
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
                    let why = format!("{} MiB of mapped host memory asked for", bytes.div_ceil(1 << 20));
                    let exceeded = limit.exceeded(why, "the program was told that there is no memory");
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
                        "isolation = \"try\": workers start only without it here, and go on so; with it they end: {reason}"
                    );
                }
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
            FromWorker::Ended { reason, .. } if worker.seat.is_some() && worker.presented => {
                // It waits for the end of its GPU work.
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
                        "worker {} refused a connection: {}{more}",
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
                    warn!("workers are not isolated as far as they could be: {}", lacking.join("; "));
                }
                if let Some(worker) = state.workers.get_mut(id) {
                    worker.isolation = if lacking.is_empty() { "full".into() } else { lacking.join("; ") };
                }
            }
            // Among its last words.
            FromWorker::Contained { .. } => {}
            FromWorker::Wanted => {
                worker.wanted = true;
                self.0.wants.notify_one();
            }
        }
    }

    /// The next server attends to a worker.
    fn leave(&self, id: &WorkerId) {
        let mut state = self.state();
        state.workers.remove(id);
        if state.workers.is_empty() {
            self.0.empty.notify_waiters();
        }
    }

    /// What accounting knows of a worker's program until now.
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

    /// For the case that this server does not see the program's end.
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

fn adopt(number: u64, preface: Vec<u8>, peer: SocketAddr) -> ToWorker {
    ToWorker::Adopt { number, preface, peer: peer.to_string() }
}

/// The ledger of a lease. Its shares say what a whole card has, where workers are told of no limit.
fn ledger(lease: &Lease, devices: Vec<DeviceLimit>) -> Ledger {
    let share = |uuid: &[u8; 16]| lease.shares.iter().find(|s| uuid_bytes(&s.gpu).as_ref() == Some(uuid));
    Ledger::new(devices).of_cards(|uuid| share(uuid).map(|s| s.limit_bytes))
}

/// Passes on what a ledger says. What is granted is written down before it is told.
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

/// The most mapped host memory that a worker keeps copies of.
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
    debug!(gpusession_worker = hex(id), "worker {} is told to end: {reason}", hex(id));
    worker.phase = Phase::Ending;
    worker.ended_because = Some(reason.into());
    worker.remember(None);
    worker.orders.end.send_replace(Some(reason.into()));
}

fn describe(status: Option<ExitStatus>) -> String {
    use std::os::unix::process::ExitStatusExt;
    let Some(status) = status else { return "it ended".into() };
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(signal) => format!("killed by {}", signal.as_str()),
            Err(_) => format!("killed by signal {signal}"),
        },
        (None, None) => status.to_string(),
    }
}

/// The time of GPU work that a report tells of, so long after the one before; `idle` is how long ago it ended.
fn worked(passed: Duration, idle: Duration) -> Duration {
    // A worker that says nothing rests: of a longer time only the end was work. A host that is slow may be late by some seconds.
    let seen = if passed < REPORT * 5 { passed } else { REPORT };
    seen.saturating_sub(idle)
}

/// Text of a worker, fit for a log and a terminal.
fn printable(text: &str) -> String {
    text.chars().take(200).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A worker's id as people see it.
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
