//! Small asynchronous copies from the device: the bytes wait in pinned slots until the stream got there, then go to the
//! client. Whoever has just synchronised a stream sends what is ready, so that data always arrives before the answer that
//! says it is complete; a thread of its own does the same for programs that only watch their memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use gpusession_proto::frame::{INLINE_MAX, op};

use crate::driver::{Driver, Handle, Status, check, status};
use crate::session::Session;
use crate::staging::{Slot, Slots};

const SLOTS: usize = 64;
/// How often the thread looks whether something is ready.
const LOOK: Duration = Duration::from_micros(200);
/// It goes on looking for this long after the last copy: waking it for each would cost more than the copy.
const LINGER: u32 = 5000;

struct Pending {
    seq: u64,
    /// Address of the driver's stream.
    stream: usize,
    slot: Slot,
    len: usize,
}

/// See the module.
#[derive(Default)]
pub struct Landing {
    slots: OnceLock<Slots>,
    pending: Mutex<Vec<Pending>>,
    thread: OnceLock<std::thread::Thread>,
    asleep: AtomicBool,
}

impl Landing {
    /// The pinned slots, made at first use.
    pub fn slots(&self, session: &Session) -> Result<&Slots, Status> {
        if let Some(slots) = self.slots.get() {
            return Ok(slots);
        }
        let slots = session
            .contexts
            .within_first(session.driver, || Slots::new(session.driver, SLOTS, INLINE_MAX))?;
        Ok(self.slots.get_or_init(|| slots))
    }

    /// The context that they were pinned in was reset; it is current.
    pub fn pin_again(&self, driver: &Driver) {
        // Copies work without it.
        let _ = self.slots.get().map(|slots| slots.pin(driver));
    }

    /// Queues what `slot` will hold once its event has happened.
    pub fn push(&self, session: &Arc<Session>, seq: u64, stream: Handle, slot: Slot, len: usize) {
        let pending = Pending { seq, stream: stream as usize, slot, len };
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).push(pending);
        let thread = self.thread.get_or_init(|| {
            let session = session.clone();
            let look = move || session.landing.look(&session);
            match std::thread::Builder::new().name("landing".into()).spawn(look) {
                Ok(thread) => thread.thread().clone(),
                // Synchronizing calls still deliver.
                Err(_) => std::thread::current(),
            }
        });
        if self.asleep.load(Ordering::SeqCst) {
            thread.unpark();
        }
    }

    fn look(&self, session: &Session) {
        let mut idle = 0;
        loop {
            let left = {
                // Sent under the lock: whoever sweeps next must find either the data or that it was sent.
                let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
                let mut frames = Vec::new();
                self.sweep_locked(&mut pending, session, &mut frames);
                if !frames.is_empty() {
                    session.send_frames(&frames);
                }
                pending.len()
            };
            idle = if left > 0 { 0 } else { idle + 1 };
            if idle > LINGER {
                self.asleep.store(true, Ordering::SeqCst);
                if self.pending.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
                    std::thread::park();
                }
                self.asleep.store(false, Ordering::SeqCst);
                idle = 0;
            } else {
                std::thread::sleep(LOOK);
            }
        }
    }

    /// Whether nothing is on its way.
    pub fn idle(&self) -> bool {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Appends frames with what is ready.
    pub fn sweep(&self, session: &Session, frames: &mut Vec<u8>) {
        self.sweep_locked(&mut self.pending.lock().unwrap_or_else(PoisonError::into_inner), session, frames);
    }

    /// Appends frames with what was put on a stream of a context before frame `seq`, which the stream has come to: for a host
    /// function, in which the driver may not be asked.
    pub fn reached(&self, session: &Session, ctx: u64, stream: Handle, seq: u64, frames: &mut Vec<u8>) {
        let Some(slots) = self.slots.get() else { return };
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        for done in
            pending.extract_if(.., |p| p.stream == stream as usize && p.slot.ctx == ctx && p.seq < seq)
        {
            // SAFETY: as in `sweep_locked`.
            session.append(frames, op::LANDED, done.seq, 0, |w| unsafe {
                w.bytes(std::slice::from_raw_parts(done.slot.address, done.len));
            });
            slots.give(done.slot);
        }
    }

    fn sweep_locked(&self, pending: &mut Vec<Pending>, session: &Session, frames: &mut Vec<u8>) {
        let Some(slots) = self.slots.get() else { return };
        let mut i = 0;
        while i < pending.len() {
            // SAFETY: the slot's event is valid.
            match check(unsafe { (session.driver.call.cuEventQuery)(pending[i].slot.event) }) {
                Err(status::NOT_READY) => i += 1,
                result => {
                    let done = pending.remove(i);
                    match result {
                        // SAFETY: the device has filled `len` bytes of the slot, which is ours.
                        Ok(()) => session.append(frames, op::LANDED, done.seq, 0, |w| unsafe {
                            w.bytes(std::slice::from_raw_parts(done.slot.address, done.len));
                        }),
                        Err(error) => session.append(frames, op::LANDED, done.seq, error, |w| w.bytes(&[])),
                    }
                    slots.give(done.slot);
                }
            }
        }
    }
}
