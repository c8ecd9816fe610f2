//! Starts worker processes: their environment, their channel, and whether they exit with this
//! process.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;
use std::sync::mpsc;
use std::thread;

use gpusession_proto::supervise::WORKER_FD;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use nix::sys::signal::{Signal, killpg};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::unistd::Pid;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::oneshot;

/// Variables that the server passes on to every worker: full names, or prefixes that end with `_`.
const PASSED_ON: &[&str] = &["GPUSERVER_UNLISTED_CALLS", "GPUSESSION_LOG", "RUST_BACKTRACE", "SIMGPU_"];

/// Finds the worker's program: `$GPUSERVER_WORKER`, beside this program, or where packages install
/// it.
pub fn worker_program() -> PathBuf {
    if let Some(path) = std::env::var_os("GPUSERVER_WORKER") {
        return path.into();
    }
    let beside = std::env::current_exe().ok().and_then(|p| Some(p.parent()?.join("gpuserver-worker")));
    beside.filter(|p| p.exists()).unwrap_or_else(|| "/usr/libexec/gpusession/gpuserver-worker".into())
}

/// Returns the environment of workers: of the server's own only gpusession's variables.
///
/// The driver's folder is searched first, since a driver's libraries find each other by name.
pub fn clean_environment(driver: &Path) -> Vec<(OsString, OsString)> {
    let mut out: Vec<(OsString, OsString)> =
        vec![("PATH".into(), "/usr/bin:/bin".into()), ("LANG".into(), "C.UTF-8".into())];
    if let Some(folder) = driver.parent() {
        out.push(("LD_LIBRARY_PATH".into(), folder.into()));
    }
    out.extend(std::env::vars_os().filter(|(name, _)| {
        name.to_str()
            .is_some_and(|n| PASSED_ON.iter().any(|p| n == *p || p.ends_with('_') && n.starts_with(p)))
    }));
    out
}

/// Returns `true` if workers can get an unlimited stack, whose address layout identity mapping
/// needs.
pub fn stack_can_be_unlimited() -> bool {
    getrlimit(Resource::RLIMIT_STACK).is_ok_and(|(_, hard)| hard == RLIM_INFINITY)
        || nix::unistd::geteuid().is_root()
}

/// Occupies the descriptor under which a worker finds its channel, for as long as this process
/// runs.
///
/// The channel of a new worker is moved there between fork and exec. No descriptor that the
/// standard library needs meanwhile may have that number.
pub fn hold_worker_fd() -> io::Result<()> {
    static HELD: OnceLock<Vec<File>> = OnceLock::new();
    let mut held = Vec::new();
    loop {
        let file = File::open("/dev/null")?;
        if file.as_raw_fd() > WORKER_FD {
            break;
        }
        held.push(file);
    }
    let _ = HELD.set(held);
    Ok(())
}

type Job = Box<dyn FnOnce() + Send>;

/// Thread that starts all workers and daemons.
///
/// The kernel kills processes that are bound to the server when the *thread* that started them
/// exits. It therefore must not be a thread of a pool.
#[derive(Debug, Clone)]
pub struct Spawner(mpsc::Sender<Job>);

impl Spawner {
    /// Starts the thread; needs a runtime.
    pub fn new() -> io::Result<Self> {
        hold_worker_fd()?;
        let (sender, orders) = mpsc::channel::<Job>();
        let runtime = tokio::runtime::Handle::current();
        thread::Builder::new().name("spawner".into()).spawn(move || {
            let _guard = runtime.enter();
            for job in orders {
                job();
            }
        })?;
        Ok(Self(sender))
    }

    /// Starts a worker with these variables only; returns its process and the channel's other end.
    ///
    /// If `outlives` is `false`, the worker exits with this process. The worker enters the control
    /// group whose `cgroup.procs` is `group`.
    pub async fn start(
        &self,
        program: &Path,
        arguments: &'static [&'static str],
        environment: Vec<(OsString, OsString)>,
        outlives: bool,
        group: Option<OwnedFd>,
    ) -> io::Result<(Child, OwnedFd)> {
        let program = program.to_path_buf();
        self.on_thread(move || start(&program, arguments, &environment, outlives, group)).await
    }

    /// Starts a program that the kernel kills with the server.
    pub async fn start_bound(&self, mut command: Command) -> io::Result<Child> {
        bind(command.as_std_mut());
        self.on_thread(move || command.spawn()).await
    }

    async fn on_thread<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (reply, answer) = oneshot::channel();
        let gone = || io::Error::other("the thread that starts workers is gone");
        self.0.send(Box::new(move || drop(reply.send(job())))).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

fn start(
    program: &Path,
    arguments: &[&str],
    environment: &[(OsString, OsString)],
    outlives: bool,
    group: Option<OwnedFd>,
) -> io::Result<(Child, OwnedFd)> {
    let (ours, theirs) = socket_pair()?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs(environment.iter().map(|(k, v)| (k, v)))
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0)
        .kill_on_drop(!outlives);
    if !outlives {
        bind(command.as_std_mut());
    }
    as_worker(command.as_std_mut(), theirs, group);
    let child = command.spawn()?;
    Ok((child, ours))
}

/// Has the kernel kill a command's process with the thread that starts it.
pub fn bind(command: &mut std::process::Command) {
    let parent = nix::unistd::getpid();
    // SAFETY: between fork and exec the closure only makes system calls that are async-signal-safe,
    // and allocates nothing: `io::Error::from` of an errno stores the number.
    unsafe {
        command.pre_exec(move || end_with(parent));
    }
}

/// Has a command start with a worker's channel and stack, inside the control group whose
/// `cgroup.procs` is `group`.
///
/// The command keeps both descriptors. [`hold_worker_fd`] comes first.
pub fn as_worker(command: &mut std::process::Command, channel: OwnedFd, group: Option<OwnedFd>) {
    // SAFETY: as in `bind`.
    unsafe {
        command.pre_exec(move || {
            // Before the worker runs anything, so that all that it takes counts there.
            if let Some(group) = &group {
                enter(group)?;
            }
            if setrlimit(Resource::RLIMIT_STACK, RLIM_INFINITY, RLIM_INFINITY).is_err() {
                // Continues: the worker reports it if it matters to a program.
                let _ = getrlimit(Resource::RLIMIT_STACK)
                    .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_STACK, hard, hard));
            }
            inherit_as_worker_fd(channel.as_raw_fd())
        });
    }
}

/// Kills a process group of a worker or helper.
pub fn end_group(pid: u32) -> nix::Result<()> {
    match i32::try_from(pid) {
        // Groups 0 and 1 never belong to one.
        Ok(pid) if pid > 1 => killpg(Pid::from_raw(pid), Signal::SIGKILL),
        _ => Err(nix::errno::Errno::ESRCH),
    }
}

/// Starts the worker's program as a helper of this process, with the workers' environment.
///
/// The helper exits at EOF on its input, however this process exits, and is killed on drop.
pub fn child(
    program: &Path,
    flag: &str,
    driver: &Path,
    rest: &[&str],
) -> io::Result<(Child, ChildStdin, ChildStdout)> {
    let mut child = Command::new(program)
        .arg(flag)
        .arg(driver)
        .args(rest)
        .env_clear()
        .envs(clean_environment(driver))
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", program.display())))?;
    match (child.stdin.take(), child.stdout.take()) {
        (Some(input), Some(output)) => Ok((child, input, output)),
        _ => Err(io::Error::other("the helper has no pipes")),
    }
}

/// Creates the socket of a worker: the supervisor's end, nonblocking, and the worker's.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    let flags = OFlag::from_bits_retain(fcntl(&ours, FcntlArg::F_GETFL)?);
    fcntl(&ours, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok((ours, theirs))
}

/// Makes the kernel kill this process with the thread that started it; runs between fork and exec.
fn end_with(parent: Pid) -> io::Result<()> {
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
    if nix::unistd::getppid() != parent {
        // The server exited before the request, so that nothing would kill this process.
        return Err(io::Error::from(nix::errno::Errno::ESRCH));
    }
    Ok(())
}

/// Moves this process into the control group with this `cgroup.procs`; runs between fork and exec.
pub(crate) fn enter(group: &OwnedFd) -> io::Result<()> {
    // 0 stands for the writing process.
    nix::unistd::write(group, b"0")?;
    Ok(())
}

/// Makes `fd` the descriptor that a worker expects, open across exec.
fn inherit_as_worker_fd(fd: i32) -> io::Result<()> {
    // SAFETY: dup2 and fcntl take plain numbers; `fd` is open, and descriptor 3 is either `fd` or
    // the spawner's placeholder.
    let done = unsafe {
        if fd == WORKER_FD {
            nix::libc::fcntl(fd, nix::libc::F_SETFD, 0)
        } else {
            nix::libc::dup2(fd, WORKER_FD)
        }
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_cannot_enter_its_group_does_not_start() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = start(Path::new("/bin/true"), &[], &[], true, Some(full.into())).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::ENOSPC));
    }
}
