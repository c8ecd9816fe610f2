//! Certificates that are renewed, that expire, and that never were.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use gpuserver::certificate::{Role, holder};
use gpuserver::clock::SystemRandom;
use gpuserver::signer::ca::{AuthorityKey, CLIENT_TTL, LASTING_TTL, Order, Place};
use gpusession_proto::control::enrolment_client::EnrolmentClient;
use gpusession_proto::control::pool_client::PoolClient;
use gpusession_proto::control::{
    AllocateRequest, DescribeRequest, JoinRequest, RenewIdentityRequest, RenewRequest, WatchRequest,
};
use gpusessiond::client::{self, Remote};
use gpusessiond::identity::{Home, join_pool, server_name};
use gpusessiond::pool::{PoolServer as _, Trouble};
use gpusessiond::renewal::{Renewer, Standing};
use nix::sys::signal::Signal;
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::{ClientConfig, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tonic::transport::{Channel, Identity};
use tonic::{Code, Status};

use gpusession_test_server::{LONG, Server, eventually};

const DAY: u64 = 24 * 3600;

pub fn unix() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}

/// Returns a key and a request for its certificate.
fn wish() -> (KeyPair, String) {
    let key = KeyPair::generate().unwrap();
    let csr = CertificateParams::new(vec![]).unwrap().serialize_request(&key).unwrap().pem().unwrap();
    (key, csr)
}

async fn connected(server: &Server, certificate: &str, key: &KeyPair) -> PoolClient<Channel> {
    let identity = Identity::from_pem(certificate, key.serialize_pem());
    PoolClient::new(server.connect(Some(identity)).await.unwrap())
}

/// Renews the identity of a client; returns its connection with the new certificate, and that.
async fn renewed(
    server: &Server,
    pool: &mut PoolClient<Channel>,
) -> Result<(PoolClient<Channel>, String), Status> {
    let (key, csr_pem) = wish();
    let reply = pool.renew_identity(RenewIdentityRequest { csr_pem, proof: Vec::new() }).await?;
    let certificate = reply.into_inner().certificate_pem;
    Ok((connected(server, &certificate, &key).await, certificate))
}

/// Has the pool's authority issue a certificate at another time.
fn issued(server: &Server, name: &str, issued_unix: u64) -> (String, KeyPair) {
    let authority = AuthorityKey::read(&server.path("state/ca"), Place::Present).unwrap();
    let (key, csr) = wish();
    let order = Order { role: Role::Client, name, life: CLIENT_TTL, identity: None, signs_renewals: false };
    (authority.issue(&csr, &order, issued_unix, &SystemRandom).unwrap().pem, key)
}

fn parse_holder(pem: &str) -> gpuserver::certificate::Holder {
    holder(&CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()).unwrap()
}

fn describe() -> DescribeRequest {
    DescribeRequest::default()
}

#[tokio::test]
async fn a_renewal_touches_no_lease_and_no_connection() {
    let server = Server::start().await;
    let mut old = server.client("vm-1").await;
    let lease = old.allocate(100.0).await.unwrap();
    let mut watch = old.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap().into_inner();
    assert!(old.pool.describe(describe()).await.unwrap().into_inner().renews_identities);

    // A reply that is lost costs nothing: the old certificate stays valid, and asks again.
    renewed(&server, &mut old.pool).await.unwrap();
    old.pool.describe(describe()).await.unwrap();
    let (mut new, certificate) = renewed(&server, &mut old.pool).await.unwrap();
    let alive = RenewRequest { leases: vec![lease.id.clone()], boot_id: "b1".into() };
    let reply = new.renew(alive.clone()).await.unwrap().into_inner();
    assert!(!reply.leases[0].lost, "{reply:?}");
    let now = parse_holder(&certificate);
    assert!(now.expires_unix.abs_diff(unix() + CLIENT_TTL.as_secs()) < 60);

    // Another process of the client still has the old one, which renews nothing any more.
    let reply = old.pool.renew(alive).await.unwrap().into_inner();
    assert!(!reply.leases[0].lost, "{reply:?}");
    let late = renewed(&server, &mut old.pool).await.err().unwrap();
    assert_eq!(late.code(), Code::FailedPrecondition, "{late}");
    let (_, again) = renewed(&server, &mut new).await.unwrap();
    assert_eq!(parse_holder(&again).identity, now.identity, "the identity outlives its keys");
    let row = &server.json(&["clients"])["clients"][0];
    assert_eq!(row["expires_unix"], now.expires_unix);

    assert!(server.verb(&["kill", &lease.id]).status.success());
    assert!(watch.message().await.unwrap().is_some(), "the watch of before is served");
}

#[tokio::test]
async fn an_expired_certificate_renews_itself_for_some_time_and_does_nothing_else() {
    let server = Server::start().await;
    let (certificate, key) = issued(&server, "vm-1", unix() - 100 * DAY);
    let mut late = connected(&server, &certificate, &key).await;
    let refused = late.describe(describe()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    assert!(refused.message().contains("client \"vm-1\" expired on "), "{refused}");
    let (mut back, _) = renewed(&server, &mut late).await.unwrap();
    back.describe(describe()).await.unwrap();

    let (certificate, key) = issued(&server, "vm-2", unix() - 121 * DAY);
    let mut too_late = connected(&server, &certificate, &key).await;
    let refused = renewed(&server, &mut too_late).await.err().unwrap();
    assert_eq!(refused.code(), Code::Unauthenticated);
    assert!(refused.message().contains("`gpuserver clients forget vm-2`"), "{refused}");

    // A revoked client cannot renew, whatever the time.
    server.verb(&["clients", "revoke", "vm-1"]);
    assert_eq!(renewed(&server, &mut back).await.err().unwrap().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn clients_of_before_get_a_lasting_certificate_and_their_certificates_stay_good() {
    let server = Server::start().await;
    let (key, csr_pem) = wish();
    let request = JoinRequest {
        token: server.token(&[]),
        csr_pem,
        client_name: "vm-1".into(),
        machine_id: "m".into(),
        boot_id: "b1".into(),
        renews: false,
    };
    let channel = server.connect(None).await.unwrap();
    let reply = EnrolmentClient::new(channel).join(request).await.unwrap().into_inner();
    let lasting = parse_holder(&reply.certificate_pem);
    assert!(lasting.expires_unix.abs_diff(unix() + LASTING_TTL.as_secs()) < 60);
    let mut pool = connected(&server, &reply.certificate_pem, &key).await;
    pool.describe(describe()).await.unwrap();
    // The client's update renews it.
    let (mut new, certificate) = renewed(&server, &mut pool).await.unwrap();
    new.describe(describe()).await.unwrap();
    assert!(parse_holder(&certificate).expires_unix < lasting.expires_unix);
    assert_eq!(parse_holder(&certificate).identity, lasting.identity);
}

#[tokio::test]
async fn certificates_that_end_are_named_with_the_remedy() {
    let server = Server::start_with("libcuda.so.1", "").await;
    let (certificate, key) = issued(&server, "vm-1", unix() - 80 * DAY);
    connected(&server, &certificate, &key).await.describe(describe()).await.unwrap();
    let status = server.json(&["status"]);
    let warning = status["server"]["warnings"][0].as_str().unwrap();
    assert!(warning.starts_with("certificate of client vm-1: expires on "), "{warning}");
    assert!(warning.contains("its daemon does not renew it"), "{warning}");
    let shown = server.verb(&["status"]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("certificate of client vm-1"), "{shown:?}");
}

/// A client's files in a folder.
fn home(folder: &Path) -> Home {
    Home { identity: folder.join("identity"), servers: vec![folder.join("servers.toml")] }
}

/// Writes an identity that the pool's authority issued at another time.
pub fn identity_of(server: &Server, folder: &Path, name: &str, issued_unix: u64) -> Home {
    let home = home(folder);
    let (certificate, key) = issued(server, name, issued_unix);
    std::fs::create_dir_all(&home.identity).unwrap();
    let write = |name: &str, text: &str| std::fs::write(home.identity.join(name), text).unwrap();
    write("client.pem", &certificate);
    write("client.key", &key.serialize_pem());
    write("authority.pem", &server.authority());
    let servers = format!("[[server]]\naddress = \"{}\"\n", server.control);
    std::fs::write(&home.servers[0], servers).unwrap();
    home
}

fn renewer(
    home: &Home,
    clock: impl Fn() -> u64 + Send + Sync + 'static,
) -> (Renewer, gpusessiond::identity::Identity, tokio::sync::watch::Receiver<Option<Standing>>) {
    let identity = home.load().unwrap();
    let standing = tokio::sync::watch::Sender::new(None);
    let seen = standing.subscribe();
    (Renewer::new(home.clone(), identity.clone(), Arc::new(clock), standing), identity, seen)
}

#[tokio::test]
async fn a_daemon_renews_in_time_and_loses_neither_lease_nor_watch() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let home = home(folder.path());
    join_pool(&home, &server.control, &server.token(&[]), Some("vm-1"), client::join).await.unwrap();
    let key = || std::fs::read_to_string(home.identity.join("client.key")).unwrap();
    let first = key();
    let ahead = Arc::new(AtomicU64::new(0));
    let clock = ahead.clone();
    let (mut renewer_, identity, standing) =
        renewer(&home, move || unix() + clock.load(Ordering::Relaxed) * DAY);
    let (mut other, others, _) = renewer(&home, unix);
    let old = identity.facts();
    assert!(old.expires_unix.abs_diff(unix() + CLIENT_TTL.as_secs()) < 60);

    let remote = Arc::new(Remote::new(&server.control, &identity).unwrap());
    let request = gpusession_proto::control::AllocateRequest {
        gpus: 1,
        boot_id: "b1".into(),
        machine_id: "m".into(),
        ..Default::default()
    };
    let lease = remote.allocate(request).await.unwrap();
    let (events, mut arriving) = tokio::sync::mpsc::channel(64);
    let watching = tokio::spawn({
        let remote = remote.clone();
        async move { remote.watch("b1".into(), events).await }
    });

    for days in [1, 54] {
        ahead.store(days, Ordering::Relaxed);
        renewer_.renew_if_due().await;
        assert_eq!(identity.facts(), old, "after {days} days");
    }
    ahead.store(66, Ordering::Relaxed);
    renewer_.renew_if_due().await;
    let new = identity.facts();
    assert_ne!(new.certificate, old.certificate);
    let renewed = Standing { facts: new.clone(), trouble: String::new(), warned: None };
    assert_eq!(standing.borrow().as_ref().unwrap(), &renewed);
    assert!(key() != first && !home.identity.join("renewing.key").exists());
    let reply = remote.renew(vec![lease.id.clone()], "b1".into()).await.unwrap();
    assert!(!reply.leases[0].lost, "{reply:?}");
    // Another process takes the certificate from the folder; until then, the older one serves.
    Remote::new(&server.control, &others).unwrap().describe(None).await.unwrap();
    other.renew_if_due().await;
    assert_eq!(others.facts(), new);

    assert!(server.verb(&["kill", &lease.id]).status.success());
    let event = tokio::time::timeout(LONG, arriving.recv()).await.unwrap().unwrap();
    assert_eq!(event.lease, lease.id, "the watch continues on the new connection");
    watching.abort();
}

#[tokio::test]
async fn an_identity_that_no_server_renews_is_announced_once_a_day() {
    let mut server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let home = identity_of(&server, folder.path(), "vm-1", unix() - 80 * DAY);
    server.signal(Signal::SIGKILL);
    let later = Arc::new(AtomicU64::new(0));
    let (begun, clock) = (unix(), later.clone());
    let (mut renewer_, _, standing) = renewer(&home, move || begun + clock.load(Ordering::Relaxed));
    let mut warned = async |after: u64| {
        later.store(after, Ordering::Relaxed);
        renewer_.renew_if_due().await;
        let standing = standing.borrow().clone().unwrap();
        assert!(!standing.trouble.is_empty());
        standing.warned.unwrap() - begun
    };
    assert_eq!(warned(0).await, 0);
    assert_eq!(warned(DAY - 1).await, 0);
    assert_eq!(warned(DAY + 1).await, DAY + 1);
}

#[tokio::test]
async fn a_machine_that_was_off_for_100_days_comes_back_and_one_of_130_days_says_why_not() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let home = identity_of(&server, folder.path(), "vm-1", unix() - 100 * DAY);
    let (mut late, identity, _) = renewer(&home, unix);
    assert!(late.expired());
    late.renew_if_due().await;
    assert!(!late.expired());
    Remote::new(&server.control, &identity).unwrap().describe(None).await.unwrap();

    let folder = tempfile::tempdir().unwrap();
    let home = identity_of(&server, folder.path(), "vm-2", unix() - 130 * DAY);
    let (mut late, _, standing) = renewer(&home, unix);
    late.renew_if_due().await;
    assert!(late.expired());
    let trouble = standing.borrow().as_ref().unwrap().trouble.clone();
    assert!(trouble.contains("`gpuserver clients forget vm-2`"), "{trouble}");
}

#[tokio::test]
async fn an_updated_daemon_renews_a_lasting_certificate_at_once_and_years_later() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let home = identity_of(&server, folder.path(), "vm-1", unix());
    let authority = AuthorityKey::read(&server.path("state/ca"), Place::Present).unwrap();
    let (key, csr) = wish();
    let order =
        Order { role: Role::Client, name: "vm-1", life: LASTING_TTL, identity: None, signs_renewals: false };
    let lasting = authority.issue(&csr, &order, unix() - 3 * 365 * DAY, &SystemRandom).unwrap();
    std::fs::write(home.identity.join("client.pem"), lasting.pem).unwrap();
    std::fs::write(home.identity.join("client.key"), key.serialize_pem()).unwrap();
    let (mut renewer, identity, _) = renewer(&home, unix);
    let before = identity.facts();
    renewer.renew_if_due().await;
    let after = identity.facts();
    assert!(after.certificate != before.certificate && after.expires_unix < before.expires_unix);
    Remote::new(&server.control, &identity).unwrap().describe(None).await.unwrap();
}

/// Returns the TLS side of a server to which the pool's authority gave a certificate of this name.
fn of_pool(server: &Server, name: &str) -> TlsAcceptor {
    let authority = AuthorityKey::read(&server.path("state/ca"), Place::Present).unwrap();
    let (key, csr) = wish();
    let issued = authority.issue_server(name, &csr, unix(), &SystemRandom).unwrap();
    let chain = vec![CertificateDer::from_pem_slice(issued.pem.as_bytes()).unwrap()];
    let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
    let mut config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config).into()
}

/// Answers with the words of the server at `to`; its own certificate may change.
async fn repeat(
    listener: TcpListener,
    shown: watch::Receiver<TlsAcceptor>,
    to: String,
    tls: Arc<ClientConfig>,
) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (mut shown, to, tls) = (shown.clone(), to.clone(), tls.clone());
        tokio::spawn(async move {
            let acceptor = shown.borrow_and_update().clone();
            let repeated = async {
                let mut client = acceptor.accept(stream).await?;
                let behind = TcpStream::connect(to).await?;
                let mut server = TlsConnector::from(tls).connect(server_name(), behind).await?;
                tokio::io::copy_bidirectional(&mut client, &mut server).await
            };
            tokio::select! {
                _ = repeated => {}
                _ = shown.changed() => {}
            }
        });
    }
}

#[tokio::test]
async fn a_server_has_the_name_of_its_certificate_and_no_other() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let identity = identity_of(&server, folder.path(), "vm-1", unix()).load().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (show, shown) = watch::channel(of_pool(&server, "s2"));
    let repeating = tokio::spawn(repeat(listener, shown, server.control.clone(), identity.tls()));

    let remote = Remote::new(&address, &identity).unwrap();
    let request = AllocateRequest { gpus: 1, boot_id: "b1".into(), ..Default::default() };
    for error in [
        remote.describe(None).await.unwrap_err(),
        remote.allocate(request.clone()).await.unwrap_err(),
        remote.measure(1).await.unwrap_err(),
    ] {
        assert_eq!(error.trouble, Trouble::Protocol, "{error}");
        assert!(error.message.contains("answer refused: the server calls itself s1, and"), "{error}");
    }
    // Answers without a name are those of any server of the pool.
    assert!(remote.renew(Vec::new(), "b1".into()).await.is_ok());

    // A server that starts again under another name has another certificate.
    show.send_replace(of_pool(&server, "s1"));
    eventually("the new name counts", async || remote.describe(None).await.is_ok()).await;
    show.send_replace(of_pool(&server, "s2"));
    eventually("the old name counts no longer", async || {
        remote.allocate(request.clone()).await.is_err_and(|error| error.trouble == Trouble::Protocol)
    })
    .await;
    repeating.abort();
}
