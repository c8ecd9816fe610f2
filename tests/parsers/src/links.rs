//! Bytes of a worker for a program's link, while transfers to the program are open.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use gpusession_link::Link;
use gpusession_link::lanes::{HostRange, On, chunk_header};
use gpusession_link::link::Caller;
use gpusession_proto::frame::{HEADER, Header, Writer, op};
use gpusession_proto::grant::Endpoint;
use gpusession_proto::{changes, preface};
use gpusession_test_link::peer::Quiet;

const CALLER: Caller = Caller { thread: 1, ctx: 1 };
const ON: On = On { ctx: 0, stream: 0, blocking: true };
/// Bytes before, of and behind the memory that transfers fill.
const PART: usize = 4096;
/// Memory of both transfers, of which the second one overlaps the first.
const FIRST: (usize, usize) = (PART, 2000);
const SECOND: (usize, usize) = (PART + 1000, 3096);
const UNTOUCHED: u8 = 0x5a;
/// Longer than a link takes that does not hang.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Serves a program's log and one lane of each direction; what it sends waits for a message.
fn peer(log: Vec<u8>, lane: Vec<u8>) -> (String, Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("bound").to_string();
    let (begin, begun) = channel();
    std::thread::spawn(move || {
        let sockets: Vec<TcpStream> = (0..3)
            .map_while(|number| {
                let (mut socket, _) = listener.accept().ok()?;
                if number == 0 {
                    greet(&mut socket);
                }
                let mut sink = socket.try_clone().ok()?;
                std::thread::spawn(move || std::io::copy(&mut sink, &mut std::io::sink()));
                Some(socket)
            })
            .collect();
        if begun.recv().is_ok() && sockets.len() == 3 {
            // The second lane leads to the program. Only the log ends: a lane's end would end the
            // link before the log is read.
            let _ = (&sockets[2]).write_all(&lane);
            let _ = (&sockets[0]).write_all(&log);
            let _ = sockets[0].shutdown(Shutdown::Write);
        }
        // Until the program has closed the link.
        let _ = begun.recv();
    });
    (address, begin)
}

fn greet(socket: &mut TcpStream) {
    let mut start = [0; preface::LEN + HEADER];
    socket.read_exact(&mut start).expect("a greeting");
    let header = start[preface::LEN..].try_into().expect("a header");
    let mut header = Header::parse(header).expect("a header");
    socket.read_exact(&mut vec![0; header.body_len()]).expect("a greeting");
    (header.op, header.ctx, header.number) = (op::REPLY.into(), 0.into(), 1.into());
    let mut reply = Vec::new();
    let mut w = Writer::new(&mut reply, &header);
    w.bytes(&[0; 32]);
    w.word(0);
    w.finish();
    socket.write_all(&reply).expect("a client");
}

/// Lets a program copy from a worker that sends bytes on the log and on a lane; returns its memory.
fn copies(log: Vec<u8>, lane: Vec<u8>) -> Vec<u8> {
    let (address, begin) = peer(log, lane);
    let endpoint = Endpoint {
        server: "gpu1".into(),
        addresses: vec![address],
        worker: [0; 16],
        key: preface::Key::new(&[0; 32], &[0; 16], 0),
        fingerprint: None,
        ticket: vec![0; 100],
        lease: "abcdefghijkl".into(),
        devices: 1,
    };
    let (link, _) = Link::open(&endpoint, Box::new(Quiet), |_| {}).expect("the greeting is answered");
    link.lanes_of(1).expect("a lane of each direction");
    let mut memory = vec![UNTOUCHED; 3 * PART];
    let start = memory.as_mut_ptr() as usize;
    let range = |(at, len)| {
        // SAFETY: the transfers are cancelled before the memory is read or freed.
        unsafe { HostRange::new(start + at, len) }
    };
    let first = link
        .post(op::COPY_FROM_DEVICE, CALLER, |w| link.down.expect(w.seq(), range(FIRST), ON, true, Vec::new()))
        .expect("a link");
    let second = link
        .post(op::COPY_FROM_DEVICE, CALLER, |w| {
            link.down.expect(w.seq(), range(SECOND), ON, false, vec![first])
        })
        .expect("a link");
    let _ = begin.send(());
    // A reply that the worker makes up does not end the link; the end of its bytes does.
    while link.call(op::STREAM_SYNC, CALLER, |w| w.word(0)).is_ok() {}
    let _ = link.down.wait(second);
    link.down.wait_detached(&|_| true, Duration::ZERO);
    link.down.cancel(first);
    link.close();
    let end = SECOND.0 + SECOND.1;
    assert!(
        memory[..PART].iter().chain(&memory[end..]).all(|byte| *byte == UNTOUCHED),
        "bytes beside a copy"
    );
    memory
}

/// The length of a lane's bytes, these, then those of the log.
pub fn link(bytes: &[u8]) {
    filled(bytes);
}

/// Returns the program's memory after these bytes.
fn filled(bytes: &[u8]) -> Option<Vec<u8>> {
    let (len, rest) = bytes.split_first_chunk::<2>()?;
    let (lane, log) = rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()));
    let (lane, log) = (lane.to_vec(), log.to_vec());
    let (done, is_done) = channel();
    let running = std::thread::spawn(move || {
        let memory = copies(log, lane);
        let _ = done.send(());
        memory
    });
    let ended = is_done.recv_timeout(TEST_TIMEOUT);
    assert!(ended != Err(std::sync::mpsc::RecvTimeoutError::Timeout), "the program hangs");
    Some(running.join().expect("the program continues"))
}

/// Returns a frame of the worker with its number on the connection.
fn frame(number: u32, operation: u16, seq: u64, body: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
    let header = Header { op: operation.into(), seq: seq.into(), number: number.into(), ..Header::empty() };
    let mut bytes = Vec::new();
    let mut w = Writer::new(&mut bytes, &header);
    body(&mut w);
    w.finish();
    bytes
}

/// Transfers that land by the log, by the lane in two pieces, and reports beside them.
pub fn seeds() -> Vec<Vec<u8>> {
    // The greeting is frame 1 of the log.
    const SEQ: (u64, u64) = (2, 3);
    let input =
        |lane: &[u8], log: &[&[u8]]| [&(lane.len() as u16).to_le_bytes()[..], lane, &log.concat()].concat();
    let landed = |number, seq, len| frame(number, op::LANDED, seq, |w| w.bytes(&vec![1; len]));
    let chunk = |number, seq, offset, len: usize| {
        let mut bytes = Vec::new();
        let mut w = Writer::new(&mut bytes, &chunk_header(number, seq, offset, len, 0));
        w.words(&vec![2; len.next_multiple_of(8)]);
        w.finish();
        bytes
    };
    let mut changed = Vec::new();
    changes::push(&mut changed, 4096, b"changed");
    let reports = [
        frame(2, op::HOST_CHANGED, 0, |w| {
            w.word(1);
            w.words(&changed);
        }),
        frame(3, op::REPLY, 4, |w| w.word(0)),
        frame(4, op::CALL_HOST, 0, |w| w.word(9)),
        landed(5, SEQ.1, SECOND.1),
    ];
    let lane = [chunk(1, SEQ.0, 0, 1200), chunk(2, SEQ.0, 1200, 800), chunk(3, SEQ.1, 0, SECOND.1)].concat();
    vec![
        input(&[], &[&landed(2, SEQ.0, FIRST.1), &landed(3, SEQ.1, SECOND.1)]),
        input(&lane, &[&frame(2, op::REPLY, 4, |w| w.word(0))]),
        input(&lane[..HEADER + 1200], &[&reports.concat()]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_reach_the_programs_memory() {
        for (seed, value) in seeds().into_iter().zip([1, 2, 1]) {
            // The end of the log may overtake a lane's bytes.
            let landed = (0..1000).any(|_| {
                let memory = filled(&seed).unwrap();
                memory[SECOND.0..SECOND.0 + SECOND.1].iter().all(|byte| *byte == value)
            });
            assert!(landed, "the seed of {value}");
        }
    }
}
