//! A server whose authority is in a signer's process.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use gpuserver::signer::link::Link;
use gpuserver::signer::{Operation, Privileged, Step, Why};
use gpusession_proto::control::RenewIdentityRequest;
use gpusession_test_support::{Artefact, artefact};
use rcgen::{CertificateParams, KeyPair};
use tonic::Code;

use crate::administration::administrator;
use gpusession_test_server::{Server, eventually, exists};

/// User of the server. The tests need root, for two users.
const SERVER: u32 = 65534;

struct Signer {
    process: Option<Child>,
    socket: PathBuf,
}

impl Signer {
    fn command() -> Command {
        Command::new(artefact("gpuserver", Artefact::Program("gpuserver-signer")))
    }

    async fn start(server: &Server) -> Self {
        let socket = server.path("sign.sock");
        let _ = std::fs::remove_file(&socket);
        let user = nix::unistd::User::from_uid(SERVER.into()).unwrap().expect("a user of that number").name;
        let log = std::fs::File::options().create(true).append(true).open(server.path("signer.log")).unwrap();
        let process = Self::command()
            .args(["serve", "--user", &user, "--listen"])
            .arg(&socket)
            .arg("--folder")
            .arg(server.path("signer"))
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .expect("gpuserver-signer starts");
        let signer = Self { process: Some(process), socket };
        eventually("the signer listens", async || UnixStream::connect(&signer.socket).is_ok()).await;
        std::fs::set_permissions(&signer.socket, std::fs::Permissions::from_mode(0o666)).unwrap();
        signer
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }
}

impl Drop for Signer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Gives a stopped server the configuration of a unit: a signer, which has nothing yet, and users.
fn upgrade(server: &mut Server) {
    server.configure("libcuda.so.1", &format!("signer = {:?}", server.path("sign.sock")));
    server.authority_folder = "signer";
    server.user = Some(SERVER);
    for folder in ["signer", "run"] {
        std::fs::create_dir_all(server.path(folder)).unwrap();
    }
    std::fs::set_permissions(server.folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let own = format!("{SERVER}:{SERVER}");
    let mut give = Command::new("chown");
    give.args(["-R", &own]).args(["state", "run"].map(|folder| server.path(folder)));
    assert!(give.status().unwrap().success());
}

/// Does what root does before each start of the unit.
fn prepare(server: &Server) -> Output {
    Signer::command()
        .arg("prepare")
        .env("GPUSERVER_CONF", server.path("gpuserver.toml"))
        .output()
        .expect("gpuserver-signer runs")
}

fn csr() -> String {
    let key = KeyPair::generate().unwrap();
    CertificateParams::new(vec![]).unwrap().serialize_request(&key).unwrap().pem().unwrap()
}

#[tokio::test]
async fn an_upgrade_moves_the_authority_to_the_signer_and_clients_stay_joined() {
    if !root() {
        return;
    }
    let mut server = Server::prepare("libcuda.so.1", "").await;
    server.run().await;
    let mut client = server.client("vm-1").await;
    let token = server.token(&["--uses", "3", "--from", "127.0.0.0/8"]);
    let before = server.authority();
    server.signal(nix::sys::signal::Signal::SIGTERM);
    upgrade(&mut server);
    let mut signer = Signer::start(&server).await;
    // A server that was not prepared does not start, and names the cause.
    let early = server.command(&["serve"]).output().unwrap();
    assert!(String::from_utf8_lossy(&early.stderr).contains("holds no pool authority"), "{early:?}");
    let prepared = prepare(&server);
    assert!(prepared.status.success(), "{prepared:?}");
    assert!(!exists(&server.path("state/ca")) && !exists(&server.path("state/tokens.json")));
    assert_eq!(server.authority(), before);
    assert!(prepare(&server).status.success(), "again, with nothing to move");

    server.run().await;
    // The earlier certificate serves and renews, and the earlier token admits.
    let channel = server.connect(Some(client.identity.clone())).await.unwrap();
    client.pool = gpusession_proto::control::pool_client::PoolClient::new(channel);
    client.pool.renew_identity(RenewIdentityRequest { csr_pem: csr(), proof: Vec::new() }).await.unwrap();
    server.enrol(&token, "vm-2", "m2").await.unwrap();
    let ids = server.json(&["token", "list"])["tokens"].as_array().unwrap().len();
    assert_eq!(ids, 2, "vm-1's used-up one, and this");

    // The server itself has signed a checkpoint at its stop, and the signer signs the next one.
    server.signal(nix::sys::signal::Signal::SIGTERM);
    let verified = server.verb(&["audit", "verify", "--json"]);
    assert!(verified.status.success(), "{verified:?}");
    let verified: serde_json::Value = serde_json::from_slice(&verified.stdout).unwrap();
    assert_eq!(verified["audit"]["checkpoints"], 2, "{verified}");
    server.run().await;
    // The server's user reads no key, and the signer does for it what clients need, no more.
    let key = server.path("signer/authority.key");
    assert_eq!(std::fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    let reads = Command::new("cat").arg(&key).uid_of_server().output().unwrap();
    assert!(!reads.status.success());
    // Administrators and rotations need root, who runs these verbs.
    administrator(&server, "alice");
    let rotated = |words: &[&str]| server.json(&[&["pool", "rotate"], words].concat())["rotation"].clone();
    assert_eq!(rotated(&["begin"])["phase"], "begun");
    assert_eq!(rotated(&["switch", "--force"])["phase"], "switched");
    assert_eq!(rotated(&["finish", "--force"])["phase"], "none");
    assert_ne!(server.authority(), before);
    let late = server.enrol(&token, "vm-3", "m3").await.unwrap_err();
    assert_eq!(late.code(), Code::PermissionDenied, "{late}");
    let exported = server.verb(&["pool", "export"]);
    assert!(String::from_utf8_lossy(&exported.stdout).contains("PRIVATE KEY"), "{exported:?}");

    // Without its signer, the server serves its clients, and says why no machine joins.
    let token = server.token(&[]);
    signer.kill();
    let refused = server.enrol(&token, "vm-4", "m4").await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal);
    let listed = server.verb(&["token", "list"]);
    let said = String::from_utf8_lossy(&listed.stderr).into_owned();
    assert!(said.contains("the signer does not answer at") && said.contains("systemctl status"), "{said}");
    let _signer = Signer::start(&server).await;
    server.enrol(&token, "vm-4", "m4").await.unwrap();
    let log = std::fs::read_to_string(server.path("signer.log")).unwrap();
    for line in
        ["signed for client vm-1: renewal", "signed for client vm-2: join with token", "signed for server s1"]
    {
        assert!(log.contains(line), "{line}: {log}");
    }
}

/// Runs a command as the server's user.
trait OfServer {
    fn uid_of_server(&mut self) -> &mut Self;
}

impl OfServer for Command {
    fn uid_of_server(&mut self) -> &mut Self {
        self.uid(SERVER).gid(SERVER)
    }
}

#[tokio::test]
async fn a_process_of_the_servers_user_gets_from_the_signer_what_clients_need_alone() {
    if !root() {
        return;
    }
    let mut server = Server::prepare("libcuda.so.1", "").await;
    upgrade(&mut server);
    let _signer = Signer::start(&server).await;
    assert!(prepare(&server).status.success());
    let link = Link::Socket(server.path("sign.sock"));
    let gpuserver = server.command(&["pool", "export"]).uid_of_server().output().unwrap();
    let said = String::from_utf8_lossy(&gpuserver.stderr).into_owned();
    assert!(!gpuserver.status.success() && said.contains("for root alone"), "{said}");
    for words in [
        &["admin", "create", "eve", "--out", "/dev/null/x"][..],
        &["pool", "rotate", "begin"],
        &["pool", "admit", "gpu9"],
    ] {
        let tried = server.command(words).uid_of_server().output().unwrap();
        assert!(String::from_utf8_lossy(&tried.stderr).contains("for root alone"), "{words:?}: {tried:?}");
    }
    // A stranger gets nothing at all.
    let stranger = Command::new(artefact("gpuserver", Artefact::Program("gpuserver")))
        .args(["pool", "export"])
        .env("GPUSERVER_CONF", server.path("gpuserver.toml"))
        .uid(12345)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&stranger.stderr).into_owned();
    assert!(said.contains("is of uid 12345"), "{said}");
    // Root's permission is for one operation; garbage disturbs no other caller.
    link.ask(Operation::Permit(Privileged::Rotate(Step::Begin(None)))).unwrap();
    for bad in [&[0xff; 4][..], &[4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], &[1]] {
        use std::io::Write;
        UnixStream::connect(server.path("sign.sock")).unwrap().write_all(bad).unwrap();
    }
    link.present().unwrap();
    let twice = link.ask(Operation::Init { name: "s1".into() }).unwrap_err();
    assert_eq!(twice.why, Why::Exists);
}
