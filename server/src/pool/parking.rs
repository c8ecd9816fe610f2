//! Leases that give their GPUs to others while they are idle: parked ones, whose programs live on with their device memory in host
//! memory, and lent ones, which have no programs. Both come back by themselves when somebody wants them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::control::pool_event::Event;
use gpusession_proto::control::{self as wire, PoolEvent};
use tokio::sync::Notify;
use tokio::time::timeout;
use tracing::{error, info, warn};

use super::service::Pool;
use crate::clock::Moment;
use crate::idle::Clock;
use crate::lease::Place;
use crate::supervise::WorkerId;
use crate::supervise::park::{NotParked, Parker, Serving};

/// How often a lease that waits for its GPUs looks for room.
const LOOK: Duration = Duration::from_millis(200);
/// Host memory that stays free beside parked device memory.
const HOST_MARGIN: u64 = 1 << 30;

/// Why a lease was not parked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParkError {
    /// There is none.
    #[error("no such lease")]
    NoLease,
    /// It is parked or lent, or on its way.
    #[error("the lease is {0}")]
    Away(&'static str),
    /// Its programs are at work.
    #[error("a program of the lease uses its GPU now; it can be parked when its work is done")]
    Busy,
    /// The driver cannot, as long as the lease has these programs.
    #[error("its programs cannot be parked: {0}")]
    Never(String),
    /// Host memory.
    #[error("no room in host memory for {wanted} MiB: parked_max leaves {left} MiB")]
    NoRoom {
        /// MiB that the lease's programs have.
        wanted: u64,
        /// MiB that are left.
        left: u64,
    },
    /// The driver.
    #[error("parking failed: {0}")]
    Failed(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Parking,
    Away,
    /// Its place, once that is known.
    Waiting {
        since: Moment,
        place: Place,
    },
    Returning,
}

struct Away {
    stage: Stage,
    parkers: Vec<(WorkerId, Parker)>,
    /// Host memory.
    bytes: u64,
}

/// See the module.
#[derive(Default)]
pub struct Parking {
    away: Mutex<HashMap<String, Away>>,
    /// Something may be due.
    due: Notify,
    /// A lease came back, or is not to.
    changed: Notify,
    /// Leases with programs that the driver cannot park, and why.
    never: Mutex<HashMap<String, String>>,
    clocks: Mutex<HashMap<String, Clock>>,
}

impl Parking {
    fn away(&self) -> MutexGuard<'_, HashMap<String, Away>> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nevers(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.never.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a lease is, if it does not simply hold its GPUs: its state's name, and its place among those that wait.
    pub fn state(&self, lease: &str) -> Option<(&'static str, Place)> {
        let away = self.away();
        let entry = away.get(lease)?;
        Some(match (entry.stage, entry.parkers.is_empty()) {
            (Stage::Parking, _) => ("parking", Place::default()),
            (Stage::Away, true) => ("lent", Place::default()),
            (Stage::Away, false) => ("parked", Place::default()),
            (Stage::Waiting { place, .. }, _) => ("returning", place),
            (Stage::Returning, _) => ("returning", Place::default()),
        })
    }

    /// Whether a lease that is away has no programs, whose memory would be bound to its GPUs.
    pub fn may_move(&self, lease: &str) -> bool {
        self.away().get(lease).is_some_and(|a| a.parkers.is_empty())
    }

    /// Asks or tells the idle clock of a lease.
    pub fn clock<T>(&self, lease: &str, what: impl FnOnce(&mut Clock) -> T) -> T {
        let mut clocks = self.clocks.lock().unwrap_or_else(PoisonError::into_inner);
        match clocks.get_mut(lease) {
            Some(clock) => what(clock),
            None => what(clocks.entry(lease.into()).or_default()),
        }
    }

    /// Forgets the clocks of leases that ended.
    pub fn keep_clocks(&self, there: impl Fn(&String) -> bool) {
        self.clocks.lock().unwrap_or_else(PoisonError::into_inner).retain(|lease, _| there(lease));
        self.nevers().retain(|lease, _| there(lease));
    }

    /// Device memory that is in host memory now.
    pub fn parked_bytes(&self) -> u64 {
        self.away().values().map(|a| a.bytes).fold(0, u64::saturating_add)
    }

    /// Why the programs that a lease has now cannot be parked, once the driver has said so.
    pub fn never(&self, lease: &str) -> Option<String> {
        self.nevers().get(lease).cloned()
    }

    /// A lease has other programs, or none.
    pub fn may_again(&self, lease: &str) {
        self.nevers().remove(lease);
    }
}

/// `MemTotal` and `MemAvailable`, in bytes.
fn host_memory() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let of = |key: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(key))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    (of("MemTotal:").unwrap_or(0) << 10, of("MemAvailable:").unwrap_or(0) << 10)
}

impl Pool {
    /// Gives a lease's GPUs to others: the device memory of its programs goes to host memory. Nothing changes on an error.
    pub async fn park(&self, lease: &str, why: &str) -> Result<(), ParkError> {
        let serving = self.supervisor().serving(lease);
        self.give_away(lease, why, serving).await
    }

    /// The same for a lease without programs: one that has begun by now keeps its GPUs.
    pub async fn lend(&self, lease: &str, why: &str) -> Result<(), ParkError> {
        self.give_away(lease, why, Vec::new()).await
    }

    /// `serving`: its programs, as far as they were known. Another one is a reason to leave it as it is.
    async fn give_away(&self, lease: &str, why: &str, serving: Vec<Serving>) -> Result<(), ParkError> {
        let parking = self.parking();
        let Some(standing) = self.registry().get(lease).await else { return Err(ParkError::NoLease) };
        if standing.lease.mps && !serving.is_empty() {
            return Err(ParkError::Never("NVIDIA's driver moves no memory of programs under MPS".into()));
        }
        if let Some(never) = parking.never(lease)
            && !serving.is_empty()
        {
            return Err(ParkError::Never(never));
        }
        let bytes = serving.iter().map(|w| w.bytes).fold(0, u64::saturating_add);
        {
            let (total, available) = host_memory();
            let mut away = parking.away();
            if let Some(there) = away.get(lease) {
                return Err(ParkError::Away(match there.stage {
                    Stage::Away if there.parkers.is_empty() => "lent already",
                    Stage::Away => "parked already",
                    _ => "being parked or coming back",
                }));
            }
            // Reserved before anything is moved.
            let taken = away.values().map(|a| a.bytes).fold(0, u64::saturating_add);
            // What is being moved is not in what the host has less yet.
            let coming = away.values().filter(|a| a.stage == Stage::Parking).map(|a| a.bytes);
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
            away.insert(lease.into(), Away { stage: Stage::Parking, parkers: Vec::new(), bytes });
        }
        let begun = tokio::time::Instant::now();
        let mut parkers = Vec::new();
        let mut failed = None;
        for worker in &serving {
            if !self.supervisor().pause(&worker.id).await {
                failed = Some(NotParked::Busy);
                break;
            }
            match self.supervisor().move_out(worker).await {
                Ok(parker) => parkers.push((worker.id, parker)),
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
        // From here on none begins.
        if failed.is_none() && !self.supervisor().give_away(lease, &serving) {
            failed = Some(NotParked::Busy);
        }
        if let Some(failed) = failed {
            for (id, mut parker) in parkers {
                self.supervisor().moves(&id);
                if let Err(e) = parker.back().await {
                    self.supervisor().end_worker(&id, None, &format!("its device memory was lost: {e}"));
                }
            }
            for worker in &serving {
                self.supervisor().resume(&worker.id);
            }
            parking.away().remove(lease);
            return Err(match failed {
                NotParked::Busy => ParkError::Busy,
                NotParked::Never(text) => {
                    warn!(
                        gpusession_lease = lease,
                        "the driver cannot park the programs of lease {lease}: {text}; they are warned only"
                    );
                    parking.nevers().insert(lease.into(), text.clone());
                    ParkError::Never(text)
                }
                NotParked::Failed(text) => ParkError::Failed(format!("{text}; the programs go on")),
                NotParked::Hangs(text) => {
                    ParkError::Failed(format!("{text}; its program was ended, others go on"))
                }
            });
        }
        self.registry().set_aside(lease).await;
        let state = if parkers.is_empty() { "lent" } else { "parked" };
        // Its next call is work again.
        parking.clock(lease, |clock| clock.set_hint(None));
        if let Some(entry) = parking.away().get_mut(lease) {
            entry.parkers = parkers;
            entry.stage = Stage::Away;
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
        self.tell_state(&standing.lease.client, lease, state, why);
        parking.due.notify_one();
        Ok(())
    }

    /// Asks for a lease's GPUs back; returns its state and place after a moment.
    pub async fn unpark(&self, lease: &str) -> (&'static str, Place) {
        self.wants_back(lease);
        let _ = timeout(LOOK, self.parking().changed.notified()).await;
        self.parking().state(lease).unwrap_or(("active", Place::default()))
    }

    fn wants_back(&self, lease: &str) {
        let mut away = self.parking().away();
        if let Some(entry) = away.get_mut(lease).filter(|a| a.stage == Stage::Away) {
            entry.stage = Stage::Waiting { since: self.now(), place: Place::default() };
            self.parking().due.notify_one();
        }
    }

    /// Waits until a lease has its GPUs, for at most `limit`.
    pub async fn bring_back(&self, lease: &str, limit: Duration) -> Result<(), Place> {
        self.wants_back(lease);
        let back = async {
            loop {
                let changed = self.parking().changed.notified();
                if self.parking().state(lease).is_none() {
                    return;
                }
                let _ = timeout(LOOK, changed).await;
            }
        };
        timeout(limit, back).await.map_err(|_| self.parking().state(lease).unwrap_or_default().1)
    }

    /// Brings back what is wanted, as there is room. Never returns.
    pub async fn serve_parking(self: Arc<Self>) {
        loop {
            let waiting = {
                let away = self.parking().away();
                away.values().any(|a| matches!(a.stage, Stage::Waiting { .. }))
            };
            let pause = if waiting { LOOK } else { Duration::from_secs(1) };
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

    /// Lets a lease that waits have its GPUs, if there is room.
    async fn returns(self: &Arc<Self>, lease: &str) {
        let parking = self.parking();
        if !matches!(parking.away().get(lease).map(|a| a.stage), Some(Stage::Waiting { .. })) {
            return;
        }
        let taken = self.registry().take_back(lease, parking.may_move(lease)).await;
        let waits = taken.err().unwrap_or_default();
        let (told, parkers) = {
            let mut away = parking.away();
            let Some(entry) = away.get_mut(lease) else { return };
            let Stage::Waiting { since, place } = entry.stage else { return };
            if taken.is_err() {
                entry.stage = Stage::Waiting { since, place: waits };
                (place, None)
            } else {
                entry.stage = Stage::Returning;
                (place, Some(std::mem::take(&mut entry.parkers)))
            }
        };
        if told != waits {
            let Place { position, waiting } = waits;
            if taken.is_err() {
                info!(
                    gpusession_lease = lease,
                    "lease {lease} waits for its GPUs, position {position} of {waiting}"
                );
            }
            let change =
                wire::StateChange { state: "returning".into(), position, waiting, ..Default::default() };
            if let Some(standing) = self.registry().get(lease).await {
                self.tell_change(&standing.lease.client, lease, change);
            }
        }
        let Some(parkers) = parkers else { return };
        if taken == Ok(true) {
            self.moved(lease).await;
        }
        // Others need not wait for it.
        let (pool, lease) = (self.clone(), lease.to_string());
        tokio::spawn(async move { pool.move_in(&lease, parkers).await });
    }

    /// Moves the device memory of a lease's programs back to its GPUs, which it has.
    async fn move_in(&self, lease: &str, parkers: Vec<(WorkerId, Parker)>) {
        let parking = self.parking();
        let begun = tokio::time::Instant::now();
        let count = parkers.len();
        for (id, mut parker) in parkers {
            self.supervisor().moves(&id);
            loop {
                match parker.back().await {
                    Ok(true) => break self.supervisor().resume(&id),
                    // Somebody uses more than he holds: it passes, or the driver's own work does.
                    Ok(false) if self.supervisor().exists(&id) => tokio::time::sleep(LOOK).await,
                    Ok(false) => break,
                    Err(e) => {
                        if self.supervisor().exists(&id) {
                            error!(
                                gpusession_lease = lease,
                                "lease {lease}: device memory did not come back: {e}"
                            );
                            let why = format!("its parked device memory did not come back: {e}");
                            self.supervisor().end_worker(&id, None, &why);
                        }
                        break;
                    }
                }
            }
        }
        parking.away().remove(lease);
        self.supervisor().set_away(lease, false);
        info!(
            gpusession_lease = lease,
            "lease {lease} has its GPUs again ({count} programs in {} ms)",
            begun.elapsed().as_millis()
        );
        if let Some(standing) = self.registry().get(lease).await {
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

    /// A lease's programs waited for its GPUs for so long that they are told.
    async fn give_up(&self, lease: &str, limit: Duration) {
        let ids: Vec<WorkerId> = {
            let mut away = self.parking().away();
            let Some(entry) = away.get_mut(lease).filter(|a| matches!(a.stage, Stage::Waiting { .. })) else {
                return;
            };
            entry.stage = Stage::Away;
            entry.bytes = 0;
            entry.parkers.drain(..).map(|(id, _)| id).collect()
        };
        self.registry().stay_aside(lease).await;
        if let Some(standing) = self.registry().get(lease).await {
            self.tell_state(&standing.lease.client, lease, "lent", "");
        }
        let why = format!(
            "the program was parked, and its GPU was not free again within {} (return_limit)",
            crate::config::show_duration(limit)
        );
        warn!(gpusession_lease = lease, "lease {lease}: {why}");
        for id in ids {
            self.supervisor().end_worker(&id, None, &why);
        }
        self.parking().changed.notify_waiters();
    }

    /// Takes workers and leases that ended off the books.
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
            entry.parkers.retain(|(id, _)| self.supervisor().exists(id));
            if entry.parkers.is_empty() && entry.stage == Stage::Away {
                entry.bytes = 0;
            }
        }
    }

    pub(super) fn tell_state(&self, client: &str, lease: &str, state: &str, reason: &str) {
        let change = wire::StateChange { state: state.into(), reason: reason.into(), ..Default::default() };
        self.tell_change(client, lease, change);
    }

    fn tell_change(&self, client: &str, lease: &str, change: wire::StateChange) {
        self.tell(client, PoolEvent { lease: lease.into(), event: Some(Event::State(change)) });
    }

    /// A lease that gave its GPUs to others before this server's start is still lent or parked: the memory of programs that
    /// an earlier server parked is kept on. Where that server had the GPUs back already, it comes back.
    pub async fn resume_aside(self: &Arc<Self>, lease: &str) {
        let aside = self.registry().is_aside(lease).await;
        let parked = self.supervisor().left_parked(lease);
        if !aside && parked.is_empty() {
            return;
        }
        let bytes = parked.iter().map(|w| w.bytes).fold(0, u64::saturating_add);
        let stage = match (aside, parked.is_empty()) {
            (true, true) => Stage::Away,
            (true, false) => Stage::Parking,
            (false, _) => Stage::Returning,
        };
        self.parking().away().insert(lease.into(), Away { stage, parkers: Vec::new(), bytes });
        self.supervisor().set_away(lease, true);
        if stage == Stage::Away {
            return;
        }
        // Each loads the driver, which takes its time.
        let (pool, lease) = (self.clone(), lease.to_string());
        tokio::spawn(async move {
            let mut parkers = Vec::new();
            for worker in parked {
                match pool.supervisor().keep_parked(&worker).await {
                    Ok(parker) => parkers.push((worker.id, parker)),
                    Err(e) => {
                        let why = format!("its parked device memory cannot be reached: {e:?}");
                        pool.supervisor().end_worker(&worker.id, None, &why);
                    }
                }
            }
            if !aside {
                return pool.move_in(&lease, parkers).await;
            }
            if let Some(entry) = pool.parking().away().get_mut(&lease) {
                entry.parkers = parkers;
                entry.stage = Stage::Away;
            }
            pool.parking().due.notify_one();
        });
    }

    /// Returns when no device memory is on its way, or after `limit`.
    pub async fn settled(&self, limit: Duration) {
        let moving =
            || self.parking().away().values().any(|a| matches!(a.stage, Stage::Parking | Stage::Returning));
        let settled = async {
            while moving() {
                tokio::time::sleep(LOOK).await;
            }
        };
        if timeout(limit, settled).await.is_err() {
            warn!("programs whose device memory is on its way lose their GPUs");
        }
    }
}
