//! Programs with several leases: each lease has a worker, and the program sees all devices.

mod fates;

use std::net::TcpListener;
use std::sync::Arc;

use gpusession_proto::grant::{Endpoint, Reply};
use gpusession_test_support::cuda::{Cuda, KERNEL, at};
use gpusession_test_support::relay::Relay;
use gpusession_test_worker::{MIB, Machine, Options, Worker};

use fates::fate;

const INVALID_VALUE: i32 = 1;
const DEVICE_UNAVAILABLE: i32 = 46;
const NO_DEVICE: i32 = 100;
const INVALID_DEVICE: i32 = 101;
const PEER_ACCESS_UNSUPPORTED: i32 = 217;
const INVALID_HANDLE: i32 = 400;
const NOT_SUPPORTED: i32 = 801;
const SYSTEM_NOT_READY: i32 = 802;

/// Total memory of each device, by which a program distinguishes them.
const MEMORY: [u64; 2] = [192 * MIB, 256 * MIB];

// --- Bodies of the programs, each in a process of its own.

/// Loads the test kernel in the current context and returns its function.
fn increment(cuda: &Cuda) -> u64 {
    cuda.increment(cuda.load(KERNEL))
}

fn total(cuda: &Cuda, device: u64) -> u64 {
    cuda.get("cuDeviceTotalMem_v2", &[device])
}

fn ordinal_of(cuda: &Cuda, address: u64) -> u32 {
    const DEVICE_ORDINAL: u64 = 9;
    cuda.get("cuPointerGetAttribute", &[DEVICE_ORDINAL, address]) as u32
}

/// Returns bytes without repetition.
fn pattern(len: usize) -> Vec<u8> {
    let mut random = gpusession_test_worker::Random::new(7);
    (0..len).map(|_| random.draw() as u8).collect()
}

gpusession_test_support::programs!(
    sees_both,
    works_on_both,
    copies_across,
    waits_across,
    uses_libraries_and_objects_of_both,
    loses_one,
    sees_what_is_visible,
    finds_one_gone
);

fn sees_both() {
    let cuda = Cuda::begin();
    assert_eq!(cuda.get("cuDeviceGetCount", &[]) as u32, 2);
    assert_eq!([total(&cuda, 0), total(&cuda, 1)], MEMORY, "in the leases' order");
    assert_eq!(cuda.call("cuDeviceTotalMem_v2", &[at(&mut 0u64), 2]), INVALID_DEVICE);
    let about = |device: u64| {
        let (mut name, mut pci, mut uuid) = ([0u8; 64], [0u8; 64], [0u8; 16]);
        cuda.ok("cuDeviceGetName", &[at(&mut name), 64, device]);
        cuda.ok("cuDeviceGetPCIBusId", &[at(&mut pci), 64, device]);
        cuda.ok("cuDeviceGetUuid_v2", &[at(&mut uuid), device]);
        assert_eq!(cuda.get("cuDeviceGetByPCIBusId", &[pci.as_ptr() as u64]) as u32, device as u32);
        (name, pci, uuid)
    };
    let (first, second) = (about(0), about(1));
    assert_eq!(first.0, second.0, "both are parts of one simulated card");
    assert_ne!(first.1, second.1, "and have addresses of their own all the same");
    assert_ne!(first.2, second.2);
    let contexts = [cuda.on(0), cuda.on(1)];
    assert_ne!(contexts[0], contexts[1]);
    let ids = contexts.map(|ctx| {
        let mut id = 0u64;
        cuda.ok("cuCtxGetId", &[ctx, at(&mut id)]);
        id
    });
    assert_ne!(ids[0], ids[1]);
    for device in [0, 1] {
        assert_eq!(cuda.on(device), contexts[device as usize]);
        assert_eq!(cuda.get("cuCtxGetDevice", &[]) as u32, device as u32);
        assert_eq!(cuda.memory().1, MEMORY[device as usize]);
        let memory = cuda.allocate(3 * MIB);
        assert_eq!(ordinal_of(&cuda, memory), device as u32);
        const FIRST_ATTRIBUTE: u64 = 1;
        assert_eq!(cuda.get("cuDeviceCanAccessPeer", &[device, 1 - device]), 0);
        assert_eq!(cuda.get("cuDeviceGetP2PAttribute", &[FIRST_ATTRIBUTE, device, 1 - device]), 0);
        let peer = contexts[1 - device as usize];
        assert_eq!(cuda.call("cuCtxEnablePeerAccess", &[peer, 0]), PEER_ACCESS_UNSUPPORTED);
    }
    // A context that the program creates, while the other lease's is current.
    let made = cuda.get("cuCtxCreate_v2", &[0, 0]);
    assert!(!contexts.contains(&made));
    assert_eq!(cuda.get("cuCtxGetDevice", &[]) as u32, 0);
    assert_eq!(ordinal_of(&cuda, cuda.allocate(64)), 0);
    cuda.ok("cuCtxDestroy_v2", &[made]);
    assert_eq!(cuda.get("cuCtxGetCurrent", &[]), contexts[1]);
}

fn works_on_both() {
    let cuda = Cuda::begin();
    let prepared: Vec<_> = [0, 1]
        .map(|device| {
            let ctx = cuda.on(device);
            let memory = cuda.allocate(1024);
            cuda.write(memory, &[0; 4]);
            (ctx, increment(&cuda), memory, cuda.get("cuStreamCreate", &[1]))
        })
        .into();
    // One thread, with each context current in turn, and then by the streams alone.
    for _ in 0..5 {
        for (ctx, function, memory, stream) in &prepared {
            cuda.ok("cuCtxSetCurrent", &[*ctx]);
            assert_eq!(cuda.launch(*function, *memory, 0), 0);
            cuda.ok("cuCtxSynchronize", &[]);
            assert_eq!(cuda.launch(*function, *memory, *stream), 0);
            cuda.ok("cuStreamSynchronize", &[*stream]);
        }
    }
    for (_, function, memory, stream) in &prepared {
        assert_eq!(cuda.launch(*function, *memory, *stream), 0, "whatever context is current");
        cuda.ok("cuStreamSynchronize", &[*stream]);
    }
    let (_, function, memory, _) = prepared[0];
    assert_eq!(cuda.launch(function, memory, prepared[1].3), INVALID_HANDLE, "a function is its context's");
    // One thread for each.
    const LAUNCHES: u32 = 300;
    std::thread::scope(|scope| {
        for (ctx, function, memory, stream) in &prepared {
            scope.spawn(|| {
                cuda.ok("cuCtxSetCurrent", &[*ctx]);
                for _ in 0..LAUNCHES {
                    assert_eq!(cuda.launch(*function, *memory, *stream), 0);
                }
                cuda.ok("cuStreamSynchronize", &[*stream]);
            });
        }
    });
    for (_, _, memory, _) in &prepared {
        assert_eq!(cuda.word(*memory), 11 + LAUNCHES, "read whatever context is current");
    }
    for (_, _, memory, stream) in &prepared {
        cuda.ok("cuStreamDestroy_v2", &[*stream]);
        cuda.ok("cuMemFree_v2", &[*memory]);
        assert_eq!(cuda.call("cuMemFree_v2", &[*memory]), INVALID_VALUE, "freed twice");
    }
}

fn copies_across() {
    // More than travels through the program at once, and no multiple of any block.
    const LEN: usize = (9 << 20) + 4099;
    let cuda = Cuda::begin();
    let (first, second) = (cuda.on(0), cuda.on(1));
    let there = cuda.allocate(LEN as u64);
    let stream_there = cuda.get("cuStreamCreate", &[1]);
    cuda.ok("cuCtxSetCurrent", &[first]);
    let here = cuda.allocate(LEN as u64);
    let function = increment(&cuda);
    let stream = cuda.get("cuStreamCreate", &[1]);
    let bytes = pattern(LEN);
    let len = LEN as u64;
    let clear = |address: u64| cuda.ok("cuMemsetD8_v2", &[address, 0, len]);

    // Host and device, while the other lease's context is current.
    cuda.write(there, &bytes);
    assert!(cuda.read(there, LEN) == bytes);
    clear(there);
    assert!(cuda.read(there, LEN).iter().all(|byte| *byte == 0));
    cuda.ok("cuMemcpyHtoDAsync_v2", &[there, bytes.as_ptr() as u64, len, stream]);
    assert!(cuda.read(there, LEN) == bytes);

    // Device and device, by each call that can copy.
    let copies: [(&str, &[u64]); 5] = [
        ("cuMemcpy", &[here, there, len]),
        ("cuMemcpyDtoD_v2", &[here, there, len]),
        ("cuMemcpyPeer", &[here, first, there, second, len]),
        ("cuMemcpyAsync", &[here, there, len, stream]),
        ("cuMemcpyPeerAsync", &[here, first, there, second, len, stream_there]),
    ];
    for (call, arguments) in copies {
        clear(here);
        cuda.ok(call, arguments);
        assert!(cuda.read(here, LEN) == bytes, "{call}");
    }

    // A kernel, then the copy, in one stream's order; and a kernel on the other side behind them.
    cuda.write(here, &41u32.to_le_bytes());
    // Streams that do not block need not wait for the rest of a copy from pageable memory.
    cuda.ok("cuCtxSynchronize", &[]);
    assert_eq!(cuda.launch(function, here, stream), 0);
    cuda.ok("cuMemcpyDtoDAsync_v2", &[there, here, len, stream]);
    cuda.ok("cuCtxSetCurrent", &[second]);
    assert_eq!(cuda.launch(increment(&cuda), there, stream_there), 0);
    cuda.ok("cuStreamSynchronize", &[stream_there]);
    assert_eq!(cuda.word(there), 43);
    assert!(cuda.read(there, LEN)[4..] == bytes[4..]);

    // A part of a plane: 1000 of 1024 bytes of each row, from row 3 on.
    const ROWS: usize = 5000;
    let side = |address: u64, x: u64, y: u64| [x, y, 2, 0, address, 0, 1024];
    let plane = [&side(here, 8, 3)[..], &side(there, 0, 0), &[1000, ROWS as u64]].concat();
    clear(there);
    cuda.ok("cuMemcpy2D_v2", &[plane.as_ptr() as u64]);
    let source = cuda.read(here, LEN);
    let target = cuda.read(there, LEN);
    for row in 0..ROWS {
        let from = &source[(row + 3) * 1024 + 8..][..1000];
        assert!(target[row * 1024..][..1000] == *from, "row {row}");
        assert!(target[row * 1024 + 1000..][..24].iter().all(|byte| *byte == 0));
    }

    // The other lease's pinned memory is plain host memory.
    cuda.ok("cuCtxSetCurrent", &[first]);
    let pinned = cuda.get("cuMemHostAlloc", &[len, 0]);
    // SAFETY: memory of this program, of at least that length.
    let pinned_bytes = unsafe { std::slice::from_raw_parts_mut(pinned as *mut u8, LEN) };
    pinned_bytes.copy_from_slice(&bytes);
    cuda.ok("cuCtxSetCurrent", &[second]);
    cuda.ok("cuMemcpyHtoDAsync_v2", &[there, pinned, len, stream_there]);
    pinned_bytes.fill(0);
    cuda.ok("cuMemcpyDtoHAsync_v2", &[pinned, there, len, stream_there]);
    assert!(*pinned_bytes == bytes[..], "both are done when the calls return");
    let mut device = 0u64;
    assert_eq!(cuda.call("cuMemHostGetDevicePointer_v2", &[at(&mut device), pinned, 0]), NOT_SUPPORTED);
    assert_eq!(cuda.launch(increment(&cuda), pinned, 0), NOT_SUPPORTED, "kernels cannot have it");
    cuda.ok("cuMemFreeHost", &[pinned]);
    cuda.ok("cuMemFree_v2", &[here]);
    cuda.ok("cuMemFreeAsync", &[there, stream]);
}

fn waits_across() {
    let cuda = Cuda::begin();
    let (first, second) = (cuda.on(0), cuda.on(1));
    let [mut here, mut there] = [first, second].map(|ctx| {
        cuda.ok("cuCtxSetCurrent", &[ctx]);
        let memory = cuda.allocate(64);
        cuda.write(memory, &[0; 4]);
        cuda.ok("cuCtxSynchronize", &[]);
        let stream = cuda.get("cuStreamCreate", &[1]);
        (increment(&cuda), memory, stream, cuda.get("cuEventCreate", &[0]))
    });
    for round in 0..10 {
        for _ in 0..20 {
            assert_eq!(cuda.launch(here.0, here.1, here.2), 0);
        }
        cuda.ok("cuEventRecord", &[here.3, here.2]);
        cuda.ok("cuStreamWaitEvent", &[there.2, here.3, 0]);
        assert_eq!(cuda.call("cuEventQuery", &[here.3]), 0, "the other stream may continue");
        cuda.ok("cuMemcpyAsync", &[there.1, here.1, 4, there.2]);
        assert_eq!(cuda.launch(there.0, there.1, there.2), 0);
        cuda.ok("cuStreamSynchronize", &[there.2]);
        // Each side continues the other side's count.
        assert_eq!(cuda.word(there.1), cuda.word(here.1) + 1, "round {round}");
        std::mem::swap(&mut here, &mut there);
    }
    assert_eq!(cuda.word(here.1), 10 * 21);
    assert_eq!(cuda.call("cuEventRecord", &[here.3, there.2]), INVALID_HANDLE);
    let mut ms = 0f32;
    assert_eq!(cuda.call("cuEventElapsedTime", &[at(&mut ms), here.3, there.3]), INVALID_HANDLE);
    // A capture cannot wait for work of another server.
    cuda.ok("cuStreamBeginCapture_v2", &[there.2, 2]);
    assert_ne!(cuda.call("cuStreamWaitEvent", &[there.2, here.3, 0]), 0);
    assert_ne!(cuda.call("cuStreamEndCapture", &[there.2, at(&mut 0u64)]), 0);
}

extern "C" fn called(count: u64) {
    // SAFETY: the program passes the address of such a counter, which outlives the call.
    unsafe { &*(count as *const std::sync::atomic::AtomicU32) }
        .fetch_add(1, std::sync::atomic::Ordering::SeqCst);
}

fn uses_libraries_and_objects_of_both() {
    let cuda = Cuda::begin();
    let contexts = [cuda.on(0), cuda.on(1)];
    let library = cuda.get("cuLibraryLoadData", &[KERNEL.as_ptr() as u64, 0, 0, 0, 0, 0, 0]);
    let kernel = cuda.get("cuLibraryGetKernel", &[library, c"increment".as_ptr() as u64]);
    let mut variables = Vec::new();
    let count = std::sync::atomic::AtomicU32::new(0);
    for (device, ctx) in contexts.into_iter().enumerate() {
        cuda.ok("cuCtxSetCurrent", &[ctx]);
        let memory = cuda.allocate(64);
        cuda.write(memory, &[0; 4]);
        assert_eq!(cuda.launch(kernel, memory, 0), 0, "a kernel is every context's");
        let function = cuda.get("cuKernelGetFunction", &[kernel]);
        assert_eq!(cuda.launch(function, memory, 0), 0);
        assert_eq!(cuda.word(memory), 2);
        const MAX_THREADS: u64 = 0;
        assert!(cuda.get("cuKernelGetAttribute", &[MAX_THREADS, kernel, device as u64]) > 0);
        let (mut variable, mut size) = (0u64, 0u64);
        let name = c"variable".as_ptr() as u64;
        cuda.ok("cuLibraryGetGlobal", &[at(&mut variable), at(&mut size), library, name]);
        cuda.write(variable, &[device as u8 + 1; 8]);
        variables.push(variable);

        // A graph with kernel nodes, created while the other context is current.
        let graph = cuda.get("cuGraphCreate", &[0]);
        let exec = {
            cuda.ok("cuCtxSetCurrent", &[contexts[1 - device]]);
            let mut address = memory;
            let mut parameters = [at(&mut address)];
            let one = 1u64 | 1 << 32;
            let node = [function, one, one, one, 0, parameters.as_mut_ptr() as u64, 0, 0, 0];
            let first = cuda.get("cuGraphAddKernelNode_v2", &[graph, 0, 0, node.as_ptr() as u64]);
            let after = [first];
            let next = [graph, after.as_ptr() as u64, 1, node.as_ptr() as u64];
            assert_ne!(cuda.get("cuGraphAddKernelNode_v2", &next), first);
            let mut kind = u32::MAX;
            cuda.ok("cuGraphNodeGetType", &[first, at(&mut kind)]);
            assert_eq!(kind, 0);
            let exec = cuda.get("cuGraphInstantiateWithFlags", &[graph, 0]);
            assert_eq!(cuda.call("cuGraphLaunch", &[exec, 0]), NOT_SUPPORTED, "on the other lease's stream");
            exec
        };
        cuda.ok("cuCtxSetCurrent", &[ctx]);
        let stream = cuda.get("cuStreamCreate", &[1]);
        cuda.ok("cuGraphLaunch", &[exec, stream]);
        cuda.ok("cuLaunchHostFunc", &[stream, called as *const () as u64, std::ptr::from_ref(&count) as u64]);
        cuda.ok("cuStreamSynchronize", &[stream]);
        assert_eq!(count.load(std::sync::atomic::Ordering::SeqCst), device as u32 + 1);
        assert_eq!(cuda.word(memory), 4);
    }
    assert_ne!(variables[0], variables[1]);
    assert_eq!(variables.iter().map(|v| cuda.read(*v, 1)[0]).collect::<Vec<_>>(), [1, 2]);

    // Objects that the driver itself names, used while the other lease's context is current.
    for device in [0u64, 1] {
        cuda.on(device);
        let pool = cuda.get("cuDeviceGetDefaultMemPool", &[device]);
        let stream = cuda.get("cuStreamCreate", &[1]);
        cuda.on(1 - device);
        let allocated = cuda.get("cuMemAllocFromPoolAsync", &[4096, pool, stream]);
        assert_eq!(ordinal_of(&cuda, allocated), device as u32);
        cuda.write(allocated, b"pool");
        assert_eq!(cuda.read(allocated, 4), b"pool");
        cuda.ok("cuMemFreeAsync", &[allocated, stream]);

        // Memory of the device at addresses that the program reserved in its context.
        const SIZE: u64 = 2 * MIB;
        cuda.on(device);
        let address = cuda.get("cuMemAddressReserve", &[SIZE, 0, 0, 0]);
        let mut properties = [1u64, 1 | device << 32, 0, 0];
        let mut access = [1u32, device as u32, 3];
        let memory = cuda.get("cuMemCreate", &[SIZE, at(&mut properties), 0]);
        cuda.on(1 - device);
        cuda.ok("cuMemMap", &[address, SIZE, 0, memory, 0]);
        cuda.ok("cuMemSetAccess", &[address, SIZE, at(&mut access), 1]);
        access[1] = 1 - device as u32;
        assert_eq!(cuda.call("cuMemSetAccess", &[address, SIZE, at(&mut access), 1]), NOT_SUPPORTED);
        let mut told = [0u64; 4];
        cuda.ok("cuMemGetAllocationPropertiesFromHandle", &[at(&mut told), memory]);
        assert_eq!(told[1], 1 | device << 32);
        cuda.write(address, b"mapped");
        assert_eq!(cuda.read(address, 6), b"mapped");
        cuda.ok("cuMemUnmap", &[address, SIZE]);
        cuda.ok("cuMemRelease", &[memory]);
        cuda.ok("cuMemAddressFree", &[address, SIZE]);
    }

    // Managed memory belongs to one lease.
    cuda.on(0);
    let managed = cuda.get("cuMemAllocManaged", &[4096, 1]);
    // SAFETY: managed memory of this program.
    let value = unsafe { &mut *(managed as *mut u32) };
    *value = 6;
    assert_eq!(cuda.launch(kernel, managed, 0), 0);
    cuda.ok("cuCtxSynchronize", &[]);
    assert_eq!(*value, 7);
    cuda.on(1);
    assert_eq!(cuda.launch(kernel, managed, 0), NOT_SUPPORTED);
    cuda.ok("cuMemFree_v2", &[managed]);
    cuda.ok("cuLibraryUnload", &[library]);
}

fn loses_one() {
    let cuda = Cuda::begin();
    let (first, second) = (cuda.on(0), cuda.on(1));
    let lost = cuda.allocate(1024);
    cuda.ok("cuCtxSetCurrent", &[first]);
    let (function, memory) = (increment(&cuda), cuda.allocate(1024));
    cuda.write(memory, &41u32.to_le_bytes());
    let worker = std::env::var("WORKER").expect("set by the test").parse().expect("a number");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker), nix::sys::signal::Signal::SIGKILL)
        .expect("a worker");
    cuda.ok("cuCtxSetCurrent", &[second]);
    let mut address = 0u64;
    // A call that waits; a synchronization without work succeeds until the loss is known.
    let mut word = 0u32;
    assert_eq!(cuda.call("cuMemcpyDtoH_v2", &[at(&mut word), lost, 4]), DEVICE_UNAVAILABLE);
    for _ in 0..2 {
        assert_eq!(cuda.call("cuCtxSynchronize", &[]), DEVICE_UNAVAILABLE);
        assert_eq!(cuda.call("cuMemAlloc_v2", &[at(&mut address), 64]), DEVICE_UNAVAILABLE);
        assert_eq!(cuda.call("cuStreamSynchronize", &[0]), DEVICE_UNAVAILABLE);
    }
    cuda.ok("cuCtxSetCurrent", &[first]);
    assert_eq!(cuda.launch(function, memory, 0), 0);
    assert_eq!(cuda.word(memory), 42);
    let library = cuda.get("cuLibraryLoadData", &[KERNEL.as_ptr() as u64, 0, 0, 0, 0, 0, 0]);
    let kernel = cuda.get("cuLibraryGetKernel", &[library, c"increment".as_ptr() as u64]);
    assert_eq!(cuda.launch(kernel, memory, 0), 0);
    cuda.ok("cuCtxSynchronize", &[]);
    assert_eq!(cuda.word(memory), 43);
    assert_eq!(
        cuda.call("cuMemcpyDtoD_v2", &[lost, memory, 4]),
        DEVICE_UNAVAILABLE,
        "to the one that is lost"
    );
    assert_eq!(cuda.word(memory), 43, "this lease continues");
    cuda.ok("cuCtxSetCurrent", &[second]);
    assert_eq!(cuda.launch(kernel, lost, 0), DEVICE_UNAVAILABLE);
}

fn sees_what_is_visible() {
    let wanted = std::env::var("SEEN").expect("set by the test");
    let wanted: Vec<usize> = wanted.split(',').filter_map(|n| n.parse().ok()).collect();
    if wanted.is_empty() {
        let library = gpusession_test_support::cuda::library();
        assert_eq!(gpusession_test_support::cuda::call(&library, "cuInit", &[0]), NO_DEVICE);
        return;
    }
    let cuda = Cuda::begin();
    assert_eq!(cuda.get("cuDeviceGetCount", &[]) as usize, wanted.len());
    for (device, which) in (0u64..).zip(wanted) {
        assert_eq!(total(&cuda, device), MEMORY[which]);
        cuda.on(device);
        assert_eq!(cuda.get("cuCtxGetDevice", &[]) as u32, device as u32);
        let memory = cuda.allocate(64);
        assert_eq!(u64::from(ordinal_of(&cuda, memory)), device);
        cuda.write(memory, &[0; 4]);
        assert_eq!(cuda.launch(increment(&cuda), memory, 0), 0);
        assert_eq!(cuda.word(memory), 1);
    }
}

fn finds_one_gone() {
    let library = gpusession_test_support::cuda::library();
    assert_eq!(gpusession_test_support::cuda::call(&library, "cuInit", &[0]), SYSTEM_NOT_READY);
}

// --- The tests.

/// Two workers, each for a share of one simulated card, on machines of their own.
struct Site {
    workers: [Worker; 2],
    _machines: [Arc<Machine>; 2],
}

impl Site {
    fn new() -> Self {
        Self::with_grace(0)
    }

    fn with_grace(resume_grace_s: u32) -> Self {
        let machines = [Machine::new(), Machine::new()];
        let worker = |which: usize, driver| {
            let options =
                Options { memory_bytes: MEMORY[which], driver, resume_grace_s, ..Options::default() };
            Worker::start_with(&machines[which], &options)
        };
        // Addresses that the second driver chooses lie elsewhere.
        let elsewhere =
            vec![("SIMGPU_POOL_BASE", "0x540000000".into()), ("SIMGPU_DEVICE_BASE", "0x640000000".into())];
        Self { workers: [worker(0, Vec::new()), worker(1, elsewhere)], _machines: machines }
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        let named =
            |(server, worker): (&str, &Worker)| Endpoint { server: server.into(), ..worker.endpoint(false) };
        ["gpu-a", "gpu-b"].into_iter().zip(&self.workers).map(named).collect()
    }

    /// Runs one of the programs above, which must succeed; returns the library's output.
    fn succeeds(&self, name: &str, variables: &[(&str, String)]) -> String {
        succeeds(name, self.endpoints(), variables)
    }
}

fn succeeds(name: &str, endpoints: Vec<Endpoint>, variables: &[(&str, String)]) -> String {
    let (output, _) = gpusession_test_support::cuda::run(name, vec![Reply::Granted(endpoints)], variables);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{said}");
    said
}

#[test]
fn the_devices_of_all_leases_are_the_programs() {
    let said = Site::new().succeeds("sees_both", &[]);
    for server in ["gpu-a", "gpu-b"] {
        assert!(said.contains(&format!(" frames to {server}, ")), "{said}");
    }
}

#[test]
fn kernels_run_on_each_lease() {
    Site::new().succeeds("works_on_both", &[]);
}

#[test]
fn copies_between_leases_go_through_the_program() {
    Site::new().succeeds("copies_across", &[]);
}

#[test]
fn streams_wait_for_events_of_another_lease() {
    Site::new().succeeds("waits_across", &[]);
}

#[test]
fn libraries_are_on_each_lease_and_objects_know_theirs() {
    let said = Site::new().succeeds("uses_libraries_and_objects_of_both", &[]);
    assert!(said.contains("managed memory: belongs to another lease than the call"), "{said}");
}

#[test]
fn a_lease_that_is_lost_leaves_the_others() {
    let site = Site::new();
    let said = site.succeeds("loses_one", &[("WORKER", site.workers[1].pid().to_string())]);
    assert!(said.contains("connection to gpu-b lost") && !said.contains("connection to gpu-a"), "{said}");
}

#[test]
fn programs_on_several_leases_outlive_their_connections() {
    const SEEDS: u64 = 4;
    let mut cuts = 0;
    for seed in 0..SEEDS {
        for name in ["works_on_both", "copies_across", "waits_across", "uses_libraries_and_objects_of_both"] {
            // The seed of a failure is the last one that this prints.
            println!("{name}, seed {seed}");
            let site = Site::with_grace(60);
            let mut endpoints = site.endpoints();
            let mut relays = Vec::new();
            for (n, (endpoint, worker)) in endpoints.iter_mut().zip(&site.workers).enumerate() {
                let seed = 2 * seed + n as u64;
                let relay = Relay::start(worker.address, move |connection| fate(seed, connection));
                endpoint.addresses = vec![relay.address.to_string()];
                relays.push(relay);
            }
            succeeds(name, endpoints, &[]);
            cuts += relays.iter().flat_map(Relay::cuts).sum::<usize>();
        }
    }
    println!("{cuts} cuts");
    assert!(cuts > 20 * SEEDS as usize, "{cuts} cuts");
}

#[test]
fn visible_devices_are_chosen_among_all() {
    for (list, seen) in [("1", "1"), ("1,0", "1,0"), ("0,7,1", "0"), ("", "")] {
        let variables = [("CUDA_VISIBLE_DEVICES", list.into()), ("SEEN", seen.into())];
        Site::new().succeeds("sees_what_is_visible", &variables);
    }
}

#[test]
fn without_one_of_the_workers_there_is_none() {
    let site = Site::new();
    let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its number").port();
    let mut endpoints = site.endpoints();
    endpoints[1].addresses = vec![format!("127.0.0.1:{port}")];
    let said = succeeds("finds_one_gone", endpoints, &[]);
    assert!(said.contains(&format!("server gpu-b at 127.0.0.1:{port}")), "{said}");
}
