//! Host functions that the client has finished.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};

/// Calls that the client was asked to run.
#[derive(Default)]
pub struct HostCalls {
    asked: Mutex<HashMap<u64, Calls>>,
    changed: Condvar,
}

/// Calls with one number: copies of a graph share their functions, so one may run for several
/// streams at a time.
#[derive(Default)]
struct Calls {
    waiting: u64,
    finished: u64,
}

impl HostCalls {
    /// Expects the client to run the function; called before the client is asked.
    pub fn ask(&self, id: u64) {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).entry(id).or_default().waiting += 1;
    }

    /// Waits until the client has run the function that it was asked to run.
    pub fn wait(&self, id: u64) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match asked.get_mut(&id) {
                Some(calls) if calls.finished == 0 => {}
                Some(calls) if calls.waiting > 1 => {
                    (calls.waiting, calls.finished) = (calls.waiting - 1, calls.finished - 1);
                    return;
                }
                _ => {
                    asked.remove(&id);
                    return;
                }
            }
            asked = self.changed.wait(asked).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that the client has run the function, which lets its stream continue.
    ///
    /// An answer to no question is dropped, since a client could send any number of them.
    pub fn finished(&self, id: u64) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(calls) = asked.get_mut(&id).filter(|calls| calls.finished < calls.waiting) {
            calls.finished += 1;
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn stream_waits_for_its_own_function_only() {
        let calls = Arc::new(HostCalls::default());
        calls.ask(1);
        calls.ask(2);
        let waiting = {
            let calls = calls.clone();
            std::thread::spawn(move || calls.wait(2))
        };
        calls.finished(1);
        calls.wait(1);
        assert!(!waiting.is_finished());
        calls.finished(2);
        waiting.join().unwrap();
        assert!(calls.asked.lock().unwrap().is_empty(), "no number stays behind");
    }

    #[test]
    fn answers_to_no_question_take_no_memory() {
        let calls = HostCalls::default();
        (0..1_000_000).for_each(|id| calls.finished(id));
        assert!(calls.asked.lock().unwrap().is_empty());
        // Two graphs run one function at a time, and both ends arrive before either stream looks.
        calls.ask(7);
        calls.ask(7);
        (0..9).for_each(|_| calls.finished(7));
        calls.wait(7);
        calls.wait(7);
        assert!(calls.asked.lock().unwrap().is_empty());
    }
}
