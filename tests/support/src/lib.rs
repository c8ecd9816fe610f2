//! Helpers that tests of several crates share.

#![allow(missing_docs, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

pub mod altered;
pub mod cuda;
pub mod json_table;
pub mod path;
pub mod relay;

/// A file that cargo builds for a package other than the tested one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Artefact<'a> {
    /// A program, by its name.
    Program(&'a str),
    /// A library, by its file's name.
    Library(&'a str),
    /// An example, by its name.
    Example(&'a str),
}

/// Returns the path of a package's artefact, built for the running test's profile.
///
/// If `GPUSESSION_ARTEFACTS` is set, everything was built before, as `make test-unit` does.
/// Otherwise cargo builds the package, which takes no time if it is up to date.
///
/// # Panics
/// If cargo fails, or if it did not make the file.
pub fn artefact(package: &str, artefact: Artefact<'_>) -> PathBuf {
    let folder = target();
    if std::env::var_os("GPUSESSION_ARTEFACTS").is_none() {
        build(package, artefact, &folder);
    }
    let path = match artefact {
        Artefact::Program(name) | Artefact::Library(name) => folder.join(name),
        Artefact::Example(name) => folder.join("examples").join(name),
    };
    assert!(
        path.exists(),
        "{}: not found; unset GPUSESSION_ARTEFACTS so that cargo builds it",
        path.display()
    );
    path
}

/// Returns the folder of the running test's profile, such as `target/debug`.
fn target() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    // A test lies in `deps`.
    test.ancestors().nth(2).expect("a test lies below the target folder").to_owned()
}

fn build(package: &str, artefact: Artefact<'_>, folder: &Path) {
    // Tests of one process build one after the other, each package once.
    static BUILT: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut built = BUILT.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let name = format!("{package} {artefact:?}");
    if built.contains(&name) {
        return;
    }
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let which: &[&str] = match artefact {
        Artefact::Program(name) => &["--bin", name],
        Artefact::Library(_) => &["--lib"],
        Artefact::Example(name) => &["--example", name],
    };
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .env("CARGO_TARGET_DIR", folder.parent().expect("a profile lies in the target folder"))
        .args(["build", "--quiet", "--locked", "--profile", profile, "-p", package])
        .args(which)
        .status()
        .expect("cargo starts");
    assert!(status.success(), "cargo build -p {package}: {status}");
    built.push(name);
}

/// Name of the variable that says which program a started test is.
#[doc(hidden)]
pub const PROGRAM: &str = "GPUSESSION_TEST_PROGRAM";

/// Declares functions of a test file that run in processes of their own.
///
/// They need one because a library is loaded once in a process, or because they depend on the
/// environment. [`program`] starts one; without it the generated test does nothing.
#[macro_export]
macro_rules! programs {
    ($($name:ident),* $(,)?) => {
        #[test]
        fn program() {
            match std::env::var($crate::PROGRAM).as_deref() {
                $(Ok(stringify!($name)) => $name(),)*
                Ok(other) => panic!("programs! does not list {other}"),
                Err(_) => {}
            }
        }
    };
}

/// Returns a command that runs a function of this test file that `programs!` lists.
pub fn program(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a test has a path"));
    command.args(["--exact", "--nocapture", "program"]).env(PROGRAM, name);
    command
}
