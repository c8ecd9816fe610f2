//! The private tables that NVIDIA's runtime libraries ask the driver for.
//!
//! Only a few of their functions are ever called; the others return "not supported".
//! `proto/calls/tables.txt` lists the tables, and the functions of this module behind their slots.

use crate::driver::context::{CONTEXTS, top};
use crate::driver::module::Module;
use crate::driver::{config, driver};
use crate::entry::{guard, out, out_opt};
use crate::errors::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Result};
use crate::registry::handle;
use std::sync::Arc;

use gpusession_common::md2::hmac_md2;

type Slot = *const ();

struct Slots<const N: usize>([Slot; N]);

// SAFETY: addresses of functions and a size, never written.
unsafe impl<const N: usize> Sync for Slots<N> {}

macro_rules! unknown {
    ($slot:literal, $table:literal) => {
        unsupported as Slot
    };
}

mod generated {
    use super::*;
    include!(concat!(env!("OUT_DIR"), "/export_tables.rs"));
}

/// Returns the table of an id, if it is simulated.
pub fn find(id: &[u8; 16]) -> Option<*const usize> {
    let id = u128::from_be_bytes(*id);
    let table = generated::find(id);
    if table.is_none() && config().trace {
        let known = generated::REFUSED.iter().find(|(known, _)| *known == id);
        eprintln!("simgpu: no private table {id:032x} {}", known.map_or("(unknown)", |(_, name)| name));
    }
    table.map(<*const Slot>::cast)
}

extern "C" fn unsupported() -> u32 {
    801
}

extern "C" fn nothing() -> u32 {
    0
}

unsafe extern "C" fn cudart_primary(ctx: *mut usize, device: i32) -> u32 {
    // Returns the handle that retaining yields later, without activating the context.
    guard("CudartInterface[2]", || {
        let h = handle(&driver()?.device(device)?.primary);
        // SAFETY: the runtime vouches for its pointer.
        unsafe { out(ctx, h) }
    })
}

unsafe fn load(module: *mut usize, image: *const u8) -> Result {
    let ctx = crate::driver::context::working()?;
    // SAFETY: the runtime gives a complete image and a place for the handle.
    unsafe {
        let content = crate::driver::module::compile_at(image).map_err(|e| e.0)?;
        out(module, handle(&Module::new(&ctx, Arc::new(content), None)?))
    }
}

unsafe extern "C" fn cudart_load(module: *mut usize, image: *const u8) -> u32 {
    // SAFETY: as for `load`.
    guard("CudartInterface[1]", || unsafe { load(module, image) })
}

unsafe extern "C" fn cudart_load_wrapper(
    module: *mut usize,
    image: *const u8,
    _a: usize,
    _b: usize,
    _c: u32,
) -> u32 {
    // SAFETY: as for `load`.
    guard("CudartInterface[6]", || unsafe { load(module, image) })
}

unsafe extern "C" fn cudart_load_header(
    image: *const u8,
    module: *mut usize,
    _a: usize,
    _b: usize,
    _c: u32,
) -> u32 {
    // SAFETY: as for `load`.
    guard("CudartInterface[8]", || unsafe { load(module, image) })
}

/// Zeroed memory in which a profiling tool would register; no tool does.
static QUIET: [u64; 2048] = [0; 2048];

unsafe extern "C" fn hooks_large(buffer: *mut usize, n: *mut usize) -> usize {
    // SAFETY: the runtime vouches for its pointers.
    unsafe { hooks(buffer, n, 0x400, 0) }
}

unsafe extern "C" fn hooks_small(buffer: *mut usize, n: *mut usize) -> usize {
    // SAFETY: the runtime vouches for its pointers.
    unsafe { hooks(buffer, n, 0xe, 1024) }
}

unsafe fn hooks(buffer: *mut usize, n: *mut usize, size: usize, offset: usize) -> usize {
    let at = (&raw const QUIET[offset]) as usize;
    // SAFETY: the runtime vouches for its pointers.
    unsafe {
        out_opt(buffer, at);
        out_opt(n, size);
    }
    at
}

unsafe extern "C" fn tls_context(ctx: *mut usize) -> u32 {
    guard("ToolsTls[2]", || {
        let h = top()?.map_or(0, |c| handle(&c));
        // SAFETY: the caller vouches for its pointer.
        unsafe { out(ctx, h) }
    })
}

unsafe extern "C" fn tools_context_id(ctx: usize, id: *mut u64) -> u32 {
    guard("ToolsContext[4]", || {
        let value = CONTEXTS.find(ctx).map_or(0, |c| c.id);
        // SAFETY: the caller vouches for its pointer.
        unsafe { out(id, value) }
    })
}

fn storage_context(ctx: usize) -> Result<Arc<crate::driver::context::Context>> {
    driver()?;
    if ctx == 0 || ctx == usize::MAX {
        top()?.ok_or(INVALID_CONTEXT)
    } else {
        CONTEXTS.find(ctx).ok_or(INVALID_CONTEXT)
    }
}

unsafe extern "C" fn storage_put(
    ctx: usize,
    key: usize,
    value: usize,
    destroy: Option<unsafe extern "C" fn(usize, usize, usize)>,
) -> u32 {
    guard("ContextLocalStorage[0]", || {
        storage_context(ctx)?.state.lock().storage.insert(key, (value, destroy));
        Ok(())
    })
}

unsafe extern "C" fn storage_delete(ctx: usize, key: usize) -> u32 {
    guard("ContextLocalStorage[1]", || {
        storage_context(ctx)?.state.lock().storage.remove(&key).map(drop).ok_or(INVALID_HANDLE)
    })
}

unsafe extern "C" fn storage_get(value: *mut usize, ctx: usize, key: usize) -> u32 {
    let found = || -> Result<usize> {
        let ctx = storage_context(ctx)?;
        let state = ctx.state.lock();
        state.storage.get(&key).map(|v| v.0).ok_or(INVALID_HANDLE)
    };
    match found() {
        // SAFETY: the runtime vouches for its pointer.
        Ok(v) => guard("ContextLocalStorage[2]", || unsafe { out(value, v) }),
        Err(e) => e.0,
    }
}

unsafe extern "C" fn checks_flags(_ctx: usize, result: *mut u32, _more: *mut usize) -> u32 {
    // SAFETY: the runtime vouches for its pointer.
    guard("ContextChecks[2]", || unsafe { out(result, 0) })
}

/// Key of the compatibility check's HMAC.
const KEY: [u8; 16] = 0x146addae53a9a752aa0841360bf55a9fu128.to_be_bytes();

unsafe extern "C" fn integrity_check(version: u32, time: u64, result: *mut [u64; 2]) -> u32 {
    guard("IntegrityCheck[1]", || {
        let answer = match version % 10 {
            0 => [0x3341_181C_03CB_675C, 0x8ED3_83AA_1F4C_D1E8],
            1 => [0x1841_181C_03CB_675C, 0x8ED3_83AA_1F4C_D1E8],
            _ => {
                let mut m = Vec::new();
                m.extend(config().driver_version.to_ne_bytes());
                m.extend(version.to_ne_bytes());
                m.extend(std::process::id().to_ne_bytes());
                // SAFETY: pthread_self has no preconditions.
                m.extend((unsafe { libc::pthread_self() } as u32).to_ne_bytes());
                m.extend((generated::CUDART_INTERFACE.0.as_ptr() as usize).to_ne_bytes());
                m.extend((generated::INTEGRITY_CHECK.0.as_ptr() as usize).to_ne_bytes());
                m.extend((integrity_check as *const () as usize).to_ne_bytes());
                m.extend(time.to_ne_bytes());
                for d in &driver()?.devices {
                    m.extend(d.uuid);
                    for id in [50, 33, 34] {
                        m.extend(d.attribute(id).unwrap_or(0).to_ne_bytes());
                    }
                }
                let h = hmac_md2(&KEY, &m);
                let half =
                    |r: std::ops::Range<usize>| u64::from_ne_bytes(h[r].try_into().unwrap_or_default());
                [half(0..8), half(8..16)]
            }
        };
        // SAFETY: the runtime vouches for its pointer.
        unsafe { out(result, answer) }
    })
}

/// Returns two arrays with one byte per pair of multiprocessors: its index in its cluster, and the
/// cluster's number.
unsafe extern "C" fn tpc_get(places: *mut *mut u8, clusters: *mut *mut u8) -> u32 {
    guard("TpcTopology[4]", || {
        crate::driver::context::current()?;
        let n = (config().sms as usize / 2).max(1);
        // SAFETY: the buffers are as long as the loop; the caller vouches for its pointers.
        unsafe {
            let (a, b) = (libc::malloc(n).cast::<u8>(), libc::malloc(n).cast::<u8>());
            if a.is_null() || b.is_null() || places.is_null() || clusters.is_null() {
                return Err(INVALID_VALUE);
            }
            for i in 0..n {
                a.add(i).write((i % 4) as u8);
                b.add(i).write((i / 4) as u8);
            }
            places.write(a);
            clusters.write(b);
        }
        Ok(())
    })
}

unsafe extern "C" fn tpc_free(a: *mut u8, b: *mut u8) -> u32 {
    // SAFETY: both come from `tpc_get`.
    unsafe {
        libc::free(a.cast());
        libc::free(b.cast());
    }
    0
}

/// Result of `cuGetExportTable` for an unknown table.
pub const MISSING: crate::errors::Error = NOT_FOUND;
