//! What users are told at their shells' next prompt: a file for each uid, with one line for each thing to know.
//!
//! Shell drop-ins show a file once whenever it has changed. Only users with a login session get one; it goes when there is
//! nothing left to say.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::warn;

use crate::leases::{Change, LeaseState, LeaseView, Leases, Slot, Snapshot, Update};
use crate::values::human_duration;

/// Writes notices for as long as the lease manager runs.
pub async fn follow(leases: Arc<dyn Leases>, folder: PathBuf) {
    let mut files = Files::new(folder);
    let mut news = News::default();
    let mut updates = leases.updates();
    while let Some(update) = updates.recv().await {
        files.show(&news.after(&update));
    }
}

/// What has been said of leases and still holds.
#[derive(Default)]
struct News {
    said: BTreeMap<Slot, String>,
}

fn called(lease: &LeaseView) -> &str {
    if lease.spec.name.is_empty() { &lease.id } else { &lease.spec.name }
}

impl News {
    /// The lines of each user after an update.
    fn after(&mut self, update: &Update) -> BTreeMap<u32, Vec<String>> {
        let find = |slot: Slot| update.snapshot.leases.iter().find(|l| l.slot == slot);
        for change in &update.changes {
            match change {
                Change::PrepareForLoss { slot, left, reason } => {
                    if let Some(lease) = find(*slot) {
                        let (name, left) = (called(lease), human_duration(*left));
                        self.said.insert(*slot, format!("GPU lease {name} ends in {left}: {reason}"));
                    }
                }
                Change::Lost { slot, reason, .. } => {
                    if let Some(lease) = find(*slot) {
                        let name = called(lease);
                        let text =
                            format!("GPU lease {name} is lost: {reason}; another one is being asked for");
                        self.said.insert(*slot, text);
                    }
                }
                // In use again, or held again: the warning is over.
                Change::Granted { slot } | Change::Changed { slot } => {
                    if find(*slot).is_none_or(|l| l.state == LeaseState::Active) {
                        self.said.remove(slot);
                    }
                }
                Change::Removed { slot, .. } | Change::Failed { slot, .. } => drop(self.said.remove(slot)),
                Change::New { .. } | Change::Stock { .. } | Change::Server { .. } => {}
            }
        }
        let mut lines: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for lease in &update.snapshot.leases {
            let Some(line) = self.line(lease) else { continue };
            for uid in readers(lease, &update.snapshot) {
                lines.entry(uid).or_default().push(format!("gpusession: {line}"));
            }
        }
        lines
    }

    fn line(&self, lease: &LeaseView) -> Option<String> {
        let waits = lease.trouble.as_ref().filter(|_| lease.state == LeaseState::Pending);
        if let (Some(place), false) = (waits.and_then(|t| t.place), self.said.contains_key(&lease.slot)) {
            let (position, length) = place;
            return Some(format!("GPU lease {} waits, position {position} of {length}", called(lease)));
        }
        if let Some(said) = self.said.get(&lease.slot) {
            return Some(said.clone());
        }
        match lease.state {
            LeaseState::Parked => Some(format!(
                "GPU lease {} is parked: its device memory is in the server's host memory until the next CUDA call",
                called(lease)
            )),
            _ => waits.map(|trouble| format!("GPU lease {} waits: {}", called(lease), trouble.message)),
        }
    }
}

/// Whom a lease concerns: its owner, or everyone who is logged in.
fn readers(lease: &LeaseView, snapshot: &Snapshot) -> BTreeSet<u32> {
    let here = snapshot.sessions.iter().map(|s| s.uid);
    here.filter(|uid| lease.uid == u32::MAX || lease.uid == *uid).collect()
}

struct Files {
    folder: PathBuf,
    shown: BTreeMap<u32, Vec<String>>,
    failing: bool,
}

impl Files {
    /// Notices of an earlier daemon are void.
    fn new(folder: PathBuf) -> Self {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path());
        }
        Self { folder, shown: BTreeMap::new(), failing: false }
    }

    fn show(&mut self, lines: &BTreeMap<u32, Vec<String>>) {
        for uid in self.shown.keys().filter(|uid| !lines.contains_key(uid)) {
            let _ = fs::remove_file(self.folder.join(uid.to_string()));
        }
        self.shown.retain(|uid, _| lines.contains_key(uid));
        for (uid, lines) in lines {
            if self.shown.get(uid) == Some(lines) {
                continue;
            }
            match write(&self.folder, *uid, lines) {
                Ok(()) => {
                    self.failing = false;
                    self.shown.insert(*uid, lines.clone());
                }
                Err(error) if !self.failing => {
                    warn!("{}: {error}: prompts show no notices", self.folder.display());
                    self.failing = true;
                }
                Err(_) => {}
            }
        }
    }
}

/// Written beside and renamed, so that no prompt reads half of it.
fn write(folder: &Path, uid: u32, lines: &[String]) -> io::Result<()> {
    if !folder.exists() {
        fs::create_dir_all(folder)?;
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
    }
    let text: String =
        lines.iter().map(|line| format!("{}\n", line.replace(char::is_control, " "))).collect();
    let new = folder.join(format!(".{uid}.new"));
    fs::write(&new, text)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o644))?;
    fs::rename(new, folder.join(uid.to_string()))
}
