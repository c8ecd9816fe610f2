//! `org.gpusession1` on D-Bus: a thin layer over [`Leases`].
//!
//! One task, the publisher, exports and removes objects and sends every signal, in order of
//! occurrence. An object exists before its `New` signal, and no signal of a lease follows
//! `LeaseRemoved`.

mod announce;
mod authorize;
mod describe;
mod device;
mod error;
mod lease;
mod lease_fd;
mod manager;
mod project;
mod publisher;
mod request;
mod server;
mod shared;
mod shown;
mod turns;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use gpusession_bus::{NAME, PATH};
use tokio::sync::watch;
use zbus::Connection;

pub use device::Device;
pub use error::BusError;
pub use lease::Lease;
pub use manager::Manager;
pub use server::Server;
pub use shared::Shared;

use crate::handover::Store;
use crate::leases::{LeaseState, Leases, Snapshot};
use crate::login::Sessions;
use crate::renewal::Standing;
use crate::settings::Settings;

/// Parts of the daemon that the API uses.
pub struct Parts {
    /// Lease manager, to which all calls go.
    pub leases: Arc<dyn Leases>,
    /// Configuration, which `Reload` replaces.
    pub settings: Arc<Settings>,
    /// Login sessions, if the daemon tracks them.
    pub sessions: Option<Arc<Sessions>>,
    /// Keeps lease descriptors for the next daemon.
    pub store: Option<Store>,
    /// Lease descriptors of an earlier daemon, by their request's key.
    pub lease_fds: HashMap<String, OwnedFd>,
    /// Standing of this client's certificate.
    pub identity: watch::Receiver<Option<Standing>>,
}

/// The running API.
pub struct Bus {
    /// Connection that owns [`NAME`].
    pub connection: Connection,
}

impl Bus {
    /// Exports the API on a connection and takes the name.
    ///
    /// The publisher runs as long as the lease manager.
    pub async fn start(connection: Connection, parts: Parts) -> zbus::Result<Self> {
        let Parts { leases, settings, sessions, store, lease_fds, identity } = parts;
        let shared = Arc::new(Shared {
            published: watch::channel(Arc::new(Snapshot::default())).0,
            leases,
            settings,
            sessions,
            store,
            identity,
            calls: Mutex::default(),
            turns: turns::Turns::default(),
            boot_complete: Mutex::new(false),
            creating: Mutex::default(),
            polkit_trouble: Mutex::default(),
        });
        lease_fd::resume(&shared, lease_fds);
        let server = connection.object_server();
        server.at(PATH, zbus::fdo::ObjectManager).await?;
        server.at(PATH, Manager { shared: shared.clone() }).await?;
        let mut publisher = publisher::Publisher::new(connection.clone(), shared);
        // Clients that wait for the name call as soon as it appears, and must find all objects.
        publisher.begin().await?;
        tokio::spawn(publisher.run());
        connection.request_name(NAME).await?;
        Ok(Self { connection })
    }
}

/// Formats the status text of `systemctl status`.
pub fn status_text(snapshot: &Snapshot) -> String {
    let (target, ready) = snapshot.pool();
    if target == 0 {
        return "no lease configured".into();
    }
    let mut held: Vec<&str> =
        snapshot.lease_facts().map(|l| l.reported.server.as_str()).filter(|name| !name.is_empty()).collect();
    held.sort_unstable();
    held.dedup();
    let mut text = format!("{ready}/{target} GPUs leased");
    if !held.is_empty() {
        text.push_str(&format!(" ({})", held.join(", ")));
    }
    let waiting =
        snapshot.lease_facts().find_map(|l| l.trouble.as_ref().filter(|_| l.state == LeaseState::Pending));
    if let Some(trouble) = waiting {
        text.push_str(&format!("; waiting: {}", trouble.waiting()));
    }
    text
}

#[cfg(test)]
mod tests {
    use gpusession_bus::proxy::{LeaseProxy, ManagerProxy};
    use zbus::object_server::Interface as _;
    use zbus::proxy::Defaults;

    use super::*;

    #[test]
    fn the_manual_names_every_member() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let manual = std::fs::read_to_string(folder.join("docs/man/org.gpusession1.5")).unwrap();
        let words: Vec<&str> = manual.split(|c: char| !c.is_ascii_alphanumeric()).collect();
        for entry in std::fs::read_dir(folder.join("units/dbus-1/interfaces")).unwrap() {
            let xml = std::fs::read_to_string(entry.unwrap().path()).unwrap();
            let members = ["<method name=\"", "<signal name=\"", "<property name=\""]
                .into_iter()
                .flat_map(|tag| xml.split(tag).skip(1))
                .map(|rest| rest.split_once('"').unwrap().0);
            for member in members {
                assert!(words.contains(&member), "docs/man/org.gpusession1.5 does not name {member}");
            }
        }
    }

    #[test]
    fn callers_and_daemon_name_the_same_interfaces() {
        assert_eq!(ManagerProxy::INTERFACE.as_ref().unwrap(), &Manager::name());
        assert_eq!(LeaseProxy::INTERFACE.as_ref().unwrap(), &Lease::name());
        assert_eq!(ManagerProxy::DESTINATION.as_ref().unwrap().as_str(), NAME);
        assert_eq!(ManagerProxy::PATH.as_ref().unwrap().as_str(), PATH);
    }
}
