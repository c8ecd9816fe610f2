//! Programs of one lease that share memory, under the server's own supervisor.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};

use gpuserver::supervise::Event;
use gpusession_proto::grant::Reply;
use gpusession_test_support::cuda::{Cuda, KERNEL, at};
use gpusession_test_worker::supervised::{Site, eventually};
use gpusession_test_worker::{LEASE, MIB};
use nix::fcntl::{FcntlArg, FdFlag, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

mod shares {
    pub mod pools;
}

use shares::pools::{exports_a_pool_and_dies, exports_pools, imports_pools, outlives_a_pool};

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const UNKNOWN: i32 = 999;
const INVALID_CONTEXT: i32 = 201;
const NOT_SUPPORTED: i32 = 801;
const OTHER: &str = "another-lease";
const OF_ANOTHER_USER: &str = "lease-of-bob";
const SIZE: u64 = 2 * MIB;
const POSIX_FD: u64 = 1;
/// `CUmemAllocationProp` of device 0: pinned memory that may be shared.
const PROPERTIES: [u32; 8] = [1, POSIX_FD as u32, 1, 0, 0, 0, 0, 0];
/// Rounds between two processes, each with copies that a program with no other would not wait for.
const ROUNDS: u32 = 300;

// --- Parts of the programs.

/// The other process of a pair.
struct Other(UnixStream);

impl Other {
    /// The one that started this process.
    fn parent() -> Self {
        // SAFETY: the parent left this descriptor to this process, which takes it once.
        Self(unsafe { UnixStream::from_raw_fd(std::env::var("PEER").unwrap().parse().unwrap()) })
    }

    /// Starts another program, by fork and exec.
    fn start(name: &str) -> (Self, Child) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        let mut command = gpusession_test_support::program(name);
        let child = command.env("PEER", theirs.as_raw_fd().to_string()).stdin(Stdio::null()).spawn().unwrap();
        (Self(ours), child)
    }

    fn tell(&mut self, byte: u8) {
        self.0.write_all(&[byte]).unwrap();
    }

    fn hear(&mut self) -> u8 {
        let mut byte = [0];
        self.0.read_exact(&mut byte).unwrap();
        byte[0]
    }

    fn send(&self, descriptor: RawFd) {
        let fds = [descriptor];
        let rights = [ControlMessage::ScmRights(&fds)];
        sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(b"d")], &rights, MsgFlags::empty(), None).unwrap();
    }

    fn receive(&self) -> OwnedFd {
        let (mut byte, mut space) = ([0], nix::cmsg_space!(RawFd));
        let mut parts = [IoSliceMut::new(&mut byte)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let got = recvmsg::<()>(self.0.as_raw_fd(), &mut parts, Some(&mut space), flags).unwrap();
        let Some(ControlMessageOwned::ScmRights(fds)) = got.cmsgs().unwrap().next() else { panic!() };
        // SAFETY: the kernel has just created the descriptor for this process.
        unsafe { OwnedFd::from_raw_fd(fds[0]) }
    }
}

fn create(cuda: &Cuda) -> u64 {
    cuda.get("cuMemCreate", &[SIZE, PROPERTIES.as_ptr() as u64, 0])
}

fn export(cuda: &Cuda, memory: u64) -> Result<OwnedFd, i32> {
    let mut descriptor = -1i32;
    match cuda.call("cuMemExportToShareableHandle", &[at(&mut descriptor), memory, POSIX_FD, 0]) {
        // SAFETY: the call has just created the descriptor for this program.
        0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        status => Err(status),
    }
}

fn import(cuda: &Cuda, descriptor: &impl AsRawFd) -> Result<u64, i32> {
    cuda.try_get("cuMemImportFromShareableHandle", &[descriptor.as_raw_fd() as u64, POSIX_FD])
}

fn map(cuda: &Cuda, memory: u64) -> u64 {
    let address = cuda.get("cuMemAddressReserve", &[SIZE, 0, 0, 0]);
    cuda.ok("cuMemMap", &[address, SIZE, 0, memory, 0]);
    let mut access = [1u32, 0, 3];
    cuda.ok("cuMemSetAccess", &[address, SIZE, at(&mut access), 1]);
    address
}

fn begin() -> Cuda {
    let cuda = Cuda::begin();
    cuda.on(0);
    cuda
}

// --- Bodies of the programs, each in a process of its own.

gpusession_test_support::programs!(
    exports,
    imports,
    exports_and_lets_go,
    imports_what_was_let_go,
    exports_and_dies,
    imports_in_another_lease,
    imports_without_room,
    gets_handles,
    opens_handles,
    records_events,
    opens_events,
    records_and_dies,
    outlives_records,
    exports_pools,
    imports_pools,
    exports_a_pool_and_dies,
    outlives_a_pool
);

// --- Events.

/// `CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS`
const SHARED_EVENT: u64 = 2 | 4;
const NOT_READY: i32 = 600;
const MAP_FAILED: i32 = 205;
const INVALID_HANDLE: i32 = 400;

fn event_handle(cuda: &Cuda, event: u64) -> Result<[u64; 8], i32> {
    let mut handle = [0; 8];
    match cuda.call("cuIpcGetEventHandle", &[at(&mut handle), event]) {
        0 => Ok(handle),
        status => Err(status),
    }
}

fn open_event(cuda: &Cuda, handle: &[u64; 8]) -> Result<u64, i32> {
    // The C ABI passes the first argument in a register, and the structure on the stack.
    let (h, mut event) = (handle, 0u64);
    let arguments = [at(&mut event), 0, 0, 0, 0, 0, h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]];
    match cuda.call("cuIpcOpenEventHandle", &arguments) {
        0 => Ok(event),
        status => Err(status),
    }
}

/// A stream that stands still until it is let go.
struct Stopped {
    stream: u64,
    word: u64,
}

impl Stopped {
    fn new(cuda: &Cuda) -> Self {
        let (stream, word) = (cuda.get("cuStreamCreate", &[1]), cuda.allocate(4));
        cuda.write(word, &0u32.to_le_bytes());
        cuda.ok("cuStreamWaitValue32_v2", &[stream, word, 1, 0]);
        Self { stream, word }
    }

    fn let_go(&self, cuda: &Cuda) {
        let other = cuda.get("cuStreamCreate", &[1]);
        cuda.ok("cuStreamWriteValue32_v2", &[other, self.word, 1, 0]);
    }
}

fn give(other: &mut Other, handle: &[u64; 8]) {
    other.0.write_all(&handle.map(u64::to_le_bytes).concat()).unwrap();
}

fn take(other: &mut Other) -> [u64; 8] {
    [(); 8].map(|()| {
        let mut bytes = [0; 8];
        other.0.read_exact(&mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    })
}

/// Two processes whose streams wait for each other, and whose programs do not.
fn records_events() {
    let cuda = begin();
    let timed = cuda.get("cuEventCreate", &[0]);
    assert_eq!(cuda.try_get("cuEventCreate", &[4]), Err(INVALID_VALUE), "it must not take times");
    assert_eq!(event_handle(&cuda, timed), Err(INVALID_HANDLE));
    let event = cuda.get("cuEventCreate", &[SHARED_EVENT]);
    let (word, stopped) = (cuda.allocate(4), Stopped::new(&cuda));
    cuda.write(word, &7u32.to_le_bytes());
    let increment = cuda.increment(cuda.load(KERNEL));
    // A record before the export counts, as PyTorch makes it.
    assert_eq!(cuda.launch(increment, word, stopped.stream), 0);
    cuda.ok("cuEventRecord", &[event, stopped.stream]);
    let handle = event_handle(&cuda, event).unwrap();
    assert_eq!(event_handle(&cuda, event), Ok(handle), "always the same");
    assert_eq!(open_event(&cuda, &handle), Err(INVALID_CONTEXT), "a process does not open its own");
    let (mut other, mut child) = Other::start("opens_events");
    give(&mut other, &handle);
    give(&mut other, &get(&cuda, word).unwrap());
    assert_eq!(other.hear(), b'w');
    assert_eq!(cuda.call("cuEventQuery", &[event]), NOT_READY);
    stopped.let_go(&cuda);
    assert_eq!(other.hear(), b'r');
    // The other one has recorded, and stands still.
    let stream = cuda.get("cuStreamCreate", &[1]);
    assert_eq!(cuda.call("cuEventQuery", &[event]), NOT_READY, "the last record is another process's");
    cuda.ok("cuStreamWaitEvent", &[stream, event, 0]);
    assert_eq!(cuda.launch(increment, word, stream), 0);
    assert_eq!(cuda.call("cuStreamQuery", &[stream]), NOT_READY);
    other.tell(b'g');
    cuda.ok("cuEventSynchronize", &[event]);
    cuda.ok("cuStreamSynchronize", &[stream]);
    assert_eq!(cuda.word(word), 10);
    other.tell(b'g');
    // Turns: each one's kernel waits for the other's on the device alone.
    for round in 0..ROUNDS {
        cuda.ok("cuStreamWaitEvent", &[stream, event, 0]);
        assert_eq!(cuda.launch(increment, word, stream), 0);
        cuda.ok("cuEventRecord", &[event, stream]);
        other.tell(b't');
        assert_eq!(other.hear(), b't', "round {round}");
    }
    cuda.ok("cuEventSynchronize", &[event]);
    assert_eq!(cuda.word(word), 10 + 2 * ROUNDS);
    cuda.ok("cuEventDestroy_v2", &[event]);
    // The call above does not wait for the worker.
    cuda.ok("cuCtxSynchronize", &[]);
    other.tell(b'd');
    assert!(child.wait().unwrap().success());
}

fn opens_events() {
    const IPC_EVENT_SUPPORTED: u64 = 125;
    let cuda = begin();
    let mut other = Other::parent();
    assert_eq!(cuda.get("cuDeviceGetAttribute", &[IPC_EVENT_SUPPORTED, 0]), 1);
    let (handle, memory) = (take(&mut other), take(&mut other));
    for at in 0..8 {
        let mut forged = handle;
        forged[at] ^= 1 << 40;
        let refused = match at {
            1 | 2 => NOT_SUPPORTED,
            // A place behind the page.
            6 => INVALID_VALUE,
            _ => MAP_FAILED,
        };
        // The size of an event says nothing.
        assert_eq!(open_event(&cuda, &forged).err(), (at != 7).then_some(refused), "word {at}");
    }
    assert_eq!(open_event(&cuda, &memory), Err(MAP_FAILED), "memory is no event");
    assert_eq!(open(&cuda, &handle, 1), Err(INVALID_VALUE), "an event is no memory");
    let event = open_event(&cuda, &handle).unwrap();
    let twice = open_event(&cuda, &handle).unwrap();
    // PyTorch opens an event for each tensor, and destroys none; only objects of memory are few.
    (0..8200).for_each(|_| assert!(open_event(&cuda, &handle).is_ok()));
    assert_eq!(event_handle(&cuda, event), Err(INVALID_HANDLE), "an event of another process");
    let word = open(&cuda, &memory, 1).unwrap();
    let increment = cuda.increment(cuda.load(KERNEL));
    let stream = cuda.get("cuStreamCreate", &[1]);
    assert_eq!(cuda.call("cuEventQuery", &[event]), NOT_READY);
    for of in [event, twice] {
        cuda.ok("cuStreamWaitEvent", &[stream, of, 0]);
    }
    cuda.ok("cuEventDestroy_v2", &[twice]);
    assert_eq!(cuda.launch(increment, word, stream), 0);
    assert_eq!(cuda.call("cuStreamQuery", &[stream]), NOT_READY);
    other.tell(b'w');
    cuda.ok("cuEventSynchronize", &[event]);
    cuda.ok("cuStreamSynchronize", &[stream]);
    assert_eq!((cuda.call("cuEventQuery", &[event]), cuda.word(word)), (0, 9));
    let stopped = Stopped::new(&cuda);
    cuda.ok("cuEventRecord", &[event, stopped.stream]);
    other.tell(b'r');
    assert_eq!(other.hear(), b'g');
    stopped.let_go(&cuda);
    assert_eq!(other.hear(), b'g');
    while other.hear() == b't' {
        cuda.ok("cuStreamWaitEvent", &[stream, event, 0]);
        assert_eq!(cuda.launch(increment, word, stream), 0);
        cuda.ok("cuEventRecord", &[event, stream]);
        other.tell(b't');
    }
    // Its process has destroyed it: here it stays, and no process opens it again.
    assert_eq!((cuda.call("cuEventQuery", &[event]), open_event(&cuda, &handle)), (0, Err(MAP_FAILED)));
    cuda.ok("cuEventRecord", &[event, stream]);
    cuda.ok("cuEventSynchronize", &[event]);
    cuda.ok("cuEventDestroy_v2", &[event]);
}

/// Records an event behind a stream that never continues, and ends.
fn records_and_dies() {
    let cuda = begin();
    let mut other = Other::parent();
    let own = cuda.get("cuEventCreate", &[SHARED_EVENT]);
    give(&mut other, &event_handle(&cuda, own).unwrap());
    let theirs = open_event(&cuda, &take(&mut other)).unwrap();
    let stopped = Stopped::new(&cuda);
    for event in [own, theirs] {
        cuda.ok("cuEventRecord", &[event, stopped.stream]);
    }
    cuda.ok("cuEventDestroy_v2", &[theirs]);
    other.tell(b'r');
    other.hear();
    // SAFETY: ends this process.
    unsafe { nix::libc::_exit(0) };
}

/// Waits for records of a process that dies, on a stream and in a call.
fn outlives_records() {
    let cuda = begin();
    let (mut other, mut child) = Other::start("records_and_dies");
    let theirs = open_event(&cuda, &take(&mut other)).unwrap();
    let own = cuda.get("cuEventCreate", &[SHARED_EVENT]);
    give(&mut other, &event_handle(&cuda, own).unwrap());
    assert_eq!(other.hear(), b'r');
    let streams = [own, theirs].map(|event| {
        let stream = cuda.get("cuStreamCreate", &[1]);
        cuda.ok("cuStreamWaitEvent", &[stream, event, 0]);
        assert_eq!(cuda.call("cuEventQuery", &[event]), NOT_READY);
        assert_eq!(cuda.call("cuStreamQuery", &[stream]), NOT_READY);
        stream
    });
    other.tell(b'd');
    cuda.ok("cuEventSynchronize", &[theirs]);
    for stream in streams {
        cuda.ok("cuStreamSynchronize", &[stream]);
    }
    cuda.ok("cuEventSynchronize", &[own]);
    assert!(child.wait().unwrap().success());
}

/// A legacy handle as calls take it: 64 bytes by value, which lie on the stack behind registers.
fn open(cuda: &Cuda, handle: &[u64; 8], flags: u64) -> Result<u64, i32> {
    // The C ABI passes the other two arguments in registers.
    let h = handle;
    let mut address = 0u64;
    let arguments = [at(&mut address), flags, 0, 0, 0, 0, h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]];
    match cuda.call("cuIpcOpenMemHandle_v2", &arguments) {
        0 => Ok(address),
        status => Err(status),
    }
}

fn get(cuda: &Cuda, address: u64) -> Result<[u64; 8], i32> {
    let mut handle = [0; 8];
    match cuda.call("cuIpcGetMemHandle", &[at(&mut handle), address]) {
        0 => Ok(handle),
        status => Err(status),
    }
}

/// Shares memory of `cuMemAlloc`: small parts of one granule, and a large one.
fn gets_handles() {
    const LEGACY_IPC: u64 = 10;
    let cuda = begin();
    let (first, second, large) = (cuda.allocate(1000), cuda.allocate(1000), cuda.allocate(3 * MIB));
    let handles = [first, second, large].map(|address| get(&cuda, address).unwrap());
    assert_eq!(get(&cuda, second + 10), Ok(handles[1]), "the same for any address inside, and always");
    assert_ne!(handles[0], handles[1]);
    assert_eq!(cuda.get("cuPointerGetAttribute", &[LEGACY_IPC, first]) as u32, 1);
    assert_eq!(open(&cuda, &handles[0], 1), Err(INVALID_CONTEXT), "a process does not open its own");
    let pinned = cuda.get("cuMemHostAlloc", &[4096, 0]);
    assert_eq!((get(&cuda, 0), get(&cuda, pinned)), (Err(INVALID_VALUE), Err(INVALID_VALUE)));
    let (mut other, mut child) = Other::start("opens_handles");
    for handle in handles {
        other.0.write_all(&handle.map(u64::to_le_bytes).concat()).unwrap();
    }
    let stream = cuda.get("cuStreamCreate", &[1]);
    for round in 0..ROUNDS {
        // A synchronization that a program with no other process need not wait for.
        // SAFETY: pinned memory of this program.
        unsafe { (pinned as *mut u32).write(round * 10) };
        cuda.ok("cuMemcpyHtoDAsync_v2", &[second, pinned, 4, stream]);
        cuda.ok("cuStreamSynchronize", &[stream]);
        other.tell(b'w');
        assert_eq!(other.hear(), b'r');
        assert_eq!(cuda.word(second), round * 10 + 1, "round {round}");
    }
    cuda.write(large + 3 * MIB - 4, &9u32.to_le_bytes());
    cuda.ok("cuMemFree_v2", &[large]);
    other.tell(b'e');
    assert!(child.wait().unwrap().success());
    cuda.ok("cuMemFree_v2", &[first]);
    assert_eq!(cuda.word(second), (ROUNDS - 1) * 10 + 1, "a part of the granule is still in use");
}

fn opens_handles() {
    const LEGACY_IPC: u64 = 10;
    let cuda = begin();
    let mut other = Other::parent();
    let mut handles = [[0u64; 8]; 3];
    for word in handles.iter_mut().flatten() {
        let mut bytes = [0; 8];
        other.0.read_exact(&mut bytes).unwrap();
        *word = u64::from_le_bytes(bytes);
    }
    assert_eq!((open(&cuda, &handles[0], 0), open(&cuda, &[0; 8], 1)), (Err(1), Err(1)));
    let mut forged = handles[0];
    forged[4] ^= 1;
    assert_eq!(open(&cuda, &forged, 1), Err(INVALID_VALUE));
    let before = cuda.memory().0;
    let [first, second, large] = handles.map(|handle| open(&cuda, &handle, 1).unwrap());
    assert_eq!(second - first, 1024, "parts of one granule");
    assert_eq!(open(&cuda, &handles[1], 1), Ok(second), "the same address again");
    assert_eq!(cuda.memory().0, before, "its own process counts it");
    let (mut base, mut size) = (0u64, 0u64);
    cuda.ok("cuMemGetAddressRange_v2", &[at(&mut base), at(&mut size), second + 10]);
    assert_eq!((base, size), (second, 1000));
    assert_eq!(cuda.get("cuPointerGetAttribute", &[LEGACY_IPC, second]) as u32, 0);
    assert_eq!(get(&cuda, second), Err(INVALID_VALUE), "memory of another process");
    assert_eq!(cuda.call("cuMemFree_v2", &[second]), INVALID_VALUE);
    let increment = cuda.increment(cuda.load(KERNEL));
    while other.hear() == b'w' {
        assert_eq!(cuda.launch(increment, second, 0), 0);
        cuda.ok("cuCtxSynchronize", &[]);
        other.tell(b'r');
    }
    assert_eq!(cuda.word(large + 3 * MIB - 4), 9, "freed by its process, and still here");
    let close = |address: u64| cuda.call("cuIpcCloseMemHandle", &[address]);
    assert_eq!((close(second + 8), close(second), close(first)), (INVALID_VALUE, 0, 0));
    assert!(cuda.word(second) > 0, "opened twice, closed once");
    assert_eq!((close(second), close(second), close(large)), (0, INVALID_VALUE, 0));
    let mut byte = 0u8;
    assert_ne!(cuda.call("cuMemcpyDtoH_v2", &[at(&mut byte), second, 1]), 0, "it is unmapped");
}

fn exports() {
    let cuda = begin();
    let memory = create(&cuda);
    let address = map(&cuda, memory);
    let shared = export(&cuda, memory).unwrap();
    assert!(fcntl(&shared, FcntlArg::F_GETFD).unwrap() & FdFlag::FD_CLOEXEC.bits() != 0);
    let again = export(&cuda, memory).unwrap();
    let token = |of: OwnedFd| {
        let mut token = [0; 64];
        File::from(of).read_exact_at(&mut token, 0).unwrap();
        token
    };
    assert_eq!(token(again), token(shared.try_clone().unwrap()), "one name for the life of the memory");
    let (mut other, mut child) = Other::start("imports");
    other.send(shared.as_raw_fd());
    drop(shared);
    assert_eq!(other.hear(), b'r');
    let module = cuda.load(KERNEL);
    let (increment, stream) = (cuda.increment(module), cuda.get("cuStreamCreate", &[1]));
    let mut pinned = cuda.get("cuMemHostAlloc", &[4, 0]);
    for round in 0..ROUNDS {
        // Each kind of write, then a byte through the socket: the other one's kernel sees it.
        let value = round * 10;
        match round % 3 {
            0 => cuda.write(address, &value.to_le_bytes()),
            1 => {
                // SAFETY: pinned memory of this program.
                unsafe { (pinned as *mut u32).write(value) };
                cuda.ok("cuMemcpyHtoDAsync_v2", &[address, pinned, 4, stream]);
                cuda.ok("cuStreamSynchronize", &[stream]);
            }
            _ => {
                cuda.write(address, &(value - 1).to_le_bytes());
                assert_eq!(cuda.launch(increment, address, stream), 0);
                cuda.ok("cuStreamSynchronize", &[stream]);
            }
        }
        other.tell(b'w');
        assert_eq!(other.hear(), b'r');
        assert_eq!(cuda.word(address), value + 1, "round {round}");
    }
    cuda.ok("cuMemFreeHost", &[std::mem::take(&mut pinned)]);
    // The other one keeps the memory, also when this one has let go of it.
    cuda.write(address, &7u32.to_le_bytes());
    cuda.ok("cuMemUnmap", &[address, SIZE]);
    cuda.ok("cuMemRelease", &[memory]);
    other.tell(b'e');
    assert!(child.wait().unwrap().success());
}

fn imports() {
    let cuda = begin();
    let mut other = Other::parent();
    let shared = other.receive();
    let before = cuda.memory().0;
    let memory = import(&cuda, &shared).unwrap();
    let twice = import(&cuda, &shared).unwrap();
    cuda.ok("cuMemRelease", &[twice]);
    drop(shared);
    let address = map(&cuda, memory);
    assert_eq!(cuda.memory().0, before, "its exporter counts it");
    cuda.ok("cuMemRelease", &[memory]);
    let module = cuda.load(KERNEL);
    let increment = cuda.increment(module);
    other.tell(b'r');
    while other.hear() == b'w' {
        assert_eq!(cuda.launch(increment, address, 0), 0);
        cuda.ok("cuCtxSynchronize", &[]);
        other.tell(b'r');
    }
    assert_eq!(cuda.word(address), 7);
    cuda.ok("cuMemUnmap", &[address, SIZE]);
}

/// Tokens that end, and files that are none.
fn exports_and_lets_go() {
    let cuda = begin();
    let plain = cuda.get("cuMemCreate", &[SIZE, [1u32, 0, 1, 0, 0, 0, 0, 0].as_ptr() as u64, 0]);
    assert_eq!(export(&cuda, plain).err(), Some(INVALID_VALUE), "not created for that");
    let (mut other, mut child) = Other::start("imports_what_was_let_go");
    // Mapped memory whose handle is released can be imported all the same.
    let memory = create(&cuda);
    let address = map(&cuda, memory);
    let shared = export(&cuda, memory).unwrap();
    cuda.ok("cuMemRelease", &[memory]);
    other.send(shared.as_raw_fd());
    assert_eq!(other.hear(), b'i');
    // Then nothing of this process holds it any more.
    cuda.ok("cuMemUnmap", &[address, SIZE]);
    other.send(shared.as_raw_fd());
    assert_eq!(other.hear(), b'n');
    assert_eq!(import(&cuda, &shared).err(), Some(UNKNOWN), "gone for its own process, too");
    // The same process may import what it exports.
    let memory = create(&cuda);
    let shared = export(&cuda, memory).unwrap();
    let own = import(&cuda, &shared).unwrap();
    let (one, two) = (map(&cuda, memory), map(&cuda, own));
    cuda.write(one, &5u32.to_le_bytes());
    assert_eq!(cuda.word(two), 5);
    // Forged tokens: each bit matters, and other files are none.
    let mut token = [0; 64];
    File::from(shared).read_exact_at(&mut token, 0).unwrap();
    let all =
        SealFlag::F_SEAL_SEAL | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE;
    let file = |token: &[u8], seals: SealFlag| {
        let file = File::from(memfd_create(c"forged", MFdFlags::MFD_ALLOW_SEALING).unwrap());
        file.write_all_at(token, 0).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        import(&cuda, &file).err()
    };
    for (at, status) in [(24, UNKNOWN), (32, UNKNOWN), (47, UNKNOWN), (8, NOT_SUPPORTED)] {
        let mut forged = token;
        forged[at] ^= 1;
        assert_eq!(file(&forged, all), Some(status), "byte {at}");
    }
    assert_eq!(file(&token, all), None, "a copy of the token is as good");
    assert_eq!(file(&token, SealFlag::F_SEAL_WRITE), Some(UNKNOWN));
    assert_eq!(file(b"another file", all), Some(UNKNOWN));
    other.send(File::open("/dev/null").unwrap().as_raw_fd());
    assert_eq!(other.hear(), b'n');
    other.tell(b'e');
    assert!(child.wait().unwrap().success());
}

fn imports_what_was_let_go() {
    let cuda = begin();
    let mut other = Other::parent();
    let memory = import(&cuda, &other.receive()).unwrap();
    other.tell(b'i');
    for _ in 0..2 {
        assert_eq!(import(&cuda, &other.receive()).err(), Some(UNKNOWN));
        other.tell(b'n');
    }
    assert_eq!(other.hear(), b'e');
    cuda.ok("cuMemRelease", &[memory]);
}

/// Ends without any notice, while another program has its memory.
fn exports_and_dies() {
    let cuda = begin();
    let memory = create(&cuda);
    let address = map(&cuda, memory);
    cuda.write(address, &9u32.to_le_bytes());
    let mut other = Other::parent();
    other.send(export(&cuda, memory).unwrap().as_raw_fd());
    other.hear();
    // SAFETY: ends this process.
    unsafe { nix::libc::_exit(0) };
}

/// Imports memory of a program of its own lease or of another one, which then dies.
fn imports_in_another_lease() {
    let cuda = begin();
    let alone = cuda.memory().0;
    let (mut other, mut child) = Other::start("exports_and_dies");
    let shared = other.receive();
    let expected: i32 = std::env::var("EXPECTED").unwrap().parse().unwrap();
    let imported = import(&cuda, &shared);
    assert_eq!(imported.err().unwrap_or(0), expected);
    let mapped = imported.map(|memory| (memory, map(&cuda, memory)));
    if std::env::var_os("COUNTED").is_some() {
        assert_eq!(cuda.memory().0, alone - SIZE, "both leases count it");
    }
    other.tell(b'd');
    assert!(child.wait().unwrap().success());
    if let Ok((memory, address)) = mapped {
        assert_eq!(cuda.word(address), 9, "memory lives until its last user is gone");
        let mut outcome = None;
        // The server learns of the end of the other process a moment later.
        while outcome.is_none() {
            let imported = import(&cuda, &shared);
            outcome = imported.inspect(|again| cuda.ok("cuMemRelease", &[*again])).err();
        }
        assert_eq!(outcome, Some(NOT_SUPPORTED), "its token ends with its process");
        cuda.write(address, &10u32.to_le_bytes());
        assert_eq!(cuda.word(address), 10);
        eventually("this process counts the memory", || cuda.memory().0 == alone - SIZE);
        cuda.ok("cuMemUnmap", &[address, SIZE]);
        cuda.ok("cuMemRelease", &[memory]);
        assert_eq!(cuda.memory().0, alone, "it is gone with its last user");
    }
}

/// Imports memory of another lease while its own has no room for it, and then has.
fn imports_without_room() {
    let cuda = begin();
    let (mut other, mut child) = Other::start("exports_and_dies");
    let shared = other.receive();
    let mut all = Vec::new();
    while let Ok(memory) = cuda.try_get("cuMemAlloc_v2", &[SIZE]) {
        all.push(memory);
    }
    let full = cuda.memory().0;
    for _ in 0..3 {
        assert_eq!(import(&cuda, &shared), Err(OUT_OF_MEMORY));
        assert_eq!(cuda.memory().0, full);
    }
    cuda.ok("cuMemFree_v2", &[all.pop().unwrap()]);
    let (memory, again) = (import(&cuda, &shared).unwrap(), import(&cuda, &shared).unwrap());
    assert_eq!(cuda.memory().0, full, "counted once");
    cuda.ok("cuMemRelease", &[again]);
    assert_eq!(cuda.memory().0, full);
    cuda.ok("cuMemRelease", &[memory]);
    assert_eq!(cuda.memory().0, full + SIZE);
    other.tell(b'd');
    assert!(child.wait().unwrap().success());
}

// --- The test.

/// Runs programs with these leases, of which the first one must succeed.
fn succeeds(site: &Site, name: &str, leases: &[&str], variables: &[(&str, String)]) -> String {
    let replies = leases.iter().zip(1..).map(|(lease, pid)| Reply::Granted(vec![site.endpoint(lease, pid)]));
    let (output, _) = gpusession_test_support::cuda::run(name, replies.collect(), variables);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{name}: {out}\n{said}");
    said
}

#[test]
fn programs_of_one_lease_share_memory() {
    if std::env::var_os(gpusession_test_support::PROGRAM).is_some() {
        return;
    }
    // SAFETY: no other thread of this process reads variables yet.
    unsafe {
        std::env::set_var("SIMGPU_EXPORT_MEMORY", "on");
        std::env::set_var("SIMGPU_DELAY_US", "2000");
        std::env::set_var("SIMGPU_DELAY_ONE_IN", "4");
    }
    let site = Site::new(2);
    site.add_lease(OTHER, "");
    site.add_lease(OF_ANOTHER_USER, "bob");
    succeeds(&site, "exports", &[LEASE, LEASE], &[]);
    let mut events = site.supervisor.events();
    succeeds(&site, "exports_and_lets_go", &[LEASE, LEASE], &[]);
    let mut refusals = std::iter::from_fn(|| events.try_recv().ok()).filter_map(|event| match event {
        Event::Refused { kind, client, lease, why, .. } => Some((kind, client, lease, why)),
        _ => None,
    });
    let (kind, client, lease, why) = refusals.next().expect("an event for the audit trail");
    assert_eq!((kind, &*client, &*lease), ("import-refused", "vm", LEASE));
    assert!(why.contains("no program exported"), "{why}");
    succeeds(&site, "imports_in_another_lease", &[LEASE, LEASE], &[("EXPECTED", "0".into())]);
    succeeds(&site, "gets_handles", &[LEASE, LEASE], &[]);
    succeeds(&site, "records_events", &[LEASE, LEASE], &[]);
    succeeds(&site, "outlives_records", &[LEASE, LEASE], &[]);
    succeeds(&site, "exports_pools", &[LEASE, LEASE], &[]);
    succeeds(&site, "outlives_a_pool", &[LEASE, LEASE], &[("EXPECTED", "0".into())]);
    // Leases of one user, each of which counts the memory.
    let of_the_user = [("EXPECTED", "0".into()), ("COUNTED", "yes".into())];
    succeeds(&site, "imports_in_another_lease", &[OTHER, LEASE], &of_the_user);
    succeeds(&site, "outlives_a_pool", &[OTHER, LEASE], &of_the_user);
    succeeds(&site, "imports_without_room", &[OTHER, LEASE], &[]);
    let served = || site.supervisor.workers().iter().filter(|w| w.process.is_some()).count();
    eventually("the lease has room again", || served() == 0);
    succeeds(&site, "records_events", &[OTHER, LEASE], &[]);
    let refused = [("EXPECTED", NOT_SUPPORTED.to_string())];
    for leases in [[OF_ANOTHER_USER, LEASE], [LEASE, OF_ANOTHER_USER]] {
        for program in ["imports_in_another_lease", "outlives_a_pool"] {
            let said = succeeds(&site, program, &leases, &refused);
            assert!(said.contains("shared memory: not imported"), "{said}");
        }
    }
    eventually("all are gone", || served() == 0);
    assert!(!site.supervisor.shares_memory(LEASE) && !site.supervisor.shares_memory(OTHER));
    site.runtime.block_on(site.supervisor.close("the test ends"));
}
