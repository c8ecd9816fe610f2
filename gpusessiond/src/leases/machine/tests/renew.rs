//! Tests of heartbeats, events and lost leases.

use super::*;

#[test]
fn a_lease_that_was_lent_may_have_other_gpus() {
    let mut m = machine(1);
    m.configure(s(0), vec![configured("l", 1)]);
    let slot = *m.slots.keys().next().expect("one");
    m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
    actions(&mut m);
    let device = |uuid: &str| control::Device { uuid: uuid.into(), ..Default::default() };
    let state = |devices| control::PoolEvent {
        lease: "l1".into(),
        event: Some(control::pool_event::Event::State(control::StateChange {
            state: "active".into(),
            devices,
            ..Default::default()
        })),
    };
    let uuid = |m: &Machine| m.slots[&slot].held().expect("held").reported.devices[0].uuid.clone();
    m.event(s(1), 0, state(vec![]));
    assert_eq!((uuid(&m), told(&actions(&mut m))), ("GPU-l1".into(), vec![]));
    m.event(s(1), 0, state(vec![device("GPU-other")]));
    assert_eq!((uuid(&m), told(&actions(&mut m))), ("GPU-other".into(), vec![Change::Changed { slot }]));
    // The next heartbeat makes up for a missed event.
    let renewed = control::RenewedLease {
        id: "l1".into(),
        state: "active".into(),
        devices: vec![device("GPU-third")],
        ..Default::default()
    };
    m.renewed(s(2), 0, &["l1".into()], Ok(vec![renewed]));
    assert_eq!(uuid(&m), "GPU-third");
    m.event(s(3), 0, state(vec![device("a"), device("b")]));
    assert_eq!(uuid(&m), "GPU-third", "not as many as it has");
}

#[test]
fn a_parked_lease_whose_programs_continue_has_a_place_in_the_queue() {
    let mut m = machine(1);
    m.configure(s(0), vec![configured("l", 1)]);
    let slot = *m.slots.keys().next().expect("one");
    m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
    let mut told_of = |state: &str, position, waiting| {
        let state = state.into();
        let change = control::StateChange { state, position, waiting, ..Default::default() };
        let event = Some(control::pool_event::Event::State(change));
        m.event(s(1), 0, control::PoolEvent { lease: "l1".into(), event });
        let held = m.slots[&slot].held().expect("held");
        (held.state, held.place, told(&actions(&mut m)).contains(&Change::Changed { slot }))
    };
    let parked = LeaseState::Parked;
    assert_eq!(told_of("parked", 0, 0), (parked, None, true));
    assert_eq!(told_of("returning", 2, 3), (parked, Some((2, 3)), true));
    assert_eq!(told_of("returning", 2, 3), (parked, Some((2, 3)), false));
    assert_eq!(told_of("returning", 1, 1), (parked, Some((1, 1)), true));
    assert_eq!(told_of("returning", 0, 0), (parked, None, true), "its memory is on its way");
    assert_eq!(told_of("active", 0, 0), (LeaseState::Active, None, true));
    told_of("returning", 1, 2);
    let renewed = control::RenewedLease {
        id: "l1".into(),
        state: "returning".into(),
        position: 1,
        ..Default::default()
    };
    m.renewed(s(2), 0, &["l1".into()], Ok(vec![renewed]));
    assert_eq!(m.slots[&slot].held().expect("held").place, Some((1, 1)), "news may be missed");
}

#[test]
fn a_lost_lease_is_acquired_again_with_its_gpus_if_possible() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
    actions(&mut m);
    let lost =
        control::RenewedLease { id: "l1".into(), lost: true, reason: "gone".into(), ..Default::default() };
    m.renewed(s(2), 0, &["l1".into()], Ok(vec![lost]));
    let news = told(&actions(&mut m));
    assert!(news.contains(&Change::Lost { slot, id: "l1".into(), reason: "gone".into() }), "{news:?}");
    m.tick(s(4));
    let (_, asked) = request(&actions(&mut m));
    assert_eq!(asked.sticky, ["GPU-l1"]);
    assert_eq!(asked.request_id, "boot/configured/a/1");
}

#[test]
fn a_lease_is_lost_if_not_renewed_in_time() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
    m.tick(s(599));
    assert!(m.slot(slot).unwrap().held().is_some());
    m.renewed(s(599), 0, &["l1".into()], Err(unreachable()));
    m.tick(s(600));
    assert!(m.slot(slot).unwrap().held().is_none());
    assert!(told(&actions(&mut m)).iter().any(|c| matches!(c, Change::Lost { .. })));
}

#[test]
fn a_lease_with_a_time_to_live_ends_unless_renewed() {
    let mut m = machine(1);
    let mut spec = Spec::requested("r".into(), 1000);
    spec.ttl = Some(s(600));
    let slot = m.want(s(0), spec);
    m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
    actions(&mut m);
    m.renewed(s(1), 0, &[], Ok(vec![]));
    m.tick(s(100));
    assert!(actions(&mut m).contains(&Action::Renew { server: 0, leases: vec![] }), "not by the heartbeat");
    let renewed = control::RenewedLease { id: "l1".into(), ttl_usec: 600_000_000, ..Default::default() };
    let warned = |m: &mut Machine, now: Time| {
        m.tick(now);
        let told = told(&actions(m));
        told.iter().filter(|c| matches!(c, Change::PrepareForLoss { idle: false, .. })).count()
    };
    assert_eq!((warned(&mut m, s(449)), warned(&mut m, s(450)), warned(&mut m, s(451))), (0, 1, 0));
    m.renewed(s(500), 0, &["l1".into()], Ok(vec![renewed]));
    assert_eq!((warned(&mut m, s(949)), warned(&mut m, s(950)), warned(&mut m, s(1099))), (0, 1, 0));
    assert!(m.slot(slot).is_some());
    m.tick(s(1100));
    assert!(m.slot(slot).is_none());
    assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "l1".into() }));
}

#[test]
fn heartbeats_of_several_servers_go_together() {
    let mut m = machine(2);
    m.tick(s(0));
    let (a, b) = (m.want(s(0), configured("a", 1)), m.want(s(0), configured("b", 1)));
    m.allocated(s(0), a, Ok((0, lease("la", 1))));
    m.allocated(s(0), b, Ok((1, lease("lb", 1))));
    let asked = |m: &mut Machine| {
        let server = |a: &Action| if let Action::Renew { server, .. } = a { Some(*server) } else { None };
        actions(m).iter().filter_map(server).collect::<Vec<_>>()
    };
    assert_eq!(asked(&mut m), [0, 1]);
    // The second server answers later.
    m.renewed(Duration::from_millis(1), 0, &[], Ok(vec![]));
    m.renewed(Duration::from_millis(200), 1, &[], Ok(vec![]));
    let due = m.deadline().unwrap();
    assert_eq!(due, Duration::from_millis(2001));
    m.tick(due - COALESCE_WINDOW - Duration::from_millis(1));
    assert_eq!(asked(&mut m), Vec::<usize>::new());
    m.tick(due);
    assert_eq!(asked(&mut m), [0, 1]);
}

#[test]
fn heartbeats_are_fast_while_leases_are_held_and_slow_otherwise() {
    let mut m = machine(1);
    m.tick(s(0));
    assert!(actions(&mut m).contains(&Action::Renew { server: 0, leases: vec![] }));
    m.renewed(s(0), 0, &[], Ok(vec![]));
    assert_eq!(m.deadline(), Some(IDLE_HEARTBEAT_INTERVAL));
    let slot = m.want(s(1), configured("a", 1));
    m.allocated(s(1), slot, Ok((0, lease("l1", 1))));
    actions(&mut m);
    m.tick(s(3));
    assert!(actions(&mut m).contains(&Action::Renew { server: 0, leases: vec!["l1".into()] }));
    m.tick(s(4));
    assert!(actions(&mut m).is_empty(), "one heartbeat at a time");
}

#[test]
fn an_ended_lease_or_worker_is_known_to_its_programs_for_a_time() {
    let mut m = machine(2);
    let because = |m: &Machine, at: u64, lease: &str| m.ended_because(s(at), lease, &[7; 16]);
    let slots: Vec<Slot> = ["l1", "l2", "l3"].map(|name| m.want(s(0), configured(name, 1))).into();
    for (slot, name) in slots.iter().zip(["l1", "l2", "l3"]) {
        m.allocated(s(0), *slot, Ok((0, lease(name, 1))));
    }
    assert_eq!(because(&m, 1, "l1"), None);
    assert_eq!(because(&m, 1, "nosuch"), None, "only what is known counts");
    let event = |lease: &str, event| control::PoolEvent { lease: lease.into(), event: Some(event) };
    use control::pool_event::Event;
    let ended = control::WorkersReady { stock: 1, ended: vec![vec![7; 16]] };
    m.event(s(1), 0, event("l1", Event::WorkersReady(ended)));
    assert_eq!(because(&m, 1, "l1").as_deref(), Some("its worker of lease l1 has ended"));
    assert_eq!(m.ended_because(s(1), "l1", &[8; 16]), None, "another worker");
    m.event(s(2), 0, event("l2", Event::Lost(control::Loss { reason: "reset".into() })));
    assert_eq!(because(&m, 3, "l2").as_deref(), Some("lease l2 has ended: reset"));
    m.release(s(3), slots[2], "released by alice");
    assert_eq!(because(&m, 3, "l3").as_deref(), Some("lease l3 has ended: released by alice"));
    assert!(because(&m, 122, "l3").is_some());
    assert_eq!(because(&m, 123, "l3"), None);

    // The next daemon finds a server that has forgotten the lease, and one that is gone.
    let mut m = machine(2);
    let slots: Vec<Slot> = ["l1", "l2"].map(|name| m.want(s(0), configured(name, 1))).into();
    for (slot, name) in slots.iter().zip(["l1", "l2"]) {
        let lease = control::Lease { server: "s0:7601".into(), ..lease(name, 1) };
        m.allocated(s(0), *slot, Ok((0, lease)));
    }
    let saved = m.saved();
    let mut m = machine(2);
    m.restore(s(10), saved);
    m.tick(s(10));
    assert_eq!((because(&m, 10, "l1"), because(&m, 10, "l2")), (None, None));
    let slots: Vec<Slot> = m.slots().map(|(slot, _)| slot).collect();
    m.allocated(s(11), slots[0], Ok((0, lease("l9", 1))));
    assert_eq!(because(&m, 11, "l1").as_deref(), Some("lease l1 has ended: its server no longer knows it"));
    m.release(s(11), slots[1], "gpusessiond is stopping");
    assert_eq!(because(&m, 11, "l2").as_deref(), Some("lease l2 has ended: gpusessiond is stopping"));
}
