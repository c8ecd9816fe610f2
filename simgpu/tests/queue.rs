//! A stream accepts 1,020 entries after a waiting one; then it blocks its own thread, and no other.
#![expect(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod common;

use common::{machine, ok};
use simgpu::exports::{context, copy, stream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

#[test]
fn a_full_queue_holds_its_own_thread_only() {
    let m = machine();
    let (blocked, free, at, ctx) = (m.streams[2], m.streams[1], m.memory, m.ctx);
    let done = Arc::new(AtomicU32::new(0));
    // SAFETY: plain values; the addresses belong to the allocation.
    unsafe {
        ok(copy::cuMemsetD32_v2(at, 0, 16));
        ok(context::cuCtxSynchronize());
        ok(stream::cuStreamWaitValue32_v2(blocked, at, 1, 1));
        let submitter = std::thread::spawn({
            let done = done.clone();
            move || {
                ok(context::cuCtxSetCurrent(ctx));
                for _ in 0..1500 {
                    ok(copy::cuMemsetD32Async(at + 16, 7, 1, blocked));
                    done.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        while done.load(Ordering::SeqCst) < 1020 {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(done.load(Ordering::SeqCst), 1020);
        for _ in 0..1500 {
            ok(copy::cuMemsetD32Async(at + 32, 7, 1, free));
        }
        assert_eq!(stream::cuStreamQuery(blocked), 600);
        ok(stream::cuStreamWriteValue32_v2(free, at, 1, 0));
        submitter.join().unwrap();
        ok(context::cuCtxSynchronize());
        assert_eq!(done.load(Ordering::SeqCst), 1500);
    }
}
