//! The `gpusession` command: shows, uses, requests and releases this machine's GPUs.
//!
//! The command line is defined in a library, so that `gpusession-manual` can generate manual pages
//! and completions from it.

mod cache;
mod daemon;
mod exit;
mod health;
mod join;
mod lease_file;
mod leave;
mod local;
mod netperf;
mod releases;
mod report;
mod run;
mod servers;
mod setup;
mod show;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use gpusession_common::help;
use gpusession_common::units::{human_duration, parse_duration};
use gpusessiond::environment::{self, Audience};
use gpusessiond::identity::Home;
use gpusessiond::leases::{Leases as _, Spec};
use gpusessiond::paths;
use serde_json::json;

use crate::daemon::Daemon;
use crate::exit::{Failure, Result, code};
use crate::join::Join;
use crate::lease_file::{LeaseFile, Via};
use crate::run::Wanted;
use crate::setup::{Outcome, System};

/// Remote GPUs for this machine: see and use them, request more, find faults.
///
/// Programs started from a login shell use this machine's leased GPUs without any of these
/// commands.
#[derive(Parser)]
#[command(name = "gpusession", version, max_term_width = 100)]
struct Cli {
    /// Print one JSON object instead of text
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show whether this machine has its GPUs, and what to do if not
    Status {
        /// Wait until this machine has its GPUs
        #[arg(long)]
        wait: bool,
    },
    /// List this machine's leases, and what its servers have free
    List {
        /// List the leases only, without asking the servers
        #[arg(long)]
        mine: bool,
    },
    /// Show the cards of all servers, and which of them are yours
    ///
    /// Load, memory in use and temperature are those of the whole card, with all its users.
    Smi(servers::Smi),
    /// Show leases, queue, programs and load of all servers
    Stats,
    /// Check this machine, its servers and GPUs; each fault has a remedy
    ///
    /// Exit status: 0 without a fault, 1 with one, 69 if neither the daemon nor a server answers.
    /// No check changes anything, and none needs root.
    Health(health::Health),
    /// Measure the network to a server, as programs use it
    ///
    /// Round trips of 64 bytes, the rate in each direction by number of lanes, the use of
    /// processors, and which part limits programs.
    ///
    /// Exit status: 69 if the server is unreachable, 75 if it serves other measurements or this
    /// machine measured in the last minute, 77 if it does not allow the measurement.
    Netperf(netperf::Netperf),
    /// Write an archive for a report of a fault, without secrets
    ///
    /// It holds versions, state, configuration, findings of `health`, facts of the host, and the
    /// journal of the last 24 hours.
    ///
    /// The command lists the archive's files before it writes. Root's archive holds more.
    Report(report::Options),
    /// Print the environment of GPU programs as shell commands
    ///
    /// Use: eval "$(gpusession env)"
    Env {
        /// Explain each variable, and mark those that you have set yourself
        #[arg(long)]
        explain: bool,
        /// Print the variables that logins get, as a systemd environment generator does, without
        /// asking the daemon
        #[arg(long, conflicts_with = "explain")]
        generator: bool,
    },
    /// Run a program on leased GPUs
    ///
    /// A lease created for it is released when it exits.
    Run(Run),
    /// Run a program on this machine's own GPUs, with a lease's limits
    ///
    /// Starts a private GPU server of this user, which all such runs share, and which ends with the
    /// last one. The exit status is the program's, or 125 without a GPU, its driver or gpuserver.
    Local(local::Local),
    /// Request a lease that outlives this command, and write it to a file
    Request(Request),
    /// Release a lease
    Release {
        /// File written by `gpusession request`, or a lease id
        #[arg(value_name = "FILE|ID")]
        lease: String,
    },
    /// Move device memory of idle leases to the server's host memory
    ///
    /// Their next CUDA call brings it back.
    Park {
        /// Lease id [default: the leases of this login session]
        #[arg(value_name = "ID")]
        lease: Option<String>,
    },
    /// Ask for the device memory of parked leases
    Unpark {
        /// Lease id [default: the leases of this login session]
        #[arg(value_name = "ID")]
        lease: Option<String>,
    },
    /// Read the configuration again
    ///
    /// Unchanged leases stay, and a configuration with errors changes nothing.
    Reload,
    /// Make this machine a client of a pool
    ///
    /// Without being root, the command makes this user one.
    Join(Join),
    /// Leave the pool: remove the identity of this machine
    ///
    /// Without being root, the command removes this user's identity.
    Leave {
        /// Keep the server addresses, for an image whose copies join with tokens of their own
        #[arg(long)]
        for_template: bool,
        /// Leave as this user even if root
        #[arg(long)]
        user: bool,
    },
    /// Make the loader find gpusession's libcuda.so.1
    ///
    /// A machine with an NVIDIA driver of its own stays as it is.
    SetupLibs {
        /// Give programs the library even beside an NVIDIA driver
        #[arg(long, conflicts_with = "remove")]
        force: bool,
        /// Stop giving programs the library
        #[arg(long)]
        remove: bool,
        /// Root directory of the system to set up, for images
        #[arg(long, value_name = "DIR", default_value = "/")]
        root: PathBuf,
    },
    /// Make logins report their sessions to the daemon, or print how to
    ///
    /// The PAM module pam_gpusession reports them.
    SetupPam {
        /// Remove the PAM module from logins, or print how to
        #[arg(long)]
        remove: bool,
    },
    /// Show or clear code that your programs compiled (NVRTC, cuDNN)
    #[command(subcommand)]
    Cache(Cache),
    /// Print a container device specification (CDI)
    ///
    /// Use: gpusession cdi >/etc/cdi/gpusession.json
    Cdi,
}

#[derive(Subcommand)]
enum Cache {
    /// Show the cache's folder and size
    Show,
    /// Delete the cached files; programs then compile again
    Clear,
}

#[derive(Args)]
struct Run {
    #[command(flatten)]
    wanted: Wanted,
    /// Lease new GPUs instead of using this login session's
    #[arg(long)]
    new: bool,
    /// Use the lease of a file written by `gpusession request`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["new", "gpus", "memory", "sm_percent", "sm_count", "sharing", "model", "servers", "servers_file"])]
    lease: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

#[derive(Args)]
struct Request {
    #[command(flatten)]
    wanted: Wanted,
    /// File to write
    #[arg(short, long, value_name = "FILE", default_value = "lease.toml")]
    output: PathBuf,
    /// Time after which the lease ends unless it is released before
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_duration)]
    ttl: Duration,
}

/// Returns the definition of the command line.
pub fn arguments() -> clap::Command {
    Cli::command()
}

/// Groups of verbs in the summary of the help, in the order of a new user's questions.
const GROUPS: [(&str, &str); 4] = [
    ("See", "status list smi stats"),
    ("Run programs", "run local request release park unpark env cache"),
    ("Find faults", "health netperf report"),
    ("Set up", "join leave reload setup-libs setup-pam cdi"),
];

/// Replaces the plain list of verbs in the help by groups; the manual has a page for each verb.
fn grouped(command: clap::Command) -> clap::Command {
    let about = |verb: &str| {
        let about = command.find_subcommand(verb).and_then(clap::Command::get_about);
        about.map(ToString::to_string).unwrap_or_default()
    };
    let text = help::template("gpusession", "gpusession-VERB(1)", &GROUPS, about);
    // Without a long text, --help is as short as -h.
    command.long_about(None).help_template(text)
}

/// Reads the arguments, executes the command and exits.
pub fn main() {
    if std::env::args_os().nth(1).is_some_and(|first| first == health::GPU_TEST) {
        std::process::exit(health::gpu_child());
    }
    if std::env::args_os().nth(1).is_some_and(|first| first == local::KEEPER) {
        std::process::exit(local::keeper());
    }
    let parsed = grouped(arguments()).try_get_matches().and_then(|found| Cli::from_arg_matches(&found));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && asked_for_json() => {
            let text = error.to_string();
            let message = text.trim_start_matches("error: ").lines().next().unwrap_or_default();
            print(&failed(&Failure::usage(message).hint("gpusession --help")));
            std::process::exit(code::USAGE);
        }
        Err(error) => {
            let _ = error.print();
            std::process::exit(if error.use_stderr() { code::USAGE } else { 0 });
        }
    };
    let json = cli.json;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(command(cli)),
        Err(error) => Err(Failure::new(code::FAILED, error.to_string())),
    };
    let code = match result {
        Ok(code) => code,
        Err(failure) => {
            if json {
                print(&failed(&failure));
            } else {
                eprintln!("gpusession: {}", plain(&failure.to_string()));
            }
            failure.code
        }
    };
    std::process::exit(code);
}

/// Returns `true` if `--json` is among the arguments, for errors before they are parsed.
///
/// Arguments after `--` belong to a program.
fn asked_for_json() -> bool {
    std::env::args_os().skip(1).take_while(|argument| argument != "--").any(|argument| argument == "--json")
}

/// Formats a failure as JSON.
fn failed(failure: &Failure) -> String {
    let error = json!({ "code": failure.code, "message": failure.message, "hint": failure.hint });
    json!({ "schema": 1, "error": error }).to_string()
}

/// Returns the text without control characters other than line ends and tabs.
///
/// Names and reasons come from servers, and would otherwise command the terminal.
fn plain(text: &str) -> String {
    text.replace(|c: char| c.is_control() && !matches!(c, '\n' | '\t'), " ")
}

/// Prints to standard output; a reader that has closed the pipe is no failure.
///
/// Returns `false` if the text was not written, for commands that would print without end.
fn print(text: &str) -> bool {
    let text = plain(text);
    let mut out = std::io::stdout().lock();
    let newline = if text.ends_with('\n') { "" } else { "\n" };
    write!(out, "{text}{newline}").and_then(|()| out.flush()).is_ok()
}

async fn command(cli: Cli) -> Result<i32> {
    match cli.command {
        Command::Status { wait } => status(cli.json, wait).await,
        Command::Park { lease } => park(lease, true, cli.json).await,
        Command::Unpark { lease } => park(lease, false, cli.json).await,
        Command::Reload => reload(cli.json).await,
        Command::List { mine } => list(mine, cli.json).await,
        Command::Smi(options) => servers::smi(options, cli.json).await,
        Command::Stats => servers::stats(cli.json).await,
        Command::Health(options) => health::health(options, cli.json).await,
        Command::Netperf(options) => netperf::netperf(options, cli.json).await,
        Command::Report(options) => report::report(options, cli.json).await,
        Command::Env { generator: true, .. } => generate(cli.json).await,
        Command::Env { explain, .. } => env(cli.json, explain).await,
        // One exit code for all reasons why the program does not run, distinct from its own exit
        // codes.
        Command::Run(run) => run_program(run).await.map_err(|failure| match failure.code {
            code::USAGE | 126 | 127 => failure,
            _ => failure.no_lease(),
        }),
        Command::Local(options) => local::local(options).await.map_err(|failure| match failure.code {
            code::USAGE | 126 | 127 => failure,
            _ => failure.no_lease(),
        }),
        Command::Request(request) => self::request(request, cli.json).await,
        Command::Release { lease } => release(&lease, cli.json).await,
        Command::Join(join) => join::join(join, cli.json).await,
        Command::Leave { for_template, user } => {
            let system = nix::unistd::geteuid().is_root() && !user;
            tell(leave::leave(system, for_template).await?, cli.json)
        }
        Command::SetupLibs { force, remove, root } => {
            let system = System::new(&root);
            tell(if remove { system.remove_libraries()? } else { system.libraries(force)? }, cli.json)
        }
        Command::SetupPam { remove } => tell(System::new(Path::new("/")).pam(remove)?, cli.json),
        Command::Cache(Cache::Show) => tell(cache::show()?, cli.json),
        Command::Cache(Cache::Clear) => tell(cache::clear()?, cli.json),
        Command::Cdi => {
            print(&format!("{:#}", setup::cdi()?));
            Ok(0)
        }
    }
}

/// Interval at which `status --wait` polls, and how long the daemon may be unreachable meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const DAEMON_GRACE: Duration = Duration::from_secs(30);

fn tell(outcome: Outcome, json: bool) -> Result<i32> {
    print(&if json { outcome.json.to_string() } else { outcome.text });
    Ok(0)
}

/// Waits without limit until the machine has its GPUs; survives a restart of the daemon.
async fn ready() -> Result<Daemon> {
    let mut away = Duration::ZERO;
    loop {
        let asked = async {
            let daemon = Daemon::connect().await?;
            Ok((daemon.describe().await?.boot_allocation_complete, daemon))
        };
        match asked.await {
            Ok((true, daemon)) => return Ok(daemon),
            Ok((false, _)) => away = Duration::ZERO,
            Err(failure) if away >= DAEMON_GRACE => return Err(failure),
            Err(_) => away += POLL_INTERVAL,
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn status(json: bool, wait: bool) -> Result<i32> {
    let daemon = if wait { ready().await? } else { Daemon::connect().await? };
    let (described, mine) = daemon.describe_mine().await?;
    let reason = show::no_gpu(&described, &mine);
    if json {
        let mut raw = daemon.describe_raw().await?;
        raw["no_gpu_reason"] = json!(reason);
        print(&raw.to_string());
    } else {
        let now = gpusessiond::renewal::wall() * 1_000_000;
        print(&show::status(&described, reason.as_deref(), now));
    }
    Ok(0)
}

async fn reload(json: bool) -> Result<i32> {
    Daemon::connect().await?.reload().await?;
    // As `systemctl reload` does: logins take variables from root's file only.
    let path = paths::variables_file();
    if nix::unistd::geteuid().is_root() && path.exists() {
        let failed = |e: String| Failure::new(code::FAILED, format!("{}: cannot write: {e}", path.display()));
        let config = gpusessiond::config::Config::load(&gpusessiond::config::default_path())
            .map_err(|e| failed(e.to_string()))?;
        environment::publish(&config, &path).map_err(|e| failed(e.to_string()))?;
    }
    if json {
        print(&json!({ "schema": 1, "reloaded": true }).to_string());
    }
    Ok(0)
}

async fn park(lease: Option<String>, park: bool, json: bool) -> Result<i32> {
    let daemon = Daemon::connect().await?;
    let leases = match lease {
        Some(id) => vec![id],
        None => daemon.describe_mine().await?.1,
    };
    if leases.is_empty() {
        return Err(Failure::new(code::FAILED, "this login session has no lease")
            .hint("`gpusession list` shows all leases: name one"));
    }
    for id in &leases {
        daemon.park(id, park).await?;
    }
    if json {
        print(&json!({ "schema": 1, "leases": leases, "parked": park }).to_string());
    } else {
        let word = if park { "parked" } else { "asked to unpark" };
        print(&format!("{word}: {}", leases.join(", ")));
    }
    Ok(0)
}

async fn list(mine: bool, json: bool) -> Result<i32> {
    let daemon = Daemon::connect().await?;
    let described = daemon.describe().await?;
    // A daemon of an earlier version cannot ask.
    let survey = if mine { None } else { daemon.survey().await.ok() };
    if json {
        let leases = daemon.describe_raw().await?["leases"].take();
        let pool = survey.map(|survey| servers::pool_json(&survey, &described));
        print(&json!({ "schema": 1, "leases": leases, "pool": pool }).to_string());
    } else {
        print(&show::list(&described));
        let pool = survey.map(|survey| servers::pool_text(&survey, &described)).unwrap_or_default();
        if !pool.is_empty() {
            print(&format!("\n{pool}"));
        }
    }
    Ok(0)
}

async fn env(json: bool, explain: bool) -> Result<i32> {
    let daemon = Daemon::connect().await?;
    let (described, mine) = daemon.describe_mine().await?;
    let environment = if mine.is_empty() { BTreeMap::new() } else { variables(described.environment)? };
    if json {
        print(&json!({ "schema": 1, "environment": environment }).to_string());
        return Ok(0);
    }
    let mut out = String::new();
    if explain {
        out.push_str(
            "# Programs find their GPUs without any variable: the loader finds libcuda.so.1, and the\n\
             # daemon identifies a process by its user and login session. The variables below are\n\
             # [environment] of gpusession.toml.\n",
        );
    }
    for (key, value) in &environment {
        // Variables that the user has set stay.
        if std::env::var_os(key).is_some() {
            if explain {
                out.push_str(&format!("# {key}: set by you, left alone\n"));
            }
            continue;
        }
        if explain {
            out.push_str(&format!("# {key}: {}\n", show::variable(key)));
        }
        out.push_str(&format!("export {key}={}\n", quoted(value)));
    }
    if explain && environment.is_empty() {
        out.push_str("# No variable needs to be set.\n");
    }
    if explain {
        for (key, _) in std::env::vars().filter(|(k, _)| show::is_ours(k) && !environment.contains_key(k)) {
            out.push_str(&format!("# {key} (in this shell): {}\n", show::variable(&key)));
        }
    }
    if !out.is_empty() {
        print(&out);
    }
    Ok(0)
}

/// Returns the variables of `[environment]` from root's file, which no other user can write.
///
/// Without the file, as for a daemon that no unit started, the daemon's word counts.
fn variables(of_daemon: BTreeMap<String, String>) -> Result<BTreeMap<String, String>> {
    let path = paths::variables_file();
    let given = environment::published(&path)
        .map_err(|e| Failure::new(code::FAILED, format!("{}: {e}", path.display())))?;
    Ok(given.unwrap_or(of_daemon))
}

/// Prints the variables that logins get: root's file has them, the daemon's file says who gets
/// them.
///
/// A user's first login waits for this command, so it must not wait for a daemon that hangs.
async fn generate(json: bool) -> Result<i32> {
    let path = paths::audience_file();
    let audience =
        Audience::read(&path).map_err(|e| Failure::new(code::FAILED, format!("{}: {e}", path.display())))?;
    let environment = match audience {
        Some(audience) if audience.includes_uid(nix::unistd::geteuid().as_raw()).await => {
            variables(BTreeMap::new())?
        }
        _ => BTreeMap::new(),
    };
    if json {
        print(&json!({ "schema": 1, "environment": environment }).to_string());
        return Ok(0);
    }
    // Variables that the user has set stay. No value contains a character that needs escaping in
    // quotes.
    for (name, value) in environment.iter().filter(|(name, _)| std::env::var_os(name).is_none()) {
        print(&format!("{name}=\"{value}\""));
    }
    Ok(0)
}

/// Quotes a value for a POSIX shell.
fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\'', r"'\''"))
}

async fn run_program(run: Run) -> Result<i32> {
    if let Some(path) = &run.lease {
        return run_on(&LeaseFile::load(path)?, &run.program).await;
    }
    let servers = run.wanted.addresses()?;
    if !servers.is_empty() {
        return run_on_servers(servers, &run).await;
    }
    let daemon = match Daemon::connect().await {
        Ok(daemon) => daemon.describe_mine().await.map(|(described, mine)| (daemon, described, mine)),
        Err(failure) => Err(failure),
    };
    let (daemon, described, mine) = match daemon {
        Ok(daemon) => daemon,
        Err(failure) => {
            // Without a daemon, a user who has joined a pool still has the servers of their own
            // `servers.toml`.
            let own =
                Home::user().filter(|home| home.exists() && home.addresses().is_ok_and(|a| !a.is_empty()));
            if own.is_none() {
                return Err(failure.no_lease());
            }
            return run_direct(&[], run.wanted.allow_clear, run.wanted.spec(), None, &run.program).await;
        }
    };
    let session: Vec<_> = described.leases.iter().filter(|l| mine.contains(&l.id)).collect();
    // A lease of class session or user comes with the program's first CUDA call.
    if run.new || (session.is_empty() && !described.leases_on_demand) {
        return match own_servers()? {
            own if own.is_empty() => run_new(&daemon, own, &run).await,
            own => run_on_servers(own, &run).await,
        };
    }
    let mut environment =
        if session.is_empty() { Vec::new() } else { unset(variables(described.environment.clone())?) };
    let have: u32 = session.iter().map(|l| l.gpus).sum();
    if run.wanted.memory.is_some()
        || run.wanted.sm_percent.is_some()
        || run.wanted.sm_count.is_some()
        || run.wanted.sharing.is_some()
        || run.wanted.model.is_some()
    {
        return Err(Failure::new(code::NO_LEASE, "this login session's lease already has its limits")
            .hint("--new leases other GPUs with limits of their own"));
    }
    if let Some(n) = run.wanted.gpus {
        if n > have && !session.is_empty() {
            return Err(Failure::new(
                code::NO_LEASE,
                format!("this login session has {have} GPU(s), not {n}"),
            )
            .hint("--new leases other GPUs"));
        }
        environment.push(("CUDA_VISIBLE_DEVICES".into(), subset(n).into()));
    }
    run::program_with(&run.program, environment).await
}

/// Returns `true` if the daemon leases from the servers, for a user without an identity of their
/// own.
async fn by_daemon(servers: &[String]) -> bool {
    servers.is_empty() || (!Home::user().is_some_and(|home| home.exists()) && daemon::runs().await)
}

/// Returns the servers of the caller's own `servers.toml`, which new leases prefer to the daemon's
/// choice.
fn own_servers() -> Result<Vec<String>> {
    Home::own_addresses().map_err(|error| Failure::of_identity(&error))
}

/// Runs a program on new leases of the named servers.
async fn run_on_servers(servers: Vec<String>, run: &Run) -> Result<i32> {
    match by_daemon(&servers).await {
        false => run_direct(&servers, run.wanted.allow_clear, run.wanted.spec(), None, &run.program).await,
        true => run_new(&Daemon::connect().await?, servers, run).await,
    }
}

/// Runs a program on new leases of the daemon, from any or from the named servers.
async fn run_new(daemon: &Daemon, servers: Vec<String>, run: &Run) -> Result<i32> {
    let why = run.program.first().map(|p| p.to_string_lossy().chars().take(80).collect()).unwrap_or_default();
    let spec = Spec { why, servers: servers.clone(), ..run.wanted.spec() };
    let create = async |spec: Spec| daemon.create(&spec, false).await;
    let leases = run::lease(&servers, spec, create).await.map_err(|(_, failure)| failure.no_lease())?;
    let mut environment = variables(daemon.describe().await?.environment)?;
    let ids: Vec<&str> = leases.iter().map(|lease| lease.id.as_str()).collect();
    run::add_needed(&mut environment, run.wanted.gpus.unwrap_or(1));
    environment.insert("GPUSESSION_LEASE".into(), ids.join(","));
    run::program_with(&run.program, unset(environment)).await
}

/// Runs a program without the daemon, with the caller's identity.
async fn run_direct(
    servers: &[String],
    allow_clear: bool,
    spec: Spec,
    known: Option<&str>,
    program: &[OsString],
) -> Result<i32> {
    let program = run::Program { line: program, bound: false };
    run::direct(&Home::of_caller(), servers, allow_clear, spec, program, known).await
}

/// Returns the first `n` of the devices that the user made visible, or of all.
fn subset(n: u32) -> String {
    let n = n as usize;
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => list.split(',').take(n).collect::<Vec<_>>().join(","),
        Err(_) => (0..n).map(|i| i.to_string()).collect::<Vec<_>>().join(","),
    }
}

/// Drops variables that the user has set, except `GPUSESSION_LEASE`.
fn unset(environment: impl IntoIterator<Item = (String, String)>) -> Vec<(String, OsString)> {
    environment
        .into_iter()
        .filter(|(key, _)| key == "GPUSESSION_LEASE" || std::env::var_os(key).is_none())
        .map(|(key, value)| (key, value.into()))
        .collect()
}

async fn run_on(file: &LeaseFile, program: &[OsString]) -> Result<i32> {
    match file.via {
        Via::Daemon => {
            let mut environment = [("GPUSESSION_LEASE".to_owned(), file.id.clone())].into();
            run::add_needed(&mut environment, file.gpus);
            run::program_with(program, unset(environment)).await
        }
        Via::Servers => {
            let mut spec = Wanted {
                gpus: Some(file.gpus),
                memory: None,
                sm_percent: None,
                sm_count: None,
                sharing: None,
                model: None,
                servers: vec![],
                servers_file: None,
                allow_clear: file.allow_clear,
            }
            .spec();
            spec.request_id = Some(file.request.clone());
            run_direct(&file.servers, file.allow_clear, spec, Some(&file.id), program).await
        }
    }
}

async fn request(request: Request, json: bool) -> Result<i32> {
    let empty = lease_file::Empty::make(&request.output)?;
    let mut spec = request.wanted.spec();
    spec.ttl = Some(request.ttl);
    spec.why = "gpusession request".into();
    let (gpus, allow_clear) = (spec.gpus, request.wanted.allow_clear);
    let servers = match request.wanted.addresses()? {
        named if named.is_empty() => own_servers()?,
        named => named,
    };
    let (file, expires_usec) = if by_daemon(&servers).await {
        spec.servers = servers;
        let daemon = Daemon::connect().await?;
        let id = daemon.create(&spec, true).await?.id;
        // The lease exists even if this call fails.
        let leases = daemon.describe().await.map(|described| described.leases).unwrap_or_default();
        let expires_usec = leases.iter().find(|lease| lease.id == id).map_or(0, |lease| lease.expires_usec);
        let file =
            LeaseFile { id, via: Via::Daemon, request: String::new(), gpus, servers: vec![], allow_clear };
        (file, expires_usec)
    } else {
        let direct = run::Direct::new(&Home::of_caller(), &servers, allow_clear).await?;
        // The engine's own id of the request, which it withdraws if no answer comes.
        let wish = format!("{}/{}/0", paths::hex(&paths::boot_id()), spec.key);
        let lease = tokio::select! {
            lease = direct.engine.create(spec) => lease.map_err(|e| Failure::of_pool(&e))?,
            // The engine's end releases what it was asked for.
            code = run::interrupted() => {
                direct.engine.shutdown(run::SHUTDOWN_GRACE).await;
                return Ok(code);
            }
        };
        // Only the server that holds the lease: another one would create a second lease for the
        // request.
        let snapshot = direct.engine.snapshot().borrow().clone();
        let holder = snapshot.server_facts().find(|server| server.name == lease.facts.reported.server);
        let servers = holder.map_or(direct.servers, |server| vec![server.address.clone()]);
        let file =
            LeaseFile { id: lease.facts.id, via: Via::Servers, request: wish, gpus, servers, allow_clear };
        (file, lease.gauges.expires.map_or(0, |at| snapshot.clock.wall_usec(at)))
    };
    file.store(empty)?;
    if json {
        let told = json!({
            "schema": 1, "lease": file.id, "gpus": gpus, "file": request.output, "expires_usec": expires_usec
        });
        print(&told.to_string());
    } else {
        let path = request.output.display();
        print(&format!(
            "lease {} of {gpus} GPU(s), written to {path}\nuse it: gpusession run --lease {path} -- PROGRAM",
            file.id
        ));
        #[expect(clippy::disallowed_methods, reason = "a command reads the clock once")]
        let left = (UNIX_EPOCH + Duration::from_micros(expires_usec)).duration_since(SystemTime::now());
        // Tolerance for the time since the grant.
        let granted = left.unwrap_or_default() + Duration::from_secs(5);
        if expires_usec != 0 && granted < request.ttl {
            let (granted, asked) = (human_duration(granted), human_duration(request.ttl));
            print(&format!("it ends in {granted}, not {asked}: the server's limit lease_ttl allows no more"));
        }
    }
    Ok(0)
}

async fn release(lease: &str, json: bool) -> Result<i32> {
    let path = Path::new(lease);
    let looks_like_a_file = lease.contains(['/', '.']) || path.exists();
    let (id, pending) = if looks_like_a_file {
        let file = LeaseFile::load(path)?;
        let pending = match file.via {
            Via::Daemon => Daemon::connect().await?.release_if_there(&file.id).await.map(|()| None)?,
            Via::Servers => releases::release(&file).await?,
        };
        let _ = std::fs::remove_file(path);
        (file.id, pending)
    } else {
        Daemon::connect().await?.release(lease).await?;
        (lease.to_owned(), None)
    };
    if json {
        print(
            &json!({ "schema": 1, "lease": id, "released": pending.is_none(), "trouble": pending })
                .to_string(),
        );
    } else {
        match pending {
            None => print(&format!("lease {id} released")),
            Some(why) => print(&format!(
                "lease {id} is not released yet: {why}; the next `gpusession run --server`, `request` or `release` repeats it"
            )),
        };
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_command_to_a_terminal_is_printed() {
        let table = "NAME\tSTATE\ngpu1\u{1b}[31m\u{9b}2J\r\u{7}\tonline\n";
        assert_eq!(plain(table), "NAME\tSTATE\ngpu1 [31m 2J  \tonline\n");
    }

    #[test]
    fn help_fits_a_screen_and_has_each_verb_in_one_group() {
        let mut listed: Vec<_> = GROUPS.iter().flat_map(|(_, verbs)| verbs.split(' ')).collect();
        let mut verbs: Vec<_> = arguments().get_subcommands().map(|c| c.get_name().to_owned()).collect();
        listed.sort_unstable();
        verbs.sort_unstable();
        assert_eq!(listed, verbs);
        let asked = grouped(arguments()).try_get_matches_from(["gpusession", "--help"]);
        let help = asked.expect_err("help ends the parser").to_string();
        assert!(help.lines().count() <= 40, "{help}");
        for line in help.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}
