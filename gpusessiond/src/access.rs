//! Access to the leases for all: the rules of `[access]`, applied to the user database.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Mutex, RwLock};
use std::time::{Duration, Instant};

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

use crate::config::Access;
use crate::subuid::{Owners, Principal};

/// Time for which an answer of the user database is cached.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Most cached answers.
const MAX_CACHED_ANSWERS: usize = 1024;

/// A uid in the user database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Person {
    /// User name, if the database has one.
    pub name: Option<String>,
    /// Whether `[access]` allows the user to use the leases for all.
    pub access: bool,
    /// User to whom the uid is subordinate, if it is.
    pub principal: Option<Principal>,
}

/// The rules of `[access]`, with a cache, since the user database may be slow.
pub struct Gate {
    access: RwLock<Access>,
    owners: Owners,
    known: Mutex<HashMap<u32, (Instant, Person)>>,
}

impl Gate {
    /// Creates a gate with this system's owners of subordinate uids.
    pub fn new(access: Access) -> Self {
        Self::with_owners(access, Owners::system())
    }

    /// Creates a gate with these owners of subordinate uids.
    pub fn with_owners(access: Access, owners: Owners) -> Self {
        Self { access: RwLock::new(access), owners, known: Mutex::default() }
    }

    /// Replaces the rules and clears the cache.
    pub fn set(&self, access: Access) {
        *self.access.write().unwrap_or_else(|e| e.into_inner()) = access;
        self.known().clear();
    }

    fn access(&self) -> std::sync::RwLockReadGuard<'_, Access> {
        self.access.read().unwrap_or_else(|e| e.into_inner())
    }

    /// Returns the uid whose limits count for a uid: that of its owner if it is a subordinate one.
    pub fn account(&self, uid: u32) -> u32 {
        self.owners.owner(uid)
    }

    /// Returns how many leases a user may hold in addition to the configured ones.
    pub fn extra_leases(&self, uid: u32) -> usize {
        if uid == 0 { usize::MAX } else { self.access().extra_leases as usize }
    }

    /// Returns whether users who start many programs leave room to others.
    pub fn fair_share(&self) -> bool {
        self.access().fair_share
    }

    /// Looks a uid up; queries the user database on another thread.
    pub async fn person(self: &std::sync::Arc<Self>, uid: u32) -> Person {
        if let Some((_, person)) = self.known().get(&uid).filter(|(at, _)| at.elapsed() < MAX_AGE).cloned() {
            return person;
        }
        let gate = self.clone();
        let person = tokio::task::spawn_blocking(move || gate.look_up(uid)).await.unwrap_or(Person {
            name: None,
            access: false,
            principal: None,
        });
        let mut known = self.known();
        if known.len() >= MAX_CACHED_ANSWERS {
            known.clear();
        }
        known.insert(uid, (Instant::now(), person.clone()));
        person
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<u32, (Instant, Person)>> {
        self.known.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn look_up(&self, uid: u32) -> Person {
        let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
        let by_group = !self.access().groups.is_empty();
        let groups = user.as_ref().filter(|_| by_group).map(groups_of).unwrap_or_default();
        let name = user.map(|u| u.name);
        // A user of the database is not taken for another one's subordinate.
        let principal = Some(self.account(uid)).filter(|account| *account != uid && name.is_none());
        let principal = principal.map(|uid| {
            let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
            Principal { uid, name: user.map(|user| user.name) }
        });
        Person { access: allows(&self.access(), uid, name.as_deref(), &groups), name, principal }
    }
}

fn groups_of(user: &User) -> Vec<String> {
    let Ok(name) = CString::new(user.name.as_str()) else { return Vec::new() };
    getgrouplist(&name, user.gid)
        .unwrap_or_else(|_| vec![user.gid])
        .into_iter()
        .filter_map(|gid: Gid| Some(Group::from_gid(gid).ok()??.name))
        .collect()
}

/// Applies the rules; root is subject to `root` only.
fn allows(access: &Access, uid: u32, name: Option<&str>, groups: &[String]) -> bool {
    if uid == 0 {
        return access.root;
    }
    access.users.iter().any(|u| u == "*" || Some(u.as_str()) == name || *u == uid.to_string())
        || access.groups.iter().any(|g| groups.contains(g))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_groups_root_and_everyone() {
        let access = |users: &[&str], groups: &[&str], root| Access {
            users: users.iter().map(|s| (*s).into()).collect(),
            groups: groups.iter().map(|s| (*s).into()).collect(),
            root,
            fair_share: true,
            extra_leases: 0,
        };
        assert!(allows(&access(&["*"], &[], false), 1000, None, &[]));
        assert!(!allows(&access(&["*"], &[], false), 0, Some("root"), &[]));
        assert!(allows(&access(&[], &[], true), 0, Some("root"), &[]));
        assert!(allows(&access(&["alice"], &[], false), 1000, Some("alice"), &[]));
        assert!(!allows(&access(&["alice"], &[], false), 1001, Some("bob"), &[]));
        assert!(allows(&access(&["1001"], &[], false), 1001, None, &[]));
        assert!(allows(&access(&[], &["gpu"], false), 1001, Some("bob"), &["users".into(), "gpu".into()]));
        assert!(!allows(&access(&[], &["gpu"], false), 1001, Some("bob"), &["users".into()]));
    }

    #[tokio::test]
    async fn root_is_known_everywhere() {
        let gate = std::sync::Arc::new(Gate::new(crate::config::Config::default().access));
        let root = Person { name: Some("root".into()), access: true, principal: None };
        assert_eq!(gate.person(0).await, root);
        assert_eq!(gate.person(0).await.name.as_deref(), Some("root"));
        assert!(gate.person(4_000_000_000).await.name.is_none());
    }
}
