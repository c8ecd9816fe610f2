//! Applies the measures of the leases' idle clocks, and lends unused leases to waiting requests.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use gpusession_common::units::show_duration;
use gpusession_common::words::OnIdle;
use gpusession_proto::control::pool_event::Event;
use gpusession_proto::control::{self as wire, PoolEvent};
use tracing::info;

use super::Pool;
use super::parking::ParkError;
use crate::idle::{self, Act, Next, Seen, Timeouts};
use crate::lease::{AllocateError, Lease, Request};

impl Pool {
    /// Returns the times of measures against a lease, from the server's limits and its own request.
    pub fn timeouts(&self, lease: &Lease) -> Timeouts {
        let limits = self.limits_of(&lease.client, &lease.user).idle();
        let mut limits = limits.asked(lease.on_idle, lease.hold).within(lease.idle_timeout);
        if lease.mps
            || self.parking().never(&lease.id).is_some()
            || self.supervisor().shares_memory(&lease.id)
        {
            limits.park = Duration::ZERO;
        }
        limits.warned_in_time()
    }

    /// Returns the times of measures against a client's leases without a request of their own.
    pub fn default_timeouts(&self, client: &str) -> Timeouts {
        self.limits_of(client, "").idle().warned_in_time()
    }

    /// Records that a lease's owner reports it idle, or no longer; returns the lease's state.
    ///
    /// The report has no effect while the GPUs are lent or parked.
    pub fn hint_idle(&self, client: &str, lease: &str, idle: bool) -> &'static str {
        let since = (idle && self.parking().state(lease).is_none()).then(|| self.now());
        self.parking().clock(lease, |clock| clock.set_hint(since));
        let (state, _) = self.lease_state(lease);
        self.tell_state(client, lease, state, if idle { "its owner calls it idle" } else { "" });
        state
    }

    /// Returns the time since a lease last had GPU work.
    ///
    /// Without programs it is the time since the last one exited, or the lease began.
    pub fn idle_for(&self, lease: &str) -> Duration {
        self.seen(lease).map_or(Duration::ZERO, |seen| self.now().saturating_sub(seen.active))
    }

    fn seen(&self, lease: &str) -> Option<Seen> {
        let (processes, active) = self.supervisor().activity(lease);
        let hint = self.parking().clock(lease, |clock| clock.hint());
        Some(Seen { processes, active: active?, away: self.parking().state(lease).is_some(), hint })
    }

    /// Applies the measures that are due now.
    pub async fn tick_idle(self: &Arc<Self>) {
        let now = self.now();
        let standing = self.registry().leases().await;
        let there: HashSet<&str> = standing.iter().map(|s| s.lease.id.as_str()).collect();
        self.parking().keep_clocks(|lease| there.contains(lease.as_str()));
        for lease in standing.into_iter().map(|s| s.lease) {
            let Some(seen) = self.seen(&lease.id) else { continue };
            if seen.processes == 0 {
                self.parking().may_again(&lease.id);
            }
            let limits = self.timeouts(&lease);
            let act = self.parking().clock(&lease.id, |clock| clock.tick(seen, &limits, now));
            let idle = now.saturating_sub(seen.active);
            let mut rest = format!("no GPU work for {}", show_duration(Duration::from_secs(idle.as_secs())));
            match act {
                None => {}
                Some(Act::Warn { next, left }) => self.warn_idle(&lease, next, left, &rest),
                Some(Act::Release) => {
                    self.end_lease(
                        &lease.id,
                        &format!(
                            "{rest} ({})",
                            match lease.on_idle {
                                Some(OnIdle::Release) => "on_idle = \"release\"",
                                _ => "release_after",
                            }
                        ),
                    )
                    .await;
                }
                Some(Act::Park) => {
                    if seen.rest(now) > idle {
                        rest = "its owner calls it idle".into();
                    }
                    let pool = self.clone();
                    tokio::spawn(async move {
                        match pool.park(&lease.id, &rest).await {
                            Ok(()) | Err(ParkError::Away(_) | ParkError::NoLease) => {}
                            Err(e) => {
                                pool.parking().clock(&lease.id, |clock| clock.failed(pool.now()));
                                info!(
                                    gpusession_lease = lease.id,
                                    "lease {}: idle, but not parked: {e}", lease.id
                                );
                            }
                        }
                    });
                }
            }
        }
    }

    fn warn_idle(&self, lease: &Lease, next: Option<Next>, left: Duration, rest: &str) {
        // The client's daemon adds the time.
        let reason = match next {
            Some(Next::Park) => format!(
                "{rest}: its programs' device memory will be moved to the server's; they continue at their next call"
            ),
            Some(Next::Release) => {
                format!("{rest}: the lease will end, and its programs lose their GPUs")
            }
            None => format!("{rest}: others may be waiting for its GPUs"),
        };
        info!(
            message_id = gpusession_proto::journal::Event::LeaseIdle.id(),
            gpusession_lease = lease.id,
            gpusession_client = lease.client,
            gpusession_reason = reason,
            "lease {} of {}: {reason}",
            lease.id,
            lease.client
        );
        let left_usec = u64::try_from(left.as_micros()).unwrap_or(u64::MAX);
        let warning = Event::PrepareForLoss(wire::Warning { left_usec, reason, idle: true });
        self.notify(&lease.client, PoolEvent { lease: lease.id.clone(), event: Some(warning) });
    }

    /// Lists leases that may be lent, the one unused for longest first.
    async fn unused(&self) -> Vec<String> {
        let now = self.now();
        let all = self.registry().leases().await.into_iter().map(|s| s.lease);
        let mut unused: Vec<_> = all
            .filter_map(|lease| Some((self.seen(&lease.id)?, lease)))
            .filter(|(seen, lease)| idle::may_be_lent(*seen, &self.timeouts(lease), now))
            .map(|(seen, lease)| (seen.active, lease.id))
            .collect();
        unused.sort();
        unused.into_iter().map(|(_, lease)| lease).collect()
    }

    /// Creates a lease. Where unused leases hold the GPUs, they lend them.
    pub async fn allocate(&self, request: &Request) -> Result<(Lease, bool), AllocateError> {
        let refused = match self.registry().allocate(request).await {
            Err(e @ AllocateError::NoCapacity { .. }) => e,
            other => return other,
        };
        let lenders = self.registry().lenders(request, &self.unused().await).await;
        if lenders.is_empty() {
            return Err(refused);
        }
        for lender in lenders {
            // A lease that is in use again is not lent; then the request finds no room, as before.
            let _ = self.lend(&lender, &format!("unused, and {} waits", request.client)).await;
        }
        self.registry().allocate(request).await
    }

    /// Lets unused leases lend their GPUs to a lease that waits for its own, or for others of their
    /// kind.
    pub async fn lend_to(&self, lease: &str) {
        let Some(wants) = self.registry().get(lease).await else { return };
        let may_move = self.parking().may_move(lease);
        for lender in self.registry().lenders_back(lease, may_move, &self.unused().await).await {
            let _ = self.lend(&lender, &format!("unused, and {} waits", wants.lease.client)).await;
        }
    }
}
