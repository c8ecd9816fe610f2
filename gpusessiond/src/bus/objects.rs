//! The objects: manager, leases, devices, servers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use zbus::message::Header;
use zbus::object_server::SignalEmitter;
use zbus::{Connection, OwnedFd, OwnedObjectPath, OwnedVariant, interface};

use super::authority::{self, Deed, authorise};
use super::error::{BusError, Result};
use super::{PUBLISH_WAIT, Shared, device_path, lease_path, request, server_path};
use crate::leases::{Caller, DeviceView, LeaseState, LeaseView, ServerView, Slot, Snapshot};

/// `CreateLease` flag: the lease outlives its requester.
const PERSISTENT: u64 = 1;
/// Leases of one user that outlive their requester.
const MAX_PERSISTENT: usize = 2;

/// `org.gpusession1.Manager`.
pub struct Manager {
    pub(super) shared: Arc<Shared>,
}

/// A row of `ListDevices` and `ListServers`.
type Row = (String, String, String, OwnedObjectPath);

fn lease<'a>(snapshot: &'a Snapshot, id: &str) -> Result<&'a LeaseView> {
    snapshot
        .lease(id)
        .filter(|l| super::publisher::shown(l))
        .ok_or_else(|| BusError::no_such_lease(format!("there is no lease {id}")))
}

impl Manager {
    async fn touch(&self, connection: &Connection, header: &Header<'_>, id: &str) -> Result<LeaseView> {
        let view = lease(&self.shared.snapshot(), id)?.clone();
        let uid = authority::caller(connection, header).await?;
        authorise(&self.shared, uid, Deed::Touch { owner: view.uid }).await?;
        Ok(view)
    }

    async fn manage(&self, connection: &Connection, header: &Header<'_>) -> Result<()> {
        let uid = authority::caller(connection, header).await?;
        authorise(&self.shared, uid, Deed::ManagePool).await
    }

    async fn may_create(&self, uid: u32, for_uid: Option<u32>) -> Result<()> {
        if for_uid.is_some_and(|other| other != uid) {
            authorise(&self.shared, uid, Deed::CreateLeaseForOther).await?;
        }
        authorise(&self.shared, uid, Deed::CreateLease).await
    }

    /// Waits until the publisher has shown (or removed) what a reply is about.
    async fn published(&self, test: impl FnMut(&Arc<Snapshot>) -> bool) {
        let mut published = self.shared.published.subscribe();
        let _ = tokio::time::timeout(PUBLISH_WAIT, published.wait_for(test)).await;
    }
}

/// One lease in the making counts against its owner.
struct Creating<'a> {
    shared: &'a Shared,
    uid: u32,
}

impl<'a> Creating<'a> {
    fn new(shared: &'a Shared, uid: u32) -> Self {
        *shared.creating.lock().unwrap_or_else(|e| e.into_inner()).entry(uid).or_default() += 1;
        Self { shared, uid }
    }
}

impl Drop for Creating<'_> {
    fn drop(&mut self) {
        let mut creating = self.shared.creating.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(count) = creating.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                creating.remove(&self.uid);
            }
        }
    }
}

#[interface(name = "org.gpusession1.Manager", introspection_docs = false)]
impl Manager {
    /// Leases: id, uid, state, path, expiry in microseconds since the epoch.
    #[zbus(out_args("leases"))]
    async fn list_leases(&self) -> Vec<(String, u32, String, OwnedObjectPath, u64)> {
        let snapshot = self.shared.snapshot();
        let shown = snapshot.leases.iter().filter(|l| super::publisher::shown(l));
        shown
            .map(|l| (l.id.clone(), l.uid, l.state.as_str().into(), lease_path(&l.id), l.expires_usec))
            .collect()
    }

    #[zbus(out_args("devices"))]
    async fn list_devices(&self) -> Vec<Row> {
        super::publisher::devices(&self.shared.snapshot())
            .into_iter()
            .map(|(uuid, entry)| {
                let path = device_path(&uuid);
                (uuid, entry.view.device.name.clone(), state_of(&entry.view).into(), path)
            })
            .collect()
    }

    #[zbus(out_args("servers"))]
    async fn list_servers(&self) -> Vec<Row> {
        let snapshot = self.shared.snapshot();
        snapshot
            .servers
            .iter()
            .map(|s| (s.name.clone(), s.address.clone(), s.state.clone(), server_path(&s.name)))
            .collect()
    }

    #[zbus(out_args("path"))]
    async fn get_lease(&self, id: &str) -> Result<OwnedObjectPath> {
        Ok(lease_path(&lease(&self.shared.snapshot(), id)?.id))
    }

    #[zbus(out_args("path"))]
    async fn get_device(&self, id: &str) -> Result<OwnedObjectPath> {
        let known = super::publisher::devices(&self.shared.snapshot()).contains_key(id);
        if known {
            Ok(device_path(id))
        } else {
            Err(BusError::no_such_device(format!("no lease has a GPU {id}")))
        }
    }

    #[zbus(out_args("path"))]
    async fn get_server(&self, id: &str) -> Result<OwnedObjectPath> {
        let known = self.shared.snapshot().servers.iter().any(|s| s.name == id);
        if known {
            Ok(server_path(id))
        } else {
            Err(BusError::no_such_server(format!("there is no server {id}")))
        }
    }

    #[zbus(name = "GetLeaseByPIDFD", out_args("leases"))]
    async fn get_lease_by_pidfd(&self, pidfd: OwnedFd) -> Result<Vec<OwnedObjectPath>> {
        let uid =
            uid_of(&pidfd).map_err(|e| BusError::invalid_args(format!("not the pidfd of a process: {e}")))?;
        let person = self.shared.gate.person(uid).await;
        let caller = Caller { uid, pid: 0, user: person.name, access: person.access };
        let slots = self.shared.leases.of(caller).await;
        let snapshot = self.shared.snapshot();
        Ok(snapshot.leases.iter().filter(|l| slots.contains(&l.slot)).map(|l| lease_path(&l.id)).collect())
    }

    #[zbus(out_args("leases"))]
    async fn get_lease_by_session(&self, session: &str) -> Result<Vec<OwnedObjectPath>> {
        Err(BusError::not_supported(format!("leases are not bound to sessions yet ({session})")))
    }

    #[zbus(out_args("id", "path", "lease_fd"))]
    async fn create_lease(
        &self,
        request: HashMap<String, OwnedVariant>,
        flags: u64,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(String, OwnedObjectPath, OwnedFd)> {
        let uid = authority::caller(connection, &header).await?;
        let mut key = [0; 12];
        getrandom::fill(&mut key).map_err(|e| BusError::failed(e.to_string()))?;
        let request = request::read(request, format!("request/{}", crate::places::hex(&key)), uid)?;
        if flags & !PERSISTENT != 0 {
            return Err(BusError::invalid_args(format!("unknown flags {flags:#x}")));
        }
        let persistent = flags & PERSISTENT != 0;
        if persistent && request.spec.ttl.is_none() {
            return Err(BusError::invalid_args("a persistent lease needs TTLUSec"));
        }
        self.may_create(uid, request.uid).await?;
        let owner = request.uid.unwrap_or(uid);
        if persistent && uid != 0 && self.persistent(owner) >= MAX_PERSISTENT {
            return Err(BusError::quota_exceeded(format!(
                "at most {MAX_PERSISTENT} persistent leases of one user"
            )));
        }
        let mut spec = request.spec;
        spec.user = self.shared.gate.person(owner).await.name.unwrap_or_default();
        let view = {
            let _creating = Creating::new(&self.shared, owner);
            self.shared.leases.create(spec).await?
        };
        let (sender, receiver) = pipe::pipe().map_err(|e| BusError::failed(e.to_string()))?;
        let fd = sender.into_blocking_fd().map_err(|e| BusError::failed(e.to_string()))?;
        if persistent {
            self.shared.persistent.lock().unwrap_or_else(|e| e.into_inner()).insert(view.slot);
        } else {
            tokio::spawn(release_at_close(self.shared.clone(), view.slot, receiver));
        }
        let id = view.id;
        self.published(|s| s.lease(&id).is_some()).await;
        let path = lease_path(&id);
        Ok((id, path, OwnedFd::from(fd)))
    }

    #[zbus(out_args("answer"))]
    async fn can_create_lease(
        &self,
        request: HashMap<String, OwnedVariant>,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String> {
        let uid = authority::caller(connection, &header).await?;
        let request = request::read(request, String::new(), uid)?;
        if self.may_create(uid, request.uid).await.is_err() {
            return Ok("no".into());
        }
        let snapshot = self.shared.snapshot();
        let fits = snapshot.servers.iter().any(|s| s.state == "online" && s.free >= request.spec.gpus);
        Ok(if fits { "yes" } else { "busy" }.into())
    }

    async fn renew_lease(
        &self,
        id: &str,
        ttl_usec: u64,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let _ = ttl_usec; // The server knows how long a lease of its own lasts.
        let view = self.touch(connection, &header, id).await?;
        self.shared.leases.renew(&view.id).await?;
        Ok(())
    }

    async fn release_lease(
        &self,
        id: &str,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let view = self.touch(connection, &header, id).await?;
        self.shared.leases.release(view.slot, "released on request").await;
        self.published(|s| s.lease(&view.id).is_none()).await;
        Ok(())
    }

    async fn release_session(&self, session: &str) -> Result<()> {
        Err(BusError::not_supported(format!("leases are not bound to sessions yet ({session})")))
    }

    async fn drain_server(
        &self,
        server: &str,
        enable: bool,
        grace_usec: u64,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        self.manage(connection, &header).await?;
        let _ = (enable, grace_usec);
        Err(BusError::not_supported(format!("a server is drained on the server itself ({server})")))
    }

    async fn preallocate(
        &self,
        count: u32,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        self.manage(connection, &header).await?;
        Err(BusError::not_supported(format!(
            "[[lease]] tables say what is allocated ahead (asked for {count})"
        )))
    }

    async fn reload(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        self.manage(connection, &header).await?;
        Err(BusError::not_supported("restart the daemon to read its configuration anew"))
    }

    /// Everything as JSON, for `gpusession status` and bug reports.
    #[zbus(out_args("json"))]
    async fn describe(&self) -> String {
        describe(&self.shared).to_string()
    }

    #[zbus(signal)]
    pub(super) async fn lease_new(
        emitter: &SignalEmitter<'_>,
        id: &str,
        path: OwnedObjectPath,
    ) -> zbus::Result<()>;
    #[zbus(signal)]
    pub(super) async fn lease_removed(
        emitter: &SignalEmitter<'_>,
        id: &str,
        path: OwnedObjectPath,
        reason: &str,
    ) -> zbus::Result<()>;
    #[zbus(signal)]
    pub(super) async fn device_new(
        emitter: &SignalEmitter<'_>,
        id: &str,
        path: OwnedObjectPath,
    ) -> zbus::Result<()>;
    #[zbus(signal)]
    pub(super) async fn device_removed(
        emitter: &SignalEmitter<'_>,
        id: &str,
        path: OwnedObjectPath,
    ) -> zbus::Result<()>;
    #[zbus(signal)]
    pub(super) async fn server_new(
        emitter: &SignalEmitter<'_>,
        id: &str,
        path: OwnedObjectPath,
    ) -> zbus::Result<()>;
    #[zbus(signal)]
    pub(super) async fn server_removed(
        emitter: &SignalEmitter<'_>,
        id: &str,
        path: OwnedObjectPath,
    ) -> zbus::Result<()>;
    #[zbus(signal)]
    pub(super) async fn prepare_for_lease_loss(
        emitter: &SignalEmitter<'_>,
        id: &str,
        left_usec: u64,
        reason: &str,
    ) -> zbus::Result<()>;

    #[zbus(property(emits_changed_signal = "const"))]
    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    #[zbus(property)]
    fn state(&self) -> &str {
        self.shared.state(&self.shared.snapshot())
    }

    #[zbus(property)]
    fn pool_target(&self) -> u32 {
        self.shared.snapshot().pool().0
    }

    #[zbus(property)]
    fn pool_ready(&self) -> u32 {
        self.shared.snapshot().pool().1
    }

    #[zbus(property, name = "NCurrentLeases")]
    fn n_current_leases(&self) -> u64 {
        self.shared.snapshot().leases.iter().filter(|l| l.state != LeaseState::Pending).count() as u64
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn leases_max(&self) -> u64 {
        u64::from(self.shared.config.access.extra_leases)
    }

    // 0: the server's own; a lease without TTLUSec is renewed for as long as it is wanted.
    #[zbus(property(emits_changed_signal = "const"), name = "LeaseTTLUSec")]
    fn lease_ttl_usec(&self) -> u64 {
        0
    }

    #[zbus(property(emits_changed_signal = "const"), name = "DefaultIdleTimeoutUSec")]
    fn default_idle_timeout_usec(&self) -> u64 {
        0
    }

    #[zbus(property)]
    fn boot_allocation_complete(&self) -> bool {
        self.shared.boot_complete()
    }
}

/// Effective uid of the process behind a pidfd.
fn uid_of(pidfd: &OwnedFd) -> std::io::Result<u32> {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::MetadataExt as _;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let pid = |text: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix("Pid:"));
        line.and_then(|pid| pid.trim().parse::<u32>().ok()).filter(|pid| *pid > 0)
    };
    let ended = || std::io::Error::from(std::io::ErrorKind::NotFound);
    let before = pid(&info).ok_or_else(ended)?;
    let uid = std::fs::metadata(format!("/proc/{before}"))?.uid();
    // A process that ended meanwhile has no pid any more, and its number may be another's.
    let after = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    if pid(&after) == Some(before) { Ok(uid) } else { Err(ended()) }
}

/// Releases a lease when the last copy of its descriptor is closed.
async fn release_at_close(shared: Arc<Shared>, slot: Slot, mut receiver: pipe::Receiver) {
    let mut scrap = [0; 64];
    // Whatever is written into it is thrown away.
    while matches!(receiver.read(&mut scrap).await, Ok(n) if n > 0) {}
    shared.leases.release(slot, "its requester has gone").await;
}

impl Manager {
    fn persistent(&self, uid: u32) -> usize {
        let leases = self.shared.leases.snapshot();
        let snapshot = leases.borrow();
        let mut persistent = self.shared.persistent.lock().unwrap_or_else(|e| e.into_inner());
        persistent.retain(|slot| snapshot.leases.iter().any(|l| l.slot == *slot));
        snapshot.leases.iter().filter(|l| l.uid == uid && persistent.contains(&l.slot)).count()
    }
}

/// `org.gpusession1.Lease`.
pub struct Lease {
    pub(super) shared: Arc<Shared>,
    pub(super) view: LeaseView,
}

impl Lease {
    async fn touch(&self, connection: &Connection, header: &Header<'_>) -> Result<()> {
        let uid = authority::caller(connection, header).await?;
        authorise(&self.shared, uid, Deed::Touch { owner: self.view.uid }).await
    }
}

#[interface(name = "org.gpusession1.Lease", introspection_docs = false)]
impl Lease {
    async fn release(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        self.touch(connection, &header).await?;
        self.shared.leases.release(self.view.slot, "released on request").await;
        Ok(())
    }

    #[zbus(out_args("ttl_usec"))]
    async fn renew(
        &self,
        ttl_usec: u64,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<u64> {
        let _ = ttl_usec; // The server knows how long a lease of its own lasts.
        self.touch(connection, &header).await?;
        Ok(self.shared.leases.renew(&self.view.id).await?.as_micros() as u64)
    }

    async fn set_idle_hint(&self, idle: bool) -> Result<()> {
        Err(BusError::not_supported(format!("the server judges idleness (hint: {idle})")))
    }

    #[zbus(out_args("environment"))]
    async fn get_environment(&self) -> HashMap<String, String> {
        let mut environment: HashMap<String, String> =
            self.shared.config.environment.clone().into_iter().collect();
        if self.view.spec.once {
            environment.insert("GPUSESSION_LEASE".into(), self.view.id.clone());
        }
        environment
    }

    async fn park(&self) -> Result<()> {
        Err(BusError::not_supported("leases are not parked yet"))
    }

    async fn unpark(&self) -> Result<()> {
        Err(BusError::not_supported("leases are not parked yet"))
    }

    #[zbus(signal)]
    pub(super) async fn lost(emitter: &SignalEmitter<'_>, reason: &str) -> zbus::Result<()>;
    #[zbus(signal)]
    pub(super) async fn released(emitter: &SignalEmitter<'_>, reason: &str) -> zbus::Result<()>;

    #[zbus(property(emits_changed_signal = "const"))]
    fn id(&self) -> &str {
        &self.view.id
    }

    #[zbus(property(emits_changed_signal = "const"), name = "UID")]
    fn uid(&self) -> u32 {
        self.view.uid
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn session(&self) -> (String, OwnedObjectPath) {
        (String::new(), OwnedObjectPath::default())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn leader(&self) -> u32 {
        0
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn devices(&self) -> Vec<OwnedObjectPath> {
        self.view.devices.iter().map(|d| device_path(&d.device.uuid)).collect()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn servers(&self) -> Vec<OwnedObjectPath> {
        if self.view.server.is_empty() { vec![] } else { vec![server_path(&self.view.server)] }
    }

    #[zbus(property)]
    fn state(&self) -> &str {
        self.view.state.as_str()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn class(&self) -> &str {
        self.view.spec.class.as_str()
    }

    #[zbus(property(emits_changed_signal = "const"), name = "CreatedUSec")]
    fn created_usec(&self) -> u64 {
        self.view.created_usec
    }

    // Renewed all the time: whoever wants to know asks.
    #[zbus(property(emits_changed_signal = "false"), name = "ExpiresAtUSec")]
    fn expires_at_usec(&self) -> u64 {
        let leases = self.shared.leases.snapshot();
        let snapshot = leases.borrow();
        snapshot.lease(&self.view.id).map_or(self.view.expires_usec, |l| l.expires_usec)
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn idle_since_hint(&self) -> u64 {
        0
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn idle_since_hint_monotonic(&self) -> u64 {
        0
    }

    #[zbus(property(emits_changed_signal = "const"), name = "IdleTimeoutUSec")]
    fn idle_timeout_usec(&self) -> u64 {
        0
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn fencing_token(&self) -> u64 {
        self.view.fencing_token
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn memory_limit_bytes(&self) -> u64 {
        self.view.devices.iter().map(|d| d.device.limit_bytes).min().unwrap_or(0)
    }

    #[zbus(property(emits_changed_signal = "const"), name = "SMPercent")]
    fn sm_percent(&self) -> u32 {
        self.view.spec.sm_percent
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn priority(&self) -> &str {
        self.view.spec.priority.as_str()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn sharing(&self) -> &str {
        self.view.spec.sharing.map_or("", |s| s.as_str())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn transport(&self) -> &str {
        if self.view.devices.is_empty() {
            ""
        } else if self.view.encrypted {
            "tcp+tls"
        } else {
            "tcp"
        }
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn transport_reason(&self) -> &str {
        ""
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn who(&self) -> &str {
        &self.view.spec.who
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn why(&self) -> &str {
        &self.view.spec.why
    }
}

/// `org.gpusession1.Device`.
pub struct Device {
    pub(super) view: DeviceView,
    pub(super) leases: Vec<OwnedObjectPath>,
}

pub(super) fn state_of(view: &DeviceView) -> &str {
    if view.device.state.is_empty() { "leased" } else { &view.device.state }
}

#[interface(name = "org.gpusession1.Device", introspection_docs = false)]
impl Device {
    #[zbus(property(emits_changed_signal = "const"), name = "UUID")]
    fn uuid(&self) -> &str {
        &self.view.device.uuid
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn name(&self) -> &str {
        &self.view.device.name
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn server(&self) -> OwnedObjectPath {
        server_path(&self.view.server)
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn ordinal(&self) -> u32 {
        self.view.ordinal
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn memory_total_bytes(&self) -> u64 {
        self.view.device.memory_bytes
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn memory_free_bytes(&self) -> u64 {
        self.view.device.memory_free_bytes
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn compute_capability(&self) -> (u32, u32) {
        (self.view.device.compute_major, self.view.device.compute_minor)
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn driver_version(&self) -> &str {
        &self.view.driver_version
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn cuda_version(&self) -> String {
        cuda_version(self.view.cuda_version)
    }

    #[zbus(property)]
    fn health(&self) -> &str {
        if state_of(&self.view) == "broken" { "broken" } else { "ok" }
    }

    #[zbus(property)]
    fn state(&self) -> &str {
        state_of(&self.view)
    }

    #[zbus(property)]
    fn leases(&self) -> Vec<OwnedObjectPath> {
        self.leases.clone()
    }

    #[zbus(property(emits_changed_signal = "const"), name = "PCIAddress")]
    fn pci_address(&self) -> &str {
        &self.view.device.pci_address
    }
}

/// `org.gpusession1.Server`.
pub struct Server {
    pub(super) shared: Arc<Shared>,
    pub(super) index: usize,
    pub(super) view: ServerView,
}

impl Server {
    fn now(&self) -> ServerView {
        self.shared
            .leases
            .snapshot()
            .borrow()
            .servers
            .get(self.index)
            .cloned()
            .unwrap_or_else(|| self.view.clone())
    }
}

#[interface(name = "org.gpusession1.Server", introspection_docs = false)]
impl Server {
    async fn drain(
        &self,
        enable: bool,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let uid = authority::caller(connection, &header).await?;
        authorise(&self.shared, uid, Deed::ManagePool).await?;
        Err(BusError::not_supported(format!("a server is drained on the server itself ({enable})")))
    }

    #[zbus(out_args("rtt_usec"))]
    async fn ping(&self) -> Result<u64> {
        Ok(self.shared.leases.ping(self.index).await?.as_micros() as u64)
    }

    async fn reconnect(&self) -> Result<()> {
        self.shared.leases.ping(self.index).await?;
        Ok(())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn name(&self) -> &str {
        &self.view.name
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn addresses(&self) -> Vec<String> {
        vec![self.view.address.clone()]
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn transport(&self) -> &str {
        "tcp+tls"
    }

    #[zbus(property)]
    fn state(&self) -> &str {
        &self.view.state
    }

    #[zbus(property(emits_changed_signal = "false"), name = "LastSeenUSec")]
    fn last_seen_usec(&self) -> u64 {
        self.now().last_seen_usec
    }

    #[zbus(property(emits_changed_signal = "false"), name = "RTTUSec")]
    fn rtt_usec(&self) -> u64 {
        self.now().rtt_usec
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn protocol_version(&self) -> u32 {
        self.now().protocol
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn software(&self) -> String {
        self.now().software
    }

    #[zbus(property(emits_changed_signal = "false"), name = "NDevices")]
    fn n_devices(&self) -> u32 {
        self.now().devices
    }

    #[zbus(property(emits_changed_signal = "false"), name = "NFree")]
    fn n_free(&self) -> u32 {
        self.now().free
    }
}

fn cuda_version(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn usec(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

fn describe(shared: &Shared) -> serde_json::Value {
    use serde_json::json;
    let snapshot = shared.leases.snapshot().borrow().clone();
    let (target, ready) = snapshot.pool();
    json!({
        "schema": 1,
        "version": env!("CARGO_PKG_VERSION"),
        "state": shared.state(&snapshot),
        "gpus_wanted": target,
        "gpus_leased": ready,
        "boot_allocation_complete": shared.boot_complete(),
        "configuration": shared.config.files,
        "environment": shared.config.environment,
        "leases": snapshot.leases.iter().filter(|l| super::publisher::shown(l)).map(|l| json!({
            "id": l.id,
            "name": l.spec.name,
            "state": l.state.as_str(),
            "class": l.spec.class.as_str(),
            "uid": (l.uid != u32::MAX).then_some(l.uid),
            "user": l.spec.user,
            "gpus": l.spec.gpus,
            "server": l.server,
            "memory_limit_bytes": l.devices.iter().map(|d| d.device.limit_bytes).min(),
            "sm_percent": l.spec.sm_percent,
            "created_usec": l.created_usec,
            "expires_usec": l.expires_usec,
            "processes": l.processes,
            "encrypted": l.encrypted,
            "trouble": l.trouble.as_ref().map(|t| &t.message),
            "retry_in_usec": l.retry_in.map(usec),
            "who": l.spec.who,
            "why": l.spec.why,
            "devices": l.devices.iter().map(|d| json!({
                "ordinal": d.ordinal,
                "uuid": d.device.uuid,
                "name": d.device.name,
                "state": state_of(d),
                "memory_bytes": d.device.memory_bytes,
                "limit_bytes": d.device.limit_bytes,
                "compute_capability": format!("{}.{}", d.device.compute_major, d.device.compute_minor),
                "pci_address": d.device.pci_address,
                "driver_version": d.driver_version,
                "cuda_version": cuda_version(d.cuda_version),
            })).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
        "servers": snapshot.servers.iter().map(|s| json!({
            "name": s.name,
            "address": s.address,
            "state": s.state,
            "trouble": (!s.trouble.is_empty()).then_some(&s.trouble),
            "last_seen_usec": s.last_seen_usec,
            "rtt_usec": s.rtt_usec,
            "software": s.software,
            "protocol": s.protocol,
            "gpus": s.devices,
            "gpus_free": s.free,
        })).collect::<Vec<_>>(),
    })
}
