//! The login socket, on which `pam_gpusession.so` reports the begin and end of sessions.
//!
//! Only root may use it. The answer comes from memory: it waits neither for a server nor for a slow
//! user database.
//!
//! A session lasts as long as its leaders, the processes that opened it, which pidfds watch. The
//! close that PAM promises only reports an end sooner. A session has several leaders if its user
//! logs in again inside a session of logind, as by `su` in two panes of a terminal multiplexer.
//!
//! Sessions are stored below the runtime directory, so that the next daemon knows those that are
//! still open.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Duration;

use gpusession_proto::journal::Event;
use gpusession_proto::login::{MAX_REQUEST, Open, Reply, Request};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt as _;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tracing::{debug, info, warn};

use crate::access::Gate;
use crate::environment::Audience;
use crate::leases::{Leases, Session};
use crate::peer::{self, Peer, SocketFile};

/// Time to send a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that the user database may take; the login waits meanwhile.
const LOOKUP_TIMEOUT: Duration = Duration::from_millis(100);
/// Most logins that are served at the same time; others wait in the socket's backlog.
const MAX_CONNECTIONS: usize = 32;
/// Most leaders of sessions.
const MAX_SESSIONS: usize = 4096;
/// Characters of session ids.
const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// A process that opened a session: its pid and its start in clock ticks since boot.
type Leader = (u32, u64);

struct OpenSession {
    session: Arc<Session>,
    /// Processes that still run, with their watches; the session ends with the last.
    leaders: BTreeMap<Leader, AbortHandle>,
}

/// Stored form of a session.
#[derive(Serialize, Deserialize)]
struct SessionRecord {
    #[serde(flatten)]
    session: Session,
    #[serde(default)]
    leaders: Vec<Leader>,
}

/// The sessions that are open now.
pub struct Sessions {
    leases: Arc<dyn Leases>,
    folder: PathBuf,
    known: Mutex<BTreeMap<String, OpenSession>>,
}

impl Sessions {
    /// Restores the sessions from `folder` whose leaders still run.
    ///
    /// Must be called on a runtime.
    pub fn restore(leases: Arc<dyn Leases>, folder: &Path) -> Arc<Self> {
        let sessions = Arc::new(Self { leases, folder: folder.to_owned(), known: Mutex::default() });
        if let Err(error) = std::fs::create_dir_all(folder) {
            warn!("{}: cannot create: {error}; sessions are lost when the daemon restarts", folder.display());
            return sessions;
        }
        for path in std::fs::read_dir(folder).into_iter().flatten().filter_map(|e| Some(e.ok()?.path())) {
            let read = || serde_json::from_slice::<SessionRecord>(&std::fs::read(&path).ok()?).ok();
            let there = |leader: Leader| {
                let pidfd = peer::pidfd_open(leader.0).ok()?;
                // In this order, the pidfd is known to belong to the process whose start is read.
                (start_of(leader.0)? == leader.1).then_some((leader, pidfd))
            };
            let written = read().map(|SessionRecord { session, mut leaders }| {
                leaders.push((session.leader, session.leader_start));
                leaders.sort_unstable();
                leaders.dedup();
                (session, leaders.into_iter().filter_map(there).collect::<Vec<_>>())
            });
            match written {
                Some((session, leaders)) if !leaders.is_empty() => drop(sessions.add(session, leaders)),
                _ => drop(std::fs::remove_file(&path)),
            }
        }
        sessions
    }

    /// Finds the session of a process: that of its cgroup, else the one with the id `hint`.
    ///
    /// `hint` is the process's `GPUSESSION_ID`. Only sessions of the process's own user count.
    pub fn for_process(&self, uid: u32, pid: u32, hint: Option<&str>) -> Option<Arc<Session>> {
        let logind = logind_session(pid);
        let known = self.known();
        let mine = || known.values().map(|k| &k.session).filter(|s| s.uid == uid);
        let by_cgroup = mine().find(|s| logind.is_some() && s.logind == logind);
        by_cgroup.or_else(|| mine().find(|s| Some(s.id.as_str()) == hint)).cloned()
    }

    /// Returns all sessions, in the order of their ids.
    pub fn list(&self) -> Vec<Arc<Session>> {
        self.known().values().map(|k| k.session.clone()).collect()
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, OpenSession>> {
        self.known.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Records a login by the leader `pid`; returns the id of its session.
    ///
    /// `su` to oneself inside a session joins that session.
    fn open(self: &Arc<Self>, open: Open, pid: u32, pidfd: OwnedFd) -> Option<String> {
        let leader_start = start_of(pid)?;
        let leader = (pid, leader_start);
        let logind = logind_session(pid);
        let same = |k: &OpenSession| {
            k.session.uid == open.uid
                && (k.leaders.contains_key(&leader) || (logind.is_some() && k.session.logind == logind))
        };
        let id = {
            let mut known = self.known();
            let leaders: usize = known.values().map(|k| k.leaders.len()).sum();
            let there = known.values_mut().find(|k| same(k));
            if leaders >= MAX_SESSIONS && there.as_ref().is_none_or(|k| !k.leaders.contains_key(&leader)) {
                warn!("login of pid {pid}: gets no session: {MAX_SESSIONS} session leaders are the most");
                return None;
            }
            if let Some(there) = there {
                if let Entry::Vacant(new) = there.leaders.entry(leader) {
                    new.insert(self.watch(leader, pidfd)?);
                    self.write(there);
                }
                return Some(there.session.id.clone());
            }
            std::iter::repeat_with(mint).find(|id| !known.contains_key(id))?
        };
        let Open { uid, service, user, mut tty, rhost } = open;
        // Placeholders of sshd and cron, which have no terminal, or do not know it yet.
        if tty == "ssh" || tty == "cron" {
            tty.clear();
        }
        let session =
            Session { id: id.clone(), uid, user, service, tty, rhost, leader: pid, leader_start, logind };
        info!(
            message_id = Event::SessionOpened.id(),
            gpusession_user = session.uid,
            gpusession_session = id,
            "login session {id} of {} ({}): began",
            session.user,
            session.service
        );
        self.add(session, vec![(leader, pidfd)])?;
        Some(id)
    }

    fn add(self: &Arc<Self>, session: Session, leaders: Vec<(Leader, OwnedFd)>) -> Option<()> {
        let session = Arc::new(session);
        let mut known = self.known();
        let leaders: BTreeMap<_, _> = leaders
            .into_iter()
            .filter_map(|(leader, pidfd)| Some((leader, self.watch(leader, pidfd)?)))
            .collect();
        if leaders.is_empty() {
            return None;
        }
        let new = OpenSession { session: session.clone(), leaders };
        self.write(&new);
        known.insert(session.id.clone(), new);
        // Still under the lock, so that the session's end is reported after its begin.
        self.leases.session_opened(session);
        Some(())
    }

    /// Watches a leader; its exit may end its session.
    fn watch(self: &Arc<Self>, leader: Leader, pidfd: OwnedFd) -> Option<AbortHandle> {
        let pidfd = peer::watched(pidfd).ok()?;
        let sessions = self.clone();
        let watch = async move {
            // A pidfd becomes readable when its process exits.
            drop(pidfd.readable().await);
            sessions.ended(|l| *l == leader);
        };
        Some(tokio::spawn(watch).abort_handle())
    }

    /// Handles the report of the leader `pid` that its session is over.
    fn close(&self, pid: u32) {
        let start = start_of(pid);
        self.ended(|l| l.0 == pid && start.is_none_or(|start| start == l.1));
    }

    /// Removes leaders, and the sessions whose last leader goes.
    fn ended(&self, which: impl Fn(&Leader) -> bool) {
        let mut over = Vec::new();
        self.known().retain(|_, known| {
            let before = known.leaders.len();
            known.leaders.retain(|leader, watch| {
                let ended = which(leader);
                if ended {
                    watch.abort();
                }
                !ended
            });
            match known.leaders.len() {
                0 => over.push(known.session.clone()),
                now if now < before => self.write(known),
                _ => {}
            }
            !known.leaders.is_empty()
        });
        for session in over {
            let _ = std::fs::remove_file(self.folder.join(&session.id));
            info!(
                message_id = Event::SessionClosed.id(),
                gpusession_user = session.uid,
                gpusession_session = session.id,
                "login session {} of {}: ended",
                session.id,
                session.user
            );
            self.leases.session_closed(&session.id);
        }
    }

    /// Writes a new file and renames it, so that readers never see a partial one.
    fn write(&self, known: &OpenSession) {
        let id = &known.session.id;
        let new = self.folder.join(format!(".{id}.new"));
        let written = SessionRecord {
            session: (*known.session).clone(),
            leaders: known.leaders.keys().copied().collect(),
        };
        let done = serde_json::to_vec(&written)
            .map_err(io::Error::other)
            .and_then(|text| std::fs::write(&new, text))
            .and_then(|()| std::fs::rename(new, self.folder.join(id)));
        if let Err(error) = done {
            debug!("session {id}: not stored: {error}; it is lost when the daemon restarts");
        }
    }
}

/// Creates an id of twelve letters and digits; unique, not secret.
fn mint() -> String {
    std::iter::repeat_with(|| char::from(ALPHABET[fastrand::usize(..ALPHABET.len())])).take(12).collect()
}

/// Returns when a process started, in clock ticks since boot.
fn start_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in parentheses, may contain any character; the start is the 20th field
    // after it.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Returns the id of logind's session of a process, from its cgroup.
fn logind_session(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    text.lines().find_map(session_scope).map(str::to_owned)
}

fn session_scope(cgroup: &str) -> Option<&str> {
    cgroup.split('/').find_map(|part| part.strip_prefix("session-")?.strip_suffix(".scope"))
}

/// Binds a login socket at `path`, if systemd does not pass one.
pub fn bind_at(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listen(&fd, Backlog::new(128)?)?;
    Ok((UnixListener::from_std(fd.into())?, SocketFile(path.to_owned())))
}

/// Serves a login socket.
pub struct Server {
    sessions: Arc<Sessions>,
    rules: RwLock<(Arc<Gate>, Arc<Audience>)>,
    /// Uid that may use the socket: root, except in tests.
    module: u32,
}

impl Server {
    /// Creates a server that accepts processes of uid `module` only.
    pub fn new(sessions: Arc<Sessions>, gate: Arc<Gate>, audience: Arc<Audience>, module: u32) -> Arc<Self> {
        Arc::new(Self { sessions, rules: RwLock::new((gate, audience)), module })
    }

    /// Sets the access rules for future logins.
    pub fn configure(&self, gate: Arc<Gate>, audience: Arc<Audience>) {
        *self.rules.write().unwrap_or_else(|e| e.into_inner()) = (gate, audience);
    }

    /// Serves until the future is dropped.
    pub async fn serve(self: Arc<Self>, listener: UnixListener) {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(place) = places.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let server = self.clone();
                    tokio::spawn(async move {
                        if let Err(error) = server.talk(stream).await {
                            debug!("login socket: {error}");
                        }
                        drop(place);
                    });
                }
                Err(error) => {
                    warn!("login socket: cannot accept a connection: {error}; retrying");
                    tokio::time::sleep(REQUEST_TIMEOUT).await;
                }
            }
        }
    }

    async fn talk(&self, mut stream: UnixStream) -> io::Result<()> {
        let Peer { uid, pid, pidfd } = peer::peer(&stream)?;
        if uid != self.module {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("uid {uid} may not use the login socket"),
            ));
        }
        // One byte more than the longest request, to detect longer packets.
        let mut packet = [0; MAX_REQUEST + 1];
        let length = tokio::time::timeout(REQUEST_TIMEOUT, stream.read(&mut packet)).await??;
        match Request::parse(&packet[..length]).map_err(io::Error::other)? {
            Request::Close => self.sessions.close(pid),
            Request::Open(open) => {
                let id = match (self.serves(&open).await, pidfd) {
                    (true, Some(pidfd)) => Some(self.sessions.open(open, pid, pidfd).unwrap_or_default()),
                    (true, None) => Some(String::new()),
                    (false, _) => None,
                };
                let packet = Reply { session: id.as_deref() }.encode();
                // The empty buffer of a new socket holds a packet. If the module has given up, the
                // login goes without variables.
                stream.try_write(&packet)?;
            }
        }
        Ok(())
    }

    /// Returns `true` if the user has access or a lease.
    ///
    /// If the user database does not answer in time, the user counts as having access: variables
    /// give no rights.
    async fn serves(&self, open: &Open) -> bool {
        let (gate, audience) = self.rules.read().unwrap_or_else(|e| e.into_inner()).clone();
        let person = tokio::time::timeout(LOOKUP_TIMEOUT, gate.person(open.uid)).await;
        audience.includes(Some(&open.user), person.map_or(true, |p| p.access))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_found_in_cgroups() {
        assert_eq!(session_scope("0::/user.slice/user-1000.slice/session-5.scope"), Some("5"));
        assert_eq!(
            session_scope("1:name=systemd:/user.slice/user-1000.slice/session-c2.scope/x"),
            Some("c2")
        );
        assert_eq!(session_scope("0::/user.slice/user-1000.slice/user@1000.service/app.slice"), None);
        assert_eq!(session_scope("0::/system.slice/cron.service"), None);
    }

    #[test]
    fn a_process_is_identified_by_its_start_time() {
        let me = std::process::id();
        assert_eq!(start_of(me), start_of(me));
        assert!(start_of(me) > start_of(1));
        assert_eq!(start_of(u32::MAX), None);
    }
}
