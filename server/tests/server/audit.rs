//! The audit trail of a real server: what is in it, in which order, and that it verifies.

use gpusession_proto::control::pool_client::PoolClient;
use gpusession_proto::control::{ReleaseRequest, RenewIdentityRequest};
use nix::sys::signal::Signal;
use rcgen::{CertificateParams, KeyPair};

use gpusession_test_server::{Server, eventually};

fn events(server: &Server, words: &[&str]) -> Vec<(String, String, String)> {
    let rows = server.json(&[&["audit"], words].concat())["audit"].as_array().unwrap().clone();
    let text = |row: &serde_json::Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    rows.iter().map(|row| (text(row, "event"), text(row, "actor"), text(row, "result"))).collect()
}

#[tokio::test]
async fn joins_and_changes_are_there_before_their_answers() {
    let mut server = Server::start().await;
    let uid = format!("uid {}", nix::unistd::getuid());
    let ok = |event: &str, actor: &str| (event.to_owned(), actor.to_owned(), "ok".to_owned());
    assert_eq!(events(&server, &["--event", "pool-init"]), [ok("pool-init", &uid)]);
    let mut vm = server.client("vm-1").await;
    assert_eq!(events(&server, &["--client", "vm-1"]), [ok("join", "client vm-1")]);
    assert_eq!(events(&server, &["--event", "token-create"]), [ok("token-create", &uid)]);
    server.enrol("gpsj-bad", "vm-9", "m").await.unwrap_err();
    let lease = vm.allocate(100.0).await.unwrap();
    vm.pool.release(ReleaseRequest { lease: lease.id.clone(), ..Default::default() }).await.unwrap();
    eventually("the lease's end", async || events(&server, &["--lease", &lease.id]).len() == 2).await;
    let granted = events(&server, &["--lease", &lease.id]);
    assert_eq!(granted, [ok("lease-granted", "client vm-1"), ok("lease-ended", "server")]);
    server.verb(&["clients", "revoke", "vm-1"]);
    assert_eq!(events(&server, &["--event", "revoke"]), [ok("revoke", &uid)]);
    server.verb(&["off", "9"]);
    assert_eq!(events(&server, &["--event", "off"])[0].2, "no-such-gpu");
    // The trail records its readers.
    assert!(events(&server, &["--event", "audit"]).len() > 3);

    // An answer is on the disk, whatever becomes of the server.
    let again = server.client("vm-2").await;
    server.signal(Signal::SIGKILL);
    let shown = server.verb(&["audit", "--client", &again.name]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("join"), "{shown:?}");
    server.verb(&["clients", "forget", "vm-2"]);
    assert_eq!(events(&server, &["--event", "forget"]), [ok("forget", &uid)]);
    let verified = server.json(&["audit", "verify"])["audit"].clone();
    assert!(verified["lines"].as_u64().unwrap() > 10, "{verified}");

    server.run().await;
    // Another machine takes the name that was forgotten.
    let joined =
        |server: &Server| server.json(&["audit", "--event", "join", "--client", "vm-2"])["audit"].clone();
    let before = joined(&server)[0]["identity"].clone();
    eventually("the name is free", async || server.enrol(&server.token(&[]), "vm-2", "m2").await.is_ok())
        .await;
    let after = joined(&server)[1]["identity"].clone();
    assert!(before != after && before.as_str().is_some_and(|text| text.len() == 64), "{before} {after}");
    let replaced = server.json(&["audit", "--event", "client-replaced"])["audit"][0].clone();
    assert_eq!((&replaced["client"], &replaced["identity"]), (&"vm-2".into(), &after));
    assert!(replaced["detail"].as_str().unwrap().contains(before.as_str().unwrap()), "{replaced}");
    server.signal(Signal::SIGTERM);
    let verified = server.json(&["audit", "verify"])["audit"].clone();
    assert!(verified["checkpoints"].as_u64().unwrap() >= 1, "{verified}");
    let file = std::fs::read_dir(server.path("state/audit")).unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        path.extension().is_some_and(|e| e == "jsonl").then_some(path)
    });
    let file = file.unwrap();
    let changed = std::fs::read_to_string(&file).unwrap().replacen("vm-1", "vm-7", 1);
    std::fs::write(&file, changed).unwrap();
    let refused = server.verb(&["audit", "verify"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("the line before was changed"), "{refused:?}");
}

#[tokio::test]
async fn a_server_that_is_killed_behind_an_answer_has_its_identity_event() {
    let mut server = Server::start().await;
    // A join, and the renewal of that client.
    let mut vm = server.client("vm-1").await;
    server.signal(Signal::SIGKILL);
    assert_eq!(events(&server, &["--event", "join"]).len(), 1);
    server.run().await;
    vm.pool = PoolClient::new(server.connect(Some(vm.identity.clone())).await.unwrap());
    let key = KeyPair::generate().unwrap();
    let csr_pem = CertificateParams::new(vec![]).unwrap().serialize_request(&key).unwrap().pem().unwrap();
    vm.pool.renew_identity(RenewIdentityRequest { csr_pem, proof: Vec::new() }).await.unwrap();
    server.signal(Signal::SIGKILL);
    assert_eq!(events(&server, &["--event", "identity-renewed"]).len(), 1);
    // Administrators' acts.
    let file = server.path("ann.pem").display().to_string();
    for (words, event) in [
        (&["token", "create", "--name", "vm-7"][..], "token-create"),
        (&["fleet", "create", "--name", "vm-*"], "fleet-create"),
        (&["admin", "create", "ann", "--out", &file], "administrator-create"),
        (&["admin", "revoke", "ann"], "administrator-revoke"),
        (&["clients", "revoke", "vm-1"], "revoke"),
        (&["clients", "forget", "vm-1"], "forget"),
        (&["pool", "rotate", "begin"], "rotate-begin"),
    ] {
        server.run().await;
        let before = events(&server, &["--event", event]).len();
        let done = server.verb(words);
        server.signal(Signal::SIGKILL);
        assert!(done.status.success(), "{words:?}: {done:?}");
        let noted = events(&server, &["--event", event]);
        assert_eq!(noted.len(), before + 1, "{words:?}: {noted:?}");
        assert_eq!(noted[before].2, "ok", "{words:?}: {noted:?}");
    }
    assert!(server.verb(&["audit", "verify"]).status.success());
}

#[tokio::test]
async fn a_changed_configuration_is_in_the_trail() {
    let server = Server::start().await;
    let running = server.json(&["status"])["server"]["pid"].as_i64().unwrap();
    let read = async |config: &str, found: &str| {
        server.configure("libcuda.so.1", config);
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(running as i32), Signal::SIGHUP).unwrap();
        let noted = || server.json(&["audit", "--event", "configuration-read"])["audit"].to_string();
        eventually("a line about it", async || noted().contains(found)).await;
    };
    read("limits.workers = 7", "limits.workers = 7").await;
    read("limits.workers = \"x\"", "configuration\"").await;
}

#[tokio::test]
async fn refusals_by_limits_and_programs_are_in_the_trail() {
    let server = Server::start_with("libcuda.so.1", "limits.gpus = 1").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(50.0).await.unwrap();
    vm.allocate(50.0).await.unwrap_err();
    let worker = vm.take(&lease.id).await.unwrap();
    let (lane, _) = server.adopt(&worker.id, 0, true);
    eventually("the start", async || !events(&server, &["--event", "program-started"]).is_empty()).await;
    drop(lane);
    vm.pool.release(ReleaseRequest { lease: lease.id.clone(), ..Default::default() }).await.unwrap();
    eventually("the end", async || !events(&server, &["--event", "program-ended"]).is_empty()).await;
    let refused = ("lease-refused".to_owned(), "client vm-1".to_owned(), "limit-gpus".to_owned());
    assert_eq!(events(&server, &["--event", "lease-refused"]), [refused]);
    let answer = server.json(&["audit", "--client", "vm-1"]);
    let started = answer["audit"].as_array().unwrap().iter().find(|row| row["event"] == "program-started");
    let started = started.unwrap();
    let id = data_encoding::HEXLOWER.encode(&worker.id);
    assert_eq!((&started["worker"], &started["claimed"]), (&id.into(), &true.into()));
    let user = started["user"].as_str().unwrap().to_owned();
    assert_eq!(events(&server, &["--user", &user]).len(), 2, "begin and end");
    gpusession_test_support::json_table::documented("gpuserver audit", &answer);

    server.verb(&["config", "set", "audit_users", "off"]);
    let lease = vm.allocate(50.0).await.unwrap();
    let _lane = server.adopt(&vm.take(&lease.id).await.unwrap().id, 0, true);
    let starts = || events(&server, &["--event", "program-started"]).len();
    eventually("the second start", async || starts() == 2).await;
    assert_eq!(events(&server, &["--user", &user]).len(), 2, "the trail names no user any more");
}

#[tokio::test]
async fn without_room_for_the_trail_nobody_joins_and_leases_continue() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let token = server.token(&[]);
    // The server can write no file below a file.
    std::fs::rename(server.path("state/audit"), server.path("state/away")).unwrap();
    std::fs::write(server.path("state/audit"), "").unwrap();
    let refused = server.enrol(&token, "vm-2", "m").await.unwrap_err();
    assert!(refused.message().contains("audit_required"), "{refused}");
    let made = server.verb(&["token", "create"]);
    assert!(String::from_utf8_lossy(&made.stderr).contains("the audit trail cannot be written"), "{made:?}");
    vm.allocate(100.0).await.unwrap();
    let status = server.json(&["status"]);
    assert!(status["server"]["warnings"][0].as_str().unwrap().contains("audit trail"), "{status}");
    assert!(server.verb(&["config", "set", "audit_required", "off"]).status.success());
    assert!(server.verb(&["token", "create"]).status.success());
    std::fs::remove_file(server.path("state/audit")).unwrap();
    std::fs::rename(server.path("state/away"), server.path("state/audit")).unwrap();
    assert!(server.verb(&["config", "set", "audit_required", "on"]).status.success());
    server.enrol(&server.token(&[]), "vm-3", "m").await.unwrap();
}

#[tokio::test]
async fn a_lease_whose_client_leaves_during_its_request_is_in_the_trail() {
    let server = Server::start_with("libcuda.so.1", "limits.gpus = 200").await;
    let vm = server.client("vm-1").await;
    for step in 0..100 {
        let (mut vm, patience) = (vm.clone(), std::time::Duration::from_micros(50 * step));
        let _ = tokio::time::timeout(patience, vm.allocate(0.5)).await;
    }
    let leases = || server.json(&["leases"])["leases"].as_array().unwrap().len();
    let granted = || events(&server, &["--event", "lease-granted"]).len();
    // The last requests were answered.
    assert!(leases() > 10, "{} leases", leases());
    eventually("all grants", async || granted() == leases()).await;
}

#[tokio::test]
async fn each_lease_has_one_line_although_its_server_was_killed() {
    let mut server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    for _ in 0..20 {
        let lease = vm.allocate(1.0).await.unwrap();
        // Some die with the server, whose last events did not reach the disk.
        if lease.id.ends_with(['0', '1', '2', '3', '4', '5', '6', '7']) {
            let _ = vm.pool.release(ReleaseRequest { lease: lease.id, ..Default::default() }).await;
        }
    }
    server.signal(Signal::SIGKILL);
    // The lines of a moment that a crash lost.
    let folder = server.path("state/audit");
    let file = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let file = file.into_iter().find(|path| path.extension().is_some_and(|e| e == "jsonl")).unwrap();
    let lines = std::fs::read_to_string(&file).unwrap();
    let kept: Vec<_> = lines.lines().take_while(|line| !line.contains("lease-granted")).collect();
    std::fs::write(&file, kept.join("\n") + "\n").unwrap();
    server.run().await;
    let of = |verb: &str, rows: &str, keep: &dyn Fn(&serde_json::Value) -> bool| {
        let rows = server.json(&[verb])[rows].as_array().unwrap().clone();
        let mut leases: Vec<_> =
            rows.iter().filter(|row| keep(row)).map(|r| r["lease"].to_string()).collect();
        leases.sort();
        leases
    };
    let mut known = of("leases", "leases", &|_| true);
    known.extend(of("accounting", "records", &|row| row["kind"] == "lease"));
    known.sort();
    known.dedup();
    assert_eq!(of("audit", "audit", &|row| row["event"] == "lease-granted"), known);
    assert_eq!(known.len(), 20);
    server.json(&["audit", "verify"]);
}
