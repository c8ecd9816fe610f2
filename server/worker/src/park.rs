//! `gpuserver-worker --park DRIVER PID LIMIT_MS`: moves the device memory of another worker to host memory, keeps it there, and
//! brings it back when told to. `gpuserver` itself never loads CUDA, and a parked process cannot help itself.
//!
//! Answers are lines on stdout: `parked`, or `no CODE TEXT` and the end. Then each line on stdin asks for the memory back: `back`
//! and the end, or `full` when the GPU has no room now, or `no CODE TEXT` and the end. Its input's end is its own; the memory stays
//! where it is, and `--parked DRIVER PID` takes its place.

use std::ffi::c_void;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use crate::driver::{Driver, Status, check, status};

/// `CUcheckpointLockArgs`
#[repr(C)]
struct LockArgs {
    timeout_ms: u32,
    reserved: u32,
    more: [u64; 7],
}

/// Does it; the exit status is 0 where the process runs again. Without a limit the process is parked already.
pub fn run(driver: &str, pid: &str, limit: Option<&str>) -> ExitCode {
    let (Ok(pid), Ok(limit)) = (pid.parse(), limit.map(str::parse).transpose()) else {
        eprintln!("gpuserver-worker: --park takes a driver, a process id and a number of milliseconds");
        return ExitCode::from(1);
    };
    match stay(driver, pid, limit) {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, text)) => {
            say(&format!("no {code} {text}"));
            ExitCode::from(1)
        }
    }
}

fn say(line: &str) {
    // Nobody listening is noticed at the next question.
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn stay(driver: &str, pid: i32, limit: Option<u32>) -> Result<(), (Status, String)> {
    let driver = Driver::load(Path::new(driver)).map_err(|e| (status::NOT_SUPPORTED, e))?;
    let call = &driver.call;
    let said = |what: &'static str| move |code: Status| (code, format!("{what}: CUDA error {code}"));
    // SAFETY: cuInit takes only flags, which must be 0.
    check(unsafe { (call.cuInit)(0) }).map_err(said("cuInit"))?;
    let none: *const c_void = std::ptr::null();
    if let Some(limit) = limit {
        let lock = LockArgs { timeout_ms: limit, reserved: 0, more: [0; 7] };
        // SAFETY: the structure is that of cuda.h.
        check(unsafe { (call.cuCheckpointProcessLock)(pid, (&raw const lock).cast()) })
            .map_err(said("cuCheckpointProcessLock"))?;
        // SAFETY: no arguments, here and below.
        if let Err(code) = check(unsafe { (call.cuCheckpointProcessCheckpoint)(pid, none) }) {
            // SAFETY: as above.
            unsafe { (call.cuCheckpointProcessUnlock)(pid, none) };
            return Err(said("cuCheckpointProcessCheckpoint")(code));
        }
    }
    say("parked");
    for line in std::io::stdin().lines() {
        if line.is_err() {
            break;
        }
        // SAFETY: as above.
        match check(unsafe { (call.cuCheckpointProcessRestore)(pid, none) }) {
            Ok(()) => {
                // SAFETY: as above.
                check(unsafe { (call.cuCheckpointProcessUnlock)(pid, none) })
                    .map_err(said("cuCheckpointProcessUnlock"))?;
                say("back");
                return Ok(());
            }
            Err(status::OUT_OF_MEMORY) => say("full"),
            Err(code) => return Err(said("cuCheckpointProcessRestore")(code)),
        }
    }
    Ok(())
}
