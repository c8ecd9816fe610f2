//! The grant socket, with real sockets and processes and a simulated pool.

/// Tests of one subject each.
mod grant {
    mod waits;
}

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use gpusession_common::words::Class;
use gpusession_proto::grant::{
    Denial, MAX_OUTCOME, MAX_OUTCOMES, Outage, Outcome, PROGRAM_THREAD, Reply, Request, Want,
};
use gpusession_proto::readings::{Query, uuid_bytes};
use gpusession_proto::ticket::Ticket;
use gpusession_proto::{message, preface};
use gpusession_test_daemon::{
    GrantSocket, Helper, TEST_TIMEOUT, ask_async, config, engine, read_reply, request, until, waiting, want,
};
use gpusessiond::access::Gate;
use gpusessiond::config::Config;
use gpusessiond::grant::Limits;
use gpusessiond::leases::engine::Engine;
use gpusessiond::leases::sim::{KEY, SimServer};
use gpusessiond::leases::{Answer, Caller, LeaseState, Leases as _, Owner, Spec, WorkerRequest};
use gpusessiond::pool::{PoolError, Trouble};
use gpusessiond::subuid::{Owners, Principal};

#[test]
fn helper_process() {
    gpusession_test_daemon::helper_main();
}

/// Time that a first call waits with [`quick`].
const QUICK: Duration = Duration::from_millis(100);

fn quick() -> Config {
    waiting(QUICK, &[1])
}

fn held(snapshot: &gpusessiond::leases::Snapshot) -> bool {
    !snapshot.leases.is_empty()
        && snapshot.leases.iter().all(|l| l.facts.state == LeaseState::Active && l.gauges.stock > 0)
}

#[tokio::test]
async fn a_process_gets_a_worker_and_a_ticket_of_its_own() {
    let sim = SimServer::new("gpu-a", 2);
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    want(&engine, &config).await;
    until(&engine, held).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let (reply, _connection) = ask_async(&socket.path, request()).await;
    let Reply::Granted(endpoints) = reply else { panic!("{reply:?}") };
    assert_eq!(endpoints.len(), 1);
    let endpoint = &endpoints[0];
    assert_eq!(endpoint.server, "gpu-a");
    assert_eq!(endpoint.addresses, ["127.0.0.1:7602"]);
    assert_eq!(endpoint.fingerprint, Some([3; 32]));
    assert_eq!(endpoint.devices, 1);
    let ticket = Ticket::open(&endpoint.ticket, &KEY, &endpoint.worker).unwrap();
    assert_eq!(ticket.uid, nix::unistd::getuid().as_raw());
    assert_eq!(ticket.pid, std::process::id());
    assert_eq!(ticket.boot_id, [9; 16]);
    assert_eq!(ticket.lease, endpoint.lease);
    assert_eq!(ticket.program, "test");
    let (reply, _other) = ask_async(&socket.path, request()).await;
    let Reply::Granted(second) = reply else { panic!("{reply:?}") };
    assert_ne!(second[0].worker, endpoint.worker, "one worker, one process");
}

#[tokio::test]
async fn data_in_clear_needs_the_clients_word() {
    let sim = SimServer::new("gpu-a", 2);
    sim.with(|state| state.trusts_network = true);
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    want(&engine, &config).await;
    until(&engine, |s| s.leases.iter().any(|l| format!("{l:?}").contains("data unencrypted"))).await;
    sim.until(|state| !state.released.is_empty() && state.leases.is_empty()).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let (reply, _connection) = ask_async(&socket.path, request()).await;
    let Reply::Denied { reason, .. } = reply else { panic!("{reply:?}") };
    assert!(reason.contains("encryption = \"server\""), "the remedy: {reason}");

    engine.allow_clear(true);
    engine.configure(vec![Spec::configured(&self::config(&[2]).leases[0], 0)]).await;
    until(&engine, held).await;
    let (reply, _connection) = ask_async(&socket.path, request()).await;
    let Reply::Granted(endpoints) = reply else { panic!("{reply:?}") };
    assert_eq!(endpoints[0].fingerprint, None);
    // An earlier lease serves no program once the word is taken back.
    engine.allow_clear(false);
    let (reply, _connection) = ask_async(&socket.path, request()).await;
    assert!(matches!(reply, Reply::Denied { .. }), "{reply:?}");
}

#[tokio::test]
async fn questions_about_the_gpus_take_no_worker() {
    let (one, two) = (SimServer::new("gpu-a", 1), SimServer::new("gpu-b", 1));
    let engine = engine(&[&one, &two]);
    let config = config(&[1, 1]);
    want(&engine, &config).await;
    until(&engine, held).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let device = |sim: &SimServer| uuid_bytes(&sim.uuid(0)).unwrap();
    let query = |device, call: &str| Query { device, call: call.into(), input: vec![] };
    let queries = vec![query(device(&two), "b"), query(device(&one), "a"), query([1; 16], "nobody's")];
    let taken = || one.with(|s| s.taken.len()) + two.with(|s| s.taken.len());
    let before = taken();
    let (reply, _) = ask_async(&socket.path, Request { want: Want::Readings(queries), ..request() }).await;
    let Reply::Readings(view) = reply else { panic!("{reply:?}") };
    assert_eq!(taken(), before);
    let devices: Vec<_> = view.devices.iter().map(|d| (d.server.as_str(), d.uuid, d.memory_bytes)).collect();
    assert_eq!(devices, [("gpu-a", device(&one), 1 << 30), ("gpu-b", device(&two), 1 << 30)]);
    let said: Vec<_> = view.answers.iter().map(|a| (a.status, a.output.as_slice())).collect();
    assert_eq!(said, [(0, &b"b"[..]), (0, b"a"), (2, b"")], "each server answers for its own devices");

    let (reply, _) = ask_async(&socket.path, Request { want: Want::Version, ..request() }).await;
    assert_eq!(reply, Reply::Version(13000));
    assert_eq!(taken(), before);
    let nobody = Request { lease: Some("nosuchlease".into()), want: Want::Version, ..request() };
    let (reply, _) = ask_async(&socket.path, nobody).await;
    assert!(matches!(reply, Reply::Denied { .. }), "{reply:?}");
    let nobody = Request { lease: Some("nosuchlease".into()), want: Want::Readings(vec![]), ..request() };
    let (reply, _) = ask_async(&socket.path, nobody).await;
    assert!(matches!(reply, Reply::Denied { denial: Denial::NoDevice, .. }), "{reply:?}");
}

#[tokio::test]
async fn the_server_hears_at_once_that_a_process_was_killed() {
    let sim = SimServer::new("gpu-a", 1);
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    want(&engine, &config).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let helper = Helper::start_async(&socket.path).await;
    assert!(helper.granted);
    until(&engine, |s| s.leases[0].facts.processes == 1).await;
    assert!(sim.with(|s| s.ended.is_empty()));
    helper.kill();
    let ended = sim.until(|s| s.ended.len() == 1);
    tokio::time::timeout(Duration::from_secs(10), ended).await.expect("at once");
    until(&engine, |s| s.leases[0].facts.processes == 0).await;
}

#[tokio::test]
async fn a_process_that_closes_its_connection_keeps_its_gpu() {
    let sim = SimServer::new("gpu-a", 1);
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    want(&engine, &config).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    // This test is the process, so dropping the connection does not end it.
    let (reply, connection) = ask_async(&socket.path, request()).await;
    assert!(matches!(reply, Reply::Granted(_)));
    drop(connection);
    let helper = Helper::start_async(&socket.path).await;
    helper.kill();
    sim.until(|s| s.ended.len() == 1).await;
    assert_eq!(engine.snapshot().borrow().leases[0].facts.processes, 1);
}

/// Runs a thread with the name of the library's, until the sender is dropped.
fn library_thread() -> std::sync::mpsc::Sender<()> {
    let (stop, stopped) = std::sync::mpsc::channel();
    let run = move || {
        let _ = stopped.recv();
    };
    std::thread::Builder::new().name(PROGRAM_THREAD.into()).spawn(run).unwrap();
    stop
}

#[tokio::test]
async fn workers_of_a_process_that_runs_another_program_are_given_back() {
    let sim = SimServer::new("gpu-a", 1);
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    want(&engine, &config).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    // This test is the process.
    let connect = async || {
        let (reply, mut connection) = ask_async(&socket.path, request()).await;
        assert!(matches!(reply, Reply::Granted(_)));
        connection.write_all(&message::encode(&Outcome::Served)).unwrap();
    };
    let library = library_thread();
    connect().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(sim.with(|s| s.ended.is_empty()), "it has only closed its descriptors");
    drop(library);
    while gpusessiond::peer::has_thread(std::process::id(), PROGRAM_THREAD).unwrap() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    connect().await;
    tokio::time::timeout(TEST_TIMEOUT, sim.until(|s| s.ended.len() == 1)).await.expect("as after exec");
}

#[tokio::test]
async fn a_program_in_an_outage_learns_that_its_lease_has_ended() {
    let sim = SimServer::new("gpu-a", 1);
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    want(&engine, &config).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let (reply, _connection) = ask_async(&socket.path, request()).await;
    let Reply::Granted(endpoints) = reply else { panic!("{reply:?}") };
    let lease = endpoints[0].lease.clone();
    let outage =
        Outage { lease: lease.clone(), worker: endpoints[0].worker, ms: 400, number: 1, over: false };
    let state = async |outage: Outage| {
        ask_async(&socket.path, Request { want: Want::Outage(outage), ..request() }).await.0
    };
    assert_eq!(state(outage.clone()).await, Reply::Awaited);
    let shown = || engine.snapshot().borrow().leases[0].gauges.interruptions.clone();
    let is = |since: bool| {
        until(&engine, move |s| {
            let seen = &s.leases[0].gauges.interruptions;
            seen.len() == 1 && seen[0].since.is_some() == since
        })
    };
    is(true).await;
    let seen = &shown()[0];
    assert_eq!((seen.pid, seen.program.as_str(), seen.number), (std::process::id(), "test", 1));
    state(Outage { over: true, ..outage.clone() }).await;
    is(false).await;
    let slot = engine.snapshot().borrow().leases[0].facts.slot;
    engine.release(slot, "released by alice").await;
    assert_eq!(
        state(outage.clone()).await,
        Reply::Ended(format!("lease {lease} has ended: released by alice"))
    );
    let stranger = Outage { worker: [1; 16], ..outage };
    assert_eq!(state(stranger).await, Reply::Awaited, "only the program knows its worker");
}

fn failures(snapshot: &gpusessiond::leases::Snapshot) -> Vec<(u32, bool, String)> {
    snapshot.leases[0].facts.failures.iter().map(|(f, _)| (f.pid, f.running, f.reason.clone())).collect()
}

#[tokio::test]
async fn reported_failures_last_until_a_process_is_served() {
    let sim = SimServer::new("gpu-a", 1);
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    want(&engine, &config).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let me = std::process::id();
    let granted = async || {
        let (reply, connection) = ask_async(&socket.path, request()).await;
        let Reply::Granted(endpoints) = reply else { panic!("{reply:?}") };
        (endpoints[0].lease.clone(), connection)
    };

    let (lease, mut first) = granted().await;
    let reason = "server gpu-a at 10.0.0.1:7602: refused\n\u{1b}[31m\u{202e}".to_owned();
    let unserved = |again| Outcome::Unserved { lease: lease.clone(), reason: reason.clone(), again };
    // The program tries again: its worker is returned.
    let (_, mut before) = granted().await;
    before.write_all(&message::encode(&unserved(true))).unwrap();
    tokio::time::timeout(TEST_TIMEOUT, sim.until(|s| s.ended.len() == 1)).await.expect("at once");
    until(&engine, |s| s.leases[0].facts.failures.first().is_some_and(|(failure, _)| failure.again)).await;
    first.write_all(&message::encode(&unserved(false))).unwrap();
    until(&engine, |s| s.leases[0].facts.failures.first().is_some_and(|(failure, _)| !failure.again)).await;
    let unserved = (me, false, "server gpu-a at 10.0.0.1:7602: refused[31m".to_owned());
    assert_eq!(failures(&engine.snapshot().borrow()), [unserved], "no control characters");
    // This test is the process, and keeps running: still its worker is returned and no longer
    // counted.
    tokio::time::timeout(TEST_TIMEOUT, sim.until(|s| s.ended.len() == 2)).await.expect("at once");
    until(&engine, |s| s.leases[0].facts.processes == 0).await;

    let (_, mut second) = granted().await;
    let (served, lost) =
        (Outcome::Served, Outcome::Lost { lease: lease.clone(), reason: "END: fault".into() });
    second.write_all(&message::encode(&served)).unwrap();
    until(&engine, |s| s.leases[0].facts.failures.is_empty()).await;
    // In two parts, followed by the end of the connection.
    let bytes = message::encode(&lost);
    second.write_all(&bytes[..7]).unwrap();
    tokio::task::yield_now().await;
    second.write_all(&bytes[7..]).unwrap();
    drop(second);
    until(&engine, |s| failures(s) == [(me, true, "END: fault".into())]).await;
    assert_eq!(engine.snapshot().borrow().leases[0].facts.processes, 1, "it still runs");
}

#[tokio::test]
async fn nonsense_about_workers_changes_nothing() {
    let sim = SimServer::new("gpu-a", 1);
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    want(&engine, &config).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let unserved = |lease: &str| {
        let reason = "nonsense".into();
        message::encode(&Outcome::Unserved { lease: lease.to_owned(), reason, again: false })
    };
    let many = message::encode(&Outcome::Served).repeat(MAX_OUTCOMES);
    let long = message::encode(&Outcome::Lost { lease: String::new(), reason: "x".repeat(MAX_OUTCOME) });
    for before in [many, long, vec![0xff; 8192], message::encode(&7u32)] {
        let (reply, mut connection) = ask_async(&socket.path, request()).await;
        let Reply::Granted(endpoints) = reply else { panic!("{reply:?}") };
        connection.write_all(&before).unwrap();
        // Beyond the limit, so not read.
        connection.write_all(&unserved(&endpoints[0].lease)).unwrap();
    }
    // About a lease that the process was not granted.
    let (_, mut stranger) = ask_async(&socket.path, request()).await;
    stranger.write_all(&unserved("nosuchlease")).unwrap();
    until(&engine, |s| s.leases[0].facts.processes == 4).await;
    assert_eq!(failures(&engine.snapshot().borrow()), []);
    // The next program's outcome is read.
    let (reply, mut connection) = ask_async(&socket.path, request()).await;
    let Reply::Granted(endpoints) = reply else { panic!("{reply:?}") };
    connection.write_all(&unserved(&endpoints[0].lease)).unwrap();
    until(&engine, |s| failures(s).len() == 1 && s.leases[0].facts.processes == 4).await;
}

#[tokio::test]
async fn every_reason_for_no_gpu_has_its_own_error() {
    type Prepare = fn(&SimServer);
    const FULL: fn() -> PoolError = || PoolError::new(Trouble::OutOfMemory, "no room for another context");
    const MANY: fn() -> PoolError = || PoolError::new(Trouble::LimitExceeded, "no more than 2 programs");
    let cases: [(Prepare, Config, Denial, &str); 6] = [
        (|_| {}, Config { leases: vec![], ..quick() }, Denial::NoDevice, "no lease is configured"),
        (
            |s| s.with(|s| s.failing = Some(PoolError::new(Trouble::Unreachable, "gpu-a does not answer"))),
            quick(),
            Denial::NotReady,
            "gpu-a does not answer",
        ),
        (|s| s.with(|s| s.gpus = 0), quick(), Denial::NotReady, "all GPUs are taken"),
        (|s| s.with(|s| s.quota = Some(0)), quick(), Denial::Quota, "over the limit"),
        (|s| s.with(|s| s.refuses_workers = Some(FULL())), quick(), Denial::OutOfMemory, "no room"),
        (|s| s.with(|s| s.refuses_workers = Some(MANY())), quick(), Denial::Quota, "no more than 2 programs"),
    ];
    for (prepare, config, denial, words) in cases {
        let sim = SimServer::new("gpu-a", 1);
        prepare(&sim);
        let engine = engine(&[&sim]);
        want(&engine, &config).await;
        if !config.leases.is_empty() {
            until(&engine, |s| {
                s.leases[0].facts.trouble.is_some() || s.leases[0].facts.state == LeaseState::Active
            })
            .await;
        }
        let socket = GrantSocket::start(&engine, &config, Limits::default());
        let (reply, _connection) = ask_async(&socket.path, request()).await;
        match reply {
            Reply::Denied { denial: found, reason } => {
                assert_eq!(found, denial, "{reason}");
                assert!(reason.contains(words), "{reason}");
            }
            reply => panic!("{reply:?} although {words}"),
        }
    }
}

#[tokio::test]
async fn access_decides_and_a_named_lease_must_be_the_callers() {
    let me = nix::unistd::getuid().as_raw();
    let sim = SimServer::new("gpu-a", 4);
    let engine = engine(&[&sim]);
    let mut config = quick();
    config.access.users = vec!["somebody-else".into()];
    config.access.root = false;
    want(&engine, &config).await;
    until(&engine, held).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let (reply, _c) = ask_async(&socket.path, request()).await;
    assert!(
        matches!(&reply, Reply::Denied { denial: Denial::NoDevice, reason } if reason.contains("[access]")),
        "{reply:?}"
    );

    // A lease of the caller's own needs no access by `[access]`.
    let own = engine.create(Spec::requested("own".into(), me)).await.unwrap();
    let with = |id: &str| Request { lease: Some(id.into()), ..request() };
    let (reply, _c) = ask_async(&socket.path, with(&own.facts.id)).await;
    assert!(matches!(&reply, Reply::Granted(e) if e[0].lease == own.facts.id), "{reply:?}");
    let (reply, _c) = ask_async(&socket.path, with("nonesuchlease")).await;
    let Reply::Denied { denial: Denial::NoDevice, reason } = reply else { panic!("{reply:?}") };
    assert_eq!(reason, "lease nonesuchlease: not found among this user's leases");
    if me != 0 {
        let other = engine.create(Spec::requested("other".into(), me + 1)).await.unwrap();
        let (reply, _c) = ask_async(&socket.path, with(&other.facts.id)).await;
        assert!(matches!(reply, Reply::Denied { denial: Denial::NoDevice, .. }));
    }
}

#[tokio::test]
async fn a_program_gets_all_leases_that_it_names_in_their_order_or_none() {
    let me = nix::unistd::getuid().as_raw();
    let sims = [SimServer::new("gpu-a", 2), SimServer::new("gpu-b", 2)];
    let engine = engine(&[&sims[0], &sims[1]]);
    let socket = GrantSocket::start(&engine, &quick(), Limits::default());
    let mut ids = Vec::new();
    // Simulated servers number their leases alike; those of real ones have random ids.
    for (key, server) in [("other", "gpu-b"), ("first", "gpu-b"), ("second", "gpu-a")] {
        let spec = Spec { servers: vec![server.into()], ..Spec::requested(key.into(), me) };
        until(&engine, |s| s.server_facts().any(|known| known.name == server)).await;
        ids.push(engine.create(spec).await.unwrap().facts.id);
    }
    ids.remove(0);
    let named = |list: String| Request { lease: Some(list), ..request() };
    let (reply, _c) = ask_async(&socket.path, named(ids.join(", "))).await;
    let Reply::Granted(endpoints) = reply else { panic!("{reply:?}") };
    assert_eq!(endpoints.iter().map(|e| &e.lease).collect::<Vec<_>>(), ids.iter().collect::<Vec<_>>());
    let many = vec![ids[0].clone(); 9].join(",");
    for (list, words) in [
        (format!("{},nonesuch", ids[0]), "lease nonesuch: not found"),
        (format!("{0},{0}", ids[0]), "twice"),
        (format!("{},", ids[0]), "not found"),
        (many, "twice"),
    ] {
        let (reply, _c) = ask_async(&socket.path, named(list)).await;
        let Reply::Denied { denial: Denial::NoDevice, reason } = reply else { panic!("{reply:?}") };
        assert!(reason.contains(words), "{reason}");
    }
}

/// Returns a process of a user outside of sessions, containers and control groups.
fn caller(uid: u32, user: Option<&str>, principal: Option<Principal>, access: bool) -> Caller {
    Caller {
        uid,
        pid: 5,
        user: user.map(str::to_owned),
        principal,
        access,
        session: None,
        control_groups: Vec::new(),
        contained: false,
    }
}

/// Returns the lease that a caller's program gets, or the reason of a refusal.
async fn lease_for(engine: &Engine, caller: Caller, lease: Option<&str>) -> Result<String, String> {
    let wish = WorkerRequest { lease: lease.map(str::to_owned), ..WorkerRequest::default() };
    loop {
        match engine.grant(caller.clone(), wish.clone()).await {
            Answer::Granted(endpoints, _) => return Ok(endpoints[0].lease.clone()),
            Answer::Denied(_, reason) => return Err(reason),
            Answer::Wait(..) | Answer::Later(_) | Answer::Behind(_) => {
                tokio::time::sleep(Duration::from_millis(5)).await
            }
        }
    }
}

#[tokio::test]
async fn subordinate_uids_share_their_owners_lease_of_class_user() {
    let sim = SimServer::new("gpu-a", 4);
    let engine = engine(&[&sim]);
    let user = Spec { class: Class::User, ..Spec::configured(&config(&[1]).leases[0], 0) };
    engine.configure(vec![user]).await;
    let alice = Principal { uid: 1000, name: Some("alice".into()) };
    let lease = async |caller, lease: Option<&str>| lease_for(&engine, caller, lease).await;
    let below = |uid, access| caller(uid, None, Some(alice.clone()), access);
    assert!(lease(below(100_000, false), None).await.is_err(), "without access");
    let first = lease(below(100_000, true), None).await.unwrap();
    for uid in 100_001..100_020 {
        assert_eq!(lease(below(uid, true), None).await.as_ref(), Ok(&first), "{uid}");
    }
    assert_eq!(lease(caller(1000, Some("alice"), None, true), None).await.as_ref(), Ok(&first));
    assert!(lease(below(100_000, false), Some(&first)).await.is_err(), "without access");
    assert_ne!(lease(caller(1001, Some("bob"), None, true), None).await.unwrap(), first);
    let asked = sim.with(|s| s.requests.iter().map(|r| (r.user.clone(), r.uid)).collect::<Vec<_>>());
    assert_eq!(asked, [("alice".into(), 1000), ("bob".into(), 1001)], "limits of alice count");
    // A lease that the owner asked for is the owner's alone.
    engine.want(Spec::requested("request/1".into(), 1000)).await;
    until(&engine, |s| s.leases.len() == 3 && held(s)).await;
    let own = engine.snapshot().borrow().leases[2].facts.id.clone();
    assert!(lease(below(100_000, true), Some(&own)).await.is_err());
    assert_eq!(lease(caller(1000, Some("alice"), None, true), Some(&own)).await, Ok(own.clone()));
}

#[tokio::test]
async fn connections_of_subordinate_uids_count_as_their_owners() {
    use std::os::unix::fs::PermissionsExt as _;
    if !nix::unistd::getuid().is_root() {
        assert!(std::env::var_os("REQUIRE_SYSTEM").is_none(), "only root connects as other users");
        return;
    }
    let sim = SimServer::new("gpu-a", 1);
    let engine = engine(&[&sim]);
    let (config, folder) = (Config::default(), tempfile::tempdir().unwrap());
    let (subuid, passwd) = (folder.path().join("subuid"), folder.path().join("passwd"));
    std::fs::write(&subuid, "someone:2100000000:65536\n").unwrap();
    std::fs::write(&passwd, "someone:x:2000000000:2000000000::/:\n").unwrap();
    let gate = Gate::with_owners(config.access.clone(), Owners::of(&subuid, &passwd));
    let limits = Limits { per_uid: 3, ..Limits::default() };
    let socket = GrantSocket::with_gate(&engine, &config, limits, gate);
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(socket.path.parent().unwrap(), open).unwrap();
    // Connects as a user, and returns whether a refusal arrives in time.
    let refused = async |uid: u32, limit: Duration| {
        let path = socket.path.clone();
        let connect = move || {
            // SAFETY: the call takes three numbers, and changes the uid of this thread alone.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) };
            assert_eq!(changed, 0);
            let mut stream = UnixStream::connect(path).unwrap();
            stream.set_read_timeout(Some(limit)).unwrap();
            let answer = read_reply(&mut stream);
            (answer.is_ok(), stream)
        };
        // A thread of its own, which exits with its uid.
        let thread = std::thread::spawn(connect);
        tokio::task::spawn_blocking(|| thread.join().unwrap()).await.unwrap()
    };
    let moment = Duration::from_millis(200);
    let mut held = Vec::new();
    for uid in [2_000_000_000, 2_100_000_000, 2_100_065_535] {
        let (refused, connection) = refused(uid, moment).await;
        assert!(!refused, "{uid}");
        held.push(connection);
    }
    assert!(refused(2_100_000_007, TEST_TIMEOUT).await.0, "a fourth connection of one user");
    assert!(refused(2_000_000_000, TEST_TIMEOUT).await.0);
    assert!(!refused(2_100_065_536, moment).await.0, "another user");
}

/// A lease of one job, and a process of its user in these control groups.
fn of_job(group: &str, uid: u32) -> Spec {
    Spec { control_group: Some(group.into()), ..Spec::requested(format!("request/{group}"), uid) }
}

#[tokio::test]
async fn a_lease_of_a_jobs_control_group_serves_that_job_alone() {
    let sim = SimServer::new("gpu-a", 4);
    let engine = engine(&[&sim]);
    engine.configure(vec![Spec::configured(&config(&[1]).leases[0], 0)]).await;
    engine.want(of_job("/slurm/job_1", 1000)).await;
    engine.want(of_job("/slurm/job_12", 1000)).await;
    until(&engine, |s| s.leases.len() == 3 && held(s)).await;
    let id = |order: usize| engine.snapshot().borrow().leases[order].facts.id.clone();
    let (all, first, second) = (id(0), id(1), id(2));
    let caller = |uid, groups: &[&str]| Caller {
        control_groups: groups.iter().map(|group| (*group).to_owned()).collect(),
        ..caller(uid, None, None, true)
    };
    let granted = async |caller, lease: Option<&str>| lease_for(&engine, caller, lease).await;
    // A job finds its lease without a variable; other processes get the machine's.
    let step = caller(1000, &["/", "/slurm/job_1/step_0"]);
    assert_eq!(granted(step.clone(), None).await, Ok(first.clone()));
    assert_eq!(granted(caller(1000, &["/slurm/job_12"]), None).await, Ok(second.clone()));
    assert_eq!(granted(caller(1000, &["/user.slice/slurm/job_1"]), None).await, Ok(all.clone()));
    let machines = all.clone();
    assert_eq!(granted(caller(1001, &["/slurm/job_1"]), None).await, Ok(all), "another user");
    // Another job of the same user cannot name it; root can.
    assert_eq!(granted(step.clone(), Some(&first)).await, Ok(first.clone()));
    let refused = granted(step.clone(), Some(&second)).await.unwrap_err();
    assert!(refused.contains("control group /slurm/job_12"), "{refused}");
    let both = granted(step, Some(&format!("{first},{second}"))).await.unwrap_err();
    assert!(both.contains("/slurm/job_12"), "{both}");
    assert_eq!(granted(caller(0, &[]), Some(&second)).await.as_ref(), Ok(&second));
    let contained = || Caller { contained: true, ..caller(0, &[]) };
    let refused = granted(contained(), Some(&second)).await.unwrap_err();
    assert!(refused.contains("not found among this user's leases"), "{refused}");
    assert_eq!(granted(contained(), None).await, Ok(machines), "the machine's");
}

/// A control group of this test, where the machine lets it make one.
struct Group(std::path::PathBuf);

impl Group {
    /// Returns the group, and its path as `/proc/PID/cgroup` shows it.
    fn new() -> Option<(Self, String)> {
        let version1 = std::path::Path::new("/sys/fs/cgroup/freezer");
        let root = if version1.exists() { version1 } else { std::path::Path::new("/sys/fs/cgroup") };
        let name = format!("gpusession-test-{}", std::process::id());
        let folder = root.join(&name);
        std::fs::create_dir(&folder).ok()?;
        Some((Self(folder), format!("/{name}")))
    }

    /// Starts a helper in the group.
    fn helper(&self, socket: &std::path::Path) -> Helper {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]);
        command.arg(self.0.join("cgroup.procs")).arg(std::env::current_exe().unwrap());
        Helper::by(command, socket)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[tokio::test]
async fn the_kernel_tells_the_control_group_of_a_process() {
    let Some((group, path)) = Group::new() else {
        assert!(std::env::var_os("REQUIRE_SYSTEM").is_none(), "this user may not make control groups");
        return;
    };
    let sim = SimServer::new("gpu-a", 1);
    let engine = engine(&[&sim]);
    let uid = nix::unistd::getuid().as_raw();
    engine.want(of_job(&path, uid)).await;
    until(&engine, held).await;
    let socket = GrantSocket::start(&engine, &quick(), Limits::default());
    let outside = Helper::start_async(&socket.path).await;
    assert!(!outside.granted);
    outside.kill();
    let path = socket.path.clone();
    let (inside, _group) = tokio::task::spawn_blocking(move || (group.helper(&path), group)).await.unwrap();
    assert!(inside.granted);
    inside.kill();
}

#[tokio::test]
async fn a_users_own_configured_lease_comes_before_the_one_for_all() {
    let me = nix::unistd::User::from_uid(nix::unistd::getuid()).unwrap().unwrap().name;
    let sim = SimServer::new("gpu-a", 4);
    let engine = engine(&[&sim]);
    let mut config = config(&[1, 1, 1]);
    config.leases[1].for_user = Some(me);
    want(&engine, &config).await;
    until(&engine, held).await;
    let id = engine.snapshot().borrow().leases[1].facts.id.clone();
    assert_eq!(
        engine.snapshot().borrow().leases[1].facts.spec.owner,
        Owner::User(config.leases[1].for_user.clone().unwrap())
    );
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let (reply, _c) = ask_async(&socket.path, request()).await;
    let Reply::Granted(endpoints) = reply else { panic!("{reply:?}") };
    assert_eq!(endpoints.iter().map(|e| e.lease.as_str()).collect::<Vec<_>>(), [id]);
}

#[tokio::test]
async fn several_leases_for_all_are_one_machine_to_a_process() {
    let a = SimServer::new("gpu-a", 1);
    let b = SimServer::new("gpu-b", 2);
    let engine = engine(&[&a, &b]);
    let config = config(&[2, 1]);
    want(&engine, &config).await;
    until(&engine, held).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let (reply, _c) = ask_async(&socket.path, request()).await;
    let Reply::Granted(endpoints) = reply else { panic!("{reply:?}") };
    let order: Vec<_> = endpoints.iter().map(|e| (e.server.as_str(), e.devices)).collect();
    assert_eq!(order, [("gpu-b", 2), ("gpu-a", 1)], "in the order of the file");
}

#[tokio::test]
async fn a_driver_environment_of_its_own_gets_a_worker_of_its_own() {
    let sim = SimServer::new("gpu-a", 1);
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    want(&engine, &config).await;
    until(&engine, held).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let environment = vec![("CUDA_LAUNCH_BLOCKING".to_owned(), "1".to_owned())];
    let (reply, _c) = ask_async(&socket.path, Request { environment, ..request() }).await;
    assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
    assert_eq!(sim.with(|s| s.environments[0]["CUDA_LAUNCH_BLOCKING"].clone()), "1");
}

#[tokio::test]
async fn garbage_disturbs_no_other_caller() {
    let sim = SimServer::new("gpu-a", 1);
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    want(&engine, &config).await;
    until(&engine, held).await;
    let limits = Limits { io_timeout: Duration::from_secs(1), ..Limits::default() };
    let socket = GrantSocket::start(&engine, &config, limits);
    let good = message::encode(&request());
    let mut longer = good.clone();
    longer[0] += 1;
    longer.push(7);
    let mut future = request();
    future.version = 99;
    let mut much = request();
    much.environment = vec![("A".into(), "B".into()); 33];
    let cases: Vec<(Vec<u8>, bool)> = vec![
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), true),
        (u32::MAX.to_le_bytes().to_vec(), true),
        (65_536u32.to_le_bytes().to_vec(), true),
        ([4u32.to_le_bytes().as_slice(), &[0xff; 4]].concat(), true),
        (longer, true),
        (message::encode(&future), true),
        (message::encode(&much), true),
        (good[..good.len() - 1].to_vec(), false),
        (vec![], false),
        (vec![1], false),
    ];
    for (bytes, answered) in cases {
        let mut stream = UnixStream::connect(&socket.path).unwrap();
        stream.write_all(&bytes).unwrap();
        if !answered {
            // The rest of the request never comes: the caller gets no answer.
            drop(stream.try_clone().unwrap());
        }
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(20)]).into_owned();
        let reply = tokio::task::spawn_blocking(move || {
            stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
            let reply = read_reply(&mut stream).ok();
            let mut rest = [0; 1];
            assert_eq!(stream.read(&mut rest).unwrap_or(0), 0, "closed after the answer");
            reply
        })
        .await
        .unwrap();
        match reply {
            Some(Reply::Denied { denial: Denial::ProtocolMismatch, .. }) => assert!(answered, "{shown:?}"),
            None => assert!(!answered, "{shown:?}"),
            other => panic!("{shown:?}: {other:?}"),
        }
    }
    let (reply, _c) = ask_async(&socket.path, request()).await;
    assert!(matches!(reply, Reply::Granted(_)));
}

#[tokio::test]
async fn slow_callers_delay_no_others_and_one_user_cannot_take_all_slots() {
    let sim = SimServer::new("gpu-a", 1);
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    want(&engine, &config).await;
    until(&engine, held).await;
    let limits = Limits { per_uid: 8, total: 8, io_timeout: TEST_TIMEOUT * 2, ..Limits::default() };
    let socket = GrantSocket::start(&engine, &config, limits);
    let dripping: Vec<_> = (0..7)
        .map(|_| {
            let mut stream = UnixStream::connect(&socket.path).unwrap();
            stream.write_all(&[1]).unwrap();
            stream
        })
        .collect();
    let (reply, connection) = ask_async(&socket.path, request()).await;
    assert!(matches!(reply, Reply::Granted(_)), "served while others drip");
    let (reply, _c) = ask_async(&socket.path, request()).await;
    let Reply::Denied { denial: Denial::NotReady, reason } = reply else { panic!("{reply:?}") };
    assert!(reason.contains("too many connections"), "{reason}");
    drop(dripping);
    drop(connection);
    // The slots of closed connections are free again.
    let again = async {
        loop {
            if let (Reply::Granted(_), _c) = ask_async(&socket.path, request()).await {
                return;
            }
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, again).await.unwrap();
}

#[tokio::test]
async fn a_program_that_begins_as_another_ends_waits_for_its_place() {
    for environment in [vec![], vec![("CUDA_DEVICE_MAX_CONNECTIONS".to_string(), "1".to_string())]] {
        for trouble in [Trouble::LimitExceeded, Trouble::OutOfMemory] {
            let sim = SimServer::new("gpu-a", 1);
            sim.with(|s| s.refuses_workers = Some(PoolError::new(trouble, "one program at a time")));
            let engine = engine(&[&sim]);
            let config = waiting(TEST_TIMEOUT, &[1]);
            want(&engine, &config).await;
            until(&engine, |s| s.leases[0].facts.state == LeaseState::Active).await;
            let socket = GrantSocket::start(&engine, &config, Limits::default());
            let asking = ask_async(&socket.path, Request { environment: environment.clone(), ..request() });
            let ends = async {
                // The call to the server counts the waiting program; the server refuses.
                sim.until(|s| s.waiting.contains(&1)).await;
                sim.with(|s| s.refuses_workers = None);
            };
            let ((reply, _connection), ()) = tokio::join!(asking, ends);
            assert!(matches!(reply, Reply::Granted(_)), "{trouble:?}, {environment:?}: {reply:?}");
        }
    }
}

#[tokio::test]
async fn a_later_server_that_serves_this_version_is_used() {
    let sim = SimServer::new("gpu-a", 1);
    sim.with(|s| s.protocol = Some((preface::VERSION.into(), 9)));
    let engine = engine(&[&sim]);
    let config = quick();
    want(&engine, &config).await;
    until(&engine, |s| held(s) && s.servers[0].facts.protocol == 9).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let (reply, _c) = ask_async(&socket.path, request()).await;
    assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
}

#[tokio::test]
async fn a_server_of_another_version_is_not_tried() {
    let sim = SimServer::new("gpu-a", 1);
    sim.with(|s| s.protocol = Some((8, 9)));
    let engine = engine(&[&sim]);
    let config = quick();
    want(&engine, &config).await;
    until(&engine, |s| held(s) && s.servers[0].facts.protocol == 9).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    for environment in [vec![], vec![("CUDA_DEVICE_MAX_CONNECTIONS".to_string(), "1".to_string())]] {
        let (reply, _c) = ask_async(&socket.path, Request { environment, ..request() }).await;
        let Reply::Denied { denial: Denial::ProtocolMismatch, reason } = reply else { panic!("{reply:?}") };
        let wanted = "gpu-a serves versions 8 to 9 of the data plane, the program speaks version 4: update the client's packages";
        assert_eq!(reason, wanted);
    }
}

#[tokio::test]
async fn a_caller_that_gives_up_takes_no_worker() {
    let sim = SimServer::new("gpu-a", 1);
    sim.with(|s| s.no_workers = true);
    let engine = engine(&[&sim]);
    let config = waiting(TEST_TIMEOUT, &[1]);
    want(&engine, &config).await;
    until(&engine, |s| s.leases[0].facts.state == LeaseState::Active).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    let mut stream = UnixStream::connect(&socket.path).unwrap();
    stream.write_all(&message::encode(&request())).unwrap();
    drop(stream);
    sim.with(|s| s.no_workers = false);
    until(&engine, held).await;
    let (reply, _c) = ask_async(&socket.path, request()).await;
    assert!(matches!(reply, Reply::Granted(_)));
    assert!(sim.with(|s| s.ended.len()) <= 1);
}
