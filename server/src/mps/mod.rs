//! NVIDIA's Multi-Process Service: kernels of several workers share a GPU at the same time.
//!
//! A *domain* is the unit that shares a fault: the leases of one client on the same GPUs, or of all
//! clients with `mps_domain`. Each domain has its own control daemon, in private folders. The
//! daemon starts with the domain's first lease, restarts when it dies, and quits after the last
//! lease and worker. No lease is in two domains. Domains send events about workers over a channel;
//! see `supervise::mps`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::supervise::DeviceLimit;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::{debug, info, warn};

use self::control::{ANSWER_TIMEOUT, Control, ServerState};
use self::log::{Said, Tail};
use crate::clock::Clock;
use crate::lease::{Lease, Priority};
use crate::supervise::spawn::{Spawner, clean_environment};

pub mod control;
mod log;

/// Contexts that one MPS server serves, with drivers up to 580 (measured: the 49th gets error 808).
pub const MAX_CLIENTS: usize = 48;
/// Time in which a started daemon must answer.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Time that a worker waits for its domain's daemon.
const SEAT_TIMEOUT: Duration = Duration::from_secs(45);
/// Interval at which logs are read.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Intervals of state queries for a domain with workers.
///
/// The second one applies after a failed query or the crash of a worker.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
const SUSPECT_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time that workers may take to exit after a fault.
const FAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that a daemon may take to quit.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest pause before a daemon is started again.
const BACKOFF_MIN: Duration = Duration::from_millis(250);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Faults that a domain remembers.
const MAX_FAULTS: usize = 16;
/// Lines of one log that go to the journal at a time.
const MAX_LINES: usize = 50;
/// Longest name of a daemon's socket, below the folder of all daemons.
const LONGEST_SOCKET: &str = "4294967295/p/control_privileged";

/// Settings of MPS on this server.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Path of `nvidia-cuda-mps-control`.
    pub program: PathBuf,
    /// Path of the driver library.
    pub driver: PathBuf,
    /// Parent of the daemons' folders.
    pub folder: PathBuf,
    /// Whether all clients share a domain.
    pub shared: bool,
}

/// Checks that socket addresses below this folder are short enough.
pub fn check_folder(folder: &Path) -> Result<(), String> {
    // A socket's address has 108 bytes, including the final zero.
    let len = folder.as_os_str().len() + 1 + LONGEST_SOCKET.len();
    match len {
        0..=107 => Ok(()),
        _ => Err(format!(
            "{}: too long for MPS, whose socket names there would exceed 107 bytes",
            folder.display()
        )),
    }
}

/// Identity of a domain.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Key {
    /// Client of the leases; empty: all clients.
    client: String,
    /// Sorted UUIDs.
    gpus: Vec<String>,
}

/// Event of one generation of a domain's daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Happened {
    /// A fatal fault: all workers with a seat there must exit.
    Fault {
        /// Generation of the seats.
        generation: u32,
        /// Processes that caused the fault, as far as MPS names them.
        culprits: Vec<u32>,
        /// Log line of MPS.
        why: String,
    },
    /// The daemon is gone.
    ///
    /// Workers that do not use the GPU yet cannot start to; other workers continue while their
    /// server lives.
    Gone {
        /// Generation of the seats.
        generation: u32,
        /// Whether the MPS server is gone, too.
        server: bool,
    },
    /// A killed process of MPS does not exit.
    Stuck {
        /// UUIDs of the domain's GPUs.
        gpus: Vec<String>,
        /// Description for administrators.
        why: String,
    },
}

/// One fault in a listing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FaultView {
    /// Time of the fault, in seconds since 1970.
    pub unix: u64,
    /// Log line of MPS.
    pub why: String,
    /// Worker processes that caused the fault; empty: unknown.
    pub culprits: Vec<u32>,
}

/// One MPS server in a listing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ServerView {
    /// Process id of the server.
    pub pid: u32,
    /// initializing, active, fault, or the reason why the state is unknown.
    pub state: String,
    /// Process ids of its clients.
    pub clients: Vec<u32>,
}

/// One domain in a listing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DomainView {
    /// Client of the domain; `*`: all clients.
    pub client: String,
    /// Sorted UUIDs of the domain's GPUs.
    pub gpus: Vec<String>,
    /// starting, initializing, active, fault, failed.
    pub state: String,
    /// Reason of the state `failed`; else empty.
    pub reason: String,
    /// Process id of the control daemon.
    pub daemon_pid: Option<u32>,
    /// Starts of the daemon after the first one.
    pub restarts: u32,
    /// Ids of the domain's leases.
    pub leases: Vec<String>,
    /// MPS servers.
    pub servers: Vec<ServerView>,
    /// The latest faults, oldest first.
    pub faults: Vec<FaultView>,
}

/// One run of a domain's daemon.
#[derive(Debug)]
struct Generation {
    number: u32,
    folder: PathBuf,
    control: Control,
    alive: AtomicBool,
}

impl Generation {
    fn pipe(&self) -> PathBuf {
        self.folder.join("p")
    }

    fn logs(&self) -> PathBuf {
        self.folder.join("l")
    }
}

#[derive(Debug, Clone)]
enum Phase {
    Starting,
    Up(Arc<Generation>, Option<u32>),
    Fault,
    Failed(String),
}

#[derive(Debug)]
struct Inner {
    phase: Phase,
    /// Leases, with the largest percentage of multiprocessors that each may use.
    leases: BTreeMap<String, u32>,
    /// Number of workers by generation.
    seats: BTreeMap<u32, usize>,
    faults: VecDeque<FaultView>,
    starts: u32,
}

#[derive(Debug)]
struct Domain {
    key: Key,
    inner: Mutex<Inner>,
    changed: Notify,
    suspect: Notify,
}

impl Domain {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, phase: Phase) {
        self.inner().phase = phase;
        self.changed.notify_waiters();
    }

    fn name(&self) -> &str {
        if self.key.client.is_empty() { "*" } else { &self.key.client }
    }

    /// Returns the largest percentage of multiprocessors that a lease of the domain may use.
    fn percent(&self) -> u32 {
        self.inner().leases.values().copied().max().unwrap_or(100)
    }

    fn seated(&self, generation: u32) -> usize {
        self.inner().seats.get(&generation).copied().unwrap_or(0)
    }
}

/// A worker's seat in a domain; the daemon runs while it has seats.
#[derive(Debug)]
pub struct Seat {
    domain: Arc<Domain>,
    generation: Arc<Generation>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut inner = self.domain.inner();
        if let Some(n) = inner.seats.get_mut(&self.generation.number) {
            *n -= 1;
            if *n == 0 {
                inner.seats.remove(&self.generation.number);
            }
        }
        drop(inner);
        self.domain.changed.notify_waiters();
    }
}

impl Seat {
    /// Generation of the daemon to which the seat belongs.
    pub fn generation(&self) -> u32 {
        self.generation.number
    }

    /// Folder of the daemon's sockets.
    pub fn pipe_directory(&self) -> PathBuf {
        self.generation.pipe()
    }

    /// Ends the GPU work of a worker before the worker exits, so that no other client is harmed.
    ///
    /// Returns `true` if the work ended by `by`. Returns by then, whatever the daemon does.
    pub async fn terminate(&self, pid: u32, by: Instant) -> bool {
        let mut last = String::new();
        let ends = async {
            while self.generation.alive.load(Ordering::Relaxed) {
                match self.try_to_terminate(pid, by).await {
                    Ok(()) => return true,
                    Err(e) => last = e,
                }
                sleep(Duration::from_millis(20)).await;
            }
            false
        };
        timeout_at(by, ends).await.unwrap_or_else(|_| {
            warn!("MPS domain {}: GPU work of process {pid} did not end in time: {last}", self.domain.name());
            false
        })
    }

    async fn try_to_terminate(&self, pid: u32, by: Instant) -> Result<(), String> {
        // CUDA_SUCCESS, or CUDA_ERROR_INVALID_CONTEXT: the client has no work.
        const DONE: [&str; 2] = ["0", "201"];
        let control = &self.generation.control;
        for server in control.servers().await? {
            let question = format!("terminate_client {server} {pid}");
            let answer = control.ask(&question, by - Instant::now()).await?;
            if !DONE.contains(&answer.trim()) {
                return Err(format!("{question}: {}", answer.trim()));
            }
        }
        Ok(())
    }

    /// Makes the domain query its state at once, because the worker crashed.
    pub fn suspect(&self) {
        self.domain.suspect.notify_one();
    }
}

/// Returns the MPS variables of a worker, except those of its seat.
///
/// The program's own environment can lower a limit, never raise it. Values that the driver cannot
/// parse are ignored.
pub fn variables(
    devices: &[DeviceLimit],
    priority: Priority,
    own: &[(String, String)],
) -> Vec<(OsString, OsString)> {
    let own = |name: &str| own.iter().find(|(n, _)| n == name).map_or("", |(_, value)| value.trim());
    let mut out: Vec<(OsString, OsString)> = Vec::new();
    // One percentage applies to all GPUs of a process.
    let percent = devices.iter().map(|d| f64::from(d.sm_percent)).fold(100.0, f64::min);
    let name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
    let percent =
        own(name).parse().ok().filter(|p| (0.1..=100.0).contains(p)).unwrap_or(percent).min(percent);
    if percent < 100.0 {
        out.push((name.into(), percent.to_string().into()));
    }
    let name = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
    let wanted = own(name);
    let mib = |i: usize, device: &DeviceLimit| {
        let parts = wanted.split(',').filter_map(|part| part.split_once('='));
        let size =
            parts.filter(|(index, _)| index.trim() == i.to_string()).find_map(|(_, size)| megabytes(size));
        let most = (device.memory_bytes != u64::MAX).then_some(device.memory_bytes >> 20);
        size.into_iter().chain(most).min()
    };
    let limits = devices.iter().enumerate().filter_map(|(i, d)| Some(format!("{i}={}M", mib(i, d)?)));
    let limits: Vec<_> = limits.collect();
    if !limits.is_empty() {
        out.push((name.into(), limits.join(",").into()));
    }
    let name = "CUDA_MPS_CLIENT_PRIORITY";
    if priority == Priority::BelowNormal || own(name) == "1" {
        out.push((name.into(), "1".into()));
    }
    out
}

/// Parses a size as the driver does, `4G` or `512M`; returns MiB.
fn megabytes(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_uppercase();
    let text = text.strip_suffix('B').unwrap_or(&text);
    match text.strip_suffix('G') {
        Some(gib) => gib.parse::<u64>().ok()?.checked_mul(1024),
        None => text.strip_suffix('M')?.parse().ok(),
    }
}

enum End {
    Unneeded,
    Died(String),
    Fault { culprits: Vec<u32>, why: String },
}

struct Shared {
    settings: Settings,
    spawner: Spawner,
    clock: Arc<dyn Clock>,
    domains: Mutex<HashMap<Key, Arc<Domain>>>,
    numbers: AtomicU32,
    happened: mpsc::UnboundedSender<Happened>,
    closed: Notify,
}

/// All domains of this server. Cheap to clone.
#[derive(Clone)]
pub struct Mps(Arc<Shared>);

impl Mps {
    /// Creates the domains' owner, and kills processes that an earlier run left behind.
    pub fn new(
        settings: Settings,
        spawner: Spawner,
        clock: Arc<dyn Clock>,
    ) -> (Self, mpsc::UnboundedReceiver<Happened>) {
        for entry in std::fs::read_dir(&settings.folder).into_iter().flatten().flatten() {
            clean(&entry.path());
        }
        let (happened, told) = mpsc::unbounded_channel();
        let shared = Shared {
            settings,
            spawner,
            clock,
            domains: Mutex::default(),
            numbers: AtomicU32::new(0),
            happened,
            closed: Notify::new(),
        };
        (Self(Arc::new(shared)), told)
    }

    fn domains(&self) -> MutexGuard<'_, HashMap<Key, Arc<Domain>>> {
        self.0.domains.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a lease to its domain. The first lease starts the domain's daemon.
    pub fn join(&self, lease: &Lease, devices: &[DeviceLimit]) {
        let mut gpus: Vec<String> = lease.shares.iter().map(|s| s.gpu.clone()).collect();
        gpus.sort();
        let client = if self.0.settings.shared { String::new() } else { lease.client.clone() };
        let key = Key { client, gpus };
        let percent = devices.iter().map(|d| d.sm_percent).min().unwrap_or(100);
        let mut domains = self.domains();
        let domain = domains.entry(key.clone()).or_insert_with(|| {
            let inner = Inner {
                phase: Phase::Starting,
                leases: BTreeMap::new(),
                seats: BTreeMap::new(),
                faults: VecDeque::new(),
                starts: 0,
            };
            let domain = Arc::new(Domain {
                key,
                inner: Mutex::new(inner),
                changed: Notify::new(),
                suspect: Notify::new(),
            });
            tokio::spawn(self.clone().run(domain.clone()));
            domain
        });
        domain.inner().leases.insert(lease.id.clone(), percent);
        domain.changed.notify_waiters();
    }

    /// Removes a lease from its domain.
    pub fn leave(&self, lease: &str) {
        for domain in self.domains().values() {
            if domain.inner().leases.remove(lease).is_some() {
                domain.changed.notify_waiters();
            }
        }
    }

    /// Waits for the daemon of a lease's domain, and returns a seat there.
    pub async fn seat(&self, lease: &str) -> Result<Seat, String> {
        let domain = self.domains().values().find(|d| d.inner().leases.contains_key(lease)).cloned();
        let domain = domain.ok_or("the lease has ended")?;
        let seated = async {
            loop {
                let mut changed = std::pin::pin!(domain.changed.notified());
                changed.as_mut().enable();
                {
                    let mut inner = domain.inner();
                    if !inner.leases.contains_key(lease) {
                        return Err("the lease has ended".to_string());
                    }
                    match &inner.phase {
                        Phase::Up(generation, _) => {
                            let generation = generation.clone();
                            *inner.seats.entry(generation.number).or_default() += 1;
                            return Ok(Seat { domain: domain.clone(), generation });
                        }
                        Phase::Failed(why) => return Err(format!("MPS: {why}")),
                        Phase::Starting | Phase::Fault => {}
                    }
                }
                changed.await;
            }
        };
        timeout(SEAT_TIMEOUT, seated)
            .await
            .map_err(|_| format!("MPS was not ready within {} s", SEAT_TIMEOUT.as_secs()))?
    }

    /// Lists the leases of the same domain, `lease` included.
    pub fn leases_beside(&self, lease: &str) -> Vec<String> {
        let domains = self.domains();
        let mine = domains.values().map(|d| d.inner()).find(|i| i.leases.contains_key(lease));
        mine.map(|inner| inner.leases.keys().cloned().collect()).unwrap_or_default()
    }

    /// Lists all domains.
    pub async fn views(&self) -> Vec<DomainView> {
        let mut domains: Vec<_> = self.domains().values().cloned().collect();
        domains.sort_by(|a, b| a.key.cmp(&b.key));
        let mut out = Vec::new();
        for domain in domains {
            out.push(view(&domain).await);
        }
        out
    }

    /// Returns when the last domain is gone. Leases and workers must be gone before.
    pub async fn close(&self) {
        let empty = async {
            loop {
                let mut closed = std::pin::pin!(self.0.closed.notified());
                closed.as_mut().enable();
                if self.domains().is_empty() {
                    return;
                }
                closed.await;
            }
        };
        if timeout(QUIT_TIMEOUT + Duration::from_secs(1), empty).await.is_err() {
            warn!("MPS: some daemons did not quit in time; they exit with this server");
        }
    }

    /// Runs a domain from its first lease to its end.
    async fn run(self, domain: Arc<Domain>) {
        let mut pause = BACKOFF_MIN;
        loop {
            let begun = Instant::now();
            let generation = match self.start(&domain).await {
                Ok((generation, child)) => {
                    Ok((generation.clone(), self.attend(&domain, &generation, child).await))
                }
                Err(e) => Err(e),
            };
            match generation {
                Ok((_, End::Unneeded)) => break,
                Ok((_, End::Fault { .. })) => continue,
                Ok((generation, End::Died(why))) => {
                    warn!("MPS domain {}: {why}; restarting it", domain.name());
                    domain.set(Phase::Starting);
                    let number = generation.number;
                    let _ = self.0.happened.send(Happened::Gone { generation: number, server: false });
                    // Programs continue with the old server; its rest is cleared after the last
                    // one.
                    let (this, domain) = (self.clone(), domain.clone());
                    tokio::spawn(async move {
                        let pipe = generation.pipe();
                        while domain.seated(number) > 0 {
                            sleep(POLL_INTERVAL).await;
                            if left_behind(&pipe).is_empty() {
                                let gone = Happened::Gone { generation: number, server: true };
                                let _ = this.0.happened.send(gone);
                                until(&domain, || domain.seated(number) == 0).await;
                            }
                        }
                        this.clear(&domain, &generation.folder).await;
                    });
                }
                Err(why) => {
                    warn!("MPS domain {}: {why}; next try in {} ms", domain.name(), pause.as_millis());
                    domain.set(Phase::Failed(why));
                }
            }
            if begun.elapsed() > BACKOFF_MAX {
                pause = BACKOFF_MIN;
            }
            sleep(pause).await;
            pause = (pause * 2).min(BACKOFF_MAX);
            until(&domain, || {
                let inner = domain.inner();
                !inner.leases.is_empty() || inner.seats.is_empty()
            })
            .await;
            if self.forget(&domain) {
                break;
            }
        }
        self.0.closed.notify_waiters();
    }

    /// Removes a domain without leases and seats; a later lease creates a new one.
    fn forget(&self, domain: &Domain) -> bool {
        let mut domains = self.domains();
        let inner = domain.inner();
        let unneeded = inner.leases.is_empty() && inner.seats.is_empty();
        drop(inner);
        if unneeded {
            domains.remove(&domain.key);
        }
        unneeded
    }

    /// Starts a daemon and waits until it answers.
    async fn start(&self, domain: &Domain) -> Result<(Arc<Generation>, Child), String> {
        let settings = &self.0.settings;
        let number = self.0.numbers.fetch_add(1, Ordering::Relaxed);
        let folder = settings.folder.join(number.to_string());
        let mut environment = clean_environment(&settings.driver);
        if let Some((_, path)) = environment.iter_mut().find(|(name, _)| name == "PATH") {
            // The daemon finds its server program by name.
            let mut folders =
                settings.program.parent().map(Path::as_os_str).unwrap_or_default().to_os_string();
            folders.push(":");
            folders.push(&path);
            *path = folders;
        }
        environment.extend([
            ("CUDA_MPS_PIPE_DIRECTORY".into(), folder.join("p").into()),
            ("CUDA_MPS_LOG_DIRECTORY".into(), folder.join("l").into()),
            ("CUDA_VISIBLE_DEVICES".into(), domain.key.gpus.join(",").into()),
        ]);
        let control = Control::new(settings.program.clone(), environment);
        let generation = Arc::new(Generation { number, folder, control, alive: AtomicBool::new(true) });
        domain.inner().starts += 1;
        let mut child = None;
        match self.start_daemon(&generation, &mut child).await {
            Ok(()) => {}
            Err(e) => {
                generation.alive.store(false, Ordering::Relaxed);
                drop(child);
                self.clear(domain, &generation.folder).await;
                return Err(e);
            }
        }
        let child = child.ok_or("no process")?;
        apply(domain, &generation).await;
        // Saves the first program the wait for a server.
        let uid = nix::unistd::geteuid();
        if let Err(e) = generation.control.ask(&format!("start_server -uid {uid}"), START_TIMEOUT).await {
            warn!(
                "MPS domain {}: cannot start its server in advance: {e}; its first worker starts it",
                domain.name()
            );
        }
        info!(
            "MPS domain {} on {}: started daemon {} in {}",
            domain.name(),
            domain.key.gpus.join(", "),
            child.id().unwrap_or(0),
            generation.folder.display()
        );
        domain.set(Phase::Up(generation.clone(), child.id()));
        Ok((generation, child))
    }

    async fn start_daemon(&self, generation: &Generation, child: &mut Option<Child>) -> Result<(), String> {
        let program = &self.0.settings.program;
        let failed = |what: &Path, e: std::io::Error| format!("{}: {e}", what.display());
        // Left by an earlier run that could not clean up.
        clean(&generation.folder);
        for folder in [generation.pipe(), generation.logs()] {
            let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
            made.map_err(|e| failed(&folder, e))?;
        }
        let said = generation.logs().join("daemon.out");
        let output = File::create(&said).map_err(|e| failed(&said, e))?;
        let errors = output.try_clone().map_err(|e| failed(&said, e))?;
        let mut command = Command::new(program);
        command
            .arg("-f")
            .env_clear()
            .envs(generation.control.environment.iter().map(|(k, v)| (k, v)))
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .process_group(0)
            .kill_on_drop(true);
        let daemon = child.insert(self.0.spawner.start_bound(command).await.map_err(|e| failed(program, e))?);
        let end = Instant::now() + START_TIMEOUT;
        loop {
            if let Ok(Some(status)) = daemon.try_wait() {
                let said = std::fs::read_to_string(&said).unwrap_or_default();
                let last = said.lines().last().unwrap_or("it wrote nothing");
                return Err(format!("{} exited: {status}: {last}", program.display()));
            }
            match generation.control.ask("get_server_list", Duration::from_secs(1)).await {
                Ok(_) => return Ok(()),
                Err(e) if Instant::now() > end => {
                    return Err(format!(
                        "the control daemon was not ready within {} s: {e}",
                        START_TIMEOUT.as_secs()
                    ));
                }
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Attends to a ready daemon until it has exited. The caller cleans up after one that died.
    async fn attend(&self, domain: &Domain, generation: &Generation, mut child: Child) -> End {
        let end = self.watch(domain, generation, &mut child).await;
        match &end {
            End::Unneeded => {
                let asked = generation.control.ask("quit -t 2", QUIT_TIMEOUT).await;
                if let Err(e) = asked.or_else(|e| {
                    if child.try_wait().is_ok_and(|s| s.is_some()) { Ok(String::new()) } else { Err(e) }
                }) {
                    warn!("MPS domain {}: its control daemon did not quit: {e}; killed", domain.name());
                }
                let _ = timeout(QUIT_TIMEOUT, child.wait()).await;
                info!("MPS domain {}: its last lease has ended; its control daemon has quit", domain.name());
            }
            End::Died(_) => generation.alive.store(false, Ordering::Relaxed),
            End::Fault { culprits, why } => {
                // MPS has ended all work itself.
                generation.alive.store(false, Ordering::Relaxed);
                {
                    let mut inner = domain.inner();
                    if inner.faults.len() == MAX_FAULTS {
                        inner.faults.pop_front();
                    }
                    let fault =
                        FaultView { unix: self.0.clock.unix(), why: why.clone(), culprits: culprits.clone() };
                    inner.faults.push_back(fault);
                }
                domain.set(Phase::Fault);
                warn!(
                    "MPS domain {}: {why}; stopping its programs, then restarting its control daemon",
                    domain.name()
                );
                let number = generation.number;
                let told =
                    Happened::Fault { generation: number, culprits: culprits.clone(), why: why.clone() };
                let _ = self.0.happened.send(told);
                let ended = until(domain, || domain.seated(number) == 0);
                if timeout(FAULT_TIMEOUT, ended).await.is_err() {
                    warn!(
                        "MPS domain {}: programs still running {} s after a fault; restarting its control daemon",
                        domain.name(),
                        FAULT_TIMEOUT.as_secs()
                    );
                }
            }
        }
        generation.alive.store(false, Ordering::Relaxed);
        let _ = child.start_kill();
        let _ = timeout(QUIT_TIMEOUT, child.wait()).await;
        if !matches!(end, End::Died(_)) {
            self.clear(domain, &generation.folder).await;
        }
        end
    }

    /// Kills what is left of a daemon. If a process does not exit, the driver holds it: its GPUs
    /// are stuck.
    async fn clear(&self, domain: &Domain, folder: &Path) {
        let pipe = folder.join("p");
        clean(folder);
        let end = Instant::now() + QUIT_TIMEOUT;
        loop {
            match left_behind(&pipe).first() {
                None => return,
                Some(pid) if Instant::now() > end => {
                    let why =
                        format!("process {pid} of MPS was killed and does not exit: it waits for the driver");
                    let _ = self.0.happened.send(Happened::Stuck { gpus: domain.key.gpus.clone(), why });
                    return;
                }
                Some(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    }

    async fn watch(&self, domain: &Domain, generation: &Generation, child: &mut Child) -> End {
        let mut logs =
            ["control.log", "server.log", "daemon.out"].map(|f| Tail::new(generation.logs().join(f)));
        let mut percent = domain.percent();
        let (mut check_at, mut missed) = (Instant::now() + CHECK_INTERVAL, 0);
        loop {
            let mut suspected = false;
            tokio::select! {
                status = child.wait() => {
                    let status = status.map_or_else(|e| e.to_string(), |s| s.to_string());
                    return End::Died(format!("its control daemon exited: {status}"));
                }
                () = domain.suspect.notified() => suspected = true,
                () = domain.changed.notified() => {}
                () = sleep(POLL_INTERVAL) => {}
            }
            if let Some(fault) = fault(domain, &mut logs).await {
                return fault;
            }
            if self.forget(domain) {
                return End::Unneeded;
            }
            let now_percent = domain.percent();
            if now_percent != percent {
                percent = now_percent;
                if let Err(fault) = unless_fault(domain, &mut logs, apply(domain, generation)).await {
                    return fault;
                }
            }
            if suspected || Instant::now() >= check_at && domain.seated(generation.number) > 0 {
                check_at = Instant::now() + if suspected { SUSPECT_CHECK_INTERVAL } else { CHECK_INTERVAL };
                match unless_fault(domain, &mut logs, state(&generation.control)).await {
                    Err(fault) => return fault,
                    Ok(Ok(ServerState::Fault)) => {
                        // Its log may name the culprit, at once or a moment later.
                        for _ in 0..2 {
                            if let Some(fault) = fault(domain, &mut logs).await {
                                return fault;
                            }
                            sleep(POLL_INTERVAL).await;
                        }
                        let why = "its server is in the state FAULT".into();
                        return End::Fault { culprits: Vec::new(), why };
                    }
                    Ok(Ok(_)) => missed = 0,
                    Ok(Err(e)) => {
                        missed += 1;
                        check_at = Instant::now() + SUSPECT_CHECK_INTERVAL;
                        warn!("MPS domain {}: cannot query its state: {e}", domain.name());
                        if missed == 4 {
                            let _ = child.start_kill();
                            return End::Died("its control daemon does not answer".into());
                        }
                    }
                }
            }
        }
    }
}

/// Returns the fault that a daemon's logs report, if there was one.
async fn fault(domain: &Domain, logs: &mut [Tail]) -> Option<End> {
    let (mut culprits, why) = read_logs(domain, logs)?;
    if culprits.is_empty() {
        // The next line may name the culprit.
        sleep(POLL_INTERVAL).await;
        culprits.extend(read_logs(domain, logs).into_iter().flat_map(|(c, _)| c));
    }
    Some(End::Fault { culprits, why })
}

/// Waits for an answer of the daemon, for any time, unless its logs report a fault meanwhile.
async fn unless_fault<T>(
    domain: &Domain,
    logs: &mut [Tail],
    asked: impl Future<Output = T>,
) -> Result<T, End> {
    let mut asked = std::pin::pin!(asked);
    loop {
        tokio::select! {
            answer = &mut asked => return Ok(answer),
            () = sleep(POLL_INTERVAL) => {
                if let Some(fault) = fault(domain, logs).await {
                    return Err(fault);
                }
            }
        }
    }
}

/// Returns the worst state of a daemon's servers.
async fn state(control: &Control) -> Result<ServerState, String> {
    let mut worst = ServerState::Active;
    for server in control.servers().await? {
        match control.state(server).await {
            Ok(ServerState::Fault) => return Ok(ServerState::Fault),
            Ok(ServerState::Initializing) => worst = ServerState::Initializing,
            Ok(ServerState::Active) => {}
            // It may have exited meanwhile.
            Err(e) if control.servers().await?.contains(&server) => return Err(e),
            Err(_) => {}
        }
    }
    Ok(worst)
}

/// Sets the largest percentage of multiprocessors for the daemon and its servers.
///
/// It bounds a client without a variable of its own. Each worker's share is in its environment.
async fn apply(domain: &Domain, generation: &Generation) {
    let percent = domain.percent();
    let control = &generation.control;
    let applied = async {
        control.ask(&format!("set_default_active_thread_percentage {percent}"), ANSWER_TIMEOUT).await?;
        for server in control.servers().await? {
            control.ask(&format!("set_active_thread_percentage {server} {percent}"), ANSWER_TIMEOUT).await?;
        }
        Ok::<(), String>(())
    };
    if let Err(e) = applied.await {
        warn!("MPS domain {}: cannot set its share of multiprocessors: {e}", domain.name());
    }
}

/// Copies new log lines to the journal. Returns the culprits and the text of a fault, if there was
/// one.
fn read_logs(domain: &Domain, logs: &mut [Tail]) -> Option<(Vec<u32>, String)> {
    let mut fault: Option<(Vec<u32>, String)> = None;
    for log in logs {
        let mut left = MAX_LINES;
        for line in log.lines() {
            let said = log::read(&line);
            let (name, text) = (domain.name(), line.split_once("] ").map_or(line.as_str(), |(_, text)| text));
            if left > 0 {
                left -= 1;
                match &said {
                    Said::Chatter => debug!("MPS domain {name}: {line}"),
                    Said::Info => info!("MPS domain {name}: {line}"),
                    Said::Fault(_) | Said::ServerDied => warn!("MPS domain {name}: {line}"),
                }
            }
            let culprit = match said {
                Said::Fault(culprit) => culprit,
                Said::ServerDied => None,
                Said::Info | Said::Chatter => continue,
            };
            let fault = fault.get_or_insert_with(|| (Vec::new(), text.trim().to_string()));
            fault.0.extend(culprit.filter(|c| !fault.0.contains(c)));
        }
        if left == 0 {
            info!("MPS domain {}: more lines in {}", domain.name(), log.path().display());
        }
    }
    fault
}

async fn view(domain: &Domain) -> DomainView {
    let (phase, leases, faults, starts) = {
        let inner = domain.inner();
        let leases = inner.leases.keys().cloned().collect();
        (inner.phase.clone(), leases, inner.faults.iter().cloned().collect(), inner.starts)
    };
    let mut servers = Vec::new();
    let mut view_state = match &phase {
        Phase::Starting => "starting",
        Phase::Fault => "fault",
        Phase::Failed(_) => "failed",
        Phase::Up(..) => "active",
    };
    if let Phase::Up(generation, _) = &phase {
        let control = &generation.control;
        for pid in control.servers().await.unwrap_or_default() {
            let state = control.state(pid).await;
            view_state = match state {
                Ok(ServerState::Active) => view_state,
                Ok(state) => state.as_str(),
                Err(_) => view_state,
            };
            let state = state.map_or_else(|e| e, |s| s.as_str().into());
            servers.push(ServerView { pid, state, clients: control.clients(pid).await.unwrap_or_default() });
        }
    }
    DomainView {
        client: domain.name().into(),
        gpus: domain.key.gpus.clone(),
        state: view_state.into(),
        reason: if let Phase::Failed(why) = &phase { why.clone() } else { String::new() },
        daemon_pid: if let Phase::Up(_, pid) = &phase { *pid } else { None },
        restarts: starts.saturating_sub(1),
        leases,
        servers,
        faults,
    }
}

/// Waits until `so` returns `true` after a change of the domain.
async fn until(domain: &Domain, so: impl Fn() -> bool) {
    loop {
        let mut changed = std::pin::pin!(domain.changed.notified());
        changed.as_mut().enable();
        if so() {
            return;
        }
        changed.await;
    }
}

/// Kills what is left of a daemon, and removes its folder.
fn clean(folder: &Path) {
    for pid in left_behind(&folder.join("p")) {
        info!("MPS: killed process {pid}, which an earlier daemon left in {}", folder.display());
        let _ = kill(pid, Signal::SIGKILL);
    }
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            warn!("MPS: cannot remove {}: {e}", folder.display());
        }
        _ => {}
    }
}

/// Lists processes of MPS with this pipe directory. A server may outlive its daemon.
fn left_behind(pipe: &Path) -> Vec<Pid> {
    use std::os::unix::ffi::OsStrExt;
    let wanted = [b"CUDA_MPS_PIPE_DIRECTORY=", pipe.as_os_str().as_bytes()].concat();
    let of = |entry: std::fs::DirEntry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let comm = std::fs::read_to_string(entry.path().join("comm")).ok()?;
        let mps = comm.starts_with("nvidia-cuda-mps");
        let environment = std::fs::read(entry.path().join("environ")).ok().filter(|_| mps)?;
        environment.split(|b| *b == 0).any(|v| v == wanted).then(|| Pid::from_raw(pid))
    };
    std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_worker() {
        let device = |memory_bytes, sm_percent| DeviceLimit {
            uuid: [0; 16],
            memory_bytes,
            sm_percent,
            context_bytes: 0,
        };
        assert!(variables(&[device(u64::MAX, 100)], Priority::Normal, &[]).is_empty());
        let devices = [device(4 << 30, 30), device(u64::MAX, 100), device(1 << 30, 25)];
        let limited = variables(&devices, Priority::BelowNormal, &[]);
        let limited: Vec<_> =
            limited.iter().map(|(k, v)| (k.to_str().unwrap(), v.to_str().unwrap())).collect();
        assert_eq!(
            limited,
            [
                ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25"),
                ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=4096M,2=1024M"),
                ("CUDA_MPS_CLIENT_PRIORITY", "1"),
            ]
        );
    }

    #[test]
    fn a_program_may_only_tighten_its_limits() {
        let device = DeviceLimit { uuid: [0; 16], memory_bytes: 4 << 30, sm_percent: 50, context_bytes: 0 };
        let of = |percent: &str, memory: &str, priority: &str| {
            let own = [
                ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent),
                ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", memory),
                ("CUDA_MPS_CLIENT_PRIORITY", priority),
            ];
            let own = own.map(|(name, value)| (name.to_string(), value.to_string()));
            let variables = variables(std::slice::from_ref(&device), Priority::Normal, &own);
            variables.into_iter().map(|(_, value)| value.into_string().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(of("12.5", "0=1G", "1"), ["12.5", "0=1024M", "1"]);
        assert_eq!(of("90", "0=8GB,1=1M", "0"), ["50", "0=4096M"]);
        for bad in ["", "-1", "0", "NaN", "1e9", "many"] {
            assert_eq!(of(bad, bad, bad), ["50", "0=4096M"], "{bad}");
        }
    }

    #[test]
    fn sockets_have_short_names() {
        check_folder(Path::new("/run/gpuserver/mps")).unwrap();
        assert!(check_folder(&Path::new("/").join("x".repeat(90))).unwrap_err().contains("too long"));
    }
}
