//! NVIDIA's Multi-Process Service: kernels of several workers share a GPU at the same time.
//!
//! A *domain* is the unit that shares a fault: the leases of one client on the same GPUs, or of all
//! clients with `mps_domain`. Each domain has its own control daemon, in private folders. The
//! daemon starts with the domain's first lease, restarts when it dies, and quits after the last
//! lease and worker. No lease is in two domains. Domains send events about workers over a channel;
//! see `supervise::mps`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::supervise::{DeviceLimit, Isolation};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;
use tracing::warn;

use self::domain::{Domain, Inner, Key, Phase};
pub use self::domain::{FaultView, Seat};
pub use self::environment::variables;
pub use self::folder::Folders;
pub use self::paths::check_folder;
use self::view::view;
pub use self::view::{DomainView, ServerView};
use crate::clock::Clock;
use crate::lease::Lease;
use crate::spawn::Spawner;
use crate::starter::link::Starter;
use crate::starter::mps::FolderAct;

mod clear;
pub mod control;
mod domain;
mod environment;
mod fault;
pub mod folder;
mod log;
mod paths;
mod run;
mod view;

/// Contexts that one MPS server serves, with drivers up to 580 (measured: the 49th gets error 808).
pub const MAX_CLIENTS: usize = 48;
/// Time that a worker waits for its domain's daemon.
const SEAT_TIMEOUT: Duration = Duration::from_secs(45);
/// Time that a daemon may take to quit.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Settings of MPS on this server.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Path of `nvidia-cuda-mps-control`.
    pub program: PathBuf,
    /// Path of the driver library.
    pub driver: PathBuf,
    /// Folder of what a daemon writes to its standard streams.
    pub output: PathBuf,
    /// Folders of the daemons.
    pub folders: Folders,
    /// User of workers and daemons.
    pub uid: u32,
    /// Whether all clients share a domain.
    pub shared: bool,
}

/// Event of one generation of a domain's daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DomainEvent {
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

struct Shared {
    settings: Settings,
    starter: Starter,
    isolation: Isolation,
    spawner: Spawner,
    clock: Arc<dyn Clock>,
    domains: Mutex<HashMap<Key, Arc<Domain>>>,
    numbers: AtomicU32,
    happened: mpsc::UnboundedSender<DomainEvent>,
    closed: Notify,
}

/// All domains of this server. Cheap to clone.
#[derive(Clone)]
pub struct Mps(Arc<Shared>);

impl Mps {
    /// Creates the domains' owner, and kills processes that an earlier run left behind.
    ///
    /// The worker's program takes restrictions, unless `isolation` is off, before it becomes
    /// NVIDIA's.
    pub fn new(
        settings: Settings,
        starter: Starter,
        isolation: Isolation,
        spawner: Spawner,
        clock: Arc<dyn Clock>,
    ) -> (Self, mpsc::UnboundedReceiver<DomainEvent>) {
        if let Err(e) = settings.folders.act(&FolderAct::Clear) {
            warn!("MPS: folder of the daemons not cleared: {e}");
        }
        let (happened, told) = mpsc::unbounded_channel();
        let shared = Shared {
            settings,
            starter,
            isolation,
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
}
