//! Names of users, apart from the trail: its lines have pseudonyms.
//!
//! Without its entry here, a pseudonym says nothing about the user, and the chain of lines stays
//! whole.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::store::{self, StoreError};

/// Most users of a client that have entries; the one whose last line is oldest loses its entry.
const MAX_OF_CLIENT: usize = 1000;

/// A user whose name the trail shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct User {
    client: String,
    user: String,
    /// Day of the latest line, as `2026-11-30`.
    day: String,
}

/// The users' names by pseudonym, in a file beside the trail.
#[derive(Debug)]
pub(super) struct Names {
    path: PathBuf,
    users: BTreeMap<String, User>,
}

impl Names {
    pub(super) fn open(folder: &Path) -> io::Result<Self> {
        let path = folder.join("names.json");
        let users = match store::read(&path) {
            Err(error @ StoreError::Content { .. }) => {
                warn!("audit trail: {error}: users stand as pseudonyms in lines up to now");
                BTreeMap::new()
            }
            users => users.map_err(io::Error::other)?,
        };
        Ok(Self { path, users })
    }

    /// Replaces the names of clients' users; the names are on the disk when this returns.
    pub(super) fn hide<'a>(
        &mut self,
        users: impl IntoIterator<Item = (&'a str, &'a mut String)>,
        day: &str,
    ) -> io::Result<()> {
        let mut users = users.into_iter().filter(|(_, user)| !user.is_empty()).peekable();
        if users.peek().is_none() {
            return Ok(());
        }
        let before = self.users.clone();
        for (client, user) in users {
            *user = self.pseudonym(client, user, day)?;
        }
        if self.users == before {
            return Ok(());
        }
        self.write().inspect_err(|_| self.users = before)
    }

    fn pseudonym(&mut self, client: &str, user: &str, day: &str) -> io::Result<String> {
        let mut of_client = 0;
        for (pseudonym, known) in &mut self.users {
            if known.client != client {
                continue;
            }
            if known.user == user {
                known.day = day.into();
                return Ok(pseudonym.clone());
            }
            of_client += 1;
        }
        if of_client >= MAX_OF_CLIENT {
            let oldest = self.users.iter().filter(|(_, known)| known.client == client);
            let oldest = oldest.min_by_key(|(_, known)| known.day.clone()).map(|(name, _)| name.clone());
            self.users.remove(&oldest.unwrap_or_default());
        }
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|e| io::Error::other(e.to_string()))?;
        let pseudonym = format!("u-{}", data_encoding::HEXLOWER.encode(&bytes));
        let known = User { client: client.into(), user: user.into(), day: day.into() };
        self.users.insert(pseudonym.clone(), known);
        Ok(pseudonym)
    }

    /// Puts the user's name in place of the pseudonym, unless it is forgotten.
    pub(super) fn show(&self, user: &mut String) {
        if let Some(known) = self.users.get(user) {
            user.clone_from(&known.user);
        }
    }

    /// Forgets a user; returns `false` if the trail has no such name.
    pub(super) fn forget(&mut self, client: &str, user: &str) -> io::Result<bool> {
        self.keep(|known| known.client != client || known.user != user)
    }

    /// Forgets the users without a line since a day.
    pub(super) fn forget_before(&mut self, day: &str) -> io::Result<bool> {
        self.keep(|known| known.day.as_str() >= day)
    }

    fn keep(&mut self, kept: impl Fn(&User) -> bool) -> io::Result<bool> {
        let before = self.users.clone();
        self.users.retain(|_, known| kept(known));
        if self.users == before {
            return Ok(false);
        }
        self.write().inspect_err(|_| self.users = before)?;
        Ok(true)
    }

    fn write(&self) -> io::Result<()> {
        store::write(&self.path, &self.users).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: &str = "2026-11-30";

    /// Hides a user; returns the pseudonym.
    fn hidden(names: &mut Names, client: &str, user: &str, day: &str) -> String {
        let mut user = user.to_owned();
        names.hide([(client, &mut user)], day).unwrap();
        user
    }

    #[test]
    fn a_user_keeps_a_pseudonym_until_it_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let mut names = Names::open(folder.path()).unwrap();
        let alice = hidden(&mut names, "vm-1", "alice", DAY);
        assert!(alice.starts_with("u-") && alice.len() == 18, "{alice}");
        assert_eq!(hidden(&mut names, "vm-1", "alice", DAY), alice);
        let other = hidden(&mut names, "vm-2", "alice", DAY);
        assert_ne!(other, alice, "another client's");
        assert_eq!(hidden(&mut names, "vm-1", "", DAY), "");

        // A restart.
        let mut names = Names::open(folder.path()).unwrap();
        let shown = |names: &Names, pseudonym: &str| {
            let mut user = pseudonym.to_owned();
            names.show(&mut user);
            user
        };
        assert_eq!((shown(&names, &alice), shown(&names, "u-0")), ("alice".into(), "u-0".into()));
        assert!(names.forget("vm-1", "alice").unwrap());
        assert!(!names.forget("vm-1", "alice").unwrap());
        let mut names = Names::open(folder.path()).unwrap();
        assert_eq!((shown(&names, &alice), shown(&names, &other)), (alice.clone(), "alice".into()));
        assert_ne!(hidden(&mut names, "vm-1", "alice", DAY), alice);
    }

    #[test]
    fn names_go_with_their_last_line_and_a_client_has_a_bounded_number() {
        let folder = tempfile::tempdir().unwrap();
        let mut names = Names::open(folder.path()).unwrap();
        let early = hidden(&mut names, "vm-1", "early", "2026-11-28");
        hidden(&mut names, "vm-1", "alice", "2026-11-28");
        let alice = hidden(&mut names, "vm-1", "alice", DAY);
        names.forget_before("2026-11-29").unwrap();
        assert!(!names.users.contains_key(&early) && names.users.contains_key(&alice));
        let other = hidden(&mut names, "vm-2", "carol", "2026-11-28");
        let mut users: Vec<_> = (0..MAX_OF_CLIENT).map(|n| format!("user{n}")).collect();
        names.hide(users.iter_mut().map(|user| ("vm-1", user)), "2026-12-01").unwrap();
        assert_eq!(names.users.len(), MAX_OF_CLIENT + 1);
        assert!(!names.users.contains_key(&alice) && names.users.contains_key(&other));
    }

    #[test]
    fn a_broken_file_of_names_hides_them() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("names.json"), "{\"u-1").unwrap();
        let mut names = Names::open(folder.path()).unwrap();
        hidden(&mut names, "vm-1", "alice", DAY);
        assert_eq!(Names::open(folder.path()).unwrap().users.len(), 1);
    }
}
