//! Lease descriptors: closing the last copy releases the lease.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;

use super::shared::Shared;
use crate::handover::Kept;
use crate::leases::Slot;

/// Releases a lease when the last copy of its descriptor is closed.
pub(super) async fn release_at_close(
    shared: Arc<Shared>,
    slot: Slot,
    kept: String,
    mut receiver: pipe::Receiver,
) {
    let mut scrap = [0; 64];
    // Data that is written into the pipe is discarded.
    while matches!(receiver.read(&mut scrap).await, Ok(n) if n > 0) {}
    shared.leases.release(slot, "its requester closed the lease descriptor").await;
    if let Some(store) = shared.store {
        store.remove(&kept);
    }
}

/// Continues to watch the lease descriptors that an earlier daemon stored.
///
/// A lease whose descriptor did not come back is released: its requester's exit would go unnoticed.
pub(super) fn resume(shared: &Arc<Shared>, mut lease_fds: HashMap<String, std::os::fd::OwnedFd>) {
    let snapshot = shared.leases.snapshot().borrow().clone();
    for view in snapshot.lease_facts().filter(|l| l.spec.once && !l.spec.persistent) {
        let key = view.spec.key.clone();
        let receiver = lease_fds.remove(&key).and_then(|fd| pipe::Receiver::from_owned_fd(fd).ok());
        let (shared, slot, kept) = (shared.clone(), view.slot, Kept::LeaseFd { key }.name());
        match receiver {
            Some(receiver) => drop(tokio::spawn(release_at_close(shared, slot, kept, receiver))),
            None => drop(tokio::spawn(async move {
                shared.leases.release(slot, "its requester can no longer be watched").await
            })),
        }
    }
    for key in lease_fds.into_keys() {
        if let Some(store) = shared.store {
            store.remove(&Kept::LeaseFd { key }.name());
        }
    }
}
