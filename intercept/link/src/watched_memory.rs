//! Memory that a device, or another thread, may watch or write meanwhile.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

/// Writes bytes so that a watcher who sees them also sees what was written before.
///
/// It sees each aligned word of 8 bytes as a whole or not at all: data and their flag can share a
/// word (NCCL). So it does a single shorter word. It sees other bytes in any order.
///
/// # Safety
/// The bytes from `address` on are writable, and no Rust reference covers them.
pub unsafe fn write(address: usize, bytes: &[u8]) {
    fence(Ordering::Release);
    macro_rules! word {
        ($atomic:ty, $word:ty) => {
            if let Ok(word) = bytes.try_into()
                && address.is_multiple_of(size_of::<$word>())
            {
                // SAFETY: by the caller's promise; just found to be aligned.
                let to = unsafe { <$atomic>::from_ptr(address as *mut $word) };
                return to.store(<$word>::from_ne_bytes(word), Ordering::Release);
            }
        };
    }
    word!(AtomicU64, u64);
    word!(AtomicU32, u32);
    word!(AtomicU16, u16);
    word!(AtomicU8, u8);
    let head = (address.next_multiple_of(size_of::<u64>()) - address).min(bytes.len());
    let (head, rest) = bytes.split_at(head);
    let (words, tail) = rest.as_chunks();
    let copy = |bytes: &[u8], to: usize| {
        // SAFETY: by the caller's promise; the source is ours.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
    };
    copy(head, address);
    let mut to = address + head.len();
    for word in words {
        // SAFETY: by the caller's promise; the address is that of an aligned word.
        unsafe { AtomicU64::from_ptr(to as *mut u64) }.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        to += size_of::<u64>();
    }
    copy(tail, to);
}

/// Reads bytes; each aligned word of 8 bytes is one that was there at a time.
///
/// # Safety
/// As many bytes as `to` has are readable from `address` on.
pub unsafe fn read(address: usize, to: &mut [u8]) {
    let head = (address.next_multiple_of(size_of::<u64>()) - address).min(to.len());
    let (head, rest) = to.split_at_mut(head);
    let (words, tail) = rest.as_chunks_mut();
    let copy = |from: usize, to: &mut [u8]| {
        // SAFETY: by the caller's promise; the target is ours.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
    };
    copy(address, head);
    let mut from = address + head.len();
    for word in words {
        // SAFETY: by the caller's promise; the address is that of an aligned word.
        *word = unsafe { AtomicU64::from_ptr(from as *mut u64) }.load(Ordering::Relaxed).to_ne_bytes();
        from += size_of::<u64>();
    }
    copy(from, tail);
}

/// Returns `true` if memory differs from `known`; bytes that change meanwhile count either way.
///
/// # Safety
/// As many bytes as `known` has are readable from `address` on.
pub unsafe fn differs(address: usize, known: &[u8]) -> bool {
    // The C function: a Rust reference would promise that its bytes stay as they are.
    // SAFETY: by the caller's promise; `known` is ours.
    unsafe { libc::memcmp(address as *const libc::c_void, known.as_ptr().cast(), known.len()) != 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_counts() {
        let known: Vec<u8> = (0..100).collect();
        let mut memory = known.clone();
        // SAFETY: inside the vector.
        assert!(!unsafe { differs(memory.as_ptr() as usize, &known) });
        for at in 0..memory.len() {
            memory[at] ^= 0x80;
            // SAFETY: as above.
            assert!(unsafe { differs(memory.as_ptr() as usize, &known) }, "{at}");
            memory[at] ^= 0x80;
        }
    }

    #[test]
    fn bytes_of_any_length_and_place_arrive() {
        let source: Vec<u8> = (1..=64).collect();
        for (at, len) in (0..17).flat_map(|at| (0..40).map(move |len| (at, len))) {
            let mut memory = [0u64; 8];
            // SAFETY: inside the array, which only this thread uses.
            unsafe { write(memory.as_mut_ptr() as usize + at, &source[..len]) };
            let written: Vec<u8> = memory.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let expected = [&vec![0; at][..], &source[..len], &vec![0; 64 - at - len]].concat();
            assert_eq!(written, expected, "{len} bytes at {at}");
            let mut back = vec![0; len];
            // SAFETY: as above.
            unsafe { read(memory.as_ptr() as usize + at, &mut back) };
            assert_eq!(back, source[..len], "{len} bytes at {at}");
        }
    }
}
