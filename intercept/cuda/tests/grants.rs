//! What `cuInit` does with what the daemon answers.

mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::library;
use gpusession_proto::grant::{Denial, Endpoint, Reply, Request};
use gpusession_proto::message;

/// Only in a process of its own: `cuInit` has one outcome.
#[test]
#[ignore = "started by the tests below"]
fn init() {
    type Init = unsafe extern "C" fn(u32) -> i32;
    // SAFETY: the type is CUDA's.
    let status = unsafe { library().get::<Init>(b"cuInit").unwrap()(0) };
    println!("cuInit: {status}");
}

fn started(socket: &std::path::Path) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "init"])
        .env("GPUSESSION_SOCKET", socket)
        .env("GPUSESSION_TRACE", "why")
        .env_remove("GPUSESSION_TRACE_FILE")
        .output()
        .unwrap()
}

fn answer(mut stream: UnixStream, reply: &Reply) -> UnixStream {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).unwrap();
    let mut body = vec![0; message::body_len(prefix).unwrap()];
    stream.read_exact(&mut body).unwrap();
    message::decode::<Request>(&body).unwrap();
    stream.write_all(&message::encode(reply)).unwrap();
    stream
}

/// A worker whose port nobody listens at any more.
fn gone() -> Reply {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    Reply::Granted(vec![Endpoint {
        server: "gpu1".into(),
        addresses: vec![format!("127.0.0.1:{port}")],
        worker: [1; 16],
        fingerprint: None,
        ticket: vec![0; 64],
        lease: "lease".into(),
        devices: 1,
    }])
}

fn after(answers: Vec<Reply>) -> (Output, usize) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("grant.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let daemon = std::thread::spawn({
        let ended = ended.clone();
        move || {
            let mut open = Vec::new();
            for stream in listener.incoming() {
                if ended.load(Ordering::Relaxed) {
                    break;
                }
                let reply = &answers[open.len().min(answers.len() - 1)];
                open.push(answer(stream.unwrap(), reply));
            }
            open.len()
        }
    });
    let output = started(&socket);
    ended.store(true, Ordering::Relaxed);
    // Wakes it.
    UnixStream::connect(&socket).unwrap();
    (output, daemon.join().unwrap())
}

#[test]
fn a_worker_that_is_gone_is_not_the_end() {
    let denied = Reply::Denied { denial: Denial::Quota, reason: "no more than 2 programs".into() };
    let (output, asked) = after(vec![gone(), gone(), denied]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("cuInit: 46"), "{output:?}");
    assert_eq!(asked, 3);
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(why.contains("gpu1") && why.contains("no more than 2 programs"), "{why}");
}

#[test]
fn workers_that_are_always_gone_are_an_error() {
    let (output, asked) = after(vec![gone()]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("cuInit: 802"), "{output:?}");
    assert_eq!(asked, 3);
}
