//! Measurements with one number of lanes, on the connections of a program.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpusession_link::lanes::{HostRange, Lanes, On, Sent};
use gpusession_link::link::{Begun, Caller};
use gpusession_link::load::usage;
use gpusession_link::{Events, Link, LinkLost};
use gpusession_proto::frame::{Writer, op};
use gpusession_proto::grant::Endpoint;
use gpusession_proto::measure::{MAX_TRANSFER, Request, Usage};

/// Most round trips that are measured.
const MAX_SAMPLES: usize = 10_000;
/// Bytes of the first transfer; each next one has twice as many while it is short.
const FIRST_TRANSFER: usize = 256 << 10;
/// Transfers under way at a time: a lane always has the next one's bytes.
const DEPTH: usize = 2;
/// Part of a direction's time that one transfer takes at most.
const TRANSFER_PARTS: u32 = 16;
const CALLER: Caller = Caller { thread: 1, ctx: 0 };
const STREAM: On = On { ctx: 0, stream: 0, blocking: true };

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    ToServer,
    FromServer,
}

/// Use of processors by one end during a transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    /// Processors in use by the measuring process.
    pub own: f64,
    /// Processors that it may use.
    pub processors: u64,
    /// Busy part of all processors of the host; `None` if it is unknown.
    pub busy: Option<f64>,
}

/// Rate of one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rate {
    pub bytes_per_s: f64,
    pub here: Load,
    pub there: Load,
}

/// Result of one series.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub encrypted: bool,
    pub lanes: u16,
    /// Round trips in ascending order.
    pub round_trips: Vec<Duration>,
    pub to_server: Rate,
    pub from_server: Rate,
}

/// Memory of all transfers, which lives as long as the process.
///
/// Threads of a lost link may still use it, and the process ends soon. Transfers share it, as
/// copies of a program that uses one buffer for all of them.
#[derive(Clone, Copy)]
pub struct Memory {
    address: usize,
}

impl Memory {
    /// Allocates the memory, and touches each page.
    pub fn new() -> Self {
        let pages = vec![0x5a_u8; MAX_TRANSFER as usize];
        Self { address: pages.leak().as_mut_ptr() as usize }
    }

    fn range(&self, len: usize) -> HostRange {
        // SAFETY: the memory is mapped, readable and writable until the process exits; `len` is at
        // most MAX_TRANSFER, so the range lies in it. No reference to it exists.
        unsafe { HostRange::new(self.address, len.min(MAX_TRANSFER as usize)) }
    }
}

/// Takes no part in what a worker sends unasked; an endpoint sends nothing of it.
struct Quiet;

impl Events for Quiet {
    fn output(&self, _stdout: &[u8], _stderr: &[u8]) {}
    fn call_host(&self, _link: &Arc<Link>, _id: u64, _status: i32) {}
    fn host_changed(&self, _region: u64, _offset: u64, _bytes: &[u8]) {}
    fn lost(&self, _reason: &str) {}
}

/// Measures for about `time` on new connections; `phase` is called before each part.
pub fn measure(
    endpoint: &Endpoint,
    lanes: u16,
    time: Duration,
    memory: Memory,
    mut phase: impl FnMut(&str),
) -> Result<Series, LinkLost> {
    phase("round trips");
    let (link, greeting) = Link::open(endpoint, Box::new(Quiet), |_| {})?;
    if greeting.status != 0 {
        return Err(LinkLost(format!("the endpoint refuses the greeting: {}", greeting.status)));
    }
    let measured = (|| {
        let round_trips = round_trips(&link, time / 5)?;
        let opened = link.lanes_of(lanes)?;
        let mut rate = |direction| {
            phase(match direction {
                Direction::ToServer => "to the server",
                Direction::FromServer => "from the server",
            });
            transfers(&link, opened, direction, time * 2 / 5, memory)
        };
        Ok(Series {
            encrypted: link.encrypted(),
            lanes,
            round_trips,
            to_server: rate(Direction::ToServer)?,
            from_server: rate(Direction::FromServer)?,
        })
    })();
    link.close();
    measured
}

fn round_trips(link: &Link, time: Duration) -> Result<Vec<Duration>, LinkLost> {
    let echo = || link.call(op::MEASURE, CALLER, |w| Request::Echo.write(w));
    // The first ones start threads at the other end.
    for _ in 0..8 {
        echo()?;
    }
    let (mut found, begun) = (Vec::new(), Instant::now());
    while found.is_empty() || begun.elapsed() < time && found.len() < MAX_SAMPLES {
        let sent = Instant::now();
        echo()?;
        found.push(sent.elapsed());
    }
    found.sort_unstable();
    Ok(found)
}

fn usage_there(link: &Link) -> Result<Usage, LinkLost> {
    let reply = link.call(op::MEASURE, CALLER, |w| Request::Usage.write(w))?;
    Usage::read(&mut reply.reader()).map_err(|e| LinkLost(e.to_string()))
}

/// A transfer under way.
struct Transfer {
    call: Begun,
    sent: Option<Sent>,
    len: usize,
}

impl Transfer {
    fn begin(
        link: &Link,
        lanes: &Lanes,
        direction: Direction,
        range: HostRange,
        len: usize,
    ) -> Result<Self, LinkLost> {
        let (call, sent) = match direction {
            Direction::ToServer => {
                let body = |w: &mut Writer<'_>| Request::Take(len as u64).write(w);
                let call = link.begin_call(op::MEASURE, CALLER, body)?;
                let sent = lanes.send(call.seq, lanes.upload(range, false));
                (call, Some(sent))
            }
            Direction::FromServer => {
                let body = |w: &mut Writer<'_>| {
                    Request::Give(len as u64).write(w);
                    link.down.expect(w.seq(), range, STREAM, false, Vec::new());
                };
                (link.begin_call(op::MEASURE, CALLER, body)?, None)
            }
        };
        Ok(Self { call, sent, len })
    }

    /// Waits for the transfer; returns its bytes.
    fn finish(self, link: &Link) -> Result<u64, LinkLost> {
        let seq = self.call.seq;
        let whole = match self.sent {
            Some(sent) => {
                let whole = link.wait_sent(&sent);
                link.finish_call(self.call)?;
                whole
            }
            None => {
                link.finish_call(self.call)?;
                link.down.wait(seq) == 0
            }
        };
        if whole { Ok(self.len as u64) } else { Err(LinkLost("the server closed a lane".into())) }
    }
}

fn transfers(
    link: &Link,
    lanes: &Lanes,
    direction: Direction,
    time: Duration,
    memory: Memory,
) -> Result<Rate, LinkLost> {
    let begin = |len| Transfer::begin(link, lanes, direction, memory.range(len), len);
    let (begun, mut len) = (Instant::now(), FIRST_TRANSFER);
    // A transfer long enough to fill the lanes, and short enough for the time.
    loop {
        let since = Instant::now();
        begin(len)?.finish(link)?;
        if since.elapsed() * TRANSFER_PARTS >= time || len >= MAX_TRANSFER as usize {
            break;
        }
        len *= 2;
    }
    let (here, there, since) = (usage(), usage_there(link)?, Instant::now());
    let (mut under_way, mut bytes) = (VecDeque::new(), 0);
    loop {
        while under_way.len() < DEPTH && (bytes == 0 && under_way.is_empty() || begun.elapsed() < time) {
            under_way.push_back(begin(len)?);
        }
        let Some(next) = under_way.pop_front() else { break };
        bytes += Transfer::finish(next, link)?;
    }
    let took = since.elapsed();
    let usec = took.as_micros() as u64;
    let load = |now: Usage, before: Usage| Load {
        own: now.own_since(&before, usec),
        processors: now.processors,
        busy: now.busy_since(&before),
    };
    Ok(Rate {
        bytes_per_s: bytes as f64 / took.as_secs_f64(),
        here: load(usage(), here),
        there: load(usage_there(link)?, there),
    })
}
