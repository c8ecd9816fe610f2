//! `gpuserver-worker --monitor DRIVER ISOLATION` queries the server's NVML.
//!
//! So `gpuserver` itself loads no NVML, and facts about a card need no program's worker. The
//! monitor reads [`ToMonitor`] from its standard input until EOF. Clients choose its queries, so it
//! takes a worker's restrictions, with the files of all GPUs.
//!
//! However many clients ask, it asks the card the same question at most once every [`MAX_AGE`].
#![expect(clippy::disallowed_methods, reason = "NVML is polled")]

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpusession_proto::message;
use gpusession_proto::readings::{Answer, FromMonitor, GpuReading, Query, ToMonitor};
use gpusession_proto::supervise::Isolation;

use crate::containment::{self, Calls, Files};
use crate::nvml::Nvml;

/// Age up to which an answer is reused.
const MAX_AGE: Duration = Duration::from_millis(100);
/// Number of kept answers above which outdated ones are dropped.
const KEPT: usize = 8192;
/// Events to watch: uncorrected ECC errors and Xids.
const EVENTS: u64 = 2 | 8;
/// Time before the next wait for events, after an error of NVML.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Serves until standard input ends.
pub fn run(driver: &str, isolation: Isolation) -> ExitCode {
    let mut input = io::stdin().lock();
    let nvml = match load(driver, isolation) {
        Ok(nvml) => Arc::new(nvml),
        Err(reason) => {
            report(&FromMonitor::Failed(reason));
            return ExitCode::from(1);
        }
    };
    let versions = |name| nvml.text(name, &[]).unwrap_or_default();
    report(&FromMonitor::Ready {
        driver_version: versions("nvmlSystemGetDriverVersion"),
        nvml_version: versions("nvmlSystemGetNVMLVersion"),
    });
    let events = nvml.clone();
    // Readings work without the watch.
    if std::thread::Builder::new().name("events".into()).spawn(move || watch(&events)).is_err() {
        report(&FromMonitor::Unwatched(Vec::new()));
    }
    let mut kept: HashMap<Query, (Instant, Answer)> = HashMap::new();
    while let Some(request) = receive(&mut input) {
        match request {
            ToMonitor::Read => report(&FromMonitor::Gpus(
                nvml.devices().map(|(uuid, device)| read(&nvml, uuid, device)).collect(),
            )),
            ToMonitor::Ask(queries) => {
                let now = Instant::now();
                let fresh = |asked: &Instant| now.duration_since(*asked) < MAX_AGE;
                if kept.len() > KEPT {
                    kept.retain(|_, (asked, _)| fresh(asked));
                }
                let answers = queries.into_iter().map(|query| match kept.get(&query) {
                    Some((asked, answer)) if fresh(asked) => answer.clone(),
                    _ => {
                        let answer = nvml.ask(&query);
                        kept.insert(query, (now, answer.clone()));
                        answer
                    }
                });
                report(&FromMonitor::Answers(answers.collect()));
            }
        }
    }
    ExitCode::SUCCESS
}

/// Loads NVML under restrictions: files before it starts, system calls after it.
fn load(driver: &str, isolation: Isolation) -> Result<Nvml, String> {
    let files = Files { driver, ..Files::default() };
    let mut lacking = containment::of_helper(isolation, |abi| containment::before_driver(&files, abi))?;
    let nvml = Nvml::load(Path::new(driver))?;
    lacking.extend(containment::of_helper(isolation, |abi| {
        containment::before_client(Calls::Own, abi).err().into_iter().collect()
    })?);
    if !lacking.is_empty() {
        eprintln!("gpuserver-worker: the monitor runs without: {}", lacking.join("; "));
    }
    Ok(nvml)
}

fn read(nvml: &Nvml, uuid: [u8; 16], device: usize) -> GpuReading {
    const CORRECTED_NOT: usize = 1;
    const SINCE_LOADED: usize = 0;
    const OF_THE_GPU: usize = 0;
    let [_, free, used] = match nvml.number::<[u64; 3]>("nvmlDeviceGetMemoryInfo", device, &[]) {
        Some(memory) => memory.map(Some),
        None => [None; 3],
    };
    GpuReading {
        uuid,
        memory_used_bytes: used,
        memory_free_bytes: free,
        processes: nvml.processes(device),
        utilization_percent: nvml
            .number::<[u32; 2]>("nvmlDeviceGetUtilizationRates", device, &[])
            .map(|u| u[0]),
        temperature_c: nvml.number("nvmlDeviceGetTemperature", device, &[OF_THE_GPU]),
        power_mw: nvml.number("nvmlDeviceGetPowerUsage", device, &[]),
        uncorrected_ecc: nvml.number("nvmlDeviceGetTotalEccErrors", device, &[CORRECTED_NOT, SINCE_LOADED]),
        compute_mode: nvml.number("nvmlDeviceGetComputeMode", device, &[]),
    }
}

/// Reports faults of the cards as they happen.
fn watch(nvml: &Nvml) {
    #[repr(C)]
    #[derive(Default)]
    struct Event {
        device: usize,
        kind: u64,
        data: u64,
        gpu_instance: u32,
        compute_instance: u32,
    }
    const TIMEOUT: u32 = 10;
    let mut set = 0usize;
    if nvml.call("nvmlEventSetCreate", &[&raw mut set as usize]) != 0 {
        report(&FromMonitor::Unwatched(Vec::new()));
        return;
    }
    let mut watched = HashMap::new();
    let mut unwatched = Vec::new();
    for (uuid, device) in nvml.devices() {
        let mut types = 0u64;
        if nvml.call("nvmlDeviceGetSupportedEventTypes", &[device, &raw mut types as usize]) == 0
            && types & EVENTS != 0
            && nvml.call("nvmlDeviceRegisterEvents", &[device, (types & EVENTS) as usize, set]) == 0
        {
            watched.insert(device, uuid);
        } else {
            unwatched.push(uuid);
        }
    }
    if !unwatched.is_empty() {
        report(&FromMonitor::Unwatched(unwatched));
    }
    while !watched.is_empty() {
        let mut event = Event::default();
        match nvml.call("nvmlEventSetWait_v2", &[set, &raw mut event as usize, 10_000]) {
            0 => {
                if let Some(uuid) = watched.get(&event.device) {
                    report(&FromMonitor::Fault { device: *uuid, event: event.kind, data: event.data });
                }
            }
            TIMEOUT => {}
            _ => std::thread::sleep(RETRY_INTERVAL),
        }
    }
}

fn receive(input: &mut impl Read) -> Option<ToMonitor> {
    let mut prefix = [0; 4];
    input.read_exact(&mut prefix).ok()?;
    let mut body = vec![0; message::body_len(prefix).ok()?];
    input.read_exact(&mut body).ok()?;
    message::decode(&body).ok()
}

/// Writes one message, uninterrupted by other threads.
///
/// An exited server shows as EOF where messages are read.
fn report(message: &FromMonitor) {
    static OUTPUT: Mutex<()> = Mutex::new(());
    let _one_at_a_time = OUTPUT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut out = io::stdout().lock();
    let _ = out.write_all(&message::encode(message)).and_then(|()| out.flush());
}
