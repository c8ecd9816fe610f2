//! Workers under MPS: their places in domains, the end of their GPU work before their own, and what a fault does to them.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::supervise::Start;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::{Phase, State, Supervisor, TakeError, Worker, WorkerId, hex, stop};
use crate::mps::{self, Happened, MAX_CLIENTS, Seat};

/// After MPS ended the work of a client, the GPU still lets go of it: a process that exits meanwhile takes others of its domain with it.
/// With driver 580 that took 0.2 s.
const SETTLE: Duration = Duration::from_millis(500);
/// A worker is gone this long after it was told to end, whatever it and MPS do: with what the driver takes to free its memory, within 2 s.
pub(super) const END_LIMIT: Duration = Duration::from_millis(1750);
/// How long programs may learn from the driver of a fault before their workers are ended.
const FAULT_GRACE: Duration = Duration::from_secs(1);

impl Supervisor {
    /// Gives a worker that is about to start its place in the domain of its lease, and says what variables it has to have for it.
    pub(super) async fn sit_down(
        &self,
        id: &WorkerId,
        start: &Start,
        own: &[(String, String)],
    ) -> Result<Vec<(OsString, OsString)>, String> {
        let mps = self.mps().ok_or("this server does not share GPUs by MPS any longer")?;
        let seat = Arc::new(mps.seat(&start.lease).await?);
        let mut state = self.state();
        let State { workers, leases, .. } = &mut *state;
        let priority = leases.get(&start.lease).map(|l| l.lease.priority).unwrap_or_default();
        let mut variables = mps::variables(&start.devices, priority, own);
        variables.push(("CUDA_MPS_PIPE_DIRECTORY".into(), seat.pipe_directory().into()));
        let worker = workers.get_mut(id).filter(|w| w.phase != Phase::Ending);
        worker.ok_or("it was told to end")?.seat = Some(seat);
        Ok(variables)
    }

    /// Before a worker ends that uses the GPU under MPS. `quiet`: it says that it has no work there. Returns by that time.
    pub(super) async fn end_gpu_work(&self, id: &WorkerId, quiet: bool, by: Instant) {
        let seat = {
            let state = self.state();
            let worker = state.workers.get(id).filter(|w| w.presented);
            worker.and_then(|w| Some((w.seat.clone()?, w.pid?)))
        };
        if let Some((seat, pid)) = seat {
            let settle = if quiet { Duration::ZERO } else { SETTLE };
            if seat.terminate(pid, by - settle).await {
                sleep(settle).await;
            }
        }
    }

    /// A worker ended without a word: if it was in the middle of its GPU work, others feel it.
    pub(super) fn suspect(&self, id: &WorkerId) {
        let state = self.state();
        if let Some(worker) = state.workers.get(id).filter(|w| w.presented)
            && let Some(seat) = &worker.seat
        {
            seat.suspect();
        }
    }

    /// How many of `count` programs more the MPS server of a lease's domain serves. Workers of the stock have no context and do not
    /// count; who was given one has one soon, and so has who is `soon`.
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
                "{programs} programs with {taken} contexts use the GPU by MPS, and one MPS server serves {MAX_CLIENTS}; end one, or \
                 ask for a lease with sharing = \"time-slice\""
            ))),
            left => Ok(count.min(left)),
        }
    }

    /// Does to workers what happened to their domains, until there are none any more.
    pub(super) async fn serve_mps(self, mut happened: mpsc::UnboundedReceiver<Happened>) {
        while let Some(happened) = happened.recv().await {
            match happened {
                Happened::Stuck { gpus, why } => {
                    let _ = self.0.events.send(super::Event::Stuck { gpus, why });
                }
                Happened::Gone { generation, server } => {
                    self.end_seats(generation, |worker| {
                        let ends = server || worker.process.is_none();
                        ends.then(|| "its MPS daemon died, and what it served with it".to_string())
                    });
                }
                Happened::Fault { generation, culprits, why } => {
                    self.attribute(generation, &culprits, &why);
                    // None of them could serve a program any more: who asks now waits for the next daemon's.
                    self.end_seats(generation, |worker| {
                        (!worker.given).then(|| "its MPS server failed".into())
                    });
                    let this = self.clone();
                    // The other domains need not wait for it.
                    tokio::spawn(async move {
                        sleep(FAULT_GRACE).await;
                        this.end_seats(generation, |worker| {
                            Some(match worker.pid {
                                _ if worker.process.is_none() => "its MPS server failed".into(),
                                Some(pid) if culprits.contains(&pid) => {
                                    format!("a fatal fault of its own on the GPU, under MPS: {why}")
                                }
                                _ if culprits.is_empty() => {
                                    format!("a fatal fault on the GPU by a program of its MPS domain: {why}")
                                }
                                _ => "fault by another client of its MPS domain".into(),
                            })
                        });
                    });
                }
            }
        }
    }

    /// Who did it goes to the journal: it knows both sides.
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
                "MPS: a fault of {program} of {} ends {affected} programs: {why}",
                worker.client
            );
        }
        if culprits.is_empty() {
            warn!("MPS: a fault ends {affected} programs, and MPS does not say whose it was: {why}");
        }
    }

    /// Ends workers with seats at one life of a daemon, where there is a reason.
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
                    "worker {} ends: {reason}",
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
