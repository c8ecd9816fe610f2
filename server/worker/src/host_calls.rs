//! Host functions that the client has finished.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, PoisonError};

/// Numbers of the calls that the client has finished.
#[derive(Default)]
pub struct HostCalls {
    done: Mutex<HashSet<u64>>,
    changed: Condvar,
}

impl HostCalls {
    /// Waits until the client has run the function.
    pub fn wait(&self, id: u64) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        while !done.remove(&id) {
            done = self.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that the client has run the function, which lets its stream continue.
    pub fn finished(&self, id: u64) {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
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
}
