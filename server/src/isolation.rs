//! Decides, before a port opens, how isolated the workers of this server are.
//!
//! A process of the worker's program takes a worker's restrictions, starts the driver and tries
//! acts that must fail. Failures of workers later never change the decision.

use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use gpusession_proto::isolation::{Failure, Report};
use gpusession_proto::journal::Event;
use gpusession_proto::supervise::Isolation;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::config::{Config, ConfigError};
use crate::lease::Gpu;
use crate::starter::Purpose;
use crate::starter::link::Starter;

/// Longest time of one process.
const PROBE_TIMEOUT: Duration = Duration::from_secs(120);
/// Restricted starts of the driver that must fail, each with a free one that works, to blame the
/// restrictions.
const TRIES: usize = 3;
/// First version of Landlock that has all of a worker's rules.
const FULL_LANDLOCK: u32 = 3;
/// Restriction that workers lack which only note the calls beyond their list.
const NOTED: &str =
    "the list of system calls: GPUSERVER_UNLISTED_CALLS=log lets them make others, and notes these";

/// Result for this host and its driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The restrictions are in force.
    ///
    /// With a text, the driver was not tested with them: the GPUs are full or do not answer.
    Works(Level, Option<String>),
    /// These restrictions are missing.
    Lacks(Vec<String>),
    /// The driver works only without restrictions.
    DriverFails(String),
}

/// Restrictions of the server's workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// All of them.
    Full,
    /// All of them, in the form that an older kernel allows.
    Basic,
    /// Only a part of them.
    Partial,
    /// None.
    Off,
}

impl Level {
    /// Returns the word of tables, JSON and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Basic => "basic",
            Self::Partial => "partial",
            Self::Off => "off",
        }
    }
}

/// Decision for all workers of this server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Isolation with which each worker starts.
    pub workers: Isolation,
    /// Restrictions of a worker that starts so.
    pub level: Level,
    /// Missing restrictions; empty with a complete isolation.
    pub lacking: String,
}

impl Decision {
    /// Returns the decision without any restriction.
    pub fn off(lacking: impl Into<String>) -> Self {
        Self { workers: Isolation::Off, level: Level::Off, lacking: lacking.into() }
    }

    /// Returns the decision for workers that make, and note, the system calls beyond their list.
    fn noting_calls(self) -> Self {
        let lacking = match (self.workers, self.lacking) {
            (Isolation::Off, lacking) => return Self::off(lacking),
            (_, lacking) if lacking.is_empty() => NOTED.into(),
            (_, lacking) => format!("{lacking}; {NOTED}"),
        };
        Self { workers: self.workers, level: Level::Partial, lacking }
    }
}

/// Level, and what is missing.
impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.level.as_str())?;
        if self.lacking.is_empty() { Ok(()) } else { write!(f, ": {}", self.lacking) }
    }
}

/// Decides by the configuration and the verdict; the error is why no worker may start.
pub fn decide(wanted: Isolation, verdict: Verdict) -> Result<Decision, String> {
    let (level, lacking) = match verdict {
        _ if wanted == Isolation::Off => return Ok(Decision::off("isolation = \"off\"")),
        // Each worker checks itself, and does not start without its restrictions.
        Verdict::Works(level, _) => {
            return Ok(Decision { workers: Isolation::Require, level, lacking: String::new() });
        }
        Verdict::Lacks(lacking) => (Level::Partial, lacking.join("; ")),
        Verdict::DriverFails(reason) => (Level::Off, format!("the driver works only without it: {reason}")),
    };
    match (wanted, level) {
        (Isolation::Require, _) => Err(format!(
            "isolation = \"require\": this host does not allow it: {lacking}; enable what is missing (isolation.md), or \
             set isolation = \"try\" to continue without it"
        )),
        (_, Level::Partial) => Ok(Decision { workers: Isolation::Try, level, lacking }),
        _ => Ok(Decision::off(lacking)),
    }
}

/// Looks for GPUs whose kernels reach all memory of their process, and so of a worker.
///
/// Returns a warning where the configuration allows them; the error is why the server does not
/// start.
pub fn reach<'a>(
    wanted: Isolation,
    allowed: bool,
    gpus: impl IntoIterator<Item = &'a Gpu>,
) -> Result<Option<String>, String> {
    let reach = gpus.into_iter().filter(|gpu| gpu.pageable_access);
    let reach: Vec<_> = reach.map(|gpu| gpu.uuid.as_str()).collect();
    if reach.is_empty() {
        return Ok(None);
    }
    let what = format!(
        "{}: kernels reach all memory of their process, so a program's wrong pointer reaches its worker's memory",
        reach.join(", ")
    );
    if wanted == Isolation::Require && !allowed {
        return Err(format!(
            "isolation = \"require\": {what}; put `options nvidia-uvm uvm_disable_hmm=1` into \
             /etc/modprobe.d/gpuserver.conf and restart the host, or set allow_pageable_access = \"on\""
        ));
    }
    Ok(Some(what))
}

/// Tests this host, and decides; logs the result.
///
/// `hidden` are folders that workers must not reach.
pub async fn settle(
    config: &Config,
    hidden: &[&Path],
    starter: &Starter,
    driver: &Path,
    gpus: &[Gpu],
) -> Result<Decision, ConfigError> {
    let bad = |why| ConfigError::new(config.origin("isolation"), why);
    if let Some(reach) = reach(config.isolation, config.allow_pageable_access, gpus).map_err(bad)? {
        warn!("{reach}");
    }
    let decision = match config.isolation {
        Isolation::Off => Decision::off("isolation = \"off\""),
        wanted => {
            let verdict = probe(hidden, starter, driver, gpus).await;
            if let Verdict::Works(_, Some(unknown)) = &verdict {
                warn!("isolation: not tested with the driver: {unknown}; workers start only isolated");
            }
            decide(wanted, verdict).map_err(bad)?
        }
    };
    let noting = std::env::var_os("GPUSERVER_UNLISTED_CALLS").is_some_and(|value| value == "log");
    let decision = if noting { decision.noting_calls() } else { decision };
    let then = match decision.workers {
        Isolation::Require => "remove the variable from the unit after the test",
        _ => "a program that takes over its worker reaches what the workers' user can reach",
    };
    match decision.level {
        Level::Full | Level::Basic => info!("isolation of workers: {decision}"),
        Level::Partial | Level::Off => warn!(
            message_id = %Event::IsolationLacking.id(),
            gpusession_server = config.name,
            gpusession_reason = decision.lacking,
            "isolation of workers: {decision}; {then}"
        ),
    }
    Ok(decision)
}

/// Tests whether this host and its driver allow a worker's restrictions.
///
/// `hidden` are folders that workers must not reach.
pub async fn probe(hidden: &[&Path], starter: &Starter, driver: &Path, gpus: &[Gpu]) -> Verdict {
    let mut fails = String::new();
    for _ in 0..TRIES {
        let (level, reason) = match run(starter, driver, Some(hidden), gpus).await {
            Ok(Report { lacking, .. }) if !lacking.is_empty() => return Verdict::Lacks(lacking),
            Ok(Report { landlock, driver, .. }) => {
                let level = if landlock >= FULL_LANDLOCK { Level::Full } else { Level::Basic };
                match driver {
                    None => return Verdict::Works(level, None),
                    Some(Failure { reason, full: true }) => return Verdict::Works(level, Some(reason)),
                    Some(Failure { reason, full: false }) => (level, reason),
                }
            }
            // Workers that start have at least the restrictions of an old kernel.
            Err(NoReport::TimedOut) => {
                return Verdict::Works(Level::Basic, Some(NoReport::TimedOut.to_string()));
            }
            Err(e) => (Level::Basic, e.to_string()),
        };
        // A failure that restrictions do not cause happens without them, too.
        match run(starter, driver, None, gpus).await {
            Ok(Report { driver: None, .. }) => fails = reason,
            _ => return Verdict::Works(level, Some(reason)),
        }
    }
    Verdict::DriverFails(fails)
}

/// Reason why a process gave no report.
#[derive(Debug, thiserror::Error)]
enum NoReport {
    #[error("the driver did not answer within {} s", PROBE_TIMEOUT.as_secs())]
    TimedOut,
    #[error("{0}")]
    Failed(String),
}

/// Runs one process of the worker's program; `fenced`: folders that must be out of its reach.
async fn run(
    starter: &Starter,
    driver: &Path,
    fenced: Option<&[&Path]>,
    gpus: &[Gpu],
) -> Result<Report, NoReport> {
    let uuids: Vec<_> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    let (purpose, arguments) = match fenced {
        Some(hidden) => {
            let hidden = hidden.iter().map(OsString::from);
            (Purpose::Contained, hidden.chain(uuids.iter().map(OsString::from)).collect())
        }
        None => (Purpose::Free, Vec::new()),
    };
    let variables = [("CUDA_VISIBLE_DEVICES".into(), uuids.join(",").into())];
    let output = match timeout(PROBE_TIMEOUT, starter.output(purpose, driver, &arguments, &variables)).await {
        Ok(Ok(output)) => output,
        Ok(Err(e)) => return Err(NoReport::Failed(e.to_string())),
        Err(_) => return Err(NoReport::TimedOut),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let report = text.lines().last().and_then(|line| serde_json::from_str(line).ok());
    report.ok_or_else(|| {
        let said = String::from_utf8_lossy(&output.stderr);
        NoReport::Failed(format!("{} ({})", output.status, said.lines().last().unwrap_or("it wrote nothing")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_verdict_of_this_host_takes_restrictions_away() {
        let works = |level| decide(Isolation::Try, Verdict::Works(level, Some("full".into())));
        let fenced = |level| Decision { workers: Isolation::Require, level, lacking: String::new() };
        assert_eq!(works(Level::Full), Ok(fenced(Level::Full)));
        assert_eq!(works(Level::Basic), Ok(fenced(Level::Basic)));

        let lacks = Verdict::Lacks(vec!["landlock: no".into()]);
        let tried = decide(Isolation::Try, lacks.clone()).unwrap();
        assert_eq!((tried.workers, tried.to_string()), (Isolation::Try, "partial: landlock: no".into()));
        let why = decide(Isolation::Require, lacks).unwrap_err();
        assert!(why.contains("landlock: no") && why.contains("isolation = \"try\""), "{why}");

        let noted = works(Level::Full).unwrap().noting_calls();
        assert_eq!((noted.workers, noted.level), (Isolation::Require, Level::Partial));
        assert!(noted.lacking.contains("GPUSERVER_UNLISTED_CALLS=log"), "{noted}");
        let both = tried.noting_calls().to_string();
        assert!(both.starts_with("partial: landlock: no; the list of system calls"), "{both}");
        let off = decide(Isolation::Off, Verdict::Works(Level::Full, None)).unwrap();
        assert_eq!(off.clone().noting_calls(), off, "there is no list");

        let fails = Verdict::DriverFails("cuInit: CUDA error 304".into());
        assert_eq!(decide(Isolation::Try, fails.clone()).unwrap().workers, Isolation::Off);
        assert!(decide(Isolation::Require, fails).unwrap_err().contains("304"));
    }
}
