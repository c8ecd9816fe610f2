//! Sums of GPU use as servers' and clients' command lines show them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::units::{human_bytes, human_duration};

/// Headings of [`UsageSums::cells`].
pub const COLUMNS: [&str; 8] =
    ["GPU HOURS", "BUSY", "TO GPU", "FROM GPU", "LEASES", "PROGRAMS", "WAIT P50", "WAIT P95"];

/// Use of a server's GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageSums {
    /// Number of granted leases.
    pub leases: u64,
    /// Number of ended programs.
    pub programs: u64,
    /// Time of leases, each of their GPUs counted.
    pub gpu_usec: u64,
    /// Time with GPU work or copies, each program counted.
    pub busy_usec: u64,
    /// Bytes copied to the GPUs.
    pub bytes_to_device: u64,
    /// Bytes copied from the GPUs.
    pub bytes_from_device: u64,
    /// Median wait of the granted leases; `None` without one.
    pub wait_p50_usec: Option<u64>,
    /// 95th percentile of it.
    pub wait_p95_usec: Option<u64>,
}

impl UsageSums {
    /// Returns the cells of a table's row, in the order of [`COLUMNS`].
    pub fn cells(&self) -> [String; 8] {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let wait = |usec: Option<u64>| or_dash(usec.map(|usec| human_duration(Duration::from_micros(usec))));
        let busy = self.busy_usec.checked_mul(100).and_then(|busy| busy.checked_div(self.gpu_usec));
        [
            format!("{:.1}", self.gpu_usec as f64 / 3.6e9),
            or_dash(busy.map(|percent| format!("{percent}%"))),
            human_bytes(self.bytes_to_device),
            human_bytes(self.bytes_from_device),
            self.leases.to_string(),
            self.programs.to_string(),
            wait(self.wait_p50_usec),
            wait(self.wait_p95_usec),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_for_people() {
        assert_eq!(UsageSums::default().cells(), ["0.0", "-", "0 B", "0 B", "0", "0", "-", "-"]);
        let sums = UsageSums {
            gpu_usec: 7_200_000_000,
            busy_usec: 1_800_000_000,
            bytes_to_device: 3 << 30,
            wait_p95_usec: Some(90_000_000),
            ..UsageSums::default()
        };
        assert_eq!(sums.cells(), ["2.0", "25%", "3 GiB", "0 B", "0", "0", "-", "1 min"]);
    }
}
