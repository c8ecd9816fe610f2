//! A link to a worker over connections that break at chosen bytes: every frame is executed once,
//! every answer and event is seen once, in order.
#![expect(clippy::disallowed_methods, reason = "tests wait for other threads")]

use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier, Mutex, OnceLock};
use std::time::{Duration, Instant};

use gpusession_link::link::{Caller, LinkLost};
use gpusession_link::transport::{Transport, Wait};
use gpusession_link::worker_end::{Next, WorkerEnd};
use gpusession_link::{Events, Link};
use gpusession_proto::frame::{HEADER, Header, WAIT, Writer, op};
use gpusession_proto::grant::{Endpoint, Outage};
use gpusession_proto::preface::{Code, FLAG_RESUME, Key, LEN, Preface, refusal};
use gpusession_test_support::relay::{Cut, Fate, Place, Relay};

const WORKER: [u8; 16] = [3; 16];
const SECRET: [u8; 32] = [5; 32];
const CALLER: Caller = Caller { thread: 1, ctx: 1 };
/// Longer than any correct step takes.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Small, reproducible and good enough: xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) % n
    }
}

/// A worker that executes frames by hashing them, and answers with the hash so far.
struct Worker {
    address: SocketAddr,
    ended: std::sync::mpsc::Receiver<String>,
    /// Frames that were executed.
    executed: Arc<AtomicUsize>,
}

fn frame_to(op: u16, seq: u64, received: u64, body: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
    let mut header = Header::empty();
    (header.op, header.seq, header.ack) = (op.into(), seq.into(), received.into());
    let mut bytes = Vec::new();
    let mut w = Writer::new(&mut bytes, &header);
    body(&mut w);
    w.finish();
    bytes
}

impl Worker {
    fn start(grace: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (tell, ended) = channel();
        let executed = Arc::<AtomicUsize>::default();
        let counter = executed.clone();
        std::thread::spawn(move || {
            let end: Arc<OnceLock<WorkerEnd>> = Arc::default();
            for socket in listener.incoming() {
                let (end, tell, counter) = (end.clone(), tell.clone(), counter.clone());
                std::thread::spawn(move || serve(socket.unwrap(), &end, grace, &tell, &counter));
            }
        });
        Self { address, ended, executed }
    }
}

fn serve(
    mut socket: TcpStream,
    end: &OnceLock<WorkerEnd>,
    grace: Duration,
    tell: &Sender<String>,
    executed: &AtomicUsize,
) {
    let mut preface = [0; LEN];
    if socket.read_exact(&mut preface).is_err() {
        return;
    }
    let preface = Preface::parse(&preface).unwrap();
    let transport = Transport::plain(socket).unwrap();
    if preface.resumes() {
        let _ = end.get().expect("a session").resume(preface.attempt.get(), transport);
        return;
    }
    let mut head = [0; HEADER];
    let wait = Wait::AtMost(Duration::ZERO, TEST_TIMEOUT);
    if transport.recv_exact(&mut head, wait).is_err() {
        return;
    }
    let header = Header::parse(&head).unwrap();
    transport.recv_exact(&mut vec![0; header.body_len()], wait).unwrap();
    let (made, mut line) = WorkerEnd::new(WORKER, &SECRET, grace, transport, preface.attempt.get());
    let end = end.get_or_init(|| made);
    end.send(frame_to(op::REPLY, 1, 1, |w| {
        w.bytes(&SECRET);
        w.word(grace.as_secs());
    }));
    let mut hash = blake3::Hasher::new();
    let (mut buf, mut scratch) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        let mut frames: Vec<(Header, Vec<u8>)> = Vec::new();
        if let Some(mut taking) = end.taking(&line) {
            while let Some(head) = buf.first_chunk::<HEADER>() {
                let header = Header::parse(head).unwrap();
                let len = HEADER + header.body_len();
                if buf.len() < len {
                    break;
                }
                let rest = buf.split_off(len);
                if taking.count(&header).unwrap() {
                    frames.push((header, buf.split_off(HEADER)));
                }
                buf = rest;
            }
        }
        for (header, body) in frames {
            executed.fetch_add(1, Ordering::SeqCst);
            hash.update(&header.seq.get().to_le_bytes()).update(&body);
            let seq = header.seq.get();
            let mut out = Vec::new();
            if seq.is_multiple_of(3) {
                let text = [seq as u8; 3000];
                out.extend(frame_to(op::OUTPUT, 0, end.received(), |w| {
                    w.bytes(&seq.to_le_bytes());
                    w.bytes(&text[..(seq as usize * 7) % 3000]);
                }));
            }
            if header.flags.get() & WAIT != 0 {
                let hash = hash.finalize();
                out.extend(frame_to(op::REPLY, seq, end.received(), |w| w.bytes(hash.as_bytes())));
            }
            if !out.is_empty() {
                end.send(out);
            }
        }
        let read = line.transport.recv(&mut scratch, Wait::Spin(Duration::ZERO));
        match read {
            Ok(n) if n > 0 => buf.extend_from_slice(&scratch[..n]),
            _ => match end.next(&line, Instant::now(), TEST_TIMEOUT) {
                Next::Line(next) => {
                    line = next;
                    buf.clear();
                }
                Next::Later => panic!("later than the grace"),
                Next::Over(reason) => {
                    let _ = tell.send(reason.unwrap_or_default());
                    return;
                }
            },
        }
    }
}

/// Notes what the worker says without a request.
#[derive(Clone, Default)]
struct Heard {
    outputs: Arc<Mutex<Vec<u64>>>,
    lost: Arc<Mutex<Vec<String>>>,
    outages: Arc<AtomicUsize>,
    reports: Arc<Mutex<Vec<Outage>>>,
    /// Answer to every report after the first.
    ended: Arc<Mutex<Option<String>>>,
}

impl Events for Heard {
    fn output(&self, out: &[u8], text: &[u8]) {
        let seq = u64::from_le_bytes(out.try_into().unwrap());
        assert!(text.iter().all(|byte| *byte == seq as u8));
        self.outputs.lock().unwrap().push(seq);
    }
    fn call_host(&self, _: &Arc<Link>, _: u64, _: i32) {}
    fn host_changed(&self, _: u64, _: u64, _: &[u8]) {}
    fn lost(&self, reason: &str) {
        self.lost.lock().unwrap().push(reason.into());
    }
    fn interrupted(&self, _: &str) {
        self.outages.fetch_add(1, Ordering::SeqCst);
    }
    fn outage(&self, outage: Outage) -> Option<String> {
        let mut reports = self.reports.lock().unwrap();
        reports.push(outage);
        self.ended.lock().unwrap().clone().filter(|_| reports.len() > 1)
    }
}

fn open(address: SocketAddr) -> (Arc<Link>, Heard) {
    let endpoint = Endpoint {
        server: "gpu1".into(),
        addresses: vec![address.to_string()],
        worker: WORKER,
        key: Key::new(&[0; 32], &WORKER, 0),
        fingerprint: None,
        ticket: vec![0; 100],
        lease: "abcdefghijkl".into(),
        devices: 1,
    };
    let heard = Heard::default();
    let (link, _) = Link::open(&endpoint, Box::new(heard.clone()), |_| {}).expect("a greeting");
    (link, heard)
}

/// Posts and calls with random bodies; checks each answer, and the order of what comes unasked.
fn works(link: &Link, heard: &Heard, frames: u64, random: &mut Random) {
    let mut hash = blake3::Hasher::new();
    let first = link.position() + 1;
    assert_eq!(first, 2, "nothing but the greeting");
    for seq in first..first + frames {
        let len = match random.below(20) {
            0 => 20_000 + random.below(60_000),
            1 => 2000 + random.below(200),
            _ => random.below(60),
        };
        let body: Vec<u8> = (0..len.next_multiple_of(8)).map(|i| (i * seq) as u8).collect();
        hash.update(&seq.to_le_bytes()).update(&body);
        if random.below(4) == 0 || seq == first + frames - 1 {
            let reply = link.call(op::STREAM_SYNC, CALLER, |w| w.words(&body)).expect("an answer");
            assert_eq!(reply.reader().bytes().unwrap(), hash.finalize().as_bytes(), "after frame {seq}");
        } else {
            assert_eq!(link.post(op::LAUNCH, CALLER, |w| w.words(&body)), Ok(seq));
        }
    }
    let expected: Vec<u64> = (first..first + frames).filter(|seq| seq.is_multiple_of(3)).collect();
    assert_eq!(*heard.outputs.lock().unwrap(), expected);
    assert!(heard.lost.lock().unwrap().is_empty());
}

/// Fate of a connection under a seed; the first one greets undisturbed.
fn fate(seed: u64, connection: u32) -> Fate {
    if connection > 12 {
        return Fate::default();
    }
    let mut random = Random(seed << 8 | u64::from(connection) | 1 << 40);
    for _ in 0..8 {
        random.below(2);
    }
    let place = Place::ALL[random.below(Place::ALL.len() as u64) as usize];
    // The preface, the handshake and the first frames are as likely as all others.
    let unit = match random.below(2) {
        0 => random.below(4) as u32,
        _ => random.below(60) as u32,
    };
    let cut = |least: u32| Some(Cut { unit: unit.max(least), place, reset: random.0 >> 40 & 1 == 0 });
    match (random.0 >> 41 & 1, connection) {
        // Preface, greeting, acknowledgement of the greeting's reply.
        (0, 0) => Fate { up: cut(3), ..Fate::default() },
        (0, _) => Fate { up: cut(0), ..Fate::default() },
        (_, 0) => Fate { down: cut(1), ..Fate::default() },
        (_, _) => Fate { down: cut(0), ..Fate::default() },
    }
}

#[test]
fn nothing_is_lost_or_done_twice_wherever_connections_break() {
    const SEEDS: u64 = 1200;
    // They mostly wait for the pauses between two attempts.
    const THREADS: u64 = 48;
    let (cuts, outages) = (Mutex::new([0; Place::ALL.len()]), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for first in 0..THREADS {
            let (cuts, outages) = (&cuts, &outages);
            scope.spawn(move || {
                for seed in (first..SEEDS).step_by(THREADS as usize) {
                    // The seed of a failure is the last one that this prints.
                    println!("seed {seed}");
                    let worker = Worker::start(TEST_TIMEOUT);
                    let relay = Relay::start(worker.address, move |connection| fate(seed, connection));
                    let (link, heard) = open(relay.address);
                    works(&link, &heard, 400, &mut Random(seed + 77));
                    assert_eq!(worker.executed.load(Ordering::SeqCst), 400);
                    outages.fetch_add(heard.outages.load(Ordering::SeqCst), Ordering::SeqCst);
                    let mut all = cuts.lock().unwrap();
                    all.iter_mut().zip(relay.cuts()).for_each(|(all, more)| *all += more);
                    drop(all);
                    link.close();
                    let ended = worker.ended.recv_timeout(TEST_TIMEOUT);
                    // A program does not wait for another connection to say goodbye.
                    let gone = relay.cuts().iter().sum::<usize>() == relay.connections() as usize;
                    assert!(ended.as_deref() == Ok("") || gone, "it said no goodbye: {ended:?}");
                }
            });
        }
    });
    let cuts = cuts.into_inner().unwrap();
    println!("cuts by place: {cuts:?}, outages: {outages:?}");
    assert!(cuts.iter().all(|count| *count > 100), "{cuts:?}");
    assert!(cuts.iter().sum::<usize>() >= 10_000, "{cuts:?}");
    assert!(outages.into_inner() > SEEDS as usize);
}

#[test]
fn a_link_that_cannot_come_back_is_lost_for_all_threads_at_once() {
    let worker = Worker::start(Duration::from_secs(60));
    let refuse = TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = refuse.local_addr().unwrap();
    std::thread::spawn(move || {
        for socket in refuse.incoming() {
            let mut socket = socket.unwrap();
            let _ = socket.read_exact(&mut [0; LEN]);
            let _ = socket.write_all(&refusal(Code::Gone, "the worker has ended: its lease ended"));
        }
    });
    // The first connection to the worker, the others to a server that refuses them.
    let (front, address) = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    };
    let (stop, stopped) = channel::<()>();
    let to = worker.address;
    std::thread::spawn(move || {
        let join = |from: TcpStream, to: SocketAddr| {
            let to = TcpStream::connect(to).unwrap();
            let ends = [(from.try_clone().unwrap(), to.try_clone().unwrap()), (to, from)];
            for (mut from, mut to) in ends {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
        };
        let first = front.accept().unwrap().0;
        let cut = first.try_clone().unwrap();
        join(first, to);
        stopped.recv().unwrap();
        cut.shutdown(std::net::Shutdown::Both).unwrap();
        for socket in front.incoming() {
            join(socket.unwrap(), gone);
        }
    });
    let (link, heard) = open(address);
    link.call(op::STREAM_SYNC, CALLER, |_| {}).expect("an answer");
    let begun = Instant::now();
    stop.send(()).unwrap();
    let calls: Vec<_> = (0..4)
        .map(|_| {
            let link = link.clone();
            std::thread::spawn(move || {
                loop {
                    if let Err(LinkLost(reason)) = link.call(op::STREAM_SYNC, CALLER, |_| {}) {
                        return reason;
                    }
                }
            })
        })
        .collect();
    for call in calls {
        let reason = call.join().unwrap();
        assert!(reason.ends_with("its lease ended"), "{reason}");
    }
    // A clear refusal counts the second time.
    assert!(begun.elapsed() > Duration::from_millis(500) && begun.elapsed() < Duration::from_secs(5));
    assert_eq!(heard.lost.lock().unwrap().len(), 1);
}

#[test]
fn posts_go_on_during_an_outage_and_waits_end_with_the_grace() {
    let worker = Worker::start(Duration::from_secs(1));
    // Each further connection breaks within its handshake.
    let cut = |unit, place| Some(Cut { unit, place, reset: true });
    let relay = Relay::start(worker.address, move |connection| match connection {
        // The worker gets no whole call, which it would answer before the reset arrives.
        0 => Fate { up: cut(4, Place::BeforeLast), ..Fate::default() },
        _ => Fate { up: cut(0, Place::After), ..Fate::default() },
    });
    let (link, heard) = open(relay.address);
    link.post(op::LAUNCH, CALLER, |_| {}).unwrap();
    assert!(!link.is_away());
    let asking = link.clone();
    let asks = std::thread::spawn(move || asking.call(op::LAUNCH, CALLER, |_| {}).err());
    let begun = Instant::now();
    while !link.is_away() {
        assert!(begun.elapsed() < TEST_TIMEOUT, "queries wait for the end of the outage");
        std::thread::sleep(Duration::from_millis(5));
    }
    asks.join().unwrap().expect("the worker does not come back");
    let lost = heard.lost.lock().unwrap().clone();
    // The grace and five seconds, and on a busy machine a little more.
    let late = (6..9).any(|s| lost[0].contains(&format!("not back within {s} s")));
    assert!(lost.len() == 1 && late, "{lost:?}");
    assert!(relay.connections() > 4);
    let ended = worker.ended.recv_timeout(TEST_TIMEOUT).unwrap();
    assert!(ended.contains("did not come back within 1 s"), "{ended}");
}

#[test]
fn an_outage_is_reported_and_ends_the_link_once_the_worker_is_known_to_have_ended() {
    let worker = Worker::start(Duration::from_secs(60));
    let cut = |unit| Some(Cut { unit, place: Place::After, reset: true });
    let relay = Relay::start(worker.address, move |connection| match connection {
        // The second one lives until the test cuts it.
        0 => Fate { up: cut(4), ..Fate::default() },
        1 => Fate::default(),
        _ => Fate { up: cut(0), ..Fate::default() },
    });
    let (link, heard) = open(relay.address);
    link.post(op::LAUNCH, CALLER, |_| {}).unwrap();
    link.call(op::LAUNCH, CALLER, |_| {}).expect("the worker comes back");
    let reports = || heard.reports.lock().unwrap().clone();
    let begun = Instant::now();
    while reports().is_empty() && begun.elapsed() < TEST_TIMEOUT {
        std::thread::sleep(Duration::from_millis(5));
    }
    let is = |o: &Outage, number, over| {
        (o.lease.as_str(), o.worker, o.number, o.over) == ("abcdefghijkl", WORKER, number, over)
    };
    let first = reports();
    assert!(first.len() == 1 && is(&first[0], 1, true) && first[0].ms < 1500, "{first:?}");

    *heard.ended.lock().unwrap() = Some("lease abcdefghijkl has ended: released".into());
    relay.cut();
    let begun = Instant::now();
    let lost = link.call(op::LAUNCH, CALLER, |_| {}).expect_err("the worker is gone");
    assert_eq!(lost.0, "connection to gpu1 lost: lease abcdefghijkl has ended: released");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert_eq!(*heard.lost.lock().unwrap(), [lost.0]);
    let second = reports().split_off(1);
    assert!(second.len() == 1 && is(&second[0], 2, false) && second[0].ms >= 1500, "{second:?}");
}

#[test]
fn strangers_change_nothing() {
    let worker = Worker::start(TEST_TIMEOUT);
    let (link, heard) = open(worker.address);
    let mut strangers = Vec::new();
    for attempt in 2..40 {
        let key = Key::new(&[0; 32], &WORKER, 0);
        let mut socket = TcpStream::connect(worker.address).unwrap();
        let preface = Preface::new(WORKER, &key, 0, attempt, FLAG_RESUME);
        socket.write_all(&preface.to_bytes()).unwrap();
        let mut challenge = [0; HEADER + 40];
        socket.read_exact(&mut challenge).unwrap();
        // Any nonce, counts that would fit, any proof; and some that stay silent.
        if attempt.is_multiple_of(2) {
            socket
                .write_all(&frame_to(op::RESUME, 0, 0, |w| {
                    w.bytes(&[1; 32]);
                    [1, 1, 2].into_iter().for_each(|count| w.word(count));
                    w.bytes(&[2; 32]);
                }))
                .unwrap();
            assert_eq!(socket.read(&mut [0]).unwrap_or(0), 0, "the worker hangs up");
        }
        strangers.push(socket);
    }
    works(&link, &heard, 100, &mut Random(1));
    assert_eq!(heard.outages.load(Ordering::SeqCst), 0);
    let answer = link.call(op::STREAM_SYNC, CALLER, |_| {}).expect("an answer");
    assert!(!answer.reader().is_empty());
}

#[test]
fn a_post_leaves_although_another_thread_sends_at_that_moment() {
    const ROUNDS: usize = 2000;
    const POSTERS: usize = 3;
    let worker = Worker::start(TEST_TIMEOUT);
    let (link, _) = open(worker.address);
    // The posts of a round leave by themselves: no later frame takes them along.
    let sent = |round| {
        let begun = Instant::now();
        while worker.executed.load(Ordering::SeqCst) < (POSTERS + 1) * round {
            assert!(begun.elapsed() < TEST_TIMEOUT, "round {round}: a frame stays behind");
            std::thread::yield_now();
        }
    };
    let round = Barrier::new(POSTERS + 1);
    std::thread::scope(|scope| {
        for _ in 0..POSTERS {
            scope.spawn(|| {
                for number in 1..=ROUNDS {
                    round.wait();
                    link.post(op::LAUNCH, CALLER, |_| {}).unwrap();
                    sent(number);
                }
            });
        }
        for number in 1..=ROUNDS {
            round.wait();
            let call = link.begin_call(op::STREAM_SYNC, CALLER, |_| {}).unwrap();
            sent(number);
            link.finish_call(call).unwrap();
        }
    });
}
