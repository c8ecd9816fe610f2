//! Programs and leases outlive the daemon, where systemd keeps descriptors for the next one.

use std::io::IoSliceMut;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

use crate::{Running, Site, programs, text};
use gpusession_test_daemon::Helper;

/// The part of systemd that the daemon uses: the descriptor store, and its unit's job.
struct Systemd {
    socket: UnixDatagram,
    path: PathBuf,
    kept: Vec<(String, OwnedFd)>,
    heard: String,
}

impl Systemd {
    fn new(path: PathBuf) -> Self {
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, path, kept: Vec::new(), heard: String::new() }
    }

    /// Carries out the daemon's requests since the last call.
    fn work(&mut self) {
        loop {
            let mut buffer = [0; 4096];
            let mut space = nix::cmsg_space!([RawFd; 4]);
            let mut slices = [IoSliceMut::new(&mut buffer)];
            let received = recvmsg::<()>(
                self.socket.as_raw_fd(),
                &mut slices,
                Some(&mut space),
                MsgFlags::MSG_CMSG_CLOEXEC,
            );
            let Ok(received) = received else { return };
            let fds: Vec<OwnedFd> = received
                .cmsgs()
                .unwrap()
                .flat_map(|message| match message {
                    ControlMessageOwned::ScmRights(fds) => fds,
                    _ => vec![],
                })
                // SAFETY: the kernel has just created these descriptors for this process, and no
                // other object owns them.
                .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
                .collect();
            let length = received.bytes;
            let said = String::from_utf8_lossy(&buffer[..length]).into_owned();
            let name = said.lines().find_map(|l| l.strip_prefix("FDNAME=")).unwrap_or_default().to_owned();
            let lines: Vec<&str> = said.lines().collect();
            if lines.contains(&"FDSTORE=1") {
                assert!(lines.contains(&"FDPOLL=0"), "{said}");
                self.kept.extend(fds.into_iter().map(|fd| (name.clone(), fd)));
            } else if lines.contains(&"FDSTOREREMOVE=1") {
                self.kept.retain(|(kept, _)| *kept != name);
            }
            self.heard.push_str(&said);
            self.heard.push('\n');
        }
    }

    /// Starts the daemon with the descriptors that its predecessor stored.
    fn start(&mut self, site: &Site) -> Running {
        self.work();
        let mut command = Command::new("/bin/sh");
        site.environment(&mut command);
        let names: Vec<&str> = self.kept.iter().map(|(name, _)| name.as_str()).collect();
        command
            .args(["-c", "export LISTEN_PID=$$; exec \"$0\""])
            .arg(programs().join("gpusessiond"))
            .env("NOTIFY_SOCKET", &self.path)
            .env("LISTEN_FDS", names.len().to_string())
            .env("LISTEN_FDNAMES", names.join(":"))
            .stderr(Stdio::null());
        let fds: Vec<RawFd> = self.kept.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
        // SAFETY: between fork and exec only `fcntl` and `dup2` are called, which are
        // async-signal-safe, on a list made before.
        unsafe {
            command.pre_exec(move || {
                // First moved above their final numbers, so that none overwrites another.
                let mut above = [0; 64];
                for (i, fd) in fds.iter().enumerate() {
                    above[i] = libc::fcntl(*fd, libc::F_DUPFD, 100);
                }
                for (fd, target) in above[..fds.len()].iter().zip(3..) {
                    if libc::dup2(*fd, target) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            })
        };
        Running(command.spawn().unwrap())
    }

    /// Number of stored descriptors whose name starts with `prefix`.
    fn kept(&mut self, prefix: &str) -> usize {
        self.work();
        self.kept.iter().filter(|(name, _)| name.starts_with(prefix)).count()
    }
}

/// The part of systemd's D-Bus API by which the daemon distinguishes a restart from a stop.
struct Units;

#[zbus::interface(name = "org.freedesktop.systemd1.Manager")]
impl Units {
    #[zbus(name = "GetUnitByPID")]
    fn get_unit_by_pid(&self, _pid: u32) -> zbus::OwnedObjectPath {
        zbus::OwnedObjectPath::try_from("/unit").unwrap()
    }
}

struct Unit;

#[zbus::interface(name = "org.freedesktop.systemd1.Unit")]
impl Unit {
    #[zbus(property)]
    fn job(&self) -> (u32, zbus::OwnedObjectPath) {
        (7, zbus::OwnedObjectPath::try_from("/job").unwrap())
    }
}

struct Job;

#[zbus::interface(name = "org.freedesktop.systemd1.Job")]
impl Job {
    #[zbus(property)]
    fn job_type(&self) -> String {
        "restart".into()
    }
}

async fn restarting(address: &str) -> zbus::Connection {
    zbus::connection::Builder::address(address)
        .name("org.freedesktop.systemd1")
        .serve_at("/org/freedesktop/systemd1", Units)
        .serve_at("/unit", Unit)
        .serve_at("/job", Job)
        .build()
        .await
        .unwrap()
}

#[test]
fn programs_and_leases_outlive_the_daemon() {
    let mut site = Site::new();
    let server = site.start_server();
    site.configure("[client]\nname = \"vm-1\"\n[[lease]]\nmemory = \"25%\"\n", &site.token());
    let mut systemd = Systemd::new(site.path("notify"));
    let daemon = systemd.start(&site);
    let lease = site.lease();
    // A lease of its own for one program, which lasts as long as the program.
    let mut holder = Command::new(env!("CARGO_BIN_EXE_gpusession"));
    site.environment(&mut holder);
    // `cat` exits when the pipe closes, even if `gpusession run` is killed.
    holder.args(["run", "--new", "-m", "25%", "--", "cat"]).stdin(Stdio::piped());
    let holder = holder.spawn().unwrap();
    let helper = Helper::start(&site.path("run/grant.sock"));
    assert!(helper.granted);
    let described = site.described("both", |d| {
        d["leases"].as_array().is_some_and(|l| l.len() == 2) && d["leases"][0]["processes"] == 1
    });
    let own = described["leases"][1]["id"].clone();
    assert_eq!((systemd.kept("process."), systemd.kept("lease.")), (1, 1));
    let workers = site.gpuserver(&["ps", "--json"]);

    let same = |site: &Site| {
        let described = site.described("the same leases", |d| {
            d["state"] == "ready" && d["leases"].as_array().is_some_and(|l| l.len() == 2)
        });
        assert_eq!(described["leases"][0]["id"], lease.as_str());
        assert_eq!(described["leases"][0]["processes"], 1);
        assert_eq!(described["leases"][1]["id"], own);
    };
    daemon.kill();
    let daemon = systemd.start(&site);
    same(&site);

    // A restart by systemd: the daemon exits at once, and releases no lease.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let job = runtime.block_on(restarting(&site.bus.address()));
    assert_eq!(daemon.stop(), 0);
    assert_eq!((systemd.kept("process."), systemd.kept("lease.")), (1, 1));
    assert!(systemd.heard.contains("leases are kept"), "{}", systemd.heard);
    let daemon = systemd.start(&site);
    same(&site);
    drop(job);
    runtime.shutdown_background();
    assert_eq!(
        site.gpuserver(&["ps", "--json"]).matches("\"active\"").count(),
        workers.matches("\"active\"").count(),
        "no worker was killed"
    );

    // The restarted daemon notices when programs of its predecessor exit.
    helper.kill();
    site.described("its end", |d| d["leases"][0]["processes"] == 0);
    Running(holder).kill();
    site.described("the other lease's end", |d| d["leases"].as_array().is_some_and(|l| l.len() == 1));
    site.until("an empty store", |_| (systemd.kept("process.") + systemd.kept("lease.") == 0).then_some(()));
    // A stop, unlike a restart, releases the leases.
    assert_eq!(daemon.stop(), 0);
    assert!(site.gpuserver(&["leases"]).contains("no leases"));
    assert_eq!(server.stop(), 0);
}

#[test]
fn a_second_signal_ends_a_daemon_that_waits_for_programs() {
    let mut site = Site::new();
    let _server = site.start_server();
    site.configure("[client]\nname = \"vm-1\"\n[[lease]]\nmemory = \"25%\"\n", &site.token());
    let mut systemd = Systemd::new(site.path("notify"));
    let mut daemon = systemd.start(&site);
    site.lease();
    let helper = Helper::start(&site.path("run/grant.sock"));
    assert!(helper.granted);
    site.described("a program", |d| d["leases"][0]["processes"] == 1);
    daemon.signal(Signal::SIGTERM);
    site.until("the daemon stops", |_| {
        systemd.work();
        systemd.heard.contains("giving leases back").then_some(())
    });
    assert_eq!(daemon.0.try_wait().unwrap(), None, "it waits for the program");
    assert_eq!(daemon.stop(), 2);
    helper.kill();
}

#[test]
fn a_reload_changes_only_what_changed() {
    let mut site = Site::new();
    let server = site.start_server();
    let first = "[client]\nname = \"vm-1\"\n[[lease]]\nname = \"a\"\nmemory = \"25%\"\n";
    site.configure(first, &site.token());
    let daemon = site.start_daemon();
    let lease = site.lease();
    let second = format!("{first}[[lease]]\nname = \"b\"\nmemory = \"25%\"\n");
    std::fs::write(site.path("etc/gpusession.toml"), &second).unwrap();
    assert_eq!(site.gpusession(&["reload"]).status.code(), Some(0));
    site.described("the second lease", |d| d["gpus_leased"] == 2 && d["leases"][0]["id"] == lease.as_str());
    // An invalid configuration changes nothing, and the error names file and line.
    std::fs::write(site.path("etc/gpusession.toml"), "[[lease]]\nmemroy = 1\n").unwrap();
    let output = site.gpusession(&["reload"]);
    assert_eq!(output.status.code(), Some(78));
    assert!(
        text(&output.stderr).contains("gpusession.toml:2:1: unknown key `memroy`"),
        "{}",
        text(&output.stderr)
    );
    site.described("both", |d| d["gpus_leased"] == 2 && d["leases"][0]["id"] == lease.as_str());
    // SIGHUP has the same effect.
    std::fs::write(site.path("etc/gpusession.toml"), first).unwrap();
    daemon.signal(Signal::SIGHUP);
    site.described("one lease", |d| d["gpus_leased"] == 1 && d["leases"][0]["id"] == lease.as_str());
    assert_eq!(daemon.stop(), 0);
    assert_eq!(server.stop(), 0);
}
