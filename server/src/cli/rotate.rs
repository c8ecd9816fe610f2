//! `gpuserver pool rotate`: replaces the pool's authority under running programs.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Subcommand;

use super::target::{Target, must_run};
use crate::admin::Ask;
use crate::admin::answer::rotation::print_rotation;
use crate::text::Output;

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
    /// Show the phase, and the clients and members that are not ready for the next step
    Status,
    /// Sign with the new authority: clients renew their certificates, older join tokens are void
    Switch {
        /// Switch although clients or members of the last 30 days do not trust the new authority
        #[arg(long)]
        force: bool,
    },
    /// Drop the old authority and everything that it signed
    Finish {
        /// Shut out clients and members of the last 30 days that lack a new certificate
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
    out.answer("rotation", must_run(server, &ask)?, print_rotation)
}
