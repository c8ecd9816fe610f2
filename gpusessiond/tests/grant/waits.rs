//! First calls that wait for a lease or a worker.

use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::control::{PoolEvent, StateChange, pool_event};
use gpusession_proto::grant::{Reply, Request};
use gpusession_test_daemon::{
    GrantSocket, TEST_TIMEOUT, ask_async, engine, here, request, until, waiting, want,
};
use gpusessiond::grant::Limits;
use gpusessiond::leases::engine::{Engine, EngineOptions};
use gpusessiond::leases::machine::{Saved, SavedLease};
use gpusessiond::leases::sim::SimServer;
use gpusessiond::leases::{Answer, Granted, LeaseState, Leases as _, Spec, Waiter, WorkerRequest};
use gpusessiond::pool::{PoolError, Trouble};

use crate::{QUICK, caller, quick};

#[tokio::test]
async fn a_first_call_waits_for_a_lease_that_is_on_its_way() {
    let sim = SimServer::new("gpu-a", 1);
    sim.with(|s| s.failing = Some(PoolError::new(Trouble::Unreachable, "gpu-a does not answer")));
    let engine = engine(&[&sim]);
    let config = waiting(TEST_TIMEOUT, &[1]);
    want(&engine, &config).await;
    let socket = GrantSocket::start(&engine, &config, Limits::default());
    until(&engine, |s| s.leases[0].facts.trouble.is_some()).await;
    let asking = ask_async(&socket.path, request());
    sim.with(|s| s.failing = None);
    let (reply, _connection) = asking.await;
    assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
}

#[tokio::test]
async fn a_first_call_waits_longer_for_a_lease_whose_gpus_come_back() {
    let sim = SimServer::new("gpu-a", 1);
    sim.with(|s| (s.ids, s.no_workers) = (["one".to_owned()].into(), true));
    let engine = engine(&[&sim]);
    want(&engine, &quick()).await;
    sim.until(|s| s.watched()).await;
    let socket = GrantSocket::start(&engine, &quick(), Limits::default());
    let state = |state: &str, position| {
        let change = StateChange { state: state.into(), position, waiting: position, ..Default::default() };
        sim.send(PoolEvent { lease: "one".into(), event: Some(pool_event::Event::State(change)) });
    };
    sim.with(|s| s.away = Some("parked"));
    state("parked", 0);
    until(&engine, |s| s.leases[0].facts.state == LeaseState::Parked).await;
    let path = socket.path.clone();
    let mut asking = tokio::spawn(async move { ask_async(&path, request()).await });
    state("returning", 1);
    tokio::time::timeout(3 * QUICK, &mut asking).await.expect_err("it waits longer than configured");
    sim.with(|s| (s.no_workers, s.away) = (false, None));
    state("active", 0);
    let (reply, _connection) = asking.await.expect("the task ends");
    assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
}

#[tokio::test]
async fn a_first_call_waits_longer_for_a_lease_that_is_being_parked() {
    waits_for_a_worker(Some("parking")).await;
}

#[tokio::test]
async fn a_first_call_waits_longer_for_a_worker_that_starts() {
    waits_for_a_worker(None).await;
}

async fn waits_for_a_worker(away: Option<&'static str>) {
    let sim = SimServer::new("gpu-a", 1);
    sim.with(|s| (s.ids, s.no_workers) = (["one".to_owned()].into(), true));
    sim.with(|s| s.away = away);
    let engine = engine(&[&sim]);
    want(&engine, &quick()).await;
    sim.until(|s| s.heartbeats > 0).await;
    let socket = GrantSocket::start(&engine, &quick(), Limits::default());
    let path = socket.path.clone();
    let mut asking = tokio::spawn(async move { ask_async(&path, request()).await });
    tokio::time::timeout(3 * QUICK, &mut asking).await.expect_err("it waits longer than configured");
    assert_eq!(engine.snapshot().borrow().leases[0].facts.state, LeaseState::Active);
    sim.with(|s| (s.no_workers, s.away) = (false, None));
    let (reply, _connection) = asking.await.expect("the task ends");
    assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
}

#[tokio::test]
async fn a_first_call_waits_longer_for_a_worker_of_a_server_that_has_restarted() {
    let sim = SimServer::new("gpu-a", 1);
    sim.with(|s| s.refuses_workers = Some(PoolError::new(Trouble::Unreachable, "the connection broke")));
    let engine = engine(&[&sim]);
    want(&engine, &quick()).await;
    until(&engine, |s| s.leases[0].facts.trouble.is_some() && s.leases[0].facts.state == LeaseState::Active)
        .await;
    let socket = GrantSocket::start(&engine, &quick(), Limits::default());
    let path = socket.path.clone();
    let mut asking = tokio::spawn(async move { ask_async(&path, request()).await });
    tokio::time::timeout(3 * QUICK, &mut asking).await.expect_err("it waits longer than configured");
    sim.with(|s| s.refuses_workers = None);
    let (reply, _connection) = asking.await.expect("the task ends");
    assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
}

#[tokio::test]
async fn a_lease_of_an_earlier_daemon_is_found_by_its_id_before_its_server_answers() {
    let sim = SimServer::new("gpu-a", 1);
    sim.with(|s| (s.ids, s.holds_allocations) = (["one".to_owned()].into(), true));
    let spec = Spec::requested("request/1".into(), nix::unistd::getuid().as_raw());
    let lease = SavedLease { spec, id: "one".into(), server: "gpu-a".into(), expires: Duration::ZERO };
    let saved = Saved { leases: vec![lease], ..Saved::default() };
    let engine = Engine::start_with(here(), EngineOptions { saved, ..EngineOptions::default() });
    engine.connect(vec![Arc::new(sim.clone())]);
    let socket = GrantSocket::start(&engine, &waiting(TEST_TIMEOUT, &[]), Limits::default());
    let (path, named) = (socket.path.clone(), Request { lease: Some("one".into()), ..request() });
    let mut asking = tokio::spawn(async move { ask_async(&path, named).await });
    tokio::time::timeout(3 * QUICK, &mut asking).await.expect_err("it waits");
    sim.with(|s| s.holds_allocations = false);
    let (reply, _connection) = asking.await.expect("the task ends");
    assert!(matches!(reply, Reply::Granted(_)), "{reply:?}");
}

/// Programs that `alice` runs in a loop, and the most workers of her lease.
const LOOP: usize = 200;
const MOST_WORKERS: usize = 8;

/// Asks as the grant socket does, until there is a worker.
async fn worker_for(engine: &Engine, uid: u32) -> Vec<Granted> {
    let caller = caller(uid, None, None, true);
    let wish = WorkerRequest { waiter: Some(Waiter::default()), ..WorkerRequest::default() };
    loop {
        match engine.grant(caller.clone(), wish.clone()).await {
            Answer::Granted(_, granted) => return granted,
            Answer::Denied(_, reason) => panic!("{reason}"),
            _ => tokio::time::sleep(Duration::from_millis(2)).await,
        }
    }
}

#[tokio::test]
async fn a_users_loop_of_programs_leaves_the_next_worker_to_another_user() {
    let sim = SimServer::new("gpu-a", 1);
    sim.with(|s| s.most_workers = Some(MOST_WORKERS));
    let engine = Arc::new(engine(&[&sim]));
    want(&engine, &quick()).await;
    until(&engine, |s| s.leases[0].facts.state == LeaseState::Active).await;
    let alices: Vec<_> = (0..LOOP)
        .map(|_| {
            let engine = engine.clone();
            tokio::spawn(async move {
                loop {
                    let granted = worker_for(&engine, 1000).await;
                    tokio::time::sleep(Duration::from_millis(40)).await;
                    engine.ended(granted);
                }
            })
        })
        .collect();
    sim.until(|s| s.ended.len() > 2 * MOST_WORKERS).await;
    for _ in 0..10 {
        let before = sim.with(|s| s.taken.len());
        let granted = worker_for(&engine, 1001).await;
        let others = sim.with(|s| s.taken.len()) - before;
        // Workers that the server had started when bob came are alice's.
        assert!(others <= 3 * MOST_WORKERS, "{others} programs of the loop came first");
        engine.ended(granted);
    }
    let before = sim.with(|s| s.ended.len());
    sim.until(|s| s.ended.len() > before + 2 * MOST_WORKERS).await;
    alices.iter().for_each(tokio::task::JoinHandle::abort);
}
