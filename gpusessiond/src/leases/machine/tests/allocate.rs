//! Tests of requests for leases.

use super::*;

#[test]
fn the_configured_idle_policy_is_in_the_request() {
    use gpusession_common::words::OnIdle;
    let mut m = machine(1);
    let config = LeaseConfig { on_idle: Some(OnIdle::Keep), hold: true, ..LeaseConfig::default() };
    m.configure(s(0), vec![Spec::configured(&config, 0)]);
    let (_, asked) = request(&actions(&mut m));
    assert_eq!((asked.on_idle.as_str(), asked.hold), ("keep", true));
    m.configure(s(0), vec![configured("plain", 1)]);
    let (_, asked) = request(&actions(&mut m));
    assert_eq!((asked.on_idle.as_str(), asked.hold), ("", false), "the server's policy");
}

#[test]
fn a_configured_lease_is_asked_for_until_it_is_there() {
    let mut m = machine(2);
    let slot = m.want(s(0), configured("a", 1));
    let first = actions(&mut m);
    let (servers, asked) = request(&first);
    assert_eq!(servers.len(), 2);
    assert_eq!(asked.request_id, "boot/configured/a/0");
    let mut last = s(0);
    for attempt in 1..12 {
        m.allocated(last, slot, Err(unreachable()));
        let Phase::Waiting { retry } = m.slot(slot).unwrap().phase else { panic!("waits") };
        let pause = retry - last;
        assert!(pause >= s(1) / 2 && pause <= BACKOFF_MAX, "attempt {attempt}: {pause:?}");
        m.tick(retry - Duration::from_micros(1));
        assert!(matches!(m.slot(slot).unwrap().phase, Phase::Waiting { .. }));
        m.tick(retry);
        assert!(matches!(m.slot(slot).unwrap().phase, Phase::Allocating));
        last = retry;
        // The request id stays, so that a lease whose reply was lost is found again.
        assert_eq!(request(&actions(&mut m)).1.request_id, "boot/configured/a/0");
    }
    m.allocated(last, slot, Ok((1, lease("l1", 1))));
    assert!(told(&actions(&mut m)).contains(&Change::Granted { slot }));
    assert!(m.slot(slot).unwrap().trouble.is_none());
}

#[test]
fn a_request_of_a_user_is_tried_once() {
    let mut m = machine(1);
    let slot = m.want(s(0), Spec::requested("r".into(), 1000));
    m.allocated(s(0), slot, Err(PoolError::new(Trouble::NoCapacity, "full")));
    let news = told(&actions(&mut m));
    assert!(matches!(&news[..], [.., Change::Failed { error, .. }] if error.trouble == Trouble::NoCapacity));
    assert!(m.slot(slot).is_none());
}

/// Returns the names of the leases that are asked for, with their order at the server.
fn asked(m: &mut Machine) -> Vec<(String, u32)> {
    let asked = actions(m).into_iter().filter_map(|a| match a {
        Action::Allocate { slot, request, .. } => Some((m.slot(slot)?.spec.name.clone(), request.order)),
        _ => None,
    });
    asked.collect()
}

#[test]
fn leases_from_boot_are_asked_for_at_once_where_there_is_room() {
    let mut m = machine(1);
    let mut leases = file(&[("a", &[]), ("b", &[]), ("mine", &[]), ("c", &[])]);
    leases[2].class = Class::Session;
    m.configure(s(0), leases);
    assert_eq!(asked(&mut m), [("a".into(), 1)], "no server has reported free GPUs yet");
    // Requests of users count from when they come.
    m.session_opened(s(0), session(0));
    m.demand(s(0), session(0).uid, None, true, Some(&session(0).id));
    m.want(s(0), Spec { name: "once".into(), ..Spec::requested("request".into(), 1000) });
    assert_eq!(asked(&mut m), [("mine".into(), 0), ("once".into(), 0)]);
    m.described(s(0), 0, 2);
    m.tick(s(0));
    assert!(asked(&mut m).is_empty());
    m.described(s(0), 0, 3);
    m.tick(s(0));
    assert_eq!(asked(&mut m), [("b".into(), 2), ("c".into(), 4)]);
}

#[test]
fn where_there_is_no_room_for_all_the_first_in_the_file_gets_it() {
    let mut m = machine(2);
    m.configure(s(0), file(&[("a", &[]), ("b", &["s1:7601"]), ("c", &[])]));
    for (server, free) in [(0, 1), (1, 1)] {
        m.described(s(0), server, free);
    }
    m.tick(s(0));
    let mut order = Vec::new();
    for slot in 1..=3 {
        order.extend(asked(&mut m));
        m.allocated(s(0), slot, Err(PoolError::new(Trouble::NoCapacity, "full")));
        m.tick(s(0));
    }
    assert_eq!(order, [("a".into(), 1), ("b".into(), 2), ("c".into(), 3)]);
    // From now on they have their places in the queue, and none defers to another.
    m.tick(s(10));
    assert_eq!(asked(&mut m).len(), 3);
}

#[test]
fn leases_of_different_servers_do_not_wait_for_each_other() {
    let mut m = machine(2);
    m.configure(s(0), file(&[("a", &["s0:7601"]), ("b", &["s1:7601"]), ("c", &["s0:7601"])]));
    assert_eq!(asked(&mut m), [("a".into(), 1), ("b".into(), 2)]);
    // A server that hangs holds up later leases for a bounded time.
    m.tick(BOOT_ORDER_DELAY / 2);
    assert!(asked(&mut m).is_empty());
    assert_eq!(m.deadline(), Some(BOOT_ORDER_DELAY));
    m.tick(BOOT_ORDER_DELAY);
    assert_eq!(asked(&mut m), [("c".into(), 3)]);
}

#[test]
fn a_free_gpu_has_room_for_several_parts() {
    let mut m = machine(1);
    let mut leases = file(&[("a", &[]), ("b", &[]), ("c", &[]), ("d", &[])]);
    for spec in &mut leases {
        spec.memory = Memory::Percent(40.0);
    }
    m.configure(s(0), leases);
    asked(&mut m);
    for (free, expected) in [(1, 0), (2, 3)] {
        m.described(s(0), 0, free);
        m.tick(s(0));
        assert_eq!(asked(&mut m).len(), expected, "{free} free");
    }
}

#[test]
fn gpus_of_one_lease_are_one_servers() {
    let mut m = machine(2);
    let mut leases = file(&[("a", &[]), ("b", &[])]);
    leases[0].gpus = 2;
    m.configure(s(0), leases);
    assert_eq!(asked(&mut m), [("a".into(), 1)]);
    for (free, expected) in [(2, 0), (3, 1)] {
        for server in 0..2 {
            m.described(s(0), server, free);
        }
        m.tick(s(0));
        assert_eq!(asked(&mut m).len(), expected, "{free} free on each");
    }
}

#[test]
fn a_server_is_chosen_by_the_name_it_tells() {
    let mut m = machine(2);
    let mut spec = configured("a", 1);
    spec.servers = vec!["gpu-b".into()];
    let slot = m.want(s(0), spec);
    assert!(m.slot(slot).unwrap().trouble.is_none(), "no server has reported its name yet");
    m.tick(s(1));
    assert!(m.slot(slot).unwrap().trouble.as_ref().unwrap().message.contains("gpu-b"));
    actions(&mut m);
    m.name_server(s(1), 1, "gpu-b");
    m.tick(s(1));
    assert_eq!(request(&actions(&mut m)).0, [1], "at once");
}
