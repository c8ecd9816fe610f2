//! Attributes of launches (`CUlaunchAttribute`), as far as both ends look at them.

/// Bytes of a `CUlaunchAttribute`: id, padding, 64 bytes of value.
pub const ATTRIBUTE: usize = 72;

/// `CU_LAUNCH_ATTRIBUTE_*`
pub const COOPERATIVE: u32 = 2;
/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT`, whose value names an event.
pub const PROGRAMMATIC_EVENT: u32 = 7;
/// `CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT`, whose value names an event.
pub const COMPLETION_EVENT: u32 = 12;
/// `CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE`, which `libcuda.so.1` refuses.
pub const DEVICE_UPDATABLE: u32 = 13;

/// Returns id and first word of the value of each attribute; a part of one at the end is ignored.
pub fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u32, u64)> {
    let word = |bytes: &[u8]| bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    bytes.chunks_exact(ATTRIBUTE).map(move |attribute| (word(attribute) as u32, word(&attribute[8..])))
}

/// Returns the handles of the events that a launch with these attributes records.
pub fn events(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let records = |id| matches!(id, PROGRAMMATIC_EVENT | COMPLETION_EVENT);
    attributes(bytes).filter(move |(id, _)| records(*id)).map(|(_, event)| event)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launch_records_the_events_of_two_attributes() {
        let mut bytes = Vec::new();
        for (id, value) in [(PROGRAMMATIC_EVENT, 5u64), (8, 6), (COMPLETION_EVENT, 7)] {
            let mut attribute = [0; ATTRIBUTE];
            attribute[..4].copy_from_slice(&id.to_le_bytes());
            attribute[8..16].copy_from_slice(&value.to_le_bytes());
            bytes.extend(attribute);
        }
        assert_eq!(events(&bytes).collect::<Vec<_>>(), [5, 7]);
        assert_eq!(events(&bytes[..2 * ATTRIBUTE + 16]).collect::<Vec<_>>(), [5]);
    }
}
