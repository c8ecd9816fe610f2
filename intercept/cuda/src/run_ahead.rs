//! Bound on how far a thread may run ahead of its worker.
//!
//! Natively a thread waits in its call when its stream's queue is full. Without this bound its
//! frames would fill the worker's memory. The log would then stop for all threads, including those
//! whose frames the stream waits for.

use std::cell::Cell;

use gpusession_link::link::Begun;
use gpusession_proto::frame::op;

use crate::clients::{self, MAX_CLIENTS};

/// Bytes of frames after which a thread marks the log and waits for its previous mark.
///
/// A thread is at most twice this far ahead: about 17,000 launches, where a driver takes about
/// 1,000.
const STEP: usize = 2 << 20;

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
        if sent.get() >= STEP {
            DUE.set(true);
        }
    });
}

/// Waits for the thread's last mark if the thread has posted [`STEP`] bytes since then.
///
/// Runs at the start of a call, where the thread holds no lock.
#[inline]
pub fn wait() {
    if DUE.get() {
        mark();
    }
}

#[cold]
fn mark() {
    DUE.set(false);
    for number in 0..MAX_CLIENTS {
        if SENT.with(|sent| sent[number].get()) < STEP {
            continue;
        }
        SENT.with(|sent| sent[number].set(0));
        let Some(client) = clients::by_number(number as u8) else { continue };
        // An error needs no report: the call that follows finds the connection lost, too.
        if let Some(begun) = MARKS.with(|marks| marks[number].take()) {
            let _ = client.link.finish_mark(begun);
        }
        let begun = client.link.begin_call(op::MARK, client.caller(), |_| {});
        MARKS.with(|marks| marks[number].set(begun.ok()));
    }
}
