//! The GPU test: a CUDA program that uses the `libcuda.so.1` which this user's programs load.
//!
//! It runs in a child of the command, since a broken driver may hang, crash or end its process.
//! The crate cudarc loads the library at run time, as programs with their own loader do.

use std::ffi::{CString, c_void};
use std::process::Stdio;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, DriverError, result, sys};
use gpusession_common::units::human_bytes;
use gpusession_diagnosis::check::{Check, Finding};
use serde::{Deserialize, Serialize};

/// The table of these checks.
pub const CHECKS: &[Check<Outcome>] = &[
    Check { id: "gpu.library", run: library },
    Check { id: "gpu.cards", run: cards },
    Check { id: "gpu.result", run: result_of_kernel },
    Check { id: "gpu.time", run: time },
];

/// First argument with which the command starts itself as the test; no option of the command line.
pub const ARGUMENT: &str = "--gpu-test";
/// Time after which the test is killed.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of the copies for bandwidth.
const COPY: usize = 64 << 20;
/// Elements of the vectors that the kernel adds.
const ELEMENTS: usize = 1 << 18;
const BLOCK: u32 = 256;

/// Adds two vectors of 32-bit numbers. Cards from Turing on run it, and so does the simulated one.
const PTX: &str = "
.version 6.3
.target sm_75
.address_size 64
.visible .entry add(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n)
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %d<8>;
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %d1, %r5, 4;
    ld.param.u64 %d2, [a];
    ld.param.u64 %d3, [b];
    ld.param.u64 %d4, [c];
    add.s64 %d5, %d2, %d1;
    add.s64 %d6, %d3, %d1;
    add.s64 %d7, %d4, %d1;
    ld.global.u32 %r6, [%d5];
    ld.global.u32 %r7, [%d6];
    add.s32 %r8, %r6, %r7;
    st.global.u32 [%d7], %r8;
DONE:
    ret;
}
";

/// Result of the test, as its standard output.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Path of the library that was loaded, from the process's maps.
    pub library: Option<String>,
    /// Whether that library is gpusession's.
    pub remote: bool,
    /// Name and memory in bytes of each card.
    pub cards: Vec<(String, u64)>,
    /// Step at which it stopped, and the error.
    pub failed: Option<(String, String)>,
    /// Elements of the kernel's result that are wrong.
    pub wrong: usize,
    /// Times of start, copy to the card, copy from it, and launch with synchronization.
    pub start_usec: u64,
    pub to_usec: u64,
    pub from_usec: u64,
    pub launch_usec: u64,
}

/// End of the test.
#[derive(Debug)]
pub enum Outcome {
    Report(Report),
    /// It did not end in time.
    Hung,
    /// It ended without a report: its exit status, and its standard error.
    Died(String),
}

/// Runs the test in a child process.
pub async fn test() -> Outcome {
    let Ok(command) = std::env::current_exe() else {
        return Outcome::Died("this command's own file was not found".into());
    };
    let child = tokio::process::Command::new(command)
        .arg(ARGUMENT)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn();
    let output = match child {
        Ok(child) => tokio::time::timeout(TEST_TIMEOUT, child.wait_with_output()).await,
        Err(error) => return Outcome::Died(error.to_string()),
    };
    match output {
        Err(_) => Outcome::Hung,
        Ok(Err(error)) => Outcome::Died(error.to_string()),
        Ok(Ok(output)) => serde_json::from_slice(&output.stdout).map_or_else(
            |_| {
                let said = String::from_utf8_lossy(&output.stderr);
                let last = said.lines().last().unwrap_or("no message");
                Outcome::Died(format!("{}: {last}", output.status))
            },
            Outcome::Report,
        ),
    }
}

/// The child: performs the test, and prints the report.
pub fn child() -> i32 {
    let mut report = Report::default();
    // SAFETY: the call loads and drops libraries by name; their initializers are those that every
    // program of this user runs.
    if unsafe { sys::is_culib_present() } {
        if let Err((step, error)) = perform(&mut report) {
            report.failed = Some((step.into(), error));
        }
        report.library = mapped();
        report.remote = report.library.as_ref().is_some_and(|path| super::library::is_ours(path.as_ref()));
    } else {
        report.failed = Some(("load the library".into(), "no libcuda.so.1 found".into()));
    }
    crate::print(&serde_json::to_string(&report).unwrap_or_default());
    0
}

/// Returns the path of the CUDA driver library in this process.
fn mapped() -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| line.split_once('/').map(|(_, path)| format!("/{path}")));
    // A symbolic link may lead to a file of any name, so that the driver's own symbols decide.
    let mut files: Vec<String> = paths.filter(|path| path.contains(".so")).collect();
    files.dedup();
    let named = files.iter().find(|path| path.contains("libcuda"));
    let is_driver = |path: &&String| super::library::contains(path.as_ref(), b"\0cuLaunchHost");
    named.or_else(|| files.iter().find(is_driver)).cloned()
}

type Step<T> = Result<T, (&'static str, String)>;

fn step<T>(name: &'static str, outcome: Result<T, DriverError>) -> Step<T> {
    outcome.map_err(|error| (name, describe(error)))
}

/// Formats a driver's error as its name and its text.
fn describe(error: DriverError) -> String {
    let name = error.error_name().ok().map_or_else(|| format!("error {}", error.0 as u32), lossy);
    let text = error.error_string().ok().map(lossy);
    text.map_or_else(|| name.clone(), |text| format!("{name}: {text}"))
}

fn lossy(text: &std::ffi::CStr) -> String {
    text.to_string_lossy().into_owned()
}

fn usec(begun: Instant) -> u64 {
    begun.elapsed().as_micros() as u64
}

/// Allocates, copies, launches a kernel and compares.
fn perform(report: &mut Report) -> Step<()> {
    let begun = Instant::now();
    step("initialize CUDA", result::init())?;
    let count = step("count the cards", CudaContext::device_count())?;
    for ordinal in 0..count {
        let card = step("find a card", result::device::get(ordinal))?;
        let name = step("name a card", result::device::get_name(card))?;
        // SAFETY: the device came from the driver.
        let memory = step("measure a card", unsafe { result::device::total_mem(card) })?;
        report.cards.push((name, memory as u64));
    }
    if count == 0 {
        return Err(("count the cards", "CUDA works, and lists no card".into()));
    }
    let context = step("create a context", CudaContext::new(0))?;
    report.start_usec = usec(begun);
    let stream = context.default_stream();

    let host = vec![7u8; COPY];
    let begun = Instant::now();
    let device = step("copy to the card", stream.clone_htod(&host))?;
    step("copy to the card", context.synchronize())?;
    report.to_usec = usec(begun);
    let begun = Instant::now();
    let back = step("copy from the card", stream.clone_dtoh(&device))?;
    step("copy from the card", context.synchronize())?;
    report.from_usec = usec(begun);
    report.wrong += host.iter().zip(&back).filter(|(a, b)| a != b).count();
    drop(device);

    let first: Vec<u32> = (0..ELEMENTS as u32).collect();
    let second: Vec<u32> = first.iter().map(|n| n.wrapping_mul(2_654_435_761)).collect();
    let a = step("copy a vector", stream.clone_htod(&first))?;
    let b = step("copy a vector", stream.clone_htod(&second))?;
    let c = step("allocate a vector", stream.alloc_zeros::<u32>(ELEMENTS))?;
    let function = load()?;
    {
        use cudarc::driver::DevicePtr as _;
        let (mut a, _a) = a.device_ptr(&stream);
        let (mut b, _b) = b.device_ptr(&stream);
        let (mut c, _c) = c.device_ptr(&stream);
        let mut count = ELEMENTS as u32;
        let mut arguments = [
            (&raw mut a).cast::<c_void>(),
            (&raw mut b).cast(),
            (&raw mut c).cast(),
            (&raw mut count).cast(),
        ];
        let grid = ELEMENTS as u32 / BLOCK;
        let begun = Instant::now();
        // SAFETY: the arguments have the types of the kernel's parameters, and the vectors live
        // until the synchronization below.
        let launched = unsafe {
            result::launch_kernel(
                function,
                (grid, 1, 1),
                (BLOCK, 1, 1),
                0,
                stream.cu_stream(),
                &mut arguments,
            )
        };
        step("launch a kernel", launched)?;
        step("run a kernel", context.synchronize())?;
        report.launch_usec = usec(begun);
    }
    let sum = step("copy the result", stream.clone_dtoh(&c))?;
    let expected = first.iter().zip(&second).map(|(a, b)| a.wrapping_add(*b));
    report.wrong += sum.iter().zip(expected).filter(|(found, expected)| **found != *expected).count();
    Ok(())
}

/// Loads the kernel.
fn load() -> Step<sys::CUfunction> {
    let text = CString::new(PTX).unwrap_or_default();
    // SAFETY: the text ends with a zero, and the driver copies it. The context of the caller is
    // current.
    let module = step("load PTX", unsafe { result::module::load_data(text.as_ptr().cast()) })?;
    // SAFETY: the module is loaded, and stays so until the process ends.
    step("find the kernel", unsafe { result::module::get_function(module, c"add".into()) })
}

/// Returns the report, or the finding about a test without one.
fn report(outcome: &Outcome) -> Result<&Report, Finding> {
    match outcome {
        Outcome::Report(report) => Ok(report),
        Outcome::Hung => Err(Finding::fault(
            format!("the test did not end within {} s", TEST_TIMEOUT.as_secs()),
            "gpusession status; GPUSESSION_TRACE=why gpusession health --gpu",
        )),
        Outcome::Died(why) => Err(Finding::fault(
            format!("the test ended without a result: {why}"),
            "GPUSESSION_TRACE=why gpusession health --gpu; ldconfig -p | grep libcuda",
        )),
    }
}

/// Judges a report in which the test came to its end.
fn complete(outcome: &Outcome, judge: impl Fn(&Report) -> Finding) -> Finding {
    match report(outcome) {
        Ok(report) if report.failed.is_none() => judge(report),
        _ => Finding::skipped("the test did not come to its end"),
    }
}

fn library(outcome: &Outcome) -> Finding {
    match report(outcome).map(|report| (&report.library, report.remote)) {
        Ok((Some(path), true)) => Finding::ok(format!("{path}, gpusession's")),
        Ok((Some(path), false)) if std::path::Path::new("/proc/driver/nvidia").exists() => Finding::warning(
            format!("{path}, of this machine's own driver: the test used a local card"),
            "gpusession run -- gpusession health --gpu tests the remote one",
        ),
        Ok((Some(path), false)) => Finding::fault(
            format!("{path}, which is not gpusession's"),
            "gpusession health --local names the file that decides",
        ),
        Ok((None, _)) => Finding::fault(
            "no libcuda.so.1 found",
            "sudo gpusession setup-libs, or gpusession run -- gpusession health --gpu",
        ),
        Err(finding) => finding,
    }
}

fn cards(outcome: &Outcome) -> Finding {
    match report(outcome) {
        Ok(Report { cards, .. }) if !cards.is_empty() => {
            let shown = cards.iter().map(|(name, memory)| format!("{name}, {}", human_bytes(*memory)));
            Finding::ok(shown.collect::<Vec<_>>().join("; "))
        }
        Ok(Report { failed: Some((step, error)), .. }) => Finding::fault(
            format!("cannot {step}: {error}"),
            "gpusession status; GPUSESSION_TRACE=why gpusession health --gpu",
        ),
        _ => Finding::skipped("the test did not come to its end"),
    }
}

fn result_of_kernel(outcome: &Outcome) -> Finding {
    match report(outcome) {
        Ok(Report { failed: Some((step, error)), cards, .. }) if !cards.is_empty() => Finding::fault(
            format!("cannot {step}: {error}"),
            "gpusession status; journalctl -u gpuserver on the server",
        ),
        Ok(Report { failed: Some(_), .. }) | Err(_) => Finding::skipped("the test did not come to its end"),
        Ok(Report { wrong: 0, .. }) => Finding::ok(format!(
            "{} copied both ways and {ELEMENTS} sums are right",
            human_bytes(COPY as u64)
        )),
        Ok(Report { wrong, .. }) => Finding::fault(
            format!("{wrong} results are wrong"),
            "on the server: nvidia-smi -q -d ECC; gpuserver off GPU until the card is replaced",
        ),
    }
}

fn time(outcome: &Outcome) -> Finding {
    complete(outcome, |report| {
        let speed = |usec: u64| COPY as f64 / 1e3 / usec.max(1) as f64;
        Finding::ok(format!(
            "start {} ms, {:.1} GB/s to the card, {:.1} GB/s from it, kernel {} us",
            report.start_usec / 1000,
            speed(report.to_usec),
            speed(report.from_usec),
            report.launch_usec
        ))
    })
}

#[cfg(test)]
mod tests {
    use gpusession_diagnosis::check::State;

    use super::*;

    fn states(outcome: &Outcome) -> Vec<State> {
        CHECKS.iter().map(|check| (check.run)(outcome).state).collect()
    }

    #[test]
    fn each_end_of_the_test_has_its_findings() {
        use State::{Fault, Ok, Skipped};
        let good = Report {
            library: Some("/lib/libcuda.so.1".into()),
            remote: true,
            cards: vec![("GPU".into(), 1 << 30)],
            ..Default::default()
        };
        assert_eq!(states(&Outcome::Report(good.clone())), [Ok, Ok, Ok, Ok]);
        let wrong = Report { wrong: 3, ..good.clone() };
        assert_eq!(states(&Outcome::Report(wrong)), [Ok, Ok, Fault, Ok]);
        let failed = Some(("run a kernel".into(), "CUDA_ERROR_ECC_UNCORRECTABLE".into()));
        assert_eq!(states(&Outcome::Report(Report { failed, ..good.clone() })), [Ok, Ok, Fault, Skipped]);
        let failed = Some(("initialize CUDA".into(), "CUDA_ERROR_NO_DEVICE".into()));
        let none = Report { failed, cards: vec![], ..good };
        assert_eq!(states(&Outcome::Report(none)), [Ok, Fault, Skipped, Skipped]);
        assert_eq!(states(&Outcome::Hung), [Fault, Skipped, Skipped, Skipped]);
        assert_eq!(states(&Outcome::Died("signal: 11".into())), [Fault, Skipped, Skipped, Skipped]);
    }
}
