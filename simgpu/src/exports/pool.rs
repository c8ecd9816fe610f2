//! Stream-ordered allocation.

use super::{out, read};
use crate::abi::{Location, PoolProps};
use crate::capture;
use crate::driver::driver;
use crate::errors::{self, INVALID_VALUE, Result};
use crate::export;
use crate::graph::{GraphMemory, NodeKind};
use crate::memory::{Allocation, Kind};
use crate::op::Op;
use crate::registry::{Registry, handle};
use crate::submit;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

struct Pool {
    device: u32,
    default: bool,
    attributes: Mutex<HashMap<u32, u64>>,
    used: AtomicU64,
    high: AtomicU64,
}

static POOLS: Registry<Pool> = Registry::new();
/// The default pool and the current pool of each device.
static DEVICE_POOLS: Mutex<Option<HashMap<u32, DevicePools>>> = Mutex::new(None);

type DevicePools = (Arc<Pool>, Arc<Pool>);

fn new_pool(device: u32, default: bool) -> Arc<Pool> {
    let p = Arc::new(Pool {
        device,
        default,
        attributes: Mutex::new(HashMap::from([(1, 1), (2, 1), (3, 1), (4, 0)])),
        used: AtomicU64::new(0),
        high: AtomicU64::new(0),
    });
    POOLS.insert(p.clone());
    p
}

fn with_device<R>(device: i32, f: impl FnOnce(&mut DevicePools) -> R) -> Result<R> {
    let ordinal = driver()?.device(device)?.ordinal;
    let mut all = DEVICE_POOLS.lock();
    let entry = all.get_or_insert_default().entry(ordinal).or_insert_with(|| {
        let p = new_pool(ordinal, true);
        (p.clone(), p)
    });
    Ok(f(entry))
}

fn pool(h: usize) -> Result<Arc<Pool>> {
    driver()?;
    POOLS.find(h).ok_or(INVALID_VALUE)
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
    let a = driver()?.space.pool(p.device, s.context, bytes as u64, handle(p))?;
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

/// Subtracts an allocation that is being freed from its pool's account.
pub fn forget(a: &Allocation) {
    if let Kind::Pool { pool } = a.kind
        && let Some(p) = POOLS.find(pool)
    {
        p.used.fetch_sub(a.size, Ordering::SeqCst);
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
        let p = pool(h)?;
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
        let p = pool(h)?;
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
        if p.handleTypes != 0 {
            return Err(errors::NOT_SUPPORTED);
        }
        let device = driver()?.device(p.location.id)?.ordinal;
        out(to, handle(&new_pool(device, false)))
    }

    fn cuMemPoolDestroy(h: usize) {
        let p = pool(h)?;
        if p.default {
            return Err(INVALID_VALUE);
        }
        with_device(p.device as i32, |entry| {
            if Arc::ptr_eq(&entry.1, &p) {
                entry.1 = entry.0.clone();
            }
        })?;
        POOLS.remove(h).map(drop)
    }

    fn cuMemPoolTrimTo(h: usize, _keep: usize) { pool(h).map(drop) }

    fn cuMemPoolSetAttribute(h: usize, id: u32, value: *const u8) {
        let p = pool(h)?;
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
        let p = pool(h)?;
        match id {
            1..=3 => out(value.cast::<i32>(), p.attributes.lock()[&id] as i32),
            4 => out(value.cast::<u64>(), p.attributes.lock()[&id]),
            5 | 7 => out(value.cast::<u64>(), p.used.load(Ordering::SeqCst)),
            6 | 8 => out(value.cast::<u64>(), p.high.load(Ordering::SeqCst)),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemPoolSetAccess(h: usize, _list: *const u8, _n: usize) { pool(h).map(drop) }

    fn cuMemPoolGetAccess(flags: *mut u32, h: usize, location: *const Location) {
        let p = pool(h)?;
        let device = on_device(location)?;
        out(flags, if p.device as i32 == device { 3 } else { 0 })
    }

    fn cuMemAllocAsync | cuMemAllocAsync_ptsz (at: *mut u64, bytes: usize, stream: usize) {
        let device = submit::stream(stream, PER_THREAD)?.device;
        let p = with_device(device as i32, |p| p.1.clone())?;
        out(at, allocate(bytes, &p, stream, PER_THREAD)?)
    }

    fn cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz (at: *mut u64, bytes: usize, h: usize, stream: usize) {
        out(at, allocate(bytes, &pool(h)?, stream, PER_THREAD)?)
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
