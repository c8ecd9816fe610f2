//! `gpuserver-worker` replays the driver calls of one client process.
//!
//! `gpuserver` starts it, never a person; the flags below select its other roles.

mod activity;
mod admission;
mod answer;
mod calls;
mod contained;
mod containment;
mod contexts;
mod devices;
mod driver;
mod execute;
mod executor;
mod frame;
mod handles;
mod host_calls;
mod lanes;
mod measure;
mod modules;
mod monitor;
mod nvml;
mod objects;
mod ops;
mod order;
mod output;
mod park;
mod probe;
mod quota;
mod replies;
mod reports;
mod serve;
mod session;
mod small_downloads;
mod staging;
mod supervise;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    match &arguments[..] {
        [_, flag, driver] if flag == "--probe" => probe::run(driver),
        [_, flag, driver, pid, limit] if flag == "--park" => park::run(driver, pid, Some(limit)),
        [_, flag, driver, pid] if flag == "--parked" => park::run(driver, pid, None),
        [_, flag, driver] if flag == probe::HOLD => probe::hold(driver),
        [_, flag, driver, state, gpus @ ..] if flag == contained::FENCED => {
            contained::run(driver, Some(state), gpus)
        }
        [_, flag, driver] if flag == contained::FREE => contained::run(driver, None, &[]),
        [_, flag, driver] if flag == "--monitor" => monitor::run(driver),
        [_, flag] if flag == "--measure" => measure::run(),
        [_] => serve::run(),
        _ => {
            eprintln!(
                "gpuserver-worker: wrong arguments: only gpuserver starts workers\n\
                 By hand: gpuserver-worker --probe /path/to/libcuda.so.1 (prints the GPUs as JSON)"
            );
            ExitCode::from(1)
        }
    }
}
