//! Variables that logins get: `[environment]`, for users with access or a lease.
//!
//! Root writes the variables to a file ([`publish`]) when the daemon starts and reloads, and logins
//! read them there: a daemon that was taken over sets none. The daemon says who gets them
//! ([`Audience`]). It answers the login socket, and writes a file for the environment generator of
//! a user's systemd, which must not wait for a daemon that may hang.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;

use gpusession_proto::login::variables;
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};

use crate::access::Gate;
use crate::config::{Access, Config};
use crate::paths;

/// Largest file of an audience that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Rules that decide who gets the variables.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Audience {
    access: Access,
    /// Names of users with leases of their own.
    owners: Vec<String>,
}

impl Audience {
    /// Extracts the rules from a configuration.
    pub fn of(config: &Config) -> Self {
        Self {
            access: config.access.clone(),
            owners: config.leases.iter().filter_map(|l| l.for_user.clone()).collect(),
        }
    }

    /// Returns `true` for a user with access or a lease; `access` is the decision of `[access]`.
    pub fn includes(&self, name: Option<&str>, access: bool) -> bool {
        access || name.is_some_and(|name| self.owners.iter().any(|owner| owner == name))
    }

    /// Returns `true` for a uid with access or a lease.
    pub async fn includes_uid(&self, uid: u32) -> bool {
        let person = Arc::new(Gate::new(self.access.clone())).person(uid).await;
        self.includes(person.name.as_deref(), person.access)
    }

    /// Writes the file that [`Audience::read`] reads.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        paths::publish(path, &serde_json::to_vec(self)?)
    }

    /// Reads the file; `None` if it does not exist.
    pub fn read(path: &Path) -> io::Result<Option<Self>> {
        let mut text = Vec::new();
        match File::open(path) {
            Ok(file) => file.take(MAX_FILE).read_to_end(&mut text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(Some(serde_json::from_slice(&text)?))
    }
}

/// Writes `[environment]` to the file that [`published`] and `pam_gpusession.so` read.
///
/// The caller is root: readers take no other user's file.
pub fn publish(config: &Config, path: &Path) -> io::Result<()> {
    let given = config.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    paths::publish(path, variables::encode(given).map_err(io::Error::other)?.as_bytes())
}

/// Reads the variables that root has written; `None` without a file.
///
/// # Errors
/// Another user could have written the file, or it has a variable that is never set at logins.
pub fn published(path: &Path) -> io::Result<Option<BTreeMap<String, String>>> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let file = match OpenOptions::new().read(true).custom_flags(flags.bits()).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    variables::trusted(&file.metadata()?, nix::unistd::geteuid().as_raw()).map_err(io::Error::other)?;
    let mut text = String::new();
    file.take(variables::MAX_FILE).read_to_string(&mut text)?;
    let given = variables::parse(&text).map_err(io::Error::other)?;
    Ok(Some(given.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

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
        let audience = Audience::of(&config());
        assert!(audience.includes(Some("alice"), true));
        assert!(audience.includes(Some("bob"), false));
        assert!(!audience.includes(Some("carol"), false));
        assert!(!audience.includes(None, false));
        assert!(!audience.includes_uid(0).await, "root has no access");
        let everyone = Audience::of(&Config { access: Config::default().access, ..config() });
        assert!(everyone.includes_uid(0).await);
    }

    #[test]
    fn a_written_audience_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("login/access.json");
        assert_eq!(Audience::read(&path).unwrap(), None);
        let audience = Audience::of(&config());
        audience.write(&path).unwrap();
        assert_eq!(Audience::read(&path).unwrap(), Some(audience));
        fs::write(&path, "[").unwrap();
        assert!(Audience::read(&path).is_err());
    }

    #[test]
    fn published_variables_read_back_and_foreign_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("environment");
        assert_eq!(published(&path).unwrap(), None);
        publish(&config(), &path).unwrap();
        assert_eq!(published(&path).unwrap(), Some(config().environment));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        let link = folder.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(published(&link).is_err());
        for text in ["LD_PRELOAD=x\n", "NCCL_DEBUG=$(id)\n", "[\n"] {
            fs::write(&path, text).unwrap();
            assert!(published(&path).is_err(), "{text}");
        }
        publish(&config(), &path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o664)).unwrap();
        assert!(published(&path).is_err(), "its group may write it");
        if nix::unistd::geteuid().is_root() {
            publish(&config(), &path).unwrap();
            std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
            let error = published(&path).unwrap_err().to_string();
            assert_eq!(error, "the file of variables is not root's");
        }
    }
}
