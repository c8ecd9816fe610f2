//! `gpusession netperf` against a real server and its endpoints.

use serde_json::Value;

use super::*;
use gpusession_test_support::json_table::documented;

/// Lines of a server that lets clients of this machine send data without encryption.
const CLEAR: &str = "encryption = \"off\"\ntrusted_networks = [\"127.0.0.0/8\"]\n";

impl Site {
    /// Adds lines to the server's configuration.
    pub(super) fn server_has(&self, lines: &str) {
        let path = self.path("gpuserver.toml");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(path, format!("{lines}{text}")).unwrap();
    }

    fn netperf(&self, home: &Path, options: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpusession"));
        self.environment(&mut command);
        command.env("HOME", home).args(["netperf", "--json"]).args(options);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Makes a user a client of its own, and returns the home folder.
    fn user(&self, name: &str) -> PathBuf {
        let home = self.path(name);
        std::fs::create_dir(&home).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpusession"));
        self.environment(&mut command);
        let token = self.token();
        let arguments = ["join", "--user", "--name", name, "--server", &self.address, &token];
        let output = command.env("HOME", &home).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        home
    }

    /// Process ids of the server's endpoints.
    fn endpoints(&self, server: &Running) -> Vec<u32> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let parent =
                stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
            if line.ends_with(b"\0--measure\0") && parent == Some(server.0.id()) {
                found.push(pid);
            }
        }
        found
    }
}

/// Returns the exit code and the JSON of a finished command.
#[track_caller]
fn finished(output: &Output) -> (i32, Value) {
    let said = String::from_utf8_lossy(&output.stdout);
    let value = serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    (output.status.code().unwrap(), value)
}

#[track_caller]
fn refused(output: &Output, code: i32, word: &str) {
    let (found, value) = finished(output);
    let error = &value["error"];
    let text = format!("{} {}", error["message"].as_str().unwrap(), error["hint"]);
    assert!(found == code && text.contains(word), "{value}");
}

#[test]
fn netperf_measures_through_the_daemon_once_a_minute() {
    let mut site = Site::with_simulated_gpus();
    site.server_has(CLEAR);
    let server = site.start_server();
    site.configure("[client]\nname = \"vm-1\"\n", &site.token());
    let daemon = site.start_daemon();
    site.described("a server", |d| d["servers"][0]["state"] == "online");
    let home = site.path("home");
    let run = |options: &[&str]| site.netperf(&home, options).output().unwrap();

    let begun = Instant::now();
    let (code, value) = finished(&run(&["--seconds", "2", "--lanes", "8,1"]));
    assert_eq!(code, 0, "{value}");
    assert!(begun.elapsed() < Duration::from_secs(20));
    documented("gpusession netperf", &value);
    assert_eq!(value["server"], "gpu-a");
    assert_eq!(value["programs"]["encrypted"], false);
    let runs = value["runs"].as_array().unwrap();
    let ways: Vec<_> =
        runs.iter().map(|run| (run["encrypted"] == true, run["lanes"].as_u64().unwrap())).collect();
    assert_eq!(ways, [(true, 1), (true, 8), (false, 1), (false, 8)]);
    for run in runs {
        for direction in ["to_server", "from_server"] {
            let rate = run[direction]["bytes_per_s"].as_u64().unwrap();
            assert!((5_000_000..1_000_000_000_000).contains(&rate), "{run}");
            for end in ["client", "server"] {
                let used = &run[direction][end];
                let most = 110 * used["processors"].as_u64().unwrap() + 100;
                let percent = used["cpu_percent"].as_u64().unwrap();
                assert!(percent > 0 && percent <= most, "{run}");
            }
        }
        let median = run["rtt_usec"]["p50"].as_f64().unwrap();
        assert!(
            (2.0..100_000.0).contains(&median) && median <= run["rtt_usec"]["p90"].as_f64().unwrap(),
            "{run}"
        );
    }

    refused(&run(&[]), 75, "next measurement may begin in");
    refused(&run(&["gpu-b"]), 1, "gpu-b");
    site.until("the end of the endpoint", |site| site.endpoints(&server).is_empty().then_some(()));

    // The settings apply without a restart, also to one that may measure again.
    let rules = |word: &str| {
        site.server_listens(&site.address, "0");
        site.server_has(&format!("netperf = \"{word}\"\n{CLEAR}"));
        server.signal(Signal::SIGHUP);
    };
    rules("off");
    site.until("the new setting", |_| (run(&[]).status.code() == Some(77)).then_some(()));
    refused(&run(&[]), 77, "netperf");
    rules("admins");
    site.until("the new setting", |_| {
        String::from_utf8_lossy(&run(&[]).stdout).contains("administrators").then_some(())
    });
    refused(&run(&[]), 77, "--identity");
    let file = site.path("admin.pem").display().to_string();
    site.gpuserver(&["admin", "create", "alice", "--out", &file]);
    let options = [&site.address, "--identity", &file, "--seconds", "1", "--lanes", "2"];
    let (code, value) = finished(&run(&options));
    assert_eq!((code, value["runs"][1]["encrypted"].as_bool()), (0, Some(false)), "{value}");

    assert_eq!(server.stop(), 0);
    site.until("the loss of the server", |_| (run(&["gpu-a"]).status.code() == Some(69)).then_some(()));
    daemon.stop();
}

#[test]
fn two_measure_at_a_time_and_an_endpoint_ends_with_its_client() {
    let mut site = Site::with_simulated_gpus();
    let server = site.start_server();
    let homes = ["alice", "bob", "carol"].map(|name| site.user(name));
    let options = [&site.address, "--seconds", "10", "--lanes", "1,2"];
    let start = |home| Running(site.netperf(home, &options).spawn().unwrap());
    let running = [start(&homes[0]), start(&homes[1])];
    let pids =
        site.until("two endpoints", |site| Some(site.endpoints(&server)).filter(|pids| pids.len() == 2));
    for pid in &pids {
        site.until("the endpoint's restrictions", |_| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let lines = ["Seccomp:\t2", "NoNewPrivs:\t1", "CapEff:\t0000000000000000"];
            lines.iter().all(|line| status.contains(line)).then_some(())
        });
        // It lowers its priority a moment later, once it is ready.
        site.until("the endpoint's lower priority", |_| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let nice = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(16);
            (nice == Some("10")).then_some(())
        });
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        assert!(!maps.contains("simgpu"), "it loads a driver");
    }
    refused(&site.netperf(&homes[2], &options).output().unwrap(), 75, "2 measurements");
    let killed = Instant::now();
    running.into_iter().for_each(Running::kill);
    site.until("the end of the endpoints", |site| site.endpoints(&server).is_empty().then_some(()));
    assert!(killed.elapsed() < Duration::from_secs(8), "it lives on without its client");
    // A refusal does not count as a measurement; without clear connections, only TLS is measured.
    let short = [&site.address, "--seconds", "1", "--lanes", "4"];
    let (code, value) = finished(&site.netperf(&homes[2], &short).output().unwrap());
    assert_eq!(
        (code, &value["programs"]["encrypted"], value["runs"].as_array().unwrap().len()),
        (0, &true.into(), 1)
    );
    server.stop();
    refused(&site.netperf(&homes[2], &short).output().unwrap(), 69, "gpuserver");
}
