//! Images that programs load: length, hash, transfer to a server that lacks them.
//!
//! The API does not give an image's length; the hash serves as its name.

use std::collections::HashSet;
use std::ffi::{CStr, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpusession_image::{ELF, FATBIN, WRAPPER};
use gpusession_link::Reply;
use gpusession_proto::frame::{ability, op};
use gpusession_proto::status::IMAGE_MISSING;

use crate::client::{Client, word};
use crate::status::{INVALID_IMAGE, INVALID_VALUE, Result};

/// Maximum bytes of an image in one frame.
const PIECE_BYTES: usize = 1 << 20;
/// Longest image in bytes that travels without a question whether the server has it.
const SMALL: usize = 64 << 10;
/// Maximum length of an image in bytes; a longer one counts as invalid.
const MAX_IMAGE: u64 = 4 << 30;

fn read<T: Copy>(base: *const u8, offset: usize) -> T {
    // SAFETY: callers read a magic number, then inside the headers of that kind of image. The
    // program vouches for the image, as it does to NVIDIA's driver.
    unsafe { base.add(offset).cast::<T>().read_unaligned() }
}

/// An image as a program passes it.
pub struct Image<'a> {
    pub bytes: &'a [u8],
    /// Fat binaries for the driver to link, if `bytes` has no code for the device.
    ///
    /// They come from `nvcc -rdc=true`: the wrapper's version is 2 then, and names their list.
    pub parts: Vec<&'a [u8]>,
}

impl Image<'_> {
    /// Returns `true` for a fat binary without code, which the driver may load all the same.
    pub fn is_empty(&self) -> bool {
        self.bytes.starts_with(&FATBIN.to_le_bytes()) && self.bytes.get(8..16) == Some(&[0; 8])
    }
}

impl<'a> From<&'a [u8]> for Image<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { bytes, parts: Vec::new() }
    }
}

/// Returns the image at a program's pointer.
pub fn read_image<'a>(image: *const c_void) -> Result<Image<'a>> {
    const TO_LINK: u32 = 2;
    /// Bound on the parts: one for each file of the program's source.
    const MAX_PARTS: usize = 1 << 16;
    let bytes = bytes(image)?;
    let mut parts = Vec::new();
    let wrapper = image.cast::<u8>();
    if read::<u32>(wrapper, 0) == WRAPPER && read::<u32>(wrapper, 4) == TO_LINK {
        let list = read::<*const *const c_void>(wrapper, 16);
        for at in (0..MAX_PARTS).map(|i| i * size_of::<*const c_void>()).take_while(|_| !list.is_null()) {
            let part = read::<*const c_void>(list.cast(), at);
            if part.is_null() {
                break;
            }
            parts.push(self::bytes(part)?);
        }
    }
    Ok(Image { bytes, parts })
}

/// Returns the bytes of the image at a program's pointer.
fn bytes<'a>(image: *const c_void) -> Result<&'a [u8]> {
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    let mut base = image.cast::<u8>();
    let mut magic: u32 = read(base, 0);
    if magic == WRAPPER {
        base = read::<*const u8>(base, 8);
        if base.is_null() {
            return Err(INVALID_IMAGE);
        }
        magic = read(base, 0);
        if magic != FATBIN && magic != ELF {
            return Err(INVALID_IMAGE);
        }
    }
    let len = match magic {
        FATBIN => u64::from(read::<u16>(base, 6)).checked_add(read::<u64>(base, 8)),
        ELF => Some(elf_length(base)?),
        // PTX text, with its terminator, which the driver looks for.
        // SAFETY: by the API's contract an image of no binary format is PTX text that ends in a
        // zero byte.
        _ => Some(unsafe { CStr::from_ptr(base.cast()) }.to_bytes_with_nul().len() as u64),
    };
    match len {
        // SAFETY: the length comes from the image's own headers or its terminator, and the program
        // vouches for the image.
        Some(len) if len <= MAX_IMAGE => Ok(unsafe { std::slice::from_raw_parts(base, len as usize) }),
        _ => Err(INVALID_IMAGE),
    }
}

/// Returns the length of an ELF image: the end of its last header, section or segment.
fn elf_length(base: *const u8) -> Result<u64> {
    const CLASS_64: u8 = 2;
    const NO_BITS: u32 = 8;
    if read::<u8>(base, 4) != CLASS_64 {
        return Err(INVALID_IMAGE);
    }
    let (phoff, shoff) = (read::<u64>(base, 0x20), read::<u64>(base, 0x28));
    let (phsize, phnum) = (u64::from(read::<u16>(base, 0x36)), u64::from(read::<u16>(base, 0x38)));
    let (shsize, shnum) = (u64::from(read::<u16>(base, 0x3a)), u64::from(read::<u16>(base, 0x3c)));
    let mut end = shoff.saturating_add(shsize * shnum).max(phoff.saturating_add(phsize * phnum));
    if end > MAX_IMAGE {
        return Err(INVALID_IMAGE);
    }
    for i in 0..shnum {
        let header = (shoff + i * shsize) as usize;
        if read::<u32>(base, header + 4) != NO_BITS {
            end = end.max(read::<u64>(base, header + 0x18).saturating_add(read::<u64>(base, header + 0x20)));
        }
    }
    for i in 0..phnum {
        let header = (phoff + i * phsize) as usize;
        end = end.max(read::<u64>(base, header + 8).saturating_add(read::<u64>(base, header + 0x20)));
    }
    Ok(end)
}

type Hash = [u8; 32];

/// Images that the server has, with the number of the client.
static SENT: Mutex<Option<HashSet<(u8, Hash)>>> = Mutex::new(None);

fn sent() -> MutexGuard<'static, Option<HashSet<(u8, Hash)>>> {
    SENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a request that names an image by its hash; sends the image if the server lacks it.
pub fn with_image(client: &Client, image: &[u8], request: impl Fn(&Hash) -> Result<Reply>) -> Result<Reply> {
    let hash: Hash = *blake3::hash(image).as_bytes();
    let key = (client.number, hash);
    let known = sent().get_or_insert_default().contains(&key);
    if client.abilities & ability::QUICK_LOADS == 0 {
        if !known {
            send(client, &hash, image, true)?;
        }
    } else if !known && image.len() <= SMALL {
        post(client, &hash, image)?;
    }
    let reply = request(&hash)?;
    if reply.status == IMAGE_MISSING {
        // The worker forgets images that it has not used for long.
        sent().get_or_insert_default().remove(&key);
        send(client, &hash, image, false)?;
        return request(&hash);
    }
    sent().get_or_insert_default().insert(key);
    Ok(reply)
}

fn post(client: &Client, hash: &Hash, image: &[u8]) -> Result {
    for piece in image.chunks(PIECE_BYTES) {
        client.post(op::IMAGE_DATA, |w| {
            w.bytes(hash);
            w.word(image.len() as u64);
            w.bytes(piece);
        })?;
    }
    Ok(())
}

/// Sends an image; with `ask` only if the server lacks it.
fn send(client: &Client, hash: &Hash, image: &[u8], ask: bool) -> Result {
    // One thread at a time: the pieces of two threads that send the same image would mix.
    static SENDING: Mutex<()> = Mutex::new(());
    let there =
        || -> Result<bool> { Ok(word(&mut client.call(op::IMAGE_HAVE, |w| w.bytes(hash))?.reader())? != 0) };
    let _one = SENDING.lock().unwrap_or_else(PoisonError::into_inner);
    // Another thread may have sent it meanwhile.
    if sent().get_or_insert_default().contains(&(client.number, *hash)) || ask && there()? {
        return Ok(());
    }
    post(client, hash, image)?;
    // Checks the result, and puts the pieces before the frames that other threads post after this
    // call.
    if !there()? {
        return Err(INVALID_IMAGE);
    }
    sent().get_or_insert_default().insert((client.number, *hash));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_worker::Program;

    /// Makes an ELF image from sections (kind, offset, size) and segments (offset, size).
    fn elf(sections: &[(u32, u64, u64)], segments: &[(u64, u64)]) -> Vec<u8> {
        let mut image = vec![0; 0x40];
        image[..5].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2]);
        let mut put = |at: usize, value: u64, len: usize| {
            image[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
        };
        put(0x20, 0x40, 8);
        put(0x28, 0x40 + 0x38 * segments.len() as u64, 8);
        put(0x36, 0x38, 2);
        put(0x38, segments.len() as u64, 2);
        put(0x3a, 0x40, 2);
        put(0x3c, sections.len() as u64, 2);
        for (offset, size) in segments {
            let mut header = [0u8; 0x38];
            header[8..16].copy_from_slice(&offset.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&size.to_le_bytes());
            image.extend_from_slice(&header);
        }
        for (kind, offset, size) in sections {
            let mut header = [0u8; 0x40];
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&offset.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&size.to_le_bytes());
            image.extend_from_slice(&header);
        }
        image.resize(image.len() + 0x400, 0);
        image
    }

    fn length(image: &[u8]) -> Result<usize> {
        bytes(image.as_ptr().cast()).map(<[u8]>::len)
    }

    #[test]
    fn elf_image_ends_behind_its_last_part() {
        const CODE: u32 = 1;
        const NO_BITS: u32 = 8;
        assert_eq!(length(&elf(&[(CODE, 0x100, 0x30)], &[])), Ok(0x130), "a section");
        assert_eq!(length(&elf(&[(CODE, 0x100, 0x30)], &[(0x200, 0x10)])), Ok(0x210), "a segment");
        assert_eq!(length(&elf(&[(CODE, 0x90, 8)], &[])), Ok(0x98), "past the section headers");
        assert_eq!(length(&elf(&[(CODE, 0x10, 8)], &[])), Ok(0x80), "the section headers");
        assert_eq!(length(&elf(&[(NO_BITS, 0x300, 0x1000)], &[])), Ok(0x80), "no bytes in the image");
    }

    #[test]
    fn elf_image_without_sense_is_invalid() {
        let mut wrong = elf(&[], &[]);
        wrong[4] = 1;
        assert_eq!(length(&wrong), Err(INVALID_IMAGE), "32 bits");
        assert_eq!(length(&elf(&[(1, u64::MAX - 8, 64)], &[])), Err(INVALID_IMAGE), "an end beyond all");
        let mut headers = elf(&[], &[(0, 0)]);
        headers[0x20..0x28].copy_from_slice(&(u64::MAX - 8).to_le_bytes());
        assert_eq!(length(&headers), Err(INVALID_IMAGE), "headers beyond all");
    }

    #[test]
    fn fatbin_and_text_have_their_own_lengths() {
        let mut fatbin = [FATBIN.to_le_bytes().as_slice(), &[1, 0, 16, 0], &100u64.to_le_bytes()].concat();
        fatbin.resize(200, 0);
        assert_eq!(length(&fatbin), Ok(116));
        fatbin[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(length(&fatbin), Err(INVALID_IMAGE));
        assert_eq!(length(b".version 8.0\0garbage"), Ok(13), "PTX with its terminator");
        assert_eq!(bytes(std::ptr::null()), Err(INVALID_VALUE));
    }

    #[test]
    fn wrapper_leads_to_a_binary_image() {
        let fatbin = [FATBIN.to_le_bytes().as_slice(), &[1, 0, 16, 0], &4u64.to_le_bytes(), &[9; 4]].concat();
        let wrapped = |image: *const u8| {
            let mut wrapper = [0u64; 3];
            wrapper[0] = u64::from(WRAPPER) | 1 << 32;
            wrapper[1] = image as u64;
            bytes(wrapper.as_ptr().cast())
        };
        assert_eq!(wrapped(fatbin.as_ptr()), Ok(&fatbin[..]));
        assert_eq!(wrapped(std::ptr::null()), Err(INVALID_IMAGE));
        assert_eq!(wrapped(c".version 8.0".as_ptr().cast()), Err(INVALID_IMAGE), "text has no wrapper");
    }

    #[test]
    fn wrapper_of_an_image_to_link_names_its_parts() {
        let fatbin = |content: &[u8]| {
            let mut image = [FATBIN.to_le_bytes().as_slice(), &[1, 0, 16, 0]].concat();
            image.extend_from_slice(&(content.len() as u64).to_le_bytes());
            image.extend_from_slice(content);
            image
        };
        let (empty, one, two) = (fatbin(&[]), fatbin(&[1; 8]), fatbin(&[2; 24]));
        let list = [one.as_ptr(), two.as_ptr(), std::ptr::null()];
        let mut wrapper = [u64::from(WRAPPER) | 2 << 32, empty.as_ptr() as u64, list.as_ptr() as u64];
        let image = read_image(wrapper.as_ptr().cast()).unwrap();
        assert!(image.is_empty());
        assert_eq!((image.bytes, image.parts), (&empty[..], vec![&one[..], &two[..]]));
        assert!(!Image::from(&one[..]).is_empty());
        wrapper[0] = u64::from(WRAPPER) | 1 << 32;
        assert!(read_image(wrapper.as_ptr().cast()).unwrap().parts.is_empty(), "another version");
        wrapper = [u64::from(WRAPPER) | 2 << 32, empty.as_ptr() as u64, 0];
        assert!(read_image(wrapper.as_ptr().cast()).unwrap().parts.is_empty(), "no list");
    }

    /// Loads an image; returns the operations and the status.
    fn load(program: &Program, image: &[u8]) -> (Vec<u16>, Result<i32>) {
        let request = |hash: &Hash| program.client.ask(op::MODULE_LOAD, |w| w.bytes(hash));
        let loaded = with_image(program.client, image, request).map(|reply| reply.status);
        (program.operations(), loaded)
    }

    #[test]
    fn image_travels_once_and_only_to_a_server_without_it() {
        let program = Program::able(ability::QUICK_LOADS);
        let long = vec![0x52; PIECE_BYTES + 1];
        program.answer(op::MODULE_LOAD, IMAGE_MISSING, &[]);
        program.answer(op::IMAGE_HAVE, 0, &[1]);
        program.answer(op::MODULE_LOAD, 0, &[]);
        let all = [op::MODULE_LOAD, op::IMAGE_DATA, op::IMAGE_DATA, op::IMAGE_HAVE, op::MODULE_LOAD];
        assert_eq!(load(&program, &long), (all.to_vec(), Ok(0)), "in pieces");
        program.answer(op::MODULE_LOAD, 0, &[]);
        assert_eq!(load(&program, &long), (vec![op::MODULE_LOAD], Ok(0)));
        let another = vec![0x53; SMALL + 1];
        program.answer(op::MODULE_LOAD, INVALID_IMAGE, &[]);
        assert_eq!(load(&program, &another).0, [op::MODULE_LOAD], "another process sent it");
        program.answer(op::MODULE_LOAD, 0, &[]);
        assert_eq!(load(&program, b"small"), (vec![op::IMAGE_DATA, op::MODULE_LOAD], Ok(0)));
        program.answer(op::MODULE_LOAD, 0, &[]);
        assert_eq!(load(&program, b"small"), (vec![op::MODULE_LOAD], Ok(0)));
        program.answer(op::MODULE_LOAD, IMAGE_MISSING, &[]);
        program.answer(op::IMAGE_HAVE, 0, &[1]);
        program.answer(op::MODULE_LOAD, 0, &[]);
        let again = [op::MODULE_LOAD, op::IMAGE_DATA, op::IMAGE_HAVE, op::MODULE_LOAD];
        assert_eq!(load(&program, b"small"), (again.to_vec(), Ok(0)), "the worker has forgotten it");
        let damaged = vec![0x54; SMALL + 1];
        program.answer(op::MODULE_LOAD, IMAGE_MISSING, &[]);
        program.answer(op::IMAGE_HAVE, 0, &[0]);
        assert_eq!(load(&program, &damaged).1, Err(INVALID_IMAGE));
    }

    #[test]
    fn a_server_of_an_earlier_release_is_asked_first() {
        let program = Program::alone();
        program.answer(op::IMAGE_HAVE, 0, &[0]);
        program.answer(op::IMAGE_HAVE, 0, &[1]);
        program.answer(op::MODULE_LOAD, 0, &[]);
        let all = [op::IMAGE_HAVE, op::IMAGE_DATA, op::IMAGE_HAVE, op::MODULE_LOAD];
        assert_eq!(load(&program, b"small"), (all.to_vec(), Ok(0)));
        program.answer(op::MODULE_LOAD, 0, &[]);
        assert_eq!(load(&program, b"small"), (vec![op::MODULE_LOAD], Ok(0)), "the process remembers");
        program.answer(op::IMAGE_HAVE, 0, &[1]);
        program.answer(op::MODULE_LOAD, 0, &[]);
        let all = vec![op::IMAGE_HAVE, op::MODULE_LOAD];
        assert_eq!(load(&program, b"other"), (all, Ok(0)), "another process sent it");
        program.answer(op::IMAGE_HAVE, 0, &[0]);
        program.answer(op::IMAGE_HAVE, 0, &[0]);
        assert_eq!(load(&program, b"damaged").1, Err(INVALID_IMAGE));
    }
}
