//! Worker processes on the simulated driver: services for good clients, refusals for bad ones.
#![expect(clippy::disallowed_methods, reason = "tests wait for other processes")]

mod harness;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpusession_link::lanes::{HostRange, On, chunk_header};
use gpusession_link::tls;
use gpusession_proto::frame::{
    CHUNK, DOWN_LANES, FIRST_DOWN_LANE, FIRST_UP_LANE, HEADER, INLINE_MAX, MAX_BODY, Reader, mirror, op,
};
use gpusession_proto::handle;
use gpusession_proto::preface::{self, Code, FLAG_TLS, Refusal};
use gpusession_proto::supervise::{ClientProcess, FromWorker, STAGING, ToWorker};
use gpusession_proto::ticket::Ticket;
use harness::{
    CALLER, Client, KEY, LATER, MIB, Machine, Options, PATIENCE, REFUSED, Random, Raw, WINDOW, WINDOW_SIZE,
    Worker, event, exists, frame, frame_of, stream,
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

/// Returns bytes that differ at every place.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..len.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(len).collect()
}

/// Copies to the device on the lanes.
fn put_bulk(client: &Client, target: u64, bytes: &[u8]) {
    let lanes = client.link.lanes().expect("lanes");
    let begun = client.link.begin_call(op::COPY_TO_DEVICE, CALLER, |w| {
        [target, bytes.len() as u64, 0, 0].into_iter().for_each(|word| w.word(word));
    });
    let begun = begun.expect("the worker is there");
    // SAFETY: `bytes` outlives the transfer, whose end `wait` and the reply below await.
    let upload = lanes.upload(unsafe { HostRange::new(bytes.as_ptr() as usize, bytes.len()) }, true);
    let sent = lanes.send(begun.seq, upload);
    assert!(sent.wait(), "the bytes went out");
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
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
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
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
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
    assert_eq!(between.join().expect("no panic"), b"", "nothing was told to the thief");
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
    assert!(told.0.contains("demands encryption"), "the program is told why: {told}");
    assert!(worker.refusal().contains("demands encryption"));
    // A good ticket in clear is not used up.
    works(&worker.client(true));
    assert!(worker.stranger(FIRST_UP_LANE).refusal().contains("demands encryption"));
    assert!(worker.refusal().contains("demands encryption"));
}

#[test]
fn garbage_before_admission_disturbs_no_client() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    // A connection that stays silent all the time.
    let silent = worker.stranger(0);
    let client = worker.client(false);

    let good = worker.preface(0, 0);
    let mut version = good;
    version.version = 99.into();
    let mut other = good;
    other.worker = [8; 16];
    let prefaces: [(&[u8], &str); 5] = [
        (&pattern(preface::LEN, 1), "not a gpusession data connection"),
        (&good.as_bytes()[..preface::LEN - 1], "short preface"),
        (&[], "short preface"),
        (version.as_bytes(), "data-plane version 99"),
        (other.as_bytes(), "preface for another worker"),
    ];
    for (bytes, reason) in prefaces {
        let mut socket = worker.adopt_with(bytes);
        socket.shutdown(std::net::Shutdown::Write).expect("an open connection");
        let refusal = worker.refusal();
        assert!(refusal.contains(reason), "{refusal}");
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        // A program of another version gets the reason; the worker hangs up on all else.
        let code = Refusal::read(&answer).map(|refusal| refusal.code);
        let expected = (bytes == version.as_bytes()).then_some(Code::Version);
        assert_eq!((code, answer.is_empty()), (expected, expected.is_none()));
    }

    let mut long = frame(op::HELLO, 1, |w| w.bytes(&[0; 4096]));
    let mut cut = long.clone();
    cut.truncate(HEADER + 100);
    long.extend_from_slice(&[0; 100]);
    let mut odd = frame(op::HELLO, 1, |w| w.word(0));
    odd[0] = 7;
    let greetings: [(Vec<u8>, bool, &str); 9] = [
        (
            b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n".to_vec(),
            false,
            "malformed frame: body",
        ),
        (pattern(4096, 2), false, "malformed frame: body"),
        (long, false, "greeting too long"),
        (odd, false, "length not a multiple of 8"),
        (cut, true, "greeting too long"),
        (frame(op::HELLO, 1, |w| w.bytes(&[0; 600]))[..300].to_vec(), true, ""),
        (vec![1, 2, 3], true, ""),
        (frame(op::MEM_INFO, 1, |_| {}), false, "unexpected first frame"),
        (frame(op::LANE, 1, |w| w.bytes(&[0; 32])), false, "unexpected first frame"),
    ];
    for (bytes, close, reason) in greetings {
        let mut stranger = worker.stranger(0);
        stranger.write(&bytes);
        if close {
            stranger.close();
        } else {
            assert!(stranger.hung_up(), "{reason}");
        }
        let refusal = worker.refusal();
        assert!(refusal.contains(reason), "{refusal}, not {reason}");
    }
    // A ticket's length beyond its frame; more windows than the frame holds.
    for body in [vec![u64::MAX], vec![1 << 40, 0, 0]] {
        let mut stranger = worker.stranger(0);
        stranger.write(&frame(op::HELLO, 1, |w| body.iter().for_each(|word| w.word(*word))));
        assert!(stranger.hung_up());
        assert!(worker.refusal().contains("string too long"));
    }
    // Garbage where a TLS handshake is due.
    let mut socket = TcpStream::connect(worker.address).expect("a connection");
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    socket.write_all(worker.preface(0, FLAG_TLS).as_bytes()).expect("a preface");
    socket.write_all(&pattern(500, 4)).expect("garbage");
    worker.refusal();
    drop(socket);

    works(&client);
    assert!(client.heard.0.lock().expect("a list").is_empty());
    drop(silent);
}

#[test]
fn too_many_windows_do_no_harm() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let ticket = worker.ticket().seal(&KEY);
    let mut stranger = worker.stranger(0);
    stranger.write(&frame(op::HELLO, 1, |w| {
        w.bytes(&ticket);
        w.word(u64::MAX);
        w.word(u64::MAX);
    }));
    assert!(stranger.hung_up());
    assert!(worker.refusal().contains("body too short"));
    // Windows that no driver grants: the client is admitted without a window.
    let mut stranger = worker.stranger(0);
    stranger.write(&frame(op::HELLO, 1, |w| {
        w.bytes(&ticket);
        [2, u64::MAX, 1, u64::MAX - 4095].into_iter().for_each(|word| w.word(word));
    }));
    let (header, body) = stranger.frame().expect("an answer");
    let mut r = Reader::new(&body);
    let _ = r.bytes();
    assert_eq!((header.ctx.get(), r.word()), (0, Ok(0)));
    assert_eq!(stranger.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(INVALID_VALUE));
    assert_eq!(stranger.ask_words(op::MEM_INFO, &[]), Ok(0));
}

/// Checks that bytes of an admitted client end its worker, for this reason.
fn ends_with(bytes: &[u8], reason: &str) {
    let machine = Machine::new();
    let (mut worker, mut beside) = (Worker::start(&machine), Worker::start(&machine));
    let (mut guest, mut neighbour) = (worker.guest(), beside.guest());
    guest.write(bytes);
    let told = guest.answer(u64::MAX).expect_err("the end");
    assert!(told.contains(reason), "{told}, not {reason}");
    let ended = worker.ended();
    assert!(ended.contains(reason), "{ended}, not {reason}");
    assert_eq!(neighbour.ask_words(op::MEM_INFO, &[]), Ok(0), "nobody else is disturbed");
}

#[test]
fn a_body_longer_than_allowed_ends_the_worker() {
    let mut bytes = frame(op::MEM_INFO, 2, |_| {});
    bytes[..4].copy_from_slice(&(MAX_BODY as u32 + 8).to_le_bytes());
    ends_with(&bytes, "malformed frame: body too long");
    bytes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    ends_with(&bytes, "malformed frame: body too long");
}

#[test]
fn an_odd_length_ends_the_worker() {
    let mut bytes = frame(op::MEM_INFO, 2, |_| {});
    bytes[0] = 12;
    bytes.extend_from_slice(&[0; 12]);
    ends_with(&bytes, "malformed frame: body length not a multiple of 8");
}

#[test]
fn an_unknown_operation_ends_the_worker() {
    for operation in [0, 19, 199, op::REPLY, op::CHUNK, 9999, u16::MAX] {
        ends_with(&frame(operation, 2, |w| w.word(0)), "malformed frame: unknown operation");
    }
    // A second greeting is an unknown operation, too.
    ends_with(&frame(op::HELLO, 2, |w| w.bytes(&[0; 100])), "malformed frame: unknown operation");
}

#[test]
fn a_body_that_stops_short_ends_the_worker() {
    ends_with(&frame(op::COPY_TO_DEVICE, 2, |w| w.word(WINDOW)), "malformed frame: body too short");
    ends_with(&frame(op::STREAM_CREATE, 2, |_| {}), "malformed frame: body too short");
    ends_with(&frame(op::ALLOC, 2, |w| w.word(WINDOW)), "malformed frame: body too short");
}

#[test]
fn a_string_beyond_its_body_ends_the_worker() {
    for len in [9, 1 << 40, u64::MAX] {
        let bytes = frame(op::IMAGE_HAVE, 2, |w| {
            w.word(len);
            w.word(0);
        });
        ends_with(&bytes, "malformed frame: string too long");
    }
}

#[test]
fn a_frame_cut_off_by_the_end_of_the_connection_ends_the_worker() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    guest.write(&frame(op::COPY_TO_DEVICE, 2, |w| w.bytes(&[1; 1000]))[..500]);
    guest.close();
    worker.ended();
}

#[test]
fn bad_handles_are_errors_and_nothing_else() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(1), 1, 0]), Ok(0));
    assert_eq!(guest.ask_words(op::EVENT_CREATE, &[event(1), 0]), Ok(0));
    assert_eq!(guest.ask_words(op::EVENT_CREATE, &[event(2), 0]), Ok(0));
    assert_eq!(guest.ask_words(op::EVENT_DESTROY, &[event(2)]), Ok(0));
    let newer = handle::make(handle::STREAM, 0, 2, 1);
    let bad = [
        3,
        u64::MAX,
        stream(2),
        newer,
        event(2),
        handle::make(0x7f, 0, 1, 1),
        handle::make(handle::FUNC, 0, 1, 0),
    ];
    for bad in bad {
        for operation in [
            op::STREAM_DESTROY,
            op::STREAM_SYNC,
            op::STREAM_QUERY,
            op::EVENT_DESTROY,
            op::EVENT_SYNC,
            op::EVENT_QUERY,
            op::MODULE_UNLOAD,
            op::LIBRARY_UNLOAD,
            op::GRAPH_DESTROY,
            op::GRAPH_EXEC_DESTROY,
            op::CTX_DESTROY,
        ] {
            assert_eq!(guest.ask_words(operation, &[bad]), Ok(INVALID_HANDLE), "{operation} {bad:#x}");
        }
        for operation in [op::EVENT_RECORD, op::EVENT_ELAPSED, op::GRAPH_LAUNCH, op::GRAPH_UPDATE] {
            assert_eq!(
                guest.ask_words(operation, &[bad, bad, 0]),
                Ok(INVALID_HANDLE),
                "{operation} {bad:#x}"
            );
        }
        assert_eq!(guest.ask_words(op::EVENT_RECORD, &[event(1), bad, 0]), Ok(INVALID_HANDLE));
        assert_eq!(guest.ask_words(op::STREAM_WAIT_EVENT, &[stream(1), bad, 0]), Ok(INVALID_HANDLE));
        assert_eq!(guest.ask_words(op::COPY_FROM_DEVICE, &[WINDOW, 8, bad, 1]), Ok(INVALID_HANDLE));
        // Fill 8 bytes (cuMemsetD8Async), copy device to device, free: on an invalid stream.
        assert_eq!(guest.ask_words(300, &[WINDOW, 0, 8, bad]), Ok(INVALID_HANDLE));
        assert_eq!(guest.ask_words(357, &[WINDOW, WINDOW, 8, bad]), Ok(INVALID_HANDLE));
        assert_eq!(guest.ask_words(360, &[WINDOW, bad]), Ok(INVALID_HANDLE));
        let launch = guest.ask(op::LAUNCH, |w| {
            [bad, 1, 1, 1, 0, 0].into_iter().for_each(|word| w.word(word));
            w.bytes(&[]);
            w.bytes(&[]);
        });
        assert_eq!(launch, Ok(INVALID_HANDLE));
    }
    // A new handle must be of its kind and its slot within bounds.
    for bad in [0, event(5), handle::make(handle::STREAM, 0, 1, 1 << 22), u64::MAX] {
        assert_eq!(guest.ask_words(op::STREAM_CREATE, &[bad, 1, 0]), Ok(INVALID_HANDLE), "{bad:#x}");
    }
    // An invalid context.
    for bad in [1, stream(1), handle::make(handle::CTX, 0, 1, 7), u64::MAX] {
        guest.seq += 1;
        let mut bytes = frame(op::MEM_INFO, guest.seq, |_| {});
        bytes[32..40].copy_from_slice(&bad.to_le_bytes());
        guest.write(&bytes);
        assert_eq!(guest.answer(guest.seq), Ok(INVALID_CONTEXT), "{bad:#x}");
    }
    assert_eq!(guest.ask_words(op::EVENT_RECORD, &[event(1), stream(1), 0]), Ok(0));
    assert_eq!(guest.ask_words(op::STREAM_SYNC, &[stream(1)]), Ok(0));
}

#[test]
fn images_that_lie_about_their_length_are_errors() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    let mut fatbin = vec![0; 128];
    fatbin[..8].copy_from_slice(&[0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0]);
    let mut elf = vec![0; 64];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    elf[0x3a..0x3e].copy_from_slice(&[64, 0, 200, 0]);
    let mut wrapper = vec![0; 24];
    wrapper[..4].copy_from_slice(&0x4662_43b1_u32.to_le_bytes());
    wrapper[8..16].copy_from_slice(&WINDOW.to_le_bytes());
    let mut images = vec![elf.clone(), wrapper, b".version 7.0 without an end".to_vec()];
    for far in [113_u64, 1 << 30, u64::MAX] {
        fatbin[8..16].copy_from_slice(&far.to_le_bytes());
        elf[0x28..0x30].copy_from_slice(&far.to_le_bytes());
        images.extend([fatbin.clone(), elf.clone()]);
    }
    for (at, image) in images.iter().enumerate() {
        let hash = blake3::hash(image);
        let sent = guest.ask(op::IMAGE_DATA, |w| {
            w.bytes(hash.as_bytes());
            w.word(image.len() as u64);
            w.bytes(image);
        });
        assert_eq!(sent, Ok(0));
        for (operation, kind) in [(op::MODULE_LOAD, handle::MODULE), (op::LIBRARY_LOAD, handle::LIBRARY)] {
            let loaded = guest.ask(operation, |w| {
                w.word(handle::make(kind, 0, 1, 1));
                w.bytes(hash.as_bytes());
                w.word(0);
            });
            assert_eq!(loaded, Ok(INVALID_IMAGE), "image {at}");
        }
    }
    assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(1), 1, 0]), Ok(0), "the worker continues");
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

#[test]
fn absurd_counts_are_errors_and_nothing_else() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    for len in [(1 << 47) + 1, 1 << 48, u64::MAX] {
        assert_eq!(guest.ask_words(op::COPY_FROM_DEVICE, &[WINDOW, len, 0, 1]), Ok(INVALID_VALUE));
        assert_eq!(guest.ask_words(op::COPY_TO_DEVICE, &[WINDOW, len, 0, 0]), Ok(INVALID_VALUE));
        let copied = guest.ask(op::COPY_BOX, |w| {
            w.bytes(&[0; 200]);
            [0, 2, len].into_iter().for_each(|word| w.word(word));
        });
        assert_eq!(copied, Ok(INVALID_VALUE));
        let image = guest.ask(op::IMAGE_DATA, |w| {
            w.bytes(&[7; 32]);
            w.word(len);
            w.bytes(&[]);
        });
        assert_eq!(image, Ok(INVALID_VALUE));
        let module = guest.ask(op::MODULE_LOAD, |w| {
            w.word(handle::make(handle::MODULE, 0, 1, 1));
            w.bytes(&[7; 32]);
            w.word(len);
        });
        assert_eq!(module, Ok(INVALID_VALUE));
        // cuMemSetAccess with that many descriptors.
        let access = guest.ask(330, |w| {
            w.word(WINDOW);
            w.word(2 * MIB);
            w.bytes(&[]);
            w.word(len);
        });
        assert_eq!(access, Ok(INVALID_VALUE));
        // Memory to create (cuMemCreate), bytes to fill, at a place and of a length.
        let created = guest.ask(326, |w| {
            w.word(len);
            w.bytes(&[0; 32]);
            w.word(0);
        });
        assert!(matches!(created, Ok(status) if status != 0));
        assert!(matches!(guest.ask_words(300, &[WINDOW, 0, len, 0]), Ok(status) if status != 0));
        let written = guest.ask(op::WRITE_HOST, |w| {
            w.word(len);
            w.word(0);
            w.bytes(&[1; 64]);
        });
        assert_eq!(written, Ok(INVALID_VALUE));
    }
    assert_eq!(guest.ask_words(op::GRAPH_CREATE, &[handle::make(handle::GRAPH, 0, 1, 1), 0]), Ok(0));
    let nodes = guest.ask_words(op::GRAPH_NODES, &[handle::make(handle::GRAPH, 0, 1, 1), 0, u64::MAX]);
    assert_eq!(nodes, Ok(INVALID_VALUE));
    // Memory of the client to mirror: too much, beyond the end of addresses, at address 0, empty.
    for (address, len) in
        [(2 * WINDOW, 1 << 48), (2 * WINDOW, u64::MAX), (u64::MAX - 4095, 4096), (0, 4096), (4096, 0)]
    {
        for kind in 0..5 {
            let mirrored = guest.ask_words(op::MIRROR_HOST, &[1, kind, address, len]);
            assert!(
                matches!(mirrored, Ok(status) if status != 0),
                "{kind}: {len} at {address:#x}: {mirrored:?}"
            );
        }
    }
    // At the worker's window, no managed variable, not allocated, an unknown kind.
    for (kind, at) in
        [(mirror::SAME, WINDOW), (mirror::MANAGED, WINDOW), (mirror::DEVICE, WINDOW + 2 * MIB), (4, WINDOW)]
    {
        let mirrored = guest.ask_words(op::MIRROR_HOST, &[1, kind, at, 4096]);
        assert!(matches!(mirrored, Ok(status) if status != 0), "{kind}: {mirrored:?}");
    }
    assert_eq!(guest.ask_words(op::UNMIRROR_HOST, &[1]), Ok(INVALID_VALUE));
    // Inline data of another length than announced.
    let copied = guest.ask(op::COPY_TO_DEVICE, |w| {
        [WINDOW, 4096, 0, 1].into_iter().for_each(|word| w.word(word));
        w.bytes(&[1; 100]);
    });
    assert_eq!(copied, Ok(INVALID_VALUE));
    // An invalid node, kernel or memory.
    assert!(matches!(guest.ask_words(348, &[0x1234]), Ok(status) if status != 0));
    assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0));
}

#[test]
fn mirrors_are_bounded_and_copies_stay_within_them() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    const AT: u64 = 0x10_0000;
    const HALF: u64 = STAGING / 4;
    let mirrored = |guest: &mut Raw, id: u64, len: u64| {
        guest.ask_words(op::MIRROR_HOST, &[id, mirror::ANYWHERE, AT + 24, len])
    };
    assert_eq!(mirrored(&mut guest, 1, 4096), Ok(0));
    assert_eq!(mirrored(&mut guest, 1, 4096), Ok(INVALID_VALUE), "a number that is in use");
    assert_eq!(mirrored(&mut guest, 2, HALF), Ok(0));
    // A mirror and the bytes that the client knows are two copies.
    assert_eq!(mirrored(&mut guest, 3, HALF), Ok(OUT_OF_MEMORY));
    worker.wait_for(|m| matches!(m, FromWorker::StagingFull { bytes } if *bytes == STAGING + 2 * 4096));
    assert_eq!(guest.ask_words(op::UNMIRROR_HOST, &[2]), Ok(0));
    assert_eq!(mirrored(&mut guest, 3, HALF), Ok(0), "what is given up counts no more");
    let write = |guest: &mut Raw, offset: u64, len: usize| {
        guest.ask(op::WRITE_HOST, |w| {
            w.word(1);
            w.word(offset);
            w.bytes(&vec![1; len]);
        })
    };
    assert_eq!(write(&mut guest, 4000, 96), Ok(0));
    for (offset, len) in [(4000, 97), (4096, 1), (u64::MAX, 1), (u64::MAX - 7, 8)] {
        assert_eq!(write(&mut guest, offset, len), Ok(INVALID_VALUE), "{len} at {offset}");
    }
    // Copies of one row between device memory and a mirror: source offset, length, regions of
    // source and target.
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    let copy = |guest: &mut Raw, offset: u64, len: u64, regions: [u64; 2]| {
        const HOST: u64 = 1;
        const DEVICE: u64 = 2;
        let source = [0, 0, 0, 0, HOST, offset, 0, 0, 0, len, 1];
        let target = [0, 0, 0, 0, DEVICE, 0, WINDOW, 0, 0, len, 1];
        let words: Vec<u8> =
            source.iter().chain(&target).chain(&[len, 1, 1]).flat_map(|w| w.to_le_bytes()).collect();
        guest.ask(op::COPY_HOST, |w| {
            w.word(0);
            regions.iter().for_each(|region| w.word(*region));
            w.bytes(&words);
        })
    };
    assert_eq!(copy(&mut guest, 96, 4000, [1, 0]), Ok(0));
    for (offset, len, regions) in
        [(97, 4000, [1, 0]), (u64::MAX, 8, [1, 0]), (0, 8, [0, 0]), (0, 8, [9, 0]), (0, 8, [1, 1])]
    {
        assert_eq!(
            copy(&mut guest, offset, len, regions),
            Ok(INVALID_VALUE),
            "{len} at {offset} {regions:?}"
        );
    }
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

#[test]
fn lanes_without_the_secret_are_refused() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut early = worker.stranger(FIRST_UP_LANE);
    early.write(&frame(op::LANE, 1, |w| w.bytes(&[0; 32])));
    assert!(early.refusal().contains("lane before the greeting"));
    assert!(worker.refusal().contains("lane before the greeting"));

    let mut guest = worker.guest();
    let right = *blake3::keyed_hash(&guest.secret, &FIRST_UP_LANE.to_le_bytes()).as_bytes();
    let wrong = "lane without the secret of the first one";
    let cases: [(u16, u16, &[u8], &str); 7] = [
        (FIRST_UP_LANE, op::LANE, &[0; 32], wrong),
        (FIRST_UP_LANE, op::LANE, &right[..31], wrong),
        (FIRST_UP_LANE, op::LANE, &[], wrong),
        // The proof of one lane does not fit another.
        (FIRST_UP_LANE + 1, op::LANE, &right, wrong),
        (FIRST_DOWN_LANE, op::LANE, &right, wrong),
        (0, op::LANE, &right, "unexpected first frame"),
        (FIRST_UP_LANE, op::HELLO, &right, "unexpected first frame"),
    ];
    for (number, operation, proof, reason) in cases {
        let mut stranger = worker.stranger(number);
        stranger.write(&frame(operation, 1, |w| w.bytes(proof)));
        // A client that knows the greeting receives the reason; the worker closes any other
        // connection.
        if reason == wrong {
            assert_eq!(stranger.refusal(), wrong);
        } else {
            assert!(stranger.hung_up());
        }
        let refusal = worker.refusal();
        assert!(refusal.contains(reason), "{refusal}, not {reason}");
    }
    for number in [FIRST_DOWN_LANE + DOWN_LANES, u16::MAX] {
        assert!(lane(&worker, &guest, number).refusal().contains("does not exist"));
        assert!(worker.refusal().contains("does not exist"));
    }
    // A lane has one connection: further ones would each keep memory and counters.
    let first = lane(&worker, &guest, FIRST_UP_LANE);
    worker.wait_for(|m| matches!(m, FromWorker::Admitted { lane: FIRST_UP_LANE, .. }));
    assert!(lane(&worker, &guest, FIRST_UP_LANE).refusal().contains("is open already"));
    assert!(worker.refusal().contains("is open already"));
    drop(first);
    assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0));
}

#[test]
fn chunks_that_do_not_fit_are_errors() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    let mut up = lane(&worker, &guest, FIRST_UP_LANE);
    // For a transfer that no frame announces.
    send_chunk(&mut up, 1 << 40, 0, &[1; 4096]);
    // Outside the transfer, longer than it, and at an offset that wraps around.
    let outside = [(200_000, 8), (0, 200_008), (199_996, 8), (u64::MAX - 7, 16), (u64::MAX, 8)];
    let mut lanes: Vec<Raw> = (1..5).map(|i| lane(&worker, &guest, FIRST_UP_LANE + i)).collect();
    for (i, (offset, len)) in outside.into_iter().enumerate() {
        send_chunk(&mut lanes[i % 4], guest.seq + 1, offset, &pattern(len, 1));
        let status = guest.ask_words(op::COPY_TO_DEVICE, &[WINDOW, 200_000, 0, 0]);
        assert_eq!(status, Ok(INVALID_VALUE), "{len} bytes at {offset}");
    }
    let good = pattern(200_000, 2);
    send_chunk(&mut lanes[2], guest.seq + 1, 0, &good);
    assert_eq!(guest.ask_words(op::COPY_TO_DEVICE, &[WINDOW, 200_000, 0, 0]), Ok(0));

    // A malformed chunk ends the lane, and transfers fail instead of waiting forever for bytes.
    let mut long = chunk_header(2, 7, 0, CHUNK + 8, 0);
    long.len = ((CHUNK + 8) as u32).into();
    up.write(long.as_bytes());
    assert!(up.refusal().contains("not a chunk"));
    assert!(worker.refusal().contains("not a chunk"));
    assert_eq!(guest.ask_words(op::COPY_TO_DEVICE, &[WINDOW, 200_000, 0, 0]), Ok(46));
    assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0));
    guest.close();
    assert_eq!(worker.ended(), "the client's process exited");
}

#[test]
fn chunks_of_a_failed_copy_are_discarded() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    let mut up = lane(&worker, &guest, FIRST_UP_LANE);
    // More chunks than the lane has room for, before and after the failure; the stream is invalid.
    let bytes = pattern(100_000, 3);
    let failing = guest.seq + 1;
    send_chunk(&mut up, failing, 0, &bytes);
    let words = [WINDOW, 10 * 100_000, stream(7), 0];
    assert!(matches!(guest.ask_words(op::COPY_TO_DEVICE, &words), Ok(status) if status != 0));
    for i in 1..10 {
        send_chunk(&mut up, failing, i * 100_000, &bytes);
    }
    send_chunk(&mut up, guest.seq + 1, 0, &bytes);
    assert_eq!(guest.ask_words(op::COPY_TO_DEVICE, &[WINDOW, 100_000, 0, 0]), Ok(0));
    // A copy to the program that fails also ends if no reply is awaited.
    let seq = guest.seq + 1;
    let mut read = frame_of(1, op::COPY_FROM_DEVICE, seq, |w| {
        [WINDOW, 100_000, stream(7), 0].into_iter().for_each(|word| w.word(word));
    });
    no_wait(&mut read);
    guest.seq = seq;
    guest.write(&read);
    let (header, _) = guest.frame().expect("its end");
    assert_eq!((header.op.get(), header.seq.get()), (op::LANDED, seq));
    assert_ne!(header.ctx.get(), 0);
}

/// Turns a frame into one without a reply.
fn no_wait(frame: &mut [u8]) {
    let flags = std::mem::offset_of!(gpusession_proto::frame::Header, flags);
    frame[flags..flags + 2].fill(0);
}

/// `CUstreamBatchMemOpParams`: a wait until the window's first word is at least 1, and its write.
const WAIT_FOR_FLAG: [u64; 6] = [1, WINDOW, 1, 0, 0, 0];
const WRITE_FLAG: [u64; 6] = [2, WINDOW, 1, 0, 0, 0];

fn batch(slot: u32, item: [u64; 6]) -> impl Fn(&mut gpusession_proto::frame::Writer<'_>) {
    move |w| {
        w.word(stream(slot));
        w.word(0);
        w.bytes(item.as_bytes());
    }
}

/// Creates streams 1 and 2, the flag (0) and data memory; returns the address of the data.
fn two_streams_and_a_flag(guest: &mut Raw) -> u64 {
    let data = WINDOW + 2 * MIB;
    for address in [WINDOW, data] {
        assert_eq!(guest.ask_words(op::ALLOC, &[address, 2 * MIB, 0]), Ok(0));
    }
    for slot in [1, 2] {
        assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(slot), 1, 0]), Ok(0));
    }
    assert_eq!(guest.ask_words(300, &[WINDOW, 0, 8, stream(1)]), Ok(0));
    assert_eq!(guest.ask_words(op::STREAM_SYNC, &[stream(1)]), Ok(0));
    data
}

#[test]
fn small_copies_on_a_stream_that_stands_still_hold_up_no_other() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    let data = two_streams_and_a_flag(&mut guest);
    let mut seq = guest.seq;
    let mut frames = Vec::new();
    let mut push = |operation, waits: bool, body: &dyn Fn(&mut gpusession_proto::frame::Writer<'_>)| {
        seq += 1;
        let mut frame = frame_of(1, operation, seq, body);
        if !waits {
            no_wait(&mut frame);
        }
        frames.extend_from_slice(&frame);
        seq
    };
    push(op::STREAM_BATCH, false, &batch(1, WAIT_FOR_FLAG));
    // More copies than slots, all of one thread, which then copies and releases them by another
    // stream.
    let small: Vec<u64> = (0..100)
        .map(|_| {
            push(op::COPY_FROM_DEVICE, false, &|w| {
                [data, 8, stream(1), 0].into_iter().for_each(|word| w.word(word));
            })
        })
        .collect();
    let read = push(op::COPY_FROM_DEVICE, true, &|w| {
        [data, 8, stream(2), 1].into_iter().for_each(|word| w.word(word));
    });
    let released = push(op::STREAM_BATCH, true, &batch(2, WRITE_FLAG));
    let synced = push(op::STREAM_SYNC, true, &|w| w.word(stream(1)));
    guest.seq = seq;
    guest.write(&frames);
    let (mut landed, mut answered) = (Vec::new(), Vec::new());
    while answered.len() < 3 || landed.len() < small.len() {
        let (header, _) = guest.frame().expect("an answer");
        assert_eq!(header.ctx.get(), 0, "{}", header.seq.get());
        match header.op.get() {
            op::LANDED => landed.push(header.seq.get()),
            _ => answered.push(header.seq.get()),
        }
    }
    assert_eq!(answered, [read, released, synced]);
    landed.sort_unstable();
    assert_eq!(landed, small);
}

#[test]
fn an_address_that_wraps_around_is_an_error() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    let mut up = lane(&worker, &guest, FIRST_UP_LANE);
    send_chunk(&mut up, guest.seq + 1, 8, &[1; 100_000]);
    send_chunk(&mut up, guest.seq + 1, 100_008, &[1; 99_992]);
    let status = guest.ask_words(op::COPY_TO_DEVICE, &[u64::MAX - 3, 199_992, 0, 0]);
    assert!(matches!(status, Ok(status) if status != 0), "{status:?}");
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
        assert_eq!(first.ended_within(PATIENCE), "the client's process exited");
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
                        assert!(ended.elapsed() < PATIENCE, "{:?}", ended.elapsed());
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
    let end = Instant::now() + PATIENCE;
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

/// Returns a `CUDA_MEMCPY3D` of `width` times 2 bytes; memory types are 1 host, 2 device.
fn copy_of_box(source: (u64, u64), target: (u64, u64), width: u64) -> [u64; 25] {
    let mut words = [0; 25];
    let side = |words: &mut [u64], (kind, address): (u64, u64)| {
        words[0] = kind;
        words[if kind == 1 { 1 } else { 2 }] = address;
        (words[5], words[6]) = (width, 2);
    };
    side(&mut words[4..], source);
    side(&mut words[15..], target);
    (words[22], words[23], words[24]) = (width, 2, 1);
    words
}

#[test]
fn boxes_do_not_reach_the_worker_s_own_memory() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 4 * MIB, 0]), Ok(0));
    let device = (2, WINDOW);
    let mut copy = |words: [u64; 25], direction: u64, len: u64| {
        guest.ask(op::COPY_BOX, |w| {
            w.bytes(words.as_bytes());
            [0, direction, len].into_iter().for_each(|word| w.word(word));
            if direction == 1 {
                w.bytes(&vec![1; len as usize]);
            }
        })
    };
    assert_eq!(copy(copy_of_box(device, (1, 0), 4096), 2, 8192), Ok(0));
    assert_eq!(copy(copy_of_box((1, 0), device, 4096), 1, 8192), Ok(0));
    assert_eq!(copy(copy_of_box(device, (2, WINDOW + MIB), 4096), 0, 8192), Ok(0));
    // A packed side that is shorter than the box.
    assert_eq!(copy(copy_of_box((1, 0), device, MIB), 1, 8), Ok(INVALID_VALUE));
    assert_eq!(copy(copy_of_box(device, (1, 0), MIB), 2, 8), Ok(INVALID_VALUE));
    // Host addresses although both sides are on the device.
    assert_eq!(copy(copy_of_box((1, 4096), device, 4096), 0, 8192), Ok(INVALID_VALUE));
    assert_eq!(copy(copy_of_box(device, (1, 4096), 4096), 0, 8192), Ok(INVALID_VALUE));
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
fn a_free_waits_for_the_copies_of_a_blocked_thread() {
    const COPIES: u64 = 1200; // more than a stream's queue takes
    const BLOCKED: u32 = 1;
    const FREEING: u32 = 2;
    const RELEASING: u32 = 3;
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    let data = two_streams_and_a_flag(&mut guest);
    let mut seq = guest.seq;
    let mut frames = Vec::new();
    let mut push = |thread, operation, body: &dyn Fn(&mut gpusession_proto::frame::Writer<'_>)| {
        seq += 1;
        frames.extend_from_slice(&frame_of(thread, operation, seq, body));
        seq
    };
    let mut copies = vec![push(BLOCKED, op::STREAM_BATCH, &batch(1, WAIT_FOR_FLAG))];
    for _ in 0..COPIES {
        copies.push(push(BLOCKED, op::COPY_TO_DEVICE, &|w| {
            [data, 8, stream(1), 1].into_iter().for_each(|word| w.word(word));
            w.bytes(&[7; 8]);
        }));
    }
    let freed = push(FREEING, op::FREE, &|w| w.word(data));
    let released = push(RELEASING, op::STREAM_BATCH, &batch(2, WRITE_FLAG));
    guest.seq = seq;
    guest.write(&frames);
    // Answers arrive as the frames are done, from more than one thread.
    let mut done = Vec::new();
    while done.len() < copies.len() + 2 {
        let (header, _) = guest.frame().expect("an answer");
        assert_eq!((header.op.get(), header.ctx.get()), (op::REPLY, 0), "{}", header.seq.get());
        done.push(header.seq.get());
    }
    assert!(done.contains(&released));
    let at = |seq: u64| done.iter().position(|s| *s == seq).expect("answered");
    assert!(copies.iter().all(|copy| at(*copy) < at(freed)), "the free is behind the copies");
}

#[test]
fn later_frames_stay_behind_a_synchronisation_without_waiter() {
    const LEN: usize = 200_000;
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    for slot in [1, 2] {
        assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(slot), 1, 0]), Ok(0));
    }
    let mut up = lane(&worker, &guest, FIRST_UP_LANE);
    // One thread copies and has synchronised. Another one then reads by another stream, before the
    // bytes arrive.
    let first = guest.seq + 1;
    let words =
        |words: [u64; 4]| move |w: &mut gpusession_proto::frame::Writer<'_>| w.words(words.as_bytes());
    let copy = frame_of(1, op::COPY_TO_DEVICE, first, words([WINDOW, LEN as u64, stream(1), 0]));
    let mut sync = frame_of(1, op::STREAM_SYNC, first + 1, |w| w.word(stream(1)));
    let flags = std::mem::offset_of!(gpusession_proto::frame::Header, flags);
    sync[flags..flags + 2].fill(0);
    let read =
        frame_of(2, op::COPY_FROM_DEVICE, first + 2, words([WINDOW + LEN as u64 - 8, 8, stream(2), 1]));
    guest.seq = first + 2;
    guest.write(&[copy, sync, read].concat());
    // Time for a wrong overtaking to happen.
    std::thread::sleep(Duration::from_millis(20));
    let bytes = pattern(LEN, 5);
    send_chunk(&mut up, first, 0, &bytes);
    let (header, _) = guest.frame().expect("an answer");
    assert_eq!((header.seq.get(), header.ctx.get()), (first, 0));
    let (header, body) = guest.frame().expect("an answer");
    assert_eq!((header.seq.get(), header.ctx.get()), (first + 2, 0));
    assert_eq!(body[8..16], bytes[LEN - 8..]);
}

/// Requests more bytes than the worker can send to a client that does not read.
fn ask_for_much(guest: &mut Raw, threads: u32, requests: u64) -> u64 {
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    let first = guest.seq + 1;
    for i in 0..requests {
        guest.seq += 1;
        let request = frame_of(1 + i as u32 % threads, op::COPY_FROM_DEVICE, guest.seq, |w| {
            [WINDOW, INLINE_MAX as u64, 0, 1].into_iter().for_each(|word| w.word(word));
        });
        guest.write(&request);
    }
    first
}

#[test]
fn a_client_that_does_not_read_cannot_keep_its_worker_from_ending() {
    let machine = Machine::new();
    for stop in [true, false] {
        let mut worker = Worker::start(&machine);
        let mut guest = worker.guest();
        ask_for_much(&mut guest, 1, 1000);
        // Waits until the answers have filled all buffers between the two.
        let deadline = Instant::now() + PATIENCE;
        let (mut unread, mut since) = (0, Instant::now());
        while unread == 0 || since.elapsed() < Duration::from_millis(200) {
            assert!(Instant::now() < deadline, "no answers");
            let now = waiting_to_be_read(&guest);
            if now != unread {
                (unread, since) = (now, Instant::now());
            }
            std::thread::yield_now();
        }
        if stop {
            worker.tell(&ToWorker::Stop { reason: "enough".into() });
            worker.ended_within(Duration::from_secs(5));
        } else {
            worker.abandoned();
        }
    }
}

fn waiting_to_be_read(guest: &Raw) -> i32 {
    use std::os::fd::AsRawFd;
    let mut bytes: i32 = 0;
    // SAFETY: FIONREAD writes one int, which `bytes` is.
    let done = unsafe { nix::libc::ioctl(guest.stream.as_raw_fd(), nix::libc::FIONREAD, &raw mut bytes) };
    assert_eq!(done, 0);
    bytes
}

#[test]
fn answers_stay_whole_when_the_client_reads_slowly() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    const REQUESTS: u64 = 800;
    let first = ask_for_much(&mut guest, 4, REQUESTS);
    let mut open: std::collections::HashSet<u64> = (first..first + REQUESTS).collect();
    while !open.is_empty() {
        let (header, body) = guest.frame().expect("an answer");
        assert_eq!((header.op.get(), header.ctx.get()), (op::REPLY, 0));
        assert_eq!(body.len(), 8 + INLINE_MAX);
        assert_eq!(Reader::new(&body).bytes().map(<[u8]>::len), Ok(INLINE_MAX));
        assert!(open.remove(&header.seq.get()), "answered once");
    }
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
fn random_frames_never_hang_a_worker() {
    let machine = Machine::new();
    // For a longer search: WORKER_FUZZ="seed seconds".
    let wanted = std::env::var("WORKER_FUZZ").unwrap_or_else(|_| "1 4".into());
    let (seed, seconds) = wanted.split_once(' ').expect("two numbers");
    let (seed, seconds): (u64, u64) = (seed.parse().expect("a number"), seconds.parse().expect("a number"));
    let mut random = Random::new(0x9e37_79b9_7f4a_7c15 ^ seed << 17);
    let until = Instant::now() + Duration::from_secs(seconds);
    let (mut rounds, mut calls, mut done) = (0, 0, 0);
    while Instant::now() < until || rounds < 8 || done <= 20 {
        let mut worker = Worker::start(&machine);
        let pid = worker.pid();
        let mut guest = worker.guest();
        assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 4 * MIB, 0]), Ok(0));
        for slot in 0..2 {
            assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(slot), 1, 0]), Ok(0));
            assert_eq!(guest.ask_words(op::EVENT_CREATE, &[event(slot), 0]), Ok(0));
        }
        let mut sent = Vec::new();
        let (mut expected, mut answered) = (0, 0);
        if rounds % 16 == 0 {
            expected = 1;
            sent = pattern(1 + random.below(5000) as usize, random.next());
        } else {
            for seq in guest.seq + 1..guest.seq + 1 + random.below(60) {
                let mut bytes = sensible(&mut random, seq);
                expected += 1;
                // Most frames stay as they are, others get a few changed bytes; the length field
                // rarely changes.
                if random.below(16) == 0 {
                    for _ in 0..1 + random.below(3) {
                        let from = if random.below(16) == 0 { 0 } else { 4 };
                        let at = from + random.below((bytes.len() - from) as u64) as usize;
                        bytes[at] = random.next() as u8;
                    }
                }
                sent.extend_from_slice(&bytes);
            }
        }
        guest.write(&sent);
        // Does not wait for frames that wait for something that never comes.
        let _ = guest.stream.set_read_timeout(Some(Duration::from_millis(100)));
        while answered < expected {
            match guest.frame_if_any() {
                Some((header, _)) if header.op.get() == op::REPLY => {
                    (answered, calls) = (answered + 1, calls + 1);
                    done += u64::from(header.ctx.get() == 0);
                }
                Some(_) => {}
                None => break,
            }
        }
        guest.close();
        worker.exited();
        assert!(!exists(pid));
        rounds += 1;
    }
    println!("{rounds} workers answered {calls} calls, {done} of them with success");
}

/// Returns a frame that is valid by itself, if not after the others.
fn sensible(random: &mut Random, seq: u64) -> Vec<u8> {
    // All but copies of boxes: see `boxes_do_not_reach_the_worker_s_own_memory`.
    let operations: Vec<u16> = (op::CTX_CREATE..=op::TENSOR_MAP)
        .chain(300..=360)
        .filter(|operation| !matches!(operation, 18 | 19 | 29 | 36..=39 | 53..=59 | 63..=69 | &op::COPY_BOX))
        .collect();
    let operation = operations[random.below(operations.len() as u64) as usize];
    let thread = 1 + random.below(3) as u32;
    let slot = random.below(3) as u32;
    let words = random.below(7);
    let kind = match operation {
        3..=9 => handle::CTX,
        20..=29 => handle::STREAM,
        30..=35 => handle::EVENT,
        40..=48 => handle::MODULE,
        49..=60 => handle::FUNC,
        70..=79 if random.below(2) == 0 => handle::EXEC,
        70..=79 => handle::GRAPH,
        _ => handle::STREAM,
    };
    // Small numbers are lengths of strings, too: with them, most frames can be read to their end.
    let small = random.below(4) > 0;
    let len = random.below(100) as usize;
    frame_of(thread, operation, seq, |w| {
        for i in 0..words {
            let word = match random.below(6) {
                _ if i == 0 && (20..80).contains(&operation) => handle::make(kind, 0, 1, slot),
                _ if small && i > 2 => random.below(4),
                0 => WINDOW + random.below(4) * 2 * MIB,
                1 => 2 * MIB,
                2 => random.below(4),
                3 => handle::make(kind, 0, 1, slot),
                4 => stream(slot),
                _ => len as u64,
            };
            w.word(word);
        }
        if random.below(2) == 0 {
            w.bytes(&vec![7; len]);
            w.bytes(&[7; 32]);
        }
        w.words(&[0; 256]);
    })
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
