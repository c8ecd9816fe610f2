use std::io::{IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpusession_proto::message;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::link::{Program, StartedWorker, Starter, with_channel};
use super::service::{self, Programs};
use super::{Act, Group, Purpose, Request, unit_of};
use crate::cgroups::{self, Bounds, Cgroups};
use crate::peer::Served;
use crate::pidfd::pid_of;
use crate::spawn::{self, Spawner};

/// A starter of this user, whose program is a script.
fn starter(folder: &Path, script: &str) -> Starter {
    let program = folder.join("program");
    std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let socket = folder.join("start.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let served = Served { uid: nix::unistd::geteuid().as_raw(), unit: None };
    spawn::hold_worker_fd().unwrap();
    let groups = Cgroups::of_this_unit(cgroups::STARTER);
    let acts = |act: &Act, descriptors: Vec<OwnedFd>| match act {
        Act::Kill => match descriptors.first().and_then(pid_of) {
            Some(pid) => Ok(spawn::end_group(pid).map(|()| Vec::new()).unwrap_or_default()),
            None => Err(std::io::Error::other("no pidfd")),
        },
        _ => Ok(Vec::new()),
    };
    std::thread::spawn(move || service::serve(&listener, Programs { program, groups }, &served, acts));
    Starter::Socket(socket)
}

#[tokio::test]
async fn a_program_gets_what_the_request_has_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        "echo \"$@\"; env | sort | grep -v -e ^PWD= -e ^_= -e ^SHLVL= -e ^OLDPWD=; cat; pwd >&2; exit 3";
    let driver = Path::new("/driver/libcuda.so.1");
    let there = starter(folder.path(), script).output(Purpose::Probe, driver, &[], &[]).await.unwrap();
    let here =
        Starter::Here(folder.path().join("program")).output(Purpose::Probe, driver, &[], &[]).await.unwrap();
    let said = String::from_utf8(there.stdout.clone()).unwrap();
    let begins = "--probe /driver/libcuda.so.1\n";
    assert!(said.starts_with(begins) && said.contains("\nLD_LIBRARY_PATH=/driver\n"), "{said}");
    assert!(!said.contains("HOME="), "{said}");
    assert_eq!((there.stderr.as_slice(), there.status.code()), (&b"/\n"[..], Some(3)));
    assert_eq!(there, here);
}

#[tokio::test]
async fn a_program_ends_with_its_connection_and_its_group() {
    let folder = tempfile::tempdir().unwrap();
    let starter = starter(folder.path(), "sleep 1000 & echo $$ $!; read line; echo \"$line\"; wait");
    let driver = Path::new("/driver/libcuda.so.1");
    let (program, mut to, mut from) = starter.helper(Purpose::Monitor, driver, &["require"]).await.unwrap();
    to.write_all(b"hello\n").await.unwrap();
    let mut said = Vec::new();
    while !said.ends_with(b"hello\n") {
        assert_ne!(from.read_buf(&mut said).await.unwrap(), 0);
    }
    let pids = String::from_utf8(said).unwrap();
    let pids: Vec<&str> = pids.lines().next().unwrap().split(' ').collect();
    assert!(pids.iter().all(|pid| Path::new("/proc").join(pid).exists()));
    drop(program);
    // Both have closed their output.
    let end = timeout(Duration::from_secs(10), from.read_to_end(&mut Vec::new())).await;
    assert_eq!(end.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn the_end_of_a_program_is_told_and_leaves_nothing_of_its_group() {
    let folder = tempfile::tempdir().unwrap();
    let starter = starter(folder.path(), "sleep 1000 & kill -9 $$");
    let driver = Path::new("/driver/libcuda.so.1");
    let (mut program, _to, mut from) = starter.helper(Purpose::Monitor, driver, &[]).await.unwrap();
    let status = timeout(Duration::from_secs(10), program.wait()).await.unwrap().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    let end = timeout(Duration::from_secs(10), from.read_to_end(&mut Vec::new())).await;
    assert_eq!(end.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn what_a_dead_daemon_of_mps_has_started_lives_on_until_the_server_clears_it() {
    let folder = tempfile::tempdir().unwrap();
    let starter = starter(folder.path(), "sleep 1000 >/dev/null & echo $!; read line; exit 4");
    let environment = vec![("PATH".into(), "/usr/bin:/bin".into())];
    let request = Request { purpose: Purpose::Mps, arguments: Vec::new(), environment };
    let (mut program, to, mut from) = starter.asked(request).await.unwrap();
    let mut said = Vec::new();
    while !said.ends_with(b"\n") {
        assert_ne!(from.read_buf(&mut said).await.unwrap(), 0);
    }
    let server: u32 = String::from_utf8(said).unwrap().trim().parse().unwrap();
    drop(to);
    let status = timeout(Duration::from_secs(10), program.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(4));
    assert!(Path::new("/proc").join(server.to_string()).exists());
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(server as i32), nix::sys::signal::Signal::SIGKILL)
        .unwrap();
}

/// Starts an endpoint, and returns it with its channel and its first message.
async fn endpoint(starter: &Starter, spawner: &Spawner) -> (Program, OwnedFd, String) {
    let bounds = Bounds { memory: 1 << 30, threads: 64 };
    let group = Group { of: "vm-1 netperf".into(), id: [0xab; 16], bounds };
    let groups = Cgroups::of_this_unit(cgroups::SERVER);
    let (program, channel) = starter.endpoint(group, spawner, &groups).await.unwrap();
    let said = heard(&channel);
    (program, channel, said)
}

/// Returns the next packet of a channel; empty: the other end is closed.
fn heard(channel: &OwnedFd) -> String {
    let mut readable = [PollFd::new(channel.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut readable, PollTimeout::from(10_000u16)), Ok(1), "no packet");
    let mut bytes = [0; 4096];
    let n = nix::unistd::read(channel, &mut bytes).unwrap();
    String::from_utf8(bytes[..n].to_vec()).unwrap()
}

#[tokio::test]
async fn an_endpoint_has_a_workers_channel_and_stack_and_ends_with_its_connection() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        "exec >&3; sleep 1000 & echo \"$@ $(ulimit -s) $(readlink /proc/$$/fd/0) $!\"; read line <&3; wait";
    let there = starter(folder.path(), script);
    let here = Starter::Here(folder.path().join("program"));
    let spawner = Spawner::new().unwrap();
    for starter in [&there, &here] {
        let (mut program, channel, said) = endpoint(starter, &spawner).await;
        let words: Vec<_> = said.split_whitespace().collect();
        assert_eq!(words[..3], ["--measure", "unlimited", "/dev/null"], "{said}");
        // No message comes while it runs, and a wait that is given up loses nothing.
        assert!(timeout(Duration::from_millis(50), program.wait()).await.is_err());
        assert!(Path::new("/proc").join(words[3]).exists());
        drop(program);
        assert_eq!(heard(&channel), "", "both have closed the channel");
    }
}

#[tokio::test]
async fn the_end_of_an_endpoint_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let starter = starter(folder.path(), "echo hello >&3; read line <&3; exit 7");
    let (mut program, channel, said) = endpoint(&starter, &Spawner::new().unwrap()).await;
    assert_eq!(said, "hello\n");
    assert!(timeout(Duration::from_millis(50), program.wait()).await.is_err());
    // The shell reads each byte by itself, and loses the rest of a packet.
    nix::unistd::write(&channel, b"\n").unwrap();
    let status = timeout(Duration::from_secs(10), program.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(7));
}

/// Starts a worker, and returns it with its first message.
async fn worker(starter: &Starter, outlives: bool) -> (StartedWorker, String) {
    let Starter::Socket(path) = starter else { unreachable!() };
    let bounds = Bounds { memory: 1 << 30, threads: 64 };
    let group = Group { of: "vm-1".into(), id: [0xcd; 16], bounds };
    let environment = vec![("PATH".into(), "/usr/bin:/bin".into())];
    let started = with_channel(path, Purpose::Worker { group, outlives }, environment).await.unwrap();
    let said = heard(&started.channel);
    (started, said)
}

fn exits(pidfd: &OwnedFd) -> bool {
    let mut exited = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut exited, PollTimeout::from(10_000u16)) == Ok(1)
}

fn runs(pidfd: &OwnedFd) -> bool {
    let mut exited = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut exited, PollTimeout::from(300u16)) == Ok(0)
}

/// Says how it was started, and ends with its channel.
const WORKS: &str = "echo \"($@) $(ulimit -s) $$\" >&3; read line <&3; exit 5";

#[tokio::test]
async fn a_worker_outlives_the_server_if_that_wants_it() {
    let folder = tempfile::tempdir().unwrap();
    let starter = starter(folder.path(), WORKS);
    let (StartedWorker { program, pidfd, channel }, said) = worker(&starter, true).await;
    let pid = program.id().unwrap();
    assert_eq!((said, pid_of(&pidfd)), (format!("() unlimited {pid}\n"), Some(pid)));
    drop(program);
    assert!(runs(&pidfd), "the next server has its channel");
    drop(channel);
    assert!(exits(&pidfd));

    let (StartedWorker { program, pidfd, channel: _channel }, _) = worker(&starter, false).await;
    drop(program);
    assert!(exits(&pidfd));
}

#[tokio::test]
async fn the_end_of_a_worker_is_told_and_another_process_kills_it() {
    let folder = tempfile::tempdir().unwrap();
    let starter = starter(folder.path(), WORKS);
    let desk = starter.desk().unwrap();
    let (StartedWorker { mut program, channel, .. }, _) = worker(&starter, true).await;
    drop(channel);
    let status = timeout(Duration::from_secs(10), program.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(5));

    let (StartedWorker { mut program, pidfd, channel: _channel }, _) = worker(&starter, true).await;
    desk.kill(pidfd.try_clone().unwrap());
    let status = timeout(Duration::from_secs(10), program.wait()).await.unwrap().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
}

#[test]
fn a_request_with_other_descriptors_starts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let Starter::Socket(path) = starter(folder.path(), "exec sleep 1000") else { unreachable!() };
    let bounds = Bounds { memory: 1 << 30, threads: 64 };
    let measure = Purpose::Measure(Group { of: String::new(), id: [1; 16], bounds });
    let kill = Purpose::Act(Act::Kill);
    for (purpose, descriptors) in [(Purpose::Monitor, 4), (measure, 3), (Purpose::Probe, 0), (kill, 0)] {
        let request = Request { purpose, arguments: Vec::new(), environment: Vec::new() };
        let socket = UnixStream::connect(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let nothing = std::fs::File::open("/dev/null").unwrap();
        let beside = vec![nothing.as_raw_fd(); descriptors];
        let rights = [ControlMessage::ScmRights(&beside)];
        let bytes = message::encode(&request);
        sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&bytes)], &rights, MsgFlags::empty(), None).unwrap();
        let mut said = Vec::new();
        let _ = (&socket).read_to_end(&mut said);
        let said = String::from_utf8_lossy(&said);
        assert!(said.contains("descriptors beside the request"), "{:?}: {said}", request.purpose);
    }
}

#[tokio::test]
async fn output_of_a_program_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let starter = starter(folder.path(), "exec cat /dev/zero");
    let endless = starter.output(Purpose::Probe, Path::new("/driver/libcuda.so.1"), &[], &[]);
    let said = timeout(Duration::from_secs(10), endless).await.unwrap().unwrap_err().to_string();
    assert!(said.contains("more than 1 MiB"), "{said}");
}

#[tokio::test]
async fn an_error_names_the_starter_and_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let driver = Path::new("/driver/libcuda.so.1");
    let failed = async |starter: &Starter| {
        starter.output(Purpose::Probe, driver, &[], &[]).await.expect_err("nothing runs").to_string()
    };
    let socket: PathBuf = "/run/gpuserver-worker-none/start.sock".into();
    let said = failed(&Starter::Socket(socket)).await;
    assert!(said.contains("systemctl status gpuserver-worker@none"), "{said}");
    let starter = starter(folder.path(), "");
    std::fs::remove_file(folder.path().join("program")).unwrap();
    let said = failed(&starter).await;
    assert!(said.contains("program: No such file"), "{said}");
}

#[test]
fn each_folder_is_of_one_unit() {
    assert_eq!(unit_of(Path::new("/run/gpuserver-worker/start.sock")), "gpuserver-worker");
    assert_eq!(unit_of(Path::new("/run/gpuserver-worker-a-b/start.sock")), "gpuserver-worker@a-b");
}
