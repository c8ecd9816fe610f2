//! Host functions that the client has finished.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Most calls that streams have not reached: the driver takes some thousands per stream.
///
/// A capture that a client does not announce, and a fault, leave calls that no stream reaches.
const MAX_QUEUED: usize = 1 << 20;

/// Work that precedes a call.
#[derive(Clone, Copy)]
pub struct Position {
    /// The client's handle of the context.
    pub ctx: u64,
    /// The driver's handle.
    pub stream: usize,
    /// Position of the frame that queued the call.
    pub seq: u64,
}

/// A call that a stream has not reached.
pub struct Queued {
    /// The client's number of the function.
    pub id: u64,
    pub at: Position,
}

/// Calls that the client was asked to run, and those that streams have not reached.
#[derive(Default)]
pub struct HostCalls {
    /// By the number that the driver passes on, and the latest number.
    queued: Mutex<(HashMap<u64, Queued>, u64)>,
    asked: Mutex<HashMap<u64, Calls>>,
    changed: Condvar,
    /// Keeps the numbers of calls in the order in which the client is asked.
    order: Mutex<()>,
}

/// Calls of one function: copies of a graph share their functions, so one may run for several
/// streams at a time.
#[derive(Default)]
struct Calls {
    asked: u64,
    finished: u64,
    waiting: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HostCalls {
    /// Keeps a call for the stream that reaches it; returns its number, or `None` beyond the bound.
    pub fn queue(&self, call: Queued) -> Option<u64> {
        let mut queued = lock(&self.queued);
        let (calls, latest) = &mut *queued;
        if calls.len() >= MAX_QUEUED {
            return None;
        }
        *latest += 1;
        calls.insert(*latest, call);
        Some(*latest)
    }

    /// Takes a call that its stream has reached, or that the driver refused.
    pub fn begin(&self, number: u64) -> Option<Queued> {
        lock(&self.queued).0.remove(&number)
    }

    /// Lets `send` ask the client to run the function; returns the number of this call of it.
    pub fn ask(&self, id: u64, send: impl FnOnce()) -> u64 {
        let _order = lock(&self.order);
        let call = {
            let mut asked = lock(&self.asked);
            let calls = asked.entry(id).or_default();
            (calls.asked, calls.waiting) = (calls.asked + 1, calls.waiting + 1);
            calls.asked
        };
        send();
        call
    }

    /// Waits until the client has run the function for this call; clients run calls in their order.
    pub fn wait(&self, id: u64, call: u64) {
        let mut asked = lock(&self.asked);
        while let Some(calls) = asked.get_mut(&id) {
            if calls.finished >= call {
                calls.waiting -= 1;
                if calls.waiting == 0 {
                    asked.remove(&id);
                }
                return;
            }
            asked = self.changed.wait(asked).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that the client has run the function, which lets its stream continue.
    ///
    /// An answer to no question is dropped, since a client could send any number of them.
    pub fn finished(&self, id: u64) {
        let mut asked = lock(&self.asked);
        if let Some(calls) = asked.get_mut(&id).filter(|calls| calls.finished < calls.asked) {
            calls.finished += 1;
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn waiter(calls: &Arc<HostCalls>, id: u64, call: u64) -> std::thread::JoinHandle<()> {
        let calls = calls.clone();
        std::thread::spawn(move || calls.wait(id, call))
    }

    #[test]
    fn stream_waits_for_its_own_function_only() {
        let calls = Arc::new(HostCalls::default());
        let (first, second) = (calls.ask(1, || {}), calls.ask(2, || {}));
        let waiting = waiter(&calls, 2, second);
        calls.finished(1);
        calls.wait(1, first);
        assert!(!waiting.is_finished());
        calls.finished(2);
        waiting.join().unwrap();
        assert!(lock(&calls.asked).is_empty(), "no number stays behind");
    }

    #[test]
    fn first_end_of_a_shared_function_is_that_of_the_first_call() {
        let calls = Arc::new(HostCalls::default());
        let (first, second) = (calls.ask(1, || {}), calls.ask(1, || {}));
        let later = waiter(&calls, 1, second);
        calls.finished(1);
        calls.wait(1, first);
        assert!(!later.is_finished(), "its own call has not run");
        calls.finished(1);
        later.join().unwrap();
    }

    #[test]
    fn a_call_is_made_once_and_calls_that_no_stream_reaches_are_bounded() {
        let calls = HostCalls::default();
        let at = Position { ctx: 1, stream: 0, seq: 2 };
        let first = calls.queue(Queued { id: 7, at }).unwrap();
        assert_eq!(calls.begin(first).map(|call| call.id), Some(7));
        assert!(calls.begin(first).is_none(), "a second launch of a captured call");
        (0..MAX_QUEUED as u64).for_each(|id| assert_ne!(calls.queue(Queued { id, at }), Some(first)));
        assert_eq!(calls.queue(Queued { id: 8, at }), None);
        assert!(calls.begin(first + 1).is_some());
        assert!(calls.queue(Queued { id: 8, at }).is_some());
    }

    #[test]
    fn answers_to_no_question_take_no_memory() {
        let calls = HostCalls::default();
        (0..1_000_000).for_each(|id| calls.finished(id));
        assert!(lock(&calls.asked).is_empty());
        // Two graphs run one function at a time, and both ends arrive before either stream looks.
        let asked = [calls.ask(7, || {}), calls.ask(7, || {})];
        (0..9).for_each(|_| calls.finished(7));
        asked.into_iter().for_each(|call| calls.wait(7, call));
        assert!(lock(&calls.asked).is_empty());
    }
}
