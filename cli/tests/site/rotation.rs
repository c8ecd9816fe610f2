//! A rotation of the pool's authority under a program that computes.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::process::{ChildStdin, ChildStdout};

use cudarc::driver::result;
use serde_json::Value;

use super::*;

const BYTES: usize = 1 << 20;

/// Child process of the test: keeps bytes on its GPU, and replaces them for each line of its input.
#[test]
fn rotation_program() {
    if std::env::var_os("ROTATION_PROGRAM").is_none() {
        return;
    }
    result::init().unwrap();
    let card = result::device::get(0).unwrap();
    // SAFETY: the card exists, the context stays current, and the addresses are this program's.
    unsafe {
        let context = result::primary_ctx::retain(card).unwrap();
        result::ctx::set_current(context).unwrap();
        let address = result::malloc_sync(BYTES).unwrap();
        let (mut kept, mut bytes) = (0, vec![0; BYTES]);
        result::memset_d8_sync(address, kept, BYTES).unwrap();
        println!("\nCOMPUTED 0");
        for _ in std::io::stdin().lines() {
            result::memcpy_dtoh_sync(&mut bytes, address).unwrap();
            assert!(bytes.iter().all(|byte| *byte == kept));
            kept += 1;
            result::memcpy_htod_sync(address, &vec![kept; BYTES]).unwrap();
            println!("\nCOMPUTED {kept}");
        }
    }
    // Its test's harness prints nothing more.
    std::process::exit(0);
}

struct Program {
    _child: Running,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    steps: u8,
}

impl Program {
    fn start(site: &Site) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["rotation::rotation_program", "--exact", "--nocapture"])
            .env("LD_LIBRARY_PATH", site.path("programs"))
            .env("GPUSESSION_SOCKET", site.path("run/grant.sock"))
            .env("ROTATION_PROGRAM", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let lines = BufReader::new(output).lines();
        let mut program = Self { _child: Running(child), input, lines, steps: 0 };
        program.reports(0);
        program
    }

    fn reports(&mut self, step: u8) {
        let wanted = format!("COMPUTED {step}");
        assert!(self.lines.any(|line| line.unwrap() == wanted), "{wanted}");
    }

    /// Lets the program check and replace its bytes once more.
    fn computes(&mut self) {
        writeln!(self.input).unwrap();
        self.steps += 1;
        self.reports(self.steps);
    }
}

fn rotate(site: &Site, words: &[&str]) -> Value {
    let text = site.gpuserver(&[&["pool", "rotate"], words, &["--json"]].concat());
    let value: Value = serde_json::from_str(&text).unwrap();
    value["rotation"].clone()
}

#[test]
fn a_program_computes_through_a_rotation() {
    let mut site = Site::with_simulated_gpus();
    let server = site.start_server();
    site.configure("[client]\nname = \"vm-1\"\n[[lease]]\nmemory = \"25%\"\n", &site.token());
    let daemon = site.start_daemon();
    let lease = site.lease();
    let library = artefact("gpusession-cuda", Artefact::Library("libgpusession_cuda.so"));
    std::fs::create_dir(site.path("programs")).unwrap();
    std::os::unix::fs::symlink(library, site.path("programs/libcuda.so.1")).unwrap();
    let mut program = Program::start(&site);
    let authorities = |site: &Site| {
        let text = std::fs::read_to_string(site.path("state/identity/authority.pem")).unwrap();
        text.matches("BEGIN CERTIFICATE").count()
    };
    let ready = |site: &Site| {
        site.until("the daemon follows", |site| {
            rotate(site, &["status"])["clients"].as_array().unwrap().is_empty().then_some(())
        });
    };
    program.computes();
    let old = rotate(&site, &["status"])["authority_sha256"].clone();
    rotate(&site, &["begin"]);
    ready(&site);
    assert_eq!(authorities(&site), 2);
    program.computes();
    rotate(&site, &["switch"]);
    ready(&site);
    program.computes();
    assert_ne!(rotate(&site, &["finish"])["authority_sha256"], old);
    site.until("the daemon drops the old authority", |site| (authorities(site) == 1).then_some(()));
    program.computes();
    assert_eq!(site.lease(), lease);
    // The daemon's new connection grants further programs.
    Program::start(&site).computes();
    program.computes();
    assert_eq!((daemon.stop(), server.stop()), (0, 0));
}
