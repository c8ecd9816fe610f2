//! The archive of a report: its files, their list, and facts of the host.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use gpusession_common::units::human_bytes;
use serde::Serialize;

use crate::machine::Machine;
use crate::pseudonyms::{Kind, Pseudonyms};
use crate::redact::{self, Secrets};

/// Time for `journalctl`, and the most bytes of its output that a report holds.
const JOURNAL_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_JOURNAL: usize = 20 << 20;

/// A file of the archive.
#[derive(Debug, Clone, Serialize)]
pub struct File {
    /// Path within the archive.
    pub path: String,
    /// Size after the removal of secrets.
    pub bytes: usize,
    /// Whether something was left out of it.
    pub redacted: bool,
    #[serde(skip)]
    text: String,
}

/// Files for an archive. [`Report::finish`] removes secrets from all of them, and names unless they
/// are kept.
#[derive(Debug, Default)]
pub struct Report {
    files: Vec<File>,
    /// Texts that no file of the archive may hold.
    pub secrets: Secrets,
    names: Option<Pseudonyms>,
}

impl Report {
    /// A report about a machine; without `keep_names`, names and addresses become pseudonyms.
    pub fn new(machine: &Machine, keep_names: bool) -> Self {
        let names = (!keep_names).then(|| {
            let mut names = Pseudonyms::default();
            names.add(Kind::Host, &hostname(machine));
            let resolver = machine.read("/etc/resolv.conf").unwrap_or_default();
            let domains = resolver.lines().filter_map(|line| line.strip_prefix("search "));
            domains.flat_map(str::split_whitespace).for_each(|domain| names.add(Kind::Host, domain));
            names.add_people(&machine.read("/etc/passwd").unwrap_or_default());
            names
        });
        Self { names, ..Self::default() }
    }

    /// Gives a name a pseudonym that no file's JSON has.
    pub fn add_name(&mut self, kind: Kind, name: &str) {
        if let Some(names) = &mut self.names {
            names.add(kind, name);
        }
    }

    /// Adds a file.
    pub fn add(&mut self, path: &str, text: impl Into<String>) {
        self.files.push(File { path: path.into(), bytes: 0, redacted: false, text: text.into() });
    }

    /// Adds a file from which something is left out already.
    pub fn add_redacted(&mut self, path: &str, text: impl Into<String>) {
        self.add(path, text);
        if let Some(file) = self.files.last_mut() {
            file.redacted = true;
        }
    }

    /// Adds the output of a program, or the note that it did not answer.
    pub fn add_output(&mut self, path: &str, machine: &Machine, program: &str, arguments: &[&str]) {
        let output = machine.run(program, arguments);
        self.add(path, output.unwrap_or_else(|| format!("{program}: not installed, or no answer\n")));
    }

    /// Removes the known secrets from all files, and replaces names.
    ///
    /// Later files may have added secrets and names that occur in earlier ones.
    pub fn finish(&mut self) {
        if let Some(names) = &mut self.names {
            let json = self.files.iter().filter(|file| file.path.ends_with(".json"));
            json.filter_map(|file| serde_json::from_str(&file.text).ok()).for_each(|v| names.add_json(&v));
        }
        for file in &mut self.files {
            let mut clean = self.secrets.scrub(&file.text);
            file.redacted |= clean != file.text;
            if let Some(names) = &mut self.names {
                clean = match file.path.ends_with(".json") {
                    true => names.replace_json(&clean),
                    false => names.replace(&clean),
                };
            }
            (file.bytes, file.text) = (clean.len(), clean);
        }
    }

    fn write_names(&self, archive: &Path) -> io::Result<Option<PathBuf>> {
        let Some(names) = &self.names else { return Ok(None) };
        let mut path = archive.as_os_str().to_owned();
        path.push(".names");
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(names.table().as_bytes())?;
        Ok(Some(path.into()))
    }

    /// Describes for people which names and secrets the files hold.
    pub fn describe(&self) -> &'static str {
        match self.names {
            Some(_) => {
                "Users, clients, hosts and addresses have pseudonyms; --names keeps their names.\n\
                 Journals hold what programs wrote, where other names may occur: read them before you share the report.\n\
                 It holds no keys, tokens or passwords.\n"
            }
            None => {
                "The report holds names of users, clients and hosts, addresses, and journals as programs wrote them.\n\
                 It holds no keys, tokens or passwords.\n"
            }
        }
    }

    /// Returns the list of files for `--json`.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// Formats the list of files for people.
    pub fn list(&self) -> String {
        let width = self.files.iter().map(|file| file.path.len()).max().unwrap_or(0);
        let row = |file: &File| {
            let note = if file.redacted { "  parts left out" } else { "" };
            format!("  {:width$}  {:>9}{note}\n", file.path, human_bytes(file.bytes as u64))
        };
        self.files.iter().map(row).collect()
    }

    /// Writes the table of pseudonyms and the archive to new files that only their owner reads;
    /// returns the table's path, or `None` if names are kept.
    pub fn write(&self, archive: &Path, folder: &str, now: u64) -> io::Result<Option<PathBuf>> {
        let table = self.write_names(archive)?;
        let written = self.write_archive(archive, folder, now);
        if let (Err(_), Some(table)) = (&written, &table) {
            // A table without its report is of no use.
            let _ = std::fs::remove_file(table);
        }
        written.map(|()| table)
    }

    fn write_archive(&self, archive: &Path, folder: &str, now: u64) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(archive)?;
        let mut tar = tar::Builder::new(GzEncoder::new(file, Compression::default()));
        for file in &self.files {
            let mut header = tar::Header::new_gnu();
            header.set_size(file.text.len() as u64);
            header.set_mode(0o600);
            header.set_mtime(now);
            tar.append_data(&mut header, format!("{folder}/{}", file.path), file.text.as_bytes())?;
        }
        let mut file = tar.into_inner()?.finish()?;
        file.flush()
    }
}

fn hostname(machine: &Machine) -> String {
    let host = machine.read("/proc/sys/kernel/hostname").unwrap_or_default();
    host.trim().chars().filter(|c| c.is_ascii_alphanumeric() || "-.".contains(*c)).collect()
}

/// Returns `PREFIX-HOST-DATE`, the name of the archive and of its folder; without names
/// `PREFIX-DATE`.
pub fn name(prefix: &str, machine: &Machine, with_host: bool) -> String {
    let host = if with_host { hostname(machine) } else { String::new() };
    let format = time::macros::format_description!("[year][month][day]-[hour][minute][second]");
    let date =
        i64::try_from(machine.now).ok().and_then(|now| time::OffsetDateTime::from_unix_timestamp(now).ok());
    let date = date.and_then(|date| date.format(format).ok()).unwrap_or_default();
    if host.is_empty() { format!("{prefix}-{date}") } else { format!("{prefix}-{host}-{date}") }
}

/// Tells people where a report is, and the table of its pseudonyms.
pub fn written(archive: &Path, names: Option<&Path>) -> String {
    let archive = archive.display();
    match names {
        Some(names) => {
            format!(
                "written to {archive}; only you can read it\ntable of the names: {}; keep it, and do not send it",
                names.display()
            )
        }
        None => format!("written to {archive}; only you can read it"),
    }
}

/// Adds facts of the host: system, processors, memory, loader, network, PAM lines of ours.
pub fn add_host(report: &mut Report, machine: &Machine) {
    for path in ["/etc/os-release", "/proc/version", "/proc/meminfo", "/proc/self/limits"] {
        let text = machine.read(path).unwrap_or_else(|unread| format!("{unread}\n"));
        report.add(&format!("host{path}"), text);
    }
    let cpu = machine.read("/proc/cpuinfo").unwrap_or_default();
    let wanted = ["model name", "cpu MHz", "siblings", "flags"];
    let first = cpu.split("\n\n").next().unwrap_or("");
    let lines = first.lines().filter(|line| wanted.iter().any(|name| line.starts_with(name)));
    let count = cpu.lines().filter(|line| line.starts_with("processor")).count();
    let text = lines.fold(format!("processors: {count}\n"), |text, line| text + line + "\n");
    report.add_redacted("host/proc/cpuinfo", text);
    let cache = machine.run("ldconfig", &["-p"]).unwrap_or_default();
    let cuda = cache.lines().filter(|line| line.contains("cuda") || line.contains("nvidia"));
    report.add_redacted("host/ldconfig", cuda.fold(String::new(), |text, line| text + line + "\n"));
    report.add_output("host/network/address", machine, "ip", &["address"]);
    report.add_output("host/network/route", machine, "ip", &["route", "show", "table", "all"]);
    report.add_output("host/network/sockets", machine, "ss", &["-s"]);
    let pam = machine.list("/etc/pam.d").into_iter().fold(String::new(), |mut text, file| {
        let lines = machine.read(format!("/etc/pam.d/{file}")).unwrap_or_default();
        for line in lines.lines().filter(|line| line.contains("pam_gpusession")) {
            text += &format!("{file}: {line}\n");
        }
        text
    });
    report.add_redacted("host/pam", pam);
}

/// Adds the files, the state and the journal of units.
pub fn add_units(report: &mut Report, machine: &Machine, units: &[&str]) {
    for unit in units {
        for folder in ["/usr/lib/systemd/system", "/lib/systemd/system"] {
            // The package's own file has nothing of this machine.
            if let Ok(text) = machine.read(format!("{folder}/{unit}")) {
                report.add(&format!("units/{unit}"), text);
                break;
            }
        }
        for folder in ["/etc/systemd/system", "/run/systemd/system"] {
            let mut own = vec![format!("{folder}/{unit}")];
            let below = format!("{folder}/{unit}.d");
            own.extend(machine.list(&below).into_iter().map(|name| format!("{below}/{name}")));
            for path in own {
                if let Ok(text) = machine.read(&path) {
                    let text = redact::unit(&text, &mut report.secrets);
                    report.add_redacted(&format!("units{path}"), text);
                }
            }
        }
        let properties = "LoadState,ActiveState,SubState,UnitFileState,Result,NRestarts,ExecMainStatus";
        report.add_output(
            &format!("units/{unit}.state"),
            machine,
            "systemctl",
            &["show", "-p", properties, unit],
        );
        let arguments = ["--unit", unit, "--since", "-24h", "--output", "short-iso", "--no-pager"];
        let journal = machine.run_for(JOURNAL_TIMEOUT, "journalctl", &arguments);
        let journal = journal.unwrap_or_else(|| "journalctl: not installed, or no answer\n".into());
        report.add(&format!("journal/{unit}"), last_lines(&journal, MAX_JOURNAL));
    }
}

/// Returns the whole lines at the end of a text, at most `bytes` long.
fn last_lines(text: &str, bytes: usize) -> &str {
    let Some(from) = text.len().checked_sub(bytes) else { return text };
    let rest = &text.as_bytes()[from..];
    match rest.iter().position(|b| *b == b'\n') {
        Some(newline) => &text[from + newline + 1..],
        None => "",
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::testing::{plant, program};

    const SECRET: &str = "swordfish-0123456789";

    /// A machine with a secret in each place that a report reads.
    fn machine() -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        plant(&root, "etc/os-release", "PRETTY_NAME=Debian\n");
        plant(&root, "proc/sys/kernel/hostname", "vm-1\n");
        plant(&root, "proc/cpuinfo", &format!("processor: 0\nmodel name: X\nserial: {SECRET}\n"));
        plant(
            &root,
            "etc/pam.d/sshd",
            &format!("auth x secret={SECRET}\nsession optional pam_gpusession.so\n"),
        );
        let drop_in = format!("[Service]\nEnvironment=KEY={SECRET}\nExecStart=/bin/x --pin {SECRET}\n");
        plant(&root, "etc/systemd/system/gpusession.service.d/a.conf", &drop_in);
        program(
            &root,
            "journalctl",
            &format!("echo 10:00 password: {SECRET}; echo 10:01 token gpsj-{SECRET}.x"),
        );
        program(&root, "ip", &format!("echo link {SECRET}"));
        let machine = Machine::below(root.path());
        (root, machine)
    }

    #[test]
    fn no_secret_reaches_the_archive_and_only_its_owner_reads_it() {
        let (root, machine) = machine();
        let mut report = Report::default();
        add_host(&mut report, &machine);
        add_units(&mut report, &machine, &["gpusession.service"]);
        report.finish();
        let archive = root.path().join("r.tar.gz");
        report.write(&archive, "r", machine.now).unwrap();
        assert_eq!(std::fs::metadata(&archive).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(report.write(&archive, "r", 0).is_err(), "no file is replaced");

        let file = std::fs::File::open(&archive).unwrap();
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(file));
        let mut all = String::new();
        let mut names = Vec::new();
        for entry in tar.entries().unwrap() {
            let mut entry = entry.unwrap();
            names.push(entry.path().unwrap().display().to_string());
            entry.read_to_string(&mut all).unwrap();
        }
        assert!(!all.contains(SECRET), "{all}");
        for kept in
            ["PRETTY_NAME=Debian", "sshd: session optional", "ExecStart=/bin/x (arg", "gpsj-(removed)"]
        {
            assert!(all.contains(kept), "{kept} not in {all}");
        }
        let listed: Vec<_> = report.files().iter().map(|file| format!("r/{}", file.path)).collect();
        assert_eq!(names, listed);
        assert!(report.list().contains("units/etc/systemd/system/gpusession.service.d/a.conf"));
    }

    #[test]
    fn names_become_pseudonyms_whose_table_lies_beside_the_archive() {
        let (root, machine) = machine();
        plant(&root, "etc/passwd", "ada:x:1000:1000::/home/ada:/bin/sh\n");
        let files = |report: &mut Report| {
            report.add("journal", "vm-1 gpusessiond: lease train of ada and bob from 10.0.0.7:7601\n");
            // A later file has the name.
            report.add("leases.json", r#"{"leases": [{"user": "bob"}]}"#);
            report.finish();
            report.files[0].text.clone()
        };
        let mut report = Report::new(&machine, false);
        report.add_name(Kind::Client, "train");
        assert_eq!(
            files(&mut report),
            "host1 gpusessiond: lease client1 of user1 and user2 from address1:7601\n"
        );
        let archive = root.path().join("r.tar.gz");
        let table = report.write(&archive, "r", 0).unwrap().unwrap();
        assert!(report.write(&archive, "r", 0).is_err() && table.exists(), "no file is replaced");
        assert_eq!(table, root.path().join("r.tar.gz.names"));
        assert_eq!(std::fs::metadata(&table).unwrap().permissions().mode() & 0o777, 0o600);
        let expected = "host1\tvm-1\nuser1\tada\nuser2\tbob\nclient1\ttrain\naddress1\t10.0.0.7\n";
        assert_eq!(std::fs::read_to_string(&table).unwrap(), expected);
        let mut report = Report::new(&machine, true);
        assert!(files(&mut report).starts_with("vm-1 gpusessiond: lease train of ada and bob from 10.0.0.7"));
        assert_eq!(report.write(&root.path().join("named.tar.gz"), "r", 0).unwrap(), None);
    }

    #[test]
    fn an_archive_is_named_after_host_and_date() {
        let (_root, mut machine) = machine();
        machine.now = 1_767_225_600;
        assert_eq!(name("gpusession-report", &machine, true), "gpusession-report-vm-1-20260101-000000");
        assert_eq!(name("gpusession-report", &machine, false), "gpusession-report-20260101-000000");
    }

    #[test]
    fn a_long_journal_keeps_its_end() {
        assert_eq!(last_lines("a\nbb\nccc\n", 100), "a\nbb\nccc\n");
        assert_eq!(last_lines("a\nbb\nccc\n", 6), "ccc\n");
        assert_eq!(last_lines("äää", 1), "");
    }
}
