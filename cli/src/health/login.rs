//! Checks of the daemon, its configuration, and the sessions of users.

use gpusession_diagnosis::check::{Check, Finding};
use gpusession_diagnosis::machine::Machine;
use gpusession_diagnosis::remedy;

use super::facts::{Daemon, Facts};
use crate::show;

/// The table of these checks.
pub const CHECKS: &[Check<Facts>] = &[
    Check { id: "login.daemon", run: daemon },
    Check { id: "login.unit", run: unit },
    Check { id: "login.drop-ins", run: drop_ins },
    Check { id: "login.socket", run: socket },
    Check { id: "login.configuration", run: configuration },
    Check { id: "login.folders", run: folders },
    Check { id: "login.gpu", run: gpu },
    Check { id: "login.leases", run: leases },
    Check { id: "login.pam", run: pam },
    Check { id: "login.pam-order", run: pam_order },
    Check { id: "login.pam-module", run: pam_module },
    Check { id: "login.profile", run: profile },
    Check { id: "login.polkit", run: polkit },
];

const UNIT: &str = "gpusession.service";
const MODULE: &str = "pam_gpusession.so";
/// Services through which people log in, and the files that these include.
const STACKS: [&str; 8] =
    ["common-session", "system-auth", "postlogin", "password-auth", "sshd", "login", "gdm-password", "su"];

fn daemon(facts: &Facts) -> Finding {
    match &facts.daemon {
        Daemon::Answers(described, _) if described.version != env!("CARGO_PKG_VERSION") => Finding::warning(
            format!("the daemon is {}, this command {}", described.version, env!("CARGO_PKG_VERSION")),
            "sudo systemctl restart gpusession; running programs continue",
        ),
        Daemon::Answers(described, _) => Finding::ok(format!("gpusessiond {} answers", described.version)),
        Daemon::Silent(why) if facts.machine.unit(UNIT, "LoadState").as_deref() == Some("loaded") => {
            Finding::fault(why.clone(), "systemctl status gpusession; sudo systemctl start gpusession")
        }
        Daemon::Silent(_) => Finding::skipped(
            "no daemon, and gpusession.service is not installed: only `gpusession run --server` works",
        ),
    }
}

fn unit(facts: &Facts) -> Finding {
    let machine = &facts.machine;
    let state = |property: &str| machine.unit(UNIT, property);
    match (state("LoadState").as_deref(), state("UnitFileState").as_deref()) {
        (None, _) => Finding::skipped("systemd does not answer"),
        (Some("masked"), _) => Finding::fault(
            "gpusession.service is masked",
            "sudo systemctl unmask gpusession && sudo systemctl start gpusession",
        ),
        (Some("loaded"), Some("enabled" | "enabled-runtime" | "alias" | "static")) => {
            match state("NeedDaemonReload").as_deref() {
                Some("yes") => Finding::warning(
                    "the file of gpusession.service changed after systemd read it",
                    "sudo systemctl daemon-reload",
                ),
                _ => Finding::ok("gpusession.service starts with the machine"),
            }
        }
        (Some("loaded"), _) => Finding::warning(
            "gpusession.service is not enabled: no GPUs after a restart of the machine",
            "sudo systemctl enable --now gpusession",
        ),
        _ => Finding::skipped("gpusession.service is not installed"),
    }
}

fn drop_ins(facts: &Facts) -> Finding {
    let folders = ["/etc/systemd/system", "/run/systemd/system"];
    let mut found = Vec::new();
    for folder in folders {
        if facts.machine.exists(format!("{folder}/{UNIT}")) {
            found.push(format!("{folder}/{UNIT}"));
        }
        let below = format!("{folder}/{UNIT}.d");
        let names = facts.machine.list(&below).into_iter().filter(|name| name.ends_with(".conf"));
        found.extend(names.map(|name| format!("{below}/{name}")));
    }
    match found.is_empty() {
        true => Finding::ok("no file of this machine changes gpusession.service"),
        false => Finding::warning(
            format!("{} changes gpusession.service", found.join(", ")),
            "systemctl cat gpusession; sudo systemctl revert gpusession && sudo systemctl restart gpusession",
        ),
    }
}

fn socket(facts: &Facts) -> Finding {
    let path = facts.socket.display();
    match (facts.machine.exists(&facts.socket), &facts.daemon) {
        (true, Daemon::Answers(..)) => Finding::ok(format!("programs reach the daemon at {path}")),
        (true, Daemon::Silent(_)) => Finding::warning(
            format!("{path} exists without a daemon: programs and logins wait there"),
            "sudo systemctl restart gpusession.socket gpusession",
        ),
        (false, Daemon::Answers(..)) => Finding::fault(
            format!(
                "{path} does not exist: programs do not reach the daemon; a container gets it by `gpusession cdi`"
            ),
            "sudo systemctl restart gpusession.socket gpusession",
        ),
        (false, Daemon::Silent(_)) => Finding::skipped(format!("{path} does not exist, and no daemon runs")),
    }
}

fn configuration(facts: &Facts) -> Finding {
    let path = facts.configuration.display().to_string();
    match gpusessiond::config::Config::load(&facts.machine.at(&facts.configuration)) {
        Ok(config) if config.files.is_empty() && !facts.client() => {
            Finding::skipped(format!("{path} does not exist, and this machine is no client"))
        }
        Ok(config) if config.files.is_empty() => Finding::warning(
            format!("{path} does not exist: no lease is configured"),
            format!("sudoedit {path}"),
        ),
        Ok(config) => Finding::ok(format!(
            "{} file(s) without errors, {} lease(s)",
            config.files.len(),
            config.leases.len()
        )),
        Err(gpusessiond::config::ConfigError::Read { path, error }) => {
            Finding::skipped(format!("cannot read {}: {error}", path.display()))
        }
        Err(error) => {
            let error = error.to_string();
            let remedy = remedy::edit(&error, "sudo systemctl reload gpusession");
            Finding::fault(error, remedy)
        }
    }
}

fn folders(facts: &Facts) -> Finding {
    let machine = &facts.machine;
    let judge = |path: &std::path::Path, forbidden: u32, remedy: &str| match machine.owner(path) {
        Ok((_, mode)) if mode & forbidden != 0 => Some(Finding::fault(
            format!("{} has mode {mode:04o}", path.display()),
            format!("sudo chmod {remedy} {}", path.display()),
        )),
        Ok((_, mode)) => Some(Finding::ok(format!("{} {mode:04o}", path.display()))),
        Err(_) => None,
    };
    let configuration = facts.configuration.parent().and_then(|folder| judge(folder, 0o022, "go-w"));
    let state = facts.state.as_deref().and_then(|folder| judge(folder, 0o077, "700"));
    let key = judge(&facts.identity.join("client.key"), 0o077, "600");
    Finding::worst([configuration, state, key].into_iter().flatten())
        .unwrap_or_else(|| Finding::skipped("no folder of gpusession exists"))
}

fn gpu(facts: &Facts) -> Finding {
    let Daemon::Answers(described, mine) = &facts.daemon else {
        return Finding::skipped("the daemon does not answer whether this shell's programs get a GPU");
    };
    match show::no_gpu(described, mine) {
        None => Finding::ok("programs of this shell get GPUs"),
        Some(reason) => Finding::fault(reason, "gpusession status"),
    }
}

fn leases(facts: &Facts) -> Finding {
    let Daemon::Answers(described, _) = &facts.daemon else {
        return Finding::skipped("the daemon does not answer about leases");
    };
    let judge = |lease: &gpusession_bus::describe::Lease| {
        let name = lease.name_or_id();
        match (lease.state.as_str(), lease.failures.last()) {
            ("pending", _) => Finding::warning(
                format!("{name} waits: {}", lease.trouble.as_deref().unwrap_or("no server has answered")),
                "gpusession status",
            ),
            (_, Some(failure)) => Finding::warning(
                format!("{name}: process {} ({}): {}", failure.pid, failure.program, failure.reason),
                "journalctl -u gpusession; on the server: journalctl -u gpuserver",
            ),
            (state, None) => Finding::ok(format!("{name} is {state}")),
        }
    };
    Finding::worst(described.leases.iter().map(judge)).unwrap_or_else(|| Finding::skipped("no lease"))
}

/// Lines of a PAM file's session part: control word and module.
fn session_lines(machine: &Machine, file: &str) -> Vec<(String, String)> {
    let text = machine.read(format!("/etc/pam.d/{file}")).unwrap_or_default();
    let line = |line: &str| {
        let line = line.split('#').next().unwrap_or("").trim().trim_start_matches('-');
        let rest = line.strip_prefix("session")?.trim_start();
        let (control, rest) = match rest.strip_prefix('[') {
            Some(rest) => rest.split_once(']')?,
            None => rest.split_once(char::is_whitespace)?,
        };
        Some((control.to_owned(), rest.split_whitespace().next()?.to_owned()))
    };
    text.lines().filter_map(line).collect()
}

/// Names of the PAM files whose session part has the module.
fn with_module(machine: &Machine) -> Vec<&'static str> {
    let has = |file: &&str| session_lines(machine, file).iter().any(|(_, module)| module.ends_with(MODULE));
    STACKS.into_iter().filter(has).collect()
}

fn pam(facts: &Facts) -> Finding {
    if facts.machine.list("/etc/pam.d").is_empty() {
        return Finding::skipped("/etc/pam.d cannot be read");
    }
    match with_module(&facts.machine)[..] {
        [] if !facts.needs_pam() => {
            Finding::skipped("no PAM file has pam_gpusession.so, and no lease or variable needs it")
        }
        [] => Finding::fault(
            "no PAM file has pam_gpusession.so: leases of class session and [environment] need it",
            "sudo gpusession setup-pam",
        ),
        ref files => Finding::ok(format!("pam_gpusession.so is in /etc/pam.d/{}", files.join(", "))),
    }
}

fn pam_order(facts: &Facts) -> Finding {
    let files = with_module(&facts.machine);
    let judge = |file: &&str| {
        let lines = session_lines(&facts.machine, file);
        let ours = lines.iter().position(|(_, module)| module.ends_with(MODULE)).unwrap_or(0);
        match lines[..ours].iter().find(|(control, _)| control == "sufficient") {
            Some((_, module)) => Finding::fault(
                format!(
                    "/etc/pam.d/{file}: `sufficient {module}` ends the session part before pam_gpusession.so"
                ),
                format!("move the line of pam_gpusession.so in /etc/pam.d/{file} above it"),
            ),
            None => Finding::ok(format!("/etc/pam.d/{file}: no line ends the session part before it")),
        }
    };
    Finding::worst(files.iter().map(judge))
        .unwrap_or_else(|| Finding::skipped("no PAM file has pam_gpusession.so"))
}

fn pam_module(facts: &Facts) -> Finding {
    let folders = [
        format!("/usr/lib/{}-linux-gnu/security", std::env::consts::ARCH),
        "/usr/lib64/security".into(),
        "/usr/lib/security".into(),
        format!("/lib/{}-linux-gnu/security", std::env::consts::ARCH),
        "/lib/security".into(),
    ];
    let found = folders.iter().map(|f| format!("{f}/{MODULE}")).find(|path| facts.machine.exists(path));
    match (found, with_module(&facts.machine).is_empty()) {
        (Some(path), _) => Finding::ok(path),
        (None, false) => Finding::fault(
            format!("PAM files name {MODULE}, which is not installed"),
            "install the package libpam-gpusession, or sudo gpusession setup-pam --remove",
        ),
        (None, true) => Finding::skipped("libpam-gpusession is not installed"),
    }
}

/// Returns `true` if the caller's shell is zsh, and reads no file of `/etc/profile.d`.
fn zsh_does_not_read_it(machine: &Machine) -> bool {
    let home = machine.variable("ZDOTDIR").or_else(|| machine.variable("HOME")).unwrap_or("/root");
    let folders = ["/etc/", "/etc/zsh/", &format!("{home}/.")];
    let files = folders.iter().flat_map(|f| ["zprofile", "zshrc"].map(|name| format!("{f}{name}")));
    let mut texts = files.map(|file| machine.read(file).unwrap_or_default());
    machine.variable("SHELL").is_some_and(|shell| shell.ends_with("/zsh"))
        && !texts
            .any(|text| text.lines().any(|l| !l.trim_start().starts_with('#') && l.contains("/etc/profile")))
}

fn profile(facts: &Facts) -> Finding {
    if !facts.machine.exists("/usr/share/gpusession") {
        return Finding::skipped("the package gpusession is not installed");
    }
    match facts.machine.read("/etc/profile.d/gpusession.sh") {
        Ok(_) if zsh_does_not_read_it(&facts.machine) => Finding::warning(
            "no start file of your shell, zsh, reads /etc/profile.d/gpusession.sh: its prompts do not warn \
             of idle leases",
            "echo '. /etc/profile.d/gpusession.sh' >>${ZDOTDIR:-~}/.zshrc",
        ),
        Ok(_) => Finding::ok("/etc/profile.d/gpusession.sh"),
        Err(unread) => Finding::warning(
            format!("{unread}: prompts do not warn of idle leases"),
            "sudo apt-get install --reinstall -o Dpkg::Options::=--force-confmiss gpusession, or dnf reinstall gpusession",
        ),
    }
}

fn polkit(facts: &Facts) -> Finding {
    if let Daemon::Silent(_) = facts.daemon {
        return Finding::skipped("no daemon asks polkit");
    }
    let actions = "/usr/share/polkit-1/actions";
    let running = facts.machine.unit("polkit.service", "LoadState");
    match facts.machine.list(actions).iter().any(|name| name.starts_with("org.gpusession1")) {
        true if running.as_deref() == Some("not-found") => Finding::warning(
            "polkit is not installed: only root changes leases of the machine",
            "install polkit (package polkitd) if other administrators are to change them",
        ),
        true => Finding::ok("polkit has gpusession's actions"),
        false => Finding::warning(
            format!("{actions} has no actions of gpusession: polkit decides on none"),
            "install the package gpusession again",
        ),
    }
}

#[cfg(test)]
mod tests {
    use gpusession_bus::describe::{Failure, Lease};
    use gpusession_diagnosis::check::State;

    use super::super::testing::{described, facts, plant, program};
    use super::*;

    #[test]
    fn a_zsh_that_reads_no_profile_is_a_warning() {
        let (root, mut facts) = facts();
        plant(&root, "usr/share/gpusession/ld.so.conf", "");
        assert!(profile(&facts).remedy.contains("reinstall"), "the file is missing");
        plant(&root, "etc/profile.d/gpusession.sh", "");
        plant(&root, "etc/zsh/zshrc", "# . /etc/profile\n");
        assert_eq!(profile(&facts).state, State::Ok, "another shell");
        facts.machine.environment.insert("SHELL".into(), "/bin/zsh".into());
        facts.machine.environment.insert("HOME".into(), "/home/ada".into());
        let finding = profile(&facts);
        assert_eq!(finding.state, State::Warning);
        plant(&root, "home/ada/.zshrc", ". /etc/profile.d/gpusession.sh\n");
        assert_eq!(profile(&facts).state, State::Ok, "as the remedy {} does", finding.remedy);
    }

    #[test]
    fn a_silent_daemon_is_a_fault_where_its_unit_is_installed() {
        let (root, mut facts) = facts();
        assert_eq!(daemon(&facts).state, State::Skipped);
        program(&root, "systemctl", "case $3 in LoadState) echo loaded;; *) echo disabled;; esac");
        let finding = daemon(&facts);
        assert_eq!(finding.state, State::Fault);
        assert!(finding.remedy.contains("systemctl start gpusession"));
        assert_eq!(unit(&facts).remedy, "sudo systemctl enable --now gpusession");
        let mut old = described();
        old.version = "0.0.1".into();
        facts.daemon = Daemon::Answers(Box::new(old), vec![]);
        assert_eq!(daemon(&facts).state, State::Warning);
        program(&root, "systemctl", "echo masked");
        assert_eq!(unit(&facts).state, State::Fault);
    }

    #[test]
    fn a_lease_that_waits_or_failed_is_named() {
        let (_root, mut facts) = facts();
        assert_eq!((gpu(&facts).state, leases(&facts).state), (State::Skipped, State::Skipped));
        let mut of = |lease: Lease| {
            let mut described = described();
            described.leases = vec![lease];
            facts.daemon = Daemon::Answers(Box::new(described), vec!["l1".into()]);
            (gpu(&facts).state, leases(&facts))
        };
        let held = Lease { id: "l1".into(), state: "active".into(), ..Default::default() };
        let (own, all) = of(held.clone());
        assert_eq!((own, all.state), (State::Ok, State::Ok));
        let failures = vec![Failure { program: "train".into(), ..Default::default() }];
        let (own, all) = of(Lease { failures, ..held.clone() });
        assert_eq!((own, all.state), (State::Ok, State::Warning));
        assert!(all.found.contains("train"), "{all:?}");
        let (own, all) = of(Lease { state: "pending".into(), ..held.clone() });
        assert_eq!((own, all.state), (State::Fault, State::Warning));
        assert_eq!(of(Lease { id: "l2".into(), ..held }).0, State::Fault, "another user's");
    }

    #[test]
    fn polkit_without_actions_is_a_warning() {
        let (root, mut facts) = facts();
        assert_eq!(polkit(&facts).state, State::Skipped);
        facts.daemon = Daemon::Answers(Box::new(described()), vec![]);
        assert!(polkit(&facts).remedy.contains("again"));
        plant(&root, "usr/share/polkit-1/actions/org.gpusession1.policy", "");
        assert_eq!(polkit(&facts).state, State::Ok);
        program(&root, "systemctl", "echo not-found");
        assert!(polkit(&facts).remedy.contains("polkitd"));
    }

    #[test]
    fn drop_ins_are_named() {
        let (root, facts) = facts();
        assert_eq!(drop_ins(&facts).state, State::Ok);
        plant(&root, "etc/systemd/system/gpusession.service.d/override.conf", "");
        assert!(drop_ins(&facts).found.contains("override.conf"));
    }

    #[test]
    fn a_missing_pam_line_is_a_fault_if_a_lease_needs_it() {
        let (root, mut facts) = facts();
        assert_eq!(pam(&facts).state, State::Skipped);
        plant(&root, "etc/pam.d/common-session", "session required pam_unix.so\n");
        assert_eq!(pam(&facts).state, State::Skipped, "nothing needs it");
        let mut needs = described();
        needs.leases_on_demand = true;
        facts.daemon = Daemon::Answers(Box::new(needs), vec![]);
        assert_eq!(pam(&facts).remedy, "sudo gpusession setup-pam");
        plant(&root, "etc/pam.d/common-session", "session optional pam_gpusession.so # ours\n");
        assert_eq!(pam(&facts).state, State::Ok);
        assert_eq!(pam_module(&facts).state, State::Fault, "the module is not installed");
    }

    #[test]
    fn a_pam_line_behind_sufficient_is_a_fault() {
        let (root, facts) = facts();
        assert_eq!(pam_order(&facts).state, State::Skipped);
        let line = "session [default=1] pam_permit.so\n-session optional pam_gpusession.so\n";
        plant(&root, "etc/pam.d/sshd", line);
        assert_eq!(pam_order(&facts).state, State::Ok);
        plant(&root, "etc/pam.d/sshd", &format!("session sufficient pam_x.so\n{line}"));
        assert!(pam_order(&facts).found.contains("`sufficient pam_x.so`"));
    }

    #[test]
    fn old_configuration_keys_and_unsafe_folders_are_faults() {
        let (root, facts) = facts();
        assert_eq!(configuration(&facts).state, State::Skipped);
        plant(&root, "etc/gpusession/gpusession.toml", "[[lease]]\ngpu = 1\n");
        let finding = configuration(&facts);
        assert_eq!(finding.state, State::Fault);
        assert!(finding.found.contains("did you mean `gpus`?"), "{finding:?}");
        plant(&root, "etc/gpusession/gpusession.toml", "[[lease]]\ngpus = 1\n");
        assert_eq!(configuration(&facts).state, State::Ok);
        plant(&root, "var/lib/gpusession/identity/client.key", "");
        let finding = folders(&facts);
        assert_eq!(finding.state, State::Fault);
        assert!(finding.remedy.contains("chmod 600 /var/lib/gpusession/identity/client.key"), "{finding:?}");
    }

    #[test]
    fn a_stale_socket_and_one_that_is_not_mounted_are_named() {
        let (root, mut facts) = facts();
        assert_eq!(socket(&facts).state, State::Skipped);
        plant(&root, "run/gpusession/grant.sock", "");
        assert_eq!(socket(&facts).state, State::Warning);
        facts.daemon = Daemon::Answers(Box::new(described()), vec![]);
        assert_eq!(socket(&facts).state, State::Ok);
        std::fs::remove_file(root.path().join("run/gpusession/grant.sock")).unwrap();
        assert_eq!(socket(&facts).state, State::Fault);
    }
}
