//! Green contexts, which divide a device's multiprocessors; events of all streams of a context.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpusession_link::link::Begun;
use gpusession_proto::frame::{Writer, op};
use gpusession_proto::handle;

use super::event::wait_here;
use crate::client::{Client, ContextInfo, string, unavailable, word};
use crate::entry::{
    INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, Result, STREAM_CAPTURE_UNSUPPORTED, UNKNOWN, bytes,
    driver, give, give_optional, take,
};
use crate::stream::Stream;
use crate::streams::{self, find};
use crate::thread::named;
use crate::{clients, core_dumps, events, handles, limits, private_tables, ranges, thread};

/// Bytes of a `CUdevResource`.
const RESOURCE: usize = 144;
type Resource = [u8; RESOURCE];
/// `CU_DEV_SM_RESOURCE_GROUP_PARAMS`
type Demand = [u32; 16];
/// Groups of one division at most.
const MAX_GROUPS: u32 = 1024;
/// `CU_GREEN_CTX_DEFAULT_STREAM`, which a program must set.
const DEFAULT_STREAM: u32 = 1;
/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;

/// One green context.
#[derive(Clone, Copy)]
struct Green {
    client: &'static Client,
    device: u32,
    /// Its handle as a context.
    ctx: u64,
}

static GREENS: Mutex<BTreeMap<u64, Green>> = Mutex::new(BTreeMap::new());

fn greens() -> MutexGuard<'static, BTreeMap<u64, Green>> {
    GREENS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn green(handle: *mut c_void) -> Result<Green> {
    clients::get()?;
    greens().get(&(handle as u64)).copied().ok_or(INVALID_CONTEXT)
}

/// Returns the handle of the green context that a context stands for, and its primary context.
pub fn of_context(ctx: u64) -> Option<(u64, u64)> {
    let greens = greens();
    let (handle, green) = greens.iter().find(|(_, green)| green.ctx == ctx)?;
    Some((*handle, green.client.primary(green.device)))
}

/// Subjects of `DEV_RESOURCE`.
mod subject {
    pub const DEVICE: u64 = 0;
    pub const CONTEXT: u64 = 1;
    pub const GREEN: u64 = 2;
    pub const STREAM: u64 = 3;
}

fn resource(client: &Client, subject: u64, which: u64, target: *mut Resource, kind: i32) -> Result {
    if target.is_null() {
        return Err(INVALID_VALUE);
    }
    let reply = client.call(op::DEV_RESOURCE, |w| {
        w.word(subject);
        w.word(which);
        w.word(kind as u32 as u64);
    })?;
    give(target, parse_resource(string(&mut reply.reader())?)?)
}

fn parse_resource(resource: &[u8]) -> Result<Resource> {
    resource.try_into().map_err(|_| UNKNOWN)
}

/// Contexts whose streams a synchronization or an event of a context means, and its client.
///
/// A primary context includes its green contexts.
pub(super) fn meant(ctx: u64) -> Result<(&'static Client, Vec<u64>)> {
    let (client, device) = clients::of_context(ctx)?;
    let mut contexts = vec![ctx];
    if ctx == client.primary(device.local) {
        let same = |green: &&Green| green.client.number == client.number && green.device == device.local;
        contexts.extend(greens().values().filter(same).map(|green| green.ctx));
    }
    Ok((client, contexts))
}

/// Sends a frame that records an event for a context, or lets a context wait for it.
///
/// `name` is the handle of the context or of the green context. [`finish`] waits for the reply.
fn send(client: &Client, name: u64, event: u64, waits: bool) -> Result<Begun> {
    let body = |w: &mut Writer<'_>| {
        w.word(handle::local(name));
        w.word(event);
        w.word(u64::from(waits));
    };
    client.link.begin_call(op::CTX_EVENT, client.caller(), body).map_err(unavailable)
}

fn finish(client: &Client, begun: Begun) -> Result {
    let reply = client.finish(begun)?;
    client.check_status(reply.status)
}

fn record(name: u64, ctx: u64, event: *mut c_void) -> Result {
    let (client, contexts) = meant(ctx)?;
    let event = events::find(event as u64)?;
    if event.client.number != client.number {
        return Err(INVALID_HANDLE);
    }
    streams::context_sync_allowed(ctx)?;
    client.free_blocks(op::CTX_EVENT)?;
    // Not during the wait for the reply: other threads use the event meanwhile.
    let order = event.order();
    let begun = send(client, name, event.handle, false)?;
    let seq = begun.seq;
    let covers = streams::of_contexts(&contexts).iter().flat_map(|stream| stream.covers(seq)).collect();
    // A stream that no call names: only waits for the event complete its work.
    let together = Arc::new(Stream::new(client, u64::MAX - 1, ctx, NON_BLOCKING, 0, 0));
    together.worked(seq);
    event.record_all(together, seq, covers);
    drop(order);
    finish(client, begun)
}

fn wait(name: u64, ctx: u64, event: *mut c_void) -> Result {
    let (client, contexts) = meant(ctx)?;
    let event = events::find(event as u64)?;
    if event.client.number != client.number {
        // A server cannot wait for another one, so the call itself waits.
        return wait_here(&event);
    }
    if let Some(capture) = event.capture() {
        capture.invalidate();
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    streams::context_sync_allowed(ctx)?;
    client.free_blocks(op::CTX_EVENT)?;
    let order = event.order();
    let begun = send(client, name, event.handle, true)?;
    let seq = begun.seq;
    let pending = event.pending().is_some() && streams::tracking(client);
    for stream in streams::of_contexts(&contexts) {
        if pending {
            stream.positions.covers_also(&event.covers_before(seq), seq);
        }
        stream.worked(seq);
    }
    drop(order);
    finish(client, begun)
}

driver! {
    fn cuDeviceGetDevResource(device: i32, target: *mut Resource, kind: i32) {
        let (client, device) = clients::device(device)?;
        resource(client, subject::DEVICE, u64::from(device.local), target, kind)
    }

    fn cuCtxGetDevResource(ctx: *mut c_void, target: *mut Resource, kind: i32) {
        let ctx = named(ctx)?;
        resource(clients::of_context(ctx)?.0, subject::CONTEXT, handle::local(ctx), target, kind)
    }

    fn cuGreenCtxGetDevResource(ctx: *mut c_void, target: *mut Resource, kind: i32) {
        resource(green(ctx)?.client, subject::GREEN, handle::local(ctx as u64), target, kind)
    }

    fn cuStreamGetDevResource / cuStreamGetDevResource_ptsz [default] (
        stream: *mut c_void, target: *mut Resource, kind: i32,
    ) {
        let (client, stream) = find(stream, default)?;
        stream.usable()?;
        resource(client, subject::STREAM, stream.handle, target, kind)
    }

    fn cuDevSmResourceSplit(
        groups: *mut Resource, count: u32, input: *const Resource, rest: *mut Resource, flags: u32, demands: *mut Demand,
    ) {
        let client = clients::get()?;
        let input = take(input)?;
        if count == 0 || count > MAX_GROUPS || demands.is_null() {
            return Err(INVALID_VALUE);
        }
        let len = count as usize * size_of::<Demand>();
        let asked = bytes(demands.cast(), len)?;
        let reply = client.call(op::DEV_RESOURCE_GROUPS, |w| {
            w.bytes(&input);
            w.word(u64::from(!groups.is_null()));
            w.word(u64::from(flags));
            w.bytes(asked);
        })?;
        let mut r = reply.reader();
        let completed = string(&mut r)?;
        if completed.len() != len {
            return Err(UNKNOWN);
        }
        // SAFETY: by the call's contract the array has `count` elements, which is the length.
        unsafe { demands.cast::<u8>().copy_from_nonoverlapping(completed.as_ptr(), len) };
        give_optional(rest, parse_resource(string(&mut r)?)?);
        for i in 0..if groups.is_null() { 0 } else { count as usize } {
            let group = parse_resource(string(&mut r)?)?;
            // SAFETY: by the call's contract the array has `count` elements, which bounds `i`.
            unsafe { groups.add(i).write_unaligned(group) };
        }
        Ok(())
    }

    fn cuDevSmResourceSplitByCount(
        groups: *mut Resource, count: *mut u32, input: *const Resource, rest: *mut Resource, flags: u32, least: u32,
    ) {
        let client = clients::get()?;
        let input = take(input)?;
        let most = take(count)?;
        if !groups.is_null() && most > MAX_GROUPS {
            return Err(INVALID_VALUE);
        }
        let reply = client.call(op::DEV_RESOURCE_SPLIT, |w| {
            w.bytes(&input);
            w.word(u64::from(!groups.is_null()));
            w.word(u64::from(most));
            w.word(u64::from(flags));
            w.word(u64::from(least));
        })?;
        let mut r = reply.reader();
        let made = word(&mut r)? as u32;
        give_optional(rest, parse_resource(string(&mut r)?)?);
        if !groups.is_null() {
            for i in 0..made.min(most) as usize {
                let group = parse_resource(string(&mut r)?)?;
                // SAFETY: by the call's contract the array has `most` elements, which bounds `i`.
                unsafe { groups.add(i).write_unaligned(group) };
            }
        }
        give(count, made)
    }

    fn cuDevResourceGenerateDesc(description: *mut *mut c_void, resources: *const c_void, count: u32) {
        let client = clients::get()?;
        if description.is_null() || count == 0 || count > MAX_GROUPS {
            return Err(INVALID_VALUE);
        }
        let resources = bytes(resources, count as usize * RESOURCE)?;
        let new = client.mint(handle::RESOURCE_DESC);
        let made = client.call(op::DEV_RESOURCE_DESC, |w| {
            w.word(handle::local(new));
            w.bytes(resources);
        });
        made.inspect_err(|_| handles::retire(new))?;
        give(description, new as *mut c_void)
    }

    fn cuGreenCtxCreate(target: *mut *mut c_void, description: *mut c_void, device: i32, flags: u32) {
        let (client, device) = clients::device(device)?;
        if target.is_null() || flags != DEFAULT_STREAM || handle::kind(description as u64) != handle::RESOURCE_DESC {
            return Err(INVALID_VALUE);
        }
        client.same(clients::by_object(description as u64)?)?;
        core_dumps::before_context(client, 0);
        let (new, ctx) = (client.mint(handle::GREEN), client.mint(handle::CTX));
        let made = client.call(op::GREEN_CREATE, |w| {
            w.word(handle::local(new));
            w.word(handle::local(ctx));
            w.word(handle::local(description as u64));
            w.word(u64::from(device.local));
            w.word(u64::from(flags));
        });
        made.inspect_err(|_| {
            handles::retire(new);
            handles::retire(ctx);
        })?;
        let info = ContextInfo { device: device.local, flags: 0, version: 3020, users: 1 };
        client.created.write().unwrap_or_else(PoisonError::into_inner).insert(ctx, info);
        greens().insert(new, Green { client, device: device.local, ctx });
        give(target, new as *mut c_void)
    }

    fn cuGreenCtxDestroy(handle: *mut c_void) {
        let Green { client, device, ctx } = green(handle)?;
        greens().remove(&(handle as u64));
        thread::forget(ctx);
        private_tables::forget_context(ctx);
        core_dumps::forget_context(ctx);
        limits::forget_context(ctx);
        ranges::adopt(ctx, client.primary(device));
        client.created.write().unwrap_or_else(PoisonError::into_inner).remove(&ctx);
        let destroyed = client.call(op::GREEN_DESTROY, |w| w.word(handle::local(handle as u64)));
        handles::retire(handle as u64);
        handles::retire(ctx);
        destroyed.map(drop)
    }

    fn cuCtxFromGreenCtx(ctx: *mut *mut c_void, handle: *mut c_void) {
        give(ctx, green(handle)?.ctx as *mut c_void)
    }

    /// Null means the green context that is current.
    fn cuGreenCtxGetId(handle: *mut c_void, id: *mut u64) {
        let ctx = if handle.is_null() {
            let current = thread::context()?;
            of_context(current).map(|_| current).ok_or(INVALID_CONTEXT)?
        } else {
            green(handle)?.ctx
        };
        give(id, private_tables::context_id(ctx))
    }

    fn cuGreenCtxStreamCreate(stream: *mut *mut c_void, handle: *mut c_void, flags: u32, priority: i32) {
        let Green { client, ctx, .. } = green(handle)?;
        if stream.is_null() || flags != NON_BLOCKING {
            return Err(INVALID_VALUE);
        }
        give(stream, thread::within(ctx, || streams::create(client, ctx, flags, priority))? as *mut c_void)
    }

    fn cuStreamGetGreenCtx(stream: *mut c_void, target: *mut *mut c_void) {
        let ctx = find(stream, streams::Default::Legacy)?.1.ctx;
        give(target, of_context(ctx).map_or(0, |(green, _)| green) as *mut c_void)
    }

    fn cuStreamGetCtx_v2 / cuStreamGetCtx_v2_ptsz [default] (
        stream: *mut c_void, ctx: *mut *mut c_void, target: *mut *mut c_void,
    ) {
        let known = find(stream, default)?.1.ctx;
        let (green, known) = of_context(known).unwrap_or((0, known));
        give(ctx, known as *mut c_void)?;
        give(target, green as *mut c_void)
    }

    fn cuGreenCtxRecordEvent(handle: *mut c_void, event: *mut c_void) {
        record(handle as u64, green(handle)?.ctx, event)
    }

    fn cuGreenCtxWaitEvent(handle: *mut c_void, event: *mut c_void) {
        wait(handle as u64, green(handle)?.ctx, event)
    }

    fn cuCtxRecordEvent(ctx: *mut c_void, event: *mut c_void) {
        let ctx = named(ctx)?;
        record(ctx, ctx, event)
    }

    fn cuCtxWaitEvent(ctx: *mut c_void, event: *mut c_void) {
        let ctx = named(ctx)?;
        wait(ctx, ctx, event)
    }
}
