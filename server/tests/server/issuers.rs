//! Servers that hold no authority's key, and the issuers that sign for them.

use std::path::Path;
use std::process::Output;

use gpuserver::signer::{Done, Operation, Outcome, Privileged, Step};
use gpusession_proto::control::issuer_client::IssuerClient;
use gpusession_proto::control::pool_client::PoolClient;
use gpusession_proto::control::{DescribeRequest, IssuerRequest, RenewIdentityRequest, ServerJoinRequest};
use gpusession_proto::statement::Verdict;
use gpusession_proto::{join, message};
use gpusession_test_server::{Server, eventually};
use gpusession_test_support::json_table;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rcgen::{CertificateParams, KeyPair, SigningKey as _};
use serde_json::Value;
use tonic::transport::Identity;
use tonic::{Code, Status};

use crate::{fleet, renew};

fn configured(name: &str) -> String {
    format!("name = {name:?}\npeer_interval = \"1s\"\nlimits.requests_per_s = 1000")
}

async fn issuer() -> Server {
    Server::start_with("libcuda.so.1", &configured("gpu1")).await
}

fn admit(issuer: &Server, name: &str) -> String {
    let made = issuer.json(&["pool", "admit", name, "--from", "127.0.0.1,10.0.0.0/8"]);
    json_table::documented("gpuserver pool admit", &made);
    made["token"]["token"].as_str().unwrap().to_owned()
}

/// A host on which no pool was made.
async fn host(name: &str) -> Server {
    let server = Server::prepare("libcuda.so.1", &configured(name)).await;
    std::fs::remove_dir_all(server.path("state")).unwrap();
    server
}

/// Has a server join the pool of an issuer, without its key.
async fn member(issuer: &Server, name: &str) -> Server {
    let mut server = host(name).await;
    let joined = server.json(&["pool", "join", &issuer.control, &admit(issuer, name)]);
    json_table::documented("gpuserver pool join", &joined);
    server.authority_folder = "pool";
    std::fs::create_dir_all(server.path("pool")).unwrap();
    std::fs::write(server.path("pool/authority.pem"), issuer.authority()).unwrap();
    server.run().await;
    server
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn refused(server: &Server, words: &[&str]) -> String {
    let output = server.verb(words);
    assert!(!output.status.success(), "{words:?}: {output:?}");
    text(&output)
}

fn csr() -> String {
    CertificateParams::new(vec![])
        .and_then(|params| params.serialize_request(&KeyPair::generate()?))
        .and_then(|request| request.pem())
        .unwrap()
}

/// Returns certificate and key of a member.
fn identity(server: &Server) -> Identity {
    let text = std::fs::read_to_string(server.path("state/member.json")).unwrap();
    let document: Value = serde_json::from_str(&text).unwrap();
    let held = &document["certificates"][0];
    Identity::from_pem(held["certificate"].as_str().unwrap(), held["key"].as_str().unwrap())
}

async fn ask(issuer: &Server, identity: Option<Identity>, operation: Vec<u8>) -> Result<Outcome, Status> {
    let mut client = IssuerClient::new(issuer.connect(identity).await.unwrap());
    let reply = client.ask(IssuerRequest { operation, report: None }).await?.into_inner();
    Ok(message::decode(&reply.outcome).unwrap())
}

fn encoded(operation: &Operation) -> Vec<u8> {
    message::encode(operation).split_off(4)
}

/// Returns `true` if a file below a folder has these bytes.
fn holds(folder: &Path, bytes: &[u8]) -> bool {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()).any(|entry| {
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => holds(&entry.path(), bytes),
            kind if kind.is_file() && entry.file_name() != "libcuda.so.1" => {
                std::fs::read(entry.path()).unwrap().windows(bytes.len()).any(|part| part == bytes)
            }
            _ => false,
        }
    })
}

#[tokio::test]
async fn a_server_without_the_key_serves_joins_clients_and_outlives_its_issuer() {
    let mut one = issuer().await;
    let mut two = member(&one, "gpu2").await;
    let mode = std::fs::metadata(two.path("state/member.json")).unwrap().permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);
    // The middle of the key, as any of its encodings has it.
    let key = std::fs::read_to_string(one.path("state/ca/authority.key")).unwrap();
    let line = key.lines().nth(1).unwrap();
    assert!(holds(one.folder.path(), line.as_bytes()) && !holds(two.folder.path(), line.as_bytes()));

    let token = one.token(&["--uses", "3", "--from", "127.0.0.0/8"]);
    let (certificate, key) = two.enrol(&token, "vm-1", "m1").await.unwrap();
    let vm = Identity::from_pem(certificate, &key);
    let mut vm = gpusession_test_server::Client {
        name: "vm-1".into(),
        pool: PoolClient::new(two.connect(Some(vm.clone())).await.unwrap()),
        identity: vm,
    };
    let lease = vm.allocate(50.0).await.unwrap();
    // A server that took over the member, and saw the certificate, has no signature of its key.
    for (proof, code) in [(Vec::new(), Code::FailedPrecondition), (vec![7; 70], Code::InvalidArgument)] {
        let request = RenewIdentityRequest { csr_pem: csr(), proof };
        let refused = vm.pool.renew_identity(request).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
    }
    let csr_pem = csr();
    let proof = KeyPair::from_pem(&key).unwrap().sign(&join::renewal(&csr_pem)).unwrap();
    vm.pool.renew_identity(RenewIdentityRequest { csr_pem, proof }).await.unwrap();
    one.again(&vm).await.pool.describe(DescribeRequest::default()).await.unwrap();
    // A name that joined through one server is taken at each of them.
    let taken = one.enrol(&token, "vm-1", "m2").await.unwrap_err();
    assert_eq!(taken.code(), Code::AlreadyExists, "{taken}");
    one.enrol(&one.token(&[]), "vm-2", "m2").await.unwrap();
    let key = fleet::key(&one, &["--name", "vm-*"]);
    two.enrol(&fleet::derived(&two, &key, "vm-4"), "vm-4", "m4").await.unwrap();
    let other = two.enrol(&fleet::derived(&two, &key, "vm-5"), "vm-6", "m5").await.unwrap_err();
    assert!(other.message().contains("derived for another name than \"vm-6\""), "{other}");
    let taken = two.enrol(&token, "vm-2", "m3").await.unwrap_err();
    assert!(taken.message().contains("vm-2"), "{taken}");

    // Verbs of issuers, while it runs.
    let export = refused(&two, &["pool", "export"]);
    assert!(export.contains("this server is no issuer: run it on gpu1"), "{export}");
    for words in [
        &["token", "create"][..],
        &["fleet", "create", "--name", "vm-*"],
        &["admin", "create", "eve", "--out", two.path("eve.pem").to_str().unwrap()],
        &["pool", "rotate", "begin"],
        &["pool", "admit", "gpu3"],
    ] {
        let said = refused(&two, words);
        assert!(said.contains("this server is no issuer: run it on gpu1"), "{words:?}: {said}");
    }

    // Each statement has the name of the server where it was made, and holds at the issuer at once.
    assert!(two.verb(&["clients", "revoke", "vm-2"]).status.success());
    let stated = one.json(&["statements"])["statements"][0].clone();
    assert_eq!((&stated["server"], &stated["name"]), (&"gpu2".into(), &"vm-2".into()));
    // Revocations of the issuer reach the member without `peers`.
    assert!(one.verb(&["clients", "revoke", "vm-9"]).status.success());
    eventually("the member has the issuer's statement", async || {
        text(&two.verb(&["statements"])).contains("vm-9")
    })
    .await;
    let trail = text(&one.verb(&["audit"]));
    assert!(trail.contains("server-join") && trail.contains("server gpu2"), "{trail}");

    assert_eq!(one.signal(Signal::SIGTERM).code(), Some(0));
    let renewed = vm.pool.renew(renew(&[&lease.id])).await.unwrap().into_inner();
    assert!(!renewed.leases[0].lost, "{renewed:?}");
    let away = two.enrol(&token, "vm-3", "m4").await.unwrap_err();
    assert_eq!(away.code(), Code::Unavailable, "{away}");
    assert!(away.message().contains("no issuer of the pool answers: gpu1 at "), "{away}");
    eventually("status names the issuer", async || {
        text(&two.verb(&["status"])).contains("no issuer of the pool answers: gpu1")
    })
    .await;
    two.signal(Signal::SIGTERM);
    // Verbs on the files of a server that does not run.
    let offline = refused(&two, &["token", "create"]);
    assert!(offline.contains("this server is no issuer"), "{offline}");
    for words in [&["pool", "init"][..], &["pool", "join", "127.0.0.1:1", "gpss-x"]] {
        refused(&two, words);
    }
    two.run().await;
    let mut vm = two.again(&vm).await;
    assert!(!vm.pool.renew(renew(&[&lease.id])).await.unwrap().into_inner().leases[0].lost);
    vm.allocate(10.0).await.unwrap();
    let verified = two.verb(&["audit", "verify"]);
    assert!(verified.status.success(), "{verified:?}");
}

#[tokio::test]
async fn a_token_for_a_server_admits_that_server_once_and_nothing_else() {
    let one = issuer().await;
    let token = admit(&one, "gpu2");
    assert_eq!(one.json(&["token", "list"])["tokens"][0]["name_pattern"], "server gpu2");
    // No client takes it, whatever its text begins with.
    for text in [token.clone(), token.replace("gpss-", "gpsj-")] {
        one.enrol(&text, "gpu2", "m").await.unwrap_err();
    }
    let three = host("gpu3").await;
    let client = one.token(&["--name", "gpu3"]);
    for bad in [token.as_str(), &client, &client.replace("gpsj-", "gpss-"), "garbage"] {
        refused(&three, &["pool", "join", &one.control, bad]);
        assert!(!three.path("state/member.json").exists(), "{bad}");
    }
    // A server of another pool gets nothing of the token.
    let mut other = issuer().await;
    let foreign = refused(&three, &["pool", "join", &other.control, &admit(&one, "gpu3")]);
    assert!(foreign.contains("not of the pool that the join token is for"), "{foreign}");
    let own = refused(&one, &["pool", "admit", "gpu1"]);
    assert!(own.contains("is this server itself"), "{own}");
    let has_key = refused(&one, &["pool", "join", &other.control, &admit(&other, "gpu1x")]);
    assert!(has_key.contains("a running gpuserver uses"), "{has_key}");
    other.signal(Signal::SIGTERM);
    let has_key = refused(&other, &["pool", "join", &one.control, &admit(&one, "gpu3")]);
    assert!(has_key.contains("holds the key"), "{has_key}");

    let mut two = host("gpu2").await;
    assert!(two.verb(&["pool", "join", &one.control, &token]).status.success());
    let twice = refused(&two, &["pool", "join", &one.control, &admit(&one, "gpu2")]);
    assert!(twice.contains("holds the membership in the pool of issuer gpu1"), "{twice}");
    std::fs::remove_file(two.path("state/member.json")).unwrap();
    let used = refused(&two, &["pool", "join", &one.control, &token]);
    assert!(used.contains("has admitted server gpu2 already"), "{used}");
    let malformed =
        ServerJoinRequest { token: vec![1], proof: vec![2; 32], name: "gpu9".into(), csr_pem: csr() };
    let mut client = IssuerClient::new(one.connect(None).await.unwrap());
    assert_eq!(client.join(malformed).await.unwrap_err().code(), Code::InvalidArgument);
    // With another token, it comes back; under another name, it does not start.
    assert!(two.verb(&["pool", "join", &one.control, &admit(&one, "gpu2")]).status.success());
    two.run().await;
    two.signal(Signal::SIGTERM);
    two.configure("libcuda.so.1", &configured("gpu4"));
    let renamed = two.command(&["serve"]).output().unwrap();
    assert!(text(&renamed).contains("the pool admitted this server as gpu2"), "{renamed:?}");
}

#[tokio::test]
async fn an_issuer_does_for_a_server_of_the_pool_what_members_need_alone() {
    let one = issuer().await;
    let two = member(&one, "gpu2").await;
    let vm = one.client("vm-1").await;
    let bundle = || encoded(&Operation::Bundle);
    for stranger in [None, Some(vm.identity.clone())] {
        assert_eq!(ask(&one, stranger, bundle()).await.unwrap_err().code(), Code::PermissionDenied);
    }
    let gpu2 = || Some(identity(&two));
    assert!(matches!(ask(&one, gpu2(), bundle()).await, Ok(Ok(Done::Bundle(_)))));
    let admit = Privileged::AdmitServer { name: "gpu3".into(), ttl: 60, from: Vec::new() };
    let administrator = Privileged::Administrator { name: "eve".into(), csr_pem: csr() };
    let state = |verdict| Operation::State { verdict, turn: 0 };
    for operation in [
        Operation::Export,
        Operation::Present,
        Operation::Name("gpu2".into()),
        Operation::Privileged(Privileged::Rotate(Step::Begin(None))),
        Operation::Privileged(administrator.clone()),
        Operation::Privileged(admit.clone()),
        Operation::Permit(admit),
        Operation::Server { name: "gpu1".into(), csr_pem: csr(), authority: [0; 32] },
        Operation::Tokens { after: String::new() },
        Operation::Verifier,
        // Without a signature of the server or the client that it is for.
        state(Verdict::ForgetClient { name: "vm-1".into(), identity: None }),
        Operation::Renew { present: Vec::new(), csr_pem: csr(), authority: [0; 32] },
        Operation::Init { name: "gpu2".into() },
    ] {
        let refused = ask(&one, gpu2(), encoded(&operation)).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{operation:?}");
    }
    for garbage in [vec![0xff; 3], vec![0; 70 << 10]] {
        assert!(ask(&one, gpu2(), garbage).await.is_err());
    }
    for verdict in [
        Verdict::RevokeServer { name: "gpu1".into() },
        Verdict::ForgetClient { name: "vm-1".into(), identity: None },
    ] {
        let order = Operation::StateFor { present: Vec::new(), verdict, turn: 0, proof: vec![7; 70] };
        assert!(ask(&one, gpu2(), encoded(&order)).await.unwrap().is_err());
    }
    // A member is no issuer of others.
    assert_eq!(ask(&two, gpu2(), bundle()).await.unwrap_err().code(), Code::FailedPrecondition);

    let shown = gpu2();
    assert!(one.verb(&["pool", "revoke", "gpu2"]).status.success());
    let refused = ask(&one, shown, bundle()).await.unwrap_err();
    assert!(
        refused.code() == Code::PermissionDenied && refused.message().contains("is revoked"),
        "{refused}"
    );
    let late = two.enrol(&one.token(&[]), "vm-5", "m5").await.unwrap_err();
    assert!(late.message().contains("server gpu2 is revoked"), "{late}");
    let again = self::refused(&one, &["pool", "admit", "gpu2"]);
    assert!(again.contains("revoked for ever"), "{again}");
}

#[tokio::test]
async fn an_issuer_gives_its_key_up_and_keeps_its_clients() {
    let (one, other) = (issuer().await, issuer().await);
    let mut two = host("gpu2").await;
    let exported = two.path("exported");
    std::fs::write(&exported, one.verb(&["pool", "export"]).stdout).unwrap();
    assert!(two.verb(&["pool", "import", exported.to_str().unwrap()]).status.success());
    std::fs::remove_file(exported).unwrap();
    two.run().await;
    let mut vm = two.client("vm-1").await;
    let lease = vm.allocate(50.0).await.unwrap();
    let own = two.token(&[]);
    let key = std::fs::read_to_string(two.path("state/ca/authority.key")).unwrap();
    let line = key.lines().nth(1).unwrap().as_bytes();

    let token = admit(&one, "gpu2");
    let running = refused(&two, &["pool", "yield", &one.control, &token]);
    assert!(running.contains("a running gpuserver uses"), "{running}");
    two.signal(Signal::SIGTERM);
    let foreign = refused(&two, &["pool", "yield", &other.control, &admit(&other, "gpu2")]);
    assert!(foreign.contains("the token is of another pool") && holds(two.folder.path(), line), "{foreign}");
    let yielded = two.json(&["pool", "yield", &one.control, &token]);
    json_table::documented("gpuserver pool yield", &yielded);
    assert!(!holds(two.folder.path(), line));
    // A repetition, as after a loss of power, needs no other token.
    two.json(&["pool", "yield", &one.control]);

    two.authority_folder = "pool";
    std::fs::create_dir_all(two.path("pool")).unwrap();
    std::fs::write(two.path("pool/authority.pem"), one.authority()).unwrap();
    two.run().await;
    let mut vm = two.again(&vm).await;
    let renewed = vm.pool.renew(renew(&[&lease.id])).await.unwrap().into_inner();
    assert!(!renewed.leases[0].lost, "{renewed:?}");
    let export = refused(&two, &["pool", "export"]);
    assert!(export.contains("this server is no issuer: run it on gpu1"), "{export}");
    let void = two.enrol(&own, "vm-2", "m2").await.unwrap_err();
    assert!(void.message().contains("not one of this pool"), "{void}");
    two.enrol(&one.token(&[]), "vm-2", "m2").await.unwrap();
    two.signal(Signal::SIGTERM);
    let server = host("gpu3").await;
    let keyless = refused(&server, &["pool", "yield", &one.control, &admit(&one, "gpu3")]);
    assert!(keyless.contains("this server holds no authority's key"), "{keyless}");
}

#[tokio::test]
async fn a_rotation_reaches_a_server_without_the_key_and_waits_for_its_clients() {
    let one = issuer().await;
    let two = member(&one, "gpu2").await;
    let (certificate, key) = two.enrol(&one.token(&[]), "vm-1", "m1").await.unwrap();
    let connected = async |certificate: &str, key: &str| {
        PoolClient::new(two.connect(Some(Identity::from_pem(certificate, key))).await.unwrap())
    };
    let mut vm = connected(&certificate, &key).await;
    vm.describe(DescribeRequest::default()).await.unwrap();
    assert!(
        one.verb(&["admin", "create", "eve", "--out", one.path("eve.pem").to_str().unwrap()])
            .status
            .success()
    );
    let whole = || one.json(&["pool", "rotate", "status"]);
    let status = || whole()["rotation"].clone();
    let authority = |server: &Server| server.json(&["status"])["server"]["authority_sha256"].clone();
    let before = authority(&one);
    let certificates = || {
        let text = std::fs::read_to_string(two.path("state/member.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["certificates"].as_array().unwrap().len()
    };
    let pid = two.json(&["status"])["server"]["pid"].as_i64().unwrap();
    let send = |signal| kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
    send(Signal::SIGSTOP);
    assert!(one.verb(&["pool", "rotate", "begin"]).status.success());
    let begun = whole();
    assert_eq!(begun["rotation"]["servers"][0]["name"], "gpu2", "it has not reported yet: {begun}");
    let said = refused(&one, &["pool", "rotate", "switch"]);
    assert!(said.contains("servers gpu2: called in the last 30 days"), "{said}");
    send(Signal::SIGCONT);
    eventually("the member has a certificate of each authority", async || certificates() == 2).await;
    assert_eq!(authority(&two), before);
    eventually("the issuer waits for the member's client", async || {
        let status = status();
        let client = &status["clients"][0];
        status["servers"] == serde_json::json!([])
            && (&client["name"], &client["server"]) == (&"vm-1".into(), &"gpu2".into())
    })
    .await;
    json_table::documented_together("gpuserver pool rotate status", &[begun, whole()]);
    let said = refused(&one, &["pool", "rotate", "switch"]);
    assert!(said.contains("clients vm-1 of server gpu2: called in the last 30 days"), "{said}");
    let new = data_encoding::HEXLOWER.decode(status()["new_sha256"].as_str().unwrap().as_bytes()).unwrap();
    let trusts = DescribeRequest { authorities: vec![new], ..DescribeRequest::default() };
    vm.describe(trusts).await.unwrap();
    eventually("the member reports the client's trust", async || {
        one.verb(&["pool", "rotate", "switch"]).status.success()
    })
    .await;
    // The member has to report for this phase again, whatever it said of the one before.
    let said = refused(&one, &["pool", "rotate", "finish"]);
    assert!(said.contains("servers gpu2: ") || said.contains("vm-1 of server gpu2"), "{said}");
    eventually("the member has the new authority", async || authority(&two) == authority(&one)).await;
    assert_ne!(authority(&two), before);
    eventually("the issuer waits for the client's certificate", async || {
        refused(&one, &["pool", "rotate", "finish"]).contains("clients vm-1 of server gpu2")
    })
    .await;
    let own = KeyPair::generate().unwrap();
    let csr_pem = CertificateParams::new(vec![]).unwrap().serialize_request(&own).unwrap().pem().unwrap();
    let proof = KeyPair::from_pem(&key).unwrap().sign(&join::renewal(&csr_pem)).unwrap();
    let renewed = vm.renew_identity(RenewIdentityRequest { csr_pem, proof }).await.unwrap().into_inner();
    let mut vm = connected(&renewed.certificate_pem, &own.serialize_pem()).await;
    vm.describe(DescribeRequest::default()).await.unwrap();
    eventually("the member reports the client's certificate", async || {
        one.verb(&["pool", "rotate", "finish"]).status.success()
    })
    .await;
    let rotation = || two.json(&["pool", "rotate", "status"])["rotation"]["phase"].clone();
    eventually("the member dropped the old authority", async || rotation() == "none").await;
    std::fs::write(two.path("pool/authority.pem"), one.authority()).unwrap();
    two.enrol(&one.token(&[]), "vm-2", "m2").await.unwrap();
}
