//! Descriptors of processes.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Opens a pidfd of the process that has this number now.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes a pid and flags and touches no memory of ours.
    let fd = unsafe { nix::libc::syscall(nix::libc::SYS_pidfd_open, pid as nix::libc::c_int, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as nix::libc::c_int) })
}

/// Returns the process of a pidfd, 0 once it has been reaped; `None` for other descriptors.
pub fn pid_of(fd: &OwnedFd) -> Option<u32> {
    let mut text = String::new();
    File::open(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?.read_to_string(&mut text).ok()?;
    let pid: i64 = text.lines().find_map(|l| l.strip_prefix("Pid:"))?.trim().parse().ok()?;
    Some(u32::try_from(pid).unwrap_or(0))
}
