//! Tests of leases that an earlier daemon held.

use super::*;

#[test]
fn a_lease_of_before_a_restart_is_found_again_by_its_request() {
    let mut m = machine(2);
    m.configure(s(0), vec![configured("a", 1)]);
    let slot = m.slots().next().unwrap().0;
    let mut held = lease("l1", 1);
    held.server = "gpu-b".into();
    m.allocated(s(0), slot, Ok((1, held.clone())));
    m.name_server(s(0), 1, "gpu-b");
    let mut world = World::default();
    let mut m = restart(&m, &mut world, s(10), 7);
    m.configure(s(10), vec![configured("a", 1)]);
    let slot = m.slots().next().unwrap().0;
    let (servers, asked) = request(&actions(&mut m));
    assert_eq!((servers, asked.request_id.as_str()), (vec![1], "boot/configured/a/0"));
    assert!(asked.again && asked.workers.is_empty(), "what the old daemon had in stock is not wanted");
    assert_eq!(m.slot_of("l1"), Some(slot));
    m.process_resumed(slot, [9; 16]);
    // Its process exits while the server is restarting, too.
    m.allocated(s(10), slot, Err(unreachable()));
    m.process_ended(s(11), slot, "l1", vec![9; 16]);
    m.tick(s(13));
    let (servers, asked) = request(&actions(&mut m));
    assert_eq!(servers, [1], "no other server is asked");
    assert_eq!(asked.workers, [vec![9; 16]], "its worker is in use");
    m.allocated(s(13), slot, Ok((1, held)));
    let ended = Action::EndWorker { slot, server: 1, lease: "l1".into(), worker: vec![9; 16] };
    assert!(actions(&mut m).contains(&ended));
    assert_eq!(m.slot(slot).unwrap().processes, 0);
}

#[test]
fn a_lease_that_its_server_has_forgotten_does_not_wait_behind_the_question_for_it() {
    let mut m = machine(1);
    m.configure(s(0), vec![configured("a", 1)]);
    let slot = m.slots().next().unwrap().0;
    m.allocated(s(0), slot, Ok((0, control::Lease { server: "s0:7601".into(), ..lease("l1", 1) })));
    let mut m = restart(&m, &mut World::default(), s(10), 7);
    m.configure(s(10), vec![configured("a", 1)]);
    let slot = m.slots().next().unwrap().0;
    assert_eq!(request(&actions(&mut m)).1.request_id, "boot/configured/a/0");
    m.allocated(s(10), slot, Err(PoolError::new(Trouble::NoCapacity, "full")));
    let withdrawn = Action::Withdraw { server: 0, request_id: "boot/configured/a/0".into() };
    assert!(actions(&mut m).contains(&withdrawn));
    m.tick(s(100));
    assert_eq!(request(&actions(&mut m)).1.request_id, "boot/configured/a/1");
}

#[test]
fn a_lease_whose_session_ended_while_no_daemon_ran_is_given_back_when_its_server_is_known() {
    let mut m = machine(1);
    m.configure(s(0), vec![configured("a", 1)]);
    let slot = m.slots().next().unwrap().0;
    m.allocated(s(0), slot, Ok((0, control::Lease { server: "gpu-a".into(), ..lease("l1", 1) })));
    let saved = m.saved();
    let mut m = Machine::new("boot".into(), "machine".into(), fastrand::Rng::with_seed(7));
    m.restore(s(10), saved);
    m.configure(s(10), vec![]);
    m.add_server(s(10), "gpu-a.example:7601".into());
    m.name_server(s(11), 0, "gpu-b");
    assert!(!actions(&mut m).iter().any(|a| matches!(a, Action::Release { .. })));
    m.name_server(s(12), 0, "gpu-a");
    let given_back = Action::Release { server: 0, lease: "l1".into() };
    assert!(actions(&mut m).contains(&given_back));
    m.name_server(s(13), 0, "gpu-a");
    assert!(!actions(&mut m).contains(&given_back), "once");
}

#[test]
fn a_release_that_no_server_has_confirmed_is_repeated_by_the_next_daemon() {
    let mut m = machine(1);
    m.name_server(s(0), 0, "gpu-a");
    let slot = m.want(s(0), Spec { once: true, ..configured("a", 1) });
    let expires = control::Lease { server: "gpu-a".into(), ..lease("l1", 1) };
    m.allocated(s(0), slot, Ok((0, expires)));
    actions(&mut m);
    m.release(s(1), slot, "its owner released it");
    m.released(s(1), 0, "l1", Err(unreachable()));
    let saved = m.saved();
    assert_eq!((saved.leases.len(), saved.releases.len()), (0, 1));
    let restored = |now: Time, saved: Saved| {
        let mut m = Machine::new("boot".into(), "machine".into(), fastrand::Rng::with_seed(7));
        m.restore(now, saved);
        m
    };
    assert!(restored(saved.releases[0].until, saved.clone()).saved().releases.is_empty(), "it has expired");
    let mut m = restored(s(2), saved.clone());
    assert_eq!(m.saved(), saved, "until the server is known");
    m.add_server(s(2), "gpu-a.example:7601".into());
    m.name_server(s(3), 0, "gpu-a");
    assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "l1".into() }));
    m.released(s(3), 0, "l1", Ok(()));
    assert!(m.saved().releases.is_empty());
}

#[test]
fn a_server_that_does_not_come_back_is_not_waited_for() {
    let mut m = machine(2);
    m.configure(s(0), vec![configured("a", 1)]);
    let slot = m.slots().next().unwrap().0;
    m.allocated(s(0), slot, Ok((0, control::Lease { server: "s0:7601".into(), ..lease("l1", 1) })));
    let mut m = restart(&m, &mut World::default(), s(10), 7);
    let slot = m.slots().next().unwrap().0;
    m.tick(s(10));
    actions(&mut m);
    m.allocated(s(10) + RECOVERY_TIMEOUT, slot, Err(unreachable()));
    actions(&mut m);
    m.tick(s(15) + RECOVERY_TIMEOUT);
    let (servers, asked) = request(&actions(&mut m));
    assert_eq!((servers.len(), asked.request_id.as_str()), (2, "boot/configured/a/1"));
}

#[test]
fn the_next_daemon_withdraws_a_request_that_was_under_way() {
    let mut m = machine(1);
    m.name_server(s(0), 0, "gpu-a");
    m.want(s(0), Spec::requested("request/1".into(), 1000));
    let dropped = m.want(s(0), Spec::requested("request/2".into(), 1000));
    m.release(s(1), dropped, "its owner released it");
    actions(&mut m);
    let saved = m.saved();
    assert!(saved.releases.iter().all(|release| release.waits && release.server == "gpu-a"));
    assert_eq!(saved, m.saved(), "time alone changes nothing");
    let mut m = Machine::new("boot".into(), "machine".into(), fastrand::Rng::with_seed(7));
    m.restore(s(2), saved);
    // Servers that have not reported a name have their address.
    m.add_server(s(2), "gpu-a".into());
    let withdrawn = |n| Action::Withdraw { server: 0, request_id: format!("boot/request/{n}/0") };
    let todo = actions(&mut m);
    assert!(todo.contains(&withdrawn(1)) && todo.contains(&withdrawn(2)), "{todo:?}");
    m.released(s(3), 0, "boot/request/1/0", Ok(()));
    m.released(s(3), 0, "boot/request/2/0", Ok(()));
    assert!(m.saved().releases.is_empty());
}

#[test]
fn the_next_daemon_repeats_a_request_of_the_configuration() {
    let mut m = machine(1);
    m.configure(s(0), vec![configured("a", 1)]);
    actions(&mut m);
    assert!(m.saved().releases.is_empty(), "a withdrawal could end the lease that the repetition finds");
}
