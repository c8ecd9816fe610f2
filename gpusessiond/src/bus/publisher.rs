//! Exports objects and sends signals, in order of occurrence.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use gpusession_bus::{PATH, device_path, lease_path, server_path};
use tokio::sync::mpsc;
use tracing::warn;
use zbus::object_server::{Interface, InterfaceRef, SignalEmitter};
use zbus::{Connection, OwnedObjectPath};

use super::device::{self, Device};
use super::lease::{self, Lease};
use super::manager::{self, Manager, ManagerView};
use super::project::{DeviceEntry, devices, shortest, shown};
use super::server::{self, Server};
use super::shared::Shared;
use super::shown::Shown;
use crate::leases::{Change, LeaseState, LeaseView, Slot, Snapshot, Update};

pub struct Publisher {
    connection: Connection,
    shared: Arc<Shared>,
    updates: mpsc::UnboundedReceiver<Update>,
    leases: HashMap<String, Slot>,
    devices: BTreeMap<String, DeviceEntry>,
    /// Exported servers by name, with their indexes.
    servers: HashMap<String, usize>,
    manager: Option<ManagerView>,
    /// Latest warning of the identity's end that a signal announced.
    warned: Option<u64>,
}

impl Publisher {
    pub fn new(connection: Connection, shared: Arc<Shared>) -> Self {
        Self {
            connection,
            updates: shared.leases.updates(),
            shared,
            leases: HashMap::new(),
            devices: BTreeMap::new(),
            servers: HashMap::new(),
            manager: None,
            warned: None,
        }
    }

    /// Publishes the current state.
    pub async fn begin(&mut self) -> zbus::Result<()> {
        match self.updates.recv().await {
            Some(update) => self.publish(update).await,
            None => Ok(()),
        }
    }

    pub async fn run(mut self) {
        let mut settings = self.shared.settings.subscribe();
        let mut identity = self.shared.identity.clone();
        loop {
            let result = tokio::select! {
                update = self.updates.recv() => match update {
                    Some(update) => self.publish(update).await,
                    None => return,
                },
                Ok(()) = settings.changed() => self.show_manager().await,
                Ok(()) = identity.changed() => self.show_identity().await,
            };
            if let Err(error) = result {
                warn!("D-Bus: cannot publish a change: {error}");
            }
        }
    }

    async fn publish(&mut self, update: Update) -> zbus::Result<()> {
        for change in update.changes {
            self.tell(change).await?;
        }
        self.show(update.snapshot).await
    }

    fn emitter<'a>(&self, path: &'a str) -> zbus::Result<SignalEmitter<'a>> {
        SignalEmitter::new(&self.connection, path)
    }

    /// Sends the signals of a change that snapshots do not contain.
    async fn tell(&mut self, change: Change) -> zbus::Result<()> {
        match change {
            Change::PrepareForLoss { slot, left, reason, .. } => {
                if let Some(id) = self.id_of(slot) {
                    let usec = left.as_micros() as u64;
                    Manager::prepare_for_lease_loss(&self.emitter(PATH)?, &id, usec, &reason).await?;
                }
            }
            Change::Lost { id, reason, .. } if self.leases.contains_key(&id) => {
                let path = lease_path(&id);
                self.last_state(&path, LeaseState::Lost).await?;
                Lease::lost(&self.emitter(path.as_str())?, &reason).await?;
                self.remove_lease(&id, &reason).await?;
            }
            Change::Removed { slot, reason, lost: false } => {
                if let Some(id) = self.id_of(slot) {
                    let path = lease_path(&id);
                    self.last_state(&path, LeaseState::Released).await?;
                    Lease::released(&self.emitter(path.as_str())?, &reason).await?;
                    self.remove_lease(&id, &reason).await?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn id_of(&self, slot: Slot) -> Option<String> {
        self.leases.iter().find(|(_, s)| **s == slot).map(|(id, _)| id.clone())
    }

    async fn last_state(&self, path: &OwnedObjectPath, state: LeaseState) -> zbus::Result<()> {
        let lease = self.interface::<Lease>(path).await?;
        let object = lease.get().await;
        let mut view = LeaseView::clone(&object.view.get());
        view.facts.state = state;
        object.view.set(view);
        object.state_changed(lease.signal_emitter()).await
    }

    async fn remove_lease(&mut self, id: &str, reason: &str) -> zbus::Result<()> {
        self.leases.remove(id);
        let path = lease_path(id);
        self.connection.object_server().remove::<Lease, _>(path.as_ref()).await?;
        Manager::lease_removed(&self.emitter(PATH)?, id, path, reason).await
    }

    async fn interface<I: Interface>(&self, path: &OwnedObjectPath) -> zbus::Result<InterfaceRef<I>> {
        self.connection.object_server().interface::<_, I>(path.as_ref()).await
    }

    /// Updates the objects on the bus to match the snapshot.
    async fn show(&mut self, snapshot: Arc<Snapshot>) -> zbus::Result<()> {
        if snapshot.booted() && snapshot.server_facts().any(|s| s.state == "online") {
            *self.shared.boot_complete.lock().unwrap_or_else(|e| e.into_inner()) = true;
        }
        self.show_servers(&snapshot).await?;
        // Leases and devices name each other: every path is exported before it is named.
        self.show_devices_added(&snapshot).await?;
        self.show_leases(&snapshot).await?;
        self.show_devices_changed(&snapshot).await?;
        self.show_devices_removed(&snapshot).await?;
        self.shared.published.send_replace(snapshot);
        self.show_manager().await
    }

    /// Exports one object for each name: a server may be in the list under two addresses.
    async fn show_servers(&mut self, snapshot: &Snapshot) -> zbus::Result<()> {
        let server = self.connection.object_server().clone();
        let mut there = BTreeMap::new();
        for (index, view) in snapshot.known_servers() {
            there.entry(view.facts.name.as_str()).or_insert((index, view));
        }
        // A server is known by its address until it reports its name.
        let stays = |name: &str, index| there.get(name).is_some_and(|(now, _)| *now == index);
        let gone: Vec<String> = (self.servers.iter().filter(|(name, index)| !stays(name, **index)))
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            self.servers.remove(&name);
            let path = server_path(&name);
            server.remove::<Server, _>(path.as_ref()).await?;
            Manager::server_removed(&self.emitter(PATH)?, &name, path).await?;
        }
        for (name, (index, view)) in there {
            let path = server_path(name);
            if self.servers.contains_key(name) {
                let object = self.interface::<Server>(&path).await?;
                let server = object.get().await;
                let before = server.view.set(view.clone());
                server::announce(&server, object.signal_emitter(), &before, view).await?;
                continue;
            }
            let object = Server { shared: self.shared.clone(), index, view: Shown::new(view.clone()) };
            server.at(path.as_ref(), object).await?;
            self.servers.insert(name.to_owned(), index);
            Manager::server_new(&self.emitter(PATH)?, name, path).await?;
        }
        Ok(())
    }

    async fn show_leases(&mut self, snapshot: &Snapshot) -> zbus::Result<()> {
        let server = self.connection.object_server().clone();
        let there: HashSet<&str> =
            snapshot.lease_facts().filter(|l| shown(l)).map(|l| l.id.as_str()).collect();
        let gone: Vec<String> =
            self.leases.keys().filter(|id| !there.contains(id.as_str())).cloned().collect();
        for id in gone {
            // A pending lease has its name as id until the grant; every other end has its own
            // change.
            self.remove_lease(&id, "granted").await?;
        }
        for view in snapshot.leases.iter().filter(|l| shown(&l.facts)) {
            let path = lease_path(&view.facts.id);
            if self.leases.get(&view.facts.id) == Some(&view.facts.slot) {
                let object = self.interface::<Lease>(&path).await?;
                let (lease, emitter) = (object.get().await, object.signal_emitter());
                lease::announce(&lease, emitter, &lease.view.set(view.clone()), view).await?;
            } else {
                let object = Lease { shared: self.shared.clone(), view: Shown::new(view.clone()) };
                server.at(path.as_ref(), object).await?;
                self.leases.insert(view.facts.id.clone(), view.facts.slot);
                Manager::lease_new(&self.emitter(PATH)?, &view.facts.id, path).await?;
            }
        }
        Ok(())
    }

    /// Exports new devices; each lists only leases that are exported already.
    async fn show_devices_added(&mut self, snapshot: &Snapshot) -> zbus::Result<()> {
        for (uuid, mut entry) in devices(snapshot) {
            if self.devices.contains_key(&uuid) {
                continue;
            }
            entry.leases.retain(|path| self.leases.keys().any(|id| lease_path(id) == *path));
            let path = device_path(&uuid);
            self.devices.insert(uuid.clone(), entry.clone());
            let object = Device { shared: self.shared.clone(), shown: Shown::new(entry) };
            self.connection.object_server().at(path.as_ref(), object).await?;
            Manager::device_new(&self.emitter(PATH)?, &uuid, path).await?;
        }
        Ok(())
    }

    async fn show_devices_changed(&mut self, snapshot: &Snapshot) -> zbus::Result<()> {
        for (uuid, entry) in devices(snapshot) {
            if self.devices.get(&uuid).is_none_or(|before| *before == entry) {
                continue;
            }
            let object = self.interface::<Device>(&device_path(&uuid)).await?;
            let (device, emitter) = (object.get().await, object.signal_emitter());
            device::announce(&device, emitter, &device.shown.set(entry.clone()), &entry).await?;
            self.devices.insert(uuid, entry);
        }
        Ok(())
    }

    async fn show_devices_removed(&mut self, snapshot: &Snapshot) -> zbus::Result<()> {
        let there = devices(snapshot);
        let gone: Vec<String> =
            self.devices.keys().filter(|uuid| !there.contains_key(*uuid)).cloned().collect();
        for uuid in gone {
            self.devices.remove(&uuid);
            let path = device_path(&uuid);
            self.connection.object_server().remove::<Device, _>(path.as_ref()).await?;
            Manager::device_removed(&self.emitter(PATH)?, &uuid, path).await?;
        }
        Ok(())
    }

    async fn show_identity(&mut self) -> zbus::Result<()> {
        self.show_manager().await?;
        let warned = self.shared.identity.borrow().as_ref().and_then(|standing| standing.warned);
        if std::mem::replace(&mut self.warned, warned) == warned || warned.is_none() {
            return Ok(());
        }
        let expires_usec = self.shared.identity_expires_usec();
        Manager::identity_expiring(&self.emitter(PATH)?, expires_usec).await
    }

    async fn show_manager(&mut self) -> zbus::Result<()> {
        let snapshot = self.shared.snapshot();
        let (target, ready) = snapshot.pool();
        let now = ManagerView {
            state: self.shared.state(&snapshot),
            target,
            ready,
            held: snapshot.lease_facts().filter(|l| l.state != LeaseState::Pending).count(),
            boot_complete: self.shared.boot_complete(),
            extra: self.shared.settings.get().access.extra_leases,
            lease_ttl: shortest(&snapshot, |s| s.lease_ttl_usec),
            idle_timeout: shortest(&snapshot, |s| s.idle_timeout_usec),
            identity_expires: self.shared.identity_expires_usec(),
        };
        let Some(before) = self.manager.replace(now.clone()) else { return Ok(()) };
        let object = self.connection.object_server().interface::<_, Manager>(PATH).await?;
        let (manager, emitter) = (object.get().await, object.signal_emitter());
        manager::announce(&manager, emitter, &before, &now).await
    }
}
