//! The object of a lease.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use gpusession_bus::{path_element, server_path};
use zbus::message::Header;
use zbus::object_server::SignalEmitter;
use zbus::{Connection, OwnedObjectPath, interface};

use super::announce::announce;
use super::authorize::{Call, Deed};
use super::error::{BusError, Result};
use super::project::{device_paths, expires_usec, memory_limit, sm_percent, usec, waits_at, waits_for};
use super::shared::Shared;
use super::shown::Shown;
use crate::leases::{LeaseView, Time};
use crate::pool::Trouble;

/// Renews a lease; returns the time that it has left, in microseconds.
pub(super) async fn renew(shared: &Shared, id: &str, ttl_usec: u64) -> Result<u64> {
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
    /// Returns the lease as last shown, in the caller's turn, if the caller may change it.
    async fn touch(&self, connection: &Connection, header: &Header<'_>) -> Result<Arc<LeaseView>> {
        let view = self.view.get();
        let call = Call::begin(&self.shared, connection, header).await?;
        call.may(Deed::Touch { owner: view.facts.uid }).await?;
        call.turn().await;
        Ok(view)
    }

    /// Converts a time of the lease to wall-clock microseconds.
    fn wall_usec(&self, time: Time) -> u64 {
        self.shared.leases.snapshot().borrow().clock.wall_usec(time)
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
        self.shared.leases.release(view.facts.slot, "released on request").await;
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
        renew(&self.shared, &view.facts.id, ttl_usec).await
    }

    async fn set_idle_hint(
        &self,
        idle: bool,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let view = self.touch(connection, &header).await?;
        Ok(self.shared.leases.idle_hint(view.facts.slot, idle).await?)
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
        if view.facts.spec.once {
            environment.insert("GPUSESSION_LEASE".into(), view.facts.id.clone());
        }
        Ok(environment)
    }

    async fn park(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let view = self.touch(connection, &header).await?;
        Ok(self.shared.leases.park(view.facts.slot, true).await?)
    }

    async fn unpark(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let view = self.touch(connection, &header).await?;
        Ok(self.shared.leases.park(view.facts.slot, false).await?)
    }

    #[zbus(signal)]
    pub(super) async fn lost(emitter: &SignalEmitter<'_>, reason: &str) -> zbus::Result<()>;

    #[zbus(signal)]
    pub(super) async fn released(emitter: &SignalEmitter<'_>, reason: &str) -> zbus::Result<()>;

    #[zbus(property(emits_changed_signal = "const"))]
    fn id(&self) -> String {
        self.view.get().facts.id.clone()
    }

    #[zbus(property, name = "UID")]
    fn uid(&self) -> u32 {
        self.view.get().facts.uid
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn session(&self) -> (String, OwnedObjectPath) {
        let view = self.view.get();
        let Some(id) = &view.facts.spec.session else { return (String::new(), OwnedObjectPath::default()) };
        // Object path at logind, so that tools find the login; the root path if logind has no such
        // session.
        let leases = self.shared.leases.snapshot();
        let logind = leases.borrow().sessions.iter().find(|s| s.id == *id).and_then(|s| s.logind.clone());
        let path = logind.map(|id| format!("/org/freedesktop/login1/session/{}", path_element(&id)));
        (id.clone(), path.and_then(|p| OwnedObjectPath::try_from(p).ok()).unwrap_or_default())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn leader(&self) -> u32 {
        self.view.get().facts.leader
    }

    // A lease that was lent may come back on other GPUs.
    #[zbus(property)]
    fn devices(&self) -> Vec<OwnedObjectPath> {
        device_paths(&self.view.get().facts)
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn servers(&self) -> Vec<OwnedObjectPath> {
        let view = self.view.get();
        if view.facts.reported.server.is_empty() {
            vec![]
        } else {
            vec![server_path(&view.facts.reported.server)]
        }
    }

    #[zbus(property)]
    fn state(&self) -> &str {
        self.view.get().facts.state.as_str()
    }

    // Place in the queue and the queue's length; 0 of 0 without a queue.
    #[zbus(property)]
    fn queue_position(&self) -> (u32, u32) {
        waits_at(&self.view.get().facts)
    }

    #[zbus(property)]
    fn waits_for(&self) -> String {
        waits_for(&self.view.get().facts).to_owned()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn class(&self) -> &str {
        self.view.get().facts.spec.class.as_str()
    }

    #[zbus(property(emits_changed_signal = "const"), name = "CreatedUSec")]
    fn created_usec(&self) -> u64 {
        self.wall_usec(self.view.get().facts.created)
    }

    // Every heartbeat changes it, so it has no change signal.
    #[zbus(property(emits_changed_signal = "false"), name = "ExpiresAtUSec")]
    fn expires_at_usec(&self) -> u64 {
        expires_usec(&self.shared, &self.view.get())
    }

    #[zbus(property)]
    fn idle_since_hint(&self) -> u64 {
        self.view.get().gauges.idle_since.map_or(0, |at| self.wall_usec(at))
    }

    // On the clock that includes suspended time.
    #[zbus(property)]
    fn idle_since_hint_monotonic(&self) -> u64 {
        self.view.get().gauges.idle_since.map_or(0, usec)
    }

    // 0 for never or unknown.
    #[zbus(property, name = "IdleTimeoutUSec")]
    fn idle_timeout_usec(&self) -> u64 {
        self.view.get().facts.reported.idle_timeout_usec
    }

    #[zbus(property)]
    fn fencing_token(&self) -> u64 {
        self.view.get().facts.reported.fencing_token
    }

    #[zbus(property)]
    fn memory_limit_bytes(&self) -> u64 {
        memory_limit(&self.view.get().facts)
    }

    #[zbus(property, name = "SMPercent")]
    fn sm_percent(&self) -> u32 {
        sm_percent(&self.view.get().facts)
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn priority(&self) -> &str {
        self.view.get().facts.spec.priority.as_str()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn sharing(&self) -> &str {
        self.view.get().facts.spec.sharing.map_or("", |s| s.as_str())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn transport(&self) -> &str {
        self.view.get().facts.transport().0
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn transport_reason(&self) -> &str {
        self.view.get().facts.transport().1
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn who(&self) -> String {
        self.view.get().facts.spec.who.clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn why(&self) -> String {
        self.view.get().facts.spec.why.clone()
    }
}

announce! { Lease, LeaseView;
    // The user database did not know the user before.
    u_i_d_changed: |l: &LeaseView| l.facts.uid,
    state_changed: |l: &LeaseView| l.facts.state,
    queue_position_changed: |l: &LeaseView| waits_at(&l.facts),
    waits_for_changed: |l: &LeaseView| waits_for(&l.facts).to_owned(),
    // Both show one point in time, and change only when another one begins.
    idle_since_hint_changed: |l: &LeaseView| l.gauges.idle_since,
    idle_since_hint_monotonic_changed: |l: &LeaseView| l.gauges.idle_since,
    idle_timeout_u_sec_changed: |l: &LeaseView| l.facts.reported.idle_timeout_usec,
    devices_changed: |l: &LeaseView| device_paths(&l.facts),
    memory_limit_bytes_changed: |l: &LeaseView| memory_limit(&l.facts),
    s_m_percent_changed: |l: &LeaseView| sm_percent(&l.facts),
    fencing_token_changed: |l: &LeaseView| l.facts.reported.fencing_token,
}
