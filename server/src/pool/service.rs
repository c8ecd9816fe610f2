//! The control service: requests of the pool's clients over mutual TLS. A machine without a
//! certificate may only join.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gpusession_proto::control::administration_server::Administration;
use gpusession_proto::control::enrolment_server::Enrolment;
use gpusession_proto::control::pool_event::Event as PoolEventKind;
use gpusession_proto::control::pool_server::Pool as PoolService;
use gpusession_proto::control::{self as wire, PoolEvent};
use gpusession_proto::join::{JoinToken, is_name};
use gpusession_proto::journal::Event as Said;
use gpusession_proto::preface;
use gpusession_proto::supervise::DeviceLimit;
use prost::Message as _;
use tokio::sync::{broadcast, watch};
use tonic::{Request, Response, Status};
use tracing::{error, info, warn};

use super::administrators::{Administrators, NotAdmitted, NotIssued};
use super::authority::{Authority, AuthorityError, Role, requested_key};
use super::clients::{ClientView, Clients, Refusal, Seen};
use super::parking::{ParkError, Parking};
use super::readings;
use super::tokens::{TokenRecord, Tokens};
use super::watch::{Events, Watches};
use crate::accounting::{Accounting, Kind, Record};
use crate::admin;
use crate::clock::{Clock, Moment, Random};
use crate::config::{Config, Origin, is_live};
use crate::guard::{Certificate, Peer};
use crate::idle::OnIdle;
use crate::lease::{
    AllocateError, DEFAULT_TTL, Gpu, Lease, Memory, Place, Priority, Request as LeaseRequest, Share, Sharing,
    Withdrawn,
};
use crate::limits::{Effective, Exceeded, Rates};
use crate::monitor::Monitor;
use crate::net::host_port;
use crate::quiet::Quiet;
use crate::registry::{GpuUse, Registry, Standing};
use crate::store::{self, Shared, StoreError};
use crate::supervise::{Event, Supervisor, TakeError, WorkerId, hex};

const RELEASED: &str = "released by its client";
/// Longest text, in bytes, and longest list in a request.
const MAX_TEXT: usize = 256;
/// Time that a call for workers waits for the GPUs of its lease.
const RETURN_TIMEOUT: Duration = Duration::from_secs(50);
const MAX_LIST: usize = 256;

/// Facts about this server, fixed at its start.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Configuration at the start; [`Pool::config`] returns the present one.
    pub config: Config,
    /// Address of the control service.
    pub control: SocketAddr,
    /// Address of the data plane.
    pub data: SocketAddr,
    /// Path of the driver library.
    pub driver: PathBuf,
    /// Version such as 580.159.04; empty for a simulated driver.
    pub driver_version: String,
    /// CUDA version: 1000 * major + 10 * minor.
    pub cuda_version: u32,
}

/// Paths of the pool's files in the state directory.
#[derive(Debug, Clone)]
pub struct Files {
    /// File of the join tokens.
    pub tokens: PathBuf,
    /// File of the clients.
    pub clients: PathBuf,
    /// File of the administrators.
    pub administrators: PathBuf,
}

impl Files {
    /// Returns the paths in a state directory.
    pub fn below(state_dir: &std::path::Path) -> Self {
        let file = |name| state_dir.join(name);
        Self {
            tokens: file("tokens.json"),
            clients: file("clients.json"),
            administrators: file("administrators.json"),
        }
    }
}

/// State behind the control service; one per process.
pub struct Pool {
    facts: Facts,
    registry: Arc<dyn Registry>,
    supervisor: Supervisor,
    monitor: Monitor,
    accounting: Accounting,
    authority: Authority,
    tokens: Mutex<Tokens>,
    token_file: Shared,
    clients: Mutex<Clients>,
    client_file: Shared,
    administrators: Mutex<Administrators>,
    administrator_file: Shared,
    watches: Watches,
    config: Mutex<Arc<Config>>,
    rates: Mutex<Rates>,
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
    quiet: Quiet,
    /// Throttle for lines about programs that a limit refuses.
    quiet_of_workers: Quiet,
    parking: Parking,
    /// Leases whose clients have been warned of an end by `lease_ttl`.
    ending: Mutex<HashSet<String>>,
    /// `Some` after a request to stop; `true`: at once.
    stop: watch::Sender<Option<bool>>,
}

/// Time before the end of a lease at which its holder is warned, in seconds.
const END_WARNING: u64 = 600;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs work to its end, even if the call that started it is cancelled.
async fn whole<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Result<T, Status> {
    tokio::spawn(work).await.map_err(|e| Status::internal(format!("internal error: {e}")))
}

impl Pool {
    /// Opens the pool's files.
    pub fn open(
        facts: Facts,
        registry: Arc<dyn Registry>,
        supervisor: Supervisor,
        monitor: Monitor,
        authority: Authority,
        clock: Arc<dyn Clock>,
        random: Arc<dyn Random>,
    ) -> Result<Self, StoreError> {
        let files = Files::below(&facts.config.state_dir);
        let tokens = store::read(&files.tokens)?;
        let clients = Clients::new(store::read(&files.clients)?);
        let config = Mutex::new(Arc::new(facts.config.clone()));
        Ok(Self {
            facts,
            config,
            registry,
            accounting: supervisor.accounting().clone(),
            supervisor,
            monitor,
            authority,
            token_file: Shared::new(files.tokens),
            client_file: Shared::new(files.clients),
            administrators: Mutex::new(store::read(&files.administrators)?),
            administrator_file: Shared::new(files.administrators),
            rates: Mutex::default(),
            tokens: Mutex::new(tokens),
            clients: Mutex::new(clients),
            watches: Watches::default(),
            clock,
            random,
            quiet: Quiet::default(),
            quiet_of_workers: Quiet::default(),
            parking: Parking::default(),
            ending: Mutex::default(),
            stop: watch::channel(None).0,
        })
    }

    /// Returns the facts about this server.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Returns the account of GPU use by programs and leases.
    pub fn accounting(&self) -> &Accounting {
        &self.accounting
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
    pub fn asked_to_stop(&self) -> watch::Receiver<Option<bool>> {
        self.stop.subscribe()
    }

    /// Returns the present configuration.
    pub fn config(&self) -> Arc<Config> {
        locked(&self.config).clone()
    }

    /// Applies a changed configuration as far as possible without a restart.
    ///
    /// Returns the changed keys that apply now, and the ones that need a restart.
    pub async fn reload(&self, fresh: Config) -> (Vec<String>, Vec<String>) {
        let old = self.config();
        let line = |(key, value, _): &(String, String, _)| format!("{key} = {value}");
        let before: Vec<String> = old.report.iter().map(line).collect();
        let after: Vec<String> = fresh.report.iter().map(line).collect();
        let live = |key: &str| is_live(key) || key == "reserve";
        let key = |line: &String| line.split(" = ").next().unwrap_or_default().to_string();
        let mut changed: Vec<String> = after.iter().filter(|l| !before.contains(l)).cloned().collect();
        let gone = |l: &&String| !after.iter().any(|a| key(a) == key(l));
        changed.extend(before.iter().filter(gone).map(|l| format!("{} is no longer set", key(l))));
        let now = |l: &String| live(key(l).trim_end_matches(" is no longer set"));
        let (holds, waits): (Vec<_>, Vec<_>) = changed.into_iter().partition(now);
        // Keys that need a restart are in every report.
        let (mut report, mut waiting): (Vec<_>, Vec<_>) =
            fresh.report.into_iter().partition(|(key, ..)| live(key));
        waiting.retain(|entry| !before.contains(&line(entry)));
        report.extend(old.report.iter().filter(|(key, ..)| !live(key)).cloned());
        let config = Config {
            warm_workers: fresh.warm_workers,
            worker_idle_exit: fresh.worker_idle_exit,
            return_limit: fresh.return_limit,
            parked_max: fresh.parked_max,
            rules: fresh.rules,
            drain_timeout: fresh.drain_timeout,
            accounting_keep: fresh.accounting_keep,
            limits: fresh.limits,
            warnings: fresh.warnings,
            file_found: fresh.file_found,
            report,
            waiting,
            ..(*old).clone()
        };
        self.registry.set_rules(config.rules.clone()).await;
        self.supervisor.set_stock(config.warm_workers, config.worker_idle_exit);
        self.supervisor.set_all_limits(config.limits.clone());
        *locked(&self.config) = Arc::new(config);
        for standing in self.registry.leases().await {
            let Lease { id, client, user, .. } = &standing.lease;
            self.supervisor.set_limits(id, self.limits_of(client, user));
        }
        (holds, waits)
    }

    /// Reads the configuration files again. An error leaves the configuration as it is.
    pub async fn read_again(&self) -> Result<(Vec<String>, Vec<String>), crate::admin::Refusal> {
        let fresh = self.load().map_err(|e| crate::admin::Refusal {
            code: "configuration".into(),
            message: e.to_string(),
            hint: "the running configuration stays as it was".into(),
        })?;
        let warnings = fresh.warnings.clone();
        let (holds, waits) = self.reload(fresh).await;
        for line in &warnings {
            warn!("configuration: {line}");
        }
        for line in &holds {
            info!("configuration: {line}");
        }
        for line in &waits {
            warn!("configuration: {line}: takes effect after a restart");
        }
        Ok((holds, waits))
    }

    fn load(&self) -> Result<Config, crate::config::ConfigError> {
        let config = self.config();
        // A missing file that existed at the start would reset every key to its default.
        crate::cli::read_config(&config.file, config.file_found)
    }

    /// Writes a key into the drop-in file for changes at run time, and applies it; both or neither.
    pub async fn set_key(
        &self,
        key: &str,
        value: Option<&str>,
    ) -> Result<(Vec<String>, Vec<String>), crate::admin::Refusal> {
        use crate::admin::Refusal as No;
        let path = crate::config::runtime_file(&self.facts.config.file);
        let before = match std::fs::read_to_string(&path) {
            Ok(text) => Some(text),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(No::new("failed", format!("{}: {e}", path.display()))),
        };
        if !is_live(key) {
            return Err(No {
                code: "needs-restart".into(),
                message: format!("{key} cannot be changed while the server runs"),
                hint: format!("write it into {} and restart", self.facts.config.file.display()),
            });
        }
        let text = crate::config::edit_runtime(before.as_deref().unwrap_or_default(), key, value)
            .map_err(|m| No::new("usage", m))?;
        let failed = |e: &dyn std::fmt::Display| No::new("failed", e.to_string());
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|e| failed(&format!("{}: {e}", folder.display())))?;
        }
        store::write_bytes(&path, text.as_bytes(), 0o640).map_err(|e| failed(&e))?;
        // Not applied yet: another file may overrule the drop-in.
        let overruled =
            self.load().ok().filter(|_| value.is_some()).and_then(|fresh| match fresh.origin(key) {
                Origin::Default => None,
                Origin::File(file, _) if file == path => None,
                origin => Some(No {
                    code: "failed".into(),
                    message: format!("{origin} sets {key}, and is read after {}", path.display()),
                    hint: "change it there, and `systemctl reload gpuserver`".into(),
                }),
            });
        let outcome = match overruled {
            Some(refusal) => Err(refusal),
            None => self.read_again().await,
        };
        match outcome {
            Ok(changed) => Ok(changed),
            Err(refusal) => {
                let restored = match before {
                    Some(before) => {
                        store::write_bytes(&path, before.as_bytes(), 0o640).map_err(|e| failed(&e))
                    }
                    None => std::fs::remove_file(&path).map_err(|e| failed(&e)),
                };
                restored.and(Err(refusal))
            }
        }
    }

    /// Returns the limits of a client on behalf of a user.
    pub fn limits_of(&self, client: &str, user: &str) -> Effective {
        self.config().limits.of(client, user)
    }

    /// Withdraws a GPU from leasing, or returns it to service.
    pub async fn withdraw(&self, uuid: &str, why: Option<Withdrawn>) -> bool {
        match &why {
            Some(why) => warn!("GPU {uuid}: withdrawn: {}", why.reason()),
            None => info!("GPU {uuid}: back in service"),
        }
        self.registry.withdraw(uuid, why).await
    }

    /// Warns every client with a lease that the lease will be lost.
    pub async fn warn_all(&self, left: Duration, reason: &str) {
        for standing in self.registry.leases().await {
            self.warn(standing.lease, left, reason);
        }
    }

    fn warn(&self, lease: Lease, left: Duration, reason: &str) {
        let warning = wire::Warning { left_usec: micros(left), reason: reason.into(), idle: false };
        self.tell(
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
        self.authority.fingerprint()
    }

    /// Returns the leases of this server.
    pub fn registry(&self) -> &dyn Registry {
        self.registry.as_ref()
    }

    /// Returns the state of lent and parked leases.
    pub fn parking(&self) -> &Parking {
        &self.parking
    }

    /// Returns the time since the host started.
    pub fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Sends an event to a client's daemon, if it watches.
    pub fn tell(&self, client: &str, event: PoolEvent) {
        self.watches.tell(client, event);
    }

    /// Sends events about workers to their clients. Never returns.
    pub async fn tell_of_workers(self: Arc<Self>) {
        let mut events = self.supervisor.events();
        loop {
            match events.recv().await {
                Ok(Event::Workers { client, lease, stock, ended }) => {
                    self.tell(&client, workers_ready(lease, stock, ended));
                }
                Ok(Event::Stuck { .. }) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return,
            }
        }
    }

    /// Returns the supervisor of the workers.
    pub fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

    /// Returns the monitor of the GPUs.
    pub fn monitor(&self) -> &Monitor {
        &self.monitor
    }

    /// Returns `draining` while the server refuses new leases, else `online`.
    async fn state(&self) -> String {
        if self.registry.draining().await.is_some() { "draining" } else { "online" }.into()
    }

    /// Returns the driver's version such as 580.159.04; empty if unknown.
    ///
    /// It comes from NVML or, failing that, from the driver at the start.
    pub fn driver_version(&self) -> String {
        let nvml =
            self.monitor.versions().map(|versions| versions.driver).filter(|driver| !driver.is_empty());
        nvml.unwrap_or_else(|| self.facts.driver_version.clone())
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

    /// Gives `look` access to the join tokens.
    pub fn tokens<T>(&self, look: impl FnOnce(&Tokens) -> T) -> T {
        look(&locked(&self.tokens))
    }

    /// Revokes the join token whose id begins with `id`; returns the whole id, if one token does.
    pub async fn revoke_token(&self, id: &str) -> Result<Option<String>, StoreError> {
        let revoked = {
            let mut tokens = locked(&self.tokens);
            let revoked = tokens.revoke(id);
            self.token_file.changed();
            revoked
        };
        self.store_tokens().await?;
        Ok(revoked)
    }

    async fn store_tokens(&self) -> Result<(), StoreError> {
        self.token_file.store(|| store::text(&*locked(&self.tokens))).await
    }

    async fn store_clients(&self) -> Result<(), StoreError> {
        self.client_file.store(|| store::text(&locked(&self.clients).save())).await
    }

    /// Creates a join token.
    pub async fn create_token(
        &self,
        pattern: &str,
        uses: u32,
        ttl: Duration,
    ) -> Result<(JoinToken, TokenRecord), StoreError> {
        let made = {
            let mut tokens = locked(&self.tokens);
            let (authority, now) = (self.authority.fingerprint(), self.clock.unix());
            let made = tokens.create(authority, pattern, uses, ttl, now, self.random.as_ref());
            self.token_file.changed();
            made
        };
        self.store_tokens().await?;
        Ok(made)
    }

    /// Gives `look` access to the administrators.
    pub fn administrators<T>(&self, look: impl FnOnce(&Administrators) -> T) -> T {
        look(&locked(&self.administrators))
    }

    async fn store_administrators(&self) -> Result<(), StoreError> {
        self.administrator_file.store(|| store::text(&*locked(&self.administrators))).await
    }

    /// Signs an administrator's request; returns the certificate and the authority's.
    pub async fn create_administrator(
        &self,
        name: &str,
        csr_pem: &str,
    ) -> Result<Result<(String, String), NotIssued>, StoreError> {
        let issued = {
            let mut all = locked(&self.administrators);
            let (now, random) = (self.clock.unix(), self.random.as_ref());
            let issued = all.issue(&self.authority, name, csr_pem, now, random);
            self.administrator_file.changed();
            issued
        };
        self.store_administrators().await?;
        if issued.is_ok() {
            info!("administrator {name}: certificate issued");
        }
        Ok(issued.map(|pem| (pem, self.authority.pem().into())))
    }

    /// Revokes an administrator. Returns `true` if this server knew the name.
    pub async fn revoke_administrator(&self, name: &str) -> Result<bool, StoreError> {
        let known = {
            let mut all = locked(&self.administrators);
            let known = all.revoke(name, self.clock.unix());
            self.administrator_file.changed();
            known
        };
        self.store_administrators().await?;
        info!("administrator {name}: revoked");
        Ok(known)
    }

    /// Returns the administrator behind a call over the network.
    async fn administrator<T: Sync>(&self, request: &Request<T>) -> Result<String, Status> {
        let shown = peer(request).and_then(Peer::certificate);
        let admitted = {
            let mut all = locked(&self.administrators);
            let certificate = shown.map(|c| (&c.fingerprint, c.holder.as_ref()));
            let admitted = certificate.map_or(Err(NotAdmitted::Other), |(print, who)| all.admit(print, who));
            if matches!(admitted, Ok((_, true))) {
                self.administrator_file.changed();
            }
            admitted
        };
        let (name, new) = admitted.map_err(|e| {
            if let Some(more) = self.quiet.may() {
                warn!("administration over the network: refused: {e}{more}");
            }
            Status::permission_denied(e.to_string())
        })?;
        if new {
            info!(
                "administrator {name}: new on this server; another server of the pool issued the certificate"
            );
            self.store_administrators().await.map_err(stored)?;
        }
        Ok(name)
    }

    /// Lists all clients.
    pub fn clients(&self) -> Vec<ClientView> {
        locked(&self.clients).list(self.clock.now())
    }

    /// Revokes a client and ends its leases. Returns whether this server knew it, and how many
    /// leases ended.
    pub async fn revoke(&self, name: &str) -> Result<(bool, usize), StoreError> {
        let known = {
            let mut clients = locked(&self.clients);
            let known = clients.revoke(name, self.clock.unix());
            self.client_file.changed();
            known
        };
        self.store_clients().await?;
        info!(gpusession_client = name, "client {name}: revoked");
        Ok((known, self.end_client(name, "the client was revoked").await))
    }

    /// Removes a client and ends its leases. Returns as [`Pool::revoke`] does.
    pub async fn forget(&self, name: &str) -> Result<(bool, usize), StoreError> {
        let known = {
            let mut clients = locked(&self.clients);
            let known = clients.forget(name, self.clock.unix());
            self.client_file.changed();
            known
        };
        self.store_clients().await?;
        info!(gpusession_client = name, "client {name}: forgotten");
        Ok((known, self.end_client(name, "the client was removed from the pool").await))
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
        // Leases that ended while their stock was being set up.
        for lease in self.supervisor.leases() {
            if !self.registry.holds(&lease).await {
                self.supervisor.end_lease(&lease, "the lease ended");
            }
        }
        self.supervisor.tick();
    }

    /// Deletes accounting records older than the configured time.
    pub fn forget_records(&self) {
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
            let peak_memory_bytes = self.supervisor.peak(&lease.id);
            self.supervisor.end_lease(&lease.id, reason);
            self.accounting.add(Record {
                kind: Kind::Lease,
                lease: lease.id.clone(),
                worker: String::new(),
                client: lease.client.clone(),
                user: lease.user.clone(),
                uid: lease.uid,
                pid: 0,
                program: String::new(),
                executable: String::new(),
                gpus: lease.shares.iter().map(|s| s.gpu.clone()).collect(),
                start_unix: lease.created_unix,
                end_unix: self.clock.unix(),
                gpu_busy_usec: 0,
                peak_memory_bytes,
                bytes_to_device: 0,
                bytes_from_device: 0,
                calls: 0,
                reason: reason.into(),
                uids: Vec::new(),
                users: Vec::new(),
            });
            if reason == RELEASED {
                continue;
            }
            let event = PoolEvent {
                lease: lease.id.clone(),
                event: Some(PoolEventKind::Lost(wire::Loss { reason: reason.into() })),
            };
            self.tell(&lease.client, event);
        }
    }

    /// Returns the client of a certificate, whichever server of the pool it joined through.
    async fn identify(&self, certificate: &Certificate) -> Result<String, Refusal> {
        let client = {
            let mut clients = locked(&self.clients);
            let known = clients.identify(&certificate.fingerprint);
            let holder = certificate.holder.as_ref().filter(|holder| holder.role == Role::Client);
            if let (Ok(name), Some(holder)) = (&known, holder)
                && clients.note_key(name, &holder.key)
            {
                self.client_file.changed();
            }
            let (Err(Refusal::Unknown), Some(holder)) = (&known, holder) else { return known };
            clients.introduce(&certificate.fingerprint, holder)?;
            self.client_file.changed();
            holder.name.clone()
        };
        info!(
            gpusession_client = client,
            "client {client}: new on this server; it joined through another server of the pool"
        );
        if let Err(e) = self.store_clients().await {
            error!("client {client}: cannot be stored: {e}; this server forgets it when it exits");
        }
        Ok(client)
    }

    /// Returns the client behind a call.
    async fn client<T: Sync>(&self, request: &Request<T>) -> Result<String, Status> {
        self.client_within(request, "").await
    }

    /// As [`Pool::client`], for calls that maintain present leases.
    ///
    /// Their rate counts separately. A user whose programs exhaust the client's rate thus does not
    /// cost the client its leases.
    async fn keeper<T: Sync>(&self, request: &Request<T>) -> Result<String, Status> {
        self.client_within(request, " keeps").await
    }

    async fn client_within<T: Sync>(&self, request: &Request<T>, calls: &str) -> Result<String, Status> {
        let Some(certificate) = peer(request).and_then(Peer::certificate) else {
            return Err(Status::unauthenticated(
                "this call needs a client certificate of the pool; get one with `gpusession join`",
            ));
        };
        let client = self.identify(certificate).await.map_err(refused)?;
        let allowed = self.limits_of(&client, "");
        if let Some((entry, most)) = allowed.smallest("requests_per_s")
            && !locked(&self.rates).allow(&format!("{client}{calls}"), most, self.clock.now())
        {
            let why = "the client asks more often";
            return Err(beyond(entry.exceeded(why, "retry after a second")));
        }
        self.serves(&allowed).map(|()| client)
    }

    /// Checks that the limit `servers` allows this server.
    fn serves(&self, allowed: &Effective) -> Result<(), Status> {
        let here = self.facts.config.name.as_str();
        match allowed.not_listed("servers", |name| name == here) {
            Some(entry) => Err(beyond(entry.exceeded(format!("this is {here}"), "use one of these servers"))),
            None => Ok(()),
        }
    }

    /// Returns the state of a lease, and its place if it waits for its GPUs.
    pub fn lease_state(&self, lease: &str) -> (&'static str, Place) {
        let idle = || self.parking.clock(lease, |clock| clock.hint().is_some());
        let serves = || if self.supervisor.activity(lease).0 > 0 && !idle() { "active" } else { "idle" };
        self.parking.state(lease).unwrap_or_else(|| (serves(), Place::default()))
    }

    /// Returns a lease's id if the lease belongs to that client.
    async fn own_lease(&self, lease: &str, client: String) -> Result<String, Status> {
        match self.registry.get(lease).await {
            Some(standing) if standing.lease.client == client => Ok(standing.lease.id),
            _ => Err(Status::not_found("no such lease")),
        }
    }

    /// Records a client's call that names its boot. Leases of earlier boots end.
    async fn present(self: &Arc<Self>, client: &str, boot_id: &str, machine_id: &str) -> Result<(), Status> {
        let seen = locked(&self.clients).seen(client, boot_id, machine_id, self.clock.now());
        match seen {
            Ok(Seen::Known) => Ok(()),
            Ok(Seen::NewBoot) => {
                let (pool, client, boot) = (self.clone(), client.to_owned(), boot_id.to_owned());
                whole(async move {
                    let old = pool.registry.release_client(&client, Some(&boot)).await;
                    pool.ended(&old, "the client was restarted");
                })
                .await
            }
            Err(refusal) => {
                if let Some(more) = self.quiet.may() {
                    warn!(gpusession_client = client, "client {client}: call refused: {refusal}{more}");
                }
                Err(refused(refusal))
            }
        }
    }

    /// Returns HOST:PORT of this server's control service, as configured or as the client reached
    /// it.
    fn control_addresses(&self, reached: Option<SocketAddr>) -> Vec<String> {
        self.addresses(reached, self.facts.control.port(), true)
    }

    fn data_addresses(&self, reached: Option<SocketAddr>) -> Vec<String> {
        self.addresses(reached, self.facts.data.port(), false)
    }

    fn addresses(&self, reached: Option<SocketAddr>, port: u16, control: bool) -> Vec<String> {
        let advertised = &self.facts.config.advertise;
        if !advertised.is_empty() {
            return advertised
                .iter()
                .map(|a| host_port(&a.host, a.port.filter(|_| control).unwrap_or(port)))
                .collect();
        }
        let ip = reached.map(|a| a.ip().to_canonical()).unwrap_or(IpAddr::from([127, 0, 0, 1]));
        vec![host_port(&ip.to_string(), port)]
    }

    /// Describes a lease's GPUs for its client.
    pub(super) async fn devices_of(&self, lease: &Lease) -> Vec<wire::Device> {
        devices(lease, &self.registry.gpus().await)
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

    fn describe_lease(&self, lease: &Lease, gpus: &[GpuUse], reached: Option<SocketAddr>) -> wire::Lease {
        wire::Lease {
            id: lease.id.clone(),
            ticket_key: lease.ticket_key.to_vec(),
            fencing_token: lease.fencing_token,
            devices: devices(lease, gpus),
            ttl_usec: micros(lease.ttl),
            server: self.facts.config.name.clone(),
            data_addresses: self.data_addresses(reached),
            encrypted: lease.encrypted,
            // Empty: workers are taken by a call of their own, so that a repeated request cannot
            // take one twice.
            workers: Vec::new(),
            driver_version: self.driver_version(),
            cuda_version: self.facts.cuda_version,
            idle_timeout_usec: micros(self.timeouts(lease).first()),
        }
    }
}

/// Returns the peer of a request's connection.
fn peer<T>(request: &Request<T>) -> Option<&Peer> {
    request.extensions().get()
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn devices(lease: &Lease, gpus: &[GpuUse]) -> Vec<wire::Device> {
    lease
        .shares
        .iter()
        .filter_map(|s| Some((s, gpus.iter().find(|g| g.gpu.uuid == s.gpu)?)))
        .map(|(share, gpu)| device(&gpu.gpu, Some(share), gpu.state(), gpu))
        .collect()
}

pub(super) fn device(gpu: &Gpu, share: Option<&Share>, state: &str, used: &GpuUse) -> wire::Device {
    wire::Device {
        uuid: gpu.uuid.clone(),
        name: gpu.name.clone(),
        memory_bytes: gpu.memory_bytes,
        limit_bytes: share.map_or(gpu.memory_bytes, |s| s.limit_bytes),
        sm_percent: share.map_or(100, |s| s.sm_percent),
        compute_major: gpu.compute_major,
        compute_minor: gpu.compute_minor,
        pci_address: gpu.pci_address.clone(),
        state: state.into(),
        memory_free_bytes: used.free_bytes(),
    }
}

/// Returns the limits of a lease's workers on each GPU.
fn limits(lease: &Lease, gpus: &[GpuUse]) -> Vec<DeviceLimit> {
    lease
        .shares
        .iter()
        .filter_map(|share| {
            let gpu = &gpus.iter().find(|g| g.gpu.uuid == share.gpu)?.gpu;
            let whole = share.limit_bytes >= gpu.memory_bytes;
            Some(DeviceLimit {
                uuid: gpu.uuid_bytes()?,
                memory_bytes: if whole { u64::MAX } else { share.limit_bytes },
                sm_percent: share.sm_percent,
                context_bytes: gpu.context_bytes,
            })
        })
        .collect()
}

fn refused(refusal: Refusal) -> Status {
    let text = refusal.to_string();
    match refusal {
        Refusal::Unknown => Status::unauthenticated(text),
        Refusal::Revoked(_) => Status::permission_denied(text),
        // The client may try again after a moment.
        Refusal::SecondMachine(_) => Status::aborted(text),
        Refusal::Taken(_) => Status::already_exists(text),
        Refusal::NoBoot => Status::invalid_argument(text),
    }
}

/// Builds the status of a refusal by a limit.
fn beyond(exceeded: Exceeded) -> Status {
    let details = wire::Refusal {
        kind: wire::refusal::Kind::Limit.into(),
        limit: exceeded.name.into(),
        ..Default::default()
    };
    let text = exceeded.to_string();
    Status::with_details(tonic::Code::FailedPrecondition, text, details.encode_to_vec().into())
}

/// Builds the status of a request that does not fit now, or never does.
fn unfit(code: tonic::Code, text: String, kind: wire::refusal::Kind, position: u32, waiting: u32) -> Status {
    let details = wire::Refusal { kind: kind.into(), position, waiting, ..Default::default() };
    Status::with_details(code, text, details.encode_to_vec().into())
}

fn stored(e: StoreError) -> Status {
    error!("{e}");
    Status::internal("the server could not store the change; see its journal")
}

fn bounded<'a>(texts: impl IntoIterator<Item = &'a String>, lists: &[usize]) -> Result<(), Status> {
    if texts.into_iter().any(|t| t.len() > MAX_TEXT || t.chars().any(char::is_control)) {
        return Err(Status::invalid_argument(format!(
            "a text of the request is longer than {MAX_TEXT} bytes, or has control characters"
        )));
    }
    if lists.iter().any(|n| *n > MAX_LIST) {
        return Err(Status::invalid_argument(format!(
            "a list of the request has more than {MAX_LIST} entries"
        )));
    }
    Ok(())
}

/// The services of the control port.
#[derive(Clone)]
pub struct Service(pub Arc<Pool>);

#[tonic::async_trait]
impl Enrolment for Service {
    async fn join(&self, request: Request<wire::JoinRequest>) -> Result<Response<wire::JoinReply>, Status> {
        let pool = &self.0;
        let from = peer(&request).and_then(Peer::remote);
        let reached = peer(&request).and_then(Peer::local);
        let wish = request.into_inner();
        bounded([&wish.token, &wish.client_name, &wish.machine_id, &wish.boot_id], &[])?;
        let peer = from.map_or_else(|| "unknown".into(), |p| p.ip().to_canonical().to_string());
        let refuse = |status: Status| {
            if let Some(more) = pool.quiet.may() {
                let why = status.message();
                warn!(gpusession_client = wish.client_name, "join from {peer}: refused: {why}{more}");
            }
            status
        };
        let token: JoinToken =
            wish.token.parse().map_err(|e| refuse(Status::invalid_argument(format!("{e}"))))?;
        if !is_name(&wish.client_name) {
            return Err(refuse(Status::invalid_argument(format!(
                "{:?} cannot be a client's name: it has a-z, 0-9, `-` and `.`, 64 characters at most; join with --name",
                wish.client_name
            ))));
        }
        let name = wish.client_name.clone();
        let issued = {
            // Locks both, so that the last use of a token serves one join only.
            let mut tokens = locked(&pool.tokens);
            let mut clients = locked(&pool.clients);
            tokens
                .check(&token, &name, pool.clock.unix())
                .map_err(|e| refuse(Status::permission_denied(e.to_string())))?;
            let unfit = |e: AuthorityError| refuse(Status::invalid_argument(e.to_string()));
            let key = requested_key(&wish.csr_pem).map_err(unfit)?;
            clients.may_join(&name, &key).map_err(|e| refuse(refused(e)))?;
            let issued = pool.authority.issue(&wish.csr_pem, Role::Client, &name, pool.random.as_ref());
            let issued = issued.map_err(|e| match e {
                AuthorityError::Request(_) => refuse(Status::invalid_argument(e.to_string())),
                e => {
                    error!("join of {name}: {e}");
                    Status::internal("the server could not issue a certificate; see its journal")
                }
            })?;
            tokens.consume(&token);
            pool.token_file.changed();
            clients.join(&name, &issued.fingerprint, &key, &wish.machine_id, pool.clock.unix());
            pool.client_file.changed();
            issued
        };
        // In this order, so that no token admits more clients than it may.
        pool.store_tokens().await.map_err(stored)?;
        pool.store_clients().await.map_err(stored)?;
        info!(gpusession_client = name, "client {name} joined from {peer}");
        Ok(Response::new(wire::JoinReply {
            certificate_pem: issued.pem,
            authority_pem: pool.authority.pem().into(),
            client_name: name,
            servers: pool.control_addresses(reached),
        }))
    }
}

#[tonic::async_trait]
impl Administration for Service {
    async fn ask(&self, request: Request<wire::AskRequest>) -> Result<Response<wire::AskReply>, Status> {
        let pool = self.0.clone();
        let name = pool.administrator(&request).await?;
        let from = peer(&request).and_then(Peer::remote);
        let from = from.map_or_else(|| "unknown".into(), |p| p.ip().to_canonical().to_string());
        let body = request.into_inner().json;
        // The work continues if the call is cancelled, as on admin.sock.
        let answer = tokio::spawn(async move { admin::answer_remote(&body, &pool, &name, &from).await });
        let json = answer.await.map_err(|e| Status::internal(format!("internal error: {e}")))?;
        Ok(Response::new(wire::AskReply { json }))
    }
}

#[tonic::async_trait]
impl PoolService for Service {
    async fn allocate(
        &self,
        request: Request<wire::AllocateRequest>,
    ) -> Result<Response<wire::Lease>, Status> {
        let pool = &self.0;
        let client = pool.client(&request).await?;
        let from = peer(&request).and_then(Peer::remote);
        let reached = peer(&request).and_then(Peer::local);
        let wish = request.into_inner();
        bounded(
            [
                &wish.request_id,
                &wish.model,
                &wish.sharing,
                &wish.priority,
                &wish.user,
                &wish.who,
                &wish.why,
                &wish.boot_id,
                &wish.machine_id,
                &wish.on_idle,
            ]
            .into_iter()
            .chain(&wish.devices)
            .chain(&wish.sticky),
            &[wish.devices.len(), wish.sticky.len(), wish.gpus as usize],
        )?;
        pool.present(&client, &wish.boot_id, &wish.machine_id).await?;
        let sharing = match (wish.sharing.as_str(), Sharing::parse(&wish.sharing)) {
            ("", _) => None,
            (_, Some(sharing)) => Some(sharing),
            (other, None) => {
                return Err(Status::invalid_argument(format!(
                    "sharing {other:?} is none of \"time-slice\", \"mps\" and \"exclusive\""
                )));
            }
        };
        let shares = [wish.sm_count != 0, !matches!(wish.sm_percent, 0 | 100), wish.sm_auto];
        if shares.into_iter().filter(|given| *given).count() > 1 {
            return Err(Status::invalid_argument(
                "sm_percent, sm_count and sm_auto say the same: leave all but one out",
            ));
        }
        let priority = match wish.priority.as_str() {
            "" | "normal" => Priority::Normal,
            "below-normal" => Priority::BelowNormal,
            other => {
                return Err(Status::invalid_argument(format!(
                    "priority {other:?} is neither \"normal\" nor \"below-normal\""
                )));
            }
        };
        let on_idle = OnIdle::parse(&wish.on_idle).ok_or_else(|| {
            Status::invalid_argument(format!(
                "on_idle {:?} is none of \"park\", \"release\" and \"keep\"",
                wish.on_idle
            ))
        })?;
        let idle_timeout = match wish.idle_timeout_usec {
            0 => Duration::ZERO,
            _ if on_idle == OnIdle::Keep => {
                return Err(Status::invalid_argument(
                    "on_idle \"keep\" and an idle timeout contradict each other: leave one out",
                ));
            }
            usec => Duration::from_micros(usec).max(Duration::from_secs(1)),
        };
        let allowed = pool.limits_of(&client, &wish.user);
        pool.serves(&allowed)?;
        let encrypted = !from.is_some_and(|p| pool.facts.config.may_be_clear(p.ip()));
        let memory = match (wish.memory_bytes, wish.memory_percent) {
            (0, 0.0) => Memory::Percent(100.0),
            (0, percent) => Memory::Percent(percent),
            (bytes, _) => Memory::Bytes(bytes),
        };
        let wanted = LeaseRequest {
            client: client.clone(),
            request_id: wish.request_id,
            gpus: wish.gpus,
            memory,
            model: wish.model,
            devices: wish.devices,
            sticky: wish.sticky,
            user: wish.user,
            uid: wish.uid,
            ttl: Duration::from_micros(wish.ttl_usec),
            who: wish.who,
            why: wish.why,
            boot_id: wish.boot_id,
            encrypted,
            sm_percent: if wish.sm_percent == 0 { 100 } else { wish.sm_percent },
            sm_count: wish.sm_count,
            sm_auto: wish.sm_auto,
            once: wish.once,
            sharing,
            priority,
            persistent: wish.persistent,
            on_idle,
            hold: wish.hold,
            idle_timeout,
            order: wish.order,
            limits: allowed.clone(),
        };
        let known = wish.again.then_some(wish.workers);
        let allocated = {
            let pool = pool.clone();
            whole(async move { pool.allocate(&wanted).await }).await?
        };
        let (lease, fresh) = allocated.map_err(|e| {
            let text = e.to_string();
            if let Some(more) = pool.quiet.may() {
                // The client itself sees malformed requests and ones that never fit.
                let event = match &e {
                    AllocateError::NoCapacity { .. } => Some(Said::PoolExhausted),
                    AllocateError::Limit(_) => Some(Said::LimitRefuses),
                    _ => None,
                };
                info!(
                    message_id = event.map(Said::id),
                    gpusession_client = client,
                    gpusession_reason = text,
                    "client {client}: no lease: {text}{more}"
                );
            }
            use tonic::Code::{FailedPrecondition, ResourceExhausted};
            use wire::refusal::Kind;
            match e {
                AllocateError::Invalid(_) => Status::invalid_argument(text),
                AllocateError::NeverFits(_) => unfit(FailedPrecondition, text, Kind::NeverFits, 0, 0),
                AllocateError::NoCapacity { position, waiting, .. } => {
                    unfit(ResourceExhausted, text, Kind::NoCapacity, position, waiting)
                }
                AllocateError::Limit(exceeded) => beyond(exceeded),
                AllocateError::Storage(_) => Status::internal(text),
            }
        })?;
        let gpus = pool.registry.gpus().await;
        if fresh {
            let what: Vec<_> =
                lease.shares.iter().map(|s| format!("{} MiB of {}", s.limit_bytes >> 20, s.gpu)).collect();
            info!(
                message_id = Said::LeaseGranted.id(),
                gpusession_lease = lease.id,
                gpusession_client = client,
                gpusession_server = pool.facts.config.name,
                "lease {} granted to {client}: {}",
                lease.id,
                what.join(", ")
            );
        }
        pool.supervisor.add_lease(&lease, limits(&lease, &gpus), allowed);
        if let Some(known) = known {
            pool.supervisor.end_unclaimed(&lease.id, &known);
        }
        Ok(Response::new(pool.describe_lease(&lease, &gpus, reached)))
    }

    async fn renew(
        &self,
        request: Request<wire::RenewRequest>,
    ) -> Result<Response<wire::RenewReply>, Status> {
        let pool = &self.0;
        let client = pool.keeper(&request).await?;
        let wish = request.into_inner();
        bounded(wish.leases.iter().chain([&wish.boot_id]), &[wish.leases.len()])?;
        pool.present(&client, &wish.boot_id, "").await?;
        let mut leases = Vec::with_capacity(wish.leases.len());
        let gpus = pool.registry.gpus().await;
        for id in wish.leases {
            leases.push(match pool.registry.renew(&client, &id).await {
                Some(ttl) => {
                    let (state, place) = pool.lease_state(&id);
                    let standing = pool.registry.get(&id).await;
                    let lease = standing.map(|s| s.lease);
                    let lease = lease.as_ref();
                    wire::RenewedLease {
                        devices: lease.map(|l| devices(l, &gpus)).unwrap_or_default(),
                        fencing_token: lease.map_or(0, |l| l.fencing_token),
                        idle_timeout_usec: lease.map_or(0, |l| micros(pool.timeouts(l).first())),
                        id,
                        ttl_usec: micros(ttl),
                        state: state.into(),
                        position: place.position,
                        waiting: place.waiting,
                        ..Default::default()
                    }
                }
                None => wire::RenewedLease {
                    id,
                    lost: true,
                    reason: "the server has no such lease: it was released, ended by an administrator, or its client was \
                             silent for too long"
                        .into(),
                    ..Default::default()
                },
            });
        }
        Ok(Response::new(wire::RenewReply { leases, state: pool.state().await }))
    }

    async fn release(
        &self,
        request: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseReply>, Status> {
        let pool = &self.0;
        let client = pool.keeper(&request).await?;
        locked(&pool.clients).heard(&client, pool.clock.now());
        let wish = request.into_inner();
        let pool = pool.clone();
        whole(async move {
            if !wish.request_id.is_empty() {
                pool.registry.leave_queue(&client, &wish.request_id).await;
            }
            let ended = pool.registry.release(Some(&client), &wish.lease).await;
            pool.ended(ended.as_slice(), RELEASED);
        })
        .await?;
        Ok(Response::new(wire::ReleaseReply {}))
    }

    async fn take_workers(
        &self,
        request: Request<wire::TakeWorkersRequest>,
    ) -> Result<Response<wire::TakeWorkersReply>, Status> {
        let pool = &self.0;
        let client = pool.client(&request).await?;
        locked(&pool.clients).heard(&client, pool.clock.now());
        let wish = request.into_inner();
        bounded([&wish.lease], &[wish.environment.len()])?;
        let environment = wish.environment.into_iter().collect();
        let count = wish.count.clamp(1, 16) as usize;
        if pool.parking.state(&wish.lease).is_some() {
            let mine = pool.registry.get(&wish.lease).await.is_some_and(|s| s.lease.client == client);
            if wish.waiting == 0 || !mine {
                return Ok(Response::new(wire::TakeWorkersReply { workers: Vec::new() }));
            }
            pool.bring_back(&wish.lease, RETURN_TIMEOUT).await.map_err(|Place { position, waiting }| {
                Status::unavailable(match position {
                    0 => "the device memory of the lease's other programs is still on its way back".to_owned(),
                    _ => format!(
                        "the lease's GPUs were given to others while it was idle, and are not free yet: position {position} \
                         of {waiting} that wait"
                    ),
                })
            })?;
        }
        let taken = match wish.waiting {
            0 => pool.supervisor.take(&client, &wish.lease, count, environment).await,
            _ => pool.supervisor.take_for_waiting(&client, &wish.lease, count, environment).await,
        };
        let taken = taken.map_err(|e| {
            let text = e.to_string();
            let beyond_limit = matches!(
                e,
                TakeError::Limit(_) | TakeError::Memory | TakeError::Mps(_) | TakeError::TooMany(_)
            );
            // A stock that does not fill up is no news.
            if beyond_limit
                && wish.waiting > 0
                && let Some(more) = pool.quiet_of_workers.may()
            {
                info!(
                    message_id = Said::LimitRefuses.id(),
                    gpusession_client = client,
                    gpusession_lease = wish.lease,
                    gpusession_reason = text,
                    "client {client}: no worker: {text}{more}"
                );
            }
            match e {
                TakeError::Limit(exceeded) => beyond(exceeded),
                TakeError::NoLease => Status::not_found(text),
                TakeError::Away => Status::unavailable(text),
                TakeError::Memory => {
                    let kind = wire::refusal::Kind::OutOfMemory;
                    unfit(tonic::Code::ResourceExhausted, text, kind, 0, 0)
                }
                TakeError::TooMany(_) | TakeError::Mps(_) => Status::resource_exhausted(text),
                TakeError::Environment(_) => Status::invalid_argument(text),
                TakeError::NotStarting(_) | TakeError::TooSlow => Status::unavailable(text),
            }
        })?;
        let workers = taken
            .into_iter()
            .map(|t| wire::Worker { id: t.id.to_vec(), fingerprint: t.fingerprint.to_vec() })
            .collect();
        Ok(Response::new(wire::TakeWorkersReply { workers }))
    }

    async fn process_ended(
        &self,
        request: Request<wire::ProcessEndedRequest>,
    ) -> Result<Response<wire::ProcessEndedReply>, Status> {
        let pool = &self.0;
        let client = pool.keeper(&request).await?;
        locked(&pool.clients).heard(&client, pool.clock.now());
        let wish = request.into_inner();
        let id: WorkerId = wish
            .worker
            .as_slice()
            .try_into()
            .map_err(|_| Status::invalid_argument("a worker's id has 16 bytes"))?;
        let mine = pool.registry.get(&wish.lease).await.is_some_and(|s| s.lease.client == client);
        if mine {
            pool.supervisor.end_worker(&id, Some(&wish.lease), "its client process ended");
        }
        Ok(Response::new(wire::ProcessEndedReply {}))
    }

    async fn park(&self, request: Request<wire::ParkRequest>) -> Result<Response<wire::ParkReply>, Status> {
        let pool = &self.0;
        let lease = pool.own_lease(&request.get_ref().lease, pool.client(&request).await?).await?;
        let parked = {
            let (pool, lease) = (pool.clone(), lease.clone());
            whole(async move { pool.park(&lease, "its client asked for it").await }).await?
        };
        parked.map_err(|e| {
            let text = e.to_string();
            match e {
                ParkError::NoLease => Status::not_found(text),
                ParkError::Never(_) | ParkError::Away(_) => Status::failed_precondition(text),
                ParkError::NoRoom { .. } => Status::resource_exhausted(text),
                ParkError::Busy => Status::unavailable(text),
                ParkError::Failed(_) => Status::internal(text),
            }
        })?;
        let (state, place) = pool.parking.state(&lease).unwrap_or(("active", Place::default()));
        Ok(Response::new(wire::ParkReply { state: state.into(), position: place.position }))
    }

    async fn unpark(
        &self,
        request: Request<wire::UnparkRequest>,
    ) -> Result<Response<wire::ParkReply>, Status> {
        let pool = &self.0;
        let lease = pool.own_lease(&request.get_ref().lease, pool.client(&request).await?).await?;
        let (state, place) = pool.unpark(&lease).await;
        Ok(Response::new(wire::ParkReply { state: state.into(), position: place.position }))
    }

    async fn idle_hint(
        &self,
        request: Request<wire::IdleHintRequest>,
    ) -> Result<Response<wire::IdleHintReply>, Status> {
        let pool = &self.0;
        let client = pool.client(&request).await?;
        let wish = request.into_inner();
        let lease = pool.own_lease(&wish.lease, client.clone()).await?;
        let state = pool.hint_idle(&client, &lease, wish.idle).into();
        Ok(Response::new(wire::IdleHintReply { state }))
    }

    async fn readings(
        &self,
        request: Request<wire::ReadingsRequest>,
    ) -> Result<Response<wire::ReadingsReply>, Status> {
        let pool = &self.0;
        let client = pool.client(&request).await?;
        locked(&pool.clients).heard(&client, pool.clock.now());
        let wish = request.into_inner();
        bounded([&wish.lease], &[])?;
        let standing = pool.registry.get(&wish.lease).await.filter(|s| s.lease.client == client);
        let lease = standing.ok_or_else(|| Status::not_found("no such lease"))?.lease;
        let gpus = pool.registry.gpus().await;
        readings::answer(pool, &lease, &gpus, wish.queries).await.map(Response::new)
    }

    async fn describe(
        &self,
        request: Request<wire::DescribeRequest>,
    ) -> Result<Response<wire::ServerDescription>, Status> {
        let pool = &self.0;
        let client = pool.client(&request).await?;
        let reached = peer(&request).and_then(Peer::local);
        let facts = &pool.facts;
        let devices = pool.registry.gpus().await;
        Ok(Response::new(wire::ServerDescription {
            name: facts.config.name.clone(),
            software: format!("gpuserver {}", env!("CARGO_PKG_VERSION")),
            protocol: preface::VERSION.into(),
            driver_version: pool.driver_version(),
            cuda_version: facts.cuda_version,
            devices: devices.iter().map(|g| device(&g.gpu, None, g.state(), g)).collect(),
            state: pool.state().await,
            data_addresses: pool.data_addresses(reached),
            idle_timeout_usec: micros(pool.default_timeouts(&client).first()),
            lease_ttl_usec: micros(DEFAULT_TTL),
        }))
    }

    type WatchStream = Events<Watching>;

    async fn watch(
        &self,
        request: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let pool = self.0.clone();
        let client = pool.client(&request).await?;
        let boot_id = request.into_inner().boot_id;
        bounded([&boot_id], &[])?;
        // Opened before its presence takes effect, so that no event is missed.
        let queue = pool.watches.begin(&client);
        pool.present(&client, &boot_id, "").await?;
        let watching = Watching::begin(pool.clone(), client.clone());
        let leases = pool.registry.of_client(&client).await.into_iter().map(|s| s.lease.id);
        let first = leases.filter_map(|lease| {
            let stock = pool.supervisor.ready(&lease);
            (stock > 0).then(|| workers_ready(lease, stock, None))
        });
        Ok(Response::new(Events::new(first.collect(), queue, watching)))
    }
}

fn workers_ready(lease: String, stock: u32, ended: Option<WorkerId>) -> PoolEvent {
    let ended = ended.iter().map(|id| id.to_vec()).collect();
    PoolEvent { lease, event: Some(PoolEventKind::WorkersReady(wire::WorkersReady { stock, ended })) }
}

/// Presence of a client while its watch is open.
pub struct Watching(Arc<Pool>, String);

impl Watching {
    fn begin(pool: Arc<Pool>, client: String) -> Self {
        locked(&pool.clients).watch_began(&client);
        Self(pool, client)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        locked(&self.0.clients).watch_ended(&self.1);
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
