//! Objects of servers: added, left, stopped, silent.

use gpusession_proto::control::{PoolEvent, ServerStopped, pool_event::Event};
use gpusessiond::config::Config;
use gpusessiond::leases::sim::SimServer;
use gpusessiond::leases::{LeaseState, Leases as _};
use gpusessiond::pool::{PoolError, Trouble};
use zbus::OwnedObjectPath;

use crate::{create, error_name, held, manager, next_signals, proxy, signals};
use gpusession_test_daemon::{PrivateBus, TEST_TIMEOUT, config, engine, serve, until, want};

#[tokio::test]
async fn servers_come_go_and_are_left() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 1));
    // Until the server reports its name, its address stands in.
    sim.with(|s| (s.name, s.hanging) = (Some("named".into()), true));
    let engine = engine(&[]);
    let config = Config::default();
    let _api = serve(&bus, &engine, &config).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    let mut stream = signals(&connection).await;
    engine.connect(vec![std::sync::Arc::new(sim.clone())]);
    assert_eq!(next_signals(&mut stream, "ServerNew").await, ["ServerNew"]);
    sim.with(|s| s.hanging = false);
    next_signals(&mut stream, "ServerRemoved").await;
    next_signals(&mut stream, "ServerNew").await;
    let path: OwnedObjectPath = manager.call("GetServer", &("named",)).await.unwrap();
    let server = proxy(&connection, path.as_str(), "org.gpusession1.Server").await;
    let _: () = server.call("Reconnect", &()).await.unwrap();
    if !nix::unistd::getuid().is_root() {
        let refused = server.call::<_, _, ()>("Drain", &(true,)).await;
        assert_eq!(error_name(refused), "org.freedesktop.DBus.Error.AccessDenied");
        return;
    }
    for (drain, state) in [(true, "draining"), (false, "online")] {
        let _: () = server.call("Drain", &(drain,)).await.unwrap();
        until(&engine, |s| s.servers[0].facts.state == state).await;
    }
    // A lease can be released through its own object, too.
    let (id, path, fd) = create(&manager, &[], 0).await.unwrap();
    let lease = proxy(&connection, path.as_str(), "org.gpusession1.Lease").await;
    // The server's own administrator drains it: the next renewal reports that.
    for (drain, state) in [(true, "draining"), (false, "online")] {
        sim.with(|s| s.draining = drain);
        let _: u64 = lease.call("Renew", &(0u64,)).await.unwrap();
        until(&engine, |s| s.servers[0].facts.state == state).await;
    }
    let _: () = lease.call("Release", &()).await.unwrap();
    let seen = next_signals(&mut stream, "DeviceRemoved").await;
    let order: Vec<&str> = ["LeaseNew", "Released", "LeaseRemoved", "DeviceRemoved"].to_vec();
    let seen: Vec<&str> = seen.iter().map(String::as_str).filter(|s| order.contains(s)).collect();
    assert_eq!(seen, order);
    tokio::time::timeout(TEST_TIMEOUT, sim.until(|s| s.released.contains(&id))).await.unwrap();
    drop(fd);
}

#[tokio::test]
async fn a_server_that_was_stopped_is_told_from_one_that_fell_silent() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 1));
    let engine = engine(&[&sim]);
    let config = config(&[1]);
    let _api = serve(&bus, &engine, &config).await;
    want(&engine, &config).await;
    let facts = || engine.snapshot().borrow().servers[0].facts.clone();
    let until_state = async |state: &str| {
        let mut snapshot = engine.snapshot();
        let is = |s: &gpusessiond::leases::Snapshot| s.servers.iter().all(|s| s.facts.state == state);
        tokio::time::timeout(TEST_TIMEOUT, snapshot.wait_for(|s| is(s))).await.expect(state).unwrap();
    };
    until_state("online").await;
    sim.until(gpusessiond::leases::sim::SimState::watched).await;
    sim.with(|s| s.failing = Some(PoolError::new(Trouble::Unreachable, "connection refused")));
    sim.send(PoolEvent { lease: String::new(), event: Some(Event::ServerStopped(ServerStopped {})) });
    until_state("stopped").await;
    assert_eq!(facts().trouble, "its administrator stopped it");
    let connection = bus.connect().await;
    let text: String = manager(&connection).await.call("DescribeServers", &()).await.unwrap();
    assert!(text.contains("\"state\":\"stopped\",\"trouble\":\"its administrator stopped it\""), "{text}");
    sim.with(|s| s.failing = None);
    engine.ask(0, None).await.unwrap();
    until_state("online").await;
    assert_eq!(facts().trouble, "");
}

#[tokio::test]
async fn a_server_is_left_and_gpus_are_held_ahead() {
    let (bus, a, b) = (PrivateBus::start(), SimServer::new("gpu-a", 1), SimServer::new("gpu-b", 2));
    let engine = engine(&[&a, &b]);
    let config = config(&[1]);
    let _api = serve(&bus, &engine, &config).await;
    want(&engine, &config).await;
    until(&engine, held).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    if !nix::unistd::getuid().is_root() {
        let refused = manager.call::<_, _, ()>("Preallocate", &(1u32,)).await;
        assert_eq!(error_name(refused), "org.freedesktop.DBus.Error.AccessDenied");
        return;
    }
    let mut stream = signals(&connection).await;
    let from = engine.snapshot().borrow().leases[0].facts.reported.server.clone();
    let _: () = manager.call("DrainServer", &(&from, true, 0u64)).await.unwrap();
    let seen = next_signals(&mut stream, "LeaseRemoved").await;
    let place =
        |name: &str| seen.iter().position(|s| s == name).unwrap_or_else(|| panic!("no {name} in {seen:?}"));
    assert!(place("PrepareForLeaseLoss") < place("Lost"), "{seen:?}");
    until(&engine, |s| {
        s.leases[0].facts.state == LeaseState::Active && s.leases[0].facts.reported.server != from
    })
    .await;
    let server = engine.snapshot().borrow().server_facts().find(|s| s.name == from).unwrap().state.clone();
    assert_eq!(server, "draining");
    let _: () = manager.call("DrainServer", &(&from, false, 0u64)).await.unwrap();
    let _: () = manager.call("Preallocate", &(1u32,)).await.unwrap();
    until(&engine, |s| s.leases.len() == 2 && s.leases[1].facts.state == LeaseState::Active).await;
    let _: () = manager.call("Preallocate", &(0u32,)).await.unwrap();
    until(&engine, |s| s.leases.len() == 1).await;
}

#[tokio::test]
async fn a_server_that_the_list_no_longer_names_leaves_the_bus() {
    let bus = PrivateBus::start();
    let (first, second) = (SimServer::new("gpu-a", 1), SimServer::new("gpu-b", 1));
    let engine = engine(&[&first, &second]);
    let _api = serve(&bus, &engine, &Config::default()).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    let names = async || {
        let rows: Vec<(String, String, String, OwnedObjectPath)> =
            manager.call("ListServers", &()).await.unwrap();
        rows.into_iter().map(|row| row.0).collect::<Vec<_>>()
    };
    until(&engine, |s| s.server_facts().all(|server| server.state == "online")).await;
    assert_eq!(names().await, ["gpu-a", "gpu-b"]);
    let mut stream = signals(&connection).await;
    engine.remove(0, std::time::Duration::ZERO);
    next_signals(&mut stream, "ServerRemoved").await;
    assert_eq!(names().await, ["gpu-b"]);
    let text: String = manager.call("DescribeServers", &()).await.unwrap();
    assert!(!text.contains("gpu-a") && text.contains("gpu-b"), "{text}");
    let unknown = manager.call::<_, _, OwnedObjectPath>("GetServer", &("gpu-a",)).await;
    assert_eq!(error_name(unknown), "org.gpusession1.Error.NoSuchServer");
    engine.restore(0);
    next_signals(&mut stream, "ServerNew").await;
    until(&engine, |s| s.servers[0].facts.state == "online").await;
    assert_eq!(names().await, ["gpu-a", "gpu-b"]);
    // Under another address it is the same server, with one object.
    first.with(|s| s.name = Some("gpu-b".into()));
    let path: OwnedObjectPath = manager.call("GetServer", &("gpu-a",)).await.unwrap();
    let server = proxy(&connection, path.as_str(), "org.gpusession1.Server").await;
    let _: u64 = server.call("Ping", &()).await.unwrap();
    next_signals(&mut stream, "ServerRemoved").await;
    until(&engine, |s| s.server_facts().all(|server| server.name == "gpu-b")).await;
    engine.remove(0, std::time::Duration::ZERO);
    next_signals(&mut stream, "ServerNew").await;
    let path: OwnedObjectPath = manager.call("GetServer", &("gpu-b",)).await.unwrap();
    let server = proxy(&connection, path.as_str(), "org.gpusession1.Server").await;
    let _: u64 = server.call("Ping", &()).await.unwrap();
    assert_eq!(names().await, ["gpu-b"]);
}
