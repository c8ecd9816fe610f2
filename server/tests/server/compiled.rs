//! Code that the driver compiled stays with the user whose program it was.

use std::path::{Path, PathBuf};

use gpusession_proto::control::{AllocateRequest, TakeWorkersRequest};
use gpusession_test_server::{Client, Server, eventually};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::pid;

/// A program of a user: its worker's line, and where its driver keeps compiled code.
struct Program {
    said: Value,
    folder: PathBuf,
    _lane: std::net::TcpStream,
}

impl Program {
    async fn start(server: &Server, vm: &mut Client, lease: &str, uid: u32) -> Self {
        let worker = vm.take(lease).await.unwrap();
        let (lane, said) = server.adopt_with(&server.preface_of(uid, &worker.id, 0, true));
        let folder = said["environment"]["CUDA_CACHE_PATH"].as_str().unwrap().into();
        Self { said, folder, _lane: lane }
    }

    fn writes(&self, name: &str) {
        let path = self.folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, name).unwrap();
    }

    fn sees(&self) -> Vec<PathBuf> {
        files(&self.folder)
    }

    /// Ends the worker, and waits until the server has its code.
    async fn end(self) {
        kill(Pid::from_raw(pid(&self.said["pid"]) as i32), Signal::SIGKILL).unwrap();
        eventually("its folder is gone", async || !self.folder.exists()).await;
    }
}

/// Lists what is below a folder and is no folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    let mut left = vec![folder.to_owned()];
    while let Some(next) = left.pop() {
        for entry in std::fs::read_dir(next).unwrap().map(Result::unwrap) {
            match entry.file_type().unwrap().is_dir() {
                true => left.push(entry.path()),
                false => all.push(entry.path().strip_prefix(folder).unwrap().to_owned()),
            }
        }
    }
    all.sort();
    all
}

#[tokio::test]
async fn a_users_compiled_code_reaches_the_users_programs_alone() {
    const ROOT: u32 = 0;
    const ALICE: u32 = 1000;
    const BOB: u32 = 1001;
    let server = Server::start_with("libcuda.so.1", "limits.gpus = 4").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(50.0).await.unwrap().id;
    let first = Program::start(&server, &mut vm, &lease, ALICE).await;
    assert!(first.sees().is_empty());
    for name in ["index", "a/b/code", "a/not-the-drivers", "a/b/c/neither"] {
        first.writes(name);
    }
    std::os::unix::fs::symlink("/etc/passwd", first.folder.join("a/b/link")).unwrap();
    nix::unistd::mkfifo(&first.folder.join("a/b/pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    // Another program of the user that runs at the same time has a folder of its own.
    let beside = Program::start(&server, &mut vm, &lease, ALICE).await;
    beside.writes("c/d/more");
    assert!(beside.sees() == [Path::new("c/d/more")] && beside.folder != first.folder);
    first.end().await;
    beside.end().await;
    for uid in [BOB, ROOT] {
        let other = Program::start(&server, &mut vm, &lease, uid).await;
        assert!(other.sees().is_empty(), "{uid}: {:?}", other.sees());
        other.writes("a/b/forged");
        other.end().await;
    }
    // In whichever lease.
    let own = AllocateRequest { user: "alice".into(), uid: ALICE, memory_percent: 20.0, ..vm.request() };
    let own = vm.pool.allocate(own).await.unwrap().into_inner().id;
    for lease in [lease, own] {
        let next = Program::start(&server, &mut vm, &lease, ALICE).await;
        assert_eq!(next.sees(), [Path::new("a/b/code"), Path::new("c/d/more")]);
    }
    // Neither does another client's user of the same number.
    let mut other = server.client("vm-2").await;
    let lease = other.allocate(20.0).await.unwrap().id;
    assert!(Program::start(&server, &mut other, &lease, ALICE).await.sees().is_empty());
}

#[tokio::test]
async fn users_of_a_lease_share_compiled_code_if_they_may() {
    let server = Server::start_with("libcuda.so.1", "limits.gpus = 4\nshare_compiled = \"on\"").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(50.0).await.unwrap().id;
    let alice = Program::start(&server, &mut vm, &lease, 1000).await;
    alice.writes("a/b/code");
    let bob = Program::start(&server, &mut vm, &lease, 1001).await;
    assert_eq!(bob.sees(), [Path::new("a/b/code")]);
    let own = AllocateRequest { user: "alice".into(), uid: 1000, memory_percent: 20.0, ..vm.request() };
    let own = vm.pool.allocate(own).await.unwrap().into_inner().id;
    assert!(Program::start(&server, &mut vm, &own, 1000).await.sees().is_empty(), "a lease of one user");
}

#[tokio::test]
async fn a_program_may_do_without_kept_code_and_not_choose_where_it_lies() {
    let server = Server::start_with("libcuda.so.1", "").await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(50.0).await.unwrap().id;
    let environment = [("CUDA_CACHE_DISABLE".into(), "1".into())].into();
    let take = TakeWorkersRequest { lease, count: 1, environment, ..Default::default() };
    let worker = vm.pool.take_workers(take).await.unwrap().into_inner().workers.remove(0);
    let (_lane, said) = server.adopt(&worker.id, 0, true);
    assert_eq!(said["environment"]["CUDA_CACHE_DISABLE"], "1");
}

#[tokio::test]
async fn compiled_code_that_no_worker_may_use_any_longer_is_deleted() {
    let mut server = Server::prepare("libcuda.so.1", "").await;
    let compiled = server.path("state").join("cache/compiled");
    let shared = compiled.join("0123456789abcdef0123456789abcdef");
    let (of_a_user, of_another_server) =
        (compiled.join("0123456789abcdef0123456789abcdef-1000"), compiled.join("0123.4567"));
    for folder in [&shared, &of_a_user, &of_another_server] {
        std::fs::create_dir_all(folder.join("a/b")).unwrap();
        std::fs::write(folder.join("a/b/code"), "of an earlier release").unwrap();
    }
    server.run().await;
    eventually("what users shared is gone", async || !shared.exists()).await;
    let mut vm = server.client("vm-1").await;
    let lease = vm.allocate(50.0).await.unwrap().id;
    let left = Program::start(&server, &mut vm, &lease, 1000).await;
    left.writes("a/b/code");
    server.signal(Signal::SIGKILL);
    server.run().await;
    eventually("what a killed server's worker left is gone", async || !left.folder.exists()).await;
    assert!(of_a_user.exists() && of_another_server.exists());
}
