//! Reads the logs of MPS daemons and servers, which report faults before anything else does.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Longest line that is kept, in bytes.
const MAX_LINE: usize = 1024;
/// Bytes read at a time.
const MAX_READ: u64 = 64 << 10;
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

/// Reads new lines of a file that another process writes.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    at: u64,
    rest: Vec<u8>,
}

impl Tail {
    /// Starts at the beginning of a file, which may not exist yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path, at: 0, rest: Vec::new() }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whole lines added since the last call, as far as one read goes.
    pub fn lines(&mut self) -> Vec<String> {
        let mut new = Vec::new();
        let read = || -> std::io::Result<u64> {
            let mut file = File::open(&self.path)?;
            let len = file.metadata()?.len();
            if len < self.at {
                self.at = 0;
            }
            file.seek(SeekFrom::Start(self.at))?;
            file.take(MAX_READ).read_to_end(&mut new)?;
            Ok(len)
        };
        let Ok(len) = { read }() else { return Vec::new() };
        self.at += new.len() as u64;
        if self.at >= len
            && len > MAX_LOG
            && let Ok(file) = File::options().write(true).open(&self.path)
            && file.set_len(0).is_ok()
        {
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
        let path = folder.path().join("server.log");
        let mut tail = Tail::new(path.clone());
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
