//! Device memory at the addresses that the client chose.
//!
//! The module `allocations` counts what other calls allocate.

use gpusession_proto::frame::Reader;

use crate::answer::{Answer, Done};
use crate::driver::{Address, Driver, Status, check, status};
use crate::frame::Frame;
use crate::objects::memory::{Allocation, lock};
use crate::session::Session;

/// Granularity of physical allocations, in bytes.
const GRANULE: u64 = 2 << 20;
/// Values of `cuda.h` for memory that the device of a context reads and writes.
///
/// These are `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_LOCATION_TYPE_DEVICE` and
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const PINNED: i32 = 1;
const LOCATION_DEVICE: i32 = 1;
const READ_WRITE: i32 = 3;

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
    // Peers need access for copies between devices and for kernels that follow a peer's pointer.
    // A lease of one GPU has no peers.
    let reach: Vec<_> = session.contexts.reached_by(device).collect();
    map(session.driver, address, size, ordinal, &reach).inspect_err(|_| session.quota.give(device, size))?;
    lock(&memory.allocations).insert(address, Allocation { size, device });
    Ok(())
}

fn map(driver: &Driver, address: Address, size: u64, ordinal: i32, reach: &[i32]) -> Result<(), Status> {
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
            let access = |device: &i32| Access { location: [LOCATION_DEVICE, *device], flags: READ_WRITE };
            let access: Vec<_> = reach.iter().map(access).collect();
            // SAFETY: as above; the driver reads as many descriptors as `access` has.
            check(unsafe {
                (driver.call.cuMemSetAccess)(address, size as usize, access.as_ptr().cast(), access.len())
            })
            // SAFETY: the range was just mapped.
            .inspect_err(|_| unsafe {
                (driver.call.cuMemUnmap)(address, size as usize);
            })
        });
    // An existing mapping keeps the memory; without one, the release frees it.
    // SAFETY: the handle was just created.
    unsafe { (driver.call.cuMemRelease)(handle) };
    mapped
}

/// `FREE`: address, whether its context is destroyed.
///
/// It waits for the device, as `cuMemFree` does, and for the other devices of the lease, which may
/// have the memory mapped.
pub fn free(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let address = r.word()?;
    // Clients of earlier versions do not send this word.
    let gone = r.word().unwrap_or(0) != 0;
    let allocation = *lock(&session.memory.allocations).get(&address).ok_or(status::INVALID_VALUE)?;
    let call = &session.driver.call;
    let mut synced = Ok(());
    if !gone {
        synced = session.contexts.synchronize(session.driver);
        super::flush::flush_results(session, answer);
    }
    // SAFETY: `alloc` mapped the range, and no work that may use it runs any more.
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
