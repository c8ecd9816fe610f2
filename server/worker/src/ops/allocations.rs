//! Device memory that other calls than `ALLOC` allocate.
//!
//! These are physical memory, pools, arrays, images with variables, contexts and heaps. Each is
//! counted before its allocation if its size is known, else right after it.

use std::sync::atomic::Ordering;

use gpusession_image::fatbin::{self, Packing};
use gpusession_proto::frame::{Reader, op};
use gpusession_proto::handle;

use super::generated;
use crate::answer::{Answer, Done};
use crate::driver::{POSIX_FD, Status, check, status};
use crate::frame::Frame;
use crate::objects::allocations::{Allocations, Counted, Physical, State};
use crate::objects::pools::Pool;
use crate::objects::shares::{Exports, Source};
use crate::session::Session;

/// Granularity of physical memory, and of arrays, in bytes.
const GRANULE: u64 = 2 << 20;
const ARRAY_GRANULE: u64 = 64 << 10;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`
const PINNED: u32 = 1;
/// Attributes of pools and graphs, by `cuda.h`.
///
/// These are `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`, `CU_MEMPOOL_ATTR_USED_MEM_CURRENT` and
/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const POOL_RESERVED: i32 = 5;
const POOL_USED: i32 = 7;
const GRAPH_RESERVED: i32 = 2;
/// Limits that size heaps, and the bytes of each that a context includes.
///
/// These are `CU_LIMIT_PRINTF_FIFO_SIZE` and `CU_LIMIT_MALLOC_HEAP_SIZE`.
const HEAPS: [(i32, u64); 2] = [(1, 2 << 20), (2, 8 << 20)];

impl Allocations {
    /// Counts an image on the device of the frame's context, as long as `handle` lives.
    pub fn image(&self, session: &Session, frame: &Frame, handle: u64, image: &[u8]) -> Result<(), Status> {
        let bytes = image_bytes(image);
        let ctx = frame.header.ctx.get();
        // Runtimes load libraries without a context: the image counts on the first device.
        let device = session.contexts.get(ctx).map_or(0, |(_, device)| device);
        session.quota.take(device, bytes)?;
        self.lock().objects.insert(handle, Counted { device, bytes, ctx });
        Ok(())
    }

    /// Subtracts the object behind a client's handle, which no longer exists.
    pub fn drop_object(&self, session: &Session, handle: u64) {
        if let Some(gone) = self.lock().objects.remove(&handle) {
            session.quota.give(gone.device, gone.bytes);
        }
    }
}

/// Counts a further context of the program as its first one.
pub fn context_created(session: &Session, handle: u64, device: u32) -> Result<(), Status> {
    let bytes = session.allocations.contexts.get(device as usize).copied().unwrap_or(0);
    session.quota.take(device, bytes)?;
    session.allocations.lock().objects.insert(handle, Counted { device, bytes, ctx: handle });
    Ok(())
}

/// Creates the worker's own context on a device, once, and counts it as long as the worker lives.
pub fn open_worker_context(session: &Session, device: u32) -> Result<(), Status> {
    let bytes = session.allocations.contexts.get(device as usize).copied().unwrap_or(0);
    session.contexts.open_worker_context(
        session.driver,
        device,
        || session.quota.take(device, bytes),
        || {
            session.quota.give(device, bytes);
        },
    )
}

/// Subtracts a context that is about to be destroyed or reset, and all that belongs to it.
pub fn context_gone(session: &Session, ctx: u64) {
    session.known.context_gone(ctx);
    let mut state = session.allocations.lock();
    let (mut gone, mut modules) = (Vec::new(), Vec::new());
    let mut keep = |c: &Counted| {
        if c.ctx == ctx {
            gone.push(*c);
        }
        c.ctx != ctx
    };
    state.arrays.retain(|_, c| keep(c));
    state.heaps.retain(|_, c| keep(c));
    state.objects.retain(|handle, c| {
        if c.ctx == ctx && handle::kind(*handle) == handle::MODULE {
            modules.push(*handle);
        }
        keep(c)
    });
    drop(state);
    for counted in gone {
        session.quota.give(counted.device, counted.bytes);
    }
    // Their variables end with them.
    for module in modules {
        session.mirrors.forget_parent(module);
    }
}

/// Counts what belongs to a green context for its device's primary context, which outlives it.
pub fn adopt(session: &Session, green: u64, primary: u64) {
    session.known.adopt(green, primary);
    let state = &mut *session.allocations.lock();
    for counted in state.arrays.values_mut().chain(state.objects.values_mut()) {
        if counted.ctx == green {
            counted.ctx = primary;
        }
    }
}

/// Counts the heaps of device code, which `CTX_SET_LIMIT` sizes.
pub fn limit(session: &Session, frame: &Frame, limit: i32, value: u64) -> Result<(), Status> {
    let Some((_, included)) = HEAPS.iter().find(|(l, _)| *l == limit) else { return Ok(()) };
    let ctx = frame.header.ctx.get();
    let (_, device) = session.contexts.get(ctx)?;
    let bytes = value.saturating_sub(*included);
    let before = session.allocations.lock().heaps.get(&(ctx, limit)).map_or(0, |c| c.bytes);
    if bytes > before {
        session.quota.take(device, bytes - before)?;
    } else {
        session.quota.give(device, before - bytes);
    }
    session.allocations.lock().heaps.insert((ctx, limit), Counted { device, bytes, ctx });
    Ok(())
}

/// Replays a generated call, and counts what it allocates or frees.
#[expect(clippy::too_many_lines, reason = "one `match` over the operations")]
pub fn generated(session: &Session, frame: &Frame, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let operation = frame.header.op.get();
    let ctx = frame.header.ctx.get();
    let mut replay =
        |answer: &mut Answer| -> Done { generated::dispatch(session, operation, ctx, r, answer) };
    let mut body = frame.reader();
    let device = || session.contexts.get(frame.header.ctx.get()).map(|(_, device)| device);
    match operation {
        op::cuMemCreate => {
            let size = body.word()?;
            let properties = body.bytes()?;
            if half(properties, 8) != LOCATION_DEVICE {
                // Memory of this host, which clients cannot have.
                return Err(status::NOT_SUPPORTED.into());
            }
            let device = half(properties, 12);
            session.contexts.device(u64::from(device))?;
            let bytes = size.checked_next_multiple_of(GRANULE).ok_or(status::OUT_OF_MEMORY)?;
            session.quota.take(device, bytes)?;
            replay(answer).inspect_err(|_| session.quota.give(device, bytes))?;
            let physical = Physical { device, bytes, handles: 1, maps: 0, share: None, imported: None };
            session.allocations.lock().physical.insert(last_word(answer), physical);
            Ok(())
        }
        op::cuMemRetainAllocationHandle => {
            replay(answer)?;
            let handle = last_word(answer);
            let mut state = session.allocations.lock();
            if let Some(p) = state.physical.get_mut(&handle) {
                p.handles += 1;
            }
            settle_source(session, &state, &mut session.shares.exports(), handle);
            Ok(())
        }
        op::cuMemRelease => {
            let handle = body.word()?;
            let mut state = session.allocations.lock();
            // While it is locked, no other process gets what the driver may free now.
            let mut exports = session.shares.exports();
            replay(answer)?;
            if let Some(p) = state.physical.get_mut(&handle) {
                p.handles = p.handles.saturating_sub(1);
            }
            settle(session, &mut state, &mut exports, handle);
            Ok(())
        }
        op::cuMemMap => {
            let (address, size, _, handle) = (body.word()?, body.word()?, body.word()?, body.word()?);
            replay(answer)?;
            let mut state = session.allocations.lock();
            state.mapped.insert(address, (size, handle));
            if let Some(p) = state.physical.get_mut(&handle) {
                p.maps += 1;
            }
            Ok(())
        }
        op::cuMemUnmap => {
            let (address, size) = (body.word()?, body.word()?);
            let end = address.saturating_add(size);
            let within = |state: &State| -> Vec<_> {
                let inside = state.mapped.iter().filter(|(at, _)| (address..end).contains(*at));
                inside.map(|(at, (size, handle))| (*at, *size, *handle)).collect()
            };
            let parts = {
                // Before the driver's call, which may wait for the device: from here on no other
                // process gets the memory from these addresses.
                let mut state = session.allocations.lock();
                let mut exports = session.shares.exports();
                let parts = within(&state);
                for (at, _, handle) in &parts {
                    state.mapped.remove(at);
                    settle_source(session, &state, &mut exports, *handle);
                }
                parts
            };
            let replayed = replay(answer);
            let mut state = session.allocations.lock();
            let mut exports = session.shares.exports();
            for (at, size, handle) in parts {
                match &replayed {
                    Ok(()) => {
                        if let Some(p) = state.physical.get_mut(&handle) {
                            p.maps = p.maps.saturating_sub(1);
                        }
                        settle(session, &mut state, &mut exports, handle);
                    }
                    Err(_) => drop(state.mapped.insert(at, (size, handle))),
                }
            }
            replayed
        }
        op::cuArrayCreate_v2 | op::cuArray3DCreate_v2 | op::cuMipmappedArrayCreate => {
            let descriptor = body.bytes()?;
            let levels = if operation == op::cuMipmappedArrayCreate { body.word()? } else { 1 };
            let bytes = array_bytes(operation, descriptor, levels).ok_or(status::OUT_OF_MEMORY)?;
            let device = device()?;
            session.quota.take(device, bytes)?;
            replay(answer).inspect_err(|_| session.quota.give(device, bytes))?;
            let counted = Counted { device, bytes, ctx: frame.header.ctx.get() };
            session.allocations.lock().arrays.insert(last_word(answer), counted);
            Ok(())
        }
        op::cuArrayDestroy | op::cuMipmappedArrayDestroy => {
            let array = body.word()?;
            replay(answer)?;
            if let Some(gone) = session.allocations.lock().arrays.remove(&array) {
                session.quota.give(gone.device, gone.bytes);
            }
            Ok(())
        }
        op::cuMemPoolCreate => {
            // The location follows kind and handle types.
            let properties = body.bytes()?;
            let device = half(properties, 12);
            if half(properties, 0) != PINNED || half(properties, 8) != LOCATION_DEVICE {
                // Memory of this host, or managed memory, which clients cannot have.
                return Err(status::NOT_SUPPORTED.into());
            }
            session.contexts.device(u64::from(device))?;
            replay(answer)?;
            let shareable = half(properties, 4) & POSIX_FD as u32 != 0;
            let pool = Pool { shareable, ..Pool::new(device) };
            session.allocations.lock().pools.insert(last_word(answer), pool);
            Ok(())
        }
        op::cuDeviceGetDefaultMemPool | op::cuDeviceGetMemPool => {
            let device = body.word()?;
            replay(answer)?;
            session.allocations.lock().of_device(last_word(answer), device as u32);
            Ok(())
        }
        op::cuMemGetDefaultMemPool | op::cuMemGetMemPool | op::cuMemSetMemPool => {
            let (location, kind) = (body.bytes()?, body.word()?);
            let device = half(location, 4);
            if half(location, 0) != LOCATION_DEVICE || kind != u64::from(PINNED) {
                return Err(status::NOT_SUPPORTED.into());
            }
            session.contexts.device(u64::from(device))?;
            replay(answer)?;
            if operation != op::cuMemSetMemPool {
                session.allocations.lock().of_device(last_word(answer), device);
            }
            Ok(())
        }
        op::cuMemAllocAsync | op::cuMemAllocFromPoolAsync => {
            let size = body.word()?;
            let pool = if operation == op::cuMemAllocAsync {
                current_pool(session, device()?)?
            } else {
                body.word()?
            };
            let known = session.allocations.lock().pools.get(&pool).copied();
            let Pool { device, shareable, .. } = known.ok_or(status::INVALID_VALUE)?;
            session.allocations.pooling.store(true, Ordering::Relaxed);
            recount_pools(session)?;
            // Unused memory of the pool may suffice; otherwise the pool grows.
            let idle =
                pool_value(session, pool, POOL_RESERVED).saturating_sub(pool_value(session, pool, POOL_USED));
            let expected = size.saturating_sub(idle);
            session.quota.take(device, expected)?;
            let done = replay(answer);
            session.quota.give(device, expected);
            done?;
            if let Err(error) = recount_pools(session) {
                undo(session, pool, last_word(answer));
                return Err(error.into());
            }
            if shareable {
                let mut state = session.allocations.lock();
                if let Some(gone) = state.pointers.allocated(last_word(answer), device, size) {
                    session.shares.moved(&mut session.shares.exports(), gone, None);
                }
            }
            Ok(())
        }
        op::cuMemPoolTrimTo | op::cuDeviceGraphMemTrim => {
            replay(answer)?;
            Ok(recount_pools(session)?)
        }
        _ => replay(answer),
    }
}

/// Frees memory of a pool for which the lease has no room.
fn undo(session: &Session, pool: u64, address: u64) {
    let call = &session.driver.generated;
    // SAFETY: an address that the driver returned a moment ago, on the default stream; a pool of
    // this worker.
    unsafe {
        (call.cuMemFreeAsync)(address, std::ptr::null_mut());
        (session.driver.call.cuStreamSynchronize)(std::ptr::null_mut());
        (call.cuMemPoolTrimTo)(pool, 0);
    }
    let _ = recount_pools(session);
}

/// Counts the memory that the pools hold now.
///
/// An error means that the lease has no room for it; it counts all the same, because it exists.
pub fn recount_pools(session: &Session) -> Result<(), Status> {
    let allocations = &session.allocations;
    if !allocations.pooling.load(Ordering::Relaxed) {
        return Ok(());
    }
    let mut state = allocations.lock();
    let mut now = vec![0u64; state.pooled.len()];
    for (&handle, pool) in state.pools.iter().filter(|(_, pool)| pool.imported.is_none()) {
        now[pool.device as usize] += pool_value(session, handle, POOL_RESERVED);
    }
    for (device, sum) in now.iter_mut().enumerate() {
        let mut value = [0u64; 1];
        let Ok(ordinal) = session.contexts.device(device as u64) else { continue };
        // SAFETY: the attribute has 8 bytes, as the array.
        let got = unsafe {
            (session.driver.generated.cuDeviceGetGraphMemAttribute)(
                ordinal,
                GRAPH_RESERVED,
                value.as_mut_ptr().cast(),
            )
        };
        if got == 0 {
            *sum += value[0];
        }
    }
    let mut outcome = Ok(());
    for (device, (before, now)) in state.pooled.iter_mut().zip(now).enumerate() {
        let device = device as u32;
        if now <= *before {
            session.quota.give(device, *before - now);
        } else if let Err(error) = session.quota.take(device, now - *before) {
            session.quota.overdraw(device, now - *before);
            outcome = Err(error);
        }
        *before = now;
    }
    outcome
}

/// Returns the pool from which `cuMemAllocAsync` allocates.
fn current_pool(session: &Session, device: u32) -> Result<u64, Status> {
    let mut pool = 0;
    let ordinal = session.contexts.device(u64::from(device))?;
    // SAFETY: the out pointer is valid.
    check(unsafe { (session.driver.generated.cuDeviceGetMemPool)(&mut pool, ordinal) })?;
    session.allocations.lock().of_device(pool, device);
    Ok(pool)
}

fn pool_value(session: &Session, pool: u64, attribute: i32) -> u64 {
    let mut value = [0u64; 1];
    // SAFETY: the queried attributes have 8 bytes, as the array.
    let got = unsafe {
        (session.driver.generated.cuMemPoolGetAttribute)(pool, attribute, value.as_mut_ptr().cast())
    };
    if got == 0 { value[0] } else { 0 }
}

/// Gives back physical memory that has neither a handle nor a mapping any more.
fn settle(session: &Session, state: &mut State, exports: &mut Exports, handle: u64) {
    settle_source(session, state, exports, handle);
    let Some(physical) = state.physical.get(&handle) else { return };
    if physical.handles > 0 || physical.maps > 0 {
        return;
    }
    session.quota.give(physical.device, physical.bytes);
    if let Some(object) = physical.imported {
        session.shares.dropped(exports, object);
    }
    state.physical.remove(&handle);
}

/// Notes where the driver finds shared memory from now on.
fn settle_source(session: &Session, state: &State, exports: &mut Exports, handle: u64) {
    let Some(physical) = state.physical.get(&handle) else { return };
    let Some(share) = physical.share else { return };
    let mapped = || state.mapped.iter().find(|(_, (_, of))| *of == handle).map(|(at, _)| Source::Mapped(*at));
    let source = if physical.handles > 0 { Some(Source::Handle(handle)) } else { mapped() };
    session.shares.moved(exports, share, source);
}

fn last_word(answer: &Answer) -> u64 {
    answer.body.last_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn long(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Returns the bytes of a `CUDA_ARRAY_DESCRIPTOR` or `CUDA_ARRAY3D_DESCRIPTOR`.
///
/// `None` stands for more than a `u64` holds.
fn array_bytes(operation: u16, descriptor: &[u8], levels: u64) -> Option<u64> {
    let flat = operation == op::cuArrayCreate_v2;
    let mut sizes = [long(descriptor, 0), long(descriptor, 8), if flat { 1 } else { long(descriptor, 16) }];
    let format_at = if flat { 16 } else { 24 };
    let element = match half(descriptor, format_at) {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        // 32 bits a channel; formats unknown to this code have no more.
        _ => 4,
    };
    let element = u64::from(half(descriptor, format_at + 4)).max(1).checked_mul(element)?;
    let mut sum = 0u64;
    for _ in 0..levels.clamp(1, 32) {
        let cells = sizes.iter().try_fold(1u64, |n, s| n.checked_mul((*s).max(1)))?;
        sum = sum.checked_add(cells.checked_mul(element)?)?;
        sizes = sizes.map(|s| s / 2);
    }
    sum.checked_next_multiple_of(ARRAY_GRANULE)
}

/// Estimates the bytes of an image's variables and code.
///
/// It understands ELF, PTX text, and fatbins of these that are not compressed. The supervisor
/// accounts the rest, since it reads the memory that the process really has.
fn image_bytes(image: &[u8]) -> u64 {
    match half(image, 0) {
        gpusession_image::ELF => elf_bytes(image),
        gpusession_image::FATBIN => {
            let entries = fatbin::list(image).and_then(fatbin::entries).unwrap_or_default();
            let bytes = |entry: &fatbin::Entry<'_>| match (entry.payload.packing, entry.kind) {
                (Packing::Plain, fatbin::ELF) => elf_bytes(entry.payload.bytes),
                (Packing::Plain, fatbin::PTX) => ptx_bytes(entry.payload.bytes),
                _ => 0,
            };
            // The driver loads one of the images, so the largest one counts.
            entries.iter().map(bytes).max().unwrap_or(0)
        }
        _ => ptx_bytes(image),
    }
}

fn elf_bytes(image: &[u8]) -> u64 {
    const ALLOCATED: u64 = 2;
    let short = |at: usize| u64::from(half(image, at) & 0xffff);
    let (table, entry, count) = (long(image, 40), short(58), short(60));
    (0..count)
        .filter_map(|i| {
            let at = usize::try_from(table.checked_add(i.checked_mul(entry)?)?).ok()?;
            let section = image.get(at..at.checked_add(64)?)?;
            // The words at 8 and 32 are flags and size.
            (long(section, 8) & ALLOCATED != 0).then(|| long(section, 32))
        })
        .fold(0, u64::saturating_add)
}

/// Sums the `.global` variables of PTX text, in bytes.
fn ptx_bytes(image: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(image);
    text.lines()
        .filter_map(|line| {
            let line = line.trim_start();
            let line = line.strip_prefix(".visible ").unwrap_or(line);
            let declared = line.strip_prefix(".global ")?.split(['=', ';']).next()?;
            let width = declared.split_whitespace().find_map(|word| {
                let digits = word.strip_prefix(['.']).and_then(|w| w.strip_prefix(['b', 'u', 's', 'f']))?;
                digits.parse::<u64>().ok().map(|bits| bits / 8)
            })?;
            let cells = declared.split('[').skip(1).try_fold(1u64, |n, rest| {
                let size = rest.split(']').next()?.trim().parse::<u64>().unwrap_or(1);
                n.checked_mul(size)
            })?;
            width.checked_mul(cells)
        })
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn each_call_of_the_table_is_counted_or_says_why_not() {
        let arms = [include_str!("allocations.rs"), include_str!("mod.rs")]
            .map(|file| file.split("mod tests").next().unwrap())
            .concat();
        let words: HashSet<_> =
            arms.split(|c: char| !c.is_ascii_alphanumeric() && !"_:".contains(c)).collect();
        let without_arm: Vec<_> = (0..op::COUNT as u16)
            .map(op::name)
            .filter(|name| name.starts_with("cu") && !words.contains(format!("op::{name}").as_str()))
            .collect();
        let stated: Vec<&str> = gpusession_calls::uncounted().map(|(pattern, _)| pattern).collect();
        let fits = |pattern: &str, name: &str| match *pattern.split('*').collect::<Vec<_>>() {
            [start, ""] => name.starts_with(start),
            [start, part, ""] => name.strip_prefix(start).is_some_and(|rest| rest.contains(part)),
            _ => name == pattern,
        };
        for name in &without_arm {
            let known = stated.iter().any(|pattern| fits(pattern, name));
            assert!(
                known,
                "{name}: an arm of `generated` counts its memory, or it is `uncounted` in calls.txt"
            );
        }
        for pattern in stated {
            let used = without_arm.iter().any(|name| fits(pattern, name));
            assert!(used, "{pattern}: `uncounted` in calls.txt, but no call without an arm");
        }
    }

    #[test]
    fn variables_of_ptx() {
        let text = ".version 8.0\n.visible .global .align 4 .b8 table[1048576];\n\t.global .align 8 .u64 one = 5;\n\
                    .visible .entry k()\n{\n ld.global.u32 %r1, [%rd1];\n}\n.global .f32 m[4][8];\n";
        assert_eq!(image_bytes(text.as_bytes()), 1048576 + 8 + 128);
        assert_eq!(image_bytes(b""), 0);
        assert_eq!(
            ptx_bytes(b".global .b8 x[99999999999999999999];\n.global .b8 y[18446744073709551615][2];"),
            1
        );
    }

    #[test]
    fn compressed_images_of_a_fatbin_are_not_read() {
        let fatbin = |packed: u32| {
            let text = b".version 8.0\n.global .b8 x[4096];\n\0\0";
            let mut image = 0xba55_ed50u32.to_le_bytes().to_vec();
            image.extend([1, 0, 16, 0]);
            image.extend((64 + text.len() as u64).to_le_bytes());
            let mut header = [0; 64];
            (header[0], header[4]) = (fatbin::PTX as u8, 64);
            header[8..16].copy_from_slice(&(text.len() as u64).to_le_bytes());
            header[16..20].copy_from_slice(&packed.to_le_bytes());
            image.extend(header);
            image.extend(text);
            image
        };
        assert_eq!(image_bytes(&fatbin(0)), 4096);
        assert_eq!(image_bytes(&fatbin(20)), 0);
    }

    #[test]
    fn hostile_images_are_counted_without_harm() {
        for magic in [0xba55_ed50u32, 0x464c_457f] {
            let mut image = magic.to_le_bytes().to_vec();
            image.resize(4096, 0xff);
            image_bytes(&image);
            image.truncate(70);
            image_bytes(&image);
            let mut zeros = magic.to_le_bytes().to_vec();
            zeros.resize(4096, 0);
            assert_eq!(image_bytes(&zeros), 0);
        }
    }

    #[test]
    fn arrays() {
        let descriptor = |words: &[u64]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>();
        // 1024 x 1024 of four floats.
        let flat = descriptor(&[1024, 1024, 0x20 | 4 << 32]);
        assert_eq!(array_bytes(op::cuArrayCreate_v2, &flat, 1), Some(16 << 20));
        let deep = descriptor(&[64, 64, 64, 0x01 | 1 << 32, 0]);
        assert_eq!(array_bytes(op::cuArray3DCreate_v2, &deep, 1), Some(256 << 10));
        assert_eq!(array_bytes(op::cuMipmappedArrayCreate, &deep, 3), Some(320 << 10));
        let absurd = descriptor(&[u64::MAX, u64::MAX, 0x20 | 4 << 32]);
        assert_eq!(array_bytes(op::cuArrayCreate_v2, &absurd, 1), None);
    }
}
