//! Turns a call into an entry of a stream, or into a node if the stream is capturing.

use crate::driver::context::{CONTEXTS, Context, current};
use crate::driver::graph;
use crate::driver::op::{Copy, Op, Place};
use crate::driver::stream::{Point, Role, STREAMS, Stream};
use crate::errors::{INVALID_HANDLE, INVALID_VALUE, NOT_PERMITTED, Result};
use crate::registry::handle;
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Numbers of allocations with `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
pub static SYNCHRONOUS: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Returns `true` if synchronous copies and fills of the memory at an address wait for their end.
pub fn is_synchronous(at: u64) -> Result<bool> {
    let found = crate::driver::driver()?.space.find(at);
    Ok(found.is_some_and(|a| SYNCHRONOUS.lock().contains(&a.id)))
}

/// Marks the thread as running a host function, which may not call the driver.
pub struct Inside(bool);

pub fn in_callback() -> Inside {
    Inside(INSIDE.try_with(|i| i.replace(true)).unwrap_or(false))
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|i| i.set(self.0));
    }
}

pub fn not_in_callback() -> Result {
    if INSIDE.try_with(Cell::get).unwrap_or(false) { Err(NOT_PERMITTED) } else { Ok(()) }
}

/// Returns the stream that a handle denotes in the calling thread.
pub fn stream(h: usize, per_thread: bool) -> Result<Arc<Stream>> {
    match h {
        0 if per_thread => Ok(current()?.per_thread()),
        0 | 1 => Ok(current()?.legacy()),
        2 => Ok(current()?.per_thread()),
        _ => STREAMS.find(h).ok_or(INVALID_HANDLE),
    }
}

pub fn context_of(s: &Stream) -> Result<Arc<Context>> {
    CONTEXTS.find(s.context).ok_or(INVALID_HANDLE)
}

/// Returns the points that an entry of `s` waits for by the legacy stream's rules.
fn order(s: &Arc<Stream>, ctx: &Arc<Context>) -> Vec<Point> {
    let points: Vec<Point> = match s.role {
        Role::Legacy => ctx.streams().iter().filter(|o| o.blocking()).map(Stream::last).collect(),
        _ if s.blocking() => vec![ctx.legacy().last()],
        _ => Vec::new(),
    };
    points.into_iter().filter(|p| !p.reached()).collect()
}

/// Submits an operation to a stream; in a capture it becomes a node, and `None` is returned.
pub fn submit(s: &Arc<Stream>, op: Op) -> Result<Option<Point>> {
    submit_after(s, op, Vec::new())
}

pub fn submit_after(s: &Arc<Stream>, op: Op, mut after: Vec<Point>) -> Result<Option<Point>> {
    not_in_callback()?;
    s.life.check()?;
    if graph::capture_op(s, &op)? {
        return Ok(None);
    }
    let ctx = context_of(s)?;
    if s.role == Role::Legacy {
        graph::forbid_legacy(&ctx)?;
    }
    after.extend(order(s, &ctx));
    s.push(op, after).map(Some)
}

/// Waits until a stream has completed all entries submitted so far.
pub fn synchronize(s: &Arc<Stream>) -> Result {
    graph::forbid_sync(s)?;
    let ctx = context_of(s)?;
    let mut points = vec![s.last()];
    if s.role == Role::Legacy {
        points.extend(order(s, &ctx));
    }
    points.iter().for_each(Point::wait);
    s.life.flush();
    s.life.check()
}

/// Returns `true` if all entries submitted so far are complete.
pub fn query(s: &Arc<Stream>) -> Result<bool> {
    graph::forbid_sync(s)?;
    s.life.check()?;
    let waits = s.role == Role::Legacy && !order(s, &context_of(s)?).is_empty();
    let done = !waits && s.last().reached();
    if done {
        s.life.flush();
        s.life.check()?;
    }
    Ok(done)
}

/// Submits a copy under the rules for pageable memory; `wait` means a synchronous call.
pub fn copy(s: &Arc<Stream>, mut copy: Copy, wait: bool) -> Result {
    s.life.check()?;
    if copy.bytes() == 0 {
        return Ok(());
    }
    copy.validate()?;
    reachable(&copy, context_of(s)?.device)?;
    if wait {
        if s.role == Role::Legacy {
            graph::forbid_legacy(&context_of(s)?)?;
        }
        graph::forbid_unsafe()?;
    }
    let known = |p: &Place| matches!(p, Place::Known(_));
    let to_pageable = matches!(copy.dst.place, Place::Pageable(_));
    let from_pageable = !known(&copy.src.place);
    let to_host = is_host(&copy.dst.place)?;
    let on_device = known(&copy.src.place) && !is_host(&copy.src.place)? && !to_host;
    if from_pageable && !graph::capturing(s) {
        // CUDA synchronizes the stream first, so that its work may write the source.
        if wait && let Some(point) = submit(s, Op::Empty)? {
            point.wait();
        }
        copy.stage()?;
    }
    let between = if wait && on_device { contexts_between(&copy)? } else { Vec::new() };
    // Streams that do not follow the default stream count nowhere (H200, driver 580).
    between.iter().for_each(|ctx| ctx.last_of_default().iter().for_each(Point::wait));
    let mut requested = false;
    for place in [&copy.dst.place, &copy.src.place] {
        requested |= wait && matches!(place, Place::Known(at) if is_synchronous(*at)?);
    }
    let point = submit(s, Op::Copy(Arc::new(copy)))?;
    // Between device addresses, even synchronous calls return before the copy is complete. From
    // pageable memory to the device, they return once the bytes are staged.
    let must_wait = to_pageable
        || !between.is_empty()
        || requested
        || (wait && !on_device && (to_host || !from_pageable));
    if let Some(point) = point.filter(|_| must_wait) {
        point.wait();
        s.life.flush();
        s.life.check()?;
    }
    Ok(())
}

/// Returns both contexts of a copy between two, whose default streams are ordered with it.
fn contexts_between(copy: &Copy) -> Result<Vec<Arc<Context>>> {
    let space = &crate::driver::driver()?.space;
    let context = |place: &Place| match place {
        Place::Known(at) => space.find(*at).and_then(|a| CONTEXTS.find(a.context)),
        _ => None,
    };
    Ok(match (context(&copy.dst.place), context(&copy.src.place)) {
        (Some(to), Some(from)) if !Arc::ptr_eq(&to, &from) => vec![to, from],
        _ => Vec::new(),
    })
}

fn reachable(copy: &Copy, device: u32) -> Result {
    let space = &crate::driver::driver()?.space;
    let known = [&copy.dst.place, &copy.src.place].into_iter().all(|p| match p {
        Place::Known(at) => space.copyable(*at, device),
        _ => true,
    });
    if known { Ok(()) } else { Err(INVALID_VALUE) }
}

/// Returns `true` for memory of the host, known to the driver or not.
fn is_host(place: &Place) -> Result<bool> {
    let d = crate::driver::driver()?;
    Ok(match place {
        Place::Known(at) => d.space.find(*at).is_some_and(|a| a.on_host()),
        _ => true,
    })
}

/// Returns the place of a unified address: known to the driver, else the program's memory.
///
/// Measured on an H200, this also holds for arguments that are called host pointers.
pub fn any_place(at: u64) -> Result<Place> {
    let d = crate::driver::driver()?;
    match d.space.find(at) {
        Some(_) => Ok(Place::Known(at)),
        None if at == 0 => Err(crate::errors::INVALID_VALUE),
        None => Ok(Place::Pageable(at)),
    }
}

/// Returns the handle under which a program knows a stream.
pub fn public_handle(s: &Arc<Stream>) -> usize {
    match s.role {
        Role::Legacy => 0,
        Role::PerThread => 2,
        Role::User => handle(s),
    }
}
