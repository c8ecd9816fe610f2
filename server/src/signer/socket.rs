//! The socket of the signer's own process, and the check of the processes that connect.

use std::fs;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use gpusession_proto::message;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};
use tracing::{debug, warn};

use super::keeper::{Caller, Keeper};
use super::link::receive;
use super::operation::{Operation, Outcome, Refused, Why};
use crate::pidfd::pidfd_open;

/// Bound on each read and write of a connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections at a time.
const MAX_CONNECTIONS: usize = 32;
/// Control group of the server inside its unit.
const SUBGROUP: &str = "server";

/// Processes that the signer answers, beside those of root.
#[derive(Debug, Clone)]
pub struct Served {
    /// User of the server.
    pub uid: u32,
    /// Unit of the server; `None`: any process of that user.
    pub unit: Option<String>,
}

/// An open connection; dropping it subtracts it.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Accepts connections until the process ends.
pub fn serve(listener: &UnixListener, keeper: &Arc<Keeper>, served: &Served) -> io::Result<()> {
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let (socket, _) = listener.accept()?;
        if open.load(Ordering::Relaxed) >= MAX_CONNECTIONS {
            warn!(
                "signer socket: refused a connection: {MAX_CONNECTIONS} others are open; the caller tries again"
            );
            continue;
        }
        open.fetch_add(1, Ordering::Relaxed);
        let (keeper, served, counted) = (keeper.clone(), served.clone(), Counted(open.clone()));
        let started = std::thread::Builder::new().name("connection".into()).spawn(move || {
            let _counted = counted;
            if let Err(e) = answer(socket, &keeper, &served) {
                debug!("connection closed: {e}");
            }
        });
        if let Err(e) = started {
            warn!("signer socket: refused a connection: no thread for it: {e}; the caller tries again");
        }
    }
}

fn answer(mut socket: UnixStream, keeper: &Keeper, served: &Served) -> io::Result<()> {
    socket.set_read_timeout(Some(IDLE_TIMEOUT))?;
    socket.set_write_timeout(Some(IDLE_TIMEOUT))?;
    let outcome: Outcome = match caller(&socket, served)? {
        Ok(caller) => match receive::<Operation>(&mut socket) {
            Ok(operation) => keeper.perform(caller, operation),
            Err(e) if e.kind() == io::ErrorKind::Other => {
                Err(Refused::new(Why::Request, format!("the signer does not know this request: {e}")))
            }
            Err(e) => return Err(e),
        },
        Err(why) => {
            warn!("signer socket: refused a caller: {why}");
            let text =
                format!("the signer answers root and the server alone: {why}; run the command as root");
            Err(Refused::new(Why::Right, text))
        }
    };
    let bytes = message::encode(&outcome);
    socket.write_all(&bytes)
}

/// Returns the party at the other end, or why it has no right.
fn caller(socket: &UnixStream, served: &Served) -> io::Result<Result<Caller, String>> {
    let credentials = getsockopt(socket, sockopt::PeerCredentials)?;
    let (uid, pid) = (credentials.uid(), credentials.pid());
    if uid == 0 {
        return Ok(Ok(Caller::Root));
    }
    if uid != served.uid {
        return Ok(Err(format!("pid {pid} is of uid {uid}")));
    }
    let Some(unit) = &served.unit else { return Ok(Ok(Caller::Server)) };
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
        true => Ok(Ok(Caller::Server)),
        false => Ok(Err(format!("pid {pid} is not the main process of {unit}"))),
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
