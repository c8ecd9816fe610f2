//! `gpuserver pool rotate`: replaces the pool's authority under running programs.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Subcommand;

use super::show::{Output, table};
use super::target::{Target, must_run};
use crate::admin::Ask;
use crate::admin::answer::rotation::RotationView;
use crate::certificate::day;

/// Longest output of `pool export` that is read, in bytes.
const MAX_EXPORTED: u64 = 64 << 10;

/// A verb of `gpuserver pool rotate`.
#[derive(Debug, Subcommand)]
pub enum RotateVerb {
    /// Make the new authority; connected clients trust both within seconds
    Begin {
        /// Take the new authority from the output of `pool export` on the server where the rotation
        /// began; - for standard input
        #[arg(long, value_name = "FILE")]
        from: Option<PathBuf>,
    },
    /// Show the phase, and the clients that are not ready for the next step
    Status,
    /// Sign with the new authority: clients renew their certificates, older join tokens are void
    Switch {
        /// Switch although clients of the last 30 days do not trust the new authority
        #[arg(long)]
        force: bool,
    },
    /// Drop the old authority and everything that it signed
    Finish {
        /// Shut out clients of the last 30 days that have no certificate of the new authority
        #[arg(long)]
        force: bool,
    },
    /// Drop the new authority, before the switch
    Abort,
}

/// Reads the output of `pool export`.
pub(super) fn read_export(file: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let source: Box<dyn Read> = match file.as_os_str() == "-" {
        true => Box::new(std::io::stdin()),
        false => Box::new(std::fs::File::open(file).with_context(|| file.display().to_string())?),
    };
    source.take(MAX_EXPORTED).read_to_string(&mut text).with_context(|| file.display().to_string())?;
    Ok(text)
}

pub(super) fn rotate(out: &mut Output<'_>, server: &Target, verb: &RotateVerb) -> anyhow::Result<()> {
    let ask = match verb {
        RotateVerb::Begin { from } => {
            Ask::RotateBegin { exported: from.as_deref().map(read_export).transpose()? }
        }
        RotateVerb::Status => Ask::RotateStatus,
        RotateVerb::Switch { force } => Ask::RotateSwitch { force: *force },
        RotateVerb::Finish { force } => Ask::RotateFinish { force: *force },
        RotateVerb::Abort => Ask::RotateAbort,
    };
    out.answer("rotation", must_run(server, &ask)?, text)
}

fn text(out: &mut dyn Write, rotation: RotationView) -> anyhow::Result<()> {
    let (signs, next, lack) = match rotation.phase.as_str() {
        "begun" => ("the old authority", "switch", "do not trust the new authority"),
        "switched" => ("the new authority", "finish", "have no certificate of the new authority"),
        _ => {
            writeln!(
                out,
                "No rotation is under way. The pool's authority is {}.",
                rotation.authority_sha256
            )?;
            return Ok(());
        }
    };
    let since = rotation.since_unix.map_or_else(String::new, |since| format!(" on {}", day(since)));
    writeln!(out, "Rotation of the pool's authority: {}{since}; {signs} signs.", rotation.phase)?;
    for (which, fingerprint) in [("old", &rotation.old_sha256), ("new", &rotation.new_sha256)] {
        writeln!(out, "{which} authority: {}", fingerprint.as_deref().unwrap_or("-"))?;
    }
    let awaited = rotation.clients.iter().filter(|client| client.awaited).count();
    if !rotation.clients.is_empty() {
        writeln!(out, "These clients {lack}:")?;
        let mut rows = table(&["CLIENT", "LATEST CALL", "AWAITED"]);
        for client in &rotation.clients {
            let seen = client.seen_unix.map_or_else(|| "-".into(), day);
            let awaited = if client.awaited { "yes" } else { "no" };
            rows.add_row([client.name.as_str(), &seen, awaited]);
        }
        writeln!(out, "{rows}")?;
    }
    if !rotation.administrators.is_empty() {
        writeln!(
            out,
            "The certificates of these administrators end with the rotation: {}.",
            rotation.administrators.join(", ")
        )?;
    }
    match awaited {
        0 => writeln!(out, "Next: once every server of the pool is as far, `gpuserver pool rotate {next}`.")?,
        1 => writeln!(out, "Next: wait for one client, then `gpuserver pool rotate {next}`.")?,
        n => writeln!(out, "Next: wait for {n} clients, then `gpuserver pool rotate {next}`.")?,
    }
    Ok(())
}
