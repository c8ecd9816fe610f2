//! Host memory that the device can see (mapped pinned memory, managed memory). It lives on both sides at one address: what
//! the program has changed goes up before work is launched, what the device has changed comes back when the program
//! synchronises. A program and a kernel that poll the same memory while both run are not supported.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use gpusession_proto::frame::op;

use crate::client::{Client, word};
use crate::entry::Result;

const PAGE: usize = 4096;

struct Region {
    base: usize,
    shadow: Vec<u8>,
    device: u64,
}

static REGIONS: Mutex<Vec<Region>> = Mutex::new(Vec::new());
/// While there is none, launches pay one load.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Makes host memory visible to the device; returns the device's address for it.
pub fn map(client: &Client, base: u64, size: u64) -> Result<u64> {
    map_as(client, base, size, false)
}

/// The same for managed memory, which counts as the device's.
pub fn map_managed(client: &Client, base: u64, size: u64) -> Result<u64> {
    map_as(client, base, size, true)
}

fn map_as(client: &Client, base: u64, size: u64, managed: bool) -> Result<u64> {
    let start = base as usize & !(PAGE - 1);
    let len = (base as usize + size as usize).next_multiple_of(PAGE) - start;
    {
        let regions = REGIONS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = regions.iter().find(|r| r.base == start && r.shadow.len() == len) {
            return Ok(region.device + (base - start as u64));
        }
    }
    let reply = client.call(op::MIRROR_HOST, |w| {
        w.word(start as u64);
        w.word(len as u64);
        w.word(u64::from(managed));
    })?;
    let device = word(&mut reply.reader())?;
    let mut regions = REGIONS.lock().unwrap_or_else(PoisonError::into_inner);
    regions.push(Region { base: start, shadow: vec![0; len], device });
    COUNT.store(regions.len(), Ordering::Relaxed);
    Ok(device + (base - start as u64))
}

/// The memory is about to be freed.
pub fn unmap(client: &Client, base: u64) -> Result {
    let start = base as usize & !(PAGE - 1);
    let mut regions = REGIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(at) = regions.iter().position(|r| r.base == start) else { return Ok(()) };
    regions.remove(at);
    COUNT.store(regions.len(), Ordering::Relaxed);
    drop(regions);
    client.post(op::UNMIRROR_HOST, |w| w.word(start as u64)).map(|_| ())
}

/// Sends what the program has changed. Call before work is launched.
#[inline]
pub fn upload(client: &Client) -> Result {
    if COUNT.load(Ordering::Relaxed) == 0 { Ok(()) } else { upload_changed(client) }
}

fn upload_changed(client: &Client) -> Result {
    let mut regions = REGIONS.lock().unwrap_or_else(PoisonError::into_inner);
    for region in regions.iter_mut() {
        for offset in (0..region.shadow.len()).step_by(PAGE) {
            // SAFETY: the region is mapped until `unmap`; the program may write to it meanwhile, as on a local card.
            let now = unsafe { std::slice::from_raw_parts((region.base + offset) as *const u8, PAGE) };
            let shadow = &mut region.shadow[offset..offset + PAGE];
            if now != shadow {
                shadow.copy_from_slice(now);
                client.post(op::WRITE_HOST, |w| {
                    w.word((region.base + offset) as u64);
                    w.bytes(shadow);
                })?;
            }
        }
    }
    Ok(())
}

/// The worker says what the device has changed.
pub fn changed(address: u64, bytes: &[u8]) {
    let mut regions = REGIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let address = address as usize;
    let Some(region) = regions.iter_mut().find(|r| address >= r.base && address - r.base < r.shadow.len())
    else {
        return;
    };
    let offset = address - region.base;
    let Some(shadow) = region.shadow.get_mut(offset..offset + bytes.len()) else { return };
    for (i, (old, new)) in shadow.iter_mut().zip(bytes).enumerate() {
        // Only what the device has changed: the program may have written beside it meanwhile.
        if old != new {
            *old = *new;
            // SAFETY: inside a region that is mapped until `unmap`, which waits for this lock.
            unsafe { ((address + i) as *mut u8).write_volatile(*new) };
        }
    }
}
