//! Virtual memory management.

use super::{out, read, slice};
use crate::abi::{AccessDesc, AllocationProp, Location};
use crate::arena::GRANULARITY;
use crate::driver::context::working;
use crate::driver::{config, driver};
use crate::errors::{self, INVALID_VALUE, Result};
use crate::export;
use crate::memory::{Kind, Physical};
use crate::registry::Registry;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

static PHYSICAL: Registry<Physical> = Registry::new();

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub const POSIX_FD: u32 = 1;

fn device_of(location: Location) -> Result<u32> {
    if location.kind != 1 {
        return Err(INVALID_VALUE);
    }
    Ok(driver()?.device(location.id)?.ordinal)
}

fn checked(p: &AllocationProp) -> Result<u32> {
    if p.kind != 1 {
        return Err(INVALID_VALUE);
    }
    if p.requestedHandleTypes != 0 && !(p.requestedHandleTypes == 1 && config().export_memory) {
        return Err(errors::NOT_SUPPORTED);
    }
    device_of(p.location)
}

export! {
    fn cuMemAddressReserve(at: *mut u64, size: usize, align: usize, hint: u64, flags: u64) {
        driver()?;
        let size = size as u64;
        if at.is_null() || size == 0 || !size.is_multiple_of(GRANULARITY) || flags != 0 || (align != 0 && !align.is_power_of_two()) {
            return Err(INVALID_VALUE);
        }
        out(at, driver()?.space.reserve(size, align as u64, hint)?)
    }

    fn cuMemAddressFree(at: u64, size: usize) {
        driver()?.space.unreserve(at, size as u64)
    }

    fn cuMemCreate(handle: *mut usize, size: usize, prop: *const AllocationProp, flags: u64) {
        let p = read(prop)?;
        let device = checked(&p)?;
        if handle.is_null() || size == 0 || !(size as u64).is_multiple_of(GRANULARITY) || flags != 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the structure is 32 bytes of plain data.
        let raw = std::mem::transmute::<AllocationProp, [u8; 32]>(p);
        let physical = driver()?.space.create(device, size as u64, raw, p.requestedHandleTypes != 0)?;
        out(handle, PHYSICAL.insert(physical))
    }

    fn cuMemRelease(handle: usize) {
        driver()?;
        let p = PHYSICAL.find(handle).ok_or(INVALID_VALUE)?;
        if p.references.fetch_sub(1, Ordering::SeqCst) == 1 {
            PHYSICAL.remove(handle)?;
        }
        Ok(())
    }

    fn cuMemMap(at: u64, size: usize, offset: usize, handle: usize, flags: u64) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let p = PHYSICAL.find(handle).ok_or(INVALID_VALUE)?;
        driver()?.space.map(at, size as u64, offset as u64, p)
    }

    fn cuMemUnmap(at: u64, size: usize) {
        let d = driver()?;
        if let Some(ctx) = crate::driver::context::top()? {
            ctx.synchronize()?;
        }
        d.space.unmap(at, size as u64)
    }

    fn cuMemSetAccess(at: u64, size: usize, list: *const AccessDesc, n: usize) {
        let d = driver()?;
        for desc in slice(list, n)? {
            let device = device_of(desc.location)?;
            if !matches!(desc.flags, 0 | 1 | 3) {
                return Err(INVALID_VALUE);
            }
            if device != d.space.find(at).ok_or(INVALID_VALUE)?.device && !d.config.peers {
                return Err(INVALID_VALUE);
            }
            d.space.set_access(at, size as u64, device, desc.flags != 0)?;
        }
        Ok(())
    }

    fn cuMemGetAccess(flags: *mut u64, location: *const Location, at: u64) {
        let device = device_of(read(location)?)?;
        let a = driver()?.space.find(at).ok_or(INVALID_VALUE)?;
        let allowed = match a.kind {
            Kind::Mapped(_) => a.access.load(Ordering::SeqCst) >> device & 1 == 1,
            _ => a.device == device,
        };
        out(flags, if allowed { 3 } else { 0 })
    }

    fn cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const AllocationProp, option: u32) {
        checked(&read(prop)?)?;
        if option > 1 {
            return Err(INVALID_VALUE);
        }
        out(granularity, GRANULARITY as usize)
    }

    fn cuMemGetAllocationPropertiesFromHandle(prop: *mut AllocationProp, handle: usize) {
        let p = PHYSICAL.find(handle).ok_or(INVALID_VALUE)?;
        // SAFETY: the bytes came from such a structure.
        out(prop, std::mem::transmute::<[u8; 32], AllocationProp>(p.properties))
    }

    fn cuMemRetainAllocationHandle(handle: *mut usize, at: u64) {
        let a = driver()?.space.find(at).ok_or(INVALID_VALUE)?;
        let Kind::Mapped(p) = &a.kind else { return Err(INVALID_VALUE) };
        let known = PHYSICAL.find(Arc::as_ptr(p) as usize).is_some();
        if known {
            p.references.fetch_add(1, Ordering::SeqCst);
        } else {
            p.references.store(1, Ordering::SeqCst);
            PHYSICAL.insert(p.clone());
        }
        out(handle, Arc::as_ptr(p) as usize)
    }

    fn cuMemExportToShareableHandle(to: *mut i32, handle: usize, kind: u32, flags: u64) {
        driver()?;
        let p = PHYSICAL.find(handle).ok_or(INVALID_VALUE)?;
        let file = p.file.as_ref().filter(|_| kind == POSIX_FD && flags == 0 && !to.is_null()).ok_or(INVALID_VALUE)?;
        let copy = file.try_clone().map_err(|_| errors::OPERATING_SYSTEM)?;
        out(to, copy.into_raw_fd())
    }

    fn cuMemImportFromShareableHandle(handle: *mut usize, from: usize, kind: u32) {
        working()?;
        if kind != POSIX_FD || handle.is_null() {
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
        let file = std::fs::File::from_raw_fd(fd);
        let properties = |device: u32| {
            let location = Location { kind: 1, id: device as i32 };
            let prop = AllocationProp { kind: 1, requestedHandleTypes: 0, location, win32: 0, flags: [0; 8] };
            // SAFETY: the structure is 32 bytes of plain data.
            unsafe { std::mem::transmute::<AllocationProp, [u8; 32]>(prop) }
        };
        out(handle, PHYSICAL.insert(driver()?.space.import(file, properties)?))
    }
}
