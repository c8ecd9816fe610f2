//! The open watch of a client: events about its leases, and its presence.

use std::sync::Arc;

use gpusession_proto::control as wire;
use tonic::{Request, Response, Status};

use crate::pool::status::bounded;
use crate::pool::watch::{Events, MAX_WATCHES, workers_ready};
use crate::pool::{Pool, locked};

pub(super) async fn watch(
    pool: &Arc<Pool>,
    request: Request<wire::WatchRequest>,
) -> Result<Response<Events<Watching>>, Status> {
    let pool = pool.clone();
    let client = pool.client(&request).await?;
    let boot_id = request.into_inner().boot_id;
    bounded([&boot_id], &[])?;
    // Opened before its presence takes effect, so that no event is missed.
    let queue = pool.watches.begin(&client).ok_or_else(|| {
        Status::resource_exhausted(format!("this client has {MAX_WATCHES} watches open: end one of them"))
    })?;
    pool.present(&client, &boot_id, "").await?;
    let watching = Watching::begin(pool.clone(), client.clone());
    let leases = pool.registry.of_client(&client).await.into_iter().map(|s| s.lease.id);
    let first = leases.filter_map(|lease| {
        let stock = pool.supervisor.ready(&lease);
        (stock > 0).then(|| workers_ready(lease, stock, None))
    });
    Ok(Response::new(Events::new(first.collect(), queue, watching)))
}

/// Presence of a client while its watch is open.
pub struct Watching(Arc<Pool>, String);

impl Watching {
    fn begin(pool: Arc<Pool>, client: String) -> Self {
        locked(&pool.clients).watch_began(&client);
        Self(pool, client)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        locked(&self.0.clients).watch_ended(&self.1);
    }
}
