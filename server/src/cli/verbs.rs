//! The command line's verbs and options.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use gpusession_common::help;

use super::accounting::{AccountingOptions, accounting};
use super::admin::{AdminVerb, administrators};
use super::audit::{AuditOptions, audit};
use super::clients::{ClientsVerb, clients};
use super::config::{ConfigVerb, check_config, configure};
use super::diagnosis::{self, HealthOptions, ReportOptions};
use super::fleet::{self, FleetVerb};
use super::isolation::check_isolation;
use super::member;
use super::pool::{PoolVerb, pool};
use super::rotate::rotate;
use super::several::{ps, stop, top};
use super::statements::{StatementsVerb, statements};
use super::stats::{StatsOptions, stats};
use super::target::{Target, must_run};
use super::token::{TokenVerb, token};
use crate::admin::answer::{config, gpus, leases, status};
use crate::admin::{self, Ask};
use crate::text::Output;

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
    /// Ask this server over the network
    ///
    /// The request is an administrator's of its pool.
    #[arg(long, global = true, value_name = "HOST[:PORT]")]
    pub server: Option<String>,
    /// Administrator's file
    ///
    /// It comes from `gpuserver admin create` [default: ~/.config/gpusession/admin.pem].
    #[arg(long, global = true, env = "GPUSERVER_IDENTITY", value_name = "FILE")]
    pub identity: Option<PathBuf>,
    /// Print one JSON object instead of text
    ///
    /// `top` prints one for each update.
    #[arg(long, global = true)]
    pub json: bool,
    /// Verb to run
    #[command(subcommand)]
    pub verb: Verb,
}

/// Groups of verbs in the first screen of the help.
const GROUPS: [(&str, &str); 3] = [
    ("Set up", "pool token fleet clients admin statements config limits check-config check-isolation"),
    ("Run", "serve drain stop off on drop park unpark kill"),
    ("See, and find faults", "status gpus leases queue ps top mps stats accounting audit health report"),
];

impl Cli {
    /// Reads the arguments; the help lists the verbs in groups, the manual has a page for each.
    pub fn read<A: Into<OsString> + Clone>(
        arguments: impl IntoIterator<Item = A>,
    ) -> clap::error::Result<Self> {
        let command = Self::command();
        let about = |verb: &str| {
            let about = command.find_subcommand(verb).and_then(clap::Command::get_about);
            about.map(ToString::to_string).unwrap_or_default()
        };
        let text = help::template("gpuserver", "gpuserver-VERB(8)", &GROUPS, about);
        // Without long texts, --help is as short as -h.
        let command = command.long_about(None).mut_args(|option| option.long_help(None)).help_template(text);
        Self::from_arg_matches(&command.try_get_matches_from(arguments)?)
    }
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
    },
    /// Test whether workers can start isolated on this host
    ///
    /// The start of the server does the same test. It makes a context on each GPU for a moment.
    /// Exit status: 0 the server starts; 1 the test failed; 2 `isolation = "require"` and this host
    /// does not allow it.
    CheckIsolation,
    /// Check this host and its server; each fault has a remedy
    ///
    /// Exit status: 0 without a fault, 1 with one, 69 if the server does not answer, 77 if this
    /// user may not ask it. No check changes anything.
    Health(HealthOptions),
    /// Write an archive for a report of a fault, without secrets
    ///
    /// The command lists the archive's files before it writes.
    Report(ReportOptions),
    /// Create, join or export a pool; replace its authority
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
    /// Let a fleet join: create a key, derive each machine's token
    Fleet {
        /// Verb for fleet keys
        #[command(subcommand)]
        verb: FleetVerb,
    },
    /// Let administrators use the server over the network
    ///
    /// The verbs below it create, list and revoke their certificates.
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
    },
    /// List revocations of the pool, carry them between servers
    Statements {
        /// Verb for statements
        #[command(subcommand)]
        verb: Option<StatementsVerb>,
    },
    /// Show the server's addresses, driver and numbers
    Status,
    /// List workers: one for each client process, and the warm ones
    Ps {
        /// Include all servers of this host: gpuserver.toml and gpuserver-NAME.toml in one folder
        #[arg(long)]
        all: bool,
        /// Show the threads of the workers' processes
        #[arg(long)]
        threads: bool,
    },
    /// List leases
    Leases,
    /// List GPUs and how much of each is leased
    Gpus,
    /// Move an idle lease's memory to the host, and lend its GPUs
    ///
    /// The device memory of its programs moves to the server's host memory.
    Park {
        /// Lease id or its start
        lease: String,
    },
    /// Reacquire the GPUs of a parked or lent lease
    ///
    /// The next calls of its programs do so, too.
    Unpark {
        /// Lease id or its start
        lease: String,
    },
    /// Show workers at intervals, the busiest first
    Top {
        /// Time between two updates
        #[arg(long, value_name = "TIME", default_value = "2s")]
        every: String,
        /// Number of updates; 0: no bound
        #[arg(short = 'n', long, value_name = "N", default_value_t = 0)]
        times: u32,
    },
    /// List MPS domains: states, servers, clients, faults
    Mps,
    /// List requests that wait for GPUs
    Queue,
    /// Withdraw a GPU: no new leases on it
    ///
    /// Present leases stay until they end.
    Off {
        /// Index, UUID, or start of the UUID
        gpu: String,
        /// Reason, which clients see
        #[arg(long, value_name = "TEXT", default_value = "an administrator withdrew it")]
        reason: String,
    },
    /// Return a GPU to service that was off, dropped or broken
    On {
        /// Index, UUID, or start of the UUID
        gpu: String,
    },
    /// Remove a GPU from the pool; refused while it is leased
    Drop {
        /// Index, UUID, or start of the UUID
        gpu: String,
    },
    /// Stop new leases; present leases and their programs continue
    Drain {
        /// Allow new leases again
        #[arg(long)]
        end: bool,
        /// Reason, which clients see
        #[arg(long, value_name = "TEXT", default_value = "it is drained")]
        reason: String,
    },
    /// Stop the server, after its programs
    ///
    /// The server refuses new leases, waits for programs (`drain_timeout`), and stops the workers.
    Stop {
        /// Stop at once, without waiting for programs
        #[arg(long)]
        force: bool,
    },
    /// Show limits of a client and a user, and where they are set
    Limits {
        /// Name of the client; without it, the limits for everybody
        #[arg(default_value = "")]
        client: String,
        /// Name of the user on whose behalf the client asks
        #[arg(long, value_name = "NAME", default_value = "")]
        user: String,
    },
    /// Show GPU hours, work, bytes and waits of clients and users
    Stats(StatsOptions),
    /// Show the accounting records: ended leases and programs
    Accounting(AccountingOptions),
    /// Show the audit trail: joins, certificates, changes, leases
    ///
    /// Changes are those of tokens and those by administrators.
    Audit(AuditOptions),
    /// Show or change the configuration of the running server
    Config {
        /// Verb for the configuration
        #[command(subcommand)]
        verb: ConfigVerb,
    },
    /// Kill a worker, or end a lease with all its workers
    ///
    /// Their programs see their GPUs fail.
    Kill {
        /// Worker id or its start, or a whole lease id
        #[arg(value_name = "WORKER|LEASE")]
        worker: String,
    },
}

/// Runs a verb that is not `serve`; returns the exit code.
pub fn run(cli: &Cli) -> anyhow::Result<u8> {
    if cli.server.is_some()
        && let Some(why) = cli.verb.local()
    {
        return Err(admin::local_only(why).into());
    }
    let out = &mut std::io::stdout().lock();
    let out = &mut Output { out, json: cli.json };
    // Before a look at this host's configuration, which is none where machines are provisioned.
    if let Verb::Fleet { verb: FleetVerb::Token { key, name } } = &cli.verb {
        return fleet::token(out, key.as_deref(), name).map(|()| 0);
    }
    let server = Target::of(cli.config.as_deref(), cli.server.as_deref(), cli.identity.as_deref())?;
    match &cli.verb {
        Verb::Health(options) => diagnosis::health(out, &server, options),
        Verb::CheckIsolation => check_isolation(out, server.config()?),
        verb => verb.run(cli.config.as_deref(), &server, out).map(|()| 0),
    }
}

impl Verb {
    /// Runs the verb: most send one request, and show its answer. `file`: from the command line.
    fn run(&self, file: Option<&Path>, server: &Target, out: &mut Output<'_>) -> anyhow::Result<()> {
        let ask = |ask: Ask| must_run(server, &ask);
        match self {
            Self::Serve
            | Self::Health(_)
            | Self::CheckIsolation
            | Self::Fleet { verb: FleetVerb::Token { .. } } => {
                anyhow::bail!("internal error: not a verb of this function")
            }
            Self::Report(options) => diagnosis::report(out, server, options),
            Self::CheckConfig { explain } => check_config(out, file, server.config()?, *explain),
            Self::Pool { verb: PoolVerb::Rotate { verb } } => rotate(out, server, verb),
            Self::Pool { verb: PoolVerb::Revoke { name } } => {
                let revoked = ask(Ask::ServerRevoke { name: name.clone() })?;
                out.answer("revoked", revoked, |out, _: serde_json::Value| {
                    let text = "clients refuse it as soon as they ask this server, and other servers within a minute";
                    Ok(writeln!(out, "server {name} is revoked for ever: {text}")?)
                })
            }
            Self::Pool { verb: PoolVerb::Admit { name, ttl, from } } => {
                member::admit(out, server, name, ttl, from)
            }
            Self::Pool { verb: PoolVerb::Join { address, token, now } } => {
                member::join(out, server.config()?, (address, token.as_deref(), *now))
            }
            Self::Pool { verb: PoolVerb::Yield { address, token } } => {
                member::give_up(out, server.config()?, (address, token.as_deref()))
            }
            Self::Statements { verb } => statements(out, server, verb.as_ref()),
            Self::Pool { verb } => pool(out, server.config()?, verb),
            Self::Token { verb } => token(out, server, verb),
            Self::Fleet { verb: FleetVerb::Create { name, uses, ttl, from } } => {
                fleet::create(out, server, (name, *uses), ttl, from)
            }
            Self::Admin { verb } => administrators(out, server, verb),
            Self::Clients { verb } => clients(out, server, verb.as_ref()),
            Self::Status => out.answer("server", ask(Ask::Status)?, status::print_status),
            Self::Ps { all, threads } => ps(out, file, server, *all, *threads),
            Self::Leases => out.answer("leases", ask(Ask::Leases)?, leases::print_leases),
            Self::Gpus => out.answer("gpus", ask(Ask::Gpus)?, gpus::print_gpus),
            Self::Park { lease } => {
                out.answer("lease", ask(Ask::Park { lease: lease.clone() })?, leases::print_lease_state)
            }
            Self::Unpark { lease } => {
                out.answer("lease", ask(Ask::Unpark { lease: lease.clone() })?, leases::print_lease_state)
            }
            Self::Top { every, times } => top(out, server, every, *times),
            Self::Mps => out.answer("domains", ask(Ask::Mps)?, gpus::print_mps),
            Self::Queue => out.answer("queue", ask(Ask::Queue)?, leases::print_queue),
            Self::Off { gpu, reason } => {
                let off = Ask::Off { gpu: gpu.clone(), reason: reason.clone() };
                out.answer("gpu", ask(off)?, gpus::print_gpu_state)
            }
            Self::On { gpu } => out.answer("gpu", ask(Ask::On { gpu: gpu.clone() })?, gpus::print_gpu_state),
            Self::Drop { gpu } => {
                let value = ask(Ask::Drop { gpu: gpu.clone() })?;
                out.answer("gpu", value, |out, value| gpus::print_dropped(out, value, gpu))
            }
            Self::Drain { end, reason } => out.answer(
                "drain",
                ask(Ask::Drain { end: *end, reason: reason.clone() })?,
                status::print_drain,
            ),
            Self::Stop { force } => stop(out, server, *force),
            Self::Limits { client, user } => {
                let limits = Ask::Limits { client: client.clone(), user: user.clone() };
                out.answer("limits", ask(limits)?, |out, rows| config::print_limits(out, rows, user))
            }
            Self::Stats(options) => stats(out, server, options),
            Self::Accounting(wanted) => accounting(out, server, wanted),
            Self::Audit(options) => audit(out, server, options),
            Self::Config { verb } => configure(out, server, verb),
            Self::Kill { worker } => {
                out.answer("killed", ask(Ask::Kill { worker: worker.clone() })?, leases::print_killed)
            }
        }
    }

    /// Returns why the verb is refused with `--server`, if it asks no running server.
    ///
    /// For the other verbs [`Ask::local`] decides.
    fn local(&self) -> Option<&'static str> {
        match self {
            Self::Serve => Some("a server is started on its own host"),
            Self::Health(_) | Self::Report(_) | Self::CheckIsolation => {
                Some("a host is examined by its own command")
            }
            Self::CheckConfig { .. } => {
                Some("a configuration is checked on its own host, whose driver and folders it names")
            }
            Self::Pool { .. } => Some(admin::KEPT_HERE),
            Self::Fleet { verb: FleetVerb::Token { .. } } => {
                Some("`fleet token` derives a token from its key, without a server")
            }
            Self::Token { .. }
            | Self::Fleet { .. }
            | Self::Admin { .. }
            | Self::Clients { .. }
            | Self::Statements { .. }
            | Self::Status
            | Self::Ps { .. }
            | Self::Leases
            | Self::Gpus
            | Self::Park { .. }
            | Self::Unpark { .. }
            | Self::Top { .. }
            | Self::Mps
            | Self::Queue
            | Self::Off { .. }
            | Self::On { .. }
            | Self::Drop { .. }
            | Self::Drain { .. }
            | Self::Stop { .. }
            | Self::Limits { .. }
            | Self::Stats(_)
            | Self::Accounting(_)
            | Self::Audit(_)
            | Self::Config { .. }
            | Self::Kill { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a verb and the verbs below it.
    fn takes_json(command: &clap::Command) {
        let name = command.get_display_name().unwrap_or(command.get_name());
        let json: Vec<_> = command.get_arguments().filter(|a| a.get_long() == Some("json")).collect();
        assert!(matches!(json[..], [one] if one.is_global_set()), "{name}: an option --json of its own");
        command.get_subcommands().for_each(takes_json);
    }

    fn is_described(page: &str, program: &str, command: &clap::Command) {
        for verb in command.get_subcommands() {
            let name = format!("{program} {}", verb.get_name());
            match verb.has_subcommands() {
                true => is_described(page, &name, verb),
                false => assert!(page.contains(&format!("`{name}`")), "docs/json.md does not name `{name}`"),
            }
        }
    }

    #[test]
    fn every_verb_has_a_section_of_its_json() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/json.md")).unwrap();
        is_described(&page, "gpuserver", &Cli::command());
    }

    #[test]
    fn help_fits_a_screen_and_has_each_verb_in_one_group() {
        let mut listed: Vec<_> = GROUPS.iter().flat_map(|(_, verbs)| verbs.split(' ')).collect();
        let mut verbs: Vec<_> = Cli::command().get_subcommands().map(|c| c.get_name().to_owned()).collect();
        listed.sort_unstable();
        verbs.sort_unstable();
        assert_eq!(listed, verbs);
        let help = Cli::read(["gpuserver", "--help"]).expect_err("help ends the parser").to_string();
        assert!(help.lines().count() <= 50, "{help}");
        for line in help.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }

    #[test]
    fn every_verb_has_the_global_option_json() {
        let mut command = Cli::command().disable_help_subcommand(true);
        command.build();
        takes_json(&command);
        for line in [
            "ps --json",
            "--json ps --threads",
            "clients --json revoke vm-1",
            "clients revoke vm-1 --json",
            "token list --json",
            "accounting --json --since 1h",
        ] {
            let cli = Cli::try_parse_from(["gpuserver"].into_iter().chain(line.split(' '))).expect(line);
            assert!(cli.json, "{line}");
        }
        assert!(Cli::try_parse_from(["gpuserver", "accounting", "--csv", "--json"]).is_err());
        assert!(!Cli::try_parse_from(["gpuserver", "ps"]).unwrap().json);
    }
}
