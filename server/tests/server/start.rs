//! The start of a server: its configuration, its environment, what it prints.

use std::time::Duration;

use gpuserver::config::keys;
use gpuserver::limits::{LIMITS, TOP_LEVEL};
use gpusession_proto::control::pool_client::PoolClient;
use gpusession_proto::control::{AllocateRequest, TakeWorkersRequest};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;
use rcgen::{CertificateParams, KeyPair};
use tonic::transport::Identity;

use gpusession_test_server::Server;

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
async fn a_server_waits_for_the_lock_that_a_child_of_a_killed_one_still_has() {
    let mut server = Server::start().await;
    server.signal(Signal::SIGKILL);
    let lock = std::fs::File::options().write(true).open(server.path("state/lock")).unwrap();
    // Waits for a child that the killed server has forked.
    let lock = Flock::lock(lock, FlockArg::LockExclusive).unwrap();
    let held = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        drop(lock);
    });
    server.run().await;
    assert!(held.is_finished(), "it started without the lock");
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
    let groups = "limits.group.physics.clients = [\"p-*\"]\nlimits.group.biology.clients = [\"b-*\"]\n";
    let notes = |lines: &str| {
        server.configure("no-probe.so", &format!("{lines}{groups}"));
        String::from_utf8_lossy(&server.verb(&["check-config"]).stdout).into_owned()
    };
    let both = "clients of biology, physics use the same GPUs";
    assert!(notes("").contains(both) && notes("sharing = \"exclusive\"\n").contains(both));
    let apart = notes("sharing = \"exclusive\"\nscrub = \"verify\"\n");
    assert!(apart.contains("good") && !apart.contains("use the same GPUs"), "{apart}");
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
    for limit in LIMITS.iter().filter(|l| !TOP_LEVEL.contains(&l.name)) {
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
