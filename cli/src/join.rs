//! `join`: gives this machine or this user an identity in a pool.

use std::os::fd::AsRawFd as _;
use std::path::Path;

use clap::Args;
use gpusession_diagnosis::machine::Machine;
use gpusessiond::client;
use gpusessiond::identity::{self, Home};
use gpusessiond::units::control_address;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::Mode;
use serde_json::json;

use crate::exit::{Failure, Result, code};
use crate::print;

/// Unit of the machine's daemon.
const UNIT: &str = "gpusession.service";

#[derive(Args)]
pub struct Join {
    /// Server of the pool, and the token that `gpuserver token create` printed there. Without a
    /// token argument, the token is read from standard input, which keeps it out of process
    /// listings
    #[arg(value_name = "HOST[:PORT]|TOKEN", num_args = 0..=2)]
    where_and_token: Vec<String>,
    /// Server of the pool
    #[arg(long, value_name = "HOST[:PORT]")]
    server: Option<String>,
    /// Name in the pool [default: this host's name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Join as this user even if root
    #[arg(long)]
    user: bool,
    /// Also enable the machine's daemon for the next boots, and start it; only for root
    #[arg(long, conflicts_with = "user")]
    now: bool,
}

/// Joins, and prints the name in the pool.
pub async fn join(join: Join, json: bool) -> Result<i32> {
    let (tokens, hosts): (Vec<_>, Vec<_>) =
        join.where_and_token.into_iter().partition(|text| text.starts_with("gpsj-") || text == "-");
    let mut hosts = hosts.into_iter().chain(join.server);
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return Err(Failure::usage("join takes one server of the pool: gpusession join HOST[:PORT]"));
    };
    let address = control_address(&host).map_err(Failure::usage)?;
    let root = nix::unistd::geteuid().is_root();
    let machine = Machine::here();
    if join.now {
        // A token counts once, so that a reason against the start shows first.
        startable(&machine, root)?;
    }
    let token = match tokens.into_iter().find(|t| t != "-") {
        Some(token) => token,
        None => {
            if nix::unistd::isatty(std::io::stdin()) == Ok(true) {
                eprint!("join token (`gpuserver token create` prints it): ");
            }
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).map_err(|e| Failure::new(code::FAILED, e.to_string()))?;
            line
        }
    };
    let home = if root && !join.user { Some(Home::system()) } else { Home::user() };
    let home =
        home.ok_or_else(|| Failure::new(code::CONFIGURATION, "HOME is not set: no place for an identity"))?;
    if home.exists() {
        let message = format!("{} has an identity already", home.identity.display());
        return Err(Failure::new(code::CONFIGURATION, message).hint("`gpusession leave` removes it"));
    }
    let joined = identity::join_pool(&home, &address, &token, join.name.as_deref(), client::join)
        .await
        .map_err(|e| Failure::of_identity(&e))?;
    if root && !join.user {
        give_to_daemon(&home.identity);
    }
    if join.now {
        machine.enable_now(UNIT).map_err(|why| {
            Failure::new(code::FAILED, format!("joined the pool as {}, but {why}", joined.name))
                .hint("`journalctl -u gpusession` shows why; `systemctl enable --now gpusession` tries again")
        })?;
    }
    if json {
        print(&json!({ "schema": 1, "name": joined.name, "servers": joined.servers }).to_string());
    } else {
        print(&format!("joined the pool as {}; servers: {}", joined.name, joined.servers.join(", ")));
    }
    Ok(0)
}

/// Checks that this caller can start the machine's daemon.
fn startable(machine: &Machine, root: bool) -> Result<()> {
    if !root {
        return Err(Failure::usage("--now starts the machine's daemon, which only root does: leave it out"));
    }
    machine.has_unit(UNIT).map_err(|why| {
        Failure::new(code::CONFIGURATION, why).hint("leave --now out, and start gpusessiond yourself")
    })
}

/// Gives the identity to the daemon's user, which has to read it.
///
/// The folder may be that user's, who may have put links there: none is followed.
fn give_to_daemon(folder: &Path) {
    let Ok(Some(user)) = nix::unistd::User::from_name("gpusession") else { return };
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let given = nix::fcntl::open(folder, flags, Mode::empty()).and_then(|open| {
        let names = std::fs::read_dir(format!("/proc/self/fd/{}", open.as_raw_fd()));
        for name in names.into_iter().flatten().flatten().map(|entry| entry.file_name()) {
            let no_link = AtFlags::AT_SYMLINK_NOFOLLOW;
            nix::unistd::fchownat(&open, name.as_os_str(), Some(user.uid), Some(user.gid), no_link)?;
        }
        nix::unistd::fchown(&open, Some(user.uid), Some(user.gid))
    });
    if let Err(error) = given {
        eprintln!(
            "gpusession: {}: not given to the daemon's user: {error}; move it away and join again",
            folder.display()
        );
    }
}

#[cfg(test)]
mod tests {
    use gpusession_diagnosis::testing::{plant, program};

    use super::*;

    #[test]
    fn only_root_starts_the_daemon_and_only_where_systemd_has_it() {
        let root = tempfile::tempdir().unwrap();
        let machine = Machine::below(root.path());
        assert_eq!(startable(&machine, false).unwrap_err().code, code::USAGE);
        assert_eq!(startable(&machine, true).unwrap_err().code, code::CONFIGURATION);
        plant(&root, "run/systemd/system/.keep", "");
        program(&root, "systemctl", "echo loaded");
        assert_eq!(startable(&machine, true), Ok(()));
    }
}
