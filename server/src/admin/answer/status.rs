//! Answers about the server as a whole: its state, drain and stop.

use std::io::Write;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::statements::PeerView;
use super::{micros, show};
use crate::certificate::day;
use crate::isolation;
use crate::pool::Pool;
use crate::refusal::Refusal;
use crate::starter::link::users;
use crate::statements::Statements;
use crate::supervise::Sampled;
use crate::text::date;

/// Output of `gpuserver status`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StatusView {
    /// Name in the pool.
    pub name: String,
    /// Version of gpuserver.
    pub version: String,
    /// Process id of the server.
    pub pid: u32,
    /// `online`, or `draining: ` and the reason.
    pub state: String,
    /// Address of the control service.
    pub control_address: String,
    /// Address of the data plane.
    pub data_address: String,
    /// Path of the driver library.
    pub driver: String,
    /// Version of the driver; empty if unknown.
    pub driver_version: String,
    /// CUDA version of the driver: 1000 * major + 10 * minor.
    pub cuda_version: u32,
    /// SHA-256 of the authority's certificate.
    pub authority_sha256: String,
    /// Isolation of workers, and what is missing.
    #[serde(default)]
    pub isolation: String,
    /// `memory limits: control groups`, or `memory limits: sampled` and the reason.
    #[serde(default)]
    pub memory_limits: String,
    /// Users of the server's processes.
    #[serde(default)]
    pub users: String,
    /// End of the server's certificate, which it renews itself, in seconds since 1970; 0: unknown.
    #[serde(default)]
    pub certificate_expires_unix: u64,
    /// End of the authority's certificate, in seconds since 1970; 0: unknown.
    #[serde(default)]
    pub authority_expires_unix: u64,
    /// Warnings about certificates that end soon or have ended.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Other servers of the pool from which this one takes statements.
    #[serde(default)]
    pub peers: Vec<PeerView>,
    /// Number of statements about revocations in the pool.
    #[serde(default)]
    pub statements: usize,
    /// Number of served GPUs.
    pub gpus: usize,
    /// Number of leases.
    pub leases: usize,
    /// Number of workers.
    pub workers: usize,
    /// Descriptions of the running programs.
    #[serde(default)]
    pub programs: Vec<String>,
}

/// Output of `gpuserver stop`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StopView {
    /// Process id of the server.
    pub pid: u32,
    /// Descriptions of the running programs.
    pub programs: Vec<String>,
    /// Longest time that the server waits for them.
    pub wait_usec: u64,
}

pub(in crate::admin) async fn status(pool: &Pool) -> Result<Value, Refusal> {
    let (facts, unix) = (pool.facts(), pool.unix());
    let gpus = pool.registry().gpus().await;
    show(serde_json::to_value(StatusView {
        name: facts.config.name.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        state: match pool.registry().draining().await {
            Some(why) => format!("draining: {why}"),
            None => "online".into(),
        },
        control_address: facts.control.to_string(),
        data_address: facts.data.to_string(),
        driver: facts.driver.display().to_string(),
        driver_version: pool.driver_version(),
        cuda_version: facts.cuda_version,
        authority_sha256: data_encoding::HEXLOWER.encode(&pool.authority_fingerprint()),
        isolation: pool.supervisor().isolation().to_string(),
        memory_limits: pool.supervisor().groups().to_string(),
        users: users(facts.config.starter.as_deref()).into(),
        certificate_expires_unix: pool.certificate_expires_unix(),
        authority_expires_unix: pool.authority_expires_unix(),
        warnings: warnings(pool, &gpus, unix),
        peers: pool.peers().into_iter().map(PeerView::from).collect(),
        statements: pool.statements(Statements::len),
        gpus: gpus.len(),
        leases: pool.registry().count().await,
        workers: pool.supervisor().workers().len(),
        programs: pool.supervisor().programs(true),
    }))
}

fn warnings(pool: &Pool, gpus: &[crate::registry::GpuUse], unix: u64) -> Vec<String> {
    let mut warnings: Vec<_> = pool.ending(unix).iter().map(|e| e.warning(unix)).collect();
    if !pool.audit().works() {
        warnings.push("the audit trail cannot be written; the journal has the reason".into());
    }
    warnings.extend(pool.issuers_trouble());
    let config = &pool.facts().config;
    let reach = isolation::reach(config.isolation, true, gpus.iter().map(|g| &g.gpu));
    warnings.extend(reach.into_iter().flatten());
    let server = config.name.as_str();
    if pool.statements(|all| all.server(server).is_some()) {
        warnings.push(format!(
            "this server, {server}, is revoked: clients and the pool's other servers refuse it"
        ));
    }
    for peer in pool.peers().into_iter().filter(|peer| !peer.trouble.is_empty()) {
        let since = peer
            .contact_unix
            .map_or_else(|| "none since the start".into(), |at| format!("{} s ago", unix.saturating_sub(at)));
        warnings.push(format!("peer {}: {}; latest contact: {since}", peer.address, peer.trouble));
    }
    for (gpu, Sampled { bytes, left }) in pool.supervisor().sampled() {
        if left > 0 {
            warnings
                .push(format!("{gpu}: the driver did not clear {left} of {bytes} bytes; see security.md"));
        }
    }
    warnings
}

pub(in crate::admin) async fn drain(pool: &Pool, end: bool, reason: String) -> Result<Value, Refusal> {
    if let Err(e) = pool.registry().drain((!end).then_some(reason)).await {
        let mut refusal = Refusal::new(
            "not-stored",
            format!("the change holds only until a restart: it could not be stored: {e}"),
        );
        refusal.hint = "correct the cause and repeat the command".into();
        return Err(refusal);
    }
    let programs = pool.supervisor().programs(true);
    Ok(serde_json::json!({ "draining": !end, "programs": programs, "leases": pool.registry().count().await }))
}

pub(in crate::admin) fn stop(pool: &Pool, force: bool) -> Result<Value, Refusal> {
    let wait = if force { Duration::ZERO } else { pool.config().drain_timeout };
    show(serde_json::to_value(StopView {
        pid: std::process::id(),
        programs: pool.supervisor().programs(true),
        wait_usec: micros(wait),
    }))
}

/// Prints `gpuserver status`.
pub fn print_status(out: &mut dyn Write, s: StatusView) -> anyhow::Result<()> {
    let driver_version = if s.driver_version.is_empty() { "no version" } else { &s.driver_version };
    writeln!(out, "{} is {} (gpuserver {}, pid {})", s.name, s.state, s.version, s.pid)?;
    writeln!(out, "  control    {}", s.control_address)?;
    writeln!(out, "  data       {}", s.data_address)?;
    writeln!(
        out,
        "  driver     {} ({driver_version}, CUDA {}.{})",
        s.driver,
        s.cuda_version / 1000,
        s.cuda_version % 1000 / 10
    )?;
    writeln!(out, "  authority  {}", s.authority_sha256)?;
    if !s.isolation.is_empty() {
        writeln!(out, "  isolation  {}", s.isolation)?;
    }
    if !s.memory_limits.is_empty() {
        writeln!(out, "  host       {}", s.memory_limits)?;
    }
    if !s.users.is_empty() {
        writeln!(out, "  users      {}", s.users)?;
    }
    if s.certificate_expires_unix != 0 {
        let (own, authority) = (day(s.certificate_expires_unix), day(s.authority_expires_unix));
        writeln!(out, "  identity   certificate until {own} (renews itself), authority until {authority}")?;
    }
    for peer in &s.peers {
        let name = if peer.server.is_empty() { "no name yet" } else { &peer.server };
        let contact = peer.contact_unix.map_or_else(|| "no contact".into(), date);
        writeln!(out, "  peer       {} ({name}): {contact}", peer.address)?;
    }
    for warning in &s.warnings {
        writeln!(out, "  warning    {warning}")?;
    }
    writeln!(out, "  {} GPUs, {} leases, {} workers", s.gpus, s.leases, s.workers)?;
    Ok(())
}

/// Prints `gpuserver drain`.
pub fn print_drain(out: &mut dyn Write, value: Value) -> anyhow::Result<()> {
    if value["draining"] == false {
        writeln!(out, "new leases are allowed again")?;
        return Ok(());
    }
    writeln!(
        out,
        "no new leases, also after a restart, until `gpuserver drain --end`; {} leases stay",
        value["leases"]
    )?;
    for program in value["programs"].as_array().into_iter().flatten() {
        writeln!(out, "  still running: {}", program.as_str().unwrap_or_default())?;
    }
    Ok(())
}
