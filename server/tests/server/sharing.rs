//! Sharing of GPUs: limits, the queue, withdrawn GPUs, live configuration, an orderly stop.

use std::os::fd::AsRawFd;
use std::time::Duration;

use gpuserver::accounting::{Accounting, Kind, Record};
use gpusession_proto::control::pool_event::Event;
use gpusession_proto::control::{
    self, AllocateRequest, DescribeRequest, Lease, ProcessEndedRequest, ReleaseRequest, WatchRequest,
};
use nix::sys::signal::{Signal, kill};
use prost::Message as _;
use tonic::{Code, Status};

use crate::renew;
use gpusession_test_server::{Client, Server, eventually, rest};

pub(crate) fn details(status: &Status) -> control::Refusal {
    control::Refusal::decode(status.details()).expect("details")
}

pub(crate) async fn named(client: &mut Client, id: &str, gpus: u32) -> Result<Lease, Status> {
    let wish = AllocateRequest { request_id: id.into(), gpus, ..client.request() };
    Ok(client.pool.allocate(wish).await?.into_inner())
}

pub(crate) fn refused_by<T: std::fmt::Debug>(result: Result<T, Status>, limit: &str, text: &str) {
    let status = result.expect_err(text);
    assert_eq!(
        (status.code(), details(&status).limit.as_str()),
        (Code::FailedPrecondition, limit),
        "{status}"
    );
    assert_eq!(details(&status).kind(), control::refusal::Kind::Limit);
    let start = format!("limit {limit} = ");
    assert!(status.message().starts_with(&start) && status.message().contains(text), "{status}");
}

#[tokio::test]
async fn requests_are_served_in_fifo_order() {
    let server = Server::start().await;
    let (mut a, mut b, mut c) =
        (server.client("vm-a").await, server.client("vm-b").await, server.client("vm-c").await);
    let held = named(&mut a, "boot", 2).await.unwrap();
    for (client, place) in [(&mut b, 1), (&mut c, 2)] {
        let status = named(client, "boot", 1).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!((details(&status).position, details(&status).waiting), (place, place));
    }
    let queue = server.json(&["queue"]);
    let names: Vec<_> = queue["queue"].as_array().unwrap().iter().map(|r| r["client"].clone()).collect();
    assert_eq!(names, ["vm-b", "vm-c"]);
    server.verb(&["off", "1"]);
    a.pool.release(ReleaseRequest { lease: held.id, ..Default::default() }).await.unwrap();
    assert_eq!(details(&named(&mut c, "boot", 1).await.unwrap_err()).position, 2, "not its turn");
    named(&mut b, "boot", 1).await.unwrap();
    assert_eq!(details(&named(&mut c, "boot", 1).await.unwrap_err()).position, 1);
    server.verb(&["on", "1"]);
    named(&mut c, "boot", 1).await.unwrap();
    assert_eq!(server.json(&["queue"])["queue"], serde_json::json!([]));
}

#[tokio::test]
async fn a_withdrawn_request_leaves_the_queue() {
    let server = Server::start().await;
    let (mut a, mut b, mut c) =
        (server.client("vm-a").await, server.client("vm-b").await, server.client("vm-c").await);
    named(&mut a, "boot", 1).await.unwrap();
    assert_eq!(details(&named(&mut b, "both", 2).await.unwrap_err()).position, 1);
    let queued = async |client: &str| {
        let queue = server.json(&["queue"])["queue"].clone();
        queue.as_array().unwrap().iter().any(|r| r["client"] == client)
    };
    assert_eq!(details(&named(&mut c, "one", 1).await.unwrap_err()).position, 2);
    // Another client cannot withdraw it by the request's name.
    let withdraw = |id: &str| ReleaseRequest { request_id: id.into(), ..Default::default() };
    c.pool.release(withdraw("both")).await.unwrap();
    assert!(queued("vm-b").await);
    b.pool.release(withdraw("both")).await.unwrap();
    assert!(!queued("vm-b").await);
    named(&mut c, "one", 1).await.unwrap();
}

/// A withdrawal may arrive while the server still answers the request.
#[tokio::test]
async fn a_withdrawal_during_its_request_leaves_no_lease() {
    let server = Server::start_with("libcuda.so.1", "warm_workers = 0\nlimits.requests_per_s = 10000").await;
    let mut client = server.client("vm-a").await;
    let begun = std::time::Instant::now();
    for n in 0..8 {
        let lease = named(&mut client, &format!("whole-{n}"), 1).await.unwrap().id;
        client.pool.release(ReleaseRequest { lease, ..Default::default() }).await.unwrap();
    }
    let both = begun.elapsed() / 8;
    let mut returned = 0;
    for n in 0..200 {
        let id = format!("boot-{n}");
        // The client leaves at another moment of the request each time.
        let asked = tokio::time::timeout(both * (n % 50) / 60, named(&mut client, &id, 1)).await;
        client.pool.release(ReleaseRequest { request_id: id, ..Default::default() }).await.unwrap();
        returned += usize::from(asked.is_ok());
    }
    println!("{returned} of 200 requests were answered before their withdrawal");
    assert!((1..200).contains(&returned), "{returned}");
    tokio::time::sleep(Duration::from_millis(500)).await;
    eventually("no lease is left", async || server.json(&["leases"])["leases"] == serde_json::json!([]))
        .await;
}

#[tokio::test]
async fn eighty_one_boot_leases_on_eighty_gpus_lend_and_return() {
    let more = "warm_workers = 0\nlend_after = 0\nlimits.gpus = 128\nlimits.max_persistent = 128";
    let server = Server::start_with("many-libcuda.so.1", more).await;
    // Each client may have at most 64 leases, so there are two.
    let mut vms = [server.client("vm-0").await, server.client("vm-1").await];
    let mut last = server.client("vm-81").await;
    let boot = |client: &Client, n: usize| AllocateRequest {
        request_id: format!("boot-{n}"),
        persistent: true,
        ..client.request()
    };
    let mut held = Vec::new();
    for n in 0..80 {
        let client = &mut vms[n % 2];
        let wish = boot(client, n);
        held.push(client.pool.allocate(wish).await.unwrap().into_inner());
    }
    let gpus: std::collections::BTreeSet<_> = held.iter().map(|l| l.devices[0].uuid.clone()).collect();
    assert_eq!(gpus.len(), 80);
    let wish = boot(&last, 81);
    let status = last.pool.allocate(wish.clone()).await.unwrap_err();
    assert_eq!((status.code(), details(&status).position), (Code::ResourceExhausted, 1));
    server.set("lend_after", "1s");
    // No program runs, so after a while the lease that was unused longest lends its GPU.
    let mut lease = None;
    eventually("one lends", async || {
        lease = last.pool.allocate(wish.clone()).await.ok().map(|l| l.into_inner());
        lease.is_some()
    })
    .await;
    let taken = lease.expect("a lease").devices[0].uuid.clone();
    let lent = |server: &Server| -> Vec<String> {
        let leases = server.json(&["leases"])["leases"].as_array().unwrap().clone();
        assert_eq!(leases.len(), 81, "no client lost a lease");
        let lent = leases.iter().filter(|l| l["state"] == "lent");
        lent.map(|l| l["lease"].as_str().unwrap().to_string()).collect()
    };
    let lender = lent(&server);
    let index = held.iter().position(|l| lender == [l.id.as_str()]).expect("one of the first");
    assert_eq!(held[index].devices[0].uuid, taken);

    // Its next program gets a GPU at once: the old one is taken, but another one is unused.
    let client = &mut vms[index % 2];
    let mut watch = client.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap().into_inner();
    let hint = control::IdleHintRequest { lease: lender[0].clone(), idle: true };
    assert_eq!(
        client.pool.idle_hint(hint).await.unwrap().into_inner().state,
        "lent",
        "and not idle when it is back"
    );
    let take =
        control::TakeWorkersRequest { lease: lender[0].clone(), count: 1, waiting: 1, ..Default::default() };
    let worker = client.pool.take_workers(take).await.unwrap().into_inner().workers.remove(0);
    let (_lane, said) = server.adopt(&worker.id, 0, true);
    let told = loop {
        match watch.message().await.unwrap().expect("the stream continues") {
            control::PoolEvent { lease, event: Some(Event::State(change)) }
                if lease == lender[0] && change.state == "active" =>
            {
                break (change.devices, change.fencing_token);
            }
            _ => {}
        }
    };
    let renewed = client.pool.renew(renew(&[&lender[0]])).await.unwrap().into_inner().leases.remove(0);
    let (told, token) = told;
    assert!(
        token > held[index].fencing_token && token == renewed.fencing_token,
        "another GPU, another token"
    );
    eventually("it serves its program", async || {
        client.pool.renew(renew(&[&lender[0]])).await.unwrap().into_inner().leases[0].state == "active"
    })
    .await;
    let now = renewed.devices;
    assert_eq!(
        (now.len(), &now[0].uuid, now[0].limit_bytes),
        (1, &told[0].uuid, held[index].devices[0].limit_bytes)
    );
    assert_eq!(said["environment"]["CUDA_VISIBLE_DEVICES"], now[0].uuid.as_str(), "the worker is there, too");
    assert!(now[0].uuid != taken && gpus.contains(&now[0].uuid));
    let second = lent(&server);
    assert!(second.len() == 1 && second != lender, "another one lends now: {second:?}");

    // After the last client's release, every lease has a GPU again.
    let of_last = server.json(&["leases"])["leases"].as_array().unwrap().clone();
    let of_last =
        of_last.iter().find(|l| l["client"] == "vm-81").unwrap()["lease"].as_str().unwrap().to_string();
    last.pool.release(ReleaseRequest { lease: of_last, ..Default::default() }).await.unwrap();
    assert!(server.verb(&["unpark", &second[0]]).status.success());
    eventually("none lends", async || {
        let leases = server.json(&["leases"])["leases"].as_array().unwrap().clone();
        leases.len() == 80 && leases.iter().all(|l| l["state"] == "idle" || l["state"] == "active")
    })
    .await;
    let uses = server.json(&["gpus"])["gpus"].as_array().unwrap().clone();
    assert!(uses.iter().all(|g| g["leases"].as_array().unwrap().len() == 1), "one each");
}

#[tokio::test]
async fn gpus_and_the_server_are_taken_out() {
    let mut server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = named(&mut vm, "", 1).await.unwrap();
    let uuid = lease.devices[0].uuid.clone();
    let state = |server: &Server| {
        let gpus = server.json(&["gpus"]);
        let gpu = gpus["gpus"].as_array().unwrap().iter().find(|g| g["uuid"] == uuid).unwrap().clone();
        (gpu["state"].as_str().unwrap().to_string(), gpu["reason"].clone())
    };
    let dropped = server.verb(&["drop", &uuid]);
    let said = String::from_utf8_lossy(&dropped.stderr);
    assert_eq!(dropped.status.code(), Some(1));
    assert!(said.contains(&format!("{} of vm-1", lease.id)) && said.contains("gpuserver off"), "{said}");
    assert!(server.verb(&["off", &uuid, "--reason", "a fan is loud"]).status.success());
    assert_eq!(state(&server), ("off-pending".into(), "a fan is loud".into()));
    let renewed = vm.pool.renew(renew(&[&lease.id])).await.unwrap().into_inner().leases.remove(0);
    assert_eq!((renewed.lost, renewed.devices[0].state.as_str()), (false, "off-pending"), "its client knows");
    vm.pool.release(ReleaseRequest { lease: lease.id, ..Default::default() }).await.unwrap();
    assert_eq!(state(&server).0, "off");
    let wish = AllocateRequest { devices: vec![uuid.clone()], ..vm.request() };
    let status = vm.pool.allocate(wish.clone()).await.unwrap_err();
    assert!(status.message().contains("a fan is loud"), "{status}");
    // It stays off over a restart.
    server.signal(Signal::SIGTERM);
    server.run().await;
    let mut vm = server.again(&vm).await;
    assert_eq!(state(&server).0, "off");
    assert!(server.verb(&["drop", &uuid]).status.success());
    assert_eq!(state(&server).0, "stopped");
    assert_eq!(vm.pool.allocate(wish.clone()).await.unwrap_err().code(), Code::FailedPrecondition);
    assert!(server.verb(&["on", &uuid]).status.success());
    let lease = vm.pool.allocate(wish).await.unwrap().into_inner();
    assert_eq!(state(&server), ("leased".into(), serde_json::Value::Null));
    assert_eq!(server.verb(&["off", "7"]).status.code(), Some(1));

    assert!(server.verb(&["drain", "--reason", "new cooling"]).status.success());
    let status = vm.allocate(10.0).await.unwrap_err();
    assert!(status.message().contains("new cooling"), "{status}");
    assert_eq!(vm.pool.describe(DescribeRequest::default()).await.unwrap().into_inner().state, "draining");
    vm.take(&lease.id).await.unwrap();
    // The server drains after a restart, too.
    assert_eq!(server.signal(Signal::SIGTERM).code(), Some(0));
    server.run().await;
    let mut vm = server.again(&vm).await;
    assert_eq!(vm.pool.describe(DescribeRequest::default()).await.unwrap().into_inner().state, "draining");
    assert!(server.verb(&["drain", "--end"]).status.success());
    vm.allocate(10.0).await.unwrap();
}

#[tokio::test]
async fn the_configuration_changes_while_running() {
    let mut server = Server::start_with("libcuda.so.1", "warm_workers = 1").await;
    let get = |server: &Server, key: &str| {
        let rows = server.json(&["config", "get", key])["config"].clone();
        (rows[0]["value"].as_str().unwrap().to_string(), rows[0]["origin"].as_str().unwrap().to_string())
    };
    assert_eq!(get(&server, "warm_workers").0, "1");
    server.set("warm_workers", "3");
    let (value, origin) = get(&server, "warm_workers");
    assert!(value == "3" && origin.ends_with("gpuserver.d/90-runtime.toml:2"), "{value} {origin}");
    let diff = server.verb(&["config", "diff", "--origin"]);
    assert!(String::from_utf8_lossy(&diff.stdout).contains("warm_workers = 3  # "), "{diff:?}");
    let mut vm = server.client("vm-1").await;
    vm.allocate(100.0).await.unwrap();
    eventually("three are warm", async || {
        server.workers().iter().filter(|w| w["state"] == "warm").count() == 3
    })
    .await;
    // A bad value changes neither the server nor the file.
    for (key, value, text) in [
        ("warm_workers", "many", "0 to 64"),
        ("limits.gpu", "1", "cannot be changed"),
        ("listen", "127.0.0.1:1", "restart"),
        ("limits.memory", "4GB", "GiB"),
    ] {
        let output = server.verb(&["config", "set", key, value]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(text) || said.contains("unknown key"), "{said}");
        assert_eq!(get(&server, "warm_workers").0, "3");
    }
    // A value that a later file overrides changes neither.
    let runtime = std::fs::read_to_string(server.path("gpuserver.d/90-runtime.toml")).unwrap();
    std::fs::write(server.path("gpuserver.d/site.toml"), "park_after = \"7min\"\n").unwrap();
    let output = server.verb(&["config", "set", "park_after", "9min"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("site.toml:1 sets park_after"), "{said}");
    assert_eq!(std::fs::read_to_string(server.path("gpuserver.d/90-runtime.toml")).unwrap(), runtime);
    std::fs::remove_file(server.path("gpuserver.d/site.toml")).unwrap();
    // SIGHUP: a bad file changes nothing, a good one does.
    let running = server.json(&["status"])["server"]["pid"].as_i64().unwrap();
    let hup = || kill(nix::unistd::Pid::from_raw(running as i32), Signal::SIGHUP).unwrap();
    server.configure("libcuda.so.1", "limits.workers = \"x\"");
    hup();
    let reload = server.verb(&["config", "reload"]);
    let said = String::from_utf8_lossy(&reload.stderr);
    assert!(said.contains("limits.workers = \"x\"") && said.contains("stays as it was"), "{said}");
    // Verbs read the file as well, and reach the running server even if it has errors.
    assert_eq!(get(&server, "limits.workers").0, "64");
    let text = std::fs::read_to_string(server.path("gpuserver.toml")).unwrap();
    std::fs::write(server.path("gpuserver.toml"), format!("[[ nonsense\n{text}")).unwrap();
    let leases = server.verb(&["leases"]);
    assert!(
        leases.status.success() && String::from_utf8_lossy(&leases.stdout).contains("vm-1"),
        "{leases:?}"
    );
    let said = String::from_utf8_lossy(&leases.stderr);
    assert!(said.contains("gpuserver.toml:1: ") && said.contains("would not start again"), "{said}");
    assert_eq!(server.verb(&["check-config"]).status.code(), Some(1), "what needs the file still does");
    server.configure("libcuda.so.1", "limits.workers = 7");
    hup();
    eventually("the new limit holds", async || get(&server, "limits.workers").0 == "7").await;
    server.unset("warm_workers");
    assert_eq!(get(&server, "warm_workers").0, "2");
    // A missing file does not count as one without keys.
    let (file, moved) = (server.path("gpuserver.toml"), server.path("moved.toml"));
    let site = format!("runtime_dir = {:?}\n", server.path("run"));
    std::fs::write(server.path("gpuserver.d/site.toml"), site).unwrap();
    std::fs::rename(&file, &moved).unwrap();
    for words in [&["config", "reload"][..], &["config", "set", "warm_workers", "5"]] {
        let output = server.verb(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("stays as it was"), "{said}");
        assert!(said.contains("gpuserver.toml: cannot be read: "), "{said}");
    }
    std::fs::rename(&moved, &file).unwrap();
    std::fs::remove_file(server.path("gpuserver.d/site.toml")).unwrap();
    assert_eq!(get(&server, "limits.workers").0, "7");
    assert_eq!(get(&server, "warm_workers").0, "2");
    // A change that waits for a restart is shown until then.
    server.configure("libcuda.so.1", "cache_max = \"4GiB\"");
    assert!(server.verb(&["config", "reload"]).status.success());
    server.set("warm_workers", "1");
    let waits = |server: &Server| {
        let diff = server.verb(&["config", "diff"]);
        String::from_utf8_lossy(&diff.stdout).contains("cache_max = 4096MiB (after a restart)\n")
    };
    let sizes = server.json(&["config", "get", "cache_max"])["config"].clone();
    let value = |at: usize| (sizes[at]["value"].as_str(), sizes[at]["after_restart"].as_bool());
    assert_eq!([value(0), value(1)], [(Some("8192MiB"), Some(false)), (Some("4096MiB"), Some(true))]);
    assert!(waits(&server));
    server.configure("libcuda.so.1", "");
    assert!(server.verb(&["config", "reload"]).status.success());
    assert!(!waits(&server), "it was taken back");
    server.configure("libcuda.so.1", "limits.workers = 7");
    assert_eq!(server.signal(Signal::SIGTERM).code(), Some(0));
    assert_eq!(get(&server, "limits.workers").0, "7", "without a server, what it would start with");
}

#[tokio::test]
async fn a_stop_waits_for_programs() {
    let mut server = Server::start_with("libcuda.so.1", "drain_timeout = \"60s\"").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (mut lane, _) = server.adopt(&worker.id, 0, true);
    eventually("it serves", async || server.workers().iter().any(|w| w["state"] == "active")).await;
    let mut watch = vm.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap().into_inner();
    let mut process = server.terminate();
    let left = loop {
        if let Some(Event::PrepareForLoss(warning)) = watch.message().await.unwrap().unwrap().event {
            break warning.left_usec;
        }
    };
    assert!((50_000_000..=60_000_000).contains(&left), "{left}");
    lane.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(std::io::Read::read(&mut lane, &mut [0]).is_err(), "the connection stays open");
    assert!(lane.as_raw_fd() >= 0 && process.try_wait().unwrap().is_none());
    let status = vm.allocate(10.0).await.unwrap_err();
    assert!(status.message().contains("it stops"), "{status}");
    vm.pool.process_ended(ProcessEndedRequest { lease: lease.id, worker: worker.id }).await.unwrap();
    assert_eq!(process.wait().unwrap().code(), Some(0));

    // SIGQUIT ends the wait.
    server.run().await;
    let mut vm = server.again(&vm).await;
    let lease = vm.allocate(100.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (mut lane, _) = server.adopt(&worker.id, 0, true);
    eventually("it serves", async || server.workers().iter().any(|w| w["state"] == "active")).await;
    let mut process = server.terminate();
    eventually("it drains", async || {
        vm.allocate(10.0).await.is_err_and(|s| s.message().contains("it stops"))
    })
    .await;
    kill(nix::unistd::Pid::from_raw(process.id() as i32), Signal::SIGQUIT).unwrap();
    assert_eq!(process.wait().unwrap().code(), Some(2));
    assert!(rest(&mut lane).is_empty());
}

#[tokio::test]
async fn an_administrator_stops_the_server_and_hears_what_it_waits_for() {
    let mut server = Server::start_with("libcuda.so.1", "drain_timeout = \"60s\"").await;
    let program = async |server: &Server, client: &Client| {
        let mut client = server.again(client).await;
        let lease = client.allocate(100.0).await.unwrap();
        let worker = client.take(&lease.id).await.unwrap();
        let (lane, _) = server.adopt(&worker.id, 0, true);
        eventually("it serves", async || server.workers().iter().any(|w| w["state"] == "active")).await;
        (client, lease, worker, lane)
    };
    let vm = server.client("vm-1").await;
    let (mut vm, lease, worker, _lane) = program(&server, &vm).await;
    let mut stop = server.command(&["stop"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(stop.stdout.take().unwrap()));
    let line = lines.next().unwrap().unwrap();
    assert!(
        line.starts_with("waiting up to ") && line.ends_with(" s for vectorAdd (pid 42 of vm-1)"),
        "{line}"
    );
    vm.pool.process_ended(ProcessEndedRequest { lease: lease.id, worker: worker.id }).await.unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "stopped");
    assert!(stop.wait().unwrap().success());
    assert_eq!(server.ended().code(), Some(0));
    assert_eq!(server.verb(&["stop"]).status.code(), Some(1), "it does not run");

    // `stop --force` stops it at once, even while another administrator waits.
    server.run().await;
    let (_vm, _lease, _worker, mut lane) = program(&server, &vm).await;
    let mut waits = server.command(&["stop"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(waits.stdout.take().unwrap()));
    assert!(lines.next().unwrap().unwrap().starts_with("waiting up to "));
    let forced = server.json(&["stop", "--force"]);
    assert_eq!(forced["stopped"]["programs"][0], "vectorAdd (pid 42 of vm-1)");
    assert!(rest(&mut lane).is_empty());
    assert!(waits.wait().unwrap().success());
    assert_eq!(server.ended().code(), Some(2));
}

#[tokio::test]
async fn usage_of_programs_and_leases_is_recorded() {
    let mut server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let wish = AllocateRequest { user: "alice".into(), uid: 1000, ..vm.request() };
    let lease = vm.pool.allocate(wish).await.unwrap().into_inner();
    let worker = vm.take(&lease.id).await.unwrap();
    server.adopt(&worker.id, 0, true);
    eventually("its memory is counted", async || {
        server.workers().iter().any(|w| w["memory_bytes"].as_u64().unwrap() >= 100 << 20)
    })
    .await;
    let top = server.verb(&["top", "-n", "1"]);
    assert!(String::from_utf8_lossy(&top.stdout).contains("vectorAdd"), "{top:?}");
    let looks = server.verb(&["top", "-n", "2", "--every", "100ms", "--json"]).stdout;
    let looks: Vec<serde_json::Value> =
        String::from_utf8(looks).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(looks.len(), 2);
    assert_eq!(
        (&looks[0]["top"][0]["calls"], &looks[1]["top"][0]["calls_per_second"]),
        (&7.into(), &0.into())
    );
    let request = DescribeRequest { usage_uid: Some(0), ..Default::default() };
    let rows = vm.pool.describe(request.clone()).await.unwrap().into_inner().client_programs;
    assert_eq!((rows.len(), rows[0].pid, rows[0].uid, rows[0].name.as_str()), (1, 42, 1000, "vectorAdd"));
    assert_eq!((&rows[0].lease, &rows[0].uuid), (&lease.id, &lease.devices[0].uuid));
    assert!(rows[0].used_bytes >= 100 << 20);
    let mut stranger = server.client("vm-9").await;
    let seen = stranger.pool.describe(request).await.unwrap().into_inner();
    assert!(seen.client_programs.is_empty(), "of another client");
    vm.pool.process_ended(ProcessEndedRequest { lease: lease.id.clone(), worker: worker.id }).await.unwrap();
    let records = |server: &Server, words: &[&str]| {
        server.json(&[&["accounting"], words].concat())["records"].as_array().unwrap().clone()
    };
    eventually("the program is on record", async || records(&server, &[]).len() == 1).await;
    vm.pool.release(ReleaseRequest { lease: lease.id.clone(), ..Default::default() }).await.unwrap();
    eventually("the lease too", async || records(&server, &["--kind", "lease"]).len() == 1).await;
    // The records are read without a server, too.
    assert_eq!(server.signal(Signal::SIGTERM).code(), Some(0));
    let all = records(&server, &["--client", "vm-1", "--user", "alice", "--since", "1h"]);
    let (process, of_lease) = (&all[0], &all[1]);
    assert_eq!(
        (&process["kind"], &process["program"], &process["uid"], &process["pid"]),
        (&"process".into(), &"vectorAdd".into(), &1000.into(), &42.into())
    );
    assert_eq!(process["executable"], "/opt/vectorAdd");
    for record in [process, of_lease] {
        assert_eq!(record["calls"], 7, "{record}");
        assert_eq!(record["bytes_from_device"], 200, "{record}");
        assert!(record["peak_memory_bytes"].as_u64().unwrap() >= 100 << 20, "{record}");
        assert_eq!(record["gpus"][0], lease.devices[0].uuid.as_str(), "{record}");
    }
    assert!(process["reason"].as_str().unwrap().contains("its client process ended"), "{process}");
    assert!(of_lease["reason"].as_str().unwrap().contains("released"), "{of_lease}");
    assert_eq!(of_lease["uids"], serde_json::json!([1000]));
    assert_eq!(records(&server, &["--user", "1000"]), all, "as well by the user's id");
    assert!(records(&server, &["--user", "bob"]).is_empty());
    let csv = server.verb(&["accounting", "--csv"]);
    let text = String::from_utf8_lossy(&csv.stdout);
    assert!(text.lines().count() == 3 && text.contains(",vm-1,alice,1000,42,vectorAdd,"), "{text}");
    let table = server.verb(&["accounting"]);
    assert!(String::from_utf8_lossy(&table.stdout).contains("vectorAdd (pid 42, uid 1000)"), "{table:?}");
    assert_eq!(server.verb(&["accounting", "--since", "soon"]).status.code(), Some(1));

    // The sums, which clients see of all, and administrators for each user.
    let stats = server.json(&["stats", "--users"])["usage"].clone();
    let row = &stats[0];
    assert_eq!(
        (&row["client"], &row["user"], &row["owner"]),
        (&"vm-1".into(), &"alice".into(), &"user".into())
    );
    assert_eq!(
        (&row["leases"], &row["programs"], &row["wait_p95_usec"]),
        (&1.into(), &1.into(), &0.into()),
        "{stats}"
    );
    assert_eq!(row["bytes_from_device"], 200, "{stats}");
    server.run().await;
    let mut other = server.client("vm-2").await;
    let mut vm = server.again(&vm).await;
    let held = other.allocate(10.0).await.unwrap();
    let seen = async |vm: &mut Client, uid: u32| {
        let request = DescribeRequest { usage_uid: Some(uid), ..Default::default() };
        let seen = vm.pool.describe(request).await.unwrap().into_inner();
        let [all, own, user] = seen.usage.try_into().unwrap();
        (all, own, user)
    };
    let (_, own, user) = seen(&mut vm, 7).await;
    assert_eq!((own.leases, own.programs, own.bytes_from_device), (1, 1, 200));
    assert_eq!((user.programs, user.wait_p50_usec), (0, None), "another user");
    // The server reads the sums again after a while.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    loop {
        let (all, _, user) = seen(&mut vm, 1000).await;
        assert_eq!((user.bytes_from_device, user.wait_p50_usec), (200, Some(0)));
        if all.leases == 2 {
            break;
        }
        assert!(std::time::Instant::now() < end, "the other client's lease does not count");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    let plain = vm.pool.describe(DescribeRequest::default()).await.unwrap().into_inner();
    assert!(plain.usage.is_empty());
    other.pool.release(ReleaseRequest { lease: held.id, ..Default::default() }).await.unwrap();
    let table = String::from_utf8(server.verb(&["stats"]).stdout).unwrap();
    assert!(table.starts_with("CLIENT") && table.contains("\nvm-2"), "{table}");
}

#[tokio::test]
async fn records_are_kept_for_so_long() {
    const DAY: u64 = 86400;
    let mut server = Server::prepare("libcuda.so.1", "").await;
    let now = gpuserver::clock::Clock::unix(&gpuserver::clock::SystemClock);
    let accounting = Accounting::open(&server.path("state")).unwrap();
    for days in [0, 89, 91, 400] {
        accounting.add(Record {
            kind: Kind::Lease,
            lease: format!("{days} days ago"),
            worker: String::new(),
            client: "vm-1".into(),
            user: String::new(),
            uid: 0,
            pid: 0,
            program: String::new(),
            executable: String::new(),
            gpus: Vec::new(),
            start_unix: now - days * DAY - 1,
            end_unix: now - days * DAY,
            gpu_busy_usec: 0,
            peak_memory_bytes: 0,
            bytes_to_device: 0,
            bytes_from_device: 0,
            calls: 0,
            reason: String::new(),
            uids: Vec::new(),
            users: Vec::new(),
        });
    }
    drop(accounting);
    let kept = |server: &Server| -> Vec<String> {
        let records = server.json(&["accounting", "--since", "1000d"])["records"].clone();
        let lease = |record: &serde_json::Value| record["lease"].as_str().unwrap().to_string();
        records.as_array().unwrap().iter().map(lease).collect()
    };
    assert_eq!(kept(&server).len(), 4);
    server.run().await;
    eventually("90 days are kept", async || kept(&server) == ["89 days ago", "0 days ago"]).await;
    assert_eq!(server.signal(Signal::SIGTERM).code(), Some(0));
    server.configure("libcuda.so.1", "accounting_keep = \"1d\"");
    server.run().await;
    eventually("one day is kept", async || kept(&server) == ["0 days ago"]).await;
}

fn http(address: &str, request: &str) -> String {
    let mut socket = std::net::TcpStream::connect(address).unwrap();
    std::io::Write::write_all(&mut socket, request.as_bytes()).unwrap();
    String::from_utf8(rest(&mut socket)).unwrap()
}

#[tokio::test]
async fn prometheus_reads_what_is_leased() {
    let keys = "metrics_listen = \"127.0.0.1:0\"\nscrub = \"verify\"\nwarm_workers = 1";
    let mut server = Server::prepare("remnant-libcuda.so.1", keys).await;
    server.run_into("journal").await;
    let journal = std::fs::read_to_string(server.path("journal")).unwrap();
    let address =
        journal.split("metrics on http://").nth(1).and_then(|t| t.split('/').next()).unwrap().to_owned();
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(50.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    server.adopt(&worker.id, 0, true);
    server.verb(&["off", "1"]);
    let get =
        |path: &str| http(&address, &format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));
    eventually("the program is there", async || {
        get("/metrics").contains("gpusession_programs{server=\"s1\",client=\"vm-1\"} 1\n")
    })
    .await;
    let text = get("/metrics");
    // Both workers looked before their programs came; the program's worker may not say more.
    let of_first = "{server=\"s1\",gpu=\"GPU-00000000-0000-0000-0000-000000000000\"}";
    eventually("two workers have looked", async || {
        let text = get("/metrics");
        text.contains(&format!("gpusession_gpu_sampled_bytes_total{of_first} {}\n", 128 << 20))
            && text.contains(&format!("gpusession_gpu_left_bytes_total{of_first} 10\n"))
    })
    .await;
    let journal = std::fs::read_to_string(server.path("journal")).unwrap();
    assert!(journal.contains("the driver did not clear memory: 5 of 67108864 bytes"), "{journal}");
    let warnings = server.json(&["status"])["server"]["warnings"].to_string();
    assert!(warnings.contains("did not clear 10 of 134217728 bytes"), "{warnings}");
    assert!(text.contains("gpusession_resumes_total{server=\"s1\"} 0\n"), "{text}");
    assert!(text.contains("gpusession_programs_interrupted{server=\"s1\"} 0\n"), "{text}");
    server.adopt(&worker.id, 0, true);
    eventually("the program's return is counted", async || {
        get("/metrics").contains("gpusession_resumes_total{server=\"s1\"} 1\n")
    })
    .await;
    let (first, second) =
        ("GPU-00000000-0000-0000-0000-000000000000", "GPU-00000000-0000-0000-0000-000000000001");
    let text = get("/metrics");
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.contains("text/plain; version=0.0.4"), "{text}");
    for line in [
        "# TYPE gpusession_gpu_leased_bytes gauge".to_string(),
        format!("gpusession_gpu_memory_bytes{{server=\"s1\",gpu=\"{first}\"}} 17179869184"),
        format!("gpusession_gpu_leased_bytes{{server=\"s1\",gpu=\"{first}\"}} 8589934592"),
        format!("gpusession_gpu_state{{server=\"s1\",gpu=\"{second}\",state=\"off\"}} 1"),
        "gpusession_leases{server=\"s1\",client=\"vm-1\",state=\"active\"} 1".into(),
        "gpusession_waiting_requests{server=\"s1\"} 0".into(),
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in {text}");
    }
    assert!(!text.contains("vectorAdd") && !text.contains("_ended_total{"), "no program by its name: {text}");
    vm.pool.release(ReleaseRequest { lease: lease.id, ..Default::default() }).await.unwrap();
    eventually("the ends are counted", async || {
        let text = get("/metrics");
        ["leases", "programs"].iter().all(|what| {
            text.contains(&format!("gpusession_{what}_ended_total{{server=\"s1\",client=\"vm-1\"}} 1\n"))
        })
    })
    .await;
    assert!(get("/").starts_with("HTTP/1.1 404 "));
    assert!(
        http(&address, "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            .starts_with("HTTP/1.1 405 ")
    );
    assert!(http(&address, "\u{16}\u{3}\u{1}nonsense\r\n\r\n").starts_with("HTTP/1.1 400 "));
    // Another server cannot listen on the same port.
    let other = Server::prepare("libcuda.so.1", &format!("metrics_listen = \"{address}\"")).await;
    let output = other.verb(&["serve"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("metrics_listen: cannot listen on"),
        "{output:?}"
    );
}

#[tokio::test]
async fn a_fatal_signal_is_reported_and_ends_the_server() {
    use std::os::unix::process::ExitStatusExt;
    let server = Server::prepare("libcuda.so.1", "").await;
    for (signal, name) in [(Signal::SIGSEGV, "SIGSEGV"), (Signal::SIGABRT, "SIGABRT")] {
        let mut child = server.command(&["serve"]).stderr(std::process::Stdio::piped()).spawn().unwrap();
        eventually("it runs", async || server.verb(&["status"]).status.success()).await;
        kill(nix::unistd::Pid::from_raw(child.id() as i32), signal).unwrap();
        let mut said = String::new();
        std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
        assert!(said.contains(&format!("gpuserver: fatal signal {name}")), "{said}");
        assert_eq!(child.wait().unwrap().signal(), Some(signal as i32), "by the signal itself");
    }
}

#[tokio::test]
async fn a_gpu_has_one_server_and_the_right_compute_mode() {
    let locks = tempfile::tempdir().unwrap();
    let lock_dir = format!("lock_dir = {:?}\n", locks.path());
    let server = Server::start_with("alone-libcuda.so.1", &lock_dir).await;
    let gpus = server.json(&["gpus"])["gpus"].clone();
    assert_eq!((&gpus[0]["state"], &gpus[1]["state"]), (&"broken".into(), &"free".into()));
    assert!(gpus[0]["reason"].as_str().unwrap().contains("nvidia-smi -i GPU-"), "{gpus}");
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(10.0).await.unwrap();
    assert_eq!(lease.devices[0].uuid.as_str(), gpus[1]["uuid"]);

    let other = Server::prepare("libcuda.so.1", &lock_dir).await;
    let output = other.verb(&["serve"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let pid = server.json(&["status"])["server"]["pid"].clone();
    assert!(said.contains(&format!("is served by gpuserver s1 (pid {pid}")), "{said}");
    drop(server);
    let mut other = other;
    other.run().await;
}

#[tokio::test]
async fn a_reserve_keeps_a_gpu_for_its_clients() {
    let reserve = "[[reserve]]\nclient = \"big-*\"\ngpus = 1\nmemory = \"100%\"\n";
    let keys = "limits.gpus = 64\ndrain_timeout = 0\n";
    let mut server = Server::start_with("libcuda.so.1", &format!("{keys}{reserve}")).await;
    let (mut other, mut big) = (server.client("vm-1").await, server.client("big-1").await);
    let first = other.allocate(100.0).await.unwrap();
    let refused = other.allocate(10.0).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    let kept = big.allocate(100.0).await.unwrap();
    assert_ne!(kept.devices[0].uuid, first.devices[0].uuid);
    // The reserve returns with the GPU, also after a restart, and ends with its table.
    big.pool.release(ReleaseRequest { lease: kept.id, ..Default::default() }).await.unwrap();
    server.signal(Signal::SIGTERM);
    server.run().await;
    let mut other = server.again(&other).await;
    assert_eq!(other.allocate(10.0).await.unwrap_err().code(), Code::ResourceExhausted);
    let text = std::fs::read_to_string(server.path("gpuserver.toml")).unwrap();
    std::fs::write(server.path("gpuserver.toml"), text.replace(reserve, "")).unwrap();
    assert!(server.verb(&["config", "reload"]).status.success());
    let second = other.allocate(10.0).await.unwrap();
    assert_ne!(second.devices[0].uuid, first.devices[0].uuid);
}

#[tokio::test]
async fn a_server_that_offers_a_part_of_its_gpus_leases_no_more() {
    let server = Server::start_with("libcuda.so.1", "gpu_memory = \"25%\"").await;
    let mut vm = server.client("vm-1").await;
    let whole = vm.allocate(100.0).await.unwrap();
    let card = whole.devices[0].memory_bytes;
    assert_eq!(whole.devices[0].limit_bytes, card / 4);
    let described = vm.pool.describe(DescribeRequest::default()).await.unwrap().into_inner();
    let free: Vec<_> = described.devices.iter().map(|d| (d.memory_bytes, d.memory_free_bytes)).collect();
    assert!(free.contains(&(card, 0)) && free.contains(&(card, card / 4)), "{free:?}");
    let wish = AllocateRequest { memory_bytes: card / 2, memory_percent: 0.0, ..vm.request() };
    assert_eq!(vm.pool.allocate(wish).await.unwrap_err().code(), Code::FailedPrecondition);
    // Also a lease of all that is offered is limited: its worker does not get the card.
    let worker = vm.take(&whole.id).await.unwrap();
    let (_lane, said) = server.adopt(&worker.id, 0, true);
    assert_eq!(said["limits"][0], card / 4, "{said}");
}
