//! The clients of a pool: the certificate of each, and the machine and boot behind it.
//!
//! A client joins through one server of the pool. Other servers learn of it from its certificate,
//! at its first call.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::certificate::Holder;
use crate::clock::Moment;
use crate::statements::{ClientStanding, Statements};

/// Silence after which a client without an open [`Watch`](gpusession_proto::control) counts as
/// gone.
pub const SUSPECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for which a replaced certificate stays valid after the first call with its successor.
///
/// Other processes that use the identity read the successor within that time.
pub const OVERLAP_GRACE: Duration = Duration::from_secs(3600);
/// Time after which a record of the latest call is written again, in seconds.
pub const SEEN_STEP: u64 = 24 * 3600;
/// Time before the end of a client's certificate from which the server warns.
///
/// A daemon renews earlier, so that this one does not.
pub const EXPIRY_WINDOW: Duration = Duration::from_secs(14 * 24 * 3600);

/// A client as stored on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRecord {
    /// SHA-256 of the client's certificate, in hex.
    pub certificate: String,
    /// SHA-256 of the public key with which the client joined, in hex: its identity.
    ///
    /// Empty in records of earlier versions.
    #[serde(default)]
    pub key: String,
    /// Machine id, hashed by the machine that joined; empty if it joined through another server.
    pub machine_id: String,
    /// Whether an administrator has revoked the client.
    pub revoked: bool,
    /// Issue time of the certificate, in seconds since 1970.
    pub joined_unix: u64,
    /// End of the certificate, in seconds since 1970; 0 in records of earlier versions.
    #[serde(default)]
    pub expires_unix: u64,
    /// SHA-256 of the authority that issued the certificate, in hex; empty if unknown.
    #[serde(default)]
    pub authority: String,
    /// SHA-256 of each authority that the client trusts, in hex, by its own word.
    #[serde(default)]
    pub trusts: Vec<String>,
    /// Latest call, a day less exact, in seconds since 1970; 0: unknown.
    #[serde(default)]
    pub seen_unix: u64,
    /// Whether it joined through a server without the authority's key, and has never called here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub elsewhere: bool,
    /// A renewed certificate that the client has not used yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<Dated>,
    /// The certificate before the present one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<Previous>,
}

/// A certificate and its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dated {
    /// SHA-256 of the certificate, in hex.
    pub certificate: String,
    /// Issue time, in seconds since 1970.
    pub issued_unix: u64,
    /// End, in seconds since 1970.
    pub expires_unix: u64,
}

impl Dated {
    /// Describes a certificate.
    pub fn new(certificate: &[u8; 32], issued_unix: u64, expires_unix: u64) -> Self {
        Self { certificate: data_encoding::HEXLOWER.encode(certificate), issued_unix, expires_unix }
    }
}

/// A certificate that its successor has replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Previous {
    /// SHA-256 of the certificate, in hex.
    pub certificate: String,
    /// End of its use, in seconds since 1970.
    pub until_unix: u64,
}

impl ClientRecord {
    fn certificates(&self) -> impl Iterator<Item = &String> {
        let next = self.next.as_ref().map(|c| &c.certificate);
        let previous = self.previous.as_ref().map(|c| &c.certificate);
        [Some(&self.certificate), next, previous].into_iter().flatten()
    }
}

/// Part of the clients' state that survives a restart.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Saved<'a> {
    clients: Cow<'a, BTreeMap<String, ClientRecord>>,
    #[serde(default)]
    forgotten: Cow<'a, BTreeMap<String, u64>>,
    #[serde(default)]
    earlier: Cow<'a, BTreeMap<String, String>>,
}

/// Machine and boot that use an identity at present.
#[derive(Debug, Clone, Default)]
struct Presence {
    boot_id: String,
    machine_id: String,
    last_seen: Option<Moment>,
    watches: u32,
    /// The client closed its last watch and has not called since.
    left: bool,
    /// Earlier boots; a machine that still uses one of them is a second machine.
    replaced: Vec<String>,
}

/// Reason why a client is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The certificate is not valid any longer, or never was.
    #[error(
        "this server does not know the client's certificate: it was replaced by a later join, or the client was \
         forgotten; join again with a new token"
    )]
    Unknown,
    /// An administrator has revoked the client.
    #[error(
        "client {0:?} was revoked; its administrator can allow it with `gpuserver clients forget {0}` and a new join"
    )]
    Revoked(String),
    /// Two machines use one identity.
    #[error(
        "another machine uses the identity of client {0:?} right now. Is this one a copy of it? Then give it an identity \
         of its own: `gpusession leave`, then `gpusession join` with a new token. If it is the same machine, restarted a \
         moment ago, it is accepted within {wait} s", wait = SUSPECT_TIMEOUT.as_secs()
    )]
    SecondMachine(String),
    /// Another key has the name; no token takes it over.
    #[error(
        "client {0:?} has an identity already. If this is that machine and it has lost its identity, an administrator runs \
         `gpuserver clients forget {0}` on each server of the pool, then join again; else join under another name with --name"
    )]
    Taken(String),
    /// Another process has renewed the identity, so this certificate is an older one.
    #[error(
        "client {0:?} has a newer certificate already; its processes read that one from their identity's folder"
    )]
    Renewed(String),
    /// The call names no boot.
    #[error("the request does not say which boot of the client it comes from")]
    NoBoot,
}

/// One client in a listing.
#[derive(Debug, Clone)]
pub struct ClientView {
    /// Name of the client in the pool.
    pub name: String,
    /// Stored record of the client.
    pub record: ClientRecord,
    /// Whether the client is connected, or was a moment ago.
    pub alive: bool,
    /// Time since its last call in this run of the server; `None`: no call yet.
    pub silent: Option<Duration>,
}

/// All clients of a pool, by name.
#[derive(Debug, Default)]
pub struct Clients {
    records: BTreeMap<String, ClientRecord>,
    /// For forgotten names: certificates issued up to this time, in seconds since 1970, are
    /// invalid.
    forgotten: BTreeMap<String, u64>,
    /// For forgotten names that no machine has taken since: the identity, in hex.
    earlier: BTreeMap<String, String>,
    by_certificate: HashMap<String, String>,
    presence: HashMap<String, Presence>,
    /// Identities that a statement of the pool refuses for ever.
    refused: HashSet<[u8; 32]>,
}

/// Change that a client's call brings about.
#[derive(Debug, PartialEq, Eq)]
pub enum Seen {
    /// No change.
    Known,
    /// The client has restarted, so leases of its earlier boots end.
    NewBoot,
}

impl Presence {
    fn alive(&self, now: Moment) -> bool {
        self.watches > 0
            || !self.left && self.last_seen.is_some_and(|at| now.saturating_sub(at) < SUSPECT_TIMEOUT)
    }
}

impl Clients {
    /// Creates the table with the clients of an earlier run.
    pub fn new(saved: Saved<'_>) -> Self {
        let (records, forgotten) = (saved.clients.into_owned(), saved.forgotten.into_owned());
        let earlier = saved.earlier.into_owned();
        let all = |(name, record): (&String, &ClientRecord)| {
            record.certificates().map(|c| (c.clone(), name.clone())).collect::<Vec<_>>()
        };
        let by_certificate = records.iter().flat_map(all).collect();
        let (presence, refused) = Default::default();
        Self { records, forgotten, earlier, by_certificate, presence, refused }
    }

    /// Notes a call with a certificate that `authority` has issued; `true` if the record changed.
    ///
    /// This also completes records of earlier versions by the facts of the certificate.
    pub fn complete(
        &mut self,
        certificate: &[u8; 32],
        holder: &Holder,
        authority: Option<String>,
        unix: u64,
    ) -> bool {
        let certificate = data_encoding::HEXLOWER.encode(certificate);
        let Some(record) = self.records.get_mut(&holder.name) else { return false };
        // Once a day, since each change is written to disk.
        let first = std::mem::take(&mut record.elsewhere);
        let seen = first || unix >= record.seen_unix + SEEN_STEP;
        if seen {
            record.seen_unix = unix;
        }
        if record.certificate != certificate {
            return seen;
        }
        let issued = authority.filter(|authority| *authority != record.authority);
        let changed = seen || issued.is_some() || record.key.is_empty() || record.expires_unix == 0;
        if let Some(authority) = issued {
            record.authority = authority;
        }
        if record.key.is_empty() {
            record.key = data_encoding::HEXLOWER.encode(&holder.identity);
        }
        record.expires_unix = holder.expires_unix;
        changed
    }

    /// Notes the authorities that a client trusts; `true` if they are others than before.
    pub fn trusts(&mut self, name: &str, authorities: Vec<String>) -> bool {
        let Some(record) = self.records.get_mut(name) else { return false };
        let changed = record.trusts != authorities;
        record.trusts = authorities;
        changed
    }

    /// Returns `true` if a client trusts an authority.
    pub fn knows(&self, name: &str, authority: &str) -> bool {
        let knows = |r: &ClientRecord| r.authority == authority || r.trusts.iter().any(|t| t == authority);
        self.records.get(name).is_some_and(knows)
    }

    /// Counts clients of which no call is known as seen now, when a rotation begins.
    pub fn assume_seen(&mut self, unix: u64) {
        for record in self.records.values_mut().filter(|record| record.seen_unix == 0) {
            record.seen_unix = unix;
        }
    }

    /// Returns the part of the state that must survive a restart.
    pub fn save(&self) -> Saved<'_> {
        Saved {
            clients: Cow::Borrowed(&self.records),
            forgotten: Cow::Borrowed(&self.forgotten),
            earlier: Cow::Borrowed(&self.earlier),
        }
    }

    /// Returns the name of the client with this certificate, and whether the table changed.
    ///
    /// The first call with a renewed certificate makes it the client's present one.
    pub fn identify(&mut self, certificate: &[u8; 32], unix: u64) -> Result<(String, bool), Refusal> {
        let (name, next) = self.known(certificate, unix)?;
        let (name, next) = (name.to_owned(), next.cloned());
        let changed = next.is_some();
        if let Some(next) = next {
            self.succeed(&name, next, unix);
        }
        Ok((name, changed))
    }

    /// Returns the name of the client with this certificate, and the certificate if it is renewed.
    fn known(&self, certificate: &[u8; 32], unix: u64) -> Result<(&str, Option<&Dated>), Refusal> {
        let certificate = data_encoding::HEXLOWER.encode(certificate);
        let name = self.by_certificate.get(&certificate).ok_or(Refusal::Unknown)?;
        let record = self.records.get(name).ok_or(Refusal::Unknown)?;
        if record.revoked {
            return Err(Refusal::Revoked(name.clone()));
        }
        let next = record.next.as_ref().filter(|next| next.certificate == certificate);
        let overlaps = |p: &Previous| p.certificate == certificate && unix < p.until_unix;
        if record.certificate == certificate
            || next.is_some()
            || record.previous.as_ref().is_some_and(overlaps)
        {
            return Ok((name, next));
        }
        Err(Refusal::Unknown)
    }

    /// Returns `true` if [`identify`](Self::identify) or [`introduce`](Self::introduce) would
    /// accept a certificate.
    pub fn accepts(&self, certificate: &[u8; 32], holder: &Holder, unix: u64) -> bool {
        match self.known(certificate, unix) {
            Err(Refusal::Unknown) => self.may_introduce(holder).is_ok(),
            known => known.is_ok(),
        }
    }

    /// Makes a newer certificate of the same identity the present one of `name`.
    fn succeed(&mut self, name: &str, newer: Dated, unix: u64) {
        let Some(record) = self.records.get_mut(name) else { return };
        for old in record.certificates() {
            self.by_certificate.remove(old);
        }
        let old = std::mem::replace(&mut record.certificate, newer.certificate.clone());
        record.joined_unix = newer.issued_unix;
        record.expires_unix = newer.expires_unix;
        record.next = None;
        record.previous = Some(Previous { certificate: old, until_unix: unix + OVERLAP_GRACE.as_secs() });
        for known in record.certificates() {
            self.by_certificate.insert(known.clone(), name.into());
        }
    }

    /// Returns the identity of a client whose present certificate this is.
    ///
    /// Only that one is renewed: another process may have renewed an older one already.
    pub fn may_renew(&self, name: &str, certificate: &[u8; 32]) -> Result<[u8; 32], Refusal> {
        let record = self.records.get(name).ok_or(Refusal::Unknown)?;
        if record.certificate != data_encoding::HEXLOWER.encode(certificate) {
            return Err(Refusal::Renewed(name.into()));
        }
        let identity = data_encoding::HEXLOWER.decode(record.key.as_bytes()).ok();
        identity.and_then(|key| key.try_into().ok()).ok_or(Refusal::Unknown)
    }

    /// Notes a renewed certificate; the present one stays valid until the client uses it.
    pub fn renew(&mut self, name: &str, next: Dated) {
        let Some(record) = self.records.get_mut(name) else { return };
        self.by_certificate.insert(next.certificate.clone(), name.into());
        if let Some(unused) = record.next.replace(next) {
            self.by_certificate.remove(&unused.certificate);
        }
    }

    /// Lists the clients whose certificates end by `unix`, and when.
    pub fn ending(&self, unix: u64) -> Vec<(String, u64)> {
        let ends = |r: &ClientRecord| !r.revoked && r.expires_unix != 0 && r.expires_unix <= unix;
        let listed = self.records.iter().filter(|(_, r)| ends(r));
        listed.map(|(name, r)| (name.clone(), r.expires_unix)).collect()
    }

    /// Adds a client that joined through another server of the pool.
    ///
    /// The pool's authority has signed its certificate, and [`identify`](Self::identify) does not
    /// know it. A certificate stays invalid if a later one of the same key replaced it, if the name
    /// was forgotten here, or if another key has the name. Returns as [`join`](Self::join) does.
    pub fn introduce(
        &mut self,
        certificate: &[u8; 32],
        holder: &Holder,
        unix: u64,
    ) -> Result<Option<String>, Refusal> {
        self.may_introduce(holder)?;
        let Holder { name: client, issued_unix, expires_unix, identity, .. } = holder;
        let newer = Dated::new(certificate, *issued_unix, *expires_unix);
        Ok(match self.records.contains_key(client) {
            true => {
                self.succeed(client, newer, unix);
                None
            }
            false => self.join(client, newer, identity, ""),
        })
    }

    fn may_introduce(&self, holder: &Holder) -> Result<(), Refusal> {
        let Holder { name: client, issued_unix, identity, .. } = holder;
        let known = self.records.get(client);
        if known.is_some_and(|record| record.revoked) {
            return Err(Refusal::Revoked(client.clone()));
        }
        if self.refused.contains(identity) {
            return Err(Refusal::Unknown);
        }
        let newest = known.map(|record| record.joined_unix).max(self.forgotten.get(client).copied());
        if newest.is_some_and(|newest| *issued_unix <= newest) {
            return Err(Refusal::Unknown);
        }
        self.may_join(client, identity)
    }

    /// Returns an error unless a machine with this public key may join as `name`.
    ///
    /// It may if the name is free, or if the key has the name: then the reply to its join was lost.
    /// However long the client is silent, no token takes over its name.
    pub fn may_join(&self, name: &str, key: &[u8; 32]) -> Result<(), Refusal> {
        match self.records.get(name) {
            Some(record) if record.revoked => Err(Refusal::Revoked(name.into())),
            _ if self.refused.contains(key) => Err(Refusal::Unknown),
            None => Ok(()),
            Some(record) if record.key == data_encoding::HEXLOWER.encode(key) => Ok(()),
            Some(_) => Err(Refusal::Taken(name.into())),
        }
    }

    /// Makes a certificate the only valid one of `name`.
    ///
    /// Returns the identity that had the name until it was forgotten, if that was another one.
    pub fn join(&mut self, name: &str, dated: Dated, key: &[u8; 32], machine_id: &str) -> Option<String> {
        let certificate = dated.certificate.clone();
        let record = ClientRecord {
            certificate: dated.certificate,
            key: data_encoding::HEXLOWER.encode(key),
            machine_id: machine_id.into(),
            revoked: false,
            joined_unix: dated.issued_unix,
            expires_unix: dated.expires_unix,
            authority: String::new(),
            trusts: Vec::new(),
            seen_unix: dated.issued_unix,
            elsewhere: false,
            next: None,
            previous: None,
        };
        if let Some(old) = self.records.insert(name.into(), record) {
            for old in old.certificates() {
                self.by_certificate.remove(old);
            }
        }
        self.by_certificate.insert(certificate, name.into());
        self.earlier.remove(name).filter(|earlier| *earlier != data_encoding::HEXLOWER.encode(key))
    }

    /// As [`join`](Self::join), for a client of another server.
    pub fn join_elsewhere(&mut self, name: &str, dated: Dated, key: &[u8; 32]) -> Option<String> {
        let earlier = self.join(name, dated, key, "");
        self.records.get_mut(name).into_iter().for_each(|record| record.elsewhere = true);
        earlier
    }

    /// Records a client's call. `machine_id` is empty if the call does not carry it.
    pub fn seen(
        &mut self,
        name: &str,
        boot_id: &str,
        machine_id: &str,
        now: Moment,
    ) -> Result<Seen, Refusal> {
        if boot_id.is_empty() {
            return Err(Refusal::NoBoot);
        }
        let presence = self.presence.entry(name.into()).or_default();
        let same_machine =
            machine_id.is_empty() || presence.machine_id.is_empty() || machine_id == presence.machine_id;
        if presence.boot_id == boot_id && same_machine {
            presence.last_seen = Some(now);
            presence.left = false;
            if presence.machine_id.is_empty() {
                presence.machine_id = machine_id.into();
            }
            return Ok(Seen::Known);
        }
        let first = presence.boot_id.is_empty();
        let stale = presence.replaced.iter().any(|b| b == boot_id);
        if !first && (presence.alive(now) || stale) {
            return Err(Refusal::SecondMachine(name.into()));
        }
        if !first && presence.boot_id != boot_id {
            let old = std::mem::replace(&mut presence.boot_id, boot_id.into());
            presence.replaced.push(old);
            // A machine restarts a few times a day at most, while copies show up soon.
            if presence.replaced.len() > 16 {
                presence.replaced.remove(0);
            }
        }
        presence.boot_id = boot_id.into();
        presence.machine_id = machine_id.into();
        presence.last_seen = Some(now);
        presence.left = false;
        // After a restart of the server, stored leases may belong to another boot.
        Ok(Seen::NewBoot)
    }

    /// Assumes that a client still uses the boot under which it held a lease before this server
    /// started.
    ///
    /// It has a moment to confirm that, during which no copy of it can take its place.
    pub fn assume(&mut self, name: &str, boot_id: &str, now: Moment) {
        let presence = self.presence.entry(name.into()).or_default();
        presence.boot_id = boot_id.into();
        presence.last_seen = Some(now);
    }

    /// Returns `true` if a client of that name may use the pool.
    pub fn allows(&self, name: &str) -> bool {
        self.records.get(name).is_some_and(|r| !r.revoked)
    }

    /// Records a call that names no boot.
    pub fn heard(&mut self, name: &str, now: Moment) {
        if let Some(presence) = self.presence.get_mut(name) {
            presence.last_seen = Some(now);
        }
    }

    /// Counts an open watch of a client.
    pub fn watch_began(&mut self, name: &str) {
        self.presence.entry(name.into()).or_default().watches += 1;
    }

    /// Counts a closed watch: after the last one the client is gone, unless it calls again.
    pub fn watch_ended(&mut self, name: &str) {
        if let Some(presence) = self.presence.get_mut(name) {
            presence.watches = presence.watches.saturating_sub(1);
            presence.left = presence.watches == 0;
        }
    }

    /// Revokes a client, known here or not. Returns `true` if this server knew it.
    ///
    /// A client that has only called other servers of the pool is unknown here.
    pub fn revoke(&mut self, name: &str, unix: u64) -> bool {
        let known = self.records.contains_key(name);
        let unseen = || ClientRecord {
            certificate: String::new(),
            key: String::new(),
            machine_id: String::new(),
            revoked: false,
            joined_unix: unix,
            expires_unix: 0,
            authority: String::new(),
            trusts: Vec::new(),
            seen_unix: unix,
            elsewhere: false,
            next: None,
            previous: None,
        };
        self.records.entry(name.into()).or_insert_with(unseen).revoked = true;
        known
    }

    /// Removes a client, whose name can then join again. Returns `true` if this server knew it.
    ///
    /// Certificates that any server issued to it so far become invalid.
    pub fn forget(&mut self, name: &str, unix: u64) -> bool {
        self.presence.remove(name);
        let record = self.records.remove(name);
        if let Some(record) = &record {
            for certificate in record.certificates() {
                self.by_certificate.remove(certificate);
            }
            if !record.key.is_empty() {
                self.earlier.insert(name.into(), record.key.clone());
            }
        }
        let joined = record.as_ref().map_or(0, |r| r.joined_unix);
        self.forgotten.insert(name.into(), unix.max(joined));
        record.is_some()
    }

    /// Returns `true` if this server has a record of the name.
    pub fn has(&self, name: &str) -> bool {
        self.records.contains_key(name)
    }

    /// Returns the identity of a client, if this server knows it.
    pub fn identity(&self, name: &str) -> Option<[u8; 32]> {
        let key = data_encoding::HEXLOWER.decode(self.records.get(name)?.key.as_bytes()).ok()?;
        key.try_into().ok()
    }

    /// Returns the seconds until certificates of a forgotten name count, if `unix` is too early.
    pub fn forgotten_ahead(&self, name: &str, unix: u64) -> u64 {
        self.forgotten.get(name).map_or(0, |until| (until + 1).saturating_sub(unix))
    }

    /// Applies the pool's statements about a client.
    ///
    /// Returns the reason for which its leases end, if the client could use the pool until now.
    pub fn settle(&mut self, name: &str, statements: &Statements) -> Option<&'static str> {
        let record = self.records.get(name);
        let allowed = record.is_some_and(|record| !record.revoked);
        match statements.client(name) {
            ClientStanding::Free => None,
            ClientStanding::Revoked { unix } => {
                self.revoke(name, unix);
                allowed.then_some("the client was revoked")
            }
            ClientStanding::Forgotten { unix } => {
                let refused = self.identity(name).is_some_and(|key| statements.refuses(&key));
                if refused || record.is_some_and(|record| record.joined_unix <= unix) {
                    self.forget(name, unix);
                    return allowed.then_some("the client was removed from the pool");
                }
                let until = self.forgotten.entry(name.into()).or_default();
                *until = unix.max(*until);
                None
            }
        }
    }

    /// Refuses the identities that a statement refuses.
    pub fn refuse<'a>(&mut self, identities: impl IntoIterator<Item = &'a [u8; 32]>) {
        self.refused.extend(identities);
    }

    /// Lists all clients.
    pub fn list(&self, now: Moment) -> Vec<ClientView> {
        let view = |(name, record): (&String, &ClientRecord)| {
            let presence = self.presence.get(name);
            ClientView {
                name: name.clone(),
                record: record.clone(),
                alive: presence.is_some_and(|p| p.alive(now)),
                silent: presence.and_then(|p| Some(now.saturating_sub(p.last_seen?))),
            }
        };
        self.records.iter().map(view).collect()
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use gpusession_proto::statement::{Signed, Statement, Verdict};

    use super::*;
    use crate::certificate::Role;

    const T: Moment = Duration::from_secs(1000);

    fn dated(certificate: u8, issued_unix: u64) -> Dated {
        Dated::new(&[certificate; 32], issued_unix, issued_unix + 100)
    }

    fn holder(name: &str, issued_unix: u64, identity: [u8; 32]) -> Holder {
        let expires_unix = issued_unix + 100;
        Holder { role: Role::Client, name: name.into(), issued_unix, expires_unix, identity }
    }

    /// Returns the client of a certificate, as its call at this time.
    fn called(clients: &mut Clients, certificate: u8, unix: u64) -> Result<String, Refusal> {
        clients.identify(&[certificate; 32], unix).map(|(name, _)| name)
    }

    fn joined() -> Clients {
        let mut clients = Clients::default();
        clients.join("vm-1", dated(1, 5), &[11; 32], "m1");
        clients
    }

    #[test]
    fn certificates() {
        let mut clients = joined();
        assert_eq!(called(&mut clients, 1, 9), Ok("vm-1".into()));
        assert_eq!(called(&mut clients, 2, 9), Err(Refusal::Unknown));
        clients.join("vm-1", dated(2, 6), &[11; 32], "m1");
        assert_eq!(
            called(&mut clients, 1, 9),
            Err(Refusal::Unknown),
            "a later join replaces the certificate"
        );
        assert!(clients.revoke("vm-1", 6) && !clients.revoke("vm-2", 6));
        let mut clients = Clients::new(clients.save());
        assert_eq!(called(&mut clients, 2, 9), Err(Refusal::Revoked("vm-1".into())));
        assert!(matches!(clients.may_join("vm-1", &[11; 32]), Err(Refusal::Revoked(_))));
        assert!(clients.forget("vm-1", 7));
        assert_eq!(called(&mut clients, 2, 9), Err(Refusal::Unknown));
        assert_eq!(clients.may_join("vm-1", &[12; 32]), Ok(()));
    }

    #[test]
    fn a_token_takes_over_no_name() {
        let clients = joined();
        let taken = Err(Refusal::Taken("vm-1".into()));
        assert_eq!(clients.may_join("vm-1", &[12; 32]), taken, "however long vm-1 is silent");
        assert_eq!(clients.may_join("vm-1", &[11; 32]), Ok(()), "its own key: the reply was lost");
        assert_eq!(clients.may_join("vm-2", &[12; 32]), Ok(()));
        let old = r#"{"clients":{"vm-3":{"certificate":"CERT","machine_id":"m3","revoked":false,"joined_unix":1}}}"#;
        let old = old.replace("CERT", &"00".repeat(32));
        let mut clients = Clients::new(serde_json::from_str(&old).unwrap());
        assert_eq!(clients.may_join("vm-3", &[13; 32]), Err(Refusal::Taken("vm-3".into())));
        let vm3 = |key| holder("vm-3", 1, [key; 32]);
        let mut call = |key, authority: &str, unix| {
            clients.complete(&[0; 32], &vm3(key), Some(authority.to_owned()), unix)
        };
        assert!(
            call(13, "a1", SEEN_STEP) && !call(14, "a1", SEEN_STEP + 1) && !call(14, "a1", SEEN_STEP + 2)
        );
        assert!(call(13, "a2", SEEN_STEP + 3) && call(13, "a2", 2 * SEEN_STEP));
        let record = clients.list(T).remove(0).record;
        assert_eq!((record.authority.as_str(), record.seen_unix), ("a2", 2 * SEEN_STEP));
        assert!(!clients.complete(&[9; 32], &vm3(13), Some("a1".into()), 2 * SEEN_STEP), "an older one");
        assert!(clients.trusts("vm-3", vec!["a1".into()]) && !clients.trusts("vm-3", vec!["a1".into()]));
        assert_eq!(clients.list(T)[0].record.expires_unix, 101);
        assert_eq!(clients.may_join("vm-3", &[13; 32]), Ok(()));
    }

    #[test]
    fn clients_that_joined_with_another_server_are_introduced() {
        let of = holder;
        let vm = |name: &str, issued_unix| of(name, issued_unix, [11; 32]);
        let mut clients = joined();
        assert_eq!(clients.introduce(&[9; 32], &vm("vm-9", 5), 9), Ok(None));
        assert_eq!(called(&mut clients, 9, 9), Ok("vm-9".into()));
        // The newest certificate of a name is the valid one.
        assert_eq!(clients.introduce(&[8; 32], &vm("vm-9", 5), 9), Err(Refusal::Unknown));
        assert_eq!(clients.introduce(&[8; 32], &vm("vm-9", 6), 9), Ok(None));
        assert_eq!(called(&mut clients, 9, 9 + OVERLAP_GRACE.as_secs()), Err(Refusal::Unknown));
        assert_eq!(clients.introduce(&[9; 32], &vm("vm-9", 5), 9), Err(Refusal::Unknown));
        let taken = Err(Refusal::Taken("vm-9".into()));
        assert_eq!(clients.introduce(&[6; 32], &of("vm-9", 7, [12; 32]), 9), taken, "another identity");
        clients.seen("vm-9", "b1", "m1", T).unwrap();
        assert_eq!(clients.introduce(&[7; 32], &vm("vm-9", 7), 9), Ok(None), "a newer one of the same");
        assert!(clients.forget("vm-9", 8) && clients.revoke("vm-1", 9));
        let mut clients = Clients::new(clients.save());
        assert_eq!(clients.introduce(&[7; 32], &vm("vm-9", 7), 9), Err(Refusal::Unknown), "forgotten");
        assert_eq!(clients.introduce(&[7; 32], &vm("vm-9", 9), 9), Ok(None), "joined anew");
        let revoked = Err(Refusal::Revoked("vm-1".into()));
        assert_eq!(
            clients.introduce(&[6; 32], &vm("vm-1", 99), 9),
            revoked,
            "until an administrator forgets it"
        );
    }

    #[test]
    fn a_refused_identity_never_comes_back_and_its_name_does() {
        let stated = |unix, turn, verdict| {
            let statement = Statement { server: "gpu1".into(), number: 1, unix, turn, verdict };
            let signed = Signed { body: statement.body(), authority: [0; 32], signature: Vec::new() };
            (signed, statement)
        };
        let (mut clients, mut statements) = (joined(), Statements::default());
        let (name, identity) = ("vm-1".to_owned(), Some([11; 32]));
        let mut settle = |clients: &mut Clients, unix, turn, verdict| {
            let (signed, statement) = stated(unix, turn, verdict);
            statements.take(signed, statement, None);
            let clients_of_a_restart = clients.save();
            *clients = Clients::new(
                serde_json::from_value(serde_json::to_value(clients_of_a_restart).unwrap()).unwrap(),
            );
            clients.refuse(statements.identities());
            clients.settle("vm-1", &statements)
        };
        let revoke = Verdict::RevokeClient { name: name.clone(), identity };
        assert_eq!(settle(&mut clients, 50, 1, revoke.clone()), Some("the client was revoked"));
        assert_eq!(settle(&mut clients, 50, 1, revoke), None, "again");
        assert_eq!(called(&mut clients, 1, 51), Err(Refusal::Revoked("vm-1".into())));
        // A server that was taken over forgets the name, and has the signer renew the certificate.
        assert_eq!(settle(&mut clients, 60, 2, Verdict::ForgetClient { name, identity: None }), None);
        assert_eq!(clients.introduce(&[2; 32], &holder("vm-1", 99, [11; 32]), 99), Err(Refusal::Unknown));
        assert_eq!(clients.may_join("vm-1", &[11; 32]), Err(Refusal::Unknown));
        // Another machine takes the name, from the next second on.
        assert_eq!((clients.forgotten_ahead("vm-1", 59), clients.forgotten_ahead("vm-1", 61)), (2, 0));
        assert_eq!(clients.introduce(&[3; 32], &holder("vm-1", 60, [12; 32]), 60), Err(Refusal::Unknown));
        let earlier = Some("0b".repeat(32));
        assert_eq!(clients.introduce(&[3; 32], &holder("vm-1", 61, [12; 32]), 61), Ok(earlier));
        let again = Verdict::ForgetClient { name: "vm-1".into(), identity: None };
        assert_eq!(settle(&mut clients, 60, 2, again), None);
        assert_eq!(
            (called(&mut clients, 3, 62), clients.identity("vm-1")),
            (Ok("vm-1".into()), Some([12; 32]))
        );
    }

    #[test]
    fn a_second_machine_is_refused_while_the_first_is_alive() {
        let mut clients = joined();
        assert_eq!(clients.seen("vm-1", "b1", "m1", T), Ok(Seen::NewBoot));
        assert_eq!(clients.seen("vm-1", "b1", "m1", T), Ok(Seen::Known));
        assert_eq!(clients.seen("vm-1", "b1", "", T), Ok(Seen::Known));
        let second = Err(Refusal::SecondMachine("vm-1".into()));
        assert_eq!(clients.seen("vm-1", "b2", "m2", T), second, "other machine");
        assert_eq!(clients.seen("vm-1", "b2", "m1", T), second, "a clone that has the same machine id");
        assert_eq!(clients.seen("vm-1", "b1", "m2", T), second);
        assert_eq!(clients.seen("vm-1", "", "m1", T), Err(Refusal::NoBoot));
        // Its watch keeps it alive even in silence.
        clients.watch_began("vm-1");
        assert_eq!(clients.seen("vm-1", "b2", "m1", T + SUSPECT_TIMEOUT * 9), second);
        // An orderly stop closes the watch: the next boot is welcome at once, the old one never
        // again.
        clients.watch_ended("vm-1");
        assert_eq!(clients.seen("vm-1", "b2", "m1", T + SUSPECT_TIMEOUT * 9), Ok(Seen::NewBoot));
        assert_eq!(clients.seen("vm-1", "b1", "m1", T + SUSPECT_TIMEOUT * 99), second);
    }

    #[test]
    fn after_a_restart_of_the_server_the_holder_comes_first() {
        let mut clients = joined();
        clients.assume("vm-1", "b1", T);
        assert!(clients.seen("vm-1", "b2", "m2", T + SUSPECT_TIMEOUT / 2).is_err());
        assert_eq!(clients.seen("vm-1", "b1", "m1", T + SUSPECT_TIMEOUT / 2), Ok(Seen::Known));
        assert!(clients.seen("vm-1", "b2", "m2", T + SUSPECT_TIMEOUT).is_err());
        assert!(clients.allows("vm-1") && !clients.allows("vm-2"));
    }

    #[test]
    fn after_a_power_cut_the_same_machine_waits_a_moment() {
        let mut clients = joined();
        clients.seen("vm-1", "b1", "m1", T).unwrap();
        assert!(clients.seen("vm-1", "b2", "m1", T + SUSPECT_TIMEOUT / 2).is_err());
        assert_eq!(clients.seen("vm-1", "b2", "m1", T + SUSPECT_TIMEOUT), Ok(Seen::NewBoot));
        assert_eq!(clients.list(T + SUSPECT_TIMEOUT)[0].silent, Some(Duration::ZERO));
    }

    #[test]
    fn a_renewed_certificate_replaces_the_older_one_at_its_first_call() {
        let mut clients = joined();
        assert_eq!(clients.may_renew("vm-1", &[1; 32]), Ok([11; 32]));
        clients.renew("vm-1", dated(2, 50));
        assert_eq!(called(&mut clients, 1, 60), Ok("vm-1".into()), "the reply may be lost");
        // Asked again: the first answer's certificate was never used.
        clients.renew("vm-1", dated(3, 61));
        let mut clients = Clients::new(clients.save());
        assert_eq!(called(&mut clients, 2, 62), Err(Refusal::Unknown));
        assert_eq!(clients.identify(&[3; 32], 70), Ok(("vm-1".into(), true)));
        assert_eq!(clients.identify(&[3; 32], 70), Ok(("vm-1".into(), false)));
        let mut clients = Clients::new(clients.save());
        let overlap = 70 + OVERLAP_GRACE.as_secs();
        assert_eq!(called(&mut clients, 1, overlap - 1), Ok("vm-1".into()), "other processes have it");
        assert_eq!(called(&mut clients, 1, overlap), Err(Refusal::Unknown));
        assert_eq!(clients.may_renew("vm-1", &[1; 32]), Err(Refusal::Renewed("vm-1".into())));
        assert_eq!(clients.may_renew("vm-1", &[3; 32]), Ok([11; 32]), "the identity stays");
        let record = &clients.list(T)[0].record;
        assert_eq!((record.joined_unix, record.expires_unix), (61, 161));
        assert_eq!(clients.ending(160), []);
        assert_eq!(clients.ending(161), [("vm-1".to_owned(), 161)]);
        // Revoked and forgotten clients lose the renewed certificate too.
        clients.renew("vm-1", dated(4, 90));
        clients.revoke("vm-1", 91);
        assert_eq!(called(&mut clients, 4, 92), Err(Refusal::Revoked("vm-1".into())));
        clients.forget("vm-1", 93);
        for certificate in [1, 3, 4] {
            assert_eq!(called(&mut clients, certificate, 94), Err(Refusal::Unknown));
        }
        assert_eq!(clients.by_certificate.len(), 0);
    }

    #[test]
    fn only_certificates_that_calls_can_use_are_accepted() {
        let mut clients = joined();
        let accepts = |clients: &Clients, certificate: u8, issued_unix, unix| {
            let vm = holder("vm-1", issued_unix, [11; 32]);
            let accepted = clients.accepts(&[certificate; 32], &vm, unix);
            let mut called =
                Clients::new(serde_json::from_value(serde_json::to_value(clients.save()).unwrap()).unwrap());
            let known = called.identify(&[certificate; 32], unix).is_ok();
            assert_eq!(accepted, known || called.introduce(&[certificate; 32], &vm, unix).is_ok());
            accepted
        };
        clients.renew("vm-1", dated(2, 50));
        assert!(accepts(&clients, 1, 5, 60) && accepts(&clients, 2, 50, 60) && accepts(&clients, 3, 70, 60));
        assert!(!clients.accepts(&[4; 32], &holder("vm-1", 70, [12; 32]), 60), "another machine's");
        clients.identify(&[2; 32], 60).unwrap();
        assert!(accepts(&clients, 1, 5, 61) && !accepts(&clients, 1, 5, 60 + OVERLAP_GRACE.as_secs()));
        clients.revoke("vm-1", 62);
        assert!([(1, 5), (2, 50), (3, 70)].iter().all(|(c, issued)| !accepts(&clients, *c, *issued, 63)));
    }

    #[test]
    fn another_server_takes_a_renewed_certificate_and_keeps_the_older_one_for_a_while() {
        let mut clients = joined();
        assert_eq!(clients.introduce(&[2; 32], &holder("vm-1", 50, [11; 32]), 60), Ok(None));
        assert_eq!(called(&mut clients, 2, 61), Ok("vm-1".into()));
        assert_eq!(called(&mut clients, 1, 61), Ok("vm-1".into()));
        assert_eq!(called(&mut clients, 1, 60 + OVERLAP_GRACE.as_secs()), Err(Refusal::Unknown));
        let older = clients.introduce(&[1; 32], &holder("vm-1", 5, [11; 32]), 60 + OVERLAP_GRACE.as_secs());
        assert_eq!(older, Err(Refusal::Unknown));
    }
}
