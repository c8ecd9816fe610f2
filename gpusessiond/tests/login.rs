//! The login socket, with real sockets and processes.

use std::io::Read as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::login::{MAX_REPLY, Open, Reply, Request};
use gpusession_test_daemon::{TEST_TIMEOUT, config, engine};
use gpusessiond::access::Gate;
use gpusessiond::config::Config;
use gpusessiond::environment::Audience;
use gpusessiond::leases::Leases;
use gpusessiond::login::{self, Server, Sessions};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, send, socket};

struct LoginSocket {
    path: PathBuf,
    sessions: Arc<Sessions>,
    task: tokio::task::JoinHandle<()>,
    _file: gpusessiond::peer::SocketFile,
}

impl LoginSocket {
    fn start(folder: &Path, config: &Config, module: u32) -> Self {
        let leases: Arc<dyn Leases> = Arc::new(engine(&[]));
        let sessions = Sessions::restore(leases, &folder.join("sessions"));
        let gate = Arc::new(Gate::new(config.access.clone()));
        let path = folder.join("pam.sock");
        let (listener, file) = login::bind_at(&path).unwrap();
        let audience = Arc::new(Audience::of(config));
        let server = Server::new(sessions.clone(), gate, audience, module);
        Self { path, sessions, task: tokio::spawn(server.serve(listener)), _file: file }
    }
}

impl Drop for LoginSocket {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn me() -> u32 {
    nix::unistd::getuid().as_raw()
}

fn open() -> Open {
    Open { uid: me(), service: "sshd".into(), user: "somebody".into(), tty: "ssh".into(), rhost: "h".into() }
}

/// Sends one packet and returns the answer; empty if the daemon closes the connection.
fn say(path: &Path, packet: &[u8]) -> Vec<u8> {
    let fd: OwnedFd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    connect(fd.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
    match send(fd.as_raw_fd(), packet, MsgFlags::MSG_NOSIGNAL) {
        // The daemon closes a stranger's connection before reading the packet.
        Err(nix::errno::Errno::EPIPE) => return Vec::new(),
        sent => sent.unwrap(),
    };
    let mut stream = UnixStream::from(fd);
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let mut reply = vec![0; MAX_REPLY + 1];
    let n = stream.read(&mut reply).unwrap_or(0);
    reply.truncate(n);
    reply
}

async fn say_async(path: &Path, packet: Vec<u8>) -> Vec<u8> {
    let path = path.to_owned();
    tokio::task::spawn_blocking(move || say(&path, &packet)).await.unwrap()
}

fn id(reply: &[u8]) -> Option<String> {
    let reply = Reply::parse(reply).unwrap();
    reply.session.map(str::to_owned)
}

async fn until(what: &str, mut test: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        while !test() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what} does not come");
}

fn with_environment() -> Config {
    Config { environment: [("NCCL_DEBUG".to_owned(), "WARN".to_owned())].into(), ..config(&[1]) }
}

/// Helper: this test program again, as the leader of a session, until it is killed.
#[test]
fn leader() {
    let Some(path) = std::env::var_os("LOGIN_TEST_SOCKET") else { return };
    println!("\nleader: {}", id(&say(Path::new(&path), &Request::Open(open()).encode())).unwrap());
    let _ = std::io::stdin().read(&mut [0]);
    if std::env::var_os("LOGIN_TEST_CLOSE").is_some() {
        say(Path::new(&path), &Request::Close.encode());
        let _ = std::io::stdin().read(&mut [0]);
    }
}

struct Leader {
    child: std::process::Child,
    id: String,
}

impl Leader {
    async fn start(path: &Path, close: bool) -> Self {
        let path = path.to_owned();
        tokio::task::spawn_blocking(move || {
            use std::io::BufRead as _;
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "leader", "--nocapture"]).env("LOGIN_TEST_SOCKET", path);
            if close {
                command.env("LOGIN_TEST_CLOSE", "1");
            }
            let pipe = std::process::Stdio::piped;
            let mut child = command.stdin(pipe()).stdout(pipe()).spawn().unwrap();
            let lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
            let id = lines
                .map_while(Result::ok)
                .find_map(|l| l.strip_prefix("leader: ").map(str::to_owned))
                .expect("the leader has a session");
            Self { child, id }
        })
        .await
        .unwrap()
    }

    fn go_on(&mut self) {
        use std::io::Write as _;
        self.child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_login_gets_its_environment_and_lasts_as_long_as_its_leader() {
    let folder = tempfile::tempdir().unwrap();
    let socket = LoginSocket::start(folder.path(), &with_environment(), me());
    let reply = say_async(&socket.path, Request::Open(open()).encode()).await;
    let read = Reply::parse(&reply).unwrap();
    let mine = id(&reply).unwrap();
    assert_eq!(read.session, Some(mine.as_str()));
    assert!(!reply.windows(10).any(|bytes| bytes == b"NCCL_DEBUG"), "variables are root's file's");
    // A second login of one leader joins its session.
    assert_eq!(id(&say_async(&socket.path, Request::Open(open()).encode()).await), Some(mine.clone()));

    let leader = Leader::start(&socket.path, false).await;
    let list = socket.sessions.list();
    // Inside a session of logind (a developer's terminal), both leaders share one session.
    let nested = leader.id == mine;
    assert_eq!(list.len(), if nested { 1 } else { 2 });
    let session = list.iter().find(|s| s.id == leader.id).unwrap();
    assert_eq!((session.uid, session.service.as_str(), session.rhost.as_str()), (me(), "sshd", "h"));
    assert_eq!(session.tty, "", "sshd says `ssh` before it knows a terminal");
    assert_eq!(
        socket.sessions.for_process(me(), std::process::id(), Some(&leader.id)).unwrap().id,
        leader.id
    );
    assert_eq!(
        socket.sessions.for_process(me() + 1, std::process::id(), Some(&leader.id)),
        None,
        "of another user"
    );
    let gone = leader.id.clone();
    drop(leader);
    if !nested {
        until("the session's end", || socket.sessions.list().iter().all(|s| s.id != gone)).await;
    }
    assert_eq!(socket.sessions.list().len(), 1);
}

#[tokio::test]
async fn a_close_ends_the_session_of_its_sender_only() {
    let folder = tempfile::tempdir().unwrap();
    let socket = LoginSocket::start(folder.path(), &config(&[1]), me());
    let mut leader = Leader::start(&socket.path, true).await;
    assert!(say_async(&socket.path, Request::Close.encode()).await.is_empty());
    assert_eq!(socket.sessions.list().len(), 1, "another process's close");
    leader.go_on();
    until("the session's end", || socket.sessions.list().is_empty()).await;
    assert!(std::fs::read_dir(folder.path().join("sessions")).unwrap().next().is_none());
}

#[tokio::test]
async fn sessions_survive_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let socket = LoginSocket::start(folder.path(), &config(&[1]), me());
    let leader = Leader::start(&socket.path, false).await;
    let stale = folder.path().join("sessions/aaaaaaaaaaaa");
    let text = std::fs::read_to_string(folder.path().join("sessions").join(&leader.id)).unwrap();
    let start = socket.sessions.list()[0].leader_start;
    // In the stored session, the pid belonged to another process.
    std::fs::write(&stale, text.replace(&start.to_string(), "1")).unwrap();
    std::fs::write(folder.path().join("sessions/bbbbbbbbbbbb"), "{").unwrap();
    drop(socket);
    let again = LoginSocket::start(folder.path(), &config(&[1]), me());
    assert_eq!(again.sessions.list().iter().map(|s| s.id.as_str()).collect::<Vec<_>>(), [leader.id.as_str()]);
    assert!(!stale.exists());
    drop(leader);
    until("the session's end", || again.sessions.list().is_empty()).await;
}

#[tokio::test]
async fn a_user_without_access_or_lease_gets_no_login_session() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = with_environment();
    config.access.users.clear();
    config.access.root = false;
    let socket = LoginSocket::start(folder.path(), &config, me());
    let reply = say_async(&socket.path, Request::Open(open()).encode()).await;
    assert_eq!(Reply::parse(&reply), Ok(Reply::default()));
    assert!(socket.sessions.list().is_empty());
    // A lease of the user's own counts as access.
    config.leases[0].for_user = Some("somebody".into());
    drop(socket);
    let socket = LoginSocket::start(folder.path(), &config, me());
    assert!(id(&say_async(&socket.path, Request::Open(open()).encode()).await).is_some());
}

#[tokio::test]
async fn strangers_and_nonsense_get_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let socket = LoginSocket::start(folder.path(), &config(&[1]), me() + 1);
    assert!(say_async(&socket.path, Request::Open(open()).encode()).await.is_empty());
    drop(socket);
    let socket = LoginSocket::start(folder.path(), &config(&[1]), me());
    for packet in [vec![], b"x".to_vec(), vec![b'g'; 60_000], Request::Open(open()).encode()[..20].to_vec()] {
        assert!(say_async(&socket.path, packet).await.is_empty());
    }
    assert!(socket.sessions.list().is_empty());
    assert!(id(&say_async(&socket.path, Request::Open(open()).encode()).await).is_some());
}
