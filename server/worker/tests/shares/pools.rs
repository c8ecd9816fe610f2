//! Memory pools that programs of one lease share.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use gpusession_test_support::cuda::{Cuda, KERNEL, at};
use gpusession_test_worker::supervised::eventually;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use crate::{
    INVALID_VALUE, NOT_SUPPORTED, Other, POSIX_FD, ROUNDS, SIZE, UNKNOWN, begin, give, import, open, take,
};

/// `CUmemPoolProps` of device 0, with a handle type.
fn create_pool(cuda: &Cuda, handle_type: u32) -> u64 {
    let mut properties = [0u32; 22];
    properties[..3].copy_from_slice(&[1, handle_type, 1]);
    cuda.get("cuMemPoolCreate", &[properties.as_ptr() as u64])
}

/// Allocates memory of a pool that exists when this returns.
fn allocate_from(cuda: &Cuda, pool: u64, value: u32) -> u64 {
    let address = cuda.get("cuMemAllocFromPoolAsync", &[SIZE, pool, 0]);
    cuda.write(address, &value.to_le_bytes());
    cuda.ok("cuCtxSynchronize", &[]);
    address
}

fn export_pool(cuda: &Cuda, pool: u64) -> Result<OwnedFd, i32> {
    let mut descriptor = -1i32;
    match cuda.call("cuMemPoolExportToShareableHandle", &[at(&mut descriptor), pool, POSIX_FD, 0]) {
        // SAFETY: the call has just created the descriptor for this program.
        0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        status => Err(status),
    }
}

fn export_pointer(cuda: &Cuda, address: u64) -> Result<[u64; 8], i32> {
    let mut data = [0; 8];
    match cuda.call("cuMemPoolExportPointer", &[at(&mut data), address]) {
        0 => Ok(data),
        status => Err(status),
    }
}

fn import_pool(cuda: &Cuda, descriptor: &impl AsRawFd) -> Result<u64, i32> {
    cuda.try_get("cuMemPoolImportFromShareableHandle", &[descriptor.as_raw_fd() as u64, POSIX_FD, 0])
}

fn import_pointer(cuda: &Cuda, pool: u64, data: &[u64; 8]) -> Result<u64, i32> {
    cuda.try_get("cuMemPoolImportPointer", &[pool, data.as_ptr() as u64])
}

pub fn exports_pools() {
    const POOL_HANDLE_TYPES: u64 = 119;
    let cuda = begin();
    assert_eq!(cuda.get("cuDeviceGetAttribute", &[POOL_HANDLE_TYPES, 0]), POSIX_FD);
    let (pool, plain, second) = (create_pool(&cuda, 1), create_pool(&cuda, 0), create_pool(&cuda, 1));
    let usual = cuda.get("cuDeviceGetDefaultMemPool", &[0]);
    let memory = allocate_from(&cuda, pool, 7);
    for other in [plain, usual] {
        assert_eq!(export_pool(&cuda, other).err(), Some(INVALID_VALUE), "not created for that");
    }
    let of_plain = allocate_from(&cuda, plain, 7);
    for address in [of_plain, memory + 256, cuda.allocate(SIZE), 0] {
        assert_eq!(export_pointer(&cuda, address), Err(INVALID_VALUE), "{address:#x}");
    }
    let shared = export_pool(&cuda, pool).unwrap();
    assert!(fcntl(&shared, FcntlArg::F_GETFD).unwrap() & FdFlag::FD_CLOEXEC.bits() != 0);
    assert_eq!(import(&cuda, &shared).err(), Some(UNKNOWN), "a pool is no memory");
    let data = export_pointer(&cuda, memory).unwrap();
    assert_eq!(export_pointer(&cuda, memory), Ok(data), "one name for the life of the memory");
    let of_second = allocate_from(&cuda, second, 8);
    assert_eq!(export_pointer(&cuda, of_second), Err(INVALID_VALUE), "its pool is not shared");
    drop(export_pool(&cuda, second).unwrap());
    let foreign = export_pointer(&cuda, of_second).unwrap();
    // A process may import its own pool; a pool that it did not import has no pointers of others.
    let own = import_pool(&cuda, &shared).unwrap();
    assert_eq!(import_pointer(&cuda, pool, &data), Err(INVALID_VALUE));
    let again = import_pointer(&cuda, own, &data).unwrap();
    assert_eq!((again == memory, cuda.word(again)), (false, 7));
    cuda.ok("cuMemFree_v2", &[again]);
    let (mut other, mut child) = Other::start("imports_pools");
    other.send(shared.as_raw_fd());
    give(&mut other, &data);
    give(&mut other, &foreign);
    let stream = cuda.get("cuStreamCreate", &[1]);
    let pinned = cuda.get("cuMemHostAlloc", &[4, 0]);
    for round in 0..ROUNDS {
        // A synchronization that a program with no other process need not wait for.
        // SAFETY: pinned memory of this program.
        unsafe { (pinned as *mut u32).write(round * 10) };
        cuda.ok("cuMemcpyHtoDAsync_v2", &[memory, pinned, 4, stream]);
        cuda.ok("cuStreamSynchronize", &[stream]);
        other.tell(b'w');
        assert_eq!(other.hear(), b'r');
        assert_eq!(cuda.word(memory), round * 10 + 1, "round {round}");
    }
    other.tell(b'f');
    assert_eq!(other.hear(), b'f');
    // Memory and pool end while the other process has the token.
    cuda.ok("cuMemFreeAsync", &[memory, 0]);
    cuda.ok("cuCtxSynchronize", &[]);
    other.tell(b'm');
    assert_eq!(other.hear(), b'm');
    cuda.ok("cuMemPoolDestroy", &[pool]);
    other.tell(b'p');
    assert!(child.wait().unwrap().success());
    assert_eq!(import_pool(&cuda, &shared).err(), Some(UNKNOWN), "gone for its own process, too");
    // Shared pools outlive a reset of the device, in both directions.
    let shared = export_pool(&cuda, second).unwrap();
    let own = import_pool(&cuda, &shared).unwrap();
    let again = import_pointer(&cuda, own, &foreign).unwrap();
    cuda.ok("cuDevicePrimaryCtxReset_v2", &[0]);
    // Without a retain, work in the context returns that it is destroyed.
    cuda.get("cuDevicePrimaryCtxRetain", &[0]);
    assert!(import_pool(&cuda, &shared).is_ok());
    assert_eq!(import_pointer(&cuda, own, &foreign), Ok(again));
    cuda.ok("cuMemFree_v2", &[again]);
}

pub fn imports_pools() {
    let cuda = begin();
    let mut other = Other::parent();
    let (shared, data, foreign) = (other.receive(), take(&mut other), take(&mut other));
    let before = cuda.memory().0;
    assert_eq!(import_pool(&cuda, &File::open("/dev/null").unwrap()).err(), Some(UNKNOWN));
    let pool = import_pool(&cuda, &shared).unwrap();
    // An imported pool has no attributes, and allocates and exports nothing.
    let mut value = 0u64;
    assert_eq!(cuda.call("cuMemPoolGetAttribute", &[pool, 7, at(&mut value)]), INVALID_VALUE);
    assert_eq!(cuda.try_get("cuMemAllocFromPoolAsync", &[SIZE, pool, 0]), Err(INVALID_VALUE));
    assert_eq!(export_pool(&cuda, pool).err(), Some(INVALID_VALUE));
    assert_eq!(cuda.call("cuDeviceSetMemPool", &[0, pool]), INVALID_VALUE);
    for at in 0..8 {
        let mut forged = data;
        forged[at] ^= 1 << 40;
        // The library of the other process wrote offset and size, which say nothing.
        let refused = match at {
            1 | 2 => Some(NOT_SUPPORTED),
            6 | 7 => None,
            _ => Some(INVALID_VALUE),
        };
        let imported = import_pointer(&cuda, pool, &forged);
        assert_eq!(imported.err(), refused, "word {at}");
        if let Ok(address) = imported {
            cuda.ok("cuMemFree_v2", &[address]);
        }
    }
    assert_eq!(import_pointer(&cuda, pool, &foreign), Err(INVALID_VALUE), "of another pool");
    assert_eq!(import_pointer(&cuda, pool + 8, &data), Err(INVALID_VALUE), "no pool");
    assert_eq!(open(&cuda, &data, 1), Err(INVALID_VALUE), "no memory of cuMemAlloc");
    let address = import_pointer(&cuda, pool, &data).unwrap();
    assert_eq!(import_pointer(&cuda, pool, &data), Ok(address), "one address");
    assert_eq!(cuda.memory().0, before, "its own process counts it");
    assert_eq!(export_pointer(&cuda, address), Err(INVALID_VALUE), "memory of another process");
    let (mut base, mut size) = (0u64, 0u64);
    cuda.ok("cuMemGetAddressRange_v2", &[at(&mut base), at(&mut size), address + 10]);
    assert_eq!((base, size), (address, SIZE));
    let increment = cuda.increment(cuda.load(KERNEL));
    while other.hear() == b'w' {
        assert_eq!(cuda.launch(increment, address, 0), 0);
        cuda.ok("cuCtxSynchronize", &[]);
        other.tell(b'r');
    }
    cuda.ok("cuMemFreeAsync", &[address, 0]);
    assert_eq!(cuda.call("cuMemFree_v2", &[address]), INVALID_VALUE, "one free ends both imports");
    other.tell(b'f');
    assert_eq!(other.hear(), b'm');
    assert_eq!(import_pointer(&cuda, pool, &data), Err(INVALID_VALUE), "freed");
    other.tell(b'm');
    assert_eq!(other.hear(), b'p');
    assert_eq!(import_pool(&cuda, &shared).err(), Some(UNKNOWN), "destroyed");
    cuda.ok("cuMemPoolDestroy", &[pool]);
}

/// Ends without any notice, while another program has memory of its pool.
pub fn exports_a_pool_and_dies() {
    let cuda = begin();
    let pool = create_pool(&cuda, 1);
    let memory = allocate_from(&cuda, pool, 9);
    let mut other = Other::parent();
    other.send(export_pool(&cuda, pool).unwrap().as_raw_fd());
    give(&mut other, &export_pointer(&cuda, memory).unwrap());
    other.hear();
    // SAFETY: ends this process.
    unsafe { nix::libc::_exit(0) };
}

/// Imports memory of a pool of its own lease or of another one, whose process then dies.
pub fn outlives_a_pool() {
    let cuda = begin();
    let alone = cuda.memory().0;
    let (mut other, mut child) = Other::start("exports_a_pool_and_dies");
    let (shared, data) = (other.receive(), take(&mut other));
    let expected: i32 = std::env::var("EXPECTED").unwrap().parse().unwrap();
    let imported = import_pool(&cuda, &shared);
    assert_eq!(imported.err().unwrap_or(0), expected);
    let address = imported.map(|pool| (pool, import_pointer(&cuda, pool, &data).unwrap()));
    other.tell(b'd');
    assert!(child.wait().unwrap().success());
    if let Ok((pool, address)) = address {
        assert_eq!(cuda.word(address), 9, "memory lives until its last user is gone");
        eventually("this process counts the memory", || cuda.memory().0 == alone - SIZE);
        assert_eq!(cuda.call("cuMemPoolDestroy", &[pool]), INVALID_VALUE, "its memory is imported");
        // Its worker exits a moment later; an import before that is the present one again.
        eventually("its process has ended", || {
            let again = import_pointer(&cuda, pool, &data);
            assert!([Ok(address), Err(NOT_SUPPORTED)].contains(&again), "{again:?}");
            again.is_err()
        });
        cuda.write(address, &10u32.to_le_bytes());
        assert_eq!(cuda.word(address), 10);
        cuda.ok("cuMemFree_v2", &[address]);
        cuda.ok("cuMemPoolDestroy", &[pool]);
        assert_eq!(cuda.memory().0, alone, "it is gone with its last user");
    }
}
