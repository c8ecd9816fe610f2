//! The leases of this client: which it wants, which it holds, and who may use them.
//!
//! [`machine`] decides, [`engine`] acts; all other code (D-Bus, grant socket, command line) sees
//! [`Leases`] only.

mod alarm;
pub mod engine;
pub mod machine;
mod readings;
mod session;
pub mod sim;
mod snapshot;
mod text;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gpusession_common::units::Memory;
use gpusession_common::words::{Class, OnIdle, Priority, Sharing};
use gpusession_proto::control;
use gpusession_proto::grant::{Denial, Endpoint};
use gpusession_proto::readings::{Query, View};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

pub use session::Session;
pub use snapshot::{
    Clock, DeviceView, LeaseFacts, LeaseGauges, LeaseView, STOPPED, ServerFacts, ServerGauges, ServerView,
    Snapshot,
};
pub use text::warning;

use crate::config::LeaseConfig;
use crate::pool::PoolError;
use crate::units::SmPercent;

/// A point on the lease manager's monotonic clock.
pub type Time = Duration;

/// A wanted lease's number inside the daemon; never reused.
pub type Slot = u64;

/// Owner of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Owner {
    /// All users with access to this client's GPUs.
    Everyone,
    /// A user by name, whose uid is known once the user database has answered.
    User(String),
    Uid(u32),
}

/// Description of a wanted lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Name that users see.
    pub name: String,
    /// Unique among the wanted leases of this boot, also after a restart of the daemon.
    pub key: String,
    /// Request id at the server, if another process made the request; otherwise made of boot id and
    /// key.
    pub request_id: Option<String>,
    /// Position among the leases that one process gets together.
    pub order: u32,
    pub gpus: u32,
    /// Limit on each GPU's memory.
    pub memory: Memory,
    /// Share of the multiprocessors in percent.
    pub sm_percent: u32,
    /// Number of multiprocessors, in place of `sm_percent`; 0 if `sm_percent` counts.
    #[serde(default)]
    pub sm_count: u32,
    /// On a GPU shared by MPS, the share of the multiprocessors equals that of the memory.
    #[serde(default)]
    pub sm_auto: bool,
    pub priority: Priority,
    /// How the GPU is shared; `None` leaves it to the server.
    pub sharing: Option<Sharing>,
    /// GPU model; empty for any.
    pub model: String,
    /// GPU UUIDs; empty for any.
    pub devices: Vec<String>,
    /// Servers by name or address; empty for any.
    pub servers: Vec<String>,
    /// UUIDs of GPUs that are preferred if they are free.
    pub sticky: Vec<String>,
    pub owner: Owner,
    /// Uid of the user that `owner` names, once the user database has answered.
    pub uid: Option<u32>,
    /// User for the server's limits and accounting; empty for the client's own leases.
    pub user: String,
    pub class: Class,
    /// Login session whose end releases the lease.
    pub session: Option<String>,
    /// Control group whose processes alone may use the lease.
    #[serde(default)]
    pub control_group: Option<String>,
    /// Asked for once, and not again when it is lost.
    pub once: bool,
    /// Outlives the program that asked for it.
    pub persistent: bool,
    /// Time from the grant, or from the last requested renewal, to the lease's end.
    ///
    /// Without it the heartbeat renews the lease while it is wanted; the server takes the lease
    /// back soon after this client falls silent.
    pub ttl: Option<Duration>,
    /// Action on an idle lease; `None` for the server's policy.
    #[serde(default)]
    pub on_idle: Option<OnIdle>,
    /// Never lent to others while no program uses it.
    #[serde(default)]
    pub hold: bool,
    /// Rest after which it may be parked, if the server would wait longer.
    #[serde(default)]
    pub idle_timeout: Option<Duration>,
    /// Program that asked.
    pub who: String,
    /// Reason that the program gave.
    pub why: String,
}

impl Spec {
    /// Describes a `[[lease]]` of the configuration; `order` is its position.
    pub fn configured(lease: &LeaseConfig, order: u32) -> Self {
        // Exhaustive, so that a new key does not compile before it has its place here.
        let LeaseConfig {
            name,
            gpus,
            memory,
            sm_percent,
            sm_count,
            priority,
            sharing,
            model,
            server,
            for_user,
            class,
            on_idle,
            hold,
        } = lease.clone();
        Self {
            key: format!("configured/{name}"),
            request_id: None,
            order,
            gpus,
            memory,
            sm_percent: match sm_percent {
                SmPercent::Percent(percent) => percent,
                SmPercent::Auto => 100,
            },
            sm_count: sm_count.unwrap_or(0),
            sm_auto: sm_percent == SmPercent::Auto,
            priority,
            sharing,
            model: model.unwrap_or_default(),
            devices: Vec::new(),
            servers: server.into_iter().collect(),
            sticky: Vec::new(),
            owner: for_user.clone().map_or(Owner::Everyone, Owner::User),
            uid: None,
            user: for_user.unwrap_or_default(),
            class,
            session: None,
            control_group: None,
            once: false,
            persistent: false,
            ttl: None,
            on_idle,
            hold,
            idle_timeout: None,
            who: "gpusessiond".into(),
            why: format!("[[lease]] {name}"),
            name,
        }
    }

    /// Describes a lease that a user asks for now.
    pub fn requested(key: String, uid: u32) -> Self {
        Self {
            name: String::new(),
            key,
            order: 0,
            owner: Owner::Uid(uid),
            class: Class::User,
            once: true,
            ttl: None,
            who: String::new(),
            why: String::new(),
            ..Self::configured(&LeaseConfig::default(), 0)
        }
    }

    /// Describes one GPU that is held ahead for all users.
    pub fn preallocated(n: u32, key: String) -> Self {
        Self {
            name: format!("ahead{}", n + 1),
            key,
            order: u32::MAX,
            class: Class::Background,
            why: "Preallocate".into(),
            ..Self::configured(&LeaseConfig::default(), 0)
        }
    }

    /// Derives the lease for a session or user from a `[[lease]]` of class `session` or `user`.
    fn instance(&self, uid: u32, user: Option<&str>, session: Option<&str>) -> Option<Self> {
        let session = match self.class {
            Class::Session => Some(session?.to_owned()),
            _ => None,
        };
        let whose = session.as_ref().map_or_else(|| format!("user/{uid}"), |id| format!("session/{id}"));
        Some(Self {
            key: format!("{whose}/{}", self.name),
            owner: Owner::Uid(uid),
            uid: Some(uid),
            user: user.unwrap_or_default().to_owned(),
            session,
            ..self.clone()
        })
    }

    /// Derives lease `there` from the current table; `None` if it does not come from this table.
    fn again_for(&self, there: &Self) -> Option<Self> {
        let uid = there.uid?;
        let user = Some(there.user.as_str()).filter(|u| !u.is_empty());
        let may = match &self.owner {
            Owner::User(name) => user == Some(name),
            _ => true,
        };
        self.instance(uid, user, there.session.as_deref()).filter(|spec| may && spec.key == there.key)
    }

    /// Returns `true` if neither the server nor the users could tell the leases apart.
    fn same_lease(&self, other: &Self) -> bool {
        let comparable = |spec: &Self| Self { order: 0, uid: None, ..spec.clone() };
        comparable(self) == comparable(other)
    }

    /// Returns `true` if the heartbeat renews it.
    pub fn renewed_by_itself(&self) -> bool {
        !self.once || self.ttl.is_none()
    }

    /// Returns `true` if these GPUs of a server have room for it, according to the server.
    pub fn fits(&self, devices: &[control::Device]) -> bool {
        let room = |d: &&control::Device| {
            let wanted = match self.memory {
                Memory::Bytes(bytes) => bytes,
                Memory::Percent(percent) => (d.memory_bytes as f64 * percent / 100.0) as u64,
            };
            let free = match self.sharing {
                Some(Sharing::Exclusive) => d.state == "free",
                _ => matches!(d.state.as_str(), "free" | "leased"),
            };
            free && wanted <= d.memory_free_bytes
                && d.name.to_lowercase().contains(&self.model.to_lowercase())
                && (self.devices.is_empty() || self.devices.contains(&d.uuid))
        };
        devices.iter().filter(room).count() >= self.gpus as usize
    }

    fn request(
        &self,
        id: String,
        boot_id: &str,
        machine_id: &str,
        sticky: &[String],
    ) -> control::AllocateRequest {
        // Exhaustive, so that a new field does not compile before the request has it.
        let Self {
            gpus,
            memory,
            sm_percent,
            sm_count,
            sm_auto,
            priority,
            sharing,
            model,
            devices,
            owner,
            uid,
            user,
            class,
            once,
            ttl,
            on_idle,
            hold,
            idle_timeout,
            order,
            who,
            why,
            // Only this client uses these.
            name: _,
            key: _,
            request_id: _,
            servers: _,
            sticky: _,
            session: _,
            control_group: _,
            persistent: _,
        } = self.clone();
        let (memory_bytes, memory_percent) = match memory {
            Memory::Bytes(bytes) => (bytes, 0.0),
            Memory::Percent(percent) => (0, percent),
        };
        control::AllocateRequest {
            request_id: id,
            gpus,
            memory_bytes,
            memory_percent,
            sm_percent,
            model,
            sharing: sharing.map(|s| s.as_str().to_owned()).unwrap_or_default(),
            priority: match class {
                Class::Background => Priority::BelowNormal.as_str().into(),
                _ => priority.as_str().into(),
            },
            devices,
            user,
            uid: if let Owner::Uid(uid) = owner { uid } else { uid.unwrap_or(0) },
            ttl_usec: ttl.map_or(0, |t| t.as_micros() as u64),
            who,
            why,
            boot_id: boot_id.into(),
            machine_id: machine_id.into(),
            sticky: sticky.to_vec(),
            persistent: matches!(class, Class::Boot | Class::Background),
            sm_count,
            sm_auto,
            once,
            on_idle: on_idle.map(|o| o.as_str().to_owned()).unwrap_or_default(),
            hold,
            idle_timeout_usec: idle_timeout.map_or(0, |t| t.as_micros() as u64),
            // Boot leases are asked for at the same time, and queue in file order; users' leases
            // queue in order of arrival.
            order: if class == Class::Boot && !once { order.saturating_add(1) } else { 0 },
            again: false,
            workers: Vec::new(),
        }
    }
}

/// State of a lease as D-Bus shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LeaseState {
    /// Wanted, not held.
    Pending,
    /// Held and in use.
    Active,
    /// Held, unused for a while.
    Idle,
    /// Held, its device memory in the server's host memory.
    Parked,
    /// Held, on a server that takes no new leases.
    Draining,
    /// Ended without being released.
    Lost,
    /// Released by its holder.
    Released,
}

impl LeaseState {
    /// Returns the word used on D-Bus.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Active => "active",
            Self::Idle => "idle",
            Self::Parked => "parked",
            Self::Draining => "draining",
            Self::Lost => "lost",
            Self::Released => "released",
        }
    }

    /// Parses a state that a server reports of a lease that it holds.
    pub fn of_server(word: &str) -> Option<Self> {
        match word {
            // The lease's memory or GPU is elsewhere until its next CUDA call.
            "returning" | "lent" => Some(Self::Parked),
            _ => [Self::Active, Self::Idle, Self::Parked, Self::Draining]
                .into_iter()
                .find(|s| s.as_str() == word),
        }
    }
}

/// A change of a lease or a server.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// The daemon wants a new lease.
    New { slot: Slot },
    /// A server granted the lease.
    Granted { slot: Slot },
    /// Properties of the lease changed.
    Changed { slot: Slot },
    /// The lease's stock of workers changed.
    Stock { slot: Slot },
    /// A one-time request was refused; its slot no longer exists.
    Failed { slot: Slot, error: PoolError },
    /// The lease will end, or be parked.
    PrepareForLoss {
        slot: Slot,
        left: Duration,
        reason: String,
        /// Its programs are idle: any GPU work of theirs prevents the measure.
        idle: bool,
    },
    /// The server took the lease away, or it expired.
    Lost {
        slot: Slot,
        /// Id that the lease had.
        id: String,
        reason: String,
    },
    /// The slot no longer exists.
    Removed {
        slot: Slot,
        reason: String,
        /// Lost, not released.
        lost: bool,
    },
    /// State of a server changed.
    Server {
        /// Index of the server.
        server: usize,
    },
}

/// Changes, and the state after them.
#[derive(Debug, Clone)]
pub struct Update {
    /// In order of occurrence.
    pub changes: Vec<Change>,
    /// State after all changes.
    pub snapshot: Arc<Snapshot>,
}

/// A process that asks for GPUs, as the kernel describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    pub pid: u32,
    /// User name, if the user database knows one.
    pub user: Option<String>,
    /// Whether `[access]` lets the user have the leases for all.
    pub access: bool,
    /// Id of the login session that it belongs to.
    pub session: Option<String>,
    /// Paths of its control groups, in all hierarchies.
    pub control_groups: Vec<String>,
}

impl Caller {
    /// Returns `true` if the process is in this control group, or in one below it.
    pub fn is_below(&self, group: &str) -> bool {
        let below = |path: &String| {
            path.strip_prefix(group).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.control_groups.iter().any(below)
    }
}

/// A process's request for workers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkerRequest {
    /// Id or name of the lease that it asks for.
    pub lease: Option<String>,
    /// Program name.
    pub program: String,
    /// Path of the executable, as the process reports it.
    pub executable: String,
    /// Driver environment that differs from that of workers in stock.
    pub environment: HashMap<String, String>,
}

/// A worker that was granted to a process; returned with [`Leases::ended`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    pub slot: Slot,
    /// Id of the lease.
    pub lease: String,
    /// Id of the worker; zeros if the server gave none.
    pub worker: [u8; 16],
}

/// A program that a lease did not serve, or not to its end; shown to its user and to root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub uid: u32,
    /// User name, if the user database knows one.
    pub user: String,
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Reason in the program's words: one line, without control characters.
    pub reason: String,
    /// The program had GPUs and lost them; otherwise it never got them.
    pub running: bool,
    /// The program tries once more; if refused then, this reason stays valid.
    pub again: bool,
}

/// A program whose connection to its worker broke; shown to its user and to root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interruption {
    pub uid: u32,
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Since when it has no connection; `None` if it is back.
    pub since: Option<Time>,
    /// Number of interruptions so far.
    pub number: u32,
}

/// Answer to a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    Granted(Vec<Endpoint>, Vec<Granted>),
    /// No worker now: ask again after the next [`Snapshot`], or give up with this denial.
    Wait(Denial, String),
    Denied(Denial, String),
}

/// The lease manager's interface to the rest of the daemon.
#[async_trait]
pub trait Leases: Send + Sync {
    /// Subscribes to snapshots; notified at each change, also of the stock of workers.
    fn snapshot(&self) -> watch::Receiver<Arc<Snapshot>>;
    /// Subscribes to all updates from now on, in order; the first one has the current state.
    fn updates(&self) -> mpsc::UnboundedReceiver<Update>;
    /// Asks once for a lease and waits for the answer.
    async fn create(&self, spec: Spec) -> Result<LeaseView, PoolError>;
    /// Wants a lease until it is released.
    async fn want(&self, spec: Spec) -> Slot;
    /// Wants exactly the leases of the configuration; unchanged ones stay as they are.
    async fn configure(&self, leases: Vec<Spec>);
    /// Sets whether leases may have data that is not encrypted, if their server decides so.
    fn allow_clear(&self, allow: bool);
    /// Holds this many GPUs for all users in addition to the configured leases.
    async fn preallocate(&self, count: u32);
    /// Releases a lease; returns `false` if the slot does not exist.
    async fn release(&self, slot: Slot, reason: &str) -> bool;
    /// Renews a lease now, with a new time to live if given; returns the time it has left.
    async fn renew(&self, id: &str, ttl: Option<Duration>) -> Result<Duration, PoolError>;
    /// Grants workers to a process.
    async fn grant(&self, caller: Caller, wish: WorkerRequest) -> Answer;
    /// Reads the GPUs that [`Leases::grant`] would grant, and answers queries about them.
    ///
    /// Waits for no lease.
    async fn readings(
        &self,
        caller: Caller,
        wish: WorkerRequest,
        queries: Vec<Query>,
    ) -> Result<View, (Denial, String)>;
    /// Returns the oldest CUDA version among the servers whose GPUs [`Leases::grant`] would grant.
    ///
    /// Waits for no lease and asks no server.
    async fn cuda_version(&self, caller: Caller, wish: WorkerRequest) -> Result<u32, (Denial, String)>;
    /// Returns the leases that a process of this user gets without naming one.
    async fn of(&self, caller: Caller) -> Vec<Slot>;
    /// Records the state of a process's connection to its worker, `for_time` without one.
    ///
    /// Returns why the worker no longer waits for the process, if that is known.
    async fn interrupted(
        &self,
        granted: Granted,
        interruption: Interruption,
        for_time: Option<Duration>,
    ) -> Option<String>;
    /// Records that the process of these workers exited, or never got its answer.
    fn ended(&self, granted: Vec<Granted>);
    /// Records a process's report on its grant: served, or failed with a reason.
    fn report_outcome(&self, slot: Slot, uid: u32, failure: Option<Failure>);
    /// Resumes a worker that an earlier daemon granted; `None` if its lease no longer exists.
    async fn resume(&self, lease: &str, worker: [u8; 16]) -> Option<Granted>;
    /// Records a login; the user's leases of class `session` are held until the session ends.
    fn session_opened(&self, session: Arc<Session>);
    /// Records the end of a session.
    fn session_closed(&self, id: &str);
    /// Drains a server: its leases are released after `grace`, and asked for elsewhere.
    ///
    /// With `None`, uses the server again. Returns `false` if the server does not exist.
    async fn drain(&self, server: usize, grace: Option<Duration>) -> bool;
    /// Warns of the end of every lease in use; returns the number of processes that use one.
    async fn warn(&self, left: Duration, reason: &str) -> usize;
    /// Parks a lease, or asks its server to unpark it.
    async fn park(&self, slot: Slot, park: bool) -> Result<(), PoolError>;
    /// Sets or clears the owner's hint that a lease is idle.
    async fn idle_hint(&self, slot: Slot, idle: bool) -> Result<(), PoolError>;
    /// Asks a server for its description; returns the round trip and the answer.
    async fn ask(
        &self,
        server: usize,
        usage_uid: Option<u32>,
    ) -> Result<(Duration, control::ServerDescription), PoolError>;
    /// Starts an endpoint of a server for a measurement of the network.
    async fn measure(&self, server: usize, seconds: u32) -> Result<control::MeasureReply, PoolError>;
    /// Releases all leases and waits for the servers' confirmation, at most `limit`.
    async fn shutdown(&self, limit: Duration);
}
