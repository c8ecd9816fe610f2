//! Taking workers for a client's programs: from the stock, or started for one program, within the
//! lease's memory and the limits.

use std::time::Duration;

use gpusession_proto::supervise::MPS_VARIABLES;
use tokio::time::Instant;

use super::errors::{TAKE_TIMEOUT, TakeError};
use super::handover::Store;
use super::messages::say;
use super::run::MAX_PER_LEASE;
use super::stock::WorkerId;
use super::supervisor::{State, Supervisor};
use super::worker::{Phase, Worker};
use crate::lease::Lease;

/// Time that a waiting program gives other programs of its lease to make room.
const ROOM_TIMEOUT: Duration = Duration::from_secs(1);
/// Variables of the CUDA driver that a client process may set for its worker.
///
/// Other variables of a program act on the client's side of the connection.
pub const DRIVER_ENVIRONMENT: &[&str] = &[
    "CUDA_AUTO_BOOST",
    "CUDA_CACHE_DISABLE",
    "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DISABLE_JIT",
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_FORCE_JIT",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_DATA_LOADING",
    "CUDA_MODULE_LOADING",
    "CUDA_SCALE_LAUNCH_QUEUES",
];

/// A worker that a client may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AssignedWorker {
    /// Random id; the preface of a data connection names it.
    pub id: WorkerId,
    /// SHA-256 of its certificate.
    pub fingerprint: [u8; 32],
}

impl Supervisor {
    /// Takes up to `count` ready workers out of the stock, or waits for one if it is empty.
    ///
    /// A request with variables of its own gets a cold worker, started for this call.
    pub async fn take(
        &self,
        client: &str,
        lease: &str,
        count: usize,
        environment: Vec<(String, String)>,
    ) -> Result<Vec<AssignedWorker>, TakeError> {
        let mut environment = environment;
        if !self.state().leases.get(lease).is_some_and(|l| l.lease.mps) {
            // Without MPS these variables have no effect, as on a local card.
            environment.retain(|(name, _)| !MPS_VARIABLES.contains(&name.as_str()));
        }
        if let Some((bad, _)) = environment.iter().find(|(name, value)| {
            !DRIVER_ENVIRONMENT.iter().chain(MPS_VARIABLES).any(|n| n == name)
                || value.contains('\0')
                || value.len() > 256
        }) {
            return Err(TakeError::Environment(bad.clone()));
        }
        let deadline = Instant::now() + TAKE_TIMEOUT;
        if !environment.is_empty() {
            return self.take_cold(client, lease, environment, deadline).await;
        }
        let mut waiting = Waiting { supervisor: self, lease, counted: false };
        loop {
            let changed = {
                let mut state = self.state();
                // In each round, since other programs of the client or user may have taken workers
                // meanwhile.
                let count = self.room(&state, client, lease, count.max(1), None)?;
                let State { workers, leases, .. } = &mut *state;
                let entry = leases.get_mut(lease).ok_or(TakeError::NoLease)?;
                if entry.away {
                    return Err(TakeError::Away);
                }
                let mine = workers.values().filter(|w| w.lease == lease && w.phase != Phase::Ending).count();
                if mine >= MAX_PER_LEASE && entry.stock.ready() == 0 {
                    return Err(TakeError::TooMany(mine));
                }
                let ids = entry.stock.take(count, self.0.clock.now());
                if !ids.is_empty() {
                    if std::mem::take(&mut waiting.counted) {
                        entry.stock.unwait();
                    }
                    let taken =
                        ids.iter().filter_map(|id| take_one(workers.get_mut(id)?, &self.0.store)).collect();
                    drop(state);
                    self.refill(lease);
                    return Ok(taken);
                }
                if entry.stock.paused(self.0.clock.now()) {
                    let reason = entry.stock.failing().unwrap_or("it exited at once").to_string();
                    return Err(TakeError::NotStarting(reason));
                }
                if !waiting.counted {
                    entry.stock.wait();
                    waiting.counted = true;
                }
                // Registered before the lock is released, so that no change is missed.
                let mut changed = Box::pin(entry.changed.clone().notified_owned());
                changed.as_mut().enable();
                changed
            };
            self.refill(lease);
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Err(TakeError::TooSlow);
            }
        }
    }

    /// As [`Supervisor::take`], for programs that wait.
    ///
    /// If they have no room, the lease's other programs are first asked to return unused memory,
    /// and exiting programs get a moment.
    pub async fn take_for_waiting(
        &self,
        client: &str,
        lease: &str,
        count: usize,
        environment: Vec<(String, String)>,
    ) -> Result<Vec<AssignedWorker>, TakeError> {
        let deadline = Instant::now() + ROOM_TIMEOUT;
        loop {
            // Registered before the state is checked, so that no change is missed.
            let changed =
                self.state().leases.get(lease).map(|l| Box::pin(l.changed.clone().notified_owned()));
            let mut changed = changed.ok_or(TakeError::NoLease)?;
            changed.as_mut().enable();
            let over = Instant::now() >= deadline;
            match self.take(client, lease, count, environment.clone()).await {
                Err(TakeError::Memory) if !over => self.recall(lease),
                Err(TakeError::Mps(_)) if !over => {}
                answer => return answer,
            }
            let _ = tokio::time::timeout_at(deadline, changed).await;
        }
    }

    /// Asks a lease's programs to return unused memory, at most once per `ROOM_TIMEOUT`.
    fn recall(&self, lease: &str) {
        let now = self.0.clock.now();
        let mut state = self.state();
        let State { workers, leases, .. } = &mut *state;
        if let Some(lease) = leases.get_mut(lease)
            && lease.recalled.is_none_or(|at| now >= at + ROOM_TIMEOUT)
        {
            lease.recalled = Some(now);
            say(workers, lease.ledger.recall());
        }
    }

    /// Returns how many of `count` workers the lease's client and user may take now.
    ///
    /// Workers that start for other programs count; `own` is the one started for this call.
    fn room(
        &self,
        state: &State,
        client: &str,
        lease: &str,
        count: usize,
        own: Option<&WorkerId>,
    ) -> Result<usize, TakeError> {
        if state.leases.get(lease).is_none_or(|l| l.lease.client != client) {
            return Err(TakeError::NoLease);
        }
        let soon = |w: &Worker| w.is_for_one() && own != Some(&w.id);
        let count = self.room_under_mps(state, lease, count, soon)?;
        let count = Self::room_in_memory(state, lease, count, soon)?;
        Self::room_in_limits(state, lease, count, soon)
    }

    /// Bounds `count` by the room for contexts in the lease's memory.
    ///
    /// Workers that were given and serve no process yet count, too.
    fn room_in_memory(
        state: &State,
        lease: &str,
        count: usize,
        soon: impl Fn(&Worker) -> bool,
    ) -> Result<usize, TakeError> {
        let Some(entry) = state.leases.get(lease) else { return Ok(count) };
        let given = |w: &Worker| w.given && w.process.is_none() && w.phase != Phase::Ending;
        let coming = |w: &&Worker| w.lease == lease && (given(w) || soon(w));
        match entry.ledger.contexts_left().saturating_sub(state.workers.values().filter(coming).count()) {
            0 => Err(TakeError::Memory),
            left => Ok(count.min(left)),
        }
    }

    fn room_in_limits(
        state: &State,
        lease: &str,
        count: usize,
        soon: impl Fn(&Worker) -> bool,
    ) -> Result<usize, TakeError> {
        let Some(Lease { client, user, .. }) = state.leases.get(lease).map(|l| &l.lease) else {
            return Ok(count);
        };
        let serves = |w: &Worker| u64::from(w.serves() || soon(w));
        match state.within((client, user), "workers", count as u64, "programs", serves) {
            Ok(()) => Ok(count),
            Err((_, left @ 1..)) => Ok(left as usize),
            Err((exceeded, _)) => Err(TakeError::Limit(exceeded)),
        }
    }

    async fn take_cold(
        &self,
        client: &str,
        lease: &str,
        environment: Vec<(String, String)>,
        deadline: Instant,
    ) -> Result<Vec<AssignedWorker>, TakeError> {
        let id = {
            let mut state = self.state();
            self.room(&state, client, lease, 1, None)?;
            if state.leases.get(lease).is_some_and(|l| l.away) {
                return Err(TakeError::Away);
            }
            let mine =
                state.workers.values().filter(|w| w.lease == lease && w.phase != Phase::Ending).count();
            if mine >= MAX_PER_LEASE {
                return Err(TakeError::TooMany(mine));
            }
            // It counts from here on, before any other request is checked.
            self.launch(&mut state, lease, environment, false).ok_or(TakeError::NoLease)?
        };
        let mut abandoned = Abandoned { supervisor: self, id, kept: false };
        loop {
            let changed = {
                let mut state = self.state();
                // Other programs may have taken the last place while it started.
                self.room(&state, client, lease, 1, Some(&id))?;
                let entry = state.leases.get(lease).ok_or(TakeError::NoLease)?;
                let mut changed = Box::pin(entry.changed.clone().notified_owned());
                changed.as_mut().enable();
                match state.workers.get_mut(&id) {
                    None => return Err(TakeError::NotStarting("it exited before it was ready".into())),
                    Some(w) if w.phase == Phase::Ending => {
                        let reason = w.ended_because.clone().unwrap_or_default();
                        return Err(TakeError::NotStarting(reason));
                    }
                    Some(w) if w.phase == Phase::Warm => {
                        abandoned.kept = true;
                        return take_one(w, &self.0.store).map(|t| vec![t]).ok_or(TakeError::NoLease);
                    }
                    Some(_) => changed,
                }
            };
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Err(TakeError::TooSlow);
            }
        }
    }
}

/// Takes a caller out of the count of waiting callers, however its wait ends.
struct Waiting<'a> {
    supervisor: &'a Supervisor,
    lease: &'a str,
    counted: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.counted
            && let Some(lease) = self.supervisor.state().leases.get_mut(self.lease)
        {
            lease.stock.unwait();
        }
    }
}

/// Stops a cold worker when its caller no longer waits.
struct Abandoned<'a> {
    supervisor: &'a Supervisor,
    id: WorkerId,
    kept: bool,
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.supervisor.end_worker(&self.id, None, "no program waits for it any longer");
        }
    }
}

fn take_one(worker: &mut Worker, store: &Store) -> Option<AssignedWorker> {
    if worker.phase != Phase::Warm {
        return None;
    }
    worker.phase = Phase::Taken;
    worker.given = true;
    if let Some(keepable) = worker.keepable.take() {
        worker.kept = store.keep(&keepable);
    }
    worker.remember();
    worker.fingerprint.map(|fingerprint| AssignedWorker { id: worker.id, fingerprint })
}
