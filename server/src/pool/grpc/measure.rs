//! The call that starts a measurement of the network.

use std::sync::Arc;

use gpusession_proto::control as wire;
use gpusession_proto::measure::MAX_SECONDS;
use tonic::{Code, Request, Response, Status};

use crate::certificate::Role;
use crate::netperf::NoMeasurement;
use crate::pool::authenticate::{Peer, peer};
use crate::pool::status::unfit;
use crate::pool::{Pool, run_detached};

pub(super) async fn measure(
    pool: &Arc<Pool>,
    request: Request<wire::MeasureRequest>,
) -> Result<Response<wire::MeasureReply>, Status> {
    let shown = peer(&request).and_then(Peer::certificate).and_then(|c| c.holder.as_ref());
    let administrator = shown.is_some_and(|holder| holder.role == Role::Administrator);
    let who = match administrator {
        true => format!("administrator {}", pool.administrator(&request).await?),
        false => pool.client(&request).await?,
    };
    let allowed = pool.config().netperf.clone();
    if allowed == "off" || allowed == "admins" && !administrator {
        let whom = if allowed == "off" { "nothing" } else { "only for administrators" };
        let text = format!("netperf = {allowed:?} in gpuserver.toml: this server measures {whom}");
        return Err(unfit(Code::PermissionDenied, text, wire::refusal::Kind::Limit, 0, 0));
    }
    let (remote, local) = match peer(&request) {
        Some(peer) => (peer.remote(), peer.local()),
        None => (None, None),
    };
    let clear = remote.is_some_and(|peer| pool.facts.config.may_be_clear(peer.ip()));
    let seconds = request.into_inner().seconds;
    if !(1..=MAX_SECONDS).contains(&seconds) {
        return Err(Status::invalid_argument(format!("a measurement lasts 1 to {MAX_SECONDS} s")));
    }
    let endpoints = pool.endpoints.clone();
    let begun = run_detached(async move { endpoints.begin(&who, seconds, !clear).await }).await?;
    let endpoint = begun.map_err(|e| {
        let text = e.to_string();
        match e {
            NoMeasurement::Again(_) | NoMeasurement::Full => {
                unfit(Code::ResourceExhausted, text, wire::refusal::Kind::NoCapacity, 0, 0)
            }
            NoMeasurement::Failed(_) => Status::unavailable(text),
        }
    })?;
    Ok(Response::new(wire::MeasureReply {
        endpoint: Some(wire::Worker { id: endpoint.id.to_vec(), fingerprint: endpoint.fingerprint.to_vec() }),
        key: endpoint.key.to_vec(),
        server: pool.facts.config.name.clone(),
        data_addresses: pool.data_addresses(local),
        clear,
    }))
}
