//! Addresses of device memory.

use std::collections::BTreeMap;

/// Granularity of mapped memory, in bytes.
pub const GRANULARITY: u64 = 2 << 20;
/// Granularity of other device memory, in bytes.
pub const SMALL: u64 = 512;

/// Free address ranges of one window.
pub struct Arena {
    start: u64,
    end: u64,
    free: BTreeMap<u64, u64>,
}

impl Arena {
    pub fn new(start: u64, size: u64) -> Arena {
        Arena { start, end: start + size, free: BTreeMap::from([(start, size)]) }
    }

    /// Takes a range, whose beginning fits its size.
    pub fn alloc(&mut self, size: u64) -> Option<u64> {
        let align = if size >= GRANULARITY { GRANULARITY } else { SMALL };
        let size = size.next_multiple_of(SMALL);
        let (start, len, at) = self.free.iter().find_map(|(&start, &len)| {
            let at = start.next_multiple_of(align);
            (at + size <= start + len).then_some((start, len, at))
        })?;
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        if start + len > at + size {
            self.free.insert(at + size, start + len - at - size);
        }
        Some(at)
    }

    pub fn release(&mut self, at: u64, size: u64) {
        let (mut at, mut size) = (at, size.next_multiple_of(SMALL));
        if let Some((&before, &len)) = self.free.range(..at).next_back()
            && before + len == at
        {
            self.free.remove(&before);
            (at, size) = (before, size + len);
        }
        if let Some(len) = self.free.remove(&(at + size)) {
            size += len;
        }
        self.free.insert(at, size);
    }

    pub fn holds(&self, at: u64) -> bool {
        (self.start..self.end).contains(&at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_merge_what_is_freed() {
        let mut a = Arena::new(GRANULARITY, 4 * GRANULARITY);
        let (x, y) = (a.alloc(100).unwrap(), a.alloc(GRANULARITY).unwrap());
        assert_eq!((x, y), (GRANULARITY, 2 * GRANULARITY));
        a.release(x, 100);
        a.release(y, GRANULARITY);
        assert_eq!(a.free, BTreeMap::from([(GRANULARITY, 4 * GRANULARITY)]));
    }
}
