//! `nvmlInternalGetExportTable`: an undocumented table of functions that `nvidia-smi` uses beside NVML. What is here was learned by
//! watching what Debian's `nvidia-smi` (535, 550) calls, and what it prints for which answer. It looks at a slot before it calls it, and
//! does without the functions that are missing.

use crate::entry::{device, guard, out, string};
use crate::local::{by_address, level};
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
}

static TABLE: [Slot; SLOTS] = {
    let mut table = [Slot { bytes: 0 }; SLOTS];
    table[0] = Slot { bytes: size_of::<[Slot; SLOTS]>() };
    table[23] = Slot { path };
    table[26] = Slot { log };
    table[72] = Slot { watched };
    table
};

/// A line for NVML's log: there is none.
unsafe extern "C" fn log() -> u32 {
    status::SUCCESS
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
