//! Frames that no thread has written to the connection yet, and the sleep of the sender thread.
//!
//! A caller sends its frames itself. A post leaves that to the sender thread, unless the sender
//! sleeps: then the thread that posts sends the frame or wakes the sender. Frames, the mark of
//! waiting posts and the sender's sleep share one lock, so no post stays behind a sleeping sender.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

/// Frames that the sender has not sent yet.
pub struct Outbox {
    inner: Mutex<Inner>,
    /// Whether `inner` holds a post; written under the lock, so the sender can spin without it.
    pending: AtomicBool,
    sender: OnceLock<Thread>,
}

/// A frame that was appended, and that the sender sends if it is awake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Posted {
    /// Position of the frame.
    pub seq: u64,
    /// Bytes that wait.
    pub waiting: usize,
    /// The caller has to send the frame, or to [`Outbox::rouse`] the sender.
    pub asleep: bool,
}

struct Inner {
    buf: Vec<u8>,
    next_seq: u64,
    /// Whether the sender is about to park, or parked, without a wake-up.
    asleep: bool,
}

impl Outbox {
    /// Starts with room for `capacity` bytes of frames.
    pub fn new(capacity: usize) -> Self {
        let inner = Inner { buf: Vec::with_capacity(capacity), next_seq: 1, asleep: false };
        Self { inner: Mutex::new(inner), pending: AtomicBool::new(false), sender: OnceLock::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the thread that [`Outbox::wake`] wakes; the first call counts.
    pub fn set_sender(&self, sender: Thread) {
        self.sender.get_or_init(|| sender);
    }

    /// Appends a frame that `write` makes for its position, and that the caller sends.
    ///
    /// Returns the position.
    pub fn append(&self, write: impl FnOnce(&mut Vec<u8>, u64)) -> u64 {
        self.lock().append(write)
    }

    /// As [`Outbox::append`], but the sender sends the frame unless it sleeps.
    pub fn post(&self, write: impl FnOnce(&mut Vec<u8>, u64)) -> Posted {
        let mut inner = self.lock();
        let seq = inner.append(write);
        self.pending.store(true, Ordering::Release);
        Posted { seq, waiting: inner.buf.len(), asleep: inner.asleep }
    }

    /// Wakes the sender if it sleeps.
    pub fn rouse(&self) {
        if std::mem::take(&mut self.lock().asleep) {
            self.wake();
        }
    }

    /// Exchanges the frames with those of `batch`, which is empty; returns the latest position.
    pub fn take(&self, batch: &mut Vec<u8>) -> u64 {
        let mut inner = self.lock();
        self.pending.store(false, Ordering::Relaxed);
        std::mem::swap(batch, &mut inner.buf);
        inner.next_seq - 1
    }

    /// Returns the position of the latest frame.
    pub fn position(&self) -> u64 {
        self.lock().next_seq - 1
    }

    /// Returns `true` if a post waits to be sent.
    #[inline]
    pub fn pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Parks the sender, which calls this, until a post waits or [`Outbox::wake`] runs.
    pub fn sleep(&self) {
        if self.may_sleep() {
            std::thread::park();
        }
    }

    fn may_sleep(&self) -> bool {
        let mut inner = self.lock();
        inner.asleep = !self.pending();
        inner.asleep
    }

    /// Wakes the sender, or prevents its next sleep.
    pub fn wake(&self) {
        if let Some(sender) = self.sender.get() {
            sender.unpark();
        }
    }
}

impl Inner {
    fn append(&mut self, write: impl FnOnce(&mut Vec<u8>, u64)) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        write(&mut self.buf, seq);
        seq
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Step of one of the threads. Each holds the lock from its begin to its end.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Step {
        Post,
        Append,
        Take,
        Rouse,
        Sleep,
    }

    #[test]
    fn no_post_stays_behind_a_sleeping_sender() {
        use Step::{Append, Post, Rouse, Sleep, Take};
        const LENGTH: u32 = 7;
        let all = [Post, Append, Take, Rouse, Sleep];
        let mut slept = 0;
        for number in 0..all.len().pow(LENGTH) {
            let steps: Vec<Step> = (0..LENGTH).map(|i| all[number / all.len().pow(i) % all.len()]).collect();
            let outbox = Outbox::new(64);
            let (mut posts, mut sleeps) = (0, false);
            // A thread has posted while the sender slept, and sends or rouses next.
            let mut owed = false;
            for step in &steps {
                match step {
                    Post => {
                        owed |= outbox.post(|buf, seq| buf.push(seq as u8)).asleep;
                        posts += 1;
                    }
                    Append => drop(outbox.append(|buf, seq| buf.push(seq as u8))),
                    Take => {
                        outbox.take(&mut Vec::new());
                        (posts, owed) = (0, false);
                    }
                    Rouse => {
                        outbox.rouse();
                        (sleeps, owed) = (false, false);
                    }
                    // A parked thread takes no step.
                    Sleep => sleeps = sleeps || outbox.may_sleep(),
                }
                assert!(owed || !(sleeps && posts > 0), "{steps:?}: a post waits, and the sender sleeps");
                assert!(!sleeps || outbox.lock().asleep, "{steps:?}: no post would wake the sender");
                assert_eq!(outbox.pending(), posts > 0, "{steps:?}");
                slept += u32::from(sleeps);
            }
        }
        assert!(slept > 1000, "the sender sleeps where it can: {slept}");
    }

    #[test]
    fn positions_count_all_frames() {
        let outbox = Outbox::new(64);
        assert_eq!(outbox.append(|buf, seq| buf.push(seq as u8)), 1);
        let posted = |seq, waiting| Posted { seq, waiting, asleep: false };
        assert_eq!(outbox.post(|buf, seq| buf.push(seq as u8)), posted(2, 2));
        let mut batch = Vec::new();
        assert_eq!((outbox.take(&mut batch), outbox.position()), (2, 2));
        assert_eq!(batch, [1, 2]);
        assert_eq!(outbox.post(|buf, seq| buf.push(seq as u8)), posted(3, 1));
    }

    #[test]
    fn post_of_a_thread_that_rouses_wakes_the_sender() {
        let outbox = std::sync::Arc::new(Outbox::new(64));
        let (asleep, begun) = std::sync::mpsc::channel();
        let sender = std::thread::spawn({
            let outbox = outbox.clone();
            move || {
                outbox.set_sender(std::thread::current());
                asleep.send(()).unwrap();
                while !outbox.pending() {
                    outbox.sleep();
                }
            }
        });
        begun.recv().unwrap();
        outbox.post(|buf, _| buf.push(1));
        outbox.rouse();
        sender.join().unwrap();
    }
}
