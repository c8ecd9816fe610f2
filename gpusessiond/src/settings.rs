//! The current configuration, and its changes while the daemon runs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::unistd::User;
use sd_notify::NotifyState;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;
use tracing::{error, info, warn};

use crate::access::Gate;
use crate::config::{Config, ConfigError};
use crate::leases::{Leases, Owner, Spec};

/// The current configuration and the parts of the daemon that it sets.
pub struct Settings {
    path: PathBuf,
    current: watch::Sender<Arc<Config>>,
    gate: Arc<Gate>,
    leases: Arc<dyn Leases>,
    /// Held during a change, so that changes do not overlap.
    changing: Mutex<()>,
    /// Leases for users whom the user database does not know.
    unknown_users: watch::Sender<Vec<Spec>>,
    users: Mutex<Users>,
}

/// Time that the user database may take; the daemon's start waits meanwhile.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause before unknown users are looked up again.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);

impl Settings {
    /// Creates settings read from `path`; they take effect with [`Settings::apply`].
    pub fn new(path: PathBuf, config: Config, gate: Arc<Gate>, leases: Arc<dyn Leases>) -> Arc<Self> {
        let current = watch::channel(Arc::new(config)).0;
        Arc::new(Self {
            path,
            current,
            gate,
            leases,
            changing: Mutex::new(()),
            unknown_users: watch::channel(Vec::new()).0,
            users: Mutex::default(),
        })
    }

    /// Returns the current configuration.
    pub fn get(&self) -> Arc<Config> {
        self.current.borrow().clone()
    }

    /// Returns the access rules.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Subscribes to changes.
    ///
    /// A reload that changes nothing notifies too, since `servers.toml` may have changed.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Config>> {
        self.current.subscribe()
    }

    /// Applies the configuration, and warns of leases for unknown users.
    pub async fn apply(&self) {
        let config = self.get();
        self.gate.set(config.access.clone());
        let uids = self.users.lock().await.resolve(&config).await;
        self.leases.allow_clear(config.transport.encryption == "server");
        self.configure(specs(&config, &uids)).await;
        let (transport, default) = (&config.transport, Config::default().transport);
        if (&transport.order, transport.lanes) != (&default.order, default.lanes) {
            warn!(
                "[transport] order and lanes have no effect yet: data travels over TCP, on eight lanes in each direction"
            );
        }
        for spec in self.unknown_users.borrow().iter() {
            warn!(
                "lease {}: user {} is unknown to the user database; looking again every 30 s",
                spec.name, spec.user
            );
        }
    }

    async fn configure(&self, specs: Vec<Spec>) {
        let unknown = |s: &&Spec| s.uid.is_none() && matches!(s.owner, Owner::User(_));
        self.unknown_users.send_replace(specs.iter().filter(unknown).cloned().collect());
        self.leases.configure(specs).await;
    }

    /// Looks unknown users up again: at boot the user database may start after this daemon.
    pub async fn follow_users(&self) {
        let mut unknown = self.unknown_users.subscribe();
        while unknown.wait_for(|unknown| !unknown.is_empty()).await.is_ok() {
            tokio::time::sleep(RETRY_INTERVAL).await;
            let _one = self.changing.lock().await;
            let config = self.get();
            let uids = self.users.lock().await.resolve(&config).await;
            // Without a newly known user there is no reason to apply the leases again.
            if self.unknown_users.borrow().iter().any(|s| uids.contains_key(&s.user)) {
                self.configure(specs(&config, &uids)).await;
            }
        }
    }

    /// Reads the files again and applies the changes; files with errors change nothing.
    pub async fn reload(&self) -> Result<(), ConfigError> {
        let _one = self.changing.lock().await;
        // systemd waits for READY=1 after this, and tells reloads apart by the time.
        let mut states = vec![NotifyState::Reloading];
        states.extend(NotifyState::monotonic_usec_now());
        let _ = sd_notify::notify(&states);
        let result = Config::load(&self.path);
        let result = match result {
            Ok(config) => {
                info!("configuration reloaded; {} lease(s) configured", config.leases.len());
                self.current.send_replace(Arc::new(config));
                self.apply().await;
                Ok(())
            }
            Err(error) => {
                error!("configuration not reloaded: {error}; the present one stays");
                Err(error)
            }
        };
        let _ = sd_notify::notify(&[NotifyState::Ready]);
        result
    }
}

/// Returns the leases of a configuration, with the uids of the users that it names.
fn specs(config: &Config, uids: &BTreeMap<String, u32>) -> Vec<Spec> {
    let leases = (0..).zip(&config.leases);
    leases
        .map(|(order, lease)| {
            let uid = lease.for_user.as_ref().and_then(|name| uids.get(name).copied());
            Spec { uid, ..Spec::configured(lease, order) }
        })
        .collect()
}

/// A user name and the user database's answer.
type Looked = (String, nix::Result<Option<User>>);

/// Looked-up users that configurations name.
#[derive(Default)]
struct Users {
    known: BTreeMap<String, u32>,
    /// The lookup in progress: a database that hangs keeps one thread, not one per lookup.
    asking: Option<JoinHandle<Vec<Looked>>>,
}

impl Users {
    /// Looks up all users that a configuration names.
    ///
    /// Users without an answer in time keep their last known uid.
    async fn resolve(&mut self, config: &Config) -> BTreeMap<String, u32> {
        let names: BTreeSet<String> = config.leases.iter().filter_map(|l| l.for_user.clone()).collect();
        if names.is_empty() {
            return BTreeMap::new();
        }
        let ask = || names.into_iter().map(|name| (name.clone(), User::from_name(&name))).collect();
        let asking = self.asking.get_or_insert_with(|| tokio::task::spawn_blocking(ask));
        if let Ok(answers) = tokio::time::timeout(LOOKUP_TIMEOUT, asking).await {
            self.asking = None;
            for (name, answer) in answers.unwrap_or_default() {
                match answer {
                    Ok(Some(user)) => drop(self.known.insert(name, user.uid.as_raw())),
                    Ok(None) => drop(self.known.remove(&name)),
                    Err(_) => {}
                }
            }
        }
        self.known.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LeaseConfig;

    fn config(names: &[&str]) -> Config {
        let lease =
            |name: &&str| LeaseConfig { for_user: Some((*name).to_owned()), ..LeaseConfig::default() };
        Config { leases: names.iter().map(lease).collect(), ..Config::default() }
    }

    #[tokio::test]
    async fn users_are_asked_for_and_stay_known_while_the_database_hangs() {
        let mut users = Users::default();
        let config = config(&["root", "nobody-of-this-name"]);
        let uids = users.resolve(&config).await;
        assert_eq!(uids, BTreeMap::from([("root".to_owned(), 0)]));
        assert_eq!(specs(&config, &uids).iter().map(|s| s.uid).collect::<Vec<_>>(), [Some(0), None]);
        // While one lookup hangs, no second one starts; its late answer counts.
        let (answer, hangs) = std::sync::mpsc::channel();
        users.asking = Some(tokio::task::spawn_blocking(move || hangs.recv().unwrap_or_default()));
        assert_eq!(users.resolve(&config).await, uids);
        assert!(users.asking.is_some());
        answer.send(vec![("root".to_owned(), Ok(None))]).unwrap();
        assert!(users.resolve(&config).await.is_empty() && users.asking.is_none());
    }
}
