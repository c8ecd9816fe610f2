//! Addresses that the driver chooses itself: variables of modules, memory of pools.
//!
//! When the program first learns such an address, the process reserves the same range, so that no
//! other memory can come to lie there. If the process has memory there already, the call fails and
//! the collision is counted. Otherwise a copy could silently take host memory for device memory.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::sys::mman::{ProtFlags, mprotect};

use crate::status::{NOT_SUPPORTED, Result};
use crate::trace;
use crate::window::{self, PAGE};

/// Ranges that the process has reserved for one worker's driver.
///
/// A range that another worker's driver has chosen collides, too.
#[derive(Default)]
pub struct Claims {
    /// End of each range, by first byte. A range stays, because the driver uses its addresses
    /// again.
    claimed: Mutex<BTreeMap<u64, u64>>,
    collisions: AtomicU64,
}

/// Returns the first byte and the end of the pages that a range touches.
fn pages(base: u64, size: u64) -> Result<(u64, u64)> {
    let end =
        base.checked_add(size).and_then(|end| end.checked_next_multiple_of(PAGE)).ok_or(NOT_SUPPORTED)?;
    Ok((base & !(PAGE - 1), end))
}

impl Claims {
    /// Number of the driver's ranges that were refused.
    pub fn collisions(&self) -> u64 {
        self.collisions.load(Ordering::Relaxed)
    }

    /// Reserves the pages of a range that the driver has chosen, except those that are reserved
    /// already.
    pub fn claim(&self, what: &str, base: u64, size: u64) -> Result {
        let (mut at, end) = pages(base, size)?;
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        while at < end {
            let before = claimed.range(..=at).next_back().map(|(start, end)| (*start, *end));
            if let Some((_, until)) = before.filter(|(_, until)| *until > at) {
                at = until;
                continue;
            }
            let mut until = claimed.range(at..end).next().map_or(end, |(next, _)| *next);
            if !window::reserve(at, until - at) {
                self.collisions.fetch_add(1, Ordering::Relaxed);
                trace::why(&format!(
                    "the driver has put {what} at {base:#x} ({size} bytes), where the program has other memory"
                ));
                return Err(NOT_SUPPORTED);
            }
            // Merges adjacent ranges.
            let start = before.filter(|(_, until)| *until == at).map_or(at, |(start, _)| start);
            (at, until) = (until, claimed.remove(&until).unwrap_or(until));
            claimed.insert(start, until);
        }
        Ok(())
    }
}

/// Gives the program access to a claimed range.
pub fn open(base: u64, size: u64) -> Result {
    let (start, end) = pages(base, size)?;
    let pointer = NonNull::new(start as *mut _).ok_or(NOT_SUPPORTED)?;
    // SAFETY: `claim` reserved these pages for the driver's range, so they are ours. Variables that
    // share a page keep their contents.
    unsafe { mprotect(pointer, (end - start) as usize, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE) }
        .map_err(|_| NOT_SUPPORTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_meet_and_collide() {
        const AT: u64 = 0x1000_0000_0000;
        let (claims, others) = (Claims::default(), Claims::default());
        assert_eq!(claims.claim("a test", AT + 2 * PAGE + 8, 8), Ok(()));
        assert_eq!(claims.claim("a test", AT + 100, 3 * PAGE), Ok(()), "around one that is there");
        assert_eq!(claims.claimed.lock().unwrap().get(&AT), Some(&(AT + 4 * PAGE)), "one range, whole pages");
        assert_eq!(claims.claim("a test", AT, 4 * PAGE), Ok(()), "again");
        assert!(window::reserve(AT + 5 * PAGE, PAGE), "the program's own memory");
        assert_eq!(claims.claim("a test", AT + 4 * PAGE, 2 * PAGE), Err(NOT_SUPPORTED));
        assert_eq!(claims.claim("a test", AT + 4 * PAGE, PAGE), Ok(()), "up to it");
        assert_eq!(others.claim("a test", AT, PAGE), Err(NOT_SUPPORTED), "another worker's");
        assert_eq!((claims.collisions(), others.collisions()), (1, 1));
        assert_eq!(open(AT, PAGE), Ok(()));
        // SAFETY: `open` has just made this page readable and writable.
        unsafe { (AT as *mut u64).write(7) };
        assert_eq!(claims.claim("a test", u64::MAX - 8, 100), Err(NOT_SUPPORTED));
    }
}
