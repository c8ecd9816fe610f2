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
