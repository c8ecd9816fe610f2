//! The part of NVML that `nvidia-smi` and the pool's health checks use.
//!
//! The library is the same file under a second name (`libnvidia-ml.so.1`). It needs no `cuInit` and
//! sees the whole machine: memory in use by all processes, and their faults (Xid).

use crate::config::Config;
use crate::driver::config;
use crate::driver::device::{pci_id, uuid_text};
use crate::usage::{ECC, Fault, Usage, XID};
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

const UNINITIALIZED: u32 = 1;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;
const INSUFFICIENT_SIZE: u32 = 7;
const TIMEOUT: u32 = 10;
const VERSION_MISMATCH: u32 = 25;
const UNKNOWN: u32 = 999;

type Result<T = ()> = std::result::Result<T, u32>;

static USERS: AtomicU32 = AtomicU32::new(0);
static USAGE: LazyLock<Arc<Usage>> = LazyLock::new(|| Usage::open(&machine()));

#[cfg(not(test))]
fn machine() -> Config {
    config().clone()
}

/// A machine of its own for the test: the common one has other programs' faults, and drops the
/// oldest.
#[cfg(test)]
fn machine() -> Config {
    Config { machine: format!("nvml-{}", std::process::id()), ..config().clone() }
}

fn guard(body: impl FnOnce() -> Result) -> u32 {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(_) => UNKNOWN,
    }
}

fn ready() -> Result {
    if USERS.load(Ordering::SeqCst) == 0 { Err(UNINITIALIZED) } else { Ok(()) }
}

/// Returns the ordinal of a handle; handles are small numbers, and never dereferenced.
fn device(handle: usize) -> Result<u32> {
    ready()?;
    let ordinal = handle.wrapping_sub(0x1000) as u32;
    if handle >= 0x1000 && ordinal < config().devices { Ok(ordinal) } else { Err(INVALID_ARGUMENT) }
}

fn handle(ordinal: u32) -> Result<usize> {
    ready()?;
    if ordinal < config().devices { Ok(0x1000 + ordinal as usize) } else { Err(INVALID_ARGUMENT) }
}

unsafe fn out<T>(to: *mut T, value: T) -> Result {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the program vouches for its pointer.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

unsafe fn put(to: *mut c_char, room: u32, text: &str) -> Result {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if text.len() >= room as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the program vouches for `room` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

unsafe fn text<'a>(from: *const c_char) -> Result<&'a str> {
    if from.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the program vouches for a C string.
    unsafe { CStr::from_ptr(from) }.to_str().map_err(|_| INVALID_ARGUMENT)
}

#[repr(C)]
pub struct PciInfo {
    legacy: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    pci_device_id: u32,
    pci_subsystem_id: u32,
    id: [u8; 32],
}

fn pci(ordinal: u32) -> PciInfo {
    let fill = |to: &mut [u8], s: &str| to[..s.len()].copy_from_slice(s.as_bytes());
    let mut info = PciInfo {
        legacy: [0; 16],
        domain: 0,
        bus: ordinal + 1,
        device: 0,
        pci_device_id: 0x1eb8_10de,
        pci_subsystem_id: 0,
        id: [0; 32],
    };
    fill(&mut info.legacy, &pci_id(ordinal));
    fill(&mut info.id, &format!("0000{}", pci_id(ordinal)));
    info
}

#[repr(C)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
pub struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Process {
    pid: u32,
    used: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

unsafe fn processes<T>(h: usize, count: *mut u32, list: *mut T, make: impl Fn(u32, u64) -> T) -> Result {
    let all = USAGE.processes(device(h)?);
    // SAFETY: the program gave room for `*count` entries.
    unsafe {
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let room = *count as usize;
        *count = all.len() as u32;
        if room < all.len() {
            return Err(INSUFFICIENT_SIZE);
        }
        for (i, (pid, used)) in all.into_iter().enumerate() {
            list.add(i).write_unaligned(make(pid, used));
        }
    }
    Ok(())
}

/// The structure that `nvmlEventSetWait` fills.
#[repr(C)]
pub struct EventData {
    device: usize,
    event: u64,
    data: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

struct EventSet {
    seen: usize,
    /// Devices, and the mask of events of each.
    devices: Vec<(u32, u64)>,
}

unsafe fn wait(set: usize, data: *mut EventData, timeout_ms: u32) -> Result {
    ready()?;
    if set == 0 {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the set comes from `nvmlEventSetCreate`, and one thread at a time uses it, as NVML
    // demands.
    let set = unsafe { &mut *(set as *mut EventSet) };
    let end = Instant::now() + Duration::from_millis(u64::from(timeout_ms));
    loop {
        while let Some(fault) = USAGE.event(set.seen) {
            set.seen += 1;
            if set.devices.iter().any(|(d, types)| *d == fault.device && types & fault.event != 0) {
                let found = EventData {
                    device: handle(fault.device)?,
                    event: fault.event,
                    data: fault.data,
                    gpu_instance: !0,
                    compute_instance: !0,
                };
                // SAFETY: the program vouches for its pointer.
                return unsafe { out(data, found) };
            }
        }
        if Instant::now() >= end {
            return Err(TIMEOUT);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// `nvmlFieldValue_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FieldValue {
    field: u32,
    scope: u32,
    timestamp: i64,
    latency_usec: i64,
    kind: u32,
    status: u32,
    value: u64,
}

/// Returns the highest clock of a kind: graphics, multiprocessors, memory, video.
fn clock_mhz(h: usize, clock: u32) -> Result<u32> {
    device(h)?;
    [1590, 1590, 5001, 1470].get(clock as usize).copied().ok_or(INVALID_ARGUMENT)
}

unsafe fn clocks(count: *mut u32, list: *mut u32, all: &[u32]) -> Result {
    // SAFETY: the program gave room for `*count` entries.
    unsafe {
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let room = *count as usize;
        *count = all.len() as u32;
        if room < all.len() || list.is_null() {
            return Err(INSUFFICIENT_SIZE);
        }
        list.copy_from_nonoverlapping(all.as_ptr(), all.len());
    }
    Ok(())
}

macro_rules! nvml {
    ($(fn $name:ident($($a:ident: $t:ty),* $(,)?) $body:block)*) => {$(
        /// See NVIDIA's documentation of the NVML call of this name.
        ///
        /// # Safety
        /// Pointers are as that documentation demands.
        #[allow(non_snake_case, clippy::macro_metavars_in_unsafe)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($a: $t),*) -> u32 {
            guard(|| -> Result {
                #[allow(unused_unsafe)]
                // SAFETY: the program vouches for its arguments.
                unsafe { $body }
            })
        }
    )*};
}

fn start() -> Result {
    USERS.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

static TABLE: [usize; 512] = {
    let mut table = [0; 512];
    table[0] = size_of::<[usize; 512]>();
    table
};

/// Id of the table that `nvidia-smi` requests; it checks the slots before it calls any.
const SMI_TABLE: [u8; 16] = 0xc4fe_3e6c_c98f_6c4e_a327_ee69_6e12_f7c4u128.to_be_bytes();

nvml! {
    fn nvmlInit() { start() }
    fn nvmlInit_v2() { start() }
    fn nvmlInitWithFlags(_flags: u32) { start() }
    fn nvmlShutdown() {
        USERS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).map(drop).map_err(|_| UNINITIALIZED)
    }

    fn nvmlInternalGetExportTable(to: *mut usize, id: *const [u8; 16]) {
        if id.is_null() || *id != SMI_TABLE {
            return Err(NOT_FOUND);
        }
        out(to, TABLE.as_ptr() as usize)
    }

    fn nvmlSystemGetDriverVersion(to: *mut c_char, room: u32) { put(to, room, "580.00.sim") }
    fn nvmlSystemGetNVMLVersion(to: *mut c_char, room: u32) { put(to, room, "13.580.00") }
    fn nvmlSystemGetCudaDriverVersion(to: *mut i32) { out(to, config().driver_version as i32) }
    fn nvmlSystemGetCudaDriverVersion_v2(to: *mut i32) { out(to, config().driver_version as i32) }
    fn nvmlSystemGetProcessName(pid: u32, to: *mut c_char, room: u32) {
        let name = std::fs::read_link(format!("/proc/{pid}/exe")).map_err(|_| NOT_FOUND)?;
        put(to, room, &name.to_string_lossy())
    }

    fn nvmlDeviceGetCount(n: *mut u32) {
        ready()?;
        out(n, config().devices)
    }
    fn nvmlDeviceGetCount_v2(n: *mut u32) {
        ready()?;
        out(n, config().devices)
    }
    fn nvmlDeviceGetHandleByIndex(i: u32, to: *mut usize) { out(to, handle(i)?) }
    fn nvmlDeviceGetHandleByIndex_v2(i: u32, to: *mut usize) { out(to, handle(i)?) }
    fn nvmlDeviceGetHandleByUUID(id: *const c_char, to: *mut usize) {
        let wanted = text(id)?;
        let found = (0..config().devices).find(|i| uuid_text(*i) == wanted).ok_or(NOT_FOUND)?;
        out(to, handle(found)?)
    }
    fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, to: *mut usize) {
        let wanted = text(id)?.to_ascii_uppercase();
        let found = (0..config().devices).find(|i| wanted.ends_with(&pci_id(*i))).ok_or(NOT_FOUND)?;
        out(to, handle(found)?)
    }
    fn nvmlDeviceGetIndex(h: usize, to: *mut u32) { out(to, device(h)?) }
    fn nvmlDeviceGetMinorNumber(h: usize, to: *mut u32) { out(to, device(h)?) }
    fn nvmlDeviceGetName(h: usize, to: *mut c_char, room: u32) {
        device(h)?;
        put(to, room, &config().name)
    }
    fn nvmlDeviceGetUUID(h: usize, to: *mut c_char, room: u32) { put(to, room, &uuid_text(device(h)?)) }
    fn nvmlDeviceGetPciInfo_v3(h: usize, to: *mut PciInfo) { out(to, pci(device(h)?)) }
    fn nvmlDeviceGetCudaComputeCapability(h: usize, major: *mut i32, minor: *mut i32) {
        device(h)?;
        out(major, 7)?;
        out(minor, 5)
    }

    fn nvmlDeviceGetMemoryInfo(h: usize, to: *mut Memory) {
        let (total, used) = (config().memory, USAGE.used(device(h)?));
        out(to, Memory { total, free: total.saturating_sub(used), used })
    }
    fn nvmlDeviceGetMemoryInfo_v2(h: usize, to: *mut MemoryV2) {
        let (total, used) = (config().memory, USAGE.used(device(h)?));
        if to.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let version = (*to).version;
        out(to, MemoryV2 { version, total, reserved: 0, free: total.saturating_sub(used), used })
    }
    fn nvmlDeviceGetComputeRunningProcesses(h: usize, count: *mut u32, list: *mut [u64; 2]) {
        processes(h, count, list, |pid, used| [u64::from(pid), used])
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(h: usize, count: *mut u32, list: *mut Process) {
        processes(h, count, list, |pid, used| Process { pid, used, gpu_instance: !0, compute_instance: !0 })
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(h: usize, count: *mut u32, _list: *mut Process) {
        device(h)?;
        out(count, 0)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(h: usize, count: *mut u32, _list: *mut Process) {
        device(h)?;
        out(count, 0)
    }

    fn nvmlDeviceGetComputeMode(h: usize, to: *mut u32) {
        device(h)?;
        out(to, config().compute_mode)
    }
    fn nvmlDeviceGetPersistenceMode(h: usize, to: *mut u32) {
        device(h)?;
        out(to, 1)
    }
    fn nvmlDeviceGetMaxMigDeviceCount(h: usize, to: *mut u32) {
        device(h)?;
        out(to, 0)
    }
    fn nvmlDeviceIsMigDeviceHandle(h: usize, to: *mut u32) {
        device(h)?;
        out(to, 0)
    }
    fn nvmlDeviceGetVirtualizationMode(h: usize, to: *mut u32) {
        device(h)?;
        out(to, 0)
    }
    fn nvmlDeviceGetSupportedEventTypes(h: usize, to: *mut u64) {
        device(h)?;
        out(to, ECC | XID)
    }

    fn nvmlDeviceGetMigMode(h: usize, current: *mut u32, pending: *mut u32) {
        device(h)?;
        out(current, 0)?;
        out(pending, 0)
    }
    fn nvmlDeviceGetEccMode(h: usize, current: *mut u32, pending: *mut u32) {
        device(h)?;
        out(current, 1)?;
        out(pending, 1)
    }
    fn nvmlDeviceGetTotalEccErrors(h: usize, kind: u32, counter: u32, to: *mut u64) {
        const UNCORRECTED: u32 = 1;
        let ordinal = device(h)?;
        if kind > 1 || counter > 1 {
            return Err(INVALID_ARGUMENT);
        }
        out(to, if kind == UNCORRECTED { USAGE.ecc_errors(ordinal) } else { 0 })
    }
    fn nvmlDeviceGetBrand(h: usize, to: *mut u32) {
        device(h)?;
        out(to, 2)
    }
    fn nvmlDeviceGetArchitecture(h: usize, to: *mut u32) {
        device(h)?;
        out(to, 6)
    }
    fn nvmlDeviceGetSerial(h: usize, to: *mut c_char, room: u32) { put(to, room, &format!("{:013}", device(h)? + 1)) }
    fn nvmlDeviceGetVbiosVersion(h: usize, to: *mut c_char, room: u32) {
        device(h)?;
        put(to, room, "90.04.96.00.01")
    }
    fn nvmlDeviceGetBAR1MemoryInfo(h: usize, to: *mut Memory) {
        device(h)?;
        out(to, Memory { total: 256 << 20, free: 255 << 20, used: 1 << 20 })
    }
    fn nvmlDeviceGetClockInfo(h: usize, clock: u32, to: *mut u32) { out(to, clock_mhz(h, clock)? / 2) }
    fn nvmlDeviceGetMaxClockInfo(h: usize, clock: u32, to: *mut u32) { out(to, clock_mhz(h, clock)?) }
    fn nvmlDeviceGetSupportedMemoryClocks(h: usize, count: *mut u32, list: *mut u32) {
        device(h)?;
        clocks(count, list, &[5001, 405])
    }
    fn nvmlDeviceGetSupportedGraphicsClocks(h: usize, memory: u32, count: *mut u32, list: *mut u32) {
        device(h)?;
        match memory {
            5001 => clocks(count, list, &[1590, 1200, 900, 300]),
            405 => clocks(count, list, &[300]),
            _ => Err(NOT_FOUND),
        }
    }
    fn nvmlDeviceGetCurrPcieLinkGeneration(h: usize, to: *mut u32) {
        device(h)?;
        out(to, 3)
    }
    fn nvmlDeviceGetCurrPcieLinkWidth(h: usize, to: *mut u32) {
        device(h)?;
        out(to, 16)
    }
    fn nvmlDeviceGetEncoderUtilization(h: usize, percent: *mut u32, period: *mut u32) {
        device(h)?;
        out(percent, 0)?;
        out(period, 167_000)
    }
    fn nvmlDeviceGetDecoderUtilization(h: usize, percent: *mut u32, period: *mut u32) {
        device(h)?;
        out(percent, 0)?;
        out(period, 167_000)
    }
    fn nvmlDeviceGetPerformanceState(h: usize, to: *mut u32) {
        device(h)?;
        out(to, 8)
    }
    fn nvmlDeviceGetPowerManagementLimit(h: usize, to: *mut u32) {
        device(h)?;
        out(to, 70_000)
    }
    fn nvmlDeviceGetEnforcedPowerLimit(h: usize, to: *mut u32) {
        device(h)?;
        out(to, 70_000)
    }
    // Each card has its own value, so that tests notice when cards are confused.
    fn nvmlDeviceGetPowerUsage(h: usize, to: *mut u32) { out(to, 9_500 + 1000 * device(h)?) }
    fn nvmlDeviceGetTemperature(h: usize, sensor: u32, to: *mut u32) {
        let ordinal = device(h)?;
        if sensor != 0 {
            return Err(INVALID_ARGUMENT);
        }
        out(to, 36 + ordinal)
    }
    fn nvmlDeviceGetTemperatureV(h: usize, to: *mut [u32; 3]) {
        const VERSION: u32 = 12 | 1 << 24;
        let ordinal = device(h)?;
        if to.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let [version, sensor, _] = to.read_unaligned();
        if version != VERSION {
            return Err(VERSION_MISMATCH);
        }
        out(to, [version, sensor, 36 + ordinal])
    }
    fn nvmlDeviceGetUtilizationRates(h: usize, to: *mut [u32; 2]) {
        // A card counts as busy if its memory is in use.
        let used = USAGE.used(device(h)?);
        out(to, if used > 0 { [50, (used * 100 / config().memory.max(1)) as u32] } else { [0, 0] })
    }
    fn nvmlDeviceGetTopologyCommonAncestor(one: usize, other: usize, to: *mut u32) {
        const NODE: u32 = 40;
        device(one)?;
        device(other)?;
        out(to, if one == other { 0 } else { NODE })
    }
    fn nvmlDeviceGetP2PStatus(one: usize, other: usize, _index: u32, to: *mut u32) {
        const NOT_SUPPORTED: u32 = 5;
        device(one)?;
        device(other)?;
        out(to, if config().peers { 0 } else { NOT_SUPPORTED })
    }
    fn nvmlDeviceGetFieldValues(h: usize, count: i32, values: *mut FieldValue) {
        const MEMORY_TEMPERATURE: u32 = 82;
        const UNSIGNED_INT: u32 = 1;
        let ordinal = device(h)?;
        if values.is_null() || count < 1 {
            return Err(INVALID_ARGUMENT);
        }
        for i in 0..count as usize {
            let mut value = values.add(i).read_unaligned();
            (value.status, value.kind) = (NOT_SUPPORTED, 0);
            if value.field == MEMORY_TEMPERATURE {
                (value.status, value.kind, value.value) = (0, UNSIGNED_INT, u64::from(40 + ordinal));
            }
            values.add(i).write_unaligned(value);
        }
        Ok(())
    }

    fn nvmlEventSetCreate(to: *mut usize) {
        ready()?;
        if to.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let set = Box::new(EventSet { seen: USAGE.events(), devices: Vec::new() });
        out(to, Box::into_raw(set) as usize)
    }
    fn nvmlEventSetFree(set: usize) {
        if set == 0 {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: made by `nvmlEventSetCreate`, and freed once.
        drop(Box::from_raw(set as *mut EventSet));
        Ok(())
    }
    fn nvmlDeviceRegisterEvents(h: usize, types: u64, set: usize) {
        let ordinal = device(h)?;
        if set == 0 {
            return Err(INVALID_ARGUMENT);
        }
        if types & !(ECC | XID) != 0 {
            return Err(NOT_SUPPORTED);
        }
        (*(set as *mut EventSet)).devices.push((ordinal, types));
        Ok(())
    }
    fn nvmlEventSetWait(set: usize, data: *mut EventData, timeout_ms: u32) { wait(set, data, timeout_ms) }
    fn nvmlEventSetWait_v2(set: usize, data: *mut EventData, timeout_ms: u32) { wait(set, data, timeout_ms) }
}

/// Calls about features that a simulated card lacks; the arguments do not matter.
macro_rules! absent {
    ($($name:ident)*) => {$(
        /// Returns "not supported", as many cards do.
        #[allow(non_snake_case)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> u32 {
            NOT_SUPPORTED
        }
    )*};
}

absent! {
    nvmlDeviceGetDisplayActive nvmlDeviceGetDisplayMode nvmlDeviceGetFanSpeed nvmlDeviceGetNvLinkState nvmlDeviceGetNvLinkVersion nvmlDeviceGetNvLinkCapability
    nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkRemotePciInfo_v2 nvmlDeviceValidateInforom
}

/// See NVIDIA's documentation of the NVML call of this name.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: u32) -> *const c_char {
    let text: &CStr = match code {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        10 => c"Timeout",
        13 => c"Function Not Found",
        15 => c"GPU is lost",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

/// Simulates a fault of a card, for tests of its handling. Returns an NVML status.
///
/// `event` is NVML's `nvmlEventTypeDoubleBitEccError` (2) or `nvmlEventTypeXidCriticalError` (8);
/// `data` is the code of an Xid.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub extern "C" fn simgpuReportFault(device: u32, event: u64, data: u64) -> u32 {
    guard(|| {
        if device >= config().devices || ![ECC, XID].contains(&event) {
            return Err(INVALID_ARGUMENT);
        }
        USAGE.report(Fault { device, event, data });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_an_event() {
        let (mut set, mut n) = (0usize, 0u32);
        // SAFETY: every pointer is a local of the right type.
        unsafe {
            assert_eq!(nvmlDeviceGetCount_v2(&raw mut n), UNINITIALIZED);
            assert_eq!(nvmlInit_v2(), 0);
            assert_eq!((nvmlDeviceGetCount_v2(&raw mut n), n), (0, 1));
            let mut h = 0usize;
            assert_eq!(nvmlDeviceGetHandleByIndex_v2(0, &raw mut h), 0);
            assert_eq!(nvmlDeviceGetHandleByIndex_v2(7, &raw mut h), INVALID_ARGUMENT);
            assert_eq!(nvmlEventSetCreate(&raw mut set), 0);
            assert_eq!(nvmlDeviceRegisterEvents(h, 8, set), 0);
            // The counts belong to the simulated machine, and include those of earlier runs.
            let count = |corrected: u32| {
                let mut errors = 0u64;
                assert_eq!(nvmlDeviceGetTotalEccErrors(h, corrected, 0, &raw mut errors), 0);
                errors
            };
            let before = (count(0), count(1));
            let mut data = EventData { device: 0, event: 0, data: 0, gpu_instance: 0, compute_instance: 0 };
            assert_eq!(nvmlEventSetWait_v2(set, &raw mut data, 10), TIMEOUT);
            USAGE.report_xid(0, 31);
            assert_eq!(nvmlEventSetWait_v2(set, &raw mut data, 1000), 0);
            assert_eq!((data.device, data.event, data.data), (h, 8, 31));
            // An event that was not registered does not show, but is counted.
            assert_eq!(simgpuReportFault(0, 2, 0), 0);
            assert_eq!(
                (simgpuReportFault(7, 8, 79), simgpuReportFault(0, 1, 0)),
                (INVALID_ARGUMENT, INVALID_ARGUMENT)
            );
            assert_eq!(nvmlEventSetWait_v2(set, &raw mut data, 10), TIMEOUT);
            assert_eq!((count(0), count(1)), (before.0, before.1 + 1));
            assert_eq!(nvmlDeviceRegisterEvents(h, 2, set), 0);
            assert_eq!(simgpuReportFault(0, 2, 0), 0);
            assert_eq!(nvmlEventSetWait_v2(set, &raw mut data, 1000), 0);
            assert_eq!((data.event, data.data), (2, 0));
            assert_eq!(nvmlEventSetFree(set), 0);
            assert_eq!(nvmlShutdown(), 0);
        }
        let _ = std::fs::remove_file(crate::usage::path(&machine()));
    }
}
