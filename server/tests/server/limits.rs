//! Limits of clients, groups, users and leases, on GPUs, memory, threads and idle time.

use std::io::Read as _;
use std::time::Duration;

use gpusession_proto::control::pool_event::Event;
use gpusession_proto::control::{
    self, AllocateRequest, DescribeRequest, ProcessEndedRequest, ReleaseRequest, WatchRequest,
};
use gpusession_proto::preface;
use tonic::Code;
use zerocopy::IntoBytes;

use crate::renew;
use crate::sharing::{details, named, refused_by};
use gpusession_test_server::{Client, Server, eventually, rest};

#[tokio::test]
async fn every_limit_refuses_by_name() {
    let server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let of = |name: &str| format!("limits.client.vm-1.{name}");
    let cases: [(&str, &str, AllocateRequest, &str); 7] = [
        ("gpus", "1", AllocateRequest { gpus: 2, ..vm.request() }, "0 held, 2 more asked for"),
        ("memory", "25%", AllocateRequest { memory_percent: 50.0, ..vm.request() }, "8192 MiB of GPU-"),
        ("sm_percent", "50", vm.request(), "100 % of the multiprocessors"),
        ("models", "[\"B200\"]", vm.request(), "is a Fake GPU"),
        (
            "on_idle",
            "[\"park\"]",
            AllocateRequest { on_idle: "release".into(), ..vm.request() },
            "\"release\" asked for",
        ),
        (
            "on_idle",
            "[\"keep\"]",
            AllocateRequest { on_idle: "park".into(), ..vm.request() },
            "\"park\" asked for",
        ),
        ("max_persistent", "0", AllocateRequest { persistent: true, ..vm.request() }, "0 leases"),
    ];
    for (limit, value, wish, text) in cases {
        server.set(&of(limit), value);
        let refused = vm.pool.allocate(wish.clone()).await;
        refused_by(refused, limit, text);
        let shown = server.json(&["limits", "vm-1"]);
        let row = shown["limits"].as_array().unwrap().iter().find(|r| r["limit"] == limit).unwrap().clone();
        assert_eq!(row["of"], "client vm-1", "{row}");
        assert!(row["origin"].as_str().unwrap().contains("90-runtime.toml:"), "{row}");
        server.unset(&of(limit));
        let lease = vm.pool.allocate(wish).await.unwrap().into_inner();
        vm.pool.release(ReleaseRequest { lease: lease.id, ..Default::default() }).await.unwrap();
    }
    server.set(&of("servers"), "[\"other\"]");
    refused_by(vm.pool.describe(DescribeRequest::default()).await, "servers", "this is s1");
    server.unset(&of("servers"));

    // Limits of programs apply to new programs, and leave running ones alone.
    let lease = vm.allocate(50.0).await.unwrap();
    let first = vm.take(&lease.id).await.unwrap();
    let (_lane, _) = server.adopt(&first.id, 0, true);
    server.set(&of("workers"), "1");
    refused_by(vm.take(&lease.id).await, "workers", "there are 1 programs");
    server.set(&of("workers"), "2");
    let second = vm.take(&lease.id).await.unwrap();
    server.set(&of("connections"), "1");
    let preface = server.preface(&second.id, 0, true);
    let answer = rest(&mut server.data_connection(preface.as_bytes()));
    let len = preface::refusal_len(answer[..4].try_into().unwrap()).expect("a refusal");
    let said = String::from_utf8_lossy(&answer[4..4 + len]).into_owned();
    assert!(said.contains("limit connections = 1 of client vm-1"), "{said}");
    server.unset(&of("connections"));
    server.adopt(&second.id, 0, true);

    // The limit `lease_ttl` ends a lease although it is renewed.
    server.set(&of("lease_ttl"), "2s");
    let mut watch = vm.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap().into_inner();
    let short = vm.allocate(10.0).await.unwrap();
    let mut warned = Vec::new();
    let reason = loop {
        vm.pool.renew(renew(&[&short.id])).await.unwrap();
        match watch.message().await.unwrap().expect("the stream continues") {
            event if event.lease != short.id => {}
            event => match event.event {
                Some(Event::PrepareForLoss(warning)) => warned.push((warning.reason, warning.idle)),
                Some(Event::Lost(loss)) => break loss.reason,
                _ => {}
            },
        }
    };
    assert!(reason.contains("lease_ttl"), "{reason}");
    assert!(matches!(&warned[..], [(reason, false)] if reason.contains("lease_ttl")), "once: {warned:?}");

    server.set(&of("requests_per_s"), "2");
    let mut refused = None;
    for _ in 0..20 {
        if let Err(status) = vm.pool.describe(DescribeRequest::default()).await {
            refused = Some(status);
        }
    }
    refused_by(Err::<(), _>(refused.expect("20 requests at once")), "requests_per_s", "asks more often");
}

#[tokio::test]
async fn workers_wait_for_lost_programs_as_long_as_their_users_may() {
    let more = "limits.gpus = 64\nresume_grace = \"20s\"\nlimits.client.vm-1.resume_grace = \"50s\"\n\
                limits.user.bob.resume_grace = 0";
    let server = Server::start_with("libcuda.so.1", more).await;
    let grace = async |client: &Client, user: &str| {
        let mut client = client.clone();
        let wish = AllocateRequest { user: user.into(), memory_percent: 10.0, ..client.request() };
        let lease = client.pool.allocate(wish).await.unwrap().into_inner().id;
        let worker = client.take(&lease).await.unwrap();
        server.adopt(&worker.id, 0, true).1["grace"].as_u64()
    };
    let (first, second) = (server.client("vm-1").await, server.client("vm-2").await);
    assert_eq!(grace(&second, "").await, Some(20), "of everybody");
    assert_eq!(grace(&first, "alice").await, Some(50));
    assert_eq!(grace(&first, "bob").await, Some(0), "the shortest that applies");
    server.set("limits.client.vm-1.resume_grace", "5s");
    assert_eq!(grace(&first, "alice").await, Some(5), "a worker that started later");
}

#[tokio::test]
async fn a_request_above_the_mapped_memory_limit_is_logged() {
    let mut server = Server::prepare("greedy-libcuda.so.1", "limits.client.vm-1.staging = \"64MiB\"").await;
    server.run_into("journal").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(10.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (_lane, said) = server.adopt(&worker.id, 0, true);
    assert_eq!(said["staging"], 64 << 20, "the worker keeps to it");
    let wanted = "limit staging = 64MiB of client vm-1 (";
    eventually("the journal names it", async || {
        let text = std::fs::read_to_string(server.path("journal")).unwrap();
        text.lines().any(|l| l.contains(wanted) && l.contains("asked for 300 MiB of mapped host memory"))
    })
    .await;
    // The program gets an error, and continues.
    assert!(server.workers().iter().any(|w| w["state"] == "active"));
}

/// Starts a program of vm-1, which exceeds a limit, and one of vm-2. Returns the journal once the
/// first has ended.
async fn ends_alone(driver: &str, limits: &str) -> String {
    let mut server = Server::prepare(driver, limits).await;
    server.run_into("journal").await;
    let (mut excessive, mut other) = (server.client("vm-1").await, server.client("vm-2").await);
    let mut lanes = Vec::new();
    for vm in [&mut excessive, &mut other] {
        let lease = vm.allocate(10.0).await.unwrap();
        lanes.push(server.adopt(&vm.take(&lease.id).await.unwrap().id, 0, true).0);
    }
    assert!(rest(&mut lanes[0]).is_empty(), "ended");
    assert_eq!(
        server.workers().iter().filter(|w| w["state"] == "active").count(),
        1,
        "the other worker continues"
    );
    std::fs::read_to_string(server.path("journal")).unwrap()
}

#[tokio::test]
async fn a_worker_has_no_more_of_the_servers_memory_than_its_limit() {
    let limits = "limits.host_memory = \"128MiB\"\nlimits.staging = \"1MiB\"\nlimits.client.vm-1.host_memory = \"32MiB\"";
    let journal = ends_alone("hungry-libcuda.so.1", limits).await;
    let wanted = "limit host_memory = 32MiB of client vm-1 (";
    let named = |l: &str| l.contains(wanted) && l.contains("MiB of the server's memory");
    assert!(journal.lines().any(named), "{journal}");
}

#[tokio::test]
async fn a_clients_workers_have_no_more_of_the_servers_memory_than_its_limit() {
    let journal = ends_alone("hungry-libcuda.so.1", "limits.client.vm-1.host_memory_total = \"32MiB\"").await;
    let wanted = "limit host_memory_total = 32MiB of client vm-1 (";
    let named = |l: &str| l.contains(wanted) && l.contains("its client's workers have");
    assert!(journal.lines().any(named), "{journal}");
}

#[tokio::test]
async fn a_worker_has_no_more_threads_than_its_limit() {
    let journal = ends_alone("crowded-libcuda.so.1", "limits.client.vm-1.threads = 15").await;
    let wanted = "limit threads = 15 of client vm-1 (";
    assert!(journal.lines().any(|l| l.contains(wanted) && l.contains("threads")), "{journal}");
}

#[tokio::test]
async fn too_much_compiled_code_ends_its_writers_alone() {
    let mut server = Server::prepare("libcuda.so.1", "cache_max = \"8MiB\"").await;
    server.run_into("journal").await;
    let (mut excessive, mut other) = (server.client("vm-1").await, server.client("vm-2").await);
    let (mut lanes, mut folders) = (Vec::new(), Vec::new());
    for vm in [&mut excessive, &mut other] {
        let lease = vm.allocate(10.0).await.unwrap();
        let (lane, said) = server.adopt(&vm.take(&lease.id).await.unwrap().id, 0, true);
        assert_eq!(
            said["environment"]["CUDA_CACHE_MAXSIZE"],
            (512 << 10).to_string(),
            "a quarter of its share"
        );
        lanes.push(lane);
        folders.push(std::path::PathBuf::from(said["environment"]["CUDA_CACHE_PATH"].as_str().unwrap()));
    }
    let share = folders[1].join("code");
    std::fs::write(&share, vec![1; 1 << 20]).unwrap();
    let deep = folders[0].join("a/b/c");
    std::fs::create_dir_all(&deep).unwrap();
    std::fs::write(deep.join("code"), vec![1; 5 << 20]).unwrap();
    assert!(rest(&mut lanes[0]).is_empty(), "ended");
    eventually("its folder is gone", async || !deep.exists()).await;
    assert_eq!(server.workers().iter().filter(|w| w["state"] == "active").count(), 1, "the other continues");
    assert!(share.exists(), "with its compiled code");
    let journal = std::fs::read_to_string(server.path("journal")).unwrap();
    assert!(journal.contains("more than 4 MiB of compiled code; killed"), "{journal}");
    eventually("the trail has the reason", async || {
        let trail = server.json(&["audit", "--event", "program-ended"]).to_string();
        trail.contains("wrote more than 4 MiB of compiled code")
    })
    .await;
}

#[tokio::test]
async fn a_clients_workers_have_no_more_compiled_code_than_one_may() {
    let mut server = Server::prepare("libcuda.so.1", "cache_max = \"8MiB\"").await;
    server.run_into("journal").await;
    let (mut excessive, mut other) = (server.client("vm-1").await, server.client("vm-2").await);
    let lease = excessive.allocate(10.0).await.unwrap().id;
    let beside = other.allocate(10.0).await.unwrap().id;
    let mut folders = Vec::new();
    let mut lanes = Vec::new();
    for (exceeds, mib) in [(false, 3), (true, 1), (true, 3)] {
        let (vm, lease) = if exceeds { (&mut excessive, &lease) } else { (&mut other, &beside) };
        let (lane, said) = server.adopt(&vm.take(lease).await.unwrap().id, 0, true);
        let folder = std::path::PathBuf::from(said["environment"]["CUDA_CACHE_PATH"].as_str().unwrap());
        std::fs::write(folder.join("code"), vec![1; mib << 20]).unwrap();
        lanes.push(lane);
        folders.push(folder);
    }
    eventually("the largest folder is gone", async || !folders[2].exists()).await;
    assert!(folders[0].exists() && folders[1].exists(), "others stay");
    assert_eq!(server.workers().iter().filter(|w| w["state"] == "active").count(), 3, "all continue");
    let journal = std::fs::read_to_string(server.path("journal")).unwrap();
    assert!(
        journal.contains("its client's programs have more than 4 MiB of compiled code; deleted"),
        "{journal}"
    );
}

#[tokio::test]
async fn compiled_code_that_a_worker_deletes_and_keeps_open_ends_it() {
    let mut server = Server::prepare("libcuda-hidden.so.1", "cache_max = \"8MiB\"").await;
    server.run_into("journal").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(10.0).await.unwrap();
    let (mut lane, _) = server.adopt(&vm.take(&lease.id).await.unwrap().id, 0, true);
    assert!(rest(&mut lane).is_empty(), "ended");
    let journal = std::fs::read_to_string(server.path("journal")).unwrap();
    assert!(journal.contains("more than 4 MiB of compiled code; killed"), "{journal}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn limits_change_while_clients_ask() {
    let server = Server::start_with("libcuda.so.1", "warm_workers = 0").await;
    let stays = server.client("vm-0").await.allocate(50.0).await.unwrap();
    // Clients that allocate and release as fast as they can.
    let over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut asking = Vec::new();
    for n in 1..=3 {
        let (mut vm, over) = (server.client(&format!("vm-{n}")).await, over.clone());
        asking.push(tokio::spawn(async move {
            let (mut granted, mut refused) = (0, 0);
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                match vm.allocate(30.0).await {
                    Ok(lease) => {
                        granted += 1;
                        vm.pool
                            .release(ReleaseRequest { lease: lease.id, ..Default::default() })
                            .await
                            .unwrap();
                    }
                    // The clients exceed the rate of 100 requests a second, too.
                    Err(status) if details(&status).limit == "memory" => refused += 1,
                    Err(status) => {
                        assert_eq!(details(&status).limit, "requests_per_s", "{status}");
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
            }
            (granted, refused)
        }));
    }
    let mut judge = server.client("vm-9").await;
    for round in 0..5 {
        server.set("limits.memory", "25%");
        // The limit applies as soon as the command has exited.
        refused_by(judge.allocate(30.0).await, "memory", "4915 MiB of GPU-");
        let fits = judge.allocate(10.0).await.unwrap();
        server.set("limits.memory", "75%");
        let more = judge.allocate(30.0).await.unwrap_or_else(|e| panic!("round {round}: {e}"));
        for lease in [fits, more] {
            judge.pool.release(ReleaseRequest { lease: lease.id, ..Default::default() }).await.unwrap();
        }
    }
    over.store(true, std::sync::atomic::Ordering::SeqCst);
    for client in asking {
        let (granted, refused) = client.await.expect("no request failed for another reason");
        assert!(granted > 0 && refused > 0, "{granted} granted, {refused} refused");
    }
    // Present leases stay as they are, and the counts are right.
    let leases = server.json(&["leases"])["leases"].as_array().unwrap().clone();
    assert_eq!((leases.len(), &leases[0]["lease"]), (1, &stays.id.as_str().into()), "{leases:?}");
    let leased: u64 = server.json(&["gpus"])["gpus"]
        .as_array()
        .unwrap()
        .iter()
        .map(|g| g["leased_bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(leased, stays.devices[0].limit_bytes);
}

#[tokio::test]
async fn layers_and_users() {
    let more = "limits.gpus = 1\nlimits.max_persistent = 5\nlimits.group.lab.clients = [\"vm-*\"]\n\
                limits.group.lab.gpus = 2\nlimits.user.alice.gpus = 1\nusers.scope = \"site\"";
    let server = Server::start_with("libcuda.so.1", more).await;
    let (mut a, mut b) = (server.client("vm-a").await, server.client("vm-b").await);
    let mut other = server.client("db").await;
    refused_by(named(&mut other, "", 2).await, "gpus", "of everybody");
    let alice = |c: &Client| AllocateRequest { user: "alice".into(), memory_percent: 10.0, ..c.request() };
    let first = a.pool.allocate(alice(&a)).await.unwrap().into_inner();
    let wish = alice(&b);
    refused_by(b.pool.allocate(wish.clone()).await, "gpus", "of user alice");
    a.allocate(10.0).await.unwrap();
    refused_by(a.allocate(10.0).await, "gpus", "of group lab");
    server.set("users.scope", "client");
    b.pool.allocate(wish).await.unwrap();
    a.pool.release(ReleaseRequest { lease: first.id, ..Default::default() }).await.unwrap();
    a.allocate(10.0).await.unwrap();
}

#[tokio::test]
async fn programs_on_the_lease_of_a_machine_count_for_their_users() {
    // The programs of the fake workers belong to alice.
    let more = "limits.user.alice.workers = 2\nlimits.client.vm-b.workers = 2\nusers.scope = \"site\"";
    let server = Server::start_with("libcuda.so.1", more).await;
    let (mut a, mut b) = (server.client("vm-a").await, server.client("vm-b").await);
    let (of_a, of_b) = (a.allocate(50.0).await.unwrap(), b.allocate(50.0).await.unwrap());
    let first = a.take(&of_a.id).await.unwrap();
    let (_first, _) = server.adopt(&first.id, 0, true);
    let second = b.take(&of_b.id).await.unwrap();
    let (_second, _) = server.adopt(&second.id, 0, true);
    // The client can take a worker; a third program of alice is refused with the reason.
    let third = a.take(&of_a.id).await.unwrap();
    let begun = std::time::Instant::now();
    let (mut lane, _) = server.adopt(&third.id, 0, true);
    let said = String::from_utf8(rest(&mut lane)).unwrap();
    assert!(
        said.contains("limit workers = 2 of user alice") && said.contains("there are 2 programs"),
        "{said}"
    );
    assert!(begun.elapsed() >= Duration::from_secs(2), "it waits for one that may be ending");
    let noted = || server.json(&["audit", "--event", "program-refused"])["audit"][0].clone();
    eventually("a line in the audit trail", async || noted()["actor"] == "client vm-a").await;
    assert_eq!(noted()["result"], "limit-workers", "{}", noted());
    // A program that exits makes room for one that waits.
    let fourth = b.take(&of_b.id).await.unwrap();
    let (mut lane, said) = server.adopt(&fourth.id, 0, true);
    let ended = ProcessEndedRequest { lease: of_a.id.clone(), worker: first.id };
    a.pool.process_ended(ended).await.unwrap();
    eventually("it is served", async || {
        server.workers().iter().any(|w| w["worker"] == said["worker"] && w["state"] == "active")
    })
    .await;
    // With the scope `client` each client counts separately.
    server.set("users.scope", "client");
    let fifth = a.take(&of_a.id).await.unwrap();
    let (_fifth, said) = server.adopt(&fifth.id, 0, true);
    let of_alice = |w: &&serde_json::Value| w["user"] == "alice" && w["state"] == "active";
    eventually("it is served too", async || server.workers().iter().filter(of_alice).count() == 3).await;
    assert!(server.workers().iter().any(|w| w["worker"] == said["worker"]));
    lane.set_nonblocking(true).unwrap();
    let mut byte = [0];
    assert_eq!(
        lane.read(&mut byte).unwrap_err().kind(),
        std::io::ErrorKind::WouldBlock,
        "its link stays open"
    );
}

#[tokio::test]
async fn a_group_limits_each_of_its_members() {
    let more = "limits.gpus = 3\nlimits.group.students.users = [\"bob\", \"carol\"]\nlimits.group.students.gpus = 1\n\
                users.scope = \"site\"";
    let server = Server::start_with("libcuda.so.1", more).await;
    let (mut a, mut b) = (server.client("vm-a").await, server.client("vm-b").await);
    let of =
        |c: &Client, user: &str| AllocateRequest { user: user.into(), memory_percent: 10.0, ..c.request() };
    a.pool.allocate(of(&a, "alice")).await.unwrap();
    a.pool.allocate(of(&a, "bob")).await.unwrap();
    refused_by(a.pool.allocate(of(&a, "bob")).await, "gpus", "of group students");
    refused_by(b.pool.allocate(of(&b, "bob")).await, "gpus", "of group students");
    a.pool.allocate(of(&a, "carol")).await.unwrap();
    server.set("users.scope", "client");
    b.pool.allocate(of(&b, "bob")).await.unwrap();
    // The client chooses user names, so that they give it no more than it has itself.
    refused_by(a.pool.allocate(of(&a, "dave")).await, "gpus", "of everybody");
    server.set("limits.user.dave.gpus", "9");
    refused_by(a.pool.allocate(of(&a, "dave")).await, "gpus", "of everybody");
    server.set("limits.user.erin.servers", "[\"other\"]");
    refused_by(b.pool.allocate(of(&b, "erin")).await, "servers", "of user erin");
    b.pool.allocate(of(&b, "frank")).await.unwrap();
}

#[tokio::test]
async fn idle_times_are_those_of_client_user_and_lease() {
    // Leases of other users stay.
    let more =
        "limits.gpus = 64\nlimits.user.bob.release_after = \"1s\"\nlimits.client.vm-b.park_after = \"1s\"";
    let server = Server::start_with("libcuda.so.1", more).await;
    let (mut a, mut b) = (server.client("vm-a").await, server.client("vm-b").await);
    let program = async |client: &Client, wish: AllocateRequest| {
        let mut client = client.clone();
        let lease = client.pool.allocate(wish).await.unwrap().into_inner().id;
        let worker = client.take(&lease).await.unwrap();
        (server.adopt(&worker.id, 0, true).0, lease)
    };
    let wish = |c: &Client| AllocateRequest { memory_percent: 10.0, ..c.request() };
    let bad = AllocateRequest { on_idle: "burn".into(), ..wish(&a) };
    assert_eq!(a.pool.allocate(bad).await.unwrap_err().code(), Code::InvalidArgument);
    // A lease may only evade the server's policy if a limit allows that.
    let keep = AllocateRequest { on_idle: "keep".into(), ..wish(&b) };
    refused_by(b.pool.allocate(keep.clone()).await, "on_idle", "of everybody (default): \"keep\" asked for");
    let hold = AllocateRequest { hold: true, ..wish(&a) };
    refused_by(a.pool.allocate(hold.clone()).await, "on_idle", "\"hold\" asked for");
    server.set("limits.client.vm-b.on_idle", "[\"keep\", \"release\"]");

    let (_alice, stays) = program(&a, AllocateRequest { user: "alice".into(), ..wish(&a) }).await;
    let (_kept, kept) = program(&b, keep).await;
    let mut watch = a.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap().into_inner();
    let (mut bob, bobs) = program(&a, AllocateRequest { user: "bob".into(), ..wish(&a) }).await;
    let lost = async |watch: &mut tonic::Streaming<control::PoolEvent>, lease: &str| loop {
        let event = watch.message().await.unwrap().expect("the stream continues");
        match event.event {
            Some(Event::Lost(loss)) if event.lease == lease => return loss.reason,
            _ => {}
        }
    };
    let reason = lost(&mut watch, &bobs).await;
    assert!(reason.contains("no GPU work for") && reason.contains("(release_after)"), "{reason}");
    assert!(rest(&mut bob).is_empty());
    let mut watch = b.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap().into_inner();
    let (mut yields, gone) = program(&b, AllocateRequest { on_idle: "release".into(), ..wish(&b) }).await;
    let reason = lost(&mut watch, &gone).await;
    assert!(reason.contains("on_idle = \"release\""), "{reason}");
    assert!(rest(&mut yields).is_empty());
    let left = server.json(&["leases"])["leases"].as_array().unwrap().clone();
    let row = |id: &str| left.iter().find(|l| l["lease"] == id).expect("it is there").clone();
    assert_eq!(left.len(), 2, "{left:?}");
    assert!(row(&stays)["idle_usec"].as_u64().unwrap() >= 1_000_000, "as idle as the one that ended");
    assert_eq!(row(&kept)["on_idle"], "keep");
    assert!(row(&kept)["idle_usec"].as_u64().unwrap() >= 1_000_000);
}

#[tokio::test]
async fn a_lease_may_be_idle_sooner_and_by_its_owners_word() {
    let more = "limits.gpus = 64\nlimits.client.vm-b.park_after = 0";
    let server = Server::start_with("libcuda.so.1", more).await;
    let (mut a, mut b) = (server.client("vm-a").await, server.client("vm-b").await);
    let minutes = |n: u64| n * 60_000_000;
    let default = a.pool.describe(DescribeRequest::default()).await.unwrap().into_inner();
    assert_eq!((default.idle_timeout_usec, default.lease_ttl_usec), (minutes(30), minutes(1)));
    assert_eq!(
        b.pool.describe(DescribeRequest::default()).await.unwrap().into_inner().idle_timeout_usec,
        0,
        "never"
    );
    let base = a.request();
    let wish = |usec| AllocateRequest { memory_percent: 10.0, idle_timeout_usec: usec, ..base.clone() };
    for (asked, holds) in [(0, 30), (minutes(45), 30), (minutes(5), 5)] {
        let lease = a.pool.allocate(wish(asked)).await.unwrap().into_inner();
        assert_eq!(lease.idle_timeout_usec, minutes(holds), "{asked}");
    }
    let keep = AllocateRequest { on_idle: "keep".into(), ..wish(1) };
    assert_eq!(a.pool.allocate(keep).await.unwrap_err().code(), Code::InvalidArgument);

    let lease = a.pool.allocate(wish(minutes(5))).await.unwrap().into_inner();
    let worker = a.take(&lease.id).await.unwrap();
    let _lane = server.adopt(&worker.id, 0, true);
    let renewed =
        async |a: &mut Client| a.pool.renew(renew(&[&lease.id])).await.unwrap().into_inner().leases.remove(0);
    // The worker reports its program over another channel than the one that answers the program.
    eventually("its program shows", async || renewed(&mut a).await.state == "active").await;
    let now = renewed(&mut a).await;
    assert_eq!((now.state.as_str(), now.idle_timeout_usec), ("active", minutes(5)));
    assert_eq!(now.fencing_token, lease.fencing_token);
    let mut watch = a.pool.watch(WatchRequest { boot_id: "b1".into() }).await.unwrap().into_inner();
    for (idle, state) in [(true, "idle"), (false, "active")] {
        let hint = control::IdleHintRequest { lease: lease.id.clone(), idle };
        assert_eq!(b.pool.idle_hint(hint.clone()).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(a.pool.idle_hint(hint).await.unwrap().into_inner().state, state);
        let told = loop {
            let event = watch.message().await.unwrap().expect("the stream continues");
            if let Some(Event::State(change)) = event.event {
                break (event.lease, change.state);
            }
        };
        assert_eq!(told, (lease.id.clone(), state.to_owned()));
        assert_eq!(renewed(&mut a).await.state, state);
    }
    server.set("park_after", "2min");
    assert_eq!(renewed(&mut a).await.idle_timeout_usec, minutes(2), "changes hold at once");
}
