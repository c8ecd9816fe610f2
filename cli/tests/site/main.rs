//! A site of real programs: server, daemon and command line, over mutual TLS.
//!
//! Workers are the server's test double where no GPU matters, since such tests make no CUDA call.
#![expect(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod addresses;
mod audit;
mod batch;
mod diagnosis;
mod json;
mod local;
mod netperf;
mod restarts;
mod rotation;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use gpusession_test_daemon::{Helper, PrivateBus, TEST_TIMEOUT};
use gpusession_test_support::{Artefact, artefact};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[test]
fn helper_process() {
    gpusession_test_daemon::helper_main();
}

/// Child process of a test that reports a fault of a simulated GPU; `SITE_FAULT` holds the fault.
#[test]
fn fault_process() {
    if let Ok(fault) = std::env::var("SITE_FAULT") {
        let numbers: Vec<u64> = fault.split(' ').map(|n| n.parse().unwrap()).collect();
        let [gpu, event, data] = numbers.try_into().unwrap();
        assert_eq!(simgpu::nvml::simgpuReportFault(gpu as u32, event, data), 0);
    }
}

/// Returns the folder of the other packages' programs.
fn programs() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        artefact("gpuserver", Artefact::Example("fake-worker"));
        artefact("gpuserver", Artefact::Program("gpuserver"));
        let daemon = artefact("gpusessiond", Artefact::Program("gpusessiond"));
        daemon.parent().unwrap().to_owned()
    })
}

/// Returns the folder of the worker and the simulated driver.
fn simulated() -> PathBuf {
    artefact("gpuserver-worker", Artefact::Program("gpuserver-worker"));
    artefact("simgpu", Artefact::Library("libsimgpu.so")).parent().unwrap().to_owned()
}

/// A child that does not outlive its test.
struct Running(Child);

impl Running {
    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), signal).unwrap();
    }

    fn stop(mut self) -> i32 {
        self.signal(Signal::SIGTERM);
        self.0.wait().unwrap().code().unwrap_or(-1)
    }

    fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Site {
    folder: tempfile::TempDir,
    bus: PrivateBus,
    address: String,
    /// The server's driver library.
    driver: PathBuf,
    /// The program of the server's workers.
    worker: PathBuf,
    /// Environment of the server.
    variables: Vec<(&'static str, String)>,
}

/// Finds a free port outside the kernel's range for connections.
///
/// No connection can take such a port while a server is down.
fn free_port() -> u16 {
    loop {
        let port = 20_000
            + (std::process::id() as u16).wrapping_mul(7) % 5_000
            + NEXT_PORT.fetch_add(1, Ordering::Relaxed);
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

static NEXT_PORT: AtomicU16 = AtomicU16::new(0);

impl Site {
    /// A pool with one server, not started yet.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for sub in ["server", "server-run", "etc", "state", "run", "credentials", "lib"] {
            std::fs::create_dir(folder.path().join(sub)).unwrap();
        }
        std::fs::write(folder.path().join("lib/libcuda.so.1"), "").unwrap();
        let site = Self {
            folder,
            bus: PrivateBus::start(),
            address: String::new(),
            // Any shared library except gpusession's; the test double loads no driver.
            driver: "/lib/x86_64-linux-gnu/libc.so.6".into(),
            worker: programs().join("examples/fake-worker"),
            variables: Vec::new(),
        };
        site.server_listens(&format!("127.0.0.1:{}", free_port()), &free_port().to_string());
        site.gpuserver(&["pool", "init"]);
        site
    }

    /// A second server of another site's pool, not started yet.
    fn beside(first: &Self) -> Self {
        let site = Self::new();
        let config = std::fs::read_to_string(site.path("gpuserver.toml")).unwrap();
        std::fs::write(site.path("gpuserver.toml"), config.replace("gpu-a", "gpu-b")).unwrap();
        std::fs::remove_dir_all(site.path("server")).unwrap();
        std::fs::create_dir(site.path("server")).unwrap();
        let pool = site.path("pool.pem");
        std::fs::write(&pool, first.gpuserver(&["pool", "export"])).unwrap();
        site.gpuserver(&["pool", "import", &pool.display().to_string()]);
        site
    }

    /// A pool with real workers on two simulated GPUs.
    fn with_simulated_gpus() -> Self {
        let mut site = Self::new();
        let built = simulated();
        std::fs::create_dir(site.path("sim")).unwrap();
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            std::os::unix::fs::symlink(built.join("libsimgpu.so"), site.path("sim").join(name)).unwrap();
        }
        site.driver = site.path("sim/libcuda.so.1");
        site.worker = built.join("gpuserver-worker");
        // Sites of tests that run at a time have GPUs of their own.
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let machine = format!("site_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        site.variables = vec![("SIMGPU_DEVICES", "2".into()), ("SIMGPU_MACHINE", machine)];
        site.server_listens(&format!("127.0.0.1:{}", free_port()), &free_port().to_string());
        site
    }

    /// Reports a fault of a simulated GPU, as an NVML event.
    fn fault(&self, gpu: u32, event: u64, data: u64) {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["fault_process", "--exact", "--quiet"])
            .env("SITE_FAULT", format!("{gpu} {event} {data}"))
            .envs(self.variables.iter().map(|(k, v)| (k, v)))
            .env_remove("XDG_RUNTIME_DIR")
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn server_listens(&self, control: &str, data: &str) {
        let path = |name: &str| self.path(name).display().to_string();
        let text = format!(
            "name = \"gpu-a\"\nlisten = \"{control}\"\ndata_ports = \"{data}\"\ndriver = \"{}\"\nstate_dir = \"{}\"\nruntime_dir = \"{}\"\n\
             drain_timeout = 0\nlimits.gpus = 16\nlimits.max_persistent = 16\n",
            self.driver.display(),
            path("server"),
            path("server-run")
        );
        std::fs::write(self.path("gpuserver.toml"), text).unwrap();
    }

    fn server_command(&self) -> Command {
        let mut command = Command::new(programs().join("gpuserver"));
        command
            .env("GPUSERVER_CONF", self.path("gpuserver.toml"))
            .env("GPUSERVER_WORKER", &self.worker)
            .envs(self.variables.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::null());
        command
    }

    fn gpuserver(&self, arguments: &[&str]) -> String {
        let output = self.server_command().args(arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "gpuserver {arguments:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn start_server(&mut self) -> Running {
        let log = std::fs::File::create(self.path("server.log")).unwrap();
        let child = self.server_command().arg("serve").stderr(log).spawn().unwrap();
        let status = self.until("the server", |site| {
            let output = site.server_command().args(["status", "--json"]).output().unwrap();
            output
                .status
                .success()
                .then(|| serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap())
        });
        self.address = status["server"]["control_address"].as_str().unwrap().to_owned();
        Running(child)
    }

    fn token(&self) -> String {
        self.gpuserver(&["token", "create"]).trim().to_owned()
    }

    fn configure(&self, gpusession: &str, token: &str) {
        std::fs::write(self.path("etc/gpusession.toml"), gpusession).unwrap();
        let servers = format!("[[server]]\naddress = \"{}\"\n", self.address);
        std::fs::write(self.path("etc/servers.toml"), servers).unwrap();
        std::fs::write(self.path("credentials/gpusession.token"), token).unwrap();
    }

    fn environment(&self, command: &mut Command) {
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", self.path("home"))
            .env("DBUS_SYSTEM_BUS_ADDRESS", self.bus.address())
            .env("STATE_DIRECTORY", self.path("state"))
            .env("RUNTIME_DIRECTORY", self.path("run"))
            .env("CONFIGURATION_DIRECTORY", self.path("etc"))
            .env("CREDENTIALS_DIRECTORY", self.path("credentials"))
            .env("GPUSESSION_LIBDIR", self.path("lib"))
            .stdin(Stdio::null());
    }

    fn start_daemon(&self) -> Running {
        let mut command = Command::new(programs().join("gpusessiond"));
        self.environment(&mut command);
        Running(command.stderr(Stdio::null()).spawn().unwrap())
    }

    fn gpusession(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpusession"));
        self.environment(&mut command);
        command.args(arguments).output().unwrap()
    }

    /// Waits until the daemon's description passes a test.
    fn described(&self, what: &str, test: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
        self.until(what, |site| {
            let output = site.gpusession(&["status", "--json"]);
            let described = serde_json::from_slice::<serde_json::Value>(&output.stdout).ok()?;
            test(&described).then_some(described)
        })
    }

    fn lease(&self) -> String {
        let described = self.described("the lease", |d| d["state"] == "ready" && d["gpus_leased"] == 1);
        described["leases"][0]["id"].as_str().unwrap().to_owned()
    }

    fn until<T>(&self, what: &str, mut test: impl FnMut(&Self) -> Option<T>) -> T {
        let end = Instant::now() + TEST_TIMEOUT;
        loop {
            if let Some(found) = test(self) {
                return found;
            }
            if Instant::now() >= end {
                let log = std::fs::read_to_string(self.path("server.log")).unwrap_or_default();
                panic!("{what}: not in time; the server said: {log}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_machine_joins_leases_and_survives_restarts_of_both_ends() {
    let mut site = Site::new();
    let server = site.start_server();
    site.configure("[client]\nname = \"vm-1\"\n[[lease]]\nmemory = \"25%\"\n", &site.token());
    let daemon = site.start_daemon();
    let lease = site.lease();
    assert!(site.gpuserver(&["leases"]).contains(&lease));

    // The server learns at once that a program has exited.
    let helper = Helper::start(&site.path("run/grant.sock"));
    assert!(helper.granted);
    site.described("the process", |d| d["leases"][0]["processes"] == 1);
    helper.kill();
    site.described("its end", |d| d["leases"][0]["processes"] == 0);

    // kill -9 of the daemon: the lease survives.
    daemon.kill();
    let daemon = site.start_daemon();
    assert_eq!(site.lease(), lease);

    // kill -9 of the server: the lease survives, and programs are served again without
    // intervention.
    server.kill();
    let server = site.start_server();
    site.described("the server again", |d| {
        d["servers"][0]["state"] == "online" && d["servers"][0]["trouble"].is_null()
    });
    assert_eq!(site.lease(), lease);
    site.until("a grant", |site| Some(Helper::start(&site.path("run/grant.sock"))).filter(|h| h.granted))
        .kill();

    // The daemon reports a stopped server as trouble, and gets the lease back when it restarts.
    assert_eq!(server.stop(), 0);
    site.described("that it is gone", |d| !d["servers"][0]["trouble"].is_null());
    let server = site.start_server();
    // Leases released while the server is down would end only by expiry.
    site.described("the server once more", |d| {
        d["servers"][0]["state"] == "online" && d["servers"][0]["trouble"].is_null()
    });
    site.lease();

    assert_eq!(daemon.stop(), 0);
    assert!(site.gpuserver(&["leases"]).contains("no leases"));
    assert_eq!(server.stop(), 0);
}

impl Drop for Site {
    fn drop(&mut self) {
        for (name, value) in &self.variables {
            if *name == "SIMGPU_MACHINE" {
                let _ = std::fs::remove_file(format!("/dev/shm/simgpu-{}-{value}", nix::unistd::getuid()));
            }
        }
    }
}

/// D-Bus signals of a bus, as text.
struct Heard {
    _monitor: Running,
    path: PathBuf,
}

impl Heard {
    fn on(bus: &PrivateBus) -> Self {
        let path = bus.folder().join("heard");
        let file = std::fs::File::create(&path).unwrap();
        let child = Command::new("dbus-monitor")
            .args(["--address", &bus.address(), "type=signal"])
            .stdout(file)
            .spawn()
            .expect("dbus-monitor is installed");
        Self { _monitor: Running(child), path }
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.path).unwrap()
    }
}

const ECC: u64 = 2;
const XID: u64 = 8;

#[test]
fn a_gpu_that_fails_is_taken_out_and_its_leases_go_elsewhere() {
    let mut site = Site::with_simulated_gpus();
    let server = site.start_server();
    let heard = Heard::on(&site.bus);
    site.configure("[client]\nname = \"vm-1\"\n[[lease]]\nmemory = \"25%\"\n", &site.token());
    let daemon = site.start_daemon();
    let lease = site.lease();
    let gpus = |site: &Site| -> Vec<serde_json::Value> {
        let all: serde_json::Value =
            serde_json::from_str(&site.gpuserver(&["gpus", "--json"])).expect("JSON");
        all["gpus"].as_array().unwrap().clone()
    };
    let holder = gpus(&site).iter().position(|g| g["state"] == "leased").unwrap();
    let workers = |site: &Site, lease: &str| site.gpuserver(&["ps", "--json"]).matches(lease).count();
    site.until("a worker", |site| (workers(site, &lease) > 0).then_some(()));
    let state = |site: &Site, gpu: usize| {
        let gpu = gpus(site)[gpu].clone();
        (gpu["state"].as_str().unwrap().to_owned(), gpu["reason"].as_str().unwrap_or_default().to_owned())
    };

    site.until("what NVML says of the GPUs", |site| {
        let known =
            |gpu: &serde_json::Value| gpu["used_bytes"].is_u64() && gpu["utilization_percent"].is_u64();
        gpus(site).iter().all(known).then_some(())
    });
    // A program's own fault does not concern other programs.
    site.fault(holder as u32, XID, 31);
    assert_eq!(state(&site, holder).0, "leased");
    // Repeated, since the monitor may not receive events yet.
    let reason = site.until("the GPU is out", |site| {
        site.fault(holder as u32, XID, 79);
        let (state, reason) = state(site, holder);
        (state == "broken").then_some(reason)
    });
    assert_eq!(reason, "Xid 79: it has fallen off the bus");
    // The lease and its workers end; the client gets the reason, and the other GPU.
    let next = site.described("a lease on the other GPU", |d| {
        d["gpus_leased"] == 1 && d["leases"][0]["id"] != lease.as_str()
    });
    let next = next["leases"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(state(&site, 1 - holder).0, "leased");
    site.until("its workers are gone", |site| (workers(site, &lease) == 0).then_some(()));
    site.until("the signal", |_| {
        let text = heard.text();
        (text.contains("failed: Xid 79: it has fallen off the bus") && text.contains(&lease)).then_some(())
    });
    let records = site.gpuserver(&["accounting", "--kind", "lease"]);
    assert!(records.contains("failed: Xid 79"), "{records}");

    // A repaired GPU is leased again; memory errors also take a GPU out.
    let uuid = gpus(&site)[holder]["uuid"].as_str().unwrap().to_owned();
    assert!(site.gpuserver(&["on", &uuid]).contains("is free"));
    site.fault(1 - holder as u32, ECC, 0);
    site.until("the other one is out", |site| {
        let (state, reason) = state(site, 1 - holder);
        // The event and the count that is read each second both set a reason: the later one stays.
        let ecc = reason.contains("uncorrectable ECC error") || reason.contains("uncorrected ECC errors");
        (state == "broken" && ecc).then_some(())
    });
    site.described("a lease on the first GPU", |d| {
        d["gpus_leased"] == 1 && d["leases"][0]["id"] != next.as_str()
    });
    assert_eq!(state(&site, holder).0, "leased");
    assert_eq!(daemon.stop(), 0);
    assert_eq!(server.stop(), 0);
}

#[test]
fn joining_fails_with_words_that_help() {
    let mut site = Site::new();
    let _server = site.start_server();
    let address = site.address.clone();
    let good = site.token();
    let join = |token: &str, address: &str| {
        let arguments = ["join", address, token, "--name", "vm-1", "--user"];
        let output = site.gpusession(&arguments);
        if !output.status.success() {
            let told = site.gpusession(&[&arguments[..], &["--json"]].concat());
            let error: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
            assert_eq!((told.status, &error["schema"]), (output.status, &1.into()));
            assert_eq!(error["error"]["code"], told.status.code().unwrap());
            let message = error["error"]["message"].as_str().unwrap();
            assert!(text(&output.stderr).starts_with(&format!("gpusession: {message}")), "{message}");
        }
        (output.status.code().unwrap(), text(&output.stderr))
    };
    let (code, error) = join("gpsj-nonsense", &address);
    assert_eq!(code, 78, "{error}");
    assert!(error.contains("not a join token"), "{error}");
    // A token of another pool: this server does not belong to it, whatever its name.
    let mut other = Site::new();
    let _other_server = other.start_server();
    let (code, error) = join(&other.token(), &address);
    assert_ne!(code, 0);
    assert!(error.contains("not of the pool that the join token is for"), "{error}");
    // The right pool, but a forged secret.
    let mut forged = good.clone();
    forged.replace_range(80..81, if &forged[80..81] == "x" { "y" } else { "x" });
    let (code, error) = join(&forged, &address);
    assert_eq!(code, 77, "{error}");
    let (code, error) = join(&good, "127.0.0.1:1");
    assert_eq!(code, 69, "{error}");
    assert!(error.contains("127.0.0.1:1"), "{error}");
    assert!(
        !site.path("home/.config/gpusession/identity/client.key").exists(),
        "nothing is left of a failed join"
    );

    let (code, error) = join(&good, &address);
    assert_eq!(code, 0, "{error}");
    use std::os::unix::fs::PermissionsExt as _;
    let key = site.path("home/.config/gpusession/identity/client.key");
    assert_eq!(std::fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    let folder = std::fs::metadata(key.parent().unwrap()).unwrap();
    assert_eq!(folder.permissions().mode() & 0o777, 0o700);
    let (code, error) = join(&good, &address);
    assert_eq!(code, 78, "{error}");
    assert!(error.contains("already"), "{error}");

    // The right certificate, but another key.
    std::fs::write(&key, rcgen::KeyPair::generate().unwrap().serialize_pem()).unwrap();
    let output = site.gpusession(&["run", "--server", &address, "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).contains("client.pem"), "{}", text(&output.stderr));
}

#[test]
fn a_user_who_leaves_has_no_identity_and_can_join_again() {
    let mut site = Site::new();
    let server = site.start_server();
    let join = |site: &Site| {
        let token = site.token();
        site.gpusession(&["join", "--user", "--name", "me", &site.address, &token])
    };
    let nowhere = site.gpusession(&["leave", "--user"]);
    assert_eq!(nowhere.status.code(), Some(78), "{}", text(&nowhere.stderr));
    assert!(join(&site).status.success());
    let again = join(&site);
    assert_eq!(again.status.code(), Some(78));
    assert!(text(&again.stderr).contains("gpusession leave"), "{}", text(&again.stderr));
    let left = site.gpusession(&["leave", "--user", "--for-template", "--json"]);
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&left.stdout).unwrap()["left"], true);
    assert!(site.path("home/.config/gpusession/servers.toml").exists());
    assert!(!site.path("home/.config/gpusession/identity").exists());
    site.gpuserver(&["clients", "forget", "me"]);
    let joined = join(&site);
    assert_eq!(text(&joined.stdout), format!("joined the pool as me; servers: {}\n", site.address));
    assert!(site.gpusession(&["leave", "--user"]).status.success());
    assert!(!site.path("home/.config/gpusession/servers.toml").exists());
    server.stop();
}

#[test]
fn run_without_a_daemon_leases_and_gives_back() {
    let mut site = Site::new();
    let server = site.start_server();
    // The name that was typed stays, and not the address to which it resolves.
    let address = site.address.replace("127.0.0.1", "localhost");
    let joined = site.gpusession(&["join", &address, &site.token(), "--user", "--name", "me", "--json"]);
    let expected = serde_json::json!({ "schema": 1, "name": "me", "servers": [&address] });
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&joined.stdout).unwrap(), expected);
    let script = "test -S $GPUSESSION_SOCKET && stat -c %a $(dirname $GPUSESSION_SOCKET); echo $GPUSESSION_LEASE; echo $NCCL_P2P_LEVEL $NCCL_WORK_FIFO_BYTES; exit 9";
    let run = site.gpusession(&["run", "-n", "2", "--server", &address, "--", "sh", "-c", script]);
    assert_eq!(run.status.code(), Some(9), "{}", text(&run.stderr));
    let out = text(&run.stdout);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[0], "700");
    assert_eq!(lines[1].len(), 12);
    assert_eq!(lines[2], "SYS 65536", "a program on two GPUs");
    assert!(site.gpuserver(&["leases"]).contains("no leases"));
    // The user's own list of servers, without a daemon.
    assert_eq!(site.gpusession(&["run", "--", "sh", "-c", "exit 3"]).status.code(), Some(3));

    // Signals are forwarded to the program, and the lease is released all the same.
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpusession"));
    site.environment(&mut command);
    let trap = "trap 'exit 42' TERM; echo up; while :; do sleep 0.01; done";
    let mut running =
        Running(command.args(["run", "--", "sh", "-c", trap]).stdout(Stdio::piped()).spawn().unwrap());
    let mut byte = [0; 2];
    std::io::Read::read_exact(running.0.stdout.as_mut().unwrap(), &mut byte).unwrap();
    assert!(!site.gpuserver(&["leases"]).contains("no leases"));
    assert_eq!(running.stop(), 42);
    assert!(site.gpuserver(&["leases"]).contains("no leases"));

    // A request reports that the server grants a shorter lifetime than requested.
    let file = site.path("lease.toml").display().to_string();
    let request = site.gpusession(&["request", "--server", &address, "-n", "2", "--ttl", "7d", "-o", &file]);
    assert_eq!(request.status.code(), Some(0), "{}", text(&request.stderr));
    let said = text(&request.stdout);
    assert!(said.contains("it ends in 1 d 0 h, not 7 d 0 h: the server's limit lease_ttl"), "{said}");
    assert_eq!(
        site.gpusession(&["run", "--", "true"]).status.code(),
        Some(125),
        "all GPUs are in that lease"
    );
    let script = ["run", "--lease", &file, "--", "sh", "-c", "echo $GPUSESSION_LEASE"];
    let (first, second) = (site.gpusession(&script), site.gpusession(&script));
    assert_eq!(first.stdout, second.stdout, "{}", text(&first.stderr));
    assert!(std::fs::read_to_string(&file).unwrap().contains(text(&first.stdout).trim()));
    let released = site.gpusession(&["release", &file, "--json"]);
    let told: serde_json::Value = serde_json::from_slice(&released.stdout).unwrap();
    let id = text(&first.stdout).trim().to_owned();
    assert_eq!(told, serde_json::json!({ "schema": 1, "lease": id, "released": true, "trouble": null }));
    // Not 75: trying again does not help.
    let request = site.gpusession(&["request", "--server", &address, "--memory", "999GiB", "-o", &file]);
    assert_eq!(request.status.code(), Some(1), "{}", text(&request.stderr));
    let request = site.gpusession(&["request", "--server", &address, "-n", "2", "-o", &file]);
    assert_eq!(request.status.code(), Some(0), "{}", text(&request.stderr));
    // With the server down, `release` succeeds all the same, and the next command repeats it.
    server.kill();
    let release = site.gpusession(&["release", &file]);
    assert_eq!(release.status.code(), Some(0), "{}", text(&release.stderr));
    assert!(text(&release.stdout).contains("not released yet"), "{}", text(&release.stdout));
    assert!(!Path::new(&file).exists());
    let server = site.start_server();
    assert!(!site.gpuserver(&["leases"]).contains("no leases"));
    let sleep = ["run", "--server", &address, "-m", "1%", "--", "sleep", "1"];
    // A command that fails at once may end between the server's release and its own note of it: the
    // next command repeats the release.
    let waiting = site.path("home/.config/gpusession/releases");
    site.until("the release", |site| {
        site.gpusession(&sleep);
        let released = site.gpuserver(&["leases"]).contains("no leases");
        (released && std::fs::read_dir(&waiting).unwrap().count() == 0).then_some(())
    });
    server.kill();
    let unreachable = site.gpusession(&["run", "--server", &address, "--", "true"]);
    assert_eq!(unreachable.status.code(), Some(125));
    assert!(text(&unreachable.stderr).contains(&address), "{}", text(&unreachable.stderr));
}

#[test]
fn one_program_gets_gpus_of_several_servers() {
    let mut site = Site::new();
    let mut other = Site::beside(&site);
    let (_server, second) = (site.start_server(), other.start_server());
    let file = site.path("two.toml").display().to_string();
    let two =
        format!("[[server]]\naddress = \"{}\"\n[[server]]\naddress = \"{}\"\n", site.address, other.address);
    std::fs::write(&file, two).unwrap();
    let ids = |output: &Output| {
        let ids: Vec<String> = text(&output.stdout).trim().split(',').map(str::to_owned).collect();
        assert!(ids.iter().all(|id| id.len() == 12), "{}: {}", text(&output.stdout), text(&output.stderr));
        ids.len()
    };
    let (address, servers) = (site.address.clone(), ["--servers".to_owned(), file.clone()]);
    let addresses = ["--server", &site.address, "--server", &other.address].map(str::to_owned);
    let run = |site: &Site, servers: &[String], gpus: &str| {
        let servers: Vec<&str> = servers.iter().map(String::as_str).collect();
        let program = ["--", "sh", "-c", "echo $GPUSESSION_LEASE"];
        site.gpusession(&[&["run", "-n", gpus][..], &servers, &program].concat())
    };
    let nothing_is_left = |site: &Site, other: &Site| {
        for site in [site, other] {
            site.until("the release", |s| s.gpuserver(&["leases"]).contains("no leases").then_some(()));
        }
    };

    // With an identity of the user's own, and no daemon.
    let joined = site.gpusession(&["join", &address, &site.token(), "--user", "--name", "me"]);
    assert!(joined.status.success(), "{}", text(&joined.stderr));
    assert_eq!(ids(&run(&site, &addresses, "2")), 1, "one server has room");
    assert_eq!(ids(&run(&site, &addresses, "4")), 2);
    assert_eq!(ids(&run(&site, &servers, "3")), 2);
    nothing_is_left(&site, &other);
    let five = run(&site, &servers, "5");
    assert_eq!(five.status.code(), Some(125));
    assert!(text(&five.stderr).contains("4 of 5 GPUs"), "{}", text(&five.stderr));
    nothing_is_left(&site, &other);
    for (content, words) in [("", "names no server"), ("[[server]]\nadress = \"x\"\n", "adress")] {
        std::fs::write(site.path("bad.toml"), content).unwrap();
        let bad = run(&site, &["--servers".into(), site.path("bad.toml").display().to_string()], "1");
        assert_eq!(bad.status.code(), Some(125));
        assert!(text(&bad.stderr).contains(words), "{}", text(&bad.stderr));
    }
    let missing = run(&site, &["--servers".into(), "/nonesuch".into()], "1");
    assert!(text(&missing.stderr).contains("/nonesuch: not found"), "{}", text(&missing.stderr));

    // Without one, the daemon leases from the servers that it knows.
    assert!(site.gpusession(&["leave", "--user"]).status.success());
    site.gpuserver(&["clients", "forget", "me"]);
    site.configure("[client]\nname = \"vm-1\"\n", &site.token());
    let _daemon = site.start_daemon();
    // The daemon writes the server's own list when it joins.
    site.described("the first server", |d| d["servers"][0]["state"] == "online");
    std::fs::write(site.path("etc/servers.toml"), std::fs::read(&file).unwrap()).unwrap();
    assert!(site.gpusession(&["reload"]).status.success());
    site.described("both servers", |d| {
        d["servers"]
            .as_array()
            .is_some_and(|all| all.len() == 2 && all.iter().all(|s| s["state"] == "online"))
    });
    assert_eq!(ids(&run(&site, &servers, "4")), 2);
    nothing_is_left(&site, &other);
    let unknown = run(&site, &["--server".into(), "127.0.0.1:1".into()], "1");
    assert_eq!(unknown.status.code(), Some(125));
    assert!(text(&unknown.stderr).contains("127.0.0.1:1: not in the pool"), "{}", text(&unknown.stderr));
    let five = run(&site, &servers, "5");
    assert!(text(&five.stderr).contains("4 of 5 GPUs"), "{}", text(&five.stderr));
    nothing_is_left(&site, &other);

    // The user's own list is preferred to the daemon's choice, and may name no other server.
    let own = site.path("home/.config/gpusession/servers.toml");
    let holder = |site: &Site| {
        let lease = site.path("own.toml").display().to_string();
        let requested = site.gpusession(&["request", "-n", "1", "-o", &lease]);
        assert!(requested.status.success(), "{}", text(&requested.stderr));
        let on_second = !other.gpuserver(&["leases"]).contains("no leases");
        assert!(site.gpusession(&["release", &lease]).status.success());
        on_second
    };
    for (address, on_second) in [(&other.address, true), (&site.address, false)] {
        std::fs::create_dir_all(own.parent().unwrap()).unwrap();
        std::fs::write(&own, format!("[[server]]\naddress = \"{address}\"\n")).unwrap();
        assert_eq!(holder(&site), on_second, "{address}");
        assert_eq!(ids(&run(&site, &[], "2")), 1);
        assert_eq!(run(&site, &[], "3").status.code(), Some(125), "one server has two");
        nothing_is_left(&site, &other);
    }
    std::fs::write(&own, "[[server]]\naddress = \"127.0.0.1:1\"\n").unwrap();
    let unknown = run(&site, &[], "1");
    assert_eq!(unknown.status.code(), Some(125));
    assert!(text(&unknown.stderr).contains("127.0.0.1:1: not in the pool"), "{}", text(&unknown.stderr));
    std::fs::write(&own, "[[server]]\nadress = \"x\"\n").unwrap();
    let bad = run(&site, &[], "1");
    assert!(text(&bad.stderr).contains("servers.toml:2"), "{}", text(&bad.stderr));

    // A server that the list no longer names is in no table.
    let listed = |address: &str| format!("[[server]]\naddress = \"{address}\"\n");
    std::fs::write(site.path("etc/servers.toml"), listed(&site.address)).unwrap();
    assert!(site.gpusession(&["reload"]).status.success());
    site.described("one server", |d| d["servers"].as_array().is_some_and(|all| all.len() == 1));
    let smi: serde_json::Value =
        serde_json::from_str(&text(&site.gpusession(&["smi", "--json"]).stdout)).unwrap();
    assert_eq!(smi["servers"].as_array().map(Vec::len), Some(1), "{smi}");
    let both = listed(&site.address) + &listed(&other.address);
    std::fs::write(site.path("etc/servers.toml"), both).unwrap();
    assert!(site.gpusession(&["reload"]).status.success());
    site.described("both servers again", |d| {
        d["servers"].as_array().is_some_and(|all| all.iter().filter(|s| s["state"] == "online").count() == 2)
    });
    second.stop();
}

#[test]
fn a_reserve_is_kept_for_its_clients() {
    let mut site = Site::new();
    let config = std::fs::read_to_string(site.path("gpuserver.toml")).unwrap();
    let reserve = format!("{config}[[reserve]]\nclient = \"vm-*\"\ngpus = 1\n");
    std::fs::write(site.path("gpuserver.toml"), reserve).unwrap();
    let server = site.start_server();
    let address = site.address.clone();
    let joined = site.gpusession(&["join", &address, &site.token(), "--user", "--name", "me"]);
    assert!(joined.status.success(), "{}", text(&joined.stderr));
    let run = |site: &Site, gpus: &str| {
        site.gpusession(&["run", "--server", &address, "-n", gpus, "--", "true"]).status.code()
    };
    assert_eq!((run(&site, "2"), run(&site, "1")), (Some(125), Some(0)), "one of two is kept");

    // Another client has the rest; the reserve's client gets its GPU all the same.
    let file = site.path("mine.toml").display().to_string();
    let request = site.gpusession(&["request", "--server", &address, "-o", &file]);
    assert!(request.status.success(), "{}", text(&request.stderr));
    site.configure("[client]\nname = \"vm-1\"\n[[lease]]\n", &site.token());
    let daemon = site.start_daemon();
    site.lease();
    assert!(site.gpusession(&["release", &file]).status.success());
    assert_eq!(run(&site, "1"), Some(0), "the reserve is used up by its client");
    daemon.stop();
    assert_eq!(run(&site, "2"), Some(125), "and kept again after the release");

    // Without the reserve, all GPUs are everybody's; no restart is needed.
    std::fs::write(site.path("gpuserver.toml"), config).unwrap();
    server.signal(Signal::SIGHUP);
    site.until("both GPUs", |site| (run(site, "2") == Some(0)).then_some(()));
}

#[test]
fn data_without_encryption_is_shown_on_both_ends() {
    use std::io::Write as _;
    let mut site = Site::new();
    let mut file = std::fs::File::options().append(true).open(site.path("gpuserver.toml")).unwrap();
    writeln!(file, "encryption = \"off\"\ntrusted_networks = [\"127.0.0.0/8\"]").unwrap();
    let _server = site.start_server();
    site.configure("[[lease]]\n", &site.token());
    let daemon = site.start_daemon();
    // By default, a client sends nothing in clear, whatever the server decides.
    site.described("the refusal", |d| d.to_string().contains("would send this client's data unencrypted"));
    site.until("the lease is back", |site| site.gpuserver(&["leases"]).contains("no leases").then_some(()));
    daemon.stop();
    site.configure("[transport]\nencryption = \"server\"\n[[lease]]\n", "");
    let _daemon = site.start_daemon();
    let lease = site.lease();
    for command in ["status", "list"] {
        let shown = text(&site.gpusession(&[command]).stdout);
        assert!(shown.contains("tcp, NOT encrypted: the server trusts this network"), "{shown}");
    }
    let shown = site.gpuserver(&["leases"]);
    let mut lines = shown.lines();
    let column = lines.next().unwrap().find("TLS").unwrap();
    let row = lines.find(|line| line.starts_with(&lease)).unwrap();
    assert!(row[column..].starts_with("no "), "{shown}");
}

#[test]
fn a_revoked_machine_says_so() {
    let mut site = Site::new();
    let _server = site.start_server();
    site.configure("[client]\nname = \"vm-1\"\n[[lease]]\n", &site.token());
    let _daemon = site.start_daemon();
    site.lease();
    site.gpuserver(&["clients", "revoke", "vm-1"]);
    site.described("the refusal", |d| d["servers"][0]["state"] == "unauthorized");
    site.described("the loss", |d| d["gpus_leased"] == 0);
    let status = text(&site.gpusession(&["status"]).stdout);
    assert!(status.contains("gpusession join"), "{status}");
}

#[test]
fn a_daemon_without_a_token_waits_for_somebody_to_join() {
    let mut site = Site::new();
    let _server = site.start_server();
    site.configure("[[lease]]\n", "");
    std::fs::remove_file(site.path("etc/servers.toml")).unwrap();
    let _daemon = site.start_daemon();
    let waits = site.described("that it waits", |d| !d["leases"][0]["trouble"].is_null());
    assert!(waits["leases"][0]["trouble"].as_str().unwrap().contains("gpusession join"), "{waits}");
    assert_eq!(waits["state"], "offline");
    if !nix::unistd::getuid().is_root() {
        eprintln!("skipped: only root joins for the whole machine");
        return;
    }
    let joined = site.gpusession(&["join", &site.address, &site.token(), "--name", "vm-2"]);
    assert_eq!(joined.status.code(), Some(0), "{}", text(&joined.stderr));
    site.lease();
}
