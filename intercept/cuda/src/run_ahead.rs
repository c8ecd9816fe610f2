//! Bound on how far a thread may run ahead of its worker.
//!
//! Natively a thread waits in its call when its stream's queue is full. Without this bound its
//! frames would fill the worker's memory. The log would then stop for all threads, including those
//! whose frames the stream waits for.

use std::cell::Cell;

use gpusession_link::link::Begun;

use crate::handles::MAX_CLIENTS;

/// Bytes of frames after which a thread marks the log and waits for its previous mark.
///
/// A thread is at most twice this far ahead: about 17,000 launches, where a driver takes about
/// 1,000.
const STEP_BYTES: usize = 2 << 20;

thread_local! {
    /// Bytes since the last mark, by client.
    static SENT: [Cell<usize>; MAX_CLIENTS] = const { [const { Cell::new(0) }; MAX_CLIENTS] };
    static MARKS: [Cell<Option<Begun>>; MAX_CLIENTS] = const { [const { Cell::new(None) }; MAX_CLIENTS] };
    static DUE: Cell<bool> = const { Cell::new(false) };
}

/// Counts a frame that the calling thread has posted.
#[inline]
pub fn sent(client: u8, bytes: usize) {
    SENT.with(|sent| {
        let Some(sent) = sent.get(usize::from(client)) else { return };
        sent.set(sent.get() + bytes);
        if sent.get() >= STEP_BYTES {
            DUE.set(true);
        }
    });
}

/// Returns `true` if the calling thread has to wait for a mark before its next call.
#[inline]
pub fn due() -> bool {
    DUE.get()
}

/// Calls `mark` for each client to which the thread has posted [`STEP_BYTES`] since its last mark.
///
/// `mark` gets the client's number and the last mark. It waits for that one, marks the log again
/// and returns the new mark. Runs at the start of a call, where the thread holds no lock.
#[cold]
pub fn mark(mut mark: impl FnMut(u8, Option<Begun>) -> Option<Begun>) {
    DUE.set(false);
    for number in 0..MAX_CLIENTS {
        if SENT.with(|sent| sent[number].get()) < STEP_BYTES {
            continue;
        }
        SENT.with(|sent| sent[number].set(0));
        let last = MARKS.with(|marks| marks[number].take());
        let new = mark(number as u8, last);
        MARKS.with(|marks| marks[number].set(new));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the clients that get a mark now.
    fn marked() -> Vec<u8> {
        let mut clients = Vec::new();
        mark(|client, _| {
            clients.push(client);
            None
        });
        clients
    }

    #[test]
    fn thread_marks_only_the_logs_that_it_filled() {
        sent(0, STEP_BYTES - 1);
        sent(1, STEP_BYTES / 2);
        assert!(!due());
        sent(1, STEP_BYTES / 2);
        assert!(due());
        assert_eq!(marked(), [1]);
        assert!(!due(), "a mark counts from zero again");
        sent(0, 1);
        assert!(due());
        assert_eq!(marked(), [0]);
    }

    #[test]
    fn thread_waits_for_its_own_bytes_only() {
        let other = std::thread::spawn(|| {
            sent(2, STEP_BYTES);
            due()
        });
        assert!(other.join().unwrap());
        assert!(!due());
    }

    #[test]
    fn client_beyond_the_last_one_counts_nothing() {
        sent(MAX_CLIENTS as u8, STEP_BYTES);
        assert!(!due());
    }
}
