//! Control groups of workers, wherever they are: in the server's unit, or in that of its starter.

use std::fmt;
use std::sync::Arc;

use super::stock::WorkerId;
use super::worker::hex;
use crate::cgroups::{Bounds, Cgroups, ClientBounds, Met};
use crate::starter::groups::Groups;

/// Control groups of a server's workers. Cheap to clone.
#[derive(Debug, Clone)]
pub struct WorkerGroups {
    /// Groups in the server's unit: with a starter, of workers of an earlier version.
    own: Cgroups,
    there: Option<Arc<Groups>>,
}

impl WorkerGroups {
    /// Combines both; `there`: groups in the unit of the starter, where new workers are.
    pub fn new(own: Cgroups, there: Option<Groups>) -> Self {
        Self { own, there: there.map(Arc::new) }
    }

    /// Returns the groups in the server's unit.
    pub fn own(&self) -> &Cgroups {
        &self.own
    }

    /// Sets the bounds of a worker, if they have changed.
    pub(super) fn bound(&self, client: &str, worker: &WorkerId, bounds: Bounds) {
        self.own.bound(client, &hex(worker), bounds);
        if let Some(there) = &self.there {
            there.bound(client, *worker, bounds);
        }
    }

    /// Sets the bounds of a client, if they have changed.
    pub(super) fn bound_client(&self, client: &str, bounds: ClientBounds) {
        self.own.bound_client(client, bounds);
        if let Some(there) = &self.there {
            there.bound_client(client, bounds);
        }
    }

    /// Sets the bounds of a client with a new worker, whose group may be new.
    pub(super) fn bound_anew(&self, client: &str, bounds: ClientBounds) {
        if let Some(there) = &self.there {
            there.renewed(client);
        }
        self.bound_client(client, bounds);
    }

    /// Returns whose bound the kernel met when it killed a worker for memory; `None` if it did not.
    ///
    /// Waits for the starter.
    pub(super) fn killed(&self, client: &str, worker: &WorkerId) -> Option<Met> {
        let there = || self.there.as_ref().and_then(|there| there.killed(client, *worker));
        self.own.killed(client, &hex(worker)).or_else(there)
    }

    /// Removes the group of an exited worker, and its client's with the last one.
    pub(super) fn remove(&self, client: &str, worker: &WorkerId) {
        self.own.remove(client, &hex(worker));
        if let Some(there) = &self.there {
            there.remove(client, *worker);
        }
    }

    /// Removes the groups of exited workers that were still in use.
    pub(super) fn tick(&self) {
        self.own.tick();
    }
}

/// Shows how the limits of memory are kept.
impl fmt::Display for WorkerGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.there {
            Some(there) => f.write_str(there.limits()),
            None => self.own.fmt(f),
        }
    }
}
