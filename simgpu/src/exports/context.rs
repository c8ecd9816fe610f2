//! Contexts.

use super::{out, out_opt};
use crate::driver::capture;
use crate::driver::context::{
    self, CONTEXTS, Context, by_handle, current, not_poisoned, top, with_stack, working,
};
use crate::driver::device::SHARED_OPTIN;
use crate::driver::submit;
use crate::driver::{Driver, driver};
use crate::errors::{self, INVALID_CONTEXT, INVALID_VALUE, Result};
use crate::export;
use crate::registry::handle;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn create(device: i32, flags: u32) -> Result<Arc<Context>> {
    let d = driver()?;
    d.device(device)?;
    check_flags(flags)?;
    not_poisoned()?;
    made(d, device as u32)?;
    let ctx = Context::new(device as u32, false, flags);
    with_stack(|s| s.push(ctx.clone()))?;
    Ok(ctx)
}

fn check_flags(flags: u32) -> Result {
    if flags & !0xff != 0 || !matches!(flags & 7, 0 | 1 | 2 | 4) { Err(INVALID_VALUE) } else { Ok(()) }
}

/// Returns a context, alive or on this thread's stack: a driver makes a destroyed one current, and
/// refuses only work there (H200, driver 580).
fn known(h: usize) -> Result<Arc<Context>> {
    let on_stack = || with_stack(|s| s.iter().find(|ctx| handle(ctx) == h).cloned()).ok().flatten();
    CONTEXTS.find(h).or_else(on_stack).ok_or(INVALID_CONTEXT)
}

fn destroy(h: usize) -> Result {
    let ctx = known(h)?;
    ctx.check_alive()?;
    if ctx.primary {
        return Err(INVALID_CONTEXT);
    }
    let d = driver()?;
    if ctx.references.swap(0, Ordering::SeqCst) > 0 {
        d.space.context_gone(ctx.device);
    }
    ctx.tear_down(d);
    let _ = CONTEXTS.remove(h);
    with_stack(|s| {
        if s.last().is_some_and(|top| Arc::ptr_eq(top, &ctx)) {
            s.pop();
        }
    })
}

/// Counts a new context, unless it is the one that fails.
fn made(d: &Driver, device: u32) -> Result {
    static MADE: AtomicU64 = AtomicU64::new(0);
    if MADE.fetch_add(1, Ordering::Relaxed) + 1 == d.config.fail_context_at {
        return Err(errors::OUT_OF_MEMORY);
    }
    d.space.context_made(device)
}

fn release(device: i32) -> Result {
    let d = driver()?;
    let ctx = &d.device(device)?.primary;
    let before = ctx.references.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
    match before {
        // A reset has done it already.
        Ok(1) if ctx.reset.swap(false, Ordering::SeqCst) => {}
        Ok(1) => {
            ctx.tear_down(d);
            d.space.context_gone(ctx.device);
        }
        Ok(_) => {}
        Err(_) => return Err(INVALID_CONTEXT),
    }
    Ok(())
}

fn reset(device: i32) -> Result {
    let d = driver()?;
    let ctx = &d.device(device)?.primary;
    let was_active = ctx.active();
    ctx.reset.store(ctx.references.load(Ordering::SeqCst) > 0, Ordering::SeqCst);
    ctx.tear_down(d);
    if was_active {
        d.space.context_gone(ctx.device);
    }
    Ok(())
}

fn set_primary_flags(device: i32, flags: u32) -> Result {
    check_flags(flags)?;
    driver()?.device(device)?.primary.flags.store(flags, Ordering::SeqCst);
    Ok(())
}

fn push(h: usize) -> Result {
    driver()?;
    let ctx = known(h)?;
    with_stack(|s| s.push(ctx))
}

fn pop() -> Result<usize> {
    driver()?;
    with_stack(Vec::pop)?.map(|c| handle(&c)).ok_or(INVALID_CONTEXT)
}

fn synchronize(ctx: &Arc<Context>) -> Result {
    submit::not_in_callback()?;
    capture::forbid_context_sync(ctx)?;
    capture::forbid_unsafe()?;
    ctx.synchronize()
}

/// Returns the default value of a limit, or the error for an unknown or unsupported one.
fn limit_default(id: u32) -> Result<u64> {
    match id {
        0 => Ok(1024),
        1 => Ok(1 << 20),
        2 => Ok(8 << 20),
        4 => Ok(2048),
        5 => Ok(64),
        6 | 8 => Ok(0),
        7 => Ok(u64::from(SHARED_OPTIN)),
        3 | 9 => Err(errors::UNSUPPORTED_LIMIT),
        _ => Err(INVALID_VALUE),
    }
}

export! {
    fn cuDevicePrimaryCtxRetain(pctx: *mut usize, device: i32) {
        let d = driver()?;
        let ctx = &d.device(device)?.primary;
        if pctx.is_null() {
            return Err(INVALID_VALUE);
        }
        if !ctx.active() {
            not_poisoned()?;
        }
        let again = ctx.reset.swap(false, Ordering::SeqCst);
        if ctx.references.fetch_add(1, Ordering::SeqCst) == 0 || again {
            made(d, ctx.device).inspect_err(|_| {
                ctx.references.fetch_sub(1, Ordering::SeqCst);
                ctx.reset.store(again, Ordering::SeqCst);
            })?;
            ctx.life().begin(ctx.flags.load(Ordering::SeqCst));
        }
        out(pctx, handle(ctx))
    }

    fn cuDevicePrimaryCtxRelease(device: i32) { release(device) }
    fn cuDevicePrimaryCtxRelease_v2(device: i32) { release(device) }
    fn cuDevicePrimaryCtxReset(device: i32) { reset(device) }
    fn cuDevicePrimaryCtxReset_v2(device: i32) { reset(device) }
    fn cuDevicePrimaryCtxSetFlags(device: i32, flags: u32) { set_primary_flags(device, flags) }
    fn cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) { set_primary_flags(device, flags) }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) {
        let ctx = &driver()?.device(device)?.primary;
        out(flags, ctx.flags.load(Ordering::SeqCst))?;
        out(active, i32::from(ctx.active()))
    }

    fn cuCtxCreate(pctx: *mut usize, flags: u32, device: i32) {
        out(pctx, handle(&create(device, flags)?))
    }

    fn cuCtxCreate_v2(pctx: *mut usize, flags: u32, device: i32) {
        out(pctx, handle(&create(device, flags)?))
    }

    fn cuCtxCreate_v3(pctx: *mut usize, _affinity: *mut u8, n: i32, flags: u32, device: i32) {
        if n != 0 {
            return Err(errors::UNSUPPORTED_EXEC_AFFINITY);
        }
        out(pctx, handle(&create(device, flags)?))
    }

    fn cuCtxCreate_v4(pctx: *mut usize, params: *const [usize; 3], flags: u32, device: i32) {
        if !params.is_null() && (*params)[1] as i32 != 0 {
            return Err(errors::UNSUPPORTED_EXEC_AFFINITY);
        }
        out(pctx, handle(&create(device, flags)?))
    }

    fn cuCtxAttach(pctx: *mut usize, flags: u32) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let ctx = current()?;
        out(pctx, handle(&ctx))?;
        ctx.references.fetch_add(u32::from(!ctx.primary), Ordering::SeqCst);
        Ok(())
    }

    fn cuCtxDetach(h: usize) {
        let ctx = by_handle(h)?;
        if !Arc::ptr_eq(&ctx, &current()?) {
            return Err(INVALID_CONTEXT);
        }
        let another = |n: u32| (n > 1).then(|| n - 1);
        let last = ctx.references.fetch_update(Ordering::SeqCst, Ordering::SeqCst, another).is_err();
        if last && !ctx.primary { destroy(h) } else { Ok(()) }
    }

    fn cuCtxDestroy(ctx: usize) { destroy(ctx) }
    fn cuCtxDestroy_v2(ctx: usize) { destroy(ctx) }
    fn cuCtxPushCurrent(ctx: usize) { push(ctx) }
    fn cuCtxPushCurrent_v2(ctx: usize) { push(ctx) }

    fn cuCtxPopCurrent(pctx: *mut usize) {
        let h = pop()?;
        out_opt(pctx, h);
        Ok(())
    }

    fn cuCtxPopCurrent_v2(pctx: *mut usize) {
        let h = pop()?;
        out_opt(pctx, h);
        Ok(())
    }

    fn cuCtxSetCurrent(ctx: usize) {
        driver()?;
        let new = if ctx == 0 { None } else { Some(known(ctx)?) };
        with_stack(|s| {
            s.pop();
            s.extend(new);
        })
    }

    fn cuCtxGetCurrent(pctx: *mut usize) {
        driver()?;
        out(pctx, context::top()?.map_or(0, |c| handle(&c)))
    }

    fn cuCtxGetDevice(device: *mut i32) {
        driver()?;
        out(device, context::top()?.ok_or(INVALID_CONTEXT)?.device as i32)
    }

    fn cuCtxGetDevice_v2(device: *mut i32, ctx: usize) {
        driver()?;
        let ctx = if ctx == 0 { context::top()?.ok_or(INVALID_CONTEXT)? } else { CONTEXTS.find(ctx).ok_or(INVALID_CONTEXT)? };
        out(device, ctx.device as i32)
    }

    fn cuCtxGetFlags(flags: *mut u32) {
        driver()?;
        out(flags, top()?.ok_or(INVALID_CONTEXT)?.flags.load(Ordering::SeqCst))
    }

    fn cuCtxSetFlags(flags: u32) {
        check_flags(flags)?;
        current()?.flags.store(flags, Ordering::SeqCst);
        Ok(())
    }

    fn cuCtxGetId(ctx: usize, id: *mut u64) {
        let ctx = by_handle(ctx)?;
        ctx.check_alive()?;
        out(id, ctx.id)
    }

    fn cuCtxGetApiVersion(ctx: usize, version: *mut u32) {
        by_handle(ctx)?.check_alive().map_err(|_| INVALID_CONTEXT)?;
        out(version, 3020)
    }

    fn cuCtxSynchronize() { synchronize(&current()?) }
    fn cuCtxSynchronize_v2(ctx: usize) { synchronize(&by_handle(ctx)?) }

    fn cuCtxGetLimit(value: *mut usize, limit: u32) {
        let ctx = working()?;
        let default = limit_default(limit)?;
        let set = ctx.state.lock().limits.get(&limit).copied();
        out(value, set.unwrap_or(default) as usize)
    }

    fn cuCtxSetLimit(limit: u32, value: usize) {
        let ctx = working()?;
        limit_default(limit)?;
        match limit {
            5 if value > 128 => return Err(INVALID_VALUE),
            7 | 8 => return Err(errors::NOT_PERMITTED),
            _ => {}
        }
        capture::forbid_unsafe()?;
        ctx.state.lock().limits.insert(limit, value as u64);
        Ok(())
    }

    fn cuCtxGetCacheConfig(config: *mut u32) {
        out(config, current()?.cache_config.load(Ordering::SeqCst))
    }

    fn cuCtxSetCacheConfig(config: u32) {
        if config > 3 {
            return Err(INVALID_VALUE);
        }
        current()?.cache_config.store(config, Ordering::SeqCst);
        Ok(())
    }

    fn cuCtxGetSharedMemConfig(config: *mut u32) {
        out(config, current()?.shared_config.load(Ordering::SeqCst))
    }

    fn cuCtxSetSharedMemConfig(config: u32) {
        if config > 2 {
            return Err(INVALID_VALUE);
        }
        current().map(drop)
    }

    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        current()?;
        out_opt(least, 0);
        out_opt(greatest, -5);
        Ok(())
    }

    fn cuCtxResetPersistingL2Cache() { current().map(drop) }

    fn cuCtxGetExecAffinity(_affinity: *mut u8, _kind: u32) {
        current()?;
        Err(errors::UNSUPPORTED_EXEC_AFFINITY)
    }

    fn cuCtxEnablePeerAccess(peer: usize, flags: u32) {
        let ctx = working()?;
        let peer = CONTEXTS.find(peer).ok_or(INVALID_CONTEXT)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if peer.device == ctx.device || !driver()?.config.peers {
            return Err(errors::PEER_ACCESS_UNSUPPORTED);
        }
        let mut state = ctx.state.lock();
        if state.peers.contains(&handle(&peer)) {
            return Err(errors::PEER_ACCESS_ALREADY_ENABLED);
        }
        state.peers.push(handle(&peer));
        driver()?.space.set_peer(ctx.device, peer.device, true);
        Ok(())
    }

    fn cuCtxDisablePeerAccess(peer: usize) {
        let ctx = working()?;
        let peer = CONTEXTS.find(peer).ok_or(INVALID_CONTEXT)?;
        let mut state = ctx.state.lock();
        let Some(at) = state.peers.iter().position(|p| *p == handle(&peer)) else {
            return Err(errors::PEER_ACCESS_NOT_ENABLED);
        };
        state.peers.swap_remove(at);
        driver()?.space.set_peer(ctx.device, peer.device, false);
        Ok(())
    }
}
