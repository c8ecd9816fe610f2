//! Leases that give their GPUs to others while they are idle.
//!
//! A parked lease has programs, whose device memory is in host memory. A lent lease has none. Both
//! come back when a program or the owner wants them.

use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::control::pool_event::Event;
use gpusession_proto::control::{self as wire, PoolEvent};
use gpusession_proto::readings::uuid_bytes;
use tokio::time::{Instant, timeout};
use tracing::{error, info, warn};

use super::parked::{Away, Stage};
use super::state::Pool;
use crate::audit;
use crate::clock::Moment;
use crate::lease::{Lease, Place, Share};
use crate::monitor::Readings;
use crate::supervise::WorkerId;
use crate::supervise::park::{Cause, GONE_TIMEOUT, LEFT_BYTES, NotParked, Parked, Serving};

/// Interval at which a lease that waits for its GPUs checks for room.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Time after which a program returns even if NVML reports no room: the ledger may count too much.
const ROOM_TIMEOUT: Duration = Duration::from_secs(600);
/// Wait for room that the journal need not have: processes exit within seconds.
const QUIET_WAIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for a reading of NVML.
const READING_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of host memory that stay free, in addition to parked device memory.
const HOST_MARGIN: u64 = 1 << 30;

/// Reason why a lease was not parked or lent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParkError {
    /// The lease does not exist.
    #[error("no such lease")]
    NoLease,
    /// The lease is parked or lent, or on its way.
    #[error("the lease is {0}")]
    Away(&'static str),
    /// A program has GPU work.
    #[error("a program of the lease uses its GPU now; it can be parked when its work is done")]
    Busy,
    /// The driver cannot park these programs.
    #[error("its programs cannot be parked: {0}")]
    Never(String),
    /// Host memory is short.
    #[error("no room in host memory for {wanted} MiB: parked_max leaves {left} MiB")]
    NoRoom {
        /// MiB of device memory that the lease's programs hold.
        wanted: u64,
        /// MiB of host memory that are left.
        left: u64,
    },
    /// The driver or a helper process failed.
    #[error("parking failed: {0}")]
    Failed(String),
}

/// Returns `MemTotal` and `MemAvailable`, in bytes.
fn host_memory() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let of = |key: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(key))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    (of("MemTotal:").unwrap_or(0) << 10, of("MemAvailable:").unwrap_or(0) << 10)
}

/// Returns `true` unless NVML reports less free memory on a GPU than is to move there.
fn fits(latest: &Readings, shares: &[Share], room: &[u64]) -> bool {
    shares.iter().zip(room).all(|(share, room)| {
        let free = uuid_bytes(&share.gpu).and_then(|uuid| latest.gpu(&uuid)?.memory_free_bytes);
        free.is_none_or(|free| free >= *room)
    })
}

/// Returns the event of a lease that gives away its GPUs, or has GPUs again.
fn lease_moved(event: &str, lease: &Lease, detail: &str) -> audit::Event {
    audit::Event {
        client: lease.client.clone(),
        lease: lease.id.clone(),
        gpus: lease.shares.iter().map(|share| share.gpu.clone()).collect(),
        detail: detail.into(),
        ..audit::own(event)
    }
}

impl Pool {
    /// Parks a lease: moves its programs' device memory to host memory, and lends its GPUs. An
    /// error leaves everything as it was.
    pub async fn park(&self, lease: &str, why: &str) -> Result<(), ParkError> {
        let serving = self.supervisor().serving(lease);
        self.give_away(lease, why, serving).await
    }

    /// Lends a lease without programs. If one has started meanwhile, the lease keeps its GPUs.
    pub async fn lend(&self, lease: &str, why: &str) -> Result<(), ParkError> {
        self.give_away(lease, why, Vec::new()).await
    }

    /// Parks or lends a lease. `serving` are its known programs: a further one keeps the lease
    /// where it is.
    async fn give_away(&self, lease: &str, why: &str, serving: Vec<Serving>) -> Result<(), ParkError> {
        let parking = self.parking();
        let Some(standing) = self.registry().get(lease).await else { return Err(ParkError::NoLease) };
        if standing.lease.mps && !serving.is_empty() {
            return Err(ParkError::Never("NVIDIA's driver moves no memory of programs under MPS".into()));
        }
        if self.supervisor().shares_memory(lease) {
            return Err(self.not_parked(lease, NotParked::Shares));
        }
        if let Some(never) = parking.never(lease)
            && !serving.is_empty()
        {
            return Err(ParkError::Never(never));
        }
        let bytes = Serving::sum(&serving);
        self.reserve_host_memory(lease, bytes)?;
        let begun = tokio::time::Instant::now();
        let mut parked = Vec::new();
        if let Err(failed) = self.move_all_out(lease, &serving, &mut parked).await {
            self.keep(lease, &serving, parked).await;
            return Err(self.not_parked(lease, failed));
        }
        self.registry().lend(lease).await;
        let state = if parked.is_empty() { "lent" } else { "parked" };
        // Its next call counts as work again.
        parking.clock(lease, |clock| clock.set_hint(None));
        if let Some(entry) = parking.away().get_mut(lease) {
            entry.parked = parked;
            entry.stage = entry.stage.parked(self.now());
        }
        info!(
            message_id = gpusession_proto::journal::Event::LeaseParked.id(),
            gpusession_lease = lease,
            gpusession_client = standing.lease.client,
            gpusession_reason = why,
            "lease {lease} of {} is {state}: {why} ({} programs, {} MiB in {} ms)",
            standing.lease.client,
            serving.len(),
            bytes >> 20,
            begun.elapsed().as_millis()
        );
        self.note_within_allowance(lease_moved(&format!("lease-{state}"), &standing.lease, why));
        self.tell_state(&standing.lease.client, lease, state, why);
        parking.due.notify_one();
        Ok(())
    }

    /// Reserves host memory for the device memory of a lease, before any memory moves.
    fn reserve_host_memory(&self, lease: &str, bytes: u64) -> Result<(), ParkError> {
        let (total, available) = host_memory();
        let mut away = self.parking().away();
        if let Some(there) = away.get(lease) {
            return Err(ParkError::Away(match there.stage {
                Stage::Away if there.parked.is_empty() => "lent already",
                Stage::Away => "parked already",
                _ => "being parked or coming back",
            }));
        }
        let taken = away.values().map(|a| a.bytes).fold(0, u64::saturating_add);
        // Memory on its way is still part of the host's available memory.
        let coming = away.values().filter(|a| matches!(a.stage, Stage::Parking { .. })).map(|a| a.bytes);
        let coming = coming.fold(0, u64::saturating_add);
        let left = self
            .config()
            .parked_max
            .of(total)
            .saturating_sub(taken)
            .min(available.saturating_sub(HOST_MARGIN).saturating_sub(coming));
        if bytes > left {
            return Err(ParkError::NoRoom { wanted: bytes.div_ceil(1 << 20), left: left >> 20 });
        }
        away.insert(
            lease.into(),
            Away { stage: Stage::Parking { wanted: false }, parked: Vec::new(), bytes },
        );
        Ok(())
    }

    /// Moves the device memory of all programs to host memory, and gives the GPUs away.
    ///
    /// `parked` gets those that have moved, also before a failure.
    async fn move_all_out(
        &self,
        lease: &str,
        serving: &[Serving],
        parked: &mut Vec<(WorkerId, Parked)>,
    ) -> Result<(), NotParked> {
        for worker in serving {
            if !self.supervisor().pause(&worker.id).await {
                return Err(NotParked::Busy);
            }
            // A paused process shares nothing more.
            if self.supervisor().shares_memory(lease) {
                return Err(NotParked::Shares);
            }
            parked.push((worker.id, self.supervisor().move_out(worker).await?));
            self.check_moved(worker).await?;
        }
        // From here on no program starts.
        match self.supervisor().give_away(lease, serving) {
            true => Ok(()),
            false => Err(NotParked::Busy),
        }
    }

    /// Moves the device memory of a lease back after a failure; its programs continue.
    async fn keep(&self, lease: &str, serving: &[Serving], parked: Vec<(WorkerId, Parked)>) {
        let moved: Vec<WorkerId> = parked.iter().map(|(id, _)| *id).collect();
        if let Some(entry) = self.parking().away().get_mut(lease) {
            entry.stage = Stage::Returning;
        }
        // First the workers that were only paused: the others may wait for room.
        for worker in serving.iter().filter(|worker| !moved.contains(&worker.id)) {
            self.supervisor().resume(&worker.id, Cause::NotParked);
        }
        for (id, parked) in parked {
            self.move_back(lease, &id, parked, Cause::NotParked).await;
        }
        self.parking().away().remove(lease);
        self.parking().changed.notify_waiters();
    }

    /// Moves the device memory of a worker back, and lets its program continue.
    async fn move_back(&self, lease: &str, id: &WorkerId, mut parked: Parked, cause: Cause) {
        self.wait_for_room(lease, id, &parked).await;
        loop {
            self.supervisor().moves(id);
            match self.supervisor().move_in(id, &mut parked).await {
                Ok(true) => return self.supervisor().resume(id, cause),
                // Another lease exceeds its share, or the driver is still busy: both pass, but for
                // driver 580.
                Ok(false) if self.supervisor().exists(id) => {
                    self.supervisor().rests(id);
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
                Ok(false) => return,
                Err(e) => {
                    if self.supervisor().exists(id) {
                        error!(
                            gpusession_lease = lease,
                            "lease {lease}: cannot move device memory back: {e}; killing that worker"
                        );
                        let why = format!("its parked device memory cannot be moved back: {e}");
                        self.supervisor().end_worker(id, None, &why);
                    }
                    return;
                }
            }
        }
    }

    /// Waits until the GPUs of a lease have room for a parked worker, or the worker has exited.
    ///
    /// A worker of another lease may still be exiting. After one attempt without room, driver 580
    /// fails for good (NVIDIA/cuda-checkpoint, issue 44).
    async fn wait_for_room(&self, lease: &str, id: &WorkerId, parked: &Parked) {
        let begun = Instant::now();
        let mut told = false;
        while !self.has_room(lease, parked).await && self.supervisor().exists(id) {
            if begun.elapsed() >= ROOM_TIMEOUT {
                warn!(
                    gpusession_lease = lease,
                    "lease {lease}: NVML has reported no room on its GPUs for {} s: trying to move \
                     device memory back nevertheless",
                    ROOM_TIMEOUT.as_secs()
                );
                return;
            }
            if !told && begun.elapsed() >= QUIET_WAIT_TIMEOUT {
                told = true;
                warn!(
                    gpusession_lease = lease,
                    "lease {lease}: its parked programs wait: NVML reports too little free memory on \
                     its GPUs; `nvidia-smi` names the processes that use them"
                );
            }
        }
    }

    /// Returns `true` if NVML reports room for a parked worker from now on, or does not answer.
    async fn has_room(&self, lease: &str, parked: &Parked) -> bool {
        let Some(standing) = self.registry().get(lease).await else { return true };
        self.reading(|latest| fits(latest, &standing.lease.shares, &parked.room)).await.unwrap_or(true)
    }

    /// Returns what a reading of NVML from now on tells; `None`: NVML does not answer.
    async fn reading<T>(&self, of: impl FnOnce(&Readings) -> T) -> Option<T> {
        let now = Instant::now();
        let mut readings = self.monitor().readings();
        let fresh = readings.wait_for(|latest| latest.as_ref().is_none_or(|latest| latest.asked >= now));
        let latest = timeout(READING_TIMEOUT, fresh).await.ok()?.ok()?;
        latest.as_deref().map(of)
    }

    /// Checks with NVML that a worker's memory has left its GPUs; kills the worker otherwise.
    ///
    /// A client may control the worker, and its answer.
    async fn check_moved(&self, worker: &Serving) -> Result<(), NotParked> {
        let of_worker = |latest: &Readings| {
            let all = latest.memory_of_processes();
            all.iter().filter(|(pid, ..)| *pid == worker.pid).map(|(.., bytes)| *bytes).max()
        };
        let end = Instant::now() + GONE_TIMEOUT;
        loop {
            let left = self.reading(of_worker).await.flatten().unwrap_or(0);
            if left <= LEFT_BYTES {
                return Ok(());
            }
            if Instant::now() >= end {
                let why = format!(
                    "its worker reported that its device memory had moved to host memory, but NVML reports {} MiB of \
                     it on the GPU",
                    left >> 20
                );
                self.supervisor().end_worker(&worker.id, None, &why);
                return Err(NotParked::Failed(why));
            }
        }
    }

    /// Describes why a lease was not parked; remembers it if the driver never parks it.
    fn not_parked(&self, lease: &str, failed: NotParked) -> ParkError {
        match failed {
            NotParked::Busy => ParkError::Busy,
            NotParked::Shares => {
                ParkError::Never("they share device memory, which NVIDIA's driver does not move".into())
            }
            NotParked::Never(text) => {
                warn!(
                    gpusession_lease = lease,
                    "lease {lease}: its programs cannot be parked: {text}; they are warned only"
                );
                self.parking().nevers().insert(lease.into(), text.clone());
                ParkError::Never(text)
            }
            NotParked::Failed(text) => ParkError::Failed(format!("{text}; its programs continue")),
            NotParked::Hangs(text) => {
                ParkError::Failed(format!("{text}; that program was killed, the others continue"))
            }
        }
    }

    /// Asks for a lease's GPUs back; returns its state and place after a moment.
    pub async fn unpark(&self, lease: &str) -> (&'static str, Place) {
        let _ = self.bring_back(lease, POLL_INTERVAL).await;
        self.parking().state(lease).unwrap_or(("active", Place::default()))
    }

    fn wants_back(&self, lease: &str) {
        let mut away = self.parking().away();
        let Some(entry) = away.get_mut(lease) else { return };
        let wanted = entry.stage.wanted(self.now());
        // A program that waits asks again and again.
        if wanted != entry.stage {
            entry.stage = wanted;
            self.parking().due.notify_one();
        }
    }

    /// Waits until a lease has its GPUs, for at most `limit`; the error is its place.
    pub async fn bring_back(&self, lease: &str, limit: Duration) -> Result<(), Place> {
        self.wants_back(lease);
        let back = async {
            loop {
                let changed = self.parking().changed.notified();
                if self.parking().state(lease).is_none() {
                    return;
                }
                let _ = timeout(POLL_INTERVAL, changed).await;
            }
        };
        timeout(limit, back).await.map_err(|_| self.parking().state(lease).unwrap_or_default().1)
    }

    /// Brings leases back when they are wanted and have room. Never returns.
    pub async fn serve_parking(self: Arc<Self>) {
        loop {
            let waiting = {
                let away = self.parking().away();
                away.values().any(|a| matches!(a.stage, Stage::Waiting { .. }))
            };
            let pause = if waiting { POLL_INTERVAL } else { Duration::from_secs(1) };
            tokio::select! {
                () = self.supervisor().wants() => {}
                () = self.parking().due.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
            self.forget_ended().await;
            self.tick_idle().await;
            for lease in self.supervisor().wanted() {
                self.wants_back(&lease);
            }
            let mut queue: Vec<(Moment, String)> = {
                let away = self.parking().away();
                let waits = |(id, a): (&String, &Away)| match a.stage {
                    Stage::Waiting { since, .. } => Some((since, id.clone())),
                    _ => None,
                };
                away.iter().filter_map(waits).collect()
            };
            queue.sort();
            for (since, lease) in queue {
                self.returns(&lease).await;
                if self.parking().state(&lease).is_some_and(|(_, place)| place.position > 0) {
                    self.lend_to(&lease).await;
                }
                let limit = self.config().return_limit;
                if !limit.is_zero() && self.now().saturating_sub(since) >= limit {
                    self.give_up(&lease, limit).await;
                }
            }
        }
    }

    /// Gives a waiting lease its GPUs, if there is room.
    async fn returns(self: &Arc<Self>, lease: &str) {
        let parking = self.parking();
        if !matches!(parking.away().get(lease).map(|a| a.stage), Some(Stage::Waiting { .. })) {
            return;
        }
        let taken = self.registry().reacquire(lease, parking.may_move(lease)).await;
        let waits = taken.err().unwrap_or_default();
        let (told, parked) = {
            let mut away = parking.away();
            let Some(entry) = away.get_mut(lease) else { return };
            let Stage::Waiting { since, place } = entry.stage else { return };
            if taken.is_err() {
                entry.stage = Stage::Waiting { since, place: waits };
                (place, None)
            } else {
                entry.stage = Stage::Returning;
                (place, Some(std::mem::take(&mut entry.parked)))
            }
        };
        if told != waits {
            let Place { position, waiting } = waits;
            if taken.is_err() {
                info!(
                    gpusession_lease = lease,
                    "lease {lease}: waiting for its GPUs, position {position} of {waiting}"
                );
            }
            let change =
                wire::StateChange { state: "returning".into(), position, waiting, ..Default::default() };
            if let Some(standing) = self.registry().get(lease).await {
                self.tell_change(&standing.lease.client, lease, change);
            }
        }
        let Some(parked) = parked else { return };
        if taken == Ok(true) {
            self.moved(lease).await;
        }
        // Other leases need not wait for it.
        let (pool, lease) = (self.clone(), lease.to_string());
        tokio::spawn(async move { pool.move_in(&lease, parked).await });
    }

    /// Moves the device memory of a lease's programs back to its GPUs, which it holds.
    async fn move_in(&self, lease: &str, parked: Vec<(WorkerId, Parked)>) {
        let parking = self.parking();
        let begun = tokio::time::Instant::now();
        let count = parked.len();
        for (id, parked) in parked {
            self.move_back(lease, &id, parked, Cause::Wanted).await;
        }
        parking.away().remove(lease);
        self.supervisor().set_away(lease, false);
        info!(
            gpusession_lease = lease,
            "lease {lease}: has its GPUs again ({count} programs in {} ms)",
            begun.elapsed().as_millis()
        );
        if let Some(standing) = self.registry().get(lease).await {
            self.note_within_allowance(lease_moved("lease-returned", &standing.lease, ""));
            let change = wire::StateChange {
                state: "active".into(),
                reason: "its GPUs are back".into(),
                devices: self.devices_of(&standing.lease).await,
                fencing_token: standing.lease.fencing_token,
                ..Default::default()
            };
            self.tell_change(&standing.lease.client, lease, change);
        }
        parking.changed.notify_waiters();
    }

    /// Gives up a return that has taken too long: stops the parked programs with the reason.
    async fn give_up(&self, lease: &str, limit: Duration) {
        let ids: Vec<WorkerId> = {
            let mut away = self.parking().away();
            let Some(entry) = away.get_mut(lease).filter(|a| matches!(a.stage, Stage::Waiting { .. })) else {
                return;
            };
            entry.stage = Stage::Away;
            entry.bytes = 0;
            entry.parked.drain(..).map(|(id, _)| id).collect()
        };
        self.registry().cancel_reacquire(lease).await;
        if let Some(standing) = self.registry().get(lease).await {
            self.tell_state(&standing.lease.client, lease, "lent", "");
        }
        let why = format!(
            "the program was parked, and its GPU was not free again within {} (return_limit)",
            gpusession_common::units::show_duration(limit)
        );
        warn!(gpusession_lease = lease, "lease {lease}: {why}");
        for id in ids {
            self.supervisor().end_worker(&id, None, &why);
        }
        self.parking().changed.notify_waiters();
    }

    /// Removes workers that have exited, and leases that have ended.
    async fn forget_ended(&self) {
        let leases: Vec<String> = self.parking().away().keys().cloned().collect();
        for lease in leases {
            let gone = !self.registry().holds(&lease).await;
            let mut away = self.parking().away();
            let Some(entry) = away.get_mut(&lease) else { continue };
            if gone && matches!(entry.stage, Stage::Away | Stage::Waiting { .. }) {
                away.remove(&lease);
                continue;
            }
            entry.parked.retain(|(id, _)| self.supervisor().exists(id));
            if entry.parked.is_empty() && entry.stage == Stage::Away {
                entry.bytes = 0;
            }
        }
    }

    pub(super) fn tell_state(&self, client: &str, lease: &str, state: &str, reason: &str) {
        let change = wire::StateChange { state: state.into(), reason: reason.into(), ..Default::default() };
        self.tell_change(client, lease, change);
    }

    fn tell_change(&self, client: &str, lease: &str, change: wire::StateChange) {
        self.notify(client, PoolEvent { lease: lease.into(), event: Some(Event::State(change)) });
    }

    /// Restores the state of a lease that an earlier server parked or lent.
    ///
    /// The memory of parked programs stays in host memory. If the earlier server had reacquired the
    /// GPUs already, the programs come back.
    pub async fn resume_aside(self: &Arc<Self>, lease: &str) {
        let aside = self.registry().is_lent(lease).await;
        let left = self.supervisor().left_parked(lease);
        if !aside && left.is_empty() {
            return;
        }
        let bytes = Serving::sum(&left);
        let stage = match (aside, left.is_empty()) {
            (true, true) => Stage::Away,
            (true, false) => Stage::Parking { wanted: false },
            (false, _) => Stage::Returning,
        };
        self.parking().away().insert(lease.into(), Away { stage, parked: Vec::new(), bytes });
        self.supervisor().set_away(lease, true);
        if stage == Stage::Away {
            return;
        }
        // In a task, since the helper for an earlier release's worker loads the driver.
        let (pool, lease) = (self.clone(), lease.to_string());
        tokio::spawn(async move {
            let mut parked = Vec::new();
            for worker in left {
                match pool.supervisor().keep_parked(&worker).await {
                    Ok(memory) => parked.push((worker.id, memory)),
                    Err(e) => {
                        let why = format!("its parked device memory cannot be reached: {e}");
                        pool.supervisor().end_worker(&worker.id, None, &why);
                    }
                }
            }
            if !aside {
                return pool.move_in(&lease, parked).await;
            }
            if let Some(entry) = pool.parking().away().get_mut(&lease) {
                entry.parked = parked;
                entry.stage = entry.stage.parked(pool.now());
            }
            pool.parking().due.notify_one();
        });
    }

    /// Returns when no device memory is on its way, or after `limit`.
    pub async fn settled(&self, limit: Duration) {
        let moving = || {
            self.parking()
                .away()
                .values()
                .any(|a| matches!(a.stage, Stage::Parking { .. } | Stage::Returning))
        };
        let settled = async {
            while moving() {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        if timeout(limit, settled).await.is_err() {
            warn!(
                "parking: a move of device memory did not end before the stop; programs of its lease lose their GPUs"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use gpusession_proto::readings::{GpuReading, uuid_text};

    use super::*;

    #[test]
    fn a_program_returns_to_gpus_that_are_free_enough() {
        let gpu = |id| GpuReading { uuid: [id; 16], memory_free_bytes: Some(100), ..GpuReading::default() };
        let silent = GpuReading { uuid: [3; 16], ..GpuReading::default() };
        let now = Instant::now();
        let latest = Readings { asked: now, at: now, gpus: vec![gpu(1), gpu(2), silent] };
        let share = |id| Share { gpu: uuid_text(&[id; 16]), limit_bytes: 500, sm_percent: 100 };
        let fits = |gpus: &[u8], room: &[u64]| {
            fits(&latest, &gpus.iter().copied().map(share).collect::<Vec<_>>(), room)
        };
        assert!(fits(&[1, 2], &[100, 0]));
        assert!(!fits(&[1, 2], &[100, 101]), "every GPU has to");
        assert!(fits(&[3, 9], &[500, 500]), "NVML reports nothing of them");
        assert!(fits(&[1], &[]), "nothing counts for the worker");
    }
}
