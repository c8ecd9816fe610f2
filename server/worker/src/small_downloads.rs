//! Small asynchronous copies from the device.
//!
//! Their bytes wait in pinned slots until the stream has reached them, then go to the client. A
//! thread that has just synchronised a stream sends what is ready, so that data precedes the answer
//! that reports it complete. For programs that only watch their memory, a thread of its own does
//! this.
#![expect(clippy::disallowed_methods, reason = "a thread of its own polls the streams")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
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
    /// Held while this calls the driver, and until the results are sent.
    calling: Mutex<()>,
    /// Held for a moment, never during a call of the driver: a host function's callback takes it,
    /// and the driver's calls may wait for that callback.
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
        let _calling = lock(&self.calling);
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
        lock(&self.pending).push(pending);
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
            {
                // Sent under the lock: the next thread that sweeps finds either the data, or that
                // it was sent.
                let calling = lock(&self.calling);
                let mut frames = Vec::new();
                self.sweep_alone(&calling, driver, replies, &mut frames);
                if !frames.is_empty() {
                    replies.send_frames(frames);
                }
            }
            idle = if self.idle() { idle + 1 } else { 0 };
            if idle > LINGER {
                self.asleep.store(true, Ordering::SeqCst);
                if self.idle() {
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
        lock(&self.pending).is_empty()
    }

    /// Appends frames with the copies that are ready.
    pub fn sweep(&self, driver: &Driver, replies: &Replies, frames: &mut Vec<u8>) {
        self.sweep_alone(&lock(&self.calling), driver, replies, frames);
    }

    /// Appends frames with the copies that a stream of a context got before frame `seq`.
    ///
    /// The stream has reached that frame: this serves host functions, which must not query the
    /// driver.
    pub fn reached(&self, replies: &Replies, ctx: u64, stream: Handle, seq: u64, frames: &mut Vec<u8>) {
        let Some(slots) = self.slots.get() else { return };
        let mut pending = lock(&self.pending);
        for done in
            pending.extract_if(.., |p| p.stream == stream as usize && p.slot.ctx == ctx && p.seq < seq)
        {
            // SAFETY: as in `sweep_alone`.
            replies.append(frames, op::LANDED, done.seq, 0, |w| unsafe {
                w.bytes(std::slice::from_raw_parts(done.slot.address, done.len));
            });
            slots.give(done.slot);
        }
    }

    fn sweep_alone(
        &self,
        _calling: &MutexGuard<'_, ()>,
        driver: &Driver,
        replies: &Replies,
        frames: &mut Vec<u8>,
    ) {
        let Some(slots) = self.slots.get() else { return };
        let waiting: Vec<(u64, Handle)> =
            lock(&self.pending).iter().map(|copy| (copy.seq, copy.slot.event)).collect();
        // Newest first: a copy that is done then finds every copy before it done as well, and they
        // leave in their order. Both may write the same bytes of the program.
        // SAFETY: the event is valid, since `ops::leave` sweeps before a context goes, which waits
        // for this thread. A callback may free the slot meanwhile, and its event stays.
        let query =
            |(seq, event): &(u64, Handle)| (*seq, check(unsafe { (driver.call.cuEventQuery)(*event) }));
        let happened: HashMap<u64, Result<(), Status>> =
            waiting.iter().rev().map(query).filter(|(_, result)| *result != Err(status::NOT_READY)).collect();
        if happened.is_empty() {
            return;
        }
        for copy in lock(&self.pending).extract_if(.., |copy| happened.contains_key(&copy.seq)) {
            match happened[&copy.seq] {
                // SAFETY: the device has filled `len` bytes of the slot, which no other code uses.
                Ok(()) => replies.append(frames, op::LANDED, copy.seq, 0, |w| unsafe {
                    w.bytes(std::slice::from_raw_parts(copy.slot.address, copy.len));
                }),
                Err(error) => replies.append(frames, op::LANDED, copy.seq, error, |w| w.bytes(&[])),
            }
            slots.give(copy.slot);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use gpusession_proto::frame::{HEADER, Header, Reader};
    use gpusession_proto::handle::make;

    use super::*;
    use crate::driver::fake;
    use crate::handles::kind;
    use crate::replies::tests::replies;

    const ONE: u64 = make(kind::CTX, 0, 1, 0);
    const TWO: u64 = make(kind::CTX, 0, 1, 1);

    struct Lab {
        driver: &'static Driver,
        contexts: Contexts,
        landing: Landing,
        replies: Arc<Replies>,
    }

    impl Lab {
        fn new() -> Self {
            let driver = fake::driver();
            let contexts = Contexts::warm(driver, &fake::devices()).unwrap();
            Self { driver, contexts, landing: Landing::default(), replies: replies().0 }
        }

        /// Queues a copy of `len` bytes with the value `seq`, and returns its event.
        fn copy(&self, seq: u64, ctx: u64, stream: usize, len: usize) -> Handle {
            let mut slot = self.landing.slots(self.driver, &self.contexts).unwrap().try_take().unwrap();
            slot.enter(self.driver, &self.contexts, ctx).unwrap();
            // SAFETY: the slot has INLINE_MAX bytes.
            unsafe { std::ptr::write_bytes(slot.address, seq as u8, len) };
            let event = slot.event;
            fake::happen(event, status::NOT_READY);
            self.landing.pending.lock().unwrap().push(Pending { seq, stream, slot, len });
            event
        }

        fn free(&self) -> usize {
            let slots = self.landing.slots(self.driver, &self.contexts).unwrap();
            let taken: Vec<Slot> = std::iter::from_fn(|| slots.try_take()).collect();
            let count = taken.len();
            taken.into_iter().for_each(|slot| slots.give(slot));
            count
        }

        fn swept(&self) -> Vec<(u64, i32, Vec<u8>)> {
            let mut frames = Vec::new();
            self.landing.sweep(self.driver, &self.replies, &mut frames);
            read(&frames)
        }
    }

    /// Reads position, status and bytes of each landed copy.
    fn read(mut frames: &[u8]) -> Vec<(u64, i32, Vec<u8>)> {
        let mut landed = Vec::new();
        while let Some((head, rest)) = frames.split_first_chunk::<HEADER>() {
            let header = Header::parse(head).unwrap();
            let (body, rest) = rest.split_at(header.body_len());
            assert_eq!(header.op.get(), op::LANDED);
            let bytes = Reader::new(body).bytes().unwrap().to_vec();
            landed.push((header.seq.get(), header.ctx.get() as i32, bytes));
            frames = rest;
        }
        landed
    }

    #[test]
    fn copy_lands_once_its_event_has_happened() {
        let lab = Lab::new();
        let (first, second, third) = (lab.copy(1, ONE, 8, 3), lab.copy(2, ONE, 9, 5), lab.copy(3, TWO, 8, 1));
        assert!(lab.swept().is_empty() && !lab.landing.idle());
        fake::happen(second, 0);
        assert_eq!(lab.swept(), [(2, 0, vec![2; 5])], "no copy waits for another stream's");
        fake::happen(first, 0);
        fake::happen(third, 0);
        assert_eq!(lab.swept(), [(1, 0, vec![1; 3]), (3, 0, vec![3])]);
        assert!(lab.landing.idle());
        assert_eq!(lab.free(), SLOTS, "every slot is free again");
    }

    #[test]
    fn failed_copy_lands_with_its_error_and_no_bytes() {
        let lab = Lab::new();
        fake::happen(lab.copy(1, ONE, 8, 3), 700);
        assert_eq!(lab.swept(), [(1, 700, Vec::new())]);
        assert_eq!(lab.free(), SLOTS);
    }

    #[test]
    fn host_function_sees_the_earlier_copies_of_its_stream() {
        let lab = Lab::new();
        for (seq, ctx, stream) in [(1, ONE, 8), (2, TWO, 8), (3, ONE, 9), (4, ONE, 8)] {
            lab.copy(seq, ctx, stream, 2);
        }
        let mut frames = Vec::new();
        lab.landing.reached(&lab.replies, ONE, std::ptr::without_provenance_mut(8), 4, &mut frames);
        assert_eq!(read(&frames), [(1, 0, vec![1; 2])], "not a later one, nor another stream's");
        assert_eq!(lab.free(), SLOTS - 3);
    }

    #[test]
    fn host_function_does_not_wait_for_a_call_of_the_driver() {
        let lab = Lab::new();
        let slow = lab.copy(1, ONE, 8, 2);
        let other = lab.copy(2, ONE, 9, 3);
        fake::happen(slow, fake::QUERY_WAITS);
        fake::happen(other, 0);
        std::thread::scope(|scope| {
            let sweep = scope.spawn(|| lab.swept());
            while lab.landing.calling.try_lock().is_ok() {
                std::thread::yield_now();
            }
            // The sweep is in the driver, which waits for this callback.
            let mut frames = Vec::new();
            lab.landing.reached(&lab.replies, ONE, std::ptr::without_provenance_mut(8), 9, &mut frames);
            assert_eq!(read(&frames), [(1, 0, vec![1; 2])]);
            fake::happen(slow, 0);
            assert_eq!(sweep.join().unwrap(), [(2, 0, vec![2; 3])], "each copy is sent once");
        });
        assert_eq!(lab.free(), SLOTS);
    }

    #[test]
    fn thread_sends_copies_that_the_program_only_watches() {
        let lab = Lab::new();
        let (replies, mut peer) = replies();
        let landing = Arc::new(Landing::default());
        let mut slot = landing.slots(lab.driver, &lab.contexts).unwrap().try_take().unwrap();
        slot.enter(lab.driver, &lab.contexts, ONE).unwrap();
        let event = slot.event;
        landing.push(lab.driver, &replies, 6, std::ptr::null_mut(), slot, 8);
        assert!(!landing.idle());
        fake::happen(event, 0);
        assert_eq!(peer.next().0.seq.get(), 6);
    }
}
