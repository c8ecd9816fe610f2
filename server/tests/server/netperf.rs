//! Endpoints of `gpusession netperf` against hostile clients.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use gpusession_proto::control::{MeasureReply, MeasureRequest};
use gpusession_proto::frame::{CHUNK, HEADER, Header, Reader, WAIT, Writer, op};
use gpusession_proto::measure::MAX_TRANSFER;
use gpusession_proto::preface::{FLAG_TLS, Key, Preface, Refusal};
use gpusession_proto::ticket::Ticket;
use tonic::Code;
use zerocopy::IntoBytes;

use crate::workers::Site;
use gpusession_test_server::{Server, alive, eventually, rest};

/// An endpoint as its client knows it.
pub struct Endpoint<'a> {
    server: &'a Server,
    id: [u8; 16],
    key: [u8; 32],
}

impl<'a> Endpoint<'a> {
    pub fn new(server: &'a Server, reply: MeasureReply) -> Self {
        let id = reply.endpoint.unwrap().id.try_into().unwrap();
        Self { server, id, key: reply.key.try_into().unwrap() }
    }

    fn ticket(&self) -> Ticket {
        Ticket {
            lease: String::new(),
            worker: self.id,
            uid: 1000,
            pid: 42,
            boot_id: [1; 16],
            issued_usec: 0,
            nonce: [9; 16],
            program: String::new(),
            executable: String::new(),
            user: String::new(),
        }
    }

    /// Connects a lane with a preface of this key.
    fn connect(&self, key: &[u8; 32], lane: u16, flags: u16) -> TcpStream {
        let preface = Preface::new(self.id, &Key::new(key, &self.id, 1000), lane, 1, flags);
        self.server.data_connection(preface.as_bytes())
    }

    /// Opens a session, and returns its log and its secret.
    pub fn open(&self) -> (TcpStream, [u8; 32]) {
        let mut log = self.connect(&self.key, 0, 0);
        send(&mut log, op::HELLO, 1, |w| w.bytes(&self.ticket().seal(&self.key)));
        let body = reply(&mut log, 1);
        let secret = Reader::new(&body).bytes().unwrap().try_into().unwrap();
        (log, secret)
    }

    fn lane(&self, lane: u16, secret: &[u8; 32]) -> TcpStream {
        let mut stream = self.connect(&self.key, lane, 0);
        let proof = blake3::keyed_hash(secret, &lane.to_le_bytes());
        send(&mut stream, op::LANE, 1, |w| w.bytes(proof.as_bytes()));
        stream
    }
}

fn header(operation: u16, seq: u64) -> Header {
    let flags = WAIT.into();
    Header { op: operation.into(), flags, thread: 1.into(), seq: seq.into(), ..Header::empty() }
}

fn send(stream: &mut TcpStream, operation: u16, seq: u64, body: impl FnOnce(&mut Writer<'_>)) {
    let mut frame = Vec::new();
    let mut w = Writer::new(&mut frame, &header(operation, seq));
    body(&mut w);
    w.finish();
    // A peer that has closed the connection is noticed by the next read.
    let _ = stream.write_all(&frame);
}

pub fn reply(stream: &mut TcpStream, seq: u64) -> Vec<u8> {
    let mut head = [0; HEADER];
    stream.read_exact(&mut head).unwrap();
    let header = Header::parse(&head).unwrap();
    let mut body = vec![0; header.body_len()];
    stream.read_exact(&mut body).unwrap();
    assert_eq!((header.op.get(), header.seq.get(), header.ctx.get()), (op::REPLY, seq, 0));
    body
}

/// Sends a measurement's words.
pub fn ask(stream: &mut TcpStream, seq: u64, words: &[u64]) {
    send(stream, op::MEASURE, seq, |w| words.iter().for_each(|word| w.word(*word)));
}

fn reason(stream: &mut TcpStream) -> String {
    Refusal::read(&rest(stream)).map(|refusal| refusal.reason).unwrap_or_default()
}

/// Returns the process id of the only endpoint of the site's server.
fn process(site: &Site) -> Option<u32> {
    let children = std::fs::read_dir(format!("/proc/{}/task", site.pid)).unwrap().flatten();
    let mut pids = children.flat_map(|thread| {
        let text = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        text.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>()
    });
    let measures = |pid: &u32| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"\0--measure\0"))
    };
    pids.find(measures)
}

/// Returns the memory of a process in KiB.
fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    resident.trim().trim_end_matches(" kB").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hostile_client_gains_nothing_from_its_endpoint() {
    let site = Site::start().await;
    let begin = async |name: &str| {
        let mut vm = site.server.client(name).await;
        let asked = vm.pool.measure(MeasureRequest { seconds: 10 }).await;
        (Endpoint::new(&site.server, asked.unwrap().into_inner()), vm)
    };
    let (endpoint, mut vm) = begin("vm-0").await;
    for seconds in [0, 11, u32::MAX] {
        let asked = vm.pool.measure(MeasureRequest { seconds }).await.unwrap_err();
        assert_eq!(asked.code(), Code::InvalidArgument);
    }
    assert_eq!(
        vm.pool.measure(MeasureRequest { seconds: 1 }).await.unwrap_err().code(),
        Code::ResourceExhausted
    );

    // Without the grant's key, ticket or secret nothing opens.
    assert!(reason(&mut endpoint.connect(&[7; 32], 0, 0)).contains("not made for this worker"));
    let mut log = endpoint.connect(&endpoint.key, 0, 0);
    send(&mut log, op::HELLO, 1, |w| w.bytes(&endpoint.ticket().seal(&[7; 32])));
    assert!(reason(&mut log).contains("not made with this lease's key"));
    let mut log = endpoint.connect(&endpoint.key, 0, 0);
    send(&mut log, op::MEASURE, 1, |w| w.bytes(&[0; 8192]));
    assert_eq!(rest(&mut log), b"", "a greeting that is too long");
    assert!(reason(&mut endpoint.lane(1, &[7; 32])).contains("without the secret"));
    let mut tls = endpoint.connect(&endpoint.key, 0, FLAG_TLS);
    tls.write_all(&[0xff; 64]).unwrap();
    rest(&mut tls);

    let (mut log, secret) = endpoint.open();
    ask(&mut log, 2, &[0, 0, 0]);
    assert_eq!(reply(&mut log, 2).len(), 24);
    let pid = process(&site).expect("an endpoint");
    for lane in [17, u16::MAX] {
        assert!(!reason(&mut endpoint.lane(lane, &secret)).is_empty(), "lane {lane}");
    }
    let chunk = |len: usize, number: u32, transfer: u64| {
        let mut chunk = header(op::CHUNK, transfer);
        (chunk.len, chunk.ack, chunk.number) = ((len as u32).into(), (len as u64).into(), number.into());
        chunk
    };
    let mut up = endpoint.lane(1, &secret);
    // A transfer shows that the lane is open.
    up.write_all(&[chunk(8, 1, 3).as_bytes(), &[0; 8]].concat()).unwrap();
    ask(&mut log, 3, &[1, 8, 0]);
    reply(&mut log, 3);
    assert!(reason(&mut endpoint.lane(1, &secret)).contains("open already"));
    // A chunk that is too long, and more transfers than any client has under way. Acknowledgements
    // of the chunks before come first.
    let refused_after = |stream: &mut TcpStream, chunks: usize| {
        let said = rest(stream);
        Refusal::read(&said[chunks * HEADER..]).expect("a refusal").reason
    };
    up.write_all(chunk(CHUNK + 8, 2, 9).as_bytes()).unwrap();
    assert!(refused_after(&mut up, 1).contains("not a chunk"));
    let mut up = endpoint.lane(2, &secret);
    let many: Vec<u8> = (1..=65).flat_map(|n| [chunk(8, n, n.into()).as_bytes(), &[0; 8]].concat()).collect();
    let _ = up.write_all(&many);
    assert!(refused_after(&mut up, 64).contains("too many transfers"));
    // A malformed frame on the log ends the endpoint.
    ask(&mut log, 4, &[0, 0, 0]);
    reply(&mut log, 4);
    assert!(alive(pid));
    ask(&mut log, 5, &[1, MAX_TRANSFER + 1, 0]);
    rest(&mut log);
    eventually("the endpoint's end", async || !alive(pid)).await;

    // More connections than lanes, and a client that asks for bytes and takes none.
    let (endpoint, _vm) = begin("vm-1").await;
    let (mut log, secret) = endpoint.open();
    let pid = process(&site).expect("an endpoint");
    let before = resident_kib(pid);
    let down = endpoint.lane(9, &secret);
    (2..60).for_each(|seq| ask(&mut log, seq, &[2, MAX_TRANSFER, 0]));
    let idle: Vec<_> = (0..200).map(|_| endpoint.connect(&endpoint.key, 0, 0)).collect();
    // Beside the bytes of its transfers, which it has from the start.
    let more = resident_kib(pid).saturating_sub(before);
    assert!(more < 64 << 10, "it holds {more} KiB more");
    drop((log, down, idle));
    eventually("the endpoint's end", async || !alive(pid)).await;

    // The server serves on, and counts.
    assert!(site.server.workers().is_empty());
    let (endpoint, _vm) = begin("vm-2").await;
    let (mut log, _secret) = endpoint.open();
    ask(&mut log, 2, &[3, 0, 0]);
    assert_eq!(reply(&mut log, 2).len(), 32);
}
