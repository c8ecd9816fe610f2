//! A process locks another and moves its memory out; afterwards that one continues unaffected.

mod common;

use common::{function, launch, machine, ok};
use simgpu::exports::{checkpoint, context, copy, memory};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = "CHECKPOINT_TEST";

/// The process that is checkpointed: answers each line with the content of its device memory.
fn program() {
    let m = machine();
    let store = function(&m, c"store");
    let at = m.memory;
    println!("\nready");
    for (n, line) in (1u32..).zip(std::io::stdin().lines()) {
        if line.as_deref().is_ok_and(|l| l == "spin") {
            assert_eq!(launch(function(&m, c"spin"), m.streams[2], &[at + 64]), 0);
        } else {
            assert_eq!(launch(store, 0, &[at + 4, u64::from(n)]), 0);
        }
        let mut values = [0u32; 2];
        // SAFETY: the array has 8 bytes.
        unsafe { ok(copy::cuMemcpyDtoH_v2(values.as_mut_ptr() as u64, at, 8)) };
        println!("{}", values[1]);
    }
    std::process::exit(0);
}

struct Program(Child, BufReader<std::process::ChildStdout>);

impl Program {
    fn start() -> Program {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "another_process_is_checkpointed", "--nocapture"])
            .env(PROGRAM, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let mut program = Program(child, out);
        while program.line() != "ready" {}
        program
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.1.read_line(&mut line).unwrap() > 0);
        line.trim().into()
    }

    fn say(&mut self, text: &str) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{text}").unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn used() -> usize {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the pointers are valid.
    unsafe { ok(memory::cuMemGetInfo_v2(&raw mut free, &raw mut total)) };
    total - free
}

#[test]
fn another_process_is_checkpointed() {
    if std::env::var_os(PROGRAM).is_some() {
        return program();
    }
    // SAFETY: before any thread that reads the environment.
    unsafe {
        std::env::set_var("SIMGPU_MACHINE", format!("checkpoint-{}", std::process::id()));
        std::env::set_var("SIMGPU_MEMORY", "8MiB");
    }
    let _m = machine();
    let mut program = Program::start();
    let pid = program.pid();
    let limit = [300u32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let (null, before) = (std::ptr::null(), used());
    program.say("");
    assert_eq!(program.line(), "1");
    // SAFETY: null arguments are allowed, and `limit` has the size of the structure.
    unsafe {
        assert_eq!(checkpoint::cuCheckpointProcessCheckpoint(pid, null), 401, "not locked");
        ok(checkpoint::cuCheckpointProcessLock(pid, &raw const limit));
        ok(checkpoint::cuCheckpointProcessCheckpoint(pid, null));
        assert_eq!(used(), before / 2, "only ours is left");
        // Its calls now wait.
        program.say("");
        // Another process takes the card meanwhile.
        let mut other = 0;
        ok(memory::cuMemAlloc_v2(&raw mut other, 6 << 20));
        ok(memory::cuMemFree_v2(other));
        ok(checkpoint::cuCheckpointProcessRestore(pid, null));
        let mut state = 9;
        ok(checkpoint::cuCheckpointProcessGetState(pid, &raw mut state));
        assert_eq!((state, used()), (1, before));
        ok(checkpoint::cuCheckpointProcessUnlock(pid, null));
        assert_eq!(program.line(), "2");
        // A lock fails if work does not complete in time, and leaves the process unlocked.
        program.say("spin");
        assert_eq!(program.line(), "2");
        let start = Instant::now();
        assert_eq!(checkpoint::cuCheckpointProcessLock(pid, &raw const limit), 600);
        assert!(start.elapsed() >= Duration::from_millis(300));
        program.say("");
        assert_eq!(program.line(), "4");
        assert_eq!(
            checkpoint::cuCheckpointProcessLock(1, &raw const limit),
            1,
            "not a program of this machine"
        );
        // After one restore without room none succeeds, as with driver 580.
        drop(program);
        let lost = Program::start();
        ok(checkpoint::cuCheckpointProcessLock(lost.pid(), &raw const limit));
        ok(checkpoint::cuCheckpointProcessCheckpoint(lost.pid(), null));
        ok(memory::cuMemAlloc_v2(&raw mut other, 6 << 20));
        assert_eq!(checkpoint::cuCheckpointProcessRestore(lost.pid(), null), 2);
        ok(memory::cuMemFree_v2(other));
        assert_eq!(checkpoint::cuCheckpointProcessRestore(lost.pid(), null), 304);
        // A process moves its own memory; its other calls wait meanwhile.
        let own = std::process::id().cast_signed();
        drop(lost);
        let mut current = 0;
        ok(context::cuCtxGetCurrent(&raw mut current));
        ok(checkpoint::cuCheckpointProcessLock(own, &raw const limit));
        ok(checkpoint::cuCheckpointProcessCheckpoint(own, null));
        let waits = std::thread::spawn(move || {
            ok(context::cuCtxSetCurrent(current));
            used()
        });
        assert!(!waits.is_finished(), "a call of the locked process");
        ok(checkpoint::cuCheckpointProcessRestore(own, null));
        ok(checkpoint::cuCheckpointProcessUnlock(own, null));
        assert_eq!(waits.join().unwrap(), before / 2);
        ok(context::cuCtxSynchronize());
    }
    let _ = std::fs::remove_file(simgpu::usage::path(simgpu::driver::config()));
}
