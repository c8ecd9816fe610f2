//! Allocation, host memory, pointer attributes.

use super::{out, out_opt, read, slice};
use crate::arena::GRANULARITY;
use crate::driver::capture::forbid_unsafe;
use crate::driver::context::{CONTEXTS, current, working};
use crate::driver::submit;
use crate::driver::{config, driver};
use crate::errors::{self, INVALID_VALUE, Result};
use crate::export;
use crate::memory::{Allocation, Kind};
use crate::registry::handle;
use std::sync::Arc;

fn host_alloc(bytes: usize, flags: u32) -> Result<Arc<Allocation>> {
    let ctx = working()?;
    forbid_unsafe()?;
    if flags & !0xf != 0 {
        return Err(INVALID_VALUE);
    }
    driver()?.space.host(ctx.device, handle(&ctx), bytes as u64, flags)
}

fn free(at: u64) -> Result {
    if at == 0 {
        driver()?;
        return Ok(());
    }
    submit::not_in_callback()?;
    let space = &driver()?.space;
    let a = space.find(at).filter(|a| a.base == at).ok_or(INVALID_VALUE)?;
    // The memory determines the context; none has to be current.
    let ctx = CONTEXTS.find(a.context).map_or_else(current, Ok)?;
    ctx.life().check()?;
    forbid_unsafe()?;
    if !matches!(a.kind, Kind::Device | Kind::Managed | Kind::Pool { .. }) {
        return Err(INVALID_VALUE);
    }
    ctx.synchronize()?;
    super::pool::forget(&a);
    space.remove(at, |x| x.id == a.id).map(drop).ok_or(INVALID_VALUE)
}

/// Returns flags in the form of `cuMemHostGetFlags`.
fn host_flags(a: &Allocation) -> u32 {
    match a.kind {
        // Under unified addressing all pinned memory is mapped.
        Kind::Host { flags } | Kind::Registered { flags } => flags | 2,
        _ => 0,
    }
}

/// Writes a pointer attribute in the attribute's type; returns `None` for an unknown address.
unsafe fn attribute(to: *mut u8, id: u32, at: u64) -> Result<Option<()>> {
    let Some(a) = driver()?.space.find(at) else { return Ok(None) };
    let host = matches!(a.kind, Kind::Host { .. } | Kind::Registered { .. });
    let managed = matches!(a.kind, Kind::Managed);
    // Mappings have large pages, except those of memory that the program registered.
    let page = if matches!(a.kind, Kind::Registered { .. }) { 4096 } else { GRANULARITY };
    let mapping = (a.base / page * page, a.end().next_multiple_of(page));
    // SAFETY: the program gave room for the attribute's type.
    unsafe {
        match id {
            1 if matches!(a.kind, Kind::Pool { .. } | Kind::Mapped(_)) => out(to.cast(), 0usize)?,
            1 => out(to.cast(), a.context)?,
            2 => out(to.cast(), if host { 1u32 } else { 2 })?,
            3 => out(to.cast(), at)?,
            4 if host || managed => out(to.cast(), at)?,
            4 => {
                out(to.cast(), 0u64)?;
                return Err(INVALID_VALUE);
            }
            5 => return Err(errors::NOT_SUPPORTED),
            6 => out(to.cast(), u32::from(managed || submit::SYNCHRONOUS.lock().contains(&a.id)))?,
            7 => out(to.cast(), a.id)?,
            // The runtime reads these booleans as 32-bit words.
            8 => out(to.cast(), u32::from(managed))?,
            9 => out(to.cast(), a.device as i32)?,
            10 => out(to.cast(), u32::from(matches!(a.kind, Kind::Device) && config().export_memory))?,
            11 => out(to.cast(), a.base)?,
            12 => out(to.cast(), a.size as usize)?,
            13 => out(to.cast(), 1u32)?,
            14 => {
                let types = match &a.kind {
                    // `requestedHandleTypes` of a `CUmemAllocationProp`.
                    Kind::Mapped(physical) => physical.properties[4],
                    _ => 0,
                };
                out(to.cast(), u64::from(types))?;
            }
            15 => out(to.cast(), 0u32)?,
            16 => out(to.cast(), 3u32)?,
            17 => out(to.cast(), if let Kind::Pool { pool, .. } = a.kind { pool } else { 0 })?,
            18 => out(to.cast(), (mapping.1 - mapping.0) as usize)?,
            19 => out(to.cast(), mapping.0)?,
            20 => out(to.cast(), a.id)?,
            21 => out(to.cast(), 0u32)?,
            _ => return Err(INVALID_VALUE),
        }
    }
    Ok(Some(()))
}

/// Writes the attribute that `cuPointerGetAttributes` returns for an unknown address.
unsafe fn absent(to: *mut u8, id: u32, at: u64) -> Result {
    // SAFETY: the program gave room for the attribute's type.
    unsafe {
        match id {
            2 | 6 | 8 | 10 | 13 | 15 | 16 | 21 => out(to.cast(), 0u32),
            9 => out(to.cast(), -2i32),
            4 => out(to.cast(), at),
            1 | 3 | 7 | 14 | 17..=20 => out(to.cast(), 0u64),
            // These attributes stay unchanged.
            11 | 12 => Ok(()),
            _ => Err(INVALID_VALUE),
        }
    }
}

export! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let ctx = working()?;
        let total_bytes = config().memory;
        let used = driver()?.space.used(ctx.device);
        out(free, total_bytes.saturating_sub(used) as usize)?;
        out(total, total_bytes as usize)
    }

    fn cuMemAlloc_v2(at: *mut u64, bytes: usize) {
        let ctx = working()?;
        submit::not_in_callback()?;
        forbid_unsafe()?;
        if at.is_null() {
            return Err(INVALID_VALUE);
        }
        out(at, driver()?.space.device(ctx.device, handle(&ctx), bytes as u64)?.base)
    }

    fn cuMemAllocPitch_v2(at: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) {
        let ctx = working()?;
        forbid_unsafe()?;
        if at.is_null() || pitch.is_null() || width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
            return Err(INVALID_VALUE);
        }
        let row = width.next_multiple_of(512);
        let bytes = row.checked_mul(height).ok_or(errors::OUT_OF_MEMORY)?;
        out(at, driver()?.space.device(ctx.device, handle(&ctx), bytes as u64)?.base)?;
        out(pitch, row)
    }

    fn cuMemFree_v2(at: u64) { free(at) }

    fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, at: u64) {
        current()?;
        let a = driver()?.space.find(at).ok_or(errors::NOT_FOUND)?;
        out_opt(base, a.base);
        out_opt(size, a.size as usize);
        Ok(())
    }

    fn cuMemAllocHost_v2(p: *mut u64, bytes: usize) {
        if bytes == 0 {
            working()?;
            return out(p, 0);
        }
        out(p, host_alloc(bytes, 0)?.base)
    }

    fn cuMemHostAlloc(p: *mut u64, bytes: usize, flags: u32) {
        if bytes == 0 {
            working()?;
            return out(p, 0);
        }
        out(p, host_alloc(bytes, flags)?.base)
    }

    fn cuMemFreeHost(p: u64) {
        if p == 0 {
            return driver().map(drop);
        }
        let ctx = working()?;
        forbid_unsafe()?;
        let space = &driver()?.space;
        space.find(p).filter(|a| a.base == p && matches!(a.kind, Kind::Host { .. })).ok_or(INVALID_VALUE)?;
        ctx.synchronize()?;
        space.remove(p, |a| matches!(a.kind, Kind::Host { .. })).map(drop).ok_or(INVALID_VALUE)
    }

    fn cuMemHostRegister_v2(p: u64, bytes: usize, flags: u32) {
        let ctx = working()?;
        forbid_unsafe()?;
        if p == 0 || bytes == 0 || flags & !0xf != 0 {
            return Err(INVALID_VALUE);
        }
        if flags & 8 != 0 {
            return Err(errors::NOT_SUPPORTED);
        }
        driver()?.space.register(ctx.device, handle(&ctx), p, bytes as u64, flags).map(drop)
    }

    fn cuMemHostUnregister(p: u64) {
        let ctx = working()?;
        forbid_unsafe()?;
        ctx.synchronize()?;
        let space = &driver()?.space;
        if space.find(p).is_some_and(|a| a.base != p && matches!(a.kind, Kind::Registered { .. })) {
            return Err(INVALID_VALUE);
        }
        space
            .remove(p, |a| matches!(a.kind, Kind::Registered { .. }))
            .map(drop)
            .ok_or(errors::HOST_MEMORY_NOT_REGISTERED)
    }

    fn cuMemHostGetDevicePointer_v2(at: *mut u64, p: u64, flags: u32) {
        working()?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let a = driver()?.space.find(p).filter(|a| a.pinned()).ok_or(INVALID_VALUE)?;
        let _ = a;
        out(at, p)
    }

    fn cuMemHostGetFlags(flags: *mut u32, p: u64) {
        working()?;
        let a = driver()?.space.find(p).filter(|a| a.pinned()).ok_or(INVALID_VALUE)?;
        out(flags, host_flags(&a))
    }

    fn cuMemAllocManaged(at: *mut u64, bytes: usize, flags: u32) {
        let ctx = working()?;
        forbid_unsafe()?;
        if at.is_null() || !matches!(flags, 1 | 2 | 4) {
            return Err(INVALID_VALUE);
        }
        out(at, driver()?.space.managed(ctx.device, handle(&ctx), bytes as u64)?.base)
    }

    fn cuPointerGetAttribute(to: *mut u8, id: u32, at: u64) {
        driver()?;
        attribute(to, id, at)?.ok_or(INVALID_VALUE)
    }

    fn cuPointerGetAttributes(n: u32, ids: *const u32, to: *const *mut u8, at: u64) {
        driver()?;
        let (ids, to) = (slice(ids, n as usize)?, slice(to, n as usize)?);
        for (id, to) in ids.iter().zip(to) {
            match attribute(*to, *id, at) {
                Ok(Some(())) => {}
                // Attributes that do not apply yield zero instead of an error.
                Ok(None) => absent(*to, *id, at)?,
                Err(_) => absent(*to, *id, 0)?,
            }
        }
        Ok(())
    }

    fn cuPointerSetAttribute(value: *const u32, id: u32, at: u64) {
        current()?;
        let a = driver()?.space.find(at).filter(|_| id == 6).ok_or(INVALID_VALUE)?;
        let mut synchronous = submit::SYNCHRONOUS.lock();
        if read(value)? == 0 {
            synchronous.remove(&a.id);
        } else {
            synchronous.insert(a.id);
        }
        Ok(())
    }

    fn cuMemAdvise(at: u64, bytes: usize, _advice: u32, _device: i32) { advise(at, bytes) }
    fn cuMemAdvise_v2(at: u64, bytes: usize, _advice: u32, _location: u64) { advise(at, bytes) }

    fn cuMemPrefetchAsync | cuMemPrefetchAsync_ptsz (at: u64, bytes: usize, _device: i32, stream: usize) {
        prefetch(at, bytes, stream, PER_THREAD)
    }

    fn cuMemPrefetchAsync_v2 | cuMemPrefetchAsync_v2_ptsz (at: u64, bytes: usize, _location: u64, _flags: u32, stream: usize) {
        prefetch(at, bytes, stream, PER_THREAD)
    }

    fn cuMemRangeGetAttribute(to: *mut u8, size: usize, id: u32, at: u64, bytes: usize) {
        current()?;
        managed(at, bytes)?;
        match (id, size) {
            (1, 4) => out(to.cast(), 0i32),
            (2 | 4, 4) => out(to.cast(), -2i32),
            _ => Err(INVALID_VALUE),
        }
    }
}

fn managed(at: u64, bytes: usize) -> Result {
    let a = driver()?.space.find(at).ok_or(INVALID_VALUE)?;
    if bytes == 0 || at + bytes as u64 > a.end() || !matches!(a.kind, Kind::Managed) {
        return Err(INVALID_VALUE);
    }
    Ok(())
}

fn advise(at: u64, bytes: usize) -> Result {
    working()?;
    managed(at, bytes)
}

fn prefetch(at: u64, bytes: usize, stream: usize, per_thread: bool) -> Result {
    working()?;
    managed(at, bytes)?;
    if !config().concurrent_managed {
        return Err(errors::INVALID_DEVICE);
    }
    submit::submit(&submit::stream(stream, per_thread)?, crate::driver::op::Op::Empty).map(drop)
}
