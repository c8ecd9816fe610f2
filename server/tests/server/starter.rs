//! A server whose monitor and measurements have a user of their own, by a starter.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use gpusession_proto::control::{AllocateRequest, MeasureRequest};
use gpusession_test_server::{Server, alive, eventually, example, rest};
use gpusession_test_support::{Artefact, artefact};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User};

use crate::mps::{SHARING, ask as ask_mps};
use crate::netperf::{Endpoint, ask, reply};
use crate::pid;
use crate::restart::{Systemd, program, worker_row};

/// Users of the server, of the starter, and of neither. The tests need root.
const SERVER: u32 = 65534;
const STARTER: u32 = 65533;
const OTHER: u32 = 65532;

struct Starter(Child);

impl Drop for Starter {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Starter {
    /// Starts a starter of fake workers.
    async fn start(socket: &Path) -> Self {
        Self::of(socket, &artefact("gpuserver", Artefact::Example("fake-worker"))).await
    }

    async fn of(socket: &Path, worker: &Path) -> Self {
        let user = User::from_uid(SERVER.into()).unwrap().expect("a user of that number").name;
        let process = Command::new(artefact("gpuserver", Artefact::Program("gpuserver-starter")))
            .args(["--user", &user, "--listen"])
            .arg(socket)
            .arg("--mps")
            .arg(socket.with_file_name("mps"))
            .env("GPUSERVER_WORKER", worker)
            .env("CACHE_DIRECTORY", socket.with_file_name("code"))
            .stdin(Stdio::null())
            .uid(STARTER)
            .gid(STARTER)
            .spawn()
            .expect("gpuserver-starter starts");
        let starter = Self(process);
        eventually("the starter listens", async || UnixStream::connect(socket).is_ok()).await;
        std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o666)).unwrap();
        starter
    }

    fn monitors(&self) -> Vec<(i32, u32)> {
        self.programs("--monitor")
    }

    /// Returns pid and user of each program with this flag that it started.
    fn programs(&self, flag: &str) -> Vec<(i32, u32)> {
        let of = |entry: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            let parent: u32 = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
            let line = std::fs::read(entry.path().join("cmdline")).ok()?;
            let of_it = line.split(|b| *b == 0).any(|argument| argument == flag.as_bytes());
            let pid = entry.file_name().to_str()?.parse().ok()?;
            (parent == self.0.id() && of_it).then_some((pid, uid(pid)?))
        };
        std::fs::read_dir("/proc").unwrap().flatten().filter_map(of).collect()
    }
}

/// Returns the user of a process; a process that lists none of its files is root's in `/proc`.
fn uid(pid: i32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().next()?.parse().ok()
}

fn as_user(uid: u32, command: &mut Command) -> Output {
    command.uid(uid).gid(uid).current_dir("/").stdin(Stdio::null()).output().unwrap()
}

/// Prepares a server of another user, with folders of its own.
async fn prepare() -> Server {
    prepare_with("libcuda.so.1", "").await
}

async fn prepare_with(driver: &str, lines: &str) -> Server {
    let name = if driver.contains('/') { "libcuda.so.1" } else { driver };
    let mut server = Server::prepare(name, lines).await;
    server.configure(driver, &format!("{lines}\nstarter = {:?}", server.path("start/start.sock")));
    server.user = Some(SERVER);
    std::fs::write(server.path("readings.json"), "[]").unwrap();
    for (folder, mode) in [("", 0o755), ("start", 0o777), ("run", 0o755), ("state", 0o700)] {
        std::fs::create_dir_all(server.path(folder)).unwrap();
        std::fs::set_permissions(server.path(folder), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let own = format!("{SERVER}:{SERVER}");
    let mut give = Command::new("chown");
    give.args(["-R", &own]).args(["state", "run"].map(|folder| server.path(folder)));
    assert!(give.status().unwrap().success());
    server
}

#[tokio::test]
async fn the_monitor_has_a_user_of_its_own() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let mut server = prepare().await;
    let socket = server.path("start/start.sock");
    // A server without its starter does not start, and names it.
    let early = as_user(SERVER, &mut server.command(&["serve"]));
    let said = String::from_utf8_lossy(&early.stderr).into_owned();
    assert!(said.contains("start.sock") && said.contains("systemctl status"), "{said}");

    let starter = Starter::start(&socket).await;
    server.run().await;
    let users = || starter.monitors().into_iter().map(|(_, uid)| uid).collect::<Vec<_>>();
    eventually("the monitor runs", async || users() == [STARTER]).await;
    let status = &server.json(&["status"])["server"];
    assert_eq!(status["users"], "one for the server, one for its workers and all else that loads the driver");
    // It comes back, and ends with the server.
    let (first, _) = starter.monitors()[0];
    kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
    eventually("another monitor runs", async || starter.monitors().iter().any(|(pid, _)| *pid != first))
        .await;
    server.signal(Signal::SIGKILL);
    eventually("the monitor ends", async || starter.monitors().is_empty()).await;
}

#[tokio::test]
async fn the_user_of_the_monitor_has_no_right_of_the_servers() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let mut server = prepare().await;
    let socket = server.path("start/start.sock");
    let starter = Starter::start(&socket).await;
    server.run().await;
    let denied = |uid: u32, program: &str, arguments: &[&str]| {
        let done = as_user(uid, Command::new(program).args(arguments));
        assert!(!done.status.success(), "{program} {arguments:?}: {done:?}");
        String::from_utf8_lossy(&done.stderr).into_owned()
    };
    let pid = server.json(&["status"])["server"]["pid"].as_u64().unwrap();
    for file in [server.path("state"), format!("/proc/{pid}/fd").into()] {
        let said = denied(STARTER, "/bin/ls", &["-l", &format!("{}/", file.display())]);
        assert!(said.contains("denied"), "{said}");
    }
    denied(STARTER, "/bin/cat", &[&format!("/proc/{pid}/environ")]);
    denied(STARTER, "/bin/kill", &["-9", &pid.to_string()]);
    let asked = as_user(STARTER, &mut server.command(&["status"]));
    assert!(!asked.status.success(), "{asked:?}");
    // And no other user has programs started.
    let ask =
        "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\nprint(s.recv(4096))";
    for uid in [OTHER, STARTER] {
        let asked = as_user(uid, Command::new("/usr/bin/python3").args(["-c", ask]).arg(&socket));
        let said = String::from_utf8_lossy(&asked.stdout).into_owned();
        assert!(said.contains("answers root and the server alone"), "{asked:?}");
    }
    drop(starter);
}

#[tokio::test]
async fn programs_outlive_the_server_and_the_starter_whose_user_they_have() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    // Its workers do not stop when they are asked to.
    let mut server = prepare_with("deaf-libcuda.so.1", "").await;
    let socket = server.path("start/start.sock");
    let systemd = Systemd::new(&server);
    let starter = Starter::start(&socket).await;
    systemd.run(&mut server).await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let (id, mut lane, said) = program(&server, &mut vm, &lease.id).await;
    let worker = pid(&said["pid"]);
    assert_eq!(uid(worker as i32), Some(STARTER));
    let code = PathBuf::from(said["environment"]["CUDA_CACHE_PATH"].as_str().unwrap());
    assert!(code.starts_with(server.path("start/code/compiled")), "{}", code.display());
    std::fs::create_dir_all(code.join("a/b")).unwrap();
    std::fs::write(code.join("a/b/code"), "compiled").unwrap();
    let own = format!("{STARTER}:{STARTER}");
    assert!(Command::new("chown").arg("-R").arg(own).arg(&code).status().unwrap().success());

    for signal in [Signal::SIGUSR2, Signal::SIGKILL] {
        let before = worker_row(&server, &said);
        server.signal(signal);
        assert!(alive(worker), "after {signal}");
        systemd.run(&mut server).await;
        let after = worker_row(&server, &said);
        for key in ["worker", "pid", "state", "lease", "program", "memory_bytes"] {
            assert_eq!(after[key], before[key], "{key} after {signal}");
        }
    }
    // A worker that exits says how.
    let mut vm = server.again(&vm).await;
    let (_id, mut crashed, other) = program(&server, &mut vm, &lease.id).await;
    kill(Pid::from_raw(pid(&other["pid"]) as i32), Signal::SIGABRT).unwrap();
    assert!(rest(&mut crashed).is_empty());
    let ends = |worker: &serde_json::Value| {
        let records = server.json(&["accounting"])["records"].take();
        let record = records.as_array().unwrap().iter().find(|r| r["worker"] == worker["worker"]).cloned();
        record.map(|r| r["reason"].to_string()).unwrap_or_default()
    };
    eventually("its end is recorded", async || ends(&other).contains("SIGABRT")).await;

    drop(starter);
    assert!(alive(worker));
    std::fs::remove_file(&socket).unwrap();
    let starter = Starter::start(&socket).await;
    server.adopt(&id, 1, true);
    let ended = server.verb(&["kill", said["worker"].as_str().unwrap()]);
    assert!(ended.status.success(), "{ended:?}");
    eventually("the new starter killed it", async || !alive(worker)).await;
    assert!(rest(&mut lane).is_empty());
    eventually("it is off the books", async || worker_row(&server, &said).is_null()).await;
    eventually("its folder is gone", async || !code.exists()).await;
    let (_id, _lane, later) = program(&server, &mut vm, &lease.id).await;
    let kept = later["environment"]["CUDA_CACHE_PATH"].as_str().unwrap().to_owned() + "/a/b/code";
    assert_eq!(std::fs::read_to_string(kept).unwrap(), "compiled", "its user's next program has its code");
    // An ordinary stop leaves no worker.
    assert_eq!(server.signal(Signal::SIGTERM).code(), Some(0));
    eventually("all workers have ended", async || !alive(pid(&later["pid"]))).await;
    eventually("nothing is kept", async || systemd.workers() == 0).await;
    drop(starter);
}

#[tokio::test]
async fn a_worker_of_a_server_without_a_starter_lives_on_with_one() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let mut server = prepare_with("deaf-libcuda.so.1", "").await;
    let socket = server.path("start/start.sock");
    let configured = std::fs::read_to_string(server.path("gpuserver.toml")).unwrap();
    server.configure("deaf-libcuda.so.1", "");
    let systemd = Systemd::new(&server);
    systemd.run(&mut server).await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let (_id, mut lane, said) = program(&server, &mut vm, &lease.id).await;
    let old = pid(&said["pid"]);
    assert_eq!(uid(old as i32), Some(SERVER));
    let code = PathBuf::from(said["environment"]["CUDA_CACHE_PATH"].as_str().unwrap());

    server.signal(Signal::SIGUSR2);
    std::fs::write(server.path("gpuserver.toml"), configured).unwrap();
    let starter = Starter::start(&socket).await;
    systemd.run(&mut server).await;
    let mut vm = server.again(&vm).await;
    let (_id, _lane, new) = program(&server, &mut vm, &lease.id).await;
    assert_eq!(uid(pid(&new["pid"]) as i32), Some(STARTER));
    assert!(alive(old) && code.exists());
    let ended = server.verb(&["kill", said["worker"].as_str().unwrap()]);
    assert!(ended.status.success(), "{ended:?}");
    eventually("it is killed", async || !alive(old)).await;
    assert!(rest(&mut lane).is_empty());
    eventually("its folder is gone", async || !code.exists()).await;
    assert!(alive(pid(&new["pid"])));
    drop(starter);
}

#[tokio::test]
async fn mps_daemons_and_their_workers_have_the_user_of_the_starter() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let mut server = prepare_with("mps/libcuda.so.1", SHARING).await;
    let control = server.path("mps/nvidia-cuda-mps-control");
    std::fs::create_dir(server.path("mps")).unwrap();
    std::fs::set_permissions(server.path("mps"), std::fs::Permissions::from_mode(0o777)).unwrap();
    std::fs::copy("/proc/self/exe", server.path("mps/libcuda.so.1")).unwrap();
    std::fs::copy(example("fake-mps"), &control).unwrap();
    std::fs::write(server.path("mps/readings.json"), "[]").unwrap();
    let socket = server.path("start/start.sock");
    let starter = Starter::start(&socket).await;
    server.run().await;
    let mut vm = server.client("vm-1").await;
    let half = AllocateRequest { memory_percent: 50.0, ..vm.request() };
    let lease = vm.pool.allocate(half).await.unwrap().into_inner();
    let worker = vm.take(&lease.id).await.unwrap();
    let (lane, said) = server.adopt(&worker.id, 0, true);
    let domain = || server.json(&["mps"])["domains"][0].take();
    eventually("the domain is active", async || domain()["state"] == "active").await;
    let (daemon, of_it) = (pid(&domain()["daemon_pid"]), pid(&domain()["servers"][0]["pid"]));
    let users = [daemon, of_it, pid(&said["pid"])].map(|pid| uid(pid as i32));
    assert_eq!(users, [Some(STARTER); 3]);
    let pipes = PathBuf::from(said["environment"]["CUDA_MPS_PIPE_DIRECTORY"].as_str().unwrap());
    assert!(pipes.starts_with(server.path("start/mps")), "{}", pipes.display());

    // The starter reads the daemon's logs for the server.
    eventually("the daemon listens", async || {
        ask_mps(&control, &said, &format!("fake_fault {}", pid(&said["pid"])))
    })
    .await;
    eventually("the fault is noticed", async || !domain()["faults"].as_array().unwrap().is_empty()).await;
    eventually("the first daemon and its server have ended", async || !alive(daemon) && !alive(of_it)).await;
    eventually("another daemon runs", async || {
        domain()["state"] == "active" && domain()["daemon_pid"] != daemon && !pipes.exists()
    })
    .await;
    // It ends with the server, and the next server removes what it has left.
    let next = pid(&domain()["daemon_pid"]);
    server.signal(Signal::SIGKILL);
    eventually("the daemon has ended", async || !alive(next)).await;
    server.run().await;
    eventually("one daemon's folder is left", async || {
        std::fs::read_dir(server.path("start/mps")).unwrap().count() == 1
    })
    .await;
    drop((lane, starter));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_measurement_has_the_user_of_the_starter_and_ends_with_either() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let lines = "encryption = \"off\"\ntrusted_networks = [\"127.0.0.0/8\"]";
    let mut server = prepare_with("sim/libcuda.so.1", lines).await;
    std::fs::create_dir(server.path("sim")).unwrap();
    std::fs::set_permissions(server.path("sim"), std::fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let library = artefact("simgpu", Artefact::Library("libsimgpu.so"));
        symlink(library, server.path("sim").join(name)).unwrap();
    }
    let worker = artefact("gpuserver-worker", Artefact::Program("gpuserver-worker"));
    server.variables = vec![
        ("GPUSERVER_WORKER", worker.clone().into()),
        ("SIMGPU_MACHINE", format!("starter_{}", std::process::id()).into()),
    ];
    let starter = Starter::of(&server.path("start/start.sock"), &worker).await;
    server.run().await;
    let pid = server.json(&["status"])["server"]["pid"].as_u64().unwrap();
    let begin = async |name: &str| {
        let mut vm = server.client(name).await;
        let asked = vm.pool.measure(MeasureRequest { seconds: 10 }).await;
        Endpoint::new(&server, asked.unwrap().into_inner())
    };
    let endpoint = begin("vm-1").await;
    let (mut log, _secret) = endpoint.open();
    ask(&mut log, 2, &[0, 0, 0]);
    assert_eq!(reply(&mut log, 2).len(), 24);
    let [(first, of)] = starter.programs("--measure")[..] else { panic!("not one endpoint") };
    assert_eq!((of, uid(pid as i32)), (STARTER, Some(SERVER)));
    let status = std::fs::read_to_string(format!("/proc/{first}/status")).unwrap();
    assert!(status.contains("\nSeccomp:\t2\n") && status.contains("\nNoNewPrivs:\t1\n"), "{status}");
    // It ends with its client, and others with the server or the starter.
    drop(log);
    eventually("the endpoint ends", async || !alive(first as u32)).await;
    let endpoint = begin("vm-2").await;
    let (_log, _secret) = endpoint.open();
    let [(second, _)] = starter.programs("--measure")[..] else { panic!("not one endpoint") };
    drop(starter);
    eventually("the endpoint ends with the starter", async || !alive(second as u32)).await;
    let starter = {
        std::fs::remove_file(server.path("start/start.sock")).unwrap();
        Starter::of(&server.path("start/start.sock"), &worker).await
    };
    let endpoint = begin("vm-3").await;
    let (_log, _secret) = endpoint.open();
    assert_eq!(starter.programs("--measure").len(), 1);
    server.signal(Signal::SIGKILL);
    eventually("the endpoint ends with the server", async || starter.programs("--measure").is_empty()).await;
}
