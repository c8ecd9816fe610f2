//! Private tables of functions that NVIDIA's runtime and libraries request (`cuGetExportTable`).
//!
//! All of their functions work inside the process; their meaning is known from several open-source
//! drivers. `proto/calls/tables.txt` lists the tables, and the function of this module behind each
//! slot.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use gpusession_common::md2::hmac_md2;
use gpusession_proto::handle;

use crate::clients;
use crate::compile_cache::{compile_close, compile_find, compile_free, compile_open, compile_store};
use crate::entry::{INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, give, guard};
use crate::streams::{self, Default};
use crate::{core_dumps, modules, thread, trace};

/// Address of a function, or a table's size in bytes in slot 0.
type Slot = *const ();

/// Table of `N` slots.
struct Slots<const N: usize>([Slot; N]);

// SAFETY: the slots hold addresses of functions and a size, and no code writes them.
unsafe impl<const N: usize> Sync for Slots<N> {}

/// Makes a slot without implementation: it returns NOT_SUPPORTED and is counted under its name.
macro_rules! unknown {
    ($slot:literal, $table:literal) => {{
        extern "C" fn slot() -> i32 {
            trace::missing(concat!("slot ", $slot, " of the private table ", $table));
            NOT_SUPPORTED
        }
        slot as Slot
    }};
}

mod generated {
    use super::*;
    include!(concat!(env!("OUT_DIR"), "/private_tables.rs"));
}

/// Finds a table by its id, and counts a refused or unknown one.
pub fn find(id: &[u8; 16]) -> Option<*const c_void> {
    let id = u128::from_be_bytes(*id);
    let table = generated::find(id);
    if table.is_none() {
        let name =
            generated::REFUSED.iter().find(|(known, _)| *known == id).map_or("(unknown)", |(_, name)| name);
        trace::missing(format!("private table {id:032x} {name}"));
    }
    table.map(<*const Slot>::cast)
}

extern "C" fn nothing() -> i32 {
    0
}

// --- Loading of modules by runtimes before CUDA 12, and the primary context before its first
// retain.

extern "C" fn cudart_load(module: *mut *mut c_void, image: *const c_void) -> i32 {
    guard("cuModuleLoadData", || modules::load_data(module, image))
}

extern "C" fn cudart_load_wrapper(
    module: *mut *mut c_void,
    image: *const c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: u32,
) -> i32 {
    guard("cuModuleLoadData", || modules::load_data(module, image))
}

extern "C" fn cudart_load_header(
    image: *const c_void,
    module: *mut *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: u32,
) -> i32 {
    guard("cuModuleLoadData", || modules::load_data(module, image))
}

extern "C" fn cudart_primary(ctx: *mut *mut c_void, device: i32) -> i32 {
    guard("cudart_primary", || {
        let (client, device) = clients::device(device)?;
        core_dumps::before_context(client, device.primary_flags.load(Ordering::Relaxed));
        give(ctx, client.primary(device.local) as *mut c_void)
    })
}

// --- The functions of a module, one by one: cuFFT finds its callbacks with them.

/// Calls `visit(data, function, module)` for each function; returns their number.
extern "C" fn tools_functions(
    _ctx: *mut c_void,
    module: *mut c_void,
    visit: Option<extern "C" fn(*mut c_void, *mut c_void, u64)>,
    data: *mut c_void,
) -> u64 {
    let mut functions = Vec::new();
    guard("tools_functions", || {
        functions = modules::functions_of(module as u64)?;
        Ok(())
    });
    if let Some(visit) = visit {
        functions.iter().for_each(|function| visit(data, *function as *mut c_void, module as u64));
    }
    functions.len() as u64
}

// --- Flags of tools that subscribed to the runtime: always zero, because no tool subscribes.

static HOOKS: [[u8; 8192]; 2] = [[0; 8192]; 2];

extern "C" fn hooks_large(buffer: *mut *const c_void, size: *mut usize) -> *const c_void {
    hooks_buffer(buffer, size, 0, 0x400)
}

extern "C" fn hooks_small(buffer: *mut *const c_void, size: *mut usize) -> *const c_void {
    hooks_buffer(buffer, size, 1, 0xe)
}

fn hooks_buffer(buffer: *mut *const c_void, size: *mut usize, which: usize, count: usize) -> *const c_void {
    let address: *const c_void = HOOKS[which].as_ptr().cast();
    crate::entry::give_optional(buffer, address);
    crate::entry::give_optional(size, count);
    address
}

extern "C" fn tls_context(ctx: *mut *mut c_void) -> i32 {
    guard("tls_context", || give(ctx, thread::current() as *mut c_void))
}

// --- Values that libraries keep per context. Nearly every runtime call reads one, so each thread
// remembers recent answers.

type Destructor = Option<unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void)>;

#[derive(Clone, Copy)]
struct Stored {
    value: usize,
    destructor: Destructor,
}

static STORAGE: Mutex<Option<HashMap<(u64, usize), Stored>>> = Mutex::new(None);
/// Changes with each stored or deleted value, which invalidates the threads' remembered answers.
static EPOCH: AtomicU64 = AtomicU64::new(1);

const REMEMBERED: usize = 16;

/// Epoch of a thread's remembered answers, then context, key and value of each.
type Recent = (u64, [(u64, usize, usize); REMEMBERED]);

thread_local! {
    static RECENT: RefCell<Recent> = const { RefCell::new((0, [(0, 0, 0); REMEMBERED])) };
}

/// Returns the context that a library names; null and -1 mean the current one.
fn storage_context(ctx: *mut c_void) -> Result<u64, i32> {
    match ctx as u64 {
        0 | u64::MAX => thread::context(),
        ctx => Ok(ctx),
    }
}

extern "C" fn storage_put(
    ctx: *mut c_void,
    key: *mut c_void,
    value: *mut c_void,
    destructor: Destructor,
) -> i32 {
    guard("storage_put", || {
        let ctx = storage_context(ctx)?;
        let mut storage = STORAGE.lock().unwrap_or_else(PoisonError::into_inner);
        storage
            .get_or_insert_default()
            .insert((ctx, key as usize), Stored { value: value as usize, destructor });
        EPOCH.fetch_add(1, Ordering::Release);
        Ok(())
    })
}

extern "C" fn storage_delete(ctx: *mut c_void, key: *mut c_void) -> i32 {
    guard("storage_delete", || {
        let ctx = storage_context(ctx)?;
        let mut storage = STORAGE.lock().unwrap_or_else(PoisonError::into_inner);
        storage.get_or_insert_default().remove(&(ctx, key as usize));
        EPOCH.fetch_add(1, Ordering::Release);
        Ok(())
    })
}

extern "C" fn storage_get(value: *mut *mut c_void, ctx: *mut c_void, key: *mut c_void) -> i32 {
    guard("storage_get", || {
        let ctx = storage_context(ctx)?;
        let key = key as usize;
        let place = (key >> 4 ^ ctx as usize) % REMEMBERED;
        let epoch = EPOCH.load(Ordering::Acquire);
        let remembered = RECENT
            .try_with(|recent| {
                let recent = recent.borrow();
                let (c, k, v) = recent.1[place];
                (recent.0 == epoch && c == ctx && k == key).then_some(v)
            })
            .ok()
            .flatten();
        let found = match remembered {
            Some(found) => found,
            None => {
                let storage = STORAGE.lock().unwrap_or_else(PoisonError::into_inner);
                let stored = storage.as_ref().and_then(|s| s.get(&(ctx, key)).copied());
                drop(storage);
                let found = stored.ok_or(INVALID_HANDLE)?.value;
                let _ = RECENT.try_with(|recent| {
                    let mut recent = recent.borrow_mut();
                    if recent.0 != epoch {
                        *recent = (epoch, [(0, 0, 0); REMEMBERED]);
                    }
                    recent.1[place] = (ctx, key, found);
                });
                found
            }
        };
        give(value, found as *mut c_void)
    })
}

/// Removes a destroyed context's values, and calls their libraries' destructors.
pub fn forget_context(ctx: u64) {
    let mut gone = Vec::new();
    {
        let mut storage = STORAGE.lock().unwrap_or_else(PoisonError::into_inner);
        storage.get_or_insert_default().retain(|(c, key), stored| {
            if *c == ctx {
                gone.push((*key, *stored));
            }
            *c != ctx
        });
        EPOCH.fetch_add(1, Ordering::Release);
    }
    for (key, stored) in gone {
        if let Some(destructor) = stored.destructor {
            // SAFETY: the library passed this function together with this value, to be called once
            // when the context ends; the value is already out of the table.
            unsafe { destructor(ctx as *mut c_void, key as *mut c_void, stored.value as *mut c_void) };
        }
    }
}

// --- Properties of a context.

extern "C" fn checks_flags(_ctx: *mut c_void, flags: *mut u32, _: *mut *mut c_void) -> i32 {
    guard("checks_flags", || give(flags, 0))
}

/// Returns a unique number for a context, 1 for the first one.
pub fn context_id(ctx: u64) -> u64 {
    (u64::from(handle::server(ctx)) << 32 | u64::from(handle::slot(ctx))) + 1
}

extern "C" fn tools_context_id(ctx: *mut c_void, out: *mut u64) -> i32 {
    guard("tools_context_id", || give(out, if ctx.is_null() { 0 } else { context_id(ctx as u64) }))
}

// --- The driver's own handle and number of a stream: cuBLAS needs them for its triangular solver,
// hence cuSOLVER, too.

/// Returns the driver's own handle of a stream; for the default streams that is their reserved
/// handle.
extern "C" fn tools_stream(
    _ctx: *mut c_void,
    stream: *mut c_void,
    out: *mut *mut c_void,
    per_thread: i32,
) -> i32 {
    guard("tools_stream", || {
        let (default, its_handle) = match per_thread {
            0 => (Default::Legacy, streams::LEGACY),
            _ => (Default::PerThread, streams::PER_THREAD),
        };
        streams::find(stream, default)?;
        give(out, if stream.is_null() { its_handle as *mut c_void } else { stream })
    })
}

extern "C" fn tools_stream_id(_ctx: *mut c_void, stream: *mut c_void, out: *mut u64) -> i32 {
    guard("tools_stream_id", || {
        if stream.is_null() {
            return Err(INVALID_VALUE);
        }
        give(out, streams::find(stream, Default::Legacy)?.1.id)
    })
}

// --- Positions of the multiprocessors, which cublasLt requests on Hopper.

extern "C" fn tpc_get(in_gpc: *mut *mut u8, gpc: *mut *mut u8) -> i32 {
    guard("tpc_get", || {
        clients::get()?;
        let (_, device) = clients::of_context(thread::context()?)?;
        let (first, second) = device.tpcs.split_at(device.tpcs.len() / 2);
        if first.is_empty() {
            return Err(NOT_SUPPORTED);
        }
        give(in_gpc, copy_out(first)?)?;
        give(gpc, copy_out(second)?)
    })
}

/// Returns a copy that the caller frees with `tpc_free`.
fn copy_out(bytes: &[u8]) -> Result<*mut u8, i32> {
    // SAFETY: `malloc` has returned at least `bytes.len()` bytes, which nothing else uses.
    unsafe {
        let target = libc::malloc(bytes.len()).cast::<u8>();
        if target.is_null() {
            return Err(crate::entry::OUT_OF_MEMORY);
        }
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        Ok(target)
    }
}

extern "C" fn tpc_free(in_gpc: *mut u8, gpc: *mut u8) -> i32 {
    // SAFETY: both pointers come from `malloc` in `copy_out`, and the caller frees them once.
    unsafe {
        libc::free(in_gpc.cast());
        libc::free(gpc.cast());
    }
    0
}

// --- The handshake between NVIDIA's runtime and its driver: both compute the same digest of shared
// facts.

const KEY: [u8; 16] = 0x146addae_53a9a752_aa084136_0bf55a9f_u128.to_be_bytes();

extern "C" fn integrity_check(version: u32, time: u64, result: *mut [u64; 2]) -> i32 {
    guard("integrity_check", || {
        const FIRST: [u64; 2] = [0x3341_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8];
        const SECOND: [u64; 2] = [0x1841_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8];
        if result.is_null() {
            return Err(INVALID_VALUE);
        }
        match version % 10 {
            0 => give(result, FIRST),
            1 => give(result, SECOND),
            _ => give(result, digest(version, time)?),
        }
    })
}

fn digest(version: u32, time: u64) -> Result<[u64; 2], i32> {
    const PCI_BUS: usize = 33;
    const PCI_DEVICE: usize = 34;
    const PCI_DOMAIN: usize = 50;
    let devices = clients::devices()?;
    // SAFETY: both functions have no preconditions; they only read facts about the process and the
    // calling thread.
    let (pid, this) = unsafe { (libc::getpid(), libc::pthread_self()) };
    let mut message = Vec::with_capacity(48 + 28 * devices.len());
    message.extend_from_slice(&(clients::driver_version() as u32).to_ne_bytes());
    message.extend_from_slice(&version.to_ne_bytes());
    message.extend_from_slice(&pid.to_ne_bytes());
    message.extend_from_slice(&(this as u32).to_ne_bytes());
    let tables = [generated::CUDART_INTERFACE.0.as_ptr(), generated::INTEGRITY_CHECK.0.as_ptr()];
    for pointer in [tables[0] as usize, tables[1] as usize, integrity_check as Slot as usize] {
        message.extend_from_slice(&pointer.to_ne_bytes());
    }
    message.extend_from_slice(&time.to_ne_bytes());
    for device in devices {
        message.extend_from_slice(&device.uuid);
        for attribute in [PCI_DOMAIN, PCI_BUS, PCI_DEVICE] {
            message.extend_from_slice(&device.attribute(attribute).to_ne_bytes());
        }
    }
    let digest = hmac_md2(&KEY, &message);
    let half = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| digest[at + i]));
    Ok([half(0), half(8)])
}

#[cfg(test)]
mod tests {
    use super::*;

    static ENDED: Mutex<Vec<(usize, usize, usize)>> = Mutex::new(Vec::new());

    unsafe extern "C" fn ended(ctx: *mut c_void, key: *mut c_void, value: *mut c_void) {
        ENDED.lock().unwrap().push((ctx as usize, key as usize, value as usize));
    }

    fn stored(ctx: usize, key: usize) -> Result<usize, i32> {
        let mut value = std::ptr::null_mut();
        match storage_get(&mut value, ctx as *mut c_void, key as *mut c_void) {
            0 => Ok(value as usize),
            status => Err(status),
        }
    }

    fn put(ctx: usize, key: usize, value: usize, destructor: Destructor) {
        assert_eq!(storage_put(ctx as *mut c_void, key as *mut c_void, value as *mut c_void, destructor), 0);
    }

    #[test]
    fn library_finds_its_latest_value_of_each_context() {
        let key = 1;
        put(0x51, key, 10, None);
        put(0x52, 1, 20, None);
        assert_eq!((stored(0x51, 1), stored(0x52, 1)), (Ok(10), Ok(20)));
        put(0x51, 1, 11, None);
        assert_eq!(stored(0x51, 1), Ok(11), "no remembered answer");
        // The same place among the remembered answers.
        put(0x51, 1 + (REMEMBERED << 4), 30, None);
        assert_eq!((stored(0x51, 1 + (REMEMBERED << 4)), stored(0x51, 1)), (Ok(30), Ok(11)));
        assert_eq!(storage_delete(0x51 as *mut c_void, std::ptr::without_provenance_mut(key)), 0);
        assert_eq!((stored(0x51, 1), stored(0x52, 1)), (Err(INVALID_HANDLE), Ok(20)));
    }

    #[test]
    fn destroyed_context_gives_each_value_to_its_destructor_once() {
        put(0x61, 1, 10, Some(ended));
        put(0x61, 2, 20, None);
        put(0x62, 1, 30, Some(ended));
        assert_eq!(stored(0x61, 1), Ok(10));
        forget_context(0x61);
        forget_context(0x61);
        assert_eq!(*ENDED.lock().unwrap(), [(0x61, 1, 10)]);
        assert_eq!(stored(0x61, 1), Err(INVALID_HANDLE), "no remembered answer");
        assert_eq!(stored(0x62, 1), Ok(30));
    }

    #[test]
    fn current_context_is_meant_without_a_name() {
        assert_eq!(storage_context(std::ptr::null_mut()), Err(crate::entry::INVALID_CONTEXT));
        let current = |ctx: u64| thread::within(0x71, || storage_context(ctx as *mut c_void));
        assert_eq!((current(0), current(u64::MAX), current(0x72)), (Ok(0x71), Ok(0x71), Ok(0x72)));
    }

    #[test]
    fn ids_of_contexts_differ_between_clients() {
        let id = |server, slot| context_id(handle::make(handle::CTX, server, 1, slot));
        assert_eq!(id(0, 0), 1);
        assert_ne!(id(0, 1), id(1, 0));
        assert_ne!(id(1, 0), id(0, 0));
    }
}
