//! The variables with which the driver of a worker limits its share of a GPU.

use std::ffi::OsString;

use gpusession_common::words::Priority;
use gpusession_proto::readings::uuid_text;
use gpusession_proto::supervise::DeviceLimit;

/// Returns the MPS variables of a worker, except those of its seat.
///
/// The program's own environment can lower a limit, never raise it. Values that the driver cannot
/// parse are ignored.
pub fn variables(
    devices: &[DeviceLimit],
    priority: Priority,
    own: &[(String, String)],
) -> Vec<(OsString, OsString)> {
    let own = |name: &str| own.iter().find(|(n, _)| n == name).map_or("", |(_, value)| value.trim());
    let mut out: Vec<(OsString, OsString)> = Vec::new();
    // One percentage applies to all GPUs of a process.
    let percent = devices.iter().map(|d| f64::from(d.sm_percent)).fold(100.0, f64::min);
    let name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
    let percent =
        own(name).parse().ok().filter(|p| (0.1..=100.0).contains(p)).unwrap_or(percent).min(percent);
    if percent < 100.0 {
        out.push((name.into(), percent.to_string().into()));
    }
    let name = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
    let wanted = own(name);
    let mib = |i: usize, device: &DeviceLimit| {
        let parts = wanted.split(',').filter_map(|part| part.split_once('='));
        let sizes = parts.filter(|(key, _)| names(key.trim(), i, device)).filter_map(|(_, s)| megabytes(s));
        let most = (device.memory_bytes != u64::MAX).then_some(device.memory_bytes >> 20);
        sizes.chain(most).min()
    };
    let limits = devices.iter().enumerate().filter_map(|(i, d)| Some(format!("{i}={}M", mib(i, d)?)));
    let limits: Vec<_> = limits.collect();
    if !limits.is_empty() {
        out.push((name.into(), limits.join(",").into()));
    }
    let name = "CUDA_MPS_CLIENT_PRIORITY";
    if priority == Priority::BelowNormal || own(name) == "1" {
        out.push((name.into(), "1".into()));
    }
    out
}

/// Returns `true` if a key of the limit names this device: by its index, or the start of its UUID.
fn names(key: &str, index: usize, device: &DeviceLimit) -> bool {
    // A UUID with only its prefix names all GPUs, as a mistake may.
    const SHORTEST: usize = "GPU-x".len();
    let uuid = uuid_text(&device.uuid).to_ascii_lowercase();
    key == index.to_string() || key.len() >= SHORTEST && uuid.starts_with(&key.to_ascii_lowercase())
}

/// Parses a size as the driver does, `4G` or `512M`; returns MiB.
fn megabytes(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_uppercase();
    let text = text.strip_suffix('B').unwrap_or(&text);
    match text.strip_suffix('G') {
        Some(gib) => gib.parse::<u64>().ok()?.checked_mul(1024),
        None => text.strip_suffix('M')?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_worker() {
        let device = |memory_bytes, sm_percent| DeviceLimit {
            uuid: [0; 16],
            memory_bytes,
            sm_percent,
            context_bytes: 0,
        };
        assert!(variables(&[device(u64::MAX, 100)], Priority::Normal, &[]).is_empty());
        let devices = [device(4 << 30, 30), device(u64::MAX, 100), device(1 << 30, 25)];
        let limited = variables(&devices, Priority::BelowNormal, &[]);
        let limited: Vec<_> =
            limited.iter().map(|(k, v)| (k.to_str().unwrap(), v.to_str().unwrap())).collect();
        assert_eq!(
            limited,
            [
                ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25"),
                ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=4096M,2=1024M"),
                ("CUDA_MPS_CLIENT_PRIORITY", "1"),
            ]
        );
    }

    #[test]
    fn a_program_may_only_tighten_its_limits() {
        let device = DeviceLimit { uuid: [0; 16], memory_bytes: 4 << 30, sm_percent: 50, context_bytes: 0 };
        let of = |percent: &str, memory: &str, priority: &str| {
            let own = [
                ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent),
                ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", memory),
                ("CUDA_MPS_CLIENT_PRIORITY", priority),
            ];
            let own = own.map(|(name, value)| (name.to_string(), value.to_string()));
            let variables = variables(std::slice::from_ref(&device), Priority::Normal, &own);
            variables.into_iter().map(|(_, value)| value.into_string().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(of("12.5", "0=1G", "1"), ["12.5", "0=1024M", "1"]);
        assert_eq!(of("90", "0=8GB,1=1M", "0"), ["50", "0=4096M"]);
        let uuid = "GPU-00000000-0000-0000-0000-000000000000";
        for memory in
            ["GPU-00=1G", &format!("{uuid}=1G"), &format!("1=1M,0=2G,{}=1024M", uuid.to_lowercase())]
        {
            assert_eq!(of("50", memory, "0"), ["50", "0=1024M"], "{memory}");
        }
        assert_eq!(of("50", &format!("GPU-=1G,GPU-1=1G,{uuid}0=1G"), "0"), ["50", "0=4096M"]);
        for bad in ["", "-1", "0", "NaN", "1e9", "many"] {
            assert_eq!(of(bad, bad, bad), ["50", "0=4096M"], "{bad}");
        }
    }
}
