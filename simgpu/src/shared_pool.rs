//! Pools whose memory other processes of the machine use.
//!
//! The memory of such a pool is one file, whose descriptor is the pool's handle. Each allocation is
//! a part of the file behind a page of its own, which tells whether the allocation lives.

use crate::errors::{self, OUT_OF_MEMORY, Result, UNKNOWN};
use crate::ipc;
use parking_lot::Mutex;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"simgpup\x01";
const PAGE: u64 = 4096;

/// `CUmemPoolPtrExportData`
pub type ExportData = [u8; 64];

/// A part of a pool's file: its first byte, and the bytes that were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub at: u64,
    pub size: u64,
}

impl Part {
    /// Returns the bytes of the whole pages.
    pub fn pages(&self) -> u64 {
        self.size.next_multiple_of(PAGE)
    }
}

/// The file of a pool.
pub struct SharedPool {
    file: File,
    /// Number of the file, which data about its parts repeats.
    pub number: u64,
    /// Whether another process has created the pool.
    pub imported: bool,
    /// End of the last part; no part comes to lie where another one was.
    end: Mutex<u64>,
}

impl SharedPool {
    /// Creates a pool on a device, which is given by its number in the machine.
    pub fn create(card: u32) -> Result<Arc<Self>> {
        let file = ipc::file()?;
        file.set_len(PAGE).map_err(|_| OUT_OF_MEMORY)?;
        let header = [MAGIC.as_slice(), &card.to_le_bytes()].concat();
        file.write_all_at(&header, 0).map_err(|_| OUT_OF_MEMORY)?;
        Self::of(file, false)
    }

    /// Opens another process's pool; also returns the number of its device in the machine.
    pub fn import(file: File) -> Result<(Arc<Self>, u32)> {
        let mut header = [0; 12];
        file.read_exact_at(&mut header, 0).map_err(|_| UNKNOWN)?;
        let (magic, card) = header.split_at(MAGIC.len());
        let card = card.try_into().map(u32::from_le_bytes).map_err(|_| UNKNOWN)?;
        if magic != MAGIC {
            return Err(UNKNOWN);
        }
        Ok((Self::of(file, true)?, card))
    }

    fn of(file: File, imported: bool) -> Result<Arc<Self>> {
        let number = file.metadata().map_err(|_| errors::OPERATING_SYSTEM)?.ino();
        Ok(Arc::new(Self { file, number, imported, end: Mutex::new(PAGE) }))
    }

    /// Returns a new descriptor of the pool.
    pub fn descriptor(&self) -> Result<File> {
        self.file.try_clone().map_err(|_| errors::OPERATING_SYSTEM)
    }

    /// Makes room for an allocation.
    pub fn take(&self, size: u64) -> Result<Part> {
        let mut end = self.end.lock();
        let part = Part { at: *end + PAGE, size };
        self.file.set_len(part.at + part.pages()).map_err(|_| OUT_OF_MEMORY)?;
        self.file.write_all_at(&size.to_le_bytes(), *end).map_err(|_| OUT_OF_MEMORY)?;
        *end = part.at + part.pages();
        Ok(part)
    }

    /// Ends an allocation, and frees its pages.
    pub fn give(&self, part: Part) {
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the descriptor is open; no memory is involved.
        unsafe {
            libc::fallocate(
                self.file.as_raw_fd(),
                hole,
                (part.at - PAGE) as i64,
                (PAGE + part.pages()) as i64,
            )
        };
    }

    /// Maps a part.
    pub fn map(&self, part: Part) -> Result<*mut u8> {
        ipc::map_part(&self.file, part.at, part.pages() as usize).ok_or(OUT_OF_MEMORY)
    }

    /// Describes a part for other processes.
    pub fn data(&self, part: Part) -> ExportData {
        let mut data = [0; 64];
        data[..8].copy_from_slice(MAGIC);
        data[8..16].copy_from_slice(&self.number.to_le_bytes());
        data[16..24].copy_from_slice(&part.at.to_le_bytes());
        data[24..32].copy_from_slice(&part.size.to_le_bytes());
        data
    }

    /// Finds the part that data describes; `None`: it is of another pool, or no longer exists.
    pub fn find(&self, data: &ExportData) -> Option<Part> {
        let long = |at: usize| Some(u64::from_le_bytes(data[at..at + 8].try_into().ok()?));
        let part = Part { at: long(16)?, size: long(24)? };
        let known = data[..8] == *MAGIC && long(8)? == self.number && part.at >= 2 * PAGE;
        let mut alive = [0; 8];
        self.file.read_exact_at(&mut alive, part.at.checked_sub(PAGE).filter(|_| known)?).ok()?;
        let placed = part.at.is_multiple_of(PAGE) && part.size > 0;
        (placed && u64::from_le_bytes(alive) == part.size).then_some(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_names_one_part_of_one_pool_while_it_lives() {
        let pool = SharedPool::create(3).unwrap();
        let (first, second) = (pool.take(10).unwrap(), pool.take(PAGE + 1).unwrap());
        assert_eq!((first.at, second.at, second.pages()), (2 * PAGE, 4 * PAGE, 2 * PAGE));
        let (other, card) = SharedPool::import(pool.descriptor().unwrap()).unwrap();
        assert_eq!((card, other.number, other.imported), (3, pool.number, true));
        let data = pool.data(second);
        assert_eq!((other.find(&pool.data(first)), other.find(&data)), (Some(first), Some(second)));
        for at in 0..32 {
            let mut changed = data;
            changed[at] ^= 1;
            assert_eq!(other.find(&changed), None, "byte {at}");
        }
        pool.give(first);
        assert_eq!((other.find(&pool.data(first)), other.find(&data)), (None, Some(second)));
        let stranger = SharedPool::create(3).unwrap();
        stranger.take(10).unwrap();
        assert_eq!(stranger.find(&pool.data(first)), None);
        assert!(SharedPool::import(ipc::file().unwrap()).is_err());
    }
}
