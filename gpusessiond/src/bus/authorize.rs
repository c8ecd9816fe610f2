//! Authorization of D-Bus calls, and their limits.
//!
//! The caller's uid decides first; polkit decides the rest, with the caller's bus name as subject.
//! A password dialog appears only if the message allows one.
//!
//! On a host without polkit the packaged defaults apply. A polkit that fails to decide allows
//! nothing.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::time::Instant;
use tracing::{debug, warn};
use zbus::Connection;
use zbus::DBusError as _;
use zbus::fdo::DBusProxy;
use zbus::message::{Flags, Header};
use zbus_polkit::policykit1::{AuthorityProxy, CheckAuthorizationFlags, Subject};

use super::error::{BusError, Result};
use super::shared::{Shared, UnderWay};
use crate::leases::LeaseFacts;

/// Most concurrent calls of one user; root has more, to diagnose problems.
///
/// The bus has its own limit per connection, 128 in most configurations.
const MAX_CALLS: usize = 16;
const MAX_CALLS_OF_ROOT: usize = 64;

/// Errors of the bus, and of systemd on its behalf, that mean that this host has no polkit.
const NO_POLKIT: [&str; 5] = [
    "org.freedesktop.DBus.Error.ServiceUnknown",
    "org.freedesktop.DBus.Error.NameHasNoOwner",
    "org.freedesktop.DBus.Error.Spawn.ServiceNotFound",
    "org.freedesktop.systemd1.NoSuchUnit",
    "org.freedesktop.systemd1.UnitMasked",
];

/// An action that needs permission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed {
    /// Hold a lease in addition to the configured ones.
    CreateLease,
    /// Hold a lease for another user, or in another user's session.
    CreateLeaseForOther,
    /// Use, renew or release a lease of this uid; `u32::MAX` stands for the client's own leases.
    Touch {
        /// Uid of the lease's owner.
        owner: u32,
    },
    /// Measure the network to a server.
    Measure,
    /// Change settings that concern all users.
    ManagePool,
}

impl Deed {
    /// Returns polkit's action id, the packaged default, and the error text of a refusal.
    fn policy(self) -> (&'static str, bool, &'static str) {
        match self {
            Self::CreateLease => {
                ("org.gpusession1.create-lease", true, "polkit does not let this user create leases")
            }
            Self::CreateLeaseForOther => (
                "org.gpusession1.create-lease-for-other",
                false,
                "only an administrator creates leases for other users",
            ),
            Self::Touch { owner: u32::MAX } => (
                "org.gpusession1.release-other",
                false,
                "the lease is this machine's: only an administrator renews or releases it",
            ),
            Self::Touch { .. } => {
                ("org.gpusession1.release-other", false, "the lease belongs to another user")
            }
            Self::Measure => {
                ("org.gpusession1.measure", true, "polkit does not let this user measure the network")
            }
            Self::ManagePool => {
                ("org.gpusession1.manage-pool", false, "only an administrator manages the pool")
            }
        }
    }
}

/// A call in progress; dropping it frees the caller's place.
pub struct Call<'a> {
    /// Uid of the caller.
    pub uid: u32,
    /// Uid of the user whose limits count.
    user: u32,
    shared: Arc<Shared>,
    connection: &'a Connection,
    header: &'a Header<'a>,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let mut calls = self.shared.calls.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(count) = calls.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                calls.remove(&self.user);
            }
        }
    }
}

/// Answer of polkit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Yes,
    /// Allowed after authentication.
    Challenge,
    No,
}

impl<'a> Call<'a> {
    /// Starts a call: asks the bus daemon for the caller's uid, and enforces the limit per user.
    pub async fn begin(
        shared: &Arc<Shared>,
        connection: &'a Connection,
        header: &'a Header<'a>,
    ) -> Result<Self> {
        let Some(sender) = header.sender() else {
            return Err(BusError::access_denied("the caller has no name on the bus"));
        };
        let bus = DBusProxy::new(connection).await?;
        let uid = bus
            .get_connection_unix_user(sender.to_owned().into())
            .await
            .map_err(|e| BusError::access_denied(format!("the bus does not know the caller: {e}")))?;
        let user = shared.settings.gate().account(uid);
        let most = if uid == 0 { MAX_CALLS_OF_ROOT } else { MAX_CALLS };
        {
            let mut calls = shared.calls.lock().unwrap_or_else(|e| e.into_inner());
            let count = calls.entry(user).or_default();
            if *count >= most {
                return Err(BusError::limits_exceeded(format!(
                    "uid {user} has {most} calls under way already: wait for their answers"
                )));
            }
            *count += 1;
        }
        Ok(Self { uid, user, shared: shared.clone(), connection, header })
    }

    /// Waits for the caller's turn to ask servers.
    ///
    /// A user's loop thus leaves the client's rate at the servers to programs and other users.
    pub async fn turn(&self) {
        let wait = self.shared.turns.take(self.user, Instant::now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }

    /// Returns `false` if the caller has left the bus; `true` also if the bus cannot tell.
    pub async fn is_present(&self) -> bool {
        let asked = async {
            let sender = self.header.sender()?.to_owned();
            DBusProxy::new(self.connection).await.ok()?.name_has_owner(sender.into()).await.ok()
        };
        asked.await != Some(false)
    }

    /// Succeeds if the caller may do this.
    pub async fn may(&self, deed: Deed) -> Result<()> {
        let interactive = self.header.primary().flags().contains(Flags::ALLOW_INTERACTIVE_AUTH);
        match self.judge(deed, interactive).await? {
            Verdict::Yes => Ok(()),
            Verdict::Challenge | Verdict::No => Err(BusError::access_denied(deed.policy().2)),
        }
    }

    /// Returns `yes`, `challenge` (after authentication) or `no`.
    pub async fn could(&self, deed: Deed) -> &'static str {
        match self.judge(deed, false).await {
            Ok(Verdict::Yes) => "yes",
            Ok(Verdict::Challenge) => "challenge",
            Ok(Verdict::No) | Err(_) => "no",
        }
    }

    async fn judge(&self, deed: Deed, interactive: bool) -> Result<Verdict> {
        if self.uid == 0 || matches!(deed, Deed::Touch { owner } if owner == self.uid) {
            return Ok(Verdict::Yes);
        }
        let (action, default, _) = deed.policy();
        let answer = self.polkit(action, interactive).await;
        let mut said = self.shared.polkit_trouble.lock().unwrap_or_else(|e| e.into_inner());
        match answer {
            Ok(verdict) => {
                said.clear();
                Ok(verdict)
            }
            Err(error) if says_no_polkit(&error) => {
                debug!("polkit: not on this host: {error}; the packaged default of {action} applies");
                Ok(if default { Verdict::Yes } else { Verdict::No })
            }
            Err(error) => {
                let trouble = format!("polkit does not decide on {action}: {error}");
                // Each reason is logged once, however often it occurs.
                if *said != trouble {
                    warn!(
                        gpusession_reason = trouble,
                        "{trouble}; the daemon allows it to root only; see `journalctl -u polkit`"
                    );
                    said.clone_from(&trouble);
                }
                Err(BusError::access_denied(trouble))
            }
        }
    }

    async fn polkit(&self, action: &str, interactive: bool) -> zbus::Result<Verdict> {
        let authority = AuthorityProxy::builder(self.connection)
            .cache_properties(zbus::proxy::CacheProperties::No)
            .build()
            .await?;
        let subject = Subject::new_for_message_header(self.header)
            .map_err(|e| zbus::Error::from(zbus::fdo::Error::Failed(e.to_string())))?;
        let flags = if interactive {
            CheckAuthorizationFlags::ALLOW_USER_INTERACTION
        } else {
            CheckAuthorizationFlags::empty()
        };
        let result = authority.check_authorization(&subject, action, &HashMap::new(), flags, "").await?;
        Ok(match (result.is_authorized, result.is_challenge) {
            (true, _) => Verdict::Yes,
            (false, true) => Verdict::Challenge,
            (false, false) => Verdict::No,
        })
    }
}

fn says_no_polkit(error: &zbus::Error) -> bool {
    match error {
        zbus::Error::MethodError(name, ..) => NO_POLKIT.contains(&name.as_str()),
        zbus::Error::FDO(error) => NO_POLKIT.contains(&error.name().as_str()),
        _ => false,
    }
}

/// A lease being created; counts against its owner until dropped, when it exists or was refused.
///
/// A subordinate uid counts as its owner.
pub struct Creating<'a> {
    shared: &'a Shared,
    owner: u32,
    persistent: bool,
}

/// Most persistent leases of one user.
const MAX_PERSISTENT: usize = 2;

impl<'a> Creating<'a> {
    /// Reserves one of the additional leases that a user may hold.
    ///
    /// Only root may exceed `extra_leases`.
    pub fn begin(shared: &'a Shared, caller: u32, owner: u32, persistent: bool) -> Result<Self> {
        let owner = shared.settings.gate().account(owner);
        let mut creating = shared.creating.lock().unwrap_or_else(|e| e.into_inner());
        let under_way = creating.entry(owner).or_default();
        let allowed = may_hold_more(shared, caller, owner, under_way.all).and_then(|()| {
            let leases = shared.leases.snapshot();
            let held = |l: &&LeaseFacts| {
                belongs(shared, l, owner) && l.spec.persistent && !l.reported.devices.is_empty()
            };
            let held = leases.borrow().lease_facts().filter(held).count();
            if persistent && caller != 0 && held + under_way.persistent >= MAX_PERSISTENT {
                return Err(BusError::quota_exceeded(format!(
                    "uid {owner} holds {MAX_PERSISTENT} persistent leases already: release one"
                )));
            }
            Ok(())
        });
        if allowed.is_ok() {
            under_way.all += 1;
            under_way.persistent += usize::from(persistent);
        } else if *under_way == UnderWay::default() {
            creating.remove(&owner);
        }
        allowed.map(|()| Self { shared, owner, persistent })
    }

    /// Returns `true` if [`Creating::begin`] would succeed for a lease that is not persistent.
    pub fn could(shared: &Shared, caller: u32, owner: u32) -> bool {
        let owner = shared.settings.gate().account(owner);
        let creating = shared.creating.lock().unwrap_or_else(|e| e.into_inner());
        may_hold_more(shared, caller, owner, creating.get(&owner).map_or(0, |u| u.all)).is_ok()
    }
}

/// Returns `true` if a lease counts against the limits of a user.
fn belongs(shared: &Shared, lease: &LeaseFacts, user: u32) -> bool {
    shared.settings.gate().account(lease.uid) == user
}

fn may_hold_more(shared: &Shared, caller: u32, owner: u32, under_way: usize) -> Result<()> {
    let allowed = shared.settings.gate().extra_leases(owner);
    let leases = shared.leases.snapshot();
    let held = |l: &&LeaseFacts| l.spec.once && belongs(shared, l, owner) && !l.reported.devices.is_empty();
    if caller == 0 || leases.borrow().lease_facts().filter(held).count() + under_way < allowed {
        return Ok(());
    }
    Err(if allowed == 0 {
        BusError::access_denied(
            "users of this machine hold no leases of their own ([access] extra_leases = 0)",
        )
    } else {
        BusError::quota_exceeded(format!(
            "uid {owner} holds {allowed} lease(s) already ([access] extra_leases = {allowed})"
        ))
    })
}

impl Drop for Creating<'_> {
    fn drop(&mut self) {
        let mut creating = self.shared.creating.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(under_way) = creating.get_mut(&self.owner) {
            under_way.all -= 1;
            under_way.persistent -= usize::from(self.persistent);
            if under_way.all == 0 {
                creating.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Returns the deed after another one; the compiler demands an arm for each.
    fn after(deed: Deed) -> Option<Deed> {
        match deed {
            Deed::CreateLease => Some(Deed::CreateLeaseForOther),
            Deed::CreateLeaseForOther => Some(Deed::Touch { owner: 1000 }),
            Deed::Touch { owner: u32::MAX } => Some(Deed::Measure),
            Deed::Touch { .. } => Some(Deed::Touch { owner: u32::MAX }),
            Deed::Measure => Some(Deed::ManagePool),
            Deed::ManagePool => None,
        }
    }

    #[test]
    fn each_deed_has_a_polkit_action_with_its_default() {
        let file = include_str!("../../../units/polkit-1/actions/org.gpusession1.policy");
        let actions: BTreeMap<&str, bool> = file
            .split("<action id=\"")
            .skip(1)
            .filter_map(|action| {
                Some((action.split_once('"')?.0, action.contains("<allow_any>yes</allow_any>")))
            })
            .collect();
        let deeds = std::iter::successors(Some(Deed::CreateLease), |deed| after(*deed));
        let asked: BTreeMap<&str, bool> = deeds
            .map(|deed| {
                let (action, default, _) = deed.policy();
                (action, default)
            })
            .collect();
        assert_eq!(actions, asked);
    }

    /// Starts of the names of methods for any caller: they read, or ask a server at once.
    const FOR_ALL: [&str; 6] = ["can_", "describe", "get_", "list_", "ping", "reconnect"];

    #[test]
    fn each_method_that_changes_something_asks_whether_the_caller_may() {
        let mut found = 0;
        for file in [
            include_str!("manager.rs"),
            include_str!("lease.rs"),
            include_str!("device.rs"),
            include_str!("server.rs"),
        ] {
            let (_, objects) = file.split_once("#[interface(").unwrap();
            let (methods, _) = objects.split_once("\n}\n").unwrap();
            for method in methods.split("    async fn ").skip(1) {
                let (name, body) = method.split_once('(').unwrap();
                let (counted, asked) = (body.contains("Call::begin("), body.contains(".may("));
                let touches = body.contains("touch(");
                assert!(counted || touches, "{name} begins no Call");
                let for_all = FOR_ALL.iter().any(|start| name.starts_with(start));
                assert!(for_all || asked || touches, "{name} asks for no Deed");
                found += 1;
            }
        }
        assert!(found > 20, "{found}");
    }
}
