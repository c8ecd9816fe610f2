//! The command line against the daemon's API on a private bus, with a simulated pool.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use gpusession_test_daemon::{PrivateBus, TEST_TIMEOUT, config, engine, serve, until, want};
use gpusessiond::bus::Bus;
use gpusessiond::config::Config;
use gpusessiond::environment::{Audience, publish};
use gpusessiond::leases::engine::Engine;
use gpusessiond::leases::sim::SimServer;
use gpusessiond::leases::{LeaseState, Leases as _};
use gpusessiond::pool::{PoolError, Trouble};

struct Site {
    bus: PrivateBus,
    folder: tempfile::TempDir,
    sim: SimServer,
    engine: Engine,
    _api: Option<Bus>,
}

impl Site {
    /// A client machine with the leases of `config`, and a server with `gpus` GPUs.
    async fn new(gpus: u32, config: &Config) -> Self {
        let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", gpus));
        let engine = engine(&[&sim]);
        let api = serve(&bus, &engine, config).await;
        want(&engine, config).await;
        Self { bus, folder: folder(), sim, engine, _api: Some(api) }
    }

    async fn ready(self) -> Self {
        until(&self.engine, |s| {
            s.lease_facts().all(|l| l.state == LeaseState::Active)
                && s.server_facts().all(|s| s.state == "online")
        })
        .await;
        self
    }

    async fn run(&self, arguments: &[&str]) -> Answer {
        self.run_with(arguments, &[]).await
    }

    async fn run_with(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Answer {
        command(self.folder.path(), &self.bus.address(), arguments, environment).await
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

struct Answer {
    code: i32,
    out: String,
    err: String,
}

/// A home directory with a folder of libraries.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("lib")).unwrap();
    std::fs::write(folder.path().join("lib/libcuda.so.1"), "").unwrap();
    folder
}

async fn command(folder: &Path, bus: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Answer {
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_gpusession"))
        .args(arguments)
        .current_dir(folder)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("HOME", folder)
        .env("STATE_DIRECTORY", folder.join("state"))
        .env("CONFIGURATION_DIRECTORY", folder.join("etc"))
        .env("GPUSESSION_LIBDIR", folder.join("lib"))
        .env("DBUS_SYSTEM_BUS_ADDRESS", bus)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .output();
    let Output { status, stdout, stderr } =
        tokio::time::timeout(TEST_TIMEOUT, output).await.expect("ends").unwrap();
    Answer {
        code: status.code().expect("an exit code"),
        out: String::from_utf8(stdout).unwrap(),
        err: String::from_utf8(stderr).unwrap(),
    }
}

fn json(answer: &Answer) -> serde_json::Value {
    let value: serde_json::Value =
        serde_json::from_str(&answer.out).unwrap_or_else(|e| panic!("{e}: {}", answer.out));
    assert_eq!(value["schema"], 1);
    value
}

#[tokio::test]
async fn without_a_daemon_every_command_says_what_to_do() {
    let folder = folder();
    let nowhere = "unix:path=/nonexistent/bus";
    for arguments in [&["status"][..], &["list"], &["env"], &["request"], &["release", "abcdefghijkl"]] {
        let answer = command(folder.path(), nowhere, arguments, &[]).await;
        assert_eq!(answer.code, 69, "{arguments:?}: {}", answer.err);
        assert!(answer.err.contains("hint:"), "{}", answer.err);
        let answer = command(folder.path(), nowhere, &[arguments, &["--json"]].concat(), &[]).await;
        assert_eq!(answer.code, 69);
        assert_eq!(json(&answer)["error"]["code"], 69);
    }
    let answer = command(folder.path(), nowhere, &["run", "--", "true"], &[]).await;
    assert_eq!(answer.code, 125, "{}", answer.err);
    // A bus without the daemon.
    let bus = PrivateBus::start();
    let answer = command(folder.path(), &bus.address(), &["status"], &[]).await;
    assert_eq!(answer.code, 69);
    assert!(answer.err.contains("the daemon is not running"), "{}", answer.err);
}

#[tokio::test]
async fn a_daemon_that_was_stopped_is_not_started() {
    let folder = folder();
    let started = folder.path().join("started");
    let bus = PrivateBus::start_with(&format!("/bin/sh -c 'touch {}; false'", started.display()));
    for arguments in
        [&["status"][..], &["list"], &["env"], &["reload"], &["park"], &["request"], &["release", "a"]]
    {
        let answer = command(folder.path(), &bus.address(), arguments, &[]).await;
        assert_eq!(answer.code, 69, "{arguments:?}: {}", answer.err);
        assert!(answer.err.contains("the daemon is not running"), "{}", answer.err);
        assert!(!started.exists(), "{arguments:?} starts it");
    }
    // A listening grant socket means that the daemon starts on demand.
    let socket = folder.path().join("grant.sock");
    let _listens = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let there = [("GPUSESSION_SOCKET", socket.to_str().unwrap())];
    let answer = command(folder.path(), &bus.address(), &["status"], &there).await;
    assert_eq!(answer.code, 69, "{}", answer.err);
    assert!(started.exists());
}

#[tokio::test]
async fn the_cache_is_shown_and_cleared() {
    let folder = folder();
    let kept = folder.path().join("cache/gpusession/compiled");
    let cache = folder.path().join("cache").display().to_string();
    let place = [("CUDA_CACHE_PATH", cache.as_str())];
    let ask = |arguments: &'static [&'static str]| {
        command(folder.path(), "unix:path=/nonexistent", arguments, &place)
    };
    let answer = ask(&["cache", "show"]).await;
    assert_eq!(answer.out.trim(), format!("{}: 0 files, 0 B of at most 1 GiB", kept.display()));
    std::fs::create_dir_all(&kept).unwrap();
    std::fs::write(kept.join("a"), vec![0; 3 << 20]).unwrap();
    let shown = json(&ask(&["cache", "show", "--json"]).await);
    assert_eq!((&shown["files"], &shown["bytes"]), (&1.into(), &(3 << 20).into()));
    let answer = ask(&["cache", "clear"]).await;
    assert!(answer.out.ends_with(": 1 files deleted, 3 MiB\n"), "{}", answer.out);
    assert!(kept.exists() && !kept.join("a").exists());
    assert_eq!(ask(&["cache"]).await.code, 64);
}

#[tokio::test]
async fn wrong_use_is_64_and_help_is_0() {
    let folder = folder();
    for arguments in [
        &[][..],
        &["nonsense"],
        &["run"],
        &["run", "-n", "0", "--", "true"],
        &["run", "-m", "4000MB", "--", "true"],
        &["run", "--server", "::g", "--", "true"],
        &["request", "--ttl", "soon"],
        &["join"],
        &["join", "one", "two"],
        &["join", "host:0", "gpsj-x"],
    ] {
        let answer = command(folder.path(), "unix:path=/nonexistent", arguments, &[]).await;
        let expected = 64;
        assert_eq!(answer.code, expected, "{arguments:?}: {}", answer.err);
        let answer =
            command(folder.path(), "unix:path=/nonexistent", &[&["--json"], arguments].concat(), &[]).await;
        assert_eq!(
            (answer.code, &json(&answer)["error"]["code"]),
            (expected, &expected.into()),
            "{arguments:?}"
        );
    }
    let answer =
        command(folder.path(), "unix:path=/nonexistent", &["run", "-m", "4000MB", "--", "true"], &[]).await;
    assert!(answer.err.contains("write MiB"), "{}", answer.err);
    for arguments in [&["--help"][..], &["run", "--help"], &["--version"], &["join", "--help"]] {
        let answer = command(folder.path(), "unix:path=/nonexistent", arguments, &[]).await;
        assert_eq!(answer.code, 0, "{arguments:?}");
    }
}

#[tokio::test]
async fn status_and_list_show_what_is_there() {
    let site = Site::new(2, &config(&[1])).await.ready().await;
    let status = site.run(&["status"]).await;
    assert_eq!(status.code, 0, "{}", status.err);
    assert!(status.out.contains("is ready: 1 GPU(s) leased"), "{}", status.out);
    assert!(status.out.contains("on gpu-a") && status.out.contains("for everyone"), "{}", status.out);
    let list = site.run(&["list"]).await;
    assert!(
        list.out.starts_with("LEASE") && list.out.contains("GPU-00000000-6770-752d-6100"),
        "{}",
        list.out
    );
    let described = json(&site.run(&["status", "--json"]).await);
    assert_eq!(described["state"], "ready");
    assert_eq!(described["leases"][0]["devices"][0]["memory_bytes"], 1 << 30);
    assert_eq!(json(&site.run(&["--json", "list"]).await)["leases"].as_array().unwrap().len(), 1);
    for text in [&status.out, &list.out] {
        assert!(text.contains("tcp, encrypted"), "{text}");
    }
}

#[tokio::test]
async fn data_that_is_not_encrypted_is_shown() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 1));
    sim.with(|s| s.trusts_network = true);
    let (engine, config) = (engine(&[&sim]), config(&[1]));
    engine.allow_clear(true);
    let _api = Some(serve(&bus, &engine, &config).await);
    want(&engine, &config).await;
    let site = Site { bus, folder: folder(), sim, engine, _api }.ready().await;
    for command in ["status", "list"] {
        let answer = site.run(&[command]).await;
        assert!(answer.out.contains("tcp, NOT encrypted: the server trusts this network"), "{}", answer.out);
    }
    let lease = &json(&site.run(&["list", "--json"]).await)["leases"][0];
    assert_eq!((&lease["transport"], &lease["encrypted"]), (&"tcp".into(), &false.into()));
}

#[tokio::test]
async fn a_parked_lease_that_is_wanted_back_shows_its_place() {
    use gpusession_proto::control::{PoolEvent, StateChange, pool_event::Event};
    let site = Site::new(1, &config(&[1])).await.ready().await;
    let id = site.engine.snapshot().borrow().leases[0].facts.id.clone();
    let change = StateChange { state: "returning".into(), position: 1, waiting: 2, ..Default::default() };
    site.sim.send(PoolEvent { lease: id, event: Some(Event::State(change)) });
    let mut snapshot = site.engine.snapshot();
    snapshot.wait_for(|s| s.leases[0].facts.state == LeaseState::Parked).await.unwrap();
    let lease = &json(&site.run(&["list", "--json"]).await)["leases"][0];
    assert_eq!(
        (&lease["state"], &lease["position"], &lease["waiting"]),
        (&"parked".into(), &1.into(), &2.into())
    );
    let status = site.run(&["status"]).await;
    assert!(status.out.contains("parked, waits, position 1 of 2"), "{}", status.out);
    assert!(status.out.contains("waits: position 1 of 2: other leases have its GPUs now"), "{}", status.out);
}

/// A daemon whose lease is granted right after its first answer; the grant changes the lease's id.
#[derive(Default)]
struct Granting {
    described: bool,
}

#[zbus::interface(name = "org.gpusession1.Manager")]
impl Granting {
    fn describe(&mut self) -> String {
        let (id, state) = if std::mem::replace(&mut self.described, true) {
            ("abcdefghijkl", "active")
        } else {
            ("l1", "pending")
        };
        serde_json::json!({
            "schema": 1, "version": "1", "state": "ready", "environment": { "NCCL_DEBUG": "WARN" },
            "leases_on_demand": false, "boot_allocation_complete": true, "gpus_wanted": 1, "gpus_leased": 1,
            "leases": [{ "id": id, "name": "l1", "state": state, "user": "", "gpus": 1, "server": "gpu-a", "processes": 0,
                "transport": "tcp+tls", "transport_reason": "", "devices": [] }],
            "servers": [],
        })
        .to_string()
    }

    #[zbus(name = "GetLeaseByPIDFD")]
    fn get_lease_by_pidfd(&self, _pidfd: zbus::OwnedFd) -> Vec<zbus::OwnedObjectPath> {
        vec!["/org/gpusession1/lease/abcdefghijkl".try_into().unwrap()]
    }
}

#[tokio::test]
async fn a_lease_that_is_granted_meanwhile_is_found() {
    let (bus, folder) = (PrivateBus::start(), folder());
    let connection = bus.connect().await;
    connection.request_name("org.gpusession1").await.unwrap();
    for (arguments, expected) in
        [(["env"], "export NCCL_DEBUG='WARN'\n"), (["status"], "ready: 1 GPU(s) leased\n\n  l1  ready")]
    {
        connection.object_server().at("/org/gpusession1", Granting::default()).await.unwrap();
        let answer = command(folder.path(), &bus.address(), &arguments, &[]).await;
        assert_eq!(answer.code, 0, "{}", answer.err);
        assert!(answer.out.contains(expected), "{}", answer.out);
        connection.object_server().remove::<Granting, _>("/org/gpusession1").await.unwrap();
    }
}

#[tokio::test]
async fn status_waits_until_the_machine_has_its_gpus() {
    let site = Site::new(0, &config(&[1])).await;
    {
        let waiting = site.run(&["status", "--wait"]);
        tokio::pin!(waiting);
        tokio::select! {
            answer = &mut waiting => panic!("did not wait: {}", answer.out),
            () = until(&site.engine, |s| s.leases[0].facts.trouble.is_some()) => {}
        }
        site.sim.with(|s| s.gpus = 1);
        let answer = waiting.await;
        assert_eq!(answer.code, 0, "{}", answer.err);
        assert!(answer.out.contains("1 GPU(s) leased"), "{}", answer.out);
    }
    // A machine with all its GPUs does not wait.
    assert_eq!(site.run(&["status", "--wait"]).await.code, 0);
}

#[tokio::test]
async fn containers_get_a_specification() {
    let folder = folder();
    let answer = command(folder.path(), "unix:path=/nonexistent", &["cdi"], &[]).await;
    assert_eq!(answer.code, 0, "{}", answer.err);
    let cdi: serde_json::Value = serde_json::from_str(&answer.out).unwrap();
    assert_eq!((&cdi["kind"], &cdi["devices"][0]["name"]), (&"gpusession.org/gpu".into(), &"all".into()));
    let edits = &cdi["devices"][0]["containerEdits"];
    assert_eq!(edits["mounts"][0]["hostPath"], folder.path().join("lib").to_str().unwrap());
    assert_eq!(edits["mounts"][1]["hostPath"], "/run/gpusession/grant.sock");
}

#[tokio::test]
async fn status_says_why_a_lease_waits() {
    let site = Site::new(0, &config(&[2])).await;
    until(&site.engine, |s| s.leases[0].facts.trouble.is_some()).await;
    let status = site.run(&["status"]).await;
    assert_eq!(status.code, 0);
    assert!(status.out.contains("l1 waits: gpu-a: all GPUs are taken"), "{}", status.out);
    site.sim.with(|s| s.failing = Some(PoolError::new(Trouble::Refused, "revoked")));
    until(&site.engine, |s| {
        s.leases[0].facts.trouble.as_ref().is_some_and(|t| t.trouble == Trouble::Refused)
    })
    .await;
    let status = site.run(&["status"]).await;
    assert!(status.out.contains("l1 waits: revoked"), "{}", status.out);
}

#[tokio::test]
async fn status_says_why_a_lease_has_no_room_for_a_program() {
    let site = Site::new(0, &config(&[1])).await;
    site.sim.with(|s| {
        s.refuses_workers = Some(PoolError::new(Trouble::OutOfMemory, "its memory is full"));
        s.gpus = 1;
    });
    until(&site.engine, |s| {
        s.leases[0].facts.state == LeaseState::Active && s.leases[0].facts.trouble.is_some()
    })
    .await;
    let status = site.run(&["status"]).await;
    assert!(status.out.contains("l1 has no room for another program: its memory is full"), "{}", status.out);
    site.sim.with(|s| s.refuses_workers = None);
    until(&site.engine, |s| s.leases[0].gauges.stock > 0).await;
    let status = site.run(&["status"]).await;
    assert!(!status.out.contains("no room"), "{}", status.out);
}

#[tokio::test]
async fn run_uses_the_sessions_lease_and_passes_everything_through() {
    let mut config = config(&[2]);
    config.environment.insert("NCCL_DEBUG".into(), "it's".into());
    config.environment.insert("MINE".into(), "not this".into());
    let site = Site::new(2, &config).await.ready().await;
    let lib = site.file("lib").display().to_string();
    let script =
        "echo \"$LD_LIBRARY_PATH|$NCCL_DEBUG|$MINE|$GPUSESSION_LEASE|$CUDA_VISIBLE_DEVICES\"; exit 7";
    let answer = site
        .run_with(&["run", "--", "sh", "-c", script], &[("MINE", "mine"), ("LD_LIBRARY_PATH", "/x")])
        .await;
    assert_eq!(answer.code, 7, "{}", answer.err);
    assert_eq!(answer.out.trim(), format!("{lib}:/x|it's|mine||"));
    let answer = site.run(&["run", "-n", "1", "--", "sh", "-c", script]).await;
    assert_eq!(answer.out.trim(), format!("{lib}|it's|not this||0"));
    let answer =
        site.run_with(&["run", "-n", "1", "sh", "-c", script], &[("CUDA_VISIBLE_DEVICES", "1,0")]).await;
    assert!(answer.out.trim().ends_with("|1"), "{}", answer.out);
    assert_eq!(site.run(&["run", "-n", "3", "--", "true"]).await.code, 125);
    assert_eq!(site.run(&["run", "-m", "50%", "--", "true"]).await.code, 125);
    assert_eq!(site.run(&["run", "--", "/no/such/program"]).await.code, 127);
    std::fs::write(site.file("plain"), "text").unwrap();
    std::fs::set_permissions(site.file("plain"), std::fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(site.run(&["run", "--", "./plain"]).await.code, 126);
    assert_eq!(site.run(&["run", "--", "sh", "-c", "kill -TERM $$"]).await.code, 143);
    let environment = site.run_with(&["env"], &[("MINE", "mine")]).await;
    assert_eq!(environment.out, "export NCCL_DEBUG='it'\\''s'\n");
    // A daemon that was taken over adds a variable: root's file counts.
    let of_root = gpusessiond::config::Config {
        environment: [("NCCL_DEBUG".to_owned(), "INFO".to_owned())].into(),
        ..Default::default()
    };
    publish(&of_root, &site.file("environment")).unwrap();
    let there = [("RUNTIME_DIRECTORY", site.folder.path().to_str().unwrap())];
    assert_eq!(site.run_with(&["env"], &there).await.out, "export NCCL_DEBUG='INFO'\n");
    let answer = site.run_with(&["run", "--", "sh", "-c", script], &there).await;
    assert_eq!(answer.out.trim(), format!("{lib}|INFO|||"));
    let explained = site.run_with(&["env", "--explain"], &[("MINE", "mine")]).await;
    assert!(explained.out.contains("# MINE: set by you"), "{}", explained.out);
    let missing = site.run_with(&["run", "--", "true"], &[("GPUSESSION_LIBDIR", "/nonexistent")]).await;
    assert_eq!(missing.code, 125);
    assert!(missing.err.contains("gpusession-libs"), "{}", missing.err);
}

#[tokio::test]
async fn env_and_release_speak_json() {
    let mut config = config(&[1]);
    config.access.extra_leases = 4;
    config.environment.insert("NCCL_DEBUG".into(), "WARN".into());
    let site = Site::new(2, &config).await.ready().await;
    let environment = site.run_with(&["env", "--json"], &[("NCCL_DEBUG", "INFO")]).await;
    assert_eq!(json(&environment)["environment"], serde_json::json!({ "NCCL_DEBUG": "WARN" }));
    assert_eq!(environment.code, 0, "{}", environment.err);

    let request = site.run(&["request", "-o", "lease.toml", "--json"]).await;
    let id = json(&request)["lease"].as_str().unwrap().to_owned();
    let released = site.run(&["release", "lease.toml", "--json"]).await;
    let expected = serde_json::json!({ "schema": 1, "lease": id, "released": true, "trouble": null });
    assert_eq!((released.code, json(&released)), (0, expected));

    // Failures have the same message, hint and exit code with `--json` as without.
    std::fs::write(site.file("bad.toml"), "id = 1\n").unwrap();
    for (lease, code) in [(id.as_str(), 1), ("none.toml", 78), ("bad.toml", 78)] {
        let (words, answer) =
            (site.run(&["release", lease]).await, site.run(&["release", lease, "--json"]).await);
        let error = &json(&answer)["error"];
        assert_eq!((words.code, answer.code, &error["code"]), (code, code, &code.into()), "{lease}");
        let hint = error["hint"].as_str().map_or_else(String::new, |hint| format!("\n  hint: {hint}"));
        assert_eq!(words.err, format!("gpusession: {}{hint}\n", error["message"].as_str().unwrap()));
        assert_eq!((answer.err.as_str(), words.out.as_str()), ("", ""));
    }
}

#[tokio::test]
async fn login_environment_is_read_without_the_daemon() {
    let folder = folder();
    // The sockets of a bus and of a daemon, on which no process answers.
    let bus = std::os::unix::net::UnixListener::bind(folder.path().join("bus.sock")).unwrap();
    let _grants = std::os::unix::net::UnixListener::bind(folder.path().join("grant.sock")).unwrap();
    bus.set_nonblocking(true).unwrap();
    let address = format!("unix:path={}", folder.path().join("bus.sock").display());
    let run = folder.path().display().to_string();
    let there = [("RUNTIME_DIRECTORY", run.as_str()), ("MINE", "mine")];
    let ask = |arguments: &'static [&'static str]| command(folder.path(), &address, arguments, &there);
    assert_eq!(ask(&["env", "--generator"]).await.out, "", "no daemon has run");

    let mut config = config(&[]);
    config.environment.insert("HF_HOME".into(), "/srv/models 1".into());
    config.environment.insert("MINE".into(), "not this".into());
    let file = folder.path().join("login/access.json");
    let variables = folder.path().join("environment");
    Audience::of(&config).write(&file).unwrap();
    assert_eq!(ask(&["env", "--generator"]).await.out, "", "root has written no variables");
    publish(&config, &variables).unwrap();
    let given = ask(&["env", "--generator"]).await;
    assert_eq!((given.code, given.out.as_str()), (0, "HF_HOME=\"/srv/models 1\"\n"), "{}", given.err);
    let given = json(&ask(&["env", "--generator", "--json"]).await);
    assert_eq!(given["environment"]["HF_HOME"], "/srv/models 1");

    std::fs::set_permissions(&variables, std::fs::Permissions::from_mode(0o664)).unwrap();
    let foreign = ask(&["env", "--generator"]).await;
    assert_eq!((foreign.code, foreign.out.as_str()), (1, ""), "others than root may write the file");
    publish(&config, &variables).unwrap();

    config.access.users.clear();
    config.access.root = false;
    Audience::of(&config).write(&file).unwrap();
    let given = ask(&["env", "--generator"]).await;
    assert_eq!((given.code, given.out.as_str()), (0, ""), "nothing here is for this user");
    std::fs::write(&file, "{").unwrap();
    let broken = ask(&["env", "--generator", "--json"]).await;
    assert_eq!((broken.code, &json(&broken)["error"]["code"]), (1, &1.into()));
    let asked = bus.accept().map(|_| ()).unwrap_err();
    assert_eq!(asked.kind(), std::io::ErrorKind::WouldBlock, "the bus was asked");
}

#[tokio::test]
async fn a_new_lease_lasts_as_long_as_its_program() {
    let mut config = config(&[1]);
    config.access.extra_leases = 4;
    let site = Site::new(2, &config).await.ready().await;
    let answer = site.run(&["run", "--new", "-m", "25%", "--", "sh", "-c", "echo $GPUSESSION_LEASE"]).await;
    assert_eq!(answer.code, 0, "{}", answer.err);
    let id = answer.out.trim().to_owned();
    tokio::time::timeout(TEST_TIMEOUT, site.sim.until(|s| s.released.contains(&id))).await.unwrap();
    assert_eq!(site.sim.with(|s| s.requests.last().unwrap().memory_percent), 25.0);
    assert_eq!(site.run(&["run", "--new", "-n", "2", "--", "true"]).await.code, 125);
}

#[tokio::test]
async fn request_and_release_through_a_file() {
    let mut config = config(&[1]);
    config.access.extra_leases = 4;
    let site = Site::new(2, &config).await.ready().await;
    let full = site.run(&["request", "-n", "2", "-o", "lease.toml"]).await;
    assert_eq!(full.code, 75, "{}", full.err);
    let answer = site.run(&["request", "-n", "1", "-o", "lease.toml", "--json"]).await;
    assert_eq!(answer.code, 0, "{}", answer.err);
    let id = json(&answer)["lease"].as_str().unwrap().to_owned();
    assert!(json(&answer)["expires_usec"].as_u64().unwrap() > 0, "{}", answer.out);
    let text = std::fs::read_to_string(site.file("lease.toml")).unwrap();
    assert!(text.contains(&id), "{text}");
    assert_eq!(site.run(&["request", "-o", "lease.toml"]).await.code, 1, "never overwritten");
    let answer =
        site.run(&["run", "--lease", "lease.toml", "--", "sh", "-c", "echo $GPUSESSION_LEASE"]).await;
    assert_eq!(answer.out.trim(), id);
    assert!(site.sim.with(|s| s.released.is_empty()), "it outlives its programs");
    let answer = site.run(&["release", "lease.toml"]).await;
    assert_eq!(answer.code, 0, "{}", answer.err);
    tokio::time::timeout(TEST_TIMEOUT, site.sim.until(|s| s.released == [id.clone()])).await.unwrap();
    assert!(!site.file("lease.toml").exists());
    assert_eq!(site.run(&["release", &id]).await.code, 1, "no such lease");
    // The file of an expired lease is removed.
    std::fs::write(site.file("lease.toml"), &text).unwrap();
    assert_eq!(site.run(&["release", "lease.toml"]).await.code, 0);
    assert!(!site.file("lease.toml").exists());
    assert_eq!(site.run(&["run", "--lease", "lease.toml", "--", "true"]).await.code, 125);
    std::fs::write(site.file("bad.toml"), "id = \"x\"\nvia = \"daemon\"\ngpus = 1\nserverz = []\n").unwrap();
    let bad = site.run(&["release", "bad.toml"]).await;
    assert_eq!(bad.code, 78);
    assert!(bad.err.contains("bad.toml:4:1: unknown key `serverz`, did you mean `servers`?"), "{}", bad.err);
}

#[tokio::test]
async fn other_users_have_only_the_machines_lease() {
    if !nix::unistd::getuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return;
    }
    const NOBODY: u32 = 65534;
    let site = Site::new(4, &config(&[1])).await.ready().await;
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(site.folder.path(), open.clone()).unwrap();
    std::fs::set_permissions(site.bus.folder(), open).unwrap();
    // Other users may lack access to the folder of the tested program.
    let program = site.file("gpusession");
    // Copied by another process: a fork of another test could inherit a descriptor that is open for
    // writing, which would make the program busy.
    let copied = std::process::Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_gpusession"))
        .arg(&program)
        .status()
        .unwrap();
    assert!(copied.success());
    let nobody = async |arguments: &[&str]| {
        let output = tokio::process::Command::new(&program)
            .args(arguments)
            .current_dir("/")
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", "/nonexistent")
            .env("GPUSESSION_LIBDIR", site.file("lib"))
            .env("DBUS_SYSTEM_BUS_ADDRESS", site.bus.address())
            .uid(NOBODY)
            .gid(NOBODY)
            .stdin(Stdio::null())
            .output();
        let output = tokio::time::timeout(TEST_TIMEOUT, output).await.unwrap().unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(nobody(&["status"]).await.0, 0);
    assert_eq!(nobody(&["run", "--", "true"]).await.0, 0);
    let (code, error) = nobody(&["run", "--new", "--", "true"]).await;
    assert_eq!(code, 125);
    assert!(error.contains("extra_leases = 0"), "{error}");
    let (code, error) = nobody(&["request", "-o", "/tmp/never-written.toml"]).await;
    assert_eq!(code, 77, "{error}");
    let machine = site.engine.snapshot().borrow().leases[0].facts.id.clone();
    let own = site.run(&["request", "-o", "lease.toml", "--json"]).await;
    let own = json(&own)["lease"].as_str().unwrap().to_owned();
    for lease in [&machine, &own] {
        let (code, error) = nobody(&["release", lease]).await;
        assert_eq!(code, 77, "{error}");
    }
    assert!(site.sim.with(|s| s.released.is_empty() && s.requests.len() == 2), "the server was not asked");
    // Another user cannot take the daemon's name.
    let busctl = tokio::process::Command::new("dbus-send")
        .args([&format!("--bus={}", site.bus.address()), "--print-reply", "--dest=org.freedesktop.DBus", "/"])
        .args(["org.freedesktop.DBus.RequestName", "string:org.gpusession1", "uint32:6"])
        .uid(NOBODY)
        .output()
        .await
        .unwrap();
    assert!(String::from_utf8_lossy(&busctl.stderr).contains("AccessDenied"), "{busctl:?}");
    // root may release any lease.
    assert_eq!(site.run(&["release", &machine]).await.code, 0);
}
