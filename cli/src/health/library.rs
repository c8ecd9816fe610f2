//! Checks of the libraries that programs load.

use std::path::{Path, PathBuf};

use gpusession_common::units::human_bytes;
use gpusession_diagnosis::check::{Check, Finding};
use gpusession_diagnosis::machine::Machine;

use super::facts::Facts;

/// The table of these checks.
pub const CHECKS: &[Check<Facts>] = &[
    Check { id: "library.installed", run: installed },
    Check { id: "library.version", run: version },
    Check { id: "library.first", run: |facts| first(facts, "libcuda.so.1") },
    Check { id: "library.nvml", run: |facts| first(facts, "libnvidia-ml.so.1") },
    Check { id: "library.path", run: path },
    Check { id: "library.preload", run: preload },
    Check { id: "library.own-driver", run: own_driver },
    Check { id: "library.loader-file", run: loader_file },
    Check { id: "library.variables", run: variables },
    Check { id: "library.cdi", run: cdi },
    Check { id: "library.cache", run: cache },
];

/// The link by which the loader finds gpusession's libraries.
const LINK: &str = "/etc/ld.so.conf.d/gpusession.conf";
const CDI: &str = "/etc/cdi/gpusession.json";

/// Returns `true` if a file contains the bytes; it is read, not loaded.
pub(super) fn contains(path: &Path, wanted: &[u8]) -> bool {
    std::fs::read(path).is_ok_and(|bytes| bytes.windows(wanted.len()).any(|window| window == wanted))
}

/// Returns `true` if a library is gpusession's own, by its symbol.
pub(super) fn is_ours(path: &Path) -> bool {
    contains(path, b"gpusession_marker")
}

/// Folders of a variable such as `LD_LIBRARY_PATH` that have the library, in order.
fn folders(machine: &Machine, library: &str) -> Vec<PathBuf> {
    let variable = machine.variable("LD_LIBRARY_PATH").unwrap_or("");
    // An empty entry is the working directory, which is not searched for here.
    let named = variable.split([':', ';']).filter(|folder| folder.starts_with('/'));
    named.map(|folder| Path::new(folder).join(library)).filter(|path| machine.at(path).exists()).collect()
}

fn installed(facts: &Facts) -> Finding {
    match &facts.library {
        Some(folder) => Finding::ok(format!("gpusession's libraries are in {}", folder.display())),
        None if !facts.client() => Finding::skipped("no library, and this machine is no client"),
        None => Finding::fault(
            "gpusession's libcuda.so.1 is not installed",
            "install the package gpusession-libs, or name its folder in GPUSESSION_LIBDIR",
        ),
    }
}

/// Returns the version that a library of gpusession's has in its file.
fn version_of(library: &[u8]) -> Option<String> {
    const BEFORE: &[u8] = b"gpusession library ";
    /// A longer one is none.
    const LONGEST: usize = 40;
    let at = library.windows(BEFORE.len()).position(|window| window == BEFORE)? + BEFORE.len();
    let version = library[at..].iter().take(LONGEST).take_while(|byte| byte.is_ascii_graphic());
    Some(version.map(|byte| char::from(*byte)).collect()).filter(|version: &String| !version.is_empty())
}

fn version(facts: &Facts) -> Finding {
    let Some(folder) = &facts.library else { return Finding::skipped("no library") };
    let path = folder.join("libcuda.so.1");
    let (shown, mine) = (path.display(), env!("CARGO_PKG_VERSION"));
    match std::fs::read(facts.machine.at(&path)).ok().and_then(|bytes| version_of(&bytes)) {
        None => Finding::skipped(format!("{shown} names no version")),
        Some(version) if version == mine => {
            Finding::ok(format!("{shown} is version {mine}, as this command"))
        }
        Some(version) => Finding::warning(
            format!("{shown} is version {version}, this command {mine}: servers may refuse one of them"),
            "install gpusession and gpusession-libs of one version",
        ),
    }
}

/// Returns the file of `/etc/ld.so.conf.d` that names a library's folder, and whether it names no
/// other one.
fn list_with(machine: &Machine, library: &Path) -> Option<(String, bool)> {
    const LISTS: &str = "/etc/ld.so.conf.d";
    // The distribution lists these, and other software needs them.
    if ["/lib", "/usr/lib", "/usr/local/lib"].iter().any(|folder| library.starts_with(folder)) {
        return None;
    }
    let lists = machine.list(LISTS).into_iter().filter(|name| name.ends_with(".conf"));
    lists.map(|name| format!("{LISTS}/{name}")).filter(|list| list != LINK).find_map(|list| {
        let text = machine.read(&list).ok()?;
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or("").trim());
        let folders: Vec<_> = lines.filter(|line| !line.is_empty()).map(Path::new).collect();
        folders.contains(&library.parent()?).then_some((list, folders.len() == 1))
    })
}

/// Judges the library that a program of this shell loads, as the loader would choose it.
fn first(facts: &Facts, library: &str) -> Finding {
    let machine = &facts.machine;
    let (winner, why) = match folders(machine, library).into_iter().next() {
        Some(path) => (path, "by LD_LIBRARY_PATH"),
        None => match machine.loader(library) {
            None => return Finding::skipped("ldconfig does not list the loader's cache"),
            Some(found) => match found.first() {
                Some(path) => (path.into(), "first in the loader's cache"),
                None if machine.exists("/proc/driver/nvidia") || !facts.client() => {
                    return Finding::skipped(format!("the loader finds no {library}"));
                }
                None => {
                    return Finding::warning(
                        format!("the loader finds no {library}; only `gpusession run` gives programs one"),
                        "sudo gpusession setup-libs",
                    );
                }
            },
        },
    };
    let shown = winner.display();
    if is_ours(&machine.at(&winner)) {
        return Finding::ok(format!("{shown}, gpusession's, {why}"));
    }
    if winner.components().any(|part| part.as_os_str() == "stubs") {
        return Finding::fault(
            format!("{shown}, a stub for linking without any GPU, {why}"),
            format!(
                "remove {} from LD_LIBRARY_PATH or /etc/ld.so.conf.d",
                winner.with_file_name("").display()
            ),
        );
    }
    if machine.exists("/proc/driver/nvidia") {
        return Finding::ok(format!("{shown}, of this machine's own driver, {why}"));
    }
    let remedy = match (why, list_with(machine, &winner)) {
        ("by LD_LIBRARY_PATH", _) => "unset LD_LIBRARY_PATH, or use `gpusession run -- PROGRAM`".into(),
        (_, Some((list, true))) => format!("sudo rm {list} && sudo ldconfig"),
        (_, Some((list, false))) => {
            format!(
                "remove the line of {} from {list}, then sudo ldconfig",
                winner.with_file_name("").display()
            )
        }
        _ => "sudo gpusession setup-libs --force, or remove the package that has this file".into(),
    };
    Finding::fault(
        format!("{shown}, which is not gpusession's, {why}; this machine has no card for it"),
        remedy,
    )
}

fn path(facts: &Facts) -> Finding {
    let Some(variable) = facts.machine.variable("LD_LIBRARY_PATH") else {
        return Finding::ok("LD_LIBRARY_PATH is not set");
    };
    // The name that some frameworks load before `libcuda.so.1`.
    let short = folders(&facts.machine, "libcuda.so");
    match short.first().filter(|path| !is_ours(&facts.machine.at(path))) {
        Some(path) => Finding::warning(
            format!("LD_LIBRARY_PATH has {}, which is not gpusession's", path.display()),
            format!("remove {} from LD_LIBRARY_PATH", path.with_file_name("").display()),
        ),
        None => Finding::ok(format!("LD_LIBRARY_PATH is {variable}")),
    }
}

fn preload(facts: &Facts) -> Finding {
    let file = facts.machine.read("/etc/ld.so.preload").unwrap_or_default();
    let variable = facts.machine.variable("LD_PRELOAD").unwrap_or("");
    let named = file.split_whitespace().chain(variable.split([':', ' '])).filter(|name| !name.is_empty());
    let cuda: Vec<_> = named.filter(|name| name.contains("cuda") || name.contains("nvidia")).collect();
    match cuda.is_empty() {
        true => Finding::ok("no CUDA library is loaded before others"),
        false => Finding::warning(
            format!("{} is loaded into every program before others", cuda.join(", ")),
            "unset LD_PRELOAD, or remove the line from /etc/ld.so.preload",
        ),
    }
}

fn own_driver(facts: &Facts) -> Finding {
    match facts.machine.exists("/proc/driver/nvidia") {
        true if !facts.client() => Finding::ok("an NVIDIA driver of its own; this machine is no client"),
        true => Finding::warning(
            "this machine has an NVIDIA driver of its own: its programs use local cards by default",
            "gpusession run -- PROGRAM uses remote GPUs; sudo gpusession setup-libs --force does for all",
        ),
        false => Finding::ok("no NVIDIA driver of its own"),
    }
}

fn loader_file(facts: &Facts) -> Finding {
    let machine = &facts.machine;
    let target = std::fs::read_link(machine.at(LINK));
    let list = machine.exists("/usr/share/gpusession/ld.so.conf");
    match target {
        Ok(target) if target.ends_with("dev/null") => Finding::warning(
            format!(
                "{LINK} leads to /dev/null, as `setup-libs --remove` leaves it: the loader does not search \
                 gpusession's folder"
            ),
            "sudo gpusession setup-libs",
        ),
        Ok(target) if !target.ends_with("usr/share/gpusession/ld.so.conf") => Finding::warning(
            format!("{LINK} leads to {}, not to the package's list", target.display()),
            "sudo gpusession setup-libs --remove && sudo gpusession setup-libs",
        ),
        Ok(_) if !list => Finding::fault(
            format!("{LINK} leads to a file that does not exist"),
            "install the package gpusession-libs again",
        ),
        Ok(_) => Finding::ok(format!("{LINK} names gpusession's folder")),
        Err(_) if list => Finding::warning(
            format!("{LINK} does not exist: only `gpusession run` finds gpusession's libraries"),
            "sudo gpusession setup-libs",
        ),
        Err(_) => Finding::skipped("the package gpusession-libs is not installed"),
    }
}

fn variables(facts: &Facts) -> Finding {
    let machine = &facts.machine;
    if machine.variable("GPUSESSION_DISABLE") == Some("1") {
        return Finding::fault(
            "GPUSESSION_DISABLE=1: programs of this shell have no remote GPU",
            "unset GPUSESSION_DISABLE",
        );
    }
    if let Some(hidden) = machine.environment.get("CUDA_VISIBLE_DEVICES")
        && (hidden.trim().is_empty() || hidden.trim().starts_with('-'))
    {
        return Finding::fault(
            format!("CUDA_VISIBLE_DEVICES=\"{hidden}\" hides all GPUs"),
            "unset CUDA_VISIBLE_DEVICES",
        );
    }
    if let Some(socket) = machine.variable("GPUSESSION_SOCKET")
        && !machine.exists(socket)
    {
        return Finding::fault(
            format!("GPUSESSION_SOCKET={socket} does not exist"),
            "unset GPUSESSION_SOCKET",
        );
    }
    Finding::ok("no variable of this shell hides the GPUs")
}

fn cdi(facts: &Facts) -> Finding {
    let text = match facts.machine.read(CDI) {
        Ok(text) => text,
        Err(unread) if unread.missing() => return Finding::skipped(format!("no file {CDI} for containers")),
        Err(unread) => return Finding::skipped(unread.to_string()),
    };
    let remedy = format!("gpusession cdi | sudo tee {CDI}");
    let Ok(value) = serde_json::from_str::<serde_json::Value>(&text) else {
        return Finding::fault(format!("{CDI} is no JSON: containers do not start"), remedy);
    };
    let mounts = value["devices"][0]["containerEdits"]["mounts"].as_array();
    let paths = mounts.into_iter().flatten().filter_map(|mount| mount["hostPath"].as_str());
    // A stopped daemon has no socket, which another check reports.
    let paths = paths.filter(|path| Path::new(path) != facts.socket);
    match paths.filter(|path| !facts.machine.exists(path)).collect::<Vec<_>>()[..] {
        [] => Finding::ok(format!("{CDI} names files that exist")),
        ref missing => {
            Finding::fault(format!("{CDI} names {}, which does not exist", missing.join(", ")), remedy)
        }
    }
}

fn cache(facts: &Facts) -> Finding {
    let Some(folder) = &facts.cache else {
        return Finding::warning(
            "no place for compiled code: each start of a program compiles again",
            "set HOME or XDG_CACHE_HOME",
        );
    };
    let at = facts.machine.at(folder);
    // The folder appears at the first use: the nearest existing one decides.
    let Some(existing) = at.ancestors().find(|path| path.exists()) else {
        return Finding::skipped(format!("{}: no folder above it exists", folder.display()));
    };
    let shown = folder.display();
    if nix::unistd::access(existing, nix::unistd::AccessFlags::W_OK).is_err() {
        return Finding::warning(
            format!("{shown} is not writable: each start of a program compiles again"),
            "set XDG_CACHE_HOME to a folder of yours",
        );
    }
    let files = std::fs::read_dir(&at).into_iter().flatten().flatten();
    let used: u64 = files.filter_map(|file| Some(file.metadata().ok()?.len())).sum();
    match facts.machine.space(existing) {
        Some((free, total)) if free < 16 << 20 => {
            gpusession_diagnosis::host::space(&existing.display().to_string(), free, total)
        }
        _ => Finding::ok(format!("{shown}: {} of compiled code", human_bytes(used))),
    }
}

#[cfg(test)]
mod tests {
    use gpusession_diagnosis::check::State;

    use super::super::testing::{facts, plant};
    use super::*;

    const OURS: &str = "usr/lib/x86_64-linux-gnu/gpusession";

    #[test]
    fn a_foreign_library_first_in_the_path_is_a_fault() {
        let (root, mut facts) = facts();
        plant(&root, "ours/libcuda.so.1", "ELF gpusession_marker");
        plant(&root, "cuda/libcuda.so.1", "ELF of another");
        plant(&root, "cuda/stubs/libcuda.so.1", "ELF stub");
        let mut with = |path: &str| {
            facts.machine.environment.insert("LD_LIBRARY_PATH".into(), path.into());
            first(&facts, "libcuda.so.1")
        };
        assert_eq!(with("/none:/ours:/cuda").state, State::Ok);
        let finding = with("/cuda:/ours");
        assert_eq!(finding.state, State::Fault);
        assert!(finding.found.starts_with("/cuda/libcuda.so.1"), "{finding:?}");
        assert!(finding.remedy.starts_with("unset LD_LIBRARY_PATH"), "{finding:?}");
        assert!(with("/cuda/stubs").found.contains("a stub"));
    }

    #[test]
    fn the_list_that_names_a_foreign_library_is_found() {
        let (root, facts) = facts();
        let list = |library: &str| list_with(&facts.machine, Path::new(library));
        assert_eq!(list("/opt/cuda/libcuda.so.1"), None);
        plant(&root, "etc/ld.so.conf.d/000-other.conf", "# CUDA\n/opt/cuda/  \n");
        plant(&root, "etc/ld.so.conf.d/gpusession.conf", "/ours\n");
        plant(&root, "etc/ld.so.conf.d/more.conf", "/usr/more\n/opt/two # for tests\n");
        assert_eq!(list("/opt/cuda/libcuda.so.1"), Some(("/etc/ld.so.conf.d/000-other.conf".into(), true)));
        assert_eq!(list("/opt/two/libcuda.so.1"), Some(("/etc/ld.so.conf.d/more.conf".into(), false)));
        assert_eq!(list("/ours/libcuda.so.1"), None);
        plant(&root, "etc/ld.so.conf.d/libc.conf", "/usr/local/lib\n");
        assert_eq!(list("/usr/local/lib/libcuda.so.1"), None, "the distribution's own");
    }

    #[test]
    fn a_library_of_another_version_is_a_warning() {
        let (root, mut facts) = facts();
        assert_eq!(version(&facts).state, State::Skipped);
        facts.library = Some("/ours".into());
        let with = |text: &str| {
            plant(&root, "ours/libcuda.so.1", text);
            let finding = version(&facts);
            (finding.state, finding.found)
        };
        assert_eq!(with("ELF of before").0, State::Skipped);
        assert_eq!(
            with(concat!("ELF gpusession library ", env!("CARGO_PKG_VERSION"), "\nmore")).0,
            State::Ok
        );
        let (state, found) = with("ELF gpusession library 0.0.9\n");
        assert!(state == State::Warning && found.contains("is version 0.0.9, this command"), "{found}");
    }

    #[test]
    fn a_foreign_unversioned_name_is_a_warning_where_it_comes_first() {
        let (root, mut facts) = facts();
        plant(&root, "ours/libcuda.so", "ELF gpusession_marker");
        plant(&root, "cuda/libcuda.so", "ELF of another");
        let mut with = |folders: &str| {
            facts.machine.environment.insert("LD_LIBRARY_PATH".into(), folders.into());
            path(&facts)
        };
        assert_eq!(with("/ours:/cuda").state, State::Ok);
        assert_eq!(with("/cuda:/ours").state, State::Warning);
    }

    #[test]
    fn a_driver_without_a_card_in_the_loaders_cache_is_a_fault() {
        let (root, facts) = facts();
        plant(&root, "etc/ld.so.conf", "/usr/lib/other\n");
        plant(&root, "usr/lib/other/empty.c", "");
        let folder = root.path().join("usr/lib/other");
        let made = std::process::Command::new("cc")
            .args(["-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-o"])
            .args([folder.join("libcuda.so.1"), folder.join("empty.c")])
            .status();
        assert!(made.unwrap().success());
        Machine::here().run("ldconfig", &["-r", root.path().to_str().unwrap()]).unwrap();
        let finding = first(&facts, "libcuda.so.1");
        assert_eq!(finding.state, State::Fault);
        assert!(finding.remedy.contains("setup-libs --force"), "{finding:?}");
        plant(&root, "proc/driver/nvidia/version", "");
        assert_eq!(first(&facts, "libcuda.so.1").state, State::Ok, "a GPU host uses its own");
        assert_eq!(own_driver(&facts).state, State::Ok, "no client");
        plant(&root, "etc/gpusession/gpusession.toml", "");
        assert_eq!(own_driver(&facts).state, State::Warning);
    }

    #[test]
    fn the_loaders_file_is_judged_by_its_target() {
        let (root, facts) = facts();
        assert_eq!(loader_file(&facts).state, State::Skipped);
        plant(&root, "usr/share/gpusession/ld.so.conf", OURS);
        assert_eq!(loader_file(&facts).remedy, "sudo gpusession setup-libs");
        let link = root.path().join(&LINK[1..]);
        std::fs::create_dir_all(link.parent().unwrap()).unwrap();
        let lead = |target: &str| {
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(target, &link).unwrap();
            loader_file(&facts).state
        };
        assert_eq!(lead("/dev/null"), State::Warning);
        assert_eq!(lead("../../usr/share/gpusession/ld.so.conf"), State::Ok);
        std::fs::remove_file(root.path().join("usr/share/gpusession/ld.so.conf")).unwrap();
        assert_eq!(loader_file(&facts).state, State::Fault);
    }

    #[test]
    fn variables_that_hide_gpus_are_faults() {
        let (_root, mut facts) = facts();
        assert_eq!(variables(&facts).state, State::Ok);
        for (name, value) in
            [("GPUSESSION_DISABLE", "1"), ("CUDA_VISIBLE_DEVICES", ""), ("GPUSESSION_SOCKET", "/none")]
        {
            facts.machine.environment = [(name.to_owned(), value.to_owned())].into();
            let finding = variables(&facts);
            assert_eq!((finding.state, finding.remedy), (State::Fault, format!("unset {name}")));
        }
        facts.machine.environment = [("LD_PRELOAD".to_owned(), "/x/libcuda.so".to_owned())].into();
        assert_eq!(preload(&facts).state, State::Warning);
    }

    #[test]
    fn an_outdated_cdi_file_is_a_fault() {
        let (root, facts) = facts();
        assert_eq!(cdi(&facts).state, State::Skipped);
        let text = r#"{"devices":[{"containerEdits":{"mounts":[{"hostPath":"/lib/gone"}]}}]}"#;
        plant(&root, "etc/cdi/gpusession.json", text);
        assert!(cdi(&facts).found.contains("/lib/gone"));
        plant(&root, "lib/gone", "");
        assert_eq!(cdi(&facts).state, State::Ok);
    }

    #[test]
    fn missing_folders_are_named() {
        let (_root, mut facts) = facts();
        assert_eq!(installed(&facts).state, State::Skipped, "no client");
        assert_eq!(cache(&facts).state, State::Ok);
        facts.daemon =
            super::super::facts::Daemon::Answers(Box::new(super::super::testing::described()), vec![]);
        assert_eq!(installed(&facts).state, State::Fault);
        facts.cache = None;
        assert_eq!(cache(&facts).state, State::Warning);
    }
}
