//! State of all leases, servers and sessions at one moment, for the other parts of the daemon.
//!
//! A view has facts, whose change observers learn, and gauges, which move all the time. Times are
//! on the lease manager's clock; [`Clock`] converts them.

use std::sync::Arc;
use std::time::Duration;

use gpusession_common::words::Class;

use super::process::{Failure, Interruption};
use super::reported::Reported;
use super::session::Session;
use super::spec::{LeaseState, Slot, Spec, Time};
use crate::pool::PoolError;

/// The lease manager's clock and the wall clock at one moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct Clock {
    /// Time since boot.
    pub now: Time,
    /// Microseconds since the epoch.
    pub wall_usec: u64,
}

impl Clock {
    /// Converts a time to wall-clock microseconds.
    pub fn wall_usec(&self, time: Time) -> u64 {
        let ahead = time.saturating_sub(self.now).as_micros() as u64;
        let ago = self.now.saturating_sub(time).as_micros() as u64;
        (self.wall_usec + ahead).saturating_sub(ago)
    }
}

/// A lease as other parts of the daemon see it.
#[derive(Debug, Clone)]
pub struct LeaseView {
    /// Properties that observers are notified of.
    pub facts: LeaseFacts,
    /// Properties that move all the time.
    pub gauges: LeaseGauges,
}

/// Properties of a lease whose change observers learn.
#[derive(Debug, Clone, PartialEq)]
pub struct LeaseFacts {
    /// Slot, the same for as long as the lease is wanted.
    pub slot: Slot,
    /// Id from the server; while pending, an id made of the lease's name.
    pub id: String,
    /// Description with which it was wanted.
    pub spec: Spec,
    /// Owner's uid; `u32::MAX` for all users, `u32::MAX - 1` for an unknown user.
    pub uid: u32,
    /// State that `State` of the D-Bus object shows.
    pub state: LeaseState,
    /// Time of the grant; while pending, of the first request.
    pub created: Time,
    /// Why it is not held, or its latest trouble.
    pub trouble: Option<PoolError>,
    /// Number of processes that use it.
    pub processes: usize,
    /// The latest failed program of each user, and when it failed; the newest last.
    ///
    /// An entry goes when the lease has served another program of that user.
    pub failures: Vec<(Failure, Time)>,
    /// Facts that its server reports; empty while pending.
    pub reported: Reported,
    /// Pid of the leader of its session; 0 without a session.
    pub leader: u32,
}

/// Properties of a lease that move without any observer being notified.
#[derive(Debug, Clone, Default)]
pub struct LeaseGauges {
    /// End of the lease unless it is renewed; `None` while pending.
    pub expires: Option<Time>,
    /// Time of the next try, while pending.
    pub retry: Option<Time>,
    /// Number of workers ready for processes.
    pub stock: usize,
    /// Since when no program uses it, according to the server.
    pub idle_since: Option<Time>,
    /// Free memory of each of its GPUs, in bytes.
    pub memory_free_bytes: Vec<u64>,
    /// Programs whose connection broke at least once.
    pub interruptions: Vec<Interruption>,
}

impl LeaseFacts {
    /// Returns why it waits for GPUs: those that it never had, or those that it lent or parked.
    pub fn waits(&self) -> Option<&PoolError> {
        self.trouble.as_ref().filter(|trouble| match self.state {
            LeaseState::Pending => true,
            LeaseState::Parked => trouble.place.is_some(),
            _ => false,
        })
    }

    /// Returns the transport of its programs' data and the reason; empty while pending.
    pub fn transport(&self) -> (&'static str, &'static str) {
        match (self.reported.devices.is_empty(), self.reported.encrypted) {
            (true, _) => ("", ""),
            (_, true) => ("tcp+tls", "the server encrypts"),
            (_, false) => ("tcp", "the server trusts this network"),
        }
    }
}

/// A server as other parts of the daemon see it.
#[derive(Debug, Clone, Default)]
pub struct ServerView {
    /// Properties that observers are notified of.
    pub facts: ServerFacts,
    /// Properties that move all the time.
    pub gauges: ServerGauges,
}

/// State of a server that was stopped, and has not answered since.
pub const STOPPED: &str = "stopped";

/// Properties of a server whose change observers learn.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ServerFacts {
    /// Name; the address until the server has reported its name.
    pub name: String,
    /// Control address.
    pub address: String,
    /// `connecting`, `online`, `suspect`, `offline`, [`STOPPED`], `draining` or `unauthorized`.
    pub state: String,
    /// Reason of the last failed call; empty after a success.
    pub trouble: String,
    /// Newest version of the data plane's protocol that its workers serve; 0 until reported.
    pub protocol: u32,
    /// Oldest version that they serve; `None` if that is `protocol`.
    pub oldest_protocol: Option<u32>,
    /// Software and version.
    pub software: String,
    /// Number of GPUs that it serves.
    pub devices: u32,
    /// Whether this client has removed it, and has no lease there.
    pub gone: bool,
    /// Rest after which it parks or releases a lease that has no idle timeout itself, in
    /// microseconds; 0 for never or unknown.
    pub idle_timeout_usec: u64,
    /// Time to live that it gives leases that request none, in microseconds; 0 if unknown.
    pub lease_ttl_usec: u64,
}

/// Properties of a server that move without any observer being notified.
#[derive(Debug, Clone, Default)]
pub struct ServerGauges {
    /// Time of its last answer.
    pub last_seen: Option<Time>,
    /// Round trip of the last call.
    pub rtt: Duration,
    /// Number of free GPUs.
    pub free: u32,
    /// Time of its latest word that it was stopped.
    pub stopped: Option<Time>,
}

/// State of all leases, servers and sessions at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Leases in the order in which they were first wanted.
    pub leases: Vec<LeaseView>,
    /// Servers in configuration order, with those that are gone.
    pub servers: Vec<ServerView>,
    /// Login sessions that the daemon tracks; empty if it tracks none.
    pub sessions: Vec<Arc<Session>>,
    /// The moment of the snapshot on both clocks.
    pub clock: Clock,
}

impl Snapshot {
    /// Iterates over the facts of all leases.
    pub fn lease_facts(&self) -> impl Iterator<Item = &LeaseFacts> {
        self.leases.iter().map(|l| &l.facts)
    }

    /// Iterates over the servers of the pool, with their indexes.
    pub fn known_servers(&self) -> impl Iterator<Item = (usize, &ServerView)> {
        self.servers.iter().enumerate().filter(|(_, server)| !server.facts.gone)
    }

    /// Iterates over the facts of the servers of the pool.
    pub fn server_facts(&self) -> impl Iterator<Item = &ServerFacts> {
        self.known_servers().map(|(_, server)| &server.facts)
    }

    /// Finds the index of a server of the pool.
    pub fn server_index(&self, mut wanted: impl FnMut(&ServerFacts) -> bool) -> Option<usize> {
        self.known_servers().find(|(_, server)| wanted(&server.facts)).map(|(index, _)| index)
    }

    /// Returns `true` if observers of `self` learn nothing new from `other`.
    pub fn same_facts(&self, other: &Self) -> bool {
        self.lease_facts().eq(other.lease_facts())
            && self.servers.iter().map(|s| &s.facts).eq(other.servers.iter().map(|s| &s.facts))
            && self.sessions == other.sessions
    }

    /// Finds a lease by its id.
    pub fn lease(&self, id: &str) -> Option<&LeaseView> {
        self.leases.iter().find(|l| l.facts.id == id)
    }

    /// Counts the GPUs of configured leases: wanted, and held.
    pub fn pool(&self) -> (u32, u32) {
        let configured = || self.lease_facts().filter(|l| !l.spec.once);
        let ready = configured()
            .filter(|l| l.state != LeaseState::Pending)
            .map(|l| l.reported.devices.len() as u32)
            .sum();
        (configured().map(|l| l.spec.gpus).sum(), ready)
    }

    /// Returns `true` if every configured lease of class boot is held.
    pub fn booted(&self) -> bool {
        let mut boot = self.lease_facts().filter(|l| !l.spec.once && l.spec.class == Class::Boot);
        boot.all(|l| l.state != LeaseState::Pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_converted_in_both_directions() {
        let clock = Clock { now: Duration::from_secs(100), wall_usec: 5_000_000_000 };
        assert_eq!(clock.wall_usec(Duration::from_secs(100)), 5_000_000_000);
        assert_eq!(clock.wall_usec(Duration::from_secs(103)), 5_003_000_000);
        assert_eq!(clock.wall_usec(Duration::from_secs(98)), 4_998_000_000);
    }

    #[test]
    fn observers_learn_facts_and_no_gauges() {
        let before = Snapshot { servers: vec![ServerView::default()], ..Snapshot::default() };
        let mut now = before.clone();
        now.servers[0].gauges =
            ServerGauges { last_seen: Some(Duration::ZERO), rtt: Duration::MAX, free: 1, stopped: None };
        now.clock.wall_usec = 1;
        assert!(before.same_facts(&now));
        now.servers[0].facts.software = "gpuserver 2".into();
        assert!(!before.same_facts(&now));
        assert!(!before.same_facts(&Snapshot::default()), "a server is gone");
    }
}
