//! A link to a peer that answers the greeting and no other frame, for tests and the benchmark.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::sync::Arc;

use gpusession_link::{Events, Link};
use gpusession_proto::frame::{HEADER, Header, Writer, op};
use gpusession_proto::grant::Endpoint;
use gpusession_proto::preface;

pub struct Quiet;

impl Events for Quiet {
    fn output(&self, _: &[u8], _: &[u8]) {}
    fn call_host(&self, _: &Arc<Link>, _: u64, _: i32) {}
    fn host_changed(&self, _: u64, _: u64, _: &[u8]) {}
    fn lost(&self, _: &str) {}
}

fn peer(says: Option<Vec<u8>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("a client");
        let mut start = [0; preface::LEN + HEADER];
        socket.read_exact(&mut start).expect("a greeting");
        let mut header =
            Header::parse(start[preface::LEN..].try_into().expect("a header")).expect("a header");
        socket.read_exact(&mut vec![0; header.body_len()]).expect("a greeting");
        (header.op, header.ctx, header.number) = (op::REPLY.into(), 0.into(), 1.into());
        let mut reply = Vec::new();
        let mut w = Writer::new(&mut reply, &header);
        w.bytes(&[0; 32]);
        w.word(0);
        w.finish();
        socket.write_all(&reply).expect("a client");
        if let Some(bytes) = says {
            // The write fails if the client has closed the link by then.
            let _ = socket.write_all(&bytes);
            let _ = socket.shutdown(Shutdown::Write);
        }
        let mut buf = vec![0; 1 << 20];
        while socket.read(&mut buf).is_ok_and(|n| n > 0) {}
    });
    address
}

/// Returns the link; after the greeting its peer sends these bytes and ends the stream, or only
/// reads.
pub fn link(says: Option<Vec<u8>>) -> Arc<Link> {
    let endpoint = Endpoint {
        server: "gpu1".into(),
        addresses: vec![peer(says)],
        worker: [0; 16],
        key: preface::Key::new(&[0; 32], &[0; 16], 0),
        fingerprint: None,
        ticket: vec![0; 100],
        lease: "abcdefghijkl".into(),
        devices: 1,
    };
    Link::open(&endpoint, Box::new(Quiet), |_| {}).expect("the greeting is answered").0
}
