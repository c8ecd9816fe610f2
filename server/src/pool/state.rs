//! State of the pool, and the facts with which it starts.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use tokio::sync::watch::Sender;

use super::administrators::Administrators;
use super::allowance::Allowance;
use super::clients::Clients;
use super::contact::Peer;
use super::endings::Warned;
use super::members::Members;
use super::parked::Parking;
use super::tls::ServerCertificate;
use super::watch::Watches;
use crate::accounting::{Accounting, Row};
use crate::audit::Audit;
use crate::clock::{Clock, Moment};
use crate::config::Config;
use crate::limits::Rates;
use crate::log_throttle::LogThrottle;
use crate::monitor::Monitor;
use crate::netperf::Endpoints;
use crate::pool::requests::Requests;
use crate::registry::Registry;
use crate::signer::link::Signer;
use crate::statements::Statements;
use crate::store::Shared;
use crate::supervise::Supervisor;

/// Facts about this server, fixed at its start.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Configuration at the start; [`Pool::config`] returns the present one.
    pub config: Config,
    /// Address of the control service.
    pub control: SocketAddr,
    /// Address of the data plane.
    pub data: SocketAddr,
    /// Path of the driver library.
    pub driver: PathBuf,
    /// Version such as 580.159.04; empty for a simulated driver.
    pub driver_version: String,
    /// CUDA version: 1000 * major + 10 * minor.
    pub cuda_version: u32,
}

/// Paths of the pool's files in the state directory.
#[derive(Debug, Clone)]
pub struct Files {
    /// File of the clients.
    pub clients: PathBuf,
    /// File of the administrators.
    pub administrators: PathBuf,
    /// File of the pool's statements.
    pub statements: PathBuf,
    /// File of the servers without the authority's key.
    pub members: PathBuf,
}

impl Files {
    /// Returns the paths in a state directory.
    pub fn below(state_dir: &std::path::Path) -> Self {
        let file = |name| state_dir.join(name);
        let [clients, administrators] = ["clients.json", "administrators.json"].map(file);
        let [statements, members] = ["statements.json", "members.json"].map(file);
        Self { clients, administrators, statements, members }
    }
}

/// Sums of the last 24 hours, and when they were read.
pub(super) type Day = Option<(Moment, Arc<[Row]>)>;

/// State behind the control service; one per process.
pub struct Pool {
    pub(super) facts: Facts,
    pub(super) registry: Arc<dyn Registry>,
    pub(super) supervisor: Supervisor,
    pub(super) monitor: Monitor,
    pub(super) accounting: Accounting,
    pub(super) audit: Audit,
    pub(super) signer: Arc<Signer>,
    pub(super) certificate: Arc<ServerCertificate>,
    /// Warnings about certificates.
    pub(super) warned: Mutex<Warned>,
    /// Held while the signer signs for a client, so that a name has one certificate at a time.
    pub(super) signing: tokio::sync::Mutex<()>,
    pub(super) clients: Mutex<Clients>,
    pub(super) client_file: Shared,
    pub(super) administrators: Mutex<Administrators>,
    pub(super) administrator_file: Shared,
    pub(super) statements: Mutex<Statements>,
    pub(super) statement_file: Shared,
    pub(super) members: Mutex<Members>,
    pub(super) member_file: Shared,
    /// Other servers of the pool that this one asks for statements.
    pub(super) peers: Mutex<Vec<Peer>>,
    /// Random number of this run, in which places of statements count.
    pub(super) run: [u8; 16],
    pub(super) watches: Watches,
    pub(super) config: Mutex<Arc<Config>>,
    pub(super) rates: Mutex<Rates>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) quiet: LogThrottle,
    /// Throttle for lines about programs that a limit refuses.
    pub(super) quiet_of_workers: LogThrottle,
    /// Events of the audit trail that each client may cause at will.
    pub(super) allowance: Mutex<Allowance>,
    pub(super) parking: Parking,
    /// Requests for leases that are being answered.
    pub(super) requests: Requests,
    pub(super) endpoints: Endpoints,
    /// Minute in which running leases were last counted.
    pub(super) noted: AtomicU64,
    pub(super) day: Mutex<Day>,
    /// Leases whose clients have been warned of an end by `lease_ttl`.
    pub(super) ending: Mutex<HashSet<String>>,
    /// `Some` after a request to stop; `true`: at once.
    pub(super) stop: Sender<Option<bool>>,
}
