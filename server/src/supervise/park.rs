//! Parks single workers.
//!
//! The supervisor makes a worker call the driver no more; the worker then moves its own device
//! memory to host memory and back. `pool::parking` decides which leases are parked, and when.

use std::path::Path;
use std::time::Duration;

use gpusession_proto::supervise::{DeviceLimit, MoveFailed, ToWorker};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::exit::stop;
use super::messages::printable;
use super::stock::WorkerId;
use super::supervisor::{State, Supervisor, ledger};
use super::worker::{Command as ToTask, Phase, Worker};
use crate::clock::Moment;
use crate::lease::Lease;
use crate::spawn;

/// Time that a worker may take to report whether it is quiet.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that the driver may take to lock a process. A process with longer work is not parked.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that device memory may be on its way: 64 GiB took half a minute. A process that is silent
/// for longer hangs in the driver.
const MOVE_TIMEOUT: Duration = Duration::from_secs(600);
/// `CUDA_ERROR_OUT_OF_MEMORY`: the GPU has no room now.
const OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_NOT_READY`: the driver could not lock the process in time.
const NOT_READY: i32 = 600;
/// `CUDA_ERROR_NOT_SUPPORTED`, `CUDA_ERROR_NOT_FOUND`
const UNPARKABLE_STATUSES: [i32; 2] = [801, 500];

/// Time after which NVML no longer reports the memory of a parked process.
pub const GONE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that NVML may report of it nevertheless (H200, driver 580: the process is not listed).
pub const LEFT_BYTES: u64 = 16 << 20;

/// Reason why a worker was not parked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotParked {
    /// Its GPU work did not finish in time.
    Busy,
    /// This driver, or this kind of sharing, cannot park.
    Never(String),
    /// Parking failed; the worker continues.
    Failed(String),
    /// Its process shares device memory with others, which its driver does not move.
    Shares,
    /// The place of its device memory is unknown: the worker cannot continue.
    Hangs(String),
}

/// Reason why a paused or parked worker continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Its program or the lease's owner wants it.
    Wanted,
    /// The lease was not parked after all: its programs are as idle as before.
    NotParked,
}

impl From<MoveFailed> for NotParked {
    fn from(MoveFailed { call, status }: MoveFailed) -> Self {
        let text = format!("{}: CUDA error {status}", printable(&call));
        match status {
            NOT_READY => Self::Busy,
            _ if UNPARKABLE_STATUSES.contains(&status) => Self::Never(text),
            _ => Self::Failed(text),
        }
    }
}

/// Device memory of one worker in host memory.
#[derive(Debug)]
pub struct Parked {
    /// Bytes that the memory takes on each device of the lease.
    pub room: Vec<u64>,
    /// Brings back the memory of a worker that an earlier release has parked.
    helper: Option<Helper>,
}

/// Helper process that reaches the memory of another process.
#[derive(Debug)]
struct Helper {
    // Killed when this is dropped.
    _child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

fn hangs() -> String {
    format!("the process that moves device memory sent nothing for {} s", MOVE_TIMEOUT.as_secs())
}

impl Helper {
    /// Takes over the memory of a worker.
    async fn start(program: &Path, driver: &Path, rest: &[&str], limit: Duration) -> Result<Self, String> {
        let (child, input, output) =
            spawn::child(program, "--parked", driver, rest).map_err(|e| e.to_string())?;
        let mut helper = Self { _child: child, input, lines: BufReader::new(output).lines() };
        match helper.line(limit).await?.as_str() {
            "parked" => Ok(helper),
            line => Err(format!("the helper sent {line:?}")),
        }
    }

    async fn line(&mut self, limit: Duration) -> Result<String, String> {
        let said = timeout(limit, self.lines.next_line()).await.map_err(|_| hangs())?;
        said.map_err(|e| e.to_string())?.ok_or_else(|| "the helper exited".into())
    }

    /// Moves the memory back to the GPU; `false`: the GPU has no room now.
    async fn back(&mut self) -> Result<bool, String> {
        self.input.write_all(b"back\n").await.map_err(|e| e.to_string())?;
        match self.line(MOVE_TIMEOUT).await?.as_str() {
            "back" => Ok(true),
            "full" => Ok(false),
            line => Err(line.into()),
        }
    }
}

/// A worker that serves a process.
#[derive(Debug, Clone)]
pub struct Serving {
    /// Worker id.
    pub id: WorkerId,
    /// Process id of the worker.
    pub pid: u32,
    /// Device memory that counts for the worker, in bytes, on each device of the lease.
    pub bytes: Vec<u64>,
}

impl Serving {
    /// Returns the device memory that counts for these workers, in bytes.
    pub fn sum(workers: &[Self]) -> u64 {
        workers.iter().flat_map(|worker| &worker.bytes).copied().fold(0, u64::saturating_add)
    }
}

impl Supervisor {
    /// Lists the workers of a lease that serve processes.
    pub fn serving(&self, lease: &str) -> Vec<Serving> {
        let state = self.state();
        let mine = state.workers.iter().filter(|(_, w)| w.lease == lease && w.process.is_some());
        let bytes = |id: &WorkerId| {
            let ledger = state.leases.get(lease).map(|l| &l.ledger);
            ledger
                .map_or(Vec::new(), |l| (0..l.devices().len()).map(|device| l.used_by(id, device)).collect())
        };
        let of = |(id, w): (&WorkerId, &Worker)| Some(Serving { id: *id, pid: w.pid?, bytes: bytes(id) });
        mine.filter_map(of).collect()
    }

    /// Returns the number of a lease's processes, and when one of them last had GPU work.
    ///
    /// Without processes the time is when the last one exited, or the lease began.
    pub fn activity(&self, lease: &str) -> (usize, Option<Moment>) {
        let state = self.state();
        let mine = || state.workers.values().filter(|w| w.lease == lease && w.process.is_some());
        let active = mine().map(|w| w.active).max();
        (mine().count(), active.or_else(|| state.leases.get(lease).map(|l| l.unused)))
    }

    /// Returns `true` if a process of the lease shares device memory with other processes.
    pub fn shares_memory(&self, lease: &str) -> bool {
        let state = self.state();
        state.workers.iter().any(|(id, w)| w.lease == lease && state.shares.involve(id))
    }

    /// Returns `true` if the worker exists.
    pub fn exists(&self, id: &WorkerId) -> bool {
        self.state().workers.contains_key(id)
    }

    /// Lists leases with paused or parked workers that their clients want to use.
    pub fn wanted(&self) -> Vec<String> {
        let state = self.state();
        let mut leases: Vec<_> =
            state.workers.values().filter(|w| w.wanted).map(|w| w.lease.clone()).collect();
        leases.sort();
        leases.dedup();
        leases
    }

    /// Returns when [`Supervisor::wanted`] may have changed.
    pub async fn wants(&self) {
        self.0.wants.notified().await;
    }

    /// Makes a worker call the driver no more. `false`: it is busy, and continues.
    pub async fn pause(&self, id: &WorkerId) -> bool {
        let (sender, answer) = oneshot::channel();
        {
            let mut state = self.state();
            let Some(worker) = state.workers.get_mut(id).filter(|w| w.phase == Phase::Active) else {
                return false;
            };
            worker.wanted = false;
            worker.pausing = Some(sender);
            let _ = worker.orders.tells.send(ToTask::Tell(ToWorker::Pause));
        }
        matches!(timeout(PAUSE_TIMEOUT, answer).await, Ok(Ok(true)))
    }

    /// Lets a paused or parked worker continue.
    pub fn resume(&self, id: &WorkerId, cause: Cause) {
        let mut state = self.state();
        if let Some(worker) = state.workers.get_mut(id) {
            worker.pausing = None;
            worker.wanted = false;
            if cause == Cause::Wanted {
                // A program that returns counts as active.
                worker.active = self.0.clock.now();
            }
            worker.moving = false;
            if worker.phase == Phase::Parked {
                worker.phase = Phase::Active;
            }
            worker.remember();
            let _ = worker.orders.tells.send(ToTask::Tell(ToWorker::Resume));
        }
        self.shares_back(&mut state, id);
    }

    /// Has a paused worker move its device memory to host memory.
    ///
    /// The worker's answer is no proof: a client may control it.
    pub async fn move_out(&self, worker: &Serving) -> Result<Parked, NotParked> {
        {
            let mut state = self.state();
            if state.workers.get(&worker.id).is_some_and(|worker| !worker.parks) {
                let why = "a worker of theirs is of an earlier release; restart the program";
                return Err(NotParked::Never(why.into()));
            }
            if state.shares.involve(&worker.id) {
                return Err(NotParked::Shares);
            }
            // Under the same lock: from here on other processes' requests wait.
            if let Some(worker) = state.workers.get_mut(&worker.id) {
                worker.moving = true;
                worker.remember();
            }
        }
        // Its memory comes to the host, and counts there.
        self.bound_now(&worker.id);
        let limit_ms = LOCK_TIMEOUT.as_millis() as u32;
        match self.moved(&worker.id, ToWorker::MoveOut { limit_ms }).await {
            Ok(None) => {}
            Ok(Some(failed)) => return Err(failed.into()),
            Err(why) => {
                self.end_worker(&worker.id, None, &format!("its device memory was lost: {why}"));
                return Err(NotParked::Hangs(why));
            }
        }
        if let Some(worker) = self.state().workers.get_mut(&worker.id) {
            worker.moving = false;
            if worker.phase == Phase::Active {
                worker.phase = Phase::Parked;
            }
            worker.parked_at = Some(self.0.clock.now());
            worker.remember();
        }
        Ok(Parked { room: worker.bytes.clone(), helper: None })
    }

    /// Has a worker move its device memory; returns the driver's refusal, or why none came.
    async fn moved(&self, id: &WorkerId, order: ToWorker) -> Result<Option<MoveFailed>, String> {
        let (sender, answer) = oneshot::channel();
        {
            let mut state = self.state();
            let Some(worker) = state.workers.get_mut(id) else { return Err("its worker exited".into()) };
            worker.relocating = Some(sender);
            let _ = worker.orders.tells.send(ToTask::Tell(order));
        }
        let answer = timeout(MOVE_TIMEOUT, answer).await.map_err(|_| hangs())?;
        answer.map_err(|_| "its worker exited".into())
    }

    /// Moves the device memory of a parked worker back; `false`: the GPU has no room now.
    pub async fn move_in(&self, id: &WorkerId, parked: &mut Parked) -> Result<bool, String> {
        if let Some(helper) = &mut parked.helper {
            return helper.back().await;
        }
        match self.moved(id, ToWorker::MoveBack).await? {
            None => Ok(true),
            Some(MoveFailed { status: OUT_OF_MEMORY, .. }) => Ok(false),
            Some(MoveFailed { call, status }) => Err(format!("{}: CUDA error {status}", printable(&call))),
        }
    }

    /// Gives a lent lease other GPUs. Its workers have exited or are about to.
    pub fn set_devices(&self, lease: &Lease, devices: Vec<DeviceLimit>) {
        if let Some(entry) = self.state().leases.get_mut(&lease.id).filter(|entry| entry.away) {
            // A domain belongs to fixed GPUs.
            if let Some(mps) = self.mps().filter(|_| lease.mps) {
                mps.leave(&lease.id);
                mps.join(lease, &devices);
            }
            entry.lease = lease.clone();
            entry.ledger = ledger(lease, devices).with_peak(entry.ledger.peak_of_all());
        }
    }

    /// Records that a worker's device memory is on its way, until [`Supervisor::resume`].
    ///
    /// If this server exits meanwhile, the next one cannot know where the memory is.
    pub fn moves(&self, id: &WorkerId) {
        if let Some(worker) = self.state().workers.get_mut(id) {
            worker.moving = true;
            worker.remember();
        }
    }

    /// Records that a worker's device memory stays in host memory, where the next server finds it.
    pub fn rests(&self, id: &WorkerId) {
        if let Some(worker) = self.state().workers.get_mut(id) {
            worker.moving = false;
            worker.remember();
        }
    }

    /// Lists the workers of a lease that an earlier server parked.
    pub fn left_parked(&self, lease: &str) -> Vec<Serving> {
        let parked: Vec<WorkerId> = {
            let state = self.state();
            let mine = state.workers.iter().filter(|(_, w)| w.lease == lease && w.phase == Phase::Parked);
            mine.map(|(id, _)| *id).collect()
        };
        self.serving(lease).into_iter().filter(|w| parked.contains(&w.id)).collect()
    }

    /// Takes over the memory of a worker from [`Supervisor::left_parked`].
    pub async fn keep_parked(&self, worker: &Serving) -> Result<Parked, String> {
        let options = &self.0.options;
        let parks = self.state().workers.get(&worker.id).is_some_and(|worker| worker.parks);
        let helper = if parks {
            None
        } else {
            let rest = [options.isolation.workers.as_str(), &worker.pid.to_string()];
            Some(Helper::start(&options.program, &options.driver, &rest, MOVE_TIMEOUT).await?)
        };
        Ok(Parked { room: worker.bytes.clone(), helper })
    }

    /// Gives a lease's GPUs to others, as [`Supervisor::set_away`] does.
    ///
    /// `false`: a process has started that is not in `parked`, and the lease keeps its GPUs.
    pub fn give_away(&self, lease: &str, parked: &[Serving]) -> bool {
        let mut state = self.state();
        let serves = |w: &Worker| w.lease == lease && w.process.is_some();
        if state.workers.iter().any(|(id, w)| serves(w) && !parked.iter().any(|p| p.id == *id)) {
            return false;
        }
        state.set_away(lease, true);
        true
    }

    /// Marks that a lease's GPUs are given to others, or that it has them again.
    ///
    /// While they are given away, its workers without a process are stopped and none is started.
    pub fn set_away(&self, lease: &str, away: bool) {
        self.state().set_away(lease, away);
        self.refill(lease);
    }
}

impl State {
    fn set_away(&mut self, lease: &str, away: bool) {
        let Some(entry) = self.leases.get_mut(lease) else { return };
        entry.away = away;
        entry.changed.notify_waiters();
        let unused = |w: &Worker| away && w.lease == lease && w.process.is_none();
        for (id, worker) in self.workers.iter_mut().filter(|(_, w)| unused(w)) {
            entry.stock.leave(id, worker.starts());
            stop(id, worker, "the lease's GPUs are given to others while it is idle");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_the_driver_tells_whether_to_try_again() {
        let of = |status| NotParked::from(MoveFailed { call: "cuCall\n".into(), status });
        assert_eq!(of(NOT_READY), NotParked::Busy);
        assert_eq!(of(801), NotParked::Never("cuCall : CUDA error 801".into()));
        assert_eq!(of(1), NotParked::Failed("cuCall : CUDA error 1".into()));
    }

    #[tokio::test]
    async fn a_helper_that_hangs_is_not_waited_for() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let start = async |script: &str, limit| {
            let program = folder.path().join("helper");
            std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
            Helper::start(&program, Path::new("driver"), &["off", "1"], limit).await
        };
        let why = start("exec sleep 3600", Duration::from_millis(100)).await.unwrap_err();
        assert!(why.contains("sent nothing"), "{why}");
        assert!(start("echo no 1 text", MOVE_TIMEOUT).await.unwrap_err().contains("no 1 text"));
        let mut helper =
            start("echo parked; read line; echo full; exec sleep 3600", MOVE_TIMEOUT).await.unwrap();
        assert_eq!(helper.back().await, Ok(false));
    }
}
