//! A worker whose client comes back after a break, and others that claim to be it.

#[allow(dead_code, reason = "shared with other tests")]
mod harness;

use std::time::{Duration, Instant};

use gpusession_link::lanes::HostRange;
use gpusession_link::resume::{Attempt, Counts, ELSEWHERE, SessionKey, ack, frame as outside};
use gpusession_link::transport::Transport;
use gpusession_proto::frame::op;
use gpusession_proto::preface::FLAG_RESUME;
use gpusession_proto::supervise::FromWorker;
use gpusession_test_support::relay::{Fate, Relay};
use harness::{CALLER, Client, MIB, Machine, Options, Raw, WINDOW, Worker};

fn start(machine: &std::sync::Arc<Machine>, resume_grace_s: u32) -> Worker {
    Worker::start_with(machine, &Options { resume_grace_s, ..Options::default() })
}

/// Opens a client whose connections a test can cut.
fn through_a_relay(worker: &Worker, encrypted: bool) -> (Client, Relay) {
    let relay = Relay::start(worker.address, |_| Fate::default());
    let mut endpoint = worker.endpoint(encrypted);
    endpoint.addresses = vec![relay.address.to_string()];
    (Client::open(&endpoint).expect("the worker admits the client"), relay)
}

#[test]
fn memory_and_work_of_a_program_outlive_its_connection() {
    let machine = Machine::new();
    for encrypted in [false, true] {
        let mut worker = start(&machine, 30);
        let (client, relay) = through_a_relay(&worker, encrypted);
        client.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
        for round in 0..20u64 {
            client.put(WINDOW + 8 * round, &round.to_le_bytes());
            relay.cut();
            assert_eq!(client.get(WINDOW + 8 * round, 8), round.to_le_bytes());
        }
        let all: Vec<u8> = (0..20u64).flat_map(u64::to_le_bytes).collect();
        assert_eq!(client.get(WINDOW, all.len()), all);
        assert!(relay.connections() > 10);
        assert!(client.heard.0.lock().expect("a list").is_empty());
        client.link.close();
        assert_eq!(worker.ended_within(Duration::from_secs(5)), "the client's process exited");
    }
}

/// Tries to take a guest's place; returns the worker's position, or the reason of the refusal.
fn come_back(worker: &Worker, secret: &[u8; 32], number: u32, mine: &Counts) -> Result<Counts, String> {
    let mut stranger = worker.stranger_with(0, number, FLAG_RESUME);
    let key = SessionKey::new(secret);
    let transport = Transport::plain(stranger.stream.try_clone().expect("a socket")).expect("a stream");
    let attempt = Attempt { key: &key, worker: worker.id, lane: 0, number };
    let said = attempt.come_back(&transport, mine).map_err(|e| e.to_string());
    if said.is_ok() {
        stranger.seq = mine.next - 1;
        assert_eq!(stranger.ask_words(op::MEM_INFO, &[]), Ok(0), "it is the program now");
    }
    said
}

#[test]
fn only_the_program_itself_takes_its_place() {
    let machine = Machine::new();
    let mut worker = start(&machine, 30);
    let early = come_back(&worker, &[1; 32], 2, &Counts { received: 1, first: 2, next: 2 });
    assert!(early.unwrap_err().contains("no such connection"));
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0));
    // It has sent and received two frames.
    let mine = Counts { received: 2, first: 1, next: 3 };
    let secret = guest.secret;
    let cases = [
        ([9; 32], 2, mine, ""),
        (secret, 1, mine, "a later connection has taken its place"),
        (secret, 2, Counts { received: 3, ..mine }, ELSEWHERE),
        (secret, 2, Counts { first: 4, next: 4, ..mine }, ELSEWHERE),
        (secret, 2, Counts { next: 2, ..mine }, ELSEWHERE),
    ];
    for (secret, number, counts, reason) in cases {
        let refused = come_back(&worker, &secret, number, &counts).expect_err("a refusal");
        assert!(refused.contains(reason), "{refused}");
        worker.refusal();
        assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0), "the guest is not disturbed");
    }
    let mine = Counts { received: 7, first: 1, next: 8 };
    assert_eq!(come_back(&worker, &secret, 5, &mine), Ok(Counts { received: 7, first: 8, next: 8 }));
    assert!(guest.frame().is_none(), "the earlier connection is closed");
    // A recorded attempt.
    let again = come_back(&worker, &secret, 5, &Counts { received: 8, first: 8, next: 9 });
    assert!(again.unwrap_err().contains("a later connection"));
}

/// A guest that has acknowledged its greeting.
fn greeted(worker: &mut Worker) -> Raw {
    let mut guest = worker.guest();
    guest.write(&ack(1));
    assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0));
    guest
}

#[test]
fn a_worker_waits_no_longer_than_its_grace() {
    let machine = Machine::new();
    let mut worker = start(&machine, 1);
    let guest = greeted(&mut worker);
    let begun = Instant::now();
    guest.close();
    assert!(worker.ended().contains("did not come back within 1 s"));
    assert!(begun.elapsed() >= Duration::from_secs(1));

    // A worker does not wait for a program that says goodbye, or has not heard the greeting.
    let mut worker = start(&machine, 60);
    let mut guest = greeted(&mut worker);
    guest.write(&outside(op::BYE, |_| {}));
    assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0), "calls may follow");
    guest.close();
    assert_eq!(worker.ended(), "the client's process exited");
    let mut worker = start(&machine, 60);
    worker.guest().close();
    worker.ended();
}

#[test]
fn a_program_with_bulk_lanes_ends_at_once() {
    let machine = Machine::new();
    let mut worker = start(&machine, 60);
    let (client, relay) = through_a_relay(&worker, false);
    client.call(op::ALLOC, &[WINDOW, 8 * MIB, 0]);
    let lanes = client.link.lanes().expect("lanes");
    let bytes = vec![7u8; 8 << 20];
    let begun = Instant::now();
    relay.cut();
    let call = client.link.begin_call(op::COPY_TO_DEVICE, CALLER, |w| {
        [WINDOW, bytes.len() as u64, 0, 0].into_iter().for_each(|word| w.word(word));
    });
    if let Ok(call) = call {
        // SAFETY: `bytes` outlives the transfer, whose end `wait` awaits.
        let sent = lanes.send(call.seq, unsafe { HostRange::new(bytes.as_ptr() as usize, bytes.len()) });
        assert!(!sent.wait());
        client.link.finish_call(call).expect_err("the link is lost");
    }
    worker.ended();
    assert!(client.try_call(op::MEM_INFO, &[]).is_err(), "for good");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn a_client_that_acknowledges_what_it_cannot_have_ends_its_worker() {
    let machine = Machine::new();
    let mut worker = start(&machine, 60);
    let mut guest = greeted(&mut worker);
    guest.write(&ack(1000));
    assert!(guest.ask_words(op::MEM_INFO, &[]).unwrap_err().contains("acknowledges what was not sent"));
    worker.wait_for(|m| matches!(m, FromWorker::Ended { .. }));
    // A gap in the log.
    let mut worker = start(&machine, 60);
    let mut guest = greeted(&mut worker);
    guest.seq += 1;
    assert!(guest.ask_words(op::MEM_INFO, &[]).unwrap_err().contains("out of order"));
}
