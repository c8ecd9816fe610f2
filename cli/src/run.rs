//! `gpusession run`: a program with leased GPUs.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use gpusession_common::units::Memory;
use gpusession_common::words::Sharing;
use gpusessiond::access::Gate;
use gpusessiond::client::Remote;
use gpusessiond::config::{Config, Servers, variables_for};
use gpusessiond::grant::{self, Limits};
use gpusessiond::identity::Home;
use gpusessiond::leases::engine::{Engine, HostFacts};
use gpusessiond::leases::{LeaseFacts, Leases, Slot, Snapshot, Spec};
use gpusessiond::paths;
use gpusessiond::peer;
use gpusessiond::pool::PoolServer;
use gpusessiond::renewal::{self, Renewer};
use gpusessiond::units::{SmPercent, control_address};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getppid};
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit::{Failure, Result, code};
use crate::releases;

/// Time to wait, after a program exits, for its libraries' final messages.
const OUTPUT_GRACE: Duration = Duration::from_millis(250);
/// Time to release leases before this process exits.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
/// Most leases of one program.
const MAX_LEASES: usize = 8;
/// Signals that a person or a batch system sends to `gpusession run` and intends for the program.
const PASSED_ON: [Signal; 6] =
    [Signal::SIGHUP, Signal::SIGTERM, Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGWINCH];

/// The GPUs that a program wants.
#[derive(Debug, Clone, clap::Args)]
pub struct Wanted {
    /// Number of GPUs
    #[arg(short = 'n', long = "gpus", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub gpus: Option<u32>,
    /// Memory of each GPU: a share such as 50%, or a size such as 4000MiB
    #[arg(short, long, value_name = "SHARE|SIZE")]
    pub memory: Option<Memory>,
    /// Percentage of each GPU's multiprocessors; auto: the percentage of memory, if MPS shares the
    /// GPU
    #[arg(long, value_name = "PERCENT|auto")]
    pub sm_percent: Option<SmPercent>,
    /// Number of multiprocessors of each GPU
    #[arg(long, value_name = "N", conflicts_with = "sm_percent", value_parser = clap::value_parser!(u32).range(1..))]
    pub sm_count: Option<u32>,
    /// How the GPUs are shared: time-slice, mps or exclusive
    #[arg(long, value_name = "HOW")]
    pub sharing: Option<Sharing>,
    /// GPU model, as `gpusession list` shows it
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Server to lease from; may be repeated. The first with room for all GPUs is used; without
    /// one, `run` leases from several
    #[arg(long = "server", value_name = "HOST[:PORT]")]
    pub servers: Vec<String>,
    /// File of servers to lease from, as servers.toml
    #[arg(long = "servers", value_name = "FILE")]
    pub servers_file: Option<PathBuf>,
    /// Without the daemon: also use a server that does not encrypt the program's data
    #[arg(long)]
    pub allow_clear: bool,
}

impl Wanted {
    /// Returns the control addresses of `--server` and of `--servers`, each once, in that order.
    pub fn addresses(&self) -> Result<Vec<String>> {
        let mut addresses = Vec::new();
        for server in &self.servers {
            addresses.push(control_address(server).map_err(Failure::usage)?);
        }
        if let Some(path) = &self.servers_file {
            let wrong = |what: String| Failure::new(code::CONFIGURATION, what);
            let servers = Servers::load(path).map_err(|e| wrong(e.to_string()))?;
            let named = servers.ok_or_else(|| wrong(format!("{}: not found", path.display())))?.addresses();
            if named.is_empty() {
                return Err(wrong(format!("{}: names no server", path.display()))
                    .hint("add [[server]] with address = \"HOST\""));
            }
            addresses.extend(named);
        }
        let mut seen = HashSet::new();
        addresses.retain(|address| seen.insert(address.clone()));
        Ok(addresses)
    }

    /// Converts the options into a specification for the lease manager.
    pub fn spec(&self) -> Spec {
        let key = format!("request/{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
        let uid = nix::unistd::getuid().as_raw();
        let user = nix::unistd::User::from_uid(nix::unistd::getuid()).ok().flatten().map(|u| u.name);
        Spec {
            gpus: self.gpus.unwrap_or(1),
            memory: self.memory.unwrap_or_default(),
            sm_percent: match self.sm_percent {
                Some(SmPercent::Percent(percent)) => percent,
                Some(SmPercent::Auto) | None => 100,
            },
            sm_count: self.sm_count.unwrap_or(0),
            sm_auto: self.sm_percent == Some(SmPercent::Auto),
            sharing: self.sharing,
            model: self.model.clone().unwrap_or_default(),
            user: user.unwrap_or_default(),
            who: "gpusession".into(),
            ..Spec::requested(key, uid)
        }
    }
}

/// A lease manager of this process, which connects to servers with the caller's identity.
pub struct Direct {
    /// The state machine that allocates and renews.
    pub engine: Engine,
    /// Control addresses of the servers, in the order of the request.
    pub servers: Vec<String>,
}

impl Direct {
    /// Connects with an identity to the servers at `addresses`; without any, to those of its
    /// `servers.toml`.
    ///
    /// Renews the identity while the process lives, and follows renewals by others.
    pub async fn new(home: &Home, addresses: &[String], allow_clear: bool) -> Result<Self> {
        let identity = home.load().map_err(|e| Failure::of_identity(&e))?;
        let standing = tokio::sync::watch::Sender::new(None);
        let mut renewer = Renewer::new(home.clone(), identity.clone(), Arc::new(renewal::wall), standing);
        if renewer.expired() {
            // With this certificate, servers answer nothing but its renewal.
            renewer.renew_if_due().await;
        }
        tokio::spawn(renewer.follow());
        releases::repeat_meanwhile(home.clone(), identity.clone());
        let servers = match addresses {
            [] => home.addresses().map_err(|e| Failure::of_identity(&e))?,
            addresses => addresses.to_vec(),
        };
        let remotes = servers
            .iter()
            .map(|address| Ok(Arc::new(Remote::new(address, &identity)?) as Arc<dyn PoolServer>))
            .collect::<std::result::Result<Vec<_>, gpusessiond::pool::PoolError>>()
            .map_err(|e| Failure::of_pool(&e))?;
        let engine = Engine::start(HostFacts::this_machine());
        engine.allow_clear(allow_clear);
        engine.connect(remotes);
        Ok(Self { engine, servers })
    }
}

/// A private grant socket in a folder that only its owner can enter.
struct PrivateSocket {
    folder: tempfile::TempDir,
}

impl PrivateSocket {
    fn path(&self) -> PathBuf {
        self.folder.path().join("grant.sock")
    }
}

/// Runs a program without a daemon, on leases of its own or on the lease `known`.
///
/// `allow_clear`: the program's data may be unencrypted. `spec` repeats the request of a known
/// lease, which yields the same lease; that lease is not released afterwards.
pub async fn direct(
    home: &Home,
    servers: &[String],
    allow_clear: bool,
    mut spec: Spec,
    program: Program<'_>,
    known: Option<&str>,
) -> Result<i32> {
    let direct = Direct::new(home, servers, allow_clear).await?;
    let engine: Arc<dyn Leases> = Arc::new(direct.engine);
    spec.why =
        program.line.first().map(|p| p.to_string_lossy().chars().take(200).collect()).unwrap_or_default();
    let create = async |spec| match engine.create(spec).await {
        Ok(lease) => Ok(lease.facts),
        Err(error) => Err(Failure::of_pool(&error)),
    };
    let leases = tokio::select! {
        leases = lease(&direct.servers, spec, create) => leases,
        // The engine's end releases what it was asked for.
        code = interrupted() => {
            engine.shutdown(SHUTDOWN_GRACE).await;
            return Ok(code);
        }
    };
    let leases = match leases {
        Ok(leases) => leases,
        Err((leases, failure)) => {
            release(engine.as_ref(), &leases, "the servers together have too few GPUs").await;
            return Err(failure.no_lease());
        }
    };
    if let Some(known) = known.filter(|id| leases.iter().all(|lease| lease.id != *id)) {
        release(engine.as_ref(), &leases, "the requested lease does not exist any more").await;
        let over = format!("lease {known} does not exist any more: it expired, or was released");
        return Err(Failure::new(1, over).hint("`gpusession request -o FILE` creates another").no_lease());
    }
    let socket = PrivateSocket {
        folder: tempfile::Builder::new()
            .prefix("gpusession-")
            .permissions(std::fs::Permissions::from_mode(0o700))
            .tempdir()
            .map_err(|e| Failure::new(1, format!("cannot create a temporary folder: {e}")))?,
    };
    let (listener, _file) = peer::bind(&socket.path(), 0o600)
        .map_err(|e| Failure::new(1, format!("{}: {e}", socket.path().display())))?;
    let gate = Arc::new(Gate::new(Config::default().access));
    let server = grant::Server::new(engine.clone(), gate, Duration::from_secs(30), Limits::default());
    let serving = tokio::spawn(Arc::new(server).serve(listener));

    let ids: Vec<&str> = leases.iter().map(|lease| lease.id.as_str()).collect();
    let mut environment = vec![
        ("GPUSESSION_SOCKET".to_owned(), socket.path().into_os_string()),
        ("GPUSESSION_LEASE".to_owned(), ids.join(",").into()),
    ];
    let needed = variables_for(leases.iter().map(|lease| lease.spec.gpus).max().unwrap_or(0));
    let unset = needed.filter(|(name, _)| std::env::var_os(name).is_none());
    environment.extend(unset.map(|(name, value)| (name.to_owned(), value.into())));
    let code = program.run(environment).await;
    complain(engine.as_ref(), &leases).await;
    serving.abort();
    if known.is_none() {
        release(engine.as_ref(), &leases, "its program exited").await;
    }
    code
}

/// Adds the variables that programs on this number of GPUs need, unless they are set otherwise.
pub fn add_needed(environment: &mut BTreeMap<String, String>, gpus: u32) {
    for (name, value) in variables_for(gpus) {
        environment.entry(name.into()).or_insert_with(|| value.into());
    }
}

/// Leases GPUs from one of the servers, else from several: a lease on each, in the servers' order.
///
/// `create` asks once for a lease. An error comes with the leases that were created before it.
pub async fn lease<L>(
    servers: &[String],
    spec: Spec,
    create: impl AsyncFn(Spec) -> Result<L>,
) -> std::result::Result<Vec<L>, (Vec<L>, Failure)> {
    let wanted = spec.gpus;
    let refused = match create(spec.clone()).await {
        Ok(lease) => return Ok(vec![lease]),
        Err(failure) => failure,
    };
    // A known request has one lease.
    if !refused.no_room || wanted < 2 || servers.len() < 2 || spec.request_id.is_some() {
        return Err((Vec::new(), refused));
    }
    let (mut leases, mut missing, mut other) = (Vec::new(), wanted, None);
    for server in servers.iter().take(MAX_LEASES) {
        // The server decides whether a request fits, for its memory, model and limits too.
        for gpus in (1..=missing).rev() {
            let part = Spec {
                gpus,
                servers: vec![server.clone()],
                // Each try has an id of its own, since the one before may still be withdrawn.
                key: format!("{}/{}/{gpus}", spec.key, leases.len()),
                ..spec.clone()
            };
            match create(part).await {
                Ok(lease) => {
                    leases.push(lease);
                    missing -= gpus;
                    break;
                }
                Err(failure) if failure.no_room => {}
                // The next server may answer.
                Err(failure) => {
                    other = Some((server, failure));
                    break;
                }
            }
        }
        if missing == 0 {
            return Ok(leases);
        }
    }
    let found = wanted - missing;
    Err((
        leases,
        match other {
            // More servers are of no help against this reason.
            Some((server, failure)) => Failure {
                message: format!(
                    "server {server}: {}; the others have {found} of {wanted} GPUs",
                    failure.message
                ),
                ..failure
            },
            None => Failure {
                message: format!(
                    "{}; {found} of {wanted} GPUs are free on all servers together",
                    refused.message
                ),
                ..refused
            },
        },
    ))
}

async fn release(engine: &dyn Leases, leases: &[LeaseFacts], reason: &str) {
    for lease in leases {
        engine.release(lease.slot, reason).await;
    }
    engine.shutdown(SHUTDOWN_GRACE).await;
}

/// Prints the failures that the program's libraries reported, since no daemon shows them later.
async fn complain(engine: &dyn Leases, leases: &[LeaseFacts]) {
    let mut snapshot = engine.snapshot();
    let ours = |slot: Slot| leases.iter().any(|lease| lease.slot == slot);
    let over = |s: &Arc<Snapshot>| s.lease_facts().all(|l| !ours(l.slot) || l.processes == 0);
    let _ = tokio::time::timeout(OUTPUT_GRACE, snapshot.wait_for(over)).await;
    let last = snapshot.borrow().clone();
    for (failure, _) in last.lease_facts().filter(|l| ours(l.slot)).flat_map(|l| &l.failures) {
        let what = if failure.running { "lost its GPUs" } else { "could not be served" };
        eprintln!("gpusession: process {} ({}) {what}: {}", failure.pid, failure.program, failure.reason);
    }
}

/// Waits for a signal that aborts the wait for a lease.
pub async fn interrupted() -> i32 {
    let mut terminate = match signal(SignalKind::terminate()) {
        Ok(signal) => signal,
        Err(_) => std::future::pending().await,
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => 128 + Signal::SIGINT as i32,
        _ = terminate.recv() => 128 + Signal::SIGTERM as i32,
    }
}

/// Returns the folder of gpusession's libraries, or an error that names the remedy.
fn libraries() -> Result<PathBuf> {
    let missing = || {
        Failure::new(125, "libcuda.so.1 of gpusession is not installed")
            .hint("install gpusession-libs, or name its folder in GPUSESSION_LIBDIR")
    };
    paths::library_directory().filter(|folder| paths::has_library(folder)).ok_or_else(missing)
}

/// Runs the program with gpusession's libraries first in the loader's path.
///
/// Returns the program's exit status.
pub async fn program_with(program: &[OsString], environment: Vec<(String, OsString)>) -> Result<i32> {
    Program { line: program, bound: false }.run(environment).await
}

/// A program to run.
#[derive(Clone, Copy)]
pub struct Program<'a> {
    /// Its name and its arguments.
    pub line: &'a [OsString],
    /// Whether the kernel kills it with this process.
    pub bound: bool,
}

impl Program<'_> {
    async fn run(self, environment: Vec<(String, OsString)>) -> Result<i32> {
        let Some((name, arguments)) = self.line.split_first() else {
            return Err(Failure::usage("no program to run"));
        };
        let mut path = libraries()?.into_os_string();
        if let Some(old) = std::env::var_os("LD_LIBRARY_PATH").filter(|p| !p.is_empty()) {
            path.push(":");
            path.push(old);
        }
        let mut signals = Vec::new();
        for passed in PASSED_ON {
            let stream =
                signal(SignalKind::from_raw(passed as i32)).map_err(|e| Failure::new(1, e.to_string()))?;
            signals.push((passed, stream));
        }
        // The terminal sends an interrupt to the whole foreground group, the program included.
        let interrupt = signal(SignalKind::interrupt()).map_err(|e| Failure::new(1, e.to_string()))?;
        let mut command = Command::new(name);
        command.args(arguments).env("LD_LIBRARY_PATH", path).envs(environment);
        if self.bound {
            bind(command.as_std_mut());
        }
        let mut child = command.spawn().map_err(|e| {
            let name = name.to_string_lossy();
            match e.kind() {
                std::io::ErrorKind::NotFound => Failure::new(127, format!("{name}: not found")),
                _ => Failure::new(126, format!("{name}: {e}")),
            }
        })?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
        let forward = tokio::spawn(forward(signals, interrupt, pid));
        let status = child.wait().await.map_err(|e| Failure::new(1, e.to_string()));
        forward.abort();
        Ok(code(status?))
    }
}

/// Makes the kernel kill a child with this process.
///
/// The caller's thread must live as long as the process, since the kernel watches the thread.
pub fn bind(command: &mut std::process::Command) {
    let parent = Pid::this();
    // SAFETY: between fork and exec the closure makes two system calls, which are
    // async-signal-safe, and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            set_pdeathsig(Signal::SIGKILL)?;
            match getppid() == parent {
                true => Ok(()),
                false => Err(nix::errno::Errno::ESRCH.into()),
            }
        });
    }
}

async fn forward(
    mut signals: Vec<(Signal, tokio::signal::unix::Signal)>,
    mut interrupt: tokio::signal::unix::Signal,
    pid: Option<Pid>,
) {
    loop {
        let arrived = std::future::poll_fn(|context| {
            use std::task::Poll;
            while let Poll::Ready(Some(())) = interrupt.poll_recv(context) {
                if nix::unistd::isatty(std::io::stdin()) != Ok(true) {
                    return Poll::Ready(Signal::SIGINT);
                }
            }
            for (name, stream) in &mut signals {
                if stream.poll_recv(context).is_ready() {
                    return Poll::Ready(*name);
                }
            }
            Poll::Pending
        })
        .await;
        if let Some(pid) = pid {
            let _ = kill(pid, arrived);
        }
    }
}

fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use gpusessiond::config::LeaseConfig;

    use super::*;

    /// Leases three GPUs of two servers with one each, of which the second answers with `second`.
    async fn of_two(second: fn() -> Failure) -> (usize, Failure) {
        let servers = ["one", "two"].map(str::to_owned);
        let spec = Spec::configured(&LeaseConfig { gpus: 3, ..LeaseConfig::default() }, 0);
        let no_room = || Failure { no_room: true, ..Failure::new(code::FAILED, "this server has 1") };
        let answer = lease(&servers, spec, async |spec| match (&*spec.servers, spec.gpus) {
            ([one], 1) if one == "one" => Ok(()),
            ([two], _) if two == "two" => Err(second()),
            _ => Err(no_room()),
        });
        let (leases, failure) = answer.await.unwrap_err();
        (leases.len(), failure)
    }

    #[tokio::test]
    async fn the_reason_of_a_server_comes_before_the_number_of_gpus() {
        let (leases, failure) =
            of_two(|| Failure::new(code::NOT_ALLOWED, "it does not encrypt").hint("ask")).await;
        assert_eq!((leases, failure.code, failure.hint.as_deref()), (1, code::NOT_ALLOWED, Some("ask")));
        assert_eq!(failure.message, "server two: it does not encrypt; the others have 1 of 3 GPUs");
        let (leases, failure) =
            of_two(|| Failure { no_room: true, ..Failure::new(code::FAILED, "none is free") }).await;
        assert_eq!(leases, 1);
        assert_eq!(failure.message, "this server has 1; 1 of 3 GPUs are free on all servers together");
    }
}
