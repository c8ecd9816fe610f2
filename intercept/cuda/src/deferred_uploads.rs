//! Copies from pinned memory that a host function, or a copy under way, may still write.
//!
//! A host function of the library's own precedes such a copy on its stream, and sends the bytes
//! once the stream has reached it. The worker's executor meanwhile waits for the bytes, and other
//! streams continue. So the thread that enqueues the copy never waits for the program's host
//! function, or for a stream that stands still, which may wait for that thread.
//!
//! Chunks of later transfers must not fill the lanes before these are sent. So every bulk copy to
//! the device that is ordered behind a deferred one is deferred too, or waits for it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpusession_link::lanes::{HostRange, On};
use gpusession_proto::frame::{INLINE_MAX, Writer};

use crate::client::{Client, unavailable};
use crate::host_functions::{self, Due, HostFunction};
use crate::positions::is_covered;
use crate::status::Result;
use crate::streams::Stream;
use crate::{mapped, ranges, streams};

/// Copy whose bytes are not sent yet.
struct Deferred {
    client: &'static Client,
    range: HostRange,
    on: On,
    /// Position of the copy's frame; locked until that frame is posted.
    seq: Mutex<Option<u64>>,
}

/// Position of a copy whose frame is not posted yet: any later work counts as behind it.
const NOT_YET: u64 = 0;
/// Deferred copies: client, stream and position of each.
static WAITING: Mutex<Vec<(u8, On, u64)>> = Mutex::new(Vec::new());
/// Number of them: at zero, a copy's check is a single load.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn change(change: impl FnOnce(&mut Vec<(u8, On, u64)>)) {
    let mut waiting = lock(&WAITING);
    change(&mut waiting);
    COUNT.store(waiting.len(), Ordering::Relaxed);
}

/// Returns `true` if the stream's next work is ordered behind a deferred copy.
fn is_behind_one(stream: &Stream) -> bool {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return false;
    }
    let covers = stream.covers(stream.client.link.position() + 1);
    lock(&WAITING).iter().any(|(client, on, seq)| {
        *client == stream.client.number && (*on == stream.on() || is_covered(&covers, *on, *seq))
    })
}

/// The program's memory that a copy reads.
#[derive(Clone, Copy)]
pub struct Source {
    pub address: usize,
    /// Bytes from the first to the last one that the copy reads.
    pub extent: usize,
    pub range: HostRange,
}

/// Enqueues a copy whose source is sent later; `false`: the caller sends it now.
///
/// `body` writes the copy's frame, whose bytes travel on the lanes. With `wait` the program expects
/// the copy to be complete at the return.
pub fn try_defer(
    source: Source,
    stream: &Stream,
    wait: bool,
    operation: u16,
    body: impl FnOnce(&mut Writer<'_>),
) -> Result<bool> {
    let client = stream.client;
    let Source { address, extent, range } = source;
    // Natively a program's function may hold up those of other streams, so the worker's driver may
    // hold up the library's, while that function waits for the calling thread.
    let fills = !wait
        && client.link.down.any_of(|copy| copy.fills(address, extent))
        && (stream.due() > Due::Nothing || !host_functions::any_of_program());
    // A deferred copy is due itself.
    if !fills && stream.due() == Due::Nothing && !is_behind_one(stream) {
        return Ok(false);
    }
    // Few bytes travel in the frame and fill no lane.
    let behind = range.len() > INLINE_MAX && is_behind_one(stream);
    let able = !wait
        && ranges::is_pinned(client, address as u64, extent as u64)
        && !mapped::there(client, address, extent)
        && (behind
            || fills
            || ranges::on_host(client, address, extent).is_some_and(|r| r.size > mapped::PLACED));
    let shared = streams::all(client).into_iter().find(|shared| std::ptr::eq(&raw const **shared, stream));
    let Some(shared) = shared.filter(|_| able) else {
        // The driver, too, waits for a stream before it reads pageable memory for a copy there.
        return if behind { stream.drain().map(|()| false) } else { Ok(false) };
    };
    client.link.lanes().map_err(unavailable)?;
    let deferred = Arc::new(Deferred { client, range, on: stream.on(), seq: Mutex::default() });
    let mut place = lock(&deferred.seq);
    let data = Arc::into_raw(deferred.clone()) as usize;
    // Before the frame, so that another thread's copy behind it finds it.
    let waits = (client.number, deferred.on, NOT_YET);
    change(|waiting| waiting.push(waits));
    let after = Some(stream.covers_so_far());
    let posted = host_functions::enqueue(&shared, HostFunction::Own(send, data), after)
        .and_then(|()| client.post(operation, body));
    change(|waiting| {
        let mine = waiting.iter().position(|entry| *entry == waits);
        match (mine, &posted) {
            (Some(mine), Ok(seq)) => waiting[mine].2 = *seq,
            (Some(mine), Err(_)) => drop(waiting.remove(mine)),
            (None, _) => {}
        }
    });
    let seq = posted?;
    stream.worked(seq);
    *place = Some(seq);
    Ok(true)
}

/// Sends the bytes of a deferred copy, which its stream has reached.
extern "C" fn send(data: *mut c_void) {
    // SAFETY: `data` came from `Arc::into_raw` in `try_defer`, and the function runs once.
    let deferred = unsafe { Arc::from_raw(data.cast::<Deferred>().cast_const()) };
    let Some(seq) = *lock(&deferred.seq) else { return };
    // Without a link there is no copy.
    if let Ok(lanes) = deferred.client.link.lanes() {
        lanes.send(seq, lanes.upload(deferred.range, false));
    }
    change(|waiting| {
        waiting.retain(|(client, _, waits)| (*client, *waits) != (deferred.client.number, seq));
    });
}
