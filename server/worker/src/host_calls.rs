//! Host functions that the client has finished.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};

/// How often the client has finished each function without its stream continuing yet.
///
/// Copies of a graph share their functions, so one may run for several streams at a time.
#[derive(Default)]
pub struct HostCalls {
    done: Mutex<HashMap<u64, u32>>,
    changed: Condvar,
}

impl HostCalls {
    /// Waits until the client has run the function once.
    pub fn wait(&self, id: u64) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match done.get_mut(&id) {
                Some(1) => {
                    done.remove(&id);
                    return;
                }
                Some(times) => {
                    *times -= 1;
                    return;
                }
                None => done = self.changed.wait(done).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Records that the client has run the function, which lets one stream continue.
    pub fn finished(&self, id: u64) {
        *self.done.lock().unwrap_or_else(PoisonError::into_inner).entry(id).or_default() += 1;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn stream_waits_for_its_own_function_only() {
        let calls = Arc::new(HostCalls::default());
        let waiting = {
            let calls = calls.clone();
            std::thread::spawn(move || calls.wait(2))
        };
        calls.finished(1);
        calls.wait(1);
        assert!(!waiting.is_finished());
        calls.finished(2);
        waiting.join().unwrap();
        assert!(calls.done.lock().unwrap().is_empty(), "no number stays behind");
    }

    #[test]
    fn function_of_two_graphs_lets_both_streams_continue() {
        let calls = HostCalls::default();
        // Both ends arrive before either stream looks.
        calls.finished(1);
        calls.finished(1);
        calls.wait(1);
        calls.wait(1);
        assert!(calls.done.lock().unwrap().is_empty());
    }
}
