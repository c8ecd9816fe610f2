//! Sets of events: faults of the lease's devices, which their servers remember.
//!
//! A waiting program asks every half second.
#![expect(clippy::disallowed_methods, reason = "the server is polled")]

use std::time::{Duration, Instant};

use crate::entry::{device, guard, handle, out};
use crate::event_set::Set;
use crate::session::{Session, session};
use crate::status::{self, Result};

/// Supported events: uncorrected ECC errors and Xids.
const TYPES: u64 = 2 | 8;
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of sets of one process.
const MAX_SETS: usize = 1024;

/// `nvmlEventData_t`
#[repr(C)]
struct EventData {
    device: usize,
    event: u64,
    data: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

fn next(session: &mut Session, set: usize) -> Result<Option<EventData>> {
    session.count()?;
    let devices = session.events.get(&set).ok_or(status::INVALID_ARGUMENT)?.devices.clone();
    for (device, (types, seen)) in devices {
        let faults = &session.device(device)?.faults;
        let Some(fault) = faults.iter().find(|f| f.number > seen && f.event & types != 0).copied() else {
            continue;
        };
        if let Some((_, seen)) = session.events.get_mut(&set).and_then(|s| s.devices.get_mut(&device)) {
            *seen = fault.number;
        }
        return Ok(Some(EventData {
            device: handle(device),
            event: fault.event,
            data: fault.data,
            gpu_instance: u32::MAX,
            compute_instance: u32::MAX,
        }));
    }
    Ok(None)
}

/// # Safety
/// `data` is null or valid for an `EventData`.
unsafe fn wait(set: usize, data: *mut EventData, timeout_ms: u32) -> Result {
    let end = Instant::now() + Duration::from_millis(u64::from(timeout_ms));
    loop {
        let found = next(&mut session(), set)?;
        if let Some(event) = found {
            // SAFETY: by this function's contract `data` is null or valid.
            return unsafe { out(data, event) };
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(status::TIMEOUT);
        }
        std::thread::sleep(left.min(POLL_INTERVAL));
    }
}

/// See NVIDIA's documentation of the NVML call of this name.
///
/// # Safety
/// Pointers are as NVML requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetCreate(set: *mut usize) -> u32 {
    guard("nvmlEventSetCreate", || {
        let mut session = session();
        session.count()?;
        if session.events.len() >= MAX_SETS {
            return Err(status::MEMORY);
        }
        let fresh = session.events.keys().max().map_or(1, |last| last + 1);
        // SAFETY: by NVML's contract `set` is null or valid.
        unsafe { out(set, fresh) }?;
        session.events.insert(fresh, Set::default());
        Ok(())
    })
}

/// See NVIDIA's documentation of the NVML call of this name.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(set: usize) -> u32 {
    guard("nvmlEventSetFree", || {
        let mut session = session();
        session.count()?;
        session.events.remove(&set).map(drop).ok_or(status::INVALID_ARGUMENT)
    })
}

/// See NVIDIA's documentation of the NVML call of this name.
///
/// # Safety
/// Pointers are as NVML requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetSupportedEventTypes(which: usize, types: *mut u64) -> u32 {
    guard("nvmlDeviceGetSupportedEventTypes", || {
        let session = session();
        device(&session, which)?;
        // SAFETY: by NVML's contract `types` is null or valid.
        unsafe { out(types, TYPES) }
    })
}

/// See NVIDIA's documentation of the NVML call of this name.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(which: usize, types: u64, set: usize) -> u32 {
    guard("nvmlDeviceRegisterEvents", || {
        let mut session = session();
        let device = device(&session, which)?;
        if types & !TYPES != 0 {
            return Err(status::NOT_SUPPORTED);
        }
        let last = session.device(device)?.faults.iter().map(|f| f.number).max().unwrap_or(0);
        let set = session.events.get_mut(&set).ok_or(status::INVALID_ARGUMENT)?;
        let entry = set.devices.entry(device).or_insert((0, last));
        entry.0 |= types;
        Ok(())
    })
}

/// See NVIDIA's documentation of the NVML call of this name.
///
/// # Safety
/// Pointers are as NVML requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait(set: usize, data: *mut std::ffi::c_void, timeout_ms: u32) -> u32 {
    // SAFETY: by NVML's contract `data` is null or valid.
    guard("nvmlEventSetWait", || unsafe { wait(set, data.cast(), timeout_ms) })
}

/// See NVIDIA's documentation of the NVML call of this name.
///
/// # Safety
/// Pointers are as NVML requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait_v2(
    set: usize,
    data: *mut std::ffi::c_void,
    timeout_ms: u32,
) -> u32 {
    // SAFETY: by NVML's contract `data` is null or valid.
    guard("nvmlEventSetWait_v2", || unsafe { wait(set, data.cast(), timeout_ms) })
}
