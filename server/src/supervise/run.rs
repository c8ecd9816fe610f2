//! The task of one worker: it starts the process, passes messages in both directions, and kills the
//! process if it does not exit in time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ExitStatus;
use std::time::Duration;

use gpusession_proto::supervise::{FromWorker, Isolation, MPS_VARIABLES, Start, ToWorker, Usage};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tracing::debug;

use super::adopt::adopt;
use super::channel::Channel;
use super::exit::describe;
use super::process::{Process, end_group};
use super::unadmitted::Unadmitted;
use super::worker::{Command, LATER, Phase, Queues, Worker, WorkerRecord, hex, orders, told_to_end};
use super::{Event, State, Supervisor, WorkerId, mps, staging};
use crate::clock;
use crate::spawn;

/// Time that a worker may take to exit after a stop request. The supervisor then kills it, so that
/// its resources are free again soon.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// As [`STOP_GRACE`], for a worker under MPS; MPS gets the rest of the time (`mps::END_TIMEOUT`).
const MPS_STOP_GRACE: Duration = Duration::from_millis(750);
/// Time until a started worker must be ready. Drivers of many GPUs without persistence take tens of
/// seconds.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Time after which a worker that does not read its channel counts as stuck.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after which a killed process that still exists counts as stuck in the driver.
pub(super) const REAP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time to read a worker's final messages after it exits.
///
/// Bounded, since another process of its group may keep sending.
const FINAL_MESSAGES_GRACE: Duration = Duration::from_millis(100);
/// Most workers of one lease.
pub(super) const MAX_PER_LEASE: usize = 64;
/// Packets that a worker may send in a second; the supervisor kills one that sends more. Packets
/// about memory count separately: after `MAX_MEMORY_PACKETS` the supervisor reads the channel again
/// in the next second.
const MAX_PACKETS: u32 = 1000;
const MAX_MEMORY_PACKETS: u32 = 20_000;

/// Progress of a worker's end. Neither the worker's messages nor a full channel prolong it.
#[derive(Default)]
struct Ending {
    gone_by: Option<Instant>,
    /// MPS has been asked to end the worker's GPU work.
    work_ended: bool,
}

impl Ending {
    fn begins(&mut self, takes: Duration) -> Instant {
        *self.gone_by.get_or_insert_with(|| Instant::now() + takes)
    }
}

/// Source of a worker's process.
pub(super) enum Origin {
    /// To be started with these variables in addition to the server's own.
    New(Box<Start>, Vec<(String, String)>),
    /// Left by an earlier server.
    Left { pid: u32, pidfd: OwnedFd, channel: OwnedFd },
}

/// Outcome of attending to a worker.
enum End {
    /// The worker exited; the status is known for a child only.
    Ended(Option<ExitStatus>),
    /// The next server attends to it.
    Left,
}

impl Supervisor {
    pub(super) fn refill(&self, lease: &str) {
        let mut state = self.state();
        let mine = state.workers.values().filter(|w| w.lease == lease && w.phase != Phase::Ending).count();
        let n = match state.leases.get_mut(lease) {
            Some(entry) if mine < MAX_PER_LEASE && !entry.away => entry.stock.start(self.0.clock.now()),
            _ => 0,
        };
        for _ in 0..n {
            self.launch(&mut state, lease, Vec::new(), true);
        }
    }

    /// Starts a worker's task; `None` if the lease is gone or the server is closing.
    pub(super) fn launch(
        &self,
        state: &mut State,
        lease: &str,
        environment: Vec<(String, String)>,
        stocked: bool,
    ) -> Option<WorkerId> {
        let id: WorkerId = clock::bytes(self.0.random.as_ref());
        if state.closing {
            return None;
        }
        let entry = state.leases.get(lease)?;
        let options = &self.0.options;
        let cache = options.cache.as_ref().and_then(|cache| cache.images(&entry.lease.client));
        let start = Start {
            worker: id,
            lease: lease.into(),
            ticket_key: entry.lease.ticket_key,
            driver: options.driver.display().to_string(),
            devices: entry.ledger.devices().to_vec(),
            require_tls: entry.lease.encrypted,
            module_cache: cache.as_ref().map(|(folder, _)| folder.display().to_string()),
            module_cache_bytes: cache.map_or(0, |(_, bytes)| bytes),
            // Under MPS a context takes one of the server's places.
            warm: !entry.lease.mps,
            mps: entry.lease.mps,
            resume_grace_s: options.resume_grace.as_secs() as u32,
            staging_bytes: staging(&entry.limits),
            isolation: state.trial.next(options.isolation),
        };
        let (orders, queues) = orders();
        let book = WorkerRecord {
            id,
            lease: lease.into(),
            client: entry.lease.client.clone(),
            gpus: entry.lease.shares.iter().map(|s| s.gpu.clone()).collect(),
            phase: Phase::Starting,
            pid: None,
            stocked,
            given: false,
            encrypted: entry.lease.encrypted,
            process: None,
            peer: None,
            lanes: 0,
            fingerprint: None,
            usage: Usage::default(),
            used_at: self.0.clock.now(),
            busy: Duration::ZERO,
            admitted_unix: 0,
            user: entry.lease.user.clone(),
            active: self.0.clock.now(),
            wanted: false,
            moving: false,
            isolation: if start.isolation == Isolation::Off { "off" } else { LATER }.into(),
            since: self.0.clock.now(),
            ended_because: None,
            held: Vec::new(),
        };
        let trial = (options.isolation == Isolation::Try && start.warm && environment.is_empty())
            .then_some(start.isolation != Isolation::Off);
        state.workers.insert(
            id,
            Worker {
                book,
                kept: None,
                seat: None,
                pausing: None,
                unadmitted: Unadmitted::default(),
                trial,
                presented: false,
                orders,
            },
        );
        self.attend_to(id, Origin::New(Box::new(start), environment), queues);
        Some(id)
    }

    pub(super) fn attend_to(&self, id: WorkerId, origin: Origin, queues: Queues) {
        let this = self.clone();
        tokio::spawn(async move {
            let attending = {
                let this = this.clone();
                async move { this.run(&id, origin, queues).await }
            };
            // A task of its own, so that the worker leaves the books even if the task panics.
            match tokio::spawn(attending).await {
                Ok(Some(end)) => this.on_exit(&id, end),
                Ok(None) => this.leave(&id),
                Err(e) => {
                    let pid = this.state().workers.get(&id).and_then(|w| w.pid);
                    end_group(pid.unwrap_or_default());
                    this.suspect(&id);
                    this.on_exit(&id, format!("internal error: {e}"));
                }
            }
        });
    }

    /// Runs a worker from its start to its end. Returns how it ended; `None`: the next server
    /// attends to it.
    async fn run(&self, id: &WorkerId, origin: Origin, mut queues: Queues) -> Option<String> {
        let begun = match origin {
            Origin::New(start, environment) => {
                let begun = self.begin(id, &start, environment).await;
                begun.map(|(process, fd)| (process, fd, Some(*start)))
            }
            Origin::Left { pid, pidfd, channel } => Process::left(pid, pidfd)
                .map(|process| (process, channel, None))
                .map_err(|e| format!("its process cannot be watched: {e}")),
        };
        let (mut process, fd, start) = match begun {
            Ok(begun) => begun,
            Err(reason) => return Some(reason),
        };
        let mut ending = Ending::default();
        let end = match Channel::new(fd) {
            Ok(channel) => self.attend(id, start, &mut process, &channel, &mut queues, &mut ending).await,
            Err(e) => Err(format!("its channel cannot be used: {e}")),
        };
        let end = match end {
            Ok(End::Left) => return None,
            Ok(End::Ended(status)) => describe(status),
            Err(reason) => {
                let by = ending.begins(mps::END_TIMEOUT);
                if !ending.work_ended {
                    self.end_gpu_work(id, false, by).await;
                }
                process.kill();
                self.reaped(id, &mut process).await;
                reason
            }
        };
        // Kills other processes that are left in its group.
        process.kill();
        Some(end)
    }

    /// Starts the process of a worker.
    async fn begin(
        &self,
        id: &WorkerId,
        start: &Start,
        environment: Vec<(String, String)>,
    ) -> Result<(Process, OwnedFd), String> {
        let program = &self.0.options.program;
        let mut variables = spawn::clean_environment(&self.0.options.driver);
        // The driver shows the worker its lease's GPUs only, in the lease's order.
        let (gpus, client) = {
            let state = self.state();
            let worker = state.workers.get(id).ok_or("it was stopped before it started")?;
            (worker.gpus.join(","), worker.client.clone())
        };
        variables.push(("CUDA_VISIBLE_DEVICES".into(), gpus.into()));
        match self.0.options.cache.as_ref().and_then(|cache| cache.compiled(&client)) {
            Some(folder) => variables.push(("CUDA_CACHE_PATH".into(), folder.into())),
            None => variables.push(("CUDA_CACHE_DISABLE".into(), "1".into())),
        }
        let (own, environment): (Vec<_>, Vec<_>) =
            environment.into_iter().partition(|(name, _)| MPS_VARIABLES.contains(&name.as_str()));
        if start.mps {
            variables.extend(self.sit_down(id, start, &own).await?);
        }
        variables.extend(environment.into_iter().map(|(k, v)| (k.into(), v.into())));
        let failed = |e: io::Error| format!("{} cannot be started: {e}", program.display());
        // The MPS daemon exits with this server, and so do the workers that it serves.
        let outlives = self.0.store.exists() && !start.mps;
        let (child, fd) = self.0.spawner.start(program, variables, outlives).await.map_err(failed)?;
        let pid = child.id().unwrap_or_default();
        let process = Process::started(child).inspect_err(|_| end_group(pid)).map_err(failed)?;
        let mut state = self.state();
        let closing = state.closing;
        if let Some(worker) = state.workers.get_mut(id) {
            worker.pid = Some(pid);
            if outlives && !closing {
                worker.kept = self.0.store.keep(fd.as_fd(), process.pidfd());
            }
            worker.remember(None);
        }
        Ok((process, fd))
    }

    /// Waits for a killed process to exit. If it does not, the driver holds it: its GPUs are stuck.
    async fn reaped(&self, id: &WorkerId, process: &mut Process) {
        if timeout(REAP_TIMEOUT, process.wait()).await.is_ok() {
            return;
        }
        self.stuck(id);
        let _ = process.wait().await;
    }

    /// Reports the GPUs of a killed worker that does not exit.
    fn stuck(&self, id: &WorkerId) {
        let (gpus, pid) = match self.state().workers.get(id) {
            Some(worker) => (worker.gpus.clone(), worker.pid.unwrap_or(0)),
            None => return,
        };
        let why = format!("process {pid} of a worker was killed and does not exit: it waits for the driver");
        let _ = self.0.events.send(Event::Stuck { gpus, why });
    }

    /// Attends to a worker until it exits or this server leaves it. `start` is `None` for a worker
    /// of an earlier server.
    async fn attend(
        &self,
        id: &WorkerId,
        start: Option<Start>,
        process: &mut Process,
        channel: &Channel,
        queues: &mut Queues,
        ending: &mut Ending,
    ) -> Result<End, String> {
        let Queues { commands, tells, ends } = queues;
        // If the worker has exited already, its exit status is reported, not its closed channel.
        let mut limit = None;
        // A worker under MPS does not outlive its server, so an earlier server left none.
        let mps = start.as_ref().is_some_and(|start| start.mps);
        if let Some(start) = start {
            let by = Instant::now() + START_TIMEOUT;
            let _ = send(channel, &ToWorker::Start(start), None, ends, false, by).await;
            limit = Some((by, "it was not ready in time"));
        }
        let (mut channel_open, mut killed, mut told, mut said_end) = (true, false, false, false);
        // Time that it has to exit by itself.
        let (grace, in_all) = if mps { (MPS_STOP_GRACE, mps::END_TIMEOUT) } else { (STOP_GRACE, STOP_GRACE) };
        let sooner =
            |limit: Option<(Instant, &str)>, at| Some((limit.map_or(at, |(before, _)| before.min(at)), ""));
        let (mut second, mut packets, mut memory_packets) = (Instant::now(), 0, 0);
        // Set if it asked for memory too often: its messages wait for the next second.
        let mut patience = false;
        loop {
            let deadline = limit.map_or_else(|| Instant::now() + Duration::from_secs(86400), |(at, _)| at);
            tokio::select! {
                biased;
                status = process.wait() => {
                    // A final message tells more than the exit status.
                    let by = Instant::now() + FINAL_MESSAGES_GRACE;
                    while channel_open
                        && Instant::now() < by
                        && let Ok(Ok(Some(message))) = timeout(Duration::from_millis(10), channel.recv()).await
                    {
                        said_end |= matches!(message, FromWorker::Ended { .. });
                        self.heard(id, message);
                    }
                    if !killed && !said_end {
                        self.suspect(id);
                    }
                    return status.map(End::Ended).map_err(|e| e.to_string());
                }
                () = sleep_until(deadline), if limit.is_some() => {
                    let (_, why) = limit.take().unwrap_or((deadline, ""));
                    if !why.is_empty() {
                        return Err(why.into());
                    }
                    if std::mem::replace(&mut killed, true) {
                        self.stuck(id);
                    } else {
                        debug!(pid = process.pid(), "worker {}: did not exit in time; killed", hex(id));
                        let by = ending.begins(in_all);
                        if !std::mem::replace(&mut ending.work_ended, true) {
                            self.end_gpu_work(id, false, by).await;
                        }
                        process.kill();
                        limit = Some((Instant::now() + REAP_TIMEOUT, ""));
                    }
                }
                reason = told_to_end(ends), if !told => {
                    told = true;
                    ending.begins(in_all);
                    let at = Instant::now() + grace;
                    if !killed {
                        limit = sooner(limit, at);
                    }
                    let _ = timeout_at(at, channel.send(&ToWorker::Stop { reason }, None)).await;
                }
                Some(command) = tells.recv() => match command {
                    Command::Tell(message) => send(channel, &message, None, ends, told, deadline).await?,
                    Command::Leave => {
                        while let Ok(Command::Adopt { socket, number, preface, peer }) = commands.try_recv() {
                            let message = adopt(number, preface, peer);
                            send(channel, &message, Some(socket.as_fd()), ends, told, deadline).await?;
                        }
                        return Ok(End::Left);
                    }
                    Command::Adopt { .. } => {}
                },
                () = sleep_until(second + Duration::from_secs(1)), if patience => patience = false,
                Some(command) = commands.recv() => {
                    if let Command::Adopt { socket, number, preface, peer } = command {
                        let message = adopt(number, preface, peer);
                        send(channel, &message, Some(socket.as_fd()), ends, told, deadline).await?;
                    }
                }
                // Last, so that a worker that sends much delays nothing above.
                message = channel.recv(), if channel_open && !patience => match message {
                    Ok(Some(message)) => {
                        if second.elapsed() >= Duration::from_secs(1) {
                            (second, packets, memory_packets) = (Instant::now(), 0, 0);
                        }
                        match message {
                            FromWorker::MemoryWanted { .. } | FromWorker::MemoryReturned { .. } => {
                                memory_packets += 1;
                                patience = memory_packets > MAX_MEMORY_PACKETS;
                            }
                            _ => packets += 1,
                        }
                        if packets > MAX_PACKETS {
                            return Err("it floods its supervisor with messages".into());
                        }
                        if let FromWorker::Contained { lacking } = &message
                            && !self.state().workers.get(id).is_none_or(|w| w.may_be_contained(lacking))
                        {
                            return Err("it reported its isolation out of turn".into());
                        }
                        if matches!(message, FromWorker::Ready { .. })
                            && limit.is_some_and(|(_, why)| !why.is_empty()) {
                            limit = None;
                        }
                        let ended = match message {
                            FromWorker::Ended { quiet, .. } if mps && !std::mem::replace(&mut said_end, true) => Some(quiet),
                            _ => None,
                        };
                        self.heard(id, message);
                        if let Some(quiet) = ended
                            && !std::mem::replace(&mut ending.work_ended, true)
                        {
                            let by = ending.begins(in_all);
                            self.end_gpu_work(id, quiet, by).await;
                            let _ = timeout_at(by, channel.send(&ToWorker::Exit, None)).await;
                            if !killed {
                                limit = Some((by, ""));
                            }
                        }
                    }
                    // It is about to exit, or it closed its channel to evade a stop request.
                    Ok(None) => {
                        channel_open = false;
                        ending.begins(in_all);
                        if !killed {
                            limit = sooner(limit, Instant::now() + grace);
                        }
                    }
                    Err(e) if e.raw_os_error().is_some() => {
                        channel_open = false;
                        ending.begins(in_all);
                        if !killed {
                            limit = sooner(limit, Instant::now() + grace);
                        }
                    }
                    Err(e) => return Err(e.to_string()),
                },
            }
        }
    }
}

/// Sends a message. Does not wait for a stopping worker to read its channel.
async fn send(
    channel: &Channel,
    message: &ToWorker,
    beside: Option<BorrowedFd<'_>>,
    ends: &mut watch::Receiver<Option<String>>,
    told: bool,
    deadline: Instant,
) -> Result<(), String> {
    tokio::select! {
        biased;
        sent = timeout(SEND_TIMEOUT, channel.send(message, beside)) => match sent {
            // It exited; its final messages or its exit status tell more.
            Ok(Err(e)) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Ok(sent) => sent.map_err(|e| format!("its channel failed: {e}")),
            Err(_) => Err("it does not read its channel".into()),
        },
        _ = told_to_end(ends), if !told => Ok(()),
        () = sleep_until(deadline) => Ok(()),
    }
}
