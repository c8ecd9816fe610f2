//! `gpusession local`: a program on this machine's own GPUs, with the limits of a lease.
//!
//! All runs of a user share one private `gpuserver`, since a GPU has one server. A run holds a
//! shared lock while it lives; the kernel releases it however the run ends. The *keeper*, a process
//! of its own, starts the server and waits for the exclusive lock: then no run is left, and it
//! stops the server. A run that begins meanwhile waits for the keeper's lock, and starts another.
//! A unit with a socket would need a service manager for the user, or root; a lock needs neither,
//! and the kernel releases it even after `kill -9`.
#![expect(clippy::disallowed_methods, reason = "the keeper waits for its server")]

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gpusession_common::units::Memory;
use gpusessiond::client;
use gpusessiond::identity::{self, Home};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getuid, setsid};

use crate::exit::{Failure, Result, code};
use crate::run::{self, Wanted};

/// First argument of the keeper; the others are the user's folder and the server's program.
pub const KEEPER: &str = "--local-keeper";
/// Time for the server's start, which tests the driver and the isolation of workers.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Time for the server's stop, after which the keeper kills it.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Lock that each run shares, and that of the keeper.
const RUNS_LOCK: &str = "runs.lock";
const KEEPER_LOCK: &str = "keeper.lock";
/// Line of a keeper whose server is ready.
const READY: &str = "ready";

#[derive(clap::Args)]
pub struct Local {
    /// Number of GPUs
    #[arg(short = 'n', long = "gpus", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    gpus: Option<u32>,
    /// Memory of each GPU: a share such as 50%, or a size such as 4000MiB
    #[arg(short, long, value_name = "SHARE|SIZE")]
    memory: Option<Memory>,
    /// Percentage of each GPU's multiprocessors, by NVIDIA's MPS; the first run of a user decides
    /// whether the server uses MPS
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100))]
    sm: Option<u32>,
    /// CUDA driver library, if the loader does not find NVIDIA's
    #[arg(long, value_name = "FILE")]
    driver: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

fn failed(message: impl Into<String>) -> Failure {
    Failure::new(code::NO_LEASE, message)
}

fn file_error(path: &Path) -> impl Fn(std::io::Error) -> Failure + '_ {
    move |error| failed(format!("{}: {error}", path.display()))
}

/// The user's folder, with the files of the runs, the keeper and the server.
struct Folder(PathBuf);

impl Folder {
    /// Creates the folder below `$XDG_RUNTIME_DIR`, which only the user may enter.
    fn open() -> Result<Self> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|p| p.is_absolute());
        let runtime = runtime.ok_or_else(|| {
            failed("XDG_RUNTIME_DIR is not set: no folder for a server of this user")
                .hint("log in through PAM, or set it to a folder that only you may enter")
        })?;
        let path = runtime.join("gpusession-local");
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(file_error(&path))?;
        let found = fs::symlink_metadata(&path).map_err(file_error(&path))?;
        if !found.is_dir() || found.uid() != getuid().as_raw() || found.mode() & 0o077 != 0 {
            return Err(failed(format!("{}: not a folder that only you may enter", path.display())));
        }
        Ok(Self(path))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Opens a lock file. No child inherits the lock.
    fn lock(&self, name: &str, how: FlockArg) -> Result<Flock<File>> {
        let path = self.path(name);
        let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(file_error(&path))?;
        Flock::lock(file, how).map_err(|(_, error)| failed(format!("{}: {error}", path.display())))
    }

    /// Returns the identity of the user's runs at the server.
    fn home(&self) -> Home {
        Home { identity: self.path("identity"), servers: vec![self.path("servers.toml")] }
    }

    fn server(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        // Folders of a service in whose unit this program runs are not the server's.
        for name in ["STATE_DIRECTORY", "RUNTIME_DIRECTORY", "NOTIFY_SOCKET", "LISTEN_FDS"] {
            command.env_remove(name);
        }
        command.env("GPUSERVER_CONF", self.path("gpuserver.toml")).stdin(Stdio::null());
        command
    }

    /// Runs a verb of the server, and returns its output.
    fn verb(&self, program: &Path, words: &[&str]) -> Result<String> {
        let output = self.server(program).args(words).output().map_err(file_error(program))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            false => Err(failed(last_line(&output.stderr))),
        }
    }

    /// Replaces the server's configuration and authority by new ones.
    fn prepare(&self, program: &Path, options: &Local) -> Result<()> {
        for old in ["state", "run", "identity"] {
            let path = self.path(old);
            match fs::remove_dir_all(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(file_error(&path)(e)),
                _ => {}
            }
        }
        let mut keys = toml::Table::new();
        let mut set = |key: &str, value: toml::Value| drop(keys.insert(key.into(), value));
        set("name", "local".into());
        set("listen", "127.0.0.1:0".into());
        set("data_ports", 0.into());
        // Bytes on the loopback interface reach no other host.
        set("encryption", "off".into());
        set("trusted_networks", toml::Value::Array(vec!["127.0.0.0/8".into()]));
        set("isolation", "try".into());
        set("drain_timeout", 0.into());
        set("netperf", "off".into());
        set("state_dir", self.path("state").display().to_string().into());
        set("runtime_dir", self.path("run").display().to_string().into());
        // The machine's folder of locks is not the user's.
        set("lock_dir", self.path("locks").display().to_string().into());
        if options.sm.is_some() {
            set("sharing", "mps".into());
        }
        if let Some(driver) = &options.driver {
            set("driver", driver.display().to_string().into());
        }
        let mut limits = toml::Table::new();
        limits.insert("gpus".into(), 64.into());
        keys.insert("limits".into(), limits.into());
        let path = self.path("gpuserver.toml");
        fs::write(&path, keys.to_string()).map_err(file_error(&path))?;
        self.verb(program, &["pool", "init"]).map(drop)
    }

    /// Starts the server by a keeper, and makes this user its client.
    async fn start(&self, program: &Path, options: &Local) -> Result<()> {
        let keeps = self.lock(KEEPER_LOCK, FlockArg::LockExclusiveNonblock).map_err(|_| {
            failed("this machine's own GPU server runs, but does not answer")
                .hint(format!("{} has its log", self.path("server.log").display()))
        })?;
        self.prepare(program, options)?;
        drop(keeps);
        let own = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
        let mut command = Command::new(own);
        command.arg(KEEPER).arg(&self.0).arg(program).stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(Stdio::null()).current_dir("/");
        // SAFETY: between fork and exec the closure makes one system call, which is
        // async-signal-safe, and allocates nothing.
        unsafe {
            // Signals of the run's terminal are not for the keeper.
            command.pre_exec(|| setsid().map(drop).map_err(std::io::Error::from));
        }
        let mut keeper = command.spawn().map_err(|e| failed(format!("cannot start the keeper: {e}")))?;
        let mut line = String::new();
        if let Some(output) = keeper.stdout.take() {
            let _ = BufReader::new(output).read_line(&mut line);
        }
        if line.trim_end() != READY {
            let _ = keeper.wait();
            let log = self.path("server.log");
            let why = last_line(&fs::read(&log).unwrap_or_default());
            return Err(failed(format!("this machine's own GPU server does not start: {why}")).hint(
                format!(
                    "`gpusession local` needs an NVIDIA GPU and its driver, or --driver FILE; {} has more",
                    log.display()
                ),
            ));
        }
        let address = self.address(program)?;
        let token = self.verb(program, &["token", "create"])?;
        let joined = identity::join_pool(&self.home(), &address, &token, Some("local"), client::join).await;
        joined.map(drop).map_err(|e| Failure::of_identity(&e).no_lease())
    }

    /// Returns the control address of the server; an error if it does not run.
    fn address(&self, program: &Path) -> Result<String> {
        let status = self.verb(program, &["status", "--json"])?;
        let status: serde_json::Value = serde_json::from_str(&status).map_err(|e| failed(e.to_string()))?;
        let address = status["server"]["control_address"].as_str();
        address.map(str::to_owned).ok_or_else(|| failed("the server does not tell its address"))
    }
}

/// Returns the last line of a program's error output, without the program's name.
fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it wrote no reason");
    line.trim_start_matches("gpuserver: ").trim().to_owned()
}

/// Finds the server's program beside this one or in `$PATH`.
fn server_program() -> Result<PathBuf> {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.to_owned()));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = beside.into_iter().chain(std::env::split_paths(&path)).map(|folder| folder.join("gpuserver"));
    found.into_iter().find(|program| program.is_file()).ok_or_else(|| {
        failed("gpuserver is not installed on this machine").hint("install the package gpuserver")
    })
}

/// `gpusession local`.
pub async fn local(options: Local) -> Result<i32> {
    let program = server_program()?;
    let folder = Folder::open()?;
    // Held until this process ends; waits while a keeper stops the server.
    let _runs = folder.lock(RUNS_LOCK, FlockArg::LockShared)?;
    let address = {
        let _starting = folder.lock("start.lock", FlockArg::LockExclusive)?;
        match folder.address(&program) {
            Ok(address) => address,
            Err(_) => {
                folder.start(&program, &options).await?;
                folder.address(&program)?
            }
        }
    };
    let wanted = Wanted {
        gpus: options.gpus,
        memory: options.memory,
        sm_percent: options.sm.map(gpusessiond::units::SmPercent::Percent),
        sm_count: None,
        sharing: None,
        model: None,
        servers: vec![address],
        servers_file: None,
        allow_clear: true,
    };
    let (home, servers) = (folder.home(), &wanted.servers);
    run::direct(
        &home,
        servers,
        true,
        wanted.spec(),
        run::Program { line: &options.program, bound: true },
        None,
    )
    .await
}

/// Body of the keeper's process; returns its exit status.
pub fn keeper() -> i32 {
    let mut arguments = std::env::args_os().skip(2);
    let (Some(folder), Some(program)) = (arguments.next(), arguments.next()) else { return code::USAGE };
    let folder = Folder(folder.into());
    match folder.keep(Path::new(&program)) {
        Ok(()) => 0,
        Err(_) => 1,
    }
}

impl Folder {
    /// Starts the server, and stops it when no run is left.
    fn keep(self, program: &Path) -> Result<()> {
        let _alone = self.lock(KEEPER_LOCK, FlockArg::LockExclusiveNonblock)?;
        let (notices, log) = (self.path("notify"), self.path("server.log"));
        let _ = fs::remove_file(&notices);
        let socket = UnixDatagram::bind(&notices).map_err(file_error(&notices))?;
        let log = File::create(&log).map_err(file_error(&log))?;
        let mut command = self.server(program);
        command.arg("serve").env("NOTIFY_SOCKET", &notices).stdout(Stdio::null()).stderr(log);
        run::bind(&mut command);
        let mut server = command.spawn().map_err(file_error(program))?;
        if !gets_ready(&mut server, &socket) {
            let _ = server.kill();
            let _ = server.wait();
            return Err(failed("the server does not start"));
        }
        drop(socket);
        let _ = writeln!(std::io::stdout(), "{READY}");
        let pid = Pid::from_raw(server.id() as i32);
        std::thread::spawn(move || {
            // No run is left, and none begins before this process has exited.
            let _none = self.lock(RUNS_LOCK, FlockArg::LockExclusive);
            let _ = kill(pid, Signal::SIGTERM);
            std::thread::sleep(STOP_TIMEOUT);
            let _ = kill(pid, Signal::SIGKILL);
            std::thread::sleep(STOP_TIMEOUT);
        });
        let _ = server.wait();
        Ok(())
    }
}

/// Waits until the server reports that it is ready; `false` if it exits or takes too long.
fn gets_ready(server: &mut Child, socket: &UnixDatagram) -> bool {
    let begun = Instant::now();
    let _ = socket.set_read_timeout(Some(Duration::from_millis(100)));
    let mut text = [0; 4096];
    while begun.elapsed() < START_TIMEOUT && matches!(server.try_wait(), Ok(None)) {
        if let Ok(n) = socket.recv(&mut text)
            && text[..n].split(|byte| *byte == b'\n').any(|line| line == b"READY=1")
        {
            return true;
        }
    }
    false
}
