//! Who may do what: one place, so that there is one thing to read and one to extend.
//!
//! The caller's uid decides first. What it leaves open is polkit's to say, with the caller's name on the bus as subject
//! and a password dialog only where the message allows one. Where no polkit runs, the packaged defaults hold.

use std::collections::HashMap;
use std::sync::Arc;

use tracing::debug;
use zbus::Connection;
use zbus::fdo::DBusProxy;
use zbus::message::{Flags, Header};
use zbus_polkit::policykit1::{AuthorityProxy, CheckAuthorizationFlags, Subject};

use super::Shared;
use super::error::{BusError, Result};

/// Calls of one user that are worked on at the same time; root may have more, to see what is wrong. The bus has a limit of
/// its own for each connection, 128 in most configurations.
const CALLS: usize = 16;
const CALLS_OF_ROOT: usize = 64;

/// What a caller wants to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deed {
    /// Hold a lease beside the configured ones.
    CreateLease,
    /// The same for another user, or in another user's session.
    CreateLeaseForOther,
    /// Use, renew or release a lease of this uid; `u32::MAX` is the machine's own.
    Touch {
        /// Owner of the lease.
        owner: u32,
    },
    /// Everything that concerns all users.
    ManagePool,
}

impl Deed {
    /// Polkit's name for it, what the packaged policy says of it, and the words of a refusal.
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
            Self::ManagePool => {
                ("org.gpusession1.manage-pool", false, "only an administrator manages the pool")
            }
        }
    }
}

/// A call that is being worked on.
pub struct Call<'a> {
    /// Who calls.
    pub uid: u32,
    shared: Arc<Shared>,
    connection: &'a Connection,
    header: &'a Header<'a>,
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let mut calls = self.shared.calls.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(count) = calls.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                calls.remove(&self.uid);
            }
        }
    }
}

/// What polkit says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Yes,
    /// After authentication.
    Challenge,
    No,
}

impl<'a> Call<'a> {
    /// Takes up a call: its uid is what the bus daemon says, and one user cannot have too many.
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
        let most = if uid == 0 { CALLS_OF_ROOT } else { CALLS };
        {
            let mut calls = shared.calls.lock().unwrap_or_else(|e| e.into_inner());
            let count = calls.entry(uid).or_default();
            if *count >= most {
                return Err(BusError::limits_exceeded(format!(
                    "uid {uid} has {most} calls under way already: wait for their answers"
                )));
            }
            *count += 1;
        }
        Ok(Self { uid, shared: shared.clone(), connection, header })
    }

    /// Whether the caller may.
    pub async fn may(&self, deed: Deed) -> Result<()> {
        let interactive = self.header.primary().flags().contains(Flags::ALLOW_INTERACTIVE_AUTH);
        match self.judge(deed, interactive).await? {
            Verdict::Yes => Ok(()),
            Verdict::Challenge | Verdict::No => Err(BusError::access_denied(deed.policy().2)),
        }
    }

    /// Whether the caller may, after authentication if need be: `yes`, `challenge` or `no`.
    pub async fn could(&self, deed: Deed) -> &'static str {
        match self.judge(deed, false).await {
            Ok(Verdict::Yes) => "yes",
            Ok(Verdict::Challenge) => "challenge",
            Ok(Verdict::No) | Err(_) => "no",
        }
    }

    async fn judge(&self, deed: Deed, interactive: bool) -> Result<Verdict> {
        if self.uid == 0 {
            return Ok(Verdict::Yes);
        }
        match deed {
            Deed::Touch { owner } if owner == self.uid => return Ok(Verdict::Yes),
            Deed::CreateLease => {
                let allowed = self.shared.settings.gate().extra_leases(self.uid);
                if held(&self.shared, self.uid) >= allowed {
                    return Err(BusError::access_denied(if allowed == 0 {
                        "users of this machine hold no leases of their own ([access] extra_leases = 0)"
                            .to_owned()
                    } else {
                        format!(
                            "this user holds {allowed} lease(s) already ([access] extra_leases = {allowed})"
                        )
                    }));
                }
            }
            _ => {}
        }
        let (action, default, _) = deed.policy();
        match self.polkit(action, interactive).await {
            Ok(verdict) => Ok(verdict),
            Err(error) => {
                debug!("polkit does not answer, the packaged default of {action} holds: {error}");
                Ok(if default { Verdict::Yes } else { Verdict::No })
            }
        }
    }

    async fn polkit(&self, action: &str, interactive: bool) -> std::result::Result<Verdict, String> {
        let authority = AuthorityProxy::builder(self.connection)
            .cache_properties(zbus::proxy::CacheProperties::No)
            .build()
            .await
            .map_err(|e| e.to_string())?;
        let subject = Subject::new_for_message_header(self.header).map_err(|e| e.to_string())?;
        let flags = if interactive {
            CheckAuthorizationFlags::ALLOW_USER_INTERACTION
        } else {
            CheckAuthorizationFlags::empty()
        };
        let result = authority
            .check_authorization(&subject, action, &HashMap::new(), flags, "")
            .await
            .map_err(|e| e.to_string())?;
        Ok(match (result.is_authorized, result.is_challenge) {
            (true, _) => Verdict::Yes,
            (false, true) => Verdict::Challenge,
            (false, false) => Verdict::No,
        })
    }
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
