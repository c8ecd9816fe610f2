//! Checkpoints of processes, also of this one.

use super::out;
use crate::driver::checkpoint::{CHECKPOINT, LOCK, RESTORE, UNLOCK, ask, state};
use crate::driver::driver;
use crate::export;

export! {
    fn cuCheckpointProcessLock(pid: i32, args: *const [u32; 16]) {
        driver()?;
        ask(pid, LOCK, if args.is_null() { 0 } else { u64::from((*args)[0]) })
    }

    fn cuCheckpointProcessCheckpoint(pid: i32, _args: *const u8) {
        driver()?;
        ask(pid, CHECKPOINT, 0)
    }

    fn cuCheckpointProcessRestore(pid: i32, _args: *const u8) {
        driver()?;
        ask(pid, RESTORE, 0)
    }

    fn cuCheckpointProcessUnlock(pid: i32, _args: *const u8) {
        driver()?;
        ask(pid, UNLOCK, 0)
    }

    fn cuCheckpointProcessGetState(pid: i32, to: *mut u32) {
        driver()?;
        out(to, state(pid)? as u32)
    }
}
