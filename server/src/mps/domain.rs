//! A domain's state: its leases, the runs of its daemon, and the seats of its workers.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::warn;

use super::control::Control;

/// Identity of a domain.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    /// Client of the leases; empty: all clients.
    pub(super) client: String,
    /// Sorted UUIDs.
    pub(super) gpus: Vec<String>,
}

/// One fault in a listing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FaultView {
    /// Time of the fault, in seconds since 1970.
    pub unix: u64,
    /// Log line of MPS.
    pub why: String,
    /// Worker processes that caused the fault; empty: unknown.
    pub culprits: Vec<u32>,
}

/// One run of a domain's daemon.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) number: u32,
    /// Folder of its sockets.
    pub(super) pipes: PathBuf,
    pub(super) control: Control,
    pub(super) alive: AtomicBool,
}

#[derive(Debug, Clone)]
pub(super) enum Phase {
    Starting,
    Up(Arc<Generation>, Option<u32>),
    Fault,
    Failed(String),
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) phase: Phase,
    /// Leases, with the largest percentage of multiprocessors that each may use.
    pub(super) leases: BTreeMap<String, u32>,
    /// Number of workers by generation.
    pub(super) seats: BTreeMap<u32, usize>,
    pub(super) faults: VecDeque<FaultView>,
    pub(super) starts: u32,
}

#[derive(Debug)]
pub(super) struct Domain {
    pub(super) key: Key,
    pub(super) inner: Mutex<Inner>,
    pub(super) changed: Notify,
    pub(super) suspect: Notify,
}

impl Domain {
    pub(super) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, phase: Phase) {
        self.inner().phase = phase;
        self.changed.notify_waiters();
    }

    pub(super) fn name(&self) -> &str {
        if self.key.client.is_empty() { "*" } else { &self.key.client }
    }

    /// Returns the largest percentage of multiprocessors that a lease of the domain may use.
    pub(super) fn percent(&self) -> u32 {
        self.inner().leases.values().copied().max().unwrap_or(100)
    }

    pub(super) fn seated(&self, generation: u32) -> usize {
        self.inner().seats.get(&generation).copied().unwrap_or(0)
    }
}

/// A worker's seat in a domain; the daemon runs while it has seats.
#[derive(Debug)]
pub struct Seat {
    pub(super) domain: Arc<Domain>,
    pub(super) generation: Arc<Generation>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut inner = self.domain.inner();
        if let Some(n) = inner.seats.get_mut(&self.generation.number) {
            *n -= 1;
            if *n == 0 {
                inner.seats.remove(&self.generation.number);
            }
        }
        drop(inner);
        self.domain.changed.notify_waiters();
    }
}

impl Seat {
    /// Generation of the daemon to which the seat belongs.
    pub fn generation(&self) -> u32 {
        self.generation.number
    }

    /// Folder of the daemon's sockets.
    pub fn pipe_directory(&self) -> PathBuf {
        self.generation.pipes.clone()
    }

    /// Ends the GPU work of a worker before the worker exits, so that no other client is harmed.
    ///
    /// Returns `true` if the work ended by `by`. Returns by then, whatever the daemon does.
    pub async fn terminate(&self, pid: u32, by: Instant) -> bool {
        let mut last = String::new();
        let ends = async {
            while self.generation.alive.load(Ordering::Relaxed) {
                match self.try_to_terminate(pid, by).await {
                    Ok(()) => return true,
                    Err(e) => last = e,
                }
                sleep(Duration::from_millis(20)).await;
            }
            false
        };
        timeout_at(by, ends).await.unwrap_or_else(|_| {
            warn!("MPS domain {}: GPU work of process {pid} did not end in time: {last}", self.domain.name());
            false
        })
    }

    async fn try_to_terminate(&self, pid: u32, by: Instant) -> Result<(), String> {
        // CUDA_SUCCESS, or CUDA_ERROR_INVALID_CONTEXT: the client has no work.
        const DONE: [&str; 2] = ["0", "201"];
        let control = &self.generation.control;
        for server in control.servers().await? {
            let question = format!("terminate_client {server} {pid}");
            let answer = control.ask(&question, by - Instant::now()).await?;
            if !DONE.contains(&answer.trim()) {
                return Err(format!("{question}: {}", answer.trim()));
            }
        }
        Ok(())
    }

    /// Makes the domain query its state at once, because the worker crashed.
    pub fn suspect(&self) {
        self.domain.suspect.notify_one();
    }
}

/// Waits until `so` returns `true` after a change of the domain.
pub(super) async fn until(domain: &Domain, so: impl Fn() -> bool) {
    loop {
        let mut changed = std::pin::pin!(domain.changed.notified());
        changed.as_mut().enable();
        if so() {
            return;
        }
        changed.await;
    }
}
