//! Sums of use: leased GPU time, work, bytes and waits, by hour, client and user.

use std::collections::BTreeMap;

use gpusession_common::usage::UsageSums;
use serde::{Deserialize, Serialize};

/// Owner of use that belongs to no user, as a lease of a whole machine.
pub const MACHINE: u64 = 0;
/// Owner of the use of all users beyond [`MAX_OWNERS`].
pub const OTHERS: u64 = u64::MAX;
/// Most owners of one client in an hour: a client names its users as it likes.
pub const MAX_OWNERS: usize = 256;
const HOUR: u64 = 3600;

/// Returns the owner of a user's use.
pub fn owner(uid: u32) -> u64 {
    u64::from(uid) + 1
}

/// Returns the user id of an owner; `None` for [`MACHINE`] and [`OTHERS`].
pub fn uid(owner: u64) -> Option<u32> {
    owner.checked_sub(1).and_then(|uid| uid.try_into().ok())
}

/// Returns the hour of a time in seconds since 1970.
pub fn hour(unix: u64) -> u64 {
    unix / HOUR
}

/// Divides a span of time, in seconds since 1970, among its hours: hour and seconds.
pub fn hours(from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> {
    (hour(from)..=hour(to)).map(move |hour| {
        let (begin, end) = (hour * HOUR, (hour + 1) * HOUR);
        (hour, to.min(end).saturating_sub(from.max(begin)))
    })
}

/// Sums of use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// Number of granted leases.
    pub leases: u64,
    /// Number of ended programs.
    pub programs: u64,
    /// Time of leases, each GPU of a lease counted, also one that it shares.
    pub gpu_usec: u64,
    /// Time with GPU work or copies, each program counted.
    pub busy_usec: u64,
    /// Bytes copied to the GPUs.
    pub bytes_to_device: u64,
    /// Bytes copied from the GPUs.
    pub bytes_from_device: u64,
    /// Number of granted leases by the [bucket](bucket) of their wait.
    pub waits: BTreeMap<u8, u64>,
}

impl Usage {
    /// Adds other sums to these.
    pub fn add(&mut self, other: &Self) {
        let Self { leases, programs, gpu_usec, busy_usec, bytes_to_device, bytes_from_device, waits } = other;
        for (sum, n) in [
            (&mut self.leases, leases),
            (&mut self.programs, programs),
            (&mut self.gpu_usec, gpu_usec),
            (&mut self.busy_usec, busy_usec),
            (&mut self.bytes_to_device, bytes_to_device),
            (&mut self.bytes_from_device, bytes_from_device),
        ] {
            *sum = sum.saturating_add(*n);
        }
        for (bucket, n) in waits {
            let sum = self.waits.entry(*bucket).or_default();
            *sum = sum.saturating_add(*n);
        }
    }

    /// Returns the sums for people.
    pub fn shown(&self) -> UsageSums {
        UsageSums {
            leases: self.leases,
            programs: self.programs,
            gpu_usec: self.gpu_usec,
            busy_usec: self.busy_usec,
            bytes_to_device: self.bytes_to_device,
            bytes_from_device: self.bytes_from_device,
            wait_p50_usec: self.wait_usec(50),
            wait_p95_usec: self.wait_usec(95),
        }
    }

    /// Returns the wait in microseconds that a part of the granted leases did not exceed.
    ///
    /// It is at most an eighth too long; `None` without a lease.
    fn wait_usec(&self, percent: u64) -> Option<u64> {
        let all: u128 = self.waits.values().map(|n| u128::from(*n)).sum();
        let rank = (all * u128::from(percent)).div_ceil(100).max(1);
        let mut seen = 0;
        let within = |(_, n): &(&u8, &u64)| {
            seen += u128::from(**n);
            seen >= rank
        };
        self.waits.iter().find(within).map(|(bucket, _)| longest(*bucket))
    }
}

/// Returns the bucket of a wait: 0 below a millisecond, then eight for each power of two.
pub fn bucket(wait_usec: u64) -> u8 {
    let ms = wait_usec / 1000;
    match ms.checked_ilog2() {
        None => 0,
        Some(power) => {
            let eighth = ((u128::from(ms) << 3) >> power) as u32 & 7;
            u8::try_from(1 + power * 8 + eighth).unwrap_or(u8::MAX)
        }
    }
}

/// Returns the longest wait of a bucket in microseconds.
fn longest(bucket: u8) -> u64 {
    match bucket.checked_sub(1).map(u64::from) {
        None => 0,
        Some(n) => (((9 + n % 8) * 1000) << (n / 8)) / 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_divided_among_its_hours() {
        assert_eq!(hours(3000, 3100).collect::<Vec<_>>(), [(0, 100)]);
        assert_eq!(hours(3000, 7300).collect::<Vec<_>>(), [(0, 600), (1, 3600), (2, 100)]);
        assert_eq!(hours(3600, 3600).map(|(_, seconds)| seconds).sum::<u64>(), 0);
        assert_eq!(hours(7300, 3000).count(), 0, "a clock that was set back");
    }

    #[test]
    fn a_bucket_holds_its_waits_and_no_longer_ones() {
        assert_eq!((bucket(0), bucket(999), longest(0)), (0, 0, 0));
        for ms in (1..5000).chain([86_400_000, 1 << 31]) {
            let longest = longest(bucket(ms * 1000));
            assert!(longest > ms * 1000 && longest <= ms * 1125, "{ms} ms: {longest} us");
            assert!(bucket(ms * 1000) >= bucket((ms - 1) * 1000));
        }
        assert_eq!(bucket(u64::MAX), u8::MAX);
    }

    #[test]
    fn percentiles_of_waits() {
        assert_eq!(Usage::default().wait_usec(50), None);
        let mut usage = Usage::default();
        for (wait, n) in [(0, 90), (10_000_000, 9), (3_600_000_000, 1)] {
            usage.add(&Usage { waits: [(bucket(wait), n)].into(), ..Usage::default() });
        }
        assert_eq!(usage.wait_usec(50), Some(0));
        assert_eq!(usage.wait_usec(90), Some(0));
        let tenth = usage.wait_usec(95).unwrap();
        assert!((10_000_000..11_250_000).contains(&tenth), "{tenth}");
        assert!(usage.wait_usec(100) >= Some(3_600_000_000));
    }

    #[test]
    fn owners_are_users_the_machine_and_others() {
        assert_eq!(
            (uid(MACHINE), uid(owner(0)), uid(owner(u32::MAX)), uid(OTHERS)),
            (None, Some(0), Some(u32::MAX), None)
        );
    }
}
