//! Looks whether the driver gives memory that still has bytes of another process.
//!
//! A driver is expected to clear device memory before a process gets it. Where the server has
//! `scrub = "verify"`, a worker takes a sample of each GPU and reads it before it writes any,
//! and before a program can reach the worker.

use std::time::{Duration, Instant};

use gpusession_proto::supervise::FromWorker;

use crate::contexts::Contexts;
use crate::driver::{Address, Driver, Handle, Status, check, status};

/// Most bytes of a GPU's sample.
const SAMPLE: usize = 64 << 20;
/// Divisor of a GPU's free memory for its sample: others may want the rest meanwhile.
const PART: usize = 16;
/// Bytes of one copy.
const PIECE: usize = 2 << 20;
/// Time for the samples of all GPUs, after which no copy begins.
const SAMPLE_TIMEOUT: Duration = Duration::from_millis(100);

/// Reads a sample of each of the lease's GPUs; one that has too little memory free has none.
pub fn sample(driver: &Driver, contexts: &Contexts) -> Vec<FromWorker> {
    let devices = (0..).map_while(|device| Some((device, contexts.primary(device).ok()?)));
    let devices: Vec<_> = devices.collect();
    let time = SAMPLE_TIMEOUT / devices.len().max(1) as u32;
    let sampled = devices.into_iter().filter_map(|(device, context)| {
        let (bytes, left) = sample_of(driver, context, Instant::now() + time).ok()?;
        Some(FromWorker::Sampled { device, bytes, left })
    });
    sampled.collect()
}

/// Returns the bytes that it read, and how many of them are not zero.
fn sample_of(driver: &Driver, context: Handle, until: Instant) -> Result<(u64, u64), Status> {
    let call = &driver.call;
    // SAFETY: the lease's primary context, which the worker keeps.
    check(unsafe { (call.cuCtxPushCurrent_v2)(context) })?;
    let read = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out pointers are valid.
        check(unsafe { (call.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        let size = SAMPLE.min(free / PART) / PIECE * PIECE;
        if size == 0 {
            return Err(status::OUT_OF_MEMORY);
        }
        let mut sample: Address = 0;
        // SAFETY: the out pointer is valid.
        check(unsafe { (call.cuMemAlloc_v2)(&mut sample, size) })?;
        let found = read_all(driver, sample, size, until);
        // SAFETY: allocated above; each copy from it is complete.
        unsafe { (call.cuMemFree_v2)(sample) };
        found
    };
    let found = read();
    let mut popped = std::ptr::null_mut();
    // SAFETY: pushed above; the out pointer is valid.
    unsafe { (call.cuCtxPopCurrent_v2)(&mut popped) };
    found
}

fn read_all(driver: &Driver, sample: Address, size: usize, until: Instant) -> Result<(u64, u64), Status> {
    let mut piece = vec![0u8; PIECE];
    let (mut bytes, mut left) = (0, 0);
    for at in (0..size).step_by(PIECE) {
        if Instant::now() >= until {
            break;
        }
        // SAFETY: both sides have `PIECE` bytes, since `size` is a multiple of it.
        check(unsafe {
            (driver.call.cuMemcpyDtoH_v2)(piece.as_mut_ptr().cast(), sample + at as Address, PIECE)
        })?;
        bytes += PIECE as u64;
        left += piece.iter().filter(|byte| **byte != 0).count() as u64;
    }
    Ok((bytes, left))
}
