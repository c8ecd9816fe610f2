//! `gpuserver admin`: creates, lists and revokes administrators.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

use super::clients::state_offline;
use super::pool::own_link;
use super::target::{Target, offline, running};
use crate::admin::answer::administrators::{
    AdministratorView, administrator_rows, not_issued, print_administrators,
};
use crate::admin::answer::clients::a_name;
use crate::admin::answer::unsigned;
use crate::admin::{Ask, Refusal};
use crate::audit;
use crate::clock::{Clock, SystemClock};
use crate::pool::Files;
use crate::pool::administrators::Administrators;
use crate::signer::Operation;
use crate::signer::ca::request;
use crate::signer::link::Link;
use crate::store;
use crate::text::Output;
use clap::Subcommand;
use gpusession_proto::statement::Verdict;

/// A verb of `gpuserver admin`.
#[derive(Debug, Subcommand)]
pub enum AdminVerb {
    /// Create an administrator's certificate, valid for a year, with root's rights on this server
    Create {
        /// Name of the administrator
        name: String,
        /// File to write, which must not exist
        #[arg(short, long, value_name = "FILE", default_value = "admin.pem")]
        out: PathBuf,
    },
    /// List the administrators that this server knows
    List,
    /// Revoke all certificates of a name so far, in the whole pool
    Revoke {
        /// Name of the administrator
        name: String,
    },
}

pub(super) fn administrators(out: &mut Output<'_>, server: &Target, verb: &AdminVerb) -> anyhow::Result<()> {
    match verb {
        AdminVerb::Create { name, out: file } => {
            a_name(name)?;
            if std::fs::symlink_metadata(file).is_ok() {
                let message = format!("{} exists already; choose another file with --out", file.display());
                return Err(Refusal::new("exists", message).into());
            }
            let key = rcgen::KeyPair::generate()?;
            let csr_pem = request(&key)?;
            let value =
                ask_administrators(server, &Ask::AdministratorCreate { name: name.clone(), csr_pem })?;
            let made: AdministratorView = serde_json::from_value(value)?;
            let bundle = format!("{}{}{}", made.certificate_pem, key.serialize_pem(), made.authority_pem);
            write_new(file, &bundle).with_context(|| {
                format!("{} not written; run `gpuserver admin revoke {name}` and try again", file.display())
            })?;
            out.answer("administrator", json!({ "name": name, "file": file }), |out, _: Value| {
                writeln!(out, "{}: its holder may do with --server what root may do here.", file.display())?;
                writeln!(
                    out,
                    "Next: install it as ~/.config/gpusession/admin.pem, and run `gpuserver --server HOST status`."
                )?;
                Ok(())
            })
        }
        AdminVerb::List => {
            let value = ask_administrators(server, &Ask::Administrators)?;
            out.answer("administrators", value, print_administrators)
        }
        AdminVerb::Revoke { name } => {
            let value = ask_administrators(server, &Ask::AdministratorRevoke { name: name.clone() })?;
            out.answer("administrator", value, |out, value: Value| {
                writeln!(out, "administrator {name} is revoked")?;
                if value["known"] == false {
                    writeln!(
                        out,
                        "note: this server has not seen this name; `gpuserver admin list` lists the names"
                    )?;
                }
                Ok(())
            })
        }
    }
}

/// Writes a secret into a new file that only its owner can read.
fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// Performs a verb for administrators, on the files if no server runs.
fn ask_administrators(server: &Target, ask: &Ask) -> anyhow::Result<Value> {
    if let Some(value) = running(server, ask)? {
        return Ok(value);
    }
    let config = server.config()?;
    let _lock = offline(config)?;
    let path = Files::below(&config.state_dir).administrators;
    let mut all: Administrators = store::read(&path)?;
    let now = SystemClock.unix();
    let mut stated = Ok(0);
    let value = match ask {
        Ask::AdministratorCreate { name, .. } => {
            all.may_issue(name).map_err(|e| not_issued(&e))?;
            let link: Link = own_link(config)?;
            let present = link.present().map_err(|e| unsigned(&e))?;
            let order = ask.privileged().map(Operation::Privileged).context("internal error: no order")?;
            let issued = link.sign(order).map_err(|e| unsigned(&e))?;
            all.issued(name, &issued, now, &present.signer().fingerprint());
            let (certificate_pem, authority_pem) = (issued.pem, present.certificates());
            serde_json::to_value(AdministratorView { certificate_pem, authority_pem })?
        }
        Ask::AdministratorRevoke { name } => {
            a_name(name)?;
            // The revocation holds here, too, if the signer refuses.
            stated = state_offline(config, Verdict::RevokeAdministrator { name: name.clone() });
            let unix = stated.as_ref().map_or(now, |unix| *unix);
            json!({ "name": name, "known": all.revoke(name, unix) })
        }
        _ => return Ok(serde_json::to_value(administrator_rows(&all))?),
    };
    store::write(&path, &all)?;
    audit::note_offline(&config.state_dir, &config.name, ask.event(String::new()))?;
    stated.context("revoked on this server, and not on the pool's other ones")?;
    Ok(value)
}
