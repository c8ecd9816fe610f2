//! Real workers on simulated GPUs leave nothing behind, however they end.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use gpuserver::admin::{self, Ask};
use gpusession_proto::control::{Lease, ProcessEndedRequest, ReleaseRequest, Worker};
use gpusession_proto::frame::{HEADER, Header, Reader, WAIT, Writer, op};
use gpusession_proto::readings::{FromMonitor, GpuReading, ToMonitor};
use gpusession_proto::ticket::Ticket;
use gpusession_proto::{handle, message};
use gpusession_test_support::{Artefact, artefact};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use zerocopy::IntoBytes;

use gpusession_test_server::{Client, Server, eventually};

/// Number of clients at the same time.
const CLIENTS: u64 = 4;
/// Number of consecutive leases of each client.
const LEASES: u64 = 5;
/// Number of programs on each lease.
const PROGRAMS: u64 = 25;

/// A server with two simulated GPUs.
pub struct Site {
    pub server: Server,
    machine: String,
    pub pid: u64,
}

/// Resources that a server and its workers use.
#[derive(Debug)]
struct There {
    descriptors: usize,
    /// Child processes of the server, zombies included.
    children: usize,
    /// Processes of the simulated machine, including those of other parents.
    processes: usize,
    files: BTreeSet<PathBuf>,
    shared_memory: usize,
}

impl There {
    fn within(&self, before: &Self) -> bool {
        self.descriptors <= before.descriptors
            && self.children <= before.children
            && self.processes <= before.processes
            && self.files.is_subset(&before.files)
            && self.shared_memory <= before.shared_memory
    }
}

fn files(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        found.insert(entry.path());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files(&entry.path(), found);
        }
    }
}

impl Site {
    pub async fn start() -> Self {
        let machine = format!("server_{}", std::process::id());
        let lines = "encryption = \"off\"\ntrusted_networks = [\"127.0.0.0/8\"]";
        let mut server = Server::prepare("libcuda.so.1", lines).await;
        // Workers may read the driver's folder, so that it is not the server's.
        std::fs::create_dir(server.path("sim")).unwrap();
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            let library = artefact("simgpu", Artefact::Library("libsimgpu.so"));
            std::os::unix::fs::symlink(library, server.path("sim").join(name)).unwrap();
        }
        server.configure("sim/libcuda.so.1", lines);
        server.variables = vec![
            ("GPUSERVER_WORKER", artefact("gpuserver-worker", Artefact::Program("gpuserver-worker")).into()),
            ("SIMGPU_MACHINE", machine.clone().into()),
            ("SIMGPU_DEVICES", "2".into()),
        ];
        server.run().await;
        let pid = server.json(&["status"])["server"]["pid"].as_u64().unwrap();
        Self { server, machine, pid }
    }

    /// Returns the process id of a worker.
    fn pid(&self, worker: &[u8]) -> u32 {
        let answer = admin::ask(&self.server.path("run/admin.sock"), &Ask::Ps).unwrap().unwrap();
        let id = data_encoding::HEXLOWER.encode(worker);
        let row = answer.as_array().unwrap().iter().find(|row| row["worker"] == id.as_str()).unwrap();
        row["pid"].as_u64().unwrap() as u32
    }

    fn there(&self) -> There {
        let entries = |path: &str| std::fs::read_dir(path).unwrap().flatten();
        let mut found = BTreeSet::new();
        files(self.server.folder.path(), &mut found);
        let children = entries(&format!("/proc/{}/task", self.pid)).map(|thread| {
            let children = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            children.split_whitespace().count()
        });
        let variable = format!("SIMGPU_MACHINE={}\0", self.machine);
        let of_machine = |process: &std::fs::DirEntry| {
            let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
            String::from_utf8_lossy(&environment).contains(&variable)
        };
        There {
            descriptors: entries(&format!("/proc/{}/fd", self.pid)).count(),
            children: children.sum(),
            processes: entries("/proc").filter(of_machine).count(),
            files: found,
            shared_memory: entries("/dev/shm")
                .filter(|file| file.file_name().to_string_lossy().contains(&self.machine))
                .count(),
        }
    }

    /// Reads the driver's report about the GPUs.
    fn gpus(&self) -> Vec<GpuReading> {
        let mut monitor = Command::new(artefact("gpuserver-worker", Artefact::Program("gpuserver-worker")))
            .arg("--monitor")
            .arg(self.server.path("sim/libcuda.so.1"))
            .arg("off")
            .envs(self.server.variables.iter().map(|(name, value)| (name, value)))
            .env_remove("XDG_RUNTIME_DIR")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut input, mut output) = (monitor.stdin.take().unwrap(), monitor.stdout.take().unwrap());
        input.write_all(&message::encode(&ToMonitor::Read)).unwrap();
        let gpus = loop {
            let mut prefix = [0; 4];
            output.read_exact(&mut prefix).unwrap();
            let mut body = vec![0; message::body_len(prefix).unwrap()];
            output.read_exact(&mut body).unwrap();
            if let FromMonitor::Gpus(gpus) = message::decode(&body).unwrap() {
                break gpus;
            }
        };
        drop(input);
        monitor.wait().unwrap();
        gpus
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for file in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            if file.file_name().to_string_lossy().contains(&self.machine) {
                let _ = std::fs::remove_file(file.path());
            }
        }
    }
}

/// Makes a call that the worker answers with success, and returns the values of the answer.
fn call(socket: &mut TcpStream, operation: u16, seq: u64, values: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
    let header = Header {
        len: 0.into(),
        op: operation.into(),
        flags: WAIT.into(),
        thread: 1.into(),
        number: 0.into(),
        seq: seq.into(),
        ack: 0.into(),
        ctx: handle::make(handle::CTX, 0, 1, 0).into(),
    };
    let mut frame = Vec::new();
    let mut writer = Writer::new(&mut frame, &header);
    values(&mut writer);
    writer.finish();
    socket.write_all(&frame).unwrap();
    let mut head = [0; HEADER];
    socket.read_exact(&mut head).unwrap();
    let header = Header::parse(&head).unwrap();
    let mut body = vec![0; header.body_len()];
    socket.read_exact(&mut body).unwrap();
    assert_eq!((header.op.get(), header.seq.get(), header.ctx.get()), (op::REPLY, seq, 0));
    body
}

/// Starts a program with device memory over a connection in clear.
fn begin(server: &Server, lease: &Lease, worker: &Worker) -> TcpStream {
    const WINDOW: u64 = 0x0200_0000_0000;
    const MIB: u64 = 1 << 20;
    let id: [u8; 16] = worker.id.as_slice().try_into().unwrap();
    let ticket = Ticket {
        lease: lease.id.clone(),
        worker: id,
        uid: 1000,
        pid: 42,
        boot_id: [1; 16],
        issued_usec: 12,
        nonce: [9; 16],
        program: "vectorAdd".into(),
        executable: "/opt/vectorAdd".into(),
        user: "alice".into(),
    };
    let ticket = ticket.seal(&lease.ticket_key.as_slice().try_into().unwrap());
    let mut socket = server.data_connection(server.preface(&worker.id, 0, false).as_bytes());
    let hello = call(&mut socket, op::HELLO, 1, |w| {
        w.bytes(&ticket);
        [1, 4096 * MIB, WINDOW].into_iter().for_each(|word| w.word(word));
    });
    let mut hello = Reader::new(&hello);
    let (secret, _grace) = (hello.bytes().unwrap(), hello.word().unwrap());
    assert_eq!((secret.len(), hello.word().unwrap()), (32, WINDOW));
    call(&mut socket, op::ALLOC, 2, |w| {
        [WINDOW, 4 * MIB, 0].into_iter().for_each(|word| w.word(word));
    });
    socket
}

/// Runs a client's leases and programs, which end in many ways; returns the number of programs.
async fn run(site: Arc<Site>, mut vm: Client, seed: u64, leases: u64, programs: u64) -> u64 {
    // Knuth's generator, whose upper bits are good.
    let mut state = seed;
    let mut random = move |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let mut begun = 0;
    for _ in 0..leases {
        let lease = vm.allocate(50.0).await.unwrap();
        let mut running = Vec::new();
        for _ in 0..programs {
            let worker = vm.take(&lease.id).await.unwrap();
            let pid = Pid::from_raw(site.pid(&worker.id) as i32);
            begun += 1;
            let ending = random(6);
            if ending == 0 {
                // The worker has no program yet.
                let _ = kill(pid, Signal::SIGKILL);
                continue;
            }
            let mut socket = begin(&site.server, &lease, &worker);
            match ending {
                1 => drop(kill(pid, Signal::SIGKILL)),
                2 => {
                    let ended = ProcessEndedRequest { lease: lease.id.clone(), worker: worker.id };
                    vm.pool.process_ended(ended).await.unwrap();
                }
                // The program sends garbage.
                3 => drop(socket.write_all(&[0xff; 64])),
                // The program exits, or its network fails.
                4 => drop(socket.shutdown(std::net::Shutdown::Both)),
                // The program's lease ends.
                _ => running.push(socket),
            }
        }
        vm.pool.release(ReleaseRequest { lease: lease.id, ..Default::default() }).await.unwrap();
    }
    begun
}

#[tokio::test(flavor = "multi_thread", worker_threads = 6)]
async fn five_hundred_workers_leave_nothing_behind() {
    let site = Arc::new(Site::start().await);
    let mut clients = Vec::new();
    for i in 0..CLIENTS {
        clients.push(site.server.client(&format!("vm-{i}")).await);
    }
    let mut before = None;
    // The first round creates what stays for the server's lifetime.
    for (leases, programs) in [(1, 2), (LEASES, PROGRAMS)] {
        let start =
            |(vm, seed): (&Client, u64)| tokio::spawn(run(site.clone(), vm.clone(), seed, leases, programs));
        let tasks: Vec<_> = clients.iter().zip(1..).map(start).collect();
        let mut begun = 0;
        for task in tasks {
            begun += task.await.unwrap();
        }
        assert_eq!(begun, CLIENTS * leases * programs);
        eventually("no worker is left", async || site.server.workers().is_empty()).await;
        match &before {
            None => before = Some(site.there()),
            Some(before) => {
                let what = format!("there is no more than before: {before:?}");
                eventually(&what, async || site.there().within(before)).await;
            }
        }
    }
    for gpu in site.gpus() {
        assert_eq!((gpu.memory_used_bytes, gpu.processes), (Some(0), Vec::new()), "device memory");
    }
}
