//! Device memory, pinned host memory, pointers.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use gpusession_link::lanes::Detached;
use gpusession_proto::frame::{Writer, op};

use super::{pool, vmm};
use crate::client::{Client, string, unavailable, word};
use crate::entry::{
    HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY,
    Result, UNKNOWN, alias, bytes, driver, give, give_optional, take,
};
use crate::freed_blocks::Block;
use crate::ranges::{self, Kind, Range};
use crate::streams::{self, find};
use crate::window::{self, Step};
use crate::{clients, core_dumps, limits, mapped, modules, private_tables, thread};

/// `CU_MEMHOSTALLOC_PORTABLE`
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`, and the same of `CU_MEMHOSTREGISTER`
const DEVICEMAP: u32 = 2;
/// `CU_MEMHOSTALLOC_WRITECOMBINED`
const WRITECOMBINED: u32 = 4;
/// All of `CU_MEMHOSTREGISTER`: portable, mapped, a device's registers, for reading.
const REGISTER_FLAGS: u32 = 0xf;

/// Allocates device memory in the current context; the caller adds it to `ranges`.
fn allocate(client: &Client, size: usize) -> Result<u64> {
    streams::allowed()?;
    client.take_late_error()?;
    free_postponed()?;
    let ctx = thread::context()?;
    let device = client.device_of(ctx)?.local;
    loop {
        let step = client.window().allocate(ctx, size as u64)?;
        let Step::Map { address, size, slab } = step else {
            let Step::Ready(address) = step else { return Err(OUT_OF_MEMORY) };
            return Ok(address);
        };
        let mapped = client.call(op::ALLOC, |w| {
            w.word(address);
            w.word(size);
            w.word(u64::from(device));
        });
        if let Err(status) = mapped {
            client.window().refused(address, size);
            return Err(status);
        }
        client.window().mapped(ctx, address, size, slab);
        if !slab {
            return Ok(address);
        }
    }
}

/// Addresses that the program freed during a capture.
///
/// A wait for the device would invalidate the capture, so the first allocation or free after it
/// frees them.
static POSTPONED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

fn free_postponed() -> Result {
    if streams::capturing() {
        return Ok(());
    }
    let postponed = std::mem::take(&mut *POSTPONED.lock().unwrap_or_else(PoisonError::into_inner));
    postponed.into_iter().try_for_each(free)
}

/// Runs `work` in the context of device memory; as with the driver, no context need be current.
fn with_owner<T>(range: &Range, work: impl FnOnce(&'static Client) -> Result<T>) -> Result<T> {
    let owner = clients::by_object(range.ctx)?;
    thread::within(range.ctx, || work(owner))
}

/// Waits until no device uses host memory of this client, by copies in either direction.
///
/// Returns the first error, after all waits.
fn host_memory_unused(owner: &'static Client) -> Result {
    let contexts = if streams::at_rest(owner) { Vec::new() } else { owner.contexts() };
    let synced = contexts
        .into_iter()
        .map(|ctx| thread::within(ctx, || streams::wait_for_all(owner)))
        .fold(Ok(()), Result::and);
    let before = owner.link.position() + 1;
    owner.wait_unread(before);
    // After a loss of the link nothing lands any more.
    synced.and(owner.wait_detached(|t| t.seq < before))
}

/// Frees device memory; like the driver, waits until the device does not use it.
fn free(address: u64) -> Result {
    if streams::capturing() {
        ranges::find(address).filter(|r| r.base == address && r.kind.on_device()).ok_or(INVALID_VALUE)?;
        POSTPONED.lock().unwrap_or_else(PoisonError::into_inner).push(address);
        return Ok(());
    }
    if let Some(range) = ranges::find(address).filter(|r| r.base == address && r.kind == Kind::Graph) {
        return with_owner(&range, |client| {
            client.call(op::CTX_SYNC, |_| {})?;
            free_of_graph(client, address, 0).map(|_| ())
        });
    }
    if let Some(range) = ranges::find(address).filter(|r| r.base == address && r.kind == Kind::Imported) {
        return with_owner(&range, |client| {
            client.call(op::CTX_SYNC, |_| {})?;
            pool::free(client, address, 0).map(|_| ())
        });
    }
    let range = ranges::take(address, |k| matches!(k, Kind::Device | Kind::Managed | Kind::Pool(_)))
        .ok_or(INVALID_VALUE)?;
    with_owner(&range, |client| free_of(client, &range))
}

/// Waits until the device uses no memory, before some is freed.
fn wait_for_device(client: &Client) -> Result {
    if streams::at_rest(client) {
        client.link.check().map_err(unavailable)?;
        return client.take_late_error();
    }
    // That all work is complete is not noted: another thread's stream may begin a capture
    // meanwhile, and the worker does not wait for such a stream.
    client.call(op::CTX_SYNC, |_| {}).map(drop)
}

fn free_of(client: &Client, range: &Range) -> Result {
    let address = range.base;
    match range.kind {
        Kind::Managed => {
            wait_for_device(client)?;
            mapped::unmap(range.base)?;
            window::close(range.base, range.size);
        }
        Kind::Pool(_) => {
            wait_for_device(client)?;
            client.post(op::cuMemFreeAsync, |w| {
                w.word(address);
                w.word(0);
            })?;
            return Ok(());
        }
        _ => {}
    }
    let unmap = |(base, size)| {
        let freed = client.call(op::FREE, |w| w.word(base)).map(drop);
        client.window().unmapped(base, size);
        freed
    };
    // The worker waits for the device before it unmaps memory.
    let alone = client.window().free_alone(address)?;
    if let Some(range) = alone {
        return unmap(range);
    }
    // Waits before the address becomes free, because another thread may allocate it at once.
    let synced = wait_for_device(client);
    let range = client.window().free(address)?;
    range.map_or(Ok(()), unmap).and(synced)
}

/// Ends a context with all that belongs to it; `end` ends it on the server.
///
/// `primary` is the primary context of its device. With `wait`, returns when its memory can be
/// allocated again. Without `wait`, host memory stays, because programs that exit may still read
/// it.
pub fn end_context(
    client: &Client,
    ctx: u64,
    primary: u64,
    wait: bool,
    end: impl FnOnce() -> Result,
) -> Result {
    // Before the streams on which the program freed them end.
    let freed = client.free_blocks(op::CTX_DESTROY);
    // The runtime's destructors unload its modules.
    private_tables::forget_context(ctx);
    core_dumps::forget_context(ctx);
    limits::forget_context(ctx);
    streams::forget_context(ctx);
    // The calling thread's current context may have been destroyed by another thread.
    let ended = thread::within(primary, || end_memory(client, ctx, primary, wait, end));
    freed.and(ended)
}

fn end_memory(client: &Client, ctx: u64, primary: u64, wait: bool, end: impl FnOnce() -> Result) -> Result {
    modules::forget_context(ctx);
    let gone = ranges::forget_context(ctx, primary, wait);
    POSTPONED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .retain(|address| !gone.iter().any(|range| range.base == *address));
    let ended = end();
    if wait {
        // Data in transit must not land in memory that is freed below.
        let into = |r: &Range| (r.base as usize, r.size as usize);
        let hosts: Vec<_> = gone.iter().filter(|r| r.kind.on_host()).map(into).collect();
        let landing = |t: &Detached| t.on.ctx == ctx || hosts.iter().any(|(base, len)| t.fills(*base, *len));
        // After a loss of the link nothing lands any more.
        let _ = client.wait_detached(landing);
    }
    let mut unmapped = Vec::new();
    for range in &gone {
        if range.kind.on_host() {
            // Fails if the link is lost, and then the mirror is, too.
            let _ = mapped::unmap(range.base);
        }
        match range.kind {
            Kind::Host(_) => client.window().free_host(range.base, range.size),
            Kind::Managed => window::close(range.base, range.size),
            _ => {}
        }
        if matches!(range.kind, Kind::Device | Kind::Managed) {
            unmapped.extend(client.window().free(range.base)?);
        }
    }
    // The context has ended, so the server need not wait before it frees the memory.
    let body = |base: u64| {
        move |w: &mut Writer<'_>| {
            w.word(base);
            w.word(1);
        }
    };
    let last = if wait { unmapped.pop() } else { None };
    for (base, _) in &unmapped {
        client.post(op::FREE, body(*base))?;
    }
    if let Some((base, size)) = last {
        client.ask(op::FREE, body(base))?;
        // Only this reply proves that the server has freed the addresses; without `wait` they stay
        // unused.
        unmapped.push((base, size));
        unmapped.iter().for_each(|(base, size)| client.window().unmapped(*base, *size));
    }
    ended
}

/// `CU_MEMHOSTALLOC_DEVICEMAP`
const DEVICE_MAP: u32 = 2;

fn host_allocate(client: &'static Client, size: usize, flags: u32) -> Result<u64> {
    streams::allowed()?;
    client.take_late_error()?;
    let ctx = thread::context()?;
    if size == 0 {
        return Err(INVALID_VALUE);
    }
    let address = client.window().allocate_host(size as u64)?;
    ranges::add(address, size as u64, Kind::Host(flags), ctx);
    if flags & DEVICE_MAP != 0 {
        // Kernels may read its address from device memory, which launches do not search, so it is
        // mapped now. Without room in the worker, it is mapped when a kernel's parameter names it.
        match mapped::map(client, address, size as u64) {
            Ok(_) | Err(OUT_OF_MEMORY) => {}
            Err(status) => {
                ranges::take(address, |_| true);
                client.window().free_host(address, size as u64);
                return Err(status);
            }
        }
    }
    Ok(address)
}

/// Returns the size of a pool's attribute: `CU_MEMPOOL_ATTR_REUSE_*` are `int`, others
/// `cuuint64_t`.
fn pool_attribute_size(attribute: i32) -> usize {
    // Switches, kinds of memory and of handles, the location, and decompression by hardware.
    if matches!(attribute, 1..=3 | 9..=12 | 14) { 4 } else { 8 }
}

driver! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let client = clients::get()?;
        thread::context()?;
        let reply = client.call(op::MEM_INFO, |_| {})?;
        let mut r = reply.reader();
        let (left, all) = (word(&mut r)?, word(&mut r)?);
        give_optional(free, left as usize);
        give_optional(total, all as usize);
        Ok(())
    }

    fn cuMemAlloc_v2(address: *mut u64, size: usize) {
        let client = clients::get()?;
        if address.is_null() {
            return Err(INVALID_VALUE);
        }
        let new = allocate(client, size)?;
        ranges::add(new, size as u64, Kind::Device, thread::current());
        give(address, new)
    }

    fn cuMemAllocPitch_v2(address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) {
        const PITCH: usize = 512;
        let client = clients::get()?;
        if address.is_null() || pitch.is_null() || !matches!(element, 4 | 8 | 16) {
            return Err(INVALID_VALUE);
        }
        let row = width.checked_next_multiple_of(PITCH).ok_or(INVALID_VALUE)?;
        let size = row.checked_mul(height).ok_or(INVALID_VALUE)?;
        let new = allocate(client, size)?;
        ranges::add(new, size as u64, Kind::Device, thread::current());
        give(pitch, row)?;
        give(address, new)
    }

    fn cuMemFree_v2(address: u64) {
        clients::get()?;
        if address == 0 {
            return Ok(());
        }
        streams::allowed()?;
        free_postponed()?;
        free(address)
    }

    fn cuMemHostAlloc(pointer: *mut *mut c_void, size: usize, flags: u32) {
        if pointer.is_null() || flags & !(PORTABLE | DEVICEMAP | WRITECOMBINED) != 0 {
            return Err(INVALID_VALUE);
        }
        give(pointer, host_allocate(clients::get()?, size, flags)? as *mut c_void)
    }

    fn cuMemAllocHost_v2(pointer: *mut *mut c_void, size: usize) {
        if pointer.is_null() {
            return Err(INVALID_VALUE);
        }
        // As the driver, returns a null pointer for a size of 0.
        if size == 0 {
            clients::get()?;
            return give(pointer, std::ptr::null_mut());
        }
        give(pointer, host_allocate(clients::get()?, size, 0)? as *mut c_void)
    }

    fn cuMemFreeHost(pointer: *mut c_void) {
        clients::get()?;
        if pointer.is_null() {
            return Ok(());
        }
        streams::allowed()?;
        let range = ranges::take(pointer as u64, |k| matches!(k, Kind::Host(_))).ok_or(INVALID_VALUE)?;
        let owner = clients::by_object(range.ctx)?;
        let synced = host_memory_unused(owner);
        mapped::unmap(range.base)?;
        owner.window().free_host(range.base, range.size);
        synced
    }

    fn cuMemPoolGetAttribute(pool: *mut c_void, attribute: i32, value: *mut c_void) {
        let client = clients::by_object(pool as u64)?;
        let size = pool_attribute_size(attribute);
        if value.is_null() {
            return Err(INVALID_VALUE);
        }
        let reply = client.call(op::cuMemPoolGetAttribute, |w| {
            w.word(client.own(pool as u64));
            w.word(u64::from(attribute as u32));
        })?;
        let mut reader = reply.reader();
        let told = string(&mut reader)?.get(..size).ok_or(UNKNOWN)?;
        // SAFETY: the pointer is not null, and by the call's contract the variable is as large as
        // the attribute.
        unsafe { std::ptr::copy_nonoverlapping(told.as_ptr(), value.cast(), size) };
        Ok(())
    }

    fn cuMemPoolSetAttribute(pool: *mut c_void, attribute: i32, value: *mut c_void) {
        let client = clients::by_object(pool as u64)?;
        let mut padded = [0; 8];
        let given = bytes(value, pool_attribute_size(attribute))?;
        padded[..given.len()].copy_from_slice(given);
        client.call(op::cuMemPoolSetAttribute, |w| {
            w.word(client.own(pool as u64));
            w.word(u64::from(attribute as u32));
            w.bytes(&padded);
        })?;
        Ok(())
    }

    fn cuMemHostRegister_v2(pointer: *mut c_void, size: usize, flags: u32) {
        clients::get()?;
        let ctx = thread::context()?;
        streams::allowed()?;
        if pointer.is_null() || size == 0 || flags & !REGISTER_FLAGS != 0 {
            return Err(INVALID_VALUE);
        }
        if ranges::overlaps(pointer as u64, size as u64) {
            return Err(HOST_MEMORY_ALREADY_REGISTERED);
        }
        ranges::add(pointer as u64, size as u64, Kind::Registered(flags), ctx);
        Ok(())
    }

    fn cuMemHostUnregister(pointer: *mut c_void) {
        clients::get()?;
        streams::allowed()?;
        let registered = ranges::take(pointer as u64, |k| matches!(k, Kind::Registered(_)));
        host_memory_unused(clients::by_object(registered.ok_or(HOST_MEMORY_NOT_REGISTERED)?.ctx)?)?;
        mapped::unmap(pointer as u64)
    }

    fn cuMemHostGetDevicePointer_v2(address: *mut u64, pointer: *mut c_void, flags: u32) {
        let client = clients::get()?;
        let range = ranges::find(pointer as u64).filter(|r| r.kind.on_host() && flags == 0).ok_or(INVALID_VALUE)?;
        let device = mapped::map(client, range.base, range.size)?;
        give(address, device + (pointer as u64 - range.base))
    }

    fn cuMemHostGetFlags(flags: *mut u32, pointer: *mut c_void) {
        clients::get()?;
        match ranges::find(pointer as u64).map(|r| r.kind) {
            // Under unified addressing all pinned memory is mapped. (For small allocations the
            // driver reports flags of the block that it takes them from.)
            Some(Kind::Host(known) | Kind::Registered(known)) => give(flags, known | DEVICEMAP),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Allocates memory with one address on both sides.
    ///
    /// The device uses the server's copy, exchanged at launches and synchronizations.
    fn cuMemAllocManaged(address: *mut u64, size: usize, flags: u32) {
        let client = clients::get()?;
        let ctx = thread::context()?;
        if address.is_null() || size == 0 || !matches!(flags, 1 | 2 | 4) {
            return Err(INVALID_VALUE);
        }
        streams::allowed()?;
        client.take_late_error()?;
        free_postponed()?;
        let (base, len) = client.window().allocate_whole(size as u64)?;
        let device = client.device_of(ctx)?.local;
        let made = client.call(op::ALLOC, |w| {
            w.word(base);
            w.word(len);
            w.word(u64::from(device));
        });
        if let Err(status) = made {
            client.window().refused(base, len);
            return Err(status);
        }
        client.window().mapped(ctx, base, len, false);
        ranges::add(base, size as u64, Kind::Managed, ctx);
        let shown = window::open(base, size as u64).and_then(|()| mapped::map_managed(client, base, size as u64));
        if let Err(status) = shown {
            free(base)?;
            return Err(status);
        }
        give(address, base)
    }

    fn cuMemAllocAsync / cuMemAllocAsync_ptsz [default] (address: *mut u64, size: usize, stream: *mut c_void) {
        allocate_ordered(address, size, None, stream, default)
    }

    fn cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz [default] (
        address: *mut u64, size: usize, pool: *mut c_void, stream: *mut c_void,
    ) {
        allocate_ordered(address, size, Some(pool as u64), stream, default)
    }

    fn cuMemFreeAsync / cuMemFreeAsync_ptsz [default] (address: u64, stream: *mut c_void) {
        let (client, stream) = find(stream, default)?;
        stream.usable()?;
        if stream.capture().is_none() {
            streams::allowed()?;
        }
        // As the driver answers (H100, driver 580): cuSPARSE frees pointers that it never
        // allocated.
        if address == 0 {
            return Ok(());
        }
        let range = ranges::find(address).filter(|r| r.base == address).ok_or(INVALID_VALUE)?;
        if range.kind == Kind::Device {
            // Memory of `cuMemAlloc` may be freed in a stream's order, too: after a wait for the
            // stream.
            client.call(op::STREAM_SYNC, |w| w.word(stream.handle))?;
            return free(address);
        }
        if range.server() != client.number {
            // The other lease's server cannot wait for this stream, so the call does.
            stream.synchronize()?;
            return free(address);
        }
        if range.kind == Kind::Graph {
            stream.worked(free_of_graph(client, address, stream.handle)?);
            return client.take_late_error();
        }
        if range.kind == Kind::Imported {
            stream.worked(pool::free(client, address, stream.handle)?);
            return client.take_late_error();
        }
        let range = ranges::take(address, |k| matches!(k, Kind::Pool(_))).ok_or(INVALID_VALUE)?;
        if !keep_freed(&range, &stream) {
            free_ordered(address, &stream)?;
        }
        client.take_late_error()
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64) {
        clients::get()?;
        thread::context()?;
        let range = ranges::find(address).filter(|r| r.kind.on_device()).ok_or(crate::entry::NOT_FOUND)?;
        give_optional(base, range.base);
        give_optional(size, range.size as usize);
        Ok(())
    }

    fn cuPointerGetAttribute(data: *mut c_void, attribute: i32, address: u64) {
        clients::get()?;
        if data.is_null() {
            return Err(INVALID_VALUE);
        }
        // The program may pass the address on without another call that names it. In questions
        // about several attributes, which runtimes ask about every pointer, that costs too much.
        if attribute == attribute::DEVICE_POINTER
            && let Some(range) = ranges::find(address).filter(|range| matches!(range.kind, Kind::Host(_)))
        {
            match mapped::map(clients::by_object(range.ctx)?, range.base, range.size) {
                // A use by a kernel tries again.
                Ok(_) | Err(OUT_OF_MEMORY) => {}
                Err(status) => return Err(status),
            }
        }
        pointer_attribute(data, attribute, address)
    }

    fn cuPointerGetAttributes(count: u32, attributes: *const i32, data: *const *mut c_void, address: u64) {
        clients::get()?;
        if attributes.is_null() || data.is_null() {
            return Err(INVALID_VALUE);
        }
        for i in 0..count as usize {
            // SAFETY: the pointers are not null, and by the call's contract both arrays have
            // `count` elements.
            let (attribute, target) = unsafe { (attributes.add(i).read(), data.add(i).read()) };
            if target.is_null() {
                return Err(INVALID_VALUE);
            }
            // As the driver, gives attributes that do not apply to the pointer their null value.
            match pointer_attribute(target, attribute, address) {
                Ok(()) => {}
                Err(_) => zero_attribute(target, attribute),
            }
        }
        Ok(())
    }

    fn cuPointerSetAttribute(value: *const c_void, attribute: i32, address: u64) {
        clients::get()?;
        if value.is_null() || attribute != attribute::SYNC_MEMOPS {
            return Err(INVALID_VALUE);
        }
        let synchronous = take(value.cast::<u32>())? != 0;
        if ranges::set_synchronous(address, synchronous) { Ok(()) } else { Err(INVALID_VALUE) }
    }

    /// Not supported: no network card writes to the GPU's memory.
    fn cuFlushGPUDirectRDMAWrites(target: i32, scope: i32) {
        clients::get()?;
        thread::context()?;
        // The current context, and its device or all of them.
        Err(if target == 0 && matches!(scope, 100 | 200) { NOT_SUPPORTED } else { INVALID_VALUE })
    }
}

/// Frees memory that a graph's launch has allocated; the next launch may allocate it again.
///
/// Only the driver knows whether it exists now, so the call waits. Returns the frame's position.
fn free_of_graph(client: &Client, address: u64, stream: u64) -> Result<u64> {
    client.post_if(false, op::cuMemFreeAsync, |w| {
        w.word(address);
        w.word(stream);
    })
}

/// Keeps a pool's block for the stream's next allocation; `false`: the worker has to free it.
///
/// The worker must see a free or an allocation that orders streams: those that follow newer work of
/// other streams.
fn keep_freed(range: &Range, stream: &streams::Stream) -> bool {
    let Kind::Pool(pool) = range.kind else { return false };
    if streams::capturing() || streams::shares_memory() || range.ctx != stream.ctx || !stream.is_newest() {
        return false;
    }
    let block = Block { stream: (stream.ctx, stream.handle), pool, size: range.size, base: range.base };
    stream.client.freed.add(block)
}

fn free_ordered(address: u64, stream: &streams::Stream) -> Result {
    let seq = stream.client.post(op::cuMemFreeAsync, |w| {
        w.word(address);
        w.word(stream.handle);
    })?;
    stream.worked(seq);
    Ok(())
}

fn allocate_ordered(
    address: *mut u64,
    size: usize,
    pool: Option<u64>,
    stream: *mut c_void,
    default: streams::Default,
) -> Result {
    let (client, stream) = find(stream, default)?;
    stream.usable()?;
    if stream.capture().is_none() {
        streams::allowed()?;
    }
    if address.is_null() {
        return Err(INVALID_VALUE);
    }
    if let Some(pool) = pool {
        client.same(clients::by_object(pool)?)?;
    }
    if size == 0 {
        return give(address, 0);
    }
    let name = client.pool_name(pool);
    if !client.freed.is_empty() && stream.capture().is_none() && stream.is_newest() {
        client.take_late_error()?;
        if let Some(base) = client.freed.take((stream.ctx, stream.handle), name, size as u64) {
            ranges::add(base, size as u64, Kind::Pool(name), stream.ctx);
            return give(address, base);
        }
    }
    let op = if pool.is_some() { op::cuMemAllocFromPoolAsync } else { op::cuMemAllocAsync };
    let mut seq = 0;
    let reply = client.call(op, |w| {
        seq = w.seq();
        w.word(size as u64);
        if let Some(pool) = pool {
            w.word(client.own(pool));
        }
        w.word(stream.handle);
    })?;
    // A synchronization of the stream waits for the allocation, and for all work before it.
    if stream.capture().is_none() {
        stream.worked(seq);
    }
    let new = word(&mut reply.reader())?;
    if let Err(status) = client.claims.claim("memory of a pool", new, size as u64) {
        free_ordered(new, &stream)?;
        return Err(status);
    }
    // During a capture the call becomes a node.
    let kind = if stream.capture().is_some() { Kind::Graph } else { Kind::Pool(name) };
    ranges::add(new, size as u64, kind, stream.ctx);
    give(address, new)
}

/// `CUpointer_attribute` values.
mod attribute {
    pub const CONTEXT: i32 = 1;
    pub const MEMORY_TYPE: i32 = 2;
    pub const DEVICE_POINTER: i32 = 3;
    pub const HOST_POINTER: i32 = 4;
    pub const SYNC_MEMOPS: i32 = 6;
    pub const BUFFER_ID: i32 = 7;
    pub const IS_MANAGED: i32 = 8;
    pub const DEVICE_ORDINAL: i32 = 9;
    pub const IS_LEGACY_IPC: i32 = 10;
    pub const RANGE_START: i32 = 11;
    pub const RANGE_SIZE: i32 = 12;
    pub const MAPPED: i32 = 13;
    pub const ALLOWED_HANDLES: i32 = 14;
    pub const IS_GDR: i32 = 15;
    pub const ACCESS: i32 = 16;
    pub const MEMPOOL: i32 = 17;
    pub const MAPPING_SIZE: i32 = 18;
    pub const MAPPING_BASE: i32 = 19;
    pub const MEMORY_BLOCK_ID: i32 = 20;
}

fn pointer_attribute(target: *mut c_void, which: i32, address: u64) -> Result {
    use attribute::*;
    const TYPE_HOST: u32 = 1;
    const TYPE_DEVICE: u32 = 2;
    const ACCESS_READ_WRITE: u32 = 3;
    // Registered memory has two addresses, and is the host's by either.
    let behind = || mapped::behind(clients::get().ok()?, address);
    let (range, host) = match ranges::find(address) {
        None => behind().map_or((None, address), |(range, host)| (Some(range), host)),
        known => (known, address),
    };
    // Runtimes read booleans as 32-bit words.
    if which == IS_MANAGED {
        return give(target.cast(), u32::from(range.is_some_and(|r| r.kind.managed())));
    }
    let range = range.ok_or(INVALID_VALUE)?;
    match which {
        // The program's own mappings and memory of pools belong to no context (H200, driver 580).
        CONTEXT if matches!(range.kind, Kind::Mapped | Kind::Pool(_)) => give(target.cast(), 0u64),
        CONTEXT => give(target.cast(), range.ctx),
        MEMORY_TYPE => give(target.cast(), if range.kind.on_device() { TYPE_DEVICE } else { TYPE_HOST }),
        // Pinned memory of the arena has one address on both sides; its first use maps it.
        DEVICE_POINTER if range.kind.on_device() || matches!(range.kind, Kind::Host(_)) => {
            give(target.cast(), address)
        }
        DEVICE_POINTER if host != address => give(target.cast(), address),
        DEVICE_POINTER => {
            let device = mapped::map(clients::by_object(range.ctx)?, range.base, range.size)?;
            give(target.cast(), device + (address - range.base))
        }
        HOST_POINTER if range.kind.on_host() => give(target.cast(), host),
        SYNC_MEMOPS => give(target.cast(), u32::from(range.synchronous)),
        BUFFER_ID | MEMORY_BLOCK_ID => give(target.cast(), range.id),
        DEVICE_ORDINAL => give(target.cast(), clients::of_context(range.ctx)?.1.ordinal),
        IS_LEGACY_IPC => give(target.cast(), u32::from(range.kind == Kind::Device)),
        IS_GDR => give(target.cast(), 0u32),
        RANGE_START | MAPPING_BASE => give(target.cast(), range.base),
        RANGE_SIZE | MAPPING_SIZE => give(target.cast(), range.size),
        MAPPED => give(target.cast(), 1u32),
        ALLOWED_HANDLES if range.kind == Kind::Mapped => {
            give(target.cast(), vmm::handle_types(clients::by_object(range.ctx)?, &range)?)
        }
        ALLOWED_HANDLES => give(target.cast(), 0u64),
        MEMPOOL => give(target.cast(), pool_of(&range)?),
        ACCESS => give(target.cast(), ACCESS_READ_WRITE),
        _ => Err(INVALID_VALUE),
    }
}

/// Returns the handle of the pool that memory is from, or 0.
///
/// Also 0 if another pool has become the device's current one since.
fn pool_of(range: &Range) -> Result<u64> {
    /// Numbers from here on stand for a current pool (see `Client::pool_name`).
    const CURRENT: u64 = 1 << 63;
    let Kind::Pool(name) = range.kind else { return Ok(0) };
    let client = clients::by_object(range.ctx)?;
    if name < CURRENT {
        return Ok(name);
    }
    if name != client.pool_name(None) {
        return Ok(0);
    }
    let device = client.device_of(range.ctx)?.local;
    let reply = client.call(op::cuDeviceGetMemPool, |w| w.word(u64::from(device)))?;
    Ok(client.name(word(&mut reply.reader())?))
}

fn zero_attribute(target: *mut c_void, which: i32) {
    use attribute::*;
    // The caller has checked the pointer; each attribute has the width that cuda.h gives it.
    match which {
        SYNC_MEMOPS | IS_MANAGED | IS_LEGACY_IPC | MAPPED | IS_GDR | MEMORY_TYPE | ACCESS => {
            give_optional(target.cast(), 0u32)
        }
        DEVICE_ORDINAL => give_optional(target.cast(), -2i32),
        _ => give_optional(target.cast(), 0u64),
    }
}

alias! {
    cuMemHostRegister = cuMemHostRegister_v2(pointer: *mut c_void, size: usize, flags: u32);
}
