//! `gpuserver pool admit`, `pool join` and `pool yield`: servers that hold no authority's key.

use gpusession_diagnosis::machine::Machine;
use gpusession_proto::join::ServerToken;
use serde_json::{Value, json};

use super::pool::{own_link, unit_to_start};
use super::target::{Target, offline, running};
use super::token::secret;
use crate::admin::answer::tokens::{ServerTokenView, print_server_token, terms};
use crate::admin::answer::{no_more_a_name, unsigned};
use crate::admin::{Ask, Refusal};
use crate::audit;
use crate::clock::{Clock as _, SystemClock};
use crate::config::{Config, advertised};
use crate::net::{PORT, host_port};
use crate::pool::Files;
use crate::signer::link::Link;
use crate::signer::member::{self, Member};
use crate::signer::tokens::TokenKind;
use crate::signer::{Operation, Why};
use crate::statements::Statements;
use crate::store;
use crate::text::Output;

/// Makes a token with which a server of this name joins the pool.
pub(super) fn admit(
    out: &mut Output<'_>,
    server: &Target,
    name: &str,
    ttl: &str,
    from: &[String],
) -> anyhow::Result<()> {
    let bounds = terms(TokenKind::Server, name.into(), 1, ttl, from, 0)?;
    let ask = Ask::ServerAdmit { name: name.into(), ttl: bounds.ttl, from: bounds.from };
    let config = server.config()?;
    let value = match &config.signer {
        // The signer itself answers root, so that the secret stays out of the server's process.
        Some(_) => admit_here(config, &ask)?,
        None => match running(server, &ask)? {
            Some(value) => value,
            None => {
                let _lock = offline(config)?;
                admit_here(config, &ask)?
            }
        },
    };
    out.answer("token", value, |out, token| print_server_token(out, token))
}

fn admit_here(config: &Config, ask: &Ask) -> anyhow::Result<Value> {
    let Ask::ServerAdmit { name, .. } = ask else { anyhow::bail!("internal error: not an admission") };
    let revoked: Statements = store::read(&Files::below(&config.state_dir).statements)?;
    if revoked.server(name).is_some() {
        return Err(no_more_a_name(name).into());
    }
    let link = own_link(config)?;
    link.issues().map_err(|e| unsigned(&e))?;
    let order = ask.privileged().ok_or_else(|| anyhow::anyhow!("internal error: no order"))?;
    let (token, facts) = link.admit_server(order).map_err(|e| unsigned(&e))?;
    audit::note_offline(&config.state_dir, &config.name, ask.event(String::new()))?;
    Ok(serde_json::to_value(ServerTokenView::new(&token, name, &facts))?)
}

/// Reads the token of this server.
fn token(text: Option<&str>) -> anyhow::Result<ServerToken> {
    let text = secret(text, "token for this server (`gpuserver pool admit` on an issuer prints it)")?;
    Ok(text.parse().map_err(|e| Refusal::new("usage", format!("{e}")))?)
}

/// Refuses a join that would replace an authority. The caller has locked the state directory.
fn has_no_authority(config: &Config) -> anyhow::Result<()> {
    let own = Link::own_of_command(config.signer.as_deref(), &config.state_dir, &config.name)?;
    match own.present() {
        Ok(_) => {
            let why = "this server holds the key of a pool's authority already: it is an issuer";
            Err(Refusal::new("exists", why).into())
        }
        Err(e) if e.why == Why::Missing => Ok(()),
        Err(e) => Err(unsigned(&e).into()),
    }
}

/// Returns the membership of this server if it works, in the pool of one of these authorities.
fn membership(config: &Config, of: impl Fn(&[u8; 32]) -> bool) -> anyhow::Result<Option<Member>> {
    let member = Member::open(&config.state_dir).map_err(|e| unsigned(&e))?;
    Ok(member.filter(|member| {
        let standing = member.standing();
        standing.expires_unix > SystemClock.unix()
            && standing.name == config.name
            && standing.authorities.iter().any(of)
    }))
}

/// Reads the address of an issuer.
fn control(address: &str) -> anyhow::Result<String> {
    let to = advertised(address).map_err(|m| Refusal::new("usage", format!("{address:?}: {m}")))?;
    Ok(host_port(&to.host, to.port.unwrap_or(PORT)))
}

/// Has an issuer make this server a member; returns the authority's fingerprint.
fn become_member(config: &Config, address: &str, token: &ServerToken) -> anyhow::Result<[u8; 32]> {
    let joined = Member::join(&config.state_dir, address, token, &config.name);
    Ok(joined.map_err(|e| {
        let refusal = unsigned(&e);
        if e.why == Why::Token { Refusal { code: "not-allowed".into(), ..refusal } } else { refusal }
    })?)
}

/// Joins a pool as a server without its authority's key.
pub(super) fn join(
    out: &mut Output<'_>,
    config: &Config,
    (address, text, now): (&str, Option<&str>, bool),
) -> anyhow::Result<()> {
    let machine = Machine::here();
    // A token counts once, so that a reason against the start shows first.
    let unit = unit_to_start(&machine, config.signer.as_deref(), now)?;
    let (address, token) = (control(address)?, token(text)?);
    if let Some(member) = membership(config, |authority| *authority == token.0.authority)? {
        return Err(unsigned(&member.has_pool()).into());
    }
    // The server that `--now` starts takes the lock of the state directory.
    let lock = offline(config)?;
    has_no_authority(config)?;
    let authority = become_member(config, &address, &token)?;
    audit::note_offline(&config.state_dir, &config.name, audit::own("pool-join"))?;
    drop(lock);
    let file = member::file(&config.state_dir);
    if let Some(unit) = &unit {
        machine.enable_now(unit).map_err(|why| Refusal {
            code: "failed".into(),
            message: format!("the membership is in {}, but {why}", file.display()),
            hint: format!("`journalctl -u {unit}` shows why; `systemctl enable --now {unit}` tries again"),
        })?;
    }
    let fingerprint = data_encoding::HEXLOWER.encode(&authority);
    let next = if unit.is_some() { "" } else { "start the server, and " };
    let value = json!({ "authority_sha256": fingerprint, "file": file, "issuer": address });
    out.answer("pool", value, |out, _: Value| {
        writeln!(out, "Server {} is a member of the pool: {} has its key.", config.name, file.display())?;
        writeln!(out, "The SHA-256 of the authority's certificate is {fingerprint}.")?;
        writeln!(
            out,
            "Next: {next}add it to servers.toml of the pool's clients. Other issuers than {address} belong in `peers`."
        )?;
        Ok(())
    })
}

/// Makes a server that holds the authority's key a member of its pool, and removes the key.
pub(super) fn give_up(
    out: &mut Output<'_>,
    config: &Config,
    (address, text): (&str, Option<&str>),
) -> anyhow::Result<()> {
    let address = control(address)?;
    let _lock = offline(config)?;
    let own = Link::own_of_command(config.signer.as_deref(), &config.state_dir, &config.name)?;
    let present = match own.present() {
        Ok(present) => Some(present),
        Err(e) if e.why == Why::Missing => None,
        Err(e) => return Err(unsigned(&e).into()),
    };
    // The membership stands where an earlier call was interrupted.
    let ours = |authority: &[u8; 32]| present.as_ref().is_none_or(|all| all.find(authority).is_some());
    if membership(config, ours)?.is_none() {
        if present.is_none() {
            let why = "this server holds no authority's key: `gpuserver pool join` makes it a member";
            return Err(Refusal::new("usage", why).into());
        }
        let token = token(text)?;
        if !ours(&token.0.authority) {
            let why = "the token is of another pool, or of before the rotation of this pool's authority: run \
                       `gpuserver pool admit` on another issuer of this pool";
            return Err(Refusal::new("usage", why).into());
        }
        become_member(config, &address, &token)?;
    }
    own.ask(Operation::GiveUp).map_err(|e| unsigned(&e))?;
    audit::note_offline(&config.state_dir, &config.name, audit::own("pool-yield"))?;
    let file = member::file(&config.state_dir);
    let value = json!({ "file": file, "issuer": address });
    out.answer("pool", value, |out, _: Value| {
        writeln!(out, "Server {} is a member of its pool: {} has its key.", config.name, file.display())?;
        writeln!(out, "No key of the authority is left here, and the join tokens that were made here are void.")?;
        writeln!(
            out,
            "Next: start the server, and remove the key from its backups. Other issuers than {address} belong in `peers`."
        )?;
        Ok(())
    })
}
