//! What is wrong with a GPU takes it out of what is leased, with the reason; an administrator puts it back
//! (`gpuserver on GPU`). And what the driver says of processes is compared with what they were granted.

use std::sync::Arc;

use gpusession_proto::readings::{Fault, GpuReading, uuid_text};
use tokio::sync::broadcast::error::RecvError;
use tracing::warn;

use crate::lease::Withdrawn;
use crate::monitor::{Monitor, Readings};
use crate::pool::service::Pool;
use crate::supervise::Event;

/// `nvmlEventTypeDoubleBitEccError`, `nvmlEventTypeXidCriticalError`
const ECC: u64 = 2;
const XID: u64 = 8;
/// Faults of the card, not of a program on it, as NVIDIA's catalogue of Xids has them.
const XIDS: &[(u64, &str)] = &[
    (48, "an uncorrectable ECC error"),
    (62, "its controller halted"),
    (64, "pages of its memory cannot be retired"),
    (74, "NVLink failed"),
    (79, "it has fallen off the bus"),
    (95, "an uncontained ECC error"),
    (119, "its system processor does not answer"),
    (120, "its system processor failed"),
    (140, "an ECC error that was not recovered"),
];

/// Why a fault makes a GPU unfit; `None` for faults of programs.
fn unfit(fault: &Fault) -> Option<String> {
    match fault.event {
        ECC => Some("NVML reported an uncorrectable ECC error".into()),
        XID => {
            let (xid, what) = XIDS.iter().find(|(xid, _)| *xid == fault.data)?;
            Some(format!("Xid {xid}: {what}"))
        }
        _ => None,
    }
}

/// A card failed: it is leased no more, and the leases on it end, so that their clients get other GPUs.
async fn failed(pool: &Pool, gpu: &str, why: String) {
    let reason = format!("GPU {gpu} failed: {why}");
    if !pool.withdraw(gpu, Some(Withdrawn::Broken(why))).await {
        return;
    }
    for standing in pool.registry().leases().await {
        if standing.lease.shares.iter().any(|s| s.gpu == gpu) {
            pool.end_lease(&standing.lease.id, &reason).await;
        }
    }
}

/// Why no programs can share a GPU, nor workers wait on it: its `nvmlComputeMode_t`.
fn alone(uuid: &str, mode: u32) -> Option<String> {
    let mode = match mode {
        0 => return None,
        2 => "PROHIBITED",
        3 => "EXCLUSIVE_PROCESS",
        _ => "EXCLUSIVE",
    };
    Some(format!(
        "{COMPUTE_MODE} {mode} does not let several programs use it; `nvidia-smi -i {uuid} -c DEFAULT` mends it"
    ))
}
const COMPUTE_MODE: &str = "compute mode";

/// Takes a GPU out whose compute mode lets one program alone use it, and puts it back once the mode is mended.
async fn compute_mode(pool: &Pool, uuid: &str, mode: u32) {
    let gpus = pool.registry().gpus().await;
    let Some(gpu) = gpus.iter().find(|gpu| gpu.gpu.uuid == uuid) else { return };
    match (alone(uuid, mode), &gpu.withdrawn) {
        (Some(why), None) => pool.withdraw(uuid, Some(Withdrawn::Broken(why))).await,
        (None, Some(Withdrawn::Broken(why))) if why.starts_with(COMPUTE_MODE) => {
            pool.withdraw(uuid, None).await
        }
        _ => return,
    };
}

/// Looks at the compute modes that the driver reported at the start.
pub async fn check_compute_modes(pool: &Pool) {
    for gpu in pool.registry().gpus().await.iter() {
        compute_mode(pool, &gpu.gpu.uuid, gpu.gpu.compute_mode).await;
    }
}

/// What a card says of itself, against what it said before.
async fn look(pool: &Pool, before: Option<&GpuReading>, now: &GpuReading) {
    let uuid = uuid_text(&now.uuid);
    // One that is wrong stays wrong, whoever puts the GPU back.
    if let Some(mode) = now.compute_mode
        && (mode != 0 || before.is_none_or(|before| before.compute_mode != now.compute_mode))
    {
        compute_mode(pool, &uuid, mode).await;
    }
    // Not every card and driver reports such an error as an event.
    let errors = |reading: Option<&GpuReading>| reading.and_then(|r| r.uncorrected_ecc);
    if let (Some(before), Some(now)) = (errors(before), errors(Some(now)))
        && now > before
    {
        failed(pool, &uuid, format!("its count of uncorrected ECC errors went from {before} to {now}")).await;
    }
}

/// Watches until it is cancelled.
pub async fn watch(pool: Arc<Pool>, monitor: Monitor) {
    let mut events = pool.supervisor().events();
    let mut faults = monitor.events();
    let mut readings = monitor.readings();
    let mut seen: Option<Arc<Readings>> = None;
    loop {
        tokio::select! {
            event = events.recv() => match event {
                Ok(Event::Stuck { gpus, why }) => {
                    for gpu in gpus {
                        pool.withdraw(&gpu, Some(Withdrawn::Broken(why.clone()))).await;
                    }
                }
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            },
            fault = faults.recv() => match fault {
                Ok(fault) => match unfit(&fault.fault) {
                    Some(why) => failed(&pool, &uuid_text(&fault.gpu), why).await,
                    None => warn!("{}: event {} ({})", uuid_text(&fault.gpu), fault.fault.event, fault.fault.data),
                },
                Err(RecvError::Lagged(n)) => warn!("{n} faults of GPUs went by unread"),
                Err(RecvError::Closed) => return,
            },
            changed = readings.changed() => {
                if changed.is_err() {
                    return;
                }
                let latest = readings.borrow_and_update().clone();
                if let Some(latest) = latest {
                    pool.supervisor().reconcile(&latest.memory_of_processes());
                    for gpu in &latest.gpus {
                        look(&pool, seen.as_ref().and_then(|seen| seen.gpu(&gpu.uuid)), gpu).await;
                    }
                    seen = Some(latest);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_of_cards_and_of_programs() {
        let fault = |event, data| Fault { number: 1, event, data };
        assert_eq!(unfit(&fault(XID, 79)), Some("Xid 79: it has fallen off the bus".into()));
        assert!(unfit(&fault(ECC, 0)).is_some_and(|why| why.contains("ECC")));
        // An illegal address is a program's fault.
        assert_eq!(unfit(&fault(XID, 31)), None);
        assert_eq!(unfit(&fault(1, 0)), None);
    }
}
