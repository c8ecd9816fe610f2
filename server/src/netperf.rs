//! Endpoints of `gpusession netperf`: their bounds, processes and connections.
//!
//! An endpoint is the worker's program without a driver, for one measurement of one client. It is
//! presumed controlled by its client, as a worker is, and no message from it has an effect.

use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::measure::{GRACE_SECONDS, MAX_SECONDS};
use gpusession_proto::preface::Preface;
use gpusession_proto::supervise::{FromWorker, Start, ToWorker};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tracing::{debug, info, warn};

use crate::cgroups::Bounds;
use crate::clock::{self, Clock, Moment, Random};
use crate::starter::Group;
use crate::starter::link::{Program, Starter};
use crate::supervise::channel::Channel;
use crate::supervise::{AdoptError, Supervisor, WorkerId, hex};

/// Most measurements at a time, of all clients.
const MAX_RUNNING: usize = 2;
/// Time from the start of a client's measurement to that of its next one.
const PAUSE_INTERVAL: Duration = Duration::from_secs(60);
/// Time in which an endpoint gets ready.
const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// Seconds after which a client gives up a broken connection.
const RETURN_SECONDS: u32 = 3;
/// Most connections that wait for an endpoint to take them.
const MAX_WAITING: usize = 32;
/// Bounds of an endpoint, well above its source of up to 1 GiB and its 40 connections.
const BOUNDS: Bounds = Bounds { memory: 3 << 30, threads: 256 };

/// Reason why no measurement begins.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoMeasurement {
    /// The client's last measurement still runs, or began less than a minute ago.
    #[error("this client's next measurement may begin in {} s", .0.as_secs().max(1))]
    Again(Duration),
    /// Others measure.
    #[error(
        "{MAX_RUNNING} measurements of other clients run on this server; each ends within {} s",
        MAX_SECONDS + GRACE_SECONDS
    )]
    Full,
    /// The process cannot be used.
    #[error("the endpoint does not start: {0}")]
    Failed(String),
}

/// An endpoint that waits for its client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Id for prefaces and the ticket.
    pub id: WorkerId,
    /// SHA-256 of its certificate.
    pub fingerprint: [u8; 32],
    /// Key of prefaces and tickets.
    pub key: [u8; 32],
}

/// A connection for an endpoint.
struct Adopted {
    preface: Vec<u8>,
    socket: TcpStream,
    peer: SocketAddr,
}

struct Running {
    client: String,
    key: [u8; 32],
    encrypted: bool,
    connections: mpsc::Sender<Adopted>,
}

/// Measurements that run, and the latest one of each client.
#[derive(Default)]
struct Table {
    running: HashMap<WorkerId, Running>,
    begun: HashMap<String, Moment>,
    /// Measurements since the server started, by client.
    counts: BTreeMap<String, u64>,
}

impl Table {
    /// Returns why a client may not measure at this time.
    fn check(&mut self, client: &str, now: Moment) -> Result<(), NoMeasurement> {
        self.begun.retain(|_, begun| now.saturating_sub(*begun) < PAUSE_INTERVAL);
        if let Some(begun) = self.begun.get(client) {
            return Err(NoMeasurement::Again(PAUSE_INTERVAL.saturating_sub(now.saturating_sub(*begun))));
        }
        if self.running.len() >= MAX_RUNNING || self.running.values().any(|r| r.client == client) {
            return Err(NoMeasurement::Full);
        }
        Ok(())
    }

    fn begin(&mut self, id: WorkerId, running: Running, now: Moment) {
        self.begun.insert(running.client.clone(), now);
        *self.counts.entry(running.client.clone()).or_default() += 1;
        self.running.insert(id, running);
    }

    /// Removes a measurement and returns its client; one that did not start does not count for it.
    fn end(&mut self, id: &WorkerId, started: bool) -> Option<String> {
        let Running { client, .. } = self.running.remove(id)?;
        if !started {
            self.begun.remove(&client);
            self.counts.entry(client.clone()).and_modify(|count| *count -= 1);
        }
        Some(client)
    }
}

struct Inner {
    supervisor: Supervisor,
    starter: Starter,
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
    table: Mutex<Table>,
}

/// All endpoints of this server. Cheap to clone.
#[derive(Clone)]
pub struct Endpoints(Arc<Inner>);

/// An entry of the table, which leaves it when the endpoint's task ends, however it ends.
struct Entry {
    endpoints: Endpoints,
    id: WorkerId,
    started: bool,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let ended = self.endpoints.table().end(&self.id, self.started);
        if let Some(client) = ended {
            // With a starter there is none.
            self.endpoints.0.supervisor.groups().own().remove(&beside(&client), &hex(&self.id));
        }
    }
}

/// Returns the name of a group beside the client's, whose bound is for its workers.
fn beside(client: &str) -> String {
    // No client has such a name.
    format!("{client} netperf")
}

impl Endpoints {
    /// Has `starter` start endpoints, with the isolation of the supervisor's workers.
    pub fn new(
        supervisor: &Supervisor,
        starter: Starter,
        clock: Arc<dyn Clock>,
        random: Arc<dyn Random>,
    ) -> Self {
        let (supervisor, table) = (supervisor.clone(), Mutex::default());
        Self(Arc::new(Inner { supervisor, starter, clock, random, table }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of measurements by client since the server started.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.table().counts.clone()
    }

    /// Starts an endpoint that lives for the measurement's seconds and a little longer.
    ///
    /// `encrypted`: it refuses connections without TLS.
    pub async fn begin(
        &self,
        client: &str,
        seconds: u32,
        encrypted: bool,
    ) -> Result<Endpoint, NoMeasurement> {
        let id: WorkerId = clock::bytes(self.0.random.as_ref());
        let key = clock::bytes(self.0.random.as_ref());
        let (sender, connections) = mpsc::channel(MAX_WAITING);
        {
            let (mut table, now) = (self.table(), self.0.clock.now());
            table.check(client, now)?;
            table.begin(id, Running { client: client.into(), key, encrypted, connections: sender }, now);
        }
        let mut entry = Entry { endpoints: self.clone(), id, started: false };
        let (program, channel, fingerprint) =
            self.start(client, &id, key, encrypted).await.map_err(NoMeasurement::Failed)?;
        entry.started = true;
        let life = Duration::from_secs((seconds.min(MAX_SECONDS) + GRACE_SECONDS).into());
        info!(gpusession_client = client, "client {client}: measures the network for {seconds} s");
        tokio::spawn(async move {
            let why = attend(&entry.id, program, &channel, connections, Instant::now() + life).await;
            debug!("measurement {}: ended: {why}", hex(&entry.id));
            drop(entry);
        });
        Ok(Endpoint { id, fingerprint, key })
    }

    async fn start(
        &self,
        client: &str,
        id: &WorkerId,
        key: [u8; 32],
        encrypted: bool,
    ) -> Result<(Program, Channel, [u8; 32]), String> {
        let supervisor = &self.0.supervisor;
        // With a grace, lanes acknowledge chunks, like those of this client's programs.
        let resumes = supervisor.resume_grace(client) > Duration::ZERO;
        let start = Start {
            worker: *id,
            lease: String::new(),
            ticket_key: Some(key),
            driver: String::new(),
            devices: Vec::new(),
            require_tls: encrypted,
            images: false,
            warm: false,
            verify_memory: false,
            mps: false,
            resume_grace_s: if resumes { RETURN_SECONDS } else { 0 },
            staging_bytes: 0,
            isolation: supervisor.isolation().workers,
        };
        let failed = |e: std::io::Error| e.to_string();
        let group = Group { of: beside(client), id: *id, bounds: BOUNDS };
        let started = self.0.starter.endpoint(group, supervisor.spawner(), supervisor.groups().own()).await;
        let (program, fd) = started.map_err(failed)?;
        let channel = Channel::new(fd).map_err(failed)?;
        let ready = async {
            channel.send(&ToWorker::Start(start), None).await.map_err(|e| e.to_string())?;
            loop {
                match channel.recv().await.map_err(|e| e.to_string())? {
                    Some((FromWorker::Ready { fingerprint, .. }, _)) => return Ok(fingerprint),
                    Some((FromWorker::Contained { lacking }, _)) if !lacking.is_empty() => {
                        warn!("measurement {}: not isolated: {}", hex(id), lacking.join("; "));
                    }
                    Some((FromWorker::Failed { reason }, _)) => return Err(reason),
                    Some(_) => {}
                    None => return Err("it exited".to_owned()),
                }
            }
        };
        let ready = timeout(READY_TIMEOUT, ready).await;
        let fingerprint = ready.unwrap_or_else(|_| Err("it is not ready within 10 s".into()))?;
        Ok((program, channel, fingerprint))
    }

    /// Returns `true` if the id is an endpoint's.
    pub fn serve(&self, id: &WorkerId) -> bool {
        self.table().running.contains_key(id)
    }

    /// Hands a data connection to an endpoint.
    ///
    /// A recorded preface may come again: without the ticket it opens nothing, and an endpoint
    /// lives for seconds.
    pub fn adopt(
        &self,
        preface: &Preface,
        socket: TcpStream,
        peer: SocketAddr,
    ) -> Result<(), (AdoptError, TcpStream)> {
        let table = self.table();
        let Some(running) = table.running.get(&preface.worker) else {
            return Err((AdoptError::Unknown, socket));
        };
        if !preface.is_genuine(&running.key) {
            return Err((AdoptError::Forged, socket));
        }
        if running.encrypted && !preface.tls() {
            return Err((AdoptError::Clear, socket));
        }
        let adopted = Adopted { preface: preface.to_bytes().to_vec(), socket, peer };
        running.connections.try_send(adopted).map_err(|e| match e {
            mpsc::error::TrySendError::Full(adopted) => (AdoptError::Busy, adopted.socket),
            mpsc::error::TrySendError::Closed(adopted) => (AdoptError::Unknown, adopted.socket),
        })
    }
}

/// Hands connections over until the endpoint exits or its time is up; returns the reason.
async fn attend(
    id: &WorkerId,
    mut program: Program,
    channel: &Channel,
    mut connections: mpsc::Receiver<Adopted>,
    until: Instant,
) -> String {
    let mut number = 0;
    loop {
        tokio::select! {
            Some(Adopted { preface, socket, peer }) = connections.recv() => {
                number += 1;
                let adopt = ToWorker::Adopt { number, preface, peer: peer.to_string() };
                if let Err(e) = channel.send(&adopt, Some(socket.as_fd())).await {
                    return e.to_string();
                }
            }
            message = channel.recv() => match message {
                Ok(Some((FromWorker::Ended { reason, .. }, _))) => return reason,
                Ok(Some((FromWorker::Refused { reason, .. }, _))) => {
                    debug!("measurement {}: connection refused: {reason}", hex(id));
                }
                Ok(Some(_)) => {}
                Ok(None) => return "it exited".into(),
                Err(e) => return e.to_string(),
            },
            _ = program.wait() => return "it exited".into(),
            () = tokio::time::sleep_until(until) => return "its time is up".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(table: &mut Table, id: u8, client: &str, seconds: u64) -> Result<(), NoMeasurement> {
        let now = Duration::from_secs(seconds);
        table.check(client, now)?;
        let (connections, _) = mpsc::channel(1);
        table.begin(
            [id; 16],
            Running { client: client.into(), key: [0; 32], encrypted: true, connections },
            now,
        );
        Ok(())
    }

    #[test]
    fn a_client_measures_once_a_minute_and_a_server_serves_two() {
        let mut table = Table::default();
        assert_eq!(begin(&mut table, 1, "a", 1000), Ok(()));
        let again = |left| Err(NoMeasurement::Again(Duration::from_secs(left)));
        assert_eq!(begin(&mut table, 2, "a", 1017), again(43));
        assert_eq!(begin(&mut table, 2, "b", 1017), Ok(()));
        assert_eq!(begin(&mut table, 3, "c", 1018), Err(NoMeasurement::Full));
        table.end(&[1; 16], true);
        assert_eq!(begin(&mut table, 3, "c", 1019), Ok(()));
        assert_eq!(begin(&mut table, 4, "a", 1059), again(1), "also after its end");
        table.end(&[2; 16], true);
        assert_eq!(begin(&mut table, 4, "a", 1060), Ok(()));
        assert_eq!(table.counts, [("a", 2), ("b", 1), ("c", 1)].map(|(c, n)| (c.to_owned(), n)).into());
        assert_eq!(table.begun.len(), 3, "forgets clients that may measure again");
        let soon = NoMeasurement::Again(Duration::from_millis(300)).to_string();
        assert!(soon.ends_with(" in 1 s"), "{soon}");
    }

    #[test]
    fn an_endpoint_that_does_not_start_leaves_the_client_its_measurement() {
        let mut table = Table::default();
        assert_eq!(begin(&mut table, 1, "a", 1000), Ok(()));
        table.end(&[1; 16], false);
        assert_eq!(table.counts["a"], 0);
        assert_eq!(begin(&mut table, 2, "a", 1001), Ok(()));
    }
}
