//! Notices at the shells' next prompt: a file per uid, with one line per notice.
//!
//! Shell drop-ins show a file once after each change. Only users with a login session have one, and
//! only while there is a notice.
//!
//! For csh, which cannot read a file without a fork, the lines are also the names of the files in a
//! folder.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use tokio::time::{Instant, sleep_until};
use tracing::warn;

use crate::leases::{Change, LeaseFacts, LeaseState, Leases, Slot, Snapshot, warning};
use crate::paths;

/// Longest file name in bytes.
const NAME_MAX: usize = 255;

/// Time that the notice of a lost lease stays after its replacement.
const NOTICE_TTL: Duration = Duration::from_secs(600);

/// Writes notices while the lease manager runs.
pub async fn follow(leases: Arc<dyn Leases>, folder: PathBuf) {
    let mut files = Files::new(folder);
    let mut news = News::default();
    let mut updates = leases.updates();
    let mut last = None;
    loop {
        let over = async {
            match news.next_end() {
                Some(end) => sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        let changes = tokio::select! {
            update = updates.recv() => match update {
                Some(update) => {
                    last = Some(update.snapshot);
                    update.changes
                }
                None => return,
            },
            () = over => Vec::new(),
        };
        if let Some(snapshot) = &last {
            files.show(&news.after(&changes, snapshot, Instant::now()));
        }
    }
}

struct ShownNotice {
    text: String,
    /// A warning about idleness, which parking makes obsolete too.
    idle: bool,
}

/// Notices that are valid now.
#[derive(Default)]
struct News {
    said: BTreeMap<Slot, ShownNotice>,
    /// Notices of lost leases for the time after their replacement, and when they end once it
    /// exists.
    replaced: BTreeMap<Slot, (String, Option<Instant>)>,
    /// States of the leases at the latest update.
    states: BTreeMap<Slot, LeaseState>,
}

fn called(lease: &LeaseFacts) -> &str {
    if lease.spec.name.is_empty() { &lease.id } else { &lease.spec.name }
}

impl News {
    /// Applies changes and returns each user's lines.
    fn after(&mut self, changes: &[Change], snapshot: &Snapshot, now: Instant) -> BTreeMap<u32, Vec<String>> {
        let find = |slot: Slot| snapshot.lease_facts().find(|l| l.slot == slot);
        self.replaced.retain(|_, (_, end)| end.is_none_or(|end| end > now));
        for change in changes {
            match change {
                Change::PrepareForLoss { slot, left, reason, idle } => {
                    if let Some(lease) = find(*slot) {
                        let name = called(lease);
                        let text = format!("GPU lease {name}: {}", warning(*left, reason));
                        self.said.insert(*slot, ShownNotice { text, idle: *idle });
                    }
                }
                Change::Lost { slot, reason, .. } => {
                    if let Some(lease) = find(*slot) {
                        let name = called(lease);
                        let text =
                            format!("GPU lease {name} is lost: {reason}; the daemon asks for another one");
                        self.said.insert(*slot, ShownNotice { text, idle: false });
                        // The replacement often comes before the user looks and wonders why a
                        // program ended.
                        let text = format!(
                            "GPU lease {name} was lost: {reason}; programs that are started now have another one"
                        );
                        self.replaced.insert(*slot, (text, None));
                    }
                }
                // In use again, or held again: the warning is obsolete. Another change of an active
                // lease, such as of a time that its server reports, leaves the warning.
                Change::Granted { slot } | Change::Changed { slot } => {
                    let state = find(*slot).map(|l| l.state);
                    let granted = matches!(change, Change::Granted { .. });
                    let again = granted || self.states.get(slot) != Some(&LeaseState::Active);
                    if state == Some(LeaseState::Parked) && self.said.get(slot).is_some_and(|said| said.idle)
                    {
                        self.said.remove(slot);
                    }
                    if state.is_none_or(|state| state == LeaseState::Active) {
                        if again || state.is_none() {
                            self.said.remove(slot);
                        }
                        if let Some((_, end)) = self.replaced.get_mut(slot) {
                            end.get_or_insert(now + NOTICE_TTL);
                        }
                    }
                }
                Change::Removed { slot, .. } | Change::Failed { slot, .. } => {
                    self.said.remove(slot);
                    self.replaced.remove(slot);
                }
                Change::New { .. } | Change::Stock { .. } | Change::Server { .. } => {}
            }
        }
        self.states = snapshot.lease_facts().map(|lease| (lease.slot, lease.state)).collect();
        let mut lines: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for lease in snapshot.lease_facts() {
            let Some(line) = self.line(lease) else { continue };
            for uid in readers(lease, snapshot) {
                lines.entry(uid).or_default().push(format!("gpusession: {line}"));
            }
        }
        lines
    }

    /// Returns when the next notice expires without any change.
    fn next_end(&self) -> Option<Instant> {
        self.replaced.values().filter_map(|(_, end)| *end).min()
    }

    fn line(&self, lease: &LeaseFacts) -> Option<String> {
        let waits = lease.waits();
        if let Some(said) = self.said.get(&lease.slot) {
            return Some(said.text.clone());
        }
        if let Some((position, length)) = waits.and_then(|t| t.place) {
            let word = if lease.state == LeaseState::Parked { "is parked and waits" } else { "waits" };
            return Some(format!("GPU lease {} {word}, position {position} of {length}", called(lease)));
        }
        if let Some((was, _)) = self.replaced.get(&lease.slot).filter(|_| lease.state != LeaseState::Pending)
        {
            return Some(was.clone());
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

/// Returns the users whom a lease concerns: its owner, or all users who are logged in.
fn readers(lease: &LeaseFacts, snapshot: &Snapshot) -> BTreeSet<u32> {
    let here = snapshot.sessions.iter().map(|s| s.uid);
    here.filter(|uid| lease.uid == u32::MAX || lease.uid == *uid).collect()
}

struct Files {
    folder: PathBuf,
    shown: BTreeMap<u32, Vec<String>>,
    failing: bool,
}

impl Files {
    /// Removes the notices of an earlier daemon.
    fn new(folder: PathBuf) -> Self {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path()).or_else(|_| fs::remove_dir_all(entry.path()));
        }
        Self { folder, shown: BTreeMap::new(), failing: false }
    }

    fn remove(&self, uid: u32) {
        let _ = fs::remove_file(self.folder.join(uid.to_string()));
        let _ = fs::remove_dir_all(self.folder.join(folder_of(uid)));
    }

    fn show(&mut self, lines: &BTreeMap<u32, Vec<String>>) {
        for uid in self.shown.keys().filter(|uid| !lines.contains_key(uid)) {
            self.remove(*uid);
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
                Err(error) => {
                    // No partial notice, and none that can no longer be updated.
                    self.remove(*uid);
                    self.shown.remove(uid);
                    if !std::mem::replace(&mut self.failing, true) {
                        warn!(
                            "{}: cannot write notices: {error}; prompts do not show them",
                            self.folder.display()
                        );
                    }
                }
            }
        }
    }
}

fn write(folder: &Path, uid: u32, lines: &[String]) -> io::Result<()> {
    let lines: Vec<String> = lines.iter().map(|line| line.replace(char::is_control, " ")).collect();
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    paths::publish(&folder.join(uid.to_string()), text.as_bytes())?;

    let (names, new) = (folder.join(folder_of(uid)), folder.join(format!(".{uid}.lines.new")));
    let _ = fs::remove_dir_all(&new);
    fs::create_dir(&new)?;
    // The daemon's umask is strict.
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
    for line in &lines {
        fs::write(new.join(file_name(line)), "")?;
    }
    // A shell that reads meanwhile sees either the old lines or the new ones.
    match renameat2(AT_FDCWD, &new, AT_FDCWD, &names, RenameFlags::RENAME_EXCHANGE) {
        Ok(()) => fs::remove_dir_all(&new),
        Err(_) => fs::rename(&new, &names),
    }
}

/// Name of the folder whose files' names are a user's lines.
fn folder_of(uid: u32) -> String {
    format!("{uid}.lines")
}

/// Converts a line to a file name, cut at the longest name.
///
/// `echo` may interpret a backslash as an escape.
fn file_name(line: &str) -> String {
    let mut name = line.replace(['/', '\\'], "\u{2215}");
    if name.len() > NAME_MAX {
        let end = (0..=NAME_MAX - "…".len()).rev().find(|end| name.is_char_boundary(*end));
        name.truncate(end.unwrap_or(0));
        name.push('…');
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LeaseConfig;
    use crate::leases::{LeaseGauges, LeaseView, Reported, Session, Spec};
    use crate::pool::{PoolError, Trouble};

    fn lease(slot: Slot, uid: u32, state: LeaseState) -> LeaseFacts {
        let config = LeaseConfig { name: format!("l{slot}"), ..LeaseConfig::default() };
        LeaseFacts {
            slot,
            id: format!("id{slot}"),
            spec: Spec::configured(&config, 0),
            uid,
            state,
            created: Duration::ZERO,
            trouble: None,
            failures: Vec::new(),
            processes: 0,
            reported: Reported::default(),
            leader: 0,
        }
    }

    fn seen_by(leases: Vec<LeaseFacts>) -> Snapshot {
        let session = |uid| {
            Arc::new(Session {
                id: format!("s{uid}"),
                uid,
                user: String::new(),
                service: String::new(),
                tty: String::new(),
                rhost: String::new(),
                leader: 1,
                leader_start: 1,
                logind: None,
            })
        };
        let sessions = vec![session(1000), session(1001)];
        let view = |facts| LeaseView { facts, gauges: LeaseGauges::default() };
        let leases = leases.into_iter().map(view).collect();
        Snapshot { leases, sessions, ..Snapshot::default() }
    }

    #[test]
    fn users_who_are_logged_in_hear_what_concerns_them_until_it_is_over() {
        let mut news = News::default();
        let now = Instant::now();
        let everyones = lease(1, u32::MAX, LeaseState::Active);
        let anothers = lease(2, 1001, LeaseState::Active);
        let nobodys = lease(3, 1002, LeaseState::Active);
        let all = vec![everyones.clone(), anothers, nobodys];
        assert!(news.after(&[], &seen_by(all.clone()), now).is_empty());
        let left = Duration::from_secs(300);
        let warn = |slot| Change::PrepareForLoss { slot, left, reason: "idle".into(), idle: true };
        let lines = news.after(&[warn(1), warn(2), warn(3)], &seen_by(all.clone()), now);
        assert_eq!(lines[&1000], ["gpusession: GPU lease l1: idle (in 5 min)"]);
        assert_eq!(lines[&1001].len(), 2);
        assert!(!lines.contains_key(&1002), "not logged in");
        let both = [Change::Changed { slot: 1 }, Change::Changed { slot: 2 }];
        let lines = news.after(&both, &seen_by(all.clone()), now);
        assert_eq!(lines[&1001].len(), 2, "something else has changed");
        let idle = all.iter().cloned().map(|lease| LeaseFacts { state: LeaseState::Idle, ..lease });
        assert_eq!(news.after(&both, &seen_by(idle.collect()), now)[&1001].len(), 2);
        let lines = news.after(&both, &seen_by(all), now);
        assert!(lines.is_empty(), "in use again: {lines:?}");

        let mut waiting = LeaseFacts { state: LeaseState::Pending, ..everyones };
        let full = PoolError { place: Some((3, 40)), ..PoolError::new(Trouble::NoCapacity, "full") };
        waiting.trouble = Some(full);
        let lines = news.after(&[], &seen_by(vec![waiting]), now);
        assert_eq!(lines[&1000], ["gpusession: GPU lease l1 waits, position 3 of 40"]);
    }

    #[test]
    fn a_parked_lease_that_is_wanted_back_waits() {
        let (mut news, now) = (News::default(), Instant::now());
        let mut lease = lease(1, 1000, LeaseState::Active);
        let warned = |idle| Change::PrepareForLoss {
            slot: 1,
            left: Duration::ZERO,
            reason: if idle { "no GPU work for 1 h" } else { "the GPU server stops" }.into(),
            idle,
        };
        let mut line = |lease: &LeaseFacts, change| {
            let lines = news.after(&[change], &seen_by(vec![lease.clone()]), now);
            lines.get(&1000).map(|lines| lines.join("; ").replace("gpusession: GPU lease l1", ""))
        };
        assert_eq!(line(&lease, warned(true)).as_deref(), Some(": no GPU work for 1 h"));
        lease.state = LeaseState::Parked;
        let changed = || Change::Changed { slot: 1 };
        assert!(line(&lease, changed()).unwrap().starts_with(" is parked: its device memory"));
        lease.trouble =
            Some(PoolError { place: Some((1, 2)), ..PoolError::new(Trouble::NoCapacity, "full") });
        assert_eq!(line(&lease, changed()).as_deref(), Some(" is parked and waits, position 1 of 2"));
        lease.trouble = None;
        assert!(line(&lease, changed()).unwrap().starts_with(" is parked: its device memory"));
        assert_eq!(line(&lease, warned(false)).as_deref(), Some(": the GPU server stops"));
        assert_eq!(line(&lease, changed()).as_deref(), Some(": the GPU server stops"), "that is not over");
        lease.state = LeaseState::Active;
        assert_eq!(line(&lease, changed()), None);
    }

    #[test]
    fn a_lost_lease_is_spoken_of_when_there_is_another_one() {
        let (mut news, begin) = (News::default(), Instant::now() + 2 * NOTICE_TTL);
        let held = lease(1, u32::MAX, LeaseState::Active);
        let wanted = LeaseFacts { state: LeaseState::Pending, ..held.clone() };
        let lost = [Change::Lost { slot: 1, id: "id1".into(), reason: "gone".into() }];
        let lines = news.after(&lost, &seen_by(vec![wanted]), begin - 2 * NOTICE_TTL);
        assert_eq!(lines[&1000], ["gpusession: GPU lease l1 is lost: gone; the daemon asks for another one"]);
        let was = "gpusession: GPU lease l1 was lost: gone; programs that are started now have another one";
        for changes in [vec![Change::Granted { slot: 1 }], vec![Change::Changed { slot: 1 }]] {
            assert_eq!(news.after(&changes, &seen_by(vec![held.clone()]), begin)[&1000], [was]);
        }
        let end = news.next_end().unwrap();
        assert_eq!(end, begin + NOTICE_TTL);
        assert!(news.after(&[], &seen_by(vec![held]), end).is_empty() && news.next_end().is_none());
    }

    #[test]
    fn a_file_is_there_for_as_long_as_there_is_something_to_say() {
        let folder = tempfile::tempdir().unwrap();
        let notices = folder.path().join("notice");
        fs::create_dir(&notices).unwrap();
        fs::write(notices.join("1000"), "of an earlier daemon").unwrap();
        let mut files = Files::new(notices.clone());
        assert!(!notices.join("1000").exists());
        files.show(&BTreeMap::from([(1000, vec!["one\u{1b}[31m".into(), "two".into()])]));
        assert_eq!(
            fs::read_to_string(notices.join("1000")).unwrap(),
            "one [31m\ntwo\n",
            "no control characters"
        );
        assert_eq!(fs::metadata(notices.join("1000")).unwrap().permissions().mode() & 0o777, 0o644);
        assert_eq!(fs::read_dir(&notices).unwrap().count(), 2, "and one for csh");
        files.show(&BTreeMap::new());
        assert_eq!(fs::read_dir(&notices).unwrap().count(), 0);
    }

    #[test]
    fn csh_shows_a_line_whatever_is_in_it() {
        let lines = [
            "gpusession: !! !$ !-1 wow!",
            "gpusession: $HOME ${HOME} $(id) `id` $$",
            "gpusession: * ? [a-z] {a,b} ~ ; & | > < ( ) # ^x^y %1 \"q\"",
            "gpusession: -n",
            "gpusession: it's 'two'' quotes'",
            "gpusession: ä €",
        ];
        let folder = tempfile::tempdir().unwrap();
        for text in ["an earlier one", "two\nlines", &lines.join("\n")] {
            write(folder.path(), 7, &text.lines().map(String::from).collect::<Vec<_>>()).unwrap();
            let names = fs::read_dir(folder.path().join(folder_of(7))).unwrap();
            assert_eq!(names.count(), text.lines().count());
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left over");
        // As at a prompt: history is on, and the process limit prevents a fork.
        let script = format!(
            "set history = 9 prompt; set prompt; limit maxproc 0; set __gpusession_said = (); \
             set __gpusession_folder = {}; source {}/../profile.d/notice.csh",
            folder.path().join(folder_of(7)).display(),
            env!("CARGO_MANIFEST_DIR"),
        );
        match std::process::Command::new("tcsh").args(["-f", "-c", &script]).output() {
            Ok(done) => {
                let said = String::from_utf8_lossy(&done.stdout);
                assert_eq!(said.lines().collect::<BTreeSet<_>>(), BTreeSet::from(lines), "{done:?}");
            }
            Err(_) => assert!(std::env::var("REQUIRE_SHELLS").as_deref() != Ok("1"), "tcsh is not there"),
        }
        assert_eq!(file_name("1/2 a\\b"), "1\u{2215}2 a\u{2215}b");
        let long = file_name(&"€".repeat(1000));
        assert!(long.len() <= NAME_MAX && long.len() > NAME_MAX - 4 && long.ends_with("€…"), "{long}");
    }
}
