//! Copies of adjacent bytes between the client's host memory and the device.
//!
//! Few bytes travel inside the frame or its answer, many on the lanes. [`upload`] and [`download`]
//! serve boxes too.

use std::sync::Arc;

use gpusession_proto::frame::{INLINE_MAX, Reader, op};

use super::allocations;
use super::flush::flush_results;
use crate::answer::{Answer, Done, Failure, bounded};
use crate::driver::{Driver, Handle, Status, check, status};
use crate::executor::Executor;
use crate::frame::Frame;
use crate::lanes::{Memory, Source};
use crate::session::Session;

/// Longest copy, in bytes: more than any memory has.
const MAX_COPY: usize = 1 << 47;

/// The default stream of the current context.
const NULL: Handle = std::ptr::null_mut();
/// Bytes of host memory for a copy between devices that cannot reach each other.
const STAGE_BYTES: usize = 8 << 20;

/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMING: u32 = 2;

/// `cuMemcpyDtoDAsync_v2` in a lease of several devices: destination, source, length, stream.
///
/// The driver copies between mappings only if the device of the frame's context reaches both.
/// Otherwise the bytes pass through this process, in the stream's order.
pub fn between_devices(
    session: &Session,
    executor: &mut Executor,
    frame: &Frame,
    r: &mut Reader<'_>,
    answer: &mut Answer,
) -> Done {
    let mut body = frame.reader();
    let (target, source, len) = (body.word()?, body.word()?, bounded(body.word()?, usize::MAX)?);
    let stream = session.stream(body.word()?)?;
    let ctx = frame.header.ctx.get();
    let (_, here) = session.contexts.get(ctx)?;
    let owner = |address| session.memory.device_of(address).unwrap_or(here);
    let (to, from) = (owner(target), owner(source));
    if session.contexts.reaches(here, to) && session.contexts.reaches(here, from) {
        return allocations::generated(session, frame, r, answer);
    }
    let call = &session.driver.call;
    // SAFETY: a stream of this worker; a capture cannot contain the call, which then fails.
    check(unsafe { (call.cuStreamSynchronize)(stream) })?;
    let mut stage = vec![0u8; len.min(STAGE_BYTES)];
    let enter = |device| {
        // SAFETY: a context of this worker.
        check(unsafe { (call.cuCtxSetCurrent)(session.contexts.primary(device)?) })
    };
    let mut relay = || {
        for at in (0..len).step_by(STAGE_BYTES) {
            let part = stage.len().min(len - at);
            enter(from)?;
            // SAFETY: `part` bytes of the buffer, which outlives the synchronisation; the driver
            // checks the address.
            check(unsafe {
                (call.cuMemcpyDtoHAsync_v2)(
                    stage.as_mut_ptr().cast(),
                    source.wrapping_add(at as u64),
                    part,
                    NULL,
                )
            })?;
            // SAFETY: the null stream of the current context.
            check(unsafe { (call.cuStreamSynchronize)(NULL) })?;
            enter(to)?;
            // SAFETY: as above.
            check(unsafe {
                (call.cuMemcpyHtoDAsync_v2)(target.wrapping_add(at as u64), stage.as_ptr().cast(), part, NULL)
            })?;
            // SAFETY: as above.
            check(unsafe { (call.cuStreamSynchronize)(NULL) })?;
        }
        Ok(())
    };
    let relayed: Result<(), Status> = relay();
    executor.current = 0;
    session.contexts.enter(session.driver, executor, ctx)?;
    Ok(relayed?)
}

/// `COPY_TO_DEVICE`: destination, length, stream, whether the bytes follow in the frame.
pub fn to_device(session: &Session, frame: &Frame, r: &mut Reader<'_>) -> Done {
    let (target, len, stream, inline) =
        (r.word()?, bounded(r.word()?, MAX_COPY)?, session.stream(r.word()?)?, r.word()? != 0);
    let call = &session.driver.call;
    if inline {
        let bytes = r.bytes()?;
        if bytes.len() != len {
            return Err(status::INVALID_VALUE.into());
        }
        session.lanes.inline(len, 0);
        // SAFETY: `bytes` has `len` bytes, and the driver has copied pageable bytes when it
        // returns.
        return Ok(check(unsafe {
            (call.cuMemcpyHtoDAsync_v2)(target, bytes.as_ptr().cast(), len, stream)
        })?);
    }
    upload(session, frame, len, stream, |offset, len, bytes| {
        // SAFETY: by `upload` there are `len` bytes, which stay until the stream has reached them.
        check(unsafe {
            (call.cuMemcpyHtoDAsync_v2)(target.wrapping_add(offset as u64), bytes.cast(), len, stream)
        })
    })
}

/// Copies the `len` bytes of a transfer to the device, as its chunks arrive on the lanes.
///
/// `enqueue` puts a copy into `stream`: offset in the transfer, length, and address of the bytes.
pub fn upload(
    session: &Session,
    frame: &Frame,
    len: usize,
    stream: Handle,
    mut enqueue: impl FnMut(usize, usize, *mut u8) -> Result<(), Status>,
) -> Done {
    let transfer = frame.header.seq.get();
    let mut left = len;
    let mut outcome = Ok(());
    let mut mark = Mark::new(session.driver, stream);
    while left > 0 {
        let mut chunk = session.lanes.next_chunk(session.driver, transfer, || mark.reached())?;
        let inside =
            chunk.offset as usize <= len && chunk.len <= len - chunk.offset as usize && chunk.len <= left;
        if !inside {
            session.lanes.copied(chunk);
            return Err(Failure::Status(status::INVALID_VALUE));
        }
        left -= chunk.len;
        let (offset, len, address) = (chunk.offset as usize, chunk.len, chunk.memory.address());
        outcome = match &mut chunk.memory {
            // The slot is not reused before its event has happened.
            Memory::Slot(slot) => {
                let entered = slot.enter(session.driver, &session.contexts, frame.header.ctx.get());
                outcome.and(entered).and_then(|()| {
                    enqueue(offset, len, address)?;
                    // SAFETY: event and stream are this worker's.
                    check(unsafe { (session.driver.call.cuEventRecord)(slot.event, stream) })
                })
            }
            Memory::Heap(_) => outcome.and_then(|()| {
                // On a stream that stands still, the driver would wait in the call.
                session.lanes.wait_reached(session.driver, || mark.reached())?;
                enqueue(offset, len, address)?;
                // The memory lives no longer than the chunk.
                // SAFETY: a stream of this worker.
                check(unsafe { (session.driver.call.cuStreamSynchronize)(stream) })
            }),
        };
        session.lanes.copied(chunk);
    }
    Ok(outcome?)
}

/// Place of a copy in its stream.
pub struct Mark {
    driver: &'static Driver,
    stream: Handle,
    /// Recorded in front of the copy when somebody asks; null before, and if that fails.
    event: Handle,
    passed: bool,
    /// Why the work in front of the copy cannot complete.
    failed: Option<Status>,
}

impl Mark {
    /// Marks the end of a stream of this worker, in the current context.
    pub fn new(driver: &'static Driver, stream: Handle) -> Self {
        Self { driver, stream, event: NULL, passed: false, failed: None }
    }

    /// Returns `true` if the work in front of the copy is complete; an error if it has failed.
    ///
    /// An event, since a query of a stream leaves out the default stream's work that it waits for.
    pub fn reached(&mut self) -> Result<bool, Status> {
        let call = &self.driver.call;
        if self.event.is_null() && self.failed.is_none() {
            // SAFETY: the out pointer is valid; event and stream are this worker's.
            let marked = unsafe {
                check((call.cuEventCreate)(&mut self.event, NO_TIMING))
                    .and_then(|()| check((call.cuEventRecord)(self.event, self.stream)))
            };
            self.failed = marked.err();
        }
        if !self.passed && self.failed.is_none() {
            // SAFETY: the event is this worker's.
            match check(unsafe { (call.cuEventQuery)(self.event) }) {
                Ok(()) => self.passed = true,
                Err(status::NOT_READY) => {}
                Err(status) => self.failed = Some(status),
            }
        }
        self.failed.map_or(Ok(self.passed), Err)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if !self.event.is_null() {
            // SAFETY: the event is this worker's, and nothing else has it.
            let _ = unsafe { (self.driver.call.cuEventDestroy_v2)(self.event) };
        }
    }
}

/// `COPY_FROM_DEVICE`: source, length, stream, whether the program waits.
pub fn from_device(session: &Arc<Session>, frame: &Frame, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (source, len, name, wait) = (r.word()?, bounded(r.word()?, MAX_COPY)?, r.word()?, r.word()? != 0);
    let stream = session.stream(name)?;
    let to = Download { len, stream, name, wait };
    download(session, frame, &to, answer, |offset, len, target| {
        // SAFETY: by `download` the target has room for `len` bytes until the stream has filled it.
        check(unsafe {
            (session.driver.call.cuMemcpyDtoHAsync_v2)(
                target.cast(),
                source.wrapping_add(offset as u64),
                len,
                stream,
            )
        })
    })
}

/// Copy to the program.
pub struct Download {
    /// Length, in bytes.
    pub len: usize,
    pub stream: Handle,
    /// The client's handle of the stream.
    pub name: u64,
    /// Whether the program waits for the answer, with which few bytes then travel.
    pub wait: bool,
}

/// Sends bytes of the device: few in the answer or once they are there, many on the lanes.
///
/// `enqueue` puts a copy into the stream: offset in the transfer, length, and the target's address.
/// Bytes on the lanes are still on their way at the return.
pub fn download(
    session: &Arc<Session>,
    frame: &Frame,
    to: &Download,
    answer: &mut Answer,
    mut enqueue: impl FnMut(usize, usize, *mut u8) -> Result<(), Status>,
) -> Done {
    let Download { len, stream, name, wait } = *to;
    let call = &session.driver.call;
    let (seq, ctx) = (frame.header.seq.get(), frame.header.ctx.get());
    // SAFETY: stream and event are this worker's.
    let record = |event| check(unsafe { (call.cuEventRecord)(event, stream) });
    if len > INLINE_MAX {
        let from = Source { driver: session.driver, contexts: &session.contexts, stream, name };
        // A slot has room for a chunk and is not reused before it is sent.
        let queued = session.lanes.send(seq, len, Some(from), |offset, len, slot| {
            slot.enter(session.driver, &session.contexts, ctx)?;
            enqueue(offset, len, slot.address)?;
            record(slot.event)
        });
        return Ok(queued?);
    }
    session.lanes.inline(0, len);
    let slots = session.landing.slots(session.driver, &session.contexts)?;
    let Some(mut slot) = slots.try_take() else {
        return without_slot(session, frame, to, answer, enqueue);
    };
    if let Err(error) = slot.enter(session.driver, &session.contexts, ctx) {
        slots.give(slot);
        return Err(error.into());
    }
    // The slot has room for INLINE_MAX bytes.
    let copied = enqueue(0, len, slot.address);
    if wait {
        // SAFETY: a stream of this worker.
        let synced = copied.and_then(|()| check(unsafe { (call.cuStreamSynchronize)(stream) }));
        flush_results(session, answer);
        // SAFETY: the device has filled `len` bytes of the slot.
        answer.bytes(unsafe { std::slice::from_raw_parts(slot.address, len) });
        slots.give(slot);
        return Ok(synced?);
    }
    match copied.and_then(|()| record(slot.event)) {
        Ok(()) => session.landing.push(session.driver, &session.replies, seq, stream, slot, len),
        Err(error) => {
            slots.give(slot);
            return Err(error.into());
        }
    }
    Ok(())
}

/// Copies a few bytes from the device while blocked streams hold all slots.
///
/// Those streams must not delay the others.
fn without_slot(
    session: &Session,
    frame: &Frame,
    to: &Download,
    answer: &mut Answer,
    mut enqueue: impl FnMut(usize, usize, *mut u8) -> Result<(), Status>,
) -> Done {
    let mut bytes = vec![0u8; to.len];
    enqueue(0, to.len, bytes.as_mut_ptr())?;
    // The buffer outlives the synchronisation.
    // SAFETY: a stream of this worker.
    check(unsafe { (session.driver.call.cuStreamSynchronize)(to.stream) })?;
    flush_results(session, answer);
    if to.wait {
        answer.bytes(&bytes);
    } else {
        session.replies.send_with(op::LANDED, frame.header.seq.get(), 0, |w| w.bytes(&bytes));
    }
    Ok(())
}
