//! Decides whether a process that has shown its ticket is served.
//!
//! A lease of a whole machine belongs to no user: the process tells its user, whose limits then
//! apply.

use std::time::Duration;

use gpusession_proto::supervise::{ClientProcess, ToWorker};
use gpusession_proto::ticket::{self, Ticket};
use tokio::time::{Instant, sleep};
use tracing::info;

use super::exit::stop;
use super::messages::printable;
use super::stock::WorkerId;
use super::supervisor::{State, Supervisor};
use super::worker::{Command, Phase, Worker, exceeds, hex};
use crate::limits::Exceeded;

/// Time that a program above a limit waits for another to exit, and the pause between checks.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(2);
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Time that a worker with a refused program has to exit by itself.
const REPLY_GRACE: Duration = Duration::from_secs(1);

impl Supervisor {
    /// Answers a worker whose process has shown its ticket.
    ///
    /// If a limit refuses it, the check repeats: an exited program of the user may still count for
    /// a moment.
    pub(super) fn presented(&self, state: &mut State, id: WorkerId, process: ClientProcess) {
        let Some(worker) = state.workers.get_mut(&id) else { return };
        let first = !std::mem::replace(&mut worker.presented, true);
        if worker.process.is_some() && worker.serves() {
            // The worker asks again, since it has not received the answer.
            return answer(worker, None);
        }
        // Its ticket says more than the worker, if this server has opened it.
        let process = match worker.ticket.clone() {
            Some(Ticket { uid, user, pid, program, executable, .. }) => {
                ClientProcess { uid, user, pid, program, executable, ..process }
            }
            None => process,
        };
        let process = ClientProcess {
            user: printable(&process.user),
            program: printable(&process.program),
            executable: printable(ticket::shortened(&process.executable)),
            ..process
        };
        if first && self.admit(state, &id, &process).is_err() {
            tokio::spawn(self.clone().wait_for_room(id, process));
        }
    }

    async fn wait_for_room(self, id: WorkerId, process: ClientProcess) {
        let deadline = Instant::now() + ADMISSION_TIMEOUT;
        let why = loop {
            sleep(RETRY_INTERVAL).await;
            let mut state = self.state();
            let Err(exceeded) = self.admit(&mut state, &id, &process) else {
                return;
            };
            if Instant::now() < deadline {
                continue;
            }
            let Some(worker) = state.workers.get(&id) else { return };
            if let Some(more) = self.0.refusals.may() {
                exceeds(&id, worker, &exceeded, more);
            }
            let refusal = worker.refusal("program-refused", Some(exceeded.name), exceeded.to_string());
            let _ = self.0.events.send(refusal);
            let why = exceeded.to_string();
            answer(worker, Some(why.clone()));
            break why;
        };
        // It exits by itself once it has passed on the refusal.
        sleep(REPLY_GRACE).await;
        if let Some(worker) = self.state().workers.get_mut(&id) {
            stop(&id, worker, &why);
        }
    }

    fn admit(&self, state: &mut State, id: &WorkerId, process: &ClientProcess) -> Result<(), Exceeded> {
        let Some(worker) = state.workers.get(id).filter(|w| w.phase == Phase::Taken) else { return Ok(()) };
        // Workers of a user's own lease were counted when they were taken.
        if worker.user.is_empty() {
            let limits = state.limits.of(&worker.client, &process.user);
            if limits.entries("workers").any(|limit| limit.of_user) {
                let of = (&*worker.client, &*process.user);
                let other = |w: &Worker| u64::from(w.serves() && w.id != *id);
                state.within(of, "workers", 1, "programs", other).map_err(|(e, _)| e)?;
            }
        }
        let now = self.0.clock.now();
        let State { workers, leases, .. } = state;
        let Some(worker) = workers.get_mut(id) else { return Ok(()) };
        info!(
            gpusession_worker = hex(id),
            gpusession_lease = worker.lease,
            gpusession_client = worker.client,
            "worker {}: serves {} (pid {}, uid {}) of {}",
            hex(id),
            process.program,
            process.pid,
            process.uid,
            worker.client
        );
        worker.active = now;
        worker.process = Some(process.clone());
        worker.phase = Phase::Active;
        (worker.used_at, worker.admitted_unix) = (now, self.0.clock.unix());
        if let Some(begins) = worker.program_event(None) {
            let _ = self.0.events.send(begins);
        }
        let mut lease = leases.get_mut(&worker.lease);
        if let Some(lease) = &mut lease {
            lease.ledger.admit(*id);
        }
        self.note(worker, lease.as_deref());
        // Its task writes that before the answer, since the next server must know its process, too.
        worker.changes.unwritten = true;
        answer(worker, None);
        Ok(())
    }
}

impl Worker {
    /// Answers whether the ticket that its process has shown is genuine.
    ///
    /// Only the server has the key: the worker could make tickets for the lease's other workers.
    pub(super) fn open(&mut self, sealed: &[u8]) {
        let opened = Ticket::open(sealed, &self.lease_key, &self.id);
        let refused = opened.as_ref().err().map(ToString::to_string);
        if let Ok(ticket) = opened {
            self.ticket = Some(ticket);
        }
        let _ = self.orders.tells.send(Command::Tell(ToWorker::Opened { refused }));
    }
}

fn answer(worker: &Worker, refused: Option<String>) {
    let _ = worker.orders.tells.send(Command::Tell(ToWorker::Admission { refused }));
}
