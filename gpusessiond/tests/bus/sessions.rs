//! Leases of login sessions.

use std::time::Duration;

use gpusession_common::words::Class;
use gpusessiond::config::Config;
use gpusessiond::leases::sim::SimServer;
use gpusessiond::leases::{Answer, Caller, Leases as _, WorkerRequest};
use zbus::{OwnedObjectPath, OwnedVariant};

use crate::{create, error_name, leases, manager, next_signals, proxy, signals};
use gpusession_test_daemon::{PrivateBus, TEST_TIMEOUT, config, engine, serve};

#[tokio::test]
async fn a_sessions_own_lease_is_found_and_released_with_it() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 2));
    let engine = engine(&[&sim]);
    let mut config = config(&[1]);
    config.leases[0].class = Class::Session;
    let _api = serve(&bus, &engine, &config).await;
    gpusession_test_daemon::settings(&engine, &config, std::path::Path::new("/nonexistent")).apply().await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    let uid = nix::unistd::getuid().as_raw();
    engine.session_opened(session("abcdefghijkl", uid));
    let caller = Caller {
        uid,
        pid: 0,
        user: None,
        principal: None,
        access: true,
        session: Some("abcdefghijkl".into()),
        control_groups: vec![],
        contained: false,
    };
    let path = async {
        // First CUDA call of the session.
        while !matches!(engine.grant(caller.clone(), WorkerRequest::default()).await, Answer::Granted(..)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        loop {
            let mine: Vec<OwnedObjectPath> = manager.call("GetLeaseBySession", &("c7",)).await.unwrap();
            let id = engine.snapshot().borrow().leases[0].facts.id.clone();
            if mine.iter().any(|p| p.as_str().ends_with(&id)) {
                return mine;
            }
        }
    };
    let mine = tokio::time::timeout(TEST_TIMEOUT, path).await.unwrap();
    assert_eq!(mine.len(), 1);
    let id = engine.snapshot().borrow().leases[0].facts.id.clone();
    let _: () = manager.call("ReleaseSession", &("abcdefghijkl",)).await.unwrap();
    assert!(leases(&manager).await.is_empty(), "removed before the reply");
    tokio::time::timeout(TEST_TIMEOUT, sim.until(|s| s.released.contains(&id))).await.unwrap();
}

fn session(id: &str, uid: u32) -> std::sync::Arc<gpusessiond::leases::Session> {
    std::sync::Arc::new(gpusessiond::leases::Session {
        id: id.into(),
        uid,
        user: "somebody".into(),
        service: "sshd".into(),
        tty: "pts/1".into(),
        rhost: String::new(),
        leader: std::process::id(),
        leader_start: 1,
        logind: Some("c7".into()),
    })
}

#[tokio::test]
async fn leases_of_a_session_end_with_it() {
    let (bus, sim) = (PrivateBus::start(), SimServer::new("gpu-a", 2));
    let engine = engine(&[&sim]);
    let mut config = Config::default();
    config.access.extra_leases = 8;
    let _api = serve(&bus, &engine, &config).await;
    let connection = bus.connect().await;
    let manager = manager(&connection).await;
    let mut stream = signals(&connection).await;
    let uid = nix::unistd::getuid().as_raw();
    engine.session_opened(session("abcdefghijkl", uid));
    // By the session's own id and by logind's.
    let (id, path, fd) = create(&manager, &[("Session", "c7".into())], 0).await.unwrap();
    let lease = proxy(&connection, path.as_str(), "org.gpusession1.Lease").await;
    let (bound, object) = lease.get_property::<(String, OwnedObjectPath)>("Session").await.unwrap();
    assert_eq!((bound.as_str(), object.as_str()), ("abcdefghijkl", "/org/freedesktop/login1/session/c7"));
    assert_eq!(lease.get_property::<u32>("Leader").await.unwrap(), std::process::id());
    let other = [("Session", "abcdefghijkl".into()), ("UID", (uid + 1).into())];
    assert_eq!(error_name(create(&manager, &other, 0).await), "org.freedesktop.DBus.Error.InvalidArgs");
    let none: Vec<OwnedObjectPath> = manager.call("GetLeaseBySession", &("abcdefghijkl",)).await.unwrap();
    assert!(none.is_empty(), "a requested lease is used by those who name it");
    engine.session_closed("abcdefghijkl");
    let seen = next_signals(&mut stream, "LeaseRemoved").await;
    assert_eq!(seen[seen.len() - 2..], ["Released", "LeaseRemoved"]);
    tokio::time::timeout(TEST_TIMEOUT, sim.until(|s| s.released.contains(&id))).await.unwrap();
    drop(fd);
    assert_eq!(
        error_name(manager.call::<_, _, OwnedVariant>("GetLeaseBySession", &("abcdefghijkl",)).await),
        "org.gpusession1.Error.NoSuchSession"
    );
}
