//! The command line.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand};
use serde_json::{Value, json};

use crate::accounting::{self, Accounting, Kind, Wanted};
use crate::admin::{self, Ask, Refusal};
use crate::clock::{Clock, SystemClock, SystemRandom};
use crate::config::{self, Config, ConfigError, Surroundings};
use crate::discovery::find_driver;
use crate::net::host_port;
use crate::pool::Files;
use crate::pool::administrators::Administrators;
use crate::pool::authority::Authority;
use crate::pool::clients::Clients;
use crate::pool::tokens::Tokens;
use crate::store::{self, StoreError};

mod remote;
pub mod show;

use remote::Remote;

/// Leases this host's GPUs to other machines
///
/// `gpuserver serve` is the server. Every other verb asks the running server with the same
/// configuration or, with --server, a server over the network.
#[derive(Debug, Parser)]
#[command(name = "gpuserver", version, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    /// Configuration file
    #[arg(short, long, global = true, env = "GPUSERVER_CONF", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Send the request to this server over the network, as an administrator of its pool
    #[arg(long, global = true, value_name = "HOST[:PORT]")]
    pub server: Option<String>,
    /// File from `gpuserver admin create`, instead of ~/.config/gpusession/admin.pem
    #[arg(long, global = true, env = "GPUSERVER_IDENTITY", value_name = "FILE")]
    pub identity: Option<PathBuf>,
    /// Verb to run
    #[command(subcommand)]
    pub verb: Verb,
}

/// A verb of `gpuserver`.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the server in the foreground
    ///
    /// Exit status: 0 stopped; 1 bad command line or configuration; 2 forced to quit; 3 internal
    /// error. systemd does not start the server again after 1 and 2. SIGSEGV, SIGBUS, SIGILL,
    /// SIGFPE and SIGABRT are reported on standard error, and end the server as that signal.
    Serve,
    /// Check the configuration, and show its effective values
    CheckConfig {
        /// Explain every key
        #[arg(long)]
        explain: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Create, export or import the pool's certificate authority
    Pool {
        /// Verb for the pool
        #[command(subcommand)]
        verb: PoolVerb,
    },
    /// Let new clients join: create, list and revoke tokens
    Token {
        /// Verb for tokens
        #[command(subcommand)]
        verb: TokenVerb,
    },
    /// Let administrators use the server over the network: create, list and revoke certificates
    Admin {
        /// Verb for administrators
        #[command(subcommand)]
        verb: AdminVerb,
    },
    /// List the clients of the pool, revoke one, or forget one
    Clients {
        /// Verb for clients
        #[command(subcommand)]
        verb: Option<ClientsVerb>,
        /// Print JSON
        #[arg(long, global = true)]
        json: bool,
    },
    /// Show the server's addresses, driver and numbers
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List workers: one for each client process, and the warm ones
    Ps {
        /// Include all servers of this host: gpuserver.toml and gpuserver-NAME.toml in one folder
        #[arg(long)]
        all: bool,
        /// Show the threads of the workers' processes
        #[arg(long)]
        threads: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List leases
    Leases {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List GPUs and how much of each is leased
    Gpus {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Move the device memory of an idle lease's programs to host memory, and lend its GPUs
    Park {
        /// Lease id or its start
        lease: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Reacquire the GPUs of a parked or lent lease; its programs' next calls do so, too
    Unpark {
        /// Lease id or its start
        lease: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show workers at intervals, the busiest first
    Top {
        /// Time between two updates
        #[arg(long, value_name = "TIME", default_value = "2s")]
        every: String,
        /// Number of updates; 0: no bound
        #[arg(short = 'n', long, value_name = "N", default_value_t = 0)]
        times: u32,
        /// Print JSON, one line for each update
        #[arg(long)]
        json: bool,
    },
    /// List MPS domains: states, servers, clients, faults
    Mps {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List requests that wait for GPUs
    Queue {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Withdraw a GPU: no new leases on it; present leases stay until they end
    Off {
        /// Index, UUID, or start of the UUID
        gpu: String,
        /// Reason, which clients see
        #[arg(long, value_name = "TEXT", default_value = "an administrator withdrew it")]
        #[arg(long, value_name = "TEXT", default_value = "an administrator took it out")]
        reason: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Return a GPU to service that was off, dropped or broken
    On {
        /// Index, UUID, or start of the UUID
        gpu: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove a GPU from the pool; refused while it is leased
    Drop {
        /// Index, UUID, or start of the UUID
        gpu: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Stop new leases; present leases and their programs continue
    Drain {
        /// Allow new leases again
        #[arg(long)]
        end: bool,
        /// Reason, which clients see
        #[arg(long, value_name = "TEXT", default_value = "it is drained")]
        reason: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Stop the server: refuse new leases, wait for programs (drain_timeout), stop the workers
    Stop {
        /// Stop at once, without waiting for programs
        #[arg(long)]
        force: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the limits that apply to a client and a user, and where they are set
    Limits {
        /// Name of the client; without it, the limits for everybody
        #[arg(default_value = "")]
        client: String,
        /// Name of the user on whose behalf the client asks
        #[arg(long, value_name = "NAME", default_value = "")]
        user: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the accounting records: ended leases and programs
    Accounting {
        /// Earliest end: a time ago, as "24h", or a day, as 2026-11-21 (UTC)
        #[arg(long, value_name = "TIME", default_value = "24h")]
        since: String,
        /// Only records with an earlier end than this, in the same form
        #[arg(long, value_name = "TIME")]
        until: Option<String>,
        /// Only records of this client
        #[arg(long, value_name = "NAME", default_value = "")]
        client: String,
        /// Only records of this user (name or id), and leases with programs of this user
        #[arg(long, value_name = "NAME|UID", default_value = "")]
        user: String,
        /// Only leases, or only programs
        #[arg(long, value_name = "KIND", value_parser = ["lease", "process"])]
        kind: Option<String>,
        /// Print comma-separated values
        #[arg(long, conflicts_with = "json")]
        csv: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show or change the configuration of the running server
    Config {
        /// Verb for the configuration
        #[command(subcommand)]
        verb: ConfigVerb,
        /// Print JSON
        #[arg(long, global = true)]
        json: bool,
    },
    /// Kill a worker, or end a lease with all its workers; programs see their GPUs fail
    Kill {
        /// Worker id or its start, or a whole lease id
        #[arg(value_name = "WORKER|LEASE")]
        worker: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// A verb of `gpuserver config`.
#[derive(Debug, Subcommand)]
pub enum ConfigVerb {
    /// Print keys and their values
    Get {
        /// Key or its start; without it, all keys
        #[arg(default_value = "")]
        key: String,
        /// Also print the source of each value
        #[arg(long)]
        origin: bool,
    },
    /// Change a key now, and store the change in gpuserver.d/90-runtime.toml
    Set {
        /// Name of the key
        key: String,
        /// New value
        value: String,
    },
    /// Remove a change that `set` has stored
    Unset {
        /// Name of the key
        key: String,
    },
    /// Print the keys that the configuration sets, and values that wait for a restart
    Diff {
        /// Also print the source of each value
        #[arg(long)]
        origin: bool,
    },
    /// Read the configuration files again, as SIGHUP does
    Reload,
}

/// A verb of `gpuserver pool`.
#[derive(Debug, Subcommand)]
pub enum PoolVerb {
    /// Create the pool's certificate authority in the state directory
    Init {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the authority with its secret key, for `pool import` on another server of the pool
    Export,
    /// Import the authority of a pool from the output of `pool export`
    Import {
        /// File with that output; - for standard input
        file: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// A verb of `gpuserver token`.
#[derive(Debug, Subcommand)]
pub enum TokenVerb {
    /// Create a token with which new clients join, and print it once
    Create {
        /// Pattern of the clients' names, as in "vm-*"
        #[arg(long, value_name = "PATTERN", default_value = "*")]
        name: String,
        /// Number of clients that can join with it
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        uses: u32,
        /// Lifetime of the token
        #[arg(long, value_name = "TIME", default_value = "24h")]
        ttl: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List the tokens, without their secrets, which the server does not keep
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Revoke a token; clients that joined with it stay
    Revoke {
        /// Token id or its start
        id: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// A verb of `gpuserver admin`.
#[derive(Debug, Subcommand)]
pub enum AdminVerb {
    /// Create an administrator's certificate, valid for a year, with root's rights on this server
    Create {
        /// Name of the administrator
        name: String,
        /// File to write, which must not exist
        #[arg(short, long, value_name = "FILE", default_value = "admin.pem")]
        out: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List the administrators that this server knows
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Revoke all certificates of a name so far, on this server only; repeat it on each server
    Revoke {
        /// Name of the administrator
        name: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// A verb of `gpuserver clients`.
#[derive(Debug, Subcommand)]
pub enum ClientsVerb {
    /// Revoke a client: refuse its calls, and end its leases
    Revoke {
        /// Name of the client
        name: String,
    },
    /// Forget a client, so that a machine can join under its name again
    Forget {
        /// Name of the client
        name: String,
    },
}

/// Returns the configuration file, and whether it must exist.
pub fn config_file(cli: &Cli) -> (PathBuf, bool) {
    match &cli.config {
        Some(path) => (path.clone(), true),
        None => (config::DEFAULT_FILE.into(), false),
    }
}

/// Reads the configuration that the command line names.
pub fn load_config(cli: &Cli) -> Result<Config, ConfigError> {
    let (file, required) = config_file(cli);
    // Messages name the file, and a reader may be in another working directory.
    let file = std::path::absolute(&file).unwrap_or(file);
    read_config(&file, required)
}

/// Reads the configuration in `file`.
pub fn read_config(file: &Path, required: bool) -> Result<Config, ConfigError> {
    let host_name = nix::unistd::gethostname().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let ephemeral = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok().and_then(|text| {
        let (low, high) = text.trim().split_once(char::is_whitespace)?;
        Some((low.parse().ok()?, high.trim().parse().ok()?))
    });
    let env = |name: &str| std::env::var(name).ok();
    let nvidia_driver = Path::new("/sys/module/nvidia").exists();
    config::load(file, required, &Surroundings { env: &env, host_name, ephemeral, nvidia_driver })
}

/// The server that a verb addresses, and the configuration with which it would start.
struct Target {
    socket: PathBuf,
    config: Result<Config, ConfigError>,
    remote: Option<Remote>,
}

impl Target {
    /// Finds the server that the command line names.
    ///
    /// A running server is found even if its configuration files are bad now.
    fn of(cli: &Cli) -> anyhow::Result<Self> {
        let remote = cli.server.as_deref().map(|server| Remote::new(server, cli.identity.as_deref()));
        let remote = remote.transpose()?;
        let here = Self::here(&config_file(cli).0, load_config(cli));
        Ok(Self { remote, ..here })
    }

    /// Finds the server of this host whose configuration is in `file`.
    fn here(file: &Path, config: Result<Config, ConfigError>) -> Self {
        let socket = match &config {
            Ok(config) => config.admin_socket(),
            Err(_) => config::admin_socket_beside(file, &|name| std::env::var(name).ok()),
        };
        Self { socket, config, remote: None }
    }

    /// Lists the servers whose configurations are in the same folder.
    fn beside(cli: &Cli) -> Vec<Self> {
        let file = config_file(cli).0;
        let file = std::path::absolute(&file).unwrap_or(file);
        let folder = file.parent().and_then(|f| std::fs::read_dir(f).ok()).into_iter().flatten().flatten();
        let is_one = |path: &Path| {
            let name = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_suffix(".toml"));
            name.is_some_and(|n| n == "gpuserver" || n.starts_with("gpuserver-"))
        };
        // The server of the default instance may run without a file.
        let unnamed = file.with_file_name("gpuserver.toml");
        let files: BTreeSet<PathBuf> =
            folder.map(|e| e.path()).filter(|p| is_one(p)).chain([file.clone(), unnamed]).collect();
        files
            .into_iter()
            .map(|f| Self::here(&f, read_config(&f, f == file && cli.config.is_some())))
            .collect()
    }

    fn config(&self) -> Result<&Config, ConfigError> {
        self.config.as_ref().map_err(Clone::clone)
    }
}

/// `gpuserver ps`
fn ps(
    out: &mut dyn Write,
    cli: &Cli,
    server: &Target,
    all: bool,
    threads: bool,
    json: bool,
) -> anyhow::Result<()> {
    let ask = if threads { Ask::Threads } else { Ask::Ps };
    let mut rows = Vec::new();
    if all {
        if server.remote.is_some() {
            return Err(admin::local_only("--all asks the servers of this host").into());
        }
        let mut answered = false;
        for server in Target::beside(cli) {
            match running(&server, &ask) {
                Ok(Some(value)) => {
                    answered = true;
                    rows.extend(serde_json::from_value::<Vec<admin::PsRow>>(value)?);
                }
                Ok(None) => {}
                Err(e) => eprintln!("gpuserver: {}: {e:#}", server.socket.display()),
            }
        }
        if !answered {
            must_run(server, &ask)?;
        }
    } else {
        rows = serde_json::from_value(must_run(server, &ask)?)?;
    }
    if json {
        show::json(out, "workers", serde_json::to_value(rows)?)
    } else if threads {
        show::threads(out, rows, all)
    } else {
        show::ps(out, rows, all)
    }
}

/// Returns why a verb is refused with `--server`, if it asks no running server.
///
/// For the other verbs [`Ask::local`] decides.
fn local(verb: &Verb) -> Option<&'static str> {
    match verb {
        Verb::Serve => Some("a server is started on its own host"),
        Verb::CheckConfig { .. } => {
            Some("a configuration is checked on its own host, whose driver and folders it names")
        }
        Verb::Pool { .. } => Some("a pool's authority is kept on its servers' own disks"),
        _ => None,
    }
}

/// Runs a verb that is not `serve`.
pub fn run(cli: &Cli) -> anyhow::Result<()> {
    if cli.server.is_some()
        && let Some(why) = local(&cli.verb)
    {
        return Err(admin::local_only(why).into());
    }
    let server = Target::of(cli)?;
    let out = &mut std::io::stdout().lock();
    match &cli.verb {
        Verb::Serve => anyhow::bail!("internal error: serve is not a verb of this function"),
        Verb::CheckConfig { explain, json } => check_config(out, cli, server.config()?, *explain, *json),
        Verb::Pool { verb } => pool(out, server.config()?, verb),
        Verb::Token { verb } => token(out, &server, verb),
        Verb::Admin { verb } => administrators(out, &server, verb),
        Verb::Clients { verb, json } => clients(out, &server, verb.as_ref(), *json),
        Verb::Status { json } => {
            let value = must_run(&server, &Ask::Status)?;
            if *json {
                show::json(out, "server", value)
            } else {
                show::status(out, &serde_json::from_value(value)?)
            }
        }
        Verb::Ps { all, threads, json } => ps(out, cli, &server, *all, *threads, *json),
        Verb::Leases { json } => {
            let value = must_run(&server, &Ask::Leases)?;
            if *json {
                show::json(out, "leases", value)
            } else {
                show::leases(out, serde_json::from_value(value)?)
            }
        }
        Verb::Gpus { json } => {
            let value = must_run(&server, &Ask::Gpus)?;
            if *json {
                show::json(out, "gpus", value)
            } else {
                show::gpus(out, serde_json::from_value(value)?)
            }
        }
        Verb::Park { lease, json } => parked(out, &server, &Ask::Park { lease: lease.clone() }, *json),
        Verb::Unpark { lease, json } => parked(out, &server, &Ask::Unpark { lease: lease.clone() }, *json),
        Verb::Top { every, times, json } => top(out, &server, every, *times, *json),
        Verb::Mps { json } => {
            let value = must_run(&server, &Ask::Mps)?;
            if *json {
                show::json(out, "domains", value)
            } else {
                show::mps(out, serde_json::from_value(value)?)
            }
        }
        Verb::Queue { json } => {
            let value = must_run(&server, &Ask::Queue)?;
            if *json {
                show::json(out, "queue", value)
            } else {
                show::queue(out, serde_json::from_value(value)?)
            }
        }
        Verb::Off { gpu, reason, json } => {
            let ask = Ask::Off { gpu: gpu.clone(), reason: reason.clone() };
            gpu_changed(out, must_run(&server, &ask)?, *json)
        }
        Verb::On { gpu, json } => gpu_changed(out, must_run(&server, &Ask::On { gpu: gpu.clone() })?, *json),
        Verb::Drop { gpu, json } => {
            gpu_changed(out, must_run(&server, &Ask::Drop { gpu: gpu.clone() })?, *json)?;
            if !*json {
                writeln!(out, "`gpuserver on {gpu}` returns it to service")?;
            }
            Ok(())
        }
        Verb::Drain { end, reason, json } => {
            let value = must_run(&server, &Ask::Drain { end: *end, reason: reason.clone() })?;
            if *json {
                return show::json(out, "drain", value);
            }
            let programs: Vec<String> = serde_json::from_value(value["programs"].clone())?;
            match *end {
                true => writeln!(out, "new leases are allowed again")?,
                false => writeln!(
                    out,
                    "no new leases, also after a restart, until `gpuserver drain --end`; {} leases stay",
                    value["leases"]
                )?,
            }
            for program in programs.iter().filter(|_| !*end) {
                writeln!(out, "  still running: {program}")?;
            }
            Ok(())
        }
        Verb::Stop { force, json } => stop(out, &server, *force, *json),
        Verb::Limits { client, user, json } => {
            let ask = Ask::Limits { client: client.clone(), user: user.clone() };
            let value = must_run(&server, &ask)?;
            if *json {
                show::json(out, "limits", value)
            } else {
                show::limits(out, serde_json::from_value(value)?)?;
                if !user.is_empty() {
                    writeln!(
                        out,
                        "limits of {user} apply to {user}'s own leases; on a lease for all users of a machine, workers, connections \
                         and host_memory apply to {user}'s programs"
                    )?;
                }
                Ok(())
            }
        }
        Verb::Accounting { since, until, client, user, kind, csv, json } => {
            let time = |text: &str| {
                past(text, SystemClock.unix()).ok_or_else(|| {
                    Refusal::new("usage", format!("{text:?}: a time like \"24h\" or 2026-11-21 is wanted"))
                })
            };
            let wanted = Wanted {
                since_unix: time(since)?,
                until_unix: until.as_deref().map(time).transpose()?.unwrap_or(0),
                client: client.clone(),
                user: user.clone(),
                kind: kind.as_deref().map(|k| if k == "lease" { Kind::Lease } else { Kind::Process }),
            };
            let value = match running(&server, &Ask::Accounting { wanted: wanted.clone() })? {
                Some(value) => value,
                None => {
                    let config = server.config()?;
                    let _lock = offline(config)?;
                    serde_json::to_value(Accounting::open(&config.state_dir)?.list(&wanted)?)?
                }
            };
            if *json {
                return show::json(out, "records", value);
            }
            let records: Vec<accounting::Record> = serde_json::from_value(value)?;
            if *csv {
                write!(out, "{}", accounting::csv(&records))?;
                return Ok(());
            }
            show::accounting(out, records)
        }
        Verb::Config { verb, json } => configure(out, &server, verb, *json),
        Verb::Kill { worker, json } => {
            let value = must_run(&server, &Ask::Kill { worker: worker.clone() })?;
            if *json {
                return show::json(out, "killed", value);
            }
            match value["lease"].as_str() {
                Some(lease) => writeln!(
                    out,
                    "lease {lease} ended; if its client has it configured, the client requests it again"
                )?,
                None => writeln!(out, "worker {} is stopping", value["worker"].as_str().unwrap_or_default())?,
            }
            Ok(())
        }
    }
}

fn parked(out: &mut dyn Write, server: &Target, ask: &Ask, json: bool) -> anyhow::Result<()> {
    let value = must_run(server, ask)?;
    if json {
        return show::json(out, "lease", value);
    }
    let (lease, state) =
        (value["lease"].as_str().unwrap_or_default(), value["state"].as_str().unwrap_or_default());
    match value["position"].as_u64() {
        Some(place) if place > 0 => writeln!(out, "lease {lease} is {state}, place {place} in the queue")?,
        _ => writeln!(out, "lease {lease} is {state}")?,
    }
    Ok(())
}

/// Parses a time in the past, in seconds since 1970: a duration before `now`, or a day.
fn past(text: &str, now: u64) -> Option<u64> {
    if let Some(ago) = config::parse_duration(text) {
        return Some(now.saturating_sub(ago.as_secs()));
    }
    let mut parts = text.split('-');
    let (year, month, day) = (parts.next()?, parts.next()?, parts.next()?);
    let month = time::Month::try_from(month.parse::<u8>().ok()?).ok()?;
    let date = time::Date::from_calendar_date(year.parse().ok()?, month, day.parse().ok()?).ok()?;
    parts.next().is_none().then(|| u64::try_from(date.midnight().assume_utc().unix_timestamp()).ok())?
}

fn gpu_changed(out: &mut dyn Write, value: Value, json: bool) -> anyhow::Result<()> {
    if json {
        return show::json(out, "gpu", value);
    }
    let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
    writeln!(out, "GPU {} is {}", text(&value["uuid"]), text(&value["state"]))?;
    for lease in value["leases"].as_array().into_iter().flatten() {
        writeln!(out, "  lease {} stays on it until it ends", text(lease))?;
    }
    Ok(())
}

fn top(out: &mut dyn Write, server: &Target, every: &str, times: u32, json: bool) -> anyhow::Result<()> {
    let every = config::parse_duration(every)
        .filter(|d| !d.is_zero())
        .ok_or_else(|| Refusal::new("usage", format!("--every {every}: a duration like \"2s\" is wanted")))?;
    let mut before = show::Seen::new();
    for look in 1.. {
        let rows: Vec<admin::PsRow> = serde_json::from_value(must_run(server, &Ask::Ps)?)?;
        let seen = show::seen(&rows);
        let rows = show::busiest(rows, &before, every.as_secs_f64());
        if json {
            writeln!(out, "{}", json!({ "schema": 1, "top": rows }))?;
        } else {
            if std::io::IsTerminal::is_terminal(&std::io::stdout()) {
                write!(out, "\x1b[H\x1b[2J")?;
            }
            show::top(out, rows)?;
        }
        out.flush()?;
        before = seen;
        if look == times {
            break;
        }
        std::thread::sleep(every);
    }
    Ok(())
}

fn configure(out: &mut dyn Write, server: &Target, verb: &ConfigVerb, json: bool) -> anyhow::Result<()> {
    let ask = match verb {
        ConfigVerb::Get { .. } | ConfigVerb::Diff { .. } => {
            // Without a server: the configuration with which it would start.
            let value = match running(server, &Ask::Config)? {
                Some(value) => value,
                None => serde_json::to_value(admin::config_rows(server.config()?))?,
            };
            let mut rows: Vec<admin::ConfigRow> = serde_json::from_value(value)?;
            let origin = match verb {
                ConfigVerb::Get { key, origin } => {
                    rows.retain(|r| r.key.starts_with(key.as_str()));
                    if rows.is_empty() {
                        return Err(Refusal::new("no-such-key", format!("no key starts with {key:?}")).into());
                    }
                    *origin
                }
                ConfigVerb::Diff { origin } => {
                    rows.retain(|r| r.changed);
                    *origin
                }
                _ => false,
            };
            return if json {
                show::json(out, "config", serde_json::to_value(rows)?)
            } else {
                show::config(out, rows, origin)
            };
        }
        ConfigVerb::Set { key, value } => Ask::ConfigSet { key: key.clone(), value: Some(value.clone()) },
        ConfigVerb::Unset { key } => Ask::ConfigSet { key: key.clone(), value: None },
        ConfigVerb::Reload => Ask::Reload,
    };
    let value = must_run(server, &ask)?;
    if json {
        return show::json(out, "config", value);
    }
    let mut nothing = true;
    for (list, note) in [("changed", ""), ("after_restart", " (after a restart)")] {
        for line in value[list].as_array().into_iter().flatten() {
            writeln!(out, "{}{note}", line.as_str().unwrap_or_default())?;
            nothing = false;
        }
    }
    if nothing {
        writeln!(out, "nothing changed")?;
    }
    Ok(())
}

/// Returns the address at which clients reach this server.
fn address(config: &Config) -> String {
    match config.advertise.first() {
        Some(a) => host_port(&a.host, a.port.unwrap_or(config.listen.port())),
        None if config.listen.ip().is_unspecified() => {
            let host = nix::unistd::gethostname().map(|n| n.to_string_lossy().into_owned());
            host_port(&host.unwrap_or_else(|_| "HOST".into()), config.listen.port())
        }
        None => config.listen.to_string(),
    }
}

/// Returns `true` with `--json`, which errors obey as well.
pub fn wants_json(cli: &Cli) -> bool {
    match &cli.verb {
        Verb::Serve | Verb::Pool { verb: PoolVerb::Export } => false,
        Verb::CheckConfig { json, .. }
        | Verb::Pool { verb: PoolVerb::Init { json } | PoolVerb::Import { json, .. } }
        | Verb::Token {
            verb: TokenVerb::Create { json, .. } | TokenVerb::List { json } | TokenVerb::Revoke { json, .. },
        }
        | Verb::Admin {
            verb: AdminVerb::Create { json, .. } | AdminVerb::List { json } | AdminVerb::Revoke { json, .. },
        }
        | Verb::Clients { json, .. }
        | Verb::Status { json }
        | Verb::Ps { json, .. }
        | Verb::Top { json, .. }
        | Verb::Leases { json }
        | Verb::Gpus { json }
        | Verb::Park { json, .. }
        | Verb::Unpark { json, .. }
        | Verb::Mps { json }
        | Verb::Queue { json }
        | Verb::Off { json, .. }
        | Verb::On { json, .. }
        | Verb::Drop { json, .. }
        | Verb::Drain { json, .. }
        | Verb::Stop { json, .. }
        | Verb::Limits { json, .. }
        | Verb::Config { json, .. }
        | Verb::Accounting { json, .. }
        | Verb::Kill { json, .. } => *json,
    }
}

/// Sends a request to the running server; `None` if none runs.
fn running(server: &Target, ask: &Ask) -> anyhow::Result<Option<Value>> {
    if let Some(remote) = &server.remote {
        return remote.ask(ask).map(Some);
    }
    let path = &server.socket;
    match admin::ask(path, ask) {
        Ok(answer) => {
            if let Err(e) = &server.config {
                static TOLD: std::sync::Once = std::sync::Once::new();
                TOLD.call_once(|| {
                    eprintln!("gpuserver: note: {e}; the server continues with its earlier configuration, and would not start again");
                });
            }
            Ok(Some(answer?))
        }
        Err(e)
            if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused) =>
        {
            Ok(None)
        }
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => Err(Refusal {
            code: "not-allowed".into(),
            message: format!("{}: {e}", path.display()),
            hint: "run gpuserver as root or as a member of the group gpuserver".into(),
        }
        .into()),
        Err(e) => Err(e).with_context(|| path.display().to_string()),
    }
}

fn must_run(server: &Target, ask: &Ask) -> anyhow::Result<Value> {
    if let Some(value) = running(server, ask)? {
        return Ok(value);
    }
    server.config()?;
    Err(Refusal {
        code: "not-running".into(),
        message: format!("no gpuserver answers at {}", server.socket.display()),
        hint: "start it with `systemctl start gpuserver`, or name its configuration with -c".into(),
    }
    .into())
}

/// Stops the server, prints the programs that it waits for, and returns when it has exited.
fn stop(out: &mut dyn Write, server: &Target, force: bool, json: bool) -> anyhow::Result<()> {
    const POLL_INTERVAL: Duration = Duration::from_millis(100);
    /// Time for stopping workers, after the server has waited for programs.
    const STOP_TIMEOUT: Duration = Duration::from_secs(30);
    let begun: admin::StopView = serde_json::from_value(must_run(server, &Ask::Stop { force })?)?;
    // A zombie counts as exited.
    let runs = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", begun.pid)).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
    };
    let end = std::time::Instant::now() + Duration::from_micros(begun.wait_usec) + STOP_TIMEOUT;
    let mut told = Vec::new();
    while runs() {
        let left = end.saturating_duration_since(std::time::Instant::now());
        if left.is_zero() {
            return Err(Refusal {
                code: "failed".into(),
                message: format!("the server (pid {}) is still running", begun.pid),
                hint: "see its journal; `gpuserver stop --force` stops it without waiting".into(),
            }
            .into());
        }
        // The server stops listening before it exits.
        let programs = match admin::ask(&server.socket, &Ask::Status) {
            Ok(Ok(status)) => serde_json::from_value::<admin::StatusView>(status)?.programs,
            _ => Vec::new(),
        };
        if programs != told && !programs.is_empty() && !json {
            let left = left.saturating_sub(STOP_TIMEOUT).as_secs();
            writeln!(out, "waiting up to {left} s for {}", programs.join(", "))?;
            out.flush()?;
        }
        told = programs;
        std::thread::sleep(POLL_INTERVAL);
    }
    if json {
        return show::json(out, "stopped", serde_json::to_value(begun)?);
    }
    writeln!(out, "stopped")?;
    Ok(())
}

/// Locks the state directory, whose files a running server would overwrite.
fn offline(config: &Config) -> anyhow::Result<store::Lock> {
    store::lock(&config.state_dir).map_err(|e| match e {
        StoreError::Locked(_) => anyhow::Error::from(Refusal {
            code: "not-reachable".into(),
            message: format!(
                "a gpuserver uses {}, but does not answer at {}",
                config.state_dir.display(),
                config.admin_socket().display()
            ),
            hint: "use the same runtime_dir as the server".into(),
        }),
        e => e.into(),
    })
}

/// Longest output of `pool export` that is read, in bytes.
const MAX_EXPORTED: u64 = 64 << 10;

fn pool(out: &mut dyn Write, config: &Config, verb: &PoolVerb) -> anyhow::Result<()> {
    let (authority, json) = match verb {
        PoolVerb::Export => {
            write!(out, "{}", Authority::open(&config.state_dir)?.export())?;
            return Ok(());
        }
        PoolVerb::Init { json } => {
            let _lock = offline(config)?;
            (Authority::init(&config.state_dir, &config.name, &SystemRandom)?, *json)
        }
        PoolVerb::Import { file, json } => {
            let mut text = String::new();
            let source: Box<dyn Read> = match file.as_os_str() == "-" {
                true => Box::new(std::io::stdin()),
                false => Box::new(std::fs::File::open(file).with_context(|| file.display().to_string())?),
            };
            source
                .take(MAX_EXPORTED)
                .read_to_string(&mut text)
                .with_context(|| file.display().to_string())?;
            let _lock = offline(config)?;
            (Authority::import(&config.state_dir, &text)?, *json)
        }
    };
    let fingerprint = data_encoding::HEXLOWER.encode(&authority.fingerprint());
    let folder = config.state_dir.join("ca");
    if json {
        return show::json(out, "pool", json!({ "authority_sha256": fingerprint, "folder": folder }));
    }
    writeln!(out, "The pool's authority is in {}: keep a copy in a secret place.", folder.display())?;
    writeln!(out, "Its certificate's SHA-256 is {fingerprint}.")?;
    if matches!(verb, PoolVerb::Import { .. }) {
        writeln!(out, "Next: start the server, and add it to servers.toml of the pool's clients.")?;
    } else {
        writeln!(out, "Next: start the server, and run `gpuserver token create` to let a client join.")?;
    }
    Ok(())
}

fn token(out: &mut dyn Write, server: &Target, verb: &TokenVerb) -> anyhow::Result<()> {
    let (ask, json) = match verb {
        TokenVerb::Create { name, uses, ttl, json } => {
            (Ask::TokenCreate { pattern: name.clone(), uses: *uses, ttl: ttl.clone() }, *json)
        }
        TokenVerb::List { json } => (Ask::Tokens, *json),
        TokenVerb::Revoke { id, json } => (Ask::TokenRevoke { id: id.clone() }, *json),
    };
    let value = match running(server, &ask)? {
        Some(value) => value,
        None => token_offline(server.config()?, &ask)?,
    };
    match verb {
        TokenVerb::List { .. } if json => show::json(out, "tokens", value),
        _ if json => show::json(out, "token", value),
        TokenVerb::Create { .. } => {
            let here = || server.config().map_or_else(|_| "HOST".into(), address);
            let address = server.remote.as_ref().map_or_else(here, |remote| remote.address.clone());
            show::token(out, &serde_json::from_value(value)?, &address)
        }
        TokenVerb::List { .. } => show::tokens(out, serde_json::from_value(value)?),
        TokenVerb::Revoke { .. } => {
            writeln!(out, "token {} is revoked", value["id"].as_str().unwrap_or_default())?;
            Ok(())
        }
    }
}

/// Performs a token verb on the files, without a server.
fn token_offline(config: &Config, ask: &Ask) -> anyhow::Result<Value> {
    let _lock = offline(config)?;
    let path = Files::below(&config.state_dir).tokens;
    let mut tokens: Tokens = store::read(&path)?;
    let made = match ask {
        Ask::TokenCreate { pattern, uses, ttl } => {
            let ttl: Duration = admin::token_ttl(ttl)?;
            let authority = Authority::open(&config.state_dir)?.fingerprint();
            let (token, record) =
                tokens.create(authority, pattern, *uses, ttl, SystemClock.unix(), &SystemRandom);
            serde_json::to_value(admin::TokenView::new(&token, record))?
        }
        Ask::TokenRevoke { id } => json!({ "id": tokens.revoke(id).ok_or_else(|| admin::no_token(id))? }),
        _ => return Ok(serde_json::to_value(admin::token_rows(&tokens))?),
    };
    store::write(&path, &tokens)?;
    Ok(made)
}

fn administrators(out: &mut dyn Write, server: &Target, verb: &AdminVerb) -> anyhow::Result<()> {
    match verb {
        AdminVerb::Create { name, out: file, json } => {
            admin::a_name(name)?;
            if std::fs::symlink_metadata(file).is_ok() {
                let message = format!("{} exists already; choose another file with --out", file.display());
                return Err(Refusal::new("exists", message).into());
            }
            let key = rcgen::KeyPair::generate()?;
            let csr_pem = rcgen::CertificateParams::default().serialize_request(&key)?.pem()?;
            let value =
                ask_administrators(server, &Ask::AdministratorCreate { name: name.clone(), csr_pem })?;
            let made: admin::AdministratorView = serde_json::from_value(value)?;
            let bundle = format!("{}{}{}", made.certificate_pem, key.serialize_pem(), made.authority_pem);
            write_new(file, &bundle).with_context(|| {
                format!("{} not written; run `gpuserver admin revoke {name}` and try again", file.display())
            })?;
            if *json {
                return show::json(out, "administrator", json!({ "name": name, "file": file }));
            }
            writeln!(out, "{}: its holder may do with --server what root may do here.", file.display())?;
            writeln!(
                out,
                "Next: install it as ~/.config/gpusession/admin.pem, and run `gpuserver --server HOST status`."
            )?;
        }
        AdminVerb::List { json } => {
            let value = ask_administrators(server, &Ask::Administrators)?;
            return match json {
                true => show::json(out, "administrators", value),
                false => show::administrators(out, serde_json::from_value(value)?),
            };
        }
        AdminVerb::Revoke { name, json } => {
            let value = ask_administrators(server, &Ask::AdministratorRevoke { name: name.clone() })?;
            if *json {
                return show::json(out, "administrator", value);
            }
            writeln!(out, "administrator {name} is revoked on this server")?;
            if value["known"] == false {
                writeln!(
                    out,
                    "note: this server has not seen this name; `gpuserver admin list` lists the names"
                )?;
            }
        }
    }
    Ok(())
}

/// Writes a secret into a new file that only its owner can read.
fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// Performs a verb for administrators, on the files if no server runs.
fn ask_administrators(server: &Target, ask: &Ask) -> anyhow::Result<Value> {
    if let Some(value) = running(server, ask)? {
        return Ok(value);
    }
    let config = server.config()?;
    let _lock = offline(config)?;
    let path = Files::below(&config.state_dir).administrators;
    let mut all: Administrators = store::read(&path)?;
    let (now, random) = (SystemClock.unix(), SystemRandom);
    let value = match ask {
        Ask::AdministratorCreate { name, csr_pem } => {
            let authority = Authority::open(&config.state_dir)?;
            let made = all.issue(&authority, name, csr_pem, now, &random);
            let certificate_pem = made.map_err(|e| admin::not_issued(&e))?;
            let authority_pem = authority.pem().into();
            serde_json::to_value(admin::AdministratorView { certificate_pem, authority_pem })?
        }
        Ask::AdministratorRevoke { name } => {
            admin::a_name(name)?;
            json!({ "name": name, "known": all.revoke(name, now) })
        }
        _ => return Ok(serde_json::to_value(admin::administrator_rows(&all))?),
    };
    store::write(&path, &all)?;
    Ok(value)
}

fn clients(
    out: &mut dyn Write,
    server: &Target,
    verb: Option<&ClientsVerb>,
    json: bool,
) -> anyhow::Result<()> {
    let ask = match verb {
        None => Ask::Clients,
        Some(ClientsVerb::Revoke { name }) => Ask::Revoke { name: name.clone() },
        Some(ClientsVerb::Forget { name }) => Ask::Forget { name: name.clone() },
    };
    let value = match running(server, &ask)? {
        Some(value) => value,
        None => clients_offline(server.config()?, &ask)?,
    };
    let (name, done) = match verb {
        None if json => return show::json(out, "clients", value),
        None => return show::clients(out, serde_json::from_value(value)?),
        Some(_) if json => return show::json(out, "client", value),
        Some(ClientsVerb::Revoke { name }) => (name, "is revoked"),
        Some(ClientsVerb::Forget { name }) => (name, "is forgotten"),
    };
    let ended = value["leases_ended"].as_u64().unwrap_or(0);
    writeln!(out, "client {name} {done}; {ended} leases ended")?;
    if value["known"] == false {
        writeln!(out, "note: this server has not seen this name; `gpuserver clients` lists the names")?;
    }
    Ok(())
}

/// Performs a verb for clients on the files, without a server.
///
/// The client's leases expire after the next start, since the client cannot renew them.
fn clients_offline(config: &Config, ask: &Ask) -> anyhow::Result<Value> {
    let _lock = offline(config)?;
    let path = Files::below(&config.state_dir).clients;
    let mut clients = Clients::new(store::read(&path)?);
    let now = SystemClock.unix();
    let (name, known) = match ask {
        Ask::Revoke { name } => {
            admin::a_name(name)?;
            (name, clients.revoke(name, now))
        }
        Ask::Forget { name } => {
            admin::a_name(name)?;
            (name, clients.forget(name, now))
        }
        _ => {
            let rows: Vec<_> = clients
                .list(SystemClock.now())
                .into_iter()
                .map(|c| admin::ClientRow {
                    name: c.name,
                    state: if c.record.revoked { "revoked" } else { "away" }.into(),
                    leases: 0,
                    silent_usec: None,
                    joined_unix: c.record.joined_unix,
                    certificate_sha256: c.record.certificate,
                })
                .collect();
            return Ok(serde_json::to_value(rows)?);
        }
    };
    store::write(&path, &clients.save())?;
    Ok(json!({ "client": name, "known": known, "leases_ended": 0 }))
}

fn check_config(
    out: &mut dyn Write,
    cli: &Cli,
    config: &Config,
    explain: bool,
    json: bool,
) -> anyhow::Result<()> {
    let driver = find_driver(config.driver.as_deref()).map_err(|e| e.placed(config))?;
    if let Some(mps) = &config.mps {
        crate::mps::control::find(mps.control.as_deref(), &driver)
            .map_err(|m| ConfigError::new(config.origin(mps.key), format!("{}: {m}", mps.key)))?;
    }
    let mut warnings = config.warnings.clone();
    warnings.push(
        "registry = \"local\": this server decides alone about its GPUs, and limits count on this server only"
            .to_string(),
    );
    // check-config does not load the driver: a server may be running, or the GPUs still missing.
    warnings.push(
        "GPUs are not checked: only the start of the server finds those in `gpus` and `gpu_sharing`"
            .to_string(),
    );
    if !config.state_dir.join("ca/authority.key").exists() {
        warnings.push(format!(
            "{}: no pool authority found; `gpuserver pool init` creates one",
            config.state_dir.join("ca").display()
        ));
    }
    let help = |key: &str| {
        let limit = key.strip_prefix("limits.").and_then(|k| k.rsplit('.').next());
        let limit = crate::limits::LIMITS.iter().find(|l| Some(l.name) == limit).map(|l| (l.help, l.default));
        config::KEYS.iter().find(|k| k.name == key).map(|k| (k.help, k.default)).or(limit)
    };
    if json {
        let keys: Vec<_> = config
            .report
            .iter()
            .map(|(key, value, origin)| {
                json!({ "key": key, "value": value, "origin": origin.to_string(), "help": help(key).map(|h| h.0) })
            })
            .collect();
        return show::json(out, "config", json!({ "keys": keys, "warnings": warnings }));
    }
    let mut table = show::table(&["KEY", "VALUE", "FROM"]);
    for (key, value, origin) in &config.report {
        table.add_row([key.clone(), value.clone(), origin.to_string()]);
        if explain && let Some((text, default)) = help(key) {
            table.add_row([String::new(), format!("{text} (default: {default})"), String::new()]);
        }
    }
    writeln!(out, "{table}")?;
    for warning in &warnings {
        writeln!(out, "note: {warning}")?;
    }
    writeln!(out, "{}: good", shown(&config_file(cli).0))?;
    Ok(())
}

fn shown(path: &Path) -> std::path::Display<'_> {
    path.display()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_the_past() {
        assert_eq!(past("1h", 10_000), Some(6_400));
        assert_eq!(past("2h", 60), Some(0));
        assert_eq!(past("2026-11-21", 0), Some(1_795_219_200));
        for bad in ["", "yesterday", "2026-13-01", "2026-11", "2026-11-21-1", "2026-02-30"] {
            assert_eq!(past(bad, 5), None, "{bad}");
        }
    }
}
