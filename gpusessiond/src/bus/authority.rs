//! Who may do what: one place, so that there is one thing to read and one to extend.

use zbus::Connection;
use zbus::fdo::DBusProxy;
use zbus::message::Header;

use super::Shared;
use super::error::{BusError, Result};

/// What a caller wants to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed {
    /// Hold a lease beside the configured ones.
    CreateLease,
    /// The same for another user.
    CreateLeaseForOther,
    /// Use, renew or release a lease of this uid; `u32::MAX` is the machine's own.
    Touch {
        /// Owner of the lease.
        owner: u32,
    },
    /// Everything that concerns all users.
    ManagePool,
}

/// Uid of the caller, as the bus daemon knows it.
pub async fn caller(connection: &Connection, header: &Header<'_>) -> Result<u32> {
    let Some(sender) = header.sender() else {
        return Err(BusError::access_denied("the caller has no name on the bus"));
    };
    let bus = DBusProxy::new(connection).await?;
    bus.get_connection_unix_user(sender.to_owned().into())
        .await
        .map_err(|e| BusError::access_denied(format!("the bus does not know the caller: {e}")))
}

/// Whether `uid` may; first the caller's uid decides, then (where it leaves the question open) [`polkit`].
pub async fn authorise(shared: &Shared, uid: u32, deed: Deed) -> Result<()> {
    if uid == 0 {
        return Ok(());
    }
    match deed {
        Deed::Touch { owner } if owner == uid => Ok(()),
        Deed::CreateLease => {
            let allowed = shared.gate.extra_leases(uid);
            if held(shared, uid) < allowed {
                return polkit(deed, true);
            }
            Err(BusError::access_denied(if allowed == 0 {
                "users of this machine hold no leases of their own ([access] extra_leases = 0)".to_owned()
            } else {
                format!("this user holds {allowed} lease(s) already ([access] extra_leases = {allowed})")
            }))
        }
        _ => polkit(deed, false),
    }
}

/// What polkit would answer. Not asked yet: the packaged defaults decide, which are "yes" to creating a lease and an
/// administrator's password for the rest.
fn polkit(deed: Deed, default: bool) -> Result<()> {
    if default {
        return Ok(());
    }
    Err(BusError::access_denied(match deed {
        Deed::CreateLease | Deed::CreateLeaseForOther => "only root creates leases for other users",
        Deed::Touch { owner: u32::MAX } => "the lease is this machine's: only root renews or releases it",
        Deed::Touch { .. } => "the lease belongs to another user",
        Deed::ManagePool => "only root manages the pool",
    }))
}

/// Leases that a user holds or is about to hold beside the configured ones.
pub fn held(shared: &Shared, uid: u32) -> usize {
    let leases = shared.leases.snapshot();
    let held = leases
        .borrow()
        .leases
        .iter()
        .filter(|l| l.spec.once && l.uid == uid && !l.devices.is_empty())
        .count();
    let creating = shared.creating.lock().unwrap_or_else(|e| e.into_inner());
    held + creating.get(&uid).copied().unwrap_or(0)
}
