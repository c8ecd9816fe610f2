//! `gpusession health`: checks of this machine, of the way to its servers, and of a CUDA program.
//!
//! Each group has a table of checks. A check reads [`Facts`] and decides; the facts that need the
//! network or the daemon are gathered first.

mod facts;
mod gpu;
mod library;
mod login;
mod network;
mod probe;

use gpusession_diagnosis::check::{Finding, Findings, Place};
use gpusession_diagnosis::{gpu_host, host};

use crate::exit::{Result, code};
pub use facts::Facts;
#[cfg(test)]
pub use facts::testing;

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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Files with tables of checks; the tests of a check lie beside it.
    const SOURCES: [&str; 6] = [
        include_str!("library.rs"),
        include_str!("login.rs"),
        include_str!("network.rs"),
        include_str!("gpu.rs"),
        include_str!("../../../diagnosis/src/host.rs"),
        include_str!("../../../diagnosis/src/gpu_host.rs"),
    ];

    #[test]
    fn each_check_has_a_test() {
        for source in SOURCES {
            let (code, tests) = source.split_once("mod tests {").unwrap();
            let rows: Vec<_> = code.split("Check { id: \"").skip(1).collect();
            let words: BTreeSet<_> = tests.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            assert!(!rows.is_empty());
            // Such a test runs all checks of its table.
            if tests.contains("CHECKS.iter().map(|check| (check.run)(outcome).state)") {
                continue;
            }
            for row in rows {
                let (id, rest) = row.split_once("\", run: ").unwrap();
                let name = rest.trim_start_matches("|facts| ").split([' ', '(', '}']).next().unwrap();
                assert!(words.contains(name), "{id}: no test calls {name}");
            }
        }
    }

    #[test]
    fn ids_are_unique_and_begin_with_their_group() {
        let (_root, facts) = testing::facts();
        let mut findings = examine(&facts);
        findings.run(Place::Gpu, gpu::CHECKS, &gpu::Outcome::Hung);
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
