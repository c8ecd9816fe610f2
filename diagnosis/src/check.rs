//! Tables of checks, and their findings as text and JSON.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

/// Judgement of a finding, the worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The check does not apply to this machine, or cannot read its facts.
    Skipped,
    /// No measure is needed.
    Ok,
    /// Programs work, but something is slower or less safe than it could be, or will stop working.
    Warning,
    /// Programs do not work, or will fail.
    Fault,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Skipped => "-",
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Fault => "FAULT",
        }
    }
}

/// Result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Judgement, which also decides the exit code of `health`.
    pub state: State,
    /// Facts in one line.
    pub found: String,
    /// Measure in one line, if possible a command; empty if none is needed.
    pub remedy: String,
}

impl Finding {
    fn new(state: State, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { state, found: found.into(), remedy: remedy.into() }
    }

    /// No measure is needed; `found` has the facts in one line.
    pub fn ok(found: impl Into<String>) -> Self {
        Self::new(State::Ok, found, "")
    }

    /// Programs work; `found` says what is worse than it could be, `remedy` what to do.
    pub fn warning(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(State::Warning, found, remedy)
    }

    /// Programs do not work or will fail; `found` says why, `remedy` what to do.
    pub fn fault(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(State::Fault, found, remedy)
    }

    /// The check does not apply, or cannot read its facts; `why` names them.
    pub fn skipped(why: impl Into<String>) -> Self {
        Self::new(State::Skipped, why, "")
    }

    /// Joins findings about several things: the worst state, and the texts of that state.
    ///
    /// `None` if there are none.
    pub fn worst(findings: impl IntoIterator<Item = Self>) -> Option<Self> {
        findings.into_iter().reduce(|mut all, next| {
            match next.state.cmp(&all.state) {
                std::cmp::Ordering::Greater => return next,
                std::cmp::Ordering::Less => return all,
                std::cmp::Ordering::Equal => {}
            }
            all.found = format!("{}; {}", all.found, next.found);
            if !next.remedy.is_empty() && !all.remedy.contains(&next.remedy) {
                all.remedy = format!("{}; {}", all.remedy, next.remedy);
            }
            all
        })
    }
}

/// Part of a machine that checks concern; the headings of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// Which `libcuda.so.1` programs load.
    Library,
    /// Daemon, configuration and sessions.
    Login,
    /// Way to the servers.
    Network,
    /// Limits and resources of this machine.
    Host,
    /// Driver and cards of this machine.
    GpuHost,
    /// `gpuserver` on this host.
    Server,
    /// A CUDA program of the command itself.
    Gpu,
}

impl Place {
    fn heading(self) -> &'static str {
        match self {
            Self::Library => "Library: which libcuda.so.1 programs load",
            Self::Login => "Login: daemon, configuration and sessions",
            Self::Network => "Network: the way to the servers",
            Self::Host => "Host: limits and resources of this machine",
            Self::GpuHost => "GPU host: driver and cards of this machine",
            Self::Server => "Server: gpuserver on this host",
            Self::Gpu => "GPU: a CUDA program of this command",
        }
    }
}

/// A check of facts `F`.
pub struct Check<F: ?Sized> {
    /// Name that stays the same in all versions, such as `library.first`.
    pub id: &'static str,
    /// Judges the facts; it changes nothing and does not wait for the network.
    pub run: fn(&F) -> Finding,
}

/// A finding with its check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// As [`Check::id`].
    pub id: String,
    /// Heading below which the text lists it.
    #[serde(rename = "where")]
    pub place: Place,
    /// As [`Finding::state`].
    pub state: State,
    /// As [`Finding::found`].
    pub found: String,
    /// As [`Finding::remedy`].
    pub remedy: String,
}

/// Findings of all checks, in the order of the tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings(pub Vec<Row>);

impl Findings {
    /// Runs the checks of a table.
    pub fn run<F: ?Sized>(&mut self, place: Place, table: &[Check<F>], facts: &F) {
        self.0.extend(table.iter().map(|check| row(check.id, place, (check.run)(facts))));
    }

    /// Adds the finding of a check that is in no table.
    pub fn add(&mut self, id: &str, place: Place, finding: Finding) {
        self.0.push(row(id, place, finding));
    }

    /// Counts the findings of a state.
    pub fn count(&self, state: State) -> usize {
        self.0.iter().filter(|row| row.state == state).count()
    }

    /// Returns the exit code: 1 with a fault, or with a warning if `strict`.
    pub fn code(&self, strict: bool) -> i32 {
        let bad = if strict { State::Warning } else { State::Fault };
        i32::from(self.0.iter().any(|row| row.state >= bad))
    }

    /// Returns the object of `--json`.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "schema": 1,
            "checks": self.0,
            "faults": self.count(State::Fault),
            "warnings": self.count(State::Warning),
        })
    }

    /// Formats the findings for people: a line each, and the remedy below it.
    ///
    /// Without `all`, skipped checks are counted only, and lists of servers or cards shortened.
    pub fn text(&self, all: bool) -> String {
        let width = self.0.iter().map(|row| row.id.len()).max().unwrap_or(0);
        let mut out = String::new();
        let mut last = None;
        let shown = self.0.iter().filter(|row| all || row.state != State::Skipped);
        for Row { id, place, state, found, remedy } in shown {
            if last.replace(*place) != Some(*place) {
                let blank = if out.is_empty() { "" } else { "\n" };
                let _ = writeln!(out, "{blank}{}", place.heading());
            }
            let brief = |text: &str| if all { text.to_owned() } else { brief(text) };
            let _ = writeln!(out, "  {:7}  {id:width$}  {}", state.word(), brief(found));
            if !remedy.is_empty() {
                let _ = writeln!(out, "  {:7}  {:width$}  do: {}", "", "", brief(remedy));
            }
        }
        let count = |state, one, many| match self.count(state) {
            1 => format!("1 {one}"),
            n => format!("{n} {many}"),
        };
        let faults = count(State::Fault, "fault", "faults");
        let warnings = count(State::Warning, "warning", "warnings");
        let _ = writeln!(
            out,
            "\n{} checks: {faults}, {warnings}, {} ok, {} not applicable or not readable{}",
            self.0.len(),
            self.count(State::Ok),
            self.count(State::Skipped),
            if all || self.count(State::Skipped) == 0 { "" } else { " (--all lists them)" },
        );
        out
    }
}

/// Shortens the texts of many servers or cards, as [`Finding::worst`] joins them.
fn brief(text: &str) -> String {
    let parts: Vec<_> = text.split("; ").collect();
    match parts.len() {
        0..=5 => text.to_owned(),
        n => format!("{}; and {} more (--all lists them)", parts[..3].join("; "), n - 3),
    }
}

fn row(id: &str, place: Place, Finding { state, found, remedy }: Finding) -> Row {
    Row { id: id.to_owned(), place, state, found, remedy }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(states: &[Finding]) -> Findings {
        let mut findings = Findings::default();
        states.iter().for_each(|finding| findings.add("host.x", Place::Host, finding.clone()));
        findings
    }

    #[test]
    fn the_exit_code_tells_faults_and_strictly_warnings() {
        let ok = [Finding::ok("fine"), Finding::skipped("cannot read /x")];
        assert_eq!((findings(&ok).code(false), findings(&ok).code(true)), (0, 0));
        let warning = [Finding::ok("fine"), Finding::warning("slow", "tune")];
        assert_eq!((findings(&warning).code(false), findings(&warning).code(true)), (0, 1));
        let fault = [Finding::fault("broken", "mend")];
        assert_eq!((findings(&fault).code(false), findings(&fault).code(true)), (1, 1));
    }

    #[test]
    fn several_things_of_a_check_show_the_worst() {
        let two = Finding::worst([
            Finding::ok("a fine"),
            Finding::fault("b refused", "start b"),
            Finding::warning("c slow", "tune c"),
            Finding::fault("d refused", "start d"),
        ]);
        assert_eq!(two, Some(Finding::fault("b refused; d refused", "start b; start d")));
        assert_eq!(Finding::worst([]), None);
    }

    #[test]
    fn text_shortens_the_list_of_many_servers() {
        let many = (0..40).map(|n| Finding::fault(format!("gpu{n} refused"), format!("start gpu{n}")));
        let all = findings(&[Finding::worst(many).unwrap(), Finding::ok("a; b; c; d; e")]);
        let text = all.text(false);
        assert!(text.contains("gpu2 refused; and 37 more (--all lists them)\n"), "{text}");
        assert!(text.contains("start gpu2; and 37 more (--all lists them)\n"), "{text}");
        assert!(text.contains("a; b; c; d; e\n"), "{text}");
        assert!(
            all.text(true).contains("gpu39 refused\n") && all.json().to_string().contains("gpu39 refused")
        );
    }

    #[test]
    fn text_and_json_have_all_findings() {
        let all =
            findings(&[Finding::ok("fine"), Finding::fault("broken", "mend it"), Finding::skipped("no x")]);
        assert!(all.text(true).contains("-        host.x  no x\n"));
        let text = all.text(false);
        assert!(text.contains("ok       host.x  fine\n") && text.contains("do: mend it\n"), "{text}");
        assert!(text.ends_with("1 ok, 1 not applicable or not readable (--all lists them)\n"));
        let json = all.json();
        assert_eq!((&json["faults"], &json["checks"][1]["where"]), (&1.into(), &"host".into()));
        let rows: Vec<Row> = serde_json::from_value(json["checks"].clone()).unwrap();
        assert_eq!(rows, all.0);
    }
}
