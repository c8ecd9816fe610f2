//! Programs and leases outlive a server where systemd keeps descriptors for the next one.

use std::io::IoSliceMut;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::unistd::Pid;

use crate::{pid, renew};
use gpusession_test_server::{Client, Server, alive, eventually, rest};

/// The part of systemd that a unit uses: notifications and the descriptor store.
#[derive(Clone)]
pub(crate) struct Systemd {
    heard: Arc<Mutex<Heard>>,
    path: std::path::PathBuf,
}

#[derive(Default)]
struct Heard {
    kept: Vec<(String, OwnedFd)>,
    ready: u32,
}

impl Systemd {
    pub(crate) fn new(server: &Server) -> Self {
        let path = server.path("systemd");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        // The server may have another user.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).expect("a mode");
        let this = Self { heard: Arc::default(), path };
        let heard = this.heard.clone();
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            loop {
                listen(&socket, &heard);
            }
        });
        this
    }

    /// Starts a server with the descriptors of the server before.
    pub(crate) async fn run(&self, server: &mut Server) {
        let before = self.heard.lock().unwrap().ready;
        let child = {
            let heard = self.heard.lock().unwrap();
            let names: Vec<&str> = heard.kept.iter().map(|(name, _)| name.as_str()).collect();
            let fds: Vec<RawFd> = heard.kept.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
            let serve = server.command(&["serve"]);
            let mut command = Command::new("/bin/sh");
            command
                .args(["-c", "export LISTEN_PID=$$; exec \"$0\" serve"])
                .arg(serve.get_program())
                .envs(serve.get_envs().filter_map(|(key, value)| Some((key, value?))))
                .env("NOTIFY_SOCKET", &self.path)
                .env("FDSTORE", "64")
                .env("LISTEN_FDS", names.len().to_string())
                .env("LISTEN_FDNAMES", names.join(":"))
                .stdin(Stdio::null());
            if let Some(user) = server.user {
                command.uid(user).gid(user);
            }
            // SAFETY: between fork and exec the child only calls fcntl and dup2, which are
            // async-signal-safe, on a list made before.
            unsafe {
                command.pre_exec(move || {
                    // First move them above their final numbers.
                    let mut above = [0; 64];
                    for (i, fd) in fds.iter().enumerate() {
                        above[i] = nix::libc::fcntl(*fd, nix::libc::F_DUPFD_CLOEXEC, 200);
                    }
                    for (fd, target) in above[..fds.len()].iter().zip(3..) {
                        if nix::libc::dup2(*fd, target) < 0 {
                            return Err(std::io::Error::last_os_error());
                        }
                    }
                    Ok(())
                })
            };
            command.spawn().expect("gpuserver starts")
        };
        eventually("gpuserver gets ready", async || self.heard.lock().unwrap().ready > before).await;
        server.runs(child);
    }

    /// Returns the number of kept workers.
    pub(crate) fn workers(&self) -> usize {
        let heard = self.heard.lock().unwrap();
        heard.kept.iter().filter(|(name, _)| name.starts_with('w')).count() / 3
    }

    /// Changes the record of the worker with this process id.
    fn rewrite(&self, worker: u32, change: impl FnOnce(Vec<u8>) -> Vec<u8>) {
        let heard = self.heard.lock().unwrap();
        let text = format!("\"pid\":{worker},");
        let mut change = Some(change);
        for (_, fd) in &heard.kept {
            let file = std::fs::File::from(fd.try_clone().unwrap());
            let mut bytes = vec![0; 1 << 16];
            let Ok(n) = file.read_at(&mut bytes, 0) else { continue };
            if n > 36
                && String::from_utf8_lossy(&bytes[36..n]).contains(&text)
                && let Some(change) = change.take()
            {
                let len = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
                let json = change(bytes[36..36 + len].to_vec());
                let mut out = (json.len() as u32).to_le_bytes().to_vec();
                out.extend(blake3::hash(&json).as_bytes());
                out.extend(json);
                file.write_all_at(&out, 0).unwrap();
            }
        }
        assert!(change.is_none(), "no record of {worker}");
    }
}

fn listen(socket: &UnixDatagram, heard: &Mutex<Heard>) {
    let mut buffer = [0; 4096];
    let mut space = nix::cmsg_space!([RawFd; 8]);
    let mut slices = [IoSliceMut::new(&mut buffer)];
    let received =
        recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC).unwrap();
    let fds: Vec<OwnedFd> = received
        .cmsgs()
        .unwrap()
        .flat_map(|message| match message {
            ControlMessageOwned::ScmRights(fds) => fds,
            _ => vec![],
        })
        // SAFETY: the kernel has just created these descriptors for us; they have no other owner.
        .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
        .collect();
    let length = received.bytes;
    let said = String::from_utf8_lossy(&buffer[..length]).into_owned();
    let name = said.lines().find_map(|l| l.strip_prefix("FDNAME=")).unwrap_or_default().to_owned();
    let has = |line| said.lines().any(|l| l == line);
    let mut heard = heard.lock().unwrap();
    if has("FDSTORE=1") {
        assert!(has("FDPOLL=0"), "{said}");
        // Of several descriptors of one socket systemd keeps one.
        if !name.starts_with('w') {
            heard.kept.retain(|(kept, _)| *kept != name);
        }
        heard.kept.extend(fds.into_iter().map(|fd| (name.clone(), fd)));
    } else if has("FDSTOREREMOVE=1") {
        heard.kept.retain(|(kept, _)| *kept != name);
    }
    heard.ready += u32::from(has("READY=1"));
}

/// Starts a program; returns its worker's id, its connection and the worker's line.
pub(crate) async fn program(
    server: &Server,
    vm: &mut Client,
    lease: &str,
) -> (Vec<u8>, TcpStream, serde_json::Value) {
    let worker = vm.take(lease).await.unwrap();
    let (lane, said) = server.adopt(&worker.id, 0, true);
    eventually("it is counted", async || worker_row(server, &said)["memory_bytes"] == 128 << 20).await;
    (worker.id, lane, said)
}

/// Returns the row of a program's worker.
pub(crate) fn worker_row(server: &Server, said: &serde_json::Value) -> serde_json::Value {
    server.workers().into_iter().find(|w| w["worker"] == said["worker"]).unwrap_or_default()
}

#[tokio::test]
async fn programs_outlive_the_server() {
    let mut server = Server::prepare("libcuda.so.1", "").await;
    let systemd = Systemd::new(&server);
    systemd.run(&mut server).await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let (_id, mut lane, said) = program(&server, &mut vm, &lease.id).await;
    let own = std::path::PathBuf::from(said["environment"]["CUDA_CACHE_PATH"].as_str().unwrap());
    std::fs::create_dir_all(own.join("a/b")).unwrap();
    std::fs::write(own.join("a/b/code"), "compiled").unwrap();
    let granted = vm.take(&lease.id).await.unwrap();
    let data = server.data.clone();
    for signal in [Signal::SIGUSR2, Signal::SIGKILL] {
        let before = worker_row(&server, &said);
        let preface = server.preface(&granted.id, u16::from(signal != Signal::SIGUSR2), true);
        assert_eq!(server.signal(signal).code(), (signal == Signal::SIGUSR2).then_some(0));
        // A connection that is made between two servers waits.
        let mut waits = server.data_connection(zerocopy::IntoBytes::as_bytes(&preface));
        systemd.run(&mut server).await;
        assert_eq!(server.data, data);
        let mut byte = [0];
        assert_eq!(
            std::io::Read::read(&mut waits, &mut byte).unwrap(),
            1,
            "its connection was not handed over"
        );
        assert_eq!(byte, [b'{']);
        let after = worker_row(&server, &said);
        for key in ["worker", "pid", "state", "lease", "program", "client_pid", "memory_bytes", "isolation"] {
            assert_eq!(after[key], before[key], "{key} after {signal}");
        }
        assert_eq!(pid(&after["pid"]), pid(&said["pid"]));
        let mut vm = server.again(&vm).await;
        let renewed = vm.pool.renew(renew(&[&lease.id])).await.unwrap().into_inner().leases;
        assert!(!renewed[0].lost);
        // New programs get workers of the new server.
        let fresh = vm.take(&lease.id).await.unwrap();
        server.adopt(&fresh.id, 0, true);
        std::mem::forget(waits);
    }
    // The server notices and records the worker's exit, although it is not its parent.
    kill(Pid::from_raw(pid(&said["pid"]) as i32), Signal::SIGKILL).unwrap();
    assert!(rest(&mut lane).is_empty());
    eventually("it is off the books", async || worker_row(&server, &said).is_null()).await;
    eventually("its folder is gone", async || !own.exists()).await;
    let next = server.again(&vm).await.take(&lease.id).await.unwrap();
    let (_lane, later) = server.adopt(&next.id, 0, true);
    let code = later["environment"]["CUDA_CACHE_PATH"].as_str().unwrap().to_owned() + "/a/b/code";
    assert_eq!(std::fs::read_to_string(&code).unwrap(), "compiled", "its user's next program has its code");
    // The driver deletes code that it used least; it does not come back with a connection.
    std::fs::remove_file(&code).unwrap();
    assert_eq!(server.signal(Signal::SIGUSR2).code(), Some(0));
    systemd.run(&mut server).await;
    server.adopt(&next.id, 1, true);
    assert!(!std::path::Path::new(&code).exists(), "it came back");
    let mut records = server.json(&["accounting"]);
    records = records["records"].take();
    let record = records.as_array().unwrap().iter().find(|r| r["worker"] == said["worker"]).unwrap();
    assert_eq!((&record["program"], &record["calls"]), (&"vectorAdd".into(), &7.into()));
    // An ordinary stop keeps no worker.
    let pids: Vec<u32> =
        server.workers().iter().filter_map(|w| w["pid"].as_u64()).map(|p| p as u32).collect();
    assert!(pids.len() >= 3 && systemd.workers() >= 3);
    assert_eq!(server.signal(Signal::SIGTERM).code(), Some(0));
    assert!(!pids.iter().any(|p| alive(*p)));
    eventually("nothing is kept", async || systemd.workers() == 0).await;
}

#[tokio::test]
async fn workers_with_unreadable_records_are_killed() {
    let mut server = Server::prepare("deaf-libcuda.so.1", "").await;
    let systemd = Systemd::new(&server);
    systemd.run(&mut server).await;
    let mut vm = server.client("vm-1").await;
    let mut other = server.client("vm-2").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let lost = other.allocate(100.0).await.unwrap();
    let (_a, _lane_a, good) = program(&server, &mut vm, &lease.id).await;
    let (_b, _lane_b, garbled) = program(&server, &mut vm, &lease.id).await;
    let (_c, _lane_c, newer) = program(&server, &mut vm, &lease.id).await;
    let (_d, _lane_d, leaseless) = program(&server, &mut other, &lost.id).await;
    let (_f, _lane_f, incomplete) = program(&server, &mut vm, &lease.id).await;
    server.signal(Signal::SIGKILL);
    systemd.rewrite(pid(&garbled["pid"]), |mut json| {
        json.truncate(20);
        json
    });
    systemd.rewrite(pid(&newer["pid"]), |json| {
        let mut value: serde_json::Value = serde_json::from_slice(&json).unwrap();
        value["supervise"] = 99.into();
        value.to_string().into()
    });
    // One descriptor of the last worker is missing.
    let (_e, kept) = {
        let mut heard = systemd.heard.lock().unwrap();
        let used: Vec<String> =
            heard.kept.iter().map(|(n, _)| n.clone()).filter(|n| n.starts_with('w')).collect();
        let name = used.last().unwrap().clone();
        let at = heard.kept.iter().position(|(n, _)| *n == name).unwrap();
        (heard.kept.remove(at), used.len() / 3)
    };
    assert_eq!(kept, 5, "those that programs have taken");
    assert!(server.verb(&["clients", "revoke", "vm-2"]).status.success());
    systemd.run(&mut server).await;
    // These workers ignore orders, and are killed nevertheless.
    for gone in [&garbled, &newer, &leaseless, &incomplete] {
        eventually("it ended", async || !alive(pid(&gone["pid"]))).await;
    }
    assert!(alive(pid(&good["pid"])) && worker_row(&server, &good)["state"] == "active");
    // Their programs are recorded, although the server could not read their workers' records.
    let unseen = |r: &&serde_json::Value| r["reason"].as_str().unwrap().starts_with("its end was not seen");
    let rows = server.json(&["accounting", "--kind", "process"]);
    assert_eq!(rows["records"].as_array().unwrap().iter().filter(unseen).count(), 3, "{rows}");
    let pids: Vec<u32> =
        server.workers().iter().filter_map(|w| w["pid"].as_u64()).map(|p| p as u32).collect();
    eventually("the worker of the program is kept", async || systemd.workers() == 1).await;
    // A forced quit kills workers that ignore orders.
    assert_eq!(server.signal(Signal::SIGQUIT).code(), Some(2));
    eventually("they ended", async || !pids.iter().any(|p| alive(*p))).await;
}

#[tokio::test]
async fn without_a_store_nothing_outlives_the_server() {
    let mut server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let worker = vm.take(&lease.id).await.unwrap();
    let (mut lane, said) = server.adopt(&worker.id, 0, true);
    assert_eq!(server.signal(Signal::SIGUSR2).code(), Some(0));
    assert!(rest(&mut lane).is_empty());
    assert!(!alive(pid(&said["pid"])));
}

#[tokio::test]
async fn a_forced_quit_records_its_processes() {
    let mut server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let (_worker, _lane, _) = program(&server, &mut vm, &lease.id).await;
    assert_eq!(server.signal(Signal::SIGQUIT).code(), Some(2));
    server.run().await;
    let rows = server.json(&["accounting", "--kind", "process"]);
    assert_eq!(rows["records"][0]["reason"], "the server was forced to quit", "{rows}");
}

#[tokio::test]
async fn processes_of_a_killed_server_are_recorded() {
    let mut server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    let (_worker, _lane, _) = program(&server, &mut vm, &lease.id).await;
    assert_eq!(server.json(&["accounting"])["records"].as_array().unwrap().len(), 0);
    server.signal(Signal::SIGKILL);
    server.run().await;
    let rows = server.json(&["accounting", "--kind", "process"]);
    let record = &rows["records"][0];
    assert_eq!(
        (&record["program"], &record["lease"]),
        (&"vectorAdd".into(), &lease.id.clone().into()),
        "{rows}"
    );
    assert!(record["reason"].as_str().unwrap().starts_with("its end was not seen"), "{rows}");
}

#[tokio::test]
async fn a_lease_whose_gpu_is_served_no_more_is_on_record() {
    let mut server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    server.signal(Signal::SIGKILL);
    let other = if lease.devices[0].uuid.ends_with('0') { 1 } else { 0 };
    server.configure("libcuda.so.1", &format!("gpus = [{other}]"));
    server.run().await;
    let rows = server.json(&["accounting", "--kind", "lease"]);
    assert_eq!(rows["records"][0]["lease"], lease.id.as_str(), "{rows}");
    assert_eq!(
        rows["records"][0]["reason"],
        "since the restart, one of its GPUs is not served, or is shared in another way"
    );
}

#[tokio::test]
async fn a_lease_whose_end_was_stored_without_its_record_gets_one() {
    let mut server = Server::start().await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(100.0).await.unwrap();
    // Reading the records waits for the note of the grant.
    assert_eq!(server.json(&["accounting"])["records"], serde_json::json!([]));
    server.signal(Signal::SIGKILL);
    // A server that is killed right after it stored the lease's end leaves such a file.
    std::fs::remove_file(server.path("state/leases.json")).unwrap();
    for _ in 0..2 {
        server.run().await;
        let rows = server.json(&["accounting"])["records"].clone();
        assert_eq!(rows.as_array().unwrap().len(), 1, "once, whatever the number of restarts: {rows}");
        assert_eq!((&rows[0]["kind"], &rows[0]["lease"]), (&"lease".into(), &lease.id.clone().into()));
        assert_eq!(rows[0]["gpus"].as_array().unwrap().len(), 1, "{rows}");
        assert!(rows[0]["reason"].as_str().unwrap().starts_with("its end was not seen"), "{rows}");
        let ends = server.json(&["audit", "--event", "lease-ended"])["audit"].clone();
        assert_eq!((ends.as_array().unwrap().len(), &ends[0]["lease"]), (1, &rows[0]["lease"]));
        server.signal(Signal::SIGKILL);
    }
}
