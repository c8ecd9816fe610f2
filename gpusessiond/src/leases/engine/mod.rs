//! Runs the [`machine`](super::machine): calls the servers, keeps time, publishes snapshots.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use gpusession_proto::control;
use gpusession_proto::grant::{Denial, Endpoint};
use gpusession_proto::journal::Event;
use gpusession_proto::preface;
use gpusession_proto::readings::{Query, View};
use gpusession_proto::ticket::{MAX_USER, Ticket};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::alarm::Alarm;
use super::machine::{Action, Held, Machine, OFFLINE_TIMEOUT, Phase, SUSPECT_TIMEOUT, Saved, Time, Wanted};
use super::readings::{self, Place};
use super::{
    Answer, Caller, Change, DeviceView, Failure, Granted, LeaseState, LeaseView, Leases, Owner, ServerView,
    Slot, Snapshot, Spec, Update, Wish,
};
use crate::access::Gate;
use crate::config::Class;
use crate::login::Session;
use crate::pool::{PoolError, PoolServer, Trouble};
use crate::values::human_duration;

/// Uid shown for an owner whom the user database does not know; differs from "everyone".
const UNKNOWN_USER: u32 = u32::MAX - 1;
/// Pause before a watch reconnects, at first and at most.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// Most users of whose programs a lease's failures are kept.
const MAX_FAILURES: usize = 16;
/// Tries to report a process's exit to its server.
const ENDED_TRIES: u32 = 6;

enum Message {
    Create(Box<Spec>, oneshot::Sender<Result<LeaseView, PoolError>>),
    Want(Box<Spec>, oneshot::Sender<Slot>),
    Release(Slot, String, oneshot::Sender<bool>),
    Renew(String, Option<Duration>, oneshot::Sender<Result<Duration, PoolError>>),
    Grant(Caller, Wish, oneshot::Sender<Answer>),
    Places(Caller, Wish, oneshot::Sender<Result<Vec<Place>, (Denial, String)>>),
    Of(Caller, oneshot::Sender<Vec<Slot>>),
    Ended(Vec<Granted>),
    Became(Slot, u32, Option<Failure>),
    Resume(String, [u8; 16], oneshot::Sender<Option<Granted>>),
    Freed(Slot),
    Configure(Vec<Spec>, oneshot::Sender<()>),
    Preallocate(u32, oneshot::Sender<()>),
    SessionOpened(Arc<Session>),
    Demand(Caller),
    SessionClosed(String),
    Drain(usize, Option<Duration>, oneshot::Sender<bool>),
    Warn(Duration, String, oneshot::Sender<usize>),
    Drained(oneshot::Sender<()>),
    Allocated(Slot, Result<(usize, control::Lease), PoolError>),
    Renewed(usize, Vec<String>, Duration, Result<control::RenewReply, PoolError>),
    Released(usize, String, Result<(), PoolError>),
    Withdrawn(usize, String, Result<(), PoolError>),
    Workers(Slot, String, Result<Vec<control::Worker>, PoolError>),
    Event(usize, control::PoolEvent),
    Described(usize, Duration, control::ServerDescription),
    Disconnected(usize),
    Reconnected(usize),
    Connect(Vec<Arc<dyn PoolServer>>),
    Notice(String),
    Server(usize, oneshot::Sender<Option<Arc<dyn PoolServer>>>),
    Holder(Slot, oneshot::Sender<Option<(Arc<dyn PoolServer>, String)>>),
}

type Updates = Arc<Mutex<Vec<mpsc::UnboundedSender<Update>>>>;

/// Handle of the running lease manager, which stops when its last handle is dropped.
#[derive(Clone)]
pub struct Engine {
    messages: mpsc::UnboundedSender<Message>,
    snapshot: watch::Receiver<Arc<Snapshot>>,
    updates: Updates,
}

/// Facts that the lease manager needs about this host.
#[derive(Debug, Clone)]
pub struct Here {
    /// The kernel's boot id.
    pub boot_id: [u8; 16],
    /// Hash of this host's machine id.
    pub machine_id: String,
    pub seed: u64,
    /// Time since boot: the clock of the lease manager, so that times outlive the daemon.
    pub uptime: Duration,
}

/// Options of the lease manager.
pub struct Hooks {
    /// State that an earlier daemon of this boot left.
    pub saved: Saved,
    /// Stores the state for the next daemon; called when it has changed.
    pub save: Box<dyn FnMut(&Saved) + Send>,
    /// `[access]`: users who may use the leases for all.
    pub gate: Option<Arc<Gate>>,
    /// Called at least this often while the manager's loop runs.
    pub alive: Option<(Duration, Box<dyn FnMut() + Send>)>,
}

impl Default for Hooks {
    fn default() -> Self {
        Self { saved: Saved::default(), save: Box::new(|_| {}), gate: None, alive: None }
    }
}

impl Here {
    /// Collects the facts of this host.
    pub fn this_machine() -> Self {
        let mut seed = [0; 8];
        // Without entropy the jitter repeats after each start.
        let _ = getrandom::fill(&mut seed);
        Self {
            boot_id: crate::places::boot_id(),
            machine_id: crate::places::machine_id(),
            seed: u64::from_le_bytes(seed),
            uptime: crate::places::uptime(),
        }
    }
}

impl Engine {
    /// Starts a manager on the current runtime; it knows no server until [`Engine::connect`].
    pub fn start(here: Here) -> Self {
        Self::start_with(here, Hooks::default())
    }

    /// Starts a manager that restores an earlier daemon's state.
    pub fn start_with(here: Here, hooks: Hooks) -> Self {
        let (messages, inbox) = mpsc::unbounded_channel();
        let (snapshot_out, snapshot) = watch::channel(Arc::new(Snapshot::default()));
        let updates = Updates::default();
        let boot = crate::places::hex(&here.boot_id);
        let rng = fastrand::Rng::with_seed(here.seed);
        let mut machine = Machine::new(boot.clone(), here.machine_id.clone(), rng);
        let Hooks { saved, save, gate, alive } = hooks;
        machine.restore(here.uptime, saved.clone());
        let actor = Actor {
            machine,
            saved,
            save,
            gate,
            alive,
            said_alive: Instant::now(),
            servers: Vec::new(),
            here,
            boot,
            origin: Instant::now(),
            messages: messages.downgrade(),
            snapshot: snapshot_out,
            updates: updates.clone(),
            described: false,
            creating: HashMap::new(),
            drained: Vec::new(),
            said: HashMap::new(),
            refused: HashMap::new(),
            failures: HashMap::new(),
            lost: HashSet::new(),
            parked: HashSet::new(),
            about: Vec::new(),
        };
        tokio::spawn(actor.run(inbox));
        Self { messages, snapshot, updates }
    }

    /// Adds servers.
    pub fn connect(&self, servers: Vec<Arc<dyn PoolServer>>) {
        let _ = self.messages.send(Message::Connect(servers));
    }

    /// Sets the reason why no server is known; it becomes the trouble of every waiting lease.
    pub fn notice(&self, why: &str) {
        let _ = self.messages.send(Message::Notice(why.to_owned()));
    }

    /// Returns the server that holds a lease, and the lease's id there.
    async fn holder(&self, slot: Slot) -> Result<(Arc<dyn PoolServer>, String), PoolError> {
        let gone = || PoolError::new(Trouble::NoSuchLease, "the lease is not held by any server");
        self.call(|reply| Message::Holder(slot, reply)).await.flatten().ok_or_else(gone)
    }

    async fn call<T>(&self, message: impl FnOnce(oneshot::Sender<T>) -> Message) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.messages.send(message(reply)).ok()?;
        answer.await.ok()
    }
}

fn ended() -> PoolError {
    PoolError::new(Trouble::Unreachable, "request dropped: gpusessiond is stopping, or the session ended")
}

#[async_trait]
impl Leases for Engine {
    fn snapshot(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshot.clone()
    }

    fn updates(&self) -> mpsc::UnboundedReceiver<Update> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut updates = self.updates.lock().unwrap_or_else(|e| e.into_inner());
        let _ = sender.send(Update { changes: Vec::new(), snapshot: self.snapshot.borrow().clone() });
        updates.push(sender);
        receiver
    }

    async fn create(&self, spec: Spec) -> Result<LeaseView, PoolError> {
        self.call(|reply| Message::Create(Box::new(spec), reply)).await.unwrap_or_else(|| Err(ended()))
    }

    async fn want(&self, spec: Spec) -> Slot {
        self.call(|reply| Message::Want(Box::new(spec), reply)).await.unwrap_or(0)
    }

    async fn release(&self, slot: Slot, reason: &str) -> bool {
        self.call(|reply| Message::Release(slot, reason.to_owned(), reply)).await.unwrap_or(false)
    }

    async fn renew(&self, id: &str, ttl: Option<Duration>) -> Result<Duration, PoolError> {
        self.call(|reply| Message::Renew(id.to_owned(), ttl, reply)).await.unwrap_or_else(|| Err(ended()))
    }

    async fn configure(&self, leases: Vec<Spec>) {
        self.call(|reply| Message::Configure(leases, reply)).await;
    }

    async fn preallocate(&self, count: u32) {
        self.call(|reply| Message::Preallocate(count, reply)).await;
    }

    fn session_opened(&self, session: Arc<Session>) {
        let _ = self.messages.send(Message::SessionOpened(session));
    }

    fn session_closed(&self, id: &str) {
        let _ = self.messages.send(Message::SessionClosed(id.to_owned()));
    }

    async fn drain(&self, server: usize, grace: Option<Duration>) -> bool {
        self.call(|reply| Message::Drain(server, grace, reply)).await.unwrap_or(false)
    }

    async fn resume(&self, lease: &str, worker: [u8; 16]) -> Option<Granted> {
        self.call(|reply| Message::Resume(lease.to_owned(), worker, reply)).await.flatten()
    }

    async fn warn(&self, left: Duration, reason: &str) -> usize {
        self.call(|reply| Message::Warn(left, reason.to_owned(), reply)).await.unwrap_or(0)
    }

    async fn grant(&self, caller: Caller, wish: Wish) -> Answer {
        self.call(|reply| Message::Grant(caller, wish, reply))
            .await
            .unwrap_or_else(|| Answer::Denied(Denial::NotReady, "gpusessiond is stopping".into()))
    }

    async fn readings(
        &self,
        caller: Caller,
        wish: Wish,
        queries: Vec<Query>,
    ) -> Result<View, (Denial, String)> {
        let places = self.call(|reply| Message::Places(caller, wish, reply)).await;
        readings::ask(
            places.unwrap_or_else(|| Err((Denial::NotReady, "gpusessiond is stopping".into())))?,
            queries,
        )
        .await
    }

    async fn cuda_version(&self, caller: Caller, wish: Wish) -> Result<u32, (Denial, String)> {
        let places = self.call(|reply| Message::Places(caller, wish, reply)).await;
        let places = places.unwrap_or_else(|| Err((Denial::NotReady, "gpusessiond is stopping".into())))?;
        let oldest = places.iter().map(|place| place.lease.cuda_version).filter(|version| *version > 0).min();
        oldest.ok_or_else(|| (Denial::NotReady, "no server has reported its CUDA version".into()))
    }

    async fn of(&self, caller: Caller) -> Vec<Slot> {
        self.call(|reply| Message::Of(caller, reply)).await.unwrap_or_default()
    }

    fn ended(&self, granted: Vec<Granted>) {
        let _ = self.messages.send(Message::Ended(granted));
    }

    fn became(&self, slot: Slot, uid: u32, failure: Option<Failure>) {
        let _ = self.messages.send(Message::Became(slot, uid, failure));
    }

    async fn park(&self, slot: Slot, park: bool) -> Result<(), PoolError> {
        let (pool, lease) = self.holder(slot).await?;
        pool.park(lease, park).await
    }

    async fn idle_hint(&self, slot: Slot, idle: bool) -> Result<(), PoolError> {
        let (pool, lease) = self.holder(slot).await?;
        pool.idle_hint(lease, idle).await
    }

    async fn ask(&self, server: usize) -> Result<(Duration, control::ServerDescription), PoolError> {
        let pool = self.call(|reply| Message::Server(server, reply)).await.flatten();
        let Some(pool) = pool else {
            return Err(PoolError::new(Trouble::Invalid, "server not found"));
        };
        let begun = Instant::now();
        let description = pool.describe().await?;
        let rtt = begun.elapsed();
        let _ = self.messages.send(Message::Described(server, rtt, description.clone()));
        Ok((rtt, description))
    }

    async fn shutdown(&self, limit: Duration) {
        let _ = tokio::time::timeout(limit, self.call(Message::Drained)).await;
    }
}

/// Follows one server's events while the manager lives.
async fn follow(
    server: Arc<dyn PoolServer>,
    index: usize,
    boot: String,
    messages: mpsc::WeakUnboundedSender<Message>,
) {
    let mut said = false;
    let mut first = true;
    let mut pause = BACKOFF_MIN;
    loop {
        let begun = Instant::now();
        match server.describe().await {
            Ok(description) => {
                pause = BACKOFF_MIN;
                let Some(messages) = messages.upgrade() else { return };
                // The first success after failures matters to leases that wait.
                if !std::mem::take(&mut first) || said {
                    let _ = messages.send(Message::Reconnected(index));
                }
                said = false;
                let _ = messages.send(Message::Described(index, begun.elapsed(), description));
            }
            Err(error) => {
                if !said {
                    warn!(gpusession_server = server.address(), "{error}");
                    said = true;
                }
                if messages.upgrade().is_none() {
                    return;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(BACKOFF_MAX);
                continue;
            }
        }
        let (events, mut arriving) = mpsc::channel(64);
        let watching = server.watch(boot.clone(), events);
        tokio::pin!(watching);
        let result = loop {
            tokio::select! {
                result = &mut watching => break result,
                Some(event) = arriving.recv() => {
                    let Some(messages) = messages.upgrade() else { return };
                    let _ = messages.send(Message::Event(index, event));
                }
            }
        };
        while let Ok(event) = arriving.try_recv() {
            let Some(messages) = messages.upgrade() else { return };
            let _ = messages.send(Message::Event(index, event));
        }
        if let Err(error) = result {
            debug!(
                server = server.address(),
                "server {}: watch ended: {error}; reconnecting",
                server.address()
            );
        }
        let Some(handle) = messages.upgrade() else { return };
        let _ = handle.send(Message::Disconnected(index));
        drop(handle);
        tokio::time::sleep(pause).await;
    }
}

struct Actor {
    machine: Machine,
    servers: Vec<Arc<dyn PoolServer>>,
    here: Here,
    boot: String,
    origin: Instant,
    messages: mpsc::WeakUnboundedSender<Message>,
    snapshot: watch::Sender<Arc<Snapshot>>,
    updates: Updates,
    /// A server's description changed since the last snapshot.
    described: bool,
    saved: Saved,
    save: Box<dyn FnMut(&Saved) + Send>,
    gate: Option<Arc<Gate>>,
    alive: Option<(Duration, Box<dyn FnMut() + Send>)>,
    said_alive: Instant,
    creating: HashMap<Slot, oneshot::Sender<Result<LeaseView, PoolError>>>,
    drained: Vec<oneshot::Sender<()>>,
    /// The reason last logged for each waiting lease.
    said: HashMap<Slot, String>,
    /// Why a lease's server gives no worker: each reason is logged once.
    refused: HashMap<Slot, String>,
    /// The latest program of each user that a lease failed, and when; the newest last. An entry
    /// lasts until the lease serves another program of that user.
    failures: HashMap<Slot, Vec<(Failure, Time)>>,
    /// Servers and leases whose silence and parking have been logged.
    lost: HashSet<usize>,
    parked: HashSet<Slot>,
    about: Vec<ServerView>,
}

impl Actor {
    fn now(&self) -> Time {
        self.here.uptime + self.origin.elapsed()
    }

    /// Reports that the manager's loop runs; returns when the next report is due.
    fn alive(&mut self) -> Option<Instant> {
        let (interval, say) = self.alive.as_mut()?;
        // Heartbeats usually wake the loop more often than this, so no wake-up serves the report
        // alone.
        if self.said_alive.elapsed() * 4 >= *interval {
            say();
            self.said_alive = Instant::now();
        }
        Some(self.said_alive + *interval)
    }

    async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Message>) {
        let alarm = Alarm::new();
        self.machine.tick(self.now());
        self.work();
        loop {
            let alive = self.alive();
            let deadline =
                self.machine.deadline().map(|at| self.origin + at.saturating_sub(self.here.uptime));
            let deadline = deadline.into_iter().chain(alive).min();
            tokio::select! {
                message = inbox.recv() => match message {
                    Some(message) => self.handle(message),
                    None => return,
                },
                () = alarm.at(deadline) => {}
            }
            // Messages that are already queued are handled before one update is published for all.
            while let Ok(message) = inbox.try_recv() {
                self.handle(message);
            }
            self.machine.tick(self.now());
            self.work();
        }
    }

    fn handle(&mut self, message: Message) {
        let now = self.now();
        match message {
            Message::Create(spec, reply) => {
                let slot = self.machine.want(now, *spec);
                self.creating.insert(slot, reply);
            }
            Message::Want(spec, reply) => {
                let _ = reply.send(self.machine.want(now, *spec));
            }
            Message::Release(slot, reason, reply) => {
                let there = self.machine.slot(slot).is_some();
                if let Some(held) = self.machine.slot(slot).and_then(|w| w.held()) {
                    info!(gpusession_lease = held.lease.id, "lease {}: released: {reason}", held.lease.id);
                }
                self.machine.release(now, slot, &reason);
                let _ = reply.send(there);
            }
            Message::Renew(id, ttl, reply) => self.renew(&id, ttl, reply),
            Message::Grant(caller, wish, reply) => self.grant(caller, wish, reply),
            Message::Places(caller, wish, reply) => {
                let _ = reply.send(self.places(&caller, &wish));
            }
            Message::Of(caller, reply) => {
                let _ = reply.send(self.select(&caller, &Wish::default()).unwrap_or_default());
            }
            Message::Ended(granted) => self.processes_ended(granted),
            Message::Became(slot, uid, failure) => self.became(slot, uid, failure),
            Message::Resume(lease, worker, reply) => {
                let granted = self.machine.slot_of(&lease).map(|slot| Granted { slot, lease, worker });
                if let Some(granted) = &granted {
                    self.machine.process_resumed(granted.slot, granted.worker);
                }
                let _ = reply.send(granted);
            }
            Message::Configure(leases, reply) => {
                self.machine.configure(now, leases);
                let sessions: Vec<_> = self.machine.sessions().values().cloned().collect();
                for session in
                    sessions.into_iter().filter(|s| !s.tty.is_empty() && self.machine.has_templates())
                {
                    self.demand_for(session);
                }
                let _ = reply.send(());
            }
            Message::Preallocate(count, reply) => {
                self.machine.preallocate(now, count);
                let _ = reply.send(());
            }
            Message::SessionOpened(session) => {
                self.machine.session_opened(now, session.clone());
                // A login without a terminal may only copy a file: its leases wait for its first
                // CUDA call.
                if !session.tty.is_empty() && self.machine.has_templates() {
                    self.demand_for(session);
                }
            }
            Message::Demand(Caller { uid, user, access, session, .. }) => {
                self.machine.demand(now, uid, user.as_deref(), access, session.as_deref());
            }
            Message::SessionClosed(id) => self.machine.session_closed(now, &id),
            Message::Drain(server, grace, reply) => {
                let there = server < self.servers.len();
                if there {
                    self.machine.drain(now, server, grace);
                }
                let _ = reply.send(there);
            }
            Message::Warn(left, reason, reply) => {
                let _ = reply.send(self.machine.warn(left, &reason));
            }
            Message::Freed(slot) => self.machine.worker_freed(now, slot),
            Message::Drained(reply) => {
                let slots: Vec<Slot> = self.machine.slots().map(|(slot, _)| slot).collect();
                for slot in slots {
                    self.machine.release(now, slot, "gpusessiond is stopping");
                }
                self.drained.push(reply);
            }
            Message::Allocated(slot, result) => {
                if let Ok((server, lease)) = &result {
                    self.machine.name_server(now, *server, &lease.server);
                    if !lease.server.is_empty() {
                        self.about[*server].name.clone_from(&lease.server);
                    }
                    info!(
                        message_id = Event::LeaseGranted.id(),
                        gpusession_lease = lease.id,
                        gpusession_server = lease.server,
                        "lease {}: granted by server {}: {} GPU(s)",
                        lease.id,
                        lease.server,
                        lease.devices.len()
                    );
                    let asked = self.machine.slot(slot).and_then(|wanted| wanted.spec.ttl);
                    let granted = Duration::from_micros(lease.ttl_usec);
                    if let Some(asked) = asked.filter(|asked| granted < *asked) {
                        warn!(
                            gpusession_lease = lease.id,
                            gpusession_server = lease.server,
                            "lease {}: ends after {}, not after {} as requested: lease_ttl of server {} is smaller",
                            lease.id,
                            human_duration(granted),
                            human_duration(asked),
                            lease.server
                        );
                    }
                }
                if let Ok((server, _)) = &result {
                    self.describe(*server);
                }
                self.machine.allocated(now, slot, result);
            }
            Message::Renewed(server, asked, rtt, result) => {
                if let Ok(reply) = &result {
                    let about = &mut self.about[server];
                    about.last_seen_usec = wall_usec();
                    about.rtt_usec = rtt.as_micros() as u64;
                    if !reply.state.is_empty() && about.state != reply.state {
                        about.state.clone_from(&reply.state);
                        self.described = true;
                    }
                }
                self.machine.renewed(now, server, &asked, result.map(|reply| reply.leases));
            }
            Message::Withdrawn(server, request, result) => {
                if let Err(error) = &result {
                    debug!("request {request}: not withdrawn: {error}; its server forgets it in time");
                }
                self.machine.released(now, server, &request, result);
            }
            Message::Released(server, lease, result) => {
                if let Err(error) = &result {
                    warn!(
                        gpusession_lease = lease,
                        "lease {lease}: not released yet: {error}; it expires at its server at the latest
"
                    );
                }
                self.machine.released(now, server, &lease, result);
                self.describe(server);
            }
            Message::Workers(slot, lease, result) => {
                let refused = result.as_ref().err().map(|error| error.message.clone());
                if self.refused.get(&slot) != refused.as_ref() {
                    if let Some(reason) = &refused {
                        warn!(
                            gpusession_lease = lease,
                            "lease {lease}: its server gives no worker: {reason}"
                        );
                    }
                    match refused {
                        Some(reason) => drop(self.refused.insert(slot, reason)),
                        None => drop(self.refused.remove(&slot)),
                    }
                }
                self.machine.workers(now, slot, &lease, result);
            }
            Message::Connect(servers) => {
                for server in servers {
                    let address = server.address().to_owned();
                    let index = self.machine.add_server(now, address.clone());
                    tokio::spawn(follow(server.clone(), index, self.boot.clone(), self.messages.clone()));
                    self.servers.push(server);
                    self.about.push(ServerView { name: address.clone(), address, ..ServerView::default() });
                }
                self.described = true;
            }
            Message::Disconnected(server) => {
                for (lease, worker) in self.machine.disconnected(server) {
                    tokio::spawn(tell_ended(self.servers[server].clone(), lease, worker.id));
                }
            }
            Message::Reconnected(server) => self.machine.reconnected(now, server),
            Message::Notice(why) => self.machine.set_notice(now, why),
            Message::Server(index, reply) => {
                let _ = reply.send(self.servers.get(index).cloned());
            }
            Message::Holder(slot, reply) => {
                let held = self.machine.slot(slot).and_then(|w| w.held());
                let _ = reply.send(held.map(|h| (self.servers[h.server].clone(), h.lease.id.clone())));
            }
            Message::Event(server, event) => self.machine.event(now, server, event),
            Message::Described(server, rtt, description) => {
                self.machine.name_server(now, server, &description.name);
                let about = &mut self.about[server];
                if !description.name.is_empty() {
                    about.name = description.name;
                }
                about.rtt_usec = rtt.as_micros() as u64;
                about.last_seen_usec = wall_usec();
                about.protocol = description.protocol;
                about.software = description.software;
                about.devices = description.devices.len() as u32;
                about.free = description.devices.iter().filter(|d| d.state == "free").count() as u32;
                about.state = description.state;
                about.idle_timeout_usec = description.idle_timeout_usec;
                about.lease_ttl_usec = description.lease_ttl_usec;
                let free = about.free;
                self.machine.described(now, server, free);
                self.described = true;
            }
        }
    }

    /// Wants the leases that the configuration has for a session, once its user is looked up.
    fn demand_for(&self, session: Arc<Session>) {
        let Some(gate) = self.gate.clone() else { return };
        self.spawn(async move {
            let person = gate.person(session.uid).await;
            let (uid, session) = (session.uid, Some(session.id.clone()));
            Message::Demand(Caller { uid, pid: 0, user: person.name, access: person.access, session })
        });
    }

    /// Asks a server for its description after a change of its free GPUs.
    fn describe(&self, server: usize) {
        let (pool, messages) = (self.servers[server].clone(), self.messages.clone());
        tokio::spawn(async move {
            let begun = Instant::now();
            if let Ok(description) = pool.describe().await
                && let Some(messages) = messages.upgrade()
            {
                let _ = messages.send(Message::Described(server, begun.elapsed(), description));
            }
        });
    }

    fn spawn(&self, future: impl Future<Output = Message> + Send + 'static) {
        let messages = self.messages.clone();
        tokio::spawn(async move {
            let message = future.await;
            if let Some(messages) = messages.upgrade() {
                let _ = messages.send(message);
            }
        });
    }

    /// Performs the machine's actions, then publishes a snapshot.
    fn work(&mut self) {
        self.work_once();
        while self.machine.has_actions() {
            self.work_once();
        }
    }

    fn work_once(&mut self) {
        let mut told = Vec::new();
        while let Some(action) = self.machine.next_action() {
            match action {
                Action::Allocate { slot, servers, request } => {
                    let pools: Vec<_> = servers.iter().map(|i| (*i, self.servers[*i].clone())).collect();
                    self.spawn(async move { Message::Allocated(slot, allocate(pools, *request).await) });
                }
                Action::Renew { server, leases } => {
                    let (pool, boot) = (self.servers[server].clone(), self.boot.clone());
                    self.spawn(async move {
                        let begun = Instant::now();
                        let result = pool.renew(leases.clone(), boot).await;
                        Message::Renewed(server, leases, begun.elapsed(), result)
                    });
                }
                Action::Withdraw { server, request_id } => {
                    let pool = self.servers[server].clone();
                    self.spawn(async move {
                        let result = pool.withdraw(request_id.clone()).await;
                        Message::Withdrawn(server, request_id, result)
                    });
                }
                Action::Release { server, lease } => {
                    let pool = self.servers[server].clone();
                    self.spawn(async move {
                        let result = pool.release(lease.clone()).await;
                        Message::Released(server, lease, result)
                    });
                }
                Action::TakeWorkers { slot, server, lease, count, waiting } => {
                    let pool = self.servers[server].clone();
                    self.spawn(async move {
                        let result = pool.take_workers(lease.clone(), count, waiting, HashMap::new()).await;
                        Message::Workers(slot, lease, result)
                    });
                }
                Action::EndWorker { slot, server, lease, worker } => {
                    let pool = self.servers[server].clone();
                    self.spawn(async move {
                        tell_ended(pool, lease, worker).await;
                        Message::Freed(slot)
                    });
                }
                Action::Tell(change) => told.push(change),
            }
        }
        let saved = self.machine.saved();
        if saved != self.saved {
            (self.save)(&saved);
            self.saved = saved;
        }
        let snapshot = Arc::new(self.look());
        // Waiting processes ask again at each notification, so only a real change notifies.
        let stock = told.iter().any(|c| matches!(c, Change::Stock { .. }));
        let mut changed = stock || std::mem::take(&mut self.described);
        {
            // Under the lock, so that a subscriber that starts now sees every update exactly once.
            let mut updates = self.updates.lock().unwrap_or_else(|e| e.into_inner());
            self.snapshot.send_if_modified(|old| {
                changed |= !same(old, &snapshot);
                *old = snapshot.clone();
                changed
            });
            if changed || !told.is_empty() {
                let update = Update { changes: told.clone(), snapshot: snapshot.clone() };
                updates.retain(|to| to.send(update.clone()).is_ok());
            }
        }
        self.log_servers(&snapshot);
        for change in told {
            self.log(&change);
            match &change {
                Change::Granted { slot } => {
                    if let Some(reply) = self.creating.remove(slot) {
                        let view = snapshot.leases.iter().find(|l| l.slot == *slot).cloned();
                        let gone = reply.send(view.ok_or_else(ended)).is_err();
                        if gone {
                            // The requester dropped its reply channel.
                            let now = self.now();
                            self.machine.release(now, *slot, "its requester has left");
                        }
                    }
                }
                Change::Failed { slot, error } => {
                    if let Some(reply) = self.creating.remove(slot) {
                        let _ = reply.send(Err(error.clone()));
                    }
                }
                Change::Removed { slot, .. } => {
                    self.refused.remove(slot);
                    self.failures.remove(slot);
                    if let Some(reply) = self.creating.remove(slot) {
                        let _ = reply.send(Err(ended()));
                    }
                }
                _ => {}
            }
        }
        if !self.drained.is_empty()
            && self.machine.releases_pending() == 0
            && self.machine.slots().next().is_none()
        {
            for reply in self.drained.drain(..) {
                let _ = reply.send(());
            }
        }
    }

    /// Logs servers that fall silent or return, and leases that are parked.
    fn log_servers(&mut self, snapshot: &Snapshot) {
        for (index, server) in snapshot.servers.iter().enumerate() {
            let lost = matches!(server.state.as_str(), "suspect" | "offline" | "unauthorized");
            if lost && self.lost.insert(index) {
                warn!(
                    message_id = Event::ServerLost.id(),
                    gpusession_server = server.name,
                    gpusession_reason = server.trouble,
                    "server {}: {}: {}",
                    server.name,
                    server.state,
                    server.trouble
                );
            } else if server.state == "online" && self.lost.remove(&index) {
                info!(
                    message_id = Event::ServerBack.id(),
                    gpusession_server = server.name,
                    "server {}: answers again",
                    server.name
                );
            }
        }
        for lease in &snapshot.leases {
            if lease.state != LeaseState::Parked {
                self.parked.remove(&lease.slot);
            } else if self.parked.insert(lease.slot) {
                info!(
                    message_id = Event::LeaseParked.id(),
                    gpusession_lease = lease.id,
                    "lease {}: parked",
                    lease.id
                );
            }
        }
        self.parked.retain(|slot| snapshot.leases.iter().any(|l| l.slot == *slot));
    }

    /// Logs a change; that a lease waits is logged once for each reason, not at every try.
    fn log(&mut self, change: &Change) {
        match change {
            Change::Granted { slot } => {
                self.said.remove(slot);
            }
            Change::Changed { slot } => {
                let Some(wanted) = self.machine.slot(*slot) else { return };
                let (Phase::Waiting { .. }, Some(error)) = (&wanted.phase, &wanted.trouble) else { return };
                let known = self.said.get(slot).is_some_and(|said| *said == error.message);
                if !known && !self.servers.is_empty() {
                    let waiting = error.waiting();
                    let event = match error.trouble {
                        Trouble::Protocol => Event::ProtocolMismatch,
                        Trouble::Quota => Event::LimitRefuses,
                        _ => Event::LeaseWaits,
                    };
                    info!(
                        message_id = event.id(),
                        gpusession_lease = wanted.spec.name,
                        gpusession_reason = waiting,
                        "lease {}: waits: {waiting}",
                        wanted.spec.name
                    );
                    self.said.insert(*slot, error.message.clone());
                }
            }
            Change::PrepareForLoss { slot, left, reason, idle } => {
                let held = self.machine.slot(*slot).and_then(|w| w.held());
                let id = held.map(|h| h.lease.id.as_str()).unwrap_or_default();
                warn!(
                    message_id = if *idle { Event::LeaseIdle } else { Event::LeaseEnds }.id(),
                    gpusession_lease = id,
                    gpusession_reason = reason,
                    "lease {id}: {}",
                    crate::notice::warning(*left, reason)
                );
            }
            Change::Lost { id, reason, .. } => {
                warn!(
                    message_id = Event::LeaseLost.id(),
                    gpusession_lease = id,
                    gpusession_reason = reason,
                    "lease {id}: lost: {reason}"
                );
            }
            Change::Removed { slot, reason, .. } => {
                self.said.remove(slot);
                debug!(gpusession_reason = reason, "lease slot {slot}: removed: {reason}");
            }
            _ => {}
        }
    }

    fn look(&self) -> Snapshot {
        let now = self.now();
        let wall = wall_usec();
        let at_wall = |time: Time| {
            if time >= now {
                wall + (time - now).as_micros() as u64
            } else {
                wall - (now - time).as_micros() as u64
            }
        };
        let leases = self
            .machine
            .slots()
            .map(|(slot, wanted)| {
                let held = wanted.held();
                let spec = wanted.spec.clone();
                let pending_name = match spec.class {
                    _ if spec.name.is_empty() => format!("request{slot}"),
                    Class::Boot | Class::Background => spec.name.clone(),
                    // Several sessions or users may each have a lease of this name.
                    Class::Session | Class::User => format!("{}-{slot}", spec.name),
                };
                LeaseView {
                    slot,
                    id: held.map_or(pending_name, |h| h.lease.id.clone()),
                    uid: match spec.owner {
                        Owner::Uid(uid) => uid,
                        Owner::User(_) => spec.uid.unwrap_or(UNKNOWN_USER),
                        Owner::Everyone => u32::MAX,
                    },
                    state: held.map_or(LeaseState::Pending, |h| h.state),
                    devices: held.map(devices).unwrap_or_default(),
                    server: held.map(|h| h.lease.server.clone()).unwrap_or_default(),
                    created_usec: at_wall(held.map_or(wanted.since, |h| h.since)),
                    expires_usec: held.map_or(0, |h| at_wall(h.expires)),
                    fencing_token: held.map_or(0, |h| h.lease.fencing_token),
                    encrypted: held.is_some_and(|h| h.lease.encrypted),
                    trouble: held.and_then(Held::waits).or_else(|| wanted.trouble.clone()),
                    retry_in: match wanted.phase {
                        Phase::Waiting { retry } => Some(retry.saturating_sub(now)),
                        _ => None,
                    },
                    stock: held.map_or(0, |h| h.stock.len()),
                    processes: wanted.processes,
                    failures: self
                        .failures
                        .get(&slot)
                        .into_iter()
                        .flatten()
                        .map(|(failure, at)| (failure.clone(), at_wall(*at)))
                        .collect(),
                    idle_timeout_usec: held.map_or(0, |h| h.lease.idle_timeout_usec),
                    idle_since_usec: held
                        .and_then(|h| h.idle_since)
                        .map_or((0, 0), |at| (at_wall(at), at.as_micros() as u64)),
                    leader: spec
                        .session
                        .as_ref()
                        .and_then(|id| self.machine.sessions().get(id))
                        .map_or(0, |s| s.leader),
                    spec,
                }
            })
            .collect();
        let servers = self
            .about
            .iter()
            .enumerate()
            .map(|(i, about)| {
                let health = self.machine.health(i);
                let silent = self.machine.silent_for(now, i);
                let draining = about.state == "draining" || self.machine.drained(i);
                let state = match (&health.trouble, health.answered, silent) {
                    (Some(e), ..) if e.trouble == Trouble::Refused => "unauthorized",
                    (None, Some(_), _) if draining => "draining",
                    (None, Some(_), _) => "online",
                    (_, _, Some(silent)) if silent >= OFFLINE_TIMEOUT => "offline",
                    (Some(_), Some(_), Some(silent)) if silent >= SUSPECT_TIMEOUT => "suspect",
                    (Some(_), Some(_), _) => "online",
                    (Some(_), None, _) => "offline",
                    (None, None, _) => "connecting",
                };
                ServerView {
                    state: state.into(),
                    trouble: health.trouble.as_ref().map(|e| e.message.clone()).unwrap_or_default(),
                    ..about.clone()
                }
            })
            .collect();
        let sessions = self.machine.sessions().values().cloned().collect();
        Snapshot { leases, servers, sessions }
    }

    fn renew(
        &mut self,
        id: &str,
        ttl: Option<Duration>,
        reply: oneshot::Sender<Result<Duration, PoolError>>,
    ) {
        let found = self
            .machine
            .slots()
            .find_map(|(slot, w)| w.held().filter(|h| h.lease.id == id).map(|h| (slot, h.server)));
        let Some((slot, server)) = found else {
            let _ = reply.send(Err(PoolError::new(Trouble::NoSuchLease, format!("lease {id}: not found"))));
            return;
        };
        if let Some(ttl) = ttl {
            self.machine.set_ttl(slot, ttl);
        }
        let longest = self.machine.slot(slot).and_then(|w| w.spec.ttl).unwrap_or(Duration::MAX);
        let (pool, boot, id) = (self.servers[server].clone(), self.boot.clone(), id.to_owned());
        self.spawn(async move {
            let begun = Instant::now();
            let asked = vec![id.clone()];
            let result = pool.renew(asked.clone(), boot).await;
            let _ = reply.send(match &result {
                Ok(renewed) => match renewed.leases.iter().find(|l| l.id == id) {
                    Some(lease) if !lease.lost => Ok(Duration::from_micros(lease.ttl_usec).min(longest)),
                    _ => Err(PoolError::new(Trouble::NoSuchLease, format!("lease {id}: lost"))),
                },
                Err(error) => Err(error.clone()),
            });
            Message::Renewed(server, asked, begun.elapsed(), result)
        });
    }

    /// Selects a process's leases: the named one, else its session's, its user's, those for all.
    fn select(&self, caller: &Caller, wish: &Wish) -> Result<Vec<Slot>, (Denial, String)> {
        let mine = |owner: &Owner| match owner {
            Owner::Uid(uid) => *uid == caller.uid,
            Owner::User(name) => caller.user.as_deref() == Some(name),
            Owner::Everyone => caller.access,
        };
        if let Some(id) = wish.lease.as_deref().filter(|id| !id.is_empty()) {
            // A name may belong to leases of several sessions: that of the caller's session comes
            // first.
            let another = |w: &Wanted| w.spec.session.is_none() || w.spec.session != caller.session;
            let named = self
                .machine
                .slots()
                .filter(|(_, w)| w.held().is_some_and(|h| h.lease.id == id) || w.spec.name == id)
                .filter(|(_, w)| mine(&w.spec.owner) || caller.uid == 0)
                .min_by_key(|(_, w)| another(w));
            return match named {
                Some((slot, _)) => Ok(vec![slot]),
                None => Err((Denial::NoDevice, format!("lease {id}: not found among this user's leases"))),
            };
        }
        let configured = |test: &dyn Fn(&Spec) -> bool| {
            let mut slots: Vec<_> = self
                .machine
                .slots()
                .filter(|(_, w)| !w.spec.once && test(&w.spec))
                .map(|(slot, w)| (w.spec.order, slot))
                .collect();
            slots.sort_unstable();
            slots.into_iter().map(|(_, slot)| slot).collect::<Vec<_>>()
        };
        let of_session = |spec: &Spec| spec.session.is_some() && spec.session == caller.session;
        let own = configured(&|spec| of_session(spec) && mine(&spec.owner));
        if !own.is_empty() {
            return Ok(own);
        }
        let own =
            configured(&|spec| spec.session.is_none() && spec.owner != Owner::Everyone && mine(&spec.owner));
        if !own.is_empty() {
            return Ok(own);
        }
        let boot = configured(&|spec| spec.owner == Owner::Everyone);
        if boot.is_empty() {
            return Err((Denial::NoDevice, "no lease is configured for this user".into()));
        }
        if !caller.access {
            let who = caller.user.clone().unwrap_or_else(|| format!("uid {}", caller.uid));
            return Err((Denial::NoDevice, format!("[access] does not let {who} use this machine's GPUs")));
        }
        Ok(boot)
    }

    /// Returns the held leases that a process would get, with their servers.
    fn places(&self, caller: &Caller, wish: &Wish) -> Result<Vec<Place>, (Denial, String)> {
        let slots = self.select(caller, wish)?;
        let places: Vec<Place> = slots
            .iter()
            .filter_map(|slot| {
                let held = self.machine.slot(*slot)?.held()?;
                Some(Place { lease: held.lease.clone(), server: self.servers[held.server].clone() })
            })
            .collect();
        if places.is_empty() {
            let trouble = slots.iter().find_map(|s| self.machine.slot(*s)?.trouble.as_ref());
            return Err((
                Denial::NotReady,
                trouble.map_or_else(|| "the lease is being allocated".into(), |e| e.message.clone()),
            ));
        }
        Ok(places)
    }

    fn grant(&mut self, caller: Caller, wish: Wish, reply: oneshot::Sender<Answer>) {
        let now = self.now();
        if wish.lease.is_none() {
            let Caller { uid, user, access, session, .. } = &caller;
            self.machine.demand(now, *uid, user.as_deref(), *access, session.as_deref());
        }
        let slots = match self.select(&caller, &wish) {
            Ok(slots) => slots,
            Err((denial, reason)) => {
                let _ = reply.send(Answer::Denied(denial, reason));
                return;
            }
        };
        let held: Vec<Slot> = slots
            .iter()
            .copied()
            .filter(|s| self.machine.slot(*s).is_some_and(|w| w.held().is_some()))
            .collect();
        if held.len() < slots.len() && wish.lease.is_none() && !held.is_empty() {
            debug!(
                "process {}: runs on {} of {} leases; the others are not held",
                caller.pid,
                held.len(),
                slots.len()
            );
        }
        if held.is_empty() {
            let wanted = slots.first().and_then(|s| self.machine.slot(*s));
            let _ =
                reply.send(no_gpu(wanted.and_then(|w| w.trouble.as_ref()), "the lease is being allocated"));
            return;
        }
        if let Some(reason) = held.iter().find_map(|slot| self.speaks_otherwise(*slot)) {
            let _ = reply.send(Answer::Denied(Denial::ProtocolMismatch, reason));
            return;
        }
        if !wish.environment.is_empty() {
            self.grant_cold(caller, wish, held, reply);
            return;
        }
        let Some(workers) = self.machine.take(now, &held) else {
            let trouble = held.iter().find_map(|s| self.machine.slot(*s).and_then(|w| w.trouble.as_ref()));
            let _ = reply.send(no_worker(trouble, "the server is starting a worker"));
            return;
        };
        let answer = self.mint(&caller, &wish, &held, workers);
        if let Err(Answer::Granted(_, granted)) = reply.send(answer) {
            self.processes_ended(granted);
        }
    }

    /// Returns why the lease's server would refuse a program's connection, if it would.
    fn speaks_otherwise(&self, slot: Slot) -> Option<String> {
        let about = &self.about[self.machine.slot(slot)?.held()?.server];
        let ours = u32::from(preface::VERSION);
        // 0 until the server has described itself.
        (![0, ours].contains(&about.protocol)).then(|| {
            format!(
                "{} speaks version {} of the data plane, this machine version {ours}: update the older one",
                about.name, about.protocol
            )
        })
    }

    /// Grants workers that start cold, for a process with a driver environment of its own.
    fn grant_cold(&mut self, caller: Caller, wish: Wish, held: Vec<Slot>, reply: oneshot::Sender<Answer>) {
        let asks: Vec<_> = held
            .iter()
            .filter_map(|slot| {
                let held = self.machine.slot(*slot)?.held()?;
                Some((*slot, held.clone(), self.servers[held.server].clone()))
            })
            .collect();
        let boot_id = self.here.boot_id;
        let issued = self.now().as_micros() as u64;
        for (slot, ..) in &asks {
            self.machine.process_started(*slot);
        }
        let messages = self.messages.clone();
        tokio::spawn(async move {
            let mut taken = Vec::new();
            let mut failed = None;
            for (slot, held, pool) in asks {
                let worker = if failed.is_some() {
                    None
                } else {
                    match pool.take_workers(held.lease.id.clone(), 1, 1, wish.environment.clone()).await {
                        Ok(workers) if workers.is_empty() => {
                            failed = Some(PoolError::new(Trouble::NoCapacity, "the server gives no worker"));
                            None
                        }
                        Ok(workers) => workers.into_iter().next(),
                        Err(error) => {
                            failed = Some(error);
                            None
                        }
                    }
                };
                // Each slot was counted above; `Message::Ended` uncounts one without a worker too.
                taken.push((slot, held, worker.unwrap_or_default()));
            }
            let (endpoints, granted) = mint(&caller, &wish, boot_id, issued, &taken);
            let answer = match failed {
                None => Answer::Granted(endpoints, granted.clone()),
                Some(e) => match no_worker(Some(&e), "") {
                    Answer::Wait(denial @ Denial::NotReady, reason) => Answer::Denied(denial, reason),
                    answer => answer,
                },
            };
            let refused = !matches!(answer, Answer::Granted(..));
            if (reply.send(answer).is_err() || refused)
                && let Some(messages) = messages.upgrade()
            {
                let _ = messages.send(Message::Ended(granted));
            }
        });
    }

    fn mint(&mut self, caller: &Caller, wish: &Wish, held: &[Slot], workers: Vec<control::Worker>) -> Answer {
        let taken: Vec<_> = held
            .iter()
            .zip(workers)
            .filter_map(|(slot, worker)| Some((*slot, self.machine.slot(*slot)?.held()?.clone(), worker)))
            .collect();
        let (endpoints, granted) =
            mint(caller, wish, self.here.boot_id, self.now().as_micros() as u64, &taken);
        for (slot, ..) in &taken {
            self.machine.process_started(*slot);
        }
        Answer::Granted(endpoints, granted)
    }

    /// Records the outcome of a user's program; a repeated failure of one process is logged once.
    fn became(&mut self, slot: Slot, uid: u32, failure: Option<Failure>) {
        let now = self.now();
        let Some(wanted) = self.machine.slot(slot) else { return };
        let failures = self.failures.entry(slot).or_default();
        let before = failures.iter().position(|(f, _)| f.uid == uid).map(|at| failures.remove(at).0);
        let Some(failure) = failure else { return };
        if !failure.again && before.as_ref() != Some(&failure) {
            let lease = wanted.held().map_or(&wanted.spec.name, |held| &held.lease.id);
            let (event, what) = match failure.running {
                true => (Event::ProgramLost, "has lost its GPUs"),
                false => (Event::ProgramUnserved, "could not be served"),
            };
            let Failure { pid, program, reason, .. } = &failure;
            warn!(
                message_id = event.id(),
                gpusession_lease = lease,
                gpusession_user = uid,
                gpusession_reason = reason,
                "process {pid} ({program}) of uid {uid}: {what}: {reason}"
            );
        }
        if failures.len() == MAX_FAILURES {
            failures.remove(0);
        }
        failures.push((failure, now));
    }

    fn processes_ended(&mut self, granted: Vec<Granted>) {
        let now = self.now();
        for one in granted {
            let worker = if one.worker == [0; 16] { Vec::new() } else { one.worker.to_vec() };
            self.machine.process_ended(now, one.slot, &one.lease, worker);
        }
    }
}

/// Answers a process that gets no GPU: it waits, or is refused, depending on the trouble.
fn no_gpu(trouble: Option<&PoolError>, otherwise: &str) -> Answer {
    match trouble {
        None => Answer::Wait(Denial::NotReady, otherwise.into()),
        Some(e) => match e.trouble {
            Trouble::Quota => Answer::Denied(Denial::Quota, e.message.clone()),
            Trouble::OutOfMemory => Answer::Wait(Denial::OutOfMemory, e.message.clone()),
            Trouble::Protocol => Answer::Denied(Denial::ProtocolMismatch, e.message.clone()),
            _ => Answer::Wait(Denial::NotReady, e.waiting()),
        },
    }
}

/// Answers a process whose lease has no worker for it.
///
/// Unlike [`no_gpu`] it waits for a limit, which has room again when another program of the lease
/// exits.
fn no_worker(trouble: Option<&PoolError>, otherwise: &str) -> Answer {
    match no_gpu(trouble, otherwise) {
        Answer::Denied(denial @ Denial::Quota, reason) => Answer::Wait(denial, reason),
        answer => answer,
    }
}

/// Reports to a server that a worker is no longer needed; retries transient failures.
async fn tell_ended(pool: Arc<dyn PoolServer>, lease: String, worker: Vec<u8>) {
    for attempt in 0..ENDED_TRIES {
        match pool.process_ended(lease.clone(), worker.clone()).await {
            // A server that refuses calls over its rate limit has not recorded it either.
            Err(error) if matches!(error.trouble, Trouble::Unreachable | Trouble::Quota) => {
                debug!("lease {lease}: exit of a process not reported: {error}; retrying");
                tokio::time::sleep(Duration::from_millis(250 << attempt)).await;
            }
            _ => return,
        }
    }
}

/// Returns `true` if no observer needs to know of `b` after `a`: clocks move in every snapshot.

fn same(a: &Snapshot, b: &Snapshot) -> bool {
    let shown = |d: &DeviceView| (d.device.uuid.clone(), d.device.state.clone());
    a.leases.len() == b.leases.len()
        && a.leases.iter().zip(&b.leases).all(|(a, b)| {
            a.slot == b.slot
                && a.id == b.id
                && a.uid == b.uid
                && a.state == b.state
                && a.trouble == b.trouble
                && a.fencing_token == b.fencing_token
                && a.idle_timeout_usec == b.idle_timeout_usec
                && a.devices.iter().map(shown).eq(b.devices.iter().map(shown))
                && a.processes == b.processes
                && a.failures.iter().map(|f| &f.0).eq(b.failures.iter().map(|f| &f.0))
        })
        && a.sessions == b.sessions
        && a.servers.len() == b.servers.len()
        && a.servers.iter().zip(&b.servers).all(|(a, b)| a.state == b.state && a.name == b.name)
}

fn devices(held: &Held) -> Vec<DeviceView> {
    let lease = &held.lease;
    (0..)
        .zip(&lease.devices)
        .map(|(ordinal, device)| DeviceView {
            device: device.clone(),
            server: lease.server.clone(),
            ordinal,
            driver_version: lease.driver_version.clone(),
            cuda_version: lease.cuda_version,
        })
        .collect()
}

fn mint(
    caller: &Caller,
    wish: &Wish,
    boot_id: [u8; 16],
    issued_usec: u64,
    taken: &[(Slot, Held, control::Worker)],
) -> (Vec<Endpoint>, Vec<Granted>) {
    let mut endpoints = Vec::new();
    let mut granted = Vec::new();
    for (slot, held, worker) in taken {
        let id: [u8; 16] = worker.id.as_slice().try_into().unwrap_or_default();
        granted.push(Granted { slot: *slot, lease: held.lease.id.clone(), worker: id });
        let Ok(key) = <[u8; 32]>::try_from(held.lease.ticket_key.as_slice()) else { continue };
        let fingerprint: Option<[u8; 32]> = worker.fingerprint.as_slice().try_into().ok();
        if held.lease.encrypted && fingerprint.is_none() {
            // A malformed field must not lead to an unencrypted connection.
            continue;
        }
        let mut nonce = [0; 16];
        if getrandom::fill(&mut nonce).is_err() {
            warn!("ticket: no entropy for its nonce; the nonce is zero");
        }
        let ticket = Ticket {
            lease: held.lease.id.clone(),
            worker: id,
            uid: caller.uid,
            user: caller.user.clone().filter(|name| name.len() <= MAX_USER).unwrap_or_default(),
            pid: caller.pid,
            boot_id,
            issued_usec,
            nonce,
            program: wish.program.clone(),
            executable: wish.executable.clone(),
        };
        endpoints.push(Endpoint {
            server: held.lease.server.clone(),
            addresses: held.lease.data_addresses.clone(),
            worker: id,
            fingerprint: fingerprint.filter(|_| held.lease.encrypted),
            ticket: ticket.seal(&key),
            lease: held.lease.id.clone(),
            devices: held.lease.devices.len() as u32,
        });
    }
    (endpoints, granted)
}

/// Asks one server after the other; if all refuse, returns the most hopeful of their reasons.
async fn allocate(
    pools: Vec<(usize, Arc<dyn PoolServer>)>,
    request: control::AllocateRequest,
) -> Result<(usize, control::Lease), PoolError> {
    let mut refusal: Option<PoolError> = None;
    for (index, pool) in pools {
        match pool.allocate(request.clone()).await {
            Ok(lease) if valid(&lease) => return Ok((index, lease)),
            Ok(_) => {
                let message = format!("{}: sent an invalid lease", pool.address());
                refusal = Some(PoolError::new(Trouble::Protocol, message));
            }
            Err(error) => {
                let hope = |e: &PoolError| match e.trouble {
                    Trouble::NoCapacity => 4,
                    Trouble::Quota => 3,
                    Trouble::Unreachable => 2,
                    Trouble::NeverFits => 1,
                    _ => 0,
                };
                if refusal.as_ref().is_none_or(|r| hope(&error) > hope(r)) {
                    refusal = Some(error);
                }
            }
        }
    }
    Err(refusal.unwrap_or_else(|| PoolError::new(Trouble::Unreachable, "no server to ask")))
}

/// Returns `true` if a server's lease is within the bounds that the daemon accepts.
fn valid(lease: &control::Lease) -> bool {
    !lease.id.is_empty()
        && lease.id.len() <= 64
        && lease.id.bytes().all(|b| b.is_ascii_alphanumeric())
        && lease.ticket_key.len() == 32
        && lease.ttl_usec >= 1_000_000
        && lease.devices.len() <= 1024
        && lease.data_addresses.len() <= 64
        && !lease.data_addresses.is_empty()
}

fn wall_usec() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}
