//! Services of this machine that a verb with `--now` enables and starts.

use std::process::{Command, Stdio};

use crate::machine::Machine;

impl Machine {
    /// Checks that systemd runs this machine and has the unit; the error is one line.
    ///
    /// A verb asks this before its own work, which it could not repeat.
    pub fn has_unit(&self, unit: &str) -> Result<(), String> {
        if !self.exists("/run/systemd/system") {
            return Err(format!("{unit}: not started: systemd does not run this machine"));
        }
        match self.unit(unit, "LoadState").as_deref() {
            Some("loaded") => Ok(()),
            Some("masked") => Err(format!("{unit}: not started: it is masked")),
            _ => Err(format!("{unit}: not started: it is not installed, or systemd does not answer")),
        }
    }

    /// Enables a unit for the next boots, starts it, and returns when it is ready.
    ///
    /// The error is one line: the last one of `systemctl`, which names the cause.
    pub fn enable_now(&self, unit: &str) -> Result<(), String> {
        let systemctl = self.program("systemctl").ok_or_else(|| format!("{unit}: systemctl not found"))?;
        let done = Command::new(systemctl)
            .args(["enable", "--now", unit])
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("{unit}: systemctl: {error}"))?;
        if done.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&done.stderr);
        let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("systemctl failed");
        Err(format!("{unit}: not started: {last}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{plant, program};

    #[test]
    fn unit_is_known_where_systemd_runs_and_has_it() {
        let root = tempfile::tempdir().unwrap();
        let machine = Machine::below(root.path());
        program(&root, "systemctl", "echo loaded");
        assert!(machine.has_unit("a.service").unwrap_err().contains("systemd does not run"));
        plant(&root, "run/systemd/system/.keep", "");
        assert_eq!(machine.has_unit("a.service"), Ok(()));
        for (state, why) in [("masked", "is masked"), ("not-found", "is not installed")] {
            program(&root, "systemctl", &format!("echo {state}"));
            assert!(machine.has_unit("a.service").unwrap_err().contains(why), "{state}");
        }
    }

    #[test]
    fn unit_is_enabled_and_started_or_the_cause_returned() {
        let root = tempfile::tempdir().unwrap();
        let machine = Machine::below(root.path());
        assert_eq!(machine.enable_now("a.service"), Err("a.service: systemctl not found".into()));
        let called = root.path().join("called");
        program(&root, "systemctl", &format!("echo \"$@\" >{}", called.display()));
        assert_eq!(machine.enable_now("a.service"), Ok(()));
        assert_eq!(std::fs::read_to_string(&called).unwrap(), "enable --now a.service\n");
        program(&root, "systemctl", "echo Created symlink. >&2; echo Job failed. >&2; exit 1");
        assert_eq!(machine.enable_now("a.service"), Err("a.service: not started: Job failed.".into()));
    }
}
