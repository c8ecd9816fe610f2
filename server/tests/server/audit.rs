//! The audit trail of a real server: what is in it, in which order, and that it verifies.

use gpusession_proto::control::ReleaseRequest;
use nix::sys::signal::Signal;

use crate::common::{Server, eventually};

fn events(server: &Server, words: &[&str]) -> Vec<(String, String, String)> {
    let rows = server.json(&[&["audit"], words].concat())["audit"].as_array().unwrap().clone();
    let text = |row: &serde_json::Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
    rows.iter().map(|row| (text(row, "event"), text(row, "actor"), text(row, "result"))).collect()
}

#[tokio::test]
async fn joins_changes_and_leases_are_there_before_their_answers() {
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
    // The trail tells who has read it.
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
