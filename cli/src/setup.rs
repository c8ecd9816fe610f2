//! `setup-libs`, `setup-pam`, `cdi`: the setup steps that an administrator decides about.
#![expect(clippy::disallowed_methods, reason = "another run of ldconfig takes a moment")]

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use gpusessiond::paths;
use serde_json::{Value, json};

use crate::exit::{Failure, Result, code};

/// The list of library folders that packages install, and the link by which the loader reads it.
const LIST: &str = "usr/share/gpusession/ld.so.conf";
const LINK: &str = "etc/ld.so.conf.d/gpusession.conf";
/// Target of the link where an administrator has removed the libraries from the loader.
const NOTHING: &str = "/dev/null";
/// How often `ldconfig` is tried, and the pause between two tries.
const LDCONFIG_TRIES: usize = 5;
const LDCONFIG_INTERVAL: Duration = Duration::from_millis(500);
/// Debian's profile of the PAM module.
const PROFILE: &str = "usr/share/pam-configs/gpusession";

/// The system to set up.
pub struct System {
    root: PathBuf,
    path: OsString,
}

/// Result of a command.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    /// Text for people.
    pub text: String,
    /// Object for `--json`.
    pub json: Value,
}

impl System {
    /// The system whose root directory is `root`.
    pub fn new(root: &Path) -> Self {
        // Many users' PATH lacks the folders of administration programs.
        let mut path = std::env::var_os("PATH").unwrap_or_default();
        path.push(":/usr/sbin:/sbin");
        Self { root: root.to_owned(), path }
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Result<Output> {
        Command::new(program)
            .args(arguments)
            .env("PATH", &self.path)
            .env("LC_ALL", "C")
            .output()
            .map_err(|error| Failure::new(code::FAILED, format!("{program}: {error}")))
    }

    /// Runs a program that has to succeed, and returns its output.
    fn must(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let output = self.run(program, arguments)?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        if self.root == Path::new("/") && !nix::unistd::geteuid().is_root() {
            let failure =
                Failure::new(code::NOT_ALLOWED, format!("{program} changes this machine for all users"));
            return Err(failure.hint("run this command as root"));
        }
        Err(Failure::new(code::FAILED, format!("{program} failed: {said}")))
    }

    fn ldconfig(&self, arguments: &[&str]) -> Result<String> {
        let root = self.root.display().to_string();
        let mut all = if root == "/" { vec![] } else { vec!["-r", root.as_str()] };
        all.extend(arguments);
        self.must("ldconfig", &all)
    }

    /// Runs `ldconfig` so that it writes the loader's cache.
    ///
    /// All runs of `ldconfig` write the same temporary file, so of two at a time one may fail. A
    /// package's trigger or gpusession-loader.service may run it at any time.
    fn update_cache(&self) -> Result<()> {
        let mut tries = 1..LDCONFIG_TRIES;
        while let Err(failure) = self.ldconfig(&[]) {
            if failure.code != code::FAILED || tries.next().is_none() {
                return Err(failure);
            }
            std::thread::sleep(LDCONFIG_INTERVAL);
        }
        Ok(())
    }

    /// Folders of gpusession's libraries, from the list that the package installs.
    fn folders(&self) -> Result<Vec<String>> {
        let path = self.root.join(LIST);
        let text = fs::read_to_string(&path).map_err(|error| {
            Failure::new(code::CONFIGURATION, format!("{}: {error}", path.display()))
                .hint("install the package gpusession-libs")
        })?;
        Ok(text.lines().map(str::trim).filter(|l| l.starts_with('/')).map(str::to_owned).collect())
    }

    /// Every existing `libcuda.so.1` in the loader's cache, in the loader's order.
    fn drivers(&self) -> Result<Vec<String>> {
        let listed = self.ldconfig(&["-p"])?;
        let paths = listed.lines().filter_map(|line| {
            let (name, path) = line.trim().split_once(" => ")?;
            name.starts_with("libcuda.so.1 ").then(|| path.to_owned())
        });
        Ok(paths.filter(|path| self.root.join(path.trim_start_matches('/')).exists()).collect())
    }

    /// Returns this machine's own driver, for which its programs should not get gpusession's
    /// library.
    fn own_driver(&self, ours: &[String]) -> Result<Option<String>> {
        let others = self.drivers()?.into_iter().find(|path| !is_below(path, ours));
        let kernel =
            self.root.join("proc/driver/nvidia").is_dir().then(|| "a loaded NVIDIA kernel driver".to_owned());
        Ok(others.or(kernel))
    }

    /// `setup-libs`: adds gpusession's `libcuda.so.1` to the loader's path.
    ///
    /// Does so only if this machine has no driver of its own, or with `force`.
    pub fn libraries(&self, force: bool) -> Result<Outcome> {
        let ours = self.folders()?;
        if let Some(other) = self.own_driver(&ours)?.filter(|_| !force) {
            let text = format!(
                "this machine has {other}: its programs keep using it; `gpusession setup-libs --force` gives them remote GPUs instead"
            );
            return Ok(Outcome {
                text,
                json: json!({ "schema": 1, "linked": self.linked(), "driver": other }),
            });
        }
        let link = self.root.join(LINK);
        if !self.linked() {
            if let Some(folder) = link.parent() {
                fs::create_dir_all(folder).map_err(|error| at(folder, &error))?;
            }
            match fs::remove_file(&link) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&link, &error)),
                _ => {}
            }
            symlink(Path::new("/").join(LIST), &link).map_err(|error| at(&link, &error))?;
        }
        self.update_cache()?;
        match self.drivers()?.into_iter().next() {
            Some(first) if is_below(&first, &ours) => Ok(Outcome {
                text: format!("programs use {first}"),
                json: json!({ "schema": 1, "linked": true, "driver": first }),
            }),
            Some(first) => Err(Failure::new(code::FAILED, format!("the loader still finds {first} first"))
                .hint(format!("a file in /etc/ld.so.conf.d that sorts before gpusession.conf names its folder: remove that file, or {first}"))),
            None => Err(Failure::new(code::FAILED, format!("libcuda.so.1 not found in {}", ours.join(", ")))
                .hint("install the package gpusession-libs again")),
        }
    }

    /// `setup-libs --remove`: removes gpusession's library from the loader's path.
    ///
    /// A link to `/dev/null` stays, so that an upgrade of the package does not add the library
    /// again.
    pub fn remove_libraries(&self) -> Result<Outcome> {
        let link = self.root.join(LINK);
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&link, &error)),
            _ => {}
        }
        if self.root.join(LIST).exists() {
            symlink(NOTHING, &link).map_err(|error| at(&link, &error))?;
        }
        self.update_cache()?;
        let first = self.drivers()?.into_iter().next();
        let text = match &first {
            Some(first) => format!("programs use {first}"),
            None => "programs find no libcuda.so.1; `gpusession run` still gives them one".into(),
        };
        Ok(Outcome { text, json: json!({ "schema": 1, "linked": false, "driver": first }) })
    }

    fn linked(&self) -> bool {
        fs::read_link(self.root.join(LINK)).is_ok_and(|to| to == Path::new("/").join(LIST))
    }

    /// `setup-pam`: runs the distribution's program, or prints the steps that only an administrator
    /// may do.
    pub fn pam(&self, remove: bool) -> Result<Outcome> {
        let done = |text: &str, done: bool| Outcome {
            text: text.into(),
            json: json!({ "schema": 1, "done": done, "text": text }),
        };
        if self.root.join("usr/share/pam-configs/unix").exists() {
            if !remove && !self.root.join(PROFILE).exists() {
                return Err(Failure::new(code::CONFIGURATION, format!("/{PROFILE} is missing"))
                    .hint("install the package libpam-gpusession"));
            }
            self.must("pam-auth-update", &[if remove { "--disable" } else { "--enable" }, "gpusession"])?;
            let text = if remove {
                "pam_gpusession is off"
            } else {
                "pam_gpusession is on, for interactive sessions"
            };
            return Ok(done(text, true));
        }
        if let Ok(output) = self.run("authselect", &["current", "--raw"])
            && output.status.success()
        {
            let current = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            return Ok(done(&authselect(&current, remove), false));
        }
        let text = if remove {
            "remove the line with pam_gpusession.so from /etc/pam.d"
        } else {
            "add this line to the session part of the services in /etc/pam.d, after pam_systemd.so:\n  session optional pam_gpusession.so"
        };
        Ok(done(text, false))
    }
}

fn is_below(path: &str, folders: &[String]) -> bool {
    folders.iter().any(|folder| Path::new(path).parent() == Some(Path::new(folder)))
}

fn at(path: &Path, error: &io::Error) -> Failure {
    let failure = Failure::new(code::FAILED, format!("{}: {error}", path.display()));
    if error.kind() == io::ErrorKind::PermissionDenied {
        return Failure { code: code::NOT_ALLOWED, ..failure }.hint("run this command as root");
    }
    failure
}

/// Instructions only: authselect owns /etc/pam.d, and its profile is the administrator's to change.
fn authselect(current: &str, remove: bool) -> String {
    let mut words = current.split_whitespace();
    let profile = words.next().unwrap_or("local");
    let features = words.collect::<Vec<_>>().join(" ");
    let file = |profile: &str| format!("/etc/authselect/{profile}/postlogin");
    if remove {
        return format!(
            "remove the line with pam_gpusession.so from {}, then:\n  authselect apply-changes",
            file(profile)
        );
    }
    let line = "session optional pam_gpusession.so";
    if profile.starts_with("custom/") {
        return format!("add to {}:\n  {line}\nthen:\n  authselect apply-changes", file(profile));
    }
    format!(
        "authselect owns /etc/pam.d: create a profile from the current one, and add the module to it:\n  \
         authselect create-profile gpusession --base-on {profile}\n  \
         echo '{line}' >>{}\n  \
         authselect select custom/gpusession {features}",
        file("custom/gpusession")
    )
    .trim_end()
    .to_owned()
}

/// The container device specification, for `podman run --device gpusession.org/gpu=all`.
///
/// # Errors
/// If gpusession's libraries are not installed.
pub fn cdi() -> Result<Value> {
    let folder = paths::library_directory().ok_or_else(|| {
        Failure::new(code::CONFIGURATION, "libcuda.so.1 of gpusession is not installed")
            .hint("install the package gpusession-libs")
    })?;
    let socket = paths::grant_socket();
    let bind = |path: &Path| json!({ "hostPath": path, "containerPath": path, "options": ["ro", "nosuid", "nodev", "rbind"] });
    // Images for local GPUs expect libraries in these folders too; their order is kept.
    let search = format!(
        "LD_LIBRARY_PATH={}:/usr/local/nvidia/lib:/usr/local/nvidia/lib64:/usr/local/cuda/lib64",
        folder.display()
    );
    Ok(json!({
        "cdiVersion": "0.5.0",
        "kind": "gpusession.org/gpu",
        // All edits are the device's, since podman accepts no device without edits of its own.
        "devices": [{ "name": "all", "containerEdits": { "env": [search], "mounts": [bind(&folder), bind(&socket)] } }],
    }))
}

#[cfg(test)]
mod tests {
    use gpusession_test_support::json_table::documented;

    use super::*;

    /// A system with gpusession's library, and other drivers in the folders `others`.
    fn system(others: &[&str]) -> (tempfile::TempDir, System) {
        let root = tempfile::tempdir().unwrap();
        let put = |below: &str, text: &str| {
            let path = root.path().join(below);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n");
        put("etc/ld.so.conf.d/x86_64-linux-gnu.conf", "/usr/lib/multiarch\n");
        put(LIST, "/usr/lib/multiarch/gpusession\n");
        for folder in others.iter().chain(&["/usr/lib/multiarch/gpusession"]) {
            put(&format!("{}/empty.c", &folder[1..]), "");
            let folder = root.path().join(&folder[1..]);
            let made = Command::new("cc")
                .args(["-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-o"])
                .args([folder.join("libcuda.so.1"), folder.join("empty.c")])
                .status();
            assert!(made.unwrap().success());
        }
        let system = System::new(root.path());
        system.ldconfig(&[]).unwrap();
        (root, system)
    }

    fn first(system: &System) -> Option<String> {
        system.drivers().unwrap().into_iter().next()
    }

    const OURS: &str = "/usr/lib/multiarch/gpusession/libcuda.so.1";
    const THEIRS: &str = "/usr/lib/multiarch/libcuda.so.1";

    #[test]
    fn a_machine_without_a_driver_gets_ours() {
        let (root, system) = system(&[]);
        assert_eq!(first(&system), None);
        let outcome = system.libraries(false).unwrap();
        assert_eq!(outcome.json, json!({ "schema": 1, "linked": true, "driver": OURS }));
        documented("gpusession setup-libs", &outcome.json);
        assert_eq!(first(&system).as_deref(), Some(OURS));
        assert_eq!(system.libraries(false).unwrap(), outcome, "twice is as good as once");
        system.remove_libraries().unwrap();
        assert_eq!(first(&system), None);
        assert_eq!(
            fs::read_link(root.path().join(LINK)).unwrap(),
            Path::new(NOTHING),
            "an upgrade leaves it alone"
        );
        system.remove_libraries().unwrap();
    }

    #[test]
    fn a_driver_of_its_own_is_not_shadowed_unless_forced() {
        let (_root, system) = system(&["/usr/lib/multiarch"]);
        let outcome = system.libraries(false).unwrap();
        assert!(outcome.text.contains(THEIRS) && outcome.text.contains("--force"), "{}", outcome.text);
        assert_eq!(outcome.json["linked"], false);
        assert_eq!(first(&system).as_deref(), Some(THEIRS));
        assert_eq!(system.libraries(true).unwrap().json["driver"], OURS);
        assert_eq!(first(&system).as_deref(), Some(OURS));
        assert!(system.remove_libraries().unwrap().text.contains(THEIRS));
        assert_eq!(first(&system).as_deref(), Some(THEIRS));
    }

    #[test]
    fn a_kernel_driver_is_a_driver_and_a_stale_cache_is_none() {
        let (root, system) = system(&["/usr/lib/multiarch"]);
        fs::remove_file(root.path().join(&THEIRS[1..])).unwrap();
        assert_eq!(first(&system), None, "the cache still lists it");
        fs::create_dir_all(root.path().join("proc/driver/nvidia")).unwrap();
        assert!(system.libraries(false).unwrap().text.contains("kernel driver"));
        assert_eq!(system.libraries(true).unwrap().json["linked"], true);
    }

    #[test]
    fn a_folder_that_comes_first_is_named() {
        let (root, system) = system(&["/opt/cuda/compat"]);
        fs::write(root.path().join("etc/ld.so.conf.d/000_cuda.conf"), "/opt/cuda/compat\n").unwrap();
        system.ldconfig(&[]).unwrap();
        let failure = system.libraries(true).unwrap_err();
        assert!(failure.message.contains("/opt/cuda/compat/libcuda.so.1"), "{failure}");
    }

    #[test]
    fn without_the_package_the_package_is_named() {
        let root = tempfile::tempdir().unwrap();
        let failure = System::new(root.path()).libraries(false).unwrap_err();
        assert_eq!(failure.code, code::CONFIGURATION);
        assert!(failure.hint.unwrap().contains("gpusession-libs"));
    }

    /// A system with a program that records its arguments and prints `prints`.
    fn with_program(name: &str, prints: &str) -> (tempfile::TempDir, System) {
        use std::os::unix::fs::PermissionsExt as _;
        let root = tempfile::tempdir().unwrap();
        let program = root.path().join(name);
        let log = root.path().join("called");
        fs::write(&program, format!("#!/bin/sh\necho \"$@\" >>{}\necho '{prints}'\n", log.display()))
            .unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let mut path = root.path().as_os_str().to_owned();
        path.push(":/usr/bin:/bin");
        let system = System { root: root.path().to_owned(), path };
        (root, system)
    }

    #[test]
    fn a_run_of_ldconfig_beside_another_is_repeated() {
        let (root, system) = with_program("ldconfig", "");
        let fails = |times: usize| {
            let runs = root.path().join("called");
            let _ = fs::remove_file(&runs);
            let script = format!("#!/bin/sh\necho >>{0}\n[ $(wc -l <{0}) -gt {times} ]\n", runs.display());
            fs::write(root.path().join("ldconfig"), script).unwrap();
        };
        fails(2);
        system.update_cache().unwrap();
        fails(LDCONFIG_TRIES);
        assert!(system.update_cache().unwrap_err().message.contains("ldconfig failed"));
    }

    #[test]
    fn debian_has_a_program_for_pam() {
        let (root, system) = with_program("pam-auth-update", "");
        fs::create_dir_all(root.path().join("usr/share/pam-configs")).unwrap();
        fs::write(root.path().join("usr/share/pam-configs/unix"), "").unwrap();
        assert!(system.pam(false).unwrap_err().hint.unwrap().contains("libpam-gpusession"));
        fs::write(root.path().join(PROFILE), "").unwrap();
        assert_eq!(system.pam(false).unwrap().json["done"], true);
        assert_eq!(system.pam(true).unwrap().json["done"], true);
        let called = fs::read_to_string(root.path().join("called")).unwrap();
        assert_eq!(called, "--enable gpusession\n--disable gpusession\n");
    }

    #[test]
    fn pam_setup_under_authselect_only_prints_the_steps() {
        let (_root, system) = with_program("authselect", "sssd with-mkhomedir with-sudo");
        let outcome = system.pam(false).unwrap();
        assert_eq!(outcome.json["done"], false);
        for line in [
            "authselect create-profile gpusession --base-on sssd",
            "echo 'session optional pam_gpusession.so' >>/etc/authselect/custom/gpusession/postlogin",
            "authselect select custom/gpusession with-mkhomedir with-sudo",
        ] {
            assert!(outcome.text.contains(line), "{}", outcome.text);
        }
        let (_root, system) = with_program("authselect", "custom/ours");
        assert!(system.pam(false).unwrap().text.contains("/etc/authselect/custom/ours/postlogin"));
        assert!(system.pam(true).unwrap().text.contains("remove the line"));
    }

    #[test]
    fn elsewhere_the_line_is_shown() {
        let root = tempfile::tempdir().unwrap();
        let system = System { root: root.path().to_owned(), path: "/nonexistent".into() };
        let outcome = system.pam(false).unwrap();
        assert!(outcome.text.contains("session optional pam_gpusession.so"));
        documented("gpusession setup-pam", &outcome.json);
    }
}
