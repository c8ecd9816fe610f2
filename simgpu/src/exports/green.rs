//! Green contexts: shares of the multiprocessors; their streams belong to the primary context.

use super::{out, out_opt, read, slice};
use crate::driver::context::{CONTEXTS, Context, by_handle};
use crate::driver::op::Op;
use crate::driver::stream::{EVENTS, Recorded, Role, STREAMS, Stream};
use crate::driver::submit;
use crate::driver::{config, driver};
use crate::errors::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_RESOURCE_CONFIGURATION, INVALID_VALUE, Result};
use crate::export;
use crate::registry::{Registry, handle};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

static GREENS: Registry<Green> = Registry::new();
static DESCRIPTIONS: Registry<u32> = Registry::new();
/// Green contexts by stream.
static STREAMS_OF: Mutex<Option<HashMap<usize, usize>>> = Mutex::new(None);

struct Green {
    multiprocessors: u32,
    context: Arc<Context>,
}

/// `CUdevResource`: a type, room of the driver, then number, least size and alignment.
type Resource = [u32; 36];
const NUMBER: usize = 24;
const MULTIPROCESSORS: u32 = 1;
/// Multiprocessors that form the smallest group.
const GROUP: u32 = 2;

fn resource(number: u32) -> Resource {
    let mut resource = [0; 36];
    resource[0] = MULTIPROCESSORS;
    (resource[NUMBER], resource[NUMBER + 1], resource[NUMBER + 2]) = (number, GROUP, GROUP);
    resource
}

fn green(h: usize) -> Result<Arc<Green>> {
    driver()?;
    GREENS.find(h).ok_or(INVALID_CONTEXT)
}

unsafe fn tell(to: *mut Resource, kind: u32, number: u32) -> Result {
    if kind != MULTIPROCESSORS {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the program vouches for its pointer.
    unsafe { out(to, resource(number)) }
}

/// Records an event once all work of a context is complete.
fn record(ctx: &Arc<Context>, event: usize) -> Result {
    let e = EVENTS.find(event).ok_or(INVALID_HANDLE)?;
    crate::driver::capture::forbid_context_sync(ctx)?;
    ctx.synchronize()?;
    let time = Arc::new(OnceLock::new());
    if let Some(point) = submit::submit(&ctx.legacy(), Op::Record(time.clone()))? {
        let mut state = e.state.lock();
        state.captured = None;
        state.recorded = Some(Recorded { point, time });
    }
    Ok(())
}

/// Waits for an event in the call, so that all later work comes behind it.
fn wait(ctx: &Arc<Context>, event: usize) -> Result {
    let e = EVENTS.find(event).ok_or(INVALID_HANDLE)?;
    crate::driver::capture::forbid_context_sync(ctx)?;
    if let Some(recorded) = super::stream::recorded(&e)? {
        recorded.point.wait();
    }
    Ok(())
}

export! {
    fn cuDeviceGetDevResource(device: i32, to: *mut Resource, kind: u32) {
        driver()?.device(device)?;
        tell(to, kind, config().sms)
    }
    fn cuCtxGetDevResource(ctx: usize, to: *mut Resource, kind: u32) {
        by_handle(ctx)?;
        tell(to, kind, config().sms)
    }
    fn cuGreenCtxGetDevResource(h: usize, to: *mut Resource, kind: u32) {
        let number = green(h)?.multiprocessors;
        tell(to, kind, number)
    }

    fn cuStreamGetDevResource | cuStreamGetDevResource_ptsz (s: usize, to: *mut Resource, kind: u32) {
        submit::stream(s, PER_THREAD)?;
        let of = STREAMS_OF.lock().get_or_insert_default().get(&s).copied();
        let number = of.map_or(Ok(config().sms), |h| green(h).map(|g| g.multiprocessors))?;
        tell(to, kind, number)
    }

    fn cuDevSmResourceSplit(
        groups: *mut Resource, n: u32, input: *const Resource, rest: *mut Resource, flags: u32, demands: *mut [u32; 16]
    ) {
        driver()?;
        let input = read(input)?;
        if input[0] != MULTIPROCESSORS || n == 0 || flags != 0 || demands.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut left = input[NUMBER];
        let mut made = Vec::new();
        for i in 0..n as usize {
            let mut demand = read(demands.add(i))?;
            let step = if demand[1] == 0 { GROUP } else { demand[1] };
            if !step.is_multiple_of(GROUP) || !demand[0].is_multiple_of(step) || demand[4..].iter().any(|w| *w != 0) {
                return Err(INVALID_VALUE);
            }
            // Zero asks how many there are.
            let number = if demand[0] == 0 { left / step * step } else { demand[0] };
            if number > left || (number == 0 && !groups.is_null()) {
                return Err(INVALID_RESOURCE_CONFIGURATION);
            }
            left -= number;
            demand[0] = number;
            made.push((demand, resource(number)));
        }
        for (i, (demand, group)) in made.into_iter().enumerate() {
            out(demands.add(i), demand)?;
            out_opt(if groups.is_null() { groups } else { groups.add(i) }, group);
        }
        out_opt(rest, resource(left));
        Ok(())
    }

    fn cuDevSmResourceSplitByCount(
        groups: *mut Resource, count: *mut u32, input: *const Resource, rest: *mut Resource, _flags: u32, least: u32
    ) {
        driver()?;
        let input = read(input)?;
        let (all, wanted) = (input[NUMBER], read(count)?);
        if input[0] != MULTIPROCESSORS || least > all {
            return Err(INVALID_VALUE);
        }
        let size = least.max(GROUP).next_multiple_of(GROUP);
        let possible = all / size;
        let made = if groups.is_null() { possible } else { possible.min(wanted) };
        for i in 0..if groups.is_null() { 0 } else { made as usize } {
            out(groups.add(i), resource(size))?;
        }
        out_opt(rest, resource(all - made * size));
        out(count, made)
    }

    fn cuDevResourceGenerateDesc(to: *mut usize, list: *const Resource, n: u32) {
        driver()?;
        let list = slice(list, n as usize)?;
        if list.is_empty() || list.iter().any(|r| r[0] != MULTIPROCESSORS) {
            return Err(INVALID_VALUE);
        }
        out(to, DESCRIPTIONS.insert(Arc::new(list.iter().map(|r| r[NUMBER]).sum())))
    }

    fn cuGreenCtxCreate(to: *mut usize, description: usize, device: i32, flags: u32) {
        let context = driver()?.device(device)?.primary.clone();
        if to.is_null() || flags != 1 {
            return Err(INVALID_VALUE);
        }
        let multiprocessors = *DESCRIPTIONS.find(description).ok_or(INVALID_VALUE)?;
        out(to, GREENS.insert(Arc::new(Green { multiprocessors, context })))
    }

    fn cuGreenCtxDestroy(h: usize) {
        green(h)?;
        GREENS.remove(h).map(drop)
    }

    // A context of its own would hide the program's memory and modules.
    fn cuCtxFromGreenCtx(to: *mut usize, h: usize) { out(to, handle(&green(h)?.context)) }
    fn cuGreenCtxGetId(h: usize, id: *mut u64) {
        green(h)?;
        out(id, h as u64)
    }

    fn cuGreenCtxStreamCreate(to: *mut usize, h: usize, flags: u32, priority: i32) {
        let ctx = green(h)?.context.clone();
        if to.is_null() || flags != 1 {
            return Err(INVALID_VALUE);
        }
        let s = Stream::new(Role::User, flags, priority.clamp(-5, 0), handle(&ctx), ctx.device, ctx.life());
        ctx.adopt(&s);
        let stream = STREAMS.insert(s);
        STREAMS_OF.lock().get_or_insert_default().insert(stream, h);
        out(to, stream)
    }

    fn cuStreamGetGreenCtx(s: usize, to: *mut usize) {
        submit::stream(s, false)?;
        out(to, STREAMS_OF.lock().get_or_insert_default().get(&s).copied().unwrap_or(0))
    }

    fn cuStreamGetCtx_v2 | cuStreamGetCtx_v2_ptsz (s: usize, ctx: *mut usize, to: *mut usize) {
        out(ctx, submit::stream(s, PER_THREAD)?.context)?;
        out(to, STREAMS_OF.lock().get_or_insert_default().get(&s).copied().unwrap_or(0))
    }

    fn cuGreenCtxRecordEvent(h: usize, event: usize) { record(&green(h)?.context, event) }
    fn cuGreenCtxWaitEvent(h: usize, event: usize) { wait(&green(h)?.context, event) }
    fn cuCtxRecordEvent(ctx: usize, event: usize) {
        driver()?;
        record(&CONTEXTS.find(ctx).ok_or(INVALID_CONTEXT)?, event)
    }
    fn cuCtxWaitEvent(ctx: usize, event: usize) {
        driver()?;
        wait(&CONTEXTS.find(ctx).ok_or(INVALID_CONTEXT)?, event)
    }
}
