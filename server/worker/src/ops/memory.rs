//! Device memory at the addresses that the client chose.
//!
//! The module `allocations` counts what other calls allocate.

use gpusession_proto::frame::Reader;

use crate::answer::{Answer, Done, Failure, bounded};
use crate::driver::{Address, Driver, POSIX_FD, Status, check, status};
use crate::frame::Frame;
use crate::objects::known::Kind;
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
    within_window(session, address, size)?;
    let ordinal = session.contexts.device(device)?;
    let device = device as u32;
    session.quota.take(device, size)?;
    // Peers need access for copies between devices and for kernels that follow a peer's pointer.
    // A lease of one GPU has no peers.
    let reach: Vec<_> = session.contexts.reached_by(device).collect();
    let handle_types =
        if session.contexts.exports(device) && session.shares.possible().is_ok() { POSIX_FD } else { 0 };
    create(session.driver, size, ordinal, handle_types)
        .and_then(|handle| map(session.driver, address, size, handle, &reach))
        .inspect_err(|_| session.quota.give(device, size))?;
    let allocation = Allocation { size, device, share: None, imported: None };
    lock(&session.memory.allocations).insert(address, allocation);
    Ok(())
}

/// Returns an error unless a range consists of whole granules of the client's window.
pub fn within_window(session: &Session, address: Address, size: u64) -> Result<(), Status> {
    let inside = lock(&session.memory.window)
        .is_some_and(|(base, len)| address >= base && size <= len && address - base <= len - size);
    let whole = size > 0 && (address | size).is_multiple_of(GRANULE);
    if inside && whole { Ok(()) } else { Err(status::INVALID_VALUE) }
}

/// Creates physical memory on a device and returns its handle.
fn create(driver: &Driver, size: u64, ordinal: i32, handle_types: i32) -> Result<u64, Status> {
    let location = [LOCATION_DEVICE, ordinal];
    let properties = Properties { kind: PINNED, handle_types, location, security: 0, flags: [0; 8] };
    let mut handle = 0;
    // SAFETY: the structure has cuda.h's layout; the out pointer is valid.
    check(unsafe {
        (driver.call.cuMemCreate)(&mut handle, size as usize, (&raw const properties).cast(), 0)
    })?;
    Ok(handle)
}

/// Maps physical memory for the devices `reach`, and releases its handle.
pub fn map(driver: &Driver, address: Address, size: u64, handle: u64, reach: &[i32]) -> Result<(), Status> {
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
    // SAFETY: the caller has just got the handle, and passes it on.
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
        let changes = session.activity.changes();
        synced = super::settle::all(session);
        super::flush::flush_results(session, answer);
        // A program that frees much managed memory compares all that is left once.
        if let (Ok(()), Some(changes)) = (synced, changes) {
            session.mirrors.compared(changes);
        }
    }
    if let Some(share) = allocation.share {
        // From here on no other process gets the memory.
        session.shares.moved(&mut session.shares.exports(), share, None);
    }
    // SAFETY: `alloc` mapped the range, and no work that may use it runs any more.
    let unmapped = check(unsafe { (call.cuMemUnmap)(address, allocation.size as usize) });
    if unmapped.is_ok() {
        let removed = lock(&session.memory.allocations).remove(&address);
        // Another thread of the program may have shared it meanwhile.
        if let Some(share) = removed.and_then(|removed| removed.share) {
            session.shares.moved(&mut session.shares.exports(), share, None);
        }
        match allocation.imported {
            Some(object) => session.shares.dropped(&mut session.shares.exports(), object),
            None => session.quota.give(allocation.device, allocation.size),
        }
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

/// Operations in one question about atomics, and parts of arrays in one frame, at most.
const MAX_PARTS: usize = 1024;

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap_or_default())).collect()
}

/// `PEER_ATOMICS`: source, target, operations (4 bytes each); answers 4 bytes for each operation.
pub fn peer_atomics(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (source, target) = (session.contexts.device(r.word()?)?, session.contexts.device(r.word()?)?);
    let bytes = r.bytes()?;
    let operations: Vec<i32> =
        bytes.chunks_exact(4).map(|w| i32::from_le_bytes(w.try_into().unwrap_or_default())).collect();
    let count = bounded(operations.len() as u64, MAX_PARTS)?;
    let mut capabilities = vec![0u32; count];
    // SAFETY: both arrays have `count` elements.
    check(unsafe {
        (session.driver.call.cuDeviceGetP2PAtomicCapabilities)(
            capabilities.as_mut_ptr(),
            operations.as_ptr(),
            count as u32,
            source,
            target,
        )
    })?;
    answer.bytes(&capabilities.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<_>>());
    Ok(())
}

/// Bytes of a `CUarrayMapInfo`, and of a `CUmemDecompressParams`.
const MAP_INFO: usize = 96;
/// Word of a `CUarrayMapInfo` with the bit of its device.
const DEVICES: usize = 10;
/// Words of it with the kind of the array, which precedes the array, and with the memory.
const RESOURCE: usize = 0;
const MEMORY: usize = 8;
const DECOMPRESSION: usize = 64;

/// Reads whole structures of `size` bytes, at most [`MAX_PARTS`].
fn structures(r: &mut Reader<'_>, size: usize) -> Result<(Vec<u64>, usize), Failure> {
    let bytes = r.bytes()?;
    let count = bounded((bytes.len() / size) as u64, MAX_PARTS)?;
    if bytes.len() != count * size {
        return Err(status::INVALID_VALUE.into());
    }
    Ok((words(bytes), count))
}

/// `MAP_ARRAYS`: stream, structures.
pub fn map_arrays(session: &Session, r: &mut Reader<'_>) -> Done {
    let stream = session.stream(r.word()?)?;
    let (mut list, count) = structures(r, MAP_INFO)?;
    for part in list.chunks_exact_mut(MAP_INFO / 8) {
        let mask = part[DEVICES] as u32;
        let ordinal = session.contexts.device(u64::from(mask.trailing_zeros()))?;
        // CU_RESOURCE_TYPE_ARRAY and CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
        let kind = if part[RESOURCE] as u32 == 0 { Kind::Array } else { Kind::Mipmap };
        session.known.check(kind, part[RESOURCE + 1])?;
        session.known.check(Kind::Memory, part[MEMORY])?;
        part[DEVICES] ^= u64::from(mask ^ 1u32.checked_shl(ordinal as u32).unwrap_or(0));
    }
    // SAFETY: the list has `count` structures of cuda.h's layout.
    Ok(check(unsafe {
        (session.driver.call.cuMemMapArrayAsync)(list.as_mut_ptr().cast(), count as u32, stream)
    })?)
}

/// `DECOMPRESS`: stream, flags, structures; a failure answers the index of the wrong structure.
pub fn decompress(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (stream, flags) = (session.stream(r.word()?)?, r.word()? as u32);
    let (mut list, count) = structures(r, DECOMPRESSION)?;
    let mut index = 0;
    // SAFETY: the list has `count` structures of cuda.h's layout; the out pointer is valid.
    let done = check(unsafe {
        (session.driver.call.cuMemBatchDecompressAsync)(
            list.as_mut_ptr().cast(),
            count,
            flags,
            &mut index,
            stream,
        )
    });
    answer.word(index as u64);
    Ok(done?)
}
