//! Events, among them those that several processes use.

use std::time::Duration;

use gpusession_proto::frame::Reader;
use gpusession_proto::share::{Kind, Token};
use gpusession_proto::supervise::Charge;

use super::flush::flush_results;
use super::share;
use crate::answer::{Answer, Done};
use crate::driver::{Address, Handle, Status, check, status};
use crate::frame::Frame;
use crate::handles::Object;
use crate::objects::counters::{Claim, Counters, EVENT, Record};
use crate::objects::shares::Source;
use crate::session::Session;

/// `CU_EVENT_DISABLE_TIMING` and `CU_EVENT_INTERPROCESS`
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
/// Pauses between polls of a record of another process: at first, and later on.
const POLL_INTERVALS: [Duration; 2] = [Duration::from_micros(20), Duration::from_micros(200)];

/// `CUstreamBatchMemOpParams`: a wait until a word is at least a value, or a write of it.
#[repr(C)]
#[derive(Clone, Copy)]
struct OnWord {
    operation: u64,
    address: Address,
    value: u64,
    flags: u64,
    alias: u64,
    reserved: u64,
}

/// `CU_STREAM_MEM_OP_WAIT_VALUE_64` and `CU_STREAM_MEM_OP_WRITE_VALUE_64`
const WAIT_64: u64 = 4;
const WRITE_64: u64 = 5;

impl OnWord {
    fn new(operation: u64, (address, value): (Address, u64)) -> Self {
        Self { operation, address, value, flags: 0, alias: 0, reserved: 0 }
    }
}

fn enqueue(session: &Session, stream: Handle, items: &[OnWord]) -> Result<(), Status> {
    let count = items.len() as u32;
    // SAFETY: the array has that many elements in cuda.h's layout; the addresses lie in pages that
    // stay registered while a stream may use them.
    check(unsafe { (session.driver.call.cuStreamBatchMemOp_v2)(stream, count, items.as_ptr().cast(), 0) })
}

/// Returns `true` if work on a stream does not run now, but becomes part of a graph.
fn captures(session: &Session, stream: Handle) -> bool {
    let mut state = 0;
    // SAFETY: a stream of this worker; the out pointer is valid.
    let asked = unsafe { (session.driver.call.cuStreamIsCapturing)(stream, &mut state) };
    asked != 0 || state != 0
}

/// Waits for a record of another process, as its worker or the end of it completes the record.
#[expect(clippy::disallowed_methods, reason = "another process's device writes the counter")]
fn wait_for(counters: &Counters, record: Record) {
    for poll in 0u32.. {
        if counters.is_complete(record) {
            return;
        }
        std::thread::sleep(POLL_INTERVALS[usize::from(poll > 50)]);
    }
}

fn create_plain(session: &Session, flags: u32) -> Result<Object, Status> {
    let mut event = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    check(unsafe { (session.driver.call.cuEventCreate)(&mut event, flags) })?;
    Ok(Object(event))
}

fn destroy_plain(session: &Session, event: Object) -> Result<(), Status> {
    // SAFETY: an event of this worker that no later frame can name.
    check(unsafe { (session.driver.call.cuEventDestroy_v2)(event.0) })
}

/// `EVENT_CREATE`: new handle, flags.
///
/// An event for several processes has an event of the driver, too, which counts within this one.
pub fn create(session: &Session, r: &mut Reader<'_>) -> Done {
    let (handle, flags) = (r.word()?, r.word()? as u32);
    if flags & INTERPROCESS == 0 || session.shares.possible().is_err() {
        return Ok(session.events.put(handle, create_plain(session, flags & !INTERPROCESS)?)?);
    }
    if flags & DISABLE_TIMING == 0 {
        return Err(status::INVALID_VALUE.into());
    }
    let counters =
        session.contexts.within_first(session.driver, || session.shared_events.create(session.driver))?;
    let event = create_plain(session, flags & !INTERPROCESS)?;
    session.events.put(handle, event)?;
    session.shared_events.put(handle, counters);
    Ok(())
}

/// `EVENT_DESTROY`
pub fn destroy(session: &Session, r: &mut Reader<'_>) -> Done {
    let handle = r.word()?;
    let event = session.events.take(handle)?;
    if let Some(share) = session.shared_events.remove(handle) {
        session.shares.moved(&mut session.shares.exports(), share, None);
    }
    Ok(destroy_plain(session, event)?)
}

/// `EVENT_RECORD`: event, stream, flags.
pub fn record(session: &Session, r: &mut Reader<'_>) -> Done {
    let handle = r.word()?;
    let (event, stream, flags) =
        (session.events.get(handle)?.0, session.stream(r.word()?)?, r.word()? as u32);
    let call = &session.driver.call;
    // SAFETY: both belong to this worker.
    check(unsafe {
        if flags == 0 {
            (call.cuEventRecord)(event, stream)
        } else {
            (call.cuEventRecordWithFlags)(event, stream, flags)
        }
    })?;
    match session.shared_events.get(handle) {
        Some(counters) if !captures(session, stream) => Ok(announce(session, &counters, stream)?),
        _ => Ok(()),
    }
}

/// Makes a record visible to other processes.
fn announce(session: &Session, counters: &Counters, stream: Handle) -> Result<(), Status> {
    let (record, behind) = loop {
        match counters.claim(session.shared_events.tag) {
            Claim::Made(record, behind) => break (record, behind),
            Claim::Full(other) => wait_for(counters, other),
        }
    };
    let wait = behind.map(|earlier| OnWord::new(WAIT_64, counters.target(earlier)));
    let items: Vec<_> = wait.into_iter().chain([OnWord::new(WRITE_64, counters.target(record))]).collect();
    enqueue(session, stream, &items).inspect_err(|_| counters.complete(record))
}

/// `STREAM_WAIT_EVENT`: stream, event, flags.
pub fn wait(session: &Session, r: &mut Reader<'_>) -> Done {
    let (stream, handle) = (session.stream(r.word()?)?, r.word()?);
    let (event, flags) = (session.events.get(handle)?.0, r.word()? as u32);
    if let Some(counters) = session.shared_events.get(handle)
        && let Some(record) = others_record(session, &counters)
        && !captures(session, stream)
    {
        if !counters.is_complete(record) {
            enqueue(session, stream, &[OnWord::new(WAIT_64, counters.target(record))])?;
        }
        return Ok(());
    }
    // SAFETY: both belong to this worker.
    Ok(check(unsafe { (session.driver.call.cuStreamWaitEvent)(stream, event, flags) })?)
}

/// Returns the last record of an event if another process made it.
fn others_record(session: &Session, counters: &Counters) -> Option<Record> {
    counters.latest().filter(|record| !record.is_of(session.shared_events.tag))
}

/// `EVENT_SYNC`; for an event of several processes answers whether the last record is this one's.
pub fn sync(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let handle = r.word()?;
    let event = session.events.get(handle)?.0;
    if let Some(counters) = session.shared_events.get(handle) {
        let others = others_record(session, &counters);
        answer.word(others.is_none().into());
        if let Some(record) = others {
            wait_for(&counters, record);
            return Ok(());
        }
    }
    // SAFETY: an event of this worker.
    let synced = check(unsafe { (session.driver.call.cuEventSynchronize)(event) });
    flush_results(session, answer);
    Ok(synced?)
}

/// `EVENT_QUERY`; answers as `EVENT_SYNC` does.
pub fn query(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let handle = r.word()?;
    let event = session.events.get(handle)?.0;
    if let Some(counters) = session.shared_events.get(handle) {
        let others = others_record(session, &counters);
        answer.word(others.is_none().into());
        if let Some(record) = others {
            return if counters.is_complete(record) { Ok(()) } else { Err(status::NOT_READY.into()) };
        }
    }
    // SAFETY: an event of this worker.
    let done = check(unsafe { (session.driver.call.cuEventQuery)(event) });
    if done != Err(status::NOT_READY) {
        flush_results(session, answer);
    }
    Ok(done?)
}

/// `EVENT_ELAPSED`: start, end; answers milliseconds as the bits of an f32.
pub fn elapsed(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (start, end) = (session.events.get(r.word()?)?.0, session.events.get(r.word()?)?.0);
    let mut ms = 0f32;
    // SAFETY: the out pointer is valid.
    check(unsafe { (session.driver.call.cuEventElapsedTime)(&mut ms, start, end) })?;
    answer.word(u64::from(ms.to_bits()));
    Ok(())
}

/// `SHARE_EVENT`: event; answers a token.
pub fn export(session: &Session, frame: &Frame, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let handle = r.word()?;
    session.events.get(handle)?;
    session.shares.possible()?;
    let counters = session.shared_events.get(handle).filter(|counters| counters.owner.is_none());
    let counters = counters.ok_or(status::INVALID_HANDLE)?;
    let device = session.contexts.get(frame.header.ctx.get()).map_or(0, |(_, device)| device);
    let (page, offset) = counters.place();
    let charge = Charge { device, bytes: 0 };
    let mut share = counters.share.lock().map_err(|_| status::UNKNOWN)?;
    let name = session.shares.name(&mut share, Kind::Event, Source::Counters(page.clone()), charge);
    let name = name.ok_or(status::OPERATING_SYSTEM)?;
    answer.bytes(&Token { name, offset: offset as u64, size: EVENT as u64 }.bytes());
    Ok(())
}

/// `SHARE_EVENT_OPEN`: new handle, a token.
pub fn open(session: &Session, r: &mut Reader<'_>) -> Done {
    let handle = r.word()?;
    let (token, given) = share::request(session, r, Kind::Event)?;
    let opened = session.contexts.within_first(session.driver, || {
        let settle = || session.contexts.synchronize(session.driver);
        session.shared_events.open(session.driver, given, token.offset, token.name.worker, settle)
    });
    let counters = opened?;
    session.events.put(handle, create_plain(session, DISABLE_TIMING)?)?;
    session.shared_events.put(handle, counters);
    Ok(())
}
