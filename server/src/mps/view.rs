//! Listings of the domains.

use serde::{Deserialize, Serialize};

use super::control::ServerState;
use super::domain::{Domain, FaultView, Phase};

/// One MPS server in a listing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ServerView {
    /// Process id of the server.
    pub pid: u32,
    /// initializing, active, fault, or the reason why the state is unknown.
    pub state: String,
    /// Process ids of its clients.
    pub clients: Vec<u32>,
}

/// One domain in a listing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DomainView {
    /// Client of the domain; `*`: all clients.
    pub client: String,
    /// Sorted UUIDs of the domain's GPUs.
    pub gpus: Vec<String>,
    /// starting, initializing, active, fault, failed.
    pub state: String,
    /// Reason of the state `failed`; else empty.
    pub reason: String,
    /// Process id of the control daemon.
    pub daemon_pid: Option<u32>,
    /// Starts of the daemon after the first one.
    pub restarts: u32,
    /// Ids of the domain's leases.
    pub leases: Vec<String>,
    /// MPS servers.
    pub servers: Vec<ServerView>,
    /// The latest faults, oldest first.
    pub faults: Vec<FaultView>,
}

pub(super) async fn view(domain: &Domain) -> DomainView {
    let (phase, leases, faults, starts) = {
        let inner = domain.inner();
        let leases = inner.leases.keys().cloned().collect();
        (inner.phase.clone(), leases, inner.faults.iter().cloned().collect(), inner.starts)
    };
    let mut servers = Vec::new();
    let mut view_state = match &phase {
        Phase::Starting => "starting",
        Phase::Fault => "fault",
        Phase::Failed(_) => "failed",
        Phase::Up(..) => "active",
    };
    if let Phase::Up(generation, _) = &phase {
        let control = &generation.control;
        for pid in control.servers().await.unwrap_or_default() {
            let state = control.state(pid).await;
            view_state = match state {
                Ok(ServerState::Active) => view_state,
                Ok(state) => state.as_str(),
                Err(_) => view_state,
            };
            let state = state.map_or_else(|e| e, |s| s.as_str().into());
            servers.push(ServerView { pid, state, clients: control.clients(pid).await.unwrap_or_default() });
        }
    }
    DomainView {
        client: domain.name().into(),
        gpus: domain.key.gpus.clone(),
        state: view_state.into(),
        reason: if let Phase::Failed(why) = &phase { why.clone() } else { String::new() },
        daemon_pid: if let Phase::Up(_, pid) = &phase { *pid } else { None },
        restarts: starts.saturating_sub(1),
        leases,
        servers,
        faults,
    }
}
