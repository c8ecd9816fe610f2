//! Variables that logins get: `[environment]`, for users with access or a lease.
//!
//! The login socket answers with them. The environment generator of a user's systemd must not wait
//! for a daemon that may hang, so it reads them from a file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use gpusession_proto::login;
use serde::{Deserialize, Serialize};

use crate::access::Gate;
use crate::config::{Access, Config};
use crate::paths;

/// Largest file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Variables, and the rules that decide who gets them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    access: Access,
    /// Names of users with leases of their own.
    owners: Vec<String>,
    variables: BTreeMap<String, String>,
}

impl Environment {
    /// Extracts variables and rules from a configuration.
    pub fn of(config: &Config) -> Self {
        Self {
            access: config.access.clone(),
            owners: config.leases.iter().filter_map(|l| l.for_user.clone()).collect(),
            variables: config.environment.clone(),
        }
    }

    /// Returns the variables of a user with access or a lease; `access` is the decision of
    /// `[access]`.
    pub fn of_user(&self, name: Option<&str>, access: bool) -> Option<&BTreeMap<String, String>> {
        let owner = || name.is_some_and(|name| self.owners.iter().any(|owner| owner == name));
        (access || owner()).then_some(&self.variables)
    }

    /// Returns the variables of a uid; empty for a user without access and leases.
    pub async fn of_uid(&self, uid: u32) -> BTreeMap<String, String> {
        let person = Arc::new(Gate::new(self.access.clone())).person(uid).await;
        self.of_user(person.name.as_deref(), person.access).cloned().unwrap_or_default()
    }

    /// Writes the file that [`Environment::read`] reads.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        paths::publish(path, &serde_json::to_vec(self)?)
    }

    /// Reads the file; `None` if it does not exist.
    ///
    /// Rejects variables that the daemon may not set at logins.
    pub fn read(path: &Path) -> io::Result<Option<Self>> {
        let mut text = Vec::new();
        match File::open(path) {
            Ok(file) => file.take(MAX_FILE).read_to_end(&mut text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let environment: Self = serde_json::from_slice(&text)?;
        for (name, value) in &environment.variables {
            login::check(name, value).map_err(io::Error::other)?;
        }
        Ok(Some(environment))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::config::LeaseConfig;

    fn config() -> Config {
        Config {
            access: Access { users: vec!["alice".into()], root: false, ..Config::default().access },
            leases: vec![LeaseConfig { for_user: Some("bob".into()), ..LeaseConfig::default() }],
            environment: [("NCCL_DEBUG".to_owned(), "WARN".to_owned())].into(),
            ..Config::default()
        }
    }

    #[tokio::test]
    async fn is_for_users_with_access_or_a_lease_of_their_own() {
        let environment = Environment::of(&config());
        assert!(environment.of_user(Some("alice"), true).is_some());
        assert!(environment.of_user(Some("bob"), false).is_some());
        assert!(environment.of_user(Some("carol"), false).is_none());
        assert!(environment.of_user(None, false).is_none());
        assert!(environment.of_uid(0).await.is_empty(), "root has no access");
        let everyone = Environment::of(&Config { access: Config::default().access, ..config() });
        assert_eq!(everyone.of_uid(0).await, config().environment);
    }

    #[test]
    fn a_written_environment_reads_back_and_a_forbidden_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("login/environment.json");
        assert_eq!(Environment::read(&path).unwrap(), None);
        let environment = Environment::of(&config());
        environment.write(&path).unwrap();
        assert_eq!(Environment::read(&path).unwrap(), Some(environment));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        let text = fs::read_to_string(&path).unwrap();
        for (from, to) in [("NCCL_DEBUG", "LD_PRELOAD"), ("WARN", "$(id)"), ("{", "[")] {
            fs::write(&path, text.replacen(from, to, 1)).unwrap();
            assert!(Environment::read(&path).is_err(), "{to}");
        }
    }
}
