//! A relay between a program and a worker that breaks connections at chosen bytes.
//!
//! It understands the preface and frames in clear. Each direction of a connection is a sequence of
//! units: a preface or a whole frame. A [`Cut`] names the unit and the byte in it.
#![expect(clippy::disallowed_methods, reason = "faults last for a time")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::altered::{Altered, HEADER, Words};
use socket2::{Domain, SockFilter, SockRef, Socket, Type};

const PREFACE: usize = 64;

/// Filter of a socket that drops 30 % of the packets which arrive: TCP sends them again.
///
/// `ld rand; jge #0x4ccccccc, pass, drop; drop: ret #0; pass: ret #-1`, of linux/filter.h.
const LOSS: [SockFilter; 4] = [
    SockFilter::new(0x20, 0, 0, 0xffff_f038),
    SockFilter::new(0x35, 1, 0, 0x4ccc_cccc),
    SockFilter::new(0x06, 0, 0, 0),
    SockFilter::new(0x06, 0, 0, u32::MAX),
];

/// Place in a unit, after the last byte that passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The first byte has passed.
    First,
    /// The header has passed in part.
    InHeader,
    /// The header has passed.
    AfterHeader,
    /// The body has passed in part.
    InBody,
    /// All but the last byte has passed.
    BeforeLast,
    /// The unit has passed.
    After,
}

impl Place {
    pub const ALL: [Self; 6] =
        [Self::First, Self::InHeader, Self::AfterHeader, Self::InBody, Self::BeforeLast, Self::After];

    fn offset(self, len: usize) -> usize {
        let header = HEADER.min(len);
        match self {
            Self::First => 1,
            Self::InHeader => header / 2,
            Self::AfterHeader => header,
            Self::InBody => header + (len - header) / 2,
            Self::BeforeLast => len - 1,
            Self::After => len,
        }
    }
}

/// The end of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Cut {
    /// Number of the unit, from 0.
    pub unit: u32,
    pub place: Place,
    /// Whether both ends get a reset; otherwise an end of the stream.
    pub reset: bool,
}

/// Cuts of a connection.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fate {
    /// In the program's direction to the worker.
    pub up: Option<Cut>,
    pub down: Option<Cut>,
    /// Manner of its cuts.
    pub with: With,
    /// Changes of frames to the worker.
    pub altered: Option<Altered>,
    /// Changes of frames to the program.
    pub altered_down: Option<Altered>,
}

/// Manner of a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum With {
    /// Both ends notice it at once.
    #[default]
    Notice,
    /// Its direction is silent for this time before it, which neither end notices.
    Silence(Duration),
    /// The worker notices it only after this time; until then its end looks alive.
    HalfOpen(Duration),
    /// All connections break, and none gets through for this time.
    Outage(Duration),
}

/// First bytes of a connection, which the program sends in clear.
pub type FirstBytes = [u8; PREFACE];

/// A relay between programs and a worker.
pub struct Relay {
    pub address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    connections: AtomicU32,
    open: Mutex<Vec<Weak<[TcpStream; 2]>>>,
    /// Frames that were changed.
    altered: AtomicUsize,
    /// Cuts that happened, by place.
    cuts: [AtomicUsize; Place::ALL.len()],
    /// End of the latest outage.
    out_until: Mutex<Option<Instant>>,
    /// End of the latest silence of all connections.
    silent_until: Mutex<Option<Instant>>,
    /// End of the latest time in which packets are lost.
    lossy_until: Mutex<Option<Instant>>,
    /// How often the clients' address has changed.
    moves: AtomicU8,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Relay {
    /// Starts a relay; `fate` gets the number of each connection, from 0.
    ///
    /// # Panics
    /// If loopback has no port.
    pub fn start(worker: SocketAddr, fate: impl Fn(u32) -> Fate + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its number");
        let state = Arc::<State>::default();
        let serving = state.clone();
        std::thread::spawn(move || {
            for program in listener.incoming() {
                let (Ok(program), Ok(worker)) = (program, TcpStream::connect(worker)) else { continue };
                let fate = fate(serving.connections.load(Ordering::SeqCst));
                serving.join(Arc::new([program, worker]), fate);
            }
        });
        Self { address, state }
    }

    /// Starts a relay on a listening socket; `fate` also gets a connection's first bytes.
    ///
    /// # Panics
    /// If the socket has no address.
    pub fn serve(
        listener: TcpListener,
        worker: SocketAddr,
        fate: impl Fn(u32, &FirstBytes) -> Fate + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().expect("its number");
        let state = Arc::<State>::default();
        let (serving, fate) = (state.clone(), Arc::new(fate));
        std::thread::spawn(move || {
            for program in listener.incoming().flatten() {
                let (serving, fate) = (serving.clone(), fate.clone());
                std::thread::spawn(move || {
                    let mut first = [0; PREFACE];
                    // They stay in the socket for the thread that passes them on.
                    if !serving.is_out() && peek(&program, &mut first).is_ok() {
                        let Ok(worker) = serving.connect(worker) else { return };
                        let fate = fate(serving.connections.load(Ordering::SeqCst), &first);
                        serving.join(Arc::new([program, worker]), fate);
                    }
                });
            }
        });
        Self { address, state }
    }

    /// Returns the number of frames that were changed.
    pub fn altered(&self) -> usize {
        self.state.altered.load(Ordering::SeqCst)
    }

    /// Resets all connections now.
    pub fn cut(&self) {
        self.state.cut();
    }

    /// Resets all connections, and lets none through for a time.
    pub fn outage(&self, time: Duration) {
        self.state.outage(time);
    }

    /// Passes no byte for a time; no end notices more than the silence.
    pub fn silence(&self, time: Duration) {
        *lock(&self.state.silent_until) = Some(Instant::now() + time);
    }

    /// Drops 30 % of the packets that reach the relay, from either end, for a time.
    ///
    /// # Panics
    /// If the kernel refuses the filter.
    pub fn loss(&self, time: Duration) {
        let state = self.state.clone();
        *lock(&state.lossy_until) = Some(Instant::now() + time);
        state.each_socket(|socket| socket.attach_filter(&LOSS).expect("a filter"));
        std::thread::spawn(move || {
            std::thread::sleep(time);
            if !state.is_lossy() {
                // A socket that opened meanwhile may have none.
                state.each_socket(|socket| drop(socket.detach_filter()));
            }
        });
    }

    /// Resets all connections; the server sees later ones from another address of loopback.
    pub fn change_address(&self) {
        self.state.moves.fetch_add(1, Ordering::SeqCst);
        self.state.cut();
    }

    /// Returns the number of connections so far.
    pub fn connections(&self) -> u32 {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// Returns the number of cuts so far, by place.
    pub fn cuts(&self) -> [usize; Place::ALL.len()] {
        std::array::from_fn(|i| self.state.cuts[i].load(Ordering::SeqCst))
    }
}

impl State {
    /// Passes the bytes of a connection on, until its fate.
    fn join(self: &Arc<Self>, ends: Arc<[TcpStream; 2]>, fate: Fate) {
        for end in ends.iter() {
            let _ = end.set_nodelay(true);
        }
        let mut open = lock(&self.open);
        open.retain(|ends| ends.strong_count() > 0);
        open.push(Arc::downgrade(&ends));
        if self.is_lossy() {
            ends.iter().for_each(|end| drop(SockRef::from(end).attach_filter(&LOSS)));
        }
        drop(open);
        // Only now: a connection that counts can be cut.
        self.connections.fetch_add(1, Ordering::SeqCst);
        let happens = Arc::new(AtomicBool::new(false));
        for (from, cut, preface, altered) in
            [(0, fate.up, PREFACE, fate.altered), (1, fate.down, 0, fate.altered_down)]
        {
            let (ends, state, happens) = (ends.clone(), self.clone(), happens.clone());
            let faults = (cut, altered.map(Words::new));
            std::thread::spawn(move || match pass(&state, &ends[from], &ends[1 - from], faults, preface) {
                Some(cut) => {
                    happens.store(true, Ordering::SeqCst);
                    state.cuts[cut.place as usize].fetch_add(1, Ordering::SeqCst);
                    state.happens(&ends, cut, fate.with);
                }
                // A cut in the other direction closes its ends itself.
                None if happens.load(Ordering::SeqCst) => {}
                None => close(&ends[..], false),
            });
        }
    }

    fn happens(&self, ends: &[TcpStream; 2], cut: Cut, with: With) {
        match with {
            With::Notice => {}
            With::Silence(time) => std::thread::sleep(time),
            With::HalfOpen(time) => {
                close(&ends[..1], cut.reset);
                std::thread::sleep(time);
            }
            With::Outage(time) => self.outage(time),
        }
        close(&ends[..], cut.reset);
    }

    /// Connects to a worker from the clients' present address.
    fn connect(&self, worker: SocketAddr) -> std::io::Result<TcpStream> {
        let moves = self.moves.load(Ordering::SeqCst);
        if moves == 0 {
            return TcpStream::connect(worker);
        }
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&SocketAddr::from(([127, 0, 1, moves], 0)).into())?;
        socket.connect(&worker.into())?;
        Ok(socket.into())
    }

    /// Waits for the end of a silence.
    fn wait_for_sound(&self) {
        while let Some(left) =
            lock(&self.silent_until).and_then(|until| until.checked_duration_since(Instant::now()))
        {
            std::thread::sleep(left);
        }
    }

    fn is_out(&self) -> bool {
        lock(&self.out_until).is_some_and(|until| Instant::now() < until)
    }

    fn outage(&self, time: Duration) {
        *lock(&self.out_until) = Some(Instant::now() + time);
        self.cut();
    }

    fn is_lossy(&self) -> bool {
        lock(&self.lossy_until).is_some_and(|until| Instant::now() < until)
    }

    fn each_socket(&self, change: impl Fn(SockRef<'_>)) {
        for ends in lock(&self.open).iter().filter_map(Weak::upgrade) {
            ends.iter().for_each(|end| change(SockRef::from(end)));
        }
    }

    fn cut(&self) {
        lock(&self.open).iter().filter_map(Weak::upgrade).for_each(|ends| close(&ends[..], true));
    }
}

/// Waits for a connection's first bytes, which stay in the socket.
fn peek(socket: &TcpStream, first: &mut FirstBytes) -> std::io::Result<()> {
    let until = Instant::now() + Duration::from_secs(10);
    while Instant::now() < until {
        if socket.peek(first)? == PREFACE {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(std::io::ErrorKind::TimedOut.into())
}

fn close(ends: &[TcpStream], reset: bool) {
    for end in ends {
        if reset {
            // Disconnecting discards what the kernel still holds, and resets the peer.
            disconnect(end);
        }
        let _ = end.shutdown(Shutdown::Both);
    }
}

fn disconnect(socket: &TcpStream) {
    // `struct sockaddr` with the family AF_UNSPEC.
    #[repr(C)]
    struct Unspecified([u8; 16]);
    unsafe extern "C" {
        fn connect(socket: i32, address: *const Unspecified, len: u32) -> i32;
    }
    // SAFETY: the descriptor is open, and the address has the length that the call gets.
    unsafe { connect(socket.as_raw_fd(), &Unspecified([0; 16]), 16) };
}

/// Passes bytes on until the cut or the end; returns the cut.
fn pass(
    state: &State,
    mut from: &TcpStream,
    mut to: &TcpStream,
    (cut, mut words): (Option<Cut>, Option<Words>),
    preface: usize,
) -> Option<Cut> {
    let mut buf = vec![0; 64 << 10];
    // Bytes of the present unit that have passed, its header so far, and its length if known.
    let (mut unit, mut at, mut head) = (0, 0, Vec::new());
    let mut len = (preface > 0).then_some(preface);
    loop {
        let n = match from.read(&mut buf) {
            Ok(0) | Err(_) => return None,
            Ok(n) => n,
        };
        state.wait_for_sound();
        let (mut seen, mut until) = (0, n);
        while seen < n {
            let whole = match len {
                Some(whole) => whole,
                None => {
                    let more = (HEADER - head.len()).min(n - seen);
                    head.extend_from_slice(&buf[seen..seen + more]);
                    if head.len() < HEADER {
                        // Until the length is known, a cut may only come early in the header.
                        if cut.is_some_and(|c| c.unit == unit && c.place == Place::First) && at == 0 {
                            until = seen + 1;
                        }
                        at += more;
                        break;
                    }
                    let body = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
                    // Not a frame: a refusal, or TLS. It passes as one unit without an end.
                    let whole = if body > 8 << 20 { usize::MAX } else { HEADER + body as usize };
                    len = Some(whole);
                    if let Some(words) = &mut words {
                        words.begin(unit, whole);
                    }
                    whole
                }
            };
            if let Some(cut) = cut.filter(|cut| cut.unit == unit) {
                let offset = cut.place.offset(whole);
                if offset <= at + (n - seen) {
                    until = seen + offset.saturating_sub(at);
                    let _ = to.write_all(&buf[..until]);
                    return Some(cut);
                }
            }
            let rest = (whole - at).min(n - seen);
            if words.as_mut().is_some_and(|words| words.pass(at, &mut buf[seen..seen + rest])) {
                state.altered.fetch_add(1, Ordering::SeqCst);
            }
            (at, seen) = (at + rest, seen + rest);
            if at == whole {
                (unit, at, len) = (unit + 1, 0, None);
                head.clear();
            }
        }
        if to.write_all(&buf[..until]).is_err() {
            return None;
        }
        if until < n {
            return cut;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_packets_cost_time_and_no_byte() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Relay::start(server.local_addr().unwrap(), |_| Fate::default());
        std::thread::spawn(move || {
            let (mut here, _) = server.accept().unwrap();
            let mut there = here.try_clone().unwrap();
            std::io::copy(&mut there, &mut here)
        });
        let mut program = TcpStream::connect(relay.address).unwrap();
        program.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut echoes = || {
            let begun = Instant::now();
            for number in 0..50_u32 {
                program.write_all(&number.to_le_bytes()).unwrap();
                let mut echo = [0; 4];
                program.read_exact(&mut echo).unwrap();
                assert_eq!(u32::from_le_bytes(echo), number);
            }
            begun.elapsed()
        };
        echoes();
        relay.loss(Duration::from_secs(2));
        // TCP waits 200 ms at least before it sends a packet again.
        assert!(echoes() >= Duration::from_millis(200), "no packet was lost");
    }
}
