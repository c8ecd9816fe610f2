//! The work behind each request of an administrator.

use std::time::Duration;

use gpusession_proto::join;
use gpusession_proto::readings::uuid_bytes;
use tracing::info;

use super::ask::{Ask, Refusal, parse, written};
use super::rows::{
    AdministratorView, ClientRow, GpuRow, LeaseDevice, LeaseRow, LimitRow, PsRow, QueueRow, StatusView,
    StopView, TokenView, administrator_rows, config_rows, micros, ps_row, token_rows,
};
use crate::config::parse_duration;
use crate::lease::Withdrawn;
use crate::limits::LIMITS;
use crate::pool::administrators::NotIssued;
use crate::pool::parking::ParkError;
use crate::pool::{Pool, find_worker};
use crate::supervise::hex;
use crate::threads;

/// Answers a request that an administrator sent over the network.
pub async fn answer_remote(body: &[u8], pool: &Pool, name: &str, from: &str) -> Vec<u8> {
    let ask = match parse(body) {
        Ok(ask) => ask,
        Err(refusal) => return written(Err(refusal)),
    };
    if let Some(refusal) = ask.local() {
        return written(Err(refusal));
    }
    if ask.changes() {
        info!("administrator {name}: request from {from}: {ask:?}");
    }
    written(answer(ask, pool).await)
}

/// Checks that a client or an administrator can have this name.
pub fn a_name(name: &str) -> Result<(), Refusal> {
    match join::is_name(name) {
        true => Ok(()),
        false => Err(Refusal::new(
            "usage",
            format!("{name:?} is not a valid name: use a-z, 0-9, `-` and `.`, 64 characters at most"),
        )),
    }
}

/// Creates the refusal for an id that fits no token, or several.
pub fn no_token(id: &str) -> Refusal {
    Refusal::new(
        "no-such-token",
        format!("{id:?} fits no token, or several; `gpuserver token list` lists their ids"),
    )
}

/// Creates the refusal for a certificate that was not issued.
pub fn not_issued(e: &NotIssued) -> Refusal {
    let code = match e {
        NotIssued::Exists(_) => "exists",
        NotIssued::Authority(_) => "failed",
    };
    Refusal::new(code, e.to_string())
}

/// Parses the lifetime of a token.
pub fn token_ttl(text: &str) -> Result<Duration, Refusal> {
    parse_duration(text).filter(|d| !d.is_zero()).ok_or_else(|| {
        Refusal::new("usage", format!("--ttl {text}: a duration like \"24h\" or \"30min\" is wanted"))
    })
}

pub(super) async fn answer(ask: Ask, pool: &Pool) -> Result<serde_json::Value, Refusal> {
    let internal = |e: &dyn std::fmt::Display| Refusal::new("internal", e.to_string());
    let show = |value: Result<serde_json::Value, serde_json::Error>| value.map_err(|e| internal(&e));
    match ask {
        Ask::Status => {
            let facts = pool.facts();
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
                gpus: pool.registry().gpus().await.len(),
                leases: pool.registry().count().await,
                workers: pool.supervisor().workers().len(),
                programs: pool.supervisor().programs(true),
            }))
        }
        Ask::Ps => show(serde_json::to_value(ps_rows(pool).await)),
        Ask::Threads => {
            let mut rows = ps_rows(pool).await;
            for row in &mut rows {
                row.threads = row.pid.map_or_else(Vec::new, threads::of);
            }
            show(serde_json::to_value(rows))
        }
        Ask::Leases => {
            let rows: Vec<_> = pool
                .registry()
                .leases()
                .await
                .into_iter()
                .map(|s| LeaseRow {
                    state: pool.lease_state(&s.lease.id).0.into(),
                    position: pool.lease_state(&s.lease.id).1.position,
                    warm: pool.supervisor().ready(&s.lease.id),
                    idle_usec: micros(pool.idle_for(&s.lease.id)),
                    lease: s.lease.id,
                    client: s.lease.client,
                    user: s.lease.user,
                    who: s.lease.who,
                    why: s.lease.why,
                    devices: s
                        .lease
                        .shares
                        .into_iter()
                        .map(|d| LeaseDevice {
                            uuid: d.gpu,
                            limit_bytes: d.limit_bytes,
                            sm_percent: d.sm_percent,
                        })
                        .collect(),
                    fencing_token: s.lease.fencing_token,
                    encrypted: s.lease.encrypted,
                    persistent: s.lease.persistent,
                    exclusive: s.lease.exclusive,
                    on_idle: s.lease.on_idle.as_str().into(),
                    hold: s.lease.hold,
                    mps: s.lease.mps,
                    left_usec: micros(s.left),
                    created_unix: s.lease.created_unix,
                })
                .collect();
            show(serde_json::to_value(rows))
        }
        Ask::Gpus => {
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
                    leases: g.leases.clone(),
                })
                .collect();
            show(serde_json::to_value(rows))
        }
        Ask::Clients => {
            let leases = pool.registry().leases().await;
            let rows: Vec<_> = pool
                .clients()
                .into_iter()
                .map(|c| ClientRow {
                    state: match (c.record.revoked, c.alive) {
                        (true, _) => "revoked",
                        (false, true) => "connected",
                        (false, false) => "away",
                    }
                    .into(),
                    leases: leases.iter().filter(|s| s.lease.client == c.name).count(),
                    name: c.name,
                    silent_usec: c.silent.map(micros),
                    joined_unix: c.record.joined_unix,
                    certificate_sha256: c.record.certificate,
                })
                .collect();
            show(serde_json::to_value(rows))
        }
        Ask::Revoke { name } => {
            a_name(&name)?;
            let (known, leases) = pool.revoke(&name).await.map_err(|e| internal(&e))?;
            Ok(serde_json::json!({ "client": name, "known": known, "leases_ended": leases }))
        }
        Ask::Forget { name } => {
            a_name(&name)?;
            let (known, leases) = pool.forget(&name).await.map_err(|e| internal(&e))?;
            Ok(serde_json::json!({ "client": name, "known": known, "leases_ended": leases }))
        }
        Ask::Kill { worker } => match find_worker(pool, &worker) {
            Ok(id) => {
                pool.supervisor().end_worker(&id, None, BY_HAND);
                Ok(serde_json::json!({ "worker": hex(&id) }))
            }
            // The whole lease id only: the text may be the start of an exited worker's id.
            Err(_) if pool.end_lease(&worker, BY_HAND).await => Ok(serde_json::json!({ "lease": worker })),
            Err(no_worker) => {
                Err(Refusal::new("no-such-worker", format!("{no_worker}; no lease has this id, either")))
            }
        },
        Ask::Park { lease } => {
            let lease = find_lease(pool, &lease).await?;
            pool.park(&lease, "an administrator asked for it").await.map_err(|e| {
                let code = match e {
                    ParkError::NoLease => "no-such-lease",
                    ParkError::Away(_) => "away",
                    ParkError::Busy => "busy",
                    ParkError::Never(_) => "not-supported",
                    ParkError::NoRoom { .. } => "no-room",
                    ParkError::Failed(_) => "failed",
                };
                Refusal::new(code, e.to_string())
            })?;
            let state = pool.parking().state(&lease).map_or("active", |(state, _)| state);
            Ok(serde_json::json!({ "lease": lease, "state": state }))
        }
        Ask::Unpark { lease } => {
            let lease = find_lease(pool, &lease).await?;
            let (state, place) = pool.unpark(&lease).await;
            Ok(serde_json::json!({ "lease": lease, "state": state, "position": place.position }))
        }
        Ask::Off { gpu, reason } => {
            let uuid = find_gpu(pool, &gpu).await?;
            pool.withdraw(&uuid, Some(Withdrawn::Off(reason))).await;
            gpu_state(pool, &uuid).await
        }
        Ask::On { gpu } => {
            let uuid = find_gpu(pool, &gpu).await?;
            pool.withdraw(&uuid, None).await;
            gpu_state(pool, &uuid).await
        }
        Ask::Drop { gpu } => {
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
        Ask::Drain { end, reason } => {
            if let Err(e) = pool.registry().drain((!end).then_some(reason)).await {
                let mut refusal = Refusal::new(
                    "not-stored",
                    format!("the change holds only until a restart: it could not be stored: {e}"),
                );
                refusal.hint = "correct the cause and repeat the command".into();
                return Err(refusal);
            }
            let programs = pool.supervisor().programs(true);
            Ok(
                serde_json::json!({ "draining": !end, "programs": programs, "leases": pool.registry().count().await }),
            )
        }
        Ask::Stop { force } => {
            let wait = if force { Duration::ZERO } else { pool.config().drain_timeout };
            show(serde_json::to_value(StopView {
                pid: std::process::id(),
                programs: pool.supervisor().programs(true),
                wait_usec: micros(wait),
            }))
        }
        Ask::Mps => {
            let Some(mps) = pool.supervisor().mps() else {
                let mut refusal = Refusal::new("not-used", "this server does not share GPUs by MPS");
                refusal.hint = "set sharing = \"mps\" or gpu_sharing.mps, and restart it".into();
                return Err(refusal);
            };
            show(serde_json::to_value(mps.views().await))
        }
        Ask::Queue => {
            let rows: Vec<_> = pool
                .registry()
                .waiting()
                .await
                .into_iter()
                .map(|w| QueueRow {
                    position: w.position,
                    client: w.client,
                    user: w.user,
                    gpus: w.gpus,
                    priority: match w.priority {
                        crate::lease::Priority::Normal => "normal",
                        crate::lease::Priority::BelowNormal => "below-normal",
                    }
                    .into(),
                })
                .collect();
            show(serde_json::to_value(rows))
        }
        Ask::Limits { client, user } => {
            let rows: Vec<_> = pool
                .limits_of(&client, &user)
                .all()
                .iter()
                .map(|e| LimitRow {
                    limit: e.name.into(),
                    value: e.bound.to_string(),
                    of: e.layer.to_string(),
                    origin: e.origin.clone(),
                    help: LIMITS.iter().find(|l| l.name == e.name).map_or("", |l| l.help).into(),
                })
                .collect();
            show(serde_json::to_value(rows))
        }
        Ask::Accounting { wanted } => {
            let accounting = pool.accounting().clone();
            let records = tokio::task::spawn_blocking(move || accounting.list(&wanted)).await;
            let records = records.map_err(|e| internal(&e))?.map_err(|e| internal(&e))?;
            show(serde_json::to_value(records))
        }
        Ask::Config => show(serde_json::to_value(config_rows(&pool.config()))),
        Ask::ConfigSet { key, value } => {
            let (holds, waits) = pool.set_key(&key, value.as_deref()).await?;
            Ok(serde_json::json!({ "changed": holds, "after_restart": waits }))
        }
        Ask::Reload => {
            let (holds, waits) = pool.read_again().await?;
            Ok(serde_json::json!({ "changed": holds, "after_restart": waits }))
        }
        Ask::TokenCreate { pattern, uses, ttl } => {
            let ttl = token_ttl(&ttl)?;
            let (token, record) = pool.create_token(&pattern, uses, ttl).await.map_err(|e| internal(&e))?;
            show(serde_json::to_value(TokenView::new(&token, record)))
        }
        Ask::AdministratorCreate { name, csr_pem } => {
            a_name(&name)?;
            let made = pool.create_administrator(&name, &csr_pem).await.map_err(|e| internal(&e))?;
            let (certificate_pem, authority_pem) = made.map_err(|e| not_issued(&e))?;
            show(serde_json::to_value(AdministratorView { certificate_pem, authority_pem }))
        }
        Ask::Administrators => show(serde_json::to_value(pool.administrators(administrator_rows))),
        Ask::AdministratorRevoke { name } => {
            a_name(&name)?;
            let known = pool.revoke_administrator(&name).await.map_err(|e| internal(&e))?;
            Ok(serde_json::json!({ "name": name, "known": known }))
        }
        Ask::Tokens => show(serde_json::to_value(pool.tokens(token_rows))),
        Ask::TokenRevoke { id } => {
            let revoked = pool.revoke_token(&id).await.map_err(|e| internal(&e))?;
            let revoked = revoked.ok_or_else(|| no_token(&id))?;
            Ok(serde_json::json!({ "id": revoked }))
        }
    }
}

async fn ps_rows(pool: &Pool) -> Vec<PsRow> {
    let server = &pool.facts().config.name;
    let gpus = pool.registry().gpus().await;
    pool.supervisor().workers().into_iter().map(|w| ps_row(w, server, &gpus)).collect()
}

/// Reason of a worker's or lease's end.
const BY_HAND: &str = "ended by an administrator";

/// Finds the one lease whose id starts with `prefix`.
async fn find_lease(pool: &Pool, prefix: &str) -> Result<String, Refusal> {
    let all = pool.registry().leases().await;
    let fits: Vec<_> = all.into_iter().map(|s| s.lease.id).filter(|id| id.starts_with(prefix)).collect();
    match fits.as_slice() {
        [one] if !prefix.is_empty() => Ok(one.clone()),
        [] => Err(Refusal::new(
            "no-such-lease",
            format!("lease {prefix} not found; `gpuserver leases` lists leases"),
        )),
        _ => Err(Refusal::new(
            "no-such-lease",
            format!("{} leases start with {prefix:?}; write more of the id", fits.len()),
        )),
    }
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
