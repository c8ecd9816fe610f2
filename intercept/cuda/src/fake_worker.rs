//! A worker in this process, for unit tests: it records frames and answers what a test says.
//!
//! All tests of a process share one worker. Each test has a device of its own, whose context its
//! frames name, so that a test sees its own frames only.

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use gpusession_link::{Events, Link};
use gpusession_proto::frame::{HEADER, Header, Reader, WAIT, Writer, op};
use gpusession_proto::grant::Endpoint;
use gpusession_proto::{handle, preface};

use crate::client::Client;
use crate::thread;

/// Number of tests that may share the worker.
const DEVICES: u32 = 128;

struct Worker {
    client: &'static Client,
    state: Arc<Mutex<State>>,
    socket: TcpStream,
}

/// Status and body of an answer.
type Answer = (i32, Vec<u8>);

#[derive(Default)]
struct State {
    frames: Vec<(Header, Vec<u8>)>,
    /// Answers by context and operation.
    answers: HashMap<(u64, u16), VecDeque<Answer>>,
    /// Number of the latest frame to the program.
    sent: u32,
}

impl State {
    /// Sends a frame with the next number.
    fn send(&mut self, mut socket: &TcpStream, mut header: Header, body: &[u8]) {
        self.sent += 1;
        header.number = self.sent.into();
        socket.write_all(&frame(&header, body)).unwrap();
    }
}

struct Quiet;

impl Events for Quiet {
    fn output(&self, _: &[u8], _: &[u8]) {}
    fn call_host(&self, _: &Arc<Link>, id: u64, status: i32) {
        crate::host_functions::call(id, status);
    }
    fn host_changed(&self, region: u64, offset: u64, bytes: &[u8]) {
        crate::regions::changed(region, offset, bytes);
    }
    fn lost(&self, _: &str) {}
}

fn frame(header: &Header, body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    let mut w = Writer::new(&mut frame, header);
    w.words(body);
    w.finish();
    frame
}

/// Returns the answer to the greeting, which takes the first window that the client offers.
fn greeting(hello: &[u8], abilities: u64) -> Vec<u8> {
    let mut r = Reader::new(hello);
    r.bytes().unwrap();
    r.word().unwrap();
    r.word().unwrap();
    let base = r.word().unwrap();
    let mut out = Vec::new();
    let mut w = Writer::new(&mut out, &Header::empty());
    w.bytes(&[0; 32]);
    w.word(0);
    [base, 12_080, u64::from(DEVICES)].into_iter().for_each(|word| w.word(word));
    for device in 0..DEVICES {
        w.bytes(b"GPU");
        w.bytes(&[device as u8; 16]);
        w.bytes(&[0; 8]);
        w.word(0);
        w.word(1 << 30);
        w.bytes(format!("0000:{device:02x}:00.0").as_bytes());
        w.word(0);
        // Priorities from 0 to -5.
        w.word(0);
        w.word(-5i32 as u32 as u64);
        w.word(0);
        w.bytes(&[]);
    }
    // No device reaches another one.
    (0..2 * DEVICES * DEVICES).for_each(|_| w.word(0));
    w.word(abilities);
    w.finish();
    out.split_off(HEADER)
}

fn serve(mut socket: TcpStream, state: &Mutex<State>, abilities: u64) {
    socket.read_exact(&mut [0; preface::LEN]).unwrap();
    loop {
        let mut head = [0; HEADER];
        if socket.read_exact(&mut head).is_err() {
            return;
        }
        let mut header = Header::parse(&head).unwrap();
        let mut body = vec![0; header.body_len()];
        socket.read_exact(&mut body).unwrap();
        let operation = header.op.get();
        let answer = {
            let mut state = state.lock().unwrap();
            state.frames.push((header, body.clone()));
            let known = state.answers.get_mut(&(header.ctx.get(), operation)).and_then(VecDeque::pop_front);
            known.unwrap_or((0, vec![0; 64]))
        };
        let (status, body) = if operation == op::HELLO { (0, greeting(&body, abilities)) } else { answer };
        if header.flags.get() & WAIT != 0 {
            (header.op, header.ctx) = (op::REPLY.into(), (status as u32 as u64).into());
            state.lock().unwrap().send(&socket, header, &body);
        }
    }
}

static SHARED: LazyLock<Worker> = LazyLock::new(|| start(0));

fn start(abilities: u64) -> Worker {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint {
        server: "gpu1".into(),
        addresses: vec![listener.local_addr().unwrap().to_string()],
        worker: [0; 16],
        key: preface::Key::new(&[0; 32], &[0; 16], 0),
        fingerprint: None,
        ticket: vec![0; 100],
        lease: "abcdefghijkl".into(),
        devices: DEVICES,
    };
    let state = Arc::<Mutex<State>>::default();
    let (sender, receiver) = std::sync::mpsc::channel();
    let serving = state.clone();
    std::thread::spawn(move || {
        let socket = listener.accept().unwrap().0;
        sender.send(socket.try_clone().unwrap()).unwrap();
        serve(socket, &serving, abilities);
    });
    let client =
        Client::open(&endpoint, 0, Box::new(Quiet)).unwrap_or_else(|failed| panic!("{}", failed.reason));
    Worker { client: Box::leak(Box::new(client)), state, socket: receiver.recv().unwrap() }
}

/// One test as a program: its context is current.
pub struct Program {
    worker: &'static Worker,
    pub client: &'static Client,
    pub ctx: u64,
}

impl Program {
    /// Takes the next device of the shared worker.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self::on(&SHARED, NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Starts a worker for a test whose errors would reach other tests.
    pub fn alone() -> Self {
        Self::able(0)
    }

    /// As [`Program::alone`], with a worker of these abilities.
    pub fn able(abilities: u64) -> Self {
        Self::on(Box::leak(Box::new(start(abilities))), 0)
    }

    fn on(worker: &'static Worker, device: u32) -> Self {
        let client = worker.client;
        let ctx = client.primary(device);
        thread::set_current(ctx);
        Self { worker, client, ctx }
    }

    /// Ends the connection of a worker that serves this test alone.
    pub fn lose(&self) {
        self.worker.socket.shutdown(std::net::Shutdown::Both).unwrap();
    }

    /// Lets the worker answer nothing until the result is dropped.
    pub fn silent(&self) -> impl Drop + use<> {
        self.worker.state.lock().unwrap()
    }

    /// Lets the worker answer the next call of this kind so.
    pub fn answer(&self, operation: u16, status: i32, words: &[u64]) {
        let body = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut state = self.worker.state.lock().unwrap();
        let key = (handle::local(self.ctx), operation);
        state.answers.entry(key).or_default().push_back((status, body));
    }

    /// Returns operation and body of the program's frames since the last call.
    pub fn frames(&self) -> Vec<(u16, Vec<u8>)> {
        self.client.ask(op::MARK, |_| {}).unwrap();
        let (mut state, mut mine) = (self.worker.state.lock().unwrap(), Vec::new());
        state.frames.retain(|(header, body)| {
            let other = header.ctx.get() != handle::local(self.ctx);
            if !other && header.op.get() != op::MARK {
                mine.push((header.op.get(), body.clone()));
            }
            other
        });
        mine
    }

    /// Returns the operations of [`Self::frames`].
    pub fn operations(&self) -> Vec<u16> {
        self.frames().into_iter().map(|(operation, _)| operation).collect()
    }

    /// Lets the worker send a frame without a request, which has arrived at the return.
    pub fn tell(&self, operation: u16, status: i32, words: &[u64]) {
        self.tell_late(operation, status, words);
        // The link reads frames in their order.
        self.client.ask(op::MARK, |_| {}).unwrap();
    }

    /// As [`Self::tell`], without a wait for the frame.
    pub fn tell_late(&self, operation: u16, status: i32, words: &[u64]) {
        let mut header = Header::empty();
        (header.op, header.ctx) = (operation.into(), (status as u32 as u64).into());
        let body: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.worker.state.lock().unwrap().send(&self.worker.socket, header, &body);
    }
}
