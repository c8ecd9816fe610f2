//! Helpers of the integration tests: a private bus, a simulated pool, processes that request GPUs.

#![allow(missing_docs, reason = "helpers of tests")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::grant::{Reply, Request, VERSION, Want};
use gpusession_proto::message;
use gpusessiond::access::Gate;
use gpusessiond::bus::{Bus, Parts};
use gpusessiond::config::{Config, LeaseConfig};
use gpusessiond::grant::{self, Limits};
use gpusessiond::leases::engine::{Engine, HostFacts};
use gpusessiond::leases::sim::SimServer;
use gpusessiond::leases::{Leases as _, Snapshot, Spec};
use gpusessiond::peer;
use gpusessiond::pool::PoolServer;
use gpusessiond::settings::Settings;
use tempfile::TempDir;

/// Longest wait for any condition.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Facts of a host that does not exist.
pub fn here() -> HostFacts {
    HostFacts { boot_id: [9; 16], machine_id: "machine".into(), seed: 1, uptime: Duration::ZERO }
}

/// Starts a lease manager with simulated servers.
pub fn engine(servers: &[&SimServer]) -> Engine {
    let engine = Engine::start(here());
    engine.connect(servers.iter().map(|s| Arc::new((*s).clone()) as Arc<dyn PoolServer>).collect());
    engine
}

/// As [`config`], for calls that wait this long.
pub fn waiting(wait: Duration, leases: &[u32]) -> Config {
    let mut config = config(leases);
    config.keys.wait_ms = wait.as_millis() as u64;
    config
}

/// Creates a configuration with leases of these numbers of GPUs.
pub fn config(leases: &[u32]) -> Config {
    let leases = (1..).zip(leases);
    Config {
        leases: leases
            .map(|(i, n)| LeaseConfig { name: format!("l{i}"), gpus: *n, ..Default::default() })
            .collect(),
        ..Default::default()
    }
}

/// Wants the leases of a configuration.
pub async fn want(engine: &Engine, config: &Config) {
    for (order, lease) in (0..).zip(&config.leases) {
        engine.want(Spec::configured(lease, order)).await;
    }
}

/// Waits until a snapshot satisfies `test`.
pub async fn until(engine: &Engine, mut test: impl FnMut(&Snapshot) -> bool) {
    let mut snapshot = engine.snapshot();
    let waited = tokio::time::timeout(TEST_TIMEOUT, snapshot.wait_for(|s| test(s))).await;
    assert!(matches!(waited, Ok(Ok(_))), "does not come: {:?}", engine.snapshot().borrow());
}

/// User that the daemon runs as if it must not be root.
pub const DAEMON: &str = "mail";

/// A private system bus with the packaged policy.
pub struct PrivateBus {
    child: Child,
    folder: TempDir,
}

impl PrivateBus {
    pub fn start() -> Self {
        Self::start_with("")
    }

    /// Starts the bus with a program that it activates for the daemon's name.
    pub fn start_with(exec: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let services = folder.path().join("services");
        std::fs::create_dir(&services).unwrap();
        if !exec.is_empty() {
            let text = format!("[D-BUS Service]\nName=org.gpusession1\nExec={exec}\nUser=root\n");
            std::fs::write(services.join("org.gpusession1.service"), text).unwrap();
        }
        let policy =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../units/dbus-1/system.d/org.gpusession1.conf");
        let configuration = folder.path().join("bus.conf");
        let uid = nix::unistd::getuid();
        let text = format!(
            r#"<busconfig><type>system</type><listen>unix:path={}</listen><auth>EXTERNAL</auth>
            <servicedir>{}</servicedir>
            <policy context="default"><allow user="*"/><deny own="*"/><deny send_type="method_call"/>
            <allow send_type="signal"/><allow send_requested_reply="true" send_type="method_return"/>
            <allow send_requested_reply="true" send_type="error"/><allow receive_type="method_call"/>
            <allow receive_type="method_return"/><allow receive_type="error"/><allow receive_type="signal"/>
            <allow send_destination="org.freedesktop.DBus"/>
            <allow send_destination="org.freedesktop.systemd1"/>
            <allow send_destination="org.freedesktop.PolicyKit1"/></policy>
            <include>{}</include>
            <policy user="{uid}"><allow own="org.gpusession1"/><allow own="org.freedesktop.systemd1"/></policy>
            <policy user="{DAEMON}"><allow own="org.gpusession1"/></policy>
            <policy user="polkitd"><allow own="org.freedesktop.PolicyKit1"/></policy></busconfig>"#,
            folder.path().join("bus.sock").display(),
            services.display(),
            policy.display(),
        );
        std::fs::write(&configuration, text).unwrap();
        let mut child = Command::new("dbus-daemon")
            .arg("--nofork")
            .arg("--print-address")
            .arg(format!("--config-file={}", configuration.display()))
            .stdout(Stdio::piped())
            // Hides complaints about features that an unprivileged or containerized bus lacks.
            .stderr(Stdio::null())
            .spawn()
            .expect("dbus-daemon is installed");
        // The bus prints its address once it listens.
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("unix:"), "{line}");
        Self { child, folder }
    }

    pub fn address(&self) -> String {
        format!("unix:path={}", self.folder.path().join("bus.sock").display())
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub async fn connect(&self) -> zbus::Connection {
        zbus::connection::Builder::address(self.address().as_str()).build().await.unwrap()
    }
}

impl PrivateBus {
    /// Connects as the user [`DAEMON`]; must be called by root.
    pub async fn connect_as_daemon(&self) -> zbus::Connection {
        let user = nix::unistd::User::from_name(DAEMON).unwrap().unwrap();
        let (uid, path) = (user.uid.as_raw(), self.folder.path().join("bus.sock"));
        let connect = std::thread::spawn(move || {
            // The bus sees the uid of the connecting thread. The C library's wrapper would change
            // all threads.
            // SAFETY: the call takes no pointers, and changes only this thread, which ends soon.
            let done = unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) };
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
            UnixStream::connect(path).unwrap()
        });
        let stream = connect.join().unwrap();
        zbus::connection::Builder::unix_stream(stream).user_id(uid).build().await.unwrap()
    }
}

impl Drop for PrivateBus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves the API on a private bus.
pub async fn serve(bus: &PrivateBus, engine: &Engine, config: &Config) -> Bus {
    serve_settings(bus, engine, settings(engine, config, Path::new("/nonexistent"))).await
}

/// Creates settings in force; a reload reads `path`.
pub fn settings(engine: &Engine, config: &Config, path: &Path) -> Arc<Settings> {
    let gate = Arc::new(Gate::new(config.access.clone()));
    Settings::new(path.to_owned(), config.clone(), gate, Arc::new(engine.clone()))
}

/// Serves the API on a private bus, with settings that may change.
pub async fn serve_settings(bus: &PrivateBus, engine: &Engine, settings: Arc<Settings>) -> Bus {
    serve_on(bus.connect().await, engine, settings).await
}

/// Serves the API on this connection.
pub async fn serve_on(connection: zbus::Connection, engine: &Engine, settings: Arc<Settings>) -> Bus {
    let parts = Parts {
        leases: Arc::new(engine.clone()),
        settings,
        sessions: None,
        store: None,
        lease_fds: Default::default(),
        identity: tokio::sync::watch::Sender::new(None).subscribe(),
    };
    Bus::start(connection, parts).await.unwrap()
}

/// A grant socket in its own folder.
pub struct GrantSocket {
    pub path: PathBuf,
    _folder: TempDir,
    _file: peer::SocketFile,
    task: tokio::task::JoinHandle<()>,
}

impl GrantSocket {
    pub fn start(engine: &Engine, config: &Config, limits: Limits) -> Self {
        Self::with_gate(engine, config, limits, Gate::new(config.access.clone()))
    }

    pub fn with_gate(engine: &Engine, config: &Config, limits: Limits, gate: Gate) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("grant.sock");
        let (listener, file) = peer::bind(&path, 0o666).unwrap();
        let gate = Arc::new(gate);
        let server = Arc::new(grant::Server::new(
            Arc::new(engine.clone()),
            gate,
            Duration::from_millis(config.keys.wait_ms),
            limits,
        ));
        Self { path, _folder: folder, _file: file, task: tokio::spawn(server.serve(listener)) }
    }
}

impl Drop for GrantSocket {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Creates a request as the library sends it.
pub fn request() -> Request {
    Request {
        version: VERSION,
        lease: None,
        session: None,
        program: "test".into(),
        executable: "/opt/test".into(),
        environment: Vec::new(),
        want: Want::Workers,
    }
}

/// Sends a request as the library does; returns the answer and the open connection.
pub fn ask(path: &Path, request: &Request) -> std::io::Result<(Reply, UnixStream)> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(TEST_TIMEOUT))?;
    match stream.write_all(&message::encode(request)) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => {}
        written => written?,
    }
    Ok((read_reply(&mut stream)?, stream))
}

/// Calls [`ask`] on a blocking thread.
pub async fn ask_async(path: &Path, request: Request) -> (Reply, UnixStream) {
    let path = path.to_owned();
    tokio::task::spawn_blocking(move || ask(&path, &request).unwrap()).await.unwrap()
}

pub fn read_reply(stream: &mut UnixStream) -> std::io::Result<Reply> {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix)?;
    let mut body = vec![0; message::body_len(prefix).map_err(std::io::Error::other)?];
    stream.read_exact(&mut body)?;
    message::decode(&body).map_err(std::io::Error::other)
}

/// Another process that holds a grant.
///
/// It is this test program again: a test called `helper_process` calls [`helper_main`].
pub struct Helper {
    pub child: Child,
    pub pid: u32,
    pub granted: bool,
    _stdin: ChildStdin,
}

const HELPER: &str = "GRANT_HELPER_SOCKET";

impl Helper {
    pub fn start(path: &Path) -> Self {
        Self::by(Command::new(std::env::current_exe().unwrap()), path)
    }

    /// Starts the helper by a command that takes this test program's arguments.
    pub fn by(mut command: Command, path: &Path) -> Self {
        let mut child = command
            .args(["--exact", "helper_process", "--nocapture"])
            .env(HELPER, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.map_while(Result::ok).find(|l| l.contains("helper:")).expect("the helper answers");
        let pid = child.id();
        Self { child, pid, granted: line.contains("granted"), _stdin: stdin }
    }

    pub async fn start_async(path: &Path) -> Self {
        let path = path.to_owned();
        tokio::task::spawn_blocking(move || Self::start(&path)).await.unwrap()
    }

    pub fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Requests GPUs, prints the result, and runs until its standard input ends.
pub fn helper_main() {
    let Some(path) = std::env::var_os(HELPER) else { return };
    let (reply, stream) = ask(Path::new(&path), &request()).unwrap();
    let said = if matches!(reply, Reply::Granted(_)) { "granted" } else { "denied" };
    println!("\nhelper: {said}");
    let mut rest = Vec::new();
    let _ = std::io::stdin().read_to_end(&mut rest);
    drop(stream);
}
