//! Cost of `cuLaunchKernel` for a program's thread, with a real worker on the simulated driver.
//!
//! The program launches in bursts that fit into a stream's queue, and waits after each. The bench
//! also counts the system calls of the thread within the bursts.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use gpusession_proto::grant::Reply;
use gpusession_test_worker::{Machine, Worker};

const PROGRAM: &str = "program";
const KERNEL: &std::ffi::CStr = c"
    .version 6.5
    .target sm_75
    .address_size 64
    .visible .entry nothing(.param .u64 a, .param .u64 b, .param .u32 c) { ret; }";

/// The program: prints the nanoseconds of each launch, one a line.
fn launches() {
    let library = gpusession_test_support::cuda::library();
    let call = |name: &str, arguments: &[u64]| {
        assert_eq!(gpusession_test_support::cuda::call(&library, name, arguments), 0, "{name}")
    };
    let (mut ctx, mut module, mut function) = (0u64, 0u64, 0u64);
    call("cuInit", &[0]);
    call("cuDevicePrimaryCtxRetain", &[&raw mut ctx as u64, 0]);
    call("cuCtxSetCurrent", &[ctx]);
    call("cuModuleLoadData", &[&raw mut module as u64, KERNEL.as_ptr() as u64]);
    call("cuModuleGetFunction", &[&raw mut function as u64, module, c"nothing".as_ptr() as u64]);
    let (mut a, mut b, mut c) = (1u64, 2u64, 3u32);
    let parameters = [&raw mut a as u64, &raw mut b as u64, &raw mut c as u64];
    let launch = [function, 1, 1, 1, 32, 1, 1, 0, 0, parameters.as_ptr() as u64, 0];
    let mut times = Vec::with_capacity(100 * 500);
    // Looked up once, as a runtime does.
    type Launch = unsafe extern "C" fn(u64, u32, u32, u32, u32, u32, u32, u32, u64, u64, u64) -> i32;
    // SAFETY: the type is that of cuda.h.
    let entry = unsafe { library.get::<Launch>(b"cuLaunchKernel") }.expect("a driver call");
    call("cuLaunchKernel", &launch);
    for _ in 0..100 {
        call("cuCtxSynchronize", &[]);
        gpusession_test_link::syscalls::mark();
        for _ in 0..500 {
            let begun = Instant::now();
            // SAFETY: a kernel with these parameters, which outlive the call.
            let status = unsafe { entry(function, 1, 1, 1, 32, 1, 1, 0, 0, launch[9], 0) };
            times.push(begun.elapsed().as_nanos() as u64);
            assert_eq!(status, 0);
        }
        gpusession_test_link::syscalls::mark();
    }
    call("cuCtxSynchronize", &[]);
    times.iter().for_each(|time| println!("{time}"));
}

fn main() {
    if std::env::args().any(|word| word == PROGRAM) {
        return launches();
    }
    let machine = Machine::new();
    let command = |socket: &Path| {
        let mut command = Command::new(std::env::current_exe().expect("a program"));
        command.arg(PROGRAM).env("GPUSESSION_SOCKET", socket);
        command
    };
    let granted = |worker: &Worker| vec![Reply::Granted(vec![worker.endpoint(false)])];
    let (measured, traced) = (Worker::start(&machine), Worker::start(&machine));
    let (output, _) =
        gpusession_test_support::cuda::beside_daemon(granted(&measured), |socket| command(socket).output());
    let output = output.expect("it runs");
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).expect("text");
    let mut times: Vec<u64> = said.lines().map(|line| line.parse().expect("a number")).collect();
    let (calls, _) = gpusession_test_support::cuda::beside_daemon(granted(&traced), |socket| {
        gpusession_test_link::syscalls::count(&mut command(socket))
    });
    gpusession_test_link::syscalls::report("cuLaunchKernel", &mut times, calls);
}
