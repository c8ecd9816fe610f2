//! Tests of releases and withdrawals.

use super::*;

#[test]
fn a_returning_server_keeps_no_lost_lease() {
    let mut m = machine(2);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
    actions(&mut m);
    let released = |m: &mut Machine| {
        let is = |a: &Action| matches!(a, Action::Release { server: 0, lease } if lease == "l1");
        actions(m).iter().any(is)
    };
    m.tick(s(600));
    assert!(m.slot(slot).unwrap().held().is_none() && released(&mut m));
    m.released(s(600), 0, "l1", Err(unreachable()));
    assert!(!released(&mut m));
    m.reconnected(s(601), 0);
    assert!(released(&mut m), "at once");
}

#[test]
fn a_lease_that_comes_after_its_release_is_given_back() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.release(s(0), slot, "test");
    actions(&mut m);
    m.allocated(s(1), slot, Ok((0, lease("late", 1))));
    assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "late".into() }));
    m.released(s(1), 0, "late", Err(unreachable()));
    assert_eq!(m.releases_pending(), 1);
    let again = m.deadline().unwrap();
    m.tick(again.max(s(3)));
    assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "late".into() }));
    m.released(s(3), 0, "late", Ok(()));
    assert_eq!(m.releases_pending(), 0);
}

fn withdrawn(m: &mut Machine) -> Vec<(usize, String)> {
    let withdrawn = actions(m).into_iter().filter_map(|a| match a {
        Action::Withdraw { server, request_id } => Some((server, request_id)),
        _ => None,
    });
    withdrawn.collect()
}

#[test]
fn a_request_that_waits_and_is_not_wanted_any_more_leaves_the_queue() {
    let full = || PoolError::new(Trouble::NoCapacity, "full");
    let mut m = machine(1);
    m.configure(s(0), vec![configured("a", 1), configured("b", 1), configured("c", 1)]);
    let slots: Vec<Slot> = m.slots().map(|(slot, _)| slot).collect();
    // The first is queued, the second is asking again, the third has not been answered yet.
    m.allocated(s(0), slots[0], Err(full()));
    m.allocated(s(0), slots[1], Err(unreachable()));
    actions(&mut m);
    m.configure(s(1), vec![]);
    let [a, b, c] = ["a", "b", "c"].map(|name| (0, format!("boot/configured/{name}/0")));
    assert_eq!(withdrawn(&mut m), [a, b], "also the one whose reply may be lost");
    m.allocated(s(1), slots[2], Err(full()));
    assert_eq!(withdrawn(&mut m), std::slice::from_ref(&c), "when its answer has come");
    // A withdrawal that does not reach its server is repeated; a stop does not wait for it.
    m.released(s(1), 0, &c.1, Err(unreachable()));
    for name in ["a", "b"] {
        m.released(s(1), 0, &format!("boot/configured/{name}/0"), Ok(()));
    }
    assert_eq!(m.releases_pending(), 0);
    m.tick(s(100));
    assert_eq!(withdrawn(&mut m), std::slice::from_ref(&c));
    m.released(s(100), 0, &c.1, Ok(()));
    m.tick(s(1000));
    assert_eq!(withdrawn(&mut m), []);
}

#[test]
fn a_request_leaves_the_servers_that_did_not_grant_it() {
    let mut m = machine(3);
    let slot = m.want(s(0), configured("a", 1));
    let (first, _) = request(&actions(&mut m));
    m.allocated(s(0), slot, Err(unreachable()));
    m.tick(s(60));
    let (second, _) = request(&actions(&mut m));
    assert_eq!((first.len(), second.len()), (3, 3));
    m.allocated(s(60), slot, Ok((second[1], lease("l1", 1))));
    let mut withdrawn = withdrawn(&mut m);
    withdrawn.sort();
    let others = (0..3).filter(|server| *server != second[1]);
    assert_eq!(withdrawn, others.map(|server| (server, "boot/configured/a/0".into())).collect::<Vec<_>>());
}

#[test]
fn a_one_time_request_whose_reply_is_lost_leaves_no_lease() {
    let mut m = machine(2);
    let slot = m.want(s(0), Spec::requested("request/1".into(), 1000));
    let (servers, asked) = request(&actions(&mut m));
    m.allocated(s(0), slot, Err(unreachable()));
    let withdrawn = withdrawn(&mut m);
    assert_eq!(withdrawn, servers.into_iter().map(|i| (i, asked.request_id.clone())).collect::<Vec<_>>());
}

#[test]
fn a_request_is_withdrawn_where_an_earlier_try_may_have_made_a_lease() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Err(unreachable()));
    m.tick(s(30));
    let (_, asked) = request(&actions(&mut m));
    m.allocated(s(30), slot, Err(PoolError::new(Trouble::NeverFits, "8 GPUs of 4")));
    m.release(s(31), slot, "test");
    assert_eq!(withdrawn(&mut m), [(0, asked.request_id)]);
}

#[test]
fn the_lease_of_a_file_stays_when_its_user_gives_up() {
    let mut m = machine(1);
    let spec = Spec { request_id: Some("request".into()), ..Spec::requested("request/1".into(), 1000) };
    let slot = m.want(s(0), spec);
    actions(&mut m);
    m.release(s(0), slot, "interrupted");
    m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
    let todo = actions(&mut m);
    assert!(!todo.iter().any(|a| matches!(a, Action::Release { .. } | Action::Withdraw { .. })), "{todo:?}");
}

#[test]
fn a_lease_that_a_stopping_server_denies_is_given_back() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
    actions(&mut m);
    m.workers(s(1), slot, "l1", Err(PoolError::new(Trouble::NoSuchLease, "no such lease")));
    let release = Action::Release { server: 0, lease: "l1".into() };
    let todo = actions(&mut m);
    assert!(todo.contains(&release) && told(&todo).iter().any(|c| matches!(c, Change::Lost { .. })));
    // The server is still unreachable.
    m.released(s(2), 0, "l1", Err(unreachable()));
    m.tick(s(10));
    assert!(actions(&mut m).contains(&release));
}

#[test]
fn a_refused_release_is_repeated_until_the_lease_ends_by_itself() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
    let expires = m.slot(slot).unwrap().held().unwrap().expires;
    m.release(s(0), slot, "test");
    let release = Action::Release { server: 0, lease: "l1".into() };
    assert!(actions(&mut m).contains(&release));
    m.released(s(0), 0, "l1", Err(PoolError::new(Trouble::Refused, "another machine uses this identity")));
    m.tick(s(3));
    assert!(actions(&mut m).contains(&release), "the server holds it until it expires");
    m.released(s(3), 0, "l1", Err(PoolError::new(Trouble::Protocol, "unknown method")));
    assert_eq!(m.releases_pending(), 1);
    m.tick(expires);
    m.released(expires, 0, "l1", Err(PoolError::new(Trouble::Refused, "revoked")));
    assert_eq!(m.releases_pending(), 0, "it has expired");
}

#[test]
fn a_lease_that_its_server_does_not_know_is_released() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
    m.release(s(0), slot, "test");
    m.released(s(0), 0, "l1", Err(PoolError::new(Trouble::NoSuchLease, "no such lease")));
    assert_eq!(m.releases_pending(), 0);
}
