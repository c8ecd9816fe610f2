//! `--server`: the verbs over the network, with an administrator's certificate.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::control::administration_client::AdministrationClient;
use gpusession_proto::control::pool_client::PoolClient;
use gpusession_proto::control::{AskRequest, DescribeRequest};
use nix::libc;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection};
use tonic::Code;
use tonic::transport::Identity;

use gpusession_test_server::{Server, eventually, example};

/// Creates an administrator and returns the file with the certificate.
pub fn administrator(server: &Server, name: &str) -> PathBuf {
    let file = server.path(&format!("{name}.pem"));
    let made = server.verb(&["admin", "create", name, "--out", file.to_str().unwrap()]);
    assert!(made.status.success(), "{made:?}");
    file
}

/// Runs a verb on a machine that only has an administrator's file.
pub fn from_afar(address: &str, identity: &Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gpuserver"))
        .args(words)
        .args(["--server", address])
        .env("GPUSERVER_CONF", "/nonexistent/gpuserver.toml")
        .env("GPUSERVER_IDENTITY", identity)
        .output()
        .expect("gpuserver runs")
}

fn json(address: &str, identity: &Path, words: &[&str]) -> serde_json::Value {
    let output = from_afar(address, identity, &[words, &["--json"]].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Returns the code of a refusal.
fn refused(address: &str, identity: &Path, words: &[&str]) -> String {
    let output = from_afar(address, identity, &[words, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    said["error"]["code"].as_str().expect("a code").into()
}

#[tokio::test]
async fn verbs_over_the_network() {
    let server = Server::start().await;
    let alice = administrator(&server, "alice");
    assert_eq!(std::fs::metadata(&alice).unwrap().permissions().mode() & 0o777, 0o600);
    let address = server.control.as_str();

    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(50.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (_lane, _) = server.adopt(&worker.id, 0, true);
    assert_eq!(json(address, &alice, &["status"])["server"]["name"], "s1");
    assert_eq!(json(address, &alice, &["leases"])["leases"][0]["lease"], lease.id);
    assert_eq!(json(address, &alice, &["clients"])["clients"][0]["name"], "vm-1");
    let table = from_afar(address, &alice, &["gpus"]);
    assert!(table.status.success() && String::from_utf8_lossy(&table.stdout).contains("GPU-"), "{table:?}");
    let active = async || {
        let rows = json(address, &alice, &["ps"]);
        rows["workers"].as_array().unwrap().iter().any(|w| w["state"] == "active")
    };
    eventually("its program shows", active).await;
    let token = from_afar(address, &alice, &["token", "create"]);
    let token = String::from_utf8(token.stdout).unwrap();
    server.enrol(token.trim(), "vm-2", "m2").await.expect("a token from afar is good");
    json(address, &alice, &["config", "set", "warm_workers", "1"]);
    assert_eq!(server.json(&["config", "get", "warm_workers"])["config"][0]["value"], "1");

    assert_eq!(json(address, &alice, &["drain"])["drain"]["draining"], true);
    assert!(vm.allocate(1.0).await.unwrap_err().message().contains("drained"));
    json(address, &alice, &["drain", "--end"]);
    let killed = json(address, &alice, &["kill", &data_encoding::HEXLOWER.encode(&worker.id)]);
    assert!(killed["killed"]["worker"].is_string(), "{killed}");
    eventually("it ended", async || !active().await).await;
    assert_eq!(refused(address, &alice, &["kill", "zz"]), "no-such-worker");
    let leases = || server.json(&["leases"])["leases"].as_array().unwrap().clone();
    let lease = leases()[0]["lease"].as_str().unwrap().to_owned();
    assert_eq!(json(address, &alice, &["kill", &lease])["killed"]["lease"], lease.as_str());
    assert!(leases().iter().all(|row| row["lease"] != lease.as_str()));

    // Verbs for the server's own host are refused.
    let out = server.path("b.pem");
    let create = ["admin", "create", "bob", "--out", out.to_str().unwrap()];
    for words in [&["stop"][..], &["check-config"], &["pool", "init"], &create] {
        assert_eq!(refused(address, &alice, words), "local", "{words:?}");
    }
    assert!(!out.exists());
    assert_eq!(from_afar(address, &alice, &["serve"]).status.code(), Some(1));
    assert_eq!(json(address, &alice, &["status"])["server"]["state"], "online");
}

#[tokio::test]
async fn only_administrator_certificates_may_administer() {
    let server = Server::start().await;
    let alice = administrator(&server, "alice");
    let address = server.control.as_str();
    let again = server.verb(&["admin", "create", "alice", "--out", server.path("2").to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("admin revoke alice"), "{again:?}");

    // A client is not an administrator, whatever it sends, and an administrator is not a client.
    let token = server.token(&[]);
    let (certificate, key) = server.enrol(&token, "vm-1", "m1").await.unwrap();
    let file = server.path("client.pem");
    std::fs::write(&file, format!("{certificate}{key}{}", server.authority())).unwrap();
    assert_eq!(refused(address, &file, &["ps"]), "not-allowed");
    let noted = || server.json(&["audit", "--event", "administration-refused"])["audit"].clone();
    let first = noted()[0].clone();
    assert_eq!((&first["actor"], &first["from"]), (&"client vm-1".into(), &"127.0.0.1".into()), "{first}");
    for identity in [None, Some(Identity::from_pem(&certificate, &key))] {
        let channel = server.connect(identity).await.unwrap();
        let mut asks = AdministrationClient::new(channel);
        let asked = asks.ask(AskRequest { json: b"{\"verb\":\"ps\"}".to_vec() }).await;
        assert_eq!(asked.unwrap_err().code(), Code::PermissionDenied);
    }
    let bundle = std::fs::read_to_string(&alice).unwrap();
    let identity = Identity::from_pem(&bundle, &bundle);
    let channel = server.connect(Some(identity.clone())).await.unwrap();
    let described = PoolClient::new(channel.clone()).describe(DescribeRequest::default()).await;
    assert_eq!(described.unwrap_err().code(), Code::Unauthenticated);
    let mut asks = AdministrationClient::new(channel);
    for (bad, said) in
        [(&b"{\"verb\":\"fly\"}"[..], "bad-request"), (b"{\"verb\":\"stop\",\"force\":true}", "local")]
    {
        let reply = asks.ask(AskRequest { json: bad.to_vec() }).await.unwrap().into_inner().json;
        assert!(String::from_utf8_lossy(&reply).contains(said), "{}", String::from_utf8_lossy(&reply));
    }
    let long = asks.ask(AskRequest { json: vec![b' '; 65 << 10] }).await.unwrap_err();
    assert_eq!(long.code(), Code::OutOfRange, "{long}");

    // The revocation also applies to an open connection.
    assert_eq!(server.json(&["admin", "list"])["administrators"][0]["state"], "good");
    assert!(server.verb(&["admin", "revoke", "alice"]).status.success());
    assert_eq!(refused(address, &alice, &["ps"]), "not-allowed");
    let last = noted().as_array().unwrap().last().unwrap().clone();
    assert_eq!((&last["actor"], &last["result"]), (&"administrator alice".into(), &"not-permitted".into()));
    let after = asks.ask(AskRequest { json: b"{\"verb\":\"ps\"}".to_vec() }).await;
    assert_eq!(after.unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(server.json(&["admin", "list"])["administrators"][0]["state"], "revoked");
    std::fs::remove_file(&alice).unwrap();
    let alice = administrator(&server, "alice");
    json(address, &alice, &["ps"]);
}

#[tokio::test]
async fn administrators_of_a_pool() {
    let mut first = Server::prepare("libcuda.so.1", "").await;
    // While no server runs.
    let alice = administrator(&first, "alice");
    first.run().await;
    let mut second = Server::prepare("libcuda.so.1", "").await;
    std::fs::remove_dir_all(second.path("state/ca")).unwrap();
    std::fs::write(second.path("authority"), first.verb(&["pool", "export"]).stdout).unwrap();
    assert!(second.verb(&["pool", "import", second.path("authority").to_str().unwrap()]).status.success());
    second.run().await;
    for server in [&first, &second] {
        json(&server.control, &alice, &["status"]);
    }
    assert_eq!(second.json(&["admin", "list"])["administrators"][0]["name"], "alice");
    assert_eq!(json(&second.control, &alice, &["admin", "revoke", "alice"])["administrator"]["known"], true);
    assert_eq!(refused(&second.control, &alice, &["status"]), "not-allowed");
    json(&first.control, &alice, &["status"]);
    second.signal(nix::sys::signal::Signal::SIGTERM);
    second.run().await;
    assert_eq!(refused(&second.control, &alice, &["status"]), "not-allowed", "it is kept");

    // A server of another pool.
    let other = Server::start().await;
    assert_eq!(refused(&other.control, &alice, &["status"]), "not-reachable");
}

/// A client of the pool listens at a server's address, and gets no request.
#[tokio::test]
async fn only_a_server_is_asked() {
    let server = Server::start().await;
    let alice = administrator(&server, "alice");
    let (certificate, key) = server.enrol(&server.token(&[]), "vm-1", "m1").await.unwrap();
    let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).map(Result::unwrap).collect();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap())
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let impostor = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut tls = ServerConnection::new(Arc::new(config)).unwrap();
        // Until the handshake succeeds or fails.
        let end = loop {
            match tls.complete_io(&mut socket) {
                Ok(_) if tls.is_handshaking() => {}
                end => break end,
            }
        };
        (end.is_err(), tls.is_handshaking())
    });
    assert_eq!(refused(&address, &alice, &["status"]), "not-reachable");
    assert_eq!(impostor.join().unwrap(), (true, true), "it was sent nothing");
}

/// Set in a child process of a test, which opens the socket and exits.
const ASKS: &str = "ADMINISTRATION_TEST_SOCKET";

#[tokio::test]
async fn a_request_of_an_exited_process_is_refused() {
    use std::io::{IoSlice, IoSliceMut};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

    if let Some(socket) = std::env::var_os(ASKS) {
        // The parent uses this connection after the process has exited.
        let server = UnixStream::connect(socket).unwrap();
        let rights = [server.as_raw_fd()];
        let beside = [ControlMessage::ScmRights(&rights)];
        sendmsg::<()>(0, &[IoSlice::new(b"x")], &beside, MsgFlags::empty(), None).unwrap();
        return;
    }
    let server = Server::start().await;
    let request = br#"{"verb":"drain","end":false,"reason":"a test"}"#;
    let ask = |mut socket: &UnixStream| {
        // The server may refuse the connection before the request.
        let _ =
            socket.write_all(&(request.len() as u32).to_le_bytes()).and_then(|()| socket.write_all(request));
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        answer.len()
    };
    let (ours, theirs) = UnixStream::pair().unwrap();
    let ended = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "administration::a_request_of_an_exited_process_is_refused"])
        .env(ASKS, server.path("run/admin.sock"))
        .stdin(OwnedFd::from(theirs))
        .output()
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let (mut space, mut byte) = (nix::cmsg_space!([i32; 1]), [0]);
    let mut parts = [IoSliceMut::new(&mut byte)];
    let got = recvmsg::<()>(ours.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::empty()).unwrap();
    let socket = got.cmsgs().unwrap().find_map(|c| match c {
        // SAFETY: the kernel has just created this descriptor for us; it has no other owner.
        ControlMessageOwned::ScmRights(fds) => Some(unsafe { UnixStream::from_raw_fd(fds[0]) }),
        _ => None,
    });
    assert_eq!(ask(&socket.unwrap()), 0, "one that has ended");
    // A process that runs the worker's program is refused, too.
    let said = Command::new(example("fake-worker")).arg("--asks").arg(server.path("libcuda.so.1")).output();
    assert_eq!(String::from_utf8(said.unwrap().stdout).unwrap().trim(), "0");
    assert_eq!(server.json(&["status"])["server"]["state"], "online");
    assert!(ask(&UnixStream::connect(server.path("run/admin.sock")).unwrap()) > 0);
    assert!(server.json(&["status"])["server"]["state"].as_str().unwrap().starts_with("draining"));
}

/// Opens a connection to a socket as a user with a primary group and a supplementary one.
fn connect_as(socket: PathBuf, user: u32, primary: u32, group: u32) -> UnixStream {
    let connect = move || {
        // SAFETY: these calls take plain numbers and one group, and change this thread alone.
        let changed = unsafe {
            [
                libc::syscall(libc::SYS_setgroups, 1, &raw const group),
                libc::syscall(libc::SYS_setresgid, primary, primary, primary),
                libc::syscall(libc::SYS_setresuid, user, user, user),
            ]
        };
        assert_eq!(changed, [0; 3]);
        UnixStream::connect(socket).unwrap()
    };
    std::thread::spawn(connect).join().unwrap()
}

/// Returns the bytes of the answer to a request on a connection; 0: the server closed it.
fn answer(mut socket: &UnixStream) -> usize {
    let request = br#"{"verb":"ps"}"#;
    // The server may close the connection before the request.
    let _ = socket.write_all(&(request.len() as u32).to_le_bytes()).and_then(|()| socket.write_all(request));
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    answer.len()
}

/// A user for whom the socket's mode is no obstacle has no right by that.
#[tokio::test]
async fn only_root_the_servers_user_and_its_group_may_administer() {
    // Only root becomes another user.
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let server = Server::start().await;
    let socket = server.path("run/admin.sock");
    let group = std::fs::metadata(&socket).unwrap().gid();
    for open in [server.path(""), server.path("run"), socket.clone()] {
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).unwrap();
    }
    const OTHER: u32 = 60_000;
    for (user, primary, further, answered) in [
        (60_001, OTHER, OTHER, false),
        (60_001, OTHER, group, true),
        (60_001, group, OTHER, true),
        (0, OTHER, OTHER, true),
    ] {
        let socket = connect_as(socket.clone(), user, primary, further);
        assert_eq!(answer(&socket) > 0, answered, "user {user}, groups {primary} and {further}");
    }
    let noted = server.json(&["audit", "--event", "administration-refused"])["audit"].clone();
    assert_eq!(noted[0]["actor"], "uid 60001", "{noted}");
}

#[tokio::test]
async fn a_user_takes_a_part_of_the_administration_socket() {
    const OF_ONE: usize = 16;
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let server = Server::start().await;
    let socket = server.path("run/admin.sock");
    let group = std::fs::metadata(&socket).unwrap().gid();
    for open in [server.path(""), server.path("run")] {
        std::fs::set_permissions(open, PermissionsExt::from_mode(0o755)).unwrap();
    }
    let open = |user: u32| {
        let socket = connect_as(socket.clone(), user, user, group);
        socket.set_read_timeout(Some(Duration::from_secs(8))).unwrap();
        socket
    };
    let closed = |mut socket: &UnixStream| matches!(socket.read(&mut [0]), Ok(0));
    let mut silent = Vec::new();
    for user in 60_001..60_005 {
        silent.extend((0..OF_ONE).map(|_| open(user)));
        assert!(closed(&open(user)), "a further connection of user {user}");
    }
    assert!(closed(&open(60_005)), "a further user, when all are taken");
    silent[0].set_nonblocking(true).unwrap();
    assert!(!closed(&silent[0]));
    // Root's connections have no bound.
    assert_eq!(server.json(&["status"])["server"]["name"], "s1");
    silent.truncate(OF_ONE);
    eventually("there is room again", async || answer(&open(60_005)) > 0).await;
    assert!(closed(&open(60_001)), "the first user has its part");
}
