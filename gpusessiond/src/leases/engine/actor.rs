//! The task that owns the machine: it takes one message at a time.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::control;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tracing::{debug, info};

use super::calls::{follow, tell_ended};
use super::line::Line;
use super::message::{Message, Updates};
use crate::access::{Gate, Person};
use crate::leases::alarm::Alarm;
use crate::leases::machine::{Machine, Saved};
use crate::leases::{
    Caller, Failure, Granted, Interruption, LeaseView, STOPPED, ServerFacts, ServerView, Session, Slot,
    Snapshot, Time, WorkerRequest,
};
use crate::pool::{PoolError, PoolServer, Trouble};

/// Facts that the lease manager needs about this host.
#[derive(Debug, Clone)]
pub struct HostFacts {
    /// The kernel's boot id.
    pub boot_id: [u8; 16],
    /// Hash of this host's machine id.
    pub machine_id: String,
    /// Seed of the jitter of retries, so that a fleet does not try at once.
    pub seed: u64,
    /// Time since boot: the clock of the lease manager, so that times outlive the daemon.
    pub uptime: Duration,
}

impl HostFacts {
    /// Collects the facts of this host.
    pub fn this_machine() -> Self {
        let mut seed = [0; 8];
        // Without entropy the jitter repeats after each start.
        let _ = getrandom::fill(&mut seed);
        Self {
            boot_id: crate::paths::boot_id(),
            machine_id: crate::paths::machine_id(),
            seed: u64::from_le_bytes(seed),
            uptime: crate::paths::uptime(),
        }
    }
}

pub(super) struct Actor {
    pub(super) machine: Machine,
    pub(super) servers: Vec<Arc<dyn PoolServer>>,
    pub(super) here: HostFacts,
    pub(super) boot: String,
    pub(super) origin: Instant,
    pub(super) messages: mpsc::WeakUnboundedSender<Message>,
    pub(super) snapshot: watch::Sender<Arc<Snapshot>>,
    pub(super) updates: Updates,
    pub(super) saved: Saved,
    pub(super) save: Box<dyn FnMut(&Saved) + Send>,
    pub(super) gate: Option<Arc<Gate>>,
    /// Data of leases may be unencrypted.
    pub(super) clear: bool,
    pub(super) alive: Option<(Duration, Box<dyn FnMut() + Send>)>,
    pub(super) said_alive: Instant,
    pub(super) creating: HashMap<Slot, oneshot::Sender<Result<LeaseView, PoolError>>>,
    pub(super) drained: Vec<oneshot::Sender<()>>,
    /// The reason last logged for each waiting lease.
    pub(super) said: HashMap<Slot, String>,
    /// Why a lease's server gives no worker: each reason is logged once.
    pub(super) refused: HashMap<Slot, String>,
    /// The latest program of each user that a lease failed, and when; the newest last. An entry
    /// lasts until the lease serves another program of that user.
    pub(super) failures: HashMap<Slot, Vec<(Failure, Time)>>,
    /// Programs whose connection broke, by their worker, and when they last reported that.
    pub(super) interruptions: HashMap<[u8; 16], (Slot, Interruption, Time)>,
    /// The line of users who share a lease.
    pub(super) line: Line,
    /// Servers and leases whose silence and parking have been logged.
    pub(super) lost: HashSet<usize>,
    pub(super) parked: HashSet<Slot>,
    pub(super) about: Vec<ServerView>,
    /// The tasks that follow the servers' events.
    pub(super) following: Vec<AbortHandle>,
}

impl Actor {
    pub(super) fn now(&self) -> Time {
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

    pub(super) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Message>) {
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

    /// Follows a server's events from now on.
    fn follow(&self, server: usize) -> AbortHandle {
        let pool = self.servers[server].clone();
        tokio::spawn(follow(pool, server, self.boot.clone(), self.messages.clone())).abort_handle()
    }

    /// Stops following servers that are gone, and follows those that are back.
    pub(super) fn follow_known(&mut self) {
        for server in 0..self.servers.len() {
            let gone = self.machine.gone(server);
            if gone == self.about[server].facts.gone {
                continue;
            }
            self.about[server].facts.gone = gone;
            if gone {
                self.following[server].abort();
                info!(
                    gpusession_server = self.about[server].facts.name,
                    "server {}: left: servers.toml no longer names it", self.about[server].facts.name
                );
            } else {
                // Its latest word is of long ago.
                self.about[server].facts.state.clear();
                self.following[server] = self.follow(server);
            }
        }
    }

    #[expect(clippy::too_many_lines, reason = "one `match` over the messages")]
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
                    info!(gpusession_lease = held.id, "lease {}: released: {reason}", held.id);
                }
                self.machine.release(now, slot, &reason);
                let _ = reply.send(there);
            }
            Message::Renew(id, ttl, reply) => self.renew(&id, ttl, reply),
            Message::Grant(caller, wish, reply) => self.grant(caller, wish, reply),
            Message::Places(caller, wish, reply) => {
                let _ = reply.send(self.places(&caller, &wish));
            }
            Message::DefaultSlots(caller, reply) => {
                let _ = reply.send(self.select(&caller, &WorkerRequest::default()).unwrap_or_default());
            }
            Message::Interrupted(granted, interruption, for_time, reply) => {
                let _ = reply.send(self.machine.ended_because(now, &granted.lease, &granted.worker));
                self.interrupted(granted, interruption, for_time);
            }
            Message::Ended(granted) => self.processes_ended(granted),
            Message::Outcome(slot, uid, failure) => self.report_outcome(slot, uid, failure),
            Message::Resume(lease, worker, reply) => {
                let granted =
                    self.machine.slot_of(&lease).map(|slot| Granted { slot, lease, worker, user: None });
                if let Some(granted) = &granted {
                    self.machine.process_resumed(granted.slot, granted.worker);
                }
                let _ = reply.send(granted);
            }
            Message::AllowClear(allow) => self.clear = allow,
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
            Message::Demand(caller) => self.demand(&caller),
            Message::SessionClosed(id) => self.machine.session_closed(now, &id),
            Message::Drain(server, grace, reply) => {
                // Only the list of servers brings a removed server back.
                let there =
                    server < self.servers.len() && (grace.is_some() || !self.machine.is_removed(server));
                if there {
                    self.machine.drain(now, server, grace);
                }
                let _ = reply.send(there);
            }
            Message::Remove(server, grace) => self.machine.remove_server(now, server, grace),
            Message::Restore(server) => self.machine.restore_server(now, server),
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
            Message::Allocated(slot, result) => self.allocated(slot, result),
            Message::Renewed(server, asked, rtt, result) => self.renewed(server, &asked, rtt, result),
            Message::Withdrawn(server, request, result) => {
                if let Err(error) = &result {
                    debug!("request {request}: not withdrawn: {error}; its server forgets it in time");
                }
                self.machine.released(now, server, &request, result);
            }
            Message::Released(server, lease, result) => self.released(server, &lease, result),
            Message::Workers(slot, lease, result) => self.workers(slot, &lease, result),
            Message::Connect(servers) => {
                for server in servers {
                    let address = server.address().to_owned();
                    let index = self.machine.add_server(now, address.clone());
                    self.servers.push(server);
                    let following = self.follow(index);
                    self.following.push(following);
                    let facts = ServerFacts { name: address.clone(), address, ..ServerFacts::default() };
                    self.about.push(ServerView { facts, ..ServerView::default() });
                }
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
                let _ = reply.send(held.map(|h| (self.servers[h.server].clone(), h.id.clone())));
            }
            Message::Event(server, event) => {
                if matches!(event.event, Some(control::pool_event::Event::ServerStopped(_))) {
                    STOPPED.clone_into(&mut self.about[server].facts.state);
                    self.about[server].gauges.stopped = Some(now);
                }
                self.machine.event(now, server, event);
            }
            Message::Described(server, rtt, description) => self.described(server, rtt, description),
        }
    }

    /// Wants the leases that the configuration has for a session, once its user is looked up.
    fn demand_for(&self, session: Arc<Session>) {
        let Some(gate) = self.gate.clone() else { return };
        self.spawn(async move {
            let person = gate.person(session.uid).await;
            let (uid, session) = (session.uid, Some(session.id.clone()));
            let (control_groups, contained) = (Vec::new(), false);
            let Person { name: user, access, principal } = person;
            let pid = 0;
            Message::Demand(Caller { uid, pid, user, principal, access, session, control_groups, contained })
        });
    }

    /// Asks a server for its description after a change of its free GPUs.
    pub(super) fn describe(&self, server: usize) {
        let (pool, messages) = (self.servers[server].clone(), self.messages.clone());
        tokio::spawn(async move {
            let begun = Instant::now();
            if let Ok(description) = pool.describe(None).await
                && let Some(messages) = messages.upgrade()
            {
                let _ = messages.send(Message::Described(server, begun.elapsed(), description));
            }
        });
    }

    pub(super) fn spawn(&self, future: impl Future<Output = Message> + Send + 'static) {
        let messages = self.messages.clone();
        tokio::spawn(async move {
            let message = future.await;
            if let Some(messages) = messages.upgrade() {
                let _ = messages.send(message);
            }
        });
    }

    pub(super) fn renew(
        &mut self,
        id: &str,
        ttl: Option<Duration>,
        reply: oneshot::Sender<Result<Duration, PoolError>>,
    ) {
        let found = self
            .machine
            .slots()
            .find_map(|(slot, w)| w.held().filter(|h| h.id == id).map(|h| (slot, h.server)));
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
}
