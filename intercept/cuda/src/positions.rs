//! Positions in a worker's log: the last work of streams, and work that is known to be done.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpusession_link::lanes::On;

/// A stream whose work before a position is covered: it is complete when the covering work is.
pub type Cover = (On, u64);

/// Wait for another stream's work.
#[derive(Clone, Copy)]
struct Wait {
    cover: Cover,
    /// Position of the wait's own frame, of the first one for a stream that was waited for again.
    since: u64,
}

/// Handle that stands for every stream of a context that is ordered with its default stream.
const ANY_BLOCKING: u64 = u64::MAX;

/// Returns `true` if these cover a stream's work at a position.
pub fn is_covered(covers: &[Cover], on: On, seq: u64) -> bool {
    covers.iter().any(|(covered, position)| {
        let any = covered.stream == ANY_BLOCKING && covered.ctx == on.ctx && on.blocking;
        (any || *covered == on) && seq < *position
    })
}

/// Positions of work in one worker's log.
#[derive(Default)]
pub struct Positions {
    /// Latest work on a default stream, or on a stream that is ordered with it.
    last_blocking: AtomicU64,
    /// Latest such work, except copies to the device.
    last_seen_blocking: AtomicU64,
    /// All work up to this position is complete, because a context was synchronized.
    ctx_done: AtomicU64,
    /// Latest work of streams that were destroyed before it was known to be complete.
    orphaned: AtomicU64,
}

impl Positions {
    /// Notes that the frame at this position has synchronized a context.
    pub fn context_synced(&self, seq: u64) {
        self.ctx_done.fetch_max(seq, Ordering::Relaxed);
    }

    /// Notes that a stream is destroyed, whose work continues.
    pub fn destroyed(&self, stream: &StreamPositions) {
        if !stream.complete(self) || !stream.is_flushed(self) {
            self.orphaned.fetch_max(stream.last(), Ordering::Relaxed);
        }
    }

    /// Returns `true` if all work of destroyed streams is known to be complete.
    pub fn orphans_done(&self) -> bool {
        self.ctx_done.load(Ordering::Relaxed) >= self.orphaned.load(Ordering::Relaxed)
    }
}

/// Positions of one stream's work; `log` is that of the stream's worker.
pub struct StreamPositions {
    on: On,
    last: AtomicU64,
    /// Position of the latest work except copies to the device, whose completion the host cannot
    /// observe.
    last_seen: AtomicU64,
    done: AtomicU64,
    /// Position of the latest wait that brought what the work before it has printed.
    flushed: AtomicU64,
    /// Position of the latest frame that holds later frames back until the stream's work is
    /// complete.
    barrier: AtomicU64,
    /// Streams that this one has waited for while their data was in transit.
    waited_for: Mutex<Vec<Wait>>,
}

impl StreamPositions {
    /// Makes the positions of a stream without work.
    pub fn new(on: On) -> Self {
        Self {
            on,
            last: AtomicU64::new(0),
            last_seen: AtomicU64::new(0),
            done: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            barrier: AtomicU64::new(0),
            waited_for: Mutex::default(),
        }
    }

    /// Returns the stream's name in transfers.
    pub fn on(&self) -> On {
        self.on
    }

    fn is_default(&self) -> bool {
        self.on.stream == 0
    }

    /// Notes that the frame at this position put work on the stream.
    #[inline]
    pub fn worked(&self, log: &Positions, seq: u64) {
        self.copied_in(log, seq);
        self.last_seen.fetch_max(seq, Ordering::Relaxed);
        if self.on.blocking {
            log.last_seen_blocking.fetch_max(seq, Ordering::Relaxed);
        }
    }

    /// Notes a frame that copies bytes, which the program has handed over, to memory that surely
    /// exists.
    pub fn copied_in(&self, log: &Positions, seq: u64) {
        self.last.fetch_max(seq, Ordering::Relaxed);
        if self.on.blocking {
            log.last_blocking.fetch_max(seq, Ordering::Relaxed);
        }
    }

    /// Returns `true` if only copies noted by `copied_in` may be incomplete.
    ///
    /// The program cannot tell when these are complete, as long as its next work stays behind them.
    /// `default` is the context's default stream, if the program has used it: the copies of a
    /// blocking stream may wait for its work.
    pub fn only_copies_in(&self, log: &Positions, default: Option<&Self>) -> bool {
        let last = if self.is_default() {
            log.last_seen_blocking.load(Ordering::Relaxed)
        } else if self.on.blocking
            && default.is_some_and(|default| !default.is_behind(log) || !default.only_own_copies_in(log))
        {
            return false;
        } else {
            self.last_seen.load(Ordering::Relaxed)
        };
        self.done.load(Ordering::Relaxed) >= last
    }

    /// Returns `true` if only the stream's own copies to the device may be incomplete.
    fn only_own_copies_in(&self, log: &Positions) -> bool {
        self.done(log, self.last_seen.load(Ordering::Relaxed))
    }

    /// Returns `true` if no later frame waits for the stream's work.
    pub fn is_behind(&self, log: &Positions) -> bool {
        let last = self.last();
        self.barrier.load(Ordering::Relaxed) >= last || self.done(log, last)
    }

    /// Notes that the frame at this position holds later frames back until the stream's work is
    /// complete.
    pub fn barred(&self, seq: u64) {
        self.barrier.fetch_max(seq, Ordering::Relaxed);
    }

    /// Returns `true` if no other stream has newer work that the stream's next work would wait for.
    pub fn is_newest(&self, log: &Positions) -> bool {
        !self.on.blocking || self.last() >= log.last_blocking.load(Ordering::Relaxed)
    }

    /// Returns `true` if all work on the stream is known to be complete.
    pub fn idle(&self, log: &Positions) -> bool {
        // The default stream is ordered with all blocking ones.
        let last = if self.is_default() {
            log.last_blocking.load(Ordering::Relaxed)
        } else {
            self.last.load(Ordering::Relaxed)
        };
        self.done.load(Ordering::Relaxed) >= last
    }

    /// Returns `true` if the stream is idle, and so is all work that its next work would wait for.
    pub fn quiet(&self, log: &Positions) -> bool {
        self.idle(log)
            && (self.is_default()
                || !self.on.blocking
                || self.done.load(Ordering::Relaxed) >= log.last_blocking.load(Ordering::Relaxed))
    }

    /// Returns `true` if the stream's work up to a position is known to be complete.
    pub fn done(&self, log: &Positions, seq: u64) -> bool {
        self.done.load(Ordering::Relaxed) >= seq || log.ctx_done.load(Ordering::Relaxed) >= seq
    }

    /// Returns `true` if the stream's own work is known to be complete.
    pub fn complete(&self, log: &Positions) -> bool {
        self.done(log, self.last())
    }

    /// Returns `true` if all that the stream's work has printed is there.
    ///
    /// The driver prints at waits, and not at queries or behind copies.
    pub fn is_flushed(&self, log: &Positions) -> bool {
        let last = self.last_seen.load(Ordering::Relaxed);
        self.flushed.load(Ordering::Relaxed) >= last || log.ctx_done.load(Ordering::Relaxed) >= last
    }

    /// Notes that a wait has found the stream's work up to this position complete.
    pub fn synced(&self, seq: u64) {
        self.finished(seq);
        self.flushed.fetch_max(seq, Ordering::Relaxed);
    }

    /// Notes that the stream's work up to this position is complete, and that the program has the
    /// memory which it has changed.
    pub fn finished(&self, seq: u64) {
        self.done.fetch_max(seq, Ordering::Relaxed);
    }

    /// Returns the position of the stream's latest work.
    pub fn last(&self) -> u64 {
        self.last.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Wait>> {
        self.waited_for.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the streams, each up to a position, that this one has waited for.
    pub fn waited_for(&self) -> Vec<Cover> {
        self.lock().iter().map(|wait| wait.cover).collect()
    }

    /// Returns the streams that it waited for before a position.
    fn waited_before(&self, seq: u64) -> Vec<Cover> {
        self.lock().iter().filter(|wait| wait.since < seq).map(|wait| wait.cover).collect()
    }

    /// Notes that the frame at `since` lets the stream wait for an event that covers these.
    pub fn covers_also(&self, more: &[Cover], since: u64) {
        more.iter().for_each(|cover| self.wait(Wait { cover: *cover, since }));
    }

    /// Takes over the waits of a stream that is destroyed.
    pub fn inherit(&self, gone: &Self) {
        let waits = gone.lock().clone();
        waits.into_iter().for_each(|wait| self.wait(wait));
    }

    fn wait(&self, new: Wait) {
        let (on, seq) = new.cover;
        if on == self.on {
            return;
        }
        let mut waits = self.lock();
        match waits.iter_mut().find(|known| known.cover.0 == on) {
            Some(known) => {
                known.cover.1 = known.cover.1.max(seq);
                known.since = known.since.min(new.since);
            }
            None => waits.push(new),
        }
    }

    /// Removes streams that it has waited for, after their data has landed.
    pub fn landed(&self, covers: &[Cover]) {
        self.lock().retain(|wait| !covers.contains(&wait.cover));
    }

    /// Returns the streams, each up to a position, whose work precedes the work of frame `seq`.
    ///
    /// `own` is the last position of the stream's own work that counts: of the default stream's
    /// work only that before `own` is covered. `default` is the context's default stream, if the
    /// program has used it. `others` are the context's streams that are ordered with it.
    pub fn covers<'a>(
        &self,
        seq: u64,
        own: u64,
        default: Option<&Self>,
        others: impl Iterator<Item = &'a Self>,
    ) -> Vec<Cover> {
        let mut covers = self.waited_for();
        covers.push((self.on, seq));
        if !self.on.blocking {
            return covers;
        }
        // Order of the default stream: work on a blocking stream follows the default stream's last
        // work. That in turn follows all earlier work of the blocking streams.
        let before = if self.is_default() {
            seq
        } else {
            let Some(default) = default else { return covers };
            let last = default.last().min(own);
            covers.extend(default.waited_before(last + 1));
            covers.push((default.on, last + 1));
            last
        };
        for other in others.filter(|other| other.on != self.on) {
            covers.extend(other.waited_before(before));
        }
        // Includes destroyed streams.
        covers.push((On { ctx: self.on.ctx, stream: ANY_BLOCKING, blocking: true }, before));
        covers
    }
}

#[cfg(test)]
mod tests;
