//! Who decides about leases: one contract, several implementations.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::lease::{AllocateError, Gpu, Lease, Place, Request, Rules, Sharing, WaitingView, Withdrawn};

pub mod local;

/// A GPU and how much of it leases hold.
#[derive(Debug, Clone)]
pub struct GpuUse {
    /// The GPU.
    pub gpu: Gpu,
    /// Device memory promised to leases.
    pub used_bytes: u64,
    /// Leases on it.
    pub leases: Vec<String>,
    /// Why it is not leased, if it is not.
    pub withdrawn: Option<Withdrawn>,
}

impl GpuUse {
    /// Device memory that is left for others.
    pub fn free_bytes(&self) -> u64 {
        match self.gpu.sharing {
            Sharing::Exclusive if self.used_bytes > 0 => 0,
            _ => self.gpu.memory_bytes.saturating_sub(self.used_bytes),
        }
    }

    /// free, leased, off, off-pending, stopped, broken.
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

/// A lease with the time it has left.
#[derive(Debug, Clone)]
pub struct Standing {
    /// The lease.
    pub lease: Lease,
    /// Until it ends unless it is renewed.
    pub left: Duration,
}

/// The authority over the GPUs. Every change is stored before it is answered.
#[async_trait]
pub trait Registry: Send + Sync {
    /// Makes a lease over all wanted GPUs or none; `false` beside it where the same request made it earlier.
    async fn allocate(&self, request: &Request) -> Result<(Lease, bool), AllocateError>;
    /// Extends a client's lease; `None` where it has no such lease.
    async fn renew(&self, client: &str, id: &str) -> Option<Duration>;
    /// A client does not wait any more for what it asked for by this request.
    async fn leave_queue(&self, client: &str, request_id: &str);
    /// Ends a lease; with a client only if it is that client's. `None`: there was none.
    async fn release(&self, client: Option<&str>, id: &str) -> Option<Lease>;
    /// Which of these leases have to be set aside for a request; none where that does not help.
    async fn lenders(&self, request: &Request, candidates: &[String]) -> Vec<String>;
    /// A lease gives its parts of GPUs to others until it takes them back. Says whether there is such a lease.
    async fn set_aside(&self, id: &str) -> bool;
    /// The same for a lease that was set aside and wants its parts back.
    async fn lenders_back(&self, id: &str, may_move: bool, candidates: &[String]) -> Vec<String>;
    /// `Ok` once a lease that was set aside has its parts again (`true`: on other GPUs, which it gets only if it `may_move`), else its
    /// place among those that wait for the same.
    async fn take_back(&self, id: &str, may_move: bool) -> Result<bool, Place>;
    /// It does not want them any more.
    async fn stay_aside(&self, id: &str);
    /// Whether a lease holds no part of a GPU now.
    async fn is_aside(&self, id: &str) -> bool;
    /// Ends the leases of a client; with a boot only those of other boots.
    async fn release_client(&self, client: &str, keep_boot: Option<&str>) -> Vec<Lease>;
    /// Ends the leases whose clients were silent for too long.
    async fn expire(&self) -> Vec<Lease>;
    /// How long until [`Registry::expire`] may have something to do.
    async fn next_expiry(&self) -> Option<Duration>;
    /// One lease.
    async fn get(&self, id: &str) -> Option<Standing>;
    /// All leases.
    async fn leases(&self) -> Vec<Standing>;
    /// Those that cannot be renewed beyond a time, in seconds since 1970.
    async fn ending(&self, unix: u64) -> Vec<Lease>;
    /// A client's leases.
    async fn of_client(&self, client: &str) -> Vec<Standing>;
    /// Whether there is such a lease.
    async fn holds(&self, id: &str) -> bool;
    /// How many there are.
    async fn count(&self) -> usize;
    /// All GPUs.
    async fn gpus(&self) -> Arc<[GpuUse]>;
    /// Who waits, in the order in which they are served.
    async fn waiting(&self) -> Vec<WaitingView>;
    /// Takes a GPU out of what is leased, or puts it back; leases on it stay. Says whether there is such a GPU.
    async fn withdraw(&self, uuid: &str, why: Option<Withdrawn>) -> bool;
    /// Makes no new leases, also after a restart, and why; or makes them again. An error says that it holds until a restart only.
    async fn drain(&self, why: Option<String>) -> Result<(), String>;
    /// Makes no new leases until the restart.
    async fn stop(&self);
    /// Why there are no new leases, if there are none.
    async fn draining(&self) -> Option<String>;
    /// Divides the GPUs differently from now on.
    async fn set_rules(&self, rules: Rules);
}
