//! A real server process, real clients over mutual TLS, and workers without a driver.
#![expect(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod administration;
mod audit;
mod compiled;
mod fences;
mod fleet;
mod garbage;
mod health;
mod identities;
mod issuers;
mod limits;
mod mps;
mod netperf;
mod parking;
mod path;
mod restart;
mod rotation;
mod sharing;
mod signer;
mod start;
mod starter;
mod statements;
mod supervision;
mod workers;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpusession_proto::control::pool_client::PoolClient;
use gpusession_proto::control::pool_event::Event;
use gpusession_proto::control::{
    AllocateRequest, DescribeRequest, ProcessEndedRequest, ReleaseRequest, RenewRequest, WatchRequest,
};
use gpusession_proto::join;
use gpusession_proto::preface;
use gpusession_test_server::{LONG, Server, alive, eventually, exists, rest};
use nix::sys::signal::Signal;
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::client::ResolvesClientCert;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use rustls::sign::CertifiedKey;
use tonic::Code;
use tonic::transport::Identity;
use zerocopy::IntoBytes;

const GIB: u64 = 1 << 30;

fn pid(value: &serde_json::Value) -> u32 {
    value.as_u64().expect("a number") as u32
}

fn renew(leases: &[&str]) -> RenewRequest {
    RenewRequest { leases: leases.iter().map(ToString::to_string).collect(), boot_id: "b1".into() }
}

#[tokio::test]
async fn join_allocate_use_release() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let about = vm.pool.describe(DescribeRequest::default()).await.unwrap().into_inner();
    assert_eq!((about.name.as_str(), about.devices.len(), about.cuda_version), ("s1", 2, 13000));
    assert_eq!(about.data_addresses, std::slice::from_ref(&server.data));

    let lease = vm.allocate(50.0).await.unwrap();
    assert_eq!((lease.id.len(), lease.ticket_key.len(), lease.encrypted), (12, 32, true));
    assert_eq!(lease.devices[0].limit_bytes, 8 * GIB);
    assert_eq!(lease.ttl_usec, 60_000_000);

    let worker = vm.take(&lease.id).await.unwrap();
    assert_eq!((worker.id.len(), worker.fingerprint.len()), (16, 32));
    let (mut lane, said) = server.adopt(&worker.id, 0, true);
    assert_eq!(said["worker"], data_encoding::HEXLOWER.encode(&worker.id));
    assert_eq!(said["lease"], lease.id);
    assert_eq!(said["limits"], serde_json::json!([8 * GIB]));
    assert_eq!(
        (&said["blocking"], &said["require_tls"], &said["attempt"]),
        (&true.into(), &true.into(), &1.into())
    );
    assert_eq!(said["admin"], 0, "a worker is no administrator");
    assert_eq!(said["key"], false, "a worker makes no tickets and no prefaces");
    if nix::unistd::geteuid().is_root() {
        assert_eq!(said["stack_unlimited"], true);
    }
    let names: Vec<_> = said["environment"].as_object().unwrap().keys().cloned().collect();
    assert!(
        names.iter().all(|n| [
            "CUDA_CACHE_MAXSIZE",
            "CUDA_CACHE_PATH",
            "CUDA_VISIBLE_DEVICES",
            "LANG",
            "LD_LIBRARY_PATH",
            "PATH",
            "RUST_BACKTRACE"
        ]
        .contains(&n.as_str())),
        "{names:?}"
    );
    let compiled = std::path::Path::new(said["environment"]["CUDA_CACHE_PATH"].as_str().unwrap());
    assert!(compiled.is_dir() && compiled.starts_with(server.path("state")), "{said}");
    assert_eq!(said["environment"]["CUDA_VISIBLE_DEVICES"], lease.devices[0].uuid);
    let (_second_lane, said_again) = server.adopt(&worker.id, 3, true);
    assert_eq!((&said_again["pid"], &said_again["lane"]), (&said["pid"], &3.into()));

    eventually("the stock is full beside the worker in use", async || {
        let states: Vec<_> =
            server.workers().iter().map(|w| w["state"].as_str().unwrap().to_string()).collect();
        states.iter().filter(|s| *s == "warm").count() == 2 && states.contains(&"active".into())
    })
    .await;
    let rows = server.workers();
    let row = rows.iter().find(|r| r["state"] == "active").unwrap();
    assert_eq!(
        (&row["program"], &row["client"], &row["uid"]),
        (&"vectorAdd".into(), &"vm-1".into(), &1000.into())
    );

    let ended = ProcessEndedRequest { lease: lease.id.clone(), worker: worker.id.clone() };
    vm.pool.process_ended(ended.clone()).await.unwrap();
    assert!(rest(&mut lane).is_empty());
    eventually("the worker is gone", async || !alive(pid(&said["pid"]))).await;
    vm.pool.process_ended(ended).await.unwrap();

    let pids: Vec<u32> =
        server.workers().iter().filter_map(|w| w["pid"].as_u64()).map(|p| p as u32).collect();
    for _ in 0..2 {
        vm.pool.release(ReleaseRequest { lease: lease.id.clone(), ..Default::default() }).await.unwrap();
    }
    eventually("no worker is left", async || server.workers().is_empty() && !pids.iter().any(|p| alive(*p)))
        .await;
    assert_eq!(vm.take(&lease.id).await.unwrap_err().code(), Code::NotFound);
    assert!(vm.pool.renew(renew(&[&lease.id])).await.unwrap().into_inner().leases[0].lost);
}

#[tokio::test]
async fn ps_shows_whose_program_uses_which_gpu_and_how() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let second = server.json(&["gpus"])["gpus"][1]["uuid"].as_str().unwrap().to_string();
    let wish = AllocateRequest { devices: vec![second.clone()], user: "alice".into(), ..vm.request() };
    let lease = vm.pool.allocate(wish).await.unwrap().into_inner();
    let worker = vm.take(&lease.id).await.unwrap();
    let (_lane, _) = server.adopt(&worker.id, 0, true);
    eventually("a program, and a worker without one", async || {
        let states: Vec<_> = server.workers().iter().map(|w| w["state"].clone()).collect();
        ["active", "warm"].iter().all(|state| states.iter().any(|s| s == state))
    })
    .await;
    let rows = server.workers();
    let row = |state: &str| rows.iter().find(|w| w["state"] == state).unwrap();
    for row in [row("active"), row("warm")] {
        assert_eq!((&row["server"], &row["user"]), (&"s1".into(), &"alice".into()));
        assert_eq!(row["gpus"], serde_json::json!([second]));
        assert_eq!(row["gpu_indices"], serde_json::json!([1]));
    }
    assert_eq!((&row("active")["transport"], &row("active")["encrypted"]), (&"tcp".into(), &true.into()));
    assert!(row("warm")["transport"].is_null(), "no program is connected");
    let table = String::from_utf8(server.verb(&["ps"]).stdout).unwrap();
    let shown = table.lines().find(|line| line.contains("vectorAdd")).unwrap();
    let cell = |name: &str| shown[table.find(name).unwrap()..].split_whitespace().next().unwrap();
    assert_eq!((cell("TRANSPORT"), cell("TLS"), cell("GPU")), ("tcp", "yes", "1"));

    // The threads of its worker's process are those that the kernel lists.
    let rows = server.json(&["ps", "--threads"])["workers"].as_array().unwrap().clone();
    let pid = row("active")["pid"].as_u64().unwrap();
    let threads = rows.iter().find(|w| w["pid"] == pid).unwrap()["threads"].as_array().unwrap().clone();
    assert_eq!(threads[0]["tid"], pid);
    assert!(threads.iter().all(|t| t["name"].is_string() && t["cpu_usec"].is_u64()), "{threads:?}");
    let table = String::from_utf8(server.verb(&["ps", "--threads"]).stdout).unwrap();
    assert!(
        table.contains("TID") && table.contains("vectorAdd (pid") && !table.contains("SERVER"),
        "{table}"
    );
}

#[tokio::test]
async fn ps_shows_all_servers_of_a_host() {
    let (server, other) = (Server::start().await, Server::start().await);
    for (server, client) in [(&server, "vm-1"), (&other, "vm-2")] {
        let mut vm = server.client(client).await;
        vm.pool.allocate(vm.request()).await.unwrap();
    }
    std::fs::copy(other.path("gpuserver.toml"), server.path("gpuserver-other.toml")).unwrap();
    // The configuration of a server that does not run.
    std::fs::write(server.path("gpuserver-off.toml"), "runtime_dir = \"/nonexistent\"\n").unwrap();
    let clients = |words: &[&str]| {
        let rows = server.json(words)["workers"].as_array().unwrap().clone();
        rows.iter()
            .map(|w| w["client"].as_str().unwrap().to_owned())
            .collect::<std::collections::BTreeSet<_>>()
    };
    eventually("workers of both", async || {
        clients(&["ps", "--all"]) == ["vm-1", "vm-2"].map(String::from).into()
    })
    .await;
    assert_eq!(clients(&["ps"]), ["vm-1".to_owned()].into());
    let table = String::from_utf8(server.verb(&["ps", "--all"]).stdout).unwrap();
    assert!(table.starts_with("SERVER") && table.contains("vm-2"), "{table}");
    let remote = server.verb(&["ps", "--all", "--server", "127.0.0.1:1", "--json"]);
    assert!(
        !remote.status.success() && String::from_utf8_lossy(&remote.stdout).contains("\"local\""),
        "{remote:?}"
    );
}

#[tokio::test]
async fn the_stock_of_a_restarted_daemon_is_ended() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let wish = AllocateRequest { request_id: "boot/a".into(), memory_percent: 50.0, ..vm.request() };
    let lease = vm.pool.allocate(wish.clone()).await.unwrap().into_inner();
    let (used, granted, spare) = (
        vm.take(&lease.id).await.unwrap().id,
        vm.take(&lease.id).await.unwrap().id,
        vm.take(&lease.id).await.unwrap().id,
    );
    let _lane = server.adopt(&used, 0, true);
    let states = |server: &Server| -> Vec<String> {
        let hex = |id: &Vec<u8>| data_encoding::HEXLOWER.encode(id);
        let rows = server.workers();
        let state = |id| rows.iter().find(|r| r["worker"] == hex(id)).map(|r| r["state"].clone());
        let word = |id| state(id).map_or("gone".into(), |s| s.as_str().unwrap().to_owned());
        [&used, &granted, &spare].map(word).to_vec()
    };
    eventually("a program", async || states(&server) == ["active", "taken", "taken"]).await;
    // Only a restarted daemon has forgotten the workers that it took.
    assert_eq!(vm.pool.allocate(wish.clone()).await.unwrap().into_inner().id, lease.id);
    assert_eq!(states(&server), ["active", "taken", "taken"]);
    let again = AllocateRequest { again: true, workers: vec![granted.clone()], ..wish };
    assert_eq!(vm.pool.allocate(again).await.unwrap().into_inner().id, lease.id);
    eventually("the spare one ends", async || states(&server) == ["active", "taken", "gone"]).await;
}

#[tokio::test]
async fn clients_see_only_their_own() {
    let server = Server::start().await;
    let (mut a, mut b) = (server.client("vm-a").await, server.client("vm-b").await);
    let mine = a.allocate(100.0).await.unwrap();
    let worker = a.take(&mine.id).await.unwrap();
    let (_lane, said) = server.adopt(&worker.id, 0, true);

    assert!(b.pool.renew(renew(&[&mine.id])).await.unwrap().into_inner().leases[0].lost);
    assert_eq!(b.take(&mine.id).await.unwrap_err().code(), Code::NotFound);
    b.pool.release(ReleaseRequest { lease: mine.id.clone(), ..Default::default() }).await.unwrap();
    let yours = b.allocate(100.0).await.unwrap();
    assert_ne!(yours.devices[0].uuid, mine.devices[0].uuid);
    for lease in [&mine.id, &yours.id] {
        let ended = ProcessEndedRequest { lease: lease.clone(), worker: worker.id.clone() };
        b.pool.process_ended(ended).await.unwrap();
    }
    assert!(!a.pool.renew(renew(&[&mine.id])).await.unwrap().into_inner().leases[0].lost);
    assert!(alive(pid(&said["pid"])));

    let full = b.allocate(10.0).await.unwrap_err();
    assert_eq!(full.code(), Code::ResourceExhausted);
    assert!(full.message().contains("retry when a lease ends"), "{}", full.message());
    let never = b.pool.allocate(AllocateRequest { gpus: 3, ..b.request() }).await.unwrap_err();
    assert_eq!(never.code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn requests_that_cannot_be_served_say_why() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let base = vm.request();
    let cases = [
        (
            AllocateRequest { sharing: "mps".into(), ..base.clone() },
            Code::FailedPrecondition,
            "shared by MPS",
        ),
        (AllocateRequest { sharing: "often".into(), ..base.clone() }, Code::InvalidArgument, "exclusive"),
        (AllocateRequest { sm_count: 10, ..base.clone() }, Code::FailedPrecondition, "sm_count"),
        (
            AllocateRequest { sm_count: 10, sharing: "time-slice".into(), ..base.clone() },
            Code::InvalidArgument,
            "sharing = \"mps\"",
        ),
        (AllocateRequest { sm_percent: 50, ..base.clone() }, Code::FailedPrecondition, "sm_percent"),
        (AllocateRequest { priority: "urgent".into(), ..base.clone() }, Code::InvalidArgument, "urgent"),
        (
            AllocateRequest { memory_percent: -3.0, ..base.clone() },
            Code::InvalidArgument,
            "between 0 and 100",
        ),
        (AllocateRequest { model: "B200".into(), ..base.clone() }, Code::FailedPrecondition, "B200"),
        (
            AllocateRequest { devices: vec!["GPU-x".into()], ..base.clone() },
            Code::FailedPrecondition,
            "GPU-x",
        ),
        (
            AllocateRequest { memory_bytes: 17 * GIB, ..base.clone() },
            Code::FailedPrecondition,
            "ask for less",
        ),
        (AllocateRequest { who: "x".repeat(300), ..base.clone() }, Code::InvalidArgument, "longer"),
        (AllocateRequest { boot_id: String::new(), ..base.clone() }, Code::InvalidArgument, "boot"),
    ];
    for (request, code, text) in cases {
        let status = vm.pool.allocate(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().contains(text), "{status}");
    }
    let again = AllocateRequest { request_id: "boot-lease".into(), ..base };
    let first = vm.pool.allocate(again.clone()).await.unwrap().into_inner();
    let second = vm.pool.allocate(again).await.unwrap().into_inner();
    assert_eq!((first.id, first.ticket_key), (second.id, second.ticket_key));
    assert_eq!(server.json(&["leases"])["leases"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn only_certificates_of_the_pool_that_are_not_revoked() {
    let server = Server::start().await;
    // A peer without a certificate may only join.
    let mut nobody = PoolClient::new(server.connect(None).await.unwrap());
    let status = nobody.describe(DescribeRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    assert!(status.message().contains("gpusession join"));

    // A certificate in the pool's name, signed by another authority.
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = Issuer::new(params, KeyPair::generate().unwrap());
    let mut params = CertificateParams::new(vec![gpusession_proto::join::client("vm-1")]).unwrap();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let foreign = params.signed_by(&key, &issuer).unwrap();
    let foreign = Identity::from_pem(foreign.pem(), key.serialize_pem());
    assert!(refused(&server, foreign).await, "a foreign certificate was accepted");

    // The certificate of a client with another key.
    let (certificate, _) = server.enrol(&server.token(&[]), "vm-1", "m1").await.unwrap();
    assert_eq!(answer_to_a_thief(&server, &certificate), rustls::AlertDescription::DecryptError);

    let mut good = server.client("vm-2").await;
    let lease = good.allocate(100.0).await.unwrap();
    let worker = good.take(&lease.id).await.unwrap();
    let (mut lane, _) = server.adopt(&worker.id, 0, true);
    let mut watch = good.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap().into_inner();
    let revoked = server.verb(&["clients", "revoke", "vm-2"]);
    assert!(String::from_utf8_lossy(&revoked.stdout).contains("1 leases ended"), "{revoked:?}");
    assert!(rest(&mut lane).is_empty());
    let last = loop {
        match watch.message().await {
            Ok(Some(_)) => {}
            other => break other,
        }
    };
    assert_eq!(last.unwrap_err().code(), Code::PermissionDenied);
    let status = good.allocate(100.0).await.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied);
    assert!(status.message().contains("clients forget vm-2"), "{status}");
    let rejoin = server.enrol(&server.token(&[]), "vm-2", "machine of vm-2").await.unwrap_err();
    assert_eq!(rejoin.code(), Code::PermissionDenied);
    assert!(server.verb(&["clients", "forget", "vm-2"]).status.success());
    assert_eq!(good.allocate(100.0).await.unwrap_err().code(), Code::Unauthenticated);
    let mut anew = server.client("vm-2").await;
    anew.allocate(100.0).await.unwrap();
    // A client that this server has not seen, but perhaps other servers of the pool.
    let unseen = server.verb(&["clients", "revoke", "elsewhere"]);
    assert!(unseen.status.success() && String::from_utf8_lossy(&unseen.stdout).contains("has not seen"));
    assert_eq!(server.verb(&["clients", "revoke", "No Name"]).status.code(), Some(1));
}

/// Presents a certificate without having its key.
#[derive(Debug)]
struct Thief(Arc<CertifiedKey>);

impl ResolvesClientCert for Thief {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Returns the server's TLS alert for a certificate with a wrong key.
///
/// A usual TLS client checks itself that both belong together, so this one has its own resolver.
fn answer_to_a_thief(server: &Server, certificate: &str) -> rustls::AlertDescription {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let key = PrivatePkcs8KeyDer::from(KeyPair::generate().unwrap().serialize_der()).into();
    let key = provider.key_provider.load_private_key(key).unwrap();
    let mut authorities = rustls::RootCertStore::empty();
    authorities.add(CertificateDer::from_pem_slice(server.authority().as_bytes()).unwrap()).unwrap();
    let shown = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(authorities)
        .with_client_cert_resolver(Arc::new(Thief(Arc::new(CertifiedKey::new(shown, key)))));
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from(join::any_server()).unwrap();
    let mut connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut socket = std::net::TcpStream::connect(&server.control).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    let error = loop {
        if let Err(error) = connection.complete_io(&mut socket) {
            break error;
        }
    };
    match error.downcast::<rustls::Error>() {
        Ok(rustls::Error::AlertReceived(alert)) => alert,
        other => panic!("{other:?}"),
    }
}

/// Returns `true` if the server refuses the identity; with TLS 1.3, perhaps only the first call.
async fn refused(server: &Server, identity: Identity) -> bool {
    match server.connect(Some(identity)).await {
        Err(_) => true,
        Ok(channel) => PoolClient::new(channel).describe(DescribeRequest::default()).await.is_err(),
    }
}

#[tokio::test]
async fn join_tokens() {
    let server = Server::start().await;
    let token = server.token(&["--name", "vm-*", "--uses", "2", "--from", "127.0.0.1"]);
    let wrong_name = server.enrol(&token, "db-1", "m1").await.unwrap_err();
    assert_eq!(wrong_name.code(), Code::PermissionDenied);
    assert!(wrong_name.message().contains("vm-*"), "{wrong_name}");
    assert_eq!(server.enrol(&token, "VM 1", "m1").await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(server.enrol("gpsj-nonsense", "vm-1", "m1").await.unwrap_err().code(), Code::InvalidArgument);
    server.enrol(&token, "vm-1", "m1").await.unwrap();
    server.enrol(&token, "vm-2", "m2").await.unwrap();
    let used_up = server.enrol(&token, "vm-3", "m3").await.unwrap_err();
    assert_eq!(used_up.code(), Code::PermissionDenied);
    assert!(used_up.message().contains("used up"), "{used_up}");
    let listed = server.json(&["token", "list"])["tokens"].clone();
    let row =
        |name: &str| listed.as_array().unwrap().iter().find(|t| t["name_pattern"] == name).unwrap().clone();
    assert_eq!(row("vm-*")["uses_left"], 0);
    assert!(!listed.to_string().contains(&token) && row("vm-*").get("hash").is_none(), "{listed}");
    let elsewhere = server.token(&["--name", "lab-*", "--from", "192.0.2.0/24,2001:db8::1"]);
    let refused = server.enrol(&elsewhere, "lab-1", "m1").await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("not for clients at 127.0.0.1"), "{refused}");
    let here = server.token(&["--name", "lab-*", "--from", "192.0.2.0/24", "--from", "127.0.0.1"]);
    server.enrol(&here, "lab-1", "m1").await.unwrap();
    let each = server.token(&["--name", "one-*", "--uses", "9", "--per-address", "1"]);
    server.enrol(&each, "one-1", "m1").await.unwrap();
    let refused = server.enrol(&each, "one-2", "m2").await.unwrap_err();
    assert!(refused.message().contains("as many clients at 127.0.0.1 as it may"), "{refused}");
    let said = server.verb(&["token", "create", "--from", "10.0.0.0/33"]);
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("--from 10.0.0.0/33"), "{said}");
    let other = server.token(&["--name", "db-*"]);
    let listed = server.json(&["token", "list"])["tokens"].clone();
    let id = listed.as_array().unwrap().iter().find(|t| t["name_pattern"] == "db-*").unwrap()["id"].clone();
    assert_eq!(server.verb(&["token", "revoke", ""]).status.code(), Some(1), "it would be all of them");
    assert_eq!(server.json(&["token", "revoke", &id.as_str().unwrap()[..8]])["token"]["id"], id);
    assert_eq!(server.enrol(&other, "db-1", "m5").await.unwrap_err().code(), Code::PermissionDenied);
    let forged: String = token[..token.len() - 4].chars().chain("AAAA".chars()).collect();
    let unknown = server.enrol(&forged, "vm-3", "m3").await.unwrap_err();
    assert!(unknown.message().contains("not one of this pool"), "{unknown}");
    assert_eq!(server.json(&["clients"])["clients"].as_array().unwrap().len(), 4);
    assert_eq!(server.verb(&["token", "create", "--ttl", "soon"]).status.code(), Some(1));
    for (options, why) in [
        (&["--ttl", "31d"][..], "30 days at most"),
        (&["--name", "vm-*", "--uses", "2"], "--from NETWORK"),
        (&["--name", "vm-?", "--uses", "2"], "--from NETWORK"),
    ] {
        let said = server.verb(&[&["token", "create"], options].concat());
        assert_eq!(said.status.code(), Some(1), "{options:?}");
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(said.contains(why), "{said}");
    }
    server.token(&["--ttl", "30d", "--name", "vm-9", "--uses", "2"]);
    assert_eq!(server.verb(&["token", "create", "--uses", "0"]).status.code(), Some(1));
}

#[tokio::test]
async fn bad_data_connections_disturb_no_worker() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (mut lane, said) = server.adopt(&worker.id, 0, true);

    // Connections with another protocol are closed without an answer.
    for garbage in [
        &b"GET / HTTP/1.1\r\nHost: gpu-server.example.org\r\nAccept: */*\r\nDNT: 1\r\n\r\n"[..],
        &[0; 64],
        &[0xff; 4096],
    ] {
        assert!(rest(&mut server.data_connection(garbage)).is_empty());
    }
    // A connection that ends inside the preface.
    let mut cut = server.data_connection(&preface::MAGIC);
    cut.shutdown(Shutdown::Write).unwrap();
    assert!(rest(&mut cut).is_empty());
    // A silent connection is closed in time, while others are served.
    let mut silent = server.data_connection(&[]);

    let told = |bytes: &[u8]| {
        let mut socket: TcpStream = server.data_connection(bytes);
        // The client's next bytes must not turn the refusal into a reset.
        let _ = socket.write_all(&[0x16; 300]);
        let _ = socket.shutdown(Shutdown::Write);
        let answer = rest(&mut socket);
        let len = preface::refusal_len(answer[..4].try_into().unwrap()).expect("a refusal");
        String::from_utf8(answer[4..4 + len].to_vec()).unwrap()
    };
    let mut unknown = server.preface(&worker.id, 0, true);
    unknown.worker = [9; 16];
    assert!(told(unknown.as_bytes()).contains("no such worker"));
    let mut old = unknown;
    old.version = 3.into();
    assert!(told(old.as_bytes()).contains("version 3"));
    assert!(told(server.preface(&worker.id, 1, false).as_bytes()).contains("encrypted"));
    // Other users, lanes and flags than the grant's, and a preface that was used.
    let good = server.preface(&worker.id, 1, true);
    let mut forged = [good; 3];
    forged[0].uid = 0.into();
    forged[1].lane = 2.into();
    forged[2].attempt = 999.into();
    for forged in forged {
        assert!(told(forged.as_bytes()).contains("was not made for this worker"));
    }
    assert!(told(server.preface(&worker.id, preface::LANES, true).as_bytes()).contains("not made for"));
    let mut used = server.data_connection(good.as_bytes());
    used.read_exact(&mut [0]).expect("it is handed over");
    assert!(told(good.as_bytes()).contains("was used before"));
    // The server leaves other versions with the same layout to the worker.
    let mut next = server.preface(&worker.id, 0, true);
    next.version = 77.into();
    assert!(told(next.as_bytes()).contains("was not made for this worker"));

    let start = Instant::now();
    assert!(rest(&mut silent).is_empty());
    assert!(start.elapsed() < Duration::from_secs(10));
    // The first client did not notice.
    assert!(alive(pid(&said["pid"])));
    lane.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(std::io::Read::read(&mut lane, &mut [0]).is_err(), "still open, nothing to read");
    let noted = || server.json(&["audit", "--event", "connection-refused"])["audit"][0].clone();
    eventually("a line in the audit trail", async || noted()["from"] == "127.0.0.1").await;
    assert_eq!((&noted()["actor"], &noted()["result"]), (&"unknown".into(), &"refused".into()));
}

// The flood holds one thread; the client's connection for calls has another.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_forged_prefaces_takes_no_place_of_a_program() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (_lane, said) = server.adopt(&worker.id, 0, true);
    let running = server.json(&["status"])["server"]["pid"].as_i64().unwrap();
    let held = || {
        let entries = |name| std::fs::read_dir(format!("/proc/{running}/{name}")).unwrap().count();
        (entries("fd"), entries("task"))
    };
    let before = held();
    // Its sender has seen the worker's id on the network, and not the key.
    let mut forged = server.preface(&worker.id, 1, true);
    forged.attempt = 999.into();
    for _ in 0..1500 {
        drop(server.data_connection(forged.as_bytes()));
    }
    // From the address of the flood it may have to try again.
    eventually("the reason of the refusal", async || {
        let mut last = server.data_connection(forged.as_bytes());
        last.shutdown(Shutdown::Write).is_ok()
            && String::from_utf8_lossy(&rest(&mut last)).contains("was not made for this worker")
    })
    .await;
    // The program opens its lanes, and another one starts.
    let mut own = None;
    eventually("its connection is handed over", async || {
        let mut next = server.data_connection(server.preface(&worker.id, 1, true).as_bytes());
        next.read_exact(&mut [0]).is_ok() && own.insert(next).peer_addr().is_ok()
    })
    .await;
    let second = vm.take(&lease.id).await.unwrap();
    let (_other, other) = server.adopt(&second.id, 0, true);
    assert!(alive(pid(&said["pid"])) && alive(pid(&other["pid"])));
    // The second program has the rest.
    eventually("connections are closed", async || held().0 <= before.0 + 16 && held().1 <= before.1 + 8)
        .await;
}

#[tokio::test]
async fn a_silent_client_loses_its_lease() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let mut watch = vm.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap().into_inner();
    let request = AllocateRequest { ttl_usec: 5_000_000, ..vm.request() };
    let lease = vm.pool.allocate(request).await.unwrap().into_inner();
    assert_eq!(lease.ttl_usec, 5_000_000);
    let mut stock = 0;
    let reason = loop {
        let event = watch.message().await.unwrap().expect("the stream continues");
        assert_eq!(event.lease, lease.id);
        match event.event.unwrap() {
            Event::WorkersReady(ready) => stock = stock.max(ready.stock),
            Event::Lost(loss) => break loss.reason,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(stock, 2);
    assert!(reason.contains("silent"), "{reason}");
    eventually("its workers are gone", async || server.workers().is_empty()).await;
    let gpus = server.json(&["gpus"]);
    assert!(gpus["gpus"].as_array().unwrap().iter().all(|g| g["state"] == "free"), "{gpus}");
}

#[tokio::test]
async fn a_silent_clients_program_ends_two_seconds_after_its_lease() {
    const TTL: Duration = Duration::from_secs(5);
    // A worker that ignores `Stop` and has to be killed.
    let server = Server::start_with("deaf-libcuda.so.1", "").await;
    let mut vm = server.client("vm-1").await;
    let request = AllocateRequest { ttl_usec: TTL.as_micros() as u64, ..vm.request() };
    let lease = vm.pool.allocate(request).await.unwrap().into_inner();
    let worker = vm.take(&lease.id).await.unwrap();
    let (mut lane, _) = server.adopt(&worker.id, 0, true);
    let begun = Instant::now();
    vm.pool.renew(renew(&[&lease.id])).await.unwrap();
    let renewed = Instant::now();
    assert!(rest(&mut lane).is_empty());
    let (from, to) = (begun.elapsed(), renewed.elapsed());
    assert!(from >= TTL && to <= TTL + Duration::from_secs(5), "{from:?} {to:?}");
}

#[tokio::test]
async fn leases_survive_the_server_and_workers_do_not() {
    let mut server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (mut lane, said) = server.adopt(&worker.id, 0, true);
    server.signal(Signal::SIGKILL);
    assert!(rest(&mut lane).is_empty());
    eventually("no worker outlives a killed server", async || !alive(pid(&said["pid"]))).await;
    // Without a server these verbs read the files.
    assert_eq!(server.json(&["clients"])["clients"][0]["name"], "vm-1");
    let not_running = server.verb(&["ps", "--json"]);
    let error: serde_json::Value = serde_json::from_slice(&not_running.stdout).unwrap();
    assert_eq!((not_running.status.code(), &error["error"]["code"]), (Some(1), &"not-running".into()));
    let token = server.token(&["--name", "vm-2"]);

    server.run().await;
    let mut vm = server.again(&vm).await;
    let renewed = vm.pool.renew(renew(&[&lease.id, "nonsense"])).await.unwrap().into_inner().leases;
    assert_eq!(renewed.iter().map(|l| l.lost).collect::<Vec<_>>(), [false, true]);
    let other = vm.take(&lease.id).await.unwrap();
    assert_ne!(other.id, worker.id);
    server.adopt(&other.id, 0, true);
    let second = vm.allocate(100.0).await.unwrap();
    assert!(second.fencing_token > lease.fencing_token);
    server.enrol(&token, "vm-2", "m2").await.unwrap();

    // An orderly stop ends everything and leaves no socket.
    let pids: Vec<u32> =
        server.workers().iter().filter_map(|w| w["pid"].as_u64()).map(|p| p as u32).collect();
    assert!(!pids.is_empty());
    assert_eq!(server.signal(Signal::SIGTERM).code(), Some(0));
    assert!(!pids.iter().any(|p| alive(*p)) && !exists(&server.path("run/admin.sock")));
}

#[tokio::test]
async fn clients_tell_a_stop_from_a_crash() {
    let mut server = Server::start().await;
    for (signal, told) in [(Signal::SIGKILL, false), (Signal::SIGTERM, true)] {
        let mut vm = server.client(if told { "vm-1" } else { "vm-2" }).await;
        let mut watch = vm.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap().into_inner();
        server.signal(signal);
        let mut stopped = false;
        while let Ok(Some(event)) = watch.message().await {
            stopped |= matches!(event.event, Some(Event::ServerStopped(_)));
        }
        assert_eq!(stopped, told, "{signal}");
        server.run().await;
    }
}

#[tokio::test]
async fn a_second_machine_under_one_identity_is_refused() {
    let server = Server::start().await;
    let mut first = server.client("vm-1").await;
    let watch = first.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap();
    let lease = first.allocate(100.0).await.unwrap();
    let mut copy = server.again(&first).await;
    let wish = AllocateRequest { boot_id: "b2".into(), ..first.request() };
    let status = copy.pool.allocate(wish.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::Aborted);
    assert!(status.message().contains("gpusession leave"), "{status}");
    assert!(!first.pool.renew(renew(&[&lease.id])).await.unwrap().into_inner().leases[0].lost);
    // The first machine stops; its leases end when it comes back with another boot.
    drop(watch);
    eventually("the next boot is accepted", async || copy.pool.allocate(wish.clone()).await.is_ok()).await;
    let stale = first.pool.renew(renew(&[&lease.id])).await.unwrap_err();
    assert_eq!(stale.code(), Code::Aborted);
    let held = server.json(&["leases"]);
    assert!(held["leases"].as_array().unwrap().iter().all(|l| l["lease"] != lease.id.as_str()), "{held}");
}

/// Silent connections of one machine do not block other machines on the control port.
#[tokio::test]
async fn silent_connections_do_not_delay_other_clients() {
    let server = Server::start().await;
    let silent: Vec<_> =
        (0..700).map(|_| TcpStream::connect(&server.control).expect("a connection")).collect();
    let _vm = server.client_from("vm-1", "127.0.0.2").await;
    let open = |socket: &&TcpStream| {
        socket.set_nonblocking(true).expect("a socket");
        matches!(socket.peek(&mut [0]), Err(e) if e.kind() == std::io::ErrorKind::WouldBlock)
    };
    let left = silent.iter().filter(open).count();
    assert!((500..=600).contains(&left), "{left} of 700 still have a place, and it did not wait for theirs");
}

#[tokio::test]
async fn a_pool_of_two_servers() {
    let first = Server::start().await;
    let mut second = Server::prepare("libcuda.so.1", "").await;
    let exported = first.verb(&["pool", "export"]);
    assert!(exported.status.success(), "{exported:?}");
    let file = second.path("authority");
    std::fs::write(&file, &exported.stdout).unwrap();
    let import = |server: &Server| server.verb(&["pool", "import", file.to_str().unwrap()]);
    let refused = import(&second);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(1) && said.contains("holds a pool authority already"), "{said}");
    std::fs::remove_dir_all(second.path("state/ca")).unwrap();
    assert!(import(&second).status.success());
    second.run().await;

    // The client joins with the first server; the second one stores it at its first call.
    let mut vm = first.client("vm-1").await;
    vm.allocate(10.0).await.unwrap();
    let mut there = second.again(&vm).await;
    there.allocate(10.0).await.unwrap();
    assert_eq!(second.json(&["clients"])["clients"][0]["name"], "vm-1");
    assert_eq!(second.signal(Signal::SIGTERM).code(), Some(0));
    second.run().await;
    let mut there = second.again(&vm).await;
    there.allocate(10.0).await.unwrap();

    // Each server revokes clients on its own.
    assert!(second.verb(&["clients", "revoke", "vm-1"]).status.success());
    let status = there.allocate(10.0).await.unwrap_err();
    assert!(status.message().contains("revoked"), "{status}");
    assert!(second.verb(&["clients", "forget", "vm-1"]).status.success());
    assert_eq!(there.allocate(10.0).await.unwrap_err().code(), Code::Unauthenticated);
    vm.allocate(10.0).await.unwrap();
}
