//! The server's own supervisor, and workers of one lease on the simulated driver.
#![expect(clippy::disallowed_methods, reason = "tests wait for other processes")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpuserver::accounting::Accounting;
use gpuserver::cache::Cache;
use gpuserver::cgroups::Cgroups;
use gpuserver::clock::{Clock, Moment, SystemClock, SystemRandom};
use gpuserver::isolation::{Decision, Level};
use gpuserver::lease::{Lease, Share};
use gpuserver::limits::Effective;
use gpuserver::starter::link::Starter;
use gpuserver::supervise::handover::Store;
use gpuserver::supervise::{AssignedWorker, Options, Supervisor, WorkerGroups};
use gpusession_proto::grant::Endpoint;
use gpusession_proto::preface::{Key, LEN, Preface};
use gpusession_proto::supervise::{DeviceLimit, Isolation};
use gpusession_proto::ticket::Ticket;
use tokio::runtime::Runtime;
use zerocopy::IntoBytes;

use crate::{Client, KEY, LEASE, MIB, Machine, Raw, TEST_TIMEOUT};

pub const GPU: [u8; 16] = *b"simgpu\x40\x00\x80\x00gpu-0\x00";

/// The host's clock plus the time that a test adds.
#[derive(Default)]
pub struct Moved(Mutex<Duration>);

impl Moved {
    pub fn pass(&self, time: Duration) {
        *self.0.lock().expect("a duration") += time;
    }
}

impl Clock for Moved {
    fn now(&self) -> Moment {
        SystemClock.now() + *self.0.lock().expect("a duration")
    }

    fn unix(&self) -> u64 {
        SystemClock.unix()
    }
}

/// A supervisor with one lease of 256 MiB.
pub struct Site {
    pub supervisor: Supervisor,
    pub accounting: Accounting,
    pub clock: Arc<Moved>,
    pub runtime: Runtime,
    machine: Arc<Machine>,
    _folder: tempfile::TempDir,
}

impl Site {
    /// Starts the supervisor for the only test of its program.
    ///
    /// Workers inherit the variables of this process, which it therefore changes.
    pub fn new(warm_workers: u32) -> Self {
        let machine = Machine::new();
        // SAFETY: no other test runs, and this one has not started a thread yet.
        unsafe { std::env::set_var("SIMGPU_MACHINE", machine.name()) };
        let folder = tempfile::tempdir().expect("a folder");
        let accounting = Accounting::open(folder.path()).expect("a database");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let options = Options {
            program: crate::program(),
            starter: Starter::Here(crate::program()),
            uid: nix::unistd::getuid().as_raw(),
            driver: machine.driver(),
            cache: Cache::at(folder.path().join("cache"), 1 << 30),
            warm_workers,
            verify_memory: false,
            idle_exit: Duration::ZERO,
            isolation: Decision { workers: Isolation::Try, level: Level::Full, lacking: String::new() },
            mps: None,
            groups: WorkerGroups::new(Cgroups::of_this_unit(gpuserver::cgroups::SERVER), None),
        };
        let clock = Arc::new(Moved::default());
        let supervisor = {
            let _inside = runtime.enter();
            let supervisor = Supervisor::new(
                options,
                Store::default(),
                Vec::new(),
                accounting.clone(),
                clock.clone(),
                Arc::new(SystemRandom),
            )
            .expect("a supervisor");
            let limit =
                DeviceLimit { uuid: GPU, memory_bytes: 256 * MIB, sm_percent: 100, context_bytes: 16 * MIB };
            supervisor.add_lease(&lease(LEASE, ""), vec![limit], Effective::default());
            supervisor
        };
        Self { runtime, supervisor, accounting, clock, machine, _folder: folder }
    }

    /// Adds another lease of 256 MiB on the same GPU; an empty user: of the client itself.
    pub fn add_lease(&self, id: &str, user: &str) {
        let limit =
            DeviceLimit { uuid: GPU, memory_bytes: 256 * MIB, sm_percent: 100, context_bytes: 16 * MIB };
        let _inside = self.runtime.enter();
        self.supervisor.add_lease(&lease(id, user), vec![limit], Effective::default());
    }

    /// Takes `count` workers.
    pub fn take(&self, count: usize) -> Vec<AssignedWorker> {
        self.take_of(LEASE, count)
    }

    /// Takes `count` workers of a lease.
    pub fn take_of(&self, lease: &str, count: usize) -> Vec<AssignedWorker> {
        let mut taken = Vec::new();
        while taken.len() < count {
            let more = self.supervisor.take("vm", lease, count - taken.len(), Vec::new());
            taken.extend(self.runtime.block_on(more).expect("workers"));
        }
        taken
    }

    /// Opens a client of a worker that the supervisor assigned.
    pub fn client(&self, taken: &AssignedWorker, pid: u32) -> Client {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = endpoint(taken, LEASE, pid, listener.local_addr().expect("its number"));
        let connecting =
            std::thread::spawn(move || Client::open(&endpoint).expect("the worker admits the client"));
        // As the data port does.
        let (mut socket, peer) = listener.accept().expect("a connection");
        let mut preface = [0; LEN];
        socket.read_exact(&mut preface).expect("a preface");
        let preface = Preface::parse(&preface).expect("a preface");
        let adopted = self.supervisor.adopt(&preface, socket, peer);
        adopted.map_err(|(e, _)| e).expect("it is handed over");
        connecting.join().expect("a client")
    }

    /// Takes a worker of a lease for a real program, and returns its endpoint.
    pub fn endpoint(&self, lease: &str, pid: u32) -> Endpoint {
        endpoint(&self.take_of(lease, 1)[0], lease, pid, self.data_port())
    }

    /// Opens a connection in clear to a worker that may send anything, not yet admitted.
    pub fn stranger(&self, worker: [u8; 16], attempt: u32) -> Raw {
        let mut stream = TcpStream::connect(self.data_port()).expect("a connection");
        let preface = Preface::new(worker, &Key::new(&KEY, &worker, 1000), 0, attempt, 0);
        stream.write_all(preface.as_bytes()).expect("a preface");
        Raw::new(stream)
    }

    /// Serves a data port for as long as this process runs, and returns its address.
    fn data_port(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its number");
        let (supervisor, runtime) = (self.supervisor.clone(), self.runtime.handle().clone());
        std::thread::spawn(move || {
            let _inside = runtime.enter();
            for mut socket in listener.incoming().flatten() {
                let mut preface = [0; LEN];
                let Ok(peer) = socket.peer_addr() else { continue };
                if socket.read_exact(&mut preface).is_ok()
                    && let Ok(known) = Preface::parse(&preface)
                {
                    let _ = supervisor.adopt(&known, socket, peer);
                }
            }
        });
        address
    }
}

/// Returns the grant of a worker, for a process of the user alice.
fn endpoint(taken: &AssignedWorker, lease: &str, pid: u32, address: SocketAddr) -> Endpoint {
    let ticket = Ticket {
        lease: lease.into(),
        worker: taken.id,
        uid: 1000,
        user: "alice".into(),
        pid,
        boot_id: [1; 16],
        issued_usec: 12,
        nonce: [9; 16],
        program: "python3".into(),
        executable: "/usr/bin/python3".into(),
    };
    Endpoint {
        server: "test".into(),
        addresses: vec![address.to_string()],
        worker: taken.id,
        key: Key::new(&KEY, &taken.id, 1000),
        fingerprint: None,
        ticket: ticket.seal(&KEY),
        lease: lease.into(),
        devices: 1,
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // Workers of the supervisor keep their simulated machine there, not in its folder.
        let machine = self.machine.name().replace('-', "_");
        for file in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            if file.file_name().to_string_lossy().ends_with(&machine) {
                let _ = std::fs::remove_file(file.path());
            }
        }
    }
}

fn lease(id: &str, user: &str) -> Lease {
    let hex: String = GPU.iter().map(|b| format!("{b:02x}")).collect();
    let gpu = format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    Lease {
        id: id.into(),
        client: "vm".into(),
        request_id: String::new(),
        ticket_key: KEY,
        fencing_token: 1,
        shares: vec![Share { gpu, limit_bytes: 256 * MIB, sm_percent: 100 }],
        ttl: Duration::from_secs(60),
        boot_id: "b".into(),
        encrypted: false,
        user: user.into(),
        uid: 0,
        who: String::new(),
        why: String::new(),
        created_unix: 0,
        exclusive: false,
        priority: Default::default(),
        persistent: false,
        until_unix: 0,
        on_idle: Default::default(),
        idle_timeout: Default::default(),
        hold: false,
        mps: false,
        pinned: false,
        waited: Duration::ZERO,
    }
}

pub fn eventually(what: &str, check: impl Fn() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < TEST_TIMEOUT, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
