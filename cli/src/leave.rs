//! `leave`: the opposite of `join`, on this machine.

use std::fs;
use std::io;
use std::path::Path;

use gpusessiond::identity::Home;
use gpusessiond::paths;
use serde_json::json;

use crate::daemon;
use crate::exit::{Failure, Result, code};
use crate::setup::Outcome;

/// Removes the identity, and the daemon's state under it.
///
/// The addresses of the servers stay `for_template`.
///
/// # Errors
/// If the daemon runs, which holds leases under the identity, or if a file cannot be removed.
pub async fn leave(system: bool, for_template: bool) -> Result<Outcome> {
    let home = if system { Some(Home::system()) } else { Home::user() };
    let home =
        home.ok_or_else(|| Failure::new(code::CONFIGURATION, "HOME is not set: no place for an identity"))?;
    if system && daemon::runs().await {
        return Err(Failure::new(
            code::FAILED,
            "the daemon is running, and holds leases under this identity",
        )
        .hint("`systemctl stop gpusession` releases them"));
    }
    let there = home.identity.exists();
    if !there && !for_template {
        return Err(Failure::new(code::CONFIGURATION, "no pool to leave: no identity found"));
    }
    remove(&home.identity, |path| fs::remove_dir_all(path))?;
    if system {
        remove(&paths::state_directory().join("state.json"), |path| fs::remove_file(path))?;
    }
    // The first entry of `Home::user()` is the user's file, the second the system's.
    for servers in home.servers.iter().take(if system { 2 } else { 1 }).filter(|_| !for_template) {
        remove(servers, |path| fs::remove_file(path))?;
    }
    let text = if for_template {
        "ready to be copied: each copy joins when it starts, with the credential gpusession.token".into()
    } else {
        "left the pool; `gpuserver clients forget NAME` on the pool's authority frees the name, also for this machine"
            .to_owned()
    };
    Ok(Outcome { text, json: json!({ "schema": 1, "left": there, "template": for_template }) })
}

fn remove(path: &Path, remove: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
    match remove(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(Failure::new(code::NOT_ALLOWED, format!("{}: {error}", path.display())))
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Failure::new(code::FAILED, format!("{}: {error}", path.display())))
        }
        _ => Ok(()),
    }
}
