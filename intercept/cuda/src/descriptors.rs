//! Judgement about a process's descriptors: may a device write to its memory behind its back?
//!
//! The kernel pins pages for direct I/O, RDMA and shared rings, and a device writes to them without
//! a page fault. Then the kernel's notes of written pages lack its changes. Each such way begins
//! with a descriptor of the process. The list has the harmless ones: an unknown one is harmful.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileTypeExt as _;

/// Beginnings of the targets of `/proc/self/fd` that have no file, and of devices.
const HARMLESS: [&[u8]; 19] = [
    b"pipe:[",
    b"anon_inode:[eventpoll]",
    b"anon_inode:[eventfd]",
    b"anon_inode:[timerfd]",
    b"anon_inode:[signalfd]",
    b"anon_inode:[userfaultfd]",
    b"anon_inode:[pidfd]",
    b"anon_inode:inotify",
    b"anon_inode:[perf_event]",
    b"pidfd:",
    b"/dev/null",
    b"/dev/zero",
    b"/dev/full",
    b"/dev/random",
    b"/dev/urandom",
    b"/dev/console",
    b"/dev/ptmx",
    b"/dev/tty",
    b"/dev/pts/",
];

/// Returns `true` if no descriptor of this process lets a device write to pinned memory.
pub fn harmless() -> bool {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else { return false };
    for entry in entries {
        let Some(fd) = entry.ok().and_then(|entry| entry.file_name().to_str()?.parse::<RawFd>().ok()) else {
            return false;
        };
        match is_harmless(fd) {
            // Another thread has closed it.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Ok(true) => {}
            _ => return false,
        }
    }
    // Rings of `io_setup` have no descriptor.
    !has_ring().unwrap_or(true)
}

fn is_harmless(fd: RawFd) -> std::io::Result<bool> {
    let place = format!("/proc/self/fd/{fd}");
    let target = fs::read_link(&place)?;
    let target = target.as_os_str().as_bytes();
    if HARMLESS.iter().any(|start| target.starts_with(start)) {
        return Ok(true);
    }
    let kind = fs::metadata(&place)?.file_type();
    if kind.is_socket() {
        return Ok(matches!(
            domain(fd),
            Some(libc::AF_UNIX | libc::AF_INET | libc::AF_INET6 | libc::AF_NETLINK)
        ));
    }
    // An object of the kernel without a type of file, such as a ring of io_uring, is unknown.
    if target.starts_with(b"anon_inode:") || !(kind.is_file() || kind.is_dir() || kind.is_fifo()) {
        return Ok(false);
    }
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{fd}"))?;
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| libc::c_int::from_str_radix(flags.trim(), 8).ok());
    Ok(flags.is_some_and(|flags| flags & libc::O_DIRECT == 0))
}

/// Returns a socket's address family.
fn domain(fd: RawFd) -> Option<libc::c_int> {
    let (mut domain, mut len) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    let to = (&raw mut domain).cast();
    // SAFETY: `to` has the length that the call gets. The call fails for another descriptor.
    let done = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_DOMAIN, to, &mut len) };
    (done == 0).then_some(domain)
}

fn has_ring() -> std::io::Result<bool> {
    let mut maps = BufReader::new(fs::File::open("/proc/self/maps")?);
    let mut line = Vec::new();
    while maps.read_until(b'\n', &mut line)? > 0 {
        if line.windows(6).any(|part| part == b"/[aio]") {
            return Ok(true);
        }
        line.clear();
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::os::fd::{FromRawFd as _, OwnedFd};
    use std::os::unix::fs::OpenOptionsExt as _;

    use super::*;

    #[test]
    fn direct_io_and_rings_are_harmful() {
        // Of this test only: other tests open what they like.
        let good = |fd: &dyn std::os::fd::AsRawFd| is_harmless(fd.as_raw_fd()).unwrap();
        let name = std::env::temp_dir().join(format!("descriptors-{}", std::process::id()));
        let file = fs::File::create(&name).unwrap();
        assert!(good(&file));
        if let Ok(direct) = fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(&name) {
            assert!(!good(&direct));
        }
        fs::remove_file(&name).unwrap();
        assert!(good(&file), "a deleted file");
        assert!(good(&std::net::UdpSocket::bind("127.0.0.1:0").unwrap()));
        assert!(good(&std::io::pipe().unwrap().0));
        assert!(good(&fs::File::open("/dev/null").unwrap()) && good(&fs::File::open("/").unwrap()));
        assert!(!good(&fs::File::open("/dev/fuse").or_else(|_| fs::File::open("/dev/mem")).unwrap()));
        let mut parameters = [0u8; 120];
        // SAFETY: the call fills 120 bytes of parameters.
        let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        if ring >= 0 {
            // SAFETY: a new descriptor, which nothing else owns.
            let ring = unsafe { OwnedFd::from_raw_fd(ring as RawFd) };
            assert!(!good(&ring));
        }
    }

    #[test]
    fn rings_without_descriptors_are_found() {
        assert!(!has_ring().unwrap());
        let mut context = 0usize;
        // SAFETY: the call stores a context's address.
        if unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) } == 0 {
            assert!(has_ring().unwrap() && !harmless());
            // SAFETY: the context of above, which has no requests.
            unsafe { libc::syscall(libc::SYS_io_destroy, context) };
        }
    }
}
