//! The library as programs load it: each program is a test that is marked `#[ignore]`, in a process of its own.
#![allow(dead_code, reason = "each test file uses a part")]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpusession_proto::grant::{Reply, Request, Want};
use gpusession_proto::message;
use libloading::Library;

/// The library that was built together with this test.
pub fn library() -> Library {
    let test = std::env::current_exe().unwrap();
    let path: PathBuf = test
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("libgpusession_cuda.so"))
        .find(|path| path.exists())
        .expect("libgpusession_cuda.so beside the test");
    // SAFETY: the library has no initialisers.
    unsafe { Library::new(path) }.unwrap()
}

/// Any driver call, by its exported name. Integers and addresses are passed as words.
pub fn call(library: &Library, name: &str, arguments: &[u64]) -> i32 {
    type Call = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> i32;
    let mut a = [0; 12];
    a[..arguments.len()].copy_from_slice(arguments);
    // SAFETY: driver calls take integers and addresses only; the C ABI lets a function ignore words that it does not take.
    unsafe {
        library.get::<Call>(name.as_bytes()).unwrap()(
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11],
        )
    }
}

fn answer(mut stream: UnixStream, replies: &[Reply], asked: &mut usize) -> UnixStream {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).unwrap();
    let mut body = vec![0; message::body_len(prefix).unwrap()];
    stream.read_exact(&mut body).unwrap();
    let reply = match message::decode::<Request>(&body).unwrap().want {
        Want::Version => &Reply::Version(13000),
        _ => {
            *asked += 1;
            &replies[(*asked - 1).min(replies.len() - 1)]
        }
    };
    stream.write_all(&message::encode(reply)).unwrap();
    stream
}

/// Does something beside a daemon that gives these answers, the last one again and again; `body` is told its socket. Returns what came
/// of it and how often a worker was asked for.
pub fn beside_daemon<T>(replies: Vec<Reply>, body: impl FnOnce(&Path) -> T) -> (T, usize) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("grant.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let daemon = std::thread::spawn({
        let ended = ended.clone();
        move || {
            let (mut open, mut asked) = (Vec::new(), 0);
            for stream in listener.incoming() {
                if ended.load(Ordering::Relaxed) {
                    break;
                }
                open.push(answer(stream.unwrap(), &replies, &mut asked));
            }
            asked
        }
    });
    let came = body(&socket);
    ended.store(true, Ordering::Relaxed);
    // Wakes it.
    UnixStream::connect(&socket).unwrap();
    (came, daemon.join().unwrap())
}

/// Runs a program beside such a daemon; returns what it printed.
pub fn run(program: &str, replies: Vec<Reply>, variables: &[(&str, String)]) -> (Output, usize) {
    beside_daemon(replies, |socket| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", program])
            .env("GPUSESSION_SOCKET", socket)
            .env("GPUSESSION_TRACE", "why,missing,summary")
            .env_remove("GPUSESSION_TRACE_FILE")
            .env_remove("GPUSESSION_DISABLE")
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .output()
            .unwrap()
    })
}
