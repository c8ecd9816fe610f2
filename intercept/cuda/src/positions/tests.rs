use std::collections::{HashMap, HashSet};

use super::*;

const CTX: u64 = 7;

fn on(stream: u64, blocking: bool) -> On {
    On { ctx: CTX, stream, blocking }
}

fn stream(handle: u64, blocking: bool) -> StreamPositions {
    StreamPositions::new(on(handle, blocking))
}

#[test]
fn default_stream_is_idle_only_when_all_blocking_work_is_done() {
    let log = Positions::default();
    let (default, blocking, other) = (stream(0, true), stream(1, true), stream(2, false));
    assert!(default.idle(&log), "no work yet");
    other.worked(&log, 4);
    assert!(default.idle(&log), "the default stream has no order with a non-blocking stream");
    blocking.worked(&log, 5);
    assert!(!default.idle(&log));
    default.synced(4);
    assert!(!default.idle(&log), "the blocking stream's work came later");
    default.synced(5);
    assert!(default.idle(&log));
    assert!(!blocking.idle(&log), "only its own synchronization shows that");
}

#[test]
fn blocking_stream_is_quiet_only_without_other_blocking_work() {
    let log = Positions::default();
    let (default, blocking, other) = (stream(0, true), stream(1, true), stream(2, false));
    blocking.worked(&log, 1);
    blocking.synced(2);
    assert!(blocking.quiet(&log));
    default.worked(&log, 3);
    assert!(blocking.idle(&log) && !blocking.quiet(&log), "its next work waits for the default stream");
    assert!(other.quiet(&log), "a non-blocking stream waits for no other");
}

#[test]
fn what_kernels_print_comes_with_a_wait_alone() {
    let log = Positions::default();
    let stream = stream(1, true);
    assert!(stream.is_flushed(&log), "no work yet");
    stream.worked(&log, 3);
    stream.finished(4);
    assert!(stream.complete(&log) && !stream.is_flushed(&log), "a query found it complete");
    log.destroyed(&stream);
    assert!(!log.orphans_done());
    stream.synced(5);
    assert!(stream.is_flushed(&log));
    stream.copied_in(&log, 6);
    assert!(stream.is_flushed(&log), "a copy prints nothing");
    stream.worked(&log, 7);
    log.context_synced(8);
    assert!(stream.is_flushed(&log) && log.orphans_done());
}

#[test]
fn barrier_completes_nothing() {
    let log = Positions::default();
    let (default, blocking) = (stream(0, true), stream(1, true));
    default.worked(&log, 3);
    default.barred(4);
    blocking.copied_in(&log, 5);
    assert!(default.is_behind(&log) && !default.complete(&log));
    assert!(!blocking.only_copies_in(&log, Some(&default)), "the copy waits for a kernel");
    default.synced(6);
    assert!(blocking.only_copies_in(&log, Some(&default)));
}

#[test]
fn copies_to_the_device_alone_need_no_wait() {
    let log = Positions::default();
    let (default, blocking, other) = (stream(0, true), stream(1, true), stream(2, false));
    for known in [&default, &other] {
        known.copied_in(&log, 3);
        assert!(known.only_copies_in(&log, Some(&default)) && !known.idle(&log));
        known.worked(&log, 4);
        assert!(!known.only_copies_in(&log, Some(&default)));
        known.synced(4);
        assert!(known.only_copies_in(&log, Some(&default)) && known.idle(&log));
    }
    blocking.copied_in(&log, 9);
    assert!(default.only_copies_in(&log, Some(&default)), "a copy to the device on another stream");
    blocking.worked(&log, 10);
    assert!(!default.only_copies_in(&log, Some(&default)), "work that the default stream follows");
}

#[test]
fn copies_of_a_blocking_stream_may_wait_for_the_default_streams_work() {
    let log = Positions::default();
    let (default, blocking) = (stream(0, true), stream(1, true));
    blocking.copied_in(&log, 3);
    assert!(blocking.only_copies_in(&log, None), "the program does not use the default stream");
    default.worked(&log, 4);
    blocking.copied_in(&log, 5);
    assert!(!blocking.only_copies_in(&log, Some(&default)), "a kernel, or a copy behind one");
    blocking.synced(6);
    blocking.copied_in(&log, 7);
    assert!(!blocking.only_copies_in(&log, Some(&default)), "its own synchronization does not show that");
    default.synced(8);
    assert!(blocking.only_copies_in(&log, Some(&default)));
    default.copied_in(&log, 9);
    assert!(!blocking.only_copies_in(&log, Some(&default)));
    default.barred(10);
    assert!(blocking.only_copies_in(&log, Some(&default)), "later frames stay behind the copy");
    default.worked(&log, 11);
    log.context_synced(12);
    assert!(blocking.only_copies_in(&log, Some(&default)));
    blocking.worked(&log, 13);
    assert!(!blocking.only_copies_in(&log, Some(&default)), "its own kernel");
}

#[test]
fn synchronized_context_completes_the_work_of_all_streams() {
    let log = Positions::default();
    let (blocking, other) = (stream(1, true), stream(2, false));
    blocking.synced(3);
    log.context_synced(10);
    log.context_synced(8);
    assert!(blocking.done(&log, 10) && other.done(&log, 10), "the later position stays");
    assert!(!blocking.done(&log, 11) && !other.done(&log, 11));
    other.synced(12);
    assert!(other.done(&log, 12) && !blocking.done(&log, 12));
}

#[test]
fn event_covers_a_stream_up_to_the_latest_position() {
    let waiting = stream(1, false);
    waiting.covers_also(&[(on(2, false), 5), (on(1, false), 9)], 10);
    waiting.covers_also(&[(on(2, false), 3), (on(3, false), 4)], 12);
    assert_eq!(waiting.waited_for(), [(on(2, false), 5), (on(3, false), 4)], "no entry for itself");
    let covers = waiting.covers(8, 8, None, [].into_iter());
    assert!(is_covered(&covers, on(2, false), 4) && !is_covered(&covers, on(2, false), 5));
    assert!(is_covered(&covers, on(1, false), 7) && !is_covered(&covers, on(1, false), 8));
    // Another thread waits for a later event, while this one settles what it knew.
    waiting.covers_also(&[(on(2, false), 6)], 13);
    waiting.landed(&[(on(2, false), 5), (on(3, false), 4)]);
    assert_eq!(waiting.waited_for(), [(on(2, false), 6)]);
}

#[test]
fn default_stream_covers_streams_that_no_longer_exist() {
    let log = Positions::default();
    let default = stream(0, true);
    default.worked(&log, 6);
    let covers = default.covers(7, 7, Some(&default), [].into_iter());
    assert!(is_covered(&covers, on(99, true), 6), "a destroyed stream was ordered with it");
    assert!(!is_covered(&covers, on(99, true), 7));
    assert!(!is_covered(&covers, on(99, false), 1), "a non-blocking stream never is");
    assert!(!is_covered(&covers, On { ctx: CTX + 1, stream: 99, blocking: true }, 1), "another context");
}

/// Streams of one context with the work that precedes each one's next work, by CUDA's rules.
struct Model {
    log: Positions,
    streams: Vec<StreamPositions>,
    /// Positions of the frames that precede the next work, by stream.
    before: Vec<HashMap<u64, u64>>,
    seq: u64,
}

impl Model {
    const DEFAULT: usize = 0;

    fn new() -> Self {
        let streams =
            vec![stream(0, true), stream(1, true), stream(2, true), stream(3, false), stream(4, false)];
        let before = vec![HashMap::new(); streams.len()];
        Self { log: Positions::default(), streams, before, seq: 0 }
    }

    fn covers(&self, at: usize, seq: u64, own: u64) -> Vec<Cover> {
        let blocking = self.streams.iter().skip(1).filter(|stream| stream.on.blocking);
        self.streams[at].covers(seq, own, Some(&self.streams[Self::DEFAULT]), blocking)
    }

    /// Appends work to a stream, which then follows what its order says.
    fn work(&mut self, at: usize) -> u64 {
        self.seq += 1;
        let on = self.streams[at].on;
        self.streams[at].worked(&self.log, self.seq);
        self.before[at].insert(self.seq, on.stream);
        let ordered: Vec<usize> = (1..self.streams.len()).filter(|i| self.streams[*i].on.blocking).collect();
        let merge = |before: &mut Vec<HashMap<u64, u64>>, to: usize, from: usize| {
            let more = before[from].clone();
            before[to].extend(more);
        };
        if at == Self::DEFAULT {
            // The default stream's work follows all earlier blocking work, and precedes all later.
            ordered.iter().for_each(|other| merge(&mut self.before, at, *other));
            ordered.iter().for_each(|other| merge(&mut self.before, *other, at));
        }
        self.seq
    }
}

/// Runs random programs with at most `waits` waits for events, and checks each one's covers.
fn for_random_programs(waits: usize, check: impl Fn(&Model, usize, &[Cover], &HashSet<u64>)) {
    let mut state = 1u64;
    let mut random = move |bound: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % bound
    };
    for _ in 0..300 {
        let mut model = Model::new();
        let mut waits = waits;
        // Covers and preceding frames of recorded events.
        let mut events: Vec<(Vec<Cover>, HashMap<u64, u64>)> = Vec::new();
        // Frames of records and waits, which are in the order and are no work that could land.
        let mut no_work = HashSet::new();
        for _ in 0..40 {
            let at = random(model.streams.len());
            match random(4) {
                0 if waits > 0 && !events.is_empty() => {
                    waits -= 1;
                    let (covers, before) = events[random(events.len())].clone();
                    model.before[at].extend(before);
                    let seq = model.work(at);
                    no_work.insert(seq);
                    model.streams[at].covers_also(&covers, seq);
                }
                1 => {
                    let seq = model.work(at);
                    no_work.insert(seq);
                    events.push((model.covers(at, seq, seq), model.before[at].clone()));
                }
                _ => drop(model.work(at)),
            }
            check(&model, at, &model.covers(at, model.seq + 1, model.seq), &no_work);
        }
    }
}

#[test]
fn covers_leave_out_no_work_that_precedes() {
    for_random_programs(usize::MAX, |model, at, covers, no_work| {
        for (seq, stream) in model.before[at].iter().filter(|(seq, _)| !no_work.contains(*seq)) {
            let on = model.streams[*stream as usize].on;
            assert!(is_covered(covers, on, *seq), "frame {seq} on {on:?}, seen from {at}: {covers:?}");
        }
    });
}

#[test]
fn covers_name_no_work_without_order() {
    // A second wait for the same stream may count from the first one on.
    for_random_programs(1, |model, at, covers, no_work| {
        for (i, stream) in model.streams.iter().enumerate() {
            let work = model.before[i].iter().filter(|(seq, on)| **on == i as u64 && !no_work.contains(*seq));
            for (seq, _) in work.filter(|(seq, _)| !model.before[at].contains_key(*seq)) {
                assert!(
                    !is_covered(covers, stream.on, *seq),
                    "frame {seq} on {i}, seen from {at}: {covers:?}"
                );
            }
        }
    });
}

#[test]
fn work_of_a_destroyed_stream_is_done_once_its_context_is_synchronized() {
    let log = Positions::default();
    let (idle, working) = (stream(1, true), stream(2, false));
    idle.worked(&log, 3);
    assert!(!idle.complete(&log));
    idle.synced(3);
    assert!(idle.complete(&log));
    log.destroyed(&idle);
    assert!(log.orphans_done());
    working.worked(&log, 5);
    log.destroyed(&working);
    log.context_synced(4);
    assert!(!log.orphans_done(), "the synchronization came before that work");
    log.context_synced(6);
    assert!(log.orphans_done());
}
