//! `gpusessiond`: holds this machine's GPU leases and grants them to its programs.

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
use gpusessiond::client::Remote;
use gpusessiond::config::{self, Class, Config};
use gpusessiond::grant::{self, Limits};
use gpusessiond::identity::{self, Home, IdentityError};
use gpusessiond::leases::engine::{Engine, Here};
use gpusessiond::leases::{Leases, Spec};
use gpusessiond::login::{self, Sessions};
use gpusessiond::places;
use gpusessiond::pool::{PoolError, PoolServer, Trouble};
use nix::sys::socket::{SockType, getsockopt, sockopt};
use sd_notify::NotifyState;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};
use tracing_subscriber::prelude::*;

/// Exit code of a configuration that cannot be used: the unit does not restart for it.
const CONFIGURATION: u8 = 1;
/// Exit code after a second signal to stop.
const FORCED: u8 = 2;
/// Exit code of anything else.
const INTERNAL: u8 = 3;
/// Leases are given back within this time when the daemon stops.
const STOP_LIMIT: Duration = Duration::from_secs(5);

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
    log(&config.log_level);
    // A part of the daemon that has failed must not leave the rest running without it: systemd starts it anew.
    std::panic::set_hook(Box::new(|panic| {
        error!("internal error: {panic}");
        std::process::exit(INTERNAL.into());
    }));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(4).build();
    match runtime.context("runtime").and_then(|runtime| runtime.block_on(daemon(config, inherited))) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            error!("{error:#}");
            ExitCode::from(if error.is::<IdentityError>() { CONFIGURATION } else { INTERNAL })
        }
    }
}

/// To the journal with its fields where systemd connected us to it, else plain lines to stderr.
fn log(level: &str) {
    let filter =
        std::env::var("GPUSESSION_LOG").unwrap_or_else(|_| format!("{level},h2=warn,hyper=warn,zbus=warn"));
    let filter = tracing_subscriber::EnvFilter::new(filter);
    let registry = tracing_subscriber::registry().with(filter);
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
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!("systemd is not told: {error}");
    }
}

/// Listening sockets that systemd handed over.
#[derive(Default)]
struct Inherited {
    grant: Option<std::os::unix::net::UnixListener>,
    login: Option<std::os::unix::net::UnixListener>,
}

/// Looks at what systemd handed over. Called first of all, while only inherited descriptors are open.
fn inherited() -> Inherited {
    let mut inherited = Inherited::default();
    for (fd, _name) in sd_notify::listen_fds_with_names().into_iter().flatten() {
        // SAFETY: the descriptor is only looked at, and nothing closes it meanwhile.
        let there = unsafe { BorrowedFd::borrow_raw(fd) };
        if getsockopt(&there, sockopt::AcceptConn) != Ok(true) {
            continue;
        }
        // Both sockets are of one unit, and have its name: their types tell them apart.
        let place = match getsockopt(&there, sockopt::SockType) {
            Ok(SockType::Stream) => &mut inherited.grant,
            Ok(SockType::SeqPacket) => &mut inherited.login,
            _ => continue,
        };
        // SAFETY: it is open (it has just answered), was passed to us, and nobody else in this process uses it.
        *place = Some(unsafe { OwnedFd::from_raw_fd(fd) }.into());
    }
    inherited
}

/// A listening socket: systemd's, else our own at `path`.
fn listener(
    inherited: Option<std::os::unix::net::UnixListener>,
    path: &Path,
    bind: impl FnOnce(&Path) -> std::io::Result<(UnixListener, grant::SocketFile)>,
) -> Result<(UnixListener, Option<grant::SocketFile>)> {
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

/// Running programs each hold a connection and a pidfd: more than the usual 1024 descriptors.
fn raise_limits() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard.min(65_536), hard);
    }
}

/// The join token that was handed to this machine, if there is one.
fn token() -> Option<String> {
    let folder = std::env::var_os("CREDENTIALS_DIRECTORY")?;
    let text = std::fs::read_to_string(PathBuf::from(folder).join("gpusession.token")).ok()?;
    Some(text.trim().to_owned()).filter(|t| !t.is_empty())
}

/// Waits until this machine has an identity: joins with a token, or until `gpusession join` has made one.
async fn identity(home: &Home, config: &Config, engine: &Engine) -> Result<identity::Identity> {
    let mut said = String::new();
    let mut pause = Duration::from_secs(1);
    loop {
        if home.exists() {
            return Ok(home.load()?);
        }
        let trouble = match token() {
            None => "no identity yet: waiting for `gpusession join`".to_owned(),
            Some(token) => match join(home, config, &token).await {
                Ok(joined) => {
                    info!("joined the pool as {}, servers: {}", joined.name, joined.servers.join(", "));
                    continue;
                }
                Err(error @ IdentityError::Name(_)) => return Err(error.into()),
                Err(error) => format!("joining: {error}"),
            },
        };
        if said != trouble {
            warn!("{trouble}");
            notify(&[NotifyState::Status(&trouble)]);
            engine.notice(&trouble);
            said = trouble;
        }
        if token().is_none() {
            // Somebody is about to type it.
            tokio::time::sleep(Duration::from_secs(2)).await;
            continue;
        }
        tokio::time::sleep(pause.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
        pause = (pause * 2).min(Duration::from_secs(30));
    }
}

/// Asks each known server to take this machine in.
async fn join(home: &Home, config: &Config, token: &str) -> Result<identity::Joined, IdentityError> {
    let mut last = IdentityError::Pool(PoolError::new(
        Trouble::Unreachable,
        "no server is named in servers.toml: the token alone does not say where the pool is",
    ));
    for address in home.addresses()? {
        match identity::join_pool(home, &address, token, config.client_name.as_deref()).await {
            Ok(joined) => return Ok(joined),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Keeps the line that `systemctl status` shows up to date.
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

async fn daemon(config: Config, inherited: Inherited) -> Result<u8> {
    raise_limits();
    let (grants_at, logins_at) = (places::grant_socket(), places::login_socket());
    let (grant_listener, _grant_file) =
        listener(inherited.grant, &grants_at, |path| grant::bind(path, 0o666))?;
    let (login_listener, _login_file) = listener(inherited.login, &logins_at, login::bind_at)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            warn!("the configuration is not read anew while running: restart the daemon for that");
        }
    });
    let home = Home::system();

    let gate = Arc::new(Gate::new(config.access.clone()));
    let engine = Engine::start(Here::this_machine());
    for (order, lease) in (0..).zip(&config.leases) {
        if lease.class != Class::Boot {
            warn!(
                "lease {}: class \"{}\" is not served yet, only \"boot\": it is left out",
                lease.name, lease.class
            );
            continue;
        }
        if lease.hold || lease.on_idle.is_some() {
            warn!("lease {}: hold and on_idle have no effect yet: nothing is parked or lent", lease.name);
        }
        let mut spec = Spec::configured(lease, order);
        if let Some(name) = lease.for_user.clone() {
            let user = tokio::task::spawn_blocking(move || nix::unistd::User::from_name(&name)).await?;
            spec.uid = user.ok().flatten().map(|u| u.uid.as_raw());
            if spec.uid.is_none() {
                warn!("lease {}: there is no user {}", lease.name, spec.user);
            }
        }
        engine.want(spec).await;
    }
    let leases: Arc<dyn Leases> = Arc::new(engine.clone());
    let grants = grant::Server::new(leases.clone(), gate.clone(), config.wait, Limits::default());
    tokio::spawn(Arc::new(grants).serve(grant_listener));
    let sessions = Sessions::restore(leases.clone(), &places::sessions_directory());
    tokio::spawn(login::Server::new(sessions, gate.clone(), &config, 0).serve(login_listener));
    let connection = zbus::connection::Builder::system().build().await.context("system bus")?;
    let bus = Bus::start(connection, leases, gate, config.clone()).await.context("org.gpusession1")?;
    notify(&[NotifyState::Ready, NotifyState::Status("starting")]);
    info!("ready; {} lease(s) configured", config.leases.len());

    // Without an identity there is nothing to hold yet, but programs and `gpusession status` hear why.
    let working = async {
        let identity = identity(&home, &config, &engine).await?;
        let mut remotes: Vec<Arc<dyn PoolServer>> = Vec::new();
        for address in home.addresses()? {
            remotes.push(Arc::new(Remote::new(&address, &identity)?));
        }
        if remotes.is_empty() {
            engine.notice("no server is named in servers.toml");
        }
        engine.connect(remotes);
        follow_status(&engine).await;
        anyhow::Ok(())
    };
    let code = tokio::select! {
        result = working => match result {
            Ok(()) => 0,
            Err(error) => return Err(error),
        },
        _ = terminate.recv() => 0,
        _ = interrupt.recv() => 0,
    };
    notify(&[NotifyState::Stopping, NotifyState::Status("giving leases back")]);
    info!("stopping: giving leases back");
    tokio::select! {
        () = engine.shutdown(STOP_LIMIT) => {}
        _ = terminate.recv() => return Ok(FORCED),
        _ = interrupt.recv() => return Ok(FORCED),
    }
    drop(bus);
    Ok(code)
}
