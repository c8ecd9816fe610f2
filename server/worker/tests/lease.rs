//! Workers of one lease under the server's own supervisor, on the simulated driver.

// Other tests use the rest of it.
#[allow(dead_code)]
mod harness;

use std::io::Read;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpuserver::accounting::{Accounting, Wanted};
use gpuserver::clock::{Clock, Moment, SystemClock, SystemRandom};
use gpuserver::lease::{Lease, Priority, Share};
use gpuserver::limits::Effective;
use gpuserver::supervise::keep::Store;
use gpuserver::supervise::{Event, Options, Supervisor, Taken};
use gpusession_proto::frame::op;
use gpusession_proto::grant::Endpoint;
use gpusession_proto::preface::LEN;
use gpusession_proto::supervise::DeviceLimit;
use gpusession_proto::ticket::Ticket;
use harness::{Client, KEY, LEASE, MIB, Machine, PATIENCE, WINDOW};

const GPU: [u8; 16] = *b"simgpu\x40\x00\x80\x00gpu-0\x00";
const OUT_OF_MEMORY: i32 = 2;

/// The host's clock, and what a test adds to it.
#[derive(Default)]
struct Moved(Mutex<Duration>);

impl Clock for Moved {
    fn now(&self) -> Moment {
        SystemClock.now() + *self.0.lock().expect("a duration")
    }

    fn unix(&self) -> u64 {
        SystemClock.unix()
    }
}

fn lease() -> Lease {
    let hex: String = GPU.iter().map(|b| format!("{b:02x}")).collect();
    let gpu = format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    Lease {
        id: LEASE.into(),
        client: "vm".into(),
        request_id: String::new(),
        ticket_key: KEY,
        fencing_token: 1,
        shares: vec![Share { gpu, limit_bytes: 256 * MIB, sm_percent: 100 }],
        ttl: Duration::from_secs(60),
        boot_id: "b".into(),
        encrypted: false,
        user: String::new(),
        uid: 0,
        who: String::new(),
        why: String::new(),
        created_unix: 0,
        exclusive: false,
        priority: Priority::Normal,
        persistent: false,
        until_unix: 0,
        on_idle: Default::default(),
        idle_timeout: Default::default(),
        hold: false,
        mps: false,
        pinned: false,
    }
}

/// A client of a worker that the supervisor gave out.
fn client(supervisor: &Supervisor, taken: &Taken, pid: u32) -> Client {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let ticket = Ticket {
        lease: LEASE.into(),
        worker: taken.id,
        uid: 1000,
        pid,
        boot_id: [1; 16],
        issued_usec: 12,
        nonce: [9; 16],
        program: "python3".into(),
    };
    let endpoint = Endpoint {
        server: "test".into(),
        addresses: vec![listener.local_addr().expect("its number").to_string()],
        worker: taken.id,
        fingerprint: None,
        ticket: ticket.seal(&KEY),
        lease: LEASE.into(),
        devices: 1,
    };
    let connecting =
        std::thread::spawn(move || Client::open(&endpoint).expect("the worker admits the client"));
    // As the data port does.
    let (mut socket, peer) = listener.accept().expect("a connection");
    let mut preface = vec![0; LEN];
    socket.read_exact(&mut preface).expect("a preface");
    supervisor.adopt(&taken.id, socket, preface, peer, false).map_err(|(e, _)| e).expect("it is handed over");
    connecting.join().expect("a client")
}

fn eventually(what: &str, check: impl Fn() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn four_processes_share_one_limit() {
    let machine = Machine::new();
    // SAFETY: the only test of this program, before it starts a thread of its own.
    unsafe { std::env::set_var("SIMGPU_MACHINE", machine.name()) };
    let folder = tempfile::tempdir().expect("a folder");
    let accounting = Accounting::open(folder.path()).expect("a database");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let _inside = runtime.enter();
    let options = Options {
        program: env!("CARGO_BIN_EXE_gpuserver-worker").into(),
        driver: machine.driver(),
        cache: None,
        warm_workers: 4,
        idle_exit: Duration::ZERO,
        resume_grace: Duration::ZERO,
        isolation: gpusession_proto::supervise::Isolation::Try,
        mps: None,
    };
    let clock = Arc::new(Moved::default());
    let supervisor = Supervisor::new(
        options,
        Store::default(),
        Vec::new(),
        accounting.clone(),
        clock.clone(),
        Arc::new(SystemRandom),
    )
    .expect("a supervisor");
    let limit = DeviceLimit { uuid: GPU, memory_bytes: 256 * MIB, sm_percent: 100, context_bytes: 16 * MIB };
    supervisor.add_lease(&lease(), vec![limit], Effective::default());
    let mut taken = Vec::new();
    while taken.len() < 4 {
        let more = supervisor.take("vm", LEASE, 4 - taken.len(), Vec::new());
        taken.extend(runtime.block_on(more).expect("workers"));
    }
    let clients: Vec<Client> =
        taken.iter().zip(1..).map(|(taken, pid)| client(&supervisor, taken, pid)).collect();
    let alloc = |client: &Client, slot: u64, mib: u64| {
        client.refused(op::ALLOC, &[WINDOW + slot * 256 * MIB, mib * MIB, 0])
    };

    // Four contexts, and 40 MiB each: chunks alone would be more than there is.
    for client in &clients {
        assert_eq!(alloc(client, 0, 40), 0);
    }
    for client in &clients {
        assert_eq!(
            client.memory(),
            (32 * MIB, 256 * MIB),
            "each sees the lease's share and what all leave of it"
        );
    }
    assert_eq!(alloc(&clients[0], 1, 34), OUT_OF_MEMORY);
    assert_eq!(alloc(&clients[0], 1, 32), 0);
    assert_eq!(alloc(&clients[1], 1, 2), OUT_OF_MEMORY, "what another one has taken");
    clients[2].put(WINDOW, b"the others do not notice");
    assert_eq!(clients[2].get(WINDOW, 24), b"the others do not notice");
    let sum = || supervisor.workers().iter().map(|w| w.memory_bytes).sum::<u64>();
    assert_eq!(sum(), 256 * MIB);

    // One that ends leaves its memory and its context's to the others.
    supervisor.end_worker(&taken[3].id, None, "ended by the test");
    eventually("its memory is free", || clients[1].memory().0 == 56 * MIB);
    assert_eq!(alloc(&clients[1], 1, 56), 0);
    let record = accounting.list(&Wanted::default()).expect("records").remove(0);
    assert_eq!((record.pid, record.peak_memory_bytes), (4, 56 * MIB), "{record:?}");

    // A process that has what it never asked for, while the lease is over its limit, is ended; the others are not.
    let pids: Vec<u32> = supervisor.workers().iter().filter_map(|w| w.process.as_ref().and(w.pid)).collect();
    assert_eq!(pids.len(), 3);
    let readings: Vec<_> =
        pids.iter().zip([60 * MIB, 60 * MIB, 3 << 30]).map(|(pid, b)| (*pid, GPU, b)).collect();
    supervisor.reconcile(&readings);
    eventually("it is ended", || supervisor.workers().iter().filter(|w| w.process.is_some()).count() == 2);
    assert!(supervisor.workers().iter().all(|w| w.pid != Some(pids[2])));

    // What an ended process had is gone soon, or its GPU is not well.
    let mut events = supervisor.events();
    let mut stuck = || {
        std::iter::from_fn(|| events.try_recv().ok()).find_map(|e| match e {
            Event::Stuck { why, gpus } => Some((why, gpus)),
            _ => None,
        })
    };
    let still = [(pids[2], GPU, MIB)];
    supervisor.reconcile(&still);
    assert_eq!(stuck(), None, "it has a moment");
    *clock.0.lock().expect("a duration") += Duration::from_secs(11);
    supervisor.reconcile(&[]);
    assert_eq!(stuck(), None);
    supervisor.reconcile(&still);
    let (why, gpus) = stuck().expect("memory without a process");
    assert!(why.contains(&format!("process {}", pids[2])) && gpus.len() == 1, "{why}");
    runtime.block_on(supervisor.close("the test ends"));
}
