//! A rotation of the pool's authority, with daemons that follow it.

use std::path::Path;
use std::process::Output;
use std::sync::Arc;
use std::time::Duration;

use gpuserver::certificate::{issuer, subject};
use gpusession_proto::control::pool_event::Event;
use gpusession_proto::control::{AllocateRequest, RenewIdentityRequest};
use gpusessiond::client::{self, Remote};
use gpusessiond::identity::{Home, Identity, join_pool};
use gpusessiond::pool::PoolServer as _;
use gpusessiond::renewal::{Renewer, wall};
use nix::sys::signal::Signal;
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};

use crate::administration::{administrator, from_afar};
use gpusession_test_server::{LONG, Server, eventually};

/// A machine of the pool; its folder outlives its daemon.
pub struct Machine {
    pub folder: tempfile::TempDir,
    pub home: Home,
}

impl Machine {
    pub async fn joined(server: &Server, name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = home(folder.path());
        join_pool(&home, &server.control, &server.token(&[]), Some(name), client::join).await.unwrap();
        Self { folder, home }
    }

    pub fn daemon(&self) -> Daemon {
        let identity = self.home.load().unwrap();
        let standing = tokio::sync::watch::Sender::new(None);
        let renewer = Renewer::new(self.home.clone(), identity.clone(), Arc::new(wall), standing);
        Daemon { identity, renewer }
    }

    /// Looks after the identity once, as a daemon does at its start.
    pub async fn looks(&self) {
        self.daemon().renewer.renew_if_due().await;
    }

    /// Returns the number of authorities in its file.
    fn authorities(&self) -> usize {
        let text = std::fs::read_to_string(self.folder.path().join("identity/authority.pem")).unwrap();
        text.matches("BEGIN CERTIFICATE").count()
    }

    /// Names a server that listens elsewhere after a restart.
    pub fn knows(&self, servers: &[&Server]) {
        let entry = |server: &&Server| format!("[[server]]\naddress = \"{}\"\n", server.control);
        std::fs::write(&self.home.servers[0], servers.iter().map(entry).collect::<String>()).unwrap();
    }
}

pub struct Daemon {
    pub identity: Identity,
    pub renewer: Renewer,
}

fn home(folder: &Path) -> Home {
    Home { identity: folder.join("identity"), servers: vec![folder.join("servers.toml")] }
}

fn der(pem: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

fn rotate(server: &Server, words: &[&str]) -> Value {
    server.json(&[&["pool", "rotate"], words].concat())["rotation"].clone()
}

/// Returns the code of a refused step.
fn refused(server: &Server, words: &[&str]) -> String {
    let output = server.verb(&[&["pool", "rotate"], words, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    value["error"]["code"].as_str().unwrap().to_owned()
}

fn phase(rotation: &Value) -> (&str, bool) {
    (rotation["phase"].as_str().unwrap(), rotation["changed"].as_bool().unwrap())
}

/// Names of the clients in a status.
fn clients(rotation: &Value) -> Vec<&str> {
    rotation["clients"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[tokio::test]
async fn a_rotation_touches_no_lease_and_no_connection() {
    let server = Server::start().await;
    let alice = administrator(&server, "alice");
    let (one, two) = (Machine::joined(&server, "vm-1").await, Machine::joined(&server, "vm-2").await);
    let early_token = server.token(&["--uses", "9", "--from", "127.0.0.0/8"]);
    let daemon = one.daemon();
    let first = daemon.identity.facts();
    let remote = Arc::new(Remote::new(&server.control, &daemon.identity).unwrap());
    let request =
        AllocateRequest { gpus: 1, boot_id: "b1".into(), machine_id: "m".into(), ..Default::default() };
    let lease = remote.allocate(request).await.unwrap();
    let (events, mut arriving) = tokio::sync::mpsc::channel(64);
    let watching = tokio::spawn({
        let remote = remote.clone();
        async move { remote.watch("b1".into(), events).await }
    });
    let following = tokio::spawn(daemon.renewer.follow());
    let still_held = async || {
        let reply = remote.renew(vec![lease.id.clone()], "b1".into()).await.unwrap();
        assert!(!reply.leases[0].lost, "{reply:?}");
    };

    let none = rotate(&server, &["status"]);
    assert_eq!((phase(&none), none["new_sha256"].clone()), (("none", false), Value::Null));
    for words in [&["switch"][..], &["switch", "--force"]] {
        assert_eq!(refused(&server, words), "wrong-phase");
    }
    let old = none["authority_sha256"].clone();
    let begun = rotate(&server, &["begin"]);
    assert_eq!((phase(&begun), &begun["authority_sha256"]), (("begun", true), &old));
    let new = begun["new_sha256"].clone();
    assert!(new != old && begun["old_sha256"] == old);
    assert_eq!(rotate(&server, &["begin"])["new_sha256"], new, "repeated, it changes nothing");
    // The connected client learns the new authority; the other one is off.
    eventually("the connected client trusts both", async || {
        clients(&rotate(&server, &["status"])) == ["vm-2"]
    })
    .await;
    assert_eq!((one.authorities(), two.authorities()), (2, 1));
    assert_eq!(refused(&server, &["switch"]), "clients-lack-authority");
    assert_eq!(refused(&server, &["finish"]), "wrong-phase");
    let shown = text(&server.verb(&["pool", "rotate", "status"]));
    assert!(shown.contains("do not trust") && shown.contains("vm-2") && shown.contains("alice"), "{shown}");
    still_held().await;
    two.looks().await;
    assert_eq!(two.authorities(), 2);

    let switched = rotate(&server, &["switch"]);
    assert_eq!((phase(&switched), &switched["authority_sha256"]), (("switched", true), &new));
    assert_eq!(switched["administrators"], json!(["alice"]));
    assert_eq!(refused(&server, &["abort"]), "wrong-phase");
    eventually("the connected client has a new certificate", async || {
        clients(&rotate(&server, &["status"])) == ["vm-2"]
    })
    .await;
    still_held().await;
    assert_eq!(refused(&server, &["finish"]), "clients-lack-authority");
    // Older tokens are void, new ones work; a machine that joins trusts both.
    let folder = tempfile::tempdir().unwrap();
    let joining = home(folder.path());
    let join = async |token: &str| {
        join_pool(&joining, &server.control, token, Some("vm-3"), client::join)
            .await
            .map_err(|e| e.to_string())
    };
    let void = join(&early_token).await.unwrap_err();
    assert!(void.contains("before the rotation of the pool's authority; ask for a new one"), "{void}");
    join(&server.token(&[])).await.unwrap();
    let three = Machine { folder, home: joining };
    assert_eq!(three.authorities(), 2);
    three.looks().await;
    // An administrator's certificate works until the end.
    let afar = from_afar(&server.control, &alice, &["leases"]);
    assert!(text(&afar).contains(&lease.id), "{afar:?}");
    two.looks().await;
    assert_eq!(clients(&rotate(&server, &["status"])), <[&str; 0]>::default());

    let over = rotate(&server, &["finish"]);
    assert_eq!((phase(&over), &over["authority_sha256"]), (("none", true), &new));
    assert_eq!(phase(&rotate(&server, &["finish"])), ("none", false));
    still_held().await;
    eventually("the client has dropped the old authority", async || one.authorities() == 1).await;
    two.looks().await;
    assert_eq!((two.authorities(), three.authorities()), (1, 2));
    assert!(!from_afar(&server.control, &alice, &["leases"]).status.success());
    let listed = server.json(&["admin", "list"]);
    assert_eq!(listed["administrators"][0]["state"], "revoked");
    std::fs::remove_file(&alice).unwrap();
    let alice = administrator(&server, "alice");
    assert!(from_afar(&server.control, &alice, &["leases"]).status.success());

    // The client's connection to the server, its watch and its lease are those of the first day.
    still_held().await;
    assert_ne!(remote.authorities().await.unwrap().authorities_pem, "");
    assert!(server.verb(&["kill", &lease.id]).status.success());
    let lost = async { while !matches!(arriving.recv().await.unwrap().event, Some(Event::Lost(_))) {} };
    tokio::time::timeout(LONG, lost).await.unwrap();
    assert_ne!(one.home.load().unwrap().facts().issuer, first.issuer);
    let trail = text(&server.verb(&["audit"]));
    for step in ["rotate-begin", "rotate-switch", "rotate-finish"] {
        assert!(trail.contains(step), "{step}: {trail}");
    }
    watching.abort();
    following.abort();
}

#[tokio::test]
async fn a_client_that_was_off_until_after_the_switch_comes_back() {
    let server = Server::start().await;
    let vm = Machine::joined(&server, "vm-1").await;
    vm.looks().await;
    let mut earlier = server.client("vm-9").await;
    rotate(&server, &["begin"]);
    assert_eq!(refused(&server, &["switch"]), "clients-lack-authority");
    rotate(&server, &["switch", "--force"]);
    // A client of an earlier version, which reports nothing, renews with the old authority.
    let csr = CertificateParams::new(vec![]).unwrap().serialize_request(&KeyPair::generate().unwrap());
    let request = RenewIdentityRequest { csr_pem: csr.unwrap().pem().unwrap(), proof: Vec::new() };
    let renewed = earlier.pool.renew_identity(request).await.unwrap().into_inner().certificate_pem;
    let [renewed, old] = [renewed, server.authority()].map(|pem| der(&pem));
    assert_eq!(issuer(&renewed), subject(&old));
    assert!(server.verb(&["clients", "forget", "vm-9"]).status.success());
    let before = vm.home.load().unwrap().facts();
    vm.looks().await;
    let after = vm.home.load().unwrap().facts();
    assert!(vm.authorities() == 2 && after.issuer != before.issuer);
    assert_eq!(phase(&rotate(&server, &["finish"])), ("none", true));

    // Off until the end: only another join helps, and the refusal says so.
    let late = Machine::joined(&server, "vm-2").await;
    for words in [&["begin"][..], &["switch", "--force"], &["finish", "--force"]] {
        rotate(&server, words);
    }
    late.looks().await;
    let remote = Remote::new(&server.control, &late.home.load().unwrap()).unwrap();
    assert!(remote.describe(None).await.is_err());
    assert!(server.verb(&["clients", "forget", "vm-2"]).status.success());
    join_pool(&late.home, &server.control, &server.token(&[]), Some("vm-2"), client::join).await.unwrap();
    let remote = Remote::new(&server.control, &late.home.load().unwrap()).unwrap();
    remote.describe(None).await.unwrap();
}

#[tokio::test]
async fn a_server_killed_between_steps_continues_the_rotation() {
    let mut server = Server::start().await;
    let vm = Machine::joined(&server, "vm-1").await;
    for (step, phase_after) in [("begin", "begun"), ("switch", "switched"), ("finish", "none")] {
        assert_eq!(phase(&rotate(&server, &[step])), (phase_after, true));
        server.signal(Signal::SIGKILL);
        server.run().await;
        vm.knows(&[&server]);
        assert_eq!(phase(&rotate(&server, &[step])), (phase_after, false), "repeated");
        vm.looks().await;
        assert_eq!(clients(&rotate(&server, &["status"])), <[&str; 0]>::default(), "{step}");
    }
    assert_eq!(vm.authorities(), 1);

    // An aborted rotation leaves nothing, on the server and on the client.
    rotate(&server, &["begin"]);
    vm.looks().await;
    assert_eq!(vm.authorities(), 2);
    assert_eq!(phase(&rotate(&server, &["abort"])), ("none", true));
    server.signal(Signal::SIGKILL);
    server.run().await;
    vm.knows(&[&server]);
    vm.looks().await;
    assert_eq!(vm.authorities(), 1);
    assert!(!server.path("state/ca/next.key").exists());
}

#[tokio::test]
async fn a_client_of_two_servers_waits_for_both() {
    let first = Server::start().await;
    let vm = Machine::joined(&first, "vm-1").await;
    let mut second = Server::prepare("libcuda.so.1", "").await;
    std::fs::remove_dir_all(second.path("state/ca")).unwrap();
    let export = first.path("pool.pem");
    let exported = || {
        std::fs::write(&export, first.verb(&["pool", "export"]).stdout).unwrap();
        export.to_str().unwrap()
    };
    assert!(second.verb(&["pool", "import", exported()]).status.success());
    second.run().await;
    vm.knows(&[&first, &second]);
    // The second server tells certificates of one second not apart.
    tokio::time::sleep(Duration::from_millis(1100)).await;

    rotate(&first, &["begin"]);
    vm.looks().await;
    assert_eq!(vm.authorities(), 2, "one server names both");
    rotate(&first, &["switch"]);
    let before = vm.home.load().unwrap().facts();
    vm.looks().await;
    assert_eq!(vm.home.load().unwrap().facts(), before, "the second server would not accept it");
    assert_eq!(phase(&rotate(&second, &["begin", "--from", exported()])), ("begun", true));
    vm.looks().await;
    let after = vm.home.load().unwrap().facts();
    assert_ne!(after.issuer, before.issuer);
    for server in [&first, &second] {
        Remote::new(&server.control, &vm.home.load().unwrap()).unwrap().describe(None).await.unwrap();
    }
    rotate(&first, &["finish"]);
    vm.looks().await;
    assert_eq!(vm.authorities(), 2, "the second server still names the old one");
    rotate(&second, &["switch"]);
    rotate(&second, &["finish"]);
    vm.looks().await;
    assert_eq!(vm.authorities(), 1);
}
