//! The configuration as it is now, and how it changes while the daemon runs.

use std::path::PathBuf;
use std::sync::Arc;

use sd_notify::NotifyState;
use tokio::sync::{Mutex, watch};
use tracing::{error, info, warn};

use crate::access::Gate;
use crate::config::{Class, Config, ConfigError};
use crate::leases::{Leases, Spec};

/// See the module.
pub struct Settings {
    path: PathBuf,
    current: watch::Sender<Arc<Config>>,
    gate: Arc<Gate>,
    leases: Arc<dyn Leases>,
    /// One change at a time.
    changing: Mutex<()>,
}

impl Settings {
    /// A configuration that was read from `path`; nothing is wanted before [`Settings::apply`].
    pub fn new(path: PathBuf, config: Config, gate: Arc<Gate>, leases: Arc<dyn Leases>) -> Arc<Self> {
        let current = watch::channel(Arc::new(config)).0;
        Arc::new(Self { path, current, gate, leases, changing: Mutex::new(()) })
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

    /// Wants what the configuration says.
    pub async fn apply(&self) {
        let config = self.get();
        self.gate.set(config.access.clone());
        if config.transport != Config::default().transport {
            warn!("[transport] has no effect yet: data travels over TCP, on eight lanes in each direction");
        }
        self.leases.configure(specs(&config).await).await;
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
    let mut specs = Vec::with_capacity(config.leases.len());
    for (order, lease) in (0..).zip(&config.leases) {
        let mut spec = Spec::configured(lease, order);
        if let Some(name) = lease.for_user.clone() {
            let user = tokio::task::spawn_blocking(move || nix::unistd::User::from_name(&name)).await;
            spec.uid = user.ok().and_then(Result::ok).flatten().map(|u| u.uid.as_raw());
            if spec.uid.is_none() && matches!(lease.class, Class::Boot | Class::Background) {
                warn!("lease {}: there is no user {}", lease.name, spec.user);
            }
        }
        specs.push(spec);
    }
    specs
}
