//! Waits for all work of contexts, also while another thread of the program captures.
//!
//! The driver refuses to synchronize a context with a capture, and invalidates the capture. A
//! program that frees memory in one thread does not expect that of another thread's capture. So the
//! wait is then for events on the streams that take no part in a capture.

use crate::contexts::within;
use crate::driver::{Handle, Status, check, status};
use crate::handles::Object;
use crate::objects::Stream;
use crate::session::Session;

/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`
const FIRST_OF_CAPTURES: Status = 900;
/// `CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD`
const LAST_OF_CAPTURES: Status = 908;
/// `CUDA_ERROR_CAPTURED_EVENT`
const CAPTURED_EVENT: Status = 907;
/// `CU_STREAM_CAPTURE_STATUS_NONE`
const NOT_CAPTURING: i32 = 0;

fn captures(session: &Session, stream: Handle) -> bool {
    let mut status = NOT_CAPTURING;
    // SAFETY: a stream of this worker; the pointer is valid.
    let said = unsafe { (session.driver.call.cuStreamIsCapturing)(stream, &mut status) };
    said == 0 && status != NOT_CAPTURING
}

/// Waits for the current context, which has this handle.
pub fn context(session: &Session, ctx: u64) -> Result<(), Status> {
    session.settling.during(|captured| {
        match beside_captures(session, captured, &[None], |stream| stream.ctx == ctx) {
            // SAFETY: the call takes no pointer.
            None => check(unsafe { (session.driver.call.cuCtxSynchronize)() }),
            Some(events) => reach(session, events),
        }
    })
}

/// Waits for all contexts, then returns the first error.
pub fn all(session: &Session) -> Result<(), Status> {
    let contexts: Vec<_> = session.contexts.all().into_iter().map(Some).collect();
    session.settling.during(|captured| match beside_captures(session, captured, &contexts, |_| true) {
        None => session.contexts.synchronize(session.driver),
        Some(events) => reach(session, events),
    })
}

/// Records an event on each wanted stream that has work and takes part in no capture, and on the
/// default streams of the contexts (`None`: the current one).
///
/// `None` if no wanted stream captures.
fn beside_captures(
    session: &Session,
    captured: bool,
    contexts: &[Option<Object>],
    wanted: impl Fn(&Stream) -> bool,
) -> Option<(Vec<Object>, Result<(), Status>)> {
    if !captured {
        return None;
    }
    // No stream begins to capture, and none is destroyed, before its event is recorded.
    let _streams = session.settling.streams();
    let streams: Vec<Stream> = session.streams.all().into_iter().filter(wanted).collect();
    let (capturing, free): (Vec<_>, Vec<_>) =
        streams.into_iter().partition(|stream| captures(session, stream.object.0));
    if capturing.is_empty() {
        return None;
    }
    let mut events = Vec::new();
    let mut record = |stream| mark(session, stream).map(|event| events.extend(event));
    let mut marked = free.iter().map(|stream| record(stream.object.0)).fold(Ok(()), Result::and);
    // Work on the default stream would involve a capture on a stream that is ordered with it.
    if capturing.iter().all(|stream| stream.non_blocking) {
        let default = std::ptr::null_mut();
        for context in contexts {
            marked = marked.and(match context {
                Some(ctx) => within(session.driver, ctx.0, || record(default)),
                None => record(default),
            });
        }
    }
    Some((events, marked))
}

/// Returns a new event behind the stream's work; `None` if it has none.
fn mark(session: &Session, stream: Handle) -> Result<Option<Object>, Status> {
    let call = &session.driver.call;
    // SAFETY: a stream of this worker.
    match check(unsafe { (call.cuStreamQuery)(stream) }) {
        Err(status::NOT_READY) => {}
        // The stream joined a capture meanwhile.
        Err(FIRST_OF_CAPTURES..=LAST_OF_CAPTURES) => return Ok(None),
        finished => return finished.map(|()| None),
    }
    let mut event = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    check(unsafe { (call.cuEventCreate)(&mut event, DISABLE_TIMING) })?;
    // SAFETY: a stream of this worker, and the event made above.
    let recorded = check(unsafe { (call.cuEventRecord)(event, stream) });
    // SAFETY: the event made above.
    recorded.map(|()| Some(Object(event))).inspect_err(|_| unsafe {
        (call.cuEventDestroy_v2)(event);
    })
}

/// Waits for the events and destroys them; returns the first error, also of their records.
fn reach(session: &Session, (events, marked): (Vec<Object>, Result<(), Status>)) -> Result<(), Status> {
    let call = &session.driver.call;
    let one = |event: Object| {
        // SAFETY: an event that `mark` made, and that only this function knows.
        let reached = match check(unsafe { (call.cuEventSynchronize)(event.0) }) {
            // The stream joined a capture before the record, which is then no work.
            Err(CAPTURED_EVENT) => Ok(()),
            reached => reached,
        };
        // SAFETY: as above.
        unsafe { (call.cuEventDestroy_v2)(event.0) };
        reached
    };
    events.into_iter().map(one).fold(marked, Result::and)
}
