//! A worker whose client comes back after a break, and others that claim to be it.
#![expect(clippy::disallowed_methods, reason = "tests wait for other threads")]

mod fates;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpusession_link::lanes::{HostRange, On};
use gpusession_link::resume::{Attempt, Counts, ELSEWHERE, SessionKey, ack, frame as outside};
use gpusession_link::transport::Transport;
use gpusession_proto::frame::{FIRST_DOWN_LANE, FIRST_UP_LANE, op};
use gpusession_proto::preface::FLAG_RESUME;
use gpusession_proto::supervise::{FromWorker, ToWorker};
use gpusession_test_support::relay::{Cut, Fate, Place, Relay};
use gpusession_test_worker::{CALLER, Client, MIB, Machine, Options, Random, Raw, WINDOW, Worker, frame};

use fates::fate;

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

#[test]
fn a_worker_that_waits_for_its_program_ends_by_order_at_once() {
    let machine = Machine::new();
    let mut worker = start(&machine, 60);
    // Only the first connection reaches the worker.
    let cut = Some(Cut { unit: 0, place: Place::After, reset: true });
    let relay = Relay::start(worker.address, move |connection| Fate {
        up: cut.filter(|_| connection > 0),
        ..Fate::default()
    });
    let mut endpoint = worker.endpoint(false);
    endpoint.addresses = vec![relay.address.to_string()];
    let client = Client::open(&endpoint).expect("the worker admits the client");
    client.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
    relay.cut();
    while relay.connections() < 3 {
        std::thread::sleep(Duration::from_millis(5));
    }
    // As the server does when the client's daemon reports the end of the process.
    worker.tell(&ToWorker::Stop { reason: "its client process ended".into() });
    assert_eq!(worker.ended_within(Duration::from_secs(2)), "its client process ended");
    assert!(client.heard.0.lock().expect("a list").is_empty(), "the program did not know");
}

#[test]
fn the_supervisor_hears_how_long_a_program_had_no_connection() {
    let machine = Machine::new();
    let mut worker = start(&machine, 60);
    // The fifth attempt succeeds, more than a second later.
    let cut = Some(Cut { unit: 0, place: Place::After, reset: true });
    let relay = Relay::start(worker.address, move |connection| Fate {
        up: cut.filter(|_| (1..6).contains(&connection)),
        ..Fate::default()
    });
    let mut endpoint = worker.endpoint(false);
    endpoint.addresses = vec![relay.address.to_string()];
    let client = Client::open(&endpoint).expect("the worker admits the client");
    client.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
    relay.cut();
    client.put(WINDOW, &[1; 8]);
    assert_eq!(client.get(WINDOW, 8), [1; 8]);
    worker.wait_for(|m| matches!(m, FromWorker::Outage { ms: 1000.., over: false }));
    worker.wait_for(|m| matches!(m, FromWorker::Outage { ms: 1000.., over: true }));
    relay.cut();
    assert_eq!(client.get(WINDOW, 8), [1; 8]);
    worker.wait_for(|m| matches!(m, FromWorker::Outage { ms: ..1000, over: true }));
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

#[test]
fn lanes_that_come_back_without_end_take_no_memory() {
    const TIMES: u32 = 1000;
    let machine = Machine::new();
    let mut worker = start(&machine, 60);
    let guest = worker.guest();
    let key = SessionKey::new(&guest.secret);
    let lanes = [FIRST_UP_LANE, FIRST_DOWN_LANE];
    let mut open: Vec<Raw> = lanes
        .into_iter()
        .map(|number| {
            let mut first = worker.stranger(number);
            let proof = blake3::keyed_hash(&guest.secret, &number.to_le_bytes());
            first.write(&frame(op::LANE, u64::from(number), |w| w.bytes(proof.as_bytes())));
            worker.wait_for(|m| matches!(m, FromWorker::Admitted { lane, .. } if *lane == number));
            first
        })
        .collect();
    let held = |worker: &Worker| {
        let entries = |name| {
            let folder = std::fs::read_dir(format!("/proc/{}/{name}", worker.pid())).expect("it runs");
            folder.count()
        };
        (worker.memory(), entries("fd"), entries("task"))
    };
    let mine = Counts { received: 0, first: 1, next: 1 };
    let mut before = None;
    for attempt in 2..TIMES + 2 {
        for (number, current) in lanes.into_iter().zip(&mut open) {
            let next = worker.stranger_with(number, attempt, FLAG_RESUME);
            let transport = Transport::plain(next.stream.try_clone().expect("a socket")).expect("a stream");
            let attempt = Attempt { key: &key, worker: worker.id, lane: number, number: attempt };
            assert_eq!(attempt.come_back(&transport, &mine).expect("its lane"), mine);
            *current = next;
        }
        // The first ones start threads, whose memory others use again.
        if attempt == 20 {
            before = Some(held(&worker));
        }
    }
    let (((rss, size), fds, tasks), before) = (held(&worker), before.expect("it was noted"));
    println!("{before:?}, then {:?}", ((rss, size), fds, tasks));
    assert!(rss < before.0.0 + 64 * MIB, "{rss} bytes of memory, at first {}", before.0.0);
    assert!(size < before.0.1 + 1024 * MIB, "{size} bytes of addresses, at first {}", before.0.1);
    assert!(fds <= before.1 + 16 && tasks <= before.2 + 16, "{fds} descriptors, {tasks} threads");
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

    // The acknowledgement of the greeting may be lost with the connection.
    let mut worker = start(&machine, 1);
    worker.guest().close();
    assert!(worker.ended().contains("did not come back within 1 s"));

    // A worker does not wait for a program that says goodbye.
    let mut worker = start(&machine, 60);
    let mut guest = greeted(&mut worker);
    guest.write(&outside(op::BYE, |_| {}));
    assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0), "calls may follow");
    guest.close();
    assert_eq!(worker.ended(), "the client's process exited");
}

/// Copies to the device on the lanes; the source changes as soon as the program may change it.
fn put_bulk(client: &Client, target: u64, bytes: &[u8]) {
    let lanes = client.link.lanes().expect("lanes");
    let mut source = bytes.to_vec();
    let words = [target, bytes.len() as u64, 0, 0];
    let seq = client.link.post(op::COPY_TO_DEVICE, CALLER, |w| words.iter().for_each(|word| w.word(*word)));
    // SAFETY: `source` outlives the transfer, whose end `wait_sent` awaits.
    let upload = lanes.upload(unsafe { HostRange::new(source.as_ptr() as usize, source.len()) }, true);
    let sent = lanes.send(seq.expect("a link"), upload);
    assert!(client.link.wait_sent(&sent), "the link is lost: {:?}", client.heard.0.lock().expect("a list"));
    source.fill(0xee);
}

/// Begins to copy from the device on the lanes, behind the transfers `older`.
fn begin_get(client: &Client, source: u64, target: &mut [u8], older: Vec<u64>) -> u64 {
    client.link.lanes().expect("lanes");
    let (address, len) = (target.as_mut_ptr() as usize, target.len());
    let seq = client.link.post(op::COPY_FROM_DEVICE, CALLER, |w| {
        // SAFETY: the caller waits for the transfer before it drops the target.
        let range = unsafe { HostRange::new(address, len) };
        client.link.down.expect(
            w.seq(),
            range,
            On { ctx: 0, stream: 0, blocking: true },
            !older.is_empty(),
            older,
        );
        [source, len as u64, 0, 0].into_iter().for_each(|word| w.word(word));
    });
    seq.expect("a link")
}

/// Moves bulk data both ways with random lengths, and compares every byte.
fn moves_bulk_data(client: &Client, rounds: impl Iterator<Item = u64>, random: &mut Random) {
    const ROOM: u64 = 16 * MIB;
    client.call(op::ALLOC, &[WINDOW, ROOM, 0]);
    let mut device = vec![0; ROOM as usize];
    put_bulk(client, WINDOW, &device);
    for round in rounds {
        for _ in 0..3 {
            let at = 8 * random.below(ROOM / 16);
            let len = (random.below(5 * MIB) + 65_537) as usize;
            let bytes: Vec<u8> =
                (0..len.div_ceil(8)).flat_map(|_| random.draw().to_le_bytes()).take(len).collect();
            put_bulk(client, WINDOW + at, &bytes);
            device[at as usize..at as usize + len].copy_from_slice(&bytes);
        }
        let (from, len) = (random.below(MIB), (random.below(12 * MIB) + 65_537) as usize);
        let mut host = vec![0; len];
        // Two copies into some of the same bytes: those of the second one stay.
        let first = begin_get(client, WINDOW + from, &mut host, Vec::new());
        let (skip, part) = (len / 3, (len / 2).max(65_600).min(len - len / 3));
        let second = begin_get(client, WINDOW, &mut host[skip..skip + part], vec![first]);
        let status = client.link.down.wait(first);
        assert_eq!(status, 0, "{:?}", client.heard.0.lock().expect("a list"));
        client.link.wait_detached(|t| t.seq == second).expect("the link is back");
        assert!(!client.link.down.any(), "the link is lost");
        let mut expected = device[from as usize..from as usize + len].to_vec();
        expected[skip..skip + part].copy_from_slice(&device[..part]);
        assert!(host == expected, "round {round}: {len} bytes from {from}, {part} at {skip}");
    }
}

#[test]
fn bulk_data_arrives_once_wherever_connections_break() {
    const SEEDS: u64 = 4;
    let machine = Machine::new();
    let (mut cuts, mut connections) = ([0; Place::ALL.len()], 0);
    for seed in 0..SEEDS {
        // The seed of a failure is the last one that this prints.
        println!("seed {seed}");
        let mut worker = start(&machine, 60);
        let relay = Relay::start(worker.address, move |connection| fate(seed, connection));
        let mut endpoint = worker.endpoint(false);
        endpoint.addresses = vec![relay.address.to_string()];
        let client = Client::open(&endpoint).expect("the worker admits the client");
        moves_bulk_data(&client, 0..12, &mut Random::new(seed + 5));
        connections += relay.connections();
        cuts.iter_mut().zip(relay.cuts()).for_each(|(all, more)| *all += more);
        assert!(client.heard.0.lock().expect("a list").is_empty());
        client.link.close();
        assert_eq!(worker.ended_within(Duration::from_secs(5)), "the client's process exited");
    }
    println!("{connections} connections, cuts by place: {cuts:?}");
    assert!(connections > 30 * SEEDS as u32 && cuts.iter().all(|count| *count > 10), "{cuts:?}");
}

#[test]
fn encrypted_bulk_data_outlives_its_connections() {
    const MOST_CUTS: u32 = 200;
    let machine = Machine::new();
    let worker = start(&machine, 60);
    let (client, relay) = through_a_relay(&worker, true);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Bounded, so that a failure of the other thread is reported.
            for _ in 0..MOST_CUTS {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                relay.cut();
                std::thread::park_timeout(Duration::from_millis(300));
            }
        });
        // As long as it takes: a fast machine moves much between two cuts.
        let rounds = (0..).take_while(|round| *round < 12 || relay.connections() <= 40);
        moves_bulk_data(&client, rounds, &mut Random::new(1));
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn an_idle_program_with_bulk_lanes_comes_back() {
    let machine = Machine::new();
    let worker = start(&machine, 60);
    let (client, relay) = through_a_relay(&worker, false);
    moves_bulk_data(&client, 0..1, &mut Random::new(2));
    for _ in 0..3 {
        let before = relay.connections();
        relay.cut();
        // All lanes connect again without a call of the program.
        let until = Instant::now() + gpusession_test_worker::TEST_TIMEOUT;
        while relay.connections() < before + 17 {
            assert!(Instant::now() < until, "{} of 17 connections", relay.connections() - before);
            std::thread::yield_now();
        }
    }
    let bytes = client.get(WINDOW, 8);
    put_bulk(&client, WINDOW, &vec![9; 1 << 20]);
    assert_ne!(client.get(WINDOW, 8), bytes);
}

#[test]
fn a_worker_without_grace_ends_with_any_connection() {
    let machine = Machine::new();
    let mut worker = start(&machine, 0);
    let (client, relay) = through_a_relay(&worker, false);
    put_bulk_once(&client);
    relay.cut();
    worker.ended();
    assert!(client.try_call(op::MEM_INFO, &[]).is_err(), "for good");
}

fn put_bulk_once(client: &Client) {
    client.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
    put_bulk(client, WINDOW, &vec![1; 1 << 20]);
    assert_eq!(client.get(WINDOW, 8), [1; 8]);
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
