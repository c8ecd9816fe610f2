//! The audit trail: one line of JSON for each event, chained by hashes, in `audit/` of the state
//! directory.
//!
//! Each line carries the BLAKE3 of the line before. Each hour a line has a signature over that
//! chain by the signer, whose key the server does not have. It also goes to the journal, so that a
//! journal on another host proves a change of earlier lines.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tracing::{error, info, warn};

use crate::as_owner::as_owner_of;
use crate::certificate::day;
use crate::checkpoint::{Checkpoint, Place};
use crate::clock::wall;
use crate::text::printable;
use names::Names;

mod names;
pub mod verify;

/// Most events that wait for the disk.
const MAX_WAITING: usize = 10_000;
/// Longest line, in bytes; longer texts are cut before.
const MAX_LINE: usize = 16 << 10;
/// Longest text of an event, in characters.
const MAX_TEXT: usize = 512;
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(3600);
/// Time after which the signer is asked again.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// Hash before the first line.
const NO_LINE: &str = "0000000000000000000000000000000000000000000000000000000000000000";
const CHECKPOINT: &str = "checkpoint";
const PRUNED: &str = "pruned";
/// Has the signer sign a place.
pub type Sign = Arc<dyn Fn(Place) -> Result<Checkpoint, String> + Send + Sync>;

/// An event of the trail. Texts of clients are cut, and lose control characters.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Event {
    /// Kind of the event, such as `join`.
    pub event: String,
    /// `client NAME`, `administrator NAME`, `uid NUMBER` or `server`.
    pub actor: String,
    /// Address of the actor; empty on this host.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub from: String,
    /// Client that the event is about.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub client: String,
    /// SHA-256 of the public key with which that client joined, in hex.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub identity: String,
    /// Lease that the event is about.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub lease: String,
    /// UUIDs of its GPUs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<String>,
    /// Worker that serves the program.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub worker: String,
    /// User of the program; in the files a pseudonym, see [`names`].
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// Program that began or ended.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub program: String,
    /// Whether user and program are the client's word.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub claimed: bool,
    /// `ok`, or the code of a refusal.
    pub result: String,
    /// Further facts: a reason, or the request of an administrator.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// A line of the trail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Microseconds since 1970.
    pub time_usec: u64,
    /// Number of the line, from 1.
    pub seq: u64,
    /// Name of the server.
    pub server: String,
    /// Fields of the event, beside those of the line.
    #[serde(flatten)]
    pub event: Event,
    /// Of a checkpoint: signature over the number and the hash of the line before.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub signature: String,
    /// BLAKE3 of the line before.
    pub prev: String,
}

/// Selection of lines.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wanted {
    /// Earliest time, in seconds since 1970.
    pub since_unix: u64,
    /// Client; empty: all.
    pub client: String,
    /// Kind of event; empty: all.
    pub event: String,
    /// Lease; empty: all.
    pub lease: String,
    /// User; empty: all.
    pub user: String,
}

impl Wanted {
    fn has(&self, line: &Line) -> bool {
        let same = |wanted: &str, text: &str| wanted.is_empty() || wanted == text;
        line.time_usec / 1_000_000 >= self.since_unix
            && same(&self.client, &line.event.client)
            && same(&self.event, &line.event.event)
            && same(&self.lease, &line.event.lease)
            && same(&self.user, &line.event.user)
    }
}

/// Bounds of the trail on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// Time; zero: for ever.
    pub age: Duration,
    /// Bytes; 0: no bound.
    pub bytes: u64,
}

/// A whole trail that verifies.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// Number of lines.
    pub lines: u64,
    /// Number of the last line; 0: none.
    pub last_seq: u64,
    /// Hash of the last line.
    pub last_hash: String,
    /// Number of checkpoints with a good signature.
    pub checkpoints: u64,
    /// Number of the last line that a checkpoint proves.
    pub proved_seq: u64,
}

/// A user whose name the trail shows no more.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forgotten {
    /// Whether the trail had a pseudonym of the user.
    pub known: bool,
    /// Number of lines with the name itself, which an earlier release wrote.
    pub lines: u64,
    /// Day of the last of these lines; empty: none.
    pub last_day: String,
}

/// The first line that does not verify.
#[derive(Debug, thiserror::Error)]
#[error("{}:{line}: {why}", file.display())]
pub struct Bad {
    /// File of that line.
    pub file: PathBuf,
    /// Number of the line in the file, from 1.
    pub line: usize,
    /// Description for people.
    pub why: String,
}

fn hash(line: &[u8]) -> String {
    blake3::hash(line).to_hex().to_string()
}

/// Returns the place of a line by its number and the hash of the line before.
fn place(seq: u64, prev: &str) -> Option<Place> {
    let prev = data_encoding::HEXLOWER.decode(prev.as_bytes()).ok()?;
    Some(Place { seq, prev: prev.try_into().ok()? })
}

/// Returns a checkpoint's detail: the place that the signer signed before.
fn detail_of(before: &Place) -> String {
    format!("{} {}", before.seq, data_encoding::HEXLOWER.encode(&before.prev))
}

/// Returns the checkpoint in a line, with its place; `None`: it is of an earlier release.
fn checkpoint_in(line: &Line) -> Option<(Place, Checkpoint)> {
    let (seq, prev) = line.event.detail.split_once(' ')?;
    let before = place(seq.parse().ok()?, prev)?;
    let signature = data_encoding::HEXLOWER.decode(line.signature.as_bytes()).ok()?;
    Some((place(line.seq, &line.prev)?, Checkpoint { before, signature }))
}

fn folder(state_dir: &Path) -> PathBuf {
    state_dir.join("audit")
}

/// Returns the day of a file of the trail.
fn day_of(path: &Path) -> &str {
    path.file_stem().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Lists the files of the trail, the oldest first.
fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "jsonl") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The trail's files, which one process at a time writes.
struct Trail {
    folder: PathBuf,
    server: String,
    /// `None`: a command, which writes no checkpoint.
    sign: Option<Sign>,
    names: Mutex<Names>,
}

impl Trail {
    fn open(state_dir: &Path, server: &str, sign: Option<Sign>) -> io::Result<Self> {
        let folder = folder(state_dir);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let names = Mutex::new(Names::open(&folder)?);
        Ok(Self { folder, server: server.into(), sign, names })
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a line signed, by its number and the hash of the line before; returns detail and
    /// signature.
    fn signed(&self, seq: u64, prev: &str) -> io::Result<(String, String)> {
        let sign = self.sign.as_ref().ok_or_else(|| io::Error::other("no signer"))?;
        let place = place(seq, prev).ok_or_else(|| io::Error::other("the last line has no hash"))?;
        let Checkpoint { before, signature } = sign(place).map_err(io::Error::other)?;
        Ok((detail_of(&before), data_encoding::HEXLOWER.encode(&signature)))
    }

    /// Returns when the server wrote its last line, in seconds since 1970; 0 if it has none.
    ///
    /// A command that ran while no server did may have written later ones. Of many such lines, the
    /// earliest of the last 32 KiB counts.
    fn last_of_server(&self) -> io::Result<u64> {
        let Some(path) = files(&self.folder)?.pop() else { return Ok(0) };
        let mut file = File::open(path)?;
        let start = file.metadata()?.len().saturating_sub(2 * MAX_LINE as u64);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let lines = bytes.split(|b| *b == b'\n').rev();
        let mut usec = 0;
        for line in lines.filter_map(|line| serde_json::from_slice::<Line>(line).ok()) {
            usec = line.time_usec;
            if !line.event.actor.starts_with("uid ") {
                break;
            }
        }
        Ok(usec / 1_000_000)
    }

    /// Returns number and hash of the last line, and the file that has it.
    ///
    /// Cuts a line that a crash left incomplete: no answer depended on it.
    fn tail(&self) -> io::Result<(u64, String, Option<PathBuf>)> {
        for path in files(&self.folder)?.into_iter().rev() {
            let mut file = OpenOptions::new().read(true).write(true).open(&path)?;
            let len = file.metadata()?.len();
            let start = len.saturating_sub(2 * MAX_LINE as u64);
            file.seek(SeekFrom::Start(start))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
            if whole < bytes.len() {
                file.set_len(start + whole as u64)?;
                bytes.truncate(whole);
            }
            let Some(line) = bytes.split(|b| *b == b'\n').rfind(|line| !line.is_empty()) else { continue };
            let last: Line = serde_json::from_slice(line)
                .map_err(|e| io::Error::other(format!("{}: last line: {e}", path.display())))?;
            return Ok((last.seq, hash(line), Some(path)));
        }
        Ok((0, NO_LINE.into(), None))
    }

    /// Appends events to the disk; returns number and hash of the last line.
    fn append(&self, events: impl IntoIterator<Item = Event>, usec: u64) -> io::Result<(u64, String)> {
        let path = self.folder.join("lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
        // Commands on a stopped server write too.
        let _lock = nix::fcntl::Flock::lock(lock, nix::fcntl::FlockArg::LockExclusive)
            .map_err(|(_, errno)| io::Error::from(errno))?;
        let (mut seq, mut prev, newest) = self.tail()?;
        let mut path = self.folder.join(format!("{}.jsonl", day(usec / 1_000_000)));
        // A clock that was set back must not put lines before earlier ones.
        if let Some(newest) = newest.filter(|newest| *newest > path) {
            path = newest;
        }
        let mut events: Vec<Event> = events.into_iter().collect();
        for Event { actor, from, client, user, program, detail, .. } in &mut events {
            for text in [actor, from, client, user, program, detail] {
                *text = printable(text, MAX_TEXT);
            }
        }
        let users = events.iter_mut().map(|event| (event.client.as_str(), &mut event.user));
        self.names().hide(users, day_of(&path))?;
        let mut out = Vec::new();
        for mut event in events {
            let used_up =
                || io::Error::other(format!("{}: the last line has the highest number", path.display()));
            seq = seq.checked_add(1).ok_or_else(used_up)?;
            let mut signature = String::new();
            if event.event == CHECKPOINT {
                (event.detail, signature) = self.signed(seq, &prev)?;
            }
            let line = Line { time_usec: usec, seq, server: self.server.clone(), event, signature, prev };
            let line = serde_json::to_vec(&line).map_err(io::Error::other)?;
            prev = hash(&line);
            out.extend_from_slice(&line);
            out.push(b'\n');
        }
        let fresh = !path.exists();
        let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
        let before = file.metadata()?.len();
        let written = file.write_all(&out).and_then(|()| file.sync_data());
        if written.is_err() {
            // A full disk may have taken a part.
            let _ = file.set_len(before);
        }
        written?;
        if fresh {
            File::open(&self.folder)?.sync_all()?;
        }
        Ok((seq, prev))
    }

    /// Deletes the oldest days beyond the bounds, and notes the last hash of what is deleted.
    fn prune(&self, kept: Kept, usec: u64) -> io::Result<()> {
        let mut all = files(&self.folder)?;
        all.pop();
        let oldest =
            (!kept.age.is_zero()).then(|| day((usec / 1_000_000).saturating_sub(kept.age.as_secs())));
        let size = |path: &PathBuf| fs::metadata(path).map_or(0, |m| m.len());
        let mut bytes: u64 = files(&self.folder)?.iter().map(size).sum();
        for path in all {
            let name = day_of(&path);
            let old = oldest.as_ref().is_some_and(|oldest| name < oldest.as_str());
            if !old && (kept.bytes == 0 || bytes <= kept.bytes) {
                break;
            }
            bytes = bytes.saturating_sub(size(&path));
            let content = fs::read(&path)?;
            let last =
                content.split(|b| *b == b'\n').rfind(|line| !line.is_empty()).map_or_else(String::new, hash);
            let event = Event {
                event: PRUNED.into(),
                actor: "server".into(),
                result: "ok".into(),
                detail: format!("{name} ends with {last}"),
                ..Event::default()
            };
            // Noted first: a crash in between leaves a file that is deleted the next time.
            self.append([event], usec)?;
            fs::remove_file(&path)?;
        }
        if let Some(first) = files(&self.folder)?.first() {
            self.names().forget_before(day_of(first))?;
        }
        Ok(())
    }
}

enum Order {
    Write(Box<Event>, Option<oneshot::Sender<Result<(), String>>>),
    Prune(Kept),
    Forget { client: String, user: String, answer: oneshot::Sender<Result<bool, String>> },
    Stop,
}

/// The running server's trail. A thread of its own writes it.
#[derive(Debug)]
pub struct Audit {
    orders: mpsc::Sender<Order>,
    lost: Arc<AtomicU64>,
    failed: Arc<AtomicBool>,
    folder: PathBuf,
    /// When the server before wrote its last line, in seconds since 1970; 0 if it has none.
    before_unix: u64,
    writer: std::sync::Mutex<Option<JoinHandle<()>>>,
}

fn now_usec() -> u64 {
    wall().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}

impl Audit {
    /// Opens the trail and starts its thread.
    pub fn open(state_dir: &Path, server: &str, sign: Sign) -> io::Result<Self> {
        let trail = Trail::open(state_dir, server, Some(sign))?;
        let before_unix = trail.last_of_server()?;
        let (orders, waiting) = mpsc::channel(MAX_WAITING);
        let (lost, failed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (folder, shared) = (trail.folder.clone(), (lost.clone(), failed.clone()));
        let writer = std::thread::Builder::new()
            .name("audit".into())
            .spawn(move || write(&trail, waiting, &shared.0, &shared.1))?;
        Ok(Self { orders, lost, failed, folder, before_unix, writer: std::sync::Mutex::new(Some(writer)) })
    }

    /// Notes an event soon. Events beyond [`MAX_WAITING`] are lost, and their number is noted.
    pub fn note(&self, event: Event) {
        if self.orders.try_send(Order::Write(Box::new(event), None)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts events that their sender has lost.
    pub fn lose(&self, events: u64) {
        self.lost.fetch_add(events, Ordering::Relaxed);
    }

    /// Returns when the event is on the disk.
    pub async fn sure(&self, event: Event) -> Result<(), String> {
        let (told, answer) = oneshot::channel();
        let ended = || "the audit trail's thread has ended".to_owned();
        self.orders.send(Order::Write(Box::new(event), Some(told))).await.map_err(|_| ended())?;
        answer.await.unwrap_or_else(|_| Err(ended()))
    }

    /// Forgets a user's name: later answers show a pseudonym in lines up to now.
    pub async fn forget(&self, client: String, user: String) -> Result<Forgotten, String> {
        let (answer, forgotten) = oneshot::channel();
        let ended = || "the audit trail's thread has ended".to_owned();
        let until_usec = now_usec();
        let order = Order::Forget { client: client.clone(), user: user.clone(), answer };
        self.orders.send(order).await.map_err(|_| ended())?;
        let known = forgotten.await.unwrap_or_else(|_| Err(ended()))?;
        // Beside the trail's thread, for which joins wait.
        let folder = self.folder.clone();
        let left = tokio::task::spawn_blocking(move || left_of(&folder, known, &client, &user, until_usec));
        left.await.map_err(|e| e.to_string())?.map_err(|e| e.to_string())
    }

    /// Returns `true` if the latest write succeeded.
    pub fn works(&self) -> bool {
        !self.failed.load(Ordering::Relaxed)
    }

    /// Deletes the oldest days beyond the bounds.
    pub fn prune(&self, kept: Kept) {
        let _ = self.orders.try_send(Order::Prune(kept));
    }

    /// Returns the latest lines that are wanted, at most `most`.
    pub fn list(&self, wanted: &Wanted, most: usize) -> io::Result<Vec<Line>> {
        list_in(&self.folder, wanted, most)
    }

    /// Returns when the server before wrote its last line, in seconds since 1970; 0 if it has none.
    pub fn before_unix(&self) -> u64 {
        self.before_unix
    }

    /// Returns the leases that events of this kind are about, since a time in seconds since 1970.
    pub fn leases(&self, event: &str, since_unix: u64) -> io::Result<HashSet<String>> {
        let wanted = Wanted { event: event.into(), since_unix, ..Wanted::default() };
        let mut leases = HashSet::new();
        visit(&self.folder, &wanted, |line| {
            leases.insert(line.event.lease);
        })?;
        Ok(leases)
    }

    /// Writes what waits and a last checkpoint, and ends the thread.
    pub async fn close(&self) {
        let _ = self.orders.send(Order::Stop).await;
        let writer = self.writer.lock().ok().and_then(|mut writer| writer.take());
        if let Some(writer) = writer {
            let _ = tokio::task::spawn_blocking(move || writer.join()).await;
        }
    }
}

/// Writes orders until the server stops, in batches.
fn write(trail: &Trail, mut orders: mpsc::Receiver<Order>, lost: &AtomicU64, failed: &AtomicBool) {
    let mut due = now_usec() + CHECKPOINT_INTERVAL.as_micros() as u64;
    let mut since = false;
    loop {
        let Some(first) = orders.blocking_recv() else { return };
        let (mut events, mut told, mut prune, mut stop) = (Vec::new(), Vec::new(), None, false);
        let mut forget = Vec::new();
        let mut next = Some(first);
        while let Some(order) = next {
            match order {
                Order::Write(event, answer) => {
                    events.push(*event);
                    told.extend(answer);
                }
                Order::Prune(kept) => prune = Some(kept),
                Order::Forget { client, user, answer } => forget.push((client, user, answer)),
                Order::Stop => stop = true,
            }
            next = orders.try_recv().ok();
        }
        let gone = lost.swap(0, Ordering::Relaxed);
        if gone > 0 {
            events.push(Event { detail: format!("{gone} events"), ..own("audit-lost") });
        }
        since |= !events.is_empty();
        let usec = now_usec();
        let done = if events.is_empty() { Ok(()) } else { trail.append(events, usec).map(drop) };
        failed.store(done.is_err(), Ordering::Relaxed);
        if let Err(e) = &done {
            error!("audit trail: {}: cannot be written: {e}", trail.folder.display());
        }
        for told in told {
            let _ = told.send(done.as_ref().copied().map_err(ToString::to_string));
        }
        for (client, user, answer) in forget {
            let _ = answer.send(trail.names().forget(&client, &user).map_err(|e| e.to_string()));
        }
        // After the answers, which wait for no signer.
        if since && (usec >= due || stop) {
            let pause = match trail.append([own(CHECKPOINT)], usec) {
                Ok((seq, hash)) => {
                    since = false;
                    info!("audit trail: checkpoint: line {seq} has the hash {hash}");
                    CHECKPOINT_INTERVAL
                }
                Err(e) => {
                    warn!("audit trail: no checkpoint: {e}");
                    RETRY_INTERVAL
                }
            };
            due = usec + pause.as_micros() as u64;
        }
        if let Some(kept) = prune
            && let Err(e) = trail.prune(kept, usec)
        {
            warn!("audit trail: old days are not deleted: {e}");
        }
        if stop {
            return;
        }
    }
}

/// Returns an event of the server itself.
pub fn own(event: &str) -> Event {
    Event { event: event.into(), actor: "server".into(), result: "ok".into(), ..Event::default() }
}

/// Appends an event of a command on this host.
pub fn note_offline(state_dir: &Path, server: &str, event: Event) -> io::Result<()> {
    let event = Event { actor: format!("uid {}", nix::unistd::getuid()), result: "ok".into(), ..event };
    let _owner = as_owner_of(state_dir)?;
    Trail::open(state_dir, server, None)?.append([event], now_usec()).map(|_| ())
}

/// Forgets a user's name in a state directory that no server uses.
pub fn forget_offline(state_dir: &Path, server: &str, client: &str, user: &str) -> io::Result<Forgotten> {
    let _owner = as_owner_of(state_dir)?;
    let trail = Trail::open(state_dir, server, None)?;
    let known = trail.names().forget(client, user)?;
    left_of(&trail.folder, known, client, user, now_usec())
}

/// Counts the lines of earlier times that still show a user whose name is forgotten.
fn left_of(folder: &Path, known: bool, client: &str, user: &str, until_usec: u64) -> io::Result<Forgotten> {
    let mut left = Forgotten { known, lines: 0, last_day: String::new() };
    let wanted = Wanted { client: client.into(), user: user.into(), ..Wanted::default() };
    visit(folder, &wanted, |line| {
        // A later line has a new pseudonym.
        if line.time_usec < until_usec {
            left.lines += 1;
            left.last_day = day(line.time_usec / 1_000_000);
        }
    })?;
    Ok(left)
}

/// Returns the latest lines in a state directory that are wanted, at most `most`.
pub fn list(state_dir: &Path, wanted: &Wanted, most: usize) -> io::Result<Vec<Line>> {
    list_in(&folder(state_dir), wanted, most)
}

fn list_in(folder: &Path, wanted: &Wanted, most: usize) -> io::Result<Vec<Line>> {
    let mut found = std::collections::VecDeque::new();
    visit(folder, wanted, |line| {
        found.push_back(line);
        if found.len() > most {
            found.pop_front();
        }
    })?;
    Ok(found.into())
}

/// Passes each wanted line to `take`, the oldest first.
fn visit(folder: &Path, wanted: &Wanted, mut take: impl FnMut(Line)) -> io::Result<()> {
    let first = day(wanted.since_unix);
    let names = Names::open(folder)?;
    for path in files(folder)? {
        if day_of(&path) < first.as_str() {
            continue;
        }
        for line in io::BufReader::new(File::open(&path)?).split(b'\n') {
            let line = line?;
            // A line without the event's name need not be parsed, which takes ten times as long.
            let Ok(text) = std::str::from_utf8(&line) else { continue };
            if !text.contains(&wanted.event) {
                continue;
            }
            let Ok(mut line) = serde_json::from_str::<Line>(text) else { continue };
            names.show(&mut line.event.user);
            if wanted.has(&line) {
                take(line);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ring::signature::Ed25519KeyPair;

    use super::verify::SIGNED_BY_SERVER;
    use super::*;
    use crate::signer::checkpoints::Checkpoints;

    const DAY: u64 = 24 * 3600 * 1_000_000;
    const T: u64 = 20_000 * DAY;

    fn join(client: &str) -> Event {
        Event {
            event: "join".into(),
            actor: format!("client {client}"),
            client: client.into(),
            ..own("join")
        }
    }

    /// A signer below a state directory.
    fn checkpoints(state: &Path) -> Checkpoints {
        Checkpoints::open(&state.join("key"), &state.join("latest")).unwrap()
    }

    fn signer(state: &Path) -> Sign {
        let signer = checkpoints(state);
        Arc::new(move |place| signer.sign(place).map_err(|e| e.to_string()))
    }

    fn verify(state: &Path) -> Result<Verified, Bad> {
        super::verify::verify(state, &checkpoints(state).verifier())
    }

    /// A trail of three days, and the files of these.
    fn trail() -> (tempfile::TempDir, Trail, Vec<PathBuf>) {
        let state = tempfile::tempdir().unwrap();
        let trail = Trail::open(state.path(), "gpu1", Some(signer(state.path()))).unwrap();
        for at in 0..3 {
            let events = [join("vm-1"), join("vm-2"), own(CHECKPOINT), join("vm-3")];
            trail.append(events, T + at * DAY).unwrap();
        }
        let files = files(&trail.folder).unwrap();
        assert_eq!(files.len(), 3);
        (state, trail, files)
    }

    fn lines(path: &Path) -> Vec<String> {
        fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
    }

    fn put(path: &Path, lines: &[String]) {
        fs::write(path, lines.concat().replace("}{", "}\n{") + "\n").unwrap();
    }

    #[test]
    fn a_changed_removed_swapped_or_forged_line_is_found() {
        let (state, _, files) = trail();
        let good = verify(state.path()).unwrap();
        assert_eq!((good.lines, good.last_seq, good.checkpoints, good.proved_seq), (12, 12, 3, 10));
        let middle = lines(&files[1]);
        let refused = |changed: &[String]| {
            put(&files[1], changed);
            let bad = verify(state.path()).unwrap_err();
            put(&files[1], &middle);
            assert_eq!(verify(state.path()).unwrap(), good);
            bad
        };
        let mut changed = middle.clone();
        changed[1] = changed[1].replace("vm-2", "vm-9");
        let bad = refused(&changed);
        assert_eq!((bad.file.as_path(), bad.line), (files[1].as_path(), 3), "{bad}");
        let mut removed = middle.clone();
        removed.remove(1);
        assert_eq!(refused(&removed).line, 2);
        let mut swapped = middle.clone();
        swapped.swap(0, 1);
        refused(&swapped);
        refused(&middle[..3]);
        refused(&[middle.clone(), vec!["{}".into()]].concat());
        // An attacker without the key chains changed lines again.
        let mut forged: Vec<Line> = middle.iter().map(|l| serde_json::from_str(l).unwrap()).collect();
        forged[0].event.client = "vm-9".into();
        let mut prev = hash(lines(&files[0]).last().unwrap().as_bytes());
        let mut chained = Vec::new();
        for line in &mut forged {
            line.prev = prev;
            chained.push(serde_json::to_string(line).unwrap());
            prev = hash(chained.last().unwrap().as_bytes());
        }
        assert!(refused(&chained).why.contains("signature"));
        fs::remove_file(&files[0]).unwrap();
        assert!(verify(state.path()).unwrap_err().why.contains("pruned"));
    }

    #[test]
    fn a_server_that_has_its_own_lines_signed_cannot_change_what_was_signed_before() {
        let (state, trail, files) = trail();
        // It cuts the last day, and continues with other lines.
        fs::remove_file(&files[2]).unwrap();
        assert!(verify(state.path()).unwrap_err().why.contains("cut or changed"));
        trail.append([join("vm-9"), own(CHECKPOINT)], T + 2 * DAY).unwrap();
        assert!(verify(state.path()).unwrap_err().why.contains("another line before"));
        // It writes a whole trail of its own.
        files.iter().for_each(|file| fs::remove_file(file).unwrap_or_default());
        trail.append([join("vm-9"), own(CHECKPOINT)], T).unwrap();
        assert!(verify(state.path()).unwrap_err().why.contains("another line before"));
    }

    #[test]
    fn a_signature_whose_line_a_crash_prevented_is_no_gap() {
        let (state, trail, _) = trail();
        let (seq, prev, _) = trail.tail().unwrap();
        trail.signed(seq + 1, &prev).unwrap();
        assert_eq!(verify(state.path()).unwrap().checkpoints, 3, "it is the next line's place");
        trail.append([join("vm-4"), join("vm-5"), own(CHECKPOINT)], T + 2 * DAY).unwrap();
        assert_eq!(verify(state.path()).unwrap().checkpoints, 4);
    }

    #[test]
    fn checkpoints_of_an_earlier_release_count_before_the_signers_first() {
        let state = tempfile::tempdir().unwrap();
        let key = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new()).unwrap();
        let trail = Trail::open(state.path(), "gpu1", Some(signer(state.path()))).unwrap();
        fs::write(trail.folder.join("checkpoint.key"), key.as_ref()).unwrap();
        let key = Ed25519KeyPair::from_pkcs8(key.as_ref()).unwrap();
        let earlier = |at: u64| {
            let (seq, prev) = trail.append([join("vm-1")], T + at * DAY).unwrap();
            let text = format!("{SIGNED_BY_SERVER}\n{}\n{prev}", seq + 1);
            let signature = data_encoding::HEXLOWER.encode(key.sign(text.as_bytes()).as_ref());
            let event = own(CHECKPOINT);
            let line = Line { time_usec: T, seq: seq + 1, server: "gpu1".into(), event, signature, prev };
            let path = trail.tail().unwrap().2.unwrap();
            let mut file = OpenOptions::new().append(true).open(path).unwrap();
            writeln!(file, "{}", serde_json::to_string(&line).unwrap()).unwrap();
        };
        earlier(0);
        assert_eq!(verify(state.path()).unwrap().checkpoints, 1);
        trail.append([join("vm-2"), own(CHECKPOINT)], T + DAY).unwrap();
        assert_eq!(verify(state.path()).unwrap().checkpoints, 2);
        earlier(2);
        assert!(
            verify(state.path()).unwrap_err().why.contains("signature"),
            "the server's key counts no more"
        );
    }

    #[test]
    fn checkpoints_of_a_server_that_gets_a_signer_count_before_the_signers_first() {
        let state = tempfile::tempdir().unwrap();
        let folder = state.path().join("audit");
        fs::create_dir(&folder).unwrap();
        let own = Checkpoints::open(&folder.join("checkpoint.key"), &folder.join("checkpoint.json")).unwrap();
        let itself: Sign = Arc::new(move |place| own.sign(place).map_err(|e| e.to_string()));
        let without = Trail::open(state.path(), "gpu1", Some(itself)).unwrap();
        let with = Trail::open(state.path(), "gpu1", Some(signer(state.path()))).unwrap();
        without
            .append([join("vm-1"), super::own(CHECKPOINT), join("vm-2"), super::own(CHECKPOINT)], T)
            .unwrap();
        assert_eq!(verify(state.path()).unwrap().checkpoints, 2);
        with.append([join("vm-3"), super::own(CHECKPOINT)], T).unwrap();
        assert_eq!(verify(state.path()).unwrap().checkpoints, 3);
        without.append([join("vm-4"), super::own(CHECKPOINT)], T).unwrap();
        assert!(verify(state.path()).unwrap_err().why.contains("signature"));
    }

    #[tokio::test]
    async fn without_the_signer_events_are_written_and_checkpoints_are_not() {
        let state = tempfile::tempdir().unwrap();
        drop(signer(state.path()));
        let away: Sign = Arc::new(|_| Err("the signer does not answer".into()));
        let audit = Audit::open(state.path(), "gpu1", away).unwrap();
        audit.sure(join("vm-1")).await.unwrap();
        audit.close().await;
        let done = verify(state.path()).unwrap();
        assert_eq!((done.lines, done.checkpoints), (1, 0));
    }

    #[test]
    fn a_torn_line_is_cut_and_old_days_go_with_a_note() {
        let (state, trail, days) = trail();
        let mut file = OpenOptions::new().append(true).open(&days[2]).unwrap();
        file.write_all(b"{\"time_usec\":1,\"se").unwrap();
        trail.append([join("vm-4")], T + 2 * DAY).unwrap();
        assert_eq!(verify(state.path()).unwrap().last_seq, 13);
        // The clock was set back.
        trail.append([join("vm-5")], T).unwrap();
        assert_eq!(verify(state.path()).unwrap().last_seq, 14);
        let kept = Kept { age: Duration::from_secs(24 * 3600), bytes: 0 };
        trail.prune(kept, T + 2 * DAY).unwrap();
        assert!(!days[0].exists() && days[1].exists());
        assert_eq!(verify(state.path()).unwrap().lines, 11);
        trail.prune(Kept { age: Duration::ZERO, bytes: 1 }, T + 2 * DAY).unwrap();
        assert_eq!(files(&trail.folder).unwrap(), [days[2].clone()], "the newest day stays");
        verify(state.path()).unwrap();
    }

    #[tokio::test]
    async fn an_event_is_on_the_disk_before_its_answer_and_a_failure_is_told() {
        let state = tempfile::tempdir().unwrap();
        let audit = Audit::open(state.path(), "gpu1", signer(state.path())).unwrap();
        audit.note(Event { detail: "a\u{1b}[2J\nb".into(), ..own("server-started") });
        audit.sure(join("vm-1")).await.unwrap();
        let wanted = Wanted { client: "vm-1".into(), ..Wanted::default() };
        let found = audit.list(&wanted, 9).unwrap();
        assert_eq!((found.len(), found[0].seq, found[0].server.as_str()), (1, 2, "gpu1"));
        assert_eq!(audit.list(&Wanted::default(), 9).unwrap()[0].event.detail, "a [2J b");
        assert_eq!(audit.list(&Wanted::default(), 1).unwrap(), found, "the latest ones");
        assert!(audit.works());
        // Without the folder, as without room on the disk, the caller gets the error.
        let away = state.path().join("away");
        fs::rename(state.path().join("audit"), &away).unwrap();
        assert!(audit.sure(join("vm-2")).await.is_err());
        assert!(!audit.works());
        fs::rename(&away, state.path().join("audit")).unwrap();
        audit.sure(join("vm-3")).await.unwrap();
        assert!(audit.works());
        audit.close().await;
        let done = verify(state.path()).unwrap();
        assert_eq!((done.lines, done.checkpoints), (4, 1), "a stop leaves a checkpoint");
        // A command on the stopped server continues the chain.
        note_offline(state.path(), "gpu1", own("pool-exported")).unwrap();
        assert_eq!(verify(state.path()).unwrap().last_seq, 5);
    }
}
