//! Revocations that hold on each server of a pool.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpuserver::clock::SystemRandom;
use gpuserver::signer::ca::{AuthorityKey, Place};
use gpuserver::statements::MAX_OF_SERVER;
use gpusession_proto::control::pool_client::PoolClient;
use gpusession_proto::control::statements_client::StatementsClient;
use gpusession_proto::control::statements_server::{Statements, StatementsServer};
use gpusession_proto::control::{DescribeRequest, StatementsReply, StatementsRequest};
use gpusession_proto::statement::{Signed, Statement, Verdict};
use gpusession_test_server::{Client, LONG, Server, eventually};
use gpusession_test_support::json_table;
use gpusessiond::client::Remote;
use gpusessiond::pool::{PoolServer as _, Trouble};
use nix::sys::signal::Signal;
use rcgen::{CertificateParams, KeyPair};
use serde_json::Value;
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};
use tonic::{Code, Request, Response, Status};

use crate::administration::{administrator, from_afar};
use crate::fleet;
use crate::rotation::Machine;

/// Prepares a further server of the pool of `first`.
async fn further(first: &Server, name: &str) -> Server {
    let server = Server::prepare("libcuda.so.1", &configured(name)).await;
    std::fs::remove_dir_all(server.path("state/ca")).unwrap();
    std::fs::write(server.path("authority"), first.verb(&["pool", "export"]).stdout).unwrap();
    assert!(server.verb(&["pool", "import", server.path("authority").to_str().unwrap()]).status.success());
    server
}

fn configured(name: &str) -> String {
    format!("name = {name:?}\npeer_interval = \"1s\"\nlimits.requests_per_s = 1000")
}

async fn first() -> Server {
    Server::start_with("libcuda.so.1", &configured("gpu1")).await
}

/// Has a server take statements from others.
fn follows(server: &Server, others: &[&Server]) {
    let addresses: Vec<_> = others.iter().map(|other| format!("{:?}", other.control)).collect();
    server.set("peers", &format!("[{}]", addresses.join(", ")));
}

async fn refused(client: &mut Client) -> Option<Code> {
    client.pool.describe(DescribeRequest::default()).await.err().map(|status| status.code())
}

fn statements(server: &Server) -> Vec<Value> {
    server.json(&["statements", "list"])["statements"].as_array().unwrap().clone()
}

#[tokio::test]
async fn a_revocation_holds_on_each_server_after_a_restart_and_with_an_old_state() {
    let one = first().await;
    let (mut two, mut three) = (further(&one, "gpu2").await, further(&one, "gpu3").await);
    two.run().await;
    three.run().await;
    // A chain: the third server never asks the first one.
    follows(&two, &[&one]);
    follows(&three, &[&two]);
    let at_one = one.client("vm-1").await;
    let (mut at_two, mut at_three) = (two.again(&at_one).await, three.again(&at_one).await);
    at_two.allocate(50.0).await.unwrap();
    at_three.allocate(50.0).await.unwrap();
    assert_eq!(three.signal(Signal::SIGTERM).code(), Some(0));
    let old = std::fs::read(three.path("state/clients.json")).unwrap();
    three.run().await;

    assert!(one.verb(&["clients", "revoke", "vm-1"]).status.success());
    assert_eq!(refused(&mut one.again(&at_one).await).await, Some(Code::PermissionDenied), "at once");
    let said = one.json(&["statements"]);
    json_table::documented("gpuserver statements list", &said);
    let row = &said["statements"][0];
    assert_eq!(
        (&row["kind"], &row["name"], &row["server"]),
        (&"revoke-client".into(), &"vm-1".into(), &"gpu1".into())
    );
    assert_eq!(row["identity_sha256"].as_str().unwrap().len(), 64);
    let mut again = three.again(&at_one).await;
    eventually("the other servers refuse it", async || {
        let two = refused(&mut at_two).await == Some(Code::PermissionDenied);
        two && refused(&mut again).await == Some(Code::PermissionDenied)
    })
    .await;
    for server in [&two, &three] {
        eventually("its leases end", async || {
            server.json(&["leases"])["leases"].as_array().unwrap().is_empty()
        })
        .await;
        assert_eq!(statements(server), statements(&one));
        let trail = String::from_utf8(server.verb(&["audit"]).stdout).unwrap();
        assert!(trail.contains("statement-taken") && trail.contains("server gpu1"), "{trail}");
    }
    let status = two.json(&["status"])["server"].clone();
    assert_eq!((&status["peers"][0]["server"], &status["peers"][0]["trouble"]), (&"gpu1".into(), &"".into()));
    assert!(status["peers"][0]["contact_unix"].is_u64() && status["statements"] == 1, "{status}");

    // Without any peer after a restart.
    three.unset("peers");
    three.signal(Signal::SIGKILL);
    three.run().await;
    assert_eq!(refused(&mut three.again(&at_one).await).await, Some(Code::PermissionDenied));
    // With a state of before the revocation, until the server asks one that knows.
    three.signal(Signal::SIGKILL);
    std::fs::write(three.path("state/clients.json"), old).unwrap();
    std::fs::remove_file(three.path("state/statements.json")).unwrap();
    three.run().await;
    assert_eq!(refused(&mut three.again(&at_one).await).await, None);
    follows(&three, &[&two]);
    let mut again = three.again(&at_one).await;
    eventually("the old state brings nobody back", async || {
        refused(&mut again).await == Some(Code::PermissionDenied)
    })
    .await;

    // The name comes back with another identity alone.
    assert!(two.verb(&["clients", "forget", "vm-1"]).status.success());
    let new = two.client("vm-1").await;
    let mut new_at_three = three.again(&new).await;
    eventually("the third server takes the new identity", async || {
        refused(&mut new_at_three).await.is_none()
    })
    .await;
    for server in [&two, &three] {
        assert_eq!(refused(&mut server.again(&at_one).await).await, Some(Code::Unauthenticated));
    }
    // The first server does not ask: an administrator carries the file.
    let mut new_at_one = one.again(&new).await;
    assert_eq!(refused(&mut new_at_one).await, Some(Code::PermissionDenied));
    std::fs::write(one.path("statements"), two.verb(&["statements", "export"]).stdout).unwrap();
    let file = one.path("statements");
    let imported = one.json(&["statements", "import", file.to_str().unwrap()]);
    json_table::documented("gpuserver statements import", &imported);
    assert_eq!((&imported["statements"]["read"], &imported["statements"]["new"]), (&2.into(), &1.into()));
    assert_eq!(refused(&mut new_at_one).await, None);
}

#[tokio::test]
async fn an_administrator_is_revoked_on_each_server() {
    let one = first().await;
    let mut two = further(&one, "gpu2").await;
    two.run().await;
    follows(&two, &[&one]);
    let alice = administrator(&one, "alice");
    let works = |server: &Server, file: &std::path::Path| {
        from_afar(&server.control, file, &["status"]).status.success()
    };
    assert!(works(&two, &alice));
    let made = from_afar(&two.control, &alice, &["token", "create", "--name", "vm-*"]);
    let token = String::from_utf8(made.stdout).unwrap();
    let made = from_afar(&two.control, &alice, &["fleet", "create", "--name", "vm-*"]);
    let fleet = fleet::derived(&two, &String::from_utf8(made.stdout).unwrap(), "vm-2");
    let own = two.token(&["--name", "db-*"]);
    assert!(one.verb(&["admin", "revoke", "alice"]).status.success());
    assert!(!works(&one, &alice));
    eventually("the other server refuses the administrator", async || !works(&two, &alice)).await;
    eventually("the tokens of the administrator are revoked", async || {
        two.json(&["token", "list"])["tokens"].as_array().unwrap().len() == 1
    })
    .await;
    for (token, name) in [(token.trim(), "vm-1"), (&fleet, "vm-2")] {
        let refused = two.enrol(token, name, "m").await.unwrap_err();
        assert!(refused.message().contains("the join token is revoked"), "{refused}");
    }
    two.enrol(&own, "db-1", "m").await.unwrap();
    // At once, in the same second.
    std::fs::remove_file(&alice).unwrap();
    let alice = administrator(&one, "alice");
    assert!(works(&one, &alice) && works(&two, &alice));
    two.signal(Signal::SIGKILL);
    two.run().await;
    assert!(works(&two, &alice), "an older statement does not revoke a later certificate");
}

/// Another server of the pool, which answers as a test wishes.
struct Hostile(Box<dyn Fn(StatementsRequest) -> Result<StatementsReply, Status> + Send + Sync>);

#[tonic::async_trait]
impl Statements for Hostile {
    async fn after(&self, request: Request<StatementsRequest>) -> Result<Response<StatementsReply>, Status> {
        (self.0)(request.into_inner()).map(Response::new)
    }
}

fn key_of_pool(server: &Server) -> AuthorityKey {
    AuthorityKey::read(&server.path("state/ca"), Place::Present).unwrap()
}

/// Returns certificate and key of a server of the pool.
fn server_identity(server: &Server, name: &str) -> Identity {
    let key = KeyPair::generate().unwrap();
    let csr = CertificateParams::new(vec![]).unwrap().serialize_request(&key).unwrap().pem().unwrap();
    let unix = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let issued = key_of_pool(server).issue_server(name, &csr, unix, &SystemRandom).unwrap();
    Identity::from_pem(issued.pem, key.serialize_pem())
}

/// Starts a hostile server, and returns its address.
async fn hostile(
    server: &Server,
    answer: impl Fn(StatementsRequest) -> Result<StatementsReply, Status> + Send + Sync + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let authority = Certificate::from_pem(server.authority());
    let tls = ServerTlsConfig::new().identity(server_identity(server, "bad")).client_ca_root(authority);
    let serving = tonic::transport::Server::builder()
        .tls_config(tls)
        .unwrap()
        .add_service(StatementsServer::new(Hostile(Box::new(answer))))
        .serve_with_incoming(TcpIncoming::from(listener));
    tokio::spawn(serving);
    address
}

fn peer(server: &Server) -> Value {
    server.json(&["status"])["server"]["peers"][0].clone()
}

async fn in_trouble(server: &Server, address: &str, why: &str) {
    server.set("peers", &format!("[{address:?}]"));
    eventually(why, async || {
        let peer = peer(server);
        peer["address"] == address && peer["trouble"].as_str().is_some_and(|text| text.contains(why))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_server_of_the_pool_makes_no_statement_of_others_and_fills_nothing() {
    let one = first().await;
    let mut vm = one.client("vm-1").await;
    let key = Arc::new(key_of_pool(&one));
    let foreign = AuthorityKey::generate("foreign", 1, &SystemRandom).unwrap();
    let made = |number: u64, name: &str| Statement {
        server: "bad".into(),
        number,
        unix: 1,
        turn: 1,
        verdict: Verdict::RevokeClient { name: name.into(), identity: None },
    };
    let good = key.state(made(1, "vm-1").body()).unwrap();
    let unsigned = Signed { signature: vec![1; 70], ..good.clone() };
    let altered = Signed { body: made(2, "vm-1").body(), ..good };
    let other = foreign.state(made(3, "vm-1").body()).unwrap();
    let forged = vec![unsigned.bytes(), altered.bytes(), other.bytes(), vec![0xff; 300]];
    let reply = |statements: Vec<Vec<u8>>, last: u64, more: bool| StatementsReply {
        server: "bad".into(),
        run: vec![7; 16],
        statements,
        last,
        more,
    };

    let few = forged.clone();
    let address = hostile(&one, move |_| Ok(reply(few.clone(), 4, false))).await;
    in_trouble(&one, &address, "left out").await;
    let many: Vec<_> = forged.iter().cycle().take(256).cloned().collect();
    let address = hostile(&one, move |request| Ok(reply(many.clone(), request.after + 256, true))).await;
    in_trouble(&one, &address, "does not end").await;
    let address = hostile(&one, move |request| Ok(reply(vec![vec![0; 1 << 20]], request.after, true))).await;
    in_trouble(&one, &address, "").await;
    eventually("an answer that is too long is not read", async || peer(&one)["trouble"] != "").await;
    let address = hostile(&one, |_| Err(Status::unimplemented("no such service"))).await;
    in_trouble(&one, &address, "earlier version").await;
    assert_eq!(statements(&one), <[Value; 0]>::default());
    assert_eq!(refused(&mut vm).await, None);

    // Its signer signs what it asks for: that is bounded, and others still have room.
    let count = MAX_OF_SERVER as u64 + 500;
    let signed: Vec<_> =
        (0..count).map(|n| key.state(made(n, &format!("x-{n}")).body()).unwrap().bytes()).collect();
    let address = hostile(&one, move |request| {
        let after = if request.run == [7; 16] { request.after } else { 0 };
        let page: Vec<_> = signed.iter().skip(after as usize).take(256).cloned().collect();
        let last = after + page.len() as u64;
        Ok(reply(page, last, last < count))
    })
    .await;
    one.set("peers", &format!("[{address:?}]"));
    let begun = Instant::now();
    while !peer(&one)["trouble"].as_str().is_some_and(|why| why.contains("too many statements of server bad"))
    {
        // Thousands of signatures, by programs without optimization.
        assert!(begun.elapsed() < 6 * LONG, "{}", peer(&one));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(one.json(&["status"])["server"]["statements"], MAX_OF_SERVER);
    let called = Instant::now();
    vm.allocate(10.0).await.unwrap();
    assert!(called.elapsed() < Duration::from_secs(5), "others are served");
    assert!(one.verb(&["clients", "revoke", "vm-1"]).status.success());
    assert_eq!(statements(&one).len(), MAX_OF_SERVER + 1);
}

#[tokio::test]
async fn only_servers_of_the_pool_get_statements_and_only_the_pools_are_imported() {
    let (one, other) = (first().await, first().await);
    for server in [&one, &other] {
        assert!(server.verb(&["clients", "revoke", "vm-9"]).status.success());
    }
    let vm = one.client("vm-1").await;
    let ask = async |identity: Option<Identity>| {
        let channel = one.connect(identity).await.unwrap();
        StatementsClient::new(channel).after(StatementsRequest::default()).await.map(Response::into_inner)
    };
    for stranger in [None, Some(vm.identity.clone())] {
        assert_eq!(ask(stranger).await.unwrap_err().code(), Code::PermissionDenied);
    }
    let reply = ask(Some(server_identity(&one, "gpu2"))).await.unwrap();
    assert_eq!((reply.server.as_str(), reply.statements.len(), reply.more), ("gpu1", 1, false));

    let import = |lines: &str| {
        std::fs::write(one.path("lines"), lines).unwrap();
        let output = one.verb(&["statements", "import", one.path("lines").to_str().unwrap()]);
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let foreign = String::from_utf8(other.verb(&["statements", "export"]).stdout).unwrap();
    let (done, said) = import(&foreign);
    assert!(!done && said.contains("no present authority of this pool has signed it"), "{said}");
    let (done, said) = import("garbage");
    assert!(!done && said.contains("is no statement"), "{said}");
    assert!(import("").0);
    assert_eq!(statements(&one).len(), 1);
    // A server of another pool does not answer this one.
    in_trouble(&one, &other.control, "does not answer").await;
}

#[tokio::test]
async fn a_revoked_server_is_refused_by_a_client_that_hears_of_it_from_another_one() {
    let one = first().await;
    let mut two = further(&one, "gpu2").await;
    two.run().await;
    follows(&two, &[&one]);
    let vm = Machine::joined(&one, "vm-1").await;
    vm.knows(&[&one, &two]);
    let mut daemon = vm.daemon();
    let (at_one, at_two) = (
        Remote::new(&one.control, &daemon.identity).unwrap(),
        Remote::new(&two.control, &daemon.identity).unwrap(),
    );
    at_two.describe(None).await.unwrap();
    let own = one.verb(&["pool", "revoke", "gpu1"]);
    assert!(!own.status.success() && String::from_utf8_lossy(&own.stderr).contains("gpu1 itself"));
    let revoked = one.json(&["pool", "revoke", "gpu2"]);
    json_table::documented("gpuserver pool revoke", &revoked);

    daemon.renewer.renew_if_due().await;
    let refuses = async |remote: &Remote| {
        let error = remote.describe(None).await.unwrap_err();
        assert!(
            error.trouble == Trouble::Refused && error.to_string().contains("gpu2 is revoked"),
            "{error}"
        );
    };
    refuses(&at_two).await;
    at_one.describe(None).await.unwrap();
    // After a restart of the daemon, and without a word of the other server.
    let again = Remote::new(&two.control, &vm.home.load().unwrap()).unwrap();
    refuses(&again).await;
    // The other servers refuse it, too.
    eventually("the revoked server gets no statements", async || {
        peer(&two)["trouble"].as_str().is_some_and(|why| why.contains("server gpu2 is revoked"))
    })
    .await;
}

#[tokio::test]
async fn a_rotation_of_the_authority_keeps_revocations() {
    let one = first().await;
    let old = one.client("vm-1").await;
    assert!(one.verb(&["clients", "revoke", "vm-1"]).status.success());
    for words in [&["begin"][..], &["switch", "--force"], &["finish", "--force"]] {
        assert!(one.verb(&[&["pool", "rotate"], words].concat()).status.success());
    }
    let authority = one.json(&["status"])["server"]["authority_sha256"].clone();
    assert_eq!(statements(&one)[0]["authority_sha256"], authority);
    let mut two = further(&one, "gpu2").await;
    two.run().await;
    follows(&two, &[&one]);
    eventually("a server that never knew the old authority takes them", async || statements(&two).len() == 1)
        .await;
    assert_eq!(two.json(&["clients"])["clients"][0]["state"], "revoked");
    // The old authority signed its certificate, which no server accepts any more.
    let refused = match two.connect(Some(old.identity)).await {
        Err(_) => true,
        Ok(channel) => PoolClient::new(channel).describe(DescribeRequest::default()).await.is_err(),
    };
    assert!(refused);
}

#[tokio::test]
async fn verbs_make_statements_while_no_server_runs() {
    let mut one = first().await;
    let vm = one.client("vm-1").await;
    assert_eq!(one.signal(Signal::SIGTERM).code(), Some(0));
    // Without the authority's key the verb fails, and the revocation holds on this server.
    let keys = one.path("state/ca");
    std::fs::rename(&keys, one.path("away")).unwrap();
    let alone = one.verb(&["clients", "revoke", "vm-3"]);
    assert!(!alone.status.success(), "{alone:?}");
    assert!(String::from_utf8_lossy(&alone.stderr).contains("not on the pool's other ones"), "{alone:?}");
    std::fs::rename(one.path("away"), &keys).unwrap();
    assert!(one.verb(&["clients", "revoke", "vm-1"]).status.success());
    assert!(one.verb(&["clients", "forget", "vm-2"]).status.success());
    one.run().await;
    let states = one.json(&["clients"])["clients"].clone();
    assert!(states.as_array().unwrap().iter().any(|row| row["name"] == "vm-3" && row["state"] == "revoked"));
    let kinds: Vec<_> = statements(&one).iter().map(|row| row["kind"].clone()).collect();
    assert_eq!(kinds, ["revoke-client", "forget-client"]);
    assert_eq!(refused(&mut one.again(&vm).await).await, Some(Code::PermissionDenied));
}
