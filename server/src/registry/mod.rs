//! The interface to the authority that decides about leases.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gpusession_common::words::Sharing;

use crate::lease::{AllocateError, Gpu, Lease, Passing, Place, Request, Rules, WaitingView, Withdrawn};

pub mod local;

/// A GPU and its use by leases.
#[derive(Debug, Clone)]
pub struct GpuUse {
    /// Facts that the driver reports.
    pub gpu: Gpu,
    /// Device memory promised to leases.
    pub used_bytes: u64,
    /// Ids of the leases on it.
    pub leases: Vec<String>,
    /// Reason if it is withdrawn.
    pub withdrawn: Option<Withdrawn>,
}

impl GpuUse {
    /// Returns the device memory that further leases can get.
    pub fn free_bytes(&self) -> u64 {
        match self.gpu.sharing {
            Sharing::Exclusive if self.used_bytes > 0 => 0,
            _ => self.gpu.offered_bytes().saturating_sub(self.used_bytes),
        }
    }

    /// Returns the state: free, leased, off, off-pending, stopped or broken.
    pub fn state(&self) -> &'static str {
        match (&self.withdrawn, self.leases.is_empty()) {
            (None, true) => "free",
            (None, false) => "leased",
            (Some(Withdrawn::Off(_)), true) => "off",
            (Some(Withdrawn::Off(_)), false) => "off-pending",
            (Some(Withdrawn::Stopped(_)), _) => "stopped",
            (Some(Withdrawn::Broken(_)), _) => "broken",
        }
    }
}

/// A lease with its remaining time.
#[derive(Debug, Clone)]
pub struct Standing {
    /// Copy of the lease.
    pub lease: Lease,
    /// Time until it expires unless renewed.
    pub left: Duration,
}

/// The authority over the GPUs. Every change is stored before it is answered.
#[async_trait]
pub trait Registry: Send + Sync {
    /// Creates a lease over all wanted GPUs, or none.
    ///
    /// Returns the lease with `false` if an earlier call with this request id created it.
    async fn allocate(&self, request: &Request) -> Result<(Lease, bool), AllocateError>;
    /// Renews a client's lease, and returns its time; `None` if the client has no such lease.
    async fn renew(&self, client: &str, id: &str) -> Option<Duration>;
    /// Removes a client's request from the queue, and ends the lease that it has made.
    async fn cancel(&self, client: &str, request_id: &str) -> Option<Lease>;
    /// Ends a lease, with `client` only if that client holds it; `None` if no such lease exists.
    async fn release(&self, client: Option<&str>, id: &str) -> Option<Lease>;
    /// Returns the candidates that have to be lent for a request; empty if that does not help.
    async fn lenders(&self, request: &Request, candidates: &[String]) -> Vec<String>;
    /// Lends the lease's shares until it reacquires them; `false` if no such lease exists.
    async fn lend(&self, id: &str) -> bool;
    /// Returns the candidates that have to be lent so that a lease can reacquire its shares.
    async fn lenders_back(&self, id: &str, may_move: bool, candidates: &[String]) -> Vec<String>;
    /// Reacquires the shares of a lent lease, or returns its place in the queue.
    ///
    /// `Ok(true)`: the shares are on other GPUs, which only happens if it `may_move`.
    async fn reacquire(&self, id: &str, may_move: bool) -> Result<bool, Place>;
    /// Gives up a lent lease's place in the queue.
    async fn cancel_reacquire(&self, id: &str);
    /// Returns `true` if the lease is lent.
    async fn is_lent(&self, id: &str) -> bool;
    /// Ends the leases of a client, except those of the boot `keep_boot`.
    async fn release_client(&self, client: &str, keep_boot: Option<&str>) -> Vec<Lease>;
    /// Ends the leases that have not been renewed in time.
    async fn expire(&self) -> Vec<Lease>;
    /// Returns the time until [`Registry::expire`] may find an expired lease.
    async fn next_expiry(&self) -> Option<Duration>;
    /// Finds a lease by its id.
    async fn get(&self, id: &str) -> Option<Standing>;
    /// Lists all leases.
    async fn leases(&self) -> Vec<Standing>;
    /// Lists leases that cannot be renewed beyond `unix`, in seconds since 1970.
    async fn ending(&self, unix: u64) -> Vec<Lease>;
    /// Lists a client's leases.
    async fn of_client(&self, client: &str) -> Vec<Standing>;
    /// Returns `true` if the lease exists.
    async fn holds(&self, id: &str) -> bool;
    /// Returns the number of leases.
    async fn count(&self) -> usize;
    /// Lists all GPUs.
    async fn gpus(&self) -> Arc<[GpuUse]>;
    /// Lists the queue in the order of service.
    async fn waiting(&self) -> Vec<WaitingView>;
    /// Withdraws a GPU, or restores it with `None`; `false` if no such GPU exists.
    ///
    /// Leases on it stay.
    async fn withdraw(&self, uuid: &str, why: Option<Withdrawn>) -> bool;
    /// Withdraws a GPU in service for a fault that may pass, or with `None` returns a GPU to
    /// service that was withdrawn for it. Returns `true` if this changes the GPU's state.
    async fn withdraw_until_passed(&self, uuid: &str, fault: Passing, why: Option<String>) -> bool;
    /// Notes a GPU's compute mode, which decides on leases that fit together.
    async fn set_compute_mode(&self, uuid: &str, mode: u32);
    /// Stops new leases for a reason, also after a restart; with `None` allows them again.
    ///
    /// # Errors
    /// A text if the change could not be stored, so that it holds only until a restart.
    async fn drain(&self, why: Option<String>) -> Result<(), String>;
    /// Stops new leases until the restart.
    async fn stop(&self);
    /// Returns the reason if new leases are stopped.
    async fn draining(&self) -> Option<String>;
    /// Replaces the reserves and the overcommit.
    async fn set_rules(&self, rules: Rules);
}
