//! Reads numbers from images.

pub fn bytes_at<const N: usize>(image: &[u8], at: u64) -> Option<[u8; N]> {
    let at = usize::try_from(at).ok()?;
    image.get(at..at.checked_add(N)?)?.try_into().ok()
}

pub fn u16_at(image: &[u8], at: u64) -> Option<u16> {
    bytes_at(image, at).map(u16::from_le_bytes)
}

pub fn u32_at(image: &[u8], at: u64) -> Option<u32> {
    bytes_at(image, at).map(u32::from_le_bytes)
}

pub fn u64_at(image: &[u8], at: u64) -> Option<u64> {
    bytes_at(image, at).map(u64::from_le_bytes)
}

/// Returns the bytes of a part, if the image has all of them.
pub fn part(image: &[u8], offset: u64, size: u64) -> Option<&[u8]> {
    image.get(usize::try_from(offset).ok()?..usize::try_from(offset.checked_add(size)?).ok()?)
}

/// Returns the text at an offset up to its zero byte.
pub fn text_at(image: &[u8], at: usize) -> Option<&[u8]> {
    let tail = image.get(at..)?;
    tail.get(..tail.iter().position(|byte| *byte == 0)?)
}
