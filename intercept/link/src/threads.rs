//! Threads inside other people's programs.

use std::io;
use std::sync::OnceLock;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};

/// Starts a thread that takes none of the program's signals: its handlers run on its own threads only.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let mut before = SigSet::empty();
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), Some(&mut before))?;
    let thread = Builder::new().name(name.into()).spawn(run);
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None)?;
    thread
}

/// CPUs that this process may use.
pub fn usable_cpus() -> usize {
    static CPUS: OnceLock<usize> = OnceLock::new();
    *CPUS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// How long a thread may spin for something that is expected soon; not at all where CPUs are scarce.
pub fn spin_time() -> Duration {
    if usable_cpus() > 2 { Duration::from_micros(50) } else { Duration::ZERO }
}
