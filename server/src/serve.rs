//! The server process, from start to stop.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use gpusession_proto::control::administration_server::AdministrationServer;
use gpusession_proto::control::enrolment_server::EnrolmentServer;
use gpusession_proto::control::issuer_server::IssuerServer;
use gpusession_proto::control::pool_server::PoolServer;
use gpusession_proto::control::statements_server::StatementsServer;
use gpusession_proto::message;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tracing::{error, info, warn};

use crate::accounting::Accounting;
use crate::audit;
use crate::cache::{Cache, MEASURE_INTERVAL, TRIM_INTERVAL};
use crate::cgroups::{self, Cgroups};
use crate::clock::{Clock, Random, SystemClock, SystemRandom};
use crate::config::{Config, ConfigError};
use crate::connections::{Guarded, Holders, Place, shown};
use crate::discovery::{self, DiscoveryError, Probe};
use crate::gpu_lock::{self, GpuLocks};
use crate::isolation::{self, Decision};
use crate::lease::{Gpu, Lease};
use crate::log_throttle::LogThrottle;
use crate::monitor::Monitor;
use crate::mps::Folders;
use crate::net::accept_loop;
use crate::peer_slots::PeerSlots;
use crate::pool::grpc::Service;
use crate::pool::tls::{ServerCertificate, server_tls};
use crate::pool::{Facts, Pool};
use crate::registry::local::LocalRegistry;
use crate::signer::Why;
use crate::signer::link::{Link, Signer};
use crate::starter::Introduction;
use crate::starter::desk::Desk;
use crate::starter::groups::Groups;
use crate::starter::link::Starter;
use crate::supervise::handover::{Left, Store};
use crate::supervise::{Options, Supervisor, WorkerGroups};
use crate::{admin, clock, data, health, metrics, mps, spawn, store};

/// Most TLS handshakes at a time.
const MAX_HANDSHAKES: usize = 1024;
/// Longest time of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which a full table's slots are safe from new connections.
const QUEUE_GRACE: Duration = Duration::from_secs(2);
/// Most connections with a certificate at a time.
const MAX_CLIENTS: usize = 16384;
/// Most connections without a certificate at a time.
const MAX_STRANGERS: usize = 64;
/// Time that a handover waits for device memory in transit.
const MOVE_TIMEOUT: Duration = Duration::from_secs(15);
/// Time for the locks of a killed server to be free, and between two tries.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const LOCK_INTERVAL: Duration = Duration::from_millis(50);
/// Name of the control port's socket in the descriptor store.
const CONTROL: &str = "control";
/// Name of the data port's socket in the descriptor store.
const DATA: &str = "data";
/// Longest request on the control port, in bytes.
const MAX_MESSAGE: usize = 64 << 10;

/// Longest request to an issuer, in bytes: an encoded operation and its field.
const MAX_ISSUER_MESSAGE: usize = message::MAX_MESSAGE + 64;

/// The way in which the server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// A signal or an administrator stopped it.
    Stopped,
    /// SIGQUIT or an administrator stopped it without waiting for programs.
    Forced,
    /// Another server follows (SIGUSR2) and takes over the descriptor store's contents.
    HandedOver,
}

/// Runs the server until a signal or an administrator stops it.
pub async fn serve(config: Config) -> anyhow::Result<End> {
    // Before anything opens a descriptor: those of an earlier server start at number 3.
    let store = Store::of_this_unit();
    let mut left = store.left(config.starter.as_deref().map(Desk::at).as_ref());
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let random: Arc<dyn Random> = Arc::new(SystemRandom);
    let mut stop = Stop::listen(store.exists())?;
    report(&config);
    notify(&[sd_notify::NotifyState::Status("looking for GPUs")]);
    raise_descriptor_limit();

    let _lock = lock_state(&config.state_dir).await.context("state_dir")?;
    let signer = open_signer(&config)?;
    let shown = Arc::new(ServerCertificate::new(signer.clone(), &config.name, clock.unix())?);
    let tls = server_tls(signer.clone(), shown.clone(), clock.clone())?;
    let host = tokio::select! {
        host = Host::discover(&config, !left.workers.is_empty()) => host?,
        end = stop.wait() => return Ok(end),
    };
    let _gpus_are_ours = lock_gpus(&config, &host.gpus)?;
    // Before the test of isolation, which looks whether workers reach its folders.
    let cache = Cache::open(&config, host.code.clone(), random.as_ref());
    let isolation = tokio::select! {
        decided = host.settle_isolation(&config, cache.as_ref()) => decided?,
        end = stop.wait() => return Ok(end),
    };
    let ports = Ports::bind(&config, &mut left, &store).await?;
    let admin_path = config.admin_socket();
    let admin_socket = admin::bind(&admin_path).with_context(|| admin_path.display().to_string())?;

    let options = Options {
        program: host.worker,
        starter: host.starter.clone(),
        uid: host.uid,
        driver: host.driver.clone(),
        cache: cache.clone(),
        warm_workers: config.warm_workers,
        verify_memory: config.scrub,
        idle_exit: config.worker_idle_exit,
        isolation: isolation.clone(),
        mps: host.mps,
        groups: host.groups,
    };
    info!("{}", options.groups);
    let (registry, lost) = LocalRegistry::open(
        &config.state_dir,
        host.gpus,
        config.rules.clone(),
        clock.clone(),
        random.clone(),
    )?;
    let monitor = Monitor::start(host.starter, host.driver.clone(), isolation.workers);
    let accounting = Accounting::open(&config.state_dir)?;
    let supervisor =
        Supervisor::new(options, store.clone(), left.workers, accounting, clock.clone(), random.clone())?;
    supervisor.set_all_limits(config.limits.clone());
    let facts = Facts {
        control: ports.control.local_addr()?,
        data: ports.data.local_addr()?,
        driver: host.driver,
        driver_version: host.probe.driver_version.unwrap_or_default(),
        cuda_version: host.probe.cuda_version,
        config: config.clone(),
    };
    let (control_address, data_address) = (facts.control, facts.data);
    let registry = Arc::new(registry);
    let identity = (signer, shown);
    let pool =
        Arc::new(Pool::open(facts, registry.clone(), supervisor.clone(), monitor, identity, clock, random)?);
    let started = format!("gpuserver {}, isolation {}", env!("CARGO_PKG_VERSION"), supervisor.isolation());
    pool.audit().note(audit::Event { detail: started, ..audit::own("server-started") });
    stop.asked = Some(pool.asked_to_stop());
    take_up(&pool, &lost).await;
    if !lost.is_empty() {
        registry.store_now().await;
    }

    let (closing, closed) = watch::channel(false);
    let Ports { control, data, metrics } = ports;
    let mut tasks = start_tasks(&pool, config, data, admin_socket, cache, closed.clone());
    if let Some(metrics) = metrics {
        info!("metrics on http://{}/metrics", metrics.local_addr()?);
        tasks.spawn(metrics::serve(metrics, pool.clone()));
    }
    let control = tokio::spawn(serve_control(control, tls, pool.clone(), closed));

    let status = status(&pool).await;
    info!("ready on {control_address}, data on {data_address}: {status}");
    notify(&[sd_notify::NotifyState::Ready, sd_notify::NotifyState::Status(&status)]);

    let end = tokio::select! {
        end = stop.wait_and(&pool) => Ok(end),
        Some(task) = tasks.join_next() => {
            Err(anyhow!("a task of the server ended: {}", task.err().map_or_else(|| "?".into(), |e| e.to_string())))
        }
    };
    let audited = pool.clone();
    let end =
        Running { pool, supervisor, tasks, control, closing }.stop(end, &mut stop, store.exists()).await;
    registry.store_now().await;
    let why = end.as_ref().map_or_else(|e| format!("{e:#}"), |end| format!("{end:?}"));
    audited.audit().note(audit::Event { detail: why, ..audit::own("server-stopped") });
    audited.audit().close().await;
    let _ = std::fs::remove_file(&admin_path);
    end
}

/// Takes up the leases of an earlier run; `lost` are those that this server cannot serve.
async fn take_up(pool: &Arc<Pool>, lost: &[Lease]) {
    if let Some(why) = pool.registry().draining().await {
        warn!("draining, as before the restart: {why}; `gpuserver drain --end` allows new leases again");
    }
    pool.note_unseen_grants(lost).await;
    pool.ended(lost, "since the restart, one of its GPUs is not served, or is shared in another way");
    pool.record_unseen_ends().await;
    health::check_compute_modes(pool).await;
    pool.resume().await;
}

/// Starts the server's tasks. None ends by itself, except the data port's after `closed`.
fn start_tasks(
    pool: &Arc<Pool>,
    config: Config,
    data: TcpListener,
    admin_socket: admin::Socket,
    cache: Option<Cache>,
    closed: watch::Receiver<bool>,
) -> JoinSet<()> {
    let may_be_clear: data::MayBeClear = Arc::new(move |ip| config.may_be_clear(ip));
    let mut tasks = JoinSet::new();
    let served = (pool.supervisor().clone(), pool.endpoints().clone());
    tasks.spawn(data::serve(data, served, may_be_clear, closed));
    tasks.spawn(admin::serve(admin_socket, pool.clone()));
    tasks.spawn(housekeeping(pool.clone()));
    tasks.spawn(pool.clone().tell_of_workers());
    tasks.spawn(pool.clone().follow_peers());
    if let Some(cache) = cache {
        tasks.spawn(keep_small(cache, pool.supervisor().clone()));
    }
    tasks.spawn(health::watch(pool.clone(), pool.monitor().clone()));
    tasks.spawn(pool.clone().serve_parking());
    tasks
}

/// Logs the configuration with which the server starts.
fn report(config: &Config) {
    info!("gpuserver {}: starting as {}", env!("CARGO_PKG_VERSION"), config.name);
    for (key, value, origin) in &config.report {
        info!("{key} = {value} ({origin})");
    }
    for warning in &config.warnings {
        warn!("configuration: {warning}");
    }
}

fn open_signer(config: &Config) -> anyhow::Result<Arc<Signer>> {
    let opened = Link::of_server(config.signer.as_deref(), &config.state_dir, &config.name);
    let opened = opened.and_then(Signer::open).map_err(|e| match e.why {
        Why::Missing => anyhow::Error::from(ConfigError::new(config.origin("state_dir"), e.to_string())),
        _ => e.into(),
    });
    Ok(Arc::new(opened?))
}

/// The worker's program, the driver, and the GPUs to serve.
struct Host {
    worker: PathBuf,
    starter: Starter,
    /// User of all that the starter starts.
    uid: u32,
    /// Control groups of workers.
    groups: WorkerGroups,
    /// The starter's folder of compiled code.
    code: Option<(Desk, PathBuf)>,
    driver: PathBuf,
    probe: Probe,
    gpus: Vec<Gpu>,
    mps: Option<mps::Settings>,
}

impl Host {
    /// Asks the driver for its GPUs; `running`: an earlier server's workers use them.
    async fn discover(config: &Config, running: bool) -> anyhow::Result<Self> {
        let worker = spawn::worker_program();
        if !spawn::stack_can_be_unlimited() {
            warn!(
                "stack limit: cannot be lifted for workers: device addresses will conflict with those of some programs; \
                 set LimitSTACK=infinity"
            );
        }
        let as_config = |e: DiscoveryError| e.placed(config);
        let driver = discovery::find_driver(config.driver.as_deref()).map_err(as_config)?;
        info!("driver {}, worker program {}", driver.display(), worker.display());
        let starter = Starter::new(config.starter.as_deref(), &worker);
        let Places { uid, groups, code, folders } = places(config, &starter).await?;
        let mut probe = discovery::probe(&starter, &driver).await.map_err(as_config)?;
        discovery::settle_contexts(&config.state_dir, &mut probe, running)?;
        let gpus = discovery::choose(&config.gpus, probe.devices.clone()).map_err(as_config)?;
        let gpus = discovery::offer(config.gpu_memory, gpus);
        let gpus = discovery::share(config.sharing, &config.gpu_sharing, &probe.devices, gpus);
        let gpus = gpus.map_err(as_config)?;
        let mps = discovery::mps_settings(config, &driver, &gpus, folders, uid).map_err(as_config)?;
        info!(
            "driver version {}, CUDA {}.{}",
            probe.driver_version.as_deref().unwrap_or("unknown"),
            probe.cuda_version / 1000,
            probe.cuda_version % 1000 / 10
        );
        for gpu in &gpus {
            info!(
                "GPU {}: serving {}, {} MiB, {}",
                gpu.uuid,
                gpu.name,
                gpu.memory_bytes >> 20,
                gpu.sharing.as_str()
            );
        }
        Ok(Self { worker, starter, uid, groups, code, driver, probe, gpus, mps })
    }

    async fn settle_isolation(
        &self,
        config: &Config,
        cache: Option<&Cache>,
    ) -> Result<Decision, ConfigError> {
        let images = Cache::images_of(config);
        // A mode keeps another user out of `state_dir`, whatever the restrictions do.
        let code = cache.filter(|_| self.starter.desk().is_some()).map(Cache::code_folder);
        let hidden = [code.as_deref().unwrap_or(&config.state_dir), &*images];
        if self.uid == 0 {
            warn!(
                "workers run as root: a program that takes over its worker has root's rights, less what isolation \
                 denies; start gpuserver.service, or run gpuserver as another user"
            );
        }
        isolation::settle(config, &hidden, &self.starter, &self.driver, &self.gpus).await
    }
}

/// User and places of workers: the starter's, or this process's.
struct Places {
    uid: u32,
    groups: WorkerGroups,
    code: Option<(Desk, PathBuf)>,
    /// Folders of the MPS daemons; `None`: the starter has no place for them.
    folders: Option<Folders>,
}

async fn places(config: &Config, starter: &Starter) -> anyhow::Result<Places> {
    let groups = Cgroups::of_this_unit(cgroups::SERVER);
    let Some(desk) = starter.desk() else {
        let folders = Some(Folders::Here(config.runtime_dir.join("mps")));
        let groups = WorkerGroups::new(groups, None);
        return Ok(Places { uid: nix::unistd::geteuid().as_raw(), groups, code: None, folders });
    };
    let asked = desk.clone();
    let introduction = tokio::task::spawn_blocking(move || asked.introduction()).await?;
    let Introduction { uid, limits, bounds, cache, mps } = introduction.context("starter")?;
    Ok(Places {
        uid,
        groups: WorkerGroups::new(groups, Some(Groups::new(desk.clone(), limits, bounds)?)),
        // Without a folder, the cache does not open, and the log has the starter's reason.
        code: Some((desk.clone(), cache.unwrap_or_default().into())),
        folders: mps.map(|folder| Folders::There(desk, folder.into())),
    })
}

/// Locks the state directory; waits for a child that a killed server has forked.
///
/// The child has the server's descriptors until it executes a worker, on a busy host for seconds.
async fn lock_state(folder: &Path) -> Result<store::Lock, store::StoreError> {
    let end = Instant::now() + LOCK_TIMEOUT;
    loop {
        match store::lock(folder) {
            Err(store::StoreError::Locked(_)) if Instant::now() < end => {
                tokio::time::sleep(LOCK_INTERVAL).await;
            }
            locked => return locked,
        }
    }
}

/// Locks the GPUs against other servers of this host, if the configuration names a folder.
fn lock_gpus(config: &Config, gpus: &[Gpu]) -> anyhow::Result<Option<GpuLocks>> {
    let Some(folder) = &config.lock_dir else { return Ok(None) };
    let uuids: Vec<&str> = gpus.iter().map(|g| g.uuid.as_str()).collect();
    let common = Path::new(gpu_lock::COMMON);
    if let Some(gpu) = uuids.iter().find(|gpu| folder != common && gpu_lock::is_taken(common, gpu)) {
        let error = format!(
            "gpus: GPU {gpu} is served by another server of this machine; a GPU has one server: use a lease of that \
             server, or list other GPUs in `gpus`"
        );
        return Err(ConfigError::new(config.origin("gpus"), error).into());
    }
    let pid = std::process::id();
    let who = format!("gpuserver {} (pid {pid}, {})", config.name, config.state_dir.display());
    let taken = gpu_lock::take(folder, &uuids, &who);
    Ok(Some(taken.map_err(|m| ConfigError::new(config.origin("gpus"), format!("gpus: {m}")))?))
}

/// The listening sockets of the network.
struct Ports {
    control: TcpListener,
    data: TcpListener,
    metrics: Option<TcpListener>,
}

impl Ports {
    /// Takes over the sockets of an earlier server, and binds the others.
    async fn bind(config: &Config, left: &mut Left, store: &Store) -> anyhow::Result<Self> {
        let (ip, port, data_ports) = (config.listen.ip(), config.listen.port(), config.data_ports);
        let control = match left.listener(CONTROL, |a| a.ip() == ip && (a.port() == port || port == 0)) {
            Some(socket) => socket,
            None => TcpListener::bind(config.listen)
                .await
                .map_err(|e| in_use(config, "listen", config.listen, e))?,
        };
        let in_range = |port: u16| (data_ports.0..=data_ports.1).contains(&port) || data_ports == (0, 0);
        let data = match left.listener(DATA, |a| a.ip() == ip && in_range(a.port())) {
            Some(socket) => socket,
            None => data::bind(ip, data_ports)
                .await
                .map_err(|e| in_use(config, "data_ports", SocketAddr::new(ip, data_ports.0), e))?,
        };
        store.keep_listener(CONTROL, control.as_fd());
        store.keep_listener(DATA, data.as_fd());
        let metrics = match config.metrics_listen {
            Some(address) => {
                let bound = metrics::bind(address).await;
                Some(bound.map_err(|e| in_use(config, "metrics_listen", address, e))?)
            }
            None => None,
        };
        Ok(Self { control, data, metrics })
    }
}

/// A server that is ready: its tasks, and the way to close its ports.
struct Running {
    pool: Arc<Pool>,
    supervisor: Supervisor,
    tasks: JoinSet<()>,
    control: JoinHandle<()>,
    closing: watch::Sender<bool>,
}

impl Running {
    /// Stops the server, or hands it over to the next one. `end`: why it stops.
    async fn stop(
        mut self,
        end: anyhow::Result<End>,
        stop: &mut Stop,
        can_hand_over: bool,
    ) -> anyhow::Result<End> {
        notify(&[sd_notify::NotifyState::Stopping]);
        let end = match end {
            Ok(end @ (End::Stopped | End::HandedOver)) => Ok(drain(&self.pool, stop, end).await),
            end => end,
        };
        // After an error systemd starts the unit again, so that the server hands over, too.
        if matches!(end, Ok(End::HandedOver)) || end.is_err() && can_hand_over {
            self.hand_over().await;
            return end;
        }
        notify(&[sd_notify::NotifyState::Status("stopping workers")]);
        if end.is_ok() {
            self.pool.announce_stop();
        }
        let _ = self.closing.send(true);
        for program in self.supervisor.programs(true) {
            warn!("stopping: {program} loses its GPUs");
        }
        self.tasks.abort_all();
        let forced = tokio::select! {
            biased;
            () = async {}, if matches!(end, Ok(End::Forced)) => true,
            () = self.supervisor.close("the server stops") => false,
            () = stop.forced() => {
                warn!("stopping: forced to quit; killing all workers");
                true
            }
        };
        if forced {
            self.supervisor.kill_all().await;
        } else {
            let _ = timeout(Duration::from_secs(1), self.control).await;
        }
        info!("stopped");
        if forced { Ok(End::Forced) } else { end }
    }

    /// Leaves sockets and workers to the next server.
    async fn hand_over(mut self) {
        notify(&[sd_notify::NotifyState::Status("handing programs over to the next server")]);
        self.pool.settled(MOVE_TIMEOUT).await;
        // The kernel queues later connections for the next server.
        self.control.abort();
        let _ = self.closing.send(true);
        let _ = timeout(Duration::from_secs(1), self.tasks.join_next()).await;
        self.tasks.abort_all();
        let programs = self.supervisor.programs(true).len() - self.supervisor.programs(false).len();
        self.supervisor.hand_over().await;
        info!("stopped; {programs} programs continue, and the next server takes them over");
    }
}

/// Waits for running programs for at most `drain_timeout`, and reports them.
///
/// Before a handover it waits only for programs that the next server cannot take over. A server
/// that stops also refuses new leases and warns the clients.
async fn drain(pool: &Pool, stop: &mut Stop, ends: End) -> End {
    let limit = pool.config().drain_timeout;
    let all = ends == End::Stopped;
    if all {
        pool.registry().stop().await;
    }
    let end = Instant::now() + limit;
    let mut told = Vec::new();
    loop {
        let programs = pool.supervisor().programs(all);
        let left = end.saturating_duration_since(Instant::now());
        if programs.is_empty() || left.is_zero() {
            return ends;
        }
        if all && told.is_empty() {
            pool.warn_all(left, "the GPU server stops").await;
        }
        if programs != told {
            let waits = format!("waiting up to {} s for {}", left.as_secs(), programs.join(", "));
            info!("stopping: {waits}; `gpuserver stop --force` or SIGQUIT kills them at once");
            notify(&[sd_notify::NotifyState::Status(&waits)]);
            told = programs;
        }
        tokio::select! {
            () = tokio::time::sleep(left.min(Duration::from_millis(200))) => {}
            () = stop.forced() => {
                warn!("stopping: forced to quit; killing all workers");
                return End::Forced;
            }
        }
    }
}

fn in_use(config: &Config, key: &'static str, address: SocketAddr, e: std::io::Error) -> anyhow::Error {
    match e.kind() {
        std::io::ErrorKind::AddrInUse | std::io::ErrorKind::AddrNotAvailable => anyhow::Error::from(
            ConfigError::new(config.origin(key), format!("{key}: cannot listen on {address}: {e}")),
        ),
        _ => anyhow!(e).context(format!("{key}: cannot listen on {address}")),
    }
}

fn notify(states: &[sd_notify::NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(states) {
        warn!("systemd: notification failed: {e}");
    }
}

/// Returns the status line for `systemctl status`.
async fn status(pool: &Pool) -> String {
    let gpus = pool.registry().gpus().await;
    let leased = gpus.iter().filter(|g| !g.leases.is_empty()).count();
    let leases = pool.registry().count().await;
    let programs = pool.supervisor().workers().iter().filter(|w| w.process.is_some()).count();
    format!("{leased} of {} GPUs leased ({leases} leases), {programs} programs", gpus.len())
}

/// Raises the limit of open files: each connection, worker and file needs a descriptor.
fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(e) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        warn!("open files: the limit stays {soft}: {e}; set LimitNOFILE to at least {hard}");
    }
}

async fn housekeeping(pool: Arc<Pool>) {
    let mut records = Instant::now();
    let mut told = status(&pool).await;
    loop {
        pool.tick().await;
        if records <= Instant::now() {
            pool.forget_records();
            records += Duration::from_secs(3600);
        }
        let now = status(&pool).await;
        if now != told {
            notify(&[sd_notify::NotifyState::Status(&now)]);
            told = now;
        }
        let pause = pool.registry().next_expiry().await.unwrap_or(Duration::MAX);
        tokio::time::sleep(pause.clamp(Duration::from_millis(20), Duration::from_millis(500))).await;
    }
}

/// Bounds the cache at intervals, on a blocking thread.
async fn keep_small(cache: Cache, supervisor: Supervisor) {
    let mut trimmed = None;
    loop {
        let began = Instant::now();
        let first = trimmed.is_none();
        let due = trimmed.is_none_or(|at| began.duration_since(at) >= TRIM_INTERVAL);
        if due {
            trimmed = Some(began);
        }
        let (cache, supervisor) = (cache.clone(), supervisor.clone());
        let bound = move || {
            if due {
                supervisor.drop_unused_code(first);
            }
            if supervisor.bound_compiled() || due {
                cache.trim(clock::wall());
            }
        };
        let _ = tokio::task::spawn_blocking(bound).await;
        // Large folders take at most a fifth of one processor.
        tokio::time::sleep(MEASURE_INTERVAL.max(began.elapsed() * 4)).await;
    }
}

async fn serve_control(
    listener: TcpListener,
    tls: rustls::ServerConfig,
    pool: Arc<Pool>,
    mut closed: watch::Receiver<bool>,
) {
    let (accepted, connections) = mpsc::channel(64);
    // Dropping the set ends the task together with this function.
    let mut accepting = JoinSet::new();
    accepting.spawn(accept_control(listener, TlsAcceptor::from(Arc::new(tls)), accepted, pool.clone()));
    let (service, administration) = (Service(pool.clone()), admin::remote::Service(pool));
    let served = tonic::transport::Server::builder()
        // A client counts as watching while its connection exists; keepalive detects a lost one.
        .http2_keepalive_interval(Some(Duration::from_secs(3)))
        .http2_keepalive_timeout(Some(Duration::from_secs(7)))
        .max_concurrent_streams(Some(256))
        .http2_max_header_list_size(Some(16 << 10))
        .add_service(EnrolmentServer::new(service.clone()).max_decoding_message_size(MAX_MESSAGE))
        .add_service(AdministrationServer::new(administration).max_decoding_message_size(MAX_MESSAGE))
        .add_service(IssuerServer::new(service.clone()).max_decoding_message_size(MAX_ISSUER_MESSAGE))
        .add_service(StatementsServer::new(service.clone()).max_decoding_message_size(MAX_MESSAGE))
        .add_service(PoolServer::new(service).max_decoding_message_size(MAX_MESSAGE))
        .serve_with_incoming_shutdown(ReceiverStream::new(connections), async move {
            let _ = closed.wait_for(|closed| *closed).await;
        })
        .await;
    if let Err(e) = served {
        error!("control port: serving failed: {e}; clients cannot reach this server");
    }
}

async fn accept_control(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    accepted: mpsc::Sender<std::io::Result<Guarded>>,
    pool: Arc<Pool>,
) {
    let (clients, holders) = (Arc::new(Semaphore::new(MAX_CLIENTS)), Holders::default());
    let strangers = PeerSlots::new(MAX_STRANGERS, QUEUE_GRACE);
    let quiet = Arc::new(LogThrottle::default());
    let serve = |socket: TcpStream, peer: SocketAddr, mut handshake| {
        let (acceptor, accepted, quiet) = (acceptor.clone(), accepted.clone(), quiet.clone());
        let (clients, holders, strangers) = (clients.clone(), holders.clone(), strangers.clone());
        let pool = pool.clone();
        async move {
            let _ = socket.set_nodelay(true);
            let shaken = tokio::select! {
                shaken = timeout(HANDSHAKE_TIMEOUT, acceptor.accept(socket)) => shaken,
                () = &mut handshake => Ok(Err(std::io::Error::other("another connection needed its slot"))),
            };
            let why = match shaken {
                Ok(Ok(stream)) => {
                    // The holder of an expired certificate may only renew it.
                    let place = match shown(&stream).and_then(|der| pool.holder(der)) {
                        None => strangers.enter(peer.ip()).await.map(Place::stranger),
                        Some(holder) => holders.enter(holder).and_then(|holding| {
                            Some(Place::Known(clients.try_acquire_owned().ok()?, holding))
                        }),
                    };
                    match place {
                        Some(place) => {
                            let _ = accepted.send(Ok(Guarded::new(stream, place))).await;
                            return;
                        }
                        None => "too many connections".into(),
                    }
                }
                Ok(Err(e)) => e.to_string(),
                Err(_) => "the TLS handshake took more than 10 s".into(),
            };
            if let Some(more) = quiet.may() {
                warn!("control port: connection from {peer} refused: {why}{more}");
            }
        }
    };
    let handshakes = PeerSlots::new(MAX_HANDSHAKES, QUEUE_GRACE);
    accept_loop("control port", listener, handshakes, &quiet, std::future::pending::<()>(), serve).await;
}

/// Requests to end the server: signals, and `gpuserver stop`.
struct Stop {
    term: tokio::signal::unix::Signal,
    int: tokio::signal::unix::Signal,
    quit: tokio::signal::unix::Signal,
    hand_over: tokio::signal::unix::Signal,
    /// Whether a next server can take over workers.
    keeps: bool,
    hup: tokio::signal::unix::Signal,
    /// Stop that an administrator requested, once the pool is open; the value: whether forced.
    asked: Option<watch::Receiver<Option<bool>>>,
}

impl Stop {
    fn listen(keeps: bool) -> std::io::Result<Self> {
        Ok(Self {
            keeps,
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            hand_over: signal(SignalKind::user_defined2())?,
            hup: signal(SignalKind::hangup())?,
            asked: None,
        })
    }

    /// Waits for a request to end the server; at SIGHUP reloads the configuration.
    async fn wait_and(&mut self, pool: &Pool) -> End {
        loop {
            match self.next().await {
                Some(end) => return end,
                None => reload(pool).await,
            }
        }
    }

    async fn wait(&mut self) -> End {
        loop {
            match self.next().await {
                Some(end) => return end,
                None => warn!("SIGHUP ignored: the server is still starting"),
            }
        }
    }

    /// Waits for the next request; `None`: SIGHUP.
    async fn next(&mut self) -> Option<End> {
        tokio::select! {
            // systemd always sends SIGTERM after SIGUSR2, which must win.
            biased;
            _ = self.hand_over.recv() => {
                if self.keeps {
                    return Some(End::HandedOver);
                }
                warn!("SIGUSR2: no descriptor store keeps programs for a next server; stopping");
                Some(End::Stopped)
            }
            _ = self.quit.recv() => Some(End::Forced),
            _ = self.term.recv() => Some(End::Stopped),
            _ = self.int.recv() => Some(End::Stopped),
            force = asked_to(&mut self.asked, |_| true) => {
                Some(if force { End::Forced } else { End::Stopped })
            }
            _ = self.hup.recv() => None,
        }
    }

    async fn forced(&mut self) {
        tokio::select! {
            _ = self.quit.recv() => {}
            _ = asked_to(&mut self.asked, |force| force) => {}
        }
    }
}

/// Waits until an administrator asks for a stop of the wanted kind.
async fn asked_to(asked: &mut Option<watch::Receiver<Option<bool>>>, wanted: fn(bool) -> bool) -> bool {
    if let Some(asked) = asked
        && let Ok(now) = asked.wait_for(|now| now.is_some_and(wanted)).await
    {
        return *now == Some(true);
    }
    std::future::pending().await
}

async fn reload(pool: &Pool) {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    let usec = now.map_or(0, |t| t.tv_sec() as i128 * 1_000_000 + i128::from(t.tv_nsec()) / 1000);
    notify(&[
        sd_notify::NotifyState::Reloading,
        sd_notify::NotifyState::Custom(&format!("MONOTONIC_USEC={usec}")),
    ]);
    let read = pool.read_again().await;
    let event = audit::own("configuration-read");
    match read {
        Ok((holds, waits)) if holds.is_empty() && waits.is_empty() => {
            info!("configuration: reloaded; no key changed");
        }
        Ok((holds, waits)) => {
            let waits = waits.into_iter().map(|key| format!("{key} (after a restart)"));
            let detail = holds.into_iter().chain(waits).collect::<Vec<_>>().join("; ");
            pool.audit().note(audit::Event { detail, ..event });
        }
        Err(e) => {
            error!("configuration: not reloaded: {e}; {}", e.hint);
            pool.audit().note(audit::Event { result: e.code, detail: e.message, ..event });
        }
    }
    notify(&[sd_notify::NotifyState::Ready]);
}
