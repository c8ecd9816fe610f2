//! Images with machine code, on a driver that regards it as another architecture's.

mod common;

use common::{KERNELS, machine, ok};
use simgpu::exports::module;
use std::ptr::null;

const NO_BINARY_FOR_GPU: u32 = 209;
const PTX: u16 = 1;
const CUBIN: u16 = 2;

/// Returns the smallest ELF image with a length of its own: a header without sections.
fn cubin() -> Vec<u8> {
    let mut image = vec![0; 64];
    image[..4].copy_from_slice(b"\x7fELF");
    image[40] = 64;
    image
}

/// Returns a fatbin of entries for this device.
fn fatbin(entries: &[(u16, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, payload) in entries {
        let size = payload.len().next_multiple_of(8);
        let mut head = [0u8; 64];
        head[..2].copy_from_slice(&kind.to_le_bytes());
        head[4] = 64;
        head[8..16].copy_from_slice(&(size as u64).to_le_bytes());
        head[28] = 75;
        body.extend_from_slice(&head);
        body.extend_from_slice(payload);
        body.resize(body.len() + size - payload.len(), 0);
    }
    let mut image = 0xba55_ed50_u32.to_le_bytes().to_vec();
    // Version and length of this header.
    image.extend_from_slice(&[1, 0, 16, 0]);
    image.extend_from_slice(&(body.len() as u64).to_le_bytes());
    image.extend_from_slice(&body);
    image
}

#[test]
fn an_image_without_ptx_has_no_binary_for_this_gpu() {
    // SAFETY: the only test here, and the driver is not loaded yet.
    unsafe { std::env::set_var("SIMGPU_CUBIN", "refuse") };
    let _machine = machine();
    let cubin = cubin();
    let packed = fatbin(&[(CUBIN, &cubin[..])]);
    let with_ptx = fatbin(&[(CUBIN, &cubin[..]), (PTX, KERNELS.to_bytes())]);
    let mut loaded = 0;
    // SAFETY: complete images, and a local of the right type; options may be null.
    unsafe {
        for image in [cubin.as_ptr(), packed.as_ptr()] {
            assert_eq!(module::cuModuleLoadData(&raw mut loaded, image), NO_BINARY_FOR_GPU);
            assert_eq!(
                module::cuLibraryLoadData(&raw mut loaded, image, null(), null(), 0, null(), null(), 0),
                NO_BINARY_FOR_GPU
            );
        }
        assert_eq!(loaded, 0);
        ok(module::cuModuleLoadData(&raw mut loaded, with_ptx.as_ptr()));
    }
}
