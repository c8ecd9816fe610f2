//! Looks whether the driver gives memory that still has bytes of another process.
//!
//! A driver is expected to clear device memory before a process gets it. Where the server has
//! `scrub = "verify"`, a worker takes a sample of each GPU and reads it before it writes any,
//! and before a program can reach the worker.

use gpusession_proto::supervise::FromWorker;

use crate::contexts::Contexts;
use crate::driver::{Address, Driver, Handle, Status, check, status};

/// Bytes of a GPU's sample.
///
/// That is the driver's unit of device memory. More could take what another lease of the GPU is
/// about to allocate within its own limit.
const SAMPLE: usize = 2 << 20;
/// Least free memory of a GPU for each byte of its sample: others may want the rest meanwhile.
const FREE: usize = 16;

/// Reads a sample of each of the lease's GPUs; one that has too little memory free has none.
pub fn sample(driver: &Driver, contexts: &Contexts) -> Vec<FromWorker> {
    let devices = (0..).map_while(|device| Some((device, contexts.primary(device).ok()?)));
    let sampled = devices.filter_map(|(device, context)| {
        let left = sample_of(driver, context).ok()?;
        Some(FromWorker::Sampled { device, bytes: SAMPLE as u64, left })
    });
    sampled.collect()
}

/// Returns how many bytes of a sample are not zero.
fn sample_of(driver: &Driver, context: Handle) -> Result<u64, Status> {
    let call = &driver.call;
    // SAFETY: the lease's primary context, which the worker keeps.
    check(unsafe { (call.cuCtxPushCurrent_v2)(context) })?;
    let read = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out pointers are valid.
        check(unsafe { (call.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        if free / FREE < SAMPLE {
            return Err(status::OUT_OF_MEMORY);
        }
        let mut sample: Address = 0;
        // SAFETY: the out pointer is valid.
        check(unsafe { (call.cuMemAlloc_v2)(&mut sample, SAMPLE) })?;
        let mut bytes = vec![0u8; SAMPLE];
        // SAFETY: both sides have `SAMPLE` bytes.
        let copied = check(unsafe { (call.cuMemcpyDtoH_v2)(bytes.as_mut_ptr().cast(), sample, SAMPLE) });
        // SAFETY: allocated above; the copy from it is complete.
        unsafe { (call.cuMemFree_v2)(sample) };
        copied.map(|_| bytes.iter().filter(|byte| **byte != 0).count() as u64)
    };
    let found = read();
    let mut popped = std::ptr::null_mut();
    // SAFETY: pushed above; the out pointer is valid.
    unsafe { (call.cuCtxPopCurrent_v2)(&mut popped) };
    found
}
