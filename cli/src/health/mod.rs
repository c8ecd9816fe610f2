//! `gpusession health`: checks of this machine, of the way to its servers, and of a CUDA program.
//!
//! Each group has a table of checks. A check reads [`Facts`] and decides; the facts that need the
//! network or the daemon are gathered first.

mod gpu;
mod library;
mod login;
mod network;
mod probe;

use std::path::{Path, PathBuf};

use gpusession_bus::describe::{Described, Survey};
use gpusession_diagnosis::check::{Finding, Findings, Place};
use gpusession_diagnosis::machine::Machine;
use gpusession_diagnosis::{gpu_host, host};
use gpusession_proto::user_cache;
use gpusessiond::identity::Home;
use gpusessiond::{config, paths};
use tokio::task::JoinSet;

use crate::daemon;
use crate::exit::{Result, code};
use crate::servers;
use probe::Probe;

pub use gpu::{ARGUMENT as GPU_TEST, child as gpu_child};

#[derive(clap::Args)]
pub struct Health {
    /// Check this machine only, without asking a server; also on GPU hosts
    #[arg(long)]
    local: bool,
    /// Also run a CUDA program on this shell's GPUs: allocate, copy, launch, compare
    #[arg(long)]
    gpu: bool,
    /// Also list checks that do not apply or could not read their facts; shorten no list
    #[arg(long)]
    all: bool,
    /// Exit with 1 also if there are only warnings
    #[arg(long)]
    strict: bool,
}

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
    fn reached(&self) -> bool {
        let servers = self.survey.iter().flat_map(|survey| &survey.servers);
        self.answers() || servers.into_iter().any(|s| s.trouble.is_none())
    }
}

/// Returns `true` if a file contains the bytes; it is read, not loaded.
fn contains(path: &Path, wanted: &[u8]) -> bool {
    std::fs::read(path).is_ok_and(|bytes| bytes.windows(wanted.len()).any(|window| window == wanted))
}

/// Returns `true` if a library is gpusession's own, by its symbol.
fn is_ours(path: &Path) -> bool {
    contains(path, b"gpusession_marker")
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

/// Runs all checks of the facts.
pub fn examine(facts: &Facts) -> Findings {
    let mut findings = Findings::default();
    findings.run(Place::Library, library::CHECKS, facts);
    findings.run(Place::Login, login::CHECKS, facts);
    findings.run(Place::Network, network::CHECKS, facts);
    findings.run(Place::Host, host::CHECKS, &facts.machine);
    findings.run(Place::GpuHost, gpu_host::CHECKS, &facts.machine);
    findings
}

/// `gpusession health`.
pub async fn health(options: Health, json: bool) -> Result<i32> {
    let facts = Facts::gather(options.local).await;
    let mut findings = examine(&facts);
    if options.gpu {
        findings.run(Place::Gpu, gpu::CHECKS, &gpu::test().await);
    } else {
        let later = Finding::skipped("`gpusession health --gpu` runs a CUDA program");
        findings.add("gpu.result", Place::Gpu, later);
    }
    let reached = options.local || facts.reached();
    crate::print(&if json { findings.json().to_string() } else { findings.text(options.all) });
    if !reached {
        if !json {
            eprintln!(
                "gpusession: neither the daemon nor a server answers; --local checks this machine only"
            );
        }
        return Ok(code::UNREACHABLE);
    }
    Ok(findings.code(options.strict))
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ids_are_unique_and_begin_with_their_group() {
        let (_root, facts) = testing::facts();
        let findings = examine(&facts);
        let ids: BTreeSet<_> = findings.0.iter().map(|row| row.id.as_str()).collect();
        assert_eq!(ids.len(), findings.0.len());
        assert!(ids.len() >= 25, "{}", ids.len());
        for row in &findings.0 {
            let place = serde_json::to_value(row.place).unwrap();
            assert!(row.id.starts_with(&format!("{}.", place.as_str().unwrap())), "{}", row.id);
            assert!(!row.found.is_empty(), "{}", row.id);
        }
    }
}
