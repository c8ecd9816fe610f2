//! `org.gpusession1` on a private bus, with a simulated pool.

/// Tests of one subject each.
mod bus {
    mod identity;
    mod servers;
    mod sessions;
}

use std::collections::HashMap;
use std::os::fd::FromRawFd as _;
use std::time::Duration;

use gpusession_bus::{NAME, PATH, path_element};
use gpusession_common::words::Class;
use gpusession_proto::control::{Device, Loss, PoolEvent, StateChange, Warning, pool_event::Event};
use gpusession_test_daemon::{PrivateBus, TEST_TIMEOUT, config, engine, serve, until, want};
use gpusessiond::config::Config;
use gpusessiond::leases::sim::{IDLE_TIMEOUT, SimServer};
use gpusessiond::leases::{LeaseState, Leases as _};
use gpusessiond::pool::{PoolError, Trouble};

use tokio_stream::StreamExt as _;
use zbus::{MatchRule, MessageStream, OwnedFd, OwnedObjectPath, OwnedVariant, Proxy, Variant};

const MANAGER: &str = "org.gpusession1.Manager";

async fn manager(connection: &zbus::Connection) -> Proxy<'static> {
    proxy(connection, PATH, MANAGER).await
}

async fn proxy(connection: &zbus::Connection, path: &str, interface: &'static str) -> Proxy<'static> {
    zbus::proxy::Builder::new(connection)
        .destination(NAME)
        .path(path.to_owned())
        .interface(interface)
        .cache_properties(zbus::proxy::CacheProperties::No)
        .build()
        .await
        .unwrap()
}

type LeaseRow = (String, u32, String, OwnedObjectPath, u64);

async fn leases(manager: &Proxy<'_>) -> Vec<LeaseRow> {
    manager.call("ListLeases", &()).await.unwrap()
}

async fn create(
    manager: &Proxy<'_>,
    request: &[(&str, Variant<'_>)],
    flags: u64,
) -> zbus::Result<(String, OwnedObjectPath, OwnedFd)> {
    let request: HashMap<&str, &Variant<'_>> = request.iter().map(|(k, v)| (*k, v)).collect();
    manager.call("CreateLease", &(request, flags)).await
}

async fn can_create(manager: &Proxy<'_>, request: &[(&str, Variant<'_>)]) -> String {
    let request: HashMap<&str, &Variant<'_>> = request.iter().map(|(k, v)| (*k, v)).collect();
    manager.call("CanCreateLease", &(request,)).await.unwrap()
}

fn error_name<T: std::fmt::Debug>(result: zbus::Result<T>) -> String {
    match result {
        Err(zbus::Error::MethodError(name, ..)) => name.to_string(),
        Err(zbus::Error::FDO(error)) => zbus::DBusError::name(&*error).to_string(),
        other => panic!("{other:?}"),
    }
}

fn held(snapshot: &gpusessiond::leases::Snapshot) -> bool {
    snapshot.lease_facts().all(|l| l.state == LeaseState::Active)
        && snapshot.server_facts().all(|s| s.state == "online")
}

/// Receives the daemon's signals; an entry has the member, and the first argument if it is text.
async fn signals(connection: &zbus::Connection) -> MessageStream {
    let rule = MatchRule::builder().msg_type(zbus::message::Type::Signal).sender(NAME).build().unwrap();
    MessageStream::for_match_rule(rule, connection, None).await.unwrap()
}

async fn next_signals(stream: &mut MessageStream, until: &str) -> Vec<String> {
    let mut seen = Vec::new();
    let collect = async {
        while let Some(Ok(message)) = stream.next().await {
            let header = message.header();
            let interface = header.interface().map(|i| i.to_string()).unwrap_or_default();
            let member = header.member().map(|m| m.to_string()).unwrap_or_default();
            if interface.starts_with("org.gpusession1") {
                seen.push(member.clone());
            }
            if member == until {
                return;
            }
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, collect).await.unwrap_or_else(|_| panic!("no {until}"));
    seen
}

#[tokio::test]
async fn a_lease_that_fills_up_is_not_waited_for_at_boot() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 3));
    let engine = engine(&[&sim]);
    let mut config = config(&[2, 3]);
    config.leases[1].class = Class::Background;
    let _api = serve(&bus, &engine, &config).await;
    want(&engine, &config).await;
    let manager = manager(&bus.connect().await).await;
    let complete = async {
        while !manager.get_property::<bool>("BootAllocationComplete").await.unwrap() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, complete).await.unwrap();
    let (wanted, ready): (u32, u32) =
        (manager.get_property("PoolTarget").await.unwrap(), manager.get_property("PoolReady").await.unwrap());
    assert_eq!((wanted, ready), (5, 2));
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one life of a lease, as a watcher sees it")]
async fn objects_lists_and_properties() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 3));
    let engine = engine(&[&sim]);
    let mut config = config(&[2]);
    config.environment.insert("NCCL_DEBUG".into(), "WARN".into());
    let api = serve(&bus, &engine, &config).await;
    want(&engine, &config).await;
    until(&engine, held).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    let complete = async {
        while !manager.get_property::<bool>("BootAllocationComplete").await.unwrap() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, complete).await.unwrap();

    let rows = leases(&manager).await;
    assert_eq!(rows.len(), 1);
    let (id, uid, state, path, expires) = &rows[0];
    assert_eq!((*uid, state.as_str()), (u32::MAX, "active"));
    assert!(*expires > 0);
    assert_eq!(path.as_str(), format!("/org/gpusession1/lease/{id}"));
    let found: OwnedObjectPath = manager.call("GetLease", &(id,)).await.unwrap();
    assert_eq!(found, *path);
    let devices: Vec<(String, String, String, OwnedObjectPath)> =
        manager.call("ListDevices", &()).await.unwrap();
    assert_eq!(devices.len(), 2);
    assert_eq!(
        devices[0].3.as_str(),
        "/org/gpusession1/device/GPU_2d00000000_2d6770_2d752d_2d6100_2d000000000000"
    );
    let servers: Vec<(String, String, String, OwnedObjectPath)> =
        manager.call("ListServers", &()).await.unwrap();
    assert_eq!((servers[0].0.as_str(), servers[0].2.as_str()), ("gpu-a", "online"));
    assert_eq!(manager.get_property::<String>("State").await.unwrap(), "ready");
    assert_eq!(manager.get_property::<u32>("PoolTarget").await.unwrap(), 2);
    assert_eq!(manager.get_property::<u32>("PoolReady").await.unwrap(), 2);
    assert_eq!(manager.get_property::<u64>("NCurrentLeases").await.unwrap(), 1);

    // No signal announces a renewal, so the list has to ask for the end.
    engine.renew(id, None).await.unwrap();
    let renewed = async { while leases(&manager).await[0].4 == *expires {} };
    tokio::time::timeout(TEST_TIMEOUT, renewed).await.unwrap();

    let lease = proxy(&connection, path.as_str(), "org.gpusession1.Lease").await;
    assert_eq!(lease.get_property::<String>("Class").await.unwrap(), "boot");
    assert_eq!(lease.get_property::<u32>("UID").await.unwrap(), u32::MAX);
    assert_eq!(lease.get_property::<Vec<OwnedObjectPath>>("Devices").await.unwrap().len(), 2);
    assert_eq!(lease.get_property::<(String, OwnedObjectPath)>("Session").await.unwrap().0, "");
    assert_eq!(lease.get_property::<u64>("MemoryLimitBytes").await.unwrap(), 1 << 30);
    assert_eq!(lease.get_property::<String>("Transport").await.unwrap(), "tcp+tls");
    assert_eq!(lease.get_property::<String>("TransportReason").await.unwrap(), "the server encrypts");
    let environment: HashMap<String, String> = lease.call("GetEnvironment", &()).await.unwrap();
    assert_eq!(environment, HashMap::from([("NCCL_DEBUG".into(), "WARN".into())]));
    // Only root may renew the client's own lease.
    let renewed: zbus::Result<u64> = lease.call("Renew", &(0u64,)).await;
    if nix::unistd::getuid().is_root() {
        assert_eq!(renewed.unwrap(), 600_000_000);
    } else {
        assert_eq!(error_name(renewed), "org.freedesktop.DBus.Error.AccessDenied");
    }
    if nix::unistd::getuid().is_root() {
        let _: () = lease.call("Park", &()).await.unwrap();
        assert_eq!(sim.with(|s| s.parked.clone()), std::slice::from_ref(id));
        let _: () = lease.call("Unpark", &()).await.unwrap();
        assert!(sim.with(|s| s.parked.is_empty()));
    }

    let device = proxy(&connection, devices[1].3.as_str(), "org.gpusession1.Device").await;
    assert_eq!(device.get_property::<u32>("Ordinal").await.unwrap(), 1);
    assert_eq!(device.get_property::<(u32, u32)>("ComputeCapability").await.unwrap(), (9, 0));
    assert_eq!(device.get_property::<String>("CudaVersion").await.unwrap(), "13.0");
    assert_eq!(
        device.get_property::<Vec<OwnedObjectPath>>("Leases").await.unwrap(),
        std::slice::from_ref(path)
    );
    let server = proxy(&connection, servers[0].3.as_str(), "org.gpusession1.Server").await;
    assert_eq!(server.get_property::<u32>("NDevices").await.unwrap(), 3);
    let _: u64 = server.call("Ping", &()).await.unwrap();

    let managed = zbus::fdo::ObjectManagerProxy::builder(&connection)
        .destination(NAME)
        .path(PATH)
        .build()
        .await
        .unwrap()
        .get_managed_objects()
        .await
        .unwrap();
    let ours = managed.values().filter(|i| i.keys().any(|name| name.starts_with("org.gpusession1.")));
    assert_eq!(ours.count(), 4, "lease, two devices, server: {managed:?}");

    // SAFETY: pidfd_open takes a pid and flags; the OwnedFd is the only owner of the new
    // descriptor.
    let pidfd = unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, std::process::id() as libc::c_int, 0);
        std::os::fd::OwnedFd::from_raw_fd(fd as libc::c_int)
    };
    let mine: Vec<OwnedObjectPath> = manager.call("GetLeaseByPIDFD", &(OwnedFd::from(pidfd),)).await.unwrap();
    assert_eq!(mine, std::slice::from_ref(path));
    let file = std::os::fd::OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    assert_eq!(
        error_name(manager.call::<_, _, OwnedVariant>("GetLeaseByPIDFD", &(OwnedFd::from(file),)).await),
        "org.freedesktop.DBus.Error.InvalidArgs"
    );

    for (method, name) in [
        ("GetLease", "org.gpusession1.Error.NoSuchLease"),
        ("GetDevice", "org.gpusession1.Error.NoSuchDevice"),
        ("GetServer", "org.gpusession1.Error.NoSuchServer"),
        ("ReleaseLease", "org.gpusession1.Error.NoSuchLease"),
        ("GetLeaseBySession", "org.gpusession1.Error.NoSuchSession"),
        ("ReleaseSession", "org.gpusession1.Error.NoSuchSession"),
    ] {
        assert_eq!(error_name(manager.call::<_, _, OwnedVariant>(method, &("no such thing",)).await), name);
    }
    let json: String = manager.call("Describe", &()).await.unwrap();
    let described: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(described["schema"], 1);
    assert_eq!(described["leases"][0]["devices"][1]["uuid"], sim.uuid(1));
    drop(api);
}

#[tokio::test]
async fn a_lease_whose_requester_leaves_before_the_answer_is_given_back() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 2));
    sim.with(|s| s.holds_allocations = true);
    let engine = engine(&[&sim]);
    let mut config = Config::default();
    config.access.extra_leases = 8;
    let _api = serve(&bus, &engine, &config).await;
    let (connection, other) = (bus.connect().await, bus.connect().await);
    let name = connection.unique_name().expect("a name").clone();
    let asking = tokio::spawn(async move {
        let manager = manager(&connection).await;
        let request = [("Count", Variant::from(1u32)), ("TTLUSec", Variant::from(600_000_000u64))];
        create(&manager, &request, 1).await
    });
    sim.until(|s| !s.requests.is_empty()).await;
    let buses = zbus::fdo::DBusProxy::new(&other).await.unwrap();
    let mut leaves = buses.receive_name_owner_changed_with_args(&[(0, &name)]).await.unwrap();
    // Its end drops the connection, as the interrupt of a command does.
    asking.abort();
    tokio::time::timeout(TEST_TIMEOUT, leaves.next()).await.expect("the bus notices").expect("a signal");
    sim.with(|s| s.holds_allocations = false);
    tokio::time::timeout(TEST_TIMEOUT, sim.until(|s| !s.released.is_empty())).await.unwrap();
    assert!(engine.snapshot().borrow().leases.is_empty());
}

#[tokio::test]
async fn a_lease_lasts_as_long_as_its_descriptor() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 2));
    let engine = engine(&[&sim]);
    let mut config = Config::default();
    config.access.extra_leases = 8;
    let _api = serve(&bus, &engine, &config).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    let request = [
        ("Count", Variant::from(1u32)),
        ("MemoryFraction", Variant::from(0.5f64)),
        ("Who", Variant::from("test")),
        ("Why", Variant::from("to see")),
    ];
    let (id, path, fd) = create(&manager, &request, 0).await.unwrap();
    let lease = proxy(&connection, path.as_str(), "org.gpusession1.Lease").await;
    assert_eq!(lease.get_property::<String>("Why").await.unwrap(), "to see");
    assert_eq!(lease.get_property::<u32>("UID").await.unwrap(), nix::unistd::getuid().as_raw());
    let environment: HashMap<String, String> = lease.call("GetEnvironment", &()).await.unwrap();
    assert_eq!(environment["GPUSESSION_LEASE"], id);
    let asked = sim.with(|s| s.requests[0].clone());
    assert_eq!((asked.gpus, asked.memory_percent, asked.why.as_str()), (1, 50.0, "to see"));

    let copy = std::os::fd::OwnedFd::from(fd).try_clone().unwrap();
    let (_second, _, second_fd) = create(&manager, &request, 0).await.unwrap();
    assert_eq!(error_name(create(&manager, &request, 0).await), "org.gpusession1.Error.NoCapacity");
    assert_eq!(can_create(&manager, &[]).await, "busy");
    drop(copy);
    tokio::time::timeout(TEST_TIMEOUT, sim.until(|s| s.released.contains(&id))).await.unwrap();
    for (key, value, answer) in [
        ("Count", Variant::from(1u32), "yes"),
        ("Count", 2u32.into(), "busy"),
        ("MemoryBytes", (1u64 << 30).into(), "yes"),
        ("MemoryBytes", (1u64 << 31).into(), "busy"),
        ("Model", "simulated".into(), "yes"),
        ("Model", "T4".into(), "busy"),
        ("Sharing", "exclusive".into(), "yes"),
        ("Devices", vec![sim.uuid(0)].into(), "yes"),
        ("Devices", vec!["GPU-0"].into(), "busy"),
        ("Servers", vec!["gpu-a"].into(), "yes"),
        ("Servers", vec!["gpu-b"].into(), "busy"),
    ] {
        let shown = format!("{key} = {value:?}");
        assert_eq!(can_create(&manager, &[(key, value)]).await, answer, "{shown}");
    }
    drop(second_fd);
    until(&engine, |s| s.leases.is_empty()).await;

    // A persistent lease outlives its descriptor; it has a time to live and is released by name.
    assert_eq!(error_name(create(&manager, &request, 1).await), "org.freedesktop.DBus.Error.InvalidArgs");
    let persistent = [("TTLUSec", Variant::from(60_000_000u64))];
    let (id, _, fd) = create(&manager, &persistent, 1).await.unwrap();
    drop(fd);
    let _: () = manager.call("RenewLease", &(&id, 0u64)).await.unwrap();
    assert!(leases(&manager).await.iter().any(|l| l.0 == id));
    let _: () = manager.call("ReleaseLease", &(&id,)).await.unwrap();
    assert!(leases(&manager).await.is_empty(), "removed before the reply");
}

#[tokio::test]
async fn requests_that_make_no_sense_are_refused() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 2));
    let engine = engine(&[&sim]);
    let mut config = Config::default();
    config.access.extra_leases = 8;
    let _api = serve(&bus, &engine, &config).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    let long = "x".repeat(257);
    let cases: Vec<(&str, Variant<'_>)> = vec![
        ("Bogus", 1u32.into()),
        ("Count", 0u32.into()),
        ("Count", 65u32.into()),
        ("Count", "two".into()),
        ("MemoryBytes", 0u64.into()),
        ("MemoryFraction", 1.5f64.into()),
        ("MemoryFraction", f64::NAN.into()),
        ("SMPercent", 101u32.into()),
        ("SMAuto", 1u32.into()),
        ("Priority", "high".into()),
        ("Sharing", "mine".into()),
        ("Why", long.as_str().into()),
        ("Who", "a\nb".into()),
    ];
    for (key, value) in cases {
        let shown = format!("{key} = {value:?}");
        let name = error_name(create(&manager, &[(key, value)], 0).await);
        assert_eq!(name, "org.freedesktop.DBus.Error.InvalidArgs", "{shown}");
    }
    assert_eq!(error_name(create(&manager, &[], 2).await), "org.freedesktop.DBus.Error.InvalidArgs");
    let unknown = create(&manager, &[("Session", "3".into())], 0).await;
    assert_eq!(error_name(unknown), "org.gpusession1.Error.NoSuchSession");
    assert!(sim.with(|s| s.requests.is_empty()), "the server was not asked");
}

#[tokio::test]
async fn a_loss_is_announced_told_and_made_good() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 1));
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    let _api = serve(&bus, &engine, &config).await;
    let connection = bus.connect().await;
    let mut stream = signals(&connection).await;
    want(&engine, &config).await;
    let seen = next_signals(&mut stream, "LeaseNew").await;
    assert_eq!(seen.last().map(String::as_str), Some("LeaseNew"));
    until(&engine, held).await;
    sim.until(|s| s.leases.len() == 1).await;
    let manager = manager(&connection).await;
    let id = loop {
        let rows = leases(&manager).await;
        if rows[0].2 == "active" {
            break rows[0].0.clone();
        }
    };
    let event = |event| PoolEvent { lease: id.clone(), event: Some(event) };
    sim.send(event(Event::PrepareForLoss(Warning {
        left_usec: 1_000_000,
        reason: "idle".into(),
        idle: true,
    })));
    next_signals(&mut stream, "PrepareForLeaseLoss").await;
    sim.with(|s| s.leases.clear());
    sim.send(event(Event::Lost(Loss { reason: "idle".into() })));
    let seen = next_signals(&mut stream, "LeaseRemoved").await;
    assert_eq!(seen[..2], ["Lost", "LeaseRemoved"], "{seen:?}");
    // A configured lease is acquired again, with another id.
    until(&engine, |s| s.leases[0].facts.state == LeaseState::Active && s.leases[0].facts.id != id).await;
    let again = async {
        loop {
            let rows = leases(&manager).await;
            if rows.iter().any(|l| l.2 == "active" && l.0 != id) {
                return rows;
            }
            tokio::task::yield_now().await;
        }
    };
    assert_eq!(tokio::time::timeout(TEST_TIMEOUT, again).await.unwrap().len(), 1);
    assert_eq!(sim.with(|s| s.requests.last().unwrap().sticky.clone()), [sim.uuid(0)]);
}

/// Waits until PropertiesChanged announces this value of a property.
async fn changed<T>(stream: &mut MessageStream, name: &str, into: T)
where
    T: TryFrom<OwnedVariant> + PartialEq,
{
    let wait = async {
        while let Some(Ok(message)) = stream.next().await {
            if message.header().member().is_none_or(|m| m.as_str() != "PropertiesChanged") {
                continue;
            }
            let body = message.body();
            let (_, changed, _): (String, HashMap<String, OwnedVariant>, Vec<String>) =
                body.deserialize().unwrap();
            let value = changed.get(name).and_then(|v| T::try_from(v.try_clone().unwrap()).ok());
            if value.is_some_and(|v| v == into) {
                return true;
            }
        }
        false
    };
    let told = tokio::time::timeout(TEST_TIMEOUT, wait).await;
    assert!(told.is_ok_and(|told| told), "no news of {name}");
}

#[tokio::test]
async fn other_gpus_and_their_health_are_reported() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 2));
    let engine = engine(&[&sim]);
    let mut config = Config::default();
    config.access.extra_leases = 1;
    let _api = serve(&bus, &engine, &config).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    let mut stream = signals(&connection).await;
    let (id, path, _fd) = create(&manager, &[], 0).await.unwrap();
    let seen = next_signals(&mut stream, "LeaseNew").await;
    assert!(seen.contains(&"DeviceNew".to_owned()), "{seen:?}");
    let lease = proxy(&connection, path.as_str(), "org.gpusession1.Lease").await;
    let token: u64 = lease.get_property("FencingToken").await.unwrap();
    // As after a lease was lent and returned.
    let device = |gpu: u32, state: &str, free: u64| Device {
        uuid: sim.uuid(gpu),
        state: state.into(),
        memory_free_bytes: free,
        limit_bytes: 1 << 20,
        ..Default::default()
    };
    // The lease's programs need its GPUs, which other leases have.
    let wanted = StateChange { state: "returning".into(), position: 1, waiting: 2, ..Default::default() };
    sim.send(PoolEvent { lease: id.clone(), event: Some(Event::State(wanted)) });
    changed(&mut stream, "State", "parked".to_owned()).await;
    assert_eq!(lease.get_property::<(u32, u32)>("QueuePosition").await.unwrap(), (1, 2));
    assert_eq!(lease.get_property::<String>("WaitsFor").await.unwrap(), "other leases have its GPUs now");
    let back = StateChange {
        state: "active".into(),
        devices: vec![device(1, "leased", 7)],
        fencing_token: token + 5,
        ..Default::default()
    };
    sim.send(PoolEvent { lease: id.clone(), event: Some(Event::State(back)) });
    let mut others = signals(&connection).await;
    let now = OwnedObjectPath::try_from(format!("{PATH}/device/{}", path_element(&sim.uuid(1)))).unwrap();
    changed(&mut stream, "Devices", vec![now.clone()]).await;
    changed(&mut stream, "MemoryLimitBytes", 1u64 << 20).await;
    changed(&mut stream, "FencingToken", token + 5).await;
    let seen = next_signals(&mut others, "DeviceRemoved").await;
    assert!(seen.contains(&"DeviceNew".to_owned()), "the new one is there before the old one goes: {seen:?}");
    assert_eq!(
        lease.get_property::<Vec<OwnedObjectPath>>("Devices").await.unwrap(),
        std::slice::from_ref(&now)
    );
    // Heartbeats change this property without a signal, so it is read.
    let gpu = proxy(&connection, now.as_str(), "org.gpusession1.Device").await;
    assert_eq!(gpu.get_property::<String>("Health").await.unwrap(), "ok");
    assert_eq!(gpu.get_property::<u64>("MemoryFreeBytes").await.unwrap(), 7);
    sim.with(|s| s.renewed.devices = vec![device(1, "leased", 6)]);
    let _: u64 = lease.call("Renew", &(0u64,)).await.unwrap();
    until(&engine, |s| s.leases[0].gauges.memory_free_bytes[0] != 7).await;
    assert_eq!(gpu.get_property::<u64>("MemoryFreeBytes").await.unwrap(), 6, "changed without a signal");
    sim.with(|s| s.renewed.devices = vec![device(1, "broken", 6)]);
    let _: u64 = lease.call("Renew", &(0u64,)).await.unwrap();
    changed(&mut stream, "State", "broken".to_owned()).await;
    changed(&mut stream, "Health", "broken".to_owned()).await;
}

#[tokio::test]
async fn idle_settings_are_requested_and_shown() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 4));
    let engine = engine(&[&sim]);
    let mut config = Config::default();
    config.access.extra_leases = 3;
    let _api = serve(&bus, &engine, &config).await;
    until(&engine, held).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    let mut fds = Vec::new();
    let mut last = None;
    for (asked, holds) in [(0, IDLE_TIMEOUT), (IDLE_TIMEOUT * 2, IDLE_TIMEOUT), (60_000_000, 60_000_000)] {
        let (_, path, fd) = create(&manager, &[("IdleTimeoutUSec", asked.into())], 0).await.unwrap();
        let lease = proxy(&connection, path.as_str(), "org.gpusession1.Lease").await;
        assert_eq!(lease.get_property::<u64>("IdleTimeoutUSec").await.unwrap(), holds, "asked for {asked}");
        fds.push(fd);
        last = Some(lease);
    }
    assert_eq!(manager.get_property::<u64>("DefaultIdleTimeoutUSec").await.unwrap(), IDLE_TIMEOUT);
    assert_eq!(manager.get_property::<u64>("LeaseTTLUSec").await.unwrap(), 60_000_000);
    let lease = last.unwrap();
    let mut stream = signals(&connection).await;
    let _: () = lease.call("SetIdleHint", &(true,)).await.unwrap();
    assert_eq!(sim.with(|s| s.idle.len()), 1);
    let _: u64 = lease.call("Renew", &(0u64,)).await.unwrap();
    changed(&mut stream, "State", "idle".to_owned()).await;
    assert!(lease.get_property::<u64>("IdleSinceHint").await.unwrap() > 0);
    let _: () = lease.call("SetIdleHint", &(false,)).await.unwrap();
    assert!(sim.with(|s| s.idle.is_empty()));
    let _: u64 = lease.call("Renew", &(0u64,)).await.unwrap();
    changed(&mut stream, "IdleSinceHint", 0u64).await;
    // The server changes its idle timeout.
    sim.with(|s| s.idle_timeouts.values_mut().for_each(|usec| *usec = 5_000_000));
    let _: u64 = lease.call("Renew", &(0u64,)).await.unwrap();
    changed(&mut stream, "IdleTimeoutUSec", 5_000_000u64).await;
}

#[tokio::test]
async fn each_trouble_has_its_error() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 1));
    let engine = engine(&[]);
    let mut config = Config::default();
    config.access.extra_leases = 1;
    let _api = serve(&bus, &engine, &config).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    engine.notice("no identity yet");
    assert_eq!(error_name(create(&manager, &[], 0).await), "org.gpusession1.Error.NotReady");
    engine.connect(vec![std::sync::Arc::new(sim.clone())]);
    until(&engine, |s| s.server_facts().any(|s| s.state == "online")).await;
    for (trouble, name) in [
        (Trouble::NoCapacity, "org.gpusession1.Error.NoCapacity"),
        (Trouble::NeverFits, "org.freedesktop.DBus.Error.NotSupported"),
        (Trouble::LimitExceeded, "org.gpusession1.Error.QuotaExceeded"),
        (Trouble::Unreachable, "org.gpusession1.Error.ServerUnreachable"),
        (Trouble::Protocol, "org.gpusession1.Error.ProtocolMismatch"),
        (Trouble::Invalid, "org.freedesktop.DBus.Error.InvalidArgs"),
    ] {
        sim.with(|s| s.failing = Some(PoolError::new(trouble, "as the test wants it")));
        assert_eq!(error_name(create(&manager, &[], 0).await), name, "{trouble:?}");
        let server = proxy(&connection, "/org/gpusession1/server/gpu_2da", "org.gpusession1.Server").await;
        assert_eq!(error_name(server.call::<_, _, ()>("Reconnect", &()).await), name, "{trouble:?}");
    }
    sim.with(|s| s.failing = None);
    let (id, path, _fd) = create(&manager, &[], 0).await.unwrap();
    let over = create(&manager, &[], 0).await;
    if nix::unistd::getuid().is_root() {
        assert_eq!(error_name(over), "org.gpusession1.Error.NoCapacity", "nothing binds root");
    } else {
        assert_eq!(error_name(over), "org.gpusession1.Error.QuotaExceeded");
    }
    // The server has forgotten the lease.
    sim.with(|s| s.leases.clear());
    let lease = proxy(&connection, path.as_str(), "org.gpusession1.Lease").await;
    let lost = lease.call::<_, _, u64>("Renew", &(0u64,)).await;
    assert_eq!(error_name(lost), "org.gpusession1.Error.LeaseLost");
    until(&engine, |s| s.leases.is_empty()).await;
    let gone = async {
        while manager.get_property::<u64>("NCurrentLeases").await.unwrap() > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, gone).await.unwrap();
    let gone = manager.call::<_, _, ()>("RenewLease", &(&id, 0u64)).await;
    assert_eq!(error_name(gone), "org.gpusession1.Error.NoSuchLease");
}

#[tokio::test]
async fn a_lease_that_waits_shows_its_place_and_why() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 1));
    let full =
        |at| PoolError { place: Some((at, 40)), ..PoolError::new(Trouble::NoCapacity, "all are taken") };
    sim.with(|s| s.failing = Some(full(3)));
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    let _api = serve(&bus, &engine, &config).await;
    let connection = bus.connect().await;
    let mut stream = signals(&connection).await;
    want(&engine, &config).await;
    let lease = proxy(&connection, "/org/gpusession1/lease/l1", "org.gpusession1.Lease").await;
    let mut changes = async |until: (u32, u32)| {
        let mut seen = Vec::new();
        while let Some(Ok(message)) = stream.next().await {
            if message.header().member().is_none_or(|m| m.as_str() != "PropertiesChanged") {
                continue;
            }
            let body = message.body();
            let (_, changed, _): (String, HashMap<String, OwnedVariant>, Vec<String>) =
                body.deserialize().unwrap();
            seen.extend(changed.keys().cloned());
            if changed.get("QueuePosition").is_some_and(|v| v.try_clone().unwrap().try_into() == Ok(until)) {
                break;
            }
        }
        seen
    };
    tokio::time::timeout(TEST_TIMEOUT, changes((3, 40))).await.expect("the place is announced");
    assert_eq!(lease.get_property::<(u32, u32)>("QueuePosition").await.unwrap(), (3, 40));
    assert_eq!(lease.get_property::<String>("State").await.unwrap(), "pending");
    sim.with(|s| s.failing = Some(full(2)));
    tokio::time::timeout(TEST_TIMEOUT, changes((2, 40))).await.expect("and that it has changed");
    until(&engine, |s| s.leases[0].facts.trouble.is_some()).await;
    assert_eq!(lease.get_property::<String>("WaitsFor").await.unwrap(), "all are taken");
    sim.with(|s| s.failing = None);
    until(&engine, held).await;
    let path = async {
        loop {
            let rows = leases(&manager(&connection).await).await;
            if rows.iter().any(|l| l.2 == "active") {
                return rows[0].3.clone();
            }
        }
    };
    let path = tokio::time::timeout(TEST_TIMEOUT, path).await.unwrap();
    let lease = proxy(&connection, path.as_str(), "org.gpusession1.Lease").await;
    assert_eq!(lease.get_property::<(u32, u32)>("QueuePosition").await.unwrap(), (0, 0));
    assert_eq!(lease.get_property::<String>("WaitsFor").await.unwrap(), "");
}

#[tokio::test]
async fn the_shipped_interfaces_are_those_that_are_served() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 1));
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    let _api = serve(&bus, &engine, &config).await;
    want(&engine, &config).await;
    until(&engine, held).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    let path = async {
        loop {
            let rows = leases(&manager).await;
            if rows.iter().any(|l| l.2 == "active") {
                return rows[0].3.clone();
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let lease = tokio::time::timeout(TEST_TIMEOUT, path).await.unwrap();
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../units/dbus-1/interfaces");
    for (path, name) in [
        (PATH, "Manager"),
        (lease.as_str(), "Lease"),
        ("/org/gpusession1/device/GPU_2d00000000_2d6770_2d752d_2d6100_2d000000000000", "Device"),
        ("/org/gpusession1/server/gpu_2da", "Server"),
    ] {
        let introspectable = zbus::fdo::IntrospectableProxy::builder(&connection)
            .destination(NAME)
            .path(path.to_owned())
            .build()
            .await
            .unwrap();
        let xml = introspectable.introspect().await.unwrap();
        let interface = format!("org.gpusession1.{name}");
        let begin = xml.find(&format!("<interface name=\"{interface}\">")).expect("served");
        let end = begin + xml[begin..].find("</interface>").unwrap() + "</interface>".len();
        let text = format!(
            "<!DOCTYPE node PUBLIC \"-//freedesktop//DTD D-BUS Object Introspection 1.0//EN\"\n \
             \"http://www.freedesktop.org/standards/dbus/1.0/introspect.dtd\">\n<node>\n  {}\n</node>\n",
            &xml[begin..end]
        );
        let file = folder.join(format!("{interface}.xml"));
        if std::env::var_os("GPUSESSION_BLESS").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&file, &text).unwrap();
        }
        let shipped = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(shipped == text, "{} is not what is served; GPUSESSION_BLESS=1 rewrites it", file.display());
    }
}

#[tokio::test]
async fn slow_calls_delay_no_others_and_are_bounded_per_user() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 4));
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    let _api = serve(&bus, &engine, &config).await;
    want(&engine, &config).await;
    until(&engine, held).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    sim.with(|s| s.hanging = true);
    let slow = proxy(&connection, "/org/gpusession1/server/gpu_2da", "org.gpusession1.Server").await;
    let limit = if nix::unistd::getuid().is_root() { 64 } else { 16 };
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..limit {
        let slow = slow.clone();
        calls.spawn(async move { slow.call::<_, _, u64>("Ping", &()).await.is_ok() });
    }
    let refused = async {
        loop {
            let call = slow.call::<_, _, u64>("Ping", &());
            match tokio::time::timeout(Duration::from_millis(50), call).await {
                Ok(answer) => return error_name(answer),
                Err(_) => continue,
            }
        }
    };
    // Calls whose callers gave up are still in progress.
    let name = tokio::time::timeout(TEST_TIMEOUT, refused).await.unwrap();
    assert_eq!(name, "org.freedesktop.DBus.Error.LimitsExceeded");
    // The limit applies to all methods; properties are still read, and signals are sent.
    let too_many = manager.call::<_, _, OwnedVariant>("ListLeases", &()).await;
    assert_eq!(error_name(too_many), "org.freedesktop.DBus.Error.LimitsExceeded");
    let mut more = config.clone();
    more.leases.push(gpusessiond::config::LeaseConfig { name: "l2".into(), ..Default::default() });
    want(&engine, &Config { leases: more.leases[1..].to_vec(), ..config }).await;
    let shown = async {
        while manager.get_property::<u64>("NCurrentLeases").await.unwrap() < 2 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, shown).await.unwrap();
    sim.with(|s| s.hanging = false);
    let answered = calls.join_all().await.into_iter().filter(|answered| *answered).count();
    assert!(answered > 0 && answered <= limit, "{answered}");
}

#[tokio::test]
async fn a_reload_is_shown_and_a_bad_one_changes_nothing() {
    if !nix::unistd::getuid().is_root() {
        return;
    }
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 2));
    let engine = engine(&[&sim]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gpusession.toml");
    let settings = gpusession_test_daemon::settings(&engine, &Config::default(), &path);
    let _api = gpusession_test_daemon::serve_settings(&bus, &engine, settings).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    std::fs::write(&path, "[access]\nextra_leases = 3\n[[lease]]\nname = \"a\"\n").unwrap();
    let mut stream = signals(&connection).await;
    let _: () = manager.call("Reload", &()).await.unwrap();
    next_signals(&mut stream, "LeaseNew").await;
    until(&engine, held).await;
    assert_eq!(manager.get_property::<u64>("LeasesMax").await.unwrap(), 3);
    std::fs::write(&path, "[acess]\n").unwrap();
    let refused = manager.call::<_, _, ()>("Reload", &()).await;
    assert_eq!(error_name(refused), "org.freedesktop.DBus.Error.InvalidFileContent");
    assert_eq!(engine.snapshot().borrow().leases.len(), 1);
    assert_eq!(manager.get_property::<u64>("LeasesMax").await.unwrap(), 3);
}
