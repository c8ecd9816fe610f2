//! `gpuserver-worker --probe DRIVER` prints the GPUs of a driver as JSON.
//!
//! So `gpuserver` itself never loads CUDA.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use serde_json::json;

use crate::driver::{Driver, Status, check};

/// Prints the GPUs; a failure goes to stderr and into the exit status.
pub fn run(path: &str) -> ExitCode {
    match describe(path) {
        Ok(value) => {
            println!("{value}");
            ExitCode::SUCCESS
        }
        Err(reason) => {
            eprintln!("gpuserver-worker: {reason}");
            ExitCode::from(1)
        }
    }
}

fn describe(path: &str) -> Result<serde_json::Value, String> {
    const MULTIPROCESSORS: i32 = 16;
    const MAJOR: i32 = 75;
    const MINOR: i32 = 76;
    const COMPUTE_MODE: i32 = 20;
    const PAGEABLE_MEMORY_ACCESS: i32 = 88;
    let driver = Driver::load(Path::new(path))?;
    let call = &driver.call;
    let say = |what: &'static str| move |s: Status| format!("{what} of {path}: CUDA error {s}");
    // SAFETY: out pointers are valid and as long as stated.
    check(unsafe { (call.cuInit)(0) }).map_err(say("cuInit"))?;
    let (mut version, mut count) = (0, 0);
    // SAFETY: as above.
    check(unsafe { (call.cuDriverGetVersion)(&mut version) }).map_err(say("cuDriverGetVersion"))?;
    // SAFETY: as above.
    check(unsafe { (call.cuDeviceGetCount)(&mut count) }).map_err(say("cuDeviceGetCount"))?;
    let contexts = context_bytes(driver, path, count);
    let mut devices = Vec::new();
    for device in 0..count {
        let attribute = |which: i32| {
            let mut value = 0;
            // SAFETY: as above.
            check(unsafe { (call.cuDeviceGetAttribute)(&mut value, which, device) })
                .map(|()| value)
                .map_err(say("cuDeviceGetAttribute"))
        };
        let (mut name, mut bus, mut uuid, mut memory) = ([0; 256], [0; 64], [0u8; 16], 0);
        // SAFETY: as above.
        check(unsafe { (call.cuDeviceGetName)(name.as_mut_ptr(), 256, device) })
            .map_err(say("cuDeviceGetName"))?;
        // SAFETY: as above.
        check(unsafe { (call.cuDeviceGetPCIBusId)(bus.as_mut_ptr(), 64, device) })
            .map_err(say("cuDeviceGetPCIBusId"))?;
        // SAFETY: as above.
        check(unsafe { (call.cuDeviceGetUuid_v2)(uuid.as_mut_ptr(), device) })
            .map_err(say("cuDeviceGetUuid"))?;
        // SAFETY: as above.
        check(unsafe { (call.cuDeviceTotalMem_v2)(&mut memory, device) }).map_err(say("cuDeviceTotalMem"))?;
        devices.push(json!({
            "uuid": uuid_text(&uuid),
            "name": text(&name),
            "memory_bytes": memory,
            "compute_major": attribute(MAJOR)?,
            "compute_minor": attribute(MINOR)?,
            "pci_address": text(&bus),
            "multiprocessors": attribute(MULTIPROCESSORS)?,
            "compute_mode": attribute(COMPUTE_MODE)?,
            "pageable_access": attribute(PAGEABLE_MEMORY_ACCESS)? != 0,
            "context_bytes": contexts.get(device as usize).copied().unwrap_or(0),
        }));
    }
    Ok(json!({ "driver_version": driver_version(), "cuda_version": version, "devices": devices }))
}

/// Flag of the probe's second process, which holds a context on every device.
pub const HOLD: &str = "--hold-contexts";

/// Measures the bytes that a context of one more process takes of each device.
///
/// The second process makes the difference. 0 stands for an unknown number.
fn context_bytes(driver: &Driver, path: &str, count: i32) -> Vec<u64> {
    let measure = || -> Option<Vec<u64>> {
        let before = hold_contexts(driver, count);
        let mut other = Command::new(std::env::current_exe().ok()?)
            .args([HOLD, path])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let holds = other.stdout.as_mut()?.read_exact(&mut [0]).is_ok();
        let after = hold_contexts(driver, count);
        // The process exits at EOF on its standard input.
        drop(other.stdin.take());
        let _ = other.wait();
        let difference = |(before, after): (&Option<u64>, Option<u64>)| {
            before.zip(after).map_or(0, |(before, after)| before.saturating_sub(after))
        };
        holds.then(|| before.iter().zip(after).map(difference).collect())
    };
    measure().unwrap_or_default()
}

/// Creates a context on every device and returns the free memory of each.
///
/// `None` stands for a device without room for a context, or in exclusive use.
fn hold_contexts(driver: &Driver, count: i32) -> Vec<Option<u64>> {
    let one = |device| {
        let (mut ctx, mut free, mut total) = (std::ptr::null_mut(), 0, 0);
        // SAFETY: out pointers are valid; the context stays retained until the process exits.
        unsafe {
            check((driver.call.cuDevicePrimaryCtxRetain)(&mut ctx, device)).ok()?;
            check((driver.call.cuCtxSetCurrent)(ctx)).ok()?;
            check((driver.call.cuMemGetInfo_v2)(&mut free, &mut total)).ok()?;
        }
        Some(free as u64)
    };
    (0..count).map(one).collect()
}

/// Holds contexts until standard input ends.
pub fn hold(path: &str) -> ExitCode {
    let held = || -> Result<(), String> {
        let driver = Driver::load(Path::new(path))?;
        let say = |status: Status| format!("CUDA error {status}");
        let mut count = 0;
        // SAFETY: cuInit takes only flags, which must be 0; the out pointer is valid.
        check(unsafe {
            match (driver.call.cuInit)(0) {
                0 => (driver.call.cuDeviceGetCount)(&mut count),
                error => error,
            }
        })
        .map_err(say)?;
        hold_contexts(driver, count);
        std::io::stdout()
            .write_all(b"1")
            .and_then(|()| std::io::stdout().flush())
            .map_err(|e| e.to_string())?;
        std::io::stdin().read_to_end(&mut Vec::new()).map(drop).map_err(|e| e.to_string())
    };
    match held() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("gpuserver-worker: {reason}");
            ExitCode::from(1)
        }
    }
}

fn text(chars: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Formats a UUID as `nvidia-smi -L` prints it.
fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Returns the kernel driver's version, if NVIDIA's is loaded.
fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_owned())
}
