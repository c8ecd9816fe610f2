//! Parks single workers.
//!
//! The supervisor makes a worker call the driver no more, and a helper process moves its device
//! memory to host memory and back. `pool::parking` decides which leases are parked, and when.

use std::path::Path;
use std::time::Duration;

use gpusession_proto::supervise::{DeviceLimit, Isolation, ToWorker};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::exit::stop;
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
/// Time that device memory may be on its way: 64 GiB took half a minute. A helper that is silent
/// for longer hangs in the driver.
const MOVE_TIMEOUT: Duration = Duration::from_secs(600);
/// `CUDA_ERROR_NOT_READY`: the driver could not lock the process in time.
const NOT_READY: i32 = 600;
/// `CUDA_ERROR_NOT_SUPPORTED`, `CUDA_ERROR_NOT_FOUND`
const UNPARKABLE_STATUSES: [i32; 2] = [801, 500];

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

/// Helper process that keeps one worker's device memory in host memory while it runs.
#[derive(Debug)]
pub struct Parker {
    // Killed when this is dropped.
    _child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    /// Bytes that the memory takes on each device of the lease.
    pub room: Vec<u64>,
}

/// Parses a helper's refusal, `no CODE TEXT`.
fn refusal(line: &str) -> Option<(i32, String)> {
    let (code, text) = line.strip_prefix("no ")?.split_once(' ')?;
    Some((code.parse().ok()?, text.into()))
}

fn hangs() -> String {
    format!("the helper that moves device memory sent nothing for {} s", MOVE_TIMEOUT.as_secs())
}

impl Parker {
    /// Moves the device memory of a worker to host memory.
    pub async fn park(
        program: &Path,
        driver: &Path,
        isolation: Isolation,
        worker: &Serving,
    ) -> Result<Self, NotParked> {
        let limit = LOCK_TIMEOUT.as_millis().to_string();
        let rest = [isolation.as_str(), &worker.pid.to_string(), &limit];
        let started = Self::start(program, driver, "--park", &rest, MOVE_TIMEOUT).await?;
        Ok(Self { room: worker.bytes.clone(), ..started })
    }

    /// Takes over the memory of a worker that an earlier server parked.
    pub async fn parked(
        program: &Path,
        driver: &Path,
        isolation: Isolation,
        worker: &Serving,
    ) -> Result<Self, NotParked> {
        let rest = [isolation.as_str(), &worker.pid.to_string()];
        let started = Self::start(program, driver, "--parked", &rest, MOVE_TIMEOUT).await?;
        Ok(Self { room: worker.bytes.clone(), ..started })
    }

    async fn start(
        program: &Path,
        driver: &Path,
        flag: &str,
        rest: &[&str],
        limit: Duration,
    ) -> Result<Self, NotParked> {
        let failed = |e: std::io::Error| NotParked::Failed(e.to_string());
        let (child, input, output) = spawn::child(program, flag, driver, rest).map_err(failed)?;
        let lines = BufReader::new(output).lines();
        let mut parker = Self { _child: child, input, lines, room: Vec::new() };
        let Ok(said) = timeout(limit, parker.lines.next_line()).await else {
            return Err(NotParked::Hangs(hangs()));
        };
        match said.map_err(failed)? {
            Some(line) if line == "parked" => Ok(parker),
            Some(line) => Err(match refusal(&line) {
                Some((NOT_READY, _)) => NotParked::Busy,
                Some((code, text)) if UNPARKABLE_STATUSES.contains(&code) => NotParked::Never(text),
                Some((_, text)) => NotParked::Failed(text),
                None => NotParked::Failed(format!("the helper sent {line:?}")),
            }),
            None => Err(NotParked::Failed("the helper exited".into())),
        }
    }

    /// Moves the memory back to the GPU; `false`: the GPU has no room now.
    pub async fn back(&mut self) -> Result<bool, String> {
        self.input.write_all(b"back\n").await.map_err(|e| e.to_string())?;
        let said = timeout(MOVE_TIMEOUT, self.lines.next_line()).await.map_err(|_| hangs())?;
        match said.map_err(|e| e.to_string())?.as_deref() {
            Some("back") => Ok(true),
            Some("full") => Ok(false),
            Some(line) => Err(refusal(line).map_or_else(|| line.to_string(), |(_, text)| text)),
            None => Err("the helper exited".into()),
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

    /// Moves the device memory of a paused worker to host memory.
    pub async fn move_out(&self, worker: &Serving) -> Result<Parker, NotParked> {
        let options = &self.0.options;
        {
            let mut state = self.state();
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
        let parker = Parker::park(&options.program, &options.driver, options.isolation.workers, worker).await;
        if let Err(NotParked::Hangs(why)) = &parker {
            self.end_worker(&worker.id, None, &format!("its device memory was lost: {why}"));
        }
        let parker = parker?;
        if let Some(worker) = self.state().workers.get_mut(&worker.id) {
            worker.moving = false;
            if worker.phase == Phase::Active {
                worker.phase = Phase::Parked;
            }
            worker.remember();
        }
        Ok(parker)
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

    /// Starts the helper that keeps the memory of a worker from [`Supervisor::left_parked`].
    pub async fn keep_parked(&self, worker: &Serving) -> Result<Parker, NotParked> {
        let options = &self.0.options;
        Parker::parked(&options.program, &options.driver, options.isolation.workers, worker).await
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

    #[tokio::test]
    async fn a_helper_that_hangs_is_not_waited_for() {
        let (shell, limit) = (Path::new("/bin/sh"), Duration::from_millis(100));
        let parked = Parker::start(shell, Path::new("exec sleep 3600"), "-c", &[], limit).await;
        assert!(matches!(parked, Err(NotParked::Hangs(_))), "{parked:?}");
        let script = Path::new("echo parked; exec sleep 3600");
        let parked = Parker::start(shell, script, "-c", &[], MOVE_TIMEOUT).await;
        assert!(parked.is_ok(), "{parked:?}");
    }
}
