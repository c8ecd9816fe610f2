//! The JSON of each verb of both programs, compared with `docs/json.md`.

use std::collections::BTreeSet;

use gpusession_bus::describe::{Failure, Interruption, Lease, Session};
use gpusession_test_support::json_table::{documented, documented_together, sections};
use serde_json::{Value, json};

use super::*;

/// Sections that other tests compare, each with a site of its own.
const ELSEWHERE: [&str; 19] = [
    "gpuserver fleet create",
    "gpuserver fleet token",
    "gpuserver pool admit",
    "gpuserver pool join",
    "gpuserver pool yield",
    "gpuserver pool revoke",
    "gpuserver pool rotate status",
    "gpuserver statements import",
    "gpuserver statements list",
    "gpusession smi",
    "gpusession stats",
    "gpusession list",
    "gpusession health",
    "gpusession netperf",
    "gpusession report",
    "gpusession setup-libs",
    "gpusession setup-pam",
    "gpuserver mps",
    "gpuserver audit",
];

/// Outputs by section.
struct Seen<'a> {
    site: &'a Site,
    sections: BTreeSet<String>,
}

impl Seen<'_> {
    /// Runs `PROGRAM VERB`, and compares its output with the section of that name.
    #[track_caller]
    fn check(&mut self, section: &str, more: &[&str]) -> Value {
        let value = self.value(section, more);
        self.compare(section, std::slice::from_ref(&value));
        value
    }

    #[track_caller]
    fn compare(&mut self, section: &str, values: &[Value]) {
        documented_together(section, values);
        self.sections.insert(section.to_owned());
    }

    #[track_caller]
    fn value(&self, verb: &str, more: &[&str]) -> Value {
        let mut words = verb.split(' ');
        let program = words.next();
        let arguments: Vec<&str> = words.chain(more.iter().copied()).chain(["--json"]).collect();
        let output = match program {
            Some("gpuserver") => self.site.server_command().args(&arguments).output().unwrap(),
            _ => self.site.gpusession(&arguments),
        };
        let shown = text(&output.stdout);
        let value: Value =
            serde_json::from_str(&shown).unwrap_or_else(|e| panic!("{arguments:?}: {e}: {output:?}"));
        // Failures that the test wants are those without a server or a daemon.
        let failed = value["error"]["code"].clone();
        assert!([json!(null), json!(69), json!("not-running")].contains(&failed), "{arguments:?}: {value}");
        value
    }
}

/// Returns `gpusession status --json` with each list filled, as rare events fill it.
fn with_rare_events(mut status: Value) -> Value {
    let rare = Lease {
        control_group: Some("/job".into()),
        failures: vec![Failure::default()],
        interruptions: vec![Interruption::default()],
        ..Lease::default()
    };
    status["leases"].as_array_mut().unwrap().push(json!(rare));
    status["sessions"].as_array_mut().unwrap().push(json!(Session::default()));
    status
}

#[test]
#[expect(clippy::too_many_lines, reason = "one list of verbs and their answers")]
fn every_verb_prints_what_the_page_describes() {
    let mut site = Site::with_simulated_gpus();
    std::fs::remove_dir_all(site.path("server/ca")).unwrap();
    let mut seen = Seen { site: &site, sections: BTreeSet::new() };
    seen.check("gpuserver pool init", &[]);
    seen.check("gpuserver check-config", &[]);
    seen.check("gpuserver check-isolation", &[]);
    let no_server = seen.value("gpuserver status", &[]);
    assert_eq!((&no_server["schema"], &no_server["error"]["code"]), (&json!(1), &json!("not-running")));
    let mut done = seen.sections;

    let server = site.start_server();
    let one = "[client]\nname = \"vm-1\"\n[access]\nextra_leases = 4\n[environment]\nA = \"b\"\n\
        [[lease]]\nname = \"train\"\nmemory = \"25%\"\n";
    site.configure(one, &site.token());
    let daemon = site.start_daemon();
    site.lease();
    let mut seen = Seen { site: &site, sections: std::mem::take(&mut done) };
    let file = site.path("lease.toml").display().to_string();
    seen.check("gpusession request", &["--memory", "10%", "-o", &file]);
    seen.check("gpusession release", &[&file]);
    let both = format!("{one}[[lease]]\nname = \"large\"\ngpus = 2\nmemory = \"100%\"\n");
    std::fs::write(site.path("etc/gpusession.toml"), both).unwrap();
    seen.check("gpusession reload", &[]);
    let mut done = seen.sections;
    let described = site.described("a lease and a request that waits", |d| {
        let state = |name: &str| {
            let leases = d["leases"].as_array().unwrap().iter();
            leases.filter(|l| l["name"] == name).map(|l| l["state"].clone()).next()
        };
        state("train") != Some("pending".into())
            && d["gpus_leased"] == 1
            && state("large") == Some("pending".into())
    });
    let train = described["leases"][0]["id"].as_str().unwrap().to_owned();
    let mut program = site.cuda_program();
    site.until("the program's worker", |site| {
        site.gpuserver(&["ps", "--json"]).contains("\"state\": \"active\"").then_some(())
    });
    site.until("the request in the server's queue", |site| {
        site.gpuserver(&["queue", "--json"]).contains("vm-1").then_some(())
    });

    let mut seen = Seen { site: &site, sections: std::mem::take(&mut done) };
    let status = seen.value("gpusession status", &[]);
    seen.compare("gpusession status", &[with_rare_events(status.clone()), status]);
    seen.check("gpusession env", &[]);
    seen.check("gpusession cache show", &[]);
    seen.check("gpusession cache clear", &[]);

    let status = seen.value("gpuserver status", &[]);
    let mut warned = status.clone();
    warned["server"]["warnings"] = json!(["the authority ends"]);
    warned["server"]["peers"] = json!([
        { "address": "gpu2:7601", "server": "gpu2", "contact_unix": 1, "trouble": "" },
        { "address": "gpu3:7601", "server": "", "contact_unix": null, "trouble": "it does not answer" },
    ]);
    seen.compare("gpuserver status", &[status, warned]);
    let ps = seen.value("gpuserver ps", &["--threads"]);
    seen.compare("gpuserver ps", std::slice::from_ref(&ps));
    documented_together("gpuserver ps", &[seen.value("gpuserver ps", &["--all"]), ps.clone()]);
    let mut top = seen.value("gpuserver top", &["-n", "1"]);
    for row in top["top"].as_array_mut().unwrap() {
        let of_ps = ps["workers"][0].as_object().unwrap();
        row.as_object_mut().unwrap().retain(|key, _| !of_ps.contains_key(key));
    }
    seen.compare("gpuserver top", &[top]);
    for verb in ["leases", "gpus", "queue", "limits", "stats", "clients"] {
        seen.check(&format!("gpuserver {verb}"), &[]);
    }
    documented("gpuserver stats", &seen.value("gpuserver stats", &["--users"]));

    let token = seen.check("gpuserver token create", &["--from", "127.0.0.0/8"]);
    seen.check("gpuserver token list", &[]);
    seen.check("gpuserver token revoke", &[token["token"]["id"].as_str().unwrap()]);
    let file = site.path("admin.pem").display().to_string();
    seen.check("gpuserver admin create", &["ada", "--out", &file]);
    let remote = seen.value("gpuserver gpus", &["--server", &site.address, "--identity", &file]);
    documented("gpuserver gpus", &remote);
    seen.check("gpuserver admin list", &[]);
    seen.check("gpuserver admin revoke", &["ada"]);
    seen.check("gpuserver config get", &[]);
    documented("gpuserver config get", &seen.value("gpuserver config diff", &[]));
    let now = seen.value("gpuserver config set", &["warm_workers", "1"]);
    site.server_has("gpu_memory = \"90%\"\n");
    let later = seen.value("gpuserver config reload", &[]);
    let unset = seen.value("gpuserver config unset", &["warm_workers"]);
    seen.compare("gpuserver config set", &[now, later, unset]);
    let index = ps["workers"].as_array().unwrap().iter().find(|w| w["state"] == "active").unwrap();
    let index = index["gpu_indices"][0].as_u64().unwrap();
    seen.check("gpuserver off", &[&index.to_string()]);
    documented("gpuserver off", &seen.value("gpuserver on", &[&index.to_string()]));
    seen.check("gpuserver drain", &[]);
    documented("gpuserver drain", &seen.value("gpuserver drain", &["--end"]));

    // An idle lease is lent: the program has ended, and another request waits.
    drop(program.0.stdin.take());
    assert!(program.0.wait().unwrap().success());
    site.until("the records of the program", |site| {
        site.gpuserver(&["accounting", "--json"]).contains("\"process\"").then_some(())
    });
    let parked = seen.value("gpuserver park", &[&train]);
    seen.compare("gpuserver park", &[parked]);
    seen.check("gpuserver unpark", &[&train]);
    site.until("the lease's GPUs", |site| {
        let leases: Value = serde_json::from_str(&site.gpuserver(&["leases", "--json"])).unwrap();
        let train = leases["leases"].as_array()?.iter().find(|l| l["lease"] == *train)?;
        ["active", "idle"].contains(&train["state"].as_str()?).then_some(())
    });
    seen.check("gpusession park", &[&train]);
    documented("gpusession park", &seen.value("gpusession unpark", &[&train]));
    let worker = site.until("a worker", |site| {
        let ps: Value = serde_json::from_str(&site.gpuserver(&["ps", "--json"])).unwrap();
        Some(ps["workers"][0]["worker"].as_str()?.to_owned())
    });
    let worker = seen.value("gpuserver kill", &[&worker]);
    let lease = seen.value("gpuserver kill", &[&train]);
    seen.compare("gpuserver kill", &[worker, lease]);
    site.until("the record of the lease", |site| {
        let records: Value = serde_json::from_str(&site.gpuserver(&["accounting", "--json"])).unwrap();
        records["records"]
            .as_array()
            .unwrap()
            .iter()
            .any(|r| r["kind"] == "lease" && r["users"] != json!([]))
            .then_some(())
    });
    seen.check("gpuserver accounting", &[]);
    let started = seen.value("gpuserver audit", &["--event", "program-started"]);
    let user = started["audit"][0]["user"].as_str().unwrap().to_owned();
    seen.check("gpuserver audit forget-user", &["vm-1", &user]);

    daemon.stop();
    seen.check("gpusession leave", &["--for-template"]);
    let (address, token) = (site.address.clone(), site.token());
    seen.check("gpusession join", &[&address, &token, "--user", "--name", "ada"]);
    let unset = seen.value("gpusession status", &[]);
    assert_eq!((&unset["schema"], &unset["error"]["code"]), (&json!(1), &json!(69)));
    seen.check("gpuserver clients revoke", &["vm-1"]);
    documented("gpuserver clients revoke", &seen.value("gpuserver clients forget", &["vm-1"]));
    let stopped = seen.value("gpuserver stop", &[]);
    let waited = json!({ "stopped": { "programs": ["python3 (pid 1, uid 0) of vm-1"] } });
    seen.compare("gpuserver stop", &[stopped, waited]);
    seen.check("gpuserver audit verify", &[]);
    let done = seen.sections;
    drop(server);

    let all: BTreeSet<String> = done.into_iter().chain(ELSEWHERE.map(String::from)).collect();
    assert_eq!(all, sections(), "each section has a test");
}

/// Lists the verbs of a program that print JSON of their own, with those below them.
fn verbs(program: &str, command: &clap::Command, out: &mut BTreeSet<String>) {
    for verb in command.get_subcommands() {
        let name = format!("{program} {}", verb.get_name());
        match verb.has_subcommands() {
            true => verbs(&name, verb, out),
            false => drop(out.insert(name)),
        }
    }
}

#[test]
fn every_verb_has_a_section() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/json.md")).unwrap();
    let mut all = BTreeSet::new();
    verbs("gpusession", &gpusession::arguments(), &mut all);
    for name in all {
        assert!(page.contains(&format!("`{name}`")), "docs/json.md does not name `{name}`");
    }
}
