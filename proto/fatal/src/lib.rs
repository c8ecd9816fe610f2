//! Signals that a daemon cannot go on after are reported, then raised again, so that it ends as the kernel has it: killed by the
//! signal, with a core dump where these are on, and started again by the service manager.

use std::io::IoSlice;
use std::sync::OnceLock;

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction};

/// Signals that mean a fault of the program itself, and what is said of them.
const FATAL: [(Signal, &str); 5] = [
    (Signal::SIGSEGV, ": fatal signal SIGSEGV: internal error, please report it\n"),
    (Signal::SIGBUS, ": fatal signal SIGBUS: internal error, or a file system is full\n"),
    (Signal::SIGILL, ": fatal signal SIGILL: internal error, please report it\n"),
    (Signal::SIGFPE, ": fatal signal SIGFPE: internal error, please report it\n"),
    (Signal::SIGABRT, ": fatal signal SIGABRT: internal error, please report it\n"),
];

/// The program's name.
static PROGRAM: OnceLock<&str> = OnceLock::new();

extern "C" fn report(number: libc::c_int) {
    if let Some((signal, text)) = FATAL.iter().find(|(signal, _)| *signal as libc::c_int == number) {
        let program = PROGRAM.get().copied().unwrap_or_default();
        let line = [IoSlice::new(program.as_bytes()), IoSlice::new(text.as_bytes())];
        // SAFETY: an IoSlice is an iovec, and these two are there; writev(2) is one system call, which a signal handler may make.
        let _ = unsafe { libc::writev(libc::STDERR_FILENO, line.as_ptr().cast(), 2) };
        // The kernel has put the default action back (SA_RESETHAND): this ends the process.
        let _ = raise(*signal);
    }
}

/// Reports fatal signals of this program from now on.
pub fn install(program: &'static str) {
    let _ = PROGRAM.set(program);
    // On the stack that the runtime has set up for an overflow of the usual one.
    let flags = SaFlags::SA_RESETHAND | SaFlags::SA_ONSTACK | SaFlags::SA_NODEFER;
    let action = SigAction::new(SigHandler::Handler(report), flags, SigSet::empty());
    for (signal, _) in FATAL {
        // SAFETY: the handler makes system calls only (writev, raise), and reads constants and a name that was set before.
        let _ = unsafe { sigaction(signal, &action) };
    }
}
