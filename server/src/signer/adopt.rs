//! The one move of authorities and join tokens from the server's state directory to the signer.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use data_encoding::HEXLOWER;
use nix::libc;
use nix::unistd::{UnlinkatFlags, unlinkat};
use tracing::info;

use super::authorities::Authorities;
use super::ca::AuthorityError;
use super::link::{Link, read_tokens};
use super::operation::{Operation, Refused, Why};
use crate::as_owner::as_owner_of;
use crate::clock::{Clock, SystemClock, SystemRandom};

/// Join tokens in one message.
const TOKENS_AT_ONCE: usize = 50;
/// Files of the authorities; the key goes last, since it marks them as complete.
const FILES: [&str; 5] = ["rotation.json", "next.key", "next.pem", "authority.pem", "authority.key"];

/// Moves what an earlier version kept in the state directory; returns whether there was any.
///
/// Root calls it, before the server starts. The server owns the folder, and a process of its user
/// may still run, so that no link is followed there.
pub fn adopt(link: &Link, state_dir: &Path) -> Result<bool, Refused> {
    let failed = |path: &Path, e: io::Error| Refused::new(Why::Failed, format!("{}: {e}", path.display()));
    let Some(state) = folder(state_dir).map_err(|e| failed(state_dir, e))? else { return Ok(false) };
    let path = inside(&state).join("ca");
    let Some(ca) = folder(&path).map_err(|e| failed(&state_dir.join("ca"), e))? else { return Ok(false) };
    let unix = SystemClock.unix();
    // Nor does a link inside the folders lead to what the server cannot read.
    let owner = || as_owner_of(&inside(&state)).map_err(|e| failed(state_dir, e));
    let present = {
        let _owner = owner()?;
        match Authorities::read(&inside(&ca), unix, &SystemRandom) {
            Ok(present) => present,
            Err(AuthorityError::Missing(_)) => return Ok(false),
            Err(e) => return Err(e.into()),
        }
    };
    let old = present.old().fingerprint();
    match link.present() {
        Err(refused) if refused.why == Why::Missing => {
            let mut tokens = {
                let _owner = owner()?;
                read_tokens(&inside(&state).join("tokens.json"))?
            };
            tokens.complete(&HEXLOWER.encode(&old));
            for part in tokens.parts(TOKENS_AT_ONCE) {
                link.ask(Operation::AdoptTokens(part))?;
            }
            link.ask(Operation::Adopt { exported: present.export(), rotation: present.rotation() })?;
        }
        // The rest of a move that was interrupted.
        Ok(there) if there.find(&old).is_some() => {}
        Ok(_) => {
            let text = format!(
                "{}: holds another authority than the signer; move the folder away if the pool does not use it",
                state_dir.join("ca").display()
            );
            return Err(Refused::new(Why::Exists, text));
        }
        Err(refused) => return Err(refused),
    }
    remove(&state, "tokens.json", UnlinkatFlags::NoRemoveDir)?;
    for name in FILES {
        remove(&ca, name, UnlinkatFlags::NoRemoveDir)?;
    }
    // Other files are the administrator's, and keep the folder.
    let _ = unlinkat(state.as_fd(), "ca", UnlinkatFlags::RemoveDir);
    info!("the pool's authority {}: moved from {} to the signer", HEXLOWER.encode(&old), state_dir.display());
    Ok(true)
}

/// Opens a folder, which is no link.
fn folder(path: &Path) -> io::Result<Option<File>> {
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
    match fs::OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(folder) => Ok(Some(folder)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Returns a path into an open folder, wherever its name leads meanwhile.
fn inside(folder: &File) -> PathBuf {
    format!("/proc/self/fd/{}", folder.as_raw_fd()).into()
}

fn remove(folder: &File, name: &str, flags: UnlinkatFlags) -> Result<(), Refused> {
    match unlinkat(folder.as_fd(), name, flags) {
        Ok(()) | Err(nix::errno::Errno::ENOENT) => Ok(()),
        Err(e) => Err(Refused::new(Why::Failed, format!("{name} of the server's state: not removed: {e}"))),
    }
}
