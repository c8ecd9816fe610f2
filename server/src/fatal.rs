//! Signals that the program cannot go on after are reported, then raised again, so that it ends as the kernel has it: killed by the
//! signal, with a core dump where these are on, and started again by the service manager.

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction};

/// Signals that mean a fault of the program itself, and what is said of them.
const FATAL: [(Signal, &[u8]); 5] = [
    (Signal::SIGSEGV, b"gpuserver: fatal signal SIGSEGV: internal error, please report it\n"),
    (Signal::SIGBUS, b"gpuserver: fatal signal SIGBUS: internal error, or a file system is full\n"),
    (Signal::SIGILL, b"gpuserver: fatal signal SIGILL: internal error, please report it\n"),
    (Signal::SIGFPE, b"gpuserver: fatal signal SIGFPE: internal error, please report it\n"),
    (Signal::SIGABRT, b"gpuserver: fatal signal SIGABRT: internal error, please report it\n"),
];

extern "C" fn report(number: libc::c_int) {
    if let Some((signal, text)) = FATAL.iter().find(|(signal, _)| *signal as libc::c_int == number) {
        // SAFETY: the text is `len` bytes long; write(2) may be called in a signal handler.
        let _ = unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
        // The kernel has put the default action back (SA_RESETHAND): this ends the process.
        let _ = raise(*signal);
    }
}

/// Reports fatal signals from now on.
pub fn install() {
    // On the stack that the runtime has set up for an overflow of the usual one.
    let flags = SaFlags::SA_RESETHAND | SaFlags::SA_ONSTACK | SaFlags::SA_NODEFER;
    let action = SigAction::new(SigHandler::Handler(report), flags, SigSet::empty());
    for (signal, _) in FATAL {
        // SAFETY: the handler only calls functions that are async-signal-safe (write, raise), and touches no memory but constants.
        let _ = unsafe { sigaction(signal, &action) };
    }
}
