//! The configuration as it is now, and how it changes while the daemon runs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::sync::{Mutex, watch};
use tracing::{error, info, warn};

use crate::access::Gate;
use crate::config::{Config, ConfigError};
use crate::leases::{Leases, Owner, Spec};

/// See the module.
pub struct Settings {
    path: PathBuf,
    current: watch::Sender<Arc<Config>>,
    gate: Arc<Gate>,
    leases: Arc<dyn Leases>,
    /// One change at a time.
    changing: Mutex<()>,
    /// Leases for users who are not known.
    unknown_users: watch::Sender<Vec<Spec>>,
}

/// How long the user database may take; the start waits meanwhile.
const LOOK_UP: Duration = Duration::from_secs(1);
/// Until users who were not known are looked up again.
const ASK_AGAIN: Duration = Duration::from_secs(30);

impl Settings {
    /// A configuration that was read from `path`; nothing is wanted before [`Settings::apply`].
    pub fn new(path: PathBuf, config: Config, gate: Arc<Gate>, leases: Arc<dyn Leases>) -> Arc<Self> {
        let current = watch::channel(Arc::new(config)).0;
        Arc::new(Self {
            path,
            current,
            gate,
            leases,
            changing: Mutex::new(()),
            unknown_users: watch::channel(Vec::new()).0,
        })
    }

    /// The configuration as it is now.
    pub fn get(&self) -> Arc<Config> {
        self.current.borrow().clone()
    }

    /// Who may use the leases for all.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Notified at each change; and when a reload found nothing changed, since other files may have.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Config>> {
        self.current.subscribe()
    }

    /// Wants what the configuration says, and says where it names users whom nobody knows.
    pub async fn apply(&self) {
        self.want().await;
        for spec in self.unknown_users.borrow().iter() {
            warn!("lease {}: there is no user {}", spec.name, spec.user);
        }
    }

    async fn want(&self) {
        let config = self.get();
        self.gate.set(config.access.clone());
        if config.transport != Config::default().transport {
            warn!("[transport] has no effect yet: data travels over TCP, on eight lanes in each direction");
        }
        let specs = specs(&config).await;
        let unknown = |s: &&Spec| s.uid.is_none() && matches!(s.owner, Owner::User(_));
        self.unknown_users.send_replace(specs.iter().filter(unknown).cloned().collect());
        self.leases.configure(specs).await;
    }

    /// Asks again for users whom the user database did not know: at boot it may come after this daemon.
    pub async fn follow_users(&self) {
        let mut unknown = self.unknown_users.subscribe();
        while unknown.wait_for(|unknown| !unknown.is_empty()).await.is_ok() {
            tokio::time::sleep(ASK_AGAIN).await;
            let _one = self.changing.lock().await;
            self.want().await;
        }
    }

    /// Reads the files anew and applies what changed. With files that cannot be used, everything stays as it is.
    pub async fn reload(&self) -> Result<(), ConfigError> {
        let _one = self.changing.lock().await;
        // systemd waits for READY=1 after this; without the time it would not know which reload it was.
        let mut states = vec![NotifyState::Reloading];
        states.extend(NotifyState::monotonic_usec_now());
        let _ = sd_notify::notify(&states);
        let result = Config::load(&self.path);
        let result = match result {
            Ok(config) => {
                info!("configuration read anew; {} lease(s) configured", config.leases.len());
                self.current.send_replace(Arc::new(config));
                self.apply().await;
                Ok(())
            }
            Err(error) => {
                error!("the configuration stays as it was: {error}");
                Err(error)
            }
        };
        let _ = sd_notify::notify(&[NotifyState::Ready]);
        result
    }
}

/// The leases of a configuration, with the uids of the users that it names.
async fn specs(config: &Config) -> Vec<Spec> {
    let look_up = |name: String| tokio::task::spawn_blocking(move || nix::unistd::User::from_name(&name));
    // All at once: a database that hangs holds up the start once.
    let specs: Vec<_> = (0..)
        .zip(&config.leases)
        .map(|(order, lease)| (Spec::configured(lease, order), lease.for_user.clone().map(look_up)))
        .collect();
    let deadline = tokio::time::Instant::now() + LOOK_UP;
    let mut found = Vec::with_capacity(specs.len());
    for (mut spec, user) in specs {
        if let Some(user) = user {
            let user = tokio::time::timeout_at(deadline, user).await.ok().and_then(Result::ok);
            spec.uid = user.and_then(Result::ok).flatten().map(|u| u.uid.as_raw());
        }
        found.push(spec);
    }
    found
}
