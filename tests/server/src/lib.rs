//! A real server process with fake workers, and clients of it.

#![allow(missing_docs, reason = "helpers of tests")]

use std::ffi::OsString;
use std::io::Read;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gpusession_proto::control::enrolment_client::EnrolmentClient;
use gpusession_proto::control::pool_client::PoolClient;
use gpusession_proto::control::{AllocateRequest, JoinRequest, Lease, TakeWorkersRequest, Worker};
use gpusession_proto::join;
use gpusession_proto::preface::{FLAG_TLS, Key, Preface};
use gpusession_test_support::{Artefact, artefact};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rcgen::{CertificateParams, KeyPair};
use tonic::Status;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use zerocopy::IntoBytes;

/// Longest time of a step of these tests; a slower one hangs.
pub const LONG: Duration = Duration::from_secs(30);

pub struct Server {
    /// Number of the next connection attempt.
    attempts: AtomicU32,
    pub folder: tempfile::TempDir,
    process: Option<Child>,
    pub control: String,
    pub data: String,
    /// Further variables of its environment.
    pub variables: Vec<(&'static str, OsString)>,
    /// User of the server's process; `None`: that of the test.
    pub user: Option<u32>,
    /// Folder of the authority.
    pub authority_folder: &'static str,
    /// `cgroup.procs` of the control group in which the process starts.
    pub group: Option<PathBuf>,
}

/// Returns the path of a program that stands in for another one.
pub fn example(name: &str) -> PathBuf {
    artefact("gpuserver", Artefact::Example(name))
}

/// Runs `check` until it is true.
pub async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !check().await {
        assert!(start.elapsed() < LONG, "not within {LONG:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub fn alive(pid: u32) -> bool {
    // A zombie is not alive.
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|s| s.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z')))
}

impl Server {
    /// Starts a pool with one server, whose driver's file has the name `driver`.
    pub async fn start_with(driver: &str, more: &str) -> Self {
        let mut server = Self::prepare(driver, more).await;
        server.run().await;
        server
    }

    /// Prepares a pool with one server that does not run yet.
    pub async fn prepare(driver: &str, more: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        // Any ELF file passes for a driver, since no worker loads it.
        std::fs::copy("/proc/self/exe", folder.path().join(driver)).expect("a driver");
        let (control, data) = (String::new(), String::new());
        let (process, variables, group) = (None, Vec::new(), None);
        let server = Self {
            attempts: AtomicU32::new(1),
            folder,
            process,
            control,
            data,
            variables,
            user: None,
            authority_folder: "state/ca",
            group,
        };
        server.configure(driver, more);
        let made = server.verb(&["pool", "init"]);
        assert!(made.status.success(), "{made:?}");
        server
    }

    pub async fn start() -> Self {
        Self::start_with("libcuda.so.1", "").await
    }

    /// Returns the process id of the running server.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("it runs").id()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn configure(&self, driver: &str, more: &str) {
        // Most tests are not about limits, and no stop waits for programs unless a test sets it.
        let or = |key: &str, line: &str| if more.contains(key) { String::new() } else { format!("{line}\n") };
        let more = format!(
            "{more}\n{}{}",
            or("limits.gpus", "limits.gpus = 64\nlimits.max_persistent = 64"),
            or("drain_timeout", "drain_timeout = 0")
        );
        let name = if more.starts_with("name = ") { "" } else { "name = \"s1\"\n" };
        let text = format!(
            "{name}listen = \"127.0.0.1:0\"\ndata_ports = 0\ndriver = {:?}\nstate_dir = {:?}\nruntime_dir = {:?}\n{more}\n",
            self.path(driver),
            self.path("state"),
            self.path("run")
        );
        std::fs::write(self.path("gpuserver.toml"), text).expect("a configuration");
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(artefact("gpuserver", Artefact::Program("gpuserver")));
        command
            .args(words)
            .env("GPUSERVER_CONF", self.path("gpuserver.toml"))
            .env("GPUSERVER_WORKER", example("fake-worker"))
            .env("SECRET_OF_THE_SERVER", "x")
            .env_remove("NOTIFY_SOCKET")
            .envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    pub fn verb(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("gpuserver runs")
    }

    /// Sets a key of the running server.
    pub fn set(&self, key: &str, value: &str) {
        let output = self.verb(&["config", "set", key, value]);
        assert!(output.status.success(), "{output:?}");
    }

    /// Removes what `set` has set.
    pub fn unset(&self, key: &str) {
        let output = self.verb(&["config", "unset", key]);
        assert!(output.status.success(), "{output:?}");
    }

    /// Runs a verb with `--json`, and checks the schema.
    pub fn json(&self, words: &[&str]) -> serde_json::Value {
        let output = self.command(words).arg("--json").output().expect("gpuserver runs");
        assert!(output.status.success(), "{output:?}");
        let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(value["schema"], 1);
        value
    }

    /// Starts the process and waits until it reports that it is ready.
    pub async fn run(&mut self) {
        self.run_with(Stdio::inherit()).await;
    }

    /// Starts the process with its log in a file.
    pub async fn run_into(&mut self, file: &str) {
        let file = std::fs::File::create(self.path(file)).expect("a file");
        self.run_with(file.into()).await;
    }

    async fn run_with(&mut self, log: Stdio) {
        let socket_path = self.path("notify");
        let _ = std::fs::remove_file(&socket_path);
        let socket = UnixDatagram::bind(&socket_path).expect("a socket");
        // The process may have another user.
        std::fs::set_permissions(&socket_path, std::fs::Permissions::from_mode(0o777)).expect("a mode");
        socket.set_read_timeout(Some(LONG)).expect("a timeout");
        let mut command = self.command(&["serve"]);
        command.env("NOTIFY_SOCKET", &socket_path).stdin(Stdio::null()).stderr(log);
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        if let Some(group) = &self.group {
            let file = std::fs::File::options().write(true).open(group).expect("a control group");
            // SAFETY: between fork and exec the closure makes one system call.
            unsafe {
                command.pre_exec(move || {
                    nix::unistd::write(&file, b"0")?;
                    Ok(())
                });
            }
        }
        let child = command.spawn().expect("gpuserver starts");
        self.process = Some(child);
        let mut bytes = [0; 4096];
        loop {
            let n = socket.recv(&mut bytes).expect("gpuserver gets ready");
            if String::from_utf8_lossy(&bytes[..n]).contains("READY=1") {
                break;
            }
        }
        self.look();
    }

    /// Takes over a process that has reported that it is ready.
    pub fn runs(&mut self, child: Child) {
        self.process = Some(child);
        self.look();
    }

    fn look(&mut self) {
        let status = self.json(&["status"]);
        self.control = status["server"]["control_address"].as_str().expect("text").into();
        self.data = status["server"]["data_address"].as_str().expect("text").into();
    }

    pub fn signal(&mut self, signal: Signal) -> std::process::ExitStatus {
        let mut child = self.process.take().expect("it runs");
        kill(Pid::from_raw(child.id() as i32), signal).expect("it is there");
        child.wait().expect("it ends")
    }

    /// Waits for a process that a verb stopped, and returns its exit status.
    pub fn ended(&mut self) -> std::process::ExitStatus {
        self.process.take().expect("it ran").wait().expect("it ends")
    }

    /// Asks the process to stop, without waiting.
    pub fn terminate(&mut self) -> Child {
        let child = self.process.take().expect("it runs");
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("it is there");
        child
    }

    pub fn token(&self, words: &[&str]) -> String {
        let output = self.verb(&[&["token", "create"], words].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text").trim().into()
    }

    pub fn authority(&self) -> String {
        std::fs::read_to_string(self.path(self.authority_folder).join("authority.pem")).expect("an authority")
    }

    pub async fn connect(&self, identity: Option<Identity>) -> Result<Channel, tonic::transport::Error> {
        self.connect_from(identity, "127.0.0.1").await
    }

    pub async fn connect_from(
        &self,
        identity: Option<Identity>,
        from: &str,
    ) -> Result<Channel, tonic::transport::Error> {
        let mut tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(self.authority()))
            .domain_name(join::any_server());
        if let Some(identity) = identity {
            tls = tls.identity(identity);
        }
        let endpoint = Endpoint::from_shared(format!("https://{}", self.control))?.tls_config(tls)?;
        endpoint.local_address(from.parse().ok()).connect().await
    }

    /// Joins the pool, and returns the certificate and its key.
    pub async fn enrol(&self, token: &str, name: &str, machine: &str) -> Result<(String, String), Status> {
        self.enrol_from(token, name, machine, "127.0.0.1").await
    }

    pub async fn enrol_from(
        &self,
        token: &str,
        name: &str,
        machine: &str,
        from: &str,
    ) -> Result<(String, String), Status> {
        let key = KeyPair::generate().expect("a key");
        let csr = CertificateParams::new(vec![join::client(name)])
            .and_then(|p| p.serialize_request(&key))
            .and_then(|r| r.pem())
            .expect("a request");
        let request = JoinRequest {
            token: token.into(),
            csr_pem: csr,
            client_name: name.into(),
            machine_id: machine.into(),
            boot_id: "b1".into(),
            renews: true,
        };
        let channel = self.connect_from(None, from).await.expect("a connection");
        let reply = EnrolmentClient::new(channel).join(request).await?.into_inner();
        assert_eq!(reply.authority_pem, self.authority());
        assert_eq!(reply.servers, <[String; 0]>::default(), "it advertises no address");
        assert_eq!(reply.client_name, name);
        Ok((reply.certificate_pem, key.serialize_pem()))
    }

    /// Joins the pool from another address, and returns the client.
    pub async fn client_from(&self, name: &str, from: &str) -> Client {
        let (certificate, key) = self.enrol_from(&self.token(&[]), name, "m", from).await.expect("it joins");
        let identity = Identity::from_pem(certificate, key);
        let channel = self.connect_from(Some(identity.clone()), from).await.expect("a connection");
        Client { name: name.into(), identity, pool: PoolClient::new(channel) }
    }

    /// Joins the pool, and returns the client.
    pub async fn client(&self, name: &str) -> Client {
        let token = self.token(&[]);
        let (certificate, key) =
            self.enrol(&token, name, &format!("machine of {name}")).await.expect("it joins");
        let identity = Identity::from_pem(certificate, key);
        let channel = self.connect(Some(identity.clone())).await.expect("a connection");
        Client { name: name.into(), identity, pool: PoolClient::new(channel) }
    }

    /// Returns the client with a new connection, as after a restart of the server.
    pub async fn again(&self, client: &Client) -> Client {
        let channel = self.connect(Some(client.identity.clone())).await.expect("a connection");
        Client { pool: PoolClient::new(channel), ..client.clone() }
    }

    pub fn workers(&self) -> Vec<serde_json::Value> {
        self.json(&["ps"])["workers"].as_array().expect("a list").clone()
    }

    /// Opens a data connection and sends these bytes.
    pub fn data_connection(&self, bytes: &[u8]) -> TcpStream {
        let mut socket = TcpStream::connect(&self.data).expect("the data port");
        socket.set_read_timeout(Some(LONG)).expect("a timeout");
        std::io::Write::write_all(&mut socket, bytes).expect("it takes bytes");
        socket
    }

    /// Returns the preface of a lane's next connection, as a grant for a worker makes it.
    pub fn preface(&self, worker: &[u8], lane: u16, tls: bool) -> Preface {
        self.preface_of(1000, worker, lane, tls)
    }

    /// As [`Self::preface`], of a program of this user.
    pub fn preface_of(&self, uid: u32, worker: &[u8], lane: u16, tls: bool) -> Preface {
        let id: [u8; 16] = worker.try_into().expect("an id");
        let hex: String = worker.iter().map(|byte| format!("{byte:02x}")).collect();
        let lease = self.workers().into_iter().find(|w| w["worker"] == hex).map(|w| w["lease"].clone());
        let state = std::fs::read(self.path("state").join("leases.json")).expect("the leases");
        let state: serde_json::Value = serde_json::from_slice(&state).expect("JSON");
        let key = lease.map_or([0; 32], |lease| ticket_key(&state, &lease).expect("the lease's key"));
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        Preface::new(id, &Key::new(&key, &id, uid), lane, attempt, if tls { FLAG_TLS } else { 0 })
    }

    /// Opens a data connection to a worker, and reads the fake worker's line.
    pub fn adopt(&self, worker: &[u8], lane: u16, tls: bool) -> (TcpStream, serde_json::Value) {
        self.adopt_with(&self.preface(worker, lane, tls))
    }

    /// As [`Self::adopt`], with this preface.
    pub fn adopt_with(&self, preface: &Preface) -> (TcpStream, serde_json::Value) {
        let mut socket = self.data_connection(preface.as_bytes());
        let mut line = Vec::new();
        let mut byte = [0];
        while socket.read(&mut byte).expect("an answer") == 1 && byte[0] != b'\n' {
            line.push(byte[0]);
        }
        let said = serde_json::from_slice(&line)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&line)));
        (socket, said)
    }
}

/// Returns a lease's key, wherever the server's state has the lease.
fn ticket_key(state: &serde_json::Value, lease: &serde_json::Value) -> Option<[u8; 32]> {
    match state {
        serde_json::Value::Array(all) => all.iter().find_map(|part| ticket_key(part, lease)),
        serde_json::Value::Object(fields) if fields.get("id") == Some(lease) => {
            let hex = fields.get("ticket_key")?.as_str()?;
            let byte = |at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
            (0..hex.len()).step_by(2).map(byte).collect::<Option<Vec<_>>>()?.try_into().ok()
        }
        serde_json::Value::Object(fields) => fields.values().find_map(|part| ticket_key(part, lease)),
        _ => None,
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut child) = self.process.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[derive(Clone)]
pub struct Client {
    pub name: String,
    pub identity: Identity,
    pub pool: PoolClient<Channel>,
}

impl Client {
    pub fn request(&self) -> AllocateRequest {
        AllocateRequest {
            gpus: 1,
            boot_id: "b1".into(),
            machine_id: format!("machine of {}", self.name),
            ..Default::default()
        }
    }

    pub async fn allocate(&mut self, percent: f64) -> Result<Lease, Status> {
        let request = AllocateRequest { memory_percent: percent, ..self.request() };
        Ok(self.pool.allocate(request).await?.into_inner())
    }

    pub async fn take(&mut self, lease: &str) -> Result<Worker, Status> {
        let request = TakeWorkersRequest { lease: lease.into(), count: 1, ..Default::default() };
        Ok(self.pool.take_workers(request).await?.into_inner().workers.remove(0))
    }
}

/// Reads until the peer closes; a reset is a close.
pub fn rest(socket: &mut TcpStream) -> Vec<u8> {
    let mut out = Vec::new();
    match socket.read_to_end(&mut out) {
        Ok(_) => out,
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => out,
        Err(e) => panic!("the connection stays open: {e}"),
    }
}

pub fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}
