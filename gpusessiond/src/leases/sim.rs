//! A simulated server of the pool, whose behaviour tests control.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use gpusession_proto::control;
use gpusession_proto::preface;
use gpusession_proto::readings::uuid_text;
use tokio::sync::{mpsc, watch};

use crate::pool::{PoolError, PoolServer, Trouble};

/// State of a [`SimServer`].
#[derive(Debug, Default)]
pub struct SimState {
    /// Calls fail with this error while it is set.
    pub failing: Option<PoolError>,
    /// Number of GPUs.
    pub gpus: u32,
    /// Most GPUs of one request; a larger one is refused as over the limit.
    pub quota: Option<u32>,
    /// Held leases as (id, GPUs, request id).
    pub leases: Vec<(String, u32, String)>,
    /// Workers that were taken, as (lease, worker).
    pub taken: Vec<(String, [u8; 16])>,
    /// Workers whose process exited.
    pub ended: Vec<[u8; 16]>,
    /// Number of heartbeats with leases.
    pub heartbeats: u32,
    /// State of every lease in heartbeats, if it is neither active nor idle.
    pub away: Option<&'static str>,
    /// Ids of leases whose owner asked to park them.
    pub parked: Vec<String>,
    /// Ids of leases with an idle hint.
    pub idle: Vec<String>,
    /// Rest in microseconds after which each lease is parked.
    pub idle_timeouts: HashMap<String, u64>,
    /// Template of a granted lease, for the fields that are equal for all leases.
    pub granted: control::Lease,
    /// Template of a renewed lease, for the fields that are equal for all leases.
    pub renewed: control::RenewedLease,
    /// Ids of withdrawn requests.
    pub withdrawn: Vec<String>,
    /// An administrator is draining the server.
    pub draining: bool,
    /// Ids of released leases.
    pub released: Vec<String>,
    /// All requests for leases.
    pub requests: Vec<control::AllocateRequest>,
    /// Driver environments of cold workers.
    pub environments: Vec<HashMap<String, String>>,
    /// Ids of future leases; generated when empty.
    pub ids: VecDeque<String>,
    /// Reported name; by default the address.
    pub name: Option<String>,
    /// `Describe` does not return while this is set.
    pub hanging: bool,
    /// Data connections are not encrypted.
    pub trusts_network: bool,
    /// Requests for a lease are not answered while this is set.
    pub holds_allocations: bool,
    /// Calls for workers return none while this is set.
    pub no_workers: bool,
    /// Reported oldest and newest version of the data plane; by default the current one.
    pub protocol: Option<(u32, u32)>,
    /// Number of waiting processes of each call for workers.
    pub waiting: Vec<u32>,
    /// Most workers at a time, in stock and of processes; others are refused as over the limit.
    pub most_workers: Option<usize>,
    /// Calls for workers fail with this error.
    pub refuses_workers: Option<PoolError>,
    /// Number of requests for readings that come too soon.
    pub refuses_readings: u32,
    counter: u64,
    watchers: Vec<mpsc::Sender<control::PoolEvent>>,
}

impl SimState {
    fn word(&self) -> &'static str {
        if self.draining { "draining" } else { "online" }
    }

    /// Returns `true` if a client watches events.
    pub fn watched(&self) -> bool {
        !self.watchers.is_empty()
    }
}

/// A server without a network.
#[derive(Clone)]
pub struct SimServer {
    name: String,
    state: Arc<Mutex<SimState>>,
    calls: Arc<watch::Sender<u64>>,
}

/// Rest in microseconds after which a simulated server parks.
pub const IDLE_TIMEOUT: u64 = 1_800_000_000;
/// Ticket key of every simulated lease.
pub const KEY: [u8; 32] = [7; 32];

impl SimServer {
    /// Creates a server with this many GPUs.
    pub fn new(name: &str, gpus: u32) -> Self {
        let granted = control::Lease {
            ticket_key: KEY.to_vec(),
            server: name.into(),
            data_addresses: vec!["127.0.0.1:7602".into()],
            driver_version: "580.1".into(),
            cuda_version: 13000,
            ..Default::default()
        };
        let state = SimState { gpus, granted, ..SimState::default() };
        Self { name: name.into(), state: Arc::new(Mutex::new(state)), calls: Arc::new(watch::channel(0).0) }
    }

    /// Reads or changes the state.
    pub fn with<T>(&self, change: impl FnOnce(&mut SimState) -> T) -> T {
        let result = change(&mut self.state.lock().unwrap_or_else(|e| e.into_inner()));
        self.calls.send_modify(|n| *n += 1);
        result
    }

    /// Waits until the state satisfies `test`, which is called after each call to the server.
    pub async fn until(&self, mut test: impl FnMut(&SimState) -> bool) {
        let mut calls = self.calls.subscribe();
        while !test(&self.state.lock().unwrap_or_else(|e| e.into_inner())) {
            if calls.changed().await.is_err() {
                return;
            }
        }
    }

    /// Sends an event to all watchers.
    pub fn send(&self, event: control::PoolEvent) {
        self.with(|state| state.watchers.retain(|w| w.try_send(event.clone()).is_ok()));
    }

    /// Returns the UUID of a GPU, made of its number and the server's name.
    pub fn uuid(&self, gpu: u32) -> String {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&gpu.to_be_bytes());
        for (to, from) in bytes[4..].iter_mut().zip(self.name.bytes()) {
            *to = from;
        }
        uuid_text(&bytes)
    }

    fn call<T>(&self, call: impl FnOnce(&mut SimState) -> Result<T, PoolError>) -> Result<T, PoolError> {
        self.with(|state| match &state.failing {
            Some(error) => Err(error.clone()),
            None => call(state),
        })
    }
}

fn worker(state: &mut SimState, lease: &str) -> control::Worker {
    state.counter += 1;
    let mut id = [0; 16];
    id[..8].copy_from_slice(&state.counter.to_le_bytes());
    state.taken.push((lease.to_owned(), id));
    control::Worker { id: id.to_vec(), fingerprint: vec![3; 32] }
}

#[async_trait]
impl PoolServer for SimServer {
    fn address(&self) -> &str {
        &self.name
    }

    async fn allocate(&self, request: control::AllocateRequest) -> Result<control::Lease, PoolError> {
        self.with(|state| state.requests.push(request.clone()));
        self.until(|state| !state.holds_allocations).await;
        self.call(|state| {
            let id = match state.leases.iter().find(|(_, _, r)| *r == request.request_id) {
                Some((id, ..)) => id.clone(),
                None => {
                    if state.quota.is_some_and(|q| request.gpus > q) {
                        return Err(PoolError::new(Trouble::LimitExceeded, "over the limit of this client"));
                    }
                    let used: u32 = state.leases.iter().map(|(_, n, _)| n).sum();
                    if used + request.gpus > state.gpus {
                        return Err(PoolError::new(
                            Trouble::NoCapacity,
                            format!("{}: all GPUs are taken", self.name),
                        ));
                    }
                    state.counter += 1;
                    let made_up = format!("sim{:09}", state.counter);
                    let id = state.ids.pop_front().unwrap_or(made_up);
                    state.leases.push((id.clone(), request.gpus, request.request_id.clone()));
                    id
                }
            };
            let idle_timeout_usec = match request.idle_timeout_usec {
                0 => IDLE_TIMEOUT,
                usec => usec.min(IDLE_TIMEOUT),
            };
            state.idle_timeouts.insert(id.clone(), idle_timeout_usec);
            let workers = if state.no_workers || state.refuses_workers.is_some() {
                vec![]
            } else {
                vec![worker(state, &id)]
            };
            Ok(control::Lease {
                id,
                fencing_token: state.counter,
                devices: (0..request.gpus)
                    .map(|i| control::Device {
                        uuid: self.uuid(i),
                        name: "Simulated GPU".into(),
                        memory_bytes: 1 << 30,
                        limit_bytes: 1 << 30,
                        sm_percent: 100,
                        compute_major: 9,
                        state: "leased".into(),
                        ..Default::default()
                    })
                    .collect(),
                ttl_usec: if request.ttl_usec == 0 { 3_600_000_000 } else { request.ttl_usec },
                encrypted: !state.trusts_network,
                workers,
                idle_timeout_usec,
                ..state.granted.clone()
            })
        })
    }

    async fn renew(&self, leases: Vec<String>, _boot_id: String) -> Result<control::RenewReply, PoolError> {
        self.call(|state| {
            state.heartbeats += u32::from(!leases.is_empty());
            let (of_all, idle_timeouts) = (&state.renewed, &state.idle_timeouts);
            let leases = leases
                .into_iter()
                .map(|id| {
                    let lost = !state.leases.iter().any(|(held, ..)| *held == id);
                    let reason = if lost { "no such lease".into() } else { String::new() };
                    let usual = if state.idle.contains(&id) { "idle" } else { "active" };
                    let state = state.away.unwrap_or(usual).into();
                    let idle_timeout_usec = idle_timeouts.get(&id).copied().unwrap_or(0);
                    let renewed = control::RenewedLease { idle_timeout_usec, ..of_all.clone() };
                    control::RenewedLease { id, lost, reason, ttl_usec: 600_000_000, state, ..renewed }
                })
                .collect();
            Ok(control::RenewReply { leases, state: state.word().into() })
        })
    }

    async fn release(&self, lease: String) -> Result<(), PoolError> {
        self.call(|state| {
            state.leases.retain(|(id, ..)| *id != lease);
            state.released.push(lease);
            Ok(())
        })
    }

    async fn withdraw(&self, request_id: String) -> Result<(), PoolError> {
        self.call(|state| {
            state.leases.retain(|(_, _, request)| *request != request_id);
            state.withdrawn.push(request_id);
            Ok(())
        })
    }

    async fn take_workers(
        &self,
        lease: String,
        count: u32,
        waiting: u32,
        environment: HashMap<String, String>,
    ) -> Result<Vec<control::Worker>, PoolError> {
        self.call(|state| {
            state.waiting.push(waiting);
            if !state.leases.iter().any(|(id, ..)| *id == lease) {
                return Err(PoolError::new(Trouble::NoSuchLease, "no such lease"));
            }
            if let Some(error) = &state.refuses_workers {
                return Err(error.clone());
            }
            if state.no_workers {
                return Ok(vec![]);
            }
            let running = state.taken.len() - state.ended.len();
            let room = state.most_workers.map_or(usize::MAX, |most| most.saturating_sub(running));
            if room == 0 {
                return Err(PoolError::new(Trouble::LimitExceeded, "over the limit of workers"));
            }
            let count = count.min(u32::try_from(room).unwrap_or(u32::MAX));
            if !environment.is_empty() {
                state.environments.push(environment);
            }
            Ok((0..count).map(|_| worker(state, &lease)).collect())
        })
    }

    async fn process_ended(&self, _lease: String, worker: Vec<u8>) -> Result<(), PoolError> {
        self.call(|state| {
            state.ended.push(worker.try_into().unwrap_or_default());
            Ok(())
        })
    }

    async fn park(&self, lease: String, park: bool) -> Result<(), PoolError> {
        self.call(|state| {
            state.parked.retain(|parked| *parked != lease);
            if park {
                state.parked.push(lease);
            }
            Ok(())
        })
    }

    async fn idle_hint(&self, lease: String, idle: bool) -> Result<(), PoolError> {
        self.call(|state| {
            state.idle.retain(|known| *known != lease);
            if idle {
                state.idle.push(lease);
            }
            Ok(())
        })
    }

    async fn readings(&self, request: control::ReadingsRequest) -> Result<control::ReadingsReply, PoolError> {
        self.call(|state| {
            if let Some(left) = state.refuses_readings.checked_sub(1) {
                state.refuses_readings = left;
                return Err(PoolError::new(Trouble::LimitExceeded, "the client asks more often"));
            }
            let lease = state.leases.iter().position(|(id, ..)| *id == request.lease);
            let place = lease.ok_or_else(|| PoolError::new(Trouble::NoSuchLease, "no such lease"))?;
            let count = state.leases[place].1;
            // Each answer echoes its query, so that tests can match them.
            let answers = request
                .queries
                .iter()
                .map(|q| control::ReadingAnswer { status: 0, output: q.call.clone().into_bytes() });
            Ok(control::ReadingsReply {
                devices: (0..count)
                    .map(|i| control::DeviceReading {
                        device: Some(control::Device {
                            uuid: self.uuid(i),
                            limit_bytes: 1 << 30,
                            ..Default::default()
                        }),
                        used_bytes: 5,
                        ..Default::default()
                    })
                    .collect(),
                answers: answers.collect(),
                driver_version: "580.1".into(),
                ..Default::default()
            })
        })
    }

    async fn measure(&self, _seconds: u32) -> Result<control::MeasureReply, PoolError> {
        Err(PoolError::new(Trouble::Protocol, "a simulated server has no network"))
    }

    async fn describe(&self, _usage_uid: Option<u32>) -> Result<control::ServerDescription, PoolError> {
        self.until(|state| !state.hanging).await;
        self.call(|state| {
            let free = state.gpus - state.leases.iter().map(|(_, n, _)| n).sum::<u32>();
            Ok(control::ServerDescription {
                name: state.name.as_ref().unwrap_or(&self.name).clone(),
                software: "gpuserver sim".into(),
                protocol: state.protocol.map_or(preface::VERSION.into(), |(_, newest)| newest),
                oldest_protocol: state.protocol.map(|(oldest, _)| oldest),
                state: state.word().into(),
                devices: (0..state.gpus)
                    .map(|i| control::Device {
                        uuid: self.uuid(i),
                        name: "Simulated GPU".into(),
                        memory_bytes: 1 << 30,
                        memory_free_bytes: if i < free { 1 << 30 } else { 0 },
                        state: if i < free { "free" } else { "leased" }.into(),
                        ..Default::default()
                    })
                    .collect(),
                idle_timeout_usec: IDLE_TIMEOUT,
                lease_ttl_usec: 60_000_000,
                ..Default::default()
            })
        })
    }

    async fn watch(
        &self,
        _boot_id: String,
        events: mpsc::Sender<control::PoolEvent>,
    ) -> Result<(), PoolError> {
        self.call(|state| {
            state.watchers.push(events.clone());
            Ok(())
        })?;
        events.closed().await;
        Ok(())
    }
}
