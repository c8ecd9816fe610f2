//! Synchronizations of contexts that run while another thread begins a capture.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Longest wait of a capture's begin for synchronizations that have not entered the driver yet.
const ENTER_TIMEOUT: Duration = Duration::from_millis(5);

/// Synchronizations of contexts that run, and whether the program captures.
#[derive(Default)]
pub struct Settling {
    running: Mutex<u32>,
    ended: Condvar,
    /// Whether a stream has ever captured; before that no stream is asked.
    captured: AtomicBool,
    streams: Mutex<()>,
}

impl Settling {
    /// Announces a capture, whose begin the driver should see after the running synchronizations.
    ///
    /// The driver checks for captures when a synchronization begins. Its end may need the thread
    /// that begins the capture, so the wait is bounded. The result is that of
    /// [`Settling::streams`].
    pub fn capture_begins(&self) -> MutexGuard<'_, ()> {
        self.captured.store(true, Ordering::SeqCst);
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.ended.wait_timeout_while(running, ENTER_TIMEOUT, |running| *running > 0));
        self.streams()
    }

    /// Keeps streams from beginning a capture and from being destroyed, while it is held.
    pub fn streams(&self) -> MutexGuard<'_, ()> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `work`, which synchronizes a context, with whether any stream has ever captured.
    pub fn during<T>(&self, work: impl FnOnce(bool) -> T) -> T {
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let done = work(self.captured.load(Ordering::SeqCst));
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.ended.notify_all();
        done
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn capture_waits_for_a_running_synchronization_but_not_for_ever() {
        let settling = Arc::new(Settling::default());
        let ((began, running), (end, word)) = (channel(), channel::<()>());
        let thread = {
            let settling = settling.clone();
            std::thread::spawn(move || {
                settling.during(|captured| {
                    began.send(captured).unwrap();
                    let _ = word.recv();
                })
            })
        };
        assert!(!running.recv().unwrap(), "no stream has captured yet");
        // Returns although the synchronization needs this thread.
        drop(settling.capture_begins());
        end.send(()).unwrap();
        thread.join().unwrap();
        assert!(settling.during(|captured| captured));
    }
}
