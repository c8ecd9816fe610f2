//! Runs the [`machine`](super::machine): calls the servers, keeps time, publishes snapshots.

mod actor;
mod answers;
mod calls;
mod effects;
mod grants;
mod journal;
mod line;
mod message;
mod snapshot;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gpusession_proto::control;
use gpusession_proto::grant::Denial;
use gpusession_proto::readings::{Query, View};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use self::line::Line;
use super::machine::{Machine, Saved};
use super::readings;
use super::{
    Answer, Caller, Failure, Granted, Interruption, LeaseView, Leases, Session, Slot, Snapshot, Spec, Update,
    WorkerRequest,
};
use crate::access::Gate;
use crate::pool::{PoolError, PoolServer, Trouble};

use actor::Actor;
pub use actor::HostFacts;
use message::{Message, Updates, ended};

/// Handle of the running lease manager, which stops when its last handle is dropped.
#[derive(Clone)]
pub struct Engine {
    messages: mpsc::UnboundedSender<Message>,
    snapshot: watch::Receiver<Arc<Snapshot>>,
    updates: Updates,
}

/// Options of the lease manager.
pub struct EngineOptions {
    /// State that an earlier daemon of this boot left.
    pub saved: Saved,
    /// Stores the state for the next daemon; called when it has changed.
    pub save: Box<dyn FnMut(&Saved) + Send>,
    /// `[access]`: users who may use the leases for all.
    pub gate: Option<Arc<Gate>>,
    /// Called at least this often while the manager's loop runs.
    pub alive: Option<(Duration, Box<dyn FnMut() + Send>)>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { saved: Saved::default(), save: Box::new(|_| {}), gate: None, alive: None }
    }
}

impl Engine {
    /// Starts a manager on the current runtime; it knows no server until [`Engine::connect`].
    pub fn start(here: HostFacts) -> Self {
        Self::start_with(here, EngineOptions::default())
    }

    /// Starts a manager that restores an earlier daemon's state.
    pub fn start_with(here: HostFacts, hooks: EngineOptions) -> Self {
        let (messages, inbox) = mpsc::unbounded_channel();
        let (snapshot_out, snapshot) = watch::channel(Arc::new(Snapshot::default()));
        let updates = Updates::default();
        let boot = crate::paths::hex(&here.boot_id);
        let rng = fastrand::Rng::with_seed(here.seed);
        let mut machine = Machine::new(boot.clone(), here.machine_id.clone(), rng);
        let EngineOptions { saved, save, gate, alive } = hooks;
        machine.restore(here.uptime, saved.clone());
        let actor = Actor {
            machine,
            saved,
            save,
            gate,
            clear: false,
            alive,
            said_alive: Instant::now(),
            servers: Vec::new(),
            here,
            boot,
            origin: Instant::now(),
            messages: messages.downgrade(),
            snapshot: snapshot_out,
            updates: updates.clone(),
            creating: HashMap::new(),
            drained: Vec::new(),
            said: HashMap::new(),
            refused: HashMap::new(),
            failures: HashMap::new(),
            line: Line::default(),
            interruptions: HashMap::new(),
            lost: HashSet::new(),
            parked: HashSet::new(),
            about: Vec::new(),
            following: Vec::new(),
        };
        tokio::spawn(actor.run(inbox));
        Self { messages, snapshot, updates }
    }

    /// Adds servers.
    pub fn connect(&self, servers: Vec<Arc<dyn PoolServer>>) {
        let _ = self.messages.send(Message::Connect(servers));
    }

    /// Drains a server that servers.toml no longer names; it is gone after its last lease.
    pub fn remove(&self, server: usize, grace: Duration) {
        let _ = self.messages.send(Message::Remove(server, grace));
    }

    /// Uses a removed server again.
    pub fn restore(&self, server: usize) {
        let _ = self.messages.send(Message::Restore(server));
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

    async fn server(&self, index: usize) -> Result<Arc<dyn PoolServer>, PoolError> {
        let gone = || PoolError::new(Trouble::Invalid, "server not found");
        self.call(|reply| Message::Server(index, reply)).await.flatten().ok_or_else(gone)
    }

    async fn call<T>(&self, message: impl FnOnce(oneshot::Sender<T>) -> Message) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.messages.send(message(reply)).ok()?;
        answer.await.ok()
    }
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

    fn allow_clear(&self, allow: bool) {
        let _ = self.messages.send(Message::AllowClear(allow));
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

    async fn grant(&self, caller: Caller, wish: WorkerRequest) -> Answer {
        self.call(|reply| Message::Grant(caller, wish, reply))
            .await
            .unwrap_or_else(|| Answer::Denied(Denial::NotReady, "gpusessiond is stopping".into()))
    }

    async fn readings(
        &self,
        caller: Caller,
        wish: WorkerRequest,
        queries: Vec<Query>,
    ) -> Result<View, (Denial, String)> {
        let places = self.call(|reply| Message::Places(caller, wish, reply)).await;
        readings::ask(
            places.unwrap_or_else(|| Err((Denial::NotReady, "gpusessiond is stopping".into())))?,
            queries,
        )
        .await
    }

    async fn cuda_version(&self, caller: Caller, wish: WorkerRequest) -> Result<u32, (Denial, String)> {
        let places = self.call(|reply| Message::Places(caller, wish, reply)).await;
        let places = places.unwrap_or_else(|| Err((Denial::NotReady, "gpusessiond is stopping".into())))?;
        let oldest =
            places.iter().map(|place| place.reported.cuda_version).filter(|version| *version > 0).min();
        oldest.ok_or_else(|| (Denial::NotReady, "no server has reported its CUDA version".into()))
    }

    async fn default_slots(&self, caller: Caller) -> Vec<Slot> {
        self.call(|reply| Message::DefaultSlots(caller, reply)).await.unwrap_or_default()
    }

    async fn interrupted(
        &self,
        granted: Granted,
        interruption: Interruption,
        for_time: Option<Duration>,
    ) -> Option<String> {
        self.call(|reply| Message::Interrupted(granted, interruption, for_time, reply)).await.flatten()
    }

    fn ended(&self, granted: Vec<Granted>) {
        let _ = self.messages.send(Message::Ended(granted));
    }

    fn report_outcome(&self, slot: Slot, uid: u32, failure: Option<Failure>) {
        let _ = self.messages.send(Message::Outcome(slot, uid, failure));
    }

    async fn park(&self, slot: Slot, park: bool) -> Result<(), PoolError> {
        let (pool, lease) = self.holder(slot).await?;
        pool.park(lease, park).await
    }

    async fn idle_hint(&self, slot: Slot, idle: bool) -> Result<(), PoolError> {
        let (pool, lease) = self.holder(slot).await?;
        pool.idle_hint(lease, idle).await
    }

    async fn measure(&self, server: usize, seconds: u32) -> Result<control::MeasureReply, PoolError> {
        self.server(server).await?.measure(seconds).await
    }

    async fn ask(
        &self,
        server: usize,
        usage_uid: Option<u32>,
    ) -> Result<(Duration, control::ServerDescription), PoolError> {
        let pool = self.server(server).await?;
        let begun = Instant::now();
        let description = pool.describe(usage_uid).await?;
        let rtt = begun.elapsed();
        let _ = self.messages.send(Message::Described(server, rtt, description.clone()));
        Ok((rtt, description))
    }

    async fn shutdown(&self, limit: Duration) {
        let _ = tokio::time::timeout(limit, self.call(Message::Drained)).await;
    }
}
