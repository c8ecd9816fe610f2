//! Releases of leases that were requested without the daemon, also while their server is down.
//!
//! A release that no server confirmed is a file in the folder `releases` beside the identity. Each
//! later command that connects to servers with that identity repeats it.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use gpusessiond::client::Remote;
use gpusessiond::identity::{Home, Identity};
use gpusessiond::pool::{PoolServer as _, Trouble};

use crate::exit::{Failure, Result, code};
use crate::lease_file::{Empty, LeaseFile};

/// Time that a server has to answer.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(3);
/// Most releases that are repeated at a time, and kept.
const MAX_PENDING: usize = 64;

fn folder(home: &Home) -> PathBuf {
    home.identity.with_file_name("releases")
}

/// Releases the lease at the servers of its file.
///
/// Returns the reason if a server did not answer within 3 s. The release is repeated later then.
pub async fn release(file: &LeaseFile) -> Result<Option<String>> {
    let home = Home::of_caller();
    let identity = home.load().map_err(|e| Failure::of_identity(&e))?;
    let (trouble, ()) = tokio::join!(attempt(&identity, file), repeat(&home, &identity));
    let trouble = trouble?;
    if trouble.is_some() {
        keep(&home, file)?;
    }
    Ok(trouble)
}

async fn attempt(identity: &Identity, file: &LeaseFile) -> Result<Option<String>> {
    let mut trouble = None;
    for address in &file.servers {
        let remote = Remote::new(address, identity).map_err(|e| Failure::of_pool(&e))?;
        match tokio::time::timeout(RELEASE_TIMEOUT, remote.release(file.id.clone())).await {
            Ok(Ok(())) => {}
            // Another command released it, or it expired.
            Ok(Err(error)) if error.trouble == Trouble::NoSuchLease => {}
            Ok(Err(error)) if error.trouble == Trouble::Unreachable => trouble = Some(error.message),
            Ok(Err(error)) => return Err(Failure::of_pool(&error)),
            Err(_) => {
                trouble = Some(format!("{address} did not answer within {} s", RELEASE_TIMEOUT.as_secs()))
            }
        }
    }
    Ok(trouble)
}

fn keep(home: &Home, file: &LeaseFile) -> Result<()> {
    let folder = folder(home);
    let failed = |error: std::io::Error| {
        Failure::new(code::FAILED, format!("{}: cannot note the release: {error}", folder.display()))
            .hint("release the lease again when its server answers")
    };
    fs::create_dir_all(&folder).map_err(failed)?;
    if pending(home).len() >= MAX_PENDING {
        return Err(failed(std::io::Error::other(format!("{MAX_PENDING} releases wait there already"))));
    }
    // A lease's id comes from a file that the user may have edited.
    let name: String = file.id.chars().filter(char::is_ascii_alphanumeric).take(64).collect();
    let path = folder.join(name + ".toml");
    // The same release may wait already.
    let _ = fs::remove_file(&path);
    file.store(Empty::make(&path)?)
}

fn pending(home: &Home) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder(home)).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "toml")).collect()
}

/// Repeats the releases that wait for their server.
pub async fn repeat(home: &Home, identity: &Identity) {
    let files: Vec<_> = pending(home).into_iter().take(MAX_PENDING).collect();
    let attempts = files.into_iter().map(|path| {
        let identity = identity.clone();
        tokio::spawn(async move {
            // A server that refuses the release will refuse it again; the lease expires there.
            let over = match LeaseFile::load(&path) {
                Ok(file) => !matches!(attempt(&identity, &file).await, Ok(Some(_))),
                Err(_) => true,
            };
            if over {
                let _ = fs::remove_file(&path);
            }
        })
    });
    for attempt in attempts.collect::<Vec<_>>() {
        let _ = attempt.await;
    }
}

/// Repeats them beside another command's work.
pub fn repeat_meanwhile(home: Home, identity: Identity) {
    if !pending(&home).is_empty() {
        tokio::spawn(async move { repeat(&home, &identity).await });
    }
}
