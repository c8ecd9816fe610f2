//! `gpuserver-worker --park DRIVER ISOLATION PID LIMIT_MS` moves another worker's device memory to
//! the host.
//!
//! It keeps the memory there until asked to bring it back. `gpuserver` itself never loads CUDA.
//!
//! The first line on stdout is `parked`, or `no CODE TEXT` before it exits. Then each line on stdin
//! asks for the memory. The answers are `back` or `no CODE TEXT` before it exits, or `full` if the
//! GPU has no room now. It also exits at EOF on stdin: the memory stays parked, and `--parked
//! DRIVER ISOLATION PID` takes over.
//!
//! A client may control the process that it parks, so it gives up system calls once the driver is
//! ready. It keeps its files: Landlock would keep it from the process.

use std::ffi::c_void;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use gpusession_proto::supervise::Isolation;

use crate::containment::{self, Calls};
use crate::driver::{Driver, Status, check, status};

/// `CUcheckpointLockArgs`
#[repr(C)]
struct LockArgs {
    timeout_ms: u32,
    reserved: u32,
    more: [u64; 7],
}

/// Parks and unparks a process; the exit status is 0 if the process runs again.
///
/// Without a limit the process is parked already.
pub fn run(driver: &str, isolation: Isolation, pid: &str, limit: Option<&str>) -> ExitCode {
    let (Ok(pid), Ok(limit)) = (pid.parse(), limit.map(str::parse).transpose()) else {
        eprintln!("gpuserver-worker: --park needs a driver, a process id and a number of milliseconds");
        return ExitCode::from(1);
    };
    let driver = Driver::load(Path::new(driver)).map_err(|e| (status::NOT_SUPPORTED, e));
    let requests = std::io::stdin().lines().map_while(Result::ok);
    match driver.and_then(|driver| stay(driver, isolation, pid, limit, requests, say)) {
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

/// Parks a process, and brings it back when one of the `requests` finds room on the GPU.
fn stay(
    driver: &Driver,
    isolation: Isolation,
    pid: i32,
    limit: Option<u32>,
    requests: impl Iterator<Item = String>,
    mut say: impl FnMut(&str),
) -> Result<(), (Status, String)> {
    let call = &driver.call;
    let said = |what: &'static str| move |code: Status| (code, format!("{what}: CUDA error {code}"));
    // SAFETY: cuInit takes only flags, which must be 0.
    check(unsafe { (call.cuInit)(0) }).map_err(said("cuInit"))?;
    let lacking = containment::of_helper(isolation, |abi| {
        containment::before_client(Calls::Park, abi).err().into_iter().collect()
    });
    for what in lacking.map_err(|why| (status::NOT_SUPPORTED, why))? {
        eprintln!("gpuserver-worker: the helper that parks runs without: {what}");
    }
    let none: *const c_void = std::ptr::null();
    if let Some(limit) = limit {
        let lock = LockArgs { timeout_ms: limit, reserved: 0, more: [0; 7] };
        // SAFETY: the structure is that of cuda.h.
        check(unsafe { (call.cuCheckpointProcessLock)(pid, (&raw const lock).cast()) })
            .map_err(said("cuCheckpointProcessLock"))?;
        // SAFETY: the call accepts null for its arguments, as the calls below do.
        if let Err(code) = check(unsafe { (call.cuCheckpointProcessCheckpoint)(pid, none) }) {
            // SAFETY: as above.
            unsafe { (call.cuCheckpointProcessUnlock)(pid, none) };
            return Err(said("cuCheckpointProcessCheckpoint")(code));
        }
    }
    say("parked");
    for _ in requests {
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::driver::fake;

    /// Returns the answers to the requests for process `pid`, which `full` times finds no room.
    fn answers(pid: i32, limit: Option<u32>, full: i32, requests: usize) -> (Vec<String>, i32) {
        let (mut said, left) = (Vec::new(), &fake::FULL[pid as usize]);
        left.store(full, Ordering::SeqCst);
        let requests = std::iter::repeat_n(String::new(), requests);
        stay(fake::driver(), Isolation::Off, pid, limit, requests, |line| said.push(line.into())).unwrap();
        (said, left.load(Ordering::SeqCst))
    }

    #[test]
    fn parked_process_comes_back_once_the_gpu_has_room() {
        let (said, left) = answers(1, Some(100), 2, 9);
        assert_eq!(said, ["parked", "full", "full", "back"]);
        assert_eq!(left, -1, "no request after the answer");
    }

    #[test]
    fn process_stays_parked_when_nobody_asks_any_more() {
        assert_eq!(answers(2, None, 1, 1), (vec!["parked".into(), "full".into()], 0));
        assert_eq!(answers(2, None, 5, 0), (vec!["parked".into()], 5));
    }

    #[test]
    fn process_that_cannot_be_locked_is_refused_with_the_call() {
        let mut said = Vec::new();
        let none = std::iter::empty();
        let (code, text) =
            stay(fake::driver(), Isolation::Off, fake::UNLOCKABLE, Some(1), none, |line: &str| {
                said.push(line.to_string())
            })
            .unwrap_err();
        assert_eq!((code, said), (status::NOT_READY, Vec::new()));
        assert!(text.contains("cuCheckpointProcessLock"), "{text}");
    }
}
