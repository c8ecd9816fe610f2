//! Copies and queries that go by addresses, whatever memory a call says that they are.

use gpusession_proto::frame::INLINE_MAX;
use gpusession_test_support::cuda::{Cuda, at};

use crate::{begin, granted, succeeds, worker};

/// `CUmemorytype`
const HOST: u64 = 1;
const DEVICE: u64 = 2;

/// Copies a plane of 64-byte rows by `cuMemcpy2D`; each side is a kind of memory and an address.
fn plane(cuda: &Cuda, target: (u64, u64), source: (u64, u64), len: u64) -> i32 {
    let side = |(kind, address): (u64, u64)| [0, 0, kind, address, address, 0, 64];
    let mut words = [&side(source)[..], &side(target), &[64, len / 64]].concat();
    cuda.call("cuMemcpy2D_v2", &[words.as_mut_ptr() as u64])
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed)).collect()
}

/// Copies memory of the other kind than the call's name says.
pub fn copies_by_addresses() {
    let cuda = begin();
    let stream = cuda.get("cuStreamCreate", &[1]);
    for len in [64, 4 * INLINE_MAX] {
        let n = len as u64;
        let [a, b] = [(); 2].map(|()| cuda.allocate(n));
        let pinned = cuda.get("cuMemHostAlloc", &[n, 0]);
        let mut own = vec![0u8; len];
        let own = own.as_mut_ptr() as u64;
        cuda.ok("cuMemHostRegister_v2", &[own, n, 2]);
        let mut seed = 0;
        // From a pattern in `from`, made by a plain copy, to `to`, read by a plain one.
        let mut right = |from: u64, to: u64, what: &str, copy: &dyn Fn()| {
            seed += 1;
            let (sent, mut back) = (pattern(seed, len), vec![0u8; len]);
            cuda.ok("cuMemcpy", &[from, sent.as_ptr() as u64, n]);
            copy();
            cuda.ok("cuStreamSynchronize", &[stream]);
            cuda.ok("cuMemcpy", &[back.as_mut_ptr() as u64, to, n]);
            assert!(sent == back, "{what} of {len} bytes");
        };
        for (from, to, what) in [
            (a, b, "device memory to the device"),
            (a, pinned, "device memory to pinned memory"),
            (pinned, a, "pinned memory to the device"),
            (pinned, own, "pinned memory to registered memory"),
            (own, pinned, "registered memory to pinned memory"),
            (own, b, "registered memory to the device"),
            (b, own, "device memory to registered memory"),
        ] {
            for call in ["cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"] {
                right(from, to, &format!("{call} of {what}"), &|| cuda.ok(call, &[to, from, n]));
            }
            for call in ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"] {
                right(from, to, &format!("{call} of {what}"), &|| cuda.ok(call, &[to, from, n, stream]));
            }
            for kinds in [(HOST, HOST), (HOST, DEVICE), (DEVICE, HOST), (DEVICE, DEVICE)] {
                let copy = || assert_eq!(plane(&cuda, (kinds.0, to), (kinds.1, from), n), 0, "{what}");
                right(from, to, &format!("a plane, {kinds:?}, of {what}"), &copy);
            }
        }
        assert_eq!(plane(&cuda, (DEVICE, a), (HOST, 0), n), 1, "no address");
        cuda.ok("cuMemHostUnregister", &[own]);
    }
}

/// Asks about registered memory by the address that the device has for it.
pub fn asks_about_registered_memory() {
    const MEMORY_TYPE: u64 = 2;
    const DEVICE_POINTER: u64 = 3;
    const HOST_POINTER: u64 = 4;
    const IS_MANAGED: u64 = 8;
    const DEVICE_ORDINAL: u64 = 9;
    let cuda = begin();
    let mut memory = vec![0u32; 5000];
    let host = &raw mut memory[1000] as u64;
    cuda.ok("cuMemHostRegister_v2", &[host, 4 * 4000, 2]);
    let device = cuda.get("cuMemHostGetDevicePointer_v2", &[host, 0]);
    assert_ne!(device, host);
    let ask = |attribute, address| {
        let mut value = 0u64;
        (cuda.call("cuPointerGetAttribute", &[at(&mut value), attribute, address]), value)
    };
    for offset in [0, 8, 4 * 4000 - 1] {
        for address in [host + offset, device + offset] {
            assert_eq!(ask(MEMORY_TYPE, address), (0, HOST));
            assert_eq!(ask(DEVICE_POINTER, address), (0, device + offset));
            assert_eq!(ask(HOST_POINTER, address), (0, host + offset));
            assert_eq!(ask(IS_MANAGED, address), (0, 0));
            assert_eq!(ask(DEVICE_ORDINAL, address), (0, 0));
        }
    }
    assert_eq!(ask(HOST_POINTER, device + 4 * 4000).0, 1);
    cuda.ok("cuMemHostUnregister", &[host]);
    assert_eq!(ask(HOST_POINTER, device).0, 1);
}

/// Abandons captures, by a reset of their context and by a wait for another capture's event.
pub fn abandons_captures() {
    const MERGE: i32 = 902;
    const INVALIDATED: i32 = 901;
    let cuda = begin();
    let stream = cuda.get("cuStreamCreate", &[1]);
    cuda.ok("cuStreamBeginCapture_v2", &[stream, 0]);
    cuda.ok("cuDevicePrimaryCtxReset_v2", &[0]);
    cuda.on(0);
    cuda.allocate(1024);
    let [first, second] = [(); 2].map(|()| cuda.get("cuStreamCreate", &[1]));
    let event = cuda.get("cuEventCreate", &[2]);
    let mut graph = 0u64;
    for stream in [first, second] {
        cuda.ok("cuStreamBeginCapture_v2", &[stream, 0]);
    }
    cuda.ok("cuEventRecord", &[event, second]);
    assert_eq!(cuda.call("cuStreamWaitEvent", &[first, event, 0]), MERGE);
    for stream in [first, second] {
        assert_eq!(cuda.call("cuStreamEndCapture", &[stream, at(&mut graph)]), INVALIDATED);
    }
    let address = cuda.allocate(1024);
    cuda.ok("cuMemFree_v2", &[address]);
}

#[test]
fn a_copy_goes_by_addresses() {
    let (_machine, worker) = worker(&[]);
    succeeds("copies_by_addresses", vec![granted(&worker)], &[]);
}

#[test]
fn registered_memory_is_known_by_either_address() {
    let (_machine, worker) = worker(&[]);
    succeeds("asks_about_registered_memory", vec![granted(&worker)], &[]);
}

#[test]
fn a_capture_that_cannot_end_forbids_nothing() {
    let (_machine, worker) = worker(&[]);
    succeeds("abandons_captures", vec![granted(&worker)], &[]);
}
