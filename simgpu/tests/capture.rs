//! Calls that are allowed while a stream is captured. The expected codes were measured on an H200
//! (driver 580).

mod common;

use common::{Machine, function, launch, machine, ok};
use simgpu::exports::{context, copy, memory, stream};
use std::ptr::null_mut;

/// Captures the first stream around a call; returns the codes of the call and of the capture's end.
fn during(m: &Machine, mode: u32, call: impl FnOnce() -> u32) -> (u32, u32) {
    let mut graph = 0;
    // SAFETY: every pointer is a local of the right type.
    unsafe {
        ok(stream::cuStreamBeginCapture_v2(m.streams[0], mode));
        let code = call();
        let end = stream::cuStreamEndCapture(m.streams[0], &raw mut graph);
        (code, end)
    }
}

const UNSAFE: (u32, u32) = (900, 901);
const FINE: (u32, u32) = (0, 0);

#[test]
fn rules() {
    let m = machine();
    let [own, other, free] = m.streams;
    let store = function(&m, c"store");
    let (mut event, mut captured, mut host) = (0, 0, [0u8; 64]);
    let page = host.as_mut_ptr() as u64;
    // SAFETY: every pointer is a local of the right type.
    unsafe {
        ok(stream::cuEventCreate(&raw mut event, 0));
        ok(stream::cuEventCreate(&raw mut captured, 0));
        ok(stream::cuEventRecord(event, other));
        ok(context::cuCtxSynchronize());
        for mode in 0..3 {
            let unsafe_call = if mode == 2 { FINE } else { UNSAFE };
            let check = |name: &str, expected, call: &mut dyn FnMut() -> u32| {
                assert_eq!(during(&m, mode, call), expected, "{name} in mode {mode}");
            };
            let mut p = 0u64;
            check("alloc", unsafe_call, &mut || memory::cuMemAlloc_v2(&raw mut p, 64));
            check("event query", unsafe_call, &mut || stream::cuEventQuery(event));
            check("event synchronize", unsafe_call, &mut || stream::cuEventSynchronize(event));
            check("other stream synchronize", unsafe_call, &mut || stream::cuStreamSynchronize(free));
            check("other stream query", unsafe_call, &mut || stream::cuStreamQuery(free));
            check("set limit", unsafe_call, &mut || context::cuCtxSetLimit(0, 2048));
            check("own stream synchronize", UNSAFE, &mut || stream::cuStreamSynchronize(own));
            check("own stream query", UNSAFE, &mut || stream::cuStreamQuery(own));
            check("context synchronize", UNSAFE, &mut || context::cuCtxSynchronize());
            check("synchronous copy", (906, 901), &mut || copy::cuMemcpyHtoD_v2(m.memory, page, 64));
            check("launch in the legacy stream", (906, 901), &mut || launch(store, 0, &[m.memory, 1]));
            check("launch elsewhere", FINE, &mut || launch(store, other, &[m.memory, 1]));
            check("launch in it", FINE, &mut || launch(store, own, &[m.memory, 1]));
            check("pageable copy in it", FINE, &mut || copy::cuMemcpyHtoDAsync_v2(m.memory, page, 64, own));
            check("callback in it", UNSAFE, &mut || stream::cuStreamAddCallback(own, 1, 0, 0));
            check("wait for an event from outside", (905, 901), &mut || {
                stream::cuStreamWaitEvent(own, event, 0)
            });
            check("query of a captured event", (907, 901), &mut || {
                ok(stream::cuEventRecord(captured, own));
                stream::cuEventQuery(captured)
            });
            check("fork that is not joined", (0, 904), &mut || {
                ok(stream::cuEventRecord(captured, own));
                ok(stream::cuStreamWaitEvent(other, captured, 0));
                launch(store, other, &[m.memory, 1])
            });
            let (mut status, mut id) = (0, 0);
            check("question about the legacy stream", (906, 0), &mut || {
                stream::cuStreamGetCaptureInfo(0, &raw mut status, &raw mut id)
            });
            check("second begin", (401, 0), &mut || stream::cuStreamBeginCapture_v2(own, mode));
        }
        // Ending in another stream or thread.
        let mut graph = 0;
        ok(stream::cuStreamBeginCapture_v2(own, 2));
        ok(stream::cuEventRecord(captured, own));
        ok(stream::cuStreamWaitEvent(other, captured, 0));
        assert_eq!(stream::cuStreamEndCapture(other, &raw mut graph), 903);
        assert_eq!(stream::cuStreamEndCapture(own, &raw mut graph), 901);
        ok(stream::cuStreamBeginCapture_v2(own, 1));
        let ended = std::thread::spawn(move || {
            let mut graph = 0;
            stream::cuStreamEndCapture(own, &raw mut graph)
        });
        assert_eq!(ended.join().unwrap(), 908);
        assert_eq!(stream::cuStreamEndCapture(own, &raw mut graph), 401);
        assert_eq!(stream::cuStreamBeginCapture_v2(0, 2), 900);
        assert_eq!(
            stream::cuStreamGetCaptureInfo_v2(
                own,
                null_mut(),
                null_mut(),
                null_mut(),
                null_mut(),
                null_mut()
            ),
            1
        );
    }
}
