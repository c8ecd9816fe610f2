//! The life of a domain's daemon: it is started, watched, started again, and asked to quit.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::control::{ANSWER_TIMEOUT, Control, ServerState};
use super::domain::{Domain, FaultView, Generation, Phase, until};
use super::fault::{End, POLL_INTERVAL, fault, unless_fault};
use super::folder::{logs, pipes};
use super::log::Tail;
use super::{DomainEvent, Mps, QUIT_TIMEOUT};
use crate::spawn::clean_environment;
use crate::starter::link::Program;
use crate::starter::mps::FolderAct;

/// Time in which a started daemon must answer.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Intervals of state queries for a domain with workers.
///
/// The second one applies after a failed query or the crash of a worker.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
const SUSPECT_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time that workers may take to exit after a fault.
const FAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// First and longest pause before a daemon is started again.
const BACKOFF_MIN: Duration = Duration::from_millis(250);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Faults that a domain remembers.
const MAX_FAULTS: usize = 16;

impl Mps {
    /// Runs a domain from its first lease to its end.
    pub(super) async fn run(self, domain: Arc<Domain>) {
        let mut pause = BACKOFF_MIN;
        loop {
            let begun = Instant::now();
            let generation = match self.start(&domain).await {
                Ok((generation, child)) => {
                    Ok((generation.clone(), self.attend(&domain, &generation, child).await))
                }
                Err(e) => Err(e),
            };
            match generation {
                Ok((_, End::Unneeded)) => break,
                Ok((_, End::Fault { .. })) => continue,
                Ok((generation, End::Died(why))) => {
                    warn!("MPS domain {}: {why}; restarting it", domain.name());
                    domain.set(Phase::Starting);
                    let number = generation.number;
                    let _ = self.0.happened.send(DomainEvent::Gone { generation: number, server: false });
                    // Programs continue with the old server; its rest is cleared after the last
                    // one.
                    let (this, domain) = (self.clone(), domain.clone());
                    tokio::spawn(async move {
                        while domain.seated(number) > 0 {
                            sleep(POLL_INTERVAL).await;
                            if this.0.settings.folders.left(number).await.is_ok_and(|left| left.is_empty()) {
                                let gone = DomainEvent::Gone { generation: number, server: true };
                                let _ = this.0.happened.send(gone);
                                until(&domain, || domain.seated(number) == 0).await;
                            }
                        }
                        this.clear(&domain, number).await;
                    });
                }
                Err(why) => {
                    warn!("MPS domain {}: {why}; next try in {} ms", domain.name(), pause.as_millis());
                    domain.set(Phase::Failed(why));
                }
            }
            if begun.elapsed() > BACKOFF_MAX {
                pause = BACKOFF_MIN;
            }
            sleep(pause).await;
            pause = (pause * 2).min(BACKOFF_MAX);
            until(&domain, || {
                let inner = domain.inner();
                !inner.leases.is_empty() || inner.seats.is_empty()
            })
            .await;
            if self.forget(&domain) {
                break;
            }
        }
        self.0.closed.notify_waiters();
    }

    /// Removes a domain without leases and seats; a later lease creates a new one.
    fn forget(&self, domain: &Domain) -> bool {
        let mut domains = self.domains();
        let inner = domain.inner();
        let unneeded = inner.leases.is_empty() && inner.seats.is_empty();
        drop(inner);
        if unneeded {
            domains.remove(&domain.key);
        }
        unneeded
    }

    /// Starts a daemon and waits until it answers.
    async fn start(&self, domain: &Domain) -> Result<(Arc<Generation>, Program), String> {
        let settings = &self.0.settings;
        let number = self.0.numbers.fetch_add(1, Ordering::Relaxed);
        let (pipes, logs) = (pipes(settings.folders.all(), number), logs(settings.folders.all(), number));
        let mut environment = clean_environment(&settings.driver);
        if let Some((_, path)) = environment.iter_mut().find(|(name, _)| name == "PATH") {
            // The daemon finds its server program by name.
            let mut folders =
                settings.program.parent().map(Path::as_os_str).unwrap_or_default().to_os_string();
            folders.push(":");
            folders.push(&path);
            *path = folders;
        }
        environment.extend([
            ("CUDA_MPS_PIPE_DIRECTORY".into(), pipes.clone().into()),
            ("CUDA_MPS_LOG_DIRECTORY".into(), logs.into()),
            ("CUDA_VISIBLE_DEVICES".into(), domain.key.gpus.join(",").into()),
        ]);
        let isolation = self.0.isolation.as_str().as_ref();
        let arguments = [settings.driver.as_os_str(), isolation, settings.program.as_os_str()];
        let control = Control::new(self.0.starter.clone(), arguments.map(Into::into).into(), environment);
        let generation = Arc::new(Generation { number, pipes, control, alive: AtomicBool::new(true) });
        domain.inner().starts += 1;
        let mut child = None;
        match self.start_daemon(&generation, &mut child).await {
            Ok(()) => {}
            Err(e) => {
                generation.alive.store(false, Ordering::Relaxed);
                drop(child);
                self.clear(domain, generation.number).await;
                return Err(e);
            }
        }
        let child = child.ok_or("no process")?;
        apply(domain, &generation).await;
        // Saves the first program the wait for a server.
        let uid = settings.uid;
        if let Err(e) = generation.control.ask(&format!("start_server -uid {uid}"), START_TIMEOUT).await {
            warn!(
                "MPS domain {}: cannot start its server in advance: {e}; its first worker starts it",
                domain.name()
            );
        }
        info!(
            "MPS domain {} on {}: started daemon {} in {}",
            domain.name(),
            domain.key.gpus.join(", "),
            child.id().unwrap_or(0),
            generation.pipes.display()
        );
        domain.set(Phase::Up(generation.clone(), child.id()));
        Ok((generation, child))
    }

    async fn start_daemon(&self, generation: &Generation, child: &mut Option<Program>) -> Result<(), String> {
        let program = &self.0.settings.program;
        let failed = |what: &Path, e: std::io::Error| format!("{}: {e}", what.display());
        let folders = &self.0.settings.folders;
        folders.have(FolderAct::Make(generation.number)).await.map_err(|e| failed(folders.all(), e))?;
        let said = self.output(generation.number);
        let output = File::create(&said).map_err(|e| failed(&said, e))?;
        let daemon = generation.control.daemon(output, &self.0.spawner).await;
        let daemon = child.insert(daemon.map_err(|e| failed(program, e))?);
        let end = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(status) = daemon.exited().await {
                let said = std::fs::read_to_string(&said).unwrap_or_default();
                let last = said.lines().last().unwrap_or("it wrote nothing");
                return Err(format!("{} exited: {status}: {last}", program.display()));
            }
            match generation.control.ask("get_server_list", Duration::from_secs(1)).await {
                Ok(_) => return Ok(()),
                Err(e) if Instant::now() > end => {
                    return Err(format!(
                        "the control daemon was not ready within {} s: {e}",
                        START_TIMEOUT.as_secs()
                    ));
                }
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Attends to a ready daemon until it has exited. The caller cleans up after one that died.
    async fn attend(&self, domain: &Domain, generation: &Generation, mut child: Program) -> End {
        let end = self.watch(domain, generation, &mut child).await;
        match &end {
            End::Unneeded => {
                let asked = generation.control.ask("quit -t 2", QUIT_TIMEOUT).await;
                if let Err(e) = asked
                    && child.exited().await.is_none()
                {
                    warn!("MPS domain {}: its control daemon did not quit: {e}; killed", domain.name());
                }
                let _ = timeout(QUIT_TIMEOUT, child.wait()).await;
                info!("MPS domain {}: its last lease has ended; its control daemon has quit", domain.name());
            }
            End::Died(_) => generation.alive.store(false, Ordering::Relaxed),
            End::Fault { culprits, why } => {
                // MPS has ended all work itself.
                generation.alive.store(false, Ordering::Relaxed);
                {
                    let mut inner = domain.inner();
                    if inner.faults.len() == MAX_FAULTS {
                        inner.faults.pop_front();
                    }
                    let fault =
                        FaultView { unix: self.0.clock.unix(), why: why.clone(), culprits: culprits.clone() };
                    inner.faults.push_back(fault);
                }
                domain.set(Phase::Fault);
                warn!(
                    "MPS domain {}: {why}; stopping its programs, then restarting its control daemon",
                    domain.name()
                );
                let number = generation.number;
                let told =
                    DomainEvent::Fault { generation: number, culprits: culprits.clone(), why: why.clone() };
                let _ = self.0.happened.send(told);
                let ended = until(domain, || domain.seated(number) == 0);
                if timeout(FAULT_TIMEOUT, ended).await.is_err() {
                    warn!(
                        "MPS domain {}: programs still running {} s after a fault; restarting its control daemon",
                        domain.name(),
                        FAULT_TIMEOUT.as_secs()
                    );
                }
            }
        }
        generation.alive.store(false, Ordering::Relaxed);
        child.kill().await;
        let _ = timeout(QUIT_TIMEOUT, child.wait()).await;
        if !matches!(end, End::Died(_)) {
            self.clear(domain, generation.number).await;
        }
        end
    }

    async fn watch(&self, domain: &Domain, generation: &Generation, child: &mut Program) -> End {
        let mut logs = Tail::of(&self.0.settings.folders, generation.number, self.output(generation.number));
        let mut percent = domain.percent();
        let (mut check_at, mut missed) = (Instant::now() + CHECK_INTERVAL, 0);
        loop {
            let mut suspected = false;
            tokio::select! {
                status = child.wait() => {
                    let status = status.map_or_else(|e| e.to_string(), |s| s.to_string());
                    return End::Died(format!("its control daemon exited: {status}"));
                }
                () = domain.suspect.notified() => suspected = true,
                () = domain.changed.notified() => {}
                () = sleep(POLL_INTERVAL) => {}
            }
            if let Some(fault) = fault(domain, &mut logs).await {
                return fault;
            }
            if self.forget(domain) {
                return End::Unneeded;
            }
            let now_percent = domain.percent();
            if now_percent != percent {
                percent = now_percent;
                if let Err(fault) = unless_fault(domain, &mut logs, apply(domain, generation)).await {
                    return fault;
                }
            }
            if suspected || Instant::now() >= check_at && domain.seated(generation.number) > 0 {
                check_at = Instant::now() + if suspected { SUSPECT_CHECK_INTERVAL } else { CHECK_INTERVAL };
                match unless_fault(domain, &mut logs, state(&generation.control)).await {
                    Err(fault) => return fault,
                    Ok(Ok(ServerState::Fault)) => {
                        // Its log may name the culprit, at once or a moment later.
                        for _ in 0..2 {
                            if let Some(fault) = fault(domain, &mut logs).await {
                                return fault;
                            }
                            sleep(POLL_INTERVAL).await;
                        }
                        let why = "its server is in the state FAULT".into();
                        return End::Fault { culprits: Vec::new(), why };
                    }
                    Ok(Ok(_)) => missed = 0,
                    Ok(Err(e)) => {
                        missed += 1;
                        check_at = Instant::now() + SUSPECT_CHECK_INTERVAL;
                        warn!("MPS domain {}: cannot query its state: {e}", domain.name());
                        if missed == 4 {
                            child.kill().await;
                            return End::Died("its control daemon does not answer".into());
                        }
                    }
                }
            }
        }
    }

    /// Kills what is left of a daemon. If a process does not exit, the driver holds it: its GPUs
    /// are stuck.
    async fn clear(&self, domain: &Domain, number: u32) {
        let folders = &self.0.settings.folders;
        let _ = std::fs::remove_file(self.output(number));
        if let Err(e) = folders.have(FolderAct::ClearOne(number)).await {
            warn!("MPS domain {}: folder of its daemon not cleared: {e}", domain.name());
        }
        let end = Instant::now() + QUIT_TIMEOUT;
        loop {
            match folders.left(number).await.unwrap_or_default().first() {
                None => return,
                Some(pid) if Instant::now() > end => {
                    let why =
                        format!("process {pid} of MPS was killed and does not exit: it waits for the driver");
                    let _ = self.0.happened.send(DomainEvent::Stuck { gpus: domain.key.gpus.clone(), why });
                    return;
                }
                Some(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Returns the file of what a daemon writes to its standard streams.
    fn output(&self, number: u32) -> PathBuf {
        self.0.settings.output.join(format!("mps-{number}.out"))
    }
}

/// Returns the worst state of a daemon's servers.
async fn state(control: &Control) -> Result<ServerState, String> {
    let mut worst = ServerState::Active;
    for server in control.servers().await? {
        match control.state(server).await {
            Ok(ServerState::Fault) => return Ok(ServerState::Fault),
            Ok(ServerState::Initializing) => worst = ServerState::Initializing,
            Ok(ServerState::Active) => {}
            // It may have exited meanwhile.
            Err(e) if control.servers().await?.contains(&server) => return Err(e),
            Err(_) => {}
        }
    }
    Ok(worst)
}

/// Sets the largest percentage of multiprocessors for the daemon and its servers.
///
/// It bounds a client without a variable of its own. Each worker's share is in its environment.
async fn apply(domain: &Domain, generation: &Generation) {
    let percent = domain.percent();
    let control = &generation.control;
    let applied = async {
        control.ask(&format!("set_default_active_thread_percentage {percent}"), ANSWER_TIMEOUT).await?;
        for server in control.servers().await? {
            control.ask(&format!("set_active_thread_percentage {server} {percent}"), ANSWER_TIMEOUT).await?;
        }
        Ok::<(), String>(())
    };
    if let Err(e) = applied.await {
        warn!("MPS domain {}: cannot set its share of multiprocessors: {e}", domain.name());
    }
}
