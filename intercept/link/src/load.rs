//! Use of processors by this process and its host, for measurements at both ends.

use gpusession_proto::measure::Usage;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike as _;

use crate::threads::usable_cpus;

/// Returns the counters up to now; the host's are 0 where `/proc/stat` is not readable.
pub fn usage() -> Usage {
    let own = getrusage(UsageWho::RUSAGE_SELF).map(|used| used.user_time() + used.system_time());
    let usage = Usage {
        own_usec: own.map_or(0, |time| time.num_microseconds().try_into().unwrap_or(0)),
        processors: usable_cpus() as u64,
        ..Usage::default()
    };
    usage.with_host(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn work_of_this_process_counts() {
        let (before, begun) = (usage(), Instant::now());
        while usage().own_usec < before.own_usec + 20_000 {}
        let after = usage();
        let own = after.own_since(&before, begun.elapsed().as_micros() as u64);
        assert!(own > 0.0 && own <= after.processors as f64 + 0.5, "{own}");
        assert!(after.total > 0 && after.busy <= after.total);
    }
}
