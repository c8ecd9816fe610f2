//! Pages of memory that the program has written, from the kernel's own books.
//!
//! Without them, each launch compares all managed memory. Linux 6.7 and newer note writes without a
//! fault handler (`UFFD_FEATURE_WP_ASYNC`), and `PAGEMAP_SCAN` returns and protects the written
//! pages at once. Where either fails, as on older kernels, in sandboxes, and for memory for which
//! the program has a `userfaultfd` of its own, all pages count as written.
//!
//! A device that writes to pinned pages is not noted. The pages of native managed memory move, and
//! cannot be a device's target either, so each scan of managed memory protects them again. A page
//! of pinned memory that was written counts as written, until it rests. [`crate::regions`] lets it
//! rest after a time without changes, if no descriptor lets a device write
//! ([`crate::descriptors`]).

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::window::PAGE;

/// Values of `linux/userfaultfd.h` and `linux/fs.h`.
mod abi {
    #[repr(C)]
    pub struct UffdioApi {
        pub api: u64,
        pub features: u64,
        pub ioctls: u64,
    }

    #[repr(C)]
    pub struct UffdioRegister {
        pub start: u64,
        pub len: u64,
        pub mode: u64,
        pub ioctls: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    pub struct PageRegion {
        pub start: u64,
        pub end: u64,
        pub categories: u64,
    }

    #[repr(C)]
    #[derive(Default)]
    pub struct PmScanArg {
        pub size: u64,
        pub flags: u64,
        pub start: u64,
        pub end: u64,
        pub walk_end: u64,
        pub vec: u64,
        pub vec_len: u64,
        pub max_pages: u64,
        pub category_inverted: u64,
        pub category_mask: u64,
        pub category_anyof_mask: u64,
        pub return_mask: u64,
    }

    pub const UFFD_API: u64 = 0xaa;
    pub const UFFD_USER_MODE_ONLY: libc::c_int = 1;
    pub const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
    pub const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
    pub const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
    pub const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
    pub const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
    pub const PAGE_IS_WRITTEN: u64 = 1 << 1;
    nix::ioctl_readwrite!(uffdio_api, 0xaa, 0x3f, UffdioApi);
    nix::ioctl_readwrite!(uffdio_register, 0xaa, 0x00, UffdioRegister);
    nix::ioctl_readwrite!(pagemap_scan, b'f', 16, PmScanArg);
}

/// Ranges of written pages that one call of the kernel returns.
const RANGES: usize = 64;

/// Descriptors of this process, open until it ends.
struct Books {
    uffd: OwnedFd,
    pagemap: File,
}

fn books() -> Option<&'static Books> {
    static BOOKS: OnceLock<Option<Books>> = OnceLock::new();
    BOOKS.get_or_init(open).as_ref()
}

fn open() -> Option<Books> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | abi::UFFD_USER_MODE_ONLY;
    // SAFETY: the call takes flags only.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if fd < 0 {
        return None;
    }
    // SAFETY: a new descriptor, which nothing else owns.
    let uffd = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
    let features = abi::UFFD_FEATURE_WP_ASYNC | abi::UFFD_FEATURE_WP_UNPOPULATED;
    let mut api = abi::UffdioApi { api: abi::UFFD_API, features, ioctls: 0 };
    // SAFETY: the structure is that of the call.
    unsafe { abi::uffdio_api(uffd.as_raw_fd(), &mut api) }.ok()?;
    Some(Books { uffd, pagemap: File::open("/proc/self/pagemap").ok()? })
}

/// Memory whose written pages the kernel notes.
pub struct Watch {
    /// Whether the kernel still answers for this memory.
    works: AtomicBool,
}

impl Watch {
    /// Lets the kernel note writes to whole pages; `None` where it cannot.
    ///
    /// The memory is anonymous, and stays watched until it is unmapped.
    pub fn new(pages: Range<usize>) -> Option<Self> {
        let books = books()?;
        let (start, len) = (pages.start as u64, pages.len() as u64);
        let mode = abi::UFFDIO_REGISTER_MODE_WP;
        let mut register = abi::UffdioRegister { start, len, mode, ioctls: 0 };
        // SAFETY: the structure is that of the call. Writes to the memory are noted and never wait.
        unsafe { abi::uffdio_register(books.uffd.as_raw_fd(), &mut register) }.ok()?;
        Some(Self { works: AtomicBool::new(true) })
    }

    /// Passes the pages that were written since the last call for them to `written`.
    ///
    /// Later writes count for the next call. `written` may get pages that were not written.
    pub fn take<E>(
        &self,
        pages: Range<usize>,
        written: impl FnMut(Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.scan(pages, true, written)
    }

    /// Passes the pages to `written` that were written since [`Watch::take`] took them.
    pub fn look<E>(
        &self,
        pages: Range<usize>,
        written: impl FnMut(Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.scan(pages, false, written)
    }

    /// Ends the watch: all pages count as written.
    pub fn give_up(&self) {
        self.works.store(false, Ordering::Relaxed);
    }

    /// Returns `true` unless all pages count as written.
    pub fn works(&self) -> bool {
        self.works.load(Ordering::Relaxed)
    }

    fn scan<E>(
        &self,
        pages: Range<usize>,
        protect: bool,
        mut written: impl FnMut(Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut next = pages.start;
        while next < pages.end && self.works() {
            let mut found = [abi::PageRegion::default(); RANGES];
            match scan(next..pages.end, protect, &mut found) {
                Some((count, end)) => {
                    next = end;
                    for region in &found[..count] {
                        written(region.start as usize..region.end as usize)?;
                    }
                }
                // The program has closed the descriptors, or has a `userfaultfd` of its own.
                None => self.give_up(),
            }
        }
        if next < pages.end { written(next..pages.end) } else { Ok(()) }
    }
}

/// Returns how many ranges of written pages it has found, and the end of the pages that it has
/// looked at.
///
/// With `protect`, the next scan does not find them again.
fn scan(pages: Range<usize>, protect: bool, found: &mut [abi::PageRegion]) -> Option<(usize, usize)> {
    let mut arg = abi::PmScanArg {
        size: size_of::<abi::PmScanArg>() as u64,
        flags: abi::PM_SCAN_CHECK_WPASYNC | if protect { abi::PM_SCAN_WP_MATCHING } else { 0 },
        start: pages.start as u64,
        end: pages.end as u64,
        vec: found.as_mut_ptr() as u64,
        vec_len: found.len() as u64,
        category_mask: abi::PAGE_IS_WRITTEN,
        return_mask: abi::PAGE_IS_WRITTEN,
        ..Default::default()
    };
    // SAFETY: the structure is that of the call, and the array has as many entries as it says. If
    // the program has put another file in the descriptor's place, that file knows no such request.
    let count = unsafe { abi::pagemap_scan(books()?.pagemap.as_raw_fd(), &mut arg) }.ok()? as usize;
    let end = arg.walk_end as usize;
    let sound = count <= found.len() && pages.start < end && end <= pages.end;
    let inside =
        |r: &abi::PageRegion| pages.start as u64 <= r.start && r.start <= r.end && r.end <= end as u64;
    (sound && found[..count].iter().all(inside)).then_some((count, end))
}

/// Returns the whole pages that contain these bytes.
pub fn around(address: usize, len: usize) -> Range<usize> {
    let page = PAGE as usize;
    address / page * page..(address + len).next_multiple_of(page)
}

#[cfg(test)]
mod tests {
    use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use super::*;

    const PAGES: usize = 1200;

    #[test]
    fn take_returns_each_written_page_once() {
        let len = PAGES * PAGE as usize;
        // SAFETY: a new mapping.
        let memory = unsafe {
            mmap_anonymous(
                None,
                len.try_into().unwrap(),
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_PRIVATE,
            )
        }
        .unwrap();
        let base = memory.as_ptr() as usize;
        let page = |i: usize| base + i * PAGE as usize;
        let write = |i: usize| {
            // SAFETY: inside the mapping.
            unsafe { (page(i) as *mut u8).write_volatile(1) }
        };
        let Some(watch) = Watch::new(base..base + len) else {
            // A kernel before 6.7, or a sandbox: all memory is compared.
            return;
        };
        let taken = |first: usize, count: usize| {
            let mut seen = Vec::new();
            let note = |pages: Range<usize>| {
                seen.extend((pages.start - base) / PAGE as usize..(pages.end - base) / PAGE as usize);
                Ok::<_, ()>(())
            };
            watch.take(page(first)..page(first + count), note).unwrap();
            seen
        };
        taken(0, PAGES);
        assert!(taken(0, PAGES).is_empty());
        write(7);
        for _ in 0..2 {
            let note = |pages: Range<usize>| {
                assert_eq!(pages, page(7)..page(8), "a look protects nothing");
                Ok::<_, ()>(())
            };
            watch.look(page(0)..page(PAGES), note).unwrap();
        }
        assert_eq!(taken(0, PAGES), [7]);
        (0..PAGES).step_by(3).for_each(write);
        assert_eq!(taken(600, 600), (600..PAGES).step_by(3).collect::<Vec<_>>());
        write(900);
        write(901);
        let mut expected: Vec<_> = (0..600).step_by(3).collect();
        expected.extend([900, 901]);
        assert_eq!(taken(0, PAGES), expected, "pages of a part and of the rest");
        // A system call of the program's writes, too.
        let mut pipe = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut pipe.1, &[7; 10]).unwrap();
        // SAFETY: inside the mapping, which nothing else uses now.
        let target = unsafe { std::slice::from_raw_parts_mut(page(5) as *mut u8, 10) };
        std::io::Read::read_exact(&mut pipe.0, target).unwrap();
        assert_eq!(taken(0, PAGES), [5]);
        // Another mapping in its place, as the program's own `userfaultfd` would be.
        // SAFETY: replaces the mapping of above only.
        let other = unsafe {
            mmap_anonymous(
                std::num::NonZeroUsize::new(base),
                len.try_into().unwrap(),
                ProtFlags::PROT_READ,
                MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED,
            )
        }
        .unwrap();
        assert_eq!(taken(0, 3), [0, 1, 2], "what the kernel does not answer for counts as written");
        // SAFETY: the mapping of above.
        unsafe { munmap(other, len) }.unwrap();
    }

    #[test]
    fn pages_are_whole() {
        let page = PAGE as usize;
        assert_eq!(around(page + 5, 1), page..2 * page);
        assert_eq!(around(page, page), page..2 * page);
        assert_eq!(around(page - 1, 2), 0..2 * page);
    }
}
