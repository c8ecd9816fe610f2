//! Frames of a measurement ([`op::MEASURE`]) between `gpusession netperf` and a server's endpoint.
//!
//! [`op::MEASURE`]: crate::frame::op::MEASURE

use crate::frame::{BadFrame, Reader, Writer};

/// Longest duration of one measurement, in seconds.
pub const MAX_SECONDS: u32 = 10;
/// Time that an endpoint exists in addition, for connections and handshakes, in seconds.
pub const GRACE_SECONDS: u32 = 5;
/// Longest transfer, in bytes.
pub const MAX_TRANSFER: u64 = 64 << 20;

/// Request to the endpoint; its frame has 64 bytes, and so has the reply to [`Request::Echo`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Reply at once.
    Echo,
    /// Reply when this number of bytes of the frame's transfer has arrived on the lanes.
    Take(u64),
    /// Reply, and send this number of bytes on the lanes.
    Give(u64),
    /// Reply with the [`Usage`] up to now.
    Usage,
}

impl Request {
    /// Writes the body.
    pub fn write(self, w: &mut Writer<'_>) {
        let (kind, bytes) = match self {
            Self::Echo => (0, 0),
            Self::Take(bytes) => (1, bytes),
            Self::Give(bytes) => (2, bytes),
            Self::Usage => (3, 0),
        };
        [kind, bytes, 0].into_iter().for_each(|word| w.word(word));
    }

    /// Reads a body.
    pub fn read(body: &[u8]) -> Result<Self, BadFrame> {
        let mut r = Reader::new(body);
        let (kind, bytes, _) = (r.word()?, r.word()?, r.word()?);
        match kind {
            _ if !r.is_empty() || bytes > MAX_TRANSFER => Err(BadFrame("a measurement out of bounds")),
            0 => Ok(Self::Echo),
            1 | 2 if bytes == 0 => Err(BadFrame("a measurement without bytes")),
            1 => Ok(Self::Take(bytes)),
            2 => Ok(Self::Give(bytes)),
            3 => Ok(Self::Usage),
            _ => Err(BadFrame("an unknown measurement")),
        }
    }
}

/// Use of a host's processors, from counters that only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time of the process, in microseconds.
    pub own_usec: u64,
    /// Busy time of all processors of the host, in the kernel's ticks.
    pub busy: u64,
    /// Busy and idle time of all processors of the host, in the same ticks.
    pub total: u64,
    /// Processors that the process may use.
    pub processors: u64,
}

impl Usage {
    /// Writes a reply's body.
    pub fn write(self, w: &mut Writer<'_>) {
        [self.own_usec, self.busy, self.total, self.processors].into_iter().for_each(|word| w.word(word));
    }

    /// Reads a reply's body.
    pub fn read(r: &mut Reader<'_>) -> Result<Self, BadFrame> {
        let mut word = || r.word();
        Ok(Self { own_usec: word()?, busy: word()?, total: word()?, processors: word()? })
    }

    /// Sets the host's counters from the text of `/proc/stat`; leaves them unless it has them.
    pub fn with_host(self, stat: &str) -> Self {
        // user, nice, system, idle, iowait, irq, softirq, steal; guests count as user already.
        let ticks: Option<Vec<u64>> = stat.lines().next().and_then(|line| {
            let fields = line.strip_prefix("cpu ")?.split_whitespace().take(8);
            fields.map(|field| field.parse().ok()).collect()
        });
        match ticks.as_deref() {
            Some([user, nice, system, idle, iowait, rest @ ..]) => {
                let sum = |ticks: &[u64]| ticks.iter().fold(0, |sum: u64, n| sum.saturating_add(*n));
                let busy = sum(&[*user, *nice, *system, sum(rest)]);
                Self { busy, total: sum(&[busy, *idle, *iowait]), ..self }
            }
            _ => self,
        }
    }

    /// Returns the processors in use by the process since an earlier reading, `usec` before.
    pub fn own_since(&self, before: &Self, usec: u64) -> f64 {
        self.own_usec.saturating_sub(before.own_usec) as f64 / usec.max(1) as f64
    }

    /// Returns the busy part of the host since an earlier reading; `None` if it is unknown.
    pub fn busy_since(&self, before: &Self) -> Option<f64> {
        let total = self.total.checked_sub(before.total).filter(|total| *total > 0)?;
        Some(self.busy.saturating_sub(before.busy) as f64 / total as f64).filter(|busy| *busy <= 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{HEADER, Header};

    fn body(fill: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
        let mut buf = Vec::new();
        let mut w = Writer::new(&mut buf, &Header::empty());
        fill(&mut w);
        w.finish();
        assert!(buf.len() >= HEADER);
        buf
    }

    #[test]
    fn requests_have_64_bytes_and_bounds() {
        for request in [Request::Echo, Request::Take(1), Request::Give(MAX_TRANSFER), Request::Usage] {
            let frame = body(|w| request.write(w));
            assert_eq!(frame.len(), 64);
            assert_eq!(Request::read(&frame[HEADER..]), Ok(request));
        }
        for words in [&[1, MAX_TRANSFER + 1, 0][..], &[1, 0, 0], &[2, 0, 0], &[4, 0, 0], &[0], &[0; 4]] {
            let frame = body(|w| words.iter().for_each(|word| w.word(*word)));
            assert!(Request::read(&frame[HEADER..]).is_err(), "{words:?}");
        }
    }

    #[test]
    fn use_of_processors_is_a_difference_that_hostile_counters_cannot_break() {
        let before = Usage::default().with_host("cpu  10 0 10 60 20 0 0 0 5 0\ncpu0 1 2 3\n");
        assert_eq!((before.busy, before.total), (20, 100));
        let after = Usage { own_usec: 1_500_000, ..before }.with_host("cpu  30 10 20 100 20 10 5 5 9 0\n");
        assert_eq!(after.own_since(&before, 1_000_000), 1.5);
        assert_eq!(after.busy_since(&before), Some(0.6));
        assert_eq!(before.own_since(&after, 0), 0.0);
        assert_eq!(before.busy_since(&after), None);
        for text in ["", "cpu", "cpu  1 2 x 4 5 6 7 8", "cpu  1 2 3", "intr 1 2 3 4 5 6 7 8"] {
            assert_eq!(Usage::default().with_host(text), Usage::default(), "{text}");
        }
        let huge = Usage { busy: u64::MAX, total: 1, ..Usage::default() };
        assert_eq!(huge.busy_since(&Usage::default()), None);
        let most = format!("cpu {0} {0} {0} {0} {0}", u64::MAX);
        assert_eq!(Usage::default().with_host(&most).total, u64::MAX);
    }
}
