//! The login socket: `pam_gpusession.so` tells here that a session begins or ends.
//!
//! Only root is heard. The answer comes from memory: no server is asked, and a slow user database is not waited for. A
//! session lasts as long as its leaders, the processes that opened it, which pidfds watch; the close that PAM promises is
//! only a faster way to hear of it. There are several where a user logs in once more inside a session of logind's, as by
//! `su` in two panes of a terminal multiplexer. Sessions are written down below the runtime directory, so that another start of the
//! daemon knows those that are still there.

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
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt as _, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tracing::{debug, info, warn};

use crate::access::Gate;
use crate::environment::Environment;
use crate::grant::{self, Peer, SocketFile};
use crate::leases::Leases;

/// Time to send a request.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the user database may take; the login waits meanwhile.
const LOOK_UP: Duration = Duration::from_millis(100);
/// Logins that are served at the same time; more wait in the socket's backlog.
const CONNECTIONS: usize = 32;
/// Most sessions.
const SESSIONS: usize = 4096;
/// Letters of session ids.
const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// A login session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// `GPUSESSION_ID`.
    pub id: String,
    /// Whose it is.
    pub uid: u32,
    /// The user's name.
    pub user: String,
    /// PAM service that opened it.
    pub service: String,
    /// Terminal; empty where there is none, or where the program does not know yet, as sshd.
    pub tty: String,
    /// Where the user comes from; empty where that is not known.
    pub rhost: String,
    /// The process that opened it first.
    pub leader: u32,
    /// When that process started, in clock ticks since boot: tells it apart from another one with its pid.
    pub leader_start: u64,
    /// logind's id of the session that the leader is in, if it is in one.
    pub logind: Option<String>,
}

/// A process that opened a session: its pid, and when it started.
type Leader = (u32, u64);

struct Known {
    session: Arc<Session>,
    /// Those that are still there; the session ends with the last.
    leaders: BTreeMap<Leader, AbortHandle>,
}

/// What is written of a session.
#[derive(Serialize, Deserialize)]
struct Written {
    #[serde(flatten)]
    session: Session,
    #[serde(default)]
    leaders: Vec<Leader>,
}

/// The sessions that are open now.
pub struct Sessions {
    leases: Arc<dyn Leases>,
    folder: PathBuf,
    known: Mutex<BTreeMap<String, Known>>,
}

impl Sessions {
    /// Takes up the sessions that an earlier daemon wrote to `folder` and that are still there. Needs a runtime.
    pub fn restore(leases: Arc<dyn Leases>, folder: &Path) -> Arc<Self> {
        let sessions = Arc::new(Self { leases, folder: folder.to_owned(), known: Mutex::default() });
        if let Err(error) = std::fs::create_dir_all(folder) {
            warn!("{}: {error}: sessions are forgotten when the daemon restarts", folder.display());
            return sessions;
        }
        for path in std::fs::read_dir(folder).into_iter().flatten().filter_map(|e| Some(e.ok()?.path())) {
            let read = || serde_json::from_slice::<Written>(&std::fs::read(&path).ok()?).ok();
            let there = |leader: Leader| {
                let pidfd = grant::pidfd_open(leader.0).ok()?;
                // In this order: what the pidfd stands for is what is looked at now.
                (start_of(leader.0)? == leader.1).then_some((leader, pidfd))
            };
            let written = read().map(|Written { session, mut leaders }| {
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

    /// The session that a process belongs to: the one of its cgroup, else the one that `hint` (its `GPUSESSION_ID`)
    /// names. Only a session of the process's own user counts.
    pub fn of(&self, uid: u32, pid: u32, hint: Option<&str>) -> Option<Arc<Session>> {
        let logind = logind_session(pid);
        let known = self.known();
        let mine = || known.values().map(|k| &k.session).filter(|s| s.uid == uid);
        let by_cgroup = mine().find(|s| logind.is_some() && s.logind == logind);
        by_cgroup.or_else(|| mine().find(|s| Some(s.id.as_str()) == hint)).cloned()
    }

    /// All of them.
    pub fn list(&self) -> Vec<Arc<Session>> {
        self.known().values().map(|k| k.session.clone()).collect()
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Known>> {
        self.known.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A login of the leader `pid`; the id of its session. `su` to oneself inside a session opens no other one.
    fn open(self: &Arc<Self>, open: Open, pid: u32, pidfd: OwnedFd) -> Option<String> {
        let leader_start = start_of(pid)?;
        let leader = (pid, leader_start);
        let logind = logind_session(pid);
        let same = |k: &Known| {
            k.session.uid == open.uid
                && (k.leaders.contains_key(&leader) || (logind.is_some() && k.session.logind == logind))
        };
        let id = {
            let mut known = self.known();
            let leaders: usize = known.values().map(|k| k.leaders.len()).sum();
            let there = known.values_mut().find(|k| same(k));
            if leaders >= SESSIONS && there.as_ref().is_none_or(|k| !k.leaders.contains_key(&leader)) {
                warn!("more than {SESSIONS} sessions: this login is not counted");
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
        // What sshd and cron say before they know a terminal, or have none.
        if tty == "ssh" || tty == "cron" {
            tty.clear();
        }
        let session =
            Session { id: id.clone(), uid, user, service, tty, rhost, leader: pid, leader_start, logind };
        info!(
            message_id = Event::SessionOpened.id(),
            gpusession_user = session.uid,
            gpusession_session = id,
            "session {id} of {} ({}) began",
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
        let new = Known { session: session.clone(), leaders };
        self.write(&new);
        known.insert(session.id.clone(), new);
        // Its end is not heard of before.
        self.leases.session_opened(session);
        Some(())
    }

    /// Hears of a leader's end.
    fn watch(self: &Arc<Self>, leader: Leader, pidfd: OwnedFd) -> Option<AbortHandle> {
        // SAFETY: an OwnedFd gives the same open descriptor for as long as the AsyncFd owns it.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }.ok()?;
        let sessions = self.clone();
        let watch = async move {
            // A pidfd becomes readable when its process has ended.
            drop(pidfd.readable().await);
            sessions.ended(|l| *l == leader);
        };
        Some(tokio::spawn(watch).abort_handle())
    }

    /// The leader `pid` says that its session is over.
    fn close(&self, pid: u32) {
        let start = start_of(pid);
        self.ended(|l| l.0 == pid && start.is_none_or(|start| start == l.1));
    }

    /// These leaders have ended, and with the last one its session.
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
                "session {} of {} ended",
                session.id,
                session.user
            );
            self.leases.session_closed(&session.id);
        }
    }

    /// Written beside and renamed, so that nobody reads half of it.
    fn write(&self, known: &Known) {
        let id = &known.session.id;
        let new = self.folder.join(format!(".{id}.new"));
        let written =
            Written { session: (*known.session).clone(), leaders: known.leaders.keys().copied().collect() };
        let done = serde_json::to_vec(&written)
            .map_err(io::Error::other)
            .and_then(|text| std::fs::write(&new, text))
            .and_then(|()| std::fs::rename(new, self.folder.join(id)));
        if let Err(error) = done {
            debug!("session {id} is forgotten when the daemon restarts: {error}");
        }
    }
}

/// Twelve letters and digits; tells sessions apart, is no secret.
fn mint() -> String {
    std::iter::repeat_with(|| char::from(ALPHABET[fastrand::usize(..ALPHABET.len())])).take(12).collect()
}

/// When a process started, in clock ticks since boot.
fn start_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in parentheses, may have anything in it; the 20th field behind it is the one.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// logind's session of a process, by its cgroup.
fn logind_session(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    text.lines().find_map(session_scope).map(str::to_owned)
}

fn session_scope(cgroup: &str) -> Option<&str> {
    cgroup.split('/').find_map(|part| part.strip_prefix("session-")?.strip_suffix(".scope"))
}

/// Makes a listening login socket at `path`, for where systemd does not hand one over.
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
    given: RwLock<(Arc<Gate>, Arc<Environment>)>,
    /// Who is heard: root, but for tests.
    module: u32,
}

impl Server {
    /// A server that hears processes of uid `module` only.
    pub fn new(
        sessions: Arc<Sessions>,
        gate: Arc<Gate>,
        environment: Arc<Environment>,
        module: u32,
    ) -> Arc<Self> {
        Arc::new(Self { sessions, given: RwLock::new((gate, environment)), module })
    }

    /// Sessions that begin from now on are given this.
    pub fn configure(&self, gate: Arc<Gate>, environment: Arc<Environment>) {
        *self.given.write().unwrap_or_else(|e| e.into_inner()) = (gate, environment);
    }

    /// Serves until the future is dropped.
    pub async fn serve(self: Arc<Self>, listener: UnixListener) {
        let places = Arc::new(Semaphore::new(CONNECTIONS));
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
                    warn!("login socket: {error}");
                    tokio::time::sleep(PATIENCE).await;
                }
            }
        }
    }

    async fn talk(&self, mut stream: UnixStream) -> io::Result<()> {
        let Peer { uid, pid, pidfd } = grant::peer(&stream)?;
        if uid != self.module {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("uid {uid} is not heard")));
        }
        // One byte more than a request may have, so that a longer packet is noticed.
        let mut packet = [0; MAX_REQUEST + 1];
        let length = tokio::time::timeout(PATIENCE, stream.read(&mut packet)).await??;
        match Request::parse(&packet[..length]).map_err(io::Error::other)? {
            Request::Close => self.sessions.close(pid),
            Request::Open(open) => {
                let environment = self.environment(&open).await;
                let id = match (environment.as_ref(), pidfd) {
                    (Some(_), Some(pidfd)) => self.sessions.open(open, pid, pidfd),
                    _ => None,
                };
                let reply = id.iter().map(|id| ("GPUSESSION_ID", id.as_str()));
                let variables = environment.iter().flatten().map(|(k, v)| (k.as_str(), v.as_str()));
                let packet = Reply { environment: reply.chain(variables).collect() }
                    .encode()
                    .map_err(io::Error::other)?;
                // A fresh socket's buffer holds a packet. A module that has given up is a login without a variable.
                stream.try_write(&packet)?;
            }
        }
        Ok(())
    }

    /// `[environment]` for a user who has something here. Whom the user database does not answer for in time is taken
    /// to have: variables give no right.
    async fn environment(&self, open: &Open) -> Option<BTreeMap<String, String>> {
        let (gate, environment) = self.given.read().unwrap_or_else(|e| e.into_inner()).clone();
        let person = tokio::time::timeout(LOOK_UP, gate.person(open.uid)).await;
        environment.of_user(Some(&open.user), person.map_or(true, |p| p.access)).cloned()
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
    fn a_process_is_told_by_its_start() {
        let me = std::process::id();
        assert_eq!(start_of(me), start_of(me));
        assert!(start_of(me) > start_of(1));
        assert_eq!(start_of(u32::MAX), None);
    }
}
