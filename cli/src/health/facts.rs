//! Facts that the checks judge: those that need the network or the daemon are gathered first.

use std::path::PathBuf;

use gpusession_bus::describe::{Described, Survey};
use gpusession_diagnosis::machine::Machine;
use gpusession_proto::user_cache;
use gpusessiond::identity::Home;
use gpusessiond::{config, paths};
use tokio::task::JoinSet;

use super::probe::{self, Probe};
use crate::{daemon, servers};

/// The daemon's answer.
pub enum Daemon {
    /// State, and the ids of the leases that programs of this shell get.
    Answers(Box<Described>, Vec<String>),
    /// Why it does not answer.
    Silent(String),
}

/// Facts that the checks judge.
pub struct Facts {
    pub machine: Machine,
    /// Whether no server is asked.
    pub local: bool,
    pub daemon: Daemon,
    /// Folder of gpusession's libraries.
    pub library: Option<PathBuf>,
    /// Folder of compiled code.
    pub cache: Option<PathBuf>,
    /// Socket on which programs ask for GPUs.
    pub socket: PathBuf,
    pub configuration: PathBuf,
    /// Folder of the daemon's state.
    pub state: Option<PathBuf>,
    pub identity: PathBuf,
    /// Control addresses of the servers, or why their file cannot be used.
    pub addresses: std::result::Result<Vec<String>, String>,
    pub probes: Vec<Probe>,
    /// `None` if neither the daemon nor a readable identity can ask.
    pub survey: Option<Survey>,
}

impl Facts {
    /// Gathers the facts of this machine.
    pub async fn gather(local: bool) -> Self {
        let home = Home::of_caller();
        let daemon = ask_daemon().await;
        let addresses = match &daemon {
            Daemon::Answers(described, _) if !described.servers.is_empty() => {
                Ok(described.servers.iter().map(|server| server.address.clone()).collect())
            }
            _ => home.addresses().map_err(|error| error.to_string()),
        };
        let mut facts = Self {
            machine: Machine::here(),
            local,
            daemon,
            library: paths::library_directory().filter(|folder| paths::has_library(folder)),
            cache: user_cache::folder(),
            socket: paths::grant_socket(),
            configuration: config::default_path(),
            state: Some(paths::state_directory()),
            // The daemon's identity counts also where this user may not read it.
            identity: Home::user().filter(Home::exists).unwrap_or_else(Home::system).identity,
            addresses,
            probes: Vec::new(),
            survey: None,
        };
        if !local {
            facts.survey = facts.survey(&home).await;
            facts.probes = facts.probe().await;
        }
        facts
    }

    /// Asks the servers for descriptions: with this user's identity, else through the daemon.
    async fn survey(&self, home: &Home) -> Option<Survey> {
        let addresses = self.addresses.clone().ok().filter(|addresses| !addresses.is_empty())?;
        if let Ok(identity) = home.load()
            && let Ok(survey) = servers::direct(&identity, addresses).await
        {
            return Some(survey);
        }
        if let Daemon::Silent(_) = self.daemon {
            return None;
        }
        daemon::Daemon::connect().await.ok()?.survey().await.ok()
    }

    async fn probe(&self) -> Vec<Probe> {
        let mut probes = JoinSet::new();
        for (index, address) in self.addresses.iter().flatten().cloned().enumerate() {
            let surveyed = self.survey.iter().flat_map(|survey| &survey.servers);
            let data = surveyed.filter(|server| server.address == address);
            let data = data.flat_map(|server| server.data_addresses.clone()).collect();
            probes.spawn(async move { (index, probe::probe(address, data).await) });
        }
        let mut probes = probes.join_all().await;
        probes.sort_by_key(|(index, _)| *index);
        probes.into_iter().map(|(_, probe)| probe).collect()
    }

    /// Returns `true` if the daemon answers.
    pub fn answers(&self) -> bool {
        matches!(self.daemon, Daemon::Answers(..))
    }

    /// Returns `true` if this machine is set up as a client.
    pub fn client(&self) -> bool {
        self.answers()
            || self.machine.exists(&self.configuration)
            || self.machine.exists(self.identity.join("client.pem"))
    }

    /// Returns `true` if a lease or a variable comes only with a login that PAM reports.
    pub fn needs_pam(&self) -> bool {
        matches!(&self.daemon, Daemon::Answers(d, _) if d.leases_on_demand || !d.environment.is_empty())
    }

    /// Returns `true` if the daemon or a server has answered.
    pub(super) fn reached(&self) -> bool {
        let servers = self.survey.iter().flat_map(|survey| &survey.servers);
        self.answers() || servers.into_iter().any(|s| s.trouble.is_none())
    }
}

/// Asks the daemon for its state, without starting it.
async fn ask_daemon() -> Daemon {
    if !daemon::runs().await {
        return Daemon::Silent("the daemon is not running".into());
    }
    let asked = async { daemon::Daemon::connect().await?.describe_mine().await };
    match asked.await {
        Ok((described, mine)) => Daemon::Answers(Box::new(described), mine),
        Err(failure) => Daemon::Silent(failure.message),
    }
}

/// Facts of tests.
#[cfg(test)]
pub mod testing {
    pub use gpusession_diagnosis::testing::{plant, program};

    use super::*;

    /// Facts of a machine with nothing on it.
    pub fn facts() -> (tempfile::TempDir, Facts) {
        let root = tempfile::tempdir().unwrap();
        let facts = Facts {
            machine: Machine::below(root.path()),
            local: false,
            daemon: Daemon::Silent("the daemon is not running".into()),
            library: None,
            cache: Some("/home/ada/.cache/gpusession/compiled".into()),
            socket: "/run/gpusession/grant.sock".into(),
            configuration: "/etc/gpusession/gpusession.toml".into(),
            state: Some("/var/lib/gpusession".into()),
            identity: "/var/lib/gpusession/identity".into(),
            addresses: Ok(vec![]),
            probes: vec![],
            survey: None,
        };
        (root, facts)
    }

    /// State of a daemon without leases.
    pub fn described() -> Described {
        Described {
            schema: 1,
            version: env!("CARGO_PKG_VERSION").into(),
            state: "ready".into(),
            leases_on_demand: false,
            gpus_wanted: 0,
            gpus_leased: 0,
            boot_allocation_complete: true,
            configuration: vec![],
            environment: Default::default(),
            identity: None,
            leases: vec![],
            servers: vec![],
            sessions: vec![],
        }
    }
}
