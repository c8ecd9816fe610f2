//! Answers about GPUs: their list, their service, and MPS.

use std::io::Write;

use gpusession_common::words::Sharing;
use gpusession_proto::readings::uuid_bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::show;
use crate::lease::{EXCLUSIVE_PROCESS, Withdrawn};
use crate::pool::Pool;
use crate::refusal::Refusal;
use crate::text::{dash, date, mib, print_table, table};

/// A row of `gpuserver gpus`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GpuRow {
    /// Index in this server's list.
    pub index: usize,
    /// UUID as the driver writes it.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// PCI address.
    pub pci_address: String,
    /// Device memory of the card.
    pub memory_bytes: u64,
    /// Part of it that is promised to leases.
    pub leased_bytes: u64,
    /// Part of it that all processes of the host use, as NVML reports.
    #[serde(default)]
    pub used_bytes: Option<u64>,
    /// Percent of the last sample period with a kernel running, as NVML reports.
    #[serde(default)]
    pub utilization_percent: Option<u32>,
    /// Compute capability, such as `9.0`.
    pub compute_capability: String,
    /// Way in which leases share it.
    #[serde(default)]
    pub sharing: Sharing,
    /// `default`, `exclusive-process` or `prohibited`, as an administrator of the host has set it.
    #[serde(default)]
    pub compute_mode: String,
    /// free, leased, off, off-pending, stopped, broken.
    pub state: String,
    /// Reason if it is withdrawn.
    pub reason: Option<String>,
    /// Device memory that the server counts for one program's context.
    pub context_bytes: u64,
    /// Ids of the leases on it.
    pub leases: Vec<String>,
}

pub(in crate::admin) async fn gpus(pool: &Pool) -> Result<Value, Refusal> {
    let latest = pool.monitor().readings().borrow().clone();
    let reading = |uuid| latest.as_ref()?.gpu(&uuid_bytes(uuid)?);
    let rows: Vec<_> = pool
        .registry()
        .gpus()
        .await
        .iter()
        .enumerate()
        .map(|(index, g)| GpuRow {
            index,
            state: g.state().into(),
            reason: g.withdrawn.as_ref().map(|w| w.reason().to_string()),
            context_bytes: g.gpu.context_bytes,
            uuid: g.gpu.uuid.clone(),
            name: g.gpu.name.clone(),
            pci_address: g.gpu.pci_address.clone(),
            memory_bytes: g.gpu.memory_bytes,
            leased_bytes: g.used_bytes,
            used_bytes: reading(&g.gpu.uuid).and_then(|r| r.memory_used_bytes),
            utilization_percent: reading(&g.gpu.uuid).and_then(|r| r.utilization_percent),
            compute_capability: format!("{}.{}", g.gpu.compute_major, g.gpu.compute_minor),
            sharing: g.gpu.sharing,
            compute_mode: compute_mode(g.gpu.compute_mode).into(),
            leases: g.leases.clone(),
        })
        .collect();
    show(serde_json::to_value(rows))
}

/// Names a `CUcomputemode`.
fn compute_mode(mode: u32) -> &'static str {
    match mode {
        0 => "default",
        2 => "prohibited",
        EXCLUSIVE_PROCESS => "exclusive-process",
        _ => "exclusive",
    }
}

pub(in crate::admin) async fn off(pool: &Pool, gpu: String, reason: String) -> Result<Value, Refusal> {
    let uuid = find_gpu(pool, &gpu).await?;
    pool.withdraw(&uuid, Some(Withdrawn::Off(reason))).await;
    gpu_state(pool, &uuid).await
}

pub(in crate::admin) async fn on(pool: &Pool, gpu: String) -> Result<Value, Refusal> {
    let uuid = find_gpu(pool, &gpu).await?;
    pool.withdraw(&uuid, None).await;
    gpu_state(pool, &uuid).await
}

pub(in crate::admin) async fn drop(pool: &Pool, gpu: String) -> Result<Value, Refusal> {
    let uuid = find_gpu(pool, &gpu).await?;
    let leases = pool.registry().leases().await;
    let holders: Vec<_> = leases
        .iter()
        .filter(|s| s.lease.shares.iter().any(|d| d.gpu == uuid))
        .map(|s| format!("{} of {}", s.lease.id, s.lease.client))
        .collect();
    if !holders.is_empty() {
        return Err(Refusal {
            code: "leased".into(),
            message: format!("GPU {uuid} is leased: {}", holders.join(", ")),
            hint: format!(
                "`gpuserver off {gpu}` stops new leases on it; drop it when these have ended, or end them with `gpuserver kill LEASE`"
            ),
        });
    }
    pool.withdraw(&uuid, Some(Withdrawn::Stopped("dropped by an administrator".into()))).await;
    gpu_state(pool, &uuid).await
}

pub(in crate::admin) async fn mps(pool: &Pool) -> Result<Value, Refusal> {
    let Some(mps) = pool.supervisor().mps() else {
        let mut refusal = Refusal::new("not-used", "this server does not share GPUs by MPS");
        refusal.hint = "set sharing = \"mps\" or gpu_sharing.mps, and restart it".into();
        return Err(refusal);
    };
    show(serde_json::to_value(mps.views().await))
}

/// Finds a GPU by index, or by at least five characters of its UUID's start.
async fn find_gpu(pool: &Pool, text: &str) -> Result<String, Refusal> {
    let gpus = pool.registry().gpus().await;
    let lower = text.to_lowercase();
    let fits: Vec<&str> = gpus
        .iter()
        .enumerate()
        .filter(|(index, g)| {
            index.to_string() == text || text.len() > 4 && g.gpu.uuid.to_lowercase().starts_with(&lower)
        })
        .map(|(_, g)| g.gpu.uuid.as_str())
        .collect();
    match fits.as_slice() {
        [one] => Ok((*one).to_string()),
        [] => Err(Refusal {
            code: "no-such-gpu".into(),
            message: format!("GPU {text:?} not found"),
            hint: "`gpuserver gpus` lists indices and UUIDs".into(),
        }),
        _ => Err(Refusal::new(
            "no-such-gpu",
            format!("{} GPUs start with {text:?}; write more of it", fits.len()),
        )),
    }
}

async fn gpu_state(pool: &Pool, uuid: &str) -> Result<serde_json::Value, Refusal> {
    let gpus = pool.registry().gpus().await;
    let gpu = gpus.iter().find(|g| g.gpu.uuid == uuid);
    Ok(serde_json::json!({
        "uuid": uuid,
        "state": gpu.map_or("stopped", |g| g.state()),
        "leases": gpu.map(|g| g.leases.clone()).unwrap_or_default(),
    }))
}

/// Prints `gpuserver gpus`.
pub fn print_gpus(out: &mut dyn Write, rows: Vec<GpuRow>) -> anyhow::Result<()> {
    let n = rows.len();
    let mut table = table(&[
        "GPU", "NAME", "UUID", "PCI", "SHARING", "STATE", "BUSY", "USED", "LEASED", "MEMORY", "LEASES",
    ]);
    for r in rows {
        table.add_row([
            r.index.to_string(),
            r.name,
            r.uuid,
            r.pci_address,
            match r.compute_mode.as_str() {
                "" | "default" => r.sharing.as_str().into(),
                mode => format!("{}, {mode}", r.sharing),
            },
            match r.reason {
                Some(reason) => format!("{}: {reason}", r.state),
                None => r.state,
            },
            r.utilization_percent.map_or_else(|| "-".into(), |percent| format!("{percent} %")),
            r.used_bytes.map_or_else(|| "-".into(), mib),
            mib(r.leased_bytes),
            mib(r.memory_bytes),
            if r.leases.is_empty() { "-".into() } else { r.leases.join(" ") },
        ]);
    }
    print_table(out, &table, n, "no GPUs")
}

/// Prints `gpuserver mps`.
pub fn print_mps(out: &mut dyn Write, domains: Vec<crate::mps::DomainView>) -> anyhow::Result<()> {
    let n = domains.len();
    let mut table = table(&[
        "DOMAIN",
        "GPUS",
        "STATE",
        "DAEMON",
        "SERVERS",
        "CLIENTS",
        "LEASES",
        "RESTARTS",
        "LAST FAULT",
    ]);
    for d in domains {
        let servers: Vec<_> = d.servers.iter().map(|s| format!("{} ({})", s.pid, s.state)).collect();
        let clients: usize = d.servers.iter().map(|s| s.clients.len()).sum();
        let or_dash = |list: Vec<String>| if list.is_empty() { "-".into() } else { list.join(" ") };
        table.add_row([
            d.client,
            d.gpus.join(" "),
            if d.reason.is_empty() { d.state } else { format!("{}: {}", d.state, d.reason) },
            dash(d.daemon_pid),
            or_dash(servers),
            clients.to_string(),
            or_dash(d.leases),
            d.restarts.to_string(),
            d.faults.last().map_or_else(
                || "-".into(),
                |f| {
                    let whose: Vec<_> = f.culprits.iter().map(|pid| format!(" of process {pid}")).collect();
                    format!("{}{}: {}", date(f.unix), whose.concat(), f.why)
                },
            ),
        ]);
    }
    print_table(out, &table, n, "no MPS domains: no lease shares its GPUs by MPS")
}

/// Prints `gpuserver off` and `gpuserver on`.
pub fn print_gpu_state(out: &mut dyn Write, value: Value) -> anyhow::Result<()> {
    let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
    writeln!(out, "GPU {} is {}", text(&value["uuid"]), text(&value["state"]))?;
    for lease in value["leases"].as_array().into_iter().flatten() {
        writeln!(out, "  lease {} stays on it until it ends", text(lease))?;
    }
    Ok(())
}

/// Prints `gpuserver drop`; `gpu`: as the command line names it.
pub fn print_dropped(out: &mut dyn Write, value: Value, gpu: &str) -> anyhow::Result<()> {
    print_gpu_state(out, value)?;
    writeln!(out, "`gpuserver on {gpu}` returns it to service")?;
    Ok(())
}
