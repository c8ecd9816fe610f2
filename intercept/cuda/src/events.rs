//! Events as the program sees them: once known to have happened, they are answered without asking.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use gpusession_link::lanes::On;
use gpusession_proto::handle;

use crate::client::Client;
use crate::entry::{INVALID_HANDLE, Result};
use crate::streams::{self, Capture, Stream};

/// One event.
pub struct Event {
    /// Whose it is.
    pub client: &'static Client,
    /// Its handle.
    pub handle: u64,
    /// `CUevent_flags`
    flags: u32,
    recorded: Mutex<Option<(Arc<Stream>, u64)>>,
    happened: AtomicU64,
    captured: Mutex<Option<Arc<Capture>>>,
    covers: Mutex<Vec<(On, u64)>>,
}

static EVENTS: RwLock<Vec<Option<Arc<Event>>>> = RwLock::new(Vec::new());

/// Remembers a new event.
pub fn add(client: &'static Client, new: u64, flags: u32) {
    let event = Arc::new(Event {
        client,
        handle: new,
        flags,
        recorded: Mutex::default(),
        happened: AtomicU64::new(0),
        captured: Mutex::default(),
        covers: Mutex::default(),
    });
    let slot = handle::slot(new) as usize;
    let mut events = EVENTS.write().unwrap_or_else(PoisonError::into_inner);
    if events.len() <= slot {
        events.resize(slot + 1, None);
    }
    events[slot] = Some(event);
}

/// An event by handle.
pub fn find(event: u64) -> Result<Arc<Event>> {
    if handle::kind(event) != handle::EVENT {
        return Err(INVALID_HANDLE);
    }
    let events = EVENTS.read().unwrap_or_else(PoisonError::into_inner);
    match events.get(handle::slot(event) as usize) {
        Some(Some(found)) if found.handle == event => Ok(found.clone()),
        _ => Err(INVALID_HANDLE),
    }
}

/// Forgets an event.
pub fn take(event: u64) -> Result<Arc<Event>> {
    let found = find(event)?;
    EVENTS.write().unwrap_or_else(PoisonError::into_inner)[handle::slot(event) as usize] = None;
    Ok(found)
}

/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;

impl Event {
    /// Whether a record on a stream without work is complete at once. One with a time is not: the time must be there.
    pub fn is_immediate(&self, stream: &Stream) -> bool {
        self.flags & DISABLE_TIMING != 0 && stream.capture().is_none() && stream.quiet()
    }

    /// The frame at this position records it.
    pub fn record(&self, stream: &Arc<Stream>, seq: u64) {
        *self.covers.lock().unwrap_or_else(PoisonError::into_inner) =
            if streams::tracking(self.client) { stream.covers(seq) } else { Vec::new() };
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) = Some((stream.clone(), seq));
        *self.captured.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// It was recorded in a capture.
    pub fn captured_in(&self, capture: &Arc<Capture>) {
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) = None;
        *self.captured.lock().unwrap_or_else(PoisonError::into_inner) = Some(capture.clone());
    }

    /// Transfers that are complete once it has happened: each stream up to a position.
    pub fn covers(&self) -> Vec<(On, u64)> {
        self.covers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether it was ever recorded outside of captures.
    pub fn recorded(&self) -> bool {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The capture that it was recorded in.
    pub fn capture(&self) -> Option<Arc<Capture>> {
        self.captured.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stream and position of its record, if that is not known to have happened.
    pub fn pending(&self) -> Option<(Arc<Stream>, u64)> {
        let recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        let known = self.happened.load(Ordering::Relaxed) >= recorded.1 || recorded.0.done(recorded.1);
        (!known).then_some(recorded)
    }

    /// The record at this position was complete at once.
    pub fn is_past(&self, seq: u64) {
        self.happened.fetch_max(seq, Ordering::Relaxed);
    }

    /// The record at this position is known to have happened, and so has what its stream did before.
    pub fn has_happened(&self, stream: &Stream, seq: u64) {
        self.happened.fetch_max(seq, Ordering::Relaxed);
        stream.synced(seq);
    }
}
