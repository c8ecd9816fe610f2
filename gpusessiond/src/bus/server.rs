//! The object of a server.

use std::sync::Arc;
use std::time::Duration;

use zbus::message::Header;
use zbus::{Connection, interface};

use super::announce::announce;
use super::authorize::{Call, Deed};
use super::error::Result;
use super::project::usec;
use super::shared::Shared;
use super::shown::Shown;
use crate::leases::ServerView;

/// Grace period before `Server.Drain` releases a server's leases.
const DRAIN_GRACE: Duration = Duration::from_secs(60);

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
        let call = Call::begin(&self.shared, connection, &header).await?;
        call.turn().await;
        let (round_trip, _) = self.shared.leases.ask(self.index, None).await?;
        Ok(usec(round_trip))
    }

    async fn reconnect(
        &self,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<()> {
        let call = Call::begin(&self.shared, connection, &header).await?;
        call.turn().await;
        self.shared.leases.ask(self.index, None).await?;
        Ok(())
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn name(&self) -> String {
        self.view.get().facts.name.clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn addresses(&self) -> Vec<String> {
        vec![self.view.get().facts.address.clone()]
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn transport(&self) -> &str {
        "tcp+tls"
    }

    #[zbus(property)]
    fn state(&self) -> String {
        self.view.get().facts.state.clone()
    }

    #[zbus(property(emits_changed_signal = "false"), name = "LastSeenUSec")]
    fn last_seen_usec(&self) -> u64 {
        let clock = self.shared.leases.snapshot().borrow().clock;
        self.now().gauges.last_seen.map_or(0, |at| clock.wall_usec(at))
    }

    #[zbus(property(emits_changed_signal = "false"), name = "RTTUSec")]
    fn rtt_usec(&self) -> u64 {
        usec(self.now().gauges.rtt)
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn protocol_version(&self) -> u32 {
        self.now().facts.protocol
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn software(&self) -> String {
        self.now().facts.software
    }

    #[zbus(property(emits_changed_signal = "false"), name = "NDevices")]
    fn n_devices(&self) -> u32 {
        self.now().facts.devices
    }

    #[zbus(property(emits_changed_signal = "false"), name = "NFree")]
    fn n_free(&self) -> u32 {
        self.now().gauges.free
    }
}

announce! { Server, ServerView;
    state_changed: |s: &ServerView| s.facts.state.clone(),
}
