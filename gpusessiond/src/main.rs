//! `gpusessiond`: holds this client's GPU leases and grants workers to its programs.

use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use gpusessiond::access::Gate;
use gpusessiond::arguments::Arguments;
use gpusessiond::bus::{self, Bus};
use gpusessiond::client::{self, Remote};
use gpusessiond::config::{self, Config};
use gpusessiond::environment::{self, Audience};
use gpusessiond::grant::{self, Limits};
use gpusessiond::handover::{Returned, State, Store};
use gpusessiond::identity::{self, Home, IdentityError};
use gpusessiond::leases::Leases;
use gpusessiond::leases::engine::{Engine, EngineOptions, HostFacts};
use gpusessiond::login::{self, Sessions};
use gpusessiond::notice;
use gpusessiond::paths;
use gpusessiond::peer;
use gpusessiond::pool::{PoolError, PoolServer, Trouble};
use gpusessiond::renewal::{self, Renewer};
use gpusessiond::settings::Settings;
use gpusessiond::units::control_address;
use nix::sys::socket::{SockType, getsockopt, sockopt};
use sd_notify::NotifyState;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tracing::{error, info, warn};
use tracing_subscriber::prelude::*;
use zbus::OwnedObjectPath;

/// Exit code for an unusable configuration or command line; the unit does not restart after it.
const CONFIGURATION: u8 = 1;
/// Exit code after a second signal to stop.
const FORCED: u8 = 2;
/// Exit code after any other failure.
const INTERNAL: u8 = 3;
/// Time that programs have to exit when the daemon stops.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// Time to release the leases after that.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// Grace period of the leases of a server that was removed from servers.toml.
const LEAVE_GRACE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let inherited = inherited();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { CONFIGURATION } else { 0 });
        }
    };
    let path = arguments.config.clone().unwrap_or_else(config::default_path);
    let config = match Config::load(&path) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("gpusessiond: {error}");
            return ExitCode::from(CONFIGURATION);
        }
    };
    if arguments.check_config {
        println!("{}: {} lease(s) configured", path.display(), config.leases.len());
        return ExitCode::SUCCESS;
    }
    if arguments.write_environment {
        let path = paths::variables_file();
        return match environment::publish(&config, &path) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("gpusessiond: {}: cannot write: {error}", path.display());
                ExitCode::from(INTERNAL)
            }
        };
    }
    let level = log(&config.keys.log_level);
    gpusession_fatal::install("gpusessiond");
    // After a panic in one task the daemon must not run on without it: it exits and systemd
    // restarts it.
    std::panic::set_hook(Box::new(|panic| {
        error!("internal error: {panic}");
        std::process::exit(INTERNAL.into());
    }));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(4).build();
    let ended = runtime.context("cannot start the runtime").and_then(|runtime| {
        let ended = runtime.block_on(daemon(path, config, level, inherited));
        // A thread that waits for a hanging user database does not delay the exit.
        runtime.shutdown_background();
        ended
    });
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            error!("{error:#}");
            ExitCode::from(if error.is::<IdentityError>() { CONFIGURATION } else { INTERNAL })
        }
    }
}

/// Sets the journal level while the daemon runs.
type Level = Box<dyn Fn(&str)>;

/// Returns the filter of `GPUSESSION_LOG`, else of the configuration's level.
fn filter(level: &str) -> tracing_subscriber::EnvFilter {
    let filter =
        std::env::var("GPUSESSION_LOG").unwrap_or_else(|_| format!("{level},h2=warn,hyper=warn,zbus=warn"));
    tracing_subscriber::EnvFilter::new(filter)
}

/// Logs to the journal, with fields, if systemd connected stderr to it; otherwise plain lines to
/// stderr.
fn log(level: &str) -> Level {
    let (filter_layer, handle) = tracing_subscriber::reload::Layer::new(filter(level));
    let registry = tracing_subscriber::registry().with(filter_layer);
    let journal = std::env::var_os("JOURNAL_STREAM").and_then(|_| tracing_journald::layer().ok());
    match journal {
        Some(journal) => {
            registry.with(journal.with_field_prefix(None).with_syslog_identifier("gpusessiond".into())).init()
        }
        None => registry
            .with(
                tracing_subscriber::fmt::layer()
                    .with_writer(std::io::stderr)
                    .with_ansi(false)
                    .with_target(false),
            )
            .init(),
    }
    Box::new(move |level| drop(handle.reload(filter(level))))
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!("systemd: cannot notify it: {error}");
    }
}

/// Descriptors that systemd passed.
#[derive(Default)]
struct Inherited {
    grant: Option<std::os::unix::net::UnixListener>,
    login: Option<std::os::unix::net::UnixListener>,
    /// Descriptors that an earlier daemon of this boot left in systemd's store.
    returned: Returned,
}

/// Collects the descriptors that systemd passed.
///
/// Must run first, while only inherited descriptors are open.
fn inherited() -> Inherited {
    let mut inherited = Inherited::default();
    for (fd, name) in sd_notify::listen_fds_with_names().into_iter().flatten() {
        // SAFETY: the descriptor is only queried, and no other code closes it meanwhile.
        let there = unsafe { BorrowedFd::borrow_raw(fd) };
        if getsockopt(&there, sockopt::AcceptConn) != Ok(true) {
            // SAFETY: systemd passed the descriptor, and no other code in this process uses it.
            inherited.returned.take(&name, unsafe { OwnedFd::from_raw_fd(fd) });
            continue;
        }
        // Both sockets belong to one unit and have its name; their types differ.
        let place = match getsockopt(&there, sockopt::SockType) {
            Ok(SockType::Stream) => &mut inherited.grant,
            Ok(SockType::SeqPacket) => &mut inherited.login,
            _ => continue,
        };
        // SAFETY: it is open (the query succeeded), systemd passed it, and no other code in this
        // process uses it.
        *place = Some(unsafe { OwnedFd::from_raw_fd(fd) }.into());
    }
    inherited
}

/// Returns a listening socket: systemd's, else a new one at `path`.
fn listener(
    inherited: Option<std::os::unix::net::UnixListener>,
    path: &Path,
    bind: impl FnOnce(&Path) -> std::io::Result<(UnixListener, peer::SocketFile)>,
) -> Result<(UnixListener, Option<peer::SocketFile>)> {
    let name = || path.display().to_string();
    if let Some(socket) = inherited {
        socket.set_nonblocking(true).with_context(name)?;
        return Ok((UnixListener::from_std(socket).with_context(name)?, None));
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let (listener, file) = bind(path).with_context(name)?;
    Ok((listener, Some(file)))
}

/// Raises the limit of descriptors: each running program needs a connection and a pidfd.
fn raise_limits() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard.min(65_536), hard);
    }
}

/// Reads the join token from the credential `gpusession.token`, with the servers named next to it.
fn token() -> Option<(String, Vec<String>)> {
    let folder = std::env::var_os("CREDENTIALS_DIRECTORY")?;
    let text = std::fs::read_to_string(PathBuf::from(folder).join("gpusession.token")).ok()?;
    let (mut tokens, servers): (Vec<String>, Vec<String>) =
        text.split_whitespace().map(str::to_owned).partition(|word| word.starts_with("gpsj-"));
    Some((tokens.pop()?, servers))
}

/// Decides who gets variables at future logins, and writes the file for readers other than the
/// login socket.
fn audience(config: &Config) -> Arc<Audience> {
    let audience = Audience::of(config);
    let path = paths::audience_file();
    if let Err(error) = audience.write(&path) {
        warn!("{}: cannot write: {error}; user services do not get [environment]", path.display());
    }
    // Only root changes the variables: a reload over D-Bus changes who gets them, and nothing else.
    let path = paths::variables_file();
    match environment::published(&path) {
        Ok(Some(given)) if given != config.environment => {
            warn!("[environment]: logins keep the old variables; run `systemctl reload gpusession` as root")
        }
        Ok(_) => {}
        Err(error) => warn!("{}: {error}; logins get no variables", path.display()),
    }
    Arc::new(audience)
}

/// Waits for an identity: joins with a token, or waits for `gpusession join`.
async fn identity(home: &Home, config: &Config, engine: &Engine) -> Result<identity::Identity> {
    let mut said = String::new();
    let mut pause = Duration::from_secs(1);
    loop {
        if home.exists() {
            return Ok(home.load()?);
        }
        let trouble = match token() {
            None => "no identity yet: waiting for `gpusession join`".to_owned(),
            Some((token, servers)) => match join(home, config, &token, &servers).await {
                Ok(joined) => {
                    info!("joined the pool as {}, servers: {}", joined.name, joined.servers.join(", "));
                    continue;
                }
                Err(error @ IdentityError::Name(_)) => return Err(error.into()),
                Err(error) => format!("cannot join the pool: {error}"),
            },
        };
        if said != trouble {
            warn!("{trouble}");
            notify(&[NotifyState::Status(&trouble)]);
            engine.notice(&trouble);
            said = trouble;
        }
        if token().is_none() {
            // The user is probably about to run `gpusession join`.
            tokio::time::sleep(Duration::from_secs(2)).await;
            continue;
        }
        tokio::time::sleep(pause.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
        pause = (pause * 2).min(Duration::from_secs(30));
    }
}

/// Asks the known servers in turn to accept this client.
async fn join(
    home: &Home,
    config: &Config,
    token: &str,
    named: &[String],
) -> Result<identity::Joined, IdentityError> {
    let mut last = IdentityError::Pool(PoolError::new(
        Trouble::Unreachable,
        "the token does not say where the pool is: write HOST[:PORT] before it in the credential, or name a server \
         in servers.toml",
    ));
    let mut addresses = Vec::new();
    for address in named {
        addresses.push(control_address(address).map_err(|e| PoolError::new(Trouble::Invalid, e))?);
    }
    addresses.extend(home.addresses()?);
    for address in addresses {
        match identity::join_pool(home, &address, token, config.client.name.as_deref(), client::join).await {
            Ok(joined) => return Ok(joined),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Keeps the status text of `systemctl status` up to date.
async fn follow_status(engine: &Engine) {
    let mut snapshot = engine.snapshot();
    let mut said = String::new();
    loop {
        let text = bus::status_text(&snapshot.borrow_and_update());
        if said != text {
            notify(&[NotifyState::Status(&text)]);
            said = text;
        }
        if snapshot.changed().await.is_err() {
            return;
        }
    }
}

/// Connects to the servers in servers.toml, now and after each reload.
async fn follow_servers(
    home: &Home,
    identity: &identity::Identity,
    engine: &Engine,
    settings: &Settings,
) -> Result<()> {
    let mut reloaded = settings.subscribe();
    // In the lease manager's order; the flag says whether servers.toml still names the server.
    let mut known: Vec<(String, bool)> = Vec::new();
    loop {
        match home.addresses() {
            Ok(addresses) => {
                for (index, (address, named)) in known.iter_mut().enumerate() {
                    let now = addresses.contains(address);
                    if now != *named {
                        info!(
                            "server {address}: {} servers.toml",
                            if now { "again in" } else { "no longer in" }
                        );
                        match now {
                            true => engine.restore(index),
                            false => engine.remove(index, LEAVE_GRACE),
                        }
                        *named = now;
                    }
                }
                let mut remotes: Vec<Arc<dyn PoolServer>> = Vec::new();
                for address in addresses {
                    if !known.iter().any(|(a, _)| *a == address) {
                        remotes.push(Arc::new(Remote::new(&address, identity)?));
                        known.push((address, true));
                    }
                }
                engine.connect(remotes);
                if !known.iter().any(|(_, named)| *named) {
                    engine.notice("servers.toml names no server: add [[server]] address = \"HOST\"");
                }
            }
            Err(error) if known.is_empty() => return Err(error.into()),
            Err(error) => warn!("servers not reloaded: {error}; the present ones stay"),
        }
        if reloaded.changed().await.is_err() {
            return Ok(());
        }
    }
}

/// Returns the period and the action of systemd's watchdog, if it is enabled.
fn watchdog() -> Option<(Duration, Box<dyn FnMut() + Send>)> {
    let interval = sd_notify::watchdog_enabled()?;
    Some((interval / 2, Box::new(|| notify(&[NotifyState::Watchdog]))))
}

/// Returns `true` if systemd restarts the daemon after this stop.
async fn restarting(bus: &zbus::Connection) -> bool {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return false;
    }
    let ask = async {
        let systemd = "org.freedesktop.systemd1";
        let proxy = |path: OwnedObjectPath, interface: &'static str| {
            zbus::proxy::Builder::<zbus::Proxy<'_>>::new(bus)
                .destination(systemd)
                .path(path)
                .interface(interface)
                .cache_properties(zbus::proxy::CacheProperties::No)
                .build()
        };
        let manager = OwnedObjectPath::try_from("/org/freedesktop/systemd1")?;
        let manager = proxy(manager, "org.freedesktop.systemd1.Manager").await?;
        let unit: OwnedObjectPath = manager.call("GetUnitByPID", &(std::process::id(),)).await?;
        let unit = proxy(unit, "org.freedesktop.systemd1.Unit").await?;
        let (_, job): (u32, OwnedObjectPath) = unit.get_property("Job").await?;
        let job = proxy(job, "org.freedesktop.systemd1.Job").await?;
        job.get_property::<String>("JobType").await
    };
    // A long wait: a restart mistaken for a stop would release the leases.
    match tokio::time::timeout(Duration::from_secs(10), ask).await {
        Ok(Ok(kind)) => kind == "restart",
        Ok(Err(error)) => {
            warn!("systemd: cannot ask whether this is a restart: {error}; releasing the leases");
            false
        }
        Err(_) => false,
    }
}

/// Warns the programs that use a lease, waits for their exit for a while, and releases all leases.
async fn stop(engine: &Engine) {
    notify(&[NotifyState::Stopping, NotifyState::Status("giving leases back")]);
    let using = engine.warn(STOP_GRACE, "gpusessiond is stopping").await;
    if using > 0 {
        warn!("stopping: {using} process(es) use leases; waiting {} s for their exit", STOP_GRACE.as_secs());
        let mut snapshot = engine.snapshot();
        let unused = snapshot.wait_for(|s| s.lease_facts().all(|l| l.processes == 0));
        if tokio::time::timeout(STOP_GRACE, unused).await.is_err() {
            for lease in engine.snapshot().borrow().lease_facts().filter(|l| l.processes > 0) {
                warn!(
                    gpusession_lease = lease.id,
                    "lease {}: released while {} process(es) use it: gpusessiond is stopping",
                    lease.id,
                    lease.processes
                );
            }
        }
    }
    info!("stopping: giving leases back");
    engine.shutdown(STOP_TIMEOUT).await;
}

async fn daemon(path: PathBuf, config: Config, level: Level, inherited: Inherited) -> Result<u8> {
    raise_limits();
    let (grants_at, logins_at) = (paths::grant_socket(), paths::login_socket());
    let (grant_listener, _grant_file) =
        listener(inherited.grant, &grants_at, |path| peer::bind(path, 0o666))?;
    let (login_listener, _login_file) = listener(inherited.login, &logins_at, login::bind_at)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let home = Home::system();

    let here = HostFacts::this_machine();
    let mut state = State::new(&paths::state_directory(), paths::hex(&here.boot_id));
    let gate = Arc::new(Gate::new(config.access.clone()));
    let hooks = EngineOptions {
        saved: state.load(),
        save: Box::new(move |saved| state.save(saved)),
        gate: Some(gate.clone()),
        alive: watchdog(),
    };
    let engine = Engine::start_with(here, hooks);
    let leases: Arc<dyn Leases> = Arc::new(engine.clone());
    let settings = Settings::new(path, config.clone(), gate.clone(), leases.clone());
    let sessions = Sessions::restore(leases.clone(), &paths::sessions_directory());
    settings.apply().await;
    tokio::spawn(notice::follow(leases.clone(), paths::notice_directory()));
    let grants = grant::Server::new(
        leases.clone(),
        gate.clone(),
        Duration::from_millis(config.keys.wait_ms),
        Limits::default(),
    )
    .with_sessions(sessions.clone())
    .with_store(Store);
    let grants = Arc::new(grants);
    grants.resume(inherited.returned.processes).await;
    tokio::spawn(grants.clone().serve(grant_listener));
    let logins = login::Server::new(sessions.clone(), gate.clone(), audience(&config), 0);
    tokio::spawn(logins.clone().serve(login_listener));
    let connection =
        zbus::connection::Builder::system().build().await.context("cannot connect to the system bus")?;
    let standing = watch::Sender::new(None);
    let api = bus::Parts {
        leases,
        settings: settings.clone(),
        sessions: Some(sessions),
        store: Some(Store),
        lease_fds: inherited.returned.lease_fds,
        identity: standing.subscribe(),
    };
    let bus = Bus::start(connection, api).await.context(
        "cannot own org.gpusession1 on the bus; if its policy is not loaded: systemctl reload dbus",
    )?;
    notify(&[NotifyState::Ready, NotifyState::Status("starting")]);
    info!("ready; {} lease(s) configured", config.leases.len());

    let reloading = async {
        while hangup.recv().await.is_some() {
            // `reload` has logged the error.
            let _ = settings.reload().await;
        }
    };
    let users = settings.clone();
    tokio::spawn(async move { users.follow_users().await });
    let mut changed = settings.subscribe();
    let following = async {
        while changed.changed().await.is_ok() {
            let config = changed.borrow_and_update().clone();
            level(&config.keys.log_level);
            grants.set_wait(Duration::from_millis(config.keys.wait_ms));
            logins.configure(gate.clone(), audience(&config));
        }
    };
    // Without an identity no lease can be held, but programs and `gpusession status` get the
    // reason.
    let working = async {
        let identity = identity(&home, &config, &engine).await?;
        let clock = Arc::new(renewal::wall);
        let mut renewer = Renewer::new(home.clone(), identity.clone(), clock, standing);
        if renewer.expired() {
            // With this certificate, servers answer nothing but its renewal.
            renewer.renew_if_due().await;
        }
        tokio::spawn(renewer.follow());
        tokio::join!(follow_servers(&home, &identity, &engine, &settings), follow_status(&engine)).0
    };
    let code = tokio::select! {
        result = working => match result {
            Ok(()) => 0,
            Err(error) => return Err(error),
        },
        () = reloading => 0,
        () = following => 0,
        _ = terminate.recv() => 0,
        _ = interrupt.recv() => 0,
    };
    end(bus, &engine, code, (&mut terminate, &mut interrupt)).await
}

/// Gives all leases back, or keeps them for the next daemon; returns the exit status.
async fn end(
    bus: Bus,
    engine: &Engine,
    code: u8,
    (terminate, interrupt): (&mut Signal, &mut Signal),
) -> Result<u8> {
    if restarting(&bus.connection).await {
        notify(&[NotifyState::Stopping, NotifyState::Status("restarting; leases are kept")]);
        info!("stopping for a restart: leases and programs are kept");
        // Exits at once: an orderly end would remove the descriptors from systemd's store.
        std::process::exit(code.into());
    }
    let _ = std::fs::remove_file(paths::audience_file());
    tokio::select! {
        () = stop(engine) => {}
        _ = terminate.recv() => return Ok(FORCED),
        _ = interrupt.recv() => return Ok(FORCED),
    }
    drop(bus);
    Ok(code)
}
