//! Launches and occupancy.

use super::{out, slice};
use crate::abi::LaunchConfig;
use crate::driver::config;
use crate::driver::context::{Context, working};
use crate::driver::device::THREADS_PER_SM;
use crate::driver::module::{self, Function};
use crate::driver::op::{Launch, Op};
use crate::driver::stream::Stream;
use crate::driver::submit;
use crate::errors::{self, INVALID_VALUE, Result};
use crate::export;
use crate::registry::handle;
use std::sync::Arc;

fn submit_launch(mut launch: Launch, s: &Arc<Stream>) -> Result {
    if s.context != launch.function.context {
        return Err(errors::INVALID_HANDLE);
    }
    // A captured kernel of a library becomes a node with the function of its context.
    launch.handle = handle(&launch.function);
    submit::submit(s, Op::Kernel(Arc::new(launch))).map(drop)
}

/// Returns the stream of a launch, and the stream's context, in which the launch runs.
fn target(h: usize, per_thread: bool) -> Result<(Arc<Stream>, Arc<Context>)> {
    let s = submit::stream(h, per_thread)?;
    s.life.check()?;
    let ctx = submit::context_of(&s)?;
    Ok((s, ctx))
}

fn function(h: usize) -> Result<Arc<Function>> {
    module::function(h, &working()?)
}

fn blocks(f: usize, threads: i32, shared: usize) -> Result<i32> {
    let f = function(f)?;
    if threads <= 0 {
        return Err(INVALID_VALUE);
    }
    if threads as u32 > f.max_threads() {
        return Ok(0);
    }
    Ok(f.blocks_per_sm(threads as u32, shared as u64) as i32)
}

/// Returns the block size that fills a multiprocessor best; the largest of equals.
fn potential(
    grid: *mut i32,
    block: *mut i32,
    f: usize,
    shared_for: Option<unsafe extern "C" fn(i32) -> usize>,
    shared: usize,
    limit: i32,
) -> Result {
    let f = function(f)?;
    if limit < 0 {
        return Err(INVALID_VALUE);
    }
    let most = if limit > 0 { f.max_threads().min(limit as u32) } else { f.max_threads() };
    let mut best = (0, 0, 0);
    let mut threads = most;
    while threads > 0 {
        // SAFETY: the program gave this function for this purpose.
        let dynamic = shared_for.map_or(shared, |ask| unsafe { ask(threads as i32) });
        let per_sm = f.blocks_per_sm(threads, dynamic as u64);
        if per_sm * threads > best.0 {
            best = (per_sm * threads, threads, per_sm);
        }
        if best.0 == THREADS_PER_SM {
            break;
        }
        threads = (threads - 1) / 32 * 32;
    }
    // SAFETY: the program vouches for its pointers.
    unsafe {
        out(grid, (best.2 * config().sms) as i32)?;
        out(block, best.1 as i32)
    }
}

export! {
    fn cuLaunchKernel | cuLaunchKernel_ptsz (
        f: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize,
        params: *const *const u8, extra: *const *const u8
    ) {
        let (s, ctx) = target(stream, PER_THREAD)?;
        submit_launch(Launch::new(&ctx, f, [gx, gy, gz], [bx, by, bz], shared, false, params, extra)?, &s)
    }

    fn cuLaunchKernelEx | cuLaunchKernelEx_ptsz (config: *const LaunchConfig, f: usize, params: *const *const u8, extra: *const *const u8) {
        if config.is_null() {
            return Err(INVALID_VALUE);
        }
        let c = &*config;
        let (s, ctx) = target(c.stream, PER_THREAD)?;
        let mut cooperative = false;
        let mut events = Vec::new();
        for attribute in slice(c.attrs, c.numAttrs as usize)? {
            match attribute.id {
                2 => cooperative = attribute.value[0] as u32 != 0,
                // A cluster of one block is allowed, since it is no cluster.
                4 => {
                    let (x, y, z) = (attribute.value[0] as u32, (attribute.value[0] >> 32) as u32, attribute.value[1] as u32);
                    if x.max(1) * y.max(1) * z.max(1) != 1 {
                        return Err(errors::INVALID_CLUSTER_SIZE);
                    }
                }
                // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT and _LAUNCH_COMPLETION_EVENT
                7 | 12 => {
                    let event = super::stream::event(attribute.value[0] as usize)?;
                    if event.flags & super::stream::DISABLE_TIMING == 0 || event.context != s.context {
                        return Err(INVALID_VALUE);
                    }
                    events.push(event);
                }
                _ => {}
            }
        }
        let launch = Launch::new(&ctx, f, c.grid, c.block, c.shared, cooperative, params, extra)?;
        // The events happen when the kernel begins; in a capture its node is what others wait for.
        if crate::driver::capture::capturing(&s) {
            submit_launch(launch, &s)?;
            return events.iter().try_for_each(|event| super::stream::record_on(event, &s));
        }
        events.iter().try_for_each(|event| super::stream::record_on(event, &s))?;
        submit_launch(launch, &s)
    }

    fn cuLaunchCooperativeKernel | cuLaunchCooperativeKernel_ptsz (
        f: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize, params: *const *const u8
    ) {
        let (s, ctx) = target(stream, PER_THREAD)?;
        submit_launch(Launch::new(&ctx, f, [gx, gy, gz], [bx, by, bz], shared, true, params, std::ptr::null())?, &s)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(n: *mut i32, f: usize, threads: i32, shared: usize) {
        out(n, blocks(f, threads, shared)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n: *mut i32, f: usize, threads: i32, shared: usize, _flags: u32) {
        out(n, blocks(f, threads, shared)?)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        grid: *mut i32, block: *mut i32, f: usize, shared_for: Option<unsafe extern "C" fn(i32) -> usize>, shared: usize, limit: i32
    ) {
        potential(grid, block, f, shared_for, shared, limit)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: *mut i32, block: *mut i32, f: usize, shared_for: Option<unsafe extern "C" fn(i32) -> usize>, shared: usize, limit: i32, _flags: u32
    ) {
        potential(grid, block, f, shared_for, shared, limit)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: *mut usize, f: usize, n: i32, threads: i32) {
        let f = function(f)?;
        if n <= 0 || threads <= 0 {
            return Err(INVALID_VALUE);
        }
        let share = crate::driver::device::SHARED_OPTIN / n as u32;
        out(bytes, share.saturating_sub(f.static_shared()).min(f.max_dynamic_shared()) as usize)
    }

    fn cuOccupancyMaxPotentialClusterSize(n: *mut i32, f: usize, config: *const LaunchConfig) {
        function(f)?;
        if config.is_null() || n.is_null() {
            return Err(INVALID_VALUE);
        }
        // Clusters need sm_90.
        Err(errors::NOT_SUPPORTED)
    }

    fn cuOccupancyMaxActiveClusters(n: *mut i32, f: usize, config: *const LaunchConfig) {
        function(f)?;
        if config.is_null() || n.is_null() {
            return Err(INVALID_VALUE);
        }
        Err(errors::NOT_SUPPORTED)
    }
}
