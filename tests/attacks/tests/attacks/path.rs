//! An attacker between a program and its worker.

use std::io::{Read as _, Write as _};
use std::mem::offset_of;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use gpusession_proto::frame::{Header, op};
use gpusession_proto::preface::{FLAG_TLS, LEN, Preface};
use gpusession_test_server::{Client, LONG, Server, rest};
use gpusession_test_support::path::{Fault, Faults, Path, drawn};
use zerocopy::IntoBytes as _;

use crate::site::{Program, endpoint, keep, prepare};

/// Starts a program on a new worker, whose connections pass through an attacker.
///
/// It waits for a free worker.
async fn start(vm: &mut Client, lease: &gpusession_proto::control::Lease, path: &Path, seed: u64) -> Started {
    let begun = Instant::now();
    let worker = loop {
        match vm.take(&lease.id).await {
            Ok(worker) => break worker,
            Err(e) => assert!(begun.elapsed() < LONG, "{e}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    Program::open(&endpoint(lease, &worker, &path.address.to_string()), seed).map_err(|e| e.to_string())
}

type Started = Result<Program, String>;

async fn site() -> (Server, Client, gpusession_proto::control::Lease) {
    let mut server = prepare("warm_workers = 2").await;
    server.run().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    assert!(lease.encrypted);
    keep(&vm, &lease);
    (server, vm, lease)
}

fn attacked(server: &Server, faults: impl Fn(u32) -> Faults + Send + 'static) -> Path {
    Path::start(server.data.parse().unwrap(), faults)
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_bits_and_cuts_never_become_a_programs_data() {
    const FAULTS: u32 = 60;
    const WITHIN: u64 = 400_000;
    let (server, mut vm, lease) = site().await;
    // Each other connection has a fault; those that come back have others.
    let path = attacked(&server, |connection| match connection % 2 {
        0 => drawn(3, connection, WITHIN),
        _ => [None, None],
    });
    let (mut good, mut errors, mut starts) = (0_u64, 0, 0);
    let mut program = None;
    let begun = Instant::now();
    while path.happened() < FAULTS || good < 50 {
        assert!(begun.elapsed() < 8 * LONG, "{good} copies, {errors} errors, {} faults", path.happened());
        let mut running = match program.take() {
            Some(running) => running,
            None => {
                starts += 1;
                match start(&mut vm, &lease, &path, starts).await {
                    Ok(started) => started,
                    Err(_) => {
                        errors += 1;
                        continue;
                    }
                }
            }
        };
        let len = if good % 2 == 0 { 3 << 20 } else { 50_000 };
        match running.copies(len, good % 2 == 0) {
            Ok(()) => {
                good += 1;
                // New programs open new connections.
                program = (good % 8 > 0).then_some(running);
            }
            Err(_) => errors += 1,
        }
    }
    println!(
        "{} faults on {} connections: {good} copies of {starts} programs, {errors} errors, {:?}",
        path.happened(),
        path.connections(),
        begun.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn no_older_tls_and_no_clear_text_on_the_data_port() {
    let (server, mut vm, lease) = site().await;
    let clear = Fault::Bit { at: offset_of!(Preface, flags) as u64, bit: FLAG_TLS.trailing_zeros() as u8 };
    for faults in [[Some(Fault::Older), None], [None, Some(Fault::Older)], [Some(clear), None]] {
        let path = attacked(&server, move |_| faults);
        assert!(start(&mut vm, &lease, &path, 1).await.is_err(), "{faults:?}");
        assert!(path.happened() > 0, "{faults:?}");
    }
    // A client that speaks TLS 1.2 alone, with a grant.
    let worker = vm.take(&lease.id).await.unwrap();
    let preface = server.preface(&worker.id, 0, true);
    let answer = rest(&mut server.data_connection(&[preface.as_bytes(), &hello_of_tls_12()].concat()));
    // An alert of level 2: protocol_version.
    assert_eq!((answer.first(), answer.get(5..7)), (Some(&21), Some(&[2, 70][..])), "{answer:?}");
    // A peer that answers the greeting in clear, as a worker without encryption would.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut socket in listener.incoming().flatten() {
            let _ = socket.read_exact(&mut [0; LEN]);
            let mut reply = Header::empty();
            (reply.op, reply.seq) = (op::REPLY.into(), 1.into());
            let _ = socket.write_all(reply.as_bytes());
            let _ = socket.read_to_end(&mut Vec::new());
        }
    });
    let worker = vm.take(&lease.id).await.unwrap();
    assert!(Program::open(&endpoint(&lease, &worker, &address), 1).is_err());
}

/// Returns the first message of a client of TLS 1.2, without extensions for a later one.
fn hello_of_tls_12() -> Vec<u8> {
    let mut extensions = Vec::new();
    // Groups: x25519, secp256r1. Signatures: ECDSA and RSA-PSS with SHA-256, Ed25519.
    for (kind, body) in [(10_u16, &[0, 4, 0, 29, 0, 23][..]), (13, &[0, 6, 4, 3, 8, 4, 8, 7][..])] {
        extensions.extend_from_slice(&kind.to_be_bytes());
        extensions.extend_from_slice(&(body.len() as u16).to_be_bytes());
        extensions.extend_from_slice(body);
    }
    // Version, random bytes, no session, three suites with AES-GCM or ChaCha20, no compression.
    let mut body = [&[3, 3][..], &[7; 32], &[0, 0, 6, 0xc0, 0x2b, 0xc0, 0x2f, 0xcc, 0xa9, 1, 0]].concat();
    body.extend_from_slice(&(extensions.len() as u16).to_be_bytes());
    body.extend_from_slice(&extensions);
    let mut message = vec![1, 0];
    message.extend_from_slice(&(body.len() as u16).to_be_bytes());
    message.extend_from_slice(&body);
    [&[22, 3, 1][..], &(message.len() as u16).to_be_bytes(), &message].concat()
}
