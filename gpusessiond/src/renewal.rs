//! Renewal of this client's certificate, long before it ends.
//!
//! Servers issue certificates for 90 days. A daemon, or a `gpusession run` that owns its identity,
//! renews in the last third. Processes that share an identity take the renewed one from its folder.

use std::sync::Arc;
use std::time::Duration;

use gpusession_proto::journal::Event;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::client::Remote;
use crate::identity::{Facts, Home, Identity};
use crate::pool::{PoolServer as _, Trouble};
use crate::trust::Revoked;

const DAY: u64 = 24 * 3600;
/// Time before its end at which a certificate is renewed, give or take [`SPREAD`].
const BEFORE_END: u64 = 30 * DAY;
/// Part of that time that differs by name, so that machines of one day do not renew at once.
const SPREAD: u64 = 5 * DAY;
/// Certificates of earlier versions, made to last, live longer than this.
const LASTING: u64 = 100 * DAY;
/// Pause between tries that fail, in seconds.
const RETRY_INTERVAL: u64 = 6 * 3600;
/// Pause between tries for a certificate that has expired, in seconds.
const EXPIRED_RETRY_INTERVAL: u64 = 300;
/// Time before its end from which the daemon warns, once a day.
const WARNING: u64 = 14 * DAY;
/// Pause between checks of the clock and of the identity's folder.
///
/// The server keeps a replaced certificate valid for longer, so that no process is shut out.
const CHECK_INTERVAL: Duration = Duration::from_secs(300);
/// Shortest time between checks, however often servers ask for one.
const MIN_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which servers are asked for the pool's authorities again.
///
/// A server reports a change at once, to clients that are connected.
const TRUST_INTERVAL: u64 = 3600;

/// Source of the seconds since 1970.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Returns the seconds since 1970.
#[expect(clippy::disallowed_methods, reason = "certificates end by the wall clock")]
pub fn wall() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The identity as observers see it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Standing {
    /// Facts of the present certificate.
    pub facts: Facts,
    /// Why the latest renewal failed; empty if none did.
    pub trouble: String,
    /// When the daemon last warned that the certificate ends, in seconds since 1970.
    pub warned: Option<u64>,
}

/// Renewal that a certificate's age asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    /// No renewal yet.
    No,
    /// A renewal, if every server serves renewed certificates.
    ///
    /// A server of an earlier version takes a renewed certificate for another client's.
    IfAllRenew,
    /// A renewal at any server.
    Now,
}

fn due(facts: &Facts, unix: u64) -> Due {
    let life = facts.expires_unix.saturating_sub(facts.begins_unix);
    let hash = blake3::hash(facts.name.as_bytes());
    let spread = u64::from(u32::from_le_bytes([0, 1, 2, 3].map(|i| hash.as_bytes()[i]))) % (2 * SPREAD);
    // A short certificate is renewed in its last part.
    let before = (BEFORE_END - SPREAD + spread).min(life / 5 * 2);
    match unix + before >= facts.expires_unix {
        true => Due::Now,
        false if life > LASTING => Due::IfAllRenew,
        false => Due::No,
    }
}

/// Renews an identity and tells observers.
pub struct Renewer {
    home: Home,
    identity: Identity,
    clock: Clock,
    standing: watch::Sender<Option<Standing>>,
    /// Time of the latest try, in seconds since 1970.
    tried: Option<u64>,
    /// Time of the latest warning.
    warned: Option<u64>,
    /// Time at which servers were asked for the pool's authorities; `None`: a server wants that.
    trusted: Option<u64>,
}

impl Renewer {
    /// Creates a renewer of the identity in `home`, which publishes its standing.
    pub fn new(
        home: Home,
        identity: Identity,
        clock: Clock,
        standing: watch::Sender<Option<Standing>>,
    ) -> Self {
        let renewer = Self { home, identity, clock, standing, tried: None, warned: None, trusted: None };
        renewer.publish(String::new());
        renewer
    }

    /// Returns `true` if the certificate has expired.
    pub fn expired(&self) -> bool {
        self.identity.facts().expires_unix <= (self.clock)()
    }

    /// Looks after the identity as long as the future lives.
    pub async fn follow(mut self) {
        loop {
            self.renew_if_due().await;
            tokio::time::sleep(MIN_CHECK_INTERVAL).await;
            if tokio::time::timeout(CHECK_INTERVAL, self.identity.woken()).await.is_ok() {
                self.trusted = None;
            }
        }
    }

    /// Takes a renewed identity from the folder, renews one that is due, and warns of the end.
    pub async fn renew_if_due(&mut self) {
        match self.home.reload(&self.identity) {
            Ok(true) => self.renewed(),
            Ok(false) => {}
            // The files are being replaced, or were removed by `gpusession leave`.
            Err(_) => return,
        }
        let unix = (self.clock)();
        if self.home.is_ours()
            && self.trusted.is_none_or(|at| unix < at || unix >= at + TRUST_INTERVAL)
            && let Err(why) = self.follow_authorities(unix).await
        {
            warn!("identity: cannot read the pool's authorities: {why}; the daemon retries within an hour");
        }
        let facts = self.identity.facts();
        let retry = if facts.expires_unix <= unix { EXPIRED_RETRY_INTERVAL } else { RETRY_INTERVAL };
        let due = due(&facts, unix);
        if due != Due::No
            && self.home.is_ours()
            // A clock that was set back must not delay the next try.
            && self.tried.is_none_or(|at| unix < at || unix >= at + retry)
        {
            self.tried = Some(unix);
            match self.renew(due, unix).await {
                Ok(true) => self.renewed(),
                Ok(false) => {}
                Err(why) => self.publish(why),
            }
        }
        self.warn((self.clock)());
    }

    fn renewed(&mut self) {
        let facts = self.identity.facts();
        self.warned = None;
        info!(
            message_id = Event::IdentityRenewed.id(),
            gpusession_client = facts.name,
            "identity {}: certificate renewed, good for another {} days; leases and programs continue",
            facts.name,
            facts.expires_unix.saturating_sub((self.clock)()) / DAY
        );
        self.publish(String::new());
    }

    fn publish(&self, trouble: String) {
        let standing = Some(Standing { facts: self.identity.facts(), trouble, warned: self.warned });
        self.standing.send_if_modified(|known| {
            let differs = *known != standing;
            *known = standing;
            differs
        });
    }

    fn remotes(&self) -> Result<Vec<Remote>, String> {
        let addresses = self.home.addresses().map_err(|e| e.to_string())?;
        let remotes = addresses.iter().map(|address| Remote::new(address, &self.identity));
        remotes.collect::<Result<_, _>>().map_err(|e| e.to_string())
    }

    /// Trusts the authorities that the servers name, and takes a certificate of a newer one.
    async fn follow_authorities(&mut self, unix: u64) -> Result<(), String> {
        self.trusted = Some(unix);
        let remotes = self.remotes()?;
        let held = self.identity.authorities();
        let (mut answers, mut wrong) = (Vec::new(), None);
        let mut revoked = Revoked::new();
        for remote in &remotes {
            // Servers of earlier versions, and those that do not answer, name none.
            let answer = remote.authorities().await.unwrap_or_default();
            revoked.extend(held.revoked(&answer.revoked_servers));
            let list = answer.authorities_pem;
            let offered = Some(list).filter(|list| !list.is_empty()).map(|list| held.offered(&list, unix));
            answers.push(match offered {
                Some(Err(why)) => {
                    wrong = Some(format!("the list of {} is not used: {why}", remote.address()));
                    None
                }
                offered => offered.and_then(Result::ok),
            });
        }
        for server in self.home.refuse(&self.identity, revoked).map_err(|e| e.to_string())? {
            warn!(
                gpusession_server = server,
                "{}; this client refuses it from now on, and its leases there end",
                crate::trust::refusal(&server)
            );
        }
        // A server signs with an authority that this client has reported to trust, and waits for
        // the reports before the next step.
        let report = async || {
            for remote in &remotes {
                let _ = remote.authorities().await;
            }
        };
        let own = self.identity.facts().issuer;
        if let Some(new) = held.replaced_by(&answers, &own)
            && self.home.trust(&self.identity, &held, &new).map_err(|e| e.to_string())?
        {
            let (before, now) = (held.fingerprints().count(), new.fingerprints().count());
            let step = format!("this client trusted {before} authorities, and trusts {now} now");
            info!(
                message_id = Event::AuthorityRotation.id(),
                gpusession_client = self.identity.facts().name,
                gpusession_reason = step,
                "the pool's authority: {step}; leases and programs continue"
            );
            report().await;
        }
        for index in self.identity.authorities().renew_at(&answers, &own) {
            let ask = async |request| remotes[index].renew_identity(request).await;
            match self.home.renew(&self.identity, unix, ask).await {
                Ok(renewed) => {
                    if renewed {
                        self.renewed();
                        report().await;
                    }
                    break;
                }
                Err(e) => wrong = Some(e.to_string()),
            }
        }
        wrong.map_or(Ok(()), Err)
    }

    /// Asks the servers in turn. Returns `true` after a renewal.
    async fn renew(&self, due: Due, unix: u64) -> Result<bool, String> {
        let remotes = self.remotes()?;
        if due == Due::IfAllRenew {
            for remote in &remotes {
                if !remote.describe(None).await.is_ok_and(|server| server.renews_identities) {
                    return Ok(false);
                }
            }
        }
        let mut last = "servers.toml names no server".to_owned();
        for remote in &remotes {
            let ask = async |request| remote.renew_identity(request).await;
            match self.home.renew(&self.identity, unix, ask).await {
                Ok(renewed) => return Ok(renewed),
                Err(crate::identity::IdentityError::Pool(e)) if e.trouble == Trouble::Protocol => {
                    last = format!("{}: this server's version renews no certificates", remote.address());
                }
                Err(e) => last = e.to_string(),
            }
        }
        Err(last)
    }

    /// Warns of a certificate that ends soon or has ended, once a day.
    fn warn(&mut self, unix: u64) {
        let facts = self.identity.facts();
        if unix + WARNING < facts.expires_unix || self.warned.is_some_and(|at| unix >= at && unix < at + DAY)
        {
            return;
        }
        self.warned = Some(unix);
        let trouble = self.standing.borrow().as_ref().map(|s| s.trouble.clone()).unwrap_or_default();
        self.publish(trouble.clone());
        let why = match trouble.as_str() {
            "" => "it is not renewed by this process".to_owned(),
            trouble => format!("it could not be renewed: {trouble}"),
        };
        let ended = facts.expires_unix <= unix;
        let event = if ended { Event::IdentityExpired } else { Event::IdentityExpiring };
        let days = facts.expires_unix.abs_diff(unix) / DAY;
        let verb = if ended { "expired" } else { "expires" };
        let when = if ended { format!("{days} days ago") } else { format!("in {days} days") };
        warn!(
            message_id = event.id(),
            gpusession_client = facts.name,
            gpusession_reason = why,
            "identity {}: its certificate {verb} {when}: {why}; a new try follows within 6 hours",
            facts.name
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(name: &str, begins: u64, ends: u64) -> Facts {
        let (begins_unix, expires_unix) = (begins * DAY, ends * DAY);
        Facts { name: name.into(), begins_unix, expires_unix, ..Facts::default() }
    }

    #[test]
    fn certificates_of_90_days_are_renewed_around_day_60_and_not_all_at_once() {
        let mut days = std::collections::BTreeSet::new();
        for vm in 0..200 {
            let facts = facts(&format!("vm-{vm}"), 0, 90);
            let first = (0..90).find(|day| due(&facts, day * DAY) == Due::Now).unwrap();
            assert!((55..=65).contains(&first), "{first}");
            assert_eq!(due(&facts, 100 * 365 * DAY), Due::Now);
            days.insert(first);
        }
        assert!(days.len() >= 10, "{days:?}");
    }

    #[test]
    fn lasting_certificates_wait_for_all_servers_and_short_ones_for_their_last_part() {
        let lasting = facts("vm-1", 0, 5 * 365);
        assert_eq!(due(&lasting, 0), Due::IfAllRenew);
        assert_eq!(due(&lasting, (5 * 365 - 20) * DAY), Due::Now);
        let short = facts("vm-1", 0, 9);
        assert_eq!((due(&short, 5 * DAY), due(&short, 6 * DAY)), (Due::No, Due::Now));
        assert_eq!(due(&Facts::default(), DAY), Due::Now, "unreadable");
    }
}
