//! Stream-ordered allocation.

use super::vmm::POSIX_FD;
use super::{out, read, slice};
use crate::abi::{AccessDesc, Location, PoolProps};
use crate::driver::capture;
use crate::driver::context::working;
use crate::driver::graph::{GraphMemory, NodeKind};
use crate::driver::op::Op;
use crate::driver::submit;
use crate::driver::{config, driver};
use crate::errors::{self, INVALID_VALUE, Result};
use crate::export;
use crate::memory::{Allocation, Kind};
use crate::registry::{Registry, handle};
use crate::shared_pool::{ExportData, SharedPool};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

struct Pool {
    device: u32,
    default: bool,
    attributes: Mutex<HashMap<u32, u64>>,
    used: AtomicU64,
    high: AtomicU64,
    /// One bit for each further device with access to its memory.
    access: AtomicU64,
    /// Its file, if other processes may import it, or if it is another process's.
    shared: Option<Arc<SharedPool>>,
    /// Whether the program has exported it, before which no pointer can be exported.
    exported: AtomicBool,
}

impl Pool {
    fn imported(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.imported)
    }
}

static POOLS: Registry<Pool> = Registry::new();
/// The default pool and the current pool of each device.
static DEVICE_POOLS: Mutex<Option<HashMap<u32, DevicePools>>> = Mutex::new(None);

type DevicePools = (Arc<Pool>, Arc<Pool>);

/// Imported addresses by pool file and place in it; one free ends all imports of an address.
static IMPORTED: Mutex<Option<HashMap<(u64, u64), u64>>> = Mutex::new(None);

fn new_pool(device: u32, default: bool, shared: Option<Arc<SharedPool>>) -> Arc<Pool> {
    let p = Arc::new(Pool {
        device,
        default,
        attributes: Mutex::new(HashMap::from([(1, 1), (2, 1), (3, 1), (4, 0)])),
        used: AtomicU64::new(0),
        high: AtomicU64::new(0),
        access: AtomicU64::new(0),
        shared,
        exported: AtomicBool::new(false),
    });
    POOLS.insert(p.clone());
    p
}

fn with_device<R>(device: i32, f: impl FnOnce(&mut DevicePools) -> R) -> Result<R> {
    let ordinal = driver()?.device(device)?.ordinal;
    let mut all = DEVICE_POOLS.lock();
    let entry = all.get_or_insert_default().entry(ordinal).or_insert_with(|| {
        let p = new_pool(ordinal, true, None);
        (p.clone(), p)
    });
    Ok(f(entry))
}

fn pool(h: usize) -> Result<Arc<Pool>> {
    driver()?;
    POOLS.find(h).ok_or(INVALID_VALUE)
}

/// Returns a pool of this process: others have no attributes and allocate nothing.
fn own_pool(h: usize) -> Result<Arc<Pool>> {
    pool(h).and_then(|p| if p.imported() { Err(INVALID_VALUE) } else { Ok(p) })
}

fn allocate(bytes: usize, p: &Arc<Pool>, stream: usize, per_thread: bool) -> Result<u64> {
    submit::not_in_callback()?;
    let s = submit::stream(stream, per_thread)?;
    s.life.check()?;
    if bytes == 0 {
        return Ok(0);
    }
    let in_capture = capture::capturing(&s);
    if !in_capture {
        capture::forbid_unsafe()?;
    }
    let a = driver()?.space.pool(p.device, s.context, bytes as u64, handle(p), p.shared.as_ref())?;
    reach(p)?;
    if in_capture {
        let base = a.base;
        capture::capture_node(&s, NodeKind::Alloc(GraphMemory::new(a)))?;
        return Ok(base);
    }
    let used = p.used.fetch_add(a.size, Ordering::SeqCst) + a.size;
    p.high.fetch_max(used, Ordering::SeqCst);
    submit::submit(&s, Op::Empty)?;
    Ok(a.base)
}

/// Subtracts an allocation that is being freed from its pool's account, and ends its imports.
pub fn forget(a: &Allocation) {
    end_imports(a);
    if let Kind::Pool { pool, .. } = a.kind
        && let Some(p) = POOLS.find(pool)
        && !p.imported()
    {
        p.used.fetch_sub(a.size, Ordering::SeqCst);
    }
}

/// Gives new memory of a pool to the devices that have access to the pool.
fn reach(p: &Arc<Pool>) -> Result {
    let devices = p.access.load(Ordering::SeqCst);
    if devices != 0 {
        driver()?.space.set_pool_access(handle(p), devices);
    }
    Ok(())
}

/// Ends all imports of an address.
fn end_imports(a: &Allocation) {
    IMPORTED.lock().get_or_insert_default().retain(|_, base| *base != a.base);
}

/// Returns `true` if memory of this pool is imported.
fn has_imports(p: &Pool) -> bool {
    let number = p.shared.as_ref().filter(|shared| shared.imported).map(|shared| shared.number);
    let mut imported = IMPORTED.lock();
    let imported = imported.get_or_insert_default();
    // A context ends with memory that was imported in it.
    imported.retain(|_, base| driver().is_ok_and(|driver| driver.space.find(*base).is_some()));
    imported.keys().any(|(file, _)| Some(*file) == number)
}

/// Imports the memory that data of another process describes, once.
fn import_pointer(h: usize, data: &ExportData) -> Result<u64> {
    let ctx = working()?;
    let p = pool(h)?;
    let shared = p.shared.as_ref().filter(|shared| shared.imported).ok_or(INVALID_VALUE)?;
    let part = shared.find(data).ok_or(INVALID_VALUE)?;
    let space = &driver()?.space;
    let mut imported = IMPORTED.lock();
    let imported = imported.get_or_insert_default();
    // A context ends with memory that was imported in it.
    imported.retain(|_, base| space.find(*base).is_some());
    match imported.entry((shared.number, part.at)) {
        Entry::Occupied(known) => Ok(*known.get()),
        Entry::Vacant(new) => {
            let a = space.pool_part(p.device, handle(&ctx), h, shared, part)?;
            reach(&p)?;
            Ok(*new.insert(a.base))
        }
    }
}

fn on_device(location: *const Location) -> Result<i32> {
    // SAFETY: the program vouches for its pointer.
    let l = unsafe { read(location)? };
    if l.kind == 1 { Ok(l.id) } else { Err(INVALID_VALUE) }
}

export! {
    fn cuDeviceGetDefaultMemPool(to: *mut usize, device: i32) {
        out(to, with_device(device, |p| handle(&p.0))?)
    }

    fn cuDeviceGetMemPool(to: *mut usize, device: i32) {
        out(to, with_device(device, |p| handle(&p.1))?)
    }

    fn cuDeviceSetMemPool(device: i32, h: usize) {
        let p = own_pool(h)?;
        if p.device as i32 != device {
            return Err(INVALID_VALUE);
        }
        with_device(device, |entry| entry.1 = p)
    }

    fn cuMemGetDefaultMemPool(to: *mut usize, location: *const Location, _kind: u32) {
        out(to, with_device(on_device(location)?, |p| handle(&p.0))?)
    }

    fn cuMemGetMemPool(to: *mut usize, location: *const Location, _kind: u32) {
        out(to, with_device(on_device(location)?, |p| handle(&p.1))?)
    }

    fn cuMemSetMemPool(location: *const Location, _kind: u32, h: usize) {
        let p = own_pool(h)?;
        if p.device as i32 != on_device(location)? {
            return Err(INVALID_VALUE);
        }
        with_device(p.device as i32, |entry| entry.1 = p)
    }

    fn cuMemPoolCreate(to: *mut usize, props: *const PoolProps) {
        if props.is_null() || to.is_null() {
            return Err(INVALID_VALUE);
        }
        let p = &*props;
        if p.allocType != 1 || p.location.kind != 1 {
            return Err(INVALID_VALUE);
        }
        if p.handleTypes != 0 && !(p.handleTypes == POSIX_FD && config().export_memory) {
            return Err(errors::NOT_SUPPORTED);
        }
        let device = driver()?.device(p.location.id)?;
        let shared = if p.handleTypes == 0 { None } else { Some(SharedPool::create(device.card)?) };
        out(to, handle(&new_pool(device.ordinal, false, shared)))
    }

    fn cuMemPoolDestroy(h: usize) {
        let p = pool(h)?;
        if p.default || has_imports(&p) {
            return Err(INVALID_VALUE);
        }
        with_device(p.device as i32, |entry| {
            if Arc::ptr_eq(&entry.1, &p) {
                entry.1 = entry.0.clone();
            }
        })?;
        POOLS.remove(h).map(drop)
    }

    fn cuMemPoolTrimTo(h: usize, _keep: usize) { own_pool(h).map(drop) }

    fn cuMemPoolSetAttribute(h: usize, id: u32, value: *const u8) {
        let p = own_pool(h)?;
        match id {
            1..=3 => {
                p.attributes.lock().insert(id, read(value.cast::<u32>())? as u64);
            }
            4 => {
                p.attributes.lock().insert(id, read(value.cast::<u64>())?);
            }
            // High-water marks may only be reset.
            6 | 8 if read(value.cast::<u64>())? == 0 => p.high.store(p.used.load(Ordering::SeqCst), Ordering::SeqCst),
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    fn cuMemPoolGetAttribute(h: usize, id: u32, value: *mut u8) {
        let p = own_pool(h)?;
        match id {
            1..=3 => out(value.cast::<i32>(), p.attributes.lock()[&id] as i32),
            4 => out(value.cast::<u64>(), p.attributes.lock()[&id]),
            5 | 7 => out(value.cast::<u64>(), p.used.load(Ordering::SeqCst)),
            6 | 8 => out(value.cast::<u64>(), p.high.load(Ordering::SeqCst)),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemPoolSetAccess(h: usize, list: *const AccessDesc, n: usize) {
        let p = pool(h)?;
        for desc in slice(list, n)? {
            let device = driver()?.device(on_device(&raw const desc.location)?)?.ordinal;
            if desc.flags == 0 {
                // A pool's own device keeps its access.
                if device == p.device {
                    return Err(INVALID_VALUE);
                }
                p.access.fetch_and(!(1 << device), Ordering::SeqCst);
            } else if device != p.device {
                if !config().peers {
                    return Err(INVALID_VALUE);
                }
                p.access.fetch_or(1 << device, Ordering::SeqCst);
            }
        }
        driver()?.space.set_pool_access(h, p.access.load(Ordering::SeqCst));
        Ok(())
    }

    fn cuMemPoolGetAccess(flags: *mut u32, h: usize, location: *const Location) {
        let p = pool(h)?;
        let device = driver()?.device(on_device(location)?)?.ordinal;
        let reached = p.device == device || p.access.load(Ordering::SeqCst) >> device & 1 == 1;
        out(flags, if reached { 3 } else { 0 })
    }

    fn cuMemPoolExportToShareableHandle(to: *mut i32, h: usize, kind: u32, flags: u64) {
        let p = own_pool(h)?;
        let shared = p.shared.as_ref().filter(|_| kind == POSIX_FD && flags == 0 && !to.is_null());
        let descriptor = shared.ok_or(INVALID_VALUE)?.descriptor()?;
        p.exported.store(true, Ordering::SeqCst);
        out(to, descriptor.into_raw_fd())
    }

    fn cuMemPoolImportFromShareableHandle(to: *mut usize, from: usize, kind: u32, flags: u64) {
        working()?;
        if kind != POSIX_FD || flags != 0 || to.is_null() {
            return Err(INVALID_VALUE);
        }
        if !config().export_memory {
            return Err(errors::NOT_SUPPORTED);
        }
        // SAFETY: an invalid descriptor only makes the call fail.
        let fd = libc::fcntl(from as i32, libc::F_DUPFD_CLOEXEC, 3);
        if fd < 0 {
            return Err(errors::UNKNOWN);
        }
        // SAFETY: the descriptor was just created.
        let (shared, card) = SharedPool::import(std::fs::File::from_raw_fd(fd))?;
        let device = driver()?.space.device_of(card).ok_or(errors::UNKNOWN)?;
        out(to, handle(&new_pool(device, false, Some(shared))))
    }

    fn cuMemPoolExportPointer(to: *mut ExportData, at: u64) {
        let a = driver()?.space.find(at).filter(|a| a.base == at).ok_or(INVALID_VALUE)?;
        let Kind::Pool { pool, part: Some(part) } = a.kind else { return Err(INVALID_VALUE) };
        // The pool may be destroyed before its memory.
        let p = POOLS.find(pool).filter(|p| !p.imported()).ok_or(INVALID_VALUE)?;
        if !p.exported.load(Ordering::SeqCst) {
            return Err(INVALID_VALUE);
        }
        out(to, p.shared.as_ref().ok_or(INVALID_VALUE)?.data(part))
    }

    fn cuMemPoolImportPointer(to: *mut u64, h: usize, data: *const ExportData) {
        if to.is_null() {
            return Err(INVALID_VALUE);
        }
        out(to, import_pointer(h, &read(data)?)?)
    }

    fn cuMemAllocAsync | cuMemAllocAsync_ptsz (at: *mut u64, bytes: usize, stream: usize) {
        let device = submit::stream(stream, PER_THREAD)?.device;
        let p = with_device(device as i32, |p| p.1.clone())?;
        out(at, allocate(bytes, &p, stream, PER_THREAD)?)
    }

    fn cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz (at: *mut u64, bytes: usize, h: usize, stream: usize) {
        out(at, allocate(bytes, &own_pool(h)?, stream, PER_THREAD)?)
    }

    fn cuMemFreeAsync | cuMemFreeAsync_ptsz (at: u64, stream: usize) {
        let s = submit::stream(stream, PER_THREAD)?;
        s.life.check()?;
        let in_capture = capture::capturing(&s);
        if !in_capture {
            capture::forbid_unsafe()?;
        }
        if at == 0 {
            return Ok(());
        }
        let a = driver()?.space.find(at).filter(|a| a.base == at).ok_or(INVALID_VALUE)?;
        if !matches!(a.kind, Kind::Pool { .. } | Kind::Device) {
            return Err(INVALID_VALUE);
        }
        if in_capture {
            return capture::capture_node(&s, NodeKind::Free(at)).map(drop);
        }
        if let Some(memory) = GraphMemory::find(at) {
            if !memory.live.swap(false, Ordering::SeqCst) {
                return Err(INVALID_VALUE);
            }
            return submit::submit(&s, Op::Empty).map(drop);
        }
        if a.freed.swap(true, Ordering::SeqCst) {
            return Err(INVALID_VALUE);
        }
        forget(&a);
        submit::submit(&s, Op::Free(at)).map(drop)
    }
}
