//! Processes of this host that use leases: their requests, workers and troubles.

use std::collections::HashMap;
use std::sync::Arc;

use super::spec::{Slot, Time};
use crate::subuid::Principal;

/// A process that asks for GPUs, as the kernel describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Uid of the process, from the socket.
    pub uid: u32,
    /// Pid in the daemon's namespace.
    pub pid: u32,
    /// User name, if the user database knows one.
    pub user: Option<String>,
    /// User to whom the uid is subordinate, whose leases of class `user` the process shares.
    pub principal: Option<Principal>,
    /// Whether `[access]` lets the user have the leases for all.
    pub access: bool,
    /// Id of the login session that it belongs to.
    pub session: Option<String>,
    /// Paths of its control groups, in all hierarchies.
    pub control_groups: Vec<String>,
    /// Whether it runs in a container.
    pub contained: bool,
}

impl Caller {
    /// Returns `true` if the process may use leases of all users.
    ///
    /// Root of a container has no such right: the container may be another party's.
    pub fn is_root(&self) -> bool {
        self.uid == 0 && !self.contained
    }

    /// Returns the user for whom its workers count: a subordinate uid's owner.
    pub fn account(&self) -> u32 {
        self.principal.as_ref().map_or(self.uid, |user| user.uid)
    }

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
    /// It waits in the line of the users who share a lease; without this it takes any worker.
    pub waiter: Option<Waiter>,
}

/// A program that waits in a line, until all clones are dropped.
#[derive(Debug, Clone, Default)]
pub struct Waiter(pub(super) Arc<()>);

impl PartialEq for Waiter {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Waiter {}

/// A worker that was granted to a process; returned with [`Leases::ended`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// Slot of the lease.
    pub slot: Slot,
    /// Id of the lease.
    pub lease: String,
    /// Id of the worker; zeros if the server gave none.
    pub worker: [u8; 16],
    /// User for whom it counts; `None` for a program that an earlier daemon served.
    pub user: Option<u32>,
}

/// A program that a lease did not serve, or not to its end; shown to its user and to root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Uid of the process.
    pub uid: u32,
    /// User name, if the user database knows one.
    pub user: String,
    /// Pid that the process had.
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
    /// Uid of the process.
    pub uid: u32,
    /// Pid in the daemon's namespace.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Since when it has no connection; `None` if it is back.
    pub since: Option<Time>,
    /// Number of interruptions so far.
    pub number: u32,
}
