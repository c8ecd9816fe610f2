//! Whether a process that has shown its ticket is served. A lease of a whole machine is nobody's own: whose program it is, and what that
//! user's limits say, is known only now.

use std::time::Duration;

use gpusession_proto::supervise::{ClientProcess, ToWorker};
use gpusession_proto::ticket;
use tokio::time::{Instant, sleep};
use tracing::info;

use super::{Command, Phase, State, Supervisor, WorkerId, exceeds, hex, printable};
use crate::limits::Exceeded;

/// How long a program that its user's limits refuse waits for another one that may be ending, and how often that is looked at.
const LIMIT: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(50);

impl Supervisor {
    /// Answers a worker whose process has shown its ticket. Where a limit refuses it, a program of its user that has ended may still be
    /// counted for a moment.
    pub(super) fn admit(&self, state: &mut State, id: WorkerId, process: ClientProcess) {
        let process = ClientProcess {
            user: printable(&process.user),
            program: printable(&process.program),
            executable: printable(ticket::shortened(&process.executable)),
            ..process
        };
        if self.admitted(state, &id, &process).is_ok() {
            return;
        }
        let this = self.clone();
        tokio::spawn(async move {
            let deadline = Instant::now() + LIMIT;
            loop {
                sleep(PAUSE).await;
                let mut state = this.state();
                let Err(exceeded) = this.admitted(&mut state, &id, &process) else {
                    return state.remember(&id);
                };
                if Instant::now() < deadline {
                    continue;
                }
                if let Some(worker) = state.workers.get(&id) {
                    if let Some(more) = this.0.refusals.may() {
                        exceeds(&id, worker, &exceeded, more);
                    }
                    let refused = Some(exceeded.to_string());
                    let _ = worker.stop.send(Command::Tell(ToWorker::Admission { refused }));
                }
                return;
            }
        });
    }

    fn admitted(&self, state: &mut State, id: &WorkerId, process: &ClientProcess) -> Result<(), Exceeded> {
        let Some(worker) = state.workers.get(id) else { return Ok(()) };
        // Those of a user's own lease were counted when the worker was taken.
        if worker.phase == Phase::Taken && worker.process.is_none() && worker.user.is_empty() {
            let limits = state.limits.of(&worker.client, &process.user);
            if limits.entries("workers").any(|limit| limit.of_user) {
                let of = (&*worker.client, &*process.user);
                state.within(of, "workers", 1, "programs", |w| u64::from(w.serves())).map_err(|(e, _)| e)?;
            }
        }
        let now = self.0.clock.now();
        let State { workers, leases, .. } = state;
        let Some(worker) = workers.get_mut(id) else { return Ok(()) };
        // One that asks again has not heard the answer.
        if worker.phase == Phase::Taken && worker.process.is_none() {
            info!(
                gpusession_worker = hex(id),
                gpusession_lease = worker.lease,
                gpusession_client = worker.client,
                "worker {} serves {} (pid {}, uid {}) of {}",
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
            let mut lease = leases.get_mut(&worker.lease);
            if let Some(lease) = &mut lease {
                lease.ledger.admit(*id);
            }
            self.note(worker, lease.as_deref());
        }
        let _ = worker.stop.send(Command::Tell(ToWorker::Admission { refused: None }));
        Ok(())
    }
}
