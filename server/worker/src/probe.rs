//! `gpuserver-worker --probe DRIVER`: the GPUs of a driver as JSON, so that `gpuserver` itself never loads CUDA.

use std::path::Path;
use std::process::ExitCode;

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
        }));
    }
    Ok(json!({ "driver_version": driver_version(), "cuda_version": version, "devices": devices }))
}

fn text(chars: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// As `nvidia-smi -L` prints it.
fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// The kernel driver's version, where there is one.
fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_owned())
}
