//! Health of the GPUs, and memory of the workers' processes, as NVML reports them.
//!
//! A faulty GPU is withdrawn with a reason, until an administrator restores it (`gpuserver on GPU`)
//! or, for some reasons, the cause is gone. The driver's account of each process is compared with
//! the process's quota.

use std::collections::HashMap;
use std::sync::Arc;

use gpusession_common::words::Sharing;
use gpusession_proto::readings::{Fault, GpuReading, uuid_text};
use tokio::sync::broadcast::error::RecvError;
use tracing::warn;

use crate::lease::{EXCLUSIVE_PROCESS, Passing, Withdrawn};
use crate::monitor::{Monitor, Readings};
use crate::pool::Pool;
use crate::supervise::Event;

/// `nvmlEventTypeDoubleBitEccError`, `nvmlEventTypeXidCriticalError`
const ECC: u64 = 2;
const XID: u64 = 8;
/// Xids that are faults of the card rather than of a program (NVIDIA's catalogue of Xids).
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

/// Returns the reason for which a fault makes a GPU unfit; `None` for a program's fault.
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

/// Withdraws a failed GPU and ends the leases on it, so that their clients get other GPUs.
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

/// Returns the reason if a GPU's compute mode (`nvmlComputeMode_t`) prevents sharing.
///
/// A worker in stock uses the GPU as well, so that even one lease needs the default mode. Under MPS
/// the one process may be the MPS server.
fn alone(uuid: &str, mode: u32, by_mps: bool) -> Option<String> {
    let (mode, without) = match mode {
        0 => return None,
        EXCLUSIVE_PROCESS if by_mps => return None,
        EXCLUSIVE_PROCESS => ("EXCLUSIVE_PROCESS", " without MPS (gpu_sharing.mps)"),
        2 => ("PROHIBITED", ""),
        _ => ("EXCLUSIVE", ""),
    };
    Some(format!(
        "compute mode {mode} does not let several programs use it{without}; `nvidia-smi -i {uuid} -c DEFAULT` \
         changes it"
    ))
}

/// Withdraws a GPU while its compute mode prevents sharing.
async fn compute_mode(pool: &Pool, uuid: &str, mode: u32) {
    let gpus = pool.registry().gpus().await;
    let by_mps = gpus.iter().any(|g| g.gpu.uuid == uuid && g.gpu.sharing == Sharing::Mps);
    pool.registry().set_compute_mode(uuid, mode).await;
    pool.withdraw_until_passed(uuid, Passing::ComputeMode, alone(uuid, mode, by_mps)).await;
}

/// Consecutive readings, one a second, without values of a GPU before it is withdrawn.
const SILENT_READINGS: u32 = 5;

/// Number of readings since NVML last reported values of a GPU, for each reported GPU.
#[derive(Default)]
struct Silence(HashMap<[u8; 16], u32>);

impl Silence {
    /// Evaluates a reading; returns the silent GPUs, and those that are reported again.
    ///
    /// A GPU's first report counts as the latter, since an earlier server may have withdrawn it.
    fn listen(&mut self, readings: &[GpuReading]) -> (Vec<[u8; 16]>, Vec<[u8; 16]>) {
        let speaks = |r: &&GpuReading| {
            r.memory_used_bytes.is_some() || r.compute_mode.is_some() || r.temperature_c.is_some()
        };
        for silent in self.0.values_mut() {
            *silent = silent.saturating_add(1);
        }
        let heard = readings.iter().filter(speaks).map(|r| r.uuid);
        let back = heard
            .filter(|uuid| self.0.insert(*uuid, 0).is_none_or(|silent| silent > SILENT_READINGS))
            .collect();
        let lost = self.0.iter().filter(|(_, silent)| **silent >= SILENT_READINGS).map(|(uuid, _)| *uuid);
        (lost.collect(), back)
    }
}

/// Checks the compute modes that the driver reported at the start.
pub async fn check_compute_modes(pool: &Pool) {
    for gpu in pool.registry().gpus().await.iter() {
        compute_mode(pool, &gpu.gpu.uuid, gpu.gpu.compute_mode).await;
    }
}

/// Compares a GPU's reading with the one before, and withdraws the GPU if it shows a fault.
async fn withdraw_if_faulty(
    pool: &Pool,
    before: Option<&GpuReading>,
    now: &GpuReading,
    errors: &mut HashMap<[u8; 16], u64>,
) {
    let uuid = uuid_text(&now.uuid);
    // A wrong mode is reported at each reading, since `gpuserver on` may have restored the GPU.
    if let Some(mode) = now.compute_mode
        && (mode != 0 || before.is_none_or(|before| before.compute_mode != now.compute_mode))
    {
        compute_mode(pool, &uuid, mode).await;
    }
    // Not every card and driver reports such an error as an event, but all count it.
    let Some(count) = now.uncorrected_ecc else { return };
    match errors.insert(now.uuid, count) {
        Some(before) if count > before => {
            failed(pool, &uuid, format!("its count of uncorrected ECC errors rose from {before} to {count}"))
                .await;
        }
        // Earlier errors withdraw nothing: the driver or an administrator has dealt with them.
        None if count > 0 => {
            warn!(
                "GPU {uuid}: {count} uncorrected ECC errors before this server started; `gpuserver off` withdraws it"
            );
        }
        _ => {}
    }
}

/// Watches events, faults and readings until the task is cancelled.
pub async fn watch(pool: Arc<Pool>, monitor: Monitor) {
    let mut events = pool.supervisor().events();
    let mut faults = monitor.events();
    let mut readings = monitor.readings();
    let mut seen: Option<Arc<Readings>> = None;
    let mut silence = Silence::default();
    let mut errors = HashMap::new();
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
                    None => warn!(
                        "GPU {}: NVML event {} with data {}; the GPU stays in use",
                        uuid_text(&fault.gpu),
                        fault.fault.event,
                        fault.fault.data
                    ),
                },
                Err(RecvError::Lagged(n)) => warn!("GPU monitor: {n} faults missed: too many at once"),
                Err(RecvError::Closed) => return,
            },
            changed = readings.changed() => {
                if changed.is_err() {
                    return;
                }
                let latest = readings.borrow_and_update().clone();
                if let Some(latest) = latest {
                    pool.supervisor().reconcile(&latest.memory_of_processes(), latest.asked.elapsed());
                    // Programs on a silent GPU may still finish; new leases go elsewhere.
                    let (lost, back) = silence.listen(&latest.gpus);
                    for uuid in lost {
                        let why = "NVML reports no values of it";
                        pool.withdraw_until_passed(&uuid_text(&uuid), Passing::Silent, Some(why.into())).await;
                    }
                    for uuid in back {
                        pool.withdraw_until_passed(&uuid_text(&uuid), Passing::Silent, None).await;
                    }
                    for gpu in &latest.gpus {
                        withdraw_if_faulty(&pool, seen.as_ref().and_then(|seen| seen.gpu(&gpu.uuid)), gpu, &mut errors).await;
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
    fn a_gpu_that_falls_silent_and_speaks_again() {
        let speaks = |n| GpuReading { uuid: [n; 16], temperature_c: Some(40), ..GpuReading::default() };
        let mute = |n| GpuReading { uuid: [n; 16], ..GpuReading::default() };
        let nothing = (vec![], vec![]);
        let mut silence = Silence::default();
        // NVML never reports values of the third.
        assert_eq!(
            silence.listen(&[speaks(1), mute(3)]),
            (vec![], vec![[1; 16]]),
            "an earlier server may have missed it"
        );
        assert_eq!(silence.listen(&[speaks(1), speaks(2), mute(3)]), (vec![], vec![[2; 16]]));
        for _ in 1..SILENT_READINGS {
            assert_eq!(silence.listen(&[mute(1), mute(3)]), nothing);
        }
        assert_eq!(
            silence.listen(&[mute(1), speaks(2), mute(3)]),
            (vec![[1; 16]], vec![]),
            "2 was heard in time"
        );
        assert_eq!(
            silence.listen(&[mute(1), speaks(2)]),
            (vec![[1; 16]], vec![]),
            "still, whoever puts it back"
        );
        assert_eq!(silence.listen(&[speaks(1), speaks(2)]), (vec![], vec![[1; 16]]));
        assert_eq!(silence.listen(&[speaks(1), speaks(2)]), nothing);
    }

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
