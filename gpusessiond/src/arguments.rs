//! The daemon's command line.

use std::path::PathBuf;

use clap::Parser;

/// Holds this machine's GPU leases and grants them to its programs.
///
/// Started by systemd (gpusession.service); reads gpusession.toml, joins the pool with the token in
/// the credential gpusession.token if this machine has no identity yet, allocates the configured
/// leases and serves org.gpusession1.
///
/// Exit status: 0 stopped; 1 a command line or configuration that cannot work, not started again by
/// systemd; 2 a second signal to stop; 3 internal error. SIGSEGV, SIGBUS, SIGILL, SIGFPE and
/// SIGABRT are reported on standard error, and end it as such.
#[derive(Parser)]
#[command(name = "gpusessiond", version)]
pub struct Arguments {
    /// Configuration file; conf.d/*.toml next to it is read too
    #[arg(short, long, env = "GPUSESSION_CONF", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the configuration, report its errors, and exit
    #[arg(long)]
    pub check_config: bool,
    /// Write the variables of [environment] to /run/gpusession/environment for logins, and exit
    ///
    /// The service does it as root, since logins take variables from root's files only.
    #[arg(long, conflicts_with = "check_config")]
    pub write_environment: bool,
}
