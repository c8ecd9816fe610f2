//! The private tables that NVIDIA's runtime libraries ask the driver for.
//!
//! Only a handful of their functions are ever called; the others answer "not supported".

use crate::context::{CONTEXTS, top};
use crate::driver::{config, driver};
use crate::errors::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Result};
use crate::exports::{guard, out};
use crate::md2::hmac_md2;
use crate::module::Module;
use crate::registry::handle;
use std::sync::{Arc, LazyLock};

type Id = [u8; 16];

const CUDART_INTERFACE: Id = 0x6bd5fb6c5bf4e74a8987d93912fd9df9u128.to_be_bytes();
const RUNTIME_CALLBACK_HOOKS: Id = 0xa094798c2e742e7493f20800200c0a66u128.to_be_bytes();
const TOOLS_TLS: Id = 0x42d85a8123f6cb478298f6e78a3aecdcu128.to_be_bytes();
const CONTEXT_LOCAL_STORAGE: Id = 0xc693336e1121df11a8c368f355d89593u128.to_be_bytes();
const CONTEXT_CHECKS: Id = 0x263e88607cd2614392f6bbd5006dfa7eu128.to_be_bytes();
const INTEGRITY_CHECK: Id = 0xd4082055bde6704b8d34ba123c66e1f2u128.to_be_bytes();
const TOOLS_CONTEXT: Id = 0x21318c60971432488ca641ff7324c8f2u128.to_be_bytes();
const TPC_TOPOLOGY: Id = 0x1734dc26800d47458726c0f1e7dd8bcau128.to_be_bytes();

/// A table: pointers, the first of which is its size in bytes for all but one.
type Table = Box<[usize]>;

fn sized(slots: usize, filled: &[(usize, usize)]) -> Table {
    let mut t = vec![unsupported as *const () as usize; slots];
    t[0] = slots * size_of::<usize>();
    for (slot, f) in filled {
        t[*slot] = *f;
    }
    t.into()
}

struct Tables {
    cudart: Table,
    hooks: Table,
    tls: Table,
    storage: Table,
    checks: Table,
    integrity: Table,
    context: Table,
    topology: Table,
}

static TABLES: LazyLock<Tables> = LazyLock::new(|| Tables {
    cudart: sized(
        13,
        &[
            (1, cudart_load as *const () as usize),
            (2, cudart_primary as *const () as usize),
            (6, cudart_load_more as *const () as usize),
            (7, nothing as *const () as usize),
            (8, cudart_load_fatbin as *const () as usize),
            (10, 0),
            (12, nothing as *const () as usize),
        ],
    ),
    hooks: sized(
        7,
        &[
            (1, nothing as *const () as usize),
            (2, hooks_large as *const () as usize),
            (3, nothing as *const () as usize),
            (4, nothing as *const () as usize),
            (5, nothing as *const () as usize),
            (6, hooks_small as *const () as usize),
        ],
    ),
    tls: sized(3, &[(2, tls_current as *const () as usize)]),
    storage: Box::new([
        storage_put as *const () as usize,
        storage_delete as *const () as usize,
        storage_get as *const () as usize,
        0,
    ]),
    checks: sized(15, &[(2, check_context as *const () as usize), (3, nothing as *const () as usize)]),
    integrity: sized(3, &[(1, integrity_check as *const () as usize)]),
    context: sized(93, &[(4, context_id as *const () as usize)]),
    topology: sized(
        17,
        &[(4, topology_get as *const () as usize), (13, topology_free as *const () as usize)],
    ),
});

/// The table of an id, if it exists here.
pub fn find(id: &Id) -> Option<*const usize> {
    let t = &*TABLES;
    let table = match *id {
        CUDART_INTERFACE => &t.cudart,
        RUNTIME_CALLBACK_HOOKS => &t.hooks,
        TOOLS_TLS => &t.tls,
        CONTEXT_LOCAL_STORAGE => &t.storage,
        CONTEXT_CHECKS => &t.checks,
        INTEGRITY_CHECK => &t.integrity,
        TOOLS_CONTEXT => &t.context,
        TPC_TOPOLOGY => &t.topology,
        _ => return None,
    };
    Some(table.as_ptr())
}

extern "C" fn unsupported() -> u32 {
    801
}

extern "C" fn nothing() -> u32 {
    0
}

unsafe extern "C" fn cudart_primary(ctx: *mut usize, device: i32) -> u32 {
    // The handle is the one that retaining gives later; nothing is activated.
    guard("CudartInterface[2]", || {
        let h = handle(&driver()?.device(device)?.primary);
        // SAFETY: the runtime vouches for its pointer.
        unsafe { out(ctx, h) }
    })
}

unsafe fn load(module: *mut usize, image: *const u8) -> Result {
    let ctx = crate::context::working()?;
    // SAFETY: the runtime gives a complete image and a place for the handle.
    unsafe {
        let content = crate::module::compile_at(image).map_err(|e| e.0)?;
        out(module, handle(&Module::new(&ctx, Arc::new(content), None)?))
    }
}

unsafe extern "C" fn cudart_load(module: *mut usize, image: *const u8) -> u32 {
    // SAFETY: as for `load`.
    guard("CudartInterface[1]", || unsafe { load(module, image) })
}

unsafe extern "C" fn cudart_load_more(
    module: *mut usize,
    image: *const u8,
    _a: usize,
    _b: usize,
    _c: u32,
) -> u32 {
    // SAFETY: as for `load`.
    guard("CudartInterface[6]", || unsafe { load(module, image) })
}

unsafe extern "C" fn cudart_load_fatbin(
    image: *const u8,
    module: *mut usize,
    _a: usize,
    _b: usize,
    _c: u32,
) -> u32 {
    // SAFETY: as for `load`.
    guard("CudartInterface[8]", || unsafe { load(module, image) })
}

/// Zeroed memory in which a tool would say that it listens; nobody does.
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
        crate::exports::out_opt(buffer, at);
        crate::exports::out_opt(n, size);
    }
    at
}

unsafe extern "C" fn tls_current(ctx: *mut usize) -> u32 {
    guard("ToolsTls[2]", || {
        let h = top()?.map_or(0, |c| handle(&c));
        // SAFETY: the caller vouches for its pointer.
        unsafe { out(ctx, h) }
    })
}

unsafe extern "C" fn context_id(ctx: usize, id: *mut u64) -> u32 {
    guard("ToolsContext[4]", || {
        let value = CONTEXTS.find(ctx).map_or(0, |c| c.id);
        // SAFETY: the caller vouches for its pointer.
        unsafe { out(id, value) }
    })
}

fn storage_context(ctx: usize) -> Result<Arc<crate::context::Context>> {
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

unsafe extern "C" fn check_context(_ctx: usize, result: *mut u32, _more: *mut usize) -> u32 {
    // SAFETY: the runtime vouches for its pointer.
    guard("ContextChecks[2]", || unsafe { out(result, 0) })
}

/// The key of the compatibility check.
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
                m.extend((TABLES.cudart.as_ptr() as usize).to_ne_bytes());
                m.extend((TABLES.integrity.as_ptr() as usize).to_ne_bytes());
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

/// One byte per pair of multiprocessors: its place in its cluster, and the cluster's number.
unsafe extern "C" fn topology_get(places: *mut *mut u8, clusters: *mut *mut u8) -> u32 {
    guard("TpcTopology[4]", || {
        crate::context::current()?;
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

unsafe extern "C" fn topology_free(a: *mut u8, b: *mut u8) -> u32 {
    // SAFETY: both come from `topology_get`.
    unsafe {
        libc::free(a.cast());
        libc::free(b.cast());
    }
    0
}

/// What `cuGetExportTable` answers for a table that is not there.
pub const MISSING: crate::errors::Error = NOT_FOUND;
