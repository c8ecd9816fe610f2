//! Streams: queues of work, each served by its own thread while it has work.

use crate::driver::context::Life;
use crate::driver::driver;
use crate::driver::graph::Capturing;
use crate::driver::op::Op;
use crate::errors::{self, Error, Result};
use crate::ipc::Counter;
use crate::registry::Registry;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub static STREAMS: Registry<Stream> = Registry::new();

/// Time without work after which a stream's thread exits; the next entry starts another.
const IDLE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Legacy,
    PerThread,
    User,
}

/// A position in a stream, after entry `seq`.
#[derive(Clone)]
pub struct Point {
    pub stream: Arc<Stream>,
    pub seq: u64,
}

impl Point {
    pub fn reached(&self) -> bool {
        *self.stream.done.lock() >= self.seq
    }

    pub fn wait(&self) {
        let mut done = self.stream.done.lock();
        while *done < self.seq {
            self.stream.done_changed.wait(&mut done);
        }
    }
}

struct Entry {
    seq: u64,
    after: Vec<Point>,
    op: Op,
}

#[derive(Default)]
struct Queue {
    entries: VecDeque<Entry>,
    submitted: u64,
    serving: bool,
}

pub struct Stream {
    pub id: u64,
    pub role: Role,
    pub flags: u32,
    /// A smaller number is a higher priority; an attribute changes it.
    pub priority: AtomicI32,
    pub context: usize,
    pub device: u32,
    pub life: Arc<Life>,
    queue: Mutex<Queue>,
    room: Condvar,
    work: Condvar,
    done: Mutex<u64>,
    done_changed: Condvar,
    pub capture: Mutex<Option<Capturing>>,
}

impl Stream {
    pub fn new(
        role: Role,
        flags: u32,
        priority: i32,
        context: usize,
        device: u32,
        life: Arc<Life>,
    ) -> Arc<Stream> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(Stream {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            role,
            flags,
            priority: AtomicI32::new(priority),
            context,
            device,
            life,
            queue: Mutex::default(),
            room: Condvar::new(),
            work: Condvar::new(),
            done: Mutex::new(0),
            done_changed: Condvar::new(),
            capture: Mutex::new(None),
        })
    }

    /// Returns `true` if the stream is ordered with the legacy stream.
    pub fn blocking(&self) -> bool {
        self.role == Role::PerThread || self.flags & 1 == 0
    }

    /// Returns the point after all entries submitted so far.
    pub fn last(self: &Arc<Self>) -> Point {
        Point { stream: self.clone(), seq: self.queue.lock().submitted }
    }

    /// Adds an entry; blocks while the queue is full.
    pub fn push(self: &Arc<Self>, op: Op, after: Vec<Point>) -> Result<Point> {
        let limit = driver()?.config.queue;
        let mut q = self.queue.lock();
        while q.entries.len() >= limit {
            self.room.wait(&mut q);
        }
        q.submitted += 1;
        let seq = q.submitted;
        q.entries.push_back(Entry { seq, after, op });
        if q.serving {
            self.work.notify_one();
        } else {
            q.serving = true;
            let stream = self.clone();
            let spawned = std::thread::Builder::new()
                .name(format!("simgpu-s{}", self.id))
                .spawn(move || stream.serve());
            if spawned.is_err() {
                q.serving = false;
                q.entries.pop_back();
                q.submitted -= 1;
                return Err(crate::errors::OUT_OF_MEMORY);
            }
        }
        Ok(Point { stream: self.clone(), seq })
    }

    fn serve(self: Arc<Self>) {
        let mut random = Random::new(driver().map_or(1, |d| d.config.seed) ^ (self.id << 17));
        loop {
            let entry = {
                let mut q = self.queue.lock();
                loop {
                    if let Some(entry) = q.entries.pop_front() {
                        self.room.notify_one();
                        break entry;
                    }
                    if self.work.wait_for(&mut q, IDLE_TIMEOUT).timed_out() && q.entries.is_empty() {
                        q.serving = false;
                        return;
                    }
                }
            };
            for point in &entry.after {
                point.wait();
            }
            if !self.life.over() {
                if let Ok(d) = driver()
                    && d.config.delay_us > 0
                    && random.draw().is_multiple_of(d.config.delay_one_in)
                {
                    std::thread::sleep(Duration::from_micros(random.draw() % d.config.delay_us));
                }
                // A panic here must not leave callers waiting for an entry that never completes.
                let run = std::panic::AssertUnwindSafe(|| entry.op.run(&self));
                if let Err(Error(code)) = std::panic::catch_unwind(run).unwrap_or(Err(errors::UNKNOWN)) {
                    self.life.fail(code);
                }
            } else {
                entry.op.abandon();
            }
            // The entry's objects are dropped before its completion is visible.
            drop(entry.op);
            drop(entry.after);
            *self.done.lock() = entry.seq;
            self.done_changed.notify_all();
        }
    }
}

/// A small generator for delays (xorshift), so that a seed reproduces a run.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }
}

pub static EVENTS: Registry<Event> = Registry::new();

/// The last recording of an event.
#[derive(Clone)]
pub struct Recorded {
    pub point: Point,
    pub time: Arc<std::sync::OnceLock<Instant>>,
}

#[derive(Default)]
pub struct EventState {
    pub recorded: Option<Recorded>,
    /// A recording in a capture: the capture, and the nodes that precede the event.
    pub captured: Option<(Arc<crate::driver::graph::Capture>, Vec<Arc<crate::driver::graph::Node>>)>,
}

pub struct Event {
    pub flags: u32,
    pub context: usize,
    pub device: u32,
    /// Records that other processes see, too.
    pub shared: Option<Arc<Counter>>,
    pub state: Mutex<EventState>,
}
