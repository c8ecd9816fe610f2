//! The end of this server: it stops or kills all workers, or leaves them to the next server.

use std::time::Duration;

use tokio::time::timeout;
use tracing::debug;

use super::exit::stop;
use super::process::kill_group;
use super::supervisor::{State, Supervisor};
use super::worker::{Command, Phase};
use crate::pidfd::pidfd_open;

/// Time that a server that is forced to quit waits for the workers that it killed.
const KILL_TIMEOUT: Duration = Duration::from_millis(500);
/// Time that queued messages may take to reach their workers before this server leaves them.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

impl Supervisor {
    /// Starts no more workers, and applies `what` to the state until the last worker has exited.
    async fn until_none(&self, mut what: impl FnMut(&mut State)) {
        loop {
            let mut empty = Box::pin(self.0.empty.notified());
            empty.as_mut().enable();
            {
                let mut state = self.state();
                state.closing = true;
                what(&mut state);
                if state.workers.is_empty() {
                    return;
                }
            }
            empty.await;
        }
    }

    /// Stops every worker and starts no more; returns when the last one has exited.
    pub async fn close(&self, reason: &str) {
        let end = |state: &mut State| {
            for (id, lease) in state.leases.drain() {
                lease.changed.notify_waiters();
                if let Some(mps) = self.mps() {
                    mps.leave(&id);
                }
            }
            for (id, worker) in &mut state.workers {
                stop(id, worker, reason);
            }
        };
        self.until_none(end).await;
        if let Some(mps) = self.mps() {
            mps.close().await;
        }
    }

    /// Kills every worker, including those that could outlive this server.
    ///
    /// Waits a moment for their ends, so that accounting records them.
    pub async fn kill_all(&self) {
        let desk = self.0.options.starter.desk();
        let kill = |state: &mut State| {
            for worker in state.workers.values_mut() {
                worker.phase = Phase::Ending;
                worker.ended_because.get_or_insert_with(|| "the server was forced to quit".into());
                worker.pid.into_iter().for_each(|pid| kill_group(pid, pidfd_open(pid), desk.as_ref()));
            }
        };
        let _ = timeout(KILL_TIMEOUT, self.until_none(kill)).await;
    }

    /// Leaves every worker to the next server and starts no more.
    ///
    /// Queued messages are sent first. Workers outside the store are stopped.
    pub async fn hand_over(&self) {
        let mut told = false;
        let left = self.until_none(|state| {
            if std::mem::replace(&mut told, true) {
                return;
            }
            for (id, worker) in &mut state.workers {
                match worker.kept {
                    Some(_) => drop(worker.orders.tells.send(Command::Leave)),
                    None => stop(id, worker, "the server is restarting"),
                }
            }
        });
        if timeout(LEAVE_TIMEOUT, left).await.is_err() {
            debug!("handover: some workers did not read their queued messages in time; leaving them");
        }
        let left: Vec<_> = self.state().workers.keys().copied().collect();
        left.iter().for_each(|id| self.write_record(id));
        if let Some(mps) = self.mps() {
            mps.close().await;
        }
        self.0.accounting.flush();
        self.0.store.flush_store();
    }
}
