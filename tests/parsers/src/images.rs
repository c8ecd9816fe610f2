//! Images that programs load.

use gpusession_image::fatbin::{self, Packing};
use gpusession_image::{check, elf, ptx as text};

/// Longest image that a target unpacks, in bytes.
const MAX_UNPACKED: u64 = 1 << 20;

/// Fat binaries, the images in them, and ELF images.
pub fn image(bytes: &[u8]) {
    let _ = check(bytes);
    one(bytes);
    let entries = fatbin::list(bytes).and_then(fatbin::entries).unwrap_or_default();
    for entry in entries {
        let packing = entry.payload.packing;
        let Some(image) = fatbin::unpack(entry.payload.bytes, packing, MAX_UNPACKED) else { continue };
        // An entry that is not packed has its own length.
        assert!(matches!(packing, Packing::Plain) || image.len() as u64 <= MAX_UNPACKED);
        one(&image);
        let _ = text::kernels(&image);
    }
}

fn one(image: &[u8]) {
    let _ = elf::functions(image);
    if let Some((_, variables)) = elf::read(image) {
        for variable in variables {
            assert!(variable.init.len() as u64 <= variable.size);
        }
    }
}

/// PTX text.
pub fn ptx(bytes: &[u8]) {
    for kernel in text::kernels(bytes) {
        assert!(!kernel.name.is_empty());
    }
}
