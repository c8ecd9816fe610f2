//! The control service's errors: refusals, limits and malformed requests as gRPC statuses.

use std::time::Duration;

use gpusession_proto::control as wire;
use prost::Message as _;
use tonic::Status;
use tracing::error;

use super::clients::Refusal;
use crate::limits::Exceeded;
use crate::signer::{Refused, Why};
use crate::store::StoreError;

/// Longest text, in bytes, and longest list in a request.
const MAX_TEXT: usize = 256;
const MAX_LIST: usize = 256;

/// Longest time that a join waits for the clock, in seconds.
const MAX_AHEAD: u64 = 5;

pub(super) fn refused(refusal: Refusal) -> Status {
    let text = refusal.to_string();
    match refusal {
        Refusal::Unknown => Status::unauthenticated(text),
        Refusal::Revoked(_) => Status::permission_denied(text),
        // The client may try again after a moment.
        Refusal::SecondMachine(_) => Status::aborted(text),
        Refusal::Taken(_) => Status::already_exists(text),
        Refusal::Renewed(_) => Status::failed_precondition(text),
        Refusal::NoBoot => Status::invalid_argument(text),
    }
}

/// Builds the status of a refusal by a limit.
pub(super) fn beyond(exceeded: Exceeded) -> Status {
    let details = wire::Refusal {
        kind: wire::refusal::Kind::Limit.into(),
        limit: exceeded.name.into(),
        ..Default::default()
    };
    let text = exceeded.to_string();
    Status::with_details(tonic::Code::FailedPrecondition, text, details.encode_to_vec().into())
}

/// Builds the status of a request that does not fit now, or never does.
pub(super) fn unfit(
    code: tonic::Code,
    text: String,
    kind: wire::refusal::Kind,
    position: u32,
    waiting: u32,
) -> Status {
    let details = wire::Refusal { kind: kind.into(), position, waiting, ..Default::default() };
    Status::with_details(code, text, details.encode_to_vec().into())
}

/// Builds the status of a certificate that the signer did not sign; `what` is for the journal.
pub(super) fn unsigned(what: &str, refused: &Refused) -> Status {
    let text = refused.to_string();
    match refused.why {
        Why::Request => Status::invalid_argument(text),
        Why::Token => Status::permission_denied(text),
        Why::Busy | Why::Issuers => Status::unavailable(text),
        Why::NoIssuer => Status::failed_precondition(text),
        Why::Missing | Why::Exists | Why::Phase | Why::Import | Why::Right | Why::Failed | Why::Away => {
            error!("{what}: {text}");
            Status::internal("the server could not issue a certificate; see its journal")
        }
    }
}

pub(super) fn stored(e: StoreError) -> Status {
    error!("{e}");
    Status::internal("the server could not store the change; see its journal")
}

pub(super) fn bounded<'a>(
    texts: impl IntoIterator<Item = &'a String>,
    lists: &[usize],
) -> Result<(), Status> {
    if texts.into_iter().any(|t| t.len() > MAX_TEXT || t.chars().any(char::is_control)) {
        return Err(Status::invalid_argument(format!(
            "a text of the request is longer than {MAX_TEXT} bytes, or has control characters"
        )));
    }
    if lists.iter().any(|n| *n > MAX_LIST) {
        return Err(Status::invalid_argument(format!(
            "a list of the request has more than {MAX_LIST} entries"
        )));
    }
    Ok(())
}

/// Waits until certificates of a name count that was taken back a moment ago.
///
/// Certificates of the second of a revocation, by the clock of its server, are void.
pub(super) async fn settled(what: &str, ahead: u64) -> Result<(), Status> {
    if ahead > MAX_AHEAD {
        return Err(Status::unavailable(format!(
            "{what} at a time that this server's clock reaches in {ahead} s: set the clocks of the pool's servers, then try again"
        )));
    }
    tokio::time::sleep(Duration::from_secs(ahead)).await;
    Ok(())
}
