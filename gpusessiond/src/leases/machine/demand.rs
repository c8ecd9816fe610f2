//! Leases that the configuration, login sessions and users want.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::lease::Wanted;
use super::state::{Machine, USER_LINGER_TIMEOUT};
use crate::leases::{Session, Slot, Time};
use gpusession_common::words::Class;

use crate::leases::{Owner, Spec};

impl Machine {
    /// Wants exactly the leases of the configuration; unchanged ones stay as they are.
    pub fn configure(&mut self, now: Time, leases: Vec<Spec>) {
        let (templates, held_always): (Vec<_>, Vec<_>) =
            leases.into_iter().partition(|s| matches!(s.class, Class::Session | Class::User));
        self.templates = templates;
        let mut kept: Vec<Slot> = Vec::new();
        for spec in held_always {
            kept.push(self.keep_or_want(now, spec));
        }
        let instances: Vec<(Slot, Option<Spec>)> = self
            .slots
            .iter()
            .filter(|(slot, w)| !w.spec.once && !kept.contains(slot) && w.spec.order != u32::MAX)
            .map(|(slot, w)| (*slot, self.templates.iter().find_map(|t| t.again_for(&w.spec))))
            .collect();
        for (slot, spec) in instances {
            match spec {
                Some(spec) => drop(self.keep_or_want(now, spec)),
                None => self.release(now, slot, "no longer in the configuration"),
            }
        }
        // Sessions that closed while no daemon ran.
        let over = |w: &Wanted| w.spec.session.as_ref().is_some_and(|id| !self.sessions.contains_key(id));
        let over: Vec<Slot> = self.slots.iter().filter(|(_, w)| over(w)).map(|(slot, _)| *slot).collect();
        for slot in over {
            self.release(now, slot, "its login session ended");
        }
        self.preallocate(now, self.preallocated);
        self.tick(now);
    }

    fn keep_or_want(&mut self, now: Time, spec: Spec) -> Slot {
        if let Some(slot) = self.by_key(&spec.key) {
            if let Some(wanted) = self.slots.get_mut(&slot).filter(|w| w.spec.same_lease(&spec)) {
                wanted.spec = spec;
                return slot;
            }
            self.release(now, slot, "its configuration changed");
        }
        self.insert(now, spec, None)
    }

    /// Holds this many GPUs for all users in addition to the configured leases, in the background.
    pub fn preallocate(&mut self, now: Time, count: u32) {
        self.preallocated = count;
        let key = |n: u32| format!("preallocated/{n}");
        for n in (0..).take_while(|n| *n < count || self.by_key(&key(*n)).is_some()).collect::<Vec<_>>() {
            match self.by_key(&key(n)) {
                Some(slot) if n >= count => self.release(now, slot, "fewer preallocated GPUs are wanted"),
                None => drop(self.insert(now, Spec::preallocated(n, key(n)), None)),
                Some(_) => {}
            }
        }
        self.tick(now);
    }

    /// Releases an unused background lease in favour of a waiting lease; returns whether one was
    /// found.
    pub(super) fn yield_background(&mut self, now: Time, waiting: Slot) -> bool {
        let waits = |w: &&Wanted| w.spec.class != Class::Background && w.recovery.is_none();
        let Some(waits) = self.slots.get(&waiting).filter(waits) else { return false };
        let servers = self.servers_for(waits);
        let spare = self.slots.iter().find_map(|(slot, w)| {
            let held = w.held().filter(|held| servers.contains(&held.server))?;
            (w.spec.class == Class::Background && w.processes == 0).then_some((*slot, held))
        });
        let Some((slot, held)) = spare else { return false };
        let (server, id, expires) = (held.server, held.id.clone(), held.expires);
        let reason = match waits.spec.name.as_str() {
            "" => "released in favour of a requested lease".to_owned(),
            name => format!("released in favour of lease {name}, which waits"),
        };
        self.give_back(now, server, id, expires);
        if let Some(releasing) = self.releasing.last_mut() {
            releasing.makes_room_for = Some(waiting);
        }
        self.lose(now, slot, &reason);
        true
    }

    /// Returns the open login sessions by id.
    pub fn sessions(&self) -> &BTreeMap<String, Arc<Session>> {
        &self.sessions
    }

    /// Returns `true` if a login or a first CUDA call may want a lease; see [`Machine::demand`].
    pub fn has_templates(&self) -> bool {
        !self.templates.is_empty()
    }

    /// Records a login.
    pub fn session_opened(&mut self, now: Time, session: Arc<Session>) {
        self.sessions.insert(session.id.clone(), session);
        self.tick(now);
    }

    /// Records the end of a session and releases its leases.
    pub fn session_closed(&mut self, now: Time, id: &str) {
        if self.sessions.remove(id).is_none() {
            return;
        }
        let bound: Vec<Slot> = self
            .slots
            .iter()
            .filter(|(_, w)| w.spec.session.as_deref() == Some(id))
            .map(|(slot, _)| *slot)
            .collect();
        for slot in bound {
            self.release(now, slot, "its login session ended");
        }
        self.tick(now);
    }

    /// Wants the leases that the configuration has for a session or a user.
    ///
    /// Called at login, and by a process's first CUDA call.
    pub fn demand(&mut self, now: Time, uid: u32, user: Option<&str>, access: bool, session: Option<&str>) {
        let session = session.filter(|id| self.sessions.get(*id).is_some_and(|s| s.uid == uid));
        let wanted: Vec<Spec> = self
            .templates
            .iter()
            .filter(|t| match &t.owner {
                Owner::User(name) => user == Some(name),
                Owner::Uid(owner) => *owner == uid,
                Owner::Everyone => access,
            })
            .filter_map(|t| t.instance(uid, user, session))
            .collect();
        for spec in wanted {
            match self.by_key(&spec.key).and_then(|slot| self.slots.get_mut(&slot)) {
                Some(there) => there.unused = None,
                None => drop(self.insert(now, spec, None)),
            }
        }
        self.tick(now);
    }

    /// Releases leases of class `user` whose users are absent.
    pub(super) fn run_users(&mut self, now: Time) {
        let mut gone = Vec::new();
        for (slot, wanted) in &mut self.slots {
            if wanted.spec.class != Class::User || wanted.spec.once {
                continue;
            }
            let here = wanted.processes > 0
                || self.sessions.values().any(|s| wanted.spec.owner == Owner::Uid(s.uid));
            if here {
                wanted.unused = None;
            } else if now.saturating_sub(*wanted.unused.get_or_insert(now)) >= USER_LINGER_TIMEOUT {
                gone.push(*slot);
            }
        }
        for slot in gone {
            self.release(now, slot, "its user has neither a session nor a process");
        }
    }
}
