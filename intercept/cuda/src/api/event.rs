//! Events.

use std::ffi::c_void;

use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::client::{unavailable, word};
use crate::entry::{CAPTURED_EVENT, INVALID_HANDLE, INVALID_VALUE, NOT_READY, Result, alias, driver, give};
use crate::events::{DISABLE_TIMING, Event, INTERPROCESS};
use crate::graph_uses::Uses;
use crate::streams::{self, find};
use crate::{clients, events, handles, regions, thread};

/// `CU_EVENT_RECORD_EXTERNAL`
const EXTERNAL: u32 = 1;

fn record(event: *mut c_void, stream: *mut c_void, default: streams::Default, flags: u32) -> Result {
    let event = events::find(event as u64)?;
    let (client, stream) = find(stream, default)?;
    if event.client.number != client.number {
        return Err(INVALID_HANDLE);
    }
    stream.usable()?;
    let order = event.order();
    let immediate = event.is_immediate(&stream);
    // A process that learns of the record by other means finds it: it has arrived.
    let seq = client.post_if(!event.is_shared(), op::EVENT_RECORD, |w| {
        w.word(event.handle);
        w.word(stream.handle);
        w.word(u64::from(flags));
    })?;
    if immediate {
        event.is_past(seq);
    } else {
        stream.worked(seq);
    }
    match stream.capture() {
        // A node that records the event; outside the capture its last record stays what it was.
        Some(capture) if flags & EXTERNAL != 0 => {
            event.record_in_graphs();
            capture.note(&Uses { recorded: vec![event.handle], ..Uses::default() });
        }
        Some(capture) => {
            event.record(&stream, seq);
            event.captured_in(&capture);
        }
        None => event.record(&stream, seq),
    }
    drop(order);
    client.take_late_error()
}

/// Queries an event (`EVENT_QUERY`) or waits for it (`EVENT_SYNC`).
fn ask(operation: u16, event: *mut c_void) -> Result {
    clients::get()?;
    ask_of(operation, &*events::find(event as u64)?)
}

/// Waits in the call for another lease's event, because the other server cannot.
pub fn wait_here(event: &Event) -> Result {
    ask_of(op::EVENT_SYNC, event)
}

fn ask_of(operation: u16, event: &Event) -> Result {
    let client = event.client;
    if let Some(capture) = event.capture() {
        capture.invalidate();
        return Err(CAPTURED_EVENT);
    }
    streams::allowed()?;
    if event.pending().is_none() && !event.is_recorded_elsewhere() {
        // The event is known to have happened, so its data has landed, too.
        return client.take_late_error();
    }
    if operation == op::EVENT_QUERY && client.link.is_away() {
        return Err(NOT_READY);
    }
    regions::upload_awaited(client)?;
    client.free_blocks(operation)?;
    // The record that the frame means: another thread may make a new one while this one waits.
    let order = event.order();
    let pending = event.pending();
    let begun =
        client.link.begin_call(operation, client.caller(), |w| w.word(event.handle)).map_err(unavailable)?;
    let seq = begun.seq;
    // Of an event that graphs record, they are looked up after the wait.
    let covers = if event.is_in_graphs() { Vec::new() } else { event.covers_before(seq) };
    drop(order);
    let reply = client.finish(begun)?;
    // Another process's record says nothing about the work of this one.
    let own = !event.is_interprocess() || word(&mut reply.reader()) != Ok(0);
    if reply.status == 0 && event.is_in_graphs() {
        // The last record may be a graph's on another stream than the one that this process knows.
        streams::settle_covered(client, &event.covers_before(seq))?;
    } else if reply.status == 0
        && let Some(record) = pending.filter(|_| own)
    {
        streams::settle_covered(client, &covers)?;
        event.has_happened(&record, operation == op::EVENT_SYNC);
    }
    client.check_status(reply.status)
}

fn elapsed(ms: *mut f32, start: *mut c_void, end: *mut c_void) -> Result {
    clients::get()?;
    let (start, end) = (events::find(start as u64)?, events::find(end as u64)?);
    let client = start.client;
    if client.number != end.client.number {
        return Err(INVALID_HANDLE);
    }
    let reply = client.call(op::EVENT_ELAPSED, |w| {
        w.word(start.handle);
        w.word(end.handle);
    })?;
    give(ms, f32::from_bits(word(&mut reply.reader())? as u32))
}

driver! {
    fn cuEventCreate(event: *mut *mut c_void, flags: u32) {
        let client = clients::get()?;
        thread::context()?;
        if event.is_null() || flags > 7 || flags & (INTERPROCESS | DISABLE_TIMING) == INTERPROCESS {
            return Err(INVALID_VALUE);
        }
        let new = client.mint(handle::EVENT);
        client.post(op::EVENT_CREATE, |w| {
            w.word(new);
            w.word(u64::from(flags));
        })?;
        events::add(client, new, flags);
        give(event, new as *mut c_void)
    }

    fn cuEventDestroy_v2(event: *mut c_void) {
        clients::get()?;
        let known = events::take(event as u64)?;
        known.client.post(op::EVENT_DESTROY, |w| w.word(known.handle))?;
        handles::retire(known.handle);
        Ok(())
    }

    fn cuEventRecord / cuEventRecord_ptsz [default] (event: *mut c_void, stream: *mut c_void) {
        record(event, stream, default, 0)
    }

    fn cuEventRecordWithFlags / cuEventRecordWithFlags_ptsz [default] (event: *mut c_void, stream: *mut c_void, flags: u32) {
        record(event, stream, default, flags)
    }

    fn cuEventQuery(event: *mut c_void) {
        ask(op::EVENT_QUERY, event)
    }

    fn cuEventSynchronize(event: *mut c_void) {
        ask(op::EVENT_SYNC, event)
    }

    fn cuEventElapsedTime(ms: *mut f32, start: *mut c_void, end: *mut c_void) {
        elapsed(ms, start, end)
    }

    fn cuEventElapsedTime_v2(ms: *mut f32, start: *mut c_void, end: *mut c_void) {
        elapsed(ms, start, end)
    }
}

alias! {
    cuEventDestroy = cuEventDestroy_v2(event: *mut c_void);
}
