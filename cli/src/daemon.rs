//! Client of the daemon's D-Bus API.

use std::collections::{BTreeMap, HashMap};

use gpusession_common::units::Memory;
use gpusession_common::words::{Priority, Sharing};
use gpusessiond::bus::{NAME, PATH};
use gpusessiond::leases::Spec;
use gpusessiond::units::path_element;
use serde::Deserialize;
use zbus::{DBusError as _, OwnedFd, OwnedObjectPath, Variant, proxy};

use crate::exit::{Failure, Result, code};

// No call starts a daemon that root has stopped: `Daemon::connect` decides that.
#[proxy(
    interface = "org.gpusession1.Manager",
    default_service = "org.gpusession1",
    default_path = "/org/gpusession1"
)]
trait Manager {
    #[zbus(no_autostart)]
    fn describe(&self) -> zbus::Result<String>;
    #[zbus(allow_interactive_auth, no_autostart)]
    fn create_lease(
        &self,
        request: HashMap<&str, Variant<'_>>,
        flags: u64,
    ) -> zbus::Result<(String, OwnedObjectPath, OwnedFd)>;
    #[zbus(allow_interactive_auth, no_autostart)]
    fn release_lease(&self, id: &str) -> zbus::Result<()>;
    #[zbus(allow_interactive_auth, no_autostart)]
    fn reload(&self) -> zbus::Result<()>;
    #[zbus(name = "GetLeaseByPIDFD", no_autostart)]
    fn get_lease_by_pidfd(&self, pidfd: zbus::wire::Fd<'_>) -> zbus::Result<Vec<OwnedObjectPath>>;
    #[zbus(no_autostart)]
    fn get_lease(&self, id: &str) -> zbus::Result<OwnedObjectPath>;
}

#[proxy(interface = "org.gpusession1.Lease", default_service = "org.gpusession1")]
trait Lease {
    #[zbus(allow_interactive_auth, no_autostart)]
    fn park(&self) -> zbus::Result<()>;
    #[zbus(allow_interactive_auth, no_autostart)]
    fn unpark(&self) -> zbus::Result<()>;
    #[zbus(no_autostart)]
    fn get_environment(&self) -> zbus::Result<HashMap<String, String>>;
}

/// The fields of `Describe` that the command line needs.
#[derive(Debug, Clone, Deserialize)]
pub struct Described {
    pub version: String,
    pub state: String,
    pub environment: BTreeMap<String, String>,
    pub leases_on_demand: bool,
    pub boot_allocation_complete: bool,
    pub gpus_wanted: u32,
    pub gpus_leased: u32,
    pub leases: Vec<DescribedLease>,
    pub servers: Vec<DescribedServer>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct DescribedLease {
    pub id: String,
    pub name: String,
    pub state: String,
    pub uid: Option<u32>,
    pub user: String,
    pub gpus: u32,
    pub server: String,
    pub processes: u32,
    pub transport: String,
    pub transport_reason: String,
    pub trouble: Option<String>,
    pub trouble_kind: Option<String>,
    pub position: Option<u32>,
    pub waiting: Option<u32>,
    pub retry_in_usec: Option<u64>,
    /// Microseconds since the epoch at which it ends unless renewed; 0 while pending.
    #[serde(default)]
    pub expires_usec: u64,
    /// Empty from a daemon of an earlier version.
    #[serde(default)]
    pub failures: Vec<DescribedFailure>,
    pub devices: Vec<DescribedDevice>,
}

/// A program that could not begin on a lease, or lost its GPUs.
#[derive(Debug, Clone, Deserialize)]
pub struct DescribedFailure {
    pub usec: u64,
    pub uid: u32,
    pub user: String,
    pub pid: u32,
    pub program: String,
    pub running: bool,
    pub reason: String,
}

#[derive(Debug, Clone, Deserialize)]
pub struct DescribedDevice {
    pub uuid: String,
    pub name: String,
    pub limit_bytes: u64,
    pub memory_bytes: u64,
}

#[derive(Debug, Clone, Deserialize)]
pub struct DescribedServer {
    pub name: String,
    pub address: String,
    pub state: String,
    pub trouble: Option<String>,
    pub rtt_usec: u64,
    pub gpus: u32,
    pub gpus_free: u32,
}

/// A new lease; unless it is persistent, it lasts as long as `fd` is open.
pub struct Created {
    pub id: String,
    #[allow(dead_code, reason = "held open")]
    pub fd: OwnedFd,
}

/// Upper bound on retries until two answers of the daemon describe the same leases.
const DESCRIBE_TRIES: u32 = 20;

/// A connection to the daemon.
pub struct Daemon {
    connection: zbus::Connection,
    manager: ManagerProxy<'static>,
}

impl Daemon {
    /// Connects to the system bus; the first call shows whether the daemon runs.
    ///
    /// If its socket exists, the daemon is starting, or starts on demand: this waits for it, or
    /// starts it.
    pub async fn connect() -> Result<Self> {
        let connection = zbus::Connection::system().await.map_err(|e| {
            Failure::new(code::UNREACHABLE, format!("cannot connect to the system bus: {e}"))
                .hint("the daemon is reached over D-Bus; `gpusession run --server HOST` needs neither")
        })?;
        // A stop by root closes the sockets; they stay while the daemon restarts, or is started on
        // demand.
        if gpusessiond::paths::grant_socket().exists()
            && let Ok(bus) = zbus::fdo::DBusProxy::new(&connection).await
            && let Ok(name) = zbus::names::WellKnownName::try_from(NAME)
        {
            // A failed start is in the journal; the first call reports that the daemon does not
            // run.
            let _ = bus.start_service_by_name(name, 0).await;
        }
        let manager = ManagerProxy::builder(&connection)
            .destination(NAME)
            .path(PATH)
            .cache_properties(zbus::proxy::CacheProperties::No)
            .build()
            .await
            .map_err(of_bus)?;
        Ok(Self { connection, manager })
    }

    /// Calls `Describe`, and returns its JSON unchanged.
    pub async fn describe_raw(&self) -> Result<serde_json::Value> {
        let text = self.manager.describe().await.map_err(of_bus)?;
        serde_json::from_str(&text).map_err(|e| odd(&e))
    }

    /// Calls `Describe`.
    pub async fn describe(&self) -> Result<Described> {
        serde_json::from_value(self.describe_raw().await?).map_err(|e| odd(&e))
    }

    /// Calls `CreateLease`.
    pub async fn create(&self, spec: &Spec, persistent: bool) -> Result<Created> {
        let mut request: HashMap<&str, Variant<'_>> = HashMap::new();
        request.insert("Count", spec.gpus.into());
        match spec.memory {
            Memory::Percent(percent) => request.insert("MemoryFraction", (percent / 100.0).into()),
            Memory::Bytes(bytes) => request.insert("MemoryBytes", bytes.into()),
        };
        match (spec.sm_count, spec.sm_auto) {
            (0, false) => request.insert("SMPercent", spec.sm_percent.into()),
            (0, true) => request.insert("SMAuto", true.into()),
            (count, _) => request.insert("SMCount", count.into()),
        };
        if spec.priority != Priority::Normal {
            request.insert("Priority", spec.priority.as_str().into());
        }
        if let Some(sharing) = spec.sharing.map(Sharing::as_str) {
            request.insert("Sharing", sharing.into());
        }
        if !spec.model.is_empty() {
            request.insert("Model", spec.model.as_str().into());
        }
        if let Some(ttl) = spec.ttl {
            request.insert("TTLUSec", (ttl.as_micros() as u64).into());
        }
        request.insert("Who", spec.who.as_str().into());
        request.insert("Why", spec.why.as_str().into());
        let (id, _path, fd) =
            self.manager.create_lease(request, u64::from(persistent)).await.map_err(of_bus)?;
        Ok(Created { id, fd })
    }

    /// Calls `ReleaseLease`.
    pub async fn release(&self, id: &str) -> Result<()> {
        self.manager.release_lease(id).await.map_err(of_bus)
    }

    /// Calls `ReleaseLease`; a lease that does not exist any more counts as released.
    pub async fn release_if_there(&self, id: &str) -> Result<()> {
        match self.manager.release_lease(id).await {
            Err(zbus::Error::MethodError(name, ..)) if name == NO_SUCH_LEASE => Ok(()),
            other => other.map_err(of_bus),
        }
    }

    /// Calls `Reload`.
    pub async fn reload(&self) -> Result<()> {
        self.manager.reload().await.map_err(of_bus)
    }

    /// Calls `Describe`, and returns with it the ids of the leases that a child of this process
    /// gets.
    pub async fn describe_mine(&self) -> Result<(Described, Vec<String>)> {
        let pidfd = gpusessiond::peer::pidfd_open(std::process::id())
            .map_err(|e| Failure::new(code::FAILED, format!("cannot open a pidfd of this process: {e}")))?;
        let mut tries = 0;
        loop {
            tries += 1;
            let described = self.describe().await?;
            let fd = zbus::wire::Fd::from(std::os::fd::AsFd::as_fd(&pidfd));
            let paths = self.manager.get_lease_by_pidfd(fd).await.map_err(of_bus)?;
            let is_mine = |lease: &&DescribedLease| {
                let element = path_element(&lease.id);
                paths.iter().any(|p| p.as_str().rsplit('/').next() == Some(element.as_str()))
            };
            let mine: Vec<_> = described.leases.iter().filter(is_mine).map(|l| l.id.clone()).collect();
            // The grant of a lease changes its id, and may have come between the two answers.
            if mine.len() == paths.len() || tries == DESCRIBE_TRIES {
                return Ok((described, mine));
            }
        }
    }

    async fn lease(&self, id: &str) -> Result<LeaseProxy<'static>> {
        let path = self.manager.get_lease(id).await.map_err(of_bus)?;
        LeaseProxy::builder(&self.connection)
            .path(path)
            .cache_properties(zbus::proxy::CacheProperties::No)
            .build()
            .await
            .map_err(of_bus)
    }

    /// Calls `Park` or `Unpark`.
    pub async fn park(&self, id: &str, park: bool) -> Result<()> {
        let lease = self.lease(id).await?;
        if park { lease.park().await } else { lease.unpark().await }.map_err(of_bus)
    }

    /// Returns the variables that the daemon sets for programs on a lease.
    pub async fn environment(&self, id: &str) -> Result<HashMap<String, String>> {
        self.lease(id).await?.get_environment().await.map_err(of_bus)
    }
}

/// Returns `true` if the daemon runs, without starting it.
pub async fn runs() -> bool {
    let asked = async {
        let connection = zbus::Connection::system().await?;
        let bus = zbus::fdo::DBusProxy::new(&connection).await?;
        zbus::Result::Ok(bus.name_has_owner(zbus::names::BusName::try_from(NAME)?).await?)
    };
    asked.await.unwrap_or(false)
}

fn odd(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(code::FAILED, format!("cannot understand the daemon's answer: {error}"))
        .hint("daemon and command have different versions: restart gpusession.service")
}

fn of_bus(error: zbus::Error) -> Failure {
    let (name, text) = match &error {
        zbus::Error::MethodError(name, text, _) => (name.to_string(), text.clone()),
        zbus::Error::FDO(error) => (error.name().to_string(), error.description().map(str::to_owned)),
        _ => {
            return Failure::new(code::UNREACHABLE, format!("the daemon does not answer: {error}"))
                .hint(DAEMON_HINT);
        }
    };
    let message = text.unwrap_or_else(|| name.clone());
    let (code, hint) = match name.as_str() {
        "org.gpusession1.Error.NoCapacity" => {
            (code::NO_CAPACITY, "`gpusession status` shows what is free; try again later")
        }
        "org.gpusession1.Error.QuotaExceeded" => {
            (code::NOT_ALLOWED, "ask for less, or ask the pool's administrator for a higher limit")
        }
        "org.freedesktop.DBus.Error.AccessDenied" => (
            code::NOT_ALLOWED,
            "this machine's administrator decides ([access] in /etc/gpusession/gpusession.toml)",
        ),
        "org.gpusession1.Error.ServerUnreachable" | "org.gpusession1.Error.NotReady" => {
            (code::UNREACHABLE, "`gpusession status` shows which server does not answer")
        }
        "org.freedesktop.DBus.Error.NotSupported" => (
            code::FAILED,
            "`gpusession status` shows how many GPUs the servers have; ask for less or another model",
        ),
        NO_SUCH_LEASE => (code::FAILED, "`gpusession list` shows all leases"),
        "org.freedesktop.DBus.Error.InvalidArgs" => (code::USAGE, ""),
        "org.freedesktop.DBus.Error.InvalidFileContent" => {
            (code::CONFIGURATION, "the configuration in force stays unchanged")
        }
        "org.freedesktop.DBus.Error.ServiceUnknown"
        | "org.freedesktop.DBus.Error.NameHasNoOwner"
        | "org.freedesktop.DBus.Error.NoReply"
        | "org.freedesktop.DBus.Error.Disconnected" => {
            return Failure::new(code::UNREACHABLE, "the daemon is not running").hint(DAEMON_HINT);
        }
        _ => (code::FAILED, ""),
    };
    let failure = Failure::new(code, message);
    if hint.is_empty() { failure } else { failure.hint(hint) }
}

const NO_SUCH_LEASE: &str = "org.gpusession1.Error.NoSuchLease";

const DAEMON_HINT: &str = "`systemctl status gpusession` shows why; `systemctl start gpusession` starts it";
