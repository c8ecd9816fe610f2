//! Device memory that moves to host memory and back (`cuCheckpointProcess*`).
//!
//! A paused worker moves its own memory, by a thread without a context, while no other thread calls
//! the driver. So no process needs the right to reach another one.
//!
//! `gpuserver-worker --parked DRIVER ISOLATION PID` brings back the memory of a worker that an
//! earlier release has parked from outside. Each line on stdin asks for it. The answers are `back`
//! or `no CODE TEXT` before it exits, or `full` if the GPU has no room now. It also exits at EOF on
//! stdin: the memory stays parked, and another such helper can take over.

use std::ffi::c_void;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use gpusession_proto::supervise::{Isolation, MoveFailed};

use crate::containment::{self, Calls};
use crate::driver::{Driver, Status, check, status};

/// `CUcheckpointLockArgs`
#[repr(C)]
struct LockArgs {
    timeout_ms: u32,
    reserved: u32,
    more: [u64; 7],
}

/// Moves the device memory of this process to host memory; an error leaves it where it was.
///
/// Until [`back`] no thread may call the driver, which would wait. The driver gets `limit_ms`
/// milliseconds to lock the process.
pub fn out(driver: &Driver, limit_ms: u32) -> Result<(), MoveFailed> {
    checkpoint(driver, std::process::id().cast_signed(), limit_ms)
}

/// Moves the device memory of this process back; without room it stays in host memory.
pub fn back(driver: &Driver) -> Result<(), MoveFailed> {
    restore(driver, std::process::id().cast_signed())
}

fn failed(call: &'static str) -> impl Fn(Status) -> MoveFailed {
    move |status| MoveFailed { call: call.into(), status }
}

fn checkpoint(driver: &Driver, pid: i32, limit_ms: u32) -> Result<(), MoveFailed> {
    let call = &driver.call;
    let none: *const c_void = std::ptr::null();
    let lock = LockArgs { timeout_ms: limit_ms, reserved: 0, more: [0; 7] };
    // SAFETY: the structure is that of cuda.h.
    check(unsafe { (call.cuCheckpointProcessLock)(pid, (&raw const lock).cast()) })
        .map_err(failed("cuCheckpointProcessLock"))?;
    // SAFETY: the call accepts null for its arguments, as the calls below do.
    check(unsafe { (call.cuCheckpointProcessCheckpoint)(pid, none) }).map_err(|status| {
        // SAFETY: as above.
        unsafe { (call.cuCheckpointProcessUnlock)(pid, none) };
        failed("cuCheckpointProcessCheckpoint")(status)
    })
}

fn restore(driver: &Driver, pid: i32) -> Result<(), MoveFailed> {
    let call = &driver.call;
    let none: *const c_void = std::ptr::null();
    // SAFETY: both calls accept null for their arguments.
    unsafe {
        check((call.cuCheckpointProcessRestore)(pid, none)).map_err(failed("cuCheckpointProcessRestore"))?;
        check((call.cuCheckpointProcessUnlock)(pid, none)).map_err(failed("cuCheckpointProcessUnlock"))
    }
}

/// Keeps another process's memory; the exit status is 0 if that process runs again.
pub fn keep(driver: &str, isolation: Isolation, pid: &str) -> ExitCode {
    let Ok(pid) = pid.parse() else {
        eprintln!("gpuserver-worker: --parked needs a driver, an isolation and a process id");
        return ExitCode::from(1);
    };
    let requests = std::io::stdin().lines().map_while(Result::ok);
    let driver = Driver::load(Path::new(driver)).map_err(|e| (status::NOT_SUPPORTED, e));
    match driver.and_then(|driver| stay(driver, isolation, pid, requests, say)) {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, text)) => {
            say(&format!("no {code} {text}"));
            ExitCode::from(1)
        }
    }
}

fn say(line: &str) {
    // A supervisor that has exited shows as EOF at the next read.
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Brings a process's memory back when one of the `requests` finds room on the GPU.
fn stay(
    driver: &Driver,
    isolation: Isolation,
    pid: i32,
    requests: impl Iterator<Item = String>,
    mut say: impl FnMut(&str),
) -> Result<(), (Status, String)> {
    // SAFETY: cuInit takes only flags, which must be 0.
    check(unsafe { (driver.call.cuInit)(0) }).map_err(|code| (code, format!("cuInit: CUDA error {code}")))?;
    // It keeps its files: Landlock would keep it from the process.
    let lacking = containment::of_helper(isolation, |abi| {
        containment::before_client(Calls::Park, abi).err().into_iter().collect()
    });
    for what in lacking.map_err(|why| (status::NOT_SUPPORTED, why))? {
        eprintln!("gpuserver-worker: the helper that unparks runs without: {what}");
    }
    say("parked");
    for _ in requests {
        match restore(driver, pid) {
            Ok(()) => {
                say("back");
                return Ok(());
            }
            Err(MoveFailed { status: status::OUT_OF_MEMORY, .. }) => say("full"),
            Err(MoveFailed { call, status }) => return Err((status, format!("{call}: CUDA error {status}"))),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::driver::fake;

    /// Returns the answers to the requests for process `pid`, which `full` times finds no room.
    fn answers(pid: i32, full: i32, requests: usize) -> (Vec<String>, i32) {
        let (mut said, left) = (Vec::new(), &fake::FULL[pid as usize]);
        left.store(full, Ordering::SeqCst);
        let requests = std::iter::repeat_n(String::new(), requests);
        stay(fake::driver(), Isolation::Off, pid, requests, |line| said.push(line.into())).unwrap();
        (said, left.load(Ordering::SeqCst))
    }

    #[test]
    fn parked_process_comes_back_once_the_gpu_has_room() {
        let (said, left) = answers(1, 2, 9);
        assert_eq!(said, ["parked", "full", "full", "back"]);
        assert_eq!(left, -1, "no request after the answer");
    }

    #[test]
    fn process_stays_parked_when_nobody_asks_any_more() {
        assert_eq!(answers(2, 1, 1), (vec!["parked".into(), "full".into()], 0));
        assert_eq!(answers(2, 5, 0), (vec!["parked".into()], 5));
    }

    #[test]
    fn process_that_cannot_be_locked_is_refused_with_the_call() {
        let failed = checkpoint(fake::driver(), fake::UNLOCKABLE, 1).unwrap_err();
        assert_eq!(failed, MoveFailed { call: "cuCheckpointProcessLock".into(), status: status::NOT_READY });
    }
}
