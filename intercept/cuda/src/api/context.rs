//! Contexts; the library knows the calling thread's stack and each context's properties.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{PoisonError, RwLockWriteGuard};

use gpusession_common::context_calls::Broken;
use gpusession_link::link::Caller;
use gpusession_proto::frame::op;
use gpusession_proto::handle;

use super::device::{check_flags, wait_as};
use super::green;
use crate::client::{Client, ContextInfo, unavailable, word};
use crate::devices::Device;
use crate::entry::{
    CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_VALUE, PEER_ACCESS_UNSUPPORTED, Result,
    UNSUPPORTED_EXEC_AFFINITY, alias, driver, give, give_optional, take,
};
use crate::thread::named;
use crate::{
    clients, core_dumps, faulted, handles, host_functions, limits, private_tables, regions, streams, thread,
};

fn create(ctx: *mut *mut c_void, flags: u32, device: i32, version: u32) -> Result {
    let (client, device) = clients::device(device)?;
    if ctx.is_null() {
        return Err(INVALID_VALUE);
    }
    // After a fault no context of the process works.
    if let Some(fault) = client.fault() {
        return Err(fault);
    }
    client.take_late_error()?;
    core_dumps::before_context(client, flags);
    let new = client.mint(handle::CTX);
    client.call(op::CTX_CREATE, |w| {
        w.word(handle::local(new));
        w.word(u64::from(flags));
        w.word(u64::from(device.local));
    })?;
    wait_as(client, flags);
    let created = ContextInfo { device: device.local, flags, version, users: 1 };
    writing(client).insert(new, created);
    thread::push(new);
    give(ctx, new as *mut c_void)
}

/// Returns `true` for a context that a reset or its last release has destroyed.
fn was_reset(ctx: u64) -> bool {
    faulted::broken(ctx).is_some_and(|broken| !matches!(broken, Broken::Fault(_)))
}

/// `CUctxCreateParams`: execution affinities, their number, and parameters for graphics; zeros mean
/// none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CreateParams {
    affinity: *const c_void,
    count: i32,
    graphics: *const c_void,
}

/// Refuses execution affinities, as a driver does for a device without them.
fn no_affinity(affinity: *const c_void, count: i32) -> Result {
    match count {
        0 => Ok(()),
        1.. if !affinity.is_null() => Err(UNSUPPORTED_EXEC_AFFINITY),
        _ => Err(INVALID_VALUE),
    }
}

/// Checks that a handle is that of a context, which may be destroyed: a driver refuses only work
/// there (H200, driver 580).
fn known(ctx: u64) -> Result {
    match clients::of_context(ctx) {
        Ok(_) | Err(CONTEXT_IS_DESTROYED) => Ok(()),
        Err(status) => Err(status),
    }
}

/// Returns the current context's client and device.
fn current() -> Result<(&'static Client, &'static Device)> {
    clients::get()?;
    clients::of_context(thread::context()?)
}

/// Locks the client's created contexts to change them.
fn writing(client: &Client) -> RwLockWriteGuard<'_, HashMap<u64, ContextInfo>> {
    client.created.write().unwrap_or_else(PoisonError::into_inner)
}

fn destroy(ctx: u64) -> Result {
    let (client, device) = clients::of_context(ctx)?;
    // A green context ends by a call of its own.
    if super::green::of_context(ctx).is_some() || writing(client).remove(&ctx).is_none() {
        return Err(INVALID_CONTEXT);
    }
    thread::forget(ctx);
    super::memory::end_context(client, ctx, client.primary(device.local), true, || {
        let destroyed = client.call(op::CTX_DESTROY, |w| w.word(handle::local(ctx)));
        handles::retire(ctx);
        destroyed.map(drop)
    })
}

fn created(client: &Client, ctx: u64) -> Option<ContextInfo> {
    client.created.read().unwrap_or_else(PoisonError::into_inner).get(&ctx).copied()
}

fn synchronize(ctx: u64) -> Result {
    let (client, contexts) = green::meant(ctx)?;
    streams::context_sync_allowed(ctx)?;
    client.free_blocks(op::CTX_SYNC)?;
    let flushed = streams::flushed(client);
    if flushed && streams::at_rest(client) {
        // A program that only asks notices the loss of its worker, too.
        client.link.poll().map_err(unavailable)?;
        return client.take_late_error();
    }
    // A kernel may wait for what the program has written since its launch.
    regions::upload_awaited(client)?;
    if flushed && streams::bar_copies(client, &contexts)? {
        return client.take_late_error();
    }
    let caller = Caller { thread: thread::id(), ctx: handle::local(ctx) };
    let begun = client.link.begin_call(op::CTX_SYNC, caller, |_| {}).map_err(unavailable)?;
    let seq = begun.seq;
    let reply = client.finish(begun)?;
    let within = |on: u64| contexts.contains(&on);
    client.wait_detached(|t| t.seq < seq && within(t.on.ctx))?;
    if reply.status == 0 && client.devices.len() == 1 && client.created.read().is_ok_and(|c| c.is_empty()) {
        client.positions.context_synced(seq);
    }
    if reply.status == 0 {
        host_functions::forget_launches(|on, launched| within(on.ctx) && launched < seq);
    }
    client.check_status(reply.status)
}

driver! {
    /// As a driver whose devices have no execution affinity.
    fn cuCtxGetExecAffinity(affinity: *mut c_void, _kind: i32) {
        thread::context()?;
        if affinity.is_null() { Err(INVALID_VALUE) } else { Err(UNSUPPORTED_EXEC_AFFINITY) }
    }

    fn cuCtxGetCurrent(ctx: *mut *mut c_void) {
        clients::get()?;
        give(ctx, thread::current() as *mut c_void)
    }

    fn cuCtxSetCurrent(ctx: *mut c_void) {
        clients::get()?;
        if ctx.is_null() {
            // As a pop, or without effect on an empty stack.
            let _ = thread::pop();
            return Ok(());
        }
        known(ctx as u64)?;
        thread::set_current(ctx as u64);
        Ok(())
    }

    fn cuCtxPushCurrent_v2(ctx: *mut c_void) {
        known(ctx as u64)?;
        thread::push(ctx as u64);
        Ok(())
    }

    fn cuCtxPopCurrent_v2(ctx: *mut *mut c_void) {
        clients::get()?;
        let popped = thread::pop()?;
        give_optional(ctx, popped as *mut c_void);
        Ok(())
    }

    fn cuCtxGetDevice(device: *mut i32) {
        give(device, current()?.1.ordinal)
    }

    /// Returns the device of a given context (CUDA 13).
    fn cuCtxGetDevice_v2(device: *mut i32, ctx: *mut c_void) {
        clients::get()?;
        give(device, clients::of_context(named(ctx)?)?.1.ordinal)
    }

    fn cuCtxCreate_v2(ctx: *mut *mut c_void, flags: u32, device: i32) {
        create(ctx, flags, device, 3020)
    }

    fn cuCtxCreate(ctx: *mut *mut c_void, flags: u32, device: i32) {
        create(ctx, flags, device, 3010)
    }

    fn cuCtxCreate_v3(ctx: *mut *mut c_void, affinity: *const c_void, count: i32, flags: u32, device: i32) {
        no_affinity(affinity, count)?;
        create(ctx, flags, device, 3020)
    }

    fn cuCtxCreate_v4(ctx: *mut *mut c_void, params: *const CreateParams, flags: u32, device: i32) {
        if !params.is_null() {
            let CreateParams { affinity, count, graphics } = take(params)?;
            no_affinity(affinity, count)?;
            // CUDA in graphics needs a display driver on the program's own host.
            if !graphics.is_null() {
                return Err(crate::entry::NOT_SUPPORTED);
            }
        }
        create(ctx, flags, device, 3020)
    }

    fn cuCtxDestroy_v2(ctx: *mut c_void) {
        destroy(ctx as u64)
    }

    /// Counts a user of a created context; a primary context counts those that retain it.
    fn cuCtxAttach(ctx: *mut *mut c_void, flags: u32) {
        if flags != 0 || ctx.is_null() {
            return Err(INVALID_VALUE);
        }
        let (client, current) = (current()?.0, thread::context()?);
        if let Some(info) = writing(client).get_mut(&current) {
            info.users += 1;
        }
        give(ctx, current as *mut c_void)
    }

    /// Ends a use of the current context, which its last user destroys.
    fn cuCtxDetach(ctx: *mut c_void) {
        let (client, ctx) = (clients::of_context(ctx as u64)?.0, ctx as u64);
        if ctx != thread::current() {
            return Err(INVALID_CONTEXT);
        }
        let last = match writing(client).get_mut(&ctx) {
            Some(info) if info.users > 1 => {
                info.users -= 1;
                false
            }
            known => known.is_some(),
        };
        if last && super::green::of_context(ctx).is_none() { destroy(ctx) } else { Ok(()) }
    }

    fn cuCtxSynchronize() {
        clients::get()?;
        synchronize(thread::context()?)
    }

    /// Synchronizes a given context (CUDA 13).
    fn cuCtxSynchronize_v2(ctx: *mut c_void) {
        clients::get()?;
        synchronize(named(ctx)?)
    }

    fn cuCtxGetFlags(flags: *mut u32) {
        let (client, device) = current()?;
        let known = match created(client, thread::current()) {
            Some(created) => created.flags,
            None => device.primary_flags.load(Ordering::Relaxed),
        };
        give(flags, known)
    }

    fn cuCtxSetFlags(flags: u32) {
        check_flags(flags)?;
        let (client, device) = current()?;
        let mut known = client.created.write().unwrap_or_else(PoisonError::into_inner);
        match known.get_mut(&thread::current()) {
            Some(created) => created.flags = flags,
            None => device.primary_flags.store(flags, Ordering::Relaxed),
        }
        wait_as(client, flags);
        Ok(())
    }

    fn cuCtxGetId(ctx: *mut c_void, id: *mut u64) {
        let ctx = named(ctx)?;
        if was_reset(ctx) {
            return Err(CONTEXT_IS_DESTROYED);
        }
        give(id, private_tables::context_id(ctx))
    }

    fn cuCtxGetApiVersion(ctx: *mut c_void, version: *mut u32) {
        clients::get()?;
        let ctx = named(ctx)?;
        let (client, _) = clients::of_context(ctx)?;
        if was_reset(ctx) {
            return Err(INVALID_CONTEXT);
        }
        give(version, created(client, ctx).map_or(3020, |c| c.version))
    }

    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        let (low, high) = current()?.1.priorities;
        give_optional(least, low);
        give_optional(greatest, high);
        Ok(())
    }

    fn cuCtxGetLimit(value: *mut usize, limit: i32) {
        let (_, device) = current()?;
        let default = || usize::try_from(limit).ok().and_then(|limit| device.limits.get(limit)).copied();
        match limits::get(thread::context()?, limit).or_else(default) {
            // A negative value is the driver's error.
            Some(known) if (known as i64) < 0 => Err(-(known as i64) as i32),
            Some(known) => give(value, known as usize),
            None => Err(INVALID_VALUE),
        }
    }

    fn cuCtxSetLimit(limit: i32, value: usize) {
        let (client, _) = current()?;
        streams::allowed()?;
        let reply = client.call(op::CTX_SET_LIMIT, |w| {
            w.word(limit as u32 as u64);
            w.word(value as u64);
        })?;
        limits::note(thread::context()?, limit, word(&mut reply.reader())?);
        Ok(())
    }

    fn cuCtxEnablePeerAccess(peer: *mut c_void, flags: u32) {
        let (client, device) = current()?;
        let (other, peer_device) = clients::of_context(peer as u64)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if other.number != client.number || peer_device.local == device.local {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        client.call(op::cuCtxEnablePeerAccess, |w| {
            w.word(handle::local(peer as u64));
            w.word(u64::from(flags));
        })?;
        Ok(())
    }

    /// Returns the default: the preference has no effect on present GPUs.
    fn cuCtxGetCacheConfig(config: *mut i32) {
        thread::context()?;
        give(config, 0)
    }

    fn cuCtxSetCacheConfig(config: i32) {
        thread::context()?;
        if (0..=3).contains(&config) { Ok(()) } else { Err(INVALID_VALUE) }
    }

    fn cuCtxGetSharedMemConfig(config: *mut i32) {
        thread::context()?;
        give(config, 1)
    }

    fn cuCtxSetSharedMemConfig(config: i32) {
        thread::context()?;
        if (0..=2).contains(&config) { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

alias! {
    cuCtxPushCurrent = cuCtxPushCurrent_v2(ctx: *mut c_void);
    cuCtxPopCurrent = cuCtxPopCurrent_v2(ctx: *mut *mut c_void);
    cuCtxDestroy = cuCtxDestroy_v2(ctx: *mut c_void);
}
