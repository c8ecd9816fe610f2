//! The certificates of the pool: renewal of the server's own, and warnings of those that end.

use gpusession_proto::journal::Event as Said;
use tracing::{error, info, warn};

use super::clients::{EXPIRY_WINDOW, Refusal};
use super::endings::DAY;
pub use super::endings::Ending;
use super::lock::locked;
use super::state::Pool;
use crate::audit;
use crate::certificate::day;
use crate::signer::Refused;

/// Pause between checks for certificates that end, in seconds.
const CHECK_INTERVAL: u64 = 3600;
/// Time before the end of the authority from which the server warns.
const AUTHORITY_WARNING: u64 = 2 * 365 * DAY;
/// Time before the end of the server's own certificate from which the server warns.
///
/// The server renews earlier, so that a shorter time means that this failed.
const SERVER_WARNING: u64 = 7 * DAY;

impl Pool {
    /// Renews the server's certificate if that is due, and warns of certificates that end.
    pub(super) async fn watch_identities(&self, unix: u64) {
        // A server without the authority's key waits for issuers elsewhere: `keep_membership`.
        if self.signer.link().member().is_none() {
            let certificate = self.certificate.clone();
            // In a thread that may wait for the signer.
            let kept = tokio::task::spawn_blocking(move || certificate.keep(unix)).await;
            self.note_renewal(kept.unwrap_or_default());
        }
        {
            let mut warned = locked(&self.warned);
            if unix < warned.looked_unix + CHECK_INTERVAL {
                return;
            }
            warned.looked_unix = unix;
        }
        let ending = self.ending(unix);
        for e in locked(&self.warned).due(ending, unix) {
            let ended = e.expires_unix < unix;
            let event = if ended { Said::IdentityExpired } else { Said::IdentityExpiring };
            warn!(
                message_id = event.id(),
                gpusession_client = (e.role == "client").then_some(e.name.as_str()),
                gpusession_reason = e.remedy().1,
                "{}",
                e.warning(unix)
            );
        }
    }

    /// Notes that another identity has a client's name than before `gpuserver clients forget`.
    pub(super) fn note_replaced(&self, client: &str, from: &str, earlier: Option<String>) {
        let Some(earlier) = earlier else { return };
        let identity = locked(&self.clients).identity(client).unwrap_or_default();
        let identity = data_encoding::HEXLOWER.encode(&identity);
        let why = format!("identity {identity}; before it was forgotten here: {earlier}");
        warn!(
            message_id = Said::ClientReplaced.id(),
            gpusession_client = client,
            gpusession_reason = why,
            "client {client}: another machine has the name: {why}"
        );
        self.audit.note(audit::Event {
            from: from.into(),
            client: client.into(),
            identity,
            detail: format!("before it was forgotten: {earlier}"),
            ..audit::own("client-replaced")
        });
    }

    /// Logs that the identity of a client is refused.
    pub(super) fn warn_of_refused(&self, client: &str, refusal: &Refusal) {
        if let Some(more) = self.quiet.may() {
            warn!(
                message_id = Said::IdentityRefused.id(),
                gpusession_client = client,
                gpusession_reason = refusal.to_string(),
                "client {client}: call refused: {refusal}{more}"
            );
        }
    }

    /// Notes the outcome of a renewal of the server's certificate.
    pub(super) fn note_renewal(&self, kept: Option<Result<u64, Refused>>) {
        match kept {
            None => {}
            Some(Ok(until)) => info!(
                message_id = Said::IdentityRenewed.id(),
                "the server's certificate: renewed until {}; connections continue",
                day(until)
            ),
            Some(Err(e)) => error!("the server's certificate: not renewed: {e}; trying again in an hour"),
        }
    }

    /// Lists the certificates that end soon or have ended.
    pub fn ending(&self, unix: u64) -> Vec<Ending> {
        let soon = |e: &Ending| {
            let warning = match e.role {
                "authority" => AUTHORITY_WARNING,
                "server" => SERVER_WARNING,
                _ => EXPIRY_WINDOW.as_secs(),
            };
            e.expires_unix <= unix + warning
        };
        self.identities().into_iter().filter(soon).collect()
    }

    /// Returns the end of the server's own certificate, in seconds since 1970.
    pub fn certificate_expires_unix(&self) -> u64 {
        self.certificate.expires_unix()
    }

    /// Returns the end of the authority's certificate, in seconds since 1970.
    pub fn authority_expires_unix(&self) -> u64 {
        self.signer.present().signer().expires_unix()
    }

    /// Lists the certificates of the pool that this server knows, with their ends.
    pub fn identities(&self) -> Vec<Ending> {
        let server = self.facts.config.name.clone();
        let own = [
            Ending { role: "server", name: server, expires_unix: self.certificate.expires_unix() },
            Ending { role: "authority", name: String::new(), expires_unix: self.authority_expires_unix() },
        ];
        let clients = locked(&self.clients).ending(u64::MAX);
        let client = |(name, expires_unix)| Ending { role: "client", name, expires_unix };
        own.into_iter().chain(clients.into_iter().map(client)).collect()
    }
}
