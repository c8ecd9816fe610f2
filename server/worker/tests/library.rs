//! Programs on our `libcuda.so.1`, with a real worker.
//!
//! The worker uses the simulated driver with one of its nastier switches.
#![expect(clippy::disallowed_methods, reason = "tests wait for other processes")]

use std::ffi::CStr;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gpusession_proto::frame::{INLINE_MAX, op};
use gpusession_proto::grant::Reply;
use gpusession_proto::supervise::FromWorker;
use gpusession_test_support::cuda::{Cuda, KERNEL, at};
use gpusession_test_worker::{KEY, MIB, Machine, Options, WINDOW, Worker};
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect};

mod library {
    pub mod addresses;
    pub mod breaks;
    pub mod dumps;
    pub mod flags;
    pub mod nccl;
}

use library::addresses::{abandons_captures, asks_about_registered_memory, copies_by_addresses};
use library::breaks::{closes_its_descriptors, copies_through_breaks, loses_its_lease, works_through_breaks};
use library::dumps::faults_with_a_dump;
use library::flags::{exchanges_flags_with_a_kernel, sets_flags_while_a_thread_waits};
use library::nccl::makes_communicators;

const OUT_OF_MEMORY: i32 = 2;
const DEVICE_UNAVAILABLE: i32 = 46;
const INVALID_IMAGE: i32 = 200;
const INVALID_PTX: i32 = 218;
const ILLEGAL_ADDRESS: i32 = 700;
const NOT_SUPPORTED: i32 = 801;
const SYSTEM_NOT_READY: i32 = 802;

// --- Bodies of the programs, each in a process of its own.

/// Opens the library with a context of device 0.
fn begin() -> Cuda {
    let cuda = Cuda::begin();
    cuda.on(0);
    cuda
}

fn allocate(cuda: &Cuda, size: u64) -> Result<u64, i32> {
    cuda.try_get("cuMemAlloc_v2", &[size])
}

/// Returns `true` if one launch increments the word at a device address.
fn works_at(cuda: &Cuda, module: u64, address: u64) -> bool {
    let mut after = 0u32;
    cuda.write(address, &41u32.to_ne_bytes());
    assert_eq!(cuda.launch(cuda.increment(module), address, 0), 0);
    // This kind of copy has to know the kind of an address.
    cuda.ok("cuMemcpy", &[at(&mut after), address, 4]);
    after == 42
}

fn works(cuda: &Cuda) {
    let module = cuda.load(KERNEL);
    let address = cuda.allocate(1024);
    assert!(works_at(cuda, module, address));
    // A driver refuses this for a function that it has only listed.
    const MAX_DYNAMIC_SHARED_SIZE_BYTES: u64 = 8;
    cuda.ok("cuFuncSetAttribute", &[cuda.increment(module), MAX_DYNAMIC_SHARED_SIZE_BYTES, 1024]);
    cuda.ok("cuMemFree_v2", &[address]);
    cuda.ok("cuModuleUnload", &[module]);
}

/// Maps memory of the program; returns `true` if the addresses were free.
fn occupy(address: u64, len: u64) -> bool {
    let (address, len) = (NonZeroUsize::new(address as usize), NonZeroUsize::new(len as usize));
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED_NOREPLACE;
    let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: MAP_FIXED_NOREPLACE replaces no mapping.
    match unsafe { mmap_anonymous(address, len.expect("a length"), prot, flags) } {
        Ok(_) => true,
        Err(e) => {
            assert_eq!(e, Errno::EEXIST);
            false
        }
    }
}

fn variable(name: &str) -> String {
    std::env::var(name).expect("set by the test")
}

/// Address that the driver of the next two programs picks; a test may make the program occupy it.
const PICKED: u64 = 0x3_4000_0000;

fn begin_beside_memory() -> (Cuda, bool) {
    let taken = variable("TAKEN") == "yes";
    if taken {
        assert!(occupy(PICKED, 64 * MIB));
        // SAFETY: `occupy` has just mapped the address.
        unsafe { (PICKED as *mut u32).write(7) };
    }
    (begin(), taken)
}

gpusession_test_support::programs!(
    allocates_from_a_pool,
    unbinds_a_context,
    asks_for_a_variable,
    copies_mapped_memory,
    copies_registered_memory,
    copies_a_batch_that_changes,
    synchronizes_often,
    synchronizes_for_output,
    finds_no_window,
    allocates_where_each_third_fails,
    copies_much_behind_a_host_function,
    copies_much_behind_large_copies,
    copies_beside_streams_that_stand_still,
    allocates_what_it_has_freed,
    faults_at_its_fourth_launch,
    loads_an_unknown_instruction,
    launches_for_a_lying_server,
    loses_its_worker,
    works_with_a_long_image,
    loads_one_long_image_in_two_threads,
    just_works,
    works_through_breaks,
    copies_through_breaks,
    loses_its_lease,
    closes_its_descriptors,
    faults_with_a_dump,
    exchanges_flags_with_a_kernel,
    sets_flags_while_a_thread_waits,
    makes_communicators,
    copies_by_addresses,
    asks_about_registered_memory,
    abandons_captures
);

fn allocates_from_a_pool() {
    let (cuda, taken) = begin_beside_memory();
    let module = cuda.load(KERNEL);
    let before = cuda.memory().0;
    let mut address = 0u64;
    let status = cuda.call("cuMemAllocAsync", &[at(&mut address), MIB, 0]);
    if taken {
        assert_eq!((status, address), (NOT_SUPPORTED, 0));
        assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
        assert_eq!(cuda.memory().0, before, "nothing is left behind");
        // SAFETY: `occupy` has mapped the address.
        assert_eq!(unsafe { (PICKED as *const u32).read() }, 7);
    } else {
        assert_eq!(status, 0);
        assert!((PICKED..PICKED + 64 * MIB).contains(&address), "{address:#x}");
        assert!(!occupy(address, 4096), "nothing else of the program's can come to lie there");
        assert!(works_at(&cuda, module, address));
        assert_eq!(cuda.call("cuMemFreeAsync", &[address, 0]), 0);
        assert_eq!(cuda.call("cuMemAllocAsync", &[at(&mut address), MIB, 0]), 0, "the same addresses again");
        assert!(works_at(&cuda, module, address));
    }
    works(&cuda);
}

fn asks_for_a_variable() {
    let (cuda, taken) = begin_beside_memory();
    let module = cuda.load(KERNEL);
    let (mut address, mut size) = (0u64, 0u64);
    let mut get = || {
        let name = c"variable".as_ptr() as u64;
        cuda.call("cuModuleGetGlobal_v2", &[at(&mut address), at(&mut size), module, name])
    };
    if taken {
        assert_eq!((get(), get()), (NOT_SUPPORTED, NOT_SUPPORTED), "each time it asks");
    } else {
        assert_eq!(get(), 0);
        let mut value = 0u64;
        assert_eq!(cuda.call("cuMemcpy", &[at(&mut value), address, size]), 0);
        assert_eq!(value, 5);
        assert!(!occupy(address & !4095, 4096));
    }
    works(&cuda);
}

fn copies_mapped_memory() {
    let cuda = begin();
    let module = cuda.load(KERNEL);
    let (mut address, mut memory) = (0u64, 0u64);
    const SIZE: u64 = 2 * MIB;
    // CUmemAllocationProp, CUmemAccessDesc: pinned memory of device 0, read and written by it.
    let (mut properties, mut access) = ([1u64, 1, 0, 0], [1u32, 0, 3]);
    assert_eq!(cuda.call("cuMemAddressReserve", &[at(&mut address), SIZE, 0, 0, 0]), 0);
    assert_eq!(cuda.call("cuMemCreate", &[at(&mut memory), SIZE, properties.as_mut_ptr() as u64, 0]), 0);
    assert_eq!(cuda.call("cuMemMap", &[address, SIZE, 0, memory, 0]), 0);
    assert_eq!(cuda.call("cuMemSetAccess", &[address, SIZE, access.as_mut_ptr() as u64, 1]), 0);
    assert!(works_at(&cuda, module, address));
}

/// Copies registered memory, whose address on the device is not the program's.
fn copies_registered_memory() {
    let cuda = begin();
    let module = cuda.load(KERNEL);
    let function = cuda.increment(module);
    for offset in [0usize, 1000] {
        let mut memory = vec![0u32; 5000];
        let (host, len) = (&raw mut memory[offset] as u64, 4 * 4000);
        let (mut device, mut after) = (0u64, 0u32);
        assert_eq!(cuda.call("cuMemHostRegister_v2", &[host, len, 2]), 0);
        assert_eq!(cuda.call("cuMemHostGetDevicePointer_v2", &[at(&mut device), host, 0]), 0);
        assert_ne!(device, host);
        assert_eq!(device % 4096, host % 4096);
        assert!(!occupy(device & !4095, 4096), "nothing of the program's can come to lie there");
        // SAFETY: inside `memory`, which this call updates with the device's changes when it
        // synchronises.
        let word = unsafe { &mut *(host as *mut u32) };
        *word = 6;
        assert_eq!(cuda.launch(function, device, 0), 0);
        assert_eq!(cuda.call("cuMemcpy", &[at(&mut after), device, 4]), 0);
        assert_eq!(after, 7, "what the kernel made of what the program wrote");
        after = 20;
        assert_eq!(cuda.call("cuMemcpy", &[device, at(&mut after), 4]), 0);
        assert_eq!(cuda.launch(function, device, 0), 0);
        assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
        // SAFETY: as above.
        assert_eq!(unsafe { (host as *const u32).read_volatile() }, 21);
        assert_eq!(cuda.call("cuMemHostUnregister", &[host]), 0);
    }
    works(&cuda);
}

/// Copies pageable memory that changes right after the call, which promised to read it before.
fn copies_a_batch_that_changes() {
    let cuda = begin();
    const LEN: usize = 100_000;
    let (mut source, mut after) = (vec![3u8; LEN], vec![0u8; LEN]);
    // CU_STREAM_NON_BLOCKING, CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL
    let (stream, mut attributes, mut start) = (cuda.get("cuStreamCreate", &[1]), [2u32, 0, 0, 0, 0, 0], 0u64);
    let (mut target, mut len) = (cuda.allocate(LEN as u64), LEN as u64);
    let mut from = source.as_mut_ptr() as u64;
    let arrays = [at(&mut target), at(&mut from), at(&mut len), 1, at(&mut attributes), at(&mut start), 1];
    cuda.ok("cuMemcpyBatchAsync_v2", &[&arrays[..], &[stream]].concat());
    source.fill(4);
    cuda.ok("cuMemcpyDtoHAsync_v2", &[after.as_mut_ptr() as u64, target, LEN as u64, stream]);
    cuda.ok("cuStreamSynchronize", &[stream]);
    assert!(after.iter().all(|byte| *byte == 3));
}

/// Waits four times in a round for kernels that may run. Waits further times with nothing to wait
/// for: behind a copy to the device, behind a wait, and by a free.
fn synchronizes_often() {
    const ROUNDS: u32 = 20;
    let cuda = begin();
    let function = cuda.increment(cuda.load(KERNEL));
    let address = cuda.allocate(4);
    let mut after = 0u32;
    // CU_STREAM_NON_BLOCKING
    let (first, second) = (cuda.get("cuStreamCreate", &[1]), cuda.get("cuStreamCreate", &[1]));
    for round in 0..ROUNDS {
        let [unused, used] = [(); 2].map(|()| cuda.allocate(1024));
        cuda.write(address, &round.to_ne_bytes());
        cuda.ok("cuCtxSynchronize", &[]);
        assert_eq!(cuda.launch(function, address, first), 0);
        cuda.ok("cuCtxSynchronize", &[]);
        cuda.ok("cuCtxSynchronize", &[]);
        cuda.ok("cuMemFree_v2", &[unused]);
        assert_eq!(cuda.launch(function, address, second), 0);
        // It uses no memory of the kernel's, but the driver does not know.
        cuda.ok("cuMemFree_v2", &[used]);
        cuda.ok("cuMemcpyDtoH_v2", &[at(&mut after), address, 4]);
        assert_eq!(after, round + 2);
        // The second stream's work is complete, which only this call finds out.
        cuda.ok("cuCtxSynchronize", &[]);
        // The work of a stream that no longer exists.
        let gone = cuda.get("cuStreamCreate", &[1]);
        assert_eq!(cuda.launch(function, address, gone), 0);
        cuda.ok("cuStreamDestroy_v2", &[gone]);
        cuda.ok("cuCtxSynchronize", &[]);
        cuda.ok("cuMemcpyDtoH_v2", &[at(&mut after), address, 4]);
        assert_eq!(after, round + 3);
    }
}

/// Waits behind copies and queries that show its kernels complete, but not what they have printed.
fn synchronizes_for_output() {
    let cuda = begin();
    let function = cuda.increment(cuda.load(KERNEL));
    let (address, mut bytes) = (cuda.allocate(MIB), vec![0u8; MIB as usize]);
    let stream = cuda.get("cuStreamCreate", &[1]);
    for _ in 0..5 {
        assert_eq!(cuda.launch(function, address, stream), 0);
        cuda.ok("cuMemcpyDtoHAsync_v2", &[bytes.as_mut_ptr() as u64, address, MIB, stream]);
        cuda.ok("cuCtxSynchronize", &[]);
        assert_eq!(cuda.launch(function, address, stream), 0);
        while cuda.call("cuStreamQuery", &[stream]) != 0 {}
        cuda.ok("cuCtxSynchronize", &[]);
        cuda.ok("cuCtxSynchronize", &[]);
    }
}

fn finds_no_window() {
    let library = gpusession_test_support::cuda::library();
    assert_eq!(gpusession_test_support::cuda::call(&library, "cuInit", &[0]), SYSTEM_NOT_READY);
    assert_eq!(
        gpusession_test_support::cuda::call(&library, "cuInit", &[0]),
        SYSTEM_NOT_READY,
        "the same each time"
    );
}

fn allocates_where_each_third_fails() {
    let cuda = begin();
    let before = cuda.memory().0;
    for _ in 0..5 {
        let results: Vec<_> = (0..9).map(|_| allocate(&cuda, 3 * MIB)).collect();
        assert_eq!(results.iter().filter(|r| **r == Err(OUT_OF_MEMORY)).count(), 3, "{results:?}");
        for address in results.into_iter().flatten() {
            assert_eq!(cuda.call("cuMemFree_v2", &[address]), 0);
        }
        assert_eq!(cuda.memory().0, before, "what failed takes nothing");
    }
    let module = cuda.load(KERNEL);
    let address = (0..3).find_map(|_| allocate(&cuda, MIB).ok()).expect("one of three");
    assert!(works_at(&cuda, module, address));
}

fn copies_much_behind_a_host_function() {
    extern "C" fn sleeps(_: u64) {
        std::thread::sleep(Duration::from_millis(500));
    }
    // More than the stream's queue holds, and as much again as may wait in the worker.
    const COPIES: usize = 8000;
    let cuda = begin();
    let mut bytes = vec![7u8; INLINE_MAX];
    let address = cuda.allocate(bytes.len() as u64);
    let stream = cuda.get("cuStreamCreate", &[1]);
    cuda.ok("cuLaunchHostFunc", &[stream, sleeps as *const () as u64, 0]);
    for _ in 0..COPIES {
        cuda.ok("cuMemcpyHtoDAsync_v2", &[address, bytes.as_ptr() as u64, bytes.len() as u64, stream]);
    }
    cuda.ok("cuStreamSynchronize", &[stream]);
    bytes.fill(0);
    cuda.ok("cuMemcpyDtoH_v2", &[bytes.as_mut_ptr() as u64, address, bytes.len() as u64]);
    assert!(bytes.iter().all(|b| *b == 7));
}

/// Copies much behind large copies, which the replay waits for and the program does not.
///
/// Another thread's work lets the stream continue.
fn copies_much_behind_large_copies() {
    const COPIES: u64 = 8000;
    let cuda = begin();
    let ctx = cuda.get("cuCtxGetCurrent", &[]);
    const LARGE: usize = 4 << 20;
    let pinned = cuda.get("cuMemHostAlloc", &[LARGE as u64, 0]);
    // SAFETY: allocated just now, and never freed.
    let large = unsafe { std::slice::from_raw_parts_mut(pinned as *mut u8, LARGE) };
    large.fill(1);
    let (large, small) = (&*large, vec![7u8; INLINE_MAX]);
    let [stream, other] = [(); 2].map(|()| cuda.get("cuStreamCreate", &[1]));
    let [address, word] = [large.len() as u64, 4].map(|size| cuda.allocate(size));
    cuda.write(word, &[0; 4]);
    let copy = |to: u64, from: &[u8], stream: u64| {
        cuda.ok("cuMemcpyHtoDAsync_v2", &[to, from.as_ptr() as u64, from.len() as u64, stream]);
    };
    let sent = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            cuda.ok("cuCtxSetCurrent", &[ctx]);
            // CU_STREAM_WAIT_VALUE_EQ
            cuda.ok("cuStreamWaitValue32_v2", &[stream, word, 1, 1]);
            // More than may wait in the worker's memory for a stream.
            for _ in 0..12 {
                copy(address, large, stream);
            }
            for _ in 0..COPIES {
                copy(address, &small, stream);
                sent.fetch_add(1, Ordering::SeqCst);
            }
            cuda.ok("cuStreamSynchronize", &[stream]);
        });
        cuda.ok("cuCtxSetCurrent", &[ctx]);
        // Only a constant count shows that the first thread waits.
        let mut before = 0;
        while before == 0 || sent.load(Ordering::SeqCst) != before {
            before = sent.load(Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(500));
        }
        cuda.ok("cuStreamWriteValue32_v2", &[other, word, 1, 0]);
        assert!(before < COPIES, "it was held up");
    });
    let mut bytes = vec![0u8; large.len()];
    cuda.ok("cuMemcpyDtoH_v2", &[bytes.as_mut_ptr() as u64, address, bytes.len() as u64]);
    assert!(bytes[..small.len()] == small && bytes[small.len()..] == large[small.len()..]);
}

/// Makes no context current, which uncovers the one below.
fn unbinds_a_context() {
    let cuda = Cuda::begin();
    let first = cuda.on(0);
    let second = cuda.get("cuCtxCreate_v2", &[0, 0]);
    let current = || cuda.get("cuCtxGetCurrent", &[]);
    assert_eq!(current(), second);
    cuda.ok("cuCtxSetCurrent", &[0]);
    assert_eq!(current(), first);
    cuda.ok("cuCtxSynchronize", &[]);
    for _ in 0..2 {
        cuda.ok("cuCtxSetCurrent", &[0]);
        assert_eq!(current(), 0);
    }
    cuda.ok("cuCtxSetCurrent", &[second]);
    assert_eq!(current(), second);
}

/// Frees memory of a pool and allocates it again, 100 times; then looks at the pool.
fn allocates_what_it_has_freed() {
    const SIZE: u64 = 256;
    const INVALID_VALUE: i32 = 1;
    const USED_MEM_CURRENT: u64 = 7;
    let cuda = begin();
    let function = cuda.increment(cuda.load(KERNEL));
    let stream = cuda.get("cuStreamCreate", &[1]);
    let allocate = |size: u64| cuda.get("cuMemAllocAsync", &[size, stream]);
    let address = allocate(SIZE);
    for _ in 0..100 {
        assert_eq!(cuda.launch(function, address, stream), 0);
        cuda.ok("cuMemFreeAsync", &[address, stream]);
        assert_eq!(allocate(SIZE), address);
    }
    let pool = cuda.get("cuDeviceGetDefaultMemPool", &[0]);
    let used = || {
        let mut bytes = 0u64;
        cuda.ok("cuMemPoolGetAttribute", &[pool, USED_MEM_CURRENT, at(&mut bytes)]);
        bytes
    };
    assert!(used() >= SIZE);
    cuda.ok("cuMemFreeAsync", &[address, stream]);
    assert_eq!(cuda.call("cuMemFreeAsync", &[address, stream]), INVALID_VALUE, "it is free");
    assert_eq!(used(), 0, "the pool knows");
    for size in [SIZE, 2 * SIZE] {
        cuda.ok("cuMemFreeAsync", &[allocate(size), stream]);
    }
    cuda.ok("cuStreamDestroy_v2", &[stream]);
    assert_eq!(used(), 0);
}

#[test]
fn memory_that_a_stream_has_freed_comes_back_without_a_round_trip() {
    let (_machine, worker) = worker(&[]);
    let said = succeeds("allocates_what_it_has_freed", vec![granted(&worker)], &[]);
    assert!(said.contains(" 3 cuMemAllocAsync "), "{said}");
}

/// Copies in bulk in both directions while more bulk copies than the worker has slots wait.
fn copies_beside_streams_that_stand_still() {
    const LARGE: usize = 80 << 20;
    const NOT_READY: i32 = 600;
    let cuda = begin();
    let pinned = |value: u8| {
        let address = cuda.get("cuMemHostAlloc", &[LARGE as u64, 0]);
        // SAFETY: allocated just now, and never freed.
        let memory = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, LARGE) };
        memory.fill(value);
        memory
    };
    let (up, down) = (&*pinned(1), pinned(0));
    let [first, second, other] = [(); 3].map(|()| cuda.get("cuStreamCreate", &[1]));
    let [large, small, word] = [LARGE as u64, 4 << 20, 4].map(|size| cuda.allocate(size));
    cuda.write(word, &[0; 4]);
    for stream in [first, second] {
        // CU_STREAM_WAIT_VALUE_EQ
        cuda.ok("cuStreamWaitValue32_v2", &[stream, word, 1, 1]);
    }
    cuda.ok("cuMemcpyHtoDAsync_v2", &[large, up.as_ptr() as u64, LARGE as u64, first]);
    cuda.ok("cuMemcpyDtoHAsync_v2", &[down.as_mut_ptr() as u64, large, LARGE as u64, second]);
    let (from, mut to) = (vec![7u8; 4 << 20], vec![0u8; 4 << 20]);
    cuda.ok("cuMemcpyHtoDAsync_v2", &[small, from.as_ptr() as u64, from.len() as u64, other]);
    cuda.ok("cuMemcpyDtoHAsync_v2", &[to.as_mut_ptr() as u64, small, to.len() as u64, other]);
    cuda.ok("cuStreamSynchronize", &[other]);
    assert!(from == to, "neither direction waits for the streams");
    let event = cuda.get("cuEventCreate", &[0]);
    cuda.ok("cuEventRecord", &[event, first]);
    for (query, object) in [("cuStreamQuery", first), ("cuStreamQuery", second), ("cuEventQuery", event)] {
        assert_eq!(cuda.call(query, &[object]), NOT_READY, "{query} waits for nothing");
    }
    cuda.ok("cuStreamWriteValue32_v2", &[other, word, 1, 0]);
    cuda.ok("cuStreamSynchronize", &[first]);
    cuda.ok("cuStreamSynchronize", &[second]);
    cuda.ok("cuMemcpyDtoH_v2", &[down.as_mut_ptr() as u64, large, LARGE as u64]);
    assert!(up == down, "all bytes are in place");
}

fn faults_at_its_fourth_launch() {
    let cuda = begin();
    let function = cuda.increment(cuda.load(KERNEL));
    let address = cuda.allocate(1024);
    let mut value = 0u32;
    assert_eq!(cuda.call("cuMemcpyHtoD_v2", &[address, at(&mut value), 4]), 0);
    for _ in 0..3 {
        assert_eq!(cuda.launch(function, address, 0), 0);
    }
    assert_eq!(cuda.call("cuMemcpyDtoH_v2", &[at(&mut value), address, 4]), 0);
    assert_eq!(value, 3);
    // The launch itself may already report the error; the synchronisation and every later call
    // must.
    assert!([0, ILLEGAL_ADDRESS].contains(&cuda.launch(function, address, 0)));
    for _ in 0..2 {
        assert_eq!(cuda.call("cuCtxSynchronize", &[]), ILLEGAL_ADDRESS);
        assert_eq!(allocate(&cuda, MIB), Err(ILLEGAL_ADDRESS));
        assert_eq!(cuda.launch(function, address, 0), ILLEGAL_ADDRESS);
        assert_eq!(cuda.call("cuMemcpyDtoH_v2", &[at(&mut value), address, 4]), ILLEGAL_ADDRESS);
        assert_eq!(cuda.call("cuStreamSynchronize", &[0]), ILLEGAL_ADDRESS);
    }
    assert_eq!(value, 3);
}

/// Launches with an argument behind which no byte can be read.
fn launches_for_a_lying_server() {
    const PAGE: usize = 4096;
    let cuda = begin();
    let module = cuda.load(KERNEL);
    let len = NonZeroUsize::new(2 * PAGE).expect("a length");
    // SAFETY: a new mapping.
    let pages = unsafe {
        mmap_anonymous(None, len, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)
    }
    .expect("two pages");
    // SAFETY: the second page is this program's, and nothing is in it.
    unsafe { mprotect(pages.byte_add(PAGE), PAGE, ProtFlags::PROT_NONE) }.expect("a page without access");
    let argument = pages.as_ptr() as u64 + (PAGE - size_of::<u64>()) as u64;
    let mut each = [argument];
    let function = cuda.get("cuModuleGetFunction", &[module, c"increment".as_ptr() as u64]);
    let launched = cuda.call("cuLaunchKernel", &[function, 1, 1, 1, 1, 1, 1, 0, 0, at(&mut each), 0]);
    assert_eq!(launched, INVALID_IMAGE);
}

fn loads_an_unknown_instruction() {
    let cuda = begin();
    let text = KERNEL.to_str().expect("text").replace("add.u32", "frobnicate.u32");
    let text = std::ffi::CString::new(text).expect("no zero");
    let (mut module, mut log) = (0u64, [0u8; 512]);
    // CU_JIT_ERROR_LOG_BUFFER and its size.
    let (mut keys, mut values) = ([5u32, 6], [log.as_mut_ptr() as u64, log.len() as u64]);
    let status = cuda.call(
        "cuModuleLoadDataEx",
        &[at(&mut module), text.as_ptr() as u64, 2, keys.as_mut_ptr() as u64, values.as_mut_ptr() as u64],
    );
    assert_eq!(status, INVALID_PTX);
    let log = CStr::from_bytes_until_nul(&log).expect("text").to_string_lossy();
    assert!(log.contains("ptxas fatal") && log.contains("frobnicate.u32"), "{log}");
    works(&cuda);
}

fn loses_its_worker() {
    let cuda = begin();
    let function = cuda.increment(cuda.load(KERNEL));
    let address = cuda.allocate(1024);
    let worker = nix::unistd::Pid::from_raw(variable("WORKER").parse().expect("a number"));
    nix::sys::signal::kill(worker, nix::sys::signal::Signal::SIGKILL).expect("a worker");
    let (mut value, mut pointer) = (0u32, 0u64);
    // Without work, the call succeeds until the library has read the end of the connection.
    while cuda.call("cuCtxSynchronize", &[]) == 0 {
        std::thread::yield_now();
    }
    for _ in 0..2 {
        assert_eq!(cuda.call("cuCtxSynchronize", &[]), DEVICE_UNAVAILABLE);
        assert_eq!(cuda.launch(function, address, 0), DEVICE_UNAVAILABLE);
        assert_eq!(
            allocate(&cuda, 64),
            Err(DEVICE_UNAVAILABLE),
            "though there is room on a page that it has"
        );
        assert_eq!(cuda.call("cuMemHostAlloc", &[at(&mut pointer), 64, 0]), DEVICE_UNAVAILABLE);
        assert_eq!(cuda.call("cuMemcpyDtoH_v2", &[at(&mut value), address, 4]), DEVICE_UNAVAILABLE);
        assert_eq!(cuda.call("cuStreamSynchronize", &[0]), DEVICE_UNAVAILABLE);
    }
}

fn works_with_a_long_image() {
    let cuda = begin();
    let text = format!("{}\n//{}", KERNEL.to_str().expect("text"), "x".repeat(3 << 20));
    let module = cuda.load(&std::ffi::CString::new(text).expect("no zero"));
    let address = cuda.allocate(1024);
    assert!(works_at(&cuda, module, address));
}

fn loads_one_long_image_in_two_threads() {
    let cuda = begin();
    let ctx = cuda.get("cuCtxGetCurrent", &[]);
    let text = format!("{}\n//{}", KERNEL.to_str().expect("text"), "x".repeat(5 << 20));
    let text = std::ffi::CString::new(text).expect("no zero");
    let start = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                cuda.ok("cuCtxSetCurrent", &[ctx]);
                start.wait();
                let module = cuda.load(&text);
                assert!(works_at(&cuda, module, cuda.allocate(1024)));
            });
        }
    });
}

fn just_works() {
    works(&begin());
}

// --- Tests.

fn worker(driver: &[(&'static str, &str)]) -> (Arc<Machine>, Worker) {
    let machine = Machine::new();
    let driver = driver.iter().map(|(name, value)| (*name, (*value).to_string())).collect();
    let worker = Worker::start_with(&machine, &Options { driver, ..Options::default() });
    (machine, worker)
}

fn granted(worker: &Worker) -> Reply {
    Reply::Granted(vec![worker.endpoint(false)])
}

/// Runs one of the programs above, which must succeed; returns the library's output.
fn succeeds(name: &str, replies: Vec<Reply>, variables: &[(&str, String)]) -> String {
    let (output, _) = gpusession_test_support::cuda::run(name, replies, variables);
    said(&output)
}

fn said(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{said}");
    said
}

#[test]
fn addresses_that_the_driver_picks_are_never_the_programs_own() {
    let at = format!("{PICKED:#x}");
    for (name, switch, what, collisions) in [
        ("allocates_from_a_pool", "SIMGPU_POOL_BASE", "memory of a pool", 1),
        ("asks_for_a_variable", "SIMGPU_DEVICE_BASE", "a variable", 2),
    ] {
        for (taken, collisions) in [("no", 0), ("yes", collisions)] {
            let (_machine, worker) = worker(&[(switch, &at)]);
            let said = succeeds(name, vec![granted(&worker)], &[("TAKEN", taken.into())]);
            assert!(said.contains(&format!(", {collisions} colliding addresses\n")), "{said}");
            let told = said.contains(&format!("the driver has put {what} at 0x34"));
            assert_eq!(told, collisions > 0, "{said}");
        }
    }
}

#[test]
fn a_load_of_a_small_image_is_one_round_trip_and_its_functions_none() {
    let (_machine, worker) = worker(&[]);
    let said = succeeds("just_works", vec![granted(&worker)], &[]);
    assert!(said.contains(" 1 MODULE_LOAD "), "{said}");
    for asked in ["IMAGE_HAVE", "GET_FUNCTION"] {
        assert!(!said.contains(asked), "{said}");
    }
}

#[test]
fn no_current_context_is_the_one_below() {
    let (_machine, worker) = worker(&[]);
    succeeds("unbinds_a_context", vec![granted(&worker)], &[]);
}

#[test]
fn mapped_memory_says_itself_what_it_is() {
    let (_machine, worker) = worker(&[]);
    succeeds("copies_mapped_memory", vec![granted(&worker)], &[]);
}

#[test]
fn registered_memory_has_an_address_of_its_own() {
    let (_machine, worker) = worker(&[]);
    succeeds("copies_registered_memory", vec![granted(&worker)], &[]);
}

#[test]
fn a_batch_reads_during_the_call_if_it_says_so() {
    let (_machine, worker) = worker(&[]);
    succeeds("copies_a_batch_that_changes", vec![granted(&worker)], &[]);
}

#[test]
fn a_synchronization_waits_only_for_work_that_may_run() {
    let (_machine, worker) = worker(&[]);
    let said = succeeds("synchronizes_often", vec![granted(&worker)], &[]);
    assert!(said.contains(" 80 CTX_SYNC"), "{said}");
}

#[test]
fn a_synchronization_brings_what_kernels_have_printed() {
    let (_machine, worker) = worker(&[]);
    let said = succeeds("synchronizes_for_output", vec![granted(&worker)], &[]);
    assert!(said.contains(" 10 CTX_SYNC"), "{said}");
}

#[test]
fn a_driver_that_ignores_hints_is_no_driver_for_us() {
    let (_machine, worker) = worker(&[("SIMGPU_IGNORE_ADDRESS_HINTS", "on")]);
    let said = succeeds("finds_no_window", vec![granted(&worker)], &[]);
    assert!(said.contains("could not reserve any of the offered address windows"), "{said}");
}

#[test]
fn allocations_that_fail_are_told_and_take_nothing() {
    let (_machine, worker) = worker(&[("SIMGPU_FAIL_ALLOC_EVERY", "3")]);
    succeeds("allocates_where_each_third_fails", vec![granted(&worker)], &[]);
}

#[test]
fn a_fault_is_for_good_and_for_one_program() {
    let machine = Machine::new();
    let driver = vec![("SIMGPU_FAULT_AT_LAUNCH", "4".into())];
    let faulty = Worker::start_with(&machine, &Options { driver, ..Options::default() });
    let beside = Worker::start(&machine);
    succeeds("faults_at_its_fourth_launch", vec![granted(&faulty)], &[]);
    succeeds("just_works", vec![granted(&beside)], &[]);
}

#[test]
fn a_stream_that_stands_still_does_not_fill_the_log() {
    for program in ["copies_much_behind_a_host_function", "copies_much_behind_large_copies"] {
        let (_machine, worker) = worker(&[]);
        succeeds(program, vec![granted(&worker)], &[]);
    }
}

#[test]
fn streams_that_stand_still_leave_room_for_other_bulk_copies() {
    let (_machine, worker) = worker(&[]);
    succeeds("copies_beside_streams_that_stand_still", vec![granted(&worker)], &[]);
}

#[test]
fn an_instruction_that_is_not_known_is_named() {
    let (_machine, worker) = worker(&[]);
    succeeds("loads_an_unknown_instruction", vec![granted(&worker)], &[]);
}

#[test]
fn a_server_that_lies_about_a_kernel_reads_nothing_of_the_program() {
    let (_machine, worker) = worker(&[("SIMGPU_PARAM_SIZE", "4096")]);
    let (output, _) =
        gpusession_test_support::cuda::run("launches_for_a_lying_server", vec![granted(&worker)], &[]);
    let said = said(&output);
    assert!(said.contains("kernel increment: server test describes its parameters otherwise"), "{said}");
}

#[test]
fn a_worker_that_is_killed_is_lost_for_good() {
    let (_machine, worker) = worker(&[]);
    let (output, asked) = gpusession_test_support::cuda::run(
        "loses_its_worker",
        vec![granted(&worker)],
        &[("WORKER", worker.pid().to_string())],
    );
    let said = said(&output);
    assert!(said.contains("gpusession: connection to test lost"), "the server is named: {said}");
    assert_eq!(asked, 1, "a program's memory is gone: no other worker takes its place");
}

/// Returns an address of the worker that counts the bytes sent to it.
fn counted(worker: &Worker) -> (Reply, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut endpoint = worker.endpoint(false);
    let target = std::mem::replace(
        &mut endpoint.addresses,
        vec![listener.local_addr().expect("its number").to_string()],
    );
    let count = Arc::new(AtomicU64::new(0));
    let sent = count.clone();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (Ok(client), Ok(server)) = (client, TcpStream::connect(&target[0])) else { continue };
            for (to_server, from, to) in [(true, &client, &server), (false, &server, &client)] {
                let (mut from, mut to) =
                    (from.try_clone().expect("a socket"), to.try_clone().expect("a socket"));
                let sent = sent.clone();
                std::thread::spawn(move || {
                    let mut bytes = vec![0; 1 << 16];
                    while let Ok(n @ 1..) = from.read(&mut bytes) {
                        if to_server {
                            sent.fetch_add(n as u64, Ordering::SeqCst);
                        }
                        if to.write_all(&bytes[..n]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    (Reply::Granted(vec![endpoint]), count)
}

/// Runs a program that loads an image of 3 MiB on a fresh worker; returns the bytes that it sent.
fn sent_with_cache(machine: &Arc<Machine>, cache: &Path) -> u64 {
    let options = Options { images: Some(cache.to_path_buf()), ..Options::default() };
    let mut worker = Worker::start_with(machine, &options);
    let (reply, sent) = counted(&worker);
    succeeds("works_with_a_long_image", vec![reply], &[]);
    // It exits once the server has its images.
    worker.exited();
    sent.load(Ordering::SeqCst)
}

#[test]
fn an_image_that_the_server_has_is_not_sent_again() {
    const IMAGE: u64 = 3 << 20;
    const REST: u64 = 64 << 10;
    let machine = Machine::new();
    let cache = tempfile::tempdir().expect("a folder");
    let first = sent_with_cache(&machine, cache.path());
    assert!((IMAGE..IMAGE + REST).contains(&first), "{first}");
    let second = sent_with_cache(&machine, cache.path());
    assert!(second < REST, "{second}");

    let list = |folder: &Path| -> Vec<_> {
        std::fs::read_dir(folder).expect("a folder").flatten().map(|e| e.path()).collect()
    };
    let files: Vec<_> = list(cache.path()).iter().flat_map(|client| list(client)).collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    let good = std::fs::read(file).expect("an image");
    let mut other = good.clone();
    other[100] ^= 1;
    // Changed, truncated, empty: the program sends the image again, which restores the file.
    for damaged in [&other[..], &good[..1000], &[]] {
        std::fs::write(file, damaged).expect("a file");
        let again = sent_with_cache(&machine, cache.path());
        assert!((IMAGE..IMAGE + REST).contains(&again), "{again}");
        assert!(std::fs::read(file).expect("an image") == good, "replaced");
    }
    assert!(sent_with_cache(&machine, cache.path()) < REST);
}

#[test]
fn threads_that_load_the_same_image_do_not_mix_it_up() {
    let machine = Machine::new();
    let cache = tempfile::tempdir().expect("a folder");
    let options = Options { images: Some(cache.path().to_path_buf()), ..Options::default() };
    let worker = Worker::start_with(&machine, &options);
    succeeds("loads_one_long_image_in_two_threads", vec![granted(&worker)], &[]);
}

#[test]
fn a_stolen_ticket_costs_its_owner_one_attempt() {
    let machine = Machine::new();
    let (mut stolen, spare, beside) =
        (Worker::start(&machine), Worker::start(&machine), Worker::start(&machine));
    let other = beside.client(false);
    other.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
    other.put(WINDOW, b"mine");
    // The thief arrives first.
    let mut thief = stolen.stranger(0);
    thief.greet(&stolen.ticket().seal(&KEY));
    assert_eq!(thief.frame().map(|(header, _)| header.ctx.get()), Some(0), "admitted");
    let (output, asked) =
        gpusession_test_support::cuda::run("just_works", vec![granted(&stolen), granted(&spare)], &[]);
    let said = said(&output);
    assert!(said.contains("already serves a process: ticket used twice"), "{said}");
    assert_eq!(asked, 2, "libcuda asks for another worker");
    stolen.wait_for(
        |m| matches!(m, FromWorker::Refused { reason, .. } if reason.contains("ticket used twice")),
    );
    assert_eq!(other.get(WINDOW, 4), b"mine", "no other program is disturbed");
    assert!(other.heard.0.lock().expect("a list").is_empty());
    // Without another worker the owner receives the reason.
    let refused = gpusession_test_worker::Client::open(&stolen.endpoint(false)).err().expect("a refusal");
    assert!(refused.0.contains("ticket used twice"), "{refused}");
}
