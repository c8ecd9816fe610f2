//! The command line's verbs and options.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

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
