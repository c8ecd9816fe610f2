//! The D-Bus objects: manager, leases, devices, servers.

use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use zbus::message::Header;
use zbus::object_server::SignalEmitter;
use zbus::{Connection, OwnedFd, OwnedObjectPath, OwnedVariant, interface};

use super::authority::{Call, Creating, Deed};
use super::error::{BusError, Result};
use super::publisher::DeviceEntry;
use super::{PUBLISH_TIMEOUT, Shared, device_path, lease_path, request, server_path};
use crate::keep::Kept;
use crate::leases::{Caller, DeviceView, LeaseState, LeaseView, Owner, ServerView, Slot, Snapshot, Spec};
use crate::login::Session;
use crate::pool::Trouble;
use crate::values::path_element;

/// `CreateLease` flag: the lease outlives its requester.
const PERSISTENT: u64 = 1;
/// Most GPUs that `Preallocate` holds.
const MAX_AHEAD: u32 = 64;
/// Time that `CanCreateLease` waits for a server's description.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// Grace period before `Server.Drain` releases a server's leases.
const DRAIN_GRACE: Duration = Duration::from_secs(60);

/// Data that an object shows.
///
/// It changes while calls on the object are in progress, so no call holds the lock.
pub(super) struct Shown<T>(RwLock<Arc<T>>);

impl<T> Shown<T> {
    pub(super) fn new(value: T) -> Self {
        Self(RwLock::new(Arc::new(value)))
    }

    pub(super) fn get(&self) -> Arc<T> {
        self.0.read().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Replaces the data and returns the previous data.
    pub(super) fn set(&self, value: T) -> Arc<T> {
        std::mem::replace(&mut *self.0.write().unwrap_or_else(|e| e.into_inner()), Arc::new(value))
    }
}

/// Object with the interface `org.gpusession1.Manager`.
pub struct Manager {
    pub(super) shared: Arc<Shared>,
}

/// A row of `ListDevices` and `ListServers`.
type Row = (String, String, String, OwnedObjectPath);

/// Finds a lease by id, or by name if exactly one pending lease has that name.
fn lease<'a>(snapshot: &'a Snapshot, id: &str) -> Result<&'a LeaseView> {
    let shown = |l: &&LeaseView| super::publisher::shown(l);
    if let Some(found) = snapshot.lease(id).filter(shown) {
        return Ok(found);
    }
    let waits = |l: &&LeaseView| l.spec.name == id && l.state == LeaseState::Pending;
    let named: Vec<_> = snapshot.leases.iter().filter(shown).filter(waits).collect();
    match named[..] {
        [found] => Ok(found),
        [] => Err(BusError::no_such_lease(format!("lease {id}: not found"))),
        _ => {
            let ids: Vec<_> = named.iter().map(|l| l.id.as_str()).collect();
            Err(BusError::no_such_lease(format!(
                "lease {id}: several pending leases have this name; use one of {}",
                ids.join(", ")
            )))
        }
    }
}

impl Manager {
    /// Finds a lease that the caller may change.
    async fn touch(&self, call: &Call<'_>, id: &str) -> Result<LeaseView> {
        let view = lease(&self.shared.snapshot(), id)?.clone();
        call.may(Deed::Touch { owner: view.uid }).await?;
        Ok(view)
    }

    /// Finds a login session by its id or logind's.
    fn session(&self, id: &str) -> Result<Arc<Session>> {
        let leases = self.shared.leases.snapshot();
        let snapshot = leases.borrow();
        let found = snapshot.sessions.iter().find(|s| s.id == id || s.logind.as_deref() == Some(id)).cloned();
        found.ok_or_else(|| BusError::no_such_session(format!("session {id}: not found")))
    }

    /// Finds the index of a server by name.
    fn server(&self, name: &str) -> Result<usize> {
        let snapshot = self.shared.snapshot();
        let found = snapshot.servers.iter().position(|s| s.name == name);
        found.ok_or_else(|| BusError::no_such_server(format!("server {name}: not found")))
    }

    /// Lists the leases that a process of this user gets without naming one.
    async fn leases_of(&self, uid: u32, pid: u32, session: Option<String>) -> Vec<OwnedObjectPath> {
        let person = self.shared.settings.gate().person(uid).await;
        let caller = Caller { uid, pid, user: person.name, access: person.access, session };
        let slots = self.shared.leases.of(caller).await;
        let snapshot = self.shared.snapshot();
        snapshot.leases.iter().filter(|l| slots.contains(&l.slot)).map(|l| lease_path(&l.id)).collect()
    }

    /// Action that requesting a lease for `owner` needs permission for.
    fn deed(caller: u32, owner: u32) -> Deed {
        if owner == caller { Deed::CreateLease } else { Deed::CreateLeaseForOther }
    }

    /// Sets a request's owner: the session's user, else the user of `UID`, else the caller.
    fn owner(&self, request: &mut request::Request, uid: u32) -> Result<u32> {
        let mut owner = request.uid.unwrap_or(uid);
        if let Some(id) = &request.session {
            let session = self.session(id)?;
            if request.uid.is_some_and(|named| named != session.uid) {
                return Err(BusError::invalid_args(format!(
                    "session {id}: belongs to another user than UID names"
                )));
            }
            owner = session.uid;
            request.spec.session = Some(session.id.clone());
        }
        request.spec.owner = Owner::Uid(owner);
        Ok(owner)
    }

    /// Returns `true` if a server has room for a lease now.
    ///
    /// Asks the servers, since other clients use them too.
    async fn has_room(&self, spec: &Spec) -> bool {
        let mut asked = tokio::task::JoinSet::new();
        for (index, server) in self.shared.snapshot().servers.iter().enumerate() {
            let named = |name: &String| *name == server.name || *name == server.address;
            if server.state == "online" && (spec.servers.is_empty() || spec.servers.iter().any(named)) {
                let (leases, spec) = (self.shared.leases.clone(), spec.clone());
                asked.spawn(async move {
                    let answer = tokio::time::timeout(ASK_TIMEOUT, leases.ask(index)).await;
                    matches!(answer, Ok(Ok((_, said))) if said.state == "online" && spec.fits(&said.devices))
                });
            }
        }
        while let Some(answer) = asked.join_next().await {
            if answer.unwrap_or(false) {
                return true;
            }
        }
        false
    }

    /// Waits until the publisher has exported or removed the objects that a reply names.
    async fn published(&self, test: impl FnMut(&Arc<Snapshot>) -> bool) {
        let mut published = self.shared.published.subscribe();
        let _ = tokio::time::timeout(PUBLISH_TIMEOUT, published.wait_for(test)).await;
    }
}

#[interface(name = "org.gpusession1.Manager", introspection_docs = false)]
impl Manager {
    /// Leases: id, uid, state, path, expiry in microseconds since the epoch.
    #[zbus(out_args("leases"))]
    async fn list_leases(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<Vec<(String, u32, String, OwnedObjectPath, u64)>> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        let snapshot = self.shared.snapshot();
        let shown = snapshot.leases.iter().filter(|l| super::publisher::shown(l));
        Ok(shown
            .map(|l| (l.id.clone(), l.uid, l.state.as_str().into(), lease_path(&l.id), l.expires_usec))
            .collect())
    }

    #[zbus(out_args("devices"))]
    async fn list_devices(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<Vec<Row>> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        let devices = super::publisher::devices(&self.shared.snapshot()).into_iter();
        Ok(devices
            .map(|(uuid, entry)| {
                let path = device_path(&uuid);
                (uuid, entry.view.device.name.clone(), state_of(&entry.view).into(), path)
            })
            .collect())
    }

    #[zbus(out_args("servers"))]
    async fn list_servers(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<Vec<Row>> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        let snapshot = self.shared.snapshot();
        let servers = snapshot.servers.iter();
        Ok(servers
            .map(|s| (s.name.clone(), s.address.clone(), s.state.clone(), server_path(&s.name)))
            .collect())
    }

    #[zbus(out_args("path"))]
    async fn get_lease(
        &self,
        id: &str,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<OwnedObjectPath> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        Ok(lease_path(&lease(&self.shared.snapshot(), id)?.id))
    }

    #[zbus(out_args("path"))]
    async fn get_device(
        &self,
        id: &str,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<OwnedObjectPath> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        let known = super::publisher::devices(&self.shared.snapshot()).contains_key(id);
        if known {
            Ok(device_path(id))
        } else {
            Err(BusError::no_such_device(format!("device {id}: not found in any lease")))
        }
    }

    #[zbus(out_args("path"))]
    async fn get_server(
        &self,
        id: &str,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<OwnedObjectPath> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        let known = self.shared.snapshot().servers.iter().any(|s| s.name == id);
        if known {
            Ok(server_path(id))
        } else {
            Err(BusError::no_such_server(format!("server {id}: not found")))
        }
    }

    #[zbus(name = "GetLeaseByPIDFD", out_args("leases"))]
    async fn get_lease_by_pidfd(
        &self,
        pidfd: OwnedFd,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<Vec<OwnedObjectPath>> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        let (pid, uid) = identify(&pidfd)
            .map_err(|e| BusError::invalid_args(format!("not the pidfd of a process: {e}")))?;
        let session = self.shared.sessions.as_ref().and_then(|s| s.of(uid, pid, None));
        Ok(self.leases_of(uid, pid, session.map(|s| s.id.clone())).await)
    }

    #[zbus(out_args("leases"))]
    async fn get_lease_by_session(
        &self,
        session: &str,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<Vec<OwnedObjectPath>> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        let session = self.session(session)?;
        Ok(self.leases_of(session.uid, 0, Some(session.id.clone())).await)
    }

    #[zbus(out_args("id", "path", "lease_fd"))]
    async fn create_lease(
        &self,
        request: HashMap<String, OwnedVariant>,
        flags: u64,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(String, OwnedObjectPath, OwnedFd)> {
        let call = Call::begin(&self.shared, connection, &header).await?;
        let uid = call.uid;
        let mut key = [0; 12];
        getrandom::fill(&mut key).map_err(|e| BusError::failed(e.to_string()))?;
        let mut request = request::read(request, format!("request/{}", crate::places::hex(&key)), uid)?;
        if flags & !PERSISTENT != 0 {
            return Err(BusError::invalid_args(format!("unknown flags {flags:#x}")));
        }
        let persistent = flags & PERSISTENT != 0;
        if persistent && request.spec.ttl.is_none() {
            return Err(BusError::invalid_args("a persistent lease needs TTLUSec"));
        }
        let owner = self.owner(&mut request, uid)?;
        call.may(Self::deed(uid, owner)).await?;
        let creating = Creating::begin(&self.shared, uid, owner, persistent)?;
        let mut spec = request.spec;
        spec.persistent = persistent;
        spec.user = self.shared.settings.gate().person(owner).await.name.unwrap_or_default();
        let key = spec.key.clone();
        let view = self.shared.leases.create(spec).await?;
        drop(creating);
        let (sender, receiver) = pipe::pipe().map_err(|e| BusError::failed(e.to_string()))?;
        let fd = sender.into_blocking_fd().map_err(|e| BusError::failed(e.to_string()))?;
        if !persistent {
            let name = Kept::LeaseFd { key }.name();
            if let Some(store) = self.shared.store {
                store.put(&name, receiver.as_fd());
            }
            tokio::spawn(release_at_close(self.shared.clone(), view.slot, name, receiver));
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
        let call = Call::begin(&self.shared, connection, &header).await?;
        let mut request = request::read(request, String::new(), call.uid)?;
        let owner = self.owner(&mut request, call.uid)?;
        let answer = call.could(Self::deed(call.uid, owner)).await;
        if answer == "no" || !Creating::could(&self.shared, call.uid, owner) {
            return Ok("no".into());
        }
        Ok(if self.has_room(&request.spec).await { answer } else { "busy" }.into())
    }

    async fn renew_lease(
        &self,
        id: &str,
        ttl_usec: u64,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let call = Call::begin(&self.shared, connection, &header).await?;
        let view = self.touch(&call, id).await?;
        renew(&self.shared, &view.id, ttl_usec).await?;
        Ok(())
    }

    async fn release_lease(
        &self,
        id: &str,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let call = Call::begin(&self.shared, connection, &header).await?;
        let view = self.touch(&call, id).await?;
        self.shared.leases.release(view.slot, "released on request").await;
        self.published(|s| s.lease(&view.id).is_none()).await;
        Ok(())
    }

    async fn release_session(
        &self,
        session: &str,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let call = Call::begin(&self.shared, connection, &header).await?;
        let session = self.session(session)?;
        call.may(Deed::Touch { owner: session.uid }).await?;
        let snapshot = self.shared.leases.snapshot().borrow().clone();
        let bound: Vec<Slot> = snapshot
            .leases
            .iter()
            .filter(|l| l.spec.session.as_deref() == Some(session.id.as_str()))
            .map(|l| l.slot)
            .collect();
        for slot in &bound {
            self.shared.leases.release(*slot, "released on request").await;
        }
        self.published(|s| !s.leases.iter().any(|l| bound.contains(&l.slot))).await;
        Ok(())
    }

    async fn drain_server(
        &self,
        server: &str,
        enable: bool,
        grace_usec: u64,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let call = Call::begin(&self.shared, connection, &header).await?;
        let index = self.server(server)?;
        call.may(Deed::ManagePool).await?;
        self.shared.leases.drain(index, enable.then_some(Duration::from_micros(grace_usec))).await;
        Ok(())
    }

    async fn preallocate(
        &self,
        count: u32,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let call = Call::begin(&self.shared, connection, &header).await?;
        call.may(Deed::ManagePool).await?;
        if count > MAX_AHEAD {
            return Err(BusError::invalid_args(format!("at most {MAX_AHEAD} GPUs can be preallocated")));
        }
        self.shared.leases.preallocate(count).await;
        Ok(())
    }

    async fn reload(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let call = Call::begin(&self.shared, connection, &header).await?;
        call.may(Deed::ManagePool).await?;
        self.shared.settings.reload().await.map_err(|e| BusError::invalid_file(e.to_string()))
    }

    /// Everything as JSON, for `gpusession status` and bug reports.
    #[zbus(out_args("json"))]
    async fn describe(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String> {
        let call = Call::begin(&self.shared, connection, &header).await?;
        Ok(super::describe::describe(&self.shared, call.uid).to_string())
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

    #[zbus(property)]
    fn leases_max(&self) -> u64 {
        u64::from(self.shared.settings.get().access.extra_leases)
    }

    // Lifetime of a lease without TTLUSec after its last renewal; the daemon renews it while it is
    // wanted.
    #[zbus(property, name = "LeaseTTLUSec")]
    pub(super) fn lease_ttl_usec(&self) -> u64 {
        shortest(&self.shared.snapshot(), |s| s.lease_ttl_usec)
    }

    #[zbus(property, name = "DefaultIdleTimeoutUSec")]
    pub(super) fn default_idle_timeout_usec(&self) -> u64 {
        shortest(&self.shared.snapshot(), |s| s.idle_timeout_usec)
    }

    #[zbus(property)]
    fn boot_allocation_complete(&self) -> bool {
        self.shared.boot_complete()
    }
}

/// Returns the shortest of the servers' times that are not 0; 0 if all are.
pub(super) fn shortest(snapshot: &Snapshot, time: impl Fn(&ServerView) -> u64) -> u64 {
    snapshot.servers.iter().map(time).filter(|usec| *usec > 0).min().unwrap_or(0)
}

/// Returns pid and effective uid of the process behind a pidfd.
fn identify(pidfd: &OwnedFd) -> std::io::Result<(u32, u32)> {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::MetadataExt as _;
    let info = || std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()));
    let pid = |text: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix("Pid:"));
        line.and_then(|pid| pid.trim().parse::<u32>().ok()).filter(|pid| *pid > 0)
    };
    let ended = || std::io::Error::from(std::io::ErrorKind::NotFound);
    let before = pid(&info()?).ok_or_else(ended)?;
    // The owner of this directory is the effective uid, even of a process that is not dumpable.
    let uid = std::fs::metadata(format!("/proc/{before}"))?.uid();
    // The pidfd of an exited process has no pid, and the number may belong to another process.
    if pid(&info()?) == Some(before) { Ok((before, uid)) } else { Err(ended()) }
}

/// Releases a lease when the last copy of its descriptor is closed.
async fn release_at_close(shared: Arc<Shared>, slot: Slot, kept: String, mut receiver: pipe::Receiver) {
    let mut scrap = [0; 64];
    // Data that is written into the pipe is discarded.
    while matches!(receiver.read(&mut scrap).await, Ok(n) if n > 0) {}
    shared.leases.release(slot, "its requester closed the lease descriptor").await;
    if let Some(store) = shared.store {
        store.remove(&kept);
    }
}

/// Continues to watch the lease descriptors that an earlier daemon stored.
///
/// A lease whose descriptor did not come back is released: its requester's exit would go unnoticed.
pub(super) fn resume(shared: &Arc<Shared>, mut lease_fds: HashMap<String, std::os::fd::OwnedFd>) {
    let snapshot = shared.leases.snapshot().borrow().clone();
    for view in snapshot.leases.iter().filter(|l| l.spec.once && !l.spec.persistent) {
        let key = view.spec.key.clone();
        let receiver = lease_fds.remove(&key).and_then(|fd| pipe::Receiver::from_owned_fd(fd).ok());
        let (shared, slot, kept) = (shared.clone(), view.slot, Kept::LeaseFd { key }.name());
        match receiver {
            Some(receiver) => drop(tokio::spawn(release_at_close(shared, slot, kept, receiver))),
            None => drop(tokio::spawn(async move {
                shared.leases.release(slot, "its requester can no longer be watched").await
            })),
        }
    }
    for key in lease_fds.into_keys() {
        if let Some(store) = shared.store {
            store.remove(&Kept::LeaseFd { key }.name());
        }
    }
}

/// Renews a lease; returns the time that it has left, in microseconds.
async fn renew(shared: &Shared, id: &str, ttl_usec: u64) -> Result<u64> {
    let ttl = (ttl_usec > 0).then(|| Duration::from_micros(ttl_usec));
    match shared.leases.renew(id, ttl).await {
        Ok(left) => Ok(usec(left)),
        Err(e) if e.trouble == Trouble::NoSuchLease => Err(BusError::lease_lost(e.message)),
        Err(e) => Err(e.into()),
    }
}

/// Object with the interface `org.gpusession1.Lease`.
pub struct Lease {
    pub(super) shared: Arc<Shared>,
    pub(super) view: Shown<LeaseView>,
}

impl Lease {
    /// Returns the lease as last shown, if the caller may change it.
    async fn touch(&self, connection: &Connection, header: &Header<'_>) -> Result<Arc<LeaseView>> {
        let view = self.view.get();
        let call = Call::begin(&self.shared, connection, header).await?;
        call.may(Deed::Touch { owner: view.uid }).await?;
        Ok(view)
    }
}

#[interface(name = "org.gpusession1.Lease", introspection_docs = false)]
impl Lease {
    async fn release(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let view = self.touch(connection, &header).await?;
        self.shared.leases.release(view.slot, "released on request").await;
        Ok(())
    }

    #[zbus(out_args("ttl_usec"))]
    async fn renew(
        &self,
        ttl_usec: u64,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<u64> {
        let view = self.touch(connection, &header).await?;
        renew(&self.shared, &view.id, ttl_usec).await
    }

    async fn set_idle_hint(
        &self,
        idle: bool,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let view = self.touch(connection, &header).await?;
        Ok(self.shared.leases.idle_hint(view.slot, idle).await?)
    }

    #[zbus(out_args("environment"))]
    async fn get_environment(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<HashMap<String, String>> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        let mut environment: HashMap<String, String> =
            self.shared.settings.get().environment.clone().into_iter().collect();
        let view = self.view.get();
        if view.spec.once {
            environment.insert("GPUSESSION_LEASE".into(), view.id.clone());
        }
        Ok(environment)
    }

    async fn park(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let view = self.touch(connection, &header).await?;
        Ok(self.shared.leases.park(view.slot, true).await?)
    }

    async fn unpark(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let view = self.touch(connection, &header).await?;
        Ok(self.shared.leases.park(view.slot, false).await?)
    }

    #[zbus(signal)]
    pub(super) async fn lost(emitter: &SignalEmitter<'_>, reason: &str) -> zbus::Result<()>;
    #[zbus(signal)]
    pub(super) async fn released(emitter: &SignalEmitter<'_>, reason: &str) -> zbus::Result<()>;

    #[zbus(property(emits_changed_signal = "const"))]
    fn id(&self) -> String {
        self.view.get().id.clone()
    }

    #[zbus(property, name = "UID")]
    fn uid(&self) -> u32 {
        self.view.get().uid
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn session(&self) -> (String, OwnedObjectPath) {
        let view = self.view.get();
        let Some(id) = &view.spec.session else { return (String::new(), OwnedObjectPath::default()) };
        // Object path at logind, so that tools find the login; the root path if logind has no such
        // session.
        let leases = self.shared.leases.snapshot();
        let logind = leases.borrow().sessions.iter().find(|s| s.id == *id).and_then(|s| s.logind.clone());
        let path = logind.map(|id| format!("/org/freedesktop/login1/session/{}", path_element(&id)));
        (id.clone(), path.and_then(|p| OwnedObjectPath::try_from(p).ok()).unwrap_or_default())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn leader(&self) -> u32 {
        self.view.get().leader
    }

    // A lease that was lent may come back on other GPUs.
    #[zbus(property)]
    fn devices(&self) -> Vec<OwnedObjectPath> {
        device_paths(&self.view.get())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn servers(&self) -> Vec<OwnedObjectPath> {
        let view = self.view.get();
        if view.server.is_empty() { vec![] } else { vec![server_path(&view.server)] }
    }

    #[zbus(property)]
    fn state(&self) -> &str {
        self.view.get().state.as_str()
    }

    // Place in the queue and the queue's length; 0 of 0 without a queue.
    #[zbus(property)]
    fn queue_position(&self) -> (u32, u32) {
        waits_at(&self.view.get())
    }

    #[zbus(property)]
    fn waits_for(&self) -> String {
        waits_for(&self.view.get()).to_owned()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn class(&self) -> &str {
        self.view.get().spec.class.as_str()
    }

    #[zbus(property(emits_changed_signal = "const"), name = "CreatedUSec")]
    fn created_usec(&self) -> u64 {
        self.view.get().created_usec
    }

    // Every heartbeat changes it, so it has no change signal.
    #[zbus(property(emits_changed_signal = "false"), name = "ExpiresAtUSec")]
    fn expires_at_usec(&self) -> u64 {
        let leases = self.shared.leases.snapshot();
        let view = self.view.get();
        let snapshot = leases.borrow();
        snapshot.lease(&view.id).map_or(view.expires_usec, |l| l.expires_usec)
    }

    #[zbus(property)]
    fn idle_since_hint(&self) -> u64 {
        self.view.get().idle_since_usec.0
    }

    // On the clock that includes suspended time.
    #[zbus(property)]
    fn idle_since_hint_monotonic(&self) -> u64 {
        self.view.get().idle_since_usec.1
    }

    // 0 for never or unknown.
    #[zbus(property, name = "IdleTimeoutUSec")]
    fn idle_timeout_usec(&self) -> u64 {
        self.view.get().idle_timeout_usec
    }

    #[zbus(property)]
    fn fencing_token(&self) -> u64 {
        self.view.get().fencing_token
    }

    #[zbus(property)]
    fn memory_limit_bytes(&self) -> u64 {
        memory_limit(&self.view.get())
    }

    #[zbus(property, name = "SMPercent")]
    fn sm_percent(&self) -> u32 {
        sm_percent(&self.view.get())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn priority(&self) -> &str {
        self.view.get().spec.priority.as_str()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn sharing(&self) -> &str {
        self.view.get().spec.sharing.map_or("", |s| s.as_str())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn transport(&self) -> &str {
        self.view.get().transport().0
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn transport_reason(&self) -> &str {
        self.view.get().transport().1
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn who(&self) -> String {
        self.view.get().spec.who.clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn why(&self) -> String {
        self.view.get().spec.why.clone()
    }
}

/// Returns the object paths of a lease's GPUs.
pub(super) fn device_paths(view: &LeaseView) -> Vec<OwnedObjectPath> {
    view.devices.iter().map(|d| device_path(&d.device.uuid)).collect()
}

/// Returns the bytes of each GPU's memory that a lease may use; 0 if unknown.
pub(super) fn memory_limit(view: &LeaseView) -> u64 {
    view.devices.iter().map(|d| d.device.limit_bytes).min().unwrap_or(0)
}

/// Returns the share of each GPU's multiprocessors: as granted, before the grant as requested.
pub(super) fn sm_percent(view: &LeaseView) -> u32 {
    // Servers that predate shares send 0.
    let granted = view.devices.iter().map(|d| d.device.sm_percent).filter(|percent| *percent != 0);
    granted.min().unwrap_or(view.spec.sm_percent)
}

/// Returns place and length of a server's queue; zeros without a queue.
pub(super) fn waits_at(view: &LeaseView) -> (u32, u32) {
    view.waits().and_then(|t| t.place).unwrap_or_default()
}

/// Returns why a pending lease is not held, or a parked one does not come back.
pub(super) fn waits_for(view: &LeaseView) -> &str {
    view.waits().map_or("", |t| &t.message)
}

/// Object with the interface `org.gpusession1.Device`.
pub struct Device {
    pub(super) shared: Arc<Shared>,
    pub(super) shown: Shown<DeviceEntry>,
}

pub(super) fn state_of(view: &DeviceView) -> &str {
    if view.device.state.is_empty() { "leased" } else { &view.device.state }
}

pub(super) fn health_of(view: &DeviceView) -> &'static str {
    if state_of(view) == "broken" { "broken" } else { "ok" }
}

#[interface(name = "org.gpusession1.Device", introspection_docs = false)]
impl Device {
    #[zbus(property(emits_changed_signal = "const"), name = "UUID")]
    fn uuid(&self) -> String {
        self.shown.get().view.device.uuid.clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn name(&self) -> String {
        self.shown.get().view.device.name.clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn server(&self) -> OwnedObjectPath {
        server_path(&self.shown.get().view.server)
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn ordinal(&self) -> u32 {
        self.shown.get().view.ordinal
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn memory_total_bytes(&self) -> u64 {
        self.shown.get().view.device.memory_bytes
    }

    // Every heartbeat may change it, so it has no change signal.
    #[zbus(property(emits_changed_signal = "false"))]
    fn memory_free_bytes(&self) -> u64 {
        let device = &self.shown.get().view.device;
        let leases = self.shared.leases.snapshot();
        let snapshot = leases.borrow();
        let mut devices = snapshot.leases.iter().flat_map(|l| &l.devices).map(|d| &d.device);
        devices.find(|d| d.uuid == device.uuid).unwrap_or(device).memory_free_bytes
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn compute_capability(&self) -> (u32, u32) {
        (self.shown.get().view.device.compute_major, self.shown.get().view.device.compute_minor)
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn driver_version(&self) -> String {
        self.shown.get().view.driver_version.clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn cuda_version(&self) -> String {
        cuda_version(self.shown.get().view.cuda_version)
    }

    #[zbus(property)]
    fn health(&self) -> &str {
        health_of(&self.shown.get().view)
    }

    #[zbus(property)]
    fn state(&self) -> String {
        state_of(&self.shown.get().view).to_owned()
    }

    #[zbus(property)]
    fn leases(&self) -> Vec<OwnedObjectPath> {
        self.shown.get().leases.clone()
    }

    #[zbus(property(emits_changed_signal = "const"), name = "PCIAddress")]
    fn pci_address(&self) -> String {
        self.shown.get().view.device.pci_address.clone()
    }
}

/// Object with the interface `org.gpusession1.Server`.
pub struct Server {
    pub(super) shared: Arc<Shared>,
    pub(super) index: usize,
    pub(super) view: Shown<ServerView>,
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
            .unwrap_or_else(|| ServerView::clone(&self.view.get()))
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
        let call = Call::begin(&self.shared, connection, &header).await?;
        call.may(Deed::ManagePool).await?;
        self.shared.leases.drain(self.index, enable.then_some(DRAIN_GRACE)).await;
        Ok(())
    }

    #[zbus(out_args("rtt_usec"))]
    async fn ping(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<u64> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        let (round_trip, _) = self.shared.leases.ask(self.index).await?;
        Ok(usec(round_trip))
    }

    async fn reconnect(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        self.shared.leases.ask(self.index).await?;
        Ok(())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn name(&self) -> String {
        self.view.get().name.clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn addresses(&self) -> Vec<String> {
        vec![self.view.get().address.clone()]
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn transport(&self) -> &str {
        "tcp+tls"
    }

    #[zbus(property)]
    fn state(&self) -> String {
        self.view.get().state.clone()
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

pub(super) fn cuda_version(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn usec(duration: Duration) -> u64 {
    duration.as_micros() as u64
}
