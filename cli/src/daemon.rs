//! Client of the daemon's D-Bus API.

use std::collections::HashMap;

use gpusession_bus::describe::{self, Described};
use gpusession_bus::proxy::{LeaseProxy, ManagerProxy};
use gpusession_bus::{NAME, PATH, error, lease_path, request};
use gpusession_common::units::Memory;
use gpusession_common::words::{Priority, Sharing};
use gpusessiond::leases::Spec;
use zbus::{DBusError as _, OwnedFd, Variant};

use crate::exit::{Failure, Result, code};

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

    /// Calls `DescribeServers`: the servers as they answer now.
    pub async fn survey(&self) -> Result<describe::Survey> {
        let text = self.manager.describe_servers().await.map_err(of_bus)?;
        serde_json::from_str(&text).map_err(|e| odd(&e))
    }

    /// Calls `Measure`: an endpoint of a server for a measurement.
    pub async fn measure(&self, server: &str, seconds: u32) -> Result<describe::Endpoint> {
        let text = self.manager.measure(server, seconds).await.map_err(of_bus)?;
        serde_json::from_str(&text).map_err(|e| odd(&e))
    }

    /// Calls `CreateLease`.
    pub async fn create(&self, spec: &Spec, persistent: bool) -> Result<Created> {
        let mut options: HashMap<&str, Variant<'_>> = HashMap::new();
        options.insert(request::COUNT, spec.gpus.into());
        match spec.memory {
            Memory::Percent(percent) => options.insert(request::MEMORY_FRACTION, (percent / 100.0).into()),
            Memory::Bytes(bytes) => options.insert(request::MEMORY_BYTES, bytes.into()),
        };
        match (spec.sm_count, spec.sm_auto) {
            (0, false) => options.insert(request::SM_PERCENT, spec.sm_percent.into()),
            (0, true) => options.insert(request::SM_AUTO, true.into()),
            (count, _) => options.insert(request::SM_COUNT, count.into()),
        };
        if spec.priority != Priority::Normal {
            options.insert(request::PRIORITY, spec.priority.as_str().into());
        }
        if let Some(sharing) = spec.sharing.map(Sharing::as_str) {
            options.insert(request::SHARING, sharing.into());
        }
        if !spec.servers.is_empty() {
            options.insert(request::SERVERS, spec.servers.clone().into());
        }
        if !spec.model.is_empty() {
            options.insert(request::MODEL, spec.model.as_str().into());
        }
        if let Some(ttl) = spec.ttl {
            options.insert(request::TTL_USEC, (ttl.as_micros() as u64).into());
        }
        options.insert(request::WHO, spec.who.as_str().into());
        options.insert(request::WHY, spec.why.as_str().into());
        let flags = if persistent { request::PERSISTENT } else { 0 };
        let (id, _path, fd) = self.manager.create_lease(options, flags).await.map_err(of_bus)?;
        Ok(Created { id, fd })
    }

    /// Calls `ReleaseLease`.
    pub async fn release(&self, id: &str) -> Result<()> {
        self.manager.release_lease(id).await.map_err(of_bus)
    }

    /// Calls `ReleaseLease`; a lease that does not exist any more counts as released.
    pub async fn release_if_there(&self, id: &str) -> Result<()> {
        match self.manager.release_lease(id).await {
            Err(zbus::Error::MethodError(name, ..)) if name == error::NO_SUCH_LEASE => Ok(()),
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
            let is_mine = |lease: &&describe::Lease| paths.contains(&lease_path(&lease.id));
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
        let asked = if park { lease.park().await } else { lease.unpark().await };
        asked.map_err(|error| match of_bus(error) {
            // The lease is in another state, or the driver does not park its programs: a smaller
            // request is no remedy.
            failure if failure.no_room && failure.code == code::FAILED => {
                Failure::new(failure.code, failure.message)
                    .hint("`gpusession status` shows the lease's state")
            }
            failure => failure,
        })
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
        error::NO_CAPACITY => (code::NO_CAPACITY, "`gpusession status` shows what is free; try again later"),
        error::QUOTA_EXCEEDED => {
            (code::NOT_ALLOWED, "ask for less, or ask the pool's administrator for a higher limit")
        }
        error::ACCESS_DENIED => (
            code::NOT_ALLOWED,
            "this machine's administrator decides ([access] in /etc/gpusession/gpusession.toml)",
        ),
        error::SERVER_UNREACHABLE | error::NOT_READY => {
            (code::UNREACHABLE, "`gpusession status` shows which server does not answer")
        }
        error::NOT_SUPPORTED => (
            code::FAILED,
            "`gpusession status` shows how many GPUs the servers have; ask for less or another model, or name \
             several servers: --server A --server B",
        ),
        error::NO_SUCH_LEASE => (code::FAILED, "`gpusession list` shows all leases"),
        error::INVALID_ARGS => (code::USAGE, ""),
        error::INVALID_FILE_CONTENT => (code::CONFIGURATION, "the configuration in force stays unchanged"),
        "org.freedesktop.DBus.Error.ServiceUnknown"
        | "org.freedesktop.DBus.Error.NameHasNoOwner"
        | "org.freedesktop.DBus.Error.NoReply"
        | "org.freedesktop.DBus.Error.Disconnected" => {
            return Failure::new(code::UNREACHABLE, "the daemon is not running").hint(DAEMON_HINT);
        }
        _ => (code::FAILED, ""),
    };
    let no_room = matches!(name.as_str(), error::NO_CAPACITY | error::NOT_SUPPORTED);
    let failure = Failure { no_room, ..Failure::new(code, message) };
    if hint.is_empty() { failure } else { failure.hint(hint) }
}

const DAEMON_HINT: &str = "`systemctl status gpusession` shows why; `systemctl start gpusession` starts it";
