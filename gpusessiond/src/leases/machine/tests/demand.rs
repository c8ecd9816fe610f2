//! Tests of leases that the configuration, sessions and users want.

use super::*;

#[test]
fn a_reload_keeps_unchanged_leases() {
    let mut m = machine(1);
    m.configure(s(0), vec![configured("a", 1), configured("b", 1)]);
    let ids: Vec<Slot> = m.slots().map(|(slot, _)| slot).collect();
    m.allocated(s(0), ids[0], Ok((0, lease("la", 1))));
    m.allocated(s(0), ids[1], Ok((0, lease("lb", 1))));
    actions(&mut m);
    let mut changed = configured("b", 2);
    changed.order = 0;
    let mut moved = configured("a", 1);
    moved.order = 1;
    m.configure(s(1), vec![changed, moved, configured("c", 1)]);
    let todo = actions(&mut m);
    assert_eq!(m.slot(ids[0]).unwrap().held().unwrap().id, "la", "only moved");
    assert_eq!(m.slot(ids[0]).unwrap().spec.order, 1);
    assert!(m.slot(ids[1]).is_none());
    assert!(todo.contains(&Action::Release { server: 0, lease: "lb".into() }));
    let asked: Vec<String> = todo
        .iter()
        .filter_map(|a| {
            if let Action::Allocate { request, .. } = a { Some(request.request_id.clone()) } else { None }
        })
        .collect();
    assert_eq!(asked, ["boot/configured/b/1", "boot/configured/c/0"], "never the request of the old lease");
}

#[test]
fn session_leases_last_from_login_to_logout() {
    let mut m = machine(1);
    let template = Spec { class: Class::Session, ..configured("mine", 1) };
    m.configure(s(0), vec![template]);
    assert_eq!(m.slots().count(), 0);
    m.session_opened(s(1), session(1));
    m.demand(s(1), 1001, Some("u1"), false, Some("s1"));
    assert_eq!(m.slots().count(), 0, "no access");
    m.demand(s(1), 1002, Some("u2"), true, Some("s1"));
    assert_eq!(m.slots().count(), 0, "another user's session");
    m.demand(s(1), 1001, Some("u1"), true, Some("s1"));
    m.demand(s(2), 1001, Some("u1"), true, Some("s1"));
    let (slot, wanted) = m.slots().next().unwrap();
    assert_eq!(m.slots().count(), 1, "asked for once");
    assert_eq!((wanted.spec.owner.clone(), wanted.spec.session.as_deref()), (Owner::Uid(1001), Some("s1")));
    m.allocated(s(2), slot, Ok((0, lease("l1", 1))));
    m.session_closed(s(3), "s1");
    assert!(m.slot(slot).is_none());
    assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "l1".into() }));
}

#[test]
fn a_users_lease_outlives_its_sessions_by_a_moment() {
    let mut m = machine(1);
    m.configure(s(0), vec![Spec { class: Class::User, ..configured("mine", 1) }]);
    m.session_opened(s(0), session(1));
    m.demand(s(0), 1001, Some("u1"), true, Some("s1"));
    let slot = m.slots().next().unwrap().0;
    m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
    m.process_started(slot);
    m.session_closed(s(1), "s1");
    m.tick(s(500));
    assert!(m.slot(slot).is_some(), "a process still runs");
    m.renewed(s(500), 0, &[], Ok(vec![]));
    m.process_ended(s(500), slot, "l1", vec![1]);
    assert!(m.deadline().unwrap() <= s(500) + USER_LINGER_TIMEOUT);
    m.tick(s(529));
    assert!(m.slot(slot).is_some());
    m.tick(s(530));
    assert!(m.slot(slot).is_none());
}

#[test]
fn a_background_lease_yields_to_one_that_waits() {
    let mut m = machine(1);
    m.configure(s(0), vec![Spec { class: Class::Background, ..configured("spare", 1) }]);
    let spare = m.slots().next().unwrap().0;
    m.allocated(s(0), spare, Ok((0, lease("l1", 1))));
    actions(&mut m);
    let slot = m.want(s(1), configured("a", 1));
    m.process_started(spare);
    m.allocated(s(1), slot, Err(PoolError::new(Trouble::NoCapacity, "full")));
    assert!(m.slot(spare).unwrap().held().is_some(), "it is in use");
    m.process_ended(s(1), spare, "l1", vec![1]);
    m.tick(s(4));
    m.allocated(s(4), slot, Err(PoolError::new(Trouble::NoCapacity, "full")));
    assert!(m.slot(spare).unwrap().held().is_none());
    assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "l1".into() }));
    m.tick(s(5));
    assert!(matches!(m.slot(spare).unwrap().phase, Phase::Waiting { .. }), "it waits its turn");
}

#[test]
fn a_background_lease_yields_to_one_that_a_limit_refuses() {
    let mut m = machine(2);
    m.configure(s(0), vec![Spec { class: Class::Background, ..configured("spare", 1) }]);
    let spare = m.slots().next().unwrap().0;
    m.allocated(s(0), spare, Ok((0, lease("l1", 1))));
    actions(&mut m);
    let limit = || PoolError::new(Trouble::LimitExceeded, "at most 1 GPU");
    let elsewhere = Spec { servers: vec!["s1:7601".into()], ..configured("a", 1) };
    let slot = m.want(s(1), elsewhere);
    m.allocated(s(1), slot, Err(limit()));
    assert!(m.slot(spare).unwrap().held().is_some(), "another server's limit");
    m.release(s(1), slot, "test");
    let slot = m.want(s(1), configured("b", 1));
    actions(&mut m);
    m.allocated(s(1), slot, Err(limit()));
    assert!(m.slot(spare).unwrap().held().is_none());
    assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "l1".into() }));
    // It is asked for again as soon as there is room, however long the backoff is by now.
    m.released(s(1), 0, "l1", Ok(()));
    m.tick(s(1));
    assert_eq!(request(&actions(&mut m)).1.request_id, "boot/configured/b/0");
}

#[test]
fn a_refused_lease_of_a_reload_is_requested_again_after_the_releases() {
    let mut m = machine(1);
    m.configure(s(0), vec![configured("a", 1), configured("b", 1)]);
    let slots: Vec<_> = m.slots().map(|(slot, _)| slot).collect();
    for (slot, id) in slots.into_iter().zip(["l1", "l2"]) {
        m.allocated(s(0), slot, Ok((0, lease(id, 1))));
    }
    actions(&mut m);
    m.configure(s(1), vec![configured("c", 2)]);
    let slot = m.slots().next().unwrap().0;
    actions(&mut m);
    m.allocated(s(1), slot, Err(PoolError::new(Trouble::LimitExceeded, "at most 2 leases")));
    let asked = |m: &mut Machine| actions(m).iter().any(|a| matches!(a, Action::Allocate { .. }));
    m.released(s(1), 0, "l1", Ok(()));
    m.tick(s(1));
    assert!(!asked(&mut m), "the other one is still on its way");
    m.released(s(1), 0, "l2", Ok(()));
    m.tick(s(1));
    assert!(asked(&mut m), "without a pause");
}

#[test]
fn a_request_has_what_a_background_lease_held() {
    for trouble in [Trouble::NoCapacity, Trouble::LimitExceeded] {
        let mut m = machine(1);
        m.configure(s(0), vec![Spec { class: Class::Background, ..configured("spare", 1) }]);
        let spare = m.slots().next().unwrap().0;
        m.allocated(s(0), spare, Ok((0, lease("l1", 1))));
        let slot = m.want(s(1), Spec::requested("r".into(), 1000));
        actions(&mut m);
        let refused = || Err(PoolError::new(trouble, "refused"));
        m.allocated(s(1), slot, refused());
        let todo = actions(&mut m);
        assert!(todo.contains(&Action::Release { server: 0, lease: "l1".into() }));
        assert!(!told(&todo).iter().any(|c| matches!(c, Change::Failed { .. })), "it waits for that");
        m.tick(s(4));
        assert!(
            actions(&mut m).iter().all(|a| !matches!(a, Action::Allocate { .. })),
            "not before the release is confirmed"
        );
        m.released(s(5), 0, "l1", Ok(()));
        m.tick(s(5));
        assert_eq!(request(&actions(&mut m)).1.request_id, "boot/r/0");
        // With no background lease left it is tried once, as always.
        m.allocated(s(5), slot, refused());
        assert!(told(&actions(&mut m)).iter().any(|c| matches!(c, Change::Failed { .. })));
        assert!(m.slot(slot).is_none());
    }
}
