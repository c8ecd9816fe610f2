//! Shows whether this host and its driver allow a worker's restrictions, before any client is
//! served.
//!
//! `--probe-contained DRIVER STATE_DIR GPU...` takes the restrictions as a worker does, and tries
//! acts that must fail. `--probe-free DRIVER` takes none, for comparison.

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

/// Prints a [`Report`] as JSON. `state_dir`: must be out of reach; `None`: without restrictions.
pub fn run(driver: &str, state_dir: Option<&str>, gpus: &[String]) -> ExitCode {
    let report = match state_dir {
        Some(state_dir) => fenced(driver, Path::new(state_dir), gpus),
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
fn fenced(driver: &str, state_dir: &Path, gpus: &[String]) -> Report {
    let landlock = containment::landlock();
    let uuids = gpus.iter().filter_map(|gpu| uuid_bytes(gpu)).collect();
    let files = Files { driver, gpus: Gpus::These(uuids), ..Files::default() };
    let mut lacking = containment::before_driver(&files, landlock);
    let failure = works(driver).err();
    lacking.extend(containment::before_client(Calls::Own, landlock).err());
    if lacking.is_empty() {
        lacking.extend(holes(state_dir));
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
fn holes(state_dir: &Path) -> Vec<String> {
    let denied = |done: i64| {
        let error = io::Error::last_os_error().raw_os_error();
        done == -1 && matches!(error, Some(libc::EPERM | libc::EACCES))
    };
    let denied_by_filter =
        |done: i64| done == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::EPERM);
    // Where a change is possible, the folder keeps its mode.
    let mode = std::fs::metadata(state_dir).map_or(0o700, |m| m.permissions().mode() & 0o7777);
    let folder = CString::new(state_dir.as_os_str().as_encoded_bytes()).unwrap_or_default();
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
    let acts = [
        (
            std::fs::read_dir(state_dir).is_err(),
            format!(
                "read {}, the server's state_dir: no folder of the driver, the worker's program or /usr may contain it",
                state_dir.display()
            ),
        ),
        (socket, "make a network socket".into()),
        (exec, "start a program".into()),
        (kill, "send a signal to the server".into()),
        (chmod, "change a file's mode".into()),
    ];
    acts.into_iter().filter(|(denied, _)| !denied).map(|(_, act)| format!("a worker can {act}")).collect()
}
