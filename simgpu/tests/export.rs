//! Memory created for export, passed on as a file descriptor and mapped a second time, on a driver
//! that ignores address hints.

mod common;

use common::{machine, ok};
use simgpu::exports::{copy, vmm};

const SIZE: usize = 2 << 20;
const POSIX_FD: u32 = 1;

/// `CUmemAllocationProp`: pinned memory of device 0, for export.
const PROPERTIES: [u32; 8] = [1, POSIX_FD, 1, 0, 0, 0, 0, 0];
/// `CUmemAccessDesc`: read and write access for device 0.
const ACCESS: [u32; 3] = [1, 0, 3];

/// Maps memory at an address that the driver chooses, whatever the hint.
unsafe fn mapped(memory: usize, hint: u64) -> u64 {
    let mut at = 0;
    // SAFETY: locals of the right types.
    unsafe {
        ok(vmm::cuMemAddressReserve(&raw mut at, SIZE, 0, hint, 0));
        assert_ne!(at, hint, "the hint is ignored");
        ok(vmm::cuMemMap(at, SIZE, 0, memory, 0));
        ok(vmm::cuMemSetAccess(at, SIZE, ACCESS.as_ptr().cast(), 1));
    }
    at
}

#[test]
fn exported_memory_is_the_same_memory() {
    // SAFETY: the only test here, and the driver is not loaded yet.
    unsafe {
        std::env::set_var("SIMGPU_EXPORT_MEMORY", "on");
        std::env::set_var("SIMGPU_IGNORE_ADDRESS_HINTS", "on");
    }
    let _machine = machine();
    let (mut memory, mut again, mut fd, mut value) = (0, 0, -1, 0u32);
    // SAFETY: locals of the right types; the addresses are of the two mappings.
    unsafe {
        ok(vmm::cuMemCreate(&raw mut memory, SIZE, PROPERTIES.as_ptr().cast(), 0));
        ok(vmm::cuMemExportToShareableHandle(&raw mut fd, memory, POSIX_FD, 0));
        ok(vmm::cuMemImportFromShareableHandle(&raw mut again, fd as usize, POSIX_FD));
        libc::close(fd);
        let (first, second) = (mapped(memory, 0x2000_0000_0000), mapped(again, 0x3000_0000_0000));
        ok(copy::cuMemsetD32_v2(first, 77, 4));
        ok(copy::cuMemcpyDtoH_v2(&raw mut value as u64, second + 8, 4));
        assert_eq!(value, 77);
        // Memory that was not created for export cannot be exported.
        let mut private = 0;
        let mut properties = PROPERTIES;
        properties[1] = 0;
        ok(vmm::cuMemCreate(&raw mut private, SIZE, properties.as_ptr().cast(), 0));
        assert_eq!(vmm::cuMemExportToShareableHandle(&raw mut fd, private, POSIX_FD, 0), 1);
    }
}
