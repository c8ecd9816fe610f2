//! Memory of pools that the program has freed in a stream's order, and that the worker does not
//! know of yet.
//!
//! The next allocation of that size, pool and stream gets such a block without a round trip; the
//! stream's order is the same. Before each call that waits, the worker frees the blocks, so that no
//! limit, attribute or other allocation misses them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Most blocks of one client.
const MAX_BLOCKS: usize = 64;

/// A freed block; the program may no longer use its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Context and handle of the stream in whose order the program has freed it.
    pub stream: (u64, u64),
    /// Pool of the memory, as [`crate::ranges::Kind::Pool`] names it.
    pub pool: u64,
    /// Bytes that the program requested.
    pub size: u64,
    pub base: u64,
}

/// The freed blocks of one client.
#[derive(Default)]
pub struct FreedBlocks {
    blocks: Mutex<Vec<Block>>,
    /// Number of blocks, to be read without the lock.
    count: AtomicUsize,
}

impl FreedBlocks {
    fn lock(&self) -> MutexGuard<'_, Vec<Block>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `true` if there is none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    /// Adds a block; `false` if there are too many.
    pub fn add(&self, block: Block) -> bool {
        let mut blocks = self.lock();
        if blocks.len() == MAX_BLOCKS {
            return false;
        }
        blocks.push(block);
        self.count.store(blocks.len(), Ordering::SeqCst);
        true
    }

    /// Takes the block that was freed last among those for an allocation; returns its address.
    pub fn take(&self, stream: (u64, u64), pool: u64, size: u64) -> Option<u64> {
        if self.is_empty() {
            return None;
        }
        let mut blocks = self.lock();
        let fits = |b: &Block| (b.stream, b.pool, b.size) == (stream, pool, size);
        let block = blocks.iter().rposition(fits).map(|place| blocks.remove(place))?;
        self.count.store(blocks.len(), Ordering::SeqCst);
        Some(block.base)
    }

    /// Removes all blocks, each of them by `free`; an error stops there.
    ///
    /// Until the return, other threads find blocks, and wait: none of them may destroy a stream
    /// before the frames that name it are appended.
    pub fn free_all<E>(&self, mut free: impl FnMut(Block) -> Result<(), E>) -> Result<(), E> {
        let mut blocks = self.lock();
        let result = blocks.drain(..).try_for_each(&mut free);
        self.count.store(0, Ordering::SeqCst);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: (u64, u64) = (1, 2);

    fn block(base: u64) -> Block {
        Block { stream: STREAM, pool: 3, size: 64, base }
    }

    #[test]
    fn block_goes_to_an_allocation_alike() {
        let freed = FreedBlocks::default();
        assert!(
            freed.is_empty() && freed.add(block(0x1000)) && freed.add(block(0x2000)) && !freed.is_empty()
        );
        for (stream, pool, size) in [((1, 9), 3, 64), ((9, 2), 3, 64), (STREAM, 4, 64), (STREAM, 3, 65)] {
            assert_eq!(freed.take(stream, pool, size), None);
        }
        assert_eq!(freed.take(STREAM, 3, 64), Some(0x2000), "the last one");
        assert_eq!(freed.take(STREAM, 3, 64), Some(0x1000));
        assert_eq!(freed.take(STREAM, 3, 64), None);
        assert!(freed.is_empty());
    }

    #[test]
    fn number_of_blocks_is_bounded() {
        let freed = FreedBlocks::default();
        let added = (0..2 * MAX_BLOCKS as u64).filter(|base| freed.add(block(*base))).count();
        assert_eq!(added, MAX_BLOCKS);
        let mut freed_now = 0;
        let mut free = |_| {
            freed_now += 1;
            assert!(!freed.is_empty(), "other threads wait until all are freed");
            Ok::<(), ()>(())
        };
        freed.free_all(&mut free).unwrap();
        freed.free_all(&mut free).unwrap();
        assert_eq!(freed_now, MAX_BLOCKS);
        assert!(freed.is_empty() && freed.add(block(1)));
        assert_eq!(freed.free_all(|_| Err(9)), Err(9));
        assert!(freed.is_empty(), "without a link there is nothing to free");
    }
}
