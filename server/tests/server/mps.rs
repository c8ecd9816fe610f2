//! GPUs shared by MPS, with a fake control daemon: domains, limits, faults, ends.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gpusession_proto::control::{
    AllocateRequest, DescribeRequest, Lease, ProcessEndedRequest, ReleaseRequest, TakeWorkersRequest,
};
use gpusession_test_support::json_table::documented_together;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tonic::Code;

use gpusession_test_server::{Client, LONG, Server, alive, eventually, example, rest};

pub(crate) const SHARING: &str = "sharing = \"mps\"\npark_after = 0\nwarn_after = 0";

struct Site {
    server: Server,
}

impl Site {
    async fn start(more: &str) -> Self {
        Self::start_with("libcuda.so.1", more).await
    }

    async fn start_with(driver: &str, more: &str) -> Self {
        let mut server = Server::prepare(driver, "").await;
        let control = server.path("nvidia-cuda-mps-control");
        std::fs::copy(example("fake-mps"), &control).unwrap();
        // The server finds the program in the driver's folder.
        server.configure(driver, &format!("{SHARING}\n{more}"));
        server.run().await;
        Self { server }
    }

    fn domains(&self) -> Vec<Value> {
        self.server.json(&["mps"])["domains"].as_array().unwrap().clone()
    }

    /// Returns the domain of a client once it is active.
    async fn active(&self, client: &str) -> Value {
        let found = || self.domains().into_iter().find(|d| d["client"] == client && d["state"] == "active");
        eventually("the domain is active", async || found().is_some()).await;
        found().unwrap()
    }

    fn commands(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.server.path("commands")).unwrap_or_default();
        text.lines().map(String::from).collect()
    }

    fn asked(&self, command: &str) -> usize {
        self.commands().iter().filter(|c| c.starts_with(command)).count()
    }

    /// Sends a line to a worker's daemon, and tries again while another caller has its turn.
    async fn say(&self, worker: &Value, line: &str) {
        eventually("the daemon listens", async || {
            ask(&self.server.path("nvidia-cuda-mps-control"), worker, line)
        })
        .await;
    }

    /// Starts a program of a lease, and waits until it is served.
    async fn program(&self, client: &mut Client, lease: &Lease) -> Program {
        let worker = client.take(&lease.id).await.unwrap();
        let (lane, said) = self.server.adopt(&worker.id, 0, true);
        let pid = said["pid"].as_u64().unwrap() as u32;
        eventually("it is served", async || {
            self.server.workers().iter().any(|w| w["pid"] == pid && w["state"] == "active")
        })
        .await;
        Program { id: worker.id, pid, said, _lane: lane }
    }

    fn reasons(&self) -> Vec<(u64, String)> {
        let rows = self.server.json(&["accounting", "--kind", "process"]);
        let of = |r: &Value| (r["end_unix"].as_u64().unwrap(), r["reason"].as_str().unwrap().to_string());
        rows["records"].as_array().unwrap().iter().map(of).collect()
    }
}

/// Sends a line to a worker's daemon; `false`: another caller has its turn, or it has exited.
pub(crate) fn ask(control: &std::path::Path, worker: &Value, line: &str) -> bool {
    let mut child = Command::new(control)
        .env("CUDA_MPS_PIPE_DIRECTORY", worker["environment"]["CUDA_MPS_PIPE_DIRECTORY"].as_str().unwrap())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let _ = child.stdin.take().unwrap().write_all(format!("{line}\n").as_bytes());
    child.wait().unwrap().success()
}

struct Program {
    id: Vec<u8>,
    pid: u32,
    said: Value,
    _lane: std::net::TcpStream,
}

/// Allocates a lease of half a GPU, unless `wish` changes that.
async fn lease(client: &mut Client, wish: impl FnOnce(AllocateRequest) -> AllocateRequest) -> Lease {
    let half = AllocateRequest { memory_percent: 50.0, ..client.request() };
    client.pool.allocate(wish(half)).await.unwrap().into_inner()
}

fn as_it_is(wish: AllocateRequest) -> AllocateRequest {
    wish
}

#[tokio::test]
async fn a_lease_under_mps_from_start_to_end() {
    let site = Site::start("").await;
    let mut vm = site.server.client("vm-1").await;
    let wish = |half| AllocateRequest { sm_percent: 25, priority: "below-normal".into(), ..half };
    let granted = lease(&mut vm, wish).await;
    assert_eq!(granted.devices[0].sm_percent, 25);
    let program = site.program(&mut vm, &granted).await;
    let of = |name: &str| program.said["environment"][name].as_str().unwrap_or_default().to_string();
    assert_eq!(of("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), "25");
    assert_eq!(of("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), "0=8192M");
    assert_eq!(of("CUDA_MPS_CLIENT_PRIORITY"), "1");
    assert_eq!((&program.said["warm"], &program.said["mps"]), (&false.into(), &true.into()));
    let pipe = std::path::PathBuf::from(of("CUDA_MPS_PIPE_DIRECTORY"));
    assert!(pipe.starts_with(site.server.path("run")), "{pipe:?}");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&pipe).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o700);

    let domain = site.active("vm-1").await;
    assert_eq!(domain["gpus"], serde_json::json!([granted.devices[0].uuid]));
    assert_eq!(domain["leases"], serde_json::json!([granted.id]));
    let daemon = domain["daemon_pid"].as_u64().unwrap() as u32;
    let server = domain["servers"][0]["pid"].as_u64().unwrap() as u32;
    let environment = std::fs::read_to_string(format!("/proc/{daemon}/environ")).unwrap();
    assert!(
        environment.contains(&format!("CUDA_VISIBLE_DEVICES={}", granted.devices[0].uuid)),
        "{environment}"
    );
    assert!(!environment.contains("SECRET"), "{environment}");
    assert_eq!(site.asked("set_default_active_thread_percentage 25"), 1, "{:?}", site.commands());
    let row = &site.server.json(&["leases"])["leases"][0];
    assert_eq!((&row["mps"], &row["devices"][0]["sm_percent"]), (&true.into(), &25.into()));
    let parked = site.server.verb(&["park", &granted.id]);
    assert!(String::from_utf8_lossy(&parked.stderr).contains("under MPS"), "{parked:?}");

    // Its GPU work is terminated before the worker exits.
    let ended = ProcessEndedRequest { lease: granted.id.clone(), worker: program.id.clone() };
    vm.pool.process_ended(ended).await.unwrap();
    eventually("the worker is gone", async || !alive(program.pid)).await;
    let terminate = format!("terminate_client {server} {} (alive)", program.pid);
    assert_eq!(site.asked(&terminate), 1, "{:?}", site.commands());
    assert_eq!(site.asked("terminate_client"), 1, "no other worker had work: {:?}", site.commands());

    // The same happens when a worker is killed, and when its lease ends.
    let second = site.program(&mut vm, &granted).await;
    assert!(site.server.verb(&["kill", &data_encoding::HEXLOWER.encode(&second.id)]).status.success());
    let third = site.program(&mut vm, &granted).await;
    vm.pool.release(ReleaseRequest { lease: granted.id, ..Default::default() }).await.unwrap();
    for program in [second, third] {
        eventually("the worker is gone", async || !alive(program.pid)).await;
        assert_eq!(site.asked(&format!("terminate_client {server} {} (alive)", program.pid)), 1);
    }
    // The domain ends with its last lease.
    eventually("nothing is left", async || {
        site.domains().is_empty() && !alive(daemon) && !alive(server) && !pipe.exists()
    })
    .await;
    assert_eq!(site.asked("quit"), 1, "{:?}", site.commands());
}

#[tokio::test]
async fn a_lease_on_two_gpus_is_in_one_domain() {
    let site = Site::start("").await;
    let mut vm = site.server.client("vm-1").await;
    let one = |half| AllocateRequest { memory_percent: 25.0, ..half };
    let two = |half| AllocateRequest { gpus: 2, ..one(half) };
    let (pair, again, single) =
        (lease(&mut vm, two).await, lease(&mut vm, two).await, lease(&mut vm, one).await);
    let first = site.program(&mut vm, &pair).await;
    let second = site.program(&mut vm, &again).await;
    let alone = site.program(&mut vm, &single).await;
    let of = |p: &Program, name: &str| p.said["environment"][name].as_str().unwrap_or_default().to_string();
    let pipe = |p: &Program| of(p, "CUDA_MPS_PIPE_DIRECTORY");
    assert_eq!(pipe(&first), pipe(&second), "leases on the same GPUs");
    assert_ne!(pipe(&first), pipe(&alone), "a lease on one of them");
    assert_eq!(of(&first, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), "0=4096M,1=4096M");

    let mut gpus: Vec<_> = pair.devices.iter().map(|d| d.uuid.clone()).collect();
    let mut leases = [pair.id.clone(), again.id.clone()];
    gpus.sort();
    leases.sort();
    let domains = site.domains();
    assert_eq!(domains.len(), 2, "{domains:?}");
    let domain = domains.iter().find(|d| d["gpus"] == serde_json::json!(gpus)).unwrap();
    assert_eq!(domain["leases"], serde_json::json!(leases));
    let environment = std::fs::read_to_string(format!("/proc/{}/environ", domain["daemon_pid"])).unwrap();
    assert!(
        environment.contains(&format!("CUDA_VISIBLE_DEVICES={}\0", gpus.join(","))),
        "one daemon for both: {environment}"
    );

    site.say(&first.said, &format!("fake_fault {}", first.pid)).await;
    eventually("its programs end", async || !alive(first.pid) && !alive(second.pid)).await;
    assert!(alive(alone.pid), "no domain is in two");
}

#[tokio::test]
async fn a_limit_ends_gpu_work_before_its_worker() {
    let limits = "limits.staging = \"1MiB\"\nlimits.client.vm-1.host_memory = \"32MiB\"";
    let site = Site::start_with("hungry-libcuda.so.1", limits).await;
    let mut vm = site.server.client("vm-1").await;
    let granted = lease(&mut vm, as_it_is).await;
    let server = site.active("vm-1").await["servers"][0]["pid"].clone();
    let worker = vm.take(&granted.id).await.unwrap();
    let (mut lane, said) = site.server.adopt(&worker.id, 0, true);
    assert!(rest(&mut lane).is_empty(), "ended");
    let terminate = format!("terminate_client {server} {} (alive)", said["pid"]);
    assert_eq!(site.asked(&terminate), 1, "{:?}", site.commands());
}

#[tokio::test]
async fn a_worker_in_the_middle_of_its_work_exits_later() {
    let settles = Duration::from_millis(500);
    // The server first waits for a worker that ignores the order.
    let drivers = [
        ("libcuda.so.1", Duration::ZERO),
        ("busy-libcuda.so.1", settles),
        ("deaf-libcuda.so.1", Duration::from_millis(750) + settles),
    ];
    for (driver, after) in drivers {
        let site = Site::start_with(driver, "").await;
        let mut vm = site.server.client("vm-1").await;
        let granted = lease(&mut vm, as_it_is).await;
        let program = site.program(&mut vm, &granted).await;
        let ended = ProcessEndedRequest { lease: granted.id.clone(), worker: program.id.clone() };
        let begun = Instant::now();
        vm.pool.process_ended(ended).await.unwrap();
        eventually("the worker is gone", async || !alive(program.pid)).await;
        let took = begun.elapsed();
        assert!(took >= after && took < Duration::from_secs(2), "{driver}: {took:?}");
        assert_eq!(site.asked("terminate_client"), 1, "{:?}", site.commands());
    }
}

#[tokio::test]
async fn silence_and_a_stop_end_gpu_work_before_its_workers() {
    let mut site = Site::start("").await;
    let (mut a, mut b) = (site.server.client("vm-a").await, site.server.client("vm-b").await);
    let short = lease(&mut a, |half| AllocateRequest { ttl_usec: 5_000_000, ..half }).await;
    let long = lease(&mut b, as_it_is).await;
    let (silent, stopped) = (site.program(&mut a, &short).await, site.program(&mut b, &long).await);
    let (of_a, of_b) = (site.active("vm-a").await, site.active("vm-b").await);
    let terminate =
        |of: &Value, p: &Program| format!("terminate_client {} {} (alive)", of["servers"][0]["pid"], p.pid);
    eventually("its lease ends", async || !alive(silent.pid)).await;
    assert_eq!(site.asked(&terminate(&of_a, &silent)), 1, "{:?}", site.commands());
    assert!(alive(stopped.pid));
    assert_eq!(site.server.signal(Signal::SIGTERM).code(), Some(0));
    assert!(!alive(stopped.pid));
    assert_eq!(site.asked(&terminate(&of_b, &stopped)), 1, "{:?}", site.commands());
}

#[tokio::test]
async fn the_clients_of_a_server_of_mps_are_listed() {
    let site = Site::start("").await;
    let mut vm = site.server.client("vm-1").await;
    let granted = lease(&mut vm, as_it_is).await;
    let program = site.program(&mut vm, &granted).await;
    site.say(&program.said, &format!("fake_client {}", program.pid)).await;
    let domain = site.active("vm-1").await;
    let server = &domain["servers"][0];
    assert_eq!(server["clients"], serde_json::json!([program.pid]));
    assert!(site.asked(&format!("get_client_list {}", server["pid"])) > 0, "{:?}", site.commands());
    let table = String::from_utf8(site.server.verb(&["mps"]).stdout).unwrap();
    let row = table.lines().find(|line| line.starts_with("vm-1")).unwrap();
    assert!(row[table.find("CLIENTS").unwrap()..].starts_with("1 "), "{table}");
    let ended = ProcessEndedRequest { lease: granted.id.clone(), worker: program.id.clone() };
    vm.pool.process_ended(ended).await.unwrap();
    eventually("it is none any more", async || {
        site.active("vm-1").await["servers"][0]["clients"] == serde_json::json!([])
    })
    .await;
}

#[tokio::test]
async fn requests_and_what_they_get() {
    let site = Site::start("gpu_sharing.time-slice = [1]").await;
    let mut vm = site.server.client("vm-1").await;
    let base = vm.request();
    let sliced = AllocateRequest { sharing: "time-slice".into(), memory_percent: 50.0, ..base.clone() };
    let cases = [
        (AllocateRequest { sm_percent: 50, ..sliced.clone() }, Code::InvalidArgument, "sharing = \"mps\""),
        (AllocateRequest { sm_percent: 50, sm_count: 3, ..base.clone() }, Code::InvalidArgument, "the same"),
        (
            AllocateRequest { sm_percent: 50, gpus: 2, ..base.clone() },
            Code::FailedPrecondition,
            "this server has 1",
        ),
        (
            AllocateRequest { gpus: 2, ..base.clone() },
            Code::FailedPrecondition,
            "this server has 1 that are shared in one way",
        ),
    ];
    for (wish, code, text) in cases {
        let status = vm.pool.allocate(wish).await.unwrap_err();
        assert!(status.code() == code && status.message().contains(text), "{status}");
    }
    // 10 of 132 are 8 %.
    let few = lease(&mut vm, |half| AllocateRequest { sm_count: 10, ..half }).await;
    assert_eq!(
        (few.devices[0].sm_percent, few.devices[0].uuid.as_str()),
        (8, "GPU-00000000-0000-0000-0000-000000000000")
    );
    // A lease without MPS may be on the same GPU, or on both.
    let plain = lease(&mut vm, |_| sliced.clone()).await;
    assert_eq!(plain.devices[0].uuid, few.devices[0].uuid);
    let program = site.program(&mut vm, &plain).await;
    assert!(!program.said["environment"].to_string().contains("MPS"), "{}", program.said);
    assert_eq!((&program.said["warm"], &program.said["mps"]), (&true.into(), &false.into()));
    // A program's own variable can lower its share under MPS, and has no effect without MPS.
    for (lease, percent) in [(&few, Some("5")), (&plain, None)] {
        let name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
        let environment = [(name.to_string(), "5".to_string())].into();
        let wish =
            TakeWorkersRequest { lease: lease.id.clone(), count: 1, environment, ..Default::default() };
        let worker = vm.pool.take_workers(wish).await.unwrap().into_inner().workers.remove(0);
        let (_lane, said) = site.server.adopt(&worker.id, 0, true);
        assert_eq!(said["environment"][name].as_str(), percent, "{said}");
    }
    // A lease without a wish gets GPUs that are shared in one way.
    let other = lease(&mut vm, |_| AllocateRequest { memory_percent: 100.0, ..base }).await;
    assert_ne!(other.devices[0].uuid, few.devices[0].uuid);
    let rows = site.server.json(&["leases"])["leases"].as_array().unwrap().clone();
    assert_eq!(rows.iter().filter(|r| r["mps"] == true).count(), 1, "{rows:?}");
}

#[tokio::test]
async fn a_card_for_one_process_serves_one_domain() {
    // The first card has the compute mode EXCLUSIVE_PROCESS.
    let site = Site::start_with("alone-libcuda.so.1", "").await;
    let (mut a, mut b) = (site.server.client("vm-a").await, site.server.client("vm-b").await);
    let gpus = site.server.json(&["gpus"])["gpus"].as_array().unwrap().clone();
    let of = |key: &str| gpus.iter().map(|g| g[key].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(of("state"), ["free", "free"]);
    assert_eq!(of("compute_mode"), ["exclusive-process", "default"]);
    let table = String::from_utf8(site.server.verb(&["gpus"]).stdout).unwrap();
    assert!(table.contains(" mps, exclusive-process "), "{table}");
    let uuids = of("uuid");
    let there = |sharing: &'static str| {
        let devices = vec![uuids[0].clone()];
        move |r| AllocateRequest { sharing: sharing.into(), memory_percent: 25.0, devices, ..r }
    };
    let granted = [lease(&mut a, there("mps")).await, lease(&mut a, there("")).await];
    for lease in &granted {
        assert_eq!(site.program(&mut a, lease).await.said["mps"], true);
    }
    assert_eq!(site.domains().len(), 1, "{:?}", site.domains());
    let wish = there("mps")(b.request());
    let refused = b.pool.allocate(AllocateRequest { once: true, ..wish }).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    let wish = there("time-slice")(b.request());
    let never = b.pool.allocate(wish).await.unwrap_err();
    assert!(
        never.code() == Code::FailedPrecondition && never.message().contains("EXCLUSIVE_PROCESS"),
        "{never}"
    );
    assert_eq!(lease(&mut b, as_it_is).await.devices[0].uuid, uuids[1]);
    for lease in granted {
        a.pool.release(ReleaseRequest { lease: lease.id, ..Default::default() }).await.unwrap();
    }
    lease(&mut b, there("mps")).await;
}

#[tokio::test]
async fn each_gpu_is_shared_in_its_own_way() {
    let site = Site::start("gpu_sharing.exclusive = [1]").await;
    let (mut a, mut b) = (site.server.client("vm-a").await, site.server.client("vm-b").await);
    let gpus = || site.server.json(&["gpus"])["gpus"].as_array().unwrap().clone();
    assert_eq!(gpus().iter().map(|g| g["sharing"].clone()).collect::<Vec<_>>(), ["mps", "exclusive"]);
    let uuids: Vec<String> = gpus().iter().map(|g| g["uuid"].as_str().unwrap().into()).collect();
    let table = String::from_utf8(site.server.verb(&["gpus"]).stdout).unwrap();
    assert!(table.contains("SHARING") && table.contains(" exclusive "), "{table}");
    let wish = |sharing: &'static str, percent| {
        move |r| AllocateRequest { sharing: sharing.into(), memory_percent: percent, ..r }
    };
    let shared = [
        lease(&mut a, wish("", 25.0)).await,
        lease(&mut b, wish("mps", 25.0)).await,
        lease(&mut b, wish("time-slice", 25.0)).await,
    ];
    assert!(shared.iter().all(|l| l.devices[0].uuid == uuids[0]), "{shared:?}");
    // The exclusive GPU is full as soon as one lease has a share of it.
    let alone = lease(&mut a, wish("", 50.0)).await;
    assert_eq!(alone.devices[0].uuid, uuids[1]);
    let program = site.program(&mut a, &alone).await;
    assert_eq!((&program.said["warm"], &program.said["mps"]), (&true.into(), &false.into()));
    let described = b.pool.describe(DescribeRequest::default()).await.unwrap().into_inner();
    assert_eq!(described.devices.iter().map(|d| d.memory_free_bytes >> 30).collect::<Vec<_>>(), [4, 0]);
    for (sharing, percent) in [("exclusive", 1.0), ("", 50.0), ("time-slice", 50.0)] {
        let wish = wish(sharing, percent)(b.request());
        let refused = b.pool.allocate(wish).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    }
    let wish_for_mps = AllocateRequest { devices: vec![uuids[1].clone()], ..wish("mps", 1.0)(b.request()) };
    let never = b.pool.allocate(wish_for_mps).await.unwrap_err();
    assert_eq!(never.code(), Code::FailedPrecondition, "{never}");
    let rows = site.server.json(&["leases"])["leases"].as_array().unwrap().clone();
    let row = |l: &Lease| {
        let row = rows.iter().find(|r| r["lease"] == l.id).unwrap();
        (row["mps"].as_bool().unwrap(), row["exclusive"].as_bool().unwrap())
    };
    assert_eq!(shared.each_ref().map(row), [(true, false), (true, false), (false, false)]);
    assert_eq!(row(&alone), (false, true));
    assert_eq!(gpus()[1]["leases"], serde_json::json!([alone.id]));
    a.pool.release(ReleaseRequest { lease: alone.id, ..Default::default() }).await.unwrap();
    assert_eq!(lease(&mut b, wish("exclusive", 1.0)).await.devices[0].uuid, uuids[1]);
}

#[tokio::test]
async fn a_fault_ends_its_domain_and_nothing_else() {
    let site = Site::start("warm_workers = 1").await;
    let (mut a, mut b) = (site.server.client("vm-a").await, site.server.client("vm-b").await);
    let wish = |half| AllocateRequest { memory_percent: 25.0, ..half };
    let (first, second) = (lease(&mut a, wish).await, lease(&mut a, wish).await);
    let (third, elsewhere) = (lease(&mut a, wish).await, lease(&mut b, wish).await);
    assert_eq!(first.devices[0].uuid, elsewhere.devices[0].uuid, "on the same GPU");
    let culprit = site.program(&mut a, &first).await;
    let victim = site.program(&mut a, &second).await;
    let stranger = site.program(&mut b, &elsewhere).await;
    let pipe = |p: &Program| p.said["environment"]["CUDA_MPS_PIPE_DIRECTORY"].to_string();
    assert_eq!(pipe(&culprit), pipe(&victim), "leases of one client share a domain");
    assert_ne!(pipe(&culprit), pipe(&stranger), "leases of two do not");

    let stocked = || site.server.workers().iter().any(|w| w["lease"] == third.id && w["state"] == "warm");
    eventually("a worker waits for a program", async || stocked()).await;
    let begun = Instant::now();
    let pids = [culprit.pid, victim.pid];
    // A thread measures the time, since the steps below take some time themselves.
    let ends = std::thread::spawn(move || {
        while pids.iter().any(|pid| alive(*pid)) && begun.elapsed() < LONG {
            std::thread::sleep(Duration::from_millis(10));
        }
        begun.elapsed()
    });
    site.say(&culprit.said, &format!("fake_fault {}", culprit.pid)).await;
    // A program that starts during the teardown gets a worker of the next daemon.
    let noticed = || site.domains().iter().any(|d| !d["faults"].as_array().unwrap().is_empty());
    eventually("the fault is noticed", async || noticed()).await;
    let newcomer = site.program(&mut a, &third).await;
    assert_ne!(pipe(&newcomer), pipe(&victim));
    let took = ends.join().unwrap();
    assert!(took < Duration::from_secs(5), "{took:?}");
    eventually("both programs have a reason", async || site.reasons().len() == 2).await;
    let reasons: Vec<String> = site.reasons().into_iter().map(|(_, why)| why).collect();
    assert!(reasons.iter().any(|r| r.starts_with("it caused a fatal GPU fault")), "{reasons:?}");
    assert!(reasons.iter().any(|r| r.starts_with("another program of its MPS domain")), "{reasons:?}");

    // A program that starts now waits for the new daemon.
    let again = site.program(&mut a, &second).await;
    assert_ne!(pipe(&again), pipe(&victim));
    let domain = site.active("vm-a").await;
    let clients = json!({ "domains": [{ "servers": [{ "pid": 1, "state": "", "clients": [1] }] }] });
    documented_together("gpuserver mps", &[site.server.json(&["mps"]), clients]);
    assert_eq!(
        (&domain["restarts"], &domain["faults"][0]["culprits"]),
        (&1.into(), &serde_json::json!([culprit.pid]))
    );
    let other = site.active("vm-b").await;
    assert!(alive(stranger.pid) && other["restarts"] == 0 && other["faults"].as_array().unwrap().is_empty());
    let table = String::from_utf8(site.server.verb(&["mps"]).stdout).unwrap();
    assert!(table.contains(&format!("of process {}: ", culprit.pid)) && table.contains("vm-b"), "{table}");
}

#[tokio::test]
async fn a_fault_is_heard_of_while_the_daemon_does_not_answer() {
    let site = Site::start("warm_workers = 1").await;
    let mut vm = site.server.client("vm-1").await;
    let granted = lease(&mut vm, as_it_is).await;
    let (crashes, faults) = (site.program(&mut vm, &granted).await, site.program(&mut vm, &granted).await);
    let pipe = faults.said["environment"]["CUDA_MPS_PIPE_DIRECTORY"].as_str().unwrap();
    let pipe = std::path::Path::new(pipe);
    let (control, variable) = (site.server.path("nvidia-cuda-mps-control"), "CUDA_MPS_PIPE_DIRECTORY");
    eventually("the daemon is deaf", async || {
        let mut says = Command::new(&control).env(variable, pipe).stdin(Stdio::piped()).spawn().unwrap();
        let _ = says.stdin.take().unwrap().write_all(b"fake_deaf\n");
        let heard = || site.asked("fake_deaf") > 0;
        while !heard() && says.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        // After that, other callers may send commands, and wait.
        let _ = says.kill();
        let _ = says.wait();
        heard()
    })
    .await;
    kill(Pid::from_raw(crashes.pid as i32), Signal::SIGKILL).unwrap();
    eventually("it is asked whether it is well", async || {
        std::fs::File::open(pipe.join("turn")).unwrap().try_lock().is_err()
    })
    .await;
    let begun = Instant::now();
    let log = std::fs::File::options().append(true).open(pipe.with_file_name("l").join("server.log"));
    writeln!(log.unwrap(), "[x] Client {{{}, 1}} encountered a fatal GPU error.", faults.pid).unwrap();
    eventually("its programs end", async || !alive(faults.pid)).await;
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_daemon_that_dies_is_started_again_with_its_limits() {
    let site = Site::start("warm_workers = 1").await;
    let mut vm = site.server.client("vm-1").await;
    let wish = |half| AllocateRequest { sm_percent: 40, priority: "below-normal".into(), ..half };
    let granted = lease(&mut vm, wish).await;
    let runs = site.program(&mut vm, &granted).await;
    let before = site.active("vm-1").await;
    let daemon = before["daemon_pid"].as_i64().unwrap() as i32;
    let server = before["servers"][0]["pid"].as_u64().unwrap() as u32;
    kill(Pid::from_raw(daemon), Signal::SIGKILL).unwrap();
    eventually("there is a new one", async || {
        site.domains().iter().any(|d| d["state"] == "active" && d["daemon_pid"] != daemon)
    })
    .await;
    assert_eq!(site.asked("set_default_active_thread_percentage 40"), 2, "{:?}", site.commands());
    let next = site.program(&mut vm, &granted).await;
    let of = |p: &Program, name: &str| p.said["environment"][name].as_str().unwrap().to_string();
    for (name, limit) in [
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "40"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=8192M"),
        ("CUDA_MPS_CLIENT_PRIORITY", "1"),
    ] {
        assert_eq!((of(&runs, name).as_str(), of(&next, name).as_str()), (limit, limit), "{name}");
    }
    assert_ne!(of(&next, "CUDA_MPS_PIPE_DIRECTORY"), of(&runs, "CUDA_MPS_PIPE_DIRECTORY"));
    assert!(alive(runs.pid) && alive(server), "what runs has its server");
    let ended = ProcessEndedRequest { lease: granted.id.clone(), worker: runs.id.clone() };
    vm.pool.process_ended(ended).await.unwrap();
    eventually("the old server ends after its last program", async || !alive(server)).await;
    assert!(alive(next.pid));
    // A daemon that does not answer is killed, too.
    let second = site.active("vm-1").await["daemon_pid"].as_u64().unwrap() as u32;
    // The call below never gets an answer.
    let deaf = {
        let (folder, said) = (site.server.path("nvidia-cuda-mps-control"), next.said.clone());
        std::thread::spawn(move || {
            // The daemon is killed while this call waits.
            let pipe = said["environment"]["CUDA_MPS_PIPE_DIRECTORY"].as_str().unwrap().to_string();
            while !ask(&folder, &said, "fake_deaf") && std::path::Path::new(&pipe).exists() {}
        })
    };
    eventually("the server kills the silent daemon", async || !alive(second) && deaf.is_finished()).await;
}

#[tokio::test]
async fn a_lease_that_comes_back_on_another_gpu_is_in_that_gpus_domain() {
    let site = Site::start("warm_workers = 0\nlend_after = \"1s\"").await;
    let (mut a, mut b, mut c) = (
        site.server.client("vm-a").await,
        site.server.client("vm-b").await,
        site.server.client("vm-c").await,
    );
    let whole = |half| AllocateRequest { memory_percent: 100.0, ..half };
    let (lender, stays) = (lease(&mut a, whole).await, lease(&mut c, whole).await);
    let (lent, free) = (lender.devices[0].uuid.clone(), stays.devices[0].uuid.clone());
    assert_ne!(lent, free);
    // Only the first lease can be lent: the second one has a program.
    let _program = site.program(&mut c, &stays).await;
    let wish = AllocateRequest { memory_percent: 100.0, request_id: "waits".into(), ..b.request() };
    let mut borrowed = None;
    eventually("one lends", async || {
        borrowed = b.pool.allocate(wish.clone()).await.ok().map(|l| l.into_inner());
        borrowed.is_some()
    })
    .await;
    let borrowed = borrowed.expect("a lease");
    assert_eq!(borrowed.devices[0].uuid, lent);
    let _borrower = site.program(&mut b, &borrowed).await;
    c.pool.release(ReleaseRequest { lease: stays.id, ..Default::default() }).await.unwrap();
    assert!(site.server.verb(&["unpark", &lender.id]).status.success());
    eventually("it has a GPU again", async || {
        let leases = site.server.json(&["leases"])["leases"].as_array().unwrap().clone();
        leases.iter().any(|l| l["lease"] == lender.id.as_str() && l["state"] == "idle")
    })
    .await;

    let moved = site.program(&mut a, &lender).await;
    let variable = |name: &str| moved.said["environment"][name].as_str().unwrap_or_default().to_string();
    assert_eq!(variable("CUDA_VISIBLE_DEVICES"), free);
    eventually("its old domain is gone", async || {
        let mut mine = site.domains().into_iter().filter(|d| d["client"] == "vm-a");
        mine.all(|d| d["gpus"] == serde_json::json!([free]))
    })
    .await;
    let daemon = site.active("vm-a").await["daemon_pid"].as_u64().unwrap();
    let environment = std::fs::read_to_string(format!("/proc/{daemon}/environ")).unwrap();
    let pipe = format!("CUDA_MPS_PIPE_DIRECTORY={}\0", variable("CUDA_MPS_PIPE_DIRECTORY"));
    assert!(environment.contains(&pipe), "the worker's daemon is that GPU's: {environment}");
}

#[tokio::test]
async fn a_crash_makes_its_domain_suspect() {
    let site = Site::start("warm_workers = 1").await;
    let mut vm = site.server.client("vm-1").await;
    let granted = lease(&mut vm, as_it_is).await;
    let (crashes, other) = (site.program(&mut vm, &granted).await, site.program(&mut vm, &granted).await);
    let before = site.asked("get_server_status");
    let begun = Instant::now();
    kill(Pid::from_raw(crashes.pid as i32), Signal::SIGKILL).unwrap();
    // The server polls every 5 s anyway, and `gpuserver mps` would ask as well.
    eventually("MPS is asked whether it is well", async || site.asked("get_server_status") > before).await;
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert!(alive(other.pid));
}

#[tokio::test]
async fn mps_processes_of_a_killed_server_are_cleared() {
    let mut site = Site::start("warm_workers = 1").await;
    let mut vm = site.server.client("vm-1").await;
    let granted = lease(&mut vm, as_it_is).await;
    let domain = site.active("vm-1").await;
    let daemon = domain["daemon_pid"].as_u64().unwrap() as u32;
    let server = domain["servers"][0]["pid"].as_u64().unwrap() as u32;
    site.server.signal(Signal::SIGKILL);
    eventually("the daemon ends with its server", async || !alive(daemon)).await;
    assert!(alive(server), "MPS servers do not");
    site.server.run().await;
    eventually("the next one ends it", async || !alive(server)).await;
    // The lease survived, and its domain starts again.
    assert_eq!(site.active("vm-1").await["leases"], serde_json::json!([granted.id]));
    let ended = site.active("vm-1").await["daemon_pid"].as_u64().unwrap() as u32;
    assert_eq!(site.server.signal(Signal::SIGTERM).code(), Some(0));
    assert!(!alive(ended), "a server that stops ends its daemons");
}

#[tokio::test]
async fn no_more_programs_than_a_server_of_mps_serves() {
    let site = Site::start("mps_domain = \"server\"").await;
    let (mut a, mut b) = (site.server.client("vm-a").await, site.server.client("vm-b").await);
    let (mine, yours) = (lease(&mut a, as_it_is).await, lease(&mut b, as_it_is).await);
    eventually("one domain has both", async || {
        let domains = site.domains();
        domains.len() == 1
            && domains[0]["client"] == "*"
            && domains[0]["leases"].as_array().unwrap().len() == 2
    })
    .await;
    for _ in 0..24 {
        a.take(&mine.id).await.unwrap();
        b.take(&yours.id).await.unwrap();
    }
    let status = a.take(&mine.id).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().starts_with("48 programs with 48 contexts use the GPU by MPS"), "{status}");
}

#[tokio::test]
async fn contexts_that_a_program_makes_take_places_too() {
    let site = Site::start_with("contexts-libcuda.so.1", "").await;
    let mut vm = site.server.client("vm-1").await;
    let lease = lease(&mut vm, as_it_is).await;
    site.active("vm-1").await;
    let _program = site.program(&mut vm, &lease).await;
    // This program has 40 contexts.
    for _ in 0..8 {
        vm.take(&lease.id).await.unwrap();
    }
    let status = vm.take(&lease.id).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().starts_with("9 programs with 48 contexts use the GPU by MPS"), "{status}");
}

#[tokio::test]
async fn the_configuration_says_what_excludes_what() {
    let server = Server::prepare("libcuda.so.1", "").await;
    let control = server.path("nvidia-cuda-mps-control");
    std::fs::copy(example("fake-mps"), control).unwrap();
    let checked = |more: &str| {
        server.configure("libcuda.so.1", more);
        let done = server.verb(&["check-config"]);
        (done.status.code(), String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned())
    };
    let (code, said) = checked("sharing = \"mps\"");
    assert!(code == Some(0) && said.contains("cannot park programs under MPS"), "{said}");
    let (code, said) = checked("mps_domain = \"server\"");
    assert!(code == Some(0) && said.contains("have no effect without"), "{said}");
    let (code, said) = checked("sharing = \"mps\"\nmps_control = \"/nowhere\"");
    assert!(code == Some(1) && said.contains("/nowhere is not a program"), "{said}");
    let (code, said) = checked("gpu_sharing.mps = [0]\ngpu_sharing.exclusive = [0]");
    let twice = "gpu_sharing.exclusive = [0]: gpu_sharing.mps names 0 already";
    assert!(code == Some(1) && said.contains(twice), "{said}");
    // The start of the server, not check-config, finds out which GPUs exist.
    for (more, text) in [
        ("gpu_sharing.mps = [7]", "gpu_sharing.mps: GPU 7 not found; this host has 0 = GPU-"),
        (
            "gpu_sharing.mps = [1]\ngpu_sharing.exclusive = [\"GPU-00000000-0000-0000-0000-000000000001\"]",
            "which gpu_sharing.mps names already",
        ),
        ("gpus = [0]\ngpu_sharing.exclusive = [1]", "gpu_sharing.exclusive: 1 names GPU-"),
    ] {
        let (code, said) = checked(more);
        assert!(code == Some(0), "{said}");
        let done = server.verb(&["serve"]);
        assert_eq!(done.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&done.stderr).contains(text), "{done:?}");
    }
}
