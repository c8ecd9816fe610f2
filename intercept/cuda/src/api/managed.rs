//! Advice about managed memory, its prefetches, and the attributes that show both.
//!
//! Managed memory is where each launch needs it, so advice moves nothing. A prefetch to a device
//! sends what the program has written; the devices deny `CONCURRENT_MANAGED_ACCESS`, and a driver
//! without it refuses prefetches, but many programs do not ask.

use std::ffi::c_void;

use super::copy_batch::{elements, starts_of, stream_of};
use crate::entry::{INVALID_DEVICE, INVALID_VALUE, Result, driver, give};
use crate::managed_places::{self, CPU, Location};
use crate::ranges::{self, Range};
use crate::streams::{self, Stream, find};
use crate::{clients, regions, thread};

driver! {
    fn cuMemAdvise(address: u64, len: usize, advice: i32, device: i32) {
        advise(address, len, advice, || of_device(device))
    }

    fn cuMemAdvise_v2(address: u64, len: usize, advice: i32, location: u64) {
        const KINDS: std::ops::RangeInclusive<i32> = Location::DEVICE..=Location::THIS_NODE;
        if !KINDS.contains(&(location as i32)) {
            return Err(INVALID_VALUE);
        }
        advise(address, len, advice, || located(location))
    }

    fn cuMemPrefetchAsync / cuMemPrefetchAsync_ptsz [default] (address: u64, len: usize, device: i32, stream: *mut c_void) {
        let (_, stream) = find(stream, default)?;
        let range = managed(address, len)?;
        prefetch(&[Prefetch { range, address, len, location: of_device(device)? }], &stream)
    }

    fn cuMemPrefetchAsync_v2 / cuMemPrefetchAsync_v2_ptsz [default] (
        address: u64, len: usize, location: u64, flags: u32, stream: *mut c_void,
    ) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let (_, stream) = find(stream, default)?;
        let range = managed(address, len)?;
        prefetch(&[Prefetch { range, address, len, location: located(location)? }], &stream)
    }

    fn cuMemPrefetchBatchAsync / cuMemPrefetchBatchAsync_ptsz [default] (
        addresses: *const u64, lens: *const usize, count: usize, locations: *const u64, starts: *const usize,
        groups: usize, flags: u64, stream: *mut c_void,
    ) {
        let parts = Parts { addresses, lens, count };
        batch(&parts, Some(&Groups { locations, starts, count: groups }), flags, stream, default)
    }

    // The contents of a discarded part are undefined, so that it may stay as it is.
    fn cuMemDiscardBatchAsync / cuMemDiscardBatchAsync_ptsz [default] (
        addresses: *const u64, lens: *const usize, count: usize, flags: u64, stream: *mut c_void,
    ) {
        batch(&Parts { addresses, lens, count }, None, flags, stream, default)
    }

    fn cuMemDiscardAndPrefetchBatchAsync / cuMemDiscardAndPrefetchBatchAsync_ptsz [default] (
        addresses: *const u64, lens: *const usize, count: usize, locations: *const u64, starts: *const usize,
        groups: usize, flags: u64, stream: *mut c_void,
    ) {
        let parts = Parts { addresses, lens, count };
        batch(&parts, Some(&Groups { locations, starts, count: groups }), flags, stream, default)
    }

    fn cuMemRangeGetAttribute(data: *mut c_void, size: usize, attribute: i32, address: u64, len: usize) {
        range_attribute(data, size, attribute, address, len)
    }

    fn cuMemRangeGetAttributes(
        data: *const *mut c_void, sizes: *const usize, attributes: *const i32, count: usize, address: u64, len: usize,
    ) {
        if data.is_null() || sizes.is_null() || attributes.is_null() || count == 0 {
            return Err(INVALID_VALUE);
        }
        for i in 0..count {
            // SAFETY: the pointers are not null, and by the call's contract the arrays have `count`
            // elements.
            let (data, size, attribute) =
                unsafe { (data.add(i).read(), sizes.add(i).read(), attributes.add(i).read()) };
            range_attribute(data, size, attribute, address, len)?;
        }
        Ok(())
    }
}

/// Returns the location that a device's ordinal or [`CPU`] means.
fn of_device(device: i32) -> Result<Location> {
    if device == CPU {
        return Ok(Location::host());
    }
    clients::device(device)?;
    Ok(Location { kind: Location::DEVICE, id: device })
}

/// Returns the location of a `CUmemLocation`: kind in the low word, id in the high one.
fn located(location: u64) -> Result<Location> {
    let (kind, id) = (location as i32, (location >> 32) as i32);
    match kind {
        Location::DEVICE => {
            of_device(id).and_then(|found| if id == CPU { Err(INVALID_DEVICE) } else { Ok(found) })
        }
        Location::HOST => Ok(Location::host()),
        Location::NODE
            if id == 0 || std::fs::exists(format!("/sys/devices/system/node/node{id}")).unwrap_or(false) =>
        {
            Ok(Location { kind, id })
        }
        Location::THIS_NODE => Ok(Location { kind, id: 0 }),
        _ => Err(INVALID_VALUE),
    }
}

/// As [`located`]; of a batch, the driver also keeps an id of the host, and an unknown device is
/// another error (H200, driver 580).
fn located_in_batch(location: u64) -> Result<Location> {
    let found = located(location).map_err(|_| INVALID_VALUE)?;
    Ok(if found.kind == Location::HOST { Location { id: (location >> 32) as i32, ..found } } else { found })
}

/// Returns the managed allocation in which a whole part of memory lies.
fn managed(address: u64, len: usize) -> Result<Range> {
    let range = ranges::find(address).filter(|r| r.kind.managed()).ok_or(INVALID_VALUE)?;
    if len == 0 || len as u64 > range.size - (address - range.base) { Err(INVALID_VALUE) } else { Ok(range) }
}

/// Keeps a `CUmem_advise`; those that name no location do not look at it.
fn advise(address: u64, len: usize, advice: i32, location: impl Fn() -> Result<Location>) -> Result {
    clients::get()?;
    thread::context()?;
    managed(address, len)?;
    let change = |change: &dyn Fn(&mut managed_places::Place)| {
        managed_places::change(address, len as u64, change);
        Ok(())
    };
    match advice {
        1 | 2 => change(&|place| place.read_mostly = advice == 1),
        3 => {
            // The driver names no node of the host afterwards (H200, driver 580).
            let location = location()?;
            let kept = if location.kind == Location::DEVICE { location } else { Location::host() };
            change(&|place| place.preferred = Some(kept))
        }
        4 => change(&|place| place.preferred = None),
        5 | 6 => {
            let location = location()?;
            if ![Location::DEVICE, Location::HOST].contains(&location.kind) {
                return Err(INVALID_VALUE);
            }
            change(&|place| place.access(location.id, advice == 5))
        }
        _ => Err(INVALID_VALUE),
    }
}

/// A part of managed memory, and where it goes.
struct Prefetch {
    range: Range,
    address: u64,
    len: usize,
    location: Location,
}

/// Sends to devices what the program has written; what devices have written comes with waits.
fn prefetch(parts: &[Prefetch], stream: &Stream) -> Result {
    outside_capture(stream)?;
    let mut sent = Vec::new();
    for part in parts.iter().filter(|part| part.location.kind == Location::DEVICE) {
        let (client, _) = clients::of_context(part.range.ctx)?;
        client.same(clients::device(part.location.id)?.0)?;
        // One comparison sends the changes of all memory of a lease.
        if !sent.contains(&client.number) {
            regions::upload(client)?;
            sent.push(client.number);
        }
    }
    for part in parts {
        let location = part.location;
        managed_places::change(part.address, part.len as u64, |place| place.prefetched = Some(location));
    }
    Ok(())
}

/// Checks that a stream takes work that no graph can contain.
fn outside_capture(stream: &Stream) -> Result {
    stream.not_capturing()?;
    stream.usable()
}

/// Arrays of a batch: address and length of each part of memory.
struct Parts {
    addresses: *const u64,
    lens: *const usize,
    count: usize,
}

/// Arrays of a batch: a location for each group of parts, and the first part of each group.
struct Groups {
    locations: *const u64,
    starts: *const usize,
    count: usize,
}

/// Prefetches parts of memory to the locations of their groups; without groups, only checks them.
fn batch(
    parts: &Parts,
    groups: Option<&Groups>,
    flags: u64,
    stream: *mut c_void,
    default: streams::Default,
) -> Result {
    let stream = stream_of(stream, default)?;
    if flags != 0 || parts.count == 0 {
        return Err(INVALID_VALUE);
    }
    let (addresses, lens) = (elements(parts.addresses, parts.count)?, elements(parts.lens, parts.count)?);
    let ranges: Vec<_> =
        addresses.iter().zip(&lens).map(|(address, len)| managed(*address, *len)).collect::<Result<_>>()?;
    let Some(groups) = groups else { return outside_capture(&stream) };
    let starts = starts_of(groups.starts, groups.count, parts.count)?;
    let given: Vec<u64> = elements(groups.locations, groups.count)?;
    let locations: Vec<_> = given.into_iter().map(located_in_batch).collect::<Result<_>>()?;
    let parts = ranges.into_iter().enumerate().map(|(number, range)| {
        let group = starts.partition_point(|start| *start <= number) - 1;
        Prefetch { range, address: addresses[number], len: lens[number], location: locations[group] }
    });
    prefetch(&parts.collect::<Vec<_>>(), &stream)
}

fn range_attribute(data: *mut c_void, size: usize, attribute: i32, address: u64, len: usize) -> Result {
    const ACCESSED_BY: i32 = 3;
    const INT: usize = size_of::<i32>();
    clients::get()?;
    thread::context()?;
    managed(address, len)?;
    let shared = managed_places::shared(address, len as u64);
    if attribute != ACCESSED_BY {
        let value = shared.number(attribute).filter(|_| size == INT).ok_or(INVALID_VALUE)?;
        return give(data.cast(), value);
    }
    if data.is_null() || size == 0 || !size.is_multiple_of(INT) {
        return Err(INVALID_VALUE);
    }
    for (i, device) in shared.accessed_by(size / INT).into_iter().enumerate() {
        // SAFETY: the pointer is not null, and by the call's contract it has `size` bytes.
        unsafe { data.cast::<i32>().add(i).write_unaligned(device) };
    }
    Ok(())
}
