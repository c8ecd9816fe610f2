//! Green contexts and the resources of devices; events of all streams of a context.

use std::collections::HashSet;
use std::sync::{MutexGuard, PoisonError};

use gpusession_proto::frame::Reader;
use gpusession_proto::handle::{self, CTX, GREEN};

use super::allocations;
use super::flush::flush_results;
use crate::answer::{Answer, Done, Failure, bounded};
use crate::driver::{check, status};
use crate::executor::Executor;
use crate::handles::Object;
use crate::session::Session;

/// Bytes of a `CUdevResource`.
const RESOURCE: usize = 144;
/// Bytes of a `CU_DEV_SM_RESOURCE_GROUP_PARAMS`.
const DEMAND: usize = 64;
/// Resources in one frame at most.
const MAX_GROUPS: usize = 1024;
/// Different resources of a process at most: bounds what a hostile client can cause.
const MAX_RESOURCES: usize = 1 << 16;

/// A `CUdevResource`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Resource([u8; RESOURCE]);

fn resources(session: &Session) -> MutexGuard<'_, HashSet<Vec<u8>>> {
    session.resources.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers a resource, and remembers that the driver has described it.
fn put_resource(session: &Session, resource: &Resource, answer: &mut Answer) -> Done {
    let mut known = resources(session);
    if known.len() >= MAX_RESOURCES && !known.contains(&resource.0[..]) {
        return Err(status::OUT_OF_MEMORY.into());
    }
    known.insert(resource.0.to_vec());
    answer.bytes(&resource.0);
    Ok(())
}

/// Reads a resource, which must be one that the driver has described.
fn existing(session: &Session, bytes: &[u8]) -> Result<Resource, Failure> {
    match bytes.first_chunk() {
        Some(first) if bytes.len() == RESOURCE && resources(session).contains(bytes) => Ok(Resource(*first)),
        _ => Err(status::INVALID_VALUE.into()),
    }
}

/// `DEV_RESOURCE`: subject, which one, type; answers the resource.
///
/// The subject is 0 for a device, 1 for a context, 2 for a green context, 3 for a stream.
pub fn resource(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (subject, which, kind) = (r.word()?, r.word()?, r.word()? as i32);
    let call = &session.driver.call;
    let mut found = Resource([0; RESOURCE]);
    let out = (&raw mut found).cast();
    // SAFETY: the structure has cuda.h's size; contexts belong to this worker.
    check(unsafe {
        match subject {
            0 => (call.cuDeviceGetDevResource)(session.contexts.device(which)?, out, kind),
            1 => (call.cuCtxGetDevResource)(session.contexts.get(which)?.0, out, kind),
            2 => (call.cuGreenCtxGetDevResource)(session.greens.get(which)?.0.0, out, kind),
            3 => (call.cuStreamGetDevResource)(session.stream(which)?, out, kind),
            _ => status::INVALID_VALUE,
        }
    })?;
    put_resource(session, &found, answer)
}

/// `DEV_RESOURCE_SPLIT`: resource, whether groups are wanted, their number, flags, least size.
///
/// It answers the number of groups, the rest, and the groups if they are wanted.
pub fn split(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let input = existing(session, r.bytes()?)?;
    let (wanted, mut count) = (r.word()? != 0, r.word()? as u32);
    let (flags, least) = (r.word()? as u32, r.word()? as u32);
    let most = if wanted { bounded(u64::from(count), MAX_GROUPS)? } else { 0 };
    let mut groups = vec![Resource([0; RESOURCE]); most];
    let mut rest = Resource([0; RESOURCE]);
    let list = if wanted { groups.as_mut_ptr().cast() } else { std::ptr::null_mut() };
    // SAFETY: the list is null or has `count` elements; the structures have cuda.h's size.
    check(unsafe {
        (session.driver.call.cuDevSmResourceSplitByCount)(
            list,
            &mut count,
            (&raw const input).cast(),
            (&raw mut rest).cast(),
            flags,
            least,
        )
    })?;
    answer.word(u64::from(count));
    put_resource(session, &rest, answer)?;
    groups.iter().take(count as usize).try_for_each(|group| put_resource(session, group, answer))
}

/// `DEV_RESOURCE_GROUPS`: resource, whether groups are wanted, flags, what each group demands.
///
/// It answers the demands as the driver completes them, the rest, and the groups if wanted.
pub fn groups(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let input = existing(session, r.bytes()?)?;
    let (wanted, flags, demands) = (r.word()? != 0, r.word()? as u32, r.bytes()?);
    let count = demands.len() / DEMAND;
    if count == 0 || count > MAX_GROUPS || !demands.len().is_multiple_of(DEMAND) {
        return Err(status::INVALID_VALUE.into());
    }
    let mut demands: Vec<u32> =
        demands.chunks_exact(4).map(|w| u32::from_le_bytes(w.try_into().unwrap_or_default())).collect();
    let mut groups = vec![Resource([0; RESOURCE]); count];
    let mut rest = Resource([0; RESOURCE]);
    let list = if wanted { groups.as_mut_ptr().cast() } else { std::ptr::null_mut() };
    // SAFETY: the list is null or has `count` elements, as have the demands; the structures have
    // cuda.h's size.
    check(unsafe {
        (session.driver.call.cuDevSmResourceSplit)(
            list,
            count as u32,
            (&raw const input).cast(),
            (&raw mut rest).cast(),
            flags,
            demands.as_mut_ptr().cast(),
        )
    })?;
    answer.bytes(&demands.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>());
    put_resource(session, &rest, answer)?;
    groups
        .iter()
        .take(if wanted { count } else { 0 })
        .try_for_each(|group| put_resource(session, group, answer))
}

/// `DEV_RESOURCE_DESC`: new handle, resources.
pub fn describe(session: &Session, r: &mut Reader<'_>) -> Done {
    let (handle, bytes) = (r.word()?, r.bytes()?);
    if bytes.len() / RESOURCE > MAX_GROUPS || !bytes.len().is_multiple_of(RESOURCE) {
        return Err(status::INVALID_VALUE.into());
    }
    let list =
        bytes.chunks_exact(RESOURCE).map(|one| existing(session, one)).collect::<Result<Vec<_>, _>>()?;
    let mut description = std::ptr::null_mut();
    // SAFETY: the out pointer is valid; the list has as many elements as stated.
    check(unsafe {
        (session.driver.call.cuDevResourceGenerateDesc)(
            &mut description,
            list.as_ptr().cast_mut().cast(),
            list.len() as u32,
        )
    })?;
    Ok(session.resource_descs.put(handle, Object(description))?)
}

/// `GREEN_CREATE`: new handle, new handle as a context, description, device, flags.
pub fn create(session: &Session, r: &mut Reader<'_>) -> Done {
    let (handle, ctx) = (r.word()?, r.word()?);
    let description = session.resource_descs.get(r.word()?)?.0;
    let (device, flags) = (r.word()?, r.word()? as u32);
    let ordinal = session.contexts.device(device)?;
    let call = &session.driver.call;
    let (mut green, mut real) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the out pointers are valid; the description belongs to this worker.
    check(unsafe {
        match (call.cuGreenCtxCreate)(&mut green, description, ordinal, flags) {
            0 => (call.cuCtxFromGreenCtx)(&mut real, green),
            failed => failed,
        }
    })?;
    session.contexts.put(ctx, real, device as u32)?;
    Ok(session.greens.put(handle, (Object(green), ctx))?)
}

/// `GREEN_DESTROY`: green context, whose memory stays with the device's primary context.
pub fn destroy(session: &Session, executor: &mut Executor, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (green, ctx) = session.greens.take(r.word()?)?;
    let (_, device) = session.contexts.get(ctx)?;
    let primary = handle::make(CTX, 0, 1, device);
    // An error in the context goes with it.
    let _ = session.contexts.synchronize_one(session.driver, ctx);
    flush_results(session, answer);
    session.lanes.leave(ctx);
    allocations::adopt(session, ctx, primary);
    session.contexts.take(ctx)?;
    executor.current = 0;
    session.contexts.enter(session.driver, executor, primary)?;
    // SAFETY: a green context of this worker that no later frame can name.
    Ok(check(unsafe { (session.driver.call.cuGreenCtxDestroy)(green.0) })?)
}

/// `CTX_EVENT`: context or green context, event, whether the context waits for it.
pub fn event(session: &Session, r: &mut Reader<'_>) -> Done {
    let (name, event, waits) = (r.word()?, session.events.get(r.word()?)?.0, r.word()? != 0);
    let call = &session.driver.call;
    // SAFETY: contexts and event belong to this worker.
    Ok(check(unsafe {
        match (handle::kind(name) == GREEN, waits) {
            (true, false) => (call.cuGreenCtxRecordEvent)(session.greens.get(name)?.0.0, event),
            (true, true) => (call.cuGreenCtxWaitEvent)(session.greens.get(name)?.0.0, event),
            (false, false) => (call.cuCtxRecordEvent)(session.contexts.get(name)?.0, event),
            (false, true) => (call.cuCtxWaitEvent)(session.contexts.get(name)?.0, event),
        }
    })?)
}
