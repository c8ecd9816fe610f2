//! Attacks on the restrictions of workers.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt as _;

use gpusession_proto::control::DescribeRequest;
use gpusession_test_support::{Artefact, artefact};
use nix::libc;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use crate::site::prepare;
use gpusession_test_server::{Server, eventually};

/// Returns a filter that makes the host's kernel look as if it had no Landlock.
fn no_landlock() -> BpfProgram {
    let call = BTreeMap::from([(libc::SYS_landlock_create_ruleset, Vec::new())]);
    let answer = SeccompAction::Errno(libc::ENOSYS as u32);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    SeccompFilter::new(call, SeccompAction::Allow, answer, arch).unwrap().try_into().unwrap()
}

#[tokio::test]
async fn no_port_opens_on_a_host_without_landlock() {
    let server = prepare("").await;
    for verb in ["serve", "check-isolation"] {
        let mut command = server.command(&[verb]);
        let filter = no_landlock();
        // SAFETY: the filter was made before the fork; installing it makes two system calls.
        unsafe {
            command.pre_exec(move || {
                seccompiler::apply_filter(&filter)
                    .map_err(|_| std::io::Error::from(nix::errno::Errno::EINVAL))
            });
        }
        let done = command.output().unwrap();
        let said = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
        assert!(
            !done.status.success() && said.contains("landlock: ") && !said.contains("ready on"),
            "{said}"
        );
        assert!(said.contains("isolation = \"try\""), "the remedy: {said}");
    }
}

#[tokio::test]
async fn each_worker_gives_up_its_rights() {
    let mut server = prepare("isolation = \"require\"").await;
    server.run().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    vm.take(&lease.id).await.unwrap();
    let warm = |w: &serde_json::Value| w["state"] == "warm" || w["state"] == "taken";
    eventually("workers are ready", async || server.workers().iter().filter(|w| warm(w)).count() >= 2).await;
    for worker in server.workers().iter().filter(|w| warm(w)) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", worker["pid"])).unwrap();
        for line in
            ["Seccomp:\t2", "NoNewPrivs:\t1", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"]
        {
            assert!(status.contains(line), "{line}: {status}");
        }
        assert!(["full", "basic"].contains(&worker["isolation"].as_str().unwrap()), "{worker}");
    }
}

/// Returns the process ids of a server's helpers with a flag.
fn helpers(server: &Server, flag: &str) -> Vec<i32> {
    let driver = server.path("sim/libcuda.so.1");
    let wanted = format!("\0{flag}\0{}\0", driver.display());
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let of_server = processes.filter(|process| {
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&wanted)
    });
    of_server.filter_map(|process| process.file_name().to_str()?.parse().ok()).collect()
}

#[tokio::test]
async fn the_monitor_which_clients_ask_gives_up_its_rights() {
    let mut server = prepare("isolation = \"require\"").await;
    let library = server.path("sim/libnvidia-ml.so.1");
    std::os::unix::fs::symlink("libcuda.so.1", library).unwrap();
    server.run().await;
    let restricted = |pid: &i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        ["Seccomp:\t2", "NoNewPrivs:\t1", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"]
            .iter()
            .all(|line| status.contains(line))
    };
    eventually("the monitor is restricted", async || helpers(&server, "--monitor").iter().any(restricted))
        .await;
    let vm = server.client("vm-1").await;
    eventually("it reads the GPU", async || {
        let described = vm.pool.clone().describe(DescribeRequest::default()).await.unwrap().into_inner();
        described.loads.first().is_some_and(|load| load.temperature_c.is_some())
    })
    .await;
}

#[tokio::test]
async fn state_in_reach_of_workers_stops_the_start() {
    let server = prepare("").await;
    // The driver's folder, which workers read, has the server's state in it.
    std::fs::copy(artefact("simgpu", Artefact::Library("libsimgpu.so")), server.path("libcuda.so.1"))
        .unwrap();
    server.configure("libcuda.so.1", "");
    let done = server.verb(&["serve"]);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(
        said.contains("a worker can read") && said.contains("/state, which only the server's programs"),
        "{said}"
    );
}

#[tokio::test]
async fn images_in_reach_of_workers_stop_the_start() {
    let mut server = prepare("").await;
    // The driver's folder, which workers read.
    server.variables.push(("CACHE_DIRECTORY", server.path("sim").into()));
    let done = server.verb(&["serve"]);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.contains("a worker can read") && said.contains("sim/images, the images of all"), "{said}");
}
