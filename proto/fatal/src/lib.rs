//! Reports of fatal signals of a daemon.
//!
//! The signal is raised again after the report, so that it kills the process as the kernel intends,
//! with a core dump if these are on. The service manager then starts the daemon again.

use std::io::IoSlice;
use std::sync::OnceLock;

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction};

/// Signals that mean a fault of the program itself, and the text reported for each.
const FATAL: [(Signal, &str); 5] = [
    (Signal::SIGSEGV, ": fatal signal SIGSEGV: internal error, please report it\n"),
    (Signal::SIGBUS, ": fatal signal SIGBUS: internal error, or a file system is full\n"),
    (Signal::SIGILL, ": fatal signal SIGILL: internal error, please report it\n"),
    (Signal::SIGFPE, ": fatal signal SIGFPE: internal error, please report it\n"),
    (Signal::SIGABRT, ": fatal signal SIGABRT: internal error, please report it\n"),
];

/// Name of the program; the signal handler reads it.
static PROGRAM: OnceLock<&str> = OnceLock::new();

extern "C" fn report(number: libc::c_int) {
    if let Some((signal, text)) = FATAL.iter().find(|(signal, _)| *signal as libc::c_int == number) {
        let program = PROGRAM.get().copied().unwrap_or_default();
        let line = [IoSlice::new(program.as_bytes()), IoSlice::new(text.as_bytes())];
        // SAFETY: an IoSlice is an iovec, and `line` has two; writev(2) is one system call, which a
        // signal handler may make.
        let _ = unsafe { libc::writev(libc::STDERR_FILENO, line.as_ptr().cast(), 2) };
        // The kernel has restored the default action (SA_RESETHAND): this kills the process.
        let _ = raise(*signal);
    }
}

/// Installs the report for all fatal signals of this program.
pub fn install(program: &'static str) {
    let _ = PROGRAM.set(program);
    // The handler runs on the stack that the runtime has set up for an overflow of the usual one.
    let flags = SaFlags::SA_RESETHAND | SaFlags::SA_ONSTACK | SaFlags::SA_NODEFER;
    let action = SigAction::new(SigHandler::Handler(report), flags, SigSet::empty());
    for (signal, _) in FATAL {
        // SAFETY: the handler only makes system calls (writev, raise), and reads constants and a
        // name that was set before.
        let _ = unsafe { sigaction(signal, &action) };
    }
}
