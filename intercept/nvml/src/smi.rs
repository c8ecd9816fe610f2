//! `nvmlInternalGetExportTable`: an undocumented table of functions that `nvidia-smi` uses beside NVML. What is here was learned by
//! watching what `nvidia-smi` (535, 550, 580) calls, and what it prints for which answer. It looks at a slot before it calls it, and
//! does without the functions that are missing.

use crate::entry::{device, guard, list, out, string};
use crate::local::{by_address, level, process_name};
use crate::session::session;
use crate::status;

/// The table that `nvidia-smi` asks for.
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

/// A process as `nvidia-smi` lists it.
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

/// A line for NVML's log: there is none.
unsafe extern "C" fn log() -> u32 {
    status::SUCCESS
}

/// What 580 sets the persistence mode with: the card belongs to its server.
unsafe extern "C" fn refused() -> u32 {
    status::NO_PERMISSION
}

/// How two devices, named by their PCI addresses, are connected: 0 one PCIe switch, then several, a host bridge, a NUMA node, the system.
unsafe extern "C" fn path(one: *const std::ffi::c_char, other: *const std::ffi::c_char, to: *mut u32) -> u32 {
    guard("nvmlInternalGetExportTable[23]", || {
        let mut session = session();
        // SAFETY: `nvidia-smi` passes the addresses that it was given, and a place for the answer.
        unsafe {
            let (one, other) =
                (by_address(&mut session, string(one)?)?, by_address(&mut session, string(other)?)?);
            let (one, other) = (device(&session, one)?, device(&session, other)?);
            // `nvmlGpuTopologyLevel_t` counts in tens.
            out(to, (level(&mut session, one, other)? / 10).saturating_sub(1))
        }
    })
}

/// Whether `dmon` and `pmon` can watch a device.
unsafe extern "C" fn watched(which: usize, to: *mut u32) -> u32 {
    guard("nvmlInternalGetExportTable[72]", || {
        device(&session(), which)?;
        // SAFETY: `nvidia-smi` passes a place for the answer.
        unsafe { out(to, 1) }
    })
}

/// Compute processes of a device.
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
        // SAFETY: `nvidia-smi` passes a list and how many it has room for.
        unsafe { list(count, to, items) }
    })
}

/// Processes of other kinds, of which a lease has none: MPS, graphics.
unsafe extern "C" fn none(which: usize, count: *mut u32, _to: *mut Process) -> u32 {
    guard("nvmlInternalGetExportTable[214]", || {
        device(&session(), which)?;
        // SAFETY: `nvidia-smi` passes a place for the number.
        unsafe { out(count, 0) }
    })
}

/// See the module.
///
/// # Safety
/// `to` is null or good for a pointer, `id` is null or good for 16 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlInternalGetExportTable(to: *mut usize, id: *const [u8; 16]) -> u32 {
    guard("nvmlInternalGetExportTable", || {
        // SAFETY: the program vouches for its pointers.
        unsafe {
            if id.is_null() || *id != ID {
                return Err(status::NOT_FOUND);
            }
            out(to, TABLE.as_ptr() as usize)
        }
    })
}
