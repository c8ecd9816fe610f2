//! Diagnosis of a machine, for `gpusession` and `gpuserver`.
//!
//! A check is a row of a table: an id and a function that reads facts and returns a finding. No
//! check changes anything, and none needs root: a check that cannot read its facts reports that.
//! The verbs with `--now` start a service of the machine; no check does.
#![forbid(unsafe_code)]

pub mod check;
pub mod gpu_host;
pub mod host;
pub mod machine;
pub mod pseudonyms;
pub mod redact;
pub mod remedy;
pub mod report;
mod service;

/// Faults in a folder that is a machine's root, for tests of checks.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    /// Writes a file below a test's root.
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn plant(root: &tempfile::TempDir, path: &str, text: &str) {
        // An absolute path would replace the root's.
        let path = root.path().join(path.trim_start_matches('/'));
        let folder = path.parent().expect("a file has a folder");
        std::fs::create_dir_all(folder).expect("the root is writable");
        std::fs::write(path, text).expect("the folder is writable");
    }

    /// Writes a shell script as a program of the machine.
    ///
    /// A child process writes it: a descriptor for writing that another test's child inherits
    /// would keep the script from running.
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn program(root: &tempfile::TempDir, name: &str, script: &str) {
        let folder = root.path().join("bin");
        std::fs::create_dir_all(&folder).expect("the root is writable");
        let written = std::process::Command::new("sh")
            .args(["-c", "printf '#!/bin/sh\n%s\n' \"$2\" >\"$1\" && chmod 755 \"$1\"", "sh"])
            .arg(folder.join(name))
            .arg(script)
            .status();
        assert!(written.is_ok_and(|status| status.success()), "sh writes a script");
    }
}
