//! Readings of the GPUs: memory in use, processes, temperatures, faults, and answers to NVML
//! queries.
//!
//! A child process (`gpuserver-worker --monitor`) queries the driver's NVML. It is restarted when
//! it exits. [`Monitor::readings`] serves the server's own decisions, [`Monitor::ask`] clients'
//! queries.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gpusession_proto::message;
use gpusession_proto::readings::{Answer, Fault, FromMonitor, GpuReading, Query, ToMonitor, uuid_text};
use gpusession_proto::supervise::Isolation;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::starter::Purpose;
use crate::starter::link::Starter;

/// Interval of the server's own readings.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which NVML counts as hung, so that the monitor is restarted.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time until NVML must be ready: drivers without persistence take tens of seconds.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// First and longest pause before the monitor is restarted.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// Faults that are kept, of all GPUs together.
const MAX_FAULTS: usize = 64;

/// Latest readings of all GPUs of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readings {
    /// Time at which the monitor was asked for them.
    pub asked: Instant,
    /// Time at which the answer arrived.
    pub at: Instant,
    /// GPUs in no particular order, including ones that this server does not serve.
    pub gpus: Vec<GpuReading>,
}

impl Readings {
    /// Returns the reading of one GPU.
    pub fn gpu(&self, uuid: &[u8; 16]) -> Option<&GpuReading> {
        self.gpus.iter().find(|g| g.uuid == *uuid)
    }

    /// Lists the device memory of processes (process id, GPU, bytes), as far as NVML knows it.
    pub fn memory_of_processes(&self) -> Vec<(u32, [u8; 16], u64)> {
        let of = |g: &GpuReading| {
            let uuid = g.uuid;
            g.processes.clone().into_iter().filter_map(move |(pid, bytes)| Some((pid, uuid, bytes?)))
        };
        self.gpus.iter().flat_map(of).collect()
    }
}

/// A fault of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuFault {
    /// UUID of the GPU.
    pub gpu: [u8; 16],
    /// Fault as the monitor reports it.
    pub fault: Fault,
}

/// Versions of the driver and its NVML.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Versions {
    /// Version such as 580.159.04.
    pub driver: String,
    /// Version such as 13.580.159.04.
    pub nvml: String,
}

type Asked = (Vec<Query>, oneshot::Sender<Vec<Answer>>);

struct Shared {
    readings: watch::Sender<Option<Arc<Readings>>>,
    versions: watch::Sender<Option<Versions>>,
    events: broadcast::Sender<GpuFault>,
    faults: Mutex<Vec<GpuFault>>,
}

/// Handle of the monitor. Cheap to clone.
#[derive(Clone)]
pub struct Monitor {
    shared: Arc<Shared>,
    questions: mpsc::Sender<Asked>,
}

impl Monitor {
    /// Starts the monitor; needs a runtime. The monitor exits when the last handle is dropped.
    ///
    /// The process restricts itself as `isolation` says.
    pub fn start(starter: Starter, driver: PathBuf, isolation: Isolation) -> Self {
        let shared = Arc::new(Shared {
            readings: watch::channel(None).0,
            versions: watch::channel(None).0,
            events: broadcast::channel(256).0,
            faults: Mutex::default(),
        });
        let (questions, asked) = mpsc::channel(256);
        tokio::spawn(supervise(starter, driver, isolation, shared.clone(), asked));
        Self { shared, questions }
    }

    /// Subscribes to readings, taken about every second; `None`: NVML does not answer at present.
    pub fn readings(&self) -> watch::Receiver<Option<Arc<Readings>>> {
        self.shared.readings.subscribe()
    }

    /// Subscribes to faults from now on.
    pub fn events(&self) -> broadcast::Receiver<GpuFault> {
        self.shared.events.subscribe()
    }

    /// Lists the latest faults of a GPU.
    pub fn faults(&self, gpu: &[u8; 16]) -> Vec<Fault> {
        let faults = self.shared.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.iter().filter(|f| f.gpu == *gpu).map(|f| f.fault).collect()
    }

    /// Returns the versions; `None`: NVML is not available at present.
    pub fn versions(&self) -> Option<Versions> {
        self.shared.versions.borrow().clone()
    }

    /// Queries NVML; answers are at most 100 ms old. `None`: NVML does not answer.
    pub async fn ask(&self, queries: Vec<Query>) -> Option<Vec<Answer>> {
        if queries.is_empty() {
            return Some(Vec::new());
        }
        let (reply, answers) = oneshot::channel();
        // Does not wait for a monitor that is not ready.
        self.versions()?;
        self.questions.try_send((queries, reply)).ok()?;
        answers.await.ok()
    }
}

/// Runs the monitor, and restarts it when it exits.
async fn supervise(
    starter: Starter,
    driver: PathBuf,
    isolation: Isolation,
    shared: Arc<Shared>,
    mut asked: mpsc::Receiver<Asked>,
) {
    let mut pause = BACKOFF_MIN;
    let mut told = String::new();
    loop {
        let begun = Instant::now();
        let why = match serve(&starter, &driver, isolation, &shared, &mut asked).await {
            Ok(()) => return,
            Err(e) => e.to_string(),
        };
        shared.versions.send_replace(None);
        shared.readings.send_replace(None);
        // Drops queued queries, so that each fails at once: the monitor has exited.
        while asked.try_recv().is_ok() {}
        if why != told {
            warn!("GPU monitor: no readings: {why}; retrying");
            told = why;
        }
        if begun.elapsed() > BACKOFF_MAX {
            pause = BACKOFF_MIN;
        }
        sleep(pause).await;
        pause = (pause * 2).min(BACKOFF_MAX);
        if asked.is_closed() {
            return;
        }
    }
}

/// Runs one monitor process. Returns `Ok` when the last handle is dropped.
async fn serve(
    starter: &Starter,
    driver: &Path,
    isolation: Isolation,
    shared: &Shared,
    asked: &mut mpsc::Receiver<Asked>,
) -> io::Result<()> {
    let started = starter.helper(Purpose::Monitor, driver, &[isolation.as_str()]).await;
    let (mut child, mut to, from) = started?;
    let (answers_in, mut answers) = mpsc::channel(1);
    let receiving = receive(from, shared, answers_in);
    tokio::pin!(receiving);
    let talking = async {
        match answer(&mut answers, START_TIMEOUT).await? {
            FromMonitor::Ready { driver_version, nvml_version } => {
                info!("driver {driver_version}, NVML {nvml_version}");
                shared.versions.send_replace(Some(Versions { driver: driver_version, nvml: nvml_version }));
            }
            FromMonitor::Failed(reason) => return Err(io::Error::other(reason)),
            _ => {
                return Err(io::Error::other(
                    "the monitor speaks another protocol; install gpuserver-worker of the server's version",
                ));
            }
        }
        let mut next = Instant::now();
        loop {
            tokio::select! {
                biased;
                question = asked.recv() => {
                    let Some((queries, reply)) = question else { return Ok(()) };
                    send(&mut to, &ToMonitor::Ask(queries)).await?;
                    if let FromMonitor::Answers(answers) = answer(&mut answers, ANSWER_TIMEOUT).await? {
                        let _ = reply.send(answers);
                    }
                }
                () = tokio::time::sleep_until(next) => {
                    let asked = Instant::now();
                    next = asked + POLL_INTERVAL;
                    send(&mut to, &ToMonitor::Read).await?;
                    if let FromMonitor::Gpus(gpus) = answer(&mut answers, ANSWER_TIMEOUT).await? {
                        shared.readings.send_replace(Some(Arc::new(Readings { asked, at: Instant::now(), gpus })));
                    }
                }
            }
        }
    };
    tokio::select! {
        ended = talking => ended,
        ended = &mut receiving => match ended {
            Ok(()) => Err(io::Error::other(match timeout(ANSWER_TIMEOUT, child.wait()).await {
                Ok(Ok(status)) => format!("the monitor exited: {status}"),
                _ => "the monitor exited".into(),
            })),
            Err(e) => Err(e),
        },
    }
}

async fn answer(answers: &mut mpsc::Receiver<FromMonitor>, limit: Duration) -> io::Result<FromMonitor> {
    match timeout(limit, answers.recv()).await {
        Ok(Some(message)) => Ok(message),
        // The other branch of the select has the cause.
        Ok(None) => std::future::pending().await,
        Err(_) => Err(io::Error::other(format!("NVML does not answer within {} s", limit.as_secs()))),
    }
}

async fn send<T: Serialize>(to: &mut pipe::Sender, message: &T) -> io::Result<()> {
    to.write_all(&message::encode(message)).await
}

/// Reads the monitor's output until it ends; separates answers from faults.
async fn receive(
    mut from: pipe::Receiver,
    shared: &Shared,
    answers: mpsc::Sender<FromMonitor>,
) -> io::Result<()> {
    loop {
        let mut prefix = [0; 4];
        if from.read_exact(&mut prefix).await.is_err() {
            return Ok(());
        }
        let mut body = vec![0; message::body_len(prefix).map_err(io::Error::other)?];
        from.read_exact(&mut body).await?;
        match message::decode(&body).map_err(io::Error::other)? {
            FromMonitor::Fault { device, event, data } => {
                let mut faults = shared.faults.lock().unwrap_or_else(PoisonError::into_inner);
                let number = faults.last().map_or(1, |f| f.fault.number + 1);
                let fault = GpuFault { gpu: device, fault: Fault { number, event, data } };
                if faults.len() == MAX_FAULTS {
                    faults.remove(0);
                }
                faults.push(fault);
                drop(faults);
                let _ = shared.events.send(fault);
            }
            FromMonitor::Unwatched(gpus) => {
                let which: Vec<_> = gpus.iter().map(uuid_text).collect();
                let which = if which.is_empty() { "any GPU".into() } else { which.join(", ") };
                warn!(
                    "GPU monitor: NVML reports no faults (Xid) of {which}; watching the count of uncorrected ECC errors only"
                );
            }
            message => {
                if answers.send(message).await.is_err() {
                    return Ok(());
                }
            }
        }
    }
}
