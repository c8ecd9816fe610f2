//! Device memory at the addresses that the client chose, and host memory that the device can see. What other calls allocate
//! is counted in `allocations`.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpusession_proto::frame::{Reader, op};
use gpusession_proto::supervise::DeviceLimit;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::{Answer, Done};
use crate::driver::{Address, Driver, Status, check, status};
use crate::execute::Frame;
use crate::session::Session;

/// Granularity of physical allocations.
const GRANULE: u64 = 2 << 20;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_LOCATION_TYPE_DEVICE`, `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const PINNED: i32 = 1;
const LOCATION_DEVICE: i32 = 1;
const READ_WRITE: i32 = 3;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`
const REGISTER: u32 = 1 | 2;

/// `CUmemAllocationProp`
#[repr(C)]
struct Properties {
    kind: i32,
    handle_types: i32,
    location: [i32; 2],
    security: usize,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`
#[repr(C)]
struct Access {
    location: [i32; 2],
    flags: i32,
}

#[derive(Clone, Copy)]
struct Allocation {
    size: u64,
    device: u32,
}

struct Mirror {
    len: usize,
    shadow: Vec<u8>,
    /// The device whose memory it counts as, if it is managed.
    managed: Option<u32>,
}

/// See the module.
pub struct Memory {
    limits: Vec<u64>,
    window: Mutex<Option<(Address, u64)>>,
    allocations: Mutex<BTreeMap<Address, Allocation>>,
    mirrors: Mutex<BTreeMap<usize, Mirror>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// Nothing allocated; the limits are the lease's.
    pub fn new(devices: &[DeviceLimit]) -> Self {
        Self {
            limits: devices.iter().map(|d| d.memory_bytes).collect(),
            window: Mutex::default(),
            allocations: Mutex::default(),
            mirrors: Mutex::default(),
        }
    }

    /// Reserves the first of the client's windows that the driver grants at that very address.
    pub fn reserve(&self, driver: &Driver, windows: &[Address], size: u64) -> Option<Address> {
        for &wanted in windows {
            let mut got = 0;
            // SAFETY: the out pointer is valid; an address is a hint.
            let reserved =
                unsafe { (driver.call.cuMemAddressReserve)(&mut got, size as usize, 0, wanted, 0) };
            if reserved != 0 {
                continue;
            }
            if got == wanted {
                *lock(&self.window) = Some((got, size));
                return Some(got);
            }
            // SAFETY: what was just reserved, and nobody else knows of.
            unsafe { (driver.call.cuMemAddressFree)(got, size as usize) };
        }
        None
    }
}

/// Sends the client what the device has changed in mapped host memory. Call after the driver has synchronised.
pub fn write_back(session: &Session, out: &mut Vec<u8>) {
    const PAGE: usize = 4096;
    let mut mirrors = lock(&session.memory.mirrors);
    for (&base, mirror) in mirrors.iter_mut() {
        for offset in (0..mirror.len).step_by(PAGE) {
            let len = PAGE.min(mirror.len - offset);
            // SAFETY: inside a mapping of ours; a kernel that still runs may change it, and is looked at again then.
            let now = unsafe { std::slice::from_raw_parts((base + offset) as *const u8, len) };
            let shadow = &mut mirror.shadow[offset..offset + len];
            if now != shadow {
                shadow.copy_from_slice(now);
                session.append(out, op::HOST_CHANGED, 0, 0, |w| {
                    w.word((base + offset) as u64);
                    w.bytes(shadow);
                });
            }
        }
    }
}

/// `ALLOC`: address, size (multiples of 2 MiB), device.
pub fn alloc(session: &Session, r: &mut Reader<'_>) -> Done {
    let (address, size, device) = (r.word()?, r.word()?, r.word()?);
    let memory = &session.memory;
    let inside = lock(&memory.window)
        .is_some_and(|(base, len)| address >= base && size <= len && address - base <= len - size);
    if !inside || size == 0 || !(address | size).is_multiple_of(GRANULE) {
        return Err(status::INVALID_VALUE.into());
    }
    let ordinal = session.contexts.device(device)?;
    let device = device as u32;
    session.quota.take(device, size)?;
    map(session.driver, address, size, ordinal).inspect_err(|_| session.quota.give(device, size))?;
    lock(&memory.allocations).insert(address, Allocation { size, device });
    Ok(())
}

fn map(driver: &Driver, address: Address, size: u64, ordinal: i32) -> Result<(), Status> {
    let location = [LOCATION_DEVICE, ordinal];
    let properties = Properties { kind: PINNED, handle_types: 0, location, security: 0, flags: [0; 8] };
    let mut handle = 0;
    // SAFETY: the structure has cuda.h's layout; the out pointer is valid.
    check(unsafe {
        (driver.call.cuMemCreate)(&mut handle, size as usize, (&raw const properties).cast(), 0)
    })?;
    // SAFETY: the range lies in a window that this worker reserved.
    let mapped =
        check(unsafe { (driver.call.cuMemMap)(address, size as usize, 0, handle, 0) }).and_then(|()| {
            let access = Access { location, flags: READ_WRITE };
            // SAFETY: as above; one descriptor.
            check(unsafe {
                (driver.call.cuMemSetAccess)(address, size as usize, (&raw const access).cast(), 1)
            })
            // SAFETY: just mapped.
            .inspect_err(|_| unsafe {
                (driver.call.cuMemUnmap)(address, size as usize);
            })
        });
    // The mapping, if there is one, keeps the memory; without one it is free again.
    // SAFETY: just created.
    unsafe { (driver.call.cuMemRelease)(handle) };
    mapped
}

/// `FREE`: address. Waits for the device, as `cuMemFree` does.
pub fn free(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let address = r.word()?;
    let allocation = *lock(&session.memory.allocations).get(&address).ok_or(status::INVALID_VALUE)?;
    let call = &session.driver.call;
    // SAFETY: the frame's context is current.
    let synced = check(unsafe { (call.cuCtxSynchronize)() });
    super::settle(session, answer);
    // SAFETY: mapped by `alloc`, and nothing runs on the device any more.
    let unmapped = check(unsafe { (call.cuMemUnmap)(address, allocation.size as usize) });
    if unmapped.is_ok() {
        lock(&session.memory.allocations).remove(&address);
        session.quota.give(allocation.device, allocation.size);
    }
    Ok(synced.and(unmapped)?)
}

/// `MEM_INFO`: answers free and total bytes of the frame's device, within the lease's limit.
pub fn info(session: &Session, frame: &Frame, answer: &mut Answer) -> Done {
    let (_, device) = session.contexts.get(frame.header.ctx.get())?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: the out pointers are valid; the frame's context is current.
    check(unsafe { (session.driver.call.cuMemGetInfo_v2)(&mut free, &mut total) })?;
    answer.word((free as u64).min(session.quota.left(device)));
    answer.word((total as u64).min(session.memory.limits[device as usize]));
    Ok(())
}

/// `MIRROR_HOST`: address, length, whether it is managed memory, which counts as the device's. Maps memory at the client's own
/// address and makes it visible to the device.
pub fn mirror(session: &Session, frame: &Frame, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (address, len, managed) = (r.word()? as usize, r.word()? as usize, r.word()? != 0);
    let (Some(hint), Some(length)) = (NonZeroUsize::new(address), NonZeroUsize::new(len)) else {
        return Err(status::INVALID_VALUE.into());
    };
    let managed = if managed { Some(session.contexts.get(frame.header.ctx.get())?.1) } else { None };
    if let Some(device) = managed {
        session.quota.take(device, len as u64)?;
    }
    let mapped = map_host(session, hint, length);
    match mapped {
        Ok(device) => {
            lock(&session.memory.mirrors).insert(address, Mirror { len, shadow: vec![0; len], managed });
            answer.word(device);
            Ok(())
        }
        Err(error) => {
            if let Some(device) = managed {
                session.quota.give(device, len as u64);
            }
            Err(error.into())
        }
    }
}

/// Maps memory at an address and registers it with the driver; returns the device's address of it.
fn map_host(session: &Session, hint: NonZeroUsize, length: NonZeroUsize) -> Result<Address, Status> {
    let len = length.get();
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED_NOREPLACE;
    // SAFETY: MAP_FIXED_NOREPLACE never replaces a mapping of ours.
    let mapped =
        unsafe { mmap_anonymous(Some(hint), length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags) };
    let mapped = mapped.map_err(|_| status::OUT_OF_MEMORY)?;
    let call = &session.driver.call;
    // SAFETY: just mapped, and unmapped only by `unmirror`.
    let registered = check(unsafe { (call.cuMemHostRegister_v2)(mapped.as_ptr(), len, REGISTER) });
    let mut device = 0;
    let pointer = registered.and_then(|()| {
        // SAFETY: just registered; the out pointer is valid.
        check(unsafe { (call.cuMemHostGetDevicePointer_v2)(&mut device, mapped.as_ptr(), 0) })
    });
    if let Err(error) = pointer {
        // SAFETY: our own mapping.
        let _ = unsafe { munmap(mapped, len) };
        return Err(error);
    }
    Ok(device)
}

/// `UNMIRROR_HOST`: address.
pub fn unmirror(session: &Session, r: &mut Reader<'_>) -> Done {
    let address = r.word()? as usize;
    let mirror = lock(&session.memory.mirrors).remove(&address).ok_or(status::INVALID_VALUE)?;
    // SAFETY: mapped and registered by `mirror`; the client has synchronised before.
    unsafe {
        (session.driver.call.cuMemHostUnregister)(address as *mut _);
        if let Some(pointer) = std::ptr::NonNull::new(address as *mut _) {
            let _ = munmap(pointer, mirror.len);
        }
    }
    if let Some(device) = mirror.managed {
        session.quota.give(device, mirror.len as u64);
    }
    Ok(())
}

/// `WRITE_HOST`: address, bytes: the client's side of mapped host memory has changed.
pub fn write_host(session: &Session, r: &mut Reader<'_>) -> Done {
    let address = r.word()? as usize;
    let bytes = r.bytes()?;
    let mut mirrors = lock(&session.memory.mirrors);
    let (&base, mirror) = mirrors.range_mut(..=address).next_back().ok_or(status::INVALID_VALUE)?;
    let offset = address - base;
    if bytes.len() > mirror.len || offset > mirror.len - bytes.len() {
        return Err(status::INVALID_VALUE.into());
    }
    mirror.shadow[offset..offset + bytes.len()].copy_from_slice(bytes);
    // SAFETY: inside a mapping of ours; the device may read it at the same time, as on a local card.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
    Ok(())
}
