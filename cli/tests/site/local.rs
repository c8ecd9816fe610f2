//! `gpusession local`: programs on this machine's own, simulated GPUs.

use std::io::{BufRead as _, BufReader, Read as _};

use cudarc::driver::{result, sys};

use super::*;

/// Child process of the tests: a program that reports its memory, then waits until its input ends.
#[test]
fn local_program() {
    if std::env::var_os("LOCAL_PROGRAM").is_none() {
        return;
    }
    result::init().unwrap();
    let card = result::device::get(0).unwrap();
    // SAFETY: the card exists, the context stays current, and the addresses are this program's.
    let (total, half, whole) = unsafe {
        let context = result::primary_ctx::retain(card).unwrap();
        result::ctx::set_current(context).unwrap();
        let (_, total) = result::mem_get_info().unwrap();
        let half = result::malloc_sync(total / 2).map(|address| result::free_sync(address).unwrap());
        (total, half, result::malloc_sync(total + (1 << 20)))
    };
    assert_eq!(whole.unwrap_err().0, sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    println!("\nMEMORY {total} {}", half.is_ok());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    // Its test's harness prints nothing more.
    std::process::exit(0);
}

/// A machine with simulated GPUs and a user's runtime folder.
struct Machine {
    folder: tempfile::TempDir,
    name: String,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (built, library) =
            (simulated(), artefact("gpusession-cuda", Artefact::Library("libgpusession_cuda.so")));
        programs();
        for sub in ["run", "sim", "lib", "home"] {
            std::fs::create_dir(folder.path().join(sub)).unwrap();
        }
        let link = |from: &Path, to: &str| std::os::unix::fs::symlink(from, folder.path().join(to)).unwrap();
        link(&built.join("libsimgpu.so"), "sim/libcuda.so.1");
        link(&built.join("libsimgpu.so"), "sim/libnvidia-ml.so.1");
        link(&library, "lib/libcuda.so.1");
        let name = format!("local_{}_{}", std::process::id(), NEXT_PORT.fetch_add(1, Ordering::Relaxed));
        Self { folder, name }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpusession"));
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", self.path("home"))
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env("GPUSESSION_LIBDIR", self.path("lib"))
            .env("GPUSERVER_WORKER", simulated().join("gpuserver-worker"))
            .env("SIMGPU_MACHINE", &self.name)
            .env("SIMGPU_DEVICES", "1")
            .arg("local")
            .arg("--driver")
            .arg(self.path("sim/libcuda.so.1"))
            .args(options)
            .stdin(Stdio::null());
        command
    }

    /// Starts a program on a part of the GPU, and returns it with the memory that it sees.
    fn start(&self, memory: &str) -> (Running, u64) {
        let own = std::env::current_exe().unwrap().display().to_string();
        let program = [&own, "local::local_program", "--exact", "--nocapture"];
        let mut command = self.command(&[&["-m", memory, "--"], &program[..]].concat());
        command.env("LOCAL_PROGRAM", "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line =
            lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("MEMORY ")?.to_owned()));
        let line = line.unwrap_or_else(|| panic!("no memory: {:?}", child.wait()));
        let (total, half) = line.split_once(' ').unwrap();
        assert_eq!(half, "true");
        (Running(child), total.parse().unwrap())
    }

    /// Command lines of all processes of this machine.
    fn processes(&self) -> Vec<String> {
        let variable = format!("SIMGPU_MACHINE={}\0", self.name);
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let ours = processes.filter(|process| {
            let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
            String::from_utf8_lossy(&environment).contains(&variable)
        });
        let line =
            |process: std::fs::DirEntry| std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        ours.map(|process| String::from_utf8_lossy(&line(process)).replace('\0', " ")).collect()
    }

    fn nothing_is_left(&self) {
        let end = Instant::now() + TEST_TIMEOUT;
        while !self.processes().is_empty() {
            assert!(Instant::now() < end, "{:?}", self.processes());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for file in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
            if file.file_name().to_string_lossy().contains(&self.name) {
                let _ = std::fs::remove_file(file.path());
            }
        }
    }
}

#[test]
fn local_programs_share_a_server_that_ends_with_the_last_one() {
    let machine = Machine::new();
    let (first, half) = machine.start("50%");
    let (mut second, quarter) = machine.start("25%");
    assert!(half.abs_diff(2 * quarter) <= 4 << 20, "{half} {quarter}");
    let servers = || machine.processes().iter().filter(|line| line.ends_with("gpuserver serve ")).count();
    assert_eq!(servers(), 1);
    // The rest does not suffice for a third.
    let third = machine.command(&["-m", "50%", "--", "true"]).output().unwrap();
    assert_eq!(third.status.code(), Some(125), "{third:?}");
    drop(second.0.stdin.take());
    assert_eq!(second.0.wait().unwrap().code(), Some(0));
    assert_eq!(servers(), 1);
    // The kernel kills the program with the command, and its server follows.
    first.kill();
    machine.nothing_is_left();

    // Another one starts, and the exit status is the program's.
    let output = machine.command(&["--", "sh", "-c", "exit 7"]).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    machine.nothing_is_left();
}

#[test]
fn local_without_a_driver_a_server_or_a_folder_is_125() {
    let machine = Machine::new();
    let refused = |command: &mut Command, word: &str| {
        let output = command.output().unwrap();
        let said = text(&output.stderr);
        assert!(
            output.status.code() == Some(125) && said.contains(word) && said.contains("hint:"),
            "{output:?}"
        );
    };
    std::fs::remove_file(machine.path("sim/libcuda.so.1")).unwrap();
    refused(&mut machine.command(&["--", "true"]), "does not start: ");
    machine.nothing_is_left();
    refused(machine.command(&["--", "true"]).env_remove("XDG_RUNTIME_DIR"), "XDG_RUNTIME_DIR");
    std::fs::create_dir(machine.path("alone")).unwrap();
    let alone = machine.path("alone/gpusession");
    std::fs::copy(env!("CARGO_BIN_EXE_gpusession"), &alone).unwrap();
    let mut command = Command::new(alone);
    refused(command.args(["local", "--", "true"]).env("PATH", "/nonexistent"), "gpuserver is not installed");
}
