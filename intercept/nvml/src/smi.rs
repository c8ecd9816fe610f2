//! `nvmlInternalGetExportTable`: an undocumented table of functions that `nvidia-smi` uses besides
//! NVML.
//!
//! Its contents come from observation of `nvidia-smi` (535, 550, 580): the slots that it calls, and
//! its output for each answer. It checks a slot before it calls it, and works without missing
//! functions.

use crate::entry::{device, guard, list, out, string};
use crate::local::{by_address, level, process_name};
use crate::session::session;
use crate::status;

/// Id of the table that `nvidia-smi` requests.
const ID: [u8; 16] = 0xc4fe_3e6c_c98f_6c4e_a327_ee69_6e12_f7c4u128.to_be_bytes();
const SLOTS: usize = 512;

#[derive(Clone, Copy)]
#[repr(C)]
union Slot {
    bytes: usize,
    log: unsafe extern "C" fn() -> u32,
    path: unsafe extern "C" fn(*const std::ffi::c_char, *const std::ffi::c_char, *mut u32) -> u32,
    watched: unsafe extern "C" fn(usize, *mut u32) -> u32,
    processes: unsafe extern "C" fn(usize, *mut u32, *mut Process) -> u32,
}

/// Process in the form that `nvidia-smi` expects.
#[repr(C)]
struct Process {
    pid: u32,
    used: u64,
    unknown: u64,
    gpu_instance: u32,
    compute_instance: u32,
    name: [u8; 4096],
}

const _: () = assert!(size_of::<Process>() == 4128);

static TABLE: [Slot; SLOTS] = {
    let mut table = [Slot { bytes: 0 }; SLOTS];
    table[0] = Slot { bytes: size_of::<[Slot; SLOTS]>() };
    table[23] = Slot { path };
    table[26] = Slot { log };
    table[72] = Slot { watched };
    table[81] = Slot { log: refused };
    table[213] = Slot { processes };
    table[214] = Slot { processes: none };
    table[215] = Slot { processes: none };
    table[251] = Slot { log: refused };
    table
};

/// Accepts a line for NVML's log, and drops it.
unsafe extern "C" fn log() -> u32 {
    status::SUCCESS
}

/// Refuses to set the persistence mode (slots of 580), because the card belongs to its server.
unsafe extern "C" fn refused() -> u32 {
    status::NO_PERMISSION
}

/// Writes the connection between two devices, which the PCI addresses name.
///
/// 0 is a single PCIe switch; then follow several switches, a host bridge, a NUMA node, the system.
unsafe extern "C" fn path(one: *const std::ffi::c_char, other: *const std::ffi::c_char, to: *mut u32) -> u32 {
    guard("nvmlInternalGetExportTable[23]", || {
        let mut session = session();
        // SAFETY: `nvidia-smi` passes C strings that NVML gave it, and a valid pointer for the
        // answer.
        unsafe {
            let (one, other) =
                (by_address(&mut session, string(one)?)?, by_address(&mut session, string(other)?)?);
            let (one, other) = (device(&session, one)?, device(&session, other)?);
            // `nvmlGpuTopologyLevel_t` counts in tens.
            out(to, (level(&mut session, one, other)? / 10).saturating_sub(1))
        }
    })
}

/// Reports that `dmon` and `pmon` can watch a device.
unsafe extern "C" fn watched(which: usize, to: *mut u32) -> u32 {
    guard("nvmlInternalGetExportTable[72]", || {
        device(&session(), which)?;
        // SAFETY: `nvidia-smi` passes a valid pointer for the answer.
        unsafe { out(to, 1) }
    })
}

/// Lists the compute processes of a device.
unsafe extern "C" fn processes(which: usize, count: *mut u32, to: *mut Process) -> u32 {
    guard("nvmlInternalGetExportTable[213]", || {
        let mut session = session();
        let device = device(&session, which)?;
        let found = session.device(device)?.processes.clone();
        let make = |p: &gpusession_proto::readings::Process| {
            let text = process_name(&session, p.pid).unwrap_or_default();
            let mut name = [0; 4096];
            let length = text.len().min(name.len() - 1);
            name[..length].copy_from_slice(&text.as_bytes()[..length]);
            Process {
                pid: p.pid,
                used: p.used_bytes,
                unknown: u64::MAX,
                gpu_instance: !0,
                compute_instance: !0,
                name,
            }
        };
        let items = found.iter().map(make).collect();
        // SAFETY: `nvidia-smi` passes a list, and in `count` the number of entries that fit.
        unsafe { list(count, to, items) }
    })
}

/// Lists no processes: a lease has none of MPS or graphics.
unsafe extern "C" fn none(which: usize, count: *mut u32, _to: *mut Process) -> u32 {
    guard("nvmlInternalGetExportTable[214]", || {
        device(&session(), which)?;
        // SAFETY: `nvidia-smi` passes a valid pointer for the number.
        unsafe { out(count, 0) }
    })
}

/// Returns the table that `nvidia-smi` requests; see the module.
///
/// # Safety
/// `to` is null or valid for a pointer, `id` is null or valid for 16 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlInternalGetExportTable(to: *mut usize, id: *const [u8; 16]) -> u32 {
    guard("nvmlInternalGetExportTable", || {
        // SAFETY: the caller keeps the contract above: each pointer is null or valid, and null is
        // checked.
        unsafe {
            if id.is_null() || *id != ID {
                return Err(status::NOT_FOUND);
            }
            out(to, TABLE.as_ptr() as usize)
        }
    })
}
