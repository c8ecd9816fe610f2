//! What it costs a program's thread to put a kernel launch into the log: encoding, the lock, waking the sender. The other
//! end reads and discards, as a worker does whose GPU keeps up. Then the same in bursts, and which system calls the thread makes.

mod syscalls;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group};
use gpusession_link::link::Caller;
use gpusession_link::{Events, Link};
use gpusession_proto::frame::{HEADER, Header, Writer, op};
use gpusession_proto::grant::Endpoint;
use gpusession_proto::preface;

struct Quiet;

impl Events for Quiet {
    fn output(&self, _: &[u8], _: &[u8]) {}
    fn call_host(&self, _: &Arc<Link>, _: u64) {}
    fn host_changed(&self, _: u64, _: u64, _: &[u8]) {}
    fn lost(&self, _: &str) {}
}

/// A peer that answers the greeting and swallows the rest.
fn sink() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("a client");
        let mut start = [0; preface::LEN + HEADER];
        socket.read_exact(&mut start).expect("a greeting");
        let mut header =
            Header::parse(start[preface::LEN..].try_into().expect("a header")).expect("a header");
        let mut body = vec![0; header.body_len()];
        socket.read_exact(&mut body).expect("a greeting");
        header.op = op::REPLY.into();
        header.ctx = 0.into();
        let mut reply = Vec::new();
        let mut w = Writer::new(&mut reply, &header);
        w.bytes(&[0; 32]);
        w.finish();
        socket.write_all(&reply).expect("a client");
        let mut buf = vec![0; 1 << 20];
        while socket.read(&mut buf).is_ok_and(|n| n > 0) {}
    });
    address
}

fn link() -> Arc<Link> {
    let endpoint = Endpoint {
        server: "sink".into(),
        addresses: vec![sink()],
        worker: [0; 16],
        fingerprint: None,
        ticket: vec![0; 100],
        lease: "abcdefghijkl".into(),
        devices: 1,
    };
    Link::open(&endpoint, Box::new(Quiet), |_| {}).expect("the sink answers").0
}

fn launch(link: &Link) {
    const CALLER: Caller = Caller { thread: 1, ctx: 1 };
    let posted = link.post(op::LAUNCH, CALLER, |w| {
        for word in 0..6 {
            w.word(word);
        }
        w.bytes(&[]);
        w.bytes(&[0; 64]);
    });
    posted.expect("the sink reads");
}

fn enqueue(c: &mut Criterion) {
    let link = link();
    c.bench_function("enqueue a launch with 64 bytes of parameters", |b| b.iter(|| launch(&link)));
}

/// As a program does it that computes, launches, computes: nanoseconds of each launch.
fn bursts() -> Vec<u64> {
    let link = link();
    let mut times = Vec::with_capacity(100 * 1000);
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(2));
        syscalls::mark();
        for _ in 0..1000 {
            let begun = Instant::now();
            launch(&link);
            times.push(begun.elapsed().as_nanos() as u64);
        }
        syscalls::mark();
    }
    times
}

criterion_group!(benches, enqueue);

fn main() {
    const TRACED: &str = "traced";
    if std::env::args().any(|word| word == TRACED) {
        bursts();
        return;
    }
    benches();
    let mut again = Command::new(std::env::current_exe().expect("a program"));
    syscalls::report("enqueue a launch", &mut bursts(), syscalls::count(again.arg(TRACED)));
}
