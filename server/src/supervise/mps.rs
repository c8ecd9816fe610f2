//! Workers under MPS: their seats in domains, the end of their GPU work, and the effects of faults.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::supervise::Start;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::errors::TakeError;
use super::event::Event;
use super::exit::stop;
use super::stock::WorkerId;
use super::supervisor::{State, Supervisor};
use super::worker::{Phase, Worker, hex};
use crate::mps::{self, DomainEvent, MAX_CLIENTS, Seat};

/// Time for the GPU to let go of a client's work after MPS ended it (driver 580: 0.2 s).
///
/// A process that exits earlier takes other processes of its domain with it.
const SETTLE_GRACE: Duration = Duration::from_millis(500);
/// Time from a stop request until a worker is killed, whatever it and MPS do.
///
/// The driver needs the rest of 2 s to free its memory.
pub(super) const END_TIMEOUT: Duration = Duration::from_millis(1750);
/// Time in which programs may learn of a fault from the driver before their workers are stopped.
const FAULT_GRACE: Duration = Duration::from_secs(1);

impl Supervisor {
    /// Gives a starting worker its seat in the domain of its lease, and returns the variables for
    /// MPS.
    pub(super) async fn sit_down(
        &self,
        id: &WorkerId,
        start: &Start,
        own: &[(String, String)],
    ) -> Result<Vec<(OsString, OsString)>, String> {
        let mps = self.mps().ok_or("this server no longer shares GPUs by MPS")?;
        let seat = Arc::new(mps.seat(&start.lease).await?);
        let mut state = self.state();
        let State { workers, leases, .. } = &mut *state;
        let priority = leases.get(&start.lease).map(|l| l.lease.priority).unwrap_or_default();
        let mut variables = mps::variables(&start.devices, priority, own);
        variables.push(("CUDA_MPS_PIPE_DIRECTORY".into(), seat.pipe_directory().into()));
        let worker = workers.get_mut(id).filter(|w| w.phase != Phase::Ending);
        worker.ok_or("it was stopped before it started")?.seat = Some(seat);
        Ok(variables)
    }

    /// Ends the GPU work of a worker before the worker itself, under MPS. Returns by `by`.
    ///
    /// `quiet`: the worker has reported that it has no work on the GPU.
    pub(super) async fn end_gpu_work(&self, id: &WorkerId, quiet: bool, by: Instant) {
        let seat = {
            let state = self.state();
            let worker = state.workers.get(id).filter(|w| w.presented);
            worker.and_then(|w| Some((w.seat.clone()?, w.pid?)))
        };
        if let Some((seat, pid)) = seat {
            let settle = if quiet { Duration::ZERO } else { SETTLE_GRACE };
            if seat.terminate(pid, by - settle).await {
                sleep(settle).await;
            }
        }
    }

    /// Checks the domain of a worker that exited unannounced: if it had GPU work, other clients
    /// suffer.
    pub(super) fn suspect(&self, id: &WorkerId) {
        let state = self.state();
        if let Some(worker) = state.workers.get(id).filter(|w| w.presented)
            && let Some(seat) = &worker.seat
        {
            seat.suspect();
        }
    }

    /// Returns how many of `count` more programs the MPS server of the lease's domain can serve.
    ///
    /// Counts workers that a process has or that `soon` selects; workers in stock hold no context.
    pub(super) fn room_under_mps(
        &self,
        state: &State,
        lease: &str,
        count: usize,
        soon: impl Fn(&Worker) -> bool,
    ) -> Result<usize, TakeError> {
        let Some(mps) = self.mps().filter(|_| state.leases.get(lease).is_some_and(|l| l.lease.mps)) else {
            return Ok(count);
        };
        let domain = mps.leases_beside(lease);
        let uses = |w: &&Worker| (w.given || soon(w)) && domain.contains(&w.lease);
        let contexts = |w: &Worker| (w.usage.contexts as usize).clamp(1, MAX_CLIENTS);
        let (programs, taken) =
            state.workers.values().filter(uses).fold((0, 0), |(n, taken), w| (n + 1, taken + contexts(w)));
        match MAX_CLIENTS.saturating_sub(taken) {
            0 => Err(TakeError::Mps(format!(
                "{programs} programs with {taken} contexts use the GPU by MPS, and one MPS server serves {MAX_CLIENTS} contexts; end \
                 a program, or ask for a lease with sharing = \"time-slice\""
            ))),
            left => Ok(count.min(left)),
        }
    }

    /// Applies events of the domains to their workers, until all domains are gone.
    pub(super) async fn serve_mps(self, mut happened: mpsc::UnboundedReceiver<DomainEvent>) {
        while let Some(happened) = happened.recv().await {
            match happened {
                DomainEvent::Stuck { gpus, why } => {
                    let _ = self.0.events.send(Event::Stuck { gpus, why });
                }
                DomainEvent::Gone { generation, server } => {
                    self.end_seats(generation, |worker| {
                        let ends = server || worker.process.is_none();
                        ends.then(|| "its MPS daemon died, and its MPS server with it".to_string())
                    });
                }
                DomainEvent::Fault { generation, culprits, why } => {
                    self.attribute(generation, &culprits, &why);
                    // None of them could serve a program: a new request waits for the next daemon's
                    // workers.
                    self.end_seats(generation, |worker| {
                        (!worker.given).then(|| "its MPS server failed".into())
                    });
                    let this = self.clone();
                    // Other domains need not wait for it.
                    tokio::spawn(async move {
                        sleep(FAULT_GRACE).await;
                        this.end_seats(generation, |worker| {
                            Some(match worker.pid {
                                _ if worker.process.is_none() => "its MPS server failed".into(),
                                Some(pid) if culprits.contains(&pid) => {
                                    format!("it caused a fatal GPU fault under MPS: {why}")
                                }
                                _ if culprits.is_empty() => {
                                    format!("a program of its MPS domain caused a fatal GPU fault: {why}")
                                }
                                _ => "another program of its MPS domain caused a fatal GPU fault".into(),
                            })
                        });
                    });
                }
            }
        }
    }

    /// Logs whose fault it was, and how many programs it stops: the supervisor alone knows both
    /// sides.
    fn attribute(&self, generation: u32, culprits: &[u32], why: &str) {
        let state = self.state();
        let seated = |w: &&Worker| w.seat.as_ref().is_some_and(|s| s.generation() == generation);
        let affected = state.workers.values().filter(seated).filter(|w| w.process.is_some()).count();
        let theirs = |w: &&Worker| w.pid.is_some_and(|pid| culprits.contains(&pid));
        for worker in state.workers.values().filter(seated).filter(theirs) {
            let program = worker.process.as_ref().map_or("?", |p| p.program.as_str());
            warn!(
                gpusession_lease = worker.lease,
                gpusession_client = worker.client,
                "MPS: {program} of {} caused a fatal GPU fault: {why}; stopping {affected} programs of its domain",
                worker.client
            );
        }
        if culprits.is_empty() {
            warn!(
                "MPS: fatal GPU fault by an unknown program: {why}; stopping {affected} programs of its domain"
            );
        }
    }

    /// Stops workers with seats at one generation of a daemon, each for which `reason` returns a
    /// text.
    fn end_seats(&self, generation: u32, reason: impl Fn(&Worker) -> Option<String>) {
        let mut touched = Vec::new();
        {
            let mut state = self.state();
            let State { workers, leases, .. } = &mut *state;
            for (id, worker) in workers.iter_mut() {
                if worker.phase == Phase::Ending
                    || worker.seat.as_deref().is_none_or(|s: &Seat| s.generation() != generation)
                {
                    continue;
                }
                let Some(reason) = reason(worker) else { continue };
                if let Some(lease) = leases.get_mut(&worker.lease) {
                    lease.stock.leave(id, worker.starts());
                }
                info!(
                    gpusession_worker = hex(id),
                    gpusession_lease = worker.lease,
                    "worker {}: stopping: {reason}",
                    hex(id)
                );
                stop(id, worker, &reason);
                touched.push(worker.lease.clone());
            }
        }
        for lease in touched {
            self.refill(&lease);
        }
    }
}
