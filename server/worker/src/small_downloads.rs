//! Small asynchronous copies from the device.
//!
//! Their bytes wait in pinned slots until the stream has reached them, then go to the client. A
//! thread that has just synchronised a stream sends what is ready, so that data precedes the answer
//! that reports it complete. For programs that only watch their memory, a thread of its own does
//! this.
#![expect(clippy::disallowed_methods, reason = "a thread of its own polls the streams")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use gpusession_proto::frame::{INLINE_MAX, op};

use crate::contexts::Contexts;
use crate::driver::{Driver, Handle, Status, check, status};
use crate::replies::Replies;
use crate::staging::{Slot, Slots};

const SLOTS: usize = 64;
/// Time between two polls of the thread.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// Polls without a pending copy before the thread sleeps; a wake-up costs more than a copy.
const LINGER: u32 = 5000;

struct Pending {
    seq: u64,
    /// Address of the driver's stream.
    stream: usize,
    slot: Slot,
    len: usize,
}

/// Pinned slots, and the copies that wait in them.
#[derive(Default)]
pub struct Landing {
    slots: OnceLock<Slots>,
    pending: Mutex<Vec<Pending>>,
    thread: OnceLock<std::thread::Thread>,
    asleep: AtomicBool,
}

impl Landing {
    /// Returns the pinned slots, which the first use allocates.
    pub fn slots(&self, driver: &Driver, contexts: &Contexts) -> Result<&Slots, Status> {
        if let Some(slots) = self.slots.get() {
            return Ok(slots);
        }
        let slots = contexts.within_first(driver, || Slots::new(driver, SLOTS, INLINE_MAX))?;
        Ok(self.slots.get_or_init(|| slots))
    }

    /// Pins the slots again after a reset of their context, which is current.
    pub fn pin_again(&self, driver: &Driver) {
        // Copies work without pinning, only slower.
        let _ = self.slots.get().map(|slots| slots.pin(driver));
    }

    /// Queues a filled slot, to be sent once its event has happened.
    pub fn push(
        self: &Arc<Self>,
        driver: &'static Driver,
        replies: &Arc<Replies>,
        seq: u64,
        stream: Handle,
        slot: Slot,
        len: usize,
    ) {
        let pending = Pending { seq, stream: stream as usize, slot, len };
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).push(pending);
        let thread = self.thread.get_or_init(|| {
            let (landing, replies) = (self.clone(), replies.clone());
            let look = move || landing.poll(driver, &replies);
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

    fn poll(&self, driver: &Driver, replies: &Replies) {
        let mut idle = 0;
        loop {
            let left = {
                // Sent under the lock: the next thread that sweeps finds either the data, or that
                // it was sent.
                let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
                let mut frames = Vec::new();
                self.sweep_locked(&mut pending, driver, replies, &mut frames);
                if !frames.is_empty() {
                    replies.send_frames(&frames);
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
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }

    /// Returns `true` if no copy is under way.
    pub fn idle(&self) -> bool {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Appends frames with the copies that are ready.
    pub fn sweep(&self, driver: &Driver, replies: &Replies, frames: &mut Vec<u8>) {
        self.sweep_locked(
            &mut self.pending.lock().unwrap_or_else(PoisonError::into_inner),
            driver,
            replies,
            frames,
        );
    }

    /// Appends frames with the copies that a stream of a context got before frame `seq`.
    ///
    /// The stream has reached that frame: this serves host functions, which must not query the
    /// driver.
    pub fn reached(&self, replies: &Replies, ctx: u64, stream: Handle, seq: u64, frames: &mut Vec<u8>) {
        let Some(slots) = self.slots.get() else { return };
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        for done in
            pending.extract_if(.., |p| p.stream == stream as usize && p.slot.ctx == ctx && p.seq < seq)
        {
            // SAFETY: as in `sweep_locked`.
            replies.append(frames, op::LANDED, done.seq, 0, |w| unsafe {
                w.bytes(std::slice::from_raw_parts(done.slot.address, done.len));
            });
            slots.give(done.slot);
        }
    }

    fn sweep_locked(
        &self,
        pending: &mut Vec<Pending>,
        driver: &Driver,
        replies: &Replies,
        frames: &mut Vec<u8>,
    ) {
        let Some(slots) = self.slots.get() else { return };
        let mut i = 0;
        while i < pending.len() {
            // SAFETY: the slot's event is valid, since `ops::leave` sweeps all slots before a
            // context goes.
            match check(unsafe { (driver.call.cuEventQuery)(pending[i].slot.event) }) {
                Err(status::NOT_READY) => i += 1,
                result => {
                    let done = pending.remove(i);
                    match result {
                        // SAFETY: the device has filled `len` bytes of the slot, which no other
                        // code uses.
                        Ok(()) => replies.append(frames, op::LANDED, done.seq, 0, |w| unsafe {
                            w.bytes(std::slice::from_raw_parts(done.slot.address, done.len));
                        }),
                        Err(error) => replies.append(frames, op::LANDED, done.seq, error, |w| w.bytes(&[])),
                    }
                    slots.give(done.slot);
                }
            }
        }
    }
}
