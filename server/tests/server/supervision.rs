//! Workers that exit, hang, report too much, do not start or are too many.

use std::collections::HashMap;
use std::io::Read as _;
use std::time::{Duration, Instant};

use gpusession_proto::control::pool_event::Event;
use gpusession_proto::control::{
    AllocateRequest, ProcessEndedRequest, ReleaseRequest, TakeWorkersRequest, WatchRequest,
};
use gpusession_proto::preface::{FLAG_TLS, Key, Preface};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Code;
use zerocopy::IntoBytes;

use crate::{pid, renew};
use gpusession_test_server::{Client, LONG, Server, alive, eventually, rest};

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
        let event = watch.message().await.unwrap().expect("the stream continues");
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

/// Returns the median and the longest time of a lease's renewals.
async fn renewals(client: &mut Client, lease: &str) -> (Duration, Duration) {
    let mut times = Vec::new();
    for _ in 0..21 {
        let start = Instant::now();
        assert!(!client.pool.renew(renew(&[lease])).await.unwrap().into_inner().leases[0].lost);
        times.push(start.elapsed());
    }
    times.sort();
    (times[times.len() / 2], times[times.len() - 1])
}

#[tokio::test]
async fn workers_that_ask_without_end_cost_no_other_client_its_heartbeat() {
    // A client takes a server that answers later for lost. An unoptimized server on two busy
    // processors needs 0.6 s, also beside few workers. By hand, in release: FLOODING_WORKERS=64.
    const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
    let workers = std::env::var("FLOODING_WORKERS").map_or(4, |count| count.parse().unwrap());
    let server = Server::start_with("flooding-libcuda.so.1", "warm_workers = 1").await;
    let (mut hostile, mut other) = (server.client("vm-1").await, server.client("vm-2").await);
    let request = AllocateRequest { ttl_usec: 300_000_000, memory_percent: 50.0, ..hostile.request() };
    let lease = hostile.pool.allocate(request).await.unwrap().into_inner();
    let own = other.allocate(10.0).await.unwrap();
    let quiet = renewals(&mut other, &own.id).await;
    let mut lanes = Vec::new();
    for _ in 0..workers {
        let worker = hostile.take(&lease.id).await.unwrap();
        let id: [u8; 16] = worker.id.try_into().unwrap();
        let key = Key::new(&lease.ticket_key.clone().try_into().unwrap(), &id, 1000);
        lanes.push(server.adopt_with(&Preface::new(id, &key, 0, 1, FLAG_TLS)));
    }
    let flooded = renewals(&mut other, &own.id).await;
    println!("median and longest renewal: {quiet:?}, beside {workers} workers: {flooded:?}");
    assert!(flooded.0 < HEARTBEAT_TIMEOUT, "{flooded:?}, without a flood {quiet:?}");
    let started = other.take(&own.id).await.unwrap();
    server.adopt(&started.id, 0, true);
    let served = lanes.iter().filter(|(_, said)| alive(pid(&said["pid"]))).count();
    assert_eq!(served, workers, "the flood's workers are served");
}

#[tokio::test]
async fn a_worker_that_asks_for_thousands_of_images_is_answered_and_stays() {
    let server = Server::start_with("curious-libcuda.so.1", "warm_workers = 1").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let (mut lane, said) = server.adopt(&vm.take(&lease.id).await.unwrap().id, 0, true);
    lane.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut all = [0; "5000 answers\n".len()];
    lane.read_exact(&mut all).unwrap();
    assert_eq!(&all, b"5000 answers\n");
    assert!(alive(pid(&said["pid"])));
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

    // A server that notes system calls beyond the list, and refuses none of them.
    let mut server = Server::prepare("libcuda.so.1", "").await;
    server.variables = vec![("GPUSERVER_UNLISTED_CALLS", "log".into())];
    server.run_into("log").await;
    let status = server.json(&["status"])["server"]["isolation"].to_string();
    assert!(status.contains("partial: the list of system calls"), "{status}");
    let log = std::fs::read_to_string(server.path("log")).unwrap();
    assert_eq!(log.lines().filter(|line| line.contains("GPUSERVER_UNLISTED_CALLS")).count(), 1, "{log}");

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
async fn a_gpu_whose_kernels_reach_all_memory_is_served_by_choice_alone() {
    let server = Server::prepare("pageable-libcuda.so.1", "").await;
    for (verb, code) in [("serve", 1), ("check-isolation", 2)] {
        let done = server.verb(&[verb]);
        let said = format!("{done:?}");
        assert!(
            said.contains("GPU-00000000-0000-0000-0000-000000000001: kernels reach all memory"),
            "{said}"
        );
        assert!(said.contains("uvm_disable_hmm=1") && said.contains("allow_pageable_access"), "{said}");
        assert_eq!(done.status.code(), Some(code), "{said}");
    }
    for lines in ["allow_pageable_access = \"on\"", "isolation = \"try\""] {
        let server = Server::start_with("pageable-libcuda.so.1", lines).await;
        let warnings = server.json(&["status"])["server"]["warnings"].to_string();
        assert!(warnings.contains("a program's wrong pointer reaches its worker's memory"), "{warnings}");
        assert!(server.json(&["check-isolation"])["isolation"]["reach"].is_string());
    }
    // The other GPU alone.
    let server = Server::start_with("pageable-libcuda.so.1", "gpus = [0]").await;
    assert_eq!(server.json(&["status"])["server"]["warnings"], serde_json::json!([]));
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
async fn a_descriptor_whose_close_waits_delays_no_other_worker() {
    // Without isolation, where no filter refuses the option.
    let mut server = Server::prepare("lingering-libcuda.so.1", "isolation = \"off\"").await;
    server.run().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let mut lanes = Vec::new();
    for _ in 0..4 {
        let worker = vm.take(&lease.id).await.unwrap();
        lanes.push(server.adopt(&worker.id, 0, true));
    }
    // The verb asks for the state of the workers.
    let begun = Instant::now();
    for _ in 0..20 {
        server.json(&["ps"]);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
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
    let killed = || server.json(&["audit", "--event", "worker-killed"])["audit"][0].clone();
    eventually("the trail says why", async || killed()["detail"].is_string()).await;
    let killed = killed();
    assert!(killed["detail"].as_str().unwrap().contains("ready out of turn"), "{killed}");
    assert_eq!((&killed["client"], &killed["lease"]), (&"vm-1".into(), &lease.id.into()));
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
