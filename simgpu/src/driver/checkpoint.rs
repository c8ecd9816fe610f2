//! Checkpoints, which a process of this user requests, this one or another, and a thread of this
//! process performs.
//!
//! Between `Lock` and `Unlock` every driver call waits. Between `Checkpoint` and `Restore` other
//! processes can use the device memory, and reads of it return garbage.

use crate::driver::{Driver, driver};
use crate::errors::{
    Error, ILLEGAL_STATE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, OPERATING_SYSTEM, OUT_OF_MEMORY, Result,
};
use crate::memory::Saved;
use crate::usage::Mail;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

/// Each driver call holds it shared; a locked process holds it exclusively.
static GATE: RwLock<()> = RwLock::new(());

/// The values of `CUprocessState`.
pub const RUNNING: u64 = 0;
pub const LOCKED: u64 = 1;
pub const CHECKPOINTED: u64 = 2;

pub const LOCK: u64 = 1;
pub const CHECKPOINT: u64 = 2;
pub const RESTORE: u64 = 3;
pub const UNLOCK: u64 = 4;

/// Waits until the process is not locked. A nested call never waits.
pub fn enter() -> RwLockReadGuard<'static, ()> {
    GATE.read_recursive()
}

/// Starts the thread that serves requests.
pub fn serve() {
    let Ok(driver) = driver() else { return };
    let Some(mail) = driver.space.usage().register() else { return };
    let work = move || {
        let (mut held, mut saved, mut spoilt) = (None, None, false);
        mail.serve(|command, argument| {
            // As on a T4 and an H200 (driver 580): after one restore without room none succeeds.
            let done = if command == RESTORE && spoilt {
                Err(OPERATING_SYSTEM)
            } else {
                perform(driver, &mail, command, argument, &mut held, &mut saved)
            };
            spoilt |= done == Err(OUT_OF_MEMORY);
            done.err().map_or(0, |e| u64::from(e.0))
        });
    };
    // Without the thread the process cannot be checkpointed.
    let _ = std::thread::Builder::new().name("simgpu-restore".into()).spawn(work);
}

/// Returns `true` if this process would be a client of MPS, which cannot be checkpointed.
pub fn under_mps() -> bool {
    std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").is_some()
}

fn perform(
    driver: &'static Driver,
    mail: &Mail,
    command: u64,
    argument: u64,
    held: &mut Option<RwLockWriteGuard<'static, ()>>,
    saved: &mut Option<Saved>,
) -> Result {
    if !driver.config.checkpoint || under_mps() {
        return Err(NOT_SUPPORTED);
    }
    std::thread::sleep(Duration::from_millis(driver.config.checkpoint_ms));
    let state = match (command, mail.state()) {
        (LOCK, RUNNING) => {
            let limit =
                if argument == 0 { Duration::from_secs(1 << 30) } else { Duration::from_millis(argument) };
            let end = Instant::now() + limit;
            let gate = GATE.try_write_until(end).ok_or(NOT_READY)?;
            while !driver.idle() {
                if Instant::now() >= end {
                    return Err(NOT_READY);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            *held = Some(gate);
            LOCKED
        }
        (CHECKPOINT, LOCKED) => {
            *saved = Some(driver.space.move_out());
            CHECKPOINTED
        }
        (RESTORE, CHECKPOINTED) => {
            if saved.as_ref().is_some_and(|memory| !driver.space.move_in(memory)) {
                return Err(OUT_OF_MEMORY);
            }
            *saved = None;
            LOCKED
        }
        (UNLOCK, LOCKED) => {
            *held = None;
            RUNNING
        }
        _ => return Err(ILLEGAL_STATE),
    };
    mail.set_state(state);
    Ok(())
}

/// Sends a request to a process, and returns its result.
pub fn ask(pid: i32, command: u64, argument: u64) -> Result {
    let pid = u32::try_from(pid).map_err(|_| INVALID_VALUE)?;
    match driver()?.space.usage().clone().find(pid).ok_or(INVALID_VALUE)?.ask(command, argument) {
        Some(0) => Ok(()),
        Some(code) => Err(Error(code as u32)),
        // The process has exited meanwhile.
        None => Err(INVALID_VALUE),
    }
}

/// Returns the `CUprocessState` of a process.
pub fn state(pid: i32) -> Result<u64> {
    let pid = u32::try_from(pid).map_err(|_| INVALID_VALUE)?;
    driver()?.space.usage().clone().find(pid).map(|mail| mail.state()).ok_or(INVALID_VALUE)
}
