//! Tests of the workers in stock.

use super::*;

#[test]
fn a_program_does_not_wait_because_a_spare_was_refused() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
    let asks = |m: &mut Machine| -> Vec<u32> {
        let waiting = |a| match a {
            Action::TakeWorkers { waiting, .. } => Some(waiting),
            _ => None,
        };
        actions(m).into_iter().filter_map(waiting).collect()
    };
    assert!(m.take(s(0), &[slot]).is_some());
    assert_eq!(asks(&mut m), [0]);
    let refused = || Err(PoolError::new(Trouble::OutOfMemory, "no room for another"));
    m.workers(s(0), slot, "l1", refused());
    m.tick(s(0));
    assert!(asks(&mut m).is_empty(), "no process waits");
    assert!(m.take(s(0), &[slot]).is_none());
    assert_eq!(asks(&mut m), [1], "at once");
    m.workers(s(0), slot, "l1", refused());
    assert!(m.take(s(0), &[slot]).is_none());
    assert!(asks(&mut m).is_empty(), "not again at once");
    m.tick(s(3));
    assert_eq!(asks(&mut m), [1]);
    // A process comes while a call on behalf of no process is in flight.
    m.workers(s(3), slot, "l1", refused());
    m.tick(s(6));
    assert_eq!(asks(&mut m), [0]);
    assert!(m.take(s(6), &[slot]).is_none());
    m.workers(s(6), slot, "l1", refused());
    m.tick(s(6));
    assert_eq!(asks(&mut m), [1]);
}

#[test]
fn a_worker_is_kept_in_stock() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 1))));
    actions(&mut m);
    assert_eq!(m.take(s(0), &[slot]).unwrap().len(), 1, "no round trip");
    let refill = Action::TakeWorkers { slot, server: 0, lease: "l1".into(), count: 1, waiting: 0 };
    assert!(actions(&mut m).contains(&refill));
    // Three processes find an empty stock: one call brings workers for all of them and one
    // spare.
    for _ in 0..3 {
        assert!(m.take(s(0), &[slot]).is_none());
    }
    assert!(actions(&mut m).is_empty(), "one call at a time");
    m.workers(s(0), slot, "l1", Ok(lease("l1", 1).workers));
    assert!(m.take(s(0), &[slot]).is_some());
}

#[test]
fn a_worker_that_has_ended_in_stock_is_not_granted() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 2))));
    actions(&mut m);
    let ready = control::WorkersReady { stock: 2, ended: vec![vec![0; 16]] };
    let event = Some(control::pool_event::Event::WorkersReady(ready));
    m.event(s(1), 0, control::PoolEvent { lease: "l1".into(), event });
    assert_eq!(m.take(s(1), &[slot]).unwrap()[0].id, [1; 16]);
    assert!(m.take(s(1), &[slot]).is_none());
}

#[test]
fn stock_of_before_an_outage_is_not_granted() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 2))));
    actions(&mut m);
    let old = m.disconnected(0);
    assert_eq!(
        old.iter().map(|(lease, w)| (lease.as_str(), w.id[0])).collect::<Vec<_>>(),
        [("l1", 0), ("l1", 1)]
    );
    assert!(m.take(s(9), &[slot]).is_none());
    m.workers(s(9), slot, "l1", Err(unreachable()));
    actions(&mut m);
    m.reconnected(s(9), 0);
    let todo = actions(&mut m);
    assert!(todo.iter().any(|a| matches!(a, Action::TakeWorkers { .. })), "{todo:?}");
}

#[test]
fn a_process_gets_workers_of_all_its_leases_or_none() {
    let mut m = machine(1);
    let a = m.want(s(0), configured("a", 1));
    let b = m.want(s(0), configured("b", 1));
    m.allocated(s(0), a, Ok((0, lease("la", 1))));
    m.allocated(s(0), b, Ok((0, lease("lb", 0))));
    assert!(m.take(s(0), &[a, b]).is_none());
    assert_eq!(m.slot(a).unwrap().held().unwrap().stock.len(), 1);
    m.workers(s(0), b, "lb", Ok(lease("lb", 2).workers));
    assert_eq!(m.take(s(0), &[a, b]).unwrap().len(), 2);
}

#[test]
fn a_worker_that_ends_before_it_arrives_is_not_granted() {
    let mut m = machine(1);
    let slot = m.want(s(0), configured("a", 1));
    m.allocated(s(0), slot, Ok((0, lease("l1", 0))));
    actions(&mut m);
    let ready = control::WorkersReady { stock: 0, ended: vec![vec![0; 16]] };
    let event = Some(control::pool_event::Event::WorkersReady(ready));
    m.event(s(1), 0, control::PoolEvent { lease: "l1".into(), event });
    m.workers(s(1), slot, "l1", Ok(lease("l1", 1).workers));
    assert!(m.take(s(1), &[slot]).is_none());
}
