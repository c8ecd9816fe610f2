//! The call by which a client renews its certificate.

use std::sync::Arc;

use gpusession_proto::control as wire;
use gpusession_proto::journal::Event as Said;
use tonic::{Request, Response, Status};
use tracing::info;

use crate::audit;
use crate::certificate::day;
use crate::pool::authenticate::{Peer, peer};
use crate::pool::clients::Dated;
use crate::pool::status::{refused, stored, unsigned};
use crate::pool::{Pool, locked};
use crate::signer::Operation;

/// Most renewals of one client in a second: each costs a signature and a write to disk.
const MAX_RENEWALS_PER_S: u64 = 4;

pub(super) async fn renew(
    pool: &Arc<Pool>,
    request: Request<wire::RenewIdentityRequest>,
) -> Result<Response<wire::RenewIdentityReply>, Status> {
    let (client, present) = pool.renewing(&request).await?;
    let (present, der) = (present.fingerprint, present.der.clone());
    let from = peer(&request).and_then(Peer::remote).map(|p| p.ip().to_canonical().to_string());
    pool.may_change().await.map_err(Status::unavailable)?;
    if !locked(&pool.rates).allow(&format!("{client} renewals"), MAX_RENEWALS_PER_S, pool.clock.now()) {
        return Err(Status::resource_exhausted("too many renewals of this client; try again later"));
    }
    let wire::RenewIdentityRequest { csr_pem, proof } = request.into_inner();
    let (pem, expires_unix, identity) = {
        let _signing = pool.signing.lock().await;
        let authority = {
            let clients = locked(&pool.clients);
            clients.may_renew(&client, &present).map_err(refused)?;
            let all = pool.signer.present();
            all.signer_for(|authority| clients.knows(&client, authority)).fingerprint()
        };
        let order = match proof.is_empty() {
            true => Operation::Renew { present: der, csr_pem, authority },
            false => Operation::RenewProven { present: der, csr_pem, authority, proof },
        };
        let issued = pool.signer.aside(move |signer| signer.link().sign(order)).await;
        let issued = issued.map_err(|e| unsigned(&format!("renewal of {client}"), &e))?;
        let mut clients = locked(&pool.clients);
        // An administrator may have revoked the client meanwhile.
        let identity = clients.may_renew(&client, &present).map_err(refused)?;
        clients.renew(&client, Dated::new(&issued.fingerprint, pool.clock.unix(), issued.expires_unix));
        pool.client_file.changed();
        (issued.pem, issued.expires_unix, identity)
    };
    pool.store_clients().await.map_err(stored)?;
    let event = audit::Event {
        actor: format!("client {client}"),
        from: from.unwrap_or_default(),
        client: client.clone(),
        identity: data_encoding::HEXLOWER.encode(&identity),
        detail: format!("until {}", day(expires_unix)),
        ..audit::own("identity-renewed")
    };
    pool.audited(event).await.map_err(Status::unavailable)?;
    info!(
        message_id = Said::IdentityRenewed.id(),
        gpusession_client = client,
        "client {client}: certificate renewed until {}",
        day(expires_unix)
    );
    Ok(Response::new(wire::RenewIdentityReply { certificate_pem: pem }))
}
