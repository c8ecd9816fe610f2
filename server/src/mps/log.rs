//! Reads the logs of MPS daemons and servers, which report faults before anything else does.

use std::fs::File;
use std::path::PathBuf;

use super::folder::{self, Folders, LOGS, logs};
use crate::starter::mps::{FolderAct, Told};

/// Longest line that is kept, in bytes.
const MAX_LINE: usize = 1024;
/// Size at which a log is emptied, in bytes: it lies in memory, below /run.
const MAX_LOG: u64 = 4 << 20;

/// Meaning of a log line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogEvent {
    /// A client's GPU work failed fatally; its process, if the line names one.
    Fault(Option<u32>),
    /// A server exited with an error.
    ServerDied,
    /// Of interest to administrators.
    Info,
    /// Questions, answers, connections.
    Chatter,
}

/// Returns the meaning of a line.
pub fn read(line: &str) -> LogEvent {
    let text = line.split_once("] ").map_or(line, |(_, text)| text);
    let lower = text.to_ascii_lowercase();
    if lower.contains("fatal") && (lower.contains("gpu") || lower.contains("exception")) {
        return LogEvent::Fault(culprit(text));
    }
    if let Some((_, status)) = lower.split_once("exited with status ") {
        return if status.trim() == "0" { LogEvent::Info } else { LogEvent::ServerDied };
    }
    const NEWS: &[&str] = &["starting", "new server", "has started", "sticky error", "torn down"];
    if NEWS.iter().any(|n| lower.contains(n)) { LogEvent::Info } else { LogEvent::Chatter }
}

/// Finds the client's process id.
///
/// Driver 580 writes `Client {PID: 4711, Context: 1} encountered a fatal GPU error.`, older drivers
/// `Client {4711, 1}`.
fn culprit(text: &str) -> Option<u32> {
    let at = text.to_ascii_lowercase().find("client ")? + "client ".len();
    let rest = text.get(at..)?.trim_start_matches(['{', '(', ' ']).trim_start_matches("PID: ");
    let digits: &str = &rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())];
    digits.parse().ok().filter(|pid| *pid > 1)
}

/// A file that another process writes.
#[derive(Debug)]
enum Source {
    /// A log of a daemon, by its number in [`LOGS`].
    Log(Folders, u32, usize),
    /// A file of this process's user.
    File(PathBuf),
}

impl Source {
    /// Reads from a place on; returns the length, too.
    fn read(&self, at: u64) -> Option<(Vec<u8>, u64)> {
        match self {
            Self::File(path) => folder::read(path, at).ok(),
            Self::Log(folders, daemon, log) => {
                match folders.act(&FolderAct::Read(*daemon, *log, at)).ok()?? {
                    Told::Log(new, len) => Some((new, len)),
                    _ => None,
                }
            }
        }
    }

    /// Returns `true` if the file is empty now.
    fn emptied(&self) -> bool {
        match self {
            Self::File(path) => {
                File::options().write(true).open(path).is_ok_and(|file| file.set_len(0).is_ok())
            }
            Self::Log(folders, daemon, log) => folders.act(&FolderAct::Empty(*daemon, *log)).is_ok(),
        }
    }
}

/// Reads new lines of a file that another process writes.
#[derive(Debug)]
pub struct Tail {
    source: Source,
    at: u64,
    rest: Vec<u8>,
}

impl Tail {
    /// Starts at the beginning of each log of a daemon, and of its `output`. They need not exist.
    pub fn of(folders: &Folders, daemon: u32, output: PathBuf) -> Vec<Self> {
        let logs = (0..LOGS.len()).map(|log| Source::Log(folders.clone(), daemon, log));
        let all = logs.chain([Source::File(output)]);
        all.map(|source| Self { source, at: 0, rest: Vec::new() }).collect()
    }

    /// Returns the path of the file.
    pub fn path(&self) -> PathBuf {
        match &self.source {
            Source::File(path) => path.clone(),
            Source::Log(folders, daemon, log) => {
                logs(folders.all(), *daemon).join(LOGS.get(*log).copied().unwrap_or_default())
            }
        }
    }

    /// Returns whole lines added since the last call, as far as one read goes; may wait.
    pub fn lines(&mut self) -> Vec<String> {
        let Some((new, len)) = self.source.read(self.at) else { return Vec::new() };
        if len < self.at {
            self.at = 0;
        }
        self.at += new.len() as u64;
        if self.at >= len && len > MAX_LOG && self.source.emptied() {
            self.at = 0;
        }
        let mut out = Vec::new();
        for byte in new {
            match byte {
                b'\n' => {
                    let line = String::from_utf8_lossy(&std::mem::take(&mut self.rest)).into_owned();
                    out.extend(Some(line).filter(|l| !l.trim().is_empty()));
                }
                _ if self.rest.len() >= MAX_LINE => {}
                // A shortened file leaves a hole that reads as zeros.
                byte if byte < b' ' && byte != b'\t' => {}
                byte => self.rest.push(byte),
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_have_consequences() {
        let at = |text: &str| read(&format!("[2026-11-21 14:50:00.123 Server  4700] {text}"));
        assert_eq!(at("Client {4711, 1} encountered a fatal GPU error."), LogEvent::Fault(Some(4711)));
        assert_eq!(at("Server is handling a fatal GPU error."), LogEvent::Fault(None));
        assert_eq!(
            at("Client {PID: 1120, Context: 1} encountered a fatal GPU error."),
            LogEvent::Fault(Some(1120)),
            "as driver 580 says it"
        );
        assert_eq!(at("Server 4700 exited with status 0"), LogEvent::Info);
        assert_eq!(at("Server 4700 exited with status 139"), LogEvent::ServerDied);
        assert_eq!(at("Starting new server 4700 for user 998"), LogEvent::Info);
        assert_eq!(at("NEW CLIENT 4711 from user 998: Server already exists"), LogEvent::Chatter);
        assert_eq!(at("Cmd:get_server_list"), LogEvent::Chatter);
        assert_eq!(
            at(
                "Server failed to recevie command with status 806, assuming client {PID: 9, Context ID: 1} exit"
            ),
            LogEvent::Chatter
        );
        assert_eq!(read("Status of client {4711, 1} is ACTIVE"), LogEvent::Chatter);
    }

    #[test]
    fn a_log_is_followed() {
        use std::io::Write;
        let folder = tempfile::tempdir().unwrap();
        let folders = Folders::Here(folder.path().into());
        folders.act(&FolderAct::Make(7)).unwrap();
        let path = logs(folder.path(), 7).join(LOGS[1]);
        let mut tail = Tail::of(&folders, 7, PathBuf::new()).remove(1);
        assert!(tail.lines().is_empty());
        let mut file = File::options().create(true).append(true).open(&path).unwrap();
        write!(file, "one\ntw").unwrap();
        assert_eq!(tail.lines(), ["one"]);
        write!(file, "o\n\n{}\n", "x".repeat(5000)).unwrap();
        assert_eq!(tail.lines(), ["two".to_string(), "x".repeat(MAX_LINE)]);
        for _ in 0..MAX_LOG / 1000 + 100 {
            writeln!(file, "{}", "y".repeat(999)).unwrap();
        }
        while !tail.lines().is_empty() {}
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        writeln!(file, "three").unwrap();
        assert_eq!(tail.lines(), ["three"]);
    }
}
