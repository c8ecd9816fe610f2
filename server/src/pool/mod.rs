//! The pool: its authority, join tokens and clients, and the control service.

pub mod administrators;
mod allowance;
mod authenticate;
pub mod clients;
pub mod contact;
mod describe;
mod endings;
pub mod grpc;
pub mod identities;
pub mod idle_actions;
mod lock;
pub mod members;
mod parked;
pub mod parking;
pub mod peers;
pub mod readings;
mod reload;
mod requests;
pub mod rotation;
mod state;
pub mod statements;
mod status;
pub mod tls;
mod usage;
pub mod watch;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use data_encoding::HEXLOWER;
use gpusession_proto::control::pool_event::Event as PoolEventKind;
use gpusession_proto::control::{self as wire, PoolEvent};
use gpusession_proto::join::{FleetKey, JoinToken, ServerToken};
use gpusession_proto::journal::Event as Said;
use gpusession_proto::statement::{Statement, Verdict};
use tokio::sync::broadcast;
use tokio::sync::watch::{Receiver, channel};
use tonic::Status;
use tracing::{info, warn};

use self::administrators::{Administrators, NotIssued};
use self::allowance::EVENTS;
use self::clients::{ClientView, Clients};
use self::describe::{limits, micros};
use self::lock::locked;
use self::parked::Parking;
pub use self::state::{Facts, Files, Pool};
use self::statements::NotStated;
use self::status::settled;
use self::tls::ServerCertificate;
use self::watch::{Watches, workers_ready};
use crate::accounting::Accounting;
use crate::audit::{self, Audit};
use crate::clock::{Clock, Moment, Random};
use crate::config::Config;
use crate::lease::{Lease, Passing, Withdrawn};
use crate::limits::Effective;
use crate::log_throttle::LogThrottle;
use crate::monitor::Monitor;
use crate::netperf::Endpoints;
use crate::registry::{Registry, Standing};
use crate::signer::link::Signer;
use crate::signer::tokens::{Terms, TokenFacts};
use crate::signer::{Operation, Privileged, Refused, Why};
use crate::starter::link::Starter;
use crate::store::{self, Shared, StoreError};
use crate::supervise::{Event, Supervisor, WorkerId, hex};

/// The statement of a revocation, or why the pool's other servers do not get one.
pub type Stated = Result<Statement, NotStated>;

const RELEASED: &str = "released by its client";
/// Actor of a connection that belongs to no client.
const STRANGER: &str = "unknown";
/// Kind of the audit trail's event for a new lease.
const LEASE_GRANTED: &str = "lease-granted";

/// Returns the audit trail's event for a new lease.
fn lease_granted(lease: &str, client: &str, gpus: Vec<String>, detail: String) -> audit::Event {
    audit::Event {
        actor: format!("client {client}"),
        client: client.to_owned(),
        lease: lease.to_owned(),
        gpus,
        detail,
        ..audit::own(LEASE_GRANTED)
    }
}

/// Time before the end of a lease at which its holder is warned, in seconds.
const END_WARNING: u64 = 600;

/// Runs work to its end, even if the call that started it is cancelled.
async fn run_detached<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, Status> {
    tokio::spawn(work).await.map_err(|e| Status::internal(format!("internal error: {e}")))
}

impl Pool {
    /// Opens the pool's files.
    pub fn open(
        facts: Facts,
        registry: Arc<dyn Registry>,
        supervisor: Supervisor,
        monitor: Monitor,
        (signer, certificate): (Arc<Signer>, Arc<ServerCertificate>),
        clock: Arc<dyn Clock>,
        random: Arc<dyn Random>,
    ) -> Result<Self, StoreError> {
        let files = Files::below(&facts.config.state_dir);
        let signs = signer.clone();
        let sign: audit::Sign =
            Arc::new(move |place| signs.link().checkpoint(place).map_err(|e| e.to_string()));
        let audit = Audit::open(&facts.config.state_dir, &facts.config.name, sign)
            .map_err(|error| StoreError::Io { path: facts.config.state_dir.join("audit"), error })?;
        let present = signer.present();
        // Earlier versions had one authority, and named it nowhere.
        let old = HEXLOWER.encode(&present.old().fingerprint());
        let mut administrators: Administrators = store::read(&files.administrators)?;
        administrators.complete(&old);
        let clients = Clients::new(store::read(&files.clients)?);
        let statements = Mutex::new(store::read(&files.statements)?);
        let members = Mutex::new(store::read(&files.members)?);
        let run = crate::clock::bytes(random.as_ref());
        let config = Mutex::new(Arc::new(facts.config.clone()));
        let starter = Starter::new(facts.config.starter.as_deref(), supervisor.program());
        let endpoints = Endpoints::new(&supervisor, starter, clock.clone(), random.clone());
        let pool = Self {
            facts,
            config,
            registry,
            accounting: supervisor.accounting().clone(),
            audit,
            supervisor,
            monitor,
            signer,
            certificate,
            warned: Mutex::default(),
            client_file: Shared::new(files.clients),
            administrators: Mutex::new(administrators),
            administrator_file: Shared::new(files.administrators),
            statements,
            statement_file: Shared::new(files.statements),
            members,
            member_file: Shared::new(files.members),
            peers: Mutex::default(),
            run,
            rates: Mutex::default(),
            signing: tokio::sync::Mutex::default(),
            clients: Mutex::new(clients),
            watches: Watches::default(),
            clock,
            quiet: LogThrottle::default(),
            quiet_of_workers: LogThrottle::default(),
            allowance: Mutex::default(),
            parking: Parking::default(),
            requests: requests::Requests::default(),
            endpoints,
            noted: AtomicU64::new(0),
            day: Mutex::default(),
            ending: Mutex::default(),
            stop: channel(None).0,
        };
        pool.settle_all();
        Ok(pool)
    }

    /// Returns the facts about this server.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Returns the account of GPU use by programs and leases.
    pub fn accounting(&self) -> &Accounting {
        &self.accounting
    }

    /// Returns the audit trail.
    pub fn audit(&self) -> &Audit {
        &self.audit
    }

    /// Returns an error while the trail cannot be written and the configuration requires it.
    pub async fn may_change(&self) -> Result<(), String> {
        if self.audit.works() || !self.config().audit_required {
            return Ok(());
        }
        // The disk may have room again.
        self.audited(audit::own("audit-works")).await
    }

    /// Returns when the trail has an event, or why it has not.
    pub async fn audited(&self, event: audit::Event) -> Result<(), String> {
        match self.audit.sure(event).await {
            Err(why) if self.config().audit_required => Err(format!(
                "the audit trail cannot be written ({why}): make room on the server's disk, or set audit_required = \"off\""
            )),
            _ => Ok(()),
        }
    }

    /// Asks the server to stop, for an administrator; `force`: at once.
    pub fn ask_to_stop(&self, force: bool) {
        self.stop.send_if_modified(|asked| {
            let more = *asked != Some(true) && *asked != Some(force);
            if more {
                *asked = Some(force);
            }
            more
        });
    }

    /// Subscribes to requests of [`Pool::ask_to_stop`].
    pub fn asked_to_stop(&self) -> Receiver<Option<bool>> {
        self.stop.subscribe()
    }

    /// Returns the present configuration.
    pub fn config(&self) -> Arc<Config> {
        locked(&self.config).clone()
    }

    /// Returns the limits of a client on behalf of a user.
    pub fn limits_of(&self, client: &str, user: &str) -> Effective {
        self.config().limits.of(client, user)
    }

    /// Withdraws a GPU from leasing, or returns it to service.
    ///
    /// Returns `true` if this server has the GPU.
    pub async fn withdraw(&self, uuid: &str, why: Option<Withdrawn>) -> bool {
        let reason = why.as_ref().map(|why| why.reason().to_owned());
        let exists = self.registry.withdraw(uuid, why).await;
        if exists {
            log_withdrawal(uuid, reason.as_deref());
        }
        exists
    }

    /// Withdraws a GPU in service for a fault that may pass, or with `None` returns a GPU to
    /// service that was withdrawn for it.
    pub async fn withdraw_until_passed(&self, uuid: &str, fault: Passing, why: Option<String>) {
        if self.registry.withdraw_until_passed(uuid, fault, why.clone()).await {
            log_withdrawal(uuid, why.as_deref());
        }
    }

    /// Tells all clients that the server was stopped, so that they do not take that for a crash.
    pub fn announce_stop(&self) {
        let event = Some(PoolEventKind::ServerStopped(wire::ServerStopped {}));
        self.watches.tell_all(&PoolEvent { lease: String::new(), event });
    }

    /// Warns every client with a lease that the lease will be lost.
    pub async fn warn_all(&self, left: Duration, reason: &str) {
        for standing in self.registry.leases().await {
            self.warn(standing.lease, left, reason);
        }
    }

    fn warn(&self, lease: Lease, left: Duration, reason: &str) {
        let warning = wire::Warning { left_usec: micros(left), reason: reason.into(), idle: false };
        self.notify(
            &lease.client,
            PoolEvent { lease: lease.id, event: Some(PoolEventKind::PrepareForLoss(warning)) },
        );
    }

    /// Warns clients, once per lease, whose leases cannot be renewed for much longer.
    async fn warn_of_ends(&self, unix: u64) {
        let ending = self.registry.ending(unix + END_WARNING).await;
        let new: Vec<Lease> = {
            let mut known = locked(&self.ending);
            known.retain(|id| ending.iter().any(|lease| lease.id == *id));
            ending.into_iter().filter(|lease| known.insert(lease.id.clone())).collect()
        };
        for lease in new {
            let left = Duration::from_secs(lease.until_unix.saturating_sub(unix));
            let why = self.lived(&lease, "it was renewed for nearly as long as that allows");
            self.warn(lease, left, &format!("the lease ends: {why}"));
        }
    }

    /// Describes the effect of the limit `lease_ttl` on a lease.
    fn lived(&self, lease: &Lease, why: &str) -> String {
        match self.limits_of(&lease.client, &lease.user).smallest("lease_ttl") {
            Some((limit, _)) => {
                limit.exceeded(why, "the client's daemon requests a configured lease again").text
            }
            // The limit has changed since the lease began.
            None => format!("limit lease_ttl: {why}"),
        }
    }

    /// Returns the SHA-256 of the authority's certificate.
    pub fn authority_fingerprint(&self) -> [u8; 32] {
        self.signer.present().signer().fingerprint()
    }

    /// Returns the leases of this server.
    pub fn registry(&self) -> &dyn Registry {
        self.registry.as_ref()
    }

    /// Returns the state of lent and parked leases.
    pub fn parking(&self) -> &Parking {
        &self.parking
    }

    /// Returns the endpoints of measurements.
    pub fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    /// Returns the time since the host started.
    pub fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Returns the seconds since 1970.
    pub fn unix(&self) -> u64 {
        self.clock.unix()
    }

    /// Sends an event to a client's daemon, if it watches.
    pub fn notify(&self, client: &str, event: PoolEvent) {
        self.watches.notify(client, event);
    }

    /// Sends events about workers to their clients. Never returns.
    pub async fn tell_of_workers(self: Arc<Self>) {
        let mut events = self.supervisor.events();
        loop {
            match events.recv().await {
                Ok(Event::Workers { client, lease, stock, ended }) => {
                    self.notify(&client, workers_ready(lease, stock, ended));
                }
                Ok(Event::Program { client, lease, gpus, worker, user, program, end }) => {
                    let event = audit::own(if end.is_some() { "program-ended" } else { "program-started" });
                    self.note_within_allowance(audit::Event {
                        client,
                        lease,
                        gpus,
                        worker: hex(&worker),
                        user: if self.config().audit_users { user } else { String::new() },
                        program,
                        claimed: true,
                        detail: end.unwrap_or_default(),
                        ..event
                    });
                }
                Ok(Event::Refused { kind, client, lease, worker, from, limit, why }) => {
                    let actor = match &*client {
                        "" => STRANGER.into(),
                        client => format!("client {client}"),
                    };
                    self.note_within_allowance(audit::Event {
                        actor,
                        client,
                        lease,
                        worker: worker.as_ref().map(hex).unwrap_or_default(),
                        from,
                        result: limit.map_or("refused".into(), |limit| format!("limit-{limit}")),
                        detail: why,
                        ..audit::own(kind)
                    });
                }
                Ok(Event::Killed { client, lease, gpus, worker, why }) => {
                    let event = audit::own("worker-killed");
                    let worker = hex(&worker);
                    self.note_within_allowance(audit::Event {
                        client,
                        lease,
                        gpus,
                        worker,
                        detail: why,
                        ..event
                    });
                }
                Ok(Event::Stuck { .. }) => {}
                Err(broadcast::error::RecvError::Lagged(events)) => self.audit.lose(events),
                Err(broadcast::error::RecvError::Closed) => return,
            }
        }
    }

    /// Notes an event that its client, or its actor without a client, can cause at will, within the
    /// allowance of that one.
    fn note_within_allowance(&self, event: audit::Event) {
        let cause = if event.client.is_empty() { &event.actor } else { &event.client };
        let stranger = event.from.parse().ok().filter(|_| cause == STRANGER);
        let taken = locked(&self.allowance).take(cause, stranger, &event.event, self.clock.now());
        let Some(left_out) = taken else {
            if event.event == LEASE_GRANTED {
                locked(&self.allowance).leave_out(&event.lease);
            }
            return;
        };
        if left_out > 0 {
            self.audit.note(audit::Event {
                client: event.client.clone(),
                detail: format!("{left_out} events {} of {cause}: more than {EVENTS} an hour", event.event),
                ..audit::own("events-left-out")
            });
        }
        self.audit.note(event);
    }

    /// Notes that an actor may not administer this server.
    pub fn note_refused_administration(&self, actor: String, from: String, why: &str) {
        let event = audit::own("administration-refused");
        self.note_within_allowance(audit::Event {
            actor,
            from,
            result: "not-permitted".into(),
            detail: why.into(),
            ..event
        });
    }

    /// Returns the supervisor of the workers.
    pub fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

    /// Returns the monitor of the GPUs.
    pub fn monitor(&self) -> &Monitor {
        &self.monitor
    }

    /// Starts a stock for the leases of an earlier run, and takes over its workers.
    pub async fn resume(self: &Arc<Self>) {
        let gpus = self.registry.gpus().await;
        for standing in self.registry.leases().await {
            let Lease { id, client, boot_id, user, .. } = &standing.lease;
            let allowed = {
                let mut clients = locked(&self.clients);
                clients.assume(client, boot_id, self.clock.now());
                clients.allows(client)
            };
            if !allowed {
                self.end_lease(id, "its client is no longer a client of the pool").await;
                continue;
            }
            let allowed = self.limits_of(client, user);
            self.supervisor.add_lease(&standing.lease, limits(&standing.lease, &gpus), allowed);
            self.resume_aside(id).await;
        }
        self.supervisor.end_left();
    }

    /// Lists the join tokens, the newest last.
    pub async fn tokens(&self) -> Result<Vec<TokenFacts>, Refused> {
        self.signer.aside(|signer| signer.link().tokens()).await
    }

    /// Revokes the join token whose id begins with `id`; returns the whole id, if one token does.
    pub async fn revoke_token(&self, id: &str) -> Result<Option<String>, Refused> {
        let id = id.to_owned();
        self.signer.aside(move |signer| signer.link().revoke_token(&id)).await
    }

    async fn store_clients(&self) -> Result<(), StoreError> {
        self.client_file.store(|| store::text(&locked(&self.clients).save())).await
    }

    /// Makes a token with which a server joins the pool.
    pub async fn admit_server(&self, admit: Privileged) -> Result<(ServerToken, TokenFacts), Refused> {
        self.signer.aside(move |signer| signer.link().admit_server(admit)).await
    }

    /// Creates a join token.
    pub async fn create_token(&self, terms: Terms) -> Result<(JoinToken, TokenFacts), Refused> {
        self.signer.aside(move |signer| signer.link().create_token(terms)).await
    }

    /// Creates a fleet key.
    pub async fn create_fleet(&self, terms: Terms) -> Result<(FleetKey, TokenFacts), Refused> {
        self.signer.aside(move |signer| signer.link().create_fleet(terms)).await
    }

    /// Gives `look` access to the administrators.
    pub fn administrators<T>(&self, look: impl FnOnce(&Administrators) -> T) -> T {
        look(&locked(&self.administrators))
    }

    async fn store_administrators(&self) -> Result<(), StoreError> {
        self.administrator_file.store(|| store::text(&*locked(&self.administrators))).await
    }

    /// Signs an administrator's request; returns the certificate and those of the authorities.
    pub async fn create_administrator(
        &self,
        name: &str,
        csr_pem: &str,
    ) -> Result<Result<(String, String), NotIssued>, StoreError> {
        let _signing = self.signing.lock().await;
        if let Err(e) = locked(&self.administrators).may_issue(name) {
            return Ok(Err(e));
        }
        let ahead = locked(&self.administrators).revoked_ahead(name, self.clock.unix());
        if let Err(status) = settled(&format!("administrator {name} was revoked"), ahead).await {
            return Ok(Err(Refused::new(Why::Busy, status.message()).into()));
        }
        let order = Privileged::Administrator { name: name.into(), csr_pem: csr_pem.into() };
        let signed = move |signer: &Signer| signer.link().sign(Operation::Privileged(order));
        let issued = match self.signer.aside(signed).await {
            Ok(issued) => issued,
            Err(refused) => return Ok(Err(refused.into())),
        };
        let present = self.signer.present();
        {
            let mut all = locked(&self.administrators);
            all.issued(name, &issued, self.clock.unix(), &present.signer().fingerprint());
            self.administrator_file.changed();
        }
        self.store_administrators().await?;
        info!("administrator {name}: certificate issued");
        Ok(Ok((issued.pem, present.certificates())))
    }

    /// Revokes an administrator. Returns `true` if this server knew the name.
    ///
    /// This server refuses the name at once; the statement may fail.
    pub async fn revoke_administrator(self: &Arc<Self>, name: &str) -> Result<(bool, Stated), StoreError> {
        let known = {
            let mut all = locked(&self.administrators);
            let known = all.revoke(name, self.clock.unix());
            self.administrator_file.changed();
            known
        };
        self.store_administrators().await?;
        info!("administrator {name}: revoked");
        Ok((known, self.declare(Verdict::RevokeAdministrator { name: name.into() }).await))
    }

    /// Lists all clients.
    pub fn clients(&self) -> Vec<ClientView> {
        locked(&self.clients).list(self.clock.now())
    }

    /// Revokes a client and ends its leases. Returns whether this server knew it, and how many
    /// leases ended.
    ///
    /// This server refuses the client at once; the statement may fail.
    pub async fn revoke(self: &Arc<Self>, name: &str) -> Result<(bool, usize, Stated), StoreError> {
        let (known, identity) = {
            let mut clients = locked(&self.clients);
            let known = clients.revoke(name, self.clock.unix());
            self.client_file.changed();
            (known, clients.identity(name))
        };
        self.store_clients().await?;
        info!(gpusession_client = name, "client {name}: revoked");
        let ended = self.end_client(name, "the client was revoked").await;
        Ok((known, ended, self.declare(Verdict::RevokeClient { name: name.into(), identity }).await))
    }

    /// Removes a client and ends its leases. Returns as [`Pool::revoke`] does.
    ///
    /// Without a statement, a revocation of the name would come back from other servers.
    pub async fn forget(self: &Arc<Self>, name: &str) -> Result<(bool, usize), NotStated> {
        let (known, identity) = {
            let clients = locked(&self.clients);
            (clients.has(name), clients.identity(name))
        };
        let held = self.registry.of_client(name).await.len();
        let stated = self.declare(Verdict::ForgetClient { name: name.into(), identity }).await?;
        {
            let mut clients = locked(&self.clients);
            clients.forget(name, stated.unix);
            self.client_file.changed();
        }
        self.store_clients().await?;
        info!(gpusession_client = name, "client {name}: forgotten");
        Ok((known, held))
    }

    async fn end_client(&self, name: &str, reason: &str) -> usize {
        let ended = self.registry.release_client(name, None).await;
        self.ended(&ended, reason);
        self.watches.refuse(name, reason);
        ended.len()
    }

    /// Ends one lease with a reason. Returns `true` if it existed.
    pub async fn end_lease(&self, id: &str, reason: &str) -> bool {
        let ended = self.registry.release(None, id).await;
        self.ended(ended.as_slice(), reason);
        ended.is_some()
    }

    /// Does the periodic work: ends expired leases, warns of ends, and lets the supervisor tick.
    pub async fn tick(&self) {
        let expired = self.registry.expire().await;
        let unix = self.clock.unix();
        let (old, silent): (Vec<_>, Vec<_>) =
            expired.into_iter().partition(|l| l.until_unix != 0 && l.until_unix <= unix);
        self.ended(&silent, "the client was silent for too long");
        for lease in &old {
            let why = self.lived(lease, "it was renewed for as long as that allows");
            self.ended(std::slice::from_ref(lease), &why);
        }
        self.warn_of_ends(unix).await;
        self.watch_identities(unix).await;
        self.note_leases().await;
        // Leases that ended while their stock was being set up.
        for lease in self.supervisor.leases() {
            if !self.registry.holds(&lease).await {
                self.supervisor.end_lease(&lease, "the lease ended");
            }
        }
        self.supervisor.tick();
    }

    /// Deletes accounting records and days of the audit trail older than the configured times.
    pub fn forget_records(&self) {
        let config = self.config();
        self.audit.prune(audit::Kept { age: config.audit_keep, bytes: config.audit_max });
        let keep = self.config().accounting_keep;
        if !keep.is_zero() {
            self.accounting.forget_before(self.clock.unix().saturating_sub(keep.as_secs()));
        }
    }

    /// Accounts for ended leases, stops their workers, and notifies their clients.
    ///
    /// A client that released its lease knows already.
    pub fn ended(&self, leases: &[Lease], reason: &str) {
        for lease in leases {
            info!(
                message_id = Said::LeaseReclaimed.id(),
                gpusession_lease = lease.id,
                gpusession_client = lease.client,
                gpusession_reason = reason,
                "lease {} of {} ended: {reason}",
                lease.id,
                lease.client
            );
            let gpus: Vec<_> = lease.shares.iter().map(|s| s.gpu.clone()).collect();
            self.note_lease_end(&lease.id, &lease.client, &gpus, reason);
            let record = self.record_of(lease, reason);
            self.supervisor.end_lease(&lease.id, reason);
            self.accounting.add(record);
            if reason == RELEASED {
                continue;
            }
            let event = PoolEvent {
                lease: lease.id.clone(),
                event: Some(PoolEventKind::Lost(wire::Loss { reason: reason.into() })),
            };
            self.notify(&lease.client, event);
        }
    }

    fn note_lease_end(&self, lease: &str, client: &str, gpus: &[String], reason: &str) {
        if !locked(&self.allowance).ends(lease) {
            return;
        }
        // Within the allowance, too: the end of a lease may overtake the note of its beginning.
        self.note_within_allowance(audit::Event {
            client: client.into(),
            lease: lease.into(),
            gpus: gpus.to_vec(),
            detail: reason.into(),
            ..audit::own("lease-ended")
        });
    }

    /// Gives the supervisor the new GPUs of a lease that came back elsewhere.
    pub(super) async fn moved(&self, lease: &str) {
        let Some(Standing { lease, .. }) = self.registry.get(lease).await else { return };
        let shares: Vec<_> = lease.shares.iter().map(|s| s.gpu.as_str()).collect();
        info!(
            gpusession_lease = lease.id,
            gpusession_client = lease.client,
            "lease {} of {}: moved to other GPUs of the same kind: {}",
            lease.id,
            lease.client,
            shares.join(", ")
        );
        let gpus = self.registry.gpus().await;
        self.supervisor.set_devices(&lease, limits(&lease, &gpus));
    }
}

fn log_withdrawal(uuid: &str, reason: Option<&str>) {
    match reason {
        Some(reason) => warn!("GPU {uuid}: withdrawn: {reason}"),
        None => info!("GPU {uuid}: back in service"),
    }
}

/// Finds the one worker whose id starts with `prefix`; the error is for people.
pub fn find_worker(pool: &Pool, prefix: &str) -> Result<WorkerId, String> {
    let fits: Vec<_> = pool
        .supervisor
        .workers()
        .into_iter()
        .map(|w| w.id)
        .filter(|id| hex(id).starts_with(prefix))
        .collect();
    match fits.as_slice() {
        [one] if !prefix.is_empty() => Ok(*one),
        [] => Err(format!("worker {prefix} not found; `gpuserver ps` lists workers")),
        _ => Err(format!("{} workers start with {prefix:?}; write more of the id", fits.len())),
    }
}
