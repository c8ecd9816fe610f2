//! Virtual memory: reserved addresses, and physical memory that the program maps there itself.

use std::ffi::c_void;

use gpusession_proto::frame::{Writer, op};

use crate::client::{Client, string, word};
use crate::entry::{INVALID_VALUE, NOT_SUPPORTED, Result, UNKNOWN, bytes, driver, give, give_optional};
use crate::ranges::{self, Kind, Range};
use crate::streams::find;
use crate::window::GRANULE;
use crate::{clients, objects, route};

/// Words of a `CUarrayMapInfo`, and of a `CUmemDecompressParams`.
const MAP_INFO: usize = 12;
const DECOMPRESSION: usize = 8;
/// Bytes of a `CUmemAccessDesc`: kind and number of the location, flags.
const ACCESS: usize = 12;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
const READ_AND_WRITE: u32 = 3;
/// Structures of one call at most.
const MAX_PARTS: usize = 1024;

/// Returns the structures of a list.
fn structures<const WORDS: usize>(list: *const [u64; WORDS], count: usize) -> Result<Vec<[u64; WORDS]>> {
    if list.is_null() || !(1..=MAX_PARTS).contains(&count) {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the list is not null, so by the call's contract it has `count` structures.
    Ok((0..count).map(|i| unsafe { list.add(i).read_unaligned() }).collect())
}

fn write<const WORDS: usize>(list: &[[u64; WORDS]], w: &mut Writer<'_>) {
    w.bytes(&list.iter().flatten().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>());
}

driver! {
    fn cuMemMapArrayAsync / cuMemMapArrayAsync_ptsz [default] (
        list: *const [u64; MAP_INFO], count: u32, stream: *mut c_void,
    ) {
        const ARRAY: usize = 1;
        const MEMORY: usize = 8;
        const DEVICES: usize = 10;
        let mut list = structures(list, count as usize)?;
        let (client, stream) = find(stream, default)?;
        stream.usable()?;
        for part in &mut list {
            for at in [ARRAY, MEMORY] {
                // A part that is unmapped names no memory.
                if part[at] != 0 {
                    client.same(clients::by_object(part[at])?)?;
                    part[at] = client.own(part[at]);
                }
            }
            // One bit: the device whose memory it is.
            let mask = part[DEVICES] as u32;
            if !mask.is_power_of_two() {
                return Err(INVALID_VALUE);
            }
            let (other, device) = clients::device(mask.trailing_zeros() as i32)?;
            client.same(other)?;
            part[DEVICES] ^= u64::from(mask ^ 1u32.checked_shl(device.local).unwrap_or(0));
        }
        let seq = client.post(op::MAP_ARRAYS, |w| {
            w.word(stream.handle);
            write(&list, w);
        })?;
        stream.worked(seq);
        client.take_late_error()
    }

    fn cuMemBatchDecompressAsync / cuMemBatchDecompressAsync_ptsz [default] (
        list: *const [u64; DECOMPRESSION], count: usize, flags: u32, failed: *mut usize, stream: *mut c_void,
    ) {
        /// Places of the addresses: length of the result, source, target.
        const ADDRESSES: [usize; 3] = [2, 3, 4];
        let list = structures(list, count)?;
        let (client, stream) = find(stream, default)?;
        stream.usable()?;
        for (i, part) in list.iter().enumerate() {
            for address in ADDRESSES.map(|at| part[at]) {
                // The engine of a remote card reaches no memory of the program's host.
                if address != 0 && route::home(address).is_none() {
                    give_optional(failed, i);
                    return Err(NOT_SUPPORTED);
                }
                if let Some(elsewhere) = route::elsewhere(client, address) {
                    client.same(clients::by_object(elsewhere)?)?;
                }
            }
        }
        let reply = client.ask(op::DECOMPRESS, |w| {
            w.word(stream.handle);
            w.word(u64::from(flags));
            write(&list, w);
        })?;
        if reply.status != 0 {
            give_optional(failed, word(&mut reply.reader()).unwrap_or(0) as usize);
        }
        client.check_status(reply.status)?;
        // A frame behind the one that waited: the stream has work up to it.
        stream.worked(client.post(op::MARK, |_| {})?);
        Ok(())
    }

    fn cuMemAddressReserve(address: *mut u64, size: usize, alignment: usize, _hint: u64, flags: u64) {
        let client = clients::get()?;
        if address.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        // The program's address is only a hint: reservations come from the window that both sides
        // hold.
        give(address, client.window().reserve(size as u64, alignment as u64)?)
    }

    fn cuMemAddressFree(address: u64, size: usize) {
        let client = route::by_address(address)?;
        // Memory that is mapped there keeps the addresses.
        if ranges::overlaps(address, size as u64) {
            return Err(INVALID_VALUE);
        }
        client.window().unreserve(address, size as u64)
    }

    fn cuMemGetAllocationGranularity(granularity: *mut usize, _properties: *const c_void, _option: i32) {
        clients::get()?;
        give(granularity, GRANULE as usize)
    }

    fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64) {
        let client = route::by_address(address)?;
        client.same(clients::by_object(handle)?)?;
        let handle = client.own(handle);
        let device = device_of(client, handle)?;
        client.call(op::cuMemMap, |w| {
            w.word(address);
            w.word(size as u64);
            w.word(offset as u64);
            w.word(handle);
            w.word(flags);
        })?;
        ranges::add(address, size as u64, Kind::Mapped, client.primary(device));
        Ok(())
    }

    fn cuMemSetAccess(address: u64, size: usize, list: *const c_void, count: usize) {
        let client = route::by_address(address)?;
        let given = bytes(list, count.checked_mul(ACCESS).ok_or(INVALID_VALUE)?)?;
        let (list, other) = objects::locations(given, ACCESS, 0)?;
        client.same(other)?;
        client.takes_list(count)?;
        let access: Vec<_> = accesses(&list).collect();
        let set = |writable: bool| {
            for (device, flags) in &access {
                ranges::set_writable(address, size as u64, *device, writable && *flags == READ_AND_WRITE);
            }
        };
        // Another thread's copy waits for the worker's word meanwhile, and after an error.
        set(false);
        client.call(op::cuMemSetAccess, |w| {
            w.word(address);
            w.word(size as u64);
            w.bytes(&list);
            w.word(count as u64);
        })?;
        set(true);
        Ok(())
    }

    fn cuMemRetainAllocationHandle(handle: *mut u64, address: u64) {
        clients::get()?;
        // Other memory has no handle, natively either; MPI libraries ask for each message.
        let range = ranges::find(address).filter(|range| range.kind == Kind::Mapped).ok_or(INVALID_VALUE)?;
        let client = clients::by_object(range.ctx)?;
        let reply = client.call(op::cuMemRetainAllocationHandle, |w| w.word(address))?;
        give(handle, client.name(word(&mut reply.reader())?))
    }

    fn cuMemUnmap(address: u64, size: usize) {
        let client = route::by_address(address)?;
        client.call(op::cuMemUnmap, |w| {
            w.word(address);
            w.word(size as u64);
        })?;
        ranges::unmapped(address, size as u64);
        Ok(())
    }
}

/// Returns the worker's number of each device in a list of `CUmemAccessDesc`, and its flags.
fn accesses(list: &[u8]) -> impl Iterator<Item = (u32, u32)> {
    const DEVICE: u32 = 1;
    let word = |part: &[u8], at: usize| part[at..].first_chunk().map_or(0, |word| u32::from_ne_bytes(*word));
    let devices = list.chunks_exact(ACCESS).filter(move |part| word(part, 0) == DEVICE);
    devices.map(move |part| (word(part, 4), word(part, 8)))
}

/// Returns the number at a byte of the `CUmemAllocationProp` of physical memory.
fn property(client: &Client, handle: u64, at: usize) -> Result<u32> {
    let reply = client.call(op::cuMemGetAllocationPropertiesFromHandle, |w| w.word(handle))?;
    let properties = string(&mut reply.reader())?.get(at..).and_then(|rest| rest.first_chunk().copied());
    properties.map(u32::from_ne_bytes).ok_or(UNKNOWN)
}

/// Returns the worker's number of the device that holds physical memory.
fn device_of(client: &Client, handle: u64) -> Result<u32> {
    /// The id of the structure's location.
    const DEVICE: usize = 12;
    if client.devices.len() == 1 {
        return Ok(0);
    }
    let device = property(client, handle, DEVICE)?;
    if (device as usize) < client.devices.len() { Ok(device) } else { Err(UNKNOWN) }
}

/// Returns the kinds of handles as which the program may export the memory of a mapping.
///
/// They never change, and only the first call asks: JAX and MPI libraries ask for each buffer.
pub(super) fn handle_types(client: &Client, mapping: &Range) -> Result<u64> {
    /// The structure's `requestedHandleTypes`.
    const HANDLE_TYPES: usize = 4;
    if let Some(known) = mapping.handle_types {
        return Ok(known);
    }
    let retained = client.call(op::cuMemRetainAllocationHandle, |w| w.word(mapping.base))?;
    let handle = word(&mut retained.reader())?;
    let types = property(client, handle, HANDLE_TYPES);
    client.call(op::cuMemRelease, |w| w.word(handle))?;
    let types = types?.into();
    ranges::know_handle_types(mapping, types);
    Ok(types)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_worker::Program;

    #[test]
    fn kinds_of_handles_are_asked_once_for_each_mapping() {
        const BASE: u64 = 0x5a5a_0000_0000;
        const POSIX_FD: u64 = 1;
        let program = Program::new();
        ranges::add(BASE, GRANULE, Kind::Mapped, program.ctx);
        let mapping = || ranges::find(BASE).unwrap();
        program.answer(op::cuMemRetainAllocationHandle, 0, &[77]);
        // Length, then the structure's first two words: type, requested handle types.
        program.answer(op::cuMemGetAllocationPropertiesFromHandle, 0, &[32, 1 | POSIX_FD << 32, 0, 0, 0]);
        assert_eq!(handle_types(program.client, &mapping()), Ok(POSIX_FD));
        let asked =
            [op::cuMemRetainAllocationHandle, op::cuMemGetAllocationPropertiesFromHandle, op::cuMemRelease];
        assert_eq!(program.operations(), asked);
        assert_eq!(handle_types(program.client, &mapping()), Ok(POSIX_FD));
        assert!(program.operations().is_empty());
        let earlier = mapping();
        ranges::add(BASE, GRANULE, Kind::Mapped, program.ctx);
        ranges::know_handle_types(&earlier, 0);
        assert_eq!(mapping().handle_types, None, "another mapping at the same address");
        ranges::unmapped(BASE, GRANULE);
    }
}
