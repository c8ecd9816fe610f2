//! Connections that break, also because the program closes them.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpusession_proto::grant::Reply;
use gpusession_test_support::cuda::{KERNEL, at};
use gpusession_test_support::relay::{Cut, Fate, Place, Relay};
use gpusession_test_worker::{MIB, Machine, Options, Random, Worker};

use crate::{DEVICE_UNAVAILABLE, begin, granted, said, succeeds, works};

// --- Bodies of the programs, each in a process of its own.

/// Enqueues, waits and copies a little, with host functions, while connections break.
pub fn works_through_breaks() {
    const ROUNDS: u32 = 200;
    static RAN: AtomicU64 = AtomicU64::new(0);
    extern "C" fn run(_: *mut std::ffi::c_void) {
        RAN.fetch_add(1, Ordering::SeqCst);
    }
    let cuda = begin();
    let module = cuda.load(KERNEL);
    let (kernel, address) = (cuda.increment(module), cuda.allocate(1024));
    let stream = cuda.get("cuStreamCreate", &[0]);
    cuda.write(address, &0u32.to_ne_bytes());
    for round in 1..=ROUNDS {
        for _ in 0..10 {
            assert_eq!(cuda.launch(kernel, address, stream), 0);
        }
        let ran = run as extern "C" fn(*mut std::ffi::c_void) as usize as u64;
        cuda.ok("cuLaunchHostFunc", &[stream, ran, 0]);
        cuda.ok("cuStreamSynchronize", &[stream]);
        assert_eq!(RAN.load(Ordering::SeqCst), u64::from(round));
        let mut value = 0u32;
        cuda.ok("cuMemcpyDtoH_v2", &[at(&mut value), address, 4]);
        assert_eq!(value, 10 * round);
    }
}

/// Copies more than 64 KiB at a time from and to memory of each kind while connections break.
pub fn copies_through_breaks() {
    const LEN: usize = 5 << 20;
    let cuda = begin();
    let device = cuda.allocate(LEN as u64);
    let stream = cuda.get("cuStreamCreate", &[0]);
    for round in 0..24u8 {
        let bytes: Vec<u8> = (0..LEN).map(|i| (i / 7) as u8 ^ round).collect();
        let mut back = vec![0u8; LEN];
        let len = LEN as u64;
        match round % 3 {
            0 | 1 => {
                let mut source = bytes.clone();
                if round % 3 == 0 {
                    cuda.ok("cuMemcpyHtoD_v2", &[device, at(&mut source[0]), len]);
                } else {
                    cuda.ok("cuMemcpyHtoDAsync_v2", &[device, at(&mut source[0]), len, stream]);
                }
                // It is the program's again.
                source.fill(0xee);
            }
            _ => {
                let pinned = cuda.get("cuMemAllocHost_v2", &[len]);
                // SAFETY: the driver's memory of this length.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), pinned as *mut u8, LEN) };
                cuda.ok("cuMemcpyHtoDAsync_v2", &[device, pinned, len, stream]);
                cuda.ok("cuStreamSynchronize", &[stream]);
                cuda.ok("cuMemFreeHost", &[pinned]);
            }
        }
        if round % 2 == 0 {
            cuda.ok("cuMemcpyDtoHAsync_v2", &[at(&mut back[0]), device, len, stream]);
            cuda.ok("cuStreamSynchronize", &[stream]);
        } else {
            cuda.ok("cuStreamSynchronize", &[stream]);
            let pinned = cuda.get("cuMemAllocHost_v2", &[len]);
            cuda.ok("cuMemcpyDtoHAsync_v2", &[pinned, device, len, stream]);
            // Newer data for some of the same bytes.
            cuda.ok("cuMemcpyDtoHAsync_v2", &[pinned + MIB, device, MIB, stream]);
            cuda.ok("cuStreamSynchronize", &[stream]);
            // SAFETY: as above; the copies are complete.
            unsafe { std::ptr::copy_nonoverlapping(pinned as *const u8, back.as_mut_ptr(), LEN) };
            assert!(back[1 << 20..2 << 20] == bytes[..1 << 20], "round {round}: the newer copy");
            back[1 << 20..2 << 20].copy_from_slice(&bytes[1 << 20..2 << 20]);
            cuda.ok("cuMemFreeHost", &[pinned]);
        }
        assert!(back == bytes, "round {round}");
    }
}

/// Works until the worker is lost.
pub fn loses_its_lease() {
    let cuda = begin();
    let function = cuda.increment(cuda.load(KERNEL));
    let address = cuda.allocate(1024);
    loop {
        // A launch may return the error, too.
        cuda.launch(function, address, 0);
        match cuda.call("cuCtxSynchronize", &[]) {
            0 => {}
            status => break assert_eq!(status, DEVICE_UNAVAILABLE),
        }
    }
    assert_eq!(cuda.launch(function, address, 0), DEVICE_UNAVAILABLE);
}

/// Closes all descriptors, as some daemons do, and uses their numbers for files of its own.
pub fn closes_its_descriptors() {
    let cuda = begin();
    works(&cuda);
    // SAFETY: the test owns no descriptor above the standard ones that it uses later.
    assert_eq!(unsafe { nix::libc::close_range(3, nix::libc::c_uint::MAX, 0) }, 0);
    let mut pairs: Vec<_> = (0..16).map(|_| UnixStream::pair().unwrap()).collect();
    works(&cuda);
    for (ours, theirs) in &mut pairs {
        ours.write_all(b"mine").unwrap();
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        let mut read = Vec::new();
        theirs.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"mine");
    }
}

// --- Tests.

/// Runs a program over connections that break within their first `units`.
fn runs_through_breaks(name: &str, units: u64, seed: u64, grace: u32) -> u32 {
    let machine = Machine::new();
    let worker = Worker::start_with(&machine, &Options { resume_grace_s: grace, ..Options::default() });
    let relay = Relay::start(worker.address, move |connection| {
        let mut random = Random::new(u64::from(connection) + seed);
        let place = Place::ALL[random.below(Place::ALL.len() as u64) as usize];
        // The first connection greets undisturbed.
        let first = if connection == 0 { 4 } else { 0 };
        let unit = first + random.below(units) as u32;
        let cut = Some(Cut { unit, place, reset: random.below(2) == 0 });
        match random.below(2) {
            _ if connection > 150 => Fate::default(),
            0 => Fate { up: cut, ..Fate::default() },
            _ => Fate { down: cut, ..Fate::default() },
        }
    });
    let mut endpoint = worker.endpoint(false);
    endpoint.addresses = vec![relay.address.to_string()];
    let why = [("GPUSESSION_TRACE", "why".to_string())];
    let (output, _) = gpusession_test_support::cuda::run(name, vec![Reply::Granted(vec![endpoint])], &why);
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("the connection is back after"), "{said}");
    // A break at the exit itself leaves the worker to the daemon.
    worker.abandoned();
    relay.connections()
}

#[test]
fn a_program_does_not_notice_that_its_connection_breaks() {
    let connections = runs_through_breaks("works_through_breaks", 120, 5, 30);
    assert!(connections > 10, "{connections} connections");
}

#[test]
fn copies_do_not_notice_that_their_connections_break() {
    for seed in 0..2 {
        let connections = runs_through_breaks("copies_through_breaks", 12, 1000 * seed, 60);
        assert!(connections > 30, "{connections} connections");
    }
}

#[test]
fn a_program_may_close_all_its_descriptors() {
    let machine = Machine::new();
    let worker = Worker::start_with(&machine, &Options { resume_grace_s: 30, ..Options::default() });
    let why = [("GPUSESSION_TRACE", "why".to_string())];
    let said = succeeds("closes_its_descriptors", vec![granted(&worker)], &why);
    assert!(said.contains("the connection is back after"), "{said}");
}

#[test]
fn a_program_in_an_outage_ends_when_the_daemon_says_that_its_lease_has() {
    let machine = Machine::new();
    let worker = Worker::start_with(&machine, &Options { resume_grace_s: 60, ..Options::default() });
    // The first connection breaks after a while, all others at once.
    let cut = |unit| Fate { up: Some(Cut { unit, place: Place::After, reset: true }), ..Fate::default() };
    let relay = Relay::start(worker.address, move |connection| cut(if connection == 0 { 30 } else { 0 }));
    let mut endpoint = worker.endpoint(false);
    endpoint.addresses = vec![relay.address.to_string()];
    let replies = vec![Reply::Granted(vec![endpoint]), Reply::Ended("lease l1 has ended: released".into())];
    let begun = Instant::now();
    let (output, asked) = gpusession_test_support::cuda::run("loses_its_lease", replies, &[]);
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("gpusession: connection to test lost: lease l1 has ended: released"), "{said}");
    assert_eq!(asked, 2, "once for a worker, once about it");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}
