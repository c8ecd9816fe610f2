//! The verbs by which people look at a site and find faults in it.

use std::collections::BTreeMap;

use gpusession_test_support::json_table::documented;
use serde_json::Value;

use super::*;

/// States and texts of `gpusession health --json`, by id.
type Checks = BTreeMap<String, (String, String)>;

impl Site {
    fn gpusession_with(&self, arguments: &[&str], variables: &[(&str, &Path)]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpusession"));
        self.environment(&mut command);
        command.args(arguments).envs(variables.iter().copied()).output().unwrap()
    }

    /// Starts a program that holds a part of this machine's GPU until its input closes.
    pub(super) fn cuda_program(&self) -> Running {
        let library = artefact("gpusession-cuda", Artefact::Library("libgpusession_cuda.so"));
        std::fs::create_dir(self.path("programs")).unwrap();
        std::os::unix::fs::symlink(library, self.path("programs/libcuda.so.1")).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["local::local_program", "--exact", "--nocapture"])
            .env("LD_LIBRARY_PATH", self.path("programs"))
            .env("GPUSESSION_SOCKET", self.path("run/grant.sock"))
            .env("LOCAL_PROGRAM", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        assert!(lines.any(|line| line.unwrap().starts_with("MEMORY ")), "{:?}", child.wait());
        Running(child)
    }

    fn health(&self, options: &[&str], variables: &[(&str, &Path)]) -> (i32, Checks) {
        let output = self.gpusession_with(&[&["health", "--json"], options].concat(), variables);
        let said = text(&output.stdout);
        let value: Value = serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}"));
        documented("gpusession health", &value);
        let rows = value["checks"].as_array().unwrap().iter().map(|row| {
            let word = |key: &str| row[key].as_str().unwrap().to_owned();
            (word("id"), (word("state"), format!("{}; {}", word("found"), word("remedy"))))
        });
        (output.status.code().unwrap(), rows.collect())
    }
}

#[track_caller]
fn expect(checks: &Checks, id: &str, state: &str, word: &str) {
    let (found, text) = &checks[id];
    assert!(found == state && text.contains(word), "{id} is {found}: {text}");
}

#[test]
fn health_tests_a_gpu_and_names_a_server_that_is_down() {
    let mut site = Site::with_simulated_gpus();
    let server = site.start_server();
    site.configure("[client]\nname = \"vm-1\"\n[[lease]]\nmemory = \"25%\"\n", &site.token());
    let daemon = site.start_daemon();
    site.lease();
    // The library of programs, as a folder in the loader's path has it.
    let library = artefact("gpusession-cuda", Artefact::Library("libgpusession_cuda.so"));
    std::fs::create_dir(site.path("client")).unwrap();
    std::os::unix::fs::symlink(library, site.path("client/libcuda.so.1")).unwrap();
    let (client, socket) = (site.path("client"), site.path("run/grant.sock"));
    let variables = [("LD_LIBRARY_PATH", client.as_path()), ("GPUSESSION_SOCKET", socket.as_path())];

    let (_, checks) = site.health(&["--gpu"], &variables);
    expect(&checks, "library.first", "ok", "gpusession's");
    for id in ["login.daemon", "login.gpu", "login.socket", "network.servers", "network.identity"] {
        expect(&checks, id, "ok", "");
    }
    for id in ["names", "control-port", "data-port", "accepted", "versions", "clock", "packets"] {
        expect(&checks, &format!("network.{id}"), "ok", "");
    }
    expect(&checks, "network.certificate", "ok", "valid for another");
    expect(&checks, "gpu.library", "ok", "gpusession's");
    expect(&checks, "gpu.cards", "ok", "simulated GPU");
    expect(&checks, "gpu.result", "ok", "262144 sums are right");
    expect(&checks, "gpu.time", "ok", "GB/s");

    // The server's own command checks its host.
    let output = site.server_command().args(["health", "--json"]).output().unwrap();
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    documented("gpusession health", &value);
    let row =
        |id: &str| value["checks"].as_array().unwrap().iter().find(|row| row["id"] == id).unwrap().clone();
    assert_eq!(row("server.answers")["state"], "ok", "{value}");
    assert!(row("server.cards")["found"].as_str().unwrap().contains("card 1"), "{value}");
    assert_eq!(row("server.authority")["state"], "ok", "{value}");

    // A program that finds another library first: no card, and the file is named.
    let other = site.path("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::copy("/lib/x86_64-linux-gnu/libc.so.6", other.join("libcuda.so.1")).unwrap();
    let (code, checks) = site.health(&["--local"], &[("LD_LIBRARY_PATH", &other)]);
    assert_eq!(code, 1);
    expect(&checks, "library.first", "fault", "other/libcuda.so.1");
    expect(&checks, "network.control-port", "skipped", "--local asks no server");

    assert_eq!(server.stop(), 0);
    assert_eq!(site.server_command().arg("health").output().unwrap().status.code(), Some(69));
    let (code, checks) = site.health(&[], &variables);
    assert_eq!(code, 1);
    expect(&checks, "network.control-port", "fault", "systemctl start gpuserver");
    expect(&checks, "network.accepted", "fault", "does not answer");

    // Without a daemon and a server the command still checks the machine.
    daemon.kill();
    let (code, checks) = site.health(&[], &variables);
    assert_eq!(code, 69);
    expect(&checks, "library.first", "ok", "");
    expect(&checks, "network.certificate", "ok", "");
}

#[test]
fn a_report_of_a_whole_site_holds_no_secret() {
    const SECRET: &str = "swordfish-0123456789";
    let mut site = Site::new();
    let server = site.start_server();
    let token = site.token();
    let configuration = format!(
        "# {SECRET}\n[client]\nname = \"vm-1\"\n[[lease]]\n[environment]\nNCCL_DEBUG = \"{SECRET}\"\n"
    );
    site.configure(&configuration, &token);
    let daemon = site.start_daemon();
    site.lease();
    let unpacked =
        |archive: &Path| text(&Command::new("tar").arg("-xOzf").arg(archive).output().unwrap().stdout);
    let archive = site.path("report.tar.gz");
    let output = site.gpusession_with(&["report", "--json", "-o", archive.to_str().unwrap()], &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    documented("gpusession report", &value);
    let all = unpacked(&archive);
    assert!(!all.contains("vm-1") && !all.contains("gpu-a"), "names stay with the owner: {all}");
    let table = std::fs::read_to_string(value["names"].as_str().unwrap()).unwrap();
    assert!(table.contains("\tvm-1\n") && table.contains("\tgpu-a\n"), "{table}");
    let named = site.path("named.tar.gz");
    site.gpusession_with(&["report", "--names", "-o", named.to_str().unwrap()], &[]);
    let all = all + &unpacked(&named);
    let key = std::fs::read_to_string(site.path("state/identity/client.key")).unwrap();
    let secret = key.lines().find(|line| !line.starts_with('-')).unwrap();
    for secret in [SECRET, token.trim(), secret] {
        assert!(!secret.is_empty() && !all.contains(secret), "{secret} in {all}");
    }
    for kept in
        ["\"state\": \"ready\"", "login.daemon", "environment.NCCL_DEBUG = (set)", "client.name = \"vm-1\""]
    {
        assert!(all.contains(kept), "{kept} not in {all}");
    }
    // The server's archive.
    let archive_of_server = site.path("server.tar.gz");
    site.gpuserver(&["report", "-o", archive_of_server.to_str().unwrap()]);
    let all = unpacked(&archive_of_server);
    assert!(!all.contains("vm-1") && !all.contains("gpu-a") && all.contains("server.authority"), "{all}");
    std::fs::remove_file(&archive_of_server).unwrap();
    site.gpuserver(&["report", "--names", "-o", archive_of_server.to_str().unwrap()]);
    let all = all + &unpacked(&archive_of_server);
    let key = std::fs::read_to_string(site.path("server/ca/authority.key")).unwrap();
    let secret = key.lines().find(|line| !line.starts_with('-')).unwrap();
    assert!(!all.contains(secret) && !all.contains(token.trim()), "{all}");
    assert!(all.contains("\"name\": \"gpu-a\"") && all.contains("server.authority"), "{all}");
    let output = site.gpusession_with(&["report", "-o", archive.to_str().unwrap()], &[]);
    assert_eq!(output.status.code(), Some(1), "a file is not replaced");
    assert!(text(&output.stdout).contains("status.json"), "it lists first");
    assert_eq!((daemon.stop(), server.stop()), (0, 0));
}

#[test]
fn cards_counts_and_free_gpus_of_servers_are_shown() {
    let mut site = Site::with_simulated_gpus();
    let server = site.start_server();
    site.configure(
        "[client]\nname = \"vm-1\"\n[[lease]]\nname = \"train\"\nmemory = \"25%\"\n",
        &site.token(),
    );
    let daemon = site.start_daemon();
    let lease = site.lease();
    let shown = |site: &Site, verb: &str| -> Value {
        let output = site.gpusession(&[verb, "--json"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let mut program = site.cuda_program();
    let smi = site.until("NVML's readings", |site| {
        let smi = shown(site, "smi");
        let cards = smi["servers"][0]["cards"].as_array().unwrap().clone();
        cards.iter().all(|card| card["temperature_c"].is_u64() && card["used_bytes"].is_u64()).then_some(smi)
    });
    documented("gpusession smi", &smi);
    let on_cards = smi["servers"][0]["cards"].as_array().unwrap().iter();
    let own: Vec<&Value> = on_cards.filter_map(|card| card.get("your_programs")).collect();
    assert_eq!(
        (own.len(), &own[0][0]["pid"], &own[0][0]["lease"]),
        (1, &program.0.id().into(), &lease.as_str().into())
    );
    assert!(own[0][0]["used_bytes"].as_u64().unwrap() > 0, "{smi}");
    let shows = text(&site.gpusession(&["smi"]).stdout);
    let row = shows.lines().find(|line| line.contains(&format!(" {} ", program.0.id()))).expect(&shows);
    assert!(row.starts_with("gpu-a") && row.contains("train") && row.ends_with("MiB"), "{shows}");
    drop(program.0.stdin.take());
    assert!(program.0.wait().unwrap().success());
    let cards = smi["servers"][0]["cards"].as_array().unwrap();
    let yours: Vec<&Value> = cards.iter().filter(|card| card["your_leases"][0] == lease.as_str()).collect();
    assert_eq!((cards.len(), yours.len()), (2, 1), "{smi}");
    assert_eq!(yours[0]["state"], "leased");
    assert!(yours[0]["free_bytes"].as_u64() < yours[0]["memory_bytes"].as_u64(), "{smi}");

    let stats = site.until("the lease's grant in the sums", |site| {
        let stats = shown(site, "stats");
        (stats["servers"][0]["last_24h"][1]["leases"] == 1).then_some(stats)
    });
    let by: Vec<_> =
        stats["servers"][0]["last_24h"].as_array().unwrap().iter().map(|use_| &use_["by"]).collect();
    assert_eq!(by, ["all", "machine", "you"]);
    assert!(text(&site.gpusession(&["stats"]).stdout).contains("GPU HOURS"));
    documented("gpusession stats", &stats);
    assert_eq!((&stats["servers"][0]["leases"], &stats["servers"][0]["gpus_free"]), (&1.into(), &1.into()));
    let mut list = shown(&site, "list");
    assert_eq!(list["leases"].take()[0]["id"], lease.as_str());
    list.as_object_mut().unwrap().remove("leases");
    documented("gpusession list", &list);
    assert!(text(&site.gpusession(&["list"]).stdout).contains("LARGEST FREE"));
    assert!(!text(&site.gpusession(&["list", "--mine"]).stdout).contains("LARGEST FREE"));
    assert!(text(&site.gpusession(&["smi"]).stdout).contains("train"));

    // A server that is down keeps its row, and the daemon's reason.
    assert_eq!(server.stop(), 0);
    site.described("the server is gone", |d| !d["servers"][0]["trouble"].is_null());
    let output = site.gpusession(&["smi"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("no answer: "), "{}", text(&output.stdout));
    // Without a daemon the command asks with the identity that it can read.
    daemon.kill();
    let server = site.start_server();
    assert_eq!(shown(&site, "smi")["servers"][0]["name"], "gpu-a");
    assert_eq!(server.stop(), 0);
}
