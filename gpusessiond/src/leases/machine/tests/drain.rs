//! Tests of servers that this client leaves.

use super::*;

#[test]
fn a_drained_server_is_left_after_the_grace() {
    let mut m = machine(2);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
    actions(&mut m);
    m.drain(s(1), 0, Some(s(60)));
    let news = told(&actions(&mut m));
    assert!(
        news.iter().any(|c| matches!(c, Change::PrepareForLoss { left, .. } if *left == s(60))),
        "{news:?}"
    );
    m.renewed(s(60), 0, &["l1".into()], Ok(vec![]));
    m.tick(s(60));
    assert!(m.slot(slot).unwrap().held().is_some());
    m.tick(s(61));
    assert!(m.slot(slot).unwrap().held().is_none());
    m.tick(s(63));
    let todo = actions(&mut m);
    assert!(todo.contains(&Action::Release { server: 0, lease: "l1".into() }));
    assert_eq!(request(&todo).0, [1]);
}

/// Returns the servers that get a heartbeat at `now`.
fn asked(m: &mut Machine, now: Time) -> Vec<usize> {
    m.tick(now);
    let renewals = actions(m).into_iter().filter_map(|a| match a {
        Action::Renew { server, .. } => Some(server),
        _ => None,
    });
    renewals.collect()
}

#[test]
fn a_removed_server_is_gone_after_its_last_lease_and_may_come_back() {
    let mut m = machine(2);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
    assert_eq!(asked(&mut m, s(0)), [0, 1]);
    for server in [0, 1] {
        m.renewed(s(0), server, &[], Ok(vec![]));
    }
    m.remove_server(s(1), 0, s(60));
    m.remove_server(s(1), 1, s(60));
    assert_eq!([m.gone(0), m.gone(1)], [false, true]);
    assert_eq!(asked(&mut m, s(59)), [0], "a server that is gone gets no heartbeat");
    m.renewed(s(59), 0, &["l1".into()], Ok(vec![]));
    m.tick(s(61));
    m.tick(s(63));
    assert!(actions(&mut m).contains(&Action::Release { server: 0, lease: "l1".into() }));
    assert!(!m.gone(0), "its answer is missing");
    m.set_notice(s(63), "servers.toml names no server".into());
    m.released(s(63), 0, "l1", Ok(()));
    assert!(m.gone(0));
    m.tick(s(70));
    let why = m.slot(slot).unwrap().trouble.as_ref().map(|t| t.message.as_str());
    assert_eq!(why, Some("servers.toml names no server"));
    assert_eq!(asked(&mut m, s(200)), [] as [usize; 0]);
    m.restore_server(s(200), 1);
    assert_eq!(m.health(1).answered, None, "its answers of before say nothing about now");
    m.tick(s(200));
    let todo = actions(&mut m);
    assert!(todo.contains(&Action::Renew { server: 1, leases: vec![] }), "{todo:?}");
    assert_eq!(request(&todo).0, [1]);
}

#[test]
fn a_lease_of_a_server_that_was_drained_meanwhile_ends_with_a_warning() {
    let mut m = machine(2);
    let slot = m.want(s(0), configured("a", 1));
    m.remove_server(s(1), 0, s(60));
    assert!(m.gone(0));
    actions(&mut m);
    m.allocated(s(11), slot, Ok((0, lease("l1", 1))));
    assert!(!m.gone(0), "the lease is there");
    let news = told(&actions(&mut m));
    assert!(
        news.iter().any(|c| matches!(c, Change::PrepareForLoss { left, .. } if *left == s(50))),
        "{news:?}"
    );
    assert_eq!(m.slot(slot).unwrap().held().unwrap().state, LeaseState::Draining);
    m.tick(s(61));
    assert!(m.slot(slot).unwrap().held().is_none());
}

#[test]
fn a_withdrawal_brings_no_server_back() {
    let mut m = machine(2);
    let slot = m.want(s(0), configured("a", 1));
    let full = PoolError::new(Trouble::NoCapacity, "all GPUs are leased");
    m.allocated(s(0), slot, Err(full));
    m.remove_server(s(1), 0, s(60));
    m.release(s(2), slot, "released");
    assert!(m.gone(0), "a withdrawal is no lease");
}
