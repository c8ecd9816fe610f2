//! Tests of the ledger, by example and by property.

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;
const T: Moment = Duration::from_secs(1);

fn ledger(limit: u64, context: u64) -> Ledger {
    Ledger::new(vec![DeviceLimit {
        uuid: [1; 16],
        memory_bytes: limit,
        sm_percent: 100,
        context_bytes: context,
    }])
}

fn granted(says: &[LedgerMessage]) -> u64 {
    match says {
        [LedgerMessage::Granted { bytes, .. }] => *bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn four_processes_share_one_limit() {
    let mut l = ledger(1024 * MIB, 0);
    for n in 1..=4 {
        l.admit([n; 16]);
        assert_eq!(granted(&l.ask([n; 16], 0, 1, 200 * MIB, T)), 256 * MIB, "in chunks");
    }
    assert_eq!(l.used(0), 1024 * MIB);
    // The others return unused memory, which makes room.
    let says = l.ask([1; 16], 0, 2, 100 * MIB, T);
    assert_eq!(says.len(), 3);
    assert!(l.returned(&[2; 16], 0, 56 * MIB).is_empty());
    assert!(l.returned(&[3; 16], 0, 56 * MIB).is_empty());
    assert_eq!(granted(&l.returned(&[4; 16], 0, 0)), 100 * MIB, "exactly");
    assert_eq!(l.used(0), 1012 * MIB);
    // No worker returns any: the request is refused, and the answer tells what is left.
    l.ask([1; 16], 0, 3, 13 * MIB, T);
    l.returned(&[2; 16], 0, 0);
    l.returned(&[3; 16], 0, 0);
    assert_eq!(
        l.returned(&[4; 16], 0, 0),
        [LedgerMessage::Granted { worker: [1; 16], device: 0, serial: 3, bytes: 0, left: 12 * MIB }]
    );
    // The exit of a process frees all of it, and answers the waiting request.
    assert_eq!(l.ask([1; 16], 0, 4, 200 * MIB, T).len(), 3);
    l.returned(&[2; 16], 0, 0);
    l.returned(&[3; 16], 0, 0);
    assert_eq!(granted(&l.on_exit(&[4; 16])), 200 * MIB);
}

#[test]
fn contexts_count_and_unknown_workers_get_no_memory() {
    let mut l = ledger(1024 * MIB, 500 * MIB);
    assert_eq!(granted(&l.ask([1; 16], 0, 1, MIB, T)), 0);
    l.admit([1; 16]);
    assert_eq!(granted(&l.ask([1; 16], 7, 1, MIB, T)), 0, "no such device");
    assert_eq!(granted(&l.ask([1; 16], 0, 1, 600 * MIB, T)), 0);
    assert_eq!(granted(&l.ask([1; 16], 0, 1, 400 * MIB, T)), 448 * MIB);
    l.admit([2; 16]);
    assert_eq!(l.used(0), 1448 * MIB, "a second program's context is over the limit: it gets no memory");
    assert_eq!(l.ask([2; 16], 0, 1, MIB, T).len(), 1);
    assert_eq!(granted(&l.returned(&[1; 16], 0, 48 * MIB)), 0);
}

#[test]
fn a_program_more_is_worth_what_the_others_do_not_use() {
    let mut l = ledger(256 * MIB, 100 * MIB);
    l.admit([1; 16]);
    assert!(l.recall().is_empty(), "nothing was granted");
    l.ask([1; 16], 0, 1, 10 * MIB, T);
    assert_eq!(l.contexts_left(), 0);
    assert_eq!(l.recall(), [LedgerMessage::Recall { worker: [1; 16] }]);
    l.returned(&[1; 16], 0, 54 * MIB);
    assert_eq!(l.contexts_left(), 1);
}

#[test]
fn each_worker_waits_for_one_answer_and_owes_one() {
    let mut l = ledger(1024 * MIB, 0);
    for n in 1..=3 {
        l.admit([n; 16]);
    }
    assert_eq!(granted(&l.ask([1; 16], 0, 1, 1024 * MIB, T)), 1024 * MIB);
    assert_eq!(l.ask([2; 16], 0, 1, 128 * MIB, T), [LedgerMessage::Recall { worker: [1; 16] }]);
    for serial in 2..1000 {
        assert_eq!(
            l.ask([2; 16], 0, serial, MIB, T),
            [LedgerMessage::Granted { worker: [2; 16], device: 0, serial, bytes: 0, left: 0 }]
        );
    }
    assert!(l.ask([2; 16], 0, 1, 128 * MIB, T).is_empty(), "said again after a change of servers");
    assert!(l.ask([3; 16], 0, 1, 128 * MIB, T).is_empty(), "the first one is asked already");
    assert_eq!(l.asking.len(), 2);
    let says = l.returned(&[1; 16], 0, 256 * MIB);
    assert_eq!(says.iter().map(|say| granted(std::slice::from_ref(say))).sum::<u64>(), 256 * MIB);
    assert!(l.asking.is_empty());
}

#[test]
fn a_lease_of_a_whole_card_is_granted_what_the_card_has() {
    let mut l = ledger(u64::MAX, 500 * MIB).of_cards(|uuid| (*uuid == [1; 16]).then_some(1024 * MIB));
    assert_eq!(l.devices()[0].memory_bytes, u64::MAX, "the size that workers receive");
    for n in 1..=4 {
        l.admit([n; 16]);
    }
    assert_eq!(granted(&l.ask([1; 16], 0, 1, u64::MAX, T)), 0);
    assert_eq!(granted(&l.ask([1; 16], 0, 2, 1025 * MIB, T)), 0);
    // The driver's readings tell what contexts really take of it.
    assert_eq!(granted(&l.ask([1; 16], 0, 3, 1000 * MIB, T)), 1024 * MIB);
    assert_eq!(l.ask([2; 16], 0, 1, MIB, T), [LedgerMessage::Recall { worker: [1; 16] }]);
    assert_eq!(granted(&l.returned(&[1; 16], 0, 24 * MIB)), MIB);
    l.reading(&[3; 16], 0, u64::MAX);
    l.reading(&[4; 16], 0, u64::MAX);
    assert_eq!((l.used(0), l.peak_of_all()), (u64::MAX, u64::MAX), "no sum wraps");
    assert_eq!(l.ask([1; 16], 0, 4, u64::MAX, T), [LedgerMessage::Recall { worker: [2; 16] }]);
    assert_eq!(granted(&l.returned(&[2; 16], 0, 0)), 0);
}

#[test]
fn a_silent_worker_delays_a_request_until_the_recall_timeout() {
    let mut l = ledger(100 * MIB, 0);
    l.admit([1; 16]);
    l.admit([2; 16]);
    assert_eq!(granted(&l.ask([1; 16], 0, 1, 90 * MIB, T)), 90 * MIB, "a whole chunk does not fit");
    assert_eq!(l.ask([2; 16], 0, 1, 20 * MIB, T), [LedgerMessage::Recall { worker: [1; 16] }]);
    assert!(l.tick(T + RECALL_TIMEOUT / 2).is_empty());
    assert_eq!(granted(&l.tick(T + RECALL_TIMEOUT)), 0);
    assert_eq!(granted(&l.ask([1; 16], 0, 2, 10 * MIB, T)), 10 * MIB, "worker 2 has nothing to give back");
}

#[test]
fn another_server_counts_on() {
    let mut l = ledger(1024 * MIB, 100 * MIB);
    l.admit([1; 16]);
    l.ask([1; 16], 0, 1, 300 * MIB, T);
    l.reading(&[1; 16], 0, 500 * MIB);
    l.reading(&[1; 16], 0, 0);
    let mut next = ledger(1024 * MIB, 100 * MIB);
    next.restore([1; 16], &l.held(&[1; 16]));
    assert_eq!((next.used(0), next.peak(&[1; 16])), (l.used(0), 500 * MIB));
    assert_eq!(next.used(0), 420 * MIB);
    assert!(l.held(&[2; 16]).is_empty(), "a worker that the ledger does not know");
}

#[test]
fn a_reading_above_the_grants_counts() {
    let mut l = ledger(4096 * MIB, 500 * MIB);
    l.admit([1; 16]);
    l.admit([2; 16]);
    l.ask([1; 16], 0, 1, 64 * MIB, T);
    l.reading(&[1; 16], 0, 900 * MIB);
    assert_eq!((l.used_by(&[1; 16], 0), l.used(0)), (900 * MIB, 1400 * MIB));
    assert!(l.offenders(|_| true).is_empty());
    // Granted memory fills what it has already.
    assert_eq!(granted(&l.ask([1; 16], 0, 2, 256 * MIB, T)), 256 * MIB);
    assert_eq!(l.used(0), 1400 * MIB);
    // The process holds more than it ever asked for, and the lease is over its limit.
    l.reading(&[2; 16], 0, 3800 * MIB);
    assert_eq!(l.used(0), 4700 * MIB);
    let all = |_: &WorkerId| true;
    assert!(l.offenders(all).is_empty(), "not by more than it may be");
    l.reading(&[2; 16], 0, 4600 * MIB);
    assert_eq!((l.offenders(all), l.unasked(&[2; 16], 0)), (vec![([2; 16], 4100 * MIB)], 4100 * MIB));
    assert_eq!(l.peak(&[2; 16]), 4600 * MIB);
    l.reading(&[2; 16], 0, 500 * MIB);
    assert!(l.offenders(all).is_empty());
}

#[test]
fn returned_memory_is_granted_once_a_reading_confirms_it() {
    let mut l = ledger(1024 * MIB, 100 * MIB);
    l.admit([1; 16]);
    l.admit([2; 16]);
    assert_eq!(granted(&l.ask([1; 16], 0, 1, 640 * MIB, T)), 640 * MIB);
    // All of it in use, and the driver has taken some for itself.
    l.reading(&[1; 16], 0, 790 * MIB);
    assert!(l.all_read(T).is_empty());
    assert_eq!(l.ask([2; 16], 0, 1, 512 * MIB, T), [LedgerMessage::Recall { worker: [1; 16] }]);
    assert!(l.returned(&[1; 16], 0, 640 * MIB).is_empty(), "the driver says that it is in use");
    // This reading was taken before it was given back.
    l.reading(&[1; 16], 0, 790 * MIB);
    assert!(l.all_read(T).is_empty());
    l.reading(&[1; 16], 0, 150 * MIB);
    assert_eq!(granted(&l.all_read(T)), 512 * MIB);
    assert_eq!((l.used_by(&[1; 16], 0), l.unasked(&[1; 16], 0)), (150 * MIB, 50 * MIB));
    assert_eq!((l.peak(&[1; 16]), l.peak_of_all()), (790 * MIB, 890 * MIB), "the other one's context, too");
    // Once all is settled, a request that does not fit is refused at once.
    l.returned(&[1; 16], 0, 0);
    assert_eq!(l.ask([1; 16], 0, 2, 400 * MIB, T), [LedgerMessage::Recall { worker: [2; 16] }]);
    assert_eq!(granted(&l.returned(&[2; 16], 0, 0)), 0);
}

#[test]
fn a_reading_older_than_a_return_makes_no_offender() {
    let mut l = ledger(48 * 1024 * MIB, 100 * MIB);
    for n in 1..=2 {
        l.admit([n; 16]);
        l.reading(&[n; 16], 0, 150 * MIB);
    }
    l.all_read(T);
    assert_eq!(granted(&l.ask([1; 16], 0, 1, 40 * 1024 * MIB, T)), 40 * 1024 * MIB);
    // The driver was read before the return and the grant to the other worker; the reading
    // comes after.
    assert_eq!(l.ask([2; 16], 0, 1, 40 * 1024 * MIB, T), [LedgerMessage::Recall { worker: [1; 16] }]);
    assert_eq!(granted(&l.returned(&[1; 16], 0, 40 * 1024 * MIB)), 40 * 1024 * MIB);
    l.reading(&[1; 16], 0, (40 * 1024 + 150) * MIB);
    l.reading(&[2; 16], 0, 150 * MIB);
    l.all_read(T);
    assert!(l.offenders(|_| true).is_empty());
    assert_eq!(l.peak_of_all(), (40 * 1024 + 250) * MIB, "at a time");
    // A worker that keeps returned memory is found by the next readings.
    l.reading(&[1; 16], 0, (40 * 1024 + 150) * MIB);
    l.all_read(T);
    assert_eq!(l.offenders(|_| true).len(), 1);
}

#[test]
fn waiting_requests_are_answered_in_turn_even_without_readings() {
    let mut l = ledger(1000 * MIB, 0);
    for n in 1..=4 {
        l.admit([n; 16]);
    }
    for n in 1..=2 {
        assert!(granted(&l.ask([n; 16], 0, 1, 450 * MIB, T)) >= 450 * MIB);
        l.reading(&[n; 16], 0, 450 * MIB);
    }
    l.all_read(T);
    let all = l.held.values().map(|h| h[0].granted).collect::<Vec<_>>();
    assert_eq!(l.ask([3; 16], 0, 1, 300 * MIB, T).len(), 2);
    assert!(l.ask([4; 16], 0, 1, 300 * MIB, T).is_empty(), "all are asked already");
    assert!(l.returned(&[1; 16], 0, all[0]).is_empty() && l.returned(&[2; 16], 0, all[1]).is_empty());
    l.reading(&[1; 16], 0, 0);
    assert_eq!(granted(&l.all_read(T)), 300 * MIB, "the second one waits on");
    l.reading(&[2; 16], 0, 0);
    assert_eq!(granted(&l.all_read(T)), 300 * MIB);

    let mut l = ledger(1000 * MIB, 0);
    l.admit([1; 16]);
    l.admit([2; 16]);
    assert_eq!(granted(&l.ask([1; 16], 0, 1, 960 * MIB, T)), 960 * MIB);
    l.reading(&[1; 16], 0, 960 * MIB);
    l.all_read(T);
    l.ask([2; 16], 0, 1, 800 * MIB, T);
    assert!(l.returned(&[1; 16], 0, 960 * MIB).is_empty());
    // The monitor has exited: the workers' reports count.
    assert_eq!(granted(&l.tick(T + SETTLE_TIMEOUT)), 800 * MIB);
}

#[test]
fn offenders_are_the_workers_furthest_beyond_their_grants() {
    let mut l = ledger(4096 * MIB, 0);
    for n in 1..=6 {
        l.admit([n; 16]);
    }
    assert_eq!(granted(&l.ask([1; 16], 0, 1, 4096 * MIB, T)), 4096 * MIB);
    // 1 GiB in all, in addition to 256 MiB of each.
    for n in 2..=6 {
        l.reading(&[n; 16], 0, 460 * MIB);
    }
    assert!(l.offenders(|_| true).is_empty());
    l.reading(&[6; 16], 0, 470 * MIB);
    assert_eq!(l.offenders(|_| true), [([6; 16], 470 * MIB)], "the one that has the most");
    assert!(l.offenders(|id| *id != [2; 16]).is_empty(), "one that ends leaves its memory");
    // The exit of one worker harms no other.
    l.reading(&[6; 16], 0, 460 * MIB);
    for n in 2..=6 {
        l.on_exit(&[n; 16]);
        assert!(l.offenders(|_| true).is_empty());
    }
    for n in 2..=6 {
        l.admit([n; 16]);
        l.reading(&[n; 16], 0, 1000 * MIB);
    }
    assert_eq!(l.offenders(|_| true).len(), 4, "as many as it takes, and who keeps to its grants stays");
    assert!(l.offenders(|_| true).iter().all(|(id, _)| *id != [1; 16]));
}

#[test]
fn a_reading_that_comes_much_too_late_stops_no_worker() {
    let mut l = ledger(2048 * MIB, 0);
    l.admit([1; 16]);
    l.admit([2; 16]);
    l.all_read(T);
    assert_eq!(granted(&l.ask([1; 16], 0, 1, 2048 * MIB, T)), 2048 * MIB);
    // The driver was read now; its answer comes after memory has moved from one to the other.
    l.returned(&[1; 16], 0, 2048 * MIB);
    l.tick(T + SETTLE_TIMEOUT);
    assert_eq!(granted(&l.ask([2; 16], 0, 1, 2048 * MIB, T)), 2048 * MIB);
    l.reading(&[1; 16], 0, 2048 * MIB);
    l.reading(&[2; 16], 0, 0);
    l.all_read(T + SETTLE_TIMEOUT);
    assert_eq!(l.offenders(|_| true), []);
    // The next reading counts again.
    l.reading(&[1; 16], 0, 2048 * MIB);
    l.all_read(T + SETTLE_TIMEOUT);
    l.reading(&[1; 16], 0, 2048 * MIB);
    assert_eq!(l.offenders(|_| true).len(), 1);
}

proptest! {
    /// A worker that keeps to its grants is never stopped, whenever the driver was read.
    #[test]
    fn honest_workers_are_left_alone(
        steps in proptest::collection::vec((0..4usize, 0..6u8, 0..900u64), 1..120),
        unasked in 0..250u64,
    ) {
        let mut l = ledger(2048 * MIB, 100 * MIB);
        let (mut used, mut now) = ([0; 4], T);
        let mut sample = None;
        for n in 0..4 {
            l.admit([n; 16]);
        }
        for (at, what, mib) in steps {
            let id = [at as u8; 16];
            let mut says = match what {
                0 | 1 => l.ask(id, 0, 0, mib * MIB, now),
                2 => {
                    let bytes = used[at].min(mib * MIB);
                    used[at] -= bytes;
                    l.returned(&id, 0, bytes)
                }
                // The driver's answer comes later than the question.
                3 => {
                    sample = sample.or(Some(used));
                    vec![]
                }
                4 => match sample.take() {
                    Some(seen) => {
                        for n in 0..4u8 {
                            l.reading(&[n; 16], 0, seen[usize::from(n)] + (100 + unasked) * MIB);
                        }
                        l.all_read(T)
                    }
                    None => vec![],
                },
                _ => {
                    now += Duration::from_millis(mib * 10);
                    l.tick(now)
                }
            };
            while let Some(say) = says.pop() {
                match say {
                    LedgerMessage::Granted { worker, bytes, .. } => used[usize::from(worker[0])] += bytes,
                    LedgerMessage::Recall { worker } => says.extend(l.returned(&worker, 0, 0)),
                }
            }
            prop_assert_eq!(l.offenders(|_| true), []);
        }
    }

    /// Grants stay within the limit, whatever workers ask and claim.
    #[test]
    fn grants_never_exceed_the_limit(steps in proptest::collection::vec((0..4u8, 0..5u8, 0..400u64), 1..80)) {
        let mut l = ledger(1024 * MIB, 0);
        let mut now = T;
        for n in 0..4 {
            l.admit([n; 16]);
        }
        for (worker, what, mib) in steps {
            let id = [worker; 16];
            match what {
                0 | 1 => drop(l.ask(id, 0, 0, mib * MIB, now)),
                2 => drop(l.returned(&id, 0, mib * MIB)),
                3 => {
                    l.on_exit(&id);
                    l.admit(id);
                }
                _ => {
                    now += Duration::from_millis(mib * 10);
                    l.tick(now);
                }
            }
            prop_assert!(l.used(0) <= 1024 * MIB);
        }
        now += RECALL_TIMEOUT;
        l.tick(now);
        prop_assert!(l.asking.is_empty(), "everybody is answered");
    }
}
