//! GPU core dumps of faulting kernels, in the program's file system.

use std::io::Read as _;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpusession_proto::frame::op;
use gpusession_proto::grant::Reply;
use gpusession_test_support::cuda::{Cuda, KERNEL, at};
use gpusession_test_support::relay::{Cut, Fate, Place, Relay};
use gpusession_test_worker::{Machine, Options, TEST_TIMEOUT, Worker};
use nix::libc;

use crate::{ILLEGAL_ADDRESS, granted, variable, worker};

/// Values of `CUcoredumpSettings`.
const ON_EXCEPTION: u64 = 1;
const FILE: u64 = 5;
const FLAGS: u64 = 7;
/// Flags `CU_COREDUMP_SKIP_GLOBAL_MEMORY | CU_COREDUMP_SKIP_ABORT`.
const SMALL_WITHOUT_ABORT: u32 = 2 | 16;
/// Bytes that the simulated driver writes in place of global memory.
const MEMORY: usize = 3 << 20;

// --- The program.

static COMPLETE: AtomicBool = AtomicBool::new(false);

extern "C" fn complete(_: *mut std::ffi::c_void, _: i32, _: i32) {
    COMPLETE.store(true, Ordering::SeqCst);
}

fn set(cuda: &Cuda, attribute: u64, value: &[u8]) {
    let mut len = value.len();
    cuda.ok("cuCoredumpSetAttributeGlobal", &[attribute, value.as_ptr() as u64, at(&mut len)]);
}

/// Asks for a dump by calls, as `HOW` says, and faults.
pub fn faults_with_a_dump() {
    std::env::set_current_dir(variable("FOLDER")).unwrap();
    println!("pid {}.", std::process::id());
    let cuda = Cuda::begin();
    let how = variable("HOW");
    let ask = || {
        set(&cuda, ON_EXCEPTION, &[1]);
        set(&cuda, FILE, b"by-call\0");
        set(&cuda, FLAGS, &SMALL_WITHOUT_ABORT.to_ne_bytes());
    };
    if how == "call" {
        ask();
    }
    if how == "library" {
        let image = cuda.get("cuLibraryLoadData", &[KERNEL.as_ptr() as u64, 0, 0, 0, 0, 0, 0]);
        assert_ne!(image, 0);
    }
    let complete = complete as extern "C" fn(*mut std::ffi::c_void, i32, i32) as usize as u64;
    cuda.ok("cuCoredumpRegisterCompleteCallback", &[complete, 0, 0]);
    match &how[..] {
        "flag" => drop(cuda.get("cuCtxCreate_v2", &[0x20, 0])),
        _ => drop(cuda.on(0)),
    }
    if how == "late" {
        ask();
    }
    let kernel = cuda.increment(cuda.load(KERNEL));
    let address = cuda.allocate(1024);
    assert_eq!((cuda.launch(kernel, address, 0), cuda.word(address)), (0, 1), "nothing is broken");
    if how == "both" {
        // The other lease's GPU makes the first dump.
        let ctx = cuda.on(1);
        let kernel = cuda.increment(cuda.load(KERNEL));
        cuda.launch(kernel, 0, 0);
        while cuda.call("cuCtxSynchronize", &[]) != ILLEGAL_ADDRESS {}
        while !COMPLETE.swap(false, Ordering::SeqCst) {}
        assert_ne!(ctx, cuda.on(0));
    }
    cuda.launch(kernel, 0, 0);
    // A driver may return no error while it makes a dump.
    let since = Instant::now();
    while cuda.call("cuCtxSynchronize", &[]) != ILLEGAL_ADDRESS {
        assert!(since.elapsed() < TEST_TIMEOUT);
    }
    while variable("WAITS") == "yes" && !COMPLETE.load(Ordering::SeqCst) {
        assert!(since.elapsed() < TEST_TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("alive");
}

// --- Tests.

struct Run {
    folder: tempfile::TempDir,
    output: Output,
}

/// Runs the program with these variables in an empty folder.
fn run(reply: Reply, how: &str, waits: bool, variables: &[(&str, &str)]) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let waits = if waits { "yes" } else { "no" };
    let more = [("FOLDER", folder.path().to_str().unwrap()), ("HOW", how), ("WAITS", waits)];
    let variables: Vec<_> = variables.iter().chain(&more).map(|(k, v)| (*k, (*v).to_string())).collect();
    let (output, _) = gpusession_test_support::cuda::run("faults_with_a_dump", vec![reply], &variables);
    Run { folder, output }
}

impl Run {
    /// Returns the names of all files.
    fn files(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.folder.path()).unwrap();
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn pid(&self) -> String {
        let said = String::from_utf8_lossy(&self.output.stdout);
        said.split("pid ").nth(1).unwrap().split('.').next().unwrap().to_string()
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.folder.path().join(name)).unwrap()
    }

    /// Checks that the program lived to its end.
    fn lived(&self) {
        let said = String::from_utf8_lossy(&self.output.stdout);
        assert!(self.output.status.success() && said.contains("alive"), "{:?}", self.output);
    }

    fn aborted(&self) {
        let said = String::from_utf8_lossy(&self.output.stdout);
        assert_eq!(self.output.status.signal(), Some(libc::SIGABRT), "{:?}", self.output);
        assert!(!said.contains("alive"), "a call that returns the fault waits for the dump");
    }
}

/// Returns the dump that the simulated driver writes with these flags.
fn dump(flags: u32, memory: usize) -> Vec<u8> {
    let mut dump = format!("simgpu core dump\nkernel increment\nflags {flags:#x}\n").into_bytes();
    dump.extend((0..memory).map(|i| (i / 1000) as u8));
    dump
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_string()
}

/// The variable that enables dumps.
const ENABLED: (&str, &str) = ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "1");
const WITHOUT_ABORT: (&str, &str) = ("CUDA_COREDUMP_GENERATION_FLAGS", "skip_abort");

#[test]
fn dump_of_a_fault_has_the_programs_name_and_the_program_aborts() {
    for warm in [true, false] {
        let machine = Machine::new();
        let worker = Worker::start_with(&machine, &Options { warm, ..Options::default() });
        let pattern = ("CUDA_COREDUMP_FILE", "dump-%h-%p.%t");
        let run = run(granted(&worker), "", false, &[ENABLED, pattern]);
        run.aborted();
        let errors = String::from_utf8_lossy(&run.output.stderr);
        assert!(errors.contains("Starting GPU coredump generation"), "the driver's line: {errors}");
        let [file] = &run.files()[..] else { panic!("{:?}: {:?}", run.files(), run.output) };
        let (name, time) = file.rsplit_once('.').unwrap();
        assert_eq!(name, format!("dump-{}-{}", host(), run.pid()));
        assert!(time.parse::<u64>().unwrap() > 1_700_000_000);
        assert!(run.read(file) == dump(0, MEMORY), "warm: {warm}");
    }
}

#[test]
fn program_that_skips_the_abort_lives_and_its_dump_has_the_drivers_name() {
    let (_machine, worker) = worker(&[]);
    let run = run(granted(&worker), "", true, &[ENABLED, WITHOUT_ABORT]);
    run.lived();
    let [file] = &run.files()[..] else { panic!("{:?}: {:?}", run.files(), run.output) };
    let rest = file.strip_prefix("core_").unwrap().split_once('_').unwrap().1;
    assert_eq!(rest, format!("{}_{}.nvcudmp", host(), run.pid()));
    assert!(run.read(file) == dump(0, MEMORY));
}

#[test]
fn attributes_count_before_the_first_context() {
    let dumped = |how, waits| {
        let (_machine, worker) = worker(&[]);
        let run = run(granted(&worker), how, waits, &[]);
        run.lived();
        run
    };
    let asked = dumped("call", true);
    assert_eq!(asked.files(), ["by-call"]);
    assert_eq!(asked.read("by-call"), dump(2, 0));
    for how in ["late", ""] {
        assert!(dumped(how, false).files().is_empty(), "{how}");
    }
}

#[test]
fn flag_of_a_context_asks_for_a_dump_too() {
    let (_machine, worker) = worker(&[]);
    let run = run(granted(&worker), "flag", false, &[("CUDA_COREDUMP_FILE", "dump")]);
    run.aborted();
    assert!(run.read("dump") == dump(0, MEMORY));
}

#[test]
fn dump_that_cannot_be_written_changes_nothing_else() {
    let (_machine, worker) = worker(&[]);
    let run = run(granted(&worker), "", false, &[ENABLED, ("CUDA_COREDUMP_FILE", "no/such/folder")]);
    run.aborted();
    let said = String::from_utf8_lossy(&run.output.stderr);
    assert!(said.contains("GPU core dump no/such/folder: not written: "), "{said}");
    assert!(run.files().is_empty() && !Path::new("no").exists());
}

#[test]
fn broken_connection_does_not_change_a_dump() {
    let machine = Machine::new();
    let worker = Worker::start_with(&machine, &Options { resume_grace_s: 20, ..Options::default() });
    let relay = Relay::start(worker.address, |connection| {
        let unit = if connection == 0 { 14 } else { 5 };
        let cut = (connection < 5).then_some(Cut { unit, place: Place::InBody, reset: true });
        Fate { down: cut, ..Fate::default() }
    });
    let mut endpoint = worker.endpoint(false);
    endpoint.addresses = vec![relay.address.to_string()];
    let reply = Reply::Granted(vec![endpoint]);
    let run = run(reply, "", true, &[ENABLED, WITHOUT_ABORT, ("CUDA_COREDUMP_FILE", "dump")]);
    run.lived();
    assert!(run.read("dump") == dump(0, MEMORY));
    assert!(relay.connections() > 1, "it broke");
}

#[test]
fn flags_select_the_parts_of_a_dump() {
    let rows = [
        (("CUDA_COREDUMP_GENERATION_FLAGS", "skip_global_memory,skip_abort"), 2),
        (("CUDA_COREDUMP_GENERATION_FLAGS", "skip_shared_memory,skip_constbank_memory,skip_abort"), 0x24),
        (("CUDA_ENABLE_LIGHTWEIGHT_COREDUMP", "1"), 0x2f),
    ];
    for (variable, flags) in rows {
        let (_machine, worker) = worker(&[]);
        let lives = ("CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION", "0");
        let variables = [ENABLED, lives, variable, ("CUDA_COREDUMP_FILE", "dump")];
        // The call that returns the error waits for the file.
        let run = run(granted(&worker), "", false, &variables);
        run.lived();
        let memory = if flags & 2 == 0 { MEMORY } else { 0 };
        assert!(run.read("dump") == dump(flags, memory), "{flags:#x}");
    }
}

#[test]
fn program_that_lives_gets_its_error_at_once_where_no_dump_can_be_written() {
    for (file, why) in [("no/such/folder", "not written: "), ("/dev/full", "incomplete: No space left")] {
        let (_machine, worker) = worker(&[]);
        let run = run(granted(&worker), "", true, &[ENABLED, WITHOUT_ABORT, ("CUDA_COREDUMP_FILE", file)]);
        run.lived();
        let said = String::from_utf8_lossy(&run.output.stderr);
        assert!(said.contains("GPU core dump") && said.contains(why), "{said}");
        assert!(run.files().is_empty());
    }
}

#[test]
fn dump_can_go_to_a_fifo() {
    let (_machine, worker) = worker(&[]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fifo");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let reader = std::thread::spawn({
        let path = path.clone();
        move || {
            let mut bytes = Vec::new();
            std::fs::File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
            bytes
        }
    });
    let run = run(granted(&worker), "", true, &[ENABLED, ("CUDA_COREDUMP_FILE", path.to_str().unwrap())]);
    run.aborted();
    assert!(reader.join().unwrap() == dump(0, MEMORY));
}

#[test]
fn dumps_of_two_leases_have_files_of_their_own() {
    let (machine, other) = (Machine::new(), Machine::new());
    let (first, second) = (Worker::start(&machine), Worker::start(&other));
    let reply = Reply::Granted(vec![first.endpoint(false), second.endpoint(false)]);
    let run = run(reply, "both", true, &[ENABLED, WITHOUT_ABORT, ("CUDA_COREDUMP_FILE", "dump")]);
    run.lived();
    let mut files = run.files();
    files.sort();
    assert_eq!(files, ["dump", "dump.2"], "{:?}", run.output);
    assert!(files.iter().all(|name| run.read(name) == dump(0, MEMORY)));
}

#[test]
fn library_before_the_first_context_does_not_prevent_a_dump() {
    let (_machine, worker) = worker(&[]);
    let run =
        run(granted(&worker), "library", true, &[ENABLED, WITHOUT_ABORT, ("CUDA_COREDUMP_FILE", "dump")]);
    run.lived();
    assert!(run.read("dump") == dump(0, MEMORY));
}

#[test]
fn end_of_a_worker_names_the_dump() {
    let (_machine, mut worker) = worker(&[]);
    run(granted(&worker), "", false, &[ENABLED]).aborted();
    let bytes = dump(0, MEMORY).len();
    let ended = worker.ended();
    assert!(ended.ends_with(&format!("; a kernel's fault made a GPU core dump ({bytes} bytes)")), "{ended}");
}

#[test]
fn mps_makes_no_dump_and_the_fault_is_as_without_one() {
    let machine = Machine::new();
    let driver = vec![("CUDA_MPS_PIPE_DIRECTORY", "/run/mps".to_string())];
    let options = Options { mps: true, warm: false, driver, ..Options::default() };
    let mut worker = Worker::start_with(&machine, &options);
    let run = run(granted(&worker), "", false, &[ENABLED]);
    run.lived();
    assert!(run.files().is_empty());
    let said = String::from_utf8_lossy(&run.output.stderr);
    assert!(said.contains("GPU core dumps: server test makes none: under MPS"), "{said}");
    assert!(!worker.ended().contains("core dump"));
}

#[test]
fn program_with_an_object_keeps_its_context() {
    const PIECE: u64 = 2 << 20;
    let (_machine, worker) = worker(&[]);
    let client = worker.client(false);
    client.call(op::ALLOC, &[gpusession_test_worker::WINDOW, PIECE, 0]);
    client.put(gpusession_test_worker::WINDOW, b"kept");
    const NOT_PERMITTED: i32 = 800;
    assert_eq!(client.refused(op::CORE_DUMP, &[0]), NOT_PERMITTED);
    assert_eq!(client.get(gpusession_test_worker::WINDOW, 4), b"kept");
    client.call(op::FREE, &[gpusession_test_worker::WINDOW]);
    client.call(op::CORE_DUMP, &[0]);
    const INVALID_VALUE: i32 = 1;
    assert_eq!(client.refused(op::CORE_DUMP, &[0]), INVALID_VALUE, "once");
}

#[test]
fn context_that_cannot_be_created_again_ends_the_session() {
    // The first context is the warm one.
    let (_machine, mut worker) = worker(&[("SIMGPU_FAIL_CONTEXT_AT", "2")]);
    let run = run(granted(&worker), "", false, &[ENABLED]);
    assert!(!run.output.status.success());
    let why = "GPU core dumps: the context of GPU 0 of the lease could not be created again: CUDA error 2; \
               start the program again, or without CUDA_ENABLE_COREDUMP_ON_EXCEPTION";
    let said = String::from_utf8_lossy(&run.output.stderr);
    assert!(said.contains(why), "{said}");
    assert_eq!(worker.ended(), why);
}
