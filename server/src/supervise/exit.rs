//! A worker's exit: the request to stop, its accounting record, and its removal from the table.

use std::process::ExitStatus;

use nix::sys::signal::Signal;
use tracing::{debug, info, warn};

use super::event::Event;
use super::messages::say;
use super::stock::WorkerId;
use super::supervisor::{LeaseState, State, Supervisor};
use super::worker::{Phase, Worker, WorkerRecord, hex};
use crate::accounting::{Kind, Record};

impl Supervisor {
    /// Removes a worker to which the next server attends.
    pub(super) fn leave(&self, id: &WorkerId) {
        let mut state = self.state();
        state.workers.remove(id);
        if state.workers.is_empty() {
            self.0.empty.notify_waiters();
        }
    }

    /// Returns the accounting record of a worker's program up to now.
    fn record(&self, worker: &WorkerRecord, peak_memory_bytes: u64) -> Option<Record> {
        let process = worker.process.as_ref()?;
        Some(Record {
            kind: Kind::Process,
            lease: worker.lease.clone(),
            worker: hex(&worker.id),
            client: worker.client.clone(),
            user: worker.user().into(),
            uid: process.uid,
            pid: process.pid,
            program: process.program.clone(),
            executable: process.executable.clone(),
            gpus: worker.gpus.clone(),
            start_unix: worker.admitted_unix,
            end_unix: self.0.clock.unix(),
            gpu_busy_usec: u64::try_from(worker.busy.as_micros()).unwrap_or(u64::MAX),
            peak_memory_bytes,
            bytes_to_device: worker.usage.bytes_to_device,
            bytes_from_device: worker.usage.bytes_from_device,
            calls: worker.usage.calls,
            reason: String::new(),
            uids: Vec::new(),
            users: Vec::new(),
        })
    }

    /// Notes a running program for accounting, in case this server does not see its end.
    pub(super) fn note(&self, worker: &WorkerRecord, lease: Option<&LeaseState>) {
        let peak = lease.map_or(worker.usage.memory_bytes, |lease| lease.ledger.peak(&worker.id));
        if let Some(record) = self.record(worker, peak) {
            self.0.accounting.note(record);
        }
    }

    pub(super) fn on_exit(&self, id: &WorkerId, end: String) {
        let mut state = self.state();
        let Some(Worker { book: worker, lease_key, kept, offends, .. }) = state.workers.remove(id) else {
            return;
        };
        if let Some(kept) = kept {
            self.0.store.forget(kept);
        }
        self.shares_gone(&mut state, id);
        let peak_memory_bytes = {
            let State { workers, leases, .. } = &mut *state;
            leases.get_mut(&worker.lease).map_or(worker.usage.memory_bytes, |lease| {
                let peak = lease.ledger.peak(id);
                let says = lease.ledger.on_exit(id);
                say(workers, says);
                peak
            })
        };
        let told = worker.phase == Phase::Ending;
        let early = matches!(worker.phase, Phase::Starting | Phase::Warm);
        let reason = match worker.ended_because.clone() {
            Some(reason) if told => reason,
            Some(reason) => format!("{reason} ({end})"),
            None => end,
        };
        if let Some(ends) = worker.program_event(Some(&reason)) {
            let _ = self.0.events.send(ends);
        }
        if offends {
            let _ = self.0.events.send(worker.killed_event(&reason));
        }
        if worker.given {
            state.farewells.add(*id, lease_key, reason.clone(), self.0.clock.now());
        }
        let (worker_id, lease_id) = (hex(id), worker.lease.clone());
        if let Some(pid) = worker.pid {
            // Later readings of this id are about this process, not about an earlier one.
            state.ended.retain(|(earlier, ..)| *earlier != pid);
            let ended = (pid, worker.gpus.clone(), self.0.clock.now());
            state.ended.push(ended);
        }
        if let Some(record) = self.record(&worker, peak_memory_bytes) {
            self.0.accounting.add(Record { reason: reason.clone(), ..record });
        }
        let mut pause = None;
        if let Some(lease) = state.leases.get_mut(&worker.lease) {
            if early && worker.stocked {
                pause = Some(lease.stock.failed(id, self.0.clock.now(), reason.clone()));
            }
            if worker.process.is_some() {
                lease.unused = self.0.clock.now();
            }
            lease.changed.notify_waiters();
            if worker.given {
                let _ = self.0.events.send(Event::Workers {
                    client: worker.client.clone(),
                    lease: worker.lease.clone(),
                    stock: lease.stock.ready() as u32,
                    ended: Some(*id),
                });
            }
        }
        if state.workers.is_empty() {
            self.0.empty.notify_waiters();
        }
        drop(state);
        self.groups().remove(&worker.client, id);
        self.take_code_back(&worker);
        match pause {
            Some(pause) => warn!(
                gpusession_worker = worker_id,
                gpusession_lease = lease_id,
                "worker {worker_id} of lease {lease_id}: exited before use: {reason}; starting the next one in {} ms",
                pause.as_millis()
            ),
            None => info!(
                gpusession_worker = worker_id,
                gpusession_lease = lease_id,
                "worker {worker_id} of lease {lease_id}: ended: {reason}"
            ),
        }
        self.refill(&lease_id);
    }
}

pub(super) fn stop(id: &WorkerId, worker: &mut Worker, reason: &str) {
    if worker.phase == Phase::Ending {
        return;
    }
    debug!(gpusession_worker = hex(id), "worker {}: stopping: {reason}", hex(id));
    worker.phase = Phase::Ending;
    worker.ended_because = Some(reason.into());
    worker.remember();
    worker.orders.end.send_replace(Some(reason.into()));
}

/// Stops a worker for what its process did; the audit trail has it.
pub(super) fn stop_offender(id: &WorkerId, worker: &mut Worker, reason: &str) {
    worker.offends |= worker.phase != Phase::Ending;
    stop(id, worker, reason);
}

pub(super) fn describe(status: Option<ExitStatus>) -> String {
    use std::os::unix::process::ExitStatusExt;
    let Some(status) = status else { return "it exited".into() };
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(signal) => format!("killed by {}", signal.as_str()),
            Err(_) => format!("killed by signal {signal}"),
        },
        (None, None) => status.to_string(),
    }
}
