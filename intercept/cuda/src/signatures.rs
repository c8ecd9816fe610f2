//! Sizes of kernels' parameters, from the images that the program loads.
//!
//! A launch copies as many bytes of the program as the kernel's parameters have. The server says
//! these sizes, and a server may be hostile; the image is the program's own.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpusession_image::fatbin::{self, Packing};
use gpusession_image::{Kind, elf, ptx};

use crate::images::Image;

/// Longest compressed image, in bytes, that any kernel's first launch may unpack: some ten
/// milliseconds.
pub const QUICK: u64 = 16 << 20;
/// Longest compressed image, in bytes, that the library ever unpacks.
pub const MAX_UNPACKED_BYTES: u64 = 1 << 30;
/// Most compressed bytes of an image that the library copies, because the program may free it.
const MAX_COPY: usize = 16 << 20;

/// Code that no lookup has read yet.
struct Piece {
    bytes: Cow<'static, [u8]>,
    packing: Packing,
}

impl Piece {
    /// Length in bytes of the image after it is unpacked.
    fn unpacked(&self) -> u64 {
        match self.packing {
            Packing::Plain | Packing::Unknown => 0,
            Packing::Lz4(len) | Packing::Zstd(len) => len,
        }
    }
}

/// Kernels of the images behind one module or library.
#[derive(Default)]
struct Code {
    /// Bytes of each parameter by mangled name; `None` for a kernel that its image describes in an
    /// unknown form.
    kernels: HashMap<String, Option<Vec<u32>>>,
    /// The shortest image is the last one.
    unread: Vec<Piece>,
}

impl Code {
    fn know(&mut self, kernel: String, sizes: Option<Vec<u32>>) {
        let known = self.kernels.entry(kernel).or_default();
        if known.is_none() {
            *known = sizes;
        }
    }

    fn read(&mut self, image: &[u8]) {
        match gpusession_image::check(image) {
            Ok(Kind::Elf) => {
                for kernel in elf::functions(image).unwrap_or_default() {
                    let sizes = |params: Vec<elf::Param>| params.iter().map(|param| param.size).collect();
                    self.know(kernel.name, kernel.params.map(sizes));
                }
            }
            Ok(Kind::Text) => ptx::kernels(image).into_iter().for_each(|k| self.know(k.name, k.sizes)),
            Ok(Kind::Fatbin) | Err(_) => {}
        }
    }

    /// Adds the images in `bytes`: those that the program keeps are read at a lookup.
    fn add<'a>(&mut self, bytes: &'a [u8], keep: impl Fn(&'a [u8]) -> Option<&'static [u8]>) {
        let whole = || vec![(bytes, Packing::Plain)];
        let entries = fatbin::list(bytes).and_then(fatbin::entries);
        let images = entries.map_or_else(whole, |entries| {
            let code = entries.iter().filter(|e| matches!(e.kind, fatbin::PTX | fatbin::ELF));
            code.map(|entry| (entry.payload.bytes, entry.payload.packing)).collect()
        });
        for (bytes, packing) in images {
            match keep(bytes) {
                Some(kept) => self.unread.push(Piece { bytes: kept.into(), packing }),
                None if packing == Packing::Plain => self.read(bytes),
                None if bytes.len() <= MAX_COPY => {
                    self.unread.push(Piece { bytes: bytes.to_vec().into(), packing });
                }
                None => {}
            }
        }
        self.unread.sort_by_key(|piece| Reverse(piece.unpacked()));
    }

    fn find(&mut self, name: &str, longest: u64) -> Option<Vec<u32>> {
        loop {
            if let Some(Some(known)) = self.kernels.get(name) {
                return Some(known.clone());
            }
            let next = self.unread.pop_if(|piece| piece.unpacked() <= longest)?;
            if let Some(image) = fatbin::unpack(&next.bytes, next.packing, longest) {
                self.read(&image);
            }
        }
    }
}

/// Images of one module or library, or inputs of a link.
#[derive(Clone, Default)]
pub struct Signatures(Arc<Mutex<Code>>);

impl Signatures {
    fn code(&self) -> MutexGuard<'_, Code> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the signatures in an image that the program keeps until it unloads it.
    pub fn kept(image: &Image<'static>) -> Self {
        Self::of_image(image, Some)
    }

    /// Returns the signatures in an image that the program may free after this call.
    pub fn copied(image: &Image<'_>) -> Self {
        Self::of_image(image, |_| None)
    }

    fn of_image<'a>(image: &Image<'a>, keep: impl Fn(&'a [u8]) -> Option<&'static [u8]>) -> Self {
        if let Some(inputs) = inputs_of(image.bytes) {
            return inputs;
        }
        let new = Self::default();
        for bytes in [image.bytes].iter().chain(&image.parts) {
            new.code().add(bytes, &keep);
        }
        new
    }

    /// Adds an input of a link, which the program may free after this call.
    pub fn add(&self, input: &[u8]) {
        self.code().add(input, |_| None);
    }

    /// Notes that the server has linked these inputs to an image, which is its word again.
    pub fn are_inputs_of(&self, image: &[u8]) {
        linked().insert(blake3::hash(image).into(), self.clone());
    }

    /// Returns the bytes of each parameter of a kernel, if an image describes it in a known form.
    ///
    /// Unpacks images of at most `longest` bytes, each one once.
    pub fn find(&self, kernel: &str, longest: u64) -> Option<Vec<u32>> {
        self.code().find(kernel, longest)
    }
}

/// Signatures by handle of the module or library.
static LOADED: Mutex<BTreeMap<u64, Signatures>> = Mutex::new(BTreeMap::new());

fn loaded() -> MutexGuard<'static, BTreeMap<u64, Signatures>> {
    LOADED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Inputs of the images that the server linked for this process, by the image's hash.
fn linked() -> MutexGuard<'static, BTreeMap<[u8; 32], Signatures>> {
    static LINKED: Mutex<BTreeMap<[u8; 32], Signatures>> = Mutex::new(BTreeMap::new());
    LINKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the inputs of an image, if the server linked it.
fn inputs_of(image: &[u8]) -> Option<Signatures> {
    let linked = linked();
    // Most programs link nothing, and hash no image for it.
    if linked.is_empty() { None } else { linked.get(blake3::hash(image).as_bytes()).cloned() }
}

/// Notes the signatures of a loaded module or library.
pub fn note(parent: u64, signatures: Signatures) {
    loaded().insert(parent, signatures);
}

/// Returns the signatures of a module or library; none of a handle without an image.
pub fn of_module(parent: u64) -> Signatures {
    loaded().get(&parent).cloned().unwrap_or_default()
}

/// Removes an unloaded module or library.
pub fn forget(parent: u64) {
    loaded().remove(&parent);
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b".version 8.4\n.entry f(.param .u64 a, .param .u32 b) { ret; }\0";
    const OTHER: &[u8] = b".version 8.4\n.entry g(.param .u16 a) { ret; }\0";

    /// Makes a fat binary of texts, each compressed or not.
    fn fat(texts: &[(&[u8], bool)]) -> Vec<u8> {
        let mut list = Vec::new();
        for (text, compressed) in texts {
            let mut payload = if *compressed { lz4_flex::block::compress(text) } else { text.to_vec() };
            let packed = if *compressed { payload.len() as u32 } else { 0 };
            payload.resize(payload.len().next_multiple_of(8), 0);
            let mut header = [0; 64];
            header[0] = fatbin::PTX as u8;
            header[4] = 64;
            header[8..16].copy_from_slice(&(payload.len() as u64).to_le_bytes());
            header[16..20].copy_from_slice(&packed.to_le_bytes());
            // Flags of LZ4.
            header[41] = 0x20;
            header[56..64].copy_from_slice(&(text.len() as u64).to_le_bytes());
            list.extend_from_slice(&header);
            list.extend(payload);
        }
        let mut image = gpusession_image::FATBIN.to_le_bytes().to_vec();
        image.extend([1, 0, 16, 0]);
        image.extend((list.len() as u64).to_le_bytes());
        image.extend(list);
        image
    }

    #[test]
    fn sizes_come_from_images_in_every_form() {
        let image = fat(&[(TEXT, true), (OTHER, false)]);
        let kept: &'static [u8] = image.clone().leak();
        let of_copy = Signatures::copied(&Image::from(&image[..]));
        drop(image);
        for signatures in [of_copy, Signatures::kept(&Image::from(kept))] {
            assert_eq!(signatures.find("g", 0), Some(vec![2]), "plain");
            assert_eq!(signatures.find("f", 10), None, "too long to unpack now");
            assert_eq!(signatures.find("f", QUICK), Some(vec![8, 4]));
            assert_eq!(signatures.find("h", MAX_UNPACKED_BYTES), None);
        }
        assert_eq!(Signatures::copied(&Image::from(TEXT)).find("f", 0), Some(vec![8, 4]));
        let parts = Image { bytes: &fat(&[]), parts: vec![TEXT, OTHER] };
        assert_eq!(Signatures::copied(&parts).find("g", 0), Some(vec![2]), "an image to link");
        assert_eq!(
            Signatures::copied(&Image::from(&b"BC\xc0\xde, or garbage"[..])).find("f", MAX_UNPACKED_BYTES),
            None
        );
    }

    #[test]
    fn an_image_that_the_server_linked_is_not_believed() {
        let inputs = Signatures::default();
        inputs.add(TEXT);
        // The server's image claims another layout.
        let image = b".version 8.4\n.entry f(.param .b8 a[4000]) { ret; } // linked\0";
        inputs.are_inputs_of(image);
        assert_eq!(Signatures::copied(&Image::from(&image[..])).find("f", 0), Some(vec![8, 4]));
        let own = b".version 8.4\n.entry f(.param .b8 a[4000]) { ret; }\0";
        assert_eq!(Signatures::copied(&Image::from(&own[..])).find("f", 0), Some(vec![4000]));
    }

    #[test]
    fn sizes_belong_to_a_loaded_module() {
        note(0x71, Signatures::copied(&Image::from(TEXT)));
        note(0x72, of_module(0x71));
        forget(0x71);
        assert_eq!(of_module(0x71).find("f", MAX_UNPACKED_BYTES), None);
        assert_eq!(
            of_module(0x72).find("f", MAX_UNPACKED_BYTES),
            Some(vec![8, 4]),
            "a module of the library"
        );
    }
}
