//! A real server process, real clients over mutual TLS, and workers without a driver.
#![expect(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod administration;
mod audit;
mod common;
mod fences;
mod garbage;
mod health;
mod identities;
mod mps;
mod netperf;
mod restart;
mod rotation;
mod sharing;
mod workers;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{LONG, Server, alive, eventually, exists, rest};
use gpuserver::config::keys;
use gpuserver::limits::{IDLE_TIMES, LIMITS};
use gpusession_proto::control::pool_client::PoolClient;
use gpusession_proto::control::pool_event::Event;
use gpusession_proto::control::{
    AllocateRequest, DescribeRequest, ProcessEndedRequest, ReleaseRequest, RenewRequest, TakeWorkersRequest,
    WatchRequest,
};
use gpusession_proto::join;
use gpusession_proto::preface;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
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
    if nix::unistd::geteuid().is_root() {
        assert_eq!(said["stack_unlimited"], true);
    }
    let names: Vec<_> = said["environment"].as_object().unwrap().keys().cloned().collect();
    assert!(
        names.iter().all(|n| [
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
    assert!(row("warm")["transport"].is_null(), "nobody is connected");
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
    let token = server.token(&["--name", "vm-*", "--uses", "2"]);
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
    let other = server.token(&["--name", "db-*"]);
    let listed = server.json(&["token", "list"])["tokens"].clone();
    let id = listed.as_array().unwrap().iter().find(|t| t["name_pattern"] == "db-*").unwrap()["id"].clone();
    assert_eq!(server.verb(&["token", "revoke", ""]).status.code(), Some(1), "it would be all of them");
    assert_eq!(server.json(&["token", "revoke", &id.as_str().unwrap()[..8]])["token"]["id"], id);
    assert_eq!(server.enrol(&other, "db-1", "m5").await.unwrap_err().code(), Code::PermissionDenied);
    let forged: String = token[..token.len() - 4].chars().chain("AAAA".chars()).collect();
    let unknown = server.enrol(&forged, "vm-3", "m3").await.unwrap_err();
    assert!(unknown.message().contains("not one of this pool"), "{unknown}");
    assert_eq!(server.json(&["clients"])["clients"].as_array().unwrap().len(), 2);
    assert_eq!(server.verb(&["token", "create", "--ttl", "soon"]).status.code(), Some(1));
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
        let event = watch.message().await.unwrap().expect("the stream goes on");
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
async fn a_killed_worker_is_replaced_and_others_go_on() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let (first, second) = (vm.take(&lease.id).await.unwrap(), vm.take(&lease.id).await.unwrap());
    assert_ne!(first.id, second.id);
    let mut watch = vm.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap().into_inner();
    let (mut lane, said) = server.adopt(&first.id, 0, true);
    let (_other, other_said) = server.adopt(&second.id, 0, true);
    let back = server.preface(&first.id, 0, true);
    kill(Pid::from_raw(pid(&said["pid"]) as i32), Signal::SIGKILL).unwrap();
    assert!(rest(&mut lane).is_empty());
    // Its client gets an event, in case it has not granted the worker yet.
    loop {
        let event = watch.message().await.unwrap().expect("the stream goes on");
        if let Some(Event::WorkersReady(workers)) = event.event
            && workers.ended.contains(&first.id)
        {
            break;
        }
    }
    // A warm worker is replaced, too.
    eventually("two are warm", async || {
        server.workers().iter().filter(|w| w["state"] == "warm").count() == 2
    })
    .await;
    let warm = server.workers().into_iter().find(|w| w["state"] == "warm").unwrap();
    kill(Pid::from_raw(pid(&warm["pid"]) as i32), Signal::SIGKILL).unwrap();
    eventually("it was replaced", async || {
        let workers = server.workers();
        workers.iter().filter(|w| w["state"] == "warm").count() == 2
            && !workers.iter().any(|w| w["worker"] == warm["worker"])
    })
    .await;
    assert!(alive(pid(&other_said["pid"])));
    // Connections to the first worker are refused.
    let answer = rest(&mut server.data_connection(back.as_bytes()));
    assert!(String::from_utf8_lossy(&answer).contains("the worker has ended: killed by SIGKILL"));
    // An administrator ends the other.
    let id = data_encoding::HEXLOWER.encode(&second.id);
    assert!(server.verb(&["kill", &id[..8]]).status.success());
    eventually("it ended", async || !alive(pid(&other_said["pid"]))).await;
    let none = server.verb(&["kill", "zz"]);
    assert!(String::from_utf8_lossy(&none.stderr).contains("gpuserver ps"), "{none:?}");
}

#[tokio::test]
async fn a_worker_that_does_not_listen_is_killed() {
    for driver in ["deaf-libcuda.so.1", "clogged-libcuda.so.1"] {
        let server = Server::start_with(driver, "warm_workers = 1").await;
        let mut vm = server.client("vm-1").await;
        let lease = vm.allocate(100.0).await.unwrap();
        let worker = vm.take(&lease.id).await.unwrap();
        let (_lane, said) = server.adopt(&worker.id, 0, true);
        // Neither the order to stop nor this report waits behind other messages.
        eventually("its program is known", async || {
            server.workers().iter().any(|w| w["program"] == "vectorAdd")
        })
        .await;
        let start = Instant::now();
        vm.pool.process_ended(ProcessEndedRequest { lease: lease.id, worker: worker.id }).await.unwrap();
        eventually("it was killed", async || !alive(pid(&said["pid"]))).await;
        assert!(start.elapsed() < Duration::from_secs(2), "{driver}: {:?}", start.elapsed());
        eventually("it ended for want of its program", async || {
            let records = server.json(&["accounting", "--kind", "process"])["records"].clone();
            records[0]["reason"].as_str().is_some_and(|reason| reason.contains("its client process ended"))
        })
        .await;
    }
}

#[tokio::test]
async fn workers_that_do_not_start_are_explained() {
    for (driver, reason) in
        [("crash-libcuda.so.1", "exit status 7"), ("no-driver-libcuda.so.1", "CUDA_ERROR_SYSTEM_NOT_READY")]
    {
        let server = Server::start_with(driver, "").await;
        let mut vm = server.client("vm-1").await;
        let lease = vm.allocate(100.0).await.unwrap();
        for _ in 0..2 {
            let status = vm.take(&lease.id).await.unwrap_err();
            assert_eq!(status.code(), Code::Unavailable);
            assert!(status.message().contains(reason), "{status}");
        }
        vm.pool.release(ReleaseRequest { lease: lease.id, ..Default::default() }).await.unwrap();
        eventually("none is tried any more", async || server.workers().is_empty()).await;
    }
}

#[tokio::test]
async fn isolation_is_decided_before_a_port_opens() {
    let isolation = async |driver: &str, lines: &str| {
        let mut server = Server::prepare(driver, lines).await;
        server.run_into("log").await;
        let mut vm = server.client("vm-1").await;
        let lease = vm.allocate(100.0).await.unwrap();
        // A hiccup of workers never takes restrictions away.
        eventually("a worker is taken", async || vm.take(&lease.id).await.is_ok()).await;
        let rows = server.workers();
        let levels: Vec<_> = rows.iter().map(|w| w["isolation"].as_str().unwrap().to_string()).collect();
        let status = server.json(&["status"])["server"]["isolation"].as_str().unwrap().to_string();
        (levels, status, std::fs::read_to_string(server.path("log")).unwrap())
    };
    let (levels, status, _) = isolation("libcuda.so.1", "").await;
    assert!(levels.contains(&"full".into()) && status == "full", "{levels:?} {status}");
    let (levels, status, _) = isolation("libcuda.so.1", "isolation = \"off\"").await;
    assert!(levels.iter().all(|l| l == "off") && status.starts_with("off"), "{levels:?} {status}");
    let (levels, ..) = isolation("hiccup-libcuda.so.1", "isolation = \"try\"").await;
    assert!(levels.iter().all(|l| l == "full" || l == "later"), "{levels:?}");
    let (levels, status, log) = isolation("free-libcuda.so.1", "isolation = \"try\"").await;
    assert!(levels.iter().all(|l| l == "off") && status.contains("CUDA error 304"), "{levels:?} {status}");
    assert!(log.contains("isolation of workers: off: the driver works only without it"), "{log}");
    // Full GPUs say nothing about this host.
    let (levels, _, log) = isolation("full-libcuda.so.1", "isolation = \"try\"").await;
    assert!(
        levels.contains(&"full".into()) && log.contains("not tested with the driver"),
        "{levels:?} {log}"
    );
    // A host whose restrictions are incomplete.
    let (levels, status, _) = isolation("open-libcuda.so.1", "isolation = \"try\"").await;
    assert!(
        levels.contains(&"partial".into()) && status.starts_with("partial: landlock"),
        "{levels:?} {status}"
    );

    // The default.
    for (driver, why) in [("free-libcuda.so.1", "CUDA error 304"), ("open-libcuda.so.1", "landlock: missing")]
    {
        let server = Server::prepare(driver, "").await;
        for (verb, code) in [("serve", 1), ("check-isolation", 2)] {
            let done = server.verb(&[verb]);
            let said = format!("{done:?}");
            assert!(said.contains(why) && said.contains("isolation = \\\"try\\\""), "{said}");
            assert_eq!(done.status.code(), Some(code), "{said}");
        }
    }
    let server = Server::prepare("libcuda.so.1", "").await;
    assert_eq!(server.json(&["check-isolation"])["isolation"]["level"], "full");
}

#[tokio::test]
async fn a_worker_says_how_isolated_it_is_before_it_serves() {
    let mut server = Server::prepare("boasting-libcuda.so.1", "").await;
    server.run_into("journal").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (mut lane, _) = server.adopt(&worker.id, 0, true);
    assert!(rest(&mut lane).is_empty(), "ended");
    let journal = || std::fs::read_to_string(server.path("journal")).unwrap();
    eventually("the journal says why", async || journal().contains("reported its isolation out of turn"))
        .await;
    assert!(!journal().contains("incomplete on this host"), "it was not believed: {}", journal());
}

#[tokio::test]
async fn a_worker_says_once_that_it_is_ready() {
    let mut server = Server::prepare("eager-libcuda.so.1", "").await;
    server.run_into("journal").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (mut lane, _) = server.adopt(&worker.id, 0, true);
    assert!(rest(&mut lane).is_empty(), "ended");
    let journal = || std::fs::read_to_string(server.path("journal")).unwrap();
    eventually("the journal says why", async || journal().contains("that it is ready out of turn")).await;
}

#[tokio::test]
async fn children_of_an_exited_worker_do_not_keep_it_registered() {
    let server = Server::start_with("heirs-libcuda.so.1", "").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (_lane, said) = server.adopt(&worker.id, 0, true);
    let begun = Instant::now();
    eventually("it has ended for the server, too", async || {
        server.workers().iter().all(|w| w["worker"] != said["worker"])
    })
    .await;
    assert!(begun.elapsed() < Duration::from_secs(10), "after {:?}", begun.elapsed());
}

#[tokio::test]
async fn driver_environment_gets_a_worker_of_its_own() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let mut with = async |name: &str, value: &str| {
        let environment = HashMap::from([(name.to_string(), value.to_string())]);
        vm.pool
            .take_workers(TakeWorkersRequest { lease: lease.id.clone(), count: 1, environment, waiting: 1 })
            .await
    };
    for bad in ["LD_PRELOAD", "CUDA_VISIBLE_DEVICES", ""] {
        assert_eq!(with(bad, "1").await.unwrap_err().code(), Code::InvalidArgument);
    }
    let worker = with("CUDA_LAUNCH_BLOCKING", "1").await.unwrap().into_inner().workers.remove(0);
    let (_lane, said) = server.adopt(&worker.id, 0, true);
    assert_eq!(said["environment"]["CUDA_LAUNCH_BLOCKING"], "1");
}

#[tokio::test]
async fn the_limit_of_workers_holds_for_concurrent_requests() {
    let server = Server::start_with("libcuda.so.1", "limits.workers = 2").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let ask = |i: usize| {
        let (mut vm, lease) = (vm.clone(), lease.id.clone());
        // Some programs need a worker of their own.
        let own = ("CUDA_LAUNCH_BLOCKING".to_string(), "1".to_string());
        let environment = (i % 2 == 1).then_some(own).into_iter().collect();
        let request = TakeWorkersRequest { lease, count: 1, environment, waiting: 6 };
        tokio::spawn(async move { vm.pool.take_workers(request).await })
    };
    let asked: Vec<_> = (0..6).map(ask).collect();
    let mut taken = 0;
    for answer in asked {
        match answer.await.unwrap() {
            Ok(reply) => taken += reply.into_inner().workers.len(),
            Err(status) => assert!(status.message().contains("limit workers = 2"), "{status}"),
        }
    }
    assert_eq!(taken, 2);
}

#[tokio::test]
async fn workers_that_start_for_one_program_count_for_limits() {
    let more = "limits.workers = 2\nwarm_workers = 0";
    let mut server = Server::prepare("libcuda.so.1", more).await;
    server.run_into("journal").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let ask = |_| {
        let (mut vm, lease) = (vm.clone(), lease.id.clone());
        let environment = HashMap::from([("CUDA_LAUNCH_BLOCKING".to_string(), "1".to_string())]);
        let request = TakeWorkersRequest { lease, count: 1, environment, waiting: 20 };
        tokio::spawn(async move { vm.pool.take_workers(request).await })
    };
    let asked: Vec<_> = (0..20).map(ask).collect();
    let mut taken = 0;
    for answer in asked {
        match answer.await.unwrap() {
            Ok(reply) => taken += reply.into_inner().workers.len(),
            Err(status) => assert!(status.message().contains("limit workers = 2"), "{status}"),
        }
    }
    assert_eq!((taken, server.workers().len()), (2, 2));
    // The server started no worker that the limit forbids to grant.
    let journal = std::fs::read_to_string(server.path("journal")).unwrap();
    assert!(!journal.contains("no program waits for it any longer"), "{journal}");
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

#[tokio::test]
async fn encryption_off_is_for_trusted_peers() {
    for (networks, encrypted) in [("[\"10.0.0.0/8\"]", true), ("[\"127.0.0.0/8\"]", false)] {
        encryption_off(networks, encrypted).await;
    }
}

async fn encryption_off(networks: &str, encrypted: bool) {
    let more = format!("encryption = \"off\"\ntrusted_networks = {networks}\nadvertise = \"gpu1.lab\"");
    let server = Server::start_with("libcuda.so.1", &more).await;
    let token = server.token(&[]);
    let key = KeyPair::generate().unwrap();
    let csr = CertificateParams::new(vec![]).unwrap().serialize_request(&key).unwrap().pem().unwrap();
    let request = gpusession_proto::control::JoinRequest {
        token,
        csr_pem: csr,
        client_name: "vm-1".into(),
        machine_id: "m".into(),
        boot_id: "b1".into(),
        renews: false,
    };
    let channel = server.connect(None).await.unwrap();
    let reply = gpusession_proto::control::enrolment_client::EnrolmentClient::new(channel)
        .join(request)
        .await
        .unwrap()
        .into_inner();
    let port = server.control.rsplit_once(':').unwrap().1;
    assert_eq!(reply.servers, [format!("gpu1.lab:{port}")], "clients are sent to `advertise`");
    let identity = Identity::from_pem(reply.certificate_pem, key.serialize_pem());
    let mut pool = PoolClient::new(server.connect(Some(identity)).await.unwrap());
    let wish =
        AllocateRequest { gpus: 1, boot_id: "b1".into(), machine_id: "m".into(), ..Default::default() };
    let lease = pool.allocate(wish).await.unwrap().into_inner();
    assert_eq!(lease.encrypted, encrypted, "{networks}");
    let take = TakeWorkersRequest { lease: lease.id, count: 1, ..Default::default() };
    let worker = pool.take_workers(take).await.unwrap().into_inner().workers.remove(0);
    let (_lane, said) = server.adopt(&worker.id, 0, encrypted);
    assert_eq!(said["require_tls"], encrypted);
}

#[tokio::test]
async fn bad_configurations_stop_the_server_with_code_1() {
    let mut server = Server::start().await;
    assert_eq!(server.verb(&["pool", "init"]).status.code(), Some(1), "the server holds the state directory");
    let second = server.verb(&["serve"]);
    assert!(String::from_utf8_lossy(&second.stderr).contains("in use by another gpuserver"), "{second:?}");
    assert_eq!(server.signal(Signal::SIGQUIT).code(), Some(2));
    let path = server.path("gpuserver.toml");
    for (driver, more, text) in [
        ("libcuda.so.1", "warm_wokers = 1", ":7: unknown key `warm_wokers`; did you mean `warm_workers`?"),
        ("libcuda.so.1", "gpus = [5]", ":7: gpus: GPU 5 not found; this host has 0 = GPU-"),
        (
            "libcuda.so.1",
            "sharing = \"mps\"\nmps_control = \"/nowhere\"",
            "mps_control: /nowhere is not a program",
        ),
        ("missing.so", "", "missing.so"),
    ] {
        server.configure(driver, more);
        let output = server.verb(&["serve"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(text) && said.contains(&*path.to_string_lossy()), "{said}");
    }
    // If the driver does not answer, systemd may start the server again.
    std::fs::copy("/proc/self/exe", server.path("no-probe.so")).unwrap();
    server.configure("no-probe.so", "");
    let output = server.verb(&["serve"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("CUDA_ERROR_NO_DEVICE"), "{output:?}");

    // Our own client library is not a driver.
    let source = server.path("ours.c");
    std::fs::write(&source, "int gpusession_marker = 1;\n").unwrap();
    let built = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(server.path("ours.so"))
        .arg(&source)
        .status()
        .unwrap();
    assert!(built.success());
    std::fs::write(server.path("text.so"), "no library").unwrap();
    let wrong = [
        ("ours.so", "own client library"),
        ("missing.so", "No such file"),
        ("text.so", "not a shared library"),
    ];
    for (driver, said) in wrong {
        server.configure(driver, "");
        for verb in [&["serve"][..], &["check-config", "--explain"]] {
            let output = server.verb(verb);
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.code() == Some(1) && text.contains(":4: driver: ") && text.contains(said),
                "{verb:?}: {text}"
            );
        }
    }
    server.configure("no-probe.so", "");
    let checked = server.verb(&["check-config", "--explain"]);
    let said = String::from_utf8_lossy(&checked.stdout);
    assert!(said.contains("good") && said.contains("note: GPUs are not checked"), "{said}");
}

#[test]
fn an_error_of_usage_is_json_for_programs() {
    let gpuserver = |words: &[&str]| {
        let output =
            std::process::Command::new(env!("CARGO_BIN_EXE_gpuserver")).args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        output
    };
    for words in [&["--json", "ps", "--nonsense"][..], &["drop", "--json"]] {
        let said: serde_json::Value = serde_json::from_slice(&gpuserver(words).stdout).expect("JSON");
        assert_eq!(said["error"]["code"], "usage", "{said}");
        assert!(said["error"]["message"].as_str().is_some_and(|m| !m.starts_with("error")), "{said}");
    }
    let plain = gpuserver(&["ps", "--nonsense"]);
    assert!(plain.stdout.is_empty() && String::from_utf8_lossy(&plain.stderr).contains("--nonsense"));
}

#[tokio::test]
async fn values_may_come_from_the_environment() {
    let mut server = Server::prepare("libcuda.so.1", "").await;
    server.configure("libcuda.so.1", "advertise = \"${GPU_HOST}:17601\"");
    let line = format!("{}:7", server.path("gpuserver.toml").display());
    let output = server.verb(&["serve"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&format!("{line}: advertise: environment variable GPU_HOST is not set")), "{said}");
    server.variables = vec![("GPU_HOST", "gpu1.lab".into())];
    server.run().await;
    let row = server.json(&["config", "get", "advertise"])["config"][0].clone();
    assert_eq!((&row["value"], &row["origin"]), (&"gpu1.lab:17601".into(), &line.into()));
}

#[tokio::test]
async fn a_server_says_what_it_starts_with() {
    let mut server = Server::prepare("libcuda.so.1", "limits.client.vm-1.gpus = 3").await;
    server.run_into("journal").await;
    let journal = std::fs::read_to_string(server.path("journal")).unwrap();
    let says = |text: &str| assert!(journal.lines().any(|l| l.contains(text)), "{text} is not in {journal}");
    for key in keys() {
        says(&format!(" {} = ", key.name));
    }
    for limit in LIMITS.iter().filter(|l| !IDLE_TIMES.contains(&l.name)) {
        says(&format!(" limits.{} = ", limit.name));
    }
    let file = server.path("gpuserver.toml");
    says(&format!(" limits.client.vm-1.gpus = 3 ({}:7)", file.display()));
    says(" warm_workers = 2 (default)");
    says("libcuda.so.1, worker program ");
    for gpu in 0..2 {
        says(&format!(" GPU GPU-00000000-0000-0000-0000-{gpu:012}: serving Fake GPU, 16384 MiB"));
    }
    says(&format!(" ready on {}, data on {}", server.control, server.data));
    assert!(!journal.contains("PRIVATE KEY") && !journal.contains("SECRET_OF"), "{journal}");
}

#[tokio::test]
async fn many_workers_leave_nothing_behind() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let server_pid = server.json(&["status"])["server"]["pid"].as_u64().unwrap();
    let descriptors = || std::fs::read_dir(format!("/proc/{server_pid}/fd")).unwrap().count();
    let mut before = 0;
    for round in 0..3 {
        let lease = vm.allocate(100.0).await.unwrap();
        for n in 0..20 {
            let worker = vm.take(&lease.id).await.unwrap();
            let (_lane, said) = server.adopt(&worker.id, 0, true);
            match n % 4 {
                0 => drop(kill(Pid::from_raw(pid(&said["pid"]) as i32), Signal::SIGKILL)),
                1 => {} // ends with its lease
                _ => {
                    let ended = ProcessEndedRequest { lease: lease.id.clone(), worker: worker.id };
                    vm.pool.process_ended(ended).await.unwrap();
                }
            }
        }
        vm.pool.release(ReleaseRequest { lease: lease.id, ..Default::default() }).await.unwrap();
        eventually("no worker is left", async || server.workers().is_empty()).await;
        eventually("the kernel has no children of the server's left", async || {
            let threads = std::fs::read_dir(format!("/proc/{server_pid}/task")).unwrap();
            threads.flatten().all(|t| {
                std::fs::read_to_string(t.path().join("children")).is_ok_and(|c| c.trim().is_empty())
            })
        })
        .await;
        match round {
            0 => before = descriptors(),
            _ => eventually("no more descriptors than before", async || descriptors() <= before).await,
        }
    }
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
    assert!(refused.status.code() == Some(1) && said.contains("never replaced"), "{said}");
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
