//! Worker processes on the simulated driver: services for good clients, refusals for bad ones.
#![expect(clippy::disallowed_methods, reason = "tests wait for other processes")]

/// Tests of one subject each.
mod worker {
    mod hostile;
    mod leaks;
    mod long_requests;
    mod order;
}

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpusession_link::lanes::{HostRange, On, chunk_header};
use gpusession_link::tls;
use gpusession_proto::frame::{FIRST_UP_LANE, INLINE_MAX, Reader, op};
use gpusession_proto::handle;
use gpusession_proto::preface::{self, FLAG_TLS};
use gpusession_proto::supervise::{ClientProcess, FromWorker, ToWorker};
use gpusession_proto::ticket::Ticket;
use gpusession_test_worker::{
    CALLER, Client, KEY, LATER, MIB, Machine, Options, REFUSED, Random, Raw, TEST_TIMEOUT, WINDOW,
    WINDOW_SIZE, Worker, event, exists, frame, stream,
};
use nix::sys::resource::{Resource, getrlimit};
use zerocopy::IntoBytes;

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const INVALID_DEVICE: i32 = 101;
const NOT_SUPPORTED: i32 = 801;
const INVALID_IMAGE: i32 = 200;
const INVALID_CONTEXT: i32 = 201;
const INVALID_HANDLE: i32 = 400;

/// Returns what a worker says about the memory of its GPU: bytes that it read and found.
fn sampled(driver: &[(&'static str, &str)], verify_memory: bool) -> Option<(u64, u64)> {
    let driver = driver.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
    let worker =
        Worker::start_with(&Machine::new(), &Options { driver, verify_memory, ..Options::default() });
    worker.told().iter().find_map(|message| match message {
        FromWorker::Sampled { device: 0, bytes, left } => Some((*bytes, *left)),
        _ => None,
    })
}

#[test]
fn a_worker_finds_what_another_process_left_in_memory() {
    const DIRTY: (&str, &str) = ("SIMGPU_POISON", "0xa5");
    let (bytes, left) = sampled(&[DIRTY], true).unwrap();
    assert!(bytes == 2 * MIB && left == bytes, "{left} of {bytes}");
    assert_eq!(sampled(&[], true), Some((2 * MIB, 0)), "cleared memory");
    assert_eq!(sampled(&[DIRTY], false), None, "nobody asked");
}

#[test]
fn a_worker_leaves_memory_to_others_when_it_is_short() {
    assert_eq!(sampled(&[("SIMGPU_MEMORY", "200MiB")], true), Some((2 * MIB, 0)));
    assert_eq!(sampled(&[("SIMGPU_MEMORY", "30MiB")], true), None);
}

/// Returns bytes that differ at every place.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..len.div_ceil(8)).flat_map(|_| random.draw().to_le_bytes()).take(len).collect()
}

/// Copies to the device on the lanes.
fn put_bulk(client: &Client, target: u64, bytes: &[u8]) {
    let lanes = client.link.lanes().expect("lanes");
    let begun = client.link.begin_call(op::COPY_TO_DEVICE, CALLER, |w| {
        [target, bytes.len() as u64, 0, 0].into_iter().for_each(|word| w.word(word));
    });
    let begun = begun.expect("the worker is there");
    // SAFETY: `bytes` outlives the transfer, whose end `wait_sent` and the reply below await.
    let upload = lanes.upload(unsafe { HostRange::new(bytes.as_ptr() as usize, bytes.len()) }, true);
    let sent = lanes.send(begun.seq, upload);
    assert!(client.link.wait_sent(&sent), "the bytes went out");
    assert_eq!(client.link.finish_call(begun).expect("the worker is there").status, 0);
}

/// Copies from the device on the lanes.
fn get_bulk(client: &Client, source: u64, len: usize) -> Vec<u8> {
    client.link.lanes().expect("lanes");
    let mut bytes = vec![0u8; len];
    let target = bytes.as_mut_ptr() as usize;
    let begun = client.link.begin_call(op::COPY_FROM_DEVICE, CALLER, |w| {
        // SAFETY: `bytes` outlives the transfer, whose end the code below awaits.
        client.link.down.expect(
            w.seq(),
            unsafe { HostRange::new(target, len) },
            On { ctx: 0, stream: 0, blocking: true },
            false,
            Vec::new(),
        );
        [source, len as u64, 0, 1].into_iter().for_each(|word| w.word(word));
    });
    let begun = begun.expect("the worker is there");
    assert_eq!(client.link.finish_call(begun).expect("the worker is there").status, 0);
    assert_eq!(client.link.down.wait(begun.seq), 0);
    bytes
}

/// Uses one thing of each kind that a program does.
fn works(client: &Client) {
    let mut r = client.hello.reader();
    assert_eq!(client.hello.status, 0);
    assert_eq!(r.bytes().map(<[u8]>::len), Ok(32), "the session's secret");
    assert_eq!((r.word(), r.word()), (Ok(0), Ok(WINDOW)), "the worker does not wait for a lost client");
    assert_eq!((r.word(), r.word()), (Ok(13000), Ok(1)), "driver version and number of devices");
    assert_eq!(r.text(), Ok("gpusession simulated GPU"));

    client.call(op::STREAM_CREATE, &[stream(1), 1, 0]);
    client.call(op::EVENT_CREATE, &[event(1), 0]);
    client.call(op::EVENT_RECORD, &[event(1), stream(1), 0]);
    client.call(op::EVENT_SYNC, &[event(1)]);
    client.call(op::EVENT_QUERY, &[event(1)]);

    let (before, total) = client.memory();
    assert_eq!(total, 2 << 30);
    client.call(op::ALLOC, &[WINDOW, 16 * MIB, 0]);
    assert_eq!(client.memory(), (before - 16 * MIB, total));
    let small = pattern(4001, 7);
    client.put(WINDOW + 5, &small);
    assert_eq!(client.get(WINDOW + 5, small.len()), small);
    let most = pattern(INLINE_MAX, 8);
    client.put(WINDOW + MIB, &most);
    assert_eq!(client.get(WINDOW + MIB, most.len()), most);
    let big = pattern(8 << 20, 9);
    put_bulk(client, WINDOW + 2 * MIB, &big);
    assert!(get_bulk(client, WINDOW + 2 * MIB, big.len()) == big, "8 MiB over the lanes");
    let odd = pattern((5 << 20) + 3, 10);
    put_bulk(client, WINDOW + 3, &odd);
    assert!(get_bulk(client, WINDOW + 3, odd.len()) == odd, "a length that is no multiple of anything");

    client.call(op::STREAM_SYNC, &[stream(1)]);
    client.call(op::EVENT_DESTROY, &[event(1)]);
    client.call(op::STREAM_DESTROY, &[stream(1)]);
    client.call(op::FREE, &[WINDOW]);
    assert_eq!(client.memory(), (before, total));
    assert_eq!(client.link.take_late_error(), 0);
}

#[test]
fn a_good_client_is_served_in_clear() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let client = worker.client(false);
    let admitted = worker.wait_for(|m| matches!(m, FromWorker::Presented { .. }));
    assert_eq!(
        admitted,
        FromWorker::Presented(ClientProcess {
            uid: 1000,
            user: "alice".into(),
            pid: 4242,
            program: "python3".into(),
            executable: "/usr/bin/python3".into(),
            encrypted: false
        })
    );
    works(&client);
}

#[test]
fn the_server_has_the_last_word() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.stranger(0);
    guest.greet(&Ticket { user: REFUSED.0.into(), ..worker.ticket() }.seal(&KEY));
    let (header, body) = guest.frame().expect("an answer to the greeting");
    // CUDA_ERROR_DEVICE_UNAVAILABLE, and the reason.
    assert_eq!((header.op.get(), header.ctx.get()), (op::REPLY, 46));
    assert_eq!(Reader::new(&body).text(), Ok(REFUSED.1));
    assert_eq!(worker.refusal(), REFUSED.1);
    assert!(worker.ended().ends_with(REFUSED.1));
    // The first supervisor has exited: the next one answers.
    let mut worker = Worker::start(&machine);
    let mut guest = worker.stranger(0);
    guest.greet(&Ticket { user: LATER.into(), ..worker.ticket() }.seal(&KEY));
    worker.wait_for(|m| matches!(m, FromWorker::Presented(_)));
    worker.tell(&ToWorker::TakenOver);
    let (header, _) = guest.frame().expect("an answer to the greeting");
    assert_eq!((header.op.get(), header.ctx.get()), (op::REPLY, 0));
}

#[test]
fn a_good_client_is_served_encrypted() {
    let machine = Machine::new();
    let mut worker = Worker::start_with(&machine, &Options { require_tls: true, ..Options::default() });
    let client = worker.client(true);
    assert!(client.link.encrypted());
    let admitted = worker.wait_for(|m| matches!(m, FromWorker::Presented { .. }));
    assert!(matches!(admitted, FromWorker::Presented(ClientProcess { encrypted: true, .. })));
    works(&client);
}

#[test]
fn a_worker_that_was_not_warm_serves_too() {
    let machine = Machine::new();
    let worker = Worker::start_with(&machine, &Options { warm: false, ..Options::default() });
    works(&worker.client(false));
}

#[test]
fn a_worker_that_serves_has_given_up_what_it_does_not_need() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let _client = worker.client(false);
    let pid = worker.pid();
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads").flatten();
    let threads: Vec<_> =
        threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("status")).ok()).collect();
    assert!(threads.len() > 1, "all of them");
    for status in threads {
        for line in ["Seccomp:\t2", "NoNewPrivs:\t1"] {
            assert!(status.lines().any(|l| l == line), "{line} is not in {status}");
        }
    }
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).expect("its limits");
    for (name, resource, most) in [
        ("Max core file size", Resource::RLIMIT_CORE, 1),
        ("Max open files", Resource::RLIMIT_NOFILE, 4096),
        ("Max file size", Resource::RLIMIT_FSIZE, 16 << 30),
    ] {
        // A lower limit stays.
        let limit = getrlimit(resource).expect("a limit").1.min(most).to_string();
        let row = limits.lines().find_map(|l| l.strip_prefix(name)).expect(name);
        let both: Vec<_> = row.split_whitespace().take(2).collect();
        assert_eq!(both, [&limit; 2], "{name}");
    }
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::Signal::SIGABRT)
        .expect("it is there");
    let status = worker.gone();
    assert_eq!((status.signal(), status.core_dumped()), (Some(nix::libc::SIGABRT), false));
}

#[test]
fn another_certificate_is_refused_by_the_client() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut endpoint = worker.endpoint(true);
    endpoint.fingerprint = Some([5; 32]);
    let lost = Client::open(&endpoint).err().expect("the client refuses");
    assert!(lost.0.contains("certificate"), "{lost}");
    assert!(worker.refusal().starts_with("a test: "));
    works(&worker.client(true));
}

/// Presents a certificate without having its key.
#[derive(Debug)]
struct Thief(Arc<rustls::sign::CertifiedKey>);

impl rustls::server::ResolvesServerCert for Thief {
    fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<Arc<rustls::sign::CertifiedKey>> {
        Some(self.0.clone())
    }
}

/// Returns the certificate that a worker shows to every peer.
fn certificate_of(worker: &Worker) -> rustls::pki_types::CertificateDer<'static> {
    let config = tls::pinned(worker.fingerprint).expect("a configuration");
    let name = rustls::pki_types::ServerName::try_from("worker").expect("a name");
    let mut connection = rustls::ClientConnection::new(config, name).expect("a client");
    let mut socket = TcpStream::connect(worker.address).expect("a connection");
    socket.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    socket.write_all(worker.preface(0, FLAG_TLS).as_bytes()).expect("a preface");
    while connection.is_handshaking() {
        connection.complete_io(&mut socket).expect("a handshake");
    }
    connection.peer_certificates().expect("a certificate")[0].clone().into_owned()
}

#[test]
fn the_right_certificate_with_another_key_is_refused_by_the_client() {
    let machine = Machine::new();
    let worker = Worker::start(&machine);
    let certificate = certificate_of(&worker);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let key = rcgen::KeyPair::generate().expect("a key").serialize_der();
    let key = rustls::pki_types::PrivatePkcs8KeyDer::from(key).into();
    let key = provider.key_provider.load_private_key(key).expect("a key");
    let thief = Thief(Arc::new(rustls::sign::CertifiedKey::new(vec![certificate], key)));
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(thief));

    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut endpoint = worker.endpoint(true);
    endpoint.addresses = vec![listener.local_addr().expect("its number").to_string()];
    let between = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("the client");
        socket.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
        let mut preface = [0; preface::LEN];
        socket.read_exact(&mut preface).expect("a preface");
        let mut connection = rustls::ServerConnection::new(Arc::new(config)).expect("a server");
        // Fails when the client closes the connection; what it sent until then must hold no ticket.
        let mut heard = Vec::new();
        while connection.is_handshaking() && connection.complete_io(&mut socket).is_ok() {}
        let _ = connection.reader().read_to_end(&mut heard);
        heard
    });
    let lost = Client::open(&endpoint).err().expect("the client refuses");
    assert!(lost.0.contains("does not have its key; look for a proxy between"), "{lost}");
    assert_eq!(between.join().expect("no panic"), b"", "the thief received no data");
    works(&worker.client(true));
}

#[test]
fn bad_tickets_are_refused_and_disturb_no_client() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let forged = "ticket was not made with this lease's key";
    let mut tickets = Vec::new();
    tickets.push((worker.ticket().seal(&[4; 32]), forged));
    let mut other = worker.ticket();
    other.worker = [8; 16];
    tickets.push((other.seal(&KEY), "ticket is for another worker"));
    let mut other = worker.ticket();
    other.lease = "lkjihgfedcba".into();
    tickets.push((other.seal(&KEY), "ticket is for another lease"));
    let good = worker.ticket().seal(&KEY);
    tickets.push((good[..good.len() - 1].to_vec(), forged));
    tickets.push((good[..32].to_vec(), "malformed ticket"));
    tickets.push((Vec::new(), "malformed ticket"));
    tickets.push((vec![0x55; 2000], "malformed ticket"));
    let mut changed = good.clone();
    changed[3] ^= 1;
    tickets.push((changed, forged));

    // Before the first admission: these attempts do not use up the worker.
    for (ticket, reason) in &tickets {
        let mut stranger = worker.stranger(0);
        stranger.greet(ticket);
        assert_eq!(stranger.refusal(), *reason);
        assert!(worker.refusal().contains(reason));
    }
    let client = worker.client(false);
    client.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
    let mine = pattern(1000, 3);
    client.put(WINDOW, &mine);
    // After an admission; the ticket that it used is no better than the others.
    tickets.push((good, "this worker already serves a process: ticket used twice"));
    for (ticket, reason) in &tickets {
        let mut stranger = worker.stranger(0);
        stranger.greet(ticket);
        assert_eq!(stranger.refusal(), *reason);
        assert!(worker.refusal().contains(reason));
        assert_eq!(client.get(WINDOW, mine.len()), mine);
    }
    // The client's library shows the reason to its user.
    for encrypted in [false, true] {
        let mut endpoint = worker.endpoint(encrypted);
        endpoint.ticket = tickets[0].0.clone();
        let lost = Client::open(&endpoint).err().expect("a refusal");
        assert!(lost.0.ends_with(forged), "{lost}");
    }
    assert_eq!(client.get(WINDOW, mine.len()), mine);
    assert!(client.heard.0.lock().expect("a list").is_empty());
}

#[test]
fn clear_text_is_refused_where_encryption_is_demanded() {
    let machine = Machine::new();
    let mut worker = Worker::start_with(&machine, &Options { require_tls: true, ..Options::default() });
    let told = Client::open(&worker.endpoint(false)).err().expect("a refusal");
    assert!(told.0.contains("demands encryption"), "the program receives the reason: {told}");
    assert!(worker.refusal().contains("demands encryption"));
    // A good ticket in clear is not used up.
    works(&worker.client(true));
    assert!(worker.stranger(FIRST_UP_LANE).refusal().contains("demands encryption"));
    assert!(worker.refusal().contains("demands encryption"));
}

#[test]
fn memory_is_given_only_inside_the_window_and_the_limit() {
    let machine = Machine::new();
    let mut worker = Worker::start_with(&machine, &Options { memory_bytes: 64 * MIB, ..Options::default() });
    let mut guest = worker.guest();
    let end = WINDOW + WINDOW_SIZE;
    let refused = [
        (WINDOW - 2 * MIB, 2 * MIB),
        (WINDOW - 2 * MIB, 4 * MIB),
        (0, 2 * MIB),
        (end, 2 * MIB),
        (end - 2 * MIB, 4 * MIB),
        (u64::MAX - 2 * MIB + 1, 2 * MIB),
        (WINDOW, u64::MAX - 2 * MIB + 1),
        (WINDOW, WINDOW_SIZE + 2 * MIB),
        (WINDOW, 0),
        (WINDOW, MIB),
        (WINDOW + 4096, 2 * MIB),
    ];
    for (address, size) in refused {
        let status = guest.ask_words(op::ALLOC, &[address, size, 0]);
        assert_eq!(status, Ok(INVALID_VALUE), "{size:#x} at {address:#x}");
    }
    for device in [1, 1 << 32, u64::MAX] {
        assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, device]), Ok(INVALID_DEVICE));
    }
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 66 * MIB, 0]), Ok(OUT_OF_MEMORY));
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 62 * MIB, 0]), Ok(0));
    // An existing allocation, and a further one that the limit forbids.
    assert!(matches!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(status) if status != 0));
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW + 64 * MIB, 4 * MIB, 0]), Ok(OUT_OF_MEMORY));
    assert_eq!(guest.ask_words(op::ALLOC, &[end - 2 * MIB, 2 * MIB, 0]), Ok(0));
    assert_eq!(guest.ask_words(op::FREE, &[WINDOW + 2 * MIB]), Ok(INVALID_VALUE));
    assert_eq!(guest.ask_words(op::FREE, &[WINDOW]), Ok(0));
    assert_eq!(guest.ask_words(op::FREE, &[WINDOW]), Ok(INVALID_VALUE));
    assert_eq!(guest.ask_words(op::FREE, &[end - 2 * MIB]), Ok(0));
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 64 * MIB, 0]), Ok(0));
}

/// Opens a lane of this guest, with the proof that it belongs to it.
fn lane(worker: &Worker, guest: &Raw, number: u16) -> Raw {
    let mut lane = worker.stranger(number);
    let proof = blake3::keyed_hash(&guest.secret, &number.to_le_bytes());
    lane.write(&frame(op::LANE, u64::from(number), |w| w.bytes(proof.as_bytes())));
    lane.seq = 0;
    lane
}

/// Sends the next chunk of a lane.
fn send_chunk(lane: &mut Raw, transfer: u64, offset: u64, bytes: &[u8]) {
    lane.seq += 1;
    let mut all = chunk_header(lane.seq, transfer, offset, bytes.len(), 0).as_bytes().to_vec();
    all.extend_from_slice(bytes);
    all.resize(all.len().next_multiple_of(8), 0);
    lane.write(&all);
}

/// Turns a frame into one without a reply.
fn no_wait(frame: &mut [u8]) {
    let flags = std::mem::offset_of!(gpusession_proto::frame::Header, flags);
    frame[flags..flags + 2].fill(0);
}

#[test]
fn memory_of_a_client_that_is_gone_is_free_at_once() {
    let machine = Machine::new();
    let second = Worker::start(&machine);
    let watcher = second.client(false);
    let before = watcher.memory().0;
    for busy in [false, true] {
        let mut first = Worker::start(&machine);
        let mut guest = first.guest();
        match busy {
            true => work_without_end(&mut guest, true),
            false => assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 512 * MIB, 0]), Ok(0)),
        }
        assert!(watcher.memory().0 <= before - 512 * MIB, "one machine");
        let pid = first.pid();
        guest.close();
        assert_eq!(first.ended_within(TEST_TIMEOUT), "the client's process exited");
        assert!(!exists(pid));
        assert_eq!(watcher.memory().0, before);
    }
    works(&watcher);
}

#[test]
fn workers_leave_nothing_behind_however_they_end() {
    const WORKERS: u64 = 100;
    const AT_A_TIME: u64 = 4;
    let machine = Machine::new();
    let watcher = Worker::start(&machine);
    let watching = watcher.client(false);
    let free = watching.memory().0;
    let files = |folder: &str| std::fs::read_dir(folder).map_or(0, Iterator::count);
    let ours = || std::fs::read_dir(machine.driver().parent().expect("a folder")).map_or(0, Iterator::count);
    let shared = || {
        let mine = machine.name().replace('-', "_");
        let all = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        all.filter(|file| file.file_name().to_string_lossy().replace('-', "_").contains(&mine)).count()
    };
    let before = (files("/proc/self/fd"), shared(), ours());
    let mut pids = Vec::new();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_A_TIME)
            .map(|thread| {
                let machine = machine.clone();
                scope.spawn(move || {
                    let mut random = Random::new(thread + 1);
                    let mut pids = Vec::new();
                    for _ in 0..WORKERS / AT_A_TIME {
                        let mut worker = Worker::start(&machine);
                        let pid = worker.pid();
                        pids.push(pid);
                        let kill = || {
                            nix::sys::signal::kill(
                                nix::unistd::Pid::from_raw(pid as i32),
                                nix::sys::signal::Signal::SIGKILL,
                            )
                        };
                        // The worker exits before it serves a client.
                        if random.below(8) == 0 {
                            let _ = kill();
                            worker.gone();
                            continue;
                        }
                        let mut guest = worker.guest();
                        assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 8 * MIB, 0]), Ok(0));
                        assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(1), 1, 0]), Ok(0));
                        let ended = Instant::now();
                        match random.below(4) {
                            // The client's process exits, or the link is cut.
                            0 => guest.close(),
                            1 => drop(kill()),
                            // The supervisor stops the worker.
                            2 => worker.tell(&ToWorker::Stop { reason: "a test".into() }),
                            // The client sends a malformed frame.
                            _ => guest.write(&[0xff; 64]),
                        }
                        worker.gone();
                        assert!(ended.elapsed() < TEST_TIMEOUT, "{:?}", ended.elapsed());
                    }
                    pids
                })
            })
            .collect();
        pids.extend(threads.into_iter().flat_map(|t| t.join().expect("no panic")));
    });
    assert_eq!(pids.len() as u64, WORKERS);
    assert!(!pids.iter().any(|pid| exists(*pid)), "processes");
    assert_eq!(watching.memory().0, free, "device memory");
    // Meanwhile, other tests of this process open and close theirs.
    let end = Instant::now() + TEST_TIMEOUT;
    while Instant::now() < end && (ours() > before.2 || shared() > before.1) {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(ours() <= before.2 && shared() <= before.1, "files and shared memory");
    while Instant::now() < end && files("/proc/self/fd") > before.0 + 64 {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(files("/proc/self/fd") <= before.0 + 64, "descriptors");
}

#[test]
fn two_workers_have_nothing_in_common_but_the_machine() {
    let machine = Machine::new();
    let (first, second) = (Worker::start(&machine), Worker::start(&machine));
    let (a, b) = (first.client(false), second.client(true));
    a.call(op::STREAM_CREATE, &[stream(1), 1, 0]);
    a.call(op::EVENT_CREATE, &[event(1), 0]);
    a.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
    assert_eq!(b.refused(op::STREAM_QUERY, &[stream(1)]), INVALID_HANDLE);
    assert_eq!(b.refused(op::EVENT_QUERY, &[event(1)]), INVALID_HANDLE);
    assert_eq!(b.refused(op::FREE, &[WINDOW]), INVALID_VALUE);
    assert_ne!(b.refused(op::COPY_FROM_DEVICE, &[WINDOW, 8, 0, 1]), 0, "memory of the other one");
    // The same address is memory of another worker.
    b.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
    let (mine, yours) = (pattern(5000, 1), pattern(5000, 2));
    a.put(WINDOW, &mine);
    b.put(WINDOW, &yours);
    assert!(a.get(WINDOW, mine.len()) == mine && b.get(WINDOW, yours.len()) == yours);
    // The tickets of one worker do not open the other.
    let mut endpoint = second.endpoint(false);
    endpoint.ticket = first.ticket().seal(&KEY);
    assert!(Client::open(&endpoint).err().expect("a refusal").0.ends_with("ticket is for another worker"));
    // One worker's errors do not reach the other.
    a.call(op::STREAM_QUERY, &[stream(1)]);
}

#[test]
fn a_worker_that_is_killed_is_an_error_for_its_client_only() {
    let machine = Machine::new();
    let (first, second) = (Worker::start(&machine), Worker::start(&machine));
    let (a, b) = (first.client(false), second.client(true));
    drop(first);
    let lost = a.try_call(op::MEM_INFO, &[]).expect_err("the worker is gone");
    assert!(lost.0.contains("connection to test lost"), "{lost}");
    assert_eq!(a.try_call(op::MEM_INFO, &[]).expect_err("for good"), lost);
    works(&b);
}

#[test]
fn a_worker_ends_with_its_supervisor() {
    let machine = Machine::new();
    Worker::start(&machine).abandoned();
    for encrypted in [false, true] {
        let worker = Worker::start(&machine);
        let client = worker.client(encrypted);
        worker.abandoned();
        let lost = client.try_call(op::MEM_INFO, &[]).expect_err("the worker is gone");
        assert!(lost.0.contains("the GPU server was stopped") || lost.0.contains("lost"), "{lost}");
    }
}

/// Lets a stream wait for a value that never comes, and if wanted, an executor for the stream.
fn work_without_end(guest: &mut Raw, waited_for: bool) {
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 512 * MIB, 0]), Ok(0));
    assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(1), 1, 0]), Ok(0));
    let mut item = [0u64; 6];
    // CU_STREAM_MEM_OP_WAIT_VALUE_32: operation, address, value, flags (equal).
    (item[0], item[1], item[2], item[3]) = (1, WINDOW, 77, 1);
    let waits = guest.ask(op::STREAM_BATCH, |w| {
        w.word(stream(1));
        w.word(0);
        w.bytes(item.as_bytes());
    });
    assert_eq!(waits, Ok(0));
    if waited_for {
        guest.seq += 1;
        guest.write(&frame(op::STREAM_SYNC, guest.seq, |w| w.word(stream(1))));
    }
}

#[test]
fn under_mps_a_worker_exits_when_its_gpu_work_was_ended() {
    let machine = Machine::new();
    let driver = vec![("CUDA_MPS_PIPE_DIRECTORY", "/run/mps".to_string())];
    let options = Options { mps: true, warm: false, driver, ..Options::default() };
    for (stopped, busy, waited_for) in [
        (true, false, false),
        (true, true, false),
        (true, true, true),
        (false, false, false),
        (false, true, true),
    ] {
        let mut worker = Worker::start_with(&machine, &options);
        let mut guest = worker.guest();
        if busy {
            work_without_end(&mut guest, waited_for);
        }
        let begun = Instant::now();
        let kept = if stopped {
            Some(guest)
        } else {
            guest.close();
            None
        };
        if stopped {
            worker.tell(&ToWorker::Stop { reason: "the client's process exited".into() });
        }
        let said = worker.wait_for(|m| matches!(m, FromWorker::Ended { .. }));
        assert_eq!(said, FromWorker::Ended { reason: "the client's process exited".into(), quiet: !busy });
        assert_eq!(begun.elapsed() >= Duration::from_millis(500), busy, "{:?}", begun.elapsed());
        std::thread::sleep(Duration::from_millis(200));
        assert!(exists(worker.pid()), "it waits for the end of its GPU work");
        worker.tell(&ToWorker::Exit);
        worker.exited_within(Duration::from_secs(1));
        drop(kept);
    }
    // Without the supervisor's consent, the worker exits after a time.
    let mut worker = Worker::start_with(&machine, &options);
    worker.guest().close();
    worker.wait_for(|m| matches!(m, FromWorker::Ended { .. }));
    worker.exited();
    // It also exits after its supervisor, with which MPS has exited.
    let mut worker = Worker::start_with(&machine, &options);
    let _guest = worker.guest();
    worker.abandoned();
}

#[test]
fn the_client_is_told_why_it_was_stopped() {
    let machine = Machine::new();
    let reason = "the administrator needs the GPU — sorry";
    for encrypted in [false, true] {
        let mut worker = Worker::start(&machine);
        let client = worker.client(encrypted);
        // A thread waits for a value that never comes: the reason reaches it, too.
        client.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
        client.call(op::STREAM_CREATE, &[stream(1), 1, 0]);
        let mut item = [0u64; 6];
        (item[0], item[1], item[2], item[3]) = (1, WINDOW, 77, 1);
        let waits = client.link.call(op::STREAM_BATCH, CALLER, |w| {
            w.word(stream(1));
            w.word(0);
            w.bytes(item.as_bytes());
        });
        assert_eq!(waits.expect("the worker is there").status, 0);
        let begun = client.link.begin_call(op::STREAM_SYNC, CALLER, |w| w.word(stream(1)));
        let begun = begun.expect("the worker is there");
        worker.tell(&ToWorker::Stop { reason: reason.into() });
        let lost = client.link.finish_call(begun).expect_err("the end");
        assert!(lost.0.ends_with(reason), "{lost}");
        assert_eq!(*client.heard.0.lock().expect("a list"), [lost.0]);
        assert_eq!(worker.ended(), reason);
    }
    // No client to receive the reason.
    let mut worker = Worker::start(&machine);
    worker.tell(&ToWorker::Stop { reason: reason.into() });
    assert_eq!(worker.ended(), reason);
}

/// Appends a structure's bytes to a frame.
fn structure(w: &mut gpusession_proto::frame::Writer<'_>, words: &[u64]) {
    w.bytes(words.as_bytes());
}

#[test]
fn the_limit_holds_for_memory_of_every_kind() {
    let machine = Machine::new();
    let options = Options { memory_bytes: 64 * MIB, context_bytes: 8 * MIB, ..Options::default() };
    let mut worker = Worker::start_with(&machine, &options);
    let mut guest = worker.guest();
    let free = |guest: &mut Raw| guest.ask_answer(op::MEM_INFO, |_| {})[0];
    let before = free(&mut guest);
    assert_eq!(before, 64 * MIB);

    // cuMemCreate: size, properties (pinned memory of device 0), flags.
    // The memory counts until no handle and no mapping uses it.
    let create = |guest: &mut Raw, mib: u64| {
        guest.ask(op::cuMemCreate, |w| {
            w.word(mib * MIB);
            structure(w, &[1, 1, 0, 0]);
            w.word(0);
        })
    };
    assert_eq!(create(&mut guest, 128), Ok(OUT_OF_MEMORY));
    assert_eq!(create(&mut guest, 40), Ok(0));
    let handle = guest.words[0];
    assert_eq!(create(&mut guest, 40), Ok(OUT_OF_MEMORY), "the sum counts");
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 40 * MIB, 0]), Ok(OUT_OF_MEMORY), "of all kinds");
    assert_eq!(guest.ask_words(op::cuMemMap, &[WINDOW + 64 * MIB, 40 * MIB, 0, handle, 0]), Ok(0));
    assert_eq!(guest.ask_words(op::cuMemRelease, &[handle]), Ok(0));
    assert_eq!(create(&mut guest, 40), Ok(OUT_OF_MEMORY), "it is mapped");
    assert_eq!(guest.ask_words(op::cuMemUnmap, &[WINDOW + 64 * MIB, 40 * MIB]), Ok(0));
    assert_eq!(free(&mut guest), before);
    // Memory of the server's host.
    let host = guest.ask(op::cuMemCreate, |w| {
        w.word(2 * MIB);
        structure(w, &[1, 2, 0, 0]);
        w.word(0);
    });
    assert_eq!(host, Ok(NOT_SUPPORTED));

    // Stream-ordered memory: size, stream.
    assert_eq!(guest.ask_words(op::cuMemAllocAsync, &[128 * MIB, 0]), Ok(OUT_OF_MEMORY));
    assert_eq!(guest.ask_words(op::cuMemAllocAsync, &[40 * MIB, 0]), Ok(0));
    let pooled = guest.words[0];
    assert_eq!(guest.ask_words(op::cuMemAllocAsync, &[40 * MIB, 0]), Ok(OUT_OF_MEMORY));
    assert_eq!(free(&mut guest), 24 * MIB);
    assert_eq!(guest.ask_words(op::cuMemFreeAsync, &[pooled, 0]), Ok(0));
    assert_eq!(guest.ask_words(op::CTX_SYNC, &[]), Ok(0));
    assert_eq!(free(&mut guest), before);
    // From a pool of the program.
    let made = guest.ask(op::cuMemPoolCreate, |w| structure(w, &[1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
    assert_eq!(made, Ok(0));
    let pool = guest.words[0];
    assert_eq!(guest.ask_words(op::cuMemAllocFromPoolAsync, &[128 * MIB, pool, 0]), Ok(OUT_OF_MEMORY));

    // An array of 8192 x 4096 floats, then one that fits, of 16 MiB.
    let array = |guest: &mut Raw, height: u64| {
        guest.ask(op::cuArrayCreate_v2, |w| structure(w, &[4096, height, 0x20 | 1 << 32]))
    };
    assert_eq!(array(&mut guest, 8192), Ok(OUT_OF_MEMORY));

    // Variables of a module.
    let load = |guest: &mut Raw, bytes: u64| {
        let text = format!(
            ".version 7.0\n.target sm_75\n.address_size 64\n.visible .global .align 4 .b8 table[{bytes}];\n\0"
        );
        let hash = blake3::hash(text.as_bytes());
        let sent = guest.ask(op::IMAGE_DATA, |w| {
            w.bytes(hash.as_bytes());
            w.word(text.len() as u64);
            w.bytes(text.as_bytes());
        });
        assert_eq!(sent, Ok(0));
        guest.ask(op::MODULE_LOAD, |w| {
            w.word(handle::make(handle::MODULE, 0, 1, 1));
            w.bytes(hash.as_bytes());
            w.word(0);
        })
    };
    assert_eq!(load(&mut guest, 128 * MIB), Ok(OUT_OF_MEMORY));
    assert_eq!(load(&mut guest, 16 * MIB), Ok(0));
    assert_eq!(free(&mut guest), before - 16 * MIB);
    assert_eq!(guest.ask_words(op::MODULE_UNLOAD, &[handle::make(handle::MODULE, 0, 1, 1)]), Ok(0));

    // Contexts, and heaps for device code (CU_LIMIT_MALLOC_HEAP_SIZE).
    let ctx = handle::make(handle::CTX, 0, 1, 5);
    assert_eq!(guest.ask_words(op::CTX_CREATE, &[ctx, 0, 0]), Ok(0));
    assert_eq!(free(&mut guest), before - 8 * MIB);
    assert_eq!(guest.ask_words(op::CTX_DESTROY, &[ctx]), Ok(0));
    assert_eq!(guest.ask_words(op::CTX_SET_LIMIT, &[2, 128 * MIB]), Ok(OUT_OF_MEMORY));
    assert_eq!(guest.ask_words(op::CTX_SET_LIMIT, &[2, 24 * MIB]), Ok(0));
    assert_eq!(free(&mut guest), before - 16 * MIB);
    assert_eq!(guest.ask_words(op::CTX_SET_LIMIT, &[2, 8 * MIB]), Ok(0));
    assert_eq!(free(&mut guest), before);
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 64 * MIB, 0]), Ok(0));
}

#[test]
fn the_supervisor_gets_the_reason_of_reader_or_executor() {
    let machine = Machine::new();
    for _ in 0..20 {
        let mut worker = Worker::start(&machine);
        let mut guest = worker.guest();
        // The executor finds the frame; the reader finds the end of the connection.
        guest.write(&frame(op::REPLY, 2, |_| {}));
        guest.close();
        let reason = worker.ended();
        assert!(reason.contains("unknown operation") || reason.contains("client"), "{reason}");
    }
}

#[test]
fn the_last_report_has_all_the_work_of_a_short_program() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let client = worker.client(false);
    client.call(op::ALLOC, &[WINDOW, 2 * MIB, 0]);
    client.put(WINDOW, &[7; 1 << 20]);
    assert_eq!(client.get(WINDOW, 8), [7; 8]);
    client.link.close();
    let last = std::cell::Cell::new(None);
    worker.wait_for(|m| {
        if let FromWorker::Usage(usage) = m {
            last.set(Some(*usage));
        }
        matches!(m, FromWorker::Ended { .. })
    });
    let usage = last.get().expect("a report");
    assert_eq!((usage.bytes_to_device, usage.bytes_from_device), (1 << 20, 8));
    assert!(usage.calls >= 3 && usage.memory_bytes >= 2 * MIB, "{usage:?}");
}

#[test]
fn a_callback_that_the_driver_refuses_behind_a_fault_is_called_with_it() {
    const ILLEGAL_ADDRESS: i32 = 700;
    const CALLBACK: u64 = 5;
    let (module, function) = (handle::make(handle::MODULE, 0, 1, 1), handle::make(handle::FUNC, 0, 1, 1));
    let driver = vec![("SIMGPU_FAULT_AT_LAUNCH", "1".into())];
    let mut worker = Worker::start_with(&Machine::new(), &Options { driver, ..Options::default() });
    let mut guest = worker.guest();
    let image = gpusession_test_support::cuda::KERNEL.to_bytes_with_nul();
    let hash = blake3::hash(image);
    let sent = guest.ask(op::IMAGE_DATA, |w| {
        w.bytes(hash.as_bytes());
        w.word(image.len() as u64);
        w.bytes(image);
    });
    assert_eq!(sent, Ok(0));
    let loaded = guest.ask(op::MODULE_LOAD, |w| {
        w.word(module);
        w.bytes(hash.as_bytes());
        w.word(0);
    });
    assert_eq!(loaded, Ok(0));
    let found = guest.ask(op::GET_FUNCTION, |w| {
        [function, module, 0].into_iter().for_each(|word| w.word(word));
        w.bytes(b"increment");
    });
    assert_eq!(found, Ok(0));
    let launched = guest.ask(op::LAUNCH, |w| {
        [function, 1 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0, 0].into_iter().for_each(|word| w.word(word));
        w.bytes(&[]);
        w.bytes(&WINDOW.to_le_bytes());
    });
    assert!(matches!(launched, Ok(0 | ILLEGAL_ADDRESS)), "{launched:?}");
    assert_eq!(guest.ask_words(op::CTX_SYNC, &[]), Ok(ILLEGAL_ADDRESS));
    // A program that has not seen the fault posts the call, which has returned success.
    guest.seq += 1;
    let words = [0, CALLBACK, 0, 1];
    let mut queued = frame(op::HOST_FUNC, guest.seq, |w| words.iter().for_each(|word| w.word(*word)));
    no_wait(&mut queued);
    guest.write(&queued);
    let called = std::iter::from_fn(|| guest.frame()).find(|(header, _)| header.op.get() == op::CALL_HOST);
    let (_, body) = called.expect("the call");
    assert_eq!(body, [CALLBACK, ILLEGAL_ADDRESS as u64].map(u64::to_le_bytes).concat());
}
