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
mod core_dump;
mod devices;
mod driver;
mod execute;
mod executor;
mod frame;
mod handles;
mod host_calls;
mod image_store;
mod lanes;
mod long_bodies;
mod measure;
mod modules;
mod monitor;
mod mps;
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
mod scrub;
mod serve;
mod session;
mod small_downloads;
mod staging;
mod supervise;
mod sync;
mod watch;

use std::process::ExitCode;

use gpusession_proto::supervise::Isolation;

fn main() -> ExitCode {
    containment::keep_journal();
    let arguments: Vec<String> = std::env::args().collect();
    // The third word of the helpers that restrict themselves.
    let isolation = arguments.get(3).and_then(|word| Isolation::parse(word));
    match (&arguments[..], isolation) {
        ([_, flag, driver], _) if flag == "--probe" => probe::run(driver),
        ([_, flag, driver, _, pid], Some(isolation)) if flag == "--parked" => {
            park::keep(driver, isolation, pid)
        }
        ([_, flag, driver], _) if flag == probe::HOLD => probe::hold(driver),
        ([_, flag, driver, state, images, gpus @ ..], _) if flag == contained::FENCED => {
            contained::run(driver, Some([state, images]), gpus)
        }
        ([_, flag, driver], _) if flag == contained::FREE => contained::run(driver, None, &[]),
        ([_, flag, driver, _], Some(isolation)) if flag == "--monitor" => monitor::run(driver, isolation),
        ([_, flag, driver, _, program, rest @ ..], Some(isolation)) if flag == "--mps" => {
            mps::run(driver, isolation, program, rest)
        }
        ([_, flag], _) if flag == "--measure" => measure::run(),
        ([_], _) => serve::run(),
        _ => {
            eprintln!(
                "gpuserver-worker: wrong arguments: only gpuserver starts workers\n\
                 By hand: gpuserver-worker --probe /path/to/libcuda.so.1 (prints the GPUs as JSON)"
            );
            ExitCode::from(1)
        }
    }
}
