//! Percentiles of round trips, and the part of the way that limits a rate.

use std::time::Duration;

use super::series::{Direction, Load, Rate};

/// Part of a processor's, or all processors' time from which it limits a rate.
const FULL: f64 = 0.85;
/// Part of the busy time below which others keep a host busy.
const MINOR: f64 = 0.5;

/// Returns the longest of the shortest round trips, of which `part` thousandths count.
///
/// `None` without enough samples: one has a median, the others need one sample beyond them.
pub fn percentile(ascending: &[Duration], part: usize) -> Option<Duration> {
    let beyond = ascending.len() * (1000 - part) / 1000;
    if beyond == 0 && part > 500 {
        return None;
    }
    ascending.get(ascending.len().checked_sub(beyond + 1)?).copied()
}

/// Part of the way that limits a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Processors of this machine, by the measurement itself.
    ProcessorHere,
    /// Processors of the server, by the measurement itself.
    ProcessorThere,
    /// Other programs of this machine use its processors.
    OthersHere,
    /// Other programs of the server use its processors.
    OthersThere,
    /// Neither end's processors are busy.
    Link,
}

impl Limit {
    /// Returns the word of `--json`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ProcessorHere => "client-processor",
            Self::ProcessorThere => "server-processor",
            Self::OthersHere => "client-busy",
            Self::OthersThere => "server-busy",
            Self::Link => "link",
        }
    }

    /// Explains a limit of a direction.
    pub fn sentence(self, direction: Direction) -> String {
        let to = match direction {
            Direction::ToServer => "To the server",
            Direction::FromServer => "From the server",
        };
        let why = match self {
            Self::ProcessorHere => "this machine's processors limit the rate",
            Self::ProcessorThere => "the server's processors limit the rate",
            Self::OthersHere => "other programs keep this machine's processors busy",
            Self::OthersThere => "other programs keep the server's processors busy",
            Self::Link => "the link limits the rate: both ends have idle processors",
        };
        format!("{to}, {why}.")
    }
}

/// Returns how much of the processors that `lanes` lanes can use an end uses, from 0 to 1, and
/// whether that is the measurement's own work.
///
/// A lane's thread uses one processor at most.
fn fullness(load: &Load, lanes: u16) -> (f64, bool) {
    let processors = load.processors.max(1) as f64;
    let own = load.own / f64::from(lanes).min(processors);
    match load.busy {
        Some(busy) if busy > own => (busy, load.own >= MINOR * busy * processors),
        _ => (own, true),
    }
}

/// Returns the part that limits a rate on this number of lanes.
pub fn limit(rate: &Rate, lanes: u16) -> Limit {
    let ((here, own_here), (there, own_there)) = (fullness(&rate.here, lanes), fullness(&rate.there, lanes));
    let client = here > there || here == there && rate.here.own >= rate.there.own;
    match (client, here.max(there) >= FULL) {
        (_, false) => Limit::Link,
        (true, _) if own_here => Limit::ProcessorHere,
        (true, _) => Limit::OthersHere,
        (false, _) if own_there => Limit::ProcessorThere,
        (false, _) => Limit::OthersThere,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_need_samples_beyond_them() {
        let ascending: Vec<Duration> = (1..=1000).map(Duration::from_micros).collect();
        let at = |n: usize, part: usize| percentile(&ascending[..n], part).map(|d| d.as_micros());
        assert_eq!([500, 900, 990, 999].map(|part| at(1000, part)), [500_u128, 900, 990, 999].map(Some));
        assert_eq!([500, 900, 990, 999].map(|part| at(100, part)), [Some(50), Some(90), Some(99), None]);
        assert_eq!([500, 900].map(|part| at(1, part)), [Some(1), None]);
        assert_eq!(at(0, 500), None);
    }

    #[test]
    fn the_fuller_end_limits_the_rate_else_the_link() {
        let load = |own, processors, busy| Load { own, processors, busy };
        let idle = load(0.1, 16, Some(0.05));
        let of = |here, there, lanes| limit(&Rate { bytes_per_s: 1.0, here, there }, lanes);
        assert_eq!(of(idle, idle, 8), Limit::Link);
        // One lane's thread uses its whole processor, of many.
        assert_eq!(of(load(0.97, 16, Some(0.08)), idle, 1), Limit::ProcessorHere);
        assert_eq!(of(load(0.97, 16, Some(0.08)), idle, 8), Limit::Link);
        assert_eq!(of(idle, load(1.9, 2, Some(1.0)), 8), Limit::ProcessorThere);
        assert_eq!(of(idle, load(0.1, 2, Some(0.97)), 8), Limit::OthersThere);
        assert_eq!(of(load(0.2, 4, Some(0.99)), idle, 8), Limit::OthersHere);
        // Both ends on one host: the larger part of the work.
        let shared = |own| load(own, 2, Some(1.0));
        assert_eq!(of(shared(0.9), shared(1.1), 8), Limit::ProcessorThere);
        assert_eq!(of(shared(1.1), shared(0.9), 8), Limit::ProcessorHere);
        // A server that tells nonsense.
        assert_eq!(of(idle, load(f64::MAX, 0, None), 8), Limit::ProcessorThere);
        assert_eq!(of(idle, load(0.0, 0, None), 8), Limit::Link);
        for limit in [Limit::ProcessorHere, Limit::Link] {
            assert!(limit.sentence(Direction::ToServer).starts_with("To the server, "));
        }
    }
}
