//! `gpuserver audit`: shows and verifies the audit trail.

use std::io::ErrorKind;

use clap::{Args, Subcommand};
use serde_json::json;

use super::accounting::past;
use super::target::{Target, no_right, offline, running};
use crate::admin::answer::records::{MAX_LINES, print_audit};
use crate::admin::{Ask, Refusal, local_only};
use crate::audit::{self, Forgotten, Line, Verified, Wanted};
use crate::clock::{Clock, SystemClock};
use crate::signer::link::Link;
use crate::text::Output;

/// Selection of lines of the audit trail, or its verification.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct AuditOptions {
    /// Earliest time: a time ago, as "2d", or a day, as 2026-11-21 (UTC)
    #[arg(long, value_name = "TIME", default_value = "24h")]
    pub since: String,
    /// Only lines about this client
    #[arg(long, value_name = "NAME", default_value = "")]
    pub client: String,
    /// Only this kind of event, such as join, lease-granted or token-create
    #[arg(long, value_name = "EVENT", default_value = "")]
    pub event: String,
    /// Only lines about this lease
    #[arg(long, value_name = "ID", default_value = "")]
    pub lease: String,
    /// Only programs of this user, by the word of its client
    #[arg(long, value_name = "NAME", default_value = "")]
    pub user: String,
    /// Verb for the trail
    #[command(subcommand)]
    pub verb: Option<AuditVerb>,
}

/// A verb of `gpuserver audit`.
#[derive(Debug, Subcommand)]
pub enum AuditVerb {
    /// Verify the chain and the checkpoints of the files on this host
    ///
    /// Exit status: 0 if all lines are as they were written; 1 with the first one that is not.
    Verify,
    /// Forget the name of a client's user
    ///
    /// The lines stay, with a pseudonym in place of the name. Records of accounting keep the name.
    ForgetUser {
        /// Client of the user
        client: String,
        /// Name of the user
        user: String,
    },
}

pub(super) fn audit(out: &mut Output<'_>, server: &Target, options: &AuditOptions) -> anyhow::Result<()> {
    if let Some(AuditVerb::ForgetUser { client, user }) = &options.verb {
        return forget_user(out, server, client, user);
    }
    if let Some(AuditVerb::Verify) = options.verb {
        if server.remote.is_some() {
            return Err(local_only("the trail is verified on its own host, by its signer's key").into());
        }
        let config = server.config()?;
        let verifier = Link::verifier_of(config.signer.as_deref(), &config.state_dir, &config.name)?;
        let verified = audit::verify::verify(&config.state_dir, &verifier)?;
        return out.answer("audit", json!(verified), |out, v: Verified| {
            writeln!(out, "{} lines verify; the last one has number {}", v.lines, v.last_seq)?;
            writeln!(out, "and the hash {}", v.last_hash)?;
            Ok(writeln!(out, "{} checkpoints prove the lines up to number {}", v.checkpoints, v.proved_seq)?)
        });
    }
    let since_unix = past(&options.since, SystemClock.unix()).ok_or_else(|| {
        Refusal::new("usage", format!("--since {:?}: not a time; write 24h or 2026-11-21", options.since))
    })?;
    let wanted = Wanted {
        since_unix,
        client: options.client.clone(),
        event: options.event.clone(),
        lease: options.lease.clone(),
        user: options.user.clone(),
    };
    let value = match running(server, &Ask::Audit { wanted: wanted.clone() })? {
        Some(value) => value,
        None => {
            let folder = &server.config()?.state_dir;
            let lines = audit::list(folder, &wanted, MAX_LINES).map_err(|error| match error.kind() {
                ErrorKind::PermissionDenied => no_right(folder, &error).into(),
                _ => anyhow::Error::from(error).context(folder.display().to_string()),
            });
            serde_json::to_value(lines?)?
        }
    };
    out.answer("audit", value, |out, lines: Vec<Line>| print_audit(out, lines))
}

fn forget_user(out: &mut Output<'_>, server: &Target, client: &str, user: &str) -> anyhow::Result<()> {
    let ask = Ask::AuditForgetUser { client: client.into(), user: user.into() };
    let value = match running(server, &ask)? {
        Some(value) => value,
        None => {
            let config = server.config()?;
            let _lock = offline(config)?;
            let forgotten = audit::forget_offline(&config.state_dir, &config.name, client, user)?;
            audit::note_offline(&config.state_dir, &config.name, ask.event(String::new()))?;
            serde_json::to_value(forgotten)?
        }
    };
    let forgotten: Forgotten = serde_json::from_value(value.clone())?;
    if !forgotten.known && forgotten.lines == 0 {
        return Err(Refusal {
            code: "no-such-user".into(),
            message: format!("client {client}: no user {user} in the audit trail"),
            hint: format!("`gpuserver audit --since 400d --client {client}` shows its users"),
        }
        .into());
    }
    out.answer("forgotten", value, |out, Forgotten { known, lines, last_day }| {
        if known {
            writeln!(out, "client {client}: user {user} stands as a pseudonym in lines up to now")?;
        }
        if lines > 0 {
            writeln!(out, "{lines} lines of an earlier release have the name, until {last_day} is deleted")?;
        }
        Ok(())
    })
}
