//! The processes at the other end of a socket, and the socket files.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::{UnixListener, UnixStream};

/// The process at the other end of a connection, according to the kernel.
pub struct Peer {
    /// Effective uid when the process connected.
    pub uid: u32,
    /// Pid in this namespace; 0 for a process of another one.
    pub pid: u32,
    /// Descriptor of the process; `None` if it exited, or the kernel has none.
    pub pidfd: Option<OwnedFd>,
}

/// A socket file that is removed when dropped.
pub struct SocketFile(pub PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Binds a listening socket at `path`; replaces a stale file, but not a socket that accepts
/// connections.
pub fn bind(path: &Path, mode: u32) -> io::Result<(UnixListener, SocketFile)> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another daemon listens on this socket"));
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    Ok((listener, SocketFile(path.to_owned())))
}

/// Registers a pidfd, which becomes readable when its process exits.
pub fn watched(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd gives the same open descriptor for as long as the AsyncFd owns it.
    Ok(unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?)
}

/// Returns the process at the other end.
///
/// It is the process that connected, even if others inherited the connection.
pub fn peer(stream: &UnixStream) -> io::Result<Peer> {
    let credentials = getsockopt(stream, sockopt::PeerCredentials)?;
    let pid = u32::try_from(credentials.pid()).unwrap_or(0);
    // From Linux 6.5 on without a race on reused pids.
    let pidfd = match getsockopt(stream, sockopt::PeerPidfd) {
        Ok(fd) => Some(fd),
        Err(_) if pid > 0 => pidfd_open(pid).ok(),
        Err(_) => None,
    };
    Ok(Peer { uid: credentials.uid(), pid, pidfd })
}

/// Returns the paths of a process's control groups, in all hierarchies.
///
/// A pid alone may already belong to another process, so there are none without a pidfd, and none
/// of a process that has exited.
pub fn control_groups(pid: u32, pidfd: Option<&OwnedFd>) -> Vec<String> {
    let Some(pidfd) = pidfd else { return Vec::new() };
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let mut exited = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    match poll(&mut exited, PollTimeout::ZERO) {
        Ok(0) => paths_of_groups(&text),
        _ => Vec::new(),
    }
}

/// Returns `true` if a process is in a pid namespace below this one, as those of containers are,
/// and if that is unknown.
///
/// Its mount namespace is visible only to those who may trace it. The pidfd's own file, unlike
/// those of the process, is readable where `hidepid` hides processes.
pub fn is_contained(pidfd: Option<&OwnedFd>) -> bool {
    let Some(pidfd) = pidfd else { return true };
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()));
    info.map_or(true, |text| has_namespaces_of_its_own(&text))
}

/// Reads the line `NSpid: PID...` about a pidfd: a pid for each namespace from this one on, or -1
/// of a process that has exited.
fn has_namespaces_of_its_own(info: &str) -> bool {
    let pids = info.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    !matches!(pids.split_whitespace().collect::<Vec<_>>()[..], [pid] if pid != "-1" && pid != "0")
}

/// Reads lines `HIERARCHY:CONTROLLERS:PATH` of `/proc/PID/cgroup`, of version 1 and version 2.
fn paths_of_groups(text: &str) -> Vec<String> {
    let mut paths: Vec<_> =
        text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).map(str::to_owned).collect();
    paths.sort_unstable();
    paths.dedup();
    paths
}

/// Returns whether a process has a thread of this name.
pub fn has_thread(pid: u32, name: &str) -> io::Result<bool> {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may end meanwhile.
        let is = std::fs::read_to_string(thread?.path().join("comm"));
        if is.is_ok_and(|comm| comm.trim_end() == name) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Opens a pidfd of the process that has this pid now.
///
/// The caller waits for its answer, so it is the process that connected. If it exited meanwhile,
/// the connection's end shows that.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes a pid and flags, and no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::c_int, 0) };
    let fd = libc::c_int::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, and no other owner exists.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_groups_of_both_versions_are_read() {
        let hybrid = "9:name=systemd:/a/b\n4:cpu,cpuacct:/job_1\n3:freezer:/job_1\n0::/x:y/z\n";
        assert_eq!(paths_of_groups(hybrid), ["/a/b", "/job_1", "/x:y/z"]);
        assert_eq!(paths_of_groups("0::/system.slice/slurmstepd.scope/job_7/step_0\n").len(), 1);
        assert!(paths_of_groups("garbage\n\n").is_empty());
    }

    #[test]
    fn a_container_is_told_by_its_pid_namespace() {
        let status = "pos:\t0\nPid:\t71\nNSpid:\t71\n";
        assert!(!has_namespaces_of_its_own(status));
        assert!(has_namespaces_of_its_own(&status.replace("NSpid:\t71", "NSpid:\t71\t1")));
        assert!(has_namespaces_of_its_own("pos:\t0\n"), "unknown");
        assert!(has_namespaces_of_its_own("Pid:\t-1\nNSpid:\t-1\n"), "it has exited");
        let pidfd = pidfd_open(std::process::id()).unwrap();
        assert!(!is_contained(Some(&pidfd)));
        assert!(is_contained(None), "unknown");
        if nix::unistd::geteuid().is_root() {
            let mut container = std::process::Command::new("unshare")
                .args(["--pid", "--fork", "--kill-child", "sleep", "60"])
                .spawn()
                .unwrap();
            let list = format!("/proc/{0}/task/{0}/children", container.id());
            let first = || std::fs::read_to_string(&list).unwrap().trim().parse::<u32>().ok();
            let inside = std::iter::repeat_with(first).flatten().next().unwrap();
            assert!(is_contained(Some(&pidfd_open(inside).unwrap())));
            assert!(!is_contained(Some(&pidfd_open(container.id()).unwrap())), "outside of it");
            container.kill().unwrap();
            container.wait().unwrap();
        }
    }

    #[test]
    fn only_a_process_that_runs_has_control_groups() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pidfd = pidfd_open(child.id()).unwrap();
        assert!(!control_groups(child.id(), Some(&pidfd)).is_empty());
        assert!(control_groups(child.id(), None).is_empty());
        drop(child.stdin.take());
        child.wait().unwrap();
        // Another process of that pid would not count.
        assert!(control_groups(std::process::id(), Some(&pidfd)).is_empty());
    }
}
