//! Shows whether this host and its driver allow a worker's restrictions, before any client is
//! served.
//!
//! `--probe-contained DRIVER FOLDER IMAGES GPU...` takes the restrictions as a worker does, and
//! tries acts that must fail. `--probe-free DRIVER` takes none, for comparison.

use std::ffi::CString;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::ExitCode;

use gpusession_proto::isolation::{Failure, Report};
use gpusession_proto::readings::uuid_bytes;
use landlock::ABI;

use crate::containment::{self, Calls, Files, Gpus};
use crate::driver::{Driver, Status, check};

/// Flag of the process that takes a worker's restrictions.
pub const FENCED: &str = "--probe-contained";
/// Flag of the process that takes none.
pub const FREE: &str = "--probe-free";
/// `CUDA_ERROR_OUT_OF_MEMORY`
const OUT_OF_MEMORY: Status = 2;

/// Prints a [`Report`] as JSON.
///
/// `hidden` are a folder that this process's user may read, and the server's folder of images; both
/// must be out of reach. `None`: without restrictions.
pub fn run(driver: &str, hidden: Option<[&String; 2]>, gpus: &[String]) -> ExitCode {
    let report = match hidden {
        Some(hidden) => fenced(driver, hidden.map(Path::new), gpus),
        None => Report { driver: works(driver).err(), ..Report::default() },
    };
    match serde_json::to_string(&report) {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("gpuserver-worker: the report cannot be written: {e}");
            ExitCode::from(1)
        }
    }
}

/// Takes the restrictions in a worker's order, with the driver's start in between.
fn fenced(driver: &str, hidden: [&Path; 2], gpus: &[String]) -> Report {
    let landlock = containment::landlock();
    let uuids = gpus.iter().filter_map(|gpu| uuid_bytes(gpu)).collect();
    let files = Files { driver, gpus: Gpus::These(uuids), ..Files::default() };
    let mut lacking = containment::before_driver(&files, landlock);
    let failure = works(driver).err();
    lacking.extend(containment::before_client(Calls::Own, landlock).err());
    if lacking.is_empty() {
        lacking.extend(holes(hidden));
    }
    Report {
        landlock: if landlock == ABI::Unsupported { 0 } else { landlock as u32 },
        lacking,
        driver: failure,
    }
}

/// Starts the driver and makes a context on each GPU, which stays until this process exits.
fn works(path: &str) -> Result<(), Failure> {
    let driver = Driver::load(Path::new(path)).map_err(|reason| Failure { reason, full: false })?;
    let failed = |call: &'static str| {
        move |status| Failure {
            reason: format!("{call}: CUDA error {status}"),
            full: status == OUT_OF_MEMORY,
        }
    };
    let (mut count, mut ctx) = (0, std::ptr::null_mut());
    // SAFETY: cuInit takes only flags, which must be 0.
    check(unsafe { (driver.call.cuInit)(0) }).map_err(failed("cuInit"))?;
    // SAFETY: the out pointer is valid.
    check(unsafe { (driver.call.cuDeviceGetCount)(&mut count) }).map_err(failed("cuDeviceGetCount"))?;
    for device in 0..count {
        // SAFETY: as above.
        check(unsafe { (driver.call.cuDevicePrimaryCtxRetain)(&mut ctx, device) })
            .map_err(failed("cuDevicePrimaryCtxRetain"))?;
    }
    Ok(())
}

/// Returns the acts that the restrictions should prevent and do not.
fn holes([own, images]: [&Path; 2]) -> Vec<String> {
    let denied = |done: i64| {
        let error = io::Error::last_os_error().raw_os_error();
        done == -1 && matches!(error, Some(libc::EPERM | libc::EACCES))
    };
    let denied_by_filter =
        |done: i64| done == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::EPERM);
    // Where a change is possible, the folder keeps its mode.
    let mode = std::fs::metadata(own).map_or(0o700, |m| m.permissions().mode() & 0o7777);
    let folder = CString::new(own.as_os_str().as_encoded_bytes()).unwrap_or_default();
    // SAFETY: plain system calls; the filters refuse `execve` before it reads memory, and without
    // them a null path is an error. The folder's path ends with NUL.
    let (socket, exec, kill, chmod) = unsafe {
        (
            denied(libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0).into()),
            denied(libc::syscall(libc::SYS_execve, 0, 0, 0)),
            denied(libc::kill(libc::getppid(), 0).into()),
            denied_by_filter(libc::chmod(folder.as_ptr(), mode).into()),
        )
    };
    let reads = |folder: &Path, is: &str| {
        let where_not = "no folder of the driver, the worker's program or /usr may contain it";
        (std::fs::read_dir(folder).is_err(), format!("read {}, {is}: {where_not}", folder.display()))
    };
    let file = images.join(std::process::id().to_string());
    let written = std::fs::write(&file, "").is_ok() && std::fs::remove_file(&file).is_ok();
    let acts = [
        reads(own, "which only the server's programs may read"),
        reads(images, "the images of all clients"),
        (!written, format!("write {}, the images of all clients", images.display())),
        (socket, "make a network socket".into()),
        (exec, "start a program".into()),
        (kill, "send a signal to the server".into()),
        (chmod, "change a file's mode".into()),
    ];
    acts.into_iter().filter(|(denied, _)| !denied).map(|(_, act)| format!("a worker can {act}")).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// Folder that the test's own process must not reach.
    const IMAGES: &str = "CONTAINED_TEST_IMAGES";

    #[test]
    fn no_worker_reads_or_changes_the_images() {
        let test = "no_worker_reads_or_changes_the_images";
        if std::env::var_os(IMAGES).is_none() {
            let folder = tempfile::tempdir().unwrap();
            let client = folder.path().join("client");
            std::fs::create_dir(&client).unwrap();
            std::fs::write(client.join("image"), b"content").unwrap();
            let done = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", &format!("contained::tests::{test}"), "--nocapture"])
                .env(IMAGES, folder.path())
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&done.stdout);
            assert!(done.status.success() && said.contains("contained"), "{done:?}");
            assert_eq!(std::fs::read(client.join("image")).unwrap(), b"content");
            assert_eq!(std::fs::read_dir(&client).unwrap().count(), 1);
            return;
        }
        let images = PathBuf::from(std::env::var_os(IMAGES).unwrap());
        let client = images.join("client");
        let landlock = containment::landlock();
        let files =
            Files { driver: "/usr/lib/libcuda.so.1", gpus: Gpus::These(Vec::new()), ..Files::default() };
        let lacking = containment::before_driver(&files, landlock);
        containment::before_client(Calls::Own, landlock).unwrap();
        if lacking.is_empty() {
            assert!(holes([&images, &client]).is_empty());
            let mode = nix::sys::stat::Mode::S_IRWXU;
            let acts = [
                ("list", std::fs::read_dir(&images).map(drop)),
                ("list", std::fs::read_dir(&client).map(drop)),
                ("open", std::fs::read(client.join("image")).map(drop)),
                ("write", std::fs::write(client.join("image"), "other")),
                ("create", std::fs::write(client.join("new"), "new")),
                ("delete", std::fs::remove_file(client.join("image"))),
                ("mkfifo", nix::unistd::mkfifo(&client.join("pipe"), mode).map_err(io::Error::from)),
                ("symlink", std::os::unix::fs::symlink("/dev/zero", client.join("link"))),
                ("link", std::fs::hard_link(client.join("image"), client.join("name"))),
                ("mkdir", std::fs::create_dir(client.join("folder"))),
                ("rename", std::fs::rename(&client, images.join("other"))),
            ];
            for (act, done) in acts {
                let denied = done.expect_err(act).kind();
                assert!(
                    matches!(denied, io::ErrorKind::PermissionDenied | io::ErrorKind::CrossesDevices),
                    "{act}: {denied}"
                );
            }
        }
        println!("contained");
        std::process::exit(0);
    }
}
