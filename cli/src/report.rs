//! `gpusession report`: an archive for the search for a fault, without secrets.

use std::path::PathBuf;

use gpusession_common::keys::Row;
use gpusession_diagnosis::machine::Machine;
use gpusession_diagnosis::pseudonyms::Kind;
use gpusession_diagnosis::redact;
use gpusession_diagnosis::report::{self, Report};
use gpusessiond::config::{Access, Client, Keys, LeaseConfig, Transport};
use gpusessiond::paths;
use serde_json::{Value, json};

use crate::daemon::Daemon;
use crate::exit::{Failure, Result, code};
use crate::health::{Facts, examine};

#[derive(clap::Args)]
pub struct Options {
    /// File to write [default: gpusession-report-DATE.tar.gz, with --names
    /// gpusession-report-HOST-DATE.tar.gz]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// List the archive's files and write nothing
    #[arg(long)]
    list: bool,
    /// Keep the names of users, clients and hosts, and addresses; without this, the report has
    /// pseudonyms, whose table is written beside it, to FILE.names
    #[arg(long)]
    names: bool,
}

const UNITS: [&str; 2] = ["gpusession.service", "gpusession.socket"];

/// Returns `true` if a key of `gpusession.toml` is public: each has a row, and no secret in it.
///
/// `[environment]` has no rows: its values are the site's.
fn is_public(key: &str) -> bool {
    let rows: [&[Row]; 5] = [Keys::ROWS, Client::ROWS, Access::ROWS, LeaseConfig::ROWS, Transport::ROWS];
    rows.into_iter().flatten().any(|row| row.name == key)
}

/// Adds the configuration files: values of public keys, each with its file.
fn add_configuration(report: &mut Report, machine: &Machine, path: &std::path::Path) {
    let folder = path.parent().unwrap_or(path);
    let drop_ins =
        machine.list(folder.join("conf.d")).into_iter().map(|name| folder.join("conf.d").join(name));
    let files =
        [path.to_owned()].into_iter().chain(drop_ins.filter(|p| p.extension().is_some_and(|e| e == "toml")));
    for file in files {
        let text = match machine.read(&file) {
            Ok(text) => redact::toml(&text, &is_public, &mut report.secrets),
            Err(unread) => format!("{unread}\n"),
        };
        report.add_redacted(&format!("configuration{}", file.display()), text);
    }
    let servers = folder.join("servers.toml");
    let text = match machine.read(&servers) {
        Ok(text) => redact::toml(&text, &|key| key == "server.address", &mut report.secrets),
        Err(unread) => format!("{unread}\n"),
    };
    report.add_redacted(&format!("configuration{}", servers.display()), text);
}

/// Adds to the known secrets those files of keys and tokens that this user can read.
fn add_secrets(report: &mut Report, facts: &Facts) {
    for name in ["client.key", "joining.key"] {
        report.secrets.add(&facts.machine.read(facts.identity.join(name)).unwrap_or_default());
    }
    let folder = facts.machine.variable("CREDENTIALS_DIRECTORY").unwrap_or("/run/credstore").to_owned();
    report.secrets.add(&facts.machine.read(format!("{folder}/gpusession.token")).unwrap_or_default());
}

/// Leaves the values of variables and the reasons of requests out of the daemon's description.
///
/// A reason may be a command line.
fn without_secrets(described: &mut Value, report: &mut Report) {
    for value in described["environment"].as_object_mut().into_iter().flatten().map(|(_, value)| value) {
        report.secrets.add(value.as_str().unwrap_or_default());
        *value = redact::SET.into();
    }
    for lease in described["leases"].as_array_mut().into_iter().flatten() {
        if lease["why"].as_str().is_some_and(|why| !why.is_empty()) {
            lease["why"] = redact::SET.into();
        }
    }
}

async fn collect(facts: &Facts, keep_names: bool) -> Report {
    let mut report = Report::new(&facts.machine, keep_names);
    add_secrets(&mut report, facts);
    let versions = json!({
        "gpusession": env!("CARGO_PKG_VERSION"),
        "protocol": gpusession_proto::preface::VERSION,
        "library": facts.library,
        "uid": facts.machine.uid,
    });
    report.add("versions.json", format!("{versions:#}\n"));
    report.add("health.json", format!("{:#}\n", examine(facts).json()));
    let asked = match facts.answers() {
        true => async { Daemon::connect().await?.describe_raw().await }.await.map_err(|f| f.message),
        false => Err("the daemon is not running".into()),
    };
    match asked {
        Ok(mut described) => {
            without_secrets(&mut described, &mut report);
            report.add_redacted("status.json", format!("{described:#}\n"));
        }
        Err(why) => report.add("status.json", format!("{:#}\n", json!({ "error": why }))),
    }
    let config = gpusessiond::config::Config::load(&facts.machine.at(&facts.configuration));
    if let Ok(Some(name)) = config.map(|config| config.client.name) {
        report.add_name(Kind::Client, &name);
    }
    for address in facts.addresses.iter().flatten() {
        report.add_name(Kind::Host, address);
    }
    if let Some(survey) = &facts.survey {
        report.add("servers.json", format!("{:#}\n", json!(survey)));
    }
    add_configuration(&mut report, &facts.machine, &facts.configuration);
    let state = facts.machine.list(paths::state_directory());
    report.add("state-folder", state.join("\n") + "\n");
    report::add_host(&mut report, &facts.machine);
    report::add_units(&mut report, &facts.machine, &UNITS);
    report.finish();
    report
}

/// `gpusession report`.
pub async fn report(options: Options, json: bool) -> Result<i32> {
    let facts = Facts::gather(false).await;
    let report = collect(&facts, options.names).await;
    let name = report::name("gpusession-report", &facts.machine, options.names);
    let path = options.output.unwrap_or_else(|| format!("{name}.tar.gz").into());
    if !json {
        crate::print(&format!("{}\n{}", report.describe(), report.list()));
    }
    let mut table = None;
    if !options.list {
        table = report.write(&path, &name, facts.machine.now).map_err(|error| {
            Failure::new(code::FAILED, format!("{}: {error}", path.display()))
                .hint("name another file with -o")
        })?;
    }
    if json {
        let archive = (!options.list).then_some(&path);
        let told = json!({ "schema": 1, "archive": archive, "names": table, "files": report.files() });
        crate::print(&told.to_string());
    } else if !options.list {
        crate::print(&report::written(&path, table.as_deref()));
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::testing::{facts, plant};

    #[test]
    fn configuration_shows_public_keys_only() {
        let (root, facts) = facts();
        plant(
            &root,
            "etc/gpusession/gpusession.toml",
            "wait_ms = 5\n[access]\nusers = [\"ada\"]\n[environment]\nK = \"swordfish1\"\n",
        );
        plant(&root, "etc/gpusession/conf.d/a.toml", "[[lease]]\nmemory = \"50%\"\npin = \"swordfish2\"\n");
        plant(&root, "etc/gpusession/servers.toml", "[[server]]\naddress = \"gpu1:7601\"\n");
        plant(&root, "var/lib/gpusession/identity/client.key", "swordfish3\n");
        let mut report = Report::default();
        add_secrets(&mut report, &facts);
        add_configuration(&mut report, &facts.machine, &facts.configuration);
        report.add("journal", "swordfish1 swordfish2 swordfish3\n");
        let mut described =
            json!({ "environment": { "X": "swordfish4" }, "leases": [{ "why": "train --pin 7" }] });
        without_secrets(&mut described, &mut report);
        report.add("status.json", described.to_string());
        report.add("more", "swordfish4");
        report.finish();
        let archive = root.path().join("r.tar.gz");
        report.write(&archive, "r", 0).unwrap();
        let listed = std::process::Command::new("tar").args(["-xOzf"]).arg(&archive).output().unwrap();
        let all = String::from_utf8(listed.stdout).unwrap();
        assert!(!all.contains("swordfish") && !all.contains("train"), "{all}");
        for kept in
            ["wait_ms = 5", "access.users = [\"ada\"]", "lease[0].memory = \"50%\"", "server[0].address"]
        {
            assert!(all.contains(kept), "{kept} not in {all}");
        }
    }
}
