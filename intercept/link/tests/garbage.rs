//! What a worker that is broken, or somebody in its place, can do to a program: end its connection, and say why.

mod peer;

use std::time::{Duration, Instant};

use gpusession_link::link::{Caller, Lost};
use gpusession_proto::frame::{HEADER, Header, MAX_BODY, op};
use peer::link;
use zerocopy::IntoBytes as _;

const CALLER: Caller = Caller { thread: 1, ctx: 1 };
/// More than any answer takes, less than somebody would wait.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a program's calls are told.
fn told(garbage: Vec<u8>) -> String {
    let link = link(Some(garbage));
    let begun = Instant::now();
    let call = || link.call(op::STREAM_SYNC, CALLER, |w| w.word(0)).map(|reply| reply.status);
    let Err(Lost(reason)) = call() else { panic!("an answer") };
    assert!(begun.elapsed() < PATIENCE);
    assert_eq!(call(), Err(Lost(reason.clone())), "the first reason stays");
    reason
}

fn frame(op: u16, seq: u64, body: &[u8]) -> Vec<u8> {
    let header = Header { len: (body.len() as u32).into(), op: op.into(), seq: seq.into(), ..header() };
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
        // An answer that nobody waits for.
        (frame(op::REPLY, 1 << 40, &[0; 64]), "connection to gpu1 lost"),
        // What has landed belongs to no copy.
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
            // Lengths that could be true get further.
            garbage[..4].copy_from_slice(&((next() % 64) as u32 * 8).to_le_bytes());
        }
        assert!(!told(garbage).is_empty());
    }
}
