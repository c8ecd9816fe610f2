use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::link::{Starter, unit_of};
use super::{Purpose, service};
use crate::peer::Served;

/// A starter of this user, whose program is a script.
fn starter(folder: &Path, script: &str) -> Starter {
    let program = folder.join("program");
    std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let socket = folder.join("start.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let served = Served { uid: nix::unistd::geteuid().as_raw(), unit: None };
    std::thread::spawn(move || service::serve(&listener, &program, &served));
    Starter::Socket(socket)
}

#[tokio::test]
async fn a_program_gets_what_the_request_has_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        "echo \"$@\"; env | sort | grep -v -e ^PWD= -e ^_= -e ^SHLVL= -e ^OLDPWD=; cat; pwd >&2; exit 3";
    let driver = Path::new("/driver/libcuda.so.1");
    let there = starter(folder.path(), script).output(Purpose::Probe, driver).await.unwrap();
    let here = Starter::Here(folder.path().join("program")).output(Purpose::Probe, driver).await.unwrap();
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
async fn output_of_a_program_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let starter = starter(folder.path(), "exec cat /dev/zero");
    let endless = starter.output(Purpose::Probe, Path::new("/driver/libcuda.so.1"));
    let said = timeout(Duration::from_secs(10), endless).await.unwrap().unwrap_err().to_string();
    assert!(said.contains("more than 1 MiB"), "{said}");
}

#[tokio::test]
async fn an_error_names_the_starter_and_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let driver = Path::new("/driver/libcuda.so.1");
    let failed = async |starter: &Starter| {
        starter.output(Purpose::Probe, driver).await.expect_err("nothing runs").to_string()
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
