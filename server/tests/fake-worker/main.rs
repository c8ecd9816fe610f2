//! A worker without a driver, for the server's tests.
//!
//! It never loads the "driver"; the name of that file selects its behaviour:
//!
//! * `...no-driver...`: the probe works, workers report `Failed`.
//! * `...free...`: workers report `Failed` if they are to be isolated.
//! * `...hiccup...`: the first worker reports `Failed`.
//! * `...full...`: no context fits on the GPUs before a worker starts.
//! * `...open...`: the host has no Landlock.
//! * `...crash...`: workers exit as soon as they are started.
//! * `...many...`: there are 80 GPUs, else 2.
//! * `...alone...`: the first GPU is in compute mode EXCLUSIVE_PROCESS.
//! * `...pageable...`: kernels on the second GPU reach all memory of their process.
//! * `...greedy...`: a program wants 300 MiB of mapped host memory at once.
//! * `...hungry...`: a program makes its worker take 64 MiB of the server's memory.
//! * `...unmapped...`: a program makes its worker write 1 GiB into a file in memory that it maps
//!   nowhere.
//! * `...hidden...`: a program makes its worker write 5 MiB of compiled code into a file that it
//!   deletes and keeps open.
//! * `...crowded...`: a program makes its worker start 20 threads.
//! * `...busy...`: under MPS, workers stop in the middle of their GPU work.
//! * `...deaf...`: workers get ready but ignore `Stop` and the end of their channel.
//! * `...boasting...`: a program makes its worker report its isolation again.
//! * `...remnant...`: workers find 5 bytes in memory of the first GPU; a program makes its worker
//!   report one more.
//! * `...eager...`: a program makes its worker report again that it is ready.
//! * `...heirs...`: a program's worker exits, and processes that it started keep sending in its
//!   place.
//! * `...clogged...`: a program's worker sends more than its channel holds, and reads no answer.
//! * `...flooding...`: a program's worker asks for memory without end.
//! * `...lingering...`: a program's worker passes the program's connection to the server, whose
//!   last `close` waits a minute for the program.
//! * `...curious...`: a program's worker asks for 5000 images, and reports the answers on its lane.
//! * `...contexts...`: a program's worker reports 40 contexts.
//! * `...pause...`: a program's worker pauses; with `...parks...` it also says that its memory has
//!   moved.
//!
//! Its NVML reports the contents of `readings.json` in the folder of the "driver"; without that
//! file it has no NVML.
//!
//! A handed-over connection gets one line: the worker's id, the lane's preface and facts about the
//! process.
#![expect(clippy::disallowed_methods, reason = "a stand-in misbehaves in time")]

use std::io::{IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use gpusession_proto::isolation::{Failure, Report};
use gpusession_proto::message;
use gpusession_proto::preface::{LEN, Preface};
use gpusession_proto::readings::{Answer, FromMonitor, ToMonitor};
use gpusession_proto::supervise::{
    ClientProcess, FromWorker, Isolation, MAX_PACKET, ToWorker, Usage, WORKER_FD, decode, encode,
};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, send};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let [_, probe, driver] = args.as_slice()
        && probe == "--probe"
    {
        if driver.contains("no-probe") {
            eprintln!("cuInit: CUDA_ERROR_NO_DEVICE (100)");
            std::process::exit(1);
        }
        let devices: Vec<_> = (0..if driver.contains("many") { 80 } else { 2 })
            .map(|i| {
                serde_json::json!({
                    "uuid": format!("GPU-00000000-0000-0000-0000-{i:012}"), "name": "Fake GPU",
                    "memory_bytes": 16_u64 << 30, "compute_major": 9, "compute_minor": 0,
                    "pci_address": format!("0000:{i:02x}:00.0"), "multiprocessors": 132,
                    "compute_mode": if driver.contains("alone") && i == 0 { 3 } else { 0 },
                    "pageable_access": driver.contains("pageable") && i == 1
                })
            })
            .collect();
        println!(
            "{}",
            serde_json::json!({ "driver_version": null, "cuda_version": 13000, "devices": devices })
        );
        return;
    }
    if let [_, probe, driver, ..] = args.as_slice()
        && let Some(fenced) = ["--probe-free", "--probe-contained"].iter().position(|flag| flag == probe)
    {
        let failure = |reason: &str, full| Some(Failure { reason: reason.into(), full });
        let report = Report {
            landlock: 3,
            lacking: driver.contains("open").then(|| "landlock: missing".to_string()).into_iter().collect(),
            driver: match driver {
                _ if driver.contains("full") => failure("cuDevicePrimaryCtxRetain: CUDA error 2", true),
                _ if driver.contains("free") && fenced == 1 => failure("cuInit: CUDA error 304", false),
                _ => None,
            },
        };
        return println!("{}", serde_json::to_string(&report).unwrap());
    }
    if args.get(1).is_some_and(|flag| flag == "--monitor") {
        return monitor(&args[2]);
    }
    if args.get(1).is_some_and(|flag| flag == "--mps") {
        use std::os::unix::process::CommandExt as _;
        panic!("{}", std::process::Command::new(&args[4]).args(&args[5..]).exec());
    }
    // A child of the test, not of the server.
    if args.get(1).is_some_and(|flag| flag == "--asks") {
        return println!("{}", asks_the_server(&args[2]).unwrap());
    }
    if args.get(1).is_some_and(|flag| flag == "--heir") {
        // A message that the server answers more slowly than this loop sends it.
        let packet = encode(&FromWorker::MemoryReturned { device: 0, bytes: 0 });
        while send(WORKER_FD, &packet, MsgFlags::MSG_NOSIGNAL).is_ok() {}
        return;
    }
    serve();
}

/// Answers each request with the present contents of `readings.json` in the folder of the "driver".
fn monitor(driver: &str) {
    let say = |message: &FromMonitor| {
        let mut out = std::io::stdout();
        out.write_all(&message::encode(message)).and_then(|()| out.flush()).unwrap();
    };
    let file = std::path::Path::new(driver).with_file_name("readings.json");
    if !file.exists() {
        return say(&FromMonitor::Failed("a worker without a driver has no NVML".into()));
    }
    say(&FromMonitor::Ready { driver_version: "0.0".into(), nvml_version: "0.0".into() });
    let mut prefix = [0; 4];
    while std::io::stdin().read_exact(&mut prefix).is_ok() {
        let mut body = vec![0; message::body_len(prefix).unwrap()];
        std::io::stdin().read_exact(&mut body).unwrap();
        say(&match message::decode(&body).unwrap() {
            ToMonitor::Read => {
                let text = std::fs::read_to_string(&file).unwrap();
                FromMonitor::Gpus(serde_json::from_str(&text).unwrap())
            }
            ToMonitor::Ask(queries) => FromMonitor::Answers(vec![Answer::default(); queries.len()]),
        });
    }
}

/// Images that a curious worker asks for.
const IMAGES: u64 = 5000;

fn tell(message: &FromWorker) {
    let packet = encode(message);
    let _ = send(WORKER_FD, &packet, MsgFlags::MSG_NOSIGNAL);
}

#[expect(clippy::too_many_lines, reason = "one `match` over the messages")]
fn serve() {
    let mut start = None;
    // The connections stay open, as in a real worker.
    let mut lanes: Vec<TcpStream> = Vec::new();
    let mut answers = 0;
    loop {
        let mut packet = vec![0; MAX_PACKET];
        let mut space = nix::cmsg_space!([i32; 1]);
        let (len, fd) = {
            let mut parts = [IoSliceMut::new(&mut packet)];
            let got =
                recvmsg::<()>(WORKER_FD, &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC).unwrap();
            let fd = got.cmsgs().unwrap().find_map(|c| match c {
                // SAFETY: the kernel has just created this descriptor for us; it has no other
                // owner.
                ControlMessageOwned::ScmRights(fds) => Some(unsafe { OwnedFd::from_raw_fd(fds[0]) }),
                _ => None,
            });
            (got.bytes, fd)
        };
        if len == 0 {
            return;
        }
        match decode(&packet[..len]).unwrap() {
            ToWorker::Start(s) => {
                if s.driver.contains("crash") {
                    std::process::exit(7);
                }
                if s.driver.contains("free") && s.isolation != Isolation::Off {
                    tell(&FromWorker::Failed { reason: "cuInit: CUDA error 304".into() });
                    return;
                }
                let first = || std::fs::File::create_new(format!("{}.first", s.driver)).is_ok();
                if s.driver.contains("hiccup") && first() {
                    tell(&FromWorker::Failed { reason: "cuInit: CUDA error 2".into() });
                    return;
                }
                if s.driver.contains("no-driver") {
                    tell(&FromWorker::Failed { reason: "cuInit: CUDA_ERROR_SYSTEM_NOT_READY (802)".into() });
                    return;
                }
                if s.isolation != Isolation::Off {
                    tell(&FromWorker::Contained { lacking: Vec::new() });
                }
                let sampled = |left| tell(&FromWorker::Sampled { device: 0, bytes: 64 << 20, left });
                if s.verify_memory {
                    sampled(if s.driver.contains("remnant") { 5 } else { 0 });
                }
                tell(&FromWorker::Ready {
                    fingerprint: *blake3::hash(&s.worker).as_bytes(),
                    cuda_version: 13000,
                    parks: s.driver.contains("parks"),
                });
                start = Some(s);
            }
            ToWorker::Adopt { number, preface, .. } => {
                let s = start.as_ref().unwrap();
                let preface = Preface::parse(&<[u8; LEN]>::try_from(preface.as_slice()).unwrap()).unwrap();
                let mut lane = TcpStream::from(fd.unwrap());
                // SAFETY: `lane` owns the descriptor for as long as it is borrowed here.
                let borrowed = unsafe { BorrowedFd::borrow_raw(lane.as_raw_fd()) };
                let flags = nix::fcntl::fcntl(borrowed, nix::fcntl::FcntlArg::F_GETFL).unwrap();
                let facts = serde_json::json!({
                    "worker": data_encoding::HEXLOWER.encode(&s.worker), "lease": s.lease, "pid": std::process::id(),
                    "lane": preface.lane.get(), "attempt": preface.attempt.get(), "require_tls": s.require_tls,
                    "staging": s.staging_bytes, "grace": s.resume_grace_s, "limits": s.devices.iter().map(|d| d.memory_bytes).collect::<Vec<_>>(),
                    "key": s.ticket_key.is_some(), "warm": s.warm, "mps": s.mps, "admin": asks_the_server(&s.driver),
                    "blocking": flags & nix::libc::O_NONBLOCK == 0,
                    "stack_unlimited": getrlimit(Resource::RLIMIT_STACK).unwrap().0 == RLIM_INFINITY,
                    "environment": std::env::vars().collect::<std::collections::BTreeMap<_, _>>(),
                });
                tell(&FromWorker::Admitted { number, lane: preface.lane.get() });
                writeln!(lane, "{facts}").unwrap();
                tell(&FromWorker::Presented(ClientProcess {
                    uid: 1000,
                    user: "alice".into(),
                    pid: 42,
                    program: "vectorAdd".into(),
                    executable: "/opt/vectorAdd".into(),
                    encrypted: preface.tls(),
                }));
                tell(&FromWorker::Usage(Usage {
                    calls: 7,
                    bytes_to_device: 100,
                    bytes_from_device: 200,
                    memory_bytes: 0,
                    contexts: if s.driver.contains("contexts") { 40 } else { 1 },
                    idle_usec: 0,
                }));
                if s.driver.contains("remnant") {
                    tell(&FromWorker::Sampled { device: 0, bytes: 1, left: 1 });
                }
                if s.driver.contains("boasting") {
                    tell(&FromWorker::Contained { lacking: vec!["nothing".into()] });
                }
                if s.driver.contains("eager") {
                    tell(&FromWorker::Ready { fingerprint: [7; 32], cuda_version: 13000, parks: false });
                }
                if s.driver.contains("heirs") {
                    // SAFETY: the channel is open for as long as this process lives.
                    let channel = unsafe { BorrowedFd::borrow_raw(WORKER_FD) };
                    let kept = nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty());
                    nix::fcntl::fcntl(channel, kept).unwrap();
                    // Several processes, so that the channel always has a message.
                    let own = std::env::current_exe().unwrap();
                    let heir = |_| drop(std::process::Command::new(&own).arg("--heir").spawn().unwrap());
                    (0..4).for_each(heir);
                    // By then they send.
                    std::thread::sleep(std::time::Duration::from_millis(300));
                    std::process::exit(0);
                }
                if s.driver.contains("hungry") {
                    // The memory stays until the worker exits.
                    std::mem::forget(vec![1u8; 64 << 20]);
                }
                if s.driver.contains("unmapped") {
                    let flags = nix::sys::memfd::MFdFlags::empty();
                    let file = nix::sys::memfd::memfd_create(c"unmapped", flags).unwrap();
                    let mut file = std::fs::File::from(file);
                    (0..1024).for_each(|_| file.write_all(&[7; 1 << 20]).unwrap());
                    std::mem::forget(file);
                }
                if s.driver.contains("hidden") {
                    let folder = std::path::PathBuf::from(std::env::var_os("CUDA_CACHE_PATH").unwrap());
                    let mut file = std::fs::File::create(folder.join("code")).unwrap();
                    std::fs::remove_file(folder.join("code")).unwrap();
                    file.write_all(&vec![1; 5 << 20]).unwrap();
                    std::mem::forget(file);
                }
                if s.driver.contains("crowded") {
                    let wait = || std::thread::sleep(std::time::Duration::from_secs(3600));
                    (0..20).for_each(|_| drop(std::thread::spawn(wait)));
                }
                if s.driver.contains("clogged") {
                    (0..10_000)
                        .for_each(|serial| tell(&FromWorker::MemoryWanted { device: 0, serial, bytes: 0 }));
                    std::thread::sleep(std::time::Duration::from_secs(3600));
                }
                if s.driver.contains("lingering") {
                    pass_a_lingering(&lane);
                    // The server has the only descriptor from here on.
                    continue;
                }
                if s.driver.contains("curious") {
                    let ask = |serial| tell(&FromWorker::ImageWanted { serial, hash: [7; 32] });
                    // A thread of its own, since this one reads the answers.
                    std::thread::spawn(move || (0..IMAGES).for_each(ask));
                }
                if s.driver.contains("flooding") {
                    let ask = |serial| tell(&FromWorker::MemoryWanted { device: 0, serial, bytes: 0 });
                    // A thread of its own, since this one reads the answers.
                    std::thread::spawn(move || (0..u64::MAX).for_each(ask));
                }
                if s.driver.contains("greedy") {
                    tell(&FromWorker::StagingFull { bytes: 300 << 20 });
                }
                tell(&FromWorker::MemoryWanted { device: 0, serial: 1, bytes: 100 << 20 });
                lanes.push(lane);
            }
            ToWorker::Pause if start.as_ref().is_some_and(|s| s.driver.contains("pause")) => {
                tell(&FromWorker::Paused { quiet: true });
            }
            ToWorker::MoveOut { .. } | ToWorker::MoveBack => tell(&FromWorker::Moved { failed: None }),
            ToWorker::Admission { refused: None }
            | ToWorker::Opened { .. }
            | ToWorker::Pause
            | ToWorker::Resume => {}
            ToWorker::Admission { refused: Some(reason) } => {
                for mut lane in lanes {
                    let _ = writeln!(lane, "{}", serde_json::json!({ "refused": reason }));
                }
                return;
            }
            ToWorker::Image { bytes: None, .. } => {
                answers += 1;
                if answers == IMAGES {
                    writeln!(lanes[0], "{answers} answers").unwrap();
                }
            }
            ToWorker::MemoryGranted { .. } | ToWorker::MemoryRecall | ToWorker::TakenOver => {}
            ToWorker::Image { .. } | ToWorker::ImageRoom { .. } => panic!("it offers no image"),
            // It shares nothing, and no other worker learns a name of its objects.
            ToWorker::ShareAsked { .. }
            | ToWorker::ShareGranted { .. }
            | ToWorker::ShareInherited { .. }
            | ToWorker::ShareLost { .. }
            | ToWorker::Unknown => {}
            ToWorker::Stop { reason } => match start.as_ref() {
                Some(s) if s.driver.contains("deaf") => {}
                Some(s) if s.mps && !lanes.is_empty() => {
                    tell(&FromWorker::Ended { reason, quiet: !s.driver.contains("busy") });
                }
                _ => return,
            },
            ToWorker::Exit => return,
        }
    }
}

/// Passes a connection with unsent bytes as the answer to a question that the server never asked.
fn pass_a_lingering(mut lane: &TcpStream) {
    use nix::sys::socket::{ControlMessage, sendmsg, setsockopt, sockopt};
    let linger = nix::libc::linger { l_onoff: 1, l_linger: 60 };
    setsockopt(lane, sockopt::Linger, &linger).unwrap();
    // The program reads its line only.
    lane.set_nonblocking(true).unwrap();
    while lane.write(&[7; 1 << 16]).is_ok() {}
    let packet = encode(&FromWorker::ShareGiven { number: 7, given: Ok(Default::default()) });
    let rights = [lane.as_raw_fd()];
    let beside = [ControlMessage::ScmRights(&rights)];
    let parts = [std::io::IoSlice::new(&packet)];
    sendmsg::<()>(WORKER_FD, &parts, &beside, MsgFlags::empty(), None).unwrap();
}

/// Returns the number of bytes that the administration socket answers to this process.
///
/// More than 0 means that the server takes it for an administrator.
fn asks_the_server(driver: &str) -> Option<usize> {
    let socket = std::path::Path::new(driver).with_file_name("run/admin.sock");
    let mut server = std::os::unix::net::UnixStream::connect(socket).ok()?;
    // The server may refuse the connection before the request.
    let _ = server.write_all(&2u32.to_le_bytes()).and_then(|()| server.write_all(b"{}"));
    let mut answer = Vec::new();
    let _ = server.read_to_end(&mut answer);
    Some(answer.len())
}
