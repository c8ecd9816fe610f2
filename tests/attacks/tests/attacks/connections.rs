//! Attacks on the places of data connections.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use gpusession_proto::preface::{FLAG_TLS, Preface};
use gpusession_test_server::{LONG, Server, eventually};
use socket2::{Domain, Socket, Type};
use zerocopy::IntoBytes as _;

use crate::site::{Program, endpoint, keep, prepare};

/// Bytes that a program copies.
const LEN: usize = 8 << 20;

/// Opens a data connection from an address of loopback, and sends these bytes.
fn connection(server: &Server, from: [u8; 4], bytes: &[u8]) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((from, 0)).into()).unwrap();
    let data: SocketAddr = server.data.parse().unwrap();
    socket.connect(&data.into()).unwrap();
    let mut socket = TcpStream::from(socket);
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket.write_all(bytes).unwrap();
    socket
}

/// Returns the descriptors and threads of a process.
fn held(pid: u64) -> (usize, usize) {
    let entries = |name| std::fs::read_dir(format!("/proc/{pid}/{name}")).unwrap().count();
    (entries("fd"), entries("task"))
}

fn pid_of(server: &Server, worker: &[u8]) -> u64 {
    let hex: String = worker.iter().map(|byte| format!("{byte:02x}")).collect();
    let workers = server.workers();
    workers.iter().find(|row| row["worker"] == hex).unwrap()["pid"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_forged_prefaces_are_refused_and_another_program_copies() {
    const MANY: usize = 5000;
    const AT_ONCE: usize = 50;
    let mut server = prepare("warm_workers = 2").await;
    server.run().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    keep(&vm, &lease);
    let attacked = vm.take(&lease.id).await.unwrap();
    let mut first = Program::open(&endpoint(&lease, &attacked, &server.data), 1).unwrap();
    first.copies(LEN, true).unwrap();
    let second = vm.take(&lease.id).await.unwrap();
    let pids = [server.pid().into(), pid_of(&server, &attacked.id)];
    let before = pids.map(held);

    // The sender has seen the worker's id on the network, but has no key of it.
    let mut forged = server.preface(&attacked.id, 1, true);
    forged.attempt = 999.into();
    let mut refused = 0;
    while refused < MANY {
        let flood: Vec<_> =
            (0..AT_ONCE).map(|_| connection(&server, [127, 0, 0, 2], forged.as_bytes())).collect();
        for mut socket in flood {
            let mut answer = Vec::new();
            socket.read_to_end(&mut answer).unwrap();
            assert!(String::from_utf8_lossy(&answer).contains("was not made for this worker"));
            refused += 1;
        }
    }
    let worker = held(pids[1]);
    assert!(worker.0 <= before[1].0 && worker.1 <= before[1].1, "{worker:?}, before {:?}", before[1]);
    // These send nothing, or a part.
    let silent: Vec<_> = (0..MANY / 10)
        .map(|number| connection(&server, [127, 0, 0, 2], &forged.as_bytes()[..number % 64]))
        .collect();

    let mut program = Program::open(&endpoint(&lease, &second, &server.data), 2).unwrap();
    program.copies(LEN, true).unwrap();
    first.copies(LEN, true).unwrap();
    drop((program, silent));
    eventually("descriptors and threads are those of before", async || {
        let (server, worker) = (held(pids[0]), held(pids[1]));
        // The server keeps some threads for calls that block.
        server.0 <= before[0].0 && server.1 <= before[0].1 + 8 && worker.0 <= before[1].0
    })
    .await;
    first.copies(LEN, true).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_programs_own_connects_and_closes_count_no_longer() {
    const MANY: u32 = 2000;
    // One program has all connections that its client may have.
    let mut server = prepare("warm_workers = 2\nlimits.connections = 17").await;
    server.run().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    keep(&vm, &lease);
    let (own, other) = (vm.take(&lease.id).await.unwrap(), vm.take(&lease.id).await.unwrap());
    let grant = endpoint(&lease, &own, &server.data);
    let pids = [server.pid().into(), pid_of(&server, &own.id)];
    let before = pids.map(held);
    for number in 0..MANY {
        let lane = (number % 17) as u16;
        let genuine = Preface::new(grant.worker, &grant.key, lane, 1 + number, FLAG_TLS);
        drop(connection(&server, [127, 0, 0, 1], genuine.as_bytes()));
    }
    eventually("descriptors and threads are those of before", async || {
        let (server, worker) = (held(pids[0]), held(pids[1]));
        server.0 <= before[0].0 && server.1 <= before[0].1 + 8 && worker.0 <= before[1].0
    })
    .await;
    let mut program = Program::open(&endpoint(&lease, &other, &server.data), 1).unwrap();
    program.copies(LEN, true).unwrap();
    // It has all of them, and the others none.
    let genuine = Preface::new(grant.worker, &grant.key, 0, 1 + MANY, FLAG_TLS);
    let mut answer = Vec::new();
    connection(&server, [127, 0, 0, 1], genuine.as_bytes()).read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("there are 17 data connections"), "{answer}");
}
