//! Events as the program sees them; those known to have happened need no round trip.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use gpusession_proto::handle;

use crate::client::Client;
use crate::positions::Cover;
use crate::status::{INVALID_HANDLE, Result};
use crate::streams::{self, Capture, Stream};

/// One event.
pub struct Event {
    pub client: &'static Client,
    pub handle: u64,
    /// `CUevent_flags`
    flags: u32,
    order: Mutex<()>,
    recorded: Mutex<Option<Record>>,
    happened: AtomicU64,
    captured: Mutex<Option<Arc<Capture>>>,
    covers: Mutex<Vec<Cover>>,
    /// Whether other processes may record it, so that only its worker knows its last record.
    shared: AtomicBool,
    /// Whether launches of graphs may record it.
    in_graphs: AtomicBool,
}

/// A record of an event, outside of captures.
#[derive(Clone)]
pub struct Record {
    stream: Arc<Stream>,
    /// Position of the frame that records the event.
    pub seq: u64,
    /// Whether the frame is a launch, whose event happens before the kernel is complete.
    early: bool,
}

static EVENTS: RwLock<Vec<Option<Arc<Event>>>> = RwLock::new(Vec::new());

/// Adds a new event to the table.
pub fn add(client: &'static Client, new: u64, flags: u32) {
    let event = Arc::new(Event {
        client,
        handle: new,
        flags,
        order: Mutex::default(),
        recorded: Mutex::default(),
        happened: AtomicU64::new(0),
        captured: Mutex::default(),
        covers: Mutex::default(),
        shared: AtomicBool::new(false),
        in_graphs: AtomicBool::new(false),
    });
    let slot = handle::index(new);
    let mut events = EVENTS.write().unwrap_or_else(PoisonError::into_inner);
    if events.len() <= slot {
        events.resize(slot + 1, None);
    }
    events[slot] = Some(event);
}

/// Returns an event by handle.
pub fn find(event: u64) -> Result<Arc<Event>> {
    if handle::kind(event) != handle::EVENT {
        return Err(INVALID_HANDLE);
    }
    let events = EVENTS.read().unwrap_or_else(PoisonError::into_inner);
    match events.get(handle::index(event)) {
        Some(Some(found)) if found.handle == event => Ok(found.clone()),
        _ => Err(INVALID_HANDLE),
    }
}

/// Removes an event from the table and returns it.
pub fn take(event: u64) -> Result<Arc<Event>> {
    let found = find(event)?;
    EVENTS.write().unwrap_or_else(PoisonError::into_inner)[handle::index(event)] = None;
    Ok(found)
}

/// Returns the streams that a wait at a position for all of these events covers.
pub fn covers_of(events: &[u64], seq: u64) -> Vec<Cover> {
    events.iter().filter_map(|event| find(*event).ok()).flat_map(|event| event.covers_before(seq)).collect()
}

/// `CU_EVENT_DISABLE_TIMING` and `CU_EVENT_INTERPROCESS`
pub const DISABLE_TIMING: u32 = 2;
pub const INTERPROCESS: u32 = 4;

impl Event {
    /// Locks the event's records and waits: their frames have the order in which this process notes
    /// them.
    ///
    /// Hold it from the look at the last record to the frame, and from the frame of a record to its
    /// note. `None` for an event of several processes: a call on it waits for the reply, and this
    /// process does not know its last record anyway.
    pub fn order(&self) -> Option<MutexGuard<'_, ()>> {
        (!self.is_shared()).then(|| self.order.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns `true` for an event that was created for several processes.
    pub fn is_interprocess(&self) -> bool {
        self.flags & INTERPROCESS != 0
    }

    /// Notes that other processes know the event from now on.
    pub fn share(&self) {
        self.shared.store(true, Ordering::SeqCst);
    }

    /// Returns `true` if other processes may know the event.
    pub fn is_shared(&self) -> bool {
        self.shared.load(Ordering::SeqCst)
    }

    /// Notes that a node of a graph records the event from now on.
    pub fn record_in_graphs(&self) {
        self.in_graphs.store(true, Ordering::SeqCst);
    }

    /// Returns `true` if launches of graphs may record the event.
    pub fn is_in_graphs(&self) -> bool {
        self.in_graphs.load(Ordering::SeqCst)
    }

    /// Returns `true` if this process may not know the event's last record.
    pub fn is_recorded_elsewhere(&self) -> bool {
        self.is_shared() || self.is_in_graphs()
    }

    /// Returns `true` if a record on an idle stream counts as complete at once.
    ///
    /// An event with timing does not count: its time comes from the device.
    pub fn is_immediate(&self, stream: &Stream) -> bool {
        self.flags & DISABLE_TIMING != 0
            && !self.is_recorded_elsewhere()
            && stream.capture().is_none()
            && stream.quiet()
    }

    /// Notes that the frame at this position records the event.
    pub fn record(&self, stream: &Arc<Stream>, seq: u64) {
        self.note_on(stream, seq, false);
    }

    /// Notes that the launch at this position records the event before its kernel is complete.
    ///
    /// The work before the launch is complete by then, so that its copies count as covered.
    pub fn record_in_launch(&self, stream: &Arc<Stream>, seq: u64) {
        self.note_on(stream, seq, true);
    }

    fn note_on(&self, stream: &Arc<Stream>, seq: u64, early: bool) {
        let covers = if streams::tracking(self.client) { stream.covers(seq) } else { Vec::new() };
        self.note(Record { stream: stream.clone(), seq, early }, covers);
    }

    fn note(&self, record: Record, covers: Vec<Cover>) {
        *self.covers.lock().unwrap_or_else(PoisonError::into_inner) = covers;
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        *self.captured.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Notes that the frame at this position records the event for all streams of contexts.
    ///
    /// `together` stands for these streams, and `covers` names them.
    pub fn record_all(&self, together: Arc<Stream>, seq: u64, covers: Vec<Cover>) {
        self.note(Record { stream: together, seq, early: false }, covers);
    }

    /// Notes that the event was recorded in a capture.
    pub fn captured_in(&self, capture: &Arc<Capture>) {
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) = None;
        *self.captured.lock().unwrap_or_else(PoisonError::into_inner) = Some(capture.clone());
    }

    /// Streams, each up to a position, whose transfers are complete once the event has happened.
    ///
    /// `seq` is the position of the call that waits. A launch of a graph may have recorded the
    /// event on any stream before it.
    pub fn covers_before(&self, seq: u64) -> Vec<Cover> {
        if self.is_in_graphs() && streams::tracking(self.client) {
            return streams::all(self.client).iter().flat_map(|stream| stream.covers(seq)).collect();
        }
        self.covers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns `true` if the last record was outside of captures.
    pub fn recorded(&self) -> bool {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Returns the capture of the last record.
    pub fn capture(&self) -> Option<Arc<Capture>> {
        self.captured.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the last record, unless it is known to have happened.
    pub fn pending(&self) -> Option<Record> {
        let recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        let happened = self.happened.load(Ordering::Relaxed) >= recorded.seq;
        (!happened && !recorded.stream.done(recorded.seq)).then_some(recorded)
    }

    /// Notes that the record at this position was complete at once.
    pub fn is_past(&self, seq: u64) {
        self.happened.fetch_max(seq, Ordering::Relaxed);
    }

    /// Notes that a record has happened, and all earlier work of its stream; `waited`: by a wait
    /// for it.
    pub fn has_happened(&self, record: &Record, waited: bool) {
        self.is_past(record.seq);
        match (record.early, waited) {
            (true, _) => {}
            (false, true) => record.stream.synced(record.seq),
            (false, false) => record.stream.finished(record.seq),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_worker::Program;

    fn setup(flags: u32) -> (Arc<Event>, Arc<Stream>) {
        let program = Program::new();
        let new = program.client.mint(handle::EVENT);
        add(program.client, new, flags);
        let stream = program.client.mint(handle::STREAM);
        (find(new).unwrap(), Arc::new(Stream::new(program.client, stream, program.ctx, 1, 0, 9)))
    }

    #[test]
    fn event_is_pending_until_its_last_record_has_happened() {
        let (event, stream) = setup(0);
        assert!(event.pending().is_none(), "never recorded");
        event.record(&stream, 5);
        assert!(event.recorded() && event.pending().is_some_and(|record| record.seq == 5));
        stream.synced(4);
        assert!(event.pending().is_some());
        stream.synced(5);
        assert!(event.pending().is_none(), "the stream was synchronized behind it");
        event.record(&stream, 8);
        assert!(event.pending().is_some());
        event.has_happened(&event.pending().unwrap(), true);
        assert!(event.pending().is_none() && stream.done(8), "the stream's earlier work is done, too");
        event.record(&stream, 9);
        event.is_past(9);
        assert!(event.pending().is_none() && !stream.done(9));
    }

    #[test]
    fn event_of_a_launch_says_nothing_about_the_end_of_the_kernel() {
        let (event, stream) = setup(DISABLE_TIMING);
        stream.worked(5);
        event.record_in_launch(&stream, 5);
        event.has_happened(&event.pending().unwrap(), true);
        assert!(event.pending().is_none() && !stream.done(5));
        event.record_in_launch(&stream, 7);
        stream.synced(7);
        assert!(event.pending().is_none(), "the end of the kernel is behind its event");
    }

    #[test]
    fn only_an_event_without_timing_may_be_past_at_once() {
        let (timed, stream) = setup(0);
        let (event, _) = setup(DISABLE_TIMING);
        assert!(event.is_immediate(&stream) && !timed.is_immediate(&stream));
        stream.worked(3);
        assert!(!event.is_immediate(&stream), "the stream has work");
        stream.synced(3);
        assert!(event.is_immediate(&stream));
    }

    #[test]
    fn destroyed_event_has_no_handle() {
        let (event, _) = setup(0);
        assert!(take(event.handle).is_ok());
        assert_eq!(find(event.handle).err(), Some(INVALID_HANDLE));
        assert_eq!(take(event.handle).err(), Some(INVALID_HANDLE));
        let other = handle::make(handle::STREAM, 0, 1, handle::slot(event.handle));
        assert_eq!(find(other).err(), Some(INVALID_HANDLE));
    }
}
