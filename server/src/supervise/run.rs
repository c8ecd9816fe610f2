//! The task of one worker: it starts the process, attends to it (`attend`), and reaps it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use gpusession_proto::preface::LANES;
use gpusession_proto::supervise::{Isolation, MPS_VARIABLES, Start, Usage};
use tokio::time::timeout;

use super::attend::{End, Ending, REAP_TIMEOUT};
use super::channel::Channel;
use super::compiled::owner;
use super::event::Event;
use super::exit::describe;
use super::handover::Keepable;
use super::mps;
use super::process::{Process, kill_group};
use super::stock::WorkerId;
use super::supervisor::{State, Supervisor, staging};
use super::unadmitted::Unadmitted;
use super::worker::{Changes, LATER, Phase, Queues, Worker, WorkerRecord, hex, orders};
use crate::clock;
use crate::pidfd::pidfd_open;
use crate::spawn::{self, end_group};
use crate::starter::desk::Desk;
use crate::starter::link::{StartedWorker, Starter, with_channel};
use crate::starter::{Group, Purpose};

/// Variable by which the driver keeps no compiled code.
const CACHE_DISABLE: &str = "CUDA_CACHE_DISABLE";

/// Most workers of one lease.
pub(super) const MAX_PER_LEASE: usize = 64;
/// Source of a worker's process.
pub(super) enum Origin {
    /// To be started with these variables in addition to the server's own.
    New(Box<Start>, Vec<(String, String)>),
    /// Left by an earlier server.
    Left { pid: u32, pidfd: OwnedFd, channel: OwnedFd },
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
        let start = Start {
            worker: id,
            lease: lease.into(),
            ticket_key: None,
            driver: options.driver.display().to_string(),
            devices: entry.ledger.devices().to_vec(),
            require_tls: entry.lease.encrypted,
            images: options.cache.is_some(),
            // Under MPS a context takes one of the server's places.
            warm: !entry.lease.mps,
            verify_memory: options.verify_memory,
            mps: entry.lease.mps,
            resume_grace_s: entry.limits.resume_grace().as_secs() as u32,
            staging_bytes: staging(&entry.limits),
            isolation: options.isolation.workers,
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
            interrupted: None,
            interruptions: 0,
            lanes: 0,
            attempts: [0; LANES as usize],
            fingerprint: None,
            usage: Usage::default(),
            used_at: self.0.clock.now(),
            busy: Duration::ZERO,
            admitted_unix: 0,
            user: entry.lease.user.clone(),
            active: self.0.clock.now(),
            wanted: false,
            moving: false,
            parks: false,
            isolation: if start.isolation == Isolation::Off { "off" } else { LATER }.into(),
            since: self.0.clock.now(),
            ended_because: None,
            held: Vec::new(),
            compiled_max: options.cache.as_ref().map_or(0, |cache| cache.compiled_max()),
            own_code: options.cache.as_ref().is_some_and(|c| !c.shares() || owner(&entry.lease).is_some()),
            code_of: None,
            of_starter: self.0.options.starter.desk().is_some(),
        };
        state.workers.insert(
            id,
            Worker {
                book,
                lease_key: entry.lease.ticket_key,
                kept: None,
                changes: Changes::default(),
                keepable: None,
                seat: None,
                pausing: None,
                relocating: None,
                parked_at: None,
                unadmitted: Unadmitted::default(),
                presented: false,
                offends: false,
                ticket: None,
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
            // A task of its own, so that the worker leaves the table even if the task panics.
            match tokio::spawn(attending).await {
                Ok(Some(end)) => this.on_exit(&id, end),
                Ok(None) => this.leave(&id),
                Err(e) => {
                    let pid = this.state().workers.get(&id).and_then(|w| w.pid).unwrap_or_default();
                    kill_group(pid, pidfd_open(pid), this.0.options.starter.desk().as_ref());
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
            Origin::Left { pid, pidfd, channel } => Process::left(pid, pidfd, self.0.options.starter.desk())
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
            Ok(End::Ended(status)) => self.killed_for_memory(id).await.unwrap_or_else(|| describe(status)),
            Err(reason) => {
                let by = ending.begins(mps::END_TIMEOUT);
                if !ending.work_ended {
                    self.end_gpu_work(id, false, by).await;
                }
                process.kill();
                self.reaped(id, &mut process).await;
                if let Some(worker) = self.state().workers.get_mut(id) {
                    worker.offends = true;
                }
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
        mut environment: Vec<(String, String)>,
    ) -> Result<(Process, OwnedFd), String> {
        let program = &self.0.options.program;
        let mut variables = spawn::clean_environment(&self.0.options.driver);
        // The driver shows the worker its lease's GPUs only, in the lease's order.
        let (gpus, client, code, bounds) = {
            let state = self.state();
            let gone = "it was stopped before it started";
            let (_, bounds) = state.bounds(id).ok_or(gone)?;
            let worker = state.workers.get(id).ok_or(gone)?;
            let code = self.0.options.cache.as_ref().and_then(|cache| state.code_folder(cache, worker));
            (worker.gpus.join(","), worker.client.clone(), code.zip(self.code_max(worker)), bounds)
        };
        variables.push(("CUDA_VISIBLE_DEVICES".into(), gpus.into()));
        match self.created(code).await {
            Some((folder, most)) => variables.extend([
                ("CUDA_CACHE_PATH".into(), folder.into()),
                ("CUDA_CACHE_MAXSIZE".into(), most.to_string().into()),
            ]),
            None => variables.push((CACHE_DISABLE.into(), "1".into())),
        }
        // The server decides that; a program may do without a cache that there is.
        let without = variables.iter().any(|(name, _)| name == CACHE_DISABLE);
        environment.retain(|(name, _)| !without || name != CACHE_DISABLE);
        let (own, environment): (Vec<_>, Vec<_>) =
            environment.into_iter().partition(|(name, _)| MPS_VARIABLES.contains(&name.as_str()));
        if start.mps {
            variables.extend(self.sit_down(id, start, &own).await?);
        }
        variables.extend(environment.into_iter().map(|(k, v)| (k.into(), v.into())));
        let failed = |e: io::Error| format!("{} cannot be started: {e}", program.display());
        // The MPS daemon exits with this server, and so do the workers that it serves.
        let outlives = self.0.store.exists() && !start.mps;
        let (process, fd) = match &self.0.options.starter {
            Starter::Here(_) => {
                let group = self.groups().own().create(&client, &hex(id), bounds).map_err(failed)?;
                let started = self.0.spawner.start(program, &[], variables, outlives, group).await;
                let (child, fd) = started.map_err(failed)?;
                let pid = child.id().unwrap_or_default();
                let process = Process::started(child).inspect_err(|_| {
                    let _ = end_group(pid);
                });
                (process.map_err(failed)?, fd)
            }
            Starter::Socket(path) => {
                let group = Group { of: client.clone(), id: *id, bounds };
                let started = with_channel(path, Purpose::Worker { group, outlives }, variables).await;
                let StartedWorker { program, pidfd, channel } = started.map_err(failed)?;
                (Process::of_starter(program, pidfd, Desk::at(path)).map_err(failed)?, channel)
            }
        };
        self.bound_anew(&client);
        let mut state = self.state();
        let closing = state.closing;
        if let Some(worker) = state.workers.get_mut(id) {
            worker.pid = Some(process.pid());
            if outlives && !closing {
                worker.keepable = Keepable::of(fd.as_fd(), process.pidfd());
            }
            worker.remember();
        }
        Ok((process, fd))
    }

    /// Creates a worker's folder of compiled code; `None` if it cannot.
    async fn created(&self, code: Option<(PathBuf, u64)>) -> Option<(PathBuf, u64)> {
        let (cache, (folder, most)) = self.0.options.cache.clone().zip(code)?;
        let creating = tokio::task::spawn_blocking(move || cache.create(&folder).map(|()| folder));
        Some((creating.await.ok()??, most))
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
    pub(super) fn stuck(&self, id: &WorkerId) {
        let (gpus, pid) = match self.state().workers.get(id) {
            Some(worker) => (worker.gpus.clone(), worker.pid.unwrap_or(0)),
            None => return,
        };
        let why = format!("process {pid} of a worker was killed and does not exit: it waits for the driver");
        let _ = self.0.events.send(Event::Stuck { gpus, why });
    }
}
