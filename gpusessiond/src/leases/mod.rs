//! The leases of this machine: what is wanted, what is held, and who may use it.
//!
//! [`machine`] decides, [`engine`] does what it says; everything else (D-Bus, grant socket, command line) sees only
//! [`Leases`].

mod alarm;
pub mod engine;
pub mod machine;
mod readings;
pub mod sim;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gpusession_proto::control;
use gpusession_proto::grant::{Denial, Endpoint};
use gpusession_proto::readings::{Query, View};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

pub use machine::{Slot, Time};

use crate::config::{Class, LeaseConfig, OnIdle, Priority, Sharing};
use crate::login::Session;
use crate::pool::PoolError;
use crate::values::{Memory, SmPercent};

/// Whose a lease is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Owner {
    /// Everyone who has access to this machine's GPUs.
    Everyone,
    /// The user of this name; known by uid once the user database has answered.
    User(String),
    /// This user.
    Uid(u32),
}

/// A lease as it is wanted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// What people call it.
    pub name: String,
    /// Tells it apart from the other wanted leases of this boot, also after a restart of the daemon.
    pub key: String,
    /// The request as the server knows it, where another process made it first; else made of boot and key.
    pub request_id: Option<String>,
    /// Position among the leases that one process gets together.
    pub order: u32,
    /// Number of GPUs.
    pub gpus: u32,
    /// Limit on each GPU's memory.
    pub memory: Memory,
    /// Share of the multiprocessors in percent.
    pub sm_percent: u32,
    /// The same as a number of them, instead; 0: `sm_percent` says it.
    #[serde(default)]
    pub sm_count: u32,
    /// As large as that of the memory, instead, where the GPU is shared by MPS.
    #[serde(default)]
    pub sm_auto: bool,
    /// Priority.
    pub priority: Priority,
    /// Sharing, if it matters.
    pub sharing: Option<Sharing>,
    /// GPU model; empty is any.
    pub model: String,
    /// GPU UUIDs; empty is any.
    pub devices: Vec<String>,
    /// Servers by name or address; empty is any.
    pub servers: Vec<String>,
    /// GPUs preferred if they are free.
    pub sticky: Vec<String>,
    /// Whose it is.
    pub owner: Owner,
    /// Uid of the user that `owner` names, once the user database has said it.
    pub uid: Option<u32>,
    /// User on whose behalf, for the server's limits and accounting; empty is the machine's own.
    pub user: String,
    /// Lifetime.
    pub class: Class,
    /// The login session that it is bound to.
    pub session: Option<String>,
    /// Tried once, and not acquired anew when it is lost.
    pub once: bool,
    /// Outlives the program that asked for it.
    pub persistent: bool,
    /// The lease ends this long after it was granted or last renewed on request. Without it, it is renewed for as long
    /// as it is wanted, and the server takes it back soon after this machine has fallen silent.
    pub ttl: Option<Duration>,
    /// What is to become of it while it is idle; `None`: the server's policy.
    #[serde(default)]
    pub on_idle: Option<OnIdle>,
    /// Not to be lent to others while nobody uses it.
    #[serde(default)]
    pub hold: bool,
    /// Rest after which it may be parked, where the server would wait for longer.
    #[serde(default)]
    pub idle_timeout: Option<Duration>,
    /// Program that asked.
    pub who: String,
    /// Its reason.
    pub why: String,
}

impl Spec {
    /// A `[[lease]]` of the configuration; `order` is its position.
    pub fn configured(lease: &LeaseConfig, order: u32) -> Self {
        Self {
            name: lease.name.clone(),
            key: format!("configured/{}", lease.name),
            request_id: None,
            order,
            gpus: lease.gpus,
            memory: lease.memory,
            sm_percent: match lease.sm_percent {
                SmPercent::Percent(percent) => percent,
                SmPercent::Auto => 100,
            },
            sm_count: lease.sm_count.unwrap_or(0),
            sm_auto: lease.sm_percent == SmPercent::Auto,
            priority: lease.priority,
            sharing: lease.sharing,
            model: lease.model.clone().unwrap_or_default(),
            devices: Vec::new(),
            servers: lease.server.iter().cloned().collect(),
            sticky: Vec::new(),
            owner: lease.for_user.clone().map_or(Owner::Everyone, Owner::User),
            uid: None,
            user: lease.for_user.clone().unwrap_or_default(),
            class: lease.class,
            session: None,
            once: false,
            persistent: false,
            ttl: None,
            on_idle: lease.on_idle,
            hold: lease.hold,
            idle_timeout: None,
            who: "gpusessiond".into(),
            why: format!("[[lease]] {}", lease.name),
        }
    }

    /// A lease that a user asks for now.
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

    /// One GPU that is held ahead for everyone.
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

    /// The lease that a `[[lease]]` of class `session` or `user` means for this session or user.
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

    /// The same lease by the table as it is now; `None` if `there` does not come from this table.
    fn again_for(&self, there: &Self) -> Option<Self> {
        let uid = there.uid?;
        let user = Some(there.user.as_str()).filter(|u| !u.is_empty());
        let may = match &self.owner {
            Owner::User(name) => user == Some(name),
            _ => true,
        };
        self.instance(uid, user, there.session.as_deref()).filter(|spec| may && spec.key == there.key)
    }

    /// Whether a server would not tell the difference, nor whoever uses it.
    fn same_lease(&self, other: &Self) -> bool {
        let comparable = |spec: &Self| Self { order: 0, uid: None, ..spec.clone() };
        comparable(self) == comparable(other)
    }

    /// Whether the heartbeat keeps it alive.
    pub fn renewed_by_itself(&self) -> bool {
        !self.once || self.ttl.is_none()
    }

    /// Whether these GPUs of a server have room for it now, as far as the server tells.
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
        let (memory_bytes, memory_percent) = match self.memory {
            Memory::Bytes(bytes) => (bytes, 0.0),
            Memory::Percent(percent) => (0, percent),
        };
        control::AllocateRequest {
            request_id: id,
            gpus: self.gpus,
            memory_bytes,
            memory_percent,
            sm_percent: self.sm_percent,
            model: self.model.clone(),
            sharing: self.sharing.map(|s| s.as_str().to_owned()).unwrap_or_default(),
            priority: match self.class {
                Class::Background => Priority::BelowNormal.as_str().into(),
                _ => self.priority.as_str().into(),
            },
            devices: self.devices.clone(),
            user: self.user.clone(),
            uid: if let Owner::Uid(uid) = self.owner { uid } else { self.uid.unwrap_or(0) },
            ttl_usec: self.ttl.map_or(0, |t| t.as_micros() as u64),
            who: self.who.clone(),
            why: self.why.clone(),
            boot_id: boot_id.into(),
            machine_id: machine_id.into(),
            sticky: sticky.to_vec(),
            persistent: matches!(self.class, Class::Boot | Class::Background),
            sm_count: self.sm_count,
            sm_auto: self.sm_auto,
            once: self.once,
            on_idle: self.on_idle.map(|o| o.as_str().to_owned()).unwrap_or_default(),
            hold: self.hold,
            idle_timeout_usec: self.idle_timeout.map_or(0, |t| t.as_micros() as u64),
            // Leases from boot are asked for at once, and wait as the file has them. Those of users wait from when they
            // came.
            order: if self.class == Class::Boot && !self.once { self.order.saturating_add(1) } else { 0 },
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
    /// Held.
    Active,
    /// Held, unused for a while.
    Idle,
    /// Held, its device memory in the server's host memory.
    Parked,
    /// Held, its server takes no new work.
    Draining,
    /// Gone without being released.
    Lost,
    /// Given back.
    Released,
}

impl LeaseState {
    /// The word used on D-Bus.
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

    /// A state that a server may report of a lease that it holds.
    pub fn of_server(word: &str) -> Option<Self> {
        match word {
            // Its memory, or its GPU, is elsewhere until the next CUDA call.
            "returning" | "lent" => Some(Self::Parked),
            _ => [Self::Active, Self::Idle, Self::Parked, Self::Draining]
                .into_iter()
                .find(|s| s.as_str() == word),
        }
    }
}

/// Something happened to a lease or a server.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// A lease is wanted.
    New {
        /// Which.
        slot: Slot,
    },
    /// It is held now.
    Granted {
        /// Which.
        slot: Slot,
    },
    /// Its properties changed.
    Changed {
        /// Which.
        slot: Slot,
    },
    /// Its stock of workers changed.
    Stock {
        /// Which.
        slot: Slot,
    },
    /// A lease that is tried once could not be had; the slot is gone.
    Failed {
        /// Which.
        slot: Slot,
        /// Why.
        error: PoolError,
    },
    /// It will be taken away.
    PrepareForLoss {
        /// Which.
        slot: Slot,
        /// Time left.
        left: Duration,
        /// Why.
        reason: String,
        /// Its programs rest: any work of theirs ends that.
        idle: bool,
    },
    /// The server took it away, or it expired.
    Lost {
        /// Which.
        slot: Slot,
        /// The id it had.
        id: String,
        /// Why.
        reason: String,
    },
    /// The slot is gone.
    Removed {
        /// Which.
        slot: Slot,
        /// Why.
        reason: String,
        /// Lost rather than given back.
        lost: bool,
    },
    /// A server's state changed.
    Server {
        /// Index of the server.
        server: usize,
    },
}

/// A GPU of a lease.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceView {
    /// As the server describes it.
    pub device: control::Device,
    /// Name of its server.
    pub server: String,
    /// Its number within the lease.
    pub ordinal: u32,
    /// Driver of the server.
    pub driver_version: String,
    /// 1000 * major + 10 * minor.
    pub cuda_version: u32,
}

/// A lease as others see it.
#[derive(Debug, Clone, PartialEq)]
pub struct LeaseView {
    /// Inside the daemon.
    pub slot: Slot,
    /// The server's id; while pending, one that comes from the lease's name.
    pub id: String,
    /// What was asked for.
    pub spec: Spec,
    /// Owner's uid; that of nobody in particular is `u32::MAX`, of a user who is not known one less.
    pub uid: u32,
    /// State.
    pub state: LeaseState,
    /// GPUs, empty while pending.
    pub devices: Vec<DeviceView>,
    /// Server's name, empty while pending.
    pub server: String,
    /// Wall-clock microseconds when it was granted (while pending: first wanted).
    pub created_usec: u64,
    /// Wall-clock microseconds when it ends unless renewed; 0 while pending.
    pub expires_usec: u64,
    /// Fencing token.
    pub fencing_token: u64,
    /// Whether data connections are encrypted.
    pub encrypted: bool,
    /// Why it is not held, or what went wrong last; empty if nothing did.
    pub trouble: Option<PoolError>,
    /// Time until the next try, while pending.
    pub retry_in: Option<Duration>,
    /// Workers ready for processes.
    pub stock: usize,
    /// Processes that use it.
    pub processes: usize,
    /// The last program of each user that it failed, if it has served none of that user since; and when, in wall-clock
    /// microseconds. The newest last.
    pub failures: Vec<(Failure, u64)>,
    /// Since when nobody uses it, as the server says: wall-clock and since boot, in microseconds; 0 while in use.
    pub idle_since_usec: (u64, u64),
    /// Rest after which the server parks it or takes it back, in microseconds; 0: never, or the server does not say.
    pub idle_timeout_usec: u64,
    /// Leader of the session that it is bound to; 0 if it is bound to none.
    pub leader: u32,
}

impl LeaseView {
    /// Why it waits: for GPUs, or parked for those that it had.
    pub fn waits(&self) -> Option<&PoolError> {
        self.trouble.as_ref().filter(|trouble| match self.state {
            LeaseState::Pending => true,
            LeaseState::Parked => trouble.place.is_some(),
            _ => false,
        })
    }

    /// How the data of its programs travels, and why; empty while pending.
    pub fn transport(&self) -> (&'static str, &'static str) {
        match (self.devices.is_empty(), self.encrypted) {
            (true, _) => ("", ""),
            (_, true) => ("tcp+tls", "the server encrypts"),
            (_, false) => ("tcp", "the server trusts this network"),
        }
    }
}

/// A server as others see it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ServerView {
    /// Name, or the address until the server has told it.
    pub name: String,
    /// Control address.
    pub address: String,
    /// `connecting`, `online`, `suspect`, `offline`, `draining` or `unauthorized`.
    pub state: String,
    /// What went wrong last.
    pub trouble: String,
    /// Wall-clock microseconds when it answered last; 0 is never.
    pub last_seen_usec: u64,
    /// Round trip of the last call.
    pub rtt_usec: u64,
    /// Control protocol.
    pub protocol: u32,
    /// Software and version.
    pub software: String,
    /// GPUs that it serves.
    pub devices: u32,
    /// GPUs that nobody has.
    pub free: u32,
    /// Rest after which it parks or takes back a lease that asks for nothing else, in microseconds; 0: never, or it does
    /// not say.
    pub idle_timeout_usec: u64,
    /// Time that a lease lives without a renewal where it asks for none, in microseconds; 0: it does not say.
    pub lease_ttl_usec: u64,
}

/// Everything, at one moment.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    /// Leases in the order they were wanted.
    pub leases: Vec<LeaseView>,
    /// Servers in configuration order.
    pub servers: Vec<ServerView>,
    /// Login sessions.
    pub sessions: Vec<Arc<Session>>,
}

impl Snapshot {
    /// A lease by its id.
    pub fn lease(&self, id: &str) -> Option<&LeaseView> {
        self.leases.iter().find(|l| l.id == id)
    }

    /// GPUs of configured leases: wanted and held.
    pub fn pool(&self) -> (u32, u32) {
        let configured = || self.leases.iter().filter(|l| !l.spec.once);
        let ready =
            configured().filter(|l| l.state != LeaseState::Pending).map(|l| l.devices.len() as u32).sum();
        (configured().map(|l| l.spec.gpus).sum(), ready)
    }

    /// Whether every lease of class boot that the configuration wants is held.
    pub fn booted(&self) -> bool {
        let mut boot = self.leases.iter().filter(|l| !l.spec.once && l.spec.class == Class::Boot);
        boot.all(|l| l.state != LeaseState::Pending)
    }
}

/// What happened, and how things are after it.
#[derive(Debug, Clone)]
pub struct Update {
    /// In the order in which it happened.
    pub changes: Vec<Change>,
    /// After all of them.
    pub snapshot: Arc<Snapshot>,
}

/// A process that asks for GPUs, as the kernel describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// User id.
    pub uid: u32,
    /// Process id.
    pub pid: u32,
    /// User name, if the user database knows one.
    pub user: Option<String>,
    /// Whether `[access]` lets the user have the leases for all.
    pub access: bool,
    /// Id of the login session that it belongs to.
    pub session: Option<String>,
}

/// What a process asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wish {
    /// The lease it names.
    pub lease: Option<String>,
    /// Its program.
    pub program: String,
    /// The file that it runs, as it says.
    pub executable: String,
    /// Driver environment that differs from the stock's.
    pub environment: HashMap<String, String>,
}

/// A worker that was granted to a process; given back with [`Leases::ended`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// Which lease.
    pub slot: Slot,
    /// Lease id.
    pub lease: String,
    /// Worker's id.
    pub worker: [u8; 16],
}

/// A program that a lease's GPUs did not serve, or not to its end, in its own words: shown to its user and to root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Its user.
    pub uid: u32,
    /// User name, if the user database knows one.
    pub user: String,
    /// Its process id.
    pub pid: u32,
    /// Its name.
    pub program: String,
    /// One line, without control characters.
    pub reason: String,
    /// It ran on them, and lost them; else it could not begin.
    pub running: bool,
    /// It tries once more; if it is refused then, this still is why.
    pub again: bool,
}

/// Answer to a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Its workers.
    Granted(Vec<Endpoint>, Vec<Granted>),
    /// Not now: wait for the next [`Snapshot`] and ask again, or give up with this.
    Wait(Denial, String),
    /// No.
    Denied(Denial, String),
}

/// The lease manager, as everything else sees it.
#[async_trait]
pub trait Leases: Send + Sync {
    /// How things are; notified at each change, also of the stock of workers.
    fn snapshot(&self) -> watch::Receiver<Arc<Snapshot>>;
    /// Everything that happens from now on, in order, beginning with how things are.
    fn updates(&self) -> mpsc::UnboundedReceiver<Update>;
    /// Wants a lease that is tried once, and waits for it.
    async fn create(&self, spec: Spec) -> Result<LeaseView, PoolError>;
    /// Wants a lease until it is released.
    async fn want(&self, spec: Spec) -> Slot;
    /// Wants the leases of the configuration, and only these; what has not changed is left alone.
    async fn configure(&self, leases: Vec<Spec>);
    /// Holds this many GPUs for everyone beside the configured leases.
    async fn preallocate(&self, count: u32);
    /// Releases a lease; `false` if it is not there.
    async fn release(&self, slot: Slot, reason: &str) -> bool;
    /// Renews a lease now, with another time to live where it has one; the time it has left.
    async fn renew(&self, id: &str, ttl: Option<Duration>) -> Result<Duration, PoolError>;
    /// Grants GPUs to a process.
    async fn grant(&self, caller: Caller, wish: Wish) -> Answer;
    /// The GPUs that [`Leases::grant`] would grant, and answers to questions about them. Waits for no lease.
    async fn readings(
        &self,
        caller: Caller,
        wish: Wish,
        queries: Vec<Query>,
    ) -> Result<View, (Denial, String)>;
    /// The oldest CUDA version among the servers of the GPUs that [`Leases::grant`] would grant. Waits for no lease and asks no
    /// server.
    async fn cuda_version(&self, caller: Caller, wish: Wish) -> Result<u32, (Denial, String)>;
    /// The leases that a process of this user gets without naming one.
    async fn of(&self, caller: Caller) -> Vec<Slot>;
    /// The process has ended (or never got its answer).
    fn ended(&self, granted: Vec<Granted>);
    /// What a user's process says of a lease that was granted to it: that it is served, or not.
    fn became(&self, slot: Slot, uid: u32, failure: Option<Failure>);
    /// A process that an earlier daemon granted a worker to; `None` if the lease is not there any more.
    async fn resume(&self, lease: &str, worker: [u8; 16]) -> Option<Granted>;
    /// A login session has begun; leases of class `session` that are its user's are held until it ends.
    fn session_opened(&self, session: Arc<Session>);
    /// The session of this id has ended.
    fn session_closed(&self, id: &str);
    /// Leaves a server: its leases are given back after `grace` and had elsewhere. `None`: comes back to it. `false`
    /// if there is no such server.
    async fn drain(&self, server: usize, grace: Option<Duration>) -> bool;
    /// Announces the end of every lease that is in use; the number of processes that use one.
    async fn warn(&self, left: Duration, reason: &str) -> usize;
    /// Moves a lease's device memory to its server's host memory, or asks for it back.
    async fn park(&self, slot: Slot, park: bool) -> Result<(), PoolError>;
    /// The owner of a lease calls it idle from now on, or no longer.
    async fn idle_hint(&self, slot: Slot, idle: bool) -> Result<(), PoolError>;
    /// Asks a server how it is; the round trip and the answer.
    async fn ask(&self, server: usize) -> Result<(Duration, control::ServerDescription), PoolError>;
    /// Releases everything and waits, at most this long, until the servers know.
    async fn shutdown(&self, limit: Duration);
}
