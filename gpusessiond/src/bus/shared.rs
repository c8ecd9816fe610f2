//! State that all objects share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use super::turns::Turns;
use crate::handover::Store;
use crate::leases::{Leases, Snapshot};
use crate::login::Sessions;
use crate::renewal::Standing;
use crate::settings::Settings;

/// State that all objects share.
pub struct Shared {
    pub(crate) leases: Arc<dyn Leases>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) sessions: Option<Arc<Sessions>>,
    pub(crate) store: Option<Store>,
    /// This client's certificate; `None` before it has joined.
    pub(crate) identity: watch::Receiver<Option<Standing>>,
    /// Number of calls in progress per user.
    pub(crate) calls: Mutex<HashMap<u32, usize>>,
    /// Turns of the calls that ask servers.
    pub(super) turns: Turns,
    /// Latest published snapshot: replies wait for it, so that the objects that they name exist.
    pub(crate) published: watch::Sender<Arc<Snapshot>>,
    /// Whether every lease of class boot was held at the same time since the start.
    pub(crate) boot_complete: Mutex<bool>,
    /// Leases being created, per owner's uid.
    pub(crate) creating: Mutex<HashMap<u32, UnderWay>>,
    /// Why polkit failed to decide last; empty if it decided.
    pub(crate) polkit_trouble: Mutex<String>,
}

impl Shared {
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.published.borrow().clone()
    }

    pub(crate) fn state(&self, snapshot: &Snapshot) -> &'static str {
        let (target, ready) = snapshot.pool();
        let online = snapshot.server_facts().any(|s| s.state == "online" || s.state == "draining");
        let connecting = snapshot.server_facts().any(|s| s.state == "connecting");
        if !online && !connecting {
            "offline"
        } else if ready >= target && online {
            "ready"
        } else if self.boot_complete() || snapshot.lease_facts().any(|l| l.trouble.is_some()) {
            "degraded"
        } else {
            "starting"
        }
    }

    /// Returns the end of this client's certificate; 0 before it has joined.
    pub(crate) fn identity_expires_usec(&self) -> u64 {
        self.identity.borrow().as_ref().map_or(0, |s| s.facts.expires_unix.saturating_mul(1_000_000))
    }

    pub(crate) fn boot_complete(&self) -> bool {
        *self.boot_complete.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Number of leases that a user is creating.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnderWay {
    pub(super) all: usize,
    pub(super) persistent: usize,
}
