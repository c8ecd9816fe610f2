//! The party at the other end of a local socket: root, the server of a unit, or another.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};

use crate::pidfd::pidfd_open;

/// Control group of the server inside its unit.
const SUBGROUP: &str = "server";

/// Processes that a socket answers, beside those of root.
#[derive(Debug, Clone)]
pub struct Served {
    /// User of the server.
    pub uid: u32,
    /// Unit of the server; `None`: any process of that user.
    pub unit: Option<String>,
}

/// A process with a right to ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// One of root.
    Root,
    /// Main process of the unit; without a unit, any process of its user.
    Server,
}

impl Served {
    /// Returns the party at the other end, or why it has no right.
    pub fn peer(&self, socket: &UnixStream) -> io::Result<Result<Peer, String>> {
        let credentials = getsockopt(socket, sockopt::PeerCredentials)?;
        let (uid, pid) = (credentials.uid(), credentials.pid());
        if uid == 0 {
            return Ok(Ok(Peer::Root));
        }
        if uid != self.uid {
            return Ok(Err(format!("pid {pid} is of uid {uid}")));
        }
        let Some(unit) = &self.unit else { return Ok(Ok(Peer::Server)) };
        // From Linux 6.5 on without a race on reused pids.
        let pidfd = getsockopt(socket, sockopt::PeerPidfd).or_else(|_| pidfd_open(pid.unsigned_abs()))?;
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The process still exists, so that its number was of no other one.
        let mut exited = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        if poll(&mut exited, PollTimeout::ZERO)? != 0 {
            return Ok(Err(format!("pid {pid} has exited")));
        }
        match is_server(&groups, unit) && parent(&stat) == Some(1) {
            true => Ok(Ok(Peer::Server)),
            false => Ok(Err(format!("pid {pid} is not the main process of {unit}"))),
        }
    }
}

/// Returns `true` if `/proc/PID/cgroup` is of the server's own group in this unit.
///
/// Workers have groups of their own beside it. Before systemd 254, a unit has one group.
fn is_server(groups: &str, unit: &str) -> bool {
    let path = |line: &str| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        (controllers.is_empty() || controllers == "name=systemd").then(|| path.to_owned())
    };
    let ends = [format!("/{unit}"), format!("/{unit}/{SUBGROUP}")];
    let mut paths = groups.lines().filter_map(path).filter(|path| path != "/").peekable();
    paths.peek().is_some() && paths.all(|path| ends.iter().any(|end| path.ends_with(end)))
}

/// Returns the parent in `/proc/PID/stat`. systemd, with number 1, starts a unit's main process;
/// the server starts workers and helpers.
fn parent(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_and_helpers_are_told_from_the_server() {
        let unit = "gpuserver.service";
        for (groups, server) in [
            ("0::/system.slice/gpuserver.service/server\n", true),
            ("0::/system.slice/gpuserver.service\n", true),
            ("0::/system.slice/gpuserver.service/client-vm-1/worker-1\n", false),
            ("0::/system.slice/gpuserver.service/server/more\n", false),
            ("0::/system.slice/other.service\n", false),
            ("0::/user.slice/user-0.slice/session-1.scope\n", false),
            ("12:memory:/\n1:name=systemd:/system.slice/gpuserver.service\n0::/\n", true),
            ("1:name=systemd:/system.slice/other.service\n0::/system.slice/gpuserver.service\n", false),
            ("0::/\n", false),
            ("", false),
        ] {
            assert_eq!(is_server(groups, unit), server, "{groups}");
        }
        assert!(!is_server("0::/system.slice/gpuserver.service/server\n", "gpuserver@b.service"));
        assert_eq!(parent("7 (a) b) S 1 7 7 0"), Some(1));
        assert_eq!(parent("7 (gpuserver-worker) S 41 7 7 0"), Some(41));
        assert_eq!(parent(""), None);
    }
}
