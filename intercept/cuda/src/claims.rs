//! Addresses that the driver picks itself: variables of modules, memory of pools. When the program is first told of one, its own
//! process reserves the same addresses, so that nothing else can come to lie there. Where something lies already the program gets
//! an error that is counted: a copy that took one for the other would be wrong without a word.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::sys::mman::{ProtFlags, mprotect};

use crate::entry::{NOT_SUPPORTED, Result};
use crate::trace;
use crate::window::{self, PAGE};

/// What is reserved for one worker's driver. What another worker's driver has picked collides, too.
#[derive(Default)]
pub struct Claims {
    /// First byte to end. It stays so: the driver gives the same addresses out again.
    claimed: Mutex<BTreeMap<u64, u64>>,
    collisions: AtomicU64,
}

/// The pages that a range touches, as first byte and end.
fn pages(base: u64, size: u64) -> Result<(u64, u64)> {
    let end =
        base.checked_add(size).and_then(|end| end.checked_next_multiple_of(PAGE)).ok_or(NOT_SUPPORTED)?;
    Ok((base & !(PAGE - 1), end))
}

impl Claims {
    /// How many ranges of the driver's were refused.
    pub fn collisions(&self) -> u64 {
        self.collisions.load(Ordering::Relaxed)
    }

    /// Reserves a range that the driver has picked, unless it is reserved already.
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
            // Neighbours become one.
            let start = before.filter(|(_, until)| *until == at).map_or(at, |(start, _)| start);
            (at, until) = (until, claimed.remove(&until).unwrap_or(until));
            claimed.insert(start, until);
        }
        Ok(())
    }
}

/// Lets the program touch a range that was claimed.
pub fn open(base: u64, size: u64) -> Result {
    let (start, end) = pages(base, size)?;
    let pointer = NonNull::new(start as *mut _).ok_or(NOT_SUPPORTED)?;
    // SAFETY: pages that were reserved for this; what shares them keeps its contents.
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
        // SAFETY: opened just now.
        unsafe { (AT as *mut u64).write(7) };
        assert_eq!(claims.claim("a test", u64::MAX - 8, 100), Err(NOT_SUPPORTED));
    }
}
