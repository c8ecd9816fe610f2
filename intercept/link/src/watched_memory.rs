//! Writes to memory that a device, or another thread, may watch meanwhile.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

/// Writes bytes so that a watcher who sees them also sees what was written before.
///
/// It sees a whole aligned word or nothing of it, and other bytes in any order.
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
    // SAFETY: by the caller's promise; the source is ours.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
}

#[cfg(test)]
mod tests {
    use super::*;

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
        }
    }
}
