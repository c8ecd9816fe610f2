//! A broken worker or an impostor can only end a program's connection, with a reason.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::time::{Duration, Instant};

use gpusession_link::Link;
use gpusession_link::link::{Caller, LinkLost};
use gpusession_proto::frame::{HEADER, Header, MAX_BODY, op};
use gpusession_proto::grant::Endpoint;
use gpusession_proto::preface;
use gpusession_test_link::peer::link;
use zerocopy::IntoBytes as _;

const CALLER: Caller = Caller { thread: 1, ctx: 1 };
/// Longer than any correct answer takes.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the reason that a program's calls get after the peer sent `garbage`.
fn told(garbage: Vec<u8>) -> String {
    let link = link(Some(garbage));
    let begun = Instant::now();
    let call = || link.call(op::STREAM_SYNC, CALLER, |w| w.word(0)).map(|reply| reply.status);
    let Err(LinkLost(reason)) = call() else { panic!("an answer") };
    assert!(begun.elapsed() < TEST_TIMEOUT);
    assert_eq!(call(), Err(LinkLost(reason.clone())), "the first reason stays");
    reason
}

fn frame(op: u16, seq: u64, body: &[u8]) -> Vec<u8> {
    let header = Header {
        len: (body.len() as u32).into(),
        op: op.into(),
        seq: seq.into(),
        number: 2.into(),
        ..header()
    };
    [header.as_bytes(), body].concat()
}

fn header() -> Header {
    Header::parse(&[0; HEADER]).unwrap()
}

#[test]
fn a_worker_that_makes_no_sense_is_lost_with_a_reason() {
    let reply = frame(op::REPLY, 2, &[0; 64]);
    let cases = [
        (Vec::new(), "connection to gpu1 lost"),
        (reply[..HEADER - 1].to_vec(), "connection to gpu1 lost"),
        (reply[..HEADER + 8].to_vec(), "connection to gpu1 lost"),
        // A reply to no call.
        (frame(op::REPLY, 1 << 40, &[0; 64]), "connection to gpu1 lost"),
        // Landed data of no copy.
        (
            frame(op::LANDED, 1 << 40, &[8, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]),
            "connection to gpu1 lost",
        ),
        (frame(0xffff, 2, &[]), "unknown frame"),
        (frame(op::OUTPUT, 2, &[0xff; 16]), "malformed frame"),
        (frame(op::HOST_CHANGED, 2, &[0xff; 24]), "malformed frame"),
        (frame(op::REPLY, 2, &[0; 3]), "malformed frame"),
        (((MAX_BODY as u32 + 8).to_le_bytes()).repeat(HEADER / 4), "malformed frame"),
        (b"\x10\0\0\x80the server stops".to_vec(), "the server stops"),
    ];
    for (garbage, expected) in cases {
        let shown = format!("{:02x?}", &garbage[..garbage.len().min(64)]);
        let reason = told(garbage);
        assert!(reason.contains(expected), "{shown}: {reason}");
    }
}

/// Returns the endpoint of a server that listens there.
fn endpoint_at(listener: &TcpListener, fingerprint: Option<[u8; 32]>) -> Endpoint {
    Endpoint {
        server: "gpu1".into(),
        addresses: vec![listener.local_addr().unwrap().to_string()],
        worker: [0; 16],
        key: preface::Key::new(&[0; 32], &[0; 16], 0),
        fingerprint,
        ticket: vec![0; 100],
        lease: "abcdefghijkl".into(),
        devices: 1,
    }
}

/// Returns the reason for a server that replies `answer` to a connection's first bytes.
fn told_at_once(answer: &'static [u8], fingerprint: Option<[u8; 32]>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = endpoint_at(&listener, fingerprint);
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.read_exact(&mut [0; preface::LEN]).unwrap();
        socket.write_all(answer).unwrap();
        let _ = socket.shutdown(Shutdown::Write);
        while socket.read(&mut [0; 4096]).is_ok_and(|n| n > 0) {}
    });
    let opened = Link::open(&endpoint, Box::new(gpusession_test_link::peer::Quiet), |_| {});
    let Err(LinkLost(reason)) = opened else { panic!("a link") };
    reason
}

#[test]
fn a_refusal_arrives_with_and_without_encryption() {
    let answer: &'static [u8] = preface::refusal(preface::Code::Gone, "no such worker").leak();
    for fingerprint in [None, Some([1; 32])] {
        let reason = told_at_once(answer, fingerprint);
        assert!(reason.ends_with(": no such worker"), "{reason}");
        // A refusal that is cut short, and no answer at all.
        for end in [0, 3, 9] {
            let reason = told_at_once(&answer[..end], fingerprint);
            assert!(reason.contains("gpu1"), "{reason}");
        }
    }
}

#[test]
fn a_name_leads_to_no_port_of_this_machine() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let endpoint = Endpoint { addresses: vec![format!("localhost:{port}")], ..endpoint_at(&listener, None) };
    let opened = Link::open(&endpoint, Box::new(gpusession_test_link::peer::Quiet), |_| {});
    let Err(LinkLost(reason)) = opened else { panic!("a link") };
    assert!(reason.contains("which is not another machine"), "{reason}");
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "no connection");
}

#[test]
fn no_bytes_make_a_program_hang_or_fail() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for _ in 0..200 {
        let mut garbage: Vec<u8> = (0..next() % 600).map(|_| next() as u8).collect();
        if next() % 2 == 0 && garbage.len() > 4 {
            // Plausible lengths reach more of the parser.
            garbage[..4].copy_from_slice(&((next() % 64) as u32 * 8).to_le_bytes());
        }
        assert!(!told(garbage).is_empty());
    }
}
