//! How far a thread may be ahead of its worker. Natively a thread whose stream's queue is full waits in its call; here what it has sent
//! would fill the worker's memory, and the log would stop for all threads, with what the stream waits for behind it.

use std::cell::Cell;

use gpusession_link::link::Begun;
use gpusession_proto::frame::op;

use crate::clients::{self, MOST};

/// Bytes of frames after which a thread wants to know that the worker has got so far. It is at most twice as far ahead: some 17,000
/// launches, where a driver takes about 1,000.
const STEP: usize = 2 << 20;

thread_local! {
    /// By client: bytes since the last mark.
    static SENT: [Cell<usize>; MOST] = const { [const { Cell::new(0) }; MOST] };
    static MARKS: [Cell<Option<Begun>>; MOST] = const { [const { Cell::new(None) }; MOST] };
    static DUE: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread has sent a frame.
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

/// At the start of a call, where the thread holds no lock: waits until the worker has replayed what this thread sent before its last
/// mark, if it has sent much since.
#[inline]
pub fn wait() {
    if DUE.get() {
        mark();
    }
}

#[cold]
fn mark() {
    DUE.set(false);
    for number in 0..MOST {
        if SENT.with(|sent| sent[number].get()) < STEP {
            continue;
        }
        SENT.with(|sent| sent[number].set(0));
        let Some(client) = clients::by_number(number as u8) else { continue };
        // The call that this one is part of says that the connection is lost.
        if let Some(begun) = MARKS.with(|marks| marks[number].take()) {
            let _ = client.link.finish_mark(begun);
        }
        let begun = client.link.begin_call(op::MARK, client.caller(), |_| {});
        MARKS.with(|marks| marks[number].set(begun.ok()));
    }
}
