//! The manager's object: lists, searches, requests and changes of leases.

use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use gpusession_bus::request::PERSISTENT;
use gpusession_bus::{device_path, lease_path, server_path};
use tokio::net::unix::pipe;
use zbus::message::Header;
use zbus::object_server::SignalEmitter;
use zbus::{Connection, OwnedFd, OwnedObjectPath, OwnedVariant, interface};

use super::announce::announce;
use super::authorize::{Call, Creating, Deed};
use super::error::{BusError, Result};
use super::lease::renew;
use super::lease_fd::release_at_close;
use super::project::{expires_usec, shortest, state_of};
use super::request;
use super::shared::Shared;
use crate::access::Person;
use crate::handover::Kept;
use crate::leases::{
    Caller, LeaseFacts, LeaseState, Owner, STOPPED, ServerFacts, Session, Slot, Snapshot, Spec,
};
use crate::peer::control_groups;
use crate::pool::{PoolError, Trouble};

/// Longest time that a reply waits for the export of the objects that it names.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(2);

/// Most GPUs that `Preallocate` holds.
const MAX_AHEAD: u32 = 64;
/// Time that `CanCreateLease` waits for a server's description.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);

/// Object with the interface `org.gpusession1.Manager`.
pub struct Manager {
    pub(super) shared: Arc<Shared>,
}

/// A row of `ListDevices` and `ListServers`.
type Row = (String, String, String, OwnedObjectPath);

/// Finds a lease by id, or by name if exactly one pending lease has that name.
fn lease<'a>(snapshot: &'a Snapshot, id: &str) -> Result<&'a LeaseFacts> {
    let shown = |l: &&LeaseFacts| super::project::shown(l);
    if let Some(found) = snapshot.lease(id).map(|l| &l.facts).filter(shown) {
        return Ok(found);
    }
    let waits = |l: &&LeaseFacts| l.spec.name == id && l.state == LeaseState::Pending;
    let named: Vec<_> = snapshot.lease_facts().filter(shown).filter(waits).collect();
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

/// Returns why a server that is known to be unreachable, or to refuse this client, does not answer.
fn silence(server: &ServerFacts) -> Option<PoolError> {
    let trouble = match server.state.as_str() {
        "offline" | "stopped" => Trouble::Unreachable,
        "unauthorized" => Trouble::Refused,
        _ => return None,
    };
    Some(PoolError::new(trouble, &server.trouble)).filter(|error| !error.message.is_empty())
}

impl Manager {
    /// Finds a lease that the caller may change, in the caller's turn.
    async fn touch(&self, call: &Call<'_>, id: &str) -> Result<LeaseFacts> {
        let view = lease(&self.shared.snapshot(), id)?.clone();
        call.may(Deed::Touch { owner: view.uid }).await?;
        call.turn().await;
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
        let found = snapshot.server_index(|s| s.name == name);
        found.ok_or_else(|| BusError::no_such_server(format!("server {name}: not found")))
    }

    /// Lists the leases that a process of this user gets without naming one.
    async fn leases_of(
        &self,
        uid: u32,
        pid: u32,
        session: Option<String>,
        control_groups: Vec<String>,
    ) -> Vec<OwnedObjectPath> {
        let person = self.shared.settings.gate().person(uid).await;
        let Person { name: user, access, principal } = person;
        let contained = false;
        let caller = Caller { uid, pid, user, principal, access, session, control_groups, contained };
        let slots = self.shared.leases.default_slots(caller).await;
        let snapshot = self.shared.snapshot();
        snapshot.lease_facts().filter(|l| slots.contains(&l.slot)).map(|l| lease_path(&l.id)).collect()
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
        for (index, view) in self.shared.snapshot().known_servers() {
            let server = &view.facts;
            let named = |name: &String| *name == server.name || *name == server.address;
            if server.state == "online" && (spec.servers.is_empty() || spec.servers.iter().any(named)) {
                let (leases, spec) = (self.shared.leases.clone(), spec.clone());
                asked.spawn(async move {
                    let answer = tokio::time::timeout(ASK_TIMEOUT, leases.ask(index, None)).await;
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
        let shown = snapshot.leases.iter().filter(|l| super::project::shown(&l.facts));
        Ok(shown
            .map(|view| {
                let LeaseFacts { id, uid, state, .. } = &view.facts;
                let expires = expires_usec(&self.shared, view);
                (id.clone(), *uid, state.as_str().into(), lease_path(id), expires)
            })
            .collect())
    }

    #[zbus(out_args("devices"))]
    async fn list_devices(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<Vec<Row>> {
        let _call = Call::begin(&self.shared, connection, &header).await?;
        let devices = super::project::devices(&self.shared.snapshot()).into_iter();
        Ok(devices
            .map(|(uuid, entry)| {
                let path = device_path(&uuid);
                (uuid, entry.view.name.clone(), state_of(&entry.view).into(), path)
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
        let servers = snapshot.server_facts();
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
        let known = super::project::devices(&self.shared.snapshot()).contains_key(id);
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
        let known = self.shared.snapshot().server_facts().any(|s| s.name == id);
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
        let session = self.shared.sessions.as_ref().and_then(|s| s.for_process(uid, pid, None));
        let groups = control_groups(pid, Some(&std::os::fd::OwnedFd::from(pidfd)));
        Ok(self.leases_of(uid, pid, session.map(|s| s.id.clone()), groups).await)
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
        Ok(self.leases_of(session.uid, 0, Some(session.id.clone()), Vec::new()).await)
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
        let mut request = request::read(request, format!("request/{}", crate::paths::hex(&key)), uid)?;
        if flags & !PERSISTENT != 0 {
            return Err(BusError::invalid_args(format!("unknown flags {flags:#x}")));
        }
        let persistent = flags & PERSISTENT != 0;
        if persistent && request.spec.ttl.is_none() {
            return Err(BusError::invalid_args("a persistent lease needs TTLUSec"));
        }
        let owner = self.owner(&mut request, uid)?;
        call.may(Self::deed(uid, owner)).await?;
        call.turn().await;
        let creating = Creating::begin(&self.shared, uid, owner, persistent)?;
        let mut spec = request.spec;
        spec.persistent = persistent;
        let person = self.shared.settings.gate().person(owner).await;
        spec.user = person.name.or(person.principal.and_then(|user| user.name)).unwrap_or_default();
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
            tokio::spawn(release_at_close(self.shared.clone(), view.facts.slot, name, receiver));
        }
        let id = view.facts.id;
        self.published(|s| s.lease(&id).is_some()).await;
        // No descriptor ends it: without its requester it would hold GPUs until its time is over.
        if persistent && !call.is_present().await {
            self.shared.leases.release(view.facts.slot, "its requester has left").await;
            return Err(BusError::failed("the caller has left the bus"));
        }
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
        call.turn().await;
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
        call.turn().await;
        let snapshot = self.shared.leases.snapshot().borrow().clone();
        let bound: Vec<Slot> = snapshot
            .lease_facts()
            .filter(|l| l.spec.session.as_deref() == Some(session.id.as_str()))
            .map(|l| l.slot)
            .collect();
        for slot in &bound {
            self.shared.leases.release(*slot, "released on request").await;
        }
        self.published(|s| !s.lease_facts().any(|l| bound.contains(&l.slot))).await;
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
        Ok(super::describe::describe(&self.shared, call.uid).to_json())
    }

    /// The servers as they answer now, with their cards, as JSON.
    ///
    /// Asks those that are not known to be unreachable, since a caller waits for the answer.
    #[zbus(out_args("json"))]
    async fn describe_servers(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String> {
        let call = Call::begin(&self.shared, connection, &header).await?;
        call.turn().await;
        let uid = call.uid;
        let snapshot = self.shared.snapshot();
        let addresses = snapshot.server_facts().map(|s| s.address.clone()).collect();
        let known: Vec<_> = snapshot.known_servers().map(|(index, s)| (index, silence(&s.facts))).collect();
        let ask = |row: usize| {
            let (leases, (index, known)) = (self.shared.leases.clone(), known[row].clone());
            async move { if let Some(error) = known { Err(error) } else { leases.ask(index, Some(uid)).await } }
        };
        let mut survey = crate::survey::survey(addresses, uid, ask).await;
        for (server, facts) in survey.servers.iter_mut().zip(snapshot.server_facts()) {
            // A stopped server cannot say so in its answer; the daemon had its last event.
            if facts.state == STOPPED && server.state == "offline" {
                STOPPED.clone_into(&mut server.state);
            }
        }
        Ok(survey.to_json())
    }

    /// Starts an endpoint of a server for a measurement; see [`describe::Endpoint`].
    #[zbus(out_args("json"))]
    async fn measure(
        &self,
        server: &str,
        seconds: u32,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String> {
        let call = Call::begin(&self.shared, connection, &header).await?;
        call.may(Deed::Measure).await?;
        call.turn().await;
        let snapshot = self.shared.snapshot();
        let named = |s: &ServerFacts| match server {
            "" => s.state == "online",
            name => s.name == name || s.address == name,
        };
        let index = snapshot.server_index(named).ok_or_else(|| match server {
            "" => BusError::not_ready("no server is online"),
            name => BusError::no_such_server(format!("server {name}: not found")),
        })?;
        let endpoint = crate::survey::endpoint(self.shared.leases.measure(index, seconds).await?)?;
        serde_json::to_string(&endpoint).map_err(|e| BusError::failed(e.to_string()))
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

    #[zbus(signal)]
    pub(super) async fn identity_expiring(emitter: &SignalEmitter<'_>, expires_usec: u64)
    -> zbus::Result<()>;

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
        self.shared.snapshot().lease_facts().filter(|l| l.state != LeaseState::Pending).count() as u64
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

    // 0 before this client has joined a pool.
    #[zbus(property, name = "IdentityExpiresUSec")]
    fn identity_expires_usec(&self) -> u64 {
        self.shared.identity_expires_usec()
    }

    #[zbus(property)]
    fn boot_allocation_complete(&self) -> bool {
        self.shared.boot_complete()
    }
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

/// Values of the manager's properties.
#[derive(Clone)]
pub struct ManagerView {
    pub state: &'static str,
    pub target: u32,
    pub ready: u32,
    pub held: usize,
    pub boot_complete: bool,
    pub extra: u32,
    pub lease_ttl: u64,
    pub idle_timeout: u64,
    pub identity_expires: u64,
}

announce! { Manager, ManagerView;
    state_changed: |m: &ManagerView| m.state,
    pool_target_changed: |m: &ManagerView| m.target,
    pool_ready_changed: |m: &ManagerView| m.ready,
    n_current_leases_changed: |m: &ManagerView| m.held,
    boot_allocation_complete_changed: |m: &ManagerView| m.boot_complete,
    leases_max_changed: |m: &ManagerView| m.extra,
    lease_t_t_l_u_sec_changed: |m: &ManagerView| m.lease_ttl,
    default_idle_timeout_u_sec_changed: |m: &ManagerView| m.idle_timeout,
    identity_expires_u_sec_changed: |m: &ManagerView| m.identity_expires,
}
