//! The daemon as a program: configuration, notifications to systemd, sockets, exit.

use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use gpusession_proto::grant::{Denial, Reply};
use gpusession_test_daemon::{PrivateBus, TEST_TIMEOUT, ask, request};

const DAEMON: &str = env!("CARGO_BIN_EXE_gpusessiond");

fn daemon(folder: &Path, bus: &str) -> Command {
    let mut command = Command::new(DAEMON);
    command
        .env_clear()
        .env("DBUS_SYSTEM_BUS_ADDRESS", bus)
        .env("STATE_DIRECTORY", folder.join("state"))
        .env("RUNTIME_DIRECTORY", folder.join("run"))
        .env("CONFIGURATION_DIRECTORY", folder.join("etc"))
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    command
}

fn configure(folder: &Path, text: &str) {
    std::fs::create_dir_all(folder.join("etc/conf.d")).unwrap();
    std::fs::write(folder.join("etc/gpusession.toml"), text).unwrap();
}

/// A child process that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn stop(&mut self) -> i32 {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.0.id()).unwrap());
        // SAFETY: kill takes two integers and no pointer.
        assert_eq!(unsafe { libc::kill(pid.as_raw(), libc::SIGTERM) }, 0);
        self.0.wait().unwrap().code().expect("an exit code")
    }
}

fn until(what: &str, mut test: impl FnMut() -> bool) {
    let end = Instant::now() + TEST_TIMEOUT;
    while !test() {
        assert!(Instant::now() < end, "{what} does not come");
        std::thread::yield_now();
    }
}

#[test]
fn a_configuration_that_cannot_work_ends_with_1_and_says_where() {
    let folder = tempfile::tempdir().unwrap();
    configure(folder.path(), "wait_ms = 100\n");
    std::fs::write(folder.path().join("etc/conf.d/10-lease.toml"), "[[lease]]\nmemroy = \"50%\"\n").unwrap();
    for arguments in [&[][..], &["--check-config"]] {
        let output = daemon(folder.path(), "unix:path=/nonexistent")
            .args(arguments)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains("10-lease.toml:2:1: unknown key `memroy`, did you mean `memory`?"), "{error}");
    }
    std::fs::remove_file(folder.path().join("etc/conf.d/10-lease.toml")).unwrap();
    let output = daemon(folder.path(), "unix:path=/nonexistent").arg("--check-config").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let wrong_use = daemon(folder.path(), "unix:path=/nonexistent").arg("--nonsense").output().unwrap();
    assert_eq!(wrong_use.status.code(), Some(1));
    let no_bus = daemon(folder.path(), "unix:path=/nonexistent").output().unwrap();
    assert_eq!(no_bus.status.code(), Some(3));
}

#[test]
fn systemd_hears_that_it_is_ready_although_no_server_is_there() {
    let (bus, folder) = (PrivateBus::start(), tempfile::tempdir().unwrap());
    configure(folder.path(), "wait_ms = 100\n[[lease]]\ngpus = 2\n");
    let notify = UnixDatagram::bind(folder.path().join("notify")).unwrap();
    notify.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let child = daemon(folder.path(), &bus.address())
        .env("NOTIFY_SOCKET", folder.path().join("notify"))
        .spawn()
        .unwrap();
    let mut running = Running(child);
    let hear = |wanted: &str| {
        let mut heard = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let n = notify.recv(&mut buffer).unwrap_or_else(|e| panic!("{e}: {wanted} not in {heard:?}"));
            let text = String::from_utf8_lossy(&buffer[..n]).into_owned();
            if text.contains(wanted) {
                return;
            }
            heard.push(text);
        }
    };
    hear("READY=1");
    hear("waiting for `gpusession join`");
    // Programs get the reason, too.
    let socket = folder.path().join("run/grant.sock");
    let (reply, _connection) = ask(&socket, &request()).unwrap();
    let Reply::Denied { denial: Denial::NotReady, reason } = reply else { panic!("{reply:?}") };
    assert!(reason.contains("gpusession join"), "{reason}");
    assert_eq!(running.stop(), 0);
    hear("STOPPING=1");
    assert!(!socket.exists(), "nothing is left behind");
}

#[test]
fn the_file_of_who_gets_variables_exists_while_the_daemon_runs() {
    use nix::sys::signal::{Signal, kill};
    let (bus, folder) = (PrivateBus::start(), tempfile::tempdir().unwrap());
    let file = folder.path().join("run/login/access.json");
    let given = |text: &str| std::fs::read_to_string(&file).is_ok_and(|file| file.contains(text));
    configure(folder.path(), "[access]\nusers = [\"alice\"]\n[environment]\nNCCL_DEBUG = \"WARN\"\n");
    let mut running = Running(daemon(folder.path(), &bus.address()).spawn().unwrap());
    until("the file", || given(r#""alice""#));
    assert!(!given("NCCL_DEBUG"), "the daemon names no variable");
    configure(folder.path(), "[access]\nusers = [\"bob\"]\n");
    kill(nix::unistd::Pid::from_raw(running.0.id() as i32), Signal::SIGHUP).unwrap();
    until("the new one", || given(r#""bob""#));
    assert_eq!(running.stop(), 0);
    assert!(!file.exists(), "nothing is left behind");
}

#[test]
fn root_writes_the_variables_of_logins_before_the_daemon_starts() {
    let (bus, folder) = (PrivateBus::start(), tempfile::tempdir().unwrap());
    let file = folder.path().join("run/environment");
    let write =
        || daemon(folder.path(), &bus.address()).arg("--write-environment").status().unwrap().success();
    configure(folder.path(), "[environment]\nNCCL_DEBUG = \"WARN\"\nHF_HOME = \"/srv/models\"\n");
    assert!(write());
    let text = "HF_HOME=/srv/models\nNCCL_DEBUG=WARN\n";
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    configure(folder.path(), "[environment]\nLD_PRELOAD = \"/tmp/x\"\n");
    assert!(!write(), "a configuration with errors changes nothing");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
}

#[test]
fn a_fatal_signal_is_reported_and_ends_the_daemon() {
    use nix::sys::signal::{Signal, kill};
    use std::os::unix::process::ExitStatusExt as _;
    let (bus, folder) = (PrivateBus::start(), tempfile::tempdir().unwrap());
    configure(folder.path(), "");
    for (signal, name) in [(Signal::SIGSEGV, "SIGSEGV"), (Signal::SIGABRT, "SIGABRT")] {
        let child = daemon(folder.path(), &bus.address()).stderr(Stdio::piped()).spawn().unwrap();
        let mut running = Running(child);
        let socket = folder.path().join("run/grant.sock");
        until("the daemon", || ask(&socket, &request()).is_ok());
        kill(nix::unistd::Pid::from_raw(running.0.id() as i32), signal).unwrap();
        let mut said = String::new();
        std::io::Read::read_to_string(&mut running.0.stderr.take().unwrap(), &mut said).unwrap();
        assert!(said.contains(&format!("gpusessiond: fatal signal {name}: ")), "{said}");
        assert_eq!(running.0.wait().unwrap().signal(), Some(signal as i32), "by the signal itself");
    }
}

#[test]
fn a_second_daemon_does_not_take_the_first_ones_socket() {
    let (bus, folder) = (PrivateBus::start(), tempfile::tempdir().unwrap());
    configure(folder.path(), "");
    let mut first = Running(daemon(folder.path(), &bus.address()).spawn().unwrap());
    let socket = folder.path().join("run/grant.sock");
    until("the socket", || socket.exists());
    let second = daemon(folder.path(), &bus.address()).output().unwrap();
    assert_eq!(second.status.code(), Some(3));
    assert!(ask(&socket, &request()).is_ok(), "the first one serves on");
    // A killed daemon leaves its socket, which the next one replaces.
    let _ = first.0.kill();
    let _ = first.0.wait();
    assert!(socket.exists());
    let mut next = Running(daemon(folder.path(), &bus.address()).spawn().unwrap());
    until("the next daemon", || ask(&socket, &request()).is_ok());
    assert_eq!(next.stop(), 0);
}

#[test]
fn a_socket_of_systemd_is_used() {
    let (bus, folder) = (PrivateBus::start(), tempfile::tempdir().unwrap());
    configure(folder.path(), "");
    let path = folder.path().join("passed.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut command = Command::new("/bin/sh");
    // LISTEN_PID must be the pid of the program that gets the sockets.
    command
        .args(["-c", "export LISTEN_PID=$$; exec \"$0\"", DAEMON])
        .env_clear()
        .env("DBUS_SYSTEM_BUS_ADDRESS", bus.address())
        .env("STATE_DIRECTORY", folder.path().join("state"))
        .env("RUNTIME_DIRECTORY", folder.path().join("run"))
        .env("CONFIGURATION_DIRECTORY", folder.path().join("etc"))
        .env("LISTEN_FDS", "1")
        .env("LISTEN_FDNAMES", "grant")
        .stderr(Stdio::null());
    let fd = listener.as_raw_fd();
    // SAFETY: between fork and exec only dup2 and fcntl are called, which are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            // dup2 of a descriptor onto itself would leave close-on-exec set.
            if libc::dup2(fd, 3) == 3 && libc::fcntl(3, libc::F_SETFD, 0) == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        })
    };
    let mut running = Running(command.spawn().unwrap());
    let (reply, _connection) = ask(&path, &request()).unwrap();
    assert!(matches!(reply, Reply::Denied { denial: Denial::NoDevice, .. }), "{reply:?}");
    assert_eq!(running.stop(), 0);
    assert!(path.exists(), "the socket is systemd's");
    assert!(!folder.path().join("run/grant.sock").exists());
    drop(listener);
}
