//! Description of a wanted lease, and its request to a server.

use std::time::Duration;

use gpusession_common::units::Memory;
use gpusession_common::words::{Class, OnIdle, Priority, Sharing};
use gpusession_proto::control;
use serde::{Deserialize, Serialize};

use crate::config::LeaseConfig;
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
    /// A user by uid.
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
    /// Number of GPUs, all of one server.
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
    /// Place among requests that wait at the server.
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
    /// Users whose programs get it.
    pub owner: Owner,
    /// Uid of the user that `owner` names, once the user database has answered.
    pub uid: Option<u32>,
    /// User for the server's limits and accounting; empty for the client's own leases.
    pub user: String,
    /// Event with which the lease begins and ends.
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
    pub(super) fn instance(&self, uid: u32, user: Option<&str>, session: Option<&str>) -> Option<Self> {
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
    pub(super) fn again_for(&self, there: &Self) -> Option<Self> {
        let uid = there.uid?;
        let user = Some(there.user.as_str()).filter(|u| !u.is_empty());
        let may = match &self.owner {
            Owner::User(name) => user == Some(name),
            _ => true,
        };
        self.instance(uid, user, there.session.as_deref()).filter(|spec| may && spec.key == there.key)
    }

    /// Returns `true` if neither the server nor the users could tell the leases apart.
    pub(super) fn same_lease(&self, other: &Self) -> bool {
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

    pub(super) fn request(
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
